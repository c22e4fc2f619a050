"""Design columns of base learners, for rows of a site or rows to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from fedstat.errors import MessageError
from fedstat.federation.design.formula.facts import term_facts
from fedstat.federation.design.formula.terms import parse_terms
from fedstat.federation.disclosure.facts import FactorsRequested, FormulaFactor
from fedstat.federation.tables.curves import CurveArray, curves_of
from fedstat.kernels.curves import (
    integration_weights,
    integration_weights_irregular,
    integration_weights_observed,
    spline_basis,
    sum_points_by_row,
)
from fedstat.models.boost.learning.learners import INTERCEPT, Learner
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True)
class CurveSumsRequest:
    """What a site sums: learners, the basis along the response (None for a number), folds and their seed.

    Rows with the same value in column `together` are in one fold. With a `loss` that is no square scores
    follow. An `offset`, points and values, is taken off a response
    whose curves have points of their own.
    """

    learners: tuple[Learner, ...]
    time: Learner | None
    folds: int
    seed: int
    offset: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    loss: LossSpec | None = None
    together: str = ""

    def check(self) -> None:
        """Require an intercept first."""
        if not self.learners or self.learners[0].kind != INTERCEPT or not 1 <= self.folds <= 1000:
            raise MessageError("the request for curves has no intercept, or no folds")
        if self.offset is not None:
            points, values = self.offset
            if not points or len(points) != len(values) or np.any(np.diff(points) <= 0.0):
                raise MessageError("the request for curves has an offset without ascending points")


def learner_columns(
    learner: Learner, frame: pd.DataFrame, coded: Floats, term_names: Sequence[str]
) -> Floats:
    """Columns (m, k) of a learner, from curves in `frame` and coded terms (m, p) in the units of the data."""
    if learner.kind == INTERCEPT:
        return np.ones((len(coded), 1))
    if learner.varying:  # its columns are no row's
        return np.empty((len(coded), 0))

    def of_term(term: str) -> Floats:
        own = coded[:, [name == term for name in term_names]]
        if not own.shape[1]:
            raise MessageError(f"the request for curves needs '{learner.label}', which is not open")
        return own

    if learner.of_curve:
        Z = _integrals(learner, curves_of(frame[learner.of]))
    elif learner.kind == "bbs":
        x = _single(of_term(learner.of), learner)[:, 0]
        Z = spline_basis(x, learner.low, learner.high, learner.knots, learner.degree)
    elif learner.kind == "brandom":
        others = of_term(learner.of)
        Z = np.column_stack([1.0 - others.sum(axis=1), others])  # the reference level
    else:
        Z = np.column_stack([np.ones(len(coded)), of_term(learner.of)])
    return Z * _single(of_term(learner.by), learner) if learner.by else Z


def _integrals(learner: Learner, curves: CurveArray) -> Floats:
    """Integrals of curves times splines, (m, k), after a column of ones if these are to be centered."""
    if curves.own:
        points, seen, lengths = curves.flat()
        W = integration_weights_irregular(points, lengths)
        at = spline_basis(points, learner.low, learner.high, learner.knots, learner.degree)
        out = sum_points_by_row(at * (W * seen)[:, None], lengths)
        return np.column_stack([np.ones(len(out)), out]) if learner.kind == "bfpc" else out
    values, s = curves.values, curves.grid
    ends = (float(learner.low), float(learner.high))
    basis, weighed = _signal_bases(s.tobytes(), *ends, learner.knots, learner.degree)
    if np.isnan(values).any():
        out = np.where(np.isnan(values), 0.0, values * integration_weights_observed(s, values)) @ basis
    else:
        out = values @ weighed
    return np.column_stack([np.ones(len(out)), out]) if learner.kind == "bfpc" else np.asarray(out)


def _single(own: Floats, learner: Learner) -> Floats:
    if own.shape[1] != 1:
        raise MessageError(f"{learner.label}: a smooth or varying effect is of one column of numbers")
    return own


@lru_cache(maxsize=64)
def _signal_bases(grid: bytes, low: float, high: float, knots: int, degree: int) -> tuple[Floats, Floats]:
    """Basis along a curve's grid, (m, k), and that times weights of integration; many curves share them."""
    s = np.frombuffer(grid)
    basis = spline_basis(s, low, high, knots, degree)
    return basis, integration_weights(s)[:, None] * basis


def all_columns(
    learners: Sequence[Learner], frame: pd.DataFrame, coded: Floats, term_names: Sequence[str]
) -> Floats:
    """Columns of all learners side by side, (m, K)."""
    return np.column_stack([learner_columns(one, frame, coded, term_names) for one in learners])


def time_basis(time: Learner | None, t: Floats) -> Floats:
    """Basis along the response (G, k2); a single one for a number."""
    if time is None:
        return np.ones((1, 1))
    return spline_basis(t, time.low, time.high, time.knots, time.degree)


def smooth_request(learners: Sequence[Learner]) -> FactorsRequested:
    """Declare which splines come from which columns, and which columns are multiplied."""
    factors = [
        FormulaFactor(
            one.label, (one.of,), ("bbs",), options={"ends": (one.low, one.high), "knots": one.knots}
        )
        for one in learners
        if one.kind == "bbs"
    ]
    products = {
        one.label: term_facts(parse_terms(" + ".join(one.terms)).terms).factors for one in learners if one.by
    }
    return FactorsRequested(factors, products)
