"""Saved results: arrays and JSON, without executable content."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from fedstat.codec import from_plain, to_plain
from fedstat.errors import FedstatError, MessageError, ModelError
from fedstat.federation.audit.event_log import Entry
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.audit.receipt import Receipt
from fedstat.federation.message import pack, unpack
from fedstat.inference.estimate import LedgerLike
from fedstat.models import INSTALLED
from fedstat.typing import Array

Reader: TypeAlias = Callable[[Mapping[str, str], Mapping[str, Array]], Any]

READERS: dict[str, Reader] = {}
"""Readers by the format that a file declares; a family's are there once it is imported."""
FORMER = re.compile(
    r"fedstat (glm results [1-5]|vertical glm results 1|vglm results [12]|vfem (glm )?results [12]|"
    r"fedavg results 1)"
)
"""Formats of version 0.1.0 before a file was a record of fields."""


class Serializable:
    """Results that a file can hold: as a record, of whose fields the codec makes arrays and JSON.

    ``class Results(Saveable, ..., saved_as="fedstat family results 1", record=Record)`` names the format of
    the file, to be counted up when the record changes, and the dataclass of what it holds.
    """

    _saved_as: ClassVar[str]
    _record_type: ClassVar[type]

    def __init_subclass__(cls, saved_as: str = "", record: type | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if record is not None:
            cls._saved_as, cls._record_type = saved_as, record
            READERS[saved_as] = cls._read_content

    def _to_record(self) -> Any:
        """All that is kept of the results, without a value of a row."""
        raise NotImplementedError

    @classmethod
    def _of_record(cls, record: Any) -> Self:
        """Rebuild results from what is kept of them."""
        raise NotImplementedError

    @classmethod
    def _read_content(cls, header: Mapping[str, str], arrays: Mapping[str, Array]) -> Self:
        """Rebuild results from the content of a file."""
        content = json.loads(header["content"])
        return cls._of_record(from_plain(cls._record_type, content, "its content", ModelError, arrays=arrays))

    def save(self, path: str | Path) -> None:
        """Write the results to a file of arrays and JSON; read it with :func:`fedstat.load`.

        It holds the estimates, what follows from them, the ledger, and how columns are coded (with means and
        knots of transforms), and no value of a row.

        Parameters
        ----------
        path : str or Path

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.save("heart.fed")
        >>> bool((fs.load("heart.fed").params == fit.params).all())
        True
        """
        Path(path).write_bytes(self._packed())

    def _packed(self) -> bytes:
        """Return the content of a file of the results."""
        arrays: dict[str, Any] = {}
        content = json.dumps(to_plain(self._to_record(), arrays))
        return pack({"format": self._saved_as, "content": content}, arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what :meth:`save` writes, and nothing else: no model, no site, no row."""
        return read_results, (self._packed(), "the pickle")

    def __copy__(self) -> Self:
        return self._of_fields(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy all but the model, by which both reach the same sites."""
        if (model := self.__dict__.get("_model")) is not None:
            memo[id(model)] = model
        return self._of_fields(copy.deepcopy(self.__dict__, memo))

    @classmethod
    def _of_fields(cls, fields: Mapping[str, Any]) -> Self:
        made = cls.__new__(cls)
        made.__dict__.update(fields)
        return made


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
        The file is not one that fedstat saved, or a former version saved it.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().save("heart.fed")
    >>> fs.load("heart.fed").params.round(2).to_dict()
    {'Intercept': -4.24, 'age': 0.06, 'sex': 1.48}
    """
    path = Path(path)
    return read_results(path.read_bytes(), path.name)


def read_results(data: bytes, where: str) -> Any:
    """Read results from the content of a file, or of a pickle."""
    try:
        header, arrays = unpack(data)
    except MessageError as error:
        raise ModelError(f"{where}: not a file of results that fedstat saved") from error
    form = header.get("format", "")
    # A family enters its reader when its module is imported, which a fresh session has not done.
    named = [family for family in form.split() if family in INSTALLED]
    for family in filter(INSTALLED.get, named or INSTALLED):
        import_module(f"fedstat.models.{family}.model")
    if form not in READERS:
        raise ModelError(f"{where}: {_unknown(header.get('format'))}")
    try:
        return READERS[form](header, arrays)
    # Of a stranger's file anything may be wrong; the cause stays attached for whoever wrote it.
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, FedstatError) as error:
        told = f": {error}" if isinstance(error, FedstatError) else ""
        raise ModelError(f"{where}: the file is not whole ({type(error).__name__}){told}") from error


def _unknown(form: str | None) -> str:
    if form and FORMER.fullmatch(form):
        return (
            f"saved by an earlier fedstat 0.1.0 (format {form!r}), whose files this version does not read. "
            "Fit the model again and save it, or load the file with the version that wrote it, and keep its "
            "tables: tidy(), cov_params(), ledger.to_frame()"
        )
    return f"expected one of the formats {sorted(READERS)}, received {form!r}"


@dataclass(frozen=True, slots=True)
class SavedLedger:
    """What a file holds of a ledger; the receipt in the canonical form that is signed."""

    at: str | None
    entries: tuple[Entry, ...]
    rounds: int
    receipt: str | None
    setting: str

    @classmethod
    def of(cls, ledger: LedgerLike | None) -> SavedLedger | None:
        """Take a ledger apart; None where there is none."""
        if not isinstance(ledger, Ledger):
            return None
        receipt = None if ledger.receipt is None else ledger.receipt.to_json()
        return cls(ledger.at, tuple(ledger.entries), ledger.rounds, receipt, ledger.setting)

    def restore(self) -> Ledger:
        """Rebuild the ledger."""
        receipt = None if self.receipt is None else Receipt.from_json(self.receipt)
        absent = () if receipt is None else receipt.absent
        return Ledger(
            self.at,
            [(entry.round, entry) for entry in self.entries],
            self.rounds,
            receipt=receipt,
            setting=self.setting,
            absent=absent,
        )
