"""Steps of a site for mixed models: it integrates its own random effects, and releases sums over groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy.linalg import block_diag
from scipy.special import digamma, expit, gammaln

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.horizontal_steps import (
    INTERCEPT,
    OPEN_ROWS,
    OpenRows,
    rows_of,
    translation,
)
from fedstat.federation.disclosure.facts import ClusterCounts, FittedMeanSums, WorkingWeights
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control
from fedstat.federation.tables.table import LabeledTable
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.mixed_effects import (
    GAMMA,
    LOG,
    LOGIT,
    NEGATIVE_BINOMIAL,
    cluster_products,
    integrate,
    jet_length,
    marginal_score,
    pair_index,
)
from fedstat.models.horizontal.rows import NO_MEANS, glm_rows, require_response, summed
from fedstat.typing import Array, Floats, Ints

FAMILY = "mixed"
KINDS = {
    ("Binomial", "Logit"): LOGIT,
    ("Poisson", "Log"): LOG,
    ("NegativeBinomial", "Log"): NEGATIVE_BINOMIAL,
    ("Gamma", "Log"): GAMMA,
}
"""Distributions of responses that are not normal, with their links: the number in the kernel."""
DISPERSED = (NEGATIVE_BINOMIAL, GAMMA)
"""Those with a dispersion, which is estimated: the negative binomial's alpha, and the gamma's scale."""
MOST_NODES = 25
STIRLING = 1e3
"""Shape beyond which differences of log-gamma functions cancel; Stirling's series then has 11 digits."""
AVERAGED_NODES = 61
"""Nodes of quadrature that does not adapt, for means over the random effects."""
SLOPES, VALUES = b"slopes", b"values"
"""Begin points at which rows have derivatives of their means, and groups have weights without derivatives."""
DIFFERENCE = 1e-4
"""Half the distance of the points between which the score is differenced."""


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """Family, nodes of quadrature, and random effects: for each term its group and columns."""

    distribution: DistributionSpec
    nodes: int
    groups: tuple[str, ...]
    effects: tuple[tuple[str, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of effects of each term."""
        return tuple(map(len, self.effects))


def kind_of(distribution: DistributionSpec) -> int | None:
    """Return the number of a distribution in the kernel; None if there is no quadrature for it."""
    return KINDS.get((distribution.name, distribution.link))


def has_dispersion(distribution: DistributionSpec) -> bool:
    """Return whether a dispersion is estimated with the coefficients and factors."""
    return kind_of(distribution) in DISPERSED


def lower_pairs(q: int) -> list[tuple[int, int]]:
    """Return the entries of a lower triangle, (row, column), in the order of parameters."""
    return [(a, b) for b in range(q) for a in range(b, q)]


def first_parameters(sizes: Sequence[int]) -> list[int]:
    """Return where the parameters of each term begin, and their number at the end."""
    return [0, *np.cumsum([q * (q + 1) // 2 for q in sizes]).tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class GroupLevel:
    """One term: its columns of the design, and the group of each row, (n,)."""

    term: int
    columns: Ints
    code: Ints
    groups: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """Rows in the order of their groups, which start at `begin`; `constant` is that of log L.

    If there is a shape, `constant` is the part that does not depend on it.
    """

    X: Floats
    Z: Floats
    y: Floats
    w: Floats
    offset: Floats
    begin: Ints
    constant: float

    def score(
        self, kind: int, shape: float, beta: Floats, L: Floats, nodes: int, modes: Floats
    ) -> tuple[float, Floats, Floats, float, Floats]:
        """Return log-likelihood, its derivatives (p,), (q, q) and in the shape, and what means are.

        Modes change in place. See :func:`marginal_score`.
        """
        x, weights = np.polynomial.hermite_e.hermegauss(nodes)
        means = np.zeros(len(self.y))
        eta = self.X @ beta + self.offset
        rest = np.ascontiguousarray(L), self.begin, x, weights, modes, means
        found = marginal_score(kind, shape, self.X, self.Z, self.y, self.w, eta, *rest)
        llf, by_beta, by_factor, by_shape = found
        constant, slope = shape_constant(kind, shape, self.y)
        return llf + self.constant + constant, by_beta, by_factor, by_shape + slope, means


def shape_constant(kind: int, shape: float, y: Floats) -> tuple[float, float]:
    """Return the part of log L that depends on the responses and the shape alone, and its derivative."""
    if kind == NEGATIVE_BINOMIAL and shape > STIRLING:
        end = y + shape
        logs = np.log1p(y / shape)
        part = (end - 0.5) * logs - y - y / (12.0 * shape * end)
        slope = logs - (end - 0.5) * y / (shape * end) + y * (shape + end) / (12.0 * (shape * end) ** 2)
    elif kind == NEGATIVE_BINOMIAL:
        part = gammaln(y + shape) - gammaln(shape) - y * np.log(shape)
        slope = digamma(y + shape) - digamma(shape) - y / shape
    elif kind == GAMMA:
        part = shape * np.log(shape) - gammaln(shape) + shape * np.log(y)
        slope = np.log(shape) + 1.0 - digamma(shape) + np.log(y)
    else:
        return 0.0, 0.0
    return float(part.sum()), float(slope.sum())


@dataclass(slots=True, eq=False)
class MixedRows:
    """The rows of one fit, and their groups from the innermost to the outermost."""

    MADE_AGAIN: ClassVar = ("held",)
    """The parts that are made from the rows again when a session is resumed."""

    data: SiteData
    opened: OpenRows
    request: MixedRequest
    n: int
    to_own: Floats
    held: dict[str, Any] | None = None

    def make_again(self) -> None:
        """Compute products again when they are next needed."""
        self.held = None

    def keep(self, name: str, compute: Any) -> Any:
        """Return what was computed from the rows before, or compute it."""
        if self.held is None:
            self.held = {}
        if name not in self.held:
            self.held[name] = compute()
        return self.held[name]

    @property
    def rows(self) -> tuple[Floats, Floats, Floats]:
        """Design by the site's own standardization (n, p), response (n,), and weights (n,).

        The offset of a normal response is subtracted.
        """

        def read() -> tuple[Floats, Floats, Floats]:
            parts = [glm_rows(rows, X) for rows, X in self.opened.chunks()]
            y = np.concatenate([part.y for part in parts])
            if self.request.distribution.least_squares:
                y = y - self.offset
            weight = np.concatenate(
                [np.ones(len(part)) if part.weight is None else part.weight for part in parts]
            )
            return np.ascontiguousarray(np.concatenate([part.X for part in parts])), y, weight

        return self.keep("rows", read)  # type: ignore[no-any-return]

    @property
    def offset(self) -> Floats:
        """Known part of the linear predictor, (n,)."""
        return np.concatenate(
            [np.zeros(len(X)) if rows.offset is None else rows.offset for rows, X in self.opened.chunks()]
        )

    @property
    def levels(self) -> tuple[GroupLevel, ...]:
        """Terms from the innermost groups to the outermost.

        A DesignError names two terms whose groups cross.
        """
        return self.keep("levels", self._levels)  # type: ignore[no-any-return]

    def _levels(self) -> tuple[GroupLevel, ...]:
        names = [*((INTERCEPT,) if self.opened.question.intercept else ()), *self.opened.names]
        frame = pd.concat([rows.frame[list(set(self.request.groups))] for rows, _ in self.opened.chunks()])
        found = []
        for term, (group, effects) in enumerate(zip(self.request.groups, self.request.effects, strict=True)):
            code, labels = pd.factorize(frame[group])
            columns = np.array([names.index(name) for name in effects], dtype=np.int64)
            found.append(GroupLevel(term, columns, code.astype(np.int64), len(labels)))
        found.sort(key=lambda level: -level.groups)
        for inner, outer in pairwise(found):
            if len(np.unique(np.column_stack([inner.code, outer.code]), axis=0)) > inner.groups:
                one, other = (self.request.groups[level.term] for level in (inner, outer))
                raise DesignError(
                    f"site {self.data.name!r}: groups of {one!r} are in several groups of {other!r}. Random "
                    "effects must be nested. If labels are used again in each group, make them unique; "
                    "effects that cross are not supported: use a fixed effect for one of them"
                )
        return tuple(found)

    def effect_columns(self, level: GroupLevel) -> Floats:
        """Return the columns whose effects vary in a term, (n, q), in the units of the data."""
        return self.opened.in_units(self.rows[0])[:, level.columns]

    def products(self, center: float) -> tuple[Floats, Floats]:
        """Sum products of effects, columns and response by innermost group, and the logarithms of weights."""

        def compute() -> tuple[Floats, Floats]:
            X, y, weight = self.rows
            Z = [self.effect_columns(level) for level in self.levels]
            W = np.ascontiguousarray(np.column_stack([*Z, X, y - center]))
            inner = self.levels[0]
            return cluster_products(W, weight, inner.code, inner.groups), np.log(weight).sum()

        return self.keep(f"products {center!r}", compute)  # type: ignore[no-any-return]

    def by_group(self) -> GroupedRows:
        """Return rows, effects and constants of the likelihood in the order of the groups."""

        def compute() -> GroupedRows:
            X, y, w = self.rows
            code = self.levels[0].code
            order = np.argsort(code, kind="stable")
            by_term = sorted(self.levels, key=lambda level: level.term)
            Z = np.ascontiguousarray(
                np.column_stack([self.effect_columns(level) for level in by_term])[order]
            )
            counts = np.rint(w * y)
            kind = kind_of(self.request.distribution)
            constant = -np.log(y).sum() if kind == GAMMA else -gammaln(counts + 1.0).sum()
            if kind == LOGIT:
                constant += (gammaln(w + 1.0) - gammaln(w - counts + 1.0)).sum()
            begin = np.append(0, np.cumsum(np.bincount(code)))
            return GroupedRows(
                np.ascontiguousarray(X[order]),
                Z,
                y[order],
                w[order],
                self.offset[order],
                begin,
                float(constant),
            )

        return self.keep("grouped", compute)  # type: ignore[no-any-return]

    def outer_codes(self) -> Iterator[tuple[Ints, int]]:
        """Yield by level the group of the next one in which each group lies; the last ones are all in one."""
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            code = np.zeros(inner.groups, dtype=np.int64)
            code[inner.code] = outer.code
            yield code, outer.groups
        yield np.zeros(self.levels[-1].groups, dtype=np.int64), 1


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeights:
    """Weights of the groups' products in released sums, as one row for each product of two effects.

    Products of a single group are sums over all rows of the site.
    """

    site: MixedRows
    rows: slice

    @property
    def columns(self) -> Floats:
        """A constant, (m, 1)."""
        several = [level for level in self.site.levels if level.groups > 1]
        n = sum(level.groups * len(level.columns) ** 2 for level in several)
        return np.ones((n, 1))[self.rows]

    def vectors(self, points: tuple[bytes, ...]) -> Floats:
        """Weights at covariances of the effects, (m, k)."""
        return np.column_stack([self._at(point) for point in points])[self.rows]

    def _at(self, point: bytes) -> Floats:
        weights = marginal_products(self.site, np.frombuffer(point.removeprefix(VALUES)), 0.0)[2]
        wide = jet_length(first_parameters(self.site.request.sizes)[-1])
        out = [np.zeros((0, wide))]
        for P in (P for P in weights if len(P) > 1):
            padded = np.pad(P, ((0, 0), (0, wide - P.shape[1]), (0, 0), (0, 0)))
            out.append(padded.transpose(0, 2, 3, 1).reshape(-1, wide))
        return np.concatenate(out)[:, : 1 if point.startswith(VALUES) else None]

    def times(self, points: tuple[bytes, ...], wide: Floats) -> Floats:
        """Columns and vectors at points, times a matrix (1 + k, q)."""
        return np.asarray(np.column_stack([self.columns, self.vectors(points)]) @ wide)

    def every(self, first: int, step: int) -> GroupWeights:
        """Return every n-th row, from the first on."""
        return replace(self, rows=slice(first, None, step))


def groups_at(site: MixedRows, covariance: Floats, derivatives: bool = True) -> FittedMeanSums:
    """Declare the weights of the groups at a covariance of the random effects.

    Without derivatives they are behind the site's own effects.
    """
    block, point = GroupWeights(site, slice(None)), np.ascontiguousarray(covariance).tobytes()
    point, rows = point if derivatives else VALUES + point, len(block.columns)
    return FittedMeanSums(
        site.opened, rows, point, lambda: iter([block]), groups=True, kind="of groups", own=not derivatives
    )


def marginal_products(
    site: MixedRows, covariance: Floats, center: float
) -> tuple[Floats, Floats, list[Floats]]:
    """Integrate all random effects: log-determinant (J,), products (J, p + 1, p + 1), weights by level.

    Jets are in the entries of the lower triangles of the covariances, relative to the residual variance, in
    the order of the terms.
    """
    sizes = site.request.sizes
    begin, K = first_parameters(sizes), first_parameters(sizes)[-1]
    S, _ = site.products(center)
    order: list[int] = []
    logdet, weights = np.zeros(jet_length(K)), []
    for level, (outer, groups) in zip(site.levels, site.outer_codes(), strict=True):
        q, inner = len(level.columns), len(order)
        pairs = lower_pairs(q)
        T = np.zeros((jet_length(inner + len(pairs)), q, q))
        own = range(begin[level.term], begin[level.term + 1])
        for k, (a, b) in enumerate(pairs):
            T[0, a, b] = T[0, b, a] = covariance[own[k]]
            T[1 + inner + k, a, b] = T[1 + inner + k, b, a] = 1.0
        S, added, P = integrate(S, T, inner, outer, groups)
        order += own
        np.add.at(logdet, _places(order, K), added)
        weights.append(P)
    products = np.zeros((jet_length(K), *S.shape[2:]))
    products[_places(order, K)] = S[0]
    return logdet, products, weights


def _places(order: Sequence[int], K: int) -> list[int]:
    """Return where the derivatives in some parameters are in the jet of all K."""
    m = len(order)
    pairs = [pair_index(order[k], order[j], K) for k in range(m) for j in range(k, m)]
    return [0, *(1 + k for k in order), *pairs]


SHIFT = aggregate("means of the columns over all sites", common=True)
SCALE = aggregate("standard deviations of the columns over all sites", common=True)
GROUPS = (*OPEN_ROWS, ClusterCounts)
GROUP_SUMS = (*GROUPS, FittedMeanSums)


@step(
    FAMILY,
    takes={"shift": SHIFT, "scale": SCALE},
    releases={
        "response": summed("sums of weights and of the weighted response", behind=GROUPS),
        "groups": summed("number of groups of each term", behind=GROUPS),
    },
    request=MixedRequest,
    requests=control("family, and the random effects", common=True),
)
def start(
    data: SiteData, state: State, request: MixedRequest, shift: Floats, scale: Floats
) -> dict[str, Array]:
    """Group the rows, and sum the response: ``response`` (2,); count ``groups`` (terms,)."""
    opened = rows_of(state)
    check_lengths(data.name, shift=(shift, len(opened.shift)), scale=(scale, len(opened.shift)))
    names = {*((INTERCEPT,) if opened.question.intercept else ()), *opened.names}
    if not (scale > 0.0).all() or not request.groups or len(request.groups) != len(request.effects):
        raise MessageError(f"{data.name}: 'scale' must be positive, and each term needs a group")
    if not 1 <= request.nodes <= MOST_NODES or (request.nodes > 1 and sum(request.sizes) > 1):
        raise MessageError(f"{data.name}: nodes: expected 1 to {MOST_NODES}, and 1 for several effects")
    known = set(request.groups) <= set(opened.question.labels)
    if not known or not all(effects and set(effects) <= names for effects in request.effects):
        raise MessageError(f"{data.name}: the model opened no such columns of groups or effects")
    to_own = translation(opened.shift, opened.scale, shift, scale)
    site = MixedRows(data, opened, request, state.entities, to_own)
    for rows, X in opened.chunks():
        require_response(data.name, glm_rows(rows, X), request.distribution, opened.question.response)
    label = data.table.name if isinstance(data.table, LabeledTable) else None
    # Before anything about the nesting of few groups is known.
    frame = pd.concat([rows.frame for rows, _ in opened.chunks()])
    for name in request.groups:
        count, remedy = frame[name].nunique(), "leave this random effect out"
        state.report(ClusterCounts(name, count, whole=name == label, remedy=remedy))
    counts = np.zeros(len(request.groups))
    for level in site.levels:
        counts[level.term] = level.groups
    _, y, weight = site.rows
    state.keep(FAMILY, site, state.entities)
    return {"response": np.array([weight.sum(), weight @ y]), "groups": counts}


def mixed_rows(state: State) -> MixedRows:
    """Return this fit's rows; MessageError if the fit was not started here."""
    return state.use(FAMILY, MixedRows, "this fit was not started here; request 'start' first")


@step(
    FAMILY,
    "start sum_products",
    takes={
        "covariance": aggregate(
            "covariances of the random effects, relative to the residual variance", common=True
        ),
        "center": control("what is subtracted from the response", 0),
    },
    releases={
        "logdet": summed("log-determinant of the variance, with derivatives", behind=GROUP_SUMS),
        "products": summed(
            "products weighted by the inverse variance, with derivatives", 2, behind=GROUP_SUMS
        ),
    },
)
def sum_products(data: SiteData, state: State, covariance: Floats, center: Floats) -> dict[str, Array]:
    """Sum what a normal likelihood needs at a covariance of the random effects.

    With the variance V of the rows, relative to the residual variance, ``logdet`` (J,) has log det V, and
    ``products`` (J (p + 1), p + 1) has (X, y)'V^-1 (X, y), each with its first and second derivatives.
    """
    site = mixed_rows(state)
    sizes = site.request.sizes
    check_lengths(data.name, covariance=(covariance, first_parameters(sizes)[-1]))
    for matrix in unpack_covariances(covariance, sizes):
        if np.linalg.eigvalsh(matrix)[0] < -1e-8 * max(np.trace(matrix), 1e-300):
            raise MessageError(f"{data.name}: 'covariance' must be positive semidefinite")
    state.report(groups_at(site, covariance))
    logdet, products, _ = marginal_products(site, covariance, float(center))
    logdet[0] -= site.products(float(center))[1]
    T = np.pad(site.to_own, ((0, 1), (0, 1)))
    T[-1, -1] = 1.0
    products = T.T @ products @ T
    return {"logdet": logdet, "products": products.reshape(-1, products.shape[2])}


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMeans:
    """Rows with vectors at points: their means, or the slopes of these, averaged over the random effects."""

    site: MixedRows
    rows: slice

    @property
    def columns(self) -> Floats:
        """Columns of the design, (m, p)."""
        return self.site.by_group().X[self.rows]

    def vectors(self, points: tuple[bytes, ...]) -> Floats:
        """Means times weights at points, or three derivatives of the means, (m, k)."""
        found = [self.site.keep(f"means {point.hex()}", lambda p=point: self._at(p)) for point in points]
        return np.column_stack(found)[self.rows]

    def _at(self, point: bytes) -> Floats:
        rows = self.site.by_group()
        if not point.startswith(SLOPES):
            at = np.frombuffer(point)
            return row_vectors(self.site.request.distribution, at, rows, score_at(self.site, at)[2])
        at, p = np.frombuffer(point[len(SLOPES) :]), rows.X.shape[1]
        deviation = np.linalg.norm(rows.Z @ joint_factor(at[p:], self.site.request.sizes)[0], axis=1)
        return averaged_slopes(self.site.request.distribution, rows.X @ at[:p] + rows.offset, deviation).T

    def times(self, points: tuple[bytes, ...], wide: Floats) -> Floats:
        """Columns and vectors at points, times a matrix (p + k, q)."""
        return np.asarray(np.column_stack([self.columns, self.vectors(points)]) @ wide)

    def every(self, first: int, step: int) -> GroupedMeans:
        """Return every n-th row, from the first on."""
        return replace(self, rows=slice(first, None, step))


def score_at(site: MixedRows, point: Floats, modes: Floats | None = None) -> tuple[float, Floats, Floats]:
    """Return log-likelihood, score (p + K,) and means at own coefficients and packed factors.

    With a dispersion, its logarithm is the last parameter.
    """
    rows, p = site.by_group(), site.opened.scale.size
    dispersed = has_dispersion(site.request.distribution)
    shape = float(np.exp(-point[-1])) if dispersed else 1.0
    L, places = joint_factor(point[p:], site.request.sizes)
    start = np.zeros((len(rows.begin) - 1, len(L))) if modes is None else modes
    kind = KINDS[site.request.distribution.name, site.request.distribution.link]
    found = rows.score(kind, shape, point[:p], L, site.request.nodes, start)
    llf, score, by_factor, by_shape, means = found
    last = [-shape * by_shape] if dispersed else []
    return llf, np.array([*score, *(by_factor[place] for place in places), *last]), means


def placed(
    data: SiteData, state: State, beta: Floats, factor: Floats, dispersion: Array
) -> tuple[MixedRows, Floats, Floats]:
    """Return the rows of this fit, own parameters, and the matrix that takes common ones to these."""
    site = mixed_rows(state)
    p, K = len(site.to_own), first_parameters(site.request.sizes)[-1]
    check_lengths(data.name, beta=(beta, p), factor=(factor, K))
    if kind_of(site.request.distribution) is None or len(set(site.request.groups)) > 1:
        raise MessageError(f"{data.name}: no quadrature for this distribution, or for several groups")
    if not 0.0 < dispersion < np.inf:
        raise MessageError(f"{data.name}: 'dispersion' must be positive")
    last = [np.log(dispersion)] if has_dispersion(site.request.distribution) else []
    to_own = np.eye(p + K + len(last))
    to_own[:p, :p] = site.to_own
    return site, to_own @ np.concatenate([beta, factor, last]), to_own


def row_weights(distribution: DistributionSpec, point: Floats, y: Floats, means: Floats) -> Floats:
    """Return the sizes of the rows' weights in score and information, by row: (k, n).

    They are known from :func:`marginal_score`'s means: derivatives of the log-densities, and -l'' as a
    function of them.
    """
    kind = kind_of(distribution)
    if kind == LOG:
        return means[None]
    if kind == LOGIT:
        return (means * (1.0 - means))[None]
    shape = np.exp(-point[-1])
    second = means * (1.0 - means / (y + shape)) if kind == NEGATIVE_BINOMIAL else shape + y - means
    return np.abs([y - means, second])


def row_vectors(distribution: DistributionSpec, point: Floats, rows: GroupedRows, means: Floats) -> Floats:
    """Return what columns are multiplied with, (n,), and what is summed at a dispersion, (n, 3).

    Log-densities of responses at several dispersions, and their derivatives in the shape, are functions of
    the responses whose sums add up to the number of rows of each value.
    """
    if not has_dispersion(distribution):
        return rows.w * means
    y, shape = rows.y, np.exp(-point[-1])
    if kind_of(distribution) == GAMMA:
        g = shape + y - means
        density = shape * np.log(g) - gammaln(shape) - g - np.log(y)
        slope = np.log(g) + 1.0 - digamma(shape) - g / shape
    else:
        part = means / (y + shape)
        density = gammaln(y + shape) - gammaln(shape) + y * np.log(part) + shape * np.log1p(-part)
        slope = digamma(y + shape) - digamma(shape) + np.log1p(-part) + part - y * (1.0 - part) / shape
    return np.column_stack([means, np.nan_to_num(density), np.nan_to_num(slope)])


POINT = {
    "beta": aggregate("coefficients of the standardized columns", common=True),
    "factor": aggregate("factors of the covariances of the random effects", common=True),
    "dispersion": aggregate("dispersion of the response; one where it is known", 0, common=True),
}
WEIGHTED = (*GROUP_SUMS, WorkingWeights)


@step(
    FAMILY,
    "start sum_products sum_scores",
    takes={**POINT, "curvature": control("whether to sum second derivatives", 0)},
    releases={
        "spread": control("whether more than a few rows weigh", 0, maskable=True),
        "llf": summed("marginal log-likelihood", 0, behind=WEIGHTED),
        "score": summed("its derivatives", behind=WEIGHTED),
        "information": summed("its second derivatives", 2, behind=WEIGHTED),
    },
)
def sum_scores(
    data: SiteData, state: State, beta: Floats, factor: Floats, dispersion: Array, curvature: Array
) -> dict[str, Array]:
    """Sum the marginal log-likelihood of responses that are not normal, with its derivatives.

    ``score`` (h,) is in coefficients, factors, and the logarithm of a dispersion that is estimated;
    ``information`` (h, h) is the negative second derivative, from central differences of the score, or zero
    without `curvature`.
    """
    site, point, to_own = placed(data, state, beta, factor, dispersion)
    rows, size = site.by_group(), len(point)
    modes = np.zeros((len(rows.begin) - 1, rows.Z.shape[1]))
    llf, score, means = score_at(site, point, modes)
    block, key = GroupedMeans(site, slice(None)), point.tobytes()
    distribution = site.request.distribution
    site.keep(f"means {key.hex()}", lambda: row_vectors(distribution, point, rows, means))

    def each() -> Floats:
        return rows.w * row_weights(distribution, point, rows.y, means)

    nothing = {"spread": np.array(False), "llf": np.array(0.0)}
    nothing |= {"score": np.zeros(size), "information": np.zeros((size, size))}
    # If weights allow another release only, no means were used.
    state.report(
        NO_MEANS,
        WorkingWeights(each, instead=nothing),
        FittedMeanSums(site.opened, site.n, key, lambda: iter([block]), groups=True),
    )
    information = np.zeros((size, size))
    if curvature:
        for j in range(size):
            ends = [
                score_at(site, point + h * to_own[:, j], modes.copy())[1] for h in (-DIFFERENCE, DIFFERENCE)
            ]
            information[j] = to_own.T @ (ends[0] - ends[1]) / (2.0 * DIFFERENCE)
    return {
        "spread": np.array(True),
        "llf": np.array(llf),
        "score": to_own.T @ score,
        "information": (information + information.T) / 2.0,
    }


def joint_factor(packed: Floats, sizes: Sequence[int]) -> tuple[Floats, list[tuple[int, int]]]:
    """Return the factor of the covariance of all effects, and the places of the packed entries in it.

    A dispersion may follow the entries.
    """
    ends = np.cumsum(sizes).tolist()
    pairs = zip(ends, sizes, strict=True)
    places = [(end - q + a, end - q + b) for end, q in pairs for a, b in lower_pairs(q)]
    return block_diag(*unpack_factors(packed, sizes)), places


def averaged_slopes(distribution: DistributionSpec, eta: Floats, deviation: Floats) -> Floats:
    """Average the first three derivatives of the mean over normal effects, (3, n).

    The linear predictor has mean `eta` (n,) and standard deviation `deviation` (n,).
    """
    out = np.zeros((3, len(eta)))
    x, weights = np.polynomial.hermite_e.hermegauss(AVERAGED_NODES)
    for node, weight in zip(x, weights / weights.sum(), strict=True):
        if distribution.name == "Binomial":
            mean = expit(eta + deviation * node)
            first = mean * (1.0 - mean)
            out += weight * np.array([first, first * (1.0 - 2.0 * mean), first * (1.0 - 6.0 * first)])
        else:
            out += weight * np.exp(eta + deviation * node)
    return out


@step(
    FAMILY,
    "start sum_products sum_scores sum_effects",
    takes=POINT,
    releases={
        "first": summed("derivatives of the means by the linear predictor", 0, behind=WEIGHTED),
        "second": summed("second derivatives, times the columns", behind=WEIGHTED),
        "third": summed("third derivatives, times products of effects", behind=WEIGHTED),
    },
)
def sum_effects(
    data: SiteData, state: State, beta: Floats, factor: Floats, dispersion: Array
) -> dict[str, Array]:
    """Sum derivatives of the rows' means, averaged over the random effects.

    `first` is their sum, `second` (p,) and `third` (K,) its derivatives in coefficients and factors.
    """
    site, point, _ = placed(data, state, beta, factor, dispersion)
    block, key = GroupedMeans(site, slice(None)), SLOPES + point.tobytes()
    slopes = block.vectors((key,))
    state.report(
        NO_MEANS,
        WorkingWeights(lambda: np.abs(slopes.T)),
        FittedMeanSums(site.opened, site.n, key, lambda: iter([block]), groups=True),
    )
    rows = site.by_group()
    L, places = joint_factor(factor, site.request.sizes)
    third = rows.Z.T @ (slopes[:, 2:] * (rows.Z @ L))
    return {
        "first": np.array(slopes[:, 0].sum()),
        "second": site.to_own.T @ (rows.X.T @ slopes[:, 1]),
        "third": np.array([third[place] for place in places]),
    }


@step(
    FAMILY,
    "start predict_site",
    takes={**POINT, "center": control("what is subtracted from the response", 0)},
    releases={
        "effects": aggregate(
            "predicted random effects of the site, and their errors", 2, behind=(*GROUP_SUMS, WorkingWeights)
        )
    },
)
def predict_site(
    data: SiteData, state: State, beta: Floats, factor: Floats, dispersion: Array, center: Floats
) -> dict[str, Array]:
    """Predict the random effects of the site at one point, ``effects`` (2, q): estimates, and errors.

    For a normal response these are relative to the residual standard deviation.
    """
    site = mixed_rows(state)
    label = data.table.name if isinstance(data.table, LabeledTable) else None
    whole = [term for term, group in enumerate(site.request.groups) if group == label]
    if not whole:
        raise MessageError(f"{data.name}: the model has no random effect of the site")
    if not site.request.distribution.least_squares:
        return {"effects": _site_mode(data, state, beta, factor, dispersion)}
    sizes, p = site.request.sizes, len(site.to_own)
    check_lengths(data.name, beta=(beta, p), factor=(factor, first_parameters(sizes)[-1]))
    T = [L @ L.T for L in unpack_factors(factor, sizes)]
    covariance = pack(T)
    state.report(groups_at(site, covariance, False), WorkingWeights(lambda: np.ones((1, site.n))))
    S = marginal_products(site, covariance, float(center))[1][0]
    ends, found = site.to_own @ beta, []
    to_units = translation(site.opened.shift, site.opened.scale, np.zeros(p), np.ones(p))
    for level in site.levels:
        if level.term in whole:
            A = to_units[:, level.columns]
            estimate = T[level.term] @ A.T @ (S[:p, p] - S[:p, :p] @ ends)
            left = T[level.term] - T[level.term] @ A.T @ S[:p, :p] @ A @ T[level.term]
            found.append((level.term, np.array([estimate, np.sqrt(np.maximum(np.diag(left), 0.0))])))
    return {"effects": np.column_stack([effects for _, effects in sorted(found, key=itemgetter(0))])}


def _site_mode(data: SiteData, state: State, beta: Floats, factor: Floats, dispersion: Array) -> Floats:
    """Return the mode of the site's effects given its rows, and errors from the curvature there."""
    site, point, _ = placed(data, state, beta, factor, dispersion)
    # The mode is that of Laplace's approximation: with one node, means are those at the mode.
    site = replace(site, request=replace(site.request, nodes=1))
    rows = site.by_group()
    L, _ = joint_factor(factor, site.request.sizes)
    modes = np.zeros((1, len(L)))
    _, _, means = score_at(site, point, modes)
    A = rows.Z @ L
    every = rows.w * row_weights(site.request.distribution, point, rows.y, means)
    state.report(NO_MEANS, WorkingWeights(lambda: every), groups_at(site, np.zeros(len(factor)), False))
    inverse = np.linalg.inv(np.eye(len(L)) + (A * every[-1][:, None]).T @ A)
    return np.array([L @ modes[0], np.sqrt(np.diag(L @ inverse @ L.T))])


def pack(matrices: Sequence[Floats]) -> Floats:
    """Return the lower triangles of matrices, one after the other."""
    return np.array([M[pair] for M in matrices for pair in lower_pairs(len(M))])


def unpack_factors(packed: Floats, sizes: Sequence[int]) -> list[Floats]:
    """Return the lower triangular factors that are packed one after the other."""
    return [np.tril(matrix) for matrix in unpack_covariances(packed, sizes)]


def unpack_covariances(packed: Floats, sizes: Sequence[int]) -> list[Floats]:
    """Return the symmetric matrices whose lower triangles are packed one after the other."""
    out, values = [], iter(packed)
    for q in sizes:
        matrix = np.zeros((q, q))
        for a, b in lower_pairs(q):
            matrix[a, b] = matrix[b, a] = next(values)
        out.append(matrix)
    return out
