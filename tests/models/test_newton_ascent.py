"""Newton's method ends where rounding lets it go no further, and nowhere before."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.models.vertical.newton import NewtonAscent, solve_information

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
        return "newton", solve_information(INFORMATION, at.score)

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


@pytest.mark.parametrize(("family", "pooled"), [("GLORE", sm.families.Binomial()), ("FederatedOLS", None)])
def test_columns_of_condition_1e10_have_the_pooled_estimates(family, pooled):
    rows = nearly_equal_columns()
    partition = fs.ClientPartition.from_frame(rows, by="site")
    y = "event" if pooled else "y"
    found = getattr(fs, family).from_formula(f"{y} ~ x + z + w", partition).fit()
    peer = sm.GLM(rows[y], sm.add_constant(rows[["x", "z", "w"]]), family=pooled).fit(tol=1e-13)
    assert found.converged
    assert (np.abs(found.params.to_numpy() - peer.params.to_numpy()) < 1e-7 * peer.bse.to_numpy()).all()


SURVIVAL, GRADES = "Surv(time, died)", ["low", "middle", "high"]


@pytest.mark.parametrize(
    ("model", "response", "settings"),
    [
        ("FederatedCox", SURVIVAL, {}),
        ("FederatedOrdinal", "grade", {"levels": GRADES}),
        ("FederatedMultinomial", "grade", {}),
        ("FederatedGEE", "y", {"groups": "person"}),
    ],
)
def test_columns_of_condition_1e10_are_fitted_as_their_mean_and_difference(model, response, settings):
    """The same column space without the condition has the same predictions, by few evaluations."""
    rows = nearly_equal_columns()
    rng = np.random.default_rng(1)
    rows["time"], rows["died"] = rng.exponential(np.exp(-0.3 * rows["x"])), rng.integers(0, 2, 2000)
    rows["grade"] = pd.cut(rows["y"], [-np.inf, -1.0, 1.0, np.inf], labels=GRADES).astype(str)
    rows["person"], rows["d"] = np.arange(2000) // 4, (rows["z"] - rows["x"]) * 5e4
    partition = fs.ClientPartition.from_frame(rows, by="site")
    make = getattr(fs, model).from_formula
    found, peer = (make(f"{response} ~ x + {z} + w", partition, **settings).fit() for z in ("z", "d"))
    assert found.converged and peer.converged
    for name in found.params.index:
        if "z" in str(name):
            other = peer.params.index[list(found.params.index).index(name)]
            near = 1e-4 * 5e4 * peer.bse[other]
            assert abs(found.params[name] - 5e4 * peer.params[other]) < near


@pytest.mark.slow
def test_sixty_columns_with_three_hundred_patterns_converge():
    rng = np.random.default_rng(6)
    n, p, patterns = 90_000, 60, 300
    x = rng.normal(size=(n, 8)) @ rng.normal(size=(8, p)) + 0.1 * rng.normal(size=(n, p))
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(p)])
    y = 0.2 * table.iloc[:, ::7].sum(axis=1) + rng.normal(size=n)
    seen = (rng.random((patterns, p)) < 0.85) & np.repeat(rng.random((patterns, 3)) < 0.8, 20, axis=1)
    table = table.where(seen[rng.integers(0, patterns, n)])
    frames = {"Y": pd.DataFrame({"id": range(n), "y": y})}
    for k, site in enumerate("ABC"):
        own = table.iloc[:, 20 * k : 20 * k + 20]
        frames[site] = own.assign(id=range(n))[own.notna().any(axis=1)]
    partition = fs.ClientPartition.from_frames(frames, on="id")
    result = fs.VFEMRegression.from_formula("y ~ .", partition).fit(cov_type="none")
    assert result.converged and len(result.trace) < 15
    assert np.abs(result.params.iloc[1::7] - 0.2).max() < 0.2


def test_columns_of_condition_1e10_at_two_sites_are_refused_by_name():
    """The joint model needs their covariance, which is singular to the precision of sums between sites."""
    rows = nearly_equal_columns().assign(id=range(2000))
    frames = {"A": rows[["id", "y", "x"]], "B": rows[["id", "z"]], "C": rows[["id", "w"]][:1500]}
    model = fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(frames, on="id"))
    with pytest.raises(EstimationError, match=r"'x' \(A\) and 'z' \(B\) are collinear"):
        model.fit()


def nearly_equal_columns():
    """Rows of two sites in which z differs from x by a hundred thousandth: correlations of condition 1e10."""
    rng = np.random.default_rng(0)
    x, w, noise = rng.normal(size=(3, 2000))
    rows = pd.DataFrame({"x": x, "z": x + 2e-5 * rng.normal(size=2000), "w": w})
    assert np.linalg.cond(rows.corr()) > 9e9
    event = (x + w + rng.logistic(size=2000) > 0).astype(float)
    return rows.assign(y=x + w + noise, event=event, site=["A", "B"] * 1000)
