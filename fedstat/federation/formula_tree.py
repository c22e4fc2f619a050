"""What a checked factor of a formula can be: the whole language, as plain frozen classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

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
class Comparison:
    """Two operands joined by one of ``< <= > >= == !=``; left sides only."""

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
    """A column coded as categories, against `reference` (None: the first level)."""

    column: str
    reference: Option | None


Tree: TypeAlias = Column | Number | Level | Negative | Arithmetic | Comparison | Transform | Category


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked factor.

    Attributes
    ----------
    text : str
        The factor in canonical form; valid again inside a formula.
    label : str
        How the design column is named (without the backticks of an odd name).
    tree : Tree
        What is to be computed.
    columns : tuple of str
        The columns that the factor reads, each once, in the order written.
    """

    text: str
    label: str
    tree: Tree
    columns: tuple[str, ...]


def iter_columns(tree: Tree) -> Iterator[str]:
    """Names of the columns that a tree reads, in the order written."""
    match tree:
        case Column(name=name) | Category(column=name):
            yield name
        case Negative(operand=operand) | Transform(operand=operand):
            yield from iter_columns(operand)
        case Arithmetic(left=left, right=right) | Comparison(left=left, right=right):
            yield from iter_columns(left)
            yield from iter_columns(right)
