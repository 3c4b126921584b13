"""Device operations of HySparse: arrays in, arrays out.

Each operation has one plain definition (`<op>/reference.py`, the oracle) and faster backends behind
the same function. Nothing here knows models, configs or disks.
"""
