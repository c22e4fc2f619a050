"""Curves in tables."""
