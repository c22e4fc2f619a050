"""Tables of sites with different rows under their privacy budgets: noise, price, and the figures with limits.

A table is requested once, and charged as a whole; an equal request is free and has the same noise. Nothing is
agreed on before: levels and ranges are public, in `bounds` or published by the owners.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy import stats

from fedstat.codec import to_json
from fedstat.errors import ModelError
from fedstat.federation.audit.ledger import CoordinatorLog, Ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.federation.message import Request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.noise_shares import agree_shares, coalition_of
from fedstat.federation.tables.published import PublishedColumn
from fedstat.inference.noisy_tables import (
    UNIT,
    NoisyMoments,
    RunningCounts,
    noisy_moments,
    noisy_quantiles,
    price,
)
from fedstat.models.checks import check_layout
from fedstat.models.copula.bounds import Bounds, bounds_of
from fedstat.models.copula.private_release import (
    budget_shares,
    check_budget,
    check_delta,
    check_epsilon,
    rho_to_spend,
    row_guarantee,
)
from fedstat.models.copula.request import PooledRows
from fedstat.models.descriptive.noisy_steps import (
    DRY_RUN_STEPS,
    CodedColumn,
    NoisyTableRequest,
    TablePart,
)
from fedstat.models.descriptive.steps import FAMILY
from fedstat.models.explain import DryRunPlan, Explainable
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.privacy.zcdp import epsilon_of_zcdp
from fedstat.typing import Array, Floats

FEWEST_INTERVALS, MOST_INTERVALS = 16, 256
FIRST_SHARE = Fraction(1, 4)
"""Share of the charge of correlations that finds the middle and the spread of each column."""
FIRST_INTERVALS = 64
LEAST_CLEAR, CLEAR_PRODUCTS = 4.0, 7.0
"""Rows of a group in standard deviations of their noise, below which a table is refused; of correlations."""
FAR_ROWS = 0.999
"""Share of rows of normal columns that are not shortened before their products are summed."""
QUARTER_RANGE = 1.349
"""Distance of the quartiles of a normal column in standard deviations."""
NOISE_OF_SAMPLING = 0.5
"""Noise on a correlation in units of its sampling error, for which fewer rows are shortened."""
TYPICAL_SPREAD = 0.3
"""Standard deviation of a number in units of half of its range that the expected price assumes."""


@dataclass(frozen=True, slots=True)
class NoiseSetting:
    """What the user requests of a table with noise: `epsilon` at `delta`, and the public description."""

    epsilon: float
    delta: float
    bounds: Bounds
    complete: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        epsilon: Any,
        delta: Any,
        bounds: Mapping[str, Any] | None,
        complete: Sequence[str],
        subset: object,
        masked: object,
    ) -> NoiseSetting:
        """Check the arguments of a table with noise; a ModelError names the wrong one."""
        if bounds is not None and not isinstance(bounds, Mapping):
            raise ModelError("bounds: expected a range or levels by column, as in bounds={'age': (0, 120)}")
        if subset is not None:
            raise ModelError("subset: tables with epsilon are of all rows; count by a column of groups")
        if masked is not None:
            raise ModelError(
                "masked: with epsilon, sums are masked where owners let sites share the noise "
                "(colluding); leave it out"
            )
        return cls(check_epsilon(epsilon), check_delta(delta), Bounds(bounds or {}), tuple(complete))

    @property
    def rho(self) -> Fraction:
        """The charge, as zero-concentrated differential privacy."""
        return rho_to_spend(self.epsilon, self.delta)

    def describe(self, partition: ClientPartition, name: str) -> PublishedColumn:
        """Return the public description of a column: that of `bounds`, or that which the sites publish."""
        if name == partition.site_column:
            return PublishedColumn("category", levels=tuple(partition.sites))
        if not any(name in held for held in partition.columns.values()):
            raise ModelError(f"there is no column {name!r} at any site")
        return bounds_of(self.bounds, partition.sites.values(), [name])[name]

    def require(self, partition: ClientPartition, *names: str | None) -> None:
        """Require public descriptions of columns, so that one error names all that have none."""
        held = {name for columns in partition.columns.values() for name in columns}
        bounds_of(self.bounds, partition.sites.values(), [name for name in names if name in held])

    def levels(self, partition: ClientPartition, name: str) -> CodedColumn:
        """Return a category with its public levels."""
        described = self.describe(partition, name)
        if not described.levels:
            raise ModelError(
                f"bounds: {name!r} needs a list of its public levels; none are taken from the data"
            )
        return CodedColumn(name, described.levels)

    def range(self, partition: ClientPartition, name: str) -> tuple[float, float]:
        """Return the public range of a number."""
        described = self.describe(partition, name)
        if described.range is None:
            raise ModelError(
                f"bounds: {name!r} needs its public range (low, high); none is taken from the data"
            )
        return described.range


# ----------------------------------------------------------------------------------------------------
# Noise: one request for one table, or two for correlations.


@dataclass(frozen=True, slots=True, eq=False)
class NoisyTableSums:
    """Sums over all sites by part of a table, and the standard deviation of their noise."""

    parts: tuple[Array, ...]
    deviation: float

    def counts(self, place: int) -> Floats:
        """Return the noisy counts of a part."""
        return np.asarray(self.parts[place] / UNIT)

    @property
    def of_rows(self) -> float:
        """Standard deviation of the noise on a number of rows."""
        return float(self.deviation / UNIT)

    def running(self, place: int) -> RunningCounts:
        """Return the running counts of a part."""
        return RunningCounts.of_sums(self.parts[place], self.deviation**2)

    def moments(self, place: int) -> NoisyMoments:
        """Return the moments of a part."""
        return noisy_moments(self.parts[place] / UNIT, self.of_rows)


@dataclass(frozen=True, slots=True, eq=False)
class NoisyRelease:
    """The sums of each request of a table, with the ledger, what it cost, and its price."""

    sums: tuple[NoisyTableSums, ...]
    ledger: Ledger
    epsilon: float
    delta: float

    def attrs(self) -> dict[str, Any]:
        """Attributes of a frame."""
        return {"ledger": self.ledger, "epsilon": self.epsilon, "delta": self.delta, "left_out": ()}


class NoisyTablePlan(DryRunPlan):
    """What is known of a table with noise before it is charged."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.model: NoisyTable = model

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State the guarantee."""
        model = self.model
        yield "Coordinator and sites", row_guarantee(model.rows, model.cost, model.setting.delta)

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State the price, and the share of each budget."""
        model = self.model
        yield f"{model.noise_statement()} Repeating the same request is free and returns the same noise."
        ratio = model.expected_price()
        yield (
            f"Price: at {model.partition.n_entities:,} rows, epsilon {model.spent:.3g} makes 95 % intervals "
            f"about {ratio:.2g} times as wide as without noise (median over the figures of the table, if "
            "groups and levels have equal shares)."
        )
        yield from budget_shares(model.policies, lambda site: model.cost)


class NoisyTable(Explainable):
    """A table of sites with different rows that is released once, with noise.

    Parameters
    ----------
    partition : ClientPartition
    parts : sequence of TablePart
    setting : NoiseSetting
    what : str
        Description for owners.
    """

    model_name: ClassVar[str] = "Table with noise"
    _plan = NoisyTablePlan

    def __init__(
        self, partition: ClientPartition, parts: Sequence[TablePart], setting: NoiseSetting, what: str
    ) -> None:
        check_layout("A table with epsilon", partition, "horizontal")
        self.partition, self.engine, self.setting, self._what = partition, partition.engine, setting, what
        self.requests = self._requests(tuple(parts), setting)
        for name in self.requests[0].needed:
            self._check_held(name)
        self.coordinator = partition.coordinator or "apart"
        self._session = partition._new_session()
        self._log = CoordinatorLog()
        self._agreement = self._new_ledger()

    def _requests(self, parts: tuple[TablePart, ...], setting: NoiseSetting) -> list[NoisyTableRequest]:
        """List the requests of the table, which share its charge."""
        return [NoisyTableRequest(parts, setting.complete, str(setting.rho))]

    def _check_held(self, name: str) -> None:
        lacking = [site for site, held in self.partition.columns.items() if name not in held]
        if lacking and name != self.partition.site_column:
            raise ModelError(
                f"column {name!r} is not at {', '.join(map(repr, lacking))}. Add it there, or leave these "
                "sites out"
            )

    @property
    def policies(self) -> dict[str, Policy]:
        """Policies of the sites, by name."""
        return {name: site.policy for name, site in self.partition.sites.items()}

    @cached_property
    def rows(self) -> PooledRows:
        """The numbers of rows, and how many sites may collude."""
        records = {name: len(self.partition.rows[name]) for name in self.policies}
        return PooledRows(records, coalition_of(self.policies))

    @property
    def cost(self) -> Fraction:
        """The charge to each site, as its checks compute it."""
        shares = self.rows.expected_shares
        return sum((replace(one, shares=shares).required.rho for one in self.requests), Fraction(0))

    @property
    def spent(self) -> float:
        """Epsilon of the charge."""
        return epsilon_of_zcdp(self.cost, self.setting.delta)

    @property
    def expected_deviation(self) -> float:
        """Standard deviation of the noise on the sums of the last request."""
        return math.sqrt(self.rows.noise_of(self.requests[-1].variance))

    def noise_statement(self) -> str:
        """State the size of the noise, before it is charged."""
        parts, where = self.requests[-1].parts, "each count of the table"
        deviation = self.expected_deviation / UNIT
        if {part.kind for part in parts} == {"running"}:
            where = "the number of rows up to the last interval, and less on earlier ones"
            deviation = max(map(self.expected_deviation_of_rows, parts))
        return f"Noise has a standard deviation of {deviation:.3g} rows on {where}."

    def expected_price(self) -> float:
        """Return the expected ratio of errors with noise to errors without, at the published rows."""
        n, noise = float(self.partition.n_entities), (self.expected_deviation / UNIT) ** 2
        sampling, added = [], []
        for part in self.requests[-1].parts:
            rows, cells = n / part.shape[0], part.shape[1]
            match part.kind:
                case "cells":
                    share = 1.0 / max(cells, 2)
                    sampling.append(rows * share * (1.0 - share))
                    added.append(noise)
                case "running":
                    covariance = RunningCounts.of_sums(np.zeros(cells), noise * UNIT**2).covariance
                    sampling.append(rows / 4.0)
                    added.append(float(np.median(np.diag(covariance))))
                case "moments":
                    sampling.append(rows * TYPICAL_SPREAD**2)
                    added.append(noise)
                case _:
                    sampling.append(n)
                    added.append(noise / UNIT**2)
        return price(np.array(sampling), np.array(added))

    @property
    def _description(self) -> str:
        return self._what

    @property
    def _distribution_text(self) -> str:
        return f"sums with noise, epsilon {self.spent:.3g} at delta {self.setting.delta:g}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._what} at {len(self.partition.sites)} sites; see .fit()>"

    def _columns_read(self, site: str) -> Sequence[str]:
        return self.requests[0].needed

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        rows = self.partition.rows
        return {name: DrySite(name, one, len(rows[name]), DRY_RUN_STEPS) for name, one in policies.items()}

    def fit(self) -> NoisyRelease:
        """Request the sums, under the budgets of all sites."""
        return run_fit(self, Call.of(self.fit, locals()), NoisyTable._sum)

    def _sum(self, attempt: FitAttempt) -> NoisyRelease:
        self._check_rows()
        for site, policy in self.policies.items():
            check_budget(site, policy, self.cost)
        sums = attempt.run(self._protocol(), self.rows.masked_at)
        return NoisyRelease(tuple(sums), attempt.ledger, self.spent, self.setting.delta)

    def _check_rows(self) -> None:
        """Refuse a table whose noise hides all rows of a group, before any site spends its budget."""
        n = self.partition.n_entities
        for part in self.requests[-1].parts:
            if part.kind == "cells":
                continue  # a small count is a count
            least = CLEAR_PRODUCTS if part.kind == "products" else LEAST_CLEAR
            needed = least * part.shape[0] * self.expected_deviation_of_rows(part)
            if n < needed:
                more = epsilon_of_zcdp(
                    float(self.setting.rho) * (needed / max(n, 1)) ** 2, self.setting.delta
                )
                groups = f" of {part.shape[0]} groups" if part.shape[0] > 1 else ""
                raise ModelError(
                    f"epsilon: {self.setting.epsilon:g} hides the rows{groups}: the sites have {n:,}, and "
                    f"about {math.ceil(needed):,} would do, or an epsilon of about {more:.2g}. No request "
                    "was sent"
                )

    def expected_deviation_of_rows(self, part: TablePart) -> float:
        """Return the standard deviation of the noise on the rows of one group."""
        if part.kind == "running":
            covariance = RunningCounts.of_sums(np.zeros(part.shape[1]), self.expected_deviation**2).covariance
            return math.sqrt(float(covariance[-1, -1]))
        return float(self.expected_deviation / (UNIT if part.kind == "moments" else UNIT**2))

    def _protocol(self) -> FitProtocol[list[NoisyTableSums]]:
        """Request the sums of all requests, one after the other."""
        shares = yield from agree_shares(self.policies, self._session)
        found: list[NoisyTableSums] = []
        for place in range(len(self.requests)):
            rest = self.requests[place + 1 :]
            later = sum((Fraction(one.rho) for one in rest), Fraction(0))
            request = replace(self._next(place, found), later=str(later), shares=shares)
            found.append((yield from self._request_sums(request)))
        return found

    def _next(self, place: int, found: Sequence[NoisyTableSums]) -> NoisyTableRequest:
        """Return a request, which may depend on the sums of earlier ones."""
        return self.requests[place]

    def _request_sums(self, request: NoisyTableRequest) -> FitProtocol[NoisyTableSums]:
        text = to_json(request)
        replies = yield [
            Request(site, FAMILY, "sum_noisy_table", {}, self._session, text) for site in self.policies
        ]
        total = np.sum([reply.arrays["sums"] for reply in replies], axis=0)
        return NoisyTableSums(tuple(request.split(total)), math.sqrt(self.rows.noise_of(request.variance)))


def intervals_of(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return ends of about `most` intervals of a range, whose middles are round numbers.

    Their length is one, two or five times a power of ten, and the lower end of the range is the middle of the
    first one, so that equal numbers such as zeros are not at an end.
    """
    least = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(least))
    step = min(many for many in (1.0, 2.0, 5.0, 10.0) if many * unit >= least * (1.0 - 1e-9)) * unit
    count = math.ceil(round((high - low) / step, 9)) + 1
    return tuple((low + step * (np.arange(count + 1) - 0.5)).tolist())


def most_intervals(n: float, rho: float) -> int:
    """Return how many intervals n rows can resolve at a charge."""
    return int(np.clip(round(n * math.sqrt(rho)), FEWEST_INTERVALS, MOST_INTERVALS))


# ----------------------------------------------------------------------------------------------------
# Correlations: the middle and the spread of each column first, and then products of standardized columns.


class NoisyCorrelations(NoisyTable):
    """Correlations from two requests with noise; the second one follows from the first."""

    def __init__(
        self, partition: ClientPartition, columns: Sequence[CodedColumn], setting: NoiseSetting, what: str
    ) -> None:
        self.columns = tuple(columns)
        super().__init__(partition, [TablePart("running", (one,)) for one in columns], setting, what)

    def _requests(self, parts: tuple[TablePart, ...], setting: NoiseSetting) -> list[NoisyTableRequest]:
        first, complete = setting.rho * FIRST_SHARE, tuple(one.name for one in self.columns)
        ranges = tuple(replace(one, edges=(one.edges[0], one.edges[-1])) for one in self.columns)
        complete = (*dict.fromkeys((*complete, *setting.complete)),)
        return [
            NoisyTableRequest(parts, complete, str(first)),
            NoisyTableRequest(
                (self._products(ranges, setting.rho - first),), complete, str(setting.rho - first)
            ),
        ]

    def _products(self, ranges: tuple[CodedColumn, ...], rho: Fraction) -> TablePart:
        """Return the sums of products of rows that are shortened to a length which public figures choose.

        Short rows have less noise, and their correlations are nearer to zero: noise of half of the sampling
        error is allowed, and more where few rows of normal columns would not be shortened otherwise.
        """
        noise = math.sqrt(len(self.policies) / (2.0 * float(rho) * self.rows.honest))
        least = math.ceil(float(stats.chi2.ppf(FAR_ROWS, len(ranges))))
        radius = np.clip(NOISE_OF_SAMPLING * math.sqrt(self.partition.n_entities) / noise, least, UNIT - 1)
        return TablePart("products", ranges, squared_radius=int(radius))

    def noise_statement(self) -> str:
        """State the size of the noise, before it is charged."""
        deviation = self.expected_deviation / UNIT**2 / max(self.partition.n_entities, 1)
        return f"Noise has a standard deviation of about {deviation:.2g} on a correlation near 0."

    def _next(self, place: int, found: Sequence[NoisyTableSums]) -> NoisyTableRequest:
        if not place:
            return self.requests[0]
        ranges = tuple(self._standardized(found[0].running(j), one) for j, one in enumerate(self.columns))
        return replace(self.requests[1], parts=(self._products(ranges, Fraction(self.requests[1].rho)),))

    def _standardized(self, running: RunningCounts, column: CodedColumn) -> CodedColumn:
        """Return a column with ends one standard deviation from its middle, from its noisy distribution.

        Noise in the tails changes quartiles less than the variance, which bounds the deviation of a column
        with few different numbers.
        """
        edges = np.array(column.edges)
        line = RunningCounts(running.upto[0], running.covariance)
        low, middle, high = noisy_quantiles(line, edges, np.array([0.25, 0.5, 0.75]), 0.05)[0].tolist()
        if math.isnan(middle):
            return replace(column, edges=(float(edges[0]), float(edges[-1])))
        middles = np.concatenate([edges[:1], (edges[:-1] + edges[1:]) / 2.0, edges[-1:]])
        variance = float(line.counts @ (middles - middle) ** 2) / float(line.ascending[-1])
        spread = max((high - low) / QUARTER_RANGE, math.sqrt(variance) / 2.0, float(edges[1] - edges[0]))
        # Few digits: the request is part of the noise's key, and must not depend on rounding.
        digits = 3 - math.floor(math.log10(spread))
        middle, spread = round(middle, digits), round(spread, digits)
        return replace(column, edges=(middle - spread, middle + spread))

    def moments(self, sums: NoisyTableSums) -> tuple[float, Floats, Floats, float]:
        """Return rows, sums (p,) and products (p, p) of standardized columns, and the deviation of noise."""
        p, values = len(self.columns), sums.parts[0][0] / UNIT**2
        first, second = np.triu_indices(p)
        products = np.zeros((p, p))
        products[first, second] = products[second, first] = values[1 + p :]
        return float(values[0]), values[1 : 1 + p], products, sums.deviation / UNIT**2
