"""Number of steps by the corrected criterion of Akaike: degrees of freedom of a path, from its sums alone."""

from __future__ import annotations

import numpy as np

from fedstat.models.boost.learning.ready import BlockReady, Ready, Sums
from fedstat.typing import Floats, Ints


def path_df(ready: Ready, sums: Sums, selected: Ints, nu: float) -> Floats:
    """Trace of the boosting operator after every step of a path, (steps,) (Buehlmann and Hothorn 2007, 5.3).

    The coefficients of a path are linear in the score T, M vec(T) with t slow: a step on learner p adds
    nu H_p (E_p' - A_p M) to its rows, A being the Gram of all columns, and the trace is that of A M.
    """
    S = ready.A if isinstance(ready, BlockReady) else ready.L.T @ sums.S @ ready.L
    taken = sorted(set(selected.tolist()))
    own = np.concatenate([np.arange(ready.starts[p], ready.starts[p + 1]) for p in taken])
    S, ends = S[np.ix_(own, own)], np.cumsum([0, *(ready.starts[p + 1] - ready.starts[p] for p in taken)])
    places = {p: slice(int(a), int(b)) for p, a, b in zip(taken, ends, ends[1:], strict=False)}
    trace = _full_traces if ready.full else _shrunk_traces
    trace = _block_traces if isinstance(ready, BlockReady) else trace
    return np.cumsum(trace(ready, S, own, places, selected.tolist(), nu))


def _shrunk_traces(
    ready: Ready, S: Floats, own: Ints, places: dict[int, slice], selected: list[int], nu: float
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
    ready: Ready, S: Floats, own: Ints, places: dict[int, slice], selected: list[int], nu: float
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
    ready: Ready, S: Floats, own: Ints, places: dict[int, slice], selected: list[int], nu: float
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
    """AICc of a fit with so many degrees of freedom and squared residuals, (steps,), to n numbers.

    Hurvich, Simonoff and Tsai (1998), as in mboost; infinite where df + 2 reach n.
    """
    free = 1.0 - (df + 2.0) / n
    return np.where(free > 0.0, np.log(risk / n) + (1.0 + df / n) / np.where(free > 0.0, free, 1.0), np.inf)
