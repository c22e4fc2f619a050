"""Somebody without a key who can write to the exchange folder: messages can be stopped, and nothing else."""

import json
import os
import threading
import tracemalloc

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import EngineError, MessageError, SecurityError
from fedstat.federation.carry.folder import FolderCarrier, serve_folder
from fedstat.federation.carry.remote import number_of
from fedstat.federation.crypto.envelopes import MAGIC
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.door.families import load_families
from fedstat.federation.door.site import Site
from fedstat.federation.files import write_whole
from fedstat.federation.message import Ask, pack_ask, unpack, unpack_reply
from fedstat.federation.rounds import schema

load_families()
COORDINATOR = Identity.generate()
STRANGERS = "0" * 32 + ".ask"
LARGE = 200 * 2**20


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def link(path):
    secret = path.parents[3] / "secret.txt"
    secret.write_text("password=hunter2\n")
    path.symlink_to(secret)


def large(path):
    with path.open("wb") as file:
        file.truncate(LARGE)


def large_envelope(path):
    with path.open("wb") as file:
        file.write(MAGIC + Identity.generate().public.signing * 2 + bytes(64) + (9).to_bytes(4, "little"))
        file.truncate(LARGE)


def brackets(path):
    path.write_bytes(b"fedstat envelope 1\n" + (4000).to_bytes(4, "little") + b"[" * 4000 + b"0" * 64)


def signed_by_nobody(path):
    keys = COORDINATOR.public.signing + COORDINATOR.public.agreement
    path.write_bytes(MAGIC + keys + bytes(64) + (4000).to_bytes(4, "little") + b"[" * 4000)


class Service:
    """A site that answers from a folder, in a thread of its own, until the test is over."""

    def __init__(self, exchange):
        self.site = Site("North", pd.DataFrame({"x": np.arange(50.0)}))
        self.exchange, self.told, self.ended = exchange, [], threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self):
        print_of = COORDINATOR.public.fingerprint
        serve_folder(
            self.site, self.exchange, print_of, poll=0.01, stop=self.ended.is_set, refused=self.told.append
        )

    def ask(self, timeout=60.0):
        carrier = FolderCarrier(self.exchange, COORDINATOR, {"North": self.site.fingerprint}, timeout, 0.01)
        request = pack_ask(Ask("North", "schema", "describe_table", {}, os.urandom(4).hex(), "{}"))
        return unpack_reply(carrier.carry("North", request))


@pytest.fixture
def service(tmp_path):
    running = Service(tmp_path / "exchange")
    (running.exchange / "North" / "asks").mkdir(parents=True)
    yield running
    running.ended.set()
    running.thread.join(60)
    assert not running.thread.is_alive()


@pytest.mark.parametrize("put", [pipe, folder, link, large, large_envelope, brackets, signed_by_nobody])
def test_a_strangers_file_neither_ends_nor_holds_a_service(service, put):
    put(service.exchange / "North" / "asks" / STRANGERS)
    service.thread.start()
    tracemalloc.start()
    assert service.ask().site == "North"
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 * 2**20
    assert len(service.told) == 1 and "hunter2" not in service.told[0]


def test_a_file_that_changes_all_the_time_is_told_of_once(service):
    service.thread.start()
    stranger = service.exchange / "North" / "asks" / STRANGERS
    for i in range(20):
        stranger.write_bytes(bytes(i))
        service.ask()
    assert len(service.told) <= 1


@pytest.mark.parametrize("put", [pipe, folder, link, large_envelope, brackets, signed_by_nobody])
def test_a_strangers_answer_ends_an_analysis_by_name(tmp_path, put):
    request = pack_ask(Ask("North", "schema", "describe_table", {}, "s", "{}"))
    replies = tmp_path / "exchange" / "North" / "replies"
    replies.mkdir(parents=True)
    put(replies / f"{number_of(request)}.reply")
    prints = {"North": Identity.generate().public.fingerprint}
    with pytest.raises(SecurityError):
        FolderCarrier(tmp_path / "exchange", COORDINATOR, prints, 1.0, 0.01).carry("North", request)


def test_nothing_is_written_through_a_link(service, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (service.exchange / "North" / "replies").symlink_to(elsewhere)
    service.thread.start()
    with pytest.raises((EngineError, SecurityError)):
        service.ask(timeout=1.0)
    assert not list(elsewhere.iterdir()) and any("link" in line for line in service.told)


def test_a_link_at_the_name_of_a_file_is_replaced(tmp_path):
    precious = tmp_path / "identity.json"
    precious.write_text("precious")
    (tmp_path / "abc.reply").symlink_to(precious)
    write_whole(tmp_path / "abc.reply", b"a signed reply")
    assert precious.read_text() == "precious"
    assert (tmp_path / "abc.reply").read_bytes() == b"a signed reply"


def test_a_message_of_brackets_is_none():
    header = b'{"__metadata__":{"fedstat":"' + b"[" * 50_000 + b'"}}'
    with pytest.raises(MessageError):
        unpack(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("policy", ["families = " + "[" * 100_000, "min_count = " + "9" * 5000])
def test_a_sites_policy_cannot_end_the_coordinator(policy):
    described = {"columns": {}, "n_rows": 9, "site_column": "", "policy": policy, "link": None}
    with pytest.raises(MessageError, match="North"):
        schema._read("North", json.dumps(described))
