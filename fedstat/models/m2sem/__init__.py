"""Clusters of entities whose columns of mixed type are at several sites (M2-SEM).

Read ``model`` (arguments) and ``specification`` (which columns), then ``protocol``: starts, a path of
``selection``, and the final mixture. ``em`` is the iteration of the coordinator; with ``request`` it asks
sites, whose ``steps`` improve ``local_mixtures`` of ``columns``, each a ``modality``. ``record`` is what a
fit returns: ``results`` has its methods, ``summary``, ``tables`` and ``plots`` print it. ``information`` and
``bootstrap`` are standard errors, ``search`` compares numbers of clusters, ``analyses`` and ``prediction``
follow a fit, and ``explain`` is the dry run.
"""

from fedstat.models.m2sem import analyses, columns, steps

__all__ = ["analyses", "columns", "steps"]
