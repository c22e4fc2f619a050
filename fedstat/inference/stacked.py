"""Stacked estimating equations: sums of derivatives and of products over rows, and the sandwich of both.

A chain has blocks of equations. Block b of row i is ``psi_ib = x_ib r_b(eta_i)``: columns of a design, times
a residual that depends on the linear predictors ``eta_l = x_l' theta_l`` of this block and of others. A mean
is a block with the constant as its only column. So the scores of rows follow from residuals (n, L), and their
derivatives from those of residuals by predictors (n, L, L). With ``A = sum d psi_i / d theta`` and
``B = sum psi_i psi_i'``, the covariance of the solution of ``sum psi_i = 0`` is ``A^-1 B A^-T``. It includes
the error of every earlier block (Stefanski and Boos 2002, "The calculus of M-estimation", The American
Statistician 56).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedstat.errors import EstimationError
from fedstat.typing import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class EquationChain:
    """Blocks of estimating equations over one design.

    Parameters
    ----------
    columns : sequence of (p_b,) arrays of int
        Columns of the design in each block; the parameters are those of all blocks, one after the other.

    Examples
    --------
    The mean of y, and of its square less the square of the mean:

    >>> import numpy as np
    >>> from fedstat.inference.stacked import EquationChain, sandwich
    >>> chain, y = EquationChain([np.array([0]), np.array([0])]), np.array([1.0, 2.0, 4.0, 5.0])
    >>> residuals = np.column_stack([y - 3.0, (y - 3.0) ** 2 - 2.5])
    >>> derivatives = np.zeros((4, 2, 2))
    >>> derivatives[:, 0, 0], derivatives[:, 1, 0], derivatives[:, 1, 1] = -1.0, -2.0 * (y - 3.0), -1.0
    >>> X = np.ones((4, 1))
    >>> A, B = chain.derivative(X, derivatives), chain.products(X, residuals)
    >>> sandwich(A, B).round(3).tolist()
    [[0.625, 0.0], [0.0, 0.562]]
    """

    columns: Sequence[Ints]

    @property
    def places(self) -> list[slice]:
        """Places of the parameters of each block."""
        ends = np.cumsum([0, *map(len, self.columns)]).tolist()
        return [slice(*pair) for pair in pairwise(ends)]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(map(len, self.columns))

    def matrices(self, p: int) -> Floats:
        """Matrices (L, p, q) from the parameters to coefficients of p columns in each predictor."""
        M = np.zeros((len(self.columns), p, self.size))
        for one, columns, place in zip(M, self.columns, self.places, strict=True):
            one[columns, place] = np.eye(len(columns))
        return M

    def predictors(self, X: Floats, theta: Floats) -> Floats:
        """Linear predictors (n, L) of rows (n, p)."""
        coefficients = np.zeros((X.shape[1], len(self.columns)))
        for j, (columns, place) in enumerate(zip(self.columns, self.places, strict=True)):
            coefficients[columns, j] = theta[place]
        return X @ coefficients

    def scores(self, X: Floats, residuals: Floats) -> Floats:
        """Scores of the rows, (n, q), from residuals (n, L)."""
        pairs = zip(self.columns, residuals.T, strict=True)
        return np.hstack([columns_of(X, c) * r[:, None] for c, r in pairs])

    def score(self, X: Floats, residuals: Floats) -> Floats:
        """Sum of the scores, (q,)."""
        pairs = zip(self.columns, residuals.T, strict=True)
        return np.concatenate([r @ columns_of(X, c) for c, r in pairs])

    def products(self, X: Floats, residuals: Floats) -> Floats:
        """Sum of the outer products of the scores, (q, q)."""
        scores = self.scores(X, residuals)
        return np.asarray(scores.T @ scores)

    def derivative(self, X: Floats, derivatives: Floats) -> Floats:
        """Sum of the derivatives of the scores, (q, q), from those of residuals by predictors (n, L, L)."""
        out, places = np.zeros((self.size, self.size)), self.places
        for j, k in np.argwhere(derivatives.any(axis=0)).tolist():
            weighted = columns_of(X, self.columns[j]) * derivatives[:, j, k, None]
            out[places[j], places[k]] = weighted.T @ columns_of(X, self.columns[k])
        return out


def columns_of(X: Floats, columns: Ints) -> Floats:
    """Return columns of rows (n, p), without a copy where they follow one another."""
    first, last = columns[[0, -1]].tolist()
    together = np.array_equal(columns, np.arange(first, last + 1))
    return X[:, first : last + 1] if together else X[:, columns]


def two_step_products(products: Floats, slopes: Floats, information: Floats) -> Floats:
    """Return products of the scores of a second step that account for the estimates of a first, (p, p).

    With the inverse derivative of the second step on both sides they are its covariance (Newey and McFadden
    1994, "Large sample estimation and hypothesis testing", section 6).

    Parameters
    ----------
    products : (p + q, p + q) array
        Outer products of the scores, those of the first step last.
    slopes : (p, q) array
        Derivatives of the second scores by the estimates of the first step.
    information : (q, q) array
        Minus the derivative of the first scores.
    """
    whole = np.hstack([np.eye(len(slopes)), np.linalg.solve(information.T, slopes.T).T])
    return np.asarray(whole @ products @ whole.T)


def sandwich(derivative: Floats, products: Floats) -> Floats:
    """Return the covariance ``A^-1 B A^-T`` of the solution, (q, q).

    Raises
    ------
    EstimationError
        The derivative is singular: the equations do not determine all parameters.
    """
    size = np.sqrt(np.maximum(np.diag(products), np.finfo(float).tiny))
    try:
        # Equations of unit variance: blocks in different units do not make the matrix ill-conditioned.
        bread = np.linalg.inv(derivative / size[:, None])
    except np.linalg.LinAlgError:
        raise EstimationError(
            "the equations do not determine all parameters; leave out columns that follow from others"
        ) from None
    return np.asarray(bread @ (products / np.outer(size, size)) @ bread.T)
