"""Synthesis and private regression of sites with different rows: noiseless limit, sensitivity, charges."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import DataWarning, DescriptionError, EstimationError, ModelError
from fedstat.federation.disclosure import privacy_budget
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.models.copula.correlation import choose_groups
from fedstat.models.copula.margins import INVALID, MISSING, Margin
from fedstat.models.copula.protocol import SumsByGroup, _fit_of_sums, plan_columns
from fedstat.models.copula.request import (
    ALL,
    PLACES,
    FirstRequest,
    PooledRows,
    RowProductsRequest,
    squared_of_row,
)
from fedstat.models.copula.steps import code_columns, digest_of, only_complete, tally
from fedstat.models.copula_glm.design import ScoredColumn
from fedstat.models.copula_glm.estimation import estimate
from fedstat.models.copula_glm.protocol import SEED, _released
from fedstat.models.copula_glm.released_distribution import normal_points
from fedstat.models.copula_glm.request import MomentPlan
from fedstat.privacy.zcdp import epsilon_of_zcdp

N = 3_000
BOUNDS = {"a": (-4, 4), "b": ["no", "yes"], "c": range(4), "d": fs.log(0.01, 100), "g": ["u", "v", "w"]}
SITES = np.array(["A", "B", "C"])


def rows(n=N, missing=0.0, seed=0):
    rng = np.random.default_rng(seed)
    Z = rng.standard_normal((n, 5))
    Z[:, 1:] += 0.6 * Z[:, :1]
    table = pd.DataFrame(
        {
            "a": Z[:, 0],
            "b": np.where(Z[:, 1] > 0.8, "yes", "no"),
            "c": np.searchsorted([-0.8, 0.0, 1.2], Z[:, 2]).astype(float),
            "d": np.exp(Z[:, 3]),
            "g": np.array(["u", "v", "w"])[np.searchsorted([-0.5, 0.7], Z[:, 4])],
        }
    )
    for name in ("a", "g"):
        table.loc[rng.random(n) < missing, name] = None
    return table


def policy(budget=8.0, colluding=None, **rules):
    return fs.Policy(privacy=fs.Budget(budget, 1e-6, colluding=colluding), **rules)


def over_rows(table, owners, sites=3):
    held = table.assign(site=SITES[np.arange(len(table)) % sites])
    return fs.ClientPartition.from_frame(held, by="site", policy=owners)


def synthesizer(table=None, epsilon=3.0, sites=3, owners=None, **options):
    table = rows() if table is None else table
    partition = over_rows(table, owners or policy(), sites)
    return fs.CopulaSynthesizer(partition, epsilon, {k: BOUNDS[k] for k in table}, **options)


def regression(table, family, bounds, epsilon=3.0, owners=None):
    partition = over_rows(table, owners or policy())
    return fs.PrivateCopulaGLM.from_formula(
        "y ~ a + b", partition, family=family, epsilon=epsilon, bounds=bounds
    )


def responses(n=N, seed=1):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, n))
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-a + 0.5 * b))) * 1
    bounds = {"y": [0, 1], "a": (-5, 5), "b": (-5, 5)}
    return pd.DataFrame({"y": y, "a": a, "b": b}), bounds


# ---- the noiseless limit ---------------------------------------------------------------------------


@pytest.fixture
def noiseless(monkeypatch):
    """Sites that add nothing; counts have whole numbers as noise at any epsilon."""
    monkeypatch.setattr(
        privacy_budget, "discrete_gaussian", lambda variance, size, source: np.zeros(size, dtype=np.int64)
    )


def pooled_sums(plan, table):
    """Exact counts of pooled rows by column, and exact products of their scores."""
    codes = code_columns(plan.columns[ALL], [table[one.name] for one in plan.columns[ALL]])
    codes = only_complete(codes) if isinstance(plan, MomentPlan) else codes
    margins = [
        Margin.of_counts(one, one.tally(column).astype(float), len(table), plan.count_deviation(ALL, j))
        for j, (one, column) in enumerate(zip(plan.columns[ALL], codes.T, strict=True))
    ]
    scores = plan.gram_requested(ALL, 1).score(margins, codes, plan.digits)
    products = np.ldexp((scores.T @ scores).astype(float), -2 * plan.digits)
    np.fill_diagonal(products, 0.0)
    return margins, products


@pytest.mark.parametrize("missing", [0.0, 0.1])
@pytest.mark.parametrize("colluding", [None, 1])
def test_the_noiseless_limit_is_the_fit_on_pooled_rows(noiseless, colluding, missing):
    table = rows(missing=missing)
    fit = synthesizer(table, owners=policy(colluding=colluding)).fit()._fit
    margins, products = pooled_sums(fit.plan, table)
    none, present = np.zeros((1, len(products))), np.ones((N, 1), dtype=bool)
    groups = choose_groups(fit.plan, present, "pairs")
    pooled = _fit_of_sums(groups, {ALL: margins}, SumsByGroup(products[None], none, none), present, {ALL: N})
    np.testing.assert_array_equal(fit.products, pooled.products)
    for found, expected in zip(fit.margins, pooled.margins, strict=True):
        np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-12)
    np.testing.assert_allclose(fit.inversion.correlation, pooled.inversion.correlation, atol=1e-8)
    assert (fit.plan.digits < PLACES) == (colluding == 1)
    frequent = table["b"].eq("yes").mean()
    assert fit.margins[1].probabilities[1] == pytest.approx(frequent, abs=1e-12)


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_the_noiseless_limit_of_a_regression_is_that_of_pooled_rows(noiseless, missing):
    table, bounds = responses()
    table.loc[np.random.default_rng(3).random(N) < missing, "b"] = np.nan
    family = sm.families.Binomial()
    model = regression(table, family, bounds, 30.0, policy(40.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        found = model.fit(draws=10)
    plan = model._planned
    margins, products = pooled_sums(plan, table)
    n = int(table.notna().all(axis=1).sum())
    pooled = _released(
        plan, {ALL: margins}, (products, products), n, entities={}, records={}, known=N, used={}
    )
    root = estimate(pooled.design, pooled.release, normal_points(2, SEED)).root
    assert found.nobs == n
    np.testing.assert_allclose(found.params, root.params, atol=1e-8)
    known = sm.GLM(table["y"], sm.add_constant(table[["a", "b"]]), family=family, missing="drop").fit()
    assert (np.abs(found.params.to_numpy() - known.params.to_numpy()) < known.bse.to_numpy()).all()


# ---- sensitivity -----------------------------------------------------------------------------------


def plan_of(colluding=1, gaps=(), epsilon=1.0, n=5_000):
    bounds = fs.Bounds(BOUNDS)
    held = PooledRows(dict.fromkeys("ABC", n // 3), colluding)
    rho = Fraction(1, 50) if epsilon == 1.0 else Fraction(epsilon)
    plan = plan_columns({ALL: bounds.of(list(BOUNDS))}, {ALL: n}, rho, held)
    return type(plan)(plan.rho, plan.columns, gaps={ALL: gaps} if gaps else {}, rows=held)


def codes_of_rows(bins, rng, n=4_000):
    """Rows at the ends of all columns, and with missing cells, cells in no bin, and all missing."""
    ends = [np.array([0, 1, one.count // 2, one.count - 2, one.count - 1, MISSING, INVALID]) for one in bins]
    codes = np.column_stack([rng.choice(one, n) for one in ends])
    codes[:5] = MISSING
    return codes


@pytest.mark.parametrize("entirely", [False, True])
def test_no_row_moves_the_counts_by_more_than_is_charged_and_some_by_as_much(entirely):
    bins = plan_of().columns[ALL]
    codes = codes_of_rows(bins, np.random.default_rng(0), 500)
    codes = only_complete(codes) if entirely else codes
    none = tally(bins, np.full((1, len(bins)), MISSING))
    largest = {"levels": 0.0, "trees": 0.0}
    for k in range(len(codes)):
        found = tally(bins, codes[k : k + 1])
        for name in largest:
            charged = sum(one.squared_alone for one in bins if bool(one.levels) == (name == "levels"))
            for moved in (found[name], found[name] - none[name]):  # added, or with no values
                largest[name] = max(largest[name], float(moved @ moved) / charged)
    assert all(0.99 < ratio <= 1.0 for ratio in largest.values())


@pytest.mark.parametrize("colluding", [1, 2])
@pytest.mark.parametrize("gaps", [(), (0, 4), (0, 1, 2, 3, 4)])
def test_no_row_moves_the_products_by_more_than_is_charged_and_some_nearly_by_as_much(gaps, colluding):
    rng, plan = np.random.default_rng(1), plan_of(colluding, gaps)
    bins, request = plan.columns[ALL], plan.gram_requested(ALL, 1)
    margins = [Margin(one, np.full(one.count, 1.0 / one.count)) for one in bins]
    codes = codes_of_rows(bins, rng)
    scores = request.score(margins, codes, plan.digits).astype(object)
    upper = np.triu_indices(scores.shape[1], 1)
    none = scores[0]
    assert (codes[0] == MISSING).all() and any(none) == bool(gaps)
    charged = request.squared_alone(len(bins), plan.digits)
    assert charged == plan._complete()
    moved = scores[:, upper[0]] * scores[:, upper[1]]
    without = moved - (none[upper[0]] * none[upper[1]])[None, :]
    largest = max(int((one**2).sum(axis=1).max()) / charged for one in (moved, without))
    assert 0.5 < largest <= 1.0


def test_the_bound_of_the_products_is_attained_by_even_rows():
    """Scores of equal size, of a row as long as R: (R^4 - sum of fourth powers) / 2."""
    plan = plan_of(colluding=2)
    q, radius = 6, plan.radius(ALL)
    row = np.full(q, float(np.sqrt(float(radius) / q)))
    upper = np.triu_indices(q, 1)
    moved = float(((row[upper[0]] * row[upper[1]]) ** 2).sum())
    assert moved == pytest.approx(float(squared_of_row([(radius, q)], 0, 0)), rel=1e-12)


@pytest.mark.parametrize("family", ["Binomial", "Gaussian", "Poisson"])
def test_no_row_moves_the_products_of_a_regression_by_more_than_is_charged(family):
    response = {"Binomial": [0, 1], "Gaussian": (-5, 5), "Poisson": range(40)}[family]
    bounds = fs.Bounds({"a": (-4, 4), "c": range(4), "y": response})
    held = PooledRows(dict.fromkeys("ABC", 1_000), 1)
    found = plan_columns({ALL: bounds.of(["a", "c", "y"])}, {ALL: 3_000}, Fraction(1, 50), held)
    design = {ALL: (ScoredColumn("a", "a", ALL, 0), ScoredColumn("c", "c", ALL, 1))}
    plan = MomentPlan(found.rho, found.columns, design, ALL, family, rows=held)
    bins, request = plan.columns[ALL], plan.gram_requested(ALL, 1)
    margins = [Margin(one, np.full(one.count, 1.0 / one.count)) for one in bins]
    peaked = np.where(np.arange(bins[-1].count) == bins[-1].count // 2, 200.0, 1.0)
    if family != "Binomial":  # the ends of the response are far from its middle
        margins[-1] = Margin(bins[-1], peaked / peaked.sum())
    codes = only_complete(codes_of_rows(bins, np.random.default_rng(2)))
    scores = request.score(margins, codes, plan.digits).astype(object)
    assert not scores[0].any()
    upper = np.triu_indices(scores.shape[1], 1)
    moved = ((scores[:, upper[0]] * scores[:, upper[1]]) ** 2).sum(axis=1)
    assert 0.5 < max(moved) / request.squared_alone(len(bins), plan.digits) <= 1.0


# ---- charges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("colluding", [None, 1])
def test_sites_are_charged_epsilon_once_and_a_repeat_is_free(colluding):
    owners = policy(colluding=colluding, exact="none")
    model = synthesizer(epsilon=2.0, owners=owners)
    first = model.fit()
    spent = [site.site_ledger.charges.spent for site in model.partition.sites.values()]
    assert len(set(spent)) == 1 and 1.999 < epsilon_of_zcdp(spent[0], 1e-6) <= 2.0
    assert float(spent[0]) == pytest.approx(float(first._fit.sums.site_cost(ALL)), rel=1e-3)
    assert first.privacy["epsilon"].item() == pytest.approx(2.0, rel=1e-3)
    again = fs.CopulaSynthesizer(model.partition, 2.0, BOUNDS).fit()
    np.testing.assert_array_equal(first.correlation, again.correlation)
    assert spent == [site.site_ledger.charges.spent for site in model.partition.sites.values()]


def test_noise_has_the_size_that_is_printed_and_shares_have_less():
    noise = {}
    for colluding in (None, 1):
        table = rows()
        fit = synthesizer(table, 1.0, owners=policy(colluding=colluding)).fit()._fit
        margins, codes = fit.margins, np.column_stack([m.bins.code(table[m.bins.name]) for m in fit.margins])
        request = fit.plan.gram_requested(ALL, 1)
        U = np.ldexp(request.score(margins, codes, fit.plan.digits).astype(float), -fit.plan.digits)
        upper = np.triu_indices(U.shape[1], 1)
        z = ((fit.products - U.T @ U / N) / fit.noise)[upper]
        assert 6.0 < (z**2).sum() < 50.0  # chi-square of 21: probability below .001 on either side
        noise[colluding] = fit.noise[upper].mean()
    assert noise[1] == pytest.approx(noise[None] / np.sqrt(2.0), rel=1e-2)


def test_what_no_budget_allows_is_refused_before_a_request():
    model = synthesizer(epsilon=9.0)
    with pytest.raises(DescriptionError, match="Use a smaller epsilon; no request was sent"):
        model.fit()
    with pytest.raises(DescriptionError, match="is none, and releases with noise are charged"):
        synthesizer(owners=fs.Policy()).fit()
    assert not any(site.site_ledger.charges.made for site in model.partition.sites.values())


def test_explain_states_the_price_before_anything_is_charged():
    model = synthesizer(epsilon=1.0, owners=policy(colluding=1, exact="none"))
    plan = model.explain()
    text = " ".join(str(plan).split())
    assert plan.passes and "each site is charged epsilon 1 at delta 1e-06" in text
    assert "noise makes errors about" in text and "% of the budget of A, B and C, epsilon 8" in text
    assert not any(site.site_ledger.charges.made for site in model.partition.sites.values())
    alone = " ".join(str(synthesizer(epsilon=1.0).explain()).split())
    assert "If owners set colluding = 1, noise on a correlation is about" in alone


# ---- results ---------------------------------------------------------------------------------------


def test_synthetic_rows_are_like_the_rows_and_results_are_saved(tmp_path):
    table = rows(9_000, missing=0.1)
    fit = synthesizer(table, 5.0, owners=policy(colluding=1)).fit()
    drawn = fit.sample(20_000, seed=1)
    assert drawn["a"].isna().mean() == pytest.approx(0.1, abs=0.02)
    for name in ("a", "d"):
        np.testing.assert_allclose(
            drawn[name].quantile([0.2, 0.5, 0.8]), table[name].quantile([0.2, 0.5, 0.8]), atol=0.12
        )
    assert drawn[["a", "d"]].corr("spearman").iloc[0, 1] == pytest.approx(
        table[["a", "d"]].corr("spearman").iloc[0, 1], abs=0.04
    )
    assert fit.utility_report()["site"].eq(ALL).all() and len(fit.sample_tables(2, 100, seed=1)) == 2
    text = " ".join(fit.summary().as_text().split())
    assert "3 sites add the noise together" in text and "No site lacks an entity" not in text
    fit.save(tmp_path / "fit")
    pd.testing.assert_frame_equal(fs.load(tmp_path / "fit").sample(20, seed=2), fit.sample(20, seed=2))


def test_the_column_of_the_sites_is_one_of_them_if_it_is_named():
    table = rows(6_000)
    table["a"] += np.where(np.arange(6_000) % 3 == 1, 2.0, 0.0)
    partition = over_rows(table, policy())
    fit = fs.CopulaSynthesizer(partition, 5.0, {"a": (-5, 7)}, columns=["a", "site"]).fit()
    drawn = fit.sample(20_000, seed=1).groupby("site")["a"].mean()
    assert drawn["B"] - drawn["A"] == pytest.approx(2.0, abs=0.15)


def test_a_rehearsal_has_the_rows_of_every_site():
    partition = over_rows(rows(), policy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        rehearsal = fs.rehearse(partition, 3.0, BOUNDS, seed=1)
    assert rehearsal.layout == "horizontal"
    assert {k: len(v) for k, v in rehearsal.rows.items()} == {k: len(v) for k, v in partition.rows.items()}
    assert fs.FederatedOLS.from_formula("a ~ d", rehearsal).fit().params["d"] > 0


def test_incomplete_rows_are_left_out_of_a_regression_and_counted_with_noise():
    table, bounds = responses(9_000)
    gone = np.random.default_rng(3).random(9_000) < 0.2
    table.loc[gone, "b"] = np.nan
    model = regression(table, sm.families.Binomial(), bounds, 3.0, policy(colluding=1, exact="none"))
    with pytest.warns(DataWarning, match=r"About 1,\d\d\d of 9,000 rows lack a value"):
        fit = model.fit(draws=20)
    assert fit.nobs == pytest.approx((~gone).sum(), abs=150)
    assert (np.abs(fit.params - [0.0, 1.0, -0.5]) < 4.0 * fit.bse).all()
    text = fit.summary().as_text()
    assert "Rows by site" in text and "FederatedGLM(...).fit(epsilon=)" in " ".join(text.split())
    predicted = fit.predict(table.dropna().head(3))
    assert predicted.between(0.0, 1.0).all()


def test_bounds_of_some_columns_are_those_that_owners_publish():
    table, bounds = responses()
    published = {
        "A": {"a": {"kind": "number", "range": [-5.0, 5.0]}, "b": {"kind": "number", "range": [-9.0, 9.0]}}
    }
    held = table.assign(site=SITES[np.arange(N) % 3])
    partition = fs.ClientPartition.from_frame(held, by="site", policy=policy(), published=published)
    given = {"y": [0, 1], "b": (-5, 5)}
    model = fs.CopulaSynthesizer(partition, 3.0, given)
    assert [one.range for one in model.bounds[ALL].values()] == [None, (-5.0, 5.0), (-5.0, 5.0)]
    glore = fs.GLORE.from_formula("y ~ a + b", partition)
    np.testing.assert_array_equal(
        glore.fit(epsilon=2.0, bounds=given).params, glore.fit(epsilon=2.0, bounds=bounds).params
    )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: synthesizer(columns=["a", "zz"]), ModelError, "not every site has 'zz'"),
        (lambda: synthesizer(mechanism="published"), ModelError, "needs a vertical partition"),
        (
            lambda: synthesizer(rows().assign(b="maybe")).fit(),
            EstimationError,
            "levels that its bounds do not",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(make, error, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=text):
            make()


def test_a_step_on_the_score_is_refused_over_rows():
    table, bounds = responses()
    with pytest.raises(ModelError, match=r"over sites with different columns\. Use polish=0"):
        regression(table, sm.families.Binomial(), bounds).fit(polish=1)


def test_a_request_with_other_probabilities_than_its_text_is_refused():
    """The text is that of the masks, so sites of one sum have the same scores."""
    partition = over_rows(rows(), policy())
    plan = fs.CopulaSynthesizer(partition, 1.0, BOUNDS)._planned
    even = np.concatenate([np.full(one.count, 1.0 / one.count) for one in plan.columns[ALL]])
    margins = to_json(FirstRequest(plan.margins_requested(ALL)))
    sums = to_json(plan.gram_requested(ALL, 1))
    text = to_json(RowProductsRequest(plan.columns[ALL], digest_of(even), sums, plan.digits))
    site = partition.sites["A"]

    def request(step, text, **arrays):
        return unpack_reply(site.answer(pack_request(Request("A", "copula", step, arrays, "s", text))))

    request("sum_margins", margins)
    with pytest.raises(DescriptionError, match="expected the margins of the request"):
        request("sum_products", text, probabilities=even[::-1])
    assert request("sum_products", text, probabilities=even).arrays["products"].shape == (21,)
