"""How well synthetic rows can stand for the real ones, as far as released numbers tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedstat.inference.plots import axes_for
from fedstat.models.copula.protocol import CopulaFit
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 4
"""Panels of margins in a row."""


def utility_of_columns(fit: CopulaFit, noise: Floats) -> pd.DataFrame:
    """Say of every column how much noise its margin and correlations have, and what is told of it.

    `noise` (p, p) is the deviation on correlations.
    """
    p = len(fit.margins)
    pairs = ~np.eye(p, dtype=np.bool_)
    correlation = np.abs(fit.inversion.correlation)
    rows = []
    clients = [client for client, bins in fit.plan.columns.items() for _ in bins]
    for j, (client, margin) in enumerate(zip(clients, fit.margins, strict=True)):
        others, n = pairs[j], fit.entities[client]
        asked = fit.plan.margins_asked(client)
        levels = bool(margin.bins.levels)
        # Noise on a distribution function: half of the levels added up, or a node of each level of a tree.
        counts = margin.bins.count / 4.0 if levels else margin.bins.depth / 2.0
        variance = asked.of_levels if levels else asked.of_trees
        rows.append(
            {
                "column": margin.bins.name,
                "institution": client,
                "entities": n,
                "bins": margin.bins.count,
                "margin_noise": float(np.sqrt(counts * variance) / max(n, 1)),
                "ties": 1.0 - margin.variance,
                "correlation_noise": float(np.sqrt(np.mean(noise[j, others] ** 2))),
                "told_from_0": int((correlation[j, others] > 2.0 * noise[j, others]).sum()),
                "strongest": float(correlation[j, others].max()),
            }
        )
    return pd.DataFrame(rows).set_index("column")


def draw_margins(fit: CopulaFit) -> Figure:
    """Draw every released margin in a panel, probabilities of levels and of bins, on the scale of these."""
    p = len(fit.margins)
    rows, columns = -(-p // ACROSS), min(p, ACROSS)
    whole = axes_for(None, 2.6 * columns, 1.9 * rows)
    figure = whole.get_figure(root=True)
    assert figure is not None
    whole.remove()
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, margin in zip(panels, fit.margins, strict=False):
        if margin.bins.levels:
            ax.bar([str(level) for level in margin.bins.levels], margin.probabilities)
            ax.tick_params(axis="x", labelrotation=45)
        else:
            ax.stairs(margin.probabilities, margin.bins.edges, fill=True)
            if margin.bins.scale == "log":
                ax.set_xscale("log")
            elif margin.bins.scale == "asinh":
                ax.set_xscale("asinh", linear_width=margin.bins.around)
        ax.set_title(margin.bins.name, fontsize="small", parse_math=False)
        ax.tick_params(labelsize="x-small")
    for ax in panels[p:]:
        ax.set_visible(False)
    return figure


def draw_correlation(correlation: pd.DataFrame, ax: Axes | None) -> Axes:
    """Draw a correlation matrix as a heat map, in a new figure where no axes are given."""
    size = 2.5 + 0.18 * len(correlation)
    ax = axes_for(ax, size + 1.0, size, "Correlations of latent normals")
    image = ax.imshow(correlation.to_numpy(), vmin=-1.0, vmax=1.0, cmap="RdBu_r")
    places, names = range(len(correlation)), [str(name) for name in correlation]
    ax.set_xticks(places, names, rotation=90, fontsize="x-small", parse_math=False)
    ax.set_yticks(places, names, fontsize="x-small", parse_math=False)
    ax.figure.colorbar(image, ax=ax)
    return ax
