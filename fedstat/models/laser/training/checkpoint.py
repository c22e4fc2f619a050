"""A training that was broken off, in a file: it goes on where it was, to the bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstat.errors import MessageError, ModelError
from fedstat.federation.message import pack, unpack
from fedstat.records import from_plain, to_plain
from fedstat.typing import Floats

FORMAT = "fedstat laser training 1"


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """A training after an epoch.

    `history`, `best` and `keep` are those of the course; `random` is the state of the random numbers, in
    JSON, `networks` and `heads` are what :meth:`Networks.state` gives, and `settings` is a digest of all that
    shapes the course.
    """

    history: Floats
    best: int
    keep: bool
    random: str
    networks: Mapping[str, Floats]
    heads: Floats
    settings: str


def settings_digest(*settings: Any) -> str:
    """Digest of what shapes a training."""
    plain = [one.tolist() if isinstance(one, np.ndarray) else str(one) for one in settings]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def write_training(path: Path, state: TrainingState) -> None:
    """Write the state; what was there before is replaced once the new file is whole."""
    arrays: dict[str, Any] = {}
    content = json.dumps(to_plain(state, arrays))
    whole = path.with_name(path.name + ".new")
    whole.write_bytes(pack({"format": FORMAT, "content": content}, arrays))
    whole.replace(path)


def read_training(path: Path, settings: str) -> TrainingState | None:
    """Read the state of a training with these settings; None without a file.

    Raises
    ------
    ModelError
        The file is not one of a training, or of one with other settings.
    """
    if not path.exists():
        return None
    try:
        header, arrays = unpack(path.read_bytes())
        if header.get("format") != FORMAT:
            raise MessageError("another format")
        content = json.loads(header["content"])
        state: TrainingState = from_plain(TrainingState, content, "its content", ModelError, arrays=arrays)
    except (MessageError, LookupError, ValueError) as error:
        raise ModelError(f"checkpoint: {path.name} is no file of a training; name another") from error
    if state.settings != settings:
        raise ModelError(
            f"checkpoint: {path.name} is of a training with other data or arguments; name another file, or "
            "delete it to begin anew"
        )
    return state
