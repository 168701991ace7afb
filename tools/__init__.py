"""Views and maintenance: what a person runs, and what `make` runs."""
