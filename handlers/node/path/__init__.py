"""Nodes of a path: their process, their loop, their jobs, and the search for the writer."""
