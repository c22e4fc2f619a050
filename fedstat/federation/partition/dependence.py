"""Rank correlation within and between sites, and a test of independence between two sites.

A model for vertical partitions may assume that the sites' covariates are independent of each other. This
module checks the assumption, with all columns in one process.

References
----------
Bartlett, M. S. (1939). A note on tests of significance in multivariate analysis. Mathematical
    Proceedings of the Cambridge Philosophical Society 35, 180-185.
Mardia, K. V., Kent, J. T. and Bibby, J. M. (1979). Multivariate Analysis, section 10.2.
Puri, M. L. and Sen, P. K. (1971). Nonparametric Methods in Multivariate Analysis, chapter 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import numpy as np
import pandas as pd
from scipy.special import chdtrc

from fedstat.errors import PartitionError
from fedstat.kernels.multiple_tests import adjust
from fedstat.typing import Array, Bools, Floats, Ints

RANK_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class BlockCorrelation:
    """Spearman rank correlations of the numeric columns of all sites.

    Attributes
    ----------
    matrix : DataFrame, (p, p)
        Each entry over all entities that have both columns; NaN where fewer than three do.
    site_of : mapping of str to str
        The site of each column.
    n : DataFrame of int, (p, p)
        Entities behind each entry.
    pairs : DataFrame
        One row per pair of sites: ``client_1``, ``client_2``; ``n_common``, entities with every
        numeric column of both; ``mean_abs`` and ``max_abs`` of the correlations between them;
        ``statistic`` and ``df`` of Bartlett's chi-square test of independence on ranks, with
        ``p_value`` and ``p_adjusted`` (Holm); ``flagged`` if ``p_adjusted < alpha`` and
        ``max_abs > threshold``. The test is NaN where too few entities are common.
    alpha, threshold : float
        Thresholds of ``flagged``.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(300, seed=1)
    >>> dependence = fs.ClientPartition.from_frames(data.frames, on=data.key).correlation()
    >>> round(dependence.mean_between, 1), round(dependence.mean_within, 1), dependence.in_doubt().shape
    (0.1, 0.3, (8, 8))
    """

    matrix: pd.DataFrame
    site_of: Mapping[str, str]
    n: pd.DataFrame
    pairs: pd.DataFrame
    alpha: float
    threshold: float

    @property
    def mean_within(self) -> float:
        """Mean absolute correlation of two columns of the same site."""
        return _mean_abs(self.matrix.to_numpy(), self._same_site())

    @property
    def mean_between(self) -> float:
        """Mean absolute correlation of two columns of different sites."""
        return _mean_abs(self.matrix.to_numpy(), ~self._same_site())

    def in_doubt(self) -> pd.DataFrame:
        """Entries between flagged sites that exceed the threshold, as a bool DataFrame (p, p)."""
        flagged = self.pairs[self.pairs["flagged"]]
        pairs = {frozenset(pair) for pair in zip(flagged["client_1"], flagged["client_2"], strict=True)}
        owners = list(self.site_of.values())
        between = [[frozenset((a, b)) in pairs for b in owners] for a in owners]
        return (self.matrix.abs() > self.threshold) & np.array(between, dtype=bool)

    def _same_site(self) -> Bools:
        owners = np.array(list(self.site_of.values()), dtype=object)
        return np.asarray(owners[:, None] == owners[None, :], dtype=bool)


@dataclass(frozen=True, slots=True)
class BartlettTest:
    """Bartlett's chi-square approximation to Wilks' lambda of two blocks."""

    statistic: float
    df: int
    p_value: float


def rank_correlation(
    frames: Mapping[str, pd.DataFrame],
    rows: Mapping[str, Ints],
    n_entities: int,
    *,
    alpha: float = 0.05,
    threshold: float = 0.1,
) -> BlockCorrelation:
    """Correlate the ranks of all numeric columns of the records (m_k, p_k), and test pairs of sites.

    `rows` (m_k,) are their entities' positions, `alpha` the level after Holm's adjustment and `threshold` the
    smallest absolute correlation worth a flag. PartitionError if no site has a numeric column.
    """
    blocks = {c: _numeric_block(frame, rows[c], n_entities) for c, frame in frames.items()}
    site_of = {name: c for c, block in blocks.items() for name in block.columns}
    if not site_of:
        raise PartitionError("no site has a numeric column: there is no rank correlation to compute.")
    pooled = pd.concat(blocks.values(), axis=1)
    R, N = spearman(pooled.to_numpy())
    names = list(site_of)
    matrix = pd.DataFrame(R, index=names, columns=names)
    pairs = _test_pairs({c: block for c, block in blocks.items() if block.shape[1]}, matrix)
    pairs["p_adjusted"] = adjust(pairs["p_value"].to_numpy(dtype=np.float64))
    pairs["flagged"] = (pairs["p_adjusted"] < alpha) & (pairs["max_abs"] > threshold)
    counts = pd.DataFrame(N, index=names, columns=names)
    return BlockCorrelation(matrix, site_of, counts, pairs, alpha, threshold)


def spearman(X: Floats) -> tuple[Floats, Ints]:
    """Spearman correlation R (p, p) of each two columns of X (n, p) over the N (p, p) rows that have both.

    NaN is missing; R is NaN with fewer than three rows or a constant column. Columns missing in the same rows
    are ranked together, once per pair of such groups.
    """
    p = X.shape[1]
    R, N = np.full((p, p), np.nan), np.zeros((p, p), dtype=np.int64)
    for (seen_a, a), (seen_b, b) in combinations_with_replacement(_group_by_mask(X), 2):
        common = seen_a & seen_b
        n_common = int(common.sum())
        # of two entities every rank correlation is 1 or -1
        block = correlate_ranks(X[np.ix_(common, a)], X[np.ix_(common, b)]) if n_common > 2 else np.nan
        R[np.ix_(a, b)], N[np.ix_(a, b)] = block, n_common
        R[np.ix_(b, a)], N[np.ix_(b, a)] = np.transpose(block), n_common
    return R, N


def correlate_ranks(X: Floats, Y: Floats) -> Floats:
    """Correlation (p, q) of the ranks of the columns of X (n, p) with those of Y (n, q)."""
    # rounding may go beyond 1 by a unit in the last place
    return np.clip(_standard_ranks(X).T @ _standard_ranks(Y), -1.0, 1.0)


def bartlett_test(X: Floats, Y: Floats) -> BartlettTest:
    """Test two complete blocks of columns, X (n, p) and Y (n, q), for independence by canonical correlations.

    With canonical correlations r_j of the ranks and r_x, r_y the ranks of the two blocks, ``-(n - (r_x + r_y
    + 3) / 2) * sum log(1 - r_j^2)`` is nearly chi-square with ``r_x * r_y`` degrees of freedom (Bartlett
    1939; Mardia, Kent and Bibby 1979, section 10.2; on ranks: Puri and Sen 1971). NaN where n does not exceed
    p + q + 1.
    """
    n = len(X)
    if n <= X.shape[1] + Y.shape[1] + 1:
        return BartlettTest(np.nan, 0, np.nan)
    U, V = _orthonormal(_standard_ranks(X)), _orthonormal(_standard_ranks(Y))
    df = U.shape[1] * V.shape[1]
    if df == 0:
        return BartlettTest(np.nan, 0, np.nan)
    r = np.linalg.svd(U.T @ V, compute_uv=False)
    # collinear blocks have r = 1, whose logarithm is not finite
    log_lambda = np.log1p(-np.minimum(r**2, 1 - np.finfo(float).eps)).sum()
    statistic = -(n - (U.shape[1] + V.shape[1] + 3) / 2) * log_lambda
    return BartlettTest(float(statistic), df, float(chdtrc(df, statistic)))


def _numeric_block(frame: pd.DataFrame, rows: Ints, n_entities: int) -> pd.DataFrame:
    """Place the numeric columns of one site at their entities, with NaN elsewhere."""
    numeric = frame.select_dtypes(include=["number", "bool"])
    values = np.full((n_entities, numeric.shape[1]), np.nan)
    values[rows] = numeric.to_numpy(dtype=np.float64, na_value=np.nan)
    return pd.DataFrame(values, columns=numeric.columns)


def _test_pairs(blocks: Mapping[str, pd.DataFrame], matrix: pd.DataFrame) -> pd.DataFrame:
    records = []
    for (a, X), (b, Y) in combinations(blocks.items(), 2):
        common = X.notna().all(axis=1) & Y.notna().all(axis=1)
        test = bartlett_test(X[common].to_numpy(), Y[common].to_numpy())
        between = matrix.loc[list(X.columns), list(Y.columns)].abs().to_numpy()
        known = between[~np.isnan(between)]
        records.append(
            {
                "client_1": a,
                "client_2": b,
                "n_common": int(common.sum()),
                "mean_abs": known.mean() if known.size else np.nan,
                "max_abs": known.max() if known.size else np.nan,
                "statistic": test.statistic,
                "df": test.df,
                "p_value": test.p_value,
            }
        )
    columns = ["client_1", "client_2", "n_common", "mean_abs", "max_abs", "statistic", "df", "p_value"]
    return pd.DataFrame(records, columns=columns)


def _group_by_mask(X: Floats) -> list[tuple[Bools, Ints]]:
    """Columns in groups that are seen in the same rows: (rows seen, column numbers)."""
    groups: dict[bytes, list[int]] = {}
    seen = ~np.isnan(X)
    for j in range(X.shape[1]):
        groups.setdefault(np.packbits(seen[:, j]).tobytes(), []).append(j)
    return [(seen[:, columns[0]], np.array(columns)) for columns in groups.values()]


def _standard_ranks(X: Floats) -> Floats:
    """Average ranks of each column, centered and of length one."""
    ranks = pd.DataFrame(X).rank().to_numpy()
    ranks = ranks - ranks.mean(axis=0)
    with np.errstate(invalid="ignore"):  # a constant column becomes NaN
        standard: Floats = ranks / np.sqrt((ranks**2).sum(axis=0))
    return standard


def _orthonormal(Z: Floats) -> Floats:
    """Find an orthonormal basis of the columns of Z; constant and collinear ones add nothing."""
    Z = Z[:, ~np.isnan(Z).any(axis=0)]
    U, s, _ = np.linalg.svd(Z, full_matrices=False)
    # the columns have length one, so that 1 is the scale where all singular values are small
    basis: Floats = U[:, s > RANK_TOLERANCE * max(s[0], 1.0)] if len(s) else U
    return basis


def _mean_abs(R: Floats, chosen: Array) -> float:
    """Mean of |R| over the chosen entries above the diagonal."""
    upper = np.triu(chosen, k=1) & ~np.isnan(R)
    return float(np.abs(R[upper]).mean()) if upper.any() else float("nan")
