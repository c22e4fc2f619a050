"""The entities and blocks that take part in a fit of VFEM, by method."""

from __future__ import annotations

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.design.by_columns import Design
from fedstat.models.vertical.layout import Layout, complete_at, lay_out


def make_layout(design: Design, method: str, *, partly: bool = False) -> Layout:
    """Lay out a fit by one of the methods "vfem", "cc", "impute" and "single".

    Entities with some of an institution's columns take part with these where the fit may have them `partly`.

    Raises ModelError for "single" where the response holder has no columns, EstimationError where complete
    entities are too few.
    """
    blocks = design.blocks
    if method == "single":
        blocks = tuple(b for b in blocks if b.client == design.active)
        if not blocks:
            raise ModelError(
                f"method='single' uses the columns of '{design.active}' alone, and it holds none of "
                "the model's; use 'cc', 'impute' or 'vfem'"
            )
    complete = method in ("cc", "single")
    use = complete_at(blocks, design.n) if complete else np.ones(design.n, dtype=bool)
    layout = lay_out(design, blocks, use, filled=method == "impute", partly=partly)
    if layout.n <= layout.p + 1:
        raise EstimationError(
            f"method='{method}': {layout.n} entities are complete at {', '.join(layout.clients)}, and "
            f"{layout.p + 1} coefficients need more; use method='vfem', or leave institutions out"
        )
    return layout
