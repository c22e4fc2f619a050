"""How many messages a fit takes of each site, and several questions in one message."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from faulty import patients
from operating import make_federation

import fedstat as fs
from fedstat.errors import EngineError, MessageError, SecurityError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import (
    Reply,
    Request,
    bundle,
    is_bundle,
    pack_reply,
    pack_request,
    unbundle,
    unpack_reply,
    unpack_request,
)
from fedstat.federation.protocols.engine import side_by_side
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite, SiteServer
from fedstat.federation.transport.site_folder import open_site

SETTING_UP, A_FIT = 6, {"sum_scores"}
"""Messages of an analysis except its iterations, and the step that announces an iteration."""


class Wires:
    """Sites in this process; the steps in every message that went to one."""

    def __init__(self, sites, bundles=True):
        self.servers = {name: SiteServer(site) for name, site in sites.items()}
        self.bundles, self.sent = bundles, defaultdict(list)

    def send(self, site, request):
        self.sent[site].append([unpack_request(one).step for one in unbundle(request)])
        return self.servers[site].answer(request)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    home = tmp_path_factory.mktemp("study")
    frames = {name: frame.drop(columns="h") for name, frame in patients().groupby("h")}
    return make_federation(home, frames), {name: open_site(home / name) for name in frames}


FITS = {
    "GLORE": lambda partition: fs.GLORE.from_formula("y ~ x + z", partition).fit(masked=True),
    "FederatedOLS": lambda partition: fs.FederatedOLS.from_formula("x ~ z", partition).fit(masked=True),
}


@pytest.mark.parametrize("fit", FITS)
def test_setting_up_and_receipt_take_six_messages_of_each_site(study, fit):
    path, sites = study
    fs.GLORE.from_formula("y ~ x", fs.ClientPartition.connect(path, transport=Wires(sites))).fit()
    wires = Wires(sites)  # the heads of the ledgers, which are also requested, are known now
    result = FITS[fit](fs.ClientPartition.connect(path, transport=wires))
    for sent in wires.sent.values():
        iterations = [steps for steps in sent if A_FIT & set(steps)]
        assert iterations and len(sent) - len(iterations) <= SETTING_UP, sent
    single = Wires(sites, bundles=False)
    again = FITS[fit](fs.ClientPartition.connect(path, transport=single))
    # The same questions in the same order, the same numbers, and the same account.
    for site, sent in wires.sent.items():
        assert [step for steps in sent for step in steps] == [step for (step,) in single.sent[site]]
    np.testing.assert_array_equal(result.params, again.params)
    np.testing.assert_array_equal(result.estimate.cov, again.estimate.cov)
    steps = [[(e.round, e.step, e.array) for e in r.ledger.log.passed] for r in (result, again)]
    assert steps[0] == steps[1]
    assert fs.verify_receipt(
        result.receipt(), fs.ClientPartition.connect(path, transport=single).fingerprints
    )


def test_with_a_journal_heads_are_requested_every_time(study, tmp_path):
    path, sites = study
    for _ in range(3):
        wires = Wires(sites)
        partition = fs.ClientPartition.connect(path, journal=tmp_path / "journal", transport=wires)
        fs.GLORE.from_formula("y ~ x", partition).fit()
        request = Counter(step for steps in wires.sent["A"] for step in steps)
    # All else was in the journal.
    assert request == {"recall_head": 1}


@pytest.fixture
def server():
    site = Site("A", patients()[["x", "z"]])
    return SiteServer(site)


def question(turn, step="introduce", session="a session"):
    return pack_request(Request("A", "secure", step, {}, session, "{}", None, turn))


def test_a_refusal_ends_a_bundle_and_what_was_answered_counts(server):
    sent = bundle([question(1), question(2, "no such step"), question(3)])
    answers = unbundle(server.answer(sent))
    assert len(answers) == 2 and unpack_reply(answers[0]).site == "A"
    with pytest.raises(MessageError, match="no such step"):
        unpack_reply(answers[1])
    assert server.site.site_ledger.rounds("a session") == 2
    # Again it has the same answers, as a whole and in parts; what was not answered still can be.
    assert unbundle(server.answer(sent)) == answers
    assert server.answer(question(2, "no such step")) == answers[1]
    assert unpack_reply(server.answer(question(3))).site == "A"
    with pytest.raises(SecurityError, match="is refused"):
        unpack_reply(unbundle(server.answer(sent))[0])


def test_questions_of_several_sessions_go_together(server):
    sent = bundle([question(1), question(1, session="another"), question(2)])
    answers = server.answer(sent)
    assert len(unbundle(answers)) == 3 and server.answer(sent) == answers
    assert [server.site.site_ledger.rounds(name) for name in ("a session", "another")] == [2, 1]


@pytest.mark.parametrize("cut", [-1, -100, 24, 20])
def test_a_bundle_that_is_cut_is_not_answered(server, cut):
    complete = bundle([question(1), question(2)])
    assert is_bundle(complete)
    with pytest.raises(MessageError, match=r"A: .* not a complete bundle"):
        unpack_reply(server.answer(complete[:cut]))
    assert not server.site.site_ledger.chains


def test_a_site_that_gives_fewer_answers_than_questions():
    class Short:
        bundles = True

        def send(self, site, request):
            return pack_reply(Reply(site, {}, "{}"))

    engine = RemoteEngine({"A": RemoteSite("A", Short())})

    def protocol():
        yield [Request("A", "secure", "introduce", {}, "s", "{}")] * 2

    with pytest.raises(MessageError, match="'A' gave 1 replies to 2 requests"):
        engine.run(protocol(), Ledger())
    with pytest.raises(EngineError, match="has no known reply"):
        engine.run(protocol(), Ledger())


def test_protocols_side_by_side_each_have_their_own_answers():
    def counting(name, rounds):
        heard = []
        for number in range(rounds):
            replies = yield [Request(name, "f", str(number))] * 2
            heard += [reply.text for reply in replies]
        return heard

    both = side_by_side(counting("A", 1), counting("B", 3))
    requests = next(both)
    found = None
    while found is None:
        try:
            requests = both.send(
                [Reply(request.site, {}, request.site + request.step) for request in requests]
            )
        except StopIteration as stop:
            found = stop.value
    assert found == (["A0", "A0"], ["B0", "B0", "B1", "B1", "B2", "B2"])
