"""Checks of the tables of a partition, each with a remedy for the analyst.

Every check yields one line per problem; :func:`refuse` raises them together, so that one run shows all
problems. Lines name sites, columns and counts, never a value.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import PartitionError
from fedstat.typing import Floats

PARTIAL = ("condition", "drop", "error", "mean")
ALIGN = ("clear", "private")
LAYOUTS = ("vertical", "horizontal")
MAX_LINES = 10
CONTROL_CHARACTERS = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
"""Control characters, separators of lines, marks of direction, and halves of characters."""
KEY_KINDS = {
    "integer": "whole numbers",
    "string": "text",
    "floating": "decimal numbers",
    "boolean": "true/false",
    "datetime64": "dates",
    "datetime": "dates",
    "date": "dates without a time of day",
}
ZONED = "times with a time zone"
KEY_CASTS = {
    "whole numbers": 'astype("int64")',
    "text": "astype(str)",
    "dates": "pd.to_datetime",
    "dates without a time of day": "pd.to_datetime",
    ZONED: '.dt.tz_convert("UTC").dt.tz_localize(None)',
}
UNFIT_CASTS = {"bytes": '.str.decode("utf-8")'}
"""How a key of a type that is no key becomes text; others by ``astype(str)``."""


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one :class:`PartitionError` that lists all problems, if there are any."""
    lines = list(problems)
    if not lines:
        return
    if len(lines) == 1:
        raise PartitionError(lines[0])
    shown = [f"  - {line}" for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(f"  - and {len(lines) - MAX_LINES} more")
    raise PartitionError("\n".join([f"the tables have {len(lines)} problems:", *shown]))


def non_key_columns(frame: pd.DataFrame, key: Iterable[str]) -> list[str]:
    """Columns of a table that are not of its key."""
    key = set(key)
    return [name for name in frame.columns if name not in key]


def one_key_name(
    frames: Mapping[str, pd.DataFrame], on: Mapping[str, str]
) -> tuple[dict[str, pd.DataFrame], str]:
    """Give the key, which has another name at each site, the name at the first site.

    Raises PartitionError if `on` does not name one column of every site, or another column has this name.
    """
    if set(on) != set(frames) or not all(isinstance(name, str) for name in on.values()):
        raise PartitionError(
            "`on` must have one name of a column for every site, such as "
            f"{{{', '.join(f'{site!r}: ...' for site in frames)}}}."
        )
    common, tables = on[next(iter(frames))], {}
    for site, frame in frames.items():
        if on[site] not in frame.columns:
            there = _listed(frame.columns)
            raise PartitionError(f"site {site!r} has no key column {on[site]!r}. It has {there}.")
        if on[site] != common and common in frame.columns:
            raise PartitionError(
                f"site {site!r}: column {common!r} has the name of the key at another site. Rename it."
            )
        tables[site] = frame.rename(columns={on[site]: common})
    return tables, common


def key_names(on: str | Sequence[str] | None) -> tuple[str, ...]:
    """Write the key as a tuple of column names, empty for None."""
    names = (on,) if isinstance(on, str) else tuple(on if on is not None else ())
    if (on is not None and not names) or len(set(names)) < len(names):
        raise PartitionError("`on` must be the name of the key column, or a list of different names.")
    if not all(isinstance(name, str) for name in names):
        raise PartitionError("`on` must be the name of the key column, or a list of names: expected text.")
    return names


def linkage_problems(
    tables: Mapping[str, pd.DataFrame], key: Sequence[str], *, new_data: bool
) -> Iterator[str]:
    """Problems of one table per site that are to be linked by a key."""
    columns = {client: non_key_columns(frame, key) for client, frame in tables.items()}
    yield from key_problems(tables, key)
    yield from shared_column_problems(columns)
    yield from content_problems(tables, columns, new_data=new_data)


def column_split_problems(
    table: pd.DataFrame, columns: Mapping[str, Sequence[str]], key: Sequence[str], *, new_data: bool
) -> Iterator[str]:
    """Problems of one table whose columns are to be divided among sites."""
    problems = [*site_problems(columns), *one_key_problems(table, key)]
    for client, names in columns.items():
        problems += listed_column_problems(client, names, table, key)
    yield from problems
    yield from shared_column_problems(columns)
    if not problems:
        yield from content_problems(dict.fromkeys(columns, table), columns, new_data=new_data)


def row_split_problems(table: pd.DataFrame, by: str, key: Sequence[str], *, new_data: bool) -> Iterator[str]:
    """Problems of one table whose rows are to be divided among sites."""
    if by not in table.columns:
        yield f"the table has no column {by!r} to split by. It has {_listed(table.columns)}."
        return
    if by in key:
        yield f"column {by!r} cannot name the site and be part of the key. Leave it out of `on`."
    unnamed = int(table[by].isna().sum())
    if unnamed:
        yield (f"column {by!r}: {unnamed:,} rows name no site. Drop these rows or fill the site in.")
    yield from _absent_key_problems("the table", table, key)
    names = non_key_columns(table, [*key, by])
    yield from content_problems({"": table}, {"": names}, new_data=new_data)


def one_key_problems(table: pd.DataFrame, key: Sequence[str]) -> Iterator[str]:
    """Problems of the key of one table that is to be split."""
    absent = list(_absent_key_problems("the table", table, key))
    yield from absent
    if key and not absent:
        yield from unfit_key_problems("the table", table, key)
        for name in key:
            yield from _kind_problems({"": table[name]}, name)


def listed_column_problems(
    client: str, names: Sequence[str], table: pd.DataFrame, key: Sequence[str]
) -> Iterator[str]:
    """Problems of the list of a site's columns."""
    if isinstance(names, str):
        yield f"site {client!r}: expected a list of column names, received text. Write [{names!r}]."
        return
    absent = [name for name in names if name not in table.columns]
    if absent:
        yield f"site {client!r}: the table has no column {_listed(absent)}. Check the spelling."
    keys = [name for name in names if name in key]
    if keys:
        yield (f"site {client!r}: column {_listed(keys)} is the key, which every site has. Do not list it.")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        yield f"site {client!r}: column {_listed(repeated)} is listed twice. Name it once."


def content_problems(
    tables: Mapping[str, pd.DataFrame], columns: Mapping[str, Sequence[str]], *, new_data: bool
) -> Iterator[str]:
    """Problems of what the tables hold besides the key."""
    for client, frame in tables.items():
        where, names = _where(client), columns[client]
        for name in names:
            yield from infinity_problems(where, frame[name], name)
        if not new_data:
            yield from emptiness_problems(where, frame, names)


def _where(client: str) -> str:
    return f"site {client!r}" if client else "the table"


def option_problems(partial: object, min_count: object) -> Iterator[str]:
    """Check the two settings that are kept for the design."""
    yield from _unknown("partial", partial, PARTIAL)
    if not isinstance(min_count, int | np.integer) or isinstance(min_count, bool) or min_count < 1:
        yield f"min_count must be a whole number of at least 1, received {min_count!r}."


def layout_problems(layout: object, on: object, site_column: object) -> Iterator[str]:
    """Check the layout and the arguments that it needs."""
    yield from _unknown("layout", layout, LAYOUTS)
    if layout == "vertical" and on is None:
        yield (
            "the vertical layout links the tables by a key: give on='name of the key column'. Where they "
            "hold different rows of the same columns, give layout='horizontal' instead."
        )
    elif layout == "horizontal" and (not isinstance(site_column, str) or not site_column.strip()):
        yield "site_column must be a name under which a formula can ask for the site, such as 'site'."


def align_problems(align: object, layout: object) -> Iterator[str]:
    """Check how the entities are to be aligned."""
    yield from _unknown("align", align, ALIGN)
    if align == "private" and layout != "vertical":
        yield "align='private' is for the vertical layout: in the horizontal one no rows are linked."


def _unknown(option: str, value: object, known: Sequence[str]) -> Iterator[str]:
    if value not in known:
        yield f"{option} must be one of {', '.join(map(repr, known))}, received {value!r}."


def site_problems(sites: Any) -> Iterator[str]:
    """Missing sites, or sites without a proper name."""
    if not isinstance(sites, Mapping):
        yield "expected a mapping of the sites' names to their tables, such as {'North': table}."
        return
    if not sites:
        yield "there are no sites: expected at least one table under a site's name."
    for client in sites:
        if not isinstance(client, str) or not client.strip():
            yield (
                f"a site's name is empty or of type {type(client).__name__}: "
                "expected text, such as 'Laboratory'."
            )
    yield from control_problems("the partition", "names of sites", sites)


def control_problems(where: str, what: str, texts: Iterable[object]) -> Iterator[str]:
    """Texts with characters that end a line, hide text, or change its direction.

    Names and levels are parts of records, ledgers and pages, in which such characters could forge other
    entries.
    """
    found = {one for one in texts if isinstance(one, str) and CONTROL_CHARACTERS.search(one)}
    if found:
        codes = {f"U+{ord(one):04X}" for text in found for one in CONTROL_CHARACTERS.findall(text)}
        yield (
            f"{where}: control characters, such as line breaks or tabs, are in {what} ({len(found):,} of "
            f"them; {', '.join(sorted(codes)[:MAX_LINES])}). Replace them."
        )


def name_problems(where: str, columns: Iterable[Any]) -> Iterator[str]:
    """Columns without a name of their own."""
    columns = tuple(columns)
    yield from control_problems(where, "names of columns", columns)
    counts = Counter(columns)
    others = [type(column).__name__ for column in counts.elements() if not isinstance(column, str)]
    if others:
        yield (
            f"{where}: {len(others)} column names are not text (but {', '.join(sorted(set(others)))}). "
            "Rename the columns, for instance with frame.columns = frame.columns.astype(str)."
        )
    for column in (name for name, count in counts.items() if count > 1):
        yield f"{where}: {counts[column]} columns are called {column!r}. Rename or drop all but one."


def shared_column_problems(columns: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Find columns that occur at two sites."""
    owners: dict[str, list[str]] = {}
    for client, names in columns.items():
        for name in names:
            owners.setdefault(name, []).append(client)
    for name, sites in owners.items():
        if len(sites) > 1:
            yield (
                f"column {name!r} is at {len(sites)} sites ({', '.join(map(repr, sites))}). Keep "
                "it at one of them, rename it, or add it to `on` if it belongs to the key."
            )


def key_problems(frames: Mapping[str, pd.DataFrame], key: Sequence[str]) -> Iterator[str]:
    """Key columns absent, incomplete, of different types, or repeated."""
    for client, frame in frames.items():
        absent = list(
            _absent_key_problems(f"site {client!r}", frame, key, " Rename its key, or change `on`.")
        )
        yield from absent or unfit_key_problems(f"site {client!r}", frame, key)
    for name in key:
        yield from _kind_problems({c: f[name] for c, f in frames.items() if name in f.columns}, name)


def _absent_key_problems(
    where: str, table: pd.DataFrame, key: Sequence[str], remedy: str = ""
) -> Iterator[str]:
    absent = [name for name in key if name not in table.columns]
    if absent:
        lacking, there = ", ".join(map(repr, absent)), _listed(table.columns)
        yield f"{where} has no key column {lacking}. It has {there}.{remedy}"


def unfit_key_problems(where: str, frame: pd.DataFrame, key: Sequence[str]) -> Iterator[str]:
    """Missing or repeated keys in one table that has the key columns."""
    missing = {name: int(frame[name].isna().sum()) for name in key}
    for name, count in missing.items():
        if count:
            yield f"{where}, key column {name!r}: {count:,} rows have no key. Drop them or fill the key in."
    repeated = int(frame.duplicated(list(key)).sum())
    if repeated and not any(missing.values()):
        yield (
            f"{where}: {repeated:,} of {len(frame):,} rows repeat a key of an earlier row (key "
            f"{', '.join(map(repr, key))}). Keep one row per entity, or add a column to `on` that "
            "distinguishes them."
        )


def key_kind(column: pd.Series[Any]) -> str | None:
    """Say what a key is made of; None where there is nothing to judge by."""
    values = column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
    if isinstance(values.dtype, pd.DatetimeTZDtype):
        return ZONED
    inferred = pd.api.types.infer_dtype(values, skipna=True)
    if inferred == "empty":
        return None
    if inferred not in KEY_KINDS and values.dtype == object:
        types = {type(value).__name__ for value in values if not pd.isna(value)}
        if len(types) == 1:
            return f"values of type {types.pop()}"
    return KEY_KINDS.get(inferred, "values of several types")


def _kind_problems(columns: Mapping[str, pd.Series[Any]], name: str) -> Iterator[str]:
    kinds = {c: kind for c, column in columns.items() if (kind := key_kind(column)) is not None}
    for client, kind in kinds.items():
        if kind == "values of several types":
            yield f"{_where(client)}, key column {name!r}: it mixes several types. Convert it to one of them."
        elif kind not in (*KEY_KINDS.values(), ZONED):
            cast = UNFIT_CASTS.get(kind.rpartition(" ")[2], "astype(str)")
            yield (
                f"{_where(client)}, key column {name!r}: it holds {kind}, which are no keys. Convert it, for "
                f"instance frame[{name!r}] with {cast}, at all sites alike."
            )
    single = {c: kind for c, kind in kinds.items() if kind in (*KEY_KINDS.values(), ZONED)}
    if len(set(single.values())) < 2:
        return
    # sites that differ from the majority must convert, wherever they occur in the list
    usual = Counter(single.values()).most_common(1)[0][0]
    for client, kind in single.items():
        if kind != usual:
            first = next(c for c in single if single[c] == usual)
            both = {kind: columns[client], usual: columns[first]}
            yield (
                f"site {client!r}, key column {name!r}: the key holds {kind}, while at site "
                f"{first!r} it holds {usual}. Convert one of them{_cast_hint(name, usual, both)}."
            )


SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "blanks": lambda text: text.strip(),
    "case": lambda text: text.casefold(),
    "accents in another encoding": lambda text: unicodedata.normalize("NFC", text),
    "leading zeros": lambda text: text.lstrip("0") or "0",
}


def in_one_spelling(text: str, without: str = "") -> str:
    """Write a key without the differences of `SPELLINGS`, but for one of them."""
    for what, spell in SPELLINGS.items():
        text = text if what == without else spell(text)
    return text


def similar_keys(frames: Mapping[str, pd.DataFrame], key: Sequence[str]) -> Iterator[str]:
    """Count keys of a site that no other site has, and that an earlier site writes differently."""
    if len(key) != 1 or len(frames) < 2:
        return
    (name,) = key
    columns = {site: frame[name].dropna() for site, frame in frames.items()}
    if any(key_kind(column) not in ("text", None) for column in columns.values()):
        return
    owners = Counter(value for column in columns.values() for value in set(column))
    earlier: dict[str, str] = {}
    for site, column in columns.items():
        alone = [value for value in column if owners[value] == 1]
        pairs = [(value, earlier[one]) for value in alone if (one := in_one_spelling(value)) in earlier]
        earlier |= {in_one_spelling(value): value for value in alone}
        if not pairs:
            continue
        why = [
            what
            for what in SPELLINGS
            if any(in_one_spelling(mine, what) != in_one_spelling(other, what) for mine, other in pairs)
        ]
        yield (
            f"site {site!r}, key column {name!r}: {len(pairs):,} of {len(column):,} keys match no other "
            f"site, but would without differences in {' or '.join(why)}. Write the keys alike at all sites"
        )


def _cast_hint(name: str, kind: str, columns: Mapping[str, pd.Series[Any]]) -> str:
    if ZONED in columns:
        return f", for instance the times with a time zone: frame[{name!r}]{KEY_CASTS[ZONED]}"
    if set(columns) == {"dates", "dates without a time of day"}:
        return f", for instance the latter: frame[{name!r}] with pd.to_datetime"
    if set(columns) == {"text", "whole numbers"}:
        texts = {str(value) for value in columns["text"].dropna()}
        numbers = {int(value) for value in columns["whole numbers"].dropna()}
        read = {int(text) for text in texts if text.strip().isdecimal()}
        if len(read & numbers) > len(texts & {str(value) for value in numbers}):
            # Leading zeros: as text, none of these keys would match.
            return f", for instance the text: frame[{name!r}] with pd.to_numeric, as it has leading zeros"
    return f", for instance frame[{name!r}] with {KEY_CASTS[kind]}" if kind in KEY_CASTS else ""


def emptiness_problems(where: str, frame: pd.DataFrame, names: Sequence[str]) -> Iterator[str]:
    """Find a table without rows, without a column besides its key, or without a value."""
    size = list(size_problems(where, len(frame), names))
    yield from size
    if not size and all(frame[name].isna().all() for name in names):
        yield f"{where} has no value in any of its {len(names)} columns. Leave the site out."


def size_problems(where: str, n_rows: int, names: Sequence[str]) -> Iterator[str]:
    """Find a table without rows, or without a column besides its key."""
    if n_rows == 0:
        yield f"{where} has no rows. Leave the site out, or check how its table was read."
    elif not names:
        yield (f"{where} has no column besides the key. Leave the site out, or check how its table was read.")


def all_finite(values: Floats) -> bool:
    """Whether a sum shows that no value (n,) is missing or infinite; it may say no for very large ones."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()))


def count_infinite(values: Floats) -> int:
    """Count the infinite values among (n,)."""
    return 0 if all_finite(values) else int(np.isinf(values).sum())


def infinity_problems(where: str, column: pd.Series[Any], name: str) -> Iterator[str]:
    """Infinite numbers in one column."""
    if column.dtype.kind != "f":
        return
    if count := count_infinite(column.to_numpy(dtype=np.float64, na_value=np.nan)):
        yield f"{where}, column {name!r}: {count:,} infinite values. Make them missing or finite."


def _listed(columns: Iterable[str], limit: int = 8) -> str:
    names = [repr(column) for column in columns]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "no columns") + more
