"""The receipt of a run: what the coordinator carried, and what each site signed about its own door.

It holds names, shapes and counts, and no values of the data. Whoever has the fingerprints of the sites' keys
can check it, see :func:`fedstat.verify_receipt`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedstat.errors import ReceiptError, SecurityError
from fedstat.federation.account.chain import Link, Passed, canonical, link_row
from fedstat.federation.account.released import Counts, Line, alarm, compare, table
from fedstat.federation.crypto.keys import PublicIdentity

FORMAT = "fedstat receipt 1"
STATEMENT = "fedstat statement 1"
PASSED_FIELDS = Passed._fields
LINK_FIELDS = (*PASSED_FIELDS, *Link._fields[1:])
PASSED_TYPES = (int, str, str, str, str, str, str, bool, list, int, int, str)
LINK_TYPES = (str, int, int, str)
CAVEAT = (
    "Counting is a necessary check and no proof of privacy: one number can disclose a value, and many "
    "dependent ones may not. Not counted: texts, names, levels, counts, and who has a record."
)


@dataclass(frozen=True, slots=True)
class Statement:
    """What one site says, and signs, of a session.

    Parameters
    ----------
    site, session : str
    keys : PublicIdentity
        The site's.
    ordinal : int
        Place of the session among those that the site opened, from 1.
    previous : str
        Head of the session opened before this one, as it was then; empty for the first.
    head : str
        Digest of the last of `entries`.
    coordinator : str
        Digest of the coordinator's ledger as it was shown to the site: later changes of it are found.
    counts : Counts
        Numbers that left and came in, against values in play.
    other_sessions : int
        How many other sessions the site has opened.
    entries : tuple of Link
    signature : str
        Ed25519, over all of the above; `head` stands for the entries.
    """

    site: str
    session: str
    keys: PublicIdentity
    ordinal: int
    previous: str
    head: str
    coordinator: str
    counts: Counts
    other_sessions: int
    entries: tuple[Link, ...]
    signature: str = ""

    def signed(self) -> dict[str, Any]:
        """List what the signature is over."""
        counts = self.counts
        return {
            "format": STATEMENT,
            "site": self.site,
            "session": self.session,
            "keys": {"signing": self.keys.signing.hex(), "agreement": self.keys.agreement.hex()},
            "ordinal": self.ordinal,
            "previous": self.previous,
            "head": self.head,
            "count": len(self.entries),
            "coordinator": self.coordinator,
            "earlier": {str(among): number for among, number in sorted(counts.earlier.items())},
            "earlier_received": counts.earlier_received,
            "columns": counts.columns,
            "entities": counts.entities,
            "other_sessions": self.other_sessions,
        }

    def to_dict(self) -> dict[str, Any]:
        """Take it apart for JSON."""
        rows = [link_row(link) for link in self.entries]
        return {"signed": self.signed(), "entries": rows, "signature": self.signature}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Statement:
        """Rebuild what :meth:`to_dict` took apart.

        Raises
        ------
        KeyError, TypeError, ValueError
            It is not such a thing.
        """
        signed = content["signed"]
        entries = tuple(read_link(row) for row in content["entries"])
        released, received = tally(entries)
        earlier = {whole(int(among), 1): whole(number) for among, number in signed["earlier"].items()}
        counts = Counts(
            text(signed["site"]),
            released,
            received,
            earlier,
            whole(signed["earlier_received"]),
            whole(signed["columns"]),
            whole(signed["entities"]),
        )
        if whole(signed["count"]) != len(entries):
            raise ValueError("count")
        keys = PublicIdentity(*[bytes.fromhex(signed["keys"][name]) for name in ("signing", "agreement")])
        return cls(
            counts.site,
            text(signed["session"]),
            keys,
            whole(signed["ordinal"], 1),
            text(signed["previous"]),
            text(signed["head"]),
            text(signed["coordinator"]),
            counts,
            whole(signed["other_sessions"]),
            entries,
            text(content["signature"]),
        )


def tally(entries: Sequence[Link]) -> tuple[dict[int, int], int]:
    """Count numbers that left, by how many sites they are sums over, and those that came in."""
    released: Counter[int] = Counter()
    received = 0
    for link in entries:
        if link.passed.sender == "coordinator":
            received += link.numbers
        else:
            released[link.among] += link.numbers
    return {among: number for among, number in released.items() if number}, received


@dataclass(frozen=True, slots=True, repr=False)
class Receipt:
    """What passed in one session until the run ended: the coordinator's ledger and the sites' statements.

    Parameters
    ----------
    session : str
    at : str or None
        The site at which the coordinator sat.
    passed : tuple of Passed
        The coordinator's ledger: all that it carried in the session, in order.
    statements : mapping of str to Statement
        By site.
    """

    session: str
    at: str | None
    passed: tuple[Passed, ...]
    statements: Mapping[str, Statement]

    @property
    def lines(self) -> list[Line]:
        """Equations against unknowns; see :mod:`fedstat.federation.account.released`."""
        return compare([one.counts for one in self.statements.values()], self.at)

    @property
    def released(self) -> pd.DataFrame:
        """Released numbers against unknown values, by whose they are and who has them.

        Returns
        -------
        DataFrame
            ``about``, ``in the hands of``, ``this session`` and ``other sessions`` (distinct numbers; all
            fits of one model are one session), ``equations`` (their sum), ``unknowns`` (entities times
            columns in play), ``ratio``, ``verdict``.
        """
        return table(self.lines)

    @property
    def alarm(self) -> str:
        """One sentence where as many numbers as unknowns left an institution; else empty."""
        return alarm(self.lines)

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, no spaces, one final newline."""
        content = {
            "format": FORMAT,
            "fields": list(LINK_FIELDS),
            "session": self.session,
            "at": self.at,
            "passed": [list(entry) for entry in self.passed],
            "statements": {site: one.to_dict() for site, one in self.statements.items()},
        }
        return canonical(content) + "\n"

    @classmethod
    def from_json(cls, content: str) -> Receipt:
        """Read what :meth:`to_json` wrote; this does not verify it.

        Raises
        ------
        ReceiptError
            The text is no receipt, or not in canonical form.
        """
        try:
            fields = json.loads(content)
            receipt = cls(
                text(fields["session"]),
                None if fields["at"] is None else text(fields["at"]),
                tuple(read_passed(row) for row in fields["passed"]),
                {text(site): Statement.from_dict(one) for site, one in fields["statements"].items()},
            )
            same = receipt.to_json() == content
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, SecurityError) as error:
            raise ReceiptError(f"not a receipt, or damaged ({type(error).__name__})") from error
        if not same:
            raise ReceiptError(
                "not a receipt in canonical form: a field was added, removed or written in another way"
            )
        return receipt

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Receipt:
        """Read a file; this does not verify it, see :func:`fedstat.verify_receipt`."""
        return cls.from_json(Path(path).read_bytes().decode("utf-8", errors="replace"))

    def to_frame(self) -> pd.DataFrame:
        """One row per entry of the sites' own chains, in their order."""
        rows = [[site, *link_row(link)] for site, one in self.statements.items() for link in one.entries]
        return pd.DataFrame(rows, columns=["site", *LINK_FIELDS])

    def sites(self) -> pd.DataFrame:
        """One row per site: entries, refusals, place of the session, head, fingerprint."""
        return pd.DataFrame(
            {
                "entries": [len(one.entries) for one in self.statements.values()],
                "refusals": [
                    sum(link.passed.kind == "refusal" for link in one.entries)
                    for one in self.statements.values()
                ],
                "session no.": [one.ordinal for one in self.statements.values()],
                "head": [one.head[:16] for one in self.statements.values()],
                "key": [one.keys.fingerprint[:19] for one in self.statements.values()],
            },
            index=pd.Index(list(self.statements), name="site"),
        )

    def __str__(self) -> str:
        n_sites = len(self.statements)
        head = f"Receipt of session {self.session}: {n_sites} sites, {len(self.passed):,} entries"
        tables = [self.sites().to_string(), self.released.to_string(index=False)]
        return "\n\n".join([head, *tables, CAVEAT, *filter(None, [self.alarm])])

    def __repr__(self) -> str:
        return f"<Receipt of session {self.session}: {', '.join(self.statements)}>"

    def _repr_html_(self) -> str:
        head = f"<p>Receipt of session {self.session}</p>"
        tables = self.sites().to_html() + self.released.to_html(index=False)
        return f"{head}{tables}<p>{CAVEAT} {self.alarm}</p>"


def coordinator_digest(at: str | None, passed: Sequence[Passed]) -> str:
    """SHA-256 of the coordinator's ledger."""
    content = {"at": at, "passed": [list(entry) for entry in passed]}
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def read_passed(row: Sequence[Any]) -> Passed:
    """Rebuild one entry of the coordinator's ledger.

    Raises
    ------
    TypeError, ValueError
        It is not such a thing.
    """
    if tuple(map(type, row)) != PASSED_TYPES:
        raise TypeError("types of an entry")
    number, *names, masked, shape, size, entities, rule = row
    if min(number, size, entities, *shape) < 0 or any(type(length) is not int for length in shape):
        raise ValueError("a negative number")
    return Passed._make((number, *names, masked, tuple(shape), size, entities, rule))


def read_link(row: Sequence[Any]) -> Link:
    """Rebuild one entry of a chain; see :func:`read_passed`."""
    head, tail = row[: len(PASSED_FIELDS)], row[len(PASSED_FIELDS) :]
    if tuple(map(type, tail)) != LINK_TYPES or tail[1] < 0 or tail[2] < 1:
        raise TypeError("types of an entry")
    return Link(read_passed(head), *tail)


def whole(value: Any, least: int = 0) -> int:
    """Return a whole number that is not too small, or raise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError("not a whole number")
    return value


def text(value: Any) -> str:
    """Return a text, or raise."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
