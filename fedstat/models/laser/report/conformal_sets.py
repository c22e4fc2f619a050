"""Sets of classes and intervals that hold a response with a probability, by set of institutions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.conformal import threshold_bins
from fedstat.models.laser.report.prediction import FittedNetworks, PredictedSets
from fedstat.models.laser.training.scoring import ScoreCounts, score_edges, scores_of
from fedstat.typing import Floats, Ints


def points_of(fitted: FittedNetworks, predicted: Floats, threshold: float = 0.5) -> Floats:
    """Means of a normal response, (n,), or the most probable classes; nan where nothing is known.

    The second of two classes is taken where its probability is above the threshold.
    """
    classes = fitted.trained.outcome.classes
    if not classes:
        return np.asarray(fitted.trained.mean + fitted.trained.sd * predicted[:, 0])
    known = np.isfinite(predicted).all(axis=1)
    out = np.full(len(predicted), np.nan)
    two = len(classes) == 2
    most = predicted[known, 1] > threshold if two else predicted[known].argmax(axis=1)
    out[known] = np.array(classes)[most.astype(np.int64)]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class ConformalSets:
    """Sets of level 1 - alpha from counts of scores; by true class where they hold for each."""

    fitted: FittedNetworks
    scores: ScoreCounts
    alpha: float
    by_label: bool

    def frame(self, found: PredictedSets, partition: ClientPartition) -> pd.DataFrame:
        """Tell the classes that are not ruled out, (n, C), or mean and limits; with a note of small sets."""
        limits, B = self._limits(found.sets), self.scores.bins.shape[2]
        make = self._sets if self.fitted.trained.outcome.classes else self._intervals
        frame = make(found, limits, partition)
        wide = sorted({s for s, row in zip(found.sets.tolist(), limits, strict=True) if s and row.max() >= B})
        if wide:
            names = ", ".join(found.name_of(s) for s in wide)
            frame.attrs["note"] = f"too few entities calibrate {names}: nothing is ruled out there"
        return frame

    def _limits(self, sets: Ints) -> Ints:
        """Last bin that is not ruled out, by entity and class, (n, C)."""
        G, C, B = self.scores.bins.shape
        bins = self.scores.scores
        counts = bins if self.by_label else np.broadcast_to(bins.sum(axis=1, keepdims=True), bins.shape)
        bound = threshold_bins(counts.reshape(G * C, B), self.alpha).reshape(G, C)
        places, every = {s: g for g, s in enumerate(self.scores.sets.tolist())}, np.full(C, B)
        return np.array([bound[places[s]] if s in places else every for s in sets.tolist()]).reshape(-1, C)

    def _sets(self, found: PredictedSets, limits: Ints, partition: ClientPartition) -> pd.DataFrame:
        classes, P = self.fitted.trained.outcome.classes, found.predicted
        edges, out = score_edges(len(classes)), np.ones(P.shape, dtype=bool)
        known = np.isfinite(P).all(axis=1)
        for c in range(len(classes)):
            score = scores_of(P[known], len(classes), np.full(int(known.sum()), float(c)))
            out[known, c] = np.searchsorted(edges, score) <= limits[known, c]
        return pd.DataFrame(out, index=partition.entities, columns=list(classes))

    def _intervals(self, found: PredictedSets, limits: Ints, partition: ClientPartition) -> pd.DataFrame:
        # The last bin, and what is not ruled out at all, have no upper edge.
        edges = np.append(score_edges(0), [np.inf, np.inf])
        half, mean = (
            self.fitted.trained.sd * np.exp(edges[limits[:, 0]]),
            points_of(self.fitted, found.predicted),
        )
        table = {"mean": mean, "low": mean - half, "high": mean + half}
        return pd.DataFrame(table, index=partition.entities)
