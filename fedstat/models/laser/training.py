"""Training options: methods, tasks, and which networks each head combines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import ModelError, Remedy
from fedstat.kernels.split_networks import subsets_within
from fedstat.models.checks import check_choice
from fedstat.models.laser.networks import Optimizer
from fedstat.models.laser.request import OutcomeReply
from fedstat.models.laser.scoring import ScoreCounts
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Which networks and heads a method trains, and over which sets of sites each head predicts.

Method: TypeAlias = Literal["laser", "local", "standard", "ensemble", "combinatorial", "vfedtrans"]
HeadLayout: TypeAlias = Literal["one", "site"]
MOST_COMBINED = 8
"""Largest number of sites for which every set of sites can have its own networks."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prediction from the networks `members`, by head number `head`, for entities that `sites` have.

    `members` are numbers of networks, and `sites` a set: bits of sites.
    """

    head: int
    members: tuple[int, ...]
    sites: int


@dataclass(frozen=True, slots=True)
class NetworkAssembly:
    """Networks by the site that has each, heads, and tasks."""

    networks: tuple[int, ...]
    heads: int
    tasks: tuple[Task, ...]

    def at(self, site: int) -> list[int]:
        """Numbers of a site's networks."""
        return [i for i, owner in enumerate(self.networks) if owner == site]

    def of_set(self, sites: int) -> list[int]:
        """Numbers of the tasks of a set of sites."""
        return [t for t, task in enumerate(self.tasks) if task.sites == sites]

    def predicting(self, sites: int) -> list[int]:
        """Numbers of the tasks that predict for an entity of a set of sites: of the set, or subsets."""
        within = (t for t, task in enumerate(self.tasks) if task.sites & sites == task.sites)
        return self.of_set(sites) or list(within)

    @property
    def members(self) -> Bools:
        """Which networks are in which task, (tasks, networks)."""
        out = np.zeros((len(self.tasks), len(self.networks)), dtype=np.bool_)
        for t, task in enumerate(self.tasks):
            out[t, list(task.members)] = True
        return out

    @property
    def head_of(self) -> Ints:
        """Head of every task."""
        return np.array([task.head for task in self.tasks], dtype=np.int64)


def members_of(sites: int) -> list[int]:
    """Sites in a set."""
    return [k for k in range(sites.bit_length()) if sites >> k & 1]


def moved(sites: int, to: Sequence[int]) -> int:
    """Renumber the sites of a set by their positions `to` (K,)."""
    return sum(1 << to[k] for k in members_of(sites))


def networks_of_all_sets(K: int, heads: HeadLayout) -> NetworkAssembly:
    """One network per site, and heads over all sets of sites: one for all, or one of each site."""
    sets = list(subsets_within((1 << K) - 1))
    if heads == "one":
        tasks = [Task(0, tuple(members_of(s)), s) for s in sets]
    else:
        tasks = [Task(k, tuple(members_of(s)), s) for s in sets for k in members_of(s)]
    return NetworkAssembly(tuple(range(K)), 1 if heads == "one" else K, tuple(tasks))


def networks_of_one_set(K: int, heads: HeadLayout) -> NetworkAssembly:
    """One network per site, and one head over all of them."""
    every = tuple(range(K))
    return NetworkAssembly(every, 1, (Task(0, every, (1 << K) - 1),))


def networks_alone(K: int, heads: HeadLayout) -> NetworkAssembly:
    """One network and one head per site."""
    return NetworkAssembly(tuple(range(K)), K, tuple(Task(k, (k,), 1 << k) for k in range(K)))


def networks_by_set(K: int, heads: HeadLayout) -> NetworkAssembly:
    """Networks and a head for each set of sites; a ModelError if these are too many."""
    if K > MOST_COMBINED:
        raise ModelError(
            f"method='combinatorial' trains a network for each of {(1 << K) - 1:,} sets of sites; "
            f"expected {MOST_COMBINED} sites at most",
            remedy=Remedy("fit(..., method='laser')", "Use {arguments}"),
        )
    networks: list[int] = []
    tasks = []
    for head, s in enumerate(subsets_within((1 << K) - 1)):
        own = members_of(s)
        tasks.append(Task(head, tuple(range(len(networks), len(networks) + len(own))), s))
        networks += own
    return NetworkAssembly(tuple(networks), len(tasks), tuple(tasks))


@dataclass(frozen=True, slots=True)
class TrainingMethod:
    """A training method: its description, its networks, and its options.

    `sums`: the outputs of one network of each site are added up, so that masks can hide them. `complete`:
    only complete entities are used for training. `vote`: predictions are votes. `transfer`: sites learn a
    joint representation first. `modules`: a site may bring its own network. `least` is the smallest number of
    sites.
    """

    words: str
    networks: Callable[[int, HeadLayout], NetworkAssembly]
    sums: bool = False
    complete: bool = False
    vote: bool = False
    transfer: bool = False
    modules: bool = True
    least: int = 1


METHODS: Mapping[str, TrainingMethod] = {
    "laser": TrainingMethod(
        "one network a site, heads over all sets of sites", networks_of_all_sets, sums=True
    ),
    "local": TrainingMethod("each site by itself", networks_alone),
    "standard": TrainingMethod(
        "one network over all sites; an entity that one lacks is guessed",
        networks_of_one_set,
        sums=True,
        complete=True,
    ),
    "ensemble": TrainingMethod("each site by itself, and a vote", networks_alone, vote=True),
    "combinatorial": TrainingMethod("a network for every set of sites", networks_by_set, modules=False),
    "vfedtrans": TrainingMethod(
        "each site by itself, with a joint representation that it learned",
        networks_alone,
        transfer=True,
        modules=False,
        least=2,
    ),
}


def assemble(method: str, K: int, heads: HeadLayout) -> NetworkAssembly:
    """Return the networks and heads of a method for K sites; a ModelError if it does not support K."""
    check_choice("method", method, tuple(METHODS))
    return METHODS[method].networks(K, heads)


def table_of_weights(
    assembly: NetworkAssembly, seen: Sequence[int], drawn: Sequence[Mapping[int, float]]
) -> Floats:
    """Weight of every task for every pattern of sites, (patterns, tasks).

    `drawn` are the sets that represent all, by pattern, with their weights. The heads of a set share its
    weight.
    """
    weights = np.zeros((len(seen), len(assembly.tasks)))
    for s in {s for sets in drawn for s in sets}:
        tasks = assembly.of_set(s)
        for g, sets in enumerate(drawn):
            weights[g, tasks] = sets.get(s, 0.0) / max(len(tasks), 1)
    return weights


# ----------------------------------------------------------------------------------------------------
# Options and result of a training.


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Training options: layers, batches, epochs, Adam; and the seed.

    The entities `validation`, which select the epoch, and `calibration` are not used for training; `masked`
    is as in the fit. With `vote`, predictions of a set are the votes of its sites. `raw` and
    `compress`: see :class:`NetworksRequest`. With `transfer`, sites learn a joint representation first.
    `modules` are names by site.
    """

    hidden: tuple[int, ...]
    width: int
    head_hidden: tuple[int, ...]
    batch_size: int
    epochs: int
    optimizer: Optimizer
    seed: int
    masked: bool
    entities: Ints
    validation: Ints
    calibration: Ints
    vote: bool
    raw: bool = False
    compress: bool = False
    transfer: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingFit:
    """Parameters of every site's networks (m, q), and of the heads (H, q); units of columns; losses.

    `history` has the mean loss of every epoch, and that of the validation entities, nan without any; `epoch`
    is the one whose networks are used; `scores` are those of the calibration entities. `distilled` are
    parameters by site of the networks (1, q) that learned the `joint` columns of a representation. Columns
    that are `compressed` (p,) enter as asinh of their units.
    """

    networks: dict[str, Floats]
    heads: Floats
    shift: dict[str, Floats]
    scale: dict[str, Floats]
    compressed: dict[str, Bools]
    outcome: OutcomeReply
    mean: float
    sd: float
    history: Floats
    epoch: int
    scores: ScoreCounts | None
    distilled: dict[str, Floats] = field(default_factory=dict)
    joint: int = 0
