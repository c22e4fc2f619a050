"""The list of contracts, and how a test runs over all families to which it applies."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pandas as pd
import pytest
from contracts.families import FAMILIES, Family

CONTRACTS = {
    "saved": "Results can be saved, loaded and pickled; the summary stays the same.",
    "shown": "repr is one line, glance one row, tidy a table; notes are in order of severity.",
    "columns of broom": "Coefficients have the columns of broom, and one row for each name.",
    "effects": "Predictions, comparisons, slopes, means and contrasts answer, or one sentence says why not.",
    "model": "The model of a result is the model that was fitted.",
    "predicted": "Predictions of new rows do not depend on the order of columns; errors name a missing one.",
    "inherited": "A result that is made of another one has its critical notes.",
    "explained": "explain() lists exactly what the ledger has after the fit.",
    "repeated": "The same fit twice gives the same numbers, bit for bit.",
    "order of sites": "The order of sites does not change the estimates.",
    "chunks": "A file that is read in parts gives the result of its table.",
    "number of sites": "The number of sites does not change the estimates.",
    "cut off": "A fit that is cut off says so above its summary, and in converged.",
    "scaled": "A covariate in units of a million or a millionth has a coefficient in these units.",
    "names": "A column may be named like a Python keyword, or with blanks in backticks.",
    "keys": "Entities may have numbers, texts or dates as keys.",
    "missing": "Rows with a missing cell are left out, or an error names column and remedy; in each role.",
    "unknown columns": "A column that no site has is named in an error.",
    "infinite values": "Infinite values end in an error that names the site and the column.",
    "constant columns": "A constant covariate is left out with a note, or refused by name.",
    "texts of numbers": "Numbers that are stored as text end in an error that says how to convert them.",
    "wrong values": "A value of a wrong type, word or range is refused by the name of its argument.",
    "unknown arguments": "An argument that does not exist is refused by name.",
    "few rows": "A site without complete rows, or with very few, is named in an error or in a note.",
    "strict": "Under the strict policy an analysis passes, or the refusal names a rule and a remedy.",
    "polars": "Tables of polars give the results of pandas.",
    "few clusters": "Errors of few clusters use Student's t or a correction, or the summary warns.",
    "splines": "A spline with df= is the one with knots that the model reports.",
    "subset": "A subset gives the result of the rows for which its comparisons hold.",
    "weights": "A row of frequency weight w equals w rows.",
    "remedies": "What a note or an error recommends can be executed.",
    "documented": "A page of the documentation has the family.",
}
"""What holds for every family, by its short name."""


def over_families(contract: str) -> Any:
    """Return the mark that runs a test over all families to which a contract applies."""
    assert contract in CONTRACTS, contract
    families = [family for family in FAMILIES.values() if contract not in family.gaps]
    return pytest.mark.parametrize("family", families, ids=[family.name for family in families])


def numbers(result: Any) -> pd.DataFrame:
    """Return the numbers of a result: its tidy table, or the table that it is."""
    table = result if isinstance(result, pd.DataFrame) else result.tidy()
    return table.select_dtypes("number")


def estimates(result: Any) -> np.ndarray:
    """Return coefficients and their errors, or the numbers of a result that has none."""
    if hasattr(result, "estimate"):
        errors = [] if result.estimate.cov is None else result.bse.tolist()
        return np.array([*result.params.tolist(), *errors], dtype=float)
    return numbers(result).to_numpy(dtype=float).ravel()


def model_class(family: Family) -> Any:
    """Return the public class or function of a family."""
    import fedstat

    return getattr(fedstat, family.name)


def settings_of(family: Family) -> Any:
    """Return the parameters that make a model, or those of the function."""
    public = model_class(family)
    return inspect.signature(getattr(public, "from_formula", public)).parameters
