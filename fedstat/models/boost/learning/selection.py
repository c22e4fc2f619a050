"""Selection: corrected AIC, selection frequencies, and false selections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.prepared_learners import (
    PreparedBlocks,
    PreparedLearners,
    Sums,
    prepare_learners,
)
from fedstat.progress_line import counted
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Number of steps by the corrected criterion of Akaike: degrees of freedom of a path, from its sums alone.


def path_df(ready: PreparedLearners, sums: Sums, selected: Ints, nu: float) -> Floats:
    """Trace of the boosting operator after every step of a path, (steps,) (Buehlmann and Hothorn 2007, 5.3).

    The coefficients of a path are linear in the score T, M vec(T) with t slow: a step on learner p adds
    nu H_p (E_p' - A_p M) to its rows, A being the Gram of all columns, and the trace is that of A M.
    """
    S = ready.A if isinstance(ready, PreparedBlocks) else ready.L.T @ sums.S @ ready.L
    taken = sorted(set(selected.tolist()))
    own = np.concatenate([np.arange(ready.starts[p], ready.starts[p + 1]) for p in taken])
    S, ends = S[np.ix_(own, own)], np.cumsum([0, *(ready.starts[p + 1] - ready.starts[p] for p in taken)])
    places = {p: slice(int(a), int(b)) for p, a, b in zip(taken, ends, ends[1:], strict=False)}
    trace = _full_traces if ready.full else _shrunk_traces
    trace = _block_traces if isinstance(ready, PreparedBlocks) else trace
    return np.cumsum(trace(ready, S, own, places, selected.tolist(), nu))


def _shrunk_traces(
    ready: PreparedLearners, S: Floats, own: Ints, places: dict[int, slice], selected: list[int], nu: float
) -> list[float]:
    """Find what each step adds to the trace, every coordinate along the response by itself."""
    H = ready.fit[0][own].T[:, :, None]
    M, out = np.zeros((len(H), len(S), len(S))), []
    for p in selected:
        rows = places[p]
        left = -S[rows] @ M
        left[:, :, rows] += np.eye(rows.stop - rows.start)
        step = nu * H[:, rows] * left
        M[:, rows] += step
        out.append(float(np.einsum("ia,jia->", S[rows], step)))
    return out


def _full_traces(
    ready: PreparedLearners, S: Floats, own: Ints, places: dict[int, slice], selected: list[int], nu: float
) -> list[float]:
    """Find the same, where a learner's penalty mixes both directions."""
    gram, turns, at, h = ready.fit
    k2, K = len(gram), len(S)
    firsts = np.concatenate([[0], np.cumsum(np.diff(ready.starts) * k2)])
    fits = {}
    for p, rows in places.items():
        k = (rows.stop - rows.start) * k2
        turn = turns[at[p] : at[p] + k * k].reshape(k, k)
        fits[p] = nu * turn.T @ (h[firsts[p] : firsts[p] + k, None] * turn)
    M, out = np.zeros((k2, K, k2, K)), []
    for p in selected:
        rows = places[p]
        k1 = rows.stop - rows.start
        left = -np.einsum("jl,lin->jin", gram, S[rows] @ M.reshape(k2, K, k2 * K)).reshape(k2, k1, k2, K)
        for j in range(k2):
            left[j, :, j, rows] += np.eye(k1)
        step = (fits[p] @ left.reshape(k2 * k1, k2 * K)).reshape(k2, k1, k2, K)
        M[:, rows] += step
        out.append(float(np.einsum("jl,ia,jila->", gram, S[rows], step, optimize=True)))
    return out


def _block_traces(
    ready: PreparedLearners, S: Floats, own: Ints, places: dict[int, slice], selected: list[int], nu: float
) -> list[float]:
    """Find the same, where a learner has no two directions."""
    turns, at, h = ready.fit
    fits = {}
    for p, rows in places.items():
        k = rows.stop - rows.start
        turn = turns[at[p] : at[p] + k * k].reshape(k, k)
        fits[p] = nu * turn.T @ (h[ready.starts[p] : ready.starts[p + 1], None] * turn)
    M, out = np.zeros_like(S), []
    for p in selected:
        rows = places[p]
        left = -S[rows] @ M
        left[:, rows] += np.eye(rows.stop - rows.start)
        step = fits[p] @ left
        M[rows] += step
        out.append(float((S[rows] * step).sum()))
    return out


def corrected_aic(df: Floats, risk: Floats, n: float) -> Floats:
    """Return AICc of a fit from its degrees of freedom and squared residuals, (steps,), for n numbers.

    Hurvich, Simonoff and Tsai (1998), as in mboost; infinite where df + 2 reach n.
    """
    free = 1.0 - (df + 2.0) / n
    return np.where(free > 0.0, np.log(risk / n) + (1.0 + df / n) / np.where(free > 0.0, free, 1.0), np.inf)


# ----------------------------------------------------------------------------------------------------
# How often learners are selected by halves of the folds, and whether any has an effect at all.


def first_learners(selected: Sequence[int], q: int) -> list[int]:
    """Find the first q different learners of a path, the intercept apart."""
    return list(dict.fromkeys(p for p in selected if p))[:q]


def selection_frequencies(
    boosting: Boosting, q: int, draws: int, steps: int, random: np.random.Generator
) -> Floats:
    """Share of halves of the folds that select each learner among the first q of their path: (P,).

    Halves come in complementary pairs (Shah and Samworth 2013), each of complete folds.
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
    """Standardized gain of each learner's first step, and its step-down p-value: (P - 1,) each.

    Against scores of no effect, vec T ~ N(0, Sigma x S) with the response's own covariance (Westfall and
    Young 1993).
    """
    total = boosting.even.total
    sums = total.about(total.mean, boosting.basis)
    ready = prepare_learners(sums, replace(boosting.design, penalty="separable"), boosting.gram)
    (H,) = ready.fit
    centered = sums.S - np.outer(sums.S[:, 0], sums.S[0]) / sums.n
    rows = _root(ready.L.T @ centered @ ready.L)
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
