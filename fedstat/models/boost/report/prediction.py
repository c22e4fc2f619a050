"""Predictions for rows that the caller holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from fedstat.federation.design.block import apply_block
from fedstat.federation.design.coding import build_response
from fedstat.federation.dry_run.synthetic import coded_names
from fedstat.federation.tables.curve_columns import with_curves
from fedstat.federation.tables.curves import curves_of, same_grid
from fedstat.kernels.curves import row_tensor
from fedstat.models.boost.learning.boosting import BoostPath
from fedstat.models.boost.learning.columns import all_columns, time_basis
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.varying import basis_along, columns_along, varying_of
from fedstat.models.boost.report.record import BoostRecord, PublicBasis
from fedstat.models.checks import HeldRows, check_frame
from fedstat.typing import Bools, Floats


def predict_boosted(
    held: BoostRecord, path: BoostPath, offset: Floats, new: HeldRows
) -> pd.DataFrame | pd.Series:
    """Offset plus the effects of all learners at the coefficients of a path."""
    new = own_rows(new)
    complete, frame, Z = new_columns(held, new)
    design = held.boosting.design
    out = np.full((len(new), len(offset)), np.nan)
    out[complete] = offset + Z @ path.coef @ held.boosting.basis.T
    along = varying_of(design.learners)
    if along and complete.any():
        n, t = int(complete.sum()), held.t
        points, lengths = np.tile(t, n), np.full(n, len(t))
        for one, p in zip(along, map(design.learners.index, along), strict=True):
            d = columns_along(one, curves_of(frame[one.of])[complete], points, lengths)
            E = row_tensor(d, basis_along(one, points))
            out[complete] += (E @ path.varying[design.own(p)]).reshape(n, -1)
    if not held.formula.functional:
        return pd.Series(out[:, 0], index=new.index, name=held.formula.response)
    return pd.DataFrame(out, index=new.index, columns=pd.Index(held.t, name="t"))


def own_rows(new: HeldRows) -> pd.DataFrame:
    """Take rows that the caller holds as a pandas table."""
    return check_frame("predict", new, "rows that stay at the sites are asked for nothing by it")


def new_columns(held: BoostRecord, new: pd.DataFrame) -> tuple[Bools, pd.DataFrame, Floats]:
    """Which of the rows lack nothing, all rows with their curves, and columns of learners of those."""
    basis = held.basis
    if isinstance(basis, PublicBasis):
        complete, Z = basis.new_columns(new, held.curves)
        return complete, new, Z
    question = basis.agreement.question
    curves = {name: held.curves[name] for name in held.formula.curves}
    frame = with_curves("the new rows", new, curves)
    seen, coded = np.ones(len(frame), dtype=bool), np.empty((len(frame), 0))
    names: tuple[str, ...] = ()
    if question.terms:
        columns = coded_names(basis.agreement)
        names = columns.term_names
        spec = replace(basis.agreement.spec, names=columns.names, term_names=names)
        block = apply_block(frame, spec)
        seen, coded = block.seen, block.X
    complete = seen & ~np.any([curves_of(frame[name]).gappy() for name in curves], axis=0) if curves else seen
    Z = all_columns(held.boosting.design.learners, frame[complete], coded[complete[seen]], names)
    return complete, frame, Z


def compared(
    held: BoostRecord, offset: Floats, new: pd.DataFrame, predicted: pd.DataFrame | pd.Series
) -> tuple[Floats, Floats, Floats]:
    """Responses of rows that the caller holds, what is predicted for them, and the offset at their points.

    Each (m, G), or (N,) over all points of the curves where these are not those at which predictions are.
    """
    basis, name = held.basis, held.formula.response
    found = np.asarray(predicted, dtype=np.float64).reshape(len(new), -1)
    if not held.formula.functional:
        if isinstance(basis, PublicBasis):
            y = new[name].to_numpy(dtype=np.float64)[:, None]
        else:
            question = basis.agreement.question
            y = build_response(new, question.response, question.response_columns, "")[:, None]
        return y, found, np.broadcast_to(offset, y.shape)
    curves = curves_of(with_curves("the new rows", new, {name: held.curves[name]})[name])
    if same_grid(curves.grid, held.t) or isinstance(basis, PublicBasis):
        return curves.values, found, np.broadcast_to(offset, found.shape)
    points, y, lengths = curves.flat()
    start = np.interp(points, held.t, offset)
    along = np.linalg.lstsq(held.boosting.basis, (found - offset).T, rcond=None)[0]
    effects = time_basis(held.boosting.design.time, points) * np.repeat(along.T, lengths, axis=0)
    return y, start + effects.sum(axis=1), start


def scores(
    held: BoostRecord,
    loss: LossSpec | None,
    offset: Floats,
    new: pd.DataFrame,
    predicted: pd.DataFrame | pd.Series,
) -> dict[str, float]:
    """Judge predictors of rows that the caller holds, by squares or by another loss."""
    y, f, start = compared(held, offset, new, predicted)
    seen = ~(np.isnan(y) | np.isnan(f))
    y, f, start = y[seen], f[seen], start[seen]
    if loss is not None:
        own, at_start = float(loss.value(y, f).mean()), float(loss.value(y, start).mean())
        return {"loss": own, "explained": 1.0 - own / at_start}
    with np.errstate(divide="ignore"):
        mape = 100.0 * float(np.mean(np.abs((y - f) / y)))
    squares = (y - f) ** 2
    rsquared = 1.0 - float(squares.sum() / ((y - start) ** 2).sum())
    return {"rsquared": rsquared, "rmse": float(np.sqrt(squares.mean())), "mape": mape}
