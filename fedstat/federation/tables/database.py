"""Read-only sessions with a site's database, one reader for each kind of database."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from fedstat.errors import FedstatError, PartitionError

# ----------------------------------------------------------------------------------------------------
# Read-only sessions, one for each kind of database, in which all statements see one state of the records.
#
# ============  ======================  ========================================  ===========================
# kind          driver                  what refuses a write                      one state by
# ============  ======================  ========================================  ===========================
# postgresql    psycopg, ADBC           READ ONLY transaction                     REPEATABLE READ
# mysql         pymysql                 READ ONLY transaction                     CONSISTENT SNAPSHOT
# oracle        oracledb                READ ONLY transaction                     the same
# mssql         pymssql                 a query only inside parentheses    SNAPSHOT isolation
# sqlite        sqlite3                 file opened ``mode=ro``, query_only       BEGIN
# duckdb        duckdb                  file opened read_only, one SELECT only    no concurrent writer
# ============  ======================  ========================================  ===========================

NO_SQL = "databases are read by SQLAlchemy, psycopg, duckdb and pyarrow: pip install fedstat[sql]"
PLAIN = frozenset({16, 20, 21, 23, 25, 700, 701, 1043})
"""Types of PostgreSQL whose values are the same in Arrow: true/false, integers, doubles, text."""
ROWS_PER_FETCH = 16_384
STEPS_PER_LOOK = 100_000
"""Of SQLite's own machine, between two looks at the clock."""
LOGGER = "fedstat"
# SQLAlchemy can log every row, and a server's messages about an account: no log shows either, at any level
for logger in ("engine.Engine", "pool.impl.NullPool"):
    logging.getLogger(f"sqlalchemy.{logger}.{LOGGER}").setLevel(logging.CRITICAL)

RowBatch: TypeAlias = Sequence[tuple[Any, ...]]
StatementResult: TypeAlias = tuple[tuple[str, ...], Iterator[RowBatch]]
"""Names of the columns, and the rows by and by."""
StatementRunner: TypeAlias = Callable[[str], StatementResult]
ArrowRunner: TypeAlias = Callable[[str], Iterator[Any] | None]
"""Arrow batches of a statement; None where its rows are to be had by the driver alone."""


@dataclass(frozen=True, slots=True)
class DriverSession:
    """One session: the rows of a statement, and the same as Arrow where that is faster."""

    run_query: StatementRunner
    arrow: ArrowRunner = lambda _: None


OpenSession: TypeAlias = Callable[[Any, int], AbstractContextManager[DriverSession]]
"""From an address, and the seconds that one statement may take."""


class UnreachableError(Exception):
    """No session was had; the text names the type of the driver's error only."""


@contextmanager
def _read_postgresql(url: Any, seconds: int) -> Iterator[DriverSession]:
    """READ ONLY transaction, rows through a server-side cursor, always rolled back.

    It must be psycopg with a named cursor: this is declared by the extended protocol, in which the server
    refuses several statements in one text. A plain cursor would run ``...; COMMIT; DELETE ...``, and leave
    the transaction. Numbers come in binary form, so that no setting of the account rounds them.
    """
    address = url.set(drivername="postgresql+psycopg")
    with _session(address, isolation_level="REPEATABLE READ", postgresql_readonly=True) as (connection, _):
        limit = f"SET LOCAL statement_timeout = {1000 * seconds}"
        connection.execute(limit)

        def run_query(statement: str) -> StatementResult:
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

        yield DriverSession(run_query, arrow)


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
    :func:`fedstat.federation.tables.database.single_query`.
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

        def run_query(statement: str) -> StatementResult:
            until[0] = time.monotonic() + seconds
            return _answer(connection.cursor(), statement)

        yield DriverSession(run_query)


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
        # a lost server is reported elsewhere
        with suppress(Exception):
            connection.connection.rollback()
        with suppress(Exception):
            connection.close()
        engine.dispose()


def _answer(cursor: Any, statement: str) -> StatementResult:
    # without parameters a percent sign or a colon in the query means itself
    cursor.execute(statement)
    names = tuple(column[0] for column in cursor.description or ())
    return names, _batches(cursor)


def _batches(cursor: Any) -> Iterator[RowBatch]:
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

    def run_query(statement: str) -> StatementResult:
        found = [part.type for part in connection.extract_statements(statement)]
        if found != [duckdb.StatementType.SELECT]:
            raise duckdb.InvalidInputException("not one read-only statement")
        return _answer(connection.cursor(), statement)

    with connection:
        yield DriverSession(run_query)


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


# ----------------------------------------------------------------------------------------------------
# Records that a site's own database answers to one query, which is read and never written.
#
# The query runs inside one statement of this package, ``SELECT columns FROM (query) ORDER BY key``, in a
# session that the database itself keeps read-only; see :mod:`fedstat.federation.tables.database`. Only a
# SELECT is possible there: the driver refuses several statements in one text, and the session refuses writes
# of a function. All statements of a session see the database as at the first one. Use an account that may
# only SELECT: no read-only session prevents a superuser's actions outside the tables (files, other servers).
#
# Nothing that a database or its driver says is passed on: it may quote values or the connection string.

T = TypeVar("T")
LEADING_WORD = re.compile(r"\A(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*(\w+)", re.DOTALL)
WRITES = ("25006", "25001")
"""PostgreSQL's codes for a write in a read-only transaction, and for the attempt to make it another."""
WRITING_WORD = re.compile(
    r"\b(INSERT|UPDATE|DELETE|MERGE|INTO|CREATE|DROP|ALTER|TRUNCATE|COPY|GRANT|REVOKE|CALL|SET|COMMIT|"
    r"ROLLBACK|ATTACH|PRAGMA|VACUUM|nextval|setval)\b",
    re.IGNORECASE,
)
TOO_LONG = re.compile(r"57014|timeout|timed out|interrupted|max_statement_time", re.IGNORECASE)
"""In what a driver says of a statement that took longer than the owner allows."""
QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\[(?:[^\]]|\]\])*\]""")
SECONDS = 3600
"""Longest that a database may work on one statement, where its owner does not say."""


@dataclass(frozen=True, slots=True)
class Database:
    """A site's database; ``open()`` is a read-only session, a function from a statement to its rows.

    Errors name the site and `where` its owner keeps the connection string; they never contain the string.
    """

    site: str
    where: str
    open: Callable[[], AbstractContextManager[DriverSession]]
    reader: DatabaseReader

    def __repr__(self) -> str:
        return f"Database({self.site!r}, {self.where})"

    @contextmanager
    def session(self) -> Iterator[DatabaseSession]:
        """Open a session; PartitionError where none is had."""
        problem = ""
        with ExitStack() as closing:
            try:
                held = closing.enter_context(self.open())
            except (FedstatError, ImportError):
                raise
            except Exception as error:
                problem = self.problem(error, "")
            # raised here, so that the driver's own error does not hang on to it
            if problem:
                raise PartitionError(problem)
            yield DatabaseSession(self, held)

    def rows(self, statement: str, names: list[str]) -> Iterator[RowBatch]:
        """Stream the rows of one statement in a session of its own."""
        with self.session() as session:
            yield from session.rows(statement, names)

    def problem(self, error: Exception, statement: str) -> str:
        """Say what went wrong, by the type of the driver's error alone."""
        original = getattr(error, "orig", None) or error
        state = getattr(original, "sqlstate", None)
        word = type(original).__name__ + (f", SQLSTATE {state}" if state else "")
        if isinstance(error, UnreachableError):
            return (
                f"{self.site}: its database could not be opened ({error}). Check the connection string in "
                f"{self.where}, that the server runs, and that it lets this account in."
            )
        said_so = state in WRITES or re.search(r"read[- ]?(only|write)", str(original), re.IGNORECASE)
        if said_so or WRITING_WORD.search(statement):
            return (
                f"{self.site}: a query that writes: expected a single SELECT, or WITH ... SELECT, that "
                f"changes nothing. The database refused it ({word}) and nothing was changed."
            )
        if TOO_LONG.search(f"{state} {original}"):
            return (
                f"{self.site}: the database took too long for the query and was stopped ({word}). Give it "
                "more seconds by 'timeout' in the source, or let the query ask for less."
            )
        return f"{self.site}: the database refused the query ({word}). Try it in the database's own client."


@dataclass(frozen=True, slots=True)
class DatabaseSession:
    """One read-only session, whose statements all see the database as it was at the first."""

    database: Database
    held: DriverSession

    def rows(self, statement: str, names: list[str]) -> Iterator[RowBatch]:
        """Stream the rows of a statement, and write the names of its columns into `names`."""

        def answer() -> Iterator[RowBatch]:
            names[:], parts = self.held.run_query(statement)
            yield from parts

        return self._guarded(answer, statement)

    def batches(self, statement: str) -> Iterator[Any]:
        """Stream the rows of a statement as Arrow batches, or as tuples where the database has no others."""

        def answer() -> Iterator[Any]:
            found = self.held.arrow(statement)
            yield from self.held.run_query(statement)[1] if found is None else found

        return self._guarded(answer, statement)

    def _guarded(self, answer: Callable[[], Iterator[T]], statement: str) -> Iterator[T]:
        problem = ""
        try:
            yield from answer()
        except (FedstatError, ImportError):
            raise
        except Exception as error:
            problem = self.database.problem(error, statement)
        if problem:
            raise PartitionError(problem)


def open_database(site: str, address: str, where: str, seconds: int = SECONDS) -> Database:
    """Find out how a database is read, from the connection string in SQLAlchemy's form; nothing is read yet.

    A statement of the database may take this number of seconds. PartitionError if the string cannot be used,
    or if no read-only session is known for such a database. The string itself is in no error, only `where`
    its owner keeps it.
    """
    try:
        import sqlalchemy  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SQL) from error
    try:
        # raised below, because the parser's own error quotes the connection string
        url = sqlalchemy.make_url(address)
    except Exception:
        url = None
    if url is None:
        raise PartitionError(
            f"{site}: what is in {where} is no connection string; expected one such as "
            "postgresql://user:password@host/database"
        )
    name = {"postgres": "postgresql", "mariadb": "mysql"}.get(url.get_backend_name(), url.get_backend_name())
    if name not in READERS:
        raise PartitionError(
            f"{site}: no read-only session is known for databases of the kind {name!r}; known are "
            f"{', '.join(READERS)}. Export the records to Parquet instead."
        )
    reader = READERS[name]
    if reader.is_file and url.database in (None, "", ":memory:"):
        raise PartitionError(f"{site}: the connection string in {where} names no file of a database")
    return Database(site, where, lambda: reader.open(url, seconds), reader)


def single_query(database: Database, query: str) -> str:
    """Refuse what does not begin like a query; the database itself judges the rest.

    If the database accepts several statements in one text, a query is refused that could end its enclosing
    parentheses: one with comments, semicolons, or a closing parenthesis without an opening one.
    """
    site = database.site
    text = query.strip().removesuffix(";")
    word = LEADING_WORD.match(text)
    if word is None or word.group(1).upper() not in ("SELECT", "WITH"):
        raise PartitionError(
            f"{site}: a query that writes, or none: expected a single statement that begins with SELECT or "
            f"WITH; it begins with {word.group(1).upper() if word else 'something else'}"
        )
    if database.reader.takes_batches and not stays_inside(text):
        raise PartitionError(
            f"{site}: a query that may hold more than one statement: this database takes a SELECT without "
            "comments and semicolons, whose parentheses and quotes are closed"
        )
    return text


def stays_inside(query: str) -> bool:
    """Whether a text between parentheses ends where these do, as SQL Server reads it."""
    # comments first, also within quotes: inside a comment a quote has no effect
    if re.search(r"--|/\*", query):
        return False
    bare = QUOTED.sub(" ", query)
    depths = list(accumulate((1 if sign == "(" else -1) for sign in re.findall(r"[()]", bare)))
    return not re.search(r"['\"\[\];]", bare) and min(depths, default=0) >= 0 and sum(depths[-1:]) == 0
