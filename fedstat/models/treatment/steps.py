"""Steps of a site for the effect of a treatment: sums of estimating equations, and its own effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import expit, ndtri

from fedstat.errors import EstimationError, MessageError, Remedy
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.design.propensity_weights import CUTS
from fedstat.federation.design.site_rows import block_means
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import control
from fedstat.federation.tables.columns import LevelValue, level_places
from fedstat.inference.stacked import EquationChain, sandwich
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
    PROPENSITY_LINKS,
    Residuals,
    TreatmentEquations,
    arm_probabilities,
)
from fedstat.models.horizontal.overlap import spread_of
from fedstat.models.horizontal.rows import SUMS, glm_rows, require_response, summed
from fedstat.models.rows.objective import STANDARDIZED, PredictorObjective, SiteSums, own_part
from fedstat.models.rows.steps import enter_start, releases_of, rows_in, scores_at
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "treatment"
EMPTY_ARM, NO_OUTCOME = "an arm has no rows, or one outcome alone", "no outcome was read"
OF_TARGET = ("standardization", "ipw_ra")
"""Methods whose means are over the rows of a target alone, to which no other site adds."""
BY_SITE = ("",)
"""In place of columns of clusters: each site is one."""
CLUSTERS = summed("number of clusters", 0, optional=True, behind=(*SUMS, facts.ClusterProducts))
BLOCK = 8192
OTHER_WEIGHTS = Remedy(
    "from_formula(..., estimand='ATO').fit(...)",
    "Matching weights are those of other estimands on the two sides of a probability of one half, and this "
    "site has few rows on one side. Use {arguments}, whose weights are the same function in all rows",
)


distribution_of = lru_cache(maxsize=64)(DistributionSpec.from_json)
"""Reads a distribution, each text once."""


@dataclass(frozen=True, slots=True)
class TreatmentRequest:
    """The estimator: column of the treatment, terms of all models, distribution in JSON, and choices.

    `outcome`, `propensity` and `membership` are places of terms among those of the question. The population
    is the rows of the site `target`, and without one those of all sites. `clusters` are columns.
    """

    arm: str
    outcome: tuple[int, ...]
    propensity: tuple[int, ...]
    distribution: str
    method: str
    estimand: str
    trim: float = 0.0
    target: str = ""
    membership: tuple[int, ...] = ()
    link: str = "logit"
    clusters: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse unknown choices."""
        if (
            self.method not in (*METHODS, BALANCE)
            or self.estimand not in ESTIMANDS
            or not 0.0 <= self.trim < 0.5
            or self.link not in PROPENSITY_LINKS
        ):
            raise MessageError(
                "treatment: unknown method, estimand or link, or a bound that is not below 0.5"
            )
        if self.target and (self.estimand != "ATE" or self.trim):
            raise MessageError("treatment: the rows of one site are a population by themselves")
        if self.spec.link not in LINKS or not self.spec.canonical:
            raise MessageError(f"family: expected one with its canonical link {', '.join(LINKS)}")

    @property
    def spec(self) -> DistributionSpec:
        """Distribution of the outcome."""
        return distribution_of(self.distribution)

    def chain(
        self, levels: tuple[LevelValue, ...], terms: Sequence[str], term_names: Sequence[str]
    ) -> StagedChain:
        """Return the equations for some arms; `term_names` are terms of the columns after the constant."""

        def columns(places: Sequence[int]) -> Ints:
            named = {terms[place] for place in places}
            return np.array([0, *(1 + j for j, name in enumerate(term_names) if name in named)])

        choices = self.spec.link, self.trim, self.link, bool(self.target)
        equations = TreatmentEquations(len(levels), self.method, self.estimand, *choices)
        models = map(columns, (self.propensity, self.membership, self.outcome))
        blocks = zip((*models, np.zeros(1, dtype=np.int64)), equations.groups, strict=True)
        listed = [block for block, group in blocks for _ in range(group.stop - group.start)]
        return StagedChain(listed, equations, levels)


@dataclass(frozen=True, slots=True, eq=False)
class StagedChain(EquationChain):
    """Equations of an estimator for some arms, in stages that are solved one after the other."""

    equations: TreatmentEquations
    levels: tuple[LevelValue, ...]

    def of_stage(self, stage: int) -> Bools:
        """Mark the parameters of a stage, (q,)."""
        mask = np.zeros(self.size, dtype=np.bool_)
        for place in self.places[self.equations.groups[stage]]:
            mask[place] = True
        return mask

    def names(self, columns: Sequence[str]) -> list[str]:
        """Names of the parameters, such as ``"propensity surgery: age"`` and ``"mean surgery"``."""
        P, S, Q, M = self.equations.groups
        heads = [f"propensity {level}: " for level in self.levels[1:]][: P.stop]
        heads += ["target: "][: S.stop - S.start]
        heads += [f"outcome {level}: " for level in self.levels][: Q.stop - Q.start]
        blocks = zip(heads, self.columns, strict=False)
        found = [f"{head}{columns[j]}" for head, block in blocks for j in block.tolist()]
        return [*found, *[f"mean {level}" for level in self.levels][: M.stop - M.start]]

    def first(self, arms: Floats, distribution: DistributionSpec) -> Floats:
        """Parameters (q,) with shares and mean outcomes of the arms, from their sums (J, 2 or 3)."""
        theta, (P, _, Q, _) = np.zeros(self.size), self.equations.groups
        constants, weight = np.array([place.start for place in self.places]), weights_of(arms)
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = weight[1:] / weight[0]
            start = np.log(odds) if self.equations.propensity == "logit" else ndtri(odds / (1.0 + odds))
            theta[constants[P]] = start[: P.stop]
            link = LINKS[distribution.link].link
            theta[constants[Q]] = link(arms[:, 1] / weight)[: Q.stop - Q.start]
        return theta


def weights_of(arms: Floats) -> Floats:
    """Return the weights of the arms (J,) from their sums (J, 2 or 3), which are rows if there are none."""
    return np.asarray(arms[:, 2 if arms.shape[1] > 2 else 0])


class ArmRows(NamedTuple):
    """Columns of some rows (m, p); arm, outcome, weight and offset of the outcome of each, (m,)."""

    X: Floats
    arm: Ints
    y: Floats
    weight: Floats
    offset: Floats

    def part(self, rows: slice) -> ArmRows:
        """Return some of the rows."""
        return ArmRows._make(one[rows] for one in self)


@dataclass(frozen=True, slots=True, eq=False)
class SiteTreatment(PredictorObjective):
    """One fit's rows at a stage of the chain; its predictors are those of all equations."""

    family = FAMILY
    request_type = TreatmentRequest
    requests = control("treatment, terms of both models, distribution, estimator", common=True)
    starts: ClassVar = {
        "arms": summed("rows, sums of the outcome, and of sampling weights, by arm", 2, behind=OPEN_ROWS)
    }
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
    chain: StagedChain
    stage: int = ALL

    @classmethod
    def of(
        cls, opened: OpenRows, request: TreatmentRequest, n: int, levels: tuple[LevelValue, ...]
    ) -> SiteTreatment:
        """Return the rows with the equations of a request."""
        return cls(opened, request, n, request.chain(levels, opened.question.terms, opened.term_names))

    @classmethod
    def begin(
        cls, data: SiteData, state: State, request: TreatmentRequest
    ) -> tuple[SiteTreatment, dict[str, Array]]:
        """Check the rows, and count the arms: ``arms`` (J, 2), or (J, 3) with weights."""
        opened = rows_of(state)
        question, levels = opened.question, tuple(opened.spec.levels.get(request.arm, ()))
        places = (*request.outcome, *request.propensity, *request.membership)
        if (
            len(levels) < 2
            or (request.link == "probit" and len(levels) > 2)
            or not question.intercept
            or not set(question.weights) <= {"var_weights", "exposure"}
            or not set(request.clusters) <= {*question.labels, *BY_SITE}
            or question.propensities
            or bool(question.response) != (request.method != BALANCE)
            or not all(0 <= place < len(question.terms) for place in places)
        ):
            raise MessageError(f"{data.name}: the model did not open this treatment with its terms")
        site = cls.of(opened, request, state.entities, levels)
        for rows, X in opened.chunks() if question.response else ():
            require_response(data.name, glm_rows(rows, X), request.spec, question.response)
        state.report(*site.products_by_arm())
        return site, {"arms": site.arms}

    @property
    def variant(self) -> object:
        """The estimator."""
        one = self.request
        return [one.method, one.estimand, one.trim, one.propensity, one.target, one.membership, one.link]

    @property
    def equations(self) -> TreatmentEquations:
        """Equations of the estimator."""
        return self.chain.equations

    @property
    def levels(self) -> tuple[LevelValue, ...]:
        """The arms, the control first."""
        return self.chain.levels

    @property
    def matrices(self) -> Floats:
        """Matrices from parameters to the coefficients of each predictor."""
        return self.chain.matrices(len(self.opened.scale))

    @property
    def sampled(self) -> bool:
        """Whether rows have sampling weights."""
        return "var_weights" in self.opened.question.weights

    def at(self, stage: int) -> SiteTreatment:
        """Return the rows at a stage."""
        return replace(self, stage=stage)

    def chunks(self) -> Iterator[ArmRows]:
        """Yield the rows, part by part."""
        for rows, X in self.opened.chunks():
            arm = level_places(rows.frame[self.request.arm], self.levels)
            y = rows.y if self.opened.question.response else np.zeros(len(X))
            weight = rows.weights.get("var_weights", np.ones(len(X)))
            offset = np.zeros(len(X)) if rows.offset is None else rows.offset
            whole = ArmRows(X, arm, y, weight, offset)
            # In parts, since derivatives by pairs of predictors are held for all rows of one.
            for start in range(0, len(X), BLOCK):
                yield whole.part(slice(start, start + BLOCK))

    @property
    def arms(self) -> Floats:
        """Rows, sums of the outcome, and of weights if there are any, by arm, (J, 2 or 3)."""
        found, J = np.zeros((3, len(self.levels))), len(self.levels)
        for _, arm, y, w, _ in self.chunks():
            found += [np.bincount(arm, one, J) for one in (None, w * y, w)]
        return found[: 3 if self.sampled else 2].T

    def products_by_arm(self) -> Iterator[facts.SummedProducts | facts.OutcomeCounts]:
        """Facts on the products of columns and outcome over the rows of each arm, which models sum."""
        whole = next(self.opened.products())
        arm, y, w = (np.concatenate([rows[place] for rows in self.chunks()]) for place in (1, 2, 3))
        for j, level in enumerate(self.levels):
            inside = arm == j
            names = [f"{name} (of {level})" for name in whole.names]
            yield replace(whole, names=names, rows=None, weights=inside * w)
            if self.request.spec.name == "Binomial" and self.opened.question.response:
                counts = (int((inside & (y == 0.0)).sum()), int((inside & (y == 1.0)).sum()))
                yield facts.OutcomeCounts(counts, f"{self.opened.question.response} of {level}")

    def residuals_of(self, rows: ArmRows, eta: Floats) -> Residuals:
        """Return log-likelihoods, residuals and derivatives of rows at predictors (m, L)."""
        member = self.request.target == self.data.name
        found = self.equations.residuals(eta, rows.arm, rows.y, self.stage, member)
        if not self.sampled:
            return found
        loglik, g, H = found
        w = rows.weight
        return w * loglik, w[:, None] * g, w[:, None, None] * H

    def predictors(self, rows: ArmRows, own: Floats) -> Floats:
        """Return the linear predictors of rows (m, L); those of the outcome have its offset."""
        eta = self.chain.predictors(rows.X, own)
        eta[:, self.equations.groups[OUTCOME]] += rows.offset[:, None]
        return eta

    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns, log-likelihoods, residuals, and their derivatives by the predictors."""
        for rows in self.chunks():
            yield rows.X, *self.residuals_of(rows, self.predictors(rows, own))

    def sums(self, own: Floats) -> SiteSums:
        """Sum over the rows."""
        chain, loglik, points = self.chain, 0.0, []
        spread = np.zeros((2, len(chain.columns) + len(self.equations.pairs(self.stage))))
        score, information = np.zeros(chain.size), np.zeros((chain.size, chain.size))
        for rows in self.chunks():
            points.append((self.predictors(rows, own), rows.arm))
            part, g, H = self.residuals_of(rows, points[-1][0])
            loglik += float(part.sum())
            score += chain.score(rows.X, g)
            information -= chain.derivative(rows.X, H)
            sizes = np.abs(self.factors(g, H))
            spread += [sizes.sum(axis=0), np.einsum("ik,ik->k", sizes, sizes)]
        return SiteSums(loglik, score, information, spread.T, lambda: self.is_flat(points))

    def is_flat(self, points: Iterable[tuple[Floats, Ints]]) -> bool:
        """Return whether probabilities of arms, or of a binary outcome, are 0 or 1 at nearly all rows.

        Score and weights are then sums over the rows on one side of a cut. `points` has the predictors and
        arms of parts of the rows.
        """
        P, S, Q, _ = self.equations.groups
        errors, mass = np.zeros(3), np.zeros((3, len(self.levels)))
        for eta, arm in points:
            found = {}
            if self.equations.weighs:
                found[0] = arm_probabilities(eta[:, P], self.request.link)
            if self.equations.models and self.request.spec.name == "Binomial":
                found[1] = both_ways(expit(eta[:, Q])[np.arange(len(eta)), arm])
            if S.stop > S.start:
                found[2] = both_ways(expit(eta[:, S.start]))
            for place, E in found.items():
                errors[place] += (1.0 - (E**2).sum(axis=1)).sum()
                mass[place, : E.shape[1]] += E.sum(axis=0)
        rest = mass.sum(axis=1) - mass.max(axis=1)
        return bool((errors < FLAT * rest).any())

    def cuts(self, own: Floats) -> Iterator[facts.RowGroups]:
        """Facts on the rows on either side of a cut by the probabilities, if weights jump there."""
        if self.equations.jumps(self.stage):
            code = [self.equations.cut(self.predictors(rows, own)) for rows in self.chunks()]
            remedy = OTHER_WEIGHTS if self.request.estimand == "matching" else None
            yield facts.RowGroups(
                CUTS, np.concatenate(code), self.opened.places, of_models=True, remedy=remedy
            )

    def facts_at(
        self, own: Floats, sums: SiteSums, instead: Mapping[str, Array] | None = None
    ) -> tuple[Any, ...]:
        """Declare the weights of rows in sums at a point, rows on either side of a cut, and who adds rows."""
        alone = self.request.target and self.request.method in OF_TARGET and self.stage in (MEANS, ALL)
        sites = [facts.SampledSites((self.request.target,))] if alone else []
        return *PredictorObjective.facts_at(self, own, sums, instead), *self.cuts(own), *sites

    def terms(self, own: Floats) -> Mapping[str, Sequence[facts.RowTerms]]:
        """Return the terms of the sums, whose weights are linear in the outcome."""
        found: dict[str, list[facts.RowTerms]] = {"score": [], "information": []}
        for rows in self.chunks():
            for name, term in self.terms_of(rows, own, self.columns_of(rows.X)):
                found[name].append(term)
        return found

    def terms_of(
        self, rows: ArmRows, own: Floats, columns: Sequence[Floats]
    ) -> Iterator[tuple[str, facts.RowTerms]]:
        """Yield terms of rows, each with the name of its sum; `columns` are those of each equation."""
        eta = self.predictors(rows, own)
        zero, one = (
            self.residuals_of(rows._replace(y=np.full_like(rows.y, value)), eta) for value in (0.0, 1.0)
        )
        for name, sign, place, pairs in (
            ("score", 1.0, 1, [(j, -1) for j in range(zero[1].shape[1])]),
            ("information", -1.0, 2, self.equations.pairs(self.stage)),
        ):
            for j, k in pairs:
                at = (slice(None), j) if k < 0 else (slice(None), j, k)
                right = np.ones((len(rows.y), 1)) if k < 0 else columns[k]
                start = sign * zero[place][at][:, None]
                yield name, facts.RowTerms(columns[j], start, right)
                if j >= self.equations.weighing.stop:  # models of weights have no outcome
                    slope = sign * one[place][at][:, None] - start
                    yield name, facts.RowTerms(columns[j], slope, right, rows.y)

    def vectors(self, own: Floats) -> Floats:
        """Return the weights by which columns are multiplied, (n, k)."""
        return np.concatenate([self.vectors_of(rows, own) for rows in self.chunks()])

    def vectors_of(self, rows: ArmRows, own: Floats) -> Floats:
        """Return the same of some rows."""
        _, g, H = self.residuals_of(rows, self.predictors(rows, own))
        return self.factors(g, H)

    def factors(self, g: Floats, H: Floats) -> Floats:
        """Return the weights (m, k) by which columns are multiplied: residuals, derivatives of a stage."""
        return np.column_stack([g, *(-H[:, j, k] for j, k in self.equations.pairs(self.stage))])

    def products_at(self, own: Floats) -> Iterator[facts.SummedProducts]:
        """Declare the products of the rows' scores, within equations and of two equations."""
        yield from self.products_of(self.residuals(own))
        columns = ("constant", *self.opened.names)
        names = self.chain.names(columns)
        scores = (self.chain.scores(X, g) for X, _, g, _ in self.rows_at(own))
        yield facts.SummedProducts(lambda: scores, names)

    def products_of(self, residuals: Floats) -> Iterator[facts.SummedProducts]:
        """Declare the products of the scores of the first equations, by their residuals (n, k)."""
        for columns, residual in zip(self.chain.columns, residuals.T, strict=False):
            yield self.opened.products_with(residual**2, columns)

    def blocks(self) -> Iterator[TreatmentBlock]:
        """Yield the rows for the check of what sums at several parameters single out."""
        return (TreatmentBlock(self, rows) for rows in self.chunks())

    def key_of(self, own: Floats) -> Any:
        """Return what distinguishes a point: parameters, and the stage."""
        return own.tobytes(), self.stage

    @property
    def first(self) -> Floats:
        """Parameters with the shares of the arms and their mean outcomes."""
        return self.chain.first(self.arms, self.request.spec)

    def lacks(self) -> str:
        """Require rows of each arm, and an outcome."""
        if not self.equations.estimates:
            return NO_OUTCOME
        return EMPTY_ARM if (self.arms[:, 0] == 0.0).any() or not np.isfinite(self.first).all() else ""

    def by_cluster(self, state: State, scores: Floats) -> tuple[Floats, dict[str, Array]]:
        """Sum scores of rows (n, q) by cluster, and declare it; with the number of ``clusters``."""
        if self.clusters == BY_SITE:
            return scores.sum(axis=0, keepdims=True), {}
        code = self.codes(self.clusters)
        state.report(facts.ClusterProducts(self.shared_columns(code), self.clusters))
        count = int(code.max()) + 1
        found = np.array([np.bincount(code, column, count) for column in scores.T]).T
        return found, {"clusters": np.array(float(count))}

    # -- balance ---------------------------------------------------------------------------------

    def arm_weights(self, rows: ArmRows, own: Floats) -> Floats:
        """Return the weights of rows in each arm, (m, 2 J): of sampling, and with those of the estimand."""
        inside = (rows.arm[:, None] == np.arange(len(self.levels))) * rows.weight[:, None]
        w = self.equations.weights(self.predictors(rows, own), rows.arm)[0]
        return np.column_stack([inside, inside * w[:, None]])

    def probability_counts(self, own: Floats) -> Floats:
        """Count rows by arm, and by interval of the probability of each arm but the first, (J - 1, J, B)."""
        J, least = len(self.levels), self.data.policy.min_level_count
        parts = [(self.predictors(rows, own), rows.arm) for rows in self.chunks()]
        arm = np.concatenate([one for _, one in parts])
        eta = np.concatenate([one for one, _ in parts])[:, self.equations.groups[0]]
        E = arm_probabilities(eta, self.request.link)
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

    def fit_own(self) -> tuple[dict[str, Array], str]:
        """Solve the equations of the site's rows: ``beta`` (J,) and ``cov`` (J, J), zero without a fit."""
        arrays: dict[str, Array] = {name: np.zeros(shape) for name, shape in self.own_shapes.items()}
        # The site's own effect is that in its own rows.
        here = self.of(self.opened, replace(self.request, target=""), self.n, self.levels)
        chain, own, problem, known = here.chain, here.first, here.lacks(), here.known
        for stage in chain.equations.stages:
            if not problem:
                own, _, problem = here.at(stage).maximized(own, known & chain.of_stage(stage))
        if problem:
            return arrays, problem
        A, B = np.zeros((len(own), len(own))), np.zeros((len(own), len(own)))
        for X, _, g, H in here.at(ALL).rows_at(own):
            A, B = A + chain.derivative(X, H), B + chain.products(X, g)
        try:
            V = sandwich(A[np.ix_(known, known)], B[np.ix_(known, known)])
        except EstimationError:
            return arrays, self.unbounded
        J = len(self.levels)
        return {"beta": own[-J:], "cov": V[-J:, -J:]}, ""


def both_ways(p: Floats) -> Floats:
    """Return the probabilities (m, 2) of two outcomes from those of one."""
    return np.column_stack([p, 1.0 - p])


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
        site = self.site.at(stage)
        columns = [self.rows.X[:, one] for one in site.chain.columns]
        return [term for _, term in site.terms_of(self.rows, np.frombuffer(own), columns)]

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Return the weights of rows in the sums at points, (m, k)."""
        return np.column_stack(
            [self.site.at(stage).vectors_of(self.rows, np.frombuffer(own)) for own, stage in points]
        )

    def every(self, first: int, step: int) -> TreatmentBlock:
        """Return every n-th row, from the first on."""
        return replace(self, rows=self.rows.part(slice(first, None, step)))


enter_start(SiteTreatment)


@step(
    FAMILY,
    "start fit_alone sum_scores",
    takes={**STANDARDIZED, "stage": control("stage of the chain", 0)},
    releases=releases_of(SiteTreatment),
)
def sum_scores(data: SiteData, state: State, stage: Array, **point: Floats) -> dict[str, Array]:
    """Sum the equations of a stage over the rows: models of weights, outcome models, means, or all.

    Released are ``score`` (q,), ``information`` (q, q), minus the derivative of the score, and ``loglik``.
    ``spread`` is false, and all else zero, if few rows have nearly all weight at these parameters.
    """
    if not PROPENSITY <= int(stage) <= ALL:
        raise MessageError(f"{data.name}: there is no stage {int(stage)} of the chain")
    site = rows_in(state, SiteTreatment).at(int(stage))
    return scores_at(state, site, site.place(**point))


@step(
    FAMILY,
    "sum_scores",
    takes=STANDARDIZED,
    releases={
        "products": summed("outer products of the estimating functions of rows or clusters", 2),
        "clusters": CLUSTERS,
        "spread": summed("sums of weights, their squares and fourth powers, by arm", 2, optional=True),
    },
)
def sum_products(data: SiteData, state: State, **point: Floats) -> dict[str, Array]:
    """Sum outer products of the estimating functions of rows, or of clusters: ``products`` (q, q).

    Released are also the number of ``clusters``, and the ``spread`` (J, 3) of weights.
    """
    site = rows_in(state, SiteTreatment).at(ALL)
    own, C = site.place(**point)

    def flat() -> bool:
        return site.is_flat((site.predictors(rows, own), rows.arm) for rows in site.chunks())

    unsummed = SiteSums(0.0, np.zeros(0), np.zeros(0), flat=flat)
    state.report(*site.facts_at(own, unsummed), *site.products_at(own))
    arrays: dict[str, Array] = {}
    if site.request.clusters:
        scores, arrays = site.by_cluster(state, site.row_scores(own))
        total = scores.T @ scores
    else:
        total = np.sum([site.chain.products(X, g) for X, _, g, _ in site.rows_at(own)], axis=0)
    if site.equations.weighs:
        blocks = [BalanceBlock(site, rows) for rows in site.chunks()]
        at = report_arms(state, site, own, blocks)
        total_of = np.sum([spread_of(block.vectors((at,))) for block in blocks], axis=0)
        arrays["spread"] = total_of[len(site.levels) :, 1:]
    return arrays | {"products": C.T @ total @ C}


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
        return [
            facts.RowTerms(self.rows.X, W, self.rows.X),
            facts.alone(np.ones((len(W), 1)), np.hstack([W**2, W**4])),
        ]

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Return the weights of the arms at points, (m, J k)."""
        return np.column_stack([self.site.arm_weights(self.rows, np.frombuffer(own)) for own, _ in points])


def report_arms(
    state: State, site: SiteTreatment, own: Floats, blocks: Sequence[BalanceBlock]
) -> tuple[bytes, str]:
    """Report the weights of the arms at a point, and return the point of the blocks."""
    point = (own.tobytes(), BALANCE)
    state.report(
        facts.WorkingWeights(lambda: np.concatenate([one.vectors((point,)) for one in blocks]).T),
        facts.ScoreAndInformation(site.opened, site.n, point, lambda: iter(blocks), among=site.opened.places),
    )
    return point


@step(
    FAMILY,
    "sum_scores",
    takes={**STANDARDIZED, "overlap": control("whether to count probabilities", 0)},
    releases={
        "weights": summed("rows with weight, sums of weights, their squares and fourth powers, by arm", 3),
        "moments": summed("weighted sums of standardized columns and of their squares, by arm", 4),
        "counts": summed("rows by arm, and by interval of the probability of each arm", 3, optional=True),
    },
)
def sum_balance(
    data: SiteData, state: State, overlap: Array, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Compare the columns of the arms, without weights and with those of the estimand.

    Released are ``weights`` (2, J, 4); ``moments`` (2, J, 2, k), of columns standardized over all sites; and
    ``counts`` (J - 1, J, B). For the counts, each site replaces the probabilities of every few successive
    rows of an arm by their mean, so that no interval has few rows.
    """
    site = rows_in(state, SiteTreatment).at(MEANS)
    if site.equations.estimates:
        raise MessageError(f"{data.name}: the model opened an outcome; balance is examined before")
    own = site.place(shift, scale, beta).own
    blocks = [BalanceBlock(site, rows) for rows in site.chunks()]
    point = report_arms(state, site, own, blocks)
    state.report(*site.cuts(own))
    J, columns = len(site.levels), site.chain.columns[0][1:]
    weights, moments = np.zeros((2, J, 4)), np.zeros((2, J, 2, len(columns)))
    T = site.opened.scale[columns] / scale[columns]
    moved = (site.opened.shift - shift)[columns] / scale[columns]
    for block in blocks:
        W = block.vectors((point,))
        D = block.rows.X[:, columns] * T + moved
        weights += spread_of(W).reshape(2, J, 4)
        moments += np.stack([W.T @ D, W.T @ D**2], axis=1).reshape(2, J, 2, -1)
    arrays = {"weights": weights, "moments": moments}
    if overlap:
        counts = site.probability_counts(own)
        state.report(facts.ModelEvaluation(counts.ravel()))
        arrays["counts"] = counts
    return arrays
