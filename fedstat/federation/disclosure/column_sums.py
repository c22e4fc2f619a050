"""Sums of functions of one column: how many a site releases, over all its analyses, and what they expose.

The fit of a site's own rows reveals exact sums over these rows. A few functions of one column, such as x,
x^2, log(x) and their products, determine its values if the site has few rows: ten values follow from sixteen
sums. So an own fit needs a minimum of rows, and the distinct sums of functions of one column, over all
sessions, are at most a share of the rows behind them.

Sums that do not depend on coefficients (least squares, means, variances) count in masked sums too: the part
of a site in such a sum follows from the same sum without that site.

The exposure of a column is reported to the owner. Each released sum of functions of a column x is a sum over
rows of f(x). A combination of such sums with numbers is a sum of the same combination g of the functions. The
share of row i in it is g(x_i)^2 / sum g(x)^2, and its largest value over all combinations is the leverage of
the row: the diagonal of U U', where the columns of U are an orthonormal basis of the functions and a
constant. A share of 1 means that a combination is the value of one row. The functions follow from the ledger
of the site, and the values from its table. Nothing else is recorded.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import DescriptionError
from fedstat.federation.audit.event_log import AnswerRecord, SiteLedger
from fedstat.federation.disclosure.facts import COMPARISON, ColumnSums, FormulaFactor, OwnFit
from fedstat.federation.disclosure.rules import toml_line
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.tables.published import Published
from fedstat.federation.tables.table import Table
from fedstat.typing import Bools, Floats

ROWS_PER_NUMBER = 5
"""Fewest rows of an own fit for each number that it releases."""
BLOCKS = "block "
"""Begins the names of counts of rows that are averaged in blocks."""
LINEAR = ("center", "scale")
"""Functions of a function that add no new sums: means and deviations are those over all sites."""
CUBIC = 3


@dataclass(frozen=True, slots=True)
class SumsOfColumn(AnswerRecord):
    """Names of the sums of functions of a column that were released, in alphabetical order."""

    column: str
    names: tuple[str, ...]


Part: TypeAlias = tuple[float, tuple[str, ...]]
"""A function of one column: a power of it, times other functions by name."""


def own_fit_problem(data: SiteData, fact: OwnFit) -> str:
    """Return why an own fit is not shown; empty if it is.

    The reason depends on the number of rows, which is public, and on formulas, but on no value.
    """
    least = data.policy.min_own_rows
    if least:  # else the owner sets no minimum
        least = max(least, ROWS_PER_NUMBER * fact.numbers)
    if int(fact.sums.used.sum()) - fact.rank < least:
        return f"not shown: under {least} rows"
    share = data.policy.max_column_sums
    exceeds = share != "any" and _enter_sums(data, share, fact.sums)
    return "not shown: too many sums of one column" if exceeds else ""


def check_column_sums(data: SiteData, state: State, fact: ColumnSums) -> None:
    """Require that the distinct sums of functions of one column are at most a share of its rows.

    Formulas and the number of rows alone decide.
    """
    share = data.policy.max_column_sums
    if share == "any":
        return
    if column := _enter_sums(data, share, fact):
        raise DescriptionError.of_rule(
            "maximum sums of one column",
            data.name,
            f"releases at most {share:g} different sums of functions of one column for each of its rows, "
            f"over all analyses; this model needs more of column '{column}'. Use functions of '{column}' "
            "that earlier models used, or leave the site out; the owner can allow more with  "
            f"{toml_line('max_column_sums', 2 * share)}  in policy.toml",
        )


def column_sums(
    factors: Iterable[FormulaFactor], published: Published, products: bool, weights: str
) -> Mapping[str, frozenset[str]]:
    """Name the sums of functions of each column, by column."""
    parts: dict[str, dict[Part, None]] = defaultdict(dict)
    for factor in factors:
        if len(factor.columns) == 1:
            (name,) = factor.columns
            parts[name] |= dict.fromkeys(_parts(factor, published))
    return {name: frozenset(_sums(list(own), products, weights)) for name, own in parts.items() if own}


def _parts(factor: FormulaFactor, published: Published) -> list[Part]:
    """List the functions of its column in a factor; none for categories, whose levels have enough rows."""
    known = published.get(factor.columns[0])
    categories = {"C", COMPARISON} & set(factor.functions) or (known is not None and known.kind != "number")
    if categories:
        return []
    inner = [one.removeprefix("np.") for one in factor.functions if one not in LINEAR]
    function = inner[-1] if inner else ""
    if factor.written or len(inner) > 1:
        return [(0.0, (factor.text,))]
    match function:
        case "":
            return [(1.0, ())]
        case "sqrt":
            return [(0.5, ())]
        case "poly":
            degree = factor.options.get("degree", 1)
            return [(float(power), ()) for power in range(1, int(str(degree)) + 1)]
        case "bs" | "cr" | "cc" | "bbs":
            return [(0.0, (f"{factor.text}[{j}]",)) for j in range(_spline_columns(factor))]
        case _:
            return [(0.0, (function,))]


def _spline_columns(factor: FormulaFactor) -> int:
    """Return the number of columns of a spline, or a few more."""
    knots, degree = (factor.options.get(name) for name in ("knots", "degree"))
    inner = knots if isinstance(knots, int) else len(knots) if isinstance(knots, Sequence) else 0
    return inner + 1 + (degree if isinstance(degree, int) else CUBIC)


def _sums(parts: list[Part], products: bool, weights: str) -> Iterator[str]:
    """Name the sums of every function alone and squared, and of products of every two."""
    for part in parts:
        yield f"|{_name(part)}"
        yield f"|{_name(_product(part, part))}"
    if products:
        for one, other in combinations_with_replacement([(0.0, ()), *parts], 2):
            # The product of ones is the number of rows, or a sum of weights: no function of this column.
            if name := _name(_product(one, other)):
                yield f"{weights}|{name}"


def _product(one: Part, other: Part) -> Part:
    return one[0] + other[0], tuple(sorted((*one[1], *other[1])))


def _name(part: Part) -> str:
    power, functions = part
    return "*".join(([f"x^{power:g}"] if power else []) + list(functions))


def _enter_sums(data: SiteData, share: float, fact: ColumnSums) -> str:
    """Remember the sums of each column; instead, name a column whose sums are more than the policy allows."""
    rows = hashlib.sha256(fact.used.tobytes()).hexdigest()[:16] + (f" {fact.table}" if fact.table else "")
    named = dict(column_sums(fact.factors, data.published, fact.products, fact.weights))
    for name, sums in fact.blocks.items():
        named[name] = named.get(name, frozenset()) | {f"|{one}" for one in sums}
    over = {name: frozenset(f"{rows}|{one}" for one in keys) for name, keys in named.items()}
    before = released_sums(data.site_ledger, over)
    new = {name: keys - before[name] for name, keys in over.items() if keys - before[name]}
    for column, keys in new.items():
        known = data.published.get(column)
        levels = len(known.levels) if known is not None else 0
        if _count_numbers(before[column] | keys, levels) > share * int(fact.used.sum()):
            return column
    data.site_ledger.remember(*(SumsOfColumn(column, tuple(sorted(keys))) for column, keys in new.items()))
    return ""


def sums_left(data: SiteData, used: Bools, column: str) -> float:
    """Return how many more sums of a column over these rows the policy allows, at least."""
    share = data.policy.max_column_sums
    if share == "any":
        return float("inf")
    return share * int(used.sum()) - len(released_sums(data.site_ledger, [column])[column])


def _count_numbers(keys: set[str], levels: int) -> int:
    """Return of how many numbers sums of a column are functions, at most; 0 published levels if unknown."""
    groups = Counter(key.rpartition("|")[0] for key in keys)
    # All functions of a column with L values are combinations of L sums, for each set of rows and weights.
    return sum(min(n, levels or n, _most_numbers(one, n)) for one, n in groups.items())


def counted_up_to(division: str, blocks: int, end: str) -> str:
    """Name a count of rows that are averaged in blocks; counts of a division follow from its blocks."""
    return f"{BLOCKS}{division} {blocks}|{end}"


def _most_numbers(group: str, count: int) -> int:
    """Return of how many numbers sums of the same rows are functions, at most their count."""
    _, found, division = group.rpartition(f"|{BLOCKS}")
    return int(division.rpartition(" ")[2]) if found else count


def released_sums(site_ledger: SiteLedger, columns: Iterable[str]) -> dict[str, set[str]]:
    """Name the sums of columns that the site has released, in all sessions."""
    found: dict[str, set[str]] = {name: set() for name in columns}
    for record in site_ledger.records(SumsOfColumn):
        if record.column in found:
            found[record.column].update(record.names)
    return found


# ----------------------------------------------------------------------------------------------------
# Exposure: how much one row contributes to the sums that a site released, by column.

DEPENDENT = 1e-10
"""Singular value, relative to the largest, below which functions depend on each other."""


@dataclass(frozen=True, slots=True)
class ColumnExposure:
    """The largest share of one row in what was released of a column.

    Parameters
    ----------
    column : str
    share : float
        In [0, 1]; nan where the table has no value or no longer the column.
    rows : int
        Rows with a value.
    functions : int
        Functions of the column whose sums were released, and which the share includes.
    omitted : int
        Functions that cannot be computed from their names, such as columns of splines.
    """

    column: str
    share: float
    rows: int
    functions: int
    omitted: int = 0


def exposure(table: Table, site_ledger: SiteLedger) -> list[ColumnExposure]:
    """Compute the exposure of every column that releases of a site rest on, the most exposed first.

    The ledger names the columns that were used, and the sums of functions of each.
    """
    used = sorted(site_ledger.columns)
    found = []
    for name, sums in released_sums(site_ledger, used).items():
        # Functions without the rows and weights of their sums.
        functions = dict.fromkeys(sorted(one.rpartition("|")[2] for one in sums))
        found.append(column_exposure(name, _values(table, name), functions))
    return sorted(found, key=lambda one: (-np.nan_to_num(one.share, nan=-1.0), one.column))


def column_exposure(column: str, values: pd.Series, functions: Mapping[str, None]) -> ColumnExposure:
    """Compute the exposure of one column from its values and the names of functions of it."""
    known = values.dropna()
    if not len(known):
        return ColumnExposure(column, float("nan"), 0, 0)
    if not pd.api.types.is_numeric_dtype(known) or pd.api.types.is_bool_dtype(known):
        # The columns of levels are orthogonal: the leverage of a row is one over the rows of its level.
        counts = known.value_counts()
        counts = counts[counts > 0]
        return ColumnExposure(column, 1.0 / float(counts.min()), len(known), len(counts))
    x = known.to_numpy(dtype=float)
    names = functions or {"x^1": None, "x^2": None}  # means and variances at least
    columns = {name: _evaluate(name, x) for name in names}
    usable = [one for one in columns.values() if one is not None]
    return ColumnExposure(
        column, largest_leverage(usable, len(x)), len(x), len(usable), len(names) - len(usable)
    )


def largest_leverage(columns: list[Floats], n: int) -> float:
    """Return the largest leverage of n rows in the span of columns and a constant."""
    centered = [one - one.mean() for one in columns]
    sizes = [float(np.linalg.norm(one)) for one in centered]
    kept = [one / size for one, size in zip(centered, sizes, strict=True) if size > 0.0]
    if not kept:
        return 1.0 / n
    U, s, _ = np.linalg.svd(np.column_stack(kept), full_matrices=False)
    U = U[:, s > DEPENDENT * s[0]]
    return min(1.0, 1.0 / n + float(np.einsum("ij,ij->i", U, U).max()))


def _values(table: Table, column: str) -> pd.Series:
    if column not in table.columns:
        return pd.Series(dtype=float)
    return pd.concat([frame[column] for frame in table.chunks([column])], ignore_index=True)


def _evaluate(name: str, x: Floats) -> Floats | None:
    """Return the values of a function by its name, such as ``x^2*log``; None if it does not define one."""
    out = np.ones(len(x))
    with np.errstate(all="ignore"):
        for part in name.split("*"):
            if part.startswith("x^"):
                out = out * x ** float(part.removeprefix("x^"))
            elif part in ("log", "exp"):
                out = out * (np.log(x) if part == "log" else np.exp(x))
            else:
                return None
    return out if np.isfinite(out).all() else None
