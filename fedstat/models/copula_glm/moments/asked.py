"""What sites are asked for: scores of columns of the design and of the response, and what these cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np

from fedstat.errors import DescriptionError, MessageError
from fedstat.models.copula.asked import PLACES, GramAsked, NoisePlan
from fedstat.models.copula.margins import Margin
from fedstat.models.copula_glm.moments.columns import SQUARED_RADIUS, ScoredColumn
from fedstat.models.copula_glm.moments.response import LARGEST, WEIGHTS, ScoredResponse
from fedstat.privacy.sensitivity import cut_rows
from fedstat.records import to_json
from fedstat.typing import Ints

FamilyName = Literal["Binomial", "Gaussian", "Poisson"]
SLACK = Fraction(1, 2**20)
"""By which the weighted response may be longer than its largest score, as a double."""


def radius_of(columns: int, family: str) -> Fraction:
    """Return R^2 of so many scores of columns, and of the response where it is of a family."""
    squared = SQUARED_RADIUS * columns
    if family:
        squared += (Fraction(WEIGHTS[family]) * Fraction(LARGEST[family])) ** 2 + SLACK
    return squared


@dataclass(frozen=True, slots=True)
class MomentsAsked(GramAsked):
    """Sums of products of scores of columns of the design, and of the response at its `holder`, the last.

    The columns are this institution's, and `source` is the place of its columns of the data, of which the
    response is the last. `site` is the institution that is asked.
    """

    site: str
    holder: str
    response: FamilyName
    columns: tuple[ScoredColumn, ...] = field(default=())

    def check(self) -> None:
        """Require columns that there can be."""
        super(MomentsAsked, self).check()
        if not self.columns and self.site != self.holder:
            raise MessageError("products: expected columns of the design")

    @property
    def agreed(self) -> str:
        """Whose row has the response, and of which family: its radius follows."""
        return to_json(["values", self.holder, self.response])

    def check_at(self, site: str) -> None:
        """Require that the question is to this institution: whether it holds the response follows."""
        if self.site != site:
            raise DescriptionError(f"{site}: asked for products of '{self.site}'")

    def width(self, columns: int) -> int:
        """Return how many scores it has: of columns of the design, and of the response at its holder."""
        return len(self.columns) + (self.site == self.holder)

    def radius(self, columns: int) -> Fraction:
        """Return R^2 of this institution's scores."""
        return self._radius_at(self.site, columns)

    def peer_radius(self, peer: str) -> Fraction:
        """Return R^2 of the scores of another institution."""
        return self._radius_at(peer, self.peers[peer])

    def _radius_at(self, site: str, columns: int) -> Fraction:
        holds = site == self.holder
        return radius_of(columns - holds, self.response if holds else "")

    def score(self, margins: Sequence[Margin], codes: Ints) -> Ints:
        """Score rows by their bins (n, d), -1 for none: the columns are cut together, the response is not."""
        q, holds = len(self.columns), self.site == self.holder
        if any(not 0 <= column.source < len(margins) - holds for column in self.columns):
            raise DescriptionError(f"{self.site}: a column of the design is of none that was asked for")
        parts = []
        if q:
            sources = [column.source for column in self.columns]
            tables = [column.scores(margins[column.source]) for column in self.columns]
            found = np.column_stack(
                [
                    np.where(c >= 0, t[np.maximum(c, 0)], 0.0)
                    for t, c in zip(tables, codes.T[sources], strict=True)
                ]
            )
            parts.append(cut_rows(found, radius_of(q, ""), PLACES))
        if holds:
            table = WEIGHTS[self.response] * ScoredResponse(self.response, margins[-1]).table
            if len(table) != margins[-1].bins.count:  # else rows decided whether this fails
                raise DescriptionError(f"{self.site}: a binary response has two bins")
            scores = np.where(codes[:, -1] >= 0, table[np.maximum(codes[:, -1], 0)], 0.0)
            parts.append(cut_rows(scores[:, None], radius_of(0, self.response), PLACES))
        return np.hstack(parts)


@dataclass(frozen=True)
class MomentPlan(NoisePlan):
    """The plan of a generalised linear model: scores of columns of the design, by site, and a response.

    Of the columns of the data that its holder is asked for, the response is the last. `of_step` is kept for a
    step on the score afterwards.
    """

    design: Mapping[str, tuple[ScoredColumn, ...]] = field(default_factory=dict)
    holder: str = ""
    response: FamilyName = "Binomial"
    of_step: Fraction = Fraction(0)

    def site_cost(self, client: str, unknown: Collection[str] = ()) -> Fraction:
        """Return what an institution is charged, with what is kept for a step."""
        return super().site_cost(client, unknown) + self.of_step

    def coordinator_cost(self) -> Fraction:
        """Return what a whole record costs against the coordinator, with what is kept for a step."""
        return super().coordinator_cost() + self.of_step

    def width(self, client: str) -> int:
        """Return how many scores an institution has."""
        return len(self.design[client]) + (client == self.holder)

    def radius(self, client: str) -> Fraction:
        """Return R^2 of the scores of an institution."""
        return radius_of(len(self.design[client]), self.response if client == self.holder else "")

    def gram_asked(self, client: str, groups: int) -> MomentsAsked:
        """Ask an institution for its part of the Gram matrix."""
        return MomentsAsked(
            peers=self._peers(client),
            groups=groups,
            variance=self.gram_variance,
            site=client,
            holder=self.holder,
            response=self.response,
            columns=self.design[client],
        )

    def count_deviation(self, client: str, place: int) -> float:
        """Return the deviation of the noise on the counts of an institution's column."""
        asked = self.margins_asked(client)
        return math.sqrt(asked.of_levels if asked.bins[place].levels else asked.of_trees)
