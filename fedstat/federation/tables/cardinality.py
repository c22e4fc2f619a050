"""Group sizes above which sums do not determine columns with few distinct values.

A column of L levels has log2(L) bits per entity. A product sum over n entities has at most the bits of its
digits, or, for two columns with levels, those of a table of counts. An attacker who knows all other columns
searches for the values of one column that give the sums: if the sums have more bits than the values, the
answer is unique. The check uses published facts (levels) and the request (groups), never the rows.

Fits that combine new columns with the same column over the same groups add to these bits. A site therefore
remembers the other sites' columns with which its own were multiplied over each group, by marks of their
content (:func:`column_fingerprints`), and checks all of them together.

What remains: functions and interactions of the site's own columns are counted for one fit, and who marks its
columns falsely is not found out; an owner who expects many analyses asks to approve each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import numpy as np

from fedstat.codec import Minimum
from fedstat.typing import Floats, Ints

EXACT = 53.0
"""Bits of information in one exact sum: those of the mantissa of a double."""
DITHERED = 10.0
"""Bits of information in one sum of a dithered column: 8.4, rounded up; see
:data:`fedstat.models.vertical.exchange.standardized_columns.WIDTH`."""


@dataclass(frozen=True, slots=True)
class DiscreteColumn:
    """A column of few values: how many, and the design columns made of it, of it `alone` or with others."""

    levels: Annotated[int, Minimum(2)]
    columns: Annotated[int, Minimum(1)]
    alone: bool


@dataclass(frozen=True, slots=True)
class ColumnCardinality:
    """Design columns of a site that come from columns with few values, and the `plain` others.

    `carried` are the bits of a sum of products about one of its columns.
    """

    plain: Annotated[int, Minimum(0)] = 0
    leveled: tuple[DiscreteColumn, ...] = ()
    carried: Annotated[float, Minimum(1)] = EXACT


COLUMN_MARK, DIGITS = 8, 6
"""Bytes of a mark of a column's content, and digits of a standardized column that it is of."""


def column_fingerprints(X: Floats, group: Ints, secret: bytes) -> bytes:
    """Mark the columns, (n, p), within each group of rows, (n,): (groups, p, 8) bytes.

    The mark is that of the column in whatever units, and of the opposite sign; who has not the secret cannot
    try contents.
    """
    marks = []
    for g in np.unique(group):
        part = X[group == g]
        scale = part.std(axis=0)
        Z = np.round((part - part.mean(axis=0)) / np.where(scale > 0.0, scale, 1.0), DIGITS) + 0.0
        for z in Z.T:
            first = z[np.flatnonzero(z)[:1]]
            turned = np.ascontiguousarray(-z if len(first) and first[0] < 0.0 else z) + 0.0
            marks.append(hashlib.blake2b(turned.tobytes(), digest_size=COLUMN_MARK, key=secret).digest())
    return b"".join(marks)


PLAIN = ColumnCardinality()
"""No columns of few values that anybody has judged."""


@cache
def min_group_size(details: tuple[ColumnCardinality, ...], times: int = 1) -> int:
    """Fewest entities of a group over which all these columns are multiplied with one another."""
    plain = sum(detail.plain for detail in details)
    unknown = [(one, detail.carried) for detail in details for one in detail.leveled]
    least = 0
    for place, (one, carried) in enumerate(unknown):
        others = [other for at, (other, _) in enumerate(unknown) if at != place]
        least = max(least, _fewest(one, carried, plain, others, times))
    return least


def _fewest(
    one: DiscreteColumn, carried: float, plain: int, others: Sequence[DiscreteColumn], times: int
) -> int:
    """Fewest entities whose values of one column have more bits than the sums reveal."""
    own, n = math.log2(one.levels), 1
    while True:
        count = math.log2(n + 1)
        reported = (one.levels - 1) * count + one.columns * plain * carried
        for other in others:
            digits = one.columns * other.columns * carried
            # A sum of two columns with levels is a count, in addition to the sums of each.
            table = (one.levels - 1) * (other.levels - 1) * count
            reported += min(digits, table) if one.alone and other.alone else digits
        enough = math.floor(times * reported / own) + 1
        if enough <= n:
            return n
        n = enough
