"""What ends by itself: approvals, answered requests in an exchange, and the patience of an analyst."""

import math
import os
import time

import pytest
from operating import make_federation
from test_exchange_pace import Answering
from test_rules_in_force import frame

import fedstat as fs
from fedstat.errors import ConsentError, EngineError, PartitionError
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure.approval import AnalysisPlan, Approvals, PlannedStep, Role
from fedstat.federation.message import Purpose
from fedstat.federation.partition import connect
from fedstat.federation.transport.mailbox import Inbox, SiteMailbox, show_alive
from fedstat.federation.transport.site_folder import open_site

DAY = 86_400
COUNT = PlannedStep("toy", "count", 1, masked=False, texts=("",), gives=())
PLAN = AnalysisPlan("Kiel", "fit()", "y ~ x", "Gaussian", ("x", "y"), (COUNT,), 1, ())


@pytest.mark.parametrize(("days", "status"), [(29.9, "approved"), (30.1, "pending")])
def test_an_approval_expires_and_can_be_given_again(monkeypatch, days, status):
    now = time.time_ns
    approvals = Approvals("Kiel", SiteLedger(), valid_days=30)
    digest, _ = approvals.propose(PLAN)
    approvals.decide(digest, "approved", "owner")
    assert approvals.status(digest) == "approved"
    monkeypatch.setattr(time, "time_ns", lambda: now() + int(days * DAY * 1e9))
    assert approvals.propose(PLAN) == (digest, status)
    if status == "approved":
        approvals.begin(digest)
        return
    with pytest.raises(ConsentError, match="this one is pending"):
        approvals.begin(digest)
    assert list(approvals.pending) == [digest]
    approvals.decide(digest, "approved", "owner")
    approvals.begin(digest)


def test_a_denial_does_not_expire(monkeypatch):
    now = time.time_ns
    approvals = Approvals("Kiel", SiteLedger(), valid_days=30)
    digest, _ = approvals.propose(PLAN)
    approvals.decide(digest, "denied", "owner")
    monkeypatch.setattr(time, "time_ns", lambda: now() + 365 * DAY * 10**9)
    assert approvals.status(digest) == "denied"


def test_the_owner_sets_how_long_an_approval_is_valid(tmp_path, capsys):
    make_federation(tmp_path, {"A": frame()})
    path = tmp_path / "A" / "site.toml"
    template = path.read_text()
    for text, days in (("approval_days = 30", 30.0), ("approval_days = 7", 7.0), ("", 30.0)):
        path.write_text(template.replace("approval_days = 30", text))
        site = open_site(tmp_path / "A")
        assert site.approvals.valid_days == days
        site.site_ledger.store.close()
    path.write_text(template.replace("message_days = 90", "message_days = 0"))
    with pytest.raises(PartitionError, match="numbers of days above 0"):
        open_site(tmp_path / "A")


@pytest.mark.parametrize("keep_days", [90.0, math.inf])
def test_answered_requests_leave_the_exchange_after_some_months(tmp_path, keep_days):
    part = SiteMailbox(tmp_path)
    part.make()
    old, new = "ab" * 16, "cd" * 16
    for number, days in ((old, 91), (new, 89)):
        place = part.done(number)
        place.parent.mkdir(parents=True)
        for path in (place, place.with_suffix(".ask")):
            path.write_text("x")
            os.utime(path, (time.time() - days * DAY,) * 2)
    other = part.done(old).with_name("notes.txt")
    other.write_text("of the owner")
    os.utime(other, (0, 0))
    Inbox(part, print, keep_days).poll(Answering())
    assert part.done(old).exists() == part.done(old).with_suffix(".ask").exists() == (keep_days == math.inf)
    assert part.done(new).exists() and other.exists()


def test_nothing_is_removed_through_a_link(tmp_path):
    part, elsewhere = SiteMailbox(tmp_path / "A"), tmp_path / "elsewhere"
    part.make()
    (elsewhere / "ab").mkdir(parents=True)
    path = elsewhere / "ab" / f"{'ab' * 16}.reply"
    path.write_text("x")
    os.utime(path, (0, 0))
    (part.place / "done").symlink_to(elsewhere)
    Inbox(part, print, 90.0).poll(Answering())
    assert path.exists()


def test_an_analyst_does_not_wait_for_a_site_that_is_silent(tmp_path, capsys, monkeypatch):
    study = make_federation(tmp_path, {name: frame() for name in "ABC"})
    monkeypatch.setattr(connect, "SEEN_AGAIN", 0.3)
    for name in "ABC":
        (study / "exchange" / name).mkdir(parents=True)
        assert show_alive(study / "exchange", name) == ""
    two_hours = time.time() - 7200
    os.utime(study / "exchange" / "B" / "alive", (two_hours, two_hours))
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"seen last: B 120 minutes ago.*without=\['B'\]"):
        fs.ClientPartition.connect(study)
    assert time.monotonic() - began < 60
    # a longer timeout, as for an exchange that is copied by hand, waits for the site
    path = study / "federation.toml"
    path.write_text(path.read_text().replace("timeout = 3600", "timeout = 7300"))
    federation = connect.read_federation(study)
    connect._check_alive(federation, ("A", "B", "C"))


def test_persons_are_compared_without_case_and_blanks():
    role = Role(people=("Ada  Berg",))
    for person, is_admitted in (("ada berg", True), (" ADA BERG", True), ("Ada Ber", False), ("", False)):
        assert role.admits(Purpose(person, "study", "why"), "glm") == is_admitted
