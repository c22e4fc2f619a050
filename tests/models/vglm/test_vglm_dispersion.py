"""Gamma, inverse normal and negative binomial responses: the optimum of pooled rows, dispersion, domains."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from pooled_path import glm_path
from statsmodels.genmod.families import links
from vglm_study import make_model, make_table, pooled_columns

from fedstat.errors import DataWarning, EstimationError, ModelError
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, GAMMA, NEARLY_PERFECT, DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vglm import distributions as rf

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

ALPHA = 0.5
FAMILIES = {
    "gamma": sm.families.Gamma(),
    "gamma, log": sm.families.Gamma(links.Log()),
    "inverse normal": sm.families.InverseGaussian(),
    "inverse normal, log": sm.families.InverseGaussian(links.Log()),
    "negative binomial": sm.families.NegativeBinomial(links.NegativeBinomial(alpha=ALPHA), alpha=ALPHA),
    "negative binomial, log": sm.families.NegativeBinomial(alpha=ALPHA),
}
ESTIMATED = [kind for kind in FAMILIES if not kind.startswith("negative")]
MEANS = {
    "gamma": lambda share: 1.0 / (0.5 + share),
    "inverse normal": lambda share: (0.5 + share) ** -0.5,
    "negative binomial": lambda share: FAMILIES["negative binomial"].link.inverse(-0.2 - share),
}


def draw(kind, n=400):
    """The study of the other families, with a response whose mean the link allows everywhere."""
    table, rng = make_table(n, 1, "binary"), np.random.default_rng(3)
    eta = 0.9 * (table["x0"] - 3.0) - 0.6 * (table["x3"] - 3.0) + 0.1 * (table["x5"] - 3.0)
    eta = eta + 0.8 * (table["f"] == "b")
    mean = np.exp(0.4 * eta) if "log" in kind else MEANS[kind](1.0 / (1.0 + np.exp(-eta)))
    if kind.startswith("gamma"):
        y = rng.gamma(3.0, mean / 3.0)
    elif kind.startswith("inverse"):
        y = rng.wald(mean, 3.0)
    else:
        y = rng.negative_binomial(1.0 / ALPHA, 1.0 / (1.0 + ALPHA * mean)).astype(float)
    return table.assign(y=y)


TABLES = {kind: draw(kind) for kind in FAMILIES}


def model_of(kind, table=None, **options):
    return make_model(TABLES[kind] if table is None else table, family=FAMILIES[kind], **options)


def standardized(kind, names, table=None):
    """The design in which coefficients are penalized: weights at the mean response are one."""
    table, family = TABLES[kind] if table is None else table, FAMILIES[kind]
    X, mean = pooled_columns(table, names), table["y"].mean()
    root = abs(family.link.deriv(mean)) * np.sqrt(family.variance(mean)) if kind in ESTIMATED else 1.0
    Z = (X - X.mean(axis=0)) / X.std(axis=0) * root
    return np.column_stack([np.ones(len(X)), Z]), X.std(axis=0) / root


def pooled_glm(kind, params, table=None):
    """Maximum likelihood of the pooled rows, from near estimates: full steps from afar leave the domain."""
    table = TABLES[kind] if table is None else table
    X = sm.add_constant(pooled_columns(table, params.index[1:]))
    start = params.to_numpy() * (1.0 + 1e-3 * np.cos(np.arange(len(params))))
    glm = sm.GLM(table["y"], X, family=FAMILIES[kind]).fit(start_params=start, tol=1e-13, maxiter=200)
    assert glm.fit_history["iteration"] > 2
    return glm


@pytest.mark.parametrize("kind", FAMILIES)
def test_without_a_penalty_it_is_maximum_likelihood(kind):
    result = model_of(kind).fit(lam=0.0)
    glm = pooled_glm(kind, result.params)
    # Products with the response are had once, in fixed point: to the eighth digit of a standard error.
    np.testing.assert_allclose((result.params.to_numpy() - glm.params) / glm.bse, 0.0, atol=5e-7)
    np.testing.assert_allclose(result.bse, glm.bse, rtol=1e-8)
    assert result.refit.scale == pytest.approx(glm.scale, rel=1e-9)
    assert result.llf == pytest.approx(glm.llf, abs=1e-7)
    assert result.llnull == pytest.approx(glm.llnull, abs=1e-7)
    assert ("expected" in result.cov_type) == kind.endswith("log")


@pytest.mark.parametrize(
    ("kind", "penalty"),
    [
        *((kind, "lasso") for kind in FAMILIES),
        *((kind, "scad") for kind in ("gamma", "inverse normal, log", "negative binomial")),
    ],
)
def test_the_chosen_fit_is_the_optimum_of_pooled_rows(kind, penalty):
    result = model_of(kind, penalty=penalty).fit(n_lambdas=20)
    Z, sd = standardized(kind, result.params.index[1:])
    chosen, lambdas = result.path.index.get_loc(result.lam), result.path.index.to_numpy()
    groups = CoefficientGroups.single(Z.shape[1], np.concatenate([[0.0], np.ones(Z.shape[1] - 1)]))
    rows, spec = Rows(Z, TABLES[kind]["y"].to_numpy()), DistributionSpec.of(FAMILIES[kind])
    pooled = glm_path(rows, spec, Penalty(penalty), groups, lambdas=lambdas[: chosen + 1], tol=1e-10)
    np.testing.assert_allclose(result.params[1:] * sd, pooled.coefficients[-1, 1:], atol=1e-6)
    assert result.path["kkt"].iloc[chosen] <= 1e-7
    assert result.converged and 1 <= (result.params[1:] != 0.0).sum() < Z.shape[1] - 1


def test_the_lasso_of_the_canonical_gamma_is_that_of_proximal_gradients():
    table, lam = TABLES["gamma"], 0.05
    result = model_of("gamma", penalty="lasso").fit(lam=lam)
    Z, sd = standardized("gamma", result.params.index[1:])
    y, b = table["y"].to_numpy(), np.zeros(Z.shape[1])
    b[0] = 1.0 / y.mean()
    # Half the mean deviance is the mean of y eta - log(eta), up to a constant.
    for _ in range(4000):
        new = b - 0.15 * Z.T @ (y - 1.0 / (Z @ b)) / len(y)
        new[1:] = np.sign(new[1:]) * np.maximum(np.abs(new[1:]) - 0.15 * lam, 0.0)
        assert (Z @ new > 0.0).all()
        b = new
    np.testing.assert_allclose(result.params[1:] * sd, b[1:], atol=1e-7)
    assert 1 <= np.count_nonzero(b[1:]) < len(b) - 1


@pytest.mark.parametrize(("kind", "power"), [("gamma", -1.0), ("inverse normal", -2.0), ("gamma, log", 0.0)])
def test_nothing_depends_on_the_unit_of_the_response(kind, power):
    table, unit = TABLES[kind], 1e5
    fits = [model_of(kind, table.assign(y=u * table["y"])).fit(n_lambdas=3) for u in (1.0, unit)]
    np.testing.assert_allclose(fits[1].params[1:] / unit**power, fits[0].params[1:], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(fits[1].refit.bse[1:] / unit**power, fits[0].refit.bse[1:], rtol=1e-7)
    assert fits[1].ledger.rounds == fits[0].ledger.rounds


@pytest.mark.parametrize("kind", FAMILIES)
def test_criteria_are_those_of_the_dispersion_of_maximum_likelihood(kind):
    result = model_of(kind, penalty="lasso").fit(path="exact", n_lambdas=4, ratio=0.05)
    family, y = FAMILIES[kind], TABLES[kind]["y"].to_numpy()
    X = sm.add_constant(pooled_columns(TABLES[kind], result.params.index[1:]))
    best = []
    for params in result.path_params.to_numpy():
        mean = family.link.inverse(X @ params)
        around = np.exp(np.linspace(-0.02, 0.02, 2001)) if kind in ESTIMATED else [1.0]
        loss = family.deviance(y, mean) / len(y) / 2.0
        middle = (
            rf.likelihood_of(family.__class__.__name__).likeliest_scale(loss) if kind in ESTIMATED else 1.0
        )
        best.append(max(family.loglike(y, mean, scale=middle * s) for s in around))
    df = 1.0 + (result.path_params.iloc[:, 1:] != 0.0).sum(axis=1).to_numpy()
    bic = -2.0 * np.array(best) + df * np.log(len(y))
    difference = result.path["bic"].to_numpy() - bic
    np.testing.assert_allclose(difference - difference[0], 0.0, atol=1e-3)
    constant = result.path["aic"].to_numpy() + 2.0 * np.array(best) - 2.0 * df
    np.testing.assert_allclose(constant - constant[0], 0.0, atol=1e-3)


def test_the_gamma_dispersion_is_exact_where_the_fit_is_nearly_perfect():
    for loss in (0.999e-4, 1.001e-4, 0.3, 40.0):
        k = 1.0 / GAMMA.likeliest_scale(loss)
        slopes = [rf.log_likelihood("Gamma", loss, 1, 0.0, 1.0 / (k * s)) for s in (0.999, 1.0, 1.001)]
        assert slopes[1] == max(slopes)
    below, above = (GAMMA.likeliest_scale(NEARLY_PERFECT * s) for s in (1.0 - 1e-9, 1.0 + 1e-9))
    assert above == pytest.approx(below, rel=1e-8)
    assert np.isinf(rf.minus_twice("Gamma", np.array([-0.1, 0.1]), 10)).tolist() == [True, False]


def test_a_step_that_leaves_the_domain_is_shortened(monkeypatch):
    """Rare large means: the model of the intercept alone leads where linear predictors have no mean."""
    table, rng = make_table(400, 1, "binary"), np.random.default_rng(0)
    eta = 0.03 + 3.0 * (table["x0"].rank() / len(table)) ** 3
    table = table.assign(y=rng.gamma(50.0, 1.0 / eta / 50.0))
    outside, original = [], rf.respond_at

    def watched(*arguments):
        found = original(*arguments)
        outside.append(found[0] >= rf.OUTSIDE)
        return found

    monkeypatch.setattr("fedstat.models.vglm.steps.respond_at", watched)
    result = model_of("gamma", table).fit(lam=0.0)
    assert any(outside)
    X = sm.add_constant(pooled_columns(table, result.params.index[1:]))
    mean = 1.0 / (X @ result.params.to_numpy())
    assert (mean > 0.0).all()
    score = X.T @ (table["y"].to_numpy() - mean)
    np.testing.assert_allclose(score / np.sqrt(np.sum((X * mean[:, None]) ** 2, axis=0)), 0.0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gamma", "inverse normal", "negative binomial"])
def test_the_holder_answers_outside_of_the_domain_without_a_number_per_entity(kind):
    model = model_of(kind)
    model.fit(lam=0.1)
    site, eta = model.partition.sites["Bank"], np.full(400, model.distribution.link_entry.sign)
    for wrong in (0.0, -eta[0]):
        eta[5] = wrong
        request = Request("Bank", "vglm", "respond", {"eta": eta}, model._session, "")
        arrays = unpack_reply(site.answer(pack_request(request))).arrays
        assert arrays["loss"] == rf.OUTSIDE
        assert set(arrays) == {"loss", "sums"} and not arrays["sums"].any()


@pytest.mark.parametrize("kind", ["gamma", "negative binomial, log"])
def test_cross_validation_is_about_that_of_refits(kind):
    table = draw(kind, 800)
    result = model_of(kind, table, penalty="lasso").fit(
        select="cv", folds=4, n_lambdas=12, ratio=0.02, seed=3
    )
    code = np.random.default_rng(3).permutation(np.arange(800) % 4)
    Z, _ = standardized(kind, result.params.index[1:], table)
    y, lambdas = table["y"].to_numpy(), result.path.index.to_numpy()
    groups = CoefficientGroups.single(Z.shape[1], np.concatenate([[0.0], np.ones(Z.shape[1] - 1)]))
    chosen, deviances = result.path.index.get_loc(result.lam), []
    for fold in range(4):
        here = code == fold
        rows = Rows(np.ascontiguousarray(Z[~here]), y[~here])
        spec = DistributionSpec.of(FAMILIES[kind])
        b = glm_path(rows, spec, Penalty("lasso"), groups, lambdas=lambdas).coefficients
        means = [FAMILIES[kind].link.inverse(Z[here] @ one) for one in b]
        deviances.append([FAMILIES[kind].deviance(y[here], mean) / here.sum() for mean in means])
    exact = np.mean(deviances, axis=0)
    assert result.path["cv"].to_numpy()[chosen] == pytest.approx(exact[chosen], rel=2e-3)
    se = np.std(deviances, axis=0, ddof=1)[exact.argmin()] / 2.0
    assert exact[chosen] - exact.min() <= 0.1 * se


@pytest.mark.parametrize("kind", ["gamma", "negative binomial, log"])
def test_debiased_estimates_of_few_columns_are_about_maximum_likelihood(kind):
    table = draw(kind, 800)
    result = model_of(kind, table).fit(inference="debiased")
    glm = pooled_glm(kind, result.debiased.params, table)
    assert np.abs((result.debiased.params - glm.params.to_numpy()) / glm.bse.to_numpy()).max() < 0.25
    np.testing.assert_allclose(result.debiased.bse, glm.bse, rtol=0.05)


def test_a_half_selects_and_the_other_estimates():
    result = model_of("gamma").fit(inference="split", seed=1)
    assert result.refit.nobs == 200 and np.isfinite(result.refit.bse).all()
    assert result.refit.scale == pytest.approx(1.0 / 3.0, rel=0.3)
    assert "Pearson's estimate of the dispersion" in " ".join(str(result.summary()).split())


def test_entities_whose_linear_predictor_has_no_mean_are_not_predicted():
    result = model_of("gamma").fit(lam=0.0)
    table = TABLES["gamma"].copy()
    table.loc[7, "x0"] -= 50.0 / result.params["x0"]
    other = model_of("gamma", table).partition
    with pytest.warns(DataWarning, match="1 of 400 entities"):
        predicted = result.predict(other)
    assert np.flatnonzero(predicted.isna()).tolist() == [7]
    assert (predicted.drop(predicted.index[7]) > 0.0).all()


def test_what_is_not_of_the_family_is_refused():
    gamma, counts = TABLES["gamma"], TABLES["negative binomial"]
    for value in (0.0, -1.0):
        table = gamma.assign(y=gamma["y"].where(gamma.index != 3, value))
        for kind in ("gamma", "inverse normal"):
            with pytest.raises(EstimationError, match=r"^Bank: expected a response of positive .* 1 of 400"):
                model_of(kind, table).fit()
    with pytest.raises(EstimationError, match="counts: whole numbers"):
        model_of("negative binomial", counts.assign(y=counts["y"] + 0.5)).fit()
    with pytest.raises(ModelError, match=r"Gamma \(InversePower or Log\).*received Gamma\(link=Identity\)"):
        make_model(gamma, family=sm.families.Gamma(links.Identity()))
    with pytest.raises(ModelError, match="exchange='admm' supports the families Gaussian, Binomial, Poisson"):
        model_of("gamma").fit(exchange="admm")
    with pytest.raises(ModelError, match="missing='em' requires the normal family"):
        model_of("gamma", missing="em")


FOLDS = {"select": "cv", "folds": 4, "seed": 1, "n_lambdas": 12}


@pytest.mark.parametrize(("kind", "arguments"), [("gamma", FOLDS), ("inverse normal", {})], ids=str)
def test_rounds_are_within_the_range_that_was_announced(kind, arguments):
    model = model_of(kind, draw(kind, 800))
    low, _, most = np.sum([counts for _, counts in model.explain(**arguments).rounds], axis=0)
    assert low <= model.fit(**arguments).ledger.rounds - model._agreement.rounds <= most


@pytest.mark.parametrize("family", [sm.families.Poisson, sm.families.Binomial])
def test_a_link_of_a_vertical_fit_is_one_entry(family, monkeypatch):
    link = {"Poisson": links.Sqrt, "Binomial": links.Probit}[family.__name__]
    entry = DISTRIBUTIONS[family.__name__]
    taken = (*entry.vertical_links, link.__name__)
    monkeypatch.setitem(DISTRIBUTIONS, family.__name__, replace(entry, vertical_links=taken))
    table, random = make_table(), np.random.default_rng(1)
    eta = 3.0 + 0.3 * (table["x1"] - table["x1"].mean()) / table["x1"].std()
    table["y"] = (
        random.poisson(eta**2) if entry.variance_power else (random.random(len(eta)) < eta / 6.0) * 1.0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = make_model(table, family=family(link())).fit(lam=0.0)
        terms = dict.fromkeys(name.split("[")[0] for name in result.params.index[1:])
        pooled = sm.GLM.from_formula(f"y ~ {' + '.join(terms)}", table, family=family(link())).fit(tol=1e-12)
    np.testing.assert_allclose(result.params, pooled.params[result.params.index], atol=1e-6)
    np.testing.assert_allclose(result.bse, pooled.bse[result.params.index], rtol=1e-6)
    assert result.llf == pytest.approx(pooled.llf, rel=1e-9)
