"""Malformed files and messages for all in the package that reads what somebody else may have written.

A target is a function that takes a generator of random numbers, makes one input from a valid one, and hands
it to the reader. A reader may understand it, or raise an error of the package; all else is a crash.
"""

from __future__ import annotations

import json
import resource
import signal
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from shutil import copytree

import numpy as np
import pandas as pd
from statsmodels.genmod.families import Binomial

import fedstat as fs
from fedstat.codec import from_json, to_json
from fedstat.errors import ConsentError, FedstatError
from fedstat.federation.audit.checkpoints import SignedCheckpoint
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.audit.receipt import Receipt
from fedstat.federation.crypto.envelopes import Envelope, open_envelope, sign_envelope
from fedstat.federation.crypto.keys import Identity, PublicIdentity
from fedstat.federation.disclosure.approval import describe_plan, read_plan
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Reply, Request, pack_reply, pack_request, unpack_reply, unpack_request
from fedstat.federation.partition.federation_file import read_federation
from fedstat.federation.protocols.linkage import PersistentAlignment, load_alignment
from fedstat.federation.protocols.schema import TableSchemaText
from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.tables.published import read_published
from fedstat.federation.transport.folder import serve_folder
from fedstat.federation.transport.journal import HEADS, Journal, LedgerCheckpoints
from fedstat.federation.transport.site_folder import load_identity, open_records, open_site, read_description
from fedstat.operator.cards import read_card
from fedstat.operator.command_line import main

SLOW, PATIENCE, MEMORY = 1.0, 30.0, 200 * 2**20
"""Processor seconds of one input, seconds until one is given up, and bytes above those at rest."""
TOKENS = [
    *(b"[", b"[" * 3000, b"{" * 3000, b'"', b"]", b"}", b"\\", b"\0", b"\xff\xfe", b"\xed\xa0\x80"),
    *(b"nan", b"inf", b"-inf", b"1e999", b"-1", b"0", b"9" * 40, b"9" * 5000, b"null", b"true", b"\n"),
    *(b"=", b"[[", b"''", b"\x1a", "\u202e\U0001d54f".encode(), b"'" * 3, b"2026-13-45T99:99:99Z"),
    b"0x" + b"f" * 400,
]
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**40,
    1.5,
    -0.0,
    1e308,
    "",
    "\0",
    "x" * 3000,
    [],
    {},
    [[]],
]
VALUES += [
    "\ud800",
    ["a"],
    {"a": 1},
    json.loads("[" * 60 + "]" * 60),
    "[" * 9000,
    "../../etc/passwd",
    "\u202e",
]
NUMBERS = [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 2.0**53, 1e18]
WHOLE = [0, 1, -1, 2, 63, 2**31, 2**53, 2**62, -(2**63), 2**63 - 1, 10**9, 10**12]
Random = np.random.Generator
HALF = "half a character"


def pick(rng: Random, choices):
    return choices[int(rng.integers(len(choices)))]


def mangled(rng: Random, data: bytes, times: int | None = None) -> bytes:
    """Bytes with a few faults."""
    for _ in range(times or int(rng.integers(1, 4))):
        place, length = (int(rng.integers(len(data) + 1)), int(rng.integers(1, 40)))
        match int(rng.integers(7)):
            case 0 if data:
                place %= len(data)
                data = data[:place] + bytes([data[place] ^ (1 << int(rng.integers(8)))]) + data[place + 1 :]
            case 1:
                data = data[:place]
            case 2:
                data = data[:place] + rng.bytes(length) + data[place:]
            case 3:
                data = data[:place] + data[place : place + length] * int(rng.integers(2, 9)) + data[place:]
            case 4:
                data = data[:place] + data[place + length :]
            case _:
                data = data[:place] + pick(rng, TOKENS) + data[place + int(rng.integers(12)) :]
    return data


def mangled_json(rng: Random, plain):
    """Plain values with one fault somewhere inside."""
    if isinstance(plain, dict) and plain and rng.random() < 0.9:
        name = pick(rng, list(plain))
        match int(rng.integers(8)):
            case 0:
                return {key: value for key, value in plain.items() if key != name}
            case 1:
                return plain | {pick(rng, ["", "x", "\0", "format", name + " "]): pick(rng, VALUES)}
            case _:
                return plain | {name: mangled_json(rng, plain[name])}
    if isinstance(plain, list) and plain and rng.random() < 0.8:
        place = int(rng.integers(len(plain)))
        match int(rng.integers(6)):
            case 0:
                return plain[:place] + plain[place + 1 :]
            case 1:
                return plain + [pick(rng, plain)] * int(rng.integers(1, 50))
            case _:
                return [*plain[:place], mangled_json(rng, plain[place]), *plain[place + 1 :]]
    return pick(rng, VALUES)


def text_of(rng: Random, valid: bytes) -> bytes:
    """A JSON text with a fault in its values, or in its letters."""
    if rng.random() < 0.3:
        return mangled(rng, valid)
    return json.dumps(mangled_json(rng, json.loads(valid))).encode()


def mangled_array(rng: Random, array):
    """An array of another type, shape or content."""
    match int(rng.integers(7)):
        case 0:
            return array.astype(pick(rng, ["float64", "int64", "bool", "uint8"]), copy=True)
        case 1:
            return array.reshape(-1)[: int(rng.integers(array.size + 1))]
        case 2:
            return np.zeros(
                pick(rng, [(0,), (), (1, 1), (0, 3), (2, 0), (1, 1, 1), (5,), (300, 2)]), array.dtype
            )
        case 3:
            return np.resize(array, tuple(np.array(array.shape) + pick(rng, [1, 2])))
        case 4 if array.dtype == np.float64:
            return array * pick(rng, [0.0, -1.0, 1e-300, 1e300, 1e9])
    values = NUMBERS if array.dtype == np.float64 else WHOLE
    out = array.copy().reshape(-1)
    if out.size:
        places = rng.integers(out.size, size=int(rng.integers(1, 1 + min(out.size, 4))))
        with np.errstate(all="ignore"):
            out[places] = np.array([pick(rng, values) for _ in places]).astype(array.dtype)
    return out.reshape(array.shape)


def halved(packed: bytes) -> bytes:
    length = int.from_bytes(packed[:8], "little")
    header = packed[8 : 8 + length].replace(HALF.encode(), b"\\\\ud800")
    return len(header).to_bytes(8, "little") + header + packed[8 + length :]


def mangled_ask(rng: Random, request: Request) -> bytes:
    """A question with a fault: in its address, its text, an array, or its bytes."""
    content = {
        name: getattr(request, name)
        for name in ("site", "family", "step", "session", "text", "masked", "turn")
    }
    arrays = dict(request.arrays)
    match int(rng.integers(9)):
        case 0:
            content[pick(rng, ["site", "family", "step", "session"])] = pick(
                rng, ["", "glm", "secure", "x" * 500, "\0"]
            )
        case 1 | 2 if request.text:
            content["text"] = text_of(rng, request.text.encode()).decode("utf-8", "replace")
        case 3:
            content[pick(rng, ["masked", "turn"])] = pick(rng, [0, 1, 2**31, 10**18])
        case 4 if arrays:
            arrays.pop(pick(rng, list(arrays)))
        case 5:
            arrays[pick(rng, ["x", "beta", "text", ""])] = np.zeros(3)
        case 6:
            return mangled(rng, pack_request(request))
        case _ if arrays:
            name = pick(rng, list(arrays))
            arrays[name] = mangled_array(rng, arrays[name])
    if rng.random() < 0.05:  # half a character, which JSON can write and UTF-8 cannot
        content[pick(rng, ["site", "family", "step", "session", "text"])] = HALF
    packed = pack_request(Request(arrays=arrays, **content))
    packed = halved(packed)
    if rng.random() < 0.1:  # a shape that claims more than there is
        return packed.replace(
            b'"shape":[', b'"shape":[' + pick(rng, [b"1000000000000,", b"9999999999,", b"-1,"]), 1
        )
    return packed


@dataclass
class Tally:
    """Results by target: inputs understood and refused, the slowest input, and memory above the start."""

    understood: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    memory: int = 0

    @property
    def inputs(self) -> int:
        return self.understood.total() + self.refused.total() + len(self.crashes)

    def counts(self) -> list[tuple[str, int]]:
        return [*self.understood.items(), *self.refused.items()]

    def __str__(self) -> str:
        by = ", ".join(f"{name} {self.refused[name]}/{self.understood[name] + self.refused[name]}" for name in
                       sorted(self.understood | self.refused))  # fmt: skip
        seconds, name = self.slowest
        return (
            f"{self.inputs} inputs, {len(self.crashes)} crashes; slowest {seconds:.2f} s ({name}); "
            f"{self.memory / 2**20:.0f} MB above rest; refused of all: {by}"
        )


class Hang(BaseException):
    """An input took longer than anybody waits."""


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(targets: dict[str, Callable[[Random], object]], inputs: int, seed: int) -> Tally:
    """Give `count` inputs to the targets in turn; requests in the middle of a fit come in hundreds."""

    def give_up(*_):
        raise Hang

    def one(name: str, target: Callable[[], object]) -> None:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        began = time.process_time()
        try:
            target()
            tally.understood[name] += 1
        except FedstatError:
            tally.refused[name] += 1
        except (Exception, Hang) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            tally.crashes.append(f"{name}: {type(error).__name__} at {where}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        tally.slowest = max(tally.slowest, (time.process_time() - began, name))

    signal.signal(signal.SIGALRM, give_up)
    tally, rng, names, rest = Tally(), np.random.default_rng(seed), list(targets), peak()
    for number in count():
        name = names[number % len(names)]
        if targets[name] is questions:
            # A fifth of all inputs, and more if the caller names few targets.
            if (
                5 * sum(c for n, c in tally.counts() if n.startswith("questions")) < tally.inputs
                or number < 2
            ):
                questions(rng, one)
        else:
            one(name, partial(targets[name], rng))
        if tally.inputs >= inputs:
            break
    tally.memory = peak() - rest
    return tally


# ---- what is read, and from whom ------------------------------------------------------------------------


def records() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(5)
    n = 60
    x, c = rng.normal(size=(n, 2)), rng.integers(0, 3, size=n)
    y = x[:, 0] - 0.5 * x[:, 1] + rng.normal(size=n)
    key = np.arange(n)
    return {
        "North": pd.DataFrame({"id": key, "y": y, "a": x[:, 0]}),
        "South": pd.DataFrame({"id": key, "b": x[:, 1], "c": np.array(list("uvw"))[c]}),
        "West": pd.DataFrame({"id": key, "d": rng.normal(size=n), "e": rng.normal(size=n)}),
    }


FITS = (
    lambda p: fs.VFEMRegression.from_formula("y ~ a + b + C(c) + d", p).fit(),
    lambda p: fs.VFEMRegression.from_formula("y ~ a + b + d", p, between="independent").fit(
        exchange="iterative"
    ),
    lambda p: fs.VFEMGLM.from_formula("e > 0 ~ a + b + y", p, family=Binomial()).fit(),
    lambda p: fs.VerticalGLM.from_formula("y ~ a + b + d + e", p).fit(),
    lambda p: fs.VerticalGLM.from_formula("y > 0 ~ a + b + d", p, family=Binomial()).fit(),
    lambda p: fs.GLORE.from_formula("y > 0 ~ a + C(c)", p).fit(masked=True),
    lambda p: fs.FederatedGLM.from_formula("y ~ a + C(c)", p).fit(),
    lambda p: fs.FedAvg.from_formula("y > 0 ~ a", p).fit(rounds=3, seed=1, batch_size=None),
)
"""Fits in whose midst questions with faults are asked; the last three are over rows."""


def partition(over_rows: bool, **rules) -> fs.ClientPartition:
    frames, given = records(), {"shared_seed": 1, "policy": Policy(**rules)}
    if not over_rows:
        return fs.ClientPartition.from_frames(frames, on="id", **given)
    north = frames["North"].assign(c=frames["South"]["c"]).drop(columns="id")
    rows = pd.concat([north.assign(h=h, y=north["y"] + i / 9) for i, h in enumerate("pqr")])
    return fs.ClientPartition.from_frame(rows, by="h", **given)


def consented(sites: fs.ClientPartition, number: int) -> None:
    """A fit that the owners consent to, where they are asked."""
    with suppress(ConsentError):
        FITS[number](sites)
        return
    for site in sites.sites.values():
        for digest in list(site.pending):
            site.approve(digest)
    FITS[number](sites)


def questions(rng: Random, one: Callable[[str, Callable[[], object]], None]) -> None:
    """A real fit, before each of whose questions the site is asked a few that have a fault.

    Some are understood, and the fit goes on from there or fails, by itself: only they are looked at.
    """
    number, passed = int(rng.integers(len(FITS))), 0
    sites = partition(number >= 5, approval=pick(rng, ["auto", "owner"]))
    most, rate = int(rng.integers(400, 700)), rng.random()

    def wrapped(answer):
        def answered(request: bytes, *given, **named) -> bytes:
            nonlocal passed
            while passed < most and rng.random() < rate:
                passed += 1
                faulty = mangled_ask(rng, unpack_request(request))
                one(f"questions of fit {number + 1}", partial(answer, faulty))
            return answer(request, *given, **named)

        return answered

    for site in sites.sites.values():
        site.answer = wrapped(site.answer)
    with suppress(Exception):
        consented(sites, number)


def fresh(site):
    """The same site without its history, in which an account of a hundred thousand questions would grow."""
    data = site._data
    table = getattr(data.table, "table", data.table)
    label = getattr(data.table, "name", "")
    return type(site)(site.name, table, site.policy, data.shared_seed, label)


def folders(home: Path) -> tuple[Path, Path]:
    """A site that has answered, with everything that a folder can hold, and its coordinator's."""
    study, north = home / "study", home / "North"
    frames = records()
    assert main(["federation", "new", str(study)]) == 0
    for name in ("North", "West"):
        frame = frames[name].rename(columns=dict(zip(frames[name].columns, ["id", "x", "z"], strict=True)))
        frame.to_csv(home / f"{name}.csv", index=False)
        given = ["--data", str(home / f"{name}.csv"), "--exchange", str(study / "exchange")]
        assert main(["site", "init", str(home / name), "--name", name, *given]) == 0
        assert main(["federation", "join", str(study), str(home / name)]) == 0
        assert main(["site", "pin", str(home / name), str(study)]) == 0
        assert main(["site", "describe", str(home / name)]) == 0
        (home / name / "policy.toml").write_text(Policy.open().to_toml())

    class Here:
        def __init__(self):
            self.sites = {name: open_site(home / name) for name in ("North", "West")}

        def send(self, site, request):
            return self.sites[site].answer(request)

    transport = Here()
    partition = fs.ClientPartition.connect(study, journal=home / "journal", transport=transport)
    fs.GLORE.from_formula("x > 0 ~ z", partition).fit().receipt().save(home / "receipt.json")
    for site in transport.sites.values():
        site.site_ledger.store.close()
    return study, north


def bomb() -> bytes:
    """A small file of arrays that holds 256 MB, compressed."""
    content = BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file, file.open("numbers.npy", "w") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<i8", "fortran_order": False, "shape": (2**25,)})
        for _ in range(2**8):
            out.write(bytes(2**20))
    return content.getvalue()


def claim() -> bytes:
    """A file of arrays whose header claims a shape that is not there."""
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as file, file.open("numbers.npy", "w") as out:
        np.lib.format.write_array_header_1_0(
            out, {"descr": "<i8", "fortran_order": False, "shape": (10**13,)}
        )
    return content.getvalue()


def mangled_arrays(rng: Random, valid: bytes) -> bytes:
    return pick(rng, [claim(), b"", b"PK"]) if rng.random() < 0.1 else mangled(rng, valid)


def in_file(path: Path, fault: Callable[[Random, bytes], bytes], read: Callable[[Path], object]):
    """A target: the file with a fault in it, read, and put back."""
    valid, mode = path.read_bytes(), path.stat().st_mode

    def target(rng: Random) -> None:
        path.write_bytes(fault(rng, valid))
        try:
            read(path)
        finally:
            path.write_bytes(valid)
            path.chmod(mode)

    return target


def in_text(valid: bytes, read: Callable[[bytes], object], fault=text_of):
    """A target: a message with a fault in it."""
    return lambda rng: read(fault(rng, valid))


def make_targets(home: Path) -> dict[str, Callable[[Random], object]]:
    """All readers, each with a valid file or message at hand."""
    study, north = folders(home)
    keys, coordinator = load_identity(north).public, load_identity(study)
    reported = Request("North", "schema", "describe_table", {}, "s", "{}")
    site = fresh(open_and_close(north))
    reply = site.answer(pack_request(reported))
    numbers, seen = np.arange(60), np.ones(60, dtype=bool)
    AlignedTable("North", pd.read_csv(home / "North.csv"), ["id"], home).keep("0" * 16, numbers)
    PersistentAlignment(
        "0" * 16, 60, {"North": numbers, "West": numbers}, {"North": seen, "West": seen}
    ).save(study)
    (home / "saved").write_bytes(saved_result(home))
    run_folder = next(iter(sorted((home / "journal").glob("run-*"))))
    rounds = next(iter(sorted(run_folder.glob("*.json"))))
    receipt = (home / "receipt.json").read_bytes()
    linked = read_description(north)
    return {
        "questions": questions,
        "replies": in_text(reply, unpack_reply, mangled),
        "envelopes": envelopes(coordinator),
        "exchange folder": exchange(copytree(north, home / "served"), coordinator),
        "policy.toml": in_file(north / "policy.toml", mangled, Policy.from_toml),
        "policies on their way": in_text(
            (north / "policy.toml").read_bytes(),
            lambda text: Policy.from_text("its policy", text.decode("utf-8", "replace")),
            mangled,
        ),
        "site.toml": in_file(north / "site.toml", mangled, lambda path: read_description(path.parent)),
        "federation.toml": in_file(study / "federation.toml", mangled, read_federation),
        "columns.toml": in_text(
            (north / "columns.toml").read_bytes(),
            lambda text: read_published(text.decode("utf-8", "replace"), "it"),
            mangled,
        ),
        "card.toml": in_file(north / "card.toml", mangled, read_card),
        "ledger.jsonl": in_file(
            north / "ledger.jsonl", ledgers, lambda path: read_ledger(north, "North", keys)
        ),
        "ledger.head": in_file(
            north / "ledger.head", text_of, lambda path: read_ledger(north, "North", keys)
        ),
        "ledger.key": in_file(north / "ledger.key", mangled, lambda path: read_ledger(north, "North", keys)),
        "identity.json": in_file(north / "identity.json", text_of, Identity.load),
        "public identities": in_text(keys.to_json().encode(), PublicIdentity.from_json),
        "receipts": in_text(receipt, lambda text: check_receipt(text, keys)),
        "heads": in_text(
            json.dumps({"lines": 1, "digest": "00", "time": 1, "lost": [], "signature": "00"}).encode(),
            lambda text: from_json(SignedCheckpoint, text, "a head").is_of(keys),
        ),
        "heads.json": in_file(
            study / HEADS, text_of, lambda path: LedgerCheckpoints(study, {"North": "0"}).known()
        ),
        "schemas": in_text(
            unpack_reply(reply).text.encode(), lambda text: from_json(TableSchemaText, text, "it")
        ),
        "alignments of a site": in_file(home / "alignment.npz", mangled_arrays, lambda _: aligned(home)),
        "alignments of a study": in_file(
            study / "alignment.npz", mangled_arrays, lambda _: load_alignment(study)
        ),
        "journals, rounds": in_file(rounds, text_of, lambda _: replay(home / "journal")),
        "plans": in_text(a_plan(), lambda text: list(describe_plan(read_plan(text, "a plan")))),
        "saved results": in_file(home / "saved", mangled, fs.load),
        "records": in_file(home / "North.csv", mangled, lambda _: open_records(north, linked)),
    }


def open_and_close(folder: Path):
    site = open_site(folder)
    site.site_ledger.store.close()
    return site


def saved_result(home: Path) -> bytes:
    partition = fs.ClientPartition.from_frames(records(), on="id", shared_seed=1)
    fs.VFEMRegression.from_formula("y ~ a + b + d", partition).fit().save(home / "saved")
    return (home / "saved").read_bytes()


def a_plan() -> bytes:
    sites = partition(False, approval="owner")
    with suppress(ConsentError):
        FITS[0](sites)
    return to_json(next(iter(sites.sites["North"].pending.values()))).encode()


def check_receipt(text: bytes, keys: PublicIdentity) -> None:
    receipt = Receipt.from_json(text.decode("utf-8", "replace"))
    fs.verify_receipt(receipt, {"North": keys.fingerprint, "West": keys.fingerprint}, strict=False)
    str(receipt)


def ledgers(rng: Random, valid: bytes) -> bytes:
    """A ledger with a fault in one line, or in its lines."""
    lines = valid.split(b"\n")
    if rng.random() < 0.6:
        place = int(rng.integers(len(lines) - 1))
        lines[place] = text_of(rng, lines[place])
        return b"\n".join(lines)
    return mangled(rng, valid)


def aligned(home: Path) -> None:
    AlignedTable("North", pd.read_csv(home / "North.csv"), ["id"], home)


def replay(folder: Path) -> None:
    journal = Journal(folder)
    journal.lose(set())
    journal.begin_run()
    for number in range(3):
        journal.begin_round(number, [Request("North", "schema", "describe_table", {}, "s", "{}")])
        answer = journal.read(number, 0)
        if answer is not None:
            unpack_reply(answer)


def envelopes(identity: Identity):
    """Envelopes of strangers, with faulty bytes; and those of the pinned writer, who signed a fault."""
    valid = sign_envelope(identity, Envelope("coordinator", "North", "0" * 32, b"payload"))

    def target(rng: Random) -> None:
        data = mangled(rng, valid)
        if rng.random() < 0.5:
            payload = mangled(rng, pack_reply(Reply("North", {"x": np.zeros(3)}, "", 3)))
            who, number = (
                pick(rng, ["coordinator", "", "North", "\0" * 50]),
                pick(rng, ["0" * 32, "", "9" * 500]),
            )
            data = sign_envelope(
                identity, Envelope(who, "North", number, payload, pick(rng, ["", "now", "\u202e"]))
            )
        envelope = open_envelope(data, identity.public.fingerprint, "a file")
        unpack_request(envelope.payload)

    return target


def exchange(folder: Path, coordinator: Identity):
    """Files of strangers and of the coordinator in the folder of a served site, which keeps its account.

    The site's folder is its own: who finds its files altered answers nothing more.
    """
    served = open_site(folder)
    requests = Path(read_description(folder).exchange, "North", "asks")
    requests.mkdir(parents=True, exist_ok=True)

    def target(rng: Random) -> None:
        number = rng.bytes(16).hex()
        reported = Request("North", "schema", "describe_table", {}, number, "{}")
        question = mangled_ask(rng, reported)
        if rng.random() < 0.5:
            data = sign_envelope(coordinator, Envelope("coordinator", "North", number, question))
        else:
            data = mangled(
                rng,
                sign_envelope(coordinator, Envelope("coordinator", "North", number, pack_request(reported))),
            )
        path = requests / f"{number}.ask"
        path.write_bytes(data)
        looks = iter([False, True])
        try:
            serve_folder(
                served, requests.parents[1], coordinator.public.fingerprint, poll=0, stop=lambda: next(looks)
            )
        finally:
            path.unlink()
            for answer in (requests.parent / "replies").glob("*.reply"):
                answer.unlink()

    target.close = served.site_ledger.store.close
    return target
