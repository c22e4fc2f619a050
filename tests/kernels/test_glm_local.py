"""The fit of one site's rows against statsmodels, and what hinders it."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import optimize
from statsmodels.genmod import families
from statsmodels.genmod.families import links

from fedstat.kernels.glm import local_fit as glm_local
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.local_fit import fit_local, survey_rows
from fedstat.kernels.glm.sums import Rows

pytestmark = pytest.mark.filterwarnings("ignore:The .* link function does not respect")

LOGISTIC = DistributionSpec("Binomial", "Logit")


@pytest.fixture
def generator():
    return np.random.default_rng(3)


@pytest.fixture(name="U")
def uniform(generator):
    return np.column_stack([np.ones(400), generator.random((400, 2))])


def response(family, mu, generator):
    if isinstance(family, families.Binomial):
        return (generator.random(len(mu)) < mu) * 1.0
    if isinstance(family, families.Poisson | families.NegativeBinomial):
        return generator.poisson(mu) * 1.0
    if isinstance(family, families.Gaussian):
        return mu + 0.1 * generator.normal(size=len(mu))
    return mu * generator.gamma(4.0, 0.25, size=len(mu))


def quietly(X, y, family, **columns):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fit_local(lambda: [Rows(X, y, **columns)], family)


@pytest.mark.parametrize(
    "family, beta",
    [
        (families.Binomial(), [-1.0, 2.0, 1.0]),
        (families.Binomial(links.Cauchy()), [-1.0, 2.0, 1.0]),
        (families.Binomial(links.CLogLog()), [-2.0, 2.0, 1.0]),
        (families.Binomial(links.Log()), [-1.5, 0.4, 0.4]),
        (families.Binomial(links.Identity()), [0.1, 0.4, 0.3]),
        (families.Poisson(), [-1.0, 2.0, 1.0]),
        (families.Poisson(), [9.0, 2.0, 1.0]),
        (families.Poisson(links.Identity()), [0.05, 3.0, 2.0]),
        (families.Poisson(links.Sqrt()), [0.05, 3.0, 2.0]),
        (families.NegativeBinomial(alpha=0.5), [-1.0, 2.0, 1.0]),
        (families.Gamma(), [0.05, 3.0, 2.0]),
        (families.Gamma(links.Log()), [5.0, 3.0, 2.0]),
        (families.InverseGaussian(), [0.05, 3.0, 2.0]),
        (families.Gaussian(), [1e6, 3.0, 2.0]),
        (families.Gaussian(links.InversePower()), [1.0, 1.0, 2.0]),
        (families.Tweedie(var_power=1.6), [0.0, 1.0, 2.0]),
    ],
    ids=lambda value: str(DistributionSpec.of(value)) if isinstance(value, families.Family) else "",
)
def test_the_estimate_is_that_of_statsmodels(family, beta, U, generator):
    y = response(family, family.link.inverse(U @ beta), generator)
    fit = quietly(U, y, DistributionSpec.of(family))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = sm.GLM(y, U, family=family).fit(start_params=fit.beta, tol=1e-13, maxiter=300)
    assert fit.converged and not fit.problem
    errors = np.sqrt(np.diag(np.linalg.inv(fit.information)) * theirs.scale)
    np.testing.assert_allclose(fit.beta / errors, theirs.params / errors, atol=1e-4)
    np.testing.assert_allclose(errors, theirs.bse, rtol=1e-4)
    np.testing.assert_allclose(fit.deviance, theirs.deviance, rtol=1e-9)
    np.testing.assert_allclose(fit.pearson, theirs.pearson_chi2, rtol=1e-4)


def test_canonical_estimates_agree_to_many_digits(U, generator):
    y = response(families.Binomial(), 1 / (1 + np.exp(1 - 2 * U[:, 1])), generator)
    freq, offset = generator.integers(1, 5, size=400) * 1.0, generator.random(400)
    fit = quietly(U, y, LOGISTIC, freq=freq, offset=offset)
    theirs = sm.GLM(y, U, family=families.Binomial(), freq_weights=freq, offset=offset).fit(tol=1e-14)
    np.testing.assert_allclose(fit.beta, theirs.params, rtol=1e-10)


def test_many_rows_need_few_passes(generator, monkeypatch):
    monkeypatch.setattr(glm_local, "SUBSAMPLE", 2000)
    X = np.column_stack([np.ones(50_000), generator.normal(size=(50_000, 4))])
    y = response(families.Binomial(), 1 / (1 + np.exp(3 - X[:, 1] - X[:, 2])), generator)
    chunks = [Rows(X[:20_001], y[:20_001]), Rows(X[20_001:], y[20_001:])]
    fit = fit_local(lambda: iter(chunks), LOGISTIC)
    monkeypatch.setattr(glm_local, "SUBSAMPLE", 10**9)
    complete = fit_local(lambda: iter(chunks), LOGISTIC)
    np.testing.assert_allclose(fit.beta, complete.beta, rtol=1e-10)
    assert fit.passes <= 4 < complete.passes
    np.testing.assert_allclose(fit.information, complete.information, rtol=1e-7)


@pytest.mark.parametrize("most, step", [(25, 1), (12, 4), (5, 8)])
def test_the_subsample_is_every_step_th_row_across_chunks(most, step, generator, monkeypatch):
    monkeypatch.setattr(glm_local, "SUBSAMPLE", most)
    monkeypatch.setattr(glm_local, "ROWS_PER_COLUMN", 1)
    X, y, freq = generator.random((50, 2)), generator.random(50), np.arange(50.0)
    for cuts in ([0, 50], [0, 1, 13, 13, 20, 50], range(51)):
        rows = survey_rows(Rows(X, y, freq=freq).part(slice(*cut)) for cut in pairwise(cuts))
        assert (rows.n, rows.p, rows.step) == (50, 2, step)
        np.testing.assert_array_equal(rows.sample.freq, np.arange(0.0, 50.0, step))
        np.testing.assert_array_equal(rows.sample.X, X[::step])
        np.testing.assert_allclose(rows.size, np.sqrt((X**2).mean(axis=0)))
        assert rows.sample.offset is None and not np.shares_memory(rows.sample.X, X)


@pytest.mark.parametrize("link", ["Logit", "Probit", "CLogLog", "LogLog", "Cauchy"])
@pytest.mark.parametrize("complete", [True, False])
def test_separation_is_named(link, complete, U, generator):
    X = np.column_stack([U, U[:, 1] > 0.8])
    y = np.where(X[:, 3] == 1, 1.0, 0.0 if complete else generator.integers(0, 2, size=400))
    fit = quietly(X, y, DistributionSpec("Binomial", link))
    assert not fit.converged and fit.problem == "separated"


def test_a_group_without_events_is_named(U, generator):
    X = np.column_stack([U, U[:, 1] > 0.8])
    y = np.where(X[:, 3] == 1, 0.0, generator.poisson(2.0, size=400))
    assert quietly(X, y, DistributionSpec("Poisson", "Log")).problem == "separated"
    assert quietly(X, np.zeros(400), DistributionSpec("Poisson", "Log")).problem == "separated"
    assert quietly(X, np.ones(400), LOGISTIC).problem == "separated"


def test_one_event_in_a_thousand_is_not_separation(generator):
    X = np.column_stack([np.ones(5000), np.arange(5000) % 2])
    y = (np.arange(5000) < 4) * 1.0
    fit = quietly(X, y, LOGISTIC)
    assert fit.converged
    np.testing.assert_allclose(fit.beta[0], np.log(2 / 2498), rtol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_dependent_columns_are_named_and_the_unit_does_not_matter(scale, U, generator):
    y = generator.integers(0, 2, size=400) * 1.0
    X = np.column_stack([U, U[:, 1] - U[:, 2]]) * [1.0, scale, 1.0, scale]
    fit = quietly(X, y, LOGISTIC)
    assert not fit.converged and fit.problem == "information is singular"
    assert quietly(X[:, :3], y, LOGISTIC).converged
    assert quietly(np.column_stack([U, np.zeros(400)]), y, LOGISTIC).problem == "information is singular"


@pytest.mark.parametrize("n", [0, 2])
def test_too_few_rows_are_named(n, U):
    fit = quietly(U[:n], np.ones(n), LOGISTIC)
    assert not fit.converged and fit.problem == "fewer rows than columns"


def test_no_chunk_is_no_rows():
    assert fit_local(lambda: [], LOGISTIC).problem == "fewer rows than columns"


def test_as_many_rows_as_columns_are_fitted_exactly(U):
    fit = quietly(U[:3], np.array([1.0, 5.0, 2.0]), DistributionSpec("Gaussian", "Identity"))
    assert fit.converged
    np.testing.assert_allclose(U[:3] @ fit.beta, [1.0, 5.0, 2.0], rtol=1e-10)


def test_a_perfect_line_converges(U):
    fit = quietly(U, U @ [1.0, 2.0, 3.0], DistributionSpec("Gaussian", "Identity"))
    assert fit.converged
    np.testing.assert_allclose(fit.beta, [1.0, 2.0, 3.0], rtol=1e-12)


def test_an_estimate_of_zero_converges():
    fit = quietly(np.ones((10, 1)), np.arange(10) % 2 * 1.0, LOGISTIC)
    assert fit.converged and abs(fit.beta[0]) < 1e-12


def test_iterations_that_run_out_are_reported(U, generator):
    y = generator.poisson(np.exp(U @ [1.0, 2.0, 1.0])) * 1.0
    fit = fit_local(lambda: [Rows(U, y)], DistributionSpec("Poisson", "Log"), maxiter=1)
    assert not fit.converged and "1 iteration" in fit.problem


def minus_llf(X, y, beta):
    """Log-likelihood of a Poisson model with identity link, without its constant."""
    mu = X @ beta
    return np.sum(mu - y * np.log(mu)) if (mu > 0).all() else np.inf


@pytest.mark.parametrize("seed", range(20))
def test_halving_leads_to_the_optimum_or_to_the_edge_of_the_domain(seed):
    """A Poisson mean that is linear and nearly zero at one end: some estimates lie on the edge."""
    generator = np.random.default_rng(seed)
    x = np.linspace(0, 1, 200)
    X = np.column_stack([np.ones(200), x])
    y = generator.poisson(0.05 + 3 * x) * 1.0
    fit = quietly(X, y, DistributionSpec("Poisson", "Identity"))
    ends = [
        optimize.minimize_scalar(lambda b, a=a: minus_llf(X, y, [a, b]), bounds=(1e-9, 9), method="bounded")
        for a in (1e-7, 1e-3)
    ]
    on_the_edge = ends[0].fun < ends[1].fun
    assert fit.converged == (not on_the_edge) == (not fit.problem)
    assert seed != 2 or "edge" in fit.problem
