"""Plots of a path: coefficients, criterion, stability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat import plotting
from fedstat.errors import ModelError
from fedstat.inference.estimate import Estimate
from fedstat.models.vglm.outcome import Selection
from fedstat.typing import Bools, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# Plots of a path: coefficients, criterion, stability.

CRITERIA = {"bic": "BIC", "ebic": "extended BIC", "aic": "AIC", "cv": "deviance of left-out folds"}
FAINT = 0.3
"""Opacity of columns that are not selected."""
SEEN = 0.1
"""Share of the largest value at the end of a line above which an unselected column is named."""


def plot_path(
    estimate: Estimate, selection: Selection, params: pd.DataFrame, scales: Floats | None, ax: Axes | None
) -> Axes:
    """Draw coefficients (L, p) over lambda, per deviation of the columns or as shares of the largest.

    Dotted lines connect fits that are not solved.
    """
    ax = plotting.axes_for(ax, 7.0, 4.2)
    largest = params.abs().max().replace(0.0, 1.0)
    values = params / largest if scales is None else params * scales
    chosen = values.iloc[selection.chosen].abs()
    # Selected ones first, the largest first; then those that are selected later.
    order = np.lexsort((-values.iloc[-1].abs().to_numpy(), -chosen.to_numpy()))
    ends = values.iloc[-1].abs()
    # Among the others, those that differ visibly from zero in the plot.
    named = [values.columns[j] for j in order if chosen.iloc[j] > 0.0 or ends.iloc[j] > SEEN * ends.max()]
    bold = chosen[chosen > 0.0].index
    _lines(estimate, selection.lambdas, values, ax, bold, selection.solved)
    counts = (params != 0.0).sum(axis=1).to_numpy()
    _count_on_top(ax, selection.lambdas, counts, "columns selected")
    plotting.set_headline(ax, "Coefficients along the path")
    _name_ends(estimate, values, named, bold, ax)
    plotting.label_y(
        ax, "share of its largest size" if scales is None else "coefficient per standard deviation"
    )
    plotting.legend_below(ax)
    _mark(ax, selection.lambdas, selection.chosen, counts, above=False)
    return ax


def plot_criterion(selection: Selection, name: str, ax: Axes | None = None) -> Axes:
    """Draw a criterion over lambda, with the bars of cross-validation; hollow points are not solved."""
    path = selection.table
    if name not in path.columns:
        known = [column for column in CRITERIA if column in path.columns]
        raise ModelError(f"criterion: expected one of {', '.join(known)}, received {name!r}")
    ax = plotting.axes_for(ax, 7.0, 3.8)
    proposed = path["status"] == "proposed"
    joined = ":" if proposed.any() else "-"
    ax.plot(path.index, path[name], color=plotting.COLORS[0], linestyle=joined, linewidth=1.1)
    for which, label, face in ((~proposed, "solved", plotting.COLORS[0]), (proposed, "proposed", "white")):
        rows = path[which]
        errors = rows["cv_se"] if name == "cv" else None
        if len(rows):
            ax.errorbar(
                rows.index,
                rows[name],
                yerr=errors,
                color=plotting.COLORS[0],
                fmt="o",
                mfc=face,
                ms=3.5,
                label=label,
            )
    counts = (selection.coefficients != 0.0).sum(axis=1)
    _over_lambda(ax, path.index.to_numpy())
    _count_on_top(ax, path.index.to_numpy(), counts, "columns selected")
    if proposed.any():
        plotting.plain_legend(ax)
    plotting.set_headline(ax, "Cross-validation along the path" if name == "cv" else "Choice of lambda")
    plotting.label_y(ax, CRITERIA.get(name, name))
    _mark(ax, path.index.to_numpy(), selection.chosen, counts, above=True)
    return ax


def plot_stability(
    estimate: Estimate,
    selection: Selection,
    frequencies: pd.DataFrame,
    threshold: float,
    ax: Axes | None = None,
) -> Axes:
    """Draw selection frequencies over lambda; name columns that reach the threshold by the chosen one."""
    ax = plotting.axes_for(ax, 7.0, 4.2)
    lambdas, lam = selection.lambdas, selection.lam
    # The most often selected first; for ties those that reach it at a larger lambda.
    highest, mean = frequencies[lambdas >= lam].max(), frequencies.mean()
    order = np.lexsort((-mean, -highest))
    stable = highest.index[order][highest.iloc[order] >= threshold]
    _lines(estimate, lambdas, frequencies, ax, stable)
    ax.axhline(threshold, color="0.5", linestyle="--", linewidth=1.0)
    ax.set_ylim(-0.03, 1.03)
    ax.annotate(
        *(f"threshold {threshold:g}", (0.01, threshold)),
        xycoords=("axes fraction", "data"),
        xytext=(2, -3),
        textcoords="offset points",
        va="top",
        fontsize=plotting.SMALL,
        color=plotting.MUTED,
        bbox=plotting.HALO,
    )
    ax.axvline(lam, color="0.5", linestyle="--", linewidth=1.0, zorder=0)
    _count_on_top(
        ax, lambdas, (frequencies.cummax() >= threshold).sum(axis=1).to_numpy(), "columns that reach it"
    )
    reach = f"{len(stable)} of {frequencies.shape[1]} columns reach {threshold:g} down to lambda {lam:.3g}"
    plotting.set_headline(ax, "Stability of the selection", reach)
    _name_ends(estimate, frequencies, list(stable), stable, ax)
    plotting.label_y(ax, "share of halves that select it")
    plotting.legend_below(ax)
    return ax


def _lines(
    estimate: Estimate,
    lambdas: Floats,
    values: pd.DataFrame,
    ax: Axes,
    bold: pd.Index,
    solved: Bools | None = None,
) -> None:
    """Draw one line per column over lambda, colored by site; dotted with points if some are `solved`."""
    colors = _colors(estimate)
    some: dict[str, Any] = {}
    if solved is not None and not solved.all():
        some = {"linestyle": ":", "marker": "o", "markersize": 3.0, "markevery": solved.tolist()}
    for name in values.columns:
        alpha = 1.0 if name in bold else FAINT
        ax.plot(lambdas, values[name], color=colors[name], linewidth=1.2, alpha=alpha, **some)
    _over_lambda(ax, lambdas, margin=0.0)
    most = plotting.name_width(ax, 0.22, 28)
    owners = dict(zip(estimate.sites[1:], (colors[name] for name in estimate.names[1:]), strict=True))
    for site, color in owners.items():
        ax.plot([], [], color=color, label=plotting.shorten(site, most))
    if some:
        ax.plot([], [], color="0.4", marker="o", markersize=3.0, linestyle="none", label="solved")
        ax.plot([], [], color="0.4", linestyle=":", label="proposed")
    # Once more after names have been placed, because only then the width is known.
    plotting.legend_below(ax)


def _colors(estimate: Estimate) -> dict[str, str]:
    """Color of each column, that of its site."""
    sites = list(dict.fromkeys(estimate.sites[1:]))
    named = zip(estimate.names[1:], estimate.sites[1:], strict=True)
    return {name: plotting.COLORS[sites.index(site) % len(plotting.COLORS)] for name, site in named}


def _over_lambda(ax: Axes, lambdas: Floats, margin: float = 0.03) -> None:
    """Make the horizontal axis that of lambda, the largest first."""
    first, last = float(lambdas.max()), float(lambdas.min())
    ax.set_xlabel("lambda")
    if first == last:
        ax.invert_xaxis()
    elif last > 0.0:
        wider = (first / last) ** margin
        ax.set_xlim(first * wider, last / wider)
        plotting.label_log_x(ax)
    else:
        ax.set_xlim(first * (1.0 + margin), last - margin * first)


def _mark(ax: Axes, lambdas: Floats, chosen: int, counts: Any, *, above: bool) -> None:
    """Mark the chosen lambda."""
    lam = float(lambdas[chosen])
    plotting.mark_x(ax, lam, f"chosen: {lam:.3g}\n{counts[chosen]} selected", above=above)


def _count_on_top(ax: Axes, lambdas: Floats, counts: Any, label: str) -> None:
    """Write a number for some of the lambdas above the axes."""
    if len(lambdas) < 2:
        return
    top = ax.secondary_xaxis("top")
    at = np.unique(
        np.linspace(0, len(lambdas) - 1, int(np.clip(1.6 * plotting.axes_width_inches(ax), 3, 9))).astype(int)
    )
    top.set_xticks(lambdas[at], [str(counts[j]) for j in at], fontsize=plotting.SMALL)
    top.set_xticks([], minor=True)
    top.tick_params(length=2, colors=plotting.MUTED)
    top.set_xlabel(label, fontsize=plotting.SMALL, color=plotting.MUTED)
    top.spines["top"].set_visible(False)


def _name_ends(estimate: Estimate, values: pd.DataFrame, named: list[Any], bold: pd.Index, ax: Axes) -> None:
    """Write names at the right edge, as many as fit."""
    colors, most = _colors(estimate), plotting.name_width(ax, 0.3, 28)
    ends = values.iloc[-1][named].to_numpy(dtype=np.float64)
    tones = [colors[name] if name in bold else plotting.MUTED for name in named]
    plotting.label_ends(ax, ends, [plotting.shorten(str(name), most) for name in named], tones)
