"""Mixture models: quality of the classification, and BCH-corrected means and shares by cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError
from fedstat.inference.likelihood import bic
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import DerivedReport
from fedstat.inference.tables import Sheet, number
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Separation of the clusters of a mixture: entropy, classification, and a criterion that includes both.

OVERLAP = 0.8
"""Relative entropy below which standard errors from the information may be too small."""
TINY = 1e-300
NOTES = Catalogue(
    info={
        "weights": "Entities in their most likely clusters, weighted by the inverse of the classification "
        "errors (Bolck, Croon and Hagenaars 2004); robust standard errors, with the clusters treated as "
        "known.",
        "outside_unit": "Shares below 0 or above 1 are due to the weights and few entities.",
    },
)


def posterior_entropy(r: Floats) -> float:
    """Entropy of posteriors (n, K), added up over entities: ``-sum r log r``."""
    return float(-(r * np.log(np.maximum(r, TINY))).sum())


def relative_entropy(r: Floats) -> float:
    """One if posteriors (n, K) are certain, zero if they carry no information; one for a single cluster."""
    n, K = r.shape
    return 1.0 - posterior_entropy(r) / (n * float(np.log(K))) if K > 1 else 1.0


def integrated_criterion(minus_twice_llf: float, df: float, nobs: float, r: Floats) -> float:
    """Return the integrated criterion, BIC and twice the entropy of the posteriors (n, K).

    Biernacki, C., Celeux, G. and Govaert, G. (2000). Assessing a mixture model for clustering with the
    integrated completed likelihood. IEEE Transactions on Pattern Analysis and Machine Intelligence 22.
    """
    return float(bic(minus_twice_llf, df, nobs)) + 2.0 * posterior_entropy(r)


def hard_assignment(r: Floats) -> Floats:
    """Posteriors (n, K) that are certain of the most likely cluster."""
    return np.asarray(np.eye(r.shape[1])[np.argmax(r, axis=1)])


def classification_table(r: Floats) -> pd.DataFrame:
    """Mean posterior of every cluster (columns) by the most likely cluster (rows), with entities.

    Rows of a cluster that is the most likely one of no entity are nan.
    """
    K = r.shape[1]
    modal = hard_assignment(r)
    counts = modal.sum(axis=0)
    with np.errstate(invalid="ignore"):
        means = modal.T @ r / counts[:, None]
    clusters = pd.RangeIndex(1, K + 1)
    table = pd.DataFrame(means, index=clusters.rename("most likely"), columns=clusters.rename("cluster"))
    return table.assign(entities=counts.astype(np.int64))


def classification_errors(r: Floats) -> Floats:
    """Probabilities (K, K) that an entity of a cluster (rows) has each one as its most likely (columns)."""
    return np.asarray(r.T @ hard_assignment(r) / r.sum(axis=0)[:, None])


# ----------------------------------------------------------------------------------------------------
# Variables outside a mixture: their means or shares by cluster, corrected for classification errors.
#
# Entities are assigned to their most likely clusters, and sums over these are weighted by the inverse of the
# classification errors, so that the clusters themselves are compared (Bolck, Croon and Hagenaars 2004).
# Entities with the same most likely cluster have the same weights, so only sums over these are needed.
#
# References
# ----------
# Bakk, Z., Tekle, F. B. and Vermunt, J. K. (2013). Estimating the association between latent class membership
# and external variables using bias-adjusted three-step approaches. Sociological Methodology 43.
# Bolck, A., Croon, M. and Hagenaars, J. (2004). Estimating latent structure models with categorical
# variables: one-step versus three-step estimators. Political Analysis 12.

LEAST_EIGENVALUE = 1e-6
"""Largest condition number of the matrix of classification errors, whose inverse is used."""


@dataclass(frozen=True, slots=True, eq=False)
class SumsByMostLikelyCluster:
    """An outside variable of C components by most likely cluster: entities (K,), means (K, C) among them.

    For a categorical variable, components are indicators of its levels. `products` (K, C, C) are sums of
    products about the means. A cluster that is the most likely one of no entity has zeros.
    """

    entities: Floats
    means: Floats
    products: Floats


def weigh_by_cluster(errors: Floats, sums: SumsByMostLikelyCluster) -> tuple[Floats, Floats]:
    """Means (K, C) by cluster, and their robust covariance (K C, K C), cluster by cluster.

    Each mean solves ``sum_i w_ik (y_i - m_k) = 0``; the sandwich treats the weights as known. Raises
    EstimationError if the classification `errors` (K, K) have no inverse.
    """
    singular = np.linalg.svd(errors, compute_uv=False)
    if singular[-1] < LEAST_EIGENVALUE * singular[0]:
        raise EstimationError(
            "outside variables: the most likely clusters do not identify the clusters (a cluster is the "
            "most likely one of no entity, or two overlap completely); take fewer clusters"
        )
    W = np.linalg.inv(errors)
    N = sums.entities @ W
    if not (N > 0.0).all():
        wrong = ", ".join(str(k + 1) for k in np.flatnonzero(~(N > 0.0)))
        raise EstimationError(
            f"outside variables: cluster {wrong} has no entities with the variable, after correction for "
            "classification; take fewer clusters, or a variable that more entities have"
        )
    means = W.T @ (sums.entities[:, None] * sums.means) / N[:, None]
    weights = W / N
    K, C = means.shape
    apart = sums.means[:, None] - means
    outer = sums.products[:, None, :, None] + np.einsum("s,skc,slb->skclb", sums.entities, apart, apart)
    cov = np.einsum("sk,sl,skclb->kclb", weights, weights, outer)
    return means, cov.reshape(K * C, K * C)


class OutsideResults(DerivedReport):
    """An outside variable by cluster, with robust standard errors.

    `levels` are those of the variable, and intervals have level one minus `alpha`.

    Attributes
    ----------
    variable, site : str
        The variable, and the site that holds it.
    estimates : DataFrame
        Rows by cluster, from 1, and level (of a categorical variable); columns ``estimate``, ``std_error``,
        ``conf_low``, ``conf_high``: means, or shares of levels.
    differences : DataFrame
        The same for pairs of clusters, with ``statistic`` and ``p_value``.
    statistic, df, pvalue : float, int, float
        Wald test that all clusters have the same means or shares.
    nobs : int
        Entities with the variable.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(300, ["continuous", "ordinal"], p=3, seed=1)
    >>> first = data.frames["Client 1"]
    >>> first["cost"] = data.labels.to_numpy() + first["c1_1"] / 10
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> formula = "~ c1_1 + c1_2 + c1_3 + c2_1 + c2_2 + c2_3"
    >>> model = fs.M2SEM.from_formula(formula, partition, n_clusters=2, n_factors=1)
    >>> fit = model.fit(select=None, n_init=1)
    >>> found = fit.outside("cost")
    >>> found.categorical, found.tidy().shape, "cost" in found.summary().as_text()
    (False, (2, 5), True)
    """

    def __init__(
        self,
        variable: str,
        site: str,
        levels: Sequence[str],
        errors: Floats,
        sums: SumsByMostLikelyCluster,
        alpha: float = 0.05,
        *,
        sources: Iterable[object],
    ) -> None:
        super().__init__(sources)
        means, cov = weigh_by_cluster(errors, sums)
        K, C = means.shape
        self.variable, self.site, self.levels, self.alpha = variable, site, tuple(levels), alpha
        self.nobs = round(float(sums.entities.sum()))
        clusters = range(1, K + 1)
        self.estimates = self._table(
            [(k, *level) for k in clusters for level in self._each_level()],
            ["cluster"],
            means.ravel(),
            np.sqrt(np.diag(cov)),
        )
        pairs = list(combinations(range(K), 2))
        R = np.concatenate([_difference(K, C, a, b) for a, b in pairs]) if pairs else np.zeros((0, K * C))
        difference, error = R @ means.ravel(), np.sqrt(np.einsum("ij,jk,ik->i", R, cov, R))
        self.differences = self._table(
            [(f"{a + 1} - {b + 1}", *level) for a, b in pairs for level in self._each_level()],
            ["clusters"],
            difference,
            error,
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            self.differences["statistic"] = difference / error
        self.differences["p_value"] = 2.0 * stats.norm.sf(np.abs(self.differences["statistic"]))
        # Shares add up to one, so the last level adds no information.
        free = max(C - 1, 1)
        R = np.concatenate(
            [_difference(K, C, k, K - 1)[:free] for k in range(K - 1)] or [np.zeros((0, K * C))]
        )
        V, d = R @ cov @ R.T, R @ means.ravel()
        self.df = int(np.linalg.matrix_rank(V, hermitian=True)) if len(V) else 0
        self.statistic = float(d @ np.linalg.pinv(V, hermitian=True) @ d)
        self.pvalue = float(stats.chi2.sf(self.statistic, self.df)) if self.df else 1.0

    @property
    def categorical(self) -> bool:
        """Whether shares of levels are compared, and not means."""
        return bool(self.levels)

    def tidy(self) -> pd.DataFrame:
        """Means or shares by cluster in one frame."""
        return self.estimates.reset_index()

    def _sheets(self) -> Iterator[Sheet]:
        """Means or shares by cluster, and their differences."""
        what = "Shares of the levels" if self.categorical else "Mean"
        held = f", held by {self.site}," if self.site else ""
        title = (
            f"{what} of {self.variable}{held} by cluster: {self.nobs:,} entities, Wald chi2({self.df}) = "
            f"{self.statistic:.2f}, p = {self.pvalue:.3f}"
        )
        yield replace(_sheet(self.estimates), title=title)
        yield _sheet(self.differences)

    def _glance(self) -> dict[str, float]:
        return {"nobs": self.nobs, "statistic": self.statistic, "df": self.df, "p_value": self.pvalue}

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("weights")
        shares = self.estimates["estimate"]
        if self.categorical and ((shares < 0.0) | (shares > 1.0)).any():
            yield NOTES.note("outside_unit")

    def __repr__(self) -> str:
        return self.summary().as_text()

    def _each_level(self) -> list[tuple[str, ...]]:
        return [(level,) for level in self.levels] or [()]

    def _table(
        self, index: list[tuple[object, ...]], names: list[str], estimate: Floats, error: Floats
    ) -> pd.DataFrame:
        half = float(stats.norm.isf(self.alpha / 2.0)) * error
        columns = {
            "estimate": estimate,
            "std_error": error,
            "conf_low": estimate - half,
            "conf_high": estimate + half,
        }
        names = [*names, *(["level"] if self.categorical else [])]
        return pd.DataFrame(columns, index=pd.MultiIndex.from_tuples(index, names=names) if index else None)


def _difference(K: int, C: int, a: int, b: int) -> Floats:
    """Contrasts (C, K C) between two clusters."""
    R = np.zeros((C, K, C))
    R[:, a], R[:, b] = np.eye(C), -np.eye(C)
    return R.reshape(C, K * C)


def _sheet(table: pd.DataFrame) -> Sheet:
    keys = [str(name) for name in table.index.names if name]
    frame = table.reset_index()
    heads = {"estimate": "estimate", "std_error": "std err", "statistic": "z", "p_value": "P>|z|"}
    heads |= {"conf_low": "low", "conf_high": "high"}
    numbers = [name for name in heads if name in frame]
    rows = [
        (*(str(row[key]) for key in keys), *(_cell(name, float(row[name])) for name in numbers))
        for row in frame.to_dict("records")
    ]
    widths = (*(24 if key == "level" else 9 for key in keys), *(6 if n == "p_value" else 10 for n in numbers))
    return Sheet(
        (*keys, *(heads[n] for n in numbers)), tuple(rows), "l" * len(keys) + "r" * len(numbers), widths
    )


def _cell(name: str, value: float) -> str:
    return f"{value:.3f}" if name == "p_value" else number(value)
