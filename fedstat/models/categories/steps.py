"""Steps of a site for a response of categories: sums over its rows, its own fit, and counts in bins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of, translation
from fedstat.federation.design.site_rows import CompleteRows
from fedstat.federation.disclosure.facts import (
    ClusterProducts,
    ModelEvaluation,
    OwnFit,
    OwnFitProblem,
    ScoreAndInformation,
    SummedProducts,
    WorkingWeights,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.release_history import ReleasedGroups
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, aggregate, check_lengths, control
from fedstat.inference.evaluation import bin_edges, merge_small_bins
from fedstat.inference.homogeneity_tests import quadratic_form
from fedstat.kernels.categories import (
    BASELINE,
    LINKS,
    CategoryRows,
    CategorySums,
    coefficient_map,
    constant_predictors,
    moved,
    probabilities,
)
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.horizontal.clusters import LEVERAGES, LeverageRequest, cluster_releases, sum_corrected
from fedstat.models.horizontal.newton import maximize_own
from fedstat.models.horizontal.rows import AT_THE_START, FLAT, NO_MEANS, SUMS, summed
from fedstat.models.horizontal.variable_changes import ChangesRequest, VariableVectors, sum_changes_of
from fedstat.models.margins import MeanJet
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "categories"
LOGIT = DistributionSpec("Binomial", "Logit")
MOST_BINS, LARGE_BINS = 16, 20
"""If owners allow one evaluation, bins have a 16th of the rows, or 20 times the minimum if this is less."""
SEPARATED, ABSENT = "separated categories", "a category has no rows"


@dataclass(frozen=True, slots=True)
class CategoryRequest:
    """Link, and the column of clusters, if there is one."""

    link: str
    clusters: tuple[str, ...] = ()

    @property
    def proportional(self) -> bool:
        """Whether the predictors of all categories have the same coefficients."""
        return self.link != BASELINE

    def check(self) -> None:
        """Refuse unknown links."""
        if self.link not in (BASELINE, *LINKS):
            raise MessageError(f"link: expected one of {', '.join((BASELINE, *LINKS))}")


@dataclass(frozen=True, slots=True, eq=False)
class SiteCategories:
    """One fit's rows; parameters of the site are for columns as it standardized them."""

    opened: OpenRows
    request: CategoryRequest
    n: int

    @property
    def categories(self) -> int:
        """Number of categories."""
        return len(self.opened.question.categories)

    def chunks(self, columns: Bools | slice = slice(None)) -> Iterator[CategoryRows]:
        """Yield the rows, or some of their columns, in the form of the kernels."""
        for rows, X in self.opened.chunks():
            X = np.ascontiguousarray(X[:, columns])
            yield CategoryRows(X, rows.y.astype(np.int64), self.request.link, rows.offset, rows.weight)

    def sums(self, B: Floats, columns: Bools | slice = slice(None)) -> CategorySums:
        """Sum over the rows at coefficients (J - 1, p) of the site's own columns."""
        first, *rest = (rows.sums(B) for rows in self.chunks(columns))
        for more in rest:
            first = CategorySums(
                first.loglik + more.loglik,
                first.score + more.score,
                first.information + more.information,
                first.spread + more.spread,
                (first.flat[0] + more.flat[0], first.flat[1] + more.flat[1]),
            )
        return first

    def cluster_information(self, B: Floats, code: Ints, part: slice) -> Floats:
        """Sum the observed information over each of a range of clusters, (g, (J - 1) p, (J - 1) p)."""
        found, at = np.zeros((part.stop - part.start, B.size, B.size)), 0
        for rows in self.chunks():
            own = code[at : at + len(rows.y)] - part.start
            inside = np.flatnonzero((own >= 0) & (own < len(found)))
            found += rows.part(inside).cluster_information(B, own[inside], len(found))
            at += len(rows.y)
        return found

    def facts_at(
        self, B: Floats, sums: CategorySums | None = None, instead: Mapping[str, Array] | None = None
    ) -> tuple[WorkingWeights | ScoreAndInformation, ...]:
        """Declare the weights that rows have in sums at coefficients; without `sums` those of effects."""
        effects = sums is None
        point = (B.tobytes(), effects)

        def each() -> Floats:
            return np.concatenate([np.abs(part.vectors((point,))) for part in self.blocks()]).T

        def flat() -> bool:
            assert sums is not None
            return sums.flat[0] < FLAT * sums.flat[1]

        return (
            NO_MEANS,  # if weights allow another release only
            WorkingWeights(each, None if sums is None else sums.spread, instead, None if effects else flat),
            ScoreAndInformation(self.opened, self.n, point, self.blocks),
        )

    def blocks(self) -> Iterator[CategoryBlock]:
        """Yield the rows for the check of what sums at several coefficients single out."""
        return (CategoryBlock(block) for rows in self.chunks() for block in rows.blocks())

    def products_at(self, B: Floats) -> Iterator[SummedProducts]:
        """Facts on the products of the rows' scores."""
        for column in np.concatenate([rows.residuals(B) for rows in self.chunks()]).T:
            yield self.opened.products_with(column**2)

    def products_by_category(self) -> Iterator[SummedProducts]:
        """Facts on the products of columns over the rows of each category.

        The observed information with a cumulative link depends on the category: several of these matrices at
        different thresholds reveal the products of two columns over the rows of one category.
        """
        y = np.concatenate([rows.y for rows in self.chunks()])
        for place, level in enumerate(self.opened.question.categories):
            fact = self.opened.products_with((y == place).astype(np.float64))
            yield replace(fact, names=[f"{name} (of {level})" for name in fact.names], rows=None)

    def map(self, proportional: bool) -> Floats:
        """Matrix from parameters to coefficients, see :func:`coefficient_map`."""
        return coefficient_map(self.categories, len(self.opened.scale), proportional)

    def place(
        self, shift: Floats, scale: Floats, beta: Floats, proportional: bool
    ) -> tuple[Floats, Floats, Floats]:
        """Coefficients (J - 1, p) of the site's own columns, and matrices that take them from parameters.

        The first matrix (q, q) takes parameters to those of the site's own columns, the second these to all
        coefficients.
        """
        M, p = self.map(proportional), len(self.opened.scale)
        check_lengths(self.opened.data.name, shift=(shift, p), scale=(scale, p), beta=(beta, M.shape[1]))
        if not (scale > 0.0).all():
            raise MessageError(f"{self.opened.data.name}: array 'scale' must be positive")
        L = moved(M, translation(self.opened.shift, self.opened.scale, shift, scale))
        return (M @ (L @ beta)).reshape(-1, p), L, M

    @property
    def key(self) -> str:
        """Digest of the model and of the rows that it is fitted on."""
        text = json.dumps([self.opened.question.to_json(), FAMILY, self.request.link])
        return hashlib.sha256(text.encode() + self.opened.used.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class CategoryBlock:
    """A part of the rows; a point is the bytes of coefficients, and whether it is of sums for effects."""

    rows: CategoryRows

    @property
    def columns(self) -> Floats:
        """Columns of the design, a constant among them."""
        return self.rows.X

    def vectors(self, points: tuple[tuple[bytes, Any], ...]) -> Floats:
        """Vectors by which columns are multiplied at points, (m, k)."""
        found = []
        for own, effects in points:
            if isinstance(effects, VariableVectors):
                effects()
            B = np.frombuffer(own).reshape(-1, self.rows.X.shape[1])
            if effects:
                found += [one.reshape(len(one), -1) for one in self.rows.probability_terms(B)]
            else:
                found.append(self.rows.vectors(B))
        return np.column_stack(found)

    def times(self, points: tuple[tuple[bytes, bool], ...], wide: Floats) -> Floats:
        """Columns and vectors at points, times a matrix (p + k, q)."""
        p = self.rows.X.shape[1]
        return np.asarray(self.rows.X @ wide[:p] + self.vectors(points) @ wide[p:])

    def every(self, first: int, step: int) -> CategoryBlock:
        """Return every n-th row, from the first on."""
        return CategoryBlock(self.rows.part(slice(first, None, step)))


def categories_of(state: State) -> SiteCategories:
    """Return this fit's rows; MessageError if the fit was not started here."""
    rows_of(state)
    return state.use(FAMILY, SiteCategories, "this fit was not started here; request 'start' first")


def opened_categories(data: SiteData, state: State, request: CategoryRequest) -> SiteCategories:
    """Return the open rows with a link; MessageError where they have no categories, or not these clusters."""
    opened = rows_of(state)
    question = opened.question
    if (
        len(question.categories) < 2
        or not set(request.clusters) <= set(question.labels)
        or not question.intercept
    ):
        raise MessageError(f"{data.name}: the model opened no categories, or not this column of clusters")
    return SiteCategories(opened, request, state.entities)


POINT = {
    "shift": aggregate("means of the columns over all sites", common=True),
    "scale": aggregate("standard deviations of the columns over all sites", common=True),
    "beta": aggregate("parameters of the standardized columns", common=True),
}
SPREAD = control("whether more than a few rows weigh", 0, maskable=True)
REQUEST = control("link, and column of clusters", common=True)


@step(
    FAMILY,
    releases={"response": summed("weights by category, and rows", 2, behind=OPEN_ROWS)},
    request=CategoryRequest,
    requests=REQUEST,
)
def start(data: SiteData, state: State, request: CategoryRequest) -> dict[str, Array]:
    """Count the categories: ``response`` (2, J), sums of weights, and rows."""
    site = opened_categories(data, state, request)
    if request.proportional:
        state.report(*site.products_by_category())
    response = np.zeros((2, site.categories))
    for rows in site.chunks():
        response += [np.bincount(rows.y, one, site.categories) for one in (rows.weight, None)]
    state.keep(FAMILY, site, state.entities)
    return {"response": response}


def _own(what: str, ndim: int = 1) -> ArrayDeclaration:
    return aggregate(f"site's own fit: {what}", ndim, behind=(*OPEN_ROWS, OwnFit))


@step(
    FAMILY,
    "start",
    releases={
        "beta": _own("parameters"),
        "information": _own("information", 2),
        "columns": _own("means and standard deviations of the columns", 2),
    },
    replies=control("what hindered the fit of the site's rows alone"),
)
def fit_alone(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Fit this site's rows alone, and release that fit; the text has the ``problem`` that prevented it.

    ``beta`` (q,) and ``information`` (q, q) are for columns as the site standardized them, by ``columns``
    (2, p); they are zero for columns that are constant here, and if there is no fit.
    """
    site = categories_of(state)
    opened, M = site.opened, site.map(site.request.proportional)
    q, p = M.shape[1], len(opened.scale)

    def instead(problem: str) -> tuple[dict[str, Array], str]:
        arrays = {"beta": np.zeros(q), "information": np.zeros((q, q)), "columns": np.zeros((2, p))}
        return arrays, json.dumps({"problem": problem})

    sums = opened.question.column_sums(opened.used, True, site.key)
    state.report(OwnFit(q * (q + 3) // 2 + 2 * (p - 1), sums, instead))
    beta, information, problem = fit_own(site)
    if problem:
        state.report(OwnFitProblem(problem, site.key, instead))
    return {"beta": beta, "information": information, "columns": opened.own}, json.dumps({"problem": problem})


def fit_own(site: SiteCategories) -> tuple[Floats, Floats, str]:
    """Maximize the likelihood of the site's rows: parameters, information, and a problem or ''."""
    varies, proportional, link = site.opened.varies, site.request.proportional, site.request.link
    full = site.map(proportional)
    # Parameters of columns that vary here: those of a site without the other columns.
    known = (np.abs(full).reshape(-1, len(varies), full.shape[1])[:, ~varies] == 0.0).all(axis=(0, 1))
    M = coefficient_map(site.categories, int(varies.sum()), proportional)
    beta, information = np.zeros(len(known)), np.zeros((len(known), len(known)))
    none = beta.copy(), information.copy()
    counts = sum(np.bincount(rows.y, rows.weight, site.categories) for rows in site.chunks())
    if (np.asarray(counts) == 0.0).any():
        return *none, ABSENT

    def at(own: Floats) -> tuple[float, Floats, Floats]:
        sums = site.sums((M @ own).reshape(site.categories - 1, -1), varies)
        return sums.loglik, M.T @ sums.score.ravel(), M.T @ sums.information.reshape(len(M), -1) @ M

    start = first_parameters(np.asarray(counts, dtype=float), M, link)
    own, part, problem = maximize_own(at, start, SEPARATED)
    if problem:
        return *none, problem
    beta[known], information[np.ix_(known, known)] = own, part
    return beta, information, ""


def first_parameters(counts: Floats, M: Floats, link: str) -> Floats:
    """Parameters (q,) with which all rows have the probabilities of the counts (J,)."""
    width = len(counts) - 1
    B = np.zeros((width, len(M) // width))
    B[:, 0] = constant_predictors(counts, link)
    return np.asarray(M.T @ B.ravel())


SCORES = {
    "spread": SPREAD,
    "score": summed("score"),
    "information": summed("observed information", 2),
    "loglik": summed("log-likelihood", 0),
}


def scores_at(
    state: State, site: SiteCategories, place: tuple[Floats, Floats, Floats], declined: bool
) -> dict[str, Array]:
    """Sum score, information and log-likelihood at a point; with `declined` it may ask for another point."""
    B, L, M = place
    sums = site.sums(B)
    q = len(L)
    nothing = {"spread": np.array(False), "loglik": np.array(0.0)}
    nothing |= {"score": np.zeros(q), "information": np.zeros((q, q))}
    finite = np.isfinite(sums.loglik) and np.isfinite(sums.information).all()
    if not finite:
        # Nothing is summed where a row's category has no probability.
        state.report(*AT_THE_START)
        return nothing
    state.report(*site.facts_at(B, sums, nothing if declined else None))
    C = M @ L
    return {
        "spread": np.array(True),
        "score": C.T @ sums.score.ravel(),
        "information": C.T @ sums.information.reshape(len(C), -1) @ C,
        "loglik": np.array(sums.loglik),
    }


@step(FAMILY, "start fit_alone sum_scores", takes=POINT, releases=SCORES)
def sum_scores(data: SiteData, state: State, shift: Floats, scale: Floats, beta: Floats) -> dict[str, Array]:
    """Sum score (q,), observed information (q, q) and log-likelihood over the rows at beta (q,).

    Parameters are for columns standardized over all sites. ``spread`` is false, and all else zero, if few
    rows have nearly all weight at these parameters, or a row's category has no probability.
    """
    site = categories_of(state)
    return scores_at(state, site, site.place(shift, scale, beta, site.request.proportional), True)


@step(FAMILY, "sum_scores finish", takes=POINT, releases=SCORES)
def sum_separate_scores(
    data: SiteData, state: State, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Sum the same for the model in which each threshold has its own coefficients, beta ((J - 1) p,)."""
    site = categories_of(state)
    return scores_at(state, site, site.place(shift, scale, beta, False), False)


@step(
    FAMILY,
    "sum_scores",
    takes={
        **POINT,
        **LEVERAGES,
        "meat": control("whether to sum products of scores of rows, of clusters, of sites"),
        "apart": control("whether to sum the score test of equal coefficients", 0),
    },
    releases={
        **cluster_releases(SUMS),
        "clusters": summed("number of clusters", 0, optional=True, behind=(*SUMS, ClusterProducts)),
        "apart": summed("score test of equal coefficients: the site's part, and its rank", optional=True),
    },
)
def finish(
    data: SiteData,
    state: State,
    shift: Floats,
    scale: Floats,
    beta: Floats,
    meat: Array,
    apart: Array,
    inverse: Floats | None = None,
    power: Array | None = None,
) -> dict[str, Array]:
    """Sum what the summary needs at the estimate; refused if a few rows have nearly all weight.

    On request it releases ``meat`` (q, q), outer products of the scores of rows; or what
    :func:`fedstat.models.horizontal.clusters.sum_corrected` does for clusters, with their number
    ``clusters``, or for the site, where `inverse` (q, q) is the inverse information of all sites and `power`
    that of one less a leverage. ``apart`` (2,) is the site's part of the score test of equal coefficients.
    """
    site = categories_of(state)
    check_lengths(data.name, meat=(meat, 3))
    B, L, M = site.place(shift, scale, beta, site.request.proportional)
    sums, C = site.sums(B), M @ L
    state.report(*site.facts_at(B, sums))
    arrays: dict[str, Array] = {}
    if meat[1:].any():
        whole = C.T @ sums.information.reshape(len(C), -1) @ C
        units = moved(M, translation(np.zeros_like(shift), np.ones_like(scale), shift, scale))
        request = LeverageRequest.of(data.name, whole, units, inverse, power)
    if meat[2]:
        arrays |= sum_corrected(state, request, (C.T @ sums.score.ravel())[None], lambda _: whole[None])
    elif meat[:2].any():
        state.report(*site.products_at(B))
        scores = np.concatenate([rows.row_scores(B) for rows in site.chunks()]) @ C
        if meat[0] and site.opened.question.counts_rows:
            # Squares of the scores of as many rows as the weight states.
            weight = np.concatenate([rows.weighted(np.ones(len(rows.y))) for rows in site.chunks()])
            arrays["meat"] = (scores / weight[:, None]).T @ scores
        elif meat[0]:
            arrays["meat"] = scores.T @ scores
    if meat[1]:
        names = list(site.request.clusters)
        frame = pd.concat([rows.frame[names] for rows, _ in site.opened.chunks()])
        code = np.asarray(frame.groupby(names, sort=True).ngroup(), dtype=np.int64)
        arrays["clusters"] = np.array(float(code.max() + 1))
        state.report(ClusterProducts(_shared_columns(site.opened, code), site.request.clusters))
        by_cluster = np.array([np.bincount(code, column) for column in scores.T]).T

        def information(part: slice) -> Floats:
            return C.T @ site.cluster_information(B, code, part) @ C

        arrays |= sum_corrected(state, request, by_cluster, information)
    if apart:
        own = M.T @ sums.score.ravel(), M.T @ sums.information.reshape(len(M), -1) @ M
        arrays["apart"] = np.array(quadratic_form(*own))
    return arrays


def _shared_columns(opened: OpenRows, code: Ints) -> Ints:
    """Count the clusters of two rows or more in which both of two columns are nonzero, (p, p)."""
    several = np.bincount(code) >= 2
    columns = np.concatenate([opened.in_units(X) for _, X in opened.chunks()]) != 0.0
    there = np.array([np.bincount(code, column) > 0.0 for column in columns.T])[:, several].astype(float)
    return np.asarray(there @ there.T, dtype=np.int64)


@step(
    FAMILY,
    "sum_scores",
    takes=POINT,
    releases={
        "first": summed("derivatives of the probabilities by the predictors", 2),
        "second": summed("second derivatives, times the columns", 4),
    },
)
def sum_effects(data: SiteData, state: State, shift: Floats, scale: Floats, beta: Floats) -> dict[str, Array]:
    """Sum the derivatives of the probabilities of all categories by the predictors.

    Released are ``first`` (J, J - 1), and ``second`` (J, J - 1, J - 1, p), for standardized columns.
    """
    site = categories_of(state)
    B, _, _ = site.place(shift, scale, beta, site.request.proportional)
    state.report(*site.facts_at(B))
    T = translation(site.opened.shift, site.opened.scale, shift, scale)
    first, second = zip(*(rows.effects(B) for rows in site.chunks()), strict=True)
    return {"first": np.sum(first, axis=0), "second": np.sum(second, axis=0) @ T}


@step(
    FAMILY,
    "sum_scores sum_effects",
    takes=POINT,
    releases={
        "effects": summed("changes of the probabilities by each variable", 2),
        "slopes": summed("their derivatives by the coefficients", 4),
    },
    request=ChangesRequest,
    requests=control("variables that change", common=True),
)
def sum_changes(
    data: SiteData, state: State, request: ChangesRequest, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Sum the changes of the probabilities of all categories by variables, through all terms.

    Released are ``effects`` (V, J), and ``slopes`` (V, J, J - 1, p), for standardized columns.
    """
    site = categories_of(state)
    B, _, _ = site.place(shift, scale, beta, site.request.proportional)
    sums = sum_changes_of(state, site.opened, request, B, CategoryMeans(site.request.link, B))
    T = translation(site.opened.shift, site.opened.scale, shift, scale)
    return {"effects": sums.effects, "slopes": sums.slopes[..., 1:] @ T}


@dataclass(frozen=True, slots=True, eq=False)
class CategoryMeans:
    """Probabilities of the categories at coefficients (J - 1, p) of the site's own columns."""

    link: str
    B: Floats
    groups: bool = False

    @property
    def point(self) -> tuple[bytes]:
        """What identifies the probabilities."""
        return (self.B.tobytes(),)

    def jet(self, rows: CompleteRows, X: Floats) -> MeanJet:
        """Return probabilities with two derivatives."""
        return CategoryRows(X, np.zeros(len(X), dtype=np.int64), self.link, rows.offset).jet(self.B)

    def count(self, rows: CompleteRows) -> Floats:
        """Return the weights of rows."""
        return np.ones(len(rows.y)) if rows.weight is None else rows.weight

    def block(self, rows: CompleteRows, X: Floats) -> CategoryBlock:
        """Return the rows as other sums have them."""
        return CategoryBlock(CategoryRows(X, rows.y.astype(np.int64), self.link, rows.offset, rows.weight))


@step(
    FAMILY,
    takes={"beta": aggregate("parameters in the units of the data")},
    releases={
        "bins": aggregate(
            "rows by category, and predicted rows, by bin of each probability",
            3,
            behind=(*OPEN_ROWS, ModelEvaluation),
        ),
        "confusion": aggregate(
            "rows by category and by predicted category", 2, behind=(*OPEN_ROWS, ModelEvaluation)
        ),
        "loglik": aggregate("log-likelihood", 0, behind=(*OPEN_ROWS, ModelEvaluation)),
        "least": control("fewest rows of a bin", 0),
    },
    request=CategoryRequest,
    requests=REQUEST,
)
def bin_counts(data: SiteData, state: State, request: CategoryRequest, beta: Floats) -> dict[str, Array]:
    """Compare the probabilities of each category with the rows, in public bins of the probability.

    `beta` (q,) is in the units of the data. Released are ``bins`` (J, J + 1, B): rows of each category, and
    the sum of the probability, by its bin; ``confusion`` (J, J); and the log-likelihood with probabilities of
    1e-15 or more. Bins of few rows, and predicted categories of few rows of a category, are counted with a
    neighbor. Where the owner allows one evaluation, so are bins that differ in few rows from others.
    """
    site = opened_categories(data, state, request)
    zeros, ones = np.zeros_like(site.opened.shift), np.ones_like(site.opened.scale)
    B, _, _ = site.place(zeros, ones, beta, request.proportional)
    parts = [(probabilities(rows.predictors(B), request.link), rows) for rows in site.chunks()]
    P, y = np.concatenate([P for P, _ in parts]), np.concatenate([rows.y for _, rows in parts])
    weight = np.concatenate([rows.weighted(np.ones(len(rows.y))) for _, rows in parts])
    J, edges = site.categories, bin_edges(LOGIT, 0.0, 1.0)
    with np.errstate(divide="ignore"):
        place = np.searchsorted(edges, np.log(P) - np.log1p(-P))
    divisions, sizes = [P.argmax(axis=1), *place.T], [J, *[len(edges) + 1] * J]
    if data.policy.evaluation == "any":  # the owner allows rows between the cuts of two divisions
        cells = [
            merge_small_bins(np.bincount(one, minlength=sizes[1]), data.min_count)[one] for one in place.T
        ]
        guess = divisions[0]
    else:
        guess, *cells = joint_bins(divisions, sizes, data.min_count)
    bins, confusion = np.zeros((J, J + 1, len(edges) + 1)), np.zeros((J, J))
    for j, cell in enumerate(cells):
        by_row = [*(weight * (y == k) for k in range(J)), weight * P[:, j]]
        bins[j] = [np.bincount(cell, values, bins.shape[2]) for values in by_row]
        own = guess[y == j]
        own = merge_small_bins(np.bincount(own, minlength=J), data.policy.min_level_count)[own]
        confusion[j] = np.bincount(own, weight[y == j], J)
    loglik = np.array(weight @ np.log(np.maximum(P[np.arange(len(y)), y], 1e-15)))
    state.report(ModelEvaluation(np.concatenate([bins.ravel(), confusion.ravel(), [float(loglik)]])))
    return {"bins": bins, "confusion": confusion, "loglik": loglik, "least": np.array(data.min_count)}


def joint_bins(places: Sequence[Ints], sizes: Sequence[int], least: int) -> list[Ints]:
    """Merge bins such that no combination of counts in several divisions is of few rows.

    Rows between a cut of one division and a cut of another are the difference of two sums of counts. So bins
    are large, and a division is cut only where, with all cuts before, no fewer than `least` rows are apart.

    Parameters
    ----------
    places : sequence of (n,) arrays of int
        Bin of each row, by division.
    sizes : sequence of int
        Number of bins.
    least : int

    Returns
    -------
    list of (n,) arrays of int
    """
    known, out = ReleasedGroups.none(len(places[0])), []
    large = max(least, min(len(places[0]) // MOST_BINS, LARGE_BINS * least)) if least > 1 else least
    for place, size in zip(places, sizes, strict=True):
        for fewest in (least, large):
            place = merge_small_bins(np.bincount(place, minlength=size), fewest)[place]
        bins, code = np.unique(place, return_inverse=True)
        cuts, joined = np.zeros(len(bins), dtype=np.int64), known.with_groups(np.zeros_like(code))
        for cut in range(1, len(bins)):
            trial = cuts.copy()
            trial[cut] = 1
            after = known.with_groups(np.cumsum(trial)[code])
            if not after.fewest_isolated(least):
                cuts, joined = trial, after
        # A joint bin is released at the fullest of its bins.
        known, kept, n = joined, np.cumsum(cuts), np.bincount(code)
        fullest = np.array([bins[kept == k][n[kept == k].argmax()] for k in range(kept[-1] + 1)])
        out.append(fullest[kept[code]])
    return out
