"""Columns as they are: rare amounts, missing cells, levels without an order, dates, wrong bounds."""

import datetime
import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from census import BOUNDS, HELD, LEVELS, census
from scipy.special import expit

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import DataWarning, MessageError, ModelError
from fedstat.federation.tables.published import write_published
from fedstat.models.copula import audit
from fedstat.models.copula.joint import fit_levels
from fedstat.models.copula.margins import INVALID, MISSING, Bins, Margin
from fedstat.models.copula.request import PLACES, GramRequest, squared_radius

NO_NOISE = 1e4


def partition(frame, columns, epsilon=NO_NOISE):
    return fs.ClientPartition.from_frame(
        frame, columns=columns, policy=fs.Policy(privacy=fs.Budget(2 * epsilon, 1e-6))
    )


def synthesize(frame, columns, bounds, epsilon=NO_NOISE, **options):
    return fs.CopulaSynthesizer(partition(frame, columns, epsilon), epsilon, bounds, **options).fit()


# ---- rare amounts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "sign", "bound"),
    [
        (0.05, 1, (0, 3_000)),
        (0.05, 1, fs.asinh(0, 99_999)),
        (0.02, -1, (-3_000, 0)),
        (0.08, -1, fs.asinh(-5_000, 5_000, scale=10)),
        (0.05, 1, range(3_000)),
    ],
)
def test_rare_amounts_keep_their_mean_and_zeros_are_zeros(share, sign, bound):
    rng = np.random.default_rng(1)
    amount = np.where(rng.random(8_000) < share, sign * np.round(rng.normal(1_500, 100, 8_000)), 0.0)
    frame = pd.DataFrame({"amount": amount, "x": rng.standard_normal(8_000)})
    drawn = synthesize(frame, {"A": ["amount"], "B": ["x"]}, {"amount": bound, "x": (-5, 5)}).sample(
        40_000, 1
    )
    error = amount.std() / np.sqrt(40_000)
    assert drawn["amount"].mean() == pytest.approx(amount.mean(), abs=3.5 * error)
    assert (drawn["amount"] == 0).mean() == pytest.approx((amount == 0).mean(), abs=0.004)
    some = drawn["amount"][drawn["amount"] != 0]
    assert some.median() == pytest.approx(sign * 1_500, abs=30)


@pytest.mark.parametrize(("share", "place"), [(0.05, 50.0), (0.03, -30.0)])
def test_a_rare_hump_stays_where_it_is(share, place):
    rng = np.random.default_rng(2)
    x = np.where(rng.random(8_000) < share, rng.normal(place, 1, 8_000), rng.standard_normal(8_000))
    bins = Bins.of("x", fs.Bounds({"x": (-60, 80)})["x"], 8, atoms=True)
    counts = bins.tally(bins.code(pd.Series(x))) + 5.0 * rng.standard_normal(bins.released)
    drawn = Margin.of_counts(bins, counts, 8_000, 5.0).quantile(rng.standard_normal(50_000))
    assert np.abs(drawn - place).min() < 1.0
    assert (np.abs(drawn - place) < 8).mean() == pytest.approx(share, abs=0.008)


def test_an_empty_tail_does_not_rise_with_the_noise():
    rng = np.random.default_rng(3)
    bins = Bins.of("x", fs.Bounds({"x": (0, 100)})["x"], 8, atoms=True)
    rises = []
    for _ in range(40):
        counts = bins.tally(bins.code(pd.Series(rng.normal(30, 5, 4_000)))) + 20.0 * rng.standard_normal(
            bins.released
        )
        p = Margin.of_counts(bins, counts, 4_000, 20.0).probabilities[bins.leaf_codes]
        rises.append(np.clip(np.diff(p[150:-1]), 0, None).sum())
    assert np.mean(np.array(rises) > 1e-9) < 0.1


def test_a_record_moves_counts_with_atoms_and_missing_cells_by_their_sensitivity():
    ranges = {"x": (-1, 3), "y": fs.log(1, 9), "z": range(100), "l": list("abc")}
    for name, column in fs.Bounds(ranges).items():
        bins = Bins.of(name, column, 5, atoms=True)
        codes = np.arange(INVALID, bins.count)
        tallies = [bins.tally(np.array([code])) for code in codes]
        moved = [int(((a - b) ** 2).sum()) for a, b in itertools.combinations(tallies, 2)]
        assert max(moved) == bins.squared_sensitivity
        assert all(len(tally) == bins.released for tally in tallies)
        assert bins.tally(np.array([MISSING]))[-1] == 1 and not bins.tally(np.array([INVALID])).any()


def test_zero_is_a_value_of_its_own_and_counts_go_where_they_belong():
    bins = Bins.of("x", fs.Bounds({"x": (-1, 3)})["x"], 5, atoms=True)
    x = np.array([-2.0, -1.0, -0.01, 0.0, 0.01, 3.0, 3.1])
    codes = bins.code_numbers(x)
    assert (np.diff(codes) > 0).all() and codes[0] == 0 and codes[-1] == bins.count - 1
    at = np.flatnonzero(np.diff(bins.edges) == 0.0)
    assert at.tolist() == bins.atom_codes.tolist() and bins.edges[at].tolist() == [-1.0, 0.0, 3.0]


# ---- missing cells -------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["pairs", "em"])
def test_a_missing_cell_costs_no_row(missing):
    rng = np.random.default_rng(4)
    n = 6_000
    loan = rng.normal(500, 100, n)
    frame = pd.DataFrame({"loan": loan, "paid": loan / 2 + rng.normal(0, 50, n)})
    frame["age"] = rng.normal(50, 10, n) + (loan - 500) / 20
    frame["kind"] = np.where(rng.random(n) < expit((loan - 500) / 50), "a", rng.choice(["b", "c"], n))
    known = frame["paid"].mean()
    frame.loc[frame["loan"] < 500, "paid"] = np.nan
    frame.loc[rng.random(n) < 0.3, "kind"] = None
    bounds = {"loan": (0, 1000), "paid": (0, 600), "age": (0, 110), "kind": ["a", "b", "c"]}
    fit = synthesize(frame, {"A": ["loan", "paid", "kind"], "B": ["age"]}, bounds, missing=missing)
    drawn = fit.sample(20_000, seed=1)
    assert fit._fit.entities == {"A": n, "B": n} and fit._fit.method == "complete"
    assert drawn["loan"].mean() == pytest.approx(500, abs=6)
    assert drawn.isna().mean()[["loan", "paid", "kind", "age"]].to_numpy() == pytest.approx(
        [0, 0.5, 0.3, 0], abs=0.02
    )
    # Cells are missing for small loans, and the others have their own distribution.
    assert (
        drawn["loan"][drawn["paid"].isna()].mean() < 440 < 560 < drawn["loan"][drawn["paid"].notna()].mean()
    )
    assert (
        drawn["paid"].mean() == pytest.approx(frame["paid"].mean(), abs=4)
        and frame["paid"].mean() > known + 20
    )
    both = [table[["loan", "age"]].corr("spearman").iloc[0, 1] for table in (drawn, frame)]
    assert both[0] == pytest.approx(both[1], abs=0.03)
    shares = [table.groupby("kind")["loan"].mean() for table in (drawn, frame)]
    assert shares[0].to_numpy() == pytest.approx(shares[1].to_numpy(), abs=8)
    assert "kind 29.8%" in str([note for note in fit.notes if "Cells are missing" in note])


def test_noise_makes_no_missing_cells():
    rng = np.random.default_rng(5)
    frame = pd.DataFrame(rng.standard_normal((2_000, 3)), columns=list("abc"))
    fit = synthesize(frame, {"A": ["a", "b"], "B": ["c"]}, dict.fromkeys("abc", (-5, 5)), epsilon=1.0)
    assert not fit.sample(2_000, 1).isna().any(axis=None)
    assert [margin.missing for margin in fit._fit.margins] == [0.0, 0.0, 0.0]


def test_a_value_that_no_bound_lists_is_no_missing_cell():
    rng = np.random.default_rng(6)
    frame = pd.DataFrame({"a": rng.choice(list("xyz"), 2_000), "b": rng.standard_normal(2_000)})
    with pytest.raises(fs.errors.EstimationError, match="levels that its bounds do not list"):
        synthesize(frame, {"A": ["a"], "B": ["b"]}, {"a": ["x", "y"], "b": (-5, 5)})


def test_a_private_regression_names_the_site_that_lacks_values():
    rng = np.random.default_rng(7)
    frame = pd.DataFrame(rng.standard_normal((600, 3)), columns=list("aby"))
    frame.loc[:99, "a"] = np.nan
    held = partition(frame, {"A": ["a", "y"], "B": ["b"]}, 100.0)
    model = fs.PrivateCopulaGLM.from_formula(
        "y ~ a + b", held, epsilon=100.0, bounds=dict.fromkeys("aby", (-9, 9))
    )
    with pytest.warns(DataWarning, match="100 of 600 entities are left out: 100 records at 'A' lack a value"):
        fit = model.fit(draws=10)
    assert not any("at 'B'" in note for note in fit.notes if "left out" in note)


# ---- levels without an order ---------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(0.1, 0.6, 0.1, 0.6, 0.1), (0.5, 0.05, 0.9, 0.3)])
def test_levels_without_an_order_have_one_rate_each(rates):
    rng = np.random.default_rng(8)
    names = list("abcde")[: len(rates)]
    town = rng.choice(names, 10_000)
    late = rng.random(10_000) < np.array(rates)[[names.index(one) for one in town]]
    frame = pd.DataFrame(
        {"town": town, "late": late.astype(int), "income": rng.standard_normal(10_000) + 2 * late}
    )
    bounds = {"town": names, "late": [0, 1], "income": (-6, 8)}
    fit = synthesize(frame, {"A": ["town"], "B": ["late", "income"]}, bounds)
    drawn = fit.sample(40_000, seed=1)
    for column in ("late", "income"):
        found, known = (table.groupby("town")[column].mean().to_numpy() for table in (drawn, frame))
        assert found == pytest.approx(known, abs=0.06 if column == "income" else 0.03)
    assert "Levels without an order (town)" in str(fit.summary())
    assert list(fit.correlation) == ["late", "income"] and "town" in fit.utility_report().index


def test_an_order_can_be_declared_and_taken_away():
    grades = fs.levels(["low", "middle", "high"], ordered=True)
    bounds = fs.Bounds(
        {
            "a": grades,
            "b": ["low", "middle", "high"],
            "c": fs.levels([1, 2, 3], ordered=False),
            "d": [1, 2, 3],
        }
    )
    assert [column.nominal for column in bounds.values()] == [False, True, True, False]
    assert not fs.levels(["no", "yes"], ordered=False).nominal  # two levels have no order to speak of
    with pytest.raises(ModelError, match="twice"):
        fs.levels(["a", "a"], ordered=True)
    rng = np.random.default_rng(9)
    frame = pd.DataFrame({"a": rng.choice(["low", "middle", "high"], 1_000), "x": rng.standard_normal(1_000)})
    fit = synthesize(frame, {"A": ["a"], "B": ["x"]}, {"a": grades, "x": (-5, 5)})
    assert list(fit.correlation) == ["a", "x"]


def test_a_logit_has_the_products_of_its_levels():
    rng = np.random.default_rng(10)
    X = rng.standard_normal((4_000, 2))
    level = (X @ rng.standard_normal((2, 3)) + rng.gumbel(size=(4_000, 3))).argmax(axis=1)
    ones = np.eye(3)[level]
    B = fit_levels(X, ones.mean(axis=0), ones.T @ X / 4_000, np.zeros(2))
    eta = B[:, 0] + X @ B[:, 1:].T
    p = np.exp(eta) / np.exp(eta).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(p.T @ X / 4_000, ones.T @ X / 4_000, atol=2e-4)
    oracle = sm.MNLogit(level, sm.add_constant(X)).fit(disp=0).params
    np.testing.assert_allclose((B[1:] - B[0]).T, oracle, atol=0.02)


@pytest.mark.parametrize("codes", [False, True])
def test_a_private_regression_on_levels_without_an_order(codes):
    """Slopes of other columns are biased if levels are put in an order that has nothing to do with them."""
    rng = np.random.default_rng(11)
    n = 12_000
    town = rng.integers(5, size=n)
    x = rng.standard_normal(n) + np.array([0.0, 1.5, 0.0, 1.5, 0.0])[town]
    y = 0.5 * x + np.array([0.0, -1.0, 0.3, 1.0, 0.0])[town] + rng.standard_normal(n)
    frame = pd.DataFrame({"town": town if codes else np.array(list("abcde"))[town], "x": x, "y": y})
    held = partition(frame, {"A": ["town"], "B": ["x"], "C": ["y"]}, 500.0)
    bounds = {"town": range(5) if codes else list("abcde"), "x": (-5, 7), "y": (-8, 9)}
    model = fs.PrivateCopulaGLM.from_formula("y ~ C(town) + x", held, epsilon=500.0, bounds=bounds)
    fit = model.fit(polish=0, draws=10)
    design = pd.get_dummies(frame["town"], drop_first=True, dtype=float).assign(x=x)
    known = sm.OLS(y, sm.add_constant(design)).fit()
    assert fit.params.to_numpy() == pytest.approx(known.params.to_numpy(), abs=0.1)
    assert fit.params["x"] == pytest.approx(known.params["x"], abs=0.03)


# ---- whole numbers, truth values, dates, many levels ---------------------------------------------


def test_values_come_back_as_what_they_were():
    rng = np.random.default_rng(12)
    n = 4_000
    day = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 366, n), unit="D")
    towns = [f"town {k}" for k in range(80)]
    frame = pd.DataFrame(
        {"age": rng.integers(18, 91, n), "ok": rng.random(n) < 0.3, "day": day, "town": rng.choice(towns, n)}
    )
    first, last = datetime.date(2020, 1, 1), datetime.date(2020, 12, 31)
    bounds = {"age": range(18, 91), "ok": [False, True], "day": (first, last), "town": towns}
    fit = synthesize(frame, {"A": ["age", "ok"], "B": ["day", "town"]}, bounds)
    drawn = fit.sample(8_000, seed=1)
    assert [str(kind) for kind in drawn.dtypes[["age", "ok", "day"]]] == ["int64", "bool", "datetime64[ns]"]
    assert (drawn["age"].min(), drawn["age"].max()) == (18, 90)
    assert drawn["day"].between("2020-01-01", "2020-12-31").all()
    assert drawn["day"].dt.dayofyear.mean() == pytest.approx(frame["day"].dt.dayofyear.mean(), abs=4)
    assert drawn["age"].value_counts(normalize=True).sort_index().to_numpy() == pytest.approx(
        frame["age"].value_counts(normalize=True).sort_index().to_numpy(), abs=0.01
    )
    assert set(drawn["town"]) == set(towns)
    with pytest.raises(ModelError, match="501 levels; at most 500"):
        fs.Bounds({"x": [f"{k}" for k in range(501)]})
    assert len(fs.Bounds({"x": [f"{k}" for k in range(500)]})["x"].levels) == 500


def test_a_file_of_bounds_says_the_form_and_the_order(tmp_path):
    bounds = fs.Bounds(
        {
            "age": range(100),
            "day": (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)),
            "g": fs.levels([1, 2, 3], ordered=False),
        }
    )
    (tmp_path / "bounds.toml").write_text(write_published(dict(bounds)))
    assert dict(fs.Bounds.from_toml(tmp_path / "bounds.toml")) == dict(bounds)


# ---- bounds in a wrong unit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ((0, 100), "VALUES BEYOND THE BOUNDS: column 'income' at 'A': about (100|9[89])%"),
        ((1e6, 2e6), "are below 1e"),
        ((0, 1e9), "BOUNDS TOO WIDE"),
    ],
)
def test_bounds_in_a_wrong_unit_are_announced(bound, words, monkeypatch):
    # Equations without a root take all their steps; errors of few points are as good here.
    monkeypatch.setattr("fedstat.models.copula_glm.estimation.POINTS", 2**6)
    rng = np.random.default_rng(13)
    frame = pd.DataFrame({"income": rng.lognormal(10, 0.5, 2_000), "age": rng.uniform(18, 90, 2_000)})
    frame["y"] = (frame["age"] / 30 + rng.standard_normal(2_000)).clip(-4, 8)
    bounds = {"income": bound, "age": (18, 90), "y": (-5, 9)}
    held = partition(frame, {"A": ["income"], "B": ["age", "y"]}, 50.0)
    with pytest.warns(DataWarning, match=words):
        fit = fs.CopulaSynthesizer(held, 20.0, bounds).fit()
    fits = [fit]
    if bound == (0, 100):
        model = fs.PrivateCopulaGLM.from_formula("y ~ income + age", held, epsilon=20.0, bounds=bounds)
        with pytest.warns(DataWarning, match=words):
            fits.append(model.fit(draws=10))
    for one in fits:
        first = one.diagnostics().iloc[0]
        assert first["kind"] == "bounds" and first["severity"] == "critical"


def test_bounds_that_suit_are_not_announced():
    rng = np.random.default_rng(14)
    frame = pd.DataFrame({"x": rng.standard_normal(2_000), "y": rng.exponential(1.0, 2_000)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synthesize(frame, {"A": ["x"], "B": ["y"]}, {"x": (-2.5, 2.5), "y": (0, 20)}, epsilon=1.0)


# ---- records that are missing at random ----------------------------------------------------------


def test_margins_are_those_of_all_entities():
    rng = np.random.default_rng(15)
    n = 8_000
    Z = rng.multivariate_normal([0, 0, 0], 0.3 * np.eye(3) + 0.7, n)
    X = pd.DataFrame({"a": np.exp(Z[:, 0] / 2), "b": np.exp(Z[:, 1] / 2), "c": Z[:, 2]})
    X["g"] = np.array(["u", "v", "w"], dtype=object)[np.searchsorted([-0.5, 0.7], Z[:, 1])]
    seen = rng.random(n) > expit(2 * Z[:, 0])
    table = X.copy()
    table.loc[~seen, ["b", "c", "g"]] = None
    bounds = {"a": (0, 12), "b": (0, 12), "c": (-5, 5), "g": ["u", "v", "w"]}
    drawn = synthesize(table, {"A": ["a"], "B": ["b", "c", "g"]}, bounds, missing="em").sample(40_000, seed=1)
    for name in "abc":
        observed = abs(X.loc[seen, name].mean() - X[name].mean()) / X[name].std()
        bias = abs(drawn[name].mean() - X[name].mean()) / X[name].std()
        assert bias < 0.1, name  # twice to three times its standard error
        assert name == "a" or observed > 0.3
    shares = [one["g"].value_counts(normalize=True).sort_index() for one in (drawn, X, X[seen])]
    assert (shares[0] - shares[1]).abs().max() < 0.5 * (shares[2] - shares[1]).abs().max()


@pytest.mark.parametrize("cuts", [[1.2], [-0.5, 0.5, 1.2]])
def test_margins_are_right_if_records_depend_on_a_column_with_few_values(cuts):
    """Missing records depend on the values, not on a latent normal behind them: it moved margins too far."""
    n, rng = 8_000, np.random.default_rng(16)
    Z = rng.multivariate_normal(np.zeros(4), 0.5 * np.eye(4) + 0.5, n)
    X = pd.DataFrame(
        {"a": np.digitize(Z[:, 0], cuts), "b": np.exp(Z[:, 1] / 2), "c": np.digitize(Z[:, 2], [0.8])}
    )
    X["d"] = np.digitize(Z[:, 3], [-1.0, 0.0, 1.0])
    seen = rng.random(n) > expit(1.2 * (X["a"] - X["a"].mean()) / X["a"].std() - 0.3)
    table = X.astype(float)
    table.loc[~seen, ["b", "c", "d"]] = None
    bounds = {"a": list(range(len(cuts) + 1)), "b": (0, 12), "c": [0, 1], "d": [0, 1, 2, 3]}
    drawn = synthesize(table, {"A": ["a"], "B": ["b", "c", "d"]}, bounds, missing="em").sample(60_000, seed=1)
    share = X["a"].value_counts(normalize=True)
    for name in "bcd":
        right = (X[seen].groupby("a")[name].mean() * share).sum()  # means given the column, over all entities
        observed, found = X.loc[seen, name].mean(), drawn[name].astype(float).mean()
        assert (observed - right) / X[name].std() < -0.07
        assert abs(found - right) / X[name].std() < 0.05, name


# ---- a census ------------------------------------------------------------------------------------


def test_a_census_has_its_shares_and_means():
    n, m = 12_000, 40_000
    real = census(n)
    fit = synthesize(real, HELD, BOUNDS, epsilon=10.0)
    drawn = fit.sample(m, seed=1)
    rng, numbers = np.random.default_rng(1), ("age", "weight", "hours", "years", "gain", "loss", "rich")
    for margin, noise in zip(fit._fit.margins, fit._fit.count_noise, strict=True):
        bins = margin.bins
        if bins.name in numbers:
            exact = bins.tally(bins.code(real[bins.name])).astype(float)
            noisy = (exact + noise * rng.standard_normal(bins.released) for _ in range(30))
            made = [Margin.of_counts(bins, counts, n, noise) for counts in noisy]
            spread = np.std([one.probabilities @ bins.middles for one in made])
            a, b = real[bins.name].astype(float), drawn[bins.name].astype(float)
            assert abs(a.mean() - b.mean()) < 3.0 * np.hypot(spread, a.std() / np.sqrt(m)), bins.name
    for one, other in itertools.combinations([*LEVELS, "rich"], 2):
        tables = [
            pd.crosstab(t[one].fillna("?"), t[other].fillna("?"), normalize=True) for t in (real, drawn)
        ]
        away = tables[0].sub(tables[1], fill_value=0.0).abs()
        assert away.to_numpy().max() < 0.03, (one, other)
    assert ((drawn["kin"] == "husband") & (drawn["sex"] == "f")).mean() < 0.01
    assert epsilon_spent(fit) <= 10.0


def epsilon_spent(fit):
    return fit.privacy["epsilon"].max()


# ---- privacy -------------------------------------------------------------------------------------


def test_no_row_of_scores_is_longer_than_its_radius():
    rng = np.random.default_rng(16)
    levels, ordered = (
        Bins("l", tuple("abcd"), nominal=True, atoms=True),
        Bins.of("x", fs.Bounds({"x": (0, 1)})["x"], 5, atoms=True),
    )
    margins = [
        Margin(levels, np.full(4, 0.25), 0.1),
        Margin(ordered, np.full(ordered.count, 1 / ordered.count), 0.1),
    ]
    request = GramRequest({}, 1, 1, extra={"A": 5}, gaps=(0, 1))
    codes = np.column_stack([rng.integers(INVALID, 4, 400), rng.integers(INVALID, ordered.count, 400)])
    rows = request.score(margins, codes)
    assert (
        rows.shape == (400, 7)
        and ((rows.astype(object) ** 2).sum(axis=1) <= squared_radius(2) * 4**PLACES).all()
    )
    gone = request.score(margins, np.array([[MISSING, MISSING]]))[0]
    assert np.flatnonzero(gone).tolist() == [4, 6]
    assert not request.score(margins, np.array([[INVALID, INVALID]])).any()
    assert request.radius(request.width(2)) == squared_radius(2)


def test_the_radius_of_a_peer_is_part_of_what_both_agree_on():
    """A site is charged by the columns of the other, not by its scores: both must have heard the same."""
    told = [GramRequest({"B": 6}, 1, 1, extra={"A": 0, "B": extra}) for extra in (5, 4)]
    assert told[0].peer_radius("B") == squared_radius(1) < told[1].peer_radius("B") == squared_radius(2)
    assert told[0].agreed != told[1].agreed
    assert GramRequest({"B": 1}, 1, 1).agreed == to_json(["rank scores", 1])
    for wrong in ({"A": 0, "C": 0, "B": 1}, {"A": 0, "B": 6}):
        with pytest.raises(MessageError, match="at least one column"):
            GramRequest({"B": 6}, 1, 1, extra=wrong).check()
    margins = [Margin(Bins("l", tuple("abcd"), nominal=True), np.full(4, 0.25))]
    with pytest.raises(MessageError, match="as many scores"):
        GramRequest({"B": 6}, 1, 1, extra={"A": 2, "B": 5}).score(margins, np.zeros((3, 1), dtype=int))


def test_a_site_refuses_scores_that_its_columns_do_not_have():
    frame = pd.DataFrame({"l": list("abcd") * 50, "x": np.arange(200.0)})
    held = partition(frame, {"A": ["l"], "B": ["x"]}, 50.0)
    model = fs.CopulaSynthesizer(held, 1.0, {"l": list("abcd"), "x": (0, 200)})
    plan = model._planned
    assert plan.extra() == {"A": 3, "B": 0} and plan.width("A") == 4
    assert plan.radius("A") == plan.radius("B") == squared_radius(1)
    fit = model.fit()
    assert fit.privacy["epsilon"].max() == pytest.approx(1.0, rel=1e-3)
    for site in held.sites:
        spent = held.sites[site].site_ledger.charges.spent
        assert 0 <= spent - fit._fit.sums.site_cost(site) < 1e-15


def test_an_audit_of_columns_of_all_kinds_finds_no_fault(monkeypatch):
    monkeypatch.setattr(audit, "FEWEST_RELEASES", 30)
    frame = pd.DataFrame({"l": list("abcd") * 50, "x": np.arange(200.0), "k": np.arange(200) % 3})
    held = fs.ClientPartition.from_frame(frame, columns={"A": ["l", "x"], "B": ["k"]})
    model = fs.CopulaSynthesizer(held, 4.0, {"l": list("abcd"), "x": (-50, 200), "k": range(3)})
    result = fs.audit(model, releases=30, seed=1)
    assert result.passed and not result.faults
