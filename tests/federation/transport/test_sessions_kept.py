"""A session outlives the process of its site, and an older state of it is never gone on with."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from faulty import Place, Study, analysis, died_with_the_answer, enterprises, patients, restarted
from operating import make_federation, serve, served_sites, wait

import fedstat as fs
from fedstat.errors import EngineError, SecurityError, SessionError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import IDLE
from fedstat.federation.message import unpack_reply, unpack_request
from fedstat.federation.transport import session_store
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite
from fedstat.federation.transport.session_store import SESSIONS, read_state, write_state

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path)


def files(place):
    return sorted(path for path in (place.folder / SESSIONS).rglob("*") if path.is_file())


def stops_before(turn):
    """The coordinator stops before B's question of this turn; B has answered all before."""

    def stopped(study, deliver, request):
        raise EngineError("stopped")

    return stopped, turn


def halfway(study, turn=9):
    """A session of which B has answered some questions; the next of its questions."""
    with pytest.raises(EngineError, match="stopped"):
        analysis(study.connected(None, *stops_before(turn)))
    return study.requested[-1]


def test_what_is_kept_is_the_owners_alone_and_sealed(study):
    halfway(study)
    place = study.places["B"]
    assert (place.folder / SESSIONS).stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files(place)} == {0o600}
    (state,) = place.server.site.states.values()
    secrets = list(state.look_at("masker")._keys.values())
    rows = np.ascontiguousarray(state.look_at("rows").held[1])
    for path in files(place):
        content = path.read_bytes()
        assert b"masker" not in content and not any(secret in content for secret in secrets)
        assert rows[0].tobytes() not in content


def test_a_state_of_an_earlier_answer_is_refused(study):
    """Its masks would serve twice."""
    place = study.places["B"]
    halfway(study, 8)
    session = unpack_request(study.requested[-1]).session
    old = {path: path.read_bytes() for path in files(place) if path.name != "anchor"}
    assert unpack_reply(place.server.answer(study.requested[-1])).site == "B"
    for path, content in old.items():
        path.write_bytes(content)
    place.restart()
    for question in study.requested[-2:]:
        assert unpack_request(question).session == session
        with pytest.raises((SessionError, SecurityError)):
            unpack_reply(place.server.answer(question))
    assert any("not belong to its latest reply" in why for why in place.server.site.refusals.reasons)
    # It also does not begin again, however often it is requested.
    place.restart()
    with pytest.raises(SessionError):
        unpack_reply(place.server.answer(study.requested[-1]))


def test_a_folder_that_is_put_back_as_a_whole_goes_on_with_no_session(study):
    """Ledger and state then agree; the time at which the ledger was changed does not."""
    place, before = study.places["B"], study.places["B"].folder.with_name("before")
    next_one = halfway(study, 8)
    place.server.site.site_ledger.store.close()
    shutil.copytree(place.folder, before, copy_function=shutil.copy2)
    place.start()
    assert unpack_reply(place.server.answer(next_one)).site == "B"
    place.server.site.site_ledger.store.close()
    for path in before.rglob("*"):
        if path.is_file():
            put_back = place.folder / path.relative_to(before)
            put_back.parent.mkdir(exist_ok=True)
            shutil.copy2(path, put_back)
    place.start()
    with pytest.raises(SessionError, match="B: it was started again"):
        unpack_reply(place.server.answer(next_one))
    assert [path.name for path in files(place)] == ["anchor"]


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_state_that_was_altered_is_refused(study, at):
    next_one = halfway(study)
    place = study.places["B"]
    (path,) = (path for path in files(place) if path.name == "state")
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    place.restart()
    with pytest.raises(SessionError, match=r"B: it was started again.*from_formula"):
        unpack_reply(place.server.answer(next_one))
    assert not path.exists()


def test_a_state_of_another_session_is_refused(study):
    first = halfway(study)
    second = halfway(study)
    place = study.places["B"]
    ours, theirs = sorted(path for path in files(place) if path.name == "state")
    ours_was = ours.read_bytes()
    ours.write_bytes(theirs.read_bytes())
    theirs.write_bytes(ours_was)
    place.restart()
    for question in (first, second):
        with pytest.raises(SessionError):
            unpack_reply(place.server.answer(question))


def test_nothing_is_removed_but_sessions(study, tmp_path):
    """Somebody who can write to the folder cannot make the site remove files elsewhere."""
    halfway(study)
    place, elsewhere = study.places["B"], tmp_path / "elsewhere"
    (elsewhere / ("0" * 32)).mkdir(parents=True)
    (place.folder / SESSIONS / "anchor").unlink()
    (place.folder / SESSIONS / "notes").mkdir()
    (place.folder / SESSIONS / ("1" * 32)).symlink_to(elsewhere)
    place.restart()
    assert {path.name for path in (place.folder / SESSIONS).iterdir()} == {"anchor", "notes", "1" * 32}
    shutil.rmtree(place.folder / SESSIONS)
    (place.folder / SESSIONS).symlink_to(elsewhere)
    with pytest.raises(SecurityError, match="a link to another folder"):
        place.restart()
    assert (elsewhere / ("0" * 32)).exists()


def test_a_full_disk_ends_sessions_and_no_service(study, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(session_store, "_write", full)
    analysis(study.connected())
    assert any(
        "a session will end with this process" in why
        for why in study.places["B"].server.site.refusals.reasons
    )
    with pytest.raises(SessionError):
        analysis(study.connected(None, restarted, 9))


def test_other_records_end_a_session(study):
    next_one = halfway(study)
    place = study.places["B"]
    table = place.site._data.table.table
    table.frame = table.frame.assign(x=table.frame["x"].to_numpy()[::-1])
    place.restart()
    with pytest.raises(SessionError):
        unpack_reply(place.server.answer(next_one))
    assert any("the rows have changed" in why for why in place.server.site.refusals.reasons)


def test_other_rules_end_a_session(study):
    """Checks at the start of a session would not be repeated."""
    next_one = halfway(study)
    place = study.places["B"]
    place.policy = replace(place.policy, min_count=place.policy.min_count + 1)
    place.restart()
    with pytest.raises(SessionError):
        unpack_reply(place.server.answer(next_one))
    assert any("policy or public description" in why for why in place.server.site.refusals.reasons)


def test_old_sessions_are_removed(study):
    halfway(study)
    place = study.places["B"]
    (state,) = (path for path in files(place) if path.name == "state")
    an_age_ago = time.time() - session_store.OLD - 60
    os.utime(state.parent, (an_age_ago, an_age_ago))
    place.restart()
    assert not state.exists()
    place.server.site.max_sessions = 2
    for _ in range(3):
        for one in place.server.site.states.values():
            one.used -= IDLE + 1  # so that the next session replaces it and does not wait
        halfway(study, 3)
    assert len([path for path in files(place) if path.name == "state"]) == 2


def test_a_session_that_holds_what_is_not_written_is_not_kept_and_says_so(study):
    next_one = halfway(study)
    place = study.places["B"]
    (state,) = place.server.site.states.values()
    state.keep("odd", lambda: None)
    assert unpack_reply(place.server.answer(next_one)).site == "B"
    assert [path.name for path in files(place)] == ["anchor"]
    assert any("a session will end with this process" in why for why in place.server.site.refusals.reasons)


def test_large_arrays_are_written_once(study, monkeypatch):
    monkeypatch.setattr(session_store, "LARGE", 64)
    written = []
    complete = session_store._write
    monkeypatch.setattr(session_store, "_write", lambda p, c: (written.append(p.name), complete(p, c)))
    result = analysis(study.connected(None, restarted, 12))
    parts = [name for name in written if name.endswith(".part")]
    assert len(parts) > 3
    np.testing.assert_array_equal(result.params, analysis(study.connected()).params)
    # The same array of one session is not written again, and those that are gone are removed.
    assert len(parts) < len([name for name in written if name == "state"]) * 3


FITS = {
    "masked sums": lambda p: fs.GLORE.from_formula("y ~ x + z", p).fit(masked=True),
    "own fits": lambda p: fs.FederatedOLS.from_formula("x ~ z", p).fit(masked=False),
    "products": lambda p: fs.VFEMRegression.from_formula("w ~ .", p).fit(),
}


@pytest.mark.parametrize("fit", FITS)
def test_sites_that_are_started_again_before_every_message(tmp_path, fit):
    partition = enterprises() if fit == "products" else fs.ClientPartition.from_frame(patients(), by="h")
    expected = FITS[fit](partition)
    places = {name: Place(tmp_path / name, site, Policy()) for name, site in partition.sites.items()}

    class Wires:
        bundles = True

        def send(self, site, request):
            places[site].restart()
            answer = places[site].server.answer(request)
            places[site].restart()
            assert places[site].server.answer(request) == answer  # the same, and computed once
            return answer

    sites = {name: RemoteSite(name, Wires()) for name in places}
    connected = replace(partition, _engine=RemoteEngine(sites))
    found = FITS[fit](connected)
    np.testing.assert_array_equal(found.params, expected.params)
    np.testing.assert_array_equal(found.cov_params(), expected.cov_params())
    assert fs.verify_receipt(found.receipt(), partition.fingerprints).ok


KILLED = {
    "x ~ z": fs.FederatedOLS,
    "y ~ x + z": fs.GLORE,
}


@pytest.mark.parametrize("formula", ["x ~ z", pytest.param("y ~ x + z", marks=pytest.mark.slow)])
def test_a_served_site_is_killed_between_every_two_messages(tmp_path, formula):
    make = partial(KILLED[formula].from_formula, formula)
    frames = {name: frame.drop(columns="h") for name, frame in patients().groupby("h")}
    path = make_federation(tmp_path, frames)
    with served_sites(tmp_path, frames) as running:
        expected = make(fs.ClientPartition.connect(path)).fit()
        partition, killed = fs.ClientPartition.connect(path), itertools.count()
        transport = partition.engine._sites["B"].transport

        class Watched:
            bundles = True

            def send(self, site, request):
                if site == "B":
                    running["B"].kill()
                    running["B"].wait()
                    running["B"] = serve(tmp_path / "B")
                    wait(tmp_path / "B", running["B"])
                    next(killed)
                return transport.send(site, request)

        for name in frames:
            partition.engine._sites[name] = RemoteSite(name, Watched())
        found = make(partition).fit()
    assert next(killed) >= 5
    np.testing.assert_array_equal(found.params, expected.params)
    np.testing.assert_array_equal(found.bse, expected.bse)
    assert fs.verify_receipt(found.receipt(), partition.fingerprints).ok


def test_what_is_written_is_what_comes_back():
    """Objects that are one stay one; parts of arrays lie in the arrays that they are parts of."""
    complete = np.arange(12.0).reshape(3, 4)
    fortran = np.asfortranarray(complete)
    state = {
        "whole": complete,
        "part": complete[1:, ::2],
        "again": complete,
        "fortran": fortran,
        "flags": frozenset({"a", "b"}),
        (1, "key"): [None, True, 2**70, -0.0, float("inf"), b"\x00\xff"],
        "words": np.array(["a", None, 1.5], dtype=object),
    }
    state["itself"] = state
    text, arrays = write_state(state, {})
    assert len(arrays) == 2
    back = read_state(text, [array.copy(order="K") for array in arrays], {})
    assert back["itself"] is back and back["again"] is back["whole"]
    back["whole"][1, 2] = 99.0
    assert back["part"][0, 1] == 99.0 and back["fortran"].flags.f_contiguous
    assert back["flags"] == state["flags"] and list(back["words"]) == ["a", None, 1.5]
    assert repr(back[1, "key"]) == repr(state[1, "key"])


@pytest.mark.parametrize("text", ['"os:system"', '"fedstat.files:os.system"', '"builtins:eval"'])
def test_nothing_but_this_package_is_named(text):
    with pytest.raises((TypeError, AttributeError, ImportError)):
        read_state(f'{{"root": [0], "nodes": [["named", {text}]]}}', [], {})


def test_a_site_that_dies_with_an_answer_gives_it_again(study, tmp_path):
    journal = tmp_path / "journal"
    with pytest.raises(EngineError, match="did not answer"):
        analysis(study.connected(journal, died_with_the_answer, 11))
    np.testing.assert_array_equal(
        analysis(study.connected(journal)).params, analysis(study.connected()).params
    )


def test_a_site_that_is_killed_while_it_computes_is_asked_the_same_again(study, monkeypatch):
    """Nothing of the answer has left, and nothing of it is in the account."""
    place, expected = study.places["B"], analysis(study.connected())

    def computing(study, deliver, request):
        with monkeypatch.context() as patch:
            patch.setattr(place.server.site, "_prepare", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                deliver(request)
        return restarted(study, deliver, request)

    found = analysis(study.connected(None, computing))
    np.testing.assert_array_equal(found.params, expected.params)
    assert fs.verify_receipt(found.receipt(), study.partition.fingerprints).ok


@pytest.mark.parametrize("why", ["another version", "may be read by others", "No module named"])
def test_what_cannot_be_taken_up_ends_the_session_and_not_the_service(study, monkeypatch, why):
    """A service that ended with it would end again at every start, while the question waits."""
    next_one = halfway(study)
    place = study.places["B"]
    (path,) = (path for path in files(place) if path.name == "state")
    if why == "another version":
        monkeypatch.setattr(session_store, "VERSION", "0.0.1")
    elif why == "may be read by others":
        path.chmod(0o644)
    else:  # a class that has moved since
        gone = ModuleNotFoundError("No module named 'fedstat.gone'")
        monkeypatch.setattr(session_store, "read_state", lambda *_: (_ for _ in ()).throw(gone))
    place.restart()
    with pytest.raises(SessionError, match="B: it was started again"):
        unpack_reply(place.server.answer(next_one))
    assert any(why in reason for reason in place.server.site.refusals.reasons)
    assert not path.exists()


def test_a_service_that_runs_for_long_removes_old_sessions_as_well(study):
    halfway(study, 3)
    place = study.places["B"]
    (old,) = (path for path in files(place) if path.name == "state")
    an_age_ago = time.time() - session_store.OLD - 60
    os.utime(old.parent, (an_age_ago, an_age_ago))
    halfway(study, 3)
    assert not old.exists()
    assert len([path for path in files(place) if path.name == "state"]) == 1


def test_no_session_is_kept_where_a_folder_put_back_would_not_be_seen(study, monkeypatch):
    monkeypatch.setattr(session_store, "CHANGES_DETECTED", False)
    place = study.places["B"]
    shutil.rmtree(place.folder / SESSIONS)
    place.restart()
    next_one = halfway(study)
    assert not files(place)
    place.restart()
    with pytest.raises(SessionError, match="B: it was started again"):
        unpack_reply(place.server.answer(next_one))
