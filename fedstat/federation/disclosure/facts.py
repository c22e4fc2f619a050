"""Facts that a step reports about a release, which the disclosure checks examine.

A step reports them (:meth:`fedstat.federation.disclosure.state.State.report`) as soon as it knows them, and
its releases declare which of them are behind each array (``behind=(EntityCount, RowsUsed)``). The disclosure
checks compare them with the owner's policy (:mod:`fedstat.federation.disclosure.checks`). Facts are stored
with what a step stores: a step that uses the rows of an earlier step reports its facts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from fedstat.errors import Remedy
from fedstat.federation.tables.cardinality import PLAIN, ColumnCardinality
from fedstat.federation.tables.columns import LevelValue
from fedstat.typing import Array, Bools, Floats, Ints

TABLE_OF_COUNTS = (
    "Rules count rows, whatever freq_weights or cbind() say. If a row represents several entities, the owner "
    'of the site declares the column of their number, by counts = "COLUMN" under [data] in site.toml (in one '
    'process ClientPartition.from_frame(..., counts="COLUMN")); the table then has one row for each entity, '
    "and a model needs no freq_weights"
)
"""What to do about a rule that counts rows of a table of counts; an analyst's weights may be any column."""
COMPARISON = "comparison"
"""Used instead of a function: a column that is compared with one written level, as in ``visits > 0``."""


@dataclass(frozen=True, slots=True)
class FormulaFactor:
    """One factor of a formula, as the policy of a site decides whether it may be computed.

    Parameters
    ----------
    text : str
    columns : tuple of str
        Columns that it reads.
    functions : tuple of str
        Its transforms, outer ones first; ``"C"`` for a column coded as categories.
    written : bool
        Whether it holds arithmetic, a comparison or a number, with which a column can separate one person
        from all others.
    options : mapping of str to plain value
        Arguments of the outermost function, such as knots.
    label : bool
        Whether its values are only compared with each other, as labels of groups.
    """

    text: str
    columns: tuple[str, ...]
    functions: tuple[str, ...] = ()
    written: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    label: bool = False


@dataclass(frozen=True, slots=True)
class FactorsRequested:
    """Factors that a request computes from a site's columns, and their `products`, by their text.

    It is reported before any row is read. `counted` states that the request names columns as numbers of
    entities, which no rule of a policy counts.
    """

    factors: Sequence[FormulaFactor]
    products: Mapping[str, Sequence[FormulaFactor]] = field(default_factory=dict)
    counted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ModelEvaluation:
    """A model is compared with the rows in cells of its predictions, by these sums for each cell.

    `residuals` states that the sums count residuals of predictions from outside; averages of predictions do
    not hide the largest residual of a few entities.
    """

    sums: Floats
    residuals: bool = False


@dataclass(frozen=True, slots=True)
class ProductDealer:
    """The dealer of the random numbers of a product ("" for the coordinator), and the two column owners."""

    dealer: str
    sites: tuple[str, str]


@dataclass(frozen=True, slots=True)
class CountedProduct:
    """Products of the site's columns with those of the site `peer` are released, after a secure count.

    Every count of rows was compared with `least`; None if rows were not counted. Counts of `names`, own
    columns, are below it without being zero.
    """

    peer: str
    least: int | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledSites:
    """Of the sites that mask a sum, these add their parts to it, and the others add zeros."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DescentPoint:
    """Rows are summed at coefficients on a path of descent.

    Parameters
    ----------
    model : str
        Digest of the rows, columns and distribution, without the units and the order of the columns.
    number : int
        Round, from 0.
    point : str
        Digest of the coefficients, and of the units of the columns.
    settings : str
        Digest of what else decides how the path goes on; empty where it ends.
    least_squares : bool
        Whether means are linear in the coefficients: sums at any of them are combinations of the same sums.
    answered : bool
        Whether sums at the point are sent, so that the path has begun; otherwise it is only compared.
    """

    model: str
    number: int
    point: str
    settings: str
    least_squares: bool
    answered: bool = True


@dataclass(frozen=True, slots=True)
class EntityCount:
    """Number of entities behind the reply; those of stored items count without a report."""

    n: int


@dataclass(frozen=True, slots=True)
class RowCount:
    """Number of complete rows behind the reply, and of coefficients."""

    n: int
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class UnequalWeights:
    """Number of rows that have different weights in several sums of products.

    Between two of the sums all other rows cancel. There are `times` sums of products of `columns` columns.
    """

    n: int
    columns: int
    times: int


@dataclass(frozen=True, slots=True, eq=False)
class RowsUsed:
    """Rows of the table, (n_rows,), behind the reply, and those where a comparison of the formula is true.

    `whole` are the rows of which a subset is used.
    """

    used: Bools
    events: Bools | None = None
    whole: Bools | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LevelsRequested:
    """Rows of the table, (n_rows,), are counted and summed by these levels of columns."""

    used: Bools
    levels: Mapping[str, Sequence[LevelValue]]


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """The rows are summed by group: (rows,), -1 for none.

    Parameters
    ----------
    place : str
        Name under which the divisions of a session are remembered, and compared with the next one; empty to
        skip this, if methods of a family are compared.
    least : int, optional
        Fewest rows by which groups may differ from earlier ones; by default the minimum count.
    of_models : bool
        Whether they are compared as the rows of models are, unless the policy remembers nothing.
    remedy : Remedy, optional
        What to do where they are refused; by default the groups of an earlier fit.
    """

    place: str
    code: Ints
    rows: Ints
    least: int | None = None
    of_models: bool = False
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SummedColumns:
    """Columns whose moments are released, (n, p); if their products are, the group of each row, or -1."""

    values: Floats
    code: Ints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupSums:
    """Sums are taken by group.

    Parameters
    ----------
    code : int array
        Group of each entity; negative for none.
    columns : int or None
        Covariates that are multiplied with one another, as far as the site knows; None: only sums.
    times : int
        Matrices of products with different weights that are released over the same entities.
    weights : (n,) array, optional
        Weights of the entities, which must spread in every group.
    detail : ColumnCardinality
        Those of the site's own columns that have few values.
    other_columns : mapping of int to int
        Number of columns of other sites that were multiplied with them, by group.
    summed : SummedColumns, optional
        The site's own columns, in groups over which they were not summed before.
    equations : int
        Equations about the values of one column that other sums than products make.
    """

    code: Ints
    columns: int | None = None
    times: int = 1
    weights: Floats | None = None
    detail: ColumnCardinality = PLAIN
    other_columns: Mapping[int, int] = field(default_factory=dict)
    summed: SummedColumns | None = None
    equations: int = 0


@dataclass(frozen=True, slots=True)
class ExcludedEntities:
    """Number of entities that count in the overall means but are in no sum."""

    n: int


@dataclass(frozen=True, slots=True)
class ClusterRowCounts:
    """Numbers of rows behind sums of scores: of clusters and strata that several sites have.

    `equations` about the values of one column follow from sums of products over the rows of a cluster.
    """

    rows: Sequence[int]
    equations: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ClusterProducts:
    """Products of the scores of different rows of a cluster are summed.

    Parameters
    ----------
    counts : (p, p) array of int
        Clusters of two rows or more in which both of two columns of the design are nonzero.
    columns : tuple of str
        Columns that name the clusters, and the strata where there are any.
    order : str
        Column by which rows of a cluster are neighbors, whose products are summed; empty for none.
    """

    counts: Ints
    columns: tuple[str, ...]
    order: str = ""


@dataclass(frozen=True, slots=True)
class ClusterCounts:
    """Sums are over clusters of rows, such as the visits of a person: the clusters are the entities.

    Parameters
    ----------
    groups : str
        Column that names the clusters.
    n, parameters : int
        Clusters, and coefficients.
    kinds : mapping of str to sequence of int
        Clusters behind sums that follow by subtraction, by what they have in common.
    whole : bool
        Whether the column names the site, which then is a cluster by itself.
    remedy : str
        What to do about few clusters, other than to leave the site out.
    remedies : mapping of str to str
        What to do about few clusters of a kind.
    """

    groups: str
    n: int
    parameters: int = 0
    kinds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    whole: bool = False
    remedy: str = "use other groups"
    remedies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Rows without and with the event of a binary response."""

    counts: tuple[int, int]
    response: str


@dataclass(frozen=True, slots=True)
class LevelRowCounts:
    """Rows of every level of a column, or of the levels that a fit does not know.

    `numbers` states that nearly all levels are text that reads as a number.
    """

    column: str
    counts: Sequence[int]
    known: bool = True
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class AbsorbedLevels:
    """Columns are summed less their means in every level of `effect`, which has these numbers of rows.

    The sums are those of n - `rank` differences of rows, for this number of `parameters`.
    """

    effect: str
    counts: Sequence[int]
    n: int
    rank: int
    parameters: int


@dataclass(frozen=True, slots=True, eq=False)
class IndicatorCounts:
    """Rows that are one in every design column of zeros and ones, of n; -1 for other columns."""

    ones: Ints
    n: int
    names: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnVariation:
    """The variation of a column.

    Parameters
    ----------
    extremes : (m,) array
        Deviations from the mean of all rows; at least the few smallest and the few largest.
    n, squares : float
        Number of rows, and their sum of squared deviations.
    what : str
        The column in words.
    """

    extremes: Floats
    n: float
    squares: float
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class DesignDirections:
    """The design, whose every combination of columns is a column.

    Parameters
    ----------
    chunks : callable
        Returns the standardized design, (m, p) arrays, the same ones each time.
    n : int
        Rows in all.
    names : sequence of str, (p,)
    """

    chunks: Callable[[], Iterable[Floats]]
    n: int
    names: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class SummedProducts:
    """Columns whose products with each other are summed, in the units of the data.

    Parameters
    ----------
    chunks : callable
        Returns blocks of rows, (m, q), the same ones each time.
    names : sequence of str, (q,)
    rows : (n,) array of int, optional
        Which rows of the table they are; without them the columns are not entered into the history.
    summed : sequence of bool, (q,)
        Whether a column is summed; the others are cells of a factor, whose rows count. By default all are.
    code : (n,) array of int, optional
        Group of each row, if products are summed by group.
    weights : (n,) array, optional
        With which the products are summed once more; the columns were told before.
    multiplied : bool
        Whether products are summed; otherwise only each column.
    read : sequence of tuple of str, (q,)
        Columns of the table from which each one is computed; by default the one of its name.
    """

    chunks: Callable[[], Iterable[Floats]]
    names: Sequence[str]
    rows: Ints | None = None
    summed: Sequence[bool] = ()
    code: Ints | None = None
    weights: Floats | None = None
    multiplied: bool = True
    read: Sequence[tuple[str, ...]] = ()

    def of(self, places: Sequence[int]) -> SummedProducts:
        """Return the fact on some of the columns."""
        chunks, chosen = self.chunks, list(places)
        return replace(
            self,
            chunks=lambda: (block[:, chosen] for block in chunks()),
            names=[self.names[k] for k in chosen],
            summed=[self.summed[k] for k in chosen] if self.summed else (),
            read=[self.read[k] for k in chosen] if self.read else (),
        )


@dataclass(frozen=True, slots=True)
class CaseWeights:
    """Sum of the weights that rows have by the data, and of their squares; what they are made of."""

    total: float
    squares: float
    columns: Sequence[str]


@dataclass(frozen=True, slots=True)
class KeyAlignmentRequest:
    """The site's keys are to be aligned with those of other sites."""

    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExternalKeyList:
    """A list of keys from elsewhere, of a length, is to be raised at a site that has its `own` number."""

    length: int
    own: int


@dataclass(frozen=True, slots=True, eq=False)
class ExternalWeights:
    """Weights, (n,) or (n, q), of any sign, that came from outside and with which rows enter sums.

    Reported automatically for every input array that is declared as weights.
    """

    values: Floats
    what: str = "weights"


@dataclass(frozen=True, slots=True, eq=False)
class WeightedEstimates:
    """Estimates leave that rest on weights, (n, q), that came from outside, of these rows of the table."""

    values: Floats
    rows: Ints


@dataclass(frozen=True, slots=True, eq=False)
class WorkingWeights:
    """Weights that rows have in score and information at coefficients from outside.

    Parameters
    ----------
    each : callable
        Returns the vectors of weights, (q, n).
    totals : (q, 2) array, optional
        Sum and sum of squares of every vector, which may settle it without a look at the rows.
    instead : mapping of str to ndarray, optional
        What leaves where few rows have nearly all weight: it tells the coordinator to choose others. Without
        it that is a refusal.
    flat : callable, optional
        Tells whether means are at the ends of their range at nearly all rows, so that scores are sums of the
        rows on one side of a cut.
    """

    each: Callable[[], Floats]
    totals: Floats | None = None
    instead: Mapping[str, Array] | None = None
    flat: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowTerms:
    """A sum over rows: ``left' diag(w) right`` for each column w of the weights.

    Released sums are made of these. `left` (n, a) and `right` (n, b) are quantities of the rows, and
    `weights` (n, k) depend on the parameters. If `times` (n,) is given, the rows are multiplied with it as
    well: it has many values, on which the weights do not depend.
    """

    left: Floats
    weights: Floats
    right: Floats
    times: Floats | None = None

    def sums(self) -> Floats:
        """Add up the rows: (k, a, b)."""
        weights = self.weights if self.times is None else self.weights * self.times[:, None]
        return np.array([self.left.T @ (column[:, None] * self.right) for column in weights.T])


def alone(columns: Floats, weights: Floats) -> RowTerms:
    """Return the terms of sums of columns (n, p) with weights (n, k)."""
    return RowTerms(columns, weights, np.ones((len(columns), 1)))


class RowBlock(Protocol):
    """Some of the rows of a design: (m, p) columns, a constant among them, and vectors at points."""

    @property
    def columns(self) -> Floats:
        """Columns of the design, standardized."""

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Means and weights at points, (m, k), those of each point side by side."""

    @property
    def levels(self) -> Floats:
        """Further columns on which the vectors depend, such as the category of the response, (m, l)."""
        return np.zeros((len(self.columns), 0))

    def terms(self, point: Any) -> Iterable[RowTerms]:
        """Terms of the sums at a point: by default products of two columns with all vectors."""
        X = self.columns
        return [RowTerms(X, self.vectors((point,)), X)]

    def times(self, points: tuple[Any, ...], wide: Floats) -> Floats:
        """Columns and vectors, side by side, times a matrix (p + k, q)."""
        X = self.columns
        return np.asarray(X @ wide[: X.shape[1]] + self.vectors(points) @ wide[X.shape[1] :])

    def every(self, first: int, step: int) -> RowBlock:
        """Every so many rows from the first on."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreAndInformation:
    """Columns are multiplied with means, and with weights, of the rows at coefficients from outside.

    Parameters
    ----------
    rows : object
        The rows that a session opened, by which its answers belong together.
    n : int
    point : hashable
        Coefficients, and what makes means of them: a point that was answered tells nothing new.
    parts : callable
        Returns the rows, part by part, the same ones each time.
    known : float, optional
        What no mean and no weight exceeds.
    groups : bool
        The rows are products of sums over groups, which many analyses single out. They may be released in
        sums that are masked among the same sites each time.
    kind : str
        What the rows are, where they are not those of the table: rows of each kind are examined apart. Groups
        of rare sizes are ordinary, so groups are examined under every policy.
    own : bool
        The site releases numbers of its own, which no mask hides.
    among : (n,) array of int, optional
        Which rows of the table they are; without them the terms of the sums are not examined.
    """

    rows: object
    n: int
    point: Any
    parts: Callable[[], Iterable[RowBlock]]
    known: float | None = None
    groups: bool = False
    kind: str = ""
    own: bool = False
    among: Ints | None = None

    @property
    def largest(self) -> float:
        """Largest mean or weight at the point."""
        if self.known is not None:
            return self.known
        return max(float(np.abs(part.vectors((self.point,))).max(initial=0.0)) for part in self.parts())

    @property
    def furthest(self) -> float:
        """Length of the longest row of the design, which no column exceeds."""
        squares = (np.einsum("ij,ij->i", part.columns, part.columns) for part in self.parts())
        return float(max(one.max(initial=0.0) for one in squares) ** 0.5)


TERM_FACTS: tuple[type, ...] = (SummedProducts, ScoreAndInformation, RowGroups, LevelsRequested)
"""Facts that hand over the columns, groups or weights of sums: the release history compares their terms."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSums:
    """Functions of single columns are summed over rows.

    Parameters
    ----------
    factors : sequence of FormulaFactor
        Functions of columns that the model reads, those of the response and of offsets included.
    used : (n_rows,) array of bool
        Rows of the table behind the sums.
    products : bool
        Whether products of two functions of a column are summed, or only each function and its square.
    weights : str
        What distinguishes the weights of the rows in the products; empty where all rows count alike.
    blocks : mapping of str to sequence of str
        Names of sums of a column over blocks of rows, by column.
    table : str
        Name of the imputed table, if rows are completed by one: its sums are others.
    """

    factors: Sequence[FormulaFactor]
    used: Bools
    products: bool = False
    weights: str = ""
    blocks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    table: str = ""


InsteadOfFit: TypeAlias = Callable[[str], tuple[Mapping[str, Array], str]]
"""Makes the reply that is released instead of a site's own fit, given why there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnFit:
    """The fit of the site's rows alone is about to be released, for the comparison of sites.

    Parameters
    ----------
    numbers : int
        Distinct numbers in the release.
    sums : ColumnSums
    instead : callable
    weighted : ScoreAndInformation, optional
        The sums of which the information is made, if their weights depend on coefficients.
    rank : int
        Rank of absorbed levels: the fit rests on this number of rows less.
    """

    numbers: int
    sums: ColumnSums
    instead: InsteadOfFit
    weighted: ScoreAndInformation | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class OwnFitProblem:
    """The fit of the site's rows alone failed, for a reason that depends on the rows.

    Parameters
    ----------
    problem : str
    model : str
        Identifies the model and the rows: the same failure is not counted twice.
    instead : callable
    """

    problem: str
    model: str
    instead: InsteadOfFit
