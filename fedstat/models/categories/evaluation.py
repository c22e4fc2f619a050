"""Evaluation of predicted categories: one against the rest, from counts in public bins at the sites."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.codec import to_json
from fedstat.errors import ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.horizontal_design import RowsSchema, SiteRowCounts, open_requests
from fedstat.federation.dry_run.synthetic import SyntheticRows
from fedstat.federation.message import Request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.evaluation import ALL, OWN_ROWS, Evaluation, bin_edges, probabilities
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import plot_calibration
from fedstat.inference.summary import WIDTH, Report
from fedstat.inference.tables import Sheet
from fedstat.models.categories.protocol import CategoryFit
from fedstat.models.categories.steps import FAMILY, LOGIT
from fedstat.models.checks import check_layout
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTHS = (WIDTH - 62, 9, 9, 11, 8, 9, 9, 0)
NOTES = Catalogue(
    warning={
        "own_rows": OWN_ROWS,
    },
    info={
        "auc": "AUC of a category against the rest, from counts in public bins of its probability; the AUC "
        "of all is their mean, weighted by rows.",
        "hand_till": "AUC of pairs: the mean over all pairs of categories, among their rows. From the bins, "
        "that of these rows is between {low:.3f} and {high:.3f}.",
        "merged_cells": "Bins of fewer than {least} rows at a site, and predicted categories with few rows "
        "of a category (min_level_count), are counted with a neighbor. Where an owner allows one "
        "evaluation, bins are larger: those of two categories differ in no few rows.",
    },
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CategoryEvaluation(Report):
    """Discrimination, calibration and errors of predicted categories, over sites.

    Attributes
    ----------
    by_category : dict of Evaluation
        Each category against all others, with its own ``roc()``, ``calibration()`` and figures by site.
    counts : ndarray, shape (K, J, J)
        Rows by site, category and predicted category, the one with the largest probability.
    pairs : ndarray, shape (K, J, J, B)
        Rows by site, category whose probability is binned, category of the row, and bin.
    logliks, n : ndarray, shape (K,)
        Sum of the logarithms of the probabilities of the rows' categories, and weights, by site.
    sites : tuple of str
    least : int
        Fewest rows of a bin at a site.
    own_rows : bool
        Whether the model was fitted to these rows.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> evaluation = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit().evaluate()
    >>> round(evaluation.log_loss, 2), round(evaluation.accuracy, 2), round(evaluation.auc, 2)
    (1.23, 0.48, 0.67)
    >>> round(evaluation.hand_till, 2), evaluation.hand_till_bounds[1] < 0.75
    (0.62, True)
    >>> evaluation.confusion().shape, list(evaluation.by_category)
    ((5, 5), [0, 1, 2, 3, 4])
    >>> evaluation.calibration().index.names, bool(evaluation.plot_calibration().has_data())
    (FrozenList(['category', 'bin']), True)
    """

    by_category: dict[LevelValue, Evaluation]
    counts: Floats
    pairs: Floats
    logliks: Floats
    n: Floats
    sites: tuple[str, ...]
    least: int
    own_rows: bool = False

    @property
    def log_loss(self) -> float:
        """Mean of minus the logarithm of the probability of each row's category."""
        return float(-self.logliks.sum() / self.n.sum())

    @property
    def accuracy(self) -> float:
        """Share of the rows whose category has the largest probability."""
        return float(np.trace(self.counts.sum(axis=0)) / self.counts.sum())

    @property
    def auc(self) -> float:
        """Mean of the areas of all categories against the rest, weighted by their rows."""
        table = self.tidy()
        known = table["auc"].notna()
        return float(np.average(table["auc"][known], weights=table["observed"][known]))

    @property
    def hand_till(self) -> float:
        """Mean over pairs of categories of the area between them, each pair counted equally.

        The area of categories j and k is the mean of that of the probability of j and that of k, among the
        rows of both (Hand and Till, "A simple generalisation of the area under the ROC curve for multiple
        class classification problems", Machine Learning 45, 2001, equation 7). Rows in one bin count as ties.
        """
        return self._pair_areas()[0]

    @property
    def hand_till_bounds(self) -> tuple[float, float]:
        """Smallest and largest :attr:`hand_till` of these rows that the bins allow."""
        _, low, high = self._pair_areas()
        return low, high

    def _pair_areas(self) -> tuple[float, float, float]:
        found, one = [], next(iter(self.by_category.values()))
        given: dict[str, Any] = {
            "edges": one.edges,
            "sites": one.sites,
            "means": one.means,
            "least": one.least,
        }
        for j, k in permutations(range(len(self.by_category)), 2):
            events, others = self.pairs[:, j, j], self.pairs[:, j, k]
            if events.any() and others.any():
                pair = Evaluation(n=events + others, observed=events, expected=events, **given)
                area = pair.discrimination[ALL]
                found.append((area.auc, area.at_least, area.at_most))
        auc, low, high = np.mean(found, axis=0).tolist()
        return auc, low, high

    def confusion(self) -> pd.DataFrame:
        """Rows by category (index) and by predicted category (columns), over all sites."""
        levels = list(self.by_category)
        frame = pd.DataFrame(self.counts.sum(axis=0), index=pd.Index(levels, name="observed"), columns=levels)
        return frame.rename_axis(columns="predicted")

    def calibration(self) -> pd.DataFrame:
        """Predicted and observed shares of each category by bin, over all sites: index (category, bin)."""
        tables = {level: one.calibration().loc[ALL] for level, one in self.by_category.items()}
        return pd.concat(tables, names=["category", "bin"])

    def plot_calibration(self, ax: Axes | None = None, *, groups: int = 10) -> Axes:
        """Plot observed against predicted shares: each category as a line, all together as points."""
        sums = {
            str(level): tuple(part.sum(axis=0) for part in (one.n, one.observed, one.expected))
            for level, one in self.by_category.items()
        }
        total: Any = tuple(np.sum(part, axis=0) for part in zip(*sums.values(), strict=True))
        # No intervals: the probabilities of one row are not independent.
        words = ("probabilities", "all categories")
        ax = plot_calibration(sums, total, binary=False, groups=groups, counted=words, ax=ax)
        ax.set_ylabel("observed proportion")
        return ax

    def tidy(self) -> pd.DataFrame:
        """One row per category, with the columns of :meth:`Evaluation.to_frame`."""
        rows = {level: one.to_frame().loc[ALL] for level, one in self.by_category.items()}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("category").reset_index()

    def _glance(self) -> dict[str, float]:
        figures = {"log_loss": self.log_loss, "accuracy": self.accuracy, "auc": self.auc}
        figures["hand_till"] = self.hand_till
        return {"nobs": float(self.n.sum()), "n_sites": len(self.sites), **figures}

    def _sheets(self) -> Iterator[Sheet]:
        pairs = ("AUC of pairs (Hand and Till)", self.hand_till)
        figures = (("Log-loss", self.log_loss), ("Accuracy", self.accuracy), ("AUC", self.auc), pairs)
        yield Sheet(
            ("", "all sites"),
            tuple((name, f"{value:.4f}") for name, value in figures),
            "lr",
            (WIDTH - 15, 14),
            "Predicted categories and observations",
        )
        heads = ("category", "observed", "expected", "ratio", "AUC", "0.025", "0.975")
        table = self.tidy()[["category", "observed", "expected", "ratio", "auc", "auc_low", "auc_high"]]
        rows = tuple(
            (str(level), f"{observed:,.0f}", f"{expected:,.1f}", *(f"{value:.3f}" for value in rest))
            for level, observed, expected, *rest in table.itertuples(index=False)
        )
        yield Sheet(
            heads, rows, "lrrrrrr", (WIDTH - 60, 10, 10, 9, 8, 8, 9), "Each category against the rest"
        )
        levels, counts = [str(level) for level in self.by_category], self.counts.sum(axis=0)
        width = max(6, min(12, (WIDTH - 24) // len(levels) - 1))
        cells = tuple(
            (level, *(f"{value:,.0f}" for value in row)) for level, row in zip(levels, counts, strict=True)
        )
        widths = (WIDTH - len(levels) * (width + 1), *[width] * len(levels))
        yield Sheet(
            ("observed", *levels), cells, "l" + "r" * len(levels), widths, "Predicted category", wrap=True
        )

    def _summary_notes(self) -> Iterator[Note]:
        if self.own_rows:
            yield NOTES.note("own_rows")
        yield NOTES.note("auc")
        low, high = self.hand_till_bounds
        yield NOTES.note("hand_till", low=low, high=high)
        if self.least > 1:
            yield NOTES.note("merged_cells", least=self.least)

    def __repr__(self) -> str:
        figures = f"log-loss {self.log_loss:.3f}, AUC {self.auc:.3f}"
        return f"<Evaluation of categories: {len(self.sites)} sites, {figures}; see .summary()>"


def evaluate_categories(
    fit: CategoryFit, agreement: RowsSchema, partition: ClientPartition, own_rows: bool
) -> tuple[CategoryEvaluation, Ledger]:
    """Evaluate a fit on a partition's rows."""
    check_layout("evaluate()", partition, "horizontal")
    question, ledger = agreement.question, Ledger()
    agreed = replace(agreement, sites=tuple(SiteRowCounts(name, 0, 0) for name in partition.sites))
    rows = tuple(SiteRowCounts(name, len(at), len(at)) for name, at in partition.rows.items())
    analysis = PostFitAnalysis(
        partition,
        "evaluate()",
        f"{question.response} ~ {' + '.join(question.terms) or 1}",
        fit.request.link,
        SyntheticRows(replace(agreement, sites=rows), LOGIT).sites,
        dict.fromkeys(partition.sites, question.needed),
    )
    found = run_analysis(analysis, lambda: _evaluation(fit, agreed), ledger)
    return replace(found, own_rows=own_rows), ledger


def _evaluation(fit: CategoryFit, agreement: RowsSchema) -> FitProtocol[CategoryEvaluation]:
    session, names = secrets.token_hex(8), tuple(row.site for row in agreement.sites)
    text = to_json(replace(fit.request, clusters=()))
    requests = [Request(site, FAMILY, "bin_counts", {"beta": fit.params}, session, text) for site in names]
    # Both in one round: a site answers in the order in which it is asked.
    replies = yield [
        one for pair in zip(open_requests(agreement, session), requests, strict=True) for one in pair
    ]
    arrays = [reply.arrays for reply in replies[1::2]]
    bins, J = np.array([one["bins"] for one in arrays]), len(fit.categories)
    if bins.shape[1:3] != (J, J + 1):
        raise ModelError("evaluate: the sites count other categories than those of the fit")
    edges, least = (
        np.concatenate([[-np.inf], bin_edges(LOGIT, 0.0, 1.0), [np.inf]]),
        int(max(one["least"] for one in arrays)),
    )
    by_category = {
        level: Evaluation(
            edges=edges,
            sites=names,
            n=bins[:, j, :J].sum(axis=1),
            observed=bins[:, j, j],
            expected=bins[:, j, J],
            least=least,
            means=probabilities(edges, LOGIT),
        )
        for j, level in enumerate(fit.categories)
    }
    return CategoryEvaluation(
        by_category=by_category,
        counts=np.array([one["confusion"] for one in arrays]),
        logliks=np.array([float(one["loglik"]) for one in arrays]),
        pairs=bins[:, :, :J],
        n=bins[:, 0, :J].sum(axis=(1, 2)),
        sites=names,
        least=least,
    )
