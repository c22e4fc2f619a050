"""Counts, tables and survival curves of sites that hold different rows."""

from fedstat.models.descriptive import steps

__all__ = ["steps"]
