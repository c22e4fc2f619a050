"""Modalities of one site in a fit: several mixtures improved in parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import MessageError
from fedstat.models.m2sem.columns import OpenedModalities, OpenedModality
from fedstat.models.m2sem.modality.base import Modality
from fedstat.models.m2sem.modality.categorical import CategoricalModality
from fedstat.models.m2sem.modality.gaussian import GaussianModality
from fedstat.models.m2sem.request import MOST_STEPS, NONE, MixtureUpdateRequest, PredictRequest
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# From the columns that a site opened to modalities for EM steps.


def make_modality(
    opened: OpenedModality, factors: int, nodes: int, covariates: Floats | None, units: Floats | None = None
) -> Modality:
    """Make a modality of one site's columns, with a number of factors and nodes for each.

    It has no more factors than columns; without factors, it is one of latent classes. For new rows, `units`
    are those of the columns in the fit.
    """
    request = opened.requested
    factors = request.factors(factors)
    if request.continuous:
        return GaussianModality(opened.values, request.names, factors, covariates, units)
    kinds, levels = [c.kind for c in request.columns], [len(c.levels) for c in request.columns]
    return CategoricalModality(opened.values, request.names, factors, kinds, levels, nodes, covariates, units)


# ----------------------------------------------------------------------------------------------------
# The modalities of one site in a fit: mixtures in parallel, improved with fixed posteriors.

LEAP, LEAST_LEAP, LEAST_LEAP_OF_FEW = 2, 4, 8
"""EM steps before an extrapolation, and smallest numbers of local steps with one; the last for costly
steps."""
LONGEST = 50.0
"""Length of an extrapolation, in steps."""
SETTLED = 1e-8
"""Gain of an extrapolation, relative to the log-likelihood, below which no others follow."""
LEAST_NORM, LEAST_SEPARATION = 1e-3, 1e-4
"""Smallest loadings and distances to which penalties are adapted."""


@dataclass(frozen=True, slots=True, eq=False)
class ModalityState:
    """Parameters of one modality in one mixture, and the weights of its penalties.

    `support` (P,) are columns that may have loadings, `silent` states that its means are zero; `weights` (P,)
    and `weight` multiply the penalties of loadings and of means.
    """

    state: Floats
    support: Bools
    silent: bool
    weights: Floats
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LocalMixture:
    """A mixture as a site holds it: its modalities, and the posteriors (n, K) that it received last.

    `shaped` (n, K) are those of the last EM steps, or of its first means; its parameters come from them.
    """

    factors: int
    nodes: int
    modalities: tuple[ModalityState, ...]
    r: Floats | None = None
    shaped: Floats | None = None

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return 1 if self.r is None else self.r.shape[1]


class LocalMixtures:
    """Modalities with one number of factors and nodes, in which any mixture of these can be improved."""

    def __init__(self, modalities: Sequence[Modality]) -> None:
        self.modalities = tuple(modalities)
        self._held: LocalMixture | None = None

    def begun(self, factors: int, nodes: int) -> LocalMixture:
        """Return the mixture of one cluster: the local factor analyses."""
        for modality in self.modalities:
            modality.begin(1)
        return self.take(factors, nodes, [(np.ones(m.P), 1.0) for m in self.modalities], None)

    def put(self, slot: LocalMixture) -> None:
        """Set the modalities to the parameters of a mixture."""
        if self._held is slot:
            return
        for modality, held in zip(self.modalities, slot.modalities, strict=True):
            if modality.classes and modality.clusters != slot.clusters:
                modality.locate(slot.clusters)
            modality.restore(held.state)
            modality.support, modality.silent = held.support.copy(), held.silent
        self._held = None

    def take(
        self,
        factors: int,
        nodes: int,
        weights: Sequence[tuple[Floats, float]],
        r: Floats | None,
        shaped: Floats | None = None,
    ) -> LocalMixture:
        """Return the present parameters of the modalities as a mixture."""
        held = tuple(
            ModalityState(m.state(), m.support.copy(), m.silent, each, one)
            for m, (each, one) in zip(self.modalities, weights, strict=True)
        )
        self._held = LocalMixture(factors, nodes, held, r, shaped)
        return self._held

    def densities(self) -> Floats:
        """Log densities of all rows given each cluster, (n, K), over all modalities."""
        return np.asarray(sum(m.log_densities() for m in self.modalities))

    def scores(self) -> Floats:
        """Numbers of all modalities whose k-means is a start, such as factor scores: (n, s)."""
        return np.hstack([m.starting_scores() for m in self.modalities])


@dataclass(frozen=True, slots=True, eq=False)
class MixtureUpdate:
    """Output of a mixture after a round: densities (n, K), penalty, parameters, and which columns load."""

    slot: LocalMixture
    densities: Floats
    penalty: float
    parameters: int
    support: Bools


@dataclass(slots=True, eq=False)
class SessionMixtures:
    """State of a fit at a site.

    `place` (n,) are the positions of its entities among `total`, `groups` those of its rows that have each
    presence pattern, by pattern. `benches` are by factors and nodes, `analyses` the mixtures of one cluster
    by factors. `past` is a digest of everything that all sites have received. `reported` is the mixture whose
    estimates were released; estimates of no other mixture are released afterwards.
    """

    opened: OpenedModalities
    place: Ints
    total: int
    groups: Mapping[int, Ints]
    past: str
    benches: dict[tuple[int, int], LocalMixtures] = field(default_factory=dict)
    analyses: dict[int, LocalMixture] = field(default_factory=dict)
    slots: dict[int, LocalMixture] = field(default_factory=dict)
    reported: LocalMixture | None = None

    def workspace(self, factors: int, nodes: int) -> LocalMixtures:
        """Return modalities with this number of factors and nodes, created at the first request."""
        if (factors, nodes) not in self.benches:
            made = [
                make_modality(one, factors, nodes, self.opened.standardized) for one in self.opened.modalities
            ]
            self.benches[factors, nodes] = LocalMixtures(made)
        return self.benches[factors, nodes]

    def begin(self, factors: int, nodes: int) -> None:
        """Run the factor analysis of every modality, with one cluster."""
        self.analyses[factors] = self.workspace(factors, nodes).begun(factors, nodes)

    def source(self, name: str, request: MixtureUpdateRequest) -> LocalMixture:
        """Find the mixture that is continued."""
        kept = (
            self.analyses.get(request.factors) if request.source == NONE else self.slots.get(request.source)
        )
        if kept is None or kept.factors != request.factors:
            raise MessageError(
                f"{name}: there is no mixture {request.source} of {request.factors} factors in this fit"
            )
        return kept

    def improve(self, name: str, request: MixtureUpdateRequest, r: Floats, shares: Floats) -> MixtureUpdate:
        """Take local steps from a source with fixed posteriors r (n, K)."""
        source, workspace = self.source(name, request), self.workspace(request.factors, request.nodes)
        workspace.put(source)
        if request.scores:
            return self._spheres(workspace, source, r)
        weights = [(one.weights, one.weight) for one in source.modalities]
        if request.weigh:
            weights = [adapt(m, shares) for m in workspace.modalities]
        anew = any(m.clusters != r.shape[1] for m in workspace.modalities)
        if anew:
            for m in workspace.modalities:
                m.begin_means(r)
        if request.fixed:
            for m in workspace.modalities:
                m.support = m.row_norms() > 0.0
                m.silent = not (m.support.any() and np.any(m.means))
        pairs = [(request.lam1 * each, request.lam2 * one) for each, one in weights]
        for m, (rows, means) in zip(workspace.modalities, pairs, strict=True):
            least = LEAST_LEAP if m.leaps else LEAST_LEAP_OF_FEW if request.fixed else MOST_STEPS + 1
            if request.lam1 or request.lam2 or request.steps < least:
                m.improve(r, rows, means, request.steps)
            else:
                ascend_in_leaps(m, r, request.steps)
        f = workspace.densities()
        shaped = r if request.steps or anew or source.shaped is None else source.shaped
        slot = workspace.take(request.factors, request.nodes, weights, r, shaped)
        self.slots[request.slot] = slot
        loaded = [
            np.append(m.row_norms() > 0.0, np.any(m.loadings @ m.means.T)) for m in workspace.modalities
        ]
        return MixtureUpdate(
            slot,
            f,
            sum(m.penalty(rows, means) for m, (rows, means) in zip(workspace.modalities, pairs, strict=True)),
            sum(m.free_parameters() for m in workspace.modalities),
            np.concatenate(loaded),
        )

    def _spheres(self, workspace: LocalMixtures, source: LocalMixture, r: Floats) -> MixtureUpdate:
        """Update k-means' centers on the factor scores of one cluster; densities are those of spheres."""
        scores = workspace.scores()
        centers = r.T @ scores / r.sum(axis=0)[:, None]
        f = scores @ centers.T - 0.5 * (centers * centers).sum(axis=1)
        return MixtureUpdate(source, f, 0.0, 0, np.zeros(0, dtype=np.bool_))

    def only(self, slots: Sequence[int]) -> None:
        """Forget all other mixtures."""
        self.slots = {number: slot for number, slot in self.slots.items() if number in slots}


def restored(
    name: str, opened: OpenedModalities, request: PredictRequest, parameters: Floats, units: Floats
) -> list[Modality]:
    """Make modalities of new rows, with the parameters of a fit."""
    made, at, first = [], 0, 0
    for one in opened.modalities:
        columns = one.requested.columns
        width = 2 * len(columns) if one.requested.continuous else sum(len(c.levels) for c in columns)
        m = make_modality(
            one, request.factors, request.nodes, opened.standardized, units[first : first + width]
        )
        first += width
        m.means = np.zeros((request.clusters, m.Q))
        if m.classes:
            m.locate(request.clusters)
        size = m.state().size
        if at + size > len(parameters):
            break
        m.restore(parameters[at : at + size])
        at += size
        made.append(m)
    if at != len(parameters) or first != len(units) or len(made) < len(opened.modalities):
        raise MessageError(f"{name}: the parameters do not belong to a fit of these columns")
    return made


def ascend_in_leaps(m: Modality, r: Floats, steps: int) -> None:
    """Take EM steps without penalty; extrapolate after every two, unless this decreases the likelihood.

    This is the squared extrapolation of Varadhan and Roland (2008). Outside of the parameter space, the
    density is lower or undefined.
    """
    before = m.expected(r)
    for _ in range(steps // LEAP):
        first = m.state()
        m.improve(r)
        second = m.state()
        m.improve(r)
        third = m.state()
        move, bend = second - first, third - 2.0 * second + first
        length = float(np.linalg.norm(bend))
        if length == 0.0:
            return
        stride = min(float(np.linalg.norm(move)) / length, LONGEST)
        if stride <= 1.0:
            continue
        reached = m.expected(r)
        m.restore(first + 2.0 * stride * move + stride**2 * bend)
        with np.errstate(all="ignore"):
            ahead = m.expected(r)
        if not ahead >= reached:
            m.restore(third)
        now = max(reached, ahead) if ahead == ahead else reached
        if now - before < SETTLED * (1.0 + abs(now)):
            return
        before = now


def adapt(modality: Modality, shares: Floats) -> tuple[Floats, float]:
    """Weights of penalties: 1 / |l_p| and 1 / D_m at the present parameters; fixed means have no penalty."""
    return (
        1.0 / np.maximum(modality.row_norms(), LEAST_NORM),
        0.0 if modality.classes else 1.0 / max(modality.separation(shares), LEAST_SEPARATION) ** 0.5,
    )
