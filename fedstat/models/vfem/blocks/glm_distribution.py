"""The distributions of the response that VFEM has beside the normal one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import gammaln, xlogy

from fedstat.errors import ModelError
from fedstat.kernels.glm.quadrature import LOG, LOGIT, PROBIT
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.typing import Floats

NORMAL = DistributionSpec("Gaussian", "Identity")
KERNELS: Mapping[tuple[str, str], int] = {
    ("Binomial", "Logit"): LOGIT,
    ("Binomial", "Probit"): PROBIT,
    ("Poisson", "Log"): LOG,
}


def kernel_of(spec: DistributionSpec) -> int:
    """Which compiled likelihood a distribution and its link have.

    Raises
    ------
    ModelError
        None.
    """
    found = KERNELS.get((spec.name, spec.link))
    if found is None:
        listed = ", ".join(f"{family} ({link})" for family, link in KERNELS)
        raise ModelError(f"family: expected Gaussian (Identity), {listed}; received {spec}")
    return found


def null_log_likelihood(spec: DistributionSpec, y: Floats) -> float:
    """Log-likelihood of the model with an intercept only, at its maximum."""
    n, mean = len(y), y.mean()
    if spec.name == "Binomial":
        return float(n * (xlogy(mean, mean) + xlogy(1.0 - mean, 1.0 - mean)))
    return float(np.sum(xlogy(y, mean) - mean - gammaln(y + 1.0)))
