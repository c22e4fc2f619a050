"""Newton's method from sums over sites."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.homogeneity_tests import SiteWelchTerms
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.glm.fit import Coordinates, GLMFit, NewtonEvaluation, PooledSums
from fedstat.models.glm.separation import Separation, check_rank
from fedstat.models.glm.steps import LARGEST
from fedstat.models.horizontal.clusters import SharedLabels
from fedstat.models.horizontal.session import add
from fedstat.models.rows.newton import LikelihoodNewton, OwnEstimate, open_rows, site_fits
from fedstat.typing import Array, Floats

MOST_HALVED = 8
"""Halved steps in a row after which the maximum is taken to be where means end their range."""
NO_STEP = (
    "no step decreases the deviance ({} evaluations) with means inside the domain of family {} and weight on "
    "more than a few rows of every site. Choose another link, or transform columns with long tails"
)
UNBOUNDED = "Gaussian(link=Identity)"
"""The distribution whose means have no end: sums that do not improve have lost their digits."""
LOST_DIGITS = (
    "the steps do not improve the fit: {response!r} has a mean so large compared with its spread that sums "
    "keep too few digits of it. Subtract a number near its mean on the left side, as in 'y - 2000 ~ x'"
)
VANISHING = 1e-44
"""Sum of squares below which masked sums keep few digits."""


@dataclass(slots=True)
class NullSearch:
    """Search for the intercept of the model without covariates, safe far from its maximum.

    Offsets far from zero saturate the means at the first point: the information is almost zero there, and
    Newton's step overshoots. The sign of the score gives the side of the maximum. A step that leaves the
    interval found so far, or that is more than twice as long as the last one, is replaced.
    """

    below: float = -np.inf
    above: float = np.inf
    step: float = 4.0

    def next_point(self, point: float, score: float, information: float) -> float:
        """Return the next point: Newton's if it is reliable, otherwise a doubled step or the middle."""
        if score > 0.0:
            self.below = point
        elif score < 0.0:
            self.above = point
        newton = score / information if information > 0.0 else np.copysign(np.inf, score)
        if abs(newton) > 2.0 * self.step:
            newton = float(np.copysign(2.0 * self.step, newton))
        trial = point + newton
        if not self.below < trial < self.above and np.isfinite(self.below + self.above) and newton:
            trial = 0.5 * (self.below + self.above)
        self.step = max(abs(trial - point), 0.5)
        return float(trial)


@dataclass(slots=True, eq=False)
class Newton(LikelihoodNewton[PooledSums]):
    """Newton's method from the mean of the sites' own fits; `request` is the distribution.

    With `rounds`, exactly this number of steps; None iterates to the maximum. `scaletype` is statsmodels'
    `scale`, `meat` whether the final sums have products of scores. `judged` are final sums that were
    requested with the sums at a point, with its coefficients.
    """

    sums: ClassVar[type[PooledSums]] = PooledSums
    rounds: int | None = None
    scaletype: float | str | None = None
    meat: bool = False
    coordinates: Coordinates = field(init=False)
    null: float = 0.0
    _null_search: NullSearch = field(default_factory=NullSearch)
    offsets: bool = False
    n: int = 0
    alone: list[Reply] = field(default_factory=list)
    shared: tuple[SharedLabels, ...] = ()
    judged: tuple[Floats, list[Reply]] | None = None

    @property
    def distribution(self) -> DistributionSpec:
        """Family and link."""
        found: DistributionSpec = self.request
        return found

    def open(self, local: bool) -> FitProtocol[None]:
        """Open the rows, fit every site's rows alone, and standardize."""
        text = self.distribution.to_json()
        absorbed = self.session.agreement.question.absorbed
        design, started, self.alone, self.shared = yield from open_rows(self.session, text, local, absorbed)
        self._check_levels()
        own = np.array([reply.arrays["columns"] for reply in self.alone]) if local else None
        self.coordinates = Coordinates.of(design, own)
        self.n = design.nobs
        if self.n <= design.rank:
            raise EstimationError(
                f"{self.n:,} complete rows at all sites together for {design.rank:,} coefficients; "
                "expected more rows than coefficients. Use fewer terms."
            )
        self._start_null(add(started, "response"))

    def _check_levels(self) -> None:
        """Require that the levels of two absorbed effects are of one site each."""
        question = self.session.agreement.question
        for k, labels in enumerate(self.shared if len(self.shared) > 1 else ()):
            if not labels.found or labels.serial:
                continue
            term = ":".join(f"C({quoted_name(name)})" for name in question.absorbed[k])
            raise EstimationError(
                f"about {labels.found:,} levels of '{question.absorbed_texts[k]}' are at several sites, and "
                "two effects are absorbed only within sites",
                remedy=Remedy(
                    "from_formula('{formula} + {term} | {other}', ...).fit()",
                    "Absorb the other one alone, and write {term} as a term: {arguments}",
                ).filled(
                    formula=f"{question.response} ~ {' + '.join(question.terms)}",
                    term=term,
                    other="^".join(map(quoted_name, question.absorbed[1 - k])),
                ),
            )

    def _start_null(self, response: Floats) -> None:
        question = self.session.agreement.question
        self.offsets = bool(question.offsets) or "exposure" in question.weights
        weight, weighted, exposed = response[:3]
        most = weight if self.distribution.name == "Binomial" else 0.0
        if self.distribution.name != "Gaussian" and weighted in (0.0, most):
            raise EstimationError(
                f"the response '{self._response}' is the same in all rows of all sites; there is nothing "
                "to fit"
            )
        middle = response[3] / weight if len(response) > 3 else 0.0
        link = self.distribution.make().link
        # Without an offset this is the intercept of the null model; with one Newton steps start from it.
        if self.distribution.link == "Log" and abs(middle) < LARGEST / 2.0:
            self.null = float(link(weighted / exposed))
        else:
            # Exponentials of large offsets overflow, and saturate other links.
            self.null = float(link(weighted / weight)) - middle

    @property
    def _response(self) -> str:
        return self.session.agreement.question.response

    def first_point(self) -> Floats | None:
        """Mean of the sites' own fits, weighted by their informations; None where no site has a fit.

        With ``rounds`` it is weighted by rows; sites without an estimate of a coefficient are left out.
        """
        p = len(self.coordinates.shift)
        precision, weighted = np.zeros((p, p)), np.zeros(p)
        for k, reply in enumerate(self.alone):
            T, information = self.coordinates.to_site(k), reply.arrays["information"]
            if self.rounds is not None and information.any():
                information = self._by_size(k, information)
            precision += T.T @ information @ T
            weighted += T.T @ (information @ reply.arrays["beta"])
        if not precision.any():
            return None
        # A direction that no single site determines has no precision: least squares leaves it at zero.
        return np.asarray(np.linalg.lstsq(precision, weighted, rcond=1e-10)[0])

    def _by_size(self, k: int, information: Floats) -> Floats:
        T = np.linalg.inv(self.coordinates.to_site(k))
        weight = T.T @ T * float(self.coordinates.design.n[k])
        known = np.diag(information) > 0.0
        return weight * np.outer(known, known)

    def point(self, gamma: Floats | None) -> dict[str, Array]:
        """Return the arrays that name a point; None is the start of IRLS."""
        arrays: dict[str, Array] = {"shift": self.coordinates.shift, "scale": self.coordinates.scale}
        if gamma is not None:
            arrays["beta"] = gamma
        # With an offset the null model has no closed form: its score is requested with every evaluation.
        if self.offsets:
            arrays["null"] = np.array(self.null)
        # With a canonical link it equals the expected one; the start of IRLS has none.
        arrays["observed"] = np.array(not self.distribution.canonical and gamma is not None)
        return arrays

    def attempt(self, point: dict[str, Array], total: PooledSums) -> FitProtocol[PooledSums | None]:
        """Request the sums at the end of a step, and the final sums if it should be the last."""
        requests = self.session.request_all("sum_scores", point)
        if not self.expects_last():
            return self.read((yield requests))
        # This saves one round if this is the last point; otherwise the arrays are not used.
        replies = yield requests + self.judge_requests(point["beta"], total)
        self.judged = point["beta"], replies[len(requests) :]
        return self.read(replies[: len(requests)])

    def judge_requests(self, gamma: Floats, total: PooledSums) -> list[Request]:
        """Request the sums at the estimate that finish the fit.

        As in statsmodels, the likelihood of the Gaussian family with identity link is maximized over the
        dispersion.
        """
        dispersion = self.dispersion(total)
        own = total.deviance / total.weight if self.distribution.least_squares else dispersion
        arrays = {
            "beta": gamma,
            "shift": self.coordinates.shift,
            "scale": self.coordinates.scale,
            "dispersion": np.array([own, dispersion]),
            "null": np.array(self.null),
            "meat": np.array(self.meat),
            # The score test takes the information as that of a likelihood.
            "apart": np.array(self.session.masked and not self.session.agreement.question.propensities),
        }
        return self.session.request_all("judge", arrays)

    def estimate_point(self, gamma: Floats) -> dict[str, Array]:
        """Return the arrays that name an estimate alone."""
        return {"beta": gamma, "shift": self.coordinates.shift, "scale": self.coordinates.scale}

    def dispersion(self, total: PooledSums) -> float:
        """Dispersion at a point, as statsmodels' `scale` argument chooses it."""
        if not self.estimates_dispersion:
            return self.scaletype if isinstance(self.scaletype, float) else 1.0
        rest = total.weight - self.coordinates.design.rank
        return (total.deviance if self.scaletype == "dev" else total.pearson) / rest

    @property
    def estimates_dispersion(self) -> bool:
        """Whether the dispersion is estimated, instead of given or one."""
        if self.scaletype is None:
            return self.distribution.estimates_scale
        return not isinstance(self.scaletype, float)

    def run(self, local: bool = True) -> FitProtocol[GLMFit]:
        """Open the rows, iterate, and request the final sums."""
        yield from self.open(local)
        gamma, total, converged = yield from self.maximize()
        self._check_units(total)
        # A last step that was foreseen has the final sums already.
        if self.judged is not None and self.judged[0] is gamma:
            judged = self.judged[1]
        else:
            judged = yield self.judge_requests(gamma, total)
        # A site without a finite sum sends zero, which must not count as its part.
        defined = add(judged, "defined") == len(judged)
        return GLMFit(
            gamma=gamma,
            total=total,
            coordinates=self.coordinates,
            dispersion=self.dispersion(total),
            null=self.null,
            fit=np.where(defined, add(judged, "fit"), np.nan),
            meat=add(judged, "meat") if self.meat else None,
            apart=add(judged, "apart") if "apart" in judged[0].arrays else None,
            trace=tuple(NewtonEvaluation(-2.0 * row.loglik, row.step, row.move) for row in self.trace),
            converged=converged,
            reason=self.reason(),
            shared=self.shared,
            local=site_fits(
                self.session,
                self.coordinates.design.n,
                self.alone,
                partial(self.own_fit, gamma, self.dispersion(total)),
                total.by_site,
                np.asarray(np.linalg.inv(self.coordinates.back)),
            ),
            n=self.n,
            rounds=self.rounds,
            distribution=self.distribution,
        )

    def _check_units(self, total: PooledSums) -> None:
        if self.session.masked and self.distribution.estimates_scale and total.pearson < VANISHING:
            raise EstimationError(
                f"the sum of squared residuals of '{self._response}' is below {VANISHING:g}. The response "
                "is constant, is fitted without residuals, or has units so large that masked sums keep few "
                "digits of it",
                remedy=Remedy(
                    "fit(..., masked=False)", "Measure it in smaller units, or use fit({arguments})"
                ),
            )

    def maximize(self) -> FitProtocol[tuple[Floats, PooledSums, bool]]:
        """Take Newton's steps until they are small: coefficients, sums, and whether they are the maximum."""
        gamma, total = yield from self.start()
        check_rank(total.information, self.coordinates)
        gamma, total, _, converged = yield from self.ascend(
            self.point,
            gamma,
            total,
            n=self.n,
            at_infinity=self.runaway,
            stuck=NO_STEP.format("{}", self.distribution),
        )
        return gamma, total, converged or self.rounds is not None

    def examines(self) -> bool:
        """Return whether steps go far enough to decide whether there is a maximum."""
        return not self.halved and self.rounds is None

    def check_progress(self) -> None:
        """Require that some steps are not halved."""
        if self.halved < MOST_HALVED:
            return
        if str(self.distribution) == UNBOUNDED:
            raise EstimationError(LOST_DIGITS.format(response=self._response))
        raise EstimationError(
            f"the maximum is at the boundary of family {self.distribution}: some means go to the "
            "end of their range. Choose a link whose means stay inside, such as the log or logit. "
            "Another possible cause is a site's policy that limits the weight of rows (its line "
            "max_share)"
        )

    def start(self) -> FitProtocol[tuple[Floats, PooledSums]]:
        """Return the first point: the mean of the sites' own fits, or the start of IRLS."""
        gamma = self.first_point()
        total = None if gamma is None else (yield from self.evaluate(self.point(gamma)))
        if gamma is not None and total is not None:
            return gamma, total
        if self.rounds is not None:
            raise EstimationError(
                "rounds: no site has its own fit as a start, or the mean of the own fits is outside the "
                "family's domain",
                remedy=Remedy("fit(..., rounds=None)", "fit without rounds"),
            )
        return (yield from self.start_without_fits())

    def runaway(self, step: Floats, before: Floats, now: Floats, complete: bool) -> EstimationError:
        """Make the error for a maximum at infinity, with its direction."""
        logit = (self.distribution.name, self.distribution.link) == ("Binomial", "Logit")
        remedy = Remedy("fit(method='firth')", ", or use {call}.") if logit else None
        found = Separation(step, before, now, len(self.trace), complete, remedy)
        return found.error(self.session.sites, self.coordinates)

    def start_without_fits(self) -> FitProtocol[tuple[Floats, PooledSums]]:
        """Take the first step of iteratively reweighted least squares, as statsmodels does."""
        first = yield from self.evaluate(self.point(None))
        if first is None:
            raise EstimationError(
                f"sums over the response '{self._response}' are not finite; measure it in other "
                "units, or transform it"
            )
        check_rank(first.information, self.coordinates)
        gamma = first.step()
        total = yield from self.evaluate(self.point(gamma))
        if total is None and self.coordinates.design.intercept:
            gamma = np.append(self.null, np.zeros(len(gamma) - 1))  # the mean of the response is inside
            total = yield from self.evaluate(self.point(gamma))
        if total is None:
            raise EstimationError(
                f"the first point is outside the domain of family {self.distribution}; choose another link"
            )
        return gamma, total

    def reason(self) -> str:
        """Return why the iteration ended."""
        if self.rounds is not None:
            return f"{self.rounds} step(s) from the mean of the sites' fits"
        return f"step of {self.trace[-1].step:.1e} standard errors after {len(self.trace)} evaluations"

    def expects_last(self) -> bool:
        """Return whether the next point should be the last, by the rate at which Newton's steps shrink."""
        if self.estimates_dispersion:
            return False
        if self.rounds is not None:
            return len(self.trace) == self.rounds
        if self.halved or len(self.trace) < 2 or self.trace[-2].step == 0.0:
            return False
        # Steps shrink quadratically: the next is c now^2 with c = now / before^2. A tenth is the margin.
        before, now = self.trace[-2].step, self.trace[-1].step
        return now**2 * (now / before**2) < 0.1 * self.tol

    def settled(self, total: PooledSums) -> bool:
        """Take Newton's step of the model without covariates; return whether it was small."""
        small = True
        if total.null is not None:
            score, information, _ = total.null.tolist()
            self.null = self._null_search.next_point(self.null, score, information)
            small = bool(abs(score) < self.tol * np.sqrt(information))
        return small and self.rounds is None

    def own_fit(self, gamma: Floats, dispersion: float, k: int, reply: Reply) -> OwnEstimate:
        """Return coefficients and covariance of a site's own fit, and its part of a test."""
        beta, information = reply.arrays["beta"], reply.arrays["information"]
        own, cov = self.coordinates.local(k, beta, information)
        if not self.estimates_dispersion:
            return own, dispersion * cov, None
        # As statsmodels estimates it from these rows alone; columns that are constant here do not count.
        n = float(reply.arrays.get("count", self.coordinates.design.n[k]))
        rest = max(n - float(self.coordinates.varies(k).sum()), 1.0)
        phi, T = float(reply.arrays["pearson"]) / rest, self.coordinates.to_site(k)
        part = None
        if phi > 0.0:
            part = SiteWelchTerms(
                T.T @ (information @ (beta - T @ gamma)) / phi, T.T @ information @ T / phi, rest
            )
        return own, phi * cov, part
