"""Build a cascade from its configuration."""
