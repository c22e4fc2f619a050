"""Private boosting: the noisy release of all products, and a path on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from scipy.linalg import block_diag
from scipy.stats import chi2

from fedstat.codec import to_json
from fedstat.errors import EstimationError
from fedstat.federation.message import Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.boost.learning.boosting import Boosting, BoostPath, run_path
from fedstat.models.boost.learning.moments import CurveSums
from fedstat.models.boost.learning.prepared_learners import PreparedLearners
from fedstat.models.boost.private.steps import CurvesPlan
from fedstat.models.copula.protocol import (
    FEWEST,
    SumsByGroup,
    combine_sums,
    gather_sums,
    of_one_run,
    repeated_products,
    request_participation,
)
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Boosting on sums with noise: positive eigenvalues, a ridge, and a stop when noise may explain the gain.

FLOOR = 0.05
"""Least eigenvalue of the products of columns, as a share of the entities."""
RIDGE = 0.1
"""Least ridge of a learner, as a share of the entities."""
PURE_NOISE = 1.5
"""Factor by which the gain of a step has to exceed the expected gain from noise alone."""
ENTRY = 0.05
"""Probability that noise alone allows any step."""


@dataclass(frozen=True, slots=True, eq=False)
class NoisySums:
    """Sums over `n` entities of products of the columns of learners, and with the response, with noise.

    `S` (K, K) and `T` (K, L) are of scores with about unit variance, where the first is a one; `yy` is the
    sum of squares of the response's scores. `sd` is the deviation of the noise on products of the learners'
    columns at one site, `sd_response` (P,) that of each learner's products with the response. `starts` (P +
    1,) are positions, and `owners` (P,) number the sites.
    """

    n: int
    S: Annotated[Floats, "k k"]
    T: Annotated[Floats, "k l"]
    yy: float
    sd: float
    sd_response: Annotated[Floats, "p"]
    starts: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def lifted(self) -> Floats:
        """Products of columns with positive eigenvalues."""
        return make_positive_definite(self.S, FLOOR * self.n)

    @property
    def df(self) -> Floats:
        """Degrees of freedom of each learner's fit, (P,)."""
        S, out = self.lifted, []
        for (lo, hi), ridge in zip(pairwise(self.starts), self.ridges, strict=True):
            values = np.linalg.eigvalsh(S[lo:hi, lo:hi])
            h = values / (values + ridge)
            out.append(self.T.shape[1] * float((2.0 * h - h**2).sum()))
        return np.array(out)

    def rsquared(self, coef: Floats) -> float:
        """Return the share of the response's squares that coefficients (K, L) explain, by these sums."""
        S = self.lifted
        return float((2.0 * (coef * self.T).sum() - (coef * (S @ coef)).sum()) / self.yy)

    def drawn(self, coef: Floats, times: float, random: np.random.Generator) -> tuple[NoisySums, NoisySums]:
        """Use a fit as the truth: return its sums, and these with noise multiplied by a factor."""
        S = self.lifted
        truth = replace(self, S=S, T=S @ coef)
        place = np.repeat(np.arange(len(self.owners)), np.diff(self.starts))
        own = np.array(self.owners)[place]
        alone = (own[:, None] == own) | (place == 0) | (place == 0)[:, None]
        E = np.triu(random.normal(size=S.shape)) * np.where(alone, 1.0, np.sqrt(2.0)) * self.sd * times
        E[0, 0] = 0.0
        E_T = random.normal(size=self.T.shape) * self.sd_response[place][:, None] * times
        noisy = replace(
            truth,
            S=S + E + np.triu(E, 1).T,
            T=truth.T + E_T,
            sd=times * self.sd,
            sd_response=times * self.sd_response,
        )
        return truth, noisy

    @property
    def noise_gains(self) -> tuple[Floats, ...]:
        """Gain of each learner from noise alone, by direction: factors of independent chi-squared variables.

        Each direction counts once per column of the response.
        """
        S, out = self.lifted, []
        for (lo, hi), ridge, sd in zip(pairwise(self.starts), self.ridges, self.sd_response, strict=True):
            values = np.linalg.eigvalsh(S[lo:hi, lo:hi])
            h = values / (values + ridge)
            out.append(sd**2 * h * (2.0 - h) / values)
        return tuple(out)

    @property
    def thresholds(self) -> Floats:
        """Gain that each learner's step has to exceed, (P,)."""
        return np.array([PURE_NOISE * self.T.shape[1] * w.sum() for w in self.noise_gains])

    @property
    def entry(self) -> Floats:
        """Gain of each learner, (P,), that noise alone brings any of them to with probability ENTRY.

        Sums of chi-squared variables are approximated by their first two moments (Satterthwaite 1946).
        """
        L, P = self.T.shape[1], len(self.owners)
        out = []
        for w in self.noise_gains:
            mean, variance = L * w.sum(), 2.0 * L * (w * w).sum()
            if variance:
                quantile = chi2.isf(ENTRY / P, 2.0 * mean**2 / variance)
                out.append(float(variance / (2.0 * mean) * quantile))
            else:
                out.append(0.0)
        return np.array(out)

    @property
    def ridges(self) -> Floats:
        """Ridge of each learner, (P,)."""
        return np.maximum(RIDGE * self.n, 2.0 * self.sd * np.sqrt(np.diff(self.starts)))


def make_positive_definite(S: Floats, least: float) -> Floats:
    """Raise the eigenvalues of a symmetric matrix to `least`, since noise may have made some negative."""
    values, U = np.linalg.eigh(S)
    return np.asarray((U * np.maximum(values, least)) @ U.T)


def prepare_noisy(sums: NoisySums) -> PreparedLearners:
    """Prepare learners, each with a ridge, for a path on noisy sums."""
    S = sums.lifted
    turns, shrunk = [], []
    for (lo, hi), ridge in zip(pairwise(sums.starts), sums.ridges, strict=True):
        values, U = np.linalg.eigh(S[lo:hi, lo:hi])
        turns.append(U / np.sqrt(values))
        shrunk.append(np.repeat((values / (values + ridge))[:, None], sums.T.shape[1], axis=1))
    H, starts = np.concatenate(shrunk), np.array(sums.starts, dtype=np.int64)
    df = tuple(sums.df.tolist())
    return PreparedLearners(block_diag(*turns), np.eye(sums.T.shape[1]), starts, (H,), df, full=False)


def run_noisy_path(sums: NoisySums, steps: int, nu: float) -> BoostPath:
    """Take at most this number of steps; stop before the first that gains less than 1.5 times the noise's.

    No step is taken if no learner gains more than noise alone gains in one of twenty releases.
    """
    S, ready = sums.lifted, prepare_noisy(sums)
    moments = CurveSums(S, sums.T, np.zeros((0, 0)), np.zeros(0), sums.yy)
    path = run_path(ready, moments, steps, nu)
    m = _steps_above(ready, S, sums, path.selected.tolist(), nu)
    if m < steps:
        path = run_path(ready, moments, max(m, 1), nu)
    return (
        path if m else BoostPath(path.selected[:0], path.risk[:0], path.risk_test[:0], np.zeros_like(sums.T))
    )


def _steps_above(
    ready: PreparedLearners, S: Floats, sums: NoisySums, selected: Sequence[int], nu: float
) -> int:
    """Count the steps before the first whose gain is below its learner's threshold.

    The number is zero if no learner gains more at the start than noise alone could.
    """
    (H,), L = ready.fit, ready.L
    S, T, thresholds = L.T @ S @ L, L.T @ sums.T, sums.thresholds
    weights = H * (2.0 - H)
    if (np.add.reduceat((T * T * weights).sum(axis=1), sums.starts[:-1]) < sums.entry).all():
        return 0
    for m, p in enumerate(selected):
        own = slice(sums.starts[p], sums.starts[p + 1])
        if float((T[own] ** 2 * weights[own]).sum()) < thresholds[p]:
            return m
        T = T - nu * S[:, own] @ (T[own] * H[own])
    return len(selected)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NoisyBoosting(Boosting):
    """Boosting of sums of products of scores with noise; the offset is the public mean of the response.

    `sd`, `sd_response` (P,) and `owners` (P,) are those of :class:`NoisySums`.
    """

    sd: float
    sd_response: Annotated[Floats, "p"]
    owners: tuple[int, ...]

    @property
    def sums(self) -> NoisySums:
        """The sums with their noise."""
        total = self.even.total
        return NoisySums(
            n=round(total.n),
            S=total.S,
            T=total.T,
            yy=float(total.yy),
            sd=self.sd,
            sd_response=self.sd_response,
            starts=self.design.starts,
            owners=self.owners,
        )

    @property
    def total_squares(self) -> float:
        """Squares of the response's scores, with noise."""
        return self.sums.yy

    def start_risk(self) -> float:
        """Loss at the public mean."""
        return self.sums.yy

    def over(self, folds: Any, steps: int, test: Any = None) -> tuple[PreparedLearners, BoostPath]:
        """Compute the path up to the step that noise may explain."""
        return prepare_noisy(self.sums), run_noisy_path(self.sums, steps, self.nu)


# ----------------------------------------------------------------------------------------------------
# The release behind a private boosting: complete entities, then all products with noise, once.


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedCurves:
    """Sums over `n` entities that are complete at all sites; `entities` are the complete ones of each site.

    `products` (q + 1, q + 1) of (1, u) in the order of the sites, with noise; the response is not weighted.
    """

    plan: CurvesPlan
    products: Floats
    n: int
    entities: Mapping[str, int]


def release_curves(
    requester: SecureProductSession,
    plan: CurvesPlan,
    rows: Mapping[str, Ints],
    sites: Sequence[str],
    n_entities: int,
) -> FitProtocol[ReleasedCurves]:
    """Request all inputs of boosting; `rows` are positions among all entities, `sites` may deal."""
    clients = list(plan.parts)
    request = {site: to_json(plan.parts[site]) for site in clients}
    found = yield from request_participation(requester, request, rows, n_entities)
    entities = {site: found.count(site) for site in clients}
    used, present = found.everywhere()
    n = int(np.count_nonzero(used))
    if n < FEWEST:
        raise EstimationError(
            f"fewer than {FEWEST} entities are complete at all of {', '.join(clients)}: {n:,}. Leave "
            f"out one of them"
        )
    group = {site: np.where(present.seen[site], 0, -1) for site in clients}
    requests = {site: plan.gram_requested(site, 1) for site in clients}

    def requested(step: str) -> list[Request]:
        return [requester.request(site, step, to_json(requests[site]), group=group[site]) for site in clients]

    replies = yield requested("recall_gram")
    if of_one_run(replies):
        sums = combine_sums(plan, requests, replies, repeated_products(plan, requests, replies), present)
    else:
        replies = yield requested("release_gram")
        sums = yield from gather_sums(requester, plan, requests, replies, group, present, sites)
    return ReleasedCurves(plan, _products(plan, sums, n), n, entities)


def _products(plan: CurvesPlan, sums: SumsByGroup, n: int) -> Floats:
    """Products of (1, u), with the weight of the response removed."""
    products, totals = sums.products[0].copy(), sums.totals[0]
    np.fill_diagonal(products, sums.squares[0])
    out = np.block([[np.full((1, 1), float(n)), totals[None, :]], [totals[:, None], products]])
    scale = np.append(1.0, np.where(plan.is_response(), 1.0 / plan.weight, 1.0))
    return np.asarray(out * np.outer(scale, scale))


def sort_sums(released: ReleasedCurves, owners: Sequence[str], widths: Sequence[int]) -> NoisySums:
    """Order products into those of learners, the intercept first, and of the response.

    `owners` (P,) and `widths` (P,) belong to the learners in the order of the formula; each site's own
    products are in this order.
    """
    plan, first = released.plan, {k: place.start + 1 for k, place in released.plan.places().items()}
    columns = [0]
    for site, width in list(zip(owners, widths, strict=True))[1:]:
        columns += range(first[site], first[site] + width)
        first[site] += width
    response = np.flatnonzero(plan.is_response()) + 1
    K = np.array(columns)
    Q = released.products[np.ix_(response, response)]
    shares = np.array([1.0 if owner == plan.holder else 2.0 for owner in owners])
    return NoisySums(
        n=released.n,
        S=released.products[np.ix_(K, K)],
        T=released.products[np.ix_(K, response)],
        yy=float(np.trace(Q)),
        sd=plan.deviation,
        sd_response=np.sqrt(shares) * plan.deviation / plan.weight,
        starts=tuple(np.cumsum([0, *widths]).tolist()),
        owners=tuple(list(plan.parts).index(owner) for owner in owners),
    )
