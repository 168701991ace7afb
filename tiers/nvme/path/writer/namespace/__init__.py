"""One namespace in the writer: its files, its opening, its slots, its commits and its recency."""
