"""Scored columns of the design and of the response, from a formula and public bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import expit, gammaln, ndtr

from fedstat.errors import MessageError, ModelError
from fedstat.federation.design.coding import read_terms
from fedstat.federation.design.formula.expression import parse_expression
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.formula.syntax_tree import Category, Column, Transform
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.tables.columns import LevelValue
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula.margins import Bins, Margin
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Columns of the design as functions of one data column each, and their released scores.
#
# A score is the column's contribution to the linear predictor, standardized by the released margin and cut. A
# category of k levels enters the model by indicators of k - 1 levels. Its scores are indicators that a code
# is at least m, m = 1, ..., k - 1: they span the same space, and increase with the code as the copula
# requires.

FUNCTIONS: Mapping[str, Callable[[Floats], Floats]] = {
    "": np.asarray,
    "log": np.log,
    "sqrt": np.sqrt,
    "exp": np.exp,
}
LARGEST_SCORE = 4.0
SQUARED_RADIUS = Fraction(36, 25)
"""Squared length per column to which a site's part of a row of scores is cut."""


@dataclass(frozen=True, slots=True)
class ScoredColumn:
    """A column of the design: a function of the numbers of a data column, or one of its levels.

    `source` is the position of the data column. For a level, `level` is its position, and its score is
    whether a code is at least `above`; both are 0 for a function.
    """

    name: str
    term: str
    site: str
    source: int
    function: str = ""
    level: int = 0
    above: int = 0

    def check(self) -> None:
        """Require an existing function."""
        if self.function not in FUNCTIONS or min(self.source, self.level, self.above) < 0:
            raise MessageError("a design column has no valid score")

    def at(self, values: Floats) -> Floats:
        """Return the values in the linear predictor at numbers of the data column, or at codes."""
        if self.above:
            return np.asarray(values == self.level, dtype=np.float64)
        return np.asarray(FUNCTIONS[self.function](values), dtype=np.float64)

    def scores(self, margin: Margin) -> Floats:
        """Scores of the bins, (k,), ascending: mean 0 and variance 1 under the margin before the cut."""
        p, k = margin.probabilities, margin.bins.count
        t = (
            self.at(margin.bins.middles)
            if not self.above
            else (np.arange(k) >= self.above).astype(np.float64)
        )
        t = t - p @ t
        spread = np.sqrt(p @ t**2)
        scores: Floats = np.clip(t / spread if spread > 0.0 else 0.0 * t, -LARGEST_SCORE, LARGEST_SCORE)
        return scores


@dataclass(frozen=True)
class ScoredDesign:
    """Data columns (d,), design columns (p,), and the positions of each site's columns.

    Both are in the order of the sites; design columns of a site follow its data columns.
    """

    bins: tuple[Bins, ...]
    columns: tuple[ScoredColumn, ...]
    sites: tuple[str, ...]

    @cached_property
    def sources(self) -> Ints:
        """Data column of each design column: (p,)."""
        return np.array([column.source for column in self.columns], dtype=np.int64)

    def of_source(self, source: int) -> Ints:
        """Positions of the design columns of a data column."""
        return np.flatnonzero(self.sources == source)

    def before(self, source: int) -> Ints:
        """Positions of the design columns on which a data column without an order depends.

        These are all columns with an order, and those without an order that come earlier.
        """
        nominal = np.array([bins.nominal for bins in self.bins], dtype=np.bool_)
        earlier = ~nominal | (np.arange(len(self.bins)) < source)
        return np.flatnonzero(earlier[self.sources] & (self.sources != source))

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """Design columns of each site."""
        owners = [column.site for column in self.columns]
        ends = np.cumsum([owners.count(site) for site in self.sites]).tolist()
        return tuple(slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))

    @cached_property
    def squared_radii(self) -> tuple[float, ...]:
        """Squared length to which each site's part of a row of scores is cut."""
        return tuple(float(SQUARED_RADIUS * (block.stop - block.start)) for block in self.blocks)

    def tables(self, margins: Sequence[Margin]) -> list[Floats]:
        """Scores by bin of every column of the design."""
        return [column.scores(margins[column.source]) for column in self.columns]

    def score(self, codes: Ints, tables: Sequence[Floats]) -> Floats:
        """Return scores of rows of codes (n, d) by these tables: (n, p), cut; see :func:`cut_blocks`."""
        rows = np.column_stack([table[codes[:, j]] for table, j in zip(tables, self.sources, strict=True)])
        return cut_blocks(rows, self.blocks, self.squared_radii)

    def values(self, latents: Floats, margins: Sequence[Margin], codes: Ints | None = None) -> Floats:
        """Columns of the design at latent normals, and codes of columns without an order, (n, d): (n, p)."""
        read: dict[tuple[int, bool], Array] = {}
        for column in self.columns:
            j, is_level = column.source, column.above > 0
            if (j, is_level) in read:
                continue
            if not margins[j].bins.levels:
                read[j, False] = margins[j].bins.as_formed(margins[j].numbers_at(latents[:, j]))
                continue
            found = np.searchsorted(margins[j].thresholds[1:-1], latents[:, j], side="right")
            found = found if codes is None else codes[:, j]
            read[j, is_level] = found.astype(np.float64) if is_level else margins[j].bins.middles[found]
        return np.column_stack([column.at(read[column.source, column.above > 0]) for column in self.columns])


def cut_blocks(rows: Floats, blocks: Sequence[slice], squared_radii: Sequence[float]) -> Floats:
    """Shorten each site's part of rows (n, p) to at most the root of this squared length."""
    out = np.empty_like(rows)
    for block, radius in zip(blocks, squared_radii, strict=True):
        part = rows[:, block]
        squares = np.einsum("ij,ij->i", part, part)
        out[:, block] = part * np.sqrt(np.minimum(1.0, radius / np.maximum(squares, radius)))[:, None]
    return out


# ----------------------------------------------------------------------------------------------------
# The scored response of a generalized linear model: its mean score, and draws of it.

WEIGHTS = {"Binomial": 1.7, "Gaussian": 1.0, "Poisson": 1.0}
LARGEST = {"Binomial": 1.0, "Gaussian": 3.0, "Poisson": 3.0}
"""Weight of the response in a row of scores, and the largest score before it is weighted, by family."""
LARGEST_PREDICTOR = 30.0
KNOTS = 16
"""Number of knots of a spline through mean scores; errors are below 1e-6."""


class ExpectedScores(NamedTuple):
    """Mean score (n,), its derivative by the linear predictor, and by the logarithm of the scale."""

    mean: Floats
    slope: Floats
    by_scale: Floats


@dataclass(frozen=True)
class ScoredResponse:
    """Response of a family, "Binomial", "Gaussian" or "Poisson", with its released margin.

    Its score is its value, standardized by the margin and cut; that of a binary response is -1 or 1.
    """

    family: str
    margin: Margin

    @property
    def bins(self) -> Bins:
        """Bins of the response."""
        return self.margin.bins

    @property
    def has_scale(self) -> bool:
        """Whether there is a variance to estimate."""
        return self.family == "Gaussian"

    @cached_property
    def center(self) -> float:
        """Mean of the margin."""
        return float(self.margin.probabilities @ self.bins.middles)

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the margin."""
        squares = self.margin.probabilities @ (self.bins.middles - self.center) ** 2
        return float(np.sqrt(max(float(squares), 1e-12)))

    @cached_property
    def table(self) -> Floats:
        """Score of every bin, before weighting: (k,)."""
        if self.family == "Binomial":
            return np.array([-1.0, 1.0])
        largest = LARGEST[self.family]
        scores: Floats = np.clip((self.bins.middles - self.center) / self.spread, -largest, largest)
        return scores

    @property
    def mean_score(self) -> float:
        """Mean score under the margin."""
        return float(self.margin.probabilities @ self.table)

    @property
    def mean_square(self) -> float:
        """Mean squared score under the margin."""
        return float(self.margin.probabilities @ self.table**2)

    def start(self) -> tuple[float, float]:
        """Linear predictor at the mean response, and the scale there."""
        p = self.margin.probabilities
        if self.family == "Binomial":
            rate = float(np.clip(p[1], 1e-6, 1.0 - 1e-6))
            return float(np.log(rate / (1.0 - rate))), 1.0
        if self.family == "Poisson":
            return float(np.log(max(self.center, 1e-3))), 1.0
        return self.center, self.spread

    def mean(self, eta: Floats, scale: float, power: int = 1) -> ExpectedScores:
        """Mean score, or squared score, at linear predictors."""
        table = self.table**power
        if self.family == "Binomial":
            mu = expit(eta)
            rise = table[1] - table[0]
            return ExpectedScores(table[0] + rise * mu, rise * mu * (1.0 - mu), np.zeros_like(eta))
        if self.family == "Poisson":
            return self._mean_counts(eta, table)
        return self._mean_normal(eta, scale, table[:, None])[0]

    def both_means(self, eta: Floats, scale: float) -> list[ExpectedScores]:
        """Mean score and mean squared score of a normal response at linear predictors."""
        return self._mean_normal(eta, scale, np.column_stack([self.table, self.table**2]))

    def _mean_normal(self, eta: Floats, scale: float, tables: Floats) -> list[ExpectedScores]:
        """Mean scores by several tables, (k, q): smooth functions of one number, evaluated by a spline."""
        low, high = float(eta.min()) - 0.1 * scale, float(eta.max()) + 0.1 * scale
        knots = (high - low) / scale * KNOTS + 4.0
        if not knots < len(eta) / 2:
            return self._integrals(eta, scale, tables)
        at = np.linspace(low, high, int(knots))
        exact = self._integrals(at, scale, tables)
        return [ExpectedScores(*CubicSpline(at, np.column_stack(one))(eta).T) for one in exact]

    def _integrals(self, eta: Floats, scale: float, tables: Floats) -> list[ExpectedScores]:
        # By parts: only edges with a change of the score matter.
        rise = np.diff(tables, axis=0)
        here = (rise != 0.0).any(axis=1)
        edges, rise = self.bins.edges[1:-1][here], rise[here]
        z = (edges - eta[:, None]) / scale
        density = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)
        mean, slope = tables[-1] - ndtr(z) @ rise, density @ rise / scale
        by_scale = (density * z) @ rise
        return [ExpectedScores(*parts) for parts in zip(mean.T, slope.T, by_scale.T, strict=True)]

    def _mean_counts(self, eta: Floats, table: Floats) -> ExpectedScores:
        mu = np.exp(np.minimum(eta, LARGEST_PREDICTOR))
        scores = table[self._bins_of_counts]
        # Scores are cut: they are constant beyond some count, for any bounds.
        scores = scores[: 2 + int(np.flatnonzero(scores != scores[-1]).max(initial=-1))]
        counts = np.arange(len(scores))
        density = np.exp(np.outer(np.log(mu), counts) - mu[:, None] - gammaln(counts + 1.0))
        # The remainder beyond the last count has its score.
        mean = scores[-1] + density @ (scores - scores[-1])
        slope = mu * (density[:, :-1] @ np.diff(scores))
        return ExpectedScores(mean, slope, np.zeros_like(eta))

    @cached_property
    def _bins_of_counts(self) -> Ints:
        """Bin of every count up to the end of the bounds."""
        last = max(self.bins.levels) if self.bins.levels else self.bins.range[1]
        return self.code(np.arange(int(np.ceil(float(last))) + 1.0))

    def code(self, y: Floats) -> Ints:
        """Bin of every response; a response outside the bounds counts at their end."""
        if not self.bins.levels:
            return self.bins.code_numbers(y)
        return np.clip(np.searchsorted(self.bins.middles, y, side="right") - 1, 0, self.bins.count - 1)

    def weights(self, eta: Floats, scale: float) -> Floats:
        """Information of one entity about its linear predictor."""
        if self.family == "Binomial":
            mu = expit(eta)
            return np.asarray(mu * (1.0 - mu))
        if self.family == "Poisson":
            return np.exp(np.minimum(eta, LARGEST_PREDICTOR))
        return np.full(len(eta), scale**-2.0)

    def draw(self, eta: Floats, scale: float, rng: np.random.Generator) -> Ints:
        """Draw responses at linear predictors, and return their bins."""
        if self.family == "Binomial":
            return np.asarray(rng.uniform(size=len(eta)) < expit(eta), dtype=np.int64)
        if self.family == "Poisson":
            return self.code(rng.poisson(np.exp(np.minimum(eta, LARGEST_PREDICTOR))).astype(np.float64))
        return self.code(eta + scale * rng.standard_normal(len(eta)))


# ----------------------------------------------------------------------------------------------------
# Scored columns from a formula and public bounds: terms of one column each.

Described: TypeAlias = Mapping[str, PublishedColumn]
MOST_COUNTS = 2_000
"""Largest count of a Poisson response, since means are sums over all counts."""
TAKEN = "a column, C(x), log(x), sqrt(x) or exp(x)"


def columns_by_site(formula: Formula, sites: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the data columns of each participating site; the response is the last column of its holder."""
    held = {terms.site: terms.columns for terms in formula.sites}
    held[str(formula.response_site)] = (
        *held.get(str(formula.response_site), ()),
        *formula.response_columns,
    )
    return {site: held[site] for site in sites if site in held}


def score_columns(formula: Formula, described: Described) -> dict[str, tuple[ScoredColumn, ...]]:
    """Describe the design columns of each site, in the order of its data columns.

    A ModelError names a term that is not a function of one column, or has no values within the bounds.
    """
    if not formula.intercept:
        raise ModelError(f"'{formula.text}' omits the intercept; remove '- 1' or '0 +'")
    found: dict[str, tuple[ScoredColumn, ...]] = {}
    for terms in formula.sites:
        place = {name: j for j, name in enumerate(terms.columns)}
        own = [
            column
            for term in read_terms(terms.terms, terms.columns)
            for column in _columns_of(term, terms.site, place, described)
        ]
        found[terms.site] = tuple(sorted(own, key=lambda column: column.source))
    return found


def _columns_of(
    term: Term, site: str, place: Mapping[str, int], described: Described
) -> Iterator[ScoredColumn]:
    """Describe the columns of one term."""
    text = ":".join(factor.text for factor in term)
    match [factor.tree for factor in term]:
        case [Column(name=name)] if _numeric(described[name]):
            yield ScoredColumn(term[0].label, text, site, place[name])
        case [Column(name=name)]:
            yield from _levels(term[0].label, text, site, place[name], described[name].levels, None)
        case [Category(column=name, reference=reference, levels=(), coding="Treatment")] if described[
            name
        ].levels:
            levels = described[name].levels
            yield from _levels(term[0].label, text, site, place[name], levels, reference)
        case [Transform(function=function, operand=Column(name=name), options=())] if function.removeprefix(
            "np."
        ) in ("log", "sqrt", "exp"):
            function = function.removeprefix("np.")
            _check_range(text, function, name, described[name])
            yield ScoredColumn(term[0].label, text, site, place[name], function)
        case _:
            raise ModelError(
                f"the term {text!r} has no score that a budgeted release contains: a term is {TAKEN}, or "
                "C(x) of a column whose bounds list levels. Products, splines, polynomials and standardized "
                "columns need moments of the rows that are not released; compute the column at its site"
            )


def _levels(
    label: str,
    text: str,
    site: str,
    source: int,
    levels: Sequence[LevelValue],
    reference: object,
) -> Iterator[ScoredColumn]:
    first = levels[0] if reference is None else reference
    if first not in levels:
        raise ModelError(f"the term {text!r}: its reference is not a level in the bounds")
    others = [j for j, level in enumerate(levels) if level != first]
    for above, j in enumerate(others, 1):
        yield ScoredColumn(f"{label}[T.{levels[j]}]", text, site, source, level=j, above=above)


def _numeric(column: PublishedColumn) -> bool:
    """Return whether a column enters as a number."""
    return column.range is not None or not any(isinstance(level, str | bool) for level in column.levels)


def _check_range(text: str, function: str, name: str, column: PublishedColumn) -> None:
    lowest = column.range[0] if column.range is not None else min(map(float, column.levels))
    if not _numeric(column) or (function == "log" and lowest <= 0.0) or (function == "sqrt" and lowest < 0.0):
        raise ModelError(
            f"the term {text!r} has no value at the lower end of the bounds of '{name}'; narrow the bounds, "
            "or compute the column at its site"
        )


def check_response(formula: Formula, family: str, described: Described) -> None:
    """Require that the response is a column with bounds that suit the family."""
    if not isinstance(parse_expression(formula.response, response=True).tree, Column):
        raise ModelError(f"response '{formula.response}': expected a column; compute it at its site")
    column = described[formula.response_columns[0]]
    if family == "Binomial" and len(column.levels) != 2:
        raise ModelError(
            f"response '{formula.response}': the binomial family needs two levels, the second being the "
            f"event; write {{{formula.response!r}: [0, 1]}} in its bounds"
        )
    if family == "Gaussian" and (column.range is None or len(column.levels) > 0):
        raise ModelError(f"response '{formula.response}': the normal family needs a range (low, high)")
    if family == "Poisson" and (
        not _numeric(column) or min([*(column.range or ())[:1], *map(float, column.levels)]) != 0.0
    ):
        raise ModelError(f"response '{formula.response}': counts begin at 0, as in range(0, 40) or (0, 1000)")
    if family == "Poisson" and column.range is not None and column.range[1] > MOST_COUNTS:
        raise ModelError(
            f"response '{formula.response}': expected counts of at most {MOST_COUNTS:,}. Larger ones count "
            f"at the end of the range (0, {MOST_COUNTS}); or use the normal family"
        )
