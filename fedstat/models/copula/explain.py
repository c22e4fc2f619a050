"""Dry run of a synthesis: privacy cost by site, noise, and utility."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.kernels.copula import expand_steps
from fedstat.models.copula.correlation import METHODS, SummedPatterns, choose_groups, describe_choice
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.protocol import CopulaFit
from fedstat.models.copula.request import GramPlan, NoisePlan
from fedstat.models.explain import ForecastPlan
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget
from fedstat.typing import Bools, Floats

MOST_JOINED = 3
LARGE = 0.1
"""Noise of a correlation above which little can be said."""


@dataclass(frozen=True, slots=True)
class PredictedNoise:
    """Deviations of the noise on correlations near zero: of one institution, of two, of the worst two.

    `n` are the entities behind the usual two.
    """

    own: float
    cross: float
    worst: float
    n: int

    @classmethod
    def of(cls, groups: SummedPatterns, table: Bools) -> PredictedNoise:
        """Predict them from who has whom, (n, K), with even margins."""
        columns = groups.plan.columns
        inverse = np.array([_slope(one) ** -2.0 for bins in columns.values() for one in bins])
        # Mean over pairs of different columns of 1 / (c_j c_l)^2, as errors of pairs are squared.
        spread = (inverse.sum() ** 2 - (inverse**2).sum()) / max(len(inverse) * (len(inverse) - 1), 1)
        behind = groups.behind(table)
        each = math.sqrt(spread) * groups.noise(table) / np.maximum(behind, 1)
        K = len(behind)
        cross = math.sqrt(2.0) * each[np.triu_indices(K, 1)] if K > 1 else np.diag(each)
        counts = behind[np.triu_indices(K, min(K - 1, 1))]
        own = float(np.median(np.diag(each)))
        return cls(own, float(np.median(cross)), float(cross.max()), int(np.median(counts)))


def _slope(bins: Bins) -> float:
    """First Hermite coefficient of the scores of a column whose bins are equally probable."""
    F = np.arange(bins.count + 1) / bins.count
    return float(expand_steps(np.asarray(ndtri(F)), math.sqrt(3.0) * (F[:-1] + F[1:] - 1.0), 1)[0])


def noise_statements(noise: PredictedNoise) -> Iterator[str]:
    """Say how large the noise on correlations will be."""
    worst = "" if noise.worst < 1.5 * noise.cross else f" (up to {noise.worst:.2g})"
    yield (
        f"Noise on a correlation near 0: about {noise.own:.2g} within an institution and {noise.cross:.2g}"
        f"{worst} between two, with columns of even margins; sampling adds "
        f"{1 / math.sqrt(max(noise.n, 1)):.2g} at the {noise.n:,} entities of the usual two."
    )


def large_noise(plan: NoisePlan, cross: float, n: int, epsilon: float, delta: float) -> Iterator[str]:
    """Say what would do where noise is too large for anything to be told."""
    if not math.isfinite(cross):
        yield (
            "Noise is larger than anything that could be told of some column: its margin has one value with "
            "noise taken off. A larger epsilon or more entities would do, or fewer columns."
        )
    elif cross > LARGE:
        factor = cross / LARGE
        yield (
            f"Noise on correlations is {cross:.2g} or so, more than {LARGE}: few will be told from 0. About "
            f"{math.ceil(n * factor):,} entities would do at epsilon {epsilon:g}, or an epsilon of about "
            f"{_enough(plan, factor, delta):.2g} at {n:,}; fewer columns need less."
        )


def _enough(plan: NoisePlan, factor: float, delta: float) -> float:
    """Epsilon at which noise is smaller by a factor."""
    return epsilon_of_zcdp(plan.rho * round(factor**2 * 1000) / 1000, delta)


def cost_statements(plan: NoisePlan | GramPlan, delta: float) -> Iterator[str]:
    """Say what epsilon a record has against whom."""
    whole = epsilon_of_zcdp(plan.coordinator_cost(), delta)
    yield (
        f"The whole record of one entity, replaced by any other: epsilon {whole:.3g} at delta {delta:g} "
        "against the coordinator, who knows nobody's noise. Numbers of entities, and who has a record where, "
        "are public."
    )
    parts = ", ".join(
        f"{client} {epsilon_of_zcdp(plan.site_cost(client), delta):.3g}" for client in plan.columns
    )
    yield (
        "The part of a record at one institution against the coordinator and all other institutions "
        f"together, which is what its budget is charged: {parts}. Whoever deals random numbers for a product "
        "is taken not to tell them to one of its two institutions, which would have the other's columns."
    )
    fewer = [joined_cost(plan, joined) for joined in range(min(len(plan.columns) - 1, MOST_JOINED))]
    told = [f"epsilon {epsilon_of_zcdp(rho, delta):.3g} (rho {float(rho):.2g})" for rho in fewer]
    if told:
        joined = "".join(f", joined by {k} other{'s' * (k > 1)} {one}" for k, one in enumerate(told[1:], 1))
        yield f"Of any institution's part of a record the coordinator learns what {told[0]} allows{joined}."


def joined_cost(plan: NoisePlan | GramPlan, joined: int) -> Fraction:
    """Return what a site's part of a record costs at most against the coordinator and so many others."""
    costs = []
    for client in plan.columns:
        peers = [name for name in plan.columns if name != client]
        for known in combinations(peers, joined):
            costs.append(plan.site_cost(client, [name for name in peers if name not in known]))
    return max(costs)


def utility_of_columns(fit: CopulaFit, noise: Floats) -> pd.DataFrame:
    """Say of every column how much noise its margin and correlations have, and what is told of it.

    `noise` (p, p) is the deviation on correlations.
    """
    p = len(fit.margins)
    pairs = ~np.eye(p, dtype=np.bool_)
    correlation = np.abs(fit.inversion.correlation)
    rows = []
    clients = [client for client, bins in fit.plan.columns.items() for _ in bins]
    for j, (client, margin) in enumerate(zip(clients, fit.margins, strict=True)):
        others, n = pairs[j], fit.entities[client]
        asked = fit.plan.margins_asked(client)
        levels = bool(margin.bins.levels)
        # Noise on a distribution function: half of the levels added up, or, as simulated for 5 to 10 levels,
        # what least squares leave on the mean edge of a tree.
        counts = margin.bins.count / 4.0 if levels else 0.15 + 0.09 * margin.bins.depth
        variance = asked.of_levels if levels else asked.of_trees
        rows.append(
            {
                "column": margin.bins.name,
                "institution": client,
                "entities": n,
                "bins": margin.bins.count,
                "margin_noise": float(np.sqrt(counts * variance) / max(n, 1)),
                "ties": 1.0 - margin.variance,
                "correlation_noise": float(np.sqrt(np.mean(noise[j, others] ** 2))),
                "told_from_0": int((correlation[j, others] > 2.0 * noise[j, others]).sum()),
                "strongest": float(correlation[j, others].max()),
                "moved": float(fit.inversion.moved[j]),
            }
        )
    return pd.DataFrame(rows).set_index("column")


class CopulaPlan(ForecastPlan):
    """What is known of a synthesis before it runs."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.model = model

    def learned(self, forecast: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Say what noise leaves to be learned."""
        for sentence in cost_statements(self.model._planned, self.model.delta):
            yield "Coordinator and institutions", sentence

    def notes(self, forecast: ExpectedReleases) -> Iterator[str]:
        """Say how large errors will be."""
        model, missing = self.model, getattr(self.model, "missing", None)
        table = np.zeros((model.partition.n_entities, len(model._rows)), dtype=np.bool_)
        for k, rows in enumerate(model._rows.values()):
            table[rows, k] = True
        groups = choose_groups(model._planned, table, missing or "pairs")
        noise = PredictedNoise.of(groups, table)
        yield from noise_statements(noise)
        yield from large_noise(model._planned, noise.cross, noise.n, model.epsilon, model.delta)
        if missing is not None:
            yield METHODS[groups.method]
        if missing == "auto" and groups.method != "complete":
            yield describe_choice(model._planned, table)
        for client in model._planned.columns:
            budget = model.partition.sites[client].policy.privacy
            if budget is not None:
                total = float(rho_of_budget(budget.epsilon, budget.delta))
                share = float(model._planned.site_cost(client)) / total if total else math.inf
                yield f"{client}: this costs {share:.0%} of its budget, epsilon {budget.epsilon:g}."
