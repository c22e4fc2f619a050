"""Predicted means of entities that every institution has, and with missing blocks of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fedstat.errors import DataWarning, ModelError, warn
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.estimate import Estimate
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    PredictedBlocks,
    new_ledger,
    predict_blocks,
    prediction_analysis,
    present_clients,
)
from fedstat.models.vglm.response.distributions import means_of
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True)
class Predictor:
    """What prediction needs of a fit.

    `specs` tell how each client's columns are coded, and are empty before the sites were asked; `holder` is
    the institution of the response. `means`, of a fit with missing blocks, are the mean linear predictors of
    each client's block, for entities that lack it.
    """

    estimate: Estimate
    clients: tuple[str, ...]
    family: DistributionSpec
    specs: Mapping[str, str]
    holder: str
    means: Mapping[str, float] = field(default_factory=dict)

    def beta(self, client: str) -> Floats:
        """Coefficients of a client's columns."""
        return np.asarray(self.estimate.params[np.array(self.estimate.clients) == client])

    @property
    def blocks(self) -> FittedBlocks:
        """Coefficients by client."""
        beta = {k: self.beta(k) for k in self.clients}
        mean = float(self.estimate.params[0]) + sum(self.means.values())
        return FittedBlocks(self.clients, self.specs, beta, mean, self.means)


def predict_means(predictor: Predictor, partition: ClientPartition) -> pd.Series:
    """Predict for every entity of a partition; nan where a client lacks it, unless its mean is known.

    A ModelError where the partition is horizontal, or lacks a client of the fit; a DesignError where a
    client's columns cannot be coded as in the fit; a DataWarning of linear predictors that have no mean under
    the link.
    """
    # A block without effect is not asked for: its institution need not be there, and learns nothing of it.
    wanted = [k for k in predictor.clients if predictor.beta(k).any()]
    needed = present_clients(wanted, partition)
    lacking = [k for k in wanted if k not in needed]
    if lacking and not predictor.means:
        raise ModelError(f"predict: the partition lacks the client {', '.join(lacking)} of the fit")

    def asking() -> Rounds[PredictedBlocks]:
        return predict_blocks(predictor.blocks, needed, partition, "vglm")

    response = predictor.estimate.response
    analysis = prediction_analysis("predict()", predictor.blocks, response, predictor.family, partition)
    found = analysis.run(asking(), asking, new_ledger(partition, predictor.holder))
    counts = (~found.missing).sum(axis=1)
    eta = np.where((counts == len(needed)) | bool(predictor.means), found.linear, np.nan)
    mean = means_of(predictor.family, eta)
    wrong = int((np.isnan(mean) & ~np.isnan(eta)).sum())
    if wrong:
        warn(
            f"predict: {wrong:,} of {len(eta):,} entities are left out (nan): {predictor.family} has no mean "
            "at their linear predictors; with a log link every entity has one",
            DataWarning,
        )
    return pd.Series(mean, index=partition.entities)
