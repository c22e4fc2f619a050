"""Predictions for rows that the caller holds, coded by the public bounds as the institutions coded theirs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedstat.errors import DesignError
from fedstat.federation.tables.columns import read_numbers
from fedstat.models.checks import check_frame
from fedstat.models.copula.margins import Bins
from fedstat.models.copula_glm.moments.columns import ScoredDesign
from fedstat.models.horizontal.prediction import PredictedRows
from fedstat.typing import Floats

NONE_HELD = "predictions of the institutions' entities are values of each, which no budget pays for"


def design_rows(design: ScoredDesign, frame: pd.DataFrame | None) -> PredictedRows:
    """Code rows, (m, p + 1) with the column of ones, of those that lack no value; no linear predictor yet.

    Values beyond a range stand at its end. A DesignError names an absent column, one that holds no numbers,
    and one with a level that its bounds do not list.
    """
    frame = check_frame("predict", frame, NONE_HELD)
    needed = sorted(set(design.sources.tolist()))
    absent = [design.bins[j].name for j in needed if design.bins[j].name not in frame.columns]
    if absent:
        raise DesignError(f"predict: the rows lack the column {', '.join(map(repr, absent))}")
    values = {j: _values(design.bins[j], frame[design.bins[j].name]) for j in needed}
    columns = [np.ones(len(frame))]
    for column in design.columns:
        bins, x = design.bins[column.source], values[column.source]
        if bins.levels and not column.above:  # a function of numbers that are listed
            x = np.append(np.array(bins.levels, dtype=np.float64), np.nan)[
                np.nan_to_num(x, nan=-1.0).astype(int)
            ]
        columns.append(np.where(np.isnan(x), np.nan, column.at(x)))
    X = np.column_stack(columns)
    whole = np.asarray(~np.isnan(X).any(axis=1), dtype=np.bool_)
    return PredictedRows(pd.Series(np.nan, index=frame.index), whole, X[whole])


def _values(bins: Bins, series: pd.Series) -> Floats:
    """Numbers of a column, or places of its levels where these are no numbers; nan where it is missing."""
    missing = series.isna().to_numpy(dtype=np.bool_)
    codes = bins.code(series)
    wrong = int(np.count_nonzero((codes < 0) & ~missing))
    if wrong:
        what = "levels that its bounds do not list" if bins.levels else "values that are no numbers"
        raise DesignError(f"predict: the column '{bins.name}' has {what}, in {wrong:,} rows")
    return np.where(missing, np.nan, codes if bins.levels else _numbers(bins, series))


def _numbers(bins: Bins, series: pd.Series) -> Floats:
    numbers = read_numbers(series)
    clipped: Floats = np.clip(numbers, *bins.range)
    return clipped
