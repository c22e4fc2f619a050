"""Generalized linear models when sites hold different rows: the fit of the pooled table."""

from fedstat.models.glm import overdispersion, post_fit_steps, steps

__all__ = ["overdispersion", "post_fit_steps", "steps"]
