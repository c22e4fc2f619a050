"""Protocol of a private GLM: release of moments, then one step on the score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations
from typing import Any, TypeVar

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError, Remedy, SecurityError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.noise_shares import agree_shares
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula.margins import CLEAR, Bins, Margin
from fedstat.models.copula.protocol import (
    FEWEST,
    counts_of,
    margins_of,
    of_one_run,
    plan_columns,
    request_margins,
    request_participation,
    request_products,
    sum_margins,
    sum_products,
)
from fedstat.models.copula.request import ALL, PooledRows
from fedstat.models.copula_glm.design import ScoredColumn, ScoredDesign, ScoredResponse
from fedstat.models.copula_glm.estimation import MomentFit, estimate
from fedstat.models.copula_glm.released_distribution import (
    MomentRelease,
    ReleaseNoise,
    normal_points,
    unweighted,
)
from fedstat.models.copula_glm.request import (
    PHASES,
    FamilyName,
    MomentPlan,
    ScoreNoise,
    ScoreStepRequest,
    ScoreTerms,
)
from fedstat.models.copula_glm.score import ScoreStep, plan_score, take_step
from fedstat.models.copula_glm.steps import FIRST, SECOND
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The release of a private generalized linear model: complete entities, margins, products of scores.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MomentReleasePlan:
    """Content of the release: public descriptions of columns by site, their scores, the response.

    The response is the last of the data columns of its `holder`. `rho` is the budget of the moments,
    `of_step` that of a step on the score. With `rows` the columns are those of all sites together.
    """

    bounds: Mapping[str, Mapping[str, PublishedColumn]]
    design: Mapping[str, tuple[ScoredColumn, ...]]
    holder: str
    response: FamilyName
    rho: Fraction
    of_step: Fraction = Fraction(0)
    rows: PooledRows | None = None

    def plan(self, counts: Mapping[str, int]) -> MomentPlan:
        """Plan the noise for this number of complete entities at each site."""
        found = plan_columns(self.bounds, counts, self.rho)
        design = {site: self.design.get(site, ()) for site in self.bounds}
        return MomentPlan(
            found.rho, found.columns, design, self.holder, self.response, self.of_step, rows=self.rows
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedMoments:
    """The release of `n` complete entities, its noise, and the plan behind the request.

    `entities` are the complete ones of each site, `records` all of its records, `known` the entities with a
    record at any site, and `used` positions of those of the fit among all.
    """

    plan: MomentPlan
    design: ScoredDesign
    release: MomentRelease
    noise: ReleaseNoise
    n: int
    entities: Mapping[str, int]
    records: Mapping[str, int]
    known: int
    used: Mapping[str, Ints]

    @property
    def margins(self) -> tuple[list[Margin], list[str], list[float]]:
        """Margins of the columns and the response, the site of each, and the noise on its shares."""
        margins, holder = [*self.release.margins, self.release.response.margin], self.plan.holder
        sites = [site for site in self.design.sites for _ in self.plan.columns[site]]
        if holder in sites:  # its last column is the response
            sites.remove(holder)
        noise = [*self.noise.counts.tolist(), self.noise.response]
        return margins, [*sites, holder], [sd / self.n for sd in noise]

    @property
    def incomplete(self) -> dict[str, int]:
        """Records of each site that lack a value."""
        return {site: self.records[site] - n for site, n in self.entities.items() if self.records[site] > n}

    @property
    def absent(self) -> dict[str, int]:
        """Entities of other sites without a record at each site."""
        return {site: self.known - n for site, n in self.records.items() if self.known > n}


def release_moments(
    requester: SecureProductSession,
    question: MomentReleasePlan,
    rows: Mapping[str, Ints],
    sites: Sequence[str],
    n_entities: int,
) -> FitProtocol[ReleasedMoments]:
    """Request all inputs of the estimator, for the entities that are complete at every site.

    `rows` are positions of each site's records among all entities, `sites` those that may deal random
    numbers.
    """
    clients = list(question.bounds)
    request = {site: to_json(tuple(question.bounds[site])) for site in clients}
    found = yield from request_participation(requester, request, rows, n_entities)
    entities = {site: found.count(site) for site in clients}
    require_complete(found.table(clients), clients, question.holder)
    used, present = found.everywhere()
    n = int(np.count_nonzero(used))
    plan = question.plan(dict.fromkeys(clients, n))
    margins = yield from request_margins(requester, plan, present, plan.site_cost)
    products, noise = yield from request_products(requester, plan, present, margins, sites)
    return _released(
        plan,
        margins,
        (products, noise),
        n,
        entities=entities,
        records={site: len(rows[site]) for site in clients},
        known=len(np.unique(np.concatenate([rows[site] for site in clients]))),
        used={site: rows[site][present.seen[site]] for site in clients},
    )


def release_row_moments(
    requester: SecureProductSession, question: MomentReleasePlan, policies: Mapping[str, Policy]
) -> FitProtocol[ReleasedMoments]:
    """Request all inputs of the estimator, for the complete rows of sites with different rows."""
    rows = question.rows
    assert rows is not None
    plan = question.plan({ALL: rows.n})
    n, margins, products = yield from release_complete_rows(requester, plan, policies)
    noise = np.full_like(products, plan.product_deviation(1))
    records = {ALL: rows.n}
    return _released(
        plan, {ALL: margins}, (products, noise), n, entities={ALL: n}, records=records, known=rows.n, used={}
    )


def release_complete_rows(
    requester: SecureProductSession, plan: MomentPlan, policies: Mapping[str, Policy]
) -> FitProtocol[tuple[int, list[Margin], Floats]]:
    """Request margins and sums of products (q, q) over complete rows; return how many there are as well."""
    assert plan.rows is not None
    shares = yield from agree_shares(policies, requester.session)
    counts = yield from sum_margins(requester, plan, shares)
    n = count_complete(plan, counts)
    margins = margins_of(plan, ALL, counts, plan.rows.n)
    products = yield from sum_products(requester, plan, shares, margins)
    return n, margins, products


def count_complete(plan: MomentPlan, counts: Mapping[str, Array]) -> int:
    """Return about how many rows are complete: all, unless the counts of others exceed their noise.

    Every column has the count of the others among its own counts, with independent noise.
    """
    assert plan.rows is not None
    found = np.array([count[-1] for _, count in counts_of(plan, ALL, counts)])
    weights = np.array([plan.count_deviation(ALL, j) ** -2.0 for j in range(len(found))])
    missing = float(found @ weights / weights.sum())
    if missing <= CLEAR / math.sqrt(weights.sum()):
        return plan.rows.n
    n = plan.rows.n - round(missing)
    if n < FEWEST:
        raise EstimationError(
            f"about {max(n, 0):,} of {plan.rows.n:,} rows are complete by the noisy counts, but at least "
            f"{FEWEST} are needed. The charge for the margins remains"
        )
    return n


def _released(
    plan: MomentPlan,
    margins: Mapping[str, Sequence[Margin]],
    sums: tuple[Floats, Floats],
    n: int,
    **counts: Any,
) -> ReleasedMoments:
    """Collect what was released of n entities: sums of products (q, q) with the deviations of their noise."""
    # The response is last in the row of its holder; here it is the last of all.
    products, noise = sums
    last = plan.places()[plan.holder].stop - 1
    order = np.append(np.delete(np.arange(len(products)), last), last)
    *of_columns, y = _in_order(margins, plan.holder)
    response = ScoredResponse(plan.response, y)
    deviations = {c: [plan.count_deviation(c, j) for j in range(len(own))] for c, own in plan.columns.items()}
    *of_counts, of_response = _in_order(deviations, plan.holder)
    here = np.ix_(order, order)
    return ReleasedMoments(
        plan=plan,
        design=complete_design(plan),
        release=MomentRelease(
            tuple(of_columns),
            response,
            unweighted(products[here] / n, plan.response),
            (noise[here] / n)[:-1, :-1],
        ),
        noise=ReleaseNoise(np.array(of_counts), float(of_response), noise[here] / n),
        n=n,
        **counts,
    )


def require_complete(table: Bools, sites: Sequence[str], holder: str) -> None:
    """Require enough entities that every site has, (n, K) of bool; the error names a site to leave out."""
    n = int(np.count_nonzero(table.all(axis=1)))
    if n >= FEWEST:
        return
    others = {
        site: int(np.count_nonzero(np.delete(table, k, axis=1).all(axis=1)))
        for k, site in enumerate(sites)
        if site != holder
    }
    best = max(others, key=others.__getitem__, default="")
    without = (
        f". Leave out the columns of '{best}', without which {others[best]:,} are complete"
        if best and others[best] >= FEWEST
        else ""
    )
    raise EstimationError(
        f"{n:,} entities are complete at every site of the formula, but at least {FEWEST} are "
        f"needed{without}",
        remedy=Remedy(
            "CopulaSynthesizer(partition, epsilon=epsilon, bounds=bounds, missing='pairs').fit()",
            "Tables of {call} use every entity that two sites have; a model can be fitted to these",
        ),
    )


def complete_design(plan: MomentPlan) -> ScoredDesign:
    """Concatenate the columns of all participating sites."""
    sites = [site for site, columns in plan.design.items() if columns]
    bins: list[Bins] = []
    columns: list[ScoredColumn] = []
    first = 0
    for site in sites:
        own = plan.columns[site][: len(plan.columns[site]) - (site == plan.holder)]
        columns += [replace(column, source=first + column.source) for column in plan.design[site]]
        bins += own
        first += len(own)
    return ScoredDesign(tuple(bins), tuple(columns), tuple(sites))


def _in_order(held: Mapping[str, Sequence[T]], holder: str) -> list[T]:
    """Collect the sites' values of each data column, with that of the response last."""
    *own, last = held[holder]
    return [*chain.from_iterable(own if site == holder else some for site, some in held.items()), last]


# ----------------------------------------------------------------------------------------------------
# A step on the score, round by round: powers of the linear predictor, residuals, sums with noise.

FAR = 20.0
"""Deviations of noise beyond which shares are inconsistent."""


def release_score(
    requester: SecureProductSession,
    released: ReleasedMoments,
    fit: MomentFit,
    rho: Fraction,
    sites: Sequence[str],
) -> FitProtocol[ScoreStep]:
    """Request the sums of scores times residuals at the estimate, for the rows of the earlier release."""
    moments, n = released.plan, released.n
    clients = tuple(moments.columns)
    widths = tuple(len(moments.design[site]) for site in clients)
    radii = [float(moments.radius(c)) for c in clients]
    request = plan_score(fit, moments.holder, n, math.sqrt(1.0 + sum(radii)))
    terms = ScoreTerms(clients, widths, moments.holder, request.mean)
    plan = ScoreNoise(terms, rho)
    slopes = dict(zip(fit.distribution.design.sites, fit.distribution.design.blocks, strict=True))
    steps = {
        site: to_json(
            ScoreStepRequest(
                terms=terms,
                site=site,
                columns=moments.design[site],
                coefficients=tuple(request.params[1:][slopes[site]].tolist()) if site in slopes else (),
                middle=request.middles[site],
                variance=plan.variances[site],
            )
        )
        for site in clients
    }
    replies = yield [requester.request(site, "recall_score", text) for site, text in steps.items()]
    if of_one_run(replies):
        shares = np.array([reply.arrays["sums"] for reply in replies])
    else:
        yield [requester.request(site, "begin_score", text) for site, text in steps.items()]
        if len(clients) > 1:
            for phase in PHASES[terms.mean.degree]:
                yield from _multiply(requester, terms, phase, released.used, sites)
        replies = yield [requester.request(site, "release_score") for site in clients]
        shares = np.array([next(iter(reply.arrays.values())) for reply in replies])
    sums = np.ldexp(shares.sum(axis=0).astype(np.float64), -terms.sum_places)
    largest = max(map(abs, terms.mean.range)) + max(map(abs, terms.mean.responses))
    if (np.abs(sums) > n * terms.length * largest + FAR * plan.deviation).any():
        raise SecurityError(
            "the shares of the sums of residuals do not match: the dealer's numbers or a share are wrong. "
            "None of it is used"
        )
    # Intercept first, then columns in the order of the distribution; some sites have no columns.
    places = [np.arange(terms.size)[place] for place in terms.places.values()]
    first = next(p for c, p in zip(clients, places, strict=True) if c == moments.holder)[0]
    order = np.concatenate([[first], *(p[p != first] for p in places)]).astype(np.int64)
    return take_step(fit, request, sums[order], n, plan.deviation)


def _multiply(
    requester: SecureProductSession,
    terms: ScoreTerms,
    phase: str,
    used: Mapping[str, Ints],
    sites: Sequence[str],
) -> FitProtocol[None]:
    """Let every two sites multiply, entity by entity or summed over all."""
    n = len(next(iter(used.values())))
    groups = 1 if phase == "score" else n
    code = np.zeros(n, dtype=np.int64) if groups == 1 else np.arange(n)

    def side(site: str, which: str) -> ProductOperand:
        columns = {"power": 1, "square": 2, "score": terms.width(site) + 1}[phase]
        return ProductOperand(site, f"{phase} {which}", slice(0, columns), used[site], code)

    pairs = [(side(a, FIRST), side(b, SECOND)) for a, b in combinations(terms.sites, 2)]
    agreed = f"{terms.agreed}{phase} "
    yield from requester.keep_shares(pairs, sites, groups, terms.mean.bits, agreed, "take_product")


# ----------------------------------------------------------------------------------------------------
# A private generalized linear model, round by round: moments, and a step on the score from there.

SEED = 1
"""Seed of the integration points."""


@dataclass(frozen=True, slots=True, eq=False)
class PrivateFit:
    """The release, the estimate from it, and the step from there, if any."""

    released: ReleasedMoments
    fit: MomentFit
    step: ScoreStep | None


def fit_private(
    requester: SecureProductSession,
    question: MomentReleasePlan,
    release: FitProtocol[ReleasedMoments],
    sites: Sequence[str],
    regardless: bool,
) -> FitProtocol[PrivateFit]:
    """Request the moments, estimate, and take a step if there is a budget for one and a valid start.

    With `regardless` the step is always requested: a dry run's synthetic numbers must not affect the
    protocol.
    """
    released = yield from release
    fit = estimate(released.design, released.release, normal_points(len(released.design.bins), SEED))
    if not question.of_step or not (fit.root.converged or regardless):
        return PrivateFit(released, fit, None)
    step = yield from release_score(requester, released, fit, question.of_step, sites)
    return PrivateFit(released, fit, step if fit.root.converged else None)
