"""All site steps of VFEM, and the order in which a site answers them."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.message import Step
from fedstat.models.vertical.exchange.steps import EXCHANGE_ORDER, ExchangeRules, exchange_steps
from fedstat.models.vertical.prediction.steps import LINEAR_PREDICTOR_STEPS
from fedstat.models.vfem.covariance.cross_product_steps import (
    CROSS_PRODUCT_STEPS,
    PRODUCT_COLUMNS,
    STAGES,
    staged_weights,
)
from fedstat.models.vfem.covariance.score_steps import (
    GLM_SCORE_STEPS,
    RESPONSE_OF_SCORES,
    RESPONSE_OF_SQUARES,
    SCORE_COLUMNS,
    SCORE_STEPS,
    TIMES,
)
from fedstat.models.vfem.covariance.steps import INFORMATION_STEPS, SCALE_STEPS, SEM_STEPS
from fedstat.models.vfem.iteration.glm_steps import GLM_RESPONSE_STEPS, GLM_STEPS
from fedstat.models.vfem.iteration.steps import ITERATION_STEPS, RESPONSE_STEPS
from fedstat.models.vfem.joint_steps import JOINT_STEPS
from fedstat.models.vfem.prediction_steps import PREDICTION_STEPS

# ----------------------------------------------------------------------------------------------------
# Order of the steps in the exchanges of VFEM: which stand directly before which.

SCORE_STEP_NAMES = "glm_response_scores glm_scale_information glm_scores glm_scores_openly scores"
CROSS_STEPS = f"glm_information information joint_information {SCORE_STEP_NAMES}"
"""Steps that leave columns behind which are multiplied with those of others, in one of four ways."""

AFTER_INFORMATION = (
    "deal_product glm_curvature glm_curvature_openly glm_information glm_scale_curvature "
    "glm_scale_information multiply_columns release_columns share_product sketch"
)
"""Steps that stand before products of scores: the information with its products of columns."""

STEP_ORDER: Mapping[str, str] = {
    **EXCHANGE_ORDER,
    "open_product": f"{CROSS_STEPS} deal_product open_product response_products sem_constants sum_products "
    "sum_response",
    "sketch": f"{CROSS_STEPS} sem_constants",
    "release_columns": f"{CROSS_STEPS} response_products",
    "multiply_columns": f"{CROSS_STEPS} multiply_columns release_columns",
    # the iteration of the publication
    "set_rate": "start start_response",
    "step": "residuals set_rate shorten start step",
    "shorten": "shorten step",
    "residuals": "deal_product residuals sem_predictor set_rate shorten start_response step",
    "estimates": "shorten step",
    "fitted": "estimates residuals",
    "information": "estimates fitted",
    "scores": "multiply_columns release_columns share_product sketch",
    "response_products": "deal_product fitted scores",
    "sem_constants": "estimates fitted",
    "sem_predictor": "sem_sums share_product sketch",
    "sem_sums": "residuals sem_predictor",
    # responses that are not normal
    "deal_sums": "deal_sums glm_start glm_start_response",
    "open_columns": "deal_sums glm_start open_columns",
    "take_columns": "deal_sums glm_start_response take_columns",
    "glm_move": "deal_sums glm_evaluate glm_score glm_start glm_start_response open_columns take_columns",
    "glm_evaluate": "deal_sums glm_evaluate glm_move glm_residuals glm_start_response joint_predict "
    "joint_score joint_weights take_columns",
    "glm_residuals": "glm_evaluate",
    "glm_score": "glm_evaluate glm_move glm_residuals",
    "glm_estimates": "glm_evaluate glm_move glm_score",
    "glm_pearson": "glm_estimates glm_evaluate joint_score joint_weights",
    "glm_fitted": "glm_estimates glm_evaluate glm_pearson joint_score joint_weights",
    "glm_curvature": "glm_estimates glm_fitted glm_pearson",
    "glm_curvature_openly": "glm_estimates glm_fitted glm_pearson",
    "glm_information": "glm_curvature glm_curvature_openly glm_estimates",
    "glm_scale_curvature": "glm_curvature glm_curvature_openly glm_information",
    "glm_scale_information": "glm_information glm_scale_curvature",
    "glm_derivatives_openly": AFTER_INFORMATION,
    "glm_scores_openly": f"glm_derivatives_openly {AFTER_INFORMATION}",
    "glm_response_scores": f"glm_scores_openly {AFTER_INFORMATION}",
    "glm_scores": AFTER_INFORMATION,
    # the same, where columns depend between institutions
    "joint_predict": "deal_sums glm_evaluate glm_start glm_start_response joint_predict joint_score "
    "joint_weights open_columns take_columns",
    "joint_score": "glm_evaluate joint_predict",
    "joint_weights": "glm_evaluate joint_score",
    "joint_curvature": "glm_evaluate glm_fitted glm_pearson joint_score joint_weights",
    "joint_information": "joint_curvature joint_predict joint_score",
    # new entities
    "project_block": "predict_block",
    "project_by_pattern": "predict_by_pattern",
}


# ----------------------------------------------------------------------------------------------------
# The steps that a site may be asked for in VFEM, of every topic.

RULES = ExchangeRules(
    remembers=False,
    fills=True,
    shapes=True,
    weighted=True,
    columns={**PRODUCT_COLUMNS, **SCORE_COLUMNS},
    weights={STAGES[0]: staged_weights},
    times=TIMES,
    of_response=frozenset((RESPONSE_OF_SCORES, RESPONSE_OF_SQUARES)),
)
STEPS: Mapping[str, Step] = {
    **exchange_steps(RULES),
    **ITERATION_STEPS,
    **RESPONSE_STEPS,
    **INFORMATION_STEPS,
    **SCORE_STEPS,
    **SCALE_STEPS,
    **GLM_SCORE_STEPS,
    **CROSS_PRODUCT_STEPS,
    **SEM_STEPS,
    **LINEAR_PREDICTOR_STEPS,
    **PREDICTION_STEPS,
    **GLM_STEPS,
    **GLM_RESPONSE_STEPS,
    **JOINT_STEPS,
}
