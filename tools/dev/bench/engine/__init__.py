"""Measurements with real engines."""
