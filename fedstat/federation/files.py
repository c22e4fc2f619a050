"""Atomic writes, safe reads of files that others may have written, and file locks."""

from __future__ import annotations

import io
import math
import os
import secrets
import stat
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from fedstat.errors import SecurityError
from fedstat.typing import Array

try:
    import fcntl
except ImportError:  # no POSIX: nothing then keeps two processes from one folder
    LOCKS = False
else:
    LOCKS = True


SMALL, MOST_PACKED = 16 * 2**20, 100
"""Bytes that any file of arrays may unpack to, and how many more for each of its own."""
OTHERS, WRITERS = 0o077, 0o022
"""Permissions for others than the owner in a mode: any, or write."""


def is_open_to_others(path: Path, to: int = OTHERS) -> bool:
    """Whether a file or folder that is there lets others do something; never where modes mean nothing."""
    return os.name == "posix" and path.exists() and bool(path.stat().st_mode & to)


def write_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file that is there whole or not at all, also where two threads write it at once.

    A link at its name is replaced, never followed. The name of the part cannot be guessed, and a file that
    has it already is not written to: others may write into the folder.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            if mode != 0o600:  # whatever the mask of the process says
                os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_shared(path: Path, content: bytes) -> None:
    """Write a file as :func:`write_atomic`, which the group may read where the folder hands its group on."""
    write_atomic(path, content, 0o640 if _shared_with(path.parent) else 0o600)


def make_folders(path: Path) -> None:
    """Make a folder with those above it; open to the group where the folder above hands its group on."""
    for place in (*reversed(path.parents), path):
        if not place.exists():
            place.mkdir(exist_ok=True)
            group = _shared_with(place.parent)
            if group:
                place.chmod(0o2700 | group)


def _shared_with(folder: Path) -> int:
    """Tell what the group may do in a folder that hands its group on (setgid); 0 in any other."""
    mode = folder.stat().st_mode
    return mode & 0o070 if os.name == "posix" and mode & stat.S_ISGID else 0


def shared_folder_hint(path: Path, error: OSError) -> str:
    """Return advice on shared folders if an OSError concerns permissions, else an empty text."""
    if not isinstance(error, PermissionError):
        return ""
    place = path.parent
    return (
        f". Another account of this machine owns it: give the folder that both sides use to a group of both, "
        f"chgrp -R GROUP '{place}' and chmod -R g+rws '{place}', and have it hand on that group before files "
        "are put there"
    )


def write_private(path: str | Path, content: bytes) -> None:
    """Write a new file that its owner alone may read (mode 0600); FileExistsError where there is one."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def read_private(path: str | Path, longest: int = -1, where: str = "", remedy: str = "") -> bytes:
    """Read a file that only its owner may read, or its first bytes.

    A SecurityError, between the words `where` and `remedy`, where others may read it.
    """
    # A link is followed: secrets may lie in a store of their own. A pipe is not waited for.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise SecurityError(f"{where}'{path}' is not a plain file; put it back{remedy}")
        mode &= 0o777
        if os.name == "posix" and mode & OTHERS:
            raise SecurityError(
                f"{where}'{path}' may be read by others (mode {mode:04o}); make it private with chmod "
                f"600{remedy}"
            )
        return file.read(longest)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file in a folder that others write to; OSError if it is absent or cannot be read.

    SecurityError for a link, a pipe, a folder or a device: what these lead to is not read.
    """
    # Without O_NONBLOCK the opening of a pipe waits for somebody who writes to it.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if path.is_symlink():
        raise SecurityError(f"'{path.name}': a link; only plain files are read here")
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SecurityError(f"'{path.name}': not a plain file; only these are read here")
    return open(descriptor, "rb")


def read_arrays(content: bytes) -> dict[str, Array]:
    """Read the bytes of a file of arrays (``.npz``); a ValueError where it is none.

    Its sizes are held against each other, and against those of the file, before anything is allocated: a few
    kilobytes may claim, or unpack to, all memory that there is.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(info.file_size for info in file.infolist()) > SMALL + MOST_PACKED * len(content):
                raise ValueError("larger than such a file is")
            return {info.filename.removesuffix(".npy"): _array(file.read(info)) for info in file.infolist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError("no file of arrays") from error
    except (
        SyntaxError,
        MemoryError,
        ArithmeticError,
        AttributeError,
    ) as error:  # of a header, which is Python
        raise ValueError("an array without its shape") from error


def _array(content: bytes) -> Array:
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read_header(stream)
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError("an array of objects")
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise ValueError("an array of another size than it claims")
    flat = np.frombuffer(content, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C").copy()


def check_folder(path: Path) -> None:
    """Refuse a folder that is a link to another place: SecurityError."""
    if path.is_symlink():
        raise SecurityError(f"'{path}': a link to another folder; nothing is read or written through it")


def lock_file(file: IO[bytes]) -> bool:
    """Take a file for this process until it is closed; False where another has it."""
    if not LOCKS:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
