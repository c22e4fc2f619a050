"""Newton's method from sums over sites: the fit of the pooled table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.design_rows import RowsAgreement, open_asks, opened_design
from fedstat.federation.engine import Rounds
from fedstat.federation.message import Ask, Reply
from fedstat.kernels.glm_family import FamilySpec
from fedstat.models.glm.coordinates import Coordinates
from fedstat.models.glm.problems import PATIENCE, Runaway, check_rank, diverges
from fedstat.models.glm.steps import FAMILY
from fedstat.typing import Array, Floats

MAX_HALVINGS = 30
TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True)
class Options:
    """How the maximum is sought.

    Parameters
    ----------
    maxiter : int
        Most evaluations of the score.
    tol : float
        Stop when Newton's step is below, in standard errors.
    rounds : int or None
        Take so many steps from the mean of the sites' own fits, and no more; None: to the maximum.
    """

    maxiter: int = 50
    tol: float = 1e-8
    rounds: int | None = None


@dataclass(frozen=True, slots=True)
class LocalFit:
    """One site's own fit in the units of the data, and its part of the sums at the estimate.

    Parameters
    ----------
    site : str
    n : int
    beta : (p,) array or None
    cov : (p, p) array or None
    problem : str
        Why there is no fit.
    score, information : arrays
        At the estimate of all sites, dispersion one.
    """

    site: str
    n: int
    beta: Floats | None
    cov: Floats | None
    problem: str
    score: Floats
    information: Floats


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One evaluation: deviance, Newton's step in standard errors, its largest move of a coefficient."""

    deviance: float
    step: float
    move: float


@dataclass(slots=True, eq=False)
class Total:
    """Sums over sites at one point, in standardised coordinates."""

    score: Floats
    information: Floats
    observed: Floats | None
    weight: float
    deviance: float
    pearson: float
    null: Floats | None
    by_site: list[tuple[Floats, Floats]]

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> Total | None:
        """Add up replies in their order; None where a mean lies outside the family's domain."""
        if not all(reply.arrays["inside"] for reply in replies):
            return None

        def add(name: str) -> Array:
            total: Array = np.sum([reply.arrays[name] for reply in replies], axis=0)
            return total

        weight, deviance, pearson = add("totals").tolist()
        first = replies[0].arrays
        return cls(
            add("score"),
            add("information"),
            add("observed") if "observed" in first else None,
            weight,
            deviance,
            pearson,
            add("null") if "null" in first else None,
            [(reply.arrays["score"], reply.arrays["information"]) for reply in replies],
        )

    def step(self) -> tuple[Floats, Floats]:
        """Newton's step and the matrix behind it: the observed information where it is definite."""
        for matrix in (self.observed, self.information):
            if matrix is None:
                continue
            size = np.sqrt(np.abs(np.diag(matrix)))
            scaled = matrix / np.outer(size, size)
            try:
                np.linalg.cholesky(scaled)
            except np.linalg.LinAlgError:
                continue
            return np.linalg.solve(scaled, self.score / size) / size, matrix
        raise EstimationError("the information is not positive definite")


@dataclass(slots=True, eq=False)
class GLMFit:
    """What the iteration hands over, in standardised coordinates where not said otherwise.

    Parameters
    ----------
    gamma : (p,) array
    total : Total
        At `gamma`.
    coordinates : Coordinates
    dispersion : float
    null : float
        Intercept of the model without covariates.
    fit : (3,) array
        Log-likelihood; log-likelihood and deviance without covariates; NaN where not defined.
    meat : (p, p) array or None
    trace : tuple of TraceRow
    converged : bool
    reason : str
    local : tuple of LocalFit
        In the units of the data.
    n : int
        Rows.
    rounds : int or None
        Newton steps that were asked for; None: to the maximum.
    family : FamilySpec
    """

    gamma: Floats
    total: Total
    coordinates: Coordinates
    dispersion: float
    null: float
    fit: Floats
    meat: Floats | None
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str
    local: tuple[LocalFit, ...]
    n: int
    rounds: int | None
    family: FamilySpec

    @property
    def params(self) -> Floats:
        """Coefficients in the units of the data."""
        return self.coordinates.back @ self.gamma


@dataclass(slots=True)
class Session:
    """Addresses of one fit."""

    sites: tuple[str, ...]
    session: str
    family: FamilySpec

    def ask(self, site: str, step: str, arrays: Mapping[str, Array], text: str = "") -> Ask:
        """Address one step."""
        return Ask(site, FAMILY, step, arrays, self.session, text)


@dataclass(slots=True, eq=False)
class Newton:
    """Newton's method with step halving."""

    session: Session
    agreement: RowsAgreement
    options: Options
    scaletype: float | str | None
    coordinates: Coordinates = field(init=False)
    trace: list[TraceRow] = field(default_factory=list)
    null: float = 0.0
    offsets: bool = False
    n: int = 0
    starts: list[Reply] = field(default_factory=list)
    halved: int = 0
    converged: bool = False
    reason: str = ""

    def open(self, local: bool) -> Rounds[None]:
        """Open the rows, fit every site's rows alone, and standardise."""
        session = self.session
        opening = open_asks(self.agreement, session.session)
        text = session.family.to_json()
        starting = [session.ask(s, "start", {"local": np.array(local)}, text) for s in session.sites]
        replies = yield [ask for pair in zip(opening, starting, strict=True) for ask in pair]
        design = opened_design(self.agreement, replies[::2])
        self.starts, self.coordinates = replies[1::2], Coordinates.of(design)
        self.n = int(design.n.sum())
        if self.n <= len(design.names):
            raise EstimationError(
                f"{self.n:,} whole rows at all sites together for {len(design.names)} coefficients; "
                "expected more rows than coefficients. Use fewer terms."
            )
        self._start_null()

    def _start_null(self) -> None:
        question = self.agreement.question
        self.offsets = bool(question.offsets) or "exposure" in question.weights
        weight, weighted, _, exposed = np.sum([reply.arrays["response"] for reply in self.starts], axis=0)
        if self.session.family.name != "Gaussian" and weighted in (0.0, weight if self._binomial else 0.0):
            raise EstimationError(
                f"the response '{question.response}' is the same in all rows of all sites; there is nothing "
                "to fit"
            )
        exposure = exposed if self.session.family.link == "Log" else weight
        self.null = float(self.session.family.make().link(weighted / exposure))

    @property
    def _binomial(self) -> bool:
        return self.session.family.name == "Binomial"

    def first_point(self) -> Floats | None:
        """Mean of the sites' own fits, weighted by their informations; None where no site has a fit.

        With ``rounds`` it is weighted by rows, and sites without an estimate of a coefficient are left out.
        """
        p = len(self.coordinates.shift)
        precision, weighted = np.zeros((p, p)), np.zeros(p)
        for k, reply in enumerate(self.starts):
            T, information = self.coordinates.to_site(k), reply.arrays["information"]
            if self.options.rounds is not None and information.any():
                information = self._by_size(k, information)
            precision += T.T @ information @ T
            weighted += T.T @ (information @ reply.arrays["beta"])
        if not precision.any():
            return None
        return np.asarray(np.linalg.lstsq(precision, weighted, rcond=1e-10)[0])

    def _by_size(self, k: int, information: Floats) -> Floats:
        T = np.linalg.inv(self.coordinates.to_site(k))
        weight = T.T @ T * float(self.coordinates.design.n[k])
        known = np.diag(information) > 0.0
        return weight * np.outer(known, known)

    def evaluate_asks(self, gamma: Floats | None) -> list[Ask]:
        """Ask for the sums at a point."""
        arrays: dict[str, Array] = {"shift": self.coordinates.shift, "scale": self.coordinates.scale}
        if gamma is not None:
            arrays["beta"] = gamma
        if self.offsets:
            arrays["null"] = np.array(self.null)
        arrays["observed"] = np.array(not self.session.family.canonical and gamma is not None)
        return [self.session.ask(site, "sum_scores", arrays) for site in self.session.sites]

    def judge_asks(self, gamma: Floats, total: Total, dispersion: float, meat: bool) -> list[Ask]:
        """Ask for the sums that judge the fit.

        As in statsmodels, the likelihood of the Gaussian family with identity link is that at its own
        maximum over the dispersion.
        """
        family = self.session.family
        concentrated = (family.name, family.link) == ("Gaussian", "Identity")
        own = total.deviance / total.weight if concentrated else dispersion
        arrays = {
            "beta": gamma,
            "shift": self.coordinates.shift,
            "scale": self.coordinates.scale,
            "dispersion": np.array([own, dispersion]),
            "null": np.array(self.null),
            "meat": np.array(meat),
        }
        return [self.session.ask(site, "judge", arrays) for site in self.session.sites]

    def dispersion(self, total: Total) -> float:
        """Dispersion at a point, as statsmodels' `scale` argument chooses it."""
        if isinstance(self.scaletype, float):
            return self.scaletype
        if self.scaletype is None and not self.session.family.estimates_scale:
            return 1.0
        rest = total.weight - len(total.score)
        return (total.deviance if self.scaletype == "dev" else total.pearson) / rest

    def run(self, meat: bool = False, local: bool = True) -> Rounds[GLMFit]:
        """Open, iterate, judge."""
        yield from self.open(local)
        gamma, total, judged = yield from self.climb(meat)
        dispersion = self.dispersion(total)
        if not judged:
            judged = yield self.judge_asks(gamma, total, dispersion, meat)
        defined = np.all([reply.arrays["defined"] for reply in judged], axis=0)
        return GLMFit(
            gamma,
            total,
            self.coordinates,
            dispersion,
            self.null,
            np.where(defined, np.sum([reply.arrays["fit"] for reply in judged], axis=0), np.nan),
            np.sum([reply.arrays["meat"] for reply in judged], axis=0) if meat else None,
            tuple(self.trace),
            self.converged,
            self.reason,
            tuple(self.local_fits(total)),
            self.n,
            self.options.rounds,
            self.session.family,
        )

    def climb(self, meat: bool) -> Rounds[tuple[Floats, Total, list[Reply]]]:
        """Take Newton's steps until they are small; judge in the last round where it can be foreseen."""
        K = len(self.session.sites)
        gamma = self.first_point()
        total = None if gamma is None else Total.of((yield self.evaluate_asks(gamma)))
        if total is None and self.options.rounds is not None:
            raise EstimationError(
                "rounds: no site has a fit of its own to start from, or their mean lies outside the family's "
                "domain; fit without rounds"
            )
        if total is None:
            gamma, total = yield from self.start_without_fits()
        check_rank(total.information, self.coordinates)
        assert gamma is not None
        judged: list[Reply] = []
        before = total.information
        while not self.finished(total):
            if self.halved >= PATIENCE:
                raise EstimationError(
                    f"the maximum lies on the edge of what family {self.session.family} allows: means go to "
                    "the end of their range at some rows; choose a link whose means stay inside, such as the "
                    "log or logit"
                )
            step, _ = total.step()
            if not self.halved and diverges([row.move for row in self.trace], [r.step for r in self.trace]):
                runaway = Runaway(step, before, total.information, len(self.trace))
                raise runaway.error(self.session.sites, self.coordinates)
            for halving in range(MAX_HALVINGS):
                trial = gamma + step * 0.5**halving
                asks = self.evaluate_asks(trial)
                if self.expects_last():
                    asks += self.judge_asks(trial, total, self.dispersion(total), meat)
                replies = yield asks
                new = Total.of(replies[:K])
                if new is not None and not rises(new.deviance, total.deviance):
                    break
            else:
                raise EstimationError(
                    f"no step lowers the deviance ({len(self.trace)} evaluations) and keeps the means "
                    f"inside the domain of family {self.session.family}; choose another link"
                )
            self.halved = self.halved + 1 if halving else 0
            before, gamma, total, judged = total.information, trial, new, replies[K:]
        return gamma, total, judged

    def start_without_fits(self) -> Rounds[tuple[Floats, Total]]:
        """First step of iteratively reweighted least squares, as statsmodels starts."""
        first = Total.of((yield self.evaluate_asks(None)))
        if first is None:
            raise EstimationError(
                f"sums over the response '{self.agreement.question.response}' are no finite numbers; measure "
                "it in other units, or transform it"
            )
        check_rank(first.information, self.coordinates)
        gamma, _ = first.step()
        total = Total.of((yield self.evaluate_asks(gamma)))
        if total is None and self.coordinates.design.intercept:
            gamma = np.append(self.null, np.zeros(len(gamma) - 1))  # the mean of the response is inside
            total = Total.of((yield self.evaluate_asks(gamma)))
        if total is None:
            raise EstimationError(
                f"the first point lies outside the domain of family {self.session.family}; choose another "
                "link"
            )
        return gamma, total

    def finished(self, total: Total) -> bool:
        """Enter a point into the trace, and tell whether it is the last."""
        options = self.options
        step, matrix = total.step()
        size = float(np.sqrt(max(float(step @ matrix @ step), 0.0) / max(self.dispersion(total), TINY)))
        self.trace.append(TraceRow(total.deviance, size, float(np.abs(step).max())))
        null_done = self._advance_null(total)
        if options.rounds is not None:
            self.converged = True
            self.reason = f"{options.rounds} step(s) from the mean of the sites' fits"
            return len(self.trace) > options.rounds
        self.converged = size < options.tol and null_done
        self.reason = f"step of {size:.1e} standard errors after {len(self.trace)} evaluations"
        return self.converged or len(self.trace) >= options.maxiter

    def expects_last(self) -> bool:
        """Whether the next point is foreseen to be the last, from the rate at which Newton's steps shrink."""
        estimated = self.session.family.estimates_scale or self.scaletype is not None
        if estimated and not isinstance(self.scaletype, float):
            return False
        if self.options.rounds is not None:
            return len(self.trace) == self.options.rounds
        if self.halved or len(self.trace) < 2 or self.trace[-2].step == 0.0:
            return False
        before, now = self.trace[-2].step, self.trace[-1].step
        return now**2 * (now / before**2) < 0.1 * self.options.tol

    def _advance_null(self, total: Total) -> bool:
        """Newton's step of the model without covariates; true when it is small."""
        if total.null is None:
            return True
        score, information, _ = total.null.tolist()
        self.null += score / information
        return bool(abs(score) < self.options.tol * np.sqrt(information))

    def local_fits(self, total: Total) -> list[LocalFit]:
        """Sites' own fits, and their parts of the sums, in the units of the data."""
        forward = np.linalg.inv(self.coordinates.back)
        out = []
        for k, (site, reply) in enumerate(zip(self.session.sites, self.starts, strict=True)):
            problem = json.loads(reply.text)["problem"]
            beta = cov = None
            n = int(self.coordinates.design.n[k])
            if not problem:
                beta, cov = self.coordinates.local(k, reply.arrays["beta"], reply.arrays["information"])
                if self.dispersion(total) != 1.0:
                    rest = n - int(self.coordinates.varies(k).sum())
                    cov = cov * float(reply.arrays["response"][2]) / max(rest, 1)
            score, information = total.by_site[k]
            out.append(
                LocalFit(site, n, beta, cov, problem, forward.T @ score, forward.T @ information @ forward)
            )
        return out


def rises(new: float, old: float) -> bool:
    """Whether a deviance is larger than rounding explains."""
    return new > old + 1e-9 * (abs(old) + 1e-3)
