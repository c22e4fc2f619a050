"""Several studies and tables at one site: one history over all studies, roles, and the owner's records."""

from __future__ import annotations

import csv
import io
import json
import warnings

import numpy as np
import pandas as pd
import pytest
from operating import add_second_tables, main, make_federation, printed, served_sites, until_true

import fedstat as fs
from fedstat.errors import ConsentError, FedstatError, PartitionError, PolicyError, SecurityError
from fedstat.federation.audit.ledger_file import LEDGER_FILENAME, read_ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Purpose, Request, pack_request, unpack_reply
from fedstat.federation.partition.federation_file import coordinator_identity
from fedstat.federation.transport.signed import SignedSite, open_reply, sign_request
from fedstat.federation.transport.site_folder import load_identity, table_folders

NAMES = ("East", "North", "West")
PERSON = "Ada Berg"
STRICT = Policy.strict(formulas="any", small_differences="refuse")
"""A site that leaves rows out has no two studies of rows that differ by few."""


def records(seed, n=150):
    """A table in which one person alone lacks a second measurement."""
    rng = np.random.default_rng(seed)
    age, bmi = rng.normal(55.0, 9.0, n), rng.normal(26.0, 3.0, n)
    sick = (rng.random(n) < 0.4).astype(float)
    again = rng.normal(120.0, 12.0, n)
    again[7] = np.nan
    return pd.DataFrame({"age": age, "bmi": bmi, "sick": sick, "again": again})


def second_study(home, name="trial"):
    """Add a second coordinator, whom all sites answer for a study of its own."""
    other = home / name
    assert main(["federation", "new", str(other), "--name", name]) == 0
    for site in NAMES:
        assert main(["federation", "join", str(other), str(home / site)]) == 0
        given = ["--name", name, "--exchange", str(other / "exchange")]
        assert main(["site", "study", str(home / site), str(other), *given]) == 0
    return other


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("studies")
    frames = {name: records(seed) for seed, name in enumerate(NAMES)}
    make_federation(home, frames, policy=STRICT)
    second_study(home)
    with served_sites(home, NAMES):
        yield home


def connect(home, study="study", **stated):
    return fs.ClientPartition.connect(home / study, **stated)


def fit(partition, formula):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fs.GLORE.from_formula(formula, partition).fit(local=False)


def ledger_of(home, name="East"):
    return read_ledger(home / name, name, load_identity(home / name).public)


def exported(capsys, folder, *options):
    return list(csv.DictReader(io.StringIO(printed(capsys, "site", "export", folder, *options))))


def test_studies_share_one_history_and_the_ledger_names_who_asked_what_and_why(home, capsys, tmp_path):
    first = connect(home, person=PERSON, purpose="risk of relapse")
    fit(first, "sick ~ age")
    second = connect(home, "trial", person="Li Wei", purpose="dose finding")
    fit(second, "sick ~ bmi")
    # the rows of the two formulas differ in one person: the second study is refused what the first would be
    with pytest.raises(PolicyError):
        fit(second, "sick ~ age + again")
    chains = {chain.subject.formula: chain for chain in ledger_of(home).chains if chain.subject.formula}
    one = chains["sick ~ age"].subject
    assert (one.person, one.study, one.purpose) == (PERSON, "study", "risk of relapse")
    assert set(one.columns) == {"sick", "age"} and one.written
    other = chains["sick ~ bmi"].subject
    assert (other.person, other.study) == ("Li Wei", "trial") and other.client != one.client

    found = exported(capsys, home / "East", "--column", "age")
    assert {row["study"] for row in found} == {"study"} or all("age" in row["columns"] for row in found)
    assert any(row["released_as"] == "only as a sum over 3 sites" for row in found)
    assert {row["person"] for row in exported(capsys, home / "East", "--person", "Li Wei")} == {"Li Wei"}
    assert not exported(capsys, home / "East", "--to", "2000-01-01")
    assert not exported(capsys, home / "East", "--column", "shoe size")
    page = tmp_path / "releases.html"
    printed(capsys, "site", "export", home / "East", "--formula", "sick~age", "--out", page)
    text = page.read_text()
    assert "How sick depends on age" in text and "risk of relapse" in text and "<script" not in text


def test_the_difference_of_two_studies_is_refused_also_where_each_alone_is_answered(tmp_path):
    """Each study alone would be answered: the refusal comes from the history of the other one."""
    frames = {name: records(seed) for seed, name in enumerate(NAMES)}
    for order in (("study", "trial"), ("trial",)):
        home = tmp_path / "-".join(order)
        home.mkdir()
        make_federation(home, frames, policy=STRICT)
        second_study(home)
        with served_sites(home, NAMES):
            if len(order) == 2:
                fit(connect(home, "study"), "sick ~ age")
                with pytest.raises(PolicyError):
                    fit(connect(home, "trial"), "sick ~ age + again")
            else:
                fit(connect(home, "trial"), "sick ~ age + again")


def signed(home, study, request):
    """Bytes of a request that the coordinator of a study signed."""
    return sign_request(coordinator_identity(home / study), "East", pack_request(request))


@pytest.fixture
def site(tmp_path):
    frames = {name: records(seed, 40) for seed, name in enumerate(NAMES)}
    make_federation(tmp_path, frames, policy=STRICT)
    second_study(tmp_path)
    return tmp_path


def opened(home, extra=""):
    path = home / "East" / "site.toml"
    path.write_text(path.read_text() + extra)
    return SignedSite(home / "East")


def answer(served, home, study, request):
    """Text of a site's error, or empty where it answers."""
    number, question = signed(home, study, request)
    fingerprint = load_identity(home / "East").public.fingerprint
    packed = open_reply(served.answer(question, "a request", number), fingerprint, "East", number, "a reply")
    try:
        return "" if unpack_reply(packed) else "nothing"
    except FedstatError as error:
        return f"{type(error).__name__}: {error}"


ROLES = """
[roles.doctors]
people = ["Ada Berg"]
studies = ["trial"]
families = ["glm"]
columns = ["age", "sick"]
"""


def purposed(person, study, session="5" * 16, family="schema", step="describe_table", text="{}"):
    return Request("East", family, step, {}, session, text, turn=1, purpose=Purpose(person, study))


@pytest.mark.parametrize(
    "study, request_, said",
    [
        ("trial", purposed(PERSON, "trial", "a" * 16), ""),
        # another coordinator uses the name of a study, or none
        ("study", purposed(PERSON, "trial", "b" * 16), "has no study"),
        ("trial", purposed(PERSON, "study", "c" * 16), "has no study"),
        ("trial", purposed(PERSON, "", "d" * 16), "has no study"),
        # a person without a role, or without a name
        ("trial", purposed("Eve", "trial", "e" * 16), "has no role"),
        ("trial", purposed("", "trial", "f" * 16), "has no role"),
        ("trial", purposed("Ada Berg ".strip() + "\u200b", "trial", "0" * 16), "printable"),
        # a family that the role does not have
        ("trial", purposed(PERSON, "trial", "1" * 16, "fedavg", "start", ""), "has no role"),
    ],
)
def test_a_forged_study_or_person_is_refused(site, study, request_, said):
    served = opened(site, ROLES)
    try:
        reply = answer(served, site, study, request_)
        assert said in reply and bool(said) == bool(reply)
    finally:
        served.site.site_ledger.store.close()


def test_a_session_belongs_to_the_client_that_began_it(site):
    served = opened(site)
    try:
        first = answer(served, site, "trial", purposed(PERSON, "trial"))
        assert not first
        # the same bytes from another coordinator, another person, and the next request of the session
        for study, request in (
            ("study", purposed(PERSON, "trial")),
            ("study", purposed(PERSON, "")),
            ("trial", purposed("Eve", "trial")),
        ):
            reply = answer(served, site, study, request)
            assert "SecurityError: East: another coordinator, person or study began this session" in reply
        assert not answer(served, site, "trial", purposed(PERSON, "trial"))  # its own repetition
    finally:
        served.site.site_ledger.store.close()


def test_a_request_of_an_unknown_coordinator_is_not_answered(site):
    served = opened(site)
    stranger = site / "stranger"
    assert main(["federation", "new", str(stranger)]) == 0
    try:
        with pytest.raises(SecurityError):
            answer(served, site, "stranger", purposed(PERSON, "trial"))
    finally:
        served.site.site_ledger.store.close()


def test_a_role_limits_columns_before_a_row_is_read(home):
    for name in NAMES:
        path = home / name / "site.toml"
        path.write_text(path.read_text() + ROLES.replace('["trial"]', "[]").replace('["glm"]', "[]"))
    try:
        partition = connect(home, person=PERSON)
        fit(partition, "sick ~ age")
        before = {name: dict(ledger_of(home, name).refusals) for name in NAMES}
        with pytest.raises(ConsentError, match=r"roles.*does not let this person use bmi"):
            fit(partition, "sick ~ bmi")
        # the refusal depends on the request alone, and reveals no row
        assert before == {name: dict(ledger_of(home, name).refusals) for name in NAMES}
        with pytest.raises(ConsentError, match="has no role"):
            connect(home, person="Eve")
        assert any(chain.subject.role == "doctors" for chain in ledger_of(home).chains)
    finally:
        for name in NAMES:
            path = home / name / "site.toml"
            path.write_text(path.read_text().partition("\n[roles.doctors]")[0])


def test_a_ledger_with_another_person_is_refused(site, capsys):
    served = opened(site)
    answer(served, site, "trial", purposed(PERSON, "trial"))
    served.site.site_ledger.store.close()
    path = site / "East" / LEDGER_FILENAME
    text = path.read_text()
    assert PERSON in text
    printed(capsys, "site", "export", site / "East")
    for other in (text.replace(PERSON, "Eve Berg"), text.replace('"study":"trial"', '"study":"other"')):
        path.write_text(other)
        shown = printed(capsys, "site", "export", site / "East", code=1)
        assert "not what this site wrote" in shown and PERSON not in shown


def test_names_are_not_computed_by_a_spreadsheet_and_not_run_by_a_browser(site, capsys, tmp_path):
    served = opened(site)
    answer(served, site, "trial", purposed('=HYPERLINK("http://evil.example")', "trial", "a" * 16))
    answer(served, site, "trial", purposed("<script>alert(1)</script>", "trial", "b" * 16))
    served.site.site_ledger.store.close()
    found = {row["person"] for row in exported(capsys, site / "East")}
    assert found == {'\'=HYPERLINK("http://evil.example")', "<script>alert(1)</script>"}
    printed(capsys, "site", "export", site / "East", "--out", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "expected the ending" in printed(
        capsys, "site", "export", site / "East", "--out", tmp_path / "page.pdf", code=1
    )


def test_one_service_answers_for_several_tables_with_a_ledger_each(tmp_path, capsys):
    frames = {name: records(seed) for seed, name in enumerate(NAMES)}
    make_federation(tmp_path, frames, policy=STRICT)
    tables = {name: records(seed + 10).rename(columns={"bmi": "lactate"}) for seed, name in enumerate(NAMES)}
    add_second_tables(tmp_path, tables, STRICT)
    for name in NAMES:
        place = tmp_path / name / "tables" / "icu"
        for other in NAMES:
            assert main(["site", "pin", str(place), str(tmp_path / other)]) == 0
    with served_sites(tmp_path, NAMES):
        fit(connect(tmp_path), "sick ~ bmi")
        fit(connect(tmp_path, "icu"), "sick ~ lactate")
    lines = exported(capsys, tmp_path / "East")
    assert {(row["table"], row["formula"]) for row in lines if row["formula"]} >= {
        ("", "sick ~ bmi"),
        ("icu", "sick ~ lactate"),
    }
    assert set(table_folders(tmp_path / "East")) == {"", "icu"}
    assert printed(capsys, "site", "status", tmp_path / "East" / "tables" / "icu", code=1)
    # two tables with one source would have two histories of the same persons
    path = tmp_path / "East" / "tables" / "icu" / "site.toml"
    path.write_text(path.read_text().replace("East-icu.csv", "East.csv"))
    assert "have the same source" in printed(capsys, "site", "serve", tmp_path / "East", "--once", code=1)
    assert "have the same source" in printed(capsys, "site", "check", tmp_path / "East", code=1)


def test_a_study_is_added_once_and_revoked(site, capsys):
    folder, given = site / "East", ["--name", "trial", "--exchange", str(site / "x")]
    assert "has [studies.trial] already" in printed(
        capsys, "site", "study", folder, site / "trial", *given, code=1
    )
    assert "study trial" in printed(capsys, "site", "check", folder)
    assert "no more requests of this study" in printed(capsys, "site", "revoke", folder, "trial")
    assert "studies.trial" not in (folder / "site.toml").read_text()


# ---- the command for waiting plans ---------------------------------------------------------------------

HOOK = """\
import json, os, sys
notified = json.loads(sys.stdin.read())
with open("notified.jsonl", "a") as file:
    print(json.dumps({**notified, "arguments": sys.argv[1:], "environment": sorted(os.environ)}), file=file)
"""
EVIL = "$(touch run) `touch run`; touch run | \"'&"


def propose(home, formula="sick ~ age", **stated):
    with pytest.raises(ConsentError):
        fit(connect(home, **stated), formula)


def test_a_command_runs_once_for_each_new_plan_and_nothing_of_a_plan_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WARD_DATABASE", "postgresql://reader:secret@host/ward")
    frames = {name: records(seed) for seed, name in enumerate(NAMES)}
    make_federation(tmp_path, frames, policy=Policy.strict(formulas="any", approval="owner"))
    hook = tmp_path / "hook.py"
    hook.write_text(HOOK)
    lines = {"East": f"python3 '{hook}' fixed", "North": "/absent/command", "West": "python3 -c 'exit(3)'"}
    for name, line in lines.items():
        path = tmp_path / name / "site.toml"
        path.write_text(path.read_text().replace('on_pending = ""', f'on_pending = "{line}"'))
    log = tmp_path / "East" / "notified.jsonl"
    with served_sites(tmp_path, NAMES):
        propose(tmp_path, person=EVIL, purpose=EVIL)
        until_true(log.exists)
        propose(tmp_path, person=EVIL, purpose=EVIL)  # the same plan waits already
        propose(tmp_path, "sick ~ bmi", person=PERSON)
        until_true(lambda: len(log.read_text().splitlines()) == 2)
        for name in ("North", "West"):  # a failure does not stop the site
            file = tmp_path / name / "log.txt"
            until_true(lambda file=file: file.read_text().count("on_pending failed") == 2)
    notified = [json.loads(line) for line in log.read_text().splitlines()]
    assert notified[0]["person"] == notified[0]["purpose"] == EVIL and notified[1]["person"] == PERSON
    assert all(
        one["arguments"] == ["fixed"] and "WARD_DATABASE" not in one["environment"] for one in notified
    )
    assert {one["study"] for one in notified} == {"study"} and notified[0]["formula"] == "sick ~ age"
    assert not list(tmp_path.rglob("run"))


def test_a_command_with_an_open_quote_is_refused_when_the_file_is_read(site, capsys):
    path = site / "East" / "site.toml"
    path.write_text(path.read_text().replace('on_pending = ""', "on_pending = 'mail \"owner'"))
    assert "on_pending" in printed(capsys, "site", "check", site / "East", code=1)


def test_texts_that_cannot_be_shown_are_refused_where_they_are_stated(home):
    for given in ({"person": "x" * 81}, {"study": "a\nb"}, {"purpose": "\x1b[2J"}):
        with pytest.raises(PartitionError, match="expected one line of printable text"):
            fs.ClientPartition.connect(home / "study", **given)
