"""The forest plot of one coefficient over sites (needs matplotlib)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.drawing import (
    COLOURS,
    INK,
    NARROW,
    ROWS_ONLY,
    SMALL,
    axes_for,
    entitle,
    few_ticks,
    label_log_x,
    label_rows,
    label_x,
    name_width,
    shorten,
    thin_labels,
    width_of,
)
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axes._secondary_axes import SecondaryAxis

COMMON, RANDOM = COLOURS[0], COLOURS[1]
LARGEST_BOX, SMALLEST_BOX = 12.0, 3.0
"""Sides in points; the largest is that of the heaviest site."""
DIAMOND = 0.3
"""Half the height of a diamond, in rows."""
GAP = 0.5
"""Blank rows between the sites and the diamonds."""
LABELS = {"all sites, common": COMMON, "random effects": RANDOM, "a further site": RANDOM}


def plot_forest(
    rows: pd.DataFrame,
    combined: pd.Series,
    *,
    ax: Axes | None = None,
    alpha: float = 0.05,
    exponentiate: bool = False,
    effect: str = "coefficient",
) -> Axes:
    """One coefficient: sites' own estimates, the common one, the mean of random effects.

    `rows` have index site and columns ``estimate``, ``std_error`` (nan where the site has none) and
    ``problem``; `combined` is a row of `Heterogeneity.to_frame`, named as the coefficient. The area of a box
    is the site's weight, its inverse variance. The last row is the prediction interval for a further site; it
    ends in arrows where it is wider than the picture. Exponentials stand on a logarithmic scale. `effect`
    names the axis. A new figure is as wide as a printed page.
    """
    ax = axes_for(ax, 7.0, 1.4 + 0.27 * (len(rows) + 3), hidden=ROWS_ONLY)
    turn = np.exp if exponentiate else np.asarray
    if exponentiate:
        ax.set_xscale("log")
    z = float(stats.norm.isf(alpha / 2.0))
    y = np.arange(len(rows) + 3) + np.repeat([0.0, GAP], [len(rows), 3])
    estimate = np.append(rows["estimate"].to_numpy(), [combined["estimate"], combined["re_estimate"]])
    # The mean of random effects has t quantiles; it is half of its interval as it stands.
    mean = (combined["re_high"] - combined["re_low"]) / 2.0
    half = np.append(z * np.append(rows["std_error"].to_numpy(), combined["std_error"]), mean)
    limits = turn(np.stack([estimate, estimate - half, estimate + half], axis=1))
    further = turn(np.array([np.nan, combined["pred_low"], combined["pred_high"]]))
    _draw_sites(ax, y[:-3], limits[:-2], half[:-2])
    _draw_absent(ax, y[:-3], rows["problem"][rows["estimate"].isna()], estimate[:-2])
    _draw_diamond(ax, y[-3], limits[-2], COMMON)
    _draw_diamond(ax, y[-2], limits[-1], RANDOM)
    _draw_references(ax, limits[-2, 0], float(turn(0.0)), y[-4] + (1.0 + GAP) / 2.0)
    _draw_further(ax, y[-1], further[1], further[2])
    most = name_width(ax, 0.3, 28)
    _label_left(ax, y, [shorten(str(site), most) for site in rows.index])
    right = _label_right(ax, y, np.vstack([limits, further]), exponentiate)
    if exponentiate:
        label_log_x(ax)
    else:
        few_ticks(ax)
    label_x(ax, f"{effect}, with {100 * (1 - alpha):g} % interval")
    ax.xaxis.label.set_fontsize(SMALL)
    headline, rest = _title(combined).split("\n")
    entitle(ax, headline, rest)
    thin_labels(ax, first=len(LABELS))
    _follow(right, ax)
    return ax


def _draw_sites(ax: Axes, y: Floats, limits: Floats, half: Floats) -> None:
    known = np.isfinite(limits[:, 0])
    y, half, (estimate, low, high) = y[known], half[known], limits[known].T
    side = np.maximum(LARGEST_BOX * half.min(initial=np.inf) / half, SMALLEST_BOX)
    ax.hlines(y, low, high, color=INK, linewidth=1.2)
    ax.scatter(estimate, y, s=side**2, marker="s", color=INK, linewidths=0.0, zorder=2)


def _draw_absent(ax: Axes, y: Floats, reasons: pd.Series, estimate: Floats) -> None:
    """Write why there is no estimate into the row of a site."""
    for row, reason in zip(y[np.isnan(estimate)], reasons, strict=True):
        text = ax.text(
            *(0.02, row, shorten(reason or "not determined here", name_width(ax, 0.42, 60))),
            transform=ax.get_yaxis_transform(),
            fontsize="x-small",
            color="0.4",
            va="center",
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
        # It is within the axes, which the layout would make small for it.
        text.set_in_layout(False)


def _draw_diamond(ax: Axes, y: float, limits: Floats, colour: str) -> None:
    centre, low, high = limits.tolist()
    ax.fill(
        [low, centre, high, centre], [y, y - DIAMOND, y, y + DIAMOND], color=colour, linewidth=0.0, zorder=2
    )


def _draw_references(ax: Axes, common: float, none: float, divide: float) -> None:
    ax.axvline(common, color=COMMON, linewidth=0.9, linestyle="--", zorder=0)
    # No effect is a reference only where it is in the picture; it must not widen it.
    low, high = ax.get_xlim()
    if low <= none <= high:
        ax.axvline(none, color="0.55", linewidth=0.9, zorder=0)
    ax.axhline(divide, color="0.85", linewidth=0.8, zorder=0)


def _draw_further(ax: Axes, y: float, low: float, high: float) -> None:
    """Draw the prediction interval, cut where it would make the rest small."""
    # Limits of what is drawn so far: a wide interval may not squeeze the sites.
    left, right = ax.get_xlim()
    shown = np.clip([low, high], left, right)
    ax.hlines(y, *shown, color=RANDOM, linewidth=2.2)
    for end, limit, marker in ((low, left, "<"), (high, right, ">")):
        if np.isfinite(end) and (end < left or end > right):
            ax.plot(limit, y, marker, color=RANDOM, markersize=6.0, clip_on=False)
    ax.set_xlim(left, right)


def _label_left(ax: Axes, y: Floats, sites: list[str]) -> None:
    label_rows(ax, y, [*sites, *LABELS])
    for label, colour in zip(ax.get_yticklabels()[-len(LABELS) :], LABELS.values(), strict=True):
        label.set(color=colour, weight="bold")
    ax.tick_params(axis="y", pad=8)
    ax.tick_params(axis="x", labelsize=SMALL)


def _label_right(ax: Axes, y: Floats, numbers: Floats, ratios: bool) -> SecondaryAxis:
    """Write estimate and interval of each row in columns, with two digits of the shortest interval.

    Of ratios three digits: decimals that suit a large one would make zeros of small ones.
    In a narrow picture estimates alone: intervals are drawn, and need the room.
    """
    shortest = float(np.nanmin(numbers[:, 2] - numbers[:, 1], initial=np.inf)) / 2.0
    # As many decimals as leave two digits to half of the shortest interval.
    digits = int(np.clip(1.0 - np.floor(np.log10(shortest)), 0, 6)) if 0.0 < shortest < np.inf else 3
    form = "#.3g" if ratios else f".{digits}f"
    cells = [["" if np.isnan(v) else f"{v:{form}}".rstrip(".") for v in row] for row in numbers.tolist()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in cells]
    texts = [f"{b} [{low}, {high}]" if low.strip() else "" for b, low, high in padded]
    if width_of(ax) < NARROW:
        texts = [b for b, _, _ in padded]
    right = ax.secondary_yaxis("right")
    right.set_yticks(y, labels=texts, fontsize="x-small", family="monospace", parse_math=False)
    right.tick_params(axis="y", length=0)
    right.spines["right"].set_visible(False)
    return right


def _follow(right: SecondaryAxis, ax: Axes) -> None:
    """Leave numbers to the rows that have names."""
    for name, number in zip(ax.get_yticklabels(), right.get_yticklabels(), strict=True):
        if not name.get_text():
            number.set_visible(False)


def _title(combined: pd.Series) -> str:
    name = shorten(str(combined.name), 60)
    if not combined["df"]:
        return f"{name}\nfewer than two sites to compare"
    p, low, high = combined["p_value"], 100 * combined["I2_low"], 100 * combined["I2_high"]
    interval = "" if np.isnan(low) else f" ({low:.0f} to {high:.0f})"
    test = f"Q = {combined['Q']:.1f} on {combined['df']:.0f} df, "
    test += "P < 0.001" if p < 0.0005 else f"P = {p:.3f}"
    return f"{name}\nI² = {100 * combined['I2']:.0f} %{interval}, {test}"
