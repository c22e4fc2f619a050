"""Effects of learners on points of their domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pandas as pd

from fedstat.federation.design.formula.terms import parse_terms, term_columns
from fedstat.federation.forecast.invented_rows import coded_names
from fedstat.kernels.boosting.bases import spline_basis
from fedstat.models.boost.learning.boosting import Boosting, BoostPath
from fedstat.models.boost.learning.learners import INTERCEPT, BoostFormula
from fedstat.models.boost.learning.varying import basis_along
from fedstat.models.horizontal.results import RowsBasis
from fedstat.typing import Floats

POINTS = 40
"""Of a smooth effect of a column."""


class Held(Protocol):
    """What surfaces need of a record of results."""

    @property
    def basis(self) -> RowsBasis:
        """Agreed columns."""

    @property
    def boosting(self) -> Boosting:
        """Learners and sums."""

    @property
    def formula(self) -> BoostFormula:
        """Learners as they were asked for."""

    @property
    def t(self) -> Floats:
        """Points of the response."""

    @property
    def grids(self) -> Mapping[str, Floats]:
        """Points of the curves."""


def learner_points(held: Held, p: int) -> tuple[str, list[Any], Floats]:
    """Name of a learner's argument, its points, and the columns of the learner at these: (m, k)."""
    learner = held.boosting.design.learners[p]
    if learner.kind == INTERCEPT:
        return "column", [INTERCEPT], np.ones((1, 1))
    if learner.of_curve or learner.smooth:
        x = held.grids[learner.of] if learner.of_curve else np.linspace(learner.low, learner.high, POINTS)
        basis = spline_basis(x, learner.low, learner.high, learner.knots, learner.degree)
        if learner.kind == "bfpc":  # its first column is the constant by which curves are centred
            basis = np.column_stack([np.zeros(len(x)), basis])
        return ("s" if learner.of_curve else "x"), x.tolist(), basis
    coded = coded_names(held.basis.agreement)
    names = [n for n, term in zip(coded.names, coded.term_names, strict=True) if term == learner.of]
    if learner.kind == "brandom":
        return "column", [_reference(held, learner.of, names), *names], np.eye(len(names) + 1)
    if learner.by:
        return "column", [learner.by, *names], np.eye(len(names) + 1)
    # The first column is the constant by which effects are centred; the others are effects beside it.
    return "column", list(names), np.eye(len(names) + 1)[1:]


def _reference(held: Held, term: str, names: list[str]) -> str:
    """Name of the column of the level that is not among `names`, as these are written."""
    (column,) = term_columns(parse_terms(term).terms[0])
    levels = [f"{term}[T.{level}]" for level in held.basis.agreement.spec.levels[column]]
    return next((name for name in levels if name not in names), term)


def effect_frame(held: Held, p: int, path: BoostPath) -> pd.DataFrame:
    """Effect of a learner after a path, in long form; integrals up to t have none beyond."""
    design = held.boosting.design
    learner, t = design.learners[p], held.t
    if not learner.varying:
        return learner_frame(held, p, path.coef)
    b, own = basis_along(learner, t), path.varying[design.own(p)]
    if learner.kind == "bconcurrent":
        return pd.DataFrame({"t": t, "estimate": b @ own})
    s = held.grids[learner.of]
    surface = spline_basis(s, learner.low, learner.high, learner.knots, learner.degree)
    surface = surface @ own.reshape(learner.splines, -1).T @ b.T
    out = {"s": np.repeat(s, len(t)), "t": np.tile(t, len(s)), "estimate": surface.ravel()}
    return pd.DataFrame(out).query("s <= t").reset_index(drop=True)


def learner_frame(held: Held, p: int, coef: Floats, **more: Floats) -> pd.DataFrame:
    """Effect of a learner, and what `more` there is of it, (m, G) each, in long form."""
    name, points, at = learner_points(held, p)
    surface = at @ coef[held.boosting.design.columns(p)] @ held.boosting.basis.T
    m, G = surface.shape
    out: dict[str, Any] = {name: np.repeat(np.array(points, dtype=object if name == "column" else float), G)}
    if held.boosting.design.time is not None:
        out["t"] = np.tile(held.t, m)
    return pd.DataFrame(out | {"estimate": surface.ravel()} | {n: array.ravel() for n, array in more.items()})
