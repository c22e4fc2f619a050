"""Base learners of a formula, and the parser that reads them.

``"cca(t) ~ bsignal(rcst) + bols(C(case)) + bbs(age)"``: a response with ``(t)`` is a curve, others are
numbers. A bare name is ``bsignal`` of a curve and ``bols`` of another column. ``const(...)`` around a learner
keeps its effect from varying along the response.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias

from fedstat.codec import Minimum
from fedstat.errors import FormulaError, Remedy
from fedstat.federation.design.formula.terms import parse_terms, split_sides, term_columns, term_text

Kind: TypeAlias = Literal["1", "bsignal", "bfpc", "bconcurrent", "bhist", "bols", "bbs", "brandom"]
INTERCEPT = "1"
OF_CURVES = ("bsignal", "bfpc", "bconcurrent", "bhist")
VARYING = ("bconcurrent", "bhist")
"""Learners whose columns vary along the response, each with splines of its own along it."""
DF = 4.0
"""Degrees of freedom of a learner along what it is of, as in mboost."""
MOST_COEFFICIENTS = 100


@dataclass(frozen=True, slots=True)
class Learner:
    """A base learner: what it is of, its basis, and its degrees of freedom along it.

    Parameters
    ----------
    kind : {"1", "bsignal", "bfpc", "bconcurrent", "bhist", "bols", "bbs", "brandom"}
        Intercept; integral of a curve times a smooth function; the same in principal components of the
        curve; a curve at the same point times a smooth function; integral of a curve up to that point;
        linear, of levels as well; smooth effect; one effect for each level, all shrunken.
    of : str
        Curve, or term of the formula; the parameter along a curve's response for that itself.
    df : float or None
        Degrees of freedom; None: four, or as many as there are.
    low, high : float
        Ends of the basis; the same where they are not known yet.
    by : str
        Term whose column the effect is multiplied by; empty for none.
    constant : bool
        Whether the effect is the same at all points of the response.
    pve : float
        Share of a curve's variance that its principal components have.
    """

    kind: Kind
    of: str = ""
    df: float | None = None
    knots: Annotated[int, Minimum(0)] = 10
    degree: Annotated[int, Minimum(0)] = 3
    differences: Annotated[int, Minimum(1)] = 1
    low: float = 0.0
    high: float = 0.0
    by: str = ""
    constant: bool = False
    pve: float = 0.99

    @property
    def label(self) -> str:
        """Name of the learner."""
        if self.kind == INTERCEPT:
            return INTERCEPT
        own = f"{self.kind}({self.of}{f', by={self.by}' if self.by else ''})"
        return f"const({own})" if self.constant else own

    @property
    def of_curve(self) -> bool:
        """Whether it is of a curve."""
        return self.kind in OF_CURVES

    @property
    def varying(self) -> bool:
        """Whether its columns vary along the response."""
        return self.kind in VARYING

    @property
    def smooth(self) -> bool:
        """Whether it has a basis of splines with a difference penalty."""
        return self.kind in ("bsignal", "bbs", *VARYING)

    @property
    def splines(self) -> int:
        """Splines of its basis."""
        return self.knots + self.degree + 1

    @property
    def coefficients(self) -> int:
        """Coefficients of its effect where it varies along the response, splines along that included."""
        return self.splines ** (2 if self.kind == "bhist" else 1) if self.varying else 0

    @property
    def centered(self) -> bool:
        """Whether its effects add up to zero over all rows, apart from the intercept."""
        return self.kind in ("bols", "bbs", "brandom")

    @property
    def terms(self) -> tuple[str, ...]:
        """Terms of columns that are no curves."""
        own = () if self.of_curve or self.kind == INTERCEPT else (self.of,)
        return (*own, self.by) if self.by else own

    @property
    def free(self) -> int:
        """Directions that its penalty leaves free."""
        if not self.smooth:
            return 0
        return self.differences ** (2 if self.kind == "bhist" else 1) - self.centered

    def width(self, columns: int) -> int:
        """Return the number of columns of a row in sums of products, for a term with `columns` coded ones."""
        if self.varying or self.kind == INTERCEPT:
            return int(not self.varying)
        return self.splines + (self.kind == "bfpc") if self.of_curve or self.smooth else 1 + columns


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
        return tuple(dict.fromkeys(one.of for one in self.learners if one.of_curve))

    @property
    def terms(self) -> tuple[str, ...]:
        """Terms of columns that are no curves."""
        return tuple(dict.fromkeys(term for one in self.learners for term in one.terms))


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bsignal": {"knots": 10, "degree": 3, "differences": 1},
    "bfpc": {"knots": 10, "degree": 3},
    "bconcurrent": {"knots": 10, "degree": 3, "differences": 1},
    "bhist": {"knots": 10, "degree": 3, "differences": 1},
    "bols": {},
    "bbs": {"knots": 20, "degree": 3, "differences": 2},
    "brandom": {},
}
SPLINE = frozenset({"df", "knots", "degree", "differences"})
OPTIONS: Mapping[str, frozenset[str]] = {
    "bsignal": SPLINE | {"by"},
    "bfpc": frozenset({"df", "knots", "degree", "pve"}),
    "bconcurrent": SPLINE,
    "bhist": SPLINE,
    "bols": frozenset({"df", "by"}),
    "bbs": SPLINE | {"lower_bound", "upper_bound", "by"},
    "brandom": frozenset({"df"}),
}
CONST = "const"
LEARNER = re.compile(r"b[a-z]{2,}")
"""What a learner of R's packages is called, known here or not."""
NAMES = {"lower_bound": "low", "upper_bound": "high"}


def parse_boost_formula(text: str, curves: Sequence[str]) -> BoostFormula:
    """Read a formula of base learners; `curves` are those that all sites have.

    A FormulaError names an expression that is not in the language, or a repeated one.
    """
    left, right = split_sides(text)
    response, functional = _response(left.strip(), curves)
    learners = [Learner("1")]
    for part in _summands(right):
        if part.strip() != "1":
            learners.append(_constant(part.strip(), curves, functional=functional))
    labels = [one.label for one in learners]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise FormulaError(f"formula: {twice[0]} occurs twice")
    if functional and response in [one.of for one in learners]:
        raise FormulaError(f"formula: curve '{response}' is the response, and is on the right side too")
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
    df = DF if made.df is None else made.df
    if df < made.free or df <= 0.0:
        raise FormulaError(
            f"formula: {made.label} cannot have df={df:g}: its penalty leaves {made.free} directions free. "
            "Give more df or fewer differences"
        )
    if not 0.0 < made.pve <= 1.0:
        raise FormulaError(f"formula: pve in {made.label} is a share of the variance, above 0 and at most 1")
    if made.smooth and made.differences >= made.knots + made.degree + 1:
        raise FormulaError(f"formula: {made.label} has too few knots for its differences")
    return made


DECLARE = Remedy(
    "ClientPartition.from_frame(..., curves={{{name!r}: fs.Curve('{name}_*')}})",
    "declare the columns of one, as in {arguments} of the partition",
)


def _response(left: str, curves: Sequence[str]) -> tuple[str, bool]:
    if left.endswith("(t)"):
        name = left[:-3].strip().strip("`")
        if name not in curves:
            raise FormulaError(
                f"formula: '{left}' asks for a curve '{name}', and the curves of all sites are "
                f"{', '.join(map(repr, curves)) or 'none'}",
                remedy=None if curves else DECLARE.filled(name=name),
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


def _constant(text: str, curves: Sequence[str], *, functional: bool) -> Learner:
    """Read a learner, or ``const()`` around one, of a response that is a curve, or none."""
    constant = text.split("(", 1)[0].strip() == CONST and text.endswith(")")
    made = _learner(text.split("(", 1)[1][:-1].strip() if constant else text, curves)
    if (constant or made.varying) and not functional:
        raise FormulaError(
            f"formula: {text[:80]!r} needs a response along a curve, but the response is not a curve; write "
            f"its name with (t), or {'drop const()' if constant else 'bsignal()'}"
        )
    if constant and made.varying:
        raise FormulaError(f"formula: {made.label} varies along the response, and takes no {CONST}()")
    return replace(made, constant=constant)


def _learner(text: str, curves: Sequence[str]) -> Learner:
    if text.strip("`") in curves:
        return make_learner("bsignal", text.strip("`"), DEFAULTS["bsignal"])
    head = text.split("(", 1)[0].strip()
    bare: tuple[Any, str, dict[str, Any]] = ("bols", text, {})
    is_call = "(" in text and (head in OPTIONS or LEARNER.fullmatch(head))
    name, of, options = _call(text) if is_call else bare
    if name in OF_CURVES:
        if of.strip("`") not in curves:
            close = get_close_matches(of, curves, n=1)
            remedy = f"did you mean '{close[0]}'?" if close else f"the curves are {', '.join(curves)}"
            raise FormulaError(
                f"formula: {name}() needs a curve, but '{of}' is not a curve at all sites"
                + (f"; {remedy}" if curves else ""),
                remedy=None if curves else DECLARE.filled(name=of.strip("`")),
            )
        of = of.strip("`")
    else:
        of = _one_term(of, text, curves)
    if "by" in options:
        options["by"] = _one_term(options["by"], text, curves)
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
        # Quotes and interactions are not Python; _written restores them from their replacements.
        tree = ast.parse(text.replace("`", "__quote__").replace(":", " @ "), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise FormulaError(f"formula: {text[:80]!r} is no learner") from None
    match tree:
        case ast.Call(func=ast.Name(id=name), args=[of], keywords=keywords) if name in OPTIONS:
            options: dict[str, Any] = {
                str(one.arg): _written(one.value) if one.arg == "by" else _value(one.value, text)
                for one in keywords
            }
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
    return name, _written(of), {NAMES.get(k, k): v for k, v in options.items()}


def _written(node: ast.expr) -> str:
    return ast.unparse(node).replace("__quote__", "`").replace(" @ ", ":")


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise FormulaError(f"formula: options in {text[:80]!r} are numbers")


def check_coded(
    learners: Sequence[Learner], columns: Mapping[str, int], has_levels: Callable[[str], bool]
) -> None:
    """Require terms that fit their learners; `columns` is the number of coded columns of each."""
    for one in learners:
        if one.kind == "bbs" and has_levels(one.of):
            raise FormulaError(f"formula: {one.label} takes a column of numbers; of levels there is bols()")
        if one.kind == "brandom" and not (has_levels(one.of) and ":" not in one.of):
            raise FormulaError(f"formula: {one.label} takes a column of levels; write C() around numbers")
        if one.by and columns[one.by] != 1:
            raise FormulaError(
                f"formula: {one.label} is multiplied by one column of numbers, or of two levels, and "
                f"{one.by} has {columns[one.by] + 1} levels; give each but one a column and a learner"
            )


def with_bounds(learner: Learner, ends: Callable[[str], tuple[float, float] | None]) -> Learner:
    """Set the bounds of a spline from the published range if the formula has none."""
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
