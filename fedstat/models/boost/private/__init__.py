"""Boosting from one release with noise (differential privacy)."""
