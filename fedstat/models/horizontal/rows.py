"""Rows of a site in the form that the kernels take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from fedstat.errors import DesignError, Remedy
from fedstat.federation.design.formula.expression import parse_expression, quoted_name
from fedstat.federation.design.formula.syntax_tree import Arithmetic, Column
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows
from fedstat.federation.design.site_rows import CompleteRows
from fedstat.federation.disclosure.facts import RowBlock, RowTerms, ScoreAndInformation, WorkingWeights
from fedstat.federation.message import ArrayDeclaration, aggregate, control
from fedstat.kernels.glm.distributions import LOGIT, DistributionSpec
from fedstat.kernels.glm.sums import (
    Rows,
    Sums,
    check_response,
    linear_predictor,
    mean_vectors,
    row_means,
    row_weights,
    times_means,
)
from fedstat.typing import Array, Floats

SUMS = (*OPEN_ROWS, WorkingWeights, ScoreAndInformation)
"""Facts behind sums over a session's rows at coefficients from outside."""

NOTHING_SUMMED = np.zeros((0, 2))
INSIDE = control("whether all means lie inside the family's domain", 0, maskable=True)
NO_MEANS = ScoreAndInformation(None, 0, None, tuple)
AT_THE_START = (WorkingWeights(lambda: np.zeros((0, 0)), NOTHING_SUMMED), NO_MEANS)
"""Weights and means before any coefficients are chosen: they depend on the data alone."""

RowVectors: TypeAlias = Callable[[Rows, Floats, DistributionSpec], Floats]
"""Vectors over rows (m, k R) at the coefficients (p, R) of R points."""

BLOCK = 8192
MOST_KEPT = 2**22
FLAT = 1e-6
"""Largest ratio of weights to the outcome probabilities at which these are at the ends of their range."""


def glm_rows(rows: CompleteRows, X: Floats) -> Rows:
    """Put a chunk in the form of the kernels; two columns of counts become proportions and trials."""
    y, trials = rows.y, None
    if y.ndim == 2:
        trials = y.sum(axis=1)
        # Without trials there is no proportion: the row has weight zero, for any value.
        y = np.divide(y[:, 0], trials, out=np.zeros(len(y)), where=trials > 0.0)
    weights = rows.weights
    return Rows(X, y, rows.offset, weights.get("freq_weights"), weights.get("var_weights"), trials)


def require_response(site: str, rows: Rows, distribution: DistributionSpec, response: str) -> None:
    """Require responses that the distribution can have; the error counts the others."""
    problem = check_response(rows, distribution)
    if problem:
        text = f"site {site!r}: {problem} cannot be of family {distribution.name}: '{response}'"
        if distribution.name == "Binomial" and (remedy := _of_two_outcomes(response)):
            raise DesignError(text, remedy=remedy)
        raise DesignError(f"{text}. Correct them, or choose another family.")


def _of_two_outcomes(response: str) -> Remedy | None:
    """Return how a response becomes one of two outcomes: counts of both, or a comparison."""
    match parse_expression(response, response=True).tree:
        case Arithmetic(symbol="+"):
            events, _, others = response.rpartition("+")
            return Remedy(
                "from_formula('cbind({events}, {others}) ~ ...', ...).fit()",
                "For the counts of both outcomes write cbind(events, others) on the left side, or one row "
                "for each outcome.",
            ).filled(events=events.strip(), others=others.strip())
        case Column(name=name):
            return Remedy(
                "from_formula('{written} == 2 ~ ...', ...).fit()",
                "For one value against the others compare on the left side, as in {written} == 2 or "
                "{written} > 1; for all of several values use FederatedOrdinal or FederatedMultinomial, for "
                "counts a family of counts.",
            ).filled(written=quoted_name(name))
    return None


@dataclass(frozen=True, slots=True, eq=False)
class RowsAtPoints(RowBlock):
    """A part of the rows of a design.

    A point is a distribution and the bytes of coefficients, and which vectors over the rows are summed with:
    without, means and weights. Vectors of points are kept in `kept`, if given, up to `MOST_KEPT` numbers.
    """

    rows: Rows
    intercept: bool
    kept: dict[Any, Floats] | None = None

    @property
    def columns(self) -> Floats:
        """Columns of the design, and a constant."""
        X = self.rows.X
        return X if self.intercept else np.column_stack([np.ones(len(X)), X])

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Means and working weights, times the rows' own: (m, k)."""
        if self.kept is not None and len(self.rows) * len(points) <= MOST_KEPT:
            for point in points:
                if point not in self.kept:
                    self.kept[point] = RowsAtPoints(self.rows, self.intercept).vectors((point,))
            return np.column_stack([self.kept[point] for point in points])
        return np.column_stack(
            [view(self.rows, beta, distribution) for view, distribution, beta in by_distribution(points)]
        )

    def terms(self, point: Any) -> list[RowTerms]:
        """Terms of score and information at a point; other vectors weigh columns, or products of two."""
        rows, X, one = self.rows, self.columns, np.ones((len(self.rows), 1))
        distribution, beta = point[0], _coefficients(point)
        if len(point) > 2:
            vectors = self.vectors((point,))
            if getattr(point[2], "last_is_of_response", False):  # vectors of epochs, which weigh no products
                of_means, of_response = vectors[:, :1], vectors[:, 1:]
                return [RowTerms(X, of_means, one), RowTerms(X, of_response, one, rows.y)]
            return [RowTerms(X, vectors, X)]
        if distribution.canonical:
            both = mean_vectors(rows, beta[:, None], distribution)
            return [RowTerms(X, both[:, :1], one), RowTerms(X, both[:, -1:], X)]
        with np.errstate(all="ignore"):
            at = row_means(rows, distribution, linear_predictor(rows, beta))
            # Score and observed information are linear in the response.
            score, information = at.weight / at.slope / at.V, at.weight * at.expected
            start = information * at.curvature(np.zeros(len(rows)))
            slope = information * at.curvature(np.ones(len(rows))) - start
        known = np.column_stack([information, start])
        return [
            RowTerms(X, (score * at.mu)[:, None], one),
            RowTerms(X, score[:, None], one, rows.y),
            RowTerms(X, known, X),
            RowTerms(X, slope[:, None], X, rows.y),
        ]

    def times(self, points: tuple[Any, ...], wide: Floats) -> Floats:
        """Columns and vectors at points, times a matrix (p + k, q)."""
        kinds = by_distribution(points)
        if len(kinds) > 1 or not self.intercept or kinds[0][0] is not mean_vectors:
            return RowBlock.times(self, points, wide)
        ((_, distribution, beta),) = kinds
        return times_means(self.rows, beta, distribution, wide)

    def every(self, first: int, step: int) -> RowsAtPoints:
        """Return every n-th row, from the first on."""
        return RowsAtPoints(self.rows.part(slice(first, None, step)), self.intercept)


def by_distribution(points: tuple[Any, ...]) -> list[tuple[RowVectors, DistributionSpec, Floats]]:
    """Put points of one kind that follow one another together: coefficients (p, R)."""
    return [
        (kind[1] if len(kind) > 1 else mean_vectors, kind[0], np.column_stack([*map(_coefficients, run)]))
        for kind, run in groupby(points, key=itemgetter(slice(0, None, 2)))
    ]


def _coefficients(point: tuple[Any, ...]) -> Floats:
    return np.frombuffer(point[1])


def answered_at(
    opened: OpenRows,
    chunks: Callable[[], Iterable[Rows]],
    n: int,
    beta: Floats,
    distribution: DistributionSpec,
    sums: Sums | None = None,
    instead: Mapping[str, Array] | None = None,
    blocks: Callable[[OpenRows, Callable[[], Iterable[Rows]]], Iterable[RowsAtPoints]] | None = None,
) -> tuple[ScoreAndInformation | WorkingWeights, ...]:
    """Declare the rows' weights at these coefficients, if possible by sums at them, and the means.

    First declare that there are no means: if weights allow another release, no means were used.
    """

    def each() -> Floats:
        return np.concatenate([row_weights(rows, beta, distribution) for rows in chunks()], axis=1)

    parts = partial(blocks or blocks_of, opened, chunks)
    point = (distribution, np.asarray(beta, dtype=float).tobytes())
    known = 1.0 if distribution.loop == LOGIT and not opened.question.weighted else None
    # Means that are linear in the coefficients are combinations of the columns.
    means = NO_MEANS
    if not distribution.least_squares:
        means = ScoreAndInformation(opened, n, point, parts, known, among=opened.places)
    if sums is None:
        return NO_MEANS, WorkingWeights(each, instead=instead), means
    if not np.isfinite(sums.deviance):  # where a mean is outside the family's domain nothing is summed
        return NO_MEANS, WorkingWeights(each, NOTHING_SUMMED, instead)
    flat = None
    if distribution.name == "Binomial":
        weighs = float(sums.spread[0, 0])

        def flat() -> bool:
            return weighs < FLAT * sums.weight and means_are_flat(chunks(), beta, distribution, weighs)

    return NO_MEANS, WorkingWeights(each, sums.spread, instead, flat), means


def weighted_by(
    opened: OpenRows,
    chunks: Callable[[], Iterable[Rows]],
    n: int,
    beta: Floats,
    distribution: DistributionSpec,
    vectors: RowVectors,
    flat: Callable[[], bool] | None = None,
) -> tuple[WorkingWeights, ScoreAndInformation]:
    """Return comparable and hashable vectors by which columns are multiplied at these coefficients.

    `flat` is whether means are at the ends of their range.
    """

    def each() -> Floats:
        found = [vectors(rows, beta[:, None], distribution) for rows in chunks()]
        return np.abs(np.concatenate(found)).T

    point = (distribution, np.asarray(beta, dtype=float).tobytes(), vectors)
    parts = partial(blocks_of, opened, chunks)
    return WorkingWeights(each, flat=flat), ScoreAndInformation(opened, n, point, parts, among=opened.places)


def blocks_of(opened: OpenRows, chunks: Callable[[], Iterable[Rows]]) -> Iterator[RowsAtPoints]:
    """Yield the rows in blocks for the check of what sums at several points single out."""
    for rows in chunks():
        for start in range(0, len(rows), BLOCK):
            yield RowsAtPoints(rows.part(slice(start, start + BLOCK)), opened.question.intercept)


def means_are_flat(
    chunks: Iterable[Rows], beta: Floats, distribution: DistributionSpec, weighs: float
) -> bool:
    """Whether probabilities are zero or one at nearly all rows, and not of a rare outcome alone."""
    ends = np.zeros(2)
    for rows in chunks:
        mu = mean_vectors(rows, beta[:, None], distribution)[:, 0]
        ends += mu.sum(), rows.total - mu.sum()
    return bool(weighs < FLAT * ends.min())


def describe_sums(sums: Sums, T: Floats | None = None) -> dict[str, Array]:
    """Say where sums are defined, and give score, information and totals, for coefficients that T takes here.

    No totals outside the distribution's domain; ``spread`` is true: more than a few rows weigh in them.
    """
    finite, score, information = np.isfinite(sums.deviance), sums.score, sums.information
    return {
        "inside": np.array(finite),
        "spread": np.array(True),
        "score": score if T is None else T.T @ score,
        "information": information if T is None else T.T @ information @ T,
        "totals": np.array([sums.weight, sums.deviance, sums.pearson]) if finite else np.zeros(3),
    }


def summed(
    what: str, ndim: int = 1, *, optional: bool = False, behind: tuple[type, ...] = SUMS
) -> ArrayDeclaration:
    """Declare an array of which nothing is used but the sum over sites."""
    return aggregate(what, ndim, maskable=True, optional=optional, wide=True, behind=behind)


SCORES = {
    "inside": INSIDE,
    "spread": control("whether more than a few rows weigh", 0, maskable=True),
    "score": summed("score"),
    "information": summed("expected information", 2),
    "totals": summed("sums of weights, deviance, Pearson residuals"),
}
"""What :func:`describe_sums` releases."""


def require_numbers_of_rows(opened: OpenRows, weight: Floats, peer: str) -> None:
    """Raise a DesignError for frequency weights (n,) that are no whole numbers; `peer` is R's function."""
    if broken := int((weight % 1.0 != 0.0).sum()):
        column = opened.question.weights["freq_weights"]
        raise DesignError(
            f"site {opened.data.name!r}, column {column!r}: {broken:,} values are "
            "no whole numbers, and frequency weights are numbers of rows. Give other weights as var_weights, "
            f"which are those of R's {peer}"
        )
