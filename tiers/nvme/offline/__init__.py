"""Reading and repairing a namespace without being its engine."""
