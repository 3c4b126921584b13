"""Data, losses, the optimizer and the loop."""
