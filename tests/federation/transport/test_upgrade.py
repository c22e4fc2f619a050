"""Folders of sites that earlier versions wrote: converted once, with everything in force that was before."""

from __future__ import annotations

import json
import tarfile
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation, printed, served_sites

import fedstat as fs
from fedstat.errors import ConsentError, EngineError, PolicyError
from fedstat.federation import state_formats
from fedstat.federation.audit import ledger_file
from fedstat.federation.audit.ledger_file import ANSWERED_FILENAME, LEDGER_FILENAME, read_ledger
from fedstat.federation.disclosure import release_history
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.weight_spaces import GROUPS
from fedstat.federation.files import read_arrays
from fedstat.federation.partition.federation_file import read_federation
from fedstat.federation.transport.journal import HEADS, LedgerCheckpoints
from fedstat.federation.transport.live_config import LiveConfig
from fedstat.federation.transport.session_store import STATE, SessionFolder
from fedstat.federation.transport.site_folder import UPGRADED, load_identity, open_site

STATES = Path(__file__).parent / "states"
COMMITS = ("9b108430", "1576e8f3")
SPENT = Fraction(74881391981543329, 2**63)
"""The charge of ``make_state.py``: a third of the rho of epsilon 1 at delta 1e-6, as the ledger has it."""


@pytest.fixture(params=COMMITS)
def home(request, tmp_path):
    """The folders of a site and its coordinator, as a commit left them."""
    with tarfile.open(STATES / f"{request.param}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="tar")
    tmp_path.joinpath("North").chmod(0o700)
    write_policy(tmp_path)
    return tmp_path


def write_policy(home, **rules):
    policy = Policy.strict(masked_only=False, **rules)
    home.joinpath("North/policy.toml").write_text(policy.to_toml())


def site_ledger(home):
    return read_ledger(home / "North", "North", load_identity(home / "North").public)


def copies(home):
    return sorted(home.joinpath("North").glob(f"{UPGRADED}-*"))


def test_a_site_of_an_earlier_version_starts_with_its_ledger_history_approvals_and_budget(home):
    before = home / "North" / ANSWERED_FILENAME
    earlier, content = before.read_bytes(), (home / "North" / LEDGER_FILENAME).read_bytes()
    groups = read_arrays(earlier)["c"]
    lines = list[str]()
    site = open_site(home / "North", lines.append)
    released = site.data.memory.released
    # the same groups of the same 120 rows, none of which counts as changed
    divided = [
        released.spaces.patterns[p].column for one in released.spaces.sums for (p,), a in one if a == GROUPS
    ]
    assert sum(len(np.unique(one[one > 0])) for one in divided) == groups[0] and (divided[0] > 0).sum() == 120
    assert (len(site.data.memory.gone), site.data.memory.changes) == (0, (0, 0, 0))
    assert site.site_ledger.charges.spent == SPENT
    assert [one.verdict for one in site.site_ledger.decisions.values()] == ["approved"]
    assert sum(one.kind == "refusal" for c in site.site_ledger.chains for one in c.entries) == 2
    site.site_ledger.store.close()
    # once, with copies of what was there
    (kept,) = copies(home)
    assert (kept / ANSWERED_FILENAME).read_bytes() == earlier
    assert (kept / LEDGER_FILENAME).read_bytes() == content
    assert state_formats.HISTORY.read_arrays(read_arrays(before.read_bytes()), "") == (
        state_formats.HISTORY.number
    )
    assert any("converted" in line and kept.name in line for line in lines)
    open_site(home / "North", lines.append).site_ledger.store.close()
    assert copies(home) == [kept]


def test_a_plan_of_another_form_is_named_and_can_be_proposed_again(home):
    waiting = list(home.joinpath("North/pending").glob("*.json"))
    assert len(waiting) == 1
    lines = list[str]()
    site = open_site(home / "North", lines.append)
    open_plans = site.approvals.store.waiting()
    site.site_ledger.store.close()
    said = any("Plans that waited" in line and "1 removed" in line for line in lines)
    # either it waits still, or the owner is told, and a copy is there
    assert (len(open_plans) == 1) is not said
    assert said is (copies(home)[0] / waiting[0].name).exists()


def test_an_upgraded_site_answers_and_compares_with_what_the_earlier_version_released(home):
    records = pd.read_csv(home / "north.csv")
    design = np.column_stack([np.ones(len(records)), records["age"]])
    expected = np.linalg.lstsq(design, records["x"], rcond=None)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with served_sites(home, ["North"]):
            partition = fs.ClientPartition.connect(home / "study")
            found = fs.FederatedOLS.from_formula("x ~ age", partition).fit(masked=False)
            np.testing.assert_allclose(found.params, expected, rtol=1e-9)
        # without one record, the difference to a sum of the earlier version would be this record
        records.drop(index=17).to_csv(home / "north.csv", index=False)
        with served_sites(home, ["North"]):
            partition = fs.ClientPartition.connect(home / "study")
            again = fs.FederatedOLS.from_formula("x ~ age", partition).fit(masked=False)
            assert found.nobs - again.nobs >= Policy.strict().min_count
        write_policy(home, small_differences="refuse")
        with served_sites(home, ["North"]):
            partition = fs.ClientPartition.connect(home / "study")
            with pytest.raises(PolicyError, match="depends on rows"):
                fs.FederatedOLS.from_formula("x ~ age", partition).fit(masked=False)


@pytest.fixture
def current(tmp_path):
    frame = pd.DataFrame({"y": np.arange(40.0), "id": [f"p{i}" for i in range(40)]})
    make_federation(tmp_path, {"A": frame})
    return tmp_path / "A"


@pytest.mark.parametrize("what", ["LEDGER", "HISTORY"])
def test_the_state_of_a_later_version_is_named_and_left_alone(what, current, capsys, monkeypatch):
    later = replace(getattr(state_formats, what), number=99)
    with monkeypatch.context() as patched:
        patched.setattr(ledger_file if what == "LEDGER" else release_history, what, later)
        patched.setattr(state_formats, "VERSION", "9.9.0")
        site = open_site(current)
        site.site_ledger.is_earlier = True
        ledger_file.mark_upgrade(site.site_ledger)
        memory = release_history.ReleaseHistory(release_history.ReleasedSums.none(40))
        site.site_ledger.keep_answered(memory.to_arrays(site.data.table, site.data.mark_key), 40)
        site.site_ledger.store.close()
    content = {path.name: path.read_bytes() for path in current.iterdir() if path.is_file()}
    with pytest.raises(EngineError, match=r"written by fedstat 9\.9\.0 \(format 99\)") as error:
        open_site(current)
    assert "Install fedstat 9.9.0" in str(error.value) and "declare-loss" not in str(error.value)
    for command, code in (("serve", 1), ("check", 1), ("health", 1)):
        assert "Install fedstat 9.9.0" in printed(capsys, "site", command, current, code=code), command
    # a loss is not declared by mistake
    capsys.readouterr()
    assert main(["site", "declare-loss", str(current), "--reason", "upgrade"]) != 0
    kept = {path.name: path.read_bytes() for path in current.iterdir() if path.is_file()}
    assert {name: kept[name] for name in content if name != "status.json"} == {
        name: one for name, one in content.items() if name != "status.json"
    }


def test_old_words_of_an_owners_files_name_the_new_ones(home, capsys):
    study, site = home / "study", home / "North"
    file, policy = study / "federation.toml", site / "policy.toml"
    file.write_text(file.read_text().replace("transport =", "carrier ="))
    found = printed(capsys, "federation", "status", study, code=1)
    assert "'carrier' is now called 'transport'" in found
    for line, expected in (
        ('answers_kept = "all"', "'answers_kept' is now called 'remember'"),
        ('reasons = "told"', "'told', which is now called 'sent'"),
    ):
        policy.write_text(line)
        assert expected in printed(capsys, "site", "check", site, code=1)


OWNERS = (".toml", ".log", "log.txt")
"""Endings of files that a person writes, or reads as text."""


def number_of(path):
    """The number of a file's format, as its first line, its arrays or its form has it; None without one."""
    content = path.read_bytes()
    if content.startswith(b"PK"):
        content = read_arrays(content).get(state_formats.NUMBER, np.zeros(0, np.uint8)).tobytes()
    try:
        lines = [json.loads(content)]
    except ValueError:
        try:
            lines = [json.loads(line) for line in content.splitlines()[:2]]
        except ValueError:
            return None
    found = [line[state_formats.NUMBER] for line in lines if state_formats.NUMBER in line]
    return int(str(found[0]).rpartition(" ")[2]) if found else None


def states_of_sessions(folder):
    """The states of sessions by path, which only the site can read."""
    site = open_site(folder)
    sessions = SessionFolder.of(site)
    found = {}
    for chain in site.site_ledger.chains:
        path = sessions._place(chain.session) / STATE
        if path.exists():
            found[path] = sessions._read(chain, path)[0][state_formats.NUMBER]
    site.site_ledger.store.close()
    return found


def test_every_file_that_a_site_and_its_coordinator_write_carries_the_number_of_its_format(tmp_path):
    """After all that an owner and an analyst do: the list is what is there then."""
    rng = np.random.default_rng(3)
    frames = {name: pd.DataFrame(rng.normal(size=(60, 2)), columns=["y", "x"]) for name in "ABC"}
    frames = {name: frame.assign(id=range(60)) for name, frame in frames.items()}
    make_federation(tmp_path, frames, policy=Policy(approval="owner", masked_only=False))
    study = tmp_path / "study"
    (study / "dictionary.toml").write_text(
        "".join(f'[{name}]\nkind = "number"\nrange = [-9, 9]\n' for name in "xy")
    )
    for command in ("roster", "dictionary"):
        assert main(["federation", command, str(study)]) == 0
    for name in frames:
        toml = tmp_path / name / "site.toml"
        toml.write_text(toml.read_text().replace("[data]", '[data]\nkey = "id"', 1))
        for command in (["dictionary", "--accept"], ["describe"]):
            assert main(["site", command[0], str(tmp_path / name), *command[1:]]) == 0

    def fit():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            partition = fs.ClientPartition.connect(study)
            return fs.FederatedOLS.from_formula("y ~ x", partition).fit(masked=False)

    with served_sites(tmp_path, frames):
        with pytest.raises(ConsentError):
            fit()
        for name in frames:
            (plan,) = tmp_path.joinpath(name, "pending").glob("*.json")
            assert main(["site", "approve", str(tmp_path / name), plan.stem]) == 0
        assert fit().nobs == 180
        with pytest.raises(ConsentError):  # one plan waits
            fit()
        assert main(["site", "reload", str(tmp_path / "A")]) == 0
    (plan,) = tmp_path.joinpath("A", "pending").glob("*.json")
    assert main(["site", "approve", str(tmp_path / "A"), plan.stem]) == 0  # the next service reads it
    numbers = {}
    for folder in (tmp_path / "A", study):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and study / "exchange" not in path.parents and not path.name.endswith(OWNERS):
                numbers[path] = number_of(path)
    sealed = states_of_sessions(tmp_path / "A")
    assert sealed.keys() <= numbers.keys() and sealed
    numbers |= sealed
    names = {path.name for path in numbers}
    assert {"ledger.key", "ledger.head", "answered.npz", "anchor", "reload", "heads.json"} <= names, names
    assert {path.suffix for path in numbers if "pending" in path.parts} == {".json", ".decision"}
    assert [str(path) for path, number in numbers.items() if type(number) is not int] == []


def test_a_key_of_a_later_form_is_named(current):
    path = current / "identity.json"
    path.write_text(path.read_text().replace("fedstat identity 1", "fedstat identity 2"))
    with pytest.raises(EngineError, match=r"identity was written by a later version of fedstat \(form"):
        open_site(current)


def test_the_key_of_a_ledger_is_converted_and_stays_the_same_secret(home):
    path = home / "North" / "ledger.key"
    earlier = path.read_bytes()
    assert len(earlier) == 32
    open_site(home / "North").site_ledger.store.close()
    assert json.loads(path.read_text())["secret"] == earlier.hex() and site_ledger(home).chains
    (kept,) = copies(home)
    assert (kept / "ledger.key").read_bytes() == earlier


def test_a_coordinators_heads_without_a_format_are_read(tmp_path):
    frames = {name: pd.DataFrame({"y": np.arange(40.0), "x": np.arange(40.0) % 7}) for name in "AB"}
    make_federation(tmp_path, frames, policy=Policy.open())
    with served_sites(tmp_path, frames):
        fs.FederatedOLS.from_formula("y ~ x", fs.ClientPartition.connect(tmp_path / "study")).fit()
    federation = read_federation(tmp_path / "study")
    stored = LedgerCheckpoints(federation.folder, federation.sites)
    known, path = stored.known(), federation.folder / HEADS
    path.write_text(json.dumps(json.loads(path.read_text())["heads"]))
    assert known and stored.known() == known


def test_an_owner_is_told_of_rules_that_the_earlier_version_did_not_have(current, capsys):
    """A rule that is not in policy.toml has its strict value, also if an upgrade has brought it."""
    policy = current / "policy.toml"
    open_site(current).site_ledger.store.close()
    assert "Not in policy.toml" not in printed(capsys, "site", "check", current)
    rules = [line for line in policy.read_text().splitlines() if not line.startswith("small_differences")]
    policy.write_text("\n".join(rules))
    expected = 'small_differences = "leave out"'
    assert expected in " ".join(printed(capsys, "site", "check", current).split())
    lines = list[str]()
    running = LiveConfig(current, lines.append)
    running.site.site_ledger.policies[-1] = replace(
        running.site.site_ledger.policies[-1],
        rules="\n".join(line for line in rules if line and not line.startswith("#")),
    )
    running._record_policy()
    running.site.site_ledger.store.close()
    assert f"rules are in force that this site did not have before: {expected}" in lines
