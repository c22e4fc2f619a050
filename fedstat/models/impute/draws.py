"""Draws of completed sums from the joint normal model, given sums by missing pattern.

Data augmentation (Tanner and Wong 1987; Schafer 1997, section 5.4) alternates two draws: the missing values
given the parameters, and the parameters given the completed data. The parameters depend on the completed data
only through its sums of products. Given the parameters, these sums depend on the observed values only through
the sums by missing pattern. No row is therefore needed. Write X (n_g, 1 + q) for the intercept and the
observed columns of a pattern, W = X'X, and C for the coefficients of the missing columns given X. Their
values are X C + E, where the rows of E are normal with covariance S. Therefore X'E = W^(1/2) Z S^(1/2), and
E'E is S^(1/2) (Z'Z + V) S^(1/2)', where Z has independent standard normal entries and V is a Wishart matrix
with n_g - rank(X) degrees of freedom. The draw of the sums is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal.likelihood import expected_moments
from fedstat.typing import Bools, Floats

RANK = 1e-10
"""Share of the largest eigenvalue below which a direction of a pattern's columns counts as constant."""
EM_STEPS = 500
EM_TOL = 1e-5
CORRELATION = 0.05
LEAST_BETWEEN, MOST_BETWEEN = 20, 500


@dataclass(frozen=True, slots=True, eq=False)
class PatternSums:
    """Sums by missing pattern of columns in units in which they have mean zero and variance one.

    `seen` (G, d) states which columns a pattern has, `grams` (G, 1 + d, 1 + d) are sums of (1, x)(1, x)',
    zero at columns that are missing. `center` and `scale` (d,) lead back to the units of the data.
    """

    names: tuple[str, ...]
    seen: Bools
    grams: Floats
    center: Floats
    scale: Floats

    @property
    def n(self) -> Floats:
        """Entities of each pattern, (G,)."""
        return np.asarray(self.grams[:, 0, 0])

    @property
    def missing(self) -> Floats:
        """Share of the entities that lack each column, (d,)."""
        return np.asarray(1.0 - self.n @ self.seen / self.n.sum())

    def in_units(self, gram: Floats) -> Floats:
        """Return sums of products of (1, x), in the units of the data."""
        back = np.diag(np.append(1.0, self.scale))
        back[0, 1:] = self.center
        return np.asarray(back.T @ gram @ back)

    def check_pairs(self) -> None:
        """Require that enough entities have both of any two columns.

        Raises
        ------
        EstimationError
            Names two columns; the joint distribution of the two would be that of the prior.
        """
        together = (self.seen * self.n[:, None]).T @ self.seen
        least = len(self.names) + 2
        if together.min() < least:
            i, j = np.unravel_index(int(np.argmin(together)), together.shape)
            raise EstimationError(
                f"impute: {int(together[i, j]):,} entities have both {self.names[i]!r} and "
                f"{self.names[j]!r}; {least} are needed with {len(self.names)} columns, because nothing else "
                "determines their covariance. Leave one of the two out"
            )


@dataclass(frozen=True, slots=True, eq=False)
class JointNormal:
    """Mean (d,) and covariance (d, d) of the columns, in the units of :class:`PatternSums`."""

    mean: Floats
    cov: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Parameters, and sums of products (1 + d, 1 + d) of (1, x) of the data completed by them."""

    law: JointNormal
    gram: Floats


def complete(sums: PatternSums, law: JointNormal, rng: np.random.Generator) -> Floats:
    """Draw the sums of the completed data at given parameters."""
    d = len(law.mean)
    total = np.zeros((d + 1, d + 1))
    for seen, gram in zip(sums.seen, sums.grams, strict=True):
        own = np.append(0, 1 + np.flatnonzero(seen))
        lacking = 1 + np.flatnonzero(~seen)
        W = gram[np.ix_(own, own)]
        if not len(lacking):
            total += gram
            continue
        C, S = conditional(law, seen)
        XE, EE = draw_errors(W, S, gram[0, 0], rng)
        cross = W @ C + XE
        inner = C.T @ W @ C + C.T @ XE + XE.T @ C + EE
        total[np.ix_(own, own)] += W
        total[np.ix_(own, lacking)] += cross
        total[np.ix_(lacking, own)] += cross.T
        total[np.ix_(lacking, lacking)] += inner
    return total


def conditional(law: JointNormal, seen: Bools) -> tuple[Floats, Floats]:
    """Coefficients of the missing columns given (1, observed), (1 + q, r), and their covariance (r, r)."""
    o, m = np.flatnonzero(seen), np.flatnonzero(~seen)
    B = np.linalg.solve(law.cov[np.ix_(o, o)], law.cov[np.ix_(o, m)])
    S = law.cov[np.ix_(m, m)] - law.cov[np.ix_(m, o)] @ B
    return np.vstack([law.mean[m] - law.mean[o] @ B, B]), (S + S.T) / 2.0


def draw_errors(W: Floats, S: Floats, n: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw X'E (1 + q, r) and E'E (r, r) of n normal rows of E with covariance S, where X'X = W."""
    r = len(S)
    values, vectors = np.linalg.eigh(W)
    use = values > RANK * values[-1]
    root = np.linalg.cholesky(S)
    Z = rng.standard_normal((int(use.sum()), r))
    XE = (vectors[:, use] * np.sqrt(values[use])) @ Z @ root.T
    V = Z.T @ Z + wishart(max(round(n) - int(use.sum()), 0), r, rng)
    return XE, root @ V @ root.T


def wishart(df: int, r: int, rng: np.random.Generator) -> Floats:
    """Draw a Wishart matrix (r, r) with unit scale, singular where df < r."""
    if df < r:
        rows = rng.standard_normal((df, r))
        return np.asarray(rows.T @ rows)
    # Bartlett's decomposition
    A = np.tril(rng.standard_normal((r, r)), -1)
    A[np.diag_indices(r)] = np.sqrt(rng.chisquare(df - np.arange(r)))
    return np.asarray(A @ A.T)


def posterior(gram: Floats, rng: np.random.Generator) -> JointNormal:
    """Draw mean and covariance given completed data, under the prior of Jeffreys."""
    n, mean = gram[0, 0], gram[0, 1:] / gram[0, 0]
    squares = gram[1:, 1:] - n * np.outer(mean, mean)
    half = np.linalg.cholesky(np.linalg.inv(squares))
    precision = half @ wishart(round(n) - 1, len(mean), rng) @ half.T
    cov = np.linalg.inv(precision)
    cov = (cov + cov.T) / 2.0
    return JointNormal(mean + np.linalg.cholesky(cov / n) @ rng.standard_normal(len(mean)), cov)


def start(sums: PatternSums) -> tuple[JointNormal, float]:
    """Estimate the parameters by EM, and the rate at which it converges.

    The rate is the largest fraction of missing information. It is also the correlation of successive draws of
    the parameters in data augmentation, for the function of the parameters that converges most slowly.
    """
    d = len(sums.names)
    law, moved, rate = JointNormal(np.zeros(d), np.eye(d)), np.inf, 0.0
    for _ in range(EM_STEPS):
        mean, cov = expected_moments(sums.seen, sums.n, sums.grams, law.mean, law.cov)
        before, moved = moved, float(np.linalg.norm(np.append(mean - law.mean, cov - law.cov)))
        law, rate = JointNormal(mean, cov), moved / before
        if moved < EM_TOL:
            break
    return law, min(rate, 1.0)


def iterations_between(rate: float) -> int:
    """Return how many iterations leave a correlation of at most `CORRELATION` between two imputations."""
    enough = np.log(CORRELATION) / np.log(np.clip(rate, 1e-9, 1.0 - 1e-9))
    return int(np.clip(np.ceil(enough), LEAST_BETWEEN, MOST_BETWEEN))


def draws(
    sums: PatternSums, m: int, law: JointNormal, between: int, rng: np.random.Generator
) -> Iterator[Draw]:
    """Draw `m` completions from the posterior predictive, `between` iterations of data augmentation apart."""
    for iteration in range(1, m * between + 1):
        gram = complete(sums, law, rng)
        if iteration % between == 0:
            yield Draw(law, gram)
        law = posterior(gram, rng)


def impute_sums(sums: PatternSums, m: int, rng: np.random.Generator) -> tuple[tuple[Draw, ...], float]:
    """Draw `m` completions; return them, and the correlation that is left between two successive ones.

    Raises
    ------
    EstimationError
        Too few entities have two of the columns, or columns are collinear.
    """
    sums.check_pairs()
    try:
        law, rate = start(sums)
        between = iterations_between(rate)
        return tuple(draws(sums, m, law, between, rng)), rate**between
    except np.linalg.LinAlgError as error:
        raise EstimationError(
            "impute: the joint covariance of the columns is singular; leave out columns that follow from "
            "others, such as one of several levels that exclude each other"
        ) from error
