"""The command line of kvcascade, and the development tools that `make` runs."""
