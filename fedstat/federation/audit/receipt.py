"""The receipt of a run: the coordinator's ledger and the signed statement of each site.

It holds names, shapes and counts, and no values of the data. The fingerprints of the sites' keys are
sufficient to check it, see :func:`fedstat.verify_receipt`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import pandas as pd

from fedstat.codec import Minimum, from_plain, to_plain
from fedstat.errors import ReceiptError
from fedstat.federation.audit import event_log, release_counts
from fedstat.federation.audit.budget_charges import BudgetSpent
from fedstat.federation.audit.checkpoints import SignedCheckpoint, utc_text
from fedstat.federation.crypto.keys import PublicIdentity

RECEIPT_FORMAT = "fedstat receipt 1"
STATEMENT_FORMAT = "fedstat statement 1"
RECEIPT_CAVEAT = (
    "Counting is a necessary check and no proof of privacy: one number can disclose a value, and many "
    "dependent ones may not. Not counted: texts, names, levels, counts, sums with noise, and who has a "
    "record."
)
LOSS_CAVEAT = (
    "{site}: its owner declared on {time} that its ledger was lost; its earlier replies may be unknown "
    "there, and are not compared with new ones."
)
STATEMENT_DEFAULTS: Mapping[str, Any] = {
    "site_ledger": None,
    "privacy": None,
    "version": "",
    "families": [],
    "as_of": "",
}
"""Parts of a statement that not every site has; what is absent is not signed."""
UTC_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
Natural: TypeAlias = Annotated[int, Minimum(0)]


@dataclass(frozen=True, slots=True)
class SiteStatement:
    """What one site says, and signs, of a session.

    `ordinal` is the session's number among those of the site, from 1, and `previous` the head of the one
    before, at that time (empty for the first); `head` is the digest of the last entry. `coordinator` is the
    digest of the coordinator's ledger as the site received it: later changes of it are detected. `vectors`
    are the released numbers per entity, of all sessions. `earlier` to `entities` are those of
    :class:`~fedstat.federation.audit.release_counts.SiteReleaseCounts`. `site_ledger` is the head of the
    site's
    complete stored ledger, if it has one; `privacy` the state of its privacy budget, if it has one, over all
    sessions; `version` is that of fedstat there, and `families` the installed ones, both empty in old
    receipts; `as_of` is the time at which its rows were read, empty if every reply reads them. The signature
    (Ed25519) covers all but the entries, which `head` covers.
    """

    site: str
    session: str
    keys: PublicIdentity
    ordinal: Annotated[int, Minimum(1)]
    previous: str
    head: str
    coordinator: str
    earlier: Mapping[int, Natural]
    earlier_received: Natural
    columns: Natural
    entities: Natural
    other_sessions: Natural
    entries: tuple[event_log.SiteEntry, ...]
    signature: str = ""
    site_ledger: SignedCheckpoint | None = None
    vectors: Natural = 0
    privacy: BudgetSpent | None = None
    version: str = ""
    families: tuple[str, ...] = ()
    as_of: str = ""

    @property
    def counts(self) -> release_counts.SiteReleaseCounts:
        """Numbers that left and came in, against values in play."""
        tally = event_log.NumbersReleased()
        for entry in self.entries:
            tally.add(entry)
        earlier = self.earlier, self.earlier_received
        return release_counts.SiteReleaseCounts(
            self.site, tally.released, tally.received, *earlier, self.columns, self.entities
        )

    def signed(self) -> dict[str, Any]:
        """List what the signature is over."""
        plain: dict[str, Any] = to_plain(replace(self, entries=()))
        del plain["entries"], plain["signature"]
        for name in STATEMENT_DEFAULTS:
            if not plain[name]:
                del plain[name]
        return {"format": STATEMENT_FORMAT, "count": len(self.entries)} | plain

    def to_json(self, signed: str = "") -> str:
        """Write it as canonical JSON; `signed` is the canonical form of :meth:`signed`, if it is known."""
        signed = signed or event_log.canonical_json(self.signed())
        signature = event_log.canonical_json(self.signature)
        return f'{{"entries":{_rows(self.entries)},"signature":{signature},"signed":{signed}}}'

    @classmethod
    def from_dict(cls, content: Any, where: str) -> SiteStatement:
        """Rebuild what :meth:`to_json` wrote; ReceiptError where it is no such thing."""
        try:
            entries = tuple(map(event_log.read_site_entry, content["entries"]))
            plain = {
                **STATEMENT_DEFAULTS,
                **content["signed"],
                "entries": [],
                "signature": content["signature"],
            }
            if (plain.pop("format"), plain.pop("count")) != (STATEMENT_FORMAT, len(entries)):
                raise ValueError("count")
            if plain["as_of"] and not UTC_PATTERN.fullmatch(plain["as_of"]):
                raise ValueError("time")
        except (LookupError, TypeError, ValueError) as error:
            raise ReceiptError(f"{where}: malformed ({error})") from error
        return replace(from_plain(cls, plain, where, ReceiptError), entries=entries)


@dataclass(frozen=True, slots=True, repr=False)
class Receipt:
    """What passed in one session until the run ended: the coordinator's ledger and the sites' statements.

    Parameters
    ----------
    session : str
    at : str or None
        The site at which the coordinator sat.
    passed : tuple of Entry
        The coordinator's ledger: all that it carried in the session, in order.
    statements : mapping of str to Statement
        By site.
    absent : tuple of AbsentSite
        Sites that were lost in earlier sessions of the run, and have no statement; the others sign it.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> receipt = fs.GLORE.from_formula("num > 0 ~ age", partition).fit().receipt()
    >>> receipt.sites().index.tolist() == list(partition.sites), len(receipt.to_frame()) > 0
    (True, True)
    >>> receipt.alarm, receipt.budgets, receipt.losses
    ('', [], [])
    >>> receipt.released.columns.tolist()[:2], len(receipt.lines) > 0
    (['about', 'in the hands of'], True)
    >>> receipt.save("fit.json")
    >>> again = fs.results.Receipt.load("fit.json")
    >>> fs.results.Receipt.from_json(again.to_json()).to_json() == receipt.to_json()
    True
    """

    session: str
    at: str | None
    passed: tuple[event_log.Entry, ...]
    statements: Mapping[str, SiteStatement]
    absent: tuple[event_log.AbsentSite, ...] = ()

    @property
    def lines(self) -> list[release_counts.Exposure]:
        """Numbers that left against values in play; see :mod:`fedstat.federation.audit.release_counts`."""
        return release_counts.compare_site_counts([one.counts for one in self.statements.values()], self.at)

    @property
    def released(self) -> pd.DataFrame:
        """Released numbers against unknown values, by whose they are and who has them.

        Returns
        -------
        DataFrame
            ``about``, ``in the hands of``, ``this session`` and ``other sessions`` (distinct numbers; all
            fits of one model are one session), ``equations`` (their sum), ``unknowns`` (entities times
            columns in play), ``ratio``, ``bits a value`` (53 for each number that leaves exactly),
            ``verdict``.
        """
        return release_counts.exposure_table(self.lines)

    @property
    def alarm(self) -> str:
        """Return one sentence if a site released as many numbers as unknowns in this session; else empty."""
        return release_counts.exposure_warning(self.lines)

    @property
    def losses(self) -> list[str]:
        """Return one sentence for each time that a site's owner declared the loss of a ledger."""
        return [
            LOSS_CAVEAT.format(site=site, time=utc_text(time))
            for site, one in self.statements.items()
            if one.site_ledger is not None
            for time in one.site_ledger.lost
        ]

    @property
    def budgets(self) -> list[str]:
        """One sentence for each site with a privacy budget: how much of it is charged, over all sessions."""
        return [
            f"{site}: of its privacy budget {one.privacy}, over all sessions."
            for site, one in self.statements.items()
            if one.privacy is not None
        ]

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, no spaces, one final newline."""
        statements = (
            f"{event_log.canonical_json(k)}:{one.to_json()}" for k, one in sorted(self.statements.items())
        )
        absent = f'"absent":{event_log.canonical_json(to_plain(self.absent))},' if self.absent else ""
        return (
            f'{{{absent}"at":{event_log.canonical_json(self.at)},"fields":{event_log.canonical_json(event_log.LINK_FIELDS)},'
            f'"format":"{RECEIPT_FORMAT}","passed":{_rows(self.passed)},'
            f'"session":{event_log.canonical_json(self.session)},"statements":{{{",".join(statements)}}}}}\n'
        )

    @classmethod
    def from_json(cls, content: str) -> Receipt:
        """Read what :meth:`to_json` wrote; this does not verify it.

        Raises
        ------
        ReceiptError
            The text is no receipt, or not in canonical form.
        """
        where = "not a receipt, or damaged"
        try:
            plain = json.loads(content)
            head = {"session": plain["session"], "at": plain["at"], "passed": [], "statements": {}}
            head["absent"] = plain.get("absent", [])
            receipt = replace(
                from_plain(cls, head, where, ReceiptError),
                passed=tuple(map(event_log.read_entry, plain["passed"])),
                statements={
                    site: SiteStatement.from_dict(one, where) for site, one in plain["statements"].items()
                },
            )
            same = receipt.to_json() == content
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ReceiptError(f"{where} ({type(error).__name__})") from error
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
        rows = [
            {"site": site, **one.named}
            for site, reported in self.statements.items()
            for one in reported.entries
        ]
        return pd.DataFrame(rows, columns=["site", *event_log.LINK_FIELDS, event_log.CHARGED_FIELD])

    def sites(self) -> pd.DataFrame:
        """One row per site: entries, refusals, place of the session, head, version, fingerprint.

        Where a site reads its records once, and not for every answer, also the time at which it did.
        """
        read = {"data as of": [one.as_of for one in self.statements.values()]}
        return pd.DataFrame(
            {
                "entries": [len(one.entries) for one in self.statements.values()],
                "refusals": [
                    sum(entry.kind == event_log.REFUSAL for entry in one.entries)
                    for one in self.statements.values()
                ],
                "session no.": [one.ordinal for one in self.statements.values()],
                "head": [one.head[:16] for one in self.statements.values()],
                "fedstat": [one.version for one in self.statements.values()],
                "key": [one.keys.fingerprint[:19] for one in self.statements.values()],
                **(read if any(read["data as of"]) else {}),
            },
            index=pd.Index(list(self.statements), name="site"),
        )

    def __str__(self) -> str:
        n_sites = len(self.statements)
        head = f"Receipt of session {self.session}: {n_sites} sites, {len(self.passed):,} entries"
        tables = [self.sites().to_string(), self.released.to_string(index=False)]
        reported = [*filter(None, [self.alarm]), *self.budgets, *self.losses, *map(str, self.absent)]
        return "\n\n".join([head, *tables, RECEIPT_CAVEAT, *reported])

    def __repr__(self) -> str:
        return f"<Receipt of session {self.session}: {', '.join(self.statements)}>"

    def _repr_html_(self) -> str:
        head = f"<p>Receipt of session {escape(self.session)}</p>"
        tables = self.sites().to_html() + self.released.to_html(index=False)
        reported = [RECEIPT_CAVEAT, self.alarm, *self.budgets, *self.losses, *map(str, self.absent)]
        return f"{head}{tables}<p>{escape(' '.join(reported))}</p>"


def _rows(entries: Sequence[event_log.Entry]) -> str:
    return f"[{','.join([entry.text for entry in entries])}]"


def coordinator_digest(
    at: str | None, passed: Sequence[event_log.Entry], absent: Sequence[event_log.AbsentSite] = ()
) -> str:
    """SHA-256 of the coordinator's ledger."""
    lost = f'"absent":{event_log.canonical_json(to_plain(tuple(absent)))},' if absent else ""
    content = f'{{{lost}"at":{event_log.canonical_json(at)},"passed":{_rows(passed)}}}'
    return hashlib.sha256(content.encode()).hexdigest()
