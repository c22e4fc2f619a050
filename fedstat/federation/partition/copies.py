"""What a pickle or a copy of a partition holds: tables and settings, of which sites are made anew."""

from __future__ import annotations

from fedstat.errors import NotAvailableError
from fedstat.federation.partition.local_sites import PartitionParts
from fedstat.federation.partition.row_tables import streams_query
from fedstat.federation.partition.views import PartitionViews
from fedstat.federation.tables.keys import Alignment

CONNECTED = (
    "a partition that was connected to is not pickled or copied: its sites are other processes, and all that "
    "is here is the connection. Call ClientPartition.connect() where it is needed"
)
QUERIED = (
    "a partition that streams a query is not pickled or copied, because of its connection to the database "
    "(at {}). Make it anew where it is needed"
)
RESULTS = "; results of fits can be pickled, or saved by save()"


def copied_parts(partition: PartitionViews) -> PartitionParts:
    """Take a partition apart whose rows are in this process or in files; NotAvailableError for others."""
    if partition._engine is not None:
        raise NotAvailableError(CONNECTED + RESULTS)
    if streamed := [client for client, table in partition._tables.items() if streams_query(table)]:
        raise NotAvailableError(QUERIED.format(", ".join(map(repr, streamed))) + RESULTS)
    rows, empty, tables = dict(partition.rows), dict(partition.empty_rows), dict(partition._tables)
    return PartitionParts(
        partition.layout,
        partition.key,
        Alignment(partition.entities, tables, rows, empty),
        partition._options,
        {},
        partition.site_column,
        division=partition.division,
        quorum=partition.quorum,
    )
