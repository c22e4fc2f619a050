"""Fisher scoring for estimating equations from sums over the clusters of all sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import ConvergenceTest, last_digit
from fedstat.inference.heterogeneity import SiteFit
from fedstat.inference.homogeneity_tests import SiteWelchTerms
from fedstat.inference.recession import RecessionTest
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.gee.steps import GEERequest, correlation
from fedstat.models.glm.fit import Coordinates
from fedstat.models.glm.separation import Separation, check_rank
from fedstat.models.horizontal.clusters import ClusterChoice, Clustering, SharedLabels
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.models.rows.estimated_weights import STACKED, stacked_sums
from fedstat.models.rows.newton import OwnEstimate, few_weigh, open_rows, site_fits
from fedstat.typing import Array, Floats, Matrix, Vector

MOST_HALVINGS = 20
BISECTIONS = 6
"""Steps to the end of the range of an exchangeable correlation, which the largest cluster decides."""
NEAR_END = 0.9
"""Share of the end of its range at which a correlation stays: nearer, one cluster has most weight."""
CORRECTIONS = {
    "kauermann_carroll": "CR2",
    "bias_reduced": "CR3",
    "robust": "CR0",
    "naive": "CR0",
    STACKED: "CR0",
}
"""Corrections for the leverage of clusters, by covariance estimator; the first is the default."""


@dataclass(frozen=True, slots=True, eq=False)
class GEESums:
    """Sums over sites at a point, for columns standardized over all sites; see the step ``sum_scores``."""

    score: Vector
    information: Matrix
    totals: Annotated[Floats, "3"]
    pairs: Annotated[Floats, "3"]

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> GEESums | None:
        """Add up replies; None if some site gives no sums."""
        if few_weigh(replies) or int(add(replies, "inside")) < len(replies):
            return None
        return cls(*(add(replies, name) for name in ("score", "information", "totals", "pairs")))


@dataclass(frozen=True, slots=True, eq=False)
class GEEFit:
    """Solution of the estimating equations, for columns standardized over all sites.

    `total` are the sums at `gamma` (p,) and the working correlation `rho`; `counts` (4,) those of the step
    ``start``; `meat` (p, p) the sum of outer products of clusters' functions, corrected as `cov_type` says,
    `clustering` describes the clusters, `spread` (A, 4) estimated weights by arm, and `omega` (p, p) is the
    information of independent rows.
    `outside` is an estimate of the correlation outside the range in which all clusters' correlations are
    positive definite, with the ends of the range; the fit then has a value inside. `trace` has the length of
    the step in standard errors, its largest change of a coefficient, and the correlation, by evaluation.
    `local` are the sites' own fits in the units of the data.
    """

    gamma: Vector
    rho: float
    total: GEESums
    meat: Matrix
    clustering: Clustering
    omega: Matrix
    coordinates: Coordinates
    counts: Annotated[Floats, "4"]
    spread: Annotated[Floats, "A 4"] | None
    scale: float
    cov_type: str
    request: GEERequest
    distribution: DistributionSpec
    trace: Annotated[Floats, "E 3"]
    converged: bool
    masked: bool
    outside: Annotated[Floats, "3"] | None
    local: Annotated[tuple[SiteFit, ...], "K"]
    shared: tuple[SharedLabels, ...] = ()

    @property
    def design(self) -> RowsDesign:
        """Columns."""
        return self.coordinates.design

    @property
    def totals(self) -> tuple[float, float, float]:
        """Number of rows, deviance, Pearson's statistic."""
        n, deviance, pearson = self.total.totals.tolist()
        return n, deviance, pearson

    @property
    def clusters(self) -> int:
        """Number of clusters of all sites."""
        return round(float(self.counts[0]))

    @property
    def params(self) -> Floats:
        """Coefficients in the units of the data."""
        return np.asarray(self.coordinates.back @ self.gamma)

    @property
    def naive(self) -> Floats:
        """Model-based covariance in the units of the data."""
        back = self.coordinates.back
        return np.asarray(self.scale * back @ np.linalg.inv(self.total.information) @ back.T)

    @property
    def cov(self) -> Floats:
        """Covariance in the units of the data (Liang and Zeger 1986, theorem 2)."""
        if self.cov_type == "naive":
            return self.naive
        half = self.coordinates.back @ np.linalg.inv(self.total.information)
        return np.asarray(half @ self.meat @ half.T)


@dataclass(slots=True, eq=False)
class GEEScoring:
    """Fisher scoring with moment estimators of the correlation, from the start of a GLM's iteration."""

    session: RowsSession
    request: GEERequest
    distribution: DistributionSpec
    maxiter: int = 60
    tol: float = 1e-8
    coordinates: Coordinates = field(init=False)
    counts: Floats = field(init=False)
    alone: list[Reply] = field(default_factory=list)
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    outside: Floats | None = None
    shared: tuple[SharedLabels, ...] = ()

    def open(self, local: bool) -> FitProtocol[None]:
        """Open the rows, sort them into clusters, and fit every site's own."""
        opened = open_rows(self.session, to_json(self.request), local, ((self.request.groups,),))
        design, started, self.alone, self.shared = yield from opened
        own = np.array([reply.arrays["columns"] for reply in self.alone]) if local else None
        self.coordinates = Coordinates.of(design, own)
        self.counts, names = add(started, "counts"), design.names
        if self.counts[0] <= len(names):
            raise EstimationError(
                f"{self.counts[0]:.0f} clusters of all sites for {len(names)} coefficients; expected more "
                "clusters than coefficients. Use fewer terms."
            )

    def run(self, cov_type: str, scale: float | None, local: bool) -> FitProtocol[GEEFit]:
        """Open the rows, iterate, and request the products of the clusters' functions."""
        yield from self.open(local)
        gamma, rho, total, converged = yield from self.iterate()
        meat, clustering, omega = yield from self.finish(gamma, rho, total, cov_type)
        spread = None
        if cov_type == STACKED:
            stacked = yield from stacked_sums(self.session, self.point(gamma, rho))
            meat, spread = stacked.meat, stacked.spread
        columns = self.coordinates
        return GEEFit(
            gamma=gamma,
            rho=rho,
            total=total,
            meat=meat,
            clustering=clustering,
            omega=omega,
            coordinates=self.coordinates,
            counts=self.counts,
            spread=spread,
            scale=self.dispersion(total) if scale is None else scale,
            cov_type=cov_type,
            request=self.request,
            distribution=self.distribution,
            trace=np.array(self.trace),
            converged=converged,
            masked=self.session.masked,
            outside=self.outside,
            local=site_fits(self.session, columns.design.n, self.alone, self.own_fit, None, columns.back),
            shared=self.shared,
        )

    def point(self, gamma: Floats | None, rho: float) -> dict[str, Array]:
        """Return the arrays that name a point."""
        columns = self.coordinates
        arrays = {"shift": columns.shift, "scale": columns.scale, "rho": np.array(rho)}
        return arrays if gamma is None else arrays | {"beta": gamma}

    def evaluate(self, gamma: Floats | None, rho: float) -> FitProtocol[GEESums | None]:
        """Request the sums at a point; None if they are not defined there."""
        return GEESums.of((yield self.session.request_all("sum_scores", self.point(gamma, rho))))

    def correlation(self, total: GEESums) -> float:
        """Estimate the working correlation at a point."""
        p = len(total.score)
        return correlation(self.request.structure, total.pairs, self.counts, total.totals[[0, 2]], p)

    def dispersion(self, total: GEESums) -> float:
        """Estimate the scale as statsmodels: Pearson's statistic by degrees of freedom, or one."""
        if not self.distribution.estimates_scale:
            return 1.0
        n, _, pearson = total.totals.tolist()
        return float(pearson / (self.counts[1] * (n - len(total.score)) / n))

    @staticmethod
    def _newton_step(total: GEESums) -> Floats:
        return np.asarray(np.linalg.solve(total.information, total.score), dtype=np.float64)

    def iterate(self) -> FitProtocol[tuple[Floats, float, GEESums, bool]]:
        """Take steps until coefficients and correlation change little."""
        total = yield from self.evaluate(None, 0.0)
        if total is None:
            raise EstimationError("the sums at the start are not finite; measure the offset in other units")
        check_rank(total.information, self.coordinates)
        gamma, rho = np.zeros(len(total.score)), 0.0
        step, turn = self._newton_step(total), 0.0
        n, before = float(total.totals[0]), total.information
        test, recession = ConvergenceTest(n, self.tol), RecessionTest(n, total.information)
        while True:
            share, first = 1.0, self.outside is None and turn != 0.0
            for _ in range(MOST_HALVINGS):
                found = yield from self.evaluate(gamma + share * step, rho + share * turn)
                if found is not None:
                    break
                if first and (yield from self.evaluate(gamma, rho + turn)) is None:
                    # Sums were defined at these coefficients: the correlation is outside its range.
                    turn, first = (yield from self.inside_range(gamma, rho + turn)) - rho, False
                else:
                    share, first = share / 2.0, False
            else:
                raise EstimationError(self.no_step())
            before, gamma, rho, total = total.information, gamma + share * step, rho + share * turn, found
            step = self._newton_step(total)
            turn = 0.0 if self.outside is not None else self.correlation(total) - rho
            size = float(np.sqrt(max(float(step @ total.score), 0.0)))
            self.trace.append((size, float(np.abs(step).max()), rho))
            # The correlation converges linearly: what is left is larger than its last change.
            # There is no likelihood, and the correlation changes the step after a small one.
            least = last_digit(gamma, total.information)
            converged = test.reached(0.0, max(size - least, 0.0), at_rest=False)
            converged = converged and abs(turn) < self.tol / 10.0
            # A correlation that still changes moves coefficients as slowly.
            away = None
            if abs(turn) < max(self.tol, size) or recession.risen:
                away = recession.far(total.information, gamma, step, size, ended=converged)
            if away is not None:
                beyond = yield from self.evaluate(gamma + away, rho)
                # There is no likelihood: the score along the way takes its place.
                if beyond is not None and recession.rises(float(beyond.score @ away) + size**2, 0.0):
                    if recession.certain(beyond.information):
                        separation = Separation(step, before, total.information, len(self.trace))
                        raise separation.error(self.session.sites, self.coordinates)
                    before, gamma, total, converged = total.information, gamma + away, beyond, False
                    step = self._newton_step(total)
                    turn = 0.0 if self.outside is not None else self.correlation(total) - rho
            if converged or len(self.trace) >= self.maxiter:
                return gamma, rho, total, converged

    def inside_range(self, gamma: Floats, wanted: float) -> FitProtocol[float]:
        """Return a correlation inside its range, near the end beyond which the estimate is."""
        low, high = (-1.0 if self.request.structure == "ar1" else np.nan), 1.0
        if wanted < 0.0 and np.isnan(low):
            # The largest cluster of any site decides, whose size no site releases.
            low, beyond = 0.0, wanted
            for _ in range(BISECTIONS):
                middle = (low + beyond) / 2.0
                defined = (yield from self.evaluate(gamma, middle)) is not None
                low, beyond = (middle, beyond) if defined else (low, middle)
        self.outside = np.array([wanted, low, high])
        return NEAR_END * (low if wanted < 0.0 else high)

    def no_step(self) -> str:
        """Say why no step leads to defined sums."""
        causes = ["few rows have nearly all weight"]
        remedies = ["transform columns with long tails"]
        if not self.distribution.least_squares:
            causes.insert(0, f"a mean leaves the domain of family {self.distribution}")
            remedies.insert(0, "choose another link")
        return (
            f"no step leads to defined sums ({len(self.trace)} evaluations): {', or '.join(causes)}. "
            f"{', or '.join(remedies).capitalize()}"
        )

    def finish(
        self, gamma: Floats, rho: float, total: GEESums, cov_type: str
    ) -> FitProtocol[tuple[Floats, Clustering, Floats]]:
        """Request the outer products of the clusters' functions, and the information of independent rows."""
        choice = ClusterChoice(self.request.groups, CORRECTIONS[cov_type], "cov_type='robust'")
        arrays = self.point(gamma, rho) | choice.arrays(total.information)
        replies = yield self.session.request_all("finish", arrays)
        meat, clustering = choice.added(replies, round(float(self.counts[0])))
        return meat, clustering, add(replies, "omega")

    def own_fit(self, k: int, reply: Reply) -> OwnEstimate:
        """Return coefficients and covariance of a site's own fit in the units of the data."""
        columns, arrays = self.coordinates, reply.arrays
        varies, p = columns.varies(k), len(columns.shift)
        precision = np.zeros((p, p))
        inside = np.ix_(varies, varies)
        precision[inside] = np.linalg.inv(arrays["cov"][inside])
        beta, cov = columns.local(k, arrays["beta"], precision)
        if not np.isfinite(cov).all():
            return beta, cov, None
        information = np.asarray(np.linalg.inv(cov))
        return beta, cov, SiteWelchTerms(information @ beta, information, float(arrays["clusters"]) - p)
