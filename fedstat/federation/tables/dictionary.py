"""The data dictionary of a study: what each column means at all sites, signed by the coordinator.

The coordinator writes ``dictionary.toml``::

    [age]
    label = "Age at admission"
    kind = "number"
    range = [18, 120]
    unit = "years"

    [sex]
    kind = "category"
    levels = ["male", "female"]
    codes = { 1 = "male", 2 = "female" }

    [admitted]
    kind = "number"
    range = [0, 4000]
    since = "2020-01-01"

and signs it. An owner who accepts it stores the signed copy in the folder of the site. From then on, the site
names codes and converts dates as the dictionary says when it reads a text file, and ``describe`` proposes the
public description of the columns from it. The coordinator compares these descriptions when it connects.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fedstat.codec import Minimum, from_plain, to_plain
from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.crypto.keys import Identity, normalize_fingerprint
from fedstat.federation.crypto.rosters import open_record, sign_record
from fedstat.federation.files import read_private
from fedstat.federation.tables.columns import LevelValue
from fedstat.federation.tables.published import Published, PublishedColumn, PublishedKind
from fedstat.federation.tables.sources import DeclaredColumn

DICTIONARY, FORM = "dictionary.json", "fedstat dictionary 1"
LONGEST_DICTIONARY = 2**20
COMPARED = ("kind", "unit", "range", "levels", "knots", "domain")
"""What of a public description has to agree with the dictionary."""


@dataclass(frozen=True, slots=True)
class DictionaryColumn:
    """A column of a study.

    `kind`, `range`, `levels`, `knots`, `unit` and `domain` are those of :class:`PublishedColumn`. `label` and
    `labels` (by level) describe the column and its levels for readers. `codes` gives the level of each value
    of a text file, and `since` is the public origin of dates, which become days.
    """

    kind: PublishedKind
    range: tuple[float, float] | None = None
    levels: tuple[LevelValue, ...] = ()
    knots: tuple[float, ...] = ()
    unit: str = ""
    domain: tuple[float, float] | None = None
    label: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)
    since: str = ""

    def check(self) -> None:
        """Require a valid description, and codes and labels that are of its levels."""
        self.published.check()
        levels = set(map(str, self.levels))
        if not set(self.codes.values()) <= levels:
            raise PartitionError("codes name a level that is not in levels")
        if not set(self.labels) <= levels:
            raise PartitionError("labels describe a level that is not in levels")
        if self.since and (self.kind != "number" or self.codes):
            raise PartitionError('dates with since have kind = "number", and no codes')

    @property
    def published(self) -> PublishedColumn:
        """The public description that a site gives of the column."""
        unit = self.unit or (f"days since {self.since}" if self.since else "")
        return PublishedColumn(self.kind, self.range, self.levels, self.knots, unit, domain=self.domain)

    @property
    def declared(self) -> DeclaredColumn | None:
        """How a site reads the column from a text file; None as it is."""
        if self.since:
            return DeclaredColumn("dates", since=self.since)
        return DeclaredColumn("text", codes=self.codes) if self.codes else None


@dataclass(frozen=True, slots=True)
class DataDictionary:
    """The columns of a study under a number; each later version has the next number."""

    study: str
    number: Annotated[int, Minimum(1)]
    date: str
    columns: Mapping[str, DictionaryColumn]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal digits."""
        return hashlib.sha256(repr(to_plain(self)).encode()).hexdigest()

    def sign(self, identity: Identity) -> str:
        """Return the text of its file, signed by the coordinator."""
        return sign_record(identity, FORM, self)

    @classmethod
    def read(cls, text: str | bytes, where: str, coordinator: str) -> DataDictionary:
        """Read what :meth:`sign` wrote; SecurityError if this coordinator did not sign it."""
        content, keys = open_record(text, FORM, where)
        if keys.digest.hex() != normalize_fingerprint(coordinator):
            raise SecurityError(f"{where}: not signed by the coordinator that this site trusts")
        return from_plain(cls, content, where, SecurityError)

    @property
    def declared(self) -> dict[str, DeclaredColumn]:
        """How a site reads the columns that have codes, or are dates."""
        found = {name: column.declared for name, column in self.columns.items()}
        return {name: one for name, one in found.items() if one is not None}

    def propose(self, names: tuple[str, ...]) -> dict[str, PublishedColumn]:
        """Return the public description of those of these columns that it has."""
        return {name: column.published for name, column in self.columns.items() if name in names}

    def departures(self, published: Published) -> dict[str, str]:
        """Return by column in what the description of a site differs."""
        found = {}
        for name, column in self.columns.items():
            here, there = published.get(name), column.published
            other = [word for word in COMPARED if here and getattr(here, word) != getattr(there, word)]
            if here is None or other:
                found[name] = f"another {' and '.join(other)}" if other else "not published"
        return found

    def problems(self, site: str, published: Published) -> Iterator[str]:
        """Yield for its owner in what the description of a site differs."""
        for name, how in self.departures(published).items():
            how = f"published with {how}" if name in published else how
            yield (
                f"{site}: column '{name}' of dictionary {self.number} of the study is {how}. Correct "
                "columns.toml, or remove it and repeat 'fedstat site describe FOLDER', which writes it by "
                "the dictionary"
            )


def read_columns(path: Path) -> dict[str, DictionaryColumn]:
    """Read the ``dictionary.toml`` of a coordinator; PartitionError names the place."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PartitionError(f"'{path}' is not a TOML file ({type(error).__name__})") from None
    return from_plain(dict[str, DictionaryColumn], content, f"'{path}'", PartitionError, defaults=True)


def read_accepted(folder: Path, coordinator: str) -> DataDictionary | None:
    """Read the dictionary that the owner of a site has accepted; None without one."""
    path = folder / DICTIONARY
    if not path.exists():
        return None
    return DataDictionary.read(read_private(path, LONGEST_DICTIONARY), f"'{path}'", coordinator)
