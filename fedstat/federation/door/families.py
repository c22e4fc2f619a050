"""The families of this installation, for a site that is asked from outside.

In one process a family is there once its model has been named. A site in a process of its own names no model,
and loads them all.
"""

from __future__ import annotations

from importlib import import_module

OWN = (
    "design.row_steps",
    "design.by_columns",
    "rounds.alignment_steps",
    "rounds.approval",
    "rounds.margins",
    "rounds.schema",
    "rounds.statements",
)
"""Modules of federation/ that enter steps into :data:`fedstat.federation.door.site.FAMILIES`."""

MODELS = "fedstat.models"
"""Whose ``INSTALLED`` names the folders of families: by name, since models/ comes after this room."""


def load_families() -> None:
    """Enter the steps of all installed families."""
    for module in OWN:
        import_module(f"fedstat.federation.{module}")
    for family in import_module(MODELS).INSTALLED:
        import_module(f"{MODELS}.{family}")
