"""Plots of a fitted mixture, its information criteria and its convergence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat import plotting
from fedstat.errors import NotAvailableError, Remedy
from fedstat.models.m2sem.record import M2SEMRecord
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# Plots of clusters: profiles by modality, heat map, grid of sizes.

MOST_COLUMNS = 60
"""Limits of a heat map."""
TINY = 1e-12


def places(r: M2SEMRecord, selected: bool) -> pd.DataFrame:
    """Position of clusters in each column: distance from the overall mean in standard deviations.

    For ordered categories, it is the mean index of the level, from 0; for nominal ones, the probability of
    the level that differs most.
    """
    chosen, rows, keys = r.features["selected"], [], []
    for site, held in r.sites.items():
        units = held.units
        for one, values, _, _ in held.parts:
            for p, column in enumerate(one.columns):
                key, L = (site, one.name, column.name), len(column.levels)
                if L:
                    # Rows by level, column after column; for numbers all means, and then all deviations.
                    counts, units = units[:L], units[L:]
                    at, sd = _place_of_levels(values[:, p, :L], counts, column.kind == "nominal")
                else:
                    at, sd = values[:, p, 0], float(units[len(one.columns) + p])
                if not selected or chosen[key]:
                    keys.append(key)
                    rows.append((at - r.shares @ at) / max(sd, TINY))
            units = units[2 * len(one.columns) :] if one.continuous else units
    if not rows:
        raise NotAvailableError(
            "no column separates the clusters",
            remedy=Remedy("plot_profiles(..., selected=False)", "use {call}"),
        )
    index = pd.MultiIndex.from_tuples(keys, names=["site", "modality", "column"])
    return pd.DataFrame(np.array(rows), index=index, columns=r.clusters)


def _place_of_levels(probabilities: Floats, counts: Floats, nominal: bool) -> tuple[Floats, float]:
    """Mean index of the level by cluster (K, L), or the most different level, and its deviation."""
    L, shares = len(counts), counts / counts.sum()
    place = np.arange(L) * 1.0
    if nominal:
        place = (np.arange(L) == np.argmax(np.ptp(probabilities, axis=0))) * 1.0
    return probabilities @ place, float((shares @ place**2 - (shares @ place) ** 2) ** 0.5)


def plot_cluster_profiles(r: M2SEMRecord, selected: bool) -> Figure:
    """Draw a panel for each modality, a line for each cluster."""
    frame = places(r, selected)
    groups = [(key, part) for key, part in frame.groupby(level=["site", "modality"], sort=False)]
    complete = plotting.axes_for(None, 7.0, 0.9 + 0.24 * (len(frame) + 3 * len(groups)))
    figure = complete.get_figure(root=True)
    assert figure is not None
    complete.remove()
    heights = [len(part) + 1 for _, part in groups]
    axes = figure.subplots(len(groups), 1, squeeze=False, sharex=True, height_ratios=heights).ravel()
    for ax, ((site, modality), part) in zip(axes, groups, strict=True):
        y = np.arange(len(part))[::-1]
        for number, (k, values) in enumerate(part.items()):
            label = f"cluster {k} ({r.shares[number]:.0%})"
            color = plotting.COLORS[number % len(plotting.COLORS)]
            ax.plot(values.to_numpy(), y, "o-", color=color, linewidth=1.0, markersize=4, label=label)
        ax.axvline(0.0, color="0.7", linewidth=0.8, zorder=0)
        names = [plotting.shorten(str(key[2]), 28) for key in part.index]
        ax.set_yticks(y, names, fontsize=plotting.SMALL, parse_math=False)
        title = str(site) if site == modality else f"{site}: {modality}"
        ax.set_title(title, fontsize=plotting.SMALL, fontweight="bold", loc="left", parse_math=False)
        ax.set_ylim(-0.6, len(part) - 0.4)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("distance from the overall mean, in standard deviations of the column")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", frameon=False, fontsize=plotting.SMALL, ncols=2)
    plotting.title_figure(figure, "Profiles of the clusters")
    figure.set_layout_engine("none")
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 1.0 - 0.35 / figure.get_figheight()))
    return figure


def plot_profile_heat(r: M2SEMRecord, ax: Axes | None) -> Axes:
    """Draw a row for each column, a column for each cluster."""
    frame = places(r, bool(r.features["selected"].any())).iloc[:MOST_COLUMNS]
    ax = plotting.axes_for(ax, 3.0 + 0.5 * len(frame.columns), 1.2 + 0.2 * len(frame), masked=())
    values = frame.to_numpy()
    most = max(float(np.abs(values).max()), 1e-12)
    image = ax.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    most_wide = plotting.name_width(ax, 0.4, 40)
    names = [plotting.shorten(f"{site}: {name}", most_wide) for site, _, name in frame.index]
    ax.set_yticks(range(len(frame)), names, fontsize=plotting.SMALL, parse_math=False)
    ax.set_xticks(range(len(frame.columns)), [f"{k}" for k in frame.columns])
    ax.set_xlabel("cluster")
    where: dict[str, Any] = {"location": "bottom"} if plotting.axes_width_inches(ax) < plotting.NARROW else {}
    ax.figure.colorbar(image, ax=ax, label="standard deviations from the mean", **where)
    plotting.set_headline(ax, "Profiles of the clusters")
    plotting.thin_labels(ax)
    return ax
