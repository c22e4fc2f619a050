"""The step of a site for a regression under a privacy budget: noisy sums of bounded rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

import numpy as np
import pandas as pd

from fedstat.codec import Minimum, from_json, to_json
from fedstat.errors import MessageError
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.horizontal_steps import RowsCoding
from fedstat.federation.design.site_rows import RowsRequest, design_matrix, find_complete_rows
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, NoiseShares, honest_shares
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, control
from fedstat.federation.tables.columns import read_codes, read_numbers
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.tables.table import FrameTable, in_memory, keep_result
from fedstat.models.glm.noisy_newton import (
    RELEASES,
    FamilyName,
    NoisyPoint,
    Stage,
    bounded_sums,
    whole_radius,
)
from fedstat.models.glm.steps import FAMILY
from fedstat.privacy.zcdp import GRID, share_of_noise
from fedstat.typing import Array, Floats

NAMES = ("score", "information")
MOST_COLUMNS, MOST_PLACES, MOST_RADIUS = 500, 30, 1e6


@dataclass(frozen=True, slots=True)
class NoisySumsRequest:
    """One step of a regression under a privacy budget; all sites receive the same.

    `coding` are the columns and their coding, `bounds` their public descriptions, `response` the range to
    which it is cut. `stage` to `half` are a :class:`NoisyPoint`, `places` the binary digits of the sums.
    `variances` are those of the noise on score and information that are left to a coalition, `later` the
    cost of later steps in units of 2^-64.
    """

    coding: RowsCoding
    bounds: Mapping[str, PublishedColumn]
    response: tuple[float, float]
    family: FamilyName
    stage: Stage
    transform: tuple[tuple[float, ...], ...]
    beta: tuple[float, ...]
    scale: float
    squared_radius: float
    center: float
    half: float
    places: Annotated[int, Minimum(0)]
    variances: tuple[Annotated[int, Minimum(1)], Annotated[int, Minimum(1)]]
    later: Annotated[int, Minimum(0)]
    shares: NoiseShares | None

    def check(self) -> None:
        """Require finite numbers of one number of columns, and descriptions of all columns that are read."""
        p, question = len(self.beta), RowsRequest.from_json(self.coding.question)
        numbers = np.array(
            [*self.beta, *self.response, self.scale, self.center, self.half, self.squared_radius]
        )
        fits = 0 < p <= MOST_COLUMNS and all(len(row) == p for row in (*self.transform, self.transform))
        if not fits or not (np.isfinite(numbers).all() and np.isfinite(np.array(self.transform)).all()):
            raise MessageError("noisy sums: expected finite coefficients, and coordinates of as many columns")
        positive = self.scale > 0.0 and self.half > 0.0 and 0.0 < self.squared_radius <= MOST_RADIUS
        ordered = self.response[0] < self.response[1] and (
            self.family != "Binomial" or self.response == (0.0, 1.0)
        )
        if not (positive and ordered and self.places <= MOST_PLACES):
            raise MessageError("noisy sums: a radius, a range or a cost is invalid")
        if not set(question.needed) <= set(self.bounds) or question.weighted or question.offsets:
            raise MessageError(
                "noisy sums: expected a description of every column, and no weights and offsets"
            )
        if (
            question.imputed
            or question.effects
            or question.curves
            or question.has_times
            or question.has_categories
        ):
            raise MessageError("noisy sums: expected a regression of one response on columns")

    @property
    def point(self) -> NoisyPoint:
        """The point of the iteration."""
        return NoisyPoint(
            family=self.family,
            stage=self.stage,
            transform=np.array(self.transform),
            beta=np.array(self.beta),
            scale=self.scale,
            squared_radius=self.squared_radius,
            center=self.center,
            half=self.half,
        )

    @property
    def squared(self) -> tuple[int, int]:
        """Squared sensitivities of score and information to one row added or removed, in units."""
        point = self.point
        return tuple(whole_radius(one, self.places) for one in (point.score_radius, point.information_radius))  # type: ignore[return-value]

    def share(self, array: int) -> Fraction:
        """Variance of a site's noise on the score (0) or the information (1)."""
        return share_of_noise(self.variances[array], honest_shares(self.shares))

    @property
    def costs(self) -> Fraction:
        """What a site is charged."""
        return sum((one.rho for one in self.owed()), Fraction(0))

    def owed(self) -> Iterator[NoiseRequired]:
        """Yield the noise of each array; `later` and the shares do not change the request."""
        words = to_json(replace(self, later=0, shares=None))
        for name in RELEASES[self.stage]:
            k = NAMES.index(name)
            yield NoiseRequired(
                name,
                words,
                self.squared[k],
                self.share(k),
                later=Fraction(self.later, GRID),
                shares=self.shares,
            )


def clean_column(series: pd.Series, column: PublishedColumn) -> pd.Series:
    """Return a column with the values that its public description has: others are cut, or missing.

    Numbers are cut to their range; a value that is no number, or no listed level, is missing.
    """
    if column.levels:
        levels = np.array([*column.levels, None], dtype=object)
        found = pd.Series(levels[read_codes(series, column.levels)], index=series.index)
        return found.astype(np.float64) if column.kind == "number" else found
    return pd.Series(
        np.clip(read_numbers(series), *(column.range or (-math.inf, math.inf))), index=series.index
    )


def coded_rows(data: SiteData, request: NoisySumsRequest) -> Iterator[tuple[Floats, Floats]]:
    """Yield design (m, p) and response (m,) of the complete rows, chunk by chunk.

    A row enters as if it were alone: none of them changes how another one is coded, and none is an error.
    """
    question = RowsRequest.from_json(request.coding.question)
    spec = BlockSpec.from_json(request.coding.spec)
    for chunk in data.table.chunks(question.needed):
        frame = pd.DataFrame(
            {name: clean_column(chunk[name], request.bounds[name]) for name in question.needed}
        )
        yield from _code(data.name, frame, question, spec, request.response)


def _code(
    site: str, frame: pd.DataFrame, question: RowsRequest, spec: BlockSpec, response: tuple[float, float]
) -> Iterator[tuple[Floats, Floats]]:
    # Rules on few rows and on earlier releases do not apply: noise protects each row.
    alone = SiteData(site, FrameTable(frame.reset_index(drop=True)), None, Policy(), ReleaseHistory())
    try:
        for rows in find_complete_rows(alone, question):
            if len(rows.frame):
                y = np.asarray(rows.y, dtype=np.float64)
                if y.ndim > 1:
                    return
                yield design_matrix(rows.frame, question, spec, site).X, np.clip(y, *response)
    except Exception:
        if len(frame) > 1:
            half = len(frame) // 2
            yield from _code(site, frame.iloc[:half], question, spec, response)
            yield from _code(site, frame.iloc[half:], question, spec, response)


NOISY = ArrayDeclaration(
    "noisy aggregate",
    "sum of bounded scores of rows, with noise",
    maskable=True,
    dtype="int64",
    behind=(EntityCount, NoiseRequired),
    noisy=True,
    optional=True,
)


@step(
    FAMILY,
    request=NoisySumsRequest,
    requests=control("columns, their public bounds, coefficients, variance of the noise", common=True),
    releases={
        "score": NOISY,
        "information": replace(NOISY, what="sum of bounded products of two columns, with noise"),
    },
)
def sum_noisy_scores(data: SiteData, state: State, request: NoisySumsRequest) -> dict[str, Array]:
    """Sum bounded scores and information over the rows; the disclosure checks add noise.

    ``score`` (p,), or (p + 1,) with the spread of residuals, and ``information`` (p (p + 1) / 2,), as far as
    the stage has them, are in units of 2^-places. Nothing that is released, and no failure, depends on a
    row except by these sums.
    """
    question = RowsRequest.from_json(request.coding.question)
    state.report(*question.requested())
    state.use_columns(question.needed)
    state.report(EntityCount(data.table.n_rows), *request.owed())
    key = (
        to_json([request.coding.question, request.coding.spec, list(request.response)]),
        to_json(dict(request.bounds)),
    )
    p, point = len(request.beta), request.point
    sums = [np.zeros(p + point.extra, np.int64), np.zeros(p * (p + 1) // 2, np.int64)]
    held = in_memory(data.table)
    coded = (
        keep_result(data.table, key, lambda: list(coded_rows(data, request)))
        if held
        else coded_rows(data, request)
    )
    for X, y in coded:
        for total, part in zip(sums, bounded_sums(point, X, y, request.places), strict=True):
            total += part
    return {name: sums[NAMES.index(name)] for name in RELEASES[request.stage]}


def invented_sums(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Return the sums of a simulated site, whose columns have mean zero and no correlations."""
    request = from_json(NoisySumsRequest, text, data.name)
    state.report(EntityCount(data.table.n_rows), *request.owed())
    p, n = len(request.beta), data.table.n_rows
    first, second = np.triu_indices(p)
    score = np.zeros(p + request.point.extra, np.int64)
    if request.stage == "means":
        score[:p] = np.rint(np.ldexp(n * np.array(request.transform[0]), request.places))
    sums = score, np.where(first == second, n << request.places, 0).astype(np.int64)
    return {name: sums[NAMES.index(name)] for name in RELEASES[request.stage]}, ""


DRY_RUN_STEPS = {
    (FAMILY, "sum_noisy_scores"): replace(FAMILIES[FAMILY]["sum_noisy_scores"], run=invented_sums)
}
"""Steps that replace those that read rows, for simulated sites."""
