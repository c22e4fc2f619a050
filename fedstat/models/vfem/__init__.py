"""Regression with client-wise missing blocks (VFEM)."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.vfem import (
    covariance_steps,
    glm_response_steps,
    glm_steps,
    moments_steps,
    prediction,
    response_steps,
    secure_product_steps,
    sem_steps,
    steps,
)
from fedstat.models.vfem.protocol import FAMILY

FAMILIES[FAMILY] = {
    **steps.STEPS,
    **response_steps.STEPS,
    **covariance_steps.STEPS,
    **sem_steps.STEPS,
    **prediction.STEPS,
    **moments_steps.STEPS,
    **secure_product_steps.STEPS,
    **glm_steps.STEPS,
    **glm_response_steps.STEPS,
}
