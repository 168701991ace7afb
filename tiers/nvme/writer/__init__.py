"""Decisions about space: capacity, ownership, growth and repairs."""
