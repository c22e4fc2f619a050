"""Effects of boosting as objects of scikit-fda, the optional extra ``skfda``."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat.models.boost.learning.boosting import BoostPath
from fedstat.models.boost.report.surfaces import Held, effect_frame
from fedstat.typing import Floats

NO_SKFDA = "objects of scikit-fda are made by scikit-fda: pip install scikit-fda"
ARGUMENTS = ("s", "x", "t")


def as_functions(held: Held, path: BoostPath, offset: Floats) -> dict[str, Any]:
    """Offset and effects of all learners as FDataGrid, by label: functions of s, x and t."""
    try:
        from skfda import FDataGrid  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SKFDA) from error
    t, name = np.asarray(held.t, dtype=np.float64), held.formula.response
    out: dict[str, Any] = {}
    if held.boosting.design.time is not None:
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
