"""Pictures of a path: coefficients, criterion, stability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from fedstat.errors import ModelError
from fedstat.inference.estimate import Estimate
from fedstat.inference.plots import COLOURS, axes_for
from fedstat.typing import Bools, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _lines(
    estimate: Estimate, lambdas: Floats, values: pd.DataFrame, ax: Axes, solved: Bools | None = None
) -> Axes:
    """Draw one line per column over lambda, coloured by client; dotted with points if some are `solved`."""
    owners = dict(zip(estimate.names, estimate.clients, strict=True))
    colours = dict(zip(dict.fromkeys(estimate.clients[1:]), COLOURS * len(owners), strict=False))
    some: dict[str, Any] = {}
    if solved is not None and not solved.all():
        some = {"linestyle": ":", "marker": "o", "markersize": 3.5, "markevery": solved.tolist()}
    named: set[str] = set()
    for name in values.columns:
        client = owners[name]
        label = "" if client in named else client
        named.add(client)
        ax.plot(lambdas, values[name], color=colours[client], linewidth=1.1, label=label or None, **some)
    _over_lambda(ax, lambdas)
    if some:
        ax.plot([], [], color="0.4", marker="o", markersize=3.5, linestyle="none", label="solved")
        ax.plot([], [], color="0.4", linestyle=":", label="proposed")
    ax.legend(frameon=False, fontsize="small")
    return ax


def _over_lambda(ax: Axes, lambdas: Floats) -> None:
    """Make the horizontal axis that of lambda, the largest first."""
    if (lambdas > 0.0).all() and len(lambdas) > 1:
        ax.set_xscale("log")
    ax.invert_xaxis()
    ax.set_xlabel("lambda")


def plot_path(
    estimate: Estimate, solved: Bools, params: pd.DataFrame, lam: float, ax: Axes | None = None
) -> Axes:
    """Draw the coefficients over lambda, each as a share of its largest size on the path; not the intercept.

    A line is drawn at `lam`. Fits that are not `solved` (L,) are joined by dotted lines.
    """
    ax = axes_for(ax, 6.5, 4.0)
    values = params.iloc[:, 1:]
    largest = values.abs().max().replace(0.0, 1.0)
    _lines(estimate, params.index.to_numpy(), values / largest, ax, solved)
    ax.axvline(lam, color="0.6", linestyle="--", linewidth=1.0)
    ax.set_ylabel("coefficient, as a share of its largest size")
    return ax


def plot_criterion(path: pd.DataFrame, name: str, lam: float, ax: Axes | None = None) -> Axes:
    """Draw a criterion over lambda, with the bars of cross-validation; hollow points are not solved."""
    if name not in path.columns:
        known = [column for column in ("bic", "ebic", "aic", "cv") if column in path.columns]
        raise ModelError(f"criterion: expected one of {', '.join(known)}, received {name!r}")
    ax = axes_for(ax, 6.5, 3.6)
    proposed = path["status"] == "proposed"
    joined = ":" if proposed.any() else "-"
    ax.plot(path.index, path[name], color=COLOURS[0], linestyle=joined, linewidth=1.1)
    for which, label, face in ((~proposed, "solved", COLOURS[0]), (proposed, "proposed", "white")):
        rows = path[which]
        errors = rows["cv_se"] if name == "cv" else None
        if len(rows):
            ax.errorbar(
                rows.index, rows[name], yerr=errors, color=COLOURS[0], fmt="o", mfc=face, ms=3.5, label=label
            )
    ax.axvline(lam, color="0.6", linestyle="--", linewidth=1.0)
    _over_lambda(ax, path.index.to_numpy())
    ax.set_ylabel(name)
    if proposed.any():
        ax.legend(frameon=False, fontsize="small")
    return ax


def plot_stability(
    estimate: Estimate, lambdas: Floats, frequencies: pd.DataFrame, threshold: float, ax: Axes | None = None
) -> Axes:
    """Draw selection frequencies over lambda, with a threshold."""
    ax = axes_for(ax, 6.5, 4.0)
    _lines(estimate, lambdas, frequencies, ax)
    ax.axhline(threshold, color="0.6", linestyle="--", linewidth=1.0)
    ax.set_ylabel("selected in this share of halves")
    return ax
