"""Somebody without a key who can write to the exchange folder: messages can be stopped, and nothing else."""

import json
import os
import shutil
import threading
import time
import tracemalloc

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import EngineError, FedstatWarning, MessageError, SecurityError
from fedstat.federation.crypto.envelopes import SIGNED_MAGIC, Envelope, open_envelope, sign_envelope
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.site import Site, load_families
from fedstat.federation.files import write_atomic
from fedstat.federation.message import Request, pack_request, unpack, unpack_reply
from fedstat.federation.protocols import schema
from fedstat.federation.transport.folder import FolderTransport, serve_folder
from fedstat.federation.transport.mailbox import UNTRUSTED, SiteMailbox, open_note
from fedstat.federation.transport.remote import request_number
from fedstat.federation.transport.signed import note_signed, open_reply, sign_request

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
        file.write(
            SIGNED_MAGIC + Identity.generate().public.signing * 2 + bytes(64) + (9).to_bytes(4, "little")
        )
        file.truncate(LARGE)


def brackets(path):
    path.write_bytes(b"fedstat envelope 1\n" + (4000).to_bytes(4, "little") + b"[" * 4000 + b"0" * 64)


def signed_by_nobody(path):
    keys = COORDINATOR.public.signing + COORDINATOR.public.agreement
    path.write_bytes(SIGNED_MAGIC + keys + bytes(64) + (4000).to_bytes(4, "little") + b"[" * 4000)


class Service:
    """A site that answers from a folder, in a thread of its own, until the test is over."""

    def __init__(self, exchange):
        self.site = Site("North", pd.DataFrame({"x": np.arange(50.0)}))
        self.exchange, self.reported, self.ended = exchange, [], threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self):
        print_of = COORDINATOR.public.fingerprint
        serve_folder(
            self.site,
            self.exchange,
            print_of,
            poll=0.01,
            stop=self.ended.is_set,
            refused=self.reported.append,
        )

    def transport(self, timeout=60.0):
        return FolderTransport(self.exchange, COORDINATOR, {"North": self.site.fingerprint}, timeout, 0.01)

    def request(self, timeout=60.0):
        transport = self.transport(timeout)
        request = pack_request(Request("North", "schema", "describe_table", {}, os.urandom(4).hex(), "{}"))
        return unpack_reply(transport.send("North", request))


def wait_until(what, seconds=60):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("put", [pipe, folder, link, large, large_envelope, brackets, signed_by_nobody])
def test_a_strangers_file_neither_ends_nor_holds_a_service(service, put):
    put(service.exchange / "North" / "asks" / STRANGERS)
    service.thread.start()
    tracemalloc.start()
    assert service.request().site == "North"
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 * 2**20
    assert len(service.reported) == 1 and "hunter2" not in service.reported[0]


def test_a_file_that_changes_all_the_time_is_reported_of_once(service):
    service.thread.start()
    stranger = service.exchange / "North" / "asks" / STRANGERS
    for i in range(20):
        stranger.write_bytes(bytes(i))
        service.request()
    assert len(service.reported) <= 1


@pytest.mark.parametrize("put", [pipe, folder, link, large_envelope, brackets, signed_by_nobody])
def test_a_strangers_answer_is_put_aside_and_the_site_gives_its_own(service, put):
    request = pack_request(Request("North", "schema", "describe_table", {}, "s", "{}", None, 1))
    place = service.exchange / "North" / "replies" / f"{request_number(request)}.reply"
    place.parent.mkdir(parents=True)
    put(place)
    service.thread.start()
    with pytest.warns(FedstatWarning, match="the name of its reply was invalid"):
        answer = service.transport().send("North", request)
    assert unpack_reply(answer).site == "North"
    assert len(list((service.exchange / "North" / "odd").iterdir())) == 1


def test_an_answer_under_another_key_ends_the_wait_by_name(service):
    """It may be the site's: then its owner has another key than the one that was pinned."""
    request, other = (
        pack_request(Request("North", "schema", "describe_table", {}, "s", "{}", None, 1)),
        Identity.generate(),
    )
    number = request_number(request)
    place = service.exchange / "North" / "replies" / f"{number}.reply"
    place.parent.mkdir(parents=True)
    place.write_bytes(sign_envelope(other, Envelope("North", "coordinator", number, b"")))
    service.thread.start()
    with pytest.raises(SecurityError) as reported:
        service.transport().send("North", request)
    for key in (other.public.fingerprint, service.site.fingerprint):
        assert key in str(reported.value)
    assert unpack_reply(service.transport().send("North", request)).site == "North"


def test_an_answer_that_was_altered_is_given_again_and_the_analysis_goes_on(service):
    """An obstacle in the folder blocks the analysis once, not until somebody deletes it by hand."""
    transport = service.transport(timeout=0.3)
    request = pack_request(Request("North", "schema", "describe_table", {}, "s", "{}", None, 1))
    with pytest.raises(EngineError, match="did not answer"):
        transport.send("North", request)
    service.thread.start()
    place = service.exchange / "North" / "replies" / f"{request_number(request)}.reply"
    wait_until(place.exists)
    content = place.read_bytes()
    place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    transport.timeout = 60.0
    with pytest.warns(FedstatWarning, match="altered on its way"):
        answer = transport.send("North", request)
    assert open_reply(content, service.site.fingerprint, "North", request_number(request), "") == answer
    assert [chain.round for chain in service.site.site_ledger.chains] == [1]


def test_a_pair_that_was_read_is_found_by_everybody_who_sends_again(service):
    service.thread.start()
    request = pack_request(Request("North", "schema", "describe_table", {}, "s", "{}", None, 1))
    first = service.transport().send("North", request)
    service.ended.set()
    service.thread.join(60)
    part = SiteMailbox(service.exchange / "North")
    assert part.open_numbers() == ([], []) and part.done(request_number(request)).exists()
    assert service.transport(timeout=0.0).send("North", request) == first


def test_a_question_that_is_put_back_is_not_answered_again(service):
    service.thread.start()
    requests = [
        pack_request(Request("North", "schema", "describe_table", {}, "s", "{}", None, turn))
        for turn in (1, 2)
    ]
    for request in requests:
        service.transport().send("North", request)
    part, number = SiteMailbox(service.exchange / "North"), request_number(requests[0])
    kept = part.done(number).read_bytes()
    shutil.copy(part.done(number).with_suffix(".ask"), part.request(number))
    wait_until(part.reply(number).exists)
    with part.reply(number).open("rb") as file:
        refusal = open_reply(file, service.site.fingerprint, "North", number, "")
    with pytest.raises(SecurityError, match="is refused"):
        unpack_reply(refusal)
    part.settle(number)  # the first message stays in the folder
    assert kept in [path.read_bytes() for path in part.done(number).parent.glob(f"{number}.reply*")]


class Stranger:
    """A coordinator that North has not pinned."""

    def __init__(self, service):
        self.identity = Identity.generate()
        prints = {"North": service.site.fingerprint}
        self.transport = FolderTransport(service.exchange, self.identity, prints, 60.0, 0.01)
        self.request = pack_request(
            Request("North", "schema", "describe_table", {}, os.urandom(4).hex(), "{}")
        )
        self.note = SiteMailbox(service.exchange / "North").note(request_number(self.request))


def test_a_coordinator_that_is_not_trusted_is_reported_at_once(service):
    service.thread.start()
    stranger = Stranger(service)
    begun = time.monotonic()
    with pytest.raises(EngineError, match="fedstat site pin") as reported:
        stranger.transport.send("North", stranger.request)
    assert time.monotonic() - begun < 50
    for key in (stranger.identity.public.fingerprint, service.site.fingerprint):
        assert key in str(reported.value)
    # The note is not an answer. It contains only the key of the sender.
    content = stranger.note.read_bytes()
    assert COORDINATOR.public.fingerprint.encode() not in content
    with pytest.raises(SecurityError):
        open_reply(content, service.site.fingerprint, "North", request_number(stranger.request), "")


def test_a_note_that_the_site_did_not_sign_or_signed_once_is_not_believed(service):
    service.thread.start()
    stranger = Stranger(service)
    with pytest.raises(EngineError, match="fedstat site pin"):
        stranger.transport.send("North", stranger.request)
    old = stranger.note.read_bytes()
    service.ended.set()
    service.thread.join(60)
    # put back when the owner has pinned the coordinator: it is on another question of that number
    stranger.note.write_bytes(old)
    time.sleep(1.1)  # an envelope bears its time to the second
    stranger.transport.timeout = 0.2
    with pytest.raises(EngineError, match="did not answer"):
        stranger.transport.send("North", stranger.request)
    altered = old.replace(b"untrusted", b"closedbut")
    stranger.note.write_bytes(altered)
    with (
        pytest.warns(FedstatWarning, match="was invalid"),
        pytest.raises(EngineError, match="did not answer"),
    ):
        stranger.transport.send("North", stranger.request)


def test_a_note_on_what_another_key_signed_is_not_taken_for_one_on_the_own_question(service):
    """Attack: a stranger signs a copied request, so that the site's note refuses its real coordinator."""
    request = pack_request(Request("North", "schema", "describe_table", {}, os.urandom(4).hex(), "{}"))
    number, question = sign_request(COORDINATOR, "North", request)
    copied = sign_envelope(Identity.generate(), open_envelope(question, COORDINATOR.public.fingerprint, ""))
    note = note_signed(service.site, copied, COORDINATOR.public.fingerprint, "", number, UNTRUSTED)
    where = (note, service.site.fingerprint, "North", number)
    assert open_note(*where, copied, "").why == UNTRUSTED
    assert open_note(*where, question, "") is None


def test_strangers_do_not_fill_the_folder_with_notes(service):
    requests = service.exchange / "North" / "asks"
    for i in range(150):
        number = f"{i:032x}"
        question = sign_envelope(Identity.generate(), Envelope("coordinator", "North", number, b"?"))
        (requests / f"{number}.ask").write_bytes(question)
    service.thread.start()
    for _ in range(45):
        service.request()
    assert 0 < len(list((service.exchange / "North" / "replies").glob("*.note"))) <= 100


def test_nothing_is_written_through_a_link(service, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (service.exchange / "North" / "replies").symlink_to(elsewhere)
    service.thread.start()
    with pytest.raises((EngineError, SecurityError)):
        service.request(timeout=1.0)
    wait_until(lambda: any("link" in line for line in service.reported))
    assert not list(elsewhere.iterdir())


def test_a_link_at_the_name_of_a_file_is_replaced(tmp_path):
    precious = tmp_path / "identity.json"
    precious.write_text("precious")
    (tmp_path / "abc.reply").symlink_to(precious)
    write_atomic(tmp_path / "abc.reply", b"a signed reply")
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
