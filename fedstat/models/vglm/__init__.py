"""Generalized linear models of columns at several sites, with selection.

Read ``model`` and ``options`` (arguments), then ``protocol``: ``path_setup`` prepares the penalty, and a path
is followed by

* ``normal_path``: the normal family with complete records, from Gram matrices.
* ``em_fit``: the normal family with missing blocks.
* ``newton_fit``: other ``distributions``, by ``proximal_newton`` along ``path_following``.
* ``admm``: the published algorithm.

``steps`` are those of a site. ``outcome`` is what a fit returns; ``results``, ``notes`` and ``plots`` are
made from it. ``debiased`` has intervals after selection, ``prediction`` predicts, and ``explain`` is the dry
run.
"""

from fedstat.models.vglm import steps

__all__ = ["steps"]
