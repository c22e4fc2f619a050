"""The schema of a site: columns and types, number of rows, and the owner's policy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fedstat import codec
from fedstat.errors import MessageError, PartitionError, PolicyError
from fedstat.federation.audit.budget_charges import BudgetSpent
from fedstat.federation.audit.receipt import UTC_PATTERN
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import MESSAGES, VERSION, InstalledVersion, Request, control, schema
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.shared_keys import compares_keys
from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.tables.columns import kind, object_kind
from fedstat.federation.tables.curve_columns import CurveTable
from fedstat.federation.tables.curves import CurveShape
from fedstat.federation.tables.published import Published
from fedstat.federation.tables.sql_table import SqlTable
from fedstat.federation.tables.table import FrameTable, LabeledTable, ParquetTable, Table, table_curves
from fedstat.typing import Array

FAMILY = "schema"


@dataclass(frozen=True, slots=True)
class LinkSchema:
    """A site's description of the key that links its records to those of others.

    Their order is that of the named alignment, empty for none; `changed` says whether the site was aligned by
    other keys than it has now.
    """

    key: tuple[str, ...]
    alignment: str
    changed: bool


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A site's description of its table: the kind of each column, None for one without a value.

    `site_column` is the name of the site's own column in a formula, or empty. With the owner's `policy` a fit
    can be explained before any request. `link` exists in the vertical layout only. `published` is the owner's
    description of the columns, by which requests are checked; `privacy` is the state of the privacy budget,
    None without one. `curves` have the points of columns that hold curves; `release` is the installed
    version. `changed` is the time since which the records differ from those of earlier releases, or empty.
    `compares_keys` says whether the site counts keys that others have as well.
    """

    columns: Mapping[str, str | None]
    n_rows: int
    site_column: str = ""
    policy: Policy = field(default_factory=Policy)
    link: LinkSchema | None = None
    published: Published = field(default_factory=dict)
    privacy: BudgetSpent | None = None
    curves: Mapping[str, CurveShape] = field(default_factory=dict)
    release: InstalledVersion = field(default_factory=InstalledVersion)
    changed: str = ""
    compares_keys: bool = False


@dataclass(frozen=True, slots=True)
class TableSchemaText:
    """A :class:`TableSchema` on its way, with the policy as the text of its file."""

    columns: Mapping[str, str | None]
    n_rows: Annotated[int, codec.Minimum(0)]
    site_column: str
    policy: str
    link: LinkSchema | None
    published: Published
    curves: Mapping[str, CurveShape]
    privacy: BudgetSpent | None
    release: InstalledVersion
    changed: str
    compares_keys: bool


def table_schema(site: str, table: Table, policy: Policy) -> TableSchema:
    """Describe a table as others will see it; a PolicyError where it has too few rows to be counted."""
    # Before anything else is released: the number of rows is itself a count of few entities.
    if table.n_rows < policy.min_count:
        raise PolicyError.of_rule(
            "minimum count",
            site,
            f"requires at least {policy.min_count} rows to describe its table, and there are fewer. "
            "Leave the site out",
        )
    label = table.name if isinstance(table, LabeledTable) else ""
    inner = table.table if isinstance(table, LabeledTable) else table
    columns = {name: _kind(inner, name) for name in inner.columns}
    link = None
    if isinstance(inner, AlignedTable):
        link = LinkSchema(inner.keys.key, inner.alignment, inner.changed)
    curves = {name: one.shape_reported for name, one in table_curves(inner).items()}
    return TableSchema(columns, inner.n_rows, label, policy, link, curves=curves)


def _kind(table: Table, name: str) -> str | None:
    if isinstance(table, FrameTable):
        return kind(table.frame[name])
    if isinstance(table, SqlTable) and name not in table.conversions:
        return table.kinds[name]  # with whole numbers as such
    return object_kind(table, name) if isinstance(table, ParquetTable | SqlTable | CurveTable) else None


@step(
    FAMILY,
    requests=control("nothing"),
    replies=schema(
        "names, types and public description of the columns, points of curves, number of rows, policy"
    ),
    public=True,
)
def describe_table(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Tell what the columns are and are published to be, how many rows, their link, policy and budget."""
    found = table_schema(data.name, data.table, data.policy)
    policy = found.policy.to_toml()
    published = {name: one for name, one in data.published.items() if name in found.columns}
    reported = TableSchemaText(
        columns=found.columns,
        n_rows=found.n_rows,
        site_column=found.site_column,
        policy=policy,
        link=found.link,
        published=published,
        privacy=read_budget_spent(data.policy, data.site_ledger),
        curves=found.curves,
        release=own_version(),
        changed=data.memory.changed,
        compares_keys=compares_keys(data),
    )
    return {}, codec.to_json(reported)


def own_version() -> InstalledVersion:
    """Say what runs here."""
    return InstalledVersion(VERSION, MESSAGES, tuple(sorted(FAMILIES)))


def request_schemas(sites: Sequence[str], session: str) -> FitProtocol[dict[str, TableSchema]]:
    """Ask every site what its table looks like.

    A MessageError where an answer is no such description, or that of a version whose messages are others, a
    PolicyError where a site has too few rows, or its owner does not allow the question.
    """
    replies = yield [Request(site, FAMILY, "describe_table", {}, session, "{}") for site in sites]
    return {reply.site: _read(reply.site, reply.text) for reply in replies}


def request_versions(sites: Sequence[str], session: str) -> FitProtocol[dict[str, InstalledVersion]]:
    """Ask every site what it runs, also one whose messages are others."""
    replies = yield [Request(site, FAMILY, "describe_table", {}, session, "{}") for site in sites]
    return {reply.site: _installed_version(reply.site, reply.text) for reply in replies}


def _read(site: str, text: str) -> TableSchema:
    release = _read_version(site, text)
    where = f"{site}: its description of its table"
    try:
        reported = codec.from_json(TableSchemaText, text, where)
        policy = Policy.from_text(f"{site}: its policy", reported.policy)
        if reported.changed and not UTC_PATTERN.fullmatch(reported.changed):
            raise MessageError(f"{where}: expected a time in UTC")
    except (PartitionError, MessageError) as error:
        if release.version == VERSION:
            raise MessageError(
                f"{where} is malformed, though both sides run fedstat {VERSION} (messages {MESSAGES}). "
                "If one was installed from a source tree, install the same commit at both"
            ) from error
        raise MessageError(_other_version(site, release)) from error
    return TableSchema(
        reported.columns,
        reported.n_rows,
        reported.site_column,
        policy,
        reported.link,
        reported.published,
        reported.privacy,
        reported.curves,
        reported.release,
        reported.changed,
        reported.compares_keys,
    )


def _read_version(site: str, text: str) -> InstalledVersion:
    """Read what a site runs, before anything that another version may have said in another way.

    MessageError if its messages are others.
    """
    release = _installed_version(site, text)
    if release.messages != MESSAGES:
        raise MessageError(_other_version(site, release))
    return release


def _installed_version(site: str, text: str) -> InstalledVersion:
    try:
        reported = json.loads(text).get("release", {})
        known = {name: reported[name] for name in ("version", "messages", "families") if name in reported}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MessageError(f"{site}: its description of its table is malformed") from error
    return codec.from_plain(InstalledVersion, known, f"{site}: its version", defaults=True)


def _other_version(site: str, release: InstalledVersion) -> str:
    there = release.version or "of an earlier version without a number"
    return (
        f"{site}: it runs fedstat {there} (messages {release.messages}), and here runs {VERSION} (messages "
        f"{MESSAGES}): they do not understand each other. Install the same version at both, and start the "
        "site's service again"
    )


def change_remarks(schemas: Mapping[str, TableSchema]) -> Iterator[str]:
    """One line per site whose records have changed since its earlier releases."""
    for site, found in schemas.items():
        if found.changed:
            yield (
                f"{site}: its records have changed since {found.changed}. Results differ from those of "
                "earlier analyses, and the site refuses sums that would reveal the change of few records"
            )


def version_remarks(schemas: Mapping[str, TableSchema]) -> Iterator[str]:
    """One line where sites run other versions that understand this one."""
    others = {site: one.release.version for site, one in schemas.items() if one.release.version != VERSION}
    if others:
        reported = ", ".join(f"{version} at {site}" for site, version in others.items())
        yield (
            f"fedstat is {VERSION} here, and {reported}. They understand each other, but numbers may differ "
            "in their last digits, and an earlier version may lack what a model asks: install one version"
        )
