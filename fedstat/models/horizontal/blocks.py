"""Public grids on which times are counted."""

from __future__ import annotations

import numpy as np

from fedstat.errors import ModelError, Remedy
from fedstat.models.checks import check_positive
from fedstat.typing import Floats

MOST_POINTS = 1000


def listed_times(name: str, times: object, other: str = "") -> Floats:
    """Return an argument that lists ascending times, (m,); an error names `other` values that it may have."""
    try:
        points = np.array(times, dtype=np.float64)
    except (TypeError, ValueError):
        points = np.zeros(0)
    if points.ndim != 1 or not 1 <= len(points) <= MOST_POINTS or not np.isfinite(points).all():
        raise ModelError(f"{name}: expected {other}up to {MOST_POINTS:,} times")
    if points[0] <= 0.0 or (np.diff(points) <= 0.0).any():
        raise ModelError(f"{name}: expected positive times that ascend")
    return points


def grid_points(grid: object, until: float | None) -> Floats:
    """Return the points of a grid that is given by its width, or by its points."""
    if grid is None:
        raise ModelError(
            "grid: rows are counted on intervals of time that you choose from the unit of time and the "
            "length of the study",
            remedy=Remedy(
                "fit(grid=1, until=60)",
                ": {call} has the ends 1, 2, ..., 60; fit([12, 24, 36]) lists the ends",
            ),
        )
    if isinstance(grid, int | float | np.number) and not isinstance(grid, bool):
        check_positive("grid", grid)
        if until is None:
            raise ModelError(
                "until: a grid of equal widths needs its last time",
                remedy=Remedy("fit(..., until=60)", ", as in fit(grid=3, until=60)"),
            )
        check_positive("until", until)
        if float(grid) > float(until):
            raise ModelError(
                f"grid: the width of an interval, {grid:g}, exceeds the last time, until={until:g}",
                remedy=Remedy(
                    "fit(..., grid={width:.3g}, until={until:g})",
                    "Choose a width of at most a tenth of it, as in {arguments}",
                ).filled(width=float(until) / 20.0, until=until),
            )
        count = int(np.ceil(float(until) / float(grid) - 1e-9))
        if count > MOST_POINTS:
            wider = float(grid) * np.ceil(count / MOST_POINTS)
            raise ModelError(
                f"grid: expected at most {MOST_POINTS:,} points, received {count:,}",
                remedy=Remedy("fit(..., grid={grid:g})", "Use {arguments}, or an earlier last time").filled(
                    grid=wider
                ),
            )
        points: Floats = float(grid) * np.arange(1.0, count + 1.0)
        points[-1] = float(until)
        return points
    points = listed_times("grid", grid, "a width, or ")
    if until is not None:
        raise ModelError(
            "until: the last point of the grid is its end",
            remedy=Remedy("fit(..., until=None)", "leave it out"),
        )
    return points
