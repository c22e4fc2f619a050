"""Standard errors in two parts, of sampling and of noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np

from fedstat.models.copula_glm.moments.bootstrap import BootstrapErrors
from fedstat.records import Least
from fedstat.typing import Floats, Matrix


@dataclass(frozen=True, slots=True, eq=False)
class MomentErrors:
    """Standard errors in their parts, (d,) each, and what they come from.

    `deviations` (draws, d) of the simulated estimates, noise included; `exact` (d, d) the covariance of
    maximum likelihood on the rows, at the estimate and under the released law. Errors that are not
    `simulated` are in closed form, and deviations are drawn from them.
    """

    sampling: Floats
    noise: Floats
    deviations: Floats
    exact: Matrix
    failed: Annotated[int, Least(0)]
    simulated: bool = True

    @classmethod
    def of(cls, errors: BootstrapErrors, exact: Floats) -> Self:
        """Sum up simulated releases."""
        return cls(
            sampling=errors.sampling.std(axis=0, ddof=1),
            noise=errors.noise.std(axis=0, ddof=1),
            deviations=errors.sampling + errors.noise,
            exact=exact,
            failed=errors.failed,
        )

    @classmethod
    def closed(
        cls, sampling: Floats, noise: Floats, exact: Floats, draws: int, rng: np.random.Generator
    ) -> Self:
        """Take covariances of sampling and of noise (d, d), and draw deviations for selection."""
        d = len(exact)
        deviations = rng.multivariate_normal(np.zeros(d), sampling + noise, size=draws, method="cholesky")
        of_sampling, of_noise = np.sqrt(np.diag(sampling)), np.sqrt(np.diag(noise))
        return cls(of_sampling, of_noise, deviations, exact, failed=0, simulated=False)

    @property
    def draws(self) -> int:
        """How many releases were simulated."""
        return len(self.deviations)

    @property
    def ratio(self) -> float:
        """Noise over sampling error of the slopes, root mean square."""
        return float(np.sqrt(np.mean((self.noise[1:] / self.sampling[1:]) ** 2)))
