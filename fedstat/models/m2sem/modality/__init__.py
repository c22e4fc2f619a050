"""Measurement models of one block of columns: continuous and categorical."""
