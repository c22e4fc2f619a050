"""Results in a file: arrays and JSON, nothing that runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from fedstat.errors import FedstatError, MessageError, ModelError
from fedstat.federation.account.ledger import Entry, Ledger
from fedstat.federation.account.receipt import Receipt
from fedstat.federation.message import pack, unpack
from fedstat.inference.estimate import Estimate, LedgerLike
from fedstat.inference.summary import ClientBlock
from fedstat.models import INSTALLED
from fedstat.typing import Array, Floats

Reader: TypeAlias = Callable[[Mapping[str, str], Mapping[str, Array]], Any]

READERS: dict[str, Reader] = {}
"""Readers by the format that a file declares; a family enters its own when it is imported."""


def load(path: str | Path) -> Any:
    """Read results that ``save`` wrote: estimates, covariance, ledger, and all that follows from them.

    What needs the rows of the fit (fitted values, residuals, a new score test) is not in the file;
    predictions are made for the rows or the partition that you give.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    FederatedResults
        Of the family that wrote it.

    Raises
    ------
    ModelError
        The file is not one that fedstat saved.
    """
    path = Path(path)
    try:
        header, arrays = unpack(path.read_bytes())
    except MessageError as error:
        raise ModelError(f"{path.name}: not a file of results that fedstat saved") from error
    for family in filter(INSTALLED.get, INSTALLED):
        import_module(f"fedstat.models.{family}.model")
    reader = READERS.get(header.get("format", ""))
    if reader is None:
        raise ModelError(
            f"{path.name}: expected one of the formats {sorted(READERS)}, received {header.get('format')!r}"
        )
    try:
        return reader(header, arrays)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, FedstatError) as error:
        raise ModelError(f"{path.name}: the file is not whole ({type(error).__name__})") from error


def write(path: str | Path, form: str, content: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write a file of results.

    Parameters
    ----------
    path : str or Path
    form : str
        Name of the format, under which `READERS` finds the reader.
    content : mapping of str
        What JSON can hold; numbers come back to the bit.
    arrays : mapping of str to ndarray
    """
    Path(path).write_bytes(pack({"format": form, "content": json.dumps(content)}, arrays))


def estimate_content(estimate: Estimate) -> dict[str, Any]:
    """Take an estimate apart for JSON, but for `params` and `cov`, which belong to the arrays."""
    return without(asdict(estimate), "params", "cov")


def read_estimate(content: Mapping[str, Any], params: Floats, cov: Floats | None) -> Estimate:
    """Rebuild what :func:`estimate_content` took apart."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
    values["blocks"] = tuple(ClientBlock(**block) for block in content["blocks"])
    return Estimate(**values, params=params, cov=cov)


def ledger_content(ledger: LedgerLike | None) -> dict[str, Any] | None:
    """Take a ledger apart for JSON; None where there is none."""
    if not isinstance(ledger, Ledger):
        return None
    entries = [asdict(entry) for entry in ledger.entries]
    receipt = None if ledger.receipt is None else ledger.receipt.to_json()
    return {"at": ledger.at, "entries": entries, "rounds": ledger.rounds, "receipt": receipt}


def read_ledger(content: Mapping[str, Any] | None) -> Ledger | None:
    """Rebuild what :func:`ledger_content` took apart."""
    if content is None:
        return None
    entries = [Entry(**(row | {"shape": tuple(row["shape"])})) for row in content["entries"]]
    receipt = content.get("receipt")
    return Ledger(
        content["at"],
        entries,
        content["rounds"],
        receipt=None if receipt is None else Receipt.from_json(receipt),
    )


def without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Leave some entries out."""
    return {name: value for name, value in values.items() if name not in names}
