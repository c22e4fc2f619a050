"""A site's standardized columns and response during a fit, with dither and a product history."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.audit.event_log import AnswerRecord, SiteLedger
from fedstat.federation.design.vertical_design import block_of
from fedstat.federation.disclosure.facts import GroupSums, SummedColumns
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import check_allocation, check_lengths
from fedstat.federation.protocols.product_steps import check_positions, distinct
from fedstat.federation.tables.cardinality import PLAIN, ColumnCardinality
from fedstat.federation.tables.supports import Supports
from fedstat.federation.tables.table import entities_of
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vertical.moments import number_patterns
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Dither: columns are moved a little before they are summed, so that a sum carries few bits about them.
#
# Each value of a design column moves by up to .005 of the column's standard deviation. A sum of products
# therefore moves by .3 % of its sampling error, and carries log2(1 / .0029) = 8.4 bits about the column, for
# any second factor. The site's secret and the column determine the moves: in any request, session or group,
# the same value moves the same way, so repeated requests do not average the dither out. All sums use the
# moved columns, so standard errors account for the dither: it adds a thousandth of a percent to a column's
# variance.

WIDTH = 0.01
"""Largest move of a value, in standard deviations of its column."""
DIGITS = 6
"""Rounding of standardized columns before the digest: center(x), x and C(x) of two levels move alike."""


def dithered(data: SiteData, X: Floats) -> Floats:
    """Return columns (n, p) as they enter sums: dithered if the owner requires it, nan where missing."""
    if data.policy.rounding == "none" or not len(X):
        return X
    secret, out = data.trust.identity.secret("dither"), np.array(X, dtype=np.float64)
    for j, complete in enumerate(X.T):
        here = ~np.isnan(complete)
        column = complete[here]
        sd = float(column.std()) if len(column) else 0.0
        if not sd > 0.0:
            continue
        z = np.round((column - column.mean()) / sd, DIGITS) + 0.0
        sign = 1.0 if z[np.flatnonzero(z)[0]] > 0.0 else -1.0
        drawn = hmac.digest(secret, (sign * z + 0.0).tobytes(), "sha256")
        rng = np.random.default_rng(int.from_bytes(drawn, "big"))
        out[here, j] += sign * sd * rng.uniform(-WIDTH / 2.0, WIDTH / 2.0, size=len(z))
    return out


# ----------------------------------------------------------------------------------------------------
# Columns of others that were multiplied with a site's, in this fit and in all earlier ones.
#
# What sums reveal about a column of few values adds up over fits. For every group of rows, the site therefore
# records the columns by which its own were multiplied, as marks that the other site gives its columns. A mark
# depends on the column's content, so repeating a fit adds nothing.


@dataclass(frozen=True, slots=True)
class MultipliedColumns(AnswerRecord):
    """Marks of columns that were multiplied with the site's, and the digest of the group of rows."""

    group: str
    marks: tuple[str, ...]


@dataclass(slots=True)
class ProductHistory:
    """Number of columns of others that were multiplied with those of a site in a fit, by product and group.

    Columns of few values are judged by the sums of all products together. `marked` are columns by group,
    including those of earlier fits.
    """

    products: dict[str, dict[int, int]] = field(default_factory=dict)
    marked: dict[int, frozenset[str]] = field(default_factory=dict)

    def add(self, product: str, columns: int, code: Ints) -> None:
        """Note a product over groups, (n,); a repeated product counts once."""
        self.products[product] = dict.fromkeys(distinct(code[code >= 0]).tolist(), columns)

    def add_marked(self, data: SiteData, code: Ints, rows: Ints, marks: Array) -> Callable[[], None]:
        """Note columns by group, (n,), of rows of the table: marks (groups, q, bytes), groups ascending.

        Returns the entry for the history, which is stored when the product is released.
        """
        fresh: list[MultipliedColumns] = []
        earlier = marks_by_group(data.site_ledger)
        for group, columns in zip(np.unique(code).tolist(), marks, strict=True):
            name = _name(data, rows[code == group])
            known, now = earlier.get(name, frozenset()), {one.tobytes().hex() for one in columns}
            self.marked[group] = self.marked.get(group, frozenset()) | known | now
            if now - known:
                fresh.append(MultipliedColumns(name, tuple(sorted(now - known))))
        return lambda: data.site_ledger.remember(*fresh)

    @property
    def counts(self) -> dict[int, int]:
        """Columns by group."""
        total: Counter[int] = Counter({group: len(marks) for group, marks in self.marked.items()})
        for product in self.products.values():
            total.update(product)
        return dict(total)


def marks_by_group(site_ledger: SiteLedger) -> dict[str, frozenset[str]]:
    """List the marks of the columns that were multiplied with the site's, by group of rows."""
    found: dict[str, set[str]] = {}
    for one in site_ledger.records(MultipliedColumns):
        found.setdefault(one.group, set()).update(one.marks)
    return {name: frozenset(marks) for name, marks in found.items()}


def _name(data: SiteData, rows: Ints) -> str:
    """Name a group of rows by a keyed digest of its entities, in any order."""
    entities = np.ascontiguousarray(entities_of(data.table)[rows])
    width = entities.nbytes // max(len(entities), 1)
    members = b"".join(sorted(one.tobytes() for one in entities.view(np.uint8).reshape(-1, width)))
    return hashlib.blake2b(members, digest_size=16, key=data.mark_key).hexdigest()


# ----------------------------------------------------------------------------------------------------
# A site's columns and response during a fit, standardized over its entities of the fit.

CONSTANT = 1e-12
"""Standard deviation, relative to the mean, below which a column counts as constant."""
UNRELEASED = 2.0
"""Placeholder for the shape of a column (at most one) if it is not reported."""
BALANCED = 0.2**0.5
"""Largest shape of a column of two values that counts as balanced, of skewness one: the rarer has 28 %."""
TWO_VALUED = 0.02
"""Distance in standard deviations within which values count as equal, larger than any dither."""
EMPTY_GROUPS = 1024
"""Groups that a request may name for any number of rows: a site may have no rows in most of them."""


@dataclass(slots=True)
class StandardizedBlock:
    """A site's standardized columns (n, p) during a fit; means and standard deviations (p,) in their units.

    `keep` (n_seen,) are the rows of the opened block that take part. `held` (n,) are the rows of X that are
    the site's own; others are mean-imputed, and hide nothing. `weight` (n,) are the latest row weights, empty
    before the first, `weighted` (n, q) some of the columns times their roots, and `grams` counts the weighted
    Gram matrices that were released. `detail` has the columns of few values, `other_columns` those of others
    that were multiplied with these. `table_rows` (n,) are the rows of the site's table, -1 for imputed ones;
    `groups_judged` are digests of the rows over which the columns were summed. If not all columns count as
    observed in all rows, the others are zero there, `alike` (n,) numbers the rows' sets of columns and
    `counts` (p,) the rows that have each; `seen` (rows of the table that take part, p) states which columns
    count as observed. `case` (n,) are weights that entities have in the data. `supports` are those of the
    columns, after the first product.
    """

    X: Floats
    shift: Floats
    scale: Floats
    keep: Bools
    held: Bools
    weight: Floats = field(default_factory=lambda: np.empty(0))
    weighted: Floats = field(default_factory=lambda: np.empty((0, 0)))
    grams: int = 0
    detail: ColumnCardinality = PLAIN
    other_columns: ProductHistory = field(default_factory=ProductHistory)
    table_rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    groups_judged: dict[bytes, bool] = field(default_factory=dict)
    alike: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    counts: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    seen: Bools | None = None
    case: Floats | None = None
    supports: Supports | None = None

    def groups(self, code: Ints, columns: int, times: int = 1, weights: Floats | None = None) -> GroupSums:
        """Report products of columns by group, (n,), to the checks; imputed rows do not count.

        Raises MessageError if rows of a group have different columns: sums of a column that only few of them
        have would be over these few.
        """
        held = np.where(self.held, code, -1)
        if len(self.alike):
            check_alike("", held, self.alike)
        summed = newly_summed(self.X, held, self.groups_judged)
        return GroupSums(held, columns, times, weights, self.detail, self.other_columns.counts, summed)

    def summed(self, code: Ints, rows: Ints) -> SummedColumns:
        """Report sums of the columns by group, (m,), of some rows to the checks."""
        return newly_summed(self.X, spread(code, rows, len(self.X)), self.groups_judged)

    def among_all(self, code: Ints) -> Ints:
        """Convert groups of entities of the fit to groups of rows of the block, -1 for left-out rows."""
        out = np.full(len(self.keep), -1, dtype=np.int64)
        out[self.keep] = code[self.held]
        return out


@dataclass(slots=True)
class StandardizedResponse:
    """The response during a fit: (n,), with mean, standard deviation, distribution, and rows of the table."""

    y: Floats
    distribution: DistributionSpec
    mean: float
    sd: float
    rows: Ints
    detail: ColumnCardinality = PLAIN
    other_columns: ProductHistory = field(default_factory=ProductHistory)
    groups_judged: dict[bytes, bool] = field(default_factory=dict)
    case: Floats | None = None

    def groups(self, code: Ints, rows: Ints | None = None, columns: int = 0) -> GroupSums:
        """Report sums and products of the response by group, (m,), of some rows or of all, to the checks."""
        summed = self.summed(code, np.arange(len(self.y)) if rows is None else rows)
        return GroupSums(
            code, columns, detail=self.detail, other_columns=self.other_columns.counts, summed=summed
        )

    def summed(self, code: Ints, rows: Ints) -> SummedColumns:
        """Report sums of the response by group, (m,), of some rows to the checks."""
        return newly_summed(self.standardized[:, None], spread(code, rows, len(self.y)), self.groups_judged)

    @property
    def standardized(self) -> Floats:
        """Mean 0, mean square 1."""
        return np.asarray((self.y - self.mean) / self.sd)


def check_alike(name: str, code: Ints, alike: Ints) -> None:
    """Require one number in `alike` (n,) for the rows of each group, (n,); -1 is no group."""
    here = code >= 0
    kinds = np.unique(np.column_stack([code[here], alike[here]]), axis=0)
    if len(kinds) > len(np.unique(code[here])):
        prefix = f"{name}: " if name else ""
        raise MessageError(f"{prefix}rows of a pattern or fold have different columns")


def by_case(case: Floats | None, n: int) -> Floats:
    """Return weights that entities have in the data, (n,): ones if they have none."""
    return np.ones(n) if case is None else case


def newly_summed(X: Floats, code: Ints, judged: dict[bytes, bool]) -> SummedColumns:
    """Return columns by group, (n,), without groups that were `judged` for an earlier product."""
    new = np.array(code)
    for group in distinct(code[code >= 0]):
        rows = code == group
        digest = hashlib.sha256(np.packbits(rows).tobytes()).digest()
        if digest in judged:
            new[rows] = -1
        judged[digest] = True
    return SummedColumns(X, new)


def spread(code: Ints, rows: Ints, n: int) -> Ints:
    """Expand groups of some rows, (m,), to all n, -1 for the others."""
    out = np.full(n, -1, dtype=np.int64)
    out[rows] = code
    return out


def staged_block(state: State) -> StandardizedBlock:
    """Return this fit's columns, or report that the fit was not started here."""
    return state.use(
        "staged block", StandardizedBlock, "this fit was not started here; ask 'stage_block' first"
    )


def staged_response(state: State) -> StandardizedResponse:
    """Return this fit's response, or report that it is not here."""
    return state.use(
        "staged response", StandardizedResponse, "this fit has no response here; ask 'stage_response' first"
    )


def standardize_block(
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints | None = None,
    n: int = 0,
    seen: Bools | None = None,
    may_be_flat: bool = False,
) -> StandardizedBlock:
    """Standardize the columns over the entities of a fit that the site has, and keep them.

    `keep` (n_seen,) are the rows of the opened block that take part, `rows` (n_k,) their positions among the
    n entities of the fit: entities that the site lacks then get its means, which are zero after
    standardizing. `seen` (n_k, p) states which columns count as observed in these rows, each standardized
    over its own; the default is all. The others are zero. Raises EstimationError if there are fewer than two
    entities, or a column is constant among them, unless it `may_be_flat`; such a column is then zero.
    """
    block = block_of(state)
    check_lengths(data.name, keep=(keep, len(block.X)))
    X = np.ascontiguousarray(dithered(data, block.X)[keep])
    n_own = len(X)
    if seen is not None and rows is not None:
        raise MessageError(
            f"{data.name}: only complete blocks can be mean-imputed, not some of their columns"
        )
    check_seen(data.name, X, seen)
    counts = np.full(X.shape[1], n_own) if seen is None else seen.sum(axis=0)
    if counts.min() < 2:
        raise EstimationError(
            f"{data.name}: {counts.min()} of the entities of this fit have its block; at least two are needed"
        )
    if seen is None:
        shift, scale = X.mean(axis=0), X.std(axis=0)
    else:
        values = [column[own] for column, own in zip(X.T, seen.T, strict=True)]
        shift, scale = (np.array([take(own) for own in values]) for take in (np.mean, np.std))
    flat = scale <= CONSTANT * np.abs(shift)  # relative, in any unit
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
        check_allocation(data.name, n * X.shape[1], X.size)
        # Imputed rows do not count among the entities of a sum.
        X, held = fill_with_mean(X, rows, n), np.isin(np.arange(n), rows)
        own, table_rows = table_rows, np.full(n, -1, dtype=np.int64)
        table_rows[rows] = own
    detail = detail_of(state, "block")
    staged = StandardizedBlock(X, shift, scale, keep, held, detail=detail, table_rows=table_rows)
    staged.alike, staged.counts, staged.seen = alike, counts, seen
    state.keep("staged block", staged, int(counts.min()))
    return staged


def signed_squares(staged: StandardizedBlock) -> Floats:
    """Mean of z |z| of every standardized column, (p,): zero if it is symmetric, at most one in size.

    Unlike the third moment, it gives no row more weight than the standard deviation does. For columns of few
    values alone, their counts determine it; if products of such columns are judged, none is reported.
    """
    if not all(one.alone for one in staged.detail.leveled):
        return np.full(staged.X.shape[1], UNRELEASED)
    Z = staged.X[staged.held]
    squares = Z * np.abs(Z)
    shapes = squares.sum(axis=0) / staged.counts if len(staged.alike) else squares.mean(axis=0)
    # The normal model serves columns of two values well unless one of these is rare.
    there = np.ones(Z.shape, dtype=bool) if staged.seen is None else staged.seen
    low, high = np.where(there, Z, np.inf).min(axis=0), np.where(there, Z, -np.inf).max(axis=0)
    between = there & (Z - low > TWO_VALUED) & (high - Z > TWO_VALUED)
    return np.where(between.any(axis=0) | (np.abs(shapes) > BALANCED), shapes, UNRELEASED)


def response_shape(response: StandardizedResponse) -> list[float]:
    """Mean of z |z| and of |z| of the response, by which a test compares it with a normal distribution.

    As for columns, no row has more weight than in the standard deviation, and those of few values have none.
    """
    if not all(one.alone for one in response.detail.leveled):
        return [UNRELEASED, UNRELEASED]
    z = response.standardized
    return [float(np.mean(z * np.abs(z))), float(np.mean(np.abs(z)))]


def check_seen(name: str, X: Floats, seen: Bools | None) -> None:
    """Require that rows have the columns that count as observed, (n, p), and some columns in each row."""
    there = ~np.isnan(X)
    own = there | True if seen is None else seen
    if own.shape != X.shape or not there[own].all() or not own.any(axis=1).all():
        raise MessageError(f"{name}: columns count as observed that its entities do not have")


def detail_of(state: State, what: str) -> ColumnCardinality:
    """Return the opened columns of few values; none if the owner does not require their check."""
    name = f"{what} detail"
    return (state.look_at(name) if name in state else None) or PLAIN


def fill_with_mean(X: Floats, rows: Ints, n: int) -> Floats:
    """Give every entity that the site lacks the mean, which is zero after standardizing."""
    filled = np.zeros((n, X.shape[1]))
    filled[rows] = X
    return filled


def require_groups(name: str, code: Ints, groups: int, each: int, columns: int = 1) -> None:
    """Require groups from 0, or -1 for entities that are left out, and some included ones.

    Limit the size of sums.

    `each` is the number of values released for a group of rows: a request may name more groups than a reply
    can hold.
    """
    if groups < 1 or len(code) == 0 or code.min() < -1 or not 0 <= code.max() < groups:
        raise MessageError(f"{name}: expected patterns or folds from 0 to {groups - 1}, or -1 for none")
    if groups > max(EMPTY_GROUPS, len(code)):
        raise MessageError(f"{name}: {groups:,} patterns or folds are more than its {len(code):,} rows")
    check_allocation(name, groups * each, len(code) * columns)
