"""Linear regression with client-wise missing blocks (VFEM)."""

from fedstat.federation.site import FAMILIES
from fedstat.models.vfem import covariance_steps, moments_steps, prediction, response_steps, sem_steps, steps
from fedstat.models.vfem.protocol import FAMILY

FAMILIES[FAMILY] = {
    **steps.STEPS,
    **response_steps.STEPS,
    **covariance_steps.STEPS,
    **sem_steps.STEPS,
    **prediction.STEPS,
    **moments_steps.STEPS,
}
