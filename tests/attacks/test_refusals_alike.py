"""Refusals for different reasons that depend on rows: an analyst reads the same words from all."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")


def refusal(reason):
    """Refusal of one formula at a site, whose rows break one rule or another."""
    rng = np.random.default_rng(0)
    n = 600
    frame = pd.DataFrame(
        {
            "site": np.repeat(["S0", "S1", "S2"], n // 3),
            "a": np.resize([1.0, 0.0, 0.0, 0.0, 0.0], n),
            "b": np.resize([0.0, 1.0, 0.0, 1.0], n),
            "z": rng.uniform(1.0, 9.0, n),
            "y": rng.normal(size=n),
        }
    )
    here = frame.index < n // 3
    if reason == "a rare level":
        frame.loc[here, "b"] = (frame.index[here] < 2) * 1.0
    elif reason == "a product of one row":
        frame.loc[here & (frame.a == 1.0), "b"] = 0.0
        frame.loc[0, "b"] = 1.0
    elif reason == "a row that is nearly all of a column":
        frame.loc[10, "z"] = 1e4
    number = {"kind": "number"}
    levels = number | {"range": [0, 1], "levels": [0, 1]}
    columns = {"a": levels, "b": levels, "z": number | {"range": [0, 2e4]}, "y": number | {"range": [-9, 9]}}
    partition = fs.ClientPartition.from_frame(
        frame, by="site", policy="strict", published=dict.fromkeys(["S0", "S1", "S2"], columns)
    )
    with pytest.raises(PolicyError) as caught:
        fs.FederatedOLS.from_formula("y ~ a:z + b", partition).fit()
    return caught.value


def test_the_reason_is_in_no_word_and_no_field():
    reasons = ("a rare level", "a product of one row", "a row that is nearly all of a column")
    found = [refusal(reason) for reason in reasons]
    assert len({(type(one), str(one), one.rule, one.array) for one in found}) == 1
