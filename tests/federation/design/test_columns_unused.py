"""Columns of one value, or none: a formula that leaves them out is not stopped, one that reads them is."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DesignError, EstimationError

pytestmark = pytest.mark.filterwarnings("ignore")
FLAT = {"one": 1.0, "word": "same", "none": np.nan, "nothing": None}
TOLD = {
    "one": "'one'.* constant",
    "word": "'word'.* same level",
    "none": "'none'.* (no value|no row with all)",
    "nothing": "'nothing'.* (no value|no row with all)",
}


def table(n=300):
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(size=n)}).assign(**FLAT)
    return frame.assign(y=frame["x"] + rng.normal(size=n), site=np.resize(list("ABC"), n), k=range(n))


def partition(layout, policy="open"):
    frame = table()
    if layout == "one table":
        return fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    if layout == "rows":
        parts = {name: part.drop(columns="site") for name, part in frame.groupby("site")}
        return fs.ClientPartition.from_frames(parts, layout="horizontal", policy=policy)
    held = {"A": frame[["k", "y", "x", "one", "nothing"]], "B": frame[["k", "z", "word", "none"]]}
    return fs.ClientPartition.from_frames(held, on="k", policy=policy)


@pytest.mark.parametrize("policy", ["open", "strict"])
@pytest.mark.parametrize("layout", ["one table", "rows", "columns"])
def test_a_column_that_no_formula_uses_stops_nothing(layout, policy):
    held = partition(layout, policy)
    assert held.describe().n_entities == 300
    if layout == "columns":
        if policy == "open":
            assert fs.VFEMRegression.from_formula("y ~ x + z", held).fit().nobs == 300
    else:
        assert fs.FederatedGLM.from_formula("y ~ x + z", held).fit().nobs == 300


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_formula_that_uses_it_is_refused_with_its_name(layout, name):
    family = fs.FederatedGLM if layout == "rows" else fs.VFEMRegression
    with pytest.raises(DesignError, match=TOLD[name].replace("same level", "(same level|constant)")):
        family.from_formula(f"y ~ x + z + {name}", partition(layout)).fit()


def test_a_response_of_one_value_is_refused():
    with pytest.raises(EstimationError, match=r"'one' is below .*is constant"):
        fs.FederatedGLM.from_formula("one ~ x", partition("rows")).fit()
    with pytest.raises(EstimationError, match="A: the response is constant"):
        fs.VFEMRegression.from_formula("one ~ z", partition("columns")).fit()
    with pytest.raises(EstimationError, match="response does not vary"):
        fs.FedFunctionBoost.from_formula("one ~ x", partition("rows")).fit(steps=2)
