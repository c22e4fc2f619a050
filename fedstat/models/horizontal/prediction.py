"""Linear predictors of rows that the caller holds, coded as the sites coded theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, ModelError
from fedstat.federation.design.block import apply_block
from fedstat.federation.design.by_rows import RowsAgreement, RowsDesign
from fedstat.federation.design.response import build_offset
from fedstat.federation.design.site_rows import RowsQuestion
from fedstat.federation.tables.columns import as_numbers, at_column, column_kind, pick_columns
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class PredictedRows:
    """Linear predictor of every row (NaN where a column is missing), and the design of the whole ones."""

    linear: pd.Series
    whole: Bools
    X: Floats

    def standard_errors(self, cov: Floats) -> pd.Series:
        """Return the standard errors of the linear predictor."""
        variance = np.full(len(self.linear), np.nan)
        variance[self.whole] = ((self.X @ cov) * self.X).sum(axis=1)
        return pd.Series(np.sqrt(np.maximum(variance, 0.0)), index=self.linear.index)


def predict_rows(
    agreement: RowsAgreement, design: RowsDesign, params: Floats, frame: pd.DataFrame
) -> PredictedRows:
    """Code rows as the sites coded theirs, and compute the linear predictor.

    Parameters
    ----------
    agreement : RowsAgreement
        Levels and states of transforms of the fit.
    design : RowsDesign
        Its columns.
    params : (p,) array
        In the units of the data.
    frame : DataFrame
        With the columns of the model, the response not needed.

    Raises
    ------
    ModelError
        `frame` is no table.
    DesignError
        A column is absent, of another type, or holds an unknown level.
    """
    if not isinstance(frame, pd.DataFrame):
        raise ModelError(
            f"predict: expected a DataFrame of rows that you hold, received {type(frame).__name__}; what "
            "stays at the sites is judged by evaluate(partition)"
        )
    question, first = agreement.question, int(design.intercept)
    seen, X = np.ones(len(frame), dtype=bool), np.empty((len(frame), 0))
    if question.terms:
        spec = replace(agreement.spec, names=design.names[first:], term_names=design.term_names[first:])
        block = apply_block(frame, spec)
        seen, X = block.seen, block.X
    if design.intercept:
        X = np.column_stack([np.ones(len(X)), X])
    linear = np.full(len(frame), np.nan)
    linear[seen] = X @ params
    return PredictedRows(pd.Series(linear + _known_part(frame, question), index=frame.index), seen, X)


def _known_part(frame: pd.DataFrame, question: RowsQuestion) -> Floats:
    """Offset and logarithm of the exposure, NaN where a column of theirs is missing."""
    known = np.zeros(len(frame))
    if question.offsets:
        known += build_offset(frame, question.offsets, question.offset_columns, "")
    if "exposure" in question.weights:
        known += np.log(_exposure(frame, question.weights["exposure"]))
    return known


def _exposure(frame: pd.DataFrame, name: str) -> Floats:
    series = pick_columns(frame, [name], "")[name]
    if column_kind(series, "", name) != "number":
        raise DesignError(f"{at_column('', name)} holds categories; an exposure must be numbers")
    values = as_numbers(series, "", name)
    wrong = int((values <= 0.0).sum())
    if wrong:
        raise DesignError(
            f"{at_column('', name)}: {wrong:,} exposures are not positive; leave these rows out"
        )
    return values
