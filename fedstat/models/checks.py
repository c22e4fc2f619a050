"""Checks of the arguments of a fit and of its response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, REAL
from fedstat.typing import Floats

Method = TypeVar("Method", bound=Callable[..., Any])
LAYOUTS = {
    "horizontal": ("sites hold different rows", "ClientPartition.from_frame(table, by='site')"),
    "vertical": (
        "sites hold different columns",
        "ClientPartition.from_frames({client: table}, on=key)",
    ),
}
"""In words, and how to make a partition of it."""
POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD


WEIGHTS = {
    "freq_weights": "for a row that represents several",
    "var_weights": "for a row whose variance is the dispersion over its weight",
}
OTHER_WEIGHTS = ("weights", "weight", "sample_weight", *WEIGHTS)


def check_arguments(model: type, given: Iterable[str], call: Callable[..., Any] | None = None) -> None:
    """Refuse arguments that a model, or a `call` of it, does not have; it says where weights are given."""
    own = _arguments_of(model)
    known = own if call is None else _named(call)
    where = model.__name__ if call is None else f"{model.__name__}.{call.__name__}"
    for name in given:
        if name in known:
            continue
        if name in (moved := getattr(model, "_moved", {})) and call is not None:
            raise ModelError(f"{name}: it belongs to one exchange; write {call.__name__}({moved[name]})")
        if name in OTHER_WEIGHTS:
            raise ModelError(f"{name}: {_weights_of(model, own)}")
        close = get_close_matches(name, known, 1)
        meant = f" (is {close[0]!r} meant?)" if close else ""
        listed = "from_formula" if call is None else call.__name__
        raise ModelError(
            f"{where} has no argument {name!r}{meant}; help({model.__name__}.{listed}) lists them"
        )


def checks_arguments(call: Method) -> Method:
    """Let a method answer an argument that it does not have with a ModelError that names the remedy."""

    @wraps(call)
    def checked(model: Any, /, *args: Any, **given: Any) -> Any:
        check_arguments(type(model), given, call)
        return call(model, *args, **given)

    return cast(Method, checked)


def _weights_of(model: type, own: Sequence[str]) -> str:
    there = set(own) - set(getattr(model, "_weightless", ()))
    taken = [f'{name}="column" {meaning}' for name, meaning in WEIGHTS.items() if name in there]
    if not taken:
        return f"{model.__name__} has no weights: every row counts once"
    return (
        "give from_formula the name of a column of the sites' own tables, by what it means: "
        f"{', or '.join(taken)}"
    )


def _arguments_of(model: type) -> list[str]:
    """Names of the keywords of a model, through the classes to which it passes on what it does not know."""
    names: list[str] = []
    for base in model.__mro__:
        init = vars(base).get("__init__")
        if init is None:
            continue
        names += _named(init)
        kinds = [one.kind for one in signature(init).parameters.values()]
        if Parameter.VAR_KEYWORD not in kinds:
            break
    return names


def _named(call: Callable[..., Any]) -> list[str]:
    parameters = signature(call).parameters.values()
    return [one.name for one in parameters if one.kind in (Parameter.KEYWORD_ONLY, POSITIONAL)]


def check_frame(call: str, frame: object, otherwise: str) -> pd.DataFrame:
    """Require a pandas table of rows that the caller holds; `otherwise` says what of other rows."""
    if isinstance(frame, pd.DataFrame):
        return frame
    plain = "; to_pandas() makes one of it" if hasattr(frame, "to_pandas") else ""
    raise ModelError(
        f"{call}: expected a pandas DataFrame of rows that you hold, received {kind_of(frame)}{plain}; "
        f"{otherwise}"
    )


def kind_of(value: object) -> str:
    """Name the type of a value, with the package that it is of."""
    package, name = type(value).__module__.split(".")[0], type(value).__name__
    return name if package == "builtins" else f"{package} {name}"


def check_layout(model: str, partition: object, layout: str) -> None:
    """Refuse what is no partition in the layout that a model needs."""
    what, remedy = LAYOUTS[layout]
    if not isinstance(partition, ClientPartition):
        raise ModelError(
            f"partition: expected a fedstat.ClientPartition, received {kind_of(partition)}; make one with "
            f"{remedy}, which takes tables of pandas, polars and pyarrow"
        )
    if partition.layout != layout:
        raise ModelError(
            f"{model} needs a {layout} partition ({what}): {remedy}; this one is {partition.layout} "
            f"({LAYOUTS[partition.layout][0]})"
        )


def check_call(model: type, partition: object, layout: str, given: Iterable[str]) -> None:
    """Check what a model is made of: a partition in its layout, and arguments that it has."""
    check_layout(model.__name__, partition, layout)
    check_arguments(model, given)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a word that is not one of the choices."""
    if value not in choices:
        raise ModelError(f"{name}: expected one of {', '.join(map(repr, choices))}, received {value!r}")


def check_positive(name: str, value: object) -> None:
    """Refuse what is not a positive number."""
    if not isinstance(value, int | float | np.floating | np.integer) or not value > 0:
        raise ModelError(f"{name}: expected a positive number, received {value!r}")


def check_share(name: str, value: float | None) -> None:
    """Refuse what is given and not a share between 0 and 1."""
    if value is not None and not 0.0 <= value <= 1.0:
        raise ModelError(f"{name}: expected a share between 0 and 1, received {value!r}")


def check_level(name: str, value: object) -> None:
    """Refuse what is not between 0 and 1."""
    if not isinstance(value, int | float | np.floating) or not 0.0 < value < 1.0:
        raise ModelError(f"{name}: expected a number between 0 and 1, received {value!r}")


def check_integer(name: str, value: object, least: int) -> None:
    """Refuse a value that is not an integer of at least `least`."""
    if not isinstance(value, Integral) or value < least:
        raise ModelError(f"{name}: expected a whole number, {least} or more, received {value!r}")


def check_masked(masked: object, n_sites: int, wanted: bool) -> bool:
    """Return whether to mask sums over this number of sites: by default if masks hide each part from all.

    Two whose owners have `wanted` it mask as well: what they refuse then is a sum over two, and not that it
    came in clear.
    """
    if masked is None:
        return hides(n_sites) or (wanted and n_sites == 2)
    check_choice("masked", masked, (True, False))
    if masked and n_sites < 2:
        raise ModelError("masked: a sum over one site is that site's part; expected two sites or more")
    return bool(masked)


def check_response(name: str, family: str, y: Floats) -> None:
    """Require a response at a site that the distribution allows, and that is not constant."""
    known = DISTRIBUTIONS[family]
    support = known.single or known.support or REAL
    wrong = ~support.holds(y)
    if wrong.any():
        raise EstimationError(
            f"{name}: expected a response of {support.expected} for the family {family}, and "
            f"{int(wrong.sum()):,} of {len(y):,} entities have another; compare on the left side of the "
            "formula, as in 'y > 0 ~ x', or take another family"
        )
    if len(y) == 0 or y.min() == y.max():
        raise EstimationError(f"{name}: the response is constant among the {len(y):,} entities of this fit")
