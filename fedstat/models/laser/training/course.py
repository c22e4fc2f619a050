"""What a training is asked to be, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstat.models.laser.training.asked import OutcomeTold
from fedstat.models.laser.training.networks import Optimiser
from fedstat.models.laser.training.scoring import ScoreCounts
from fedstat.typing import Floats, Ints


@dataclass(frozen=True, slots=True)
class Training:
    """How networks are trained: layers, batches, epochs, Adam; and what is random.

    Nothing is learned from the entities `validation`, which choose among epochs, and `calibration`;
    `masked` as in the fit, and `vote`: predictions of a set are the votes of its institutions. `raw`: see
    :class:`NetworksAsked`. With `transfer` institutions learn a joint representation first. `modules` are
    names by institution.
    """

    hidden: tuple[int, ...]
    width: int
    head_hidden: tuple[int, ...]
    batch_size: int
    epochs: int
    optimiser: Optimiser
    seed: int
    masked: bool
    entities: Ints
    validation: Ints
    calibration: Ints
    vote: bool
    raw: bool = False
    transfer: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Parameters of every institution's networks (m, q), and of the heads (H, q); units of columns; losses.

    `history` has the mean loss of every epoch, and that of the entities held back, nan without any; `epoch`
    is the one whose networks are taken; `scores` are those of the entities to calibrate by. `distilled` are
    parameters by institution of the networks (1, q) that learned the `joint` columns of a representation.
    """

    networks: dict[str, Floats]
    heads: Floats
    shift: dict[str, Floats]
    scale: dict[str, Floats]
    outcome: OutcomeTold
    mean: float
    sd: float
    history: Floats
    epoch: int
    scores: ScoreCounts | None
    distilled: dict[str, Floats] = field(default_factory=dict)
    joint: int = 0
