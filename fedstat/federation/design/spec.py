"""The coding of one institution's columns as plain values, checked wherever they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fedstat import records
from fedstat.errors import DesignError, FormulaError
from fedstat.federation.design.coding import STATE_KEYS, plain_state, written_state
from fedstat.federation.design.formula.terms import Term, parse_terms, term_columns
from fedstat.federation.design.formula.tree import SPLINES, Category, Transform, iter_transforms
from fedstat.federation.tables.columns import Kind, LevelValue

Figure: TypeAlias = bool | int | float | None
Figures: TypeAlias = Figure | list[Figure] | dict[str, Figure]
"""What the state of a transform is made of: numbers and no texts."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """How an institution's columns are coded; plain values, enough to code new rows the same way.

    `names` are the p design columns without the intercept, `term_names` the term of each; `levels` the agreed
    levels, in order, of every column coded as categories. `state`, of transforms by their text, may hold
    figures of the data (a mean, the bounds and knots of a spline): it stays where the block is unless its
    release is declared. `means` replace single missing numbers; they are empty unless the block was built
    with ``partial="mean"``.
    """

    client: str = ""
    terms: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    term_names: tuple[str, ...] = ()
    intercept: bool = True
    kinds: dict[str, Kind] = field(default_factory=dict)
    levels: dict[str, tuple[LevelValue, ...]] = field(default_factory=dict)
    state: dict[str, dict[str, Figures]] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write the specification as JSON text."""
        return records.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> BlockSpec:
        """Read what :meth:`to_json` wrote, and check it as if a stranger had written it."""
        return records.from_json(cls, text, "block specification (BlockSpec)", DesignError)

    def check(self) -> None:
        """Require terms of the formula language and a state that belongs to them.

        A FormulaError tells of the terms, a DesignError of what does not belong together.
        """
        terms = read_terms(self.terms, self.columns) if self.terms or self.columns else ()
        transforms = {t.text: t for term in terms for f in term for t in iter_transforms(f.tree)}
        expected = {
            # Raw polynomials are powers, and keep nothing.
            text: frozenset() if dict(t.options).get("raw") else STATE_KEYS[t.function]
            for text, t in transforms.items()
            if t.function in STATE_KEYS
        }
        found = {text: frozenset(state) for text, state in self.state.items()}
        whole = set(self.kinds) == set(self.columns) and set(self.levels) == set(
            coded_columns(terms, self.kinds)
        )
        if found == expected:
            # By other knots than the formula's somebody could cut beside a row that no owner was asked about.
            whole &= all(_has_knots(transforms[text], state) for text, state in self.state.items())
        if found != expected or not whole or len(self.names) != len(self.term_names):
            raise DesignError(
                f"block specification of institution {self.client!r}: terms, levels and transform state do "
                "not belong together; build it again."
            )


def _has_knots(transform: Transform, state: Mapping[str, Figures]) -> bool:
    """Whether knots and bounds of a spline are those that its formula writes, where it does."""
    written = written_state(transform) if transform.function in SPLINES else None
    return written is None or plain_state(written) | {"means": state.get("means")} == (
        dict(state) | {"means": state.get("means")}
    )


def read_terms(terms: Sequence[str], columns: Sequence[str]) -> tuple[Term, ...]:
    """Read terms again: what comes from elsewhere is checked where it is used.

    A FormulaError tells of a text outside the formula language or that is not one term, and of terms that
    read other columns than those declared.
    """
    parsed = []
    for text in terms:
        right = parse_terms(text)
        if len(right.terms) != 1:
            raise FormulaError(f"formula: expected one term, received {text[:80]!r}.")
        parsed.append(right.terms[0])
    used = {name for term in parsed for name in term_columns(term)}
    if used != set(columns) or not used:
        raise FormulaError("formula: the terms read other columns than those declared for them.")
    return tuple(parsed)


def coded_columns(terms: Iterable[Term], kinds: Mapping[str, Kind]) -> tuple[str, ...]:
    """List the columns that need levels: those that hold categories, and numbers inside C()."""
    trees = [factor.tree for term in terms for factor in term]
    coded = [tree.column for tree in trees if isinstance(tree, Category)]
    coded += [name for name, kind in kinds.items() if kind == "category"]
    return tuple(dict.fromkeys(coded))
