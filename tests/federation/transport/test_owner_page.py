"""The owner's page: what it shows, and what it decides, as ``fedstat site approve`` and ``deny`` do."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from forked import Forked
from markupsafe import escape as escape_text
from operating import main, until_true
from paged import RECORDS, Visitor, make_site, owner_of, page_of, propose

from fedstat.errors import MessageError, SecurityError
from fedstat.federation.disclosure.approval import describe_plan
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.threat_statements import threats_under
from fedstat.federation.message import Request, pack_request
from fedstat.federation.transport.flare.provision import FLARE, KIT
from fedstat.federation.transport.site_folder import open_site, refusal_log
from fedstat.operator.page import rendering, views
from fedstat.operator.page.server import MOST_THREADS
from fedstat.operator.service import owner_view

PAGES = ("", "plans", "ledger", "ledger/1", "exposure", "refusals", "policy", "check")


def request(session: str, step: str = "describe_table") -> bytes:
    return pack_request(Request("A", "schema", step, {}, session, "{}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A site that has answered in two sessions, and refused."""
    policy = Policy.strict(approval="owner", privacy=Budget(1.0, 1e-6), two_sites="warn")
    folder = make_site(tmp_path_factory.mktemp("page"), policy)
    site = open_site(folder)
    site.answer(request("first"))
    site.answer(request("second"))
    with pytest.raises(MessageError):
        site.answer(request("second", "no_such_step"))
    site.site_ledger.count_refusal("c0ffee" * 10)
    refusal_log(folder)("A: step 'score': its policy (minimum count) has fewer rows than 5")
    site.site_ledger.store.close()
    return folder


def test_equal_sessions_are_one_line_with_their_number_and_links_to_all(tmp_path):
    folder = make_site(tmp_path, Policy())
    site = open_site(folder)
    for i in range(4):
        site.answer(request(f"connection {i}"))
    site.site_ledger.store.close()
    view = owner_view(folder)
    (day,) = views.ledger_page(view)["days"]
    (row,) = day["connections"]
    assert row[3].endswith("; 4 times") and row[0].page == "ledger/4"
    ((what, earlier),) = day["repeated"]
    assert [one.page for one in earlier] == ["ledger/3", "ledger/2", "ledger/1"] and what == row[2]
    with owner_of(folder) as owner:
        shown = owner.get("ledger").text
    assert all(f'ledger/{i}"' in shown for i in (1, 2, 3, 4)) and "4 times" in shown


def test_every_page_shows_what_the_commands_print(folder, capsys):
    digest = propose(folder, "age ~ sex")
    view = owner_view(folder)
    with owner_of(folder) as owner:
        text = {page: owner.get(page).text for page in (*PAGES, f"plans/{digest}")}
    plan = view.waiting[digest]
    for line in describe_plan(plan):
        assert all(escape_text(part) in text[f"plans/{digest}"] for part in line.strip().split(": ", 1))
    assert view.fingerprint in text[""] and "has not been started yet" in text[""]
    assert "epsilon 0 of 1 at delta 1e-06" in text[""] and "1 of 10" in text[""]
    assert digest[:12] in text[""] and digest[:12] in text["plans"]
    for chain in view.site_ledger.chains:
        assert f"ledger/{chain.ordinal}" in text["ledger"]
    assert view.site_ledger.chains[0].head in text["ledger/1"]
    assert "minimum count" in text["refusals"] and "no_such_step" in text["refusals"]
    assert "two_sites = &#34;warn&#34;" in text["policy"]
    assert all(escape_text(threat.learns) in text["policy"] for threat in threats_under(view.policy))
    capsys.readouterr()
    main(["site", "check", str(folder)])
    printed = capsys.readouterr().out
    said = [line[4:] for line in printed.splitlines() if line.startswith("  - ")]
    assert said and all(escape_text(line) in text["check"] for line in said)


def test_no_value_of_a_record_is_on_a_page(folder):
    digest = propose(folder)
    with owner_of(folder) as owner:
        pages = [owner.get(page) for page in (*PAGES, f"plans/{digest}", f"plans/{digest}/approve")]
    assert all(page.status == 200 for page in pages)
    values = [str(value) for value in RECORDS["age"] if value % 1]
    assert values and not any(value in page.text for page in pages for value in values)


@pytest.mark.parametrize("word, verdict", [("approve", "approved"), ("deny", "denied")])
def test_a_decision_is_that_of_the_command(folder, word, verdict):
    digest = propose(folder, f"age ~ sex + {word}")
    with owner_of(folder) as owner:
        page = f"plans/{digest}/{word}"
        found = owner.post(page, owner.token(page))
        assert found.status == 303 and found.headers["Location"] == f"{owner.server.root}plans"
        after = owner.get("plans").text
    waiting, _, decided = after.partition("Decided")
    assert digest[:12] not in waiting and re.search(f"{verdict}.*{getpass.getuser()}.*{digest:.12}", decided)
    site = open_site(folder)
    try:
        assert site.approvals.status(digest) == verdict
        assert site.site_ledger.decisions[digest].who == getpass.getuser()
    finally:
        site.site_ledger.store.close()
    with owner_of(folder) as owner:
        assert "is in force" in owner.get("plans").text


def test_a_decision_can_be_changed_by_the_page_of_a_plan_that_was_decided(folder):
    digest = propose(folder, "age ~ 1")
    assert main(["site", "approve", str(folder), digest]) == 0
    with owner_of(folder) as owner:
        page = f"plans/{digest}/deny"
        assert owner.post(page, owner.token(page)).status == 303
    site = open_site(folder)
    assert site.approvals.status(digest) == "denied"
    site.site_ledger.store.close()


def test_a_ledger_that_is_not_whole_is_said_and_the_rest_is_shown(tmp_path):
    folder = make_site(tmp_path)
    digest = propose(folder)
    with owner_of(folder) as owner:
        assert "problem" not in owner.get("").text
        path = folder / "ledger.jsonl"
        path.write_bytes(path.read_bytes().replace(b"e", b"f", 1))
        text = owner.get("").text
        assert 'class="problem"' in text and digest[:12] in text


def test_the_command_prints_an_address_that_opens_it_once_and_ends_at_a_signal(folder, tmp_path):
    log = tmp_path / "log.txt"
    printed = re.compile(r"http://127\.0\.0\.1:(\d+)/enter\S+")
    process = Forked(main, ("site", "page", str(folder)), log=log)
    try:
        until = time.monotonic() + 120
        while not (log.exists() and (found := printed.search(log.read_text()))):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        server = Elsewhere(int(found[1]))
        assert Visitor(server).enter(found[0]).status == 200
        assert Visitor(server).enter(found[0]).status == 403
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    said = log.read_text()
    assert "opened in a browser" in said and "is closed" in said


@dataclass
class Elsewhere:
    """A server in another process."""

    server_port: int


def test_a_folder_that_others_may_read_is_not_served(tmp_path, capsys, monkeypatch):
    folder = make_site(tmp_path)
    os.chmod(folder, 0o755)
    with monkeypatch.context() as patch:
        patch.setattr("fedstat.operator.page.server.PageServer.serve_forever", lambda server: None)
        assert main(["site", "page", str(folder)]) == 1
    assert "chmod 700" in capsys.readouterr().err
    os.chmod(folder, 0o700)
    digest = propose(folder)
    with owner_of(folder) as owner:
        token = owner.token(f"plans/{digest}/approve")
        os.chmod(folder / "policy.toml", 0o644)
        found = owner.post(f"plans/{digest}/approve", token)
    assert found.status == 409 and "chmod 600" in found.text
    assert list(owner_view(folder).plans.decided()) == []
    with pytest.raises(SecurityError):
        owner_view(folder).check_modes()


def test_a_browser_is_opened_by_a_private_file_and_not_by_the_token(tmp_path, monkeypatch):
    """Every account of a machine sees with which arguments a program was called."""
    folder, seen = make_site(tmp_path), []

    def opened(address):
        path = Path(address.removeprefix("file://"))
        seen.append((address, path.stat().st_mode & 0o777, path.read_text()))

    monkeypatch.setattr("webbrowser.open", opened)
    monkeypatch.setattr("fedstat.operator.page.server.PageServer.serve_forever", lambda server: None)
    monkeypatch.setattr("signal.signal", lambda *given: None)
    assert main(["site", "page", str(folder), "--open"]) == 0
    ((address, mode, text),) = seen
    assert "token" not in address and mode == 0o600 and "/enter?token=" in text
    assert not (folder / "page.html").exists()


def test_a_port_that_is_taken_is_named(folder, capsys):
    with page_of(folder) as server:
        assert main(["site", "page", str(folder), "--port", str(server.server_port)]) == 1
    assert f"port {server.server_port} of 127.0.0.1 is not available" in capsys.readouterr().err


def test_a_plan_without_end_is_listed_by_its_beginning_and_shown_whole_where_it_is_decided(folder):
    digest = propose(folder, "age ~ " + " + ".join(f"column_{number}" for number in range(5000)))
    with owner_of(folder) as owner:
        assert "column_4999" not in owner.get("").text and digest[:12] in owner.get("").text
        for page in (f"plans/{digest}", f"plans/{digest}/approve"):
            assert "column_4999" in owner.get(page).text


def test_days_of_a_certificate_are_shown_before_it_expires(tmp_path):
    folder = tmp_path / "north"
    given = ["--name", "north", "--data", str(tmp_path / "records.csv"), "--transport", "flare"]
    RECORDS.to_csv(tmp_path / "records.csv", index=False)
    assert main(["site", "init", str(folder), *given]) == 0
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    certificate = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(12.5))
    startup = folder / FLARE / KIT / "startup"
    startup.mkdir(parents=True, mode=0o700)
    signed = certificate.sign(key, hashes.SHA256())
    (startup / "client.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    with owner_of(folder) as owner:
        assert "the certificate expires in 12 days" in owner.get("").text
        assert "the certificate expires in 12 days" in owner.get("check").text


def test_the_style_is_served_and_pages_have_no_script(folder):
    with page_of(folder) as server:
        assert Visitor(server).get("style.css").status == 403
    with owner_of(folder) as owner:
        style = owner.get("style.css")
        assert style.status == 200 and style.headers["Content-Type"].startswith("text/css")
        for page in PAGES:
            found = owner.get(page)
            assert "<script" not in found.text and " style=" not in found.text
            assert found.headers["Cache-Control"] == "no-store"
            assert found.headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_every_value_of_a_template_is_escaped():
    templates = rendering.environment()
    assert templates.autoescape is True and len(templates.list_templates()) > 10
    for name in templates.list_templates():
        source = templates.loader.get_source(templates, name)[0]
        assert not re.search(r"\|\s*safe|autoescape|Markup", source), name
    page = rendering.render("frame.html", name="<b>", root="/", here="", title="\u202e'\"&", problem="<i>\0")
    assert "<b>" not in page and "<i>" not in page and "&lt;b&gt;" in page and "?&#39;&#34;&amp;" in page


def test_without_jinja2_the_command_names_the_extra(tmp_path, capsys, monkeypatch):
    folder = make_site(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    rendering.environment.cache_clear()
    try:
        assert main(["site", "page", str(folder)]) == 1
    finally:
        rendering.environment.cache_clear()
    assert "pip install 'fedstat[site]'" in capsys.readouterr().err


def test_connections_are_limited_and_other_threads_of_the_process_do_not_count(folder):
    stop = threading.Event()
    others = [threading.Thread(target=stop.wait, daemon=True) for _ in range(MOST_THREADS + 1)]
    for thread in others:
        thread.start()
    try:
        with owner_of(folder) as owner:
            server = owner.server
            until_true(lambda: server._connections == 0)
            place = "127.0.0.1", server.server_port
            held = [socket.create_connection(place) for _ in range(MOST_THREADS - 1)]
            until_true(lambda: server._connections == MOST_THREADS - 1)
            assert owner.get("").status == 200
            until_true(lambda: server._connections == MOST_THREADS - 1)
            held.append(socket.create_connection(place))
            until_true(lambda: server._connections == MOST_THREADS)
            with pytest.raises(OSError):
                owner.get("")
            for connection in held:
                connection.close()
            until_true(lambda: server._connections == 0)
            assert owner.get("").status == 200
    finally:
        stop.set()
