"""Counts that measure agreement of predictions with the response, by set of sites."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import logit

from fedstat.errors import MessageError
from fedstat.federation.message import Reply
from fedstat.inference.conformal import STEP, merge_upwards, residual_edges
from fedstat.typing import Bools, Floats, Ints

FURTHEST = 8.0
"""Log odds at which the outer bins start."""


def score_edges(classes: int) -> Floats:
    """Edges between the bins, (B - 1,); they depend on no row.

    The binned values are: for two classes the log odds of the second; for more classes minus the log odds of
    the true class; for a normal response the logarithm of the absolute residual, in standard deviations.
    """
    if classes:
        return np.asarray(STEP * np.arange(-round(FURTHEST / STEP), round(FURTHEST / STEP) + 1))
    return residual_edges()


def scores_of(P: Floats, classes: int, of: Floats) -> Floats:
    """Scores of values `of` (n,): numbers of classes of probabilities P (n, classes), or means P (n, 1).

    A larger score means less agreement of a value with its prediction: minus the log odds of the class, or
    the logarithm of the absolute residual.
    """
    if classes:
        return -log_odds(P[np.arange(len(P)), of.astype(np.int64)])
    with np.errstate(divide="ignore"):
        return np.log(np.abs(of - P[:, 0]))


def shares_of_classes(P: Floats) -> Floats:
    """Return the probability of each class to be the most probable one, (n, classes): equal ones share it.

    Expected counts do not depend on which of the entities with equal probabilities has which class, as
    counts of a random draw would.
    """
    best = P.max(axis=1, keepdims=True) == P
    return np.asarray(best / best.sum(axis=1, keepdims=True))


def most_probable(P: Floats) -> Ints:
    """Return the most probable class of each row of P (n, classes); among equal ones, one at random.

    An entity that a method cannot predict has equal probabilities, and an even vote of an ensemble is a tie.
    The draw has a fixed seed.
    """
    best = P.max(axis=1, keepdims=True) == P
    order = np.where(best, np.random.default_rng(0).random(P.shape), -1.0)
    return np.asarray(order.argmax(axis=1), dtype=np.int64)


def log_odds(P: Floats) -> Floats:
    """Logarithms of odds of probabilities, finite."""
    return np.asarray(logit(np.clip(P, 1e-12, 1.0 - 1e-12)))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreCounts:
    """Counts by set of sites and class, and sums over the entities of a set.

    Parameters
    ----------
    sets : (G,) array of int
        Sets of sites, as bits.
    bins : (G, C, B) array
        Entities by true class (one for a normal response) and bin; see :func:`score_edges`.
    expected : (G, C, B) array
        Sums, in these bins, of the probability of the second of two classes, otherwise of the true one.
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

    def together(self, groups: Bools) -> ScoreCounts:
        """Combine the entities of some sets, (G,), as those of the set of all their sites."""
        every = np.bitwise_or.reduce(self.sets[groups], initial=0)
        sums = (self.bins, self.expected, self.confusion, self.losses)
        return ScoreCounts(np.array([every]), *(part[groups].sum(axis=0)[None] for part in sums))

    @property
    def scores(self) -> Floats:
        """The same by bin of the score of the true class, (G, C, B): each in its worst possible bin."""
        if self.bins.shape[1] != 2:
            return self.bins
        out = np.array(self.bins)
        for g, total in enumerate(self.bins.sum(axis=1)):
            ends = np.flatnonzero(total)
            starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
            # For the second class, small log odds are a bad score: a group counts where it begins.
            out[g, 1] = 0.0
            out[g, 1, out.shape[2] - 1 - starts] = self.bins[g, 1, ends]
        return out


def read_scores(reply: Reply, sets: Ints) -> ScoreCounts:
    """Read the counts in the reply of the response holder, for this many sets."""
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
    """Evaluate predictions P (n, classes) or (n, 1) against y by group, (n,), -1 for none.

    See :class:`ScoreCounts`. Groups with fewer than `least` entities have no counts, and bins with fewer are
    merged.
    merged.
    """
    C, edges = max(classes, 1), score_edges(classes)
    B = len(edges) + 1
    bins, expected = np.zeros((groups, C, B)), np.zeros((groups, C, B))
    confusion, losses = np.zeros((groups, C, C)), np.zeros((groups, 2))
    label = y.astype(np.int64) if classes else np.zeros(len(y), dtype=np.int64)
    own = P[np.arange(len(P)), label]
    # For two classes, both are binned by the log odds of the second, for areas under curves.
    at = np.searchsorted(edges, scores_of(P, classes, np.zeros(len(y)) if classes == 2 else y))
    summed = P[:, 1] if classes == 2 else own
    for g in range(groups):
        here = code == g
        if np.count_nonzero(here) < max(least, 1):
            continue
        place = merge_upwards(np.bincount(at[here], minlength=B), least)[at]
        for c in range(C):
            rows = here & (label == c)
            bins[g, c] = np.bincount(place[rows], minlength=B)
            expected[g, c] = np.bincount(place[rows], summed[rows], minlength=B)
        if classes:
            np.add.at(confusion[g], label[here], shares_of_classes(P[here]))
            indicator = np.eye(C)[label[here]]
            losses[g] = [-np.log(np.maximum(own[here], 1e-12)).sum(), ((P[here] - indicator) ** 2).sum()]
        else:
            squares = float(((y[here] - P[here, 0]) ** 2).sum())
            losses[g] = [0.5 * squares, squares]
    return bins, expected, confusion, losses
