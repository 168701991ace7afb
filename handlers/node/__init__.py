"""Transfers between the arena and the tiers below, by nodes: processes or threads."""
