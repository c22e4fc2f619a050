"""Newton's method for the likelihood of log-linear times, from sums over sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.recession import name_columns, receding
from fedstat.kernels.categories import moved
from fedstat.models.aft.steps import AFTRequest, TimesRequest, first_parameters, predictor_map
from fedstat.models.horizontal.clusters import ClusterChoice
from fedstat.models.horizontal.estimability import require_independent
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.models.horizontal.variable_changes import ChangedSums, level_counts
from fedstat.models.margins import ChangesRequest
from fedstat.models.rows.newton import LikelihoodNewton, LikelihoodSums, open_rows, site_fits
from fedstat.models.rows.predictors import PredictorFit, own_predictor_fit, standardized_point, to_units
from fedstat.typing import Array, Bools, Floats

LOG_SCALE = "log(scale)"
NO_STEP = (
    "no step increases the likelihood ({} evaluations) with weight on more than a few rows of every site. "
    "Transform columns with long tails, or leave out columns that separate the rows with events from the "
    "others"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AFTFit(PredictorFit):
    """Maximum of the likelihood: coefficients, and the logarithm of sigma unless it is one.

    `events` are rows with the event, times their frequency weights; `weights` is the sum of all weights;
    `pairs` and `squares` are those of :func:`fedstat.kernels.partial_likelihood.concordance`.
    """

    request: AFTRequest
    events: int
    weights: float
    pairs: Annotated[Floats, "4"]
    squares: Annotated[Floats, "3"]

    @property
    def map(self) -> Floats:
        """Matrix from parameters to the coefficients of both predictors."""
        return flat_map(self.design, self.request)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return with_scale(self.design.names, self.request)


def flat_map(design: RowsDesign, request: AFTRequest) -> Floats:
    """Matrix (J p, q) from parameters to the coefficients of the predictors."""
    M = predictor_map(len(design.names), request.lifetimes.fixed)
    return M.reshape(-1, M.shape[2])


def with_scale(columns: tuple[str, ...], request: AFTRequest) -> tuple[str, ...]:
    """Add the logarithm of sigma to texts of the columns, if it is estimated."""
    return columns if request.lifetimes.fixed else (*columns, LOG_SCALE)


class AFTNewton(LikelihoodNewton[LikelihoodSums]):
    """Newton's method with halved steps, from the moments of log times, first without covariates."""

    def run(self, cov_type: str, local: bool, clusters: ClusterChoice | None = None) -> FitProtocol[AFTFit]:
        """Open the rows, maximize, and request what the summary needs."""
        session, request = self.session, self.request
        # 1. Open the rows, and sum events and times; sites fit their own rows.
        groups = (request.clusters,) if request.clusters else ()
        design, started, alone, shared = yield from open_rows(session, to_json(request), local, groups)
        response, p = add(started, "response"), len(design.names)
        if response[2] < 1:
            raise EstimationError("there are no events at any site: there is nothing to fit")
        point = partial(standardized_point, design)
        gamma = first_parameters(response, p, request.lifetimes)
        if not np.isfinite(gamma).all():
            raise EstimationError("all rows of all sites have the same time: there is no scale to estimate")
        total = yield from self.evaluate(point(gamma))
        if total is None:
            raise EstimationError(NO_STEP.format(0))
        require_independent(total.information[:p, :p], design.names, terms=design.term_names)
        # 2. Without covariates, where the fit with covariates starts.
        constants = np.arange(len(gamma)) % p == 0
        gamma, total, _, _ = yield from self.maximize(design, gamma, total, constants)
        null = total.loglik
        # 3. Newton's steps, halved until the likelihood increases.
        self.trace.clear()
        everything = np.ones_like(constants)
        gamma, total, _, converged = yield from self.maximize(design, gamma, total, everything)
        # 4. Products of scores, and the comparison of the sites.
        meat = [cov_type == "robust", cov_type == "cluster"]
        ended = yield from self.finish(point(gamma), meat, clusters, total.information)
        fit = AFTFit(
            gamma=gamma,
            total=total,
            design=design,
            request=request,
            events=round(float(response[1 if session.agreement.question.counts_rows else 2])),
            weights=float(response[0]),
            pairs=add(ended, "pairs"),
            squares=add(ended, "squares"),
            null=null,
            meat=add(ended, "meat") if cov_type == "robust" else None,
            clustering=None,
            apart=add(ended, "apart") if session.masked else None,
            trace=np.array(self.trace),
            converged=converged,
            local=(),
            shared=shared,
        )
        if clusters is not None:
            summed, clustering = clusters.added(ended)
            fit = replace(fit, meat=summed, clustering=clustering)
        read = partial(own_predictor_fit, fit.map, design.intercept)
        forward = np.asarray(np.linalg.inv(fit.back))
        return replace(fit, local=site_fits(session, design.n, alone, read, total.by_site, forward))

    def maximize(
        self, design: RowsDesign, gamma: Floats, total: LikelihoodSums, free: Bools
    ) -> FitProtocol[tuple[Floats, LikelihoodSums, Floats, bool]]:
        """Take steps in the `free` parameters until they are small; see :meth:`ascend`."""
        return (
            yield from self.ascend(
                partial(standardized_point, design),
                gamma,
                total,
                n=int(design.n.sum()),
                at_infinity=partial(unbounded, design=design, request=self.request),
                stuck=NO_STEP,
                free=free,
            )
        )


def unbounded(
    step: Floats, before: Floats, now: Floats, complete: bool, design: RowsDesign, request: AFTRequest
) -> EstimationError:
    """Make the error for a likelihood that increases without end, with the columns that still move."""
    slopes = np.arange(len(step)) % len(design.names) > 0
    back = moved(flat_map(design, request), to_units(design))
    culprits, _, reference = receding(step, before, now, back, slopes, complete=complete)
    names, terms = (with_scale(texts, request) for texts in (design.names, design.term_names))
    listed = name_columns(culprits, reference, names, terms)
    return EstimationError(
        f"monotone likelihood: the estimate of {listed} would be infinite, as where a level has no events. "
        "Leave out the term, or merge its level with another."
    )


def open_at(session: RowsSession, fit: AFTFit) -> FitProtocol[tuple[RowsDesign, Mapping[str, Array]]]:
    """Open the rows of a fit again, evaluate its estimate, and return their design and the arrays of it."""
    K = len(session.sites)
    replies = yield session.opening() + session.request_all("start", {}, to_json(fit.request))
    design = session.opened(replies[: 2 * K])
    gamma = np.asarray(np.linalg.solve(moved(fit.map, to_units(design)), fit.params))
    point = standardized_point(design, gamma)
    yield session.request_all("sum_scores", point)
    return design, point


def sum_effects(session: RowsSession, fit: AFTFit, request: TimesRequest) -> FitProtocol[ChangedSums]:
    """Request sums over the rows of changes by variables; slopes are in the units of the data."""
    design, point = yield from open_at(session, fit)
    replies = yield session.request_all("sum_changes", point, to_json(request))
    back = np.linalg.inv(to_units(design))
    counts = level_counts(replies, ChangesRequest(request.changes))
    return ChangedSums(add(replies, "effects"), add(replies, "slopes") @ back, counts)
