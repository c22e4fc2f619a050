"""Errors of a mixture from its parametric bootstrap."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd

from fedstat.federation.design.spec import BlockSpec
from fedstat.inference.tables import Sheet, SheetSummary, number
from fedstat.models.m2sem.client.asked import ModalityAsked, PredictAsked
from fedstat.models.m2sem.client.bench import restored
from fedstat.models.m2sem.client.columns import OpenedModalities, OpenedModality
from fedstat.models.m2sem.client.covariates import OpenedCovariates
from fedstat.models.m2sem.client.making import make_modality
from fedstat.models.m2sem.inference.bootstrap import Drawable, Draws, draw_refits
from fedstat.models.m2sem.modality.base import Modality
from fedstat.models.m2sem.report.record import FittedClient, M2SEMRecord
from fedstat.models.m2sem.report.statements import KEYS, check_alpha, with_limits
from fedstat.typing import Array, Floats, Ints

COVARIATES = (
    "Covariates were drawn as normal ones that do not depend on one another or on clusters: how they are "
    "distributed is known to their institutions alone. Where clusters differ in them, errors of the "
    "information are those to go by."
)


class BootstrapResults:
    """Profiles and shares with standard errors from refits of samples that were drawn from a fit.

    Attributes
    ----------
    samples : int
        How many were drawn and fitted.
    failed : int
        Samples besides these in which a column did not vary.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fit = fs.M2SEM(partition, n_clusters=2, n_factors=1).fit(select=None, n_init=1)
    >>> found = fit.bootstrap(4)
    >>> found.sizes.shape, found.tidy().shape, "cluster" in found.summary().as_text()
    ((2, 4), (30, 9), True)
    """

    def __init__(self, record: M2SEMRecord, draws: Draws, alpha: float) -> None:
        self._record, self._draws, self._alpha = record, draws, alpha
        self.samples, self.failed = len(draws.shares), draws.failed

    def tidy(self) -> pd.DataFrame:
        """Profiles in one frame, a row for each cluster and column or level, with errors and limits."""
        frame = self._record.profiles()
        long = frame.reset_index().melt(id_vars=KEYS, var_name="cluster", value_name="estimate")
        sd = np.concatenate(
            [
                self._draws.profiles[client].std(axis=0, ddof=1)[:, with_level(held)].T
                for client, held in self._record.clients.items()
            ]
        )
        return with_limits(long, sd.T.ravel(), self._alpha)

    @property
    def sizes(self) -> pd.DataFrame:
        """Shares of the clusters with errors and limits."""
        frame = pd.DataFrame({"estimate": self._record.shares}, index=self._record.clusters)
        return with_limits(frame, self._draws.shares.std(axis=0, ddof=1), self._alpha)

    def summary(self) -> SheetSummary:
        """Lay out profiles with their errors."""
        rows = tuple(
            (
                " = ".join(str(row[key]) for key in ("column", "level") if row[key]),
                str(row["cluster"]),
                *(number(float(row[name])) for name in ("estimate", "std_error", "conf_low", "conf_high")),
            )
            for row in self.tidy().to_dict("records")
        )
        headers = ("mean or share", "cluster", "estimate", "std err", "low", "high")
        failed = f" In {self.failed} more a column did not vary." if self.failed else ""
        notes = [
            f"Standard deviations over {self.samples} samples drawn from the released parameters and fitted "
            f"again, without any institution.{failed} They are conditional on the support, and take cells "
            "that are missing where an entity is there as if they were there.",
            *([COVARIATES] if self._record.adjusted else []),
        ]
        return SheetSummary([Sheet(headers, rows, "llrrrr", (30, 8, 11, 11, 11, 11), gap=2)], notes)

    def __repr__(self) -> str:
        return self.summary().as_text()

    def _repr_html_(self) -> str:
        return self.summary().as_html()


def bootstrap(
    record: M2SEMRecord, place: Mapping[str, Ints], samples: int, alpha: float, rng: np.random.Generator
) -> BootstrapResults:
    """Draw samples from a fit whose institutions have entities at `place`, and fit each."""
    check_alpha(alpha)
    clients = {client: drawable(record, held, place[client]) for client, held in record.clients.items()}
    return BootstrapResults(record, draw_refits(clients, record.shares, record.n, samples, rng), alpha)


def drawable(record: M2SEMRecord, held: FittedClient, place: Ints) -> Drawable:
    """Rebuild the modalities of an institution from what it has released."""
    q = len(held.covariates)
    empty = tuple(OpenedModality(one, _no_rows(one)) for one in held.modalities)
    asked = PredictAsked(len(record.shares), record.factors, record.nodes)
    covariates = OpenedCovariates(BlockSpec(), np.zeros((1, q)), np.array([np.zeros(q), np.ones(q)]))
    opened = OpenedModalities(empty, np.zeros(1, dtype=np.bool_), covariates if q else None)
    fitted = restored("bootstrap", opened, asked, held.parameters, held.units)
    return Drawable(fitted, [partial(_make, one, record) for one in held.modalities], place, q)


def with_level(held: FittedClient) -> list[int]:
    """Places, among an institution's profiles, of means and of levels that columns have."""
    out: list[int] = []
    at = 0
    for one in held.modalities:
        for column in one.columns:
            out += range(at, at + (len(column.levels) or 1))
            at += one.most_levels
    return out


def _no_rows(one: ModalityAsked) -> Array:
    return np.zeros((1, len(one.columns)), dtype=np.float64 if one.continuous else np.int64)


def _make(one: ModalityAsked, record: M2SEMRecord, values: Array, covariates: Floats | None) -> Modality:
    return make_modality(OpenedModality(one, values), record.factors, record.nodes, covariates)
