"""Record of a fitted mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pandas as pd

from fedstat.codec import Minimum
from fedstat.errors import ModelError
from fedstat.models.m2sem.information import ObservedInformation
from fedstat.models.m2sem.request import ModalityRequest
from fedstat.models.m2sem.selection import EvaluatedSupport
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class FittedSite:
    """A site's modalities as released: parameters, and profiles (K, sum of P C) of all modalities.

    `norms` (sum of P,) are norms of loadings, `relevance` (M,) the distances of clusters by modality, `floor`
    names columns whose errors have the smallest variance allowed, `entities` counts its rows. If columns are
    adjusted, `effects` (R, q) are those of `covariates`; their `coding` is a ``BlockSpec`` in JSON, and
    `spread` (2, q) their means and deviations; `without` counts rows that lack some. `members` has the
    shape of the profiles: means and shares of the entities with each most likely cluster, nan if the site's
    policy does not allow them. `skewed` names columns with a skewness beyond 1.
    """

    modalities: tuple[ModalityRequest, ...]
    parameters: Floats
    units: Floats
    profiles: Floats
    norms: Floats
    relevance: Floats
    floor: tuple[str, ...]
    entities: int
    terms: tuple[str, ...]
    covariates: tuple[str, ...]
    without: int
    coding: str
    spread: Floats
    effects: Floats
    members: Floats
    skewed: tuple[str, ...]

    @property
    def parts(self) -> list[tuple[ModalityRequest, Floats, Floats, float]]:
        """By modality: profiles (K, P, C), norms (P,), relevance."""
        out, at, first = [], 0, 0
        for one, relevance in zip(self.modalities, self.relevance.tolist(), strict=True):
            P, C = len(one.columns), one.most_levels
            profiles = self.profiles[:, at : at + P * C].reshape(-1, P, C)
            out.append((one, profiles, self.norms[first : first + P], relevance))
            at, first = at + P * C, first + P
        return out

    @property
    def deviations(self) -> list[tuple[ModalityRequest, Floats]]:
        """Standard deviations (P,) of the columns of continuous modalities."""
        out, at = [], 0
        for one in self.modalities:
            P = len(one.columns)
            if one.continuous:
                out.append((one, self.units[at + P : at + 2 * P]))
            at += 2 * P if one.continuous else sum(len(column.levels) for column in one.columns)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class M2SEMRecord:
    """The contents of a saved file: no value of an entity, and therefore no posterior."""

    sites: Mapping[str, FittedSite]
    shares: Floats
    factors: Annotated[int, Minimum(0)]
    nodes: Annotated[int, Minimum(2)]
    n: Annotated[int, Minimum(1)]
    loglik: float
    parameters: int
    select: str | None
    uncertainty: float
    classified: Floats
    history: tuple[tuple[int, str, float], ...]
    judged: tuple[EvaluatedSupport, ...]
    rounds: int
    converged: bool
    coarse: float
    emptied: tuple[str, ...]
    masked: bool
    own: bool
    frequencies: Floats | None
    observed: ObservedInformation | None
    starts: tuple[int, int]

    def check(self) -> None:
        """Require parts of the same fit."""
        K = len(self.shares)
        wrong = any(
            len(one.profiles) != K or one.members.shape != one.profiles.shape for one in self.sites.values()
        )
        if wrong or self.classified.shape != (K, K + 1):
            raise ModelError("profiles and shares do not belong to the same fit")

    @property
    def clusters(self) -> pd.RangeIndex:
        """Numbers of the clusters."""
        return pd.RangeIndex(1, len(self.shares) + 1, name="cluster")

    @property
    def sizes(self) -> pd.DataFrame:
        """Shares of the clusters, and how many entities have each as the most likely one."""
        counts = self.classified[:, -1].astype(np.int64)
        return pd.DataFrame({"share": self.shares, "entities": counts}, index=self.clusters)

    @property
    def entropy(self) -> float:
        """One if posteriors are certain, zero if they carry no information."""
        K = len(self.shares)
        return 1.0 - self.uncertainty / (self.n * float(np.log(K))) if K > 1 else 1.0

    @property
    def bic(self) -> float:
        """Schwarz's criterion."""
        return -2.0 * self.loglik + self.parameters * float(np.log(self.n))

    @property
    def classification(self) -> pd.DataFrame:
        """Mean posterior of every cluster (columns) by the most likely one (rows), with entities."""
        index = self.clusters.rename("most likely")
        table = pd.DataFrame(self.classified, index=index, columns=[*self.clusters, "entities"])
        return table.astype({"entities": np.int64})

    def profiles(self) -> pd.DataFrame:
        """Means and probabilities by cluster; see results."""
        return self._by_column({site: held.profiles for site, held in self.sites.items()})

    def members(self) -> pd.DataFrame:
        """Means and shares of the clusters' most likely entities; see results."""
        return self._by_column({site: held.members for site, held in self.sites.items()})

    def mean_residuals(self) -> pd.DataFrame:
        """Members' means of continuous columns minus the model's, in standard deviations of the column."""
        away = self.members() - self.profiles()
        spread = {
            (site, one.name, column): deviation
            for site, held in self.sites.items()
            for one, deviations in held.deviations
            for column, deviation in zip(one.names, deviations, strict=True)
        }
        here = [key[:3] in spread for key in away.index]
        away = away[here]
        return away.div([spread[key[:3]] for key in away.index], axis=0)

    @property
    def mean_residual(self) -> float:
        """Root mean square of :meth:`mean_residuals`, weighted by shares; nan without any."""
        squares = self.mean_residuals().dropna().to_numpy(dtype=float) ** 2
        return float(np.sqrt(np.mean(squares @ self.shares))) if squares.size else float("nan")

    def _by_column(self, values: Mapping[str, Floats]) -> pd.DataFrame:
        keys, rows = [], []
        for site, held in self.sites.items():
            at = 0
            for one in held.modalities:
                for column in one.columns:
                    for c, level in enumerate(column.levels or ("",)):
                        keys.append((site, one.name, column.name, str(level)))
                        rows.append(values[site][:, at + c])
                    at += one.most_levels
        index = pd.MultiIndex.from_tuples(keys, names=["site", "modality", "column", "level"])
        return pd.DataFrame(np.array(rows), index=index, columns=self.clusters)

    @property
    def modalities(self) -> pd.DataFrame:
        """A row for each modality; see results."""
        rows = [
            {
                "site": site,
                "modality": one.name,
                "kind": one.kind,
                "columns": len(one.columns),
                "loaded": int((norms > 0.0).sum()),
                "entities": held.entities,
                "distance": relevance**0.5,
                "selected": relevance > 0.0,
            }
            for site, held in self.sites.items()
            for one, _, norms, relevance in held.parts
        ]
        frame = pd.DataFrame(rows).set_index(["site", "modality"])
        return frame if self.frequencies is None else frame.assign(frequency=self._frequencies()[1])

    @property
    def features(self) -> pd.DataFrame:
        """A row for each column; see results."""
        rows = [
            {
                "site": site,
                "modality": one.name,
                "column": column.name,
                "kind": column.kind,
                "loading": norm,
                "selected": norm > 0.0 and relevance > 0.0,
            }
            for site, held in self.sites.items()
            for one, _, norms, relevance in held.parts
            for column, norm in zip(one.columns, norms.tolist(), strict=True)
        ]
        frame = pd.DataFrame(rows).set_index(["site", "modality", "column"])
        return frame if self.frequencies is None else frame.assign(frequency=self._frequencies()[0])

    @property
    def adjusted(self) -> dict[str, tuple[str, ...]]:
        """Terms of the covariates by site whose columns are adjusted."""
        return {site: held.terms for site, held in self.sites.items() if held.terms}

    def _frequencies(self) -> tuple[Floats, Floats]:
        """Return selection frequencies of columns, and of modalities, in the order of the sites."""
        assert self.frequencies is not None
        sizes = [len(one.columns) for held in self.sites.values() for one in held.modalities]
        parts = np.split(self.frequencies, np.cumsum([size + 1 for size in sizes])[:-1])
        return np.concatenate([part[:-1] for part in parts]), np.array([part[-1] for part in parts])

    @property
    def path(self) -> pd.DataFrame:
        """A row for each pair of penalties; see results."""
        rows = [
            {
                "lam1": one.penalties.lam1,
                "lam2": one.penalties.lam2,
                "columns": one.columns,
                "modalities": one.modalities,
                "parameters": one.parameters,
                "llf": one.loglik,
                str(self.select): one.criterion,
            }
            for one in self.judged
        ]
        return pd.DataFrame(rows)
