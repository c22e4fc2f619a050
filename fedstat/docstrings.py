"""Shared parameter descriptions, copied into the docstrings that refer to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

DocumentedCallable = TypeVar("DocumentedCallable", bound=Callable[..., Any])

ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \w+)*) : .*(?:\n    .*)*", re.M)
"""Names and type of an argument, and the indented lines that describe it."""

REFERENCE = re.compile(r"^(\w+(?:, \w+)*)\n    As in :meth:`[^`]+`\.$", re.M)
"""Names without a type, and the reference to another description."""


def inherits_params(source: object) -> Callable[[DocumentedCallable], DocumentedCallable]:
    """Replace "As in" by the other function's description of the arguments, so that help() shows it."""
    reported = {
        name: entry[0]
        for entry in ENTRY.finditer(inspect.getdoc(source) or "")
        for name in entry[1].split(", ")
    }

    def spell_out(names: re.Match[str]) -> str:
        return "\n".join(dict.fromkeys(reported[name] for name in names[1].split(", ")))

    def decorate(function: DocumentedCallable) -> DocumentedCallable:
        # Without docstrings, under python -OO, nothing is filled in.
        if function.__doc__:
            function.__doc__ = REFERENCE.sub(spell_out, inspect.cleandoc(function.__doc__))
        return function

    return decorate


def inherits_signature(
    *sources: Callable[..., Any], without: Sequence[str] = ()
) -> Callable[[DocumentedCallable], DocumentedCallable]:
    """Show keyword arguments that a function passes on to others, with their names, defaults and types.

    If several of these functions have an argument, the first one gives the default. Arguments in `without`
    are not shown.
    """

    def decorate(function: DocumentedCallable) -> DocumentedCallable:
        own = inspect.signature(function)
        shown = {
            name: one for name, one in own.parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for source in sources:
            for name, one in inspect.signature(source).parameters.items():
                if one.kind is inspect.Parameter.KEYWORD_ONLY and name not in without:
                    shown.setdefault(name, one)
        function.__signature__ = own.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        return function

    return decorate
