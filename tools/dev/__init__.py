"""Development commands: comparisons with vLLM, engine runs, demo and studies. Not in the wheel."""
