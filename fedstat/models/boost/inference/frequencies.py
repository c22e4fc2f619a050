"""How often learners are selected by halves of the folds, and whether any has an effect at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.ready import make_ready
from fedstat.progress_line import counted
from fedstat.typing import Floats


def first_learners(selected: Sequence[int], q: int) -> list[int]:
    """Find the first q different learners of a path, the intercept apart."""
    return list(dict.fromkeys(p for p in selected if p))[:q]


def selection_frequencies(
    boosting: Boosting, q: int, draws: int, steps: int, random: np.random.Generator
) -> Floats:
    """Share of halves of the folds that select each learner among the first q of their path: (P,).

    Halves come in complementary pairs (Shah and Samworth 2013), each made of whole folds.
    """
    F, P = boosting.moments.folds, len(boosting.design.learners)
    counts = np.zeros(P)
    for _ in counted(range(draws), "pair of halves"):
        half = np.zeros(F, dtype=bool)
        half[random.permutation(F)[: F // 2]] = True
        for folds in (half, ~half):
            path = boosting.over(folds, steps)[1]
            counts[first_learners(path.selected.tolist(), q)] += 1.0
    return counts / (2 * draws)


def false_selections(q: int, P: int, tau: float, draws: int) -> float:
    """Bound on the expected number of learners selected in error, for unimodal frequencies.

    Shah and Samworth (2013), theorem 2, with theta = q / P.
    """
    least = 1.0 / (2 * draws)
    if tau <= 0.75:
        return q**2 / P / (2.0 * (2.0 * tau - 1.0 - least))
    return 4.0 * (1.0 - tau + least) / (1.0 + 2.0 * least) * q**2 / P


def entry_p_values(boosting: Boosting, draws: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Standardised gain of each learner's first step, and its step-down p-value: (P - 1,) each.

    Against scores of no effect, vec T ~ N(0, Sigma x S) with the response's own covariance (Westfall and
    Young 1993).
    """
    total = boosting.even.total
    sums = total.about(total.mean, boosting.basis)
    ready = make_ready(sums, replace(boosting.design, penalty="separable"), boosting.gram)
    (H,) = ready.fit
    centred = sums.S - np.outer(sums.S[:, 0], sums.S[0]) / sums.n
    rows = _root(ready.L.T @ centred @ ready.L)
    columns = _root(ready.V.T @ (sums.Q / (sums.n - 1.0)) @ ready.V)

    def gains(T: Floats) -> Floats:
        return np.add.reduceat((T * T * H * (2.0 - H)).sum(axis=1), ready.starts[1:-1])

    found = gains(ready.L.T @ sums.T @ ready.V)
    K, L = H.shape
    null = np.array([gains(rows @ random.normal(size=(K, L)) @ columns.T) for _ in range(draws)])
    mean, size = null.mean(axis=0), null.std(axis=0)
    z, null = (found - mean) / size, (null - mean) / size
    order, p, largest = np.argsort(-z), np.empty(len(z)), 0.0
    for place, j in enumerate(order):
        beyond = (null[:, order[place:]].max(axis=1) >= z[j]).sum()
        largest = max(largest, (1.0 + beyond) / (draws + 1.0))
        p[j] = largest
    return z, p


def _root(A: Floats) -> Floats:
    values, U = np.linalg.eigh((A + A.T) / 2.0)
    return np.asarray(U * np.sqrt(np.maximum(values, 0.0)))
