"""An institution's columns and response during a fit, standardised over its entities of the fit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design.by_columns import block_of
from fedstat.federation.door.facts import GroupSums, SummedColumns
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import check_lengths, check_room
from fedstat.federation.rounds.product_steps import check_positions
from fedstat.federation.tables.bits import PLAIN, ColumnsDetail
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.exchange.dither import dithered
from fedstat.models.vertical.exchange.earlier import ColumnsBeside
from fedstat.models.vertical.moments import number_patterns
from fedstat.typing import Bools, Floats, Ints

CONSTANT = 1e-12
"""Standard deviation, relative to the mean, below which a column counts as constant."""
UNTOLD = 2.0
"""In the place of the shape of a column, which is one at most, where it is not told."""
EMPTY_GROUPS = 1024
"""Groups that a question may name however few rows there are: of most of them a site may have none."""


@dataclass(slots=True)
class StagedBlock:
    """A site's standardised columns (n, p) during a fit; means and standard deviations (p,) in their units.

    `keep` (n_seen,) are the rows of the opened block that take part; `held` (n,) those of X that are its own:
    others are filled in with their mean, and hide nothing. `weight` (n,) are the latest row weights, empty
    before the first, and `grams` counts the weighted Gram matrices that were released. `detail` has the
    columns of few values, `beside` with which columns of others these were multiplied. `table_rows` (n,) are
    the rows of the site's table, -1 for those that are filled in; `groups_judged` are digests of the rows
    over which the columns were summed. Where not all columns
    count as seen in all rows, the others are zero there, `alike` (n,) numbers the rows' sets of columns and
    `counts` (p,) the rows that have each. `case` (n,) are weights that entities have by the data.
    """

    X: Floats
    shift: Floats
    scale: Floats
    keep: Bools
    held: Bools
    weight: Floats = field(default_factory=lambda: np.empty(0))
    grams: int = 0
    detail: ColumnsDetail = PLAIN
    beside: ColumnsBeside = field(default_factory=ColumnsBeside)
    table_rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    groups_judged: dict[bytes, bool] = field(default_factory=dict)
    alike: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    counts: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    case: Floats | None = None

    def groups(self, code: Ints, columns: int, times: int = 1, weights: Floats | None = None) -> GroupSums:
        """Tell of products of so many columns by group, (n,): rows that are filled in do not count.

        A MessageError where rows of a group have different columns: sums of one that few of them have would
        be over these few.
        """
        held = np.where(self.held, code, -1)
        if len(self.alike):
            here = held >= 0
            kinds = np.unique(np.column_stack([held[here], self.alike[here]]), axis=0)
            if len(kinds) > len(np.unique(held[here])):
                raise MessageError("rows of a pattern or fold have different columns")
        summed = newly_summed(self.X, held, self.groups_judged)
        return GroupSums(held, columns, times, weights, self.detail, self.beside.counts, summed)

    def summed(self, code: Ints, rows: Ints) -> SummedColumns:
        """Tell of sums of the columns by group, (m,), of some rows."""
        return newly_summed(self.X, spread(code, rows, len(self.X)), self.groups_judged)

    def among_all(self, code: Ints) -> Ints:
        """Bring groups of the entities of the fit to the rows of the block, -1 where they take no part."""
        out = np.full(len(self.keep), -1, dtype=np.int64)
        out[self.keep] = code[self.held]
        return out


@dataclass(slots=True)
class StagedResponse:
    """The response during a fit: (n,), with mean, standard deviation, distribution, and rows of the table."""

    y: Floats
    distribution: DistributionSpec
    mean: float
    sd: float
    rows: Ints
    detail: ColumnsDetail = PLAIN
    beside: ColumnsBeside = field(default_factory=ColumnsBeside)
    groups_judged: dict[bytes, bool] = field(default_factory=dict)
    case: Floats | None = None

    def groups(self, code: Ints, rows: Ints | None = None, columns: int = 0) -> GroupSums:
        """Tell of sums and products of the response by group, (m,), of some of its rows or of all."""
        summed = self.summed(code, np.arange(len(self.y)) if rows is None else rows)
        return GroupSums(code, columns, detail=self.detail, beside=self.beside.counts, summed=summed)

    def summed(self, code: Ints, rows: Ints) -> SummedColumns:
        """Tell of sums of the response by group, (m,), of some rows."""
        return newly_summed(self.standardised[:, None], spread(code, rows, len(self.y)), self.groups_judged)

    @property
    def standardised(self) -> Floats:
        """Mean 0, mean square 1."""
        return np.asarray((self.y - self.mean) / self.sd)


def by_case(case: Floats | None, n: int) -> Floats:
    """Give weights that entities have by the data, (n,): ones where they have none."""
    return np.ones(n) if case is None else case


def newly_summed(X: Floats, code: Ints, judged: dict[bytes, bool]) -> SummedColumns:
    """Columns by group, (n,), without groups that were `judged` before: one product follows the other."""
    new = np.array(code)
    for group in np.unique(code[code >= 0]):
        rows = np.flatnonzero(code == group)
        digest = hashlib.sha256(rows.tobytes()).digest()
        if digest in judged:
            new[rows] = -1
        judged[digest] = True
    return SummedColumns(X, new)


def spread(code: Ints, rows: Ints, n: int) -> Ints:
    """Bring groups of some rows, (m,), to all n, -1 for the others."""
    out = np.full(n, -1, dtype=np.int64)
    out[rows] = code
    return out


def staged_block(state: State) -> StagedBlock:
    """Return this fit's columns, or say that the fit was not started here."""
    return state.use("staged block", StagedBlock, "this fit was not started here; ask 'stage_block' first")


def staged_response(state: State) -> StagedResponse:
    """Return this fit's response, or say that it is not here."""
    return state.use(
        "staged response", StagedResponse, "this fit has no response here; ask 'stage_response' first"
    )


def standardise_block(
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints | None = None,
    n: int = 0,
    seen: Bools | None = None,
    may_be_flat: bool = False,
) -> StagedBlock:
    """Standardise the columns over the entities of a fit that the institution has, and keep them.

    `keep` (n_seen,) are the rows of the opened block that take part, `rows` (n_k,) their positions among the
    n entities of the fit: those that the institution lacks then get its means, which are zero after
    standardising. `seen` (n_k, p) tells which columns count as seen in these rows, each over its own, by
    default all; the others are zero. An EstimationError where there are fewer than two entities, or a column
    is constant among them, unless it `may_be_flat`, and is zero then.
    """
    block = block_of(state)
    check_lengths(data.name, keep=(keep, len(block.X)))
    X = np.ascontiguousarray(dithered(data, block.X)[keep])
    n_own = len(X)
    if seen is not None and rows is not None:
        raise MessageError(f"{data.name}: means stand for whole blocks, and not for some of their columns")
    check_seen(data.name, X, seen)
    counts = np.full(X.shape[1], n_own) if seen is None else seen.sum(axis=0)
    if counts.min() < 2:
        raise EstimationError(
            f"{data.name}: {counts.min()} of the entities of this fit have its block; two are the least"
        )
    if seen is None:
        shift, scale = X.mean(axis=0), X.std(axis=0)
    else:
        values = [column[own] for column, own in zip(X.T, seen.T, strict=True)]
        shift, scale = (np.array([take(own) for own in values]) for take in (np.mean, np.std))
    flat = scale <= CONSTANT * np.maximum(1.0, np.abs(shift))
    if may_be_flat:
        scale[flat] = 1.0
    elif flat.any():
        names = [name for name, bad in zip(block.spec.names, flat, strict=True) if bad]
        raise EstimationError(
            f"{data.name}: constant among the {counts[flat].min():,} entities of this fit: "
            f"{', '.join(names)}; drop them"
        )
    X, held = (X - shift) / scale, np.ones(n_own, dtype=np.bool_)
    alike = np.zeros(0, dtype=np.int64)
    if seen is not None:
        X, alike = np.where(seen, X, 0.0), number_patterns(seen)[1]
    table_rows = np.flatnonzero(block.seen)[keep]
    if rows is not None:
        check_lengths(data.name, rows=(rows, n_own))
        check_positions(data.name, rows, n)
        check_room(data.name, n * X.shape[1], X.size)
        # Rows that are filled in do not count among the entities behind a sum.
        X, held = fill_with_mean(X, rows, n), np.isin(np.arange(n), rows)
        own, table_rows = table_rows, np.full(n, -1, dtype=np.int64)
        table_rows[rows] = own
    detail = detail_of(state, "block")
    staged = StagedBlock(X, shift, scale, keep, held, detail=detail, table_rows=table_rows)
    staged.alike, staged.counts = alike, counts
    state.keep("staged block", staged, int(counts.min()))
    return staged


def signed_squares(staged: StagedBlock) -> Floats:
    """Mean of z |z| of every standardised column, (p,): zero where it is symmetric, at most one.

    Unlike the third moment it gives no row more weight than the standard deviation does. Of columns of few
    values by themselves it is in their counts; where products of such columns are judged, none is told.
    """
    if not all(one.alone for one in staged.detail.levelled):
        return np.full(staged.X.shape[1], UNTOLD)
    Z = staged.X[staged.held]
    squares = Z * np.abs(Z)
    return np.asarray(squares.sum(axis=0) / staged.counts if len(staged.alike) else squares.mean(axis=0))


def check_seen(name: str, X: Floats, seen: Bools | None) -> None:
    """Require of columns that count as seen, (n, p), that the rows have them, and some in each row."""
    there = ~np.isnan(X)
    own = there | True if seen is None else seen
    if own.shape != X.shape or not there[own].all() or not own.any(axis=1).all():
        raise MessageError(f"{name}: columns count as seen that its entities do not have")


def detail_of(state: State, what: str) -> ColumnsDetail:
    """Columns of few values of what was opened; none where the owner does not have them judged."""
    name = f"{what} detail"
    return (state.look_at(name) if name in state else None) or PLAIN


def fill_with_mean(X: Floats, rows: Ints, n: int) -> Floats:
    """Give every entity that the institution lacks the mean, which is zero after standardising."""
    filled = np.zeros((n, X.shape[1]))
    filled[rows] = X
    return filled


def require_groups(name: str, code: Ints, groups: int, each: int, columns: int = 1) -> None:
    """Require groups from 0, or -1 for entities that take no part, and some that do; and sums that fit.

    `each` numbers are released for a group of rows of so many columns: a question may name more groups than
    an answer has room for.
    """
    if groups < 1 or len(code) == 0 or code.min() < -1 or not 0 <= code.max() < groups:
        raise MessageError(f"{name}: expected patterns or folds from 0 to {groups - 1}, or -1 for none")
    if groups > max(EMPTY_GROUPS, len(code)):
        raise MessageError(f"{name}: {groups:,} patterns or folds are more than its {len(code):,} rows")
    check_room(name, groups * each, len(code) * columns)
