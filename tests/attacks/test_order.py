"""Steps that are asked out of the order in which any fit asks them."""

import json
import secrets

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.disclosure.facts import ExternalWeights
from fedstat.federation.disclosure.row_checks import check_external_weights, working_weights_spread
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.tables.table import FrameTable

load_families()
N, TARGET = 400, 7
RNG = np.random.default_rng(2)
FRAMES = {"P": pd.DataFrame({"k": range(N), "y": RNG.normal(size=N)})} | {
    c: pd.DataFrame({"k": range(N), f"{c}0": RNG.lognormal(3, 1, N), f"{c}1": RNG.normal(size=N)})
    for c in "AB"
}


class Opened:
    """Client A, whose columns a coordinator has opened and staged, and asks on of as it likes."""

    def __init__(self, policy, family):
        self.site = fs.ClientPartition.from_frames(FRAMES, on="k", policy=policy).sites["A"]
        self.session, self.family, every = secrets.token_hex(8), family, np.ones(N, dtype=bool)
        text = {"terms": ["A0", "A1"], "columns": ["A0", "A1"], "partial": "drop", "min_count": 5}
        self._request("design", "open_block", json.dumps(text | {"intercept": True}), use=every)
        self.shift, self.scale = self.request("stage_block", keep=every)["units"][:2]

    def request(self, step, **arrays):
        return self._request(self.family, step, "", **arrays)

    def _request(self, family, step, text, **arrays):
        request = pack_request(Request("A", family, step, arrays, self.session, text))
        return unpack_reply(self.site.answer(request)).arrays


def row_from_two_divisions(policy):
    """The row of one entity, from sums over two groupings that put this entity into different groups."""
    site = Opened(policy, "vfem")
    code = np.arange(N) % 2
    other = np.where(np.arange(N) == TARGET, 0, code)
    one, two = (site.request("sum_products", code=x, groups=np.array(2))["sums"] for x in (code, other))
    return (two - one)[0] * site.scale + site.shift


def test_sums_over_a_second_division_are_out_of_order():
    truth = FRAMES["A"].loc[TARGET, ["A0", "A1"]].to_numpy(float)
    assert np.allclose(row_from_two_divisions("open"), truth)
    with pytest.raises(DescriptionError, match=r"A: its policy \(order\) .* order = \"any\""):
        row_from_two_divisions("strict")


def test_every_step_that_reveals_of_rows_has_a_place_in_the_order():
    """Free are steps that begin something, and what is drawn or asked of new entities."""
    begin = {"stage_block", "stage_response", "start", "start_response", "glm_start", "glm_start_response"}
    new = {"predict_block", "predict_by_pattern", "prediction_errors", "judge_predictions"}
    new |= {"bin_counts", "residual_counts"}
    new |= {"sum_noisy_scores"}  # its noise is charged
    for family in ("vfem", "vglm", "glm", "fedavg", "evaluation"):
        free = {name for name, step in FAMILIES[family].items() if step.after is None}
        assert free <= begin | new | {"deal_product", "deal_sums"}, family  # a dealer reads no row


def row_from_residuals(policy):
    """The row of one entity, from sums of scores at residuals that differ there alone."""
    site = Opened(policy, "vglm")
    residuals = np.ones((2, N))
    residuals[1, TARGET] = 2.0
    one, two = (site.request("sum_scores", residual=r)["scores"] for r in residuals)
    return (two - one) * site.scale + site.shift


def test_residuals_chosen_by_the_analyst_are_not_taken():
    truth = FRAMES["A"].loc[TARGET, ["A0", "A1"]].to_numpy(float)
    assert np.allclose(row_from_residuals("open"), truth)
    for policy in ("strict", fs.Policy.strict(order="any")):
        with pytest.raises(PolicyError, match="accepts no numbers for each entity"):
            row_from_residuals(policy)


def test_no_row_has_more_than_its_share_of_a_weighted_sum():
    """One row in two hundred with a third of all weight, which 200 others do not hide."""
    weights = np.ones(200)
    weights[TARGET] = 100.0
    judged = {
        name: SiteData("S", FrameTable(pd.DataFrame()), None, getattr(fs.Policy, name)())
        for name in ("open", "strict")
    }
    check_external_weights(judged["open"], None, ExternalWeights(weights))
    with pytest.raises(PolicyError, match=r"max_share = 0\.2"):
        check_external_weights(judged["strict"], None, ExternalWeights(weights))
    totals = np.array([[weights.sum(), weights @ weights]])
    spread = {
        name: working_weights_spread(data, lambda: weights[None], totals) for name, data in judged.items()
    }
    assert spread == {"open": True, "strict": False}
    assert working_weights_spread(judged["strict"], lambda: np.ones((1, 5)), np.array([[5.0, 5.0]]))
