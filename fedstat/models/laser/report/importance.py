"""What predictions lose where an institution's columns are exchanged between entities."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.laser.report.counting import count_predictions
from fedstat.models.laser.report.evaluation import SetEvaluation
from fedstat.models.laser.report.prediction import FittedNetworks
from fedstat.models.laser.training.scoring import ScoreCounts
from fedstat.models.vertical.prediction.coding import ResponseSource


def permutation_importance(
    fitted: FittedNetworks, response: ResponseSource, partition: ClientPartition, repeats: int, alpha: float
) -> pd.DataFrame:
    """Loss of AUC, accuracy or R-squared by institution, over permutations of its columns (Breiman 2001)."""
    clients = [k for k in fitted.clients if k in partition.sites]
    permuted = [(k, number) for k in clients for number in range(1, repeats + 1)]
    first, *counts = count_predictions(
        fitted, response, partition, f"importance(repeats={repeats})", [None, *permuted]
    )
    outcome = fitted.trained.outcome

    def worth(scores: ScoreCounts, client: str) -> float:
        return SetEvaluation(scores, fitted.clients, outcome.classes, fitted.trained.sd).worth_with(client)

    rows, t = [], float(stats.t.isf(alpha / 2.0, repeats - 1))
    for k, of_client in zip(clients, np.array_split(np.arange(len(counts)), len(clients)), strict=True):
        lost = np.array([worth(first, k) - worth(counts[i], k) for i in of_client])
        mean, error = lost.mean(), lost.std(ddof=1) / np.sqrt(repeats)
        rows.append((mean, error, mean - t * error, mean + t * error))
    return pd.DataFrame(
        rows, index=pd.Index(clients, name="client"), columns=["importance", "std_error", "low", "high"]
    )
