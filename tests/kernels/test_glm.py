"""Sums over rows against statsmodels' GLM on the same rows."""

import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from statsmodels.genmod import families
from statsmodels.genmod.families import links

from fedstat.kernels.glm import sums as glm
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.effects import outer_products
from fedstat.kernels.glm.sums import (
    PIECE,
    Rows,
    check_response,
    evaluate,
    log_likelihood,
    null_sums,
)

pytestmark = pytest.mark.filterwarnings("ignore:The .* link function does not respect")

CASES = [  # family, and a range of linear predictors that it allows
    (families.Binomial(), -2, 2),
    (families.Binomial(links.Probit()), -1.5, 1.5),
    (families.Binomial(links.Cauchy()), -2, 2),
    (families.Binomial(links.CLogLog()), -2, 1),
    (families.Binomial(links.LogLog()), -1, 2),
    (families.Binomial(links.Log()), -2, -0.1),
    (families.Binomial(links.LogC()), -2, -0.1),
    (families.Binomial(links.Identity()), 0.1, 0.9),
    (families.Poisson(), -2, 3),
    (families.Poisson(links.Identity()), 0.5, 5),
    (families.Poisson(links.Sqrt()), 0.5, 3),
    (families.NegativeBinomial(alpha=0.7), -2, 3),
    (families.NegativeBinomial(links.Identity(), alpha=0.7), 0.5, 4),
    (families.NegativeBinomial(links.NegativeBinomial(alpha=0.7), alpha=0.7), -2, -0.2),
    (families.NegativeBinomial(links.Power(power=0.4), alpha=0.7), 0.5, 2),
    (families.Gamma(), 0.3, 2),
    (families.Gamma(links.Log()), -2, 2),
    (families.Gamma(links.Identity()), 0.5, 4),
    (families.InverseGaussian(), 0.3, 2),
    (families.InverseGaussian(links.InversePower()), 0.3, 2),
    (families.InverseGaussian(links.Log()), -1, 1),
    (families.Gaussian(), -2, 2),
    (families.Gaussian(links.Log()), -1, 1),
    (families.Gaussian(links.InversePower()), 0.3, 2),
    (families.Gaussian(links.Logit(), check_link=False), -2, 2),
    (families.Tweedie(var_power=1.5), -1, 2),
    (families.Tweedie(var_power=1.5, eql=True), -1, 2),
    (families.Tweedie(links.Power(power=-0.5), var_power=1.5), 0.4, 2),
    (families.Tweedie(var_power=1.0), -1, 2),
    (families.Tweedie(var_power=2.0), -1, 2),
    (families.Tweedie(var_power=2.7), -1, 1),
    (families.Tweedie(links.Identity(), var_power=0.0), -1, 1),
]
WEIGHTS = ["none", "freq", "var", "offset", "all", "trials"]


def draw(family, low, high, weights, n=60):
    """Rows whose linear predictors are within the range at the coefficients that come with them."""
    generator = np.random.default_rng(5)
    X = np.column_stack([np.ones(n), generator.random((n, 2))])
    beta = np.array([low, 0.45 * (high - low), 0.45 * (high - low)])
    offset = 0.05 * (high - low) * generator.random(n) if weights in ("offset", "all") else None
    mu = family.link.inverse(X @ beta + (0.0 if offset is None else offset))
    trials = generator.integers(1, 9, size=n).astype(float) if weights == "trials" else None
    if isinstance(family, families.Binomial):
        y = generator.binomial(1 if trials is None else trials.astype(int), mu) / (
            1.0 if trials is None else trials
        )
    elif isinstance(family, families.Poisson | families.NegativeBinomial):
        y = generator.poisson(mu).astype(float)
    else:
        y = mu * generator.gamma(5.0, 0.2, size=n)
    freq = generator.integers(1, 4, size=n).astype(float) if weights in ("freq", "all") else None
    var = 0.5 + generator.random(n) if weights in ("var", "all") else None
    return Rows(X, y, offset, freq, var, trials), beta


def statsmodels_glm(rows, family):
    keys = {"offset": rows.offset, "freq_weights": rows.freq, "var_weights": rows.var}
    keys = {key: value for key, value in keys.items() if value is not None}
    endog = rows.y
    if rows.trials is not None:
        endog = np.column_stack([rows.y * rows.trials, (1.0 - rows.y) * rows.trials])
    return sm.GLM(endog, rows.X, family=family, **keys)


def cases():
    for family, low, high in CASES:
        for weights in WEIGHTS:
            if weights != "trials" or isinstance(family, families.Binomial):
                yield pytest.param(family, low, high, weights, id=f"{DistributionSpec.of(family)}-{weights}")


def close(ours, theirs, rtol=1e-10):
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * np.max(np.abs(theirs)))


@pytest.mark.parametrize("family, low, high, weights", list(cases()))
def test_sums_are_those_of_statsmodels(family, low, high, weights):
    rows, beta = draw(family, low, high, weights)
    spec = DistributionSpec.of(family)
    beta = beta * [1.0, 0.97, 0.98]
    model = statsmodels_glm(rows, spec.make())
    chunks = [rows.part(slice(0, 20)), rows.part(slice(20, None))]
    sums = evaluate(chunks, beta, spec, observed=True)
    scores = model.score_obs(beta, scale=1.0)
    mu = model.predict(beta)
    close(sums.score, model.score(beta, scale=1.0))
    close(sums.information, -model.hessian(beta, scale=1.0, observed=False))
    close(sums.observed, -model.hessian(beta, scale=1.0, observed=True))
    xu = scores / np.sqrt(model.freq_weights)[:, None]
    close(outer_products(chunks, beta, spec), xu.T @ xu)
    close(sums.deviance, model.family.deviance(model.endog, mu, model.var_weights, model.freq_weights))
    chi2 = (model.endog - mu) ** 2 / model.family.variance(mu) * model.iweights * model.n_trials
    close(sums.pearson, chi2.sum())
    close(log_likelihood([rows], beta, spec, 1.3), model.loglike(beta, scale=1.3))
    assert (sums.n, sums.weight) == (60, model.freq_weights.sum())


@pytest.mark.parametrize("family, low, high, weights", list(cases()))
def test_the_first_estimate_is_that_of_irls(family, low, high, weights):
    rows, _ = draw(family, low, high, weights)
    spec = DistributionSpec.of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = statsmodels_glm(rows, spec.make()).fit(maxiter=1, wls_method="qr").params
    sums = evaluate([rows], None, spec)
    close(np.linalg.solve(sums.information, sums.score), first, 1e-9)


@pytest.mark.parametrize(
    "family, low, high", [case for case in CASES if case[0].__class__ is not None][:24:3]
)
@pytest.mark.parametrize("weights", ["none", "all"])
def test_sums_at_the_optimum(family, low, high, weights):
    rows, _ = draw(family, low, high, weights, n=300)
    spec = DistributionSpec.of(family)
    result = statsmodels_glm(rows, spec.make()).fit(tol=1e-14, maxiter=200, cov_type="HC0")
    sums = evaluate([rows], result.params, spec, observed=True)
    np.testing.assert_allclose(sums.score, 0.0, atol=1e-5)
    close(sums.deviance, result.deviance)
    close(sums.pearson, result.pearson_chi2)
    close(log_likelihood([rows], result.params, spec, result.scale), result.llf_scaled(result.scale))
    bread = np.linalg.inv(sums.observed)
    close(bread @ outer_products([rows], result.params, spec) @ bread, result.cov_params(), 1e-8)


@pytest.mark.parametrize("family", [families.Binomial(), families.Poisson(), families.Gaussian()])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_loops_and_the_general_way_agree(family, weights, monkeypatch):
    if weights == "trials" and not isinstance(family, families.Binomial):
        pytest.skip("no trials")
    rows, beta = draw(family, -1.0, 1.0, weights, n=1000)
    fused = evaluate([rows], beta, DistributionSpec.of(family))
    monkeypatch.setattr(DistributionSpec, "loop", None)
    general = evaluate([rows], beta, DistributionSpec.of(family))
    for name in ("n", "weight", "score", "information", "deviance", "pearson"):
        close(getattr(fused, name), getattr(general, name), 1e-12)


@pytest.mark.parametrize("p", [1, 2, 4, 5, 9, 33])
def test_any_number_of_columns(p):
    generator = np.random.default_rng(p)
    X, y, w = generator.normal(size=(500, p)), generator.normal(size=500), generator.normal(size=500)
    s, S = glm.weighted_sums(X, y, w)
    close(s, X.T @ y, 1e-12)
    close(S, (X.T * w) @ X, 1e-12)
    close(
        evaluate([Rows(X, y)], np.ones(p), DistributionSpec("Gaussian", "Identity")).information,
        X.T @ X,
        1e-12,
    )


@pytest.mark.parametrize("link", ["Logit", "Probit"])
def test_the_number_of_threads_changes_no_bit(link, monkeypatch):
    generator = np.random.default_rng(1)
    n = 3 * PIECE + 11
    X, y = generator.normal(size=(n, 3)), generator.integers(0, 2, size=n)
    sums = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(glm.config, "NUMBA_NUM_THREADS", threads)
        sums.append(evaluate([Rows(X, y)], np.array([0.1, 0.2, 0.3]), DistributionSpec("Binomial", link)))
    for other in sums[1:]:
        assert (other.deviance, other.pearson) == (sums[0].deviance, sums[0].pearson)
        np.testing.assert_array_equal(other.score, sums[0].score)
        np.testing.assert_array_equal(other.information, sums[0].information)


def test_the_null_model_is_the_intercept_alone():
    rows, _ = draw(families.Poisson(), -1.0, 2.0, "all")
    spec = DistributionSpec("Poisson", "Log")
    null = replace(rows, X=np.ones((60, 1)))
    model = statsmodels_glm(null, spec.make())
    ours = null_sums([rows], 0.4, spec, 1.0)
    mu = model.predict([0.4])
    close(ours.score, model.score([0.4], scale=1.0)[0])
    close(ours.information, -model.hessian([0.4], scale=1.0, observed=False)[0, 0])
    close(ours.deviance, model.family.deviance(model.endog, mu, model.var_weights, model.freq_weights))
    close(ours.log_likelihood, model.loglike([0.4], scale=1.0))


@pytest.mark.parametrize(
    "family, beta",
    [
        (families.Poisson(links.Identity()), [1.0, -2.0]),
        (families.Poisson(links.Sqrt()), [1.0, -2.0]),
        (families.Poisson(), [0.0, 1000.0]),
        (families.Gamma(), [1.0, -2.0]),
        (families.InverseGaussian(), [1.0, -2.0]),
        (families.NegativeBinomial(links.NegativeBinomial(alpha=1.0), alpha=1.0), [-1.0, 2.0]),
        (families.Binomial(links.Log()), [-1.0, 2.0]),
        (families.Binomial(links.LogC()), [-1.0, 2.0]),
        (families.Binomial(links.Identity()), [0.5, 1.0]),
        (families.Gaussian(), [0.0, 1e200]),
        (families.Tweedie(links.Power(power=0.5), var_power=1.5), [1.0, -2.0]),
    ],
    ids=lambda value: str(DistributionSpec.of(value)) if isinstance(value, families.Family) else "",
)
def test_a_mean_outside_the_domain_is_an_infinite_deviance(family, beta):
    X = np.column_stack([np.ones(50), np.linspace(0, 1, 50)])
    rows = Rows(X, np.full(50, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = evaluate([rows], np.array(beta), DistributionSpec.of(family), observed=True)
        assert outer_products([rows], np.array(beta), DistributionSpec.of(family)) is None
        fused = evaluate([rows], np.array(beta), DistributionSpec.of(family))
        assert log_likelihood([rows], np.array(beta), DistributionSpec.of(family), 1.0) == -np.inf
    assert sums.deviance == fused.deviance == np.inf
    assert not sums.score.any() and not sums.information.any() and not fused.information.any()


@pytest.mark.parametrize("link", ["Logit", "Probit", "CLogLog", "LogLog", "Cauchy"])
def test_a_probability_of_one_by_rounding_is_allowed(link):
    rows = Rows(np.array([[40.0], [-40.0], [800.0]]), np.array([1.0, 0.0, 1.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = evaluate([rows], np.array([1.0]), DistributionSpec("Binomial", link))
    assert np.isfinite([sums.deviance, sums.score[0], sums.information[0, 0]]).all()


@pytest.mark.parametrize(
    "link, beta, y, expected",
    [("Logit", 50.0, 1.0, 2 * np.exp(-50.0)), ("Logit", 50.0, 0.0, 100.0), ("Log", -900.0, 0.0, 0.0)],
)
def test_the_deviance_keeps_its_digits_far_out(link, beta, y, expected):
    family = DistributionSpec("Binomial" if link == "Logit" else "Poisson", link)
    sums = evaluate([Rows(np.ones((1, 1)), np.array([y]))], np.array([beta]), family)
    np.testing.assert_allclose(sums.deviance, expected, rtol=1e-12, atol=1e-290)


def test_rows_without_events_still_start():
    sums = evaluate([Rows(np.ones((9, 1)), np.zeros(9))], None, DistributionSpec("Poisson", "Log"))
    assert np.isfinite(sums.score).all() and sums.information[0, 0] > 0.0


def test_a_row_of_frequency_zero_is_not_there():
    rows, beta = draw(families.Gamma(links.Log()), -1.0, 1.0, "none")
    spec = DistributionSpec("Gamma", "Log")
    freq = np.arange(60) % 2.0
    zeros, ones = replace(rows, freq=freq), rows.part(slice(1, None, 2))
    with_zeros, without = (evaluate([part], beta, spec, observed=True) for part in (zeros, ones))
    close(outer_products([zeros], beta, spec), outer_products([ones], beta, spec), 1e-12)
    assert with_zeros.weight == without.weight == 30
    for name in ("score", "information", "observed", "deviance", "pearson"):
        close(getattr(with_zeros, name), getattr(without, name), 1e-12)


def test_an_empty_chunk_adds_nothing_and_no_chunk_is_an_error():
    rows, beta = draw(families.Poisson(), -1.0, 1.0, "freq")
    spec = DistributionSpec("Poisson", "Log")
    for start in (beta, None):
        empty = rows.part(slice(0, 0))
        both = evaluate([empty, rows, empty], start, spec, center=1.0)
        close(both.score, evaluate([rows], start, spec, center=1.0).score, 1e-15)
    with pytest.raises(ValueError, match="no chunk"):
        evaluate([], beta, spec)


def test_the_type_and_order_of_the_arrays_do_not_matter():
    rows, beta = draw(families.Poisson(), -1.0, 1.0, "freq")
    spec = DistributionSpec("Poisson", "Log")
    other = Rows(np.asfortranarray(rows.X), rows.y.astype(int), freq=rows.freq.astype(np.int32))
    other.X.flags.writeable = False
    close(evaluate([other], list(beta), spec).information, evaluate([rows], beta, spec).information, 1e-15)
    close(outer_products([other], np.array(beta), spec), outer_products([rows], beta, spec), 1e-15)


@pytest.mark.parametrize("link", ["Logit", "Probit"])
def test_no_copy_of_the_design_is_made(link):
    generator = np.random.default_rng(1)
    X, y = generator.normal(size=(400_000, 30)), generator.integers(0, 2, size=400_000) * 1.0
    evaluate([Rows(X[:9], y[:9])], np.zeros(30), DistributionSpec("Binomial", link))
    tracemalloc.start()
    evaluate([Rows(X, y)], np.zeros(30), DistributionSpec("Binomial", link))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < X.nbytes / 8


@pytest.mark.parametrize(
    "family, y, phrase",
    [
        (families.Binomial(), [0, 0.3, 1, 1.2, -1, np.nan], "3 rows with a response outside 0 to 1"),
        (families.Poisson(), [0, 1.5, -1], "1 row with a response that is negative or not finite"),
        (families.NegativeBinomial(alpha=1.0), [np.inf, 2], "1 row with a response that is neg"),
        (families.Gamma(), [0, 1, -3], "2 rows with a response that is not positive"),
        (families.InverseGaussian(), [0.0, np.nan], "2 rows with a response that is not positive"),
        (families.Gaussian(), [0, -1, np.nan], "1 row with a response that is not finite"),
        (families.Tweedie(var_power=1.5), [0, -1, 2], "1 row with a response that is negative"),
        (families.Tweedie(var_power=2.5), [0, -1, 2], "2 rows with a response that is not positive"),
        (families.Poisson(), [0, 1, 2], ""),
        (families.Gaussian(), [-1, 0, 2], ""),
    ],
)
def test_a_response_outside_the_domain_is_counted(family, y, phrase):
    rows = Rows(np.ones((len(y), 1)), np.array(y, dtype=float))
    said = check_response(rows, DistributionSpec.of(family))
    assert said.startswith(phrase) if phrase else said == ""
