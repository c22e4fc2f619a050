"""Synthetic tables from one private release of margins and a Gaussian copula."""

from fedstat.models.copula import steps

__all__ = ["steps"]
