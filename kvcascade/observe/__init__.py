"""Metrics, events and recordings of a running cascade."""
