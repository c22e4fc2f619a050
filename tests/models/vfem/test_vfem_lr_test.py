"""Likelihood ratios of nested fits, against the constrained maximum of the full likelihood."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import ITERATIVE, Study, packed, simulate
from scipy import stats

import fedstat as fs
from fedstat.errors import DataWarning, ModelError

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-11, "cov_type": "none"}


@pytest.fixture(scope="module")
def study():
    return simulate(seed=8, n=500, holder="Registry")


@pytest.fixture(scope="module")
def full(study):
    model = study.model()
    result = model.fit(**packed(**TIGHT))
    return result, study.theta(model, result)


def with_column(block, j, beta, mu, Sigma):
    """Add a column without an effect to the parameters of the others: its regression on them is free."""
    rows = block[~np.isnan(block).any(axis=1)]
    others = np.delete(rows, j, axis=1)
    Z = np.column_stack([np.ones(len(rows)), others])
    c, *_ = np.linalg.lstsq(Z, rows[:, j], rcond=None)
    covariance = Sigma @ c[1:]
    variance = np.mean((rows[:, j] - Z @ c) ** 2) + c[1:] @ covariance
    Sigma = np.insert(np.insert(Sigma, j, covariance, axis=0), j, np.insert(covariance, j, variance), axis=1)
    return np.insert(beta, j, 0.0), np.insert(mu, j, c[0] + c[1:] @ mu), Sigma


def without_effect(block):
    """Parameters of a block without an effect."""
    rows = block[~np.isnan(block).any(axis=1)]
    return np.zeros(rows.shape[1]), rows.mean(axis=0), np.cov(rows.T, bias=True)


def free_score(pooled, theta, fixed):
    """Largest score of the parameters that the restricted fit may move."""
    scale = np.sqrt(np.diag(-pooled.hessian(theta)))
    return np.delete(np.abs(pooled.score(theta)) / scale, fixed).max()


def test_leaving_out_a_column_is_the_constrained_maximum(study, full):
    columns = study.columns | {"Court": ["court0", "court2"]}
    small = Study(study.table.drop(columns="court1"), columns, study.holder)
    model = small.model()
    restricted = model.fit(**packed(**TIGHT))
    beta0, s2, betas, mus, Sigmas = small.pooled().unpack(small.theta(model, restricted))
    parts = list(zip(betas, mus, Sigmas, strict=True))
    parts[1] = with_column(study.table[study.columns["Court"]].to_numpy(), 1, *parts[1])
    pooled = study.pooled()
    constrained = pooled.pack(beta0, s2, *zip(*parts, strict=True))
    place = 2 + study.covariates.index("court1")
    assert constrained[place] == 0.0
    assert free_score(pooled, constrained, place) < 1e-6
    test = full[0].compare_lr_test(restricted)
    expected = 2.0 * (pooled.loglike(full[1]) - pooled.loglike(constrained))
    assert test.statistic == pytest.approx(expected, rel=1e-6)
    assert test.df_diff == 1
    assert test.pvalue == pytest.approx(stats.chi2.sf(expected, 1), rel=1e-6)


def test_leaving_out_a_site_is_the_constrained_maximum(study, full):
    model = study.model("y ~ " + " + ".join(study.columns["Bank"] + study.columns["Tax"]))
    restricted = model.fit(**packed(**TIGHT))
    small = Study(study.table, {k: v for k, v in study.columns.items() if k != "Court"}, study.holder)
    beta0, s2, betas, mus, Sigmas = small.pooled().unpack(small.theta(model, restricted))
    parts = list(zip(betas, mus, Sigmas, strict=True))
    parts.insert(1, without_effect(study.table[study.columns["Court"]].to_numpy()))
    pooled = study.pooled()
    constrained = pooled.pack(beta0, s2, *zip(*parts, strict=True))
    places = [2 + study.covariates.index(name) for name in study.columns["Court"]]
    assert free_score(pooled, constrained, places) < 1e-6
    test = full[0].compare_lr_test(restricted)
    expected = 2.0 * (pooled.loglike(full[1]) - pooled.loglike(constrained))
    assert test.statistic == pytest.approx(expected, rel=1e-6)
    assert test.df_diff == 3


def test_the_statistic_of_a_null_effect_is_the_squared_wald_statistic_nearly(study, full):
    columns = study.columns | {"Court": ["court0", "court2"]}
    small = Study(study.table.drop(columns="court1"), columns, study.holder)
    wide = study.model().fit(**packed(cross_products="exact", **ITERATIVE))
    test = wide.compare_lr_test(small.model().fit(cov_type="none"))
    assert test.statistic == pytest.approx(wide.tvalues["court1"] ** 2, rel=0.1)


def test_fits_that_count_other_records_are_not_compared():
    """A column with missing cells decides who has a record: without it more entities have one."""
    study = simulate(seed=8, n=300, holder="Registry", missing="none")
    study.table.loc[study.table.index[::6], "court1"] = np.nan
    partition = study.partition(partial="drop")
    with pytest.warns(DataWarning, match="50 at 'Court'"):
        full = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(cov_type="none")
    rest = " + ".join(name for name in study.covariates if name != "court1")
    restricted = fs.VFEMRegression.from_formula(f"y ~ {rest}", partition, between="independent").fit(
        cov_type="none"
    )
    with pytest.raises(ModelError, match="'Court' counts as having other entities in the two fits"):
        full.compare_lr_test(restricted)


def test_fits_by_different_methods_are_not_compared(study, full):
    with pytest.raises(ModelError, match="method='vfem', the other 'impute'"):
        full[0].compare_lr_test(study.model("y ~ bank0").fit(method="impute", cov_type="none"))


def test_a_fit_that_is_not_nested_is_not_compared(study, full):
    restricted = study.model("y ~ log(bank0 + 10)").fit(cov_type="none")
    with pytest.raises(ModelError, match=r"not in this fit: log\(bank0 \+ 10\)"):
        full[0].compare_lr_test(restricted)
