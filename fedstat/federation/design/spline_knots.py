"""Knots of splines with ``df=`` where sites hold different rows: quantiles from counts on public intervals.

``bs(x, df=4)`` has its inner knots at quantiles of x and its outer ones at the ends of the data, which are
values of single rows. So each site averages x over blocks of few successive rows, as for a histogram, and
counts the averages on intervals that are the same for every column (:data:`EVERYWHERE`). The intervals that
hold a quantile or an end over all sites are divided, and counted again, in three to five rounds. Knots are
multiples of a round step, :data:`STEPS` of which or more make up the range. They are written into the terms,
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
    block_names,
    find_complete_rows,
    subset_counts,
)
from fedstat.federation.disclosure.facts import ColumnSums, LevelRowCounts, RowCount, RowsUsed
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import as_numbers
from fedstat.spline_names import without_options
from fedstat.typing import Array, Floats, Ints

_SIZES = 4.0 ** np.arange(-10, 21)
EVERYWHERE: Floats = np.concatenate([-_SIZES[::-1], _SIZES])
"""Ends of the intervals that are counted first, in millionths to millions of millions."""
STEPS, FEWEST_STEPS = 100.0, 50.0
"""Steps of the range, at least, as counts show it; steps below which it is counted once more."""
PARTS, MOST_PARTS = 16, 64
"""Parts of an interval that is divided, and parts up to which it is divided into steps at once."""
MOST_ROUNDS = 5
MOST_EDGES = 2**15
"""Ends of intervals of one column that a site accepts."""


@dataclass(frozen=True, slots=True)
class KnotsRequest:
    """The rows, and by spline the ends of the intervals; none are those of :data:`EVERYWHERE`."""

    question: str
    targets: Mapping[str, tuple[float, ...]]


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
    options, text = dict(transform.options), transform.text
    knots = inner_knots(transform)
    if "df" in options and "knots" in options:
        raise FormulaError(f"formula: {text!r} has both df= and knots=. Leave one of them out")
    if knots is None:
        raise FormulaError(f"formula: {text!r} needs df=..., as in df=4, or knots=...")
    if knots < 0:
        raise FormulaError(f"formula: {text!r} needs more degrees of freedom (df)")
    if transform.function == "cc" and not {"lower_bound", "upper_bound"} <= options.keys():
        raise FormulaError(
            f"formula: {text!r} needs the ends of the cycle, such as lower_bound=0 and upper_bound=365, "
            "which do not follow from the data"
        )
    inside = [one.function for one in iter_transforms(transform.operand) if one.function not in ELEMENTWISE]
    if inside:
        raise FormulaError(
            f"formula: {text!r} needs knots=..., lower_bound=... and upper_bound=..., and no df: inside is "
            f"{inside[0]}(), with sums over all rows",
            remedy=Remedy(
                "quantiles(partition, {column!r}, bounds={{{column!r}: (low, high)}})",
                "fs.{call} releases rounded quantiles as knots; the bounds are public knowledge",
            ).filled(column=next(iter_columns(transform))),
        )


# ----------------------------------------------------------------------------------------------------
# The coordinator: intervals, quantiles, and terms with knots.


def agree_knots(question: RowsRequest, sites: Sequence[str], request: Any) -> FitProtocol[RowsRequest]:
    """Find the knots of splines without any, and write them into the terms.

    Only sums over the sites are used. Raises a DesignError for a column with too few distinct values.
    """
    pending = splines_without_knots(question)
    written: dict[str, str] = {}
    edges = {t.text: EVERYWHERE for t in pending}
    steps = dict.fromkeys(edges, 0.0)
    number = 0
    while pending:
        number += 1
        targets = {t.text: tuple(edges[t.text].tolist()) if number > 1 else () for t in pending}
        content = codec.to_plain(KnotsRequest(question.to_json(), targets))
        replies: Sequence[Reply] = yield [request(site, "count_intervals", content) for site in sites]
        total = np.sum([reply.arrays["counts"] for reply in replies], axis=0)
        cuts = np.cumsum([len(edges[t.text]) + 1 for t in pending])
        for transform, counts in zip(pending, np.split(total, cuts[:-1]), strict=True):
            text = transform.text
            found = IntervalCounts(edges[text], counts)
            if found.is_fine(steps[text]) or number == MOST_ROUNDS:
                written[text] = with_places(transform, _places(transform, found, steps[text]))
            else:
                edges[text], steps[text] = found.divided(text, _shares(transform))
        pending = [t for t in pending if t.text not in written]
    return with_knots(question, written)


def _shares(transform: Transform) -> Floats:
    """Shares of the rows below each inner knot that is to be found."""
    missing = 0 if "knots" in dict(transform.options) else inner_knots(transform)
    return np.linspace(0.0, 1.0, int(missing or 0) + 2)[1:-1]


@dataclass(frozen=True, slots=True, eq=False)
class IntervalCounts:
    """Counts (J + 1,) of a column on intervals up to each end (J,), and beyond the last."""

    edges: Floats
    counts: Floats

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the intervals that hold the smallest and the largest value."""
        held = np.flatnonzero(self.counts > 0.0)
        if not len(held) or held[0] == 0 or held[-1] == len(self.edges):
            # The first and the last interval have one end: no number there is known in size.
            return 0.0, 0.0
        return float(self.edges[held[0] - 1]), float(self.edges[held[-1]])

    @property
    def step(self) -> float:
        """A step of 1, 2 or 5 times a power of ten, of which :data:`STEPS` or more make up the range."""
        low, high = self.ends
        power = 10.0 ** np.floor(np.log10((high - low) / STEPS))
        return float(max(one for one in (1.0, 2.0, 5.0) if one * power <= (high - low) / STEPS) * power)

    def is_fine(self, step: float) -> bool:
        """Return whether the range has many of the steps into which it was divided."""
        low, high = self.ends
        return step > 0.0 and high - low >= FEWEST_STEPS * step

    def holders(self, shares: Floats) -> Ints:
        """Return the intervals of the rows on both sides of each quantile, (2, Q), by numpy's rule."""
        total = np.cumsum(self.counts)
        position = shares * max(total[-1] - 1.0, 0.0)
        return np.array([np.searchsorted(total, end(position), side="right") for end in (np.floor, np.ceil)])

    def divided(self, text: str, shares: Floats) -> tuple[Floats, float]:
        """Return ends of narrower intervals around quantiles and ends of the data (J,), and their step.

        The step is 0 if they are parts that are to be divided again.
        """
        low, high = self.ends
        if not high > low:
            most = self.edges[-1]
            raise DesignError(f"{text!r}: the column has numbers above {most:.0e}. Divide it by a unit")
        held = np.flatnonzero(self.counts > 0.0)
        places = np.unique(np.append(self.holders(shares).ravel(), held[[0, -1]]))
        below, above, step = self.edges[places - 1], self.edges[places], self.step
        outer = self.edges[[0, -1]]
        if (above - below > MOST_PARTS * step).any():
            parts = np.linspace(below, above, PARTS + 1)
            return np.unique(np.concatenate([outer, parts.ravel()])), 0.0
        # Multiples of the step are in the middle of an interval: a whole number is its own knot.
        ends = [
            np.arange(np.floor(a / step) - 1.0, np.floor(b / step) + 2.0) + 0.5
            for a, b in zip(below, above, strict=True)
        ]
        return np.unique(np.concatenate([outer, step * np.concatenate(ends)])), step

    def values(self, places: Ints) -> Floats:
        """Return the middle of intervals, a multiple of the step."""
        middle: Floats = (self.edges[places - 1] + self.edges[places]) / 2.0
        return middle


def _places(transform: Transform, found: IntervalCounts, step: float) -> tuple[float, ...]:
    """Return lower bound, inner knots and upper bound of a spline, multiples of a step."""
    options: dict[str, Any] = dict(transform.options)
    held = np.flatnonzero(found.counts > 0.0)
    shares = _shares(transform)
    low, high = found.values(found.holders(shares))
    position = shares * max(found.counts.sum() - 1.0, 0.0)
    inner = low + (position - np.floor(position)) * (high - low)
    ends = found.values(held[[0, -1]])
    if step:
        digits = max(0, -int(np.floor(np.log10(step) + 1e-9)))
        rounded = [round(float(np.rint(x / step) * step), digits) for x in (ends[0], *inner, ends[1])]
    else:  # no division was narrow enough: the column hardly varies
        rounded = [0.0]
    inner = options.get("knots", tuple(rounded[1:-1]))
    places = (options.get("lower_bound", rounded[0]), *inner, options.get("upper_bound", rounded[-1]))
    if not (np.diff(places) > 0.0).all():
        raise DesignError(
            f"{transform.text!r}: two of its knots are at the same value, which many rows have, or outside "
            "of the data. Use fewer degrees of freedom, or write knots=..., lower_bound=... and "
            "upper_bound=..."
        )
    return places


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
        edges = np.array(request.targets[text] or EVERYWHERE, dtype=np.float64)
        if (np.diff(edges) <= 0.0).any() or len(edges) > MOST_EDGES:
            raise MessageError(f"{data.name}: ends of intervals must ascend, at most {MOST_EDGES:,}")
        code = np.zeros(n, dtype=np.int64)
        averaged = block_means(code, np.concatenate([np.zeros(0), *parts]), least)
        counts.append(np.bincount(np.searchsorted(edges, averaged), minlength=len(edges) + 1))
        tree = splines[text].operand
        for name in iter_columns(tree):
            of = "" if tree == Column(name) else f" of {without_options(text)}"
            blocks.setdefault(name, []).extend(f"{one}{of}" for one in block_names(code, least))
    total = np.concatenate([np.zeros(0), *counts])
    state.report(LevelRowCounts("cells of the table", total.astype(int).tolist()))
    state.report(ColumnSums([], behind, blocks=blocks), RowsUsed(behind))
    state.count_entities(n)
    return {"counts": total}


def assumed_counts(request: KnotsRequest, n: int) -> Floats:
    """Give counts of the shape of the real ones, with which the intervals are divided most often."""
    counts = [np.zeros(1 + len(ends or EVERYWHERE)) for ends in request.targets.values()]
    for own in counts:
        own[len(own) // 2] = n
    return np.concatenate([np.zeros(0), *counts])
