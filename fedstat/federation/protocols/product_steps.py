"""Steps of a site in a secure product of its columns with those of another site.

A product of two sites' columns runs as :mod:`fedstat.federation.crypto.secure_product` describes; what one
site sends the other, and what a dealing site sends both, is sealed against the coordinator who carries it.
Which columns these are, and how many entities must stand behind a sum, is for the family to say:
:func:`product_steps`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np

from fedstat import codec
from fedstat.errors import MessageError, SecurityError
from fedstat.federation.crypto import secure_product as secure
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.crypto.keys import PairKeys, encode_parts
from fedstat.federation.crypto.secure_count import (
    WORD,
    CountComparison,
    deal_comparison,
    deal_counts,
    forbidden_counts,
    open_supports,
    share_of_counts,
)
from fedstat.federation.crypto.secure_product import ChecksumOperand, RowFingerprints, deal_checksum
from fedstat.federation.disclosure.facts import (
    CountedProduct,
    EntityCount,
    GroupSums,
    ProductDealer,
    RowGroups,
)
from fedstat.federation.disclosure.privacy_budget import NoiseRequired
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import (
    ArrayDeclaration,
    Step,
    aggregate,
    check_allocation,
    check_lengths,
    control,
    presence,
)
from fedstat.federation.protocols.key_agreement import keys_of
from fedstat.federation.tables.cardinality import COLUMN_MARK, column_fingerprints
from fedstat.federation.tables.supports import Supports
from fedstat.federation.tables.table import entities_of
from fedstat.kernels.ring import BLOCK, encode
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class ProductPart:
    """One side of a secure product, as the coordinator describes it to a site.

    `number` is the product's name in this session, `bits` the fractional ones, `columns` what this site
    multiplies, as its family names it; `first` tells the product's site A. `peer` is the other site,
    `dealer` who deals, empty for the coordinator. With `least`, rows in which columns of both sites are not
    zero are counted first, by the `supports` of each site; whether a count is below `least` without being
    zero becomes known to the two sites.
    """

    number: str
    product: secure.MatrixProduct
    bits: int
    columns: str
    first: bool
    peer: str
    dealer: str
    least: int = 0
    supports: tuple[int, int] = (0, 0)

    def check(self) -> None:
        """Require a minimum that a comparison can have, and supports to count by."""
        if not 0 <= self.least <= LARGEST_MINIMUM or (self.least and min(self.supports) < 1):
            raise MessageError(f"rows of a product are counted by supports, up to {LARGEST_MINIMUM:,}")

    @property
    def counts(self) -> secure.MatrixProduct:
        """The product of the supports."""
        return replace(self.product, columns_a=self.supports[0], columns_b=self.supports[1])

    def dealt_by(self, dealer: str) -> ProductDealer:
        """Tell who deals for whom."""
        return ProductDealer(dealer, (self.product.site_a, self.product.site_b))

    def digest(self, keys: PairKeys, group: Ints) -> bytes:
        """Digest of this site's description of the product and its groups, under the session of the keys."""
        # A coordinator that takes up an analysis deals before it knows under which session that went on.
        return self.digest_in(keys.session if self.dealer else "", group)

    def digest_in(self, session: str, group: Ints) -> bytes:
        """Digest of the same under the name of a session."""
        digest = self.product.digest(session, self.number, self.bits, group)
        if not self.least:
            return digest
        counted = encode_parts("fedstat count 1", digest, *map(str, (self.least, *self.supports)))
        return hashlib.sha256(counted).digest()


@dataclass(frozen=True, slots=True)
class MaskedOperand:
    """The values for the other site: part of the checksum, columns minus a random table, and their digests.

    Marks are (groups, columns, bytes), in ascending order of the groups that have rows. `supports` are those
    of the columns minus a random table, without columns if rows are not counted.
    """

    check: bytes
    columns: Ints
    supports: Array
    marks: Array


@dataclass(frozen=True, slots=True)
class OpenProduct:
    """A product that this site has opened: rows and their groups (n,), the deal, encoded columns (n, p) at A.

    B multiplies what A opened, and keeps no columns. `Z` are B's shares of the triple, flat, those of the
    checksum at the end. `own` are digests of the site's description of the product, and of the entities in
    its rows; there are `entities`, each possibly in several rows; `count` counts its rows first; `opened` has
    the boxes that were read, with their content.
    """

    part: ProductPart
    rows: Ints
    group: Ints
    own: RowFingerprints
    seed: bytes
    Z: Ints
    encoded: Ints
    checked: ChecksumOperand
    units: Floats | None
    channel: SealedChannel
    mask: bytes
    entities: int
    count: ProductCount | None = None
    opened: list[tuple[bytes, bytes]] = field(default_factory=list)

    def unseal(self, message: Array) -> bytes:
        """Open a box of the other site."""
        sealed = message.tobytes()
        # A box opens once; a step that is refused after this line may be requested again.
        for known, content in self.opened:
            if known == sealed:
                return content
        content = self.channel.open(sealed)
        self.opened.append((sealed, content))
        return content

    def read(self, message: Array) -> MaskedOperand:
        """Read what the other site opened, where its marks are those of this one."""
        product, content = self.part.product, memoryview(self.unseal(message))  # slices are not copied
        content = self.own.compare(content, self.channel.site, self.part.peer)
        one = 1 if self.part.first else 0
        width, counted = (product.columns_a, product.columns_b)[one], self.part.supports[one]
        sizes = [self.checked.bytes_opened, 8 * product.rows * width, 4 * product.rows * counted]
        ends = [0, *np.cumsum(sizes).tolist(), None]
        check, columns, supports, marked = (content[a:b] for a, b in pairwise(ends))
        X = np.frombuffer(columns, dtype=np.int64).reshape(product.rows, width).copy()
        S = np.frombuffer(supports, dtype=WORD).reshape(product.rows, counted)
        groups = len(distinct(self.group[self.own.both]))
        marks = np.frombuffer(marked if len(marked) else self._unmarked(groups * width), dtype=np.uint8)
        return MaskedOperand(bytes(check), X, S, marks.reshape(groups, width, COLUMN_MARK))

    def _unmarked(self, count: int) -> bytes:
        """Make marks for this product alone: columns without marks count again each time."""
        keyed = (hmac.digest(self.own.reported, k.to_bytes(8, "little"), "sha256") for k in range(count))
        return b"".join(one[:COLUMN_MARK] for one in keyed)

    def share(self, shown: MaskedOperand) -> tuple[Ints, Ints]:
        """Shares of product (groups, p, q) and checksum (groups,), from what the other site opened."""
        product, group, other = self.part.product, self.group, shown.columns
        Z, Z_check, *_ = split_shares(self.part, self.Z)
        check = self.checked.share(shown.check, group, Z_check, self.mask)
        if self.part.first:
            return secure.share_a(product, self.seed, self.encoded, other, group, self.mask), check
        Z_b = Z.reshape(product.shape)
        return secure.share_b(product, self.seed, other, Z_b, group, self.mask), check


@dataclass(frozen=True, slots=True)
class ProductCount:
    """Rows of a product that are counted before it is released: own supports (n, s), and names of columns.

    `shown` is what the other site opened, `comparison` the one with a minimum that has begun, `share` the own
    share of its outcome.
    """

    supports: Array
    names: Sequence[str]
    seed: bytes
    shown: MaskedOperand | None = None
    comparison: CountComparison | None = None
    share: bytes = b""

    def begin(self, part: ProductPart, shown: MaskedOperand, group: Ints, Z: Ints) -> ProductCount:
        """Take the own share of the counts, from what the other site opened, and compare it."""
        counts, (*_, Z_b, dealt) = part.counts, split_shares(part, Z)
        own = share_of_counts(counts, part.first, self.supports, self.seed, shown.supports, Z_b, group)
        comparison = CountComparison.of(counts, part.first, part.least, own, self.seed, dealt)
        return replace(self, shown=shown, comparison=comparison)

    def outcome(self, part: ProductPart, share: bytes) -> CountedProduct:
        """Say which own columns have products of few rows, from the other site's share of the outcome."""
        few = forbidden_counts(part.counts, self.share, share).any(axis=(0, 2) if part.first else (0, 1))
        names = dict.fromkeys(self.names[k] for k in np.flatnonzero(few).tolist())
        return CountedProduct(part.peer, part.least, tuple(names))


def split_shares(part: ProductPart, Z: Ints) -> list[Ints]:
    """Split what a dealer sends B: shares of the product, the checksum, the counts, their comparison."""
    sizes = [
        prod(part.product.shape),
        part.product.groups,
        prod(part.counts.shape) if part.least else 0,
    ]
    return np.split(Z, np.cumsum(sizes))


def seed_of_count(seed: bytes, digest: bytes) -> bytes:
    """Return the seed of a product's counts, from a dealer's and from what the product is."""
    return secure.bind_seed(seed, digest + b" count")


LARGEST_MINIMUM = 1000
OPENED = "product "
"""Beginning of the names under which a session keeps products that were opened."""
FEW_COLUMNS = 1024
"""Columns, or groups, of a product however few rows it has."""


def read_part(text: str) -> ProductPart:
    """Read the description of a product, as if a stranger had written it."""
    return codec.from_json(ProductPart, text, "the description of a product", defaults=True)


def check_positions(name: str, positions: Ints, n: int, array: str = "rows") -> None:
    """Require positions below n that ascend, so that no entity, or column, counts twice."""
    if len(positions) and (positions[0] < 0 or positions[-1] >= n or (np.diff(positions) <= 0).any()):
        raise MessageError(f"{name}: array '{array}' must ascend from 0 to {n - 1}")


def distinct(values: Ints) -> Ints:
    """Return the distinct values: most often all, which ascend, or a single one."""
    if len(values) < 2 or (values[1:] > values[:-1]).all():
        return values
    return values[:1] if values.min() == values.max() else np.unique(values)


def deal_product(data: SiteData, state: State, text: str, group: Ints) -> tuple[dict[str, Array], str]:
    """Deal a multiplication triple to two other sites, sealed."""
    part = read_part(text)
    state.report(part.dealt_by(data.name))
    _check_size(data.name, part, group)
    keys = keys_of(state)
    seed_a, seed_b = secure.new_seed(), secure.new_seed()
    Z_b = deal_part(part, part.digest(keys, group), (seed_a, seed_b), group)
    a, b = (SealedChannel(keys, c, f"deal {part.number}") for c in (part.product.site_a, part.product.site_b))
    return {"for_a": as_bytes(a.seal(seed_a)), "for_b": as_bytes(b.seal(seed_b + Z_b))}, ""


def _check_size(name: str, part: ProductPart, group: Ints) -> None:
    """Require no more columns and groups than the rows of a product justify: a dealer has none of its own."""
    product = part.product
    columns = max(product.columns_a + product.columns_b, sum(part.supports))
    if max(columns, product.groups) > max(FEW_COLUMNS, len(group)):
        raise MessageError(f"{name}: {columns:,} columns in {product.groups:,} groups of {len(group):,} rows")
    check_allocation(name, prod(product.shape), len(group) * columns)
    if part.least:
        check_allocation(name, prod(part.counts.shape) * part.least, len(group) * sum(part.supports))
    check_allocation(name, min(BLOCK, len(group)) * columns, len(group) * columns)


def deal_shares(product: secure.MatrixProduct, seed_a: bytes, seed_b: bytes, group: Ints) -> bytes:
    """B's shares of what a dealer deals: of the product's triple, and of the checksum's."""
    Z_b = secure.deal_triple(product, seed_a, seed_b, group)
    return Z_b.tobytes() + deal_checksum(product, seed_a, seed_b, group).tobytes()


def deal_part(part: ProductPart, digest: bytes, seeds: tuple[bytes, bytes], group: Ints) -> bytes:
    """B's shares of all that a dealer deals by seeds for a product, that for its count included."""
    bound_a, bound_b = (secure.bind_seed(seed, digest) for seed in seeds)
    Z_b = deal_shares(part.product, bound_a, bound_b, group)
    if not part.least:
        return Z_b
    seed_a, seed_b = (seed_of_count(seed, digest) for seed in seeds)
    count = deal_counts(part.counts, seed_a, seed_b, group)
    return Z_b + count.tobytes() + deal_comparison(part.counts, part.least, seed_a, seed_b).tobytes()


def mark_rows(
    data: SiteData, part: ProductPart, keys: PairKeys, digest: bytes, rows: Ints, both: Bools, own: Bools
) -> RowFingerprints:
    """Mark rows of the table, (n,), -1 where this site has none; see :class:`RowFingerprints`."""
    key = keys.secret(part.peer, f"marks {part.number}")
    return RowFingerprints.of(key, digest, entities_of(data.table)[rows], both, own)


ProductRowsOf: TypeAlias = Callable[[State, str], Ints]
ProductColumnsOf: TypeAlias = Callable[[SiteData, State, str], tuple[Array, Floats | None]]
SupportsOf: TypeAlias = Callable[[SiteData, State, str], Supports]
ProductFacts: TypeAlias = tuple[tuple[Any, ...], Callable[[], None]]
FactsOf: TypeAlias = Callable[[SiteData, State, ProductPart, Ints, Ints, Bools, Array], ProductFacts]
PlanCheck: TypeAlias = Callable[[SiteData, State, ProductPart, Ints, Ints], None]


def open_product(
    columns_of: ProductColumnsOf,
    rows_of: ProductRowsOf,
    supports_of: SupportsOf | None,
    planned: PlanCheck | None,
    data: SiteData,
    state: State,
    text: str,
    dealt: Array,
    rows: Ints | None = None,
    group: Ints | None = None,
    both: Bools | None = None,
) -> tuple[dict[str, Array], str]:
    """Send the other site this site's columns less a random table.

    `text` is a :class:`Part`, `rows` (n,) are those that take part, in the agreed order, by default all, and
    `group` (n,) the pattern of each, by default one of all: both sites send each other a mark of these and of
    who the rows are, and share nothing unless they agree. Where means are filled in, `both` (n,) says of
    which rows both sites have records, and they show each other which they have. For `dealt` see
    :func:`read_deal`.
    """
    part = read_part(text)
    own, peer = (part.product.site_a, part.product.site_b)[:: 1 if part.first else -1]
    if (own, peer) != (data.name, part.peer):
        raise MessageError(f"{data.name}: a product of '{own}' and '{peer}' is not one with '{part.peer}'")
    state.report(part.dealt_by(part.dealer))
    keys = keys_of(state)
    places = rows_of(state, part.columns)
    rows = np.arange(len(places)) if rows is None else rows
    group = np.zeros(len(rows), dtype=np.int64) if group is None else group
    check_positions(data.name, rows, len(places))
    check_lengths(data.name, group=(group, len(rows)))
    if planned is not None:
        planned(data, state, part, rows, group)
    of_table = places[rows]
    mine = of_table >= 0
    shared = mine if both is None else both
    check_lengths(data.name, both=(shared, len(rows)))
    X, units = columns_of(data, state, part.columns)
    X = X if len(rows) == len(X) else X[rows]  # ascending positions of all rows are all rows
    seed, Z = read_deal(data, state, part, dealt)
    digest = part.digest(keys, group)
    count = None
    if part.least:
        count = count_rows(supports_of, data, state, part, rows, shared, seed_of_count(seed, digest))
    seed = secure.bind_seed(seed, digest)
    if X.dtype == np.int64:  # shares of an earlier product are words already
        encoded = X
    elif planned is None:
        encoded = secure.encode_columns(X, part.bits, data.name)
    else:  # with noise, rows that are too large are never reported: no charge would pay for it
        encoded = encode(X, part.bits)[0]
    opened = (secure.open_a if part.first else secure.open_b)(part.product, seed, encoded)
    channel = SealedChannel(keys, part.peer, f"open {part.number}")
    # Both sites derive one mask, which cancels in the sum of their shares and hides each of them.
    mask = keys.secret(part.peer, f"mask {part.number}")
    check = keys.secret(part.peer, f"check {part.number}")
    checked = ChecksumOperand.of(part.product, part.first, seed, encoded, check)
    check_opened = checked.opened()
    if not part.first:
        encoded, checked = encoded[:0].copy(), replace(checked, x=checked.x[:0].copy())
    held = OpenProduct(
        part=part,
        rows=rows,
        group=group,
        own=mark_rows(data, part, keys, digest, of_table, shared, mine if both is not None else mine[:0]),
        seed=seed,
        Z=Z,
        encoded=encoded,
        checked=checked,
        units=units,
        channel=channel,
        mask=mask,
        entities=len(distinct(of_table[mine])) + int(np.count_nonzero(~mine)),
        count=count,
    )
    state.keep(f"{OPENED}{part.number}", held)
    content = b"".join((held.own.content, check_opened, opened.data))
    if count is not None:
        content += open_supports(count.supports, count.seed)
    # Marks of columns reveal which are the same: for sums with noise, more than was charged.
    if data.policy.discrete == "bits" and planned is None:
        secret = data.trust.identity.secret("column marks")
        content += column_fingerprints(X[shared], group[shared], secret)
    return {"opened": as_bytes(channel.seal(content))}, ""


def count_rows(
    supports_of: SupportsOf | None,
    data: SiteData,
    state: State,
    part: ProductPart,
    rows: Ints,
    shared: Bools,
    seed: bytes,
) -> ProductCount:
    """Prepare the supports of some rows, (n,), by which the rows of a product are counted."""
    if supports_of is None:
        raise MessageError(f"{data.name}: rows of products of this family are not counted")
    supports = supports_of(data, state, part.columns)
    # Where means are filled in, a row that one of the two lacks adds nothing to a product.
    return ProductCount(supports.columns[rows] * shared[:, None].view(np.uint8), supports.names, seed)


def read_deal(data: SiteData, state: State, part: ProductPart, dealt: Array) -> tuple[bytes, Ints]:
    """Read the dealer's seed, which must be new, and at site B its shares of the triple, else none.

    Sealed by a dealing site, plain from the coordinator.
    """
    # With the triple, the opened values reveal the columns: the party that transfers them must not read them.
    material = dealt.tobytes()
    if part.dealer:
        material = SealedChannel(keys_of(state), part.dealer, f"deal {part.number}").open(material)
    seed, triple = material[: secure.SEED_BYTES], material[secure.SEED_BYTES :]
    remember_seed(data, state, seed)
    return seed, np.frombuffer(triple, dtype=np.int64).copy()


def remember_seed(data: SiteData, state: State, seed: bytes) -> None:
    """Take no seed of a dealer twice in a session; in another one it would give another random table."""
    used: frozenset[bytes] = state.look_at("dealt") if "dealt" in state else frozenset()
    mark = hashlib.sha256(seed).digest()
    if mark in used:
        raise SecurityError(
            f"{data.name}: a dealer's seed came a second time; two products under one random table would "
            "show the difference of their columns"
        )
    state.keep("dealt", used | {mark})


def open_comparison(
    data: SiteData, state: State, text: str, opened: Array, lengths: Ints
) -> tuple[dict[str, Array], str]:
    """Compare counts with their minimum: send the other sites this site's operands less random tables.

    `text` lists the products, `opened` is what the other site opened of each, sealed, of these `lengths`. The
    site's shares of the counts stay here.
    """
    boxes = []
    for name, box in _boxes(data, text, opened, lengths):
        held = state.use(name, OpenProduct, "this product was not opened here; ask 'open_product' first")
        if held.count is None or held.count.comparison is not None:
            raise MessageError(f"{data.name}: rows of this product are not counted, or were compared before")
        count = held.count.begin(held.part, held.read(box), held.group, held.Z)
        state.keep(name, replace(held, count=count))
        assert count.comparison is not None
        boxes.append(as_bytes(held.channel.seal(count.comparison.opened())))
    return _joined(boxes), ""


def share_comparison(
    data: SiteData, state: State, text: str, opened: Array, lengths: Ints
) -> tuple[dict[str, Array], str]:
    """Send the other sites this site's shares of the outcomes of comparisons, from their operands."""
    boxes = []
    for name, box in _boxes(data, text, opened, lengths):
        held = state.use(name, OpenProduct, "this product was not opened here; ask 'open_product' first")
        if held.count is None or held.count.comparison is None or held.count.share:
            raise MessageError(f"{data.name}: no comparison has begun here; ask 'open_comparison' first")
        share = held.count.comparison.share(held.unseal(box))
        state.keep(name, replace(held, count=replace(held.count, share=share)))
        boxes.append(as_bytes(held.channel.seal(share)))
    return _joined(boxes), ""


def _boxes(data: SiteData, text: str, opened: Array, lengths: Ints) -> list[tuple[str, Array]]:
    """Tell boxes of several products apart, by the names under which these are kept."""
    numbers = codec.from_json(tuple[str, ...], text, f"{data.name}: the list of products")
    if len(numbers) != len(lengths) or (lengths < 0).any() or lengths.sum() != len(opened):
        raise MessageError(f"{data.name}: expected a sealed message for each of {len(numbers)} products")
    parts = np.split(opened, np.cumsum(lengths)[:-1])
    return [(f"{OPENED}{number}", part) for number, part in zip(numbers, parts, strict=True)]


def _joined(boxes: list[Array]) -> dict[str, Array]:
    return {"opened": np.concatenate(boxes), "lengths": np.array([len(box) for box in boxes])}


def share_product(
    behind: FactsOf,
    noisy: bool,
    data: SiteData,
    state: State,
    text: str,
    opened: Array,
) -> tuple[dict[str, Array], str]:
    """Release this site's share of a product by pattern; only the sum of both shares has a meaning.

    `text` numbers the product; `opened` is the sealed message of the other site, or its share of the result
    if rows were counted. Releases `share` (groups, p, q), `check` (groups,) and `weights` (p,) or (q,) of its
    checksum, and for columns that are not standardized `units` (p,) or (q,), by which this site's side of the
    product is multiplied. For a product with noise, which the site adds, it releases the share alone: a
    checksum would reveal the sums without noise.
    """
    name = f"{OPENED}{json.loads(text)}"
    held = state.use(name, OpenProduct, "this product was not opened here; ask 'open_product' first")
    # A share is of the entities that both have, and may rest on fewer than the site's columns do.
    state.count_entities(held.entities)
    shown = held.read(opened) if noisy else counted(data, state, held, opened)
    facts, enter = behind(data, state, held.part, held.rows, held.group, held.own.both, shown.marks)
    state.report(*facts)
    share, check = held.share(shown)
    enter()
    # A triple serves once: two openings under one random table differ by the difference of the columns.
    state.forget(name)
    if noisy:
        return {"share": share}, ""
    weights = held.checked.weights
    return {"share": share, "check": check, "weights": weights} | (
        {} if held.units is None else {"units": held.units}
    ), ""


def counted(data: SiteData, state: State, held: OpenProduct, opened: Array) -> MaskedOperand:
    """Tell what the count of a product has shown, and return what the other site opened of its columns."""
    part, count = held.part, held.count
    if count is None:
        state.report(CountedProduct(part.peer, None))
        return held.read(opened)
    if count.shown is None or not count.share:
        raise MessageError(f"{data.name}: rows of this product are counted first; ask 'share_comparison'")
    # Before any other fact: a product of few rows is refused as such.
    state.report(count.outcome(part, held.unseal(opened)))
    return count.shown


def take_share(state: State, held: OpenProduct, opened: Array) -> Ints:
    """Return this site's share (groups, p, q) of a product that stays here, for what follows from it."""
    state.count_entities(held.entities)
    share, _ = held.share(held.read(opened))
    state.forget(f"{OPENED}{held.part.number}")
    return share


def as_bytes(message: bytes) -> Array:
    """Bytes as an array that messages carry."""
    return np.frombuffer(message, dtype=np.uint8)


PART = control("shape and names of a product of two sites' columns")
GROUP = presence("missing pattern of the entities that both have", dtype="int64")
ROWS = presence("which of its entities both have, if not all", dtype="int64", optional=True)
BOTH = presence("of which both have records, where means are filled in", dtype="bool", optional=True)
SEALED = ArrayDeclaration("sealed", "columns less a random table, for one other site", dtype="uint8")
SEALED_COUNT = ArrayDeclaration(
    "sealed", "operands or outcomes of counts, masked, for other sites", dtype="uint8"
)
HIDDEN = "sealed for the other site, and the share that it serves leaves with noise"
DEALT = ArrayDeclaration("sealed", "seed and share of a random triple, for one site", dtype="uint8")


LENGTHS = control("bytes of each sealed message", dtype="int64")
COMPARISON_STEPS: Mapping[str, Step] = {
    "open_comparison": Step(
        open_comparison,
        {"opened": SEALED, "lengths": LENGTHS},
        {"opened": SEALED_COUNT, "lengths": LENGTHS},
        control("which products"),
    ),
    "share_comparison": Step(
        share_comparison,
        {"opened": SEALED_COUNT, "lengths": LENGTHS},
        {"opened": SEALED_COUNT, "lengths": LENGTHS},
        control("which products"),
    ),
}
"""Steps by which two sites compare counts of rows with a minimum (:mod:`.secure_count`)."""
COMPARISON_ORDER: Mapping[str, str] = {
    "open_comparison": "open_product open_comparison",
    "share_comparison": "open_comparison share_comparison",
    "share_product": "open_product share_comparison share_product",
}
"""Which steps stand directly before those from a comparison to the release of a product."""
PRODUCT_STEPS = ("deal_product", "open_product", *COMPARISON_STEPS, "share_product")


def product_steps(
    columns_of: ProductColumnsOf,
    rows_of: ProductRowsOf,
    behind: FactsOf,
    *,
    fills: bool,
    planned: PlanCheck | None = None,
    supports_of: SupportsOf | None = None,
) -> Mapping[str, Step]:
    """Make the steps by which sites of a family multiply their columns.

    ``columns_of(data, state, which)`` returns the columns (rows, q) of this name, at a mean square of
    one, or as words of 64 bits, and their units (q,), or None if they are standardized.
    ``rows_of(state, which)`` returns their rows in the site's table, (rows,), -1 for filled in.
    ``behind(data, state, part, rows, group, both, marks)`` returns the facts behind the products of `rows`,
    (n,), by `group`, (n,), and how to enter them. Without `fills` no mean is filled in, and all rows are of
    entities that both sites have. For products with noise, ``planned(data, state, part, rows, group)``
    refuses, before a row is read, those that were not charged; and the facts of `behind` include the noise
    that each site's own share gets before it is released: no party ever has a sum without noise.
    ``supports_of(data, state, which)`` returns the supports of the columns, by which rows of a product are
    counted before it is released.
    """
    noisy = planned is not None
    behind_sums = (EntityCount, GroupSums, RowGroups, CountedProduct)
    what = "share of the products by pattern: random but for the sum"
    share = {"share": ArrayDeclaration("masked share", what, 3, behind=behind_sums)}
    if noisy:
        rests, what = (
            (EntityCount, NoiseRequired),
            "share of the products by pattern, with this site's noise",
        )
        share = {"share": ArrayDeclaration("masked share", what, 3, dtype="int64", behind=rests, noisy=True)}
    return {
        "deal_product": Step(
            deal_product, {"group": GROUP}, {"for_a": DEALT, "for_b": DEALT}, PART, public=noisy
        ),
        "open_product": Step(
            partial(open_product, columns_of, rows_of, supports_of, planned),
            {"rows": ROWS, "group": replace(GROUP, optional=True), "dealt": DEALT}
            | ({"both": BOTH} if fills else {}),
            {"opened": replace(SEALED, behind=(ProductDealer,), unpaid=HIDDEN if noisy else "")},
            PART,
        ),
        **({} if noisy else COMPARISON_STEPS),
        "share_product": Step(
            partial(share_product, behind, noisy),
            {"opened": SEALED},
            share
            if noisy
            else {
                **share,
                "check": ArrayDeclaration(
                    "masked share", "share of a checksum of the products, by pattern", behind=behind_sums
                ),
                "weights": control("random weights of the columns in the checksum"),
                "units": aggregate(
                    "root mean squares of the columns that are multiplied", optional=True, behind=behind_sums
                ),
            },
            control("which product"),
        ),
    }
