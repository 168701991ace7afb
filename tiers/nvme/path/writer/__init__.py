"""The writer of a path: slots, commits, eviction, capacity and resets of all its namespaces."""
