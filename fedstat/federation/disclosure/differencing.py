"""Checks against what was released before: groups of rows that differ by few rows, and products of columns.

Every fit releases sums of products of its columns. Where the product of two columns is nonzero in one row
alone, its sum is the value of that row. The columns need not be in one design: sums of two fits can be
combined. So the history keeps all released sums, and no combination of them may be zero in all but a few
rows; see :mod:`fedstat.federation.disclosure.weight_spaces`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import DescriptionError, PolicyError, Remedy
from fedstat.federation.audit.event_log import AnswerRecord
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.cell_functions import find_cell_functions
from fedstat.federation.disclosure.facts import SummedProducts
from fedstat.federation.disclosure.leverage import MAX_ROW_SHARE, max_row_share
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.request_checks import check_mask
from fedstat.federation.disclosure.rules import toml_line
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.disclosure.weight_spaces import (
    ESTIMATE,
    MOST_GROUPS,
    MOST_PRODUCTS,
    ONE,
    Expressions,
    Polynomial,
    WeightSpaces,
    adds_groups,
    find_cleared,
    find_isolated,
    has_few_values,
)
from fedstat.federation.tables.columns import level_places
from fedstat.federation.tables.table import keep_result
from fedstat.typing import Bools, Floats, Ints

SAME_ROWS_REMEDY = (
    "Fit both models on the same rows: the argument complete of one takes the columns of the other"
)
OTHER_ROWS_REMEDY = Remedy(
    "Policy(small_differences='leave out')",
    f"{SAME_ROWS_REMEDY}. Or the owner lets the site leave out rows, with  "
    f"{toml_line('small_differences', 'leave out')}  in policy.toml",
)
SAME_GROUPS_REMEDY = "Use the entities, columns, folds and handling of missing blocks of an earlier fit"
SAME_OUTCOMES_REMEDY = "Keep the comparison of the earlier model, or choose a more distant one"

ESTIMATE_WEIGHTS_KEY = "weights of estimates"
COMBINATION_TOLERANCE = 1e-12
"""Size of a combination of weights, relative to the largest, below which it counts as zero."""


def check_row_difference(data: SiteData, state: State, fact: facts.RowsUsed) -> None:
    """Refuse rows that differ by a few from those of earlier releases; otherwise remember them."""
    if data.policy.remember == "nothing":
        return
    leaves_out = data.policy.small_differences == "leave out"
    remedy = SAME_ROWS_REMEDY if leaves_out else OTHER_ROWS_REMEDY
    _check_and_remember(data, np.where(fact.used, 0, -1), "rows", remedy)
    if data.memory.released is not None:
        whole = fact.used if fact.whole is None else fact.whole
        data.memory.released = data.memory.released.with_set(whole)
    if fact.events is not None:
        _check_and_remember(
            data, np.where(fact.events & fact.used, 0, -1), "outcomes of a comparison", SAME_OUTCOMES_REMEDY
        )


def check_level_difference(data: SiteData, state: State, fact: facts.LevelsRequested) -> None:
    """Refuse counts of levels that, with earlier sums, single out few rows; otherwise remember them."""
    if data.policy.remember != "all" or data.memory.released is None:
        return

    def express(made: Expressions) -> Expressed:
        sums: list[tuple[Polynomial, str]] = []
        for name, values in fact.levels.items():
            chunks = data.table.chunks([name])
            code = np.concatenate([level_places(chunk[name], values) for chunk in chunks])
            sums += summed_groups(made, np.where(fact.used, code, -1), f"levels of '{name}'").sums
        return Expressed(sums)

    check_sums(data, express, SAME_ROWS_REMEDY, "differencing")


def check_row_groups(data: SiteData, state: State, fact: facts.RowGroups) -> None:
    """Refuse groups that, with earlier ones of the site, reveal few entities; otherwise remember them.

    If the policy does not compare them with those of all sessions, a step may compare those of one.
    """
    among_all = np.full(data.table.n_rows, -1, dtype=np.int64)
    among_all[fact.rows] = fact.code
    what, remedy = "groups of entities", fact.remedy or SAME_GROUPS_REMEDY
    if data.policy.remember == "all" or (fact.of_models and data.policy.remember == "rows"):
        _check_and_remember(data, among_all, what, remedy, fact.least)
    elif fact.place:
        kept = state.look_at(fact.place) if fact.place in state else ReleasedSums.none(len(among_all))
        state.keep(fact.place, _with_groups(data, kept, among_all, what, remedy))


def _check_and_remember(
    data: SiteData, code: Ints, what: str, remedy: str | Remedy, least: int | None = None
) -> None:
    """Compare groups, (n_rows,), with the span of all groups ever released, and add them.

    Only what the groups add to the span can be refused: groups that an owner allowed by a smaller minimum,
    such as levels of a table, do not end all later sums.
    """
    memory = data.memory
    released = ReleasedSums.none(data.table.n_rows) if memory.released is None else memory.released
    memory.released = _with_groups(data, released, code, what, remedy, least)
    if data.policy.remember == "all":
        check_sums(data, lambda made: summed_groups(made, code, what), remedy)


def _with_groups(
    data: SiteData,
    released: ReleasedSums,
    code: Ints,
    what: str,
    remedy: str | Remedy,
    least: int | None = None,
) -> ReleasedSums:
    """Return a history with further groups; itself if these are combinations of earlier ones."""
    least = data.min_count if least is None else min(least, data.min_count)
    after = released.with_groups(code)
    if after.isolates(least, released):
        raise PolicyError.of_rule(
            "differencing",
            data.name,
            f"refuses {what} that differ in fewer than {least} rows from those of earlier releases, "
            "or from a combination of them: the difference would disclose these rows",
            remedy=remedy,
        )
    return after if adds_groups(after.spaces, len(released.spaces.sums)) else released


def check_weighted_estimates(data: SiteData, state: State, fact: facts.WeightedEstimates) -> None:
    """Refuse weights that with earlier ones have a combination on few rows only; otherwise remember them.

    An estimate is a function of sums that rows enter with their weights. Two estimates whose weights differ
    in one row differ by the contribution of this row. Weights are compared with those of the session, and
    with all earlier ones if the policy remembers all. In no combination may one row have a larger share than
    one of as many columns may have.
    """
    memory, everywhere, few = data.memory, data.policy.remember == "all", data.policy.min_count - 1
    released = memory.released if everywhere and memory.released is not None else None
    released = ReleasedSums.none(data.table.n_rows) if released is None else released
    before = released.spaces
    if not everywhere and ESTIMATE_WEIGHTS_KEY in state:
        before = state.look_at(ESTIMATE_WEIGHTS_KEY)
    made, columns = Expressions(before), np.zeros((fact.values.shape[1], before.n_rows))
    columns[:, fact.rows] = fact.values.T
    sums = [made.estimate(column) for column in columns]
    after = made.result().with_sums(sums)
    if len(after.sums) == len(before.sums):
        return
    shares = few >= 1 and data.policy.max_share < 1.0 and has_large_share(after.weights_of(ESTIMATE))
    if shares or (few >= 1 and find_isolated(after, len(before.sums), few, released.persons)):
        raise PolicyError.of_rule(
            "differencing",
            data.name,
            "releases no estimates under these weights: with those of earlier fits, a difference of weights "
            f"belongs to fewer than {data.min_count} rows, or almost entirely to one, and would reveal it. "
            "Use the result of the earlier fit, which is nearly the same",
        )
    if everywhere:
        memory.released = replace(released, spaces=after)
    else:
        state.keep(ESTIMATE_WEIGHTS_KEY, after)


def has_large_share(X: Floats) -> bool:
    """Return whether a combination of columns (n, q) belongs nearly to one row."""
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    U = U[:, s > COMBINATION_TOLERANCE * s.max()]
    return float(np.einsum("ij,ij->i", U, U).max()) > max_row_share(*U.shape)


@dataclass(frozen=True, slots=True)
class DescentStep(AnswerRecord):
    """The digest of what a site used at a place on the path of descent of a model."""

    model: str
    place: str
    digest: str


def check_descent(data: SiteData, state: State, fact: facts.DescentPoint) -> None:
    """Require that every model is descended along one path, over all sessions.

    Scores at chosen coefficients differ by single rows, also if they are chosen by a learning rate. So the
    site answers a model in each round at one point, for each set of sites that mask their sums: a fit goes on
    without a site that is lost, with the same settings. The first point is zero; see
    :data:`fedstat.federation.disclosure.request_checks.CHOICES`.

    A refusal follows from the request and the ledger alone.
    """
    if data.policy.remember != "all" or fact.least_squares:
        return
    earlier, new = data.site_ledger.records(DescentStep), []
    sites = hashlib.sha256(json.dumps(sorted(state.masked_among)).encode()).hexdigest()[:16]
    for place, digest in ((f"{fact.number} {sites}", fact.point), ("settings", fact.settings)):
        this = DescentStep(fact.model, place, digest)
        if not digest or this in earlier:
            continue
        new.append(this)
        if any((one.model, one.place) == (fact.model, place) for one in earlier):
            raise DescriptionError.of_rule(
                "differencing",
                data.name,
                "has answered this model along another path: with another learning_rate, "
                "local_epochs, standardize or option of the algorithm. Sums along two paths differ by single "
                "rows. Repeat the earlier fit, if necessary with more rounds, or use GLORE or FederatedGLM, "
                'which need no learning rate; the owner can allow it with  remember = "rows"  in policy.toml',
            )
    if fact.answered:
        data.site_ledger.remember(*new)


@dataclass(frozen=True, slots=True)
class MaskedSites(AnswerRecord):
    """Sites over which a masked sum was released, in alphabetical order."""

    sites: tuple[str, ...]


def check_masked_sites(data: SiteData, sites: Sequence[str]) -> None:
    """Refuse a masked sum over few sites, or one that with earlier ones reveals few.

    If a site is lost in a round, the others are requested again without it. Their replies and that of the
    lost site complete the sum over all if its reply comes late, or if a coordinator falsely reports it as
    lost. The difference is the part of that site. Masks do not help, because the sums of two rounds at nearly
    the same coefficients give the same difference. Each of the sites that are requested again can refuse, for
    all.

    A refusal follows from the lists alone, which the client has made.
    """
    check_mask(data.name, data.policy, len(sites), len(data.trust.pinned))
    least, earlier = data.policy.apart, data.site_ledger.records(MaskedSites)
    lists = [*(one.sites for one in earlier), sites]
    if least > 1 and MaskedSites(tuple(sorted(sites))) not in earlier and isolates_sites(lists, least):
        raise DescriptionError.of_rule(
            "apart",
            data.name,
            f"refuses a masked sum over {len(sites)} sites that, alone or combined with earlier ones, "
            f"reveals a sum over fewer than {least}. Repeat it when all sites of the earlier sums are "
            "available, or have the owner allow it with  apart = 1  in policy.toml",
        )


def remember_masked_sites(data: SiteData, sites: Sequence[str]) -> None:
    """Note a masked sum that is released, for :func:`check_masked_sites`."""
    if sites and data.policy.apart > 1:
        data.site_ledger.remember(MaskedSites(tuple(sorted(sites))))


def isolates_sites(lists: Sequence[Collection[str]], least: int) -> bool:
    """Return whether the last of these lists of sites adds a sum over fewer than `least` of them.

    A combination of the lists before it was released already.
    """
    names = sorted(set().union(*lists))
    known = released = ReleasedSums.none(len(names))
    for one in lists:
        known = released
        released = released.with_groups(np.array([0 if name in one else -1 for name in names]))
    return released.isolates(least, known)


# ----------------------------------------------------------------------------------------------------
# Rows behind the products of two columns.

BLOCK_ROWS, CACHED_ROWS, FIRST_ROWS = 4096, 256, 64
REMEDY = "Merge levels, or leave one of the two terms out"


@dataclass(frozen=True, slots=True, eq=False)
class ProductRows:
    """Rows behind the products of columns.

    Parameters
    ----------
    counts : (q, q) array of int
        Rows in which neither column is zero.
    shares : (q, q) array
        Largest share of one row in the sum of absolute products; zero where a bound shows that it is at most
        :data:`MAX_ROW_SHARE`.
    partly, constant : (q,) arrays of bool
        Columns that are zero in some rows, and of these the ones with a single other value.
    """

    counts: Ints
    shares: Floats
    partly: Bools
    constant: Bools


def product_rows(columns: Floats) -> ProductRows:
    """Count the rows behind every product of two columns, (q, n), and find the largest share of one row."""
    q, n = columns.shape
    counts = np.full((q, q), n, dtype=np.int64)
    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, n, BLOCK_ROWS)]
    largest = np.maximum(columns.max(axis=1, initial=0.0), -columns.min(axis=1, initial=0.0))
    zero = np.array([np.count_nonzero(column) < n for column in columns], dtype=np.bool_)
    if zero.any():
        Z = (columns[zero] != 0.0).astype(np.float32)
        counts[np.ix_(zero, zero)] = sum((Z[:, block] @ Z[:, block].T).astype(np.int64) for block in blocks)
        counts[~zero] = np.diag(counts)
        counts[:, ~zero] = np.diag(counts)[:, None]
    # Sums over some rows are at most those over all, and mostly show that no share is large.
    for some in (blocks[:1], blocks):
        with np.errstate(all="ignore"):
            sums = sum(((A := np.abs(columns[:, block])) @ A.T for block in some), np.zeros((q, q)))
            bound = np.outer(largest, largest) / sums
        if (bound <= MAX_ROW_SHARE).all():
            break
    shares = np.zeros((q, q))
    # Both columns of these products have large values somewhere; they are few, and computed row by row.
    i, j = np.nonzero(np.triu(~(bound <= MAX_ROW_SHARE) & (counts > 0)))
    if len(i):
        with np.errstate(all="ignore"):
            pairs = (columns[i, block] * columns[j, block] for block in blocks)
            found = np.max([np.abs(pair).max(axis=1) for pair in pairs], axis=0)
            shares[i, j] = shares[j, i] = np.nan_to_num(found / sums[i, j], nan=1.0)
    partly = zero & (np.diag(counts) > 0)
    constant = np.zeros(q, dtype=np.bool_)
    for k in np.flatnonzero(partly).tolist():
        of_one_value = max(np.count_nonzero(columns[k] == value) for value in (largest[k], -largest[k]))
        constant[k] = of_one_value == counts[k, k]
    return ProductRows(counts, shares, partly, constant)


def check_product_rows(data: SiteData, names: Sequence[str], found: ProductRows) -> None:
    """Require no row or enough rows behind every product of two columns, and no row with nearly all of it.

    A column of many values is also checked in the rows without an indicator: its sum over these rows is the
    sum over all rows minus the sum of the product.

    `names` (q,) are those of the columns.
    """
    policy, counts = data.policy, found.counts
    if policy.products == "any":
        return
    outside = np.diag(counts)[:, None] - counts
    outside[found.constant] = 0
    outside[:, ~found.constant] = 0
    few = [(number > 0) & (number < policy.min_level_count) for number in (np.triu(counts), outside)]
    for pairs, words in zip(few, ("'{}' and '{}' are", "'{}', and not '{}', is"), strict=True):
        for i, j in np.argwhere(pairs)[:1].tolist():
            what = f"'{names[i]}' is" if i == j else words.format(names[i], names[j])
            raise _product_refusal(
                data,
                f"requires that {what} nonzero in no row or in at least {policy.min_level_count} rows; there "
                "are fewer",
            )
    if policy.max_share >= 1.0:
        return
    for i, j in np.argwhere(np.triu(found.shares > MAX_ROW_SHARE)).tolist():
        if found.shares[i, j] > max_row_share(int(counts[i, j]), 1):
            raise _product_refusal(
                data,
                "releases no sum of products if one row makes up nearly all of it, as in that of "
                f"'{names[i]}' and '{names[j]}'",
            )


def _product_refusal(data: SiteData, what: str) -> PolicyError:
    return PolicyError.of_rule("rows behind a product", data.name, f"{what}. {REMEDY}")


# ----------------------------------------------------------------------------------------------------
# History of the columns of all releases.


def check_products(data: SiteData, state: State, fact: SummedProducts) -> None:
    """Check the products of the columns of one request, and the columns with those of all earlier ones.

    Raises
    ------
    PolicyError
        See :func:`check_product_rows`; or columns that, with earlier ones, single out few rows.
    """
    few = data.policy.min_level_count - 1
    if data.policy.products == "any" or few < 1:
        return
    parts = [*fact.chunks()]
    n = sum(map(len, parts))
    if not n:
        return
    # By column, as everything below reads them.
    columns, end = np.empty((parts[0].shape[1], n)), 0
    for part in parts:
        for start in range(0, len(part), CACHED_ROWS):
            some = part[start : start + CACHED_ROWS]
            columns[:, end : (end := end + len(some))] = some.T
    _code_indicators(columns)
    code = np.zeros(n, dtype=np.int64) if fact.code is None else fact.code
    groups = np.unique(code[code >= 0])
    weighted = columns if fact.weights is None else columns * np.sqrt(fact.weights)
    for group in groups:
        inside = weighted if len(groups) == 1 else weighted[:, code == group]
        check_product_rows(data, fact.names, product_rows(inside))
    if fact.rows is not None and len(fact.rows) == n:  # in a dry run the rows are no rows of a table
        check_sums(data, lambda made: summed_products(made, fact, columns, code), COLUMNS_REMEDY)


COLUMNS_REMEDY = "Use the columns of an earlier fit, merge levels, or leave a term out"
ROWS_OF_TABLE = "rows"


NamedSums: TypeAlias = Sequence[tuple[Polynomial, str]]
"""Sums, expressed by patterns and atoms, and the names of their columns."""


class Expressed(NamedTuple):
    """What is summed over rows, counts of rows by levels of a column, and by those of two.

    Counts of few rows that follow from the last two by subtraction are tolerated, as in a table of the
    response by a binary column: a model of these columns needs them. With other sums they may not single out
    few rows. `known` were released before, and are in the history if all releases are remembered.
    """

    sums: NamedSums
    levels: NamedSums = ()
    counts: NamedSums = ()
    known: NamedSums = ()


def check_sums(
    data: SiteData,
    express: Callable[[Expressions], Expressed],
    remedy: str | Remedy,
    rule: str = "rows behind a product",
) -> None:
    """Require that sums over rows, with all earlier ones, single out no few rows; otherwise remember them.

    Parameters
    ----------
    express : callable
        Returns what is summed, by the patterns and atoms of the history.
    remedy, rule
        Of a refusal. An owner who does not count the rows of products still compares counts of rows.
    """
    few, memory = data.policy.min_level_count - 1, data.memory
    if few < 1 or (data.policy.products == "any" and rule == "rows behind a product"):
        return
    remembered = data.policy.remember == "all"
    released = memory.released if remembered and memory.released is not None else None
    released = ReleasedSums.none(data.table.n_rows) if released is None else released
    made = Expressions(released.spaces)
    expressed = express(made)
    made.factor_atoms()
    sums, levels, counts, known = ([(made.factored(one), name) for one, name in part] for part in expressed)
    sums = [*sums, *levels]
    before = made.result()
    if not remembered:
        before = before.with_sums(one for one, _ in known)
    first, after = len(before.sums), before.with_sums(one for one, _ in sums)
    whole = after.with_sums(one for one, _ in counts)
    if len(whole.sums) == first:
        return
    persons = released.persons
    cleared = find_cleared(whole, first, few, persons)
    if any(a not in cleared for one in whole.sums[first:] for _, a in one):  # else nothing is left to judge
        isolated = find_isolated(after, first, few, persons, cleared=cleared)
        if counts and not isolated:
            own = {frozenset(one.items()) for one, _ in (*counts, *levels)}
            tolerated = {k for k, one in enumerate(whole.sums) if frozenset(one.items()) in own}
            isolated = find_isolated(whole, len(after.sums), few, persons, tolerated, cleared)
        if isolated:
            names = {frozenset(one.items()): name for one, name in (*counts, *sums)}
            involved = dict.fromkeys(names[frozenset(whole.sums[k].items())] for k in isolated)
            raise PolicyError.of_rule(
                rule,
                data.name,
                "refuses sums that, combined with each other or with those of earlier releases, single out "
                f"fewer than {few + 1} rows: {', '.join(involved)}",
                remedy=remedy,
            )
    require_few_functions(data, whole, first, persons)
    if remembered:
        memory.released = replace(released, spaces=whole.kept(released.spaces))


def require_few_functions(data: SiteData, spaces: WeightSpaces, first: int, persons: Ints | None) -> None:
    """Refuse sums from `first` on, if they add too many functions of one column over some of its rows."""
    share = data.policy.max_column_sums
    if share == "any":
        return
    found = find_cell_functions(
        spaces, first, share, data.policy.min_own_rows, persons, partial(_has_many_numbers, data)
    )
    if found is not None:
        column, sums, rows = found
        raise PolicyError.of_rule(
            "maximum sums of one column",
            data.name,
            f"releases at most {share:g} different sums of functions of one column for each row, also of a "
            f"combination of levels; {sums} sums of column {column!r} would be known of {rows} rows. Merge "
            f"levels, or leave functions of {column!r} out",
        )


def _has_many_numbers(data: SiteData, name: str) -> bool:
    """Return whether a name is that of a column of the table with many numbers."""
    if name not in data.table.columns:
        return False

    def judge() -> bool:
        column = pd.concat([chunk[name] for chunk in data.table.chunks([name])], ignore_index=True).dropna()
        is_number = pd.api.types.is_numeric_dtype(column)
        return is_number and not has_few_values(column.to_numpy(dtype=np.float64))

    return keep_result(data.table, ("many numbers", name), judge)


def summed_products(made: Expressions, fact: SummedProducts, columns: Floats, code: Ints) -> Expressed:
    """Express the products of every two columns (q, n) and of each with one, by group and with weights."""
    assert fact.rows is not None
    summed = np.array(fact.summed or [True] * len(fact.names), dtype=bool)
    columns = columns if summed.all() else columns[summed]
    rows, ones = fact.rows, np.ones(columns.shape[1])
    every = len(rows) == made.n and bool((np.diff(rows) == 1).all())

    def in_table(values: Floats) -> Floats:
        if every:
            return values
        column = np.zeros(made.n)
        column[rows] = values
        return column

    read = [
        one for one, kept in zip(fact.read or [(name,) for name in fact.names], summed, strict=True) if kept
    ]
    made_of = [made.of(in_table(ones))]
    made_of += [
        made.computed_from(names, made.of(in_table(column)))
        for names, column in zip(read, columns, strict=True)
    ]
    weight = made_of[0] if fact.weights is None else made.of(in_table(fact.weights))
    names = [ROWS_OF_TABLE, *(repr(name) for name, kept in zip(fact.names, summed, strict=True) if kept)]
    leveled = [all(not a for _, a in one) for one in made_of]
    groups, by_group = np.unique(code[code >= 0]), [ONE]
    if len(groups) > 1 or (code < 0).any():
        within = np.full(made.n, -1)
        within[fact.rows] = code
        by_group = [made.rows(within == group) for group in groups]
    pairs = [(0, j) for j in range(len(made_of))]
    if fact.multiplied:
        several = combinations_with_replacement(range(1, len(made_of)), 2)
        many = sum(leveled) ** 2 * len(groups) > 2 * MOST_PRODUCTS
        pairs += [(i, j) for i, j in several if not (many and leveled[i] and leveled[j])]
    levels = [j for j in range(1, len(made_of)) if made.is_indicator(made_of[j])]
    if fact.weights is not None or len(by_group) > 1:
        levels = []
    sums, of_levels, of_two = (list[tuple[Polynomial, str]]() for _ in range(3))
    weighted = [[made.product(column, weight, group) for group in by_group] for column in made_of]
    for i, j in pairs:
        counts = not j or (j in levels and (not i or (i in levels and i != j)))
        chosen = sums if not counts else of_two if i else of_levels
        name = names[j] if i in (0, j) else f"{names[i]} and {names[j]}"
        chosen += [(made.product(made_of[i], one), name) for one in weighted[j]]
    return Expressed(sums, of_levels, of_two)


def summed_groups(made: Expressions, code: Ints, name: str) -> Expressed:
    """Express the counts of rows by group, (n_rows,), -1 for none."""
    groups = np.unique(code[code >= 0])
    many = len(groups) > MOST_GROUPS
    return Expressed([(made.rows(code == group), name) for group in groups if not many])


def _code_indicators(columns: Floats) -> None:
    """Replace columns of two values, (q, n), by indicators of the larger one, in whatever coding."""
    for column in columns:
        few = len(np.unique(column[:FIRST_ROWS])) <= 2  # rules out most
        if few and len(np.unique(column)) == 2 and (column != 0.0).all():
            column[:] = column == column.max()
