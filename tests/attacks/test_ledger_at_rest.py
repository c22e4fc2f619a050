"""Somebody without a key who writes to a site's folder: an account that is not whole is not served."""

import json
import os
import shutil
import warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.codec import from_json, to_json
from fedstat.errors import DisclosureWarning, MessageError, PolicyError, SecurityError
from fedstat.federation.audit.checkpoints import SignedCheckpoint
from fedstat.federation.audit.event_log import (
    canonical_json,
    extended_digest,
    genesis_digest,
    read_site_entry,
)
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.state_formats import HISTORY
from fedstat.federation.transport.remote import SiteServer
from fedstat.federation.transport.site_folder import load_identity, open_site
from fedstat.operator.command_line import main

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")
N = 60
ACCOUNT = ("ledger.jsonl", "ledger.head", "answered.npz")
PARTS = (*ACCOUNT, "ledger.key")


def records(seed):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=N), "y": rng.normal(size=N), "m": rng.normal(size=N)})
    frame.loc[7, "m"] = np.nan
    return frame


class Federation:
    """Sites of two folders, opened again when they are needed, without processes."""

    def __init__(self, home):
        self.home, self.study, self.open = home, home / "study", {}
        assert main(["federation", "new", str(self.study)]) == 0
        for seed, name in enumerate(("North", "South")):
            records(seed).to_csv(home / f"{name}.csv", index=False)
            data = ["--data", str(home / f"{name}.csv")]
            assert main(["site", "init", str(home / name), "--name", name, *data]) == 0
            (home / name / "policy.toml").write_text(fs.Policy.open().to_toml())
        for name in ("North", "South"):
            assert main(["federation", "join", str(self.study), str(home / name)]) == 0
            for other in ("North", "South"):
                assert main(["site", "pin", str(home / name), str(home / other)]) == 0

    def send(self, site, request):
        if site not in self.open:
            self.open[site] = SiteServer(open_site(self.home / site))
        return self.open[site].answer(request)

    def stop(self):
        for server in self.open.values():
            server.site.site_ledger.store.close()
        self.open.clear()

    def connect(self):
        return fs.ClientPartition.connect(self.study, transport=self)

    def fit(self, formula="y > 0 ~ x"):
        return fs.GLORE.from_formula(formula, self.connect()).fit()


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory):
    """Folders after one analysis, and after one that was refused, over 59 of the 60 rows."""
    federation = Federation(tmp_path_factory.mktemp("analyzed"))
    federation.fit()
    with pytest.raises(PolicyError, match="differencing"):
        federation.fit("y > 0 ~ x + m")
    federation.stop()
    return federation


@pytest.fixture
def federation(analyzed):
    """The same, to be altered by one test."""
    names = [*PARTS, "identity.json", "site.toml"]
    before = {n: (analyzed.home / "North" / n).read_bytes() for n in names}
    heads = (analyzed.study / "heads.json").read_bytes()
    data = (analyzed.home / "North.csv").read_bytes()
    yield analyzed
    analyzed.stop()
    for name, content in before.items():
        path = analyzed.home / "North" / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)
    (analyzed.home / "North" / "answered.next").unlink(missing_ok=True)
    for place in (analyzed.home / "North").glob("lost-*"):
        shutil.rmtree(place)
    (analyzed.study / "heads.json").write_bytes(heads)
    (analyzed.home / "North.csv").write_bytes(data)


def rewrite(folder, keep):
    """Remove entries and compute all heads again, as far as this needs no key."""
    keys, lines, chains, previous = load_identity(folder).public, [], {}, ""
    for text in (folder / "ledger.jsonl").read_text().splitlines():
        line = json.loads(text)
        if "session" in line:
            line["previous"] = previous
            ordinal = line["ordinal"]
            chains[ordinal] = genesis_digest("North", keys, line["session"], ordinal, previous)
        if "entry" in line:
            link = read_site_entry(line["entry"])
            if not keep(link):
                continue
            chains[line["ordinal"]] = extended_digest(chains[line["ordinal"]], link)
            previous = line["head"] = chains[line["ordinal"]].hex()
        lines.append(canonical_json(line) + "\n")
    (folder / "ledger.jsonl").write_text("".join(lines))


def without_refusals(folder):
    rewrite(folder, lambda link: link.kind != "refusal")


def cut(folder, lines=3):
    path = folder / "ledger.jsonl"
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:lines]) + b"\n")


def signed_by_another(folder):
    """A whole account, of keys that the stranger has."""
    shutil.move(folder / "identity.json", folder / "kept.json")
    Identity.generate().save(folder / "identity.json")
    for name in ACCOUNT:
        (folder / name).unlink(missing_ok=True)
    assert main(["site", "declare-loss", str(folder), "--reason", "none"]) == 0
    shutil.move(folder / "kept.json", folder / "identity.json")


def other_answers(folder):
    np.savez_compressed(folder / "answered.npz", **{"0": np.zeros((1, 8), dtype=np.uint8)})


def gone(name, folder):
    (folder / name).unlink()


def linked(name, folder):
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to(folder / "elsewhere")


def another_key(folder):
    (folder / "ledger.key").write_bytes(os.urandom(32))


def marks_of_another(folder):
    path = folder / "ledger.jsonl"
    text = path.read_text()
    mark = next(m for m in (json.loads(line).get("mark") for line in text.splitlines()) if m)
    path.write_text(text.replace(mark, "0" * 64))


ALTERED = {
    "a refusal is removed and all heads are computed again": without_refusals,
    "the tail is cut": cut,
    "all but the first line is cut": partial(cut, lines=1),
    "all lines are cut": partial(cut, lines=0),
    "the ledger is removed": partial(gone, "ledger.jsonl"),
    "the ledger is a link": partial(linked, "ledger.jsonl"),
    "the head is removed": partial(gone, "ledger.head"),
    "the key of the commitments is removed": partial(gone, "ledger.key"),
    "the key of the commitments is another": another_key,
    "the memory of answers is removed": partial(gone, "answered.npz"),
    "the memory of answers is another": other_answers,
    "an answer is marked as another": marks_of_another,
    "the account is that of another key": signed_by_another,
}


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED)
def test_a_ledger_that_is_not_whole_is_not_served(federation, alter, capsys):
    folder = federation.home / "North"
    alter(folder)
    with pytest.raises(SecurityError, match="declare-loss") as problem:
        open_site(folder)
    assert str(folder) in str(problem.value)
    assert main(["site", "serve", str(folder), "--once"]) == 1
    assert "declare-loss" in capsys.readouterr().err


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED)
def test_its_owner_declares_the_loss_and_everybody_is_reported(federation, alter, capsys):
    folder = federation.home / "North"
    alter(folder)
    assert main(["site", "declare-loss", str(folder), "--reason", "somebody was here"]) == 0
    printed = capsys.readouterr().out
    with pytest.warns(DisclosureWarning, match="North: its owner declared .* lost"):
        result = federation.fit()
    federation.stop()
    assert (federation.home / "North" / "ledger.jsonl").read_text().count("somebody was here") == 1
    assert [sentence[:6] for sentence in result.receipt().losses] == ["North:"]
    assert "North: its owner declared" in str(result.receipt())
    assert main(["site", "ledger", str(folder)]) == 0
    assert "lost: somebody was here" in capsys.readouterr().out
    for place in folder.glob("lost-*"):
        assert place.stat().st_mode & 0o777 == 0o700
    assert "New releases are no longer compared with earlier ones" in printed


@pytest.fixture
def put_back(federation):
    """Ledger, head and memory of before the last analysis that the coordinator knows of: all are signed."""
    folder = federation.home / "North"
    before = {name: (folder / name).read_bytes() for name in ACCOUNT}
    federation.fit()
    federation.stop()
    for name, content in before.items():
        (folder / name).write_bytes(content)
    return federation


def test_an_earlier_state_is_found_by_what_the_coordinator_keeps(put_back, capsys):
    folder = put_back.home / "North"
    open_site(folder).site_ledger.store.close()  # by itself the site cannot know
    with pytest.raises(SecurityError, match="North: its ledger does not contain its signed state of 20"):
        put_back.connect()
    table = Request("North", "schema", "describe_table", {}, "other", "{}", turn=1)
    with pytest.raises(SecurityError, match="declared the loss"):
        unpack_reply(put_back.send("North", pack_request(table)))
    put_back.stop()
    with pytest.raises(SecurityError, match="earlier state"):  # nor after a restart
        open_site(folder)
    assert main(["site", "check", str(folder)]) == 1
    assert "earlier state" in capsys.readouterr().out
    assert main(["site", "declare-loss", str(folder), "--reason", "restored from a backup"]) == 0
    with pytest.warns(DisclosureWarning, match="North: its owner declared"):
        put_back.fit()
    with warnings.catch_warnings():  # the coordinator knows by now
        warnings.simplefilter("error")
        put_back.connect()


def test_a_strict_site_says_the_same(put_back):
    policy = put_back.home / "North" / "policy.toml"
    policy.write_text(fs.Policy.strict().to_toml())
    with pytest.raises(SecurityError, match="North: its ledger does not contain its signed state of 20"):
        put_back.connect()
    policy.write_text(fs.Policy.open().to_toml())


def test_what_is_still_remembered_after_a_loss_is_held_against_new_answers(put_back):
    folder = put_back.home / "North"
    with pytest.raises(SecurityError):
        put_back.connect()
    put_back.stop()
    assert main(["site", "declare-loss", str(folder), "--reason", "restored"]) == 0
    with pytest.raises(PolicyError, match="differencing"):
        put_back.fit("y > 0 ~ x + m")


def test_a_head_that_the_site_did_not_sign_disputes_nothing(federation):
    site = open_site(federation.home / "North")
    head = site.site_ledger.store.head
    texts = [
        to_json(SignedCheckpoint(head.lines, "0" * 64, head.time + 1, (), head.signature)),
        to_json(SignedCheckpoint(head.lines, "0" * 64, head.time + 1).sign(Identity.generate())),
    ]
    for number, text in enumerate(texts):
        request = Request("North", "receipt", "recall_head", {}, f"session {number}", text)
        with pytest.raises(SecurityError, match="does not have its signature"):
            site.answer(pack_request(request))
    with pytest.raises(MessageError):
        site.answer(pack_request(Request("North", "receipt", "recall_head", {}, "session 2", "[" * 9000)))
    reported = unpack_reply(
        site.answer(pack_request(Request("North", "receipt", "recall_head", {}, "session 3", to_json(head))))
    )
    assert from_json(SignedCheckpoint, reported.text, "head").lines > head.lines
    site.site_ledger.store.close()


@pytest.mark.parametrize(
    "alter",
    [cut, without_refusals, partial(gone, "ledger.jsonl")],
    ids=["cut", "without refusals", "gone"],
)
def test_a_ledger_that_is_altered_while_it_is_served_is_found(federation, alter):
    site = open_site(federation.home / "North")
    alter(federation.home / "North")
    with pytest.raises(SecurityError, match="was changed while the site was served"):
        site.answer(pack_request(Request("North", "schema", "describe_table", {}, "s", "{}")))
    site.site_ledger.store.close()


def grown(more, positive=True):
    """North's records and some more, all of one outcome."""
    new = records(5).iloc[:more].assign(y=lambda d: np.abs(d["y"]), m=1.0)
    return pd.concat([records(0), new if positive else -new])


@pytest.mark.filterwarnings("ignore:.*records have changed since:fedstat.errors.DataWarning")
def test_a_table_that_has_grown_keeps_its_memory(federation):
    """Sums over 60 and over 61 records differ by one; over 72, by twelve. So it is after a restart."""
    for more, refused in ((1, True), (12, False), (13, True), (12, False)):
        federation.stop()
        grown(more).sample(frac=1.0, random_state=more).to_csv(federation.home / "North.csv", index=False)
        site = federation.connect().sites["North"]
        assert site is not None and federation.open["North"].site._data.memory.released.n_rows >= N
        if refused:
            with pytest.raises(PolicyError, match="differ in fewer than 5 rows"):
                federation.fit()
        else:
            assert federation.fit().nobs == 2 * N + more
    federation.stop()


def test_answers_over_records_that_are_gone_are_not_forgotten_in_silence(federation, capsys):
    """Without a key the site cannot tell removed records from changed ones; two answers may differ by one."""
    records(0).iloc[:-1].to_csv(federation.home / "North.csv", index=False)
    with pytest.raises(SecurityError, match=r"there are 59 rows; .* used 60\. Gone or changed since then: 1"):
        open_site(federation.home / "North")
    assert (
        main(["site", "declare-loss", str(federation.home / "North"), "--reason", "records of November"]) == 0
    )
    assert "earlier replies used 60" in capsys.readouterr().out
    site = open_site(federation.home / "North")
    assert site._data.memory.released is None and site.site_ledger.store.head.lost
    site.site_ledger.store.close()


def test_what_a_crash_can_do_is_mended(federation):
    """Lines without a signature at the end, an older head, a memory that is not yet in its place."""
    folder = federation.home / "North"
    head, size = (folder / "ledger.head").read_bytes(), (folder / "ledger.jsonl").stat().st_size
    site = open_site(folder)
    site.answer(pack_request(Request("North", "schema", "describe_table", {}, "s", "{}")))
    n_sessions = len(site.site_ledger.chains)
    arrays = ReleasedSums.none(N).to_arrays() | HISTORY.stamp_arrays()
    site.site_ledger.keep_answered(arrays, N)
    site.site_ledger.store.close()
    (folder / "ledger.head").write_bytes(head)
    (folder / "answered.npz").rename(folder / "answered.next")
    complete = (folder / "ledger.jsonl").read_bytes()
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(complete[size : size + 90])
    site = open_site(folder)
    assert (folder / "ledger.jsonl").read_bytes() == complete and len(site.site_ledger.chains) == n_sessions
    assert site._data.memory.released.n_rows == N and not site._data.memory.released.spaces.sums
    site.site_ledger.store.close()
    keys = load_identity(folder).public
    assert len(read_ledger(folder, "North", keys).chains) == n_sessions


def test_a_folder_without_a_ledger_is_not_served(tmp_path):
    """As one that an earlier version made, or from which everything but the keys was removed."""
    records(0).to_csv(tmp_path / "r.csv", index=False)
    folder = tmp_path / "North"
    assert main(["site", "init", str(folder), "--name", "North", "--data", str(tmp_path / "r.csv")]) == 0
    for name in ("ledger.jsonl", "ledger.head", "ledger.key"):
        (folder / name).unlink()
    with pytest.raises(SecurityError, match="absent"):
        open_site(folder)
    assert main(["site", "declare-loss", str(folder), "--reason", "made by an earlier version"]) == 0
    open_site(folder).site_ledger.store.close()
