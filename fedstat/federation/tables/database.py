"""Records that a site's own database answers to one query, which is read and never written.

The query runs as a part of one statement of ours, ``SELECT columns FROM (query) ORDER BY key``, in a session
that the database itself holds read-only; see :data:`READERS`. A statement that is not a SELECT cannot stand
there, several statements in one text are refused by the driver, and what a function would write is refused by
the session. An account that may only SELECT is the right one all the same: what a database's
superuser can do beside its tables (files, other servers) no read-only session prevents.

Nothing that a database or its driver says is passed on: it may quote values or the connection string.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import quote

from fedstat.errors import FedstatError, PartitionError

NO_SQL = "databases are read by SQLAlchemy, psycopg and duckdb: pip install fedstat[sql]"
ROWS_PER_FETCH = 16_384
LOGGER = "fedstat"
# SQLAlchemy can log every row, and what a server says of an account: no log shows either, at any level
for logger in ("engine.Engine", "pool.impl.NullPool"):
    logging.getLogger(f"sqlalchemy.{logger}.{LOGGER}").setLevel(logging.CRITICAL)

Batch: TypeAlias = Sequence[tuple[Any, ...]]
Answer: TypeAlias = tuple[tuple[str, ...], Iterator[Batch]]
"""Names of the columns, and the rows by and by."""

LEADING_WORD = re.compile(r"\A(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*(\w+)", re.DOTALL)
WRITES = ("25006", "25001")
"""PostgreSQL's codes for a write in a read-only transaction, and for the attempt to make it another."""
WRITING_WORD = re.compile(
    r"\b(INSERT|UPDATE|DELETE|MERGE|INTO|CREATE|DROP|ALTER|TRUNCATE|COPY|GRANT|REVOKE|CALL|SET|COMMIT|"
    r"ROLLBACK|ATTACH|PRAGMA|VACUUM|nextval|setval)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Database:
    """A site's database; ``read(statement)`` is a read-only session with the rows of the statement at hand.

    Errors name the site and `where` its owner keeps the connection string, which itself is told nowhere.
    """

    site: str
    where: str
    read: Callable[[str], AbstractContextManager[Answer]]

    def __repr__(self) -> str:
        return f"Database({self.site!r}, {self.where})"

    def rows(self, statement: str, names: list[str]) -> Iterator[Batch]:
        """Stream the rows of a statement, and write the names of its columns into `names`."""
        problem = ""
        try:
            with self.read(statement) as (columns, parts):
                names[:] = columns
                yield from parts
        except (FedstatError, ImportError):
            raise
        except Exception as error:
            problem = self._problem(error, statement)
        # raised here, so that the driver's own error does not hang on to it
        if problem:
            raise PartitionError(problem)

    def _problem(self, error: Exception, statement: str) -> str:
        original = getattr(error, "orig", None) or error
        state = getattr(original, "sqlstate", None)
        word = type(original).__name__ + (f", SQLSTATE {state}" if state else "")
        if isinstance(error, UnreachableError):
            return (
                f"{self.site}: its database could not be opened ({error}). Check the connection string in "
                f"{self.where}, that the server runs, and that it lets this account in."
            )
        said_so = state in WRITES or re.search(r"read-?only", str(original), re.IGNORECASE)
        if said_so or WRITING_WORD.search(statement):
            return (
                f"{self.site}: a query that writes: expected a single SELECT, or WITH ... SELECT, that "
                f"changes nothing. The database refused it ({word}) and nothing was changed."
            )
        return f"{self.site}: the database refused the query ({word}). Try it in the database's own client."


class UnreachableError(Exception):
    """No session was had; the text names the type of the driver's error only."""


def open_database(site: str, address: str, where: str) -> Database:
    """Find out how a database is read, from the connection string in SQLAlchemy's form; nothing is read yet.

    PartitionError where it cannot be used, or no read-only session is known for such a database; the string
    itself is in no error, only `where` its owner keeps it.
    """
    try:
        import sqlalchemy  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SQL) from error
    try:
        # raised below, because the parser's own error quotes the connection string
        url: Any = sqlalchemy.make_url(address)
    except Exception:
        url = None
    if url is None:
        raise PartitionError(
            f"{site}: what is in {where} is no connection string; expected one such as "
            "postgresql://user:password@host/database"
        )
    name = {"postgres": "postgresql"}.get(url.get_backend_name(), url.get_backend_name())
    if name not in READERS:
        raise PartitionError(
            f"{site}: no read-only session is known for databases of the kind {name!r}; known are "
            f"{', '.join(READERS)}. Export the records to Parquet instead."
        )
    if name != "postgresql" and url.database in (None, "", ":memory:"):
        raise PartitionError(f"{site}: the connection string in {where} names no file of a database")
    return Database(site, where, lambda statement: READERS[name](url, statement))


@contextmanager
def _read_postgresql(url: Any, statement: str) -> Iterator[Answer]:
    """READ ONLY transaction, rows through a server-side cursor, always rolled back.

    It has to be psycopg, and a named cursor: that is declared by the extended protocol, in which the server
    refuses a text of several statements. A plain cursor would run ``...; COMMIT; DELETE ...``, and leave the
    transaction. Numbers come in binary form, so that no setting of the account rounds them.
    """
    address = url.set(drivername="postgresql+psycopg")
    with _session(address, postgresql_readonly=True) as connection:
        yield _answer(connection.cursor(name="fedstat", binary=True), statement)


@contextmanager
def _read_sqlite(url: Any, statement: str) -> Iterator[Answer]:
    """File opened with mode=ro, so that neither it nor a missing one is written; query_only besides.

    The driver refuses a text of several statements.
    """
    path = quote(str(Path(url.database.removeprefix("file:")).absolute()))
    address = url.set(drivername="sqlite", database=f"file:{path}", query={"mode": "ro", "uri": "true"})
    with _session(address) as connection:
        connection.execute("PRAGMA query_only = ON")
        yield _answer(connection.cursor(), statement)


@contextmanager
def _session(address: Any, **options: Any) -> Iterator[Any]:
    """Open the driver's own connection, which hands out plain tuples; whatever it did is rolled back."""
    import sqlalchemy  # noqa: PLC0415

    try:
        # without a pool: no session stays open between two reads
        # without a pool: no session stays open between two reads
        engine = sqlalchemy.create_engine(
            address,
            poolclass=sqlalchemy.NullPool,
            logging_name=LOGGER,
            pool_logging_name=LOGGER,
        )
        connection = engine.connect().execution_options(**options)
    except ModuleNotFoundError as error:
        raise ImportError(NO_SQL) from error
    except Exception as error:
        raise UnreachableError(type(getattr(error, "orig", None) or error).__name__) from None
    try:
        yield connection.connection.driver_connection
    finally:
        connection.connection.rollback()
        connection.close()
        engine.dispose()


def _answer(cursor: Any, statement: str) -> Answer:
    # without parameters a percent sign or a colon in the query means itself
    cursor.execute(statement)
    names = tuple(column[0] for column in cursor.description or ())
    return names, iter(lambda: cursor.fetchmany(ROWS_PER_FETCH), [])


@contextmanager
def _read_duckdb(url: Any, statement: str) -> Iterator[Answer]:
    """File opened with read_only=True, for one statement that DuckDB's own parser takes for a SELECT.

    The second matters: COPY ... TO writes a file in a read-only session too.
    """
    try:
        import duckdb  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SQL) from error
    try:
        connection = duckdb.connect(url.database, read_only=True)
    except Exception as error:
        raise UnreachableError(type(error).__name__) from None
    with connection:
        found = [part.type for part in connection.extract_statements(statement)]
        if found != [duckdb.StatementType.SELECT]:
            raise duckdb.InvalidInputException("not one read-only statement")
        yield _answer(connection.cursor(), statement)


READERS: Mapping[str, Callable[[Any, str], AbstractContextManager[Answer]]] = MappingProxyType(
    {"postgresql": _read_postgresql, "sqlite": _read_sqlite, "duckdb": _read_duckdb}
)
"""How each kind of database is held to reading."""


def single_query(site: str, query: str) -> str:
    """Refuse what does not begin like a query; the database itself judges the rest."""
    text = query.strip().removesuffix(";")
    word = LEADING_WORD.match(text)
    if word is None or word.group(1).upper() not in ("SELECT", "WITH"):
        raise PartitionError(
            f"{site}: a query that writes, or none: expected a single statement that begins with SELECT or "
            f"WITH; it begins with {word.group(1).upper() if word else 'something else'}"
        )
    return text
