"""More analysts at once than a site keeps sessions: they wait their turn, and nobody loses a fit."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation, served_sites, until_true

import fedstat as fs
from fedstat.errors import FedstatWarning
from fedstat.federation.disclosure import state as session_state
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.transport.mailbox import BusyError
from fedstat.federation.transport.remote import SiteServer
from fedstat.federation.transport.site_folder import open_site

ANALYSTS, SESSIONS = 20, 4


def frame(seed, n=60):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({f"x{i}": rng.normal(size=n) for i in range(ANALYSTS)} | {"y": rng.normal(size=n)})


def limit(folder, sessions):
    path = folder / "site.toml"
    path.write_text(path.read_text().replace("sessions = 32", f"sessions = {sessions}"))


@pytest.fixture
def home(tmp_path):
    frames = {"A": frame(1), "B": frame(2)}
    make_federation(tmp_path, frames, policy=Policy.open())
    for name in frames:
        limit(tmp_path / name, SESSIONS)
    return tmp_path


def test_twenty_analysts_at_once_all_have_their_fits(home):
    """Each one connects and fits two models at two sites that keep four sessions."""
    table = pd.concat([frame(1), frame(2)])
    found, errors = {}, []
    start = threading.Barrier(ANALYSTS)

    def analyze(i):
        try:
            start.wait(60)
            partition = fs.ClientPartition.connect(home / "study", person=f"Analyst {i}")
            for formula in (f"y ~ x{i}", f"x{i} ~ y"):
                fit = fs.FederatedOLS.from_formula(formula, partition).fit(masked=False, local=False)
                found[formula] = np.asarray(fit.params)
        except Exception as error:
            errors.append(error)

    with warnings.catch_warnings(), served_sites(home, ["A", "B"]):
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=analyze, args=(i,)) for i in range(ANALYSTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert errors == [] and len(found) == 2 * ANALYSTS
    for formula, params in found.items():
        y, x = formula.split(" ~ ")
        expected = np.linalg.lstsq(
            np.column_stack([np.ones(len(table)), table[x]]), table[y].to_numpy(), rcond=None
        )[0]
        np.testing.assert_allclose(params, expected, atol=1e-8)


def test_an_analysis_that_waits_says_so_and_continues_when_another_ends(home):
    text = (home / "A" / "site.toml").read_text().replace(f"sessions = {SESSIONS}", "sessions = 1")
    (home / "A" / "site.toml").write_text(text)
    with served_sites(home, ["A", "B"]):
        warnings.simplefilter("ignore")
        partition = fs.ClientPartition.connect(home / "study")
        first = fs.FederatedOLS.from_formula("y ~ x0", partition)
        fits, said = [], []

        def second():
            with warnings.catch_warnings(record=True) as raised:
                warnings.simplefilter("always")
                model = fs.FederatedOLS.from_formula("y ~ x1", fs.ClientPartition.connect(home / "study"))
                fits.append(model.fit(masked=False, local=False))
            said.extend(str(one.message) for one in raised if issubclass(one.category, FedstatWarning))

        thread = threading.Thread(target=second)
        thread.start()
        until_true(lambda: list((home / "study/exchange/A/replies").glob("*.note")), 60)
        assert not fits
        first.fit(masked=False, local=False)  # which was not replaced, and ends
        thread.join(60)
    assert len(fits) == 1
    assert any("waits for its turn" in text and "sessions" in text for text in said)


@pytest.fixture
def server(home):
    limit(home / "A", SESSIONS)
    site = open_site(home / "A")
    yield SiteServer(site)
    site.site_ledger.store.close()


def survey(session, turn=1):
    text = '{"site": "A"}'
    return pack_request(Request("A", "schema", "describe_table", {}, session, text, turn=turn))


def test_connections_never_wait_and_replace_no_analysis(server, monkeypatch):
    site = server.site
    for i in range(SESSIONS):
        state = session_state.State("A")
        state.keep("model", i)
        site.states[f"model {i}"] = state
    answer = unpack_reply(server.answer(survey("connection")))
    assert "n_rows" in answer.text and set(site.states) == {f"model {i}" for i in range(SESSIONS)}
    begins = Request("A", "design", "survey_rows", {}, "another", "{}", turn=1)
    with pytest.raises(BusyError, match=f"all {SESSIONS} sessions"):
        server.answer(pack_request(begins))
    assert site.site_ledger.find("another") is None  # it is answered later, as the first request
    # a session without requests for a quarter of an hour is replaced, one whose run has ended at once
    assert not site.has_room(begins)
    site.states["model 2"].run_ended = True
    assert site.has_room(begins) and site._replaceable() == "model 2"
    site.states["model 2"].run_ended = False
    site.states["model 1"].used -= session_state.IDLE + 1
    assert site.has_room(begins) and site._replaceable() == "model 1"


def test_the_number_of_sessions_is_followed_while_the_site_runs_and_checked(home, capsys):
    path = home / "A" / "site.toml"
    path.write_text(path.read_text().replace(f"sessions = {SESSIONS}", "sessions = 0"))
    assert main(["site", "check", str(home / "A")]) == 1
    assert "sessions is a whole number of at least 1" in "".join(capsys.readouterr())


def test_analyses_that_wait_for_each_other_at_two_sites_go_on(server, monkeypatch):
    """All open sessions wait for other sites: one more is opened, and none is lost."""
    site = server.site
    for i in range(SESSIONS):
        site.states[f"model {i}"] = session_state.State("A")
        site.states[f"model {i}"].keep("model", i)
    begins = Request("A", "design", "survey_rows", {}, "another", "{}", turn=1)
    assert not site.has_room(begins)
    for one in site.states.values():
        one.used -= session_state.STALLED + 1
    assert site.has_room(begins)
    another = session_state.State("A")
    another.keep("model", 0)
    site._keep_state("another", another)
    assert len(site.states) == SESSIONS + 1 and not site.has_room(replace(begins, session="third"))
