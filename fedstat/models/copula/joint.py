"""The joint distribution behind a release: a copula of ordered columns, then levels and missing cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import ndtri
from scipy.stats import qmc

from fedstat.kernels.copula import (
    ORDER,
    code_latents,
    expected_products,
    latent_correlations,
    nearest_correlation,
    scores_of_codes,
)
from fedstat.models.copula.correlation import (
    FEWEST_DRAWS,
    INVERSION_MAXITER,
    INVERSION_SEED,
    INVERSION_TOL,
    MOST_DRAWS,
    Inversion,
    ScoredPattern,
    fit_normal,
    invert_products,
)
from fedstat.models.copula.margins import MISSING, Margin, tables_of
from fedstat.models.copula.request import NoisePlan
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Levels without an order, and missing cells, given the columns before: multinomial logits.
#
# The release has the products of the indicator of every level with the scores of all columns. Of all
# conditional distributions of the levels that reproduce these products and the margin, the multinomial logit
# in the scores has the largest entropy (Berger, Della Pietra and Della Pietra 1996). Its coefficients
# maximize a concave function. Products have noise: a penalty makes them hold up to half a deviation of the
# noise for each unit of a coefficient, so that noise yields no extreme coefficients.
#
# References
# ----------
# Berger, A., Della Pietra, S. and Della Pietra, V. (1996). A maximum entropy approach to natural language
# processing. Computational Linguistics 22, 39-71.

LOGIT_MAXITER = 200
LOGIT_TOL = 3e-5
OF_NOISE, LEAST_PENALTY = 0.5, 1e-5
"""Penalty as a share of the noise, and the smallest one, for levels that exclude each other."""
COLLINEAR = 1e-6


def fit_levels(
    features: Floats, shares: Floats, products: Floats, noise: Floats, start: Floats | None = None
) -> Floats:
    """Return coefficients (K, F + 1), constant first, of a multinomial logit with these expected products.

    Parameters
    ----------
    features : (N, F)
        Features of rows of the distribution of the columns before.
    shares : (K,)
        Shares of the levels, which sum to one.
    products : (K, F)
        Expected products of indicators of the levels and features.
    noise : (F,)
        Deviation of the noise on mean products with each feature.
    start : (K, F + 1), optional
        Coefficients of an earlier fit.

    Notes
    -----
    Levels with a share of zero have probability zero. Products of all levels add up to the mean of the
    features; noise in this sum is spread over the levels by their shares.
    """
    live = shares > 0.0
    out = np.zeros((len(shares), features.shape[1] + 1))
    out[~live, 0] = -np.inf
    if live.sum() < 2:
        return out
    p = shares[live] / shares[live].sum()
    means = features.mean(axis=0)
    target = products[live] + np.outer(p, means - products[live].sum(axis=0))
    H = np.column_stack([np.ones(len(features)), features])
    T = np.column_stack([p, target])
    ridge = np.concatenate([[0.0], np.maximum(OF_NOISE * noise, LEAST_PENALTY)])
    # In orthonormal features the curvature is about the same in all directions.
    square = H.T @ H / len(H) + np.diag(ridge)
    root = np.linalg.cholesky(square + COLLINEAR * np.trace(square) / len(square) * np.eye(len(square)))
    whitened, whitened_target = np.linalg.solve(root, H.T).T, np.linalg.solve(root, T.T).T
    inverse = np.linalg.inv(root)
    weight = (inverse * ridge) @ inverse.T

    def loss(flat: Floats) -> tuple[float, Floats]:
        C = flat.reshape(T.shape)
        eta = whitened @ C.T
        top = eta.max(axis=1)
        likely = np.exp(eta - top[:, None])
        sums = likely.sum(axis=1)
        shrunk = C @ weight
        slope = (likely / sums[:, None]).T @ whitened / len(H) - whitened_target + shrunk
        value = (top + np.log(sums)).mean() - (whitened_target * C).sum() + 0.5 * (shrunk * C).sum()
        return float(value), slope.ravel()

    first = np.zeros(T.shape)
    first[:, 0] = np.log(p)
    if start is not None and np.isfinite(start[live]).all():
        first = start[live]
    found = minimize(
        loss,
        (first @ root).ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": LOGIT_MAXITER, "gtol": LOGIT_TOL, "ftol": 1e-10, "maxcor": 20},
    )
    out[live] = found.x.reshape(T.shape) @ inverse
    return out


def draw_levels(coefficients: Floats, features: Floats, uniforms: Floats) -> Ints:
    """Draw levels of a multinomial logit at features (N, F) by uniform numbers (N,)."""
    eta = (
        coefficients[:, 0] + features @ np.where(np.isfinite(coefficients[:, 1:]), coefficients[:, 1:], 0.0).T
    )
    eta -= eta.max(axis=1, keepdims=True)
    upper = np.cumsum(np.exp(eta), axis=1)
    chosen: Ints = (upper < (uniforms * upper[:, -1])[:, None]).sum(axis=1)
    return np.minimum(chosen, len(coefficients) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class LevelModel:
    """Levels of column `column`, or with `gap` its missing cells, given the scores `given` of rows.

    `coefficients` (K, F + 1) have the constant first; the two levels of a gap are observed and missing, and
    the last level of a column whose margin has missing cells is a missing cell.
    """

    column: int
    gap: bool
    given: Ints
    coefficients: Floats


@dataclass(frozen=True)
class ScoreLayout:
    """Positions of columns and their scores: which site, which scores, and what kind.

    `owner` (p,) is the number of each column's site, `width` (p,) its number of scores, `nominal` and `gap`
    (p,) whether it has levels without an order, and missing cells. The rank score of an ordered column is its
    first score, the indicator of a missing cell the last one. `radii` (K,) are squared lengths of a site's
    part of a row.
    """

    owner: Ints
    width: Ints
    nominal: Bools
    gap: Bools
    radii: Floats

    @classmethod
    def of(cls, plan: NoisePlan) -> ScoreLayout:
        """Read the layout of a synthesis."""
        sites = list(plan.columns)
        bins = [one for site in sites for one in plan.columns[site]]
        gaps = [j in plan.gaps.get(site, ()) for site in sites for j in range(len(plan.columns[site]))]
        return cls(
            owner=np.repeat(np.arange(len(sites)), [len(plan.columns[site]) for site in sites]),
            width=np.array([width for site in sites for width in plan.widths(site)], dtype=np.int64),
            nominal=np.array([one.nominal for one in bins], dtype=np.bool_),
            gap=np.array(gaps, dtype=np.bool_),
            radii=np.array([float(plan.radius(site)) for site in sites]),
        )

    @cached_property
    def first(self) -> Ints:
        """Position of the first score of every column: (p,)."""
        return np.cumsum(self.width) - self.width

    @property
    def q(self) -> int:
        """Number of scores."""
        return int(self.width.sum())

    @cached_property
    def ordered(self) -> Ints:
        """Columns with an order."""
        return np.flatnonzero(~self.nominal)

    @cached_property
    def owners_of_scores(self) -> Ints:
        """Number of the site of every score: (q,)."""
        return np.repeat(self.owner, self.width)

    def scores_of(self, column: int) -> Ints:
        """Positions of the scores of a column."""
        return np.arange(self.first[column], self.first[column] + self.width[column])

    @cached_property
    def gap_scores(self) -> Ints:
        """Positions of the indicators of missing cells of ordered columns with gaps."""
        held = ~self.nominal & self.gap
        return self.first[held] + 1

    def only(self, columns: Ints) -> ScoreLayout:
        """Return the layout of some columns, of the sites that have them."""
        sites, owner = np.unique(self.owner[columns], return_inverse=True)
        return ScoreLayout(
            owner.astype(np.int64),
            self.width[columns],
            self.nominal[columns],
            self.gap[columns],
            self.radii[sites],
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether every column is ordered and complete."""
        return not (self.nominal.any() or self.gap.any())

    def factors(self, scores: Floats) -> Floats:
        """Return the factors by which each site's part of a row of scores (N, q) is cut: (N, K).

        A column without an order adds one to a square, whatever its level, also where it is not drawn yet.
        """
        square = np.empty((len(scores), len(self.radii)))
        drawn = np.concatenate([self.first[~self.nominal], self.gap_scores])
        for k in range(len(self.radii)):
            own = drawn[self.owners_of_scores[drawn] == k]
            square[:, k] = np.einsum("ij,ij->i", scores[:, own], scores[:, own])
            square[:, k] += np.count_nonzero(self.nominal & (self.owner == k))
        return np.sqrt(np.minimum(1.0, self.radii / np.maximum(square, 1e-300)))


@dataclass(frozen=True, eq=False)
class JointModel:
    """Margins (p,), the copula of the ordered columns, then levels and missing cells."""

    layout: ScoreLayout
    margins: tuple[Margin, ...]
    inversion: Inversion
    levels: tuple[LevelModel, ...] = ()

    def draw_codes(self, n: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
        """Draw latent normals of ordered columns (n, p0), and codes of all columns (n, p), -1 if missing."""
        root = np.linalg.cholesky(self.inversion.correlation)
        Z = rng.standard_normal((n, len(root))) @ root.T
        uniforms = rng.random((n, len(self.levels)))
        return Z, self.codes_at(Z, uniforms)

    def codes_at(self, Z: Floats, uniforms: Floats) -> Ints:
        """Return codes of all columns (n, p) at latent normals (n, p0) and uniform numbers of the levels."""
        ordered = [self.margins[j] for j in self.layout.ordered]
        thresholds, scores, bins = tables_of(ordered)
        codes = np.zeros((len(Z), len(self.margins)), dtype=np.int64)
        codes[:, self.layout.ordered] = code_latents(Z, thresholds, bins)
        rows = np.zeros((len(Z), self.layout.q))
        rows[:, self.layout.first[self.layout.ordered]] = scores_of_codes(
            codes[:, self.layout.ordered], scores
        )
        for model, u in zip(self.levels, uniforms.T, strict=True):
            self.add(model, rows, codes, u)
        return codes

    def add(self, model: LevelModel, rows: Floats, codes: Ints, uniforms: Floats) -> None:
        """Draw the levels or missing cells of one column, into rows of scores (n, q) and codes (n, p)."""
        drawn = draw_levels(model.coefficients, features_of(self.layout, rows, model), uniforms)
        at = self.layout.first[model.column]
        if model.gap:
            gone = drawn == 1
            rows[gone, at], rows[gone, at + 1], codes[gone, model.column] = 0.0, 1.0, MISSING
        else:
            rows[np.arange(len(rows)), at + drawn] = 1.0
            codes[:, model.column] = np.where(drawn < self.margins[model.column].bins.count, drawn, MISSING)

    def draw_rows(self, n: int, rng: np.random.Generator) -> pd.DataFrame:
        """Draw n rows."""
        Z, codes = self.draw_codes(n, rng)
        columns: dict[str, Array | pd.Series] = {}
        places = {int(j): i for i, j in enumerate(self.layout.ordered)}
        for j, margin in enumerate(self.margins):
            gone = codes[:, j] == MISSING
            if j in places:
                values = margin.quantile(np.ascontiguousarray(Z[:, places[j]]))
            else:
                values = margin.bins.values(np.where(gone, 0, codes[:, j]))
            columns[margin.bins.name] = pd.Series(values).mask(gone) if gone.any() else values
        return pd.DataFrame(columns)


def features_of(layout: ScoreLayout, rows: Floats, model: LevelModel) -> Floats:
    """Return the scores that a column depends on, cut as in products with that column: (n, F)."""
    factors, k = layout.factors(rows), int(layout.owner[model.column])
    owners = layout.owners_of_scores[model.given]
    cut: Floats = rows[:, model.given] * factors[:, owners] * factors[:, [k]]
    return cut


# ----------------------------------------------------------------------------------------------------
# The joint distribution from a release.

SHIFT_DRAWS = 2**14
"""Rows in the simulation of missing cells."""
SHIFT_STEP, MOST_SHIFT = 0.9, 3.0
LEAST_SPREAD, MOST_SPREAD = 0.3, 3.0
SHIFT_TOL = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class ScoreMoments:
    """Mean products (q, q) and means (q,) of cut scores, with 0 for missing cells, their noise and entities.

    `noise` and `pairs` (q, q) are the deviation of the noise on a mean product and the entities behind it.
    If `adjusted`, means are not those of the margins, and products include squares.
    """

    products: Floats
    means: Floats
    noise: Floats
    pairs: Ints
    adjusted: bool


def find_joint(layout: ScoreLayout, margins: Sequence[Margin], moments: ScoreMoments) -> JointModel:
    """Find the joint distribution with these expected products of cut scores."""
    ordered = layout.ordered
    scores = layout.first[ordered]
    if not len(ordered):
        found = tuple(margins)
        inversion = Inversion(np.zeros((0, 0)), np.zeros(0))
    elif layout.is_plain:
        places = [np.flatnonzero(layout.owner == k) for k in range(len(layout.radii))]
        blocks = [slice(int(own[0]), int(own[-1]) + 1) for own in places]
        return JointModel(
            layout,
            tuple(margins),
            invert_products(moments.products, margins, blocks, list(layout.radii)),
        )
    else:
        found, inversion = _find_ordered(layout, list(margins), scores, moments)
    model = JointModel(layout, found, inversion)
    return _with_levels(model, moments)


@dataclass(frozen=True, slots=True, eq=False)
class PatternScores:
    """Means (q,) and mean products (q, q) of the cut scores of `n` entities with one missing pattern.

    `sites` are the numbers of the sites that have them. Other scores are 0.
    """

    n: int
    sites: Ints
    means: Floats
    products: Floats


def find_adjusted(
    layout: ScoreLayout,
    margins: Sequence[Margin],
    patterns: Sequence[PatternScores],
    moments: ScoreMoments,
    edge_noise: Sequence[float],
) -> JointModel:
    """Find the joint distribution of all entities by maximum likelihood over missing patterns.

    `edge_noise` (p,) is the deviation of the noise on the distribution function of each column.

    Valid if missing records depend on observed values only (missing at random). In every pattern the latent
    normals of the ordered columns have a normal distribution, with a mean and a covariance of their own; the
    EM algorithm finds those of all entities. They move the margins: with mean m and deviation s of a latent
    normal, F(x) = Phi((Phi^-1(F_obs(x)) - m) / s). Columns with few values of sites that have nearly all
    entities take part by their scores: missing records of other sites depend on these, and not on the latent
    normal behind them, whose part would be several times too large. Levels and missing cells given the other
    columns are those of the largest pattern of all sites; without one, their indicators take part linearly.
    """
    total = sum(one.n for one in patterns)
    present = [sum(one.n for one in patterns if k in one.sites) for k in range(len(layout.radii))]
    tied = {
        j: math.sqrt(margins[j].variance)
        for j in np.flatnonzero(~layout.nominal).tolist()
        if margins[j].variance < UNTIED and present[layout.owner[j]] >= MOSTLY * total
    }
    q, latent = layout.q, layout.first[layout.ordered]
    units = np.ones(q)
    for j in np.flatnonzero(layout.width > (~layout.nominal)).tolist():
        own = layout.scores_of(j)[int(~layout.nominal[j]) :]
        table = np.concatenate([margins[j].probabilities * (1.0 - margins[j].missing), [margins[j].missing]])
        p = table[: len(own)] if layout.nominal[j] else table[-1:]
        units[own] = np.maximum(np.sqrt(p * (1.0 - p)), LEAST_UNIT)
    scored, entire = list[ScoredPattern](), list[tuple[JointModel, PatternScores]]()
    for one in patterns:
        columns = np.flatnonzero(np.isin(layout.owner, one.sites))
        part, at = layout.only(columns), np.flatnonzero(np.isin(layout.owners_of_scores, one.sites))
        held = [margins[j] for j in columns.tolist()]
        inside = one.products[np.ix_(at, at)]
        means, second = one.means[at] / units[at], inside / np.outer(units[at], units[at])
        if len(part.ordered):
            places = part.first[part.ordered]
            known = ScoreMoments(inside, one.means[at], np.zeros_like(inside), moments.pairs, True)
            found, inversion = _find_ordered(part, held, places, known)
            if len(one.sites) == len(layout.radii):
                entire.append((JointModel(layout, found, inversion), one))
            partial = [found[j] for j in part.ordered]
            unit = [tied.get(int(columns[j]), 0.0) for j in part.ordered]
            slopes = _slopes(part, found, inversion.correlation)
            terms = np.array([_terms(margin, size) for margin, size in zip(partial, unit, strict=True)])
            # Slopes of cut scores by what takes part.
            slopes = slopes * np.array([margin.spread for margin in partial]) / terms[:, 0]
            centered = second - np.outer(means, means)
            centered[places] /= slopes[:, None]
            centered[:, places] /= slopes
            centered[np.ix_(places, places)] = _covariance(partial, unit, terms, inversion.correlation)
            means[places] = [
                margin.mean / size if size else margin.shift
                for margin, size in zip(partial, unit, strict=True)
            ]
            second = centered + np.outer(means, means)
        scored.append(ScoredPattern.of_noisy(one.n, at, means, second))
    mean, covariance = fit_normal(scored, q)
    spreads = np.clip(np.sqrt(np.diag(covariance))[latent], LEAST_SPREAD, MOST_SPREAD)
    moved, unit = list(margins), [tied.get(int(j), 0.0) for j in layout.ordered]
    everywhere = [k for k in range(len(layout.radii)) if all(k in one.sites for one in patterns)]
    for j, m, s, size in zip(layout.ordered, mean[latent].tolist(), spreads.tolist(), unit, strict=True):
        if layout.owner[j] in everywhere:  # the margin is that of all entities
            continue
        if size:
            moved[j] = _with_moments(margins[j], size * m, (size * s) ** 2)
            continue
        shift = float(np.clip(m, -MOST_SHIFT, MOST_SHIFT))
        moved[j] = replace(margins[j].trimmed(edge_noise[j]), shift=shift, spread=s)
    deviations = np.sqrt(np.diag(covariance))[latent]
    terms = np.array(
        [
            _terms(moved[j], size) if size else deviation * np.eye(1, ORDER)[0]
            for j, size, deviation in zip(layout.ordered, unit, deviations.tolist(), strict=True)
        ]
    )
    pairs, upper = np.eye(len(latent)), np.triu_indices(len(latent), 1)
    r = latent_correlations(covariance[np.ix_(latent, latent)][upper], terms[upper[0]], terms[upper[1]])
    pairs[upper], pairs.T[upper] = r, r
    correlation = nearest_correlation(pairs)
    model = JointModel(layout, tuple(moved), Inversion(correlation, np.zeros(len(latent))))
    if layout.is_plain:
        return model
    if entire:  # the distribution of levels given the other columns is the same in every pattern
        there, largest = max(entire, key=lambda pair: pair[1].n)
        known = ScoreMoments(largest.products, largest.means, moments.noise, moments.pairs, True)
        return replace(model, levels=_with_levels(there, known).levels)
    scale, center = units.copy(), mean * units
    slopes = _slopes(layout, model.margins, correlation)
    scale[latent] = slopes * np.array([moved[j].spread for j in layout.ordered]) / terms[:, 0]
    center[latent] = np.array([moved[j].mean for j in layout.ordered])
    products = covariance * np.outer(scale, scale) + np.outer(center, center)
    return _with_levels(model, ScoreMoments(products, center, moments.noise, moments.pairs, True))


UNTIED, MOSTLY = 0.95, 0.8
"""Variance of a column's scores, 1 without ties, below which the column takes part by its scores, and the
share of the entities that its site then has."""


def _terms(margin: Margin, unit: float) -> Floats:
    """Hermite terms (M,) of what takes part: scores in a `unit`, or the latent normal if it is zero."""
    terms: Floats = margin.spread * np.eye(1, ORDER)[0]
    if not unit:
        return terms
    terms = margin.coefficients / unit
    terms[0] = max(terms[0], LEAST_SLOPE)
    return terms


def _covariance(own: Sequence[Margin], unit: Sequence[float], terms: Floats, correlation: Floats) -> Floats:
    """Covariance (p0, p0) of scores in their `unit`, and of latent normals, at a copula's correlation."""
    found, upper = np.eye(len(own)), np.triu_indices(len(own), 1)
    products = expected_products(terms[upper[0]], terms[upper[1]], correlation[upper])
    found[upper], found.T[upper] = products, products
    variances = [
        (float(one.everywhere @ one.scores**2) - one.mean**2) / size**2 if size else one.spread**2
        for one, size in zip(own, unit, strict=True)
    ]
    found[np.diag_indices(len(own))] = variances
    return found


def _with_moments(margin: Margin, mean: float, variance: float) -> Margin:
    """Move a margin until its scores over all entities have a mean and, with three values, a variance."""
    several = int(np.count_nonzero(margin.probabilities)) > 2
    for _ in range(MOMENT_STEPS):
        now = float(margin.everywhere @ margin.scores**2) - margin.mean**2
        slope = max(float(margin.coefficients[0]) / margin.spread, LEAST_SLOPE)
        factor = (variance / max(now, 1e-9)) ** 0.5 if several else 1.0
        margin, change = _moved(margin, (mean - margin.mean) / slope, factor)
        if change < SHIFT_TOL:
            break
    return margin


MOMENT_STEPS = 40
LEAST_UNIT, LEAST_SLOPE = 0.03, 0.05
SLOPE_DRAWS = 2**14


def _slopes(layout: ScoreLayout, margins: Sequence[Margin], correlation: Floats) -> Floats:
    """Return the slope of every cut rank score by its latent normal among observed cells: (p0,)."""
    own = [margins[j] for j in layout.ordered]
    draws = np.random.default_rng(INVERSION_SEED).standard_normal((SLOPE_DRAWS, len(own)))
    Z = draws @ np.linalg.cholesky(correlation).T
    thresholds, tables, bins = tables_of(own)
    rows = np.zeros((SLOPE_DRAWS, layout.q))
    scores = layout.first[layout.ordered]
    rows[:, scores] = scores_of_codes(code_latents(Z, thresholds, bins), tables)
    cut = rows[:, scores] * layout.factors(rows)[:, layout.owner[layout.ordered]]
    slopes: Floats = ((cut - cut.mean(axis=0)) * Z).mean(axis=0) / np.array([one.spread for one in own])
    return np.asarray(np.maximum(slopes, LEAST_SLOPE))


def _fit_one(
    layout: ScoreLayout,
    model: LevelModel,
    rows: Floats,
    moments: ScoreMoments,
    shares: Floats,
) -> LevelModel:
    """Fit the levels of one column to the products of its indicators with the scores before."""
    own = layout.scores_of(model.column)
    own = own[1:] if model.gap else own
    products = moments.products[np.ix_(own, model.given)]
    noise = moments.noise[own[0], model.given]
    features = features_of(layout, rows, model)
    if model.gap:
        products = np.vstack([features.mean(axis=0) - products[0], products[0]])
        noise = noise / 2.0
    start = model.coefficients if len(model.coefficients) else None
    fitted = fit_levels(features, shares, products, noise, start)
    return LevelModel(model.column, model.gap, model.given, fitted)


def _shares(layout: ScoreLayout, margins: Sequence[Margin], moments: ScoreMoments, column: int) -> Floats:
    """Return shares of the levels of a column, or of its observed and missing cells."""
    margin, own = margins[column], layout.scores_of(column)
    if not layout.nominal[column]:
        missing = float(moments.means[own[-1]]) if moments.adjusted else margin.missing
        return np.array([1.0 - missing, missing]).clip(0.0, 1.0)
    if moments.adjusted:
        shares = np.clip(moments.means[own], 0.0, None)
    else:
        shares = margin.probabilities * (1.0 - margin.missing)
        shares = np.append(shares, margin.missing) if layout.gap[column] else margin.probabilities
    return np.asarray(shares / shares.sum())


NOTHING = np.zeros((0, 0))


def _find_ordered(
    layout: ScoreLayout, margins: list[Margin], scores: Ints, moments: ScoreMoments
) -> tuple[tuple[Margin, ...], Inversion]:
    """Find copula, shifts of margins and missing cells of the ordered columns.

    Simulated rows with missing cells, cut as at the sites, have the released products and means. The first
    correlations are those of pairs of observed cells.
    """
    ordered = layout.ordered
    p, upper = len(ordered), np.triu_indices(len(ordered), 1)
    gaps = ordered[layout.gap[ordered]]
    points = even_points(p + len(gaps), SHIFT_DRAWS)
    n, draws, uniforms = len(points), np.asarray(ndtri(points[:, :p])), points[:, p:]
    held = np.flatnonzero(layout.gap[ordered])
    moving = np.ones(p, dtype=np.bool_) if moments.adjusted else layout.gap[ordered]
    wanted = moments.products[np.ix_(scores, scores)]
    models = {int(j): LevelModel(int(j), True, np.zeros(0, dtype=np.int64), NOTHING) for j in gaps}
    correlation, pairs, observed = np.eye(p), np.eye(p), np.ones((p, p))
    first = True
    for _ in range(INVERSION_MAXITER):
        own = [margins[j] for j in ordered]
        thresholds, tables, bins = tables_of(own)
        coefficients = np.array([margin.coefficients for margin in own])
        means = np.array([margin.mean for margin in own])
        codes = code_latents(draws @ np.linalg.cholesky(correlation).T, thresholds, bins)
        full = scores_of_codes(codes, tables)
        rows = np.zeros((n, layout.q))
        rows[:, scores] = full
        known = scores.copy()
        seen = np.ones((n, p), dtype=np.bool_)
        for i, u in zip(held, uniforms.T, strict=True):
            j, at = int(ordered[i]), int(scores[i])
            given = known[known != at]
            model = LevelModel(j, True, given, models[j].coefficients)
            models[j] = _fit_one(layout, model, rows, moments, _shares(layout, margins, moments, j))
            gone = draw_levels(models[j].coefficients, features_of(layout, rows, models[j]), u) == 1
            rows[gone, at], rows[gone, at + 1], seen[gone, i] = 0.0, 1.0, False
            known = np.append(known, at + 1)
        factors = layout.factors(rows)[:, layout.owner[ordered]]
        cut = rows[:, scores] * factors
        both = seen.astype(np.float64)
        observed = np.maximum(both.T @ both / n, 0.02)
        expected = (wanted - cut.T @ cut / n) / observed + full.T @ full / n
        if first:  # rows were drawn without correlations: start from the products of observed cells
            expected = wanted / observed
        target = expected - np.outer(means, means)
        r = latent_correlations(target[upper], coefficients[upper[0]], coefficients[upper[1]])
        pairs = np.eye(p)
        pairs[upper], pairs.T[upper] = r, r
        earlier, correlation = correlation, nearest_correlation(pairs)
        moved = (
            0.0 if first else _shift(margins, ordered, moving, rows[:, scores], cut, seen, scores, moments)
        )
        done = np.abs(correlation - earlier).max() < INVERSION_TOL and moved < SHIFT_TOL
        if done and not first:
            break
        first = False
    distance = np.sqrt(((pairs - correlation) ** 2).sum(axis=0) / max(p - 1, 1))
    return tuple(margins), Inversion(correlation, distance)


def _shift(
    margins: list[Margin],
    ordered: Ints,
    moving: Bools,
    rows: Floats,
    cut: Floats,
    seen: Bools,
    scores: Ints,
    moments: ScoreMoments,
) -> float:
    """Move latent means and deviations so that observed scores have their means; return the largest move."""
    largest = 0.0
    for i in np.flatnonzero(moving):
        margin, here = margins[ordered[i]], seen[:, i]
        share = max(here.mean(), 0.02)
        x = (cut if moments.adjusted else rows)[here, i]
        mean, square = x.mean(), (x**2).mean()
        wanted_mean, wanted_square = 0.0, margin.variance
        if moments.adjusted:
            wanted_mean = moments.means[scores[i]] / share
            wanted_square = moments.products[scores[i], scores[i]] / share
        slope = max(abs(float(margin.coefficients[0])) / margin.spread, 0.05)
        factor = 1.0
        if margin.bins.count > 2:
            ratio = max(wanted_square - wanted_mean**2, 1e-3) / max(square - mean**2, 1e-3)
            factor = ratio**0.7
        margins[ordered[i]], change = _moved(margin, SHIFT_STEP * (wanted_mean - mean) / slope, factor)
        largest = max(largest, change)
    return largest


def _moved(margin: Margin, move: float, factor: float) -> tuple[Margin, float]:
    """Move the latent mean of a margin and multiply the deviation, within limits; also return the change."""
    shift = float(np.clip(margin.shift + move, -MOST_SHIFT, MOST_SHIFT))
    spread = float(np.clip(margin.spread * factor, LEAST_SPREAD, MOST_SPREAD))
    change = max(abs(shift - margin.shift), abs(spread - margin.spread))
    return replace(margin, shift=shift, spread=spread), change


def even_points(d: int, n: int) -> Floats:
    """Return at most n points of the unit cube, (2^k, d), that fill it evenly.

    Shares of levels in them are nearly those of the distribution.
    """
    points = qmc.Sobol(d, seed=INVERSION_SEED).random_base2(int(math.log2(n)))
    return np.clip(points, 1e-9, 1.0 - 1e-9)


LEVEL_NUMBERS = 2**24
"""Number of rows, times levels, times scores, from which levels are fitted."""


def _with_levels(model: JointModel, moments: ScoreMoments) -> JointModel:
    """Add the missing cells of ordered columns, and the levels of the others, column by column."""
    layout = model.layout
    gaps = [int(j) for j in layout.ordered if layout.gap[j]]
    nominal = [int(j) for j in np.flatnonzero(layout.nominal)]
    if not gaps and not nominal:
        return model
    correlation, drawn = model.inversion.correlation, len(gaps) + len(nominal)
    numbers = layout.q * int(layout.width.max())
    n = int(np.clip(LEVEL_NUMBERS // numbers, FEWEST_DRAWS, MOST_DRAWS))
    points = even_points(len(correlation) + drawn, n)
    n, uniforms = len(points), iter(points.T[len(correlation) :])
    Z = np.asarray(ndtri(points[:, : len(correlation)]))
    if len(correlation):
        Z = Z @ np.linalg.cholesky(correlation).T
    codes, rows = np.zeros((n, len(model.margins)), dtype=np.int64), np.zeros((n, layout.q))
    known = layout.first[layout.ordered]
    if len(known):
        thresholds, tables, bins = tables_of([model.margins[j] for j in layout.ordered])
        codes[:, layout.ordered] = code_latents(Z, thresholds, bins)
        rows[:, known] = scores_of_codes(codes[:, layout.ordered], tables)
    levels: list[LevelModel] = []
    for column in [*gaps, *nominal]:
        own = layout.scores_of(column)
        given = known[~np.isin(known, own)]
        start = LevelModel(column, column in gaps, given, NOTHING)
        shares = _shares(layout, model.margins, moments, column)
        levels.append(_fit_one(layout, start, rows, moments, shares))
        model.add(levels[-1], rows, codes, next(uniforms))
        known = np.append(known, own[1:] if column in gaps else own)
    return JointModel(layout, model.margins, model.inversion, tuple(levels))
