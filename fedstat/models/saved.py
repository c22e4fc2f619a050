"""Read results back from a file."""

from __future__ import annotations

from pathlib import Path

from fedstat.models.vfem.results import VFEMResults
from fedstat.models.vfem.storage import read_result


def load(path: str | Path) -> VFEMResults:
    """Read results that ``save`` wrote: estimates, covariance, ledger, and all that follows from them.

    Predictions need a partition; fitted values and residuals are not in the file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    VFEMResults

    Raises
    ------
    ModelError
        The file is not one that fedstat saved.
    """
    return read_result(Path(path))
