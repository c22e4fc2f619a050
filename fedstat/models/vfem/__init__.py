"""Regression where blocks of whole sites are missing (VFEM).

Read ``model`` first: the arguments; ``base_model`` has what both classes share, ``explain`` their dry run. A
fit takes one of three ways:

* ``protocol`` requests sums by missing pattern (:mod:`fedstat.models.vertical.exchange`).
* ``joint_protocol``, with ``joint_steps`` and ``joint_likelihood``, fits responses that are not normal with
  columns that are correlated between sites.
* ``iteration`` and ``covariance`` are the published iteration with its standard errors, and independent
  blocks of other responses.

``outcome`` is what a fit returns. ``base_results``, ``results``, ``diagnostics`` and ``notes`` are made from
it; ``submodels`` and ``selection`` fit again on fewer columns, ``corrections`` for skewed columns, and
``weighted``, with ``weighted_steps``, with weights of entities. ``prediction_protocol`` and ``steps``
predict, and ``prediction_results`` is what they return.
"""

from fedstat.models.vfem import joint_steps, steps
from fedstat.models.vfem.iteration import steps as iteration_steps

__all__ = ["iteration_steps", "joint_steps", "steps"]
