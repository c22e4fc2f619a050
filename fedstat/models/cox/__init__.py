"""Cox regression over sites that hold different rows; each site has its own baseline hazard."""

from fedstat.models.cox import steps

__all__ = ["steps"]
