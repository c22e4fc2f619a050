"""Plots of estimates, site comparisons, calibration and ROC curves (need matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from fedstat.errors import ModelError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.plotting import (
    COLORS,
    INK,
    MUTED,
    NARROW,
    ROWS_ONLY,
    SMALL,
    axes_for,
    axes_width_inches,
    few_ticks,
    label_log_x,
    label_rows,
    label_x,
    label_y,
    legend_below,
    log_ticks,
    name_width,
    plain_legend,
    set_headline,
    shorten,
    thin_labels,
    title_figure,
)
from fedstat.spline_names import short_names
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axes._secondary_axes import SecondaryAxis
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# Plots of an estimate. matplotlib is the optional extra ``plot``.

ACROSS = 4
"""Panels in a row."""
HEADING = 1.3
"""Rows left blank above each site, for its name."""
WIDE = 6.0
"""Multiple of the usual half width beyond which an interval is cut."""


def link_words(spec: DistributionSpec | None, response: str) -> tuple[str, str, str]:
    """Name the axis of coefficients on a link, that of their exponentials, and the title for these."""
    effect = response if spec is None else f"the {spec.link_entry.effect.format(response)}"
    ratio = "" if spec is None else spec.link_entry.ratio
    if not ratio:
        return f"effect on {effect}", "exponential of the coefficient", "Exponentials of the coefficients"
    many = ratio.replace("ratio", "ratios", 1).capitalize()
    return f"effect on {effect}", f"{ratio} of {response}", many


def per_deviation(frame: pd.DataFrame, deviations: Mapping[str, float] | pd.Series) -> pd.DataFrame:
    """Convert coefficients and their limits to one standard deviation of the column."""
    if absent := [name for name in frame["term"] if name not in deviations]:
        raise ModelError(f"standardized: no standard deviation of {', '.join(absent[:5])}")
    sd = np.array([float(deviations[name]) for name in frame["term"]])
    columns = ["estimate", "conf_low", "conf_high"]
    return frame.assign(**{column: frame[column].to_numpy(dtype=np.float64) * sd for column in columns})


def plot_coefficients(
    frame: pd.DataFrame,
    *,
    ax: Axes | None = None,
    title: str = "Coefficients",
    alpha: float = 0.05,
    effect: str = "coefficient",
    ratios: bool = False,
) -> Axes:
    """Forest plot of a frame as `CoefficientResults.tidy`: a row per coefficient, colored by site.

    Rows without an interval are drawn as a hollow point. `ratios` are drawn on a logarithmic scale around 1.
    A new figure is as tall as the rows need. Intervals much wider than the others end in arrows.
    """
    frame = frame.assign(term=short_names(frame["term"].tolist()))
    groups = [(str(site), rows) for site, rows in frame.groupby("site", sort=False)]
    places = _places(groups)
    height = 1.2 + 0.22 * (len(frame) + HEADING * len(groups))
    ax = axes_for(ax, 7.0, height, masked=ROWS_ONLY)
    reference = 1.0 if ratios else 0.0
    ax.axvline(reference, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    most = name_width(ax, 0.42, 32)
    names = [shorten(name, most) for _, rows in groups for name in rows["term"]]
    for i, (site, rows) in enumerate(groups):
        _draw_group(ax, places[i], rows, COLORS[i % len(COLORS)], shorten(site, name_width(ax, 0.4, 40)))
    y = np.concatenate(places) if places else np.empty(0)
    label_rows(ax, y, names)
    if len(frame):
        _bound(ax, y, pd.concat([rows for _, rows in groups]), reference, ratios)
    ax.tick_params(axis="x", labelsize=SMALL)
    label_x(ax, effect)
    thin_labels(ax)
    known = frame["conf_low"].notna().any()
    set_headline(ax, title, f"with {100 * (1 - alpha):g} % intervals" if known else "without intervals")
    return ax


def plot_models(frame: pd.DataFrame, *, ax: Axes | None = None, ratios: bool = False) -> Axes:
    """Draw coefficients of several fits below each other, from a frame with ``model`` and ``term``.

    A row of the plot is a coefficient; fits have colors and small distances within the row.
    """
    names = list(dict.fromkeys(frame["term"]))
    fits = list(dict.fromkeys(frame["model"]))
    ax = axes_for(ax, 7.0, 1.4 + len(names) * (0.16 + 0.14 * len(fits)), masked=ROWS_ONLY)
    reference = 1.0 if ratios else 0.0
    ax.axvline(reference, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    heights = []
    for k, fit in enumerate(fits):
        rows = frame[frame["model"] == fit]
        y = np.array([names.index(name) for name in rows["term"]]) + 0.7 * ((k + 0.5) / len(fits) - 0.5)
        _draw_group(ax, y, rows, COLORS[k % len(COLORS)], "")
        ax.plot([], [], "o", color=COLORS[k % len(COLORS)], markersize=4.5, label=shorten(fit, 40))
        heights.append(y)
    most = name_width(ax, 0.42, 32)
    places = np.arange(len(names), dtype=np.float64)
    label_rows(ax, places, [shorten(name, most) for name in short_names(names)])
    _bound(ax, np.concatenate(heights), frame, reference, ratios)
    ax.tick_params(axis="x", labelsize=SMALL)
    label_x(ax, "exponential of the coefficient" if ratios else "coefficient")
    thin_labels(ax)
    legend_below(ax)
    set_headline(ax, "Coefficients", "with 95 % intervals")
    return ax


def label_estimates(ax: Axes, numbers: Floats, ratios: bool) -> None:
    """Write estimates and intervals (n, 3) to the right of the rows of a plot of coefficients."""
    y = np.asarray(ax.get_yticks(), dtype=np.float64)
    _label_right(ax, y, numbers, ratios)


def _places(groups: list[tuple[str, pd.DataFrame]]) -> list[np.ndarray]:
    """Rows from the top down, a heading above each site."""
    places, top = [], 0.0
    for site, rows in groups:
        top += HEADING if site else 0.0
        places.append(top + np.arange(len(rows)))
        top += len(rows)
    return places


def _bound(ax: Axes, y: Floats, rows: pd.DataFrame, reference: float, ratios: bool) -> None:
    """Set the ends of the axis; cut intervals that would make the others small, with arrows at the cuts."""
    turn, back = (np.log, np.exp) if ratios else (np.asarray, np.asarray)
    with np.errstate(divide="ignore"):
        b, low, high = turn(rows[["estimate", "conf_low", "conf_high"]].to_numpy(dtype=np.float64)).T
    known = np.isfinite(low) & np.isfinite(high)
    finite, center = b[np.isfinite(b)], float(turn(reference))
    if not len(finite):
        return
    # As far as half intervals usually reach, and estimates do.
    usual = float(np.median((high - low)[known])) / 2.0 if known.any() else 0.0
    reach = max(WIDE * usual, float(np.ptp(np.append(finite, center))))
    left = min(float(np.maximum(low, b - reach)[known].min(initial=np.inf)), finite.min(), center)
    right = max(float(np.minimum(high, b + reach)[known].max(initial=-np.inf)), finite.max(), center)
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


def _draw_group(ax: Axes, y: np.ndarray, rows: pd.DataFrame, color: str, site: str) -> None:
    low, high = rows["conf_low"].to_numpy(), rows["conf_high"].to_numpy()
    # A hollow point, where the covariance gives no interval.
    known = np.isfinite(low)
    ax.hlines(y[known], low[known], high[known], color=color, linewidth=1.6)
    estimate = rows["estimate"].to_numpy()
    ax.plot(estimate[known], y[known], "o", color=color, markersize=4.5)
    ax.plot(estimate[~known], y[~known], "o", color=color, markersize=4.5, markerfacecolor="white")
    if site:
        ax.text(
            *(0.01, y[0] - 1.0, site),
            color=color,
            weight="bold",
            fontsize=SMALL,
            va="center",
            transform=ax.get_yaxis_transform(),
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )


def draw_effect(
    frame: pd.DataFrame, column: str, effect: str, explanation: str, *, ratios: bool, ax: Axes | None
) -> Axes:
    """Draw an effect along the values of a column, from a frame as `RowsResults.effect`, with its band."""
    ax = axes_for(ax, 6.0, 4.0)
    rows = frame.sort_values("value")
    x = rows["value"].to_numpy()
    ax.axhline(1.0 if ratios else 0.0, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    ax.fill_between(x, rows["conf_low"], rows["conf_high"], color=COLORS[0], alpha=0.2, linewidth=0.0)
    ax.plot(x, rows["estimate"], color=COLORS[0])
    if ratios:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ticks = log_ticks(low, high, 6)
        ax.set_yticks(ticks, [f"{tick:.6g}" for tick in ticks])
        ax.set_yticks([], minor=True)
    label_x(ax, column)
    few_ticks(ax)
    label_y(ax, effect)
    set_headline(ax, f"Effect of {column}", explanation)
    return ax


def draw_bands(
    x: Floats, bands: Mapping[str, Floats], column: str, what: str, explanation: str, ax: Axes | None
) -> Axes:
    """Draw several curves along the values of a column (m,): of each estimate and limits, (3, m)."""
    ax = axes_for(ax, 6.0, 4.0)
    for k, (name, (estimate, low, high)) in enumerate(bands.items()):
        color = COLORS[k % len(COLORS)]
        ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0.0)
        ax.plot(x, estimate, color=color, label=name)
    label_x(ax, column)
    few_ticks(ax)
    label_y(ax, what)
    legend_below(ax)
    set_headline(ax, what[:1].upper() + what[1:], explanation)
    return ax


def plot_convergence(trace: pd.DataFrame, *, tolerance: float, ax: Axes | None = None) -> Axes:
    """Relative score over the iterations, with the kind of each move; the tolerance is drawn as a line.

    The trace has index ``iteration`` and columns ``score`` and ``move``.
    """
    ax = axes_for(ax, 6.5, 3.6, "Convergence")
    ax.plot(trace.index, trace["score"], color="0.7", linewidth=1.0, zorder=1)
    for color, (move, rows) in zip(COLORS, trace.groupby("move", sort=False), strict=False):
        ax.scatter(rows.index, rows["score"], s=18, color=color, label=move, zorder=2)
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
    # Scores decrease by powers of ten; on a linear scale only the first would be visible.
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


MOST_BARS = 60
"""Bars of a distribution; bins beyond that number would be narrower than a pixel."""
TAIL = 0.001


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
    complete = axes_for(None, max(3.5, 1.75 * across), 1.8 * rows, masked=())
    figure = complete.get_figure(root=True)
    assert figure is not None
    complete.remove()
    places = figure.subplots(rows, across, squeeze=False).ravel()
    for ax, panel in zip(places, panels, strict=False):
        if panel.levels:
            at = np.arange(len(panel.levels))
            ax.bar(at, panel.probabilities, color=COLORS[0])
            names = [shorten(str(level), 14) for level in panel.levels]
            ax.set_xticks(at, names, rotation=90, fontsize="x-small", parse_math=False)
            thin_labels(ax, "x")
        else:
            probabilities, edges = _visible_bins(panel.probabilities, panel.edges)
            ax.stairs(probabilities, edges, fill=True, color=COLORS[0])
            if panel.scale == "log":
                ax.set_xscale("log")
            elif panel.scale == "asinh":
                ax.set_xscale("asinh", linear_width=panel.linear)
            if panel.scale in ("log", "asinh"):
                ends = edges[[0, -1]]
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


def _visible_bins(probabilities: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Join neighboring bins to at most MOST_BARS, without tails that have TAIL of the probability each."""
    if len(probabilities) <= MOST_BARS:
        return probabilities, edges
    below = np.cumsum(probabilities)
    first, last = np.searchsorted(below, [TAIL, below[-1] - TAIL])
    ends = np.arange(first, last + 1, -(-(last + 1 - first) // MOST_BARS))
    return np.add.reduceat(probabilities[: last + 1], ends), edges[np.append(ends, last + 1)]


def plot_heat(correlation: pd.DataFrame, title: str, ax: Axes | None = None) -> Axes:
    """Draw a correlation matrix as a heat map."""
    size = 2.5 + 0.18 * len(correlation)
    ax = axes_for(ax, size + 1.0, size, masked=())
    image = ax.imshow(correlation.to_numpy(), vmin=-1.0, vmax=1.0, cmap="RdBu_r")
    most = name_width(ax, 0.3, 28)
    places, names = range(len(correlation)), [shorten(str(name), most) for name in correlation]
    ax.set_xticks(places, names, rotation=90, fontsize=SMALL, parse_math=False)
    ax.set_yticks(places, names, fontsize=SMALL, parse_math=False)
    # Next to a narrow plot, a color scale would use all of its width.
    where: Any = {"location": "bottom"} if axes_width_inches(ax) < NARROW else {"shrink": 0.7}
    ax.figure.colorbar(image, ax=ax, label="correlation", **where)
    set_headline(ax, title)
    thin_labels(ax, "x")
    thin_labels(ax, "y")
    return ax


# ----------------------------------------------------------------------------------------------------
# Calibration and receiver operating characteristics over sites (need matplotlib).

Bins: TypeAlias = tuple[Floats, Floats, Floats]
"""Rows, observed sums and expected sums by bin, each of shape (B,)."""
MARGIN = 0.04
STRIP = 30
"""Bars of the histogram above a calibration plot."""
MOST_SITES = 7
"""Number of sites with their own color; more are drawn in gray."""
LEAST_ROWS = 50
"""Approximate number of rows of a site for each point of its line."""


def plot_calibration(
    curves: Mapping[str, Bins],
    total: Bins,
    *,
    binary: bool,
    groups: int = 10,
    counted: tuple[str, str] = ("rows", "all sites"),
    ax: Axes | None = None,
) -> Axes:
    """Observed against predicted means: all sites as points, each site as a line; rows by prediction above.

    Binary responses have intervals of proportions (Wilson 1927, 95 %). Neighboring bins are joined to at
    most `groups` of about equal size, of small sites to fewer. `counted` names what is in a bin, and all
    curves together.
    """
    ax = axes_for(ax, 5.0, 5.4)
    for k, (site, bins) in enumerate(curves.items()):
        n, observed, expected = join_bins(*bins, int(np.clip(bins[0].sum() // LEAST_ROWS, 1, groups)))
        color = COLORS[k] if len(curves) <= MOST_SITES else "0.7"
        label = (
            shorten(site, name_width(ax, 0.4, 28))
            if len(curves) <= MOST_SITES
            else ("one site" if k == 0 else None)
        )
        ax.plot(expected / n, observed / n, color=color, linewidth=1.2, alpha=0.8, label=label)
    _draw_total(ax, join_bins(*total, groups), binary, counted[1])
    low, high = _limits(ax, total, binary)
    ax.plot([low, high], [low, high], color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set(xlabel="mean prediction", ylabel="observed proportion" if binary else "observed mean")
    _draw_histogram(ax, total, binary, counted[0])
    legend_below(ax)
    set_headline(ax, "Calibration")
    return ax


def _draw_histogram(ax: Axes, total: Bins, binary: bool, counted: str) -> None:
    """Draw rows by prediction in a strip above the axes; of a binary response with the events among them."""
    n, observed, expected = (values[total[0] > 0.0] for values in total)
    edges = np.linspace(*ax.get_xlim(), STRIP + 1)
    strip = ax.inset_axes((0.0, 1.02, 1.0, 0.14))
    for counts, color in [(n, "0.75"), *([(observed, COLORS[1])] if binary else [])]:
        height, _ = np.histogram(expected / n, edges, weights=counts)
        strip.bar(edges[:-1], height, np.diff(edges), align="edge", color=color, linewidth=0.0)
    strip.set(xlim=ax.get_xlim(), xticks=[], yticks=[])
    for side in ("top", "right", "left"):
        strip.spines[side].set_visible(False)
    rows = f"{n.sum():,.0f} {counted}" + (f", {observed.sum():,.0f} events" if binary else "")
    color = COLORS[1] if binary else MUTED
    strip.set_title(rows, loc="right", fontsize=SMALL, color=color, pad=1.0)


def plot_roc(curves: pd.DataFrame, areas: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw the points of :meth:`Evaluation.roc`, joined; the last curve is that of all, the others sites'."""
    ax = axes_for(ax, 5.0, 5.2)
    names = list(dict.fromkeys(curves.index.get_level_values(0)))
    few = len(names) - 1 <= MOST_SITES
    ax.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    for k, name in enumerate(names):
        points, last = curves.loc[name], k == len(names) - 1
        label = f"{shorten(str(name), name_width(ax, 0.3, 28))} (AUC {areas[name]:.3f})"
        if not (few or last):
            label = "" if k else "one site"
        style = {"color": INK, "linewidth": 2.0} if last else {"color": COLORS[k] if few else "0.7"}
        ax.plot(points["fpr"], points["tpr"], label=label or None, **({"linewidth": 1.2} | style))
    margins = (-MARGIN / 2, 1.0 + MARGIN / 2)
    ax.set(xlim=margins, ylim=margins, aspect="equal")
    ax.set(xlabel="false positive rate", ylabel="true positive rate")
    legend_below(ax)
    set_headline(ax, "Receiver operating characteristic")
    return ax


def join_bins(n: Floats, observed: Floats, expected: Floats, groups: int) -> Bins:
    """Join neighboring bins to at most this many groups of about equal size; empty groups are left out."""
    # By the middle rank of a bin: a bin is never split over two groups.
    middle = (np.cumsum(n) - n / 2.0) / max(float(n.sum()), 1.0)
    group = np.minimum((groups * middle).astype(np.int64), groups - 1)
    sums: Floats = np.array(
        [np.bincount(group, v, groups) for v in (n, observed, expected)], dtype=np.float64
    )
    joined, y, mu = sums[:, sums[0] > 0.0]
    return joined, y, mu


def _draw_total(ax: Axes, bins: Bins, binary: bool, label: str) -> None:
    n, observed, expected = bins
    x, y = expected / n, observed / n
    if binary:
        low, high = proportion_confint(observed, n, method="wilson")
        ax.vlines(x, low, high, color=INK, linewidth=1.2, zorder=3)
    ax.scatter(x, y, s=26, color=INK, zorder=4, label=label)


def _limits(ax: Axes, total: Bins, binary: bool) -> tuple[float, float]:
    n, _, expected = (values[total[0] > 0.0] for values in total)
    low = min(ax.get_xlim()[0], ax.get_ylim()[0], float((expected / n).min()))
    high = max(ax.get_xlim()[1], ax.get_ylim()[1], float((expected / n).max()))
    return (max(low, -MARGIN * high), min(high, 1.0 + MARGIN)) if binary else (low, high)


# ----------------------------------------------------------------------------------------------------
# The forest plot of one coefficient over sites (needs matplotlib).

COMMON, RANDOM = COLORS[0], COLORS[1]
LARGEST_BOX, SMALLEST_BOX = 12.0, 3.0
"""Sides in points; the largest is that of the heaviest site."""
DIAMOND = 0.3
"""Half the height of a diamond, in rows."""
GAP = 0.5
"""Blank rows between the sites and the diamonds."""
LABELS = {"all sites, common": COMMON, "random effects": RANDOM, "a further site": RANDOM}


def plot_forest(
    rows: pd.DataFrame,
    combined: pd.Series,
    *,
    ax: Axes | None = None,
    alpha: float = 0.05,
    exponentiate: bool = False,
    effect: str = "coefficient",
) -> Axes:
    """One coefficient: sites' own estimates, the common one, the mean of random effects.

    `rows` have index site and columns ``estimate``, ``std_error`` (nan where the site has none) and
    ``problem``; `combined` is a row of `Heterogeneity.to_frame`, named as the coefficient. The area of a box
    is the site's weight, its inverse variance. The last row is the prediction interval for a further site; it
    ends in arrows if it is wider than the plot. Exponentials are drawn on a logarithmic scale. `effect` names
    the axis. A new figure is as wide as a printed page.
    """
    ax = axes_for(ax, 7.0, 1.4 + 0.27 * (len(rows) + 3), masked=ROWS_ONLY)
    turn = np.exp if exponentiate else np.asarray
    if exponentiate:
        ax.set_xscale("log")
    z = float(stats.norm.isf(alpha / 2.0))
    y = np.arange(len(rows) + 3) + np.repeat([0.0, GAP], [len(rows), 3])
    estimate = np.append(rows["estimate"].to_numpy(), [combined["estimate"], combined["re_estimate"]])
    # The mean of random effects has t quantiles; it is half of its interval as it stands.
    mean = (combined["re_high"] - combined["re_low"]) / 2.0
    half = np.append(z * np.append(rows["std_error"].to_numpy(), combined["std_error"]), mean)
    limits = turn(np.stack([estimate, estimate - half, estimate + half], axis=1))
    further = turn(np.array([np.nan, combined["pred_low"], combined["pred_high"]]))
    _draw_sites(ax, y[:-3], limits[:-2], half[:-2])
    _draw_absent(ax, y[:-3], rows["problem"][rows["estimate"].isna()], estimate[:-2])
    _draw_diamond(ax, y[-3], limits[-2], COMMON)
    _draw_diamond(ax, y[-2], limits[-1], RANDOM)
    _draw_references(ax, limits[-2, 0], float(turn(0.0)), y[-4] + (1.0 + GAP) / 2.0)
    _draw_further(ax, y[-1], further[1], further[2])
    most = name_width(ax, 0.3, 28)
    _label_left(ax, y, [shorten(str(site), most) for site in rows.index])
    right = _label_right(ax, y, np.vstack([limits, further]), exponentiate)
    if exponentiate:
        label_log_x(ax, at=1.0)
    else:
        few_ticks(ax)
    label_x(ax, f"{effect}, with {100 * (1 - alpha):g} % interval")
    ax.xaxis.label.set_fontsize(SMALL)
    headline, rest = _title(combined).split("\n")
    set_headline(ax, headline, rest)
    thin_labels(ax, first=len(LABELS))
    _follow(right, ax)
    return ax


def _draw_sites(ax: Axes, y: Floats, limits: Floats, half: Floats) -> None:
    known = np.isfinite(limits[:, 0])
    y, half, (estimate, low, high) = y[known], half[known], limits[known].T
    side = np.maximum(LARGEST_BOX * half.min(initial=np.inf) / half, SMALLEST_BOX)
    ax.hlines(y, low, high, color=INK, linewidth=1.2)
    ax.scatter(estimate, y, s=side**2, marker="s", color=INK, linewidths=0.0, zorder=2)


def _draw_absent(ax: Axes, y: Floats, reasons: pd.Series, estimate: Floats) -> None:
    """Write why there is no estimate into the row of a site."""
    for row, reason in zip(y[np.isnan(estimate)], reasons, strict=True):
        text = ax.text(
            *(0.02, row, shorten(reason or "not determined here", name_width(ax, 0.42, 60))),
            transform=ax.get_yaxis_transform(),
            fontsize="x-small",
            color="0.4",
            va="center",
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
        # It is within the axes, which the layout would make small for it.
        text.set_in_layout(False)


def _draw_diamond(ax: Axes, y: float, limits: Floats, color: str) -> None:
    center, low, high = limits.tolist()
    ax.fill(
        [low, center, high, center], [y, y - DIAMOND, y, y + DIAMOND], color=color, linewidth=0.0, zorder=2
    )


def _draw_references(ax: Axes, common: float, none: float, divide: float) -> None:
    ax.axvline(common, color=COMMON, linewidth=0.9, linestyle="--", zorder=0)
    # No effect is a reference only if it is in the plot; it must not widen it.
    low, high = ax.get_xlim()
    if low <= none <= high:
        ax.axvline(none, color="0.55", linewidth=0.9, zorder=0)
    ax.axhline(divide, color="0.85", linewidth=0.8, zorder=0)


def _draw_further(ax: Axes, y: float, low: float, high: float) -> None:
    """Draw the prediction interval, cut where it would make the rest small."""
    # Limits of what is drawn so far: a wide interval must not compress the sites.
    left, right = ax.get_xlim()
    shown = np.clip([low, high], left, right)
    ax.hlines(y, *shown, color=RANDOM, linewidth=2.2)
    for end, limit, marker in ((low, left, "<"), (high, right, ">")):
        if np.isfinite(end) and (end < left or end > right):
            ax.plot(limit, y, marker, color=RANDOM, markersize=6.0, clip_on=False)
    ax.set_xlim(left, right)


def _label_left(ax: Axes, y: Floats, sites: list[str]) -> None:
    label_rows(ax, y, [*sites, *LABELS])
    for label, color in zip(ax.get_yticklabels()[-len(LABELS) :], LABELS.values(), strict=True):
        label.set(color=color, weight="bold")
    ax.tick_params(axis="y", pad=8)
    ax.tick_params(axis="x", labelsize=SMALL)


def _label_right(ax: Axes, y: Floats, numbers: Floats, ratios: bool) -> SecondaryAxis:
    """Write estimate and interval of each row in columns, with two digits of the shortest interval.

    Ratios have three significant digits, because the decimals for a large one would make zeros of small ones,
    and more where the shortest interval needs them. A narrow plot has estimates only, because drawn intervals
    need the space.
    """
    shortest = float(np.nanmin(numbers[:, 2] - numbers[:, 1], initial=np.inf)) / 2.0
    # As many decimals as leave two digits to half of the shortest interval.
    digits = int(np.clip(1.0 - np.floor(np.log10(shortest)), 0, 6)) if 0.0 < shortest < np.inf else 3
    narrowest = float(np.nanmin((numbers[:, 2] - numbers[:, 1]) / numbers[:, 0], initial=np.inf)) / 2.0
    figures = int(np.clip(1.0 - np.floor(np.log10(narrowest)), 3, 6)) if 0.0 < narrowest < np.inf else 3
    form = f"#.{figures}g" if ratios else f".{digits}f"
    cells = [["" if np.isnan(v) else f"{v:{form}}".rstrip(".") for v in row] for row in numbers.tolist()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in cells]
    texts = [f"{b} [{low}, {high}]" if low.strip() else "" for b, low, high in padded]
    if axes_width_inches(ax) < NARROW:
        texts = [b for b, _, _ in padded]
    right = ax.secondary_yaxis("right")
    right.set_yticks(y, labels=texts, fontsize="x-small", family="monospace", parse_math=False)
    right.tick_params(axis="y", length=0)
    right.spines["right"].set_visible(False)
    return right


def _follow(right: SecondaryAxis, ax: Axes) -> None:
    """Restrict numbers to the rows that have names."""
    for name, number in zip(ax.get_yticklabels(), right.get_yticklabels(), strict=True):
        if not name.get_text():
            number.set_visible(False)


def _title(combined: pd.Series) -> str:
    name = shorten(short_names([str(combined.name)])[0], 60)
    if not combined["df"]:
        return f"{name}\nfewer than two sites to compare"
    p, low, high = combined["p_value"], 100 * combined["I2_low"], 100 * combined["I2_high"]
    interval = "" if np.isnan(low) else f" ({low:.0f} to {high:.0f})"
    test = f"Q = {combined['Q']:.1f} on {combined['df']:.0f} df, "
    test += "P < 0.001" if p < 0.0005 else f"P = {p:.3f}"
    return f"{name}\nI² = {100 * combined['I2']:.0f} %{interval}, {test}"
