"""Statements on pairs of institutions that share too few entities for a covariance of their columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.pairs import extremes, name_sparse, sparse_pairs
from fedstat.typing import Floats

COLUMNS = ["first", "second", "n", "name", "estimate", "low", "high"]


def sensitivity(fit: LawFit) -> pd.DataFrame:
    """Extremes of every coefficient that are compatible with the data, by pair that they leave open."""
    rows: list[tuple[object, ...]] = []
    names = [name.replace("'", "") for name in fit.moments.unit_names]
    for pair in sparse_pairs(fit.moments):
        if pair.undetermined:
            clients = names[pair.first], names[pair.second]
            each = zip(fit.moments.names, fit.beta, *extremes(fit, pair), strict=True)
            rows += [(*clients, pair.n, *of_column) for of_column in each]
    return pd.DataFrame(rows, columns=COLUMNS)


def sparse_notes(fit: LawFit, errors: Floats | None) -> Iterator[str]:
    """Name the pairs, and how far a coefficient moves between extremes; `errors` are standard errors."""
    text = name_sparse(fit.moments)
    if not text:
        return
    table = sensitivity(fit)
    if len(table):
        unit = np.abs(table["estimate"].to_numpy())
        if errors is not None:
            unit = np.tile(errors, len(table) // len(errors))
        relative = (table["high"] - table["low"]).to_numpy() / unit
        one = table.iloc[int(np.argmax(relative))]
        text += (
            f" Between extremes that have the same likelihood {one['name']} goes from {one['low']:.4g} to "
            f"{one['high']:.4g}, {relative.max():.1f} times its "
            f"{'standard error' if errors is not None else 'estimate'}; see .sensitivity()."
        )
    yield text
