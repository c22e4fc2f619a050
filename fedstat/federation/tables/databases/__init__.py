"""Databases of institutions: sessions that only read, and rows that are read once and kept."""
