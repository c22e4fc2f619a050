"""Quadratic models of the loss by fold: cross-validation and stability selection beyond the normal family.

Half the mean deviance of the entities of a fold is, near a point, its value there with gradient and Hessian.
The holder's answer at the point has the value, scores over the fold's residuals are the gradient, and a
weighted Gram with the weights of the fold alone is the Hessian: sums over the entities of a fold, and no
further linear predictor. A fit to some folds minimises the sum of their models and the penalty; its deviance
on the others is that of their models. Both are approximations, close where a fold changes the fit little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.models.vglm.newton.follow import PathFollower, model_losses
from fedstat.models.vglm.newton.proximal import LossOracle, LossPoint
from fedstat.models.vglm.path.criteria import first_smallest
from fedstat.models.vglm.path.fits import Path
from fedstat.models.vglm.path.folds import stability, weighted_mean
from fedstat.progress_line import counted
from fedstat.typing import Bools, Floats, Ints

MOST_CENTRES = 3
"""Points at which the loss is modelled by fold, until the choice of lambda is that of the point."""


@dataclass(frozen=True, slots=True, eq=False)
class FoldModels:
    """Quadratic models of the loss of F folds at a point; sums over the fold, divided by all n.

    Shares and losses are (F,), scores (F, p + 1), Hessians (F, p + 1, p + 1).
    """

    point: LossPoint
    shares: Floats
    losses: Floats
    scores: Floats
    hessians: Floats

    def over(self, folds: Ints | Bools) -> tuple[LossPoint, Floats]:
        """Return the model of some folds together: the point with their loss and score, and the Hessian."""
        share = self.shares[folds].sum()
        point = replace(
            self.point,
            loss=float(self.losses[folds].sum() / share),
            score=self.scores[folds].sum(axis=0) / share,
        )
        return point, self.hessians[folds].sum(axis=0) / share

    def cross_validate(self, follower: PathFollower) -> tuple[Floats, Floats]:
        """Return the mean deviance of folds left out, with its standard error: (L,) each."""
        errors = np.empty((len(self.shares), len(follower.lambdas)))
        for fold in counted(range(len(errors)), "fold"):
            here = np.arange(len(errors)) == fold
            # The model of the others leads to their path, and the fold's own judges it.
            others = self.over(~here)
            b = follower.over(*others).model_path(*others, {})[0]
            errors[fold] = 2.0 * model_losses(*self.over(here), b)
        return weighted_mean(errors, self.shares)

    def stability(
        self, follower: PathFollower, draws: int, random: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """See :func:`fedstat.models.vglm.path.folds.stability`."""

        def selected(half: Ints) -> Bools:
            here = self.over(half)
            b = follower.over(*here).model_path(*here, {})[0]
            # In the columns' coordinates: what is selected are columns.
            return np.asarray(b[:, 1:] @ follower.oracle.T.T != 0.0)

        return stability(selected, len(self.shares), draws, random)


def model_folds(oracle: LossOracle, point: LossPoint, code: Ints, parts: int) -> Rounds[FoldModels]:
    """Obtain the models at a point: one round of scores, and a weighted Gram for each fold."""
    masks = [(code == fold).astype(np.float64) for fold in range(parts)]
    layout = oracle.layout
    asks = [oracle.ask(layout.active, "respond_by_fold", eta=point.eta, code=code, groups=parts)]
    residual = oracle.response.at(point.eta)[0]
    if oracle.response.sums is None:
        asks.append(oracle.ask(layout.active, oracle.response.step, eta=point.eta))
    by_fold, *openly = yield asks
    for reply in openly:
        residual = reply.arrays["residual"]
    replies = yield [
        oracle.ask(k, "sum_scores", residual=residual * mask) for mask in masks for k in layout.clients
    ]
    sums = iter(reply.arrays["scores"] for reply in replies)
    scores, hessians = [], []
    for fold, mask in enumerate(counted(masks, "model of fold")):
        score = np.concatenate([next(sums) for _ in layout.clients]) + oracle.response.score(fold)
        total = by_fold.arrays["totals"][fold]
        scores.append(oracle.unit * np.concatenate([[total], score @ oracle.T]) / layout.n)
        H = yield from oracle.hessian(replace(point, weight=point.weight * mask))
        hessians.append(H)
    shares = np.array([mask.mean() for mask in masks])
    return FoldModels(point, shares, by_fold.arrays["losses"], np.array(scores), np.array(hessians))


@dataclass(frozen=True, slots=True, eq=False)
class Folds:
    """What the folds of a fit, (n,) from 0 to parts - 1, are for: choosing lambda, and halves.

    With `choose` they choose by cross-validation; `draws` are pairs of halves for selection frequencies.
    """

    code: Ints
    parts: int
    choose: bool
    draws: int
    random: np.random.Generator


@dataclass(frozen=True, slots=True, eq=False)
class FoldFit:
    """A path and the fit that was chosen, with the latest Hessian (p + 1, p + 1), and what the folds say.

    `cv` and `halves`: see :class:`~fedstat.models.vglm.newton.fit.SelectedPath`.
    """

    path: Path
    chosen: int
    point: LossPoint
    H: Floats
    cv: tuple[Floats, Floats] | None = None
    halves: tuple[Floats, Floats] | None = None


def use_folds(follower: PathFollower, fit: FoldFit, folds: Folds) -> Rounds[FoldFit]:
    """Model the loss by fold at the fit; choose by cross-validation until the choice stays; draw halves."""
    oracle, solved = follower.oracle, follower.solved
    for _ in range(MOST_CENTRES):
        models = yield from model_folds(oracle, fit.point, folds.code, folds.parts)
        fit = replace(fit, H=models.hessians.sum(axis=0))
        if not folds.choose:
            break
        cv = models.cross_validate(follower)
        best, fit = first_smallest(cv[0]), replace(fit, cv=cv)
        if best == fit.chosen:
            break
        if best not in solved:
            proposed = follower.model_path(fit.point, fit.H, {})[0][best]
            solved[best], _ = yield from follower.follow_proposal(best, proposed, solved, fit.point, fit.H)
        point = solved[best].point
        path = follower.path(*follower.model_path(point, fit.H, solved))
        fit = replace(fit, path=path, chosen=best, point=point)
        # Hessians by fold at another point would be more than the doors release.
        if oracle.left < folds.parts:
            break
    if not folds.draws:
        return fit
    return replace(fit, halves=models.stability(follower, folds.draws, folds.random))
