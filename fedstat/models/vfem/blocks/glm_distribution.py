"""The distributions of the response that VFEM has beside the normal one."""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, xlogy

from fedstat.errors import ModelError
from fedstat.kernels.glm.distributions import DISTRIBUTIONS
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.typing import Floats

NORMAL = DistributionSpec("Gaussian", "Identity")


def kernel_of(spec: DistributionSpec) -> int:
    """Which compiled likelihood a distribution and its link have; ModelError where none."""
    found = DISTRIBUTIONS[spec.name].integrals.get(spec.link)
    if found is None:
        listed = [f"{name} ({link})" for name, entry in DISTRIBUTIONS.items() for link in entry.integrals]
        raise ModelError(f"family: expected Gaussian (Identity), {', '.join(listed)}; received {spec}")
    return found


def null_log_likelihood(spec: DistributionSpec, y: Floats) -> float:
    """Log-likelihood of the model with an intercept only, at its maximum."""
    n, mean = len(y), y.mean()
    if spec.name == "Binomial":
        return float(n * (xlogy(mean, mean) + xlogy(1.0 - mean, 1.0 - mean)))
    return float(np.sum(xlogy(y, mean) - mean - gammaln(y + 1.0)))
