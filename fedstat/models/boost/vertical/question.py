"""Who has which learner, and what each institution is asked to make of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fedstat.errors import FormulaError, MessageError
from fedstat.federation.design.formula.expression import name_expression
from fedstat.federation.design.formula.parse import ClientTerms, Formula, parse_formula
from fedstat.federation.design.formula.terms import parse_terms, term_columns
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.tables.curves.array import CurveArray
from fedstat.models.boost.learning.learners import INTERCEPT, BoostFormula, Learner
from fedstat.records import Least


@dataclass(frozen=True, slots=True)
class CurvesOpened:
    """Curves of the right side of which none may have a long gap, or the response, which may have none."""

    curves: tuple[str, ...]
    response: str = ""


@dataclass(frozen=True, slots=True)
class ColumnsMade:
    """Columns that an institution makes: of its learners, without their constants, and of the response.

    `response` is a curve, or with `number` the response that is open; empty at institutions without it.
    `columns` are those of all institutions, as rows are held against them.
    """

    learners: tuple[Learner, ...]
    response: str
    number: bool
    time: Learner | None
    columns: Annotated[int, Least(1)]

    def check(self) -> None:
        """Require learners besides the intercept, which has no institution."""
        if any(one.kind == INTERCEPT for one in self.learners):
            raise MessageError("the question about columns has an intercept")

    @property
    def curves(self) -> tuple[str, ...]:
        """Curves that are read."""
        of_learners = [one.of for one in self.learners if one.of_curve]
        own = [] if self.number or not self.response else [self.response]
        return tuple(dict.fromkeys((*of_learners, *own)))


@dataclass(frozen=True, slots=True)
class LearnersApart:
    """A formula over institutions with different columns, and the holder of each learner.

    `owners` (P,) are the institutions of the learners, that of the response for the intercept; `formula` has
    for each institution the columns and curves that it reads.
    """

    boost: BoostFormula
    formula: Formula
    owners: tuple[str, ...]

    @property
    def holder(self) -> str:
        """Who has the response."""
        return str(self.formula.response_client)

    @property
    def clients(self) -> tuple[str, ...]:
        """Institutions that take part, in the order of the partition."""
        return tuple(terms.client for terms in self.formula.clients)

    def curves(self, client: str) -> tuple[str, ...]:
        """Curves of the right side at an institution."""
        pairs = zip(self.boost.learners, self.owners, strict=True)
        return tuple(one.of for one, owner in pairs if owner == client and one.of_curve)

    def terms(self, client: str) -> ClientTerms:
        """Terms of an institution, and the columns that they read, without curves."""
        (own,) = (terms for terms in self.formula.clients if terms.client == client)
        written = {name_expression(name).text for name in self.curves(client)}
        terms = tuple(text for text in own.terms if text not in written)
        names = dict.fromkeys(name for text in terms for name in term_columns(parse_terms(text).terms[0]))
        return ClientTerms(client, terms, tuple(names))

    def made(
        self, client: str, learners: Sequence[Learner], time: Learner | None, columns: int
    ) -> ColumnsMade:
        """Ask an institution for its columns; `learners` are all, with the ends of their bases."""
        pairs = zip(learners, self.owners, strict=True)
        own = tuple(one for one, k in pairs if k == client and one.kind != INTERCEPT)
        holds = client == self.holder
        response = self.boost.response if holds else ""
        return ColumnsMade(
            own, response, holds and not self.boost.functional, time if holds else None, columns
        )


def curves_apart(partition: ClientPartition) -> dict[str, CurveArray]:
    """Curves of institutions that hold different columns."""
    return {name: one for own in partition.curves.values() for name, one in own.items()}


def find_owners(
    boost: BoostFormula, columns: Mapping[str, Sequence[str]], curves: Mapping[str, Sequence[str]]
) -> LearnersApart:
    """Find who holds what a formula reads; a FormulaError where a learner needs columns of two.

    `columns` and `curves` are those of each institution, by name.
    """
    along = [one.label for one in boost.learners if one.varying]
    if along:
        raise FormulaError(
            f"formula: {along[0]} takes products of its columns with the response at each of its points; "
            "where institutions hold different columns there are bsignal(), bfpc(), bols(), bbs(), brandom()"
        )
    held = {client: (*names, *curves[client]) for client, names in columns.items()}
    wanted = [name_expression(name).text for name in boost.curves]
    left = name_expression(boost.response).text if boost.functional else boost.response
    # A curve is a column of its institution here: who holds what is the same question.
    parsed = parse_formula(f"{left} ~ {' + '.join((*boost.terms, *wanted))}", held)
    owner = {term: terms.client for terms in parsed.clients for term in terms.terms}
    owners = []
    for one in boost.learners:
        read = [*([name_expression(one.of).text] if one.of_curve else []), *one.terms]
        holders = list(dict.fromkeys(owner[term] for term in read)) or [str(parsed.response_client)]
        if len(holders) > 1:
            raise FormulaError(
                f"formula: {one.label} needs what {' and '.join(map(repr, holders))} have; a learner is of "
                "one institution"
            )
        owners += holders
    at = {terms.client: terms for terms in parsed.clients}
    clients = (at.get(k, ClientTerms(k, (), ())) for k in columns if k in at or k == parsed.response_client)
    response = f"{boost.response}(t)" if boost.functional else parsed.response
    return LearnersApart(
        boost, replace(parsed, text=boost.text, response=response, clients=tuple(clients)), tuple(owners)
    )
