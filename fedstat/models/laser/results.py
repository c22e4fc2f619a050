"""Results of a split network: predictions with any set of institutions, and what passed for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd

from fedstat.federation.account.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.laser.prediction import FittedNetworks, predict_networks
from fedstat.models.laser.protocol import Trained, Training
from fedstat.models.laser.tasks import METHODS, Method
from fedstat.models.saved import Saveable, SavedLedger
from fedstat.models.vertical.prediction.coding import released_specs
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class LASERRecord:
    """What a file of results holds."""

    fitted: FittedNetworks
    history: Floats
    epoch: int
    masked: bool
    n: int
    ledger: SavedLedger | None


class LASERResults(Saveable, saved_as="fedstat laser results 1", record=LASERRecord):
    """Trained networks of every client, and the heads.

    Attributes
    ----------
    ledger : Ledger or None
        What has left each institution.
    """

    model_name = "Split networks over any set of institutions"

    def __init__(self, record: LASERRecord, ledger: Ledger | None) -> None:
        self.record_, self.ledger = record, ledger

    @classmethod
    def of(
        cls, model: Any, method: Method, training: Training, trained: Trained, calibrated: Any, ledger: Ledger
    ) -> LASERResults:
        """Make results of a fit."""
        fitted = FittedNetworks(
            clients=model.layout.clients,
            specs=released_specs(model, model.layout.clients),
            method=method,
            heads_of=model.heads,
            hidden=training.hidden,
            width=training.width,
            head_hidden=training.head_hidden,
            networks=trained.networks,
            heads=trained.heads,
            shift=trained.shift,
            scale=trained.scale,
            outcome=trained.outcome,
            mean=trained.mean,
            sd=trained.sd,
            holder=model.layout.active,
        )
        record = LASERRecord(fitted, trained.history, trained.epoch, training.masked, model.layout.n, None)
        return cls(record, ledger)

    def to_record(self) -> LASERRecord:
        """Take the results apart for a file."""
        r = self.record_
        return LASERRecord(r.fitted, r.history, r.epoch, r.masked, r.n, SavedLedger.of(self.ledger))

    @classmethod
    def of_record(cls, record: LASERRecord) -> Self:
        """Rebuild results from what is kept of them."""
        return cls(record, None if record.ledger is None else record.ledger.restore())

    @property
    def history(self) -> pd.DataFrame:
        """Mean loss by epoch: of the entities learned from, and of those held back."""
        h = self.record_.history
        return pd.DataFrame(
            h, columns=["loss", "validation"], index=pd.RangeIndex(1, len(h) + 1, name="epoch")
        )

    @property
    def method(self) -> str:
        """Method of the fit, in a word; :data:`METHODS` says more."""
        assert self.record_.fitted.method in METHODS
        return self.record_.fitted.method

    def predict_proba(self, partition: ClientPartition) -> pd.DataFrame:
        """Probabilities of the classes of every entity of a partition, from the clients that have it.

        Returns
        -------
        DataFrame
            (n, classes); nan for an entity that no client has.
        """
        predicted = predict_networks(self.record_.fitted, partition)
        classes = self.record_.fitted.outcome.classes
        return pd.DataFrame(predicted, index=partition.entities, columns=list(classes))

    def predict(self, partition: ClientPartition) -> pd.Series:
        """Mean of a normal response, and else the most probable class."""
        fitted = self.record_.fitted
        if not fitted.outcome.classes:
            found = predict_networks(fitted, partition)[:, 0]
            return pd.Series(fitted.mean + fitted.sd * found, index=partition.entities)
        P = self.predict_proba(partition)
        out = pd.Series(np.nan, index=P.index)
        known = P.notna().all(axis=1)
        out[known] = P[known].idxmax(axis=1).astype(float)
        return out
