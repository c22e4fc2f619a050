"""Picture of how networks learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from fedstat.drawing import COLOURS, axes_for, label_y, legend_below, mark_x

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHOSE = {"loss": "learned from", "validation": "held back"}
"""Entities of a curve, for its legend."""


def draw_history(history: pd.DataFrame, kept: int, ax: Axes | None) -> Axes:
    """Losses by epoch, each over its first, with a mark at the epoch that was kept."""
    ax = axes_for(ax, 5.6, 3.6, "Learning curve")
    for colour, (name, loss) in zip(COLOURS, (history / history.iloc[0]).items(), strict=False):
        ax.plot(loss.index, loss, marker="o", markersize=3, color=colour, label=WHOSE[str(name)])
    ax.set_xlabel("epoch")
    legend_below(ax)
    label_y(ax, "loss, over that of the first epoch")
    mark_x(ax, kept, f"kept: {kept}")
    return ax
