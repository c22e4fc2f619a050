"""How many rows sums of products of so many columns want, and what would pass with fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from fedstat.errors import DesignError
from fedstat.models.boost.learning.learners import Learner


def refuse_few_rows(
    where: str, n: int, least: int, learners: Sequence[Learner], columns: int, most: int, folds: int
) -> NoReturn:
    """Raise a DesignError that names what passes: at most so many columns, those of all learners and one."""
    smooth = [one for one in learners if one.smooth]
    fixed = columns - sum(one.knots for one in smooth)
    knots = (most - fixed) // len(smooth) if smooth else -1
    ways = [f"knots={knots} in every bsignal() and bbs()"] if knots >= 0 else []
    ways += ["fewer folds"] if folds > 1 else []
    each = " a fold" if folds > 1 else ""
    raise DesignError(
        f"{where}: {n:,} rows{each} for {columns} columns, those of all learners and one; sums of their "
        f"products are released over {least:,} or more. It would pass with "
        f"{', or '.join([*ways, 'fewer learners'])}"
    )
