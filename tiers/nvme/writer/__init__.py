"""Decisions about space: growth, capacity, owners and repairs."""
