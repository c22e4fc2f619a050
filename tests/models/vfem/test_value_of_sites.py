"""What the columns of a site contribute: R-squared of every set of sites, and Shapley values."""

from itertools import permutations

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import NotAvailableError

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")
COLUMNS = {"A": ["a"], "B": ["b1", "b2"], "C": ["c"]}


def draw(n=300):
    X = np.random.default_rng(0).normal(size=(n, 4))
    X[:, 1] += X[:, 0]
    X[:, 3] -= X[:, 2]
    table = pd.DataFrame(X, columns=["a", "b1", "b2", "c"])
    noise = np.random.default_rng(1).normal(size=n)
    return table.assign(y=table.sum(axis=1) + noise, id=range(n))


def partition_of(table, gone=0):
    frames = {site: table[["id", *columns]] for site, columns in COLUMNS.items()}
    frames["A"] = frames["A"].assign(y=table["y"])
    frames["B"] = frames["B"].iloc[gone:]
    return fs.ClientPartition.from_frames(frames, on="id")


def test_values_of_complete_records_are_those_of_least_squares():
    """R-squared of all sets by smf.ols, and the mean gain over all orders."""
    table = draw()
    fit = fs.VFEMRegression.from_formula("y ~ .", partition_of(table)).fit()
    found = fit.sites()

    def worth(sites):
        terms = [column for site in sites for column in COLUMNS[site]]
        return smf.ols("y ~ " + " + ".join(terms), table).fit().rsquared if terms else 0.0

    gains = {site: [] for site in COLUMNS}
    for order in permutations(COLUMNS):
        for place, site in enumerate(order):
            gains[site].append(worth(sorted(order[: place + 1])) - worth(sorted(order[:place])))
    np.testing.assert_allclose(found["value"], [np.mean(gains[k]) for k in COLUMNS], atol=1e-7)
    np.testing.assert_allclose(found["rsquared_alone"], [worth([k]) for k in COLUMNS], atol=1e-7)
    lost = [worth("ABC") - worth([j for j in COLUMNS if j != k]) for k in COLUMNS]
    np.testing.assert_allclose(found["rsquared_lost"], lost, atol=1e-7)
    names = list(fit.params.index)
    R = np.eye(5)[[names.index("b1"), names.index("b2")]]
    ols = smf.ols("y ~ a + b1 + b2 + c", table).fit()
    expected = float(ols.f_test([[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]).pvalue)
    assert found.loc["B", "pvalue"] == pytest.approx(float(fit.wald_test(R).pvalue))
    assert found.loc["B", "pvalue"] == pytest.approx(expected, rel=0.05)
    assert found["columns"].tolist() == [1, 2, 1] and found["entities"].tolist() == [300] * 3


@pytest.mark.parametrize("between", [None, "independent", "free"])
def test_values_sum_to_r_squared_and_none_is_negative_with_missing_blocks(between):
    fit = fs.VFEMRegression.from_formula("y ~ .", partition_of(draw(), 90), between=between).fit()
    found = fit.sites()
    assert found["value"].sum() == pytest.approx(fit.rsquared, abs=1e-9)
    assert (found[["rsquared_alone", "rsquared_lost", "value"]] >= 0.0).all(axis=None)
    assert found.loc["B", "entities"] == 210


def test_methods_without_a_model_of_all_columns_are_named():
    fit = fs.VFEMRegression.from_formula("y ~ .", partition_of(draw(), 90)).fit(method="cc")
    with pytest.raises(NotAvailableError, match=r"sites: method='cc' .* use 'vfem'"):
        fit.sites()
