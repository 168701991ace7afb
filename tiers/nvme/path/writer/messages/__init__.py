"""Answers of the writer to messages of nodes and to questions of tools."""
