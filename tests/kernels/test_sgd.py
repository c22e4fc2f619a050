"""Local descent, against plain numpy loops, statsmodels' scores and numerical minima."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.optimize import approx_fprime, minimize
from scipy.special import expit
from statsmodels.genmod import families
from statsmodels.genmod.families import links

from fedstat.errors import EstimationError
from fedstat.kernels.glm import fedavg
from fedstat.kernels.glm.sums import Rows

FAMILIES = {
    "logit": families.Binomial(),
    "probit": families.Binomial(link=links.Probit()),
    "cloglog": families.Binomial(link=links.CLogLog()),
    "poisson": families.Poisson(),
    "negative binomial": families.NegativeBinomial(alpha=0.7),
    "gamma": families.Gamma(link=links.Log()),
    "inverse gaussian": families.InverseGaussian(link=links.Log()),
    "gaussian": families.Gaussian(),
    "tweedie": families.Tweedie(var_power=1.4),
}
BETA = np.array([0.3, -0.5, 0.4])
RUN = {"epochs": 3, "batch_size": 16, "learning_rate": 0.1}


def mean_gradient(X, y, beta, family, offset=None, weights=None):
    return fedavg._Rows.of(Rows(X, y, offset, weights), family).gradient(beta)


def mean_loss(X, y, beta, family, *, offset=None, weights=None):
    return fedavg.mean_loss(Rows(X, y, offset, weights), beta, family)


def local_sgd(X, y, beta, family, *, rng, offset=None, weights=None, **options):
    return fedavg.local_descent(
        Rows(X, y, offset, weights), beta, family, fedavg.DescentOptions(**options), rng
    )


def local_proximal(X, y, beta, family, *, mu, **options):
    """Coefficients, and the norm of the gradient that they leave, relative to that at the start."""
    w = local_sgd(X, y, beta, family, mu=mu, **options)
    known = {name: options.get(name) for name in ("offset", "weights")}
    left = mean_gradient(X, y, w, family, **known) + mu * (w - beta)
    return w, np.linalg.norm(left) / np.linalg.norm(mean_gradient(X, y, beta, family, **known))


def draw(family, n=203, seed=0):
    """X with an intercept, y from the family (Gamma draws for positive ones), an offset and weights."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(n), rng.normal(size=(n, 2))])
    offset = rng.normal(scale=0.2, size=n)
    mu = family.link.inverse(X @ BETA + offset)
    if isinstance(family, families.Binomial):
        y = (rng.uniform(size=n) < mu).astype(float)
    elif isinstance(family, families.Gaussian):
        y = rng.normal(mu)
    elif isinstance(family, families.Gamma | families.InverseGaussian):
        y = rng.gamma(2.0, mu / 2.0)
    else:
        y = rng.poisson(mu).astype(float)
    return X, y, offset, rng.integers(1, 4, size=n).astype(float)


def run(X, y, family, seed=0, beta=BETA, **arguments):
    return local_sgd(X, y, beta, family, rng=np.random.default_rng(seed), **(RUN | arguments))


@pytest.fixture(scope="module")
def logit():
    family = FAMILIES["logit"]
    X, y, *_ = draw(family)
    return X, y, family


# ---------------------------------------------------------------- loss and gradient


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_is_half_the_mean_deviance(name):
    family = FAMILIES[name]
    X, y, offset, weights = draw(family)
    mu = family.link.inverse(X @ BETA + offset)
    expected = family.deviance(y, mu, freq_weights=weights) / (2.0 * weights.sum())
    loss = mean_loss(X, y, BETA, family, offset=offset, weights=weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_moves_as_the_mean_negative_log_likelihood(name):
    family = FAMILIES[name]
    X, y, offset, _ = draw(family)
    model = sm.GLM(y, X, family=family, offset=offset)
    fall = mean_loss(X, y, 0.5 * BETA, family, offset=offset) - mean_loss(X, y, BETA, family, offset=offset)
    rise = model.loglike(BETA, scale=1.0) - model.loglike(0.5 * BETA, scale=1.0)
    np.testing.assert_allclose(fall, rise / len(y), rtol=1e-9)


def test_loss_of_zeros_and_ones_is_cross_entropy(logit):
    X, y, family = logit
    model = sm.GLM(y, X, family=family)
    np.testing.assert_allclose(mean_loss(X, y, BETA, family), -model.loglike(BETA) / len(y), rtol=1e-12)
    far = 1e4 * BETA
    np.testing.assert_allclose(
        mean_loss(X, y, far, family), np.mean(np.logaddexp(0.0, (1.0 - 2.0 * y) * (X @ far))), rtol=1e-12
    )


def test_loss_of_proportions_is_zero_at_the_proportions():
    y = np.array([0.25, 0.5, 0.75])
    logits = np.log(y / (1.0 - y))
    for family in (FAMILIES["logit"], FAMILIES["probit"]):
        exact = mean_loss(np.eye(3), y, np.asarray(family.link(y)), family, weights=np.array([4.0, 2.0, 8.0]))
        assert abs(exact) < 1e-15
    assert mean_loss(np.eye(3), y, logits + 1.0, FAMILIES["logit"]) > 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_is_the_derivative_of_the_loss(name):
    family = FAMILIES[name]
    X, y, offset, weights = draw(family)
    more = {"offset": offset, "weights": weights}
    gradient = mean_gradient(X, y, BETA, family, **more)
    numerical = approx_fprime(BETA, lambda beta: mean_loss(X, y, beta, family, **more), 1e-7)
    np.testing.assert_allclose(gradient, numerical, atol=2e-6)
    score = sm.GLM(y, X, family=family, offset=offset, freq_weights=weights).score(BETA, scale=1.0)
    np.testing.assert_allclose(gradient, -score / weights.sum(), rtol=1e-9)


@pytest.mark.parametrize("name", ["logit", "poisson"])
def test_a_weight_counts_a_row_so_many_times(name):
    family = FAMILIES[name]
    X, y, offset, weights = draw(family)
    at = np.repeat(np.arange(len(y)), weights.astype(int))
    complete = {"batch_size": None}
    np.testing.assert_allclose(
        run(X, y, family, offset=offset, weights=weights, **complete),
        run(X[at], y[at], family, offset=offset[at], **complete),
        rtol=1e-12,
    )
    np.testing.assert_allclose(
        mean_loss(X, y, BETA, family, offset=offset, weights=weights),
        mean_loss(X[at], y[at], BETA, family, offset=offset[at]),
        rtol=1e-12,
    )


# ---------------------------------------------------------------- FedAvg's client


def plain_sgd(X, y, beta, inverse, slope, offset, epochs, batch_size, learning_rate, rng):
    """Descend as ClientUpdate is printed, for a canonical link up to the factor ``slope(mu)``."""
    w = beta.copy()
    for _ in range(epochs):
        order = rng.permutation(len(y))
        for at in np.split(order, range(batch_size, len(y), batch_size)):
            mu = inverse(X[at] @ w + offset[at])
            w = w - learning_rate * X[at].T @ (slope(mu) * (mu - y[at])) / len(at)
    return w


@pytest.mark.parametrize(
    "name, inverse, slope",
    [
        ("logit", expit, np.ones_like),
        ("poisson", np.exp, np.ones_like),
        ("gamma", np.exp, lambda mu: 1.0 / mu),
    ],
)
def test_descent_is_client_update(name, inverse, slope):
    family = FAMILIES[name]
    X, y, offset, _ = draw(family)
    expected = plain_sgd(X, y, BETA, inverse, slope, offset, rng=np.random.default_rng(5), **RUN)
    np.testing.assert_allclose(run(X, y, family, seed=5, offset=offset), expected, rtol=1e-12)
    assert abs(expected - BETA).max() > 0.01


def test_logistic_fast_path_equals_the_general_one(logit, monkeypatch):
    X, y, family = logit
    fast = run(X, y, family)
    monkeypatch.setattr(fedavg._Rows, "is_logit", False)
    monkeypatch.delattr(fedavg, "_logit_epoch")
    np.testing.assert_allclose(run(X, y, family), fast, rtol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_site_steps_reach_the_estimate_of_statsmodels(name):
    family = FAMILIES[name]
    X, y, offset, weights = draw(family)
    fit = sm.GLM(y, X, family=family, offset=offset, freq_weights=weights).fit(tol=1e-12)
    found = run(
        X, y, family, offset=offset, weights=weights, epochs=3_000, batch_size=None, learning_rate=0.3
    )
    np.testing.assert_allclose(found, fit.params, atol=1e-5)


def test_one_whole_site_step_averages_to_one_pooled_gradient_step():
    family = FAMILIES["poisson"]
    sites = [draw(family, n, seed)[:2] for seed, n in enumerate((50, 120, 80))]
    once = {"epochs": 1, "batch_size": None, "learning_rate": 0.2}
    betas = np.array([run(X, y, family, **once) for X, y in sites])
    X, y = (np.concatenate(parts) for parts in zip(*sites, strict=True))
    score = sm.GLM(y, X, family=family).score(BETA, scale=1.0)
    np.testing.assert_allclose(
        np.average(betas, axis=0, weights=[50.0, 120.0, 80.0]), BETA + 0.2 * score / len(y), rtol=1e-12
    )


@pytest.mark.parametrize("name", ["logit", "poisson"])
def test_rows_are_shuffled_in_every_epoch_by_the_generator(name):
    family = FAMILIES[name]
    X, y, *_ = draw(family)
    np.testing.assert_array_equal(run(X, y, family, seed=3), run(X, y, family, seed=3))
    assert not np.array_equal(run(X, y, family, seed=3), run(X, y, family, seed=4))
    once = run(X, y, family, seed=3, epochs=1)
    again = run(X, y, family, seed=3, beta=once, epochs=1)
    assert not np.array_equal(again, run(X, y, family, seed=3, epochs=2))


@pytest.mark.parametrize("name", ["logit", "poisson"])
def test_the_whole_site_needs_no_randomness_and_nothing_is_changed(name):
    family = FAMILIES[name]
    X, y, *_ = draw(family)
    arrays = [X.copy(), y.copy(), BETA.copy()]
    complete = run(X, y, family, seed=1, batch_size=None)
    np.testing.assert_array_equal(complete, run(X, y, family, seed=2, batch_size=None))
    np.testing.assert_allclose(complete, run(X, y, family, batch_size=10_000), rtol=1e-12)
    for array, before in zip((X, y, BETA), arrays, strict=True):
        np.testing.assert_array_equal(array, before)


def test_arrays_from_a_message_may_be_read_only(logit):
    X, y, family = logit
    frozen = BETA.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(run(X, y, family, beta=frozen), run(X, y, family))


# ---------------------------------------------------------------- FedProx's client


@pytest.mark.parametrize("name", ["logit", "poisson", "gaussian"])
@pytest.mark.parametrize("batch_size", [16, None])
def test_fedprox_without_its_term_is_fedavg_to_the_bit(name, batch_size):
    family = FAMILIES[name]
    X, y, offset, weights = draw(family)
    more = RUN | {"offset": offset, "weights": weights, "batch_size": batch_size}
    w, reached = local_proximal(X, y, BETA, family, mu=0.0, gamma=0.0, rng=np.random.default_rng(7), **more)
    expected = local_sgd(X, y, BETA, family, rng=np.random.default_rng(7), **more)
    assert w.tobytes() == expected.tobytes()
    gradients = [mean_gradient(X, y, at, family, offset=offset, weights=weights) for at in (w, BETA)]
    np.testing.assert_allclose(reached, np.divide(*map(np.linalg.norm, gradients)), rtol=1e-12)


@pytest.mark.parametrize("name", ["logit", "poisson"])
@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_proximal_minimum_is_found(name, mu):
    family = FAMILIES[name]
    X, y, *_ = draw(family)
    anchor = np.array([0.5, 0.5, -0.5])
    w, reached = local_proximal(
        X, y, anchor, family, mu=mu, gamma=1e-10, epochs=5_000, batch_size=None, learning_rate=0.2,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    expected = minimize(lambda w: mean_loss(X, y, w, family) + mu / 2 * sum((w - anchor) ** 2), anchor)
    np.testing.assert_allclose(w, expected.x, atol=1e-5)
    assert reached <= 1e-10


def test_proximal_term_pulls_batches_too(logit):
    X, y, family = logit
    anchor = np.array([1.0, 1.0, 1.0])
    distances = [
        np.linalg.norm(
            local_proximal(X, y, anchor, family, mu=mu, gamma=0.0, rng=np.random.default_rng(0), **RUN)[0]
            - anchor
        )
        for mu in (0.0, 1.0, 5.0)
    ]
    assert distances[0] > 1.2 * distances[1] > 1.44 * distances[2] > 0


@pytest.mark.parametrize("gamma", [0.5, 0.1])
def test_site_stops_at_the_first_epoch_that_is_exact_enough(logit, gamma):
    X, y, family = logit
    anchor, mu, rate = np.zeros(3), 0.5, 0.1
    w, ratio = anchor, 1.0
    start = np.linalg.norm(mean_gradient(X, y, anchor, family))
    while ratio > gamma:
        w = w - rate * (mean_gradient(X, y, w, family) + mu * (w - anchor))
        ratio = np.linalg.norm(mean_gradient(X, y, w, family) + mu * (w - anchor)) / start
    found, reached = local_proximal(
        X, y, anchor, family, mu=mu, gamma=gamma, epochs=1_000, batch_size=None, learning_rate=rate,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    np.testing.assert_allclose(found, w, rtol=1e-10)
    np.testing.assert_allclose(reached, ratio, rtol=1e-8)


# ---------------------------------------------------------------- steps that are too long


@pytest.mark.parametrize("name", ["poisson", "gaussian", "gamma"])
def test_divergence_is_an_error_with_a_remedy(name):
    family = FAMILIES[name]
    X, y, *_ = draw(family)
    with pytest.raises(
        EstimationError,
        match=r"infinite coefficients in epoch.*learning_rate = 1000.*use a smaller learning_rate",
    ):
        run(X, y, family, learning_rate=1_000.0, epochs=100)


@pytest.mark.filterwarnings("ignore::statsmodels.tools.sm_exceptions.DomainWarning")
def test_means_outside_the_domain_are_an_error():
    family = families.Gamma(link=links.InversePower())
    X, y, *_ = draw(FAMILIES["gamma"])
    start = np.array([1.0, 0.0, 0.0])
    with pytest.raises(EstimationError, match=r"Gamma\(link=InversePower\) does not allow in \d+ rows"):
        run(X, y, family, beta=start, learning_rate=5.0, epochs=1, batch_size=None)
    with pytest.raises(EstimationError, match="not defined at these coefficients"):
        mean_loss(X, y, -start, family)


def test_a_family_without_a_likelihood_has_a_loss():
    family = families.Tweedie(var_power=2.5)
    X, y, *_ = draw(FAMILIES["gamma"])
    after = run(X, y, family, learning_rate=0.01)
    assert 0.0 < mean_loss(X, y, after, family) < mean_loss(X, y, BETA, family)


def test_long_logistic_steps_stay_finite(logit):
    X, y, family = logit
    w = run(X, y, family, learning_rate=1e8, epochs=20)
    assert np.isfinite(w).all()
    assert np.isfinite(mean_loss(X, y, w, family))
