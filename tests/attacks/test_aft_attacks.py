"""Values of single persons from models of log-linear times, at parameters of the attacker's choice.

Where x'b is far above all log times, a row without the event has no weight in the score, and each row with it
has the same one. The score is then the sum of each column over the rows with the event.
Each attack reads it where nothing is protected; under the strict policy one of its fits is refused.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.models.aft.steps import FAMILY

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, VICTIM, SITES = 200, 17, ("S0", "S1", "S2")
NUMBER = {"kind": "number"}
PUBLISHED = {
    "income": NUMBER | {"range": [0.5, 9.0]},
    "flag": NUMBER | {"range": [0, 1], "levels": [0, 1]},
    "died": NUMBER | {"range": [0, 1], "levels": [0, 1]},
    "months": NUMBER | {"range": [0.0, 500.0]},
}
STRICT = fs.Policy.strict(reasons="sent")


def table() -> pd.DataFrame:
    """Of those who died at the first site the victim alone has the flag."""
    rng = np.random.default_rng(7)
    n = ROWS * len(SITES)
    died, flag = rng.integers(0, 2, n), (rng.random(n) < 0.25) * 1.0
    flag[:ROWS][died[:ROWS] == 1] = 0.0
    died[VICTIM], flag[VICTIM] = 1, 1.0
    return pd.DataFrame(
        {
            "site": np.repeat(SITES, ROWS),
            "months": rng.exponential(20.0, n).round(2) + 0.01,
            "died": died,
            "flag": flag,
            "income": rng.uniform(1.0, 8.0, n).round(3),
        }
    )


FRAME = table()


def partition(policy, frame=FRAME) -> fs.ClientPartition:
    return fs.ClientPartition.from_frame(
        frame, by="site", policy=policy, published=dict.fromkeys(SITES, PUBLISHED)
    )


def sums_at(at, formula, points, distribution="weibull"):
    """Replies of site S0 at points of the attacker's choice, in the units of the data."""
    model = fs.FederatedAFT.from_formula(formula, at, distribution=distribution)
    session, found = model._open_session(FAMILY, False), []
    LocalEngine(at.sites).run(_started(session, distribution), Ledger())
    p = len(points[0]) - 1
    for beta in points:
        arrays = {"shift": np.zeros(p), "scale": np.ones(p), "beta": np.asarray(beta)}
        request = Request("S0", FAMILY, "sum_scores", arrays, session.session)
        found.append(unpack_reply(at.sites["S0"].answer(pack_request(request))).arrays)
    return found


def _started(session, distribution):
    yield session.opening()
    yield session.request_all("start", {}, f'{{"distribution": "{distribution}", "clusters": []}}')


def test_a_cell_of_one_person_with_the_event_is_not_read():
    formula = "Surv(months, died) ~ flag + flag:income"
    [found] = sums_at(partition(None), formula, [[60.0, 0.0, 0.0, 0.0]])
    assert -found["score"][1] == pytest.approx(1.0)
    assert -found["score"][2] == pytest.approx(FRAME["income"][VICTIM], abs=1e-9)
    for distribution in ("weibull", "lognormal"):
        model = fs.FederatedAFT.from_formula(formula, partition(STRICT), distribution=distribution)
        with pytest.raises(PolicyError, match="rows behind a product"):
            model.fit()


def test_information_does_not_reveal_products_over_those_with_the_event():
    # Of those who died the victim alone has both flags.
    frame = FRAME.assign(other=(FRAME.index % 3 == 0) * 1.0)
    frame["flag"] = np.where(frame["died"] * frame["other"] == 1.0, 0.0, frame.index % 2)
    frame.loc[VICTIM, ["flag", "other", "died"]] = 1.0
    published = PUBLISHED | {"other": PUBLISHED["flag"]}

    def at(policy):
        return fs.ClientPartition.from_frame(
            frame, by="site", policy=policy, published=dict.fromkeys(SITES, published)
        )

    formula = "Surv(months, died) ~ flag + other:income"
    # With normal times a row with the event has the same weight everywhere, one without it has none here.
    [found] = sums_at(at(None), formula, [[60.0, 0.0, 0.0, 0.0]], "lognormal")
    assert found["information"][1, 2] == pytest.approx(frame["income"][VICTIM], abs=1e-6)
    for distribution in ("lognormal", "loglogistic"):
        model = fs.FederatedAFT.from_formula(formula, at(STRICT), distribution=distribution)
        with pytest.raises(PolicyError, match=r"with the event\)"):
            model.fit()
    # The weights of rows in Weibull's information do not depend on the event.
    assert fs.FederatedAFT.from_formula(formula, at(STRICT), distribution="weibull").fit().converged


def test_parameters_that_single_out_rows_are_answered_with_nothing():
    at = partition(None)
    own = FRAME[:ROWS]
    steep = -2000.0
    # x'b is far below the log times of those with the largest incomes alone, and far above all others.
    beta = [60.0 - steep * (own["income"].max() - 0.02), steep, 0.0]
    [found] = sums_at(at, "Surv(months, died) ~ income", [beta])
    assert not found["spread"]
    assert not found["score"].any() and not found["information"].any()


def test_events_below_the_minimum_are_refused():
    frame = FRAME.assign(died=0)
    frame.loc[[VICTIM, *range(ROWS, 3 * ROWS)], "died"] = 1
    with pytest.raises(PolicyError, match="minimum events"):
        fs.FederatedAFT.from_formula("Surv(months, died) ~ income", partition(STRICT, frame)).fit()


def test_two_endpoints_that_differ_by_one_person_are_refused():
    """The sums of two events differ by the values of the one person who has only one of them."""
    frame = FRAME.assign(other=FRAME["died"])
    frame.loc[VICTIM, "other"] = 0
    published = PUBLISHED | {"other": PUBLISHED["died"]}
    at = fs.ClientPartition.from_frame(
        frame, by="site", policy=STRICT, published=dict.fromkeys(SITES, published)
    )
    assert fs.FederatedAFT.from_formula("Surv(months, died) ~ income", at).fit().converged
    with pytest.raises(PolicyError, match="single out fewer"):
        fs.FederatedAFT.from_formula("Surv(months, other) ~ income", at).fit()
