"""What a file of VFEM results holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedstat.errors import ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.inference.estimate import Estimate, LedgerLike
from fedstat.models.saved import ledger_content, read_ledger, write
from fedstat.models.vfem.prediction import Response
from fedstat.models.vfem.statements.outcome import EntityCounts, VFEMOutcome
from fedstat.records import from_plain, to_plain
from fedstat.typing import Array

FORMAT = "fedstat vfem results 2"


@dataclass(frozen=True, slots=True)
class VFEMRecord:
    """What a file of results holds: no value per entity.

    Parameters
    ----------
    estimate, outcome, counts, notes
        See :class:`BlockResults`.
    response : Response
        Where the response was.
    specs : mapping of str to str
        How each client's columns are coded, with means and knots of transforms.
    """

    estimate: Estimate
    outcome: VFEMOutcome
    counts: EntityCounts
    notes: list[str]
    response: Response
    specs: Mapping[str, str]


def save_record(path: Path, record: VFEMRecord, ledger: LedgerLike | None) -> None:
    """Write a record of results and their ledger to a file."""
    arrays: dict[str, Array] = {}
    content = {"record": to_plain(record, arrays), "ledger": ledger_content(ledger)}
    write(path, FORMAT, content, arrays)


def read_record(header: Mapping[str, str], arrays: Mapping[str, Array]) -> tuple[VFEMRecord, Ledger | None]:
    """Read what :func:`save_record` wrote."""
    content = json.loads(header["content"])
    record = from_plain(VFEMRecord, content["record"], "its record", ModelError, arrays=arrays)
    return record, read_ledger(content["ledger"])
