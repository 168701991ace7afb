"""Measurements of the scheduler's thread: manager, index, start."""
