"""Checks of the arguments of a fit, and of its response."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, REAL
from fedstat.typing import Floats

LAYOUTS = {
    "horizontal": ("sites hold different rows", "ClientPartition.from_frame(table, by='site')"),
    "vertical": ("clients hold different columns", "ClientPartition.from_frames({client: table}, on=key)"),
}
"""In words, and how to make a partition of it."""


def check_layout(model: str, partition: object, layout: str) -> None:
    """Refuse what is no partition in the layout that a model needs."""
    what, remedy = LAYOUTS[layout]
    if not isinstance(partition, ClientPartition):
        raise ModelError(
            f"partition: expected a fedstat.ClientPartition, received {type(partition).__name__}; make one "
            f"with {remedy}"
        )
    if partition.layout != layout:
        raise ModelError(
            f"{model} needs a {layout} partition ({what}): {remedy}; this one is {partition.layout} "
            f"({LAYOUTS[partition.layout][0]})"
        )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a word that is not one of the choices."""
    if value not in choices:
        raise ModelError(f"{name}: expected one of {', '.join(map(repr, choices))}, received {value!r}")


def check_positive(name: str, value: object) -> None:
    """Refuse what is not a positive number."""
    if not isinstance(value, int | float | np.floating | np.integer) or not value > 0:
        raise ModelError(f"{name}: expected a positive number, received {value!r}")


def check_share(name: str, value: float | None) -> None:
    """Refuse what is given and not a share between 0 and 1."""
    if value is not None and not 0.0 <= value <= 1.0:
        raise ModelError(f"{name}: expected a share between 0 and 1, received {value!r}")


def check_level(name: str, value: object) -> None:
    """Refuse what is not between 0 and 1."""
    if not isinstance(value, int | float | np.floating) or not 0.0 < value < 1.0:
        raise ModelError(f"{name}: expected a number between 0 and 1, received {value!r}")


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if not isinstance(value, Integral) or value < least:
        raise ModelError(f"{name}: expected a whole number, {least} or more, received {value!r}")


def check_masked(masked: object, n_sites: int, wanted: bool) -> bool:
    """Whether to mask sums over so many sites: by default where that hides each site's part from all.

    Two whose owners have `wanted` it mask as well: what they refuse then is a sum over two, and not that it
    came in clear.
    """
    if masked is None:
        return hides(n_sites) or (wanted and n_sites == 2)
    check_choice("masked", masked, (True, False))
    if masked and n_sites < 2:
        raise ModelError("masked: a sum over one site is that site's part; expected two sites or more")
    return bool(masked)


def check_response(name: str, family: str, y: Floats) -> None:
    """Require a response at a site that the distribution allows, and that is not constant."""
    known = DISTRIBUTIONS[family]
    support = known.single or known.support or REAL
    wrong = ~support.holds(y)
    if wrong.any():
        raise EstimationError(
            f"{name}: expected a response of {support.expected} for the family {family}, and "
            f"{int(wrong.sum()):,} of {len(y):,} entities have another; compare on the left side of the "
            "formula, as in 'y > 0 ~ x', or take another family"
        )
    if len(y) == 0 or y.min() == y.max():
        raise EstimationError(f"{name}: the response is constant among the {len(y):,} entities of this fit")
