"""Memory that a small question claims at a site, by numbers and shapes that it names: none of it is given."""

import json
import secrets
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import DesignError, FedstatError, MessageError, PartitionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.release_history import convert_history
from fedstat.federation.disclosure.site import load_families
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.linkage import PersistentAlignment, load_alignment
from fedstat.federation.tables.table import FrameTable
from fedstat.models.vertical.exchange.patterns import NORMAL

load_families()
N, MOST = 300, 100 * 2**20
"""Rows of the tables, and bytes that a question may take of a site of this size."""
RNG = np.random.default_rng(0)
KEY = range(N)
FRAMES = {"P": pd.DataFrame({"k": KEY, "y": RNG.normal(size=N)})} | {
    c: pd.DataFrame({"k": KEY, **{f"{c}{j}": RNG.normal(size=N) for j in range(4)}}) for c in "AB"
}
EVERY, HALVES = np.ones(N, bool), np.arange(N) % 2
FIT = {"keep": EVERY, "rows": np.arange(N)}
SPLINES = ":".join(f"bs(A{j}, df=100)" for j in range(4))
KNOTS = ", ".join(f"{k / 100}" for k in range(1, 90))
KNOTTED = ":".join(f"bs(A{j}, knots=({KNOTS}), lower_bound=-9, upper_bound=9)" for j in range(4))


def opened(*terms):
    block = {"terms": terms, "columns": [f"A{j}" for j in range(4)], "partial": "drop", "min_count": 1}
    return {"family": "design", "text": json.dumps(block | {"intercept": True}), "use": EVERY}


def dealt(rows=0, columns=10, groups=1):
    product = {"site_a": "B", "site_b": "P", "rows": rows, "groups": groups}
    product |= {"columns_a": columns, "columns_b": 10}
    part = {"number": "1", "product": product, "bits": 20, "columns": "block", "first": True}
    text = json.dumps(part | {"peer": "P", "dealer": "A"})
    return {"text": text, "group": np.zeros(min(rows, N), np.int64)}


CLAIMS = {
    "groups of sums": ("sum_products", {"code": HALVES, "groups": np.array(2_000_000)}),
    "groups of few numbers each": ("sum_products", {"code": HALVES, "groups": np.array(200_000)}),
    "groups of a response": ("sum_response", {"site": "P", "code": HALVES, "groups": np.array(10**8)}),
    "folds of a response": (
        "respond_by_fold",
        {
            "site": "P",
            "family": "vglm",
            "code": HALVES,
            "groups": np.array(2_000_000),
            "eta": np.zeros(N),
        },
    ),
    "entities that means fill in": ("stage_block", {**FIT, "n": np.array(20_000_000)}),
    "entities of a fit": (
        "glm_start",
        {**FIT, "n": np.array(200_000_000), "filled": np.array(True), "memory": np.array(1)},
    ),
    "entities that predictors are padded for": (
        "start",
        {
            **FIT,
            "n": np.array(50_000_000),
            "filled": np.array(False),
            "memory": np.array(1),
            "padded": np.array(True),
        },
    ),
    "steps that are remembered": (
        "start",
        {
            **FIT,
            "n": np.array(N),
            "filled": np.array(False),
            "memory": np.array(10**9),
            "padded": np.array(False),
        },
    ),
    "rows of a structured sketch": (
        "sketch",
        {"stage": np.array(2), "size": np.array(50_000_000), "kind": np.array(0)},
    ),
    "rows of a drawn sketch": (
        "sketch",
        {"stage": np.array(2), "size": np.array(50_000_000), "kind": np.array(1)},
    ),
    "groups that are dealt for": ("deal_product", dealt(groups=20_000_000)),
    "columns that are dealt for": ("deal_product", dealt(rows=1, columns=50_000_000)),
    "columns of many rows that are dealt for": ("deal_product", dealt(rows=N, columns=4_000_000)),
    "rows of sums that are dealt for": ("deal_sums", {"text": dealt(rows=2**30, columns=1)["text"]}),
    "rounds of sums that are dealt for": ("deal_sums", {"text": dealt(rows=2, columns=2**20)["text"]}),
    "splines times splines": ("open_block", opened(SPLINES)),
    "splines of many knots": ("open_block", opened(KNOTTED)),
}
"""By what is claimed: a step, and what it is asked with."""


@pytest.fixture(scope="module")
def sites():
    """Sites in the midst of a fit, and its session."""
    partition, session = fs.ClientPartition.from_frames(FRAMES, on="k"), secrets.token_hex(8)
    answer(partition, session, "open_block", **opened("A0", "A1", "A2", "A3"))
    response = {"response": "y", "columns": ["y"]}
    answer(partition, session, "open_response", site="P", family="design", text=json.dumps(response))
    for family in ("vfem", "vglm"):
        answer(
            partition, session, "stage_response", site="P", family=family, text=NORMAL.to_json(), keep=EVERY
        )
    answer(partition, session, "stage_block", keep=EVERY)
    start = {"n": N, "filled": False, "memory": 1, "padded": False}
    answer(partition, session, "start", **FIT, **{name: np.array(value) for name, value in start.items()})
    LocalEngine(partition.sites).run(agree_keys(tuple(FRAMES), session), Ledger())
    return partition, session


def answer(partition, session, step, site="A", family="vfem", text="", **arrays):
    request = pack_request(Request(site, family, step, arrays, session, text))
    return unpack_reply(partition.sites[site].answer(request))


def peak(request):
    """Error of a question, and the most bytes that it took."""
    tracemalloc.start()
    try:
        request()
    except FedstatError as error:
        return error, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return None, 0


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_question_claims_is_not_given(claim, sites):
    step, request = CLAIMS[claim]
    error, most = peak(lambda: answer(*sites, step, **request))
    assert isinstance(error, MessageError | DesignError), str(error)
    assert "failed (" not in str(error) and "trailing" not in str(error), str(error)
    assert most < MOST, f"{most / 2**20:,.0f} MB"


def test_splines_over_rows_are_not_multiplied_without_end():
    frame = pd.DataFrame({f"x{j}": RNG.random(N) for j in range(4)})
    frame["y"], frame["site"] = RNG.normal(size=N), RNG.choice(["S0", "S1"], N)
    term = ":".join(f"bs(x{j}, knots=({KNOTS}), lower_bound=0, upper_bound=1)" for j in range(4))
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=fs.Policy(max_parameters=1e9))
    error, most = peak(
        lambda: fs.FederatedGLM.from_formula(f"y ~ {term}", partition, family=sm.families.Gaussian()).fit()
    )
    assert isinstance(error, DesignError) and "design columns" in str(error) and most < MOST


def test_files_that_claim_entities_and_cells(tmp_path):
    """More entities than anybody lists; more cells than a file holds bits of."""
    rows, seen = np.arange(3), np.ones(3, dtype=bool)
    PersistentAlignment("0" * 16, 10**13, {"A": rows}, {"A": seen}).save(tmp_path)
    with pytest.raises(PartitionError, match="no alignment"):
        load_alignment(tmp_path)
    kept = {"cells": np.zeros(5, dtype=int), "basis": np.zeros((2, 1), dtype=np.uint8)}
    kept["format"] = np.frombuffer(b'{"format": 5, "written_by": "1"}', dtype=np.uint8)
    table = FrameTable(pd.DataFrame({"x": np.zeros(5)}))
    tracemalloc.start()
    with pytest.raises(ValueError, match="not complete"):
        convert_history(kept | {"c": np.array([2, 10**9])}, table)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20
