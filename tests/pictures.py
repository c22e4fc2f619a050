"""Look at a picture as a reader does: which texts lie on each other, and which leave the page."""

from __future__ import annotations

from itertools import combinations

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.axis import Axis
from matplotlib.text import Annotation, Text

mpl.use("Agg")
JOURNAL = (3.5, 7.0)
"""Widths in inches of one and of two columns of a page."""
WIDTHS = (3.5, pytest.param(7.0, marks=pytest.mark.slow))
"""Of tests of one picture each: what fits one column nearly always fits two."""


def texts(figure):
    """Every text that is seen, with its box in pixels, and whether it is slanted."""
    figure.draw_without_rendering()
    hidden, found = _hidden(figure), []
    for text in figure.findobj(lambda one: isinstance(one, Text)):
        if not text.get_text().strip() or not text.get_visible():
            continue
        # Only the text of an annotation, without the line that leads to it.
        own = Text if isinstance(text, Annotation) else type(text)
        box = own.get_window_extent(text)
        if box.width > 0.0 and text not in hidden:
            found.append((text.get_text(), box, text.get_rotation() % 90.0 != 0.0))
    return found


def _hidden(figure):
    """Labels of ticks that no axis shows: they are kept for other limits."""
    found = []
    for axis in figure.findobj(Axis):
        ticks, seen = [*axis.majorTicks, *axis.minorTicks], axis.axes.axison and axis.axes.get_visible()
        shown = axis._update_ticks() if seen else []
        found += [label for tick in ticks if tick not in shown for label in (tick.label1, tick.label2)]
    return found


def faults(figure):
    """Pairs of texts that lie on each other, and texts that leave the page (by more than a pixel)."""
    seen = texts(figure)
    page = figure.bbox
    found = [
        (a, b)
        for (a, one, aslant), (b, other, too) in combinations(seen, 2)
        # Boxes of parallel slanted texts overlap where the texts do not.
        if not (aslant and too)
        and min(one.x1, other.x1) - max(one.x0, other.x0) > 1.0
        and min(one.y1, other.y1) - max(one.y0, other.y0) > 1.0
    ]
    return found + [
        (text, "leaves the page")
        for text, box, _ in seen
        if box.x0 < -1.0 or box.x1 > page.x1 + 1.0 or box.y0 < -1.0 or box.y1 > page.y1 + 1.0
    ]


def moves(figure):
    """Pixels by which axes still move after four drawings: parts that push each other never come to rest."""
    places = []
    for _ in range(5):
        figure.draw_without_rendering()
        places.append([ax.get_window_extent().bounds for ax in figure.axes])
    return max(
        abs(a - b) for one, other in zip(*places[-2:], strict=True) for a, b in zip(one, other, strict=True)
    )


def page(width, height):
    """Axes of a figure as wide as a column."""
    return plt.subplots(figsize=(width, height), layout="constrained")[1]
