"""Transfers between a worker's device and the arena."""
