"""What one institution answers for a private generalised linear model: a release of other scores."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.door.conduct import in_order
from fedstat.federation.message import Step
from fedstat.models.copula import steps as release
from fedstat.models.copula_glm.moments.asked import MomentsAsked
from fedstat.models.copula_glm.score import steps as score

FAMILY = "copula_glm"
STEPS: Mapping[str, Step] = in_order(
    {
        **release.release_steps(
            MomentsAsked, score.score_columns, score.score_rows_of, score.check_score_product
        ),
        **score.SCORE_STEPS,
    },
    {**release.ORDER, **score.ORDER},
)
INSTEAD = {
    **release.invented_steps(FAMILY),
    (FAMILY, "begin_score"): score.begin_step(score.invented_predictor),
}
"""Steps that stand for those that read rows where there are none."""
