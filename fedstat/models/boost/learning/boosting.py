"""Paths of component-wise boosting: learners made ready from sums, steps, their number, importance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from scipy.linalg import block_diag, eigh

from fedstat.errors import NotAvailableError
from fedstat.kernels.boosting.bases import difference_penalty, smooth_curve, spline_gram
from fedstat.kernels.boosting.path import follow_blocks, follow_full, follow_shrunk
from fedstat.kernels.boosting.reinsch import demmler_reinsch
from fedstat.models.boost.learning.learners import DF, INTERCEPT, Learner
from fedstat.models.boost.learning.moments import CurveMoments, CurveSums
from fedstat.models.boost.learning.uneven import UnevenMoments, UnevenSums
from fedstat.typing import Floats, Ints

PenaltyKind: TypeAlias = Literal["separable", "fdboost"]
PENALTIES = ("separable", "fdboost")
Aggregation: TypeAlias = Literal["exact", "lsa", "average", "local"]
AGGREGATIONS = ("exact", "lsa", "average", "local")
NOTHING = np.zeros((0, 0))
UNEVEN = (
    "the sums of a response with missing points, or points of its own, do not tell how its errors are "
    "correlated along it, which intervals and tests need; stability() needs no errors. Curve(..., max_gap=0) "
    "leaves such curves out"
)
Moments: TypeAlias = CurveMoments | UnevenMoments
Sums: TypeAlias = CurveSums | UnevenSums


@dataclass(frozen=True, slots=True)
class BoostDesign:
    """Learners with the places of their columns, the basis along the response, and the kind of penalty.

    `starts` are the places of each learner's columns, and their number; `time` is None for a number.
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
        """Penalty of a learner along what it is of, before its effects are centred."""
        learner, k = self.learners[p], self.starts[p + 1] - self.starts[p]
        if learner.kind == INTERCEPT:
            return np.zeros((1, 1))
        return difference_penalty(k, learner.differences) if learner.smooth else np.eye(k)

    def fitted(self, p: int, sums: Sums) -> tuple[Floats, Floats]:
        """Fitted directions of a learner's columns, (k, m), and the penalty on these, (m, m)."""
        learner = self.learners[p]
        if learner.kind == "bfpc":  # scores are shrunken alike, whatever their variance
            C = principal_directions(sums, self.columns(p), learner)
            return C, np.eye(C.shape[1])
        k = self.starts[p + 1] - self.starts[p]
        C = centring(sums, self.columns(p)) if learner.centred else np.eye(k)
        return C, C.T @ self.margin(p) @ C

    def along(self, k2: int) -> Floats:
        """Penalty along the response, (k2, k2)."""
        return np.zeros((1, 1)) if self.time is None else difference_penalty(k2, self.time.differences)


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
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
class UnevenReady(Ready):
    """Learners of an uneven response: `A` are products of all their columns with all splines along it.

    `starts` are places among these, learner by learner, splines outermost; `parts` take columns to those that
    are fitted.
    """

    A: Floats
    parts: tuple[Floats, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BoostPath:
    """Learner of every step, loss then and on other rows, (steps,) each; coefficients (K, k2) at last."""

    selected: Ints
    risk: Floats
    risk_test: Floats
    coef: Floats


def centring(sums: Sums, columns: slice) -> Floats:
    """Columns whose effects add up to zero over all rows: (k, k - 1), orthonormal."""
    Q: Floats = np.linalg.qr(sums.S[columns, 0][:, None], mode="complete")[0]
    return Q[:, 1:]


def principal_directions(sums: Sums, columns: slice, learner: Learner) -> Floats:
    """Directions (1 + k, m) to scores of curves about their mean on their first principal components.

    Of columns one and the integrals of x times splines: with J the Gram of the splines, eigenfunctions of the
    covariance of x in their span have coefficients a with Cov a = mu J a, and scores are the integrals' a.
    """
    S = sums.S[columns, columns]
    mean = S[0, 1:] / sums.n
    cov = S[1:, 1:] / sums.n - np.outer(mean, mean)
    mu, A = eigh(cov, spline_gram(learner.low, learner.high, learner.knots, learner.degree))
    mu, A = np.maximum(mu[::-1], 0.0), A[:, ::-1]
    m = int(np.searchsorted(np.cumsum(mu) / mu.sum(), learner.pve * (1.0 - 1e-12))) + 1
    return np.vstack([-mean @ A[:, :m], A[:, :m]])


def make_ready(sums: Sums, design: BoostDesign, gram: Floats) -> Ready:
    """Choose smoothing parameters by degrees of freedom; `gram` is that of the response's basis, (k2, k2).

    With the penalty "separable" both directions are smoothed one after the other, (S + a K1) B (G + b K2);
    with "fdboost" one parameter is that of K2 x I + I x K1, as in FDboost.
    """
    C, margins = map(list, zip(*(design.fitted(p, sums) for p in range(len(design.learners))), strict=True))
    grams = [c.T @ sums.S[design.columns(p), design.columns(p)] @ c for p, c in enumerate(C)]
    starts = np.cumsum([0, *(c.shape[1] for c in C)]).astype(np.int64)
    K2 = design.along(len(gram))
    if isinstance(sums, UnevenSums):
        return _ready_uneven(design, sums, C, margins, K2)
    if design.penalty == "fdboost" and design.time is not None:
        return _ready_full(design, C, grams, margins, gram, K2, starts)
    return _ready_separable(design, C, grams, margins, gram, K2, starts)


def wanted_df(design: BoostDesign, k1: Sequence[int], k2: int) -> list[tuple[float, float]]:
    """Degrees of freedom of each learner: along what it is of, and in all.

    In all they are the product of both directions', the same for all learners unless the formula says
    otherwise: where one has fewer columns, more are left to it along the response.
    """
    along = 1.0 if design.time is None else float(design.time.df or DF)
    out = []
    for one, k in zip(design.learners, k1, strict=True):
        own = min(float(one.df or DF), float(k))
        whole = float(one.df or DF) * along
        most = float(k if one.constant else k * k2)
        out.append((min(whole, most) if one.constant else own, min(whole, most)))
    return out


def _ready_separable(
    design: BoostDesign, C: list[Floats], grams: list[Floats], margins: list[Floats], gram: Floats,
    K2: Floats, starts: Ints,
) -> Ready:  # fmt: skip
    k2, turns, shrunk, found = len(gram), [], [], []
    V = demmler_reinsch(gram, K2, float(k2)).V
    if any(one.constant for one in design.learners):
        V = constant_first(V, gram, len(K2) - np.linalg.matrix_rank(K2))
    wanted = wanted_df(design, list(map(len, grams)), k2)
    for one, A, K1, (own, whole) in zip(design.learners, grams, margins, wanted, strict=True):
        first = demmler_reinsch(A, K1, own)
        along = np.eye(1, k2)[0] if one.constant else demmler_reinsch(gram, K2, whole, first.h).h
        turns.append(first.V)
        shrunk.append(np.outer(first.h, along))
        found.append(float((2.0 * shrunk[-1] - shrunk[-1] ** 2).sum()))
    L = block_diag(*(c @ v for c, v in zip(C, turns, strict=True)))
    return Ready(L, V, starts, (np.concatenate(shrunk),), tuple(found), full=False)


def constant_first(V: Floats, gram: Floats, free: int) -> Floats:
    """Turn the first columns of V, which are free of the penalty, so that the first of them is constant.

    V has V' G V = I, and functions along the response add up to one: the constant has coefficients one.
    """
    own = V[:, :free].T @ gram.sum(axis=1)
    turn = np.linalg.qr(own[:, None], mode="complete")[0]
    return np.column_stack([V[:, :free] @ turn, V[:, free:]])


def _ready_full(
    design: BoostDesign, C: list[Floats], grams: list[Floats], margins: list[Floats], gram: Floats,
    K2: Floats, starts: Ints,
) -> Ready:  # fmt: skip
    k2, turns, shrunk, found = len(gram), [], [], []
    along = float(design.time.df or DF) if design.time is not None else 1.0
    wanted = wanted_df(design, list(map(len, grams)), k2)
    for one, A, K1, (_, whole) in zip(design.learners, grams, margins, wanted, strict=True):
        k1 = len(A)
        if (
            one.constant
        ):  # coefficients are the same for all functions along the response, which add up to one
            fit = demmler_reinsch(float(gram.sum()) * A, K1, whole)
            turned, h = np.kron(np.ones((1, k2)), fit.V.T), fit.h
            turned, h = (np.concatenate([x, np.zeros((k1 * k2 - k1, *x.shape[1:]))]) for x in (turned, h))
        else:
            K = np.kron(K2, np.eye(k1)) + (0.0 if one.kind == INTERCEPT else np.kron(np.eye(k2), K1))
            fit = demmler_reinsch(
                np.asarray(np.kron(gram, A), dtype=np.float64),
                np.asarray(K, dtype=np.float64),
                along if one.kind == INTERCEPT else whole,
            )
            turned, h = fit.V.T, fit.h
        turns.append(np.ascontiguousarray(turned).ravel())
        shrunk.append(h)
        found.append(fit.df)
    at = np.cumsum([0, *map(len, turns)])[:-1].astype(np.int64)
    arguments = (np.ascontiguousarray(gram), np.concatenate(turns), at, np.concatenate(shrunk))
    return Ready(block_diag(*C), np.eye(k2), starts, arguments, tuple(found), full=True)


def _ready_uneven(
    design: BoostDesign, sums: UnevenSums, C: list[Floats], margins: list[Floats], K2: Floats
) -> UnevenReady:
    """Penalties are those of the other kinds with the mean of what curves weigh; df are of the sums as is."""
    k2, turns, shrunk, found = len(K2), [], [], []
    A, _ = sums.turned(C)
    gram = sums.along / sums.n
    starts = np.cumsum([0, *(k2 * c.shape[1] for c in C)]).astype(np.int64)
    along = float(design.time.df or DF) if design.time is not None else 1.0
    wanted = wanted_df(design, [c.shape[1] for c in C], k2)
    for p, (one, c, K1, (own, whole)) in enumerate(zip(design.learners, C, margins, wanted, strict=True)):
        k1, block = c.shape[1], np.ascontiguousarray(A[starts[p] : starts[p + 1], starts[p] : starts[p + 1]])
        if one.constant:
            only = np.kron(np.ones((k2, 1)), np.eye(k1))
            fit = demmler_reinsch(only.T @ block @ only, K1, whole)
            rest = k1 * (k2 - 1)
            turned = np.concatenate([fit.V.T @ only.T, np.zeros((rest, k1 * k2))])
            h = np.concatenate([fit.h, np.zeros(rest)])
        else:
            if design.penalty == "fdboost":
                K = np.kron(K2, np.eye(k1)) + (0.0 if one.kind == INTERCEPT else np.kron(np.eye(k2), K1))
                whole = along if one.kind == INTERCEPT else whole
            else:
                S = c.T @ sums.S[design.columns(p), design.columns(p)] @ c
                first = demmler_reinsch(S, K1, own)
                smooth = demmler_reinsch(gram, K2, whole, first.h).smoothing * K2
                K = np.kron(smooth, S) + first.smoothing * np.kron(gram + smooth, K1)
            fit = demmler_reinsch(block, np.asarray(K, dtype=np.float64), whole)
            turned, h = fit.V.T, fit.h
        turns.append(np.ascontiguousarray(turned).ravel())
        shrunk.append(h)
        found.append(fit.df)
    at = np.cumsum([0, *map(len, turns)])[:-1].astype(np.int64)
    fit_of = (np.concatenate(turns), at, np.concatenate(shrunk))
    return UnevenReady(block_diag(*C), np.eye(k2), starts, fit_of, tuple(found), True, A, tuple(C))


def follow(ready: Ready, sums: Sums, steps: int, nu: float, test: Sums | None = None) -> BoostPath:
    """Take so many steps from sums of a response less its offset; `test` are those over other rows."""
    selected, risk, risk_test = np.empty(steps, np.int64), np.empty(steps), np.full(steps, np.nan)
    rss = (float(sums.yy), 0.0 if test is None else float(test.yy))
    if isinstance(ready, UnevenReady):
        assert isinstance(sums, UnevenSums)
        assert test is None or isinstance(test, UnevenSums)
        A_test, t_test = (NOTHING, NOTHING.ravel()) if test is None else test.turned(ready.parts)
        flat = np.zeros(len(ready.A))
        t = sums.turned_scores(ready.parts)
        tail = (A_test, t_test, rss[1], selected, risk, risk_test, flat)
        blocks: Callable[..., None] = follow_blocks
        blocks(ready.A, t, *ready.fit, ready.starts, nu, rss[0], *tail)
        return BoostPath(selected, risk, risk_test, _unfold(flat, ready))
    L, V = ready.L, ready.V

    def turned(one: Sums) -> tuple[Floats, Floats]:
        return np.ascontiguousarray(L.T @ one.S @ L), np.ascontiguousarray(L.T @ one.T @ V)

    S, T = turned(sums)
    S_test, T_test = (NOTHING, NOTHING) if test is None else turned(test)
    coef = np.zeros_like(T)
    run: Callable[..., None] = follow_full if ready.full else follow_shrunk
    tail = (S_test, T_test, rss[1], selected, risk, risk_test, coef)
    run(S, T, *ready.fit, ready.starts, nu, rss[0], *tail)
    return BoostPath(selected, risk, risk_test, L @ coef @ V.T)


def _unfold(flat: Floats, ready: UnevenReady) -> Floats:
    """Coefficients (K, k2) from those of all fitted columns with all splines."""
    k2 = len(ready.V)
    return np.concatenate(
        [
            part @ flat[lo:hi].reshape(k2, part.shape[1]).T
            for part, (lo, hi) in zip(ready.parts, pairwise(ready.starts), strict=True)
        ]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Boosting:
    """Everything that follows from the sums: paths over all folds or some, less an offset.

    The offset is `given` at each point, or that of the rows of the path: their mean, or this smoothed. `site`
    is that of a local fit, whose sums these are alone.
    """

    moments: Moments
    design: BoostDesign
    basis: Annotated[Floats, "g l"]
    nu: float
    aggregation: Aggregation = "exact"
    site: str = ""
    smooth_offset: bool = False
    given: Annotated[Floats, "g"] | None = None

    @property
    def even(self) -> CurveMoments:
        """Sums of a response at common points; a NotAvailableError where there are none."""
        if isinstance(self.moments, UnevenMoments):
            raise NotAvailableError(UNEVEN)
        return self.moments

    @property
    def gram(self) -> Floats:
        """Gram of the response's basis at its points."""
        return np.asarray(self.basis.T @ self.basis)

    def offset(self, sums: Sums) -> Floats:
        """Curve from which boosting of some rows starts, (G,)."""
        if self.given is not None:
            return self.given
        return self.smoothed(sums.mean) if self.smooth_offset else sums.mean

    def smoothed(self, curve: Floats) -> Floats:
        """Smooth a curve (G,) along the response."""
        return smooth_curve(curve, self.basis, self.design.along(self.basis.shape[1]))

    @property
    def n_scores(self) -> int:
        """How many products of the columns with slopes of a loss that is no square were told."""
        return 0

    def start_risk(self) -> float:
        """Loss at the offset: squares."""
        total = self.moments.total
        return float(total.about(self.offset(total), self.basis).yy)

    def over(self, folds: Any, steps: int, test: Any = None) -> tuple[Ready, BoostPath]:
        """Follow a path over some folds, (F,) bool; its offset serves for those of `test` as well."""
        sums = self.moments.over(folds)
        offset = self.offset(sums)
        centred: Sums = sums.about(offset, self.basis)
        ready = make_ready(centred, self.design, self.gram)
        other: Sums | None = None if test is None else self.moments.over(test).about(offset, self.basis)
        return ready, follow(ready, centred, steps, self.nu, other)

    def cross_validate(self, steps: int) -> Floats:
        """Loss of every fold by the path of the others: (F, steps), a row and point."""
        F, out = self.moments.folds, []
        for f in range(F):
            test = np.arange(F) == f
            path = self.over(~test, steps, test)[1]
            out.append(path.risk_test / self.moments.over(test).cells)
        return np.array(out)


def first_steps(selected: Ints, P: int) -> list[int]:
    """Step, from 1, at which each learner is first taken; 0 for never."""
    return [int(np.argmax(selected == p)) + 1 if (selected == p).any() else 0 for p in range(P)]


def explained(selected: Ints, risk: Floats, start: float, P: int) -> Floats:
    """Share of each learner, (P,), in what the path explains."""
    gains = np.array([a - b for a, b in pairwise([start, *risk.tolist()])])
    total = np.bincount(selected, weights=gains, minlength=P)
    return np.asarray(total / gains.sum() if gains.sum() > 0.0 else total)
