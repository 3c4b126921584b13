"""The published checkpoint layout: its table, reading and checking it, loading, writing it back."""
