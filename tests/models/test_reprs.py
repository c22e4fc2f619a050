"""Printed form of objects: one line that describes them, without data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from statsmodels.iolib.summary2 import summary_col

import fedstat as fs
from fedstat.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore")
N = 200
RNG = np.random.default_rng(3)
X, Z = RNG.normal(size=(2, N))
TABLE = pd.DataFrame({"id": range(N), "y": X + Z + RNG.normal(size=N), "x": X, "z": Z})
ROWS = fs.ClientPartition.from_frame(TABLE.assign(s=np.resize(list("ab"), N)).drop(columns="id"), by="s")
COLUMNS = fs.ClientPartition.from_frames({"A": TABLE[["id", "y", "x"]], "B": TABLE[["id", "z"]]}, on="id")


@pytest.mark.parametrize(
    ("model", "printed"),
    [
        (
            lambda: fs.FederatedGLM.from_formula("y ~ x + z", ROWS, family=sm.families.Gaussian()),
            "<FederatedGLM: y ~ x + z, Gaussian(link=Identity), 200 rows of 2 sites; see .fit()>",
        ),
        (
            lambda: fs.VFEMRegression.from_formula("y ~ x + z", COLUMNS),
            "<VFEMRegression: y ~ x + z, 200 entities of 2 sites; see .fit()>",
        ),
        (
            lambda: fs.VFEMRegression.from_formula("y ~ x + z", COLUMNS).design,
            "<Design: y ~ x + z, 200 entities, 2 columns of 2 sites>",
        ),
        (
            lambda: fs.CopulaSynthesizer(COLUMNS, epsilon=1.0, bounds=dict.fromkeys("xyz", (-9, 9))),
            "<CopulaSynthesizer: 200 entities of 2 sites; see .fit()>",
        ),
        (lambda: fs.M2SEM(COLUMNS, n_factors=1), "<M2SEM: 200 entities of 2 sites; see .fit()>"),
    ],
)
def test_models_say_what_they_are(model, printed):
    assert repr(model()) == printed


def test_a_long_formula_is_cut():
    formula = " + ".join(["y ~ x", "z", *[f"I(x ** {k})" for k in range(2, 9)]])
    printed = repr(fs.FederatedGLM.from_formula(formula, ROWS, family=sm.families.Gaussian()))
    assert "..., Gaussian" in printed and len(printed) < 150


@pytest.mark.parametrize(
    ("policy", "printed"),
    [
        (fs.Policy(), "Policy()"),
        (fs.Policy.strict(), "Policy.strict()"),
        (fs.Policy(min_count=9), "Policy(min_count=9)"),
        (fs.Policy.strict(min_count=9, formulas="any"), "Policy.strict(min_count=9, formulas='any')"),
        (
            fs.Policy(refused_kinds=frozenset({"raw columns", "per entity"})),
            "Policy(refused_kinds=frozenset({'per entity', 'raw columns'}))",
        ),
    ],
)
def test_policies_read_back(policy, printed):
    assert repr(policy) == printed
    assert eval(printed, {"Policy": fs.Policy}) == policy


def test_what_a_fit_leaves_behind_is_short():
    result = fs.VFEMRegression.from_formula("y ~ x + z", COLUMNS).fit()
    prediction = result.get_prediction(COLUMNS)
    assert repr(prediction) == "<PredictionResults: 200 entities; see .summary_frame()>"
    assert repr(result.ledger).startswith("<Ledger: ") and repr(result.ledger).endswith("; see .releases()>")
    assert len(repr(result.ledger)) < 100
    rows = result._repr_html_()
    assert "<table" in rows


def test_a_table_of_several_results_has_no_nan_where_there_is_an_r_squared():
    fits = [
        fs.VFEMRegression.from_formula("y ~ x + z", COLUMNS).fit(),
        fs.VerticalGLM.from_formula("y ~ x + z", COLUMNS).fit(),
        fs.FederatedOLS.from_formula("y ~ x + z", ROWS).fit(),
    ]
    table = str(summary_col(fits))
    assert "R-squared Adj." in table and "nan" not in table


@pytest.mark.parametrize("more", [{"missing": "drop"}, {"time": "bbs(t)"}, {"loss": "huber"}])
def test_private_boosting_lists_its_arguments(more):
    with pytest.raises(ModelError, match="the arguments are epsilon, public, delta, coordinator"):
        fs.FedFunctionBoost.from_formula("y ~ bols(x) + bols(z)", COLUMNS, epsilon=1.0, **more)
