"""Releases of records that are hardest to tell apart, and how well they are told apart nevertheless."""
