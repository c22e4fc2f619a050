"""Shared parameter descriptions, copied into the docstrings that refer to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
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


def inherits_signature(source: Callable[..., Any]) -> Callable[[DocumentedCallable], DocumentedCallable]:
    """Show keyword arguments that a function passes on, with their own names, defaults and types."""

    def decorate(function: DocumentedCallable) -> DocumentedCallable:
        own, passed = inspect.signature(function), inspect.signature(source).parameters.values()
        first = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        on = [one for one in passed if one.kind is inspect.Parameter.KEYWORD_ONLY and one not in first]
        function.__signature__ = own.replace(parameters=[*first, *on])  # type: ignore[attr-defined]
        return function

    return decorate
