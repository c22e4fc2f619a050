"""Predictions for new entities of sites with different columns."""
