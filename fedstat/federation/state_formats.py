"""Numbers of the formats of a site's state files, so that an upgrade converts them or says what to do.

Every file carries the number of its format and the version of fedstat that wrote it. Files from before these
numbers have format 0. A reader converts each earlier format; it refuses a later one, whose meaning it cannot
know. Raise a number here whenever an earlier version could not read what is written, and add the conversion
next to the reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedstat.codec import from_plain, to_plain
from fedstat.errors import EngineError, FedstatError, MessageError
from fedstat.federation.message import VERSION
from fedstat.typing import Array

T = TypeVar("T")
NUMBER, WRITER = "format", "written_by"
"""Names of the two entries in a file."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The format of one kind of state file: what an owner calls the file, and the number that is written."""

    what: str
    number: int

    def check(self, number: object, writer: object, where: str) -> int:
        """Return the number that a file has; EngineError if it is later than this one."""
        if type(number) is not int or number < 0:
            raise EngineError(f"{where}: the {self.what} has no valid number of its format; restore the file")
        if number > self.number:
            by = f"fedstat {str(writer)[:20]}" if writer else "a later version of fedstat"
            remedy = f"{by} or later" if writer else by
            raise EngineError(
                f"{where}: this {self.what} was written by {by} (format {number}). Here runs "
                f"{VERSION}, which reads formats up to {self.number}. Install {remedy}; "
                "nothing was changed, and no records need to be declared lost"
            )
        return number

    def stamp(self) -> dict[str, Any]:
        """Return the entries of a file that name its format."""
        return {NUMBER: self.number, WRITER: VERSION}

    def read(self, content: Mapping[str, Any], where: str) -> int:
        """Return the number of a file's format, 0 without one; EngineError if it is later than this one."""
        return self.check(content.get(NUMBER, 0), content.get(WRITER, ""), where)

    def stamp_arrays(self) -> dict[str, Array]:
        """Return the array of a file of arrays that names its format."""
        return {NUMBER: np.frombuffer(json.dumps(self.stamp()).encode(), dtype=np.uint8)}

    def read_arrays(self, arrays: Mapping[str, Array], where: str) -> int:
        """Return the number of the format of a file of arrays; see :meth:`read`."""
        if NUMBER not in arrays:
            return 0
        try:
            content = json.loads(arrays[NUMBER].tobytes())
        except ValueError:
            content = {NUMBER: None}
        return self.read(content, where)

    def is_earlier(self, path: Path) -> bool:
        """Whether a JSON file has the form of an earlier version; False for a file that is not JSON."""
        try:
            content = json.loads(path.read_bytes())
            return isinstance(content, dict) and self.read(content, path.name) < self.number
        except (OSError, ValueError, RecursionError, EngineError):
            return False

    def write_record(self, record: Any) -> str:
        """Write a record without arrays as JSON text, with the number of the format."""
        return json.dumps(self.stamp() | to_plain(record), allow_nan=False)

    def read_record(
        self, kind: type[T], text: str | bytes, where: str, error: type[FedstatError] = MessageError
    ) -> T:
        """Read the output of :meth:`write_record`, or of an earlier version with fewer entries."""
        try:
            content = json.loads(text)
        except (ValueError, TypeError, RecursionError) as problem:
            raise error(f"{where}: not JSON") from problem
        if isinstance(content, dict):
            self.read(content, where)
            content = {name: value for name, value in content.items() if name not in (NUMBER, WRITER)}
        return from_plain(kind, content, where, error, defaults=True)


def check_form(found: object, form: str, where: str) -> None:
    """Raise an EngineError if a file has a later number in its form, such as "fedstat identity 2".

    Signed files and keys name their form and its number in one text, which the signature covers.
    """
    what, _, number = form.rpartition(" ")
    later = re.fullmatch(re.escape(what) + r" (\d{1,9})", found) if isinstance(found, str) else None
    if later is not None:
        StateFormat(what.removeprefix("fedstat "), int(number)).check(int(later[1]), "", where)


RENAMED: Mapping[str, str] = {"carrier": "transport", "source": "data", "answers_kept": "remember"}
"""Earlier names of entries of federation.toml, site.toml and policy.toml, and their present names."""


def renamed(found: Iterable[str], known: Collection[str]) -> str:
    """Say which entries of a file have another name now; empty if there are none."""
    old = [name for name in found if name not in known and RENAMED.get(name) in known]
    return ", ".join(f"'{name}' is now called '{RENAMED[name]}': rename the entry" for name in old)


LEDGER = StateFormat("ledger", 3)
LEDGER_KEY = StateFormat("key of the ledger", 1)
ANCHOR = StateFormat("anchor of the sessions", 1)
RELOAD = StateFormat("request to read the records again", 1)
HISTORY = StateFormat("release history", 6)
PLAN = StateFormat("plan of an analysis", 1)
DECISION = StateFormat("decision about a plan", 1)
RULES = StateFormat("list of rules in force", 1)
STATUS = StateFormat("status", 1)
SESSION = StateFormat("state of a session", 1)
ALIGNMENT = StateFormat("alignment", 1)
HEADS = StateFormat("list of signed ledgers", 1)
NOTE = StateFormat("note about an analysis", 1)
SHARED_KEYS = StateFormat("count of common keys", 1)
