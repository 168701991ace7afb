"""The configuration: one schema, sizes, and the machine that it has to fit."""
