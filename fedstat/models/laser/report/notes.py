"""What is kept of a training, and the notes of its summary: what passed, and who learned what of it."""

from __future__ import annotations

from dataclasses import dataclass

from fedstat.inference.summary import ClientBlock
from fedstat.models.laser.report.prediction import FittedNetworks
from fedstat.models.saved import SavedLedger
from fedstat.models.vertical.prediction.coding import ResponseSource

HARDLY = 0.98
"""Share of the first epoch's loss above which nothing was learned that is worth the name."""


@dataclass(frozen=True, slots=True, eq=False)
class LASERRecord:
    """What a file of results holds."""

    fitted: FittedNetworks
    response: ResponseSource
    masked: bool
    n: int
    parts: tuple[int, int, int]
    blocks: tuple[ClientBlock, ...]
    label_epsilon: float
    ledger: SavedLedger | None


def notes_of(r: LASERRecord) -> list[str]:
    """Say what was disclosed, and what intervals rest on."""
    hidden = (
        "The holder of the response was handed masked sums of the institutions' outputs, over one random set "
        "of institutions for each entity and batch; the sets change, so that differences of sums tell of "
        "single institutions. "
        if r.masked
        else "The holder of the response was handed the outputs of every institution for each entity. "
    )
    if r.fitted.trained.joint:
        hidden = (
            f"The coordinator and every institution were handed {r.fitted.trained.joint} singular vectors of "
            f"all institutions' columns, for each entity that all have. {hidden}"
        )
    held = r.fitted.trained.history[:, 1]
    if held[r.fitted.trained.epoch] > HARDLY * held[0]:
        notes = [
            "NOT LEARNED: the loss of the entities held back has hardly fallen since the first epoch. Take "
            "more epochs (epochs=), smaller batches (batch_size=) or a larger rate (rate=)."
        ]
    else:
        notes = []
    notes += [
        "There are no standard errors: weights of networks are not identified.",
        f"{hidden}From such numbers most of the variation of an institution's columns can be predicted by "
        f"who knows them for a few hundred entities. {_of_labels(r)}",
    ]
    if r.fitted.trained.scores is not None:
        spread = (
            " Under masks each entity calibrates one of the sets of institutions that it could, so that the "
            "entities to calibrate by are divided among these."
        )
        notes.append(
            "Sets and intervals of predict_set() are calibrated by set of institutions, and hold for "
            "entities that are exchangeable with those that calibrate; a set of few entities rules out "
            f"nothing.{spread if r.masked else ''}"
        )
    return notes


def _of_labels(r: LASERRecord) -> str:
    epsilon, total = r.label_epsilon, r.fitted.trained.outcome.label_epsilon
    if not epsilon:
        return (
            "Each institution learned the labels of the entities that it has: the gradients of one batch "
            "tell them apart."
        )
    return (
        "Labels were randomised before anything else: whoever looks, the odds of two labels of one "
        f"entity change by exp({epsilon:g}) at most, and by exp({total:g}) over all labels that their "
        "holder has randomised. Columns are not protected, nor are labels from evaluate(). Sets, "
        "intervals and figures of calibration are of randomised labels."
    )
