"""Running sums: secure products of fixed columns with numbers that change in every round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import MessageError, SecurityError
from fedstat.federation.crypto import secure_product as running
from fedstat.federation.crypto import secure_product as secure
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.crypto.keys import PairKeys
from fedstat.federation.crypto.secure_product import read_own_rows
from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights, ProductDealer
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import (
    ArrayDeclaration,
    Request,
    Step,
    check_allocation,
    check_lengths,
    presence,
)
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import keys_of
from fedstat.federation.protocols.product_steps import (
    DEALT,
    FEW_COLUMNS,
    PART,
    SEALED,
    ProductPart,
    as_bytes,
    check_positions,
    mark_rows,
    read_part,
    remember_seed,
)
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels import ring
from fedstat.kernels.ring import BLOCK, fractional_bits
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of a site in running sums: sums of its columns with numbers that another site computes in rounds.
#
# As in :mod:`fedstat.federation.crypto.secure_product`, the columns are opened once. In every round the other
# site seals its message by a function here, in a step of its family. Messages from one site to the other are
# sealed against the coordinator, who learns neither numbers nor sums. The columns come with digests of their
# entities, and nothing is sent unless the numbers are of the same entities.
#

LEAST_UNIT = 2.0**-200
ROUND_BYTES = 8


@dataclass(slots=True)
class OpenedColumns:
    """Columns of this site that were opened: encoded, (n, p + 1) with their check and its weights.

    They are in units (p,) of their root mean squares; `taken` rounds have come.
    """

    part: ProductPart
    seed: bytes
    encoded: Ints
    weights: Ints
    units: Floats
    keys: PairKeys
    taken: int = 0


@dataclass(slots=True)
class TakenColumns:
    """The opened columns of another site, E (n, p + 1), with this one's share Z (p + 1, T) of the triples.

    `rows` (n,) are the positions of its entities here, `of_table` (n,) those in the site's table; `reported`
    is the number of past rounds.
    """

    part: ProductPart
    seed: bytes
    E: Ints
    Z: Ints
    rows: Ints
    of_table: Ints
    keys: PairKeys
    reported: int = 0


def deal_sums(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Deal the triples of all rounds to two other sites, sealed."""
    part, keys = read_part(text), keys_of(state)
    state.report(part.dealt_by(data.name))
    columns = part.product.columns_a + part.product.columns_b
    if columns > max(FEW_COLUMNS, part.product.rows):
        raise MessageError(f"{data.name}: {columns:,} columns and rounds of {part.product.rows:,} rows")
    check_allocation(data.name, part.product.rows, data.table.n_rows)
    check_allocation(data.name, BLOCK * columns, part.product.rows)
    bound, boxes, seeds = part.digest(keys, NO_GROUPS), [], [secure.new_seed(), secure.new_seed()]
    share = running.deal_round_triples(part.product, *(secure.bind_seed(seed, bound) for seed in seeds))
    for site, message in zip(
        (part.product.site_a, part.product.site_b), (seeds[0], seeds[1] + share.tobytes()), strict=True
    ):
        boxes.append(as_bytes(SealedChannel(keys, site, f"deal sums {part.number}").seal(message)))
    return dict(zip(("for_a", "for_b"), boxes, strict=True)), ""


NO_GROUPS = np.empty(0, dtype=np.int64)
RunningColumnsOf: TypeAlias = Callable[[SiteData, State, str, Ints], tuple[Floats, Ints]]
RunningRowsOf: TypeAlias = Callable[[State], Ints]


def open_dealt(
    data: SiteData, state: State, text: str, dealt: Array
) -> tuple[ProductPart, bytes, bytes, PairKeys]:
    """Take a dealer's message: the description, the bound seed, what came with it; and the keys."""
    part, keys = read_part(text), keys_of(state)
    own, peer = (part.product.site_a, part.product.site_b)[:: 1 if part.first else -1]
    if (own, peer) != (data.name, part.peer):
        raise MessageError(f"{data.name}: sums of '{own}' with '{peer}' are not with '{part.peer}'")
    state.report(part.dealt_by(part.dealer))
    material = dealt.tobytes()
    if part.dealer:
        material = SealedChannel(keys, part.dealer, f"deal sums {part.number}").open(material)
    seed, rest = material[: secure.SEED_BYTES], material[secure.SEED_BYTES :]
    remember_seed(data, state, seed)
    bound = secure.bind_seed(seed, part.digest(keys, NO_GROUPS))
    return part, bound, rest, keys


def channel_of(part: ProductPart, keys: PairKeys, t: int = -1) -> SealedChannel:
    """Make the channel of one round, or by default of what is opened: a round may be passed over."""
    return SealedChannel(keys, part.peer, f"{part.number} round {t}" if t >= 0 else f"open {part.number}")


def open_columns(
    columns_of: RunningColumnsOf, data: SiteData, state: State, text: str, only: Ints, dealt: Array
) -> tuple[dict[str, Array], str]:
    """Send another site, once and sealed, this one's columns minus a random table.

    They are of its entities at positions `only` (n,), and come with digests of these.
    """
    part, seed, _, keys = open_dealt(data, state, text, dealt)
    X, of_table = columns_of(data, state, part.columns, only)
    units = np.sqrt(np.mean(X**2, axis=0))
    units[units == 0.0] = 1.0
    encoded = secure.encode_columns(X / units, part.bits, data.name)
    checked, weights = running.append_check_column(encoded)
    opened = secure.open_a(part.product, seed, checked)
    state.keep(part.number, OpenedColumns(part, seed, checked, weights, units, keys))
    held = of_table >= 0
    marks = mark_rows(data, part, keys, part.digest(keys, NO_GROUPS), of_table, held, held)
    return {"opened": as_bytes(channel_of(part, keys).seal(marks.content + opened.tobytes()))}, ""


def take_columns(
    rows_of: RunningRowsOf, data: SiteData, state: State, text: str, dealt: Array, opened: Array, rows: Ints
) -> tuple[dict[str, Array], str]:
    """Take what another site opened, whose entities are at `rows` (n,) here; nothing leaves.

    A SecurityError where its rows are of other entities.
    """
    part, seed, share, keys = open_dealt(data, state, text, dealt)
    check_lengths(data.name, rows=(rows, part.product.rows))
    every = rows_of(state)
    check_positions(data.name, rows, len(every))
    content, of_table = memoryview(channel_of(part, keys).open(opened.tobytes())), every[rows]
    both = read_own_rows(content, len(rows))
    marks = mark_rows(data, part, keys, part.digest(keys, NO_GROUPS), of_table, both, np.ones_like(both))
    opened = np.frombuffer(bytes(marks.compare(content, data.name, part.peer)), dtype=np.int64)
    E = opened.reshape(part.product.shape_a)
    Z = np.frombuffer(share, dtype=np.int64).reshape(part.product.shape[1:])
    state.keep(f"taken {part.number}", TakenColumns(part, seed, E, Z, rows, of_table, keys))
    return {}, ""


def name_of(columns: str, site: str) -> str:
    """Name the sums of a site's columns, as its family calls them."""
    return f"sums of {columns} of {site}"


def taken_of(state: State, columns: str, site: str, of_table: Ints) -> TakenColumns:
    """Return the columns that another site opened here, for numbers of these rows of the table, (n,).

    Raises a SecurityError if the rows are not those that were compared: a fit may have begun again since.
    """
    absent = f"took no columns of '{site}' in this session"
    taken = state.use(f"taken {name_of(columns, site)}", TakenColumns, absent)
    if not np.array_equal(of_table[taken.rows[taken.rows < len(of_table)]], taken.of_table):
        raise SecurityError(
            f"{state.site}: the entities of this fit are others than when '{site}' opened its columns; "
            "nothing was released"
        )
    return taken


def seal_sums(data: SiteData, state: State, taken: TakenColumns, values: Floats) -> Array:
    """Seal what shows a site the sums of its columns with some numbers, (n,) of its entities."""
    t, product = taken.reported, taken.part.product
    check_lengths(data.name, values=(values, product.rows))
    if t >= product.columns_b:
        raise MessageError(f"{data.name}: more rounds of sums than random numbers were dealt for")
    state.report(EntityCount(len(values)), ExternalWeights(values, "residuals"))
    size = max(float(np.sqrt(np.mean(values**2))), LEAST_UNIT)
    unit = 2.0 ** np.ceil(np.log2(size))
    encoded = secure.encode_columns(values[:, None] / unit, taken.part.bits, data.name)[:, 0]
    f, s = running.mask_round_values(product, taken.seed, taken.E, taken.Z, encoded, t)
    # Counted before it leaves: no random column serves twice.
    taken.reported += 1
    content = np.array([unit]).tobytes() + s.tobytes() + f.tobytes()
    return as_bytes(t.to_bytes(ROUND_BYTES, "little") + channel_of(taken.part, taken.keys, t).seal(content))


def open_sums(state: State, columns: str, shown: Array) -> Floats:
    """Open what another site sealed: sums of the columns with its numbers, (p,)."""
    absent = "opened no such columns in this session"
    held = state.use(name_of(columns, state.site), OpenedColumns, absent)
    box = shown.tobytes()
    t = int.from_bytes(box[:ROUND_BYTES], "little")
    if not held.taken <= t < held.part.product.columns_b:
        raise MessageError(f"{state.site}: expected a round of sums that has not been answered")
    message = channel_of(held.part, held.keys, t).open(box[ROUND_BYTES:])
    held.taken = t + 1
    unit, words = float(np.frombuffer(message[:8])[0]), np.frombuffer(message[8:], dtype=np.int64)
    both = words[held.part.product.columns_a :], words[: held.part.product.columns_a]
    sums = running.unmask_round_sums(held.part.product, held.seed, held.encoded, held.weights, both, t)
    return np.asarray(ring.decode(sums, 2 * held.part.bits) * unit * held.units)


SHOWN = ArrayDeclaration(
    "sealed", "residuals less random numbers, for the site whose columns they meet", dtype="uint8"
)


def running_steps(columns_of: RunningColumnsOf, rows_of: RunningRowsOf) -> Mapping[str, Step]:
    """Make the steps that open columns for running sums.

    ``columns_of(data, state, which, only)`` gives those that are called so of some entities, (n, p), and
    their rows of the site's table, (n,), -1 for filled in; ``rows_of(state)`` the rows of the table that the
    numbers are of.
    """
    dealt = {"dealt": DEALT}
    return {
        "deal_sums": Step(deal_sums, {}, {"for_a": DEALT, "for_b": DEALT}, PART),
        "open_columns": Step(
            partial(open_columns, columns_of),
            {
                **dealt,
                "only": presence("positions of entities among its own", dtype="int64"),
            },
            {"opened": ArrayDeclaration("sealed", SEALED.what, dtype="uint8", behind=(ProductDealer,))},
            PART,
        ),
        "take_columns": Step(
            partial(take_columns, rows_of),
            {
                **dealt,
                "opened": SEALED,
                "rows": presence("positions of another's entities", dtype="int64"),
            },
            {},
            PART,
        ),
    }


# ----------------------------------------------------------------------------------------------------
# Running sums of sites' columns with the numbers of one site: the first requests.


@dataclass(frozen=True, slots=True, eq=False)
class ColumnOpening:
    """Columns of a site, `width` in number, that are opened once for some `rounds` of sums.

    `columns` is what its family calls them; they are of its entities at positions `only` (m,) among its own,
    and at `rows` (m,) among those of the fit.
    """

    site: str
    columns: str
    width: int
    only: Ints
    rows: Ints
    rounds: int


@dataclass(frozen=True, slots=True)
class RunningSums:
    """The opened columns for sums with numbers of `holder`, of `n` entities."""

    product_session: SecureProductSession
    holder: str
    openings: Sequence[ColumnOpening]
    n: int

    def dealers(self, sites: Sequence[str]) -> dict[str, str]:
        """Return the dealer for each site and the holder; a ModelError if there is none."""
        owners = dict.fromkeys(one.site for one in self.openings)
        return {k: self.product_session.dealer(k, self.holder, sites) for k in owners}

    def begin(self, dealers: Mapping[str, str]) -> FitProtocol[None]:
        """Deal, and open the columns; keys are agreed, and columns are ready."""
        parts = [self._part(one, dealers[one.site]) for one in self.openings]
        replies = iter((yield list(self._deal_requests(parts))))
        dealt = [
            self._dealt(next(replies).arrays) if part.dealer else deal_at_coordinator(part) for part in parts
        ]
        request, together = self.product_session.request, list(zip(self.openings, parts, dealt, strict=True))
        opened = yield [
            request(one.site, "open_columns", to_json(part), only=one.only, dealt=for_a)
            for one, part, (for_a, _) in together
        ]
        yield [
            request(
                self.holder,
                "take_columns",
                to_json(self._part(one, part.dealer, first=False)),
                dealt=for_b,
                opened=reply.arrays["opened"],
                rows=one.rows,
            )
            for (one, part, (_, for_b)), reply in zip(together, opened, strict=True)
        ]

    def _part(self, one: ColumnOpening, dealer: str, first: bool = True) -> ProductPart:
        """Describe one opening to one side."""
        return ProductPart(
            number=name_of(one.columns, one.site),
            product=running.describe_rounds(one.site, self.holder, len(one.rows), one.width, one.rounds),
            bits=fractional_bits(self.n),
            columns=one.columns,
            first=first,
            peer=self.holder if first else one.site,
            dealer=dealer,
        )

    def _deal_requests(self, parts: Sequence[ProductPart]) -> Iterator[Request]:
        for part in parts:
            if part.dealer:
                yield self.product_session.request(part.dealer, "deal_sums", to_json(part))

    def _dealt(self, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
        return arrays["for_a"], arrays["for_b"]


def deal_at_coordinator(part: ProductPart) -> tuple[Array, Array]:
    """Deal at the coordinator, who sits at no site."""
    seeds = secure.new_seed(), secure.new_seed()
    digest = part.product.digest("", part.number, part.bits, NO_GROUPS)
    share = running.deal_round_triples(part.product, *(secure.bind_seed(seed, digest) for seed in seeds))
    return as_bytes(seeds[0]), as_bytes(seeds[1] + share.tobytes())
