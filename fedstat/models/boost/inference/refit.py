"""Penalised generalised least squares on some learners, from the sums of boosting: surfaces with intervals.

A boosted surface is shrunken; intervals around it do not cover. Fitted again are the learners that were
selected, with errors that are correlated along the response: their covariance follows from the products of
the response in its basis. Smoothing parameters maximise the restricted likelihood by the updates of Fellner
and Schall (Wood and Fasiolo 2017), and are a hundredth of that for intervals, or less where the penalty
would outweigh the information: undersmoothed, so that bias is small beside the error. Covariances are those
of the posterior (Wood 2006), simultaneous bands from draws of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.linalg import block_diag, cho_solve, lapack
from scipy.stats import f as f_law

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.models.boost.learning.learners import INTERCEPT
from fedstat.models.boost.learning.moments import CurveSums
from fedstat.models.boost.learning.ready import BoostDesign
from fedstat.typing import Floats, Ints

UNDERSMOOTHED = 0.01
ROUNDS, CLOSE = 60, 0.02
BOUNDS = (1e-6, 1e8)
FLOOR = 1e-9
"""Share of the largest eigenvalue of the errors' covariance, or of a Gram, below which there is none."""
FEW = 10
"""Curves a column below which simultaneous bands cover less than they say."""


@dataclass(frozen=True, slots=True, eq=False)
class RefitPenalty:
    """Penalty M2 x M1 on a learner's coefficients, M1 along what it is of and M2 along the response."""

    place: slice
    M1: Floats
    M2: Floats


@dataclass(frozen=True, slots=True)
class EffectTest:
    """F test of no effect, with its degrees of freedom; nan where no direction is left to test."""

    statistic: float
    df: float
    df_resid: float

    @property
    def p_value(self) -> float:
        """Chance of a larger statistic."""
        return float(f_law.sf(self.statistic, self.df, self.df_resid))


@dataclass(frozen=True, slots=True, eq=False)
class Refitted:
    """Coefficients B (q, L) of the chosen learners' columns, in vec form with t slow, and their covariances.

    `parts` take the columns of a learner to those that are fitted, `places` are these among q.
    `B` with its `posterior` covariance is undersmoothed, for intervals; `edf` are the effective coefficients
    of the fit that is not. `errors` (L, L) is the covariance of the response in its basis around the fit,
    `rough` the variance at a point of what the basis cannot hold of the errors.
    """

    learners: tuple[int, ...]
    places: tuple[slice, ...]
    parts: tuple[Floats, ...]
    B: Floats
    posterior: Floats
    edf: Floats
    tests: tuple[EffectTest, ...]
    rows: float
    errors: Floats
    rough: float

    def rows_of(self, p: int) -> Ints:
        """Places of a learner's coefficients in vec form."""
        place, (q, L) = self.places[self.learners.index(p)], self.B.shape
        return np.asarray((np.arange(L)[:, None] * q + np.arange(q)[place]).ravel(), dtype=np.int64)


def refit(sums: CurveSums, design: BoostDesign, gram: Floats, learners: Sequence[int]) -> Refitted:
    """Fit some learners, the intercept first, to sums of a response less its offset."""
    chosen = [p for p, one in enumerate(design.learners) if one.kind == INTERCEPT or p in learners]
    constant = [design.learners[p].label for p in chosen if design.learners[p].constant]
    if constant:
        raise NotAvailableError(f"{constant[0]}: a refit has effects that vary along the response")
    parts, margins = zip(*(design.fitted(p, sums) for p in chosen), strict=True)
    ends = np.cumsum([0, *(part.shape[1] for part in parts)]).tolist()
    places = tuple(slice(a, b) for a, b in pairwise(ends))
    C = np.zeros((sums.S.shape[0], ends[-1]))
    rows = np.concatenate([np.arange(design.starts[p], design.starts[p + 1]) for p in chosen])
    C[rows] = block_diag(*parts)
    own = replace(sums, S=C.T @ sums.S @ C, T=C.T @ sums.T)
    n, q = sums.n, ends[-1]
    if n <= q + len(gram):
        raise EstimationError(
            f"{n:,.0f} rows for {q} columns of the chosen learners: their errors cannot be told. Choose "
            "fewer learners or knots"
        )
    _check_collinear(own, design, chosen, places)
    penalties = _penalties(design, chosen, places, margins, len(gram))
    first = _smooth(own, gram, None, penalties)
    errors = _errors(own, gram, first[0])
    Omega = _inverse(errors)
    lam = _smooth(own, gram, Omega, penalties)[1]
    _, V, A, _ = _solve(own, gram, Omega, penalties, lam)
    edf = (V * A).sum(axis=1)
    B, V, _, s2 = _solve(own, gram, Omega, penalties, undersmoothed(own, gram, Omega, penalties, lam))
    tests = tuple(test_effect(own, place) for place in places)
    errors = _errors(own, gram, B)
    rough = _rough(own, gram, B, errors)
    return Refitted(tuple(chosen), places, parts, B, s2 * V, edf, tests, n, errors, rough)


def undersmoothed(
    own: CurveSums, gram: Floats, Omega: Floats, penalties: Sequence[RefitPenalty], lam: Floats
) -> Floats:
    """Smoothing parameters for intervals: a hundredth, and none whose penalty outweighs the information.

    That of a direction in which an effect seems flat goes to infinity, and a share of it still lets the
    direction have no error, as if it had been known.
    """
    along = float(np.trace(gram @ Omega @ gram))
    sizes = [
        (np.trace(own.S[one.place, one.place]), np.trace(one.M1) * np.trace(one.M2)) for one in penalties
    ]
    most = [along * float(S) / max(float(K), 1e-300) for S, K in sizes]
    return np.minimum(UNDERSMOOTHED * lam, most)


def _check_collinear(
    own: CurveSums, design: BoostDesign, chosen: Sequence[int], places: Sequence[slice]
) -> None:
    """Require that no learner without a penalty of its own follows from others without one."""
    found = zip(chosen, places, strict=True)
    plain = [
        (design.learners[p].label, np.arange(len(own.S))[c]) for p, c in found if not _shrunken(design, p)
    ]
    rank = _left(own, np.concatenate([c for _, c in plain]))[1]
    if rank == sum(len(c) for _, c in plain):
        return
    rest = {label: [c for other, c in plain if other != label] for label, _ in plain[1:]}
    same = [label for label, other in rest.items() if _left(own, np.concatenate(other))[1] == rank]
    raise EstimationError(f"{' and '.join(same)} are collinear. Choose fewer of them")


def _shrunken(design: BoostDesign, p: int) -> bool:
    """Whether a refit penalises a learner along what it is of; linear effects it does not."""
    return design.learners[p].smooth or design.learners[p].kind == "brandom"


def _penalties(
    design: BoostDesign, chosen: Sequence[int], places: Sequence[slice], margins: Sequence[Floats], L: int
) -> list[RefitPenalty]:
    out, K2 = [], design.along(L)
    for p, place, M in zip(chosen, places, margins, strict=True):
        if _shrunken(design, p):
            out.append(RefitPenalty(place, M, np.eye(L)))
        if design.time is not None:
            out.append(RefitPenalty(place, np.eye(len(M)), K2))
    return out


def _solve(
    own: CurveSums, gram: Floats, Omega: Floats | None, penalties: Sequence[RefitPenalty], lam: Floats
) -> tuple[Floats, Floats, Floats, float]:
    """Coefficients, inverse of the penalised information, information, and scale."""
    q, L = own.T.shape
    middle = gram if Omega is None else gram @ Omega @ gram
    A = np.asarray(np.kron(middle, own.S))
    score = own.T if Omega is None else own.T @ Omega @ gram
    whole = A.copy()
    view = whole.reshape(L, q, L, q)
    for weight, one in zip(lam, penalties, strict=True):
        view[:, one.place, :, one.place] += weight * np.einsum("jl,ik->jilk", one.M2, one.M1)
    V = _spd_inverse(whole)
    beta = V @ score.ravel(order="F")
    yy = float(own.yy) if Omega is None else float((Omega * own.Q).sum())
    left = yy - 2.0 * float(beta @ score.ravel(order="F")) + float(beta @ A @ beta)
    df = own.n * (len(own.y) if Omega is None else L) - float((V * A).sum())
    return beta.reshape(q, L, order="F"), V, A, max(left, 0.0) / df


def _smooth(
    own: CurveSums, gram: Floats, Omega: Floats | None, penalties: Sequence[RefitPenalty]
) -> tuple[Floats, Floats, float]:
    """Maximise the restricted likelihood over smoothing parameters; coefficients, these, scale."""
    q, L = own.T.shape
    lam = np.ones(len(penalties))
    spectra = [np.outer(_spectrum(one.M1), _spectrum(one.M2)) for one in penalties]
    for _ in range(ROUNDS):
        B, V, _, s2 = _solve(own, gram, Omega, penalties, lam)
        v, new = V.reshape(L, q, L, q), lam.copy()
        free = _free_traces(penalties, lam, spectra)
        for j, one in enumerate(penalties):
            b = B[one.place]
            size = float(np.einsum("ij,jl,kl,ik->", b, one.M2, b, one.M1))
            used = float(np.einsum("jilk,jl,ik->", v[:, one.place, :, one.place], one.M2, one.M1))
            step = lam[j] * s2 * max(free[j] - used, 1e-8) / max(size, 1e-300)
            new[j] = np.clip(step, lam[j] / 1e3, lam[j] * 1e3)
        new = np.clip(new, *BOUNDS)
        done = np.abs(np.log(new / lam)).max(initial=0.0) < CLOSE
        lam = new
        if done:
            break
    B, _, _, s2 = _solve(own, gram, Omega, penalties, lam)
    return B, lam, s2


def _free_traces(penalties: Sequence[RefitPenalty], lam: Floats, spectra: Sequence[Floats]) -> list[float]:
    """Trace of the generalised inverse of a learner's whole penalty times each of its parts.

    Parts of one learner share eigenvectors: each is the identity where the other is not.
    """
    out = []
    for one, own in zip(penalties, spectra, strict=True):
        D = np.zeros_like(own)
        for weight, other, values in zip(lam, penalties, spectra, strict=True):
            if other.place == one.place:
                D += weight * values
        there = D > 0.0
        out.append(float((own[there] / D[there]).sum()))
    return out


def _spectrum(M: Floats) -> Floats:
    """Eigenvalues, exactly zero where they are so but for rounding."""
    values = np.linalg.eigvalsh(M)
    return np.where(values > FLOOR * values[-1], values, 0.0)


def test_effect(own: CurveSums, place: slice) -> EffectTest:
    """Test that some columns have no effect, by Wilks' lambda without a penalty, and Rao's F (1951).

    Errors may be correlated along the response in any way; with a number as response it is the usual F test.
    """
    rest = np.delete(np.arange(len(own.S)), place)
    full, rank = _left(own, np.arange(len(own.S)))
    less, rank_less = _left(own, rest)
    values, U = np.linalg.eigh(less)
    U = U[:, values > FLOOR * values[-1]] / np.sqrt(values[values > FLOOR * values[-1]])
    L, h, free = U.shape[1], rank - rank_less, own.n - rank
    if not h or free <= L:
        return EffectTest(np.nan, np.nan, np.nan)
    log_lambda = float(np.log(np.maximum(np.linalg.eigvalsh(U.T @ full @ U), 1e-300)).sum())
    both = L**2 + h**2 - 5
    t = np.sqrt((L**2 * h**2 - 4) / both) if both > 0 else 1.0
    resid = (free - (L - h + 1) / 2.0) * t - L * h / 2.0 + 1.0
    statistic = np.expm1(-log_lambda / t) * resid / (L * h)
    return EffectTest(float(statistic), float(L * h), float(resid))


def _left(own: CurveSums, columns: Ints) -> tuple[Floats, int]:
    """Products of the residuals of least squares on some columns, (L, L), and their rank."""
    S, T = own.S[np.ix_(columns, columns)], own.T[columns]
    size = np.sqrt(np.maximum(np.diag(S), 1e-300))
    values, U = np.linalg.eigh(S / np.outer(size, size))
    there = values > FLOOR * values[-1]
    half = (U[:, there] / np.sqrt(values[there])).T @ (T / size[:, None])
    left = own.Q - half.T @ half
    return np.asarray((left + left.T) / 2.0), int(there.sum())


def _errors(own: CurveSums, gram: Floats, B: Floats) -> Floats:
    """Covariance of the response in its basis around a fit, (L, L)."""
    BG = B @ gram
    left = own.Q - own.T.T @ BG - BG.T @ own.T + BG.T @ own.S @ BG
    return np.asarray((left + left.T) / 2.0 / (own.n - len(B)))


def _rough(own: CurveSums, gram: Floats, B: Floats, errors: Floats) -> float:
    """Variance of the errors at a point, but for what the response's basis can hold of them."""
    left = float(own.yy) - 2.0 * float((B * own.T).sum()) + float((B * (own.S @ B @ gram)).sum())
    rest = len(own.y) - int(np.linalg.matrix_rank(gram))
    whole = left / (own.n - len(B)) - float(np.trace(np.linalg.pinv(gram) @ errors))
    return max(whole, 0.0) / rest if rest > 0 else 0.0


def _inverse(errors: Floats) -> Floats:
    values, U = np.linalg.eigh(errors)
    # Directions in which the response hardly varies are those of a basis with more functions than points.
    there = values > FLOOR * values[-1]
    return np.asarray((U[:, there] / values[there]) @ U[:, there].T)


def _spd_inverse(A: Floats) -> Floats:
    size = np.sqrt(np.maximum(np.diag(A), 1e-300))
    scaled = A / np.outer(size, size) + FLOOR * np.eye(len(A))
    factor, info = lapack.dpotrf(scaled, lower=1)
    if info:
        raise EstimationError(
            "the columns of the chosen learners are collinear. Choose fewer learners or knots"
        )
    return np.asarray(cho_solve((factor, True), np.eye(len(A))) / np.outer(size, size))


@dataclass(frozen=True, slots=True, eq=False)
class SurfaceBand:
    """Effect on points (m, G), its standard error, and the factor of a simultaneous band."""

    estimate: Floats
    se: Floats
    factor: float


def band(
    fitted: Refitted, p: int, at: Floats, basis: Floats, level: float, draws: int, random: np.random.Generator
) -> SurfaceBand:
    """Band of a learner, whose columns at the points are `at` (m, k), with the response's basis (G, L)."""
    i, L = fitted.learners.index(p), fitted.B.shape[1]
    place, own = fitted.places[i], at @ fitted.parts[i]
    k = place.stop - place.start
    estimate = own @ fitted.B[place] @ basis.T
    rows = fitted.rows_of(p)
    V = fitted.posterior[np.ix_(rows, rows)]
    v = V.reshape(L, k, L, k)
    half = np.einsum("jilk,tl,sk->jits", v, basis, own, optimize=True)
    variance = np.einsum("jits,tj,si->st", half, basis, own, optimize=True)
    se = np.sqrt(np.maximum(variance, 0.0))
    values, U = np.linalg.eigh((V + V.T) / 2.0)
    drawn = (U * np.sqrt(np.maximum(values, 0.0))) @ random.normal(size=(len(V), draws))
    deviations = np.einsum("tj,si,jid->std", basis, own, drawn.reshape(L, k, draws), optimize=True)
    largest = np.abs(deviations / np.where(se > 0.0, se, np.inf)[..., None]).max(axis=(0, 1))
    return SurfaceBand(estimate, se, float(np.quantile(largest, level)))
