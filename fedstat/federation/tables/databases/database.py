"""Records that a site's own database answers to one query, which is read and never written.

The query runs as a part of one statement of ours, ``SELECT columns FROM (query) ORDER BY key``, in a session
that the database itself holds read-only; see :mod:`fedstat.federation.tables.databases.readers`. A statement
that is not a SELECT cannot stand there, several statements in one text are refused by the driver, and what a
function would write is refused by the session. All statements of a session see the database as it was at the
first. An account that may only SELECT is the right one all the same: what a database's superuser can do
beside its tables (files, other servers) no read-only session prevents.

Nothing that a database or its driver says is passed on: it may quote values or the connection string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.tables.databases.readers import (
    NO_SQL,
    READERS,
    Batch,
    DatabaseReader,
    DriverSession,
    UnreachableError,
)

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

    Errors name the site and `where` its owner keeps the connection string, which itself is told nowhere.
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

    def rows(self, statement: str, names: list[str]) -> Iterator[Batch]:
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

    def rows(self, statement: str, names: list[str]) -> Iterator[Batch]:
        """Stream the rows of a statement, and write the names of its columns into `names`."""

        def answer() -> Iterator[Batch]:
            names[:], parts = self.held.ask(statement)
            yield from parts

        return self._guarded(answer, statement)

    def batches(self, statement: str) -> Iterator[Any]:
        """Stream the rows of a statement as Arrow batches, or as tuples where the database has no others."""

        def answer() -> Iterator[Any]:
            found = self.held.arrow(statement)
            yield from self.held.ask(statement)[1] if found is None else found

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

    The database may work on one statement for so many seconds. PartitionError where the string cannot be
    used, or no read-only session is known for such a database; the string itself is in no error, only `where`
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

    Where it takes several statements in one text, a query is refused that could end the parentheses in which
    it will stand: one with comments, semicolons, or a parenthesis that closes what it did not open.
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
    # comments first, also within quotes: in one, a quote is none
    if re.search(r"--|/\*", query):
        return False
    bare = QUOTED.sub(" ", query)
    depths = list(accumulate((1 if sign == "(" else -1) for sign in re.findall(r"[()]", bare)))
    return not re.search(r"['\"\[\];]", bare) and min(depths, default=0) >= 0 and sum(depths[-1:]) == 0
