"""The LMDB index of the NVMe tier."""
