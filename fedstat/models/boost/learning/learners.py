"""Base learners of a formula, read by a parser that knows their names and options, and nothing else.

``"cca(t) ~ bsignal(rcst) + bols(C(case)) + bbs(age)"``: a response with ``(t)`` is a curve, others are
numbers. A bare name is ``bsignal`` of a curve and ``bols`` of another column.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from fedstat.errors import FormulaError
from fedstat.federation.design.formula.terms import parse_terms, split_sides, term_columns, term_text
from fedstat.records import Least

Kind: TypeAlias = Literal["1", "bsignal", "bols", "bbs"]
INTERCEPT = "1"
MOST_COEFFICIENTS = 100


@dataclass(frozen=True, slots=True)
class Learner:
    """A base learner: what it is of, its basis, and its degrees of freedom along it.

    Parameters
    ----------
    kind : {"1", "bsignal", "bols", "bbs"}
        Intercept; integral of a curve times a smooth function; linear, of levels as well; smooth effect.
    of : str
        Curve, or term of the formula; the parameter along a curve's response for that itself.
    df : float or None
        Degrees of freedom; None: four, or as many as there are.
    low, high : float
        Ends of the basis; the same where they are not known yet.
    """

    kind: Kind
    of: str = ""
    df: float | None = None
    knots: Annotated[int, Least(0)] = 10
    degree: Annotated[int, Least(0)] = 3
    differences: Annotated[int, Least(1)] = 1
    low: float = 0.0
    high: float = 0.0

    @property
    def label(self) -> str:
        """Name of the learner."""
        return INTERCEPT if self.kind == INTERCEPT else f"{self.kind}({self.of})"

    @property
    def smooth(self) -> bool:
        """Whether it has a basis of splines."""
        return self.kind in ("bsignal", "bbs")

    @property
    def centred(self) -> bool:
        """Whether its effects add up to zero over all rows, apart from the intercept."""
        return self.kind in ("bols", "bbs")


@dataclass(frozen=True, slots=True)
class BoostFormula:
    """A response, curve or not, and the learners; the intercept first."""

    text: str
    response: str
    functional: bool
    learners: tuple[Learner, ...]

    @property
    def curves(self) -> tuple[str, ...]:
        """Curves on the right side."""
        return tuple(dict.fromkeys(one.of for one in self.learners if one.kind == "bsignal"))

    @property
    def terms(self) -> tuple[str, ...]:
        """Terms of columns that are no curves."""
        return tuple(dict.fromkeys(one.of for one in self.learners if one.centred))


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bsignal": {"knots": 10, "degree": 3, "differences": 1},
    "bols": {},
    "bbs": {"knots": 20, "degree": 3, "differences": 2},
}
OPTIONS: Mapping[str, frozenset[str]] = {
    "bsignal": frozenset({"df", "knots", "degree", "differences"}),
    "bols": frozenset({"df"}),
    "bbs": frozenset({"df", "knots", "degree", "differences", "lower_bound", "upper_bound"}),
}
NAMES = {"lower_bound": "low", "upper_bound": "high"}


def parse_boost_formula(text: str, curves: Sequence[str]) -> BoostFormula:
    """Read a formula of base learners; `curves` are those that all sites have.

    A FormulaError names what is not in the language, and what stands twice.
    """
    left, right = split_sides(text)
    response, functional = _response(left.strip(), curves)
    learners = [Learner("1")]
    for part in _summands(right):
        if part.strip() != "1":
            learners.append(_learner(part.strip(), curves))
    labels = [one.label for one in learners]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise FormulaError(f"formula: {twice[0]} stands twice")
    if functional and response in [one.of for one in learners]:
        raise FormulaError(f"formula: curve '{response}' is the response, and stands on the right side too")
    return BoostFormula(text, response, functional, tuple(learners))


def parse_time(text: str) -> Learner:
    """Read the basis along the response's curve, such as ``"bbs(t, knots=20, df=4)"``."""
    name, of, options = _call(text)
    if name != "bbs" or of != "t" or set(options) & NAMES.keys():
        raise FormulaError(f'time: expected "bbs(t, knots=10, df=4)", received {text!r}')
    made = make_learner("bbs", "t", {"knots": 10, "degree": 3, "differences": 2, "df": 4.0, **options})
    if made.df is None or made.df < made.differences:
        raise FormulaError(
            f"time: {made.differences} directions are free of its penalty; give df of that or more"
        )
    return made


def make_learner(kind: Kind, of: str, options: Mapping[str, Any]) -> Learner:
    """Learner with options by name."""
    made = replace(Learner(kind, of), **options)
    if ("low" in options) != ("high" in options) or ("low" in options and made.low >= made.high):
        raise FormulaError(
            f"formula: {made.label} needs lower_bound and upper_bound, the first below the other"
        )
    free = made.differences - made.centred if made.smooth else 0
    if made.df is not None and (made.df < free or made.df <= 0.0):
        raise FormulaError(
            f"formula: {made.label} cannot have df={made.df:g}: its penalty leaves {free} directions free. "
            "Give more df or fewer differences"
        )
    if made.smooth and made.differences >= made.knots + made.degree + 1:
        raise FormulaError(f"formula: {made.label} has too few knots for its differences")
    return made


def _response(left: str, curves: Sequence[str]) -> tuple[str, bool]:
    if left.endswith("(t)"):
        name = left[:-3].strip().strip("`")
        if name not in curves:
            raise FormulaError(
                f"formula: '{left}' asks for a curve '{name}', and the curves of all sites are "
                f"{', '.join(map(repr, curves)) or 'none: declare them by curves={...}'}"
            )
        return name, True
    if left in curves:
        raise FormulaError(f"formula: the response '{left}' is a curve; write '{left}(t)'")
    return left, False


def _summands(right: str) -> list[str]:
    """Split at plus signs outside brackets."""
    parts, depth = [""], 0
    for mark in right:
        depth += (mark in "([") - (mark in ")]")
        if mark == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += mark
    if any(not part.strip() for part in parts):
        raise FormulaError("formula: a '+' without a learner at both sides")
    return parts


def _learner(text: str, curves: Sequence[str]) -> Learner:
    if text.strip("`") in curves:
        return make_learner("bsignal", text.strip("`"), DEFAULTS["bsignal"])
    head = text.split("(", 1)[0].strip()
    bare: tuple[Any, str, dict[str, Any]] = ("bols", text, {})
    name, of, options = _call(text) if head in OPTIONS else bare
    if name == "bsignal":
        if of.strip("`") not in curves:
            raise FormulaError(f"formula: bsignal() takes a curve, and '{of}' is none at all sites")
        of = of.strip("`")
    else:
        of = _one_term(of, text, curves)
    return make_learner(name, of, {**DEFAULTS[name], **options})


def _one_term(of: str, text: str, curves: Sequence[str]) -> str:
    terms = parse_terms(of).terms
    if len(terms) != 1:
        raise FormulaError(f"formula: expected one learner, received {text[:80]!r}")
    held = [name for name in term_columns(terms[0]) if name in curves]
    if held:
        raise FormulaError(f"formula: {text!r} takes a column, and '{held[0]}' is a curve; use bsignal()")
    return term_text(terms[0])


def _call(text: str) -> tuple[Any, str, dict[str, Any]]:
    """Name of a learner, what it is of, and its options."""
    try:
        tree = ast.parse(text.replace("`", "__quote__"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise FormulaError(f"formula: {text[:80]!r} is no learner") from None
    match tree:
        case ast.Call(func=ast.Name(id=name), args=[of], keywords=keywords) if name in OPTIONS:
            options = {str(one.arg): _value(one.value, text) for one in keywords}
        case _:
            raise FormulaError(
                f"formula: {text[:80]!r} is no learner; known are {', '.join(f'{n}()' for n in OPTIONS)}, "
                "each of one column with options by name"
            )
    unknown = sorted(set(options) - OPTIONS[name])
    if unknown:
        raise FormulaError(f"formula: {name}() has no option '{unknown[0]}'; it has {sorted(OPTIONS[name])}")
    for option in ("knots", "degree", "differences"):
        if option in options and not (
            isinstance(options[option], int) and 0 <= options[option] < MOST_COEFFICIENTS
        ):
            raise FormulaError(
                f"formula: {option} in {text[:80]!r} is a whole number below {MOST_COEFFICIENTS}"
            )
    return name, ast.unparse(of).replace("__quote__", "`"), {NAMES.get(k, k): v for k, v in options.items()}


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise FormulaError(f"formula: options in {text[:80]!r} are numbers")


def with_bounds(learner: Learner, ends: Callable[[str], tuple[float, float] | None]) -> Learner:
    """Give a smooth effect of a column the ends of its basis, where the formula has not."""
    if learner.kind != "bbs" or learner.low < learner.high:
        return learner
    found = ends(learner.of)
    if found is None:
        raise FormulaError(
            f"formula: {learner.label} needs lower_bound=... and upper_bound=..., since extremes of a column "
            "are values of single rows; without them the sites have to publish a range of the column"
        )
    return replace(learner, low=found[0], high=found[1])


def with_domain(learner: Learner, domain: tuple[float, float]) -> Learner:
    """Give a basis along a curve the ends of the curve's domain."""
    return replace(learner, low=float(domain[0]), high=float(domain[1]))
