"""Pinned keys: none is replaced without a word, and a trial says who has not pinned whom."""

from __future__ import annotations

import tomllib

import pandas as pd
import pytest
from operating import make_federation, printed, served_sites

from fedstat.operator.command_line import main

RECORDS = pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58]})
SITES = ("A", "B", "C")


def fingerprint(folder):
    return tomllib.loads((folder / "card.toml").read_text())["fingerprint"]


@pytest.fixture
def home(tmp_path):
    make_federation(tmp_path, dict.fromkeys(SITES, RECORDS))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "made"),
    [
        (("site", "pin", "A"), ("site", "init", "new", "--name", "B")),
        (("site", "pin", "A"), ("federation", "new", "new", "--name", "other")),
        (("federation", "join", "study"), ("site", "init", "new", "--name", "B")),
    ],
)
def test_a_known_key_is_replaced_by_who_names_it_only(home, capsys, command, made):
    """A card that was replaced on its way put its key over one that people had compared."""
    printed(capsys, *made[:2], home / made[2], *made[3:])
    words = (*command[:2], home / command[2], home / "new")
    path = home / command[2] / ("site.toml" if command[0] == "site" else "federation.toml")
    before, new = path.read_bytes(), fingerprint(home / "new")
    known = fingerprint(home / ("study" if made[0] == "federation" else "B"))
    for more in ((), ("--replace", new), ("--replace", known[:-1])):
        text = printed(capsys, *words, *more, code=1)
        assert known in text and new in text and "telephone" in text and path.read_bytes() == before
    printed(capsys, *words, "--replace", known.upper().replace(" ", ":"))
    assert new in path.read_text() and known not in path.read_text()
    printed(capsys, *words)


def test_the_test_of_a_federation_says_who_has_not_pinned_whom(home, capsys):
    """It said yes, and the first masked fit ended in the refusal of one of them."""
    for site, other in (("A", "C"), ("B", "A"), ("B", "C")):
        printed(capsys, "site", "revoke", home / site, other)
    with served_sites(home, SITES):
        test = ("federation", "test", home / "study", "--timeout", "600")
        text = printed(capsys, *test, code=1)
        assert (
            "A: its owner has pinned no key of C" in text and "B: its owner has pinned no key of A, C" in text
        )
        assert text.count("  - ") == 2 and text.count(" yes ") == 3
        for site, other in (("A", "C"), ("B", "A"), ("B", "C")):
            printed(capsys, "site", "pin", home / site, home / other)
        printed(capsys, *test)
        printed(capsys, "site", "init", home / "false", "--name", "C")
        printed(capsys, "site", "pin", home / "A", home / "false", "--replace", fingerprint(home / "C"))
        text = printed(capsys, *test, code=1)
        assert "A: not the pinned key: 'C'" in text and text.count("  - ") == 1
        (home / "A" / "policy.toml").write_text('families = ["schema"]\n')
        printed(capsys, "site", "pin", home / "A", home / "C", "--replace", fingerprint(home / "false"))
        # whose owner wants no masked sums is no fault
        assert "is refused" not in printed(capsys, *test)


def test_what_is_refused_leaves_no_folder_behind(tmp_path):
    words = ["site", "init", str(tmp_path / "site"), "--name", "A", "--exchange"]
    assert main([*words, "s3://UPPER/x"]) == 1
    assert not (tmp_path / "site").exists()
    assert main([*words, "s3://bucket/x"]) == 0
