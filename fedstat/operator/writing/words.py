"""The words of a command: what each does, the function that does it, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Argument: TypeAlias = tuple[tuple[str, ...], Mapping[str, Any]]


def argument(*names: str, **options: Any) -> Argument:
    """Keep one argument of a command, in the words of :meth:`argparse.ArgumentParser.add_argument`."""
    return names, options


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it does, the function that does it, and its arguments besides the folder.

    The function takes ``folder`` and the arguments by their names, and returns the exit code; the folder of
    a command that makes one is new.
    """

    name: str
    what: str
    run: Callable[..., int]
    arguments: tuple[Argument, ...] = ()
    is_new: bool = False


def seconds(text: str) -> float:
    """Read a duration."""
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError("seconds")
    return value


def megabytes(text: str) -> float:
    """Read a size."""
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError("megabytes")
    return value


def port(text: str) -> int:
    """Read a port of this machine; 0 for any."""
    value = int(text)
    if not 0 <= value < 2**16:
        raise ValueError("port")
    return value


def mode(text: str) -> int:
    """Read the mode of a file, in octal digits; none that others may write."""
    value = int(text, 8)
    if not 0o400 <= value <= 0o777 or value & 0o022:
        raise ValueError("mode")
    return value


def count(text: str) -> int:
    """Read a number of files."""
    value = int(text)
    if not 0 <= value <= 1000:
        raise ValueError("count")
    return value


JSON = argument("--json", dest="as_json", action="store_true", help="for programs: keys that stay")
