"""Plots of a partition (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.federation.partition.dependence import BlockCorrelation
from fedstat.federation.partition.describe import PartitionDescription
from fedstat.plotting import (
    COLORS,
    INK,
    LINE,
    NARROW,
    SMALL,
    axes_height_points,
    axes_width_inches,
    name_width,
    pyplot,
    relayout,
    set_headline,
    shorten,
    text_width,
    thin_labels,
)
from fedstat.typing import Array, Bools

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axes._secondary_axes import SecondaryAxis

PRESENT, PARTLY, ABSENT = COLORS[0], "#8EC1E3", "#E3E3E3"
MOST_ACROSS, MOST_DOWN = 12, 40
"""Gaps in a map of missing cells: between blocks of columns, and between columns."""
DARK, SMALLEST = 0.55, 5.5
"""Share above which a tile is dark, and points of the smallest numbers."""
LABEL_WIDTH, MOST_UPRIGHT = 13, 6
COUNTS_WIDTH, SHARES_HEIGHT, GAP = 2.0, 0.6, 0.1  # inches
MAX_TICK_LABELS = 70
MAX_DOTTED = 60


def draw_patterns(description: PartitionDescription, ax: Axes | None, max_patterns: int) -> Axes:
    """Tile map of the patterns in which sites' records are missing."""
    sites = list(description.sites.index)
    patterns = description.patterns if description.use is None else description.use
    shown = patterns.head(max_patterns)
    tiles = shown.iloc[:, : len(sites)].to_numpy()
    ax = ax if ax is not None else _map_axes(sites, len(tiles))
    _draw_tiles(ax, tiles)
    _label_sites(ax, sites)
    _draw_counts(ax, shown["count"].to_numpy(), shown["share"].to_numpy())
    top = _draw_shares(ax, description.sites["missing share"].to_numpy())
    lines = [line for label in _site_labels(sites)[0] for line in label.split("\n")]
    if max(text_width(line, SMALL) for line in lines) > _tile_width(ax, len(sites)):
        _label_sites(ax, sites, turned=True)
    head, rest = _patterns_title(description, len(shown)).split("\n", 1)
    set_headline(ax, head, rest, top)
    return ax


def draw_missing_cells(cells: pd.DataFrame, ax: Axes | None, n_streamed: int = 0) -> Axes:
    """Map of the share of missing cells, with numbers; gray if a site lacks a column.

    Sites are rows if columns are few; otherwise columns are rows. If there are very many columns, only those
    with missing cells are shown.
    """
    across = cells.shape[1] <= MOST_ACROSS
    complete = (cells == 0.0).all() if cells.shape[1] > MOST_DOWN else pd.Series(False, cells.columns)
    shown = cells if across else cells.loc[:, ~complete].T
    rows, columns = ([shorten(str(name), 28) for name in axis] for axis in (shown.index, shown.columns))
    ax = ax if ax is not None else _new_axes(min(7.0, 2.2 + 0.6 * len(columns)), 1.4 + 0.24 * len(rows))
    ax.set_facecolor(ABSENT)
    ax.imshow(shown.to_numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    _part_tiles(ax, shown.shape, 1.5)
    most = name_width(ax, 0.3, 28)
    ax.set_yticks(range(len(rows)), [shorten(name, most) for name in rows], fontsize=SMALL, parse_math=False)
    names = [shorten(name, most) for name in columns]
    ax.set_xticks(range(len(names)), names, fontsize=SMALL, parse_math=False)
    _remove_frame_and_ticks(ax)
    _turn_labels(ax, names)
    head = "Missing values by site and column"
    rest = _cells_title(cells, n_streamed, int(complete.sum()))
    set_headline(ax, head, rest)
    if not _write_shares(ax, shown.to_numpy()):
        ax.figure.colorbar(ax.images[0], ax=ax, format=lambda share, _: f"{share:.0%}", label="share missing")
    return ax


def _turn_labels(ax: Axes, names: Sequence[str]) -> None:
    """Turn the names of tiles upright where one is wider than its tile."""
    if max((text_width(name, SMALL) for name in names), default=0.0) > _tile_width(ax, len(names)):
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=SMALL, parse_math=False)


def _tile_width(ax: Axes, n: int) -> float:
    """Points of one of n tiles in a row, as the picture is now."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    return float(ax.get_window_extent().width / figure.dpi * 72.0) / max(n, 1)


def _size_of(text: str, ax: Axes, n: int) -> float:
    """Points in which a text fits into one of n tiles in a row."""
    return min(SMALL, SMALL * _tile_width(ax, n) / text_width(text, SMALL))


def _write_shares(ax: Axes, shares: Array) -> bool:
    """Write shares into their tiles, if there is room for them."""
    size = _size_of(" 100% ", ax, shares.shape[1])
    if size < SMALLEST:
        return False
    for (i, j), share in np.ndenumerate(shares):
        ink = "white" if share > DARK else INK if share > 0.0 else "#8A8A8A"
        ax.text(j, i, _whole_percent(float(share)), ha="center", va="center", fontsize=size, color=ink)
    return True


def _whole_percent(share: float) -> str:
    """Write a share as an integer percentage; 0 and 100 are used only for exactly none and all."""
    if np.isnan(share):
        return "–"
    if 0.0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1.0 else f"{share:.0%}"


def draw_correlation(correlation: BlockCorrelation, ax: Axes | None) -> Axes:
    """Heat map of rank correlations, blocks of sites apart."""
    R = correlation.matrix
    side = 0.24 * min(len(R), MAX_TICK_LABELS)
    ax = ax if ax is not None else _new_axes(max(6.5, side + 4.0), max(5.2, side + 2.6))
    ax.set_facecolor("#F4F4F4")
    image = ax.imshow(R.to_numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
    _label_columns(ax, list(R.columns), both=True)
    blocks = _draw_blocks(ax, list(correlation.site_of.values()))
    _draw_doubts(ax, correlation.in_doubt().to_numpy())
    options: Any = {"location": "bottom"} if axes_width_inches(ax) < NARROW else {"shrink": 0.7, "pad": 0.02}
    ax.figure.colorbar(image, ax=ax, label="Spearman rank correlation", **options)
    headline, rest = _correlation_title(correlation).split("\n", 1)
    set_headline(ax, headline, rest)
    right = ax.secondary_yaxis("right")
    # Names leave less room to the picture, and so lower blocks; the layout rests at the third drawing.
    for _ in range(2):
        _name_blocks(ax, right, blocks)
    thin_labels(ax, "x")
    thin_labels(ax, "y")
    relayout(ax)
    return ax


def _new_axes(width: float, height: float, **figure: Any) -> Axes:
    options = {"figsize": (min(width, 20), min(height, 20)), "layout": "constrained", **figure}
    ax: Axes = pyplot().subplots(**options)[1]
    return ax


def _map_axes(sites: Sequence[str], n_patterns: int) -> Axes:
    """Axes for the tile map, with space in inches for the parts around it."""
    labels, angle = _site_labels(sites)
    longest = max(len(line) for label in labels for line in label.split("\n"))
    left = 0.45 if angle == 0 else max(0.45, 0.06 * longest - 0.3)
    bottom = 0.3 + (0.16 * max(label.count("\n") + 1 for label in labels) if angle == 0 else 0.06 * longest)
    width, height = max(0.95 * len(sites), 2.0), max(0.27 * n_patterns, 0.8)
    W, H = left + width + COUNTS_WIDTH + 0.2, bottom + height + SHARES_HEIGHT + 1.25
    ax = _new_axes(W, H, layout="none")
    ax.set_position((left / W, bottom / H, width / W, height / H))
    return ax


def _draw_tiles(ax: Axes, tiles: Array) -> None:
    """Colors for a complete, a partial, and a missing record."""
    has, some = (tiles == True) | (tiles == "all"), tiles == "some"  # noqa: E712
    colors = np.where(has[..., None], _rgb(PRESENT), np.where(some[..., None], _rgb(PARTLY), _rgb(ABSENT)))
    ax.imshow(colors, aspect="auto", interpolation="nearest")
    ax.set_yticks([])
    ax.set_ylabel("patterns", color=INK)
    _part_tiles(ax, tiles.shape, 2)


def _part_tiles(ax: Axes, shape: tuple[int, ...], width: float) -> None:
    """White lines between the tiles, where a grid has its minor ticks."""
    ax.set_xticks(np.arange(0.5, shape[1] - 1), minor=True)
    ax.set_yticks(np.arange(0.5, shape[0] - 1), minor=True)
    ax.grid(which="minor", color="white", linewidth=width)
    _remove_frame_and_ticks(ax)


def _site_labels(sites: Sequence[str], *, turned: bool = False) -> tuple[list[str], float]:
    """Names as tick labels and their angle: horizontal if sites are few."""
    if len(sites) <= MOST_UPRIGHT and not turned:
        return [fill(site, LABEL_WIDTH, break_long_words=False) for site in sites], 0.0
    return [shorten(site, 2 * LABEL_WIDTH) for site in sites], 40.0


def _label_sites(ax: Axes, sites: Sequence[str], *, turned: bool = False) -> None:
    labels, angle = _site_labels(sites, turned=turned)
    style: dict[str, Any] = {"rotation": angle, "ha": "right", "rotation_mode": "anchor"} if angle else {}
    ax.set_xticks(range(len(sites)), labels, fontsize=SMALL, parse_math=False, **style)


def _draw_counts(ax: Axes, counts: Array, shares: Array) -> None:
    """Bars at the right of the map: entities with each pattern."""
    width, _ = _inches(ax)
    right = ax.inset_axes((1 + GAP / width, 0.0, (COUNTS_WIDTH - GAP) / width, 1.0))
    places = np.arange(len(counts))
    right.barh(places, counts, color=PRESENT, height=0.7)
    largest = float(max(counts, default=1))
    for place, count, share in zip(places, counts, shares, strict=True):
        label = f"{count:,} ({_percent(share)})"
        right.text(count + 0.04 * largest, float(place), label, va="center", fontsize="small", color=INK)
    # room for the counts behind the longest bar
    right.set(xlim=(0, 2.5 * largest), ylim=ax.get_ylim(), xticks=[], yticks=[])
    right.set_xlabel("entities", color=INK, loc="left")
    _remove_frame_and_ticks(right)


def _draw_shares(ax: Axes, shares: Array) -> float:
    """Bars above the map: share of entities without a record at each site; returns where they end."""
    width, height = _inches(ax)
    top = ax.inset_axes((0.0, 1 + GAP / height, 1.0, SHARES_HEIGHT / height))
    top.bar(np.arange(len(shares)), shares, color="#8C8C8C", width=0.6)
    fine = _size_of(" 99.9% ", ax, len(shares)) == SMALL
    size = SMALL if fine else max(_size_of(">99%", ax, len(shares)), SMALLEST)
    for place, share in enumerate(shares):
        label = _percent(share) if fine else _whole_percent(share)
        top.text(place, share + 0.04, label, ha="center", va="bottom", fontsize=size, color=INK)
    top.set(xlim=ax.get_xlim(), ylim=(0, 1.35), xticks=[], yticks=[])
    note = "share without\na record"
    top.text(1 + GAP / width, 0.0, note, transform=top.transAxes, va="bottom", fontsize="small", color=INK)
    _remove_frame_and_ticks(top)
    return 1.0 + (GAP + SHARES_HEIGHT) / height


def _percent(share: float) -> str:
    """Write a share as a percentage that is zero only for nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _label_columns(ax: Axes, names: Sequence[str], *, both: bool = False) -> None:
    """Column names along the map, while they can be read."""
    readable = list(names) if len(names) <= MAX_TICK_LABELS else []
    size = "small" if len(names) <= 30 else "x-small"
    ax.set_xticks(range(len(readable)), readable, rotation=90, fontsize=size)
    if both:
        ax.set_yticks(range(len(readable)), readable, fontsize=size)
    _remove_frame_and_ticks(ax)


def _draw_blocks(ax: Axes, owners: Sequence[str]) -> list[tuple[str, int]]:
    """Lines between sites, and space on the right for their names; returns these with their columns."""
    sizes = [(site, len(list(block))) for site, block in groupby(owners)]
    ends = np.cumsum([size for _, size in sizes])
    for end in ends[:-1] - 0.5:
        ax.axhline(end, color=INK, linewidth=1.2)
        ax.axvline(end, color=INK, linewidth=1.2)
    return sizes


def _name_blocks(ax: Axes, right: SecondaryAxis, sizes: Sequence[tuple[str, int]]) -> None:
    """Names of sites right of their blocks, in as many lines as fit into a block."""
    n = np.array([size for _, size in sizes])
    tall = axes_height_points(ax) / max(int(n.sum()), 1)
    centers, names, free = np.cumsum(n) - n / 2 - 0.5, [], -np.inf
    for (site, size), center in zip(sizes, centers.tolist(), strict=True):
        name = fill(shorten(site, 40), LABEL_WIDTH, break_long_words=False)
        if (name.count("\n") + 1) * LINE * SMALL > size * tall:
            name = shorten(site, 2 * LABEL_WIDTH)
        half = LINE * SMALL / 2.0 * (name.count("\n") + 1) / tall
        # Blocks that are lower than a line may have no name.
        names.append(name if center - half >= free - 0.01 else "")
        free = center + half if names[-1] else free
    right.set_yticks(centers, names, fontweight="bold", fontsize=SMALL, parse_math=False)
    right.tick_params(length=0, colors=INK)
    right.spines["right"].set_visible(False)


def _draw_doubts(ax: Axes, doubts: Bools) -> None:
    """Dots on correlations between sites that contradict independence."""
    i, j = np.nonzero(doubts)
    size = 10.0 if len(doubts) <= MAX_DOTTED else 2.0
    ax.scatter(j, i, s=size, color="black", linewidths=0)


def _patterns_title(description: PartitionDescription, n_shown: int) -> str:
    patterns = description.patterns if description.use is None else description.use
    n_patterns, covered = len(patterns), patterns["count"].iloc[:n_shown].sum()
    lines = [
        f"Records of {description.n_entities:,} entities at {len(description.sites)} sites",
        f"{description.n_complete:,} entities have a record at every site",
        "blue: has a record; gray: has none"
        if description.use is None
        else "blue: all columns, light: some, gray: none, as a fit of all takes them",
    ]
    if n_patterns > n_shown:
        lines.append(f"{n_shown} of {n_patterns} patterns are shown, with {covered:,} entities")
    return "\n".join(lines)


def _cells_title(cells: pd.DataFrame, n_streamed: int, n_complete: int) -> str:
    lines = []
    if cells.isna().to_numpy().any():
        lines.append("gray: the site lacks this column")
    if n_complete:
        lines.append(f"{n_complete} more columns lack nothing anywhere")
    if n_streamed:
        lines.append(f"{n_streamed} more sites have streamed tables, for which this is unknown")
    return "\n".join(lines)


def _correlation_title(correlation: BlockCorrelation) -> str:
    lines = [
        "Rank correlation within and between sites",
        f"mean |r| {correlation.mean_within:.2f} within, {correlation.mean_between:.2f} between",
    ]
    flagged = int(correlation.pairs["flagged"].sum())
    if len(correlation.pairs):
        lines.append(
            f"independence in doubt for {flagged} of {len(correlation.pairs)} pairs of sites\n"
            f"dots: |r| > {correlation.threshold:g} in these pairs (adjusted p < {correlation.alpha:g})"
        )
    return "\n".join(lines)


def _remove_frame_and_ticks(ax: Axes) -> None:
    """No frame and no tick marks: the tiles speak."""
    ax.tick_params(which="both", length=0, labelcolor=INK)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _inches(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes."""
    figure = ax.get_figure(root=True)
    box = ax.get_window_extent()
    return (box.width / figure.dpi, box.height / figure.dpi) if figure is not None else (5.0, 5.0)


def _rgb(color: str) -> Array:
    """Red, green and blue of a hexadecimal color, each between 0 and 1."""
    return np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
