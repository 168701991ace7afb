"""Nodes of a remote tier: their process, their loop, and their messages."""
