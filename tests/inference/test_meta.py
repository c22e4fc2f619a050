"""Meta-analysis of reported estimates, against metafor's numbers and against formulas."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from test_random_effects import bcg

import fedstat as fs
from fedstat.errors import ModelError


@pytest.fixture(scope="module")
def trials():
    y, v = bcg()
    names = [f"trial {k}" for k in range(1, 14)]
    return pd.Series(y, names), pd.Series(np.sqrt(v), names)


METAFOR = {
    "REML": (0.313243325981, -0.714532348365, 0.180791745519, -1.996016967022, 0.566952270292, 92.221386075),
    "DL": (0.308760262862, -0.714117222073, 0.180696628336, -1.987206963431, 0.558972519284, 92.117346855),
    "PM": (0.318093711863, -0.714970405632, 0.180892712223, -2.005474982241, 0.575534170976, 92.330900290),
}
"""tau2, mean, standard error, prediction interval and I2 in per cent of metafor 3.8, to its tolerance."""


@pytest.mark.parametrize("method", METAFOR)
def test_it_equals_metafor(trials, method):
    """Calls: ``rma(yi, vi, method=..., test="knha")``, ``predict`` and ``confint``; and method "FE"."""
    found = fs.meta(*trials, method=method, test="knha", prediction="t")
    fit = found.fit
    ours = found.tau2, fit.re_estimate, fit.re_std_error, fit.pred_low, fit.pred_high, 100 * found.I2
    assert_allclose(ours, METAFOR[method], rtol=2e-4 if method == "PM" else 1e-6)
    assert_allclose([found.common, found.common_se], [-0.4302851636541, 0.0404987517109], rtol=1e-10)
    assert_allclose([found.tau2_low, found.tau2_high], [0.1196953128, 1.1114862622], rtol=2e-4)
    assert_allclose([100 * found.I2_low, 100 * found.I2_high], [81.9177227, 97.6780896], rtol=1e-4)


def test_weights_give_the_means(trials):
    found = fs.meta(*trials)
    weights = found.to_frame()
    assert_allclose(weights[["weight_common", "weight_random"]].sum(), 1.0)
    assert_allclose(weights["weight_random"] @ trials[0], found.fit.re_estimate)


def test_limits_of_tau2_are_where_q_has_its_quantiles(trials):
    found, (b, se) = fs.meta(*trials, alpha=0.1), trials
    for tau2, level in ((found.tau2_low, 0.95), (found.tau2_high, 0.05)):
        w = 1.0 / (se**2 + tau2)
        Q = (w * (b - (w @ b) / w.sum()) ** 2).sum()
        assert stats.chi2.cdf(Q, 12) == pytest.approx(level)
    w = 1.0 / (se**2 + fs.meta(*trials, method="PM").tau2)
    assert (w * (b - (w @ b) / w.sum()) ** 2).sum() == pytest.approx(12.0)


def test_large_sites_weigh_more():
    """Three sites of 2,000, 200 and 50 rows: the mean is near the first, unlike an unweighted one."""
    found = fs.meta([0.471, 0.542, 0.232], [0.022, 0.069, 0.134])
    assert [round(found.common, 3), round(found.common_se, 3)] == [0.472, 0.021]
    assert "by moments (method='DL')" in str(found)  # REML has tau2 = 0, moments have not
    table = found.tidy().set_index("term")
    assert table.loc["random effects", "p_value"] == pytest.approx(
        2 * stats.t.sf(found.fit.re_estimate / found.fit.re_std_error, 2)
    )


def test_sites_are_matched_by_name():
    b, se = {"A": 1.0, "B": 2.0, "C": 0.0}, {"C": 0.3, "B": 0.2, "A": 0.1}
    found = fs.meta(b, se)
    assert found.to_frame()["std_error"].to_dict() == {"A": 0.1, "B": 0.2, "C": 0.3}
    same = fs.meta(list(b.values()), [0.1, 0.2, 0.3])
    assert same.fit == found.fit
    assert str(fs.meta(pd.Series(b), pd.Series(se))) == str(found)


def test_differences_are_in_the_first_note(trials):
    assert "the interval of a further site" in fs.meta(*trials).notes[0]
    assert "no evidence that effects differ" in fs.meta([1.0, 1.1, 0.9], [0.2] * 3).notes[0]


def test_two_sites_have_no_interval_of_a_further_one():
    found = fs.meta([1.0, 2.0], [0.1, 0.3])
    assert np.isnan(found.fit.pred_low) and "a further site" in str(found)
    assert found.plot_forest(exponentiate=True).has_data()


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (([1.0], [1.0]), {}, "at least 2 sites, received 1"),
        (([1.0, 2.0], [1.0, 0.0]), {}, "positive standard errors; leave out or correct '2'"),
        (([1.0, np.nan], [1.0, 1.0]), {}, "finite estimates"),
        (({"A": 1.0, "B": 1.0}, {"A": 1.0, "C": 1.0}), {}, "different sites: 'B', 'C'"),
        ((pd.Series([1.0, 2.0], ["A", "A"]), [1.0, 1.0]), {}, "site 'A' is there more than once"),
        ((["a", "b"], [1.0, 1.0]), {}, "estimates as numbers, one per site"),
        (([1.0, 2.0], [1.0, 1.0]), {"method": "EB"}, "method to be one of 'REML', 'DL', 'PM'"),
        (([1.0, 2.0], [1.0, 1.0]), {"alpha": 0.0}, "alpha between 0 and 1"),
    ],
)
def test_what_cannot_be_combined_is_named(given, options, message):
    with pytest.raises(ModelError, match=message):
        fs.meta(*given, **options)


def test_estimators_that_disagree_on_a_variance_are_named():
    estimates, errors = [0.3, -0.3, 1.6, 1.3], [0.9, 0.4, 1.3, 1.9]
    notes = fs.meta(estimates, errors).diagnostics().set_index("kind")["note"]
    assert "tau2 is 0.1040 by REML and 0.0000 by moments" in notes["two_estimators"]
    alike = fs.meta(np.array(estimates) * 10.0, errors).diagnostics()["kind"].tolist()
    assert "two_estimators" not in alike


@pytest.mark.parametrize(("sites", "degrees"), [(2, "1 degree of"), (3, "2 degrees of")])
def test_degrees_of_freedom_are_counted(sites, degrees):
    notes = " ".join(fs.meta(np.arange(sites) * 1.0, np.ones(sites)).notes)
    assert f"with {degrees} freedom" in notes


@pytest.mark.parametrize(("sites", "few"), [(4, True), (5, False)])
def test_few_sites_are_said_to_be_few(sites, few):
    kinds = fs.meta(np.arange(sites) * 0.1, np.ones(sites)).diagnostics()["kind"].tolist()
    assert ("few_sites" in kinds) == few
