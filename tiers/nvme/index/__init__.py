"""Checks of the LMDB file of the block table, before LMDB maps it."""
