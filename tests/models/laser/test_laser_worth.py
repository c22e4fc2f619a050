"""Quality of predictions: thresholds, intervals of areas, sites whose columns are permuted."""

import numpy as np
import pytest
import statsmodels.api as sm
from laser_cases import SITES, customers, model, partition

import fedstat as fs
from fedstat.errors import DescriptionError, ModelError, NotAvailableError
from fedstat.federation.disclosure.policy import Policy
from fedstat.models.laser import steps

QUICK = {"epochs": 8, "batch_size": 64, "learning_rate": 0.02}
EVERY = "bank + shop + telecom"
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


@pytest.fixture(scope="module")
def result():
    return model(partition(1500)).fit(**QUICK, masked=False)


@pytest.fixture(scope="module")
def tables():
    return customers(800, seed=5, missing=0.0)


@pytest.fixture(scope="module")
def other(tables):
    return fs.ClientPartition.from_frames(tables, on="id")


def area(P, y):
    return (P[y == 1][:, None] > P[y == 0]).mean()


def test_importance_is_what_is_lost_where_a_block_is_exchanged(result, tables, other, monkeypatch):
    """Against predictions of tables whose rows are exchanged by hand, in clear."""
    rng = np.random.default_rng(3)
    orders = {number: rng.permutation(800) for number in (1, 2)}
    monkeypatch.setattr(steps, "secret_order", lambda data, n, number: orders[number])
    frame = result.importance(other, repeats=2)
    y = tables["bank"]["y"].to_numpy()
    complete = area(result.predict_proba(other)[1.0].to_numpy(), y)
    for k in SITES:
        own = [c for c in tables[k] if c not in ("id", "y")]
        lost = []
        for order in orders.values():
            moved = tables[k].copy()
            moved[own] = moved[own].to_numpy()[order]
            P = result.predict_proba(fs.ClientPartition.from_frames({**tables, k: moved}, on="id"))
            lost.append(complete - area(P[1.0].to_numpy(), y))
        assert frame.loc[k, "importance"] == pytest.approx(np.mean(lost), abs=3e-3)
        assert frame.loc[k, "std_error"] == pytest.approx(np.std(lost, ddof=1) / np.sqrt(2), abs=3e-3)


def test_importance_of_a_site_that_matters(result, other):
    frame = result.importance(other, repeats=5)
    assert frame["importance"].idxmax() == "bank" and frame.loc["bank", "low"] > 0.1
    assert (frame["low"] <= frame["importance"]).all() and (frame["importance"] <= frame["high"]).all()
    assert frame.equals(result.importance(other, repeats=5))


def test_importance_of_a_site_counts_the_entities_that_it_has(result):
    """A client that few have is worth to these what it is worth, and not less."""
    tables = customers(1200, seed=6, missing=0.0)
    few = {**tables, "telecom": tables["telecom"].iloc[:400]}
    some, every = (
        result.importance(fs.ClientPartition.from_frames(one, on="id"), repeats=6).loc["telecom"]
        for one in (few, tables)
    )
    assert every["importance"] > 0.04
    assert some["importance"] > 0.6 * every["importance"]


def test_a_permutation_is_the_sites_own(other):
    data = {k: site._data for k, site in other.sites.items()}
    orders = [steps.secret_order(data[k], 50, n).tolist() for k in SITES for n in (1, 2)]
    assert len({tuple(order) for order in orders}) == 6
    assert sorted(orders[0]) == list(range(50))


def test_a_site_that_answers_one_evaluation_refuses_importance(result, tables):
    once = fs.ClientPartition.from_frames(tables, on="id", policy=Policy(evaluation="once"))
    with pytest.raises(DescriptionError, match='evaluation = "any"'):
        result.importance(once, repeats=2)


@pytest.mark.parametrize("kind", ["multiclass", "normal"])
def test_importance_of_other_responses(kind):
    fitted = model(partition(900, kind=kind), outcome=kind).fit(**QUICK)
    frame = fitted.importance(partition(600, seed=3, kind=kind), repeats=3)
    assert frame.loc["bank", "low"] > 0.0


def test_threshold_is_that_of_largest_f1(result, tables, other):
    P, y = result.predict_proba(other)[1.0].to_numpy(), tables["bank"]["y"].to_numpy()

    def f1(at):
        return 2.0 * ((at < P) & (y == 1)).sum() / ((at < P).sum() + y.sum())

    found = result.evaluate(other)
    at = found.threshold(EVERY)
    best = max(f1(t) for t in np.linspace(0.02, 0.98, 200))
    assert f1(at) == pytest.approx(best, abs=0.01)
    row = found.to_frame(threshold=at).loc[EVERY]
    assert row["f1"] == pytest.approx(f1(at), abs=0.01)
    assert row["accuracy"] == pytest.approx(((at < P) == y).mean(), abs=0.01)
    assert found.to_frame(threshold=0.5).loc[EVERY, "f1"] == pytest.approx(f1(0.5), abs=0.01)
    youden = found.threshold(EVERY, by="youden")
    gain = [(P[y == 1] > t).mean() - (P[y == 0] > t).mean() for t in (youden, at)]
    assert gain[0] >= gain[1] - 0.01


def test_predictions_by_a_threshold(result, other):
    at = result.calibration.threshold(by="youden")
    P = result.predict_proba(other)[1.0]
    np.testing.assert_array_equal(result.predict(other, threshold=at), (at < P).astype(float))
    np.testing.assert_array_equal(result.predict(other), (P > 0.5).astype(float))


def test_a_table_that_the_analyst_holds_is_split_by_site(result, tables, other):
    """One table with the columns of all sites, some of whose rows lack those of a site."""
    table = tables["bank"].merge(tables["shop"], on="id").merge(tables["telecom"], on="id")
    table.index = [f"row {i}" for i in range(len(table))]
    expected = result.predict_proba(other).to_numpy()
    np.testing.assert_array_equal(result.predict_proba(table), expected)
    assert result.predict(table).index.equals(table.index)
    assert result.predict_set(table).index.equals(table.index)
    shop = [column for column in tables["shop"] if column != "id"]
    table.loc["row 5", shop] = np.nan
    frames = {**tables, "shop": tables["shop"].drop(index=5)}
    fewer = result.predict_proba(fs.ClientPartition.from_frames(frames, on="id")).to_numpy()
    np.testing.assert_array_equal(result.predict_proba(table), fewer)


def test_intervals_of_areas_are_those_of_delong(result, tables, other):
    P, y = result.predict_proba(other)[1.0].to_numpy(), tables["bank"]["y"].to_numpy()
    above = (P[y == 1][:, None] > P[y == 0]).astype(float)
    A, n1, n0 = above.mean(), (y == 1).sum(), (y == 0).sum()
    error = np.sqrt(above.mean(axis=1).var(ddof=1) / n1 + above.mean(axis=0).var(ddof=1) / n0)
    row = result.evaluate(other).to_frame().loc[EVERY]
    assert row["auc"] == pytest.approx(A, abs=3e-3)
    assert (row["auc_high"] - row["auc_low"]) / 2.0 == pytest.approx(1.959964 * error, rel=0.02)


def test_a_calibration_curve_of_an_evaluation(result, tables, other):
    P, y = result.predict_proba(other)[1.0].to_numpy(), tables["bank"]["y"].to_numpy()
    curve = result.evaluate(other).evaluation(EVERY).calibration().loc[EVERY]
    assert curve["n"].sum() == 800 and curve["events"].sum() == y.sum()
    high = curve[curve["low"] >= 0.0]
    assert high["events"].sum() / high["n"].sum() == pytest.approx(y[P > 0.5].mean(), abs=0.02)
    axes = result.evaluate(other).evaluation().plot_calibration()
    found = result.evaluate(other).evaluation(EVERY)
    assert found.brier == pytest.approx(np.mean((P - y) ** 2), rel=1e-8)
    slope = sm.GLM(y, sm.add_constant(np.log(P / (1.0 - P))), family=sm.families.Binomial()).fit()
    # In bins of a fiftieth of log odds; small bins are merged.
    assert (np.abs(found.recalibration.params - slope.params) < 0.1 * slope.bse).all()
    at = found.confusion(0.5).loc["all sites"]
    assert at["tp"] == pytest.approx(((P > 0.5) & (y == 1)).sum(), abs=5)
    assert axes.get_ylabel() == "observed proportion"


def test_what_has_no_threshold_or_head_says_so(result, other):
    normal = model(partition(400, kind="normal"), outcome="normal").fit(epochs=1, batch_size=200)
    with pytest.raises(NotAvailableError, match="does not have two classes"):
        normal.calibration.threshold()
    for wrong in (0.0, 1.0, "half"):
        with pytest.raises(ModelError, match="threshold: expected a number between 0 and 1"):
            result.predict(other, threshold=wrong)
    with pytest.raises(ModelError, match="two classes"):
        normal.predict(other, threshold=0.5)
    with pytest.raises(ModelError, match="repeats"):
        result.importance(other, repeats=1)
    with pytest.raises(ModelError, match="alpha"):
        result.importance(other, alpha=1.0)
    with pytest.raises(ModelError, match="heads='site'"):
        result.predict_proba(other, at="bank")


def test_heads_of_sites_predict_apart_and_on_average():
    fitted = model(partition(600), heads="site").fit(**QUICK)
    tables = customers(200, seed=7, missing=0.0)
    tables["shop"] = tables["shop"].iloc[50:]
    new = fs.ClientPartition.from_frames(tables, on="id")
    each = {k: fitted.predict_proba(new, at=k) for k in SITES}
    assert each["shop"].iloc[:50].isna().all(axis=None) and each["shop"].iloc[50:].notna().all(axis=None)
    mean = np.nanmean([each[k].to_numpy() for k in SITES], axis=0)
    np.testing.assert_allclose(fitted.predict_proba(new), mean, atol=1e-12)
    assert np.abs(each["bank"] - each["telecom"]).to_numpy().max() > 1e-6
