"""A step of proximal Newton from sums: the quadratic model of a loss, and the penalty itself.

References
----------
Lee, J., Sun, Y. and Saunders, M. (2014). Proximal Newton-type methods for minimizing composite functions.
SIAM Journal on Optimization 24, 1420-1443.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedstat.kernels.penalised.gram import GramSolver
from fedstat.kernels.penalised.penalties import Terms
from fedstat.typing import Floats

HALVINGS = 25
"""Of a step, at most, until the objective falls."""


class ProximalStep(NamedTuple):
    """A step of proximal Newton: where it leads, and how much the model of the objective falls on the way."""

    b: Floats
    decrease: float


def proximal_step(H: Floats, score: Floats, b: Floats, terms: Terms, *, tol: float) -> ProximalStep:
    """Minimise the quadratic model of the loss at b (p,), and the penalty.

    H (p, p) is the information over N at b or near it, `score` (p,) the derivative of the log-likelihood for
    dispersion one over N, `tol` the violation of the stationarity conditions of the model at which to stop.
    """
    solver = GramSolver(H, H @ b + score, terms.groups)
    new = solver.solve(terms, solver.start(b), np.ones(len(terms.level), dtype=np.bool_), tol).b
    d = new - b
    decrease = score @ d - d @ H @ d / 2.0 + terms.value(b) - terms.value(new)
    return ProximalStep(new, float(decrease))
