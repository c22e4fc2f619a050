"""Linking of tables by their keys: keys become positions, rows become records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import PartitionError
from fedstat.federation.tables.checks import columns_besides, key_kind
from fedstat.federation.tables.table import FrameTable, Table
from fedstat.typing import Bools, Ints

DTYPE_OF_KIND: dict[str, Any] = {"whole numbers": "int64", "text": "str"}


@dataclass(frozen=True, slots=True)
class AlignedBlock:
    """One institution's records in the order of the entities: `frame` (m, p) without the key, and positions.

    `rows` (m,) int64 is the position of each record's entity, ascending; `n_empty` counts the rows of the
    table that held a key and nothing else.
    """

    frame: pd.DataFrame
    rows: Ints
    n_empty: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """All sites' records over one index of entities; the fields of :class:`AlignedBlock` by site."""

    entities: pd.Index[Any]
    tables: Mapping[str, Table]
    rows: Mapping[str, Ints]
    empty_rows: Mapping[str, int]


def _alignment(entities: pd.Index[Any], blocks: Mapping[str, AlignedBlock]) -> Alignment:
    for block in blocks.values():
        block.rows.flags.writeable = False
    return Alignment(
        entities,
        {c: FrameTable(block.frame, block.rows) for c, block in blocks.items()},
        {c: block.rows for c, block in blocks.items()},
        {c: block.n_empty for c, block in blocks.items()},
    )


def link_tables(
    tables: Mapping[str, pd.DataFrame],
    key: Sequence[str],
    numbered: tuple[pd.Index[Any], Mapping[str, Ints]] | None = None,
) -> Alignment:
    """Vertical layout: one table per site, linked by the key, or as `numbered` says (see :func:`align`)."""
    entities, positions = align(tables, key) if numbered is None else numbered
    blocks = {
        client: align_block(frame[columns_besides(frame, key)], positions[client])
        for client, frame in tables.items()
    }
    return _alignment(entities, blocks)


def split_columns(table: pd.DataFrame, columns: Mapping[str, Sequence[str]], key: Sequence[str]) -> Alignment:
    """Vertical layout: the columns of one table; without a key every row is an entity."""
    if key:
        entities, positions = align({"": table}, key)
        rows = positions[""]
    else:
        entities, rows = pd.RangeIndex(len(table)), np.arange(len(table))
    return _alignment(entities, {c: align_block(table[list(names)], rows) for c, names in columns.items()})


def split_rows(table: pd.DataFrame, by: str, key: Sequence[str]) -> Alignment:
    """Horizontal layout: the rows of one table; every row is an entity."""
    content = table[columns_besides(table, [*key, by])]
    blocks = {
        site: AlignedBlock(content.take(rows).reset_index(drop=True), rows, 0)
        for site, rows in rows_by_site(table[by]).items()
    }
    entities = table.set_index(list(key)).index if key else pd.RangeIndex(len(table))
    return _alignment(entities, blocks)


def align(frames: Mapping[str, pd.DataFrame], key: Sequence[str]) -> tuple[pd.Index[Any], dict[str, Ints]]:
    """Sorted union of all keys (a MultiIndex for several), and int64 position of each row's key in it."""
    coded = [_code_key(frames, name) for name in key]
    levels = [level for _, level in coded]
    position, codes = coded[0][0], [np.arange(len(levels[0]))]
    for code, level in coded[1:]:
        # the columns before and this one as one number, numbered anew each time so that it stays small
        pairs = position * len(level) + code
        unique, position = np.unique(pairs, return_inverse=True)
        codes = [c[unique // len(level)] for c in codes] + [unique % len(level)]
    ends = np.cumsum([len(frame) for frame in frames.values()])[:-1]
    return _key_index(levels, codes), dict(
        zip(frames, np.split(position.astype(np.int64, copy=False), ends), strict=True)
    )


def _key_index(levels: list[pd.Index[Any]], codes: list[Any]) -> pd.Index[Any]:
    if len(levels) == 1:
        return levels[0]
    make: Any = pd.MultiIndex  # its stubs know lists of lists only
    index: pd.Index[Any] = make(levels=levels, codes=codes, names=[level.name for level in levels])
    return index


def _code_key(frames: Mapping[str, pd.DataFrame], name: str) -> tuple[Ints, pd.Index[Any]]:
    """Code all institutions' values of one key column by its sorted values."""
    # a table without rows tells no type, and would turn the keys of the others into objects
    filled = [frame for frame in frames.values() if len(frame)] or list(frames.values())
    stacked = pd.concat([plain_key(frame[name]) for frame in filled], ignore_index=True)
    codes, values = pd.factorize(stacked, sort=True)
    return codes, pd.Index(values, name=name)


def plain_key(column: pd.Series[Any]) -> pd.Series[Any]:
    """Give a key the one dtype of its kind, so that equal keys of two institutions are equal."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(column.cat.categories.dtype)
    dtype = DTYPE_OF_KIND.get(key_kind(column) or "")
    return column if dtype is None else column.astype(dtype)


def seen_rows(frame: pd.DataFrame) -> Bools:
    """Rows with at least one value, shape (len(frame),)."""
    seen = np.zeros(len(frame), dtype=bool)
    for name in frame.columns:
        seen |= frame[name].notna().to_numpy()
        if seen.all():
            break
    return seen


def align_block(frame: pd.DataFrame, positions: Ints) -> AlignedBlock:
    """Drop rows that hold no value and sort the others by entity."""
    seen = seen_rows(frame)
    n_empty = len(frame) - int(seen.sum())
    if n_empty:
        frame, positions = frame[seen], positions[seen]
    if np.any(np.diff(positions) < 0):
        order = np.argsort(positions)
        frame, positions = frame.take(order), positions[order]
    return AlignedBlock(frame.reset_index(drop=True), positions, n_empty)


def rows_by_site(column: pd.Series[Any]) -> dict[str, Ints]:
    """Rows of each site, by the site's name in `column`, in sorted or categorical order."""
    sites = column.astype("category").cat.remove_unused_categories().cat
    codes = sites.codes.to_numpy()
    names = [str(level) for level in sites.categories]
    if len(set(names)) < len(names):
        raise PartitionError(
            f"column {column.name!r} names sites by values of several types. Convert it to text."
        )
    return {name: np.flatnonzero(codes == code) for code, name in enumerate(names)}
