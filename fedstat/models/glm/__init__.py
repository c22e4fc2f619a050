"""Generalized linear models when sites hold different rows: the fit of the pooled table."""

from fedstat.models.glm import noisy_steps, overdispersion, post_fit_steps, steps

__all__ = ["noisy_steps", "overdispersion", "post_fit_steps", "steps"]
