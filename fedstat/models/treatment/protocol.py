"""The coordinator of an effect of treatment: stages solved one after the other, and the sandwich of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.design.propensity_weights import PropensityWeights
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.heterogeneity import SiteFit
from fedstat.inference.recession import name_columns, receding
from fedstat.inference.stacked import sandwich
from fedstat.kernels.categories import moved
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.treatment import ALL, MEANS, MEMBERSHIP, OUTCOME, PROPENSITY
from fedstat.models.horizontal.clusters import Clustering, SharedLabels
from fedstat.models.horizontal.estimability import require_independent
from fedstat.models.horizontal.session import add
from fedstat.models.horizontal.treatment_weights import FittedPropensity
from fedstat.models.rows.newton import LikelihoodNewton, LikelihoodSums, OwnEstimate, open_rows, site_fits
from fedstat.models.rows.predictors import standardized_point, to_units
from fedstat.models.treatment.steps import StagedChain, TreatmentRequest
from fedstat.typing import Array, Floats

NO_STEP = (
    "no step increases the likelihood ({} evaluations) with weight on more than a few rows of every site. "
    "Leave out columns that separate the arms or the outcomes"
)
FEW_ROWS = (
    "a few rows of a site have nearly all weight in a potential mean: the arms hardly overlap. The weights "
    "of the rows of overlap (ATO) are bounded, and trimming leaves rows with a rare arm out"
)
INFINITE = "separated{}: the estimates of {{listed}} would be infinite"
SEPARATED = {
    PROPENSITY: f"the arms of {{arm!r}} are {INFINITE.format('')}, as where all rows of a level are in one "
    "arm. There are no rows to compare with. Leave out the term, merge its level with another, or leave "
    "these rows out",
    MEMBERSHIP: f"the rows of {{target!r}} are {INFINITE.format(' from those of other sites')}. Its rows are "
    "like no others in these columns. Leave out the term, or merge its level with another",
    OUTCOME: f"the outcomes of an arm are {INFINITE.format('')}, as where a level has no events. Leave the "
    "term out of the formula of the outcome, or merge its level with another",
}
"""Errors of a stage whose likelihood increases without end."""
EXACT_STEPS = 2
"""Steps for linear equations; the second removes the rounding error of the first."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TreatmentFit:
    """Solution of the equations.

    `theta` (s,) and its covariance `cov` (s, s) are in the units of the data; the last parameters are the
    potential means. `arms` has rows and sums of the outcome by arm, (J, 2), and with sampling weights the sum
    of these, (J, 3); `spread` (J, 3) sums of weights, of their squares and fourth powers, empty without any.
    `trace` has log-likelihood, length of the step in standard errors, and its largest change of a parameter,
    by evaluation.
    """

    theta: Annotated[Floats, "s"]
    cov: Annotated[Floats, "s s"]
    arms: Annotated[Floats, "J a"]
    levels: Annotated[tuple[LevelValue, ...], "J"]
    terms: tuple[str, ...]
    request: TreatmentRequest
    design: RowsDesign
    propensity: FittedPropensity | None
    trace: Annotated[Floats, "E 3"]
    converged: bool
    masked: bool
    local: Annotated[tuple[SiteFit, ...], "K"]
    spread: Annotated[Floats, "w k"] = field(default_factory=lambda: np.zeros((0, 3)))
    clustering: Clustering | None = None
    shared: tuple[SharedLabels, ...] = ()

    @property
    def distribution(self) -> DistributionSpec:
        """Distribution of the outcome."""
        return self.request.spec

    @property
    def chain(self) -> StagedChain:
        """Equations of the estimator."""
        return self.request.chain(self.levels, self.terms, self.design.term_names[1:])

    @property
    def means(self) -> Floats:
        """Potential means, (J,)."""
        return self.theta[-len(self.levels) :]

    @property
    def means_cov(self) -> Floats:
        """Covariance of the potential means, (J, J)."""
        J = len(self.levels)
        return self.cov[-J:, -J:]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TreatmentBalance:
    """Balance of the columns (k,) of the propensity model between arms, without weights and with them.

    `weights` (2, J, 4) are rows with weight, sums of weights, of squares and fourth powers; `mean` and
    `variance` (2, J, k) are in the units of the data; `counts` (J - 1, J, B) have rows by arm and interval of
    the probability of each arm but the first, empty if they were not requested.
    """

    names: Annotated[tuple[str, ...], "k"]
    levels: Annotated[tuple[LevelValue, ...], "J"]
    request: TreatmentRequest
    weights: Annotated[Floats, "2 J s"]
    mean: Annotated[Floats, "2 J k"]
    variance: Annotated[Floats, "2 J k"]
    counts: Annotated[Floats, "A B C"]
    propensity: FittedPropensity | None
    converged: bool
    masked: bool


@dataclass(slots=True, eq=False)
class StagedSolution:
    """The equations of a fit, and the parameters `theta` (q,) of standardized columns found so far."""

    design: RowsDesign
    chain: StagedChain
    arms: Floats
    theta: Floats
    shared: tuple[SharedLabels, ...] = ()
    converged: bool = True

    @property
    def back(self) -> Floats:
        """Matrix from parameters of standardized columns to those in the units of the data, (q, q)."""
        return moved(np.concatenate(self.chain.matrices(len(self.design.names))), to_units(self.design))


class TreatmentNewton(LikelihoodNewton[LikelihoodSums]):
    """Newton's method for both models, exact steps for linear equations, and the sandwich."""

    def run(self, local: bool) -> FitProtocol[TreatmentFit]:
        """Open the rows, solve the stages, and sum derivatives and products of all equations."""
        # 1. Open the rows, and count the arms; sites estimate their own effects.
        solution, alone = yield from self.begin(local)
        # 2. Models of the weights, outcome models, means: each stage with the estimates of those before.
        for stage in solution.chain.equations.stages:
            yield from self.solve(solution, stage)
        session, design, chain, theta = self.session, solution.design, solution.chain, solution.theta
        # 3. Derivatives and products of all equations at the solution.
        at = standardized_point(design, theta)
        replies = yield session.request_all("sum_scores", point_of(design, ALL, theta)) + session.request_all(
            "sum_products", at
        )
        K = len(session.sites)
        total = self.read(replies[:K])
        if total is None:
            raise EstimationError(FEW_ROWS)
        back, weighs = solution.back, chain.equations.weighs
        cov = back @ sandwich(-total.information, add(replies[K:], "products")) @ back.T
        if clustering := self.clustered(replies[K:], len(chain.levels)):
            cov = cov * clustering.factor
        return TreatmentFit(
            theta=back @ theta,
            cov=cov,
            arms=solution.arms,
            levels=chain.levels,
            terms=session.agreement.question.terms,
            request=self.request,
            design=design,
            propensity=self.fitted(solution),
            trace=np.array(self.trace).reshape(-1, 3),
            converged=solution.converged,
            masked=session.masked,
            local=site_fits(session, design.n, alone, own_effect, None, np.eye(len(chain.levels))),
            spread=np.asarray(add(replies[K:], "spread")) if weighs else np.zeros((0, 3)),
            clustering=clustering,
            shared=solution.shared,
        )

    def balance(self, overlap: bool) -> FitProtocol[TreatmentBalance]:
        """Open the rows without an outcome, fit the propensity model, and compare the columns of the arms."""
        solution, _ = yield from self.begin(False)
        for stage in solution.chain.equations.stages:
            yield from self.solve(solution, stage)
        design, columns = solution.design, solution.chain.columns[0][1:]
        point = standardized_point(design, solution.theta) | {"overlap": np.array(overlap)}
        replies = yield self.session.request_all("sum_balance", point)
        weights, moments = add(replies, "weights"), add(replies, "moments")
        total, squares = weights[..., 1], weights[..., 2]
        mean = moments[:, :, 0] / total[..., None]
        # Weights say how much rows count, and not how many rows they are (as in R's cobalt).
        factor = total**2 / (total**2 - squares)
        variance = factor[..., None] * (moments[:, :, 1] / total[..., None] - mean**2)
        scale = point["scale"][columns]
        return TreatmentBalance(
            names=tuple(design.names[j] for j in columns),
            levels=solution.chain.levels,
            request=self.request,
            weights=weights,
            mean=mean * scale + point["shift"][columns],
            variance=variance * scale**2,
            counts=add(replies, "counts") if overlap else np.zeros((0, 0, 0)),
            propensity=self.fitted(solution),
            converged=solution.converged,
            masked=self.session.masked,
        )

    def clustered(self, replies: Sequence[Reply], estimates: int) -> Clustering | None:
        """Return the clusters that sites counted, whose number is also the effective one of each estimate."""
        if not (names := self.request.clusters):
            return None
        G = float(add(replies, "clusters")) if any(names) else float(len(replies))
        return Clustering(", ".join(names) or "site", round(G), np.full(estimates, G), "CR1")

    def fitted(self, solution: StagedSolution) -> FittedPropensity | None:
        """Return the propensity model for the weights of other models; None if weights depend on more."""
        request, agreement, chain = self.request, self.session.agreement, solution.chain
        sampled = "var_weights" in agreement.question.weights
        if not chain.equations.weighs or request.trim or request.target or sampled:
            return None
        terms = [agreement.question.terms[place] for place in request.propensity]
        columns, design = chain.columns[0], solution.design
        point = standardized_point(design, solution.theta)
        count = chain.equations.groups[0].stop * len(columns)
        weights = PropensityWeights(
            arm=request.arm,
            levels=chain.levels,
            spec=agreement.spec.part(terms),
            names=tuple(design.names[j] for j in columns),
            shift=tuple(point["shift"][columns].tolist()),
            scale=tuple(point["scale"][columns].tolist()),
            coefficients=tuple(solution.theta[:count].tolist()),
            estimand=request.estimand,
            link=request.link,
            formula=f"{request.arm} ~ {' + '.join(terms) or '1'}",
        )
        return FittedPropensity(weights, {row.site: row.n for row in agreement.sites})

    def begin(self, local: bool) -> FitProtocol[tuple[StagedSolution, list[Reply]]]:
        """Open the rows, and return the solution before its first stage, and the sites' own effects."""
        session, request = self.session, self.request
        groups = (request.clusters,) if any(request.clusters) else ()
        design, started, alone, shared = yield from open_rows(session, to_json(request), local, groups)
        question, arms = session.agreement.question, add(started, "arms")
        levels = tuple(session.agreement.spec.levels[request.arm])
        chain = request.chain(levels, question.terms, design.term_names[1:])
        theta = chain.first(arms, request.spec)
        if not np.isfinite(theta).all():
            raise EstimationError(
                f"the outcome {question.response!r} is constant in an arm: there is no model of it there. "
                "Weighting alone (ipw) needs none"
            )
        return StagedSolution(design, chain, arms, theta, shared), alone

    def solve(self, solution: StagedSolution, stage: int) -> FitProtocol[LikelihoodSums]:
        """Solve a stage with the estimates of those before, and return the sums at its end."""
        theta, point = solution.theta, partial(point_of, solution.design, stage)
        free = solution.chain.of_stage(stage)
        total = yield from self.sums_at(point(theta), stage)
        if stage != MEANS:
            self.require_stage(solution, stage, total)
        if stage == MEANS or (stage == OUTCOME and self.request.spec.least_squares):
            for _ in range(EXACT_STEPS):
                theta[free] += total.step(np.flatnonzero(free))
                total = yield from self.sums_at(point(theta), stage)
            return total
        solution.theta, total, _, found = yield from self.ascend(
            point,
            theta,
            total,
            n=int(solution.design.n.sum()),
            at_infinity=partial(self.separated, solution, stage),
            stuck=NO_STEP,
            free=free,
        )
        solution.converged = solution.converged and found
        return total

    def sums_at(self, point: dict[str, Array], stage: int) -> FitProtocol[LikelihoodSums]:
        """Request the sums of a stage; an error if few rows have nearly all weight."""
        total = yield from self.evaluate(point)
        if total is None:
            raise EstimationError(FEW_ROWS if stage == MEANS else NO_STEP.format(0))
        return total

    def require_stage(self, solution: StagedSolution, stage: int, total: LikelihoodSums) -> None:
        """Require columns of a stage that do not follow from one another, in each equation."""
        design, chain = solution.design, solution.chain
        group = chain.equations.groups[stage]
        for columns, place in zip(chain.columns[group], chain.places[group], strict=True):
            names, terms = ([of[j] for j in columns.tolist()] for of in (design.names, design.term_names))
            require_independent(total.information[place, place], names, terms=terms)

    def separated(
        self,
        solution: StagedSolution,
        stage: int,
        step: Floats,
        before: Floats,
        now: Floats,
        complete: bool,
    ) -> EstimationError:
        """Make the error for a stage whose likelihood increases without end, with the columns that do it."""
        design, free = solution.design, solution.chain.of_stage(stage)
        inside = np.ix_(free, free)
        names, terms = (
            [name for name, here in zip(solution.chain.names(of), free, strict=True) if here]
            for of in (design.names, design.term_names)
        )
        slopes = np.array([not name.endswith(": Intercept") for name in names])
        culprits, _, reference = receding(
            step[free], before[inside], now[inside], solution.back[inside], slopes, complete=complete
        )
        listed = name_columns(culprits, reference, names, terms)
        given = {"arm": self.request.arm, "target": self.request.target}
        return EstimationError(SEPARATED[stage].format(listed=listed, **given))


def point_of(design: RowsDesign, stage: int, theta: Floats) -> dict[str, Array]:
    """Return the arrays that name parameters and the stage."""
    return standardized_point(design, theta) | {"stage": np.array(stage)}


def own_effect(site: int, reply: Reply) -> OwnEstimate:
    """Return the differences and the first mean of a site, and their covariance, as those of all sites."""
    means, cov = reply.arrays["beta"], reply.arrays["cov"]
    R = contrasts_with_first(len(means))
    return R @ means, R @ cov @ R.T, None


def contrasts_with_first(J: int) -> Floats:
    """Matrix (J, J) from potential means to differences from the first, and the first itself last."""
    R = np.vstack([np.eye(J)[1:], np.eye(J)[:1]])
    R[:-1, 0] = -1.0
    return R
