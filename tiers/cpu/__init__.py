"""The CPU tier: a shared-memory arena of slots and the backend that allocates them."""
