"""Rows of a query that are read once, as Arrow: in memory while they are few, else in a file of the site's.

The file has no name: it is gone when the process ends, however it ends. What stands in it is sealed
(AES-256-GCM) under a key that was drawn for it and that only the memory of this process has; whoever copies
the disk has noise, and what was altered there is refused. Not sealed are rows in memory, nor what the
operating system swaps out of it.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.tables.databases.readers import NO_SQL

MEGABYTES = 256
"""Of rows that are held in memory, where the owner does not say."""
KEY_BITS, NONCE_BYTES = 256, 12
Pieces: TypeAlias = Mapping[str, Any]
"""Arrow arrays of one length, by column."""


class KeptRows:
    """Pieces of a table's rows, as they were read; at most `megabytes` of them in memory.

    More are in a file in `folder`, or among the system's temporary ones where there is none.
    """

    def __init__(self, site: str, megabytes: int, folder: Path | None = None) -> None:
        self.site, self._limit, self._folder = site, megabytes * 10**6, folder
        self.n_rows = 0
        self._lengths: list[int] = []
        self._held: list[Pieces] = []
        self._bytes = 0
        self._file: SealedFile | None = None

    @property
    def in_file(self) -> bool:
        """Whether they are in a file."""
        return self._file is not None

    def add(self, pieces: Pieces, length: int) -> None:
        """Keep some more rows; EngineError where the disk has no room for them."""
        self._lengths.append(length)
        self.n_rows += length
        self._held.append(pieces)
        self._bytes += sum(piece.nbytes for piece in pieces.values())
        if self._file is None and self._bytes > self._limit:
            self._file = SealedFile(self.site, self._folder)
        if self._file is not None:
            for one in self._held:
                self._file.append(one)
            self._held = []

    def tables(self, types: Mapping[str, Any], rows_per_chunk: int) -> Iterator[Any]:
        """Arrow tables of some columns, of these types, in chunks of a length; the last is shorter."""
        pa = arrow()
        schema = pa.schema(list(types.items()))
        held, n_held = [], 0
        for number, length in enumerate(self._lengths):
            pieces = self._file.read(number, list(types)) if self._file is not None else self._held[number]
            # not safe: whole numbers beside missing ones, or decimals further down, are doubles
            arrays = [pieces[name].cast(of, safe=False) for name, of in types.items()]
            held.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
            n_held += length
            if n_held >= rows_per_chunk:
                table = pa.Table.from_batches(held)
                whole = n_held - n_held % rows_per_chunk
                for start in range(0, whole, rows_per_chunk):
                    yield table.slice(start, rows_per_chunk)
                held, n_held = table.slice(whole).to_batches(), n_held - whole
        if n_held:
            yield pa.Table.from_batches(held)


class SealedFile:
    """Arrow arrays in a file without a name, under a key that is nowhere else; read column by column."""

    def __init__(self, site: str, folder: Path | None) -> None:
        self.site = site
        self._cipher = AESGCM(AESGCM.generate_key(KEY_BITS))
        self._salt = secrets.token_bytes(NONCE_BYTES - 8)
        self._index: list[dict[str, tuple[int, int, int, Any]]] = []
        self._count = 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise self._full(error) from error

    def append(self, pieces: Pieces) -> None:
        """Seal one array of each column."""
        pa = arrow()
        places = {}
        for name, piece in pieces.items():
            batch = pa.RecordBatch.from_arrays([piece], [name])
            sealed = self._cipher.encrypt(
                self._nonce(self._count), memoryview(batch.serialize()).cast("B"), None
            )
            try:
                start = self._file.seek(0, 2)
                self._file.write(sealed)
                self._file.flush()
            except OSError as error:
                raise self._full(error) from error
            places[name] = start, len(sealed), self._count, batch.schema
            self._count += 1
        self._index.append(places)

    def read(self, number: int, names: Sequence[str]) -> Pieces:
        """Open the arrays of some columns; SecurityError where the file was altered."""
        pa = arrow()
        found = {}
        for name in names:
            start, length, count, schema = self._index[number][name]
            self._file.seek(start)
            try:
                content = self._cipher.decrypt(self._nonce(count), self._file.read(length), None)
            except InvalidTag:
                raise SecurityError(
                    f"{self.site}: the file in which its records were kept was altered; start the site again"
                ) from None
            found[name] = pa.ipc.read_record_batch(pa.py_buffer(content), schema).column(0)
        return found

    def _nonce(self, count: int) -> bytes:
        # every array has a number of its own under this key
        return self._salt + count.to_bytes(8, "little")

    def _full(self, error: OSError) -> EngineError:
        return EngineError(
            f"{self.site}: the records of its query cannot be kept in its folder ({error.strerror}); make "
            "room there, or raise 'memory' in its source"
        )


def arrow() -> Any:
    """Return pyarrow; ImportError says what to install."""
    try:
        import pyarrow  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SQL) from error
    return pyarrow
