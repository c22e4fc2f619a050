"""Shared by families over sites with different columns: layout, moments, exchange, likelihood, prediction."""
