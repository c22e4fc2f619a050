"""Plain tables and messages on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def shell_path(path: Path) -> str:
    """Write a path as a user types it in a command."""
    return shlex.quote(str(path))


def underlined(text: str) -> str:
    """Underline a heading."""
    return f"{text}\n{'-' * len(text)}"


def print_problems(problems: Sequence[str]) -> int:
    """Print one line per problem; return the exit code, 1 if there is one."""
    for problem in problems:
        print(f"  - {problem}")
    return 1 if problems else 0


def format_columns(rows: Sequence[Sequence[str]], *, head: bool = False, right: Sequence[int] = ()) -> str:
    """Format rows as columns; `head`: the first row has their names; columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    if head:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(f"  {line.rstrip()}" for line in lines)
