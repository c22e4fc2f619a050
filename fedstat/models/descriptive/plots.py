"""The figure of survival curves, as medical journals print it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.inference.survival_curves import TIME_TOLERANCE
from fedstat.plotting import (
    COLORS,
    INK,
    MUTED,
    SMALL,
    axes_for,
    label_y,
    plain_legend,
    set_headline,
    text_width,
)
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = 14.0
"""Points between two lines of the table below the curves."""
MOST_TICKS = 8


def plot_survival(
    curves: Mapping[str, pd.DataFrame],
    times: Floats,
    at_risk: Floats,
    unit: str,
    p_value: float | None,
    *,
    ax: Axes | None = None,
    alpha: float = 0.05,
    events: bool = False,
    words: tuple[str, str, str] | None = None,
    test: str = "",
    merged: bool = False,
) -> Axes:
    """Draw step curves with bands, or points at the ends of `merged` intervals; below, rows at risk.

    `at_risk` (G, 1 + J) are the rows at risk at time 0 and at times (J,).
    `words` are the headline, the label of the axis, and the name of the `test`.
    """
    share = ("Share with the event", "share with the event") if events else ("Survival", "survival")
    headline, label_of_axis, test = words or (*share, test)
    ax = axes_for(ax, 7.0, 3.6 + 0.25 * len(curves))
    for place, (label, frame) in enumerate(curves.items()):
        color = COLORS[place % len(COLORS)]
        x = np.concatenate([[0.0], frame["time"].to_numpy(), [float(times[-1])]])
        values = np.array(
            [
                np.concatenate([[1.0], frame[name].to_numpy()])
                for name in ("survival", "conf_low", "conf_high")
            ]
        )
        values = np.column_stack([values, values[:, -1]])
        survival, low, high = values
        if merged:
            # Known at the ends. In between the curve is below its limit before, and above its limit after.
            low = np.append(low[1:], low[-1])
            marks: dict[str, Any] = {"marker": "o", "markersize": 3.0, "linewidth": 1.2}
            ax.plot(x[:-1], (1.0 - survival if events else survival)[:-1], color=color, label=label, **marks)
        else:
            steps = 1.0 - survival if events else survival
            ax.step(x, steps, where="post", color=color, linewidth=1.6, label=label)
        low, high = (1.0 - high, 1.0 - low) if events else (low, high)
        ax.fill_between(x, low, high, step="post", color=color, alpha=0.15, linewidth=0.0)
    ax.set_xlim(0.0, float(times[-1]) * 1.02)
    ax.set_ylim(0.0, 1.02)
    label_y(ax, label_of_axis)
    ticks = _ticks(float(times[-1]))
    if merged:
        # The numbers at risk are known at the ends of intervals.
        ends = np.append(0.0, times)
        ticks = np.unique(ends[np.abs(ends[:, None] - ticks).argmin(axis=0)])
    ax.set_xticks(ticks)
    ax.set_xlabel(unit, parse_math=False)
    if len(curves) > 1:
        early = [frame[frame["time"] <= 0.45 * times[-1]]["conf_low"] for frame in curves.values()]
        low = min(float(one.min()) for one in early if len(one)) if any(map(len, early)) else 1.0
        plain_legend(ax, loc="upper left" if events else "lower left" if low > 0.3 else "upper right")
    _table(ax, list(curves), times, at_risk, ticks)
    rest = f"with {100 * (1 - alpha):g} % intervals"
    if p_value is not None:
        shown = "< 0.001" if p_value < 0.001 else f"= {p_value:.3f}"
        rest = f"{rest}; {test}: p {shown}"
    set_headline(ax, headline, rest)
    return ax


def _ticks(end: float) -> Floats:
    """Return round times up to the end of the curves."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    steps = [1, 1.2, 2, 2.4, 3, 5, 6, 10]
    ticks = np.asarray(MaxNLocator(MOST_TICKS, steps=steps).tick_values(0.0, end))
    return ticks[(ticks >= 0.0) & (ticks <= end * (1.0 + 1e-9))]


def _table(ax: Axes, labels: list[str], times: Floats, at_risk: Floats, ticks: Floats) -> None:
    """Write the rows at risk below the axis, at the times at which they are known."""
    text: dict[str, Any] = {"fontsize": SMALL, "annotation_clip": False, "va": "center", "parse_math": False}
    below: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    ends = np.append(0.0, times)
    width = max(text_width(label, SMALL) for label in [*labels, "at risk"])
    ax.annotate("at risk", (0.0, 0.0), xytext=(-12.0 - width, -42.0), ha="left", color=MUTED, **below, **text)
    for row, label in enumerate(labels):
        y = -42.0 - LINE * (row + 1)
        color = COLORS[row % len(COLORS)]
        ax.annotate(label, (0.0, 0.0), xytext=(-12.0 - width, y), ha="left", color=color, **below, **text)
        for x in ticks.tolist():
            column = int(np.searchsorted(ends, x * (1.0 + TIME_TOLERANCE), side="right")) - 1
            if x <= ends[column] * (1.0 + TIME_TOLERANCE):
                shown = f"{at_risk[row, column]:,.0f}"
                ax.annotate(shown, (x, 0.0), xytext=(0.0, y), ha="center", color=INK, **below, **text)
