"""Errors from products of groups' scores, and tests of what a mixed model assumes."""

import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from scipy import stats

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.models.mixed.departures import compare_errors, overdispersion, smallest
from fedstat.models.mixed.protocol import MixedNewton

SINGLE = fs.Policy(min_count=2, min_events=0, min_level_count=1)
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


def visits(groups=24, slope=0.0, over=0.0, seed=2):
    rng = np.random.default_rng(seed)
    size = rng.integers(4, 9, groups)
    g, t = np.repeat(np.arange(groups), size), np.concatenate([np.arange(m) / 4.0 for m in size])
    x = (g % 2).astype(float)
    eta = 0.5 + 0.4 * t + 0.7 * rng.normal(size=groups)[g] + slope * rng.normal(size=groups)[g] * t
    rate = np.exp(eta) * (rng.gamma(1.0 / over, over, len(g)) if over else 1.0)
    share = 1.0 / (1.0 + np.exp(-eta))
    share = rng.beta(share / over, (1.0 - share) / over) if over else share
    table = pd.DataFrame(
        {"g": g, "t": t, "x": x, "count": rng.poisson(rate), "events": rng.binomial(9, share)}
    )
    table["y"] = eta + rng.normal(size=len(g))
    return table.assign(others=9 - table["events"], days=1.0 + g % 3, site=[f"S{k % 3}" for k in g])


def model_of(formula, table, policy=SINGLE, **settings):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    return fs.FederatedMixed.from_formula(formula, partition, **settings)


def corrected_by_hand(fit, table):
    """CR2 of the pooled rows: residuals times the root of the inverse of I - H, in whitened rows."""
    X = np.column_stack([np.ones(len(table)), table["t"], table["x"], table["t"] * table["x"]])
    between, scale = fit.variances["variance"]
    V = between / scale * (table["g"].to_numpy()[:, None] == table["g"].to_numpy()) + np.eye(len(table))
    M, residual = np.linalg.inv(X.T @ np.linalg.solve(V, X)), (table["y"] - X @ fit.params).to_numpy()
    meat, tests = np.zeros((4, 4)), np.zeros((2, 4))
    for g in table["g"].unique():
        own = (table["g"] == g).to_numpy()
        root = np.linalg.cholesky(np.linalg.inv(V[np.ix_(own, own)])).T
        Z, e = root @ X[own], root @ residual[own]
        values, vectors = np.linalg.eigh(np.eye(own.sum()) - Z @ M @ Z.T)
        u = Z.T @ (vectors / np.sqrt(values)) @ vectors.T @ e
        meat += np.outer(u, u)
        direction = M / np.sqrt(np.diag(M))
        G = Z.T @ Z
        tests += (Z.T @ e @ direction) ** 2, np.diag(direction.T @ (G - G @ M @ G) @ direction)
    return M @ meat @ M, tests


def test_robust_errors_are_those_of_the_pooled_rows(tmp_path):
    table = visits()
    model = model_of("y ~ t * x + (1 | g)", table)
    fit, plain = model.fit(cov_type="robust"), model.fit()
    cov, tests = corrected_by_hand(plain, table)
    assert_allclose(fit.cov_params(), cov, rtol=1e-7, atol=1e-12)
    assert_allclose(fit._record.fit.by_group.tests[:2, 1:], tests[:, 1:], rtol=1e-7)
    assert_allclose(fit.params, plain.params)
    assert (fit.df < 24.0).all() and (fit.df >= 1.0).all()
    assert "robust, by groups" in str(fit.summary()) and fit.cov_type == "robust"
    fit.save(tmp_path / "fit.fed")
    assert_allclose(fs.load(tmp_path / "fit.fed").conf_int(), fit.conf_int(), rtol=0)
    with pytest.raises(NotAvailableError, match="errors of the model; fit with cov_type='model'"):
        fit.coefficient_tests()


def test_scores_of_groups_add_up_and_masks_change_nothing():
    """Products of scores without a correction are those of one group after the other at each site."""
    table = visits()
    for formula, family in (
        ("count ~ t * x + (1 | g)", sm.families.Poisson()),
        ("cbind(events, others) ~ t * x + (1 + t | g)", sm.families.Binomial()),
    ):
        fits = [
            model_of(formula, table, family=family).fit(cov_type="robust", masked=m) for m in (True, False)
        ]
        one = model_of(formula, table.assign(site="all"), family=family).fit(cov_type="robust")
        for fit in fits:
            assert_allclose(fit.bse, one.bse, rtol=1e-5)
            assert_allclose(
                fit._record.fit.by_group.dispersion, one._record.fit.by_group.dispersion, rtol=1e-5
            )
        assert (np.abs(np.log(one.bse / model_of(formula, table, family=family).fit().bse)) < 1.0).all()


def test_an_omitted_slope_is_announced_and_the_remedies_run():
    table = visits(40, slope=1.2)
    text = model_of("y ~ t * x + (1 | g)", table).fit().summary().as_text()
    assert text.startswith("*** STANDARD ERRORS MAY BE TOO SMALL") and "most for t" in text
    for fit in (
        model_of("y ~ t * x + (1 | g)", table).fit(cov_type="robust"),
        model_of("y ~ t * x + (1 + t | g)", table).fit(),
    ):
        assert not fit.summary().as_text().startswith("***")
        assert fit.bse["t"] > model_of("y ~ t * x + (1 | g)", table).fit().bse["t"]
    assert not model_of("y ~ t * x + (1 | g)", visits(40)).fit().summary().as_text().startswith("***")


@pytest.mark.parametrize(
    ("formula", "family"),
    [
        ("count ~ t * x + (1 | g)", sm.families.Poisson()),
        ("cbind(events, others) ~ t * x + (1 | g)", sm.families.Binomial()),
    ],
)
def test_overdispersion_is_announced_and_the_remedy_runs(formula, family):
    spread = model_of(formula, visits(30, over=0.6), family=family).fit()
    text = spread.summary().as_text()
    assert text.startswith(f"*** COUNTS VARY MORE THAN A {family.__class__.__name__.upper()} DISTRIBUTION")
    assert overdispersion(spread._record.fit) < 1e-4
    plain = model_of(formula, visits(30), family=family).fit()
    assert overdispersion(plain._record.fit) > 0.01 and not plain.summary().as_text().startswith("***")
    robust = model_of(formula, visits(30, over=0.6), family=family).fit(cov_type="robust")
    assert not robust.summary().as_text().startswith("***")
    if family.__class__.__name__ == "Poisson":
        negative = model_of(
            formula, visits(30, over=0.6), family=sm.families.NegativeBinomial(alpha=1.0)
        ).fit()
        assert np.isnan(overdispersion(negative._record.fit)) and negative.converged


def test_tests_of_generalized_models_have_degrees_of_freedom_of_the_groups():
    """Columns that are constant in equal groups have K - 2 of them, others nearly all rows."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"g": np.repeat(np.arange(12), 20), "z": rng.normal(size=240)})
    table["x"], table["site"] = (table["g"] % 2).astype(float), [f"S{g % 3}" for g in table["g"]]
    table["event"] = (rng.random(240) < 0.5).astype(int)
    table.loc[table["g"] < 4, "event"] = 1 - (rng.random(80) < 0.2)
    fit = model_of("event ~ x + z + (1 | g)", table, family=sm.families.Binomial()).fit()
    assert_allclose(fit.df[["Intercept", "x"]], 10.0, rtol=0.02)
    assert fit.df["z"] > 1000.0
    half = stats.t.isf(0.025, fit.df["x"]) * fit.bse["x"]
    assert_allclose(fit.conf_int().loc["x"], [fit.params["x"] - half, fit.params["x"] + half])


def test_a_coefficient_that_rests_on_one_group_has_no_robust_error_and_the_remedy_runs():
    table = visits().assign(x=lambda t: (t["g"] == 3) * 1.0)
    model = model_of("y ~ t + x + (1 | g)", table)
    with pytest.raises(EstimationError, match="rests on one cluster") as error:
        model.fit(cov_type="robust")
    remedy = re.search(r"Use (cov_type='\w+')", str(error.value)).group(1)
    fit = model.fit(**eval(f"dict({remedy})"))
    assert np.isfinite(fit.bse).all() and np.isfinite(compare_errors(fit._record.fit)[1])
    assert fit.conf_int_variances()["method"].tolist() == ["jackknife", "jackknife"]
    few = model_of("y ~ t + x + (1 | g)", table.assign(x=table["g"].isin([3, 4, 5]) * 1.0)).fit(
        cov_type="robust"
    )
    assert few.summary().as_text().startswith("*** FEW CLUSTERS: 'x' rests on 3.")
    assert few.df["x"] < 3.0


def test_p_values_are_combined_over_coefficients():
    assert smallest(np.array([np.nan, 0.02, 0.4])) == pytest.approx(0.04)
    assert smallest(np.array([np.nan])) == 1.0 and smallest(np.array([0.9, 0.8])) == 1.0
    fit = model_of("y ~ t + x + (1 | g)", visits()).fit()._record.fit
    # Errors of columns that are constant in groups follow from the variance between groups.
    assert np.isfinite(compare_errors(fit)).tolist() == [False, True, False]


def test_sites_compare_groups_at_one_point_of_a_session():
    model = model_of("y ~ t + (1 | g)", visits())
    session = model._open_session("mixed", False)

    def protocol(second):
        newton = MixedNewton(session, model.formula.random, model.distribution)
        yield from newton.open()
        arrays = newton.point(np.array([0.0, 0.0, 1.0])) | {"center": newton.center}
        for scale in (1e-3, second):
            yield from newton.compare_groups(arrays, scale * np.eye(2), np.eye(2))

    model.engine.run(protocol(1e-3), Ledger())
    with pytest.raises(fs.errors.FedstatError, match="compared at another point"):
        model.engine.run(protocol(2e-3), Ledger())


def test_exposure_and_hints():
    table = visits()
    settings = {"family": sm.families.Poisson()}
    fit = model_of("count ~ t + (1 | g)", table, exposure="days", **settings).fit()
    offset = model_of("count ~ t + offset(log(days)) + (1 | g)", table, **settings).fit()
    assert_allclose(fit.params, offset.params, rtol=1e-10)
    with pytest.raises(
        ModelError, match=r"'groups'; write random effects in the formula, as in 'y ~ x \+ \(1"
    ):
        model_of("count ~ t", table, groups="g")
    single = table.assign(row=np.arange(len(table)), event=(table["count"] > 2).astype(int))
    with pytest.raises(EstimationError, match="one row in each group"):
        model_of("event ~ t + (1 | row)", single, family=sm.families.Binomial()).fit()
