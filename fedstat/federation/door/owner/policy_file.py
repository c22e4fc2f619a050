"""A site's policy as a file of its own: its keys, what each may hold, reading and writing."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstat.errors import PartitionError
from fedstat.federation.door.owner.policy_keys import KEYS, KINDS, Key, is_number
from fedstat.federation.door.owner.toml_text import comment_of, toml_line, toml_value

LARGEST_DELTA = 1e-6
HEAD = """\
What may leave this institution, as its owner decides.

Every question is held against these rules at the institution's own door, and refused there.
A rule that is left out, or stands behind a '#', is that of Policy.strict() at a site that is served."""


PRIVACY = (
    "A privacy budget: how much all answers together, for ever, may tell of one entity's record, as epsilon "
    f"and delta of differential privacy; delta is at most {LARGEST_DELTA:g}. With one, whatever depends on "
    "values leaves only with noise, and is charged before it does; all else is refused, but for which "
    "records there are, and which of them lack a value in the columns of a synthesis. What was charged "
    "stands in the ledger, and stays charged when this file is changed; the same question again has the "
    "same answer, and costs nothing, until the table is changed. 'fedstat site status' shows what is spent."
)
BUDGET = {"epsilon": "a number above 0", "delta": f"a number of at least 0 and at most {LARGEST_DELTA:g}"}
SECTIONS = ("privacy",)


def check_values(where: str, values: Mapping[str, object]) -> None:
    """Hold the values of a policy against what its keys may hold.

    Raises
    ------
    PartitionError
        Lists every key with what was expected and what came.
    """
    wrong = [
        f"{key.name}: expected {key.expected}, received {_shown(values[key.name])}{_remedy(key, values)}"
        for key in KEYS
        if key.name in values and not key.fits(values[key.name])
    ]
    if wrong:
        raise PartitionError(f"{where}: {'; '.join(wrong)}")


def check_budget(where: str, epsilon: object, delta: object) -> None:
    """Hold a privacy budget against what it may be; errors are those of :func:`check_values`."""
    above = ". A larger one would allow some records to be published" if is_number(delta) else ""
    for name, value, fits, remedy in (
        ("epsilon", epsilon, is_number(epsilon) and epsilon > 0, ""),
        ("delta", delta, is_number(delta) and 0 <= delta <= LARGEST_DELTA, above),
    ):
        if not fits:
            raise PartitionError(
                f"{where}: {name}: expected {BUDGET[name]}, received {_shown(value)}{remedy}"
            )


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return str(sorted(value, key=str))
    return repr(value)


def _remedy(key: Key, values: Mapping[str, object]) -> str:
    value = values[key.name]
    if key.name == "refused_kinds" and isinstance(value, frozenset):
        hints = [_meant(str(kind), KINDS) for kind in sorted(value - set(KINDS), key=str)]
        return " ".join(["", *hints]).rstrip()
    if key.listed and isinstance(value, str):
        return f"; write [{value!r}] for one"
    return ""


def _meant(word: str, words: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"(did you mean {close[0]!r}?)" if close else ""


def read_policy(path: str | Path) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Read a policy file.

    Returns
    -------
    where : str
        The file, for messages.
    values : dict
        By key, sets in the place of lists.
    budget : dict or None
        ``epsilon`` and ``delta``.

    Raises
    ------
    PartitionError
        The file is absent or no TOML, or holds a key that there is not.
    """
    file = Path(path)
    where = f"policy file {str(file)!r}"
    try:
        text = file.read_bytes()
    except OSError as error:
        raise PartitionError(
            f"{where}: cannot be read ({type(error).__name__}). Write one with Policy().to_toml(), which "
            "explains every rule"
        ) from None
    return (where, *parse_policy(where, text))


def parse_policy(where: str, text: bytes) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read the text of a policy file: values and budget; see :func:`read_policy`."""
    try:
        content = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # of syntax, of text, of numbers and of nesting without end
        raise PartitionError(
            f"{where}: is not TOML ({error}). Texts stand in quotes, lists in brackets, and truth values are "
            "true and false"
        ) from None
    budget = content.pop("privacy", None)
    names = (*(key.name for key in KEYS), *SECTIONS)
    _check_names(where, tuple(content), names)
    if budget is not None:
        if not isinstance(budget, dict):
            raise PartitionError(f"{where}: privacy: expected a section [privacy] with {', '.join(BUDGET)}")
        _check_names(f"{where}, section [privacy]", tuple(budget), tuple(BUDGET))
        lacking = [name for name in BUDGET if name not in budget]
        if lacking:
            raise PartitionError(f"{where}, section [privacy]: lacks {', '.join(lacking)}; a budget is both")
    return dict(_as_sets(content)), budget


def _as_sets(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    listed = {key.name for key in KEYS if key.listed}
    for name, value in content.items():
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        yield name, frozenset(value) if name in listed and texts else value


def _check_names(where: str, found: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in found if name not in known]
    if unknown:
        listed = ", ".join(f"{name!r} {_meant(name, known)}".rstrip() for name in unknown)
        raise PartitionError(f"{where}: unknown key {listed}. Its keys are {', '.join(known)}")


def write_policy(values: Mapping[str, Any], budget: tuple[float, float] | None) -> str:
    """Text of a policy file, with a comment that explains every rule."""
    parts = [comment_of(HEAD)]
    for key in KEYS:
        value = values[key.name]
        line = f"# {key.example}" if value is None else toml_line(key.name, value)
        parts.append(f"{comment_of(key.comment)}\n{line}")
    given = "epsilon = 1.0\ndelta = 1e-06"
    if budget is None:
        section = "\n".join(f"# {line}" for line in ["[privacy]", *given.splitlines()])
    else:
        section = f"[privacy]\nepsilon = {toml_value(budget[0])}\ndelta = {toml_value(budget[1])}"
    return "\n\n".join([*parts, f"{comment_of(PRIVACY)}\n{section}"]) + "\n"
