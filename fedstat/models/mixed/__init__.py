"""Mixed models over sites that hold different rows, with random effects that are nested in sites."""

from fedstat.models.mixed import steps

__all__ = ["steps"]
