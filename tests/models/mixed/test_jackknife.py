"""Intervals of standard deviations from influences of groups."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from scipy import stats

import fedstat as fs
from fedstat.errors import NotAvailableError
from fedstat.models.mixed.steps import LEAST_LEFT

OPEN = fs.Policy(min_count=2, min_events=0, min_level_count=1)


def visits(groups=24, seed=1, wards=0):
    """Groups at three sites; wards hold some of them each."""
    rng = np.random.default_rng(seed)
    size = rng.integers(4, 9, groups)
    g, t = np.repeat(np.arange(groups), size), np.concatenate([np.arange(m) / 4.0 for m in size])
    y = 1.0 + 0.4 * t + 1.2 * rng.normal(size=groups)[g] + rng.normal(size=groups)[g] * t
    table = pd.DataFrame({"g": g, "t": t, "y": y + rng.normal(size=len(g)), "site": g % 3})
    if wards:
        table["ward"] = g % wards
        table["y"] += 1.5 * rng.normal(size=wards)[g % wards]
        table["site"] = table["ward"] % 3
    return table


def model_of(formula, table, **settings):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=OPEN)
    return fs.FederatedMixed.from_formula(formula, partition, **settings)


def dense(fit, table, terms, outermost, reml):
    """Influences of groups from dense matrices of the pooled rows, by numerical derivatives in variances.

    `terms` are pairs of a column of groups and a matrix of columns of effects.
    """
    X, y = np.column_stack([np.ones(len(table)), table["t"]]), table["y"].to_numpy()
    scale = fit.variances["variance"].iloc[-1]
    start, places = [], []
    for column, Z in terms:
        T = fit.covariance(column).to_numpy() / scale
        pairs = [(a, b) for b in range(Z.shape[1]) for a in range(b, Z.shape[1])]
        places.append(pairs)
        start += [T[pair] for pair in pairs]
    phi = np.array([*start, np.log(scale)])

    def matrix(phi):
        out, values = np.eye(len(y)), iter(phi[:-1])
        for (column, Z), pairs in zip(terms, places, strict=True):
            T = np.zeros((Z.shape[1],) * 2)
            for a, b in pairs:
                T[a, b] = T[b, a] = next(values)
            same = table[column].to_numpy()[:, None] == table[column].to_numpy()
            out += (Z @ T @ Z.T) * same
        return np.exp(phi[-1]) * out

    V = matrix(phi)
    C = np.linalg.inv(X.T @ np.linalg.solve(V, X))
    residual = y - X @ (C @ X.T @ np.linalg.solve(V, y))
    step = 1e-5
    slopes = [(matrix(phi + h) - matrix(phi - h)) / (2.0 * step) for h in step * np.eye(len(phi))]
    scores, informations = [], []
    for one in table[outermost].unique():
        own = np.flatnonzero(table[outermost] == one)
        block = np.ix_(own, own)
        inverse = np.linalg.inv(V[block])
        product = [inverse @ S[block] for S in slopes]
        expected = V[block] - reml * X[own] @ C @ X[own].T
        deviation = np.outer(residual[own], residual[own]) - expected
        scores.append([np.sum((P @ inverse) * deviation) / 2.0 for P in product])
        informations.append([[np.trace(P @ Q) / 2.0 for Q in product] for P in product])
    scores, informations = np.array(scores), np.array(informations)
    total = informations.sum(axis=0)
    moved = np.array([np.linalg.solve(total - G, u) for u, G in zip(scores, informations, strict=True)])
    sds = [np.array([pair[0] == pair[1] for pair in pairs]) for pairs in places]
    lines = np.array([*np.concatenate(sds), True])
    changes = moved / (2.0 * np.append(phi[:-1], 1.0))
    changes[:, :-1] += 0.5 * moved[:, -1:]
    return -np.log(np.maximum(1.0 - 2.0 * changes[:, lines], LEAST_LEFT)) / 2.0


def columns_of(table, *names):
    return np.column_stack([np.ones(len(table)) if name == "1" else table[name] for name in names])


CASES = {
    "intercepts": ("y ~ t + (1 | g)", 0, [("g", ["1"])], "g"),
    "slopes": ("y ~ t + (1 + t | g)", 0, [("g", ["1", "t"])], "g"),
    "nested": ("y ~ t + (1 | g) + (1 | ward)", 12, [("g", ["1"]), ("ward", ["1"])], "ward"),
}


@pytest.mark.parametrize("reml", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_influences_are_those_of_dense_matrices_of_the_pooled_rows(case, reml):
    formula, wards, terms, outermost = CASES[case]
    table = visits(48 if wards else 24, wards=wards)
    fit = model_of(formula, table, reml=reml).fit(tol=1e-10)
    terms = [(column, columns_of(table, *names)) for column, names in terms]
    expected = dense(fit, table, terms, outermost, reml)
    found = fit._record.fit.by_group.influences
    assert_allclose(found, [(expected**2).sum(axis=0), (expected**4).sum(axis=0)], rtol=1e-5)
    # The scores add up to zero: expected influences are around zero as well.
    assert (np.abs(expected.mean(axis=0)) < 0.3 * expected.std(axis=0)).all()


def test_the_interval_is_that_of_fits_without_one_group_each():
    table = visits(20)
    model = partial(model_of, "y ~ t + (1 + t | g)")
    fit = model(table).fit()
    logs = np.log([model(table[table["g"] != g]).fit().variances["std_dev"] for g in range(20)])
    changes = logs - logs.mean(axis=0)
    squares = (changes**2).sum(axis=0)
    excess = 20.0 * (changes**4).sum(axis=0) / squares**2 - 1.0
    half = stats.t.isf(0.025, np.minimum(40.0 / excess, 19.0)) * np.sqrt(19.0 / 20.0 * squares)
    found = fit.conf_int_variances()
    assert (found["method"] == "jackknife").all()
    width = np.log(found["conf_high"] / found["conf_low"]) / 2.0
    # One step is not enough for the deviation of the slope, which is hardly known.
    kept = [0, 2]
    assert_allclose(width.iloc[kept], half[kept], rtol=0.15)
    assert_allclose(np.sqrt(found["conf_high"] * found["conf_low"]), found["std_dev"])


def test_a_deviation_that_is_hardly_known_has_a_profile_interval():
    rng = np.random.default_rng(4)
    table = visits(30)
    table["y"] = 1.0 + 0.2 * rng.normal(size=30)[table["g"]] + rng.normal(size=len(table))
    fit = model_of("y ~ t + (1 | g)", table).fit()
    found, profile = fit.conf_int_variances(), fit.conf_int_variances(method="profile")
    assert fit._record.fit.jackknife[0][0] > 1.0 and found["method"].tolist() == ["profile", "jackknife"]
    assert found.iloc[0].tolist() == profile.iloc[0].tolist()


def test_few_groups_have_profile_intervals_and_the_jackknife_says_where_there_is_none():
    few = model_of("y ~ t + (1 | g)", visits(9)).fit()
    assert set(few.conf_int_variances()["method"]) == {"profile"}
    assert set(few.conf_int_variances(method="jackknife")["method"]) == {"jackknife"}
    count = visits().assign(k=lambda t: (t["y"] > 1.0) * 1)
    logit = model_of("k ~ t + (1 | g)", count, family=sm.families.Binomial()).fit()
    rng = np.random.default_rng(0)
    flat = visits().assign(y=lambda t: rng.normal(size=len(t)) - t.groupby("g")["y"].transform("size"))
    flat["y"] -= flat.groupby("g")["y"].transform("mean")
    for fit in (logit, model_of("y ~ t + (1 | g)", flat).fit()):
        assert "normal_effects" in fit.diagnostics()["kind"].tolist()
        with pytest.raises(NotAvailableError, match="use method='profile'"):
            fit.conf_int_variances(method="jackknife")
        assert set(fit.conf_int_variances(method="profile")["method"]) == {"profile"}
    assert "normal_effects" in few.diagnostics()["kind"].tolist()
    many = model_of("y ~ t + (1 | g)", visits()).fit()
    assert "normal_effects" not in many.diagnostics()["kind"].tolist()


def test_influences_do_not_depend_on_masks_and_are_saved(tmp_path):
    model = model_of("y ~ t + (1 | g)", visits())
    fit = model.fit()
    assert_allclose(
        model.fit(masked=False)._record.fit.by_group.influences, fit._record.fit.by_group.influences
    )
    fit.save(tmp_path / "fit.fed")
    pd.testing.assert_frame_equal(
        fs.load(tmp_path / "fit.fed").conf_int_variances(), fit.conf_int_variances()
    )
