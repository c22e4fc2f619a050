"""A path by ADMM in its sharing form, with over-relaxation and a balanced penalty parameter.

In every round each site sends its linear predictor (only the sum is needed) and receives one number
per entity. The coordinator learns coefficients at the end of each lambda, but not in between.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedstat.federation.message import Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.path import PenalizedPath, lambda_grid
from fedstat.models.vertical.exchange.protocol import ColumnScales, standardize_columns
from fedstat.models.vglm.newton_fit import SelectedPath, refit_support
from fedstat.models.vglm.path_setup import Chooser, CoefficientPath, PathSetup
from fedstat.models.vglm.proximal_newton import LossOracle, ResponseSummary
from fedstat.progress_line import counted
from fedstat.typing import Floats

MOST_LINEARIZED = 40
LARGEST_VIOLATION = 20.0
"""Largest violation of a converged fit, as a share of lambda_max and of the tolerance."""
NOTHING = 1e9
"""Lambda at which every penalized coefficient is zero."""
BALANCE, FACTOR = 10.0, 2.0
"""Ratio of the residuals at which the penalty parameter changes, and by how much."""
BALANCED_ROUNDS = 200
"""Rounds of one lambda in which it may change; afterwards it is fixed, and ADMM converges."""


@dataclass(slots=True, eq=False)
class SharingState:
    """The state of ADMM at the coordinator.

    `eta` (n,) is the sum of all linear predictors, including the intercept. `started` states whether the
    holder of the response has begun, `sound` whether the fits before the path met their tolerances.
    """

    oracle: LossOracle
    setup: PathSetup
    tol: float
    maxiter: int
    intercept: float
    eta: Floats
    rho: float = 1.0
    started: bool = False
    sound: bool = True

    def begin(self) -> FitProtocol[tuple[Floats, float]]:
        """Prepare the sites; return the lambdas, and the largest lambda with a selection."""
        oracle, layout, setup = self.oracle, self.oracle.layout, self.setup
        text = json.dumps(asdict(setup.penalty))
        labels = np.repeat(np.arange(len(setup.groups.sizes)), setup.groups.sizes)
        free = np.repeat(~setup.groups.penalized, setup.groups.sizes)
        at = layout.places()
        yield [
            oracle.request(k, "admm_start", text, labels=labels[at[k]], free=free[at[k]])
            for k in layout.sites
        ]
        if setup.adaptive:
            self.sound &= yield from self._settle(0.0)
            yield [oracle.request(k, "admm_adapt", power=setup.adaptive) for k in layout.sites]
        if setup.adaptive or free.any():
            self.sound &= yield from self._settle(NOTHING)  # only columns without a penalty
        (reply,) = yield [oracle.request(layout.active, "respond_openly", eta=self.eta)]
        residual = reply.arrays["residual"]
        # From the gradient where nothing is selected, each site reports one number: its own lambda_max.
        replies = yield [oracle.request(k, "admm_largest", residual=residual) for k in layout.sites]
        scale = max(float(reply.arrays["largest"]) for reply in replies)
        if setup.lambdas is not None:
            return setup.lambdas, scale
        return lambda_grid(scale, ratio=setup.ratio, size=setup.size), scale

    def follow(self, units: ColumnScales) -> FitProtocol[CoefficientPath]:
        """Solve at every lambda, each from the one before."""
        oracle, layout, setup = self.oracle, self.oracle.layout, self.setup
        lambdas, scale = yield from self.begin()
        b, a, loss, kkt, good = [], [], [], [], []
        for lam in counted(lambdas.tolist(), "lambda"):
            met, violation, value = yield from self._solve(float(lam))
            replies = yield [oracle.request(k, "admm_coefficients") for k in layout.sites]
            b.append(np.concatenate([reply.arrays["beta"] for reply in replies]))
            a.append(self.intercept)
            loss.append(value)
            kkt.append(violation / (scale if scale > 0.0 else 1.0))
            # A fit inherits failures of those before it, because adaptive weights come from the first.
            good.append(met and self.sound and kkt[-1] <= LARGEST_VIOLATION * self.tol)
        B, iterations = np.array(b), np.zeros(len(b), dtype=np.int64)
        fits = PenalizedPath(
            lambdas, B, np.array(loss), iterations, np.array(kkt), np.array(good, dtype=np.bool_), scale
        )
        return CoefficientPath.of(fits, B, np.array(a), units, setup.groups)

    def _settle(self, lam: float) -> FitProtocol[bool]:
        """Solve the lasso of a lambda; False if tolerances were not met."""
        yield self._set(lam, False)
        return (yield from self._iterate())

    def _set(self, lam: float, linearize: bool) -> list[Request]:
        """Set lambda at the sites, and whether the penalty is linearized at the present coefficients."""
        oracle = self.oracle
        return [oracle.request(k, "admm_set", lam=lam, linearize=linearize) for k in oracle.layout.sites]

    def _solve(self, lam: float) -> FitProtocol[tuple[bool, float, float]]:
        """Solve at one lambda; return whether tolerances were met, the violation, and the loss."""
        oracle, layout = self.oracle, self.oracle.layout
        for lasso in range(1 if self.setup.penalty.convex else MOST_LINEARIZED):
            yield self._set(lam, lasso > 0)
            met = yield from self._iterate()
            (reply,) = yield [oracle.request(layout.active, "respond_openly", eta=self.eta)]
            residual, loss = reply.arrays["residual"], float(reply.arrays["loss"])
            replies = yield [oracle.request(k, "admm_certify", residual=residual) for k in layout.sites]
            violation = max([abs(residual.mean()), *[float(one.arrays["violation"]) for one in replies]])
            if violation <= self.tol * lam / 10.0:
                break
        return met, violation, loss

    def _iterate(self) -> FitProtocol[bool]:
        """Iterate to the tolerances of primal and dual residual; False if they were not met."""
        oracle, layout = self.oracle, self.oracle.layout
        blocks, root = len(layout.sites) + 1, np.sqrt(layout.n)
        move = yield from self._respond(not self.started)
        self.started = True
        for number in range(self.maxiter):
            requests = [oracle.request(k, "admm_move", move=move[0], rho=self.rho) for k in layout.sites]
            oracle.points += 1
            replies = yield requests
            self.intercept += float(move[0].mean())
            self.eta = self.intercept + np.sum([r.arrays["linear_predictor"] for r in replies], axis=0)
            move = yield from self._respond(False)
            primal, dual, mean, z, scaled = move[1]
            small = self.tol * root / blocks
            if primal <= small + self.tol * max(mean, z) and dual <= small + self.tol * scaled:
                return True
            # Boyd et al. (2011), (3.13): keeps primal and dual residual within a factor of each other.
            if number < BALANCED_ROUNDS and number % 5 == 4:
                self.rho *= (
                    FACTOR if primal > BALANCE * dual else 1.0 / FACTOR if dual > BALANCE * primal else 1.0
                )
        return False

    def _respond(self, start: bool) -> FitProtocol[tuple[Floats, list[float]]]:
        """Send the sum to the holder of the response; return the move, and the norms."""
        blocks = len(self.oracle.layout.sites) + 1
        arrays: dict[str, Any] = {"eta": self.eta, "blocks": blocks, "rho": self.rho, "start": start}
        (reply,) = yield [self.oracle.request(self.oracle.layout.active, "admm_respond", **arrays)]
        return reply.arrays["move"], reply.arrays["sizes"].tolist()


def admm_path(
    oracle: LossOracle,
    distribution: DistributionSpec,
    setup: PathSetup,
    select: Chooser,
    tol: float,
    maxiter: int,
) -> FitProtocol[tuple[SelectedPath, ColumnScales, float]]:
    """Follow the path by ADMM, choose one of its fits, and refit on its support by Newton's method.

    The arguments are those of :func:`~fedstat.models.vglm.newton_fit.fit_path`.
    """
    layout = oracle.layout
    units = yield from standardize_columns(layout, distribution, oracle.product_session)
    # Every move of ADMM depends on the response of its entity, so requests for sums would protect nothing.
    oracle.response = ResponseSummary(distribution, units.mean)
    b0 = float(distribution.make().link(units.mean))
    (reply,) = yield [oracle.request(layout.active, "respond_openly", eta=np.full(layout.n, b0))]
    sharing = SharingState(oracle, setup, tol, maxiter, b0, np.full(layout.n, b0))
    path = yield from oracle.masked(sharing.follow(units))
    chosen = select(path)
    b = path.standardized[chosen]
    a = path.intercepts[chosen] + path.coefficients[chosen] @ units.shift
    point = yield from oracle.masked(oracle.evaluate(np.concatenate([[a], b])))
    assert point is not None
    H = yield from oracle.hessian(point)
    refit = yield from refit_support(oracle, point, H, path.selected[chosen], units, distribution)
    fitted = SelectedPath(path, chosen, refit, oracle.points, oracle.grams, oracle.dealers)
    return fitted, units, float(reply.arrays["loss"])
