"""Alpha by maximum likelihood against statsmodels' NegativeBinomial on the stacked table."""

import numpy as np
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import partition, table

import fedstat as fs
from fedstat.errors import EstimationError, ModelError

FRAME = table(n=800, seed=3)


def fit(frame=FRAME, response="over", **arguments):
    model = fs.FederatedGLM.from_formula(
        f"{response} ~ x + C(g)", partition(frame), family=sm.families.NegativeBinomial(alpha=1.0)
    )
    return model.fit(**({"dispersion": "ml", "local": False} | arguments))


def test_alpha_and_standard_errors_are_those_of_the_stacked_table():
    ours = fit()
    X = model_matrix("x + C(g)", FRAME)
    theirs = sm.NegativeBinomial(FRAME["over"].to_numpy(), np.asarray(X)).fit(
        disp=0, method="newton", maxiter=200, tol=1e-14
    )
    np.testing.assert_allclose(np.append(ours.params, ours.overdispersion.alpha), theirs.params, rtol=1e-7)
    np.testing.assert_allclose(np.append(ours.bse, ours.overdispersion.std_error), theirs.bse, rtol=1e-6)
    np.testing.assert_allclose([ours.llf, ours.aic], [theirs.llf, theirs.aic], rtol=1e-9)
    assert "Alpha was estimated" in str(ours.summary())


def test_the_maximum_does_not_depend_on_the_first_alpha():
    model = fs.FederatedGLM.from_formula(
        "over ~ x + C(g)", partition(FRAME), family=sm.families.NegativeBinomial(alpha=20.0)
    )
    assert model.fit(dispersion="ml").overdispersion.alpha == pytest.approx(
        fit().overdispersion.alpha, rel=1e-8
    )


def test_counts_that_are_not_overdispersed_are_named():
    frame = FRAME.assign(even=np.random.default_rng(1).binomial(9, 0.4, len(FRAME)))
    with pytest.raises(EstimationError, match="use family Poisson"):
        fit(frame, "even")


def test_alpha_is_refused_where_it_has_no_meaning():
    model = fs.FederatedGLM.from_formula("count ~ x", partition(FRAME), family=sm.families.Poisson())
    with pytest.raises(ModelError, match="NegativeBinomial"):
        model.fit(dispersion="ml")
    with pytest.raises(ModelError, match="nonrobust"):
        fit(cov_type="HC0")


# -- what the summary says -------------------------------------------------------------------------


def words(response, family, **arguments):
    roles = {name: arguments.pop(name) for name in ("exposure",) if name in arguments}
    model = fs.FederatedGLM.from_formula(f"{response} ~ x + C(g)", partition(FRAME), family=family, **roles)
    summary = model.fit(**arguments).summary()
    return summary.as_text().splitlines()[0], " ".join(summary.notes)


def test_overdispersed_counts_are_reported_in_the_first_line():
    X = np.asarray(model_matrix("x + C(g)", FRAME))
    pooled = sm.GLM(FRAME["over"].to_numpy(), X, family=sm.families.Poisson()).fit()
    ratio = pooled.pearson_chi2 / pooled.df_resid
    first, notes = words("over", sm.families.Poisson())
    assert f"OVERDISPERSED: Pearson chi2 / df = {ratio:.2f}" in first
    for remedy in ('NegativeBinomial() and dispersion="ml"', 'cov_type="HC1"', 'scale="X2"'):
        assert remedy in notes


@pytest.mark.parametrize("remedy", [{"cov_type": "HC1"}, {"scale": "X2"}])
def test_remedies_silence_the_first_line(remedy):
    first, notes = words("over", sm.families.Poisson(), **remedy)
    assert "OVERDISPERSED" not in first
    assert ("These standard errors allow for it" in notes) == ("cov_type" in remedy)
    assert "OVERDISPERSED" not in fit().summary().as_text()


@pytest.mark.parametrize(
    ("response", "family", "roles"),
    [
        ("count", sm.families.Poisson(), {"exposure": "days"}),
        ("cbind(events, n - events)", sm.families.Binomial(), {}),
        ("binary", sm.families.Binomial(), {}),
        ("rare", sm.families.Poisson(), {}),
    ],
)
def test_data_of_the_model_raise_no_alarm(response, family, roles):
    """Rare counts have a Pearson's statistic of large variance, 2 + 1 / mean for each."""
    FRAME["rare"] = np.random.default_rng(6).poisson(0.03, len(FRAME))
    first, notes = words(response, family, **roles)
    assert "OVERDISPERSED" not in first
    assert "The response varies" not in notes


def test_events_that_vary_more_than_binomial_are_reported():
    rng = np.random.default_rng(2)
    shares = rng.beta(2, 3, len(FRAME))
    FRAME["many"] = rng.binomial(FRAME["n"].to_numpy() + 10, shares)
    first, notes = words("cbind(many, n + 10 - many)", sm.families.Binomial())
    assert "OVERDISPERSED" in first and "quasi-likelihood" in notes
