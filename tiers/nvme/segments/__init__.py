"""Segment files, their format, and their contents."""
