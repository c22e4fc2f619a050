"""Checks of the arguments of a fit and of its response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from types import CodeType
from typing import Any, TypeAlias, TypeVar, cast

import narwhals as nw
import numpy as np
import pandas as pd
from narwhals.typing import IntoDataFrame

from fedstat.errors import EstimationError, FedstatError, ModelError, Remedy, without_internal_frames
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.glm.distributions import DISTRIBUTIONS
from fedstat.kernels.responses import REAL
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


WEIGHTS = {
    "freq_weights": "for a row that represents several",
    "var_weights": "for a row whose variance is the dispersion over its weight",
}
"""Columns of weights by what they mean; a model whose `weights` are a column says so in `_weights_mean`."""
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    own: meant
    for meant, others in {
        ("seed",): "random_state random_seed rng",
        ("maxiter", "rounds", "steps", "epochs"): "max_iter n_iter maxit iterations max_rounds num_iter",
        ("rounds",): "n_rounds num_rounds communication_rounds",
        ("steps",): "mstop n_estimators n_steps num_boost_round",
        ("local_epochs", "epochs"): "n_epochs num_epochs",
        ("epochs", "local_epochs"): "epochs",
        ("learning_rate",): "lr eta nu rate step_size shrinkage",
        ("tol",): "tolerance eps ftol xtol gtol rtol reltol tol_score tol_change",
        ("partition",): "data df frame table dataset",
        ("standardize",): "standardise normalize normalise scale_columns",
        ("unpenalized",): "unpenalised penalty_factor",
        ("lam", "dispersion"): "alpha",
        ("lam",): "lambda_ penalty_weight",
        ("lambdas",): "alphas",
        ("n_lambdas",): "n_alphas nlambda",
        ("folds",): "cv n_folds nfolds n_splits",
        ("cov_type",): "cov vcov robust",
        ("cov_kwds",): "cluster clusters groups",
        ("init",): "start_params start coef_init",
        ("progress",): "verbose disp show_progress",
        ("missing",): "na_action dropna use_na",
        ("masked",): "mask secure secure_aggregation",
        ("family",): "link distribution",
        ("n_clusters",): "n_components k",
        ("n_init",): "nstart",
    }.items()
    for own in others.split()
}
"""Arguments by their names in other packages, and in other families of this one."""
ROWS_OF_STATSMODELS = {
    "subset": (
        "a subset is taken where the partition is made: select the rows of each site's table before "
        "ClientPartition.from_frames(...) or from_frame(...)"
    ),
    "drop_cols": "leave columns out in the formula, as in 'y ~ . - a'",
    "eval_env": "a formula has the columns of the sites only; compute other columns in the sites' tables",
}
"""Arguments of statsmodels' from_formula, and what to do instead."""
MAKING = ("from_formula", "__init__")
"""Calls that make a model."""
OTHER_WEIGHTS = ("weights", "weight", "sample_weight", *WEIGHTS)


def check_arguments(model: type, given: Iterable[str], call: str) -> None:
    """Refuse arguments that a call of a model does not have.

    The error names the argument that is probably meant, or how to give weights.
    """
    known = _named(model, call)
    for name in given:
        if name in known:
            continue
        if call == "fit" and name in (moved := getattr(model, "_moved", {})):
            why = f"{name}: it is an option of one exchange, as in fit({moved[name]})"
            raise ModelError(why)
        if name in ROWS_OF_STATSMODELS:
            raise ModelError(f"{name}: {ROWS_OF_STATSMODELS[name]}")
        if name in OTHER_WEIGHTS:
            raise ModelError(f"{name}: {weights_of(model)}")
        where = model.__name__ if call in MAKING else f"{model.__name__}.{call}"
        if isinstance(hint := getattr(model, "_hints", {}).get(name), Remedy):
            raise ModelError(f"{where} has no argument {name!r}", remedy=hint)
        raise ModelError(
            f"{where} has no argument {name!r}{_remedy(model, name, known)}. Its arguments are "
            f"{', '.join(known)}"
        )


KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "bool": ((bool, np.bool_), "True or False"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a text, such as the name of a column"),
    "Sequence[str]": (Iterable, "a list of names"),
    "dict[str, str]": (Mapping, "{'groups': 'column'} or the like"),
}
"""By annotation: the types of an argument, and these in words."""


def check_kinds(call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse values whose type is not that of the argument's annotation, and numbers that are none."""
    parameters = signature(call).parameters
    for name, value in given.items():
        written = str(parameters[name].annotation) if name in parameters else ""
        kind = KINDS.get(written.removesuffix(" | None"))
        if kind is None or (value is None and written.endswith(" | None")):
            continue
        types, words = kind
        if not isinstance(value, types) or (isinstance(value, float) and np.isnan(value)):
            shown = repr(value) if isinstance(value, str | int | float) else kind_of(value)
            raise ModelError(f"{name}: expected {words}, received {shown}")
        if name == "seed":
            check_integer("seed", value, 0)


def check_positions(model: type, beyond: int, call: str) -> None:
    """Refuse values without a name where a call takes arguments by name only."""
    if beyond > 0:
        known = _named(model, call)
        others = (
            [name for name in _named(model, "from_formula") if name not in known] if call == "fit" else []
        )
        before = f"; those of {model.__name__}.from_formula are {', '.join(others)}" if others else ""
        raise ModelError(
            f"{model.__name__}.{call}: {beyond} value{'s' * (beyond > 1)} without a name, not name=value. "
            f"Its arguments are {', '.join(known)}{before}"
        )


def _remedy(model: type, name: str, known: Sequence[str]) -> str:
    """Return the argument that is probably meant, or the call that has it."""
    if name in (hints := getattr(model, "_hints", {})):
        return f"; {hints[name]}"
    names = (name, *OTHER_NAMES.get(name, ()))
    wanted = [one for one in names if one in known] or get_close_matches(name, known, 1, cutoff=0.75)
    if wanted:
        return f"; use {wanted[0]!r}"
    for call in ("fit", "from_formula"):
        moved = [one for one in names if one in _named(model, call)]
        if moved:
            return f"; {moved[0]!r} is an argument of {model.__name__}.{call}"
    return ""


def checks_arguments(call: Method) -> Method:
    """Let a method answer an argument that it does not have with a ModelError that names the remedy.

    The tracebacks of its errors end here; see :func:`~fedstat.errors.without_internal_frames`.
    """
    code: CodeType = call.__code__

    @wraps(call)
    def checked(model: Any, /, *args: Any, **given: Any) -> Any:
        try:
            of = model if isinstance(model, type) else type(model)
            check_arguments(of, given, call.__name__)
            check_positions(of, len(args) + 1 - code.co_argcount, call.__name__)
            check_kinds(checked, given)
            return call(model, *args, **given)
        except FedstatError as error:
            raise without_internal_frames(error) from error.__cause__

    return cast(Method, checked)


def checks_names(function: Method) -> Method:
    """Let a public function answer an argument that it does not have with a ModelError that names its own.

    Tracebacks end here, as those of :func:`checks_arguments`.
    """
    known = list(signature(function).parameters)

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            if unknown := [name for name in given if name not in known]:
                close = get_close_matches(unknown[0], known, 1, cutoff=0.75)
                raise ModelError(
                    f"{function.__name__} has no argument {unknown[0]!r}"
                    f"{f'; use {close[0]!r}' if close else ''}. Its arguments are {', '.join(known)}"
                )
            check_kinds(function, given)
            return function(*args, **given)
        except FedstatError as error:
            raise without_internal_frames(error) from error.__cause__

    return cast(Method, checked)


def weights_of(model: type) -> str:
    """Return how to give the weights that a model has."""
    there = set(_named(model, "from_formula")) - set(getattr(model, "_weightless", ()))
    meanings = {**WEIGHTS, **({"weights": model._weights_mean} if hasattr(model, "_weights_mean") else {})}
    taken = [f'{name}="column" {meaning}' for name, meaning in meanings.items() if name in there]
    if not taken:
        return f"{model.__name__} has no weights: every row counts once"
    return (
        "give from_formula the name of a column of the sites' own tables, by what it means: "
        f"{', or '.join(taken)}"
    )


def _named(model: type, call: str) -> list[str]:
    """Names of the arguments of a call of a model; none if it has no such call."""
    parameters = signature(getattr(model, call)).parameters.values() if hasattr(model, call) else ()
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in kinds and one.name != "self"]


HeldRows: TypeAlias = IntoDataFrame | Mapping[str, Any]
"""Rows that a caller holds: a table of pandas, polars or pyarrow, or a mapping of columns to values."""


def check_frame(call: str, frame: Any, otherwise: str) -> pd.DataFrame:
    """Take rows that the caller holds as a pandas table; `otherwise` says what of other rows.

    A table of polars or pyarrow, or a mapping of columns to values, is converted.
    """
    if isinstance(frame, pd.DataFrame):
        return frame
    if isinstance(frame, Mapping):
        row = bool(frame) and all(np.ndim(values) == 0 for values in frame.values())
        try:
            return pd.DataFrame([dict(frame)] if row else dict(frame))
        except ValueError:
            raise ModelError(f"{call}: the columns of the new rows have different lengths") from None
    with suppress(TypeError, ModuleNotFoundError):
        held: pd.DataFrame = nw.from_native(frame, eager_only=True).to_pandas()
        return held
    series = " (.to_frame() makes a table of a column, .to_frame().T of a row)"
    hint = series if isinstance(frame, pd.Series) else to_pandas(frame)
    raise ModelError(
        f"{call}: expected a table of rows that you hold (of pandas, polars or pyarrow, or a dict of "
        f"columns), received {kind_of(frame)}{hint}; {otherwise}"
    )


def to_pandas(frame: object) -> str:
    """Say how a table of another package becomes one of pandas, for the end of a text."""
    return " (to_pandas() makes one of it)" if hasattr(frame, "to_pandas") else ""


def kind_of(value: object) -> str:
    """Name the type of a value, with the package that it is of."""
    package, name = type(value).__module__.split(".")[0], type(value).__name__
    return name if package == "builtins" else f"{package} {name}"


def takes_parsed(init: Method, parsed: type = Formula) -> Method:
    """Let a constructor refuse what is not parsed: a text, nothing, or arrays as in statsmodels."""

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        formula = args[0] if args else given.get("formula")
        if not isinstance(formula, parsed):
            raise ModelError(
                f"{type(self).__name__}: models are made from a formula and a partition",
                remedy=Remedy("{model}.from_formula({formula!r}, partition)", "write {call}").filled(
                    model=type(self).__name__, formula=formula if isinstance(formula, str) else "y ~ x"
                ),
            )
        init(self, *args, **given)

    return cast(Method, checked)


def check_layout(model: str, partition: object, layout: str, *others: str) -> None:
    """Refuse what is no partition in the layout that a model needs, or in one of `others`."""
    what, remedy = LAYOUTS[layout]
    if not isinstance(partition, ClientPartition):
        raise ModelError(
            f"partition: expected a fedstat.ClientPartition, received {kind_of(partition)}; make one with "
            f"{remedy}, which takes tables of pandas, polars and pyarrow"
        )
    if partition.layout not in (layout, *others):
        raise ModelError(
            f"{model} needs a {layout} partition ({what}): {remedy}; this one is {partition.layout} "
            f"({LAYOUTS[partition.layout][0]})"
        )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a word that is not one of the choices."""
    if not len(choices):
        raise ModelError(f"{name}: there is none to choose here; leave the argument out")
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


def masks_rows(masked: object) -> bool:
    """Return whether to mask sums of row-level values: by default with any number of sites.

    With two sites, each can compute the other's part of a sum. Row-level values are masked nevertheless,
    because the coordinator then receives sums only.
    """
    check_choice("masked", masked, (True, False, None))
    return masked is not False


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
