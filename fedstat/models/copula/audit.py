"""Privacy audit: measured distinguishability of neighboring data sets compared with the claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.special import chdtr, ndtr, ndtri

from fedstat.errors import ModelError
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import Report, header_sheet
from fedstat.inference.tables import Sheet
from fedstat.models.checks import check_choice, check_integer
from fedstat.models.copula.audited_releases import (
    PARTS,
    ROW_PARTS,
    LeastPrivatePair,
    Observation,
    ObservedRelease,
    Releases,
    RowReleases,
    UnmaskedSums,
)
from fedstat.models.copula.correlation import invert_products
from fedstat.models.copula.model import CopulaSynthesizer
from fedstat.models.copula.private_release import ROUNDING, PrivateRelease
from fedstat.models.copula.request import ALL, NoisePlan
from fedstat.plotting import COLORS, axes_for, legend_below, set_headline
from fedstat.privacy.gaussian_dp import epsilon_of, mu_interval
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget
from fedstat.progress_line import counted, shows_progress
from fedstat.typing import Bools, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# Results of an audit: its measurements compared with the claim.

EVERY_PART = "all together"
NOTES = Catalogue(
    critical={
        "verdict": "Verdict: {verdict}.",
    },
    warning={
        "demonstration": "A demonstration on synthetic tables with one simple attack. If it guesses badly, "
        "this is no evidence of privacy. For evidence, audit the release itself: view='coordinator' or the "
        "name of a site.",
    },
    info={
        "verdict/passed": "Verdict: {verdict}.",
        "records": "The two records are the hardest to hide according to the plan; each is in about half of "
        "the releases. The statistic is the likelihood ratio of the whole observation. Every release passed "
        "the disclosure checks of new sites, with new keys and a budget for one release. The sites hold "
        "synthetic rows; none of your rows was used.",
        "row": "One row has values in about half of the releases, and is missing in the others. The observer "
        "has the sums of all sites, knows every other row, and the noise of all sites that may collude. The "
        "statistic is the likelihood ratio of all sums. Every release passed the disclosure checks of new "
        "sites, with new keys and a budget for one release. The sites hold synthetic rows; none of your rows "
        "was used.",
        "intervals": "Intervals are Clopper and Pearson's, all wrong at once with probability at most "
        "{alpha:g}; mu is that of Gaussian noise, and discrete noise of this size agrees with it to many "
        "digits. Lower bounds are proof. Upper bounds prove nothing about other records, errors in other "
        "code, or timing.",
        "pair": "The pair should show {pair:.3f} of the claimed {claimed:.3f}: the charge is an upper "
        "bound, and no pair attains it here.",
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class AuditResults(Report):
    """Guesses which of two records was behind each release, and the claimed limit of any guess.

    Attributes
    ----------
    view : str
        The observer.
    mu : float
        Claim: no test distinguishes two records better than N(0, 1) and N(mu, 1).
    pair_mu : float
        The mu of this pair of records by the plan.
    epsilon, delta : float
        The claim for the mu above.
    first : (R,) array of bool
        Whether the first record was in the data, or the row had values.
    log_ratios : (R, m) array
        Statistic of each release by its parts; large values indicate the first record.
    parts : tuple of str
    faults : tuple of str
        Errors of construction that were found, independent of the guesses.
    alpha : float
        Probability that an interval is wrong.
    evidence : bool
        Whether the statistic is the most powerful one; otherwise a low value proves nothing.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex"]].dropna()
    >>> partition = fs.ClientPartition.from_frame(table, columns={"Registry": ["age"], "Laboratory": ["sex"]})
    >>> model = fs.CopulaSynthesizer(partition, 3.0, {"age": (20, 80), "sex": [0, 1]})
    >>> result = fs.audit(model, releases=100, seed=1)
    >>> result.passed, result.releases, len(result.verdict) > 0, "claim" in result.summary().as_text()
    (True, 100, True, True)
    >>> result.mu_low <= result.mu_high, result.epsilon_low <= 3.0, len(result.intervals) > 0
    (True, True, True)
    >>> result.roc().columns.tolist(), bool(result.plot().has_data())
    (['false_positives', 'true_positives'], True)
    """

    view: str
    mu: float
    pair_mu: float
    epsilon: float
    delta: float
    first: Bools
    log_ratios: Floats
    parts: tuple[str, ...]
    faults: tuple[str, ...]
    alpha: float
    evidence: bool = True

    @property
    def releases(self) -> int:
        """Number of releases."""
        return len(self.first)

    @property
    def intervals(self) -> pd.DataFrame:
        """Results of each statistic: correct guesses, mu with its interval, and a lower bound of epsilon.

        A statistic that is wrong more often than right is as informative as its opposite. Lower ends hold for
        all rows simultaneously, with probability 1 - alpha.
        """
        rows = []
        tests = {EVERY_PART: self.log_ratios.sum(axis=1)}
        if len(self.parts) > 1:
            tests |= dict(zip(self.parts, self.log_ratios.T, strict=True))
        each = self.alpha / (2 * len(tests))
        for name, ratio in tests.items():
            right = int(np.count_nonzero((ratio > 0.0) == self.first))
            best = max(right, self.releases - right)
            low, high = mu_interval(best, self.releases, each)
            share = best / self.releases
            estimate = 2.0 * float(ndtri(min(max(share, 0.5), 1.0 - 0.5 / self.releases)))
            rows.append((name, right, estimate, low, high, epsilon_of(low, self.delta)))
        return pd.DataFrame(rows, columns=["statistic", "right", "mu", "low", "high", "epsilon_low"])

    @property
    def mu_low(self) -> float:
        """Lower bound of mu, by the best of the statistics."""
        return float(self.intervals["low"].max())

    @property
    def mu_high(self) -> float:
        """Upper bound of the mu that all statistics together have shown."""
        return float(self.intervals["high"].iloc[0])

    @property
    def epsilon_low(self) -> float:
        """Lower bound of epsilon at :attr:`delta`."""
        return epsilon_of(self.mu_low, self.delta)

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the claim."""
        return not self.faults and self.mu_low <= self.mu

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if not self.passed:
            better = ("records can be distinguished better than claimed",) if self.mu_low > self.mu else ()
            return "FAILS: " + "; ".join((*self.faults, *better))
        if not self.evidence:
            return "no evidence: the failure of a weak attack proves nothing"
        if self.mu_high < self.pair_mu:
            return "the claim holds; records are distinguished less well than the planned noise allows"
        return "holds"

    def roc(self) -> pd.DataFrame:
        """Return the curve of the statistic of all parts: rates of false and of true positives, ascending."""
        ratio = self.log_ratios.sum(axis=1)
        first = self.first[np.argsort(-ratio, kind="stable")]
        rates = [np.concatenate([[0.0], np.cumsum(some) / max(some.sum(), 1)]) for some in (~first, first)]
        return pd.DataFrame({"false_positives": rates[0], "true_positives": rates[1]})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the ROC curve and the claimed limit: no test may be above it."""
        ax = axes_for(ax, 4.8, 5.2)
        x = np.linspace(0.0, 1.0, 501)
        claimed = ndtr(ndtri(x) + self.mu)
        ax.fill_between(x, claimed, 1.0, color="0.9", linewidth=0.0)
        ax.plot(x, claimed, color="0.2", linewidth=1.4, label=f"claimed: mu {self.mu:.3g}")
        roc = self.roc()
        label = f"{self.releases:,} releases: mu {self.mu_low:.2f} to {max(self.mu_high, self.mu_low):.2f}"
        ax.plot(*(roc["false_positives"], roc["true_positives"]), color=COLORS[1], linewidth=1.6, label=label)
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, linestyle="--", label="guessing")
        ax.set(xlabel="false positives", ylabel="true positives", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        legend_below(ax)
        set_headline(ax, f"Which record was in the data? Observer: {self.view}")
        return ax

    def _sheets(self) -> Iterator[Sheet]:
        """Tables of the claim, the measurements, and the verdict."""
        left = [
            ("Observer", self.view),
            ("Epsilon", f"{self.epsilon:.3g} at delta {self.delta:g}"),
            ("mu", f"{self.mu:.3f}"),
            ("mu of the pair", f"{self.pair_mu:.3f}" if self.evidence else "not known"),
        ]
        right = [
            ("Releases", f"{self.releases:,}"),
            ("Epsilon", f"at least {self.epsilon_low:.3g}"),
            ("mu", f"{self.mu_low:.3f} to {max(self.mu_high, self.mu_low):.3f}"),
            ("Verdict", self.verdict.split(":")[0].split(";")[0]),
        ]
        rows = tuple(
            (name, f"{right:,}", f"{mu:.3f}", f"{low:.3f}", f"{high:.3f}", f"{epsilon:.3g}")
            for name, right, mu, low, high, epsilon in self.intervals.itertuples(index=False)
        )
        headers = ("statistic", "right", "mu", "low", "high", "eps, low")
        table = Sheet(headers, rows, "lrrrrr", (24, 8, 8, 8, 8, 9), gap=2)
        head = header_sheet("Audit of a release with noise", [*left, *right])
        head = replace(head, headers=("Claimed", "", "Measured", ""))
        yield from (head, table)

    def tidy(self) -> pd.DataFrame:
        """Results of each statistic: :attr:`intervals`."""
        return self.intervals

    def _glance(self) -> dict[str, Any]:
        return {
            "view": self.view,
            "releases": self.releases,
            "passed": self.passed,
            "epsilon": self.epsilon,
            "epsilon_low": self.epsilon_low,
            "mu": self.mu,
            "mu_low": self.mu_low,
            "mu_high": self.mu_high,
        }

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("verdict/passed" if self.passed else "verdict", verdict=self.verdict)
        if not self.evidence:
            yield NOTES.note("demonstration")
        else:
            yield NOTES.note("row" if self.parts == ROW_PARTS else "records")
        yield NOTES.note("intervals", alpha=self.alpha)
        if self.evidence and math.isfinite(self.pair_mu) and self.pair_mu < 0.99 * self.mu:
            yield NOTES.note("pair", pair=self.pair_mu, claimed=self.mu)


# ----------------------------------------------------------------------------------------------------
# Guessing which record was in the data from a synthetic table alone: a demonstration.


def agreement(pair: LeastPrivatePair, seen: ObservedRelease, random: np.random.Generator) -> float:
    """Draw a synthetic table, and compare its agreement with the two records, in standard errors.

    The statistic is the mean number of columns in which a synthetic row has the bin of the first record,
    minus the same number for the second.
    """
    noise = pair.sums.noise
    margins = [margin for site in noise.columns for margin in seen.margins[site]]
    radii = [float(noise.radius(site)) for site in noise.columns]
    blocks = list(noise.places().values())
    found = invert_products(seen.sums.products[0] / pair.n, margins, blocks, radii, standardize=False)
    Z = random.standard_normal((pair.n, len(margins))) @ np.linalg.cholesky(found.correlation).T
    codes = np.column_stack(
        [
            np.searchsorted(margin.thresholds[1:-1], z, side="right")
            for margin, z in zip(margins, Z.T, strict=True)
        ]
    )
    first, second = ((codes == record).sum(axis=1) for record in pair.records)
    return float((first - second).mean()) * math.sqrt(pair.n)


# ----------------------------------------------------------------------------------------------------
# Audits: many releases of one of two records, with real disclosure checks, and how well they are
# distinguished.

FEWEST_RELEASES = 100
TIMES_NOISE = 50.0
"""Number of synthetic entities over the noise on a count; released margins are then near the true ones."""
FEWEST, MOST = 200, 20_000
EXACT = 1.0 + 1e-9
COORDINATOR, TABLE = "coordinator", "table"


@takes_alpha
@shows_progress
def audit(
    model: PrivateRelease,
    view: str = COORDINATOR,
    releases: int = 2000,
    *,
    alpha: float = 1e-4,
    seed: int | None = None,
    progress: bool | None = None,
) -> AuditResults:
    """Measure how well a private release distinguishes two records, and compare this with its claim.

    The two records that are hardest to hide are derived from the model's columns, bounds and epsilon. A fair
    coin decides which of them is in a table of synthetic rows. New sites, with new keys and a budget for one
    release, release margins and products of this table through their disclosure checks. A likelihood ratio
    then guesses the record. No block is missing there. The model's own sites receive no request and no
    charge.

    Where sites hold different rows, the coin decides whether one row has values or is missing, and the ratio
    is that of all noisy sums, for an observer who knows all other rows.

    Parameters
    ----------
    model : CopulaSynthesizer or PrivateCopulaGLM
        With ``missing="em"``, one pattern of records, including the squares and sums of scores.
    view : str
        The observer. ``"coordinator"`` observes a whole record. With the name of a site, all other sites
        together observe its part of a record; their own noise hides nothing from them. ``"table"`` is an
        observer with one synthetic table, which is a demonstration and not evidence. Where sites hold
        different rows, only ``"coordinator"``, with as many sites as may collude by the owners' budgets.
    releases : int
        At least 100; each takes some hundredths of a second, more with many columns.
    alpha : float
        Probability that the intervals may be wrong.
    seed : int, optional
        Seed of the coins; the noise is drawn again each time.
    progress : bool, optional
        Report the progress of the computation (:func:`fedstat.progress`).

    Returns
    -------
    AuditResults
        ``print(result.summary())``; ``result.passed``; ``result.plot()`` draws the ROC curve and the claimed
        limit.

    Raises
    ------
    ModelError
        An argument is invalid.

    References
    ----------
    Dong, J., Roth, A. and Su, W. (2022). Gaussian differential privacy. JRSS B 84, 3-37.
    Nasr, M. et al. (2023). Tight auditing of differentially private machine learning. USENIX Security.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> partition = fs.ClientPartition.from_frame(table, columns=held)
    >>> bounds = {"age": (20, 80), "sex": [0, 1], "chol": (80, 600)}
    >>> result = fs.audit(fs.CopulaSynthesizer(partition, 3.0, bounds), releases=100, seed=1)
    >>> result.passed
    True
    """
    came, synthesis = type(model).__name__, isinstance(model, CopulaSynthesizer)
    if not issubclass(type(model), PrivateRelease):
        raise ModelError(f"audit: expected a CopulaSynthesizer or PrivateCopulaGLM, received {came}")
    if isinstance(model, CopulaSynthesizer) and model.mechanism == "published":
        raise ModelError("audit: mechanism='published' is a simulation without disclosure checks")
    sites = list(model.bounds) if model._pooled is None else []
    tables = [TABLE] if synthesis and model._pooled is None else []
    check_choice("view", view, (COORDINATOR, *tables, *sites))
    check_integer("releases", releases, FEWEST_RELEASES)
    if not 0.0 < alpha < 1.0:
        raise ModelError(f"alpha: expected a number between 0 and 1, received {alpha!r}")
    if view in sites and len(sites) < 2:
        raise ModelError("view: a single site has no other sites as observers")
    random = np.random.default_rng(seed)
    first = random.random(releases) < 0.5
    audited = _audit_of_rows(model) if model._pooled is not None else _audit_of_pair(model, view, random)
    ratios, seen_noise, short, longest = [], set[bytes](), set[str](), 0.0
    squares: dict[str, float] = {}
    for is_first in counted(first.tolist(), "release"):
        seen = audited.make(0 if is_first else 1)
        ratios.append(seen.log_ratios)
        seen_noise.add(np.concatenate(list(seen.noise.values())).tobytes())
        squares = {name: squares.get(name, 0.0) + float(one @ one) for name, one in seen.noise.items()}
        short.update(seen.short)
        longest = max(longest, seen.longest)
    faults = []
    if short:
        faults.append(f"the charge was too small at {', '.join(sorted(short))}")
    if longest > EXACT:
        faults.append(f"a row of scores was {100.0 * (math.sqrt(longest) - 1.0):.2g} % longer than allowed")
    for name, found in squares.items():
        if chdtr(releases * seen.noise[name].size, found) < alpha / len(squares):
            faults.append(f"noise on {name} is smaller than its charge")
    if len(seen_noise) < releases:
        faults.append(f"{releases - len(seen_noise):,} releases had the noise of another release")
    return AuditResults(
        view=audited.observer,
        mu=math.sqrt(2.0 * float(audited.cost)),
        pair_mu=math.sqrt(seen.squared),
        epsilon=epsilon_of_zcdp(audited.cost, model.delta),
        delta=model.delta,
        first=first,
        log_ratios=np.array(ratios)[:, : len(audited.parts)],
        parts=audited.parts,
        faults=tuple(faults),
        alpha=alpha,
        evidence=view != TABLE,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Audited:
    """Makes releases of one of two records; the observer, what a release costs, and its parts."""

    make: Callable[[int], Observation]
    observer: str
    cost: Fraction
    parts: tuple[str, ...]


def _audit_of_rows(model: PrivateRelease) -> _Audited:
    """Audit releases over rows: one row has values, or is missing."""
    plan = model._noise_for(_entities_of(model))
    assert isinstance(plan, NoisePlan) and plan.rows is not None
    colluding = plan.rows.colluding if plan.rows.masked_at else None
    policy = Policy(privacy=Budget(model.epsilon, model.delta, colluding))
    making = RowReleases(plan, policy, model._family_name, model._release_rows)
    return _Audited(making.make, plan.rows.observers, plan.site_cost(ALL), ROW_PARTS)


def _audit_of_pair(model: PrivateRelease, view: str, random: np.random.Generator) -> _Audited:
    """Audit releases of entities: one record is replaced by another."""
    pair = _pair_of(model, view if view in model.bounds else "")
    making = Releases(pair, Policy(privacy=Budget(model.epsilon, model.delta)), model._family_name)

    def make(which: int) -> Observation:
        seen = making.make(which)
        ratios = np.array([agreement(pair, seen, random)]) if view == TABLE else seen.log_ratios(pair)
        noise = _noise_of(pair, seen, which)
        return Observation(ratios, noise, pair.attained**2, pair.share(seen.margins), seen.short)

    observers = {COORDINATOR: "the coordinator", TABLE: "an owner of one table"}
    cost = pair.sums.site_cost(pair.view) if pair.view else pair.sums.coordinator_cost()
    parts = ("synthetic table",) if view == TABLE else PARTS if pair.sums.moments else PARTS[:-1]
    return _Audited(make, observers.get(view, f"all others at {view}"), cost, parts)


def _entities_of(model: PrivateRelease) -> int:
    """Return the number of synthetic entities that the noise on margins needs."""
    rho = rho_of_budget(model.epsilon, model.delta) * (1 - ROUNDING)
    of_column = float(NoisePlan.of_column(Fraction(rho), sum(map(len, model.bounds.values()))))
    return int(np.clip(math.ceil(TIMES_NOISE / math.sqrt(of_column)), FEWEST, MOST))


def _pair_of(model: PrivateRelease, view: str) -> LeastPrivatePair:
    """Plan a release of the model's columns on the number of synthetic entities that its noise needs."""
    n = _entities_of(model)
    noise = model._noise_for(n)
    return LeastPrivatePair.of(UnmaskedSums(noise) if isinstance(noise, NoisePlan) else noise, view, n)


def _noise_of(pair: LeastPrivatePair, seen: ObservedRelease, which: int) -> dict[str, Floats]:
    """Return the noise of a release by its parts, in standard deviations, and the sites that add it."""
    parts = list[tuple[str, set[str], Floats]]()
    for (site, kind), counts in seen.counts.items():
        expected, variance = pair.counts(site, kind)
        parts.append((f"{kind} of {site}", {site}, (counts - expected[which]) / math.sqrt(variance)))
    products, totals = (reported[which] for reported in pair.products(seen.margins))
    variances, places = np.minimum(*pair.variances()), pair.sums.noise.places()
    for (a, at), (b, to) in combinations_with_replacement(places.items(), 2):
        noisy = np.isfinite(variances[at, to])
        noise = (seen.sums.products[0] - products)[at, to][noisy] / np.sqrt(variances[at, to][noisy])
        parts.append((f"products of {a}" if a == b else f"products of {a} and {b}", {a, b}, noise))
    if pair.sums.moments:
        squares, sums = seen.sums.squares[0] - np.diagonal(products), seen.sums.totals[0] - totals
        deviation = pair.sums.deviation(0, 1)
        for site, at in places.items():
            both = np.concatenate([squares[at], sums[at]]) / deviation
            parts.append((f"squares and sums of {site}", {site}, both))
    return {
        name: noise for name, owners, noise in parts if noise.size and (not pair.view or pair.view in owners)
    }
