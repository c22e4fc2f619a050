"""The coordinator's page: sites that answer or not, waiting approvals and analyses; it decides nothing."""

from __future__ import annotations

import re
import threading
import warnings
from contextlib import contextmanager

import pytest
from operating import make_federation, served_sites, until_true
from paged import Visitor
from test_approval_served import NAMES, POLICY, frames

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import ConsentError, SecurityError
from fedstat.federation.disclosure.approval import APPROVAL_FAMILY
from fedstat.federation.message import Purpose, Reply, Request
from fedstat.federation.protocols.plan_approval import PlanStatus
from fedstat.federation.transport.analysis_notes import (
    NOTES,
    AnalysisNote,
    NoteKeeper,
    read_notes,
    waiting_notes,
)
from fedstat.operator import federation_commands
from fedstat.operator.page.federation_view import FederationView
from fedstat.operator.page.server import PageServer

EVIL = "<script>alert(1)</script>"


@contextmanager
def page_of(folder, timeout=3.0):
    view = FederationView(
        folder,
        federation_commands.federation_status,
        lambda place: federation_commands.test_sites(place, timeout),
    )
    view.check_modes()
    with PageServer(view) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            visitor = Visitor(server)
            assert visitor.enter(server.address).status == 200
            yield visitor
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    home = tmp_path_factory.mktemp("coordinator")
    study = make_federation(home, frames(), policy=POLICY)
    with served_sites(home, NAMES[:1]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            partition = fs.ClientPartition.connect(
                study, without=[NAMES[1]], person=EVIL, purpose="Risk of relapse"
            )
            with pytest.raises(ConsentError):
                fs.GLORE.from_formula("y ~ age", partition).fit(local=False, masked=False)
        yield study


def test_dead_sites_and_waiting_approvals_are_shown(study):
    with page_of(study) as visitor:
        until_true(lambda: "being tested" not in visitor.get("").text)
        text = visitor.get("").text
    rows = re.sub(r"<td [^>]*>", "<td>", text)
    assert "<td>East</td><td>yes</td>" in rows and "<td>West</td><td>NO</td>" in rows
    assert "West" in text.partition("Sites</h2>")[0]  # and among the problems
    waiting = text.partition("Waiting for the approval of owners")[2]
    assert "requires the owner&#39;s approval" in waiting and "Risk of relapse" in waiting
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_the_page_decides_nothing_and_is_as_closed_as_that_of_an_owner(study):
    digest = "0" * 64
    with page_of(study) as visitor:
        server = visitor.server
        assert Visitor(server).get("").status == 403
        assert visitor.get("", Host="evil.example").status == 403
        token = server.form_token(digest, "approve")
        for path in (f"plans/{digest}/approve", "plans", "policy", f"../{NOTES}"):
            assert visitor.get(path).status == 404
        assert visitor.post(f"plans/{digest}/approve", token).status == 404
        assert "script-src" not in visitor.get("").headers["Content-Security-Policy"]


def test_a_folder_that_others_write_is_not_shown(study):
    study.chmod(0o770)
    try:
        with pytest.raises(SecurityError, match="others can write"), page_of(study):
            pass
    finally:
        study.chmod(0o700)


def test_a_note_of_a_process_that_is_gone_is_not_running(study):
    (note, *_) = read_notes(study)
    assert note.waits_for and note.person == EVIL
    (study / NOTES / "99999999999999999999-strange.json").write_text("{")
    assert read_notes(study)[0] == note
    assert note.state_of(False) == "waited for approval"
    assert (note.state, list(note.plans.values())) == ("waits for approval", ["pending"])


def note_of(plans, waits_for=""):
    return AnalysisNote(1, "2026-01-01T00:00:00Z", "Ada", "study", "why", "done", waits_for, plans)


def test_a_plan_waits_once_and_no_longer_when_it_was_denied_or_approved():
    """Notes as the connections of an analyst leave them, the latest first."""
    first, again, other = (note_of({digest: "pending"}, "North") for digest in "aab")
    denied, used = note_of({"a": "denied"}), note_of({"a": "approved"})
    assert waiting_notes([first]) == [first]
    assert waiting_notes([other, again, first]) == [other, again]
    assert waiting_notes([denied, again, first]) == waiting_notes([used, denied, first]) == []
    # after the run that was approved, the same plan is proposed again
    assert waiting_notes([first, used, first]) == [first]
    both = note_of({"a": "approved", "c": "pending"}, "South")
    assert waiting_notes([both, first]) == [both]


def test_the_page_asks_the_sites_again_while_it_is_looked_at(study, monkeypatch):
    asked = []
    view = FederationView(study, federation_commands.federation_status, lambda _: asked.append(1) or ({}, []))
    view.check_modes()
    until_true(lambda: asked)
    view.site_rows()
    assert len(asked) == 1
    view._next = 0.0
    view.site_rows()
    until_true(lambda: len(asked) == 2)


def test_a_denied_plan_is_shown_as_denied(tmp_path):
    keeper = NoteKeeper(tmp_path, Purpose("Ada", "study", "why"))
    request = Request("North", APPROVAL_FAMILY, "propose_plan", {}, "s")
    for status, state in (("pending", "waits for approval"), ("denied", "denied"), ("approved", "done")):
        keeper.take(request, Reply("North", {}, to_json(PlanStatus("a", status))))
        keeper.end(None if status == "approved" else ConsentError("North: its policy", rule="approval"))
        (note,) = read_notes(tmp_path)
        assert note.state == state and bool(waiting_notes([note])) == (status == "pending")
