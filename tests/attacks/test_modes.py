"""Somebody else on the same machine: files of a site that others can read or write are not used."""

import os
import stat

import pandas as pd
import pytest

from fedstat.errors import SecurityError
from fedstat.federation.files import read_private
from fedstat.federation.message import Request, pack_request
from fedstat.federation.partition.federation_file import read_federation
from fedstat.federation.transport.site_folder import PRIVATE, open_site
from fedstat.operator.command_line import main

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path):
    """A folder that was there before, open to others, as under the usual mask."""
    before = os.umask(0o022)
    pd.DataFrame({"x": [float(i) for i in range(20)]}).to_csv(tmp_path / "records.csv", index=False)
    place = tmp_path / "north"
    place.mkdir(mode=0o755)
    data = ["--data", str(tmp_path / "records.csv")]
    assert main(["site", "init", str(place), "--name", "North", *data]) == 0
    yield place
    os.umask(before)


def test_what_the_commands_write_is_private(folder):
    assert main(["site", "describe", str(folder)]) == 0
    assert main(["site", "seed", str(folder)]) == 0
    site = open_site(folder)
    site.answer(pack_request(Request("North", "schema", "describe_table", {}, "s", "{}")))
    site._data.site_ledger.keep_answered({}, 20)
    site.site_ledger.store.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = modes(folder)
    assert {"site.toml", "policy.toml", "identity.json", "ledger.head", "answered.npz"} <= found.keys()
    assert {name for name, mode in found.items() if mode & 0o077} <= {"card.toml"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
@pytest.mark.parametrize("name", ["site.toml", "policy.toml", "identity.json", "ledger.jsonl", "ledger.key"])
def test_a_file_that_others_may_use_is_a_refusal_with_its_remedy(folder, name, mode, capsys):
    (folder / name).chmod(mode)
    with pytest.raises(SecurityError, match=f"others can .*chmod 600 '.*{name}'"):
        open_site(folder)
    assert main(["site", "check", str(folder)]) == 1
    assert "chmod 600" in "".join(capsys.readouterr())
    (folder / name).chmod(0o600)
    open_site(folder).site_ledger.store.close()


def test_so_is_an_open_folder(folder):
    folder.chmod(0o750)
    with pytest.raises(SecurityError, match=r"chmod 700 '.*north'"):
        open_site(folder)


def test_all_at_once_are_mended_by_what_the_error_says(folder):
    folder.chmod(0o755)
    there = [name for name in PRIVATE if (folder / name).exists()]
    for name in there:
        (folder / name).chmod(0o644)
    with pytest.raises(SecurityError) as problem:
        open_site(folder)
    commands = str(problem.value).split(" replies: ")[1]
    assert os.system(commands.replace("; ", " && ")) == 0
    open_site(folder).site_ledger.store.close()


def test_fingerprints_that_others_may_exchange_are_not_believed(tmp_path):
    study = tmp_path / "study"
    assert main(["federation", "new", str(study)]) == 0
    read_federation(study)
    (study / "federation.toml").chmod(0o664)
    with pytest.raises(SecurityError, match="chmod go-w"):
        read_federation(study)


def test_a_pipe_in_the_place_of_a_secret_holds_nobody(tmp_path):
    os.mkfifo(tmp_path / "identity.json", 0o600)
    with pytest.raises(SecurityError, match="not a plain file"):
        read_private(tmp_path / "identity.json")
