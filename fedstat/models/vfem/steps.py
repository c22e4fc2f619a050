"""The steps that a site may be asked for in VFEM, of every topic."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.message import Step
from fedstat.models.vfem.covariance import glm_steps as glm_covariance_steps
from fedstat.models.vfem.covariance import sem_steps
from fedstat.models.vfem.covariance import steps as covariance_steps
from fedstat.models.vfem.iteration import glm_response_steps, glm_steps, response_steps
from fedstat.models.vfem.iteration import steps as iteration_steps
from fedstat.models.vfem.moments import secure_product_steps, staged_columns
from fedstat.models.vfem.moments import steps as moments_steps
from fedstat.models.vfem.prediction import steps as prediction_steps

STEPS: Mapping[str, Step] = {
    name: step
    for topic in (
        iteration_steps,
        response_steps,
        covariance_steps,
        staged_columns,
        sem_steps,
        prediction_steps,
        moments_steps,
        secure_product_steps,
        glm_steps,
        glm_response_steps,
        glm_covariance_steps,
    )
    for name, step in topic.STEPS.items()
}
