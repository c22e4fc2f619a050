"""Checks of the arguments of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.secure.masks import hides


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a word that is not one of the choices."""
    if value not in choices:
        raise ModelError(f"{name}: expected one of {', '.join(map(repr, choices))}, received {value!r}")


def check_positive(name: str, value: object) -> None:
    """Refuse what is not a positive number."""
    if not isinstance(value, int | float | np.floating | np.integer) or not value > 0:
        raise ModelError(f"{name}: expected a positive number, received {value!r}")


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if not isinstance(value, Integral) or value < least:
        raise ModelError(f"{name}: expected a whole number, {least} or more, received {value!r}")


def check_masked(masked: object, n_sites: int) -> bool:
    """Whether to mask sums over so many sites: by default where that hides each site's part from all others.

    Raises
    ------
    ModelError
        It is no truth value, or there is one site only.
    """
    if masked is None:
        return hides(n_sites)
    check_choice("masked", masked, (True, False))
    if masked and n_sites < 2:
        raise ModelError("masked: a sum over one site is that site's part; expected two sites or more")
    return bool(masked)
