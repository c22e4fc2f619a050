"""CurveSums over all sites, by fold, and what follows from them without another round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedstat.typing import Array, Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class CurveMoments:
    """CurveSums by fold of products of columns Z (n, K) and of the response Y (n, G) in its basis, C = Y b.

    `S` is Z'Z, `T` is Z'C, `Q` is C'C, `y` the sum of Y at each point and `yy` the sum of its squares.
    """

    S: Annotated[Floats, "f q q"]
    T: Annotated[Floats, "f q l"]
    Q: Annotated[Floats, "f l l"]
    y: Annotated[Floats, "f g"]
    yy: Annotated[Floats, "f"]

    @classmethod
    def of(cls, sums: Mapping[str, Array]) -> CurveMoments:
        """Unfold the sums that sites release."""
        _, K, k2 = sums["score"].shape
        y = sums["totals"]
        return cls(
            full_matrices(sums["gram"], K),
            sums["score"],
            full_matrices(sums["spread"], k2),
            y[:, :-1],
            y[:, -1],
        )

    @classmethod
    def none(cls) -> CurveMoments:
        """Make a place for sums that are still to be asked for."""
        return cls(*(np.zeros((0,) * ndim) for ndim in (3, 3, 3, 2, 1)))

    @classmethod
    def together(cls, parts: Sequence[CurveMoments]) -> CurveMoments:
        """Add up those of several sites."""
        return cls(*(np.sum([getattr(one, name) for one in parts], axis=0) for name in cls.__slots__))

    @property
    def weighted(self) -> int:
        """Sums of products beside `S` in which rows weigh differently."""
        return 0

    @property
    def folds(self) -> int:
        """Number of folds."""
        return len(self.yy)

    def over(self, folds: Bools) -> CurveSums:
        """Add up over some of the folds, (F,)."""
        one = [part[folds].sum(axis=0) for part in (self.S, self.T, self.Q, self.y, self.yy)]
        return CurveSums(*one)

    @property
    def total(self) -> CurveSums:
        """CurveSums over all folds."""
        return self.over(np.ones(self.folds, dtype=bool))


@dataclass(frozen=True, slots=True, eq=False)
class CurveSums:
    """The same over some rows; the first column of Z is one."""

    S: Floats
    T: Floats
    Q: Floats
    y: Floats
    yy: float

    @property
    def n(self) -> float:
        """Rows."""
        return float(self.S[0, 0])

    @property
    def cells(self) -> float:
        """Points of all curves."""
        return self.n * len(self.y)

    @property
    def mean(self) -> Floats:
        """Mean of the response at each point, (G,)."""
        return self.y / self.n

    def about(self, offset: Floats, basis: Floats) -> CurveSums:
        """Take an offset (G,) from the response; `basis` (G, L) is that at its points."""
        o, t = offset @ basis, self.T[0]
        Q = self.Q - np.outer(o, t) - np.outer(t, o) + self.n * np.outer(o, o)
        yy = float(self.yy) - 2.0 * float(offset @ self.y) + self.n * float(offset @ offset)
        return CurveSums(self.S, self.T - np.outer(self.S[:, 0], o), Q, self.y - self.n * offset, yy)


def full_matrices(upper: Floats, k: int) -> Floats:
    """Symmetric matrices (F, k, k) from their upper triangles."""
    out = np.zeros((len(upper), k, k))
    rows, columns = np.triu_indices(k)
    out[:, rows, columns] = upper
    out[:, columns, rows] = upper
    return out
