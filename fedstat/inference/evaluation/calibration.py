"""Calibration and receiver operating characteristics over sites (need matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pandas as pd
from statsmodels.stats.proportion import proportion_confint

from fedstat.drawing import COLOURS, INK, MUTED, SMALL, axes_for, entitle, legend_below, name_width, shorten
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bins: TypeAlias = tuple[Floats, Floats, Floats]
"""Rows, observed sums and expected sums by bin, each of shape (B,)."""
MARGIN = 0.04
STRIP = 30
"""Bars of the histogram above a calibration plot."""
MOST_SITES = 7
"""Sites that are told apart by colour; more are drawn in grey."""
LEAST_ROWS = 50
"""Rows of a site behind a point of its line, about."""


def plot_calibration(
    curves: Mapping[str, Bins], total: Bins, *, binary: bool, groups: int = 10, ax: Axes | None = None
) -> Axes:
    """Observed against predicted means: all sites as points, each site as a line; rows by prediction above.

    Binary responses have intervals of proportions (Wilson 1927, 95 %). Neighbouring bins are joined to at
    most `groups` of about equal size, of small sites to fewer.
    """
    ax = axes_for(ax, 5.0, 5.4)
    for k, (site, bins) in enumerate(curves.items()):
        n, observed, expected = join_bins(*bins, int(np.clip(bins[0].sum() // LEAST_ROWS, 1, groups)))
        colour = COLOURS[k] if len(curves) <= MOST_SITES else "0.7"
        label = (
            shorten(site, name_width(ax, 0.4, 28))
            if len(curves) <= MOST_SITES
            else ("one site" if k == 0 else None)
        )
        ax.plot(expected / n, observed / n, color=colour, linewidth=1.2, alpha=0.8, label=label)
    _draw_total(ax, join_bins(*total, groups), binary)
    low, high = _limits(ax, total, binary)
    ax.plot([low, high], [low, high], color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set(xlabel="mean prediction", ylabel="observed proportion" if binary else "observed mean")
    _draw_histogram(ax, total, binary)
    legend_below(ax)
    entitle(ax, "Calibration")
    return ax


def _draw_histogram(ax: Axes, total: Bins, binary: bool) -> None:
    """Draw rows by prediction in a strip above the axes; of a binary response with the events among them."""
    n, observed, expected = (values[total[0] > 0.0] for values in total)
    edges = np.linspace(*ax.get_xlim(), STRIP + 1)
    strip = ax.inset_axes((0.0, 1.02, 1.0, 0.14))
    for counts, colour in [(n, "0.75"), *([(observed, COLOURS[1])] if binary else [])]:
        height, _ = np.histogram(expected / n, edges, weights=counts)
        strip.bar(edges[:-1], height, np.diff(edges), align="edge", color=colour, linewidth=0.0)
    strip.set(xlim=ax.get_xlim(), xticks=[], yticks=[])
    for side in ("top", "right", "left"):
        strip.spines[side].set_visible(False)
    rows = f"{n.sum():,.0f} rows" + (f", {observed.sum():,.0f} events" if binary else "")
    colour = COLOURS[1] if binary else MUTED
    strip.set_title(rows, loc="right", fontsize=SMALL, color=colour, pad=1.0)


def plot_roc(curves: pd.DataFrame, areas: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw the points of :meth:`Evaluation.roc`, joined; the last curve is that of all, the others sites'."""
    ax = axes_for(ax, 5.0, 5.2)
    names = list(dict.fromkeys(curves.index.get_level_values(0)))
    few = len(names) - 1 <= MOST_SITES
    ax.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    for k, name in enumerate(names):
        points, last = curves.loc[name], k == len(names) - 1
        label = f"{shorten(str(name), name_width(ax, 0.3, 28))} (AUC {areas[name]:.3f})"
        if not (few or last):
            label = "" if k else "one site"
        style = {"color": INK, "linewidth": 2.0} if last else {"color": COLOURS[k] if few else "0.7"}
        ax.plot(points["fpr"], points["tpr"], label=label or None, **({"linewidth": 1.2} | style))
    margins = (-MARGIN / 2, 1.0 + MARGIN / 2)
    ax.set(xlim=margins, ylim=margins, aspect="equal")
    ax.set(xlabel="false positive rate", ylabel="true positive rate")
    legend_below(ax)
    entitle(ax, "Receiver operating characteristic")
    return ax


def join_bins(n: Floats, observed: Floats, expected: Floats, groups: int) -> Bins:
    """Join neighbouring bins to at most so many groups of about equal size; empty groups are left out."""
    # By the middle rank of a bin: a bin is never split over two groups.
    middle = (np.cumsum(n) - n / 2.0) / max(float(n.sum()), 1.0)
    group = np.minimum((groups * middle).astype(np.int64), groups - 1)
    sums: Floats = np.array(
        [np.bincount(group, v, groups) for v in (n, observed, expected)], dtype=np.float64
    )
    joined, y, mu = sums[:, sums[0] > 0.0]
    return joined, y, mu


def _draw_total(ax: Axes, bins: Bins, binary: bool) -> None:
    n, observed, expected = bins
    x, y = expected / n, observed / n
    if binary:
        low, high = proportion_confint(observed, n, method="wilson")
        ax.vlines(x, low, high, color=INK, linewidth=1.2, zorder=3)
    ax.scatter(x, y, s=26, color=INK, zorder=4, label="all sites")


def _limits(ax: Axes, total: Bins, binary: bool) -> tuple[float, float]:
    n, _, expected = (values[total[0] > 0.0] for values in total)
    low = min(ax.get_xlim()[0], ax.get_ylim()[0], float((expected / n).min()))
    high = max(ax.get_xlim()[1], ax.get_ylim()[1], float((expected / n).max()))
    return (max(low, -MARGIN * high), min(high, 1.0 + MARGIN)) if binary else (low, high)
