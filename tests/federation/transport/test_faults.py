"""A fault in every round: a named outcome, no wrong number, and no entry of a ledger lost or doubled."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty import (
    ROUNDS,
    Killed,
    Study,
    analysis,
    died_with_the_answer,
    enterprises,
    forgotten,
    killed,
    killed_with_the_answer,
    late,
    restarted,
    rows,
    silent,
)

import fedstat as fs
from fedstat.errors import EngineError, MessageError, PolicyError, SecurityError, SessionError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.files import lock_file
from fedstat.federation.message import Request, pack_request, unpack_reply, unpack_request
from fedstat.federation.protocols import masked_sums as sums
from fedstat.federation.transport import journal as journals
from fedstat.federation.transport.journal import Journal
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite, SiteServer

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The analysis without a fault, and what the sites' accounts then say."""
    study = Study(tmp_path_factory.mktemp("undisturbed"))
    result = analysis(study.connected())
    assert len(study.requested) == ROUNDS
    return result, {name: next(iter(site_ledger.values())) for name, site_ledger in study.accounts().items()}


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path)


def assert_same(result, study, undisturbed):
    """The numbers to the bit; what passed by the coordinator's account, and by each site's."""
    expected, accounts = undisturbed
    np.testing.assert_array_equal(result.params, expected.params)
    np.testing.assert_array_equal(result.estimate.cov, expected.estimate.cov)
    assert rows(result.ledger.log.passed) == rows(expected.ledger.log.passed)
    session = result.receipt().session
    for name, site_ledger in study.accounts().items():
        assert rows(site_ledger[session]) == rows(accounts[name])
    assert fs.verify_receipt(result.receipt(), study.partition.fingerprints).ok


def full(study, deliver, request):
    """The coordinator's disk is full when the answer comes."""
    answer = deliver(request)
    study.full = True
    return answer


RESUMED = {
    "silent": (silent, EngineError, r"did not answer.*are stored in .*Run the same analysis again"),
    "late": (late, EngineError, r"did not answer.*are stored in .*Run the same analysis again"),
    "coordinator killed before a question": (killed, Killed, None),
    "coordinator killed before it keeps an answer": (killed_with_the_answer, Killed, None),
    "disk full": (full, EngineError, r"the journal .* cannot be written .No space left on device"),
}


@pytest.mark.parametrize("fault", RESUMED)
def test_in_every_round_then_taken_up_again(fault, study, undisturbed, tmp_path, monkeypatch):
    what, error, says = RESUMED[fault]
    study.full = False

    def write(path, content):
        if study.full and path.suffix == ".reply":
            study.full = False
            path.with_name(f".{path.name}.part").write_bytes(content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(content)

    monkeypatch.setattr(journals, "write_atomic", write)
    for turn in range(1, ROUNDS + 1):
        connected = study.connected(tmp_path / "journal", what, turn)
        with pytest.raises(error, match=says):
            analysis(connected)
        # A process that dies ends its threads: none sends or writes anything during the next run.
        connected.engine._pool.shutdown()
    result = analysis(study.connected(tmp_path / "journal"))
    assert_same(result, study, undisturbed)
    assert {len(site_ledger) for site_ledger in study.accounts().values()} == {1}


@pytest.fixture
def one_session_per_sum(study, monkeypatch):
    """No sum is ever taken over answers of two sessions, that is under old and new masks."""
    unmask, taken = sums.unmask_sums, []

    def watched(masked):
        taken.extend({study.came[part.tobytes()] for part in parts} for parts in masked.values())
        return unmask(masked)

    monkeypatch.setattr(sums, "unmask_sums", watched)
    yield
    assert len(taken) > ROUNDS and all(len(sessions) == 1 for sessions in taken)


@pytest.mark.parametrize("turn", range(1, ROUNDS + 1))
def test_a_site_that_is_started_again_goes_on(study, undisturbed, turn):
    assert_same(analysis(study.connected(None, restarted, turn)), study, undisturbed)


def test_a_site_forgets_its_session_in_every_round(study, undisturbed, tmp_path, one_session_per_sum):
    journal = tmp_path / "journal"
    for turn in range(2, ROUNDS):
        with pytest.raises(SessionError, match=r"B: it was started again.*with the journal.*set aside"):
            analysis(study.connected(journal, forgotten, turn))
    # The last question is for the account, which goes on; before the first there is nothing to lose.
    assert_same(analysis(study.connected(journal, forgotten, ROUNDS)), study, undisturbed)
    assert_same(analysis(study.connected(tmp_path / "other", forgotten, 1)), study, undisturbed)
    assert len(list(journal.glob("void-*"))) == ROUNDS - 2


def test_a_site_dies_with_an_answer_in_every_round(study, undisturbed, tmp_path):
    journal = tmp_path / "journal"
    for turn in range(1, ROUNDS + 1):
        with pytest.raises(EngineError, match=r"did not answer.*Run the same analysis again"):
            analysis(study.connected(journal, died_with_the_answer, turn))
    assert_same(analysis(study.connected(journal)), study, undisturbed)


def test_without_a_journal_the_model_is_made_again(study, undisturbed):
    model = fs.FedAvg.from_formula("y ~ x + z", study.connected())
    forgotten(study, None, study.requested[-1])
    with pytest.raises(SessionError, match=r"B: it was started again.*from_formula"):
        model.fit(rounds=10, seed=1, masked=True)
    assert_same(analysis(study.connected()), study, undisturbed)


def test_an_open_question_ends_its_model_and_no_other(study, undisturbed):
    partition = study.connected(None, late, 5)
    model = fs.FedAvg.from_formula("y ~ x + z", partition)
    with pytest.raises(EngineError, match=r"round 2\); without a journal.*from_formula.*without="):
        model.fit(rounds=10, seed=1, masked=True)
    with pytest.raises(
        EngineError, match=r"an earlier request of this model has no known reply.*from_formula"
    ):
        model.fit(rounds=10, seed=1, masked=True)
    assert_same(analysis(study.connected()), study, undisturbed)


def test_a_sites_full_disk_in_every_round(study, undisturbed, tmp_path):
    """A release that cannot be entered is not sent; the owner makes room and starts the site again."""

    class Cut:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            return self.file.write(content[: len(content) // 2])

        def __getattr__(self, name):
            return getattr(self.file, name)

    left = []

    def full_at_the_site(study, deliver, request):
        store = study.places["B"].server.site.site_ledger.store
        store._file = Cut(store._file)
        left.append(deliver(request))
        return left[-1]

    for turn in range(1, ROUNDS + 1):
        with pytest.raises(EngineError, match=r"ledger in the site's folder cannot be written .No space"):
            analysis(study.connected(tmp_path / "journal", full_at_the_site, turn))
        with pytest.raises(EngineError, match="No space"):
            unpack_reply(left[-1])
        if turn == ROUNDS // 2:
            # Room alone does not help: after a line that is cut none is whole.
            store = study.places["B"].server.site.site_ledger.store
            store._file = store._file.file
            with pytest.raises(EngineError, match="its owner makes room and starts the site again"):
                analysis(study.connected())
        study.places["B"].restart()
        if 1 < turn < ROUNDS:
            with pytest.raises(SessionError, match=r"it was started again.*set aside"):
                analysis(study.connected(tmp_path / "journal"))
    assert_same(analysis(study.connected(tmp_path / "journal")), study, undisturbed)


def test_an_answer_is_in_the_ledger_before_it_leaves(study, undisturbed):
    def held(study, deliver, request):
        answer, session = deliver(request), unpack_request(request).session
        (chain,) = (c for c in study.places["B"].server.site.site_ledger.chains if c.session == session)
        assert study.places["B"].site_ledger()[session] == [
            entry.in_round(entry.round) for entry in chain.entries
        ]
        return answer

    assert_same(analysis(study.connected(None, held)), study, undisturbed)


def test_old_questions_are_not_answered_again(study, undisturbed):
    def replayed(study, deliver, request):
        for old in study.requested[:-2]:
            with pytest.raises(
                SecurityError, match=r"B: request \d+ of a session with \d+ answered requests is refused"
            ):
                unpack_reply(deliver(old))
        return deliver(request)

    assert_same(analysis(study.connected(None, replayed)), study, undisturbed)
    study.places["B"].restart()
    # The latest one is known again, and has the same answer.
    assert study.places["B"].server.answer(study.requested[-1]) is not None
    for old in study.requested[:-1]:
        with pytest.raises((SecurityError, SessionError)):
            unpack_reply(study.places["B"].server.answer(old))
    assert len(study.accounts()["B"]) == 2  # the session, and what belongs to none


def test_a_question_that_comes_twice_is_answered_once(study, undisturbed):
    def twice(study, deliver, request):
        assert deliver(request) == deliver(request)
        return deliver(request)

    assert_same(analysis(study.connected(None, twice)), study, undisturbed)


def test_an_unnumbered_question_is_the_only_one_of_its_session(study):
    """A transport may deliver a request twice; its turn shows which one is new."""
    server = study.places["B"].server
    question = pack_request(Request("B", "schema", "describe_table", {}, "a session", "{}"))
    assert server.answer(question) == server.answer(question)
    with pytest.raises(MessageError, match="use a RemoteEngine"):
        unpack_reply(server.answer(pack_request(Request("B", "secure", "introduce", {}, "a session", "{}"))))


def test_two_analysts_at_once(study, undisturbed):
    """Their questions come in turns."""
    found, meeting = {}, threading.Barrier(2, timeout=600)

    def in_turns(study, deliver, request):
        meeting.wait()
        return deliver(request)

    def analyze(formula):
        found[formula] = analysis(study.connected(None, in_turns), formula)

    formulas = ("y ~ x + z", "y ~ z")
    analysts = [threading.Thread(target=analyze, args=(formula,)) for formula in formulas]
    for analyst in analysts:
        analyst.start()
    for analyst in analysts:
        analyst.join()
    assert_same(found["y ~ x + z"], study, undisturbed)
    alone = analysis(study.connected(), "y ~ z")
    np.testing.assert_array_equal(found["y ~ z"].params, alone.params)
    assert fs.verify_receipt(found["y ~ z"].receipt(), study.partition.fingerprints).ok


def test_one_journal_serves_one_process(study, tmp_path):
    (tmp_path / "journal").mkdir()
    with open(tmp_path / "journal" / "lock", "ab") as other:
        assert lock_file(other)
        with pytest.raises(EngineError, match="in use by another process"):
            study.connected(tmp_path / "journal")
    older = study.connected(tmp_path / "journal")
    newer = study.connected(tmp_path / "journal")
    with pytest.raises(EngineError, match="was opened again after"):
        analysis(older)
    analysis(newer)


@pytest.mark.parametrize(
    "other",
    [
        lambda partition: analysis(partition, "y ~ z"),
        lambda partition: fs.FedAvg.from_formula("y ~ x + z", partition).fit(rounds=10, seed=2, masked=True),
        lambda partition: fs.GLORE.from_formula("y ~ x + z", partition).fit(),
    ],
    ids=["formula", "seed", "model"],
)
def test_another_analysis_is_reported_from_the_one_that_is_kept(study, tmp_path, other):
    analysis(study.connected(tmp_path / "journal"))
    with pytest.raises(EngineError, match="belongs to another analysis"):
        other(study.connected(tmp_path / "journal"))


def test_a_refusal_is_kept_and_what_others_answered_entered(tmp_path):
    """An analysis that heeds a refusal and goes on is taken up with it."""
    study = Study(tmp_path, Policy(masked_only=True))

    def script(partition):
        model = fs.GLORE.from_formula("y ~ x", partition)
        with pytest.raises(
            PolicyError, match=r"B: its policy .masked only.*stored in the journal.*use another"
        ) as refused:
            model.fit(masked=False)
        return str(refused.value), model.fit()

    reported, first = script(study.connected(tmp_path / "journal"))
    request = len(study.requested)
    again, second = script(study.connected(tmp_path / "journal"))
    assert reported == again and len(study.requested) == request
    np.testing.assert_array_equal(second.params, first.params)
    for result in (first, second):
        assert fs.verify_receipt(result.receipt(), study.partition.fingerprints).ok


def test_clocks_that_are_set_back(study, undisturbed, monkeypatch):
    """Nothing hangs on the coordinator's; a site's account does not run backwards."""
    gmtime, seconds = time.gmtime, itertools.count(10**9, -1000)
    monkeypatch.setattr(time, "gmtime", lambda: gmtime(next(seconds)))
    assert_same(analysis(study.connected()), study, undisturbed)


def test_drawn_numbers_are_not_drawn_again(tmp_path):
    """An answer to the random numbers of one attempt never meets those of another."""
    partition = enterprises()
    expected = fs.VFEMRegression.from_formula("w ~ .", partition).fit()
    servers, kept = {name: SiteServer(site) for name, site in partition.sites.items()}, tmp_path / "journal"

    class Wires:
        left = 0

        def send(self, site, request):
            answer = servers[site].answer(request)
            self.left -= 1
            if self.left < 0:
                raise EngineError(f"'{site}': the network is cut")
            return answer

    def fit(left):
        wires = Wires()
        wires.left = left
        sites = {name: RemoteSite(name, wires) for name in servers}
        cut = replace(partition, _engine=RemoteEngine(sites, Journal(kept)))
        return fs.VFEMRegression.from_formula("w ~ .", cut).fit()

    for attempt in itertools.count():
        assert attempt < 60
        try:
            result = fit(1)
            break
        except EngineError as error:
            assert "the network is cut" in str(error)
    assert attempt > 10
    np.testing.assert_array_equal(result.params, expected.params)
    assert fs.verify_receipt(result.receipt(), partition.fingerprints).ok


def test_a_damaged_journal_is_named(study, tmp_path):
    analysis(study.connected(tmp_path / "journal"))
    Path(tmp_path, "journal", "run-0002", "00003.json").write_text("[")
    with pytest.raises(EngineError, match=r"00003.json' is damaged; start again with another"):
        analysis(study.connected(tmp_path / "journal"))
