"""Discrimination and calibration of a model."""
