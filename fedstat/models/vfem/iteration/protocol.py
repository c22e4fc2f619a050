"""The VFEM iteration as a protocol: who is asked what, and when it ends.

One iteration is one round trip: up, per client, the linear predictors of its entities and a few
scalars; down, their standardised residuals z and three sums over the entities it lacks. Between the two
stands one question to the active institution, answered in place where the coordinator sits there.

Of linear predictors, likelihoods, scores and products of moves only sums over clients enter. With
:attr:`Options.masked` the clients hide their own parts of them: linear predictors then go out over all
entities of the fit, zero where a client lacks them. What that does not hide is said in
:mod:`fedstat.models.vfem.statements.exposure`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.masked_sums import masked
from fedstat.kernels.anderson import anderson_weights, one_hot
from fedstat.models.vertical.fit import TraceRow
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.iteration.client_points import Points
from fedstat.models.vfem.iteration.response_points import ResponsePoints
from fedstat.typing import Floats

ASCENT_TOLERANCE = 1e-12
SMALLEST_STEP = 2.0**-20
SMALLEST_MEMORY = 2
"""A mixed and a plain step may be rejected in turn, and the point before them is still wanted."""

Result = TypeVar("Result")
Turn: TypeAlias = Generator[list[Ask], list[Reply], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How to climb; see :meth:`fedstat.VFEMRegression.fit`."""

    step: Literal["gradient", "local-newton"] = "local-newton"
    acceleration: Literal["anderson"] | None = "anderson"
    memory: int = 8
    learning_rate: float | None = None
    maxiter: int = 5000
    tol_score: float = 1e-8
    tol_change: float = 1e-6
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """Where the iteration ended, in the units of the data.

    Parameters
    ----------
    a, s2 : float
        Centred intercept; residual variance.
    beta, mu : dict of str to (p_k,) arrays
        Coefficients and means by client.
    t : dict of str to float
        beta_k' Sigma_k beta_k.
    response_moments : (2,) array
        Mean and variance of the response.
    """

    a: float
    s2: float
    beta: Mapping[str, Floats]
    mu: Mapping[str, Floats]
    t: Mapping[str, float]
    response_moments: Floats
    log_likelihood: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Latest:
    """The last evaluated point: a, s2, and by pattern v and the sums of z and z^2."""

    a: float
    s2: float
    v: Floats
    z1: Floats
    z2: Floats


@dataclass(slots=True)
class Ascent:
    """The state of the iteration at the coordinator."""

    layout: Layout
    options: Options
    session: str
    report: Callable[[TraceRow], None] | None = None
    points: Points = field(init=False)
    response: ResponsePoints = field(init=False)
    latest: Latest = field(init=False)
    gram: Floats = field(default_factory=lambda: np.empty((0, 0)))
    weights: Floats = field(default_factory=lambda: np.ones(1))
    move: str = "start"
    omega: float = 1.0
    best: float = -np.inf
    accepted: int = 0
    trace: list[TraceRow] = field(default_factory=list)
    forget: bool = False
    began: float = field(default_factory=time.perf_counter)
    converged: bool = False
    reason: str = "the largest number of iterations was reached"

    @property
    def masked(self) -> bool:
        """Whether clients hide their parts of sums; a single client's part is the sum."""
        return self.options.masked and len(self.layout.clients) > 1

    def hide(self, protocol: Rounds[Result]) -> Rounds[Result]:
        """Run rounds in which all clients are asked alike, under masks where they are wanted."""
        return masked(protocol, self.layout.clients, self.session) if self.masked else protocol

    # ---- rounds ------------------------------------------------------------------------------

    def start(self, beta: Mapping[str, Floats] | None) -> Turn:
        """Open the fit at every site."""
        lay = self.layout
        memory = self.options.memory if self.options.acceleration else SMALLEST_MEMORY
        asks = [
            ask(
                k,
                "start",
                self.session,
                keep=lay.keep[k],
                rows=lay.kept[k],
                n=lay.n,
                filled=lay.filled,
                memory=memory,
                padded=self.masked,
                **({} if beta is None else {"beta": beta[k]}),
            )
            for k in lay.clients
        ]
        response = ask(lay.active, "start_response", self.session, keep=lay.response_keep, code=lay.code)
        *replies, reply = yield [*asks, response]
        self.response = ResponsePoints(lay.counts, memory, reply.arrays["moments"])
        self.points = Points(np.zeros((memory + 2, lay.n)), self.masked)
        self.points.take(lay, replies)
        if self.options.step == "gradient":
            yield from self._set_rate([r.arrays["eigenvalues"] for r in replies])

    def _set_rate(self, eigenvalues: list[Floats]) -> Turn:
        ends = np.array(eigenvalues)
        eta = self.options.learning_rate or 2.0 / (ends[:, 0].min() + ends[:, 1].max())
        yield [ask(k, "set_rate", self.session, eta=eta) for k in self.layout.clients]

    def evaluate(self) -> Generator[list[Ask], list[Reply], list[Reply] | None]:
        """Ask for likelihood and score at the mixed point; None when it is not admissible."""
        lay = self.layout
        eta, t = self.points.mixed(self.weights, lay)
        a, s2 = self.response.mixed(self.weights)
        v = s2 + lay.missing @ t
        if self.response.vanishing(s2, v):
            return None
        question = ask(lay.active, "residuals", self.session, a=a, s2=s2, eta=eta, t_missing=lay.missing @ t)
        (reply,) = yield [question]
        z, z1, z2 = (reply.arrays[name] for name in ("z", "z1", "z2"))
        sums = np.column_stack([z1, z2, lay.counts / v])
        replies = yield [
            ask(
                k,
                "step",
                self.session,
                weights=self.weights,
                z=z[lay.rows[k]],
                missing=lay.missing[:, j] @ sums,
                s2=s2,
                omega=self.omega,
                forget=self.forget,
            )
            for j, k in enumerate(lay.clients)
        ]
        self.forget = not all(reply.arrays["inside"] for reply in replies)
        if self.forget:
            return None
        self.points.take(lay, replies)
        self.latest = Latest(a, s2, v, z1, z2)
        return replies

    # ---- the course of the iteration ---------------------------------------------------------

    def take(self, replies: list[Reply]) -> None:
        """Enter an evaluation, and tell whether the iteration has converged."""
        arrays, at = [reply.arrays for reply in replies], self.latest
        own = self.response.score(at.a, at.s2, at.v, at.z1, at.z2)
        log_likelihood = own.log_likelihood + sum(float(a["log_likelihood"]) for a in arrays)
        score2 = own.score2 + sum(float(a["score2"]) for a in arrays)
        row = TraceRow(
            len(self.trace) + 1,
            log_likelihood,
            float(np.sqrt(score2 / self.layout.n)),
            max(own.change, *[float(a["change"]) for a in arrays]),
            self.move,
            time.perf_counter() - self.began,
        )
        self.trace.append(row)
        if self.report is not None:
            self.report(row)
        recentring = sum(float(a["recentring"]) for a in arrays)
        products = self.response.take(at.a, at.s2, at.v, at.z1, at.z2, self.omega, recentring)
        self._enlarge_gram(products + np.sum([a["products"] for a in arrays], axis=0))
        self.converged = row.score <= self.options.tol_score and row.change <= self.options.tol_change
        if self.converged:
            self.reason = "score and change are below their tolerances"

    def _enlarge_gram(self, products: Floats) -> None:
        if len(products) == len(self.gram):  # the oldest point was forgotten
            self.accepted -= 1
        first = len(self.gram) - (len(products) - 1)
        old = self.gram[first:, first:]
        self.gram = np.block([[old, products[:-1, None]], [products[None, :-1], products[-1:, None]]])

    def choose(self) -> Literal["go", "shorten"]:
        """Accept or reject the evaluated point, and set the weights of the next one."""
        row, size = self.trace[-1], len(self.gram)
        slack = ASCENT_TOLERANCE * abs(self.best) + 1e-9 if np.isfinite(self.best) else 0.0
        if row.log_likelihood >= self.best - slack:
            self.best, self.accepted = max(row.log_likelihood, self.best), size - 1
            self.weights, self.move = self._mixture(), "mixed"
            if not self.options.acceleration or np.count_nonzero(self.weights) == 1:
                self.move = "plain"
            return "go"
        if self.move != "mixed":
            return "shorten"
        self.weights, self.move = one_hot(self.accepted, size), "plain"
        return "go"

    def _mixture(self) -> Floats:
        size = len(self.gram)
        if not self.options.acceleration or size == 1:
            return one_hot(size - 1, size)
        return anderson_weights(self.gram)

    def plain(self) -> None:
        """Leave an inadmissible mixture for the plain step from the last accepted point."""
        self.weights, self.move = one_hot(self.accepted, len(self.gram)), "plain"

    def shorten(self) -> Turn:
        """Halve the step from the last accepted point, at every site."""
        self.omega /= 2.0
        lay = self.layout
        if self.omega < SMALLEST_STEP:
            raise EstimationError(
                "the log-likelihood falls along every step, however short; "
                "the columns are probably collinear across institutions"
            )
        replies = yield [
            ask(k, "shorten", self.session, point=self.accepted, omega=self.omega) for k in lay.clients
        ]
        self.points.take(lay, replies)
        recentring = sum(float(reply.arrays["recentring"]) for reply in replies)
        self.response.shorten(self.accepted, self.omega, recentring)
        self.gram, self.weights, self.move, self.accepted = np.empty((0, 0)), np.ones(1), "shortened", -1


def vanishing_message(layout: Layout) -> str:
    """Say why an iteration has nowhere to go."""
    complete = int(layout.counts[~layout.missing.any(axis=1)].sum())
    return (
        f"a variance goes to zero, where the likelihood has no maximum: {complete} of the {layout.n} "
        "entities are complete, and the coefficients may reproduce their response without error; leave "
        "out columns or clients, or start elsewhere (init=)"
    )


def climb(ascent: Ascent) -> Turn:
    """Iterate to a stationary point of the observed-data likelihood."""
    failures = 0
    for _ in range(ascent.options.maxiter):
        replies = yield from ascent.evaluate()
        if replies is None:
            failures += 1
            if failures > 2:
                raise EstimationError(vanishing_message(ascent.layout))
            ascent.plain()
            continue
        failures = 0
        ascent.take(replies)
        if ascent.converged:
            return
        if ascent.choose() == "shorten":
            yield from ascent.shorten()


def estimate(ascent: Ascent) -> Rounds[Fit]:
    """Collect the estimates of the last evaluated point."""
    lay = ascent.layout
    replies = yield [ask(k, "estimates", ascent.session) for k in lay.clients]
    by_client = {k: reply.arrays for k, reply in zip(lay.clients, replies, strict=True)}
    return Fit(
        ascent.latest.a,
        ascent.latest.s2,
        {k: a["beta"] for k, a in by_client.items()},
        {k: a["mu"] for k, a in by_client.items()},
        {k: float(a["t"]) for k, a in by_client.items()},
        ascent.response.moments,
        ascent.trace[-1].log_likelihood,
        tuple(ascent.trace),
        ascent.converged,
        ascent.reason,
    )


def maximise(ascent: Ascent, beta: Mapping[str, Floats] | None = None) -> Rounds[Fit]:
    """Maximise the observed-data likelihood of :mod:`fedstat.models.vfem`.

    Parameters
    ----------
    ascent : Ascent
        Before its start.
    beta : mapping of str to (p_k,) arrays, optional
        Starting coefficients, in the units of the data.
    """

    def rounds() -> Rounds[Fit]:
        yield from ascent.start(beta)
        yield from climb(ascent)
        return (yield from estimate(ascent))

    return ascent.hide(rounds())
