"""What has left a site, to whom and why: by period, study, person, formula and column."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from math import prod

from fedstat.federation.audit.event_log import SiteEntry, SiteLedger, Subject
from fedstat.federation.disclosure.approval import same_person
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY, load_families
from fedstat.operator.page.plan_summary import formula_in_words, plain_time
from fedstat.operator.page.rendering import render

# ----------------------------------------------------------------------------------------------------
# Releases of the ledger, one line for each array of an analysis, with the reasons for it.

RELEASED_AS: Mapping[str, str] = {
    "aggregate": "total of this site alone",
    "noisy aggregate": "total of this site alone, with random noise",
    "masked share": "random share of a product with another site",
    "schema": "description: names, kinds, numbers of records",
    "control": "technical answer",
    "presence": "which records exist",
    "sealed": "encrypted for another site",
    "sketch": "random combinations of records",
    "per entity": "a number for each record",
    "raw columns": "values of single records",
}
"""Kinds of values in words."""


AS_SUM = "only as a sum"
"""Beginning of the words for values that are masked."""
COUNTED_AS: Mapping[str, str] = {
    RELEASED_AS["aggregate"]: "of this site alone",
    RELEASED_AS["noisy aggregate"]: "of this site alone, with random noise",
    RELEASED_AS["masked share"]: "as shares of products with other sites",
    RELEASED_AS["sketch"]: "as random combinations of records",
    RELEASED_AS["per entity"]: "of single records",
    RELEASED_AS["raw columns"]: "that are values of single records",
}


@dataclass(frozen=True, slots=True)
class AuditLine:
    """The releases of one array in one analysis: when, to whom, in which study, why, and about which columns.

    `numbers` counts all released numbers, and `records` the most records behind one of them.
    """

    first: str
    last: str
    table: str
    person: str
    study: str
    purpose: str
    coordinator: str
    role: str
    allowed_by: str
    formula: str
    columns: str
    session: str
    family: str
    step: str
    array: str
    what: str
    released_as: str
    messages: int
    numbers: int
    records: int


AUDIT_FIELDS = tuple(one.name for one in fields(AuditLine))


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """What an export contains: days as YYYY-MM-DD, and texts that must agree; empty for all."""

    since: str = ""
    until: str = ""
    study: str = ""
    person: str = ""
    formula: str = ""
    column: str = ""

    def admits(self, entry: SiteEntry, subject: Subject) -> bool:
        """Return whether a release belongs to the export."""
        return (
            self.since <= entry.time[:10]
            and (not self.until or entry.time[:10] <= self.until)
            and self.study in ("", subject.study)
            and same_person(self.person) in ("", same_person(subject.person))
            and self.formula.replace(" ", "") in subject.formula.replace(" ", "")
            and (not self.column or self.column in subject.columns)
        )


def audit_lines(
    site_ledger: SiteLedger, wanted: AuditFilter, table: str = "", session: str | None = None
) -> Iterator[AuditLine]:
    """Yield the releases of a ledger, or of one session, in the order of the first."""
    load_families()
    for chain in site_ledger.chains:
        if session not in (None, chain.session):
            continue
        found: dict[tuple[object, ...], list[SiteEntry]] = {}
        for entry, subject in chain.described_entries():
            if entry.left and entry.family != RECEIPT_FAMILY and wanted.admits(entry, subject):
                key = (subject, entry.family, entry.step, entry.array, entry.kind, entry.masked, entry.among)
                found.setdefault(key, []).append(entry)
        for (subject_, *_), entries in found.items():
            assert isinstance(subject_, Subject)
            yield _line(site_ledger, table, chain.session, subject_, entries)


def _line(
    site_ledger: SiteLedger, table: str, session: str, subject: Subject, entries: Sequence[SiteEntry]
) -> AuditLine:
    one = entries[0]
    step = FAMILIES.get(one.family, {}).get(one.step)
    declared = None if step is None else step.given.get(one.array)
    decision = site_ledger.decisions.get(subject.plan)
    as_sum = f"{AS_SUM} over {one.among} sites" if one.masked else ""
    return AuditLine(
        first=entries[0].time,
        last=entries[-1].time,
        table=table,
        person=subject.person,
        study=subject.study,
        purpose=subject.purpose,
        coordinator=subject.client,
        role=subject.role,
        allowed_by="the policy" if decision is None else str(decision),
        formula=subject.formula,
        columns=", ".join(subject.columns),
        session=session,
        family=one.family,
        step=one.step,
        array=one.array,
        what="" if declared is None else declared.what,
        released_as=as_sum or RELEASED_AS.get(one.kind, one.kind),
        messages=len(entries),
        numbers=sum(prod(entry.shape) for entry in entries if entry.array != "text"),
        records=max(entry.entities for entry in entries),
    )


# ----------------------------------------------------------------------------------------------------
# The export as a CSV file or as a page to print.

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet compute a cell; names come from elsewhere."""


def as_csv(lines: Sequence[AuditLine]) -> str:
    """Write lines as CSV; a cell that a spreadsheet would compute begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(AUDIT_FIELDS)
    for line in lines:
        cells = [str(getattr(line, name)) for name in AUDIT_FIELDS]
        writer.writerow([f"'{cell}" if cell.startswith(FORMULA_SIGNS) else cell for cell in cells])
    return text.getvalue()


def group_analyses(lines: Sequence[AuditLine]) -> list[dict[str, object]]:
    """Group lines by analysis, for a page."""
    found: dict[tuple[str, ...], list[AuditLine]] = {}
    for line in lines:
        key = (line.table, line.session, line.person, line.study, line.purpose, line.formula, line.columns)
        found.setdefault(key, []).append(line)
    return [_analysis(same) for same in found.values()]


def _analysis(lines: Sequence[AuditLine]) -> dict[str, object]:
    one, last = lines[0], max(line.last for line in lines)
    # Names and counts are released before there can be a plan.
    allowed = next((line.allowed_by for line in lines if line.allowed_by != "the policy"), "the policy")
    return {
        "first": one.first,
        "title": formula_in_words(one.formula) if one.formula else "Agreement on columns and keys",
        "facts": [
            ("Requested by", one.person or "not stated"),
            ("Study", one.study or "not stated"),
            ("Purpose", one.purpose or "not stated"),
            ("Released", _amounts(lines)),
            ("Time", plain_time(one.first) + ("" if one.first == last else f" to {plain_time(last)}")),
            ("Allowed by", allowed + (f"; role {one.role}" if one.role else "")),
            ("Formula", one.formula or "none"),
            ("Columns", one.columns or "none"),
            ("Coordinator", one.coordinator or "in the same process"),
        ],
        "rows": [
            (line.what, line.released_as, f"{line.messages:,}", f"{line.numbers:,}", f"{line.records:,}")
            for line in lines
        ],
    }


def _amounts(lines: Sequence[AuditLine]) -> str:
    """Count the released numbers by how they were released, without technical answers and names."""
    found: dict[str, int] = {}
    for line in lines:
        as_sum = line.released_as.startswith(AS_SUM)
        if line.numbers and (as_sum or line.released_as in COUNTED_AS):
            kind = line.released_as if as_sum else COUNTED_AS[line.released_as]
            found[kind] = found.get(kind, 0) + line.numbers
    return (
        "; ".join(f"{n:,} numbers {kind}" for kind, n in found.items()) or "no numbers computed from records"
    )


def audit_page(site: str, wanted: AuditFilter, lines: Sequence[AuditLine]) -> str:
    """Render the releases as one page without scripts, to print."""
    chosen = [(one.name, getattr(wanted, one.name)) for one in fields(wanted) if getattr(wanted, one.name)]
    return render_to_print("audit.html", site=site, chosen=chosen, analyses=group_analyses(lines))


def render_to_print(template: str, **data: object) -> str:
    """Render a page without scripts and links, which has its style in itself."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    text = render(template, **data)
    # Outside of the template, which escapes every value: names can have no tags, so the first is its own.
    return text.replace("<style></style>", f"<style>{style}</style>", 1)
