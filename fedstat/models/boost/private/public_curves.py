"""Public descriptions of curves: mean, basis functions, and variation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.federation.tables.curves import curves_of
from fedstat.kernels.curves import integration_weights, integration_weights_observed
from fedstat.models.copula.margins import MOST_DEPTH, Bins
from fedstat.typing import Bools, Floats

MOST_FUNCTIONS = 50


@dataclass(frozen=True, slots=True)
class PublicCurve:
    """Public description of a curve, which replaces estimates from the rows in a private fit.

    A curve counts as its mean plus a few functions times scores. All three must come from public sources,
    such as a published study: they are sent to the sites unprotected.

    Parameters
    ----------
    grid : sequence of float, (m,)
        Points, ascending; sites interpolate to their own points.
    mean : sequence of float, (m,)
    functions : sequence of sequences of float, (q, m)
        Orthonormal functions: the integral of a curve minus the mean, times one of them, is a score.
    deviations : sequence of float, (q,)
        Approximate standard deviation of each score. Scores are divided by it, and rows are cut to 1.1 times
        the expected length.

    Raises
    ------
    ModelError
        Shapes do not match, points do not ascend, or a deviation is not positive.

    Examples
    --------
    >>> import fedstat as fs, numpy as np
    >>> t = np.linspace(0, 1, 21)
    >>> public = fs.PublicCurve(t, np.zeros(21), [np.ones(21), np.sqrt(2) * np.cos(np.pi * t)], [1.0, 0.5])
    >>> public
    <PublicCurve: 2 functions on 21 points of 0 to 1>
    >>> mean, functions = public.on([0.25, 0.5])
    >>> mean, functions.shape
    (array([0., 0.]), (2, 2))
    """

    grid: tuple[float, ...]
    mean: tuple[float, ...]
    functions: tuple[tuple[float, ...], ...]
    deviations: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("grid", "mean", "deviations"):
            object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))
        object.__setattr__(self, "functions", tuple(tuple(map(float, f)) for f in self.functions))
        self.check()

    def check(self) -> None:
        """Require functions on ascending points, and a deviation for each.

        Examples
        --------
        >>> import fedstat as fs
        >>> fs.PublicCurve([0.0, 1.0], [0.0, 0.0], [[1.0, 1.0]], [1.0]).check()
        """
        m, q = len(self.grid), len(self.functions)
        shaped = (
            len(self.mean) == m and all(len(f) == m for f in self.functions) and len(self.deviations) == q
        )
        if not shaped or not 1 <= q <= MOST_FUNCTIONS or m < 2:
            raise ModelError(
                f"PublicCurve: expected a mean and 1 to {MOST_FUNCTIONS} functions on the points of the "
                f"grid, with a deviation each; received {m} points, a mean of {len(self.mean)}, functions "
                f"of {[len(f) for f in self.functions]}, {len(self.deviations)} deviations"
            )
        numbers = np.concatenate([self.grid, self.mean, *self.functions, self.deviations])
        if not np.isfinite(numbers).all() or np.any(np.diff(self.grid) <= 0.0) or min(self.deviations) <= 0.0:
            raise ModelError("PublicCurve: expected finite numbers, ascending points, deviations above 0")

    @classmethod
    def of_reference(cls, curves: pd.DataFrame | Floats, grid: Sequence[float], components: int = 2) -> Self:
        """Estimate mean, principal components and deviations from public curves.

        Parameters
        ----------
        curves : (n, m) array or DataFrame
            Curves of a published study; not of the sites' own entities.
        grid : sequence of float, (m,)
        components : int

        Raises
        ------
        ModelError
            There are fewer curves than components, or values are missing.

        Examples
        --------
        >>> import fedstat as fs, numpy as np
        >>> t = np.linspace(0, 1, 21)
        >>> curves = np.random.default_rng(0).normal(size=(50, 1)) * np.sin(np.pi * t) + np.ones(21)
        >>> fs.PublicCurve.of_reference(curves, t, components=1)
        <PublicCurve: 1 functions on 21 points of 0 to 1>
        """
        X, s = np.asarray(curves, dtype=np.float64), np.asarray(grid, dtype=np.float64)
        if X.ndim != 2 or X.shape[1] != len(s) or len(X) <= components or not np.isfinite(X).all():
            raise ModelError(
                f"PublicCurve: expected more than {components} complete curves on {len(s)} points, received "
                f"{X.shape}"
            )
        weights, mean = integration_weights(s), X.mean(axis=0)
        root = np.sqrt(weights)
        _, size, V = np.linalg.svd((X - mean) * root, full_matrices=False)
        turned = V[:components] / root
        return cls(
            tuple(s), tuple(mean), tuple(map(tuple, turned)), tuple(size[:components] / np.sqrt(len(X)))
        )

    def on(self, s: Floats) -> tuple[Floats, Floats]:
        """Interpolate to other points.

        Parameters
        ----------
        s : (G,) array

        Returns
        -------
        (G,) array, (q, G) array
            Mean and functions.
        """
        return np.interp(s, self.grid, self.mean), np.array(
            [np.interp(s, self.grid, f) for f in self.functions]
        )

    def __repr__(self) -> str:
        ends = f"{self.grid[0]:g} to {self.grid[-1]:g}"
        return (
            f"<{type(self).__name__}: {len(self.functions)} functions on {len(self.grid)} points of {ends}>"
        )


@dataclass(frozen=True, slots=True)
class PublicPart:
    """A column of a table with its public description: a curve, or bins of its range or levels."""

    name: str
    curve: PublicCurve | None
    bins: Bins | None

    def check(self) -> None:
        """Require one of the two."""
        if (self.curve is None) == (self.bins is None):
            raise ModelError(
                f"column '{self.name}': expected the public description of a curve or of a column"
            )

    @property
    def width(self) -> int:
        """Number of scores: a curve has one per function, a range one, levels one less than their number."""
        if self.curve is not None:
            return len(self.curve.functions)
        return max(len(self.bins.levels) - 1, 1) if self.bins is not None else 0

    def missing(self, column: pd.Series) -> Bools:
        """Return which rows lack it, including curves with a long gap."""
        lacking = column.isna().to_numpy(dtype=np.bool_)
        return lacking | curves_of(column).gappy() if self.curve is not None else lacking

    def scores(self, column: pd.Series) -> Floats:
        """Return scores of every row, (n, width), with about mean 0 and variance 1.

        0 if that is impossible.
        """
        if self.curve is not None:
            curves = curves_of(column)
            mean, functions = self.curve.on(curves.grid)
            about = np.where(np.isfinite(curves.values), curves.values, np.nan) - mean
            if np.isnan(about).any():
                weighed = np.nan_to_num(about) * integration_weights_observed(curves.grid, about)
            else:
                weighed = about * integration_weights(curves.grid)
            return np.asarray(weighed @ functions.T / np.array(self.curve.deviations))
        assert self.bins is not None
        code, count = self.bins.code(column), self.bins.count
        if not self.bins.levels:
            # The position of a value in its range, scaled as for evenly spread values.
            return np.where(code < 0, 0.0, np.sqrt(12.0) * ((code + 0.5) / count - 0.5))[:, None]
        share = 1.0 / count
        held = (code[:, None] == np.arange(1, count)) - share
        return np.where(code[:, None] < 0, 0.0, held / np.sqrt(share * (1.0 - share)))


DEPTH = MOST_DEPTH
"""Depth of the bins of a range: as fine as possible, since they are not counted."""
