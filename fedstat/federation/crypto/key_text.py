"""Keys and signatures as text: a JSON object of hexadecimal digits under the name of its form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedstat.errors import SecurityError


def write_parts(form: str, **parts: bytes) -> str:
    """Text that :func:`read_parts` reads."""
    return json.dumps({"format": form, **{name: part.hex() for name, part in parts.items()}})


def read_parts(text: str | bytes, what: str, form: str, lengths: Mapping[str, int]) -> dict[str, bytes]:
    """Read a JSON object of exactly these bytes; the error never quotes it, it may be a private key."""
    try:
        fields = json.loads(text.decode() if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.keys() != {"format", *lengths} or fields["format"] != form:
        raise SecurityError(f"{what} is malformed: expected '{form}' with {', '.join(lengths)}")
    return {name: _unhex(fields[name], length, what) for name, length in lengths.items()}


def _unhex(text: Any, length: int, what: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except (TypeError, ValueError):
        value = b""
    if len(value) != length or len(text) != 2 * length:
        raise SecurityError(f"{what} is malformed: expected {length} bytes in hexadecimal digits")
    return value
