"""The policy file of a site: its keys and their allowed values, reading and writing."""

from __future__ import annotations

import difflib
import json
import math
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, get_args

from fedstat.errors import PartitionError
from fedstat.federation.message import ArrayKind

# ----------------------------------------------------------------------------------------------------
# Lines of a policy file as text: values and comments.


def toml_line(name: str, value: object) -> str:
    """Line of a policy file, as an owner would write it."""
    return f"{name} = {toml_value(value)}"


def toml_comment(text: str) -> str:
    """Write paragraphs as a comment."""
    paragraphs = text.split("\n\n")
    wrapped = (textwrap.wrap(" ".join(part.split()), 88) for part in paragraphs)
    return "\n#\n".join("\n".join(f"# {line}" for line in lines) for lines in wrapped)


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


# ----------------------------------------------------------------------------------------------------
# Keys of a policy file: what each may hold, and the rule for its owner.

RELEASE_KINDS: tuple[str, ...] = get_args(ArrayKind)


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """One key of a policy.

    Parameters
    ----------
    name : str
    expected : str
        What it may hold, in words.
    fits : callable
        Whether a value is such.
    comment : str
        The rule, for its owner.
    example : str
        Shown in a template where the rule is off.
    listed : bool
        Whether the file holds a list, and the policy a set.
    """

    name: str
    expected: str
    fits: Callable[[Any], bool]
    comment: str
    example: str = ""
    listed: bool = False


def _is_integer_from(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_name_set(value: object) -> bool:
    return isinstance(value, frozenset) and all(
        isinstance(name, str) and name.isprintable() and name for name in value
    )


POLICY_KEYS: tuple[PolicyKey, ...] = (
    PolicyKey(
        "families",
        "a list of names of families",
        lambda value: value is None or (_is_name_set(value) and len(value) > 0),
        'Families of models that may ask. "design" agrees on columns and is needed by every model, "secure" '
        "agrees on keys and is needed by masked sums; the models are named after their folders, such as "
        '"glm", "vfem" and "fedavg". By default every installed family may ask.',
        'families = ["design", "secure", "glm"]',
        listed=True,
    ),
    PolicyKey(
        "refused_kinds",
        f"a list of {', '.join(map(repr, RELEASE_KINDS))}",
        lambda value: _is_name_set(value) and value <= set(RELEASE_KINDS),
        "Kinds of values that may not leave. From harmless to disclosing: control, schema, presence, sealed, "
        "masked share, aggregate, sketch, per entity, raw columns. A kind that is refused may still enter a "
        "masked sum, which hides this institution's part; not so values per entity, of which every part "
        "follows from the sums of many rounds.",
        'refused_kinds = ["per entity", "raw columns"]',
        listed=True,
    ),
    PolicyKey(
        "per_entity",
        'a whole number of at least 0, or "any"',
        lambda value: value == "any" or _is_integer_from(0)(value),
        "Most numbers for each entity that ever leave, over all analyses, sessions and restarts, masked or "
        "not; 0: none. Each is an equation about the row of its entity: fewer than this institution has "
        "columns leave its rows open, as many give them away. A fit of VFEM with a binary response or count "
        'takes 10 to 30. "any": no limit.',
    ),
    PolicyKey(
        "masked_only",
        "true or false",
        lambda value: isinstance(value, bool),
        "Whether arrays of which only the sum over institutions is needed leave in no other way than masked.",
    ),
    PolicyKey(
        "two_sites",
        '"warn" or "refuse"',
        lambda value: value in ("warn", "refuse"),
        'What to do with a masked sum over two institutions, which hides neither from the other: "warn" or '
        '"refuse".',
    ),
    PolicyKey(
        "quorum",
        "a whole number of at least 0, or a share above 0 and at most 1 with a decimal point",
        lambda value: _is_integer_from(0)(value) or (isinstance(value, float) and 0.0 < value <= 1.0),
        "Fewest institutions in a masked sum: a number, or a share of those that are pinned here (1.0: all). "
        "0: as many as two_sites allows.",
    ),
    PolicyKey(
        "apart",
        "a whole number of at least 1",
        _is_integer_from(1),
        "Fewest institutions that a masked sum, or a difference of masked sums of all sessions from now on, "
        "may be over. 1: where one institution is lost in a fit that goes on without it, its part of earlier "
        "sums follows by subtraction, as it does where an analysis leaves it out. 2 or more: this one takes "
        "no part in the second sum, which protects the others; their rule protects this one.",
    ),
    PolicyKey(
        "min_count",
        "a whole number of at least 0",
        _is_integer_from(0),
        "Fewest entities (rows) behind a sum, a sketch or a share of a product.",
    ),
    PolicyKey(
        "min_events",
        "a whole number of at least 0",
        _is_integer_from(0),
        "Models over rows: fewest rows of either outcome of a binary response, unless there are none.",
    ),
    PolicyKey(
        "min_level_count",
        "a whole number of at least 0",
        _is_integer_from(0),
        "Fewest rows of a category level, unless there are none.",
    ),
    PolicyKey(
        "max_parameters",
        "a number above 0",
        lambda value: is_number(value) and value > 0,
        "Models over rows: most coefficients per row.",
    ),
    PolicyKey(
        "max_columns",
        "a whole number of at least 1",
        lambda value: value is None or _is_integer_from(1)(value),
        "Most columns of this institution in one model, as coded: a category of three levels has two. By "
        "default there is no limit.",
        "max_columns = 20",
    ),
    PolicyKey(
        "remember",
        '"all", "rows" or "nothing"',
        lambda value: value in ("all", "rows", "nothing"),
        "Which earlier answers are held against a new one, over all sessions and without an end, so that "
        'sums of which any combination tells of fewer than min_count rows do not all leave: "all", those of '
        'models over "rows", or "nothing".',
    ),
    PolicyKey(
        "formulas",
        '"any" or "simple"',
        lambda value: value in ("any", "simple"),
        'What may be computed from the columns. "simple": a factor is one column, or one function of one '
        "column (log, sqrt, exp, scale, center, C, poly and bs of low degree), and is defined on all that "
        'columns.toml publishes; a product holds every column once, and three numbers at most. "any": '
        "arithmetic and written numbers as well, with which whoever asks can make a column that tells one "
        "person apart from all others.",
    ),
    PolicyKey(
        "evaluation",
        '"any" or "once"',
        lambda value: value in ("any", "once"),
        'How often the fits of models may be held against the rows: "once" answers for one model, and the '
        "same again, since single rows lie between the cuts of two; predictions that come from outside it "
        "averages over min_count entities, since sums of losses of chosen ones tell every label.",
    ),
    PolicyKey(
        "discrete",
        '"any" or "bits"',
        lambda value: value in ("any", "bits"),
        'Sums of products by group and columns of few values, such as 0 and 1, in small groups: "bits" wants '
        "so many entities that the sums of all fits do not determine such a column for who knows all others; "
        'how many values a column has stands in columns.toml. "any": as for columns of many values.',
    ),
    PolicyKey(
        "rounding",
        '"none" or "dither"',
        lambda value: value in ("none", "dither"),
        'Sums of products by group: "dither" moves every value by up to half a hundredth of the standard '
        'deviation of its column, so that a sum carries 10 bits about it at most, and not 53; with "bits" '
        "above, a fifth of the entities will do. Estimates move by a small part of their standard errors.",
    ),
    PolicyKey(
        "reasons",
        '"told" or "logged"',
        lambda value: value in ("told", "logged"),
        'What a refusal says that depends on rows: "logged" is one word and the name of the rule, and why '
        'stands in the log of this institution; "told" says why, and so tells something of the rows.',
    ),
    PolicyKey(
        "max_refusals",
        "a whole number of at least 0",
        _is_integer_from(0),
        "Refusals that depend on rows, each a bit about them, after which whoever asked gets no more answers "
        "until 'fedstat site answer-again'. 0: no limit.",
    ),
    PolicyKey(
        "alignment",
        '"allow" or "ask"',
        lambda value: value in ("allow", "ask"),
        "Whether keys are aligned with those of other institutions as soon as the coordinator says so, "
        '"allow", or once for every "fedstat site consent", "ask": who enters keys that it made up learns '
        "which of them are here.",
    ),
    PolicyKey(
        "max_keys",
        "a whole number of at least 1",
        lambda value: value is None or _is_integer_from(1)(value),
        "Most keys that another institution may enter into an alignment. By default twice as many as there "
        "are here, or any number where alignment is allowed without consent.",
        "max_keys = 100_000",
    ),
    PolicyKey(
        "approval",
        '"auto" or "owner"',
        lambda value: value in ("auto", "owner"),
        'Whether an analysis that the other rules let pass needs nobody, "auto", or waits until its plan is '
        "approved, \"owner\": 'fedstat site pending' shows the plans, and every approval is for one run.",
    ),
    PolicyKey(
        "dealer",
        '"third party" or "any"',
        lambda value: value in ("third party", "any"),
        "Who deals the random numbers by which the columns here are multiplied with those of another "
        'institution: a "third party", which is an institution, or "any", the coordinator as well. Whoever '
        "deals must not join forces with the other institution, or the two of them have the columns.",
    ),
    PolicyKey(
        "order",
        '"declared" or "any"',
        lambda value: value in ("declared", "any"),
        'Whether the steps of a fit are answered in the order in which its protocol asks them, "declared", '
        'or in "any": out of turn, whoever asks can compare answers that no fit compares.',
    ),
    PolicyKey(
        "max_share",
        "a number above 0 and at most 1",
        lambda value: is_number(value) and 0 < value <= 1,
        "Largest share of all weight that one row may have in a sum at coefficients, or with weights, that "
        "whoever asks has chosen: at some, a sum over all rows is that of one. Below 1, products with "
        "columns of other institutions are not summed either where one row has more than three quarters of "
        "the squared deviations of a column: they would be values of that row. Roots or logarithms help.",
    ),
)


# ----------------------------------------------------------------------------------------------------
# A site's policy as a file of its own: its keys, what each may hold, reading and writing.

MAX_DELTA = 1e-6
FILE_HEADER = """\
What may leave this institution, as its owner decides.

Every question is held against these rules at the institution's own door, and refused there.
A rule that is left out, or stands behind a '#', is that of Policy.strict() at a site that is served."""


PRIVACY_COMMENT = (
    "A privacy budget: how much all answers together, for ever, may tell of one entity's record, as epsilon "
    f"and delta of differential privacy; delta is at most {MAX_DELTA:g}. With one, whatever depends on "
    "values leaves only with noise, and is charged before it does; all else is refused, but for which "
    "records there are, and which of them lack a value in the columns of a synthesis. What was charged "
    "stands in the ledger, and stays charged when this file is changed; the same question again has the same "
    "answer, and costs nothing, until the table is changed. 'fedstat site status' shows what is spent."
)
BUDGET_KEYS = {"epsilon": "a number above 0", "delta": f"a number of at least 0 and at most {MAX_DELTA:g}"}
FILE_SECTIONS = ("privacy",)


def check_policy_values(where: str, values: Mapping[str, object]) -> None:
    """Hold the values of a policy against what its keys may hold.

    Raises
    ------
    PartitionError
        Lists every key with what was expected and what came.
    """
    wrong = [
        f"{key.name}: expected {key.expected}, received {_value_text(values[key.name])}{_remedy(key, values)}"
        for key in POLICY_KEYS
        if key.name in values and not key.fits(values[key.name])
    ]
    if wrong:
        raise PartitionError(f"{where}: {'; '.join(wrong)}")


def check_budget(where: str, epsilon: object, delta: object) -> None:
    """Hold a privacy budget against what it may be; errors are those of :func:`check_policy_values`."""
    above = ". A larger one would allow some records to be published" if is_number(delta) else ""
    for name, value, fits, remedy in (
        ("epsilon", epsilon, is_number(epsilon) and epsilon > 0, ""),
        ("delta", delta, is_number(delta) and 0 <= delta <= MAX_DELTA, above),
    ):
        if not fits:
            raise PartitionError(
                f"{where}: {name}: expected {BUDGET_KEYS[name]}, received {_value_text(value)}{remedy}"
            )


def _value_text(value: object) -> str:
    if isinstance(value, frozenset):
        return str(sorted(value, key=str))
    return repr(value)


def _remedy(key: PolicyKey, values: Mapping[str, object]) -> str:
    value = values[key.name]
    if key.name == "refused_kinds" and isinstance(value, frozenset):
        hints = [
            _suggestion(str(kind), RELEASE_KINDS) for kind in sorted(value - set(RELEASE_KINDS), key=str)
        ]
        return " ".join(["", *hints]).rstrip()
    if key.listed and isinstance(value, str):
        return f"; write [{value!r}] for one"
    return ""


def _suggestion(word: str, words: tuple[str, ...]) -> str:
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
    names = (*(key.name for key in POLICY_KEYS), *FILE_SECTIONS)
    _check_names(where, tuple(content), names)
    if budget is not None:
        if not isinstance(budget, dict):
            raise PartitionError(
                f"{where}: privacy: expected a section [privacy] with {', '.join(BUDGET_KEYS)}"
            )
        _check_names(f"{where}, section [privacy]", tuple(budget), tuple(BUDGET_KEYS))
        lacking = [name for name in BUDGET_KEYS if name not in budget]
        if lacking:
            raise PartitionError(f"{where}, section [privacy]: lacks {', '.join(lacking)}; a budget is both")
    return dict(_as_sets(content)), budget


def _as_sets(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    listed = {key.name for key in POLICY_KEYS if key.listed}
    for name, value in content.items():
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        yield name, frozenset(value) if name in listed and texts else value


def _check_names(where: str, found: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in found if name not in known]
    if unknown:
        listed = ", ".join(f"{name!r} {_suggestion(name, known)}".rstrip() for name in unknown)
        raise PartitionError(f"{where}: unknown key {listed}. Its keys are {', '.join(known)}")


def write_policy(values: Mapping[str, Any], budget: tuple[float, float] | None) -> str:
    """Text of a policy file, with a comment that explains every rule."""
    parts = [toml_comment(FILE_HEADER)]
    for key in POLICY_KEYS:
        value = values[key.name]
        line = f"# {key.example}" if value is None else toml_line(key.name, value)
        parts.append(f"{toml_comment(key.comment)}\n{line}")
    given = "epsilon = 1.0\ndelta = 1e-06"
    if budget is None:
        section = "\n".join(f"# {line}" for line in ["[privacy]", *given.splitlines()])
    else:
        section = f"[privacy]\nepsilon = {toml_value(budget[0])}\ndelta = {toml_value(budget[1])}"
    return "\n\n".join([*parts, f"{toml_comment(PRIVACY_COMMENT)}\n{section}"]) + "\n"
