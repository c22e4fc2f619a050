"""Read-only sessions, one for each kind of database, in which all statements see one state of the records.

============  ======================  ========================================  ===========================
kind          driver                  what refuses a write                      one state by
============  ======================  ========================================  ===========================
postgresql    psycopg, ADBC           READ ONLY transaction                     REPEATABLE READ
mysql         pymysql                 READ ONLY transaction                     CONSISTENT SNAPSHOT
oracle        oracledb                READ ONLY transaction                     the same
mssql         pymssql                 a query stands within parentheses only    SNAPSHOT isolation
sqlite        sqlite3                 file opened ``mode=ro``, query_only       BEGIN
duckdb        duckdb                  file opened read_only, one SELECT only    nobody writes meanwhile
============  ======================  ========================================  ===========================
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import quote

NO_SQL = "databases are read by SQLAlchemy, psycopg, duckdb and pyarrow: pip install fedstat[sql]"
PLAIN = frozenset({16, 20, 21, 23, 25, 700, 701, 1043})
"""Types of PostgreSQL whose values are the same as Arrow: true/false, whole numbers, doubles, text."""
ROWS_PER_FETCH = 16_384
STEPS_PER_LOOK = 100_000
"""Of SQLite's own machine, between two looks at the clock."""
LOGGER = "fedstat"
# SQLAlchemy can log every row, and what a server says of an account: no log shows either, at any level
for logger in ("engine.Engine", "pool.impl.NullPool"):
    logging.getLogger(f"sqlalchemy.{logger}.{LOGGER}").setLevel(logging.CRITICAL)

Batch: TypeAlias = Sequence[tuple[Any, ...]]
Answer: TypeAlias = tuple[tuple[str, ...], Iterator[Batch]]
"""Names of the columns, and the rows by and by."""
Ask: TypeAlias = Callable[[str], Answer]
AskArrow: TypeAlias = Callable[[str], Iterator[Any] | None]
"""Arrow batches of a statement; None where its rows are to be had by the driver alone."""


@dataclass(frozen=True, slots=True)
class DriverSession:
    """One session: the rows of a statement, and the same as Arrow where that is faster."""

    ask: Ask
    arrow: AskArrow = lambda _: None


OpenSession: TypeAlias = Callable[[Any, int], AbstractContextManager[DriverSession]]
"""From an address, and the seconds that one statement may take."""


class UnreachableError(Exception):
    """No session was had; the text names the type of the driver's error only."""


@contextmanager
def _read_postgresql(url: Any, seconds: int) -> Iterator[DriverSession]:
    """READ ONLY transaction, rows through a server-side cursor, always rolled back.

    It has to be psycopg, and a named cursor: that is declared by the extended protocol, in which the server
    refuses a text of several statements. A plain cursor would run ``...; COMMIT; DELETE ...``, and leave the
    transaction. Numbers come in binary form, so that no setting of the account rounds them.
    """
    address = url.set(drivername="postgresql+psycopg")
    with _session(address, isolation_level="REPEATABLE READ", postgresql_readonly=True) as (connection, _):
        limit = f"SET LOCAL statement_timeout = {1000 * seconds}"
        connection.execute(limit)

        def ask(statement: str) -> Answer:
            return _answer(connection.cursor(name="fedstat", binary=True), statement)

        def arrow(statement: str) -> Iterator[Any] | None:
            with connection.cursor(name="fedstat_types") as cursor:
                # also finds out whether this is one statement, before the faster driver has it
                cursor.execute(statement)
                plain = {column.type_code for column in cursor.description} <= PLAIN
            faster = _connect_adbc(url.set(drivername="postgresql")) if plain else None
            if faster is None:
                return None
            ((snapshot,),) = connection.execute("SELECT pg_export_snapshot()").fetchall()
            return _arrow_batches(faster, [f"SET TRANSACTION SNAPSHOT '{snapshot}'", limit], statement)

        yield DriverSession(ask, arrow)


def _connect_adbc(address: Any) -> Any:
    """Connect by the driver that gives Arrow; None where it is not installed, or cannot."""
    if find_spec("adbc_driver_postgresql") is None:
        return None
    from adbc_driver_postgresql import dbapi  # noqa: PLC0415

    try:
        return dbapi.connect(address.render_as_string(hide_password=False))
    except Exception:
        # such as a list of hosts, which is written in another way; the other driver has a session already
        return None


def _arrow_batches(opened: Any, begin: Sequence[str], statement: str) -> Iterator[Any]:
    """Rows of a statement in the binary form in which the server sends them, without a Python object each.

    In a READ ONLY transaction of its own, which begins with some statements: its state is that of another.
    """
    with opened as connection, connection.cursor() as cursor:
        for text in ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY", *begin, statement):
            cursor.execute(text)
        yield from cursor.fetch_record_batch()


@contextmanager
def _read_mysql(url: Any, seconds: int) -> Iterator[DriverSession]:
    """READ ONLY transaction of MySQL or MariaDB; rows are not held by the driver.

    The driver refuses a text of several statements, unless the connection string asks for them.
    """
    with _session(url.set(drivername="mysql+pymysql"), extra="mysql") as (connection, dialect):
        import pymysql  # noqa: PLC0415

        limit = f"max_statement_time = {seconds}"
        if not dialect.is_mariadb:
            limit = f"max_execution_time = {1000 * seconds}"
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute(f"SET SESSION {limit}")
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        yield DriverSession(lambda text: _answer(connection.cursor(pymysql.cursors.SSCursor), text))


@contextmanager
def _read_oracle(url: Any, seconds: int) -> Iterator[DriverSession]:
    """READ ONLY transaction; the server takes one statement at a time."""
    with _session(url.set(drivername="oracle+oracledb"), extra="oracle") as (connection, _):
        connection.call_timeout = 1000 * seconds
        connection.rollback()
        connection.cursor().execute("SET TRANSACTION READ ONLY")
        yield DriverSession(lambda statement: _answer(connection.cursor(), statement))


@contextmanager
def _read_mssql(url: Any, seconds: int) -> Iterator[DriverSession]:
    """Transaction of SQL Server, always rolled back; the server has none that is read-only.

    It also takes several statements in one text: a query may not leave its parentheses, see
    :func:`fedstat.federation.tables.databases.database.single_query`.
    """
    address = url.set(drivername="mssql+pymssql")
    given = {"timeout": seconds}
    with _session(address, given, "mssql", isolation_level="SNAPSHOT") as (connection, _):
        yield DriverSession(lambda statement: _answer(connection.cursor(), statement))


@contextmanager
def _read_sqlite(url: Any, seconds: int) -> Iterator[DriverSession]:
    """File opened with mode=ro, so that neither it nor a missing one is written; query_only besides.

    The driver refuses a text of several statements.
    """
    path = quote(str(Path(url.database.removeprefix("file:")).absolute()))
    address = url.set(drivername="sqlite", database=f"file:{path}", query={"mode": "ro", "uri": "true"})
    with _session(address) as (connection, _):
        connection.execute("PRAGMA query_only = ON")
        connection.execute("BEGIN")
        until = [0.0]
        connection.set_progress_handler(lambda: time.monotonic() > until[0], STEPS_PER_LOOK)

        def ask(statement: str) -> Answer:
            until[0] = time.monotonic() + seconds
            return _answer(connection.cursor(), statement)

        yield DriverSession(ask)


@contextmanager
def _session(
    address: Any, given: Mapping[str, Any] | None = None, extra: str = "sql", **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Open the driver's own connection, which hands out plain tuples; whatever it did is rolled back."""
    import sqlalchemy  # noqa: PLC0415

    try:
        # without a pool: no session stays open between two reads
        engine = sqlalchemy.create_engine(
            address,
            poolclass=sqlalchemy.NullPool,
            logging_name=LOGGER,
            pool_logging_name=LOGGER,
            connect_args=dict(given or {}),
        )
        connection = engine.connect().execution_options(**options)
    except ModuleNotFoundError as error:
        remedy = f"this database needs its driver: pip install fedstat[{extra}]"
        raise ImportError(NO_SQL if extra == "sql" else remedy) from error
    except Exception as error:
        raise UnreachableError(type(getattr(error, "orig", None) or error).__name__) from None
    try:
        yield connection.connection.driver_connection, engine.dialect
    finally:
        # a server that has gone is told of elsewhere
        with suppress(Exception):
            connection.connection.rollback()
        with suppress(Exception):
            connection.close()
        engine.dispose()


def _answer(cursor: Any, statement: str) -> Answer:
    # without parameters a percent sign or a colon in the query means itself
    cursor.execute(statement)
    names = tuple(column[0] for column in cursor.description or ())
    return names, _batches(cursor)


def _batches(cursor: Any) -> Iterator[Batch]:
    """Fetch rows until there are no more; a driver may not take another statement before that."""
    try:
        while rows := cursor.fetchmany(ROWS_PER_FETCH):
            yield rows
    finally:
        with suppress(Exception):
            cursor.close()


@contextmanager
def _read_duckdb(url: Any, seconds: int) -> Iterator[DriverSession]:
    """File opened with read_only=True, for one statement that DuckDB's own parser takes for a SELECT.

    The second matters: COPY ... TO writes a file in a read-only session too. It stops no statement.
    """
    try:
        import duckdb  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SQL) from error
    try:
        connection = duckdb.connect(url.database, read_only=True)
    except Exception as error:
        raise UnreachableError(type(error).__name__) from None

    def ask(statement: str) -> Answer:
        found = [part.type for part in connection.extract_statements(statement)]
        if found != [duckdb.StatementType.SELECT]:
            raise duckdb.InvalidInputException("not one read-only statement")
        return _answer(connection.cursor(), statement)

    with connection:
        yield DriverSession(ask)


@dataclass(frozen=True, slots=True)
class DatabaseReader:
    """How a kind of database is held to reading, and how it quotes names.

    `is_file` says that it is a file, `takes_batches` that a text may hold several statements.
    """

    open: OpenSession
    quotes: tuple[str, str] = ('"', '"')
    is_file: bool = False
    takes_batches: bool = False

    def quoted(self, name: str) -> str:
        """Write a column's name as the database takes it."""
        first, last = self.quotes
        return first + name.replace(last, 2 * last) + last


READERS: Mapping[str, DatabaseReader] = MappingProxyType(
    {
        "postgresql": DatabaseReader(_read_postgresql),
        "sqlite": DatabaseReader(_read_sqlite, is_file=True),
        "duckdb": DatabaseReader(_read_duckdb, is_file=True),
        "mysql": DatabaseReader(_read_mysql, ("`", "`")),
        "mssql": DatabaseReader(_read_mssql, ("[", "]"), takes_batches=True),
        "oracle": DatabaseReader(_read_oracle),
    }
)
"""By SQLAlchemy's name of the kind."""
