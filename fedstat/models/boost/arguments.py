"""Arguments of a boosting fit: offsets, folds, losses and the required number of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from fedstat.errors import DesignError, ModelError, Remedy
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
from fedstat.models.checks import check_choice, check_integer
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Facts that a model with curves reads from a partition before it sends requests to its sites.


def plain_formula(parsed: BoostFormula, partition: ClientPartition) -> Formula:
    """Read the columns of a formula that are not curves in the same way as other models."""
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
    """Widest range of a column that all sites publish."""
    found = [site.published.get(term) for site in partition.sites.values()]
    ranges = [one.range for one in found if one is not None and one.range is not None]
    if len(ranges) < len(found):
        return None
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def common_curves(partition: ClientPartition) -> dict[str, CurveArray]:
    """Curves that all sites have, as described by the first site."""
    names = common_columns(map(tuple, partition.curves.values()))
    first = next(iter(partition.curves.values()), {})
    return {name: first[name] for name in names}


# ----------------------------------------------------------------------------------------------------
# Arguments of a fit that are not a plain number or word.

FOLDS = 10
OFFSETS = ("mean", "smooth")


def given_offset(offset: object, points: Floats, *, functional: bool) -> Floats | None:
    """Return the offset at the points of the response, (G,), unless it is chosen by a word."""
    if isinstance(offset, str):
        check_choice("offset", offset, OFFSETS)
        if offset == "smooth" and not functional:
            raise ModelError("offset: 'smooth' needs a response curve, but the response is a number")
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


PERSON = re.compile(
    r"(?:.*[_. ])?(?:id|pid|subject|person|(?:subject|person|patient|participant)[_. ]?(?:id|no|nr))", re.I
)
"""What columns are called that name persons."""


def split_folds(folds: Any) -> tuple[Any, str]:
    """Return the number of folds, "site" or None, and the column whose rows are in one fold, or ""."""
    if isinstance(folds, tuple):
        if len(folds) != 2 or not isinstance(folds[0], str):
            raise ModelError(
                f"folds: expected a column and a number such as ('subject', 5), received {folds!r}"
            )
        return folds[1], folds[0]
    return (FOLDS, folds) if isinstance(folds, str) and folds != "site" else (folds, "")


def looks_like_person(columns: Sequence[str]) -> str:
    """Return the first column whose name is that of a person's number, or "" if there is none."""
    return next((name for name in columns if PERSON.fullmatch(name)), "")


def check_site_folds(masked: bool | None, n_sites: int, masks_wanted: bool) -> bool:
    """Refuse sites as folds if their sums must be masked, or if there is one site; otherwise do not mask."""
    if masked or masks_wanted:
        who = "masked=True requests" if masked else "an owner's policy requires"
        raise ModelError(
            f"folds: folds='site' needs every site's own sums, which masks hide, and {who} masks",
            remedy=Remedy("fit(..., folds=10)", "use {arguments}"),
        )
    if n_sites < 2:
        raise ModelError('folds: "site" needs at least two sites')
    return False


def check_every(every: int | None, loss: LossSpec | None) -> int:
    """Return the number of steps between two exchanges of scores."""
    if loss is None:
        if every is not None:
            raise ModelError(
                "every: with squared loss all steps follow from one round; the argument is for other losses"
            )
        return 1
    jumps = loss.entry.bound == 0.0
    if every is None:
        return 1 if jumps else EVERY
    check_integer("every", every, 1)
    if jumps and every > 1:
        raise ModelError(
            f"every: the slopes of the quantile loss are discontinuous; expected 1, received {every!r}"
        )
    return int(every)


def check_loss(
    loss: LossSpec | None, select: str | None, learners: Sequence[Learner], *, uneven: bool
) -> None:
    """Refuse settings that need sums of products alone."""
    if loss is None:
        return
    if select == "aicc":
        raise ModelError("select: AICc needs squared loss; use 'cv' for other losses")
    along = [one.label for one in learners if one.varying]
    if along:
        raise ModelError(
            f"{loss.title}: {along[0]} varies along the response, which is available for squared loss only"
        )
    if uneven:
        raise ModelError(
            f"{loss.title}: curves of the response are measured at different points, or lack some; this is "
            "available for squared loss only",
            remedy=Remedy("Curve(..., max_gap=0)", "Fill in the gaps, or leave out such curves by {call}"),
        )


# ----------------------------------------------------------------------------------------------------
# Number of rows required for sums of products of this number of columns, and remedies with fewer rows.


@dataclass(frozen=True, slots=True)
class SumsSize:
    """Columns of all learners plus one, folds, learners; the basis along a response with uneven points.

    `slopes` of these columns are those of a loss other than squares, at all exchanges.
    """

    columns: int
    folds: int
    learners: Sequence[Learner]
    time: Learner | None = None
    slopes: int = 0


def check_points(learners: Sequence[Learner], curves: Mapping[str, Mapping[str, CurveArray]]) -> None:
    """Require at every site at least as many points of a curve as a learner has splines along it."""
    for one in learners:
        k = one.knots + one.degree + 1
        found = {site: held[one.of] for site, held in curves.items() if one.of_curve and one.of in held}
        for site, curve in found.items():
            m = len(curve.grid)
            if m < k and not curve.own:
                fewer = m - one.degree - 1
                way = f"knots={fewer} or fewer are" if fewer >= 0 else "knots=0 and a lower degree are"
                raise DesignError(
                    f"{site}: curve '{one.of}' has {m} points, fewer than the {k} splines of {one.label} "
                    f"along it; {way} possible; or leave the site out"
                )


def bands(time: Learner) -> int:
    """Return the number of overlapping pairs of splines along the response."""
    return len(overlapping_pairs(time.knots + time.degree + 1, time.degree)[0])


def check_size(
    request: SumsSize,
    sites: Sequence[SiteRowCounts],
    policies: Mapping[str, Policy],
    weighed: Sequence[str],
    *,
    masked: bool,
) -> None:
    """Require rows for the columns of all learners, by fold, as the owners do; the error names remedies.

    Sites in `weighed` have curves of the response with different weights. A strict owner then counts columns
    as often as there are weighted sums.
    """
    rows = {row.site: row.n // request.folds for row in sites}
    allowed = {name: policy.max_parameters for name, policy in policies.items()}
    times = dict.fromkeys(allowed, 1)
    for name in weighed:
        if request.time is not None and policies[name].max_share < 1.0:
            times[name] = 1 + bands(request.time)
            allowed[name] /= times[name]
    if masked and hides(len(rows)) and request.time is None:
        together = " and ".join(rows)
        rows, allowed = {together: sum(rows.values())}, {together: min(allowed.values())}
    short = [name for name, n in rows.items() if request.columns > allowed[name] * n]
    if short:
        first, columns = short[0], request.columns
        most = min(int(allowed[name] * rows[name]) for name in short)
        least = int(np.ceil(columns / allowed[first]))
        n, often = rows[first], times.get(first, 1)
        refuse_few_rows(
            first, n, least, request.learners, columns, most, request.folds, often, request.slopes
        )


def refuse_few_rows(
    where: str, n: int, least: int, learners: Sequence[Learner], columns: int, most: int, folds: int,
    times: int = 1, slopes: int = 0, aicc: bool = False,
) -> NoReturn:  # fmt: skip
    """Raise a DesignError with remedies: the largest number of columns, those of all learners plus one.

    With `aicc` that criterion needs no folds. There are `times` sums of products with different weights.
    `slopes` of the columns are those of a loss.
    """
    smooth = [one for one in learners if one.smooth]
    fixed = columns - sum(one.knots for one in smooth)
    knots = (most - fixed) // len(smooth) if smooth else -1
    ways = [f"knots={knots} in every bsignal() and bbs()"] if knots >= 0 else []
    ways += ["fewer folds"] if folds > 1 else []
    ways += ['select="aicc" without folds'] if folds > 1 and aicc else []
    ways += ["fewer exchanges of scores (steps, every=, folds)"] if slopes else []
    and_more = f"slopes of the loss at all exchanges, {slopes:,}" if slopes else "one"
    each, what = " a fold" if folds > 1 else "", "sums of their products are"
    if times > 1:
        ways += ["fewer knots in time=...", "Curve(..., max_gap=0), which leaves out uneven curves"]
        what = (
            f"curves of the response with missing points, or different points, need {times} weighted sums "
            "of their products,"
        )
    raise DesignError(
        f"{where}: {n:,} rows{each} for {columns} columns, those of all learners and {and_more}; {what} "
        f"released over at least {least:,}. Remedies:  {', or '.join([*ways, 'fewer learners'])}. The "
        "owner of the site can allow fewer rows (max_parameters in policy.toml)"
    )
