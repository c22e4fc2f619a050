"""Sums over rows for a response of categories: cumulative links, and the logit against a first category.

A row has one linear predictor for every category but one, ``eta_j = x'b_j``: with a cumulative link
``P(y <= j) = F(eta_j)`` (McCullagh 1980, equation 1.1), otherwise ``log P(y = j) / P(y = 0) = eta_j``
(McFadden 1974). Derivatives of a row's log-likelihood are by its predictors; sums multiply them with its
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import expit, logit, ndtr, ndtri

from fedstat.typing import Floats, Ints

BASELINE = "baseline"
FAR = 1e3
"""Predictor in place of infinity: every distribution function is 0 or 1 there."""
BLOCK = 8192
Tails: TypeAlias = tuple[Floats, Floats]
"""A distribution function and its complement."""


@dataclass(frozen=True, slots=True)
class CumulativeLink:
    """A distribution: its function and its complement, then its density with the slope, and its quantiles."""

    tails: Callable[[Floats], Tails]
    density: Callable[[Floats, Floats, Floats], tuple[Floats, Floats]]
    """Of the values and of both tails there."""
    quantile: Callable[[Floats], Floats]

    def between(self, low: Floats, high: Floats) -> tuple[Floats, Tails, Tails]:
        """Return the probability between two values, and the tails at each."""
        below, above = self.tails(low), self.tails(high)
        # The smaller of two differences loses no digits where both are near one.
        return np.where(low > 0.0, below[1] - above[1], above[0] - below[0]), below, above


def _logistic(x: Floats, cdf: Floats, sf: Floats) -> tuple[Floats, Floats]:
    density = cdf * sf
    return density, density * (sf - cdf)


def _normal(x: Floats, cdf: Floats, sf: Floats) -> tuple[Floats, Floats]:
    density = np.asarray(np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi))
    return density, -x * density


def _smallest(x: Floats) -> Tails:
    size = np.exp(np.minimum(x, 50.0))
    return np.asarray(-np.expm1(-size)), np.asarray(np.exp(-size))


def _of_smallest(x: Floats, cdf: Floats, sf: Floats) -> tuple[Floats, Floats]:
    x = np.minimum(x, 50.0)
    density = np.asarray(np.exp(x - np.exp(x)))
    return density, density * -np.expm1(x)


LINKS: Mapping[str, CumulativeLink] = {
    "logit": CumulativeLink(lambda x: (expit(x), expit(-x)), _logistic, logit),
    "probit": CumulativeLink(lambda x: (ndtr(x), ndtr(-x)), _normal, ndtri),
    "cloglog": CumulativeLink(_smallest, _of_smallest, lambda p: np.asarray(np.log(-np.log1p(-p)))),
}
"""Cumulative links by name: those of proportional odds, of a normal latent variable, and of hazards."""


def probabilities(eta: Floats, link: str) -> Floats:
    """Probabilities of the categories, (m, J), at predictors (m, J - 1)."""
    if link == BASELINE:
        full = np.column_stack([np.zeros(len(eta)), eta])
        full -= full.max(axis=1, keepdims=True)
        np.exp(full, out=full)
        return np.asarray(full / full.sum(axis=1, keepdims=True))
    ends = np.full((len(eta), 1), FAR)
    low, high = np.hstack([-ends, eta]), np.hstack([eta, ends])
    return np.maximum(LINKS[link].between(low, high)[0], 0.0)


def log_terms(eta: Floats, y: Ints, link: str) -> tuple[Floats, Floats, Floats]:
    """Log-probability of each row's category (m,), and its derivatives: (m, J - 1), (m, J - 1, J - 1)."""
    m, width = eta.shape
    row, H = np.arange(m), np.zeros((m, width, width))
    with np.errstate(all="ignore"):
        if link == BASELINE:
            P = probabilities(eta, link)
            part = P[:, 1:]
            H += part[:, :, None] * part[:, None, :]
            H[:, range(width), range(width)] -= part
            g = -part
            g[row[y > 0], y[y > 0] - 1] += 1.0
            return np.log(P[row, y]), g, H
        F, g = LINKS[link], np.zeros((m, width))
        above, below = y < width, y > 0
        high, low = np.full(m, FAR), np.full(m, -FAR)
        high[above], low[below] = eta[row[above], y[above]], eta[row[below], y[below] - 1]
        P, *tails = F.between(low, high)
        (f_low, slope_low), (f_high, slope_high) = F.density(low, *tails[0]), F.density(high, *tails[1])
        up, down = f_high / P, -f_low / P
        i, j = row[above], y[above]
        g[i, j] = up[above]
        H[i, j, j] = (slope_high / P - up**2)[above]
        i, j = row[below], y[below] - 1
        g[i, j] = down[below]
        H[i, j, j] = (-slope_low / P - down**2)[below]
        both = above & below
        i, j = row[both], y[both]
        H[i, j, j - 1] = H[i, j - 1, j] = -(up * down)[both]
        return np.log(P), g, H


@dataclass(frozen=True, slots=True, eq=False)
class CategorySums:
    """Log-likelihood, score (J - 1, p), information (J - 1, p, J - 1, p), and sums that judge them.

    `spread` (q, 2) has sum and sum of squares of each row weight; `flat` is the sum over rows of the
    probability of an error of prediction, and the weight that is not in the likeliest category.
    """

    loglik: float
    score: Floats
    information: Floats
    spread: Floats
    flat: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class CategoryRows:
    """Rows of a design (m, p), their categories (m,), offsets and weights (m,), where there are any.

    With a cumulative link an offset is subtracted from the predictors, as in statsmodels and R.
    """

    X: Floats
    y: Ints
    link: str
    offset: Floats | None = None
    weight: Floats | None = None

    def part(self, rows: slice | Ints) -> CategoryRows:
        """Return some of the rows."""
        offset, weight = (None if one is None else one[rows] for one in (self.offset, self.weight))
        return CategoryRows(self.X[rows], self.y[rows], self.link, offset, weight)

    def blocks(self) -> Iterator[CategoryRows]:
        """Yield the rows in blocks that stay in cache."""
        for start in range(0, len(self.y), BLOCK):
            yield self.part(slice(start, start + BLOCK))

    def predictors(self, B: Floats) -> Floats:
        """Linear predictors, (m, J - 1), at coefficients (J - 1, p)."""
        eta = np.asarray(self.X @ B.T)
        if self.offset is None:
            return eta
        return eta + (self.offset if self.link == BASELINE else -self.offset)[:, None]

    def weighted(self, values: Floats) -> Floats:
        """Multiply by the weights of the rows, along the first axis."""
        if self.weight is None:
            return values
        return np.asarray(values * self.weight.reshape(-1, *[1] * (values.ndim - 1)))

    def vectors(self, B: Floats) -> Floats:
        """Return vectors by which columns are multiplied in score and information, (m, k)."""
        _, g, H = log_terms(self.predictors(B), self.y, self.link)
        i, j = _pairs(B.shape[0], self.link)
        return self.weighted(np.column_stack([g, -H[:, i, j]]))

    def sums(self, B: Floats) -> CategorySums:
        """Sum over the rows at coefficients (J - 1, p)."""
        width, p = B.shape
        loglik, score, information = 0.0, np.zeros((width, p)), np.zeros((width, p, width, p))
        spread, errors, mass = np.zeros((2 * width, 2)), 0.0, np.zeros(width + 1)
        i, j = _pairs(width, self.link)
        for rows in self.blocks():
            eta = rows.predictors(B)
            logp, g, H = log_terms(eta, rows.y, self.link)
            loglik += float(rows.weighted(logp).sum())
            g, h = rows.weighted(g), rows.weighted(-H[:, i, j])
            score += g.T @ rows.X
            for k, (a, b) in enumerate(zip(i.tolist(), j.tolist(), strict=True)):
                part = (rows.X * h[:, k : k + 1]).T @ rows.X
                information[a, :, b, :] += part
                if a != b:
                    information[b, :, a, :] += part
            own = np.column_stack([np.abs(g), h[:, i == j]])
            spread += np.column_stack([own.sum(axis=0), np.einsum("ij,ij->j", own, own)])
            P = probabilities(eta, self.link)
            errors += float(rows.weighted(1.0 - np.einsum("ij,ij->i", P, P)).sum())
            mass += rows.weighted(P).sum(axis=0)
        return CategorySums(loglik, score, information, spread, (errors, float(mass.sum() - mass.max())))

    def effects(self, B: Floats) -> tuple[Floats, Floats]:
        """Sum derivatives of the probabilities by the predictors: (J, J - 1), and (J, J - 1, J - 1, p).

        The second are the second derivatives times the columns.
        """
        width, p = B.shape
        first, second = np.zeros((width + 1, width)), np.zeros((width + 1, width, width, p))
        for rows in self.blocks():
            D, E = rows.probability_terms(B)
            first += D.sum(axis=0)
            second += np.einsum("mcab,mp->cabp", E, rows.X, optimize=True)
        return first, second

    def jet(self, B: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the rows' probabilities (m, J), with the derivatives of :meth:`probability_terms`."""
        return (probabilities(self.predictors(B), self.link), *self.probability_terms(B))

    def probability_terms(self, B: Floats) -> tuple[Floats, Floats]:
        """Return derivatives of the rows' probabilities, (m, J, J - 1) and (m, J, J - 1, J - 1)."""
        eta = self.predictors(B)
        P = self.weighted(probabilities(eta, self.link))
        first, second = [], []
        for category in range(P.shape[1]):
            _, g, H = log_terms(eta, np.full(len(eta), category), self.link)
            # P times a logarithmic derivative that overflows where P is zero is zero.
            first.append(np.nan_to_num(P[:, category, None] * g))
            outer = g[:, :, None] * g[:, None, :] + H
            second.append(np.nan_to_num(P[:, category, None, None] * outer))
        return np.stack(first, axis=1), np.stack(second, axis=1)


def _pairs(width: int, link: str) -> tuple[Ints, Ints]:
    """Pairs of predictors with a second derivative; with a cumulative link only neighbors have one."""
    i, j = np.triu_indices(width)
    kept = slice(None) if link == BASELINE else j - i <= 1
    return i[kept], j[kept]


def coefficient_map(categories: int, p: int, proportional: bool) -> Floats:
    """Matrix from parameters (q,) to coefficients of all predictors, ((J - 1) p, q).

    The first column is the constant. With `proportional` the parameters are thresholds (J - 1,) and
    coefficients (p - 1,), and ``eta_j = threshold_j - x'b``; otherwise each predictor has its own
    coefficients.
    """
    width = categories - 1
    if not proportional:
        return np.eye(width * p)
    M = np.zeros((width, p, width + p - 1))
    M[range(width), 0, range(width)] = 1.0
    M[:, range(1, p), range(width, width + p - 1)] = -1.0
    return M.reshape(width * p, -1)


def moved(M: Floats, T: Floats) -> Floats:
    """Matrix (q, q) of parameters if those of each predictor are multiplied by T (p, p)."""
    width = len(M) // len(T)
    if np.array_equal(M, np.eye(len(M))):
        return np.asarray(np.kron(np.eye(width), T))
    return np.asarray(np.linalg.lstsq(M, np.kron(np.eye(width), T) @ M, rcond=None)[0])


def constant_predictors(counts: Floats, link: str) -> Floats:
    """Predictors (J - 1,) of rows with the same probabilities, from the weight of each category (J,)."""
    if link == BASELINE:
        return np.asarray(np.log(counts[1:] / counts[0]))
    return np.asarray(LINKS[link].quantile(counts.cumsum()[:-1] / counts.sum()))
