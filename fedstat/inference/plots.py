"""Pictures of an estimate. matplotlib is the optional extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.drawing import (
    COLOURS,
    INK,
    MUTED,
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
    plain_legend,
    shorten,
    thin_labels,
    title_figure,
    width_of,
)
from fedstat.errors import ModelError
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 4
"""Panels in a row."""
HEADING = 1.3
"""Rows left blank above each institution, for its name."""
WIDE = 6.0
"""Times the usual half width beyond which an interval is cut."""


def link_words(spec: DistributionSpec | None, response: str) -> tuple[str, str, str]:
    """Name the axis of coefficients on a link, that of their exponentials, and the title over these."""
    effect = response if spec is None else f"the {spec.link_entry.effect.format(response)}"
    ratio = "" if spec is None else spec.link_entry.ratio
    if not ratio:
        return f"effect on {effect}", "exponential of the coefficient", "Exponentials of the coefficients"
    many = ratio.replace("ratio", "ratios", 1).capitalize()
    return f"effect on {effect}", f"{ratio} of {response}", many


def per_deviation(frame: pd.DataFrame, deviations: Mapping[str, float] | pd.Series) -> pd.DataFrame:
    """Turn coefficients and their limits into those of one standard deviation of the column."""
    if absent := [name for name in frame["name"] if name not in deviations]:
        raise ModelError(f"standardised: no standard deviation of {', '.join(absent[:5])}")
    sd = np.array([float(deviations[name]) for name in frame["name"]])
    columns = ["estimate", "conf_low", "conf_high"]
    return frame.assign(**{column: frame[column].to_numpy(dtype=np.float64) * sd for column in columns})


def plot_coefficients(
    frame: pd.DataFrame,
    *,
    ax: Axes | None = None,
    title: str = "Coefficients",
    conf_level: float = 0.95,
    effect: str = "coefficient",
    ratios: bool = False,
) -> Axes:
    """Forest plot of a frame as `FederatedResults.tidy`: a row per coefficient, coloured by institution.

    Rows without an interval are drawn as a hollow point. `ratios` are drawn on a logarithmic scale around 1.
    A new figure is as tall as the rows need. Intervals much wider than the others end in arrows.
    """
    groups = [(str(client), rows) for client, rows in frame.groupby("client", sort=False)]
    places = _places(groups)
    height = 1.2 + 0.22 * (len(frame) + HEADING * len(groups))
    ax = axes_for(ax, 7.0, height, hidden=ROWS_ONLY)
    reference = 1.0 if ratios else 0.0
    ax.axvline(reference, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    most = name_width(ax, 0.42, 32)
    names = [shorten(name, most) for _, rows in groups for name in rows["name"]]
    for i, (client, rows) in enumerate(groups):
        _draw_group(ax, places[i], rows, COLOURS[i % len(COLOURS)], shorten(client, name_width(ax, 0.4, 40)))
    y = np.concatenate(places) if places else np.empty(0)
    label_rows(ax, y, names)
    if len(frame):
        _bound(ax, y, pd.concat([rows for _, rows in groups]), reference, ratios)
    ax.tick_params(axis="x", labelsize=SMALL)
    label_x(ax, effect)
    thin_labels(ax)
    known = frame["conf_low"].notna().any()
    entitle(ax, title, f"with {100 * conf_level:g} % intervals" if known else "without intervals")
    return ax


def _places(groups: list[tuple[str, pd.DataFrame]]) -> list[np.ndarray]:
    """Rows from the top down, a heading above each institution."""
    places, top = [], 0.0
    for client, rows in groups:
        top += HEADING if client else 0.0
        places.append(top + np.arange(len(rows)))
        top += len(rows)
    return places


def _bound(ax: Axes, y: Floats, rows: pd.DataFrame, reference: float, ratios: bool) -> None:
    """Set the ends of the axis, cut intervals that would make the others small, and end these in arrows."""
    turn, back = (np.log, np.exp) if ratios else (np.asarray, np.asarray)
    with np.errstate(divide="ignore"):
        b, low, high = turn(rows[["estimate", "conf_low", "conf_high"]].to_numpy(dtype=np.float64)).T
    known = np.isfinite(low) & np.isfinite(high)
    finite, centre = b[np.isfinite(b)], float(turn(reference))
    if not len(finite):
        return
    # As far as half intervals usually reach, and estimates do.
    usual = float(np.median((high - low)[known])) / 2.0 if known.any() else 0.0
    reach = max(WIDE * usual, float(np.ptp(np.append(finite, centre))))
    left = min(float(np.maximum(low, b - reach)[known].min(initial=np.inf)), finite.min(), centre)
    right = max(float(np.minimum(high, b + reach)[known].max(initial=-np.inf)), finite.max(), centre)
    margin = 0.04 * ((right - left) or 1.0)
    left, right = left - margin, right + margin
    ax.set_xlim(*back(np.array([left, right])).tolist())
    if ratios:
        label_log_x(ax)
    else:
        few_ticks(ax)
    for end, limit, marker in ((low, left, "<"), (high, right, ">")):
        outside = known & ((end < left) if marker == "<" else (end > right))
        # Without points, what is not clipped would lie at the corner of the page for the layout.
        if outside.any():
            at = np.full(outside.sum(), back(limit))
            ax.plot(at, y[outside], marker, color=INK, markersize=5.0, clip_on=False)


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
            fontsize=SMALL,
            va="center",
            transform=ax.get_yaxis_transform(),
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )


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
        fontsize=SMALL,
        color=MUTED,
    )
    # Scores fall by powers of ten; on a plain scale only the first would be seen.
    ax.set(yscale="log", xlabel="iteration", ylabel="relative score")
    plain_legend(ax)
    return ax


def plot_loss(trace: pd.DataFrame, label: str, ax: Axes | None = None) -> Axes:
    """Mean loss by round, of a trace with index ``round`` and column ``loss``."""
    ax = axes_for(ax, 6.5, 3.6)
    ax.plot(trace.index, trace["loss"], label=label, linewidth=1.4)
    ax.set(xlabel="round", ylabel="mean loss")
    plain_legend(ax)
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


def plot_distributions(panels: Sequence[DistributionPanel], title: str) -> Figure:
    """Draw distributions side by side, a panel a column."""
    across = min(len(panels), ACROSS)
    rows = -(-len(panels) // ACROSS)
    whole = axes_for(None, max(3.5, 1.75 * across), 1.8 * rows, hidden=())
    figure = whole.get_figure(root=True)
    assert figure is not None
    whole.remove()
    places = figure.subplots(rows, across, squeeze=False).ravel()
    for ax, panel in zip(places, panels, strict=False):
        if panel.levels:
            at = np.arange(len(panel.levels))
            ax.bar(at, panel.probabilities, color=COLOURS[0])
            names = [shorten(str(level), 14) for level in panel.levels]
            ax.set_xticks(at, names, rotation=90, fontsize="x-small", parse_math=False)
            thin_labels(ax, "x")
        else:
            ax.stairs(panel.probabilities, panel.edges, fill=True, color=COLOURS[0])
            if panel.scale == "log":
                ax.set_xscale("log")
            elif panel.scale == "asinh":
                ax.set_xscale("asinh", linear_width=panel.linear)
            if panel.scale in ("log", "asinh"):
                ends = panel.edges[[0, -1]]
                ticks = np.unique([*ends, 0.0] if ends[0] < 0.0 < ends[1] else ends)
                ax.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
                ax.set_xticks([], minor=True)
            else:
                ax.locator_params(axis="x", nbins=3)
        name = shorten(panel.name, name_width(ax, 0.7, 28))
        ax.set_title(name, fontsize="small", parse_math=False)
        ax.tick_params(labelsize="x-small")
    for ax in places[len(panels) :]:
        ax.set_visible(False)
    figure.supylabel("probability", fontsize=SMALL)
    title_figure(figure, title)
    return figure


def plot_heat(correlation: pd.DataFrame, title: str, ax: Axes | None = None) -> Axes:
    """Draw a correlation matrix as a heat map."""
    size = 2.5 + 0.18 * len(correlation)
    ax = axes_for(ax, size + 1.0, size, hidden=())
    image = ax.imshow(correlation.to_numpy(), vmin=-1.0, vmax=1.0, cmap="RdBu_r")
    most = name_width(ax, 0.3, 28)
    places, names = range(len(correlation)), [shorten(str(name), most) for name in correlation]
    ax.set_xticks(places, names, rotation=90, fontsize=SMALL, parse_math=False)
    ax.set_yticks(places, names, fontsize=SMALL, parse_math=False)
    # Beside a narrow picture a scale of colours would take what is left of it.
    where: Any = {"location": "bottom"} if width_of(ax) < NARROW else {"shrink": 0.7}
    ax.figure.colorbar(image, ax=ax, label="correlation", **where)
    entitle(ax, title)
    thin_labels(ax, "x")
    thin_labels(ax, "y")
    return ax
