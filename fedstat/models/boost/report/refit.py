"""Refit of selected learners by penalized GLS: surfaces with confidence intervals and tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.linalg import block_diag, cho_solve, lapack
from scipy.stats import f as f_law
from scipy.stats import norm
from scipy.stats import t as t_law

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import DerivedReport
from fedstat.inference.tables import Sheet
from fedstat.kernels.multiple_tests import adjust
from fedstat.models.boost.learning.knots import doubled, knot_sums
from fedstat.models.boost.learning.learners import INTERCEPT
from fedstat.models.boost.learning.moments import CurveSums
from fedstat.models.boost.learning.prepared_learners import BoostDesign
from fedstat.models.boost.learning.selection import entry_p_values
from fedstat.models.boost.report.effects import learner_points
from fedstat.models.boost.report.plots import draw_surface
from fedstat.models.boost.report.prediction import new_columns, own_rows
from fedstat.models.boost.report.record import BoostRecord
from fedstat.models.checks import HeldRows
from fedstat.typing import Bools, Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# Penalized generalized least squares on some learners, from the sums of boosting: surfaces with intervals.
#
# A boosted surface is shrunken; intervals around it do not cover. Fitted again are the learners that were
# selected, with errors that are correlated along the response: their covariance follows from the products
# of the response in its basis. Smoothing parameters maximize the restricted likelihood by the updates of
# Fellner and Schall (Wood and Fasiolo 2017), and are a hundredth of that for intervals, or less where the
# penalty would outweigh the information: undersmoothed so that bias is small next to the error. Covariances
# are those of the posterior (Wood 2006), simultaneous bands from draws of it.

UNDERSMOOTHED = 0.01
ROUNDS, CLOSE = 60, 0.02
BOUNDS = (1e-6, 1e8)
FLOOR = 1e-9
"""Share of the largest eigenvalue of the errors' covariance, or of a Gram, below which there is none."""
FEW = 10
"""Curves a column below which simultaneous bands cover less than they say."""
DEPENDENT = (
    "Rows count as independent. If rows with the same '{column}' belong to one person, they are not, and "
    "standard errors and P values are too small."
)
NOTES = Catalogue(
    critical={
        "dependent_rows/together": DEPENDENT,
        "few_knots": "{knots}",
    },
    warning={
        "few_rows": "{rows:,.0f} rows for {columns} columns: with fewer than {least} rows per column, "
        "simultaneous bands cover less than their level, because the covariance of the errors is estimated.",
    },
    info={
        "conditions": "{conditions}",
        "undersmoothed": "Intervals hold for effects that the bases can represent. They are undersmoothed "
        "(a hundredth of the smoothing parameters of REML, or less), so bias is small compared with the "
        "error.",
        "dependent_rows": DEPENDENT,
        "knots": "{test}",
        "knots/doubled": "The knots are twice those of the formula, and were not tested themselves.",
        "entry_test": "P values differ from those of entry_test(): {terms}. Here each learner is tested "
        "given the others, with all its columns. entry_test() tests the smooth first step of each learner "
        "by itself, and adjusts for the number of learners. Both need independent rows.",
    },
)


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
class RefitSolution:
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


def refit(sums: CurveSums, design: BoostDesign, gram: Floats, learners: Sequence[int]) -> RefitSolution:
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
            f"{n:,.0f} rows for {q} columns of the chosen learners: the residual covariance cannot be "
            "estimated. Choose fewer learners or knots"
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
    rough = _residual_variance(own, gram, B, errors)
    return RefitSolution(tuple(chosen), places, parts, B, s2 * V, edf, tests, n, errors, rough)


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
    rank = _residual_products(own, np.concatenate([c for _, c in plain]))[1]
    if rank == sum(len(c) for _, c in plain):
        return
    rest = {label: [c for other, c in plain if other != label] for label, _ in plain[1:]}
    same = [
        label for label, other in rest.items() if _residual_products(own, np.concatenate(other))[1] == rank
    ]
    raise EstimationError(f"{' and '.join(same)} are collinear. Choose fewer of them")


def _shrunken(design: BoostDesign, p: int) -> bool:
    """Return whether the refit penalizes a learner along its covariate. Linear effects are not penalized."""
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
    """Coefficients, inverse of the penalized information, information, and scale."""
    q, L = own.T.shape
    middle = gram if Omega is None else gram @ Omega @ gram
    A = np.asarray(np.kron(middle, own.S))
    score = own.T if Omega is None else own.T @ Omega @ gram
    complete = A.copy()
    view = complete.reshape(L, q, L, q)
    for weight, one in zip(lam, penalties, strict=True):
        view[:, one.place, :, one.place] += weight * np.einsum("jl,ik->jilk", one.M2, one.M1)
    V = _spd_inverse(complete)
    beta = V @ score.ravel(order="F")
    yy = float(own.yy) if Omega is None else float((Omega * own.Q).sum())
    left = yy - 2.0 * float(beta @ score.ravel(order="F")) + float(beta @ A @ beta)
    df = own.n * (len(own.y) if Omega is None else L) - float((V * A).sum())
    return beta.reshape(q, L, order="F"), V, A, max(left, 0.0) / df


def _smooth(
    own: CurveSums, gram: Floats, Omega: Floats | None, penalties: Sequence[RefitPenalty]
) -> tuple[Floats, Floats, float]:
    """Maximize the restricted likelihood over smoothing parameters; coefficients, these, scale."""
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
    """Trace of the generalized inverse of a learner's whole penalty times each of its parts.

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
    full, rank = _residual_products(own, np.arange(len(own.S)))
    less, rank_less = _residual_products(own, rest)
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


def _residual_products(own: CurveSums, columns: Ints) -> tuple[Floats, int]:
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


def _residual_variance(own: CurveSums, gram: Floats, B: Floats, errors: Floats) -> float:
    """Variance of the errors at a point, but for what the response's basis can hold of them."""
    left = float(own.yy) - 2.0 * float((B * own.T).sum()) + float((B * (own.S @ B @ gram)).sum())
    rest = len(own.y) - int(np.linalg.matrix_rank(gram))
    complete = left / (own.n - len(B)) - float(np.trace(np.linalg.pinv(gram) @ errors))
    return max(complete, 0.0) / rest if rest > 0 else 0.0


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
    fitted: RefitSolution,
    p: int,
    at: Floats,
    basis: Floats,
    level: float,
    draws: int,
    random: np.random.Generator,
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


# ----------------------------------------------------------------------------------------------------
# Intervals of a response that was not observed: a refit's mean, and the errors around it.

BLOCK = 256
"""Rows whose covariances along the response are in memory at once."""


def error_variances(fitted: RefitSolution, basis: Floats) -> Floats:
    """Variance of the errors at each point of the response, (G,); `basis` (G, L) is that along it.

    What the basis can hold of the errors has its covariance from the fit; the rest is taken as independent
    and alike at all points.
    """
    inverse = np.linalg.pinv(basis.T @ basis)
    smooth = basis @ inverse
    within = np.einsum("gj,jl,gl->g", smooth, fitted.errors, smooth)
    rest = np.maximum(1.0 - np.einsum("gj,gj->g", smooth, basis), 0.0)
    return np.asarray(within + fitted.rough * rest)


def mean_variances(fitted: RefitSolution, Z: Floats, basis: Floats) -> Floats:
    """Variance of the fitted mean of rows with columns Z (m, q), at each point: (m, G)."""
    q, L = fitted.B.shape
    V, out = fitted.posterior.reshape(L, q, L, q), np.empty((len(Z), len(basis)))
    for first in range(0, len(Z), BLOCK):
        z = Z[first : first + BLOCK]
        own = np.einsum("iq,lqkr,ir->ilk", z, V, z, optimize=True)
        out[first : first + BLOCK] = np.einsum("gl,ilk,gk->ig", basis, own, basis, optimize=True)
    return np.maximum(out, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class BoostPrediction:
    """Predictions with intervals, (m, G), NaN where a row lacks something.

    Rows have the names of `index`, and `t` are points of the response.

    Attributes
    ----------
    predicted_mean, var_pred_mean, var_resid : ndarray
        Mean, its variance, and that of the errors (G,).
    df_resid : float
        Rows less columns of the refit: of Student's t.
    conditions : str
        What the intervals are conditional on.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> predicted = model.fit(steps=20, folds=6).refit().get_prediction(table.head(2))
    >>> predicted.summary_frame().columns[:2].tolist()
    ['mean', 'mean_se']
    """

    predicted_mean: Floats
    var_pred_mean: Floats
    var_resid: Floats
    df_resid: float
    conditions: str
    index: pd.Index
    t: Floats | None

    @takes_alpha
    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Means, and intervals of level 1 - alpha, with statsmodels' names.

        Returns
        -------
        DataFrame
            ``mean``, ``mean_se``, ``mean_ci_lower``, ``mean_ci_upper``, and ``obs_ci_lower`` and
            ``obs_ci_upper`` of a response that was not observed, at each point by itself; rows by those
            that were given, and by ``t`` of a curve. ``attrs["conditions"]`` says what they are conditional
            on.
        """
        factor = float(t_law.isf(alpha / 2.0, self.df_resid))
        mean, se = self.predicted_mean, np.sqrt(self.var_pred_mean)
        of_one = np.sqrt(self.var_pred_mean + self.var_resid)
        columns = {"mean": mean, "mean_se": se}
        for name, size in (("mean", se), ("obs", of_one)):
            columns |= {f"{name}_ci_lower": mean - factor * size, f"{name}_ci_upper": mean + factor * size}
        index = self.index
        if self.t is not None:
            names = [str(self.index.name or "row"), "t"]
            index = pd.MultiIndex.from_product([self.index.tolist(), self.t.tolist()], names=names)
        out = pd.DataFrame({name: values.ravel() for name, values in columns.items()}, index=index)
        out.attrs["conditions"] = self.conditions
        return out


# ----------------------------------------------------------------------------------------------------
# Surfaces with intervals and tests, fitted again to the sums of boosting.

SELECTED = (
    "Intervals and p-values are conditional on the learners that boosting selected from the same rows, and "
    "too favorable where it chose among many: split() selects and estimates on different rows."
)
HALVES = "Learners were selected by one half of the folds, and estimated from the other."
GIVEN = "Learners were given; where they were chosen by these rows, intervals and p-values do not know of it."
FEW_KNOTS = 8
"""Knots below which a refit needs a test of them."""
KNOT_LEVEL = 0.05
FEW_KNOTS_TEXT = (
    "FEW KNOTS: fewer than {1} knots in {0}. If an effect has finer features, intervals and bands do not "
    "contain it ({2})."
)
CHANCE = "Twice as many knots explain no more than chance (smallest P = {:.3f}, adjusted for {} tests)."
TESTED = "from_formula(..., check_knots=True) tests the knots."
DOUBLED = (
    "The test misses features that are small compared with the noise: refit(doubled=True) can represent them."
)
TOO_FEW_KNOTS = (
    "TOO FEW KNOTS: {} (P = {:.3f}, adjusted for {} tests). The effects have features that these knots "
    "cannot represent, and intervals and bands miss them. refit(doubled=True) has twice as many knots, from "
    "the same sums"
)
ENTRY_DRAWS, LEVEL = 199, 0.05
SIMULATED = "in 24 simulated runs with 4 knots, 95 % intervals of rough effects covered 55 %, and bands 46 %"
DRAWS = 500
COLUMNS = ("learner", "columns", "edf", "F", "df", "df resid", "p")
WIDTHS = (43, 8, 8, 11, 6, 9, 7)


class SurfaceFit(DerivedReport):
    """Learners fitted again by generalized least squares, with errors that are correlated along the response.

    Attributes
    ----------
    tests : DataFrame
        By learner: columns, effective coefficients ``edf``, and a test of no effect: ``F`` of Wilks' lambda,
        with its degrees of freedom ``df`` and ``df_resid``, and ``p_value``. It knows of no smoothness.
    conditions : str
        What intervals and tests are conditional on.
    knots : DataFrame or None
        With ``check_knots=True``: for every learner with splines, and ``along`` the learner ("s") or the
        response ("t"), the test that twice as many knots explain no more: ``F``, ``df``, ``df_resid``,
        ``p_value``, and ``p_adjusted`` for the number of tests (Holm 1979).

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> found = model.fit(steps=20, folds=6).refit()
    >>> learner = found.summary().as_text().count("age") > 0
    >>> len(found.surface("sex")), bool(found.plot("sex").has_data()), "sex" in found.summary().as_text()
    (1, True, True)
    >>> found.get_prediction(table.head(2)).summary_frame().shape
    (2, 6)
    """

    def __init__(
        self,
        held: BoostRecord,
        fitted: RefitSolution,
        start: Floats,
        conditions: str,
        seed: int,
        knots: pd.DataFrame | None = None,
        *,
        doubled: bool = False,
        sources: Iterable[object],
    ) -> None:
        super().__init__(sources)
        self.knots, self._doubled = knots, doubled
        self._held, self._fitted, self._seed = held, fitted, seed
        self._start = start  # mean of the response, (G,), around which learners were fitted
        self.conditions = conditions
        fits = list(zip(fitted.learners, fitted.places, fitted.tests, strict=True))[1:]  # without intercept
        labels = [held.boosting.design.learners[p].label for p, _, _ in fits]
        width = fitted.B.shape[1]
        self.tests = pd.DataFrame(
            {
                "columns": [width * (place.stop - place.start) for _, place, _ in fits],
                "edf": [float(fitted.edf[fitted.rows_of(p)].sum()) for p, _, _ in fits],
                "F": [one.statistic for _, _, one in fits],
                "df": [one.df for _, _, one in fits],
                "df_resid": [one.df_resid for _, _, one in fits],
                "p_value": [one.p_value for _, _, one in fits],
            },
            index=pd.Index(labels, name="learner"),
        )

    @takes_alpha
    def surface(self, learner: str, alpha: float = 0.05) -> pd.DataFrame:
        """Effect of a learner with intervals.

        Parameters
        ----------
        learner : str
            Its label, or what it is of.
        alpha : float
            One minus the level of intervals and band.

        Returns
        -------
        DataFrame
            As :meth:`BoostResults.surface`, and ``se``, ``lower`` and ``upper`` of each point, ``band_lower``
            and ``band_upper`` of a band that holds the whole effect with this probability.
        """
        design = self._held.boosting.design
        place = design.place(learner)
        if place not in self._fitted.learners:
            known = ", ".join(map(repr, self.tests.index))
            raise ModelError(f"learner: expected one of those fitted, {known}; received {learner!r}")
        name, points, at = learner_points(self._held, place)
        random = np.random.default_rng([self._seed, place])
        found = band(self._fitted, place, at, self._held.boosting.basis, 1.0 - alpha, DRAWS, random)
        G = found.estimate.shape[1]
        columns: dict[str, object] = {name: [point for point in points for _ in range(G)]}
        if design.time is not None:
            columns["t"] = np.tile(self._held.t, len(points))
        z = float(norm.isf(alpha / 2.0))
        columns |= {"estimate": found.estimate.ravel(), "se": found.se.ravel()}
        for prefix, factor in (("", z), ("band_", found.factor)):
            columns[f"{prefix}lower"] = (found.estimate - factor * found.se).ravel()
            columns[f"{prefix}upper"] = (found.estimate + factor * found.se).ravel()
        return pd.DataFrame(columns)

    def get_prediction(self, exog: HeldRows) -> BoostPrediction:
        """Predict the response of rows that you hold, with intervals.

        Of the mean, and of a response that was not observed: the errors' covariance along a curve follows
        from the fit. They are conditional on what `conditions` says.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            Rows with columns as the sites have them.

        Returns
        -------
        BoostPrediction
            Its ``summary_frame(alpha=0.05)`` has statsmodels' names.
        """
        fitted, design, basis = self._fitted, self._held.boosting.design, self._held.boosting.basis
        exog = own_rows(exog)
        complete, _, columns = new_columns(self._held, exog)
        chosen = zip(fitted.learners, fitted.parts, strict=True)
        Z = np.column_stack([columns[:, design.columns(p)] @ part for p, part in chosen])
        mean = np.full((len(exog), len(basis)), np.nan)
        variances = mean.copy()
        mean[complete] = self._start + Z @ fitted.B @ basis.T
        variances[complete] = mean_variances(fitted, Z, basis)
        t = None if design.time is None else self._held.t
        df, errors = fitted.rows - len(fitted.B), error_variances(fitted, basis)
        return BoostPrediction(mean, variances, errors, df, self.conditions, exog.index, t)

    def plot(self, learner: str, ax: Axes | None = None) -> Axes:
        """Draw an effect, of one argument with its intervals."""
        return draw_surface(self.surface(learner), learner, self._held.formula.response, ax)

    def _sheets(self) -> Iterator[Sheet]:
        """Return the tests of learners."""
        rows = tuple(
            (
                str(label),
                f"{one['columns']:.0f}",
                f"{one['edf']:.1f}",
                f"{one['F']:.2f}",
                f"{one['df']:.0f}",
                f"{one['df_resid']:.0f}",
                f"{one['p_value']:.3f}",
            )
            for label, one in self.tests.iterrows()
        )
        yield Sheet(COLUMNS, rows, "lrrrrrr", WIDTHS, "Learners refitted by generalized least squares")

    def tidy(self) -> pd.DataFrame:
        """Return the tests of learners.

        Returns
        -------
        DataFrame
            ``term``, ``columns``, ``edf``, ``statistic`` (F), ``df``, ``df_resid``, ``p_value``.
        """
        return self.tests.rename(columns={"F": "statistic"}).rename_axis("term").reset_index()

    def _glance(self) -> dict[str, float]:
        return {"nobs": self._fitted.rows, "learners": len(self.tests)}

    def _summary_notes(self) -> Iterator[Note]:
        yield from self._knot_notes()
        yield NOTES.note("conditions", conditions=self.conditions)
        if name := self._held.together or self._held.person:
            kind = "dependent_rows/together" if self._held.together else "dependent_rows"
            yield NOTES.note(kind, column=name)
        yield from self._entry_notes()
        yield NOTES.note("undersmoothed")
        q, n = self._fitted.B.shape[0], self._fitted.rows
        if n < FEW * q:
            yield NOTES.note("few_rows", rows=n, columns=q, least=FEW)

    def _knot_notes(self) -> Iterator[Note]:
        """Announce few knots, also where the test finds no lack of fit, which noise may hide."""
        design = self._held.boosting.design
        wide = (design.learners[p] for p in self._fitted.learners)
        made = [one.label for one in wide if doubled(one) is not one and one.knots < FEW_KNOTS]
        made += ["time"] if design.time is not None and design.time.knots < FEW_KNOTS else []
        tests = self.knots
        few = None if tests is None else tests[tests["p_adjusted"] < KNOT_LEVEL]
        chance = (
            "" if tests is None or not len(tests) else CHANCE.format(tests["p_adjusted"].min(), len(tests))
        )
        if tests is not None and few is not None and len(few):
            listed = ", ".join(f"{label} along {along}" for label, along in few.index)
            text = TOO_FEW_KNOTS.format(listed, few["p_adjusted"].max(), len(tests))
            yield NOTES.note("few_knots", knots=f"{text}.")
        elif made:
            remedy = DOUBLED if chance else "" if self._doubled else TESTED
            text = FEW_KNOTS_TEXT.format(", ".join(made), FEW_KNOTS, SIMULATED)
            yield NOTES.note("few_knots", knots=" ".join(filter(None, (text, chance, remedy))))
        elif chance:
            yield NOTES.note("knots", test=chance)
        if self._doubled:
            yield NOTES.note("knots/doubled")

    def _entry_notes(self) -> Iterator[Note]:
        """Explain a difference between the tests here and the entry test."""
        boosting = self._held.boosting
        if self.conditions == HALVES:
            return
        _, adjusted = entry_p_values(boosting, ENTRY_DRAWS, np.random.default_rng(0))
        alone = dict(zip([one.label for one in boosting.design.learners[1:]], adjusted, strict=True))
        apart = [
            f"{label} ({p:.3f} here, {alone[str(label)]:.3f} there)"
            for label, p in self.tests["p_value"].items()
            if (p < LEVEL) != (alone[str(label)] < LEVEL)
        ]
        if apart:
            yield NOTES.note("entry_test", terms=apart)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.tests)} learners; see .summary()>"


def fit_surfaces(
    held: BoostRecord,
    folds: Bools,
    learners: Sequence[int],
    conditions: str,
    seed: int,
    *,
    doubled: bool = False,
    sources: Iterable[object],
) -> SurfaceFit:
    """Fit learners to the sums of some folds, (F,); `doubled` if these are for doubled knots."""
    boosting = held.boosting
    sums = boosting.even.over(folds)
    centered = sums.about(sums.mean, boosting.basis)
    fitted = refit(centered, boosting.design, boosting.gram, learners)
    knots = None if held.doubled is None else knot_tests(held, folds, fitted.learners)
    return SurfaceFit(held, fitted, sums.mean, conditions, seed, knots, doubled=doubled, sources=sources)


def knot_tests(held: BoostRecord, folds: Bools, learners: Sequence[int]) -> pd.DataFrame:
    """Test the given knots by the sums for doubled ones."""
    assert held.doubled is not None
    fine = held.doubled.boosting(held.boosting)
    sums = fine.even.over(folds)
    parts = knot_sums(sums.about(sums.mean, fine.basis), held.boosting.design, fine.gram, learners)
    tests = [test_effect(one.sums, one.place) for one in parts]
    index = pd.MultiIndex.from_tuples([(one.learner, one.along) for one in parts], names=["learner", "along"])
    out = pd.DataFrame(
        {
            "F": [one.statistic for one in tests],
            "df": [one.df for one in tests],
            "df_resid": [one.df_resid for one in tests],
            "p_value": [one.p_value for one in tests],
        },
        index=index,
    ).dropna()
    return out.assign(p_adjusted=adjust(out["p_value"].to_numpy()))
