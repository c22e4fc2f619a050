"""A bucket of an object store as transport: results, records, and what somebody with write access can do."""

import secrets
import threading
import time
import warnings

import numpy as np
import pytest
from operating import make_federation, serve_by_command, wait
from serving import connected

import fedstat as fs
from fedstat.errors import EngineError, FedstatWarning, PartitionError, SecurityError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.transport.bucket import (
    TIME_DIGITS,
    Bucket,
    BucketInbox,
    BucketTransport,
    Cursor,
    open_bucket,
)
from fedstat.federation.transport.remote import SiteServer, request_number
from fedstat.federation.transport.signed import PinnedSite, sign_request
from fedstat.operator.command_line import main

moto = pytest.importorskip("moto.server", reason="needs moto[s3,server]")
pytest.importorskip("boto3")
ResponseStreamingError = pytest.importorskip("botocore.exceptions").ResponseStreamingError
COLUMNS = ["age", "thalach", "num"]
FORMULA = "num > 0 ~ age + thalach"
QUESTION = pack_request(Request("North", "schema", "describe_table", {}, "session"))


@pytest.fixture
def address(monkeypatch):
    """A store on this machine with one bucket, found as boto3 finds one."""
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "here",
        "AWS_SECRET_ACCESS_KEY": "here",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    address = f"s3://messages/{secrets.token_hex(4)}"  # what the server holds outlives it in this process
    open_bucket(address).client.create_bucket(Bucket="messages")
    yield address
    server.stop()


class Service:
    """North, which answers in a thread from what is in the bucket."""

    def __init__(self, address, site, coordinator):
        self.part, self.reported = open_bucket(address).at(site.name), []
        self.inbox = BucketInbox(self.part, self.reported.append)
        self.pinned = PinnedSite(SiteServer(site), coordinator)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.ended.wait(0.01):
            self.inbox.poll(self.pinned)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.thread.join()


@pytest.fixture
def parts(address):
    patients = fs.datasets.make_hospitals().dropna(subset=COLUMNS)
    partition = fs.ClientPartition.from_frames({"North": patients[COLUMNS]}, layout="horizontal")
    coordinator = Identity.generate()
    site = partition.sites["North"]
    bucket = open_bucket(address)
    transport = BucketTransport(bucket, coordinator, {"North": site.fingerprint}, 60.0, 0.01)
    return partition, site, coordinator, transport


def keys_of(bucket: Bucket):
    return list(bucket.list_after(bucket.prefix, ""))


def test_a_fit_through_a_bucket_is_that_of_one_process(address):
    patients = fs.datasets.make_hospitals().dropna(subset=COLUMNS)
    partition = fs.ClientPartition.from_frame(patients, by="hospital")
    coordinator = Identity.generate()
    prints = {name: site.fingerprint for name, site in partition.sites.items()}
    transport = BucketTransport(open_bucket(address), coordinator, prints, 60.0, 0.01)
    services = [Service(address, s, coordinator.public.fingerprint) for s in partition.sites.values()]
    local = fs.GLORE.from_formula(FORMULA, partition).fit()
    for service in services:
        service.__enter__()
    try:
        fit = fs.GLORE.from_formula(FORMULA, connected(partition, transport)).fit()
    finally:
        for service in services:
            service.__exit__()
    assert np.array_equal(fit.params, local.params) and np.array_equal(fit.bse, local.bse)
    # the record of what passed: every question and its answer, and nothing else
    keys = keys_of(transport.bucket)
    request = [key for key in keys if "/asks/" in key]
    assert len(request) == len([key for key in keys if "/replies/" in key]) == len(keys) / 2


def test_sites_are_served_through_a_bucket_by_their_commands(address, tmp_path, capsys):
    patients = fs.datasets.make_hospitals().dropna(subset=COLUMNS)
    frames = {name: patients.loc[patients["hospital"] == name, COLUMNS] for name in ("Cleveland", "Hungary")}
    study = make_federation(tmp_path, frames, exchange=address)
    running = {name: serve_by_command(tmp_path / name) for name in frames}
    try:
        for name, process in running.items():
            wait(tmp_path / name, process)
        assert main(["federation", "test", str(study)]) == 0
        fit = fs.GLORE.from_formula(FORMULA, fs.ClientPartition.connect(study)).fit()
        assert main(["site", "status", str(tmp_path / "Hungary")]) == 0
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    local = fs.GLORE.from_formula(FORMULA, fs.ClientPartition.from_frames(frames, layout="horizontal")).fit()
    assert np.array_equal(fit.params, local.params)
    main(["site", "check", str(tmp_path / "Hungary")])
    assert "the bucket for requests" not in capsys.readouterr().out


def test_a_site_that_was_off_finds_what_was_asked_meanwhile(parts, address):
    _, site, coordinator, transport = parts
    answers = []
    requester = threading.Thread(target=lambda: answers.append(transport.send("North", QUESTION)))
    requester.start()
    while not keys_of(transport.bucket):
        time.sleep(0.01)
    with Service(address, site, coordinator.public.fingerprint):
        requester.join()
    assert unpack_reply(answers[0]).site == "North"


def test_a_request_without_a_free_session_waits_says_so_and_is_answered_later(parts, address):
    _, site, coordinator, transport = parts
    site.max_sessions, site.states["fit"] = 1, State("North")
    site.states["fit"].keep("model", 0)
    begins = pack_request(Request("North", "design", "survey_rows", {}, "mine", "{}", turn=1))
    answers, said = [], []

    def request():
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            answers.append(transport.send("North", begins))
        said.extend(str(one.message) for one in raised)

    requester = threading.Thread(target=request)
    requester.start()
    with Service(address, site, coordinator.public.fingerprint):
        while not any("/notes/" in key for key in keys_of(transport.bucket)):
            time.sleep(0.01)
        # others are answered meanwhile
        assert unpack_reply(transport.send("North", QUESTION)).site == "North" and not answers
        site.states["fit"].run_ended = True
        requester.join()
    assert len(answers) == 1 and "mine" in {chain.session for chain in site.site_ledger.chains}
    assert all("waits for its turn" in text for text in said)


def test_a_site_that_starts_asks_for_no_single_answer_of_the_past(parts, address, monkeypatch):
    """It would take minutes after a year."""
    _, site, coordinator, transport = parts
    with Service(address, site, coordinator.public.fingerprint):
        for session in "abc":
            transport.send("North", pack_request(Request("North", "schema", "describe_table", {}, session)))
    asked_for, has = [], Bucket.has
    monkeypatch.setattr(Bucket, "has", lambda self, key: asked_for.append(key) or has(self, key))
    service = Service(address, site, coordinator.public.fingerprint)
    assert not service.inbox.poll(service.pinned) and not asked_for
    transport.bucket.put(transport.bucket.at("North").new_request("f" * 32), b"")
    assert not service.inbox.poll(service.pinned) and len(asked_for) == 1


def test_what_lies_in_the_place_of_an_answer_is_put_aside_and_answered_again(parts, address):
    _, site, coordinator, transport = parts
    part, number = transport.bucket.at("North"), request_number(QUESTION)
    transport.bucket.put(part.reply(number), b"none" * 10)
    with Service(address, site, coordinator.public.fingerprint):
        with pytest.warns(FedstatWarning, match="moved away"):
            answer = transport.send("North", QUESTION)
        assert unpack_reply(answer).site == "North"
        assert any("/odd/" in key for key in keys_of(transport.bucket))
        # altered after it was read: asked again, the site puts the answer that it holds
        transport.bucket.put(part.reply(number), b"altered")
        with pytest.warns(FedstatWarning, match="moved away"):
            assert transport.send("North", QUESTION) == answer


def test_a_stranger_is_not_answered_and_reported_why(parts, address):
    _, site, coordinator, transport = parts
    stranger = BucketTransport(transport.bucket, Identity.generate(), transport.fingerprints, 60.0, 0.01)
    with Service(address, site, coordinator.public.fingerprint) as service:
        with pytest.raises(EngineError, match="refuses requests that are signed with the key of this"):
            stranger.send("North", QUESTION)
        assert unpack_reply(transport.send("North", QUESTION)).site == "North"
    assert len(service.reported) == 1 and "stranger" not in service.reported[0]


def test_an_answer_under_another_key_is_not_believed(parts, address):
    _, site, coordinator, transport = parts
    wrong = BucketTransport(
        transport.bucket, coordinator, {"North": Identity.generate().public.fingerprint}, 0.5, 0.01
    )
    with (
        Service(address, site, coordinator.public.fingerprint),
        pytest.warns(FedstatWarning),
        pytest.raises((EngineError, SecurityError)),
    ):
        wrong.send("North", QUESTION)


def test_a_giant_object_costs_its_first_kilobytes(parts, address):
    _, site, coordinator, transport = parts
    read = []

    class Counted:
        def __init__(self, body):
            self.body = body

        def read(self, size=-1):
            found = self.body.read(size)
            read.append(len(found))
            return found

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.body.close()

    part = transport.bucket.at("North")
    transport.bucket.put(part.new_request("0" * 32), b"[" * 5_000_000)
    service = Service(address, site, coordinator.public.fingerprint)
    opened = Bucket.open
    Bucket.open = lambda self, key: Counted(opened(self, key))
    try:
        assert not service.inbox.poll(service.pinned)
    finally:
        Bucket.open = opened
    assert 0 < sum(read) < 10_000 and len(service.reported) == 1


def test_a_connection_that_breaks_while_a_message_is_read_ends_nothing(parts, address, monkeypatch):
    """Question and answer come through a stream that breaks once each: both are read at the next look."""
    _, site, coordinator, transport = parts
    broken, opened = set(), Bucket.open

    class Broken:
        def read(self, size=-1):
            raise ResponseStreamingError(error="reset")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def open_once_broken(self, key):
        found = opened(self, key)
        if found is None or key in broken:
            return found
        broken.add(key)
        return Broken()

    monkeypatch.setattr(Bucket, "open", open_once_broken)
    with (
        Service(address, site, coordinator.public.fingerprint) as service,
        pytest.warns(FedstatWarning, match="cannot be reached"),
    ):
        assert unpack_reply(transport.send("North", QUESTION)).site == "North"
    assert len(broken) == 2 and "cannot be reached" in service.reported[0]


def test_a_key_of_the_future_does_not_hide_what_is_asked_after_it(parts, address):
    """Attack: a copy of a signed question under a key of a far time, which a cursor would go beyond."""
    _, site, coordinator, transport = parts
    part = transport.bucket.at("North")
    number, question = sign_request(coordinator, "North", QUESTION)
    transport.bucket.put(f"{part.requests}{'9' * TIME_DIGITS}-{number}", question)
    other = pack_request(Request("North", "schema", "describe_table", {}, "another"))
    with Service(address, site, coordinator.public.fingerprint):
        assert unpack_reply(transport.send("North", other)).site == "North"


def test_what_has_passed_is_not_listed_again(parts):
    _, _, _, transport = parts
    part, now = transport.bucket.at("North"), time.time_ns()

    def request(hours_ago, number):
        transport.bucket.put(
            f"{part.requests}{now - int(hours_ago * 3600e9):0{TIME_DIGITS}d}-{number:032x}", b""
        )

    for hour in range(1, 9):
        request(hour, hour)
    cursor = Cursor(part)
    found = cursor.new()
    for key, _ in found:
        cursor.pass_on(key)
    listed = list(part.bucket.list_after(part.requests, cursor._last))
    assert len(found) == 8 and len(listed) == 1 and cursor.new() == []
    # one that shows late, within the time that is allowed for, is found; an older one would not be
    request(1.1, 99)
    request(4.5, 100)
    assert [number for _, number in cursor.new()] == [f"{99:032x}"]


@pytest.mark.parametrize("address", ["s3://", "s3://B/x", "s3://bucket/a b", "s3://bucket/../x y"])
def test_an_address_that_is_none_is_named(address):
    with pytest.raises(PartitionError, match="expected s3://BUCKET/PREFIX"):
        open_bucket(address)


def test_a_store_out_of_reach_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-store")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(EngineError, match="cannot be reached") as error:
        open_bucket("s3://messages/x").has("a")
    assert "secret-of-the-store" not in str(error.value)
