"""The response during a fit, at the institution that holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fedstat.typing import Floats, Ints


@dataclass(slots=True)
class Active:
    """The response holder during a fit: y (n,), pattern of each entity, and its latest E-step.

    Parameters
    ----------
    y : (n,) array
    code : (n,) int
    a, eta, v, z : float, (n,), (G,) and (n,) arrays
        Centred intercept, sum of linear predictors, variance by pattern and standardised residuals.
    """

    y: Floats
    code: Ints
    a: float = 0.0
    eta: Floats = field(default_factory=lambda: np.empty(0))
    v: Floats = field(default_factory=lambda: np.empty(0))
    z: Floats = field(default_factory=lambda: np.empty(0))
