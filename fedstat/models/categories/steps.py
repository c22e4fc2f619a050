"""Steps of a site for a response of categories: sums over its rows, its own fit, and counts in bins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, rows_of, translation
from fedstat.federation.design.site_rows import CompleteRows
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, control
from fedstat.inference.evaluation import bin_edges, merge_small_bins
from fedstat.kernels.categories import (
    BASELINE,
    LINKS,
    CategoryRows,
    CategorySums,
    coefficient_map,
    constant_predictors,
    log_terms,
    probabilities,
)
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.horizontal.rows import FLAT, NO_MEANS, summed
from fedstat.models.horizontal.variable_changes import VariableVectors, sum_changes_of
from fedstat.models.margins import ChangesRequest, MeanJet
from fedstat.models.rows.objective import STANDARDIZED, PredictorObjective, SiteSums
from fedstat.models.rows.steps import enter_steps, releases_of, rows_in, scores_at
from fedstat.typing import Array, Floats, Ints

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


REQUEST = control("link, and column of clusters", common=True)


def first_parameters(counts: Floats, M: Floats, link: str) -> Floats:
    """Parameters (q,) with which all rows have the probabilities of the counts (J,)."""
    width = len(counts) - 1
    B = np.zeros((width, len(M) // width))
    # A site without rows of a category has no own fit, and this start is not used.
    with np.errstate(divide="ignore", invalid="ignore"):
        B[:, 0] = constant_predictors(counts, link)
        return np.asarray(M.T @ B.ravel())


@dataclass(frozen=True, slots=True, eq=False)
class SiteCategories(PredictorObjective):
    """One fit's rows; its predictors are those of all categories but one.

    Without `proportional` each threshold has its own coefficients.
    """

    family = FAMILY
    request_type = CategoryRequest
    requests = REQUEST
    starts: ClassVar = {"response": summed("weights by category, and rows", 2, behind=OPEN_ROWS)}
    meat = control("whether to sum products of scores of rows, of clusters, of sites")
    meats = 3
    unbounded = SEPARATED

    request: CategoryRequest
    proportional: bool

    @classmethod
    def begin(
        cls, data: SiteData, state: State, request: CategoryRequest
    ) -> tuple[SiteCategories, dict[str, Array]]:
        """Count the categories: ``response`` (2, J), sums of weights, and rows."""
        site = opened_categories(data, state, request)
        if request.proportional:
            state.report(*site.products_by_category())
        return site, {"response": site.counts}

    @property
    def variant(self) -> str:
        """Link."""
        return self.request.link

    @property
    def categories(self) -> int:
        """Number of categories."""
        return len(self.opened.question.categories)

    @property
    def counts(self) -> Floats:
        """Sums of weights by category, and rows, (2, J)."""
        found = np.zeros((2, self.categories))
        for rows in self.chunks():
            found += [np.bincount(rows.y, one, self.categories) for one in (rows.weight, None)]
        return found

    def chunks(self) -> Iterator[CategoryRows]:
        """Yield the rows in the form of the kernels."""
        for rows, X in self.opened.chunks():
            yield CategoryRows(X, rows.y.astype(np.int64), self.request.link, rows.offset, rows.weight)

    @property
    def matrices(self) -> Floats:
        """Matrices from parameters to the coefficients of each predictor, see :func:`coefficient_map`."""
        p = len(self.opened.scale)
        M = coefficient_map(self.categories, p, self.proportional)
        return M.reshape(-1, p, M.shape[1])

    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns, log-probabilities and their derivatives by the predictors."""
        B = self.coefficients(own)
        for rows in self.chunks():
            logp, g, H = map(rows.weighted, log_terms(rows.predictors(B), rows.y, rows.link))
            yield rows.X, logp, g, H

    def sums(self, own: Floats) -> SiteSums:
        """Sum over the rows."""
        B, q = self.coefficients(own), len(own)
        M = self.matrices.reshape(-1, q)
        first, *rest = (rows.sums(B) for rows in self.chunks())
        for more in rest:
            first = CategorySums(
                first.loglik + more.loglik,
                first.score + more.score,
                first.information + more.information,
                first.spread + more.spread,
                (first.flat[0] + more.flat[0], first.flat[1] + more.flat[1]),
            )
        errors, mass = first.flat
        score, information = first.score.ravel(), first.information.reshape(len(M), -1)
        return SiteSums(
            first.loglik, M.T @ score, M.T @ information @ M, first.spread, lambda: errors < FLAT * mass
        )

    def key_of(self, own: Floats, effects: bool = False) -> tuple[bytes, bool]:
        """Return a point: coefficients, and whether the sums are those of effects."""
        return self.coefficients(own).tobytes(), effects

    def weights(self, own: Floats, effects: bool = False) -> Floats:
        """Return the absolute weights of rows in sums at a point."""
        point = self.key_of(own, effects)
        return np.concatenate([np.abs(part.vectors((point,))) for part in self.blocks()]).T

    def blocks(self) -> Iterator[CategoryBlock]:
        """Yield the rows for the check of what sums at several coefficients single out."""
        return (CategoryBlock(block) for rows in self.chunks() for block in rows.blocks())

    def products_by_category(self) -> Iterator[facts.SummedProducts]:
        """Facts on the products of columns over the rows of each category.

        The observed information with a cumulative link depends on the category: several of these matrices at
        different thresholds reveal the products of two columns over the rows of one category.
        """
        y = np.concatenate([rows.y for rows in self.chunks()])
        for place, level in enumerate(self.opened.question.categories):
            fact = self.opened.products_with((y == place).astype(np.float64))
            yield replace(fact, names=[f"{name} (of {level})" for name in fact.names], rows=None)

    @property
    def first(self) -> Floats:
        """Parameters with which all rows have the shares of the categories."""
        return first_parameters(self.counts[0], np.concatenate(self.matrices), self.request.link)

    def lacks(self) -> str:
        """Require rows of each category."""
        return ABSENT if (self.counts[0] == 0.0).any() else ""


enter_steps(SiteCategories)


@dataclass(frozen=True, slots=True, eq=False)
class CategoryBlock(facts.RowBlock):
    """A part of the rows; a point is the bytes of coefficients, and whether it is of sums for effects."""

    rows: CategoryRows

    @property
    def columns(self) -> Floats:
        """Columns of the design, a constant among them."""
        return self.rows.X

    @property
    def levels(self) -> Floats:
        """Category of the response."""
        return self.rows.y[:, None].astype(np.float64)

    def terms(self, point: tuple[bytes, Any]) -> list[facts.RowTerms]:
        """Terms of the sums at a point: products of two columns for second derivatives only."""
        X, weights = self.columns, self.vectors((point,))
        single = weights.shape[1] if point[1] else len(point[0]) // (8 * X.shape[1])
        return [facts.alone(X, weights[:, :single]), facts.RowTerms(X, weights[:, single:], X)]

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

    def every(self, first: int, step: int) -> CategoryBlock:
        """Return every n-th row, from the first on."""
        return CategoryBlock(self.rows.part(slice(first, None, step)))


def categories_of(state: State) -> SiteCategories:
    """Return this fit's rows; MessageError if the fit was not started here."""
    return rows_in(state, SiteCategories)


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
    return SiteCategories(opened, request, state.entities, request.proportional)


@step(FAMILY, "sum_scores finish", takes=STANDARDIZED, releases=releases_of(SiteCategories))
def sum_separate_scores(
    data: SiteData, state: State, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Sum the same for the model in which each threshold has its own coefficients, beta ((J - 1) p,)."""
    site = replace(categories_of(state), proportional=False)
    return scores_at(state, site, site.place(shift, scale, beta), declined=False)


@step(
    FAMILY,
    "sum_scores",
    takes=STANDARDIZED,
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
    own = site.place(shift, scale, beta).own
    B = site.coefficients(own)
    state.report(
        NO_MEANS,
        facts.WorkingWeights(lambda: site.weights(own, True)),
        facts.ScoreAndInformation(
            site.opened, site.n, site.key_of(own, True), site.blocks, among=site.opened.places
        ),
    )
    T = translation(site.opened.shift, site.opened.scale, shift, scale)
    first, second = zip(*(rows.effects(B) for rows in site.chunks()), strict=True)
    return {"first": np.sum(first, axis=0), "second": np.sum(second, axis=0) @ T}


@step(
    FAMILY,
    "sum_scores sum_effects",
    takes=STANDARDIZED,
    releases={
        "effects": summed("changes of the probabilities by each variable", 2),
        "slopes": summed("their derivatives by the coefficients", 4),
        "counts": summed("weights of the rows of a level", optional=True),
    },
    request=ChangesRequest,
    requests=control("variables that change", common=True),
)
def sum_changes(
    data: SiteData, state: State, request: ChangesRequest, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Sum the changes of the probabilities of all categories by variables, through all terms.

    Released are ``effects`` (V, J), ``slopes`` (V, J, J - 1, p), for standardized columns, and ``counts``.
    """
    site = categories_of(state)
    B = site.coefficients(site.place(shift, scale, beta).own)
    sums = sum_changes_of(state, site.opened, request, B, CategoryMeans(site.request.link, B))
    T = translation(site.opened.shift, site.opened.scale, shift, scale)
    return {"effects": sums.effects, "slopes": sums.slopes[..., 1:] @ T, **sums.level_counts}


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
            behind=(*OPEN_ROWS, facts.ModelEvaluation),
        ),
        "confusion": aggregate(
            "rows by category and by predicted category", 2, behind=(*OPEN_ROWS, facts.ModelEvaluation)
        ),
        "loglik": aggregate("log-likelihood", 0, behind=(*OPEN_ROWS, facts.ModelEvaluation)),
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
    B = site.coefficients(site.place(zeros, ones, beta).own)
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
    state.report(facts.ModelEvaluation(np.concatenate([bins.ravel(), confusion.ravel(), [float(loglik)]])))
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
    known, out = ReleasedSums.none(len(places[0])), []
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
            if not after.isolates(least):
                cuts, joined = trial, after
        # A joint bin is released at the fullest of its bins.
        known, kept, n = joined, np.cumsum(cuts), np.bincount(code)
        fullest = np.array([bins[kept == k][n[kept == k].argmax()] for k in range(kept[-1] + 1)])
        out.append(fullest[kept[code]])
    return out
