"""Public grids on which times are counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.errors import ModelError, Remedy
from fedstat.federation.design.spline_knots import round_step
from fedstat.models.checks import check_positive
from fedstat.typing import Floats

MOST_POINTS = 1000
FEWEST_UNITS = 20.0
"""Shortest study, in units of time, on whose units rows are counted if no width is given."""
PROPOSED_POINTS = 100.0
"""Fewest points of another proposed grid: with a round width it has up to two and a half times as many."""


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


@dataclass(frozen=True, slots=True, eq=False)
class TimeGrid:
    """The grid of an analyst: its points, or what is given of width and last time; the rest is proposed."""

    points: Floats | None = None
    width: float | None = None
    until: float | None = None

    @classmethod
    def of(cls, grid: object, until: float | None) -> TimeGrid:
        """Check the arguments; errors as of :func:`grid_points`."""
        width = isinstance(grid, int | float | np.number) and not isinstance(grid, bool)
        if grid is not None and not (width and until is None):
            return cls(grid_points(grid, until))
        for name, value in (("grid", grid), ("until", until)):
            if value is not None:
                check_positive(name, value)
        return cls(None, None if grid is None else float(grid), until)  # type: ignore[arg-type]

    def ending(self, until: float) -> Floats:
        """Return the points up to a last time.

        Without a width it is one, since times are mostly whole numbers of a unit, or else a round number.
        """
        whole = FEWEST_UNITS <= until <= MOST_POINTS
        return grid_points(self.width or (1.0 if whole else round_step(until / PROPOSED_POINTS)), until)


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
