"""Differential privacy: sensitivity, noise, and accounting."""
