"""Scores of boosting at coefficients chosen by the analyst: rows that lie between two of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat import codec
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.design.horizontal_design import open_requests
from fedstat.federation.disclosure.site import load_families
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.models.boost.learning.columns import CurveSumsRequest
from fedstat.models.boost.learning.losses import LossSpec

load_families()
pytestmark = pytest.mark.filterwarnings("ignore")
N = 400
CURVE = {"kind": "curve", "domain": [0, 1]}
PUBLISHED = {
    "x": CURVE,
    "age": {"kind": "number", "range": [20, 80]},
    "case": {"kind": "number", "range": [0, 1]},
    "loss": {"kind": "number", "range": [-20, 20]},
}


def table(n=N):
    random = np.random.default_rng(4)
    frame = pd.DataFrame(random.normal(size=(n, 20))).add_prefix("x_")
    age = random.uniform(20, 80, n)
    case = (random.random(n) < 1.0 / (1.0 + np.exp((50.0 - age) / 10.0))).astype(float)
    site = np.array(["A", "B", "C"])[np.arange(n) % 3]
    return frame.assign(age=age, case=case, loss=age / 10.0 - 5.0 + random.normal(size=n), site=site)


FRAME = table()


def model(kind, policy, **options):
    response = {"binomial": "case", "quantile": "loss"}[kind]
    loss = {"binomial": {"family": sm.families.Binomial()}, "quantile": {"loss": "quantile"}}[kind]
    published = dict.fromkeys("ABC", PUBLISHED) if policy == "strict" else None
    curves = {"x": fs.Curve("x_*", domain=(0, 1))}
    partition = fs.ClientPartition.from_frame(
        FRAME, by="site", curves=curves, policy=policy, published=published
    )
    return fs.FedFunctionBoost.from_formula(
        f"{response} ~ bols(age) + bsignal(x, knots=3)", partition, **loss
    )


class Asker:
    """A coordinator that asks site A on after the sums of products, with coefficients of its own."""

    def __init__(self, kind, policy):
        made = model(kind, policy)
        self.site = made.partition.sites["A"]
        session = made.source._open_session("boost", masked=False)
        self.session, self.width = session.session, made.source._n_columns - 1
        requests = open_requests(session.agreement, session.session)
        requested = CurveSumsRequest(
            made.learners, None, 1, 1, loss=LossSpec(kind, 0.5 if kind == "quantile" else 0.0)
        )
        for request in [one for one in requests if one.site == "A"]:
            self.site.answer(pack_request(request))
        self.request("start_scores", codec.to_json(requested))

    def request(self, step, text="", **arrays):
        return unpack_reply(
            self.site.answer(pack_request(Request("A", "boost", step, arrays, self.session, text)))
        ).arrays

    def scores(self, cut, steep):
        """Scores at a predictor that is far below zero up to an age, and far above from there on."""
        coef = np.zeros((1, self.width, 1))
        coef[0, 1:3, 0] = -steep * cut, steep  # constant and age
        reported = self.request("score_curves", coef=coef, offset=np.zeros((1, 1)), left_out=np.array([-1]))
        return bool(reported["spread"]), reported["score"][0, :, 0]


def victim():
    """Age of one person at site A, and an age on either side of it alone."""
    own = FRAME[FRAME["site"] == "A"]
    ages = np.sort(own["age"].to_numpy())
    at = len(ages) // 2
    middle = (ages[1:] + ages[:-1]) / 2.0
    return own[own["age"] == ages[at]].iloc[0], middle[at - 1], middle[at]


def told_row(kind, policy, steep):
    """Columns of the person between two coefficients, up to a factor, from the difference of two scores."""
    client = Asker(kind, policy)
    person, below, above = victim()
    (first, one), (second, other) = (client.scores(cut, steep) for cut in (below, above))
    change = other - one
    return person, (first, second), change / change[0] if change[0] else change


@pytest.mark.parametrize(("kind", "steep"), [("binomial", 1e6), ("quantile", 1e6)])
def test_rows_between_two_cuts_are_reported_by_no_site(kind, steep, monkeypatch):
    loose = fs.Policy(min_count=1, min_level_count=1)  # of owners with no least number of rows
    person, reported, row = told_row(kind, loose, steep)
    assert reported == (True, True)
    assert row[2] == pytest.approx(person["age"], rel=1e-6)  # to all digits, with the integrals of the curve
    # By default a site gives its last answer again where fewer than five rows have changed sides; a flat
    # logistic loss, whose slopes are sides of a cut as well, is answered nowhere.
    _, reported, row = told_row(kind, "open", steep)
    assert reported == ((True, False) if kind == "quantile" else (False, False)) and not row.any()


def test_cuts_of_a_quantile_are_not_asked_of_a_strict_site():
    with pytest.raises(DescriptionError, match=r"does not compute 'loss > predictor'"):
        model("quantile", "strict").fit(steps=5)


def test_strict_sites_answer_a_fit_of_a_family():
    result = model("binomial", "strict").fit(steps=30)
    assert result.score(FRAME)["explained"] > 0.1
    assert result.coef == pytest.approx(model("binomial", "open").fit(steps=30).coef, abs=1e-9)


def combined(policy):
    """Three cuts, no two of which have few rows between them but the first and the third."""
    client = Asker("quantile", policy)
    person, below, above = victim()
    reported = [client.scores(cut, 1e6) for cut in (below, 75.0, above)]
    change = reported[2][1] - reported[0][1]
    return person, change / change[0]


def test_nor_are_rows_reported_by_a_way_round():
    person, row = combined("open")  # whose owner allows any share
    assert row[2] == pytest.approx(person["age"], rel=1e-6)
    with pytest.raises(PolicyError, match="largest share"):
        combined(fs.Policy(max_share=0.2))


def test_scores_come_after_their_start_alone():
    client = Asker("binomial", fs.Policy(order="declared"))
    client.session += "0"
    with pytest.raises(DescriptionError, match="order"):
        client.scores(50.0, 1.0)
