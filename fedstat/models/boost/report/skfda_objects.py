"""Effects of boosting as objects of scikit-fda, the optional extra ``skfda``."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat.models.boost.report.surfaces import Held, learner_points
from fedstat.typing import Floats

NO_SKFDA = "objects of scikit-fda are made by scikit-fda: pip install scikit-fda"


def as_functions(held: Held, coef: Floats, offset: Floats) -> dict[str, Any]:
    """Offset and effects of all learners as FDataGrid, by label: functions of s, x and t."""
    try:
        from skfda import FDataGrid  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SKFDA) from error
    design, t = held.boosting.design, np.asarray(held.t, dtype=np.float64)
    response = held.formula.response
    out: dict[str, Any] = {}
    if design.time is not None:
        out["offset"] = FDataGrid([offset], t, argument_names=("t",), coordinate_names=(response,))
    for p, learner in enumerate(design.learners):
        name, points, at = learner_points(held, p)
        surface = at @ coef[design.columns(p)] @ held.boosting.basis.T
        own = [np.asarray(points, dtype=np.float64)] if name != "column" else []
        grids = [*own, *([t] if design.time is not None else [])]
        if grids:
            shape = tuple(map(len, grids)) if own else (len(surface), *map(len, grids))
            names = (*([name] if own else []), *(["t"] if design.time is not None else []))
            values = surface.reshape(shape)
            options = {"argument_names": names, "coordinate_names": (learner.label,)}
            out[learner.label] = FDataGrid(values[None] if own else values, grids, **options)
    return out
