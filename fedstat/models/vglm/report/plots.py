"""Pictures of a path: coefficients, criterion, stability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from fedstat.errors import ModelError
from fedstat.inference.estimate import Estimate
from fedstat.inference.plots import COLOURS, axes_for
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _lines(estimate: Estimate, lambdas: Floats, values: pd.DataFrame, ax: Axes) -> Axes:
    """Draw one line per column over lambda, coloured by client."""
    owners = dict(zip(estimate.names, estimate.clients, strict=True))
    colours = dict(zip(dict.fromkeys(estimate.clients[1:]), COLOURS * len(owners), strict=False))
    named: set[str] = set()
    for name in values.columns:
        client = owners[name]
        label = "" if client in named else client
        named.add(client)
        ax.plot(lambdas, values[name], color=colours[client], linewidth=1.1, label=label or None)
    if (lambdas > 0.0).all() and len(lambdas) > 1:
        ax.set_xscale("log")
    ax.invert_xaxis()
    ax.set_xlabel("lambda")
    ax.legend(frameon=False, fontsize="small")
    return ax


def plot_path(
    estimate: Estimate, lambdas: Floats, params: pd.DataFrame, lam: float, ax: Axes | None = None
) -> Axes:
    """Draw the coefficients over lambda, each as a share of its largest size on the path; not the intercept.

    A line is drawn at `lam`.
    """
    ax = axes_for(ax, 6.5, 4.0)
    values = params.iloc[:, 1:]
    largest = values.abs().max().replace(0.0, 1.0)
    _lines(estimate, lambdas, values / largest, ax)
    ax.axvline(lam, color="0.6", linestyle="--", linewidth=1.0)
    ax.set_ylabel("coefficient, as a share of its largest size")
    return ax


def plot_criterion(path: pd.DataFrame, name: str, lam: float, ax: Axes | None = None) -> Axes:
    """Draw a criterion over lambda, with the bars of cross-validation."""
    if name not in path.columns:
        known = [column for column in ("bic", "ebic", "aic", "cv") if column in path.columns]
        raise ModelError(f"criterion: expected one of {', '.join(known)}, received {name!r}")
    ax = axes_for(ax, 6.5, 3.6)
    errors = path["cv_se"] if name == "cv" else None
    ax.errorbar(path.index, path[name], yerr=errors, color=COLOURS[0], marker="o", markersize=3.0)
    ax.axvline(lam, color="0.6", linestyle="--", linewidth=1.0)
    if (path.index > 0.0).all() and len(path) > 1:
        ax.set_xscale("log")
    ax.invert_xaxis()
    ax.set_xlabel("lambda")
    ax.set_ylabel(name)
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
