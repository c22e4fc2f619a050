"""Newton's method with halved steps for a log-likelihood that is a sum over sites."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import ConvergenceTest
from fedstat.inference.heterogeneity import NOT_REQUESTED, MaskedSiteSums, SiteFit
from fedstat.inference.homogeneity_tests import SiteWelchTerms
from fedstat.inference.recession import LARGE_STEP, RecessionTest, continues
from fedstat.models.horizontal.clusters import ClusterChoice, LabelComparison, SharedLabels
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Array, Bools, Floats, Ints

MOST_HALVINGS = 30
FALLING = 0.9
"""Largest ratio of successive log-likelihoods; it goes to 1 / e if a logit grows without bound."""
TINY = float(np.finfo(float).tiny)
OWN_ITERATIONS, OWN_HALVINGS, OWN_TOLERANCE = 30, 20, 1e-10
SINGULAR, STUCK = "information is singular", "no step increases the log-likelihood"
INDEFINITE = 1e-6
"""Size of a negative eigenvalue of a scaled information that is no rounding error."""
FLAT = 1e-12
"""Share of the largest eigenvalue below which a scaled information counts as singular."""
Parameters: TypeAlias = Annotated[Floats, "q"]
Products: TypeAlias = Annotated[Floats, "q q"]
OwnEstimate: TypeAlias = tuple[Floats, Floats, SiteWelchTerms | None]
"""Parameters and covariance of a site's own fit, and its part of a test where dispersions differ."""


class NewtonPoint(NamedTuple):
    """One evaluation: log-likelihood, Newton's step in standard errors, its largest move of a parameter."""

    loglik: float
    step: float
    move: float


@dataclass(frozen=True, slots=True, eq=False)
class LikelihoodSums:
    """Sums over sites at parameters of standardized columns, and the sites' parts unless masked."""

    score: Parameters
    information: Products
    loglik: float
    by_site: Annotated[list[tuple[Parameters, Products]], "K"] | None

    @classmethod
    def of(cls, replies: Sequence[Reply], masked: bool) -> Self | None:
        """Add up replies; None if some site asks for other parameters."""
        if few_weigh(replies):
            return None
        parts = [(reply.arrays["score"], reply.arrays["information"]) for reply in replies]
        return cls(
            add(replies, "score"),
            add(replies, "information"),
            float(add(replies, "loglik")),
            None if masked else parts,
        )

    def step(self, places: Ints | slice = slice(None)) -> Floats:
        """Return Newton's step in some of the parameters."""
        return newton_step(self.score[places], self.information[places][:, places])

    def masked_parts(self, forward: Floats, apart: Floats | None) -> MaskedSiteSums | None:
        """Comparison of the sites if sums are masked; `forward` takes parameters to standardized columns."""
        if apart is None or self.by_site is not None:
            return None
        return MaskedSiteSums(forward.T @ self.score, forward.T @ self.information @ forward, apart)


SumsT = TypeVar("SumsT", bound=LikelihoodSums)


def few_weigh(replies: Sequence[Reply]) -> bool:
    """Return whether a site gave no sums because only few of its rows would have weight in them."""
    return int(add(replies, "spread")) < len(replies)


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
class LikelihoodNewton(Generic[SumsT]):
    """Newton's method with halved steps; a family has a step ``sum_scores`` and the errors.

    `sums` reads the replies, `trace` has the points of the iteration, `few` is whether the last point had few
    rows with weight at a site, and `halved` counts the halved steps in a row.
    """

    sums: ClassVar[type[Any]] = LikelihoodSums
    session: RowsSession
    request: Any
    maxiter: int = 50
    tol: float = 1e-8
    trace: list[NewtonPoint] = field(default_factory=list)
    few: bool = False
    halved: int = 0
    jumped: bool = False

    def evaluate(self, point: dict[str, Array]) -> FitProtocol[SumsT | None]:
        """Request the sums at a point; None if some site asks for other parameters."""
        return self.read((yield self.session.request_all("sum_scores", point)))

    def read(self, replies: Sequence[Reply]) -> SumsT | None:
        """Add up the sums at a point."""
        self.few = few_weigh(replies)
        found: SumsT | None = self.sums.of(replies, self.session.masked)
        return found

    def attempt(self, point: dict[str, Array], total: SumsT) -> FitProtocol[SumsT | None]:
        """Request the sums at the end of a step from a point with sums `total`."""
        return (yield from self.evaluate(point))

    def dispersion(self, total: SumsT) -> float:
        """Return what log-likelihood and information are divided by."""
        return 1.0

    def settled(self, total: SumsT) -> bool:
        """Return whether a point may be the last, for reasons other than its step."""
        return True

    def examines(self) -> bool:
        """Return whether to examine directions of the iteration for a maximum at infinity."""
        return True

    def check_progress(self) -> None:
        """Raise an error where steps lead nowhere."""

    def assess(self, total: SumsT, step: Floats, test: ConvergenceTest) -> bool:
        """Add a point to the trace, and return whether it is the maximum."""
        unit = max(self.dispersion(total), TINY)
        size = float(np.sqrt(max(float(step @ total.score), 0.0) / unit))
        self.trace.append(NewtonPoint(total.loglik, size, float(np.abs(step).max(initial=0.0))))
        settled = self.settled(total)
        return test.reached(total.loglik / unit, size) and settled

    def ascend(
        self,
        point: Callable[[Floats], dict[str, Array]],
        gamma: Floats,
        total: SumsT,
        *,
        n: float,
        at_infinity: Callable[[Floats, Floats, Floats, bool], EstimationError],
        stuck: str,
        allowed: Callable[[Floats], bool] = lambda trial: True,
        free: Bools | slice = slice(None),
    ) -> FitProtocol[tuple[Floats, SumsT, Floats, bool]]:
        """Take steps in the `free` parameters to the maximum.

        `point` names the arrays of parameters, and `n` is the number of rows; `at_infinity` makes the error
        for a likelihood without a maximum from the step, the information at the last two points, and whether
        the outcomes of all rows are known to be separated; `stuck` is the text where no step increases the
        likelihood. Returns parameters, sums, next step, and whether the maximum was reached.
        """
        places, test = np.arange(len(gamma))[free], ConvergenceTest(n, self.tol)
        inside = np.ix_(places, places)
        self.halved, self.jumped = 0, False
        recession, before = RecessionTest(n, total.information[inside]), total.information
        while True:
            step = displaced(np.zeros_like(gamma), places, total.step(places))
            converged = self.assess(total, step, test)
            ended = converged or len(self.trace) >= self.maxiter
            if not ended:
                self.check_progress()
            if self.examines():
                now, size = total.information[inside], self.trace[-1].step
                away = recession.far(now, gamma[places], step[places], size, ended=converged)
                if away is not None and allowed(far := displaced(gamma, places, away)):
                    beyond = yield from self.evaluate(point(far))
                    unit = max(self.dispersion(total), TINY)
                    if beyond is not None and recession.rises(beyond.loglik / unit, total.loglik / unit):
                        if recession.certain(beyond.information):
                            raise at_infinity(step, before, total.information, False)
                        before, gamma, total, self.jumped = total.information, far, beyond, True
                        continue
            if ended:
                return gamma, total, step, converged
            for halving in range(MOST_HALVINGS):
                trial = gamma + step * 0.5**halving
                if not allowed(trial):
                    continue
                new = yield from self.attempt(point(trial), total)
                if new is not None and not falls(new.loglik, total.loglik):
                    break
                # Few rows have weight after growing steps: all outcomes are separated, and no step helps.
                if self.few and self.is_separated():
                    raise at_infinity(step, before, total.information, True)
            else:
                raise EstimationError(stuck.format(len(self.trace)))
            self.halved = self.halved + 1 if halving else 0
            before, gamma, total = total.information, trial, new

    def is_separated(self) -> bool:
        """Return whether steps grow or continue as the likelihood rises, as with separated outcomes."""
        last = self.trace[-3:]
        growing = len(last) == 3 and last[0].move < last[1].move < last[2].move
        if self.jumped or (growing and last[2].loglik > FALLING * last[1].loglik):
            return True
        return continues([row.move for row in self.trace], [row.step for row in self.trace])

    def finish(
        self,
        point: dict[str, Array],
        meat: Sequence[bool],
        clusters: ClusterChoice | None,
        information: Floats,
    ) -> FitProtocol[list[Reply]]:
        """Request the sums at the estimate: products of scores, and the comparison of the sites."""
        # The score test takes the information as that of a likelihood.
        apart = self.session.masked and not self.session.agreement.question.propensities
        arrays = point | {"meat": np.array(meat), "apart": np.array(apart)}
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


def falls(new: float, old: float) -> bool:
    """Return whether a log-likelihood falls by more than rounding error."""
    return not new > old - 1e-9 * (abs(old) + 1e-3)


def newton_step(score: Floats, information: Floats) -> Floats:
    """Return Newton's step from a point; an ascent where the observed information is not yet positive."""
    size = np.sqrt(np.maximum(np.abs(np.diag(information)), np.finfo(float).tiny))
    curvatures, axes = np.linalg.eigh(information / np.outer(size, size))
    if curvatures.min(initial=0.0) < -INDEFINITE:
        curvatures = np.maximum(np.abs(curvatures), INDEFINITE)
    # Along an axis without curvature, the step is zero: it is the shortest of all solutions.
    flat = np.abs(curvatures) <= FLAT * np.abs(curvatures).max(initial=0.0)
    along = np.where(flat, 0.0, axes.T @ (score / size)) / np.where(flat, 1.0, curvatures)
    return np.asarray(axes @ along / size)


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
    singular at the start, that no halved step increases the log-likelihood, or `at_infinity`.
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
        else:
            return beta, information, STUCK
        beta, (loglik, score, information) = trial, found
        if gain < OWN_TOLERANCE:
            return beta, information, at_infinity if np.abs(move).max() > LARGE_STEP else ""
    return beta, information, at_infinity
