"""Newton's method for a likelihood of categories, from sums over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError, PolicyError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol, attempt
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.assumptions import NOT_REQUESTED, SINGULAR, Outcome, reason_of, score_outcome
from fedstat.inference.recession import name_columns, receding
from fedstat.kernels.categories import coefficient_map, moved
from fedstat.models.categories.steps import CategoryRequest, first_parameters
from fedstat.models.horizontal.clusters import ClusterChoice
from fedstat.models.horizontal.estimability import require_independent
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.models.horizontal.variable_changes import level_counts
from fedstat.models.margins import ChangesRequest
from fedstat.models.rows.newton import (
    LikelihoodNewton,
    LikelihoodSums,
    open_rows,
    site_fits,
)
from fedstat.models.rows.predictors import PredictorFit, own_predictor_fit, standardized_point, to_units
from fedstat.typing import Array, Bools, Floats

NO_STEP = (
    "no step increases the likelihood ({} evaluations) with weight on more than a few rows of every site. "
    "Transform columns with long tails, or leave out columns that separate the categories"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CategoryFit(PredictorFit):
    """Maximum of the likelihood.

    Parameters are thresholds and coefficients with a cumulative link, otherwise the coefficients of each
    category but the first. `counts` (2, J) are weights and rows of the categories.
    """

    request: CategoryRequest
    categories: Annotated[tuple[LevelValue, ...], "J"]
    counts: Annotated[Floats, "2 J"]

    @property
    def has_thresholds_to_compare(self) -> bool:
        """Whether there are coefficients that could differ by threshold."""
        return self.request.proportional and len(self.categories) > 2 and len(self.design.names) > 1

    @property
    def map(self) -> Floats:
        """Matrix from parameters to the coefficients of all predictors."""
        return coefficient_map(len(self.categories), len(self.design.names), self.request.proportional)


class CategoryNewton(LikelihoodNewton[LikelihoodSums]):
    """Newton's method with halved steps, from the shares of the categories."""

    def run(
        self,
        cov_type: str,
        local: bool,
        clusters: ClusterChoice | None = None,
        check_assumptions: bool = True,
    ) -> FitProtocol[tuple[CategoryFit, Outcomes]]:
        """Open the rows, maximize, and request what the summary needs, and the test of the assumption."""
        fit = yield from self.estimate(cov_type, local, clusters)
        if not fit.has_thresholds_to_compare:
            return fit, {}
        if not check_assumptions:
            return fit, {PROPORTIONAL: NOT_REQUESTED}
        point = Point(fit.design, fit.map, [str(level) for level in fit.categories])
        found = yield from attempt(separate_scores_at(self.session, fit, point, fit.gamma))
        if isinstance(found, PolicyError):
            return fit, {PROPORTIONAL: reason_of(found)}
        return fit, {PROPORTIONAL: proportional_outcome(fit, found)}

    def estimate(
        self, cov_type: str, local: bool, clusters: ClusterChoice | None
    ) -> FitProtocol[CategoryFit]:
        """Open the rows, maximize, and request what the estimates of the summary need."""
        session = self.session
        # 1. Open the rows and count the categories; sites fit their own rows.
        groups = ((clusters.groups,),) if clusters is not None and cov_type == "cluster" else ()
        design, started, alone, shared = yield from open_rows(session, to_json(self.request), local, groups)
        categories, counts = session.agreement.question.categories, add(started, "response")
        if empty := [str(level) for level, n in zip(categories, counts[0], strict=True) if n <= 0.0]:
            raise EstimationError(
                f"no complete row of any site has the category {', '.join(map(repr, empty))} of the "
                "response. Leave it out of the levels, or merge it with another"
            )
        M = coefficient_map(len(categories), len(design.names), self.request.proportional)
        point = Point(design, M, [str(level) for level in categories])
        gamma = first_parameters(counts[0], M, self.request.link)
        # 2. Without covariates: known from the shares, unless rows have offsets.
        constants = point.constants
        total = yield from self.evaluate(point.arrays(gamma))
        if total is None:
            raise EstimationError(NO_STEP.format(0))
        require_independent(
            total.information,
            point.names,
            terms=point.of_columns(design.term_names),
            columns=point.of_columns(design.names),
        )
        if session.agreement.question.offsets:
            gamma, total, _, _ = yield from self.maximize(point, gamma, total, constants)
        null = total.loglik
        # 3. Newton's steps, halved until the likelihood increases.
        self.trace.clear()
        gamma, total, _, converged = yield from self.maximize(point, gamma, total, np.ones_like(constants))
        # 4. Products of scores, and the comparison of the sites.
        meat = [cov_type in ("HC0", "HC1"), cov_type == "cluster", cov_type == "sites"]
        ended = yield from self.finish(point.arrays(gamma), meat, clusters, total.information)
        fit = CategoryFit(
            gamma=gamma,
            total=total,
            design=design,
            request=self.request,
            categories=categories,
            counts=counts,
            null=null,
            meat=None,
            clustering=None,
            apart=add(ended, "apart") if session.masked else None,
            trace=np.array(self.trace),
            converged=converged,
            local=(),
            shared=shared,
        )
        return self.completed(fit, cov_type, clusters, ended, alone)

    def completed(
        self,
        fit: CategoryFit,
        cov_type: str,
        choice: ClusterChoice | None,
        ended: Sequence[Reply],
        alone: Sequence[Reply],
    ) -> CategoryFit:
        """Add the covariance of scores, with its correction for few rows or clusters, and the own fits."""
        forward, read = (
            np.asarray(np.linalg.inv(fit.back)),
            partial(own_predictor_fit, fit.map, fit.design.intercept),
        )
        local = site_fits(self.session, fit.design.n, alone, read, fit.total.by_site, forward)
        if cov_type == "nonrobust":
            return replace(fit, local=local)
        n, q = float(fit.counts[0].sum()), len(fit.gamma)
        if choice is None:
            factor = {"HC0": 1.0, "HC1": n / (n - q)}[cov_type]
            return replace(fit, meat=factor * add(ended, "meat"), local=local)
        meat, clustering = choice.added(ended, len(ended) if cov_type == "sites" else None)
        G = clustering.count
        if G < 2:
            raise EstimationError("cov_type: 'cluster' needs two clusters or more, and there is one")
        factor = G / (G - 1.0) * (n - 1.0) / (n - q) if choice.correction == "CR1" else 1.0
        return replace(fit, meat=factor * meat, clustering=clustering, local=local)

    def maximize(
        self, point: Point, gamma: Floats, total: LikelihoodSums, free: Bools
    ) -> FitProtocol[tuple[Floats, LikelihoodSums, Floats, bool]]:
        """Take steps in the `free` parameters until they are small; see :meth:`ascend`."""

        def allowed(trial: Floats) -> bool:
            # Thresholds ascend, or a category has no probability.
            return not self.request.proportional or bool((np.diff(trial[: point.width]) > 0.0).all())

        return (
            yield from self.ascend(
                point.arrays,
                gamma,
                total,
                n=int(point.design.n.sum()),
                at_infinity=partial(separated, point=point),
                stuck=NO_STEP,
                allowed=allowed,
                free=free,
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """What parameters are for: standardized columns, and the names of the parameters."""

    design: RowsDesign
    M: Floats
    categories: Sequence[str]

    @property
    def width(self) -> int:
        """Number of predictors."""
        return len(self.categories) - 1

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return parameter_names(self.categories, self.design.names, self.M.shape[1] < len(self.M))

    @property
    def constants(self) -> Bools:
        """Which parameters are thresholds or intercepts."""
        own = self.M.reshape(-1, len(self.design.names), self.M.shape[1])[:, 1:]
        return np.asarray(np.abs(own).sum(axis=(0, 1)) == 0.0)

    def of_columns(self, texts: Sequence[str]) -> list[str]:
        """Repeat texts of the columns for every parameter."""
        if self.M.shape[1] < len(self.M):
            return ["" for _ in range(self.width)] + list(texts[1:])
        return [text for _ in range(self.width) for text in texts]

    @property
    def term_names(self) -> list[str]:
        """Names of the terms of the parameters."""
        return parameter_names(self.categories, self.design.term_names, self.M.shape[1] < len(self.M))

    def arrays(self, gamma: Floats) -> dict[str, Array]:
        """Return the arrays that name parameters."""
        return standardized_point(self.design, gamma)


def parameter_names(categories: Sequence[str], columns: Sequence[str], proportional: bool) -> list[str]:
    """Thresholds such as ``low/mid`` and columns, or columns by category such as ``mid: age``."""
    if proportional:
        return [*(f"{below}/{above}" for below, above in pairwise(categories)), *columns[1:]]
    return [f"{level}: {column}" for level in categories[1:] for column in columns]


def separated(step: Floats, before: Floats, now: Floats, complete: bool, point: Point) -> EstimationError:
    """Make the error for a likelihood that increases without end, with the parameters that still move."""
    slopes = ~point.constants
    back = moved(point.M, to_units(point.design))
    culprits, _, reference = receding(step, before, now, back, slopes, complete=complete)
    listed = name_columns(culprits, reference, point.names, point.term_names)
    return EstimationError(
        f"the categories are separated: the estimates of {listed} would be infinite, as where all rows of a "
        "level have one category, or a column divides the categories. Leave out the term, or merge "
        "categories or levels."
    )


def open_at(session: RowsSession, fit: CategoryFit) -> FitProtocol[Point]:
    """Open the rows of a fit again, and evaluate its estimate."""
    K = len(session.sites)
    replies = yield session.opening() + session.request_all("start", {}, to_json(fit.request))
    point = Point(session.opened(replies[: 2 * K]), fit.map, [str(level) for level in fit.categories])
    yield session.request_all("sum_scores", point.arrays(at_point(point, fit)))
    return point


def at_point(point: Point, fit: CategoryFit) -> Floats:
    """Parameters of a fit for the standardization of a point."""
    return np.asarray(np.linalg.solve(moved(point.M, to_units(point.design)), fit.params))


PROPORTIONAL = "proportional_odds"
Outcomes: TypeAlias = Mapping[str, Outcome | str]
"""Outcome of each test by the kind of its note, or the reason why it was not made."""
SeparateScores: TypeAlias = tuple[Floats, Floats, bool]
"""Score and information of coefficients of each threshold, and whether all sites could sum them."""


def separate_scores(session: RowsSession, fit: CategoryFit) -> FitProtocol[SeparateScores]:
    """Open the rows of a fit again, and request the sums of :func:`separate_scores_at`."""
    point = yield from open_at(session, fit)
    return (yield from separate_scores_at(session, fit, point, at_point(point, fit)))


def separate_scores_at(
    session: RowsSession, fit: CategoryFit, point: Point, gamma: Floats
) -> FitProtocol[SeparateScores]:
    """Request score and information of coefficients that differ by threshold, at the common ones."""
    beta = fit.map @ gamma
    replies = yield session.request_all("sum_separate_scores", point.arrays(beta))
    finite = int(add(replies, "spread")) == len(replies)
    return add(replies, "score"), add(replies, "information"), finite


def separate_parameters(fit: CategoryFit, columns: Sequence[int]) -> Floats:
    """Matrix from the parameters, and those of some columns at all thresholds but the first, to all."""
    width, p = len(fit.categories) - 1, len(fit.design.names)
    own = np.zeros((width, p, width, p))
    for j in range(1, width):
        own[j, columns, j, columns] = 1.0
    more = own.reshape(width * p, -1)
    return np.hstack([fit.map, more[:, np.abs(more).any(axis=0)]])


def proportional_outcome(fit: CategoryFit, found: SeparateScores) -> Outcome | str:
    """Test that coefficients are the same at all thresholds (Peterson and Harrell 1990)."""
    score, information, finite = found
    if not finite:
        return "a category of a row has no probability at the estimate"
    M, q = separate_parameters(fit, range(1, len(fit.design.names))), fit.map.shape[1]
    U, V = M.T @ score, M.T @ information @ M
    try:
        left = V[q:, q:] - V[q:, :q] @ np.linalg.solve(V[:q, :q], V[:q, q:])
    except np.linalg.LinAlgError:
        return SINGULAR
    # The columns of M are ordered by threshold, and by column of the design within each.
    terms = fit.design.term_names[1:] * (len(fit.categories) - 2)
    return score_outcome(U[q:] - V[q:, :q] @ np.linalg.solve(V[:q, :q], U[:q]), left, terms)


class CategoryEffects(NamedTuple):
    """Averages of derivatives of the probabilities, and sums of changes by variables, in units of the data.

    `first` and `second` are averages of first and second derivatives; `effects` (V, J), their `slopes` (V, J,
    J - 1, p) and the `counts` (V,) of the rows of a level are sums. Those that were not requested are empty.
    """

    first: Floats
    second: Floats
    effects: Floats
    slopes: Floats
    counts: Floats


def sum_effects(
    session: RowsSession, fit: CategoryFit, requested: ChangesRequest, single: bool = True
) -> FitProtocol[CategoryEffects]:
    """Request averages for the effects of single columns, and sums of changes by variables."""
    point = yield from open_at(session, fit)
    arrays, n = point.arrays(at_point(point, fit)), float(fit.counts[0].sum())
    back = np.linalg.inv(to_units(point.design))
    first = second = np.zeros(0)
    if single:
        replies = yield session.request_all("sum_effects", arrays)
        first, second = add(replies, "first") / n, add(replies, "second") @ back / n
    J, p = len(fit.categories), len(back)
    effects, slopes, counts = np.zeros((0, J)), np.zeros((0, J, J - 1, p)), np.zeros(0)
    if requested.changes:
        replies = yield session.request_all("sum_changes", arrays, to_json(requested))
        effects, slopes = add(replies, "effects"), add(replies, "slopes") @ back
        counts = level_counts(replies, requested)
    return CategoryEffects(first, second, effects, slopes, counts)


def likelihoods_without(
    newton: CategoryNewton, fit: CategoryFit, groups: Sequence[Sequence[int]]
) -> FitProtocol[list[float]]:
    """Maximize the likelihood without each group of parameters, from the estimate."""
    point = yield from open_at(newton.session, fit)
    found = []
    for group in groups:
        free = np.ones(len(fit.gamma), dtype=bool)
        free[list(group)] = False
        newton.trace.clear()
        gamma = first_parameters(fit.counts[0], fit.map, fit.request.link)
        total = yield from newton.evaluate(point.arrays(gamma))
        assert total is not None
        _, total, _, converged = yield from newton.maximize(point, gamma, total, free)
        found.append(total.loglik if converged else float("nan"))
    return found
