"""The algebra of terms: ``a*b - c + (d + e)^2`` becomes an ordered list of products of factors.

The operators and their precedence are those of R and formulaic: ``^`` before ``:`` before ``*`` and ``/``
before ``+`` and ``-``. Factors are checked as they are read (`formula_expression`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from fedstat.errors import FormulaError
from fedstat.federation.design.formula.expression import (
    name_expression,
    parse_expression,
    parse_labels,
    parse_offset,
    refuse_formula,
)
from fedstat.federation.design.formula.syntax_tree import MAX_EXPONENT, PLACES, Expression

MAX_FORMULA = 50_000
MAX_NESTING = 50
MAX_TERMS = 100_000

Term: TypeAlias = tuple[Expression, ...]
TermSet: TypeAlias = dict[frozenset[str], Term]

_OPERATORS = "allowed between terms are + - : * / ^ and parentheses"
_RANDOM_EFFECTS = (
    "random effects are for FederatedMixed, in parentheses of their own, as in 'y ~ x + (1 + x | patient) + "
    "(1 | site)'"
)
_ABSORBED = (
    "effects after a bar, 'y ~ x | ward', are for FederatedOLS, and FederatedGLM with the Gaussian family, "
    "which absorb them. C(ward) has a constant for each level, if all have enough rows. Random effects of "
    "small groups are for FederatedMixed, as in 'y ~ x + (1 | ward)', and strata(ward) for FederatedCox"
)
_AFTER_THE_BAR = (
    "after the bar are one or two columns, or combinations of columns, whose effects are absorbed: "
    "'y ~ x | ward', 'y ~ x | ward + shift', 'y ~ x | ward^year'"
)
MOST_ABSORBED = 2
"""Absorbed effects of a model: the rank of more is not known from their levels."""
_TOKEN = re.compile(
    r"""\s*(?: (?P<quoted>`[^`]+`) | (?P<offset>offset\s*\()
             | (?P<labels>(?:strata|cluster)\s*\() | (?P<call>[^\W\d][\w.]*\s*\()
             | (?P<name>[^\W\d][\w.]*) | (?P<number>\d+(?![\w.])) | (?P<operator>\*\*|[-+:*/^().]) )""",
    re.VERBOSE,
)
_NAME = r"\s*(?:[^\W\d][\w.]*|`[^`]+`)\s*"
_COLUMNS = re.compile(rf"{_NAME}(?:[+^]{_NAME})*")
_SUMMANDS = re.compile(rf"{_NAME}(?:\^{_NAME})*")
_FACTOR_NAME = re.compile(_NAME)
_QUOTED_OR_BAR = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`[^`]*`|[()]|\|\|?")
_QUOTED_OR_PARENTHESIS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`[^`]*`|[()]")


class _Token(NamedTuple):
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class RandomTerm:
    """``(terms | group)``: effects that vary between groups of rows.

    `terms` are formula texts, none for an intercept alone; `columns` are those whose levels make a group, one
    for ``(1 | a)`` and two for ``(1 | a:b)``.
    """

    columns: tuple[str, ...]
    intercept: bool
    terms: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Name of the groups, ``"a"`` or ``"a:b"``."""
        return ":".join(self.columns)

    @property
    def effect_columns(self) -> tuple[str, ...]:
        """Columns that the effects read, each once."""
        return tuple(dict.fromkeys(name for text in self.terms for name in term_columns(parse_term(text))))

    @property
    def text(self) -> str:
        """The term as it is written."""
        return f"({' + '.join(['1' if self.intercept else '0', *self.terms])} | {self.group})"


@dataclass(frozen=True, slots=True)
class RightSide:
    """The right side of a formula; main effects come first, then by degree, else in the order written.

    `offsets` is what stands inside each ``offset(...)``; `constant` says whether nothing but the intercept
    and offsets was written, and is false for ``x - x``. `labels` are the columns of ``strata(...)`` and
    ``cluster(...)``, by function. `absorbed` are effects after a bar, each the columns whose combinations
    are its levels.
    """

    intercept: bool
    terms: tuple[Term, ...]
    offsets: tuple[Expression, ...]
    constant: bool
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    random: tuple[RandomTerm, ...] = ()
    absorbed: tuple[tuple[str, ...], ...] = ()


def parse_terms(
    text: str,
    dot: Sequence[str] = (),
    *,
    offsets: bool = False,
    random: bool = False,
    absorbs: bool = False,
) -> RightSide:
    """Read the right side of a formula, in which ``.`` means the columns `dot`.

    Raises a FormulaError for anything outside the language, for a formula that multiplies out to too many
    terms, and for an offset, strata, clusters, random effects or absorbed ones that are not allowed there, or
    an offset written twice.
    """
    _require_length(text)
    if absorbs and _has_bar(text):
        head, bar, *tail = _split_bar(text)
        absorbed = _parse_absorbed("".join([bar, *tail]), text)
        columns = {name for names in absorbed for name in names}
        dot = [name for name in dot if name not in columns]
        found = parse_terms(head, dot, offsets=offsets)
        # Their levels span the constant: factors are coded as next to an intercept, whatever is written.
        return replace(found, intercept=True, absorbed=absorbed)
    tokens = _tokens(text)
    for token in tokens:
        if token.kind in ("offset", "labels") and not offsets:
            what = "an offset" if token.kind == "offset" else token.text.partition("(")[0]
            raise refuse_formula(what, token.text, "this model has none")
        if token.kind == "random" and not random:
            raise refuse_formula("a random effect", token.text, _RANDOM_EFFECTS)
    return _TermsReader(text, tokens, dot).read()


@lru_cache(maxsize=1024)
def parse_term(text: str) -> Term:
    """Read a text that is one term; a FormulaError where it is several. Repeated texts are read once."""
    terms = parse_terms(text).terms
    if len(terms) != 1:
        raise FormulaError(f"formula: expected one term, received {text[:80]!r}")
    return terms[0]


def right_side_of(terms: Sequence[Term]) -> RightSide:
    """Combine terms that were read one by one with an intercept, in the order of :class:`RightSide`."""
    distinct: TermSet = {}
    for term in terms:
        distinct.setdefault(_key(term), term)
    return RightSide(True, tuple(sorted(distinct.values(), key=len)), (), not terms)


def term_text(term: Term) -> str:
    """Write a term as formula text."""
    return ":".join(factor.text for factor in term)


def term_columns(term: Term) -> tuple[str, ...]:
    """Columns that a term reads, each once."""
    return tuple(dict.fromkeys(name for factor in term for name in factor.columns))


def split_sides(text: object, *, response: bool = True) -> tuple[str, str]:
    """Return the left and right side of a formula; the left side is empty for a model without a response.

    Raises a FormulaError if it is not text, is too long, or does not have exactly one ``~`` with the required
    sides.
    """
    if not isinstance(text, str):
        raise FormulaError(
            f"formula: expected text such as {_example(response)}, received {type(text).__name__}."
        )
    _require_length(text)
    # Blanks of the same length, so that positions stay; a ~ in a quoted name separates nothing.
    bare = _QUOTED_OR_PARENTHESIS.sub(lambda match: "_" * len(match[0]), text)
    if bare.count("~") != 1:
        raise FormulaError(
            f"formula: expected one '~' {'between response and' if response else 'before the'} terms, "
            f"found {bare.count('~')}; write for instance {_example(response)}."
        )
    left, right = text[: bare.index("~")].strip(), text[bare.index("~") + 1 :].strip()
    if left and not response:
        raise refuse_formula("a left side", left, "this model has no response: write '~ .' or '~ a + b'")
    if (response and not left) or not right:
        side = "left side (the response)" if response and not left else "right side (the terms)"
        raise FormulaError(f"formula: the {side} is empty; write for instance {_example(response)}.")
    return left, right


def _example(response: bool) -> str:
    return "'y ~ a + b'" if response else "'~ a + b'"


def _require_length(text: str) -> None:
    if len(text) > MAX_FORMULA:
        raise FormulaError(
            f"formula: {len(text):,} characters, the limit is {MAX_FORMULA:,}; `.` means all columns, "
            "and '. - x' leaves one out."
        )


def _tokens(text: str) -> list[_Token]:
    tokens, position, text = [], 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:].lstrip()
            remedy = _OPERATORS
            if rest[0] == "|":
                remedy = _ABSORBED if _COLUMNS.fullmatch(rest[1:]) else _RANDOM_EFFECTS
            raise refuse_formula(f"{rest[0]!r}", rest, remedy)
        kind, token, position = str(match.lastgroup), match[0].lstrip(), match.end()
        if token == "(" and _has_bar(text[position : (end := _closing(text, position)) - 1]):
            tokens.append(_Token("random", text[position - 1 : end]))
            position = end
            continue
        if kind in ("call", "offset", "labels"):
            end = _closing(text, position)
            token, position = token + text[position:end], end
        tokens.append(_Token(kind, token))
    return tokens


def _has_bar(text: str) -> bool:
    """Whether a bar is in a text, outside quotes and parentheses."""
    return len(_split_bar(text)) > 1


def _split_bar(text: str) -> list[str]:
    """Split a text at bars outside quotes and parentheses; the bars are kept."""
    depth, parts, start = 0, [], 0
    for match in _QUOTED_OR_BAR.finditer(text):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if match[0] in ("|", "||") and depth == 0:
            parts += [text[start : match.start()], match[0]]
            start = match.end()
    return [*parts, text[start:]]


def parse_random(text: str) -> list[RandomTerm]:
    """Read ``(terms | group)``, or ``(terms || group)`` for independent effects: one term for each."""
    parts = _split_bar(text[1:-1])
    if len(parts) != 3:
        raise refuse_formula("more than one bar", text, _RANDOM_EFFECTS)
    inside = parse_terms(parts[0])
    terms = tuple(map(term_text, inside.terms))
    if not terms and not inside.intercept:
        raise refuse_formula("a term without effects", text, "write (1 | group) for an intercept")
    found = []
    for columns in _groups(parts[-1].strip(), text):
        if parts[1] == "|":
            found.append(RandomTerm(columns, inside.intercept, terms))
            continue
        found += [RandomTerm(columns, True)] if inside.intercept else []
        found += [RandomTerm(columns, False, (term,)) for term in terms]
    return found


def _parse_absorbed(text: str, whole: str) -> tuple[tuple[str, ...], ...]:
    """Read ``| a + b^c``: the columns of each effect."""
    if not _COLUMNS.fullmatch(text[1:]):
        raise refuse_formula(f"{text!r}", whole, _AFTER_THE_BAR)
    factors = [
        tuple(name.strip().strip("`") for name in _FACTOR_NAME.findall(factor))
        for factor in _SUMMANDS.findall(text[1:])
    ]
    if len(factors) > MOST_ABSORBED or len({frozenset(names) for names in factors}) < len(factors):
        raise refuse_formula(f"{text!r}", whole, _AFTER_THE_BAR)
    return tuple(tuple(dict.fromkeys(names)) for names in factors)


def extended(text: str, more: str) -> str:
    """Return a formula with `more` after its terms, and before the bar of absorbed effects."""
    head, *tail = _split_bar(text)
    return f"{head.rstrip()}{more}{' ' * bool(tail)}{''.join(tail)}"


def _groups(group: str, text: str) -> list[tuple[str, ...]]:
    """Read the groups right of the bar: the columns of ``a``, of ``a:b``, and of both for ``a/b``."""
    plain = all(token.kind in ("name", "quoted") or token.text in (":", "/") for token in _tokens(group))
    if not group or not plain:
        raise refuse_formula(
            f"the group {group!r}",
            text,
            "groups are a column, (1 | a), combinations of columns, (1 | a:b), or nested ones, (1 | a/b), "
            "which is (1 | a) + (1 | a:b)",
        )
    return [term_columns(term) for term in parse_terms(group).terms]


def _closing(text: str, start: int) -> int:
    """Position after the parenthesis that closes the one opened before `start`."""
    depth = 1
    for match in _QUOTED_OR_PARENTHESIS.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
        if depth > MAX_NESTING:
            raise refuse_formula(f"nesting deeper than {MAX_NESTING}", text[start:])
    raise refuse_formula("a parenthesis that is not closed", text[start - 1 :], "close it")


@dataclass(slots=True)
class _TermsReader:
    """Recursive descent over the tokens, one method per level of precedence."""

    text: str
    tokens: list[_Token]
    dot: Sequence[str]
    position: int = 0
    depth: int = 0
    intercept: bool = True
    constant: bool = True
    offsets: list[Expression] = field(default_factory=list)
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    random: list[RandomTerm] = field(default_factory=list)

    def read(self) -> RightSide:
        terms = self._sum()
        if self.position < len(self.tokens):
            raise self._unexpected()
        # Stable: within a degree the order is that in which terms were written, as in R.
        ordered = tuple(sorted(terms.values(), key=len))
        offsets, random = tuple(self.offsets), tuple(_as_written(self.random, ordered))
        return RightSide(self.intercept, ordered, offsets, self.constant, self.labels, random)

    def _peek(self, *operators: str) -> bool:
        token = self._token()
        return token.kind == "operator" and token.text in operators

    def _token(self) -> _Token:
        end = self.position >= len(self.tokens)
        return _Token("end", "the end of the formula") if end else self.tokens[self.position]

    def _take(self) -> _Token:
        token = self._token()
        self.position += 1
        return token

    def _sum(self) -> TermSet:
        terms: TermSet = {}
        plus = self._sign()
        while True:
            if self._token().kind == "number":
                self._number(plus)
            elif self._token().kind == "offset":
                self._offset(plus)
            elif self._token().kind == "labels":
                self._labels(plus)
            elif self._token().kind == "random":
                self._random(plus)
            elif plus:
                terms = _union(terms, self._product())
            else:
                # A term is its set of factors: b:a takes a:b away.
                for key in self._product():
                    terms.pop(key, None)
            if not self._peek("+", "-"):
                return terms
            plus = self._sign()

    def _sign(self) -> bool:
        plus = True
        while self._peek("+", "-"):
            plus ^= self._take().text == "-"
        return plus

    def _number(self, plus: bool) -> None:
        number = self._take().text
        if number not in ("0", "1") or not self._is_summand():
            raise refuse_formula(
                f"the number {number}",
                self.text,
                "outside parentheses, 1 means an intercept and 0 no intercept; "
                "other numbers are exponents or arguments of a transform",
            )
        self.intercept = plus == (number == "1")

    def _is_summand(self) -> bool:
        """Return whether the last token is in the sum outside parentheses, and in no product."""
        return self.depth == 0 and (self._token().kind == "end" or self._peek("+", "-", ")"))

    def _offset(self, plus: bool) -> None:
        call = self._take().text
        if not plus or not self._is_summand():
            raise self._misplaced(call)
        offset = parse_offset(call)
        if offset.text in [other.text for other in self.offsets]:
            raise refuse_formula("the same offset twice", call, "write offset(2 * x) if twice x is meant")
        self.offsets.append(offset)

    def _labels(self, plus: bool) -> None:
        call = self._take().text
        if not plus or not self._is_summand():
            raise self._misplaced(call)
        function, columns = parse_labels(call)
        self.labels[function] = tuple(dict.fromkeys((*self.labels.get(function, ()), *columns)))

    def _random(self, plus: bool) -> None:
        text = self._take().text
        if not plus or not self._is_summand():
            raise refuse_formula("a random effect at this place", text, _RANDOM_EFFECTS)
        for term in parse_random(text):
            for one in self.random:
                if set(one.columns) == set(term.columns) and _effects(one) & _effects(term):
                    raise refuse_formula("the same random effect twice", text, "leave one of them out")
            self.random.append(term)

    def _misplaced(self, call: str) -> FormulaError:
        function = call.partition("(")[0].strip()
        what = "an offset" if function == "offset" else function
        return refuse_formula(f"{what} at this place", call, PLACES[function])

    def _product(self) -> TermSet:
        terms = self._interaction()
        while self._peek("*", "/"):
            nested = self._take().text == "/"
            right = self._interaction()
            if nested:
                # b nested in a + c is a:c:b: all factors of the left side, once.
                outer = tuple({factor.text: factor for term in terms.values() for factor in term}.values())
                terms = _union(terms, self._cross({_key(outer): outer}, right))
                continue
            crossed = self._cross(terms, right)
            terms = _union(_union(terms, right), crossed)
        return terms

    def _interaction(self) -> TermSet:
        terms = self._power()
        while self._peek(":"):
            self._take()
            terms = self._cross(terms, self._power())
        return terms

    def _power(self) -> TermSet:
        base = terms = self._atom()
        if self._peek("^", "**"):
            self._take()
            token = self._take()
            if token.kind != "number" or not 1 <= int(token.text[:9]) <= MAX_EXPONENT:
                raise refuse_formula(
                    f"the exponent {token.text}", self.text, f"expected a number from 1 to {MAX_EXPONENT}"
                )
            # (a + b)^2 is (a + b) * (a + b), in which a:a is a.
            for _ in range(int(token.text) - 1):
                terms = self._cross(terms, base)
        return terms

    def _cross(self, left: TermSet, right: TermSet) -> TermSet:
        if len(left) * len(right) > MAX_TERMS:
            raise refuse_formula(
                f"a product of {len(left):,} by {len(right):,} terms", self.text, "use fewer"
            )
        terms: TermSet = {}
        for a, b in product(left.values(), right.values()):
            term = tuple({factor.text: factor for factor in a + b}.values())
            terms.setdefault(_key(term), term)
        return terms

    def _atom(self) -> TermSet:
        self.constant = False
        if self._peek("("):
            return self._parenthesis()
        token = self._take()
        match token:
            case _Token("operator", "."):
                return _as_set([name_expression(name) for name in self.dot])
            case _Token("quoted", text):
                return _as_set([name_expression(text[1:-1])])
            case _Token("name", text):
                return _as_set([name_expression(text)])
            case _Token("call", text):
                return _as_set([parse_expression(text)])
            case _Token("offset" | "labels", text):
                raise self._misplaced(text)
        self.position -= 1
        raise self._unexpected()

    def _parenthesis(self) -> TermSet:
        self._take()
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise refuse_formula(f"nesting deeper than {MAX_NESTING}", self.text)
        terms = self._sum()
        if not self._peek(")"):
            raise self._unexpected()
        self._take()
        self.depth -= 1
        return terms

    def _unexpected(self) -> FormulaError:
        token = self._token()
        if token.kind == "name":
            remedy = f"{_OPERATORS}. A name with blanks is in backticks, as in `age at entry`"
            return refuse_formula(f"{token.text!r} after another name", self.text, remedy)
        return refuse_formula(f"{token.text} at this place", self.text, _OPERATORS)


def _union(terms: TermSet, more: TermSet) -> TermSet:
    """Union in which a term keeps the form in which it was written first."""
    for key, term in more.items():
        terms.setdefault(key, term)
    return terms


def _effects(term: RandomTerm) -> set[frozenset[str]]:
    """Return the terms of a random effect in a form that does not depend on their spelling."""
    constant: set[frozenset[str]] = {frozenset()} if term.intercept else set()
    return constant | {_key(parse_term(text)) for text in term.terms}


def _as_written(random: Sequence[RandomTerm], fixed: Sequence[Term]) -> list[RandomTerm]:
    """Write the terms of random effects as the formula writes the fixed ones: ``x:f`` is ``f:x``."""
    known: TermSet = {_key(term): term for term in fixed}
    out = []
    for one in random:
        terms = [parse_term(text) for text in one.terms]
        texts = tuple(term_text(known.setdefault(_key(term), term)) for term in terms)
        out.append(replace(one, terms=texts))
    return out


def _as_set(factors: Sequence[Expression]) -> TermSet:
    return {_key((factor,)): (factor,) for factor in factors}


def _key(term: Term) -> frozenset[str]:
    return frozenset(factor.text for factor in term)
