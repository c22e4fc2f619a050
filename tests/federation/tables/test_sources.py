"""Sources of a site's records: the same rows from each, never written to, and no secret in a message."""

import logging
import pickle
import sqlite3
import subprocess
import sys
import tomllib
import traceback
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import psycopg
import pytest
from database_servers import SECRET, postgresql_server

from fedstat import GLORE
from fedstat.errors import DesignError, FedstatError, NotAvailableError, PartitionError, SecurityError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.schema import table_schema
from fedstat.federation.tables.database import Database, open_database
from fedstat.federation.tables.sources import DeclaredColumn, Source, open_source, read_source
from fedstat.federation.tables.sql_table import SqlTable
from fedstat.federation.tables.table import ParquetTable

N = 700
DATABASES = ("sqlite", "duckdb", "postgresql")
COLUMNS = ["age", "dose", "grade", "ill"]


def records(seed, n=N):
    """Numbers with all their digits, whole numbers, text with quotes, missing cells."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"patient": rng.permutation(10 * n)[:n]}).sort_values("patient", ignore_index=True)
    frame["age"] = rng.normal(60, 10, n)
    frame["dose"] = rng.integers(0, 9, n).astype(float)
    frame["grade"] = rng.choice(["low", "it's", "50% hi:gh"], n)
    frame["ill"] = (rng.random(n) < 1 / (1 + np.exp(1 - (frame["age"] - 60) / 10))).astype(int)
    frame.loc[rng.random(n) < 0.1, "dose"] = np.nan
    return frame


def rows_of(frame):
    return [tuple(None if pd.isna(v) else v for v in row) for row in frame.astype(object).to_numpy().tolist()]


def fill(connection, table, frame, mark):
    """Create a table with its rows in reverse, so that a query must order them."""
    connection.execute(
        f"CREATE TABLE {table} (patient BIGINT, age DOUBLE PRECISION, dose BIGINT, grade TEXT, ill INTEGER)"
    )
    rows = rows_of(frame)[::-1]
    run = connection.cursor() if isinstance(connection, psycopg.Connection) else connection
    run.executemany(f"INSERT INTO {table} VALUES ({', '.join([mark] * 5)})", rows)


@pytest.fixture(scope="module")
def postgres():
    """Connection string of the superuser of a server that lives as long as these tests."""
    with postgresql_server() as address:
        yield address


@pytest.fixture(scope="module")
def addresses(tmp_path_factory, request):
    """Fill a database of each kind with two wards when first needed; return its connection string."""
    folder = tmp_path_factory.mktemp("databases")
    made = {}

    def address(kind):
        if kind not in made:
            wards = {f"ward{seed}": records(seed) for seed in (0, 1)}
            if kind == "postgresql":
                made[kind] = request.getfixturevalue("postgres")
                connection, mark = psycopg.connect(made[kind], autocommit=True), "%s"
                # an account whose numbers are written with fewer digits than they have
                connection.execute("ALTER ROLE owner SET extra_float_digits = -3")
            else:
                made[kind] = f"{kind}:///{folder}/wards.{kind}"
                path = f"{folder}/wards.{kind}"
                connection, mark = (sqlite3 if kind == "sqlite" else duckdb).connect(path), "?"
            for table, frame in wards.items():
                fill(connection, table, frame, mark)
            connection.commit()
            connection.close()
        return made[kind]

    return address


def connected(kind, address):
    """A connection of the test's own."""
    path = address.split("///")[-1]
    connect = {"sqlite": sqlite3, "duckdb": duckdb}.get(kind)
    return connect.connect(path) if connect else psycopg.connect(address)


@pytest.fixture
def ask(addresses, monkeypatch):
    """Open a query at a database of some kind."""

    def opened(kind, query="SELECT * FROM ward0", key="patient", **entries):
        monkeypatch.setenv("WARD_DATABASE", addresses(kind))
        return open_source(
            Source.from_mapping(
                "Ward", {"kind": "sql", "query": query, "env": "WARD_DATABASE", "key": key} | entries
            )
        )

    return opened


def stacked(table, columns):
    return pd.concat(list(table.chunks(columns)), ignore_index=True)


# ---- the same rows, the same fit -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DATABASES)
def test_rows_come_whole_and_in_the_order_of_the_key(ask, kind):
    table = ask(kind)
    assert (table.columns, table.n_rows) == (tuple(COLUMNS), N)
    pd.testing.assert_frame_equal(stacked(table, COLUMNS), records(0)[COLUMNS], check_exact=True)
    pd.testing.assert_frame_equal(
        stacked(table, ["ill", "age"]), records(0)[["ill", "age"]], check_exact=True
    )
    with pytest.raises(DesignError, match="no column 'patient'"):
        next(table.chunks(["patient"]))


@pytest.mark.parametrize("kind", DATABASES)
def test_a_query_may_hold_percent_signs_colons_comments_and_a_semicolon(ask, kind):
    query = """-- the '50% hi:gh' ones
        /* only */ WITH high AS (SELECT patient, age FROM ward0 WHERE grade LIKE '50%hi:gh')
        SELECT patient AS "key ""of"" it", CAST(age AS double precision) AS "a:ge %s" FROM high"""
    expected = records(0).query("grade == '50% hi:gh'")["age"].tolist()
    for end in ("", " ; ", " -- no more"):
        table = ask(kind, query + end, 'key "of" it')
        assert stacked(table, ["a:ge %s"])["a:ge %s"].tolist() == expected


@pytest.mark.parametrize("kind", DATABASES)
@pytest.mark.parametrize("rows_per_chunk", [1, 99, N, N + 1])
def test_chunks_have_one_length_and_one_type(addresses, kind, rows_per_chunk):
    """`dose` lacks a value in some chunks only; it is of one type in all."""
    database = open_database("Ward", addresses(kind), "a test")
    table = SqlTable("Ward", database, "SELECT * FROM ward0", ["patient"], rows_per_chunk=rows_per_chunk)
    chunks = list(table.chunks(["dose", "grade"]))
    assert [len(chunk) for chunk in chunks[:-1]] == [rows_per_chunk] * (len(chunks) - 1)
    assert {str(chunk["dose"].dtype) for chunk in chunks} == {"float64"}
    pd.testing.assert_frame_equal(pd.concat(chunks, ignore_index=True), records(0)[["dose", "grade"]])
    assert [chunk.shape for chunk in table.chunks([])] == [(len(chunk), 0) for chunk in chunks]


@pytest.fixture
def partition():
    return ClientPartition.from_frames(
        {"Ward": records(0).drop(columns="patient"), "Clinic": records(1).drop(columns="patient")},
        layout="horizontal",
    )


def fitted(tables):
    partition = ClientPartition.from_frames(tables, layout="horizontal")
    with pytest.warns(match="left out"):
        model = GLORE.from_formula("ill ~ age + dose + C(grade) + C(site)", partition)
    result = model.fit()
    return np.concatenate([result.params, result.bse, [result.llf]])


@pytest.mark.parametrize("kind", ["csv", "parquet", *DATABASES])
def test_a_fit_is_the_same_to_the_bit_from_every_source(partition, ask, kind, tmp_path):
    expected = fitted(partition._tables)
    tables = {}
    for seed, site in enumerate(partition.sites):
        if kind in DATABASES:
            tables[site] = ask(kind, f"SELECT * FROM ward{seed}")
            continue
        path = tmp_path / f"{site}.{kind}"
        frame = records(seed)
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
        tables[site] = open_source(Source(site, kind, str(path), key=("patient",)))
        assert tables[site].columns == tuple(COLUMNS)
    np.testing.assert_array_equal(fitted(tables), expected)


def test_a_partition_takes_the_rows_of_a_query_and_never_their_key(ask, addresses):
    wards = [ask("sqlite", f"SELECT * FROM ward{seed}") for seed in (0, 1)]
    tables = dict(zip(("Ward", "Clinic"), wards, strict=True))
    partition = ClientPartition.from_frames(tables, "patient", layout="horizontal")
    assert partition.pooled_columns == tuple(COLUMNS) and partition.n_entities == 2 * N
    shown = SqlTable(
        "Ward", open_database("Ward", addresses("sqlite"), "a test"), "SELECT * FROM ward0", ["patient"]
    )
    with pytest.raises(PartitionError, match=r"'Ward': its table shows the key.*leave_out=key"):
        ClientPartition.from_frames(tables | {"Ward": shown}, "patient", layout="horizontal")
    with pytest.raises(PartitionError, match=r"'Ward' has no key column 'number'"):
        ClientPartition.from_frames(tables, "number", layout="horizontal")
    other = ask("sqlite", "SELECT patient, CAST(age AS TEXT) AS age FROM ward0")
    with pytest.raises(PartitionError, match=r"column 'age' holds text at site 'Ward' and numbers"):
        ClientPartition.from_frames(tables | {"Ward": other}, layout="horizontal")
    with pytest.raises(PartitionError, match=r"a streamed table needs layout='horizontal'"):
        ClientPartition.from_frames(tables, "patient")


def test_parquet_is_streamed(tmp_path):
    records(0).to_parquet(tmp_path / "a.parquet")
    assert isinstance(open_source(Source("Ward", "parquet", str(tmp_path / "a.parquet"))), ParquetTable)


@pytest.mark.parametrize("kind", DATABASES)
def test_records_to_be_linked_keep_their_key(addresses, monkeypatch, kind):
    monkeypatch.setenv("WARD_DATABASE", addresses(kind))
    source = Source("Ward", "sql", query="SELECT * FROM ward0", env="WARD_DATABASE", key=("patient",))
    pd.testing.assert_frame_equal(read_source(source), records(0), check_exact=True)


def test_rows_come_from_the_server_by_and_by(addresses):
    """The last row cannot be computed; the first ones are here before that is found."""
    database = open_database("Ward", addresses("postgresql"), "a test")
    rows = database.rows("SELECT 1 / (100000 - i) FROM generate_series(1, 100000) AS s(i)", [])
    assert 0 < len(next(rows)) < 100_000
    with pytest.raises(PartitionError, match="DivisionByZero, SQLSTATE 22012"):
        list(rows)


PEAK = """
import sys, resource, pyarrow
from fedstat.federation.tables.database import open_database
from fedstat.federation.tables.sql_table import SqlTable
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
query = "SELECT i, i * 0.5 AS a, i * 0.25 AS b, i * 2.0 AS c FROM generate_series(1, 200000) AS s(i)"
database = open_database("A", sys.argv[1], "a test")
table = SqlTable("A", database, query, ["i"], rows_per_chunk=10_000, memory=1)
assert table._kept.in_file
rows = sum(len(chunk) for chunk in table.chunks(["a", "b", "c"]))
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_does_not_grow_with_the_table(addresses):
    """As tuples of Python numbers the 200,000 rows would take more than 50 MB."""
    run = [sys.executable, "-c", PEAK, addresses("postgresql")]
    done = subprocess.run(run, capture_output=True, check=True, text=True)
    rows, megabytes = map(int, done.stdout.split())
    assert rows == 200_000 and megabytes < 40


# ---- read, and never written -----------------------------------------------------------------------------

WRITING = [
    "DELETE FROM ward0",
    "UPDATE ward0 SET ill = 0",
    "INSERT INTO ward0 SELECT * FROM ward0",
    "DROP TABLE ward0",
    "CREATE TABLE t AS SELECT 1 AS patient",
    "WITH gone AS (DELETE FROM ward0 RETURNING *) SELECT * FROM gone",
    "SELECT * FROM ward0; DELETE FROM ward0",
    "SELECT 1 AS patient) AS x; DELETE FROM ward0; SELECT * FROM (SELECT 1 AS patient",
    "SELECT 1 AS patient) AS x; COMMIT; DELETE FROM ward0; SELECT * FROM (SELECT 1 AS patient",
    "",
    "-- nothing but a comment",
]
WRITING_BY = {
    "postgresql": [
        "SELECT * INTO copied FROM ward0",
        "SELECT nextval('counter') AS patient",
        "SELECT wipe() AS patient",
        "SELECT set_config('transaction_read_only', 'off', true) AS patient, wipe()",
        "SELECT * FROM ward0 FOR UPDATE",
        "COPY ward0 TO '/tmp/fedstat-copied'",
    ],
    "sqlite": ["PRAGMA query_only = OFF", "ATTACH 'new.db' AS new"],
    "duckdb": [
        "COPY ward0 TO 'copied.csv'",
        "SELECT 1 AS patient) AS x; COPY ward0 TO 'copied.csv'; SELECT * FROM (SELECT 1 AS patient",
        "ATTACH 'new.db' AS new",
    ],
}


def everything(kind, address):
    """Tables and rows of a database, by a connection of the test's own."""
    connection = connected(kind, address)
    catalog = "sqlite_master" if kind == "sqlite" else "pg_catalog.pg_class" if kind == "postgresql" else None
    names = f"SELECT count(*) FROM {catalog or 'information_schema.tables'}"
    found = [connection.execute(text).fetchall() for text in (names, "SELECT * FROM ward0 ORDER BY patient")]
    connection.close()
    return found


CASES = [(kind, query) for kind in DATABASES for query in WRITING + WRITING_BY[kind]]


@pytest.mark.parametrize(("kind", "query"), CASES)
def test_a_query_that_writes_is_refused(ask, addresses, kind, query, tmp_path, monkeypatch):
    address = addresses(kind)
    monkeypatch.chdir(tmp_path)
    if kind == "postgresql":
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("CREATE SEQUENCE IF NOT EXISTS counter")
            connection.execute(
                "CREATE OR REPLACE FUNCTION wipe() RETURNS int LANGUAGE sql VOLATILE AS "
                "'DELETE FROM ward0 RETURNING 1'"
            )
    before = everything(kind, address)
    expected = "takes a query" if not query else "Ward: a query that writes"
    with pytest.raises(PartitionError, match=expected):
        ask(kind, query)
    assert everything(kind, address) == before
    assert not list(tmp_path.iterdir()) and not Path("/tmp/fedstat-copied").exists()


WHOLE = ["DELETE FROM ward0", "SELECT 1; COMMIT; DELETE FROM ward0", "CREATE TABLE made (a INTEGER)"]


@pytest.mark.parametrize("kind", DATABASES)
@pytest.mark.parametrize("statement", WHOLE)
def test_each_guard_holds_alone(addresses, kind, statement):
    """The statement reaches the database unchanged, and not inside one of ours."""
    before = everything(kind, addresses(kind))
    with pytest.raises(PartitionError, match="a query that writes"):
        list(open_database("Ward", addresses(kind), "a test").rows(statement, []))
    assert everything(kind, addresses(kind)) == before


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_database_that_is_not_there_is_not_made(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("WARD_DATABASE", f"{kind}:///{tmp_path}/new.db")
    with pytest.raises(PartitionError, match=r"could not be opened.*variable WARD_DATABASE"):
        open_source(Source("Ward", "sql", query="SELECT 1 AS k", env="WARD_DATABASE", key=("k",)))
    assert not list(tmp_path.iterdir())


# ---- no message contains a secret or a value -------------------------------------------------------------


def all_that_is_told(error):
    """The whole chain of an error, as a program that logs it would write it."""
    text = "".join(traceback.format_exception(error, chain=True))
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        text += repr(error) + repr(vars(error))
        error = error.__context__ or error.__cause__
    return text


def test_a_wrong_password_is_not_shown(postgres, monkeypatch, caplog):
    for name in ("", "sqlalchemy", "sqlalchemy.engine", "sqlalchemy.pool"):
        caplog.set_level(logging.DEBUG, name or None)
    monkeypatch.setenv("WARD_DATABASE", postgres.replace(SECRET, "Wrong-" + SECRET))
    with pytest.raises(PartitionError, match=r"could not be opened \(OperationalError\)") as caught:
        open_source(Source("Ward", "sql", query="SELECT 1 AS k", env="WARD_DATABASE", key=("k",)))
    reported = all_that_is_told(caught.value) + caplog.text
    assert SECRET not in reported and "127.0.0.1" not in reported


@pytest.mark.parametrize(
    "address",
    [
        f"what is {SECRET}?",
        f"mongodb://a:{SECRET}@h/d",
        f"firebird://a:{SECRET}@h",
        "sqlite://",
        "duckdb:///:memory:",
    ],
)
def test_a_connection_string_that_cannot_be_used_is_not_shown(monkeypatch, address):
    monkeypatch.setenv("WARD_DATABASE", address)
    with pytest.raises(PartitionError, match=r"no connection string|no read-only session|no file") as caught:
        open_source(Source("Ward", "sql", query="SELECT 1 AS k", env="WARD_DATABASE", key=("k",)))
    assert SECRET not in all_that_is_told(caught.value)


FAILING = {
    "postgresql": "SELECT patient, CAST(grade AS integer) AS g FROM ward0",
    "duckdb": "SELECT patient, CAST(grade AS integer) AS g FROM ward0",
    "sqlite": "SELECT patient, abs(-9223372036854775807 - 1) AS g FROM ward0",
}


@pytest.mark.parametrize("kind", DATABASES)
def test_neither_errors_nor_logs_quote_a_value(ask, caplog, kind):
    for name in ("", "sqlalchemy", "sqlalchemy.engine", "sqlalchemy.pool"):
        caplog.set_level(logging.DEBUG, name or None)
    stacked(ask(kind), COLUMNS)
    with pytest.raises(PartitionError, match=r"Ward: the database refused the query \(\w+") as caught:
        ask(kind, FAILING[kind])
    reported = all_that_is_told(caught.value) + caplog.text
    assert not any(word in reported for word in ("it's", "hi:gh", SECRET))


def test_a_table_reveals_nothing_of_its_database(ask, addresses):
    table = ask("sqlite")
    assert repr(table) == f"SqlTable('Ward', {N} rows, 4 columns)"
    assert "wards.sqlite" not in repr(open_database("Ward", addresses("sqlite"), "a test"))
    # with the rows at hand the connection string is not needed, and is not kept
    assert not any(isinstance(held, Database) for held in vars(table).values())


def sql_source(**entries):
    return Source("Ward", "sql", query="SELECT * FROM ward0", key=("patient",), **entries)


@pytest.mark.parametrize("form", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_postgresql_is_always_read_by_psycopg(ask, addresses, monkeypatch, form):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    monkeypatch.setenv("WARD_DATABASE", addresses("postgresql").replace("postgresql", form, 1))
    assert open_source(sql_source(env="WARD_DATABASE")).n_rows == N


def test_the_file_with_the_connection_string_must_be_private(addresses, tmp_path):
    file = tmp_path / "address"
    file.write_text(addresses("sqlite") + "\n")
    for mode in (0o644, 0o640, 0o604, 0o602):
        file.chmod(mode)
        with pytest.raises(SecurityError, match=f"Ward: .*mode {mode:04o}.*chmod 600"):
            open_source(sql_source(file=str(file)))
    file.chmod(0o600)
    assert open_source(sql_source(file=str(file))).n_rows == N


def test_an_absent_connection_string_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("WARD_DATABASE", raising=False)
    with pytest.raises(PartitionError, match=r"Ward: .*variable WARD_DATABASE, which is absent"):
        open_source(sql_source(env="WARD_DATABASE"))
    with pytest.raises(PartitionError, match=r"Ward: .*nowhere', which is absent"):
        open_source(sql_source(file=str(tmp_path / "nowhere")))


# ---- descriptions, schemas, keys -------------------------------------------------------------------------


def test_a_description_is_read_from_toml():
    text = """
    kind = "sql"
    query = "SELECT * FROM ward0"
    env = "WARD_DATABASE"
    key = "patient"
    schema = { age = { type = "numbers", unit = "years" }, grade = "text" }
    """
    source = Source.from_mapping("Ward", tomllib.loads(text))
    assert source.key == ("patient",) and source.units == {"age": "years"}
    assert source.schema["grade"].type == "text"


WRONG = [
    ({"kind": "xls", "path": "a.xls"}, "kind 'xls'"),
    ({"path": "a.csv"}, "lacks kind"),
    ({"kind": "csv", "path": "a.parquet"}, r"path that ends in \.csv"),
    ({"kind": "parquet", "path": "a.parquet", "query": "SELECT 1"}, "takes no query"),
    ({"kind": "csv", "path": "a.csv", "schema": {"x": "float"}}, "column 'x': its declared type is unknown"),
    ({"kind": "csv", "path": "a.csv", "schema": {"x": {"unit": "m"}}}, "schema.x.: lacks type"),
    ({"kind": "csv", "path": 3}, "'path': expected a text, received a whole number"),
    ({"kind": "sql", "query": "SELECT 1", "key": "a"}, "give env="),
    ({"kind": "sql", "query": "SELECT 1", "key": "a", "env": "A", "file": "b"}, "and not both"),
    ({"kind": "sql", "query": "SELECT 1", "env": "A"}, "needs a key"),
    (
        {"kind": "sql", "query": "SELECT 1", "key": "a", "url": f"x://{SECRET}"},
        "unknown entries 'url'.*env names",
    ),
]


@pytest.mark.parametrize(("description", "message"), WRONG)
def test_a_wrong_description_is_refused(description, message):
    with pytest.raises(PartitionError, match=f"Ward.*{message}") as caught:
        Source.from_mapping("Ward", description)
    assert SECRET not in all_that_is_told(caught.value)


SCHEMA = {"patient": "whole numbers", "age": "numbers", "dose": "whole numbers", "grade": "text"}
MISTAKEN = [
    ("grade", "numbers", "text"),
    ("age", "whole numbers", "numbers"),
    ("ill", "true/false", "whole numbers"),
    ("age", "dates", "numbers"),
]


def file_source(kind, folder, frame, schema):
    path = folder / f"a.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    return Source.from_mapping("Ward", {"kind": kind, "path": str(path), "key": "patient", "schema": schema})


@pytest.mark.parametrize("kind", ["csv", "parquet", *DATABASES])
def test_types_are_held_against_the_schema(ask, kind, tmp_path):
    def opened(schema):
        if kind in DATABASES:
            return ask(kind, schema=schema)
        return open_source(file_source(kind, tmp_path, records(0).astype({"dose": "Int64"}), schema))

    assert opened(SCHEMA).n_rows == N
    for name, declared, found in MISTAKEN:
        expected = f"Ward, column '{name}': expected {declared}, found {found}. Rem"
        with pytest.raises(PartitionError, match=expected):
            opened({name: declared})
    with pytest.raises(PartitionError, match=r"Ward: .*no column 'weight'.*They have '"):
        opened({"weight": "numbers"})


def test_a_unit_in_the_file_is_held_against_the_declared_one(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    field = pa.field("age", pa.float64(), metadata={"unit": "months"})
    pq.write_table(pa.table([[1.0, 2.0]], schema=pa.schema([field])), tmp_path / "a.parquet")
    description = {"kind": "parquet", "path": str(tmp_path / "a.parquet")}

    def opened(unit):
        schema = {"age": {"type": "numbers", "unit": unit}}
        return open_source(Source.from_mapping("Ward", description | {"schema": schema}))

    assert opened("months").n_rows == 2
    with pytest.raises(PartitionError, match="column 'age': expected the unit 'years', found 'months'"):
        opened("years")


def test_declared_text_keeps_its_zeros_and_dates_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("code,day\n007,2024-02-29\n010,\n")
    description = {"kind": "csv", "path": str(tmp_path / "a.csv"), "schema": {"code": "text", "day": "dates"}}
    frame = read_source(Source.from_mapping("Ward", description))
    assert frame["code"].tolist() == ["007", "010"]
    assert frame["day"].iloc[0] == pd.Timestamp("2024-02-29") and pd.isna(frame["day"].iloc[1])
    (tmp_path / "a.csv").write_text("code,day\n007,2024-02-30\n")
    with pytest.raises(PartitionError, match="column 'day': expected dates, found text"):
        open_source(Source.from_mapping("Ward", description))


DAYS_AND_CODES = """
    SELECT 1 AS patient, DATE '2022-01-03' AS day, 1 AS sex, 'm' AS ward UNION ALL SELECT 2, NULL, 2, 'm'
    UNION ALL SELECT 3, DATE '2022-02-01', NULL, NULL UNION ALL SELECT 4, DATE '2022-01-01', 9, 's'"""


@pytest.mark.parametrize("kind", ["csv", "parquet", "duckdb", "postgresql"])
@pytest.mark.parametrize("by", ["schema", "dictionary"])
def test_dates_become_days_and_codes_get_names_from_every_source(ask, kind, by, tmp_path):
    """As the owner declares it, or the dictionary of the study; the same table from each source."""
    raw = duckdb.sql(DAYS_AND_CODES).df().astype({"patient": "int64", "sex": "Int64"})
    schema = {
        "day": {"type": "dates", "since": "2022-01-01"},
        "sex": {"type": "whole numbers", "codes": {"1": "male", "2": "female"}},
        "ward": {"type": "text", "codes": {"m": "medical"}},
    }
    # the dictionary is of the study: a site need not have all of its columns
    declared = {name: DeclaredColumn(**one) for name, one in schema.items()}
    declared |= {"other": DeclaredColumn("dates", since="2022-01-01")} if by == "dictionary" else {}
    if kind in DATABASES:
        source = sql_source(env="WARD_DATABASE", **{by: declared})
        source = replace(source, query=DAYS_AND_CODES)
        ask(kind, "SELECT 1 AS patient")  # sets the variable
    else:
        source = replace(file_source(kind, tmp_path, raw, {}), **{by: declared})
    table = open_source(source)
    frame = pd.concat(table.chunks(["day", "sex", "ward"]), ignore_index=True)
    np.testing.assert_array_equal(frame["day"], [2, np.nan, 31, 0])
    named = frame[["sex", "ward"]].astype(object).fillna("none")
    assert named.to_numpy().T.tolist() == [
        ["male", "female", "none", "9"],
        ["medical", "medical", "none", "s"],
    ]
    reported = table_schema("Ward", table, Policy(min_count=1)).columns
    assert reported == {"day": "numbers", "sex": "text", "ward": "text"}


def test_types_that_a_server_has_of_its_own(ask):
    query = """SELECT i AS patient, i / 8.0 AS n, i = 1 AS b, DATE '2024-02-29' AS d,
               TIMESTAMPTZ '2024-02-29 12:00:00+02' AS t, gen_random_uuid() AS u, NULL AS nothing
               FROM generate_series(1, 3) AS s(i)"""
    table = ask("postgresql", query)
    frame = stacked(table, ["n", "b", "d", "t", "u", "nothing"])
    assert frame["n"].tolist() == [0.125, 0.25, 0.375] and frame["b"].tolist() == [True, False, False]
    assert frame["d"].iloc[0] == pd.Timestamp("2024-02-29")
    assert frame["t"].iloc[0] == pd.Timestamp("2024-02-29 10:00", tz="UTC")
    assert frame["u"].str.len().tolist() == [36, 36, 36]
    assert table.kinds["u"] == "text" and table.kinds["nothing"] is None and frame["nothing"].isna().all()


ODD = {
    "SELECT patient, CASE WHEN ill = 0 THEN 'no' ELSE patient END AS odd FROM ward0": "'odd'.*several types",
    "SELECT patient, x'00' AS odd FROM ward0": "'odd'.*other types",
    "SELECT ill AS patient FROM ward0": "698 of 700 rows repeat a key",
    "SELECT nullif(patient, (SELECT min(patient) FROM ward0)) AS patient FROM ward0": "rows have no key",
    "SELECT age FROM ward0": "no key column 'patient'",
}


@pytest.mark.parametrize("query", ODD)
def test_odd_columns_and_keys_are_refused(ask, query):
    with pytest.raises(PartitionError, match=f"Ward.*{ODD[query]}"):
        ask("sqlite", query)


def test_two_columns_of_one_name_are_refused(ask):
    with pytest.raises(PartitionError, match=r"Ward: 2 columns are called 'age'"):
        ask("postgresql", "SELECT patient, age, dose AS age FROM ward0")


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_records_that_change_under_a_fit_are_those_it_began_with(
    ask, partition, addresses, monkeypatch, kind
):
    """At every pass one record goes and others change: the fit is of the records as they were first."""
    expected = fitted(partition._tables)
    connection = connected(kind, addresses(kind))
    connection.execute("CREATE TABLE standing AS SELECT * FROM ward0")
    connection.commit()
    connection.close()
    tables = {"Ward": ask(kind, "SELECT * FROM standing"), "Clinic": ask(kind, "SELECT * FROM ward1")}
    passes, read = [], SqlTable.chunks

    def changing(table, columns):
        passes.append(table)
        connection = connected(kind, addresses(kind))
        first = "(SELECT min(patient) FROM standing)"
        connection.execute(f"DELETE FROM standing WHERE patient = {first}")
        connection.execute(f"UPDATE standing SET ill = 1, age = age + 1 WHERE patient < {first} + 100")
        connection.commit()
        connection.close()
        return read(table, columns)

    monkeypatch.setattr(SqlTable, "chunks", changing)
    np.testing.assert_array_equal(fitted(tables), expected)
    assert len(passes) > 2
    monkeypatch.undo()
    connection = connected(kind, addresses(kind))
    ((left,),) = connection.execute("SELECT count(*) FROM standing").fetchall()
    assert left == N - len(passes)
    connection.execute("DROP TABLE standing")
    connection.commit()
    connection.close()


def test_an_empty_answer_is_a_table_without_rows(ask):
    table = ask("postgresql", "SELECT * FROM ward0 WHERE patient < 0")
    assert (table.n_rows, table.columns) == (0, tuple(COLUMNS)) and not list(table.chunks(["age"]))


@pytest.mark.parametrize(("package", "kind"), [("sqlalchemy", "sqlite"), ("duckdb", "duckdb"),
                                               ("psycopg", "postgresql")])  # fmt: skip
def test_without_the_extra_it_says_what_to_install(monkeypatch, package, kind):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv(
        "WARD_DATABASE", f"{kind}://a:b@127.0.0.1/x" if kind == "postgresql" else f"{kind}:///x"
    )
    with pytest.raises(ImportError, match=r"pip install fedstat\[sql\]"):
        open_source(sql_source(env="WARD_DATABASE"))


def test_every_refusal_is_one_of_ours(ask):
    with pytest.raises(FedstatError):
        ask("sqlite", "SELECT * FROM no_such_table")


def test_a_partition_of_a_query_says_why_it_is_not_pickled(ask):
    partition = ClientPartition.from_frames({"Ward": ask("sqlite")}, layout="horizontal")
    with pytest.raises(NotAvailableError, match=r"streams a query is not pickled .*'Ward'"):
        pickle.dumps(partition)
