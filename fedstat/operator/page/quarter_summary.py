"""One page for a data protection officer: what a site released in a quarter, to whom, by which rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from fedstat.errors import PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure.approval import same_person
from fedstat.federation.disclosure.column_sums import exposure
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.transport.live_config import policy_changes
from fedstat.federation.transport.site_folder import open_records, read_description, read_site_policy
from fedstat.operator.page.audit_export import (
    AS_SUM,
    RELEASED_AS,
    AuditFilter,
    AuditLine,
    audit_lines,
    render_to_print,
)
from fedstat.operator.page.plan_summary import formula_in_words, plain_time
from fedstat.operator.page.released_arrays import EXPOSURE_HEAD, exposure_rows, refusals_of
from fedstat.operator.page.rendering import section_data

NONE = "none"
QUARTER = re.compile(r"(\d{4})-Q([1-4])")
MOST_QUESTIONS, MOST_COLUMNS = 3, 12
"""Questions of a study and columns that the page lists; the export has all."""
SUMS, ALONE, SINGLE = "only in sums over sites", "of this site alone", "about single records"
CLASSES: Mapping[str, str] = {
    RELEASED_AS["aggregate"]: ALONE,
    RELEASED_AS["noisy aggregate"]: ALONE,
    RELEASED_AS["masked share"]: SUMS,
    RELEASED_AS["sketch"]: SINGLE,
    RELEASED_AS["per entity"]: SINGLE,
    RELEASED_AS["raw columns"]: SINGLE,
}


@dataclass(frozen=True, slots=True)
class Quarter:
    """A quarter of a year, in UTC."""

    year: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Quarter:
        """Read a quarter as 2026-Q4; an empty text is the present one. PartitionError for anything else."""
        if not text:
            today = datetime.now(UTC)
            return cls(today.year, (today.month + 2) // 3)
        if (found := QUARTER.fullmatch(text)) is None:
            raise PartitionError(f"'{text}' is not a quarter; write it as 2026-Q4")
        return cls(int(found[1]), int(found[2]))

    @property
    def first(self) -> str:
        """First day."""
        return f"{self.year:04d}-{3 * self.number - 2:02d}-01"

    @property
    def last(self) -> str:
        """Last day."""
        month = 3 * self.number + 1
        after = datetime(self.year + (month > 12), (month - 1) % 12 + 1, 1, tzinfo=UTC)
        return (after - timedelta(days=1)).strftime("%Y-%m-%d")

    def has(self, when: str) -> bool:
        """Return whether a time in UTC belongs to it."""
        return self.first <= when[:10] <= self.last

    def __str__(self) -> str:
        return f"{self.year:04d}-Q{self.number}"


def summary_page(site: str, quarter: Quarter, tables: Mapping[str, tuple[Path, SiteLedger]]) -> str:
    """Render the summary of all tables of a site, by name with their folders, as a page to print."""
    wanted = AuditFilter(since=quarter.first, until=quarter.last)
    lines = [line for name, (_, one) in tables.items() for line in audit_lines(one, wanted, name)]
    ledgers = [ledger for _, ledger in tables.values()]
    refused = refusal_rows(ledgers, quarter)
    changes = [row for ledger in ledgers for row in change_rows(ledger, quarter)]
    budgets = [
        (name or "privacy budget, since the ledger began", str(spent))
        for name, (folder, ledger) in tables.items()
        if (spent := read_budget_spent(read_site_policy(folder), ledger)) is not None
    ]
    return render_to_print(
        "summary.html",
        site=site,
        quarter=str(quarter),
        period=f"{quarter.first} to {quarter.last} (UTC)",
        brief=[*brief_rows(lines, ledgers, quarter, refused, changes), *budgets],
        asked=asked_rows(lines),
        columns=column_rows(lines),
        left_out=max(len(_columns_of(lines)) - MOST_COLUMNS, 0),
        refused=refused,
        changes=changes,
        exposure_head=EXPOSURE_HEAD,
        exposed=[
            (name, section_data(partial(exposed_rows, folder, ledger)))
            for name, (folder, ledger) in tables.items()
        ],
        losses=[loss for ledger in ledgers for loss in ledger.losses if quarter.has(loss[0])],
    )


def _class_of(line: AuditLine) -> str:
    """Return how the numbers of a line were released; empty for names and technical answers."""
    if not line.numbers:
        return ""
    return SUMS if line.released_as.startswith(AS_SUM) else CLASSES.get(line.released_as, "")


def _analyses(lines: Iterable[AuditLine]) -> set[tuple[str, str, str]]:
    """Return the analyses that released numbers: table, session and formula."""
    return {(line.table, line.session, line.formula) for line in lines if _class_of(line)}


def _numbers(lines: Iterable[AuditLine]) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in lines:
        found[_class_of(line)] += line.numbers
    return found


def brief_rows(
    lines: Sequence[AuditLine],
    ledgers: Iterable[SiteLedger],
    quarter: Quarter,
    refused: Sequence[tuple[str, ...]],
    changes: Sequence[tuple[str, ...]],
) -> list[tuple[str, str]]:
    """Return the figures with which the page begins."""
    numbers = _numbers(lines)
    decided = Counter(
        one.verdict
        for ledger in ledgers
        for one in ledger.decisions.values()
        if quarter.has(utc_text(one.when))
    )
    studies = {line.study for line in lines if line.study}
    weaker = sum(row[1] != NONE for row in changes)
    return [
        ("Analyses that released numbers", f"{len(_analyses(lines)):,}"),
        ("Persons who asked", f"{len({same_person(line.person) for line in lines if line.person}):,}"),
        ("Studies", ", ".join(sorted(studies)) or NONE),
        *((f"Numbers {how}", f"{numbers[how]:,}") for how in (SUMS, ALONE, SINGLE)),
        ("Requests refused", f"{sum(int(row[2].replace(',', '')) for row in refused):,}"),
        ("Plans approved or denied by the owner", f"{decided['approved']:,} or {decided['denied']:,}"),
        ("Changes that made the policy weaker", f"{weaker:,}"),
    ]


def asked_rows(lines: Iterable[AuditLine]) -> list[tuple[str, ...]]:
    """Return one row for each person, study and purpose, the latest first."""
    found: dict[tuple[str, ...], list[AuditLine]] = {}
    for line in lines:
        if _class_of(line):
            found.setdefault((line.person, line.study, line.purpose), []).append(line)
    rows = []
    for (person, study, purpose), same in found.items():
        questions = list(dict.fromkeys(formula_in_words(one.formula) for one in same if one.formula))
        more = f"; and {len(questions) - MOST_QUESTIONS:,} more" * (len(questions) > MOST_QUESTIONS)
        allowed = {"the policy" if one.allowed_by == "the policy" else "the owner" for one in same}
        rows.append(
            (
                person or "not stated",
                study or "not stated",
                purpose or "not stated",
                ("; ".join(questions[:MOST_QUESTIONS]) or "tables and descriptions") + more,
                " and ".join(sorted(allowed)),
                f"{len(_analyses(same)):,}",
                max(one.last for one in same)[:10],
            )
        )
    return sorted(rows, key=lambda row: row[-1], reverse=True)


def _columns_of(lines: Iterable[AuditLine]) -> dict[str, list[AuditLine]]:
    found: dict[str, list[AuditLine]] = {}
    for line in lines:
        for name in line.columns.split(", ") if line.columns and _class_of(line) else ():
            found.setdefault(name, []).append(line)
    return found


def column_rows(lines: Iterable[AuditLine]) -> list[tuple[str, ...]]:
    """Return one row for each column, the most used first.

    The numbers of an analysis count for all its columns.
    """
    rows = []
    for name, same in _columns_of(lines).items():
        numbers = _numbers(same)
        counts = (f"{numbers[how]:,}" for how in (SUMS, ALONE, SINGLE))
        rows.append((len(_analyses(same)), (name, f"{len(_analyses(same)):,}", *counts)))
    return [row for _, row in sorted(rows, key=lambda one: (-one[0], one[1]))][:MOST_COLUMNS]


def refusal_rows(ledgers: Iterable[SiteLedger], quarter: Quarter) -> list[tuple[str, ...]]:
    """Count refusals by person and rule."""
    found: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], str] = {}
    for ledger in ledgers:
        for chain in ledger.chains:
            for entry in refusals_of(chain):
                if quarter.has(entry.time):
                    rule = entry.rule.partition(" (")[2].removesuffix(")") or entry.rule
                    key = chain.subject.person or "not stated", rule
                    found[key] += 1
                    last[key] = max(last.get(key, ""), entry.time)
    return [(*key, f"{count:,}", last[key][:10]) for key, count in found.most_common()]


def change_rows(ledger: SiteLedger, quarter: Quarter) -> list[tuple[str, ...]]:
    """Return the changes of the policy, the latest first."""
    return [
        (plain_time(utc_text(one.when)), "; ".join(one.weaker) or NONE, "; ".join(one.stricter) or NONE)
        for one in reversed(policy_changes(ledger.policies))
        if quarter.has(utc_text(one.when))
    ]


def exposed_rows(folder: Path, ledger: SiteLedger) -> list[tuple[str, ...]]:
    """Return the largest share of one row in all releases so far, by column."""
    found = exposure(open_records(folder, read_description(folder)), ledger)
    return exposure_rows(found)[:MOST_COLUMNS]
