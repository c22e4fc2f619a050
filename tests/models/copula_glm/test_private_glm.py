"""A private generalized linear model with sites that check requests."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from copula_design import BOUNDS, RESPONSES, draw_columns, draw_response
from scipy import stats
from scipy.special import expit

import fedstat as fs
from fedstat.errors import (
    ConvergenceWarning,
    DescriptionError,
    DesignError,
    EstimationError,
    MessageError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula.request import squared_of_cross, squared_of_own
from fedstat.models.copula_glm.design import ScoredColumn
from fedstat.models.copula_glm.explain import predict_failures
from fedstat.models.copula_glm.request import MomentPlan, MomentsRequest, radius_of
from fedstat.privacy.zcdp import epsilon_of_zcdp

HELD = {"Registry": ["y"], "A": list("abcd"), "B": list("efg"), "C": list("hij")}
TOGETHER = {"A": ["y", *"abcd"], "B": list("efg"), "C": list("hij")}
N = 4_000


def model(held=HELD, epsilon=20.0, formula="y ~ .", n=N, frame=None, **options):
    if frame is None:
        rng = np.random.default_rng(3)
        frame = draw_columns(n, rng)
        frame["y"] = draw_response("Binomial", frame, rng)
    partition = fs.ClientPartition.from_frame(
        frame, columns=held, policy=fs.Policy(privacy=fs.Budget(options.pop("budget", 30.0), 1e-6))
    )
    bounds = options.pop("bounds", {**BOUNDS, "y": [0, 1]})
    options = {"family": sm.families.Binomial(), "epsilon": epsilon, "bounds": bounds, **options}
    return fs.PrivateCopulaGLM.from_formula(formula, partition, **options), frame


@pytest.fixture(scope="module")
def fitted():
    made, frame = model()
    known = sm.GLM(frame["y"], sm.add_constant(frame[list(BOUNDS)]), family=sm.families.Binomial()).fit()
    return made, made.fit(polish=0, draws=12, seed=1), known


def test_estimates_are_those_of_the_rows_as_far_as_noise_lets_it_be_reported(fitted):
    _, result, known = fitted
    assert list(result.params.index) == ["Intercept", *BOUNDS]
    z = (result.params.to_numpy() - known.params.to_numpy()) / result.bse.to_numpy()
    assert np.abs(z).max() < 1.5  # the same rows: noise alone, which is a part of the error
    assert result.nobs == N and result.use_t and result.df_inference == 11


@pytest.mark.parametrize("family", ["Binomial", "Gaussian", "Poisson"])
def test_with_hardly_any_noise_it_is_the_vertical_model_without_a_penalty(family):
    rng = np.random.default_rng(6)
    frame = draw_columns(N, rng)
    frame["y"] = draw_response(family, frame, rng)
    distribution = getattr(sm.families, family)()
    exact = fs.VerticalGLM.from_formula(
        "y ~ .", fs.ClientPartition.from_frame(frame, columns=HELD), family=distribution
    ).fit(lam=0.0)
    made, _ = model(
        frame=frame,
        family=distribution,
        epsilon=3000.0,
        budget=4000.0,
        bounds={**BOUNDS, "y": RESPONSES[family]},
    )
    # The mean ratio of standard errors has a standard deviation of 0.057 over 16 draws.
    result = made.fit(draws=16, seed=2)
    # The remaining difference is the misfit of the estimated copula, and another weighting of the same rows.
    away = ((result.params - exact.params) / exact.bse).to_numpy()
    assert np.sqrt(np.mean(away**2)) < 0.6
    assert np.abs(away).max() < 1.5
    assert (result.bse / exact.bse).mean() == pytest.approx(1.03, abs=0.12)


def test_where_the_response_is_held_does_not_matter():
    made, frame = model(TOGETHER)
    result = made.fit(draws=10, seed=1)
    known = sm.GLM(frame["y"], sm.add_constant(frame[list(BOUNDS)]), family=sm.families.Binomial()).fit()
    z = (result.params.to_numpy() - known.params.to_numpy()) / result.bse.to_numpy()
    assert np.abs(z).max() < 1.5
    assert made._planned.radius("A") == radius_of(4, "Binomial") and made._planned.width("A") == 5


def test_errors_add_up_and_are_printed_in_their_parts(fitted):
    _, result, _ = fitted
    parts = result.bse_parts
    assert np.hypot(parts["sampling"], parts["noise"]).to_numpy() == pytest.approx(result.bse.to_numpy())
    text = str(result.summary())
    for reported in (
        "sampling",
        "noise",
        "P>|t|",
        "Valid if the columns follow a Gaussian copula",
        "30% of the budget",
    ):
        assert reported in text
    assert "BUDGET TOO SMALL" not in text and not result.budget_too_small


def test_a_budget_that_is_too_small_is_reported_first():
    made, _ = model(epsilon=1.0, n=2_000)
    result = made.fit(draws=10, seed=1)
    assert result.budget_too_small and str(result.summary()).startswith("*** BUDGET TOO SMALL FOR THIS MODEL")
    assert "budget is too small for this model" in str(made.explain())


def test_what_did_not_converge_has_no_tests(monkeypatch):
    from fedstat.models.copula_glm import estimation

    made, _ = model(n=2_000)
    monkeypatch.setattr(estimation, "STEPS", 1)
    with pytest.warns(ConvergenceWarning, match="larger epsilon"):
        result = made.fit(draws=10)
    text = str(result.summary())
    assert text.startswith("*** NOT CONVERGED: no coefficients solve the released moments")
    assert "P>|" not in text and "std err" not in text
    assert result.budget_too_small and "NOT CONVERGED" in repr(result)
    for statement in (
        *(lambda: result.pvalues, lambda: result.bse, lambda: result.bse_parts),
        *(result.conf_int, result.select),
    ):
        with pytest.raises(NotAvailableError, match="larger epsilon"):
            statement()


def test_what_left_is_noisy_sums_and_who_is_complete(fitted):
    _, result, _ = fitted
    left = result.ledger.releases()
    assert set(left["step"]) == {
        *("find_complete", "release_margins", "recall_gram", "release_gram"),
        *("introduce", "announce", "deal_product", "open_product", "share_product", "finish"),
    }
    kinds = dict(zip(left["array"], left["kind"], strict=True))
    assert kinds["grams"] == kinds["trees"] == kinds["levels"] == "noisy aggregate"
    assert kinds["share"] == "masked share"


def test_each_site_is_charged_what_was_planned(fitted):
    made, _, _ = fitted
    for name, site in made.partition.sites.items():
        spent = site.site_ledger.charges.spent
        assert 0 <= spent - made._planned.site_cost(name) < 1e-15  # sites round up
        assert epsilon_of_zcdp(spent, 1e-6) <= made.epsilon
    assert epsilon_of_zcdp(made._planned.coordinator_cost(), 1e-6) <= made.epsilon


def test_nothing_is_requested_where_a_budget_is_too_small():
    made, _ = model(epsilon=20.0, budget=2.0)
    with pytest.raises(DescriptionError, match="smaller epsilon"):
        made.fit()
    assert not made.partition.sites["A"].site_ledger.charges.made


def test_nobody_is_charged_where_one_has_no_budget():
    rng = np.random.default_rng(3)
    frame = draw_columns(100, rng).assign(y=0.0)
    frame.loc[:50, "y"] = 1.0
    with_budget = fs.Policy(privacy=fs.Budget(30.0, 1e-6))
    partition = fs.ClientPartition.from_frame(
        frame, columns=HELD, policy=with_budget, policies={"C": fs.Policy()}
    )
    made = fs.PrivateCopulaGLM.from_formula(
        "y ~ .", partition, family=sm.families.Binomial(), epsilon=1.0, bounds={**BOUNDS, "y": [0, 1]}
    )
    with pytest.raises(DescriptionError, match=r"C: its policy .* is none"):
        made.fit()
    assert not any(site.site_ledger.charges.made for site in partition.sites.values())


@pytest.mark.filterwarnings("ignore:Nothing is charged yet")
def test_too_few_complete_entities_are_refused_with_what_to_do():
    rng = np.random.default_rng(3)
    frame = draw_columns(300, rng).assign(y=(np.arange(300) % 2).astype(float))
    frame.loc[20:, list("hij")] = np.nan
    made, _ = model(frame=frame)
    with pytest.raises(
        EstimationError, match=r"20 entities .* Leave out the columns of 'C', without which 300"
    ):
        made.fit(draws=10)
    frame.loc[:280, list("efg")] = np.nan
    made, _ = model(frame=frame)
    with pytest.raises(EstimationError, match=r"0 entities .* needed. Tables of CopulaSynthesizer"):
        made.fit(draws=10)
    assert not any(site.site_ledger.charges.made for site in made.partition.sites.values())


def test_a_file_holds_the_results(fitted, tmp_path):
    _, result, _ = fitted
    result.save(tmp_path / "private.fed")
    again = fs.load(tmp_path / "private.fed")
    assert str(again.summary()) == str(result.summary())
    assert again.select().equals(result.select())


def test_predictions_of_rows_that_are_at_hand(fitted, tmp_path):
    """Against the same coefficients in statsmodels' hands: means, errors of the delta method, intervals."""
    _, result, _ = fitted
    new = draw_columns(40, np.random.default_rng(9))
    X = sm.add_constant(new[list(BOUNDS)]).to_numpy()
    eta, cov = X @ result.params.to_numpy(), result.cov_params().to_numpy()
    mean = 1.0 / (1.0 + np.exp(-eta))
    assert result.predict(new).to_numpy() == pytest.approx(mean)
    se, t = np.sqrt(np.einsum("ij,jk,ik->i", X, cov, X)), stats.t.ppf(0.975, 11)
    frame = result.get_prediction(new).summary_frame()
    assert frame["mean_se"].to_numpy() == pytest.approx(mean * (1.0 - mean) * se)
    assert frame["mean_ci_upper"].to_numpy() == pytest.approx(1.0 / (1.0 + np.exp(-eta - t * se)))
    result.save(tmp_path / "private.fed")
    assert fs.load(tmp_path / "private.fed").predict(new).equals(result.predict(new))
    far = new.assign(a=np.where(np.arange(40) == 0, 1e9, new["a"]), b=new["b"].where(np.arange(40) != 1))
    at_end = result.predict(new.assign(a=np.where(np.arange(40) == 0, 4.0, new["a"])))
    assert result.predict(far)[0] == at_end[0] and np.isnan(result.predict(far)[1])
    for wrong, reported in [
        (new.drop(columns="c"), "lack the column 'c'"),
        (new.assign(d=17), "'d' has levels that its bounds do not list, in 40 rows"),
        (new.assign(a="x"), "'a' has values that are not numbers"),
    ]:
        with pytest.raises(DesignError, match=reported):
            result.predict(wrong)
    with pytest.raises(ModelError, match="rows that you hold"):
        result.predict(None)


def test_predictions_of_levels_and_functions():
    made, frame = model_with_positive()
    result = made.fit(draws=10, seed=0)
    new = frame.head(30)
    level = np.column_stack([new["d"] == k for k in (1, 2, 3)])
    X = np.column_stack([np.ones(30), new["a"], np.log(new["z"]), level, new["g"]]).astype(float)
    assert result.predict(new).to_numpy() == pytest.approx(
        1.0 / (1.0 + np.exp(-X @ result.params.to_numpy()))
    )


def test_columns_without_effect_are_left_out(fitted):
    _, result, _ = fitted
    for penalty in ("scad", "mcp"):
        found = result.select(penalty).set_index("term")
        strong = ["a", "c", "f"]
        assert found.loc[strong, "selected"].all() and (found.loc[strong, "frequency"] > 0.8).all()
        # One of about five releases chooses one of them; their frequency then shows it by chance.
        assert not (found["selected"] & (found["frequency"] > 0.6))[["e", "h"]].any()
        # SCAD and MCP do not shrink what is large
        assert found.loc["a", "coef"] == pytest.approx(result.params["a"], abs=2.0 * result.bse["a"])


def test_terms_are_functions_of_one_column():
    made, frame = model_with_positive()
    names = [column.name for column in made._design["A"]]
    assert names == ["a", "log(z)", "C(d)[T.1]", "C(d)[T.2]", "C(d)[T.3]"]
    result = made.fit(draws=10, seed=0)
    X = np.column_stack(
        [
            np.ones(len(frame)),
            frame["a"],
            np.log(frame["z"]),
            *(frame["d"] == k for k in (1, 2, 3)),
            frame["g"],
        ]
    ).astype(float)
    known = sm.GLM(frame["y"], X, family=sm.families.Binomial()).fit()
    z = (result.params.to_numpy() - known.params) / result.bse.to_numpy()
    assert np.abs(z).max() < 2.0


def model_with_positive():
    rng = np.random.default_rng(5)
    frame = draw_columns(6_000, rng)
    frame["z"] = np.exp(0.5 * frame["e"])
    frame["y"] = draw_response("Binomial", frame[list(BOUNDS)], rng)
    held = {"A": ["a", "z", "d"], "B": ["g", "y"], "C": ["h"]}
    bounds = {**BOUNDS, "y": [0, 1], "z": fs.log(0.05, 20.0)}
    del bounds["b"], bounds["c"], bounds["e"], bounds["f"], bounds["i"], bounds["j"]
    return model(held, 60.0, "y ~ a + log(z) + C(d) + g", frame=frame, bounds=bounds, budget=100.0)


@pytest.mark.parametrize(
    "formula, told",
    [
        ("y ~ a:b", "a term is a column"),
        ("y ~ bs(a, df=4)", "a term is a column"),
        ("y ~ scale(a)", "a term is a column"),
        ("y ~ log(a)", "no value at the lower end"),
        ("y ~ C(a)", "a term is a column"),
        ("y ~ a - 1", "omits the intercept"),
        ("d ~ a", "two levels"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_any_request(formula, told):
    with pytest.raises(ModelError, match=told):
        model(formula=formula, n=100)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"epsilon": np.inf}, "epsilon"),
        ({"family": sm.families.Gamma()}, "canonical link"),
        ({"family": sm.families.Gaussian()}, "needs a range"),
        ({"bounds": {"y": [0, 1]}}, "fs.Bounds"),
        ({"family": sm.families.Poisson(), "bounds": {**BOUNDS, "y": (1, 50)}}, "begin at 0"),
        ({"family": sm.families.Poisson(), "bounds": {**BOUNDS, "y": (0, 1e6)}}, "at most 2,000"),
    ],
)
def test_arguments_without_a_meaning_are_refused(options, told):
    with pytest.raises(ModelError, match=told):
        model(n=100, **options)


# ---- values that a site accepts without a check --------------------------------------------------------

BITS = Margin(Bins("y", (0, 1)), np.array([0.5, 0.5]))
WIDE = Margin(Bins("x", (), (0.0, 1.0), depth=5), np.full(32, 1.0 / 32))


X = ScoredColumn("x", "x", "A", 0)


def request(holder="A", response="Binomial", column=X):
    return MomentsRequest({"B": 2}, 1, 10, "A", holder, response, (column,))


def test_rows_are_no_longer_than_their_radius_whatever_the_margins_are():
    rng = np.random.default_rng(1)
    for _ in range(50):
        p = rng.dirichlet(np.full(32, 0.05))
        margins = [Margin(WIDE.bins, p), Margin(BITS.bins, rng.dirichlet([0.1, 0.1]))]
        codes = np.column_stack([rng.integers(-1, 32, 400), rng.integers(-1, 2, 400)])
        rows = request().score(margins, codes)
        assert (rows**2).sum(axis=1).max() <= request().radius(2) * 4**16


def test_the_response_is_never_cut():
    codes = np.column_stack([np.zeros(2, dtype=int), [0, 1]])
    rows = request().score([WIDE, BITS], codes)
    assert rows[:, 1] == pytest.approx(np.array([-1.7, 1.7]) * 2**16, abs=1)


def test_a_site_takes_another_radius_where_the_response_is():
    assert request(holder="B").peer_radius("B") == radius_of(1, "Binomial")
    assert request(holder="B", response="Gaussian").peer_radius("B") == radius_of(1, "Gaussian")
    assert request(holder="A").peer_radius("B") == radius_of(2, "")
    assert request(holder="A").radius(2) == radius_of(1, "Binomial")


def test_two_sites_that_were_reported_of_other_responses_share_no_product():
    """Told of a smaller radius of the other's row, a site would be charged too little for its share."""
    made, _ = model(n=200)
    plan = MomentPlan.gram_requested

    def lie(self, site, groups):
        found = plan(self, site, groups)
        if site != "B":
            return found
        fields = {name: getattr(found, name) for name in ("peers", "groups", "variance", "site", "columns")}
        return MomentsRequest(**fields, holder="C", response="Binomial")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MomentPlan, "gram_requested", lie)
        with pytest.raises(PolicyError, match=r"B.* is not the planned one"):
            made.fit(draws=10)


def test_products_are_numbered_with_what_was_agreed():
    assert json.loads(request().agreed) == ["values", "A", "Binomial"]
    assert request(holder="B").agreed != request().agreed != request(response="Poisson").agreed


def test_sensitivities_follow_from_radii():
    made, _ = model(n=100)
    plan = made._planned
    own, peers = plan.radius("A"), [plan.radius(name) for name in ("Registry", "B", "C")]
    charged = squared_of_own(own, 4) + sum(squared_of_cross(own, peer) for peer in peers)
    assert plan.products_cost("A") == charged / (2 * plan.gram_variance)


def test_a_strange_column_is_refused():
    with pytest.raises(MessageError):
        ScoredColumn("x", "x", "A", 0, function="np.linalg.inv").check()
    with pytest.raises(DescriptionError):
        request(column=ScoredColumn("x", "x", "A", 1)).score([WIDE, BITS], np.zeros((2, 2), dtype=int))


def test_an_evaluation_is_not_had_from_one_release():
    with pytest.raises(NotAvailableError, match=r"no entity's response.*FederatedGLM.*predict\(frame\)"):
        fs.results.PrivateGLMResults.evaluate(None)


def small_study(epsilon, n=1_000):
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, n)).clip(-3, 3)
    frame = pd.DataFrame({"x": x, "z": z, "y": (rng.uniform(size=n) < expit(0.3 + x - 0.5 * z)).astype(int)})
    partition = fs.ClientPartition.from_frame(
        frame,
        columns={"A": ["x"], "B": ["z"], "C": ["y"]},
        policy=fs.Policy(privacy=fs.Budget(8.0, 1e-6)),
    )
    bounds = {"x": (-3, 3), "z": (-3, 3), "y": [0, 1]}
    return fs.PrivateCopulaGLM.from_formula(
        "y ~ x + z", partition, family=sm.families.Binomial(), epsilon=epsilon, bounds=bounds
    )


def test_a_fit_that_will_not_converge_is_predicted_before_anything_is_charged():
    made = small_study(0.02)
    assert predict_failures(made._planned, 1_000) > 0.5
    assert any("simulated from public facts" in note for note in made.explain().notes)
    with (
        warnings.catch_warnings(),
        pytest.raises(fs.errors.ConvergenceWarning, match="Nothing is charged yet"),
    ):
        warnings.simplefilter("error", fs.errors.ConvergenceWarning)
        made.fit()
    assert not any(site.site_ledger.charges.made for site in made.partition.sites.values())


def test_no_failure_is_predicted_where_the_budget_suffices():
    made = small_study(4.0)
    assert predict_failures(made._planned, 1_000) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", fs.errors.ConvergenceWarning)
        assert made.fit(draws=10).converged
