"""Effects of a treatment on times to an event: weighted curves, restricted means and hazard ratios."""

from fedstat.models.survival_effect import steps

__all__ = ["steps"]
