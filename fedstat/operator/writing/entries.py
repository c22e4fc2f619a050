"""Single entries of TOML files, written and withdrawn without touching what people wrote around them."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedstat.errors import PartitionError
from fedstat.federation.account.head import told
from fedstat.federation.files import write_whole


def quoted(text: str) -> str:
    """Write a text as TOML."""
    return json.dumps(text, ensure_ascii=False)


def set_entry(path: Path, table: str, name: str, value: str) -> None:
    """Write an entry of a table, or of the top where the table is empty, in the place of an earlier one.

    PartitionError where the file is laid out in a way that this does not understand; nothing was changed.
    """
    line = f"{quoted(name) if table else name} = {quoted(value)}"

    def edit(lines: list[str]) -> list[str]:
        start, end = _bounds(lines, table)
        here = [place for place in range(start, end) if _name(lines[place]) == name]
        if here:
            return [*lines[: here[0]], line, *lines[here[0] + 1 :]]
        # before the blank lines, and the words about it, that part the table from the next one
        while end > start and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
            end -= 1
        return [*lines[:end], line, *lines[end:]]

    _rewrite(path, edit, lambda content: _table(content, table).update({name: value}))


def make_table(path: Path, table: str) -> None:
    """Begin a table at the end of a file that does not have it: one made before there was such a table."""
    text = path.read_text(encoding="utf-8")
    if table not in tomllib.loads(text):
        write_whole(path, f"{text.rstrip()}\n\n[{table}]\n".encode())


def withdraw_entry(path: Path, table: str, name: str) -> None:
    """Put an entry behind a '#', with the time; PartitionError as for :func:`set_entry`, or without one."""

    def edit(lines: list[str]) -> list[str]:
        start, end = _bounds(lines, table)
        return [
            f"# withdrawn {told(time.time_ns())}: {line}"
            if start <= place < end and _name(line) == name
            else line
            for place, line in enumerate(lines)
        ]

    _rewrite(path, edit, lambda content: _table(content, table).pop(name))


def _rewrite(
    path: Path, edit: Callable[[list[str]], list[str]], change: Callable[[dict[str, Any]], object]
) -> None:
    """Edit the text, and make sure that it then says what was meant."""
    text = path.read_text(encoding="utf-8")
    meant = tomllib.loads(text)
    change(meant)
    edited = "\n".join(edit(text.splitlines())) + "\n"
    try:
        same = tomllib.loads(edited) == meant
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        raise PartitionError(f"'{path}' could not be edited here; write the entry by hand")
    write_whole(path, edited.encode())


def _table(content: dict[str, Any], table: str) -> dict[str, Any]:
    found: dict[str, Any] = content.setdefault(table, {}) if table else content
    return found


def _bounds(lines: list[str], table: str) -> tuple[int, int]:
    """Lines of a table without its head; the top ends where the first table begins."""
    heads = [place for place, line in enumerate(lines) if line.strip().startswith("[")] + [len(lines)]
    if not table:
        return 0, heads[0]
    for head, following in pairwise(heads):
        if lines[head].split("#")[0].strip() == f"[{table}]":
            return head + 1, following
    raise PartitionError(f"there is no table [{table}] in the file; write the entry by hand")


def _name(line: str) -> str:
    """Name of the entry that a line makes; empty for none."""
    try:
        # a line that is no TOML by itself is part of a longer entry, or a comment
        return next(iter(tomllib.loads(line)), "")
    except tomllib.TOMLDecodeError:
        return ""
