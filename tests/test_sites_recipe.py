"""The commands of docs/sites.md, typed exactly, by three sites, with plain files and with others."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import psycopg
import pytest
from database_servers import postgresql_server
from operating import printed, serve, serve_by_command, until_true, wait
from test_owner_commands import N, declare, patients

import fedstat as fs
from fedstat.errors import DataWarning
from fedstat.operator.command_line import main

PAGE = Path(__file__).parents[1] / "docs" / "sites.md"
HOSPITALS = {"north": "Cleveland", "south": "Hungary", "east": "Long Beach"}
SHOWS = ("site", "accept", "north")
"""Ends in 1: the owner has not compared the roster yet."""


def lines(of="federation roster"):
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (recipe,) = [block for block in blocks if of in block]
    return [shlex.split(line, comments=True) for line in recipe.splitlines()]


def of(site, word):
    """A word of North's as another site types it."""
    return word.replace("north", site).replace("North", site.capitalize())


@pytest.mark.filterwarnings("ignore:left out rows")
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
        # Strict sites leave the same rows out, wherever they run.
        here = fs.ClientPartition.from_files(files, layout="horizontal", policy="strict")
        fits = [
            fs.GLORE.from_formula("num > 0 ~ age + C(cp)", one).fit(masked=True) for one in (partition, here)
        ]
        assert (fits[0].params == fits[1].params).all() and (fits[0].bse == fits[1].bse).all()
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def edit(folder):
    """Write what `describe` asks for: the key, the dates, the codes."""
    toml = folder / "site.toml"
    text = toml.read_text()
    assert '# key = "patient_id"' in text
    toml.write_text(text.replace('# key = "patient_id"', 'key = "patient_id"', 1))
    declare(
        folder,
        'admitted = { type = "dates", since = "2020-01-01" }\n'
        'sex = { type = "whole numbers", codes = { 1 = "male", 2 = "female" } }\n',
    )


def prepared(frame):
    """The table that the declarations make of a file."""
    days = (pd.to_datetime(frame["admitted"]) - pd.Timestamp("2020-01-01")).dt.days
    sex = frame["sex"].map({1: "male", 2: "female"})
    return frame.assign(admitted=days, sex=sex, smoker=frame["smoker"].astype(int)).drop(columns="patient_id")


def test_a_stranger_serves_a_file_with_identifiers_dates_a_rare_level_and_booleans(
    tmp_path, monkeypatch, capsys
):
    """From init to export, with the edits that `describe` and `check` ask for, and a reload in between."""
    monkeypatch.chdir(tmp_path)
    files = {name: patients(seed) for seed, name in enumerate(HOSPITALS)}
    for name, frame in files.items():
        frame.to_csv(f"{name}.csv", index=False)
    compared, running = "", {}
    try:
        for _, *words in lines():
            for site in HOSPITALS if any("north" in word for word in words) else ("north",):
                typed = [of(site, word).replace("FINGERPRINT", compared) for word in words]
                if typed[:2] == ["site", "serve"]:
                    running[site] = serve(tmp_path / site)
                    wait(tmp_path / site, running[site])
                    continue
                out = printed(capsys, *typed, code=int(tuple(words) == SHOWS))
                if typed[:2] == ["federation", "roster"]:
                    compared = re.search("Fingerprint of the roster  (.*)", out)[1]
                if typed[:2] == ["site", "describe"]:
                    assert "patient_id: looks like an identifier" in out and "admitted: dates" in out
                    edit(tmp_path / site)
                    columns = tmp_path / site / "columns.toml"
                    # The first proposal knows nothing of the declarations; the command says how to renew it.
                    again = printed(capsys, "site", "describe", site, code=1)
                    assert "For a new proposal, remove it and run this command again." in again
                    columns.unlink()
                    printed(capsys, "site", "describe", site)
                    columns.write_text(columns.read_text().replace('"medical"', '"isolation", "medical"'))
                if typed[:2] == ["site", "check"]:
                    assert "No problems found" in out
        words = {"person": "Dr. Ada Klein", "study": "Smoking", "purpose": "A first look"}
        formula = "y ~ age + C(sex) + smoker + admitted"

        def fits():
            served = fs.ClientPartition.connect("study/federation.toml", **words)
            local = {name: prepared(frame) for name, frame in files.items()}
            pooled = fs.ClientPartition.from_frames(local, layout="horizontal")
            return [fs.GLORE.from_formula(formula, one).fit(masked=True).params for one in (served, pooled)]

        np.testing.assert_allclose(*fits(), rtol=1e-7)
        # Half of the records of one site are corrected, as after a check of its export.
        files["north"].loc[: N // 2, "age"] += 1
        files["north"].to_csv("north.csv", index=False)
        printed(capsys, "site", "reload", "north")
        until_true(lambda: "corrected" in printed(capsys, "site", "status", "north"))
        with pytest.warns(DataWarning, match="North"):
            np.testing.assert_allclose(*fits(), rtol=1e-7)
        text = printed(capsys, "site", "export", "north", "--column", "age")
        rows = list(csv.DictReader(text.splitlines()))
        assert rows and {row["person"] for row in rows} == {"Dr. Ada Klein"}
        assert {row["formula"] for row in rows} == {formula}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


DICTIONARY = """
[age]
kind = "number"
range = [18, 120]
unit = "years"

[bmi]
kind = "number"
range = [5, 80]

[sex]
kind = "category"
levels = ["male", "female"]
codes = { 1 = "male", 2 = "female" }

[ward]
kind = "category"
levels = ["isolation", "medical", "surgical"]

[smoker]
kind = "category"
levels = [false, true]

[admitted]
kind = "number"
range = [0, 4000]
since = "2020-01-01"

[y]
kind = "number"
range = [0, 1]
levels = [0, 1]
"""
VIEW = """CREATE VIEW study AS
    SELECT patient_id, age, bmi, sex, ward, smoker, admitted, y FROM patients WHERE patient_id > 0"""


def export_as_a_hospital(frame, path):
    """Semicolons, decimal commas, latin-1, a title, dates with points, blanks, a column of remarks."""
    text = frame.assign(
        bmi=frame["bmi"].map(lambda value: str(value).replace(".", ",")),
        admitted=frame["admitted"].dt.strftime("%d.%m.%Y"),
        smoker=frame["smoker"].map({True: "TRUE", False: "FALSE"}),
        ward=frame["ward"] + " ",
        remark="für später",
    )
    path.write_bytes(("Export; Station 7\n" + text.to_csv(sep=";", index=False)).encode("latin-1"))


def fill_database(address, frame):
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE patients (patient_id BIGINT, admitted DATE, age INTEGER, sex INTEGER, ward TEXT, "
            "smoker BOOLEAN, y INTEGER, bmi DOUBLE PRECISION)"
        )
        rows = [tuple(row) for row in frame.astype(object).to_numpy().tolist()]
        connection.cursor().executemany(f"INSERT INTO patients VALUES ({', '.join(['%s'] * 8)})", rows)
        connection.execute(VIEW)


def test_a_file_of_a_hospital_a_view_and_a_parquet_file_are_served_without_a_wrong_turn(
    tmp_path, monkeypatch, capsys
):
    """Every command ends as the page says; the only edits are those that the commands name."""
    monkeypatch.chdir(tmp_path)
    frames = {
        name: patients(seed).assign(bmi=np.random.default_rng(seed).normal(26, 4, N).round(1))
        for seed, name in enumerate(HOSPITALS)
    }
    export_as_a_hospital(frames["north"], Path("north.csv"))
    frames["east"].assign(admitted=frames["east"]["admitted"].dt.date).to_parquet("east.parquet")
    compared, running = "", {}
    with postgresql_server() as address:
        fill_database(address, frames["south"])
        monkeypatch.setenv("WARD_DATABASE", address)
        recipe = lines()
        at = next(i for i, words in enumerate(recipe) if words[1:3] == ["site", "describe"])
        dictionary = [words for words in lines("federation dictionary") if "describe" not in words][:-1]
        try:
            for _, *words in [*recipe[:at], *dictionary, *recipe[at:]]:
                for site in HOSPITALS if any("north" in word for word in words) else ("north",):
                    typed = [of(site, word).replace("FINGERPRINT", compared) for word in words]
                    if typed[:2] == ["site", "serve"]:
                        # A forked process has the environment of an earlier time, without the database.
                        start = serve_by_command if site == "south" else serve
                        running[site] = start(tmp_path / site)
                        wait(tmp_path / site, running[site])
                        continue
                    if typed[:2] == ["site", "init"] and site == "south":
                        del typed[typed.index("--data") : typed.index("--data") + 2]
                    typed = [word.replace("east.csv", "east.parquet") for word in typed]
                    if typed[:2] == ["federation", "dictionary"]:
                        Path("study/dictionary.toml").write_text(DICTIONARY)
                    out = printed(capsys, *typed, code=int(tuple(words) == SHOWS))
                    if typed[:2] == ["federation", "roster"]:
                        compared = re.search("Fingerprint of the roster  (.*)", out)[1]
                    if typed[:2] == ["site", "init"] and site == "north":
                        assert "has the encoding latin-1, semicolons between columns, 1 line above" in out
                    if typed[:2] == ["site", "init"] and site == "south":
                        toml = tmp_path / "south" / "site.toml"
                        text = toml.read_text().replace('kind = "csv"', 'kind = "sql"', 1)
                        text = text.replace('path = "records.csv"', 'query = "SELECT * FROM study"', 1)
                        text = text.replace('# env = "WARD', 'env = "WARD').replace(
                            '# key = "patient_id"', 'key = "patient_id"', 1
                        )
                        toml.write_text(text)
                    if typed[:2] == ["site", "check"]:
                        assert "No problems found" in out
            formula = "y ~ age + bmi + C(sex) + smoker + admitted"
            served = fs.ClientPartition.connect("study/federation.toml")
            local = {
                name: prepared(frame).assign(sex=lambda held: pd.Categorical(held["sex"], ["male", "female"]))
                for name, frame in frames.items()
            }
            pooled = fs.ClientPartition.from_frames(local, layout="horizontal")
            fits = [fs.GLORE.from_formula(formula, one).fit(masked=True) for one in (served, pooled)]
            np.testing.assert_allclose(fits[0].params, fits[1].params, rtol=1e-7)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
