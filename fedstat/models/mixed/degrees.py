"""Degrees of freedom of tests of coefficients in linear mixed models, from sums at the estimate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.models.mixed.protocol import MixedFit, NormalSums, ValueAndDerivatives
from fedstat.models.mixed.steps import pack
from fedstat.typing import Floats

FLAT = 1e-6
"""Curvature of the likelihood below which a direction of variances is left out, as in lmerTest."""


@dataclass(frozen=True, slots=True, eq=False)
class CoefficientCovariance:
    """Covariance of the coefficients, (p, p), and what its degrees of freedom follow from.

    `slopes` (m, p, p) are the derivatives of `standardized`, the covariance of coefficients of standardized
    columns, in the parameters of the variances, whose covariance is `W` (m, m). `units` (p, p) takes these
    coefficients to those in the units of the data.
    """

    standardized: Floats
    slopes: Floats
    W: Floats
    units: Floats

    @property
    def cov(self) -> Floats:
        """Covariance in the units of the data."""
        return np.asarray(self.units @ self.standardized @ self.units.T)

    def df(self, contrast: Floats) -> float:
        """Return the degrees of freedom of a contrast (p,), by the method of Satterthwaite."""
        contrast = contrast @ self.units
        variance = float(contrast @ self.standardized @ contrast)
        slope = np.einsum("i,kij,j->k", contrast, self.slopes, contrast)
        return 2.0 * variance**2 / max(float(slope @ self.W @ slope), 1e-300)


def satterthwaite(fit: MixedFit, sums: NormalSums) -> CoefficientCovariance:
    """Return the covariance with degrees of freedom by Satterthwaite's method.

    The variances are those of the Hessian of the likelihood in factors and residual variance (Kuznetsova et
    al. 2017, J. Stat. Softw. 82, section 2.4).
    """
    inverse, logdet, _, squares = sums.parts()
    s, K = fit.scale, fit.effects.K
    value, gradient, hessian = squares.scalar()
    _, base, base_hessian = ValueAndDerivatives(sums.logdet + sums.reml * logdet).scalar()
    first, second = fit.effects.chain(fit.theta)
    joint = np.zeros((K + 1, K + 1))
    joint[:K, :K] = first.T @ (base_hessian + hessian / s) @ first
    joint[:K, :K] += np.tensordot(base + gradient / s, second, 1)
    joint[:K, K] = joint[K, :K] = -(gradient @ first) / s**2
    joint[K, K] = -sums.df / s**2 + 2.0 * value / s**3
    # In units of the residual variance, so that small curvatures can be recognized.
    unit = np.append(np.ones(K), s)
    values, vectors = np.linalg.eigh(joint * np.outer(unit, unit))
    kept = values > FLAT
    W = 2.0 * (vectors[:, kept] / values[kept]) @ vectors[:, kept].T * np.outer(unit, unit)
    slopes = s * np.tensordot(first.T, inverse.values[1 : 1 + K], 1)
    cov = s * inverse.values[0]
    return CoefficientCovariance(cov, np.concatenate([slopes, inverse.values[:1]]), W, sums.units)


def satterthwaite_of_weights(sums: NormalSums) -> CoefficientCovariance:
    """Return degrees of freedom of a generalized model by Satterthwaite's method.

    They are those of the linear model with the weights of the fit, whose residual variance is one: where all
    groups are alike, K - p for columns that are constant in K groups, if there are p of these.
    """
    inverse, logdet, _, _ = sums.parts()
    _, _, hessian = ValueAndDerivatives(sums.logdet + logdet).scalar()
    # -tr(P V_a P V_b) are the second derivatives of the restricted log-determinant.
    values, vectors = np.linalg.eigh(-hessian / 2.0)
    kept = values > FLAT * max(float(values[-1]), 1e-300)
    W = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
    K = len(hessian)
    return CoefficientCovariance(inverse.values[0], inverse.values[1 : 1 + K], W, sums.units)


@dataclass(frozen=True, slots=True, eq=False)
class KenwardRoger:
    """The adjusted covariance of the coefficients, and degrees of freedom of contrasts.

    `P` (m, p, p) are derivatives of the information of the coefficients of standardized columns in the
    variances, whose covariance is `W` (m, m); `unadjusted` is the covariance of these coefficients, and
    `units` (p, p) takes them to those in the units of the data.
    """

    cov: Floats
    unadjusted: Floats
    P: Floats
    W: Floats
    units: Floats

    def df(self, contrast: Floats) -> float:
        """Return the degrees of freedom of a contrast (p,): Kenward and Roger (1997), section 3, one row."""
        contrast = contrast @ self.units
        v = self.unadjusted @ contrast
        slope = np.einsum("i,kij,j->k", v, self.P, v) / float(contrast @ v)
        A = float(slope @ self.W @ slope)
        B = 3.5 * A
        g = -1.0
        c1, c2, c3 = np.array([g, 1.0 - g, 3.0 - g]) / (3.0 + 2.0 * (1.0 - g))
        rho = ((1.0 - A) / (1.0 - c2 * B)) ** 2 * (1.0 + c1 * B) / (1.0 - c3 * B)
        return float(4.0 + 3.0 / (rho - 1.0))


def kenward_roger(fit: MixedFit, sums: NormalSums) -> KenwardRoger:
    """Return Kenward and Roger's covariance of the coefficients.

    The variance of the rows is linear in the residual variance s and the covariances of the random effects.
    So second derivatives of the information and of the log-determinant hold all matrices of the paper. Those
    in s follow from the others: the information is homogeneous of degree -1.
    """
    p, K, s = len(fit.params), fit.effects.K, fit.scale
    T = pack([L @ L.T for L in fit.effects.factors(fit.theta)])
    gamma = np.append(s * T, s)
    rows, columns = np.triu_indices(K)
    information = sums.products[:, :p, :p]
    first, second = np.zeros((K + 1, p, p)), np.zeros((K + 1, K + 1, p, p))
    slope, curve = np.zeros(K + 1), np.zeros((K + 1, K + 1))
    first[:K], slope[:K] = information[1 : 1 + K] / s**2, sums.logdet[1 : 1 + K] / s
    for k, m, at in zip(rows, columns, range(1 + K, len(information)), strict=True):
        second[k, m] = second[m, k] = information[at] / s**3
        curve[k, m] = curve[m, k] = sums.logdet[at] / s**2
    first[K] = (-information[0] / s - np.tensordot(gamma[:K], first[:K], 1)) / s
    slope[K] = (sums.n - gamma[:K] @ slope[:K]) / s
    for j in range(K + 1):
        second[K, j] = second[j, K] = (-2.0 * first[j] - np.tensordot(gamma[:K], second[:K, j], 1)) / s
        curve[K, j] = curve[j, K] = (-slope[j] - gamma[:K] @ curve[:K, j]) / s
    cov, size = s * sums.parts()[0].values[0], K + 1
    expected, inner = np.zeros((size, size)), np.zeros((size, size, p, p))
    for a in range(size):
        for b in range(size):
            product = first[a] @ cov @ first[b]
            inner[a, b] = second[a, b] / 2.0 - product
            expected[a, b] = -curve[a, b] - np.sum(cov * (second[a, b] - product))
    W = np.asarray(2.0 * np.linalg.inv(expected), dtype=np.float64)
    added = np.tensordot(W, inner, 2)
    adjusted = cov + 2.0 * cov @ (added + added.T) / 2.0 @ cov
    return KenwardRoger(sums.units @ adjusted @ sums.units.T, cov, first, W, sums.units)
