"""Everything below the first tier: the port, and its implementation in this process."""
