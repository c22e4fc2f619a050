"""Checks of the arguments of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np

from fedstat.errors import ModelError


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
