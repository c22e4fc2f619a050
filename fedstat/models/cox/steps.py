"""Steps of a site for Cox's model: sums over its own risk sets, its own fit, and residual sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.design.site_rows import block_means
from fedstat.federation.disclosure.facts import (
    ClusterProducts,
    LevelRowCounts,
    RowGroups,
    RowTerms,
    ScoreAndInformation,
    WorkingWeights,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control
from fedstat.kernels.clusters import Margins
from fedstat.kernels.partial_likelihood import TIES, PartialLikelihood, RiskTable
from fedstat.models.horizontal.rows import NOTHING_SUMMED, require_numbers_of_rows, summed
from fedstat.models.horizontal.time_evaluation import (
    CONCORDANCE,
    Predicted,
    concordance_sums,
    enter_evaluation,
)
from fedstat.models.rows.estimated_weights import RELEASES, sum_stacked
from fedstat.models.rows.objective import Objective, Place, RowsWithWeights, SiteSums, own_part
from fedstat.models.rows.steps import enter_steps, rows_in
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "cox"
TRANSFORMS: Mapping[str, Callable[[Floats], Floats]] = {"log": np.log, "identity": np.asarray}
"""Functions of time with which coefficients may vary in the test of proportional hazards."""
MONOTONE, NO_EVENTS = "monotone likelihood", "no events"
"""Change of a standardized coefficient at convergence from which it grows without bound."""


@dataclass(frozen=True, slots=True)
class CoxRequest:
    """Treatment of tied events, and columns of strata and clusters."""

    ties: str
    strata: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse unknown ways to treat ties."""
        if self.ties not in TIES:
            raise MessageError(f"ties: expected one of {', '.join(TIES)}")


SCALE = aggregate("standard deviations of the columns over all sites", common=True)
BETA = aggregate("coefficients of the standardized columns", common=True)
RISK_SETS = (*OPEN_ROWS, LevelRowCounts)


@dataclass(slots=True, eq=False)
class SiteRisks(Objective):
    """One fit's rows: without the intercept's column, which has no effect on a partial likelihood."""

    RECOMPUTED: ClassVar = ("held", "last")
    """The parts that are made from the rows again when a session is resumed."""

    family = FAMILY
    request_type = CoxRequest
    requests = control("treatment of ties, and columns of strata and clusters", common=True)
    starts: ClassVar = {"response": summed("sums of weights, weighted events and events", behind=RISK_SETS)}
    own_fit: ClassVar = {
        "beta": own_part("coefficients", behind=RISK_SETS),
        "information": own_part("information", 2, RISK_SETS),
        "deviations": own_part("standard deviations of the columns", behind=RISK_SETS),
    }
    point: ClassVar = {"scale": SCALE, "beta": BETA}
    what: ClassVar = {
        "score": "score",
        "information": "information",
        "loglik": "partial log-likelihood",
    }
    meat = control("whether to sum products of scores, and whether by cluster")
    extra: ClassVar = CONCORDANCE
    unbounded = MONOTONE

    opened: OpenRows
    request: CoxRequest
    n: int
    held: tuple[RiskTable, Floats, Floats] | None = None
    last: tuple[bytes, PartialLikelihood] | None = None

    def recompute(self) -> None:
        """Sort the rows again when they are next needed."""
        self.held = self.last = None

    @property
    def rows(self) -> tuple[RiskTable, Floats, Floats]:
        """Risk table, design standardized by the site's own deviations (n, p), and offset (n,)."""
        if self.held is None:
            self.held = self._read()
        return self.held

    @property
    def intercept(self) -> int:
        """Columns of the open rows that the likelihood does not have."""
        return int(self.opened.question.intercept)

    def _read(self) -> tuple[RiskTable, Floats, Floats]:
        chunks = list(self.opened.chunks())
        X = np.ascontiguousarray(np.concatenate([part[:, self.intercept :] for _, part in chunks]))
        times = np.concatenate([rows.times for rows, _ in chunks if rows.times is not None])
        weights = [rows.weight for rows, _ in chunks if rows.weight is not None]
        offsets = [rows.offset for rows, _ in chunks if rows.offset is not None]
        table = RiskTable.of(
            times[:, 0],
            times[:, 1],
            np.concatenate([rows.y for rows, _ in chunks]) == 1.0,
            np.concatenate(weights) if weights else None,
            self.codes(self.request.strata) if self.request.strata else None,
            counts=self.opened.question.counts_rows,
        )
        return table, X, np.concatenate(offsets) if offsets else np.zeros(len(X))

    @classmethod
    def begin(cls, data: SiteData, state: State, request: CoxRequest) -> tuple[SiteRisks, dict[str, Array]]:
        """Sort the rows into risk sets, and count events: ``response`` (3,)."""
        opened = rows_of(state)
        question = opened.question
        if not question.has_times or not {*request.strata, *request.clusters} <= set(question.labels):
            raise MessageError(f"{data.name}: the model opened no times, or not these columns of groups")
        # Rows that were opened: in a dry run fewer than the site has.
        risks = cls(opened, request, sum(len(X) for _, X in opened.chunks()))
        # A stratum is a group of rows: with few of them, the sums of two analyses differ by these rows.
        code = risks.codes(request.strata) if request.strata else np.zeros(state.entities, dtype=np.int64)
        state.report(LevelRowCounts(", ".join(request.strata) or "rows", np.bincount(code).tolist()))
        used = np.flatnonzero(opened.used)
        if request.strata and len(used) == len(code):  # in a dry run the rows are no rows of a table
            state.report(RowGroups("", code, used, data.policy.min_level_count))
        table, _, _ = risks.rows
        if table.counts:
            require_numbers_of_rows(opened, table.weight, "coxph")
        if len(table.stop) and (table.stop == table.stop[0]).all() and table.event.any():
            raise DesignError(
                f"site {data.name!r}: all rows have the same time in {question.response!r}, so that events "
                "have no order. Check the column, or leave the site out. Matched sets, as of conditional "
                "logistic regression, order cases before controls, as in Surv(2 - case, case) ~ x + "
                "strata(set)"
            )
        events = table.weight[table.event].sum()
        return risks, {"response": np.array([table.weight.sum(), events, float(table.event.sum())])}

    @property
    def variant(self) -> str:
        """Treatment of ties."""
        return self.request.ties

    def at(self, own: Floats) -> PartialLikelihood:
        """Sum over the risk sets at coefficients (p,) of the site's own standardized columns."""
        key = own.tobytes()
        if self.last is None or self.last[0] != key:
            table, X, offset = self.rows
            self.last = key, PartialLikelihood.at(table, X, X @ own + offset, self.request.ties)
        return self.last[1]

    def place(self, scale: Floats, beta: Floats) -> Place:  # type: ignore[override]
        """Return coefficients of the site's own columns."""
        name, own = self.data.name, self.opened.scale[self.intercept :]
        check_lengths(name, scale=(scale, len(own)))
        if not (scale > 0.0).all():
            raise MessageError(f"{name}: array 'scale' must be positive")
        check_lengths(name, beta=(beta, len(own)))
        to_own = np.asarray(own / scale)
        return Place(to_own * beta, np.diag(to_own))

    def sums(self, own: Floats) -> SiteSums:
        """Sum over the risk sets."""
        now = self.at(own)
        # Without coefficients the weights depend on the data alone, and single out no row.
        return SiteSums(now.loglik, now.score(), now.information(), None if own.any() else NOTHING_SUMMED)

    def terms(self, own: Floats) -> Mapping[str, Sequence[RowTerms]]:
        """Return the terms of the sums; products of means at risk have a column for each row's own ones."""
        now = self.at(own)
        X, (residual, e) = now.X, np.array(self.factors(own))[:, :, None]
        died, one = now.table.event, np.ones((self.n, 1))
        # The score of a row less what it has observed: expected events times means of the rows at risk.
        means = now.row_scores() - X * residual
        means[died] += (now.table.weight[:, None] * now.means()[now.table.until - 1])[died]
        return {
            "score": [RowTerms(X, residual, one)],
            "information": [RowTerms(X, e, X), RowTerms(X, -one, means)],
        }

    def row_scores(self, own: Floats) -> Floats:
        """Return the score residual of every row."""
        return self.at(own).row_scores()

    def residuals(self, own: Floats) -> Floats:
        """Return observed less expected events of each row, (n, 1)."""
        now = self.at(own)
        return now.table.of_rows(self.factors(own)[0])[:, None]

    def weights(self, own: Floats) -> Floats:
        """Return the expected events of the rows, (1, n)."""
        return np.abs(self.factors(own)[1:])

    def factors(self, own: Floats, transforms: tuple[str, ...] = ()) -> list[Floats]:
        """Return weights of the rows in score and information, and in those times functions of time."""
        found = self.at(own)
        observed = np.where(found.table.event, found.table.weight, 0.0)
        out = [observed - found.expected(), found.expected()]
        for name in transforms:
            g = TRANSFORMS[name](found.table.times)
            at_events = np.zeros(len(observed))
            at_events[found.table.event] = g[found.table.until[found.table.event] - 1]
            out += [at_events * observed - found.expected(g), found.expected(g), found.expected(g**2)]
        return out

    def key_of(self, own: Floats, transforms: tuple[str, ...] = ()) -> tuple[bytes, tuple[str, ...]]:
        """Return a point: coefficients, and functions of time."""
        return own.tobytes(), transforms

    def blocks(self) -> Iterator[RowsWithWeights]:
        """Yield all rows at once."""

        def weights(point: tuple[bytes, tuple[str, ...]]) -> Floats:
            return np.column_stack(self.factors(np.frombuffer(point[0]), point[1]))

        table, X, _ = self.rows
        times = np.column_stack([table.start, table.stop, table.event, table.stratum])
        yield RowsWithWeights(weights, np.column_stack([np.ones(self.n), X]), slice(None), times, single=1)

    def facts_of(
        self, own: Floats, transforms: tuple[str, ...] = ()
    ) -> tuple[WorkingWeights | ScoreAndInformation, ...]:
        """Declare the weights that rows have in other sums at coefficients of the site's own columns."""
        point = self.key_of(own, transforms)
        return (
            WorkingWeights(lambda: np.abs(self.factors(own, transforms)[1:])),
            ScoreAndInformation(self.opened, self.n, point, self.blocks, among=self.opened.places),
        )

    @property
    def known(self) -> Bools:
        """Columns that vary at the site."""
        return self.opened.varies[self.intercept :]

    def lacks(self) -> str:
        """Require events."""
        return "" if self.rows[0].event.any() else NO_EVENTS

    @property
    def own_columns(self) -> dict[str, Array]:
        """Standard deviations of the columns."""
        return {"deviations": self.opened.scale[self.intercept :]}

    @property
    def own_numbers(self) -> int:
        """Coefficients, information and deviations."""
        p = len(self.known)
        return p * (p + 5) // 2

    def cluster_information(self, own: Floats, code: Ints, part: slice) -> Floats:
        """Return the information of each of a range of clusters, (g, p, p)."""
        inside = np.where((code >= part.start) & (code < part.stop), code - part.start, -1)
        return self.at(own).cluster_information(inside, part.stop - part.start)

    def margins(self, own: Floats, code: Ints, to_own: Floats) -> Margins:
        """Return the leverages of clusters in the levels of the site's own baseline hazards.

        Wang, Turner and Li (2023) correct scores of clusters of survival times in this form.
        """
        table = self.rows[0]
        # The site's own strata have baseline hazards of their own.
        observed = np.where(table.event, table.weight, 0.0)
        events = np.bincount(table.stratum, observed, len(table.first) - 1).astype(np.float64)
        margins = self.at(own).margins(code, events)
        return replace(margins, cross=margins.cross @ to_own)

    def at_estimate(self, own: Floats, code: Ints | None) -> dict[str, Array]:
        """Return ``pairs`` (4,) and ``squares`` (3,) of the concordance within strata."""
        table, X, offset = self.rows
        return concordance_sums(table, X @ own + offset, code)


enter_steps(SiteRisks)


def _predict(site: str, times: Floats, hazard: Floats, center: Floats) -> Predicted:
    """Predict from the cumulative hazard at mean columns, (m,)."""
    check_lengths(site, hazard=(hazard, len(times)))
    if (hazard < 0.0).any():
        raise MessageError(f"{site}: 'hazard' must not be negative")
    return Predicted(lambda eta: eta - float(center), lambda risk: np.exp(-np.exp(risk)[:, None] * hazard))


enter_evaluation(
    FAMILY,
    {
        "hazard": aggregate("cumulative hazard at mean columns, at these times", common=True),
        "center": aggregate("mean of the linear predictor of the fit", 0, common=True),
    },
    _predict,
)


def risks_of(state: State) -> SiteRisks:
    """Return this fit's rows; MessageError if the fit was not started here."""
    return rows_in(state, SiteRisks)


@step(FAMILY, "finish", takes={"scale": SCALE, "beta": BETA}, releases=RELEASES)
def sum_weighted(data: SiteData, state: State, scale: Floats, beta: Floats) -> dict[str, Array]:
    """Sum what the covariance with estimated weights needs, by row or cluster; see :func:`sum_stacked`."""
    risks = risks_of(state)
    own, T = risks.place(scale, beta)
    state.report(*risks.facts_at(own, risks.sums(own)))
    code = risks.codes(risks.clusters) if risks.clusters else None
    if code is not None:
        state.report(ClusterProducts(risks.shared_columns(code), risks.clusters))
    scores, key = risks.row_scores(own) @ T, risks.key_of(own)
    return sum_stacked(state, risks.opened, scores, risks.residuals(own), key, code)


@step(
    FAMILY,
    "sum_scores finish",
    takes={"scale": SCALE, "beta": BETA},
    releases={
        "score": summed("scores of coefficients that vary with time"),
        "cross": summed("information between constant and varying coefficients", 2),
        "square": summed("information of coefficients that vary with time", 2),
    },
    requests=control("function of time", common=True),
)
def sum_time_scores(data: SiteData, state: State, text: str, scale: Floats, beta: Floats) -> dict[str, Array]:
    """Sum score and information of the coefficients of x g(t) at an estimate (Grambsch and Therneau 1994)."""
    risks = risks_of(state)
    own, matrix = risks.place(scale, beta)
    if text not in TRANSFORMS:
        raise MessageError(f"{data.name}: function of time: expected one of {', '.join(TRANSFORMS)}")
    to_own = np.diag(matrix)
    products = np.outer(to_own, to_own)
    state.report(*risks.facts_of(own, (text,)))
    now = risks.at(own)
    g = np.asarray(TRANSFORMS[text](now.table.times))
    return {
        "score": to_own * now.score(g),
        "cross": products * now.information(g),
        "square": products * now.information(g**2),
    }


@step(
    FAMILY,
    "sum_scores",
    takes={"scale": SCALE, "beta": BETA, "edges": aggregate("ends of intervals of time", common=True)},
    releases={
        "hazard": summed("baseline hazard by interval, times rows"),
        "variance": summed("its variance for known coefficients, times squared rows"),
        "centers": summed("its product with the mean column at risk, times rows", 2),
    },
)
def sum_hazard(data: SiteData, state: State, scale: Floats, beta: Floats, edges: Floats) -> dict[str, Array]:
    """Sum the baseline hazard over intervals that end at `edges` (J,), for columns of zero.

    An interval has the hazard of the events whose times, averaged over blocks of events, are in it. Later
    events are left out. Released are ``hazard`` and ``variance`` (J,) and ``centers`` (J, p).
    """
    risks = risks_of(state)
    own = risks.place(scale, beta).own
    if (np.diff(edges) <= 0.0).any() or len(risks.rows[0].first) > 2:
        raise MessageError(f"{data.name}: 'edges' must ascend, and the model must have no strata")
    state.report(*risks.facts_of(own))
    found, (table, _, _) = risks.at(own), risks.rows
    # A time with several events stays whole; times are averaged until a block has enough of them.
    events = np.repeat(np.arange(len(table.times)), table.event_rows.astype(np.int64))
    means = block_means(
        np.zeros(len(events), dtype=np.int64), table.times[events], data.policy.min_level_count
    )
    interval = np.searchsorted(edges, means)
    state.report(LevelRowCounts("events by interval", np.bincount(interval).tolist()))
    share = 1.0 / table.event_rows[events]
    shift, width = (column[risks.intercept :] for column in (risks.opened.shift, risks.opened.scale))
    # At zero of the data's columns: the site's own columns are shifted.
    zero = float(np.exp(-(shift / width) @ own))
    hazard, variance, centers = found.hazard()
    centers = (centers * width + hazard[:, None] * shift) * zero

    def by_interval(values: Floats) -> Floats:
        out = np.zeros((len(edges) + 1, *values.shape[1:]))
        np.add.at(out, interval, (values[events].T * share).T)
        return out[:-1]

    return {
        "hazard": risks.n * by_interval(hazard * zero),
        "variance": risks.n**2 * by_interval(variance * zero**2),
        "centers": risks.n * by_interval(centers),
    }
