"""Pictures of boosting. matplotlib is the optional extra ``plot``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedstat.inference.plots import COLOURS, axes_for, label_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_surface(frame: pd.DataFrame, label: str, response: str, ax: Axes | None) -> Axes:
    """Draw a heat map of an effect on two arguments, or lines of one on one."""
    of, rest = frame.columns[0], [name for name in ("s", "x", "t") if name in frame.columns]
    ax = axes_for(ax, 6.0, 4.5, f"{label} on {response}")
    if len(rest) == 2:
        table = frame.pivot_table("estimate", rest[0], rest[1])
        size = float(np.abs(table.to_numpy()).max()) or 1.0
        x, y = table.columns.to_numpy(dtype=float), table.index.to_numpy(dtype=float)
        mesh = ax.pcolormesh(x, y, table.to_numpy(), cmap="RdBu_r", vmin=-size, vmax=size, shading="nearest")
        ax.figure.colorbar(mesh, ax=ax, label="effect")
        ax.set_xlabel(rest[1])
        ax.set_ylabel(rest[0])
        return ax
    ax.axhline(0.0, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    groups = [("", frame)] if of in rest else list(frame.groupby(of, sort=False))
    for i, (name, rows) in enumerate(groups):
        colour = COLOURS[i % len(COLOURS)]
        if not rest:
            ax.plot([i], rows["estimate"], "o", color=colour, label=str(name))
            continue
        x = rows[rest[0]].to_numpy(dtype=float)
        ax.plot(x, rows["estimate"], color=colour, label=str(name))
        if "lower" in rows:
            ax.fill_between(x, rows["lower"], rows["upper"], color=colour, alpha=0.2, linewidth=0.0)
    if of not in rest:
        ax.legend(frameon=False)
    ax.set_xlabel(rest[0] if rest else "")
    ax.set_ylabel("effect")
    return ax


def draw_path(path: pd.DataFrame, ax: Axes | None) -> Axes:
    """R-squared or loss along the path, with a mark of the learner's colour at every step."""
    what = path.columns[1]
    name = "Loss" if what == "loss" else "R-squared"
    ax = axes_for(ax, 6.5, 4.0, f"{name} along the path", ("top", "right"))
    ax.plot(path.index, path[what], color="0.7", linewidth=1.0, zorder=0)
    for i, (label, rows) in enumerate(path.groupby("learner", sort=False)):
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(rows.index, rows[what], ".", color=colour, markersize=4.0, label=str(label))
    ax.legend(frameon=False)
    ax.set_xlabel("step")
    return ax


def draw_cv(cv: pd.DataFrame, mstop: int, ax: Axes | None) -> Axes:
    """Loss of the folds that are left out, with its standard error, and the step that is taken."""
    ax = axes_for(ax, 6.5, 4.0, "Loss of left-out folds", ("top", "right"))
    ax.plot(cv.index, cv["loss"], color=COLOURS[0])
    ax.fill_between(cv.index, cv["loss"] - cv["se"], cv["loss"] + cv["se"], alpha=0.2, linewidth=0.0)
    ax.axvline(mstop, color="0.5", linestyle="--", linewidth=1.0)
    ax.set_xlabel("step")
    return ax


def draw_importance(learners: pd.DataFrame, ax: Axes | None) -> Axes:
    """Share of each learner in what is explained."""
    ax = axes_for(ax, 6.0, 1.0 + 0.35 * len(learners), "Share in what is explained", ("top", "right", "left"))
    at = np.arange(len(learners), dtype=float)
    ax.barh(at, 100.0 * learners["explained"], color=COLOURS[0])
    label_rows(ax, at, [str(name) for name in learners.index])
    ax.set_xlabel("%")
    return ax
