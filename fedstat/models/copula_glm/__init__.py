"""Generalized linear models from one private release of margins and moments of bounded scores."""

from fedstat.models.copula_glm import steps

__all__ = ["steps"]
