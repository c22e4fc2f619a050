"""What a partition holds, in counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstat.typing import Array, Bools, Ints

Layout: TypeAlias = Literal["vertical", "horizontal"]

PATTERNS_SHOWN = 10


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PartitionDescription:
    """Counts of a partition; prints as two tables.

    Attributes
    ----------
    layout : {"vertical", "horizontal"}
    key : tuple of str
    n_entities : int
    clients : DataFrame
        Indexed by client: ``columns``; ``entities`` with a record; of these ``complete`` and
        ``partly filled``; ``missing share`` of all entities without a record (vertical) or of
        cells without a value (horizontal). Vertical also ``empty rows``, which held a key and
        nothing else; horizontal also ``empty columns`` of that client.
    patterns : DataFrame
        One bool column per client (has a record), ``count`` and ``share`` of the entities with
        that pattern, most frequent first.
    """

    layout: Layout
    key: tuple[str, ...]
    n_entities: int
    clients: pd.DataFrame
    patterns: pd.DataFrame

    @property
    def n_complete(self) -> int:
        """Entities that have a record at every client."""
        marks = self.patterns.iloc[:, : len(self.clients)].to_numpy(dtype=bool)
        return int(self.patterns["count"].to_numpy()[marks.all(axis=1)].sum())

    @property
    def title(self) -> str:
        """One line that says what this is."""
        key = f", key {', '.join(map(repr, self.key))}" if self.key else ""
        counts = f"{self.n_entities:,} entities, {len(self.clients)} clients"
        return f"{self.layout.capitalize()} partition: {counts}{key}"

    def __str__(self) -> str:
        parts = [self.title, "", self._clients_shown().to_string()]
        if self.layout == "vertical":
            shown = self._patterns_shown().to_string(index=False)
            parts += ["", self._complete_line(), "", self._patterns_line(), shown]
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{escape(self.title)}</b></p>", self._clients_shown().to_html()]
        if self.layout == "vertical":
            parts += [f"<p>{self._complete_line()}</p>", f"<p>{self._patterns_line()}</p>"]
            parts.append(self._patterns_shown().to_html(index=False))
        return "\n".join(parts)

    def _complete_line(self) -> str:
        share = self.n_complete / max(self.n_entities, 1)
        return f"{self.n_complete:,} entities ({share:.1%}) have a record at every client."

    def _patterns_line(self) -> str:
        n = len(self.patterns)
        first = f"the {PATTERNS_SHOWN} most frequent of {n}" if n > PATTERNS_SHOWN else f"all {n}"
        return f"Patterns of records ({first}; x has a record, . has none):"

    def _clients_shown(self) -> pd.DataFrame:
        shown = self.clients.rename_axis(None).apply(_as_text)
        shown.index = pd.Index([f"{k}  {client}" for k, client in enumerate(shown.index, 1)])
        return shown

    def _patterns_shown(self) -> pd.DataFrame:
        shown = self.patterns.head(PATTERNS_SHOWN)
        marks = shown.iloc[:, : len(self.clients)].map({True: "x", False: "."}.get)
        marks.columns = pd.Index([str(k) for k in range(1, len(self.clients) + 1)])
        return pd.concat([marks, shown[["count", "share"]].apply(_as_text)], axis=1)


def describe_blocks(
    frames: Mapping[str, pd.DataFrame],
    rows: Mapping[str, Ints],
    n_entities: int,
    *,
    layout: Layout,
    key: tuple[str, ...],
    empty_rows: Mapping[str, int],
) -> PartitionDescription:
    """Count every client's records and the patterns in which they are missing.

    Parameters
    ----------
    frames : mapping of str to DataFrame, (m_k, p_k)
        The clients' records.
    rows : mapping of str to int64 array, (m_k,)
        Their entities' positions.
    n_entities : int
    layout : {"vertical", "horizontal"}
    key : tuple of str
    empty_rows : mapping of str to int
        Rows without a value that were left out.
    """
    counts = {client: _count_block(frame) for client, frame in frames.items()}
    clients = pd.DataFrame.from_dict(counts, orient="index").rename_axis("client")
    if layout == "vertical":
        clients["missing share"] = 1 - clients["entities"] / max(n_entities, 1)
        clients["empty rows"] = pd.Series(empty_rows)
    else:
        cells = missing_cells(frames)
        clients["missing share"] = cells.mean(axis=1)
        clients["empty columns"] = (cells == 1).sum(axis=1)
    patterns = count_patterns(presence_matrix(rows, n_entities), list(frames))
    return PartitionDescription(layout, key, n_entities, clients, patterns)


def presence_matrix(rows: Mapping[str, Ints], n_entities: int) -> Bools:
    """Whether client k has a record of entity i, shape (n_entities, n_clients)."""
    presence = np.zeros((n_entities, len(rows)), dtype=bool)
    for k, positions in enumerate(rows.values()):
        presence[positions, k] = True
    return presence


def count_patterns(presence: Bools, clients: list[str]) -> pd.DataFrame:
    """Distinct rows of the presence matrix, most frequent first."""
    unique, counts = _unique_rows(presence)
    order = np.argsort(-counts, kind="stable")
    patterns = pd.DataFrame(unique[order], columns=clients)
    sizes = pd.DataFrame({"count": counts[order], "share": counts[order] / max(len(presence), 1)})
    return pd.concat([patterns, sizes], axis=1)


def missing_cells(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Share of missing cells of every column at every client, shape (n_clients, p)."""
    return pd.DataFrame({client: frame.isna().mean() for client, frame in frames.items()}).T


def _count_block(frame: pd.DataFrame) -> dict[str, int]:
    complete = np.ones(len(frame), dtype=bool)
    for name in frame.columns:
        complete &= frame[name].notna().to_numpy()
    n_complete = int(complete.sum())
    return {
        "columns": frame.shape[1],
        "entities": len(frame),
        "complete": n_complete,
        "partly filled": len(frame) - n_complete,
    }


def _unique_rows(presence: Bools) -> tuple[Bools, Array]:
    """Distinct rows and their counts, from all present to none."""
    packed = np.packbits(presence, axis=1)
    _, first, counts = np.unique(packed, axis=0, return_index=True, return_counts=True)
    return presence[first[::-1]], counts[::-1]


def _as_text(column: pd.Series[Any]) -> pd.Series[Any]:
    form = "{:.1%}" if column.dtype.kind == "f" else "{:,}"
    return column.map(form.format)
