"""Proximal Newton over institutions, for every distribution of the response."""
