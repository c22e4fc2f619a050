"""Results of an audit: what it measured beside what is claimed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from fedstat.drawing import COLOURS, axes_for, entitle, legend_below
from fedstat.inference.summary import header_sheet
from fedstat.inference.tables import Sheet, SheetSummary
from fedstat.privacy.gaussian import epsilon_of
from fedstat.privacy.intervals import mu_interval
from fedstat.typing import Bools, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALL = "all together"


@dataclass(frozen=True, slots=True, eq=False)
class AuditResults:
    """Guesses of which of two records was behind each release, and what is claimed of any guess.

    Attributes
    ----------
    view : str
        Who looks.
    mu : float
        Claimed: no test tells two records apart better than N(0, 1) and N(mu, 1).
    pair_mu : float
        What the pair of records should show, by the plan.
    epsilon, delta : float
        Claimed, of the mu above.
    first : (R,) array of bool
        Whether the first record was in.
    log_ratios : (R, m) array
        Statistic of each release by its parts, large for the first record.
    parts : tuple of str
    faults : tuple of str
        What is wrong by construction, whatever was guessed.
    alpha : float
        With which probability an interval is wrong.
    evidence : bool
        Whether the statistic is the best that there is; else nothing follows from a low one.

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
        """How many releases were made."""
        return len(self.first)

    @property
    def intervals(self) -> pd.DataFrame:
        """What each statistic has shown: right guesses, mu and its interval, and epsilon at least.

        A statistic that is wrong more often than right tells as much as its opposite. Lower ends hold for all
        rows at once, with a probability of 1 - alpha.
        """
        rows = []
        tests = {ALL: self.log_ratios.sum(axis=1)}
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
        """Mu is at least this, by the best of the statistics."""
        return float(self.intervals["low"].max())

    @property
    def mu_high(self) -> float:
        """What all statistics together have shown is at most this."""
        return float(self.intervals["high"].iloc[0])

    @property
    def epsilon_low(self) -> float:
        """Epsilon at :attr:`delta` is at least this."""
        return epsilon_of(self.mu_low, self.delta)

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the claim."""
        return not self.faults and self.mu_low <= self.mu

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.passed:
            better = ("records are told apart better than is claimed",) if self.mu_low > self.mu else ()
            return "FAILS: " + "; ".join((*self.faults, *better))
        if not self.evidence:
            return "no evidence: a weak attack that fails says nothing"
        if self.mu_high < self.pair_mu:
            return "holds; less is told apart than the noise of the plan allows"
        return "holds"

    def roc(self) -> pd.DataFrame:
        """Return the curve of the statistic of all parts: rates of false and of true positives, ascending."""
        ratio = self.log_ratios.sum(axis=1)
        first = self.first[np.argsort(-ratio, kind="stable")]
        rates = [np.concatenate([[0.0], np.cumsum(some) / max(some.sum(), 1)]) for some in (~first, first)]
        return pd.DataFrame({"false_positives": rates[0], "true_positives": rates[1]})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the ROC curve beside the trade-off that is claimed: above it no test may be."""
        ax = axes_for(ax, 4.8, 5.2)
        x = np.linspace(0.0, 1.0, 501)
        claimed = ndtr(ndtri(x) + self.mu)
        ax.fill_between(x, claimed, 1.0, color="0.9", linewidth=0.0)
        ax.plot(x, claimed, color="0.2", linewidth=1.4, label=f"claimed: mu {self.mu:.3g}")
        roc = self.roc()
        label = f"{self.releases:,} releases: mu {self.mu_low:.2f} to {max(self.mu_high, self.mu_low):.2f}"
        ax.plot(
            *(roc["false_positives"], roc["true_positives"]), color=COLOURS[1], linewidth=1.6, label=label
        )
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, linestyle="--", label="guessing")
        ax.set(xlabel="false positives", ylabel="true positives", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        legend_below(ax)
        entitle(ax, f"Who was in? As seen by {self.view}")
        return ax

    def summary(self) -> SheetSummary:
        """Lay out what is claimed, what was measured, and the verdict.

        Returns
        -------
        SheetSummary
        """
        left = [
            ("Who looks", self.view),
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
        head = header_sheet("Audit of a release with noise", left, right)
        head = replace(head, headers=("Claimed", "", "Measured", ""))
        return SheetSummary([head, table], list(self._notes()))

    def _notes(self) -> Iterator[str]:
        yield f"Verdict: {self.verdict}."
        if not self.evidence:
            yield (
                "A demonstration on synthetic tables, of one simple attack. That it guesses badly is no "
                "evidence of privacy; what is evidence are audits of the release itself, view='coordinator' "
                "or an institution."
            )
        else:
            yield (
                "Two records that the plan says are the hardest to hide, each in about half of the releases; "
                "likelihood ratios of all that is seen. Every release passed the doors of new sites, with "
                "new keys and a budget for one. The sites hold invented rows; none of yours was asked."
            )
        yield (
            f"Intervals are Clopper and Pearson's, all wrong at once with a probability of at most "
            f"{self.alpha:g}; mu as of Gaussian noise, which discrete noise of this size is to many digits. "
            "From below they are proof; that no more was shown proves nothing of other records, of bugs "
            "elsewhere, or of clocks."
        )
        if self.evidence and math.isfinite(self.pair_mu) and self.pair_mu < 0.99 * self.mu:
            yield (
                f"The pair should show {self.pair_mu:.3f} of the {self.mu:.3f} that is claimed: what is "
                "charged is a bound, which no pair attains here."
            )
