"""A row of frequency weight w is equal to w rows, in every family that has these weights."""

from __future__ import annotations

import inspect

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DesignError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore")
ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1, max_parameters=1e9)
COMMON = {"baseline": "common", "grid": 4, "until": 12}


def table():
    rng = np.random.default_rng(5)
    n = 180
    x, z = rng.normal(size=n), rng.integers(0, 2, n) * 1.0
    time = np.ceil(rng.exponential(6.0 * np.exp(-0.4 * x)))
    return pd.DataFrame(
        {
            "site": rng.choice(list("abc"), n),
            "x": x,
            "z": z,
            "t": time + 1.0,
            "entry": np.where(rng.random(n) < 0.3, np.minimum(time, 2.0), 0.0),
            "e": (rng.random(n) < 0.7).astype(int),
            "y": x + rng.normal(size=n),
            "k": rng.poisson(np.exp(0.3 * x)),
            "b": (rng.random(n) < 1 / (1 + np.exp(-x))).astype(int),
            "g": np.digitize(x + rng.logistic(size=n), [-0.5, 1.0]),
            "h": rng.integers(0, 2, n),
            "family": rng.integers(0, 40, n),
            "w": rng.integers(1, 5, n),
        }
    )


ROWS = table()
REPEATED = ROWS.loc[ROWS.index.repeat(ROWS["w"])].reset_index(drop=True)
SURV = "Surv(t, e) ~ x + z"
LABELS = {"labels": ["family"]}
CLUSTER = {"cov_type": "cluster", "cov_kwds": {"groups": "family"}}
CASES = {
    "ols": ("FederatedOLS", "y ~ x + z", {}, {}),
    "ols HC0": ("FederatedOLS", "y ~ x + z", {}, {"cov_type": "HC0"}),
    "ols HC1": ("FederatedOLS", "y ~ x + z", {}, {"cov_type": "HC1"}),
    "ols cluster": ("FederatedOLS", "y ~ x + z", LABELS, CLUSTER),
    "logistic cluster": ("GLORE", "b ~ x + z", LABELS, CLUSTER),
    "poisson sites": (
        "FederatedGLM",
        "k ~ x",
        {"family": sm.families.Poisson()},
        {"cov_type": "cluster", "cov_kwds": {"groups": "site"}},
    ),
    "logistic HC0": ("GLORE", "b ~ x + z", {}, {"cov_type": "HC0"}),
    "poisson": ("FederatedGLM", "k ~ x + z", {"family": sm.families.Poisson()}, {}),
    "poisson HC1": ("FederatedGLM", "k ~ x + z", {"family": sm.families.Poisson()}, {"cov_type": "HC1"}),
    "cox efron": ("FederatedCox", SURV, {}, {}),
    "cox efron robust": ("FederatedCox", SURV, {}, {"cov_type": "robust"}),
    "cox breslow robust": ("FederatedCox", SURV, {}, {"cov_type": "robust", "ties": "breslow"}),
    "cox strata": ("FederatedCox", "Surv(t, e) ~ x + strata(h)", {}, {"cov_type": "robust"}),
    "cox late": ("FederatedCox", "Surv(entry, t, e) ~ x + z", {}, {"cov_type": "robust"}),
    "cox cluster": ("FederatedCox", "Surv(t, e) ~ x + z + cluster(family)", {}, {}),
    "cox common": ("FederatedCox", SURV, {}, COMMON),
    "cox common robust": ("FederatedCox", SURV, {}, COMMON | {"cov_type": "robust"}),
    "cox common breslow": ("FederatedCox", SURV, {}, COMMON | {"cov_type": "robust", "ties": "breslow"}),
    "aft": ("FederatedAFT", SURV, {}, {"cov_type": "robust"}),
    "aft late": ("FederatedAFT", "Surv(entry, t, e) ~ x + z", {"distribution": "lognormal"}, {}),
    "aft cluster": (
        "FederatedAFT",
        "Surv(t, e) ~ x + z + cluster(family)",
        {"distribution": "loglogistic"},
        {},
    ),
    "ordinal": ("FederatedOrdinal", "g ~ x + z", {}, {}),
    "ordinal HC0": ("FederatedOrdinal", "g ~ x + z", {}, {"cov_type": "HC0"}),
    "ordinal HC1": ("FederatedOrdinal", "g ~ x + z", {"distr": "cloglog"}, {"cov_type": "HC1"}),
    "ordinal cluster": ("FederatedOrdinal", "g ~ x + z", LABELS, CLUSTER),
    "multinomial cluster": ("FederatedMultinomial", "g ~ x + z", LABELS, CLUSTER),
    "multinomial": ("FederatedMultinomial", "g ~ x + z", {}, {}),
    "multinomial HC0": ("FederatedMultinomial", "g ~ x + z", {}, {"cov_type": "HC0"}),
}


def fit_of(case, data, **weights):
    kind, formula, settings, arguments = CASES[case]
    partition = fs.ClientPartition.from_frame(data, by="site", policy=ALLOW)
    return getattr(fs, kind).from_formula(formula, partition, **settings, **weights).fit(**arguments)


@pytest.mark.parametrize("case", CASES)
def test_a_frequency_weight_is_a_number_of_rows(case):
    weighted, repeated = fit_of(case, ROWS, freq_weights="w"), fit_of(case, REPEATED)
    assert_allclose(weighted.params, repeated.params, rtol=1e-6, atol=1e-8)
    assert_allclose(weighted.cov_params(), repeated.cov_params(), rtol=1e-6, atol=1e-10)
    assert_allclose(weighted.llf, repeated.llf, rtol=1e-9)
    if "cluster" in case or "sites" in case:  # by CR2, with its degrees of freedom
        assert_allclose(weighted.df, repeated.df, rtol=1e-6)
    assert_allclose(weighted.heterogeneity.joint.statistic, repeated.heterogeneity.joint.statistic, rtol=1e-5)
    if "Cox" in CASES[case][0]:
        for name in ("concordance", "concordance_se", "events", "llnull", "bic"):
            assert_allclose(getattr(weighted, name), getattr(repeated, name), rtol=1e-7)
        assert_allclose(weighted.global_tests(), repeated.global_tests(), rtol=1e-5)
        tests = [fit.test_proportional_hazards().tidy()["statistic"] for fit in (weighted, repeated)]
        assert_allclose(*tests, rtol=1e-5)
    if "Ordinal" in CASES[case][0]:
        tests = [fit.test_proportional_odds().tidy()["statistic"] for fit in (weighted, repeated)]
        assert_allclose(*tests, rtol=1e-6)


def test_every_model_over_rows_with_frequency_weights_is_tested():
    from fedstat.models.horizontal.model import HorizontalModel

    own = {"KaplanMeier", "CumulativeIncidence"}  # refuse weights
    aliases = {"FedAvgM", "FedProx", "QFedAvg", "FedAvg"}  # descent, without errors
    for name in fs.__all__:
        kind = getattr(fs, name)
        if not inspect.isclass(kind) or not issubclass(kind, HorizontalModel) or name in own | aliases:
            continue
        if "freq_weights" in inspect.signature(kind.from_formula).parameters:
            tested = {case[0] for case in CASES.values()}
            assert name in tested | {"FederatedGEE", "FederatedMixed", "FedFunctionBoost"}, name


def test_case_weights_are_other_weights():
    plain = fit_of("cox efron robust", ROWS, freq_weights="w")
    case = fit_of("cox efron robust", ROWS, var_weights="w")
    # One row in robust errors: these are larger by about the root of the mean weight.
    assert 1.3 < (case.bse / plain.bse).mean() < 1.9
    scaled = fit_of("cox efron robust", ROWS.assign(w=ROWS["w"] / 4.0), var_weights="w")
    assert_allclose(scaled.params, case.params, rtol=1e-7)
    assert_allclose(scaled.bse, case.bse, rtol=1e-6)
    assert "Case Weights" in case.summary().as_text()


def test_weights_that_are_no_numbers_of_rows():
    with pytest.raises(DesignError, match=r"column 'w': \d+ values are no whole numbers.*var_weights"):
        fit_of("cox efron", ROWS.assign(w=ROWS["w"] / 4.0), freq_weights="w")
    with pytest.raises(ModelError, match="give weights once"):
        fit_of("cox efron", ROWS, freq_weights="w", var_weights="w")
