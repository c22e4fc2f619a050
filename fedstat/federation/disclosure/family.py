"""Declaration of a family's site steps: what each takes, releases and follows, where it is defined.

A sum over rows is a weight for each row times a quantity. Every released sum has *terms*, its columns, groups
or weights, which the site compares with those of all earlier sums. A family whose steps release sums without
terms is not entered, unless it states the reason, for an array or for all of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from fedstat import codec
from fedstat.errors import DisclosureError
from fedstat.federation.disclosure.facts import TERM_FACTS
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, RepeatedRelease
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import COUNTED, ArrayDeclaration, Step

StepFunction = TypeVar("StepFunction", bound=Callable[..., Any])
Declarations = Mapping[str, ArrayDeclaration]

WITHOUT_TERMS: dict[str, str] = {}
"""Reasons of families whose sums have no terms; see :func:`state_without_terms`."""
COMPARED = frozenset({*TERM_FACTS, NoiseRequired, RepeatedRelease})
"""Facts of which one is behind every sum that is compared, or has noise."""
ONE_OWNER = (
    "sums between sites with different columns: no site has the columns of the other, so rows behind "
    "products are counted securely, and group sizes, columns and equations about a column are limited"
)
PER_ENTITY = "the protocol releases numbers for each entity; the policy limits these (per_entity)"


def step(
    family: str,
    after: str | None = None,
    *,
    takes: Declarations | None = None,
    releases: Declarations | None = None,
    rows_behind: tuple[type, ...] = (),
    request: Any = None,
    requests: ArrayDeclaration | None = None,
    replies: ArrayDeclaration | None = None,
    name: str = "",
    begins: bool = False,
    prepares: bool = False,
    public: bool = False,
) -> Callable[[StepFunction], StepFunction]:
    """Enter a function into a family as a step; the function itself stays as it is.

    A step is called as ``function(data, state, **arrays)``. One that `requests` is called as
    ``function(data, state, request, **arrays)``. It returns its arrays by name, and with `replies` a pair
    of these and a text.

    Parameters
    ----------
    family : str
    after : str, optional
        Steps of the family of which one must stand directly before this one in a session, with blanks
        between; None: it may come at any time. Names may belong to steps that are declared later.
    takes, releases : mapping of str to ArrayDeclaration, optional
        The arrays of the request and of the reply.
    rows_behind : tuple of types
        Facts behind every released aggregate that declares none of its own; see `ArrayDeclaration.behind`.
    request : type, optional
        Type of the plain value that comes with the arrays, which :mod:`fedstat.codec` reads from the text of
        the request, or its own ``from_json``; None where the function takes the text itself.
    requests, replies : ArrayDeclaration, optional
        What the text of the request and of the reply is.
    name : str, optional
        Name of the step; by default that of the function.
    begins, prepares, public : bool
        See :class:`fedstat.federation.message.Step`.

    Raises
    ------
    DisclosureError
        A release does not declare what stands behind it, or is a sum without terms.
    """

    def enter(function: StepFunction) -> StepFunction:
        entry = Step(
            function if requests is None else _reading(function, request, requests.what, replies is not None),
            dict(takes or {}),
            {name: _with_facts(declared, rows_behind) for name, declared in (releases or {}).items()},
            requests,
            None if replies is None else _with_facts(replies, rows_behind),
            None if after is None else frozenset(after.split()),
            begins=begins,
            public=public,
            prepares=prepares,
        )
        include(family, {name or function.__name__: entry})
        return function

    return enter


def include(family: str, steps: Mapping[str, Step], after: Mapping[str, str] | None = None) -> None:
    """Enter steps that families share; `after` names those that may stand directly before each."""
    before = {name: frozenset(text.split()) for name, text in (after or {}).items()}
    for name, one in steps.items():
        lacking = [] if family in WITHOUT_TERMS else sums_without_terms(one)
        if unnamed := [array for array in lacking if not one.given[array].without_terms]:
            raise DisclosureError(
                f"family '{family}', step '{name}': array '{unnamed[0]}' is a sum without terms, which the "
                "release history cannot compare with other sums: a sum has "
                f"{' or '.join(sorted(fact.__name__ for fact in TERM_FACTS))} in behind=(...), or a reason "
                "in without_terms=..."
            )
    ordered = {
        name: replace(one, after=before[name]) if name in before else one for name, one in steps.items()
    }
    FAMILIES[family] = {**FAMILIES.get(family, {}), **ordered}


def state_without_terms(family: str, reason: str) -> str:
    """State why the sums of a family have no terms, before its steps are entered; return its name."""
    WITHOUT_TERMS[family] = reason
    return family


def sums_without_terms(entered: Step) -> list[str]:
    """Return the names of a step's sums that have neither terms nor noise."""
    return [
        name
        for name, declared in entered.given.items()
        if declared.kind in COUNTED and declared.behind and not COMPARED & set(declared.behind)
    ]


def _with_facts(declared: ArrayDeclaration, facts: tuple[type, ...]) -> ArrayDeclaration:
    if declared.behind or declared.kind not in COUNTED:
        return declared
    return replace(declared, behind=facts)


def _reading(function: Callable[..., Any], request: Any, what: str, replies: bool) -> Callable[..., Any]:
    """Give a function its request as a value, and its reply a text."""
    own = getattr(request, "from_json", None)

    @wraps(function)
    def run(data: Any, state: Any, text: str, **arrays: Any) -> Any:
        requested: Any = text
        if own is not None:
            requested = own(text)
        elif request is not None:
            requested = codec.from_json(request, text, f"{data.name}: {what}")
        reply = function(data, state, requested, **arrays)
        return reply if replies or isinstance(reply, tuple) else (reply, "")

    return run
