"""Models of rows that are weighted by a fitted propensity model: sums for a covariance that accounts for it.

The estimating functions of a model are s_i = w_i u_i, and w_i depends on the coefficients of the propensity
model, whose own scores are g_i. Both together are a chain of estimating equations (see
:mod:`fedstat.inference.stacked`). Its derivative by those coefficients is the sum of s_i times the
derivatives of log w_i. This holds for a generalized linear model, for estimating equations of clusters in
which all rows of a cluster have one weight or are taken as independent, and for a partial likelihood, where
s_i are the residuals of Lin and Wei (1989).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design.horizontal_steps import OpenRows
from fedstat.federation.design.propensity_weights import WeightedArms
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.state import State
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.stacked import two_step_products
from fedstat.models.horizontal.overlap import spread_of
from fedstat.models.horizontal.rows import SUMS, summed
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Array, Floats, Ints

STACKED = "stacked"
"""Name of the covariance that accounts for the estimated weights."""
BEHIND = (*SUMS, facts.SummedProducts)
RELEASES = {
    "scores": summed("scores of the propensity models", behind=BEHIND),
    "information": summed("information of the propensity models", 2, behind=BEHIND),
    "slopes": summed(
        "derivatives of the scores by the coefficients of the propensity models", 2, behind=BEHIND
    ),
    "products": summed(
        "products of the scores of rows, with those of the propensity models", 2, behind=BEHIND
    ),
    "spread": summed("rows, and sums of powers of weights, by arm", 2, behind=BEHIND),
}
"""What :func:`sum_stacked` releases."""
AT_REST = 1e-8
"""Squared step, in standard errors, below which scores of the propensity models count as zero."""
OTHER_ROWS = (
    "the weights belong to a propensity model of other rows: its scores do not add up to zero over the rows "
    "of this model. Fit both on the same rows, with the argument complete, and again if a site was lost"
)


@dataclass(frozen=True, slots=True, eq=False)
class StackedBlock(facts.RowBlock):
    """All rows: columns of the model and of the propensity models, and weights by which they are multiplied.

    `residuals` (n, k) are the weights of the rows in the scores.
    """

    X: Floats
    arms: tuple[WeightedArms, ...]
    residuals: Floats

    @property
    def columns(self) -> Floats:
        """Columns of the model and of the propensity models, a constant among them."""
        return np.column_stack([np.ones(len(self.X)), self.X, *(one.columns[:, 1:] for one in self.arms)])

    @property
    def factors(self) -> Floats:
        """Derivatives of log-weights, and residuals, of all propensity models by their predictors, (n, l)."""
        return np.column_stack([part for one in self.arms for part in (one.slopes, one.residuals)])

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Return the weights of rows in all sums, (n, k)."""
        n, r, f = len(self.X), self.residuals, self.factors
        both = (r[:, :, None] * f[:, None]).reshape(n, -1)
        own = [np.column_stack([one.residuals, one.information.reshape(n, -1)]) for one in self.arms]
        return np.column_stack([r, both, *own])

    def terms(self, point: Any) -> list[facts.RowTerms]:
        """Terms of the sums that are no products of scores."""
        n, r = len(self.X), self.residuals
        X, found = np.column_stack([np.ones(n), self.X]), []
        for one in self.arms:
            both = (r[:, :, None] * one.slopes[:, None]).reshape(n, -1)
            found.append(facts.RowTerms(X, both, one.columns))
            found.append(facts.RowTerms(one.columns, one.information.reshape(n, -1), one.columns))
            found.append(facts.alone(one.columns, one.residuals))
        return found

    def every(self, first: int, step: int) -> StackedBlock:
        """Return every n-th row, from the first on."""
        rows = slice(first, None, step)
        arms = tuple(
            WeightedArms(*(getattr(one, name)[rows] for name in WeightedArms.__slots__)) for one in self.arms
        )
        return StackedBlock(self.X[rows], arms, self.residuals[rows])


def sum_stacked(
    state: State, opened: OpenRows, scores: Floats, residuals: Floats, key: Any, code: Ints | None = None
) -> dict[str, Array]:
    """Sum what the covariance with estimated weights needs, over the rows or the clusters of a site.

    Parameters
    ----------
    scores : (n, p) array
        Of the rows, in the order of the table.
    residuals : (n, k) array
        Weights of the rows in the scores.
    key : hashable
        What distinguishes the point.
    code : (n,) array of int, optional
        Cluster of each row.

    Returns
    -------
    dict
        ``scores`` (Q,), ``information`` (Q, Q), ``slopes`` (p, Q), ``products`` (p + Q, p + Q) and
        ``spread`` (A, 4), of Q coefficients of propensity models and the arms of all of them.
    """
    arms = opened.weighted_arms()
    if not arms:
        raise MessageError(f"{opened.data.name}: the model opened no weights of a propensity model")
    block = StackedBlock(np.concatenate([X for _, X in opened.chunks()]), tuple(arms), residuals)
    state.report(
        facts.WorkingWeights(lambda: np.abs(block.vectors(()).T)),
        facts.ScoreAndInformation(
            opened, len(scores), (STACKED, key), lambda: iter([block]), among=opened.places
        ),
    )
    for column in np.column_stack([residuals, *(one.residuals for one in arms)]).T:
        state.report(opened.products_with(column**2))
    log_slopes = np.column_stack([one.by_column(one.slopes) for one in arms])
    of_arms = np.column_stack([one.by_column(one.residuals) for one in arms])
    both = np.column_stack([scores, of_arms])
    if code is not None:
        both = np.array([np.bincount(code, column) for column in both.T]).T
    return {
        "scores": of_arms.sum(axis=0),
        "information": information_of(arms),
        "slopes": scores.T @ log_slopes,
        "products": both.T @ both,
        "spread": np.concatenate([spread_of(one.by_arm) for one in arms]),
    }


def information_of(arms: Iterable[WeightedArms]) -> Floats:
    """Return the information of propensity models, which are fitted one by one, (Q, Q)."""
    parts = []
    for one in arms:
        J, c = one.residuals.shape[1], one.columns.shape[1]
        found = np.einsum("ni,njk,nl->jikl", one.columns, one.information, one.columns, optimize=True)
        parts.append(found.reshape(J * c, J * c))
    size = sum(map(len, parts))
    whole, at = np.zeros((size, size)), 0
    for part in parts:
        here = slice(at, at := at + len(part))
        whole[here, here] = part
    return whole


@dataclass(frozen=True, slots=True, eq=False)
class StackedSums:
    """Products of the scores (p, p) that account for the estimated weights.

    `spread` (A, 4) has the rows of each arm, and sums of their weights, squares and fourth powers.
    """

    meat: Floats
    spread: Floats


def stacked_sums(session: RowsSession, point: dict[str, Array]) -> FitProtocol[StackedSums]:
    """Request the sums at the estimate of a model of weighted rows.

    Raises
    ------
    EstimationError
        The scores of the propensity models are not zero over these rows.
    """
    replies = yield session.request_all("sum_weighted", point)
    scores, information, slopes, products, spread = (
        np.asarray(add(replies, name), dtype=np.float64) for name in RELEASES
    )
    if not scores @ np.linalg.solve(information, scores) < AT_REST:
        raise EstimationError(OTHER_ROWS)
    return StackedSums(two_step_products(products, slopes, information), spread)
