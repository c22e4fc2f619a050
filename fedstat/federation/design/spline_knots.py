"""Knots of splines with ``df=`` where sites hold different rows: quantiles from counts on public intervals.

``bs(x, df=4)`` has its inner knots at quantiles of x and its outer ones at the ends of the data, which are
values of single rows. So each site averages x over blocks of few successive rows, as for a histogram, and
counts the averages on intervals that are the same for every column (:data:`EVERYWHERE`). The intervals that
hold a quantile or an end over all sites are divided, and counted again, in two to six rounds. Knots are
the roundest numbers in their intervals: a whole number is its own knot. They are written into the terms,
so that everything later, the disclosure checks included, treats them as knots of the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstat import codec
from fedstat.errors import DesignError, FormulaError, MessageError, Remedy
from fedstat.federation.design.coding import evaluate
from fedstat.federation.design.formula.syntax_tree import (
    ELEMENTWISE,
    SPLINES,
    Column,
    Transform,
    has_knots,
    inner_knots,
    iter_columns,
    iter_transforms,
    with_places,
)
from fedstat.federation.design.formula.terms import Term, parse_term, term_text
from fedstat.federation.design.site_rows import (
    RowsRequest,
    block_means,
    find_complete_rows,
    interval_names,
    quantile_places,
    rows_behind,
    subset_counts,
)
from fedstat.federation.disclosure.facts import ColumnSums, LevelRowCounts, RowCount
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import as_numbers
from fedstat.federation.tables.published import Published
from fedstat.spline_names import without_options
from fedstat.typing import Array, Floats, Ints

_SIZES = 4.0 ** np.arange(-10, 21)
EVERYWHERE: Floats = np.concatenate([-_SIZES[::-1], _SIZES])
"""Ends of the intervals that are counted first, in millionths to millions of millions."""
STEPS, FEWEST_STEPS = 100.0, 50.0
"""Steps between the quantiles before and after one, into which its interval is divided, and the fewest."""
MOST_ENDS, ENDS_A_KNOT = 64, 16
"""Ends of new intervals of one spline, or of each of its knots if these are more."""
MOST_ROUNDS = 6
MOST_EDGES = 2**15
"""Ends of intervals of one column that a site accepts."""


@dataclass(frozen=True, slots=True)
class KnotsRequest:
    """The rows, and by spline the ends of the intervals; none are those of :data:`EVERYWHERE`.

    `number` counts the rounds from one on.
    """

    question: str
    targets: Mapping[str, tuple[float, ...]]
    number: int


def splines_without_knots(question: RowsRequest) -> list[Transform]:
    """List the splines of the fixed terms whose knots or bounds are not written, each once.

    Raises a FormulaError for one whose knots cannot be found.
    """
    found = [t for term in question.read_terms() for f in term for t in iter_transforms(f.tree)]
    open_ones = {t.text: t for t in found if t.function in SPLINES and not has_knots(t)}
    for transform in open_ones.values():
        _require_possible(transform)
    return list(open_ones.values())


def _require_possible(transform: Transform) -> None:
    options, text, column = dict(transform.options), transform.text, next(iter_columns(transform))
    bounds = len({"lower_bound", "upper_bound"} & options.keys())
    inside = [one.function for one in iter_transforms(transform.operand) if one.function not in ELEMENTWISE]
    if transform.function == "cc" and bounds < 2:
        raise FormulaError(
            f"formula: {text!r} needs the ends of the cycle, such as lower_bound=0 and upper_bound=365, "
            "which do not follow from the data"
        )
    if "knots" in options or bounds == 1 or inside or inner_knots(transform) is None:
        reason = f": inside is {inside[0]}(), with sums over all rows" if inside else ""
        raise FormulaError(
            f"formula: {text!r} needs df=... alone, or knots=..., lower_bound=... and upper_bound=..., where "
            f"sites hold different rows{reason}",
            remedy=Remedy(
                "quantiles(partition, {column!r}, bounds={{{column!r}: (low, high)}})",
                "fs.{call} releases rounded quantiles as knots; the bounds are public knowledge",
            ).filled(column=column),
        )
    if (inner_knots(transform) or 0) < 0:
        raise FormulaError(f"formula: {text!r} needs more degrees of freedom (df)")


def with_published_knots(question: RowsRequest, published: Sequence[Published]) -> RowsRequest:
    """Write knots that all sites publish into splines without any, spread over the published ones.

    `published` are the descriptions of the sites that compute splines with published knots alone. A spline
    stays as it is if they do not publish enough knots, or other ranges.
    """
    written = {}
    for transform in splines_without_knots(question) if published else ():
        name, count = next(iter_columns(transform)), inner_knots(transform) or 0
        columns = [own.get(name) for own in published]
        ranges = {None if one is None else one.range for one in columns}
        common = sorted(set.intersection(*(set(() if one is None else one.knots) for one in columns)))
        plain = transform.operand == Column(name) and "lower_bound" not in dict(transform.options)
        if plain and len(ranges) == 1 and None not in ranges and 0 < count <= len(common):
            (low, high), m = ranges.pop(), len(common)  # type: ignore[misc]
            inner = [common[int((i + 0.5) * m / count)] for i in range(count)]
            written[transform.text] = with_places(transform, (low, *inner, high))
    return with_knots(question, written)


# ----------------------------------------------------------------------------------------------------
# The coordinator: intervals, quantiles, and terms with knots.


def agree_knots(question: RowsRequest, sites: Sequence[str], request: Any) -> FitProtocol[RowsRequest]:
    """Find the knots of splines without any, and write them into the terms.

    Only sums over the sites are used. Raises a DesignError for a column with too few distinct values.
    """
    pending = splines_without_knots(question)
    written: dict[str, str] = {}
    edges = {t.text: _first_edges(t) for t in pending}
    for number in range(1, MOST_ROUNDS + 1):
        if not pending:
            break
        targets = {
            t.text: () if edges[t.text] is EVERYWHERE else tuple(edges[t.text].tolist()) for t in pending
        }
        content = codec.to_plain(KnotsRequest(question.to_json(), targets, number))
        replies: Sequence[Reply] = yield [request(site, "count_intervals", content) for site in sites]
        total = np.sum([reply.arrays["counts"] for reply in replies], axis=0)
        cuts = np.cumsum([len(edges[t.text]) + 1 for t in pending])
        for transform, counts in zip(pending, np.split(total, cuts[:-1]), strict=True):
            text = transform.text
            found = IntervalCounts(edges[text], counts, _shares(transform))
            if found.is_fine or number == MOST_ROUNDS:
                written[text] = with_places(transform, _places(transform, found))
            else:
                edges[text] = found.divided(text)
        pending = [t for t in pending if t.text not in written]
    return with_knots(question, written)


def _first_edges(transform: Transform) -> Floats:
    """Return steps of the range that the formula gives, or intervals for any column."""
    options: dict[str, Any] = dict(transform.options)
    if "lower_bound" not in options:
        return EVERYWHERE
    low, high = float(options["lower_bound"]), float(options["upper_bound"])
    if not low < high:
        raise FormulaError(f"formula: {transform.text!r}: expected a lower_bound below upper_bound")
    return _steps_within(low, high, round_step((high - low) / STEPS))


def _shares(transform: Transform) -> Floats:
    """Shares of the rows below each knot: the ends of the data, and equal parts between them."""
    return np.linspace(0.0, 1.0, (inner_knots(transform) or 0) + 2)


def round_step(most: float) -> float:
    """Return the largest number up to a limit that is 1, 2 or 5 times a power of ten."""
    most *= 1.0 + 1e-9
    power = 10.0 ** np.floor(np.log10(most))
    return float(max(one for one in (1.0, 2.0, 5.0) if one * power <= most) * power)


def _steps_within(low: float, high: float, step: float) -> Floats:
    """Return ends of intervals around the multiples of a step."""
    return (np.arange(np.floor(low / step) - 1.0, np.floor(high / step) + 2.0) + 0.5) * step


@dataclass(frozen=True, slots=True, eq=False)
class IntervalCounts:
    """Counts (J + 1,) of a column on intervals up to each end (J,) and beyond, and the quantiles sought (Q,).

    The first and the last quantile are the ends of the data.
    """

    edges: Floats
    counts: Floats
    shares: Floats

    @property
    def places(self) -> Ints:
        """Intervals of the rows on both sides of each quantile, (2, Q), by numpy's rule."""
        counts = self.counts[None]
        return np.concatenate([quantile_places(counts, self.shares, end) for end in (np.floor, np.ceil)])

    @property
    def ends(self) -> tuple[Floats, Floats]:
        """Lower and upper ends of the intervals, infinite beyond the last."""
        return np.append(-np.inf, self.edges), np.append(self.edges, np.inf)

    @property
    def widths(self) -> Floats:
        """The wider interval of each quantile, (Q,)."""
        below, above = self.ends
        widths: Floats = (above - below)[self.places].max(axis=0)
        return widths

    @property
    def near(self) -> Floats:
        """How far the quantiles before and after each one are apart, (Q,); of the ends, the whole range."""
        below, above = (end[own] for end, own in zip(self.ends, self.places, strict=True))
        out = np.full(len(self.shares), above[-1] - below[0])
        out[1:-1] = above[2:] - below[:-2]
        return out

    @property
    def is_fine(self) -> bool:
        """Whether every quantile is known well, compared with its distance from the others."""
        return bool((FEWEST_STEPS * self.widths <= self.near).all())

    def divided(self, text: str) -> Floats:
        """Divide the intervals of quantiles that are not known well: new ends (J,)."""
        below, above = self.ends
        places, widths, near = self.places, self.widths, self.near
        if not np.isfinite(near).all():
            raise DesignError(
                f"{text!r}: the column has numbers above {self.edges[-1]:.0e}. Divide it by a unit"
            )
        steps: dict[int, float] = {}
        for place, width, distance in zip(places.T.tolist(), widths, near, strict=True):
            step = 0.0 if FEWEST_STEPS * width <= distance else round_step(distance / STEPS)
            for one in place:
                steps[one] = min(steps.get(one, np.inf), step or np.inf)
        # As few as a dry run has: every count is one more number that a site releases.
        most = max(MOST_ENDS, ENDS_A_KNOT * len(self.shares)) // len(steps)
        found = [self.edges[[0, -1]]]
        for place, step in steps.items():
            low, high = below[place], above[place]
            if np.isinf(step):
                found.append(np.array([low, high]))
            elif high - low > (most - 3) * step:
                found.append(np.linspace(low, high, most))
            else:
                found.append(_steps_within(low, high, step))
        return np.unique(np.concatenate(found))

    def quantiles(self) -> Floats:
        """Return the roundest number in the interval of each quantile, (Q,); NaN beyond the last."""
        below, above = self.ends
        low, high = below[self.places], above[self.places]
        position = self.shares * max(self.counts.sum() - 1.0, 0.0)
        weight = position - np.floor(position)
        found = []
        for (a, c), (b, d), w in zip(low.T.tolist(), high.T.tolist(), weight.tolist(), strict=True):
            # By numpy's rule between the intervals of two rows, and as exact as the narrower one.
            middle, half = (1.0 - w) * (a + b) / 2.0 + w * (c + d) / 2.0, min(b - a, d - c) / 2.0
            found.append(_roundest(a, b) if a == c else _roundest(middle - half, middle + half))
        return np.array(found)


def _roundest(low: float, high: float) -> float:
    """Return the number in (low, high] with the fewest digits; NaN without an end."""
    if not (np.isfinite(low) and np.isfinite(high)):
        return float("nan")
    if low < 0.0 <= high:
        return 0.0
    power = int(np.ceil(np.log10(max(-low, high))))
    while True:
        for one in (5.0, 2.0, 1.0):
            step = one * 10.0**power
            if low < (last := np.floor(high / step) * step) <= high:
                return float(round(last, max(0, -power)))
        power -= 1


def _places(transform: Transform, found: IntervalCounts) -> tuple[float, ...]:
    """Return lower bound, inner knots and upper bound of a spline."""
    options: dict[str, Any] = dict(transform.options)
    places = found.quantiles()
    if "lower_bound" in options:
        places[[0, -1]] = options["lower_bound"], options["upper_bound"]
    if not (np.diff(places) > 0.0).all():
        raise DesignError(
            f"{transform.text!r}: two of its knots are at the same value, which many rows have, or are "
            "outside of its bounds. Lower the degrees of freedom."
        )
    return tuple(places.tolist())


def with_knots(question: RowsRequest, written: Mapping[str, str]) -> RowsRequest:
    """Replace splines of the fixed terms by others, by their texts."""
    if not written:
        return question

    def replaced(text: str) -> str:
        term: Term = parse_term(text)
        return ":".join(written.get(factor.text, factor.text) for factor in term)

    terms = {text: replaced(text) for text in question.terms}
    canonical = {text: term_text(parse_term(new)) for text, new in terms.items()}
    return replace(
        question, terms=tuple(canonical.values()), placed={new: old for old, new in written.items()}
    )


# ----------------------------------------------------------------------------------------------------
# A site: counts of block averages.


def count_intervals(data: SiteData, state: State, request: KnotsRequest) -> dict[str, Array]:
    """Count this site's complete rows on intervals of the columns of splines.

    Releases ``counts``, of one spline after another: the rows up to each end, and beyond the last. Each row
    counts at the mean of a block of successive values, as many as a level must have.
    """
    question = RowsRequest.from_json(request.question)
    state.report(*question.requested())
    splines = {t.text: t for t in splines_without_knots(question)}
    if not set(request.targets) <= splines.keys():
        raise MessageError(f"{data.name}: the request names splines that its formula does not have")
    values: dict[str, list[Floats]] = {text: [] for text in request.targets}
    used, outside = [np.zeros(0, dtype=bool)], 0
    for rows in find_complete_rows(data, question):
        used.append(rows.complete)
        outside += rows.outside
        for text in values:
            tree = splines[text].operand
            numbers = {
                name: as_numbers(rows.frame[name], data.name, name) for name in set(iter_columns(tree))
            }
            found = evaluate(tree, numbers, {}, f"{text!r} at site {data.name!r}")
            values[text].append(np.asarray(found, dtype=np.float64))
    behind, least, counts = np.concatenate(used), data.policy.min_level_count, []
    n = int(behind.sum())
    state.report(RowCount(n), *subset_counts(question, n, outside))
    blocks: dict[str, list[str]] = {}
    for text, parts in values.items():
        edges = np.array(request.targets[text] or EVERYWHERE)
        if (np.diff(edges) <= 0.0).any() or len(edges) > MOST_EDGES:
            raise MessageError(f"{data.name}: ends of intervals must ascend, at most {MOST_EDGES:,}")
        code = np.zeros(n, dtype=np.int64)
        averaged = block_means(code, np.concatenate([np.zeros(0), *parts]), least)
        counts.append(np.bincount(np.searchsorted(edges, averaged), minlength=len(edges) + 1))
        tree = splines[text].operand
        for name in iter_columns(tree):
            of = "" if tree == Column(name) else f" of {without_options(text)}"
            blocks.setdefault(name, []).extend(interval_names(code, least, edges, of))
    total = np.concatenate([np.zeros(0), *counts])
    state.report(LevelRowCounts("cells of the table", total.astype(int).tolist()))
    state.report(ColumnSums([], behind, blocks=blocks), rows_behind(data, question, behind))
    state.count_entities(n)
    return {"counts": total}


def assumed_counts(request: KnotsRequest, n: int) -> Floats:
    """Give counts of the shape of the real ones, with which the intervals are divided most often."""
    found = [np.zeros(len(ends or EVERYWHERE) + 1) for ends in request.targets.values()]
    for counts in found:
        # All rows in one interval, until a division is the last.
        counts[2:-2] = n if request.number >= MOST_ROUNDS - 1 else 0
        counts[len(counts) // 2] = n
    return np.concatenate([np.zeros(0), *found])
