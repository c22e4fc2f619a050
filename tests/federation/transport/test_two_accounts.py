"""Coordinator and site as two accounts of one machine, at one exchange folder."""

import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fedstat.errors import EngineError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.site import Site, load_families
from fedstat.federation.files import make_folders, write_atomic, write_shared
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.transport.folder import FolderTransport, serve_folder
from fedstat.federation.transport.mailbox import SiteMailbox

load_families()
SITES, COORDINATORS, GROUP = "nobody", "daemon", 12321
QUESTION = pack_request(Request("North", "schema", "describe_table", {}, "s", "{}", None, 1))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def as_account(name: str, what: Callable[[], object]) -> str:
    """Do something as another account that is in the group, in a process of its own; what it returned."""
    site_ledger, (reader, writer) = pwd.getpwnam(name), os.pipe()
    child = os.fork()
    if not child:
        reported = b"nothing"
        try:
            os.setgroups([GROUP])
            os.setgid(site_ledger.pw_gid)
            os.setuid(site_ledger.pw_uid)
            os.umask(0o077)  # the strictest that an account may have
            reported = str(what()).encode()
        except BaseException as error:
            reported = f"{type(error).__name__}: {error}".encode()
        finally:
            os.write(writer, reported)
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        reported = file.read().decode()
    os.waitpid(child, 0)
    return reported


class Accounts:
    """Actions of either account in the folder; each step in a process of its own."""

    def __init__(self, home: Path) -> None:
        self.exchange = home / "exchange"
        self.part = SiteMailbox(self.exchange / "North")
        self.coordinator, self.site = Identity.generate(), Site("North", pd.DataFrame({"x": range(50)}))
        self.key = self.site.fingerprint  # drawn here, before there are two processes

    def request(self, timeout: float = 0.0) -> str:
        def send() -> str:
            keys = {"North": self.key}
            return unpack_reply(
                FolderTransport(self.exchange, self.coordinator, keys, timeout).send("North", QUESTION)
            ).site

        return as_account(COORDINATORS, send)

    def answer(self) -> str:
        def serve() -> str:
            looks, reported = iter([False, True]), []
            fingerprint = self.coordinator.public.fingerprint
            serve_folder(
                self.site, self.exchange, fingerprint, stop=lambda: next(looks), refused=reported.append
            )
            return "; ".join(reported)

        return as_account(SITES, serve)


@pytest.fixture
def accounts():
    if os.name != "posix" or os.geteuid():
        pytest.skip("takes root to become two other accounts")
    there = {entry.pw_name for entry in pwd.getpwall()}
    if not {SITES, COORDINATORS} <= there:
        pytest.skip(f"takes the accounts {SITES} and {COORDINATORS}")
    home = Path(tempfile.mkdtemp())  # not below a folder of root's alone
    home.chmod(0o711)
    yield Accounts(home)
    shutil.rmtree(home)


def share(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    os.chown(folder, -1, GROUP)
    folder.chmod(0o2770)


def test_both_sides_read_what_the_other_wrote(accounts):
    share(accounts.exchange)
    assert "did not answer" in accounts.request()
    assert accounts.answer() == ""
    assert accounts.request() == "North"
    done = accounts.part.done(next(iter(accounts.part.place.glob("done/*/*.reply"))).stem)
    assert done.stat().st_uid != done.with_suffix(".ask").stat().st_uid
    assert [mode(path) for path in (done, done.with_suffix(".ask"))] == [0o640, 0o640]
    assert all(mode(path) == 0o2770 for path in (accounts.part.requests, accounts.part.replies, done.parent))


def test_a_site_names_the_question_that_it_cannot_read_and_the_remedy(accounts):
    share(accounts.exchange)
    accounts.request()
    (request,) = accounts.part.requests.iterdir()
    request.chmod(0o600)
    reported = accounts.answer()
    assert (
        str(request) in reported
        and "cannot be read" in reported
        and "answer" not in reported.replace(str(request), "")
    )
    assert "chgrp" in reported and "chmod -R g+rws" in reported
    assert "did not answer" in accounts.request()  # written again with the permissions of the folder
    assert accounts.answer() == "" and accounts.request() == "North"


def test_a_coordinator_names_the_answer_that_it_cannot_read_and_the_remedy(accounts):
    share(accounts.exchange)
    accounts.request()
    accounts.answer()
    (reply,) = accounts.part.replies.iterdir()
    reply.chmod(0o600)
    reported = accounts.request(timeout=600)
    assert (
        reported.startswith(EngineError.__name__) and str(reply) in reported and "cannot be read" in reported
    )
    assert "chgrp" in reported and "chmod -R g+rws" in reported
    reply.chmod(0o640)
    assert accounts.request() == "North"


@pytest.mark.parametrize("side", ["request", "answer"])
def test_a_folder_of_one_account_alone_is_named_on_either_side(accounts, side):
    accounts.exchange.mkdir()
    os.chown(accounts.exchange, pwd.getpwnam(SITES if side == "request" else COORDINATORS).pw_uid, GROUP)
    accounts.exchange.chmod(0o700)
    reported = getattr(accounts, side)()
    assert "chgrp" in reported and str(accounts.exchange) in reported


def test_files_are_shared_where_the_folder_is_and_private_everywhere_else(tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        folder.mkdir(mode=0o700)
    shared.chmod(0o2770)
    for folder in (alone, shared):
        make_folders(folder / "a" / "b")
        write_shared(folder / "a" / "b" / "one", b"1")
        write_atomic(folder / "a" / "b" / "two", b"2")
    assert mode(alone / "a" / "b" / "one") == 0o600 and mode(shared / "a" / "b" / "one") == 0o640
    assert mode(shared / "a" / "b") == 0o2770
    assert mode(alone / "a" / "b" / "two") == mode(shared / "a" / "b" / "two") == 0o600
