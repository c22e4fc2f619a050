"""Profile likelihood of standard deviations: deviances with one of them fixed, and intervals from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from scipy.linalg import block_diag, null_space

from fedstat.errors import EstimationError
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.models.horizontal.session import RowsSession
from fedstat.models.mixed.protocol import (
    MOST_HALVINGS,
    MixedFit,
    MixedNewton,
    ValueAndDerivatives,
    descends,
    newton_step,
)
from fedstat.models.mixed.steps import first_parameters, lower_pairs, pack
from fedstat.typing import Floats

MOST_STEPS, SMALL_STEP = 30, 1e-5
MOST_POINTS, CLOSE = 25, 1e-5
"""Most points of one end of an interval, and how close the root of the deviance is to its quantile there."""
Derivatives = tuple[float, Floats, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Profiles:
    """-2 log L, minimized over all parameters but one.

    Parameters ``x`` are, for normal responses, the factors of the covariances in the units of the response
    (K,) and the residual standard deviation; for others the standardized coefficients (p,), the factors (K,),
    and the logarithm of a dispersion that is estimated. The effects are in a basis that has the effect in
    question first, so that its standard deviation is an entry of a factor (:meth:`of`).
    """

    newton: MixedNewton
    fit: MixedFit

    @classmethod
    def of(cls, newton: MixedNewton, fit: MixedFit, term: int, effect: int) -> Profiles:
        """Choose the basis for one effect of a term."""
        newton.effects = fit.effects.apart(term, effect)
        theta = newton.effects.of_basis(fit.theta, fit.effects)
        return cls(newton, replace(fit, effects=newton.effects, theta=theta))

    @property
    def estimate(self) -> Floats:
        """Parameters at the maximum of the likelihood."""
        fit = self.fit
        if fit.sums is not None:
            return np.append(fit.theta * np.sqrt(fit.scale), np.sqrt(fit.scale))
        start = np.linalg.solve(self.newton.translation, fit.params)
        return np.concatenate([start, fit.theta, fit.log_dispersion])

    def place(self, term: int) -> list[int]:
        """Return the place in x of the standard deviation of the first effect of a term."""
        return self.without(term)[:1]

    def without(self, term: int) -> list[int]:
        """Return the places of the row and the column of this effect, which are zero without it."""
        sizes = self.fit.effects.sizes
        begin = first_parameters(sizes)[term] + (len(self.fit.params) if self.fit.sums is None else 0)
        return [place for place, pair in enumerate(lower_pairs(sizes[term]), begin) if 0 in pair]

    def unit(self, term: int, effect: int) -> float:
        """Return the standard deviation of an effect, in the units of the data, over its parameter."""
        effects = self.fit.effects
        return float(np.linalg.norm(effects.in_units[term][effect] @ effects.basis[term]))

    def at_length(self, x: Floats, places: Sequence[int], length: float) -> Floats:
        """Return x with the length of some parameters changed; without a direction, the last one has it."""
        x, row = x.copy(), x[places]
        size = float(np.linalg.norm(row))
        x[places] = row * (length / size) if size > 1e-8 * length else length * np.eye(len(row))[-1]
        if self.fit.sums is not None:  # derivatives are those of factors with nonnegative diagonals
            x[:-1] = pack(self.fit.effects.factors(x[:-1]))
        return x

    def evaluate(self, x: Floats) -> FitProtocol[Derivatives | None]:
        """Request -2 log L at x, with gradient and Hessian; None if a site refuses the point."""
        fit = self.fit
        if fit.sums is None:
            found = yield from self.newton.score(x, True)
            return (
                None
                if found is None or found.hessian is None
                else (found.deviance, found.gradient, found.hessian)
            )
        sums = yield from self.newton.evaluate(x[:-1] / x[-1], fit.reml)
        _, logdet, _, squares = sums.parts()
        return self._in_units(
            x, ValueAndDerivatives(sums.logdet + sums.reml * logdet).scalar(), squares.scalar(), sums.df
        )

    def _in_units(self, x: Floats, base: Derivatives, squares: Derivatives, df: float) -> Derivatives:
        """Take derivatives in relative covariances T to those in x.

        -2 log L = base(T) + df log 2 pi s + squares(T) / s; first in absolute covariances s T and in log s.
        """
        factor, sd = x[:-1], x[-1]
        s, K = sd**2, len(factor)
        (f, f1, f2), (q, q1, q2) = base, squares
        T = pack([L @ L.T for L in self.fit.effects.factors(factor)]) / s
        gradient, hessian = np.zeros(K + 1), np.zeros((K + 1, K + 1))
        gradient[:K] = (f1 + q1 / s) / s
        gradient[K] = df - T @ f1 - (q + T @ q1) / s
        hessian[:K, :K] = (f2 + q2 / s) / s**2
        hessian[:K, K] = hessian[K, :K] = -(f1 + f2 @ T) / s - (2.0 * q1 + q2 @ T) / s**2
        hessian[K, K] = T @ f1 + T @ f2 @ T + (q + 3.0 * T @ q1 + T @ q2 @ T) / s
        first, second = self.fit.effects.chain(factor)
        chain = block_diag(first, 2.0 / sd)
        out = chain.T @ hessian @ chain
        out[:K, :K] += np.tensordot(gradient[:K], second, 1)
        out[K, K] -= 2.0 * gradient[K] / s
        return f + df * np.log(2.0 * np.pi * s) + q / s, chain.T @ gradient, out

    def minimize(
        self, x: Floats, places: Sequence[int], length: float
    ) -> FitProtocol[tuple[Floats, float, float]]:
        """Minimize where some parameters have a length; return x, the minimum, and its slope in the length.

        Newton's method on a sphere: steps are tangential, and the curvature is less by the outward slope.
        """
        x = self.at_length(x, places, length)
        found = yield from self.evaluate(x)
        if found is None:
            raise EstimationError("no likelihood at a standard deviation of the profile; see the site's log")
        for _ in range(MOST_STEPS):
            value, gradient, hessian = found
            out = np.zeros(len(x))
            out[places] = x[places] / length if length > 0.0 else 0.0
            slope = float(gradient @ out)
            held = np.eye(len(x))[:, places] if length == 0.0 else out[:, None]
            B = null_space(held.T)
            if length > 0.0:
                hessian = hessian.copy()
                hessian[places, places] -= slope / length
            step, size = newton_step(
                B.T @ gradient, B.T @ hessian @ B, 0.75 * (1.0 + float(np.linalg.norm(x)))
            )
            if size < SMALL_STEP:
                break
            for halving in range(MOST_HALVINGS):
                trial = self.at_length(x + B @ step * 0.5**halving, places, length)
                found = yield from self.evaluate(trial)
                if found is not None and descends(found[0], value, float(gradient @ B @ step) * 0.5**halving):
                    break
            else:
                break
            x = trial
        return x, value, slope

    def interval(
        self, places: Sequence[int], at_zero: float, alpha: float
    ) -> FitProtocol[tuple[float, float]]:
        """Return the lengths at which the root of the increase of -2 log L is the normal quantile."""
        x, z = self.estimate, float(stats.norm.isf(alpha / 2.0))
        middle = float(np.linalg.norm(x[places]))
        lower = 0.0
        if at_zero > z**2:
            lower = yield from self._end(x, places, (0.0, middle), z, 0.6 * middle)
        guess = 1.5 * middle if middle > 1e-3 else 0.2 * (x[-1] if self.fit.sums is not None else 1.0)
        upper = yield from self._end(x, places, (middle, np.inf), z, guess)
        return lower, upper

    def _end(
        self, x: Floats, places: Sequence[int], bracket: tuple[float, float], z: float, length: float
    ) -> FitProtocol[float]:
        low, high = bracket
        below = low == 0.0
        for _ in range(MOST_POINTS):
            x, value, slope = yield from self.minimize(x, places, length)
            root = np.sqrt(max(value - self.fit.deviance, 1e-12))
            if abs(root - z) < CLOSE:
                break
            inside = root < z
            low, high = (low, length) if inside == below else (length, high)
            length += (z - root) * 2.0 * root / slope if slope else np.inf
            if not low < length < high:
                length = (low + high) / 2.0 if np.isfinite(high) else 2.0 * low
        return length


def reopened(session: RowsSession, fit: MixedFit) -> FitProtocol[MixedNewton]:
    """Open a session at an estimate."""
    newton = MixedNewton(session, fit.effects.terms, fit.distribution, fit.nodes)
    yield from newton.reopen(fit)
    if fit.sums is not None:
        newton.center = np.asarray(np.linalg.solve(newton.translation, fit.params), dtype=np.float64)
    return newton


def increases_at_zero(session: RowsSession, fit: MixedFit) -> FitProtocol[Floats]:
    """Return by how much -2 log L is larger without each random effect, in the order of the terms."""
    newton = yield from reopened(session, fit)
    return (yield from _increases(newton, fit))


def _increases(newton: MixedNewton, fit: MixedFit) -> FitProtocol[Floats]:
    out = []
    for term, q in enumerate(fit.effects.sizes):
        for effect in range(q):
            found = Profiles.of(newton, fit, term, effect)
            _, value, _ = yield from found.minimize(found.estimate, found.without(term), 0.0)
            out.append(max(value - fit.deviance, 0.0))
    return np.array(out)


def intervals(session: RowsSession, fit: MixedFit, alpha: float) -> FitProtocol[Floats]:
    """Return intervals of standard deviations in units of the data, (m, 2), that of the residuals last."""
    newton = yield from reopened(session, fit)
    at_zero = (yield from _increases(newton, fit)).tolist()
    out = []
    for term, q in enumerate(fit.effects.sizes):
        for effect in range(q):
            found = Profiles.of(newton, fit, term, effect)
            ends = yield from found.interval(found.place(term), at_zero.pop(0), alpha)
            out.append(np.array(ends) * found.unit(term, effect))
    if fit.sums is not None:
        ends = yield from found.interval([len(found.estimate) - 1], np.inf, alpha)
        out.append(np.array(ends))
    return np.array(out)
