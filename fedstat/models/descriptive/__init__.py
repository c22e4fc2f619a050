"""Counts, tables and survival curves of sites, and tables of sites that hold different columns."""

from fedstat.models.descriptive import columns, noisy_steps, steps

__all__ = ["columns", "noisy_steps", "steps"]
