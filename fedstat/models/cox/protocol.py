"""Newton's method for a partial likelihood that is the sum of the sites' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, TypeAlias

import numpy as np
from scipy import stats

from fedstat.codec import to_json
from fedstat.errors import AliasedColumnsError, EstimationError, PolicyError, Remedy
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol, attempt
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.assumptions import NOT_REQUESTED, Outcome, reason_of, score_outcome
from fedstat.inference.heterogeneity import MaskedSiteSums, SiteFit
from fedstat.inference.recession import LARGE_STEP, name_columns, receding
from fedstat.models.cox.common_baseline import (
    POINTS,
    POINTS_WITHOUT_START,
    CommonFit,
    CommonNewton,
    IntervalChecks,
    agree_strata,
    interval_checks,
)
from fedstat.models.cox.steps import TRANSFORMS, CoxRequest
from fedstat.models.horizontal.clusters import ClusterChoice, Clustering, SharedLabels
from fedstat.models.horizontal.estimability import require_independent
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.models.rows.estimated_weights import STACKED, stacked_sums
from fedstat.models.rows.newton import (
    LikelihoodNewton,
    LikelihoodSums,
    OwnEstimate,
    newton_step,
    open_rows,
    site_fits,
)
from fedstat.typing import Array, Floats, Matrix, Vector

WEIGHTED = "it takes the information as that of a likelihood, which weighted rows do not have"
"""Why there is no score test with estimated weights."""
LEAST_SHARE = 1e-12
"""Share of the largest information, of standardized columns, below which a column has none."""
NO_STEP = (
    "no step increases the partial likelihood ({} evaluations) with weight on more than a few rows of every "
    "site. Transform columns with long tails, or leave out columns that separate the rows with events from "
    "the others"
)


@dataclass(frozen=True, slots=True, eq=False)
class CoxFit:
    """Maximum of the partial likelihood; coefficients and sums are for standardized columns.

    `design` has p columns and no intercept, `scale` (p,) are their standard deviations over all sites.
    `null` is the log-likelihood at zero, `score_test` the statistic there. `pairs` and `squares` are those
    of :func:`fedstat.kernels.partial_likelihood.concordance`; `trace` has log-likelihood, length of the step
    in standard errors, and its largest change of a coefficient, by evaluation. `meat` is the sum of outer
    products of the scores of rows, or of the clusters that `clustering` describes, `spread` (A, 4) has
    estimated weights by arm. With one baseline hazard
    for all sites, `common` is the fit, and all else is that with one for each site.
    """

    gamma: Vector
    total: LikelihoodSums
    design: RowsDesign
    scale: Vector
    request: CoxRequest
    null: float
    score_test: float
    weights: float
    weighted_events: float
    events: int
    pairs: Annotated[Floats, "4"]
    squares: Annotated[Floats, "3"]
    meat: Matrix | None
    clustering: Clustering | None
    spread: Annotated[Floats, "A 4"] | None
    apart: Annotated[Floats, "2"] | None
    trace: Annotated[Floats, "E 3"]
    converged: bool
    local: Annotated[tuple[SiteFit, ...], "K"]
    common: CommonFit | None = None
    shared: tuple[SharedLabels, ...] = ()

    @property
    def masked(self) -> bool:
        """Whether the coordinator saw only the sums over all sites."""
        return self.total.by_site is None

    @property
    def params(self) -> Floats:
        """Coefficients in the units of the data."""
        return (self.common or self).gamma / self.scale

    @property
    def information(self) -> Floats:
        """Information of the fit, for standardized columns."""
        return self.common.information if self.common else self.total.information

    @property
    def loglik(self) -> float:
        """Partial log-likelihood of the fit."""
        return self.common.loglik if self.common else self.total.loglik

    @property
    def naive(self) -> Floats:
        """Inverse information in the units of the data."""
        return np.asarray(np.linalg.inv(self.information) / np.outer(self.scale, self.scale))

    @property
    def cov(self) -> Floats:
        """Covariance: the inverse information, or the sandwich of Lin and Wei (1989)."""
        meat = (self.common or self).meat
        if meat is None:
            return self.naive
        bread = np.linalg.inv(self.information)
        return np.asarray(bread @ meat @ bread / np.outer(self.scale, self.scale))

    @property
    def masked_parts(self) -> MaskedSiteSums | None:
        """Comparison of the sites if sums are masked, in the units of the data."""
        return self.total.masked_parts(np.diag(self.scale), self.apart)


class CoxNewton(LikelihoodNewton[LikelihoodSums]):
    """Newton's method with halved steps, from zero."""

    def run(
        self,
        cov_type: str,
        local: bool,
        edges: Floats | None = None,
        site_column: str = "",
        clusters: ClusterChoice | None = None,
        check_assumptions: bool = True,
    ) -> FitProtocol[tuple[CoxFit, Outcomes]]:
        """Open the rows, maximize, and request what the summary needs, and the tests of assumptions.

        With `edges` (J,) of intervals the sites have one baseline hazard. The estimate with a baseline for
        each site is then the start, from which few coefficient vectors are enough.
        """
        fit = yield from self.estimate(cov_type, local, edges, site_column, clusters)
        weighs = bool(self.session.agreement.question.propensities)
        if weighs or not check_assumptions:
            return fit, dict.fromkeys(tested(fit), WEIGHTED if weighs else NOT_REQUESTED)
        return fit, (yield from self.outcomes(fit))

    def outcomes(self, fit: CoxFit) -> FitProtocol[Outcomes]:
        """Request the tests of the assumptions in one round, without which the fit stands as well."""
        if fit.common is None:
            scores = time_scores_at(self.session, fit, self.point(fit.scale, fit.gamma), TRANSFORM)
            found = yield from attempt(scores)
            if isinstance(found, PolicyError):
                return dict.fromkeys(tested(fit), reason_of(found))
            return {PROPORTIONAL: time_outcome(fit, found)}
        checks = yield from attempt(interval_checks(self.session, fit.common, TRANSFORMS[TRANSFORM]))
        if isinstance(checks, PolicyError):
            return dict.fromkeys(tested(fit), reason_of(checks))
        found = checks.score, checks.cross, checks.square
        outcomes = {PROPORTIONAL: time_outcome(fit, found), ONE_BASELINE: baseline_outcome(checks)}
        return {kind: outcomes[kind] for kind in tested(fit)}

    def estimate(
        self,
        cov_type: str,
        local: bool,
        edges: Floats | None,
        site_column: str,
        clusters: ClusterChoice | None,
    ) -> FitProtocol[CoxFit]:
        """Open the rows, maximize, and request what the estimates of the summary need."""
        session = self.session
        levels: tuple[tuple[LevelValue, ...], ...] = ()
        if edges is not None:
            levels = yield from agree_strata(session, self.request.strata, site_column)
        # 1. Open the rows and sort them into risk sets; sites fit their own rows.
        groups = (self.request.clusters,) if self.request.clusters else ()
        opened, started, alone, shared = yield from open_rows(session, to_json(self.request), local, groups)
        design = covariates(opened)
        weights, weighted_events, events = add(started, "response").tolist()
        if events < 1:
            raise EstimationError("there are no events at any site: there is nothing to fit")
        scale, names = design.spread, design.names
        # 2. At zero: the null likelihood, the score test, and the rank of the columns.
        gamma = np.zeros(len(names))
        total = yield from self.evaluate(self.point(scale, gamma))
        assert total is not None
        points = POINTS
        try:
            require_independent(total.information, names, terms=design.term_names)
        except AliasedColumnsError:
            raise
        except EstimationError:
            if edges is None:
                require_varying(total.information, names)
                raise
            # A column that is constant at every site has an effect only with a common baseline.
            points = POINTS_WITHOUT_START
        null, at_zero = total.loglik, total
        # 3. Newton's steps, halved until the likelihood increases.
        gamma, total, _, converged = yield from self.ascend(
            partial(self.point, scale),
            gamma,
            total,
            n=int(design.n.sum()),
            at_infinity=partial(monotone, design=design),
            stuck=NO_STEP,
        )
        # 4. Concordance, residual products, and the comparison of the sites.
        robust = edges is None and cov_type not in ("nonrobust", STACKED)
        own = clusters if edges is None else None
        ended = yield from self.finish(
            self.point(scale, gamma), [robust, own is not None], own, total.information
        )
        score, meat, clustering, spread = at_zero.score, None, None, None
        if own is not None:
            meat, clustering = own.added(ended)
        elif robust:
            meat = add(ended, "meat")
        elif cov_type == STACKED:
            stacked = yield from stacked_sums(session, self.point(scale, gamma))
            meat, spread = stacked.meat, stacked.spread
        fit = CoxFit(
            gamma=gamma,
            total=total,
            design=design,
            scale=scale,
            request=self.request,
            null=null,
            score_test=float(score @ newton_step(score, at_zero.information)),
            weights=weights,
            weighted_events=weighted_events,
            events=round(weighted_events if session.agreement.question.counts_rows else events),
            pairs=add(ended, "pairs"),
            squares=add(ended, "squares"),
            meat=meat,
            clustering=clustering,
            spread=spread,
            apart=add(ended, "apart") if "apart" in ended[0].arrays else None,
            trace=np.array(self.trace),
            converged=converged,
            local=site_fits(session, design.n, alone, own_fit, total.by_site, np.diag(scale)),
            shared=shared,
        )
        if edges is None:
            return fit
        # 5. Newton's steps with one baseline hazard.
        newton = CommonNewton(session, self.request, edges, levels, scale, design.mean)
        common = yield from newton.run(gamma, points, cov_type, clusters)
        require_independent(common.information, names, terms=design.term_names)
        if not np.isfinite(common.gamma).all() or (
            common.converged and np.abs(common.gamma - common.at.gamma).max() > LARGE_STEP
        ):
            # Sums of two points are not at hand: the step alone decides which columns are named.
            raise monotone(
                common.gamma - common.at.gamma, common.information, common.information, False, design
            )
        return replace(fit, common=common, converged=common.converged)

    def point(self, scale: Floats, gamma: Floats) -> dict[str, Array]:
        """Return the arrays that name a point."""
        return {"scale": scale, "beta": gamma}


def require_varying(information: Floats, names: Sequence[str]) -> None:
    """Require columns that vary within a site and stratum; an EstimationError names the others."""
    largest = float(np.diag(information).max(initial=0.0))
    constant = [
        repr(n) for n, d in zip(names, np.diag(information), strict=True) if d <= LEAST_SHARE * largest
    ]
    if constant:
        verb = "is" if len(constant) == 1 else "are"
        raise EstimationError(
            f"{', '.join(constant)} {verb} constant within every site (and stratum): the sites' baselines "
            "absorb it",
            remedy=Remedy(
                "fit(..., baseline='common', grid=3, until=60)",
                "With fit(baseline='common', grid=..., until=...) it is estimated; otherwise leave it out",
            ),
        )


def covariates(design: RowsDesign) -> RowsDesign:
    """Return the design without the intercept, by which its factors were coded."""
    return replace(
        design,
        names=design.names[1:],
        term_names=design.term_names[1:],
        intercept=False,
        mean=design.mean[1:],
        spread=design.spread[1:],
    )


def own_fit(site: int, reply: Reply) -> OwnEstimate:
    """Return coefficients and covariance of a site's own fit in the units of the data."""
    information, s = reply.arrays["information"], reply.arrays["deviations"]
    known = np.diag(information) > 0.0
    inside = np.ix_(known, known)
    beta, cov = np.full(len(s), np.nan), np.full((len(s), len(s)), np.nan)
    beta[known] = reply.arrays["beta"][known] / s[known]
    cov[inside] = np.linalg.inv(information[inside]) / np.outer(s[known], s[known])
    return beta, cov, None


def monotone(
    step: Floats, before: Floats, now: Floats, complete: bool, design: RowsDesign
) -> EstimationError:
    """Make the error for a likelihood that increases without end, with the columns that still move."""
    slopes = np.ones(len(step), dtype=bool)
    culprits, _, _ = receding(step, before, now, np.diag(1.0 / design.spread), slopes, complete=complete)
    listed = name_columns(culprits, False, design.names, design.term_names)
    return EstimationError(
        f"monotone likelihood: at every event time {listed} is at the end of its range among the rows at "
        "risk, as where a level has no events. The estimate would be infinite. Leave out the term, or merge "
        "its level with another."
    )


# ----------------------------------------------------------------------------------------------------
# Tests of the assumptions, with the fit and after it.

PROPORTIONAL, ONE_BASELINE = "proportional_hazards", "one_baseline"
TRANSFORM = "log"
"""Function of time of the test that runs with the fit."""
LEAST_DF = 0.5
"""Degrees of freedom below which the coefficients leave no difference between the sites to be tested."""
Outcomes: TypeAlias = Mapping[str, Outcome | str]
"""Outcome of each test by the kind of its note, or the reason why it was not made."""
TimeScores: TypeAlias = tuple[Floats, Floats, Floats]


def tested(fit: CoxFit) -> tuple[str, ...]:
    """Kinds of the tests that a fit makes."""
    return (PROPORTIONAL,) if fit.common is None or len(fit.local) < 2 else (PROPORTIONAL, ONE_BASELINE)


def time_information(fit: CoxFit, found: TimeScores) -> Floats:
    """Covariance of the score of coefficients that vary with time, those of the fit being estimated."""
    _, cross, square = found
    return np.asarray(square - cross @ np.linalg.solve(fit.information, cross.T))


def time_outcome(fit: CoxFit, found: TimeScores) -> Outcome | str:
    """Test that no coefficient changes with time (Grambsch and Therneau 1994)."""
    return score_outcome(found[0], time_information(fit, found), fit.design.term_names)


def baseline_outcome(checks: IntervalChecks) -> Outcome | str:
    """Test that the sites have one baseline hazard, by the events that are expected at each of them.

    Without coefficients this is the log-rank test of the sites in the form of Peto and Peto (1972), sum of
    (O - E)^2 / E. Its mean without a difference is the sum of the shares of variance that the coefficients
    leave, and this mean is taken for the degrees of freedom.
    """
    statistic, df = checks.baseline
    if not df >= LEAST_DF:
        return "the columns of the model explain all differences between the sites"
    return Outcome(statistic, df, float(stats.chi2.sf(statistic, df)))


def open_at(session: RowsSession, fit: CoxFit) -> FitProtocol[dict[str, Array]]:
    """Open the rows of a fit again, and return the arrays that name its estimate."""
    K = len(session.sites)
    replies = yield session.opening() + session.request_all("start", {}, to_json(fit.request))
    scale = covariates(session.opened(replies[: 2 * K])).spread
    point: dict[str, Array] = {"scale": scale, "beta": fit.gamma / fit.scale * scale}
    yield session.request_all("sum_scores", point)
    return point


def time_scores(session: RowsSession, fit: CoxFit, transform: str) -> FitProtocol[TimeScores]:
    """Open the rows of a fit again, and request the sums of :func:`time_scores_at`."""
    point = yield from open_at(session, fit)
    return (yield from time_scores_at(session, fit, point, transform))


def time_scores_at(
    session: RowsSession, fit: CoxFit, point: dict[str, Array], transform: str
) -> FitProtocol[TimeScores]:
    """Request score, cross and square information of coefficients that vary with time, standardized."""
    scale = np.asarray(point["scale"])
    replies = yield session.request_all("sum_time_scores", point, transform)
    factor = fit.scale / scale
    products = np.outer(factor, factor)
    return (
        factor * add(replies, "score"),
        products * add(replies, "cross"),
        products * add(replies, "square"),
    )


def average_hazard(
    session: RowsSession, fit: CoxFit, edges: Floats
) -> FitProtocol[tuple[Floats, Floats, Floats]]:
    """Request the sites' mean baseline hazard, weighted by rows: cumulated to `edges` (J,).

    Returns hazard (J,), its variance for known coefficients (J,), and its product with the mean column of the
    rows at risk (J, p), in the units of the data.
    """
    point = yield from open_at(session, fit)
    replies = yield session.request_all("sum_hazard", {**point, "edges": edges})
    n = float(fit.design.n.sum())
    hazard, variance, centers = (np.asarray(add(replies, name)) for name in ("hazard", "variance", "centers"))
    return hazard.cumsum() / n, variance.cumsum() / n**2, centers.cumsum(axis=0) / n


def common_time_scores(session: RowsSession, fit: CoxFit, transform: str) -> FitProtocol[TimeScores]:
    """Request the same as :func:`time_scores` for a common baseline, with times at the ends of intervals."""
    common = fit.common
    assert common is not None
    yield session.opening() + session.request_all("start", {}, to_json(fit.request))
    levels = common.request.stratum_levels
    newton = CommonNewton(session, fit.request, common.edges, levels, fit.scale, fit.design.mean)
    yield from newton.start(common.request)
    yield from newton.sum_at(common.at.gamma, common.at.events, True)
    checks = yield from interval_checks(session, common, TRANSFORMS[transform])
    return checks.score, checks.cross, checks.square


def common_hazard(fit: CoxFit) -> tuple[Floats, Floats, Floats]:
    """Return what :func:`average_hazard` does for a common baseline: it is known from the fit."""
    assert fit.common is not None
    hazard, variance, centers = fit.common.at.hazard()
    zero = float(np.exp(-fit.design.mean @ fit.params))
    centers = centers * fit.scale + hazard[:, None] * fit.design.mean
    return (hazard * zero).cumsum(), (variance * zero**2).cumsum(), (centers * zero).cumsum(axis=0)
