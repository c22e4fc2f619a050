"""Steps of a site for mixed models: it integrates its own random effects, and releases sums over groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pandas as pd
from scipy.linalg import block_diag
from scipy.special import digamma, expit, gammaln

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.horizontal_steps import (
    OPEN_ROWS,
    OpenRows,
    rows_of,
    translation,
)
from fedstat.federation.design.site_rows import INTERCEPT, CompleteRows
from fedstat.federation.disclosure.facts import (
    ClusterCounts,
    RowBlock,
    RowTerms,
    ScoreAndInformation,
    WorkingWeights,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control
from fedstat.federation.tables.table import LabeledTable
from fedstat.kernels.clusters import AT_ONE, adjusted_scores, information_factors
from fedstat.kernels.clusters import cluster_products as by_cluster
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.local_fit import join_rows
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
from fedstat.models.horizontal.clusters import (
    LEVERAGES,
    LeverageRequest,
    cluster_releases,
    own_inverse,
    sum_corrected,
)
from fedstat.models.horizontal.rows import NO_MEANS, RowsAtPoints, glm_rows, require_response, summed
from fedstat.models.horizontal.variable_changes import sum_changes_of
from fedstat.models.margins import ChangesRequest, MeanJet
from fedstat.models.rows.objective import Facts
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
EXCESS = 1e-4
"""How much larger than one differences of scores may make the share of a site in all information."""
LEAST_LEFT = 0.01
"""Share of a variance that is left without a group, at least: one step may lead below zero."""
ROUNDING = 1e-6
"""Deviation from one of the sum of indicators of all levels."""
CACHED_GROUPS = 16
"""Groups whose products stay in the cache."""
DIFFERENCE = 1e-4
"""Half the distance of the points between which the score is differenced."""


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """Family, nodes of quadrature, and random effects: for each term columns of groups, and of the design."""

    distribution: DistributionSpec
    nodes: int
    groups: tuple[tuple[str, ...], ...]
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


def group_codes(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[Ints, int]:
    """Return the group of each row, (n,), by the levels of columns, and the number of groups."""
    code, groups = np.zeros(len(frame), dtype=np.int64), 1
    for name in columns:
        own, labels = pd.factorize(frame[name])
        code, found = pd.factorize(code * len(labels) + own)
        groups = len(found)
    return np.asarray(code, dtype=np.int64), groups


def lower_pairs(q: int) -> list[tuple[int, int]]:
    """Return the entries of a lower triangle, (row, column), in the order of parameters."""
    return [(a, b) for b in range(q) for a in range(b, q)]


def first_parameters(sizes: Sequence[int]) -> list[int]:
    """Return where the parameters of each term begin, and their number at the end."""
    return [0, *np.cumsum([q * (q + 1) // 2 for q in sizes]).tolist()]


def effect_units(shift: Floats, scale: Floats, constant: Floats) -> Floats:
    """Return the matrix that takes effects of shifted and scaled columns to those of the data's, (q, q).

    What is shifted enters the effects of the columns that add up to one, `constant`.
    """
    return np.asarray(np.diag(1.0 / scale) - np.outer(constant, shift / scale))


@dataclass(frozen=True, slots=True, eq=False)
class GroupLevel:
    """One term: its columns of the design with their units, and the group of each row, (n,).

    Columns less `shift`, over `scale`, are those of the effects.
    """

    term: int
    columns: Ints
    code: Ints
    groups: int
    shift: Floats
    scale: Floats
    constant: Floats
    """One at the columns that add up to one in every row: the intercept, or all levels of a factor."""

    def to_units(self) -> Floats:
        """Return the matrix that takes effects to effects of columns in the units of the data, (q, q)."""
        return effect_units(self.shift, self.scale, self.constant)


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
    wide: Floats
    """X, and the columns that only effects have."""

    def at(
        self, kind: int, shape: float, beta: Floats, L: Floats, nodes: int, modes: Floats
    ) -> tuple[float, Floats, Floats]:
        """Return log-likelihood, the rows' derivatives (n, q + 2), and what means are.

        Modes change in place. See :func:`marginal_score`.
        """
        x, weights = np.polynomial.hermite_e.hermegauss(nodes)
        means = np.zeros(len(self.y))
        rest = np.ascontiguousarray(self.Z @ L), self.begin, x, weights, modes, means
        llf, slopes = marginal_score(kind, shape, self.y, self.w, self.X @ beta + self.offset, *rest)
        constant, slope = shape_constant(kind, shape, self.y)
        slopes[:, -1] += slope
        return llf + self.constant + constant, slopes, means


def shape_constant(kind: int, shape: float, y: Floats) -> tuple[float, Floats]:
    """Return the part of log L that depends on the responses and the shape alone, and the rows' slopes."""
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
        return 0.0, np.zeros(len(y))
    return float(part.sum()), np.asarray(slope)


@dataclass(slots=True, eq=False)
class MixedRows:
    """The rows of one fit, and their groups from the innermost to the outermost."""

    RECOMPUTED: ClassVar = ("held",)
    """The parts that are made from the rows again when a session is resumed."""

    data: SiteData
    opened: OpenRows
    request: MixedRequest
    n: int
    to_own: Floats
    units: Floats
    """Matrix from coefficients of standardized columns to those in the units of the data, (p, p)."""
    shift: Floats
    scale: Floats
    constant: Floats
    """Of the columns of all effects, term by term."""
    compared: bytes = b""
    """Point at which groups were compared."""
    held: dict[str, Any] | None = None

    def recompute(self) -> None:
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
    def p(self) -> int:
        """Number of columns with coefficients; those that only effects have follow them."""
        return self.opened.fixed + self.opened.question.intercept

    @property
    def rows(self) -> tuple[Floats, Floats, Floats]:
        """Design by the site's own standardization (n, p + r), response (n,), and weights (n,).

        The offset of a normal response is subtracted.
        """

        def read() -> tuple[Floats, Floats, Floats]:
            rows = join_rows([glm_rows(rows, X) for rows, X in self.opened.chunks()])
            y = rows.y - self.offset if self.request.distribution.least_squares else rows.y
            return rows.X, y, np.ones(len(y)) if rows.weight is None else rows.weight

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
        request = self.request
        needed = list(dict.fromkeys(name for columns in request.groups for name in columns))
        frame = pd.concat([rows.frame[needed] for rows, _ in self.opened.chunks()])
        found, begin = [], np.append(0, np.cumsum(request.sizes))
        for term, (group, effects) in enumerate(zip(request.groups, request.effects, strict=True)):
            code, groups = group_codes(frame, group)
            columns = np.array([names.index(name) for name in effects], dtype=np.int64)
            own = slice(begin[term], begin[term + 1])
            units = self.shift[own], self.scale[own], self.constant[own]
            found.append(GroupLevel(term, columns, code, groups, *units))
        found.sort(key=lambda level: -level.groups)
        for inner, outer in pairwise(found):
            if len(np.unique(np.column_stack([inner.code, outer.code]), axis=0)) > inner.groups:
                one, other = (":".join(request.groups[level.term]) for level in (inner, outer))
                raise DesignError(
                    f"site {self.data.name!r}: groups of {one!r} are in several groups of {other!r}. Random "
                    "effects must be nested. If labels are used again in each group, write (1 | "
                    f"{other}/{one}); effects that cross are not supported: use a fixed effect for one of "
                    "them"
                )
        return tuple(found)

    def require_constant(self, level: GroupLevel) -> None:
        """Require columns that add up to one where others are shifted.

        A shifted column is then a combination of the columns of the effects, and no other one.
        """
        at = level.constant == 1.0
        # Of columns in the units of the data, and unshifted.
        total = (self.effect_columns(level)[:, at] * level.scale[at]).sum(axis=1)
        shifted = (level.shift != 0.0).any()
        if level.shift[at].any() or (shifted and np.abs(total - 1.0).max(initial=0.0) > ROUNDING):
            raise MessageError(f"{self.data.name}: effects are shifted without columns that add up to one")

    def effect_columns(self, level: GroupLevel) -> Floats:
        """Return the columns whose effects vary in a term, (n, q), shifted and scaled."""
        own, scale = self.opened.shift[level.columns], self.opened.scale[level.columns]
        X = self.rows[0][:, level.columns]
        # From standardized columns, which have digits that large columns in the units of the data lack.
        return np.asarray(X * (scale / level.scale) + (own - level.shift) / level.scale)

    def products(self, center: Floats, last: int = -1) -> tuple[Floats, Floats]:
        """Sum products of effects, columns and response by innermost group, and the logarithms of weights.

        The response is taken less the fitted values of the coefficients `center` (p,) of common columns. The
        effects of the term `last` are repeated after the columns. Those requested last are kept: a request at
        another center changes them in their place.
        """
        held: dict[int, list[Any]] = self.keep("products", dict)
        point, (X, y, weight), inner = center.tobytes(), self.rows, self.levels[0]
        if last in held and held[last][0] == point:
            return held[last][1], held[last][2]
        X = X[:, : self.p]
        Z = [self.effect_columns(level) for level in self.levels]
        again = [Z[k] for k, level in enumerate(self.levels) if level.term == last]
        W = np.column_stack([*Z, X, *again, y - X @ (self.to_own @ center)])
        if last in held:  # Only the response is another one.
            sums = held[last][1]
            sums[:, 0, -1] = by_cluster(W[:, -1:], weight, inner.code, inner.groups, W)[:, 0]
            sums[:, 0, :, -1] = sums[:, 0, -1]
            held[last][0] = point
        else:
            held.clear()
            sums = cluster_products(np.ascontiguousarray(W), weight, inner.code, inner.groups)
            held[last] = [point, sums, np.log(weight).sum()]
        return held[last][1], held[last][2]

    def effect_products(self) -> Floats:
        """Sum products of effects alone by innermost group: (groups, 1, q, q)."""

        def compute() -> Floats:
            Z, inner = [self.effect_columns(level) for level in self.levels], self.levels[0]
            return cluster_products(np.column_stack(Z), self.rows[2], inner.code, inner.groups)

        return self.keep("effects", compute)  # type: ignore[no-any-return]

    def places_by_group(self) -> Ints:
        """Return the places of the rows in the table, in the order of the groups."""
        places = self.opened.places
        order = np.argsort(self.levels[0].code, kind="stable")
        return places[order] if len(places) == len(order) else places

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
                np.ascontiguousarray(X[order, : self.p]),
                Z,
                y[order],
                w[order],
                self.offset[order],
                begin,
                float(constant),
                X[order],
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
class GroupWeights(RowBlock):
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
        at = np.frombuffer(point.removeprefix(VALUES))
        weights = integrate_chain(self.site, at, self.site.effect_products(), nested_chain(self.site))[2]
        wide = jet_length(first_parameters(self.site.request.sizes)[-1])
        out = [np.zeros((0, wide))]
        for P in (P for P in weights if len(P) > 1):
            padded = np.pad(P, ((0, 0), (0, wide - P.shape[1]), (0, 0), (0, 0)))
            out.append(padded.transpose(0, 2, 3, 1).reshape(-1, wide))
        return np.concatenate(out)[:, : 1 if point.startswith(VALUES) else None]

    def every(self, first: int, step: int) -> GroupWeights:
        """Return every n-th row, from the first on."""
        return replace(self, rows=slice(first, None, step))


def groups_at(site: MixedRows, covariance: Floats, derivatives: bool = True) -> ScoreAndInformation:
    """Declare the weights of the groups at a covariance of the random effects.

    Without derivatives they are behind the site's own effects.
    """
    block, point = GroupWeights(site, slice(None)), np.ascontiguousarray(covariance).tobytes()
    point, rows = point if derivatives else VALUES + point, len(block.columns)
    return ScoreAndInformation(
        site.opened, rows, point, lambda: iter([block]), groups=True, kind="of groups", own=not derivatives
    )


Chain: TypeAlias = Sequence[tuple[GroupLevel, Ints, int]]
"""Levels, for each the group of the next one in which each of its groups lies, and how many these are."""


def marginal_products(
    site: MixedRows, covariance: Floats, center: Floats, last: int = -1
) -> tuple[Floats, Floats, list[Floats]]:
    """Integrate all random effects: log-determinant (J,), products (J, p + 1, p + 1), weights by level.

    Jets are in the entries of the lower triangles of the covariances, relative to the residual variance, in
    the order of the terms.
    """
    return integrate_chain(site, covariance, site.products(center, last)[0], nested_chain(site))


def nested_chain(site: MixedRows) -> Chain:
    """Return all levels of a site, from the innermost groups to the outermost."""
    return [(level, *codes) for level, codes in zip(site.levels, site.outer_codes(), strict=True)]


def integrate_chain(
    site: MixedRows, covariance: Floats, S: Floats, chain: Chain
) -> tuple[Floats, Floats, list[Floats]]:
    """Integrate the effects of groups that end in one, see :func:`marginal_products`."""
    begin, K = first_parameters(site.request.sizes), first_parameters(site.request.sizes)[-1]
    order: list[int] = []
    logdet, weights = np.zeros(jet_length(K)), []
    for level, outer, groups in chain:
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


def outermost_chains(site: MixedRows) -> Iterator[tuple[Ints, Chain]]:
    """Yield for each outermost group its innermost groups, and the levels inside it."""
    codes, belongs = list(site.outer_codes()), [np.arange(site.levels[-1].groups)]
    for code, _ in codes[-2::-1]:
        belongs.insert(0, belongs[0][code])
    for one in range(site.levels[-1].groups):
        kept = [np.flatnonzero(own == one) for own in belongs]
        inside = [
            (level, np.searchsorted(outer, code[own]), len(outer))
            for level, (code, _), own, outer in zip(site.levels, codes, kept, kept[1:], strict=False)
        ]
        yield kept[0], [*inside, (site.levels[-1], np.zeros(1, dtype=np.int64), 1)]


def _places(order: Sequence[int], K: int) -> list[int]:
    """Return where the derivatives in some parameters are in the jet of all K."""
    m = len(order)
    pairs = [pair_index(order[k], order[j], K) for k in range(m) for j in range(k, m)]
    return [0, *(1 + k for k in order), *pairs]


SHIFT = aggregate("means of the columns over all sites", common=True)
SCALE = aggregate("standard deviations of the columns over all sites", common=True)
EFFECT_SHIFT = aggregate("means of the columns of effects over all sites, or zero", common=True)
EFFECT_SCALE = aggregate("units of the columns of effects", common=True)
EFFECT_CONSTANT = control("ones at the columns of effects that add up to one", 1)
CENTER = aggregate("coefficients whose fitted values are subtracted from the response", common=True)
GROUPS = (*OPEN_ROWS, ClusterCounts)
GROUP_SUMS = (*GROUPS, ScoreAndInformation)


@step(
    FAMILY,
    takes={
        "shift": SHIFT,
        "scale": SCALE,
        "effect_shift": EFFECT_SHIFT,
        "effect_scale": EFFECT_SCALE,
        "effect_constant": EFFECT_CONSTANT,
    },
    releases={
        "response": summed("sums of weights and of the weighted response", behind=GROUPS),
        "groups": summed("number of groups of each term", behind=GROUPS),
    },
    request=MixedRequest,
    requests=control("family, and the random effects", common=True),
)
def start(
    data: SiteData,
    state: State,
    request: MixedRequest,
    shift: Floats,
    scale: Floats,
    effect_shift: Floats,
    effect_scale: Floats,
    effect_constant: Floats,
) -> dict[str, Array]:
    """Group the rows, and sum the response: ``response`` (2,); count ``groups`` (terms,)."""
    opened = rows_of(state)
    p, q = opened.fixed + opened.question.intercept, sum(request.sizes)
    check_lengths(data.name, shift=(shift, p), scale=(scale, p))
    check_lengths(data.name, effect_shift=(effect_shift, q), effect_scale=(effect_scale, q))
    check_lengths(data.name, effect_constant=(effect_constant, q))
    names = {*((INTERCEPT,) if opened.question.intercept else ()), *opened.names}
    positive = (scale > 0.0).all() and (effect_scale > 0.0).all()
    if not positive or not request.groups or len(request.groups) != len(request.effects):
        raise MessageError(f"{data.name}: scales must be positive, and each term needs a group")
    if not 1 <= request.nodes <= MOST_NODES or (request.nodes > 1 and sum(request.sizes) > 1):
        raise MessageError(f"{data.name}: nodes: expected 1 to {MOST_NODES}, and 1 for several effects")
    known = all(group and set(group) <= set(opened.question.labels) for group in request.groups)
    if not known or not all(effects and set(effects) <= names for effects in request.effects):
        raise MessageError(f"{data.name}: the model opened no such columns of groups or effects")
    to_own = translation(opened.shift[:p], opened.scale[:p], shift, scale)
    back = translation(np.zeros_like(shift), np.ones_like(scale), shift, scale)
    units = effect_shift, effect_scale, effect_constant
    site = MixedRows(data, opened, request, state.entities, to_own, back, *units)
    for rows, X in opened.chunks():
        require_response(data.name, glm_rows(rows, X), request.distribution, opened.question.response)
    label = data.table.name if isinstance(data.table, LabeledTable) else None
    # Before anything about the nesting of few groups is known.
    frame = pd.concat([rows.frame for rows, _ in opened.chunks()])
    for group in request.groups:
        name, remedy = ":".join(group), "leave this random effect out"
        count = group_codes(frame, group)[1]
        state.report(ClusterCounts(name, count, whole=name == label, remedy=remedy))
    counts = np.zeros(len(request.groups))
    for level in site.levels:
        counts[level.term] = level.groups
    for level in site.levels:
        site.require_constant(level)
    _, y, weight = site.rows
    state.keep(FAMILY, site, state.entities)
    return {"response": np.array([weight.sum(), weight @ y]), "groups": counts}


def mixed_rows(state: State) -> MixedRows:
    """Return this fit's rows; MessageError if the fit was not started here."""
    return state.use(FAMILY, MixedRows, "this fit was not started here; request 'start' first")


@step(
    FAMILY,
    "start sum_products sum_scores",
    takes={
        "covariance": aggregate(
            "covariances of the random effects, relative to the residual variance", common=True
        ),
        "center": CENTER,
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
    ``products`` (J (p + 1), p + 1) has (X, r)'V^-1 (X, r), each with its first and second derivatives, for
    the response less fitted values r.
    """
    site = mixed_rows(state)
    sizes = site.request.sizes
    check_lengths(data.name, covariance=(covariance, first_parameters(sizes)[-1]), center=(center, site.p))
    for matrix in unpack_covariances(covariance, sizes):
        if np.linalg.eigvalsh(matrix)[0] < -1e-8 * max(np.trace(matrix), 1e-300):
            raise MessageError(f"{data.name}: 'covariance' must be positive semidefinite")
    state.report(groups_at(site, covariance))
    logdet, products, _ = marginal_products(site, covariance, center)
    logdet[0] -= site.products(center)[1]
    T = np.pad(site.to_own, ((0, 1), (0, 1)))
    T[-1, -1] = 1.0
    products = T.T @ products @ T
    return {"logdet": logdet, "products": products.reshape(-1, products.shape[2])}


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMeans(RowBlock):
    """Rows with vectors at points: their means, or the slopes of these, averaged over the random effects."""

    site: MixedRows
    rows: slice | Ints

    @property
    def columns(self) -> Floats:
        """Columns of the design and of the effects, (m, p + r)."""
        return self.site.by_group().wide[self.rows]

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Means times weights at points, or three derivatives of the means, (m, k)."""
        for point in points:
            if not isinstance(point, bytes):
                point[-1]()
        found = [self.site.keep(f"means {point.hex()}", lambda p=point: self._at(p)) for point in points]
        return np.column_stack(found)[self.rows]

    def _at(self, key: bytes) -> Floats:
        rows, distribution = self.site.by_group(), self.site.request.distribution
        at = OwnPoint.of_key(self.site, key.removeprefix(SLOPES))
        if not key.startswith(SLOPES):
            return row_vectors(distribution, at.shape, rows, score_at(self.site, at).means)
        deviation = np.linalg.norm(rows.Z @ at.L, axis=1)
        return averaged_means(distribution, rows.X @ at.beta + rows.offset, deviation)[1:4].T

    def every(self, first: int, step: int) -> GroupedMeans:
        """Return every n-th row, from the first on."""
        return replace(self, rows=np.arange(self.site.n)[self.rows][first::step])


@dataclass(frozen=True, slots=True, eq=False)
class OwnPoint:
    """Parameters at one site: coefficients of its own columns, factor of all effects (q, q), and shape."""

    beta: Floats
    L: Floats
    shape: float

    @property
    def key(self) -> bytes:
        """What identifies the point."""
        return np.concatenate([self.beta, self.L.ravel(), [self.shape]]).tobytes()

    @classmethod
    def of_key(cls, site: MixedRows, key: bytes) -> OwnPoint:
        """Read a key."""
        values, p, q = np.frombuffer(key), site.p, sum(site.request.sizes)
        return cls(values[:p], values[p:-1].reshape(q, q), float(values[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class MarginalTerms:
    """Marginal log-likelihood at one site, means of its rows, and the terms of its derivatives.

    Terms are those in the coefficients of the site's own columns (p,), in the factor (q, q), whose columns
    have weights of their own, and in the logarithm of the shape.
    """

    llf: float
    means: Floats
    score: RowTerms
    factor: RowTerms
    shape: RowTerms


def score_at(site: MixedRows, at: OwnPoint, modes: Floats | None = None) -> MarginalTerms:
    """Return log-likelihood, means, and the terms of the derivatives at the site's own parameters."""
    rows = site.by_group()
    start = np.zeros((len(rows.begin) - 1, len(at.L))) if modes is None else modes
    kind = KINDS[site.request.distribution.name, site.request.distribution.link]
    llf, slopes, means = rows.at(kind, at.shape, at.beta, at.L, site.request.nodes, start)
    one = np.ones((len(means), 1))
    return MarginalTerms(
        llf,
        means,
        RowTerms(rows.X, slopes[:, :1], one),
        RowTerms(rows.Z, slopes[:, 1:-1], one),
        RowTerms(one, at.shape * slopes[:, -1:], one),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CommonPoint:
    """The parameters of a request at a site: coefficients, packed factors, and log dispersion (h,).

    `basis` (q, q) takes effects to those of the site's columns.
    """

    site: MixedRows
    values: Floats
    basis: Floats

    @property
    def dispersed(self) -> bool:
        """Whether the last parameter is the logarithm of a dispersion."""
        return has_dispersion(self.site.request.distribution)

    def own(self, move: Floats | float = 0.0) -> OwnPoint:
        """Return the site's own parameters, after a move of the common ones (h,)."""
        values, p = self.values + move, self.site.p
        factor, _ = joint_factor(values[p:], self.site.request.sizes)
        shape = float(np.exp(-values[-1])) if self.dispersed else 1.0
        return OwnPoint(self.site.to_own @ values[:p], self.basis @ factor, shape)

    def in_factors(self, by_factor: Floats) -> Floats:
        """Take derivatives in the site's factor (q, q) to those in the packed factors (K,)."""
        _, places = joint_factor(self.values[self.site.p :], self.site.request.sizes)
        by_common = self.basis.T @ by_factor
        return np.array([by_common[place] for place in places])

    def score(self, move: Floats | float = 0.0, modes: Floats | None = None) -> tuple[float, Floats, Floats]:
        """Return log-likelihood, score (h,) and means."""
        found = score_at(self.site, self.own(move), modes)
        by_beta, by_factor = found.score.sums()[0, :, 0], found.factor.sums()[:, :, 0].T
        last = [-float(found.shape.sums()[0, 0, 0])] if self.dispersed else []
        score = [*(self.site.to_own.T @ by_beta), *self.in_factors(by_factor), *last]
        return found.llf, np.array(score), found.means


def placed(
    data: SiteData, state: State, beta: Floats, factor: Floats, basis: Floats, dispersion: Array
) -> CommonPoint:
    """Return the parameters of a request, checked."""
    site = mixed_rows(state)
    sizes = site.request.sizes
    check_lengths(data.name, beta=(beta, site.p), factor=(factor, first_parameters(sizes)[-1]))
    check_lengths(data.name, basis=(basis, sum(q * q for q in sizes)))
    if kind_of(site.request.distribution) is None or len(set(site.request.groups)) > 1:
        raise MessageError(f"{data.name}: no quadrature for this distribution, or for several groups")
    if not 0.0 < dispersion < np.inf:
        raise MessageError(f"{data.name}: 'dispersion' must be positive")
    last = [np.log(dispersion)] if has_dispersion(site.request.distribution) else []
    return CommonPoint(site, np.concatenate([beta, factor, last]), joint_basis(basis, sizes))


def joint_basis(packed: Floats, sizes: Sequence[int]) -> Floats:
    """Return the basis of all effects, (q, q), from those of each term, one after the other."""
    ends = np.cumsum([q * q for q in sizes])
    blocks = [packed[end - q * q : end].reshape(q, q) for end, q in zip(ends, sizes, strict=True)]
    return np.asarray(block_diag(*blocks))


def row_weights(distribution: DistributionSpec, shape: float, y: Floats, means: Floats) -> Floats:
    """Return the sizes of the rows' weights in score and information, by row: (k, n).

    They are known from :func:`marginal_score`'s means: derivatives of the log-densities, and -l'' as a
    function of them.
    """
    kind = kind_of(distribution)
    if kind == LOG:
        return means[None]
    if kind == LOGIT:
        return (means * (1.0 - means))[None]
    second = means * (1.0 - means / (y + shape)) if kind == NEGATIVE_BINOMIAL else shape + y - means
    return np.abs([y - means, second])


def row_vectors(distribution: DistributionSpec, shape: float, rows: GroupedRows, means: Floats) -> Floats:
    """Return what columns are multiplied with, (n,), and what is summed at a dispersion, (n, 3).

    Log-densities of responses at several dispersions, and their derivatives in the shape, are functions of
    the responses whose sums add up to the number of rows of each value.
    """
    if not has_dispersion(distribution):
        return rows.w * means
    y = rows.y
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
    "basis": aggregate("bases of the random effects, in which these have the factors", common=True),
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
    data: SiteData,
    state: State,
    beta: Floats,
    factor: Floats,
    basis: Floats,
    dispersion: Array,
    curvature: Array,
) -> dict[str, Array]:
    """Sum the marginal log-likelihood of responses that are not normal, with its derivatives.

    ``score`` (h,) is in coefficients, factors, and the logarithm of a dispersion that is estimated;
    ``information`` (h, h) is the negative second derivative, from central differences of the score, or zero
    without `curvature`.
    """
    point = placed(data, state, beta, factor, basis, dispersion)
    site, size, at = point.site, len(point.values), point.own()
    rows, distribution = site.by_group(), site.request.distribution
    modes = np.zeros((len(rows.begin) - 1, rows.Z.shape[1]))
    llf, score, means = point.score(modes=modes)
    site.keep(f"means {at.key.hex()}", lambda: row_vectors(distribution, at.shape, rows, means))
    nothing = {"spread": np.array(False), "llf": np.array(0.0)}
    nothing |= {"score": np.zeros(size), "information": np.zeros((size, size))}
    state.report(*means_at(site, at, means, nothing))
    information = np.zeros((size, size))
    if curvature:
        for j, move in enumerate(DIFFERENCE * np.eye(size)):
            ends = [point.score(h * move, modes.copy())[1] for h in (-1.0, 1.0)]
            information[j] = (ends[0] - ends[1]) / (2.0 * DIFFERENCE)
    return {
        "spread": np.array(True),
        "llf": np.array(llf),
        "score": score,
        "information": (information + information.T) / 2.0,
    }


def means_at(
    site: MixedRows, at: OwnPoint, means: Floats, instead: Mapping[str, Array] | None = None
) -> Facts:
    """Declare the weights and means of the rows at a point; `instead` is released if few rows weigh."""
    rows, block = site.by_group(), GroupedMeans(site, slice(None))
    return (
        NO_MEANS,  # if weights allow another release only
        WorkingWeights(
            lambda: rows.w * row_weights(site.request.distribution, at.shape, rows.y, means), instead=instead
        ),
        ScoreAndInformation(
            site.opened, site.n, at.key, lambda: iter([block]), groups=True, among=site.places_by_group()
        ),
    )


def joint_factor(packed: Floats, sizes: Sequence[int]) -> tuple[Floats, list[tuple[int, int]]]:
    """Return the factor of the covariance of all effects, and the places of the packed entries in it.

    A dispersion may follow the entries.
    """
    ends = np.cumsum(sizes).tolist()
    pairs = zip(ends, sizes, strict=True)
    places = [(end - q + a, end - q + b) for end, q in pairs for a, b in lower_pairs(q)]
    return block_diag(*unpack_factors(packed, sizes)), places


def averaged_means(distribution: DistributionSpec, eta: Floats, deviation: Floats) -> Floats:
    """Average the mean and its first four derivatives over normal effects, (5, n).

    The linear predictor has mean `eta` (n,) and standard deviation `deviation` (n,).
    """
    out = np.zeros((5, len(eta)))
    x, weights = np.polynomial.hermite_e.hermegauss(AVERAGED_NODES)
    for node, weight in zip(x, weights / weights.sum(), strict=True):
        if distribution.name == "Binomial":
            mean = expit(eta + deviation * node)
            first, apart = mean * (1.0 - mean), 1.0 - 2.0 * mean
            third, fourth = first * (1.0 - 6.0 * first), first * apart * (1.0 - 12.0 * first)
            out += weight * np.array([mean, first, first * apart, third, fourth])
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
    data: SiteData, state: State, beta: Floats, factor: Floats, basis: Floats, dispersion: Array
) -> dict[str, Array]:
    """Sum derivatives of the rows' means, averaged over the random effects.

    `first` is their sum, `second` (p,) and `third` (K,) its derivatives in coefficients and factors.
    """
    point = placed(data, state, beta, factor, basis, dispersion)
    site, at = point.site, point.own()
    block, key = GroupedMeans(site, slice(None)), SLOPES + at.key
    slopes = block.vectors((key,))
    state.report(
        NO_MEANS,
        WorkingWeights(lambda: np.abs(slopes.T)),
        ScoreAndInformation(site.opened, site.n, key, lambda: iter([block]), groups=True),
    )
    rows = site.by_group()
    third = rows.Z.T @ (slopes[:, 2:] * (rows.Z @ at.L))
    return {
        "first": np.array(slopes[:, 0].sum()),
        "second": site.to_own.T @ (rows.X.T @ slopes[:, 1]),
        "third": point.in_factors(third),
    }


@step(
    FAMILY,
    "start sum_products sum_scores sum_effects",
    takes=POINT,
    releases={
        "effects": summed("changes of the means by each variable", behind=WEIGHTED),
        "slopes": summed("their derivatives by the coefficients", 2, behind=WEIGHTED),
        "counts": summed("weights of the rows of a level", behind=WEIGHTED, optional=True),
        "factors": summed("their derivatives by the factors of the effects", 2, behind=WEIGHTED),
    },
    request=ChangesRequest,
    requests=control("variables that change", common=True),
)
def sum_changes(
    data: SiteData,
    state: State,
    request: ChangesRequest,
    beta: Floats,
    factor: Floats,
    basis: Floats,
    dispersion: Array,
) -> dict[str, Array]:
    """Sum the changes of the means, averaged over the random effects, by variables through all terms.

    Released are ``effects`` (V,), with derivatives ``slopes`` (V, p) in the coefficients and ``factors``
    (V, K) in the factors, which are zero for a normal response.
    """
    site, V, K = mixed_rows(state), len(request.changes), len(factor)
    if site.request.distribution.least_squares:
        check_lengths(data.name, beta=(beta, site.p))
        means = AveragedMeans(site, site.to_own @ beta, np.zeros((0, 0)))
    else:
        point = placed(data, state, beta, factor, basis, dispersion)
        means = AveragedMeans(site, point.own().beta, point.own().L)
    state.report(NO_MEANS)
    sums = sum_changes_of(state, site.opened, request, means.coefficients, means)
    slopes = sums.slopes[:, 0]
    by_factor = [means.effects @ one[1:].T for one in slopes]
    return {
        "effects": sums.effects[:, 0],
        **sums.level_counts,
        "slopes": slopes[:, 0, 1 : 1 + site.p] @ site.to_own,
        "factors": np.array([point.in_factors(one) for one in by_factor])
        if means.L.size
        else np.zeros((V, K)),
    }


@dataclass(eq=False)
class AveragedMeans:
    """Means of rows over the random effects, by predictors ``eta`` and ``v = L'z`` of the site's own columns.

    The mean is that of ``f(eta + v'u)`` over standard normal u (q,). Without L (q, q) it is ``eta``.
    """

    site: MixedRows
    beta: Floats
    L: Floats
    groups: bool = True
    _seen: int = 0

    @property
    def point(self) -> tuple[bytes]:
        """What identifies the means."""
        return (np.concatenate([self.beta, self.L.ravel()]).tobytes(),)

    @cached_property
    def effects(self) -> Floats:
        """Matrix (q, 1 + w) that takes a constant and the columns of the design to those of the effects."""
        own, rows = self.site.opened, list[Floats]()
        for level in sorted(self.site.levels, key=lambda level: level.term):
            S = np.zeros((len(level.columns), 1 + len(own.scale)))
            S[:, 0] = (own.shift[level.columns] - level.shift) / level.scale
            S[np.arange(len(S)), 1 + level.columns] = own.scale[level.columns] / level.scale
            rows.append(S)
        return np.concatenate(rows)

    @cached_property
    def coefficients(self) -> Floats:
        """Coefficients of the predictors, (1 + q, w)."""
        wide = np.pad(self.beta, (0, len(self.site.opened.scale) - len(self.beta)))[None, :]
        return np.concatenate([wide, self.L.T @ self.effects[:, 1:]]) if self.L.size else wide

    def jet(self, rows: CompleteRows, X: Floats) -> MeanJet:
        """Return means with their derivatives by the predictors."""
        eta = X[:, : len(self.beta)] @ self.beta + (0.0 if rows.offset is None else rows.offset)
        if not self.L.size:
            one = np.ones((len(eta), 1, 1))
            return eta[:, None], one, np.zeros((len(eta), 1, 1, 1))
        v = (self.effects[:, 0] + X @ self.effects[:, 1:].T) @ self.L
        m = averaged_means(self.site.request.distribution, eta, np.linalg.norm(v, axis=1))
        q = v.shape[1]
        second = np.empty((len(eta), 1 + q, 1 + q))
        second[:, 0, 0] = m[2]
        second[:, 0, 1:] = second[:, 1:, 0] = m[3][:, None] * v
        # As of a heat equation, d/dv = v d2/deta2.
        second[:, 1:, 1:] = m[2][:, None, None] * np.eye(q) + m[4][:, None, None] * v[:, :, None] * v[:, None]
        return m[0][:, None], np.column_stack([m[1], m[2][:, None] * v])[:, None], second[:, None]

    def count(self, rows: CompleteRows) -> Floats:
        """Every row counts once."""
        return np.ones(len(rows.y))

    def block(self, rows: CompleteRows, X: Floats) -> RowBlock:
        """Return the rows as other sums have them."""
        if not self.L.size:
            return RowsAtPoints(glm_rows(rows, X), self.site.opened.question.intercept)
        first, self._seen = self._seen, self._seen + len(X)
        place = np.argsort(np.argsort(self.site.levels[0].code, kind="stable"))
        return GroupedMeans(self.site, place[first : self._seen])


def products_by_group(site: MixedRows, covariance: Floats, center: Floats) -> Floats:
    """Return (X, r)'V^-1 (X, r) of each outermost group, (groups, p + 1, p + 1), X the site's own columns."""
    S, _ = site.products(center)
    T = unpack_covariances(covariance, site.request.sizes)
    for level, (outer, groups) in zip(site.levels, site.outer_codes(), strict=True):
        if level is site.levels[-1]:  # these are not added up
            outer, groups = np.arange(level.groups), level.groups
        S, _, _ = integrate(S, np.ascontiguousarray(T[level.term])[None], 0, outer, groups)
    return S[:, 0]


def to_common_columns(to_own: Floats, S: Floats) -> Floats:
    """Write T'ST to matrices S (C, p, p); of the translation T only diagonal and first row are not zero."""
    scale, shift = np.diag(to_own), np.append(0.0, to_own[0, 1:])
    for start in range(0, len(S), CACHED_GROUPS):
        part = S[start : start + CACHED_GROUPS]
        first = part[:, :, :1] * shift
        part *= scale
        part += first
        first = shift[:, None] * part[:, :1]
        part *= scale[:, None]
        part += first
    return S


def scores_by_group(point: CommonPoint) -> tuple[Floats, Floats]:
    """Return the score of each group in the coefficients, (groups, p), and its information (groups, p, p)."""
    rows, p = point.site.by_group(), point.site.p
    modes = np.zeros((len(rows.begin) - 1, rows.Z.shape[1]))

    def score(move: Floats | float = 0.0) -> Floats:
        term = score_at(point.site, point.own(move), modes).score
        return np.add.reduceat(term.left * term.weights, rows.begin[:-1]) @ point.site.to_own

    own, moves = score(), DIFFERENCE * np.eye(p, len(point.values))
    H = np.stack([(score(-move) - score(move)) / (2.0 * DIFFERENCE) for move in moves], axis=1)
    return own, (H + H.transpose(0, 2, 1)) / 2.0


def group_tests(score: Floats, information: Floats, inverse: Floats) -> Floats:
    """Compare products of the groups' scores (C, p) with their information (C, p, p).

    With M the inverse of the information of all groups, directions are ``l = M e_j``, in which the covariance
    of a coefficient is a sum of squares. Returned are sums over groups of (l'u)^2, of its expectation l'Cl,
    C = G - G M G, and of the squares of l'Cl: (3, p).
    """
    direction = inverse / np.sqrt(np.diag(inverse))
    factors = information_factors(information)
    if factors is None:
        G = information @ direction
        own = np.einsum("ij,cij->cj", direction, G)
        expected = own - np.einsum("cij,ik,ckj->cj", G, inverse, G)
    else:
        along, hat = factors @ direction, factors @ inverse @ factors.transpose(0, 2, 1)
        expected = (along * (along - hat @ along)).sum(axis=1)
    return np.array([((score @ direction) ** 2).sum(0), expected.sum(0), (expected**2).sum(0)])


@dataclass(frozen=True, slots=True, eq=False)
class VarianceRequest:
    """What influences of groups on variances are computed at, see :func:`variance_influences`.

    `covariance` (K,) and `scale` are the covariances of the effects, relative to the residual variance, and
    this; `inverse` (K + 1, K + 1) is the inverse of their information of all sites' rows, and `coefficients`
    (p, p) of that of the coefficients, zero if the likelihood is not the restricted one.
    """

    covariance: Floats
    scale: float
    inverse: Floats
    coefficients: Floats


def variance_scores(site: MixedRows, request: VarianceRequest, center: Floats) -> tuple[Floats, Floats]:
    """Return scores of the outermost groups in covariances and log residual variance, and information.

    Scores (C, K + 1) are those of the likelihood of each group, or of the restricted one, to which a group
    adds the change of its leverages; both add up to zero at the estimate. Information (C, K + 1, K + 1) is
    the expected one.
    """
    K, p = len(request.covariance), site.p
    S, codes = site.products(center)[0], site.levels[-1].code
    M = site.to_own @ request.coefficients @ site.to_own.T
    rows = np.bincount(codes).astype(np.float64)
    if len(site.levels) == 1:
        return _scores_of_one_level(site, request, S[:, 0], M, rows)
    score, information = np.zeros((len(rows), K + 1)), np.zeros((len(rows), K + 1, K + 1))
    at = np.triu_indices(K)
    for g, (inner, chain) in enumerate(outermost_chains(site)):
        logdet, products, _ = integrate_chain(site, request.covariance, S[inner], chain)
        leverage = np.einsum("ij,kij->k", M, products[: K + 1, :p, :p])
        squares = products[: K + 1, p, p] / request.scale
        score[g, :K] = -(logdet[1 : K + 1] + leverage[1:] + squares[1:]) / 2.0
        score[g, K] = -(rows[g] - leverage[0] - squares[0]) / 2.0
        own = information[g]
        own[at] = own[at[::-1]] = -logdet[K + 1 :] / 2.0
        own[K, :K] = own[:K, K] = logdet[1 : K + 1] / 2.0
        own[K, K] = rows[g] / 2.0
    return score, information


def _scores_of_one_level(
    site: MixedRows, request: VarianceRequest, S: Floats, M: Floats, rows: Floats
) -> tuple[Floats, Floats]:
    """Return the same where no groups are nested, from products S (C, q + p + 1, q + p + 1).

    With columns R, F = V^-1 and ``D_k = dT / dT_k``, the parts are traces of the q x q matrices Z'F Z D_k
    and ``Z'F R M R'F Z D_k`` (Harville 1977, section 5). `M` (p, p) is as for R, `rows` (C,) counts.
    """
    q, p, K = len(site.levels[0].columns), site.p, len(request.covariance)
    (T,) = unpack_covariances(request.covariance, site.request.sizes)
    A, B, R = S[:, :q, :q], S[:, :q, q : q + p], S[:, q : q + p, q : q + p]
    response, square = S[:, :q, -1], S[:, -1, -1]
    # The response counts as one more column, divided by the residual standard deviation.
    N = B @ M @ B.transpose(0, 2, 1) + response[:, :, None] * response[:, None, :] / request.scale
    total = np.einsum("cij,ij->c", R, M) + square / request.scale
    H = np.linalg.inv(np.eye(q) + A @ T)
    ZFZ, ZFR = H @ A, H @ N @ H.transpose(0, 2, 1)
    along = np.array([unpack_covariances(one, site.request.sizes)[0] for one in np.eye(K)])
    turned = ZFZ[:, None] @ along
    slopes = np.einsum("ckii->ck", turned)
    score, information = np.empty((len(S), K + 1)), np.empty((len(S), K + 1, K + 1))
    score[:, :K] = (np.einsum("cij,kji->ck", ZFR, along) - slopes) / 2.0
    score[:, K] = (total - np.einsum("ij,cjk,cki->c", T, H, N) - rows) / 2.0
    information[:, :K, :K] = np.einsum("ckij,cmji->ckm", turned, turned) / 2.0
    information[:, K, :K] = information[:, :K, K] = slopes / 2.0
    information[:, K, K] = rows / 2.0
    return score, information


def variance_influences(site: MixedRows, request: VarianceRequest, center: Floats) -> tuple[Floats, Floats]:
    """Return changes of the log standard deviations without each outermost group, (C, m), and leverages.

    These are one step of Newton's method from the estimate of all groups, as in a jackknife: with a group's
    score u and information G, and the inverse M of all, ``(M^-1 - G)^-1 u``. The standard deviations are
    those of the effects in the units of the data, and of the residuals; without influences if one is zero.
    """
    score, information = variance_scores(site, request, center)
    own_inverse(
        site.data.name, information.sum(axis=0), np.eye(len(request.inverse)), request.inverse, EXCESS
    )
    root = np.asarray(np.linalg.cholesky(request.inverse), dtype=np.float64)
    moved, leverages = adjusted_scores(score, information, root, 1.0)
    lines = []
    matrices = unpack_covariances(request.covariance, site.request.sizes)
    begin = first_parameters(site.request.sizes)
    for level in sorted(site.levels, key=lambda level: level.term):
        U, T = level.to_units(), matrices[level.term]
        for u, variance in zip(U, np.diag(U @ T @ U.T), strict=True):
            line = np.zeros(len(root))
            for place, (a, b) in enumerate(lower_pairs(len(T)), begin[level.term]):
                line[place] = u[a] * u[b] * (1.0 if a == b else 2.0) / (2.0 * variance)
            line[-1] = 0.5
            lines.append(line)
    lines.append(np.eye(len(root))[-1] / 2.0)
    relative = 2.0 * moved @ root.T @ np.array(lines).T  # changes of variances, relative to these
    return -np.log(np.maximum(1.0 - relative, LEAST_LEFT)) / 2.0, leverages


def dispersion_test(point: CommonPoint, inverse: Floats) -> Floats:
    """Return the excess of squared conditional residuals of counts, and its variance, (2,).

    Residuals are those at the modes of the effects; each square is compared with the variance of the
    distribution times one less the leverage of the row, as in Dean (1992).
    """
    site, at = point.site, point.own()
    rows, kind = site.by_group(), kind_of(site.request.distribution)
    if kind not in (LOG, LOGIT) or (kind == LOGIT and (rows.w <= 1.0).all()):
        return np.zeros(2)
    laplace = replace(site, request=replace(site.request, nodes=1))
    modes = np.zeros((len(rows.begin) - 1, len(at.L)))
    means = score_at(laplace, at, modes).means
    weight = rows.w * row_weights(site.request.distribution, at.shape, rows.y, means)[0]
    X, A = rows.X @ site.to_own, rows.Z @ at.L
    leverage = np.zeros(len(means))
    for first, last in pairwise(rows.begin):
        own = slice(first, last)
        W = weight[own][:, None]
        H = np.linalg.inv(np.eye(A.shape[1]) + A[own].T @ (W * A[own]))
        rest = X[own] - A[own] @ (H @ (A[own].T @ (W * X[own])))
        leverage[own] = np.einsum("ij,jk,ik->i", A[own], H, A[own])
        leverage[own] += np.einsum("ij,jk,ik->i", rest, inverse, rest)
    left = 1.0 - weight * leverage
    square = (rows.w * (rows.y - means)) ** 2
    if kind == LOG:
        return np.array([(square - rows.y + means * (1.0 - left)).sum(), (2.0 * (means * left) ** 2).sum()])
    several = rows.w > 1.0
    spread = 2.0 + np.where(several, 1.0 / weight - 6.0 / rows.w, 0.0)
    return np.array([(square / weight - left)[several].sum(), (spread * left**2)[several].sum()])


@step(
    FAMILY,
    "start sum_products sum_scores sum_groups",
    takes={
        **POINT,
        **LEVERAGES,
        "center": CENTER,
        "variances": aggregate(
            "inverse information of the variances of all sites' rows, or zeros", 2, optional=True, common=True
        ),
        "restricted": control("whether the likelihood is the restricted one", 0),
    },
    releases={
        **cluster_releases(WEIGHTED),
        "tests": summed("squared scores of groups, and their expectation", 2, behind=WEIGHTED),
        "dispersion": summed("excess of squared residuals of counts, and its variance", behind=WEIGHTED),
        "influences": summed(
            "second and fourth powers of groups' influences on each standard deviation", 2, behind=WEIGHTED
        ),
    },
)
def sum_groups(
    data: SiteData,
    state: State,
    beta: Floats,
    factor: Floats,
    basis: Floats,
    dispersion: Array,
    center: Floats,
    restricted: Array,
    inverse: Floats | None = None,
    power: Array | None = None,
    variances: Floats | None = None,
) -> dict[str, Array]:
    """Sum products of the scores of the outermost groups, which are independent, at the estimate.

    Releases what :func:`fedstat.models.horizontal.clusters.sum_corrected` does, by `inverse` (p, p), the
    inverse information of the coefficients of all sites' rows; ``tests`` (3, p), see :func:`group_tests`;
    ``dispersion`` (2,), see :func:`dispersion_test`; and for normal responses, with `variances` (K + 1, K +
    1), the inverse information of covariances and log residual variance: ``influences`` (2, m), see
    :func:`variance_influences`, or zeros without it. `dispersion` is then the residual variance. A session
    has one point: sums at many would separate groups.
    """
    site, p = mixed_rows(state), mixed_rows(state).p
    check_lengths(data.name, center=(center, p))
    if inverse is None or inverse.shape != (p, p) or np.linalg.eigvalsh(inverse + inverse.T)[0] <= 0.0:
        raise MessageError(f"{data.name}: 'inverse' must be positive definite, of shape ({p}, {p})")
    numbers = [beta, factor, basis, dispersion, center, restricted, inverse, variances]
    given = np.concatenate([np.ravel(one).astype(float) for one in numbers if one is not None]).tobytes()
    if site.compared not in (b"", given):
        raise MessageError(f"{data.name}: groups were compared at another point of this session")
    excess, influences = np.zeros(2), np.zeros((2, sum(site.request.sizes) + 1))
    leverages = np.zeros(site.levels[-1].groups)
    if site.request.distribution.least_squares:
        covariance = common_covariance(data.name, site, beta, factor, basis)
        state.report(groups_at(site, covariance), WorkingWeights(lambda: np.ones((1, site.n))))
        S = products_by_group(site, covariance, center)
        score = (S[:, :p, p] - S[:, :p, :p] @ (site.to_own @ beta)) @ site.to_own
        information = to_common_columns(site.to_own, S[:, :p, :p])
        if variances is not None and variances.any():
            K = len(covariance)
            if variances.shape != (K + 1, K + 1) or np.linalg.eigvalsh(variances)[0] <= 0.0:
                raise MessageError(f"{data.name}: 'variances' must be positive definite")
            request = VarianceRequest(covariance, float(dispersion), variances, inverse * float(restricted))
            changes, leverages = variance_influences(site, request, center + beta)
            influences = np.array([(changes**2).sum(axis=0), (changes**4).sum(axis=0)])
    else:
        point = placed(data, state, beta, factor, basis, dispersion)
        state.report(*means_at(site, point.own(), score_at(site, point.own()).means))
        score, information = scores_by_group(point)
        excess = dispersion_test(point, inverse)
    found = {"tests": group_tests(score, information, inverse), "dispersion": excess}
    nothing = {"inside": np.array(False), "meat": np.zeros((p, p)), "concentration": np.zeros(p)}
    nothing |= found | {"influences": np.zeros_like(influences)}
    factors = (1.0 - np.minimum(leverages, AT_ONE)) ** -2.0
    state.report(WorkingWeights(lambda: factors[None, :], instead=nothing))
    whole = information.sum(axis=0)
    corrected = LeverageRequest.of(data.name, whole, site.units, inverse, power, EXCESS)
    found |= sum_corrected(state, corrected, score, lambda part: information[part], instead=nothing)
    site.compared = given
    return found | {"influences": influences}


def common_covariance(name: str, site: MixedRows, beta: Floats, factor: Floats, basis: Floats) -> Floats:
    """Return the covariances of effects of the site's columns at a point of a normal response, checked."""
    sizes = site.request.sizes
    check_lengths(name, beta=(beta, site.p), factor=(factor, first_parameters(sizes)[-1]))
    check_lengths(name, basis=(basis, sum(q * q for q in sizes)))
    L, ends = joint_basis(basis, sizes) @ joint_factor(factor, sizes)[0], np.append(0, np.cumsum(sizes))
    return pack([L[a:b, a:b] @ L[a:b, a:b].T for a, b in pairwise(ends)])


@step(
    FAMILY,
    "start predict_site",
    takes={**POINT, "center": CENTER},
    releases={
        "effects": aggregate(
            "predicted random effects of the site, and their errors", 2, behind=(*GROUP_SUMS, WorkingWeights)
        )
    },
)
def predict_site(
    data: SiteData,
    state: State,
    beta: Floats,
    factor: Floats,
    basis: Floats,
    dispersion: Array,
    center: Floats,
) -> dict[str, Array]:
    """Predict the random effects of the site at one point, ``effects`` (2, q): estimates, and errors.

    They are in the units of the data. For a normal response these are relative to the residual standard
    deviation, and `beta` are coefficients beyond `center`.
    """
    site = mixed_rows(state)
    label = data.table.name if isinstance(data.table, LabeledTable) else None
    whole = [level for level in site.levels if ":".join(site.request.groups[level.term]) == label]
    if not whole:
        raise MessageError(f"{data.name}: the model has no random effect of the site")
    if not site.request.distribution.least_squares:
        return {"effects": _site_mode(data, state, beta, factor, basis, dispersion)}
    p, covariance = site.p, common_covariance(data.name, site, beta, factor, basis)
    check_lengths(data.name, center=(center, p))
    T = unpack_covariances(covariance, site.request.sizes)
    state.report(groups_at(site, covariance, False), WorkingWeights(lambda: np.ones((1, site.n))))
    found = []
    for level in sorted(whole, key=lambda level: level.term):
        # Products of the effects' own columns, weighted by the inverse variance of the rows.
        S, own = marginal_products(site, covariance, center, level.term)[1][0], T[level.term]
        z, units = slice(p, p + len(level.columns)), level.to_units()
        estimate = units @ own @ (S[z, -1] - S[z, :p] @ (site.to_own @ beta))
        left = units @ (own - own @ S[z, z] @ own) @ units.T
        found.append(np.array([estimate, np.sqrt(np.maximum(np.diag(left), 0.0))]))
    return {"effects": np.column_stack(found)}


def _site_mode(
    data: SiteData, state: State, beta: Floats, factor: Floats, basis: Floats, dispersion: Array
) -> Floats:
    """Return the mode of the site's effects given its rows, and errors from the curvature there."""
    point = placed(data, state, beta, factor, basis, dispersion)
    # The mode is that of Laplace's approximation: with one node, means are those at the mode.
    site = replace(point.site, request=replace(point.site.request, nodes=1))
    rows, at = site.by_group(), point.own()
    modes = np.zeros((1, len(at.L)))
    means = score_at(site, at, modes).means
    A = rows.Z @ at.L
    every = rows.w * row_weights(site.request.distribution, at.shape, rows.y, means)
    state.report(NO_MEANS, WorkingWeights(lambda: every), groups_at(site, np.zeros(len(factor)), False))
    inverse = np.linalg.inv(np.eye(len(at.L)) + (A * every[-1][:, None]).T @ A)
    ordered = sorted(site.levels, key=lambda level: level.term)
    L = block_diag(*(level.to_units() for level in ordered)) @ at.L
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
