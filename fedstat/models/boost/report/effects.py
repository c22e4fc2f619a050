"""Effects of learners on points of their domain, as tables and as scikit-fda objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedstat.federation.design.formula.terms import parse_term, term_columns
from fedstat.federation.dry_run.synthetic import coded_names
from fedstat.inference.tables import Sheet
from fedstat.kernels.curves import spline_basis
from fedstat.models.boost.learning.boosting import Boosting, BoostPath, ScoredBoosting
from fedstat.models.boost.learning.learners import INTERCEPT
from fedstat.models.boost.learning.varying import basis_along
from fedstat.models.boost.report.record import BoostRecord, PublicBasis
from fedstat.models.horizontal.results import RowsBasis
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Effects of learners on points of their domain.

POINTS = 40
"""Of a smooth effect of a column."""


def learner_points(held: BoostRecord, p: int) -> tuple[str, list[Any], Floats]:
    """Name of a learner's argument, its points, and the columns of the learner at these: (m, k)."""
    learner, basis_of = held.boosting.design.learners[p], held.basis
    if isinstance(basis_of, PublicBasis):
        return basis_of.points(p)
    if learner.kind == INTERCEPT:
        return "column", [INTERCEPT], np.ones((1, 1))
    if learner.of_curve or learner.smooth:
        x = held.grids[learner.of] if learner.of_curve else np.linspace(learner.low, learner.high, POINTS)
        basis = spline_basis(x, learner.low, learner.high, learner.knots, learner.degree)
        if learner.kind == "bfpc":  # its first column is the constant that centers curves
            basis = np.column_stack([np.zeros(len(x)), basis])
        return ("s" if learner.of_curve else "x"), x.tolist(), basis
    coded = coded_names(basis_of.agreement)
    names = [n for n, term in zip(coded.names, coded.term_names, strict=True) if term == learner.of]
    if learner.kind == "brandom":
        return "column", [_reference(basis_of, learner.of, names), *names], np.eye(len(names) + 1)
    if learner.by:
        return "column", [learner.by, *names], np.eye(len(names) + 1)
    # The first column is the constant that centers effects; the others are effects in addition to it.
    return "column", list(names), np.eye(len(names) + 1)[1:]


def _reference(basis: RowsBasis, term: str, names: list[str]) -> str:
    """Name of the column of the level that is not among `names`, as these are written."""
    (column,) = term_columns(parse_term(term))
    levels = [f"{term}[T.{level}]" for level in basis.agreement.spec.levels[column]]
    return next((name for name in levels if name not in names), term)


def effect_frame(held: BoostRecord, p: int, path: BoostPath) -> pd.DataFrame:
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


def learner_frame(held: BoostRecord, p: int, coef: Floats, **more: Floats) -> pd.DataFrame:
    """Effect of a learner, and what `more` there is of it, (m, G) each, in long form."""
    name, points, at = learner_points(held, p)
    surface = at @ coef[held.boosting.design.columns(p)] @ held.boosting.basis.T
    m, G = surface.shape
    out: dict[str, Any] = {name: np.repeat(np.array(points, dtype=object if name == "column" else float), G)}
    if held.formula.functional:
        out["t"] = np.tile(held.t, m)
    return pd.DataFrame(out | {"estimate": surface.ravel()} | {n: array.ravel() for n, array in more.items()})


# ----------------------------------------------------------------------------------------------------
# Effects of boosting as objects of scikit-fda, the optional extra ``skfda``.

NO_SKFDA = "objects of scikit-fda are made by scikit-fda: pip install scikit-fda"
ARGUMENTS = ("s", "x", "t")


def as_functions(held: BoostRecord, path: BoostPath, offset: Floats) -> dict[str, Any]:
    """Offset and effects of all learners as FDataGrid, by label: functions of s, x and t."""
    try:
        from skfda import FDataGrid  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SKFDA) from error
    t, name = np.asarray(held.t, dtype=np.float64), held.formula.response
    out: dict[str, Any] = {}
    if held.formula.functional:
        out["offset"] = FDataGrid([offset], t, argument_names=("t",), coordinate_names=(name,))
    for p, learner in enumerate(held.boosting.design.learners):
        frame = effect_frame(held, p, path)
        names = [one for one in ARGUMENTS if one in frame]
        samples = ["column"] if "column" in frame else []
        if names:
            # A part of a surface that there is not, such as integrals beyond t, has no effect.
            cells = frame.set_index([*samples, *names])["estimate"].to_xarray().fillna(0.0)
            values = cells.to_numpy() if samples else cells.to_numpy()[None]
            grids = [np.asarray(cells[one], dtype=np.float64) for one in names]
            options = {"argument_names": names, "coordinate_names": (learner.label,)}
            out[learner.label] = FDataGrid(values, grids, **options)
    return out


# ----------------------------------------------------------------------------------------------------
# Learners in the printed summary.

WIDTH = 98
NUMBERS = {"df": 8, "first step": 12, "steps": 10, "explained": 11}


def learner_sheet(learners: pd.DataFrame) -> Sheet:
    """List learners: degrees of freedom, first step, and their shares of steps and of what is explained."""
    widths = tuple(NUMBERS.values())
    rows = tuple(
        (
            str(label),
            f"{row['df']:.1f}",
            f"{int(row['first_step']):,}" if row["first_step"] else "never",
            f"{100.0 * row['steps']:.1f} %",
            f"{100.0 * row['explained']:.1f} %",
        )
        for label, row in learners.iterrows()
    )
    stub = WIDTH - sum(widths) - len(widths)
    return Sheet(("learner", *NUMBERS), rows, "l" + "r" * len(widths), (stub, *widths))


def loss_rows(boosting: Boosting, risk: float) -> list[tuple[str, str]]:
    """Describe a loss other than squares, the explained share, and the number of exchanges of scores."""
    if not isinstance(boosting, ScoredBoosting):
        return []
    return [
        ("Loss", boosting.loss.title),
        ("Loss explained", f"{100.0 * (1.0 - risk / boosting.start_risk()):.1f} %"),
        ("Scores", f"{len(boosting.risks):,}, every {boosting.every:,} steps"),
        *([("Held back", f"{boosting.held:,} exchanges")] if boosting.held else []),
    ]
