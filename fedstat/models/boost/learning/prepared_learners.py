"""Learners prepared for a path: centering, smoothing parameters, and coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from scipy.linalg import block_diag, eigh

from fedstat.errors import EstimationError
from fedstat.kernels.boosting import demmler_reinsch
from fedstat.kernels.curves import difference_penalty, spline_gram
from fedstat.models.boost.learning.learners import DF, INTERCEPT, Learner
from fedstat.models.boost.learning.moments import CurveMoments, CurveSums, IrregularMoments, IrregularSums
from fedstat.models.boost.learning.varying import (
    VaryingSums,
    even_products,
    even_scores,
    varying_penalty,
)
from fedstat.typing import Floats, Ints

PenaltyKind: TypeAlias = Literal["separable", "fdboost"]
PENALTIES = ("separable", "fdboost")
CONSTANT = 1e-12
"""Share of a learner's squares that is left of them where they do not vary."""
Moments: TypeAlias = CurveMoments | IrregularMoments
Sums: TypeAlias = CurveSums | IrregularSums


@dataclass(frozen=True, slots=True)
class BoostDesign:
    """Learners with the places of their columns, the basis along the response, and the kind of penalty.

    `starts` are the positions of each learner's columns, and their number; `time` is None for a number.
    """

    learners: Annotated[tuple[Learner, ...], "b"]
    starts: tuple[int, ...]
    time: Learner | None
    penalty: PenaltyKind

    def columns(self, p: int) -> slice:
        """Places of a learner's columns."""
        return slice(self.starts[p], self.starts[p + 1])

    def place(self, label: str) -> int:
        """Place of a learner, by its label or by what it is of where that is one's alone."""
        labels = [one.label for one in self.learners]
        if label in labels:
            return labels.index(label)
        named = [p for p, one in enumerate(self.learners) if one.of == label]
        return named[0] if len(named) == 1 else -1

    def margin(self, p: int) -> Floats:
        """Penalty of a learner along its own column, before its effects are centered."""
        learner, k = self.learners[p], self.starts[p + 1] - self.starts[p]
        if learner.kind == INTERCEPT:
            return np.zeros((1, 1))
        return difference_penalty(k, learner.differences) if learner.smooth else np.eye(k)

    def fitted(self, p: int, sums: Sums) -> tuple[Floats, Floats]:
        """Fitted directions of a learner's columns, (k, m), and the penalty on these, (m, m)."""
        learner = self.learners[p]
        if learner.varying:
            return np.zeros((0, 0)), np.zeros((0, 0))
        if learner.kind == "bfpc":  # scores are shrunken alike, whatever their variance
            C = principal_directions(sums, self.columns(p), learner)
            return C, np.eye(C.shape[1])
        k = self.starts[p + 1] - self.starts[p]
        C = centering_transform(sums, self.columns(p)) if learner.centered else np.eye(k)
        return C, C.T @ self.margin(p) @ C

    def own(self, p: int) -> slice:
        """Places of a learner's coefficients among those that vary along the response."""
        first = sum(one.coefficients for one in self.learners[:p])
        return slice(first, first + self.learners[p].coefficients)

    def along(self, k2: int) -> Floats:
        """Penalty along the response, (k2, k2)."""
        return np.zeros((1, 1)) if self.time is None else difference_penalty(k2, self.time.differences)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLearners:
    """Learners in the coordinates of their path: coefficients are L B V'.

    `starts` are places in these coordinates; `fit` are arguments of the path besides the sums, and `df` the
    degrees of freedom of each learner.
    """

    L: Floats
    V: Floats
    starts: Ints
    fit: tuple[Any, ...]
    df: tuple[float, ...]
    full: bool


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBlocks(PreparedLearners):
    """Learners without two directions: `A` are products of all their columns with all splines along it.

    `starts` are places among these, learner by learner, splines outermost; `parts` take columns to those that
    are fitted.
    """

    A: Floats
    parts: tuple[Floats, ...]


def centering_transform(sums: Sums, columns: slice) -> Floats:
    """Columns whose effects add up to zero over all rows: (k, k - 1), orthonormal."""
    Q: Floats = np.linalg.qr(sums.S[columns, 0][:, None], mode="complete")[0]
    return Q[:, 1:]


def principal_directions(sums: Sums, columns: slice, learner: Learner) -> Floats:
    """Directions (1 + k, m) to scores of curves about their mean on their first principal components.

    For columns of one and the integrals of x times splines: with J the Gram matrix of the splines,
    eigenfunctions of the covariance of x in their span have coefficients a with Cov a = mu J a, and scores
    are the integrals' a.
    """
    S = sums.S[columns, columns]
    mean = S[0, 1:] / sums.n
    cov = S[1:, 1:] / sums.n - np.outer(mean, mean)
    mu, A = eigh(cov, spline_gram(learner.low, learner.high, learner.knots, learner.degree))
    mu, A = np.maximum(mu[::-1], 0.0), A[:, ::-1]
    m = int(np.searchsorted(np.cumsum(mu) / mu.sum(), learner.pve * (1.0 - 1e-12))) + 1
    return np.vstack([-mean @ A[:, :m], A[:, :m]])


def check_varying(sums: Sums, design: BoostDesign) -> None:
    """Require learners, but for the intercept, whose columns vary over rows; an EstimationError of others."""
    for p, one in enumerate(design.learners):
        rows = design.columns(p)
        squares, total = np.diag(sums.S[rows, rows]), sums.S[rows, 0]
        if one.kind != INTERCEPT:
            _require_varying(one, float((squares - total**2 / sums.S[0, 0]).sum()), float(squares.sum()))


def _require_varying(one: Learner, left: float, total: float) -> None:
    """Require squares to be left of a learner's columns; those along the response are another affair."""
    if not one.varying and left <= CONSTANT * total:
        raise EstimationError(
            f"{one.label}: its columns do not vary but as the intercept does; leave the learner out"
        )


def prepare_learners(
    sums: Sums, design: BoostDesign, gram: Floats, varying: VaryingSums | None = None
) -> PreparedLearners:
    """Choose smoothing parameters by degrees of freedom; `gram` is that of the response's basis, (k2, k2).

    With the penalty "separable" both directions are smoothed one after the other, (S + a K1) B (G + b K2);
    with "fdboost" one parameter is that of K2 x I + I x K1, as in FDboost.
    """
    check_varying(sums, design)
    C, margins = map(list, zip(*(design.fitted(p, sums) for p in range(len(design.learners))), strict=True))
    grams = []
    for p, (one, c) in enumerate(zip(design.learners, C, strict=True)):
        S = sums.S[design.columns(p), design.columns(p)]
        grams.append(c.T @ S @ c)
        # A learner may add nothing to the intercept's effect, for instance if one row has all its variation.
        _require_varying(one, float(np.trace(grams[-1])), float(np.trace(S)))
    starts = np.cumsum([0, *(c.shape[1] for c in C)]).astype(np.int64)
    K2 = design.along(len(gram))
    if isinstance(sums, IrregularSums) or varying is not None:
        return _prepare_blocks(design, sums, gram, C, margins, K2, varying)
    if design.penalty == "fdboost" and design.time is not None:
        return _prepare_full(design, C, grams, margins, gram, K2, starts)
    return _prepare_separable(design, C, grams, margins, gram, K2, starts)


def target_df(design: BoostDesign, k1: Sequence[int], k2: int) -> list[tuple[float, float]]:
    """Degrees of freedom of each learner: along what it is of, and in all.

    In all they are the product of both directions', the same for all learners unless the formula says
    otherwise: where one has fewer columns, more are left to it along the response.
    """
    along, out = df_along(design), []
    for one, k in zip(design.learners, k1, strict=True):
        if one.varying:
            out.append((1.0, min(float(one.df or DF * along), float(one.coefficients))))
            continue
        own = min(float(one.df or DF), float(k))
        complete = float(one.df or DF) * along
        most = float(k if one.constant else k * k2)
        out.append((min(complete, most) if one.constant else own, min(complete, most)))
    return out


def df_along(design: BoostDesign) -> float:
    """Degrees of freedom along the response."""
    return 1.0 if design.time is None else float(design.time.df or DF)


def _prepare_separable(
    design: BoostDesign, C: list[Floats], grams: list[Floats], margins: list[Floats], gram: Floats,
    K2: Floats, starts: Ints,
) -> PreparedLearners:  # fmt: skip
    k2, turns, shrunk, found = len(gram), [], [], []
    V = demmler_reinsch(gram, K2, float(k2)).V
    if any(one.constant for one in design.learners):
        V = constant_first(V, gram, len(K2) - np.linalg.matrix_rank(K2))
    wanted = target_df(design, list(map(len, grams)), k2)
    for one, A, K1, (own, complete) in zip(design.learners, grams, margins, wanted, strict=True):
        first = demmler_reinsch(A, K1, own)
        along = np.eye(1, k2)[0] if one.constant else demmler_reinsch(gram, K2, complete, first.h).h
        turns.append(first.V)
        shrunk.append(np.outer(first.h, along))
        found.append(float((2.0 * shrunk[-1] - shrunk[-1] ** 2).sum()))
    L = block_diag(*(c @ v for c, v in zip(C, turns, strict=True)))
    return PreparedLearners(L, V, starts, (np.concatenate(shrunk),), tuple(found), full=False)


def constant_first(V: Floats, gram: Floats, free: int) -> Floats:
    """Turn the first columns of V, which are free of the penalty, so that the first of them is constant.

    V has V' G V = I, and functions along the response add up to one: the constant has coefficients one.
    """
    own = V[:, :free].T @ gram.sum(axis=1)
    turn = np.linalg.qr(own[:, None], mode="complete")[0]
    return np.column_stack([V[:, :free] @ turn, V[:, free:]])


def _prepare_full(
    design: BoostDesign, C: list[Floats], grams: list[Floats], margins: list[Floats], gram: Floats,
    K2: Floats, starts: Ints,
) -> PreparedLearners:  # fmt: skip
    k2, turns, shrunk, found = len(gram), [], [], []
    wanted = target_df(design, list(map(len, grams)), k2)
    for one, A, K1, (_, complete) in zip(design.learners, grams, margins, wanted, strict=True):
        k1 = len(A)
        if one.constant:  # one coefficient for all functions along the response, which add up to one
            fit = demmler_reinsch(float(gram.sum()) * A, K1, complete)
            turned = _padded(np.asarray(np.kron(np.ones((1, k2)), fit.V.T)))
            h = _padded(fit.h[:, None], k1 * k2).ravel()
        else:
            K = np.kron(K2, np.eye(k1)) + (0.0 if one.kind == INTERCEPT else np.kron(np.eye(k2), K1))
            fit = demmler_reinsch(
                np.asarray(np.kron(gram, A), dtype=np.float64),
                np.asarray(K, dtype=np.float64),
                df_along(design) if one.kind == INTERCEPT else complete,
            )
            turned, h = fit.V.T, fit.h
        turns.append(np.ascontiguousarray(turned).ravel())
        shrunk.append(h)
        found.append(fit.df)
    at = np.cumsum([0, *map(len, turns)])[:-1].astype(np.int64)
    arguments = (np.ascontiguousarray(gram), np.concatenate(turns), at, np.concatenate(shrunk))
    return PreparedLearners(block_diag(*C), np.eye(k2), starts, arguments, tuple(found), full=True)


def _prepare_blocks(
    design: BoostDesign, sums: Sums, gram: Floats, C: list[Floats], margins: list[Floats], K2: Floats,
    varying: VaryingSums | None,
) -> PreparedBlocks:  # fmt: skip
    """Learners of sums that have no two directions, by products of all their coefficients.

    Penalties are those of the other kinds with the mean of what curves weigh; df are of the sums as is.
    """
    k2, turns, shrunk, found = len(K2), [], [], []
    if isinstance(sums, IrregularSums):
        gram = sums.along / sums.n
    A = all_products(sums, C, gram, design, varying)
    starts = np.cumsum(
        [0, *(one.coefficients or k2 * c.shape[1] for one, c in zip(design.learners, C, strict=True))]
    ).astype(np.int64)
    wanted = target_df(design, [c.shape[1] for c in C], k2)
    for p, (one, c, K1, (own, complete)) in enumerate(zip(design.learners, C, margins, wanted, strict=True)):
        k1, block = c.shape[1], A[starts[p] : starts[p + 1], starts[p] : starts[p + 1]]
        R: Floats = np.eye(len(block))
        if one.varying:
            K = varying_penalty(one)
        elif one.constant:
            R, K = np.asarray(np.kron(np.ones((k2, 1)), np.eye(k1))), K1
        elif design.penalty == "fdboost":
            K = np.kron(K2, np.eye(k1)) + (0.0 if one.kind == INTERCEPT else np.kron(np.eye(k2), K1))
            complete = df_along(design) if one.kind == INTERCEPT else complete
        else:
            S = c.T @ sums.S[design.columns(p), design.columns(p)] @ c
            first = demmler_reinsch(S, K1, own)
            smooth = demmler_reinsch(gram, K2, complete, first.h).smoothing * K2
            K = np.kron(smooth, S) + first.smoothing * np.kron(gram + smooth, K1)
        fit = demmler_reinsch(np.asarray(R.T @ block @ R), np.asarray(K, dtype=np.float64), complete)
        turns.append(_padded(np.asarray(fit.V.T @ R.T)).ravel())
        shrunk.append(_padded(fit.h[:, None], len(block)).ravel())
        found.append(fit.df)
    at = np.cumsum([0, *map(len, turns)])[:-1].astype(np.int64)
    fit_of = (np.concatenate(turns), at, np.concatenate(shrunk))
    return PreparedBlocks(block_diag(*C), np.eye(k2), starts, fit_of, tuple(found), True, A, tuple(C))


def _padded(rows: Floats, n: int = 0) -> Floats:
    """Rows of zeros below: a square matrix, or n of them."""
    more = (n or rows.shape[1]) - len(rows)
    return np.ascontiguousarray(np.concatenate([rows, np.zeros((more, rows.shape[1]))]))


def all_products(
    sums: Sums, parts: Sequence[Floats], gram: Floats, design: BoostDesign, varying: VaryingSums | None
) -> Floats:
    """Products of all coefficients' columns over rows and points, learner by learner."""
    A = even_products(sums, parts, gram) if isinstance(sums, CurveSums) else sums.turned(parts)[0]
    return A if varying is None else varying.joined(A, parts, design.learners)


def all_scores(
    sums: Sums, parts: Sequence[Floats], design: BoostDesign, varying: VaryingSums | None
) -> Floats:
    """Products of these with the response."""
    t = even_scores(sums, parts) if isinstance(sums, CurveSums) else sums.turned_scores(parts)
    return t if varying is None else varying.scores(t, parts, design.learners)
