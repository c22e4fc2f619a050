"""Which rules of a changed policy allow less than before."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from fedstat.federation.door.owner.policy import STRICT, WORDS, Policy

REMEMBERED = ("nothing", "rows", "all")


def _no_limit(value: Any) -> Callable[[Any, Any], bool]:
    """Whether a new limit is higher than the old one, where this value stands for none."""
    return lambda old, new: new == value or (old != value and new > old)


def _no_word_of(strict: Any) -> Callable[[Any, Any], bool]:
    return lambda _, new: new != strict


LOOSER: Mapping[str, Callable[[Any, Any], bool]] = {
    **{name: _no_word_of(STRICT[name]) for name in WORDS},
    **dict.fromkeys(("min_count", "min_events", "min_level_count", "apart"), operator.gt),
    "quorum": lambda old, new: new == 0 or (type(old) is type(new) and old > new),
    **dict.fromkeys(("max_parameters", "max_share"), operator.lt),
    "max_columns": _no_limit(None),
    "max_refusals": _no_limit(0),
    "per_entity": _no_limit("any"),
    "refused_kinds": operator.ge,
    "families": lambda old, new: new is None or (old is not None and old <= new),
    "remember": lambda old, new: REMEMBERED.index(new) < REMEMBERED.index(old),
    "approval": _no_word_of("owner"),
    "privacy": lambda old, new: (
        None not in (old, new) and old.epsilon <= new.epsilon and old.delta <= new.delta
    ),
}
"""By rule, whether a new value allows more than the old one; a rule that is not here never does."""


def stricter_rules(before: Policy, after: Policy) -> tuple[str, ...]:
    """Names of the rules that were changed, and not for the looser."""
    values = {
        field.name: (getattr(before, field.name), getattr(after, field.name)) for field in fields(Policy)
    }
    return tuple(
        name
        for name, (old, new) in values.items()
        if old != new and not (name in LOOSER and LOOSER[name](old, new))
    )
