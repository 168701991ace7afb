"""Engines of remote tiers: one file each, and the parts of one protocol."""
