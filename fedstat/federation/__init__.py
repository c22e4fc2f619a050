"""Institutions: their tables, what is asked of whom, and what left."""
