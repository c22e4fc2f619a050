"""Repetitions of noisy releases: a coordinator tries to get noise that is the same under other columns.

A repetition is bytes that a site has charged and released. So it must not be possible to combine one with
anything that was computed later, or to get a product under a release that was not charged.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_private_release import ALL, FAIR, FRAME, FREE, HELD, NONE, Departing

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import FedstatError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.privacy_budget import RepeatedRelease
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.tables.table import FrameTable
from fedstat.models.copula.audited_releases import NoiseRevealingMechanism
from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula.request import PatternRequest, PatternSumsRequest

pytestmark = pytest.mark.filterwarnings("ignore")
EVEN = {"a": [0.5, 0.5], "b": [1 / 3] * 3, "c": [0.5, 0.5]}


def wanted(peer, variance=FAIR):
    return PatternSumsRequest({peer: 1}, 1, variance, (PatternRequest((peer,), 1),), False)


class Sessions(Departing):
    """A coordinator with sessions of its own choosing at sites A and B."""

    def __init__(self, **rules):
        super().__init__(**rules)
        self.session = "s"

    def begin(self, session):
        self.session = session
        LocalEngine(self.sites).run(agree_keys(tuple(self.sites), session), Ledger())

    def request(self, site, step, text="", family="copula", **arrays):
        question = Request(site, family, step, arrays, self.session, text)
        return unpack_reply(self.sites[site].answer(pack_request(question))).arrays

    def ask(self, step, site):
        peer = "AB".replace(site, "")
        request = wanted(peer)
        column = HELD[site][0]
        return self.request(site, step, to_json(request), probabilities=np.array(EVEN[column]), group=NONE)

    def columns(self, site):
        name = HELD[site][0]
        self.margins(site, [Bins(name, tuple(range(len(EVEN[name]))))], variance=FREE)

    def release(self):
        """Request own products and shares, honestly; return the shares of A and B."""
        for site in "AB":
            self.columns(site)
            self.ask("release_gram", site)
        number = f"{wanted('B').agreed}0"
        opened = self.open(number, "AB")
        return [
            self.request(site, "share_product", to_json(number), opened=one)["share"]
            for site, one in zip("AB", opened[::-1], strict=True)
        ]

    def spent(self):
        return {name: site.site_ledger.charges.spent for name, site in self.sites.items()}

    def correct(self, site, frame):
        self.sites[site].change_records(FrameTable(frame), lambda kept, n: "")


@pytest.fixture
def released():
    to = Sessions()
    return to, to.release()


def test_a_repetition_is_the_bytes_of_the_release_and_free(released):
    to, (of_a, of_b) = released
    before = to.spent()
    for session in ("t", "u"):
        to.begin(session)
        for site, share in (("A", of_a), ("B", of_b)):
            to.columns(site)
            again = to.ask("recall_gram", site)
            assert again["shares"].tobytes() == share.tobytes()
    assert to.spent() == before
    to.begin("v")
    to.columns("A")
    runs = [to.ask("recall_gram", site)["run"].tobytes() for site in "A"]
    to.columns("B")
    runs.append(to.ask("recall_gram", "B")["run"].tobytes())
    assert len(set(runs)) == 1 and runs[0]


def test_other_columns_never_get_the_noise_of_a_release():
    """B colludes, and removes its own noise: with the same noise of A, a difference would be exact."""
    to = Sessions()
    own = to.sites["B"]._noise
    to.sites["B"]._noise = NoiseRevealingMechanism(own.site, own.policy, own.site_ledger, own.table, own.keys)
    first = to.release()
    other = FRAME[["b"]].copy()
    other.loc[0, "b"] = (other.loc[0, "b"] + 1) % 3
    to.correct("B", other)
    to.begin("t")
    to.columns("B")
    assert not to.ask("recall_gram", "B")["shares"].size, "corrected data have no earlier release"
    before = to.spent()
    second = to.release()
    after = to.spent()
    # Both pay for the products again, and not only for the new noise of the shares.
    assert all(after[site] - before[site] > 0.05 for site in "AB")
    sums = [sum(part.view(np.uint64) for part in both).view(np.int64) for both in (first, second)]
    found = int((sums[1] - sums[0]).ravel()[0])
    columns = {"A": (FRAME[["a"]], FRAME[["a"]]), "B": (FRAME[["b"]], other)}
    exact = 0
    for sign, k in ((-1, 0), (1, 1)):
        scores = [scores_at(site, frames[k]) for site, frames in columns.items()]
        exact += sign * int(scores[0].ravel() @ scores[1].ravel())
    assert exact != 0
    # Noise of A in two runs has a deviation of about 2^33; 2^20 is missed with a probability below 1e-4.
    assert abs(found - exact) > 2**20


def scores_at(site, frame):
    """Scores of a column, as the site computes them."""
    name = HELD[site][0]
    margin = Margin(Bins(name, tuple(range(len(EVEN[name])))), np.array(EVEN[name]))
    peer = "AB".replace(site, "")
    return wanted(peer).score([margin], frame.to_numpy(dtype=np.int64))


def test_a_repeated_share_next_to_a_new_one_is_noise(released):
    """A repeats its share, and B releases a new one: together they are random words."""
    to, (of_a, _) = released
    to.begin("t")
    _, new = to.release()
    total = (of_a.view(np.uint64) + new.view(np.uint64)).view(np.int64)
    assert np.abs(total.astype(np.float64)).max() > 2.0**50


def test_no_product_is_made_under_a_repetition(released):
    to, _ = released
    to.begin("t")
    for site in "AB":
        to.columns(site)
        assert to.ask("recall_gram", site)["shares"].size
    number = f"{wanted('B').agreed}0"
    before = to.spent()
    with pytest.raises(FedstatError, match="not the planned one"):
        to.open(number, "AB")
    assert to.spent() == before


def test_another_request_has_no_repetition(released):
    """Another variance, other rows or other probabilities are another request."""
    to, _ = released
    to.begin("t")
    to.columns("A")
    rows, even = NONE.copy(), np.array(EVEN["a"])
    rows[3] = -1
    for variance, group, probabilities in (
        (FAIR + 1, NONE, even),
        (FAIR, rows, even),
        (FAIR, NONE, even + np.array([1e-12, -1e-12])),
    ):
        request = wanted("B", variance)
        reply = to.request("A", "recall_gram", to_json(request), probabilities=probabilities, group=group)
        assert not any(array.size for array in reply.values())


def test_an_incomplete_release_is_not_repeated():
    """A site with its own products but without the share for its peer has nothing to repeat."""
    to = Sessions()
    to.columns("A")
    to.ask("release_gram", "A")
    to.begin("t")
    to.columns("A")
    assert not to.ask("recall_gram", "A")["shares"].size


def test_a_step_cannot_pass_new_numbers_off_as_a_repetition(released, monkeypatch):
    """The site compares with its ledger, to the last byte; a step that is wrong releases nothing."""
    to, _ = released
    step = FAMILIES["copula"]["recall_gram"]

    def forged(data, state, text, probabilities, group):
        arrays, _ = step.run(data, state, text, probabilities, group)
        return arrays | {"shares": arrays["shares"] + 1}, ""

    monkeypatch.setitem(FAMILIES, "copula", {**FAMILIES["copula"], "recall_gram": replace(step, run=forged)})
    to.begin("t")
    to.columns("A")
    with pytest.raises(PolicyError, match="refused for a reason"):
        to.ask("recall_gram", "A")
    assert RepeatedRelease in step.gives["shares"].behind


def test_rules_of_today_hold_for_repetitions(released):
    """A minimum that the owner has raised since refuses an old release as well."""
    to, _ = released
    site = to.sites["A"]
    site.change_rules(replace(site.policy, min_count=len(ALL) + 1), site.published)
    to.begin("t")
    with pytest.raises(PolicyError, match="refused for a reason"):
        to.columns("A")
    # The same where the margins are known, and the minimum is raised within the session.
    to.begin("u")
    site.change_rules(replace(site.policy, min_count=3), site.published)
    to.columns("A")
    site._data = replace(site.data, policy=replace(site.policy, min_count=len(ALL) + 1))
    with pytest.raises(PolicyError, match="refused for a reason"):
        to.ask("recall_gram", "A")


def test_sites_repeat_together_or_are_all_charged():
    """The data of one site are corrected: every site is charged, and no old number is used."""
    rng = np.random.default_rng(5)
    frame = pd.DataFrame(rng.normal(size=(300, 3)).clip(-3, 3), columns=["a", "b", "c"])
    policy = fs.Policy(privacy=fs.Budget(20.0, 1e-6))
    partition = fs.ClientPartition.from_frame(frame, columns=HELD, policy=policy)
    bounds = dict.fromkeys("abc", (-3, 3))

    def fit():
        before = {name: site.site_ledger.charges.spent for name, site in partition.sites.items()}
        found = fs.CopulaSynthesizer(partition, 3.0, bounds).fit().correlation.to_numpy()
        after = {name: site.site_ledger.charges.spent for name, site in partition.sites.items()}
        return found, [after[name] - before[name] for name in HELD]

    first, costs = fit()
    assert all(costs)
    again, costs = fit()
    np.testing.assert_array_equal(again, first)
    assert not any(costs)
    corrected = frame[["b"]].copy()
    corrected.loc[0, "b"] = -corrected.loc[0, "b"]
    partition.sites["B"].change_records(FrameTable(corrected), lambda kept, n: "")
    after, costs = fit()
    assert all(costs) and not np.array_equal(after, first)
    # The former table again: B repeats its former run and the others their newest one, so all are charged.
    partition.sites["B"].change_records(FrameTable(frame[["b"]]), lambda kept, n: "")
    back, costs = fit()
    assert all(costs) and not np.array_equal(back, first)
