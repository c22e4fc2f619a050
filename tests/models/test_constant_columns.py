"""All constant columns are named at once, by every family."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import DesignError

TABLE = pd.DataFrame(np.random.default_rng(0).normal(size=(120, 2)), columns=["y", "x"]).assign(
    k=1.0, same=0.1, flag=[0, 1] * 60, site=["A", "B", "C"] * 40, id=range(120)
)
BY_COLUMNS = {
    "VFEMRegression": "y ~ k + x + same",
    "VFEMGLM": "flag ~ k + x + same",
    "VerticalGLM": "y ~ k + x + same",
    "LASER": "flag ~ k + x + same",
}
BY_ROWS = {
    "FederatedOLS": "y ~ k + x + same",
    "GLORE": "flag ~ k + x + same",
    "FedAvg": "flag ~ k + x + same",
}


@pytest.mark.parametrize("name", BY_COLUMNS)
def test_sites_with_columns_name_theirs(name):
    frames = {"A": TABLE[["id", "y", "flag"]], "B": TABLE[["id", "k", "x", "same"]]}
    partition = fs.ClientPartition.from_frames(frames, on="id")
    options = {"family": sm.families.Binomial()} if name == "VFEMGLM" else {}
    with pytest.raises(DesignError, match="columns 'k', 'same' at site 'B' are constant over their entities"):
        getattr(fs, name).from_formula(BY_COLUMNS[name], partition, **options).fit()


@pytest.mark.parametrize("name", BY_ROWS)
def test_sites_with_rows_name_them_together(name):
    partition = fs.ClientPartition.from_frame(TABLE.drop(columns="id"), by="site")
    with pytest.raises(DesignError, match="design columns 'k', 'same' are constant over the complete rows"):
        getattr(fs, name).from_formula(BY_ROWS[name], partition).fit()
