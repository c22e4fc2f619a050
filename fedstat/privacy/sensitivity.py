"""Bounded integer rows, whose sums a site releases with noise, and the sensitivity of the sums to one record.

Rows are cut to public bounds and rounded to integers towards zero, which lengthens no row. The sensitivity is
the largest Euclidean change if one entity's record is replaced by any other (entities, and who has a record,
are public). No bound depends on values, and no value is an error: missing ones count as 0, infinite ones are
cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedstat.errors import ModelError
from fedstat.typing import Floats, Ints

PLACES = 10
"""Binary places that values keep by default."""
HUGE = 1e100
"""Where infinite scores are cut before their row is: their squares are finite."""
BLOCK = 2048
"""Rows that are cut at once: they stay in the cache."""
PLACES_LEFT = 30
"""Bits of a row's length, so that squares are whole in 64 bits."""


def clip_rows(
    scores: Floats, squared_radius: Fraction | int, places: int = PLACES, nearest: bool = False
) -> Ints:
    """Cut rows (n, p) to a length whose square is at most `squared_radius`, in units of 2^-places.

    Missing values count as 0. The lengths of the rows that are returned are exact: squares are of integers.
    Numbers are rounded towards zero, or to the `nearest` unit, so that errors of many rows cancel.
    """
    most = math.floor(Fraction(squared_radius) * 4**places)
    if most.bit_length() > 2 * PLACES_LEFT:
        raise ModelError("a radius beyond all use; choose fewer binary places")
    out = np.empty(scores.shape, np.int64)
    for start in range(0, len(scores), BLOCK):
        rows = slice(start, start + BLOCK)
        out[rows] = _cut(scores[rows], math.sqrt(squared_radius), most, places, nearest)
    return out


def _cut(scores: Floats, radius: float, most: int, places: int, nearest: bool) -> Ints:
    X = np.clip(np.nan_to_num(scores, nan=0.0), -HUGE, HUGE)
    lengths = np.sqrt(np.einsum("ij,ij->i", X, X))
    X *= np.minimum(1.0, radius / np.maximum(lengths, 1.0 / HUGE))[:, None]
    scaled = np.ldexp(X, places)
    complete: Ints = (np.rint(scaled) if nearest else np.trunc(scaled)).astype(np.int64)
    # Division and numbers are rounded: a row that is a unit too long is shortened until it is not.
    while (long := np.flatnonzero(np.einsum("ij,ij->i", complete, complete) > most)).size:
        complete[long] -= np.sign(complete[long])
    return complete


@dataclass(frozen=True, slots=True)
class GramSensitivity:
    """Squares of the sensitivities of one Gram matrix above its diagonal, in squares of units.

    Rows of site k are cut to a square length R_k^2, and T = sum R_k^2. Own blocks have noise of one
    share, cross blocks that of two sites. `coordinator` is for a whole record, in units in which one
    share has variance one, T^2/2 + sum R_k^4/2; `sites` for the part of site k against all
    others together, whose noise they know: 4 R_k^2 (T - R_k^2), or T^2 where R_k^2 > T/2.
    """

    coordinator: Fraction
    sites: tuple[Fraction, ...]


def gram_sensitivity(squared_radii: Sequence[Fraction | int]) -> GramSensitivity:
    """Bound what one replaced record changes in the products above the diagonal of all columns.

    ``squared_radii`` are those that :func:`clip_rows` was given, or in its integer units 4^places times
    these; then the result is in units of products of two such integers.
    """
    radii = [Fraction(radius) for radius in squared_radii]
    if not radii or min(radii) <= 0:
        raise ModelError("expected a radius above 0 for every site")
    T = sum(radii, Fraction(0))
    own = tuple(4 * r * (T - r) if 2 * r <= T else T * T for r in radii)
    return GramSensitivity((T * T + sum((r * r for r in radii), Fraction(0))) / 2, own)


def moments_sensitivity(squared_radii: Sequence[Fraction | int]) -> GramSensitivity:
    """Bound the same with squares and sums of all columns besides, in units in which a row has a one more.

    Site k releases the upper triangle of the products of (1, u_k) with noise of one share, and pairs
    of sites their cross blocks with that of two. For rows u and v, p_k = u_k'v_k, p their sum, the
    diagonal of a block changes by no more than all of it, ``R_k^4 + R_k^4 - 2 p_k^2``, so that

        coordinator   T^2/2 + 3/2 sum R_k^4 + 2 T + 2,   the most of -p^2/2 - 2 p being 2;
        site   (2 R_k^2 + 1)^2 / 2 + 4 R_k^2 (T - R_k^2),

    of which the first part is the most of 2 R_k^4 (1 - c^2) + 2 R_k^2 (1 - c), c the cosine, and the second
    counts its products with others by themselves, who may choose their rows after they saw the first.
    """
    radii = [Fraction(radius) for radius in squared_radii]
    if not radii or min(radii) < Fraction(1, 2):
        raise ModelError("expected a squared radius of one half or more for every site")
    T, fourth = sum(radii, Fraction(0)), sum((r * r for r in radii), Fraction(0))
    own = tuple((2 * r + 1) ** 2 / 2 + 4 * r * (T - r) for r in radii)
    return GramSensitivity(T * T / 2 + 3 * fourth / 2 + 2 * T + 2, own)
