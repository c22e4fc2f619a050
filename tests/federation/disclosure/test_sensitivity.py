"""A declared sensitivity is what replacing one entity's record does to what the real step releases."""

import json

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.federation.design.block import build_block
from fedstat.federation.design.formula.parse import SiteTerms
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.message import Request, pack_request, unpack_reply

assert [getattr(fs, name) for name in fs.__all__]  # every family installs its steps
N = 40
RNG = np.random.default_rng(4)
TABLE = pd.DataFrame({"y": RNG.normal(size=N), "x": RNG.normal(size=N), "g": RNG.choice(["a", "b"], N)})
TABLE.loc[3, "y"] = np.nan
TABLE.loc[5, ["x", "g"]] = np.nan
TABLE.loc[7, "x"] = np.nan
RECORDS = [
    {"y": 50.0, "x": -20.0, "g": "b"},
    {"y": np.nan, "x": 1.0, "g": "a"},
    {"y": 0.0, "x": np.nan, "g": None},
    {"y": 0.0, "x": np.nan, "g": "a"},
]
COLUMNS = ("x", "g")
BLOCK = {"site": "Bank", "terms": COLUMNS, "columns": COLUMNS, "min_count": 1, "intercept": True}
SPEC = build_block(TABLE, SiteTerms("Bank", COLUMNS, COLUMNS), partial="mean", min_count=1).spec.to_json()
USE = {"use": np.ones(N, dtype=bool)}
ASKED = {
    ("design", "open_response", "has"): [({}, {"response": "y", "columns": ["y"]})],
    ("design", "open_block", "seen"): [(USE, BLOCK | {"partial": how}) for how in ("drop", "mean")],
    ("design", "open_new_block", "seen"): [({}, {"spec": SPEC, "partial": how}) for how in ("drop", "mean")],
}


def answer(table, family, step, array, arrays, text):
    """Released statistics; None where only a category is missing, which no mean can replace."""
    site = Site("Bank", table, fs.Policy.open())
    request = Request("Bank", family, step, arrays, "s", json.dumps(text))
    try:
        return unpack_reply(site.answer(pack_request(request))).arrays[array].astype(float)
    except fs.errors.DesignError:
        return None


def test_every_declared_sensitivity_is_tried():
    declared = {
        (family, name, array)
        for family, steps in FAMILIES.items()
        for name, step in steps.items()
        for array, one in step.given.items()
        if one.sensitivity is not None
    }
    assert declared == set(ASKED)


@pytest.mark.parametrize("key", ASKED, ids="-".join)
def test_a_replaced_record_moves_an_array_by_its_sensitivity_at_most(key):
    family, step, array = key
    for arrays, text in ASKED[key]:
        before, moved = answer(TABLE, *key, arrays, text), []
        for row in range(0, N, 3):
            for record in RECORDS:
                table = TABLE.copy()
                table.loc[row, list(record)] = list(record.values())
                after = answer(table, *key, arrays, text)
                moved += [] if after is None else [np.linalg.norm(after - before)]
        # Attained, so that it is no looser than it need be.
        assert max(moved) == FAMILIES[family][step].gives[array].sensitivity
