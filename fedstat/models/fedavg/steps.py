"""Steps of a site for federated averaging: epochs of gradient descent on its own rows.

Coefficients belong to the columns in which the algorithm runs: those of the data, or those standardized
over all sites. Gradient descent gives another answer in other columns, so that a site puts its rows into
them once, when a fit starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstat.errors import DescriptionError, EstimationError, MessageError, Remedy
from fedstat.federation.design.formula.facts import term_facts
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, aggregate, check_lengths, control
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.fedavg import DescentOptions, EpochVectors, fair_update, local_descent, mean_loss
from fedstat.kernels.glm.local_fit import join_rows
from fedstat.kernels.glm.sums import Rows, Sums, evaluate, log_likelihood, row_weights
from fedstat.models.horizontal.rows import (
    AT_THE_START,
    FLAT,
    NO_MEANS,
    SCORES,
    SUMS,
    RowsAtPoints,
    answered_at,
    describe_sums,
    glm_rows,
    means_are_flat,
    require_response,
    summed,
)
from fedstat.typing import Array, Floats, Ints

FAMILY = "fedavg"
TINY = float(np.finfo(float).tiny)
LINEAR = {"center", "scale"}
"""Functions of a column that leave the span of the columns as it is."""
MOST_EPOCHS = 10_000
"""Limits of a round, so that a request cannot keep a site busy forever."""


@dataclass(frozen=True, slots=True, eq=False)
class DescentRows:
    """The rows of one site in the columns of the algorithm."""

    rows: Rows
    distribution: DistributionSpec
    opened: OpenRows
    first: Floats
    """Coefficients of the first round."""
    units: Floats
    """Shift and scale of the columns, (2, p)."""
    blocks: tuple[RowsAtPoints, ...]
    """The rows in parts that keep their vectors: the checks of each round need those of all rounds before."""

    def answered_at(
        self, beta: Floats, sums: Sums, instead: Mapping[str, Array]
    ) -> tuple[facts.ScoreAndInformation | facts.WorkingWeights, ...]:
        """Declare the facts behind sums at coefficients."""
        n, kind = len(self.rows), self.distribution
        return answered_at(self.opened, lambda: [self.rows], n, beta, kind, sums, instead)

    def answered_along(
        self, path: Sequence[Floats], options: DescentOptions, instead: Mapping[str, Array]
    ) -> tuple[object, ...]:
        """Declare the facts behind the move along the coefficients of epochs, each one step over all rows.

        `instead` is released where few rows have nearly all weight.
        """
        kind = self.distribution
        if kind.least_squares or options.batch_size is not None:
            # Sums of least squares are combinations of the same ones; batches have a rule of their own.
            return AT_THE_START
        view = EpochVectors(1.0 - options.learning_rate * options.mu)
        point = (kind, np.concatenate(path).tobytes(), view)
        means = facts.ScoreAndInformation(
            self.opened, len(self.rows), point, lambda: self.blocks, among=self.opened.places
        )

        def each() -> Floats:
            return np.concatenate([row_weights(self.rows, beta, kind) for beta in path])

        def flat() -> bool:
            return kind.name == "Binomial" and any(map(self._is_cut, path))

        return NO_MEANS, facts.WorkingWeights(each, instead=instead, flat=flat), means

    def _is_cut(self, beta: Floats) -> bool:
        """Return whether nearly all probabilities are zero or one: a score sums rows on one side of a cut."""
        weighs = float(row_weights(self.rows, beta, self.distribution)[0].sum())
        total = self.rows.total
        return weighs < FLAT * total and means_are_flat([self.rows], beta, self.distribution, weighs)

    def descent_point(
        self,
        number: int,
        beta: Floats,
        settings: Sequence[Array] = (),
    ) -> facts.DescentPoint:
        """Describe the place of a round on the path of this model; no settings where the path ends."""
        question, spec = self.opened.question, self.distribution.to_json()
        terms = {
            tuple(sorted((one.columns, tuple(sorted(set(one.functions) - LINEAR))) for one in fact.factors))
            for fact in (term_facts([term]) for term in self.opened.terms)
        }
        written = (question.response, sorted(question.offsets), sorted(question.weights.items()), spec)
        return facts.DescentPoint(
            digest(written, sorted(map(repr, terms)), question.intercept, self.opened.used.tobytes()),
            number,
            digest(beta.tobytes(), self.units.tobytes()),
            digest(*(one.tobytes() for one in settings)) if settings else "",
            self.distribution.least_squares,
        )

    @property
    def p(self) -> int:
        """Columns."""
        return int(self.rows.X.shape[1])

    @property
    def count(self) -> float:
        """Rows, each counted by its frequency weight and its binomial trials."""
        return float(len(self.rows) if self.rows.weight is None else self.rows.weight.sum())


def digest(*parts: object) -> str:
    """Return a digest of parts with a fixed text."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def gather(opened: OpenRows, shift: Floats, scale: Floats) -> Rows:
    """Put all rows into columns of given shift and scale; a batch may hold any of them.

    A streamed table's design is held in memory as well.
    """
    # From columns that are standardized by the site's own moments to those of the algorithm.
    ratio, rest = opened.scale / scale, (opened.shift - shift) / scale
    parts = [glm_rows(rows, X * ratio + rest) for rows, X in opened.chunks()]
    return parts[0] if len(parts) == 1 else join_rows(parts)


BETA = aggregate("coefficients", common=True)
FAIR = control("q and Lipschitz constant of q-FedAvg, and a mean loss", optional=True, common=True)
EPOCHS = (*SUMS, facts.SampledSites, facts.DescentPoint)
ROUND = "round of averaging"
"""Item of a session: the latest round."""


def _chosen(
    what: str, ndim: int = 0, dtype: str = "", *, bound: bool = True, **declared: Any
) -> ArrayDeclaration:
    """Declare the coordinator's choices for a round; a step of length zero discloses the same as no draw."""
    return control(what, ndim, dtype=dtype, common=True, bound=bound, **declared)


@step(
    FAMILY,
    takes={
        "shift": aggregate("means of the columns over all sites, or zeros", common=True),
        "scale": aggregate("standard deviations of the columns over all sites, or ones", common=True),
        "init": _chosen("coefficients of the first round", 1, chooses="start values"),
    },
    releases={"rows": summed("number of rows, weights counted", 0, behind=OPEN_ROWS)},
    request=DistributionSpec,
    requests=control("family and link", common=True),
)
def start(
    data: SiteData,
    state: State,
    distribution: DistributionSpec,
    shift: Floats,
    scale: Floats,
    init: Floats,
) -> dict[str, Array]:
    """Check the response, and put the rows into the columns of the algorithm.

    `shift` and `scale` (p,) are what the columns of the data are reduced by,
    and divided by: 0 and 1 for the data's own. `init` (p,) are the coefficients of the first round, which
    does not begin at others. Released is ``rows``: how many, each counted by its frequency
    weight and its binomial trials.
    """
    opened = rows_of(state)
    p = len(opened.shift)
    check_lengths(data.name, shift=(shift, p), scale=(scale, p), init=(init, p))
    if not (scale > 0.0).all():
        raise MessageError(f"{data.name}: array 'scale' must be positive")
    if distribution.least_squares:
        state.report(
            opened.question.column_sums(opened.used, True, ",".join(sorted(opened.question.weights.values())))
        )
    rows, units = gather(opened, shift, scale), np.array([shift, scale])
    blocks = (RowsAtPoints(rows, opened.question.intercept, {}),)
    site = DescentRows(rows, distribution, opened, init, units, blocks)
    response = opened.question.response
    require_response(data.name, site.rows, site.distribution, response)
    state.keep("fedavg", site, state.entities)
    state.keep(ROUND, -1)
    return {"rows": np.array(site.count)}


def site_rows(data: SiteData, state: State, beta: Floats) -> DescentRows:
    """Return the rows of this fit, for as many coefficients."""
    site = state.use("fedavg", DescentRows, "this fit was not started here; ask 'start' first")
    check_lengths(data.name, beta=(beta, site.p))
    return site


@step(
    FAMILY,
    "run_epochs start",
    takes={
        "beta": BETA,
        "epochs": _chosen("passes over the rows", dtype="int64"),
        "batch_size": _chosen("rows per gradient step", dtype="int64", chooses="batches"),
        "learning_rate": _chosen("length of a gradient step"),
        "seed": _chosen("seed of the run", dtype="int64"),
        "number": _chosen("number of the round", dtype="int64", bound=False),
        "proximal": _chosen("mu, gamma and equal weights of FedProx", 1, optional=True),
        "fair": FAIR,
    },
    releases={
        "beta": summed("coefficients after the site's epochs, weighted", behind=EPOCHS),
        "weight": summed("their weight", 0, behind=EPOCHS),
        "loss": summed("loss of the site's rows before them, and rows", behind=EPOCHS),
    },
    request=tuple[str, ...],
    requests=control("sites drawn in the round", common=True),
)
def run_epochs(
    data: SiteData,
    state: State,
    drawn: tuple[str, ...],
    beta: Floats,
    epochs: Ints,
    batch_size: Ints,
    learning_rate: Floats,
    seed: Ints,
    number: Ints,
    proximal: Floats | None = None,
    fair: Floats | None = None,
) -> dict[str, Array]:
    """Descend from beta (p,) for some epochs (ClientUpdate of McMahan et al. 2017, Algorithm 1).

    `drawn` are the sites of the round, the same at every site; one that is not drawn adds zeros, so that
    masks cancel. `batch_size` is rows per step, B, 0 for all of them; `seed` of the run and `number` of
    the round, from 0, determine with the site's name the order of the rows. `proximal` (3,) are mu and gamma
    of FedProx (Li et al. 2020, Algorithm 2), and whether each site counts once; `fair` (3,) are q and L of
    q-FedAvg and a loss, see :func:`fedstat.kernels.glm.fedavg.fair_update`.

    Released is what is added up over the sites of a round: ``beta`` (p,), the coefficients reached, times the
    rows, and ``weight``, the rows, or 1 if each site counts once; for q-FedAvg ``Delta_k`` and ``h_k``.
    ``loss`` (2,): the mean loss F_k before the epochs, times the rows, and the rows. All are zero where few
    rows have nearly all weight at the coefficients of an epoch. A descent that leaves the finite numbers or
    the distribution's domain is an EstimationError.
    """
    site = site_rows(data, state, beta)
    if proximal is not None:
        check_lengths(data.name, proximal=(proximal, 3))
    if fair is not None:
        check_lengths(data.name, fair=(fair, 3))
    if not 0 < int(epochs) <= MOST_EPOCHS:
        raise MessageError(f"{data.name}: expected 1 to {MOST_EPOCHS:,} epochs in a round, received {epochs}")
    # Without masks, a site that is not drawn is not asked, and leaves out a round.
    last, all_rounds = state.use(ROUND, int), state.masked_among or data.policy.order == "declared"
    follows = last <= int(number) <= (last + 1 if all_rounds else number)
    if not follows or (number == 0 and not np.array_equal(beta, site.first)):
        raise DescriptionError.of_rule(
            "order",
            data.name,
            f"expects round {last + 2}, the first one at the coefficients of the start, and received round "
            f"{int(number) + 1}",
            remedy=Remedy("fit(..., fraction=1.0)", "Draw all sites by {arguments}, or mask their sums"),
        )
    state.keep(ROUND, int(number))
    state.report(facts.SampledSites(drawn))
    settings = [epochs, batch_size, learning_rate, *(one for one in (proximal, fair) if one is not None)]
    if fair is not None:  # the last loss follows from the rounds before
        settings[-1] = fair[:2]
    point = site.descent_point(int(number), beta, settings)
    state.report(replace(point, answered=False))
    # The site's name makes orders differ between sites, and independent of who else is drawn.
    rng = np.random.default_rng((int(seed), int(number), *data.name.encode()))
    *near, once = (0.0,) if proximal is None else proximal.tolist()
    options = DescentOptions(int(epochs), int(batch_size) or None, float(learning_rate), *near)
    nothing: dict[str, Array] = {
        "beta": np.zeros(site.p),
        "weight": np.array(0.0),
        "loss": np.zeros(2),
    }
    # Pairwise masks cancel only if every site adds its own, also one that was not drawn.
    if data.name not in drawn:
        state.report(*AT_THE_START)
        return nothing
    try:
        family = site.distribution.make()
        loss = mean_loss(site.rows, beta, family)
        path: list[Floats] = []
        reached = local_descent(site.rows, beta, family, options, rng, path)
        weight = 1.0 if once else site.count
        moved = weight * reached
        if fair is not None:
            moved, weight = fair_update(beta, reached, loss, *fair.tolist())
    except EstimationError as error:
        raise error.with_message(f"site {data.name!r}, round {int(number) + 1}: {error}") from error
    # A path on which few rows have weight is not answered, and another one may be tried.
    state.report(*site.answered_along(path, options, nothing), point)
    return {"beta": moved, "weight": np.array(weight), "loss": site.count * np.array([loss, 1.0])}


@step(
    FAMILY,
    "run_epochs start",
    takes={"beta": BETA, "fair": FAIR},
    releases={
        **SCORES,
        "slope": summed("descent direction of a fair loss", optional=True),
        "curvature": summed("curvature of a fair loss", 2, optional=True),
    },
)
def sum_scores(data: SiteData, state: State, beta: Floats, fair: Floats | None = None) -> dict[str, Array]:
    """Sum score and information over the rows, to compute the distance from the likelihood's maximum.

    `beta` (p,) and `fair` (3,) are as in :func:`run_epochs`. It releases ``inside``: whether all means are
    inside the distribution's domain; ``spread``: whether more than a few rows have weight. Score and
    information are zero if one of the two is false. ``score`` (p,) and ``information`` (p, p) are for
    dispersion one; ``totals``: sum of the frequency weights, deviance, Pearson's statistic. With `fair`,
    ``slope`` (p,) and ``curvature`` (p, p) of the site's part of q-FedAvg's criterion.
    """
    site = site_rows(data, state, beta)
    if fair is not None:
        check_lengths(data.name, fair=(fair, 3))
    number = state.use(ROUND, int) + 1
    state.report(site.descent_point(number, beta))
    sums = evaluate([site.rows], beta, site.distribution)
    silent = replace(sums, score=np.zeros(site.p), information=np.zeros((site.p, site.p)))
    instead = describe_fair_sums(site, silent, fair) | {"spread": np.array(False)}
    state.report(*site.answered_at(beta, sums, instead))
    return describe_fair_sums(site, sums, fair)


def describe_fair_sums(site: DescentRows, sums: Sums, fair: Floats | None) -> dict[str, Array]:
    """Describe sums, and the site's part of a fair loss; see :func:`sum_scores`."""
    arrays = describe_sums(sums)
    if fair is not None:
        q, _, reference = fair.tolist()
        # A perfect site would divide by zero; the reference keeps powers of a loss near one.
        loss = max(float(arrays["totals"][1]) / (2.0 * site.count), TINY)
        share, score = (loss / reference) ** q, sums.score / site.count
        arrays["slope"] = share * score
        arrays["curvature"] = share * (sums.information / site.count + q / loss * np.outer(score, score))
    return arrays


@step(
    FAMILY,
    "sum_scores",
    takes={"beta": BETA, "dispersion": aggregate("dispersion", 0, common=True)},
    releases={
        "defined": control("whether the sum is finite", 0, maskable=True),
        "llf": summed("log-likelihood", 0, behind=OPEN_ROWS),
    },
)
def sum_likelihood(data: SiteData, state: State, beta: Floats, dispersion: Floats) -> dict[str, Array]:
    """Sum the log-likelihood over the rows: ``llf``, zero where it is not ``defined``."""
    site = site_rows(data, state, beta)
    llf = log_likelihood([site.rows], beta, site.distribution, float(dispersion))
    finite = bool(np.isfinite(llf))
    return {"defined": np.array(finite), "llf": np.array(llf if finite else 0.0)}
