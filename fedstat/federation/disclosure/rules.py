"""Rules of a policy: one record for each, and what follows from the records: values, comparison and file.

A policy is a dataclass whose fields are made by :func:`rule`. A field without a record cannot be compared,
written or explained: :func:`rules_of`, which every policy calls when it is made, raises for it.
"""

from __future__ import annotations

import difflib
import json
import math
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, get_args

from fedstat.errors import PartitionError, Remedy
from fedstat.federation.message import ArrayKind
from fedstat.federation.state_formats import renamed

# ----------------------------------------------------------------------------------------------------
# One rule, one record.

ANALYST, COORDINATOR, OTHER_SITE = "Analyst", "Coordinator", "Another site"
DEPARTING, INTRUDER = "Coordinator that deviates", "Intruder with file access"
PARTIES: Mapping[str, str] = {
    ANALYST: "uses the public interface as often as it wants, in many sessions",
    COORDINATOR: "follows the protocol, and keeps all messages",
    OTHER_SITE: "follows the protocol, knows its own columns, and may collude with the coordinator",
    DEPARTING: "sends any well-formed request, in any order, to any sites",
    INTRUDER: "reads and writes the exchange folder, or the files of a site",
}

Compare: TypeAlias = Callable[[Any, Any], bool]
"""Return whether the first of two values of a rule allows nothing that the second does not allow."""
Domain: TypeAlias = tuple[str, Callable[[Any], bool], Compare]
"""Valid values of a rule, in words; whether a value is valid; and how two values compare."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Everything that is known about a rule of a policy, except the check that enforces it.

    Parameters
    ----------
    words : str
        Its name in refusals and ledgers; empty if it refuses nothing by itself.
    expected : str
        Valid values, in words.
    fits : callable
        Whether a value is valid.
    within : callable
        Whether the first of two values allows nothing that the second does not allow.
    comment : str
        The rule, for the site's owner.
    default, strict : object
        Value in the open policy, and in the one with which a served site starts.
    without : mapping of str to str
        What each party learns if the rule is looser than strict.
    example : str
        Shown in a template where the rule is off.
    moot : callable
        Whether the other rules of a policy make it no looser than strict, whatever its value.
    section : bool
        Whether it is a section of the file.
    """

    words: str
    expected: str
    fits: Callable[[Any], bool]
    within: Compare
    comment: str
    default: Any
    strict: Any
    without: Mapping[str, str]
    example: str
    moot: Callable[[Any], bool]
    section: bool


def rule(
    default: Any,
    words: str,
    domain: Domain,
    comment: str,
    *,
    strict: Any = MISSING,
    without: Mapping[str, str] | None = None,
    example: str = "",
    moot: Callable[[Any], bool] = lambda policy: False,
    section: bool = False,
    kw_only: bool = False,
) -> Any:
    """Declare a rule as the field of a policy; see :class:`Rule`. `strict` is `default` by default."""
    strict = default if strict is MISSING else strict
    record = Rule(words, *domain, comment, default, strict, without or {}, example, moot, section)
    return field(default=default, kw_only=kw_only, metadata={"rule": record})


def rules_of(policy: type[Any]) -> Mapping[str, Rule]:
    """Return the records of a class of policies, by field; a KeyError where a field has none."""
    return {one.name: one.metadata["rule"] for one in fields(policy)}


def looser_rules(policy: Any) -> tuple[str, ...]:
    """Return the names of the rules of a policy that allow something that the strict policy does not."""
    return tuple(
        name
        for name, one in rules_of(type(policy)).items()
        if not one.within(getattr(policy, name), one.strict) and not one.moot(policy)
    )


def stricter_rules(before: Any, after: Any) -> tuple[str, ...]:
    """Return the names of changed rules that no longer allow everything that they allowed."""
    return tuple(
        name
        for name, one in rules_of(type(after)).items()
        if (old := getattr(before, name)) != (new := getattr(after, name)) and not one.within(old, new)
    )


# ----------------------------------------------------------------------------------------------------
# Valid values of rules, and how two values compare.

RELEASE_KINDS: tuple[str, ...] = get_args(ArrayKind)


def choice(*words: str, strictest: str) -> Domain:
    """Expect one of some words; more than two are listed from the strictest to the loosest."""
    order = sorted(words, key=lambda word: word != strictest)
    quoted = [f'"{word}"' for word in words]
    expected = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return expected, lambda value: value in words, lambda a, b: order.index(a) <= order.index(b)


def integer(least: int, within: Compare, none: bool = False) -> Domain:
    """Expect a whole number of at least `least`, or None."""
    expected = f"a whole number of at least {least}"
    return expected, lambda value: (none and value is None) or is_integer(value, least), within


def limit(off: Any) -> Compare:
    """Compare upper limits; the value `off` means no limit."""
    return lambda a, b: b == off or (a != off and a <= b)


def is_integer(value: object, least: int) -> bool:
    """Return whether a value is a whole number of at least `least`, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_name_set(value: object) -> bool:
    """Return whether a value is a set of names that can be printed."""
    return isinstance(value, frozenset) and all(
        isinstance(name, str) and name.isprintable() and name for name in value
    )


def check_policy_values(where: str, policy: type[Any], values: Mapping[str, object]) -> None:
    """Check the values of a policy; a PartitionError lists expected and received values by rule."""
    wrong = [
        f"{name}: expected {one.expected}, received {_received_text(name, one, values[name])}"
        for name, one in rules_of(policy).items()
        if name in values and not one.fits(values[name])
    ]
    if wrong:
        raise PartitionError(f"{where}: {'; '.join(wrong)}")


def _received_text(name: str, one: Rule, value: object) -> str:
    """Show an invalid value, with a remedy if one is known."""
    if one.section:
        return type(value).__name__
    if isinstance(value, frozenset):
        unknown = sorted(value - set(RELEASE_KINDS), key=str) if name == "refused_kinds" else []
        hints = (_suggestion(str(kind), RELEASE_KINDS) for kind in unknown)
        return " ".join([str(sorted(value, key=str)), *hints]).rstrip()
    if isinstance(value, str) and value in EARLIER_WORDS and one.fits(EARLIER_WORDS[value]):
        return f"{value!r}, which is now called {EARLIER_WORDS[value]!r}"
    remedy = f"; write [{value!r}] for one" if _is_listed(one) and isinstance(value, str) else ""
    return f"{value!r}{remedy}"


EARLIER_WORDS: Mapping[object, str] = {"told": "sent"}
"""Values of rules in earlier versions, and their present words."""


def _is_listed(one: Rule) -> bool:
    """Return whether the file has a list and the policy a set."""
    return one.fits(frozenset(["aggregate"]))


def _suggestion(word: str, words: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"(did you mean {close[0]!r}?)" if close else ""


# ----------------------------------------------------------------------------------------------------
# A policy as a file.

FILE_HEADER = """\
What this site may release. The owner of the site decides.

The site compares every request with these rules, and refuses what they do not allow.
A served site uses the value of Policy.strict() for a rule that is missing here or commented out with '#'."""


def toml_value(value: object) -> str:
    """Write one value."""
    match value:
        case bool():
            return str(value).lower()
        case frozenset():
            return f"[{', '.join(toml_value(item) for item in sorted(value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)


def toml_line(name: str, value: object) -> str:
    """Return the line of a policy file, as an owner would write it."""
    return f"{name} = {toml_value(value)}"


def toml_comment(text: str) -> str:
    """Write paragraphs as a comment."""
    paragraphs = text.split("\n\n")
    wrapped = (textwrap.wrap(" ".join(part.split()), 88) for part in paragraphs)
    return "\n#\n".join("\n".join(f"# {line}" for line in lines) for lines in wrapped)


def write_policy(policy: Any) -> str:
    """Text of a policy file, with a comment that explains every rule."""
    parts = [toml_comment(FILE_HEADER)]
    for name, one in rules_of(type(policy)).items():
        value = getattr(policy, name)
        if value is None:
            lines = "\n".join(f"# {line}" for line in one.example.splitlines())
        elif one.section:
            given = {key: one for key, one in asdict(value).items() if one is not None}
            lines = "\n".join([f"[{name}]", *(toml_line(*item) for item in given.items())])
        else:
            lines = toml_line(name, value)
        parts.append(f"{toml_comment(one.comment)}\n{lines}")
    return "\n\n".join(parts) + "\n"


def lines_not_in(policy: Any, text: str | bytes) -> list[str]:
    """Return the lines of rules that hold by a policy although a file with this text does not have them."""
    named = tomllib.loads(text if isinstance(text, str) else text.decode())
    rules = ((name, getattr(policy, name)) for name, one in rules_of(type(policy)).items() if not one.section)
    return [toml_line(name, value) for name, value in rules if value is not None and name not in named]


def rules_text(policy: Any) -> str:
    """Text of a policy file without comments."""
    lines = write_policy(policy).splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("#"))


def read_policy(path: str | Path) -> tuple[str, bytes]:
    """Read a policy file: its name for messages, and its text; a PartitionError if it cannot be read."""
    file = Path(path)
    where = f"policy file {str(file)!r}"
    try:
        return where, file.read_bytes()
    except OSError as error:
        raise PartitionError(
            f"{where}: cannot be read ({type(error).__name__})",
            remedy=Remedy("Policy().to_toml()", "Write one with {call}, which explains every rule"),
        ) from None


def parse_policy(where: str, text: bytes, policy: type[Any]) -> dict[str, Any]:
    """Read the text of a policy file: values by rule, with sets instead of lists.

    A PartitionError if the text is not TOML, or has an unknown key.
    """
    try:
        content = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # of syntax, of text, of numbers and of nesting without end
        raise PartitionError(
            f"{where}: is not TOML ({error}). Write texts in quotes, lists in brackets, and truth values as "
            "true and false"
        ) from None
    rules = rules_of(policy)
    check_names(where, content, tuple(rules))
    for name, value in content.items():
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        content[name] = frozenset(value) if texts and _is_listed(rules[name]) else value
    return content


def check_names(where: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Require that a file has only keys that are known; a PartitionError names the others."""
    if old := renamed(found, known):
        raise PartitionError(f"{where}: {old}")
    unknown = [f"{name!r} {_suggestion(name, known)}".rstrip() for name in found if name not in known]
    if unknown:
        raise PartitionError(f"{where}: unknown key {', '.join(unknown)}. Its keys are {', '.join(known)}")
