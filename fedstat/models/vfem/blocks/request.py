"""The name of this family, and how one of its steps is asked for."""

from __future__ import annotations

import numpy as np

from fedstat.federation.message import Ask

FAMILY = "vfem"
BLOCK, SQUARES = "block", "squares"
"""Columns that an institution opens for sums with what stays at the response holder."""


def ask(site: str, step: str, session: str, text: str = "", **arrays: object) -> Ask:
    """Address one step of this family."""
    return Ask(site, FAMILY, step, {k: np.asarray(v) for k, v in arrays.items()}, session, text)
