"""A private generalised linear model, round by round: moments, and a step on the score from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.copula_glm.moments.bootstrap import MomentFit, estimate
from fedstat.models.copula_glm.moments.law import normal_points
from fedstat.models.copula_glm.moments.protocol import MomentQuestion, ReleasedMoments, release_moments
from fedstat.models.copula_glm.score.protocol import release_score
from fedstat.models.copula_glm.score.step import ScoreStep
from fedstat.typing import Ints

SEED = 1
"""Of the points by which integrals are taken."""


@dataclass(frozen=True, slots=True, eq=False)
class PrivateFit:
    """What was released, the estimate from it, and the step that was taken from there, if any."""

    released: ReleasedMoments
    fit: MomentFit
    step: ScoreStep | None


def fit_private(
    asking: Conversation,
    question: MomentQuestion,
    rows: Mapping[str, Ints],
    sites: Sequence[str],
    n_entities: int,
    regardless: bool,
) -> Rounds[PrivateFit]:
    """Ask for the moments, estimate, and take a step where there is a budget for one and a root to begin at.

    With `regardless` it is asked for in any case: numbers of a rehearsal are none that a root could depend
    on.
    """
    released = yield from release_moments(asking, question, rows, sites, n_entities)
    fit = estimate(released.design, released.release, normal_points(len(released.design.bins), SEED))
    if not question.of_step or not (fit.root.converged or regardless):
        return PrivateFit(released, fit, None)
    step = yield from release_score(asking, released, fit, question.of_step, sites)
    return PrivateFit(released, fit, step if fit.root.converged else None)
