"""A large sample of a law whose columns are skewed, with entities in missing patterns as in the data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.models.vertical.law.derivatives import LawPoint
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Floats, Ints

ROWS_OF_CHANCES = 20_000
STEPS, SMALL, LONGEST = 50, 1e-8, 2.0
LARGEST_CORRELATION = 0.999
SMALLEST_EIGENVALUE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class SkewedLaw:
    """A law whose columns have these standard deviations of logarithms, signed, (P,); zero of normal ones."""

    point: LawPoint
    log_sd: Floats

    def pack(self) -> Floats:
        """Give a, s2, beta, mu and the standard deviations of logarithms: (2 + 3 P,)."""
        at = self.point
        return np.concatenate([[at.a, at.s2], at.beta, at.mu, self.log_sd])

    def moved(self, by: Floats) -> SkewedLaw:
        """Move what :meth:`pack` gives."""
        at, P = self.point, len(self.log_sd)
        beta, mu, log_sd = np.split(by[2:], [P, 2 * P])
        point = LawPoint(at.mu + mu, at.a + by[0], at.beta + beta, at.s2 + by[1], at.Q)
        return SkewedLaw(point, self.log_sd + log_sd)


class World:
    """Random numbers of N entities, of which every law makes its sample.

    `moments` are those of the data, standardised: which patterns there are, and the sums of the response and
    of the columns that nobody lacks in each.
    """

    def __init__(self, moments: PatternMoments, N: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.N, self._moments = N, moments
        self._scores = random.standard_normal((N, len(moments.names)))
        self._errors, self._places = random.standard_normal(N), random.random(N)
        always = np.flatnonzero(moments.seen.all(axis=0))
        self._always = always
        self._share = moments.grams[:, 0][:, [0, *(1 + always), -1]] / moments.nobs
        self._chances = np.zeros_like(self._share)

    def draw(self, law: SkewedLaw, rows: slice = slice(None), *, same: bool = False) -> PatternMoments:
        """Sum over some rows of the sample, by pattern, in the units of the standardised data.

        Chances of patterns are those that give the sums of the data, or the `same` as of the last draw.
        """
        X, y = self._columns(law, rows)
        causes = np.column_stack([np.ones(len(y)), X[:, self._always], y])
        if not same:
            self._chances = fit_chances(causes[:ROWS_OF_CHANCES], self._share, self._chances)
        code = choose(self._chances @ causes.T, self._places[rows])
        return sums_by_pattern(self._moments, X, y, code)

    def _columns(self, law: SkewedLaw, rows: slice) -> tuple[Floats, Floats]:
        """Columns (N, P) and response (N,) of the law."""
        at = law.point
        Sigma = at.covariates
        sd = np.sqrt(np.diag(Sigma))
        R = correlation_of_scores(Sigma / np.outer(sd, sd), law.log_sd)
        X = skewed_columns(self._scores[rows] @ np.linalg.cholesky(R).T, law.log_sd) * sd
        y = at.a + X @ at.beta + np.sqrt(at.s2) * self._errors[rows]
        return X + at.mu, y


def skewed_columns(scores: Floats, log_sd: Floats) -> Floats:
    """Columns with mean zero and variance one of normal scores, (N, P)."""
    out = scores.copy()
    for j in np.flatnonzero(log_sd):
        s, square = log_sd[j], np.exp(log_sd[j] ** 2)
        # Of a negative s the exponential falls with the score.
        out[:, j] = (
            np.sign(s) * (np.exp(s * scores[:, j]) - np.sqrt(square)) / np.sqrt(square * (square - 1.0))
        )
    return out


def correlation_of_scores(R: Floats, log_sd: Floats) -> Floats:
    """Correlation of the scores of columns whose own is R, (P, P), as near as there is one.

    Of two log-normal columns log(1 + R f_i f_j) / (s_i s_j), f^2 = exp(s^2) - 1; of one and a normal one
    R f / s.
    """
    skewed = log_sd != 0.0
    s = np.where(skewed, log_sd, 1.0)
    f = np.where(skewed, np.sqrt(np.expm1(s**2)) * np.sign(s), 1.0)
    both = np.outer(skewed, skewed)
    ratio = np.outer(f, f)
    least = np.expm1(-np.abs(np.outer(s, s)))
    logs = np.log1p(np.where(both, np.maximum(R * ratio, LARGEST_CORRELATION * least), 0.0))
    out = np.where(both, logs, R * ratio) / np.outer(s, s)
    out = np.clip(out, -LARGEST_CORRELATION, LARGEST_CORRELATION)
    np.fill_diagonal(out, 1.0)
    values, vectors = np.linalg.eigh(out)
    out = (vectors * values.clip(min=SMALLEST_EIGENVALUE)) @ vectors.T
    root = np.sqrt(np.diag(out))
    return np.asarray(out / np.outer(root, root))


def fit_chances(causes: Floats, share: Floats, start: Floats) -> Floats:
    """Coefficients (G, q) of the logarithms of chances of patterns, by causes (N, q), that give mean sums.

    `share` (G, q) are the sums of causes by pattern over the number of entities; likelihood equations of a
    multinomial logit, by Newton's method. The largest pattern has coefficients zero.
    """
    others = np.delete(np.arange(len(share)), int(share[:, 0].argmax()))
    out, q, N = start.copy(), causes.shape[1], len(causes)
    if not out.any():
        out[others, 0] = np.log(share[others, 0] / share[:, 0].max())
    for _ in range(STEPS if len(others) else 0):
        p = chances(out @ causes.T)[others]
        gap = share[others] - p @ causes / N
        if np.abs(gap).max() < SMALL:
            break
        H = np.empty((len(others), q, len(others), q))
        for a in range(q):
            for b in range(a, q):
                weighed = p * (causes[:, a] * causes[:, b])
                H[:, a, :, b] = H[:, b, :, a] = (np.diag(weighed.sum(axis=1)) - weighed @ p.T) / N
        size = len(others) * q
        step = np.linalg.solve(H.reshape(size, size) + SMALL * np.eye(size), gap.ravel())
        out[others] += np.clip(step, -LONGEST, LONGEST).reshape(-1, q)
    return out


def chances(logs: Floats) -> Floats:
    """Bring logarithms of chances (G, N), up to a constant of each entity, to chances."""
    p = np.exp(logs - logs.max(axis=0))
    return np.asarray(p / p.sum(axis=0))


def choose(logs: Floats, places: Floats) -> Ints:
    """Pattern of each entity, (N,), by its place between 0 and 1."""
    code = (places > np.cumsum(chances(logs), axis=0)).sum(axis=0)
    return np.asarray(np.minimum(code, len(logs) - 1))


def sums_by_pattern(like: PatternMoments, X: Floats, y: Floats, code: Ints) -> PatternMoments:
    """Moments of a sample by pattern; shapes of columns are those of the entities that have them."""
    G, P = like.seen.shape
    grams, squares = np.zeros((G, P + 2, P + 2)), np.zeros(P)
    n = np.bincount(code, minlength=G).astype(np.float64)
    rows = np.column_stack([np.ones(len(y)), X, y])
    members = [rows[code == g] for g in range(G)]
    for g, Z in enumerate(members):
        here = np.concatenate([[True], like.seen[g], [True]])
        grams[g][np.ix_(here, here)] = Z[:, here].T @ Z[:, here]
    total, count = grams.sum(axis=0), like.seen.T @ n
    mean = total[0, 1:-1] / count
    sd = np.sqrt(np.diag(total)[1:-1] / count - mean**2)
    for g, Z in enumerate(members):
        deviations = (Z[:, 1:-1] - mean) / sd
        squares += like.seen[g] * (deviations * np.abs(deviations)).sum(axis=0)
    unit = np.ones(P + 1)
    return replace(like, n=n, grams=grams, centre=0.0 * unit, scale=unit, shape=squares / count)
