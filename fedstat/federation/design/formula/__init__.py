"""Formulas: from text to a checked syntax tree of terms; no data is read."""
