"""method="weighted": the estimate, its jackknife, and what the exchange reveals."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from weighted_oracle import FORMULA, TRUTH, draw, partition_of, sums_of
from weighted_simulation import coverage, simulate

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.models.vfem.weighted import weighted_estimate
from fedstat.models.vfem.weighted_steps import SPREAD, calibrated_weights, mask_of, response_basis


@pytest.fixture(scope="module")
def skewed():
    data = draw(0, "exponential")
    model = fs.VFEMRegression.from_formula(FORMULA, partition_of(*data))
    return data, model, model.fit(method="weighted")


def test_the_estimate_is_that_of_the_joined_data(skewed):
    (x, y, has), _, result = skewed
    sums = sums_of(x, y, has, result.covariance.size)
    expected, _, cov = weighted_estimate(sums)
    unit = y.std() / sums.units.scale
    # The masks of weights cost digits of the fixed-point products.
    off = (result.params.to_numpy()[1:] - expected[2:8] * unit) / result.bse.to_numpy()[1:]
    assert np.abs(off).max() < 0.001
    np.testing.assert_allclose(result.bse.to_numpy()[1:], np.sqrt(np.diag(cov))[2:8] * unit, rtol=0.001)
    assert result.df_inference == result.covariance.size - 1 and result.use_t


def test_it_is_right_where_maximum_likelihood_is_not(skewed):
    _, model, result = skewed
    ml = model.fit()
    off, off_ml = (np.abs(one.params.to_numpy()[1:] - TRUTH) / one.bse.to_numpy()[1:] for one in (result, ml))
    assert off.max() < 4.0 and np.median(off) < 2.0
    assert off_ml.max() > 6.0 and np.median(off_ml) > 2.0
    assert "fit(method='weighted')" in " ".join(str(ml.summary()).split())
    assert "RESPONSE NOT NORMAL" not in str(result.summary())
    assert "Iterations:" in str(ml.summary())
    assert "Iterations:" not in str(result.summary()) and "Relative score:" not in str(result.summary())


def test_without_missing_blocks_it_is_least_squares_and_its_jackknife():
    x, y, has = draw(1, "t5", n=1500, missing=False)
    result = fs.VFEMRegression.from_formula(FORMULA, partition_of(x, y, has)).fit(method="weighted")
    expected = sm.OLS(y, sm.add_constant(x)).fit().params
    assert (np.abs(result.params - expected) / result.bse).max() < 0.001
    G = result.covariance.size
    code = np.random.default_rng(len(y)).permutation(len(y)) % G
    left = [sm.OLS(y[code != g], sm.add_constant(x[code != g])).fit().params for g in range(G)]
    expected = np.sqrt((G - 1) / G * ((left - np.mean(left, axis=0)) ** 2).sum(axis=0))
    np.testing.assert_allclose(result.bse[1:], expected[1:], rtol=0.001)


def test_columns_of_the_response_holder_take_part_in_the_weights():
    x, y, has = draw(2, "exponential", n=3000)
    ids = np.arange(len(y))
    tables = {
        "H": pd.DataFrame({"id": ids, "y": y, "A1": x[:, 0]}),
        "B": pd.DataFrame({"id": ids, "B1": x[:, 2]})[has[1]],
        "C": pd.DataFrame({"id": ids, "C1": x[:, 4]})[has[2]],
    }
    result = fs.VFEMRegression.from_formula(
        "y ~ A1 + B1 + C1", fs.ClientPartition.from_frames(tables, on="id")
    ).fit(method="weighted")
    population = np.linalg.lstsq(np.column_stack([np.ones(len(y)), x[:, [0, 2, 4]]]), y, rcond=None)[0]
    assert (np.abs(result.params - population) < 3.5 * result.bse).all()
    tables["H"].loc[::3, "A1"] = np.nan
    with pytest.raises(NotAvailableError, match="has its own columns for all entities"):
        fs.VFEMRegression.from_formula(
            "y ~ A1 + B1 + C1", fs.ClientPartition.from_frames(tables, on="id", partial="drop")
        ).fit(method="weighted")


def test_sites_that_share_too_few_entities_are_named():
    x, y, has = draw(3, "normal")
    has[2] &= ~has[1] | (np.arange(len(y)) % 20 == 0)
    with pytest.raises(EstimationError, match="columns of 'B' and 'C'"):
        fs.VFEMRegression.from_formula(FORMULA, partition_of(x, y, has)).fit(method="weighted")


@pytest.mark.parametrize(
    "given", [{"cov_type": "expected"}, {"max_moved": 0.1}, {"correction": "small-sample"}]
)
def test_arguments_of_maximum_likelihood_are_refused(skewed, given):
    with pytest.raises(ModelError, match="method='weighted': has no"):
        skewed[1].fit(method="weighted", **given)


def test_results_are_saved_predicted_and_previewed(skewed, tmp_path):
    _, model, result = skewed
    result.save(tmp_path / "fit.json")
    again = fs.load(tmp_path / "fit.json")
    np.testing.assert_array_equal(again.params, result.params)
    assert again.df_inference == result.df_inference
    assert np.isfinite(result.predict(model.partition)).all()
    with pytest.raises(NotAvailableError, match="method='weighted'"):
        result.get_prediction(model.partition)
    with pytest.raises(NotAvailableError, match="maximizes no likelihood"):
        _ = result.llf
    assert "weight" in str(model.explain(method="weighted"))


# ---- what is revealed --------------------------------------------------------------------------


def test_no_site_receives_the_weights_and_a_share_alone_says_nothing_about_them(skewed):
    (_, y, has), _, result = skewed
    w = calibrated_weights(response_basis(((y - y.mean()) / y.std())[:, None]), has[0])
    w = w / np.abs(w).max()

    identity = SimpleNamespace(secret=lambda purpose: b"0" * 32)
    mask = mask_of(SimpleNamespace(trust=SimpleNamespace(identity=identity)), "A B", w)
    for share in (mask, w - mask):
        assert abs(np.corrcoef(share, w)[0, 1]) < 4.0 / np.sqrt(len(y))
        assert share.std() > 0.9 * SPREAD
    kinds = {(entry.step, entry.array): entry.kind for entry in result.ledger.entries}
    assert kinds["weigh_columns", "shown"] == "sealed" and "per entity" not in kinds.values()


def test_a_group_has_twice_as_many_entities_as_sums_that_depend_on_the_response(skewed):
    (_, y, _), _, result = skewed
    sets, pairs = 6, 3
    sums = 3 * (sets + 1) + 9 * (5 + 2) + pairs * 4  # of (1, y); (x, xx') and x y by set and site; x_j x_k
    assert len(y) // result.covariance.size >= 2 * sums


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["normal", "exponential", "t5"])
def test_intervals_cover_as_stated_and_the_price_under_normality_is_small(errors):
    found, se, ml = simulate(errors, 100, em=errors == "normal")
    cover = coverage(found, se)
    assert 0.92 < cover.mean() < 0.98 and cover.min() > 0.88
    if errors == "normal":
        assert (found.std(axis=0) / ml.std(axis=0)).mean() < 1.35


@pytest.mark.parametrize(("slope", "alarm"), [(0.0, False), (1.2, True)])
@pytest.mark.parametrize("errors", ["normal", "exponential"])
def test_missingness_by_columns_of_another_site_is_an_alarm(slope, alarm, errors):
    """B lacks entities with small columns of A: the weights, which know the response only, cannot mend it."""
    rng = np.random.default_rng(7)
    X = rng.multivariate_normal(np.zeros(4), 0.4 + 0.6 * np.eye(4), 1_200)
    noise = rng.exponential(size=1_200) - 1.0 if errors == "exponential" else rng.normal(size=1_200)
    y = X @ np.full(4, 0.5) + noise
    standard = (y - y.mean()) / y.std()

    def has(score):
        return rng.random(1_200) < 1.0 / (1.0 + np.exp(-score))

    table = pd.DataFrame(X, columns=list("abcd")).assign(id=range(1_200), y=y)
    frames = {
        "H": table[["id", "y"]],
        "A": table.loc[has(0.8 + 0.8 * standard), ["id", "a", "b"]],
        "B": table.loc[has(0.5 + slope * X[:, 0] + 0.5 * standard), ["id", "c", "d"]],
    }
    partition = fs.ClientPartition.from_frames(frames, on="id")
    fit = fs.VFEMRegression.from_formula("y ~ .", partition).fit(method="weighted")
    text = " ".join(str(fit.summary()).split())
    assert ("MISSINGNESS DEPENDS ON OTHER COLUMNS: entities with a record at B" in text) == alarm
