"""Prediction for entities with any pattern of missing blocks."""
