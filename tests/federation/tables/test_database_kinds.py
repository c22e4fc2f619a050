"""MariaDB with a real server; Oracle and SQL Server by their statements, without a server."""

import logging
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import sqlalchemy
from database_servers import SECRET, mariadb_server

from fedstat.errors import PartitionError
from fedstat.federation.tables import database as readers
from fedstat.federation.tables.database import open_database, single_query, stays_inside
from fedstat.federation.tables.sources import Source, open_source
from fedstat.federation.tables.sql_table import SqlTable

N = 500


def records():
    rng = np.random.default_rng(7)
    frame = pd.DataFrame({"patient": np.arange(N), "age": rng.normal(60, 10, N)})
    frame["dose"] = rng.integers(0, 9, N).astype(float)
    frame["grade"] = rng.choice(["low", "it's", "50% hi:gh"], N)
    frame["born"] = pd.to_datetime("1950-01-01") + pd.to_timedelta(np.arange(N), "D")
    frame["born"] = frame["born"].astype("datetime64[us]")
    frame.loc[rng.random(N) < 0.1, "dose"] = np.nan
    return frame


@pytest.fixture(scope="module")
def mariadb():
    """Connection string, and a connection of the test's own that may write."""
    with mariadb_server() as address:
        import pymysql

        url = sqlalchemy.make_url(address)
        connection = pymysql.connect(
            host=url.host,
            port=url.port,
            user=url.username,
            password=SECRET,
            database="wards",
            autocommit=True,
        )
        cursor = connection.cursor()
        cursor.execute(
            "CREATE TABLE ward (patient BIGINT, age DOUBLE, dose BIGINT, grade VARCHAR(20), born DATE)"
        )
        rows = [tuple(None if pd.isna(v) else v for v in row) for row in records().itertuples(index=False)]
        cursor.executemany("INSERT INTO ward VALUES (%s, %s, %s, %s, %s)", rows[::-1])
        cursor.execute("CREATE FUNCTION wipe() RETURNS INT BEGIN DELETE FROM ward; RETURN 1; END")
        cursor.execute("CREATE SEQUENCE counter")
        yield address, cursor
        connection.close()


@pytest.fixture
def ask(mariadb, monkeypatch):
    def opened(query="SELECT * FROM ward", **entries):
        monkeypatch.setenv("WARD_DATABASE", mariadb[0])
        description = {"kind": "sql", "query": query, "env": "WARD_DATABASE", "key": "patient"}
        return open_source(Source.from_mapping("Ward", description | entries))

    return opened


def test_rows_of_mariadb_come_whole_and_in_the_order_of_the_key(ask):
    table = ask()
    frame = pd.concat(list(table.chunks(table.columns)), ignore_index=True)
    pd.testing.assert_frame_equal(frame, records().drop(columns="patient"), check_exact=True)
    assert table.kinds["born"] == "dates" and table.kinds["patient"] == "whole numbers"


def test_a_query_to_mariadb_may_hold_percent_signs_and_comments(ask):
    query = "/* only */ SELECT patient, age AS `a:ge %s` FROM ward WHERE grade LIKE '50%hi:gh' -- these\n;"
    table = ask(query)
    assert table.n_rows == (records()["grade"] == "50% hi:gh").sum() and table.columns == ("a:ge %s",)


WRITING = [
    "DELETE FROM ward",
    "SELECT 1 AS patient) AS x; DELETE FROM ward; SELECT * FROM (SELECT 1 AS patient",
    "SELECT 1 AS patient) AS x; COMMIT; DELETE FROM ward; SELECT * FROM (SELECT 1 AS patient",
    "SELECT wipe() AS patient",
    "SELECT nextval(counter) AS patient",
    "SELECT 1 AS patient INTO OUTFILE '/tmp/fedstat-copied'",
]


@pytest.mark.parametrize("query", WRITING)
def test_mariadb_refuses_what_writes(mariadb, ask, query):
    with pytest.raises(PartitionError, match="Ward: a query that writes"):
        ask(query)
    mariadb[1].execute("SELECT count(*) FROM ward")
    assert mariadb[1].fetchone() == (N,)


@pytest.mark.parametrize("statement", ["DELETE FROM ward", "SELECT 1; DELETE FROM ward", "SELECT wipe()"])
def test_a_session_of_mariadb_refuses_alone(mariadb, statement):
    """The statement reaches the server unchanged, and not inside one of ours."""
    with pytest.raises(PartitionError, match=r"a query that writes|refused the query"):
        list(open_database("Ward", mariadb[0], "a test").rows(statement, []))
    mariadb[1].execute("SELECT count(*) FROM ward")
    assert mariadb[1].fetchone() == (N,)


def test_a_session_of_mariadb_sees_one_state(mariadb):
    address, cursor = mariadb
    cursor.execute("CREATE TABLE standing AS SELECT 1 AS patient")
    counts = []
    with open_database("Ward", address, "a test").session() as session:
        for _ in range(2):
            counts += [row for rows in session.rows("SELECT count(*) FROM standing", []) for row in rows]
            cursor.execute("INSERT INTO standing VALUES (2)")
    cursor.execute("DROP TABLE standing")
    assert counts == [(1,), (1,)]


def test_mariadb_is_stopped_after_its_time(ask):
    with pytest.raises(PartitionError, match="Ward: the database took too long"):
        ask("SELECT 1 AS patient, sleep(60) AS slept", timeout=1)


@pytest.mark.parametrize("form", ["mysql", "mariadb", "mysql+mysqldb"])
def test_a_password_of_mariadb_is_not_shown(mariadb, monkeypatch, caplog, form):
    caplog.set_level(logging.DEBUG)
    wrong = mariadb[0].replace("mysql", form, 1).replace(SECRET, "Wrong-" + SECRET)
    monkeypatch.setenv("WARD_DATABASE", wrong)
    with pytest.raises(PartitionError, match=r"could not be opened \(OperationalError\)") as caught:
        open_source(Source("Ward", "sql", query="SELECT 1 AS k", env="WARD_DATABASE", key=("k",)))
    assert SECRET not in str(caught.value) + caplog.text
    assert caught.value.__context__ is None and caught.value.__cause__ is None


# ---- Oracle and SQL Server: the statements sent to them --------------------------------------------------

ROWS = [(1, Decimal("0.5"), "a", datetime(2024, 2, 29)), (2, None, "b", None)]
NAMES = ("patient", "DOSE", "gra]de", "born")


class ToldCursor:
    """A database that gives the same answer to every query, and records the queries."""

    def __init__(self, reported):
        self.reported, self.description, self.left = reported, [(name,) for name in NAMES], []

    def execute(self, statement):
        self.reported.append(" ".join(statement.split()))
        self.left = [[(len(ROWS),)]] if "count(*)" in statement else [] if "1 = 0" in statement else [ROWS]

    def fetchmany(self, size):
        return self.left.pop() if self.left else []

    def close(self):
        pass


class ToldConnection:
    def __init__(self, reported):
        self.reported = reported

    def cursor(self):
        return ToldCursor(self.reported)

    def rollback(self):
        self.reported.append("ROLLBACK")


@pytest.fixture
def told(monkeypatch):
    """Address, options and statements of a session."""
    said = []

    @contextmanager
    def session(address, given=None, extra="sql", **options):
        dialect = address.get_dialect()
        said.append((address, dialect, dict(given or {}), extra, options))
        yield ToldConnection(said), dialect()

    monkeypatch.setattr(readers, "_session", session)
    return said


SERVERS = {
    "oracle": ("oracle://reader:secret@host:1521/?service_name=ward", "oracledb", '"', '"'),
    "mssql": ("mssql://reader:secret@host/ward", "pymssql", "[", "]"),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_what_is_said_to_a_server(told, kind):
    address, driver, first, last = SERVERS[kind]
    database = open_database("Ward", address, "a test", seconds=7)
    query = "SELECT * FROM ward WHERE grade = 'a;b'"
    table = SqlTable("Ward", database, query, ["patient"], leave_out=["patient"])
    (url, dialect, given, extra, options), *statements = told
    assert (dialect.driver, extra, url.password) == (driver, kind, "secret")
    inner = f"FROM ( {query} ) records"
    key = f"{first}patient{last}"
    assert statements[-3:] == [
        f"SELECT * {inner} WHERE 1 = 0",
        f"SELECT * {inner} ORDER BY {key}",
        f"SELECT count(*) FROM (SELECT DISTINCT {key} {inner}) one_each",
    ]
    assert statements[:-3] == (["ROLLBACK", "SET TRANSACTION READ ONLY"] if kind == "oracle" else [])
    if kind == "mssql":
        assert (given, options) == ({"timeout": 7}, {"isolation_level": "SNAPSHOT"})
        assert "SNAPSHOT" in dialect().get_isolation_level_values(None)
    quoted = dialect().identifier_preparer.quote_identifier
    assert all(database.reader.quoted(name) == quoted(name) for name in (*NAMES, 'a"b', "a`b"))
    frame = next(iter(table.chunks(["DOSE", "gra]de", "born"])))
    assert frame["DOSE"].tolist()[0] == 0.5 and np.isnan(frame["DOSE"].iloc[1])
    assert frame["gra]de"].tolist() == ["a", "b"] and table.kinds["born"] == "dates"


@pytest.mark.parametrize("kind", ["mysql", "postgresql", "sqlite"])
def test_names_are_quoted_as_sqlalchemy_quotes_them(kind):
    quoted = sqlalchemy.make_url(f"{kind}://").get_dialect()().identifier_preparer.quote_identifier
    assert all(readers.READERS[kind].quoted(name) == quoted(name) for name in ("a", 'a"b', "a`b", "a]b"))


OUTSIDE = [
    "SELECT 1 AS patient) x DELETE FROM ward SELECT * FROM (SELECT 1 AS patient",
    "SELECT 1 AS patient; DELETE FROM ward",
    "SELECT ')' AS patient) x DELETE FROM ward SELECT ('('",
    "SELECT [a]]] AS patient) x DELETE FROM ward SELECT (1",
    "SELECT 1 AS patient -- '\n) x DELETE FROM ward SELECT * FROM (SELECT 1 --'",
    "SELECT 1 AS patient /* ' */ ) x DELETE FROM ward SELECT * FROM (SELECT 1 /* ' */",
    "SELECT 'a",
    "SELECT (1",
    'SELECT "a',
]


@pytest.mark.parametrize("query", OUTSIDE)
def test_a_query_to_sql_server_may_not_leave_its_parentheses(told, query):
    """The server runs every statement of a text: one more after the parentheses would be run."""
    database = open_database("Ward", SERVERS["mssql"][0], "a test")
    with pytest.raises(PartitionError, match="Ward: a query that may hold more than one statement"):
        SqlTable("Ward", database, query, ["patient"])
    assert not told


def test_a_query_with_closed_parentheses_stays_inside():
    for query in ("SELECT (1 + 2) AS a", "SELECT ';)' AS [a(]]b], ('it''s (') AS \"b(\" FROM (SELECT 1) x"):
        assert stays_inside(query)
        assert single_query(open_database("W", SERVERS["mssql"][0], "a test"), query + ";") == query


@pytest.mark.parametrize(
    ("kind", "package"), [("mysql", "pymysql"), ("mssql", "pymssql"), ("oracle", "oracledb")]
)
def test_without_the_driver_it_says_what_to_install(monkeypatch, kind, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setenv("WARD_DATABASE", f"{kind}://a:b@127.0.0.1/x")
    with pytest.raises(ImportError, match=rf"pip install fedstat\[{kind}\]"):
        open_source(Source("Ward", "sql", query="SELECT 1 AS k", env="WARD_DATABASE", key=("k",)))
