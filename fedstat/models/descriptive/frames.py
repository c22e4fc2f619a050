"""Frames of tables that can be drawn: counts, quantiles, histograms and correlations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.tables import Exported, SheetSummary, frame_summary
from fedstat.plotting import (
    COLORS,
    INK,
    MUTED,
    ROWS_ONLY,
    SMALL,
    axes_for,
    label_rows,
    label_x,
    label_y,
    mark_x,
    plain_legend,
    set_headline,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOX = (0.25, 0.5, 0.75)
LARGE_DIFFERENCE = 0.1
"""Standardized difference above which groups count as different (Austin 2009)."""
MOST_LEGENDS = 8


class TableFrame(Exported, pd.DataFrame):  # type: ignore[misc]
    """A DataFrame of a table, which :meth:`plot` draws; whatever is computed from it is a plain DataFrame.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> table = fs.crosstab(partition, "arm", "stage")
    >>> table.plot().get_ylabel(), type(table.to_frame()).__name__, "surgery" in table.to_latex()
    ('rows', 'DataFrame', True)
    """

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return pd.DataFrame

    def plot(self, ax: Axes | None = None) -> Axes:  # type: ignore[override]
        """Draw the table: bars of counts, boxes of quantiles, a histogram, or a map of correlations.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ModelError
            A box needs the quartiles.
        """
        return DRAWN[str(self.attrs["drawn"])](self.to_frame(), ax)

    @takes_alpha
    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return limits of each figure of a table with noise.

        Those of counts include the noise, those of quantiles and correlations also sampling.

        Parameters
        ----------
        alpha : float

        Returns
        -------
        DataFrame
            ``estimate``, ``conf_low`` and ``conf_high``, indexed by row and column.

        Raises
        ------
        ModelError
            The table has no noise.

        Examples
        --------
        >>> import fedstat as fs
        >>> owners = fs.Policy(privacy=fs.Budget(epsilon=3.0, delta=1e-6))
        >>> table = fs.datasets.make_survival()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital", policy=owners)
        >>> bounds = {"arm": ["surgery", "drugs"], "stage": ["I", "II", "III"]}
        >>> found = fs.crosstab(partition, "arm", "stage", epsilon=1.0, bounds=bounds)
        >>> found.conf_int().columns.tolist(), len(found.conf_int())
        (['estimate', 'conf_low', 'conf_high'], 6)
        """
        if "limits" not in self.attrs:
            raise ModelError("conf_int: only tables with epsilon have limits, which include the noise")
        low, high = self.attrs["limits"](alpha)
        frame = self.to_frame()
        index = pd.MultiIndex.from_product([frame.index, frame.columns])
        figures = {"estimate": frame.to_numpy(), "conf_low": low, "conf_high": high}
        return pd.DataFrame({name: np.ravel(one) for name, one in figures.items()}, index=index)

    def _printed(self) -> SheetSummary:
        return frame_summary(self.to_frame())

    def to_frame(self) -> pd.DataFrame:
        """Return a plain DataFrame, with the plots of pandas."""
        return pd.DataFrame(self)


def table_frame(frame: pd.DataFrame, drawn: str, **attrs: Any) -> TableFrame:
    """Make a frame that is `drawn` in one of the ways of :data:`DRAWN`."""
    out = TableFrame(frame)
    out.attrs |= {"drawn": drawn, **attrs}
    return out


def draw_counts(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw bars of counts, side by side; hidden counts have none."""
    ax = axes_for(ax, 6.0, 3.6)
    m, width = len(frame), 0.8 / len(frame.columns)
    for k, (name, counts) in enumerate(frame.items()):
        at = np.arange(m) + (k - (len(frame.columns) - 1) / 2.0) * width
        heights = counts.astype(float).to_numpy()
        ax.bar(at, np.nan_to_num(heights), 0.92 * width, color=COLORS[k % len(COLORS)], label=str(name))
        for x in at[np.isnan(heights)]:
            ax.annotate(
                "hidden",
                (x, 0.0),
                (0.0, 2.0),
                textcoords="offset points",
                rotation=90,
                ha="center",
                fontsize=SMALL,
                color=MUTED,
            )
    ax.set_xticks(np.arange(m), labels=[shorten(str(one), 18) for one in frame.index], parse_math=False)
    ax.tick_params(axis="x", length=0)
    label_y(ax, "rows")
    return finish(ax, frame, f"{frame.index.name} by {frame.columns.name}", str(frame.index.name))


def draw_quantiles(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw boxes of quartiles; whiskers reach to the outermost quantiles that the frame has."""
    if not set(BOX) <= set(frame.columns):
        raise ModelError("plot: a box needs the quartiles; leave q out, or include 0.25, 0.5 and 0.75")
    ax = axes_for(ax, 6.0, 1.2 + 0.5 * len(frame), masked=ROWS_ONLY)
    places = np.arange(len(frame), dtype=np.float64)
    for y, (_, row) in zip(places, frame.iterrows(), strict=True):
        low, middle, high = (float(row[q]) for q in BOX)
        for line in ([row.min(), low], [high, row.max()]):
            ax.plot(line, [y, y], color=MUTED, linewidth=1.2)
        ax.barh(y, high - low, 0.5, left=low, color=COLORS[0], alpha=0.35, edgecolor=COLORS[0], zorder=2)
        ax.plot([middle, middle], [y - 0.25, y + 0.25], color=INK, linewidth=2.0, zorder=3)
    label_rows(ax, places, [shorten(str(one), 24) for one in frame.index])
    label_x(ax, str(frame.columns.name))
    ends = ", ".join(f"{q:g}" for q in (min(frame.columns), max(frame.columns)))
    more = "" if len(frame.columns) == len(BOX) else f"; lines: quantiles {ends}"
    rest = f"box: first to third quartile, with the median{more}"
    set_headline(ax, f"Quartiles of {frame.columns.name}", rest)
    return ax


def draw_histogram(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw counts on intervals as shares of each group per unit; open intervals at the ends are left out."""
    ax = axes_for(ax, 6.0, 3.6)
    ends = np.array([(one.left, one.right) for one in frame.index], dtype=np.float64)
    inside = np.isfinite(ends).all(axis=1)
    edges = np.append(ends[inside, 0], ends[inside, 1][-1])
    for k, (name, counts) in enumerate(frame.items()):
        density = counts.to_numpy()[inside] / max(counts.sum(), 1) / np.diff(edges)
        color, alpha = COLORS[k % len(COLORS)], 0.3 if len(frame.columns) > 1 else 0.6
        ax.stairs(density, edges, fill=True, color=color, alpha=alpha)
        ax.stairs(density, edges, color=color, linewidth=1.4, label=str(name))
    label_y(ax, "density")
    outside = int(frame.to_numpy()[~inside].sum())
    rest = f"{outside:,} rows outside of the range are not shown" if outside else ""
    return finish(ax, frame, f"Distribution of {frame.index.name}", str(frame.index.name), rest)


def draw_correlations(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw a map of correlations, with their values where there is space."""
    p = len(frame)
    ax = axes_for(ax, 2.4 + 0.55 * p, 1.6 + 0.5 * p)
    values = frame.to_numpy(dtype=np.float64)
    image = ax.imshow(values, vmin=-1.0, vmax=1.0, cmap="RdBu_r")
    names = [shorten(str(name), 18) for name in frame.columns]
    ax.set_xticks(np.arange(p), labels=names, rotation=45, ha="right", fontsize=SMALL, parse_math=False)
    ax.set_yticks(np.arange(p), labels=names, fontsize=SMALL, parse_math=False)
    ax.tick_params(length=0)
    for i, j in np.argwhere(np.isfinite(values)).tolist() if p <= 12 else ():
        color = "w" if abs(values[i, j]) > 0.6 else INK
        ax.text(j, i, f"{values[i, j]:.2f}", ha="center", va="center", fontsize=SMALL, color=color)
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=ax, shrink=0.8)
    set_headline(ax, "Correlations")
    return ax


def draw_differences(differences: Mapping[str, float], by: str, ax: Axes | None = None) -> Axes:
    """Draw standardized differences between groups, one row for each variable."""
    ax = axes_for(ax, 6.0, 1.4 + 0.32 * len(differences), masked=ROWS_ONLY)
    places = np.arange(len(differences), dtype=np.float64)
    ax.barh(places, np.nan_to_num(list(differences.values())), 0.6, color=COLORS[0])
    label_rows(ax, places, [shorten(name, 28) for name in differences])
    ax.set_xlim(0.0, 1.15 * max([*np.nan_to_num(list(differences.values())), LARGE_DIFFERENCE]))
    label_x(ax, "largest standardized difference between two groups")
    mark_x(ax, LARGE_DIFFERENCE, "0.1")
    set_headline(ax, f"Differences by {by}")
    return ax


def draw_shares(shares: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw shares of levels, one row for each."""
    ax = axes_for(ax, 6.0, 1.4 + 0.32 * len(shares), masked=ROWS_ONLY)
    places = np.arange(len(shares), dtype=np.float64)
    ax.barh(places, np.nan_to_num(list(shares.values())), 0.6, color=COLORS[0])
    label_rows(ax, places, [shorten(name, 28) for name in shares])
    label_x(ax, "% of rows with the variable")
    set_headline(ax, "Levels")
    return ax


def finish(ax: Axes, frame: pd.DataFrame, headline: str, label: str, rest: str = "") -> Axes:
    """Write the legend of several columns, the label and the headline."""
    if 1 < len(frame.columns) <= MOST_LEGENDS:
        plain_legend(ax, title=str(frame.columns.name or ""), fontsize=SMALL, title_fontsize=SMALL)
    label_x(ax, label)
    set_headline(ax, headline, rest)
    return ax


DRAWN: Mapping[str, Callable[[pd.DataFrame, Axes | None], Axes]] = {
    "counts": draw_counts,
    "quantiles": draw_quantiles,
    "histogram": draw_histogram,
    "correlations": draw_correlations,
}
