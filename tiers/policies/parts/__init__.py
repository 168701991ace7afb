"""Parts that orders of eviction are made of."""
