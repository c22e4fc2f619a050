"""Generalized linear models of columns at several sites, with selection."""

from fedstat.models.vglm import steps

__all__ = ["steps"]
