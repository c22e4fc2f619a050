"""Statements on pairs of clients that share too few entities for a covariance of their columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.pairs import extremes, sparse_pairs
from fedstat.typing import Floats

COLUMNS = ["first", "second", "n", "name", "estimate", "low", "high"]


def sensitivity(fit: LawFit) -> pd.DataFrame:
    """Extremes of every coefficient that are compatible with the data, by pair."""
    rows: list[tuple[object, ...]] = []
    for pair in sparse_pairs(fit.moments):
        clients = fit.moments.clients[pair.first], fit.moments.clients[pair.second]
        low, high = extremes(fit, pair)
        each = zip(fit.moments.names, fit.beta, low, high, strict=True)
        rows += [(*clients, pair.n, *of_column) for of_column in each]
    return pd.DataFrame(rows, columns=COLUMNS)


def sparse_notes(fit: LawFit, errors: Floats | None) -> Iterator[str]:
    """Name the pairs, and how far a coefficient moves between the extremes; `errors` are standard errors."""
    table = sensitivity(fit)
    for (first, second, n), rows in table.groupby(["first", "second", "n"], sort=False):
        width = (rows["high"] - rows["low"]).to_numpy()
        relative = width / (errors if errors is not None else np.abs(rows["estimate"].to_numpy()))
        at = int(np.argmax(relative))
        unit = "its standard errors" if errors is not None else "its estimate"
        one = rows.iloc[at]
        yield (
            f"'{first}' and '{second}' share {n:,} entities, too few for a covariance of their columns: they "
            "count as independent given all other columns, which the data neither support nor contradict. "
            f"Between the extremes that have the same likelihood {one['name']} goes from {one['low']:.4g} to "
            f"{one['high']:.4g}, {relative[at]:.1f} times {unit}; see .sensitivity()."
        )
