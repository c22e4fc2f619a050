"""Saved results: arrays and JSON, without executable content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from fedstat.errors import FedstatError, MessageError, ModelError
from fedstat.federation.audit.event_log import Entry
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.audit.receipt import Receipt
from fedstat.federation.message import unpack
from fedstat.inference.estimate import LedgerLike
from fedstat.models import INSTALLED
from fedstat.typing import Array

Reader: TypeAlias = Callable[[Mapping[str, str], Mapping[str, Array]], Any]

READERS: dict[str, Reader] = {}
"""Readers by the format that a file declares; a family's are there once it is imported."""


def load(path: str | Path) -> Any:
    """Read results that ``save`` wrote: estimates, covariance, ledger, and all that follows from them.

    Methods that need the rows of the fit (fitted values, residuals, a new score test) are not available;
    predictions are made for given rows or a given partition.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Results
        Model family of the file.

    Raises
    ------
    ModelError
        The file is not one that this version of fedstat saved.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().save("heart.fed")
    >>> fs.load("heart.fed").params.round(2).to_dict()
    {'Intercept': -4.24, 'age': 0.06, 'sex': 1.48}
    """
    path = Path(path)
    try:
        header, arrays = unpack(path.read_bytes())
    except MessageError as error:
        raise ModelError(f"{path.name}: not a file of results that fedstat saved") from error
    form = header.get("format", "")
    # A family enters its reader when its module is imported, which a fresh session has not done.
    named = [family for family in form.split() if family in INSTALLED]
    for family in filter(INSTALLED.get, named or INSTALLED):
        import_module(f"fedstat.models.{family}.model")
    if form not in READERS:
        received = header.get("format")
        raise ModelError(f"{path.name}: expected one of the formats {sorted(READERS)}, received {received!r}")
    try:
        return READERS[form](header, arrays)
    # A file from an untrusted source may have any error; the cause stays attached for its author.
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, FedstatError) as error:
        reported = f": {error}" if isinstance(error, FedstatError) else ""
        raise ModelError(f"{path.name}: the file is incomplete ({type(error).__name__}){reported}") from error


@dataclass(frozen=True, slots=True)
class SavedLedger:
    """What a file holds of a ledger; the receipt in the canonical form that is signed."""

    at: str | None
    entries: tuple[Entry, ...]
    rounds: int
    receipt: str | None
    setting: str
    waited: float = 0.0

    @classmethod
    def of(cls, ledger: LedgerLike | None) -> SavedLedger | None:
        """Convert a ledger to plain values; None without a ledger."""
        if not isinstance(ledger, Ledger):
            return None
        receipt = None if ledger.receipt is None else ledger.receipt.to_json()
        return cls(ledger.at, tuple(ledger.entries), ledger.rounds, receipt, ledger.setting, ledger.waited)

    def restore(self) -> Ledger:
        """Rebuild the ledger."""
        receipt = None if self.receipt is None else Receipt.from_json(self.receipt)
        absent = () if receipt is None else receipt.absent
        return Ledger(
            self.at,
            [(entry.round, entry) for entry in self.entries],
            self.rounds,
            self.waited,
            receipt=receipt,
            setting=self.setting,
            absent=absent,
        )
