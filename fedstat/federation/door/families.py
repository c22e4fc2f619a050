"""The families of this installation, for a site that is asked from outside.

In one process a family is there once its model has been named. A site in a process of its own names no model,
and loads them all.
"""

from __future__ import annotations

from importlib import import_module

INSTALLED = (
    "fedstat.federation.design.by_rows",
    "fedstat.federation.rounds.alignment",
    "fedstat.federation.rounds.schema",
    "fedstat.federation.rounds.statements",
    "fedstat.models.horizontal.evaluation",
    "fedstat.models.fedavg",
    "fedstat.models.glm",
    "fedstat.models.vfem",
    "fedstat.models.vglm",
)
"""Modules that enter steps into :data:`fedstat.federation.door.site.FAMILIES`."""


def load_families() -> None:
    """Enter the steps of all installed families."""
    for module in INSTALLED:
        import_module(module)
