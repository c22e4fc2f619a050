"""The commands of docs/sites.md, typed as they are written, by three sites."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from operating import serve_by_command, wait

import fedstat as fs
from fedstat.operator.command_line import main

PAGE = Path(__file__).parents[1] / "docs" / "sites.md"
HOSPITALS = {"north": "Cleveland", "south": "Hungary", "east": "Long Beach"}
SHOWS = ("site", "accept", "north")
"""Ends in 1: the owner has not compared the roster yet."""


def lines():
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (recipe,) = [block for block in blocks if "federation roster" in block]
    return [shlex.split(line, comments=True) for line in recipe.splitlines()]


def of(site, word):
    """A word of North's as another site types it."""
    return word.replace("north", site).replace("North", site.capitalize())


def test_the_recipe_runs_as_written_and_a_fit_is_that_of_local_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    patients, files = fs.datasets.make_hospitals(), {}
    for site, hospital in HOSPITALS.items():
        files[site.capitalize()] = f"{site}.csv"
        patients[patients["hospital"] == hospital].drop(columns="hospital").to_csv(f"{site}.csv", index=False)
    compared, running = "", {}
    try:
        for program, *words in lines():
            assert program == "fedstat"
            for site in HOSPITALS if any("north" in word for word in words) else ("north",):
                typed = [of(site, word).replace("FINGERPRINT", compared) for word in words]
                if typed[:2] == ["site", "serve"]:
                    running[site] = serve_by_command(tmp_path / site)
                    wait(tmp_path / site, running[site])
                    continue
                assert main(typed) == (tuple(words) == SHOWS), capsys.readouterr()
                said = capsys.readouterr().out
                if typed[:2] == ["federation", "roster"]:
                    compared = re.search("Fingerprint of the roster  (.*)", said)[1]
        assert said.count(" yes ") == 3 and "All sites have accepted roster 1." in said
        partition = fs.ClientPartition.connect("study/federation.toml")
        here = fs.ClientPartition.from_files(files, layout="horizontal")
        fits = [
            fs.GLORE.from_formula("num > 0 ~ age + C(cp)", one).fit(masked=True) for one in (partition, here)
        ]
        assert (fits[0].params == fits[1].params).all() and (fits[0].bse == fits[1].bse).all()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
