"""Pictures of an estimate. matplotlib is the optional extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.inference.tables import shorten
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
"""Okabe and Ito (2008), told apart by readers with any colour vision."""
ROWS_ONLY = ("top", "right", "left")
"""Spines that a plot with one row per name does not need."""
ACROSS = 4
"""Panels in a row."""
HEADING = 1.3
"""Rows left blank above each client, for its name."""


def plot_coefficients(
    frame: pd.DataFrame, *, ax: Axes | None = None, conf_level: float = 0.95, response: str = ""
) -> Axes:
    """Forest plot of a frame as `FederatedResults.tidy`: a row per coefficient, coloured by client.

    Rows without an interval are drawn as a hollow point; a new figure is as tall as the rows need.
    """
    groups = [(str(client), rows) for client, rows in frame.groupby("client", sort=False)]
    positions = _positions(groups)
    names = [shorten(name, 32) for _, rows in groups for name in rows["name"]]
    height = 1.2 + 0.24 * (len(frame) + HEADING * len(groups))
    ax = axes_for(ax, 7.0, height, f"Coefficients with {100 * conf_level:g} % intervals", ROWS_ONLY)
    ax.axvline(0.0, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    for i, (client, rows) in enumerate(groups):
        _draw_group(ax, positions[i], rows, COLOURS[i % len(COLOURS)], client)
    label_rows(ax, np.concatenate(positions) if positions else np.empty(0), names)
    ax.set_xlabel(f"effect on {response}" if response else "coefficient", parse_math=False)
    return ax


def pyplot() -> Any:
    """Return matplotlib's pyplot; an ImportError names the extra where it is not installed."""
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install fedstat[plot]") from error
    return plt


def axes_for(
    ax: Axes | None, width: float, height: float, title: str = "", hidden: Sequence[str] = ()
) -> Axes:
    """Return the axes given, or those of a new figure of some inches, with a title and without some spines.

    An ImportError names the extra where matplotlib is not installed.
    """
    if ax is None:
        _, ax = pyplot().subplots(figsize=(width, height), layout="constrained")
    if title:
        # A name may hold a dollar sign, which is no formula.
        ax.set_title(title, loc="left", fontsize="medium", parse_math=False)
    for side in hidden:
        ax.spines[side].set_visible(False)
    return ax


def _positions(groups: list[tuple[str, pd.DataFrame]]) -> list[np.ndarray]:
    """Rows from the top down, a heading above each client."""
    positions, top = [], 0.0
    for client, rows in groups:
        top += HEADING if client else 0.0
        positions.append(top + np.arange(len(rows)))
        top += len(rows)
    return positions


def _draw_group(ax: Axes, y: np.ndarray, rows: pd.DataFrame, colour: str, client: str) -> None:
    low, high = rows["conf_low"].to_numpy(), rows["conf_high"].to_numpy()
    # A hollow point, where the covariance gives no interval.
    known = np.isfinite(low)
    ax.hlines(y[known], low[known], high[known], color=colour, linewidth=1.6)
    estimate = rows["estimate"].to_numpy()
    ax.plot(estimate[known], y[known], "o", color=colour, markersize=4.5)
    ax.plot(estimate[~known], y[~known], "o", color=colour, markersize=4.5, markerfacecolor="white")
    if client:
        ax.text(
            *(0.01, y[0] - 1.0, client),
            color=colour,
            weight="bold",
            fontsize="small",
            va="center",
            transform=ax.get_yaxis_transform(),
            parse_math=False,
        )


def label_rows(ax: Axes, positions: np.ndarray, names: Sequence[str]) -> None:
    """Write a name beside each row, from the top down."""
    ax.set_yticks(positions, labels=names, fontsize="small", parse_math=False)
    ax.set_ylim(positions.max(initial=0.0) + 0.7, -0.7)
    ax.tick_params(axis="y", length=0)


def plot_convergence(trace: pd.DataFrame, *, tolerance: float, ax: Axes | None = None) -> Axes:
    """Relative score over the iterations, with the kind of each move; the tolerance is drawn as a line.

    The trace has index ``iteration`` and columns ``score`` and ``move``.
    """
    ax = axes_for(ax, 6.5, 3.6, "Convergence")
    ax.plot(trace.index, trace["score"], color="0.7", linewidth=1.0, zorder=1)
    for colour, (move, rows) in zip(COLOURS, trace.groupby("move", sort=False), strict=False):
        ax.scatter(rows.index, rows["score"], s=18, color=colour, label=move, zorder=2)
    ax.axhline(tolerance, color="0.4", linewidth=1.0, linestyle="--")
    ax.annotate(
        "tolerance",
        (0.0, tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize="small",
        color="0.3",
    )
    # Scores fall by powers of ten; on a plain scale only the first would be seen.
    ax.set(yscale="log", xlabel="iteration", ylabel="relative score")
    ax.legend(frameon=False, fontsize="small")
    return ax


def plot_loss(trace: pd.DataFrame, label: str, ax: Axes | None = None) -> Axes:
    """Mean loss by round, of a trace with index ``round`` and column ``loss``."""
    ax = axes_for(ax, 6.5, 3.6, "Loss by round", ("top", "right"))
    ax.plot(trace.index, trace["loss"], label=label, linewidth=1.4)
    ax.set(xlabel="round", ylabel="mean loss")
    ax.legend(frameon=False, fontsize="small")
    return ax


@dataclass(frozen=True, slots=True, eq=False)
class DistributionPanel:
    """Probabilities (k,) of a column's `levels`, or of bins between its `edges` (k + 1,) on a scale.

    `linear` is up to where an ``asinh`` scale is linear.
    """

    name: str
    probabilities: Floats
    levels: tuple[object, ...]
    edges: Floats
    scale: str
    linear: float


def plot_distributions(panels: Sequence[DistributionPanel]) -> Figure:
    """Draw distributions side by side, a panel a column."""
    across = min(len(panels), ACROSS)
    rows = -(-len(panels) // ACROSS)
    whole = axes_for(None, 2.6 * across, 1.9 * rows)
    figure = whole.get_figure(root=True)
    assert figure is not None
    whole.remove()
    places = figure.subplots(rows, across, squeeze=False).ravel()
    for ax, panel in zip(places, panels, strict=False):
        if panel.levels:
            ax.bar([str(level) for level in panel.levels], panel.probabilities)
            ax.tick_params(axis="x", labelrotation=45)
        else:
            ax.stairs(panel.probabilities, panel.edges, fill=True)
            if panel.scale == "log":
                ax.set_xscale("log")
            elif panel.scale == "asinh":
                ax.set_xscale("asinh", linear_width=panel.linear)
        ax.set_title(panel.name, fontsize="small", parse_math=False)
        ax.tick_params(labelsize="x-small")
    for ax in places[len(panels) :]:
        ax.set_visible(False)
    return figure


def plot_heat(correlation: pd.DataFrame, title: str, ax: Axes | None = None) -> Axes:
    """Draw a correlation matrix as a heat map."""
    size = 2.5 + 0.18 * len(correlation)
    ax = axes_for(ax, size + 1.0, size, title)
    image = ax.imshow(correlation.to_numpy(), vmin=-1.0, vmax=1.0, cmap="RdBu_r")
    places, names = range(len(correlation)), [str(name) for name in correlation]
    ax.set_xticks(places, names, rotation=90, fontsize="x-small", parse_math=False)
    ax.set_yticks(places, names, fontsize="x-small", parse_math=False)
    ax.figure.colorbar(image, ax=ax)
    return ax
