"""Dry run of a synthesis: privacy cost by site, noise, and utility."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from fedstat.models.copula.margins import Bins, Margin, edge_variance
from fedstat.models.copula.private_release import budget_shares, row_guarantee
from fedstat.models.copula.protocol import CopulaFit
from fedstat.models.copula.request import ALL, GramPlan, NoisePlan, PooledRows
from fedstat.models.explain import DryRunPlan
from fedstat.privacy.zcdp import epsilon_of_zcdp
from fedstat.typing import Bools, Floats

MOST_JOINED = 3
LARGE = 0.1
"""Noise of a correlation above which the release says little."""


@dataclass(frozen=True, slots=True)
class PredictedNoise:
    """Deviations of the noise on correlations near zero: within one site, between two, between the worst two.

    `n` is the number of entities of a typical pair.
    """

    own: float
    cross: float
    worst: float
    n: int

    @classmethod
    def of(cls, groups: SummedPatterns, table: Bools) -> PredictedNoise:
        """Predict the deviations from the presence of entities, (n, K), with even margins."""
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


def noise_statements(noise: PredictedNoise, rows: PooledRows | None) -> Iterator[str]:
    """State the expected noise on correlations."""
    sampling = 1.0 / math.sqrt(max(noise.n, 1))
    if rows is not None:
        yield (
            f"Noise on a correlation near 0: about {noise.own:.2g}, for columns with even margins. Sampling "
            f"adds {sampling:.2g} at {noise.n:,} rows: noise makes errors about "
            f"{math.hypot(1.0, noise.own / sampling):.2f} times as large."
        )
        if rows.honest < 2 and len(rows.records) > 2:
            K = len(rows.records)
            shared = noise.own / math.sqrt(K - 1)
            yield (
                "Each site adds enough noise alone. If owners set colluding = 1, noise on a correlation is "
                f"about {shared:.2g}."
            )
        return
    worst = "" if noise.worst < 1.5 * noise.cross else f" (up to {noise.worst:.2g})"
    yield (
        f"Noise on a correlation near 0: about {noise.own:.2g} within a site and {noise.cross:.2g}{worst} "
        "between two sites, for columns with even margins. Sampling adds "
        f"{sampling:.2g} at the {noise.n:,} entities of a typical pair."
    )


def large_noise(plan: NoisePlan, cross: float, n: int, epsilon: float, delta: float) -> Iterator[str]:
    """State remedies if noise is too large for useful results."""
    if not math.isfinite(cross):
        yield (
            "Noise exceeds all information about some column: without noise its margin would be a single "
            "value. Use a larger epsilon, more entities, or fewer columns."
        )
    elif cross > LARGE:
        factor = cross / LARGE
        yield (
            f"Noise on correlations is about {cross:.2g}, above {LARGE}: few will be distinguishable from 0. "
            f"About {math.ceil(n * factor):,} entities would suffice at epsilon {epsilon:g}, or an epsilon "
            f"of about {_enough(plan, factor, delta):.2g} at {n:,} entities. Fewer columns need less."
        )


def _enough(plan: NoisePlan, factor: float, delta: float) -> float:
    """Return the epsilon at which noise is smaller by a factor."""
    return epsilon_of_zcdp(plan.rho * round(factor**2 * 1000) / 1000, delta)


OUTSIDE, CROWDED = 0.02, 0.5
"""Share of values beyond a bound, and in one bin of a range, from which bounds are probably wrong."""


CERTAIN = 5.0
"""Deviations of noise by which a share has to be above these."""


def bounds_problems(
    margins: Sequence[Margin], sites: Sequence[str], deviations: Sequence[float]
) -> Iterator[str]:
    """State which bounds do not suit the released margins of columns at `sites`.

    `deviations` are those of the noise on a share, by column.
    """
    for margin, site, deviation in zip(margins, sites, deviations, strict=True):
        bins, p, noise = margin.bins, margin.probabilities, CERTAIN * deviation
        if bins.levels or not bins.atoms:
            continue
        where = f"column '{bins.name}' at '{site}'"
        low, high = (bins.written(x) for x in bins.range)
        for share, side, bound in ((p[0], "below", low), (p[-1], "above", high)):
            if share > OUTSIDE + noise:
                yield (
                    f"VALUES BEYOND THE BOUNDS: {where}: about {share:.0%} of the values are {side} {bound}, "
                    f"and count as {bound}. The unit of the bounds may be wrong. Correct them; the charge "
                    "for this release remains"
                )
        inner, edges = p[bins.leaf_codes], bins.leaf_edges
        k = int(inner.argmax())
        if inner[k] > CROWDED + noise and (bins.form == "real" or bins.step > 1):
            yield (
                f"BOUNDS TOO WIDE: {where}: about {inner[k]:.0%} of the values are between {edges[k]:.4g} "
                f"and {edges[k + 1]:.4g}, in one of {bins.leaves:,} bins of the range. Their distribution "
                "within the bin is not known. Use narrower bounds, fs.log() or fs.asinh(); the charge for "
                "this release remains"
            )


def problems_of_fit(fit: CopulaFit) -> list[str]:
    """State which bounds do not suit the margins of a synthesis."""
    noise = [sd / max(fit.entities[site], 1) for sd, site in zip(fit.count_noise, fit.sites, strict=True)]
    return list(bounds_problems(fit.margins, fit.sites, noise))


def cost_statements(plan: NoisePlan | GramPlan, delta: float) -> Iterator[str]:
    """State the epsilon of a record for each kind of observer."""
    rows = plan.noise.rows if isinstance(plan, GramPlan) else plan.rows
    if rows is not None:
        yield row_guarantee(rows, plan.site_cost(ALL), delta)
        return
    complete = epsilon_of_zcdp(plan.coordinator_cost(), delta)
    yield (
        f"Replacing the whole record of one entity by any other: epsilon {complete:.3g} at delta {delta:g} "
        "against the coordinator, who knows no site's noise. The numbers of entities, and which site has "
        "a record of which entity, are public."
    )
    parts = ", ".join(f"{site} {epsilon_of_zcdp(plan.site_cost(site), delta):.3g}" for site in plan.columns)
    yield (
        "The part of a record at one site against the coordinator and all other sites together, which is the "
        f"charge to the site's budget: {parts}. This assumes that the dealer of the random numbers of a "
        "product does not reveal them to one of its two sites, which could then compute the other's columns."
    )
    fewer = [joined_cost(plan, joined) for joined in range(min(len(plan.columns) - 1, MOST_JOINED))]
    reported = [f"epsilon {epsilon_of_zcdp(rho, delta):.3g} (rho {float(rho):.2g})" for rho in fewer]
    if reported:
        joined = "".join(
            f", in collusion with {k} other{'s' * (k > 1)} {one}" for k, one in enumerate(reported[1:], 1)
        )
        yield (
            f"About any site's part of a record the coordinator learns at most what {reported[0]} "
            f"allows{joined}."
        )


def joined_cost(plan: NoisePlan | GramPlan, joined: int) -> Fraction:
    """Return the largest cost of a site's part of a record against the coordinator and some others."""
    costs = []
    for site in plan.columns:
        peers = [name for name in plan.columns if name != site]
        for known in combinations(peers, joined):
            costs.append(plan.site_cost(site, [name for name in peers if name not in known]))
    return max(costs)


def utility_of_columns(fit: CopulaFit, noise: Floats) -> pd.DataFrame:
    """Return for every column the noise of its margin and correlations, and how much it reveals.

    `noise` (p, p) is the deviation on correlations.
    """
    pairs = ~np.eye(len(noise), dtype=np.bool_)
    correlation = np.abs(fit.inversion.correlation)
    places = iter(range(len(noise)))
    rows = []
    for site, margin, deviation in zip(fit.sites, fit.margins, fit.count_noise, strict=True):
        n = fit.entities[site]
        levels = bool(margin.bins.levels)
        # Noise on a distribution function: half of the levels added up, or that at the mean edge of a tree.
        counts = margin.bins.count / 4.0 if levels else edge_variance(margin.bins.depth)
        rows.append(
            {
                "column": margin.bins.name,
                "site": site,
                "entities": n,
                "bins": margin.bins.count,
                "margin_noise": math.sqrt(counts) * deviation / max(n, 1),
                "missing": margin.missing,
                "ties": 1.0 - margin.variance,
            }
        )
        if not margin.bins.nominal and len(noise) > 1:
            j = next(places)
            own, here = noise[j, pairs[j]], correlation[j, pairs[j]]
            rows[-1] |= {
                "correlation_noise": float(np.sqrt(np.mean(own**2))),
                "told_from_0": int((here > 2.0 * own).sum()),
                "strongest": float(here.max()),
                "moved": float(fit.inversion.moved[j]),
            }
    return pd.DataFrame(rows).set_index("column")


class CopulaPlan(DryRunPlan):
    """Facts about a synthesis before it runs."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.model = model

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what the noise allows to learn."""
        for sentence in cost_statements(self.model._planned, self.model.delta):
            yield "Coordinator and sites", sentence

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State the expected size of errors."""
        model, missing = self.model, getattr(self.model, "missing", None)
        table = np.zeros((model.partition.n_entities, len(model._rows)), dtype=np.bool_)
        for k, rows in enumerate(model._rows.values()):
            table[rows, k] = True
        groups = choose_groups(model._planned, table, missing or "pairs")
        noise = PredictedNoise.of(groups, table)
        yield from noise_statements(noise, model._pooled)
        yield from large_noise(model._planned, noise.cross, noise.n, model.epsilon, model.delta)
        if missing is not None and model._pooled is None:
            yield METHODS[groups.method]
        if missing == "auto" and groups.method != "complete":
            yield describe_choice(model._planned, table)
        planned = model._planned
        yield from budget_shares(
            model._policies, lambda site: planned.site_cost(site if model._pooled is None else ALL)
        )
