"""The design of sites that hold different rows, agreed before anything is estimated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pandas as pd

from fedstat import records
from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.block import BlockSpec
from fedstat.federation.design.by_columns import FAMILY
from fedstat.federation.design.by_columns import STEPS as DESIGN_STEPS
from fedstat.federation.design.checks import check_references
from fedstat.federation.design.coding import plain_state
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.design.levels import LevelCounts, SiteColumns, agree_kinds, agree_levels
from fedstat.federation.design.site_rows import RowsQuestion, WholeRows, design_matrix, whole_rows
from fedstat.federation.design.spec import coded_columns
from fedstat.federation.design.states import agree_states, transform_sums
from fedstat.federation.design.tally import RowTally, most_columns, unknown_levels
from fedstat.federation.door.facts import (
    ColumnVariation,
    DesignDirections,
    Entities,
    IndicatorCounts,
    RowCount,
    RowsByLevel,
    RowsUsed,
)
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Ask, Declared, Reply, Step
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.tables.columns import Kind, LevelValue, column_kind, find_levels
from fedstat.typing import Array, Bools, Floats, Ints, Vector

CONSTANT = 1e-12
CANCELLED = 1e-13
"""Spread between sites, relative to the sum of squares that it is the rest of, that rounding explains."""

INTERCEPT = "Intercept"
MOST_LEVELS = 1000


@dataclass(frozen=True, slots=True)
class SiteRows:
    """How many rows one site has, and how many lack nothing that the model reads."""

    site: str
    n_rows: int
    n: int


@dataclass(frozen=True, slots=True)
class RowsAgreement:
    """What was agreed before the rows are coded.

    Parameters
    ----------
    question : RowsQuestion
    spec : BlockSpec
        Levels and states; without names.
    sites : tuple of SiteRows
        In partition order.
    """

    question: RowsQuestion
    spec: BlockSpec
    sites: Annotated[tuple[SiteRows, ...], "K"]


@dataclass(frozen=True, slots=True, eq=False)
class RowsDesign:
    """The coded design.

    Parameters
    ----------
    names, term_names : tuple of str, (p,)
        Design columns, the intercept first where there is one, and the term of each.
    intercept : bool
    n : (K,) array of int
        Rows by site.
    mean, spread : (p,) arrays
        Mean and standard deviation of every column over all sites.
    """

    names: Annotated[tuple[str, ...], "p"]
    term_names: Annotated[tuple[str, ...], "p"]
    intercept: bool
    n: Annotated[Ints, "K"]
    mean: Vector
    spread: Vector


@dataclass(slots=True, eq=False)
class OpenRows:
    """The rows that a site opened for one model: coded once in memory, or in every pass where streamed.

    Columns are standardised by the site's own `shift` and `scale`; `own` are its means and deviations,
    (2, p).
    """

    data: SiteData
    question: RowsQuestion
    spec: BlockSpec
    terms: tuple[Term, ...]
    shift: Floats = field(default_factory=lambda: np.zeros(1))
    scale: Floats = field(default_factory=lambda: np.ones(1))
    varies: Bools = field(default_factory=lambda: np.ones(1, dtype=bool))
    own: Floats = field(default_factory=lambda: np.zeros((2, 1)))
    held: tuple[WholeRows, Floats] | None = None

    def chunks(self) -> Iterator[tuple[WholeRows, Floats]]:
        """Whole rows and their standardised design, (m, p), chunk by chunk."""
        if self.held is not None:
            yield self.held
            return
        for rows in whole_rows(self.data, self.question):
            if len(rows.frame):
                X, _, _ = design_matrix(rows, self.question, self.terms, self.spec, self.data.name)
                yield rows, self.standardise(X)

    def standardise(self, X: Floats) -> Floats:
        """Shift and scale in place."""
        X -= self.shift
        X /= self.scale
        return X


def survey_rows(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Count whole rows, and tell the kind of every column and the levels of categories."""
    question = RowsQuestion.from_json(text)
    terms = question.read_terms()
    n, n_rows, kinds = 0, data.table.n_rows, dict[str, Kind]()
    counts: dict[str, dict[LevelValue, int]] = {}
    declared: dict[str, tuple[LevelValue, ...] | None] = {}
    used: list[Bools] = []
    for rows in whole_rows(data, question):
        n, n_rows = n + len(rows.frame), n_rows - rows.weightless
        used.append(rows.used)
        if not len(rows.frame):
            continue
        found = {name: column_kind(rows.frame[name], data.name, name) for name in question.columns}
        kinds = {name: kinds.get(name, kind) for name, kind in found.items()}
        for name in coded_columns(terms, kinds):
            _add_levels(counts.setdefault(name, {}), rows.frame[name], data.name)
            order = _declared(rows.frame[name])
            declared[name] = order if declared.get(name, order) == order else None
    state.rest_on(n)
    if n:
        state.tell(RowCount(n))
    state.tell(*(RowsByLevel(name, list(total.values())) for name, total in counts.items()))
    if n:
        state.tell(RowsUsed(np.concatenate(used)))
    levels = {
        name: LevelCounts(declared[name], tuple(total), tuple(total.values()))
        for name, total in counts.items()
    }
    return {}, records.to_json(SiteColumns(n_rows, n, kinds, levels))


def _add_levels(total: dict[LevelValue, int], series: pd.Series, site: str) -> None:
    """Add the rows of every level of a chunk."""
    counts = series.value_counts()
    for level in find_levels(series):
        total[level] = total.get(level, 0) + int(counts[level])
    if len(total) > MOST_LEVELS:
        raise DesignError(
            f"column {series.name!r} at site {site!r} has more than {MOST_LEVELS:,} levels: it looks like an "
            "identifier or a measurement. Leave it out, or group it first."
        )


def _declared(series: pd.Series) -> tuple[LevelValue, ...] | None:
    """Order that a categorical column declares; None for others, which are sorted."""
    if not isinstance(series.dtype, pd.CategoricalDtype):
        return None
    return find_levels(pd.Series(series.cat.categories).astype(series.dtype))


def varying(mean: Floats, spread: Floats, intercept: bool) -> Bools:
    """Columns that a site can say something about: those that vary, and the intercept."""
    if not intercept:
        return np.asarray((mean != 0.0) | (spread > 0.0))
    varies: Bools = spread > CONSTANT * np.abs(mean)
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


def open_rows(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Code the rows, tell the door what was counted, and name the columns."""
    content = json.loads(text)
    question, spec = RowsQuestion.from_json(content["question"]), BlockSpec.from_json(content["spec"])
    opened = OpenRows(data, question, spec, question.read_terms())
    # Before it is coded: with far more columns than rows it may be very large.
    state.tell(RowCount(data.table.n_rows, most_columns(question, opened.terms, spec)))
    tally = RowTally(data, question)
    for chunk, rows in enumerate(whole_rows(data, question)):
        tally.look(rows)
        if len(rows.frame):
            state.tell(*unknown_levels(rows, spec))
            X, tally.names, tally.term_names = design_matrix(rows, question, opened.terms, spec, data.name)
            tally.add(rows, X)
            opened.held = (rows, X) if chunk == 0 else None
    n, mean, spread = tally.tell_counts(state)
    opened.own = np.array([mean, spread])
    opened.shift, opened.scale = standardisation(mean, spread, question.intercept)
    opened.varies = varying(mean, spread, question.intercept)
    if opened.held is not None:
        opened.standardise(opened.held[1])
    head = (INTERCEPT,) if question.intercept else ()
    design = DesignDirections(lambda: (X for _, X in opened.chunks()), tally.n, (*head, *tally.names))
    state.tell(design, tally.rows_used)
    state.play(question.needed)
    state.keep("rows", opened, int(n[0]), columns=len(tally.names))
    return {}, json.dumps({"names": tally.names, "term_names": tally.term_names})


def sum_columns(data: SiteData, state: State) -> dict[str, Array]:
    """Sum the moments of every column over the rows.

    Returns
    -------
    dict
        ``moments`` (4, p): rows, sum, squared deviations from the site's mean, and rows times that mean's
        square. Only their sums over sites are needed.
    """
    opened, n = rows_of(data, state), float(state.entities)
    mean, spread = opened.own
    return {"moments": np.array([np.full_like(mean, n), n * mean, n * spread**2, n * mean**2])}


def rows_of(data: SiteData, state: State) -> OpenRows:
    """Return the rows that this session opened.

    Raises
    ------
    MessageError
        The session did not open any, or the site has forgotten them.
    """
    if "rows" not in state:
        raise MessageError(
            f"{data.name}: no rows are open in this session (a site keeps the latest ones only); make the "
            "model again"
        )
    rows: OpenRows = state.use("rows")
    return rows


OPEN_ROWS = (Entities, RowCount, IndicatorCounts, DesignDirections, RowsUsed)
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
                behind=(Entities, RowCount, ColumnVariation, RowsUsed),
            )
        },
        text_in=Declared("aggregate", "transforms, with their state so far"),
    ),
    "open_rows": Step(
        open_rows,
        text_in=Declared("aggregate", "coding of the columns, with the state of transforms"),
        text_out=Declared("schema", "names of the design columns", behind=OPEN_ROWS),
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
FAMILIES[FAMILY] = {**DESIGN_STEPS, **STEPS}


def rows_ask(session: str) -> Callable[[str, str, Any], Ask]:
    """Address the steps of this design in one session."""

    def ask(site: str, step: str, content: Any) -> Ask:
        text = content if isinstance(content, str) else json.dumps(content)
        return Ask(site, FAMILY, step, {}, session, text)

    return ask


def agree_rows(
    question: RowsQuestion, sites: Sequence[str], session: str, *, site_column: str = "", min_count: int = 5
) -> Rounds[RowsAgreement]:
    """Agree on levels and on the state of transforms.

    Parameters
    ----------
    question : RowsQuestion
    sites : sequence of str
    session : str
    site_column : str
        The column that holds the sites' names: its levels are the sites, in their order.
    min_count : int
        Rows that every level must have in all.

    Raises
    ------
    DesignError
        A column holds numbers at one site and categories at another, a level is rare, a site has no
        whole row, or a reference is no level.
    PolicyError
        A site refuses.
    """
    ask = rows_ask(session)
    replies = yield [ask(site, "survey_rows", question.to_json()) for site in sites]
    columns = {
        site: records.from_json(SiteColumns, reply.text, f"{site}: what it tells of its rows")
        for site, reply in zip(sites, replies, strict=True)
    }
    counted = tuple(SiteRows(site, told.n_rows, told.n) for site, told in columns.items())
    for row in counted:
        if not row.n:
            raise DesignError(
                f"site {row.site!r} has no row with all of {', '.join(map(repr, question.needed))} (of "
                f"{row.n_rows:,} rows). Use fewer of these columns, or leave the site out."
            )
    kinds: dict[str, Kind] = agree_kinds(columns)
    levels = agree_levels(columns, site_column=site_column, min_count=min_count)
    terms = question.read_terms()
    check_references(terms, levels, "")
    state = yield from agree_states(question, sites, ask)
    spec = BlockSpec(
        "", question.terms, question.columns, (), (), question.intercept, kinds, levels, plain_state(state)
    )
    return RowsAgreement(question, spec, counted)


def open_asks(agreement: RowsAgreement, session: str) -> list[Ask]:
    """Ask every site to code its rows."""
    content = {"question": agreement.question.to_json(), "spec": agreement.spec.to_json()}
    return [rows_ask(session)(row.site, "open_rows", content) for row in agreement.sites]


def moment_asks(agreement: RowsAgreement, session: str) -> list[Ask]:
    """Ask every site for the moments of the columns that it opened."""
    return [Ask(row.site, FAMILY, "sum_columns", {}, session) for row in agreement.sites]


def opened_design(agreement: RowsAgreement, replies: Sequence[Reply], summed: Sequence[Reply]) -> RowsDesign:
    """Put the answers to :func:`open_asks` and :func:`moment_asks` together.

    Raises
    ------
    DesignError
        Sites code the columns differently, or a column is constant over all sites.
    """
    schemas = [json.loads(reply.text) for reply in replies]
    for row, schema in zip(agreement.sites, schemas, strict=True):
        if schema != schemas[0]:
            raise DesignError(
                f"sites {agreement.sites[0].site!r} and {row.site!r} code the formula to different columns"
            )
    mean, spread = pool_moments(np.sum([reply.arrays["moments"] for reply in summed], axis=0))
    intercept = agreement.question.intercept
    head = (INTERCEPT,) if intercept else ()
    names = (*head, *schemas[0]["names"])
    varies = varying(mean, spread, intercept)
    if not varies.all():
        raise DesignError(
            f"design column {names[int(np.argmin(varies))]!r} is constant over the whole rows of all sites. "
            "Leave the term out, or merge the levels that it separates."
        )
    n = np.array([row.n for row in agreement.sites], dtype=np.int64)
    return RowsDesign(names, (*head, *schemas[0]["term_names"]), intercept, n, mean, spread)


def pool_moments(sums: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of every column over all sites, from the sums of ``open_rows``: (4, p).

    What varies within sites keeps its digits. What varies between them only is taken as constant below 3e-7
    of its mean. The deviation is no more than a choice of units for the iteration.
    """
    n, total, within, squares = sums
    mean = total / n
    between = squares - n * mean**2
    between = np.where(between > CANCELLED * squares, between, 0.0)
    return mean, np.sqrt((within + between) / n)
