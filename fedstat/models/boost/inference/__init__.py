"""Statements beyond the path: refits with intervals, selection frequencies, tests."""
