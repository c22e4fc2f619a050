"""Boosting when sites hold different columns: steps and protocol."""
