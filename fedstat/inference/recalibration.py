"""Recalibration of a model: regression of the response on its linear predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.inference.estimate import takes_alpha
from fedstat.inference.tables import Sheet, number
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.local_fit import solve_positive
from fedstat.kernels.glm.sums import Rows, evaluate
from fedstat.typing import Array, Floats

LARGE, SLOPE, INTERCEPT = "in the large", "slope", "intercept"
NEUTRAL = np.array([0.0, 1.0])
"""Intercept and slope of calibrated predictions."""
CLOSE = 1e-18
"""Squared length of the last step, in standard errors: information and estimates are then exact."""
MAX_STEPS, MAX_HALVINGS = 40, 30
WIDTHS = (24, 12, 10, 10, 8, 10, 10)


@dataclass(frozen=True, slots=True, eq=False)
class Recalibration:
    """Correction that predictions would need: the response regressed on the linear predictor.

    Distribution and link are the model's. For a logistic model it is the logistic regression of Cox (1958):
    intercept and slope are 0 and 1 for predictions that are correct on average at every level; a slope below
    1 means that they are too extreme. "in the large" is the intercept with the slope fixed at 1, the
    difference between observed and predicted on the scale of the link.

    Parameters
    ----------
    params : ndarray, shape (2,)
        Intercept and slope.
    cov : ndarray, shape (2, 2)
    large : tuple of float
        Intercept with a slope of 1, and its standard error.
    statistic : float
        Likelihood ratio against intercept 0 and slope 1, chi-squared with 2 degrees of freedom.

    References
    ----------
    Cox, D. R. (1958). Two further applications of a model for binary regression. Biometrika 45, 562-565.
    Van Calster, B. et al. (2016). A calibration hierarchy for risk models was defined: from utopia to
    empirical data. Journal of Clinical Epidemiology 74, 167-176.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> found = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().evaluate().recalibration
    >>> round(found.slope, 3), abs(found.intercept) < 1e-6, abs(found.in_the_large) < 1e-6
    (1.0, True, True)
    >>> found.pvalue > 0.99, "Cox" in found.note, type(found.sheet()).__name__
    (True, True, 'Sheet')
    >>> found.to_frame().shape[0]
    3
    """

    params: Floats
    cov: Floats
    large: tuple[float, float]
    statistic: float

    @property
    def intercept(self) -> float:
        """Intercept of the regression with a free slope."""
        return float(self.params[0])

    @property
    def slope(self) -> float:
        """Calibration slope."""
        return float(self.params[1])

    @property
    def in_the_large(self) -> float:
        """Intercept with a slope of 1."""
        return self.large[0]

    @property
    def pvalue(self) -> float:
        """P-value of the likelihood ratio against intercept 0 and slope 1."""
        return float(stats.chi2.sf(self.statistic, 2))

    @takes_alpha
    def to_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Index "in the large", "slope", "intercept".

        Returns
        -------
        DataFrame
            ``coef``, ``std_error``, ``expected`` (for calibrated predictions), ``pvalue`` (of the expected
            value), and the normal interval ``low``, ``high`` of level 1 - alpha.

        Examples
        --------
        >>> import fedstat as fs, numpy as np
        >>> found = fs.results.Recalibration(np.array([0.1, 0.8]), np.diag([0.04, 0.01]), (0.05, 0.1), 4.2)
        >>> found.to_frame().loc["slope", "low"].round(3)
        np.float64(0.604)
        """
        coef = np.array([self.in_the_large, self.slope, self.intercept])
        error = np.array([self.large[1], *np.sqrt(np.diag(self.cov))[::-1]])
        expected = np.array([0.0, 1.0, 0.0])
        half = float(stats.norm.isf(alpha / 2.0)) * error
        return pd.DataFrame(
            {
                "coef": coef,
                "std_error": error,
                "expected": expected,
                "pvalue": 2.0 * stats.norm.sf(np.abs(coef - expected) / error),
                "low": coef - half,
                "high": coef + half,
            },
            index=pd.Index([LARGE, SLOPE, INTERCEPT], name="calibration"),
        )

    @property
    def note(self) -> str:
        """Return the note below a summary."""
        return (
            "Calibration: the response regressed on the linear predictor by the model's own distribution and "
            "link (Cox 1958); in the large is the intercept with a slope of 1. "
            f"Likelihood ratio against intercept 0 and slope 1: {self.statistic:.2f}, P {self.pvalue:.3f} "
            "(chi-squared, 2 degrees of freedom; not meaningful for rows that were used for training)."
        )

    def sheet(self) -> Sheet:
        """Part of a printed summary."""
        frame = self.to_frame()
        rows = tuple(
            (
                str(name),
                *(number(v, error=values[1]) for v in values[:3]),
                f"{values[3]:.3f}",
                *map(number, values[4:]),
            )
            for name, values in zip(frame.index, frame.to_numpy().tolist(), strict=True)
        )
        heads = ("calibration", "coef", "std err", "calibrated", "P", "0.025", "0.975")
        return Sheet(heads, rows, "l" + "r" * 6, WIDTHS)


@dataclass(slots=True, eq=False)
class RecalibrationScoring:
    """Fisher scoring for intercept and slope, or the intercept alone, from sums that the caller supplies.

    `trial` are the next coefficients, (2,), until it is `done`; it starts at :data:`NEUTRAL`, and the first
    `free` coefficients change. `estimates` states whether the dispersion is estimated.
    """

    free: int
    estimates: bool
    trial: Floats = field(default_factory=NEUTRAL.copy)
    params: Floats = field(default_factory=NEUTRAL.copy)
    cov: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    scale: float = 1.0
    deviances: list[float] = field(default_factory=list)
    done: bool = False
    converged: bool = False
    _halvings: int = 0

    def take(self, inside: bool, score: Floats, information: Floats, totals: Floats) -> None:
        """Continue with score (2,), information (2, 2), and totals at `trial`.

        Coefficients without sums are not `inside`, and a step to them is halved.
        """
        deviance, last = float(totals[1]), self.deviances[-1] if self.deviances else np.inf
        if not inside or not deviance <= last * (1.0 + 1e-10):
            self._halvings += 1
            self.trial = (self.params + self.trial) / 2.0
            self.done = self._halvings > MAX_HALVINGS or not self.deviances
            return
        self.deviances.append(deviance)
        self.params, self._halvings = self.trial, 0
        if self.estimates:
            self.scale = float(totals[2]) / max(float(totals[0]) - self.free, 1.0)
        step = solve_positive(information[: self.free, : self.free], score[: self.free])
        if step is None:
            self.done = True
            return
        self.cov = self.scale * np.asarray(np.linalg.inv(information[: self.free, : self.free]))
        self.trial = self.params.copy()
        self.trial[: self.free] += step
        self.converged = bool(step @ score[: self.free] <= CLOSE * self.scale)
        if self.converged:
            self.params = self.trial
        self.done = self.converged or len(self.deviances) >= MAX_STEPS


class RecalibrationState:
    """Both regressions of a :class:`Recalibration` in parallel; they start at the same coefficients."""

    def __init__(self, estimates: bool = False) -> None:
        self.parts = RecalibrationScoring(2, estimates), RecalibrationScoring(1, estimates)

    def requested(self) -> list[Floats]:
        """Coefficients for the next sums; none when it has ended."""
        trials = [part.trial for part in self.parts if not part.done]
        same = len(trials) == 2 and np.array_equal(trials[0], trials[1])
        return trials[:1] if same else trials

    def take(self, sums: Sequence[Mapping[str, Array]]) -> None:
        """Continue with the sums at these: ``inside``, ``score``, ``information``, ``totals``."""
        going = [part for part in self.parts if not part.done]
        for part, one in zip(going, [*sums, *sums][: len(going)], strict=True):
            part.take(bool(one["inside"]), one["score"], one["information"], one["totals"])

    def found(self) -> Recalibration | None:
        """Return the result; None if there is no estimate."""
        both, constant = self.parts
        if not (both.converged and constant.converged):
            return None
        large = float(constant.params[0]), float(constant.cov[0, 0]) ** 0.5
        statistic = max(both.deviances[0] - both.deviances[-1], 0.0) / both.scale
        return Recalibration(both.params, both.cov, large, statistic)


def recalibrate_bins(
    n: Floats, events: Floats, expected: Floats, distribution: DistributionSpec
) -> Recalibration | None:
    """Recalibrate from rows, events and sums of probabilities by bin (B,), each row at its bin's mean."""
    there = n > 0.0
    p = expected[there] / n[there]
    eta = np.asarray(distribution.make().link(p.clip(1e-12, 1.0 - 1e-12)))
    X = np.column_stack([np.ones(len(p)), eta])
    return recalibrate(Rows(X, events[there] / n[there], trials=n[there]), distribution)


def recalibrate(rows: Rows, distribution: DistributionSpec) -> Recalibration | None:
    """Regress the response of local rows on their linear predictor; None if there is no estimate.

    Their design (n, 2) is a constant and the linear predictor.
    """
    search = RecalibrationState(distribution.estimates_scale)
    while request := search.requested():
        sums = [evaluate([rows], gamma, distribution) for gamma in request]
        search.take(
            [
                {
                    "inside": np.array(np.isfinite(one.deviance)),
                    "score": one.score,
                    "information": one.information,
                    "totals": np.array([one.weight, one.deviance, one.pearson]),
                }
                for one in sums
            ]
        )
    return search.found()
