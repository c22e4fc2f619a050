"""Newton's method with halved steps for a log-likelihood that is a sum over sites."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import ConvergenceTest
from fedstat.inference.heterogeneity import NOT_REQUESTED, MaskedSiteSums, SiteFit
from fedstat.inference.homogeneity_tests import SiteWelchTerms
from fedstat.inference.recession import LARGE_STEP, RecessionTest
from fedstat.models.horizontal.clusters import ClusterChoice, LabelComparison, SharedLabels
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Array, Bools, Floats, Ints

MOST_HALVINGS = 20
OWN_ITERATIONS, OWN_HALVINGS, OWN_TOLERANCE = 30, 20, 1e-10
SINGULAR = "information is singular"
Parameters: TypeAlias = Annotated[Floats, "q"]
Products: TypeAlias = Annotated[Floats, "q q"]
OwnEstimate: TypeAlias = tuple[Floats, Floats, SiteWelchTerms | None]
"""Parameters and covariance of a site's own fit, and its part of a test where dispersions differ."""


@dataclass(frozen=True, slots=True, eq=False)
class LikelihoodSums:
    """Sums over sites at parameters of standardized columns, and the sites' parts unless masked."""

    score: Parameters
    information: Products
    loglik: float
    by_site: Annotated[list[tuple[Parameters, Products]], "K"] | None

    @classmethod
    def of(cls, replies: Sequence[Reply], masked: bool) -> LikelihoodSums | None:
        """Add up replies; None if some site asks for other parameters."""
        if int(add(replies, "spread")) < len(replies):
            return None
        parts = [(reply.arrays["score"], reply.arrays["information"]) for reply in replies]
        return cls(
            add(replies, "score"),
            add(replies, "information"),
            float(add(replies, "loglik")),
            None if masked else parts,
        )

    def masked_parts(self, forward: Floats, apart: Floats | None) -> MaskedSiteSums | None:
        """Comparison of the sites if sums are masked; `forward` takes parameters to standardized columns."""
        if apart is None or self.by_site is not None:
            return None
        return MaskedSiteSums(forward.T @ self.score, forward.T @ self.information @ forward, apart)


def open_rows(
    session: RowsSession, text: str, local: bool, groups: Sequence[Sequence[str]] = ()
) -> FitProtocol[tuple[RowsDesign, list[Reply], list[Reply], tuple[SharedLabels, ...]]]:
    """Open the rows in one round, since every round needs every site.

    Returns the design, the replies to ``start``, whose request is `text`, the sites' own fits if they are
    `local`, and labels of `groups` that several sites have.
    """
    K = len(session.sites)
    requests = session.opening() + session.request_all("start", {}, text)
    requests += session.request_all("fit_alone", {}) if local else []
    compared = LabelComparison(session, tuple(map(tuple, groups)))
    shared, replies = compared.split((yield requests + compared.requests()))
    return session.opened(replies), replies[2 * K : 3 * K], replies[3 * K :], shared


@dataclass(slots=True, eq=False)
class LikelihoodNewton:
    """Newton's method with halved steps; a family has a step ``sum_scores`` and the errors."""

    session: RowsSession
    request: Any
    maxiter: int = 50
    tol: float = 1e-8
    trace: list[tuple[float, float, float]] = field(default_factory=list)

    def evaluate(self, point: dict[str, Array]) -> FitProtocol[LikelihoodSums | None]:
        """Request the sums at a point."""
        replies = yield self.session.request_all("sum_scores", point)
        return LikelihoodSums.of(replies, self.session.masked)

    def ascend(
        self,
        point: Callable[[Floats], dict[str, Array]],
        gamma: Floats,
        total: LikelihoodSums,
        *,
        n: float,
        at_infinity: Callable[[Floats, Floats, Floats], EstimationError],
        stuck: str,
        allowed: Callable[[Floats], bool] = lambda trial: True,
        free: Bools | slice = slice(None),
    ) -> FitProtocol[tuple[Floats, LikelihoodSums, Floats, bool]]:
        """Take steps in the `free` parameters to the maximum.

        `point` names the arrays of parameters, and `n` is the number of rows; `at_infinity` makes the error
        for a likelihood without a maximum from the step and the information at the last two points, and
        `stuck` is the text where no step increases the likelihood. Returns parameters, sums, next step, and
        whether the maximum was reached.
        """
        places, test = np.arange(len(gamma))[free], ConvergenceTest(n, self.tol)
        recession, before = RecessionTest(n, total.information[np.ix_(places, places)]), total.information
        while True:
            step = np.zeros_like(gamma)
            step[places] = newton_step(total.score[places], total.information[np.ix_(places, places)])
            size = float(np.sqrt(max(float(step @ total.score), 0.0)))
            move = float(np.abs(step).max(initial=0.0))
            self.trace.append((total.loglik, size, move))
            converged = test.reached(total.loglik, size)
            away = recession.far(
                total.information[np.ix_(places, places)],
                gamma[places],
                step[places],
                size,
                ended=converged,
            )
            if away is not None and allowed(far := displaced(gamma, places, away)):
                beyond = yield from self.evaluate(point(far))
                if beyond is not None and recession.rises(beyond.loglik, total.loglik):
                    if recession.certain(beyond.information):
                        raise at_infinity(step, before, total.information)
                    before, gamma, total = total.information, far, beyond
                    continue
            if converged or len(self.trace) >= self.maxiter:
                return gamma, total, step, converged
            for halving in range(MOST_HALVINGS):
                trial = gamma + step * 0.5**halving
                if not allowed(trial):
                    continue
                new = yield from self.evaluate(point(trial))
                if new is not None and new.loglik > total.loglik - 1e-9 * (abs(total.loglik) + 1e-3):
                    break
            else:
                raise EstimationError(stuck.format(len(self.trace)))
            before, gamma, total = total.information, trial, new

    def finish(
        self,
        point: dict[str, Array],
        meat: Sequence[bool],
        clusters: ClusterChoice | None,
        information: Floats,
    ) -> FitProtocol[list[Reply]]:
        """Request the sums at the estimate: products of scores, and the comparison of the sites."""
        arrays = point | {"meat": np.array(meat), "apart": np.array(self.session.masked)}
        if clusters is not None:
            arrays |= clusters.arrays(information)
        return (yield self.session.request_all("finish", arrays))


def site_fits(
    session: RowsSession,
    n: Ints,
    alone: Sequence[Reply],
    read: Callable[[int, Reply], OwnEstimate],
    by_site: Sequence[tuple[Floats, Floats]] | None,
    forward: Floats,
) -> tuple[SiteFit, ...]:
    """Sites' own fits, and their parts of the sums, in the units of the data.

    `read` reads the reply of a site that found a fit. `by_site` are the parts of score and information unless
    masked, and `forward` (q, q) takes parameters in units of the data to those of standardized columns.
    """
    out = []
    for k, site in enumerate(session.sites):
        beta = cov = own = score = information = None
        problem = str(json.loads(alone[k].text)["problem"]) if alone else NOT_REQUESTED
        if not problem:
            beta, cov, own = read(k, alone[k])
        if by_site is not None:
            score, information = by_site[k]
            score, information = forward.T @ score, forward.T @ information @ forward
        out.append(SiteFit(site, int(n[k]), beta, cov, problem, score, information, own))
    return tuple(out)


def newton_step(score: Floats, information: Floats) -> Floats:
    """Return Newton's step from a point."""
    size = np.sqrt(np.maximum(np.diag(information), np.finfo(float).tiny))
    scaled = information / np.outer(size, size)
    return np.asarray(np.linalg.lstsq(scaled, score / size, rcond=1e-12)[0] / size)


def displaced(gamma: Floats, places: Ints, step: Floats) -> Floats:
    """Add a step in some of the parameters."""
    out = gamma.copy()
    out[places] += step
    return out


def maximize_own(
    at: Callable[[Floats], tuple[float, Floats, Floats]], beta: Floats, at_infinity: str
) -> tuple[Floats, Floats, str]:
    """Maximize a site's own log-likelihood: parameters, information, and a problem or ''.

    `at` takes parameters to log-likelihood, score and information. The problem is that the information is
    singular at the start, or `at_infinity`.
    """
    start = beta
    loglik, score, information = at(beta)
    for _ in range(OWN_ITERATIONS):
        size = np.sqrt(np.maximum(np.diag(information), 0.0))
        if not len(beta) or (size == 0.0).any():
            return beta, information, SINGULAR
        try:
            np.linalg.cholesky(information / np.outer(size, size) - 1e-12 * np.eye(len(beta)))
        except np.linalg.LinAlgError:
            return beta, information, SINGULAR if beta is start else at_infinity
        move = np.linalg.solve(information, score)
        gain = float(move @ score)
        for halving in range(OWN_HALVINGS):
            trial = beta + move * 0.5**halving
            with np.errstate(all="ignore"):
                found = at(trial)
            if found[0] > loglik - 1e-9 * (abs(loglik) + 1.0):
                break
        beta, (loglik, score, information) = trial, found
        if gain < OWN_TOLERANCE:
            return beta, information, at_infinity if np.abs(move).max() > LARGE_STEP else ""
    return beta, information, at_infinity
