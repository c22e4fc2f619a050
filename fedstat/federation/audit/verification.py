"""Verification of a receipt: signatures, digests and agreement between coordinator and sites."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from fedstat.errors import ReceiptError
from fedstat.federation.audit import event_log
from fedstat.federation.audit.receipt import Receipt, SiteStatement, coordinator_digest
from fedstat.federation.audit.release_counts import counts_as_equation
from fedstat.federation.crypto.keys import normalize_fingerprint

MAX_PROBLEMS_SHOWN = 20
_UTC_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found: all is well where there are no problems.

    Parameters
    ----------
    session : str
        Empty where the file could not be read.
    sites : tuple of str
    entries : int
        Entries in all chains.
    problems : tuple of str

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> receipt = fs.GLORE.from_formula("num > 0 ~ age", partition).fit().receipt()
    >>> found = fs.verify_receipt(receipt, partition.fingerprints)
    >>> found.ok, len(found.problems)
    (True, 0)
    """

    session: str
    sites: tuple[str, ...]
    entries: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return (
                f"Receipt of session {self.session} verified: {len(self.sites)} sites signed "
                f"{self.entries:,} entries, and the coordinator's ledger is the same"
            )
        reported = list(self.problems[:MAX_PROBLEMS_SHOWN])
        if len(self.problems) > MAX_PROBLEMS_SHOWN:
            reported.append(f"and {len(self.problems) - MAX_PROBLEMS_SHOWN} more")
        return "\n".join(["The receipt does NOT verify:", *(f"  * {problem}" for problem in reported)])

    __repr__ = __str__


def verify_receipt(
    receipt: Receipt | str | Path, keys: Mapping[str, str], *, strict: bool = True
) -> Verification:
    """Check a receipt against the fingerprints of the sites' keys.

    It detects any change of a field; an entry that was removed, added, moved or repeated; a shortened chain;
    a statement by another key or of another session; a missing site; and every difference between the
    coordinator's ledger and a site's. It cannot detect what a site and the coordinator both omit, nor
    messages that bypass a site's checks.

    Parameters
    ----------
    receipt : Receipt or path
        What ``result.receipt()`` gives, or the file that its ``save`` wrote.
    keys : mapping of str to str
        Fingerprint of every site of the partition, obtained from the sites (not the coordinator):
        ``partition.fingerprints``, or on paper. Spaces, colons and case do not matter.
    strict : bool
        Whether to raise where something is wrong, so that no script goes on by mistake.

    Returns
    -------
    Verification
        With ``ok`` and ``problems``; it can be printed.

    Raises
    ------
    ReceiptError
        Something is wrong, and what; not with ``strict=False``.
    OSError
        The file cannot be read.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.GLORE.from_formula("num > 0 ~ age", partition).fit().receipt().save("fit.json")
    >>> fs.verify_receipt("fit.json", partition.fingerprints).ok
    True
    """
    try:
        found = (
            Receipt.from_json(receipt.to_json()) if isinstance(receipt, Receipt) else Receipt.load(receipt)
        )
    except ReceiptError as error:
        report = Verification("", (), 0, (str(error),))
    else:
        entries = sum(len(one.entries) for one in found.statements.values())
        report = Verification(found.session, tuple(found.statements), entries, tuple(_problems(found, keys)))
    if strict and not report.ok:
        raise ReceiptError(str(report))
    return report


def _problems(receipt: Receipt, keys: Mapping[str, str]) -> list[str]:
    problems = [
        f"{site}: there is no statement of this site" for site in keys if site not in receipt.statements
    ]
    if receipt.at is not None and receipt.at not in receipt.statements:
        problems.append(f"the coordinator is said to sit at '{receipt.at}', which has no statement")
    digest = coordinator_digest(receipt.at, receipt.passed, receipt.absent)
    for site, statement in receipt.statements.items():
        if site not in keys:
            problems.append(f"{site}: no fingerprint was given for this site")
            continue
        problems += _statement_problems(receipt.session, site, statement, keys[site], digest)
        carried = [entry for entry in receipt.passed if site in (entry.sender, entry.receiver)]
        problems += [f"{site}: {what}" for what in _differences(carried, statement.entries)]
    known = {event_log.COORDINATOR, *receipt.statements}
    if any({entry.sender, entry.receiver} - known for entry in receipt.passed):
        problems.append("the coordinator's ledger has entries of a site without a statement")
    return problems


def _statement_problems(
    session: str, site: str, statement: SiteStatement, fingerprint: str, digest: str
) -> list[str]:
    """Look for what is wrong with a site's statement by itself."""
    problems = []
    if statement.site != site:
        problems.append(f"the statement is that of '{statement.site}'")
    if statement.session != session:
        problems.append(f"the statement is on another session, '{statement.session}'")
    if statement.keys.digest.hex() != normalize_fingerprint(fingerprint):
        problems.append("the statement is by another key than the one whose fingerprint was given")
    if not _is_signed(statement):
        problems.append("the signature is wrong: the statement was changed after the site signed it")
    if statement.site_ledger is not None and not statement.site_ledger.is_of(statement.keys):
        problems.append("the head of the site's ledger does not have its signature")
    if statement.coordinator != digest:
        problems.append("the site signed another ledger of the coordinator than the one in the receipt")
    first = event_log.genesis_digest(
        statement.site, statement.keys, statement.session, statement.ordinal, statement.previous
    )
    for entry in statement.entries:
        first = event_log.extended_digest(first, entry)
    if first.hex() != statement.head:
        problems.append("the chain is broken: an entry was changed, removed, added, moved or cut off")
    return [f"{site}: {problem}" for problem in [*problems, *_entry_problems(statement)]]


def _is_signed(statement: SiteStatement) -> bool:
    try:
        signature = bytes.fromhex(statement.signature)
    except ValueError:
        return False
    # other digits for the same bytes would be another text of the same receipt
    return signature.hex() == statement.signature and statement.keys.has_signed(
        event_log.canonical_json(statement.signed()).encode(), signature
    )


def _entry_problems(statement: SiteStatement) -> list[str]:
    """Search for entries that are impossible for a site, with any signature."""
    problems = []
    times = [entry.time for entry in statement.entries]
    if not all(_UTC_PATTERN.fullmatch(time) for time in times) or any(b < a for a, b in pairwise(times)):
        problems.append("the times of the entries are malformed, or run backwards")
    if any(not _is_possible(entry, statement.site) for entry in statement.entries):
        problems.append("an entry has an impossible round, shape or number of equations")
    rounds = [entry.round for entry in statement.entries]
    if any(b < a for a, b in pairwise(rounds)):
        problems.append("the rounds run backwards")
    return problems


def _is_possible(entry: event_log.SiteEntry, site: str) -> bool:
    outward = (entry.sender, entry.receiver) == (site, event_log.COORDINATOR)
    if not outward and (entry.sender, entry.receiver) != (event_log.COORDINATOR, site):
        return False
    most = math.prod(entry.shape) if entry.shape or entry.array != event_log.TEXT else 0
    return entry.round > 0 and entry.numbers <= (most if counts_as_equation(entry.kind, outward) else 0)


def _differences(carried: list[event_log.Entry], entries: tuple[event_log.SiteEntry, ...]) -> list[str]:
    """Where the coordinator's ledger and a site's part, up to the first entry that only one of them has."""
    problems = []
    if len(carried) != len(entries):
        problems.append(
            f"the coordinator's ledger has {len(carried):,} entries with this site, its own {len(entries):,}"
        )
    for place, (ours, theirs) in enumerate(zip_longest(carried, entries), 1):
        if ours is None or theirs is None or not theirs.agrees_with(ours):
            where = ours or theirs
            assert where is not None
            problems.append(
                f"entry {place} ({where.step}, {where.array or where.kind}) is not the same in the "
                f"coordinator's ledger and in the site's own: {_differing_fields(ours, theirs)}"
            )
            break
    return problems


def _differing_fields(ours: event_log.Entry | None, theirs: event_log.Entry | None) -> str:
    """Name the fields in which two entries differ."""
    if ours is None or theirs is None:
        return "only one of them has it"
    return ", ".join(
        name
        for name, a, b in zip(event_log.SIGNED_FIELDS, ours.signed, theirs.signed, strict=False)
        if a != b
    )
