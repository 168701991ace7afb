"""Transfers between the arena and the tiers below, by the mover process or by threads."""
