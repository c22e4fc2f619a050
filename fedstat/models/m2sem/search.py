"""Comparison of numbers of clusters and factors by fits without selection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.mixtures import integrated_criterion, relative_entropy
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import Report
from fedstat.inference.tables import Sheet
from fedstat.models.m2sem.em import MixtureExchange, MixtureState, StartPlan, most_rounds, start
from fedstat.models.m2sem.summary import SKEWED, listed
from fedstat.plotting import COLORS, axes_for, legend_below, set_headline
from fedstat.progress_line import expect_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFINE_ROUNDS = 15
NOTES = Catalogue(
    critical={
        "skewed": SKEWED,
    },
    warning={
        "edge": "The best number of clusters is the largest one in the search: extend the search.",
    },
    info={
        "criteria": "Fits of all columns, without selection; smaller BIC and ICL are better. ICL also "
        "penalizes overlap, and selects fewer clusters. Starts: how many of all starts had the same "
        "clusters. test_against() of a fit of K clusters tests them against K - 1.",
    },
)


def fit_sizes(
    exchange: MixtureExchange, sizes: Sequence[tuple[int, int]], plan: StartPlan
) -> FitProtocol[list[MixtureState]]:
    """Fit mixtures of all sizes (K, Q), in parallel; some may fail."""
    yield from exchange.begin(sorted({Q for _, Q in sizes}))
    expect_rounds(min(most_rounds(plan) + REFINE_ROUNDS, exchange.left))
    found = yield from start(exchange, sizes, plan)
    yield from exchange.ascend(found, plan.local_steps, REFINE_ROUNDS, enough=lambda one: one.settled)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSearch(Report):
    """Criteria of numbers of clusters and factors.

    Attributes
    ----------
    table : DataFrame
        Index (n_clusters, n_factors); ``llf``, ``parameters``, ``bic``, ``icl``, ``entropy``, ``starts``,
        how many of all starts had the clusters of the best one, and ``note``, which states why criteria are
        missing.
    ledger : Ledger
        Releases of each site.
    skewed : tuple of (str, str)
        Sites and columns with a skewness beyond 1, for which BIC counts too many clusters.

    References
    ----------
    Bauer, D. J. and Curran, P. J. (2003). Distributional assumptions of growth mixture models: implications
    for overextraction of latent trajectory classes. Psychological Methods 8, 338-363.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> found = fs.M2SEM.search(partition, n_clusters=[1, 2], n_factors=[1], n_init=1)
    >>> found.best, found.sizes, len(found.table)
    ((2, 1), [(1, 1), (2, 1)], 2)
    >>> bool(found.plot().has_data()), "BIC" in found.summary().as_text()
    (True, True)
    """

    table: pd.DataFrame
    ledger: Ledger
    skewed: tuple[tuple[str, str], ...] = ()

    @classmethod
    def _of(
        cls,
        sizes: Sequence[tuple[int, int]],
        found: Sequence[MixtureState],
        ledger: Ledger,
        skewed: Sequence[tuple[str, str]] = (),
    ) -> ClusterSearch:
        """Make the table of fits."""
        rows: list[dict[str, float | str]] = []
        for one in found:
            if one.failed:
                rows.append({"note": one.failed})
                continue
            n, twice = len(one.r), -2.0 * one.loglik
            rows.append(
                {
                    "llf": one.loglik,
                    "parameters": one.free,
                    "bic": one.criterion("bic", n),
                    "icl": integrated_criterion(twice, one.free, n, one.r),
                    "entropy": relative_entropy(one.r),
                    "starts": "{} of {}".format(*one.starts),
                    "note": "" if one.settled else "not converged",
                }
            )
        columns = ["llf", "parameters", "bic", "icl", "entropy", "starts", "note"]
        index = pd.MultiIndex.from_tuples(list(sizes), names=["n_clusters", "n_factors"])
        return cls(pd.DataFrame(rows, index=index, columns=columns), ledger, tuple(skewed))

    @property
    def best(self) -> tuple[int, int]:
        """Numbers of clusters and factors with the smallest BIC."""
        return self.sizes[int(np.nanargmin(self.table["bic"].to_numpy(dtype=float)))]

    def _sheets(self) -> Iterator[Sheet]:
        """Lay out the grid."""
        rows = tuple(self._cells(*size, row) for size, row in zip(self.sizes, self._records(), strict=True))
        headers = ("clusters", "factors", "log-lik", "param", "BIC", "ICL", "entropy", "starts", "")
        widths = (8, 7, 13, 6, 13, 13, 7, 9, 24)
        yield Sheet(headers, rows, "rrrrrrrrl", widths, "Numbers of clusters and factors", wrap=True)

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("criteria")
        if self.skewed and self.best[0] > 1:
            names = [f"'{name}' at '{site}'" for site, name in self.skewed]
            yield NOTES.note("skewed", columns=listed(names))
        clusters = {K for K, _ in self.sizes}
        if len(clusters) > 1 and self.best[0] == max(clusters):
            yield NOTES.note("edge")

    def tidy(self) -> pd.DataFrame:
        """Criteria, a row for each size: :attr:`table` with its index as columns."""
        return self.table.reset_index()

    def _glance(self) -> dict[str, Any]:
        K, Q = self.best
        row = self.table.drop(columns=["note", "starts"]).loc[[(K, Q)]].to_dict("records")[0]
        return {"n_clusters": K, "n_factors": Q, "searched": len(self.table)} | {
            str(name): value for name, value in row.items()
        }

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Numbers of clusters and factors."""
        return [(int(K), int(Q)) for K, Q in self.table.index.to_list()]

    def _records(self) -> list[dict[str, Any]]:
        return [{str(name): value for name, value in row.items()} for row in self.table.to_dict("records")]

    def _cells(self, K: int, Q: int, row: Mapping[str, Any]) -> tuple[str, ...]:
        if row["llf"] != row["llf"]:  # nan for a failed fit
            return (str(K), str(Q), "", "", "", "", "", "", str(row["note"]))
        numbers = (
            f"{row['llf']:,.1f}",
            f"{row['parameters']:,.0f}",
            f"{row['bic']:,.1f}",
            f"{row['icl']:,.1f}",
        )
        note = "smallest BIC" if self.best == (K, Q) else str(row["note"])
        return (str(K), str(Q), *numbers, f"{row['entropy']:.2f}", str(row["starts"]), note)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw BIC by number of clusters, a line for each number of factors.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        ax = axes_for(ax, 5.6, 3.6)
        for number, (Q, part) in enumerate(self.table["bic"].groupby(level="n_factors")):
            at = part.dropna().droplevel("n_factors")
            color = COLORS[number % len(COLORS)]
            ax.plot(at.index, at.to_numpy(), "o-", color=color, label=f"{Q} factor{'s' * (Q != 1)}")
        ax.set_xticks(sorted({K for K, _ in self.sizes}))
        ax.set(xlabel="clusters", ylabel="BIC")
        legend_below(ax)
        set_headline(ax, "Number of clusters", "smaller BIC is better")
        return ax

    def __repr__(self) -> str:
        return self.summary().as_text()
