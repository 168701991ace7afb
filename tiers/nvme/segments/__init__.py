"""Segment files, their format, and the bytes in them."""
