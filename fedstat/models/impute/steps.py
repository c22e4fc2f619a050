"""Steps of a site that imputes its own missing cells, from parameters that all sites have estimated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from fedstat import codec
from fedstat.errors import DescriptionError, DesignError, MessageError
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.facts import column_facts
from fedstat.federation.design.formula.syntax_tree import Column
from fedstat.federation.design.imputed_cells import (
    MOST_IMPUTATIONS,
    ImputedCells,
    ImputedTable,
    imputed_cells,
)
from fedstat.federation.design.site_rows import RowsRequest, design_matrix
from fedstat.federation.disclosure.facts import LevelRowCounts, RowGroups
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, control, schema
from fedstat.federation.tables.columns import column_kind, missing_cells, pick_columns
from fedstat.federation.tables.table import in_memory
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "impute_rows"
MOST_CHAINS = 200
DONORS = 5
"""Rows with observed values and the nearest predictions; predictive mean matching takes one of them."""


@dataclass(frozen=True, slots=True)
class ImputationRequest:
    """A new imputation: its token, the columns, the number of chains, and the seed of the draws."""

    token: str
    columns: tuple[str, ...]
    chains: int
    seed: int


@dataclass(frozen=True, slots=True)
class SiteCells:
    """Rows of a site, its missing cells by column, those of them that it draws, and the kind of columns."""

    n_rows: int
    missing: dict[str, int]
    drawn: dict[str, int]
    kinds: dict[str, str]


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """Draw the cells of a column of all chains, by the model of the other columns.

    `question` and `spec` are the :class:`RowsRequest` and :class:`BlockSpec` of the model, in JSON; `kind` is
    that of the column, and `matched` asks for predictive mean matching.
    """

    token: str
    column: str
    draws: int
    seed: int
    question: str
    spec: str
    kind: str
    matched: bool = False


@step(
    FAMILY,
    request=ImputationRequest,
    requests=schema("columns, number of chains and seed of an imputation"),
    replies=schema("rows, and missing cells and kinds of columns"),
    begins=True,
)
def begin_imputation(
    data: SiteData, state: State, request: ImputationRequest
) -> tuple[dict[str, Array], str]:
    """Count the missing cells, and fill them by values that this site has observed, if there are any.

    A column with few missing cells, or few observed ones, is not imputed: tables of two chains differ in
    these cells alone, and so do sums over them. The coordinator chooses what is drawn, so that sums over the
    drawn rows of a column are released: these rows are compared with those of models.
    """
    state.report(column_facts(request.columns))
    if not 2 <= request.chains <= MOST_CHAINS or len(request.token) < 32:
        raise MessageError(f"{data.name}: expected 2 to {MOST_CHAINS} chains, and a random token")
    if not in_memory(data.table):
        raise DesignError(f"site {data.name!r} streams its table; only a table in memory is imputed")
    frame = _whole(data, request.columns)
    series = pick_columns(frame, request.columns, data.name)
    lacking = pd.DataFrame({name: missing_cells([one], len(frame))[:, 0] for name, one in series.items()})
    rows, few = _drawn_rows(lacking, data.min_count)
    for name in request.columns:
        count = int(lacking[name].sum())
        state.report(LevelRowCounts(f"missing cells of '{name}'", [0 if name in few else count]))
    kinds = {name: _kind(series[name], lacking[name].to_numpy(), name, data.name) for name in request.columns}
    cells = ImputedCells(len(frame), request.chains, kinds, rows)
    for name, places in rows.items():
        state.report(RowGroups("", np.zeros(len(places), dtype=np.int64), places, of_models=True))
        rng = _generator(data, request.seed, name, 0)
        seen = series[name].to_numpy(dtype=object)[~lacking[name].to_numpy()]
        # Without any value here, cells are missing until they are drawn by the model of the other sites.
        first = seen if len(seen) else np.array([None], dtype=object)
        cells.values[name] = [rng.choice(first, len(places)) for _ in range(request.chains)]
    data.imputations[request.token] = cells
    while len(data.imputations) > MOST_IMPUTATIONS:
        data.imputations.pop(next(iter(data.imputations)))
    state.use_columns(request.columns)
    state.count_entities(len(frame))
    found = SiteCells(
        len(frame),
        {name: int(lacking[name].sum()) for name in request.columns if name not in few},
        {name: len(places) for name, places in rows.items()},
        kinds,
    )
    return {}, codec.to_json(found)


def _whole(data: SiteData, columns: tuple[str, ...]) -> pd.DataFrame:
    (frame,) = data.table.chunks(columns)
    return frame.reset_index(drop=True)


def _drawn_rows(lacking: pd.DataFrame, least: int) -> tuple[dict[str, Ints], set[str]]:
    """Return the rows whose cells are drawn, by column, and the columns of which too few are missing."""
    few: set[str] = set()
    while True:
        never: Bools = lacking[sorted(few)].any(axis=1).to_numpy()
        open_rows = lacking[~never]
        counts = {str(name): int(open_rows[name].sum()) for name in lacking}
        new = {
            name
            for name, count in counts.items()
            if 0 < count < least or (count and 0 < len(open_rows) - count < least)
        }
        if new <= few:
            kept = [name for name, count in counts.items() if name not in few and count > 0]
            return {name: np.flatnonzero(lacking[name].to_numpy() & ~never) for name in kept}, few
        few |= new


def _kind(series: pd.Series, lacking: Bools, name: str, site: str) -> str:
    """Return what is drawn: "number", "binary" (zeros and ones) or "category"; empty without any value."""
    seen = series[~lacking]
    if seen.empty:
        return ""
    if column_kind(seen, site, name) == "category":
        return "category"
    return "binary" if seen.isin([0, 1]).all() else "number"


def _generator(data: SiteData, seed: int, column: str, draws: int) -> np.random.Generator:
    """Make random numbers that the coordinator cannot repeat: known noise would reveal predictions."""
    secret = data.trust.identity.secret("imputed values")
    digest = hashlib.blake2b(f"{seed} {draws} {column}".encode(), key=secret).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


@step(
    FAMILY,
    "begin_imputation draw_cells",
    request=DrawRequest,
    requests=aggregate("coding of the model of a column", common=True),
    takes={
        "beta": aggregate("drawn coefficients by chain", 2, common=True),
        "estimate": aggregate("estimated coefficients by chain", 2, common=True),
        "sigma": aggregate("drawn residual deviation by chain", common=True),
    },
    releases={"drawn": control("number of draws", 0)},
)
def draw_cells(
    data: SiteData, state: State, request: DrawRequest, beta: Floats, estimate: Floats, sigma: Floats
) -> dict[str, Array]:
    """Draw the missing cells of a column in all chains; nothing but the number of draws is returned."""
    table = ImputedTable(request.token, 0, request.draws)
    cells = imputed_cells(data.imputations, data.name, table, data.table.n_rows)
    question, spec = RowsRequest.from_json(request.question), BlockSpec.from_json(request.spec)
    state.report(*question.requested())
    _check_model(data, question, cells, request)
    if not len(beta) == len(estimate) == len(sigma) == cells.chains or beta.shape != estimate.shape:
        raise MessageError(f"{data.name}: expected coefficients and deviations of {cells.chains} chains")
    places = cells.rows.get(request.column, np.zeros(0, dtype=np.int64))
    if request.matched and data.policy.remember == "all":
        raise DescriptionError.of_rule(
            "differencing",
            data.name,
            "refuses predictive mean matching, which copies values of single rows; numbers='normal' copies "
            "none",
        )
    if len(places):
        predictors = Predictors(data, question, spec)
        drawn = [
            _draw_chain(predictors, cells, request, chain, beta[chain], estimate[chain], float(sigma[chain]))
            for chain in range(cells.chains)
        ]
        cells.values[request.column] = drawn
        cells.kinds[request.column] = cells.kinds[request.column] or request.kind
    cells.draws += 1
    return {"drawn": np.array(float(cells.draws))}


def _check_model(data: SiteData, question: RowsRequest, cells: ImputedCells, request: DrawRequest) -> None:
    """Require a model of the columns as they stand: functions of them could single out rows."""
    own = cells.kinds.get(request.column)
    # A site without values has no kind, and zeros and ones may be numbers at another site.
    if own and request.kind != own and (own, request.kind) != ("binary", "number"):
        raise MessageError(f"{data.name}: a column is drawn as what it is, a number or a category")
    plain = all(isinstance(f.tree, Column) for term in question.read_every_term() for f in term)
    read = {*question.columns, *question.response_columns, request.column}
    if not plain or not read <= set(cells.columns) or request.column in question.columns or question.imputed:
        raise MessageError(f"{data.name}: a column is imputed from the other columns as they stand")


@dataclass(frozen=True, slots=True, eq=False)
class Predictors:
    """The model of a column at a site: its data, and how the other columns are coded."""

    data: SiteData
    question: RowsRequest
    spec: BlockSpec

    def code(self, frame: pd.DataFrame) -> Floats:
        """Return the design of rows, (k, q)."""
        return design_matrix(frame, self.question, self.spec, self.data.name).X


def _draw_chain(
    model: Predictors,
    cells: ImputedCells,
    request: DrawRequest,
    chain: int,
    beta: Floats,
    estimate: Floats,
    sigma: float,
) -> Array:
    data, columns = model.data, (*model.spec.columns, request.column)
    frame = _whole(data, columns)
    filled = cells.fill(frame, ImputedTable(request.token, chain, request.draws, request.column))
    places, rng = cells.rows[request.column], _generator(data, request.seed, request.column, cells.draws + 1)
    rng = rng.spawn(chain + 1)[chain]
    X = model.code(filled.iloc[places])
    if len(beta) % X.shape[1]:
        raise MessageError(f"{data.name}: expected {X.shape[1]} coefficients for each equation")
    if request.kind == "category":
        levels: Array = np.array(model.question.categories, dtype=object)
        eta = np.column_stack([np.zeros(len(X)), X @ beta.reshape(-1, X.shape[1]).T])
        if eta.shape[1] != len(levels):
            raise MessageError(f"{data.name}: expected coefficients of {len(levels) - 1} categories")
        # The largest of independent Gumbel variables around the predictors: a draw of the category.
        taken: Array = levels[(eta + rng.gumbel(size=eta.shape)).argmax(axis=1)]
        return taken
    if request.kind == "binary":
        return (rng.random(len(X)) < special.expit(X @ beta)).astype(np.float64)
    if request.matched:
        seen = filled[list(columns)].notna().all(axis=1).to_numpy()
        if seen.sum() >= DONORS:
            own = model.code(filled[seen]) @ estimate
            observed = filled.loc[seen, request.column].to_numpy(dtype=np.float64)
            nearest = np.abs(own - (X @ beta)[:, None]).argsort(axis=1)[:, :DONORS]
            taken = observed[nearest[np.arange(len(X)), rng.integers(0, DONORS, len(X))]]
            return taken
    return np.asarray(X @ beta + sigma * rng.standard_normal(len(X)))
