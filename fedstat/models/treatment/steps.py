"""Steps of a site for the effect of a treatment: sums of estimating equations, and its own effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import expit

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, rows_of
from fedstat.federation.design.site_rows import block_means
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import control
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.stacked import EquationChain, sandwich
from fedstat.kernels.categories import BASELINE, probabilities
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.treatment import (
    ALL,
    BALANCE,
    ESTIMANDS,
    FLAT,
    LINKS,
    MEANS,
    METHODS,
    OUTCOME,
    PROPENSITY,
    Residuals,
    TreatmentEquations,
)
from fedstat.models.horizontal.rows import glm_rows, require_response, summed
from fedstat.models.rows.newton import maximize_own
from fedstat.models.rows.objective import STANDARDIZED, PredictorObjective, SiteSums, own_part
from fedstat.models.rows.steps import enter_start, releases_of, rows_in, scores_at
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "treatment"
EMPTY_ARM, NO_OUTCOME = "an arm has no rows, or one outcome alone", "no outcome was read"
BLOCK = 8192
CUTS_KEY = "cuts by probabilities of arms"
"""Name under which the rows on either side of a cut are remembered."""


distribution_of = lru_cache(maxsize=64)(DistributionSpec.from_json)
"""Reads a distribution, each text once."""


@dataclass(frozen=True, slots=True)
class TreatmentRequest:
    """The estimator: column of the treatment, terms of both models, distribution in JSON, and choices.

    `outcome` and `propensity` are places of terms among those of the question. Standardized means are over
    the rows of the site `target`, and without one over all rows.
    """

    arm: str
    outcome: tuple[int, ...]
    propensity: tuple[int, ...]
    distribution: str
    method: str
    estimand: str
    trim: float = 0.0
    target: str = ""

    def check(self) -> None:
        """Refuse unknown choices."""
        if (
            self.method not in (*METHODS, BALANCE)
            or self.estimand not in ESTIMANDS
            or not 0.0 <= self.trim < 0.5
        ):
            raise MessageError("treatment: unknown method or estimand, or a bound that is not below 0.5")
        if self.target and (self.method, self.estimand) != ("standardization", "ATE"):
            raise MessageError("treatment: the rows of one site are the population of standardization only")
        if self.spec.link not in LINKS or not self.spec.canonical:
            raise MessageError(f"family: expected one with its canonical link {', '.join(LINKS)}")

    @property
    def spec(self) -> DistributionSpec:
        """Distribution of the outcome."""
        return distribution_of(self.distribution)

    def equations(self, arms: int) -> TreatmentEquations:
        """Return the equations for a number of arms."""
        return TreatmentEquations(arms, self.method, self.estimand, self.spec.link, self.trim)

    def chain(self, arms: int, terms: Sequence[str], term_names: Sequence[str]) -> EquationChain:
        """Return the columns of every equation; `term_names` are terms of the columns after the constant."""

        def columns(places: Sequence[int]) -> Ints:
            named = {terms[place] for place in places}
            return np.array([0, *(1 + j for j, name in enumerate(term_names) if name in named)])

        blocks = (columns(self.propensity), columns(self.outcome), np.zeros(1, dtype=np.int64))
        groups = self.equations(arms).groups
        return EquationChain(
            [
                block
                for block, group in zip(blocks, groups, strict=True)
                for _ in range(group.stop - group.start)
            ]
        )


class ArmRows(NamedTuple):
    """Columns of some rows (m, p), the arm (m,) and the outcome (m,) of each."""

    X: Floats
    arm: Ints
    y: Floats


def first_parameters(
    arms: Floats, chain: EquationChain, equations: TreatmentEquations, distribution: DistributionSpec
) -> Floats:
    """Parameters (q,) with the shares of the arms and their mean outcomes, from sums `arms` (J, 2)."""
    theta, (P, Q, _) = np.zeros(chain.size), equations.groups
    first = np.array([place.start for place in chain.places])
    with np.errstate(divide="ignore", invalid="ignore"):
        theta[first[P]] = np.log(arms[1:, 0] / arms[0, 0])[: P.stop]
        link = LINKS[distribution.link].link
        theta[first[Q]] = link(arms[:, 1] / arms[:, 0])[: Q.stop - Q.start]
    return theta


@dataclass(frozen=True, slots=True, eq=False)
class SiteTreatment(PredictorObjective):
    """One fit's rows at a stage of the chain; its predictors are those of all equations."""

    family = FAMILY
    request_type = TreatmentRequest
    requests = control("treatment, terms of both models, distribution, estimator", common=True)
    starts: ClassVar = {"arms": summed("rows, and sums of the outcome, by arm", 2, behind=OPEN_ROWS)}
    own_fit: ClassVar = {
        "beta": own_part("potential means"),
        "cov": own_part("their covariance", 2),
    }
    what: ClassVar = {
        "score": "estimating functions",
        "information": "their derivative",
        "loglik": "log-likelihood of a stage",
    }
    unbounded = "separated arms or outcomes"

    request: TreatmentRequest
    levels: tuple[LevelValue, ...]
    stage: int = ALL

    @classmethod
    def begin(
        cls, data: SiteData, state: State, request: TreatmentRequest
    ) -> tuple[SiteTreatment, dict[str, Array]]:
        """Check the rows, and count the arms: ``arms`` (J, 2)."""
        opened = rows_of(state)
        question, levels = opened.question, tuple(opened.spec.levels.get(request.arm, ()))
        places = (*request.outcome, *request.propensity)
        if (
            len(levels) < 2
            or not question.intercept
            or question.weights
            or question.offsets
            or bool(question.response) != (request.method != BALANCE)
            or not all(0 <= place < len(question.terms) for place in places)
        ):
            raise MessageError(f"{data.name}: the model did not open this treatment with its terms")
        site = cls(opened, request, state.entities, levels)
        for rows, X in opened.chunks() if question.response else ():
            require_response(data.name, glm_rows(rows, X), request.spec, question.response)
        state.report(*site.products_by_arm())
        return site, {"arms": site.arms}

    @property
    def variant(self) -> object:
        """The estimator."""
        request = self.request
        return [request.method, request.estimand, request.trim, request.propensity, request.target]

    @property
    def equations(self) -> TreatmentEquations:
        """Equations of the estimator."""
        return self.request.equations(len(self.levels))

    @property
    def chain(self) -> EquationChain:
        """Columns of every equation."""
        return self.request.chain(len(self.levels), self.opened.question.terms, self.opened.term_names)

    @property
    def matrices(self) -> Floats:
        """Matrices from parameters to the coefficients of each predictor."""
        return self.chain.matrices(len(self.opened.scale))

    def at(self, stage: int) -> SiteTreatment:
        """Return the rows at a stage."""
        return replace(self, stage=stage)

    def chunks(self) -> Iterator[ArmRows]:
        """Yield the rows, part by part."""
        index = pd.Index(list(self.levels), dtype=object)
        for rows, X in self.opened.chunks():
            arm = index.get_indexer(
                pd.Index(rows.frame[self.request.arm].to_numpy(dtype=object), dtype=object)
            )
            y = rows.y if self.opened.question.response else np.zeros(len(X))
            # In parts, since derivatives by pairs of predictors are held for all rows of one.
            for start in range(0, len(X), BLOCK):
                part = slice(start, start + BLOCK)
                yield ArmRows(X[part], np.asarray(arm[part], dtype=np.int64), y[part])

    @property
    def arms(self) -> Floats:
        """Rows, and sums of the outcome, by arm, (J, 2)."""
        found, J = np.zeros((len(self.levels), 2)), len(self.levels)
        for _, arm, y in self.chunks():
            found += np.column_stack([np.bincount(arm, one, J) for one in (None, y)])
        return found

    def products_by_arm(self) -> Iterator[facts.SummedProducts | facts.OutcomeCounts]:
        """Facts on the products of columns and outcome over the rows of each arm, which models sum."""
        whole = next(self.opened.products())
        arm, y = (np.concatenate([rows[place] for rows in self.chunks()]) for place in (1, 2))
        for j, level in enumerate(self.levels):
            inside = arm == j
            names = [f"{name} (of {level})" for name in whole.names]
            yield replace(whole, names=names, rows=None, weights=inside.astype(np.float64))
            if self.request.spec.name == "Binomial" and self.opened.question.response:
                counts = (int((inside & (y == 0.0)).sum()), int((inside & (y == 1.0)).sum()))
                yield facts.OutcomeCounts(counts, f"{self.opened.question.response} of {level}")

    def residuals_of(self, rows: ArmRows, own: Floats) -> Residuals:
        """Return log-likelihoods, residuals and derivatives of rows at the site's own parameters."""
        eta = self.chain.predictors(rows.X, own)
        counts = self.request.target in ("", self.data.name)
        return self.equations.residuals(eta, rows.arm, rows.y, self.stage, counts)

    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns, log-likelihoods, residuals, and their derivatives by the predictors."""
        for rows in self.chunks():
            yield rows.X, *self.residuals_of(rows, own)

    def sums(self, own: Floats) -> SiteSums:
        """Sum over the rows."""
        chain, loglik = self.chain, 0.0
        score, information = np.zeros(chain.size), np.zeros((chain.size, chain.size))
        for X, part, g, H in self.rows_at(own):
            loglik += float(part.sum())
            score += chain.score(X, g)
            information -= chain.derivative(X, H)
        return SiteSums(loglik, score, information, flat=lambda: self.is_flat(own))

    def is_flat(self, own: Floats) -> bool:
        """Return whether probabilities of arms, or of a binary outcome, are 0 or 1 at nearly all rows.

        Score and weights are then sums over the rows on one side of a cut.
        """
        (P, Q, _), J = self.equations.groups, len(self.levels)
        errors, mass = np.zeros(2), np.zeros((2, J))
        for X, arm, _ in self.chunks():
            eta = self.chain.predictors(X, own)
            if self.equations.weighs:
                E = probabilities(eta[:, P], BASELINE)
                errors[0] += (1.0 - (E**2).sum(axis=1)).sum()
                mass[0] += E.sum(axis=0)
            if self.equations.models and self.request.spec.name == "Binomial":
                m = expit(eta[:, Q])[np.arange(len(arm)), arm]
                errors[1] += (2.0 * m * (1.0 - m)).sum()
                mass[1, :2] += m.sum(), (1.0 - m).sum()
        rest = mass.sum(axis=1) - mass.max(axis=1)
        return bool((errors < FLAT * rest).any())

    def cuts(self, own: Floats) -> Iterator[facts.RowGroups]:
        """Facts on the rows on either side of a cut by the probabilities, if weights jump there."""
        P = self.equations.groups[0]
        found = [
            self.equations.cut(self.chain.predictors(X, own)[:, P], self.stage) for X, _, _ in self.chunks()
        ]
        if code := [one for one in found if one is not None]:
            yield facts.RowGroups(CUTS_KEY, np.concatenate(code), self.opened.places, of_models=True)

    def facts_at(
        self, own: Floats, sums: SiteSums, instead: Mapping[str, Array] | None = None
    ) -> tuple[Any, ...]:
        """Declare the weights of rows in sums at a point, rows on either side of a cut, and who adds rows."""
        alone = self.request.target and self.stage in (MEANS, ALL)
        sites = [facts.SampledSites((self.request.target,))] if alone else []
        return *PredictorObjective.facts_at(self, own, sums, instead), *self.cuts(own), *sites

    def terms(self, own: Floats) -> Mapping[str, Sequence[facts.RowTerms]]:
        """Return the terms of the sums, whose weights are linear in the outcome."""
        found: dict[str, list[facts.RowTerms]] = {"score": [], "information": []}
        chain, M = self.chain, self.matrices
        for rows in self.chunks():
            for name, j, k, weights, times in self._linear(rows, own):
                left = rows.X[:, chain.columns[j]] @ M[j][chain.columns[j]]
                right = (
                    np.ones((len(rows.y), 1))
                    if k < 0
                    else rows.X[:, chain.columns[k]] @ M[k][chain.columns[k]]
                )
                found[name].append(facts.RowTerms(left, weights, right, times))
        return found

    def _linear(self, rows: ArmRows, own: Floats) -> Iterator[tuple[str, int, int, Floats, Floats | None]]:
        """Yield the sum, equation and predictor, weights (m, 1), and the outcome where it multiplies them."""
        zero, one = (
            self.residuals_of(rows._replace(y=np.full_like(rows.y, value)), own) for value in (0.0, 1.0)
        )
        for name, sign, place, pairs in (
            ("score", 1.0, 1, [(j, -1) for j in range(zero[1].shape[1])]),
            ("information", -1.0, 2, self.equations.pairs(self.stage)),
        ):
            for j, k in pairs:
                at = (slice(None), j) if k < 0 else (slice(None), j, k)
                start = sign * zero[place][at][:, None]
                slope = sign * one[place][at][:, None] - start
                yield name, j, k, start, None
                if j >= self.equations.groups[0].stop:  # the propensity model has no outcome
                    yield name, j, k, slope, rows.y

    def vectors(self, own: Floats) -> Floats:
        """Return the weights by which columns are multiplied, (n, k)."""
        return np.concatenate([self.vectors_of(rows, own) for rows in self.chunks()])

    def vectors_of(self, rows: ArmRows, own: Floats) -> Floats:
        """Return the same of some rows."""
        _, g, H = self.residuals_of(rows, own)
        return np.column_stack([g, *(-H[:, j, k] for j, k in self.equations.pairs(self.stage))])

    def blocks(self) -> Iterator[TreatmentBlock]:
        """Yield the rows for the check of what sums at several parameters single out."""
        return (TreatmentBlock(self, rows) for rows in self.chunks())

    def key_of(self, own: Floats) -> Any:
        """Return what distinguishes a point: parameters, and the stage."""
        return own.tobytes(), self.stage

    @property
    def first(self) -> Floats:
        """Parameters with the shares of the arms and their mean outcomes."""
        return first_parameters(self.arms, self.chain, self.equations, self.request.spec)

    def lacks(self) -> str:
        """Require rows of each arm, and an outcome."""
        if not self.equations.estimates:
            return NO_OUTCOME
        return EMPTY_ARM if (self.arms[:, 0] == 0.0).any() or not np.isfinite(self.first).all() else ""

    # -- balance ---------------------------------------------------------------------------------

    def arm_weights(self, rows: ArmRows, own: Floats) -> Floats:
        """Return the weights of rows in each arm, (m, 2 J): ones, and those of the estimand."""
        eta = self.chain.predictors(rows.X, own)
        inside = (rows.arm[:, None] == np.arange(len(self.levels))).astype(np.float64)
        w = self.equations.weights(eta, rows.arm)[0]
        return np.column_stack([inside, inside * w[:, None]])

    def probability_counts(self, own: Floats) -> Floats:
        """Count rows by arm, and by interval of the probability of each arm but the first, (J - 1, J, B)."""
        J, least = len(self.levels), self.data.policy.min_level_count
        parts = [(self.chain.predictors(rows.X, own), rows.arm) for rows in self.chunks()]
        arm = np.concatenate([one for _, one in parts])
        E = probabilities(np.concatenate([eta for eta, _ in parts]), BASELINE)
        out = np.zeros((J - 1, J, BINS))
        for j in range(1, J):
            cell = np.minimum((block_means(arm, E[:, j], least) * BINS).astype(np.int64), BINS - 1)
            out[j - 1] = np.bincount(arm * BINS + cell, minlength=J * BINS).reshape(J, BINS)
        return out

    # -- the site's own effect ---------------------------------------------------------------------

    @property
    def own_numbers(self) -> int:
        """Potential means and their covariance."""
        J = len(self.levels)
        return J * (J + 3) // 2

    @property
    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the arrays of the site's own effect."""
        J = len(self.levels)
        return {"beta": (J,), "cov": (J, J)}

    def stage_mask(self, stage: int) -> Bools:
        """Parameters of a stage."""
        return parameters_of(self.chain, self.equations, stage)

    def fit_own(self) -> tuple[dict[str, Array], str]:
        """Solve the equations of the site's rows: ``beta`` (J,) and ``cov`` (J, J), zero without a fit."""
        arrays: dict[str, Array] = {name: np.zeros(shape) for name, shape in self.own_shapes.items()}
        # The site's own effect is that in its own rows.
        here = replace(self, request=replace(self.request, target=""))
        own, problem, known = self.first, self.lacks(), self.known
        for stage in self.equations.stages:
            part, site = known & self.stage_mask(stage), here.at(stage)
            inside = np.ix_(part, part)

            def at(
                values: Floats, part: Bools = part, site: SiteTreatment = site, inside: Any = inside
            ) -> Any:
                trial = own.copy()
                trial[part] = values
                now = site.sums(trial)
                return now.loglik, now.score[part], now.information[inside]

            if not problem:
                found, _, problem = maximize_own(at, own[part], self.unbounded)
                own[part] = found
        if problem:
            return arrays, problem
        chain, A, B = self.chain, np.zeros((len(own), len(own))), np.zeros((len(own), len(own)))
        for X, _, g, H in here.at(ALL).rows_at(own):
            A, B = A + chain.derivative(X, H), B + chain.products(X, g)
        try:
            V = sandwich(A[np.ix_(known, known)], B[np.ix_(known, known)])
        except EstimationError:
            return arrays, self.unbounded
        J = len(self.levels)
        return {"beta": own[-J:], "cov": V[-J:, -J:]}, ""


def parameters_of(chain: EquationChain, equations: TreatmentEquations, stage: int) -> Bools:
    """Mark the parameters of a stage, (q,)."""
    mask = np.zeros(chain.size, dtype=np.bool_)
    for place in chain.places[equations.groups[stage]]:
        mask[place] = True
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class TreatmentBlock(facts.RowBlock):
    """A part of the rows; a point is the bytes of parameters, and the stage."""

    site: SiteTreatment
    rows: ArmRows

    @property
    def columns(self) -> Floats:
        """Columns of the design, a constant and the arms among them."""
        return self.rows.X

    def terms(self, point: Any) -> list[facts.RowTerms]:
        """Terms of the sums at a point."""
        own, stage = point
        site, X, one = self.site.at(stage), self.rows.X, np.ones((len(self.rows.y), 1))
        C = [X[:, columns] for columns in site.chain.columns]
        return [
            facts.RowTerms(C[j], weights, one if k < 0 else C[k], times)
            for _, j, k, weights, times in site._linear(self.rows, np.frombuffer(own))
        ]

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Return the weights of rows in the sums at points, (m, k)."""
        return np.column_stack(
            [self.site.at(stage).vectors_of(self.rows, np.frombuffer(own)) for own, stage in points]
        )

    def every(self, first: int, step: int) -> TreatmentBlock:
        """Return every n-th row, from the first on."""
        X, arm, y = self.rows
        return replace(self, rows=ArmRows(X[first::step], arm[first::step], y[first::step]))


enter_start(SiteTreatment)


@step(
    FAMILY,
    "start fit_alone sum_scores",
    takes={**STANDARDIZED, "stage": control("stage of the chain", 0)},
    releases=releases_of(SiteTreatment),
)
def sum_scores(
    data: SiteData, state: State, stage: Array, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Sum the equations of a stage over the rows: the propensity model, outcome models, means, or all.

    Released are ``score`` (q,), ``information`` (q, q), minus the derivative of the score, and ``loglik``.
    ``spread`` is false, and all else zero, if few rows have nearly all weight at these parameters.
    """
    if int(stage) not in (PROPENSITY, OUTCOME, MEANS, ALL):
        raise MessageError(f"{data.name}: there is no stage {int(stage)} of the chain")
    site = rows_in(state, SiteTreatment).at(int(stage))
    return scores_at(state, site, site.place(shift, scale, beta))


@step(
    FAMILY,
    "sum_scores",
    takes=STANDARDIZED,
    releases={"products": summed("outer products of the estimating functions of rows", 2)},
)
def sum_products(
    data: SiteData, state: State, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Sum outer products of the estimating functions of the rows, ``products`` (q, q)."""
    site = rows_in(state, SiteTreatment).at(ALL)
    own, C = site.place(shift, scale, beta)
    unsummed = SiteSums(0.0, np.zeros(0), np.zeros(0), flat=lambda: site.is_flat(own))
    state.report(*site.facts_at(own, unsummed), *site.products_at(own))
    total = np.sum([site.chain.products(X, g) for X, _, g, _ in site.rows_at(own)], axis=0)
    return {"products": C.T @ total @ C}


# ----------------------------------------------------------------------------------------------------
# Balance of the columns of the propensity model, and overlap of its probabilities; no outcome is read.

BINS = 20
"""Intervals of a probability."""


@dataclass(frozen=True, slots=True, eq=False)
class BalanceBlock(TreatmentBlock):
    """The same rows; the vectors are the weights of each arm, without and with the propensity model."""

    def terms(self, point: Any) -> list[facts.RowTerms]:
        """Terms of moments of columns, and of squares of weights."""
        W = self.vectors((point,))
        return [facts.RowTerms(self.rows.X, W, self.rows.X), facts.alone(np.ones((len(W), 1)), W**2)]

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Return the weights of the arms at points, (m, J k)."""
        return np.column_stack([self.site.arm_weights(self.rows, np.frombuffer(own)) for own, _ in points])


@step(
    FAMILY,
    "sum_scores",
    takes={**STANDARDIZED, "overlap": control("whether to count probabilities", 0)},
    releases={
        "weights": summed("rows with weight, sums of weights and of their squares, by arm", 3),
        "moments": summed("weighted sums of standardized columns and of their squares, by arm", 4),
        "counts": summed("rows by arm, and by interval of the probability of each arm", 3, optional=True),
    },
)
def sum_balance(
    data: SiteData, state: State, overlap: Array, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Compare the columns of the arms, without weights and with those of the estimand.

    Released are ``weights`` (2, J, 3); ``moments`` (2, J, 2, k), of columns standardized over all sites; and
    ``counts`` (J - 1, J, B). For the counts, each site replaces the probabilities of every few successive
    rows of an arm by their mean, so that no interval has few rows.
    """
    site = rows_in(state, SiteTreatment).at(MEANS)
    if site.equations.estimates:
        raise MessageError(f"{data.name}: the model opened an outcome; balance is examined before")
    own = site.place(shift, scale, beta).own
    blocks = [BalanceBlock(site, rows) for rows in site.chunks()]
    point = (own.tobytes(), BALANCE)
    state.report(
        facts.WorkingWeights(lambda: np.concatenate([one.vectors((point,)) for one in blocks]).T),
        facts.ScoreAndInformation(site.opened, site.n, point, lambda: iter(blocks), among=site.opened.places),
        *site.cuts(own),
    )
    J, columns = len(site.levels), site.chain.columns[0][1:]
    weights, moments = np.zeros((2, J, 3)), np.zeros((2, J, 2, len(columns)))
    T = site.opened.scale[columns] / scale[columns]
    moved = (site.opened.shift - shift)[columns] / scale[columns]
    for block in blocks:
        W = block.vectors((point,))
        D = block.rows.X[:, columns] * T + moved
        weights += np.stack([(W > 0.0).sum(axis=0), W.sum(axis=0), (W**2).sum(axis=0)], axis=1).reshape(
            2, J, 3
        )
        moments += np.stack([W.T @ D, W.T @ D**2], axis=1).reshape(2, J, 2, -1)
    arrays = {"weights": weights, "moments": moments}
    if overlap:
        counts = site.probability_counts(own)
        state.report(facts.ModelEvaluation(counts.ravel()))
        arrays["counts"] = counts
    return arrays
