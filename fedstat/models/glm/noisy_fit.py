"""Regression under a privacy budget over sites with different rows: plan, protocol and fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fedstat.codec import to_json
from fedstat.errors import DesignError, EstimationError, ModelError
from fedstat.federation.design.coding import BlockSpec, CodedColumns, coded_columns, plain_state
from fedstat.federation.design.horizontal_design import RowsSchema, SiteRowCounts
from fedstat.federation.design.horizontal_steps import RowsCoding
from fedstat.federation.design.site_rows import RowsRequest, design_matrix, find_complete_rows
from fedstat.federation.design.transform_states import assumed_states, needs_sums
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseShares
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.noise_shares import agree_shares, coalition_of
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.tables.table import FrameTable
from fedstat.models.copula.bounds import Bounds, IntoBound, bounds_of
from fedstat.models.copula.private_release import (
    budget_shares,
    check_delta,
    check_epsilon,
    rho_to_spend,
    row_guarantee,
)
from fedstat.models.copula.request import PooledRows
from fedstat.models.glm.noisy_newton import (
    FAMILIES,
    FamilyName,
    NoisyIteration,
    NoisyPlan,
    binary_family,
    binary_places,
    enough_rows,
    plan_rest,
    plan_steps,
)
from fedstat.models.glm.noisy_steps import NAMES, NoisySumsRequest
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.privacy.zcdp import GRID, epsilon_of_zcdp
from fedstat.typing import Floats

PUBLIC_ROWS, SEED, SPREAD = 4000, 1, 6.0
"""Rows drawn from public ranges; a range is this number of standard deviations."""
RARE = 0.05
"""Share of ones for which the price is stated as well."""
COLLINEAR = 1e-9
MONOTONE_GRID = 1001


@dataclass(frozen=True, eq=False)
class NoisyQuestion:
    """What is public of a fit: columns, bounds, coding, numbers of records, and the budget."""

    question: RowsRequest
    spec: BlockSpec
    bounds: Mapping[str, PublishedColumn]
    family: FamilyName
    records: Mapping[str, int]
    policies: Mapping[str, Policy]
    epsilon: float
    delta: float

    @cached_property
    def public(self) -> CodedColumns:
        """The design of rows that are drawn from the public ranges."""
        rng, drawn = np.random.default_rng(SEED), {}
        for name in self.question.needed:
            column, z = self.bounds[name], rng.standard_normal(PUBLIC_ROWS)
            if column.levels:
                values = np.array(column.levels, dtype=object)[
                    rng.integers(0, len(column.levels), PUBLIC_ROWS)
                ]
                drawn[name] = (
                    pd.Series(values).astype(float) if column.kind == "number" else pd.Series(values)
                )
            else:
                low, high = column.range or (0.0, 1.0)
                drawn[name] = pd.Series(np.clip(0.5 * (low + high) + (high - low) / SPREAD * z, low, high))
        try:
            return design_matrix(pd.DataFrame(drawn), self.question, self.spec, "")
        except DesignError as error:
            raise ModelError(f"bounds: within the public ranges, {error}") from error

    @cached_property
    def base(self) -> Floats:
        """Coordinates in which the drawn columns are uncorrelated, with variance one: (p, p)."""
        X = self.public.X
        values, vectors = np.linalg.eigh(X.T @ X / len(X))
        if values[0] <= COLLINEAR * values[-1]:
            raise ModelError(
                "bounds: columns of the design are collinear within their public ranges. Leave a term out"
            )
        return np.asarray(vectors / np.sqrt(values))

    @cached_property
    def response(self) -> tuple[float, float]:
        """Public range of the response."""
        if self.family == "Binomial":
            return 0.0, 1.0
        (name,) = self.question.response_columns
        column = self.bounds[name]
        values = column.levels or tuple(np.linspace(*(column.range or (0.0, 1.0)), MONOTONE_GRID).tolist())
        frame = pd.DataFrame({one: self.bounds_frame(one, len(values)) for one in self.question.needed})
        frame[name] = np.array(values, dtype=np.float64)
        site = SiteData("", FrameTable(frame), None, Policy(), ReleaseHistory())
        y = np.concatenate([rows.y for rows in find_complete_rows(site, replace(self.question, subset=()))])
        low, high = float(y.min()), float(y.max())
        if not (low < high and (self.family != "Poisson" or low >= 0.0)):
            raise ModelError(
                f"bounds: the response {self.question.response!r} needs a range of different numbers"
                + (", of zero or more for counts" if self.family == "Poisson" else "")
            )
        return low, high

    def bounds_frame(self, name: str, n: int) -> list[Any]:
        """Return one public value of a column, n times."""
        column = self.bounds[name]
        return [column.levels[0] if column.levels else (column.range or (0.0, 1.0))[0]] * n

    @property
    def rows(self) -> PooledRows:
        """The records, and how many sites may collude."""
        return PooledRows(self.records, coalition_of(self.policies))

    @property
    def noise(self) -> Fraction:
        """Variance of all shares over that which is charged."""
        return Fraction(len(self.records), self.rows.honest)

    @property
    def n(self) -> int:
        """Number of records of all sites."""
        return self.rows.n

    @cached_property
    def rho(self) -> Fraction:
        """The budget as rho."""
        return rho_to_spend(self.epsilon, self.delta)

    @property
    def cost(self) -> Fraction:
        """Charge to a site, as rho."""
        return sum((a + b for a, b in self.plan.rhos), Fraction(0))

    def guarantee(self) -> str:
        """State what is charged, and against whom it holds."""
        return row_guarantee(self.rows, self.cost, self.delta)

    def price_notes(self) -> Iterator[str]:
        """State the expected price before anything is charged."""
        plan, rare, first_round = self.plan, "", ""
        if self.family == "Binomial":
            own = binary_family(RARE, 0.0)[0]
            price = plan_rest(own, len(self.base), self.n, plan.rhos[:3], self.rho, self.noise).price
            rare = f" If only {RARE:.0%} of the responses are ones, " + (
                f"it is about {price:.2f}." if math.isfinite(price) else "these are too few records."
            )
            first = sum(plan.rhos[0], Fraction(0))
            first_round = (
                f" If the first one, epsilon {epsilon_of_zcdp(first, self.delta):.2g}, shows that too few "
                "records have the rarer response, the fit ends there, and no more is charged."
            )
        yield (
            f"Expected price: epsilon {self.epsilon:g} makes standard errors about {plan.price:.2f} times as "
            f"large at {self.n:,} records, for columns of a normal distribution.{rare} Skewed columns and "
            "wide bounds add to it."
        )
        yield (
            f"The fit takes {len(plan.rhos)} rounds of noisy sums; a repetition of the same fit is free."
            + first_round
        )
        if self.rows.honest < 2 and len(self.records) > 2:
            K = len(self.records)
            shared = plan_steps(self.family, len(self.base), self.n, self.rho, Fraction(K, K - 1))
            yield (
                "Each site adds enough noise alone. If owners set colluding = 1, the price is about "
                f"{shared.price:.2f}."
            )
        yield from budget_shares(self.policies, lambda site: self.cost)

    @cached_property
    def plan(self) -> NoisyPlan:
        """Steps, budgets and R; an EstimationError states how many rows would do."""
        p = self.public.X.shape[1]
        found = self.plan_at(self.n)
        if not math.isfinite(found.price):
            least = enough_rows(self.n, self.plan_at)
            raise EstimationError(
                f"{self.n:,} records are too few for {p} coefficients at epsilon {self.epsilon:g}, and "
                f"nothing was charged: about {least:,} records would do. Use a larger epsilon or fewer terms"
            )
        return found

    def plan_at(self, n: int) -> NoisyPlan:
        """Plan a fit of n records."""
        return plan_steps(self.family, self.public.X.shape[1], n, self.rho, self.noise)

    def too_rare(self, iteration: NoisyIteration, cost: Fraction) -> EstimationError:
        """Say that the noisy sums have shown too few records with the rarer response."""
        least = enough_rows(self.n, lambda n: iteration.plan_of(iteration.rows * n / self.n))
        rounds = "the first round" if iteration.step == 1 else f"{iteration.step} rounds"
        return EstimationError(
            f"about {min(iteration.share, 1.0 - iteration.share):.1%} of the records, or fewer, have the "
            f"rarer response: {self.n:,} are too few for {len(self.base)} coefficients at epsilon "
            f"{self.epsilon:g}, and at least {least:,} are needed. The fit ended after {rounds} of noisy "
            f"sums. Epsilon {epsilon_of_zcdp(cost, self.delta):.2g} is charged, and the other "
            f"{float(1 - cost / self.rho):.0%} of the charge of this fit, as rho, is not. "
            + " ".join(budget_shares(self.policies, lambda site: cost))
            + " A repetition is free. Use a larger epsilon or fewer terms"
        )

    def request(
        self,
        iteration: NoisyIteration,
        rhos: tuple[Fraction, Fraction],
        later: Fraction,
        shares: NoiseShares | None,
    ) -> NoisySumsRequest:
        """Return the request of the next step, which costs at most these budgets."""
        point = iteration.point
        places = binary_places(point, self.n, len(self.records))
        request = NoisySumsRequest(
            coding=RowsCoding(self.question.to_json(), self.spec.to_json()),
            bounds={name: self.bounds[name] for name in self.question.needed},
            response=self.response,
            family=self.family,
            stage=point.stage,
            transform=tuple(map(tuple, point.transform.tolist())),
            beta=tuple(point.beta.tolist()),
            scale=float(point.scale),
            squared_radius=float(point.squared_radius),
            center=point.center,
            half=point.half,
            places=places,
            variances=(1, 1),
            later=math.floor(later * GRID),
            shares=shares,
        )
        variances = [
            math.ceil(Fraction(s, 1) / (2 * rho)) if rho else 1
            for s, rho in zip(request.squared, rhos, strict=True)
        ]
        return replace(request, variances=(variances[0], variances[1]))


@dataclass(frozen=True, slots=True, eq=False)
class NoisyFit:
    """The end of the iteration: coefficients, covariances of sampling and noise, and what was charged."""

    params: Floats
    sampling: Floats
    noise: Floats
    iteration: NoisyIteration
    cost: Fraction


def run_noisy(session: RowsSession, question: NoisyQuestion) -> FitProtocol[NoisyFit]:
    """Take all steps of a plan, each from noisy sums over the sites."""
    iteration = NoisyIteration.begin(question.family, question.plan, question.base, question.response)
    shares = yield from agree_shares(question.policies, session.session)
    cost = Fraction(0)
    while not iteration.ended:
        rhos, *rest = iteration.plan.rhos[iteration.step :]
        request = question.request(iteration, rhos, sum((a + b for a, b in rest), Fraction(0)), shares)
        replies = yield session.request_all("sum_noisy_scores", {}, to_json(request))
        unit = math.ldexp(1.0, -request.places)
        sums = [add(replies, name) * unit if name in replies[0].arrays else np.zeros(0) for name in NAMES]
        of_score, of_information = (
            unit * math.sqrt(question.rows.noise_of(variance)) for variance in request.variances
        )
        iteration.take(sums[0], sums[1], (of_score, of_information))
        cost += request.costs
    if not math.isfinite(iteration.plan.price):
        raise question.too_rare(iteration, cost)
    return NoisyFit(*iteration.covariances(), iteration, cost)


# ----------------------------------------------------------------------------------------------------
# From the arguments of a fit to its results.


def noisy_question(
    model: HorizontalModel, epsilon: Any, delta: Any, bounds: Bounds | Mapping[str, IntoBound] | None
) -> NoisyQuestion:
    """Check the arguments of a fit with epsilon, and describe its columns by their public bounds."""
    spec, question = model.distribution, model.question
    own = FAMILIES.get(spec.name)
    if own is None or own.link != spec.link:
        raise ModelError(
            "epsilon: expected the families Binomial, Poisson or Gaussian with logit, log or identity link, "
            f"received {spec}"
        )
    refused = {
        "weights, an exposure or an offset": bool(question.weighted or question.offsets),
        "absorbed effects": bool(question.absorbed),
        "labels of groups: noise protects single rows, not all rows of a person or cluster": bool(
            question.labels
        ),
        "a formula without intercept": not question.intercept,
        "transforms whose state follows from the data, such as scale() or bs(df=)": needs_sums(question),
        "cbind() on the left side": question.response.startswith("cbind("),
        "imputed cells": question.imputed is not None,
    }
    for what, found in refused.items():
        if found:
            raise ModelError(f"epsilon: a fit with noise does not take {what}")
    column = model.partition.site_column
    described = dict(_bounds(model, bounds, [name for name in question.needed if name != column]))
    if column in question.needed:
        described[column] = PublishedColumn("category", levels=tuple(model.sites))
    return NoisyQuestion(
        question=question,
        spec=_coding(question, described),
        bounds=described,
        family=spec.name,  # type: ignore[arg-type]
        records={row.site: row.n_rows for row in model.agreement.sites},
        policies={name: site.policy for name, site in model.partition.sites.items()},
        epsilon=check_epsilon(epsilon),
        delta=check_delta(delta),
    )


def _bounds(
    model: HorizontalModel, bounds: Bounds | Mapping[str, IntoBound] | None, names: list[str]
) -> Mapping[str, PublishedColumn]:
    found = bounds_of(bounds, model.partition.sites.values(), names)
    if dates := [name for name, one in found.items() if one.form == "date"]:
        raise ModelError(f"bounds: column {dates[0]!r} holds dates; make a column of numbers of it")
    return found


def _coding(question: RowsRequest, bounds: Mapping[str, PublishedColumn]) -> BlockSpec:
    terms = question.read_every_term()
    kinds: dict[str, Any] = {
        name: "category" if bounds[name].kind == "category" else "number" for name in question.columns
    }
    levels = {name: bounds[name].levels for name in coded_columns(terms, kinds)}
    if lacking := [name for name, found in levels.items() if not found]:
        raise ModelError(
            f"bounds: column {lacking[0]!r} is a category in the formula, and needs a list of its levels"
        )
    return BlockSpec(
        terms=question.every_term,
        columns=question.columns,
        intercept=question.intercept,
        kinds=kinds,
        levels=levels,
        state=plain_state(assumed_states(question)),
    )


def public_agreement(model: HorizontalModel) -> RowsSchema:
    """Return the rows of sites with a budget, which report no levels, and no number of complete rows."""
    question = model.question
    counts = tuple(SiteRowCounts(name, n, n) for name, n in records_of(model).items())
    spec = BlockSpec(terms=question.every_term, columns=question.columns, intercept=question.intercept)
    return RowsSchema(question, spec, counts)


def records_of(model: HorizontalModel) -> dict[str, int]:
    """Return the public numbers of records."""
    return {name: len(model.partition.rows[name]) for name in model.partition.sites}


NOT_CONVERGED = (
    "the noise is too large for this model: the last step is long, the spread of the residuals is not "
    "settled, or a direction of the columns is lost in noise. Standard errors may be too small. Use a larger "
    "epsilon, narrower bounds or fewer terms"
)
NARROW, WIDE, EDGE = 0.72, 0.1, 0.9
"""Deviation and distance of the mean from the middle, over half of a range, from which bounds are doubted.

A column of zeros and ones may have the range (0, 1).
"""


def bounds_warnings(question: NoisyQuestion, fit: NoisyFit) -> Iterator[str]:
    """State which ranges do not suit the released means and deviations of their columns."""
    assert fit.iteration.moments is not None
    names = ("Intercept", *question.public.names)
    for name, mean, spread in zip(names, *fit.iteration.moments, strict=True):
        column = question.bounds.get(name)
        low, high = (0.0, 1.0) if column is None or column.range is None else column.range
        if column is None or column.levels or (low, high) == (0.0, 1.0):
            continue
        half = 0.5 * (high - low)
        if spread > NARROW * half or abs(mean - 0.5 * (low + high)) > EDGE * half:
            yield (
                f"bounds: column {name!r} has mean {mean:.3g} and standard deviation {spread:.3g} within "
                f"({low:g}, {high:g}): many values are probably cut to the ends. Use a wider range; the "
                "charge for this fit remains"
            )
        elif spread < WIDE * half:
            yield (
                f"bounds: column {name!r} has standard deviation {spread:.3g} within ({low:g}, {high:g}). A "
                "narrower range has less noise; the charge for this fit remains"
            )
