"""One roster that is compared once replaces a card from every site to every other one."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace

import pandas as pd
import pytest
from operating import OPEN, printed, served_sites

import fedstat as fs
from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.crypto.rosters import Roster, announce_roster, check_rosters
from fedstat.operator.command_line import main
from fedstat.operator.rosters import roster_remarks

RECORDS = pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58] * 6, "ill": [1.0, 0, 1, 0, 0, 1] * 6})
SITES = ("A", "B", "C")


def make_site(home, name):
    RECORDS.to_csv(home / f"{name}.csv", index=False)
    data = ["--data", str(home / f"{name}.csv"), "--exchange", str(home / "study" / "exchange")]
    assert main(["site", "init", str(home / name), "--name", name, *data]) == 0
    (home / name / "policy.toml").write_text(OPEN.to_toml())


def join(home, name):
    assert main(["federation", "join", str(home / "study"), str(home / name)]) == 0


def last(home):
    path = home / "study" / "roster.json"
    return Roster.read(path.read_bytes(), "the roster")


def site_file(home, name):
    return tomllib.loads((home / name / "site.toml").read_text())


@pytest.fixture
def home(tmp_path):
    """Folders of a coordinator and three sites; none has pinned another one."""
    main(["federation", "new", str(tmp_path / "study")])
    for name in SITES:
        make_site(tmp_path, name)
        join(tmp_path, name)
    main(["federation", "roster", str(tmp_path / "study")])
    return tmp_path


def accept(home, capsys, name, *more, code=0):
    return printed(
        capsys, "site", "accept", home / name, "--fingerprint", last(home).fingerprint, *more, code=code
    )


def test_one_fingerprint_enrols_everybody(home, capsys):
    before = site_file(home, "A")
    text = printed(capsys, "site", "accept", home / "A", code=1)
    assert last(home).fingerprint in text and "with another site" in text and site_file(home, "A") == before
    wrong = "0000 " * 16
    text = printed(capsys, "site", "accept", home / "A", "--fingerprint", wrong, code=1)
    assert "not the roster that was compared" in text and site_file(home, "A") == before
    for name in SITES:
        accept(home, capsys, name)
        found = site_file(home, name)
        assert found["pinned"] == dict(last(home).sites) and found["roster"] == {"1": last(home).digest}
        assert found["coordinator"] == last(home).coordinator
    with served_sites(home, SITES):
        text = printed(capsys, "federation", "test", home / "study", "--timeout", "600")
        assert "All sites have accepted roster 1." in text
        partition = fs.ClientPartition.connect(home / "study")
        fit = fs.GLORE.from_formula("ill ~ age", partition).fit(masked=True)
        files = {name: str(home / f"{name}.csv") for name in SITES}
        here = fs.GLORE.from_formula(
            "ill ~ age", fs.ClientPartition.from_files(files, layout="horizontal")
        ).fit(masked=True)
        assert (fit.params == here.params).all() and (fit.bse == here.bse).all()


def test_a_new_site_is_the_only_thing_that_the_next_roster_shows(home, capsys):
    for name in SITES:
        accept(home, capsys, name)
    assert "Roster 1 of study has not changed" in printed(capsys, "federation", "roster", home / "study")
    make_site(home, "D")
    join(home, "D")
    old = (home / "study" / "roster.json").read_text()
    assert "Roster 2 of study was made" in printed(capsys, "federation", "roster", home / "study")
    text = accept(home, capsys, "A")
    lines = [line.split()[:4] for line in text.splitlines()]
    assert ["D", "new"] in [line[:2] for line in lines] and ["3", "other", "keys", "as"] in lines
    assert last(home).sites["B"] not in text
    # an older one is put back, at the place from which sites take it
    (home / "study" / "exchange" / "roster.json").write_text(old)
    text = printed(capsys, "site", "accept", home / "A", code=1)
    assert "roster 1 is older than roster 2" in text and len(site_file(home, "A")["roster"]) == 2
    # who is new has the history along
    (home / "study" / "exchange" / "roster.json").write_bytes((home / "study" / "roster.json").read_bytes())
    accept(home, capsys, "D")
    assert site_file(home, "D")["roster"] == {"1": last(home).earlier[0], "2": last(home).digest}
    text = "\n".join(_remarks(home))
    assert "Roster 2 is not yet accepted by B (roster 1), C (roster 1)" in text


def _remarks(home):
    return list(roster_remarks(home / "study"))


def test_a_countersignature_goes_by_mail_where_no_folder_is_shared(home, capsys):
    folder = home / "A"
    accept(home, capsys, "A")
    (home / "study" / "exchange" / "A" / "roster.accepted").unlink()
    assert "A (none)" in _remarks(home)[-1]
    text = printed(capsys, "federation", "accept", home / "study", folder / "A.accepted")
    assert "A has accepted roster 1" in text and "accepted by B (none), C (none)" in text


@pytest.mark.parametrize(
    "alter",
    [
        lambda content: content["sites"].update(B=Identity.generate().public.fingerprint),
        lambda content: content.update(number=2),
        lambda content: content.update(coordinator=Identity.generate().public.fingerprint),
        lambda content: content["sites"].pop("B"),
    ],
)
def test_an_intruder_at_the_files_changes_nothing(home, capsys, alter):
    """Neither by a changed roster, nor by one that it signed itself, nor by a false countersignature."""
    path, before = home / "study" / "exchange" / "roster.json", site_file(home, "A")
    content = json.loads(path.read_text())
    alter(content["content"])
    path.write_text(json.dumps(content))
    assert (
        "altered since it was signed" in accept(home, capsys, "A", code=1) and site_file(home, "A") == before
    )
    stranger = Identity.generate()
    reported = last(home)
    forged = {name: getattr(reported, name) for name in ("name", "number", "date", "layout", "sites")}
    path.write_text(Roster(**forged, coordinator=stranger.public.fingerprint).sign(stranger))
    assert "not the roster that was compared" in accept(home, capsys, "A", code=1)
    assert site_file(home, "A") == before
    path.write_bytes((home / "study" / "roster.json").read_bytes())
    accept(home, capsys, "B")
    exchange = home / "study" / "exchange"
    (exchange / "A").mkdir(exist_ok=True)
    shutil.copy(exchange / "B" / "roster.accepted", exchange / "A" / "roster.accepted")
    said = _remarks(home)
    assert "not signed by a site of this federation under its name" in said[0] and "A (none)" in said[-1]
    for text in (b"[" * 100_000, b"", b"\xff" * 100, b"{}"):
        path.write_bytes(text)
        assert "Error" not in printed(capsys, "site", "accept", home / "A", code=1)


def test_who_has_accepted_is_known_before_any_site_was_asked(home, capsys):
    accept(home, capsys, "A")
    text = printed(capsys, "federation", "status", home / "study", "--json", code=1)
    found = {name: site["roster"] for name, site in json.loads(text)["sites"].items()}
    assert found == {"A": 1, "B": None, "C": None}


def test_one_key_takes_part_under_one_name(home, capsys):
    card = home / "twin.toml"
    card.write_text((home / "A" / "card.toml").read_text().replace('"A"', '"Twin"'))
    text = printed(capsys, "federation", "join", home / "study", card, code=1)
    assert "is that of site A" in text and "Twin" not in (home / "study" / "federation.toml").read_text()
    made = last(home)
    identity = Identity.load(home / "study" / "identity.json")
    twice = replace(made, sites={**made.sites, "Twin": made.sites["A"]}).sign(identity)
    with pytest.raises(SecurityError, match="do not belong together"):
        Roster.read(twice, "the roster")


def test_a_site_looks_for_its_own_key_and_for_keys_that_it_knows(home, capsys):
    printed(capsys, "site", "init", home / "false", "--name", "B")
    for name in SITES:
        accept(home, capsys, name)
    old = site_file(home, "A")["pinned"]["B"]
    printed(capsys, "federation", "join", home / "study", home / "false", "--replace", old)
    printed(capsys, "federation", "roster", home / "study")
    assert "lists B with another key than its own" in accept(home, capsys, "B", code=1)
    text = accept(home, capsys, "A", code=1)
    assert old in text and "--replace" in text and site_file(home, "A")["pinned"]["B"] == old
    accept(home, capsys, "A", "--replace", old)
    assert site_file(home, "A")["pinned"]["B"] == last(home).sites["B"]


def test_two_rosters_of_one_number_are_found(home, capsys):
    """The coordinator shows C another roster, in which a further site is its own."""
    for name in ("A", "B"):
        accept(home, capsys, name)
    reported, identity = last(home), Identity.load(home / "study" / "identity.json")
    sites = {**reported.sites, "D": Identity.generate().public.fingerprint}
    other = Roster(reported.name, 1, reported.date, reported.layout, reported.coordinator, sites)
    path = home / "other.json"
    path.write_text(other.sign(identity))
    printed(capsys, "site", "accept", home / "C", path, "--fingerprint", other.fingerprint)
    with served_sites(home, SITES):
        text = printed(capsys, "federation", "test", home / "study", "--timeout", "600", code=1)
        assert "A: 'C' has accepted another roster 1 than this site" in text
        partition = fs.ClientPartition.connect(home / "study")
        with pytest.raises(SecurityError, match="has accepted another roster 1"):
            fs.GLORE.from_formula("ill ~ age", partition).fit(masked=True)
    # nor does a site take a second one, or one that does not go on from its own
    for text in (
        other,
        Roster(
            reported.name,
            2,
            reported.date,
            reported.layout,
            reported.coordinator,
            sites,
            earlier=(other.digest,),
        ),
    ):
        path.write_text(text.sign(identity))
        said = printed(capsys, "site", "accept", home / "A", path, "--fingerprint", text.fingerprint, code=1)
        assert "roster 1 differs from the roster 1 that A accepted" in said


def test_rosters_travel_signed_for_their_session():
    keys = {name: Identity.generate() for name in "AB"}
    public = {name: key.public for name, key in keys.items()}
    one, two = {"1": "a" * 64}, {"1": "a" * 64, "2": "b" * 64}
    reported = {
        name: announce_roster(keys[name], "s", name, {"A": one, "B": two}[name], "{}") for name in "AB"
    }
    # B is ahead, and A's roster is in its history
    for name, rosters in (("A", one), ("B", two)):
        assert check_rosters(name, "s", rosters, public, reported) == {"A": "{}", "B": "{}"}
    assert check_rosters("A", "s", {}, public, reported) == {"A": "{}", "B": "{}"}
    with pytest.raises(SecurityError, match="another roster 2"):
        check_rosters("A", "s", {**two, "2": "c" * 64}, public, reported)
    with pytest.raises(SecurityError, match="was replaced on its way"):
        check_rosters("A", "another", one, public, reported)
    with pytest.raises(SecurityError, match="'B' shows no roster"):
        check_rosters("A", "s", one, public, {**reported, "B": "{}"})
    with pytest.raises(SecurityError, match="was replaced on its way"):
        check_rosters("A", "s", one, public, {**reported, "B": reported["B"].replace("b" * 64, "a" * 64)})


def test_a_site_that_is_taken_out_is_unpinned_and_joins_no_more_unasked(home, capsys):
    for name in SITES:
        accept(home, capsys, name)
    key = last(home).sites["C"]
    assert "its sites are A, B, C" in printed(capsys, "federation", "remove", home / "study", "X", code=1)
    assert "Roster 2, without it" in printed(capsys, "federation", "remove", home / "study", "C")
    listed = tomllib.loads((home / "study" / "federation.toml").read_text())
    assert listed["revoked"] == {key: "C"} and list(listed["sites"]) == ["A", "B"]
    text = accept(home, capsys, "A")
    assert "removed" in text and set(site_file(home, "A")["pinned"]) == {"A", "B"}
    assert "lists C as removed" in accept(home, capsys, "C", code=1)
    assert "joins" not in printed(capsys, "federation", "join", home / "study", home / "A")
    text = printed(capsys, "federation", "join", home / "study", home / "C", code=1)
    assert "was removed" in text and "--again" in text
    assert "C" not in tomllib.loads((home / "study" / "federation.toml").read_text())["sites"]
    # B has not accepted the roster without it, and a number behind is not another roster
    with served_sites(home, ("A", "B")):
        text = printed(capsys, "federation", "test", home / "study", "--timeout", "600")
        assert "Roster 2 is not yet accepted by B (roster 1)" in text
    printed(capsys, "federation", "join", home / "study", home / "C", "--again")
    printed(capsys, "federation", "roster", home / "study")
    assert last(home).number == 3 and not last(home).revoked
    accept(home, capsys, "A")
    assert site_file(home, "A")["pinned"]["C"] == key
