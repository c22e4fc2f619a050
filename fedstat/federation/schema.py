"""What a site tells of its table before any model: names and types of columns, and the number of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstat.errors import MessageError, PolicyError
from fedstat.federation.engine import Rounds
from fedstat.federation.message import Ask, Declared, Step
from fedstat.federation.partition_kinds import arrow_kind, kind
from fedstat.federation.policy import Policy
from fedstat.federation.site import FAMILIES, SiteData, State
from fedstat.federation.sources_sql import SqlTable
from fedstat.federation.table import FrameTable, LabelledTable, ParquetTable, Table
from fedstat.typing import Array

FAMILY = "schema"


@dataclass(frozen=True, slots=True)
class TableSchema:
    """What a site tells of its table.

    Parameters
    ----------
    columns : mapping of str to str or None
        What each column holds; None for one without a value.
    n_rows : int
    site_column : str
        Name under which the site itself stands in a formula; empty for none.
    """

    columns: Mapping[str, str | None]
    n_rows: int
    site_column: str = ""


def table_schema(site: str, table: Table, policy: Policy) -> TableSchema:
    """Describe a table as others will see it.

    Raises
    ------
    PolicyError
        It has fewer rows than the owner lets others count.
    """
    if table.n_rows < policy.min_count:
        raise PolicyError(
            f"{site}: its policy (minimum count) wants at least {policy.min_count} rows behind what is told "
            "of its table, and there are fewer. Leave the site out"
        )
    label = table.name if isinstance(table, LabelledTable) else ""
    inner = table.table if isinstance(table, LabelledTable) else table
    return TableSchema({name: _kind(inner, name) for name in inner.columns}, inner.n_rows, label)


def _kind(table: Table, name: str) -> str | None:
    if isinstance(table, FrameTable):
        return kind(table.frame[name])
    if isinstance(table, ParquetTable):
        return arrow_kind(table.schema.field(name).type)
    if isinstance(table, SqlTable):
        return table.kinds[name]
    return None


def describe_table(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Tell names and types of the columns, and how many rows there are."""
    found = table_schema(data.name, data.table, data.policy)
    content = {"columns": found.columns, "n_rows": found.n_rows, "site_column": found.site_column}
    return {}, json.dumps(content)


STEPS: Mapping[str, Step] = {
    "describe_table": Step(
        describe_table,
        text_in=Declared("control", "nothing"),
        text_out=Declared("schema", "names and types of the columns, number of rows"),
    ),
}
FAMILIES[FAMILY] = STEPS


def ask_schemas(sites: Sequence[str], session: str) -> Rounds[dict[str, TableSchema]]:
    """Ask every site what its table looks like.

    Raises
    ------
    MessageError
        A site's answer is not such a description.
    PolicyError
        A site has too few rows, or its owner does not allow the question.
    """
    replies = yield [Ask(site, FAMILY, "describe_table", {}, session, "{}") for site in sites]
    return {reply.site: _read(reply.site, reply.text) for reply in replies}


def _read(site: str, text: str) -> TableSchema:
    try:
        content: dict[str, Any] = json.loads(text)
        columns = {str(name): None if k is None else str(k) for name, k in content["columns"].items()}
        return TableSchema(columns, int(content["n_rows"]), str(content["site_column"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MessageError(f"{site}: its description of its table is malformed") from error
