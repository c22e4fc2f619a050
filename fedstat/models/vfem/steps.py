"""The steps that a site may be asked for in VFEM, of every topic."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.message import Step
from fedstat.models.vertical.exchange.steps import ExchangeRules, exchange_steps
from fedstat.models.vertical.prediction import steps as linear_predictor_steps
from fedstat.models.vfem.covariance import glm_score_steps, scale_steps, score_steps, sem_steps
from fedstat.models.vfem.covariance import steps as covariance_steps
from fedstat.models.vfem.iteration import glm_response_steps, glm_steps, response_steps
from fedstat.models.vfem.iteration import steps as iteration_steps
from fedstat.models.vfem.joint import steps as joint_steps
from fedstat.models.vfem.moments import staged_columns
from fedstat.models.vfem.prediction import steps as prediction_steps

RULES = ExchangeRules(
    remembers=False,
    fills=True,
    shapes=True,
    weighted=True,
    columns={**staged_columns.COLUMNS, **glm_score_steps.COLUMNS},
    weights={staged_columns.STAGES[0]: staged_columns.staged_weights},
    times=glm_score_steps.TIMES,
    of_response=frozenset((glm_score_steps.OF_RESPONSE, glm_score_steps.OF_SQUARES)),
)
TOPICS = (
    iteration_steps,
    response_steps,
    covariance_steps,
    score_steps,
    scale_steps,
    glm_score_steps,
    staged_columns,
    sem_steps,
    linear_predictor_steps,
    prediction_steps,
    glm_steps,
    glm_response_steps,
    joint_steps,
)
STEPS: Mapping[str, Step] = {
    **exchange_steps(RULES),
    **{name: step for topic in TOPICS for name, step in topic.STEPS.items()},
}
