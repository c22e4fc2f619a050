"""Pages on reach, executed: the dictionary of sites.md as typed, OMOP tables, and R."""

import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from database_servers import postgresql_server
from operating import make_federation, printed
from test_owner_commands import patients
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.federation.disclosure.policy import Policy

DOCS = Path(__file__).parents[1] / "docs"


def block(page, language, word):
    found = re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)
    (text,) = [one for one in found if word in one]
    return text


def close(federation):
    for site in federation.sites.values():
        site.site.site_ledger.store.close()


def test_the_dictionary_is_typed_as_the_page_has_it(tmp_path, monkeypatch, capsys):
    """A file with identifiers, dates, a rare level and booleans, by three owners without a wrong turn."""
    monkeypatch.chdir(tmp_path)
    names = ("North", "South", "East")
    frames = {name: patients(seed).assign(patient=lambda t: t.index // 2) for seed, name in enumerate(names)}
    make_federation(tmp_path, frames, policy=Policy.strict())
    for name in frames:
        toml = tmp_path / name / "site.toml"
        toml.write_text(toml.read_text().replace('# key = "patient_id"', 'key = "patient_id"', 1))
    (tmp_path / "study" / "dictionary.toml").write_text(block("sites.md", "toml", "codes"))
    for line in block("sites.md", "sh", "federation dictionary").splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "fedstat"
        for name in frames if "north" in words else ("North",):
            text = printed(capsys, *[name if word == "north" else word for word in words])
    assert "No problems found" in text
    # the page has no outcome: any published column is one
    federation = None
    try:
        study = Federation.__new__(Federation)
        study.home, study.log = tmp_path, []
        federation = study
        from fedstat.federation.transport.signed import SignedSite
        from fedstat.federation.transport.site_folder import load_identity

        study.sites = {name: SignedSite(tmp_path / name, name, study.log.append) for name in frames}
        study.coordinator = load_identity(tmp_path / "study")
        result = fs.FederatedOLS.from_formula("age ~ C(sex) + admitted", study.connect()).fit(masked=True)
        assert result.nobs == sum(map(len, frames.values()))
    finally:
        close(federation)


@contextmanager
def databases(kind, folder):
    """Return a function that makes a database of this kind from tables, and returns its address."""
    if kind == "postgresql":
        engine = pytest.importorskip("sqlalchemy").create_engine
        with postgresql_server() as address:

            def fill(name, tables):
                own = address.removesuffix("postgres") + name.lower()
                driver = "postgresql+psycopg"
                with engine(address.replace("postgresql", driver, 1)).connect() as connection:
                    alone = connection.execution_options(isolation_level="AUTOCOMMIT")
                    alone.exec_driver_sql(f"CREATE DATABASE {name.lower()}")
                for table, held in tables.items():
                    held.to_sql(table, engine(own.replace("postgresql", driver, 1)), index=False)
                return own

            yield fill
    elif kind == "duckdb":
        duckdb = pytest.importorskip("duckdb")

        def fill(name, tables):
            with duckdb.connect(folder / f"{name}.duckdb") as connection:
                for table, held in tables.items():
                    connection.register("held", held)
                    connection.execute(f"CREATE TABLE {table} AS SELECT * FROM held")
            return f"duckdb:///{folder / name}.duckdb"

        yield fill
    else:

        def fill(name, tables):
            with sqlite3.connect(folder / f"{name}.db") as connection:
                for table, held in tables.items():
                    held.to_sql(table, connection, index=False)
            return f"sqlite:///{folder / name}.db"

        yield fill


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "duckdb"])
def test_the_query_of_omop_tables(tmp_path, monkeypatch, capsys, kind):
    with databases(kind, tmp_path) as fill:
        query_omop_tables(tmp_path, monkeypatch, capsys, fill)


def query_omop_tables(tmp_path, monkeypatch, capsys, fill):
    rng, frames = np.random.default_rng(3), {}
    toml = block("omop.md", "toml", "person_id")
    for name in "ABC":
        n = 150
        person = pd.DataFrame(
            {
                "person_id": np.arange(n),
                "year_of_birth": rng.integers(1930, 2000, n),
                "gender_concept_id": rng.choice([8507, 8532], n),
            }
        )
        condition = pd.DataFrame(
            {"person_id": rng.choice(n, 60, replace=False), "condition_concept_id": 201826}
        )
        measurement = pd.DataFrame(
            {
                "person_id": rng.integers(0, n, 5 * n),
                "measurement_concept_id": rng.choice([3004249, 3012888], 5 * n),
                "value_as_number": rng.normal(130, 15, 5 * n).round(1),
            }
        )
        tables = {"person": person, "condition_occurrence": condition, "measurement": measurement}
        monkeypatch.setenv(f"OMOP_{name}", fill(name, tables))
        means = (
            measurement[measurement["measurement_concept_id"] == 3004249]
            .groupby("person_id")["value_as_number"]
            .mean()
        )
        frames[name] = pd.DataFrame(
            {
                "age": 2020 - person["year_of_birth"],
                "sex": person["gender_concept_id"].map({8507: "male", 8532: "female"}),
                "diabetes": person["person_id"].isin(condition["person_id"]).astype(int),
                "systolic": person["person_id"].map(means),
            }
        )
    make_federation(tmp_path, frames, policy=Policy.strict())
    for name in "ABC":
        path = tmp_path / name / "site.toml"
        before, rest = path.read_text().split("[data]\n")
        rest = rest[rest.index("# Types of the columns") :]
        path.write_text(before + toml.replace("OMOP_DATABASE", f"OMOP_{name}") + rest)
        printed(capsys, "site", "describe", tmp_path / name)
    federation, formula = Federation(tmp_path), "diabetes ~ age + C(sex) + systolic"
    try:
        with pytest.warns(match="left out"):
            served = fs.GLORE.from_formula(formula, federation.connect()).fit(masked=True)
        with pytest.warns(match="left out"):
            pooled = fs.GLORE.from_formula(
                formula, fs.ClientPartition.from_frames(frames, layout="horizontal")
            ).fit()
        np.testing.assert_allclose(served.params, pooled.params, rtol=1e-8)
    finally:
        close(federation)


def has_reticulate():
    test = 'quit(status = !requireNamespace("reticulate", quietly = TRUE))'
    return shutil.which("Rscript") and not subprocess.run(["Rscript", "-e", test], check=False).returncode


def run_in_r(script, path):
    """Output of a block of R, which calls the package of this test."""
    if not has_reticulate():
        pytest.skip("needs R with reticulate")
    path.write_text(script)
    environment = os.environ | {"FEDSTAT_PYTHON": sys.executable, "RETICULATE_PYTHON": sys.executable}
    found = subprocess.run(["Rscript", path], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_study_in_r_has_the_numbers_of_python_and_of_the_pooled_table(tmp_path):
    script = block("from-r.md", "r", "# 1. A first table")
    assert len([line for line in script.splitlines() if line.strip()]) <= 35
    printed = run_in_r(script, tmp_path / "study.R")
    hospitals = fs.datasets.make_hospitals()
    partition = fs.ClientPartition.from_frame(hospitals, by="hospital")
    fit = fs.GLORE.from_formula("num > 0 ~ age + C(sex) + C(cp)", partition).fit(masked=True)
    table = fs.table_one(partition, ["age", "cp"], by="sex")
    for line in str(table.summary()).splitlines():
        assert line in printed
    pooled = smf.glm(
        "ill ~ age + C(sex) + C(cp)",
        hospitals.assign(ill=(hospitals.num > 0).astype(float)),
        family=sm.families.Binomial(),
    ).fit()
    rows = {}
    for line in printed[printed.index("conf_high") :].splitlines():
        rows.setdefault(line.split()[1] if len(line.split()) > 2 else "", []).append(line.split()[2:])
    ratios = np.exp(np.column_stack([pooled.params, pooled.conf_int()]))
    margins = fit.get_margeff().tidy().set_index("term")
    differ = fit.heterogeneity.tidy().set_index("term")
    for term, ratio in zip(pooled.params.index, ratios, strict=True):
        found = [np.array(cells, dtype=float) for cells in rows[term]]
        np.testing.assert_allclose(found[0], ratio, rtol=2e-5)
        if term != "Intercept":
            np.testing.assert_allclose(found[1], margins.loc[term, ["estimate", "std_error"]], rtol=2e-5)
        columns = ["sites", "Q", "p_value", "I2"]
        np.testing.assert_allclose(found[-1], differ.loc[term, columns].astype(float), rtol=2e-5, atol=1e-6)
    patient = pd.DataFrame({"age": [60.0], "sex": [1], "cp": [4]})
    expected = float(pooled.predict(patient)[0])
    assert float(printed.split("probability")[1]) == pytest.approx(expected, abs=1e-6)


def test_the_page_on_r(tmp_path):
    printed = run_in_r(block("from-r.md", "r", "print(fit$tidy())"), tmp_path / "page.R")
    hospitals = fs.datasets.make_hospitals()
    partition = fs.ClientPartition.from_frame(hospitals, by="hospital")
    fit = fs.GLORE.from_formula("num > 0 ~ age + C(sex)", partition).fit(masked=True)
    assert f"{fit.params['age']:.4f}" in printed
