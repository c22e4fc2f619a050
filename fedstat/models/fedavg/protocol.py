"""Rounds of federated averaging, and how far from the maximum of the likelihood they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.design_rows import (
    RowsAgreement,
    RowsDesign,
    moment_asks,
    open_asks,
    opened_design,
    standardisation,
    translation,
)
from fedstat.federation.engine import Rounds
from fedstat.federation.message import Ask, Reply
from fedstat.kernels.glm_family import FamilySpec
from fedstat.kernels.server_updates import average, fair_step, momentum_step, sample_clients
from fedstat.models.fedavg.steps import FAMILY
from fedstat.typing import Array, Floats

TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True)
class Options:
    """What the algorithms of the family have in common; see :meth:`fedstat.FedAvg.fit`."""

    rounds: int
    fraction: float
    local_epochs: int
    batch_size: int | None
    learning_rate: float
    seed: int
    standardize: bool


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """What the sites of a round returned.

    Parameters
    ----------
    betas : (m, p) array
        Coefficients after the sites' epochs.
    losses : (m,) array
        Mean losses before them.
    rows : (m,) array
        Rows of each site, weights counted.
    """

    betas: Floats
    losses: Floats
    rows: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Every site's sums at the final coefficients, dispersion one.

    Parameters
    ----------
    score : (K, p) array
    information : (K, p, p) array
    totals : (K, 3) array
        Sum of the frequency weights, deviance and Pearson's statistic.
    rows : (K,) array
        Rows, weights counted.
    """

    score: Floats
    information: Floats
    totals: Floats
    rows: Floats

    @property
    def losses(self) -> Floats:
        """Half the mean deviance of each site: (K,)."""
        return np.asarray(self.totals[:, 1] / (2.0 * self.rows))


class Rule(Protocol):
    """What the coordinator does with the coefficients that sites return."""

    @property
    def options(self) -> Mapping[str, float]:
        """Options of the rule, by name."""

    @property
    def proximal(self) -> tuple[float, float] | None:
        """The mu and gamma of FedProx that sites are told."""

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """Return the coefficients of the next round."""

    def slope(self, sums: Sums) -> tuple[Floats, Floats]:
        """Descent direction and curvature of what the rule minimises: (p,), (p, p)."""


@dataclass(slots=True)
class Averaging:
    """Average weighted by rows (McMahan et al. 2017, Algorithm 1)."""

    proximal: tuple[float, float] | None = None

    @property
    def options(self) -> Mapping[str, float]:
        """See :class:`Rule`."""
        return {} if self.proximal is None else dict(zip(("mu", "gamma"), self.proximal, strict=True))

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """See :class:`Rule`."""
        return average(returned.betas, returned.rows)

    def slope(self, sums: Sums) -> tuple[Floats, Floats]:
        """See :class:`Rule`."""
        return sums.score.sum(axis=0), sums.information.sum(axis=0)


@dataclass(slots=True)
class Momentum(Averaging):
    """The same with momentum at the coordinator (Hsu et al. 2019, section 4.3)."""

    momentum: float = 0.9
    velocity: Floats | None = None

    @property
    def options(self) -> Mapping[str, float]:
        """See :class:`Rule`."""
        return {"momentum": self.momentum}

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """See :class:`Rule`."""
        velocity = np.zeros_like(beta) if self.velocity is None else self.velocity
        averaged = average(returned.betas, returned.rows)
        beta, self.velocity = momentum_step(beta, averaged, velocity, self.momentum)
        return beta


@dataclass(slots=True)
class Fair:
    """q-FedAvg (Li et al. 2020, Algorithm 2); minimises the sum over sites of F_k^(q+1) / (q+1)."""

    q: float
    lipschitz: float
    proximal: None = None

    @property
    def options(self) -> Mapping[str, float]:
        """See :class:`Rule`."""
        return {"q": self.q, "lipschitz": self.lipschitz}

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """See :class:`Rule`."""
        return fair_step(beta, returned.betas, returned.losses, self.q, self.lipschitz)

    def slope(self, sums: Sums) -> tuple[Floats, Floats]:
        """See :class:`Rule`; all over ``max_k F_k^q``."""
        losses = np.maximum(sums.losses, TINY)
        share = (losses / losses.max()) ** self.q
        score = sums.score / sums.rows[:, None]
        information = sums.information / sums.rows[:, None, None]
        curvature = np.einsum("k,kij->ij", share, information)
        curvature += np.einsum("k,ki,kj->ij", share * self.q / losses, score, score)
        return share @ score, curvature


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Mean loss at the coefficients of one round, and the number of sites that it is from."""

    round: int
    loss: float
    clients: int


@dataclass(frozen=True, slots=True, eq=False)
class FedAvgFit:
    """What the rounds hand over.

    Parameters
    ----------
    params : (p,) array
        In the units of the data.
    design : RowsDesign
    distance : (p,) array
        From the maximum of the likelihood, in its standard errors; infinite where it cannot be told.
    to_go : (p,) array
        The same from the minimum of what the rule minimises.
    sums : Sums
    dispersion, llf : float
        llf is NaN where the family does not define one.
    trace : tuple of TraceRow
    options : Options
    rule : Rule
    """

    params: Floats
    design: RowsDesign
    distance: Floats
    to_go: Floats
    sums: Sums
    dispersion: float
    llf: float
    trace: tuple[TraceRow, ...]
    options: Options
    rule: Rule

    @property
    def weight(self) -> float:
        """Sum of the frequency weights."""
        return float(self.sums.totals[:, 0].sum())


@dataclass(slots=True, eq=False)
class Federation:
    """One fit of the FedAvg family.

    Parameters
    ----------
    sites : tuple of str
    session : str
    agreement : RowsAgreement
    family : FamilySpec
    options : Options
    rule : Rule
    init : (p,) array or None
        Coefficients to start from, in the units of the data; zeros where None.
    """

    sites: tuple[str, ...]
    session: str
    agreement: RowsAgreement
    family: FamilySpec
    options: Options
    rule: Rule
    init: Floats | None = None
    design: RowsDesign = field(init=False)
    back: Floats = field(init=False)
    rows: Mapping[str, float] = field(init=False)
    trace: list[TraceRow] = field(default_factory=list)

    def ask(self, site: str, step: str, arrays: Mapping[str, Array], text: str = "") -> Ask:
        """Address one step."""
        return Ask(site, FAMILY, step, arrays, self.session, text)

    def run(self) -> Rounds[FedAvgFit]:
        """Open, average, judge."""
        beta = yield from self.open()
        for number in range(self.options.rounds):
            beta = yield from self.advance(beta, number)
        return (yield from self.judge(beta))

    def open(self) -> Rounds[Floats]:
        """Open the rows, settle the columns of the algorithm, and return the first coefficients."""
        K = len(self.sites)
        asks = open_asks(self.agreement, self.session) + moment_asks(self.agreement, self.session)
        replies = yield asks
        self.design = design = opened_design(self.agreement, replies[:K], replies[K:])
        zeros, ones = np.zeros(len(design.names)), np.ones(len(design.names))
        shift, scale = zeros, ones
        if self.options.standardize:
            shift, scale = standardisation(design.mean, design.spread, design.intercept)
        self.back = translation(zeros, ones, shift, scale)
        beta = self._first()
        arrays, text = {"shift": shift, "scale": scale}, self.family.to_json()
        replies = yield [self.ask(site, "start", arrays, text) for site in self.sites]
        self.rows = {reply.site: float(reply.arrays["rows"]) for reply in replies}
        return beta

    def _first(self) -> Floats:
        names = self.design.names
        if self.init is None:
            return np.zeros(len(names))
        if self.init.shape != (len(names),):
            raise ModelError(
                f"init: expected {len(names)} coefficients ({', '.join(names)}), received an array of shape "
                f"{self.init.shape}"
            )
        return np.asarray(np.linalg.solve(self.back, self.init))

    def drawn(self, number: int) -> list[str]:
        """Sites of a round; the same ones in whatever order the partition lists them."""
        names = sorted(self.sites)
        rng = np.random.default_rng((self.options.seed, number))
        chosen = {names[i] for i in sample_clients(len(names), self.options.fraction, rng)}
        return [site for site in self.sites if site in chosen]

    def advance(self, beta: Floats, number: int) -> Rounds[Floats]:
        """Let the sites of a round descend from beta, and combine what they return."""
        options = self.options
        arrays: dict[str, Array] = {
            "beta": beta,
            "epochs": np.array(options.local_epochs),
            "batch_size": np.array(options.batch_size or 0),
            "learning_rate": np.array(options.learning_rate),
            "seed": np.array(options.seed),
            "number": np.array(number),
        }
        if self.rule.proximal is not None:
            arrays["proximal"] = np.array(self.rule.proximal)
        replies = yield [self.ask(site, "run_epochs", arrays) for site in self.drawn(number)]
        returned = Returned(
            stack(replies, "beta"),
            stack(replies, "loss"),
            np.array([self.rows[reply.site] for reply in replies]),
        )
        loss = float(average(returned.losses[:, None], returned.rows)[0])
        self.trace.append(TraceRow(number, loss, len(replies)))
        return self.rule.combine(beta, returned)

    def judge(self, beta: Floats) -> Rounds[FedAvgFit]:
        """Ask all sites for score, information and likelihood at the final coefficients."""
        replies = yield [self.ask(site, "sum_scores", {"beta": beta}) for site in self.sites]
        outside = [repr(reply.site) for reply in replies if not reply.arrays["inside"]]
        if outside:
            raise EstimationError(
                f"site {', '.join(outside)}: after the last round, family {self.family} does not allow some "
                "of the means; use a smaller learning_rate, standardize=True, or another link"
            )
        rows = np.array([self.rows[site] for site in self.sites])
        sums = Sums(stack(replies, "score"), stack(replies, "information"), stack(replies, "totals"), rows)
        weight, deviance, pearson = sums.totals.sum(axis=0).tolist()
        dispersion = pearson / max(weight - len(beta), 1.0) if self.family.estimates_scale else 1.0
        # as in statsmodels, at the maximum over the dispersion
        concentrated = (self.family.name, self.family.link) == ("Gaussian", "Identity")
        arrays = {"beta": beta, "dispersion": np.array(deviance / weight if concentrated else dispersion)}
        replies = yield [self.ask(site, "sum_likelihood", arrays) for site in self.sites]
        defined = all(reply.arrays["defined"] for reply in replies)
        self.trace.append(
            TraceRow(self.options.rounds, float(rows @ sums.losses / rows.sum()), len(self.sites))
        )
        return FedAvgFit(
            params=self.back @ beta,
            design=self.design,
            distance=in_standard_errors(Averaging().slope(sums), sums, dispersion, self.back),
            to_go=in_standard_errors(self.rule.slope(sums), sums, dispersion, self.back),
            sums=sums,
            dispersion=dispersion,
            llf=float(stack(replies, "llf").sum()) if defined else np.nan,
            trace=tuple(self.trace),
            options=self.options,
            rule=self.rule,
        )


def stack(replies: Sequence[Reply], name: str) -> Array:
    """One array of all replies, in their order."""
    return np.array([reply.arrays[name] for reply in replies])


def in_standard_errors(slope: tuple[Floats, Floats], sums: Sums, dispersion: float, back: Floats) -> Floats:
    """Newton's step towards a minimum, in standard errors of the maximum-likelihood estimate.

    Parameters
    ----------
    slope : (p,), (p, p) arrays
        Descent direction and curvature.
    sums : Sums
    dispersion : float
    back : (p, p) array
        Takes coefficients to the units of the data.

    Returns
    -------
    (p,) array
        For the coefficients in the units of the data, with the sign of the way that is left; infinite
        where a matrix is singular.
    """
    score, curvature = slope
    steps = solve(curvature, score[:, None])
    inverse = solve(sums.information.sum(axis=0), np.eye(len(score)))
    if steps is None or inverse is None:
        return np.full(len(score), np.inf)
    variances = np.einsum("ij,jk,ik->i", back, inverse, back) * max(dispersion, TINY)
    return np.asarray(back @ steps[:, 0] / np.sqrt(np.maximum(variances, TINY)))


def solve(matrix: Floats, right: Floats) -> Floats | None:
    """Solve for a positive definite matrix of any scaling; None where it is not."""
    size = np.sqrt(np.diag(matrix))
    if not (size > 0.0).all():
        return None
    scaled = matrix / np.outer(size, size)
    try:
        np.linalg.cholesky(scaled)
    except np.linalg.LinAlgError:
        return None
    return np.asarray(np.linalg.solve(scaled, right / size[:, None]) / size[:, None])
