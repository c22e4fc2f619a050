"""Effects of a treatment over sites that hold different rows: weighting, standardization, both."""

from fedstat.models.treatment import steps

__all__ = ["steps"]
