"""Steps of a site that holds rows of its own: survey them, code them, sum their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

import numpy as np
import pandas as pd

from fedstat import records
from fedstat.errors import DesignError
from fedstat.federation.design.by_columns import FAMILY
from fedstat.federation.design.by_columns import STEPS as DESIGN_STEPS
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.design.levels import LevelCounts, SiteColumns, check_declared, declared_levels
from fedstat.federation.design.site_rows import RowsQuestion, WholeRows, design_matrix, whole_rows
from fedstat.federation.design.spec import BlockSpec, coded_columns
from fedstat.federation.design.states import transform_sums
from fedstat.federation.design.tally import RowTally, most_columns, unknown_levels
from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.facts import (
    ColumnVariation,
    DesignDirections,
    Entities,
    IndicatorCounts,
    LevelsAsked,
    RowCount,
    RowsByLevel,
    RowsUsed,
)
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step
from fedstat.federation.tables.columns import Kind, LevelValue, column_kind, find_levels
from fedstat.typing import Array, Bools, Floats

CONSTANT = 1e-12
INTERCEPT = "Intercept"
MOST_LEVELS = 1000


@dataclass(slots=True, eq=False)
class OpenRows:
    """The rows that a site opened for one model: coded once in memory, or in every pass where streamed.

    Columns are standardised by the site's own `shift` and `scale`; `own` are its means and deviations,
    (2, p), `term_names` the term of each but the intercept, and `used` (n_rows,) the rows that are whole.
    """

    MADE_AGAIN: ClassVar = ("held",)
    """What is coded from the table again where a session is taken up."""

    data: SiteData
    question: RowsQuestion
    spec: BlockSpec
    terms: tuple[Term, ...]
    shift: Floats = field(default_factory=lambda: np.zeros(1))
    scale: Floats = field(default_factory=lambda: np.ones(1))
    varies: Bools = field(default_factory=lambda: np.ones(1, dtype=bool))
    own: Floats = field(default_factory=lambda: np.zeros((2, 1)))
    held: tuple[WholeRows, Floats] | None = None
    term_names: tuple[str, ...] = ()
    used: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))

    def chunks(self) -> Iterator[tuple[WholeRows, Floats]]:
        """Whole rows and their standardised design, (m, p), chunk by chunk."""
        if self.held is not None:
            yield self.held
            return
        for rows in whole_rows(self.data, self.question):
            if len(rows.frame):
                coded = design_matrix(rows, self.question, self.terms, self.spec, self.data.name)
                yield rows, self.standardise(coded.X)

    def make_again(self) -> None:
        """Code the rows of a table of one chunk again, to the same numbers."""
        self.held = None
        first = list(islice(self.chunks(), 2))
        self.held = first[0] if len(first) == 1 else None

    def settle(self, mean: Floats, spread: Floats) -> None:
        """Take the site's own means and deviations, (p,), and standardise what is held."""
        self.own = np.array([mean, spread])
        self.shift, self.scale = standardisation(mean, spread, self.question.intercept)
        self.varies = varying(mean, spread, self.question.intercept)
        if self.held is not None:
            self.standardise(self.held[1])

    def standardise(self, X: Floats) -> Floats:
        """Shift and scale in place."""
        X -= self.shift
        X /= self.scale
        return X


@dataclass(slots=True, eq=False)
class ColumnSurvey:
    """Kinds of a site's columns, rows of every level of those to be coded, and declared orders; by chunks.

    Of the columns in `listed` the formula, or the site's public description, says which levels they have.
    """

    site: str
    kinds: dict[str, Kind] = field(default_factory=dict)
    counts: dict[str, dict[LevelValue, int]] = field(default_factory=dict)
    declared: dict[str, tuple[LevelValue, ...] | None] = field(default_factory=dict)
    listed: Mapping[str, tuple[LevelValue, ...]] = field(default_factory=dict)

    def add(self, frame: pd.DataFrame, columns: Sequence[str], terms: Sequence[Term]) -> None:
        """Add a chunk of whole rows."""
        found = {name: column_kind(frame[name], self.site, name) for name in columns}
        self.kinds = {name: self.kinds.get(name, kind) for name, kind in found.items()}
        for name in coded_columns(terms, self.kinds):
            self._add_levels(frame[name], self.counts.setdefault(name, {}))
            order = _declared(frame[name])
            # Chunks that declare different orders declare none.
            self.declared[name] = order if self.declared.get(name, order) == order else None

    def _add_levels(self, series: pd.Series, total: dict[LevelValue, int]) -> None:
        counts = series.value_counts()
        for level in find_levels(series):
            total[level] = total.get(level, 0) + int(counts[level])
        if len(total) > MOST_LEVELS:
            raise DesignError(
                f"column {series.name!r} at site {self.site!r} has more than {MOST_LEVELS:,} levels: it "
                "looks like an identifier or a measurement. Leave it out, or group it first."
            )

    def levels(self) -> dict[str, LevelCounts]:
        """Levels of every column to be coded; a DesignError where one is not declared."""
        for name in self.counts.keys() & self.listed.keys():
            self.declared[name] = check_declared(self.site, name, self.counts[name], self.listed[name])
        return {
            name: LevelCounts(self.declared[name], tuple(total), tuple(total.values()))
            for name, total in self.counts.items()
        }


def _declared(series: pd.Series) -> tuple[LevelValue, ...] | None:
    """Order that a categorical column declares; None for others, which are sorted."""
    if not isinstance(series.dtype, pd.CategoricalDtype):
        return None
    return find_levels(pd.Series(series.cat.categories).astype(series.dtype))


def survey_rows(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Count whole rows, and tell the kind of every column and the levels of categories."""
    question = RowsQuestion.from_json(text)
    state.tell(*question.asked())
    terms = question.read_terms()
    survey = ColumnSurvey(data.name, listed=declared_levels(terms, data.published))
    n, n_rows = 0, data.table.n_rows
    used: list[Bools] = []
    for rows in whole_rows(data, question):
        n, n_rows = n + len(rows.frame), n_rows - rows.weightless
        used.append(rows.whole)
        if len(rows.frame):
            survey.add(rows.frame, question.columns, terms)
    state.rest_on(n)
    behind = RowsUsed(np.concatenate(used) if used else np.zeros(0, dtype=bool))
    if n:  # too few rows are called so, and no difference
        state.tell(RowCount(n))
    state.tell(*(RowsByLevel(name, list(total.values())) for name, total in survey.counts.items()))
    levels = survey.levels()
    if n:
        state.tell(behind, LevelsAsked(behind.used, {name: told.levels for name, told in levels.items()}))
    return {}, records.to_json(SiteColumns(n_rows, n, survey.kinds, levels))


def varying(mean: Floats, spread: Floats, intercept: bool) -> Bools:
    """Columns that a site can say something about: those that vary, and the intercept."""
    if not intercept:
        return np.asarray((mean != 0.0) | (spread > 0.0))
    varies: Bools = spread > CONSTANT * np.abs(mean)
    # The intercept: it does not vary, and every site can say something about it.
    varies[..., 0] = True
    return varies


def standardisation(mean: Floats, spread: Floats, intercept: bool) -> tuple[Floats, Floats]:
    """Shift and scale of every column from its mean and standard deviation, (..., p).

    A column that is constant at a site keeps its scale. Without an intercept nothing is shifted.
    """
    if not intercept:
        size = np.sqrt(mean**2 + spread**2)
        return np.zeros_like(mean), np.where(size > 0.0, size, 1.0)
    shift, scale = mean.copy(), np.where(varying(mean, spread, intercept), spread, 1.0)
    shift[..., 0], scale[..., 0] = 0.0, 1.0
    return shift, scale


def translation(own_shift: Floats, own_scale: Floats, shift: Floats, scale: Floats) -> Floats:
    """Matrix from coefficients of columns standardised by (shift, scale) to those of a site's own, (p, p).

    With an intercept, the first column, sum_j g_j (x_j - m_j) / s_j equals the sum over the own columns with
    d_j = g_j s_kj / s_j and the rest of it in the intercept.
    """
    T = np.diag(own_scale / scale)
    T[0, 1:] = (own_shift - shift)[1:] / scale[1:]
    T[0, 0] = own_scale[0] / scale[0]
    return T


@dataclass(frozen=True, slots=True)
class RowsCoding:
    """A :class:`RowsQuestion` and the :class:`BlockSpec` by which its rows are to be coded, each in JSON."""

    question: str
    spec: str


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """Design columns without the intercept, and the term of each."""

    names: tuple[str, ...]
    term_names: tuple[str, ...]


def open_rows(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Code the rows, tell the door what was counted, and name the columns."""
    asked = records.from_json(RowsCoding, text, f"{data.name}: the question about its rows")
    question, spec = RowsQuestion.from_json(asked.question), BlockSpec.from_json(asked.spec)
    state.tell(*question.asked())
    opened = OpenRows(data, question, spec, question.read_terms())
    # Before it is coded: with far more columns than rows it may be very large.
    state.tell(RowCount(data.table.n_rows, most_columns(question, opened.terms, spec)))
    tally = RowTally(data, question)
    for chunk, rows in enumerate(whole_rows(data, question)):
        tally.look(rows)
        if len(rows.frame):
            state.tell(*unknown_levels(rows, spec))
            coded = design_matrix(rows, question, opened.terms, spec, data.name)
            tally.add(rows, coded)
            # A table of one chunk is kept as coded; with a second one, every pass reads and codes again.
            opened.held = (rows, coded.X) if chunk == 0 else None
    n, mean, spread = tally.tell_counts(state)
    opened.settle(mean, spread)
    opened.term_names, opened.used = tally.term_names, tally.used
    head = (INTERCEPT,) if question.intercept else ()
    # Judged on standardised columns, where a direction that few rows have does not hide behind units.
    design = DesignDirections(lambda: (X for _, X in opened.chunks()), tally.n, (*head, *tally.names))
    state.tell(design, tally.rows_used, LevelsAsked(tally.used, spec.levels))
    state.play(question.needed)
    state.keep("rows", opened, int(n[0]), columns=len(tally.names))
    return {}, records.to_json(NamedColumns(tally.names, tally.term_names))


def sum_columns(data: SiteData, state: State) -> dict[str, Array]:
    """Sum the moments of every column over the rows.

    Released are `moments` (4, p): rows, sum, squared deviations from the site's mean, and rows times that
    mean's square. Only their sums over sites are needed.
    """
    opened, n = rows_of(state), float(state.entities)
    mean, spread = opened.own
    # Squares about the site's own mean: sums of plain squares would cancel where the mean is large.
    return {"moments": np.array([np.full_like(mean, n), n * mean, n * spread**2, n * mean**2])}


def rows_of(state: State) -> OpenRows:
    """Return the rows that this session opened, unless the site has forgotten them."""
    absent = "no rows are open in this session (a site keeps the latest ones only); make the model again"
    return state.use("rows", OpenRows, absent)


OPEN_ROWS = (Entities, RowCount, IndicatorCounts, DesignDirections, RowsUsed, LevelsAsked)
"""Facts behind whatever rests on the rows that a session opened."""

COUNTS = Declared("schema", "column kinds, levels and counts of rows")
READ = Declared("schema", "columns, terms and weights of the model")
STEPS: Mapping[str, Step] = {
    "survey_rows": Step(survey_rows, text_in=READ, text_out=COUNTS),
    "transform_sums": Step(
        transform_sums,
        gives={
            "sums": Declared(
                "aggregate",
                "sums for the transforms of the formula",
                2,
                maskable=True,
                wide=True,
                behind=(Entities, RowCount, ColumnVariation, RowsUsed),
            )
        },
        text_in=Declared("aggregate", "transforms, with their state so far", common=True),
    ),
    "open_rows": Step(
        open_rows,
        text_in=Declared("aggregate", "coding of the columns, with the state of transforms", common=True),
        text_out=Declared("schema", "names of the design columns", behind=OPEN_ROWS),
        begins=True,
    ),
    "sum_columns": Step(
        sum_columns,
        gives={
            "moments": Declared(
                "aggregate",
                "moments of every design column: rows, sum, squares",
                2,
                maskable=True,
                wide=True,
                behind=OPEN_ROWS,
            )
        },
    ),
}
ORDER: Mapping[str, str] = {
    "sum_columns": "open_rows",
    "transform_sums": "survey_rows transform_sums",
    "release_spec": "open_block",
    "open_weights": "open_response",
}
FAMILIES[FAMILY] = in_order({**DESIGN_STEPS, **STEPS}, ORDER)
