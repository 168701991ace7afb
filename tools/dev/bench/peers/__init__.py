"""The systems that the benchmarks compare with: vLLM's own offloading and LMCache."""
