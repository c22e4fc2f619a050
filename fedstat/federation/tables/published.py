"""The public description of a site's columns: kinds, levels and ranges that its owner published.

A site checks requests by this description and never by its rows. Otherwise a refusal would reveal data, for
instance whether ``log(income)`` can be computed, or which levels a factor has. The file::

    [income]
    kind = "number"
    range = [0.0, 1e6]
    unit = "euro a year"

    [region]
    kind = "category"
    levels = ["north", "south"]

A proposal is made at the site from its own table (:func:`propose`), for the owner to review: a range that
ends at the largest value, or a level of one person, reveals something about that person.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstat.codec import from_plain, to_plain
from fedstat.errors import PartitionError
from fedstat.federation.tables.checks import all_finite, control_problems, raise_problems
from fedstat.federation.tables.columns import (
    ColumnKind,
    LevelValue,
    column_kind,
    find_levels,
    reads_as_numbers,
)
from fedstat.federation.tables.curves import curves_of, is_curve
from fedstat.federation.tables.table import Table
from fedstat.typing import Floats

Scale: TypeAlias = Literal["linear", "log", "asinh"]
Form: TypeAlias = Literal["real", "whole", "date"]
PublishedKind: TypeAlias = ColumnKind | Literal["curve", "group"]
MOST_LEVELS = 50
"""Number of distinct values up to which an integer column is proposed with levels as well."""
FIRST = 20 * MOST_LEVELS
"""Rows by which most columns of numbers are known to have no levels."""
TINY = 1e-290
"""Below which a bound is not rounded to digits."""
DAY = re.compile(r"\d{4}-\d\d-\d\d")
DIGITS = 2
"""Significant digits of a proposed bound, rounded outwards, so that it is no row's value."""
HEAD = """\
# This site's public description of its columns: kind, range of numbers, levels of categories.
# Requests are checked against this file, and never against the rows. Review it before you start the
# site: every analyst can read it. A column that is left out is not available.
"""


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """The public description of a column: a "number", a "category", a "curve" or a "group".

    A group is a label, such as that of a patient with several records. Its labels are not listed, and models
    only use it to distinguish groups: ``(1 | patient)``, ``cluster(patient)``.

    All numbers are in `range`; without it, no logarithm, root or spline of the column is available. `levels`
    are those of a category, in the order of the model, or the codes of a number, for ``C(x)``. `knots`,
    ascending, are possible knots of splines. `unit` is the unit of measurement, for a curve that of its
    points, in words that the sites share; `domain` has the first and last possible point of a curve. If the
    column is summarized by bins, these are equally wide on its `scale`; that of ``asinh`` is linear up to
    about `around` on either side of zero, and logarithmic beyond. Its numbers have a `form`: "real", "whole",
    or "date", which are days since 1970-01-01. `ordered` says whether levels have an order in a synthetic
    table; by default those of a number do, and those of a category do not.
    """

    kind: PublishedKind
    range: tuple[float, float] | None = None
    levels: tuple[LevelValue, ...] = ()
    knots: tuple[float, ...] = ()
    unit: str = ""
    scale: Scale = "linear"
    around: float = 1.0
    domain: tuple[float, float] | None = None
    form: Form = "real"
    ordered: bool | None = None

    @property
    def nominal(self) -> bool:
        """Whether there are three or more levels without an order; the order of two does not matter."""
        ordered = self.kind != "category" if self.ordered is None else self.ordered
        return len(self.levels) > 2 and not ordered

    def check(self) -> None:
        """Require bounds and knots that ascend, and levels that differ."""
        places = [*(self.range or ())[:1], *self.knots, *(self.range or ())[1:]]
        if any(b <= a for a, b in pairwise(places)):
            raise PartitionError("a published range and its knots have to ascend: range = [low, high]")
        if len(set(self.levels)) < len(self.levels):
            raise PartitionError("a published level occurs twice")
        raise_problems(control_problems("a published column", "levels and units", (*self.levels, self.unit)))
        if self.kind == "category" and (self.range or not self.levels):
            raise PartitionError("a published category has levels = [...], and no range")
        if self.scale == "log" and not (self.range and self.range[0] > 0.0):
            raise PartitionError("a logarithmic scale needs a range above zero: range = [low, high]")
        if not 0.0 < self.around < math.inf:
            raise PartitionError("around: expected a positive number, at which the asinh scale bends")
        if (self.kind == "curve") != (self.domain is not None) or (self.domain or (0, 1))[0] >= (
            self.domain or (0, 1)
        )[1]:
            raise PartitionError("a published curve, and nothing else, has domain = [first, last]")
        if self.form != "real":
            whole = self.range is not None and all(float(x).is_integer() for x in self.range)
            if not whole or self.scale != "linear":
                raise PartitionError(
                    "whole numbers and dates need a range of whole numbers on a linear scale"
                )
        if self.kind == "curve" and (self.range or self.levels or self.knots):
            raise PartitionError("a published curve has a domain and a unit, and no more")
        if self.kind == "group" and self != PublishedColumn("group"):
            raise PartitionError("a published group has nothing but its kind: its labels are not published")

    def includes(self, other: PublishedColumn) -> bool:
        """Return whether this description allows all that another one allows: a wider range, more levels."""
        if (self.range is None) != (other.range is None):
            return False
        a, b = self.range or (0.0, 0.0), other.range or (0.0, 0.0)
        wider = a[0] <= b[0] and b[1] <= a[1]
        more = set(other.levels) <= set(self.levels) and set(other.knots) <= set(self.knots)
        return (
            wider
            and more
            and replace(self, range=b, levels=(), knots=()) == replace(other, range=b, levels=(), knots=())
        )


Published: TypeAlias = Mapping[str, PublishedColumn]
IntoPublished: TypeAlias = str | Path | Mapping[str, PublishedColumn | Mapping[str, Any]]


def read_published(text: str, where: str) -> Published:
    """Read the text of a ``columns.toml``; PartitionError names the place and not the value."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PartitionError(f"{where}: is not TOML ({type(error).__name__})") from None
    return from_plain(dict[str, PublishedColumn], content, where, PartitionError, defaults=True)


def as_published(given: IntoPublished, where: str) -> Published:
    """Take a description from a ``columns.toml``, or from a mapping of what such a file says."""
    if isinstance(given, str | Path):
        try:
            return read_published(Path(given).read_text(encoding="utf-8"), f"'{given}'")
        except OSError as error:
            raise PartitionError(f"{where}: '{given}' cannot be read ({type(error).__name__})") from None
    plain = {name: to_plain(one) if isinstance(one, PublishedColumn) else one for name, one in given.items()}
    return from_plain(dict[str, PublishedColumn], plain, where, PartitionError, defaults=True)


def write_published(published: Published) -> str:
    """Text of a ``columns.toml``."""
    return "\n".join([HEAD, *(_section(name, column) for name, column in published.items())])


def _section(name: str, column: PublishedColumn) -> str:
    lines = [f"[{json.dumps(name, ensure_ascii=False)}]", f'kind = "{column.kind}"']
    for word, ends in (("range", column.range), ("domain", column.domain)):
        if ends is not None:
            lines.append(f"{word} = [{ends[0]!r}, {ends[1]!r}]")
    for word, values in (("levels", column.levels), ("knots", column.knots)):
        if values:
            lines.append(f"{word} = [{', '.join(map(_toml, values))}]")
    if column.unit:
        lines.append(f"unit = {_toml(column.unit)}")
    if column.scale != "linear":
        lines.append(f'scale = "{column.scale}"')
    if column.around != 1.0:
        lines.append(f"around = {column.around!r}")
    if column.form != "real":
        lines.append(f'form = "{column.form}"')
    if column.ordered is not None:
        lines.append(f"ordered = {_toml(column.ordered)}")
    return "\n".join(lines) + "\n"


def _toml(value: LevelValue) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(slots=True)
class _ColumnSummary:
    """A column as its chunks pass: bounds, and the rows of every level; none of a number that has many."""

    kind: PublishedKind | None = None
    low: float = math.inf
    high: float = -math.inf
    levels: Counter[LevelValue] | None = None
    domain: tuple[float, float] | None = None
    unit: str = ""
    rows: int = 0
    distinct: bool = True
    many: bool = False
    dates: bool = True

    def add(self, series: pd.Series[Any], name: str) -> None:
        if is_curve(series):
            self.kind, self.levels, curves = "curve", Counter(), curves_of(series)
            self.domain, self.unit = curves.domain, curves.unit
            return
        whole = series.dtype == np.float64 and all_finite(series.to_numpy())
        present = series if whole else series.dropna()
        if present.empty:
            return
        are_numbers = present.dtype.kind in "iuf"
        self.rows, self.dates = self.rows + len(present), self.dates and is_dates(present)
        if present.dtype.kind == "M":
            return
        self.kind = column_kind(present, "", name)
        self.levels = Counter() if self.levels is None else self.levels
        if self.kind == "number":
            numbers = present.to_numpy(dtype=np.float64)
            self.low = min(self.low, float(numbers.min()))
            self.high = max(self.high, float(numbers.max()))
            first = len(np.unique(numbers[:FIRST]))  # shows of most columns what all values would
            may_be = self.distinct and first == len(numbers[:FIRST]) and _are_whole(numbers[:FIRST])
            self.distinct = may_be and _are_whole(numbers) and present.is_unique
            if self.many or first > 2 * MOST_LEVELS:
                self.many = True
                return
        else:
            self.distinct = False
        codes, found = pd.factorize(present.to_numpy() if are_numbers else present, sort=True)
        if self.kind == "category" or len(found) <= 2 * MOST_LEVELS:
            levels = found.tolist() if are_numbers else find_levels(pd.Series(found))
            self.levels.update(dict(zip(levels, np.bincount(codes).tolist(), strict=True)))
        self.many = self.kind == "number" and max(len(found), len(self.levels)) > 2 * MOST_LEVELS

    def withheld(self, min_level_count: int) -> str:
        """Return why a column is not proposed; empty if there is no reason."""
        if self.dates and self.rows:
            return (
                "dates; to use them as days, declare them under [data.schema] in site.toml, for example  "
                '{ type = "dates", since = "2020-01-01" }'
            )
        if self.kind == "category" and self.levels is not None:
            marked = [level for level in self.levels if isinstance(level, str) and {",", "."} & set(level)]
            if marked and reads_as_numbers(list(self.levels)):
                return (
                    "text that reads as numbers: for a text file, write decimal and thousands under [data] "
                    "in site.toml; elsewhere, convert the column"
                )
        many = self.kind == "category" and self.levels is not None and len(self.levels) > MOST_LEVELS
        if many or (self.kind == "number" and self.distinct and self.rows > MOST_LEVELS):
            return (
                "looks like an identifier: nearly every record has a value of its own. If it names groups of "
                'records, such as patients, write it into columns.toml with kind = "group"'
            )
        if self.kind == "category" and self.levels is not None:
            rare = sum(count < min_level_count for count in self.levels.values())
            if rare:
                return (
                    f"{rare} of its {len(self.levels)} levels {'has' if rare == 1 else 'have'} fewer than "
                    f"{min_level_count} records. Merge rare levels in the source, or write the column into "
                    "columns.toml with all levels; the names of levels are then public"
                )
        return ""

    def propose(self, min_level_count: int) -> PublishedColumn | None:
        if self.kind is None or self.levels is None:
            return None
        if self.kind == "curve":
            return PublishedColumn("curve", domain=self.domain, unit=self.unit)
        common = [level for level, count in self.levels.items() if count >= min_level_count]
        if self.kind == "category":
            return PublishedColumn("category", levels=tuple(common)) if common else None
        coded = not self.many and len(common) == len(self.levels) <= MOST_LEVELS
        codes = tuple(sorted(common)) if coded and all(float(x).is_integer() for x in common) else ()
        # Codes that are published say what the range is.
        low, high = (self.low, self.high) if codes else round_outwards(self.low, self.high)
        return PublishedColumn("number", (low, high) if low < high else None, codes)


def _are_whole(numbers: Floats) -> bool:
    return bool((numbers % 1 == 0).all())


def round_outwards(low: float, high: float) -> tuple[float, float]:
    """Round bounds away from one another, each to two significant digits; a sign is kept."""
    return _rounded(low, math.floor), _rounded(high, math.ceil)


def _rounded(value: float, rounding: Any) -> float:
    if abs(value) < TINY:
        outwards_is_away = value != 0.0 and (rounding is math.ceil) == (value > 0.0)
        return math.copysign(TINY, value) if outwards_is_away else 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - DIGITS + 1)
    # The next bound, not the nearest: a value that has two digits itself would be published.
    step = rounding(value / unit) + (-1 if rounding is math.floor else 1)
    further = float(f"{step * unit:.{DIGITS}g}")
    return 0.0 if further * value < 0.0 else further


def is_dates(present: pd.Series[Any]) -> bool:
    """Return whether a column without missing values holds dates, as such or as text (ISO 8601)."""
    if present.dtype.kind in "Miuf":
        return present.dtype.kind == "M"
    if pd.api.types.is_numeric_dtype(present) or isinstance(present.dtype, pd.CategoricalDtype):
        return False
    if not all(isinstance(value, str) and DAY.match(value) for value in present.iloc[:20]):
        return False
    return bool(pd.to_datetime(present, format="ISO8601", errors="coerce").notna().all())


def scan_table(table: Table, names: Sequence[str] | None = None) -> dict[str, _ColumnSummary]:
    """Read the rows of a table once, at its site, in these columns or all."""
    names = table.columns if names is None else names
    seen = {name: _ColumnSummary() for name in names}
    for chunk in table.chunks(names) if names else ():
        for name, one in seen.items():
            one.add(chunk[name], name)
    return seen


def propose(table: Table, min_level_count: int) -> dict[str, PublishedColumn]:
    """Propose a description of a table to its owner.

    Levels of fewer rows are left out, for the owner to merge or to write down.
    """
    found = {name: one.propose(min_level_count) for name, one in scan_table(table).items()}
    return {name: column for name, column in found.items() if column is not None}


def withheld_columns(table: Table, min_level_count: int) -> dict[str, str]:
    """Return why columns should not be published: dates, identifiers, and levels of fewer rows."""
    found = {name: one.withheld(min_level_count) for name, one in scan_table(table).items()}
    return {name: why for name, why in found.items() if why}


def description_problems(site: str, published: Published, table: Table) -> Iterator[str]:
    """Return the departures of a table from its description; only for the owner.

    A column without a description is no problem: it is not available for requests.
    """
    absent = [name for name in published if name not in table.columns]
    for name in absent:
        yield f"{site}: column '{name}' is published, and not in the table. Take it out of the description"
    for name, seen in scan_table(table, [name for name in table.columns if name in published]).items():
        column = published[name]
        if seen.dates and seen.kind is None and seen.levels is None and seen.rows:
            yield (
                f"{site}: column '{name}' is published as a {column.kind} and holds dates. Declare under "
                f'[data.schema] in site.toml  {name} = {{ type = "dates", since = "2020-01-01" }}, or take '
                "it out of the description"
            )
        if seen.kind is None or seen.levels is None:
            continue
        if column.kind == "group" and seen.kind != "curve":
            continue
        if seen.kind != column.kind:
            yield (
                f"{site}: column '{name}' is published as a {column.kind} and holds a {seen.kind}. Correct "
                "its kind, or remove the column from the description"
            )
        elif column.domain != seen.domain:
            yield f"{site}: curve '{name}' is published with another domain than {seen.domain}"
        elif column.range is not None and not (column.range[0] <= seen.low and seen.high <= column.range[1]):
            yield (
                f"{site}: column '{name}' has values outside its published range. Correct them in the "
                "source, widen the range, or remove the column from the description"
            )
        elif column.kind == "category" and not set(seen.levels) <= set(column.levels):
            more = len(set(seen.levels) - set(column.levels))
            yield (
                f"{site}: column '{name}' has {more:,} level(s) that its description does not list. Merge "
                "them with others in the source, add them, or remove the column from the description"
            )
