"""Balance of columns between the arms of a treatment, and overlap of the propensity scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH, header_sheet
from fedstat.inference.tables import Sheet, yes_or_no
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.overlap import arm_sheet, is_bounded, overlap_notes
from fedstat.models.horizontal.results import OverRows, RowsBasis
from fedstat.models.horizontal.treatment_weights import FittedPropensity
from fedstat.models.treatment.protocol import TreatmentBalance
from fedstat.plotting import (
    COLORS,
    MUTED,
    ROWS_ONLY,
    SMALL,
    axes_for,
    label_rows,
    label_x,
    label_y,
    mark_x,
    plain_legend,
    set_headline,
    shorten,
)
from fedstat.spline_names import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGE_DIFFERENCE = 0.1
"""Standardized difference above which a column counts as unbalanced (Austin 2009)."""
NOTES = Catalogue(
    critical={
        "not_converged": "NOT CONVERGED: the propensity model; do not interpret these numbers",
    },
    warning={
        "unbalanced": "Not balanced by the weights (standardized difference above 0.1): {columns}. Add "
        "products or splines of these columns to the formula of the treatment.",
    },
    info={
        "weights": "Differences are divided by the deviation within the arms without weights. No outcome was "
        "read.",
        "trimmed": "Rows left out, since a probability is below {trim:g}: {rows:,} of {all:,}.",
        "overlap": "For the overlap, each site averages the probabilities of every few successive rows.",
    },
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BalanceRecord:
    """What a file of results holds."""

    fit: TreatmentBalance
    basis: RowsBasis


class BalanceResults(OverRows, saved_as="fedstat balance results 2", record=BalanceRecord):
    """Balance of the columns of a propensity model; made by :meth:`fedstat.TreatmentEffect.balance`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> model = fs.TreatmentEffect.from_formula("died ~ 1", partition, treatment="arm ~ age + C(stage)")
    >>> balance = model.balance()
    >>> balance.tidy().round(3)[["term", "smd_unweighted", "variance_ratio"]]
                  term  smd_unweighted  variance_ratio
    0              age           0.032           1.012
    1   C(stage)[T.II]           0.134           1.000
    2  C(stage)[T.III]          -0.045           1.000
    >>> balance.arms.columns.tolist(), balance.overlap.shape, type(balance.propensity).__name__
    (['rows', 'weighted', 'effective'], (20, 2), 'FittedPropensity')
    >>> balance.basis.site_column, balance.absent  # no site was lost
    ('hospital', ())
    >>> balance.plot_balance().get_xlabel(), balance.plot_overlap().get_xlabel()
    ('absolute standardized difference', 'probability of surgery')
    """

    @classmethod
    def _of(cls, model: HorizontalModel, fit: TreatmentBalance, ledger: Ledger) -> Self:
        """Make results of a comparison."""
        return cls(BalanceRecord(fit=fit, basis=RowsBasis.of(model)), ledger, model)

    @property
    def _fit(self) -> TreatmentBalance:
        fit: TreatmentBalance = self._record.fit
        return fit

    @property
    def propensity(self) -> FittedPropensity | None:
        """The propensity model for the argument `weights` of other models; None if weights depend on more."""
        return self._fit.propensity

    @property
    def arms(self) -> pd.DataFrame:
        """Rows of each arm, rows that have a weight, and their effective number, (sum w)^2 / sum w^2."""
        plain, weighted = self._fit.weights
        index = pd.Index(self._fit.levels, name=self._fit.request.arm)
        effective = weighted[:, 1] ** 2 / weighted[:, 2]
        rows = {"rows": plain[:, 0].astype(np.int64), "weighted": weighted[:, 0].astype(np.int64)}
        return pd.DataFrame({**rows, "effective": effective}, index=index)

    @property
    def overlap(self) -> pd.DataFrame:
        """Rows by arm, and by interval of the probability of each arm but the first.

        Raises
        ------
        NotAvailableError
            They were not counted.
        """
        fit = self._fit
        if not fit.counts.size:
            raise NotAvailableError("overlap: no probabilities were counted (overlap=False)")
        edges = np.linspace(0.0, 1.0, fit.counts.shape[2] + 1).round(6)
        columns = pd.MultiIndex.from_product(
            [fit.levels[1:], fit.levels], names=["probability of", fit.request.arm]
        )
        counts = fit.counts.reshape(-1, len(edges) - 1).T.astype(np.int64)
        index = pd.IntervalIndex.from_breaks(edges, closed="left", name="probability")
        return pd.DataFrame(counts, index=index, columns=columns)

    def tidy(self) -> pd.DataFrame:
        """One row for each column of the propensity model and each arm, compared with the first.

        Returns
        -------
        DataFrame
            ``term``, ``arm``; without and with weights the mean of the arm and of the first one, the
            standardized difference ``smd`` and the ``variance_ratio``; those without weights end in
            ``_unweighted``.
        """
        fit, parts = self._fit, []
        spread = np.sqrt((fit.variance[0, 1:] + fit.variance[0, :1]) / 2.0)
        for j, level in enumerate(fit.levels[1:], 1):
            frame = pd.DataFrame({"term": list(fit.names), "arm": level})
            for k, ending in enumerate(("_unweighted", "")):
                mean, variance = fit.mean[k], fit.variance[k]
                with np.errstate(divide="ignore", invalid="ignore"):
                    frame["mean" + ending], frame["mean_first" + ending] = mean[j], mean[0]
                    frame["smd" + ending] = (mean[j] - mean[0]) / spread[j - 1]
                    frame["variance_ratio" + ending] = variance[j] / variance[0]
            parts.append(frame)
        return pd.concat(parts, ignore_index=True)

    def _largest(self) -> pd.DataFrame:
        """Return the largest absolute differences of each column between the first arm and others."""
        frame = self.tidy()
        return frame[["smd_unweighted", "smd"]].abs().groupby(frame["term"], sort=False).max()

    def plot_balance(self, ax: Axes | None = None) -> Axes:
        """Draw the absolute standardized differences without and with weights (love plot).

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        frame = self._largest()
        ax = axes_for(ax, 6.4, 1.5 + 0.3 * len(frame), masked=ROWS_ONLY)
        places = np.arange(len(frame), dtype=np.float64)
        before, after = frame.to_numpy(dtype=np.float64).T
        for y, x in zip(places, np.sort([before, after], axis=0).T, strict=True):
            ax.plot(x, [y, y], color="0.85", linewidth=2.0, zorder=1)
        ax.plot(before, places, "o", color=MUTED, markerfacecolor="none", label="without weights", zorder=2)
        ax.plot(after, places, "o", color=COLORS[0], label="weighted", zorder=3)
        label_rows(ax, places, [shorten(name, 32) for name in short_names(list(frame.index))])
        widest = max(float(np.nanmax(frame)), LARGE_DIFFERENCE)
        ax.set_xlim(-0.02 * widest, 1.15 * widest)
        label_x(ax, "absolute standardized difference")
        mark_x(ax, LARGE_DIFFERENCE, "0.1")
        plain_legend(ax, loc="lower right")
        set_headline(ax, f"Balance by {self._fit.request.arm}", self._estimand)
        return ax

    def plot_overlap(self, ax: Axes | None = None, *, arm: Any = None) -> Axes:
        """Draw the distribution of the probability of an arm in each arm.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        arm : level of the treatment, optional
            By default the second; the probability of the first of two is one less that of the second.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        NotAvailableError
            Probabilities were not counted.
        """
        fit, frame = self._fit, self.overlap
        arm = fit.levels[1] if arm is None else arm
        if arm not in fit.levels[1:]:
            raise NotAvailableError(f"plot_overlap: expected one of {', '.join(map(str, fit.levels[1:]))}")
        ax = axes_for(ax, 6.4, 3.6)
        edges = np.linspace(0.0, 1.0, len(frame) + 1)
        for k, level in enumerate(fit.levels):
            counts = frame[arm][level].to_numpy(dtype=np.float64)
            color = COLORS[k % len(COLORS)]
            ax.stairs(100.0 * counts / counts.sum(), edges, fill=True, color=color, alpha=0.3)
            ax.stairs(100.0 * counts / counts.sum(), edges, color=color, linewidth=1.4, label=str(level))
        ax.set_xlim(0.0, 1.0)
        ax.set_ylim(bottom=0.0)
        label_y(ax, "% of the rows of an arm")
        plain_legend(ax, title=fit.request.arm, title_fontsize=SMALL)
        label_x(ax, f"probability of {arm}")
        set_headline(ax, f"Overlap of the arms of {fit.request.arm}")
        return ax

    # -- summary ---------------------------------------------------------------------------------

    @property
    def _estimand(self) -> str:
        request = self._fit.request
        if request.target:
            return f"weights to the rows of {request.target}"
        return f"weights of {request.estimand}{f', trimmed at {request.trim:g}' if request.trim else ''}"

    def _glance(self) -> Mapping[str, Any]:
        frame = self._largest()
        return {
            "nobs": int(self.arms["rows"].sum()),
            "n_sites": len(self.basis.agreement.sites),
            "smd_unweighted": float(frame["smd_unweighted"].max()),
            "smd": float(frame["smd"].max()),
        }

    def _sheets(self) -> Iterator[Sheet]:
        fit, arms, n_sites = self._fit, self.arms, len(self.basis.agreement.sites)
        lines = [
            ("Treatment", fit.request.arm),
            ("Estimand", fit.request.estimand),
            ("No. Observations", f"{int(arms['rows'].sum()):,}"),
            ("Sites", str(n_sites)),
            ("Sums", f"masked over {n_sites} sites" if fit.masked else "unmasked"),
            ("Converged", yes_or_no(fit.converged)),
        ]
        yield header_sheet("Balance of a treatment", lines)
        yield arm_sheet(arms, ("rows", "with weight", "effective rows"), ",.1f")
        frame, several = self.tidy(), len(fit.levels) > 2
        names = short_names(frame["term"].tolist())
        figures = frame[["smd_unweighted", "smd", "variance_ratio_unweighted", "variance_ratio"]]
        cells = tuple(
            (f"{name} ({level})" if several else name, *(f"{value:.3f}" for value in values))
            for name, level, values in zip(names, frame["arm"], figures.to_numpy().tolist(), strict=True)
        )
        headers = ("", "difference", "weighted", "variance ratio", "weighted ")
        wide = (13, 13, 16, 13)
        stub = WIDTH - sum(wide) - len(wide)
        title = f"Standardized differences from {fit.levels[0]}, and ratios of variances"
        yield Sheet(headers, cells, "lrrrr", (stub, *wide), title)

    def _summary_notes(self) -> Iterator[Note]:
        fit, arms = self._fit, self.arms
        if not fit.converged:
            yield NOTES.note("not_converged")
        weighted, request = fit.weights[1], fit.request
        bounded = is_bounded(request.estimand, request.target)
        yield from overlap_notes(fit.levels, weighted[:, 0], weighted[:, 1:], bounded)
        frame = self._largest()
        if columns := [str(name) for name in frame.index[frame["smd"] > LARGE_DIFFERENCE]]:
            yield NOTES.note("unbalanced", columns=short_names(columns))
        if fit.request.trim:
            total = int(arms["rows"].sum())
            rows = total - int(arms["weighted"].sum())
            yield NOTES.note("trimmed", trim=fit.request.trim, rows=rows, all=total)
        yield NOTES.note("weights")
        if fit.counts.size:
            yield NOTES.note("overlap")
        yield from self._left_out_note()
        yield from super()._summary_notes()

    def __repr__(self) -> str:
        largest = self._glance()
        return (
            f"<Balance by {self._fit.request.arm}: {len(self._fit.names)} columns, largest standardized "
            f"difference {largest['smd_unweighted']:.2f}, weighted {largest['smd']:.2f}; see .summary()>"
        )
