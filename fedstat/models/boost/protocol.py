"""Protocols of boosting: one round of moments, or repeated rounds of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat import codec
from fedstat.errors import DataWarning, EstimationError, Remedy, warn
from fedstat.federation.design.horizontal_design import open_requests
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.models.boost.arguments import FOLDS, check_every
from fedstat.models.boost.learning.boosting import (
    WITHOUT_GAPS,
    Boosting,
    ScoredBoosting,
    first_predictor,
    run_path,
)
from fedstat.models.boost.learning.columns import CurveSumsRequest
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.moments import (
    IRREGULAR_SUMS,
    REGULAR_SUMS,
    CurveMoments,
    CurveSums,
    IrregularMoments,
)
from fedstat.models.boost.learning.prepared_learners import Moments, PreparedLearners, prepare_learners
from fedstat.models.boost.learning.varying import MEANS, VARYING, VaryingMoments
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.progress_line import ProgressLine
from fedstat.typing import Array, Floats

# ----------------------------------------------------------------------------------------------------
# One round: sites open their rows, and the moments of learners and response are summed over all sites.


def take_moments(
    session: RowsSession, request: CurveSumsRequest, basis: Floats, *, uneven: bool, by_site: bool = False
) -> FitProtocol[tuple[Moments, None]]:
    """Open the rows, and request every site's sums; with `by_site` each site is a fold.

    Sums of an `uneven` response, whose curves have different points, are shown at `basis` (G, L).
    """
    answers = yield from _answers(session, request, "sum_uneven_curves" if uneven else "sum_curves")
    if filled := [one.site for one in answers if uneven and one.arrays["filled"]]:
        warn(
            f"at {', '.join(map(repr, filled))} few curves of the response lack points, which are "
            "interpolated linearly: sums with the weights of few curves would reveal these curves",
            DataWarning,
            WITHOUT_GAPS,
        )
    sums = _together(answers, IRREGULAR_SUMS if uneven else REGULAR_SUMS, by_site)
    return (_irregular(sums, request, basis) if uneven else CurveMoments.of(sums)), None


def take_varying_moments(
    session: RowsSession,
    request: CurveSumsRequest,
    basis: Floats,
    t: Floats,
    *,
    uneven: bool,
    by_site: bool = False,
) -> FitProtocol[tuple[Moments, VaryingMoments]]:
    """Read the sums of either kind, and those of columns that vary along the response, shown at points t."""
    answers = yield from _answers(
        session, request, "sum_uneven_curves_along" if uneven else "sum_curves_along"
    )
    along = VaryingMoments.of(_together(answers, VARYING if uneven else (*VARYING, MEANS), by_site), t)
    sums = _together(answers, IRREGULAR_SUMS if uneven else REGULAR_SUMS, by_site)
    return (_irregular(sums, request, basis) if uneven else CurveMoments.of(sums)), along


def take_own_moments(
    session: RowsSession, request: CurveSumsRequest
) -> FitProtocol[tuple[CurveMoments, ...]]:
    """Read the unmasked sums of every site, for local fits and their averages."""
    answers = yield from _answers(session, request, "sum_curves")
    return tuple(CurveMoments.of({name: one.arrays[name] for name in REGULAR_SUMS}) for one in answers)


def _irregular(sums: Mapping[str, Array], request: CurveSumsRequest, basis: Floats) -> IrregularMoments:
    reported = None if request.offset is None else np.array(request.offset[1])
    return IrregularMoments.of(sums, basis, 0 if request.time is None else request.time.degree, reported)


def _together(answers: Sequence[Reply], names: Sequence[str], by_site: bool) -> dict[str, Array]:
    """Sum over all sites, or use each site as a fold."""
    if by_site:
        return {name: np.concatenate([one.arrays[name] for one in answers]) for name in names}
    return {name: np.asarray(add(answers, name)) for name in names}


def _answers(session: RowsSession, request: CurveSumsRequest, step: str) -> FitProtocol[Sequence[Reply]]:
    opening = open_requests(session.agreement, session.session)
    replies = yield opening + session.request_all(step, {}, codec.to_json(request))
    return replies[len(opening) :]


# ----------------------------------------------------------------------------------------------------
# Rounds of a loss other than squares: sums of products once, then scores at coefficients of every path.

RELEASED_SUMS = ("gram", "totals")
RISING = 1e-6
"""Share by which a loss may exceed the loss at the start."""


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """Largest number of steps, steps between exchanges of scores, folds, and whether these are the sites."""

    steps: int
    every: int
    by_site: bool
    n_folds: int

    @property
    def n_exchanges(self) -> int:
        """Number of exchanges: at the start, after each `every` steps, and at the end."""
        return -(-self.steps // self.every) + 1

    @property
    def n_scores(self) -> int:
        """Number of scores that all exchanges release, over all paths."""
        return self.n_exchanges * (self.n_folds + 1 if self.n_folds > 1 else 1)


def plan_scores(
    loss: LossSpec | None, n_sites: int, *, steps: int, every: int | None, folds: int | str | None,
    select: str | None,
) -> ScorePlan:  # fmt: skip
    """Plan the exchanges of a fit with these arguments."""
    by_site = folds == "site"
    n_folds = n_sites if by_site else int(folds or (FOLDS if select == "cv" else 1))
    return ScorePlan(int(steps), check_every(every, loss) if loss else 1, by_site, n_folds)


@dataclass(slots=True, eq=False)
class ScoreRounds:
    """One fit; `start` has design, basis, step length and offset, but no moments yet.

    `level` is the largest mean of the response at a point; a `line` receives every exchange.
    """

    session: RowsSession
    requested: CurveSumsRequest
    loss: LossSpec
    plan: ScorePlan
    start: Boosting
    line: ProgressLine | None = None
    scores: list[Floats] = field(default_factory=list)
    bounds: list[Floats] = field(default_factory=list)
    risks: list[Floats] = field(default_factory=list)
    held: int = 0
    level: float = 0.0

    def run(self) -> FitProtocol[ScoredBoosting]:
        """Sum products, then compute every path from exchange to exchange."""
        opening = open_requests(self.session.agreement, self.session.session)
        replies = yield opening + self.session.request_all("start_scores", {}, codec.to_json(self.requested))
        boosting = replace(self.start, moments=self._moments(replies[len(opening) :]))
        self.level = float(np.abs(boosting.moments.total.mean).max())
        paths = [boosting.even.over(rows) for rows in self._rows(boosting.moments.folds)]
        offsets = [first_predictor(boosting, self.loss, one) for one in paths]
        ready = [prepare_learners(one, boosting.design, boosting.gram) for one in paths]
        coef = np.zeros((len(paths), *paths[0].T.shape))
        for first in range(0, self.plan.steps + self.plan.every, self.plan.every):
            replies = yield self._request(coef, np.array(offsets))
            self._take(replies, paths)
            steps = min(self.plan.every, self.plan.steps - first)
            if steps <= 0:
                break
            coef = coef + self._moves(paths, ready, steps, boosting.nu)
        return ScoredBoosting(
            **{name: getattr(boosting, name) for name in Boosting.__slots__},
            loss=self.loss,
            every=self.plan.every,
            taken=self.plan.steps,
            scores=np.array(self.scores),
            bounds=np.array(self.bounds),
            risks=np.array(self.risks),
            held=self.held,
        )

    def _moments(self, answers: Sequence[Reply]) -> CurveMoments:
        """Assemble sums of products, without those with the response."""
        if self.plan.by_site:
            sums = {name: np.concatenate([one.arrays[name] for one in answers]) for name in RELEASED_SUMS}
        else:
            sums = {name: np.asarray(add(answers, name)) for name in RELEASED_SUMS}
        F, upper = sums["gram"].shape
        K, L = int(np.sqrt(2 * upper)), self.start.basis.shape[1]
        return CurveMoments.of(
            {**sums, "score": np.zeros((F, K, L)), "spread": np.zeros((F, L * (L + 1) // 2))}
        )

    def _rows(self, F: int) -> list[Array]:
        """Folds of every path."""
        every = np.ones(F, dtype=bool)
        return [every, *(np.arange(F) != f for f in range(F))] if F > 1 else [every]

    def _request(self, coef: Floats, offsets: Floats) -> list[Request]:
        """Request scores from all sites; if the sites are the folds, none of their rows is left out."""
        left_out = np.full(len(coef), -1)
        if not self.plan.by_site:
            left_out[1:] = np.arange(len(coef) - 1)
        arrays = {"coef": coef, "offset": offsets, "left_out": left_out.astype(np.int64)}
        return self.session.request_all("score_curves", arrays)

    def _take(self, replies: Sequence[Reply], paths: Sequence[CurveSums]) -> None:
        """Read scores, curvatures and losses."""
        if int(add(replies, "inside")) < len(replies):
            raise self._infinite()
        if int(add(replies, "spread")) < len(replies):
            if not self.scores:
                raise EstimationError(
                    "at the start only a few rows of a site have weight in the scores of "
                    f"{self.loss.title}: their residuals are equal, or beyond the delta of the loss",
                    remedy=Remedy(
                        "fit(..., offset='mean')",
                        "Start closer to the response by {arguments}, or use a larger delta",
                    ),
                )
            self.held += 1  # such a site repeated its last reply, which is the same except for a few rows
        score, loss, weight = (np.asarray(self._added(replies, name)) for name in ("score", "loss", "weight"))
        cells = np.array([one.cells for one in paths])
        bound = self.loss.entry.bound
        self.scores.append(score)
        self.bounds.append(weight / cells if bound is None else np.full(len(paths), bound))
        self.risks.append(loss)
        if self.line is not None:
            step = min((len(self.risks) - 1) * self.plan.every, self.plan.steps)
            self.line.step(step, f"loss {loss[0, 0] / cells[0]:.6f}")
        if loss[0, 0] > self.risks[0][0, 0] + RISING * abs(self.risks[0][0, 0]) and bound is None:
            raise self._infinite()

    def _added(self, replies: Sequence[Reply], name: str) -> Array:
        """Sum over sites; a path that leaves a site out lacks its part, and the loss is that of this site."""
        if not self.plan.by_site:
            return add(replies, name)
        own = np.array([one.arrays[name] for one in replies])
        out = own.sum(axis=0)
        for f in range(len(replies)):
            out[f + 1] -= own[f, f + 1]
            if name == "loss":
                out[f + 1, 1] = own[f, f + 1, 0]
        return np.asarray(out)

    def _moves(
        self, paths: Sequence[CurveSums], ready: Sequence[PreparedLearners], steps: int, nu: float
    ) -> Floats:
        """Coefficients of every path."""
        T, c = self.scores[-1], self.bounds[-1]
        return np.array(
            [
                run_path(own, replace(one, S=c[p] * one.S, T=T[p], yy=0.0), steps, nu).coef
                for p, (one, own) in enumerate(zip(paths, ready, strict=True))
            ]
        )

    def _infinite(self) -> EstimationError:
        return EstimationError(
            f"{self.loss.title}: steps are infinite, or increase the loss. Learners are fitted without "
            "weights, so that steps are too long where the response is large",
            remedy=Remedy(
                "fit(..., learning_rate={rate:.1g}, every=1, offset='mean')",
                "Use fewer steps between exchanges, an offset near the logarithm of the mean, and a learning "
                "rate of at most {rate:.1g}, as in {arguments}",
            ).filled(rate=min(0.1, 1.0 / max(self.level, 1.0))),
        )
