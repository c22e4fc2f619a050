"""Published baselines: each site boosts on its own rows, and the paths are aggregated.

At every step a site fits each learner to the residuals of its own rows, by its own smoothing parameter. The
common move is the average of these fits by rows ("average"), or their least squares fit with their
information as weights ("lsa", Ding 2024, equation 3.13, with the model-based covariance of a fit: the middle
of the printed formula is the score at the local solution, which is zero). A fit of one site alone is "local".
Each fit is computed from a site's own sums, so that these, unmasked, give all steps in one round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from scipy.linalg import block_diag

from fedstat.errors import EstimationError, ModelError
from fedstat.kernels.boosting import demmler_reinsch
from fedstat.models.boost.learning.boosting import AGGREGATIONS, Aggregation, Boosting, BoostPath
from fedstat.models.boost.learning.moments import CurveMoments, CurveSums
from fedstat.models.boost.learning.prepared_learners import (
    BoostDesign,
    PenaltyKind,
    PreparedLearners,
    prepare_learners,
    target_df,
)
from fedstat.models.checks import check_choice
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class SiteBoosting(Boosting):
    """Boosting by local fits that are averaged, from sums `own` of every site; `moments` are over all."""

    own: Annotated[tuple[CurveMoments, ...], "s"] = ()
    names: Annotated[tuple[str, ...], "s"] = ()

    def over(self, folds: Any, steps: int, test: Any = None) -> tuple[PreparedLearners, BoostPath]:
        """Follow a path over some folds, (F,) bool; its offset is their mean over all sites."""
        sums = self.even.over(folds)
        offset = sums.mean
        centered = sums.about(offset, self.basis)
        parts = [one.over(folds).about(offset, self.basis) for one in self.own]
        other = None if test is None else self.even.over(test).about(offset, self.basis)
        fits = LearnersAtSites.of(self, centered, parts)
        ready = prepare_learners(centered, self.design, self.gram)
        return ready, fits.follow(parts, steps, self.nu, other, lsa=self.aggregation == "lsa")


@dataclass(frozen=True, slots=True, eq=False)
class LearnerAtSites:
    """One learner at all K sites: its fit of scores T (k, L) is M T R, (M, J) being inverse to each other.

    `J` (K, k, k) is the information along what the learner is of, penalty included, `R` (L, L) the smoother
    along the response, and `df` the degrees of freedom of each site's fit.
    """

    columns: slice
    M: Floats
    J: Floats
    R: Floats
    df: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LearnersAtSites:
    """All learners at all sites; L takes their columns to those that are fitted."""

    L: Floats
    gram: Floats
    fits: tuple[LearnerAtSites, ...]

    @classmethod
    def of(cls, boosting: SiteBoosting, sums: CurveSums, parts: Sequence[CurveSums]) -> LearnersAtSites:
        """Choose every site's smoothing parameters by degrees of freedom."""
        design, gram = boosting.design, boosting.gram
        C, margins = zip(*(design.fitted(p, sums) for p in range(len(design.learners))), strict=True)
        k = [c.shape[1] for c in C]
        ends = np.cumsum([0, *k]).tolist()
        fits = []
        for p, (own, complete) in enumerate(target_df(design, k, len(gram))):
            rows = design.columns(p)
            grams = [C[p].T @ one.S[rows, rows] @ C[p] for one in parts]
            margin = margins[p]
            first = [
                _local(A, margin, own, f"{site}: {one.n:,.0f} rows for {design.learners[p].label}")
                for A, one, site in zip(grams, parts, boosting.names, strict=True)
            ]
            pooled = demmler_reinsch(np.sum(grams, axis=0), margin, own)
            if design.learners[p].constant:
                R = np.full(gram.shape, 1.0 / gram.sum())
            else:
                second = demmler_reinsch(gram, design.along(len(gram)), complete, pooled.h)
                R = (second.V * second.h) @ second.V.T
            fits.append(
                LearnerAtSites(
                    slice(ends[p], ends[p + 1]),
                    np.array([M for M, _, _ in first]),
                    np.array([A + lam * margin for A, (_, lam, _) in zip(grams, first, strict=True)]),
                    R,
                    np.array([df for _, _, df in first]) * float((R * gram).sum()),
                )
            )
        return cls(block_diag(*C), gram, tuple(fits))

    def follow(
        self, parts: Sequence[CurveSums], steps: int, nu: float, test: CurveSums | None, *, lsa: bool
    ) -> BoostPath:
        """Take `steps` steps; the residual scores of every site move by its own products."""
        L, G, n = self.L, self.gram, np.array([one.n for one in parts])
        S = np.array([L.T @ one.S @ L for one in parts])
        T = np.array([L.T @ one.T for one in parts])
        left = np.array([float(one.yy) for one in parts])
        points = n * len(parts[0].y)
        held = [] if test is None else [L.T @ test.S @ L, L.T @ test.T]
        risk_held = 0.0 if test is None else float(test.yy)
        together, coef = S.sum(axis=0), np.zeros_like(T[0])
        selected, risk, risk_test = np.empty(steps, np.int64), np.empty(steps), np.full(steps, np.nan)
        for m in range(steps):
            gain, p, B = -np.inf, 0, coef
            for q, (one, found) in enumerate(self._averages(S, T, left, points, lsa)):
                t, s = T[:, one.columns].sum(axis=0), together[one.columns, one.columns]
                own = 2.0 * float((t * found).sum()) - float((s @ found @ G * found).sum())
                if own > gain:
                    gain, p, B = own, q, found
            at = self.fits[p].columns
            coef[at] += nu * B
            BG = B @ G
            moved = S[:, at, at] @ BG
            left += ((nu * nu * moved - 2.0 * nu * T[:, at]) * B).sum(axis=(1, 2))
            T -= nu * (S[:, :, at] @ BG)
            if held:
                again = held[0][at, at] @ BG
                risk_held += float(((nu * nu * again - 2.0 * nu * held[1][at]) * B).sum())
                held[1] = held[1] - nu * held[0][:, at] @ BG
                risk_test[m] = risk_held
            selected[m], risk[m] = p, left.sum()
        return BoostPath(selected, risk, risk_test, L @ coef)

    def _averages(
        self, S: Floats, T: Floats, left: Floats, points: Floats, lsa: bool
    ) -> Iterator[tuple[LearnerAtSites, Floats]]:
        """Every learner's average over the sites' fits to what is left."""
        for one in self.fits:
            t = T[:, one.columns]
            B = one.M @ t @ one.R  # (3.12)
            if not lsa:
                yield one, np.asarray(np.tensordot(points / points.sum(), B, 1), dtype=np.float64)
                continue
            squares = left + ((S[:, one.columns, one.columns] @ B @ self.gram - 2.0 * t) * B).sum(axis=(1, 2))
            w = (points - one.df) / np.maximum(squares, np.finfo(float).tiny)
            w = w / w.sum()
            together = np.linalg.solve(np.tensordot(w, one.J, 1), np.tensordot(w, t, 1) @ one.R)
            yield one, np.asarray(together, dtype=np.float64)


def check_aggregation(aggregation: object, masked: object, penalty: PenaltyKind) -> bool:
    """Whether the path is that of the pooled table; a ModelError for what baselines do not have."""
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "exact":
        return True
    if masked:
        raise ModelError(
            f"masked: aggregation={aggregation!r} is made of every site's own sums, which masks would hide; "
            "expected masked=None or False, or aggregation='exact'"
        )
    if penalty != "separable" and aggregation != "local":
        raise ModelError(
            f"aggregation: {aggregation!r} is of learners with penalty='separable', received {penalty!r}"
        )
    return False


def site_boostings(
    own: tuple[CurveMoments, ...], design: BoostDesign, basis: Floats, nu: float, aggregation: Aggregation,
    names: tuple[str, ...],
) -> list[Boosting]:  # fmt: skip
    """One boosting of all sites, or one of each."""
    if aggregation == "local":
        found = zip(own, names, strict=True)
        return [Boosting(one, design, basis, nu, aggregation, site) for one, site in found]
    together = CurveMoments.together(own)
    return [SiteBoosting(together, design, basis, nu, aggregation, own=own, names=names)]


def _local(gram: Floats, penalty: Floats, df: float, what: str) -> tuple[Floats, float, float]:
    """Inverse of a site's information, its smoothing parameter, and the trace of its fit."""
    fit = demmler_reinsch(gram, penalty, df)
    if not fit.smoothing and not fit.h.all():
        raise EstimationError(
            f"{what}, {len(gram)} columns without a penalty: the site's own least squares fit, which this "
            "baseline averages, does not exist. Give the learner less df or fewer knots; "
            "aggregation='exact' needs no fit of one site"
        )
    return (fit.V * fit.h) @ fit.V.T, fit.smoothing, float(fit.h.sum())
