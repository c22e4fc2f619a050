"""Function-on-function regression by component-wise boosting from one round of sums."""

from fedstat.models.boost import steps
from fedstat.models.boost.private import steps as private_steps
from fedstat.models.boost.vertical import steps as vertical_steps

__all__ = ["private_steps", "steps", "vertical_steps"]
