"""The forest plot of one coefficient over sites (needs matplotlib)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.inference.plots import COLOURS, _pyplot
from fedstat.inference.tables import shorten
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, COMMON, RANDOM = "#333333", "0.55", COLOURS[0], COLOURS[1]
LARGEST_BOX = 13.0
"""Side of the heaviest site's box, in points."""
SMALLEST_BOX = 2.5
DIAMOND = 0.28
"""Half the height of a diamond, in rows."""
SUMMARY_GAP = 0.6
"""Blank rows between the sites and the diamonds."""


def plot_forest(
    rows: pd.DataFrame, combined: pd.Series, *, ax: Axes | None = None, alpha: float = 0.05
) -> Axes:
    """One coefficient: sites' own estimates, the common one, the mean of random effects.

    Parameters
    ----------
    rows : DataFrame
        Index site; columns ``estimate``, ``std_error`` (nan where the site has none) and ``problem``.
    combined : Series
        A row of `Heterogeneity.to_frame`; its name is the coefficient.
    ax : matplotlib Axes, optional
        None: a new figure, as tall as the rows need and as wide as a printed page.
    alpha : float
        One minus the level of the intervals.

    Returns
    -------
    matplotlib Axes
        The area of a box is the site's weight, its inverse variance. The bar below the mean of random effects
        is the interval for a further site.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    plt = _pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(7.0, 1.5 + 0.27 * (len(rows) + 2 + SUMMARY_GAP)), layout="constrained")
    z = float(stats.norm.isf(alpha / 2.0))
    y = np.arange(len(rows), dtype=np.float64)
    estimate, error = rows["estimate"].to_numpy(), rows["std_error"].to_numpy()
    _draw_sites(ax, y, estimate, z * error, error)
    bottom = len(rows) + SUMMARY_GAP
    common = (combined["estimate"], z * combined["std_error"])
    _draw_diamond(ax, bottom, *common, COMMON)
    random = (combined["re_estimate"], (combined["re_high"] - combined["re_low"]) / 2.0)
    _draw_diamond(ax, bottom + 1.0, *random, RANDOM)
    ax.hlines(bottom + 1.42, combined["pred_low"], combined["pred_high"], color=RANDOM, linewidth=2.2)
    _draw_references(ax, combined["estimate"])
    means = [np.append(estimate, [common[0], random[0]]), np.append(z * error, [common[1], random[1]])]
    _label(ax, rows, np.append(y, [bottom, bottom + 1.0]), _texts(*means, rows["problem"]))
    ax.set_xlabel(f"coefficient, {100 * (1 - alpha):g} % interval", fontsize="small")
    ax.set_title(_title(combined), loc="left", fontsize="medium", parse_math=False)
    return ax


def _draw_sites(ax: Axes, y: Floats, estimate: Floats, half: Floats, error: Floats) -> None:
    known = np.isfinite(estimate)
    if not known.any():
        return
    side = np.maximum(LARGEST_BOX * error[known].min() / error[known], SMALLEST_BOX)
    ax.hlines(y[known], (estimate - half)[known], (estimate + half)[known], color=INK, linewidth=1.2)
    ax.scatter(estimate[known], y[known], s=side**2, marker="s", color=INK, zorder=2)
    ax.scatter(estimate[known], y[known], s=2.0, color="white", zorder=3)


def _draw_diamond(ax: Axes, y: float, centre: float, half: float, colour: str) -> None:
    x = [centre - half, centre, centre + half, centre]
    ax.fill(x, [y, y - DIAMOND, y, y + DIAMOND], color=colour, zorder=2)


def _draw_references(ax: Axes, common: float) -> None:
    ax.axvline(common, color=COMMON, linewidth=0.9, linestyle="--", zorder=0)
    low, high = ax.get_xlim()
    if low <= 0.0 <= high:
        ax.axvline(0.0, color=QUIET, linewidth=0.9, zorder=0)


def _label(ax: Axes, rows: pd.DataFrame, y: Floats, texts: list[str]) -> None:
    names = [*(shorten(str(site), 28) for site in rows.index), "all sites, common", "random effects"]
    ax.set_yticks(y, labels=names, fontsize="small", parse_math=False)
    ax.set_ylim(y[-1] + 0.8, -0.7)
    right = ax.secondary_yaxis("right")
    right.set_yticks(y, labels=texts, fontsize="x-small", family="monospace", parse_math=False)
    ax.tick_params(axis="y", length=0)
    right.tick_params(axis="y", length=0)
    for label, colour in zip(ax.get_yticklabels()[-2:], (COMMON, RANDOM), strict=True):
        label.set(color=colour, weight="bold")
    ax.axhline(len(rows) - 1 + (1.0 + SUMMARY_GAP) / 2.0, color="0.85", linewidth=0.8, zorder=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    right.spines["right"].set_visible(False)


def _texts(estimate: Floats, half: Floats, problems: pd.Series) -> list[str]:
    """Estimate and interval of each row, in columns."""
    smallest = np.nanmin(half, initial=np.inf)
    digits = int(np.clip(1 - np.floor(np.log10(smallest)), 0, 6)) if 0.0 < smallest < np.inf else 3
    numbers = [[f"{v:.{digits}f}" for v in (b, b - h, b + h)] for b, h in zip(estimate, half, strict=True)]
    width = max((len(text) for row in numbers for text in row if text != "nan"), default=0)
    reasons = [*problems, "", ""]
    return [
        f"{b:>{width}} [{low:>{width}}, {high:>{width}}]" if b != "nan" else _absence(reason)
        for (b, low, high), reason in zip(numbers, reasons, strict=True)
    ]


def _absence(reason: str) -> str:
    return shorten(reason, 26) if reason else "not determined"


def _title(combined: pd.Series) -> str:
    name = shorten(str(combined.name), 60)
    if not combined["df"]:
        return f"{name}\nno two sites to compare"
    p, low, high = combined["p_value"], 100 * combined["I2_low"], 100 * combined["I2_high"]
    interval = "" if np.isnan(low) else f" ({low:.0f} to {high:.0f})"
    test = f"Q = {combined['Q']:.1f} on {combined['df']} df, " + (
        "P < 0.001" if p < 0.0005 else f"P = {p:.3f}"
    )
    return f"{name}\nI² = {100 * combined['I2']:.0f} %{interval}, {test}"
