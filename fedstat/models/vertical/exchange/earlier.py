"""Columns of others that were multiplied with an institution's, in this fit and in all earlier ones.

What a sum carries about a column of few values adds up over fits: so the site remembers of every group of
rows by which columns its own were multiplied, as the marks that the other institution gives its columns. A
mark is of the column's content, so that the same fit again adds nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.door.state import SiteData
from fedstat.federation.tables.table import entities_of
from fedstat.typing import Array, Ints

ONCE = "multiplied "
"""Under which word the account keeps marks, by group."""


@dataclass(slots=True)
class ColumnsBeside:
    """How many columns of others were multiplied with those of an institution in a fit, by product and group.

    Columns of few values are judged by the sums of all products together. `marked` are columns by group, also
    of earlier fits.
    """

    products: dict[str, dict[int, int]] = field(default_factory=dict)
    marked: dict[int, frozenset[str]] = field(default_factory=dict)

    def add(self, product: str, columns: int, code: Ints) -> None:
        """Note a product over groups, (n,); one that is asked again counts once."""
        self.products[product] = dict.fromkeys(np.unique(code[code >= 0]).tolist(), columns)

    def add_marked(self, data: SiteData, code: Ints, rows: Ints, marks: Array) -> Callable[[], None]:
        """Note columns by group, (n,), of rows of the table: marks (groups, q, bytes), groups ascending.

        Returns what enters them into the account, for when the product leaves.
        """
        fresh: dict[str, list[str]] = {}
        earlier = marks_by_group(data.account)
        for group, columns in zip(np.unique(code).tolist(), marks, strict=True):
            name = _name(data, rows[code == group])
            known, now = earlier.get(name, frozenset()), {one.tobytes().hex() for one in columns}
            self.marked[group] = self.marked.get(group, frozenset()) | known | now
            if now - known:
                fresh[name] = sorted(now - known)
        return lambda: data.account.spend(ONCE + json.dumps(fresh, sort_keys=True)) if fresh else None

    @property
    def counts(self) -> dict[int, int]:
        """Columns by group."""
        total: Counter[int] = Counter({group: len(marks) for group, marks in self.marked.items()})
        for product in self.products.values():
            total.update(product)
        return dict(total)


def marks_by_group(account: SiteAccount) -> dict[str, frozenset[str]]:
    """List the marks of the columns that were multiplied with the site's, by group of rows."""
    found: dict[str, set[str]] = {}
    for name, marks in _entered(account):
        found.setdefault(name, set()).update(marks)
    return {name: frozenset(marks) for name, marks in found.items()}


def _entered(account: SiteAccount) -> Iterator[tuple[str, list[str]]]:
    for text in account.spent:
        if text.startswith(ONCE):
            yield from json.loads(text.removeprefix(ONCE)).items()


def _name(data: SiteData, rows: Ints) -> str:
    """Name a group of rows by a keyed digest of its entities, in whatever order they are."""
    entities = np.ascontiguousarray(entities_of(data.table)[rows])
    width = entities.nbytes // max(len(entities), 1)
    members = b"".join(sorted(one.tobytes() for one in entities.view(np.uint8).reshape(-1, width)))
    return hashlib.blake2b(members, digest_size=16, key=data.mark_key).hexdigest()
