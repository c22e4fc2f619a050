"""Arguments of federated averaging, checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedstat.errors import ModelError
from fedstat.federation.crypto.masks import hides
from fedstat.kernels.server_updates import count_drawn
from fedstat.models.checks import check_masked
from fedstat.typing import Floats


def check_drawn(masked: object, fraction: float, n_sites: int, wanted: bool) -> bool:
    """Whether to mask; an error where a round draws so few sites that their sum would not hide a part."""
    # A mask hides a part among those drawn; of two, each could tell the other's.
    few = count_drawn(n_sites, fraction)
    if few == n_sites or hides(few):
        return check_masked(masked, n_sites, wanted)
    if masked is None:
        return False
    if check_masked(masked, n_sites, wanted):
        raise ModelError(
            f"masked: fraction={fraction:g} draws {few} of {n_sites} sites in a round, whose sum hides them "
            "too little; raise fraction so that three or more are drawn"
        )
    return False


def check_interval(name: str, value: object, interval: str) -> None:
    """Refuse what is not a number in an interval such as ``"[0, 1)"``."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    if isinstance(value, int | float | np.floating | np.integer):
        above = value >= low if interval[0] == "[" else value > low
        if above and (value <= high if interval[-1] == "]" else value < high):
            return
    raise ModelError(f"{name}: expected a number in {interval}, received {value!r}")


def read_init(init: ArrayLike) -> Floats:
    """Read the first coefficients; their number is checked once that of the columns is known."""
    try:
        first = np.asarray(init, dtype=np.float64)
    except (TypeError, ValueError):
        first = np.array(np.nan)
    if first.ndim != 1 or not np.isfinite(first).all():
        raise ModelError("init: expected an array of finite coefficients, one for each design column")
    return first
