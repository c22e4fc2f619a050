"""Steps of a site for estimating equations: sums over its clusters of rows, and the fit of its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, MessageError, Remedy
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.disclosure.facts import (
    ClusterCounts,
    ClusterProducts,
    ColumnSums,
    OutcomeCounts,
    RowTerms,
    ScoreAndInformation,
    WorkingWeights,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, control
from fedstat.inference.convergence import last_digit
from fedstat.kernels.clusters import STRUCTURES, adjusted_scores, cluster_sums, pair_sums, solve_clusters
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.local_fit import join_rows
from fedstat.kernels.glm.sums import Rows, Sums, evaluate, linear_predictor, row_means, row_weights
from fedstat.models.glm.steps import BETA, COLUMNS, SiteModel, describe_nothing
from fedstat.models.horizontal.clusters import LEVERAGES, LeverageRequest, cluster_releases, sum_corrected
from fedstat.models.horizontal.rows import (
    AT_THE_START,
    SCORES,
    SUMS,
    describe_sums,
    require_response,
    summed,
)
from fedstat.models.rows.estimated_weights import RELEASES, sum_stacked
from fedstat.models.rows.objective import FitRows, Place, own_part, standard_place
from fedstat.models.rows.steps import enter_start, rows_in
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "gee"
USED = {"independence": np.zeros(3), "exchangeable": np.eye(3)[0], "ar1": 1.0 - np.eye(3)[0]}
"""Sums of products within clusters that the estimator of a working correlation uses."""
OWN_ITERATIONS, OWN_TOLERANCE = 50, 1e-9
CLUSTERS_PER_COLUMN = 5
"""Fewest clusters for each coefficient of a site's own fit, whose covariance rests on clusters."""
FEW, NO_FIT = "too few clusters", "no convergence"


@dataclass(frozen=True, slots=True)
class GEERequest:
    """Family in JSON, columns of clusters and of the order within them, and the working correlation."""

    distribution: str
    groups: str
    time: str
    structure: str

    def check(self) -> None:
        """Refuse an unknown working correlation, and an order that it does not need."""
        if self.structure not in STRUCTURES or bool(self.time) != (self.structure == "ar1"):
            raise MessageError(
                f"working correlation: expected one of {', '.join(STRUCTURES)}, the last with times"
            )

    @property
    def kind(self) -> int:
        """Position of the working correlation in the kernels."""
        return STRUCTURES.index(self.structure)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """Rows at coefficients: derivatives (p, n) and residuals (n,) over the root of the variance function."""

    D: Floats
    r: Floats


@dataclass(frozen=True, slots=True, eq=False)
class EquationSums:
    """Estimating functions (p,), their information (p, p), and products of residuals within clusters (3,)."""

    score: Floats
    information: Floats
    pairs: Floats


CLUSTERS = (*OPEN_ROWS, ClusterCounts, ClusterProducts)
BEHIND = (*SUMS, ClusterCounts, ClusterProducts)


@dataclass(slots=True, eq=False)
class SiteClusters(FitRows):
    """One fit's rows, sorted by cluster and by time within it; `start` (G + 1,) are the first of each.

    Parameters of the site are the coefficients of its own columns, and the working correlation last. There is
    no likelihood: the score are estimating functions, and the information is their expected derivative.
    """

    RECOMPUTED: ClassVar = ("held",)
    """The part that is made from the rows again when a session is resumed."""

    family = FAMILY
    request_type = GEERequest
    requests = control("family, columns of clusters and of their order, working correlation", common=True)
    starts: ClassVar = {
        "counts": summed(
            "sums over clusters: ones, weights, pairs of rows, and weighted pairs", behind=CLUSTERS
        )
    }
    own_fit: ClassVar = {
        "beta": own_part("coefficients", behind=CLUSTERS),
        "cov": own_part("bias-reduced covariance", 2, CLUSTERS),
        "columns": own_part("means and deviations of the columns", 2, CLUSTERS),
        "clusters": own_part("number of clusters", 0, CLUSTERS),
    }

    opened: OpenRows
    model: SiteModel
    request: GEERequest
    held: tuple[Rows, Ints, Ints] | None = None

    @classmethod
    def begin(
        cls, data: SiteData, state: State, request: GEERequest
    ) -> tuple[SiteClusters, dict[str, Array]]:
        """Sort the rows into clusters, and count these: ``counts`` (4,)."""
        opened = rows_of(state)
        columns = {request.groups, *([request.time] if request.time else [])}
        if not columns <= set(opened.question.labels):
            raise MessageError(
                f"{data.name}: the model did not open the columns of clusters and times as labels"
            )
        distribution = DistributionSpec.from_json(request.distribution)
        model = SiteModel(opened, distribution, state.entities)
        clusters = cls(opened, model, request)
        rows, first, _ = clusters.sorted
        w = clusters.weights
        state.report(*clusters.facts())
        if distribution.least_squares:
            # The same at all coefficients: a difference of two masked sums is a site's part.
            state.report(clusters.column_sums)
        require_response(data.name, rows, distribution, opened.question.response)
        if distribution.name == "Binomial":
            sides = [int((clusters.by_cluster((rows.y == value) * 1.0) > 0.0).sum()) for value in (0.0, 1.0)]
            state.report(OutcomeCounts((sides[0], sides[1]), opened.question.response))
        # Reweighting after dropout gives a person several weights, which only independence allows.
        size = np.diff(first)
        if request.kind and (np.abs(w - np.repeat(w[first[:-1]], size)) > 1e-9 * w.max()).any():
            raise DesignError(
                f"site {data.name!r}: weights differ between rows of one '{request.groups}'",
                remedy=Remedy(
                    "from_formula(..., cov_struct='independence').fit()",
                    "Use weights that are equal within clusters, or {arguments}.",
                ),
            )
        state.count_entities(min(len(size), state.entities))
        return clusters, {"counts": clusters.counts}

    @property
    def counts(self) -> Floats:
        """Sums over clusters: ones, weights, pairs of rows, and weighted pairs, (4,)."""
        _, first, _ = self.sorted
        size, w = np.diff(first), self.weights
        pairs = size * (size - 1.0) / 2.0
        return np.array([float(len(size)), w.sum(), pairs.sum(), w[first[:-1]] @ pairs])

    @property
    def key(self) -> str:
        """Digest of the model of independent rows, and of these."""
        return self.model.key

    @property
    def column_sums(self) -> ColumnSums:
        """Functions of columns whose products the fit of these rows would reveal."""
        return self.model.column_sums

    @property
    def own_weighted(self) -> ScoreAndInformation | None:
        """Score and information of independent rows."""
        return self.model.own_weighted

    @property
    def own_numbers(self) -> int:
        """Coefficients, covariance, moments of the columns, and the number of clusters."""
        p = self.model.p
        return p * (p + 3) // 2 + 2 * (p - 1) + 1

    @property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of the site's own fit."""
        p = self.model.p
        return {"beta": (p,), "cov": (p, p), "columns": (2, p), "clusters": ()}

    def fit_own(self) -> tuple[dict[str, Array], str]:
        """Solve the equations of the site's clusters.

        ``beta`` (p,) and ``cov`` (p, p), that of Mancl and DeRouen, are for the columns as the site
        standardized them, with means and deviations ``columns`` (2, p); zeros for constant columns, and if
        there is no fit.
        """
        arrays: dict[str, Array] = {name: np.zeros(shape) for name, shape in self.own_shapes.items()}
        G, varies = len(self.sorted[1]) - 1, self.opened.varies
        solved = _fit_own(self, varies) if CLUSTERS_PER_COLUMN * self.model.p <= G else FEW
        arrays |= {"columns": self.opened.own, "clusters": np.array(float(G))}
        if isinstance(solved, str):
            return arrays, solved
        arrays["beta"][varies], arrays["cov"][np.ix_(varies, varies)] = solved
        return arrays, ""

    def recompute(self) -> None:
        """Sort the rows again when they are next needed."""
        self.held = None

    @property
    def sorted(self) -> tuple[Rows, Ints, Ints]:
        """Rows in the order of clusters, the first row of each cluster, and the place of each row (n,)."""
        if self.held is None:
            self.held = self._sort()
        return self.held

    def _sort(self) -> tuple[Rows, Ints, Ints]:
        names = [self.request.groups, *([self.request.time] if self.request.time else [])]
        frame = pd.concat([rows.frame[names] for rows, _ in self.model.opened.chunks()])
        codes = [pd.factorize(frame[name], sort=True)[0] for name in names]
        order = np.lexsort(codes[::-1])
        code = codes[0][order]
        if len(codes) > 1 and ((np.diff(code) == 0) & (np.diff(codes[1][order]) == 0)).any():
            raise DesignError(
                f"site {self.model.opened.data.name!r}: some rows of one '{names[0]}' have the same "
                f"'{names[1]}'. Give the rows of a cluster different times, or leave repeated rows out."
            )
        rows = join_rows(list(self.model.chunks())).part(order)
        first = np.concatenate([[0], np.flatnonzero(np.diff(code)) + 1, [len(code)]]).astype(np.int64)
        return rows, first, np.argsort(order)

    @property
    def weights(self) -> Floats:
        """Weights of the sorted rows, (n,)."""
        rows, _, _ = self.sorted
        return np.ones(len(rows)) if rows.weight is None else rows.weight

    def chunks(self) -> Iterator[Rows]:
        """Sorted rows, in the form of the kernels."""
        yield self.sorted[0]

    def at(self, beta: Floats) -> ScaledRows | None:
        """Return residuals at coefficients of the site's own columns; None outside the family's domain."""
        rows, _, _ = self.sorted
        with np.errstate(all="ignore"):
            at = row_means(rows, self.model.distribution, linear_predictor(rows, beta))
            root = np.sqrt(at.V)
            D, r = np.ascontiguousarray(rows.X.T / (at.slope * root)), (rows.y - at.mu) / root
        return ScaledRows(D, r) if at.inside.all() and np.isfinite(D).all() else None

    def place(self, shift: Floats, scale: Floats, beta: Floats, rho: Array) -> Place:
        """Return coefficients of the site's own columns, and the working correlation."""
        place = self.model.place(shift, scale, beta)
        return Place(np.append(place.own, float(rho)), place.to_own)

    def allows(self, rho: float) -> bool:
        """Return whether the working correlation of every cluster is positive definite."""
        most = int(np.diff(self.sorted[1]).max())
        low = {"independence": -np.inf, "exchangeable": -1.0 / max(most - 1, 1), "ar1": -1.0}
        return low[self.request.structure] < rho < 1.0

    def functions(self, at: ScaledRows, rho: float, each: bool = False) -> tuple[Floats, Floats]:
        """Return estimating functions of the clusters, and their information, see the kernel."""
        return cluster_sums(at.D, at.r, self.weights, self.sorted[1], self.request.kind, rho, each)

    def at_own(self, own: Floats) -> ScaledRows:
        """Return residuals at the site's own parameters; MessageError if sums are not defined there."""
        at = self.at(own[:-1])
        if at is None or not self.allows(float(own[-1])):
            raise MessageError(
                f"{self.data.name}: the sums at this point are not defined; request 'sum_scores' first"
            )
        return at

    def sums(self, own: Floats) -> EquationSums | None:
        """Sum over the clusters; None where a mean or the correlation is outside its range."""
        at, rho = self.at(own[:-1]), float(own[-1])
        if at is None or not self.allows(rho):
            return None
        score, information = self.functions(at, rho)
        pairs = pair_sums(at.r, self.weights, self.sorted[1])
        # The others are not needed, and would be products of other pairs of rows.
        return EquationSums(score.sum(axis=0), information[0], pairs * USED[self.request.structure])

    def terms(self, own: Floats) -> Mapping[str, Sequence[RowTerms]]:
        """Return the terms of the sums: a row's columns, with those of its cluster by the correlation.

        Each of the ``pairs`` is a row's residual times residuals of its cluster.
        """
        at, rho, first = self.at_own(own), float(own[-1]), self.sorted[1]
        w, one, size = self.weights[:, None], np.ones((len(at.r), 1)), np.diff(first)
        solved = solve_clusters(w * np.column_stack([at.r, at.D.T]), first, self.request.kind, rho)
        r, m = at.r[:, None], np.repeat(size, size)[:, None].astype(np.float64)
        others = np.repeat(np.add.reduceat(r, first[:-1]), size, axis=0) - r
        following = np.append(at.r[1:], 0.0)[:, None]
        following[first[1:] - 1] = 0.0
        several = m > 1.0
        pairs = [w * others / 2.0, several * following / np.maximum(m - 1.0, 1.0), several * r / m]
        return {
            "score": [RowTerms(at.D.T, solved[:, :1], one)],
            "information": [RowTerms(at.D.T, one, solved[:, 1:])],
            "pairs": [RowTerms(r, np.column_stack(pairs) * USED[self.request.structure], one)],
        }

    def by_cluster(self, values: Floats) -> Floats:
        """Sum values of sorted rows, (..., n), by cluster: (..., G)."""
        return np.asarray(np.add.reduceat(values, self.sorted[1][:-1], axis=-1))

    def facts(self) -> Iterator[ClusterCounts | ClusterProducts]:
        """Declare how many clusters are behind what sums at several correlations have in common.

        Sums at several exchangeable correlations separate the clusters by their number of rows, since R^-1
        depends on it; for AR(1) they separate clusters of one row, of two, and of more. Each such class needs
        enough clusters, and so does every product of columns in it.
        """
        rows, start, _ = self.sorted
        size = np.diff(start)
        classes = {
            "independence": np.ones_like(size),
            "exchangeable": size,
            "ar1": np.minimum(size, 3),
        }[self.request.structure]
        _, code, counts = np.unique(classes, return_inverse=True, return_counts=True)
        groups, opened = self.request.groups, self.model.opened
        same = "with the same number of rows"
        kinds = {same: counts.tolist()}
        raw = opened.in_units(rows.X)
        there = self.by_cluster((raw != 0.0).T.astype(float)) > 0.0
        # Rows of a level may be many and belong to few persons.
        for j, name in enumerate(opened.names, int(opened.question.intercept)):
            if ((raw[:, j] == 0.0) | (raw[:, j] == 1.0)).all():
                zeros = self.by_cluster(1.0 - raw[:, j]) > 0.0
                kinds[f"on either side of design column '{name}'"] = [int(there[j].sum()), int(zeros.sum())]
        remedies = {same: "Use cov_struct='independence', or leave clusters of rare sizes out"}
        yield ClusterCounts(groups, len(size), self.model.p, kinds, remedies=remedies)
        for one in range(len(counts)):
            inside = there[:, code == one].astype(float)
            yield ClusterProducts((inside @ inside.T).astype(np.int64), (groups,), self.request.time)


enter_start(SiteClusters)


def clusters_of(state: State) -> SiteClusters:
    """Return this fit's clusters; MessageError if the fit was not started here."""
    return rows_in(state, SiteClusters)


def sums_at(
    state: State, clusters: SiteClusters, beta: Floats, instead: dict[str, Array] | None = None
) -> Sums:
    """Return the sums of independent rows at coefficients of the site's own columns; declare their weights.

    `instead` is released if a few rows or a few clusters have nearly all weight; without it they are refused.
    """
    model = clusters.model
    total = evaluate(clusters.chunks(), beta, model.distribution)
    state.report(*model.facts_at(beta, total, instead))
    weights = partial(row_weights, clusters.sorted[0], beta, model.distribution)
    state.report(WorkingWeights(lambda: clusters.by_cluster(weights()), instead=instead))
    return total


@step(
    FAMILY,
    "start fit_alone sum_scores",
    takes={
        **COLUMNS,
        "beta": aggregate(BETA, optional=True, common=True),
        "rho": aggregate("working correlation", 0, common=True),
    },
    releases={
        **SCORES,
        "score": summed("estimating functions", behind=BEHIND),
        "information": summed("their expected derivative", 2, behind=BEHIND),
        "pairs": summed("products of residuals within clusters", behind=BEHIND),
    },
)
def sum_scores(
    data: SiteData, state: State, shift: Floats, scale: Floats, rho: Array, beta: Floats | None = None
) -> dict[str, Array]:
    """Sum estimating functions and information over the clusters at beta (p,) and a correlation.

    `shift` and `scale` (p,) are those of the columns over all sites; without `beta` the sums are those of the
    start of a GLM's iteration. It releases ``score`` (p,) and ``information`` (p, p); ``totals``: rows,
    deviance, Pearson's statistic; ``pairs`` (3,), see :func:`fedstat.kernels.clusters.pair_sums`; ``inside``
    and ``spread``, without which all else is zero.
    """
    clusters = clusters_of(state)
    model = clusters.model
    nothing = describe_nothing(model.p, False) | {"pairs": np.zeros(3)}
    if beta is None:
        state.report(*AT_THE_START)
        first = evaluate(clusters.chunks(), None, model.distribution)
        return nothing | describe_sums(first, standard_place(model.opened, shift, scale))
    own, T = clusters.place(shift, scale, beta, rho)
    independent = sums_at(state, clusters, own[:-1], nothing)
    sums = clusters.sums(own)
    if sums is None:
        return nothing | {"inside": np.array(False), "spread": np.array(True)}
    found = describe_sums(independent, T)
    return found | {"score": T.T @ sums.score, "information": T.T @ sums.information @ T, "pairs": sums.pairs}


@step(
    FAMILY,
    "sum_scores",
    takes={
        **COLUMNS,
        **LEVERAGES,
        "beta": aggregate(BETA, common=True),
        "rho": aggregate("working correlation", 0, common=True),
    },
    releases={
        **cluster_releases(BEHIND),
        "omega": summed("information of independent rows", 2),
    },
)
def finish(
    data: SiteData,
    state: State,
    shift: Floats,
    scale: Floats,
    beta: Floats,
    rho: Array,
    inverse: Floats | None = None,
    power: Array | None = None,
) -> dict[str, Array]:
    """Sum outer products of the clusters' estimating functions; refused if few have nearly all weight.

    `beta`, `rho`, `shift` and `scale` are as for ``sum_scores``, `inverse` (p, p) is the inverse information
    of all sites at them, and `power` that of :func:`fedstat.kernels.clusters.adjusted_scores`. It releases
    what :func:`fedstat.models.horizontal.clusters.sum_corrected` does; and ``omega`` (p, p), the information
    of independent rows.
    """
    clusters = clusters_of(state)
    own, T = clusters.place(shift, scale, beta, rho)
    independent = T.T @ sums_at(state, clusters, own[:-1]).information @ T
    at = clusters.at_own(own)
    # Products are checked by rows in the order of the table.
    state.report(clusters.opened.products_with(at.r[clusters.sorted[2]] ** 2))
    score, information = clusters.functions(at, float(rho), each=True)
    information, units = T.T @ information @ T, clusters.model.units(shift, scale, beta)
    request = LeverageRequest.of(data.name, information.sum(axis=0), units, inverse, power)
    found = sum_corrected(state, request, score @ T, lambda part: information[part])
    return {**found, "omega": independent}


@step(
    FAMILY,
    "finish",
    takes={
        **COLUMNS,
        "beta": aggregate(BETA, common=True),
        "rho": aggregate("working correlation", 0, common=True),
    },
    releases={name: replace(one, behind=(*one.behind, *BEHIND)) for name, one in RELEASES.items()},
)
def sum_weighted(
    data: SiteData, state: State, shift: Floats, scale: Floats, beta: Floats, rho: Array
) -> dict[str, Array]:
    """Sum what the covariance with estimated weights needs, by cluster; see :func:`sum_stacked`.

    The working correlation is taken as known, since errors in it have no effect on the coefficients.
    """
    clusters = clusters_of(state)
    own, T = clusters.place(shift, scale, beta, rho)
    sums_at(state, clusters, own[:-1])
    rows, first, place = clusters.sorted
    weighted = (clusters.weights * clusters.at_own(own).r)[:, None]
    means = row_means(rows, clusters.model.distribution, linear_predictor(rows, own[:-1]))
    solved = solve_clusters(weighted, first, clusters.request.kind, float(rho))
    residuals = solved / (means.slope * np.sqrt(means.V))[:, None]
    code = np.repeat(np.arange(len(first) - 1), np.diff(first))
    scores, key = (rows.X * residuals) @ T, own.tobytes()
    return sum_stacked(state, clusters.opened, scores[place], residuals[place], key, code[place])


# ----------------------------------------------------------------------------------------------------
# A site's own fit, for the comparison of sites.


def _fit_own(clusters: SiteClusters, varies: Bools) -> tuple[Floats, Floats] | str:
    """Solve the site's own estimating equations: coefficients and covariance, or the problem."""
    model, (_, first, _) = clusters.model, clusters.sorted
    inside, counts = np.ix_(varies, varies), clusters.counts
    sums = evaluate(clusters.chunks(), None, model.distribution)
    beta, rho, p = np.zeros(model.p), 0.0, int(varies.sum())
    score, information = sums.score, sums.information
    for _ in range(OWN_ITERATIONS):
        values = np.linalg.eigvalsh(information[inside])
        if not values[0] > 1e-12 * values[-1]:
            return NO_FIT
        move = np.linalg.solve(information[inside], score[varies])
        beta[varies] += move
        at = clusters.at(beta)
        if at is None or not clusters.allows(rho):
            return NO_FIT
        pearson = float(clusters.weights @ at.r**2)
        totals = np.array([float(len(at.r)), pearson])
        pairs = pair_sums(at.r, clusters.weights, first)
        rho, before = correlation(clusters.request.structure, pairs, counts, totals, p), rho
        if not clusters.allows(rho):
            return NO_FIT
        each, information = clusters.functions(at, rho)
        score, information = each.sum(axis=0), information[0]
        size = np.sqrt(max(float(move @ information[inside] @ move), 0.0))
        least = OWN_TOLERANCE * np.sqrt(pearson) + last_digit(beta[varies], information[inside])
        if size < least and abs(rho - before) < OWN_TOLERANCE:
            break
    else:
        return NO_FIT
    functions, parts = clusters.functions(at, rho, each=True)
    bread = np.linalg.inv(information[inside])
    root = np.linalg.cholesky(bread)
    corrected, _ = adjusted_scores(functions[:, varies], parts[:, varies][:, :, varies], root, 1.0)
    if not corrected.any():
        return FEW
    half = bread @ np.linalg.inv(root).T @ corrected.T
    return beta[varies], half @ half.T


def correlation(structure: str, pairs: Floats, counts: Floats, totals: Floats, p: int) -> float:
    """Return the moment estimator of the working correlation from sums over clusters, as in statsmodels.

    `pairs` (3,) are those of :func:`fedstat.kernels.clusters.pair_sums`, `counts` (4,) of ``start``, and
    `totals` the number of rows and Pearson's statistic (Liang and Zeger 1986, section 4).
    """
    n, pearson = totals
    _, weight, number, weighted = counts
    if structure == "independence" or number == 0.0:
        return 0.0
    if structure == "ar1":
        return float(pairs[1] / pairs[2])
    scale = pearson / (weight * (n - p) / n)
    return float(pairs[0] / scale / (weighted * (number - p) / number))
