"""Measurements of transfers between a GPU and the CPU tier."""
