"""Institutions: who holds what, what is asked of whom, and what left."""
