"""Tests of VFEM's assumptions for a count or binary response, next to those from pooled rows."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from glm_oracle import glm_study
from pattern_moments import moments_of_arrays

import fedstat as fs
from fedstat.errors import ConsentError, NotAvailableError
from fedstat.federation.disclosure.policy import Policy
from fedstat.models.vertical.joint_normal.assumption_tests import (
    independence_tests,
    little_test,
    unrestricted_normal,
)
from fedstat.models.vertical.joint_normal.fit import fit_joint_model

FAMILIES = {"Binomial": sm.families.Binomial(), "Poisson": sm.families.Poisson()}


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_pooled_rows(family, tmp_path):
    study = glm_study(family=family)
    model = fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(), family=FAMILIES[family], between="independent"
    )
    result = model.fit(cov_type="none")
    columns = [name for names in study.columns.values() for name in names]
    sizes = [len(names) for names in study.columns.values()]
    pooled = moments_of_arrays(
        study.table[columns].to_numpy(), study.table["y"].to_numpy(), sizes, sites=list(study.columns)
    )
    fit = fit_joint_model(pooled, "independent")
    np.testing.assert_allclose(result.mcar_test(), little_test(fit, unrestricted_normal(fit)), rtol=1e-5)
    pairs, expected = result.independence_tests(), independence_tests(pooled)
    np.testing.assert_allclose(pairs["statistic"], [one.statistic for one in expected], rtol=1e-6)
    np.testing.assert_allclose(pairs["canonical"], [one.canonical for one in expected], rtol=1e-6)
    # One exchange of sums for all of them, in an account of its own.
    rounds = result.linear.ledger.rounds
    assert not {"per entity", "raw columns"} & set(result.linear.ledger.to_frame()["kind"])
    result.mcar_test()
    assert result.linear.ledger.rounds == rounds
    result.save(tmp_path / "fit")
    with pytest.raises(NotAvailableError, match="read from a file"):
        fs.load(tmp_path / "fit").mcar_test()


def test_owners_are_asked_before_sums_leave():
    study = glm_study(family="Binomial")
    partition = study.partition()
    result = fs.VFEMGLM.from_formula(
        "y ~ .", partition, family=FAMILIES["Binomial"], between="independent"
    ).fit()
    for site in partition.sites.values():
        site.policy = Policy(approval="owner")
    with pytest.raises(ConsentError, match="pending"):
        result.independence_tests()
    assert all(len(site.pending) == 1 for site in partition.sites.values())


@pytest.mark.parametrize("family", ["Binomial", pytest.param("Poisson", marks=pytest.mark.slow)])
def test_a_response_that_is_not_normal_keeps_the_level(family):
    """Rejections at .05 of 100 data sets of 500 entities; all but none where the response decides."""
    rng, rejected = np.random.default_rng(5), {"chance": [], "response": []}
    for _ in range(100):
        X = rng.normal(size=(500, 4))
        eta = -0.5 + X @ [0.5, -0.4, 0.3, 0.0]
        y = rng.random(500) < 1.0 / (1.0 + np.exp(-eta)) if family == "Binomial" else rng.poisson(np.exp(eta))
        chances = {"chance": np.full(500, 0.4), "response": np.where(y > 0, 0.6, 0.25)}
        for name, chance in chances.items():
            seen = X.copy()
            seen[:, 2:][rng.random(500) < chance] = np.nan
            test = little_test(
                fit_joint_model(moments_of_arrays(seen, y.astype(float), [2, 2]), "independent")
            )
            rejected[name].append(test.pvalue <= 0.05)
    assert 0.025 <= np.mean(rejected["chance"]) <= 0.085
    assert np.mean(rejected["response"]) > 0.95


def test_standardized_coefficients_are_of_the_columns_own_deviations():
    """Oracle: the deviation of each column at its site, over the records that have it."""
    pytest.importorskip("matplotlib").use("Agg")
    data = fs.datasets.make_sme_risk(1_000)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)

    def fit(between):
        return fs.VFEMGLM.from_formula(
            "RISK ~ PL1 + CA1", partition, family=sm.families.Binomial(), between=between
        ).fit()

    free = fit("free")
    ax = free.plot_coefficients(standardized=True)
    drawn = sorted(x for line in ax.lines for x in line.get_xdata() if line.get_marker() == "o")
    columns = {c: frame[c] for frame in data.frames.values() for c in ("PL1", "CA1") if c in frame}
    expected = sorted(free.params[name] * column.std(ddof=0) for name, column in columns.items())
    np.testing.assert_allclose(drawn, expected, rtol=1e-8)
    with pytest.raises(NotAvailableError, match=r"between='free'.*as in \{"):
        fit("independent").plot_coefficients(standardized=True)
