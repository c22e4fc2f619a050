"""Moments by missing pattern: the only data that the likelihood of VFEM needs.

A pattern g states which columns an entity has. For its n_g entities, the likelihood needs only the Gram
matrix of (1, x, y), the sum of (1, x, y)(1, x, y)' with zeros at the missing columns. The columns are
standardized by a center and a scale that all patterns share, so that the sums keep their digits. Columns of
one site that are missing together, in every pattern, are a unit. If no entity has only a part of a site's
block, the whole block is one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.tables.columns import number_units
from fedstat.typing import Bools, Floats, Ints

FLAT = 1e-10
"""Share of a column's mean square below which its variance counts as zero."""
COLLINEAR = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class PatternMoments:
    """Gram matrices of (1, x, y) by missing pattern, of K sites with `sizes` columns each, P in all.

    `seen` (G, P) states which columns the n (G,) entities of a pattern have. `grams` (G, P + 2, P + 2) are
    sums of (1, x, y)(1, x, y)' of the columns minus `center`, divided by `scale`, (P + 1,) in the units of
    the data with the response last; they are zero where x is missing. Raises ModelError if shapes do not fit
    together, a scale is not positive, or a sum is not finite. `shape` (P,), if known, is the mean of z |z| of
    each column over the entities that have it, z its deviation from their mean in standard deviations; or
    nan. `response_shape` has that of the response, and its mean of |z|.
    """

    sites: tuple[str, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    seen: Bools
    n: Floats
    grams: Floats
    center: Floats
    scale: Floats
    shape: Floats | None = None
    response_shape: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        P, K, G = sum(self.sizes), len(self.sizes), len(self.n)
        expected = {
            "sites": (len(self.sites), K),
            "names": (len(self.names), P),
            "seen": (self.seen.shape, (G, P)),
            "grams": (self.grams.shape, (G, P + 2, P + 2)),
            "center": (self.center.shape, (P + 1,)),
            "scale": (self.scale.shape, (P + 1,)),
        }
        for name, (received, wanted) in expected.items():
            if received != wanted:
                raise ModelError(f"pattern moments: expected {name} of {wanted}, received {received}")
        if not (np.isfinite(self.scale).all() and (self.scale > 0.0).all()):
            raise ModelError("pattern moments: every scale must be positive and finite")
        if not (np.isfinite(self.grams).all() and np.allclose(self.grams[:, 0, 0], self.n, rtol=1e-6)):
            raise ModelError(
                "pattern moments: every sum must be finite, and the first must be the entity count"
            )

    def deviations(self) -> Floats:
        """Return the standard deviation of each column over the entities that have it, (P,)."""
        P = sum(self.sizes)
        first = self.grams[:, 0, 1 : P + 1].sum(axis=0)
        second = np.diagonal(self.grams, axis1=1, axis2=2)[:, 1 : P + 1].sum(axis=0)
        n = np.maximum(self.n @ self.seen, 1.0)
        return np.asarray(self.scale[:P] * np.sqrt(np.maximum(second / n - (first / n) ** 2, 0.0)))

    # ---- records -----------------------------------------------------------------------------

    @property
    def nobs(self) -> float:
        """Number of entities."""
        return float(self.n.sum())

    @property
    def owner(self) -> Ints:
        """Number of the site of each column, (P,)."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def unit(self) -> Ints:
        """Number of the unit of each column, (P,), in order of their first columns."""
        return number_units(self.seen, self.owner)

    @property
    def units(self) -> list[Ints]:
        """Columns of each of U units."""
        unit = self.unit
        return [np.flatnonzero(unit == u) for u in range(int(unit.max()) + 1)]

    @property
    def complete(self) -> bool:
        """Whether every entity has all columns of a site or none."""
        return len(self.units) == len(self.sizes)

    @property
    def patterns(self) -> Bools:
        """Which units are seen in each pattern, (G, U)."""
        return self.seen[:, [columns[0] for columns in self.units]]

    @property
    def n_seen(self) -> Floats:
        """Entities that have each unit, (U,)."""
        return np.asarray(self.n @ self.patterns, dtype=np.float64)

    @property
    def n_complete(self) -> int:
        """Entities that have every column."""
        return int(self.n[self.seen.all(axis=1)].sum())

    @property
    def unit_names(self) -> list[str]:
        """Name each unit for messages: the site, and its columns where these are not all of them."""
        owner, units = self.owner, self.units
        parts = np.bincount(owner[[columns[0] for columns in units]])
        out = []
        for columns in units:
            k = int(owner[columns[0]])
            listed = ", ".join(self.names[c] for c in columns)
            out.append(f"'{self.sites[k]}'" + (f" ({listed})" if parts[k] > 1 else ""))
        return out

    def places(self, site: int) -> slice:
        """Return the indices of a site's columns among the P."""
        start = sum(self.sizes[:site])
        return slice(start, start + self.sizes[site])

    @property
    def response_moments(self) -> Floats:
        """Mean and variance of the response, in the units of the data."""
        total = self.grams[:, [0, -1], -1].sum(axis=0)
        mean = total[0] / self.nobs
        variance = total[1] / self.nobs - mean**2
        return np.array([self.center[-1] + self.scale[-1] * mean, self.scale[-1] ** 2 * variance])

    # ---- transformations of the data ---------------------------------------------------------

    def standardized(self) -> PatternMoments:
        """Center every column at the mean of the entities that have it, and give it unit variance.

        Raises EstimationError if a site has fewer than two entities, or a column is constant.
        """
        total = self.grams.sum(axis=0)
        count = np.append(self.n_seen[self.unit], self.nobs)
        self._check_counts()
        mean = total[0, 1:] / count
        square = np.diag(total)[1:] / count
        variance = square - mean**2
        self._check_spread(variance <= FLAT * square)
        # Sums of (x - m)(x - m)' from those of x and xx', pattern by pattern; missing columns stay zero.
        move = np.where(np.column_stack([self.seen, np.ones(len(self.n))]), mean, 0.0)
        first = self.grams[:, 0, 1:]
        inner = self.grams[:, 1:, 1:] - first[:, :, None] * move[:, None, :]
        inner -= move[:, :, None] * (first - self.n[:, None] * move)[:, None, :]
        root = np.sqrt(variance)
        grams = np.empty_like(self.grams)
        grams[:, 0, 0] = self.n
        grams[:, 0, 1:] = grams[:, 1:, 0] = (first - self.n[:, None] * move) / root
        grams[:, 1:, 1:] = inner / np.outer(root, root)
        return replace(self, grams=grams, center=self.center + self.scale * mean, scale=self.scale * root)

    def _check_counts(self) -> None:
        for columns, count in zip(self.units, self.n_seen, strict=True):
            if count < 2:
                site = self.sites[self.owner[columns[0]]]
                what = "its block" if self.complete else ", ".join(self.names[c] for c in columns)
                raise EstimationError(
                    f"{site}: {int(count)} of the entities of this fit have {what}; at least two are needed"
                )

    def _check_spread(self, flat: Bools) -> None:
        if flat[-1]:
            raise EstimationError("the response is constant among the entities of this fit")
        for columns, count in zip(self.units, self.n_seen, strict=True):
            names = [self.names[c] for c in columns if flat[c]]
            if names:
                raise EstimationError(
                    f"{self.sites[self.owner[columns[0]]]}: constant among the {int(count)} entities of "
                    f"this fit: {', '.join(names)}; drop them"
                )

    def together(self, pattern: Ints, seen: Bools) -> PatternMoments:
        """Add up the groups of each pattern: `pattern` of each group, `seen` (G, P) of each pattern."""
        n, grams = np.zeros(len(seen)), np.zeros((len(seen), *self.grams.shape[1:]))
        np.add.at(n, pattern, self.n)
        np.add.at(grams, pattern, self.grams)
        return replace(self, seen=seen, n=n, grams=grams)

    def submodel(self, columns: Sequence[str], *, by_group: bool = False) -> PatternMoments:
        """Keep these columns, in any order: the moments of any nested formula.

        With `by_group`, groups of entities stay apart if their patterns become equal.

        The recorded entities stay the same; a site without any of the columns is removed. Raises ModelError
        if a name does not exist, or no column is named.
        """
        if not columns:
            raise ModelError("submodel: at least one column is needed")
        unknown = [repr(name) for name in columns if name not in self.names]
        if unknown:
            raise ModelError(f"submodel: no column {', '.join(unknown)}; there are {', '.join(self.names)}")
        keep = np.isin(np.array(self.names), np.array(columns))
        sizes = np.bincount(self.owner[keep], minlength=len(self.sizes))
        stay = sizes > 0
        places = np.flatnonzero(np.concatenate([[True], keep, [True]]))
        # Patterns that differed only by removed columns are now one.
        seen, code = np.unique(self.seen[:, keep], axis=0, return_inverse=True)
        if by_group:
            seen, code = self.seen[:, keep], np.arange(len(self.n))
        n, grams = np.zeros(len(seen)), np.zeros((len(seen), len(places), len(places)))
        np.add.at(n, code.ravel(), self.n)
        np.add.at(grams, code.ravel(), self.grams[:, places[:, None], places])
        return PatternMoments(
            sites=tuple(c for c, here in zip(self.sites, stay, strict=True) if here),
            sizes=tuple(sizes[stay].tolist()),
            names=tuple(c for c, here in zip(self.names, keep, strict=True) if here),
            seen=seen,
            n=n,
            grams=grams,
            center=np.append(self.center[:-1][keep], self.center[-1]),
            scale=np.append(self.scale[:-1][keep], self.scale[-1]),
            shape=None if self.shape is None else self.shape[keep],
        )


def number_patterns(missing: Bools) -> tuple[Ints, Ints, Floats]:
    """Find the distinct rows of a Boolean table: the first of each (G,) and their number (G,).

    The second return value is the pattern of every row, (n,).
    """
    # Thirty sites at a time, renumbered each time: a pattern of any number of sites fits a word.
    word = np.zeros(len(missing), dtype=np.int64)
    for start in range(0, missing.shape[1], 30):
        part = missing[:, start : start + 30]
        bits = part @ (1 << np.arange(part.shape[1]))
        _, word = np.unique((word << 30) + bits, return_inverse=True)
    _, first, code, counts = np.unique(word, return_index=True, return_inverse=True, return_counts=True)
    return first, code.astype(np.int64), counts.astype(float)


class StandardizedMoments:
    """Standardized moments, with quantities of the likelihood that are computed once.

    They are given in any units. Raises EstimationError if a site has fewer than two entities, or its columns
    are constant or collinear.
    """

    def __init__(self, moments: PatternMoments) -> None:
        self.moments = moments.standardized()
        self.missing: Floats = (~self.moments.patterns).astype(float)
        owner = self.moments.owner
        self.member: Floats = (owner[:, None] == np.arange(len(moments.sizes))).astype(float)
        self.within: Floats = self.member @ self.member.T
        self.n_seen: Floats = self.moments.n_seen
        self.count: Floats = self.n_seen[self.moments.unit]
        total = self.moments.grams[:, 1:-1, 1:-1].sum(axis=0)
        # For columns that different entities have, use the geometric mean of both counts: positive
        # semi-definite.
        self.S: Floats = total * self.within / np.sqrt(np.outer(self.count, self.count))
        self._check_rank()
        self.precision: Floats = np.linalg.inv(self.S) * self.within

    @property
    def P(self) -> int:  # noqa: N802
        """Columns."""
        return len(self.member)

    def _check_rank(self) -> None:
        for k, site in enumerate(self.moments.sites):
            here = self.moments.places(k)
            values, vectors = np.linalg.eigh(self.S[here, here])
            if values[0] < COLLINEAR * values[-1]:
                loading = zip(self.moments.names[here], vectors[:, 0], strict=True)
                names = ", ".join(c for c, v in loading if abs(v) > 1e-4)
                raise EstimationError(
                    f"{site}: collinear among the {int(self.count[here].min())} entities of this fit: "
                    f"{names}; drop one of them"
                )
