"""Imputation by sums of products: the distribution of rows that are imputed one by one, and that of mice."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose
from pattern_moments import moments_of_arrays

import fedstat as fs
from fedstat.errors import DataWarning, EstimationError, ModelError
from fedstat.models.impute.draws import (
    JointNormal,
    complete,
    impute_sums,
    iterations_between,
    posterior,
    start,
    wishart,
)
from fedstat.models.impute.model import sums_of
from fedstat.models.vertical.joint_normal.likelihood import expected_moments

MICE = Path(__file__).parents[2] / "reference" / "mice" / "nhanes.json"
NHANES = {
    "Interview": ["Age"],
    "Body": ["BMI", "Height"],
    "Blood pressure": ["BPSysAve", "Pulse"],
    "Blood laboratory": ["DirectChol", "TotChol"],
}
LAW = JointNormal(
    np.array([0.1, -0.2, 0.3, 0.0]),
    np.array([[1.0, 0.5, 0.3, 0.4], [0.5, 1.2, 0.2, 0.1], [0.3, 0.2, 0.8, 0.3], [0.4, 0.1, 0.3, 1.1]]),
)


def table(n=60, seed=1):
    """Three columns at two sites, of which blocks are missing, and a response."""
    rng = np.random.default_rng(seed)
    rows = rng.multivariate_normal(LAW.mean, LAW.cov, size=n)
    X, y = rows[:, :3].copy(), rows[:, 3]
    X[: n // 3, :2] = np.nan
    X[n // 4 : n // 2, 2] = np.nan
    return X, y


def sums_of_table(X, y):
    return sums_of(moments_of_arrays(X, y, (2, 1)), "y")


def impute_rows(X, y, law, rng):
    """Sums over rows that are imputed one by one."""
    rows = np.column_stack([X, y])
    for row in rows:
        m = np.isnan(row)
        if m.any():
            B = np.linalg.solve(law.cov[np.ix_(~m, ~m)], law.cov[np.ix_(~m, m)])
            S = law.cov[np.ix_(m, m)] - law.cov[np.ix_(m, ~m)] @ B
            row[m] = rng.multivariate_normal(law.mean[m] + (row[~m] - law.mean[~m]) @ B, S)
    rows = np.column_stack([np.ones(len(rows)), rows])
    return rows.T @ rows


@pytest.mark.slow
def test_sums_have_the_distribution_of_sums_over_imputed_rows():
    X, y = table()
    sums = sums_of_table(X, y)
    standardized = (np.column_stack([X, y]) - sums.center) / sums.scale
    rng, at = np.random.default_rng(2), np.triu_indices(5)
    by_sums = np.array([complete(sums, LAW, rng)[at] for _ in range(3_000)])
    by_rows = np.array(
        [impute_rows(standardized[:, :3], standardized[:, 3], LAW, rng)[at] for _ in range(3_000)]
    )
    free = by_rows.std(axis=0) > 1e-9
    assert free.sum() == 12
    assert_allclose(by_sums[:, ~free], by_rows[:, ~free], rtol=1e-9, atol=1e-9)
    a, b = by_sums[:, free], by_rows[:, free]
    z = (a.mean(axis=0) - b.mean(axis=0)) / np.sqrt((a.var(axis=0) + b.var(axis=0)) / 3_000)
    assert np.abs(z).max() < 4.0
    correlations = np.corrcoef(a.T) - np.corrcoef(b.T)
    assert np.abs(correlations).max() < 4.0 * np.sqrt(2.0 / 3_000)
    assert_allclose(a.std(axis=0), b.std(axis=0), rtol=4.0 / np.sqrt(3_000))
    n = sums.n.sum()
    mean, cov = expected_moments(sums.seen, sums.n, sums.grams, LAW.mean, LAW.cov)
    second = np.block([[np.ones((1, 1)), mean[None]], [mean[:, None], cov + np.outer(mean, mean)]])
    expected = n * second[at][free]
    assert_allclose(a.mean(axis=0), expected, atol=4.0 * (a.std(axis=0) / np.sqrt(3_000)).max())


def test_small_patterns_and_few_degrees_of_freedom():
    rng = np.random.default_rng(3)
    few = np.array([wishart(2, 3, rng) for _ in range(4_000)])
    assert np.linalg.matrix_rank(few[0]) == 2
    assert_allclose(few.mean(axis=0), 2.0 * np.eye(3), atol=0.12)
    assert_allclose(np.mean([wishart(9, 3, rng) for _ in range(4_000)], axis=0), 9.0 * np.eye(3), atol=0.3)


def test_parameters_have_the_moments_of_the_posterior_distribution():
    rng = np.random.default_rng(4)
    rows = np.column_stack([np.ones(30), rng.normal(size=(30, 2)) @ [[1.0, 0.4], [0.0, 0.7]]])
    gram = rows.T @ rows
    laws = [posterior(gram, rng) for _ in range(6_000)]
    squares = 30.0 * np.cov(rows[:, 1:].T, ddof=0)
    # inverse Wishart with n - 1 degrees of freedom: mean squares / (n - 1 - d - 1)
    assert_allclose(np.mean([law.cov for law in laws], axis=0), squares / 26.0, rtol=0.05, atol=0.01)
    means = np.array([law.mean for law in laws])
    assert_allclose(means.mean(axis=0), rows[:, 1:].mean(axis=0), atol=0.015)
    assert_allclose(np.cov(means.T), squares / 26.0 / 30.0, rtol=0.1, atol=0.002)


def test_a_start_at_the_maximum_and_its_rate():
    X, y = table(400)
    sums = sums_of_table(X, y)
    law, rate = start(sums)
    mean, _ = expected_moments(sums.seen, sums.n, sums.grams, law.mean, law.cov)
    assert_allclose(mean, law.mean, atol=1e-4)
    assert 0.2 < rate < 0.9
    assert iterations_between(0.0) == 20 and iterations_between(1.0) == 500
    assert 0.98 ** iterations_between(0.98) <= 0.05 < 0.98 ** (iterations_between(0.98) - 1)


def test_without_missing_values_a_regression_is_least_squares():
    data = fs.datasets.make_blocks(200, missing=[0.0, 0.0, 0.0], seed=1)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    pooled = pd.concat([frame.set_index(data.key) for frame in data.frames.values()], axis=1)
    formula = "y ~ " + " + ".join(name for name in pooled if name != "y")
    found = fs.impute(partition, formula, m=2).regress()
    least_squares = smf.ols(formula, pooled).fit()
    assert_allclose(found.params, least_squares.params[found.params.index], rtol=1e-8)
    assert_allclose(found.bse, least_squares.bse[found.params.index], rtol=1e-8)
    assert found.fmi.max() < 0.02


def test_the_same_seed_gives_the_same_imputations_in_the_units_of_the_data():
    partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    first, second, other = (fs.impute(partition, "NPGR ~ ROA + CI", m=2, seed=s) for s in (1, 1, 2))
    assert_allclose(first.sums(0), second.sums(0), rtol=1e-12)
    assert not np.allclose(first.sums(0), other.sums(0), rtol=1e-6)
    y = fs.datasets.load_sme()["Platform"]["NPGR"]
    assert_allclose(first.sums(1).loc["Intercept", "NPGR"], y.sum(), rtol=1e-6)
    assert_allclose(first.sums(1).loc["NPGR", "NPGR"], (y**2).sum(), rtol=1e-6)


def test_a_pair_of_columns_that_nobody_has_both_of_is_refused_by_name():
    X, y = table(100)
    X[:50, 0] = X[:50, 1] = np.nan
    X[50:, 2] = np.nan
    with pytest.raises(EstimationError, match="0 entities have both 'x1' and 'x3'; 6 are needed"):
        impute_sums(sums_of_table(X, y), 2, np.random.default_rng(1))


def test_wrong_arguments():
    partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    with pytest.raises(ModelError, match="m: "):
        fs.impute(partition, "NPGR ~ ROA + CI", m=1)
    imputations = fs.impute(partition, "NPGR ~ ROA + CI", m=2)
    with pytest.raises(ModelError, match=r"no column 'X'; the imputations have ROA, CI, NPGR"):
        imputations.regress("NPGR", ["X"])
    with pytest.raises(ModelError, match="name each column once"):
        imputations.regress("ROA", ["ROA", "CI"])
    rows = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    with pytest.raises(ModelError, match="no site has 5 rows or more that lack one of"):
        fs.impute(rows, "num ~ age")


def test_a_strict_site_releases_what_a_regression_releases():
    strict = fs.Policy.strict()
    partition = fs.ClientPartition.from_frames(
        fs.datasets.load_sme(), on="enterprise_id", policy=strict, min_count=strict.min_count
    )
    formula = "NPGR ~ ROA + LP + FOI"
    imputations = fs.impute(partition, formula, m=2, seed=1)
    regression = fs.VFEMRegression.from_formula(formula, partition).fit(cov_type="none")
    columns = ["sender", "step", "array", "kind", "shape"]
    released, other = (one.ledger.releases()[columns] for one in (imputations, regression))
    pd.testing.assert_frame_equal(released, other)
    assert "per entity" not in set(released["kind"])


def test_nhanes_as_mice(shared_data):
    frame = pd.read_csv(shared_data / "nhanes" / "NHANESraw.csv.gz", low_memory=False)
    frame = frame[frame["Age"] >= 20]
    frames = {site: frame[["ID", *columns]] for site, columns in NHANES.items()}
    partition = fs.ClientPartition.from_frames(frames, on="ID", shared_seed=1)
    others = [name for columns in NHANES.values() for name in columns if name != "Age"]
    with pytest.warns(DataWarning, match="8 of 11,778 entities"):
        imputations = fs.impute(partition, f"Age ~ {' + '.join(others)}", m=100, seed=1)
    covariates = {
        "BPSysAve": ["Age", "BMI", "Height", "Pulse", "DirectChol", "TotChol"],
        "TotChol": ["Age", "BMI", "BPSysAve"],
    }
    for response, mice in json.loads(MICE.read_text()).items():
        ours = imputations.regress(response, covariates[response])
        noise = np.sqrt((ours.between + mice["between"]) / 100)
        z = (ours.params - mice["estimate"]) / noise
        assert np.abs(z).max() < 4.0
        assert_allclose(ours.bse, mice["std_error"], rtol=0.05)
