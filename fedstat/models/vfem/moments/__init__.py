"""Sums of products of institutions' columns: by missing pattern, and between two of them."""
