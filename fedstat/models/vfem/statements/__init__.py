"""Statements of a fit: estimates as they are reported, notes, tests of assumptions, smaller models."""
