"""Selection of columns and modalities by adaptive penalties along a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.federation.protocols.engine import FitProtocol
from fedstat.models.m2sem.em import MixtureExchange, MixtureState, Penalties
from fedstat.progress_line import counted
from fedstat.typing import Bools, Floats

LAM1 = (1.0, 2.0, 4.0, 8.0, 12.0, 18.0)
PATH_ROUNDS, REFIT_ROUNDS = 3, 4
ANEW, FROM = 5, 2
"""How often penalties are adapted again, and to how many refits."""
NO_ROUNDS = "no rounds remain"
SIDE_BY_SIDE = 50
"""Half-samples in one round."""


@dataclass(frozen=True, slots=True)
class EvaluatedSupport:
    """A support on the path, the penalties that select it, and the criterion of its refit."""

    penalties: Penalties
    columns: int
    modalities: int
    parameters: int
    loglik: float
    criterion: float


@dataclass(slots=True, eq=False)
class SupportPath:
    """Refits of all supports on a path from a fit.

    `columns` are indices of a support that are not modalities.
    """

    exchange: MixtureExchange
    fit: MixtureState
    select: str
    steps: int
    columns: Bools
    refits: dict[bytes, MixtureState] = field(default_factory=dict)
    met: list[tuple[Penalties, bytes]] = field(default_factory=list)
    penalized: dict[Penalties, MixtureState] = field(default_factory=dict)
    left: set[bytes] = field(default_factory=set)

    def kept(self) -> list[MixtureState]:
        """List the mixtures that sites must keep; the fit remains if no support is refitted."""
        return [one for one in (self.fit, *self.refits.values(), *self.penalized.values()) if one.slot >= 0]

    def criterion(self, one: MixtureState) -> float:
        """Return the criterion of a refit."""
        chosen, _ = self.counts(one)
        return one.criterion(self.select, self.exchange.subjects.total, chosen, int(self.columns.sum()))

    def counts(self, one: MixtureState) -> tuple[int, int]:
        """Count the columns that load, and the modalities whose means differ."""
        if not one.support:
            return 0, 0
        on = np.frombuffer(support_of(one), dtype=np.uint8)
        return int(on[self.columns].sum()), int(on[~self.columns].sum())

    def judge(self, courses: Sequence[MixtureState]) -> FitProtocol[None]:
        """Refit the new supports of penalized mixtures, in parallel."""
        new = []
        for one in courses:
            key = support_of(one)
            self.met.append((one.penalties, key))
            self.penalized[one.penalties] = one
            if key not in self.refits:
                self.refits[key] = refit = continued(one, Penalties(), fixed=True)
                refit.name = f"refit at {one.penalties}"
                new.append(refit)
        yield from self.exchange.ascend(new, self.steps, REFIT_ROUNDS, self.kept(), lambda one: one.settled)
        for one in new:
            one.failed = one.failed or ("" if one.trace else NO_ROUNDS)

    def best(self) -> Penalties:
        """Return the penalties whose support has the best refit."""
        known = [(p, key) for p, key in self.met if not self.refits[key].failed]
        return min(known, key=lambda pair: self.criterion(self.refits[pair[1]]))[0]

    def refit(self, penalties: Penalties) -> MixtureState:
        """Return the refit at penalties."""
        return self.refits[dict(self.met)[penalties]]

    def table(self) -> list[EvaluatedSupport]:
        """List the candidates with their criteria."""
        out = []
        for penalties, key in self.met:
            one = self.refits[key]
            out.append(
                EvaluatedSupport(penalties, *self.counts(one), one.free, one.loglik, self.criterion(one))
            )
        return out


def support_of(one: MixtureState) -> bytes:
    """Return the support of a mixture, for all sites in the order of their names."""
    return np.concatenate([one.support[site] for site in sorted(one.support)]).astype(np.uint8).tobytes()


def continued(
    one: MixtureState, penalties: Penalties, *, fixed: bool = False, weigh: bool = False
) -> MixtureState:
    """Continue a mixture in a new slot, with other penalties."""
    return replace(
        one,
        slot=-1,
        source=one.slot,
        penalties=penalties,
        fixed=fixed,
        weigh=weigh,
        report=True,
        trace=[],
        change=np.inf,
        name=f"penalties {penalties}",
    )


def select_support(exchange: MixtureExchange, path: SupportPath) -> FitProtocol[MixtureState]:
    """Follow the penalties of loadings, then penalize the best refits again; return the best of all.

    If no round is left for this, it is the fit as it was.
    """
    first = yield from _penalize(exchange, path.fit, Penalties(), path, weigh=True)
    if first.failed:
        return path.fit
    yield from _along(exchange, first, path)
    if all(one.failed for one in path.refits.values()):
        return path.fit
    for number in range(ANEW):
        best = path.best()
        yield from _restart(exchange, path, number + 1)
        if path.best() == best:
            break
    return path.refit(path.best())


def _restart(exchange: MixtureExchange, path: SupportPath, number: int) -> FitProtocol[None]:
    """Penalize the best refits, in parallel, with weights by their own loadings and distances.

    The first weights come from clusters that all columns blur. Columns that separate the sharper clusters may
    be dropped before others that carry no information. A column with loadings l and curvature H is dropped if
    H l^2 is below the penalty: at Q log n, its likelihood ratio does not justify Q parameters. Means of a
    modality are judged by n D^2, for Q (K - 1) parameters.
    """
    if exchange.left < 2 * (PATH_ROUNDS + REFIT_ROUNDS):
        return
    fresh = [key for key, one in path.refits.items() if key not in path.left and not one.failed]
    fresh = sorted(fresh, key=lambda key: path.criterion(path.refits[key]))[:FROM]
    path.left.update(fresh)
    log, made = float(np.log(exchange.subjects.total)), []
    for place, key in enumerate(fresh):
        source = path.refits[key]
        # Latent classes differ in K - 1 directions; their means are fixed, and only loadings are penalized.
        lam1 = (source.factors or source.clusters - 1) * log
        lam2 = 0.5 * source.factors * (source.clusters - 1) * log
        penalties = Penalties(lam1, lam2, (number, place))
        made.append(continued(source, penalties, weigh=True))
    yield from exchange.ascend(made, path.steps, PATH_ROUNDS, path.kept(), lambda one: one.settled)
    yield from path.judge([one for one in made if one.trace and not one.failed])


def _along(exchange: MixtureExchange, first: MixtureState, path: SupportPath) -> FitProtocol[None]:
    """Follow the penalties of loadings, each point from the one before, and compare all with the first."""
    made = [first]
    for lam1 in LAM1:
        one = yield from _penalize(exchange, made[-1], Penalties(lam1), path, extra=made)
        if one.failed:
            break
        made.append(one)
    yield from path.judge(made)


def _penalize(
    exchange: MixtureExchange,
    source: MixtureState,
    penalties: Penalties,
    path: SupportPath,
    *,
    weigh: bool = False,
    extra: Sequence[MixtureState] = (),
) -> FitProtocol[MixtureState]:
    """Improve a mixture under penalties."""
    one = continued(source, penalties, weigh=weigh)
    kept = [*path.kept(), *extra, source]
    # Without penalties it is the fit itself, whose support is requested.
    rounds, steps = (1, 1) if weigh else (PATH_ROUNDS, path.steps)
    old = [each for each in kept if each.slot >= 0]
    yield from exchange.ascend([one], steps, rounds, old, lambda one: one.settled)
    one.failed = one.failed or ("" if one.trace else NO_ROUNDS)
    return one


def select_in_halves(
    exchange: MixtureExchange, path: SupportPath, count: int, kept: Sequence[MixtureState]
) -> FitProtocol[dict[str, Floats] | None]:
    """Return the share of random half-samples that select each column and modality, by site.

    All continue the mixture at the best penalties, in parallel (Meinshausen and Buehlmann 2010); columns that
    were dropped before penalties were adapted stay out. None if no half-sample could be fitted.
    """
    source, n = path.penalized[path.best()], exchange.subjects.total
    made = []
    for number in range(count):
        one = continued(source, source.penalties)
        one.half = np.zeros(n)
        one.half[exchange.rng.permutation(n)[: n // 2]] = 1.0
        one.name = f"half-sample {number + 1}"
        made.append(one)
    for first in counted(range(0, count, SIDE_BY_SIDE), "set of half-samples"):
        some = made[first : first + SIDE_BY_SIDE]
        yield from exchange.ascend(some, path.steps, PATH_ROUNDS, [source, *kept])
    found = [one.support for one in made if one.trace and not one.failed]
    if not found:
        return None
    return {site: np.mean([one[site] for one in found], axis=0) for site in found[0]}
