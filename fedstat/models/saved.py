"""Read results back from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fedstat.errors import EstimationError, MessageError, ModelError
from fedstat.federation.message import unpack
from fedstat.typing import Array

Reader: TypeAlias = Callable[[Mapping[str, str], Mapping[str, Array]], Any]

READERS: dict[str, Reader] = {}
"""Readers by the format that a file declares; a family enters its own when it is imported."""


def load(path: str | Path) -> Any:
    """Read results that ``save`` wrote: estimates, covariance, ledger, and all that follows from them.

    Predictions need a partition; fitted values and residuals are not in the file.

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
    reader = READERS.get(header.get("format", ""))
    if reader is None:
        raise ModelError(
            f"{path.name}: expected one of the formats {sorted(READERS)}, received {header.get('format')!r}"
        )
    try:
        return reader(header, arrays)
    except (KeyError, TypeError, ValueError, EstimationError) as error:
        raise ModelError(f"{path.name}: the file is not whole ({type(error).__name__})") from error
