"""Synthetic data and designs for a dry run: drawn rows of the agreed columns, and drawn blocks of columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.federation.design.block import CodedBlock
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.horizontal_design import RowsSchema
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, NamedColumns, OpenRows
from fedstat.federation.design.propensity_weights import WeightedArms
from fedstat.federation.design.site_rows import CompleteRows, RowsRequest, design_matrix
from fedstat.federation.design.spline_knots import KnotsRequest, assumed_counts
from fedstat.federation.design.transform_states import (
    TransformRequest,
    assumed_sums,
    count_power_sums,
    targeted,
)
from fedstat.federation.design.vertical_design import (
    FAMILY,
    BlockDesign,
    CodingRequest,
    Design,
    FoldsRequest,
    OpenedBlock,
)
from fedstat.federation.disclosure.facts import (
    AbsorbedLevels,
    ClusterCounts,
    EntityCount,
    RowCount,
    RowGroups,
)
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.message import Step
from fedstat.federation.tables.columns import LevelValue
from fedstat.federation.tables.curves import CurveArray
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Designs of the agreed shape with drawn numbers: normal columns, and a response that mildly depends on
# them.
#
# The synthetic part is a site's coded columns. Names, sites, entities and missing patterns are the agreed
# ones, and the shape of a reply depends on nothing else: no kind, level or transform of a column is needed,
# and values do not matter.

SYNTHETIC_SEED = 20_240_229
PREDICTOR_VARIANCE = 0.5
"""Variance of the linear predictor of columns of variance one."""

LOG_MEAN_SLOPE = 0.3
"""By how much the logarithm of a mean moves with it; a probability stays within 0.2 and 0.8."""

RESPONSE_SHAPE = 4.0
"""Shape of positive responses: their variance is the squared mean divided by it."""


def synthetic_generator() -> np.random.Generator:
    """Return the same random numbers for every dry run."""
    return np.random.default_rng(SYNTHETIC_SEED)


def draw_effects(p: int) -> Floats:
    """Coefficients of p standardized columns, falling from the first: (p,)."""
    falling = 1.0 / (1.0 + np.arange(p))
    size = np.sqrt((falling @ falling) / PREDICTOR_VARIANCE) if p else 1.0
    return np.asarray(falling * np.where(np.arange(p) % 2, -1.0, 1.0) / size)


def draw_response(distribution: DistributionSpec, predictor: Floats, rng: np.random.Generator) -> Floats:
    """Draw responses that a distribution can have, with means that move with a linear predictor: (n,).

    The link is not that of the distribution: means stay well inside the range of every link.
    """
    if distribution.least_squares:
        return np.asarray(rng.normal(predictor))
    near = LOG_MEAN_SLOPE * np.clip(predictor, -2.0, 2.0)
    mean, n = np.exp(near), len(near)
    match distribution.name:
        case "Gaussian":
            return np.asarray(rng.normal(mean, LOG_MEAN_SLOPE / RESPONSE_SHAPE))
        case "Binomial":
            return (rng.random(n) < 0.5 * (1.0 + near)).astype(float)
        case "Poisson":
            return rng.poisson(mean).astype(float)
        case "NegativeBinomial":
            alpha = max(float(distribution.alpha or 1.0), 1.0 / RESPONSE_SHAPE)
            return rng.poisson(mean * rng.gamma(1.0 / alpha, alpha, n)).astype(float)
        case "InverseGaussian":
            return np.asarray(rng.wald(mean, RESPONSE_SHAPE * mean))
        case _:
            return np.asarray(mean * rng.gamma(RESPONSE_SHAPE, 1.0 / RESPONSE_SHAPE, n))


# ----------------------------------------------------------------------------------------------------
# Sites that hold different rows of the same columns, with a synthetic design of the agreed columns.

OPEN_STEP, SUM_STEP, COUNT_STEP = "open_rows", "transform_sums", "count_intervals"
MAX_SYNTHETIC_ROWS, SYNTHETIC_ROWS_PER_COLUMN, SYNTHETIC_ROWS_PER_COUNT = 400, 20, 8
"""Rows that are drawn at most, for each column, and for each row that an owner requires behind a sum.

Answers are sums, whose shapes do not depend on the number of rows; groups of rows must not be too small.
"""

SYNTHETIC_TIMES = 400.0
"""Last time of drawn rows."""
SYNTHETIC_GROUPS = 2
"""Levels of a column of groups at a site; how many there are is not known in advance."""
ROWS_OF_A_GROUP = 2


@dataclass(frozen=True, slots=True)
class SyntheticRows:
    """The source of drawn rows: the agreed columns, and a response of a distribution.

    `nested` are columns of groups with one level at each site, such as the strata of its clusters;
    `binary` are labels that are 0 or 1; `curves` have the points on which others are drawn; `groups` are
    columns of groups of two rows. Steps read the values of the `leveled` columns, whose levels are given.
    """

    agreement: RowsSchema
    distribution: DistributionSpec
    nested: tuple[str, ...] = ()
    binary: tuple[str, ...] = ()
    curves: Mapping[str, CurveArray] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    leveled: Mapping[str, Sequence[LevelValue]] = field(default_factory=dict)
    site_column: str = ""

    def sites(self, policies: Mapping[str, Policy]) -> dict[str, DrySite]:
        """Make sites that open drawn rows of the agreed columns where they are asked to open their own."""
        instead = {
            (FAMILY, OPEN_STEP): self._opener(),
            (FAMILY, SUM_STEP): replace(FAMILIES[FAMILY][SUM_STEP], run=self._sum),
            (FAMILY, COUNT_STEP): replace(FAMILIES[FAMILY][COUNT_STEP], run=self._count),
        }
        return {
            row.site: DrySite(row.site, policies[row.site], row.n_rows, instead, site_column=self.site_column)
            for row in self.agreement.sites
        }

    def _sum(self, data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
        """Sum for transforms; only the number of rows behind the sum is checked."""
        request = from_json(TransformRequest, text, "")
        state.report(RowCount(self._n_rows(data.name), count_power_sums(request)))
        state.reported.update(FAMILIES[FAMILY][SUM_STEP].gives["sums"].behind)
        state.count_entities(self._n_rows(data.name))
        return {"sums": assumed_sums(targeted(request))}, ""

    def _count(self, data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
        """Count as if a column had values in an interval only, which takes the most rounds."""
        n = self._n_rows(data.name)
        state.report(RowCount(n))
        state.reported.update(FAMILIES[FAMILY][COUNT_STEP].gives["counts"].behind)
        state.count_entities(n)
        return {"counts": assumed_counts(from_json(KnotsRequest, text, ""), n)}, ""

    def _n_rows(self, site: str) -> int:
        return next(row.n for row in self.agreement.sites if row.site == site)

    def _opener(self) -> Step:
        """Make a step that opens synthetic rows; only their number is checked."""
        columns = coded_names(self.agreement)
        names, answer = columns.names, to_json(columns)

        def open_rows(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
            n = self._n_rows(data.name)
            state.report(RowCount(n, len(names) + self.agreement.question.intercept))
            # The other facts describe rows, which a dry run does not have.
            state.reported.update((*OPEN_ROWS, AbsorbedLevels, RowGroups))
            state.keep("rows", self._draw(data, n, len(names)), n, columns=len(names))
            return {}, answer

        return replace(FAMILIES[FAMILY][OPEN_STEP], run=open_rows)

    def _respond(self, rng: np.random.Generator, predictors: Floats) -> Floats:
        """Draw values of a response that is a curve, (m, G)."""
        return draw_response(self.distribution, predictors.ravel(), rng).reshape(predictors.shape)

    def _draw(self, data: SiteData, n: int, columns: int) -> OpenRows:
        """Draw columns, response and groups of a site."""
        question = self.agreement.question
        # Spawned by position, so that sites draw differently and each draws the same in every dry run.
        place = [row.site for row in self.agreement.sites].index(data.name)
        rng = synthetic_generator().spawn(place + 1)[place]
        # More rows than columns, or the synthetic fit would stop at a singular matrix.
        least = max(SYNTHETIC_ROWS_PER_COLUMN * columns, SYNTHETIC_ROWS_PER_COUNT * data.min_count)
        m = min(n, max(MAX_SYNTHETIC_ROWS, least))
        m -= m % ROWS_OF_A_GROUP if self.groups and m > 1 else 0
        X = rng.normal(size=(m, columns))
        y = draw_response(self.distribution, X @ draw_effects(columns), rng)
        if question.has_categories:
            y = (np.arange(m) % len(question.categories)).astype(np.float64)
        if question.intercept:
            X = np.column_stack([np.ones(m), X])
        frame = draw_group_codes(question, data.name, m, self.nested)
        frame = frame.assign(**dict.fromkeys(self.binary, np.arange(m) % 2))
        frame = frame.assign(**dict.fromkeys(self.groups, np.arange(m) // ROWS_OF_A_GROUP))
        for name, levels in self.leveled.items():
            frame[name] = pd.Series(levels, dtype=object).iloc[np.arange(m) % len(levels)].to_numpy()
        for name in question.read_curves:
            response = name == question.curve_response and not self.distribution.least_squares
            frame[name] = self.curves[name].drawn(
                m, rng, partial(self._respond, rng) if response else np.asarray
            )
        rows = synthetic_rows(question, y, frame)
        return open_synthetic_rows(data, self.agreement, rows, X)


class DrawnRows(OpenRows):
    """Drawn rows, whose columns are not coded again: changes of them have the shape of the real ones."""

    __slots__ = ()

    def derivative(self, rows: CompleteRows, X: Floats, by: str, logarithmic: bool = False) -> Floats:
        """Return numbers instead of derivatives."""
        return X

    def at_level(
        self, rows: CompleteRows, X: Floats, name: str, level: LevelValue, *, added: bool = False
    ) -> Floats:
        """Return the rows instead of changed ones."""
        return X

    def leveled_columns(self) -> Iterator[tuple[int, Floats]]:
        """Return no columns: the rows are those of no table."""
        return iter(())

    def weighted_arms(self) -> list[WeightedArms]:
        """Draw columns and arms of propensity models."""
        n, rng, found = sum(len(X) for _, X in self.chunks()), synthetic_generator(), []
        for one in self.question.propensities:
            columns = rng.normal(size=(n, len(one.names))) * one.scale + one.shift
            columns[:, 0] = 1.0
            rows = one.at(columns, np.arange(n) % len(one.levels))
            # The propensity model fits the rows that it weights: its scores add up to zero.
            Z, r = rows.columns, rows.residuals
            found.append(replace(rows, residuals=r - Z @ np.linalg.lstsq(Z, r, rcond=None)[0]))
        return found

    def has_level(self, rows: CompleteRows, name: str, level: LevelValue | None) -> Bools:
        """Suppose that all rows have it."""
        return np.ones(len(rows.y), dtype=bool)


def open_synthetic_rows(data: SiteData, agreement: RowsSchema, rows: CompleteRows, X: Floats) -> OpenRows:
    """Open (m, q) drawn columns, standardized as a site standardizes its own."""
    question, held = agreement.question, (rows, np.array(X, order="C"))
    coded = coded_names(agreement)
    out = DrawnRows(data, question, agreement.spec, question.read_every_term(), held=held)
    out.names, out.term_names = coded.names, coded.term_names
    out.fixed = len(coded.names) if coded.fixed < 0 else coded.fixed
    out.settle(X.mean(axis=0), X.std(axis=0))
    return out


def synthetic_rows(question: RowsRequest, y: Floats, frame: pd.DataFrame) -> CompleteRows:
    """Rows with a drawn response, weights of one and offsets of zero, where the model has them."""
    m = len(y)
    roles = [*question.weights, *["var_weights"] * bool(question.propensities)]
    weights = {role: np.ones(m) for role in roles if role != "exposure"}
    offset = np.zeros(m) if question.offsets or "exposure" in question.weights else None
    counts = np.column_stack([y, 1.0 - y]) if question.response.startswith("cbind") else y
    # In an order that does not depend on the other columns.
    stop = SYNTHETIC_TIMES * (1.0 + (np.arange(m) * 7.0) % m) / m
    times = np.column_stack([np.zeros(m), stop]) if question.has_times else None
    return CompleteRows(frame, np.ones(m, dtype=bool), counts, offset, weights, times=times)


def draw_group_codes(question: RowsRequest, site: str, m: int, nested: tuple[str, ...]) -> pd.DataFrame:
    """Make groups that no other site has: one that is nested in the site, else two."""
    levels = {name: 1 if name in nested else SYNTHETIC_GROUPS for name in question.labels}
    return pd.DataFrame({name: [f"{site} {i % k}" for i in range(m)] for name, k in levels.items()})


def coded_names(agreement: RowsSchema) -> NamedColumns:
    """Names of the design columns without the intercept, and the term of each: no row is needed for that."""
    spec, question = agreement.spec, agreement.question
    empty: dict[str, Any] = {name: pd.Series([], dtype=float) for name in spec.columns}
    for name, levels in spec.levels.items():
        if spec.kinds[name] == "category":  # a number inside C() has levels as well
            empty[name] = pd.Series(pd.Categorical([], levels))
    none = np.zeros(0)
    rows = CompleteRows(pd.DataFrame(empty, index=range(0)), none.astype(bool), none, None, {})
    coded = design_matrix(rows.frame, question, spec, "")
    return NamedColumns(coded.names, coded.term_names, coded.effects, coded.fixed)


# ----------------------------------------------------------------------------------------------------
# Sites that hold different columns, with synthetic blocks of the agreed design.


def synthetic_column_sites(
    design: Design,
    rows: Mapping[str, Ints],
    policies: Mapping[str, Policy],
    distribution: DistributionSpec,
    session: str,
    kept: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, DrySite]:
    """Let every site have opened a block of the agreed columns and entities, and one of them the response.

    `rows` are the positions of each site's records among all entities, `session` is that of the model; what a
    family has `kept` besides is by site and name.
    """
    rng = synthetic_generator()
    states = {name: State(name) for name in policies}
    effects = draw_effects(sum(len(block.names) for block in design.blocks))
    predictor, first = np.zeros(design.n), 0
    for block in design.blocks:
        p = len(block.names)
        X = rng.normal(size=(len(block.rows), p))
        # Presence is real, and only numbers are drawn: shapes and counts behind sums follow from presence.
        X = X if block.has is None else np.where(block.has, X, np.nan)
        predictor[block.rows] += np.nan_to_num(X) @ effects[first : first + p]
        first += p
        seen = np.isin(rows[block.site], design.entities[block.rows])
        opened = synthetic_block(block, X, seen)
        states[block.site].keep("block", opened, opened.fewest, columns=p)
    response = np.full(len(design.response_keep), np.nan)
    response[design.response_keep] = draw_response(distribution, predictor, rng)
    states[design.active].keep("response", response, design.n)
    for holder, items in (kept or {}).items():
        for item, value in items.items():
            states[holder].keep(item, value)
    instead = {(FAMILY, "draw_folds"): replace(FAMILIES[FAMILY]["draw_folds"], run=_draw_synthetic_folds)}
    sites = {
        name: DrySite(name, policy, len(rows[name]), instead, rows[name]) for name, policy in policies.items()
    }
    for name, site in sites.items():
        site.open(session, states[name])
    return sites


def _draw_synthetic_folds(
    data: SiteData, state: State, text: str, use: Bools
) -> tuple[dict[str, Array], str]:
    """Draw folds of entities: how many groups there are is not known in advance."""
    m = int(use.sum())
    state.report(EntityCount(m))
    state.reported.add(ClusterCounts)
    return {"fold": np.arange(m) % float(from_json(FoldsRequest, text, "").folds)}, ""


def synthetic_block(block: BlockDesign, X: Floats, seen: Bools) -> CodedBlock:
    """Make a block of (n_seen, p) drawn columns; of their coding the names are known."""
    spec = BlockSpec(block.site, names=block.names, term_names=block.term_names)
    return CodedBlock(spec, seen, X, block.n_partial)


# ----------------------------------------------------------------------------------------------------
# Sites with entities to predict, without coded columns: every requested column is zero.


def synthetic_entity_sites(rows: Mapping[str, Ints], policies: Mapping[str, Policy]) -> dict[str, DrySite]:
    """Make sites whose records, at these positions among all entities, all have every column."""
    runs = {"open_new_block": _open_synthetic_block, "open_response": _open_synthetic_response}
    instead = {(FAMILY, name): replace(FAMILIES[FAMILY][name], run=run) for name, run in runs.items()}
    return {
        name: DrySite(name, policy, len(rows[name]), instead, rows[name]) for name, policy in policies.items()
    }


def _open_synthetic_block(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    spec = BlockSpec.from_json(from_json(CodingRequest, text, "").spec)
    n, p = data.table.n_rows, len(spec.names)
    # As many as there can be: who has every column is not known before.
    seen = np.ones(n, dtype=np.bool_)
    state.report(EntityCount(n))
    state.keep("block", CodedBlock(spec, seen, np.zeros((n, p)), 0), n, columns=p)
    return {"seen": seen}, to_json(OpenedBlock(spec.names, spec.term_names, spec.levels, 0))


def _open_synthetic_response(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    n = data.table.n_rows
    state.keep("response", np.arange(n, dtype=np.float64), n)
    return {"has": np.ones(n, dtype=np.bool_)}, ""
