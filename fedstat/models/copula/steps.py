"""Steps of a site for a synthesis: complete rows, margins, and its noisy share of products.

Everything except completeness is released with noise, which the disclosure checks add and charge (see
:mod:`fedstat.federation.disclosure.privacy_budget`). No step fails because of the content of rows: a value
that is not a number or a listed level is in no bin, and an infinite value is at the end of the range.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.errors import DescriptionError, MessageError, PartitionError
from fedstat.federation import message
from fedstat.federation.disclosure.facts import EntityCount, FactorsRequested, FormulaFactor
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, RepeatedRelease, honest_shares
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.protocols.product_steps import (
    OPENED,
    ProductPart,
    product_steps,
)
from fedstat.kernels.ring import grouped_gram
from fedstat.models.copula.margins import INVALID, MISSING, Bins, Margin
from fedstat.models.copula.request import (
    PLACES,
    FirstRequest,
    GramRequest,
    PatternSumsRequest,
    RowProductsRequest,
)
from fedstat.privacy.zcdp import share_of_noise
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "copula"
SCORES, SCALED = "scores", "scaled scores"
ASKED = "copula columns"
NEAR = 1e-9
"""Largest difference from one of a sum of probabilities in a request."""
T = TypeVar("T")
ReadCodes: TypeAlias = Callable[[SiteData, Sequence[Bins]], Ints]


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Bins of every row and column, (n_rows, p), -1 for none, for the rows that `keep` marks."""

    bins: tuple[Bins, ...]
    codes: Ints
    keep: Bools


@dataclass(frozen=True, slots=True, eq=False)
class CutScores:
    """Scores of every row in units of 2^-PLACES, cut: (n_rows, p); the group of each row, -1 for none.

    `question` is the request without what differs between sessions, and `digest` one that is never repeated.
    `shared` names the sites whose scores they were multiplied with.
    """

    scores: Ints
    group: Ints
    requested: GramRequest
    question: str
    digest: str
    shared: set[str] = field(default_factory=set)


@contextmanager
def by_question() -> Iterator[None]:
    """Raise errors of the request alone as DescriptionError.

    Otherwise the refusal would count as depending on rows.
    """
    try:
        yield
    except (MessageError, PartitionError) as error:
        raise DescriptionError(str(error)) from error


def read_question(kind: type[T], text: str, where: str) -> T:
    """Read a coordinator's request; DescriptionError if it is invalid."""
    with by_question():
        return from_json(kind, text, where)


KEEP = message.presence("which rows take part", dtype="bool")
GROUP = message.presence("missing pattern of each row", dtype="int64")


def noisy(what: str, axes: int = 1, maskable: bool = False) -> message.ArrayDeclaration:
    """Declare sums that leave with noise."""
    behind = (EntityCount, NoiseRequired)
    return message.ArrayDeclaration(
        "noisy aggregate", what, axes, maskable=maskable, dtype="int64", behind=behind, noisy=True
    )


COMPLETE = {
    "seen": message.presence(
        "which rows have all columns asked for",
        dtype="bool",
        unpaid="who has a record is public, as the guarantee says",
    )
}
RECORDED = {"seen": replace(COMPLETE["seen"], what="which rows have a value in a column asked for")}


@step(FAMILY, releases=RECORDED, requests=message.control("names of columns"), begins=True)
def find_complete(
    data: SiteData, state: State, text: str, *, entirely: bool = False
) -> tuple[dict[str, Array], str]:
    """Return which rows have a value in one of the columns, or `entirely` in all: ``seen`` (n_rows,)."""
    missing = _missing_cells(data, state, text)
    return {"seen": ~(np.any if entirely else np.all)(missing, axis=0)}, ""


def _missing_cells(data: SiteData, state: State, text: str) -> list[Bools]:
    """Check and keep the names of a request, and return the missing cells of each column."""
    names = read_question(tuple[str, ...], text, f"{data.name}: the requested columns")
    declare_columns(data, state, names)
    state.keep(ASKED, names)
    return [series.isna().to_numpy(dtype=np.bool_) for series in series_of(data, names)]


def declare_columns(data: SiteData, state: State, names: Sequence[str]) -> None:
    """Check the requested columns against the site's columns and the owner's permissions."""
    report_columns(state, names)
    check_held(data, names)


def report_columns(state: State, names: Sequence[str]) -> None:
    """Report the requested columns to the disclosure checks."""
    state.use_columns(names)
    state.report(FactorsRequested([FormulaFactor(name, (name,)) for name in names]))


def check_held(data: SiteData, names: Sequence[str]) -> None:
    """Require columns that the site has."""
    absent = [name for name in names if name not in data.table.columns]
    if absent or not names:
        raise DescriptionError(
            f"{data.name}: has no column {', '.join(map(repr, absent)) or 'of the request'}"
        )


def series_of(data: SiteData, names: Sequence[str]) -> list[pd.Series]:
    """Return complete columns of the site's table."""
    chunks = list(data.table.chunks(tuple(names)))
    return [pd.concat([chunk[name] for chunk in chunks], ignore_index=True) for name in names]


def read_codes(data: SiteData, bins: Sequence[Bins]) -> Ints:
    """Return the bin of every value, or that it is missing or in none: (n_rows, p)."""
    return code_columns(bins, series_of(data, [one.name for one in bins]))


def code_columns(bins: Sequence[Bins], columns: Iterable[pd.Series]) -> Ints:
    """Return the bin of every value of columns, or that it is missing or in none: (n, p)."""
    out = []
    for one, values in zip(bins, columns, strict=True):
        codes = one.code(values)
        out.append(np.where((codes == MISSING) & values.notna().to_numpy(), INVALID, codes))
    return np.column_stack(out)


@step(
    FAMILY,
    "find_complete",
    takes={"keep": KEEP},
    releases={
        "levels": noisy("counts of the levels of columns, with noise"),
        "trees": noisy("counts of nested intervals of columns, with noise"),
    },
    requests=message.control("bins of the columns, variance of the noise"),
)
def release_margins(
    data: SiteData, state: State, text: str, keep: Bools, *, read: ReadCodes = read_codes
) -> tuple[dict[str, Array], str]:
    """Count the rows that `keep` marks by the bins of every column; the disclosure checks add the noise.

    ``levels`` are the counts of all columns with levels, one column after the other, ``trees`` those of all
    nodes of the other columns.
    """
    first = read_question(FirstRequest, text, f"{data.name}: the requested margins")
    bins = first.margins.bins
    with by_question():
        message.check_lengths(data.name, keep=(keep, data.table.n_rows))
        names = state.use(ASKED, tuple)
    if names != tuple(one.name for one in bins):
        raise DescriptionError(f"{data.name}: expected bins of the requested columns")
    state.report(EntityCount(int(np.count_nonzero(keep))))
    canonical = f"{to_json(first.margins)} {digest_of(keep)}"
    state.report(*counts_owed(first, canonical, [one.squared_sensitivity for one in bins]))
    coded = CodedRows(bins, np.where(keep[:, None], read(data, bins), INVALID), keep)
    state.keep("copula codes", coded, int(np.count_nonzero(keep)))
    return tally(bins, coded.codes), ""


def counts_owed(first: FirstRequest, canonical: str, squared: Sequence[int]) -> Iterator[NoiseRequired]:
    """Yield the noise on the counts of columns, which a record moves by these squares."""
    request, honest = first.margins, honest_shares(first.shares)
    for name, variance in (("levels", request.of_levels), ("trees", request.of_trees)):
        moved = [one for one, bins in zip(squared, request.bins, strict=True) if _array_of(bins) == name]
        yield NoiseRequired(
            name,
            canonical,
            sum(moved),
            share_of_noise(variance, honest),
            later=Fraction(first.later),
            shares=first.shares,
        )


def _array_of(bins: Bins) -> str:
    return "levels" if bins.levels else "trees"


def tally(bins: Sequence[Bins], codes: Ints) -> dict[str, Array]:
    """Count the codes (n, p) of columns, one column after the other: ``levels`` and ``trees``."""
    out = {"levels": [np.zeros(0, dtype=np.int64)], "trees": [np.zeros(0, dtype=np.int64)]}
    for one, column in zip(bins, codes.T, strict=True):
        out[_array_of(one)].append(one.tally(column))
    return {name: np.concatenate(parts) for name, parts in out.items()}


PROBABILITIES = message.control("probabilities of the bins, as released")


@step(
    FAMILY,
    "release_margins recall_gram",
    takes={"probabilities": PROBABILITIES, "group": GROUP},
    releases={"grams": noisy("sums of products of scores of the site's own columns, with noise", 2)},
    requests=message.control("columns of the other sites, variance of the noise"),
)
def release_gram(
    data: SiteData,
    state: State,
    text: str,
    probabilities: Floats,
    group: Ints,
    *,
    form: type[GramRequest] = PatternSumsRequest,
) -> tuple[dict[str, Array], str]:
    """Sum the products of the site's own scores above the diagonal, by group: ``grams`` (G, q (q - 1) / 2).

    With moments, squares and sums of scores follow, (G, q (q - 1) / 2 + 2 q), all in units of 4^-PLACES and
    multiplied by the scale of the group. `probabilities` are those of all bins, one column after the other,
    as computed from the released margins; `group` (n_rows,) is -1 for rows that do not take part. The scores
    are kept for the products with other sites. The one charge made here pays for the noise of all of them, so
    that this request has new noise each time; :func:`recall_gram` repeats an earlier one.
    """
    request, margins, codes, question = read_gram(data, state, text, probabilities, group, form)
    q, here = request.width(len(margins)), group >= 0
    with by_question():
        message.check_allocation(data.name, request.groups * q * q, len(group) * q)
    squared = request.squared(q, np.flatnonzero(np.bincount(group[here])).tolist())
    canonical = f"{question} {secrets.token_hex(16)}"
    owed = NoiseRequired("grams", canonical, squared, Fraction(request.variance), kept=(question, "grams"))
    state.report(EntityCount(fewest(group)), owed)
    with by_question():
        scores = request.score(margins, codes)
    return {"grams": sum_scores(state, request, scores, group, question, canonical)}, ""


def read_gram(
    data: SiteData, state: State, text: str, probabilities: Floats, group: Ints, form: type[GramRequest]
) -> tuple[GramRequest, list[Margin], Ints, str]:
    """Check a request for products: return it, the margins, the bins of all rows, and its canonical form."""
    request = read_question(form, text, f"{data.name}: the requested products")
    request.check_at(data.name)
    with by_question():
        coded = state.use("copula codes", CodedRows, "its margins come first; request 'release_margins'")
        message.check_lengths(data.name, group=(group, data.table.n_rows))
    if (group[~coded.keep] >= 0).any() or group.max(initial=-1) >= request.groups:
        raise DescriptionError(
            f"{data.name}: groups must belong to the rows of the margins, and be below {request.groups}"
        )
    margins = read_margins(data.name, coded.bins, probabilities)
    return request, margins, coded.codes, f"{to_json(request)} {digest_of(probabilities, group)}"


RUN = message.presence(
    "which earlier analysis released this",
    dtype="uint8",
    unpaid="it is the same for all rows, and shows only that the table has not changed since",
)


def repeated(kind: message.ArrayKind, what: str, axes: int = 1) -> message.ArrayDeclaration:
    """Declare an array that was charged and released before."""
    return message.ArrayDeclaration(
        kind, what, axes, dtype="int64", behind=(EntityCount, RepeatedRelease), noisy=True
    )


RECALLED = {
    "run": RUN,
    "grams": repeated("noisy aggregate", "sums of products with noise, as released before", 2),
    "shares": repeated("masked share", "shares of products with this site's noise, as released before"),
}


@step(
    FAMILY,
    "release_margins",
    takes={"probabilities": PROBABILITIES, "group": GROUP},
    releases=RECALLED,
    requests=message.control("columns of the other sites, variance of the noise"),
)
def recall_gram(
    data: SiteData,
    state: State,
    text: str,
    probabilities: Floats,
    group: Ints,
    *,
    form: type[GramRequest] = PatternSumsRequest,
) -> tuple[dict[str, Array], str]:
    """Release again what an equal request over the same records got: ``run``, ``grams`` and ``shares``.

    ``shares`` are those of the products with all other sites, one after the other. All are empty without a
    complete earlier release. Products with other sites are used up, and the scores are kept for later steps.
    """
    request, margins, codes, question = read_gram(data, state, text, probabilities, group, form)
    with by_question():
        return recall_sums(state, request, question, lambda: request.score(margins, codes), group), ""


def recall_sums(
    state: State, request: GramRequest, question: str, score: Callable[[], Ints], group: Ints
) -> dict[str, Array]:
    """Return the arrays of :func:`recall_gram`, empty ones without a complete earlier release."""
    shares = tuple(share_part(peer) for peer in request.peers)
    state.report(
        EntityCount(fewest(group)),
        RepeatedRelease("grams", question, ("grams",)),
        RepeatedRelease("shares", question, shares),
    )
    none = np.zeros(0, dtype=np.int64)
    found = state.recall(question, ("grams", *shares))
    if found is None:
        return {"run": none.astype(np.uint8), "grams": none[:, None], "shares": none}
    run, parts = found
    # Every product was released: none can be made under this charge.
    digest = f"{question} {secrets.token_hex(16)}"
    kept = CutScores(score(), group, request, question, digest, set(request.peers))
    state.forget_all(OPENED)
    state.keep("copula scores", kept, int(np.count_nonzero(group >= 0)))
    return {
        "run": np.frombuffer(run, dtype=np.uint8),
        "grams": parts["grams"],
        "shares": np.concatenate([none, *(parts[share].ravel() for share in shares)]),
    }


def share_part(peer: str) -> str:
    """Name the share of the product with another site among the parts of a release."""
    return f"share {peer}"


def sum_scores(
    state: State, request: GramRequest, scores: Ints, group: Ints, question: str, canonical: str
) -> Ints:
    """Sum products of scores that are charged, (G, ...), and keep the scores for products with others."""
    here, q = group >= 0, scores.shape[1]
    grams = grouped_gram(scores[here], scores[here], group[here], request.groups)
    sums = grams[:, *np.triu_indices(q, 1)]
    if request.with_moments:
        one = np.full((int(np.count_nonzero(here)), 1), 2**PLACES)
        totals = grouped_gram(scores[here], one, group[here], request.groups)[:, :, 0]
        sums = np.hstack([sums, np.diagonal(grams, axis1=1, axis2=2), totals])
    if not sums.size:  # one column has no own products, but its products with others are charged
        sums = np.zeros((request.groups, 1), dtype=np.int64)
    # Products opened earlier belong to other scores than this charge.
    state.forget_all(OPENED)
    kept = CutScores(scores, group, request, question, canonical)
    state.keep("copula scores", kept, int(np.count_nonzero(here)))
    return sums * request.scales[:, None]


def read_margins(site: str, bins: Sequence[Bins], probabilities: Floats) -> list[Margin]:
    """Check and read the probabilities of margins; their sender is not trusted."""
    ends = np.cumsum([one.count for one in bins])
    with by_question():
        message.check_lengths(site, probabilities=(probabilities, int(ends[-1])))
    parts = np.split(probabilities, ends[:-1])
    if not all((part >= 0.0).all() and abs(part.sum() - 1.0) < NEAR for part in parts):
        raise DescriptionError(f"{site}: expected probabilities of the bins of each column that sum to one")
    return [Margin(one, part) for one, part in zip(bins, parts, strict=True)]


def fewest(group: Ints) -> int:
    """Return the number of rows of the smallest nonempty group."""
    counts = np.bincount(group[group >= 0])
    return int(counts[counts > 0].min(initial=len(group)))


def digest_of(*arrays: Array) -> str:
    """SHA-256 of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# ---- sums over the rows of all sites ---------------------------------------------------------
#
# Sites hold different rows of the same columns. Counts and products of scores add up over the sites; the
# disclosure checks add noise at every site, or shares of it to masked sums.

ReadRows: TypeAlias = Callable[[SiteData, Sequence[Bins]], Iterable[Ints]]


def read_rows(data: SiteData, bins: Sequence[Bins]) -> Iterator[Ints]:
    """Yield the bins of rows, (m, p), chunk by chunk."""
    names = [one.name for one in bins]
    check_held(data, names)
    for chunk in data.table.chunks(names):
        yield code_columns(bins, (chunk[name] for name in names))


def only_complete(codes: Ints) -> Ints:
    """Return codes (n, p) with all cells of a row missing if one is."""
    return np.where((codes != MISSING).all(axis=1)[:, None], codes, MISSING)


SUMMED = message.control("bins of the columns, variance of the noise", common=True)


@step(
    FAMILY,
    releases={
        "levels": noisy("counts of the levels of columns, with noise", maskable=True),
        "trees": noisy("counts of nested intervals of columns, with noise", maskable=True),
    },
    requests=SUMMED,
    begins=True,
)
def sum_margins(
    data: SiteData, state: State, text: str, *, entirely: bool = False, read: ReadRows = read_rows
) -> tuple[dict[str, Array], str]:
    """Count the rows by the bins of every column, as :func:`release_margins`.

    If rows take part `entirely`, all cells of a row count as missing if one is.
    """
    first = read_question(FirstRequest, text, f"{data.name}: the requested margins")
    bins = first.margins.bins
    report_columns(state, [one.name for one in bins])
    state.report(EntityCount(data.table.n_rows))
    canonical = to_json(first.margins)
    state.report(*counts_owed(first, canonical, [one.squared_alone for one in bins]))
    totals = tally(bins, np.zeros((0, len(bins)), dtype=np.int64))
    for codes in read(data, bins):
        found = tally(bins, only_complete(codes) if entirely else codes)
        totals = {name: total + found[name] for name, total in totals.items()}
    return totals, ""


@step(
    FAMILY,
    "sum_margins",
    takes={"probabilities": PROBABILITIES},
    releases={"products": noisy("sums of products of scores of two columns, with noise", maskable=True)},
    requests=SUMMED,
)
def sum_products(
    data: SiteData,
    state: State,
    text: str,
    probabilities: Floats,
    *,
    form: type[GramRequest] = GramRequest,
    entirely: bool = False,
    read: ReadRows = read_rows,
) -> tuple[dict[str, Array], str]:
    """Sum the products of scores above the diagonal over the rows: ``products`` (q (q - 1) / 2,).

    They are in units of 4^-digits. `probabilities` are as in :func:`release_gram`; the text has their digest,
    so that all sites of a masked sum have the same.
    """
    request = read_question(RowProductsRequest, text, f"{data.name}: the requested products")
    sums = read_question(form, request.sums, f"{data.name}: the requested products")
    report_columns(state, [one.name for one in request.bins])
    if request.digest != digest_of(probabilities) or sums.peers or sums.groups != 1:
        raise DescriptionError(f"{data.name}: expected the margins of the request, and no other sites")
    margins = read_margins(data.name, request.bins, probabilities)
    q = sums.width(len(margins))
    with by_question():
        message.check_allocation(data.name, q * q, q)
    variance = share_of_noise(sums.variance, honest_shares(request.shares))
    canonical = to_json(replace(request, shares=None))
    squared = sums.squared_alone(len(margins), request.digits)
    state.report(EntityCount(data.table.n_rows))
    state.report(NoiseRequired("products", canonical, squared, variance, shares=request.shares))
    first, second = np.triu_indices(q, 1)
    total = np.zeros(len(first), dtype=np.int64)
    for codes in read(data, request.bins):
        with by_question():
            scores = sums.score(margins, only_complete(codes) if entirely else codes, request.digits)
        products = grouped_gram(scores, scores, np.zeros(len(scores), dtype=np.int64), 1)
        total += products[0, first, second]
    return {"products": total}, ""


# ---- products with another site -----------------------------------------------------------


def columns_of(data: SiteData, state: State, which: str) -> tuple[Floats, None]:
    """Return the cut scores, (n_rows, p): multiples of 2^-PLACES, which are exact in fixed point.

    Scores of the first site of a product are multiplied by the scale of each row's group.
    """
    held = state.use(*KEPT)
    if which not in (SCORES, SCALED):
        raise DescriptionError(f"{data.name}: has no columns '{which}' in this session")
    scores = np.ldexp(held.scores.astype(np.float64), -PLACES)
    return scores * (held.requested.scales[held.group, None] if which == SCALED else 1), None


def rows_of(state: State, which: str) -> Ints:
    """Return the rows of the site's table behind the scores: all, in order."""
    return np.arange(len(state.use(*KEPT).scores))


def check_planned(data: SiteData, state: State, part: ProductPart, rows: Ints, group: Ints) -> None:
    """Refuse a product that was not charged with the scores; each peer has one product."""
    held, where = state.use(*KEPT), f"{data.name}: this product with '{part.peer}'"
    product, request = part.product, held.requested
    others = product.columns_b if part.first else product.columns_a
    planned = part.bits == PLACES and request.peers.get(part.peer) == others
    # The first of the two sites scales. Both check this, so that no product is scaled twice.
    planned = planned and part.columns == (SCALED if part.first else SCORES)
    if not planned or part.peer in held.shared or not part.number.startswith(request.agreed):
        raise DescriptionError(f"{where} is not the planned one")
    if product.groups != request.groups or not np.array_equal(group, held.group[rows]):
        raise DescriptionError(f"{where} has other groups than the site's own part")
    if not np.isin(group, request.together(part.peer)).all():
        raise DescriptionError(f"{where} has entities of a pattern that lacks this site")


def behind_product(
    data: SiteData, state: State, part: ProductPart, rows: Ints, group: Ints, both: Bools, marks: Array
) -> tuple[tuple[EntityCount, NoiseRequired], Callable[[], None]]:
    """Return the noise that a share of a product must have.

    It is charged already, except for one unit, and drawn again for every product. The site cannot verify the
    description of the peer's columns. If the noise stayed the same while these columns changed, it would
    cancel in a difference.
    """
    check_planned(data, state, part, rows, group)
    held = state.use(*KEPT)
    request = held.requested
    owed = NoiseRequired(
        "share",
        f"{part.peer} {held.digest}",
        UNIT,
        Fraction(request.variance),
        kept=(held.question, share_part(part.peer)),
    )
    return (EntityCount(fewest(group)), owed), partial(held.shared.add, part.peer)


UNIT = 1
"""Squared sensitivity, small compared with those of 2^60 and more: a charge of zero is not possible."""
KEPT = ("copula scores", CutScores, "its own products come first; request 'release_gram'")


def invented_codes(data: SiteData, bins: Sequence[Bins]) -> Ints:
    """Draw bins for rows that are not there."""
    draw = np.random.default_rng(0).integers
    return np.column_stack([draw(one.count, size=data.table.n_rows) for one in bins])


def invented_rows(data: SiteData, bins: Sequence[Bins]) -> Iterator[Ints]:
    """Yield the same as one chunk."""
    yield invented_codes(data, bins)


def invented_complete(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Say that all rows are complete which are not there."""
    state.keep(ASKED, from_json(tuple[str, ...], text, data.name))
    return {"seen": np.ones(data.table.n_rows, dtype=np.bool_)}, ""


ORDER: Mapping[str, str] = {
    "open_product": "deal_product open_product release_gram",
    "share_product": "deal_product open_product share_product",
}
include(FAMILY, product_steps(columns_of, rows_of, behind_product, fills=False, planned=check_planned), ORDER)


def invented_steps(family: str) -> Mapping[tuple[str, str], message.Step]:
    """Make steps that stand for those that read rows where there are none."""
    steps = FAMILIES[family]
    runs: dict[str, Callable[..., object]] = {
        "find_complete": invented_complete,
        "release_margins": partial(release_margins, read=invented_codes),
        "sum_margins": partial(steps["sum_margins"].run, read=invented_rows),
        "sum_products": partial(steps["sum_products"].run, read=invented_rows),
    }
    return {(family, name): replace(steps[name], run=run) for name, run in runs.items()}


DRY_RUN_STEPS = invented_steps(FAMILY)
