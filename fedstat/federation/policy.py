"""What the owner of a site allows to leave it.

The rules are enforced in :meth:`fedstat.federation.site.Site.answer` and nowhere else, but for parts of an
answer that only a step can count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedstat.errors import PolicyError
from fedstat.federation.message import Ask, Kind, Step
from fedstat.federation.secure.masks import TWO_SITES, hides
from fedstat.typing import Array

COUNTED: tuple[Kind, ...] = ("masked share", "aggregate", "sketch")
"""Kinds of values that must rest on enough entities."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner of a site allows to leave it.

    Parameters
    ----------
    families : frozenset of str or None
        Families that may ask; None allows every installed one.
    refused_kinds : frozenset of Kind
        Kinds of values that may not leave, e.g. ``frozenset({"raw columns"})``; those of a masked sum are
        not refused.
    masked_only : bool
        Whether arrays of which only the sum over sites is needed leave in no other way than masked.
    two_sites : {"warn", "refuse"}
        What to do with a masked sum over two sites, which hides neither from the other.
    min_count : int
        Smallest number of entities behind an aggregate or a sketch.
    min_events : int
        Fewest rows of either outcome of a binary response, unless there are none.
    min_level_count : int
        Fewest rows of a category level, unless there are none.
    max_parameters : float
        Most coefficients per row of a model over rows.
    answers_kept : int
        How many earlier answers over rows are held against a new one, so that two that differ by a few
        rows do not both leave; 0 switches the check off.
    """

    families: frozenset[str] | None = None
    refused_kinds: frozenset[Kind] = frozenset()
    masked_only: bool = False
    two_sites: Literal["warn", "refuse"] = "warn"
    min_count: int = 5
    min_events: int = 3
    min_level_count: int = 3
    max_parameters: float = 0.33
    answers_kept: int = 200


def check_ask(site: str, policy: Policy, ask: Ask, step: Step) -> None:
    """Hold a question against the policy, before anything is computed.

    Raises
    ------
    PolicyError
        Names site, rule and array.
    """
    if policy.families is not None and ask.family not in policy.families:
        raise PolicyError(
            f"{site}: its policy (families) allows {sorted(policy.families)}, not '{ask.family}'"
        )
    for name, declared in step.gives.items():
        hidden = declared.maskable and ask.masked is not None
        where = f"array '{name}' of step '{ask.step}' ({declared.what})"
        if declared.kind in policy.refused_kinds and not hidden:
            raise PolicyError(
                f"{site}: its policy (refused kinds) does not let '{declared.kind}' leave: {where}"
            )
        if policy.masked_only and declared.maskable and not hidden:
            raise PolicyError(
                f"{site}: its policy (masked only) lets {where} leave in a masked sum only; fit "
                "with masked=True"
            )


def check_mask(site: str, policy: Policy, n_sites: int) -> None:
    """Require that a masked sum over so many sites is allowed.

    Raises
    ------
    PolicyError
        Two sites, and the owner refuses that.
    """
    if policy.two_sites == "refuse" and not hides(n_sites):
        raise PolicyError(f"{site}: its policy (two sites) refuses. {TWO_SITES}")


def check_counts(
    site: str, policy: Policy, ask: Ask, step: Step, arrays: Mapping[str, Array], entities: int
) -> None:
    """Require enough entities behind an answer.

    Raises
    ------
    PolicyError
        Names site, rule and array.
    """
    for name in arrays:
        if step.gives[name].kind in COUNTED and entities < policy.min_count:
            raise PolicyError(
                f"{site}: its policy (minimum count) wants at least {policy.min_count} entities behind "
                f"array '{name}' of step '{ask.step}'; there are {entities}"
            )
