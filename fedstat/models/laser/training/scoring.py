"""Counts of how well predictions agree with the response, by set of clients: what leaves in an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import logit

from fedstat.errors import MessageError
from fedstat.federation.message import Reply
from fedstat.inference.conformal import merge_towards_worse
from fedstat.typing import Floats, Ints

STEP, FURTHEST = 0.05, 8.0
"""Width of a bin of log odds of the true class, and where the outer bins begin."""
LOG_LOW, LOG_HIGH = -6.0, 4.0
"""Between these lie the logarithms of absolute residuals, in standard deviations of the response."""


def score_edges(classes: int) -> Floats:
    """Edges between the bins of a score, (B - 1,), ascending towards less agreement; they depend on no row.

    The score is minus the log odds of the true class, or the logarithm of the absolute residual.
    """
    if classes:
        return np.asarray(STEP * np.arange(-round(FURTHEST / STEP), round(FURTHEST / STEP) + 1))
    return np.asarray(np.arange(LOG_LOW, LOG_HIGH + STEP / 2.0, STEP))


def scores_of(P: Floats, classes: int, of: Floats) -> Floats:
    """Scores of values `of` (n,): numbers of classes of probabilities P (n, classes), or means P (n, 1)."""
    if classes:
        p = P[np.arange(len(P)), of.astype(np.int64)]
        return np.asarray(-logit(np.clip(p, 1e-12, 1.0 - 1e-12)))
    with np.errstate(divide="ignore"):
        return np.log(np.abs(of - P[:, 0]))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreCounts:
    """Counts of scores by set of clients and class, and sums over the entities of a set.

    Parameters
    ----------
    sets : (G,) array of int
        Sets of clients, as bits.
    bins : (G, C, B) array
        Entities by true class (one for a normal response) and bin of the score.
    expected : (G, C, B) array
        Sums of the probability of the true class in these.
    confusion : (G, C, C) array
        Entities by true and by most probable class.
    losses : (G, 2) array
        Sums of the loss, and of the Brier score or squared error.
    """

    sets: Ints
    bins: Floats
    expected: Floats
    confusion: Floats
    losses: Floats

    @property
    def n(self) -> Floats:
        """Entities of each set, (G,)."""
        return np.asarray(self.bins.sum(axis=(1, 2)))


def read_scores(reply: Reply, sets: Ints) -> ScoreCounts:
    """Read the counts that the holder of the response told, of so many sets."""
    G, shaped = len(sets), {}
    for name in ("bins", "expected", "confusion"):
        array = reply.arrays[name]
        if len(array) % max(G, 1):
            raise MessageError(f"{reply.site}: counts of {len(array)} rows for {G} sets")
        shaped[name] = array.reshape(G, len(array) // max(G, 1), -1)
    return ScoreCounts(sets, **shaped, losses=reply.arrays["losses"])


def count_scores(
    P: Floats, y: Floats, classes: int, code: Ints, groups: int, least: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Count scores of predictions P (n, classes) or (n, 1) of y by group, (n,), -1 for none.

    See :class:`ScoreCounts`. Groups with fewer than `least` entities have none, and bins with fewer count
    with a worse one.
    """
    C, edges = max(classes, 1), score_edges(classes)
    B = len(edges) + 1
    bins, expected = np.zeros((groups, C, B)), np.zeros((groups, C, B))
    confusion, losses = np.zeros((groups, C, C)), np.zeros((groups, 2))
    at = np.searchsorted(edges, scores_of(P, classes, y))
    label = y.astype(np.int64) if classes else np.zeros(len(y), dtype=np.int64)
    own = P[np.arange(len(P)), label]
    for g in range(groups):
        here = code == g
        if np.count_nonzero(here) < max(least, 1):
            continue
        for c in range(C):
            rows = np.flatnonzero(here & (label == c))
            place = merge_towards_worse(np.bincount(at[rows], minlength=B), least)[at[rows]]
            bins[g, c] = np.bincount(place, minlength=B)
            expected[g, c] = np.bincount(place, own[rows], minlength=B)
        if classes:
            np.add.at(confusion[g], (label[here], P[here].argmax(axis=1)), 1.0)
            indicator = np.eye(C)[label[here]]
            losses[g] = [-np.log(np.maximum(own[here], 1e-12)).sum(), ((P[here] - indicator) ** 2).sum()]
        else:
            squares = float(((y[here] - P[here, 0]) ** 2).sum())
            losses[g] = [0.5 * squares, squares]
    return bins, expected, confusion, losses
