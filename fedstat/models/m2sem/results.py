"""Results of clusters over institutions: who is where, what clusters are like, and what tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.inference.mixture.classification import classification_table, posterior_entropy
from fedstat.inference.tables import SheetSummary
from fedstat.models.m2sem.asked import ModalityAsked
from fedstat.models.m2sem.fitting import MixtureFit
from fedstat.models.m2sem.report.plots import plot_cluster_profiles, plot_profile_heat
from fedstat.models.m2sem.report.summary import summarise
from fedstat.models.m2sem.selection import Judged
from fedstat.models.saved import Saveable, SavedLedger
from fedstat.records import Least
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False)
class FittedClient:
    """A client's modalities as released: parameters, and profiles (K, sum of P C) of all side by side.

    `norms` (sum of P,) are lengths of loadings, `relevance` (M,) by how much modalities tell clusters apart,
    `floor` names columns whose errors have the least variance allowed, `entities` counts its rows.
    """

    modalities: tuple[ModalityAsked, ...]
    parameters: Floats
    units: Floats
    profiles: Floats
    norms: Floats
    relevance: Floats
    floor: tuple[str, ...]
    entities: int

    @property
    def parts(self) -> list[tuple[ModalityAsked, Floats, Floats, float]]:
        """By modality: profiles (K, P, C), norms (P,), relevance."""
        out, at, first = [], 0, 0
        for one, relevance in zip(self.modalities, self.relevance.tolist(), strict=True):
            P, C = len(one.columns), one.most_levels
            profiles = self.profiles[:, at : at + P * C].reshape(-1, P, C)
            out.append((one, profiles, self.norms[first : first + P], relevance))
            at, first = at + P * C, first + P
        return out


@dataclass(frozen=True, slots=True, eq=False)
class M2SEMRecord:
    """What a file of results holds: no value of an entity, and so no posterior."""

    clients: Mapping[str, FittedClient]
    shares: Floats
    factors: Annotated[int, Least(1)]
    nodes: Annotated[int, Least(2)]
    n: Annotated[int, Least(1)]
    loglik: float
    parameters: int
    select: str | None
    entropy: float
    sizes: Floats
    classified: Floats
    history: tuple[tuple[int, str, float], ...]
    judged: tuple[Judged, ...]
    rounds: int
    converged: bool
    coarse: float
    emptied: tuple[str, ...]
    masked: bool
    own: bool
    frequencies: Floats | None
    ledger: SavedLedger | None

    def check(self) -> None:
        """Require parts of one fit."""
        K = len(self.shares)
        if any(len(one.profiles) != K for one in self.clients.values()) or self.classified.shape != (K, K + 1):
            raise ModelError("profiles and shares are not of one fit")


class M2SEMResults(Saveable, saved_as="fedstat m2sem results 1", record=M2SEMRecord):
    """Clusters, the largest first, numbered from 1.

    Attributes
    ----------
    ledger : Ledger or None
        What has left each institution.
    """

    model_name = "Clusters over institutions"

    def __init__(self, record: M2SEMRecord, ledger: Ledger | None, live: Any = None) -> None:
        self.record_, self.ledger, self._live = record, ledger, live

    @classmethod
    def of(cls, model: Any, fit: MixtureFit, masked: bool, own: bool, ledger: Ledger) -> M2SEMResults:
        """Make results of a fit."""
        one, r, table = fit.course, fit.r, classification_table(fit.r)
        place = model.subjects.place
        clients = {
            reply.site: FittedClient(
                model.agreed.modalities[reply.site],
                reply.arrays["parameters"],
                reply.arrays["units"],
                reply.arrays["profiles"],
                reply.arrays["norms"],
                reply.arrays["relevance"],
                at_floor(model.agreed.modalities[reply.site], reply.arrays["floor"]),
                len(place[reply.site]),
            )
            for reply in fit.released
        }
        record = M2SEMRecord(
            clients={client: clients[client] for client in model.agreed.modalities},
            shares=fit.w,
            factors=one.factors,
            nodes=one.nodes,
            n=len(r),
            loglik=one.loglik,
            parameters=one.free,
            select=fit.select,
            entropy=posterior_entropy(r),
            sizes=table["entities"].to_numpy(dtype=float),
            classified=np.nan_to_num(table.to_numpy(dtype=float)),
            history=tuple(fit.history),
            judged=tuple(fit.judged),
            rounds=fit.rounds,
            converged=fit.converged,
            coarse=fit.coarse,
            emptied=tuple(one.emptied),
            masked=masked,
            own=own,
            frequencies=fit.frequencies,
            ledger=None,
        )
        return cls(record, ledger, Live(model, fit))

    # ---- who is where ----------------------------------------------------------------------------

    @property
    def n_clusters(self) -> int:
        """Number of clusters."""
        return len(self.record_.shares)

    @property
    def clusters(self) -> pd.RangeIndex:
        """Numbers of the clusters."""
        return pd.RangeIndex(1, self.n_clusters + 1, name="cluster")

    @property
    def posterior(self) -> pd.DataFrame:
        """Probability of every cluster for every entity, (n, K), in the order of the partition.

        It is not in a file of results; :meth:`predict` makes it anew.
        """
        live = self._alive("posterior")
        return pd.DataFrame(live.fit.r, index=live.model.partition.entities, columns=self.clusters)

    @property
    def labels(self) -> pd.Series:
        """Most likely cluster of every entity, from 1."""
        posterior = self.posterior
        return pd.Series(posterior.to_numpy().argmax(axis=1) + 1, index=posterior.index, name="cluster")

    @property
    def sizes(self) -> pd.DataFrame:
        """Shares of the clusters, and entities of which each is the most likely one."""
        r = self.record_
        columns = {"share": r.shares, "entities": r.sizes.astype(np.int64)}
        return pd.DataFrame(columns, index=self.clusters)

    @property
    def entropy(self) -> float:
        """One where posteriors are certain, zero where they tell nothing."""
        K, r = self.n_clusters, self.record_
        return 1.0 - r.entropy / (r.n * float(np.log(K))) if K > 1 else 1.0

    @property
    def classification(self) -> pd.DataFrame:
        """Mean posterior of every cluster (columns) by the most likely one (rows), with entities."""
        table = pd.DataFrame(
            self.record_.classified,
            index=self.clusters.rename("most likely"),
            columns=[*self.clusters, "entities"],
        )
        return table.astype({"entities": np.int64})

    # ---- what they are like ----------------------------------------------------------------------

    def profiles(self) -> pd.DataFrame:
        """Means of continuous columns and probabilities of levels by cluster.

        Returns
        -------
        DataFrame
            Index (client, modality, column, level), the level empty for means; one column a cluster.
        """
        keys, rows = [], []
        for client, held in self.record_.clients.items():
            for one, values, _, _ in held.parts:
                for p, column in enumerate(one.columns):
                    for c, level in enumerate(column.levels or ("",)):
                        keys.append((client, one.name, column.name, str(level)))
                        rows.append(values[:, p, c])
        index = pd.MultiIndex.from_tuples(keys, names=["client", "modality", "column", "level"])
        return pd.DataFrame(np.array(rows), index=index, columns=self.clusters)

    @property
    def modalities(self) -> pd.DataFrame:
        """By modality: kind, columns, entities, by how much it tells clusters apart, whether selected.

        ``distance`` is in standard deviations of what its columns tell of its factors; 0 where its means are
        the same in all clusters.
        """
        rows = [
            {
                "client": client,
                "modality": one.name,
                "kind": one.kind,
                "columns": len(one.columns),
                "loaded": int((norms > 0.0).sum()),
                "entities": held.entities,
                "distance": relevance**0.5,
                "selected": relevance > 0.0,
            }
            for client, held in self.record_.clients.items()
            for one, _, norms, relevance in held.parts
        ]
        frame = pd.DataFrame(rows).set_index(["client", "modality"])
        return frame if self.record_.frequencies is None else frame.assign(frequency=self._frequencies()[1])

    @property
    def features(self) -> pd.DataFrame:
        """By column: kind, length of its loadings, and whether it tells clusters apart.

        That is so where it has loadings on factors whose means differ by cluster.
        """
        rows = [
            {
                "client": client,
                "modality": one.name,
                "column": column.name,
                "kind": column.kind,
                "loading": norm,
                "selected": norm > 0.0 and relevance > 0.0,
            }
            for client, held in self.record_.clients.items()
            for one, _, norms, relevance in held.parts
            for column, norm in zip(one.columns, norms.tolist(), strict=True)
        ]
        frame = pd.DataFrame(rows).set_index(["client", "modality", "column"])
        return frame if self.record_.frequencies is None else frame.assign(frequency=self._frequencies()[0])

    def _frequencies(self) -> tuple[Floats, Floats]:
        """Selection frequencies of columns, and of modalities, in the order of the clients."""
        found = self.record_.frequencies
        assert found is not None
        sizes = [len(one.columns) for held in self.record_.clients.values() for one in held.modalities]
        ends = np.cumsum([size + 1 for size in sizes])
        parts = np.split(found, ends[:-1])
        return np.concatenate([part[:-1] for part in parts]), np.array([part[-1] for part in parts])

    def tidy(self) -> pd.DataFrame:
        """Profiles in one frame, a row for each cluster and column or level: estimate."""
        return self.profiles().stack().rename("estimate").reset_index()

    # ---- how good --------------------------------------------------------------------------------

    @property
    def llf(self) -> float:
        """Observed log-likelihood."""
        return self.record_.loglik

    @property
    def df_model(self) -> int:
        """Number of free parameters."""
        return self.record_.parameters

    @property
    def nobs(self) -> int:
        """Number of entities."""
        return self.record_.n

    @property
    def bic(self) -> float:
        """Schwarz's criterion; the lower the better."""
        return -2.0 * self.llf + self.df_model * float(np.log(self.nobs))

    @property
    def icl(self) -> float:
        """BIC and twice the entropy of the posteriors."""
        return self.bic + 2.0 * self.record_.entropy

    @property
    def converged(self) -> bool:
        """Whether the fit came to an end."""
        return self.record_.converged

    @property
    def history(self) -> pd.DataFrame:
        """Penalised log-likelihood of every mixture that was improved, by round."""
        return pd.DataFrame(list(self.record_.history), columns=["round", "mixture", "llf"])

    @property
    def path(self) -> pd.DataFrame:
        """What penalties led to which support, and what its refit without penalties is worth."""
        rows = [
            {
                "lam1": one.penalties.lam1,
                "lam2": one.penalties.lam2,
                "columns": one.columns,
                "modalities": one.modalities,
                "parameters": one.parameters,
                "llf": one.loglik,
                str(self.record_.select): one.criterion,
            }
            for one in self.record_.judged
        ]
        return pd.DataFrame(rows)

    # ---- pictures --------------------------------------------------------------------------------

    def plot_profiles(self, selected: bool = True) -> Figure:
        """Draw clusters' means, and mean places of levels, a panel for each modality.

        Parameters
        ----------
        selected : bool
            Whether only columns that tell clusters apart are drawn.

        Returns
        -------
        matplotlib Figure
        """
        return plot_cluster_profiles(self, selected)

    def plot_heat(self, ax: Axes | None = None) -> Axes:
        """Draw how far each cluster's columns are from their means over clusters, as a heat map."""
        return plot_profile_heat(self, ax)

    # ---- printed ---------------------------------------------------------------------------------

    def summary(self) -> SheetSummary:
        """Lay out fit and exchange, clusters, modalities, and what is to be known of them."""
        return summarise(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.n_clusters} clusters of {self.nobs:,} entities; see .summary()>"

    def _repr_html_(self) -> str:
        return self.summary().as_html()

    # ---- files -----------------------------------------------------------------------------------

    def to_record(self) -> M2SEMRecord:
        """Take the results apart for a file."""
        values = {name: getattr(self.record_, name) for name in M2SEMRecord.__slots__}
        return M2SEMRecord(**{**values, "ledger": SavedLedger.of(self.ledger)})

    @classmethod
    def of_record(cls, record: M2SEMRecord) -> Self:
        """Rebuild results from what is kept of them."""
        return cls(record, None if record.ledger is None else record.ledger.restore())

    def _alive(self, what: str) -> Live:
        if self._live is None:
            raise NotAvailableError(
                f"{what}: a file of results holds no value of an entity; predict(partition) makes posteriors, "
                "and a new fit the rest"
            )
        return self._live  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """What results of this session can ask on: the model, whose clients hold the mixture, and the fit."""

    model: Any
    fit: MixtureFit


def at_floor(modalities: tuple[ModalityAsked, ...], floor: Floats) -> tuple[str, ...]:
    """Names of the columns that are marked, (sum of P,)."""
    names = [name for one in modalities for name in one.names]
    return tuple(name for name, here in zip(names, floor.tolist(), strict=True) if here)

