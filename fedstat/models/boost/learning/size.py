"""How many rows sums of products of so many columns want, and what would pass with fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from fedstat.errors import DesignError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.by_rows import SiteRows
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.tables.curves.array import CurveArray
from fedstat.kernels.boosting.banded import overlapping
from fedstat.models.boost.learning.learners import Learner


@dataclass(frozen=True, slots=True)
class SizeAsked:
    """Columns of all learners and one, folds, learners; the basis along a response of uneven points.

    `slopes` of these columns are those of a loss that is no square, at all exchanges.
    """

    columns: int
    folds: int
    learners: Sequence[Learner]
    time: Learner | None = None
    slopes: int = 0


def check_points(learners: Sequence[Learner], curves: Mapping[str, Mapping[str, CurveArray]]) -> None:
    """Require as many points of a curve, at every site, as a learner has splines along it."""
    for one in learners:
        k = one.knots + one.degree + 1
        found = {site: held[one.of] for site, held in curves.items() if one.of_curve and one.of in held}
        for site, curve in found.items():
            m = len(curve.grid)
            if m < k and not curve.own:
                fewer = m - one.degree - 1
                way = f"give knots={fewer} or fewer" if fewer >= 0 else "give a lower degree and knots=0"
                raise DesignError(
                    f"{site}: curve '{one.of}' has {m} points, and {one.label} {k} splines along it, which "
                    f"these cannot tell apart; {way}, or leave the site out"
                )


def bands(time: Learner) -> int:
    """Pairs of splines along the response that overlap."""
    return len(overlapping(time.knots + time.degree + 1, time.degree)[0])


def check_size(
    asked: SizeAsked, sites: Sequence[SiteRows], policies: Mapping[str, Policy], weighed: Sequence[str], *,
    masked: bool,
) -> None:  # fmt: skip
    """Require rows for the columns of all learners, by fold, as the owners do; name what passes.

    Sites in `weighed` have curves of the response that weigh differently; a strict owner then counts columns
    as often as there are weighted sums.
    """
    rows = {row.site: row.n // asked.folds for row in sites}
    allowed = {name: policy.max_parameters for name, policy in policies.items()}
    times = dict.fromkeys(allowed, 1)
    for name in weighed:
        if asked.time is not None and policies[name].max_share < 1.0:
            times[name] = 1 + bands(asked.time)
            allowed[name] /= times[name]
    if masked and hides(len(rows)) and asked.time is None:
        together = " and ".join(rows)
        rows, allowed = {together: sum(rows.values())}, {together: min(allowed.values())}
    short = [name for name, n in rows.items() if asked.columns > allowed[name] * n]
    if short:
        first, columns = short[0], asked.columns
        most = min(int(allowed[name] * rows[name]) for name in short)
        least = int(np.ceil(columns / allowed[first]))
        n, often = rows[first], times.get(first, 1)
        refuse_few_rows(first, n, least, asked.learners, columns, most, asked.folds, often, asked.slopes)


def refuse_few_rows(
    where: str, n: int, least: int, learners: Sequence[Learner], columns: int, most: int, folds: int,
    times: int = 1, slopes: int = 0,
) -> NoReturn:  # fmt: skip
    """Raise a DesignError that names what passes: at most so many columns, those of all learners and one.

    Products are summed so many `times`, with different weights. Of the columns `slopes` are those of a loss.
    """
    smooth = [one for one in learners if one.smooth]
    fixed = columns - sum(one.knots for one in smooth)
    knots = (most - fixed) // len(smooth) if smooth else -1
    ways = [f"knots={knots} in every bsignal() and bbs()"] if knots >= 0 else []
    ways += ["fewer folds"] if folds > 1 else []
    ways += ["fewer exchanges of scores (steps, every=, folds)"] if slopes else []
    and_more = f"slopes of the loss at all exchanges, {slopes:,}" if slopes else "one"
    each, what = " a fold" if folds > 1 else "", "sums of their products are"
    if times > 1:
        ways += ["fewer knots in time=...", "Curve(..., max_gap=0), which leaves uneven curves out"]
        what = (
            f"curves of the response with missing points, or points of their own, take {times} weighted sums "
            "of their products,"
        )
    raise DesignError(
        f"{where}: {n:,} rows{each} for {columns} columns, those of all learners and {and_more}; {what} "
        f"released over {least:,} or more. It would pass with {', or '.join([*ways, 'fewer learners'])}"
    )
