"""Intervals of new responses against simulated draws, and the robust covariance of small samples."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose
from statsmodels.genmod import families

import fedstat as fs
from fedstat.errors import NotAvailableError


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    mean = np.exp(0.5 + 0.4 * x)
    return pd.DataFrame(
        {
            "site": rng.choice(list("ABC"), n),
            "x": x,
            "count": rng.poisson(mean),
            "many": rng.poisson(40.0 * mean),
            "cost": rng.gamma(2.0, mean / 2.0),
            "over": rng.poisson(mean * rng.gamma(2.0, 0.5, n)),
            "normal": 1.0 + x + rng.normal(size=n) * (0.5 + np.abs(x)),
            "event": rng.integers(0, 2, n),
        }
    )


def fitted(response, family, frame):
    partition = fs.ClientPartition.from_frame(frame, by="site")
    return fs.FederatedGLM.from_formula(f"{response} ~ x", partition, family=family).fit()


CASES = {
    "count": families.Poisson(),
    "over": families.NegativeBinomial(alpha=0.5),
    "cost": families.Gamma(link=families.links.Log()),
    "normal": families.Gaussian(),
}


@pytest.mark.parametrize("response", CASES)
def test_intervals_of_responses_are_quantiles_of_draws(response):
    """Coefficients are drawn from their distribution, and responses given each."""
    result = fitted(response, CASES[response], rows(80))
    new, rng = pd.DataFrame({"x": [-1.0, 0.3, 2.0]}), np.random.default_rng(1)
    found = result.predict(new, interval="prediction", alpha=0.1)
    beta = rng.multivariate_normal(result.params, result.cov_params(), size=100_000)
    if result.df_inference is not None:
        mean = result.params.to_numpy()
        beta = mean + (beta - mean) / np.sqrt(
            rng.chisquare(result.df_inference, (100_000, 1)) / result.df_inference
        )
    for k, x in enumerate(new["x"]):
        mu = result.family.link.inverse(beta @ [1.0, x])
        y = result.family.get_distribution(mu, result.scale).rvs(random_state=rng)
        draws = np.quantile(y, [0.05, 0.95])
        assert_allclose(
            found.iloc[k, 1:], draws, atol=0.02 * (draws[1] - draws[0]) + (response in ("count", "over"))
        )
    if response in ("count", "over"):
        assert (found[["conf_low", "conf_high"]] % 1.0 == 0.0).all(axis=None)


@pytest.mark.slow
def test_intervals_of_new_counts_cover():
    result, new = fitted("many", families.Poisson(), rows(100)), rows(20_000, seed=2)
    limits = result.predict(new, interval="prediction")
    assert 0.94 < new["many"].between(limits["conf_low"], limits["conf_high"]).mean() < 0.97


def test_confidence_intervals_are_those_of_statsmodels():
    frame, new = rows(200), pd.DataFrame({"x": [0.0, 1.0, np.nan]})
    ours = fitted("count", families.Poisson(), frame).predict(new, interval="confidence")
    theirs = smf.glm("count ~ x", frame, family=sm.families.Poisson()).fit().get_prediction(new.dropna())
    assert_allclose(ours.iloc[:2, 1:], theirs.summary_frame().iloc[:, 2:], rtol=1e-6)
    assert ours.iloc[2].isna().all()


def test_binary_responses_have_no_intervals_of_their_own():
    result = fitted("event", families.Binomial(), rows(200))
    with pytest.raises(NotAvailableError, match="the response is binary"):
        result.predict(pd.DataFrame({"x": [0.0]}), interval="prediction")
    scaled = fs.ClientPartition.from_frame(rows(200), by="site")
    scaled = fs.FederatedGLM.from_formula("count ~ x", scaled, family=families.Poisson()).fit(scale="X2")
    with pytest.raises(NotAvailableError, match="with this scale"):
        scaled.predict(pd.DataFrame({"x": [0.0]}), interval="prediction")


@pytest.mark.parametrize(("n", "kind"), [(240, "HC3"), (250, "HC1")])
def test_robust_errors_depend_on_the_number_of_rows(n, kind):
    frame = rows(n)
    model = fs.FederatedOLS.from_formula("normal ~ x", fs.ClientPartition.from_frame(frame, by="site"))
    result = model.fit(cov_type="robust")
    assert result.cov_type == kind
    assert_allclose(result.bse, smf.ols("normal ~ x", frame).fit(cov_type=kind).bse, rtol=1e-9)
    notes = model.fit(cov_type="HC1").notes
    assert any("use cov_type='HC3'" in note for note in notes) == (n < 250)


@pytest.mark.filterwarnings("ignore:column .x.")
def test_few_clusters_name_the_bootstrap_only_where_it_runs():
    """Without the sites' own fits, the parts of masked sums are not known."""
    model = fs.FederatedOLS.from_formula("normal ~ x", fs.ClientPartition.from_frame(rows(200), by="site"))
    by_site = {"cov_type": "cluster", "cov_kwds": {"groups": "site"}}
    named = model.fit(**by_site)
    assert any("wild_cluster_bootstrap()" in note for note in named.notes)
    assert 0.0 <= named.wild_cluster_bootstrap("x = 0", reps=99, seed=1).pvalue <= 1.0
    masked = model.fit(local=False, **by_site)
    assert not any("wild_cluster_bootstrap()" in note for note in masked.notes)
    with pytest.raises(NotAvailableError, match=r"fit with local=True\. Or fit with masked=False"):
        masked.wild_cluster_bootstrap("x = 0")
    unmasked = model.fit(masked=False, local=False, **by_site)
    assert any("wild_cluster_bootstrap()" in note for note in unmasked.notes)
    assert 0.0 <= unmasked.wild_cluster_bootstrap("x = 0", reps=99, seed=1).pvalue <= 1.0
