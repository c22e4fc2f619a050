"""Shared parts of all plots: colors, axes, titles, ratio scales, and labels that do not overlap.

matplotlib is the optional extra ``plot``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HALO = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
"""Background of text over lines."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
"""Okabe and Ito (2008), distinguishable for readers with any color vision."""
INK, MUTED = "#333333", "#666666"
OPEN = ("top", "right")
"""Spines that a plot over two axes does not need."""
ROWS_ONLY = ("top", "right", "left")
"""Spines that a plot with one row per name does not need."""
NARROW = 5.0
"""Inches below which a color scale is placed below the plot."""
TITLE, SMALL = 10.0, 8.0
"""Font sizes in points of headlines, and of text in and next to a plot."""
LINE = 1.3
"""Height of a line of text, relative to its font size."""
LEAST_LINE = 100.0
"""Least width in points of lines of an axis label."""
LEADER = 11.0
"""Points from the axes to names on their right, for connecting lines."""


def pyplot() -> Any:
    """Return matplotlib's pyplot; an ImportError names the extra if it is not installed."""
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install fedstat[plot]") from error
    return plt


def axes_for(
    ax: Axes | None, width: float, height: float, title: str = "", masked: Sequence[str] = OPEN
) -> Axes:
    """Return the given axes, or those of a new figure (in inches), with a title and without some spines.

    An ImportError names the extra if matplotlib is not installed.
    """
    if ax is None:
        _, ax = pyplot().subplots(figsize=(width, height), layout="constrained")
    if title:
        set_headline(ax, title)
    for side in masked:
        ax.spines[side].set_visible(False)
    return ax


def set_headline(ax: Axes, headline: str, rest: str = "", top: float | None = None) -> None:
    """Write the title of a plot: a headline, and an explanation in small type below.

    Both are wrapped to the present width, so a plot with long labels gets its title last. `top` is the end of
    axes above these, as a share of their height; without it, matplotlib avoids the ticks.
    """
    width = None if _is_short(headline, rest) else _room(ax)
    head, below = _wrapped(headline, TITLE, width), _wrapped(rest, SMALL, width)
    lines = below.count("\n") + 1 if below else 0
    title = ax.set_title(
        *(head, None, "left"),
        y=top,
        pad=5.0 + lines * LINE * SMALL,
        fontsize=TITLE,
        fontweight="bold",
        parse_math=False,
    )
    if below:
        # Below the headline, at its position above the upper ticks.
        ax.annotate(
            *(below, (0.0, 0.0)),
            xycoords=title,
            xytext=(0.0, -2.0),
            textcoords="offset points",
            fontsize=SMALL,
            color=MUTED,
            va="top",
            linespacing=LINE - 0.1,
            parse_math=False,
            annotation_clip=False,
        )


def title_figure(figure: Figure, headline: str) -> None:
    """Write a title over several panels."""
    figure.suptitle(headline, x=0.01, ha="left", fontsize=TITLE, fontweight="bold", parse_math=False)


def _is_short(headline: str, rest: str) -> bool:
    """Return whether both are narrow enough for any plot."""
    return len(headline) <= 20 and max(map(len, rest.split("\n"))) <= 24


def _room(ax: Axes) -> float:
    """Return the points from the left end of the axes to the end of the plot, or to other axes."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    # The tick labels determine where the axes begin.
    figure.draw_without_rendering()
    box, spec = ax.get_window_extent(), ax.get_subplotspec()
    alone = spec is None or spec.colspan.stop == spec.get_gridspec().ncols
    right = figure.bbox.width if alone and len(figure.axes) < 3 else box.x1
    return float((right - box.x0) / figure.dpi * 72.0) - 6.0


def _wrapped(text: str, size: float, width: float | None) -> str:
    """Break lines at spaces if they are wider than `width` points."""
    if width is None:
        return text
    lines = []
    for complete in text.split("\n"):
        line = ""
        for word in (_cut(word, size, width) for word in complete.split(" ")):
            longer = f"{line} {word}" if line else word
            if line and text_width(longer, size) > width:
                lines.append(line)
                line = word
            else:
                line = longer
        lines.append(line)
    return "\n".join(lines)


def _cut(word: str, size: float, width: float) -> str:
    """Shorten a word that is wider than `width` points in its middle."""
    wide = text_width(word, size)
    return word if wide <= width else shorten(word, max(8, int(0.95 * len(word) * width / wide)))


def text_width(text: str, size: float) -> float:
    """Return the width in points of a line of text in bold, which is at least as wide as plain type."""
    from matplotlib.font_manager import FontProperties  # noqa: PLC0415
    from matplotlib.textpath import text_to_path  # noqa: PLC0415

    font = FontProperties(size=size, weight="bold")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def axes_width_inches(ax: Axes) -> float:
    """Return the inches of the figure for the axes with their labels."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    spec = ax.get_subplotspec()
    columns = 1 if spec is None else spec.get_gridspec().ncols / len(spec.colspan)
    return float(figure.get_figwidth()) / columns


def relayout(ax: Axes) -> None:
    """Draw once more without output, so that a layout with moving parts becomes stable."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()


def axes_width_points(ax: Axes) -> float:
    """Return the points from the left to the right end of the axes at present."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    return float(ax.get_window_extent().width / figure.dpi * 72.0)


def axes_height_points(ax: Axes) -> float:
    """Return the points from the lower to the upper end of the axes at present."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    return float(ax.get_window_extent().height / figure.dpi * 72.0)


def shorten(text: str, width: int) -> str:
    """Shorten a text that is longer than `width` in its middle.

    Examples
    --------
    >>> shorten("Market Supervision and Administration Bureau", 20)
    'Market Sup…on Bureau'
    """
    if len(text) <= width:
        return text
    # Names differ at their ends (levels, sites); their middle is least informative.
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def name_width(ax: Axes, share: float, most: int) -> int:
    """Return the characters of small type that fit into a share of the axes' part of the figure."""
    return int(np.clip(share * axes_width_inches(ax) * 72.0 / (0.56 * SMALL), 8, most))


def log_ticks(low: float, high: float, most: int) -> Floats:
    """Return at most `most` round numbers between two positive ones: 1, 2, 5, or powers of ten."""
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    decades = 10.0 ** np.arange(first, last + 1)
    for steps in ((1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = np.sort(np.multiply.outer(decades, steps).ravel())
        ticks = ticks[(ticks >= low * (1 - 1e-9)) & (ticks <= high * (1 + 1e-9))]
        if len(ticks) <= most:
            break
    else:
        ticks = ticks[:: -(-len(ticks) // most)]
    if len(ticks) < 2:  # a range below a factor of 1.5 may contain none: round numbers at equal distances
        unit = 10.0 ** np.floor(np.log10(high - low))
        step = unit * next(size for size in (2.0, 1.0, 0.5, 0.2) if high - low > 3.0 * size * unit)
        ticks = step * np.arange(np.ceil(low / step), np.floor(high / step) + 1.0)
    return np.asarray(ticks)


def label_log_x(ax: Axes, most: int | None = None, at: float | None = None) -> None:
    """Make the horizontal axis logarithmic, between its present ends, with plain numbers at few ticks.

    There is always a tick `at` a value between the ends; ticks whose labels would overlap with it are left
    out.
    """
    ends = ax.get_xlim()
    ax.set_xscale("log")
    ax.set_xlim(*ends)
    wanted = most if most is not None else int(np.clip(1.4 * axes_width_inches(ax), 3, 8))
    ticks = log_ticks(min(ends), max(ends), wanted)
    if at is not None and min(ends) <= at <= max(ends):
        gap = np.log(max(ends) / min(ends)) / (2.0 * wanted)
        ticks = np.array(sorted([at, *(tick for tick in ticks if abs(np.log(tick / at)) > gap)]))
    ax.set_xticks(ticks, [f"{tick:.6g}" for tick in ticks])
    ax.set_xticks([], minor=True)


def few_ticks(ax: Axes) -> None:
    """Keep only as many ticks of the horizontal axis as leave their labels apart."""
    ax.locator_params(axis="x", nbins=int(np.clip(1.5 * axes_width_points(ax) / 72.0, 1, 8)))


def spread(wanted: Floats, gap: float, low: float, high: float) -> Floats:
    """Return positions (n,) at least a gap apart between two ends, as close as possible to the wanted ones.

    Least squares; if they do not fit between the ends, they are spread evenly.
    """
    n = len(wanted)
    if n == 0 or (n - 1) * gap >= high - low:
        return np.asarray(np.linspace(low, high, n)[np.argsort(np.argsort(wanted, kind="stable"))])
    from scipy.optimize import isotonic_regression  # noqa: PLC0415, every partition imports this module

    order, steps = np.argsort(wanted, kind="stable"), gap * np.arange(n)
    # Positions minus their steps must not decrease: an isotonic regression.
    placed = np.clip(isotonic_regression(wanted[order] - steps).x, low, high - steps[-1]) + steps
    found = np.empty(n)
    found[order] = placed
    return found


def label_ends(ax: Axes, heights: Floats, names: Sequence[str], colors: Sequence[str]) -> int:
    """Write names (n,), the most important first, right of the axes, at the ends of lines at some heights.

    Names do not overlap; for ends at one height the first name is on top. A thin line leads to each name. The
    number of names without space is written below. Return how many are written.
    """
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    figure = ax.get_figure(root=True)
    assert figure is not None
    gap = LINE * SMALL / axes_height_points(ax)
    room = max(2, int(1.0 / gap))
    n = len(names) if len(names) <= room else room - 1
    low, high = ax.get_ylim()
    ends = (heights[:n] - low) / (high - low)
    # At most half a line above the axes, because of a title; the lowest line is for the count.
    places = spread(ends[::-1], gap, 0.0 if n == len(names) else gap, 1.0 - gap / 4.0)[::-1]
    right_of_axes = ax.transAxes + ScaledTranslation(LEADER / 72.0, 0.0, figure.dpi_scale_trans)
    style: dict[str, Any] = {"fontsize": SMALL, "va": "center", "annotation_clip": False, "parse_math": False}
    for name, end, place, color in zip(names, ends, places, colors, strict=False):
        ax.annotate(
            *(name, (1.0, end)),
            xycoords="axes fraction",
            xytext=(1.0, place),
            textcoords=right_of_axes,
            color=color,
            arrowprops={
                **{"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6},
                **{"shrinkA": 1.0, "shrinkB": 0.0, "relpos": (0.0, 0.5)},
            },
            **style,
        )
    if n < len(names):
        ax.annotate(f"and {len(names) - n} more", (1.0, 0.0), xycoords=right_of_axes, color=MUTED, **style)
    return n


def label_rows(ax: Axes, positions: Floats, names: Sequence[str]) -> None:
    """Write a name next to each row, from the top down."""
    ax.set_yticks(positions, labels=names, fontsize=SMALL, parse_math=False)
    ax.set_ylim(positions.max(initial=0.0) + 0.7, -0.7)
    ax.tick_params(axis="y", length=0)


def thin_labels(ax: Axes, axis: Literal["x", "y"] = "y", first: int = 0) -> None:
    """Keep as many tick labels as the axes have space for, the last `first` of them before others."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    one = ax.yaxis if axis == "y" else ax.xaxis
    labels, ticks = [text.get_text() for text in one.get_ticklabels()], np.asarray(one.get_ticklocs())
    low, high = sorted(one.get_view_interval())
    box = ax.get_window_extent()
    pixels = (box.height if axis == "y" else box.width) / (high - low)
    gap = LINE * SMALL / 72.0 * figure.dpi / pixels
    kept: list[int] = []
    for row in [*range(len(ticks) - first, len(ticks)), *range(len(ticks) - first)]:
        if all(abs(ticks[row] - ticks[other]) >= gap - 1e-9 for other in kept):
            kept.append(row)
    if len(kept) < len(ticks):
        texts = [label if row in kept else "" for row, label in enumerate(labels)]
        one.set_ticks(ticks, labels=texts, parse_math=False)


def label_x(ax: Axes, text: str) -> None:
    """Set the label of the horizontal axis, in lines not much wider than the axes."""
    ax.set_xlabel(text, parse_math=False)
    if text_width(text, TITLE) > 30.0 * axes_width_inches(ax):
        ax.set_xlabel(_wrapped(text, TITLE, axes_width_points(ax)), parse_math=False)


def label_y(ax: Axes, text: str) -> None:
    """Set the label of the vertical axis, in lines not much longer than the present height of the axes."""
    ax.set_ylabel(text, parse_math=False)
    ax.set_ylabel(_wrapped(text, TITLE, max(1.2 * axes_height_points(ax), LEAST_LINE)), parse_math=False)


def mark_x(ax: Axes, x: float, words: str, *, above: bool = True) -> None:
    """Mark a position on the horizontal axis by a line, with a text next to it inside the axes."""
    ax.axvline(x, color="0.5", linestyle="--", linewidth=1.0, zorder=0)
    wide = max(text_width(line, SMALL) for line in words.split("\n")) / axes_width_points(ax)
    at = float(ax.transAxes.inverted().transform(ax.transData.transform((x, ax.get_ylim()[0])))[0])
    # On the side of the line with more space, up to the end of the axes.
    left = at + 0.03 if at < 0.5 else at - 0.03 - wide
    ax.text(
        *(float(np.clip(left, 0.01, max(0.99 - wide, 0.01))), 0.98 if above else 0.02, words),
        transform=ax.transAxes,
        va="top" if above else "bottom",
        fontsize=SMALL,
        color=INK,
        bbox=HALO,
    )


def legend_below(ax: Axes) -> None:
    """Draw the legend below the label of the horizontal axis, where it hides no line."""
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    figure = ax.get_figure(root=True)
    assert figure is not None
    # In points, so that it stays below the label at any height of the axes.
    place = ax.transAxes + ScaledTranslation(0.0, -40.0 / 72.0, figure.dpi_scale_trans)
    widest = max((text_width(label, SMALL) for label in ax.get_legend_handles_labels()[1]), default=0.0)
    figure.draw_without_rendering()
    spec = ax.get_subplotspec()
    begins = 0 if spec is None else spec.colspan.start
    left = ax.get_window_extent().x0 / figure.dpi * 72.0 - 72.0 * axes_width_inches(ax) * begins
    # Plain type is a twelfth narrower than bold; an axis label may still be added.
    columns = max(1, int((72.0 * axes_width_inches(ax) - max(left + 6.0, 58.0)) / (0.92 * widest + 26.0)))
    options = {"handlelength": 1.2, "columnspacing": 1.2, "borderaxespad": 0.0, "ncols": columns}
    plain_legend(ax, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=place, **options)


def plain_legend(ax: Axes, **options: Any) -> None:
    """Draw a legend without a frame, in small type; dollar signs in names are not formulas."""
    for text in ax.legend(**({"frameon": False, "fontsize": SMALL} | options)).get_texts():
        text.set_parse_math(False)
