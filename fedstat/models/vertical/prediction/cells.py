"""Predictions from outside, as they may be held against a response: those of groups of entities.

Whoever chooses the predictions chooses what a sum of losses tells: with numbers that differ by powers of two
it tells every label, and with two levels it tells one. Averaged over cells of entities that depend on
predictions alone, whatever is counted or added up is a function of sums of the response over cells.
"""

from __future__ import annotations

import numpy as np

from fedstat.federation.door.state import SiteData
from fedstat.typing import Floats, Ints


def averaged(data: SiteData, predicted: Floats, code: Ints, by: Floats | None = None) -> Floats:
    """Average predictions, (n,) or (n, q), over cells of entities of one group, of `code` (n,), -1 for none.

    Cells hold as many entities as the owner wants behind a sum, or more; they are made of entities that are
    next to each other, where lie the predictions, or what is `by` (n, q) a function of them. An owner who
    answers any number of evaluations lets labels be told anyway: then predictions are as they came.
    """
    if data.policy.evaluation == "any":
        return predicted
    places, out = predicted if by is None else by, np.array(predicted)
    places = places.reshape(len(predicted), -1)
    for group in np.unique(code[code >= 0]):
        for cell in cells(places, np.flatnonzero(code == group), max(data.min_count, 1)):
            out[cell] = predicted[cell].mean(axis=0)
    return out


def cells(places: Floats, rows: Ints, least: int) -> list[Ints]:
    """Divide rows of `places` (n, q) in cells of `least` or more, by halves of the widest column.

    Examples
    --------
    >>> cells(np.array([[5.0], [1.0], [2.0], [9.0], [8.0]]), np.arange(5), 2)
    [array([1, 2]), array([0, 4, 3])]
    """
    if len(rows) < 2 * least:
        return [rows]
    own = places[rows]
    order = rows[np.argsort(own[:, np.ptp(own, axis=0).argmax()], kind="stable")]
    half = len(rows) // 2
    return [*cells(places, order[:half], least), *cells(places, order[half:], least)]


def squared_errors(y: Floats, given: Floats, used: Floats, code: Ints, groups: int) -> Floats:
    """Sum squared errors of predictions (n,) by group, (groups,), from `used`, their averages over cells.

    They are those of the averages, more or less what averaging took away: within cells the response is taken
    to move with its predictions as between cells, as far as it can. Nothing but sums over cells is behind it.
    """
    moved = used - used.mean() if len(used) else used
    slope = float(moved @ y / (moved @ moved)) if moved.any() else 1.0
    errors, within = (np.bincount(code, weights=one**2, minlength=groups) for one in (y - used, given - used))
    most = np.sqrt(errors) * np.sqrt(within)
    return np.asarray(errors + within - 2.0 * (slope * within).clip(-most, most))
