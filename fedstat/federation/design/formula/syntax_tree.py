"""The language of formulas as frozen classes: factors, transforms and contrasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from fedstat.spline_names import without_options
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Codings of categories: a matrix with one row for each level, its columns named as patsy does.

TREATMENT = "Treatment"
WRITTEN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Treatment": (TREATMENT, "reference"),
        "contr.treatment": (TREATMENT, "base"),
        "Sum": ("Sum", "omit"),
        "contr.sum": ("Sum", ""),
        "Helmert": ("Helmert", ""),
        "contr.helmert": ("Helmert", ""),
        "Diff": ("Diff", ""),
        "contr.diff": ("Diff", ""),
        "Poly": ("Poly", ""),
        "contr.poly": ("Poly", ""),
    }
)
"""Second argument of C(): the coding, and its one argument, a level."""
_POLYNOMIALS = (".Constant", ".Linear", ".Quadratic", ".Cubic")


def contrast_matrix(
    coding: str, levels: Sequence[object], omitted: object, *, complete: bool
) -> tuple[Floats, list[str]]:
    """Rows by level, columns (l, l - 1), and what follows the factor's name in theirs.

    `complete`: (l, l), with the constant, where no intercept takes it. `omitted` is that of Sum, by default
    the last level. All codings span what dummies do.
    """
    n = len(levels)
    match coding:
        case "Sum":
            out = n - 1 if omitted is None else list(levels).index(omitted)
            kept = [place for place in range(n) if place != out]
            columns = np.eye(n)[:, kept]
            columns[out] = -1.0
            names, first = [f"[S.{levels[place]}]" for place in kept], "[mean]"
        case "Helmert":
            columns = np.where(np.arange(n)[:, None] <= np.arange(n - 1), -1.0, 0.0)
            columns[np.arange(1, n), np.arange(n - 1)] = np.arange(1, n)
            names, first = [f"[H.{level}]" for level in levels[1:]], "[H.intercept]"
        case "Diff":
            steps = np.arange(1, n)
            columns = steps / n - (np.arange(n)[:, None] < steps)
            # patsy calls each difference by its first level, and with the constant counts one further.
            names, first = [f"[D.{level}]" for level in levels[: n - 1]], f"[D.{levels[0]}]"
            if complete:
                names = [f"[D.{level}]" for level in levels[1:]]
        case _:
            powers = (np.arange(n) - (n - 1) / 2)[:, None] ** np.arange(n)
            q, r = np.linalg.qr(powers)
            columns = (q * np.sign(np.diag(r)))[:, 1:]
            titles = [*_POLYNOMIALS[:n], *(f"^{degree}" for degree in range(len(_POLYNOMIALS), n))]
            first, *names = titles
    if complete:
        return np.column_stack([np.ones(n), columns]), [first, *names]
    return columns, names


# ----------------------------------------------------------------------------------------------------
# The whole language of formulas: the transforms, and what a checked factor can be, as frozen classes.

MAX_EXPONENT = 10
MAX_NUMBER = 1e300

ALLOWED = (
    "allowed are columns, `odd names` in backticks, Q('odd name'), C(x), C(x, Treatment('level')), C(x, "
    "Sum), C(x, Helmert), C(x, Diff), C(x, Poly), C(x, levels=['one', 'two']), log, exp, sqrt, np.log, "
    "np.exp, np.sqrt, scale, center, bs(x, df=4), ns(x, df=4), cr(x, df=4, constraints='center'), also with "
    "knots=(40, 60), lower_bound=18, upper_bound=90 instead of df, cc(...), poly(x, 2), I(x > 3), and + - * "
    "/ ** with numbers inside a transform or I()"
)
ALLOWED_NUMERIC = (
    "allowed inside offset() and cbind() are columns, `odd names` in backticks, Q('odd name'), numbers, "
    "log, exp, sqrt, np.log, np.exp, np.sqrt, and + - * / **"
)
NATURAL = (
    "natural cubic splines are ns(x, df=4), or with knots ns(x, knots=(30, 45, 60), lower_bound=18, "
    "upper_bound=90) for R's ns(x, knots=c(30, 45, 60), Boundary.knots=c(18, 90)); they give R's fit with "
    "other coefficients, as cr(x, ..., constraints='center') does"
)
HINGE = (
    "a slope that changes at 50 is a linear spline, bs(x, knots=(50,), degree=1, lower_bound=18, "
    "upper_bound=90)"
)
PLACES: Mapping[str, str] = MappingProxyType(
    {
        "rcs": NATURAL,
        **dict.fromkeys(("hinge", "pmax", "max", "np.maximum"), HINGE),
        "s": f"there are no penalized smooths; {NATURAL}",
        "factor": "a factor is C(x), with its reference level C(x, Treatment('level'))",
        "offset": "an offset is added to the right side, outside parentheses, products and transforms, as in "
        "'y ~ x + offset(log(days))'",
        "cbind": "cbind is the whole left side, as in 'cbind(events, n - events) ~ x'",
        "Surv": "Surv is the whole left side, as in 'Surv(months, died) ~ x'",
        "strata": "strata is added to the right side, outside parentheses, products and transforms, as in "
        "'Surv(months, died) ~ x + strata(sex)'",
        "cluster": "cluster is added to the right side, outside parentheses, products and transforms, as in "
        "'Surv(months, died) ~ x + cluster(family)'",
    }
)

Option: TypeAlias = bool | int | float | str | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the data."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number written in the formula."""

    value: float


@dataclass(frozen=True, slots=True)
class Level:
    """A category level written in a comparison."""

    value: str


@dataclass(frozen=True, slots=True)
class Negative:
    """Minus an operand."""

    operand: Tree


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Two operands joined by one of ``+ - * / **``."""

    symbol: str
    left: Tree
    right: Tree


@dataclass(frozen=True, slots=True)
class Relation:
    """Two operands joined by one of ``< <= > >= == !=``: a left side, or what I() holds."""

    symbol: str
    left: Tree
    right: Tree


@dataclass(frozen=True, slots=True)
class Transform:
    """A whitelisted function of one operand; `text` is the key of its state."""

    function: str
    operand: Tree
    options: tuple[tuple[str, Option], ...]
    text: str


@dataclass(frozen=True, slots=True)
class Category:
    """A column coded as categories, against `reference` (None: the first level, of Sum the last).

    `levels` are those that it may have, in their order, where the formula declares them; `coding` is one of
    :mod:`fedstat.federation.design.formula.syntax_tree`.
    """

    column: str
    reference: Option | None
    levels: tuple[bool | int | float | str, ...] = ()
    coding: str = TREATMENT


@dataclass(frozen=True, slots=True)
class Counts:
    """``cbind(successes, failures)``: two columns of binomial counts, as in R; left sides only.

    statsmodels writes ``successes + failures`` for this. Here, as in R, that is arithmetic: one column, the
    number of trials.
    """

    successes: Tree
    failures: Tree


@dataclass(frozen=True, slots=True)
class Survival:
    """``Surv(time, event)``, or ``Surv(start, stop, event)``, as in R; left sides only.

    `times` are one or two, `event` is 0 or 1, true or false, or a comparison with a level. Competing events
    are a category with declared levels; the first level is censoring.
    """

    times: tuple[Tree, ...]
    event: Tree

    @property
    def causes(self) -> tuple[str, ...]:
        """Competing events, in the order of their codes 1, 2, ...; empty for one event."""
        return tuple(map(str, self.event.levels[1:])) if isinstance(self.event, Category) else ()


Tree: TypeAlias = (
    Column | Number | Level | Negative | Arithmetic | Relation | Transform | Category | Counts | Survival
)


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked factor, in canonical form that is valid again inside a formula.

    `label` is how the design column is named (without the backticks of an odd name), `columns` are those that
    the factor reads, each once, in the order written.
    """

    text: str
    label: str
    tree: Tree
    columns: tuple[str, ...]


def iter_parts(tree: Tree) -> Iterator[Tree]:
    """Go through a tree in the order written: itself, and all that it is made of."""
    yield tree
    match tree:
        case Negative(operand=operand) | Transform(operand=operand):
            yield from iter_parts(operand)
        case Arithmetic(left=one, right=other) | Relation(left=one, right=other):
            yield from iter_parts(one)
            yield from iter_parts(other)
        case Counts(successes=one, failures=other):
            yield from iter_parts(one)
            yield from iter_parts(other)
        case Survival(times=times, event=event):
            for part in (*times, event):
                yield from iter_parts(part)


def iter_columns(tree: Tree) -> Iterator[str]:
    """Names of the columns that a tree reads, in the order written."""
    for part in iter_parts(tree):
        match part:
            case Column(name=name) | Category(column=name):
                yield name


def iter_transforms(tree: Tree) -> Iterator[Transform]:
    """List the transforms of a tree, outer ones first."""
    return (part for part in iter_parts(tree) if isinstance(part, Transform))


SPLINES = ("bs", "cr", "cc")
"""Transforms with knots: of B-splines, and natural and cyclic cubic ones by their values at the knots."""


def has_knots(transform: Transform) -> bool:
    """Return whether the formula has all knots and bounds of a spline."""
    options = dict(transform.options)
    return {"knots", "lower_bound", "upper_bound"} <= options.keys() and "df" not in options


def is_written(transform: Transform) -> bool:
    """Whether the state of a spline is all in the formula, where that names knots and bounds."""
    centered = "constraints" in dict(transform.options)
    return transform.function in SPLINES and has_knots(transform) and not centered


def inner_knots(transform: Transform) -> int | None:
    """Return how many knots a spline has between its bounds; None if neither they nor df are given."""
    options: dict[str, Any] = dict(transform.options)
    if "knots" in options:
        return len(options["knots"])
    if transform.function == "bs":
        degree = options.get("degree", 3)
        return int(options.get("df", degree)) - int(degree)
    if "df" not in options:
        return None
    # The columns of a cyclic spline agree at its ends, and a constraint takes one more.
    return int(options["df"]) - 2 + ("constraints" in options) + (transform.function == "cc")


def with_places(transform: Transform, places: Sequence[float]) -> str:
    """Write a spline with its lower bound, inner knots and upper bound."""
    options: dict[str, Any] = dict(transform.options)
    options.pop("df", None)
    lower, *inner, upper = map(float, places)
    options |= {"knots": tuple(inner), "lower_bound": lower, "upper_bound": upper}
    if transform.function == "bs" and "lower_bound" not in dict(transform.options):
        # A few values are beyond the means of the outer blocks: as in R, the outer polynomials go on there.
        options = {"extrapolation": "extend"} | options
    order = ("knots", "degree", "lower_bound", "upper_bound", "constraints", "extrapolation")
    given = ", ".join(f"{name}={options[name]!r}" for name in order if name in options)
    return f"{without_options(transform.text)[:-1]}, {given})"


@dataclass(frozen=True, slots=True)
class TransformSignature:
    """Arguments of a transform after its operand, in positional order."""

    options: Mapping[str, Callable[[Option], bool]]
    nests: bool  # may stand inside arithmetic and other transforms: one value per row


def _flag(value: Option) -> bool:
    return isinstance(value, bool)


def is_number(value: Option) -> bool:
    """Whether an option, as written in the formula, is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _degree(value: Option) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EXPONENT


def _freedom(value: Option) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100


def _numbers(value: Option) -> bool:
    return isinstance(value, tuple)


def _centered(value: Option) -> bool:
    return value == "center"


def _beyond(value: Option) -> bool:
    return value in ("raise", "clip", "zero", "extend")


_CUBIC = TransformSignature(
    MappingProxyType(
        {
            "df": _freedom,
            "knots": _numbers,
            "lower_bound": is_number,
            "upper_bound": is_number,
            "constraints": _centered,
        }
    ),
    nests=False,
)
_PLAIN = TransformSignature(MappingProxyType({}), nests=True)
# One value per row from one value per row, without a state: these are allowed in offsets and counts too.
ELEMENTWISE: Mapping[str, TransformSignature] = MappingProxyType(
    dict.fromkeys(("log", "exp", "sqrt", "np.log", "np.exp", "np.sqrt"), _PLAIN)
)
TRANSFORMS: Mapping[str, TransformSignature] = MappingProxyType(
    {
        **ELEMENTWISE,
        "center": _PLAIN,
        "scale": TransformSignature({"center": _flag, "scale": _flag, "ddof": is_number}, nests=True),
        "poly": TransformSignature({"degree": _degree, "raw": _flag}, nests=False),
        "bs": TransformSignature(
            {
                "df": _freedom,
                "knots": _numbers,
                "degree": _degree,
                "lower_bound": is_number,
                "upper_bound": is_number,
                "extrapolation": _beyond,
            },
            nests=False,
        ),
        "cr": _CUBIC,
        "cc": _CUBIC,
    }
)
