"""Arguments of a fit that are more than a number or a word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.errors import ModelError
from fedstat.models.boost.learning.learners import Learner
from fedstat.models.boost.learning.losses import EVERY, LossSpec
from fedstat.models.checks import check_choice, check_whole
from fedstat.typing import Floats

FOLDS = 10
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


def check_every(every: int | None, loss: LossSpec | None) -> int:
    """Find how many steps there are between two exchanges of scores."""
    if loss is None:
        if every is not None:
            raise ModelError("every: of squares all steps follow from one round; it belongs to other losses")
        return 1
    jumps = loss.entry.bound == 0.0
    if every is None:
        return 1 if jumps else EVERY
    check_whole("every", every, 1)
    if jumps and every > 1:
        raise ModelError(f"every: the slopes of a quantile's loss jump; expected 1, received {every!r}")
    return int(every)


def check_loss(
    loss: LossSpec | None, select: str | None, learners: Sequence[Learner], *, uneven: bool
) -> None:
    """Refuse what follows from sums of products alone."""
    if loss is None:
        return
    if select == "aicc":
        raise ModelError("select: AICc is one of squares; of another loss there is 'cv'")
    along = [one.label for one in learners if one.varying]
    if along:
        raise ModelError(
            f"{loss.title}: {along[0]} varies along the response, of which there are squares only"
        )
    if uneven:
        raise ModelError(
            f"{loss.title}: curves of the response are measured at different points, or lack some, of which "
            "there are squares only. Leave out curves with gaps by Curve(..., max_gap=0), or fill them in"
        )
