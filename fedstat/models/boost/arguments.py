"""Arguments of a fit that are more than a number or a word."""

from __future__ import annotations

import numpy as np

from fedstat.errors import ModelError
from fedstat.models.checks import check_choice
from fedstat.typing import Floats

OFFSETS = ("mean", "smooth")


def given_offset(offset: object, points: Floats, *, functional: bool) -> Floats | None:
    """Offset at the points of the response, (G,), where it is no choice by a word."""
    if isinstance(offset, str):
        check_choice("offset", offset, OFFSETS)
        if offset == "smooth" and not functional:
            raise ModelError("offset: a mean is smoothed along a curve, and the response is a number")
        return None
    G = len(points)
    try:
        values = np.asarray(offset, dtype=float)
    except (TypeError, ValueError):
        values = np.array(np.nan)
    if values.shape not in ((), (G,)) or not np.isfinite(values).all():
        raise ModelError(
            f"offset: expected 'mean', 'smooth', a number, or numbers at the {G} points of the response"
        )
    return np.broadcast_to(values, (G,)).copy()


def check_site_folds(masked: bool | None, n_sites: int, masks_wanted: bool) -> bool:
    """Refuse sites as folds where their sums are to be hidden, or where there is one; say not to mask."""
    if masked or masks_wanted:
        who = "masked=True asks for" if masked else "an owner lets sums leave in no other way than by"
        raise ModelError(
            f"folds: sites are folds by their own sums, which masks hide, and {who} masks; use folds=10"
        )
    if n_sites < 2:
        raise ModelError('folds: "site" needs two sites or more')
    return False
