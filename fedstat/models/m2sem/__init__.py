"""Clusters of entities whose columns of mixed type are at several sites (M2-SEM)."""

from fedstat.models.m2sem import analyses, columns, steps

__all__ = ["analyses", "columns", "steps"]
