"""Function-on-function regression by component-wise boosting from one round of sums.

Read ``model`` and ``arguments``. A model boosts on moments from a ``source``: a ``row_source`` (sites with
different rows, ``protocol`` and ``steps``), a ``column_source`` (different columns, ``vertical``), or a
``private_source`` (with noise, ``private``). ``learning`` has the base learners and the paths, ``report``
refits, effects and predictions, which ``results`` shows. ``explain`` is the dry run.
"""

from fedstat.models.boost import steps
from fedstat.models.boost.private import steps as private_steps
from fedstat.models.boost.vertical import steps as vertical_steps

__all__ = ["private_steps", "steps", "vertical_steps"]
