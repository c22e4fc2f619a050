"""The calibration plot over sites (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from statsmodels.stats.proportion import proportion_confint

from fedstat.drawing import COLOURS, INK, axes_for
from fedstat.inference.tables import shorten
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bins: TypeAlias = tuple[Floats, Floats, Floats]
"""Rows, observed sums and expected sums by bin, each of shape (B,)."""
MARGIN = 0.04
MOST_SITES = 7
"""Sites that are told apart by colour; more are drawn in grey."""
LEAST_ROWS = 50
"""Rows of a site behind a point of its line, about."""


def plot_calibration(
    curves: Mapping[str, Bins], total: Bins, *, binary: bool, groups: int = 10, ax: Axes | None = None
) -> Axes:
    """Observed against predicted means: all sites as points, each site as a line.

    Binary responses have intervals of proportions (Wilson 1927, 95 %). Neighbouring bins are joined to at
    most `groups` of about equal size, of small sites to fewer.
    """
    ax = axes_for(ax, 5.2, 4.8, "Calibration", ("top", "right"))
    for k, (site, bins) in enumerate(curves.items()):
        n, observed, expected = join_bins(*bins, int(np.clip(bins[0].sum() // LEAST_ROWS, 1, groups)))
        colour = COLOURS[k] if len(curves) <= MOST_SITES else "0.7"
        label = shorten(site, 28) if len(curves) <= MOST_SITES else ("one site" if k == 0 else None)
        ax.plot(expected / n, observed / n, color=colour, linewidth=1.2, alpha=0.8, label=label)
    _draw_total(ax, join_bins(*total, groups), binary)
    low, high = _limits(ax, binary)
    ax.plot([low, high], [low, high], color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set(xlabel="mean prediction", ylabel="observed proportion" if binary else "observed mean")
    legend = ax.legend(frameon=False, fontsize="small", loc="best")
    for text in legend.get_texts():
        text.set_parse_math(False)
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


def _limits(ax: Axes, binary: bool) -> tuple[float, float]:
    low = min(ax.get_xlim()[0], ax.get_ylim()[0])
    high = max(ax.get_xlim()[1], ax.get_ylim()[1])
    return (max(low, -MARGIN * high), min(high, 1.0 + MARGIN)) if binary else (low, high)
