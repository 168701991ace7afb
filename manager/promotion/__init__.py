"""Promotion of blocks below into the first tier: claims, their order, and whether loading pays."""
