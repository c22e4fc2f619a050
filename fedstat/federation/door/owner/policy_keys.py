"""Keys of a policy file: what each may hold, and the rule for its owner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

from fedstat.federation.message import Kind

KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Key:
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


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _names(value: object) -> bool:
    return isinstance(value, frozenset) and all(
        isinstance(name, str) and name.isprintable() and name for name in value
    )


KEYS: tuple[Key, ...] = (
    Key(
        "families",
        "a list of names of families",
        lambda value: value is None or (_names(value) and len(value) > 0),
        'Families of models that may ask. "design" agrees on columns and is needed by every model, "secure" '
        "agrees on keys and is needed by masked sums; the models are named after their folders, such as "
        '"glm", "vfem" and "fedavg". By default every installed family may ask.',
        'families = ["design", "secure", "glm"]',
        listed=True,
    ),
    Key(
        "refused_kinds",
        f"a list of {', '.join(map(repr, KINDS))}",
        lambda value: _names(value) and value <= set(KINDS),
        "Kinds of values that may not leave. From harmless to disclosing: control, schema, presence, sealed, "
        "masked share, aggregate, sketch, per entity, raw columns. A kind that is refused may still enter a "
        "masked sum, which hides this institution's part; not so values per entity, of which every part "
        "follows from the sums of many rounds.",
        'refused_kinds = ["per entity", "raw columns"]',
        listed=True,
    ),
    Key(
        "per_entity",
        'a whole number of at least 0, or "any"',
        lambda value: value == "any" or _whole(0)(value),
        "Most numbers for each entity that ever leave, over all analyses, sessions and restarts, masked or "
        "not; 0: none. Each is an equation about the row of its entity: fewer than this institution has "
        "columns leave its rows open, as many give them away. A fit of VFEM with a binary response or count "
        'takes 10 to 30. "any": no limit.',
    ),
    Key(
        "masked_only",
        "true or false",
        lambda value: isinstance(value, bool),
        "Whether arrays of which only the sum over institutions is needed leave in no other way than masked.",
    ),
    Key(
        "two_sites",
        '"warn" or "refuse"',
        lambda value: value in ("warn", "refuse"),
        "What to do with a masked sum over two institutions, which hides neither from the other: "
        '"warn" or "refuse".',
    ),
    Key(
        "quorum",
        "a whole number of at least 0, or a share above 0 and at most 1 with a decimal point",
        lambda value: _whole(0)(value) or (isinstance(value, float) and 0.0 < value <= 1.0),
        "Fewest institutions in a masked sum: a number, or a share of those that are pinned here (1.0: all). "
        "0: as many as two_sites allows.",
    ),
    Key(
        "apart",
        "a whole number of at least 1",
        _whole(1),
        "Fewest institutions that a masked sum, or a difference of masked sums of all sessions from now on, "
        "may be over. 1: where one institution is lost in a fit that goes on without it, its part of earlier "
        "sums follows by subtraction, as it does where an analysis leaves it out. 2 or more: this one takes "
        "no part in the second sum, which protects the others; their rule protects this one.",
    ),
    Key(
        "min_count",
        "a whole number of at least 0",
        _whole(0),
        "Fewest entities (rows) behind a sum, a sketch or a share of a product.",
    ),
    Key(
        "min_events",
        "a whole number of at least 0",
        _whole(0),
        "Models over rows: fewest rows of either outcome of a binary response, unless there are none.",
    ),
    Key(
        "min_level_count",
        "a whole number of at least 0",
        _whole(0),
        "Fewest rows of a category level, unless there are none.",
    ),
    Key(
        "max_parameters",
        "a number above 0",
        lambda value: is_number(value) and value > 0,
        "Models over rows: most coefficients per row.",
    ),
    Key(
        "max_columns",
        "a whole number of at least 1",
        lambda value: value is None or _whole(1)(value),
        "Most columns of this institution in one model, as coded: a category of three levels has two. By "
        "default there is no limit.",
        "max_columns = 20",
    ),
    Key(
        "remember",
        '"all", "rows" or "nothing"',
        lambda value: value in ("all", "rows", "nothing"),
        "Which earlier answers are held against a new one, over all sessions and without an end, so that "
        "sums of which any combination tells of fewer than min_count rows do not all leave: "
        '"all", those of models over "rows", or "nothing".',
    ),
    Key(
        "formulas",
        '"any" or "simple"',
        lambda value: value in ("any", "simple"),
        'What may be computed from the columns. "simple": a factor is one column, or one function of one '
        "column (log, sqrt, exp, scale, center, C, poly and bs of low degree), and is defined on all that "
        "columns.toml publishes; a product holds every column once, and three numbers at most. "
        '"any": arithmetic and written numbers as well, with which whoever asks can '
        "make a column that tells one person apart from all others.",
    ),
    Key(
        "evaluation",
        '"any" or "once"',
        lambda value: value in ("any", "once"),
        'How often the fits of models may be held against the rows: "once" answers for one model, and the '
        "same again, since single rows lie between the cuts of two; predictions that come from outside it "
        "averages over min_count entities, since sums of losses of chosen ones tell every label.",
    ),
    Key(
        "discrete",
        '"any" or "bits"',
        lambda value: value in ("any", "bits"),
        'Sums of products by group and columns of few values, such as 0 and 1, in small groups: "bits" wants '
        "so many entities that the sums of all fits do not determine such a column for who knows all "
        'others; how many values a column has stands in columns.toml. "any": as for columns of many values.',
    ),
    Key(
        "rounding",
        '"none" or "dither"',
        lambda value: value in ("none", "dither"),
        'Sums of products by group: "dither" moves every value by up to half a hundredth of the standard '
        'deviation of its column, so that a sum carries 10 bits about it at most, and not 53; with "bits" '
        "above, a fifth of the entities will do. Estimates move by a small part of their standard errors.",
    ),
    Key(
        "reasons",
        '"told" or "logged"',
        lambda value: value in ("told", "logged"),
        'What a refusal says that depends on rows: "logged" is one word and the name of the rule, and why '
        'stands in the log of this institution; "told" says why, and so tells something of the rows.',
    ),
    Key(
        "max_refusals",
        "a whole number of at least 0",
        _whole(0),
        "Refusals that depend on rows, each a bit about them, after which whoever asked gets no more answers "
        "until 'fedstat site answer-again'. 0: no limit.",
    ),
    Key(
        "alignment",
        '"allow" or "ask"',
        lambda value: value in ("allow", "ask"),
        "Whether keys are aligned with those of other institutions as soon as the coordinator says so, "
        '"allow", or once for every "fedstat site consent", "ask": who enters keys that it made up learns '
        "which of them are here.",
    ),
    Key(
        "max_keys",
        "a whole number of at least 1",
        lambda value: value is None or _whole(1)(value),
        "Most keys that another institution may enter into an alignment. By default twice as many as there "
        "are here, or any number where alignment is allowed without consent.",
        "max_keys = 100_000",
    ),
    Key(
        "approval",
        '"auto" or "owner"',
        lambda value: value in ("auto", "owner"),
        'Whether an analysis that the other rules let pass needs nobody, "auto", or waits until its plan is '
        "approved, \"owner\": 'fedstat site pending' shows the plans, and every approval is for one run.",
    ),
    Key(
        "dealer",
        '"third party" or "any"',
        lambda value: value in ("third party", "any"),
        "Who deals the random numbers by which the columns here are multiplied with those of another "
        'institution: a "third party", which is an institution, or "any", the coordinator as well. Whoever '
        "deals must not join forces with the other institution, or the two of them have the columns.",
    ),
    Key(
        "order",
        '"declared" or "any"',
        lambda value: value in ("declared", "any"),
        'Whether the steps of a fit are answered in the order in which its protocol asks them, "declared", '
        'or in "any": out of turn, whoever asks can compare answers that no fit compares.',
    ),
    Key(
        "max_share",
        "a number above 0 and at most 1",
        lambda value: is_number(value) and 0 < value <= 1,
        "Largest share of all weight that one row may have in a sum at coefficients, or with weights, that "
        "whoever asks has chosen: at some, a sum over all rows is that of one. Below 1, products with "
        "columns of other institutions are not summed either where one row has more than three quarters of "
        "the squared deviations of a column: they would be values of that row. Roots or logarithms help.",
    ),
)
