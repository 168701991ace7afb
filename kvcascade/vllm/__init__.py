"""Everything of the product that imports vLLM: spec, manager, worker, tier and policies."""
