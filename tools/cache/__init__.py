"""What the commands do with a cache on disk: look, verify, repair, clear out, carry away."""
