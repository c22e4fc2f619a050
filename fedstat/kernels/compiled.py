"""Families whose loops were compiled on this machine: a list next to the machine code that numba keeps.

A site looks here whether it has to compile: the list is read in a millisecond, the small fits of
:mod:`fedstat.warm_up` take seconds even where nothing is left to compile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numba
from numba.core.registry import cpu_target

from fedstat.kernels.exponentials import exponentials

KERNELS = Path(__file__).parent


def list_path() -> Path:
    """Return the file with the list; it has another name after an update of fedstat or numba.

    Numba compiles a file again if its time or its size has changed, or on another processor.
    """
    seen = [numba.__version__, *cpu_target.target_context.codegen().magic_tuple()]
    for path in sorted(KERNELS.rglob("*.py")):
        about = path.stat()
        seen += [path.relative_to(KERNELS).as_posix(), str(about.st_mtime_ns), str(about.st_size)]
    digest = hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]
    return Path(str(exponentials.stats.cache_path), f"compiled-{digest}.txt")


def compiled_families() -> set[str]:
    """Return the families that are on the list."""
    try:
        return set(list_path().read_text(encoding="utf-8").split())
    except OSError:
        return set()


def note_compiled(families: Iterable[str]) -> None:
    """Add families to the list; if it cannot be written, the next process compiles them again."""
    with suppress(OSError), open(list_path(), "a", encoding="utf-8") as file:
        file.write("".join(f"{family}\n" for family in families))
