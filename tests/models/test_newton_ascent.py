"""Newton's method ends where rounding lets it go no further, and nowhere before."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.models.vertical.newton import NewtonAscent, step_by

INFORMATION = np.diag([1e4, 1.0, 3e-4])


@dataclass(frozen=True)
class At:
    log_likelihood: float
    score: np.ndarray


def ascent(noise, size=-2e5):
    """A quadratic log-likelihood of 6,000 entities whose score carries noise."""
    rng = np.random.default_rng(1)

    def evaluate(point):
        score = -INFORMATION @ point + noise * np.sqrt(np.diag(INFORMATION)) * rng.normal(size=3)
        return At(size - 0.5 * float(point @ INFORMATION @ point), score)

    def direct(point, at):
        return step_by(at.score, [("newton", INFORMATION)])

    return NewtonAscent(6000.0, evaluate, direct, lambda point, at, step: (point + step, 0.0, False))


def test_a_score_without_noise_reaches_the_tolerance():
    found = ascent(0.0).ascend(np.ones(3), 1e-9, 50)
    assert found.converged and found.trace[-1].score * np.sqrt(6000) <= 1e-9
    assert found.reason.endswith("its tolerance")


def test_a_decrement_at_rest_below_rounding_is_the_end():
    found = ascent(1e-6).ascend(np.ones(3), 1e-9, 5000)
    assert found.converged and len(found.trace) < 10
    assert found.reason.endswith("the limit of rounding")


def test_a_decrement_at_rest_above_rounding_is_not_the_end():
    found = ascent(1e-2).ascend(np.ones(3), 1e-9, 60)
    assert not found.converged and len(found.trace) == 60


def test_ratios_that_nearly_repeat_each_other_are_fitted():
    """Thirty columns of three sites, condition about 1e5, with records and single cells missing."""
    rng = np.random.default_rng(4)
    n, p = 1500, 30
    x = rng.normal(size=(n, 6)) @ rng.normal(size=(6, p)) + 0.02 * rng.normal(size=(n, p))
    y = x[:, :3].sum(axis=1) + rng.normal(size=n)
    frames = {"Y": pd.DataFrame({"id": range(n), "y": y})}
    for site, columns in {"A": range(10), "B": range(10, 20), "C": range(20, 30)}.items():
        seen = rng.random(n) < 0.8
        frames[site] = pd.DataFrame({f"x{j}": x[seen, j] for j in columns}).assign(id=np.flatnonzero(seen))
    partition = fs.ClientPartition.from_frames(frames, on="id")
    result = fs.VFEMRegression.from_formula("y ~ .", partition).fit(cov_type="none")
    assert result.converged
    assert len(result.trace) < 60
