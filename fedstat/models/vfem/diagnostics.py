"""Numbers behind the notes of a VFEM summary: what a fit reveals, and what its assumptions rest on."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.likelihood import LRTest
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.joint_normal.assumption_tests import independence_lr_test
from fedstat.models.vertical.joint_normal.edges import undetermined_pairs
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, extremes, fit_joint_model
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.corrections import DIFFERENCE_LEVEL, response_by_pattern
from fedstat.models.vfem.covariance.from_moments import moments_covariance
from fedstat.models.vfem.iteration.state import VFEMFit, fit_by_site
from fedstat.models.vfem.outcome import reported_covariance
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Counts and notes on values that masks and secure products do not protect.
#
# The coordinator learns the sum of the linear predictors over sites for each entity, and sends it to the
# response holder. All sites know which of them have a record of an entity. If one site alone has a record,
# the sum *is* that site's part. A receiver with a block of its own can subtract its own part first.
#
# If two or more sites add up, no single round reveals the part of any of them. Many rounds together reveal
# more. A round changes the sum by X P X' z, where X holds the blocks of all sites side by side and the
# receiver knows the residuals z. After about as many rounds as there are columns, the receiver knows the
# joint column space, and with it approximate inner products between entities. Fewer rounds reveal less.
# exchange="moments" releases no row-level values.


def count_exposed(layout: Layout, at: str | None) -> dict[str, int]:
    """Find the entities for which a masked sum is one site's own part; the coordinator is `at`.

    These are the entities of which only this site and receivers of the sum have a record. The receivers are
    the coordinator and the response holder.
    """
    seen = np.zeros((layout.n, len(layout.sites)), dtype=bool)
    for j, site in enumerate(layout.sites):  # filled-in means are zero in the sum
        seen[layout.kept[site], j] = True
    exposed = np.zeros_like(seen)
    for receiver in (at, layout.active):
        masked = seen & np.array([site != receiver for site in layout.sites])
        exposed |= masked & (masked.sum(axis=1) == 1)[:, None]
    return dict(zip(layout.sites, exposed.sum(axis=0).tolist(), strict=True))


def count_reported(layout: Layout, ledger: Ledger, sites: list[str]) -> dict[str, int]:
    """Count the numbers that sums of residuals brought to each site, in fits without joint likelihood."""
    widths = dict(zip(layout.sites, layout.sizes, strict=True))
    receivers = Counter(one.receiver for one in ledger.entries if one.array == "shown")
    return {site: receivers[site] * (1 + widths[site]) for site in sites}


def count_reported_jointly(
    layout: Layout, exchange: PatternExchange, ledger: Ledger
) -> tuple[dict[str, int], int]:
    """Count the numbers that sums of residuals by missing pattern brought to each site, and the rounds."""
    # What the site of the coordinator sends to it does not leave that site.
    rounds = Counter(e.sender for e in ledger.entries if (e.step, e.array) == ("joint_score", "sums"))
    sizes = zip(layout.sites, layout.sizes, strict=True)
    patterns = exchange.plan.patterns.sum(axis=0)
    numbers = {k: int(patterns[j]) * (1 + p) * rounds[k] for j, (k, p) in enumerate(sizes)}
    return {k: count for k, count in numbers.items() if count}, max(rounds.values(), default=0)


def has_curvature(ledger: Ledger, step: str) -> bool:
    """Whether curvatures of entities were released by a step."""
    return any((one.array, one.step) == ("h", step) for one in ledger.entries)


def count_curvatures(layout: Layout, ledger: Ledger) -> int:
    """Count the entities of which the coordinator and a site received a curvature."""
    others = [k for k in layout.sites if k != layout.active]
    opened = [one.receiver for one in ledger.entries if (one.step, one.array) == ("open_columns", "only")]
    seen = ~layout.missing
    summed = seen[:, [opened.count(k) > 1 or k not in others for k in layout.sites]].any(axis=1)
    reported = layout.missing.any(axis=1) & seen.any(axis=1) & ~(summed & (seen.sum(axis=1) == 1))
    return int(layout.counts[reported].sum())


def solvable_patterns(counts: Floats, ledger: Ledger, holder: str) -> tuple[int, int]:
    """Return the sums by pattern that the coordinator has, and the entities of patterns with at most as many.

    `counts` has shape (G,). The coordinator knows the linear predictors, so every sum over a pattern is
    linear in each binary response.
    """
    reported = sum(
        int(one.shape[-1])
        for one in ledger.entries
        if (one.sender, one.array) == (holder, "sums") and one.step in ("glm_evaluate", "joint_weights")
    )
    return reported, int(counts[counts <= reported].sum()) if ledger.at != holder else 0


# ----------------------------------------------------------------------------------------------------
# Overdispersed counts.

LEAST_EXCESS = 0.1
"""Smallest excess of Pearson's statistic per entity that is reported."""
ERRORS = 2.0
"""Standard errors of the statistic that count as chance; long-tailed linear terms rarely exceed this."""


def excess(fit: VFEMFit) -> float:
    """Return Pearson's statistic per entity where it exceeds one by more than chance, else 0."""
    if fit.dispersion is None:
        return 0.0
    ratio, error = fit.dispersion
    return ratio if ratio > 1.0 + max(LEAST_EXCESS, ERRORS * error) else 0.0


# ----------------------------------------------------------------------------------------------------
# The price of free covariances between sites, compared with a model without them.

INDEPENDENCE_LEVEL = 0.05


class Dependence(NamedTuple):
    """Standard errors over those of independent blocks, (d,), and the test of independence."""

    ratio: Floats
    test: LRTest


def dependence(fit: JointNormalFit, errors: Floats) -> Dependence | None:
    """Compare standard errors (d,) with those of independent blocks, and test the two models."""
    if len(fit.moments.sizes) < 2 or fit.moments.seen.all():
        return None
    try:
        other = fit_joint_model(fit.moments, "independent")
        covariance = reported_covariance(moments_covariance(other), fit_by_site(other, "independent"))
        return Dependence(errors / np.sqrt(np.diag(covariance))[1:], independence_lr_test(fit, other))
    except (EstimationError, NotAvailableError):
        return None


def independence(fit: JointNormalFit) -> LRTest | None:
    """Test blocks that are independent between sites; None where the test does not exist."""
    try:
        return independence_lr_test(fit)
    except (EstimationError, NotAvailableError):
        return None


# ----------------------------------------------------------------------------------------------------
# Pairs of sites that share too few entities for a covariance of their columns.

UNDETERMINED = 2.0
"""Range of a coefficient at one likelihood, in standard errors, above which it is not identified."""
SENSITIVITY_COLUMNS = ["first", "second", "n", "term", "estimate", "low", "high"]


def sensitivity(fit: JointNormalFit) -> pd.DataFrame:
    """Range of every coefficient that is compatible with the data, by pair of sites without a covariance."""
    rows: list[tuple[object, ...]] = []
    names = [name.replace("'", "") for name in fit.moments.unit_names]
    for pair in undetermined_pairs(fit.moments):
        sites = names[pair.first], names[pair.second]
        each = zip(fit.moments.names, fit.beta, *extremes(fit, pair)[:, 1:], strict=True)
        rows += [(*sites, pair.n, *of_column) for of_column in each]
    return pd.DataFrame(rows, columns=SENSITIVITY_COLUMNS)


class OpenRange(NamedTuple):
    """The coefficient with the largest range at one likelihood, relative to its error or its estimate."""

    first: str
    second: str
    term: str
    low: float
    high: float
    relative: float


def largest_range(fit: JointNormalFit, errors: Floats | None) -> OpenRange | None:
    """Return the range of the coefficient that the data determine least; `errors` are standard errors."""
    table = sensitivity(fit)
    if not len(table):
        return None
    unit = np.abs(table["estimate"].to_numpy())
    if errors is not None:
        unit = np.tile(errors, len(table) // len(errors))
    relative = (table["high"] - table["low"]).to_numpy() / unit
    worst = table.iloc[int(np.argmax(relative))]
    first, second, term, low, high = worst[["first", "second", "term", "low", "high"]]
    return OpenRange(first, second, term, low, high, float(relative.max()))


# ----------------------------------------------------------------------------------------------------
# A response that is far from normal, where missingness goes with it.

SYMMETRY_SD, TAILS_SD = np.sqrt(3.0 - 8.0 / np.pi), np.sqrt(1.0 - 3.0 / np.pi)
"""Standard deviations, times root n, of the means of z |z| and |z| of a standardized normal sample."""
NORMAL_TAILS = np.sqrt(2.0 / np.pi)
"""Mean of |z| of a normal z; it is smaller under long tails (Geary 1935)."""
SKEWED_LEVEL, TAILS_LEVEL = 0.02, 0.03
"""P-values below which the two tests reject, the second one-sided: together, in 5 % of normal samples."""
LEAST_ASYMMETRY, LEAST_TAILS = 0.06, 0.012
"""Deviations that matter in large samples: those of skewness .25, and of excess kurtosis .35."""


class ResponseShape(NamedTuple):
    """Means of z |z| and |z| of the standardized response, and which of them differ from a normal one."""

    asymmetry: float
    size: float
    skewed: bool
    long_tailed: bool


def response_shape(moments: PatternMoments) -> ResponseShape | None:
    """Return the shape of a response that is skewed or has long tails, if missingness depends on it."""
    found, n = moments.response_shape, moments.n.sum()
    if found is None or moments.seen.all() or response_by_pattern(moments) >= DIFFERENCE_LEVEL:
        return None
    asymmetry, tails = found[0], NORMAL_TAILS - found[1]
    skewed = abs(asymmetry) > max(
        stats.norm.isf(SKEWED_LEVEL / 2.0) * SYMMETRY_SD / np.sqrt(n), LEAST_ASYMMETRY
    )
    long = tails > max(stats.norm.isf(TAILS_LEVEL) * TAILS_SD / np.sqrt(n), LEAST_TAILS)
    return ResponseShape(asymmetry, found[1], skewed, long) if skewed or long else None


# ----------------------------------------------------------------------------------------------------
# The price of maximum likelihood in small samples.

SMALL_SAMPLE = 0.02


def variance_inflation(layout: Layout, used: int) -> float:
    """By how much larger least squares' standard errors are, as a share; 0 if this is little."""
    inflation = float(np.sqrt(layout.n / (layout.n - used)) - 1.0)
    return inflation if inflation > SMALL_SAMPLE else 0.0
