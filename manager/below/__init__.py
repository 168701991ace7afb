"""The port to the tiers below the first one, and its implementations in the scheduler's process."""
