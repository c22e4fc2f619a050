"""Predictions by the networks of the available sites, and conformal sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Fit, FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol as mask_sums
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.conformal import residual_limits, threshold_bins
from fedstat.models.laser.networks import Networks, Optimizer, of_scores
from fedstat.models.laser.request import FAMILY, Outcome
from fedstat.models.laser.response_steps import average
from fedstat.models.laser.scoring import ScoreCounts, most_probable, score_edges, scores_of
from fedstat.models.laser.training import (
    METHODS,
    HeadLayout,
    Method,
    NetworkAssembly,
    TrainingFit,
    TrainingOptions,
    assemble,
    members_of,
)
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    OpenedBlocks,
    new_ledger,
    open_blocks,
    prediction_analysis,
    present_sites,
)
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Predictions of new entities by the networks of the sites that have them.


@dataclass(frozen=True, slots=True, eq=False)
class FittedNetworks:
    """Trained networks and heads, with everything that predictions need."""

    sites: tuple[str, ...]
    specs: Mapping[str, str]
    kind: Outcome
    method: Method
    heads_of: HeadLayout
    hidden: tuple[int, ...]
    width: int
    head_hidden: tuple[int, ...]
    trained: TrainingFit
    holder: str
    response: str
    modules: Mapping[str, str]

    @classmethod
    def of(
        cls,
        model: Any,
        method: Any,
        training: TrainingOptions,
        trained: TrainingFit,
        specs: Mapping[str, str],
    ) -> FittedNetworks:
        """Select the parts of a fit that predictions need."""
        return cls(
            sites=model.layout.sites,
            specs=specs,
            kind=model.outcome,
            method=method,
            heads_of=model.heads,
            hidden=training.hidden,
            width=training.width,
            head_hidden=training.head_hidden,
            trained=trained,
            holder=model.layout.active,
            response=model.formula.response,
            modules=training.modules,
        )

    @property
    def assembly(self) -> NetworkAssembly:
        """Networks, heads and tasks of the method."""
        return assemble(self.method, len(self.sites), self.heads_of)

    def added_network(self, site: str) -> dict[str, Any]:
        """Parameters and outputs of the network that is added to a site's columns, if there is one."""
        own = self.trained.distilled
        return {"distilled": own[site], "joint": self.trained.joint} if own else {}

    @property
    def one_each(self) -> bool:
        """Whether predictions need only the sum of one network of each site."""
        return METHODS[self.method].sums

    def analysis(self, call: str, partition: ClientPartition) -> PostFitAnalysis:
        """Describe a prediction to owners, for their consent."""
        return prediction_analysis(call, self.blocks, self.response, self.kind, partition)

    @property
    def blocks(self) -> FittedBlocks:
        """Return sites and codings, to open blocks."""
        return FittedBlocks(self.sites, self.specs, {}, 0.0, {})


@dataclass(frozen=True, slots=True, eq=False)
class PredictedSets:
    """Probabilities (n, classes), or standardized means (n, 1), and the sites of each, as bits."""

    predicted: Floats
    sets: Ints
    sites: tuple[str, ...]

    def name_of(self, sites: int) -> str:
        """Write a set of sites."""
        return " + ".join(self.sites[k] for k in members_of(sites))


def predict_networks(
    fitted: FittedNetworks, partition: ClientPartition, call: str, head: int | None = None
) -> PredictedSets:
    """Predict the entities of a partition, from the sites that have each; by one head, or on average."""

    def requester() -> FitProtocol[PredictedSets]:
        opened = yield from open_networks(fitted, partition)
        return (yield from hidden(fitted, opened, predicted(fitted, opened, partition, head=head)))

    analysis = fitted.analysis(call, partition)
    return run_analysis(analysis, requester, new_ledger(partition, fitted.holder))


def open_networks(fitted: FittedNetworks, partition: ClientPartition) -> FitProtocol[OpenedBlocks]:
    """Open the columns of the sites that a partition has."""
    present = present_sites(fitted.sites, partition)
    if not present:
        raise ModelError(
            f"predict: expected at least one of the sites {', '.join(fitted.sites)}; the partition "
            f"has {', '.join(partition.sites)}"
        )
    return (yield from open_blocks(fitted.blocks, present, partition, FAMILY))


def hidden(fitted: FittedNetworks, opened: OpenedBlocks, protocol: FitProtocol[Fit]) -> FitProtocol[Fit]:
    """Mask the outputs of networks if a prediction needs only their sum, and masks hide each part."""
    present = tuple(opened.rows)
    return (
        mask_sums(protocol, present, opened.session) if fitted.one_each and hides(len(present)) else protocol
    )


def predicted(
    fitted: FittedNetworks,
    opened: OpenedBlocks,
    partition: ClientPartition,
    *,
    permuted: tuple[str, int] | None = None,
    head: int | None = None,
) -> FitProtocol[PredictedSets]:
    """Request from the sites the outputs of their networks; one site may be `permuted`, by a number.

    Its columns are then permuted between the entities that it has.
    """
    to, n, width = SecureProductSession(FAMILY, opened.session, None), partition.n_entities, fitted.width
    trained, hidden_units = fitted.trained, np.array(fitted.hidden, dtype=np.int64)
    replies = yield [
        to.request(
            k,
            "represent",
            json.dumps(fitted.modules.get(k, "")),
            parameters=trained.networks[k],
            hidden=hidden_units,
            width=width,
            shift=trained.shift[k],
            scale=trained.scale[k],
            compressed=trained.compressed[k],
            rows=rows,
            n=n,
            **fitted.added_network(k),
            **({"permuted": permuted[1]} if permuted and permuted[0] == k else {}),
        )
        for k, rows in opened.rows.items()
    ]
    outputs = np.zeros((len(fitted.assembly.networks), n, width))
    for reply in replies:
        for place, i in enumerate(fitted.assembly.at(fitted.sites.index(reply.site))):
            outputs[i] = reply.arrays["outputs"][:, place * width : (place + 1) * width]
    sets = ((~opened.missing) @ (1 << np.arange(len(fitted.sites)))).astype(np.int64)
    return PredictedSets(predict_sets(fitted, outputs, sets, head), sets, fitted.sites)


def predict_sets(fitted: FittedNetworks, outputs: Floats, sets: Ints, head: int | None = None) -> Floats:
    """Predict each entity, with outputs (I, n, d), from the sites of its set (n,); nan without any.

    By one `head`, nan for entities that its site lacks, or by the average of the heads of the set.
    """
    classes = max(len(fitted.trained.outcome.classes), 1)
    out = np.full((len(sets), classes), np.nan)
    for s in np.unique(sets).tolist():
        at = np.flatnonzero(sets == s)
        tasks = fitted.assembly.predicting(s)
        if head is not None:
            tasks = [t for t in tasks if fitted.assembly.tasks[t].head == head]
        found = [task_scores(fitted, t, outputs[:, at]) for t in tasks]
        if found:
            out[at] = average(found, fitted.method == "ensemble")
        elif head is not None:
            continue
        elif s and classes > 1:
            out[at] = 1.0 / classes  # the method has no prediction for such a set: use equal probabilities
        elif s:
            out[at] = 0.0
    return out


def task_scores(fitted: FittedNetworks, task: int, outputs: Floats) -> Floats:
    """Probabilities of one task, (n, classes), or means (n, 1)."""
    one = fitted.assembly.tasks[task]
    classes = max(len(fitted.trained.outcome.classes), 1)
    widths = np.array([fitted.width, *fitted.head_hidden, classes], dtype=np.int64)
    heads = Networks(widths, np.ascontiguousarray(fitted.trained.heads), Optimizer(1.0, 0.0))
    # A masked sum is stored as that of the first site; outputs of sites that an entity lacks are zero.
    members = slice(None) if fitted.one_each else list(one.members)
    mean = np.ascontiguousarray(outputs[members].sum(axis=0).T / len(one.members))
    F = heads.output(heads.activate(one.head, mean))
    return of_scores(F, len(fitted.trained.outcome.classes))


# ----------------------------------------------------------------------------------------------------
# Prediction sets and intervals that contain a response with a given probability, by set of sites.


def points_of(fitted: FittedNetworks, predicted: Floats, threshold: float = 0.5) -> Floats:
    """Means of a normal response, (n,), or the most probable classes; nan without any site.

    The second of two classes is taken where its probability is above the threshold. Among equally probable
    classes one is drawn, also of two at the threshold of a half.
    """
    classes = fitted.trained.outcome.classes
    if not classes:
        return np.asarray(fitted.trained.mean + fitted.trained.sd * predicted[:, 0])
    known = np.isfinite(predicted).all(axis=1)
    out = np.full(len(predicted), np.nan)
    P = predicted[known]
    most = most_probable(P) if len(classes) > 2 or threshold == 0.5 else P[:, 1] > threshold
    out[known] = np.array(classes)[most.astype(np.int64)]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class ConformalSets:
    """Sets of level 1 - alpha from counts of scores; by true class if they are conditional on it."""

    fitted: FittedNetworks
    scores: ScoreCounts
    alpha: float
    by_label: bool

    def frame(self, found: PredictedSets, index: pd.Index) -> pd.DataFrame:
        """Return the classes that are not excluded, (n, C), or mean and limits; with a note on small sets."""
        limits, B = self._limits(found.sets), self.scores.bins.shape[2]
        make = self._sets if self.fitted.trained.outcome.classes else self._intervals
        frame = make(found, limits, index)
        wide = sorted({s for s, row in zip(found.sets.tolist(), limits, strict=True) if s and row.max() >= B})
        if wide:
            names = ", ".join(found.name_of(s) for s in wide)
            frame.attrs["note"] = f"too few entities calibrate {names}: nothing is excluded there"
        return frame

    def _limits(self, sets: Ints) -> Ints:
        """Last bin that is not excluded, by entity and class, (n, C)."""
        G, C, B = self.scores.bins.shape
        bins = self.scores.scores
        counts = bins if self.by_label else np.broadcast_to(bins.sum(axis=1, keepdims=True), bins.shape)
        bound = threshold_bins(counts.reshape(G * C, B), self.alpha).reshape(G, C)
        places, every = {s: g for g, s in enumerate(self.scores.sets.tolist())}, np.full(C, B)
        return np.array([bound[places[s]] if s in places else every for s in sets.tolist()]).reshape(-1, C)

    def _sets(self, found: PredictedSets, limits: Ints, index: pd.Index) -> pd.DataFrame:
        classes, P = self.fitted.trained.outcome.classes, found.predicted
        edges, out = score_edges(len(classes)), np.ones(P.shape, dtype=bool)
        known = np.isfinite(P).all(axis=1)
        for c in range(len(classes)):
            score = scores_of(P[known], len(classes), np.full(int(known.sum()), float(c)))
            out[known, c] = np.searchsorted(edges, score) <= limits[known, c]
        return pd.DataFrame(out, index=index, columns=list(classes))

    def _intervals(self, found: PredictedSets, limits: Ints, index: pd.Index) -> pd.DataFrame:
        half = self.fitted.trained.sd * residual_limits(limits[:, 0])
        mean = points_of(self.fitted, found.predicted)
        table = {"mean": mean, "low": mean - half, "high": mean + half}
        return pd.DataFrame(table, index=index)
