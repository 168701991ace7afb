"""Metrics, recordings and trace spans of a running cascade."""
