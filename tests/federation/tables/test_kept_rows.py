"""Where the rows of a query are while a site uses them: sealed on disk, of one state, and for a time."""

import logging
import os
import sqlite3
from pathlib import Path

import numpy as np
import pandas as pd
import psycopg
import pytest
import sqlalchemy
from database_servers import postgresql_server

from fedstat.errors import EngineError, PartitionError, SecurityError
from fedstat.federation.tables import database as readers
from fedstat.federation.tables import sql_table
from fedstat.federation.tables.database import open_database
from fedstat.federation.tables.sources import Source, open_source
from fedstat.federation.tables.sql_table import SqlTable

N = 40_000
QUERY = "SELECT * FROM ward"
COLUMNS = ["age", "dose", "grade", "seen"]


@pytest.fixture(scope="module")
def server():
    with postgresql_server() as address:
        yield address


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    """A database with more rows than one fetch returns, and its contents."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"patient": np.arange(N), "age": rng.normal(60, 10, N)})
    frame["dose"] = np.arange(N) % 7
    frame["grade"] = rng.choice(["a secret grade", "another"], N)
    path = tmp_path_factory.mktemp("ward") / "ward.db"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE ward (patient INTEGER, age REAL, dose INTEGER, grade TEXT, seen INTEGER)"
        )
        rows = [(*row, None) for row in frame.itertuples(index=False, name=None)]
        connection.executemany("INSERT INTO ward VALUES (?, ?, ?, ?, ?)", rows)
        # a column whose first value comes after the first fetch, and one that is whole until the end
        connection.execute("UPDATE ward SET seen = 1 WHERE patient > 20000")
        connection.execute(f"UPDATE ward SET dose = 0.5 WHERE patient = {N - 1}")
    frame["dose"] = frame["dose"].astype(float)
    frame.loc[N - 1, "dose"] = 0.5
    frame["seen"] = np.where(frame["patient"] > 20000, 1.0, np.nan)
    return f"sqlite:///{path}", frame


def opened(address, **options):
    return SqlTable("Ward", open_database("Ward", address, "a test"), QUERY, ["patient"],
                    leave_out=["patient"], **options)  # fmt: skip


@pytest.mark.parametrize("memory", [0, 1, 256])
def test_rows_are_the_same_from_memory_and_from_the_file(ward, tmp_path, memory):
    address, frame = ward
    table = opened(address, memory=memory, folder=tmp_path, rows_per_chunk=10_000)
    assert table._kept.in_file == (memory < 2)
    chunks = list(table.chunks(COLUMNS))
    assert [len(chunk) for chunk in chunks] == [10_000] * 4
    assert {str(chunk["dose"].dtype) for chunk in chunks} == {"float64"}
    pd.testing.assert_frame_equal(pd.concat(chunks, ignore_index=True), frame[COLUMNS], check_exact=True)
    table.rows_per_chunk = 4_096
    again = pd.concat(list(table.chunks(["grade", "age"])), ignore_index=True)
    pd.testing.assert_frame_equal(again, frame[["grade", "age"]], check_exact=True)


def test_the_file_holds_no_row_unmasked_and_has_no_name(ward, tmp_path):
    """The disk of the site has no readable value, and a killed process leaves no file behind."""
    address, frame = ward
    table = opened(address, memory=0, folder=tmp_path)
    file = table._kept._file._file
    assert not list(tmp_path.iterdir()) and os.fstat(file.fileno()).st_nlink == 0
    assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    file.seek(0)
    content = file.read()
    assert len(content) > 3 * 8 * N
    assert b"secret" not in content and frame["age"].to_numpy()[:2].tobytes() not in content


def test_a_file_that_was_altered_is_refused(ward, tmp_path):
    table = opened(ward[0], memory=0, folder=tmp_path)
    file = table._kept._file._file
    file.seek(1000)
    byte = file.read(1)
    file.seek(1000)
    file.write(bytes([byte[0] ^ 1]))
    file.flush()
    with pytest.raises(SecurityError, match=r"Ward: the file .* was altered"):
        list(table.chunks(COLUMNS))


def test_a_full_disk_is_named(ward, tmp_path, monkeypatch):
    class FullFile:
        def seek(self, *place):
            return 0

        def write(self, content):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sql_table.tempfile, "TemporaryFile", lambda **where: FullFile())
    with pytest.raises(EngineError, match=r"Ward: the records .* \(No space left on device\); make room"):
        opened(ward[0], memory=0, folder=tmp_path)


def test_values_that_no_column_holds_are_refused(ward):
    for value in ("x'00'", "'a'"):
        query = f"SELECT patient, CASE WHEN patient = {N - 1} THEN {value} ELSE 1 END AS odd FROM ward"
        with pytest.raises(PartitionError, match="column 'odd': expected numbers"):
            SqlTable("Ward", open_database("Ward", ward[0], "a test"), query, ["patient"])


# ---- one state, and a limit of time ----------------------------------------------------------------------


def test_all_statements_of_a_session_see_one_state(server):
    """Keys are counted after the rows were read: a row that is written between is in neither."""
    with psycopg.connect(server, autocommit=True) as owner:
        owner.execute("CREATE TABLE standing AS SELECT 1 AS patient")
        with open_database("Ward", server, "a test").session() as session:
            counts = []
            for _ in range(2):
                counts += [row for rows in session.rows("SELECT count(*) FROM standing", []) for row in rows]
                owner.execute("INSERT INTO standing VALUES (2)")
        owner.execute("DROP TABLE standing")
    assert counts == [(1,), (1,)]


PLAIN = """SELECT i AS patient, CASE WHEN i % 7 > 0 THEN i / 3.0::float8 END AS a, (i * 0.1)::float4 AS b,
    nullif(i % 5, 0)::smallint AS c, i % 2 = 0 AS d, CASE WHEN i % 3 > 0 THEN 'it''s ' || i END AS e,
    CASE WHEN i = 3 THEN 'NaN'::float8 ELSE i END AS f, NULL::int AS g, i::bigint * 4000000000 AS h
    FROM generate_series(1, 40000) AS s(i)"""


def test_rows_are_the_same_by_either_driver_of_postgresql(server, monkeypatch):
    """Arrow as the server's own bytes give it, and as made from Python's objects."""
    pytest.importorskip("adbc_driver_postgresql")
    frames, kinds, connect = [], [], readers._connect_adbc
    database = open_database("Ward", server, "a test")
    for used in (True, False):
        monkeypatch.setattr(readers, "_connect_adbc", connect if used else lambda address: None)
        table = SqlTable("Ward", database, PLAIN, ["patient"], rows_per_chunk=7_000)
        frames.append(pd.concat(list(table.chunks(table.columns)), ignore_index=True))
        kinds.append(table.kinds)
    pd.testing.assert_frame_equal(*frames, check_exact=True)
    assert kinds[0] == kinds[1] and kinds[0]["g"] is None and len(frames[0]) == 40_000


def test_both_drivers_of_postgresql_see_one_state(server, monkeypatch):
    """Rows that go after the session has begun, and before the second driver reads, are there."""
    pytest.importorskip("adbc_driver_postgresql")
    read = readers._arrow_batches
    with psycopg.connect(server, autocommit=True) as owner:
        owner.execute(
            "CREATE TABLE standing AS SELECT i AS patient, i AS a FROM generate_series(1, 9) AS s(i)"
        )

        def later(connection, begin, statement):
            owner.execute("DELETE FROM standing WHERE patient < 5")
            return read(connection, begin, statement)

        monkeypatch.setattr(readers, "_arrow_batches", later)
        query = "SELECT * FROM standing"
        table = SqlTable("Ward", open_database("Ward", server, "a test"), query, ["patient"])
        assert table.n_rows == 9 and owner.execute("SELECT count(*) FROM standing").fetchall() == [(5,)]
        owner.execute("DROP TABLE standing")


@pytest.mark.parametrize("statement", ["DELETE FROM standing", "SELECT 1; COMMIT; DELETE FROM standing"])
def test_the_faster_driver_refuses_alone(server, statement):
    """The statement reaches the database unchanged, without the other driver."""
    pytest.importorskip("adbc_driver_postgresql")
    with psycopg.connect(server, autocommit=True) as owner:
        owner.execute("CREATE TABLE standing AS SELECT 1 AS patient")
        connection = readers._connect_adbc(sqlalchemy.make_url(server))
        with pytest.raises(Exception, match=r"read-only transaction|multiple commands"):
            list(readers._arrow_batches(connection, [], statement))
        assert owner.execute("SELECT count(*) FROM standing").fetchall() == [(1,)]
        owner.execute("DROP TABLE standing")


def test_a_statement_has_to_be_a_query_before_the_faster_driver_has_it(server, monkeypatch):
    """A superuser's COPY ... TO writes a file in a read-only transaction too."""
    monkeypatch.setattr(readers, "_arrow_batches", None)
    for statement in ("COPY pg_class TO '/tmp/fedstat-copied'", "SELECT 1; SELECT 2"):
        with (
            open_database("Ward", server, "a test").session() as session,
            pytest.raises(PartitionError, match=r"a query that writes|refused the query \(\w*SyntaxError"),
        ):
            list(session.batches(statement))
    assert not Path("/tmp/fedstat-copied").exists()


SLOW = {
    "postgresql": "SELECT 1 AS patient, pg_sleep(60)::text AS slept",
    "sqlite": "WITH RECURSIVE n(patient) AS (SELECT 1 UNION ALL SELECT patient + 1 FROM n) SELECT * FROM n",
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_statement_that_takes_too_long_is_stopped(server, ward, monkeypatch, caplog, kind):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("WARD_DATABASE", server if kind == "postgresql" else ward[0])
    with pytest.raises(PartitionError, match=r"Ward: the database took too long .*'timeout'"):
        open_source(Source("Ward", "sql", query=SLOW[kind], env="WARD_DATABASE", key=("patient",), timeout=1))
    assert "pg_sleep" not in caplog.text


def test_limits_are_checked():
    for wrong in ({"memory": -1}, {"timeout": 0}):
        with pytest.raises(PartitionError, match="Ward: its source: expected megabytes of 'memory' from 0"):
            Source("Ward", "sql", query=QUERY, env="WARD_DATABASE", key=("patient",), **wrong)
