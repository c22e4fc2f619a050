"""Simulated clusters of entities over sites whose columns are of different types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
from scipy.special import expit, ndtr

from fedstat.datasets.simulation import require_argument
from fedstat.typing import Array, Floats, Ints

Kind: TypeAlias = Literal["continuous", "ordinal"]

LEVELS = ("none", "mild", "moderate", "severe")
CUTS = np.array([-1.5, 0.0, 1.5])
SHARES = (0.3, 0.4, 0.3)
"""Shares of the three clusters of the published experiments, in the order of their means."""
EXPERIMENTS: Mapping[int, tuple[int, int]] = {1: (8, 20), 2: (8, 40), 3: (8, 80), 4: (16, 20), 5: (24, 20)}
"""Sites, and columns of each, of the published experiments."""
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(41)


def _covariance(first: float, between: float, second: float) -> Floats:
    return np.array([[first, between], [between, second]])


FACTORS: Mapping[int, tuple[Floats, tuple[Floats, ...]]] = {
    0: (np.array([[0.2, 1.8], [-1.5, -1.5], [1.1, -1.5]]), (_covariance(0.25, -0.21, 0.37),) * 3),
    1: (np.array([[1.55, -1.75], [-1.15, 1.75], [1.75, 1.75]]), (_covariance(0.23, 0.15, 0.3),) * 3),
    4: (
        np.array([[-1.59, 0.77], [1.5, 0.16], [-0.01, -1.15]]),
        (_covariance(0.17, 0.08, 0.14), _covariance(0.16, -0.08, 0.12), _covariance(0.1, -0.01, 0.09)),
    ),
    5: (
        np.array([[0.96, -1.35], [-1.15, 1.54], [1.11, 1.37]]),
        (_covariance(0.12, -0.07, 0.17), _covariance(0.09, -0.06, 0.13), _covariance(0.15, 0.04, 0.11)),
    ),
}
"""Means (3, 2) and covariances of the factors by cluster, at sites whose factors differ: Table 2."""


@dataclass(frozen=True, slots=True)
class SimulatedClusters:
    """Tables of several sites whose entities belong to clusters, with the truth.

    Attributes
    ----------
    frames : dict of str to DataFrame
        One table per site, with the key and only the entities that the site has. Ordinal
        columns are ordered categories.
    key : str
        Name of the column that identifies an entity.
    labels : Series
        Cluster of every entity, from 0; index: the key.
    modalities : DataFrame
        Index ``site``; columns ``kind`` ("continuous" or "ordinal") and ``informative``, whether the means
        of its factors differ between clusters.
    columns : DataFrame
        Index ``variable``; columns ``site``, ``kind``, ``loaded``, whether its loadings are other than
        zero, and ``informative``, whether that is so at an informative site.
    profiles : DataFrame
        Index ``variable`` and ``category`` (empty for continuous columns); one column per cluster: the mean
        of the variable, or the probability of the category.
    shares : tuple of float
        Probability of every cluster.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    >>> data.labels.nunique(), len(data.columns), data.key
    (2, 6, 'id')
    """

    frames: dict[str, pd.DataFrame]
    key: str
    labels: pd.Series
    modalities: pd.DataFrame
    columns: pd.DataFrame
    profiles: pd.DataFrame
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Modality:
    """The distribution of one site: factors N(means[k], covariances[k]), loadings (P, Q), noise.

    Ordinal columns are a latent one cut at fixed thresholds; its noise is logistic where `noise` is None.
    """

    kind: Kind
    means: Floats
    covariances: Sequence[Floats]
    loadings: Floats
    noise: float | None

    @property
    def informative(self) -> bool:
        return bool(np.ptp(self.means, axis=0).any())

    def draw(self, labels: Ints, rng: np.random.Generator) -> Array:
        """Draw the columns of the entities: (n, P); of an ordinal one the number of its level."""
        roots = np.array([np.linalg.cholesky(covariance) for covariance in self.covariances])
        deviations = rng.standard_normal((labels.size, self.means.shape[1]))
        factors: Floats = self.means[labels] + np.einsum("iqr,ir->iq", roots[labels], deviations)
        latent: Floats = factors @ self.loadings.T
        if self.noise is None:
            latent += rng.logistic(size=latent.shape)
        else:
            latent += self.noise * rng.standard_normal(latent.shape)
        return np.searchsorted(CUTS, latent) if self.kind == "ordinal" else latent

    def profile(self, column: int) -> Floats:
        """Mean by cluster (1, K), or probabilities of the levels (C, K)."""
        loading = self.loadings[column]
        center: Floats = self.means @ loading
        if self.kind == "continuous":
            return center[None]
        spread = np.sqrt([loading @ covariance @ loading for covariance in self.covariances])
        cuts = CUTS[:, None]
        if self.noise is None:
            latent = center[:, None] + spread[:, None] * NODES
            below = expit(cuts[..., None] - latent) @ WEIGHTS / WEIGHTS.sum()
        else:
            below = ndtr((cuts - center) / np.hypot(spread, self.noise))
        return np.diff(np.pad(below, ((1, 1), (0, 0)), constant_values=((0.0, 1.0), (0.0, 0.0))), axis=0)


def make_cluster_experiment(
    experiment: int | Literal["noisy"] = 1,
    n: int = 400,
    *,
    noise: float = 3.0,
    seed: int | np.random.Generator = 0,
) -> SimulatedClusters:
    """Simulate an experiment of Ding (2024, chapter 2): three clusters, two factors a site.

    Of eight sites, the first four have continuous columns and the others ordinal ones; the means of
    the factors differ between clusters at the first two of either kind (Table 2), and are standard normal
    at the others. A quarter of the columns of every site load on its factors. Experiments 1 to 3
    have 20, 40 and 80 columns per site; experiments 4 and 5 have 8 and 16 further sites, in
    turn continuous and ordinal, that are uninformative.

    The publication leaves open the loadings, the thresholds and the noise. Here loadings are drawn from
    U(.5, 1) with random signs, and thresholds are -1.5, 0 and 1.5.

    Parameters
    ----------
    experiment : {1, 2, 3, 4, 5, "noisy"}
        "noisy" is experiment 1 with ordinal columns that are as noisy as the continuous ones: a continuous
        column cut at the thresholds. In the others ordinal columns have logistic noise.
    n : int
        Number of entities, at least 2.
    noise : float
        Standard deviation of what is added to continuous columns.
    seed : int or numpy.random.Generator
        Source of randomness.

    Returns
    -------
    SimulatedClusters
        With the key ``id``; sites ``"Client 1"``, ..., columns ``"c1_1"``, ...

    Raises
    ------
    ModelError
        If an argument is out of its range.

    References
    ----------
    Ding, Y. (2024). Statistical machine learning and data fusion methodologies: applications in
    healthcare. Doctoral dissertation, Binghamton University, chapter 2.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_cluster_experiment(1, seed=1)
    >>> len(data.frames), int(data.modalities["informative"].sum()), int(data.columns["informative"].sum())
    (8, 4, 20)
    """
    which = "make_cluster_experiment"
    known = (*EXPERIMENTS, "noisy")
    require_argument(
        experiment in known, f"{which}: expected experiment to be one of {known}, received {experiment!r}."
    )
    require_argument(n >= 2, f"{which}: expected n of at least 2 entities, received {n}.")
    require_argument(noise > 0, f"{which}: expected a positive noise, received {noise}.")
    rng = np.random.default_rng(seed)
    sites, P = EXPERIMENTS[1 if experiment == "noisy" else int(experiment)]
    labels = rng.choice(len(SHARES), size=n, p=SHARES)
    null = np.zeros((len(SHARES), 2)), (np.eye(2),) * len(SHARES)
    modalities = []
    for site in range(sites):
        means, covariances = FACTORS.get(site, null)
        loadings = np.zeros((P, 2))
        size, sign = rng.uniform(0.5, 1.0, (P // 4, 2)), rng.choice([-1.0, 1.0], (P // 4, 2))
        loadings[: P // 4] = size * sign
        continuous = site < 4 or (site >= 8 and site % 2 == 0)
        kind: Kind = "continuous" if continuous else "ordinal"
        sd = noise if continuous or experiment == "noisy" else None
        modalities.append(_Modality(kind, means, covariances, loadings, sd))
    return _lay_out(modalities, labels, SHARES, np.zeros(sites), rng)


def make_clusters(
    n: int = 400,
    kinds: Sequence[Kind] = ("continuous", "continuous", "continuous"),
    *,
    shares: Sequence[float] = (0.4, 0.6),
    p: int = 4,
    separation: float = 2.2,
    informative: Sequence[bool] | None = None,
    missing: float = 0.0,
    seed: int | np.random.Generator = 0,
) -> SimulatedClusters:
    """Simulate clusters of entities, with one factor and the same loadings at every site.

    Within a cluster the factor of a site is normal with variance 1; its means lie `separation`
    apart, in another order at every site where there are more than two clusters. Loadings go from .6
    to 1.2. The noise is standard normal; ordinal columns have logistic noise and thresholds -1.5, 0, 1.5.

    Parameters
    ----------
    n : int
        Number of entities, at least 2.
    kinds : sequence of {"continuous", "ordinal"}
        Kind of the columns of every site.
    shares : sequence of float
        Probability of every cluster.
    p : int
        Columns of every site.
    separation : float
        Between the means of neighboring clusters, in standard deviations of the factor.
    informative : sequence of bool, optional
        Whether the means differ, per site; by default at all.
    missing : float
        Share of the entities that every site lacks, at random, in [0, 1). Each is known to one
        site at least.
    seed : int or numpy.random.Generator
        Source of randomness.

    Returns
    -------
    SimulatedClusters
        With the key ``id``; sites ``"Client 1"``, ..., columns ``"c1_1"``, ...

    Raises
    ------
    ModelError
        If an argument is out of its range.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    >>> [list(frame) for frame in data.frames.values()]
    [['id', 'c1_1', 'c1_2', 'c1_3'], ['id', 'c2_1', 'c2_2', 'c2_3']]
    """
    weights = np.asarray(shares, dtype=np.float64)
    reports = [True] * len(kinds) if informative is None else list(informative)
    checks = {
        f"n of at least 2 entities, received {n}": n >= 2,
        f"kinds 'continuous' or 'ordinal', one a site, received {list(kinds)}": (
            len(kinds) > 0 and set(kinds) <= {"continuous", "ordinal"}
        ),
        f"positive shares that add up to 1, received {list(shares)}": (
            weights.ndim == 1 and bool((weights > 0).all()) and abs(weights.sum() - 1.0) < 1e-9
        ),
        f"p of at least 1 column, received {p}": p >= 1,
        f"one value of informative per site, received {len(reports)}": len(reports) == len(kinds),
        f"a share of missing entities in [0, 1), received {missing}": 0 <= missing < 1,
    }
    for expected, holds in checks.items():
        require_argument(holds, f"make_clusters: expected {expected}.")
    rng = np.random.default_rng(seed)
    K = weights.size
    labels = rng.choice(K, size=n, p=weights)
    places: Floats = (np.arange(K, dtype=np.float64) - (K - 1) / 2) * separation
    # Two clusters keep their order, so that a reader of a profile finds the same one high everywhere.
    orders = [np.arange(K) if K == 2 else rng.permutation(K) for _ in kinds]
    loadings: Floats = np.linspace(0.6, 1.2, p, dtype=np.float64)[:, None]
    modalities = [
        _Modality(kind, (places[order] * reported)[:, None], (np.eye(1),) * K, loadings, noise)
        for kind, order, reported in zip(kinds, orders, reports, strict=True)
        for noise in [1.0 if kind == "continuous" else None]
    ]
    return _lay_out(modalities, labels, tuple(weights.tolist()), np.full(len(kinds), missing), rng)


def _lay_out(
    modalities: Sequence[_Modality],
    labels: Ints,
    shares: tuple[float, ...],
    missing: Floats,
    rng: np.random.Generator,
) -> SimulatedClusters:
    """Draw the columns, and arrange them as tables of sites with the truth."""
    ids = pd.Index(np.arange(1, labels.size + 1), name="id")
    has = rng.uniform(size=(labels.size, len(modalities))) >= missing
    nowhere = np.flatnonzero(~has.any(axis=1))
    has[nowhere, rng.integers(len(modalities), size=nowhere.size)] = True
    sites = [f"Client {m}" for m in range(1, len(modalities) + 1)]
    names = [
        [f"c{m}_{j}" for j in range(1, len(modality.loadings) + 1)]
        for m, modality in enumerate(modalities, 1)
    ]
    frames = {}
    for site, held, modality, seen in zip(sites, names, modalities, has.T, strict=True):
        drawn = modality.draw(labels, rng)
        frame = pd.DataFrame({name: _column(modality.kind, x) for name, x in zip(held, drawn.T, strict=True)})
        frame.insert(0, "id", ids)
        frames[site] = frame[seen].reset_index(drop=True)
    kinds = pd.DataFrame(
        {"kind": [m.kind for m in modalities], "informative": [m.informative for m in modalities]},
        index=pd.Index(sites, name="client"),
    )
    columns = kinds.loc[np.repeat(sites, [len(held) for held in names])].reset_index()
    columns.index = pd.Index([name for held in names for name in held], name="variable")
    columns.insert(2, "loaded", np.concatenate([m.loadings.any(axis=1) for m in modalities]))
    columns["informative"] &= columns["loaded"]
    series = pd.Series(labels, index=ids, name="cluster")
    return SimulatedClusters(frames, "id", series, kinds, columns, _profiles(names, modalities), shares)


def _column(kind: Kind, x: Array) -> Array | pd.Categorical[str]:
    if kind == "continuous":
        return x
    return pd.Categorical.from_codes(x.tolist(), categories=pd.Index(LEVELS), ordered=True)


def _profiles(names: Sequence[Sequence[str]], modalities: Sequence[_Modality]) -> pd.DataFrame:
    def rows() -> Iterator[tuple[str, str, Floats]]:
        for columns, modality in zip(names, modalities, strict=True):
            levels = LEVELS if modality.kind == "ordinal" else ("",)
            for j, name in enumerate(columns):
                yield from ((name, *row) for row in zip(levels, modality.profile(j), strict=True))

    reported = list(rows())
    index = pd.MultiIndex.from_tuples([row[:2] for row in reported], names=["variable", "category"])
    values = np.array([row[2] for row in reported])
    return pd.DataFrame(values, index=index, columns=pd.RangeIndex(values.shape[1], name="cluster"))
