"""Cox regression over sites that hold different rows, with a baseline hazard for each site or for all."""

from fedstat.models.cox import interval_steps, steps

__all__ = ["interval_steps", "steps"]
