"""Threat table: who can learn what, under which policy."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedstat.federation.disclosure.policy import Policy, site_policies
from fedstat.federation.disclosure.rules import PARTIES
from fedstat.federation.disclosure.threat_statements import (
    ALL_ROWS_THREAT,
    threats_under,
)
from fedstat.inference.tables import Sheet, SheetSummary

HEADERS = ("Who", "Under", "Can learn")
EVERYBODY, STRICT, ONE_PROCESS = "Everybody", "strict", "one process"


class ThreatTable(SheetSummary):
    """Who can learn what under a policy; prints as a table, and :meth:`tidy` is the same as a frame.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.threats("strict")
    >>> table.as_markdown().splitlines()[0][:11], len(table.tidy()) > 3
    ('**Analyst**', True)
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self._rows = rows
        cells = tuple(tuple(row) for row in rows.itertuples(index=False))
        sheet = Sheet(HEADERS, cells, "lll", (19, 24, 65), "Who can learn what", wrap=True)
        notes = [f"{party} {does}." for party, does in PARTIES.items()]
        super().__init__([sheet], notes)

    def tidy(self) -> pd.DataFrame:
        """One row per sentence: ``party``, ``under``, ``learns``.

        ``under`` is "one process", "strict", or the line of the policy file that allows it.
        """
        return self._rows.copy()

    def as_markdown(self) -> str:
        """Return one list of sentences for each party, as Markdown."""
        parts = []
        for party, rows in self._rows.groupby("party", sort=False):
            does = f" ({PARTIES[str(party)]})" if party in PARTIES else ""
            lines = [
                f"- {learns}" if under == STRICT else f"- `{under}`: {learns}"
                for under, learns in rows[["under", "learns"]].itertuples(index=False)
            ]
            parts.append("\n".join([f"**{party}**{does}:\n", *lines]))
        return "\n\n".join(parts)


def threats(policy: Policy | str | Path | None = None) -> ThreatTable:
    """State what an analyst, coordinators, other sites, and intruders can learn.

    Parameters
    ----------
    policy : Policy, path, "open" or "strict", optional
        Policy of a site that is served. By default: what is learned in one process, under the strict policy,
        and in addition with every line that allows more.

    Returns
    -------
    ThreatTable
        It can be printed; ``tidy()`` is a DataFrame.

    Raises
    ------
    PartitionError
        The policy or its file is invalid.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.threats("strict").tidy().columns.tolist()
    ['party', 'under', 'learns']
    """
    # An open policy has every rule but the minimum counts loosened.
    (rules,) = site_policies(("site",), "open" if policy is None else policy).values()
    rows = [(EVERYBODY, ONE_PROCESS, ALL_ROWS_THREAT)] if policy is None else []
    rows += [(one.party, one.line or STRICT, one.learns) for one in threats_under(rules)]
    return ThreatTable(pd.DataFrame(rows, columns=["party", "under", "learns"]))
