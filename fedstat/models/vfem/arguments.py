"""Columns beside the response, and arguments that belong to one exchange: what cannot be, with a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedstat.errors import ModelError
from fedstat.federation.design.formula.parse import Formula
from fedstat.models.vertical.layout import Layout

OF_ITERATION = (
    "masked",
    "cross_products",
    "sketch",
    "sketch_size",
    "step",
    "acceleration",
    "memory",
    "learning_rate",
    "init",
)
"""Arguments of a fit that have no meaning where moments are exchanged."""


def check_roles(roles: Mapping[str, str], formula: Formula, partition: Any) -> None:
    """Require columns beside the response, and one kind of weights."""
    if {"freq_weights", "var_weights"} <= roles.keys():
        raise ModelError("freq_weights, var_weights: give one of them; an entity has one weight here")
    holder = formula.response_client
    for role, name in roles.items():
        there = [client for client, columns in partition.columns.items() if name in columns]
        if there != [holder]:
            found = f"is at '{there[0]}'" if there else "is at no institution"
            raise ModelError(
                f"{role}: column {name!r} {found}, and has to stand beside the response "
                f"'{formula.response}', at '{holder}': add it to that institution's table"
            )
        if name in formula.response_columns:
            raise ModelError(f"{role}: column {name!r} is the response")


def check_weights(roles: Mapping[str, str], exchange: str, correction: str | None) -> None:
    """Refuse weights and offset where a fit of a normal response has none."""
    if roles and exchange == "iterative":
        raise ModelError(
            f"{', '.join(roles)}: exchange='iterative' has none for a normal response; leave "
            "exchange='moments'"
        )
    if correction == "skewness" and roles.keys() - {"offset"}:
        raise ModelError("correction='skewness' has no weights; use correction='small-sample', or none")


def check_variances(roles: Mapping[str, str], layout: Layout) -> None:
    """Refuse weights of variances where entities lack blocks."""
    if "var_weights" in roles and layout.missing.any():
        raise ModelError(
            "var_weights: where entities lack blocks the likelihood is no function of weighted sums; fit "
            "with method='cc', or use freq_weights if an entity stands for several"
        )


def refuse_iterative(arguments: Mapping[str, object], fit: Callable[..., Any]) -> None:
    """Refuse, by name, what belongs to the iterative exchange, unless it is the default."""
    defaults = inspect.signature(fit).parameters
    given = [
        name
        for name in OF_ITERATION
        # An array of first coefficients compares entry by entry, and is no default in any case.
        if not isinstance(arguments[name], str | int | None) or arguments[name] != defaults[name].default
    ]
    if given:
        raise ModelError(
            f"{', '.join(given)}: no part of exchange='moments', which has one exchange of sums and its own "
            f"start; leave {'them' if len(given) > 1 else 'it'} out, or fit with exchange='iterative'"
        )
