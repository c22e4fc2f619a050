"""Estimating equations of a row for the effect of a treatment: propensity, outcomes by arm, potential means.

An arm j of J has the probability ``e_j`` given the columns. The rows that a mean is over have the weight h of
the estimand in the population of the sites, and h / e_j among the rows of arm j (Li and Li 2019, "Propensity
score weighting for causal inference with multiple treatments", Annals of Applied Statistics 13, table 1). For
the population of one site, h is the probability of a row to be there (Dahabreh, Robertson, Steingrimsson,
Stuart and Hernan 2020, "Extending inferences from a randomized trial to a new target population", Statistics
in Medicine 39). All residuals are linear in the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from scipy.special import expit, log_expit, log_ndtr, logit

from fedstat.kernels.categories import BASELINE, probabilities
from fedstat.typing import Floats, Ints

ESTIMANDS = ("ATE", "ATT", "ATC", "ATO", "matching")
"""Population of the effect: all rows, those of the second arm, of the first, of overlap, of matched pairs."""
OBSERVED = {"ATT": 1, "ATC": 0}
"""Estimands of the rows of an arm."""
METHODS = ("ipw", "aipw", "standardization", "ipw_ra")
BALANCE = "balance"
"""In place of a method: the models of the weights alone."""
PROPENSITY_LINKS = ("logit", "probit")
PROPENSITY, MEMBERSHIP, OUTCOME, MEANS, ALL = range(5)
"""Stages, which are solved one after the other, and all of them."""
FLAT = 1e-6
"""Share of errors of prediction below which probabilities are at the ends of their range."""

Residuals: TypeAlias = tuple[Floats, Floats, Floats]
"""Log-likelihoods (n,), residuals (n, L), and their derivatives by the predictors, (n, L, L)."""


@dataclass(frozen=True, slots=True)
class OutcomeLink:
    """A canonical link, and by its linear predictor the mean, its derivative, and the cumulant function."""

    link: Callable[[Floats], Floats]
    mean: Callable[[Floats], Floats]
    slope: Callable[[Floats], Floats]
    cumulant: Callable[[Floats], Floats]


LINKS: Mapping[str, OutcomeLink] = {
    "Identity": OutcomeLink(np.asarray, np.asarray, np.ones_like, lambda x: 0.5 * x**2),
    "Logit": OutcomeLink(logit, expit, lambda x: expit(x) * expit(-x), lambda x: np.logaddexp(0.0, x)),
    "Log": OutcomeLink(np.log, np.exp, np.exp, np.exp),
}
"""By name of the link."""


def tilt(E: Floats, estimand: str) -> tuple[Floats, Floats]:
    """Return the weight h of an estimand (n,), and ``e_j dh / de_j`` (n, J), at probabilities (n, J)."""
    D, row = np.zeros_like(E), np.arange(len(E))
    match estimand:
        case "ATE":
            return np.ones(len(E)), D
        case "ATO":
            h = 1.0 / (1.0 / E).sum(axis=1)
            return h, h[:, None] ** 2 / E
        case "matching":
            least = E.argmin(axis=1)
        case _:
            least = np.full(len(E), OBSERVED[estimand])
    D[row, least] = E[row, least]
    return E[row, least], D


def arm_probabilities(eta: Floats, link: str) -> Floats:
    """Probabilities of the arms (n, J) at predictors (n, J - 1) of all but the first."""
    if link == "probit":
        return np.asarray(np.exp(log_ndtr(eta * np.array([-1.0, 1.0]))))
    if eta.shape[1] == 1:
        return np.asarray(expit(eta * np.array([-1.0, 1.0])))
    return probabilities(eta, BASELINE)


def log_slopes(eta: Floats, E: Floats, link: str) -> Floats:
    """Return derivatives of the logarithms of the probabilities E by the predictors, (n, J, J - 1)."""
    if link == "probit":
        sides = np.array([-1.0, 1.0])
        ratio = np.exp(-0.5 * eta**2 - log_ndtr(eta * sides)) / np.sqrt(2.0 * np.pi)
        return np.asarray((sides * ratio)[:, :, None])
    return np.asarray(np.eye(E.shape[1])[:, 1:] - E[:, None, 1:])


@dataclass(frozen=True, slots=True)
class TreatmentEquations:
    """Equations of one estimator: which there are, and their residuals.

    Parameters
    ----------
    arms : int
    method : str
        One of `METHODS`, or `BALANCE`.
    estimand : str
        One of `ESTIMANDS`.
    link : str
        Of the outcome, with which it is canonical.
    trim : float
        Rows with a smaller probability of any arm have no weight.
    propensity : str
        Link of the propensity model; "probit" is of two arms.
    target : bool
        Whether the rows of one site are the population.

    Notes
    -----
    The predictors are those of all arms but the first, of the rows to be in the target, of the outcome in
    each arm, and the potential means; each group is absent where the estimator does not need it.
    """

    arms: int
    method: str
    estimand: str
    link: str = "Identity"
    trim: float = 0.0
    propensity: str = "logit"
    target: bool = False

    @property
    def weighs(self) -> bool:
        """Whether there is a propensity model."""
        return self.method != "standardization" or self.estimand in ("ATO", "matching") or self.trim > 0.0

    @property
    def models(self) -> bool:
        """Whether there are outcome models."""
        return self.method not in ("ipw", BALANCE)

    @property
    def groups(self) -> tuple[slice, slice, slice, slice]:
        """Predictors of the propensity, of the membership in the target, of outcomes, and of means."""
        sizes = (
            (self.arms - 1) * self.weighs,
            int(self.target and self.weighs),
            self.arms * self.models,
            self.arms * self.estimates,
        )
        ends = np.cumsum((0, *sizes)).tolist()
        first, second, third, fourth = (slice(*pair) for pair in pairwise(ends))
        return first, second, third, fourth

    @property
    def weighing(self) -> slice:
        """Predictors on which weights depend."""
        return slice(0, self.groups[MEMBERSHIP].stop)

    @property
    def estimates(self) -> bool:
        """Whether there are potential means."""
        return self.method != BALANCE

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that this estimator has."""
        return tuple(stage for stage, group in enumerate(self.groups) if group.stop > group.start)

    def jumps(self, stage: int) -> bool:
        """Return whether weights at a stage are other functions of the probabilities on two sides of a cut.

        Those of matched pairs are the weights of another estimand on each side, where two probabilities are
        equal: the difference from these is a sum over the rows on the other side.
        """
        weighted = stage in (MEANS, ALL) or (stage == OUTCOME and self.method == "ipw_ra")
        return self.weighs and weighted and (self.trim > 0.0 or self.estimand == "matching")

    def cut(self, eta: Floats) -> Ints:
        """Return the side of a cut by the probabilities on which each row is, -1 for rows left out."""
        E = arm_probabilities(eta[:, self.groups[PROPENSITY]], self.propensity)
        side = E.argmin(axis=1) if self.estimand == "matching" else np.zeros(len(E), dtype=np.int64)
        return np.where(E.min(axis=1) >= self.trim, side, -1)

    def weights(self, eta: Floats, arm: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Return weights of rows, and h, each with derivatives by the predictors of the weights.

        Parameters
        ----------
        eta : (n, L) array
        arm : (n,) array of int

        Returns
        -------
        w, dw, h, dh : (n,), (n, W), (n,) and (n, W) arrays
            ``w = h / e`` of the arm of each row.
        """
        if not self.weighs:
            none = np.zeros((len(arm), 0))
            return np.ones(len(arm)), none, np.ones(len(arm)), none
        P, S, *_ = self.groups
        E = arm_probabilities(eta[:, P], self.propensity)
        slopes, row = log_slopes(eta[:, P], E, self.propensity), np.arange(len(arm))
        h, D = tilt(E, self.estimand)
        if self.trim:
            kept = E.min(axis=1) >= self.trim
            h, D = h * kept, D * kept[:, None]
        e = E[row, arm]
        dh = np.einsum("nj,njk->nk", D, slopes)
        # Divided before they are subtracted: the weight of an arm in its own population is one, exactly.
        w, D = h / e, D / e[:, None]
        dw = np.einsum("nj,njk->nk", D, slopes) - w[:, None] * slopes[row, arm]
        if S.stop > S.start:
            p, rest = expit(eta[:, S]), expit(-eta[:, S])
            dw, dh = (p * np.column_stack([d, one[:, None] * rest]) for d, one in ((dw, w), (dh, h)))
            w, h = w * p[:, 0], h * p[:, 0]
        return w, dw, h, dh

    def residuals(
        self, eta: Floats, arm: Ints, y: Floats, stage: int = ALL, member: bool = False
    ) -> Residuals:
        """Return log-likelihoods, residuals and derivatives of a stage at predictors (n, L).

        `member` is whether the rows are those of the target.
        """
        (n, L), J = eta.shape, self.arms
        g, H, loglik = np.zeros((n, L)), np.zeros((n, L, L)), np.zeros(n)
        (P, S, Q, M), W = (np.arange(L)[group] for group in self.groups), np.arange(L)[self.weighing]
        row, own = np.arange(n), (arm[:, None] == np.arange(J)).astype(np.float64)
        with np.errstate(all="ignore"):
            if len(P) and stage in (PROPENSITY, ALL):
                E = arm_probabilities(eta[:, P], self.propensity)
                slopes = log_slopes(eta[:, P], E, self.propensity)[row, arm]
                g[:, P], loglik = slopes, np.log(E[row, arm])
                if self.propensity == "probit":
                    H[:, P, P] = -slopes * (slopes + eta[:, P])
                else:
                    H[:, P[:, None], P] = E[:, 1:, None] * E[:, None, 1:]
                    H[:, P, P] -= E[:, 1:]
            if len(S) and stage in (MEMBERSHIP, ALL):
                p = expit(eta[:, S])
                g[:, S], H[:, S, S] = member - p, -p * expit(-eta[:, S])
                loglik = loglik + log_expit(eta[:, S[0]] if member else -eta[:, S[0]])
            if stage in (PROPENSITY, MEMBERSHIP):
                return loglik, g, H
            w, dw, h, dh = self.weights(eta, arm)
            if self.models:
                link = LINKS[self.link]
                m, slope = link.mean(eta[:, Q]), link.slope(eta[:, Q])
            if self.models and stage in (OUTCOME, ALL):
                # The outcome models of ipw_ra are fitted with the weights, all others without.
                weighted = self.method == "ipw_ra"
                omega = own * w[:, None] if weighted else own
                g[:, Q] = omega * (y[:, None] - m)
                H[:, Q, Q] = -omega * slope
                loglik = loglik + (omega * (y[:, None] * eta[:, Q] - link.cumulant(eta[:, Q]))).sum(axis=1)
                if weighted:
                    H[:, Q[:, None], W] = (own * (y[:, None] - m))[:, :, None] * dw[:, None]
            if stage in (MEANS, ALL):
                mu = eta[:, M]
                s, ds = h, dh
                # The rows of an arm or a site themselves, and not their expected number, as in Stata.
                if self.estimand in OBSERVED:
                    s, ds = own[:, OBSERVED[self.estimand]] * (h > 0.0), np.zeros_like(dh)
                elif self.target:
                    s, ds = np.full(n, float(member)), np.zeros_like(dh)
                if self.method == "ipw":
                    g[:, M] = own * w[:, None] * (y[:, None] - mu)
                    H[:, M, M] = -own * w[:, None]
                    H[:, M[:, None], W] = (own * (y[:, None] - mu))[:, :, None] * dw[:, None]
                else:
                    g[:, M] = s[:, None] * (m - mu)
                    H[:, M, M] = -s[:, None]
                    H[:, M, Q] = s[:, None] * slope
                    H[:, M[:, None], W] = (m - mu)[:, :, None] * ds[:, None]
                if self.method == "aipw":
                    g[:, M] += own * w[:, None] * (y[:, None] - m)
                    H[:, M, Q] -= own * w[:, None] * slope
                    H[:, M[:, None], W] += (own * (y[:, None] - m))[:, :, None] * dw[:, None]
                if stage == MEANS:
                    # Weights and models are known: only the means are solved for.
                    H[:, :, W], H[:, :, Q] = 0.0, 0.0
            elif stage == OUTCOME:
                H[:, :, W] = 0.0
        return loglik, g, H

    def pairs(self, stage: int) -> list[tuple[int, int]]:
        """Equations and predictors by which they have derivatives that are not zero by their form."""
        P, S, Q, M = (range(group.start, group.stop) for group in self.groups)
        W = range(self.weighing.stop)
        found = [(j, k) for j in P for k in P] if stage in (PROPENSITY, ALL) else []
        for one, group in ((MEMBERSHIP, S), (OUTCOME, Q), (MEANS, M)):
            found += [(j, j) for j in group if stage in (one, ALL)]
        if stage == ALL:
            found += [(j, k) for j in Q for k in W if self.method == "ipw_ra"]
            found += [*zip(M, Q, strict=False)]
            depends = self.method in ("ipw", "aipw") or self.estimand in ("ATO", "matching")
            found += [(j, k) for j in M for k in W if depends]
        return found
