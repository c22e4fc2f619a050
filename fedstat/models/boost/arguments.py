"""Arguments of a boosting fit: offsets, folds, losses and the required number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from fedstat.errors import DesignError, ModelError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.formula.parse import Formula, SiteTerms, formula_of_terms
from fedstat.federation.design.formula.terms import parse_term, right_side_of, term_columns, term_text
from fedstat.federation.design.horizontal_design import SiteRowCounts
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.partition.row_tables import common_columns
from fedstat.federation.tables.curves import CurveArray
from fedstat.kernels.curves import overlapping_pairs
from fedstat.models.boost.learning.learners import BoostFormula, Learner
from fedstat.models.boost.learning.losses import EVERY, LossSpec
from fedstat.models.checks import check_choice, check_whole
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# What a model with curves reads of a partition before it asks its sites.


def plain_formula(parsed: BoostFormula, partition: ClientPartition) -> Formula:
    """Read those columns of a formula that are no curves as other models do."""
    terms = [parse_term(text) for text in parsed.terms]
    if not parsed.functional:
        site = partition.site_column
        columns = {"": [name for name in partition.pooled_columns if name != site]}
        return formula_of_terms(parsed.text, parsed.response, terms, columns, pooled=True, extra=(site,))
    terms = list(right_side_of(terms).terms)
    names = tuple(dict.fromkeys(name for term in terms for name in term_columns(term)))
    own = SiteTerms("", tuple(map(term_text, terms)), names)
    return Formula(parsed.text, f"{parsed.response}(t)", None, (), True, (own,))


def published_range(partition: ClientPartition, term: str) -> tuple[float, float] | None:
    """Range of a column that all sites publish: the widest."""
    found = [site.published.get(term) for site in partition.sites.values()]
    ranges = [one.range for one in found if one is not None and one.range is not None]
    if len(ranges) < len(found):
        return None
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def common_curves(partition: ClientPartition) -> dict[str, CurveArray]:
    """Curves that all sites have, as the first has them."""
    names = common_columns(map(tuple, partition.curves.values()))
    first = next(iter(partition.curves.values()), {})
    return {name: first[name] for name in names}


# ----------------------------------------------------------------------------------------------------
# Arguments of a fit that are more than a number or a word.

FOLDS = 10
OFFSETS = ("mean", "smooth")


def given_offset(offset: object, points: Floats, *, functional: bool) -> Floats | None:
    """Offset at the points of the response, (G,), where it is no choice by a word."""
    if isinstance(offset, str):
        check_choice("offset", offset, OFFSETS)
        if offset == "smooth" and not functional:
            raise ModelError("offset: a mean is smoothed along a curve, and the response is a number")
        return None
    G = len(points)
    try:
        values = np.asarray(offset, dtype=float)
    except (TypeError, ValueError):
        values = np.array(np.nan)
    if values.shape not in ((), (G,)) or not np.isfinite(values).all():
        raise ModelError(
            f"offset: expected 'mean', 'smooth', a number, or numbers at the {G} points of the response"
        )
    return np.broadcast_to(values, (G,)).copy()


def check_site_folds(masked: bool | None, n_sites: int, masks_wanted: bool) -> bool:
    """Refuse sites as folds where their sums are to be hidden, or where there is one; say not to mask."""
    if masked or masks_wanted:
        who = "masked=True asks for" if masked else "an owner lets sums leave in no other way than by"
        raise ModelError(
            f"folds: sites are folds by their own sums, which masks hide, and {who} masks; use folds=10"
        )
    if n_sites < 2:
        raise ModelError('folds: "site" needs two sites or more')
    return False


def check_every(every: int | None, loss: LossSpec | None) -> int:
    """Find how many steps there are between two exchanges of scores."""
    if loss is None:
        if every is not None:
            raise ModelError("every: of squares all steps follow from one round; it belongs to other losses")
        return 1
    jumps = loss.entry.bound == 0.0
    if every is None:
        return 1 if jumps else EVERY
    check_whole("every", every, 1)
    if jumps and every > 1:
        raise ModelError(f"every: the slopes of a quantile's loss jump; expected 1, received {every!r}")
    return int(every)


def check_loss(
    loss: LossSpec | None, select: str | None, learners: Sequence[Learner], *, uneven: bool
) -> None:
    """Refuse what follows from sums of products alone."""
    if loss is None:
        return
    if select == "aicc":
        raise ModelError("select: AICc is one of squares; of another loss there is 'cv'")
    along = [one.label for one in learners if one.varying]
    if along:
        raise ModelError(
            f"{loss.title}: {along[0]} varies along the response, of which there are squares only"
        )
    if uneven:
        raise ModelError(
            f"{loss.title}: curves of the response are measured at different points, or lack some, of which "
            "there are squares only. Leave out curves with gaps by Curve(..., max_gap=0), or fill them in"
        )


# ----------------------------------------------------------------------------------------------------
# How many rows sums of products of so many columns want, and what would pass with fewer.


@dataclass(frozen=True, slots=True)
class SumsSize:
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
    return len(overlapping_pairs(time.knots + time.degree + 1, time.degree)[0])


def check_size(
    asked: SumsSize,
    sites: Sequence[SiteRowCounts],
    policies: Mapping[str, Policy],
    weighed: Sequence[str],
    *,
    masked: bool,
) -> None:
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
