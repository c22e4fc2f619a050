"""A coordinator that asks for other draws of missing cells, and takes sums over completed tables."""

import json

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import FedstatError, PolicyError
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.models.impute import protocol

N = 240
RNG = np.random.default_rng(7)
AGES = RNG.normal(60.0, 9.0, N).round(3)
Z, W = RNG.normal(size=(2, N))
PLACES = np.arange(N) % (N // 3)
POLICIES = pytest.mark.parametrize("policy", [fs.Policy(), fs.Policy.strict()], ids=["default", "strict"])


def people(policy, alone=0):
    """Three sites; of each, 20 rows lack z and w, and some lack z alone."""
    table = pd.DataFrame({"site": np.repeat(["A", "B", "C"], N // 3), "age": AGES, "z": Z, "w": W})
    table.loc[(PLACES - alone) < 20, "z"] = np.nan
    table.loc[PLACES < 20, "w"] = np.nan
    published = {name: {"kind": "number", "range": [-200, 200]} for name in ("age", "z", "w")}
    return fs.ClientPartition.from_frame(
        table, by="site", policy=policy, published=dict.fromkeys("ABC", published)
    )


@POLICIES
def test_numbers_are_not_drawn_as_answers_to_a_question(monkeypatch, policy):
    """With large coefficients, zeros and ones would say who is older than any number."""
    run = protocol.ChainedEquations._run

    def forging(self, step, text, arrays):
        if step == "draw_cells":
            large = np.tile([-70e6, 1e6], (2, 1))
            arrays = {"beta": large, "estimate": large, "sigma": np.zeros(2)}
            text = json.dumps({**json.loads(text), "kind": "binary"})
        return run(self, step, text, arrays)

    monkeypatch.setattr(protocol.ChainedEquations, "_run", forging)
    partition = people(policy)
    with pytest.raises(FedstatError) as caught:
        fs.impute(partition, "age ~ z", m=2, iterations=1, seed=1)
    # Under strict the owner alone reads the reason.
    assert "drawn as what it is" in f"{caught.value} {partition.sites['A'].refusals.reasons}"


def begin(partition, *columns):
    """Begin an imputation at a site, without any model before."""
    request = {"token": "0" * 32, "columns": columns, "chains": 2, "seed": 1}
    question = Request("A", "impute_rows", "begin_imputation", {}, f"s {columns}", json.dumps(request))
    return unpack_reply(partition.sites["A"].answer(pack_request(question)))


@POLICIES
@pytest.mark.parametrize("alone", [0, 1, 4, 5])
def test_the_drawn_rows_of_two_columns_differ_by_none_or_enough(policy, alone):
    """Both could be drawn as ages: the difference of their sums is of the rows that lack one of them."""
    partition = people(policy, alone)
    if alone in (0, 5):
        assert json.loads(begin(partition, "age", "z", "w").text)["drawn"] == {"z": 20 + alone, "w": 20}
        return
    with pytest.raises(PolicyError):
        begin(partition, "age", "z", "w")
    # Nor one after the other.
    partition = people(policy, alone)
    begin(partition, "age", "z")
    with pytest.raises(PolicyError):
        begin(partition, "age", "w")


def test_values_of_single_rows_are_not_copied_where_all_sums_are_remembered():
    arguments = {"m": 2, "iterations": 1, "seed": 1, "numbers": "matching"}
    with pytest.raises(PolicyError, match="copies values of single rows"):
        fs.impute(people(fs.Policy.strict()), "age ~ z", **arguments)
    fs.impute(people(fs.Policy()), "age ~ z", **arguments)
