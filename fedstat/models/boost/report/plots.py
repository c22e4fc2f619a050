"""Plots of boosting results (optional extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat import plotting
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# Pictures of boosting. matplotlib is the optional extra ``plot``.


def draw_surface(
    frame: pd.DataFrame, label: str, response: str, ax: Axes | None, title: str | None = None
) -> Axes:
    """Draw a heat map of an effect on two arguments, or lines of one on one.

    With intervals: shaded those of each point, dotted the band of the whole; of a heat map a line is around
    where the band is apart from zero.
    """
    of, rest = frame.columns[0], [name for name in ("s", "x", "t") if name in frame.columns]
    ax = plotting.axes_for(ax, 6.0, 4.5, masked=plotting.OPEN if len(rest) < 2 else ())
    title, said = f"{label} on {response}" if title is None else title, ""
    if len(rest) == 2:
        table = frame.pivot_table("estimate", rest[0], rest[1])
        size = float(np.nanmax(np.abs(table.to_numpy()))) or 1.0
        x, y = table.columns.to_numpy(dtype=float), table.index.to_numpy(dtype=float)
        mesh = ax.pcolormesh(x, y, table.to_numpy(), cmap="RdBu_r", vmin=-size, vmax=size, shading="nearest")
        where: dict[str, Any] = (
            {"location": "bottom"} if plotting.axes_width_inches(ax) < plotting.NARROW else {}
        )
        ax.figure.colorbar(mesh, ax=ax, label="effect", **where)
        if "band_lower" in frame:
            apart = (frame["band_lower"] > 0.0) | (frame["band_upper"] < 0.0)
            outside = (
                frame.assign(apart=apart.astype(float)).pivot_table("apart", rest[0], rest[1]).to_numpy()
            )
            if 0.0 < outside.mean() < 1.0:
                said = "lines: around where the simultaneous band is apart from 0"
                ax.contour(x, y, outside, levels=[0.5], colors="black", linewidths=0.8)
        ax.set_xlabel(rest[1])
        ax.set_ylabel(axis_name(rest[0], label), parse_math=False)
        # Few ticks, the same however high the axes come to be.
        ax.locator_params(axis="y", nbins=4)
        plotting.set_headline(ax, title, said)
        return ax
    ax.axhline(0.0, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    groups = [("", frame)] if of in rest else list(frame.groupby(of, sort=False))
    most = plotting.name_width(ax, 0.5, 28)
    for i, (name, rows) in enumerate(groups):
        color, name = plotting.COLORS[i % len(plotting.COLORS)], plotting.shorten(str(name), most)
        if not rest:
            ax.plot([i], rows["estimate"], "o", color=color, label=name)
            continue
        x = rows[rest[0]].to_numpy(dtype=float)
        ax.plot(x, rows["estimate"], color=color, label=name)
        if "lower" in rows:
            said = "shaded: intervals of each point; dotted: the simultaneous band"
            ax.fill_between(x, rows["lower"], rows["upper"], color=color, alpha=0.2, linewidth=0.0)
            for side in ("band_lower", "band_upper"):
                ax.plot(x, rows[side], color=color, linewidth=0.8, linestyle=":")
    ax.set_xlabel(axis_name(rest[0], label) if rest else "", parse_math=False)
    ax.set_ylabel("effect")
    if not rest:
        ax.set_xticks([])
    if of not in rest:
        plotting.legend_below(ax)
    plotting.set_headline(ax, title, said)
    return ax


def axis_name(argument: str, label: str) -> str:
    """Name of an effect's argument: the column of a smooth effect, else s or t."""
    return label.partition("(")[2].removesuffix(")") or label if argument == "x" else argument


def draw_path(path: pd.DataFrame, ax: Axes | None) -> Axes:
    """R-squared or loss along the path, with a mark of the learner's color at every step."""
    what = path.columns[1]
    name = "loss" if what == "loss" else "R-squared"
    ax = plotting.axes_for(ax, 6.5, 4.0, "Steps of boosting")
    ax.plot(path.index, path[what], color="0.7", linewidth=1.0, zorder=0)
    most = plotting.name_width(ax, 0.5, 28)
    for i, (label, rows) in enumerate(path.groupby("learner", sort=False)):
        color = plotting.COLORS[i % len(plotting.COLORS)]
        ax.plot(
            rows.index, rows[what], ".", color=color, markersize=4.0, label=plotting.shorten(str(label), most)
        )
    ax.set(xlabel="step", ylabel=name)
    plotting.legend_below(ax)
    return ax


def draw_cv(cv: pd.DataFrame, mstop: int, ax: Axes | None) -> Axes:
    """Loss of the folds that are left out, with its standard error, and the step that is taken."""
    ax = plotting.axes_for(ax, 6.5, 4.0, "Cross-validation")
    ax.plot(cv.index, cv["loss"], color=plotting.COLORS[0])
    ax.fill_between(cv.index, cv["loss"] - cv["se"], cv["loss"] + cv["se"], alpha=0.2, linewidth=0.0)
    plotting.mark_x(ax, mstop, f"taken: {mstop}")
    ax.set_xlabel("step")
    plotting.label_y(ax, "loss of left-out folds")
    return ax


def draw_importance(learners: pd.DataFrame, ax: Axes | None) -> Axes:
    """Share of each learner in what is explained, the largest on top."""
    learners = learners.sort_values("explained", ascending=False)
    ax = plotting.axes_for(ax, 6.0, 0.9 + 0.3 * len(learners), "Importance", plotting.ROWS_ONLY)
    at = np.arange(len(learners), dtype=float)
    ax.barh(at, 100.0 * learners["explained"], color=plotting.COLORS[0])
    most = plotting.name_width(ax, 0.42, 36)
    plotting.label_rows(
        ax, at, [plotting.shorten("intercept" if name == "1" else str(name), most) for name in learners.index]
    )
    plotting.label_x(ax, "share in what is explained, %")
    return ax


def draw_effects(effects: Mapping[str, pd.DataFrame], response: str) -> np.ndarray:
    """Draw effects side by side, two to a row."""
    plt = plotting.pyplot()
    rows = max(1, -(-len(effects) // 2))
    figure, axes = plt.subplots(rows, 2, figsize=(7.0, 3.2 * rows), layout="constrained", squeeze=False)
    for ax, (label, frame) in zip(axes.ravel(), effects.items(), strict=False):
        draw_surface(frame, label, response, ax, label)
    for ax in axes.ravel()[len(effects) :]:
        ax.set_axis_off()
    plotting.title_figure(figure, f"Effects on {response}")
    return np.asarray(axes)


def draw_curves(
    t: Floats, observed: Floats, fitted: Floats, names: Sequence[str], response: str, ax: Axes | None
) -> Axes:
    """Draw curves (m, G): what was observed as points, what is fitted as lines."""
    ax = plotting.axes_for(ax, 6.5, 4.0)
    most = plotting.name_width(ax, 0.5, 28)
    for i, name in enumerate(names):
        color = plotting.COLORS[i % len(plotting.COLORS)]
        ax.plot(t, observed[i], "o", color=color, markersize=2.5, alpha=0.6)
        ax.plot(t, fitted[i], color=color, label=plotting.shorten(f"row {name}", most))
    ax.set_xlabel("t")
    plotting.label_y(ax, response)
    plotting.legend_below(ax)
    plotting.set_headline(ax, "Observed (points) and fitted (lines)")
    # The legend made the axes lower.
    plotting.label_y(ax, response)
    return ax


def draw_scatter(fitted: Floats, observed: Floats, response: str, ax: Axes | None) -> Axes:
    """Draw observed against fitted values, with the line on which both are equal."""
    ax = plotting.axes_for(ax, 4.5, 4.5, "Observed and fitted")
    ax.plot(fitted, observed, "o", color=plotting.COLORS[0], markersize=3.0, alpha=0.5, markeredgewidth=0.0)
    ends = np.nanmin(fitted), np.nanmax(fitted)
    ax.plot(ends, ends, color="0.4", linewidth=1.0, linestyle="--")
    plotting.label_x(ax, f"fitted {response}")
    plotting.label_y(ax, f"observed {response}")
    plotting.few_ticks(ax)
    return ax
