"""Tables with standard errors: profiles, contrasts, Wald tests, and communalities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import NotAvailableError, Remedy
from fedstat.models.m2sem.information import ObservedInformation
from fedstat.models.m2sem.record import FittedSite, M2SEMRecord
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Tables with standard errors: profiles, differences between clusters, Wald tests, communalities, shares.

KEYS = ["site", "modality", "column", "level"]

DIVERGED = 0.99
"""Communality of a column of levels from which its loading counts as infinite.

Its factors then determine the level, as a covariate that separates the outcomes of a logistic regression
does: one standard deviation of the factor multiplies the odds by more than e^18. The likelihood has no
maximum there, and its curvature says nothing about errors.
"""


NOBODY = 0.5
"""Expected entities of a cluster at a level below which its share counts as zero."""


def has_diverged(kind: str, communality: float, expected: Floats) -> bool:
    """Return whether the loading of a column of levels grows without limit.

    Without factors, it does so if a cluster has a level with certainty, or does not have it: `expected`
    (K, C) are expected entities of clusters at levels, empty with factors.
    """
    if kind == "continuous" or not expected.size:
        return kind != "continuous" and communality >= DIVERGED
    # The shares of an ordinal column follow from one number, which diverges if all are at the first or last.
    absent = expected[:, expected.any(axis=0)] < NOBODY
    if kind == "ordinal":
        return bool((absent[:, 1:].all(axis=1) | absent[:, :-1].all(axis=1)).any())
    return bool(absent.any())


def diverged_columns(r: M2SEMRecord) -> tuple[tuple[str, str], ...]:
    """Name the columns, and their sites, whose errors are withheld because their loadings diverge."""
    return tuple((one.key[0], one.key[2]) for one in statements_of(r) if one.diverges)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnStatements:
    """Estimates (K, C) of a column by cluster, with covariance (K C, K C); communality with its error.

    `kind` is that of the column, and `factors` on how many numbers of a cluster its levels may depend. The
    covariance of a column whose loading `diverges` is not a number.
    """

    key: tuple[str, str, str]
    kind: str
    factors: int
    levels: tuple[str, ...]
    estimates: Floats
    cov: Floats
    communality: tuple[float, float]
    diverges: bool


def has_errors(r: M2SEMRecord) -> bool:
    """Whether there are standard errors."""
    return r.observed is not None and r.observed.available


def require_errors(r: M2SEMRecord) -> ObservedInformation:
    """Return the information, or raise the reason why there is none."""
    if r.observed is None:
        raise NotAvailableError(
            "standard errors: the fit did not request them",
            remedy=Remedy(
                "fit(..., cov_type='observed')", "fit({arguments}) computes them for two or more clusters"
            ),
        )
    if not r.observed.available:
        raise NotAvailableError(f"standard errors: {r.observed.problem}")
    return r.observed


def statements_of(r: M2SEMRecord) -> Iterator[ColumnStatements]:
    """Iterate over all columns, in the order of the profiles."""
    observed = require_errors(r)
    for site, held in r.sites.items():
        yield from _of_site(site, held, r, observed.of_site(site), observed.communalities[site])


def _of_site(
    site: str, held: FittedSite, r: M2SEMRecord, cov: Floats, communalities: Floats
) -> Iterator[ColumnStatements]:
    start = first = 0
    for one, profiles, norms, _ in held.parts:
        K, P, C = profiles.shape
        places = np.arange(start, start + K * P * C).reshape(K, P, C)
        start += K * P * C
        for p, column in enumerate(one.columns):
            levels = len(column.levels) or 1
            at = places[:, p, :levels].ravel()
            communality, variance = float(communalities[first + p]), float(cov[start + p, start + p])
            error = float(max(variance, 0.0) ** 0.5) if norms[p] else 0.0
            expected = (
                np.empty(0) if r.factors else held.entities * r.shares[:, None] * profiles[:, p, :levels]
            )
            diverges = has_diverged(column.kind, communality, expected)
            known = np.nan if diverges else 1.0
            yield ColumnStatements(
                (site, one.name, column.name),
                column.kind,
                one.factors(r.factors) or levels,
                tuple(str(level) for level in column.levels or ("",)),
                profiles[:, p, :levels],
                known * cov[np.ix_(at, at)],
                (communality, known * error),
                diverges,
            )
        start, first = start + P, first + P


def profile_errors(r: M2SEMRecord) -> Floats:
    """Return standard errors of the profiles, in their order: (rows, K)."""
    rows = [
        np.sqrt(np.clip(np.diag(one.cov), 0.0, None)).reshape(one.estimates.shape).T
        for one in statements_of(r)
    ]
    return np.concatenate(rows)


def tidy_profiles(r: M2SEMRecord, alpha: float) -> pd.DataFrame:
    """Profiles in one frame, a row for each cluster and column or level, with available standard errors."""
    frame = r.profiles()
    long = frame.reset_index().melt(id_vars=KEYS, var_name="cluster", value_name="estimate")
    if not has_errors(r):
        return long
    return with_limits(long, profile_errors(r).T.ravel(), alpha)


def contrasts(r: M2SEMRecord, alpha: float) -> pd.DataFrame:
    """Differences between every two clusters, by column or level."""
    keys, estimates, errors = [], [], []
    for one in statements_of(r):
        K, C = one.estimates.shape
        for a, b in combinations(range(K), 2):
            R = _between(K, C, a, b)
            estimates += (R @ one.estimates.ravel()).tolist()
            errors += np.sqrt(np.clip(np.diag(R @ one.cov @ R.T), 0.0, None)).tolist()
            keys += [(*one.key, level, f"{a + 1} - {b + 1}") for level in one.levels]
    index = pd.MultiIndex.from_tuples(keys, names=[*KEYS, "clusters"])
    return with_tests(
        with_limits(pd.DataFrame({"estimate": estimates}, index=index), np.array(errors), alpha)
    )


def wald_tests(r: M2SEMRecord) -> pd.DataFrame:
    """Wald test, by column, that all clusters have the same distribution.

    A continuous or ordinal column depends on the cluster by one number, the mean of its predictor. The test
    of an ordinal one is that of the mean number of the level, which increases with it. The logits of a
    nominal column with C levels and Q factors depend on min(Q, C - 1) numbers; without factors, on C - 1.
    """
    rows, keys = [], []
    for one in statements_of(r):
        K, C = one.estimates.shape
        keys.append(one.key)
        # Probabilities add up to one, so the last level adds no information.
        by_level = np.eye(C)[: C - 1] if one.kind == "nominal" else np.arange(C)[None] if C > 1 else np.eye(1)
        R = np.vstack([by_level @ _between(K, C, k, K - 1) for k in range(K - 1)])
        most = (K - 1) * min(len(by_level), one.factors if one.kind == "nominal" else 1)
        rows.append(_wald(R @ one.estimates.ravel(), R @ one.cov @ R.T, most))
    index = pd.MultiIndex.from_tuples(keys, names=KEYS[:3])
    return pd.DataFrame(rows, index=index, columns=["statistic", "df", "p_value"])


def _wald(d: Floats, V: Floats, most: int) -> tuple[float, int, float]:
    """Statistic, degrees of freedom (at most `most`) and p-value of differences d with covariance V."""
    if np.isnan(V).any():
        return np.nan, 0, np.nan
    values, vectors = np.linalg.eigh(V)
    # Differences of clusters that are fixed at zero have no variance.
    there = values > 1e-9 * max(float(values[-1]), 1e-300)
    there[: len(there) - most] = False
    if not there.any() or values[-1] <= 0.0:
        return np.nan, 0, np.nan
    df, chi2 = int(there.sum()), float((((vectors.T @ d)[there]) ** 2 / values[there]).sum())
    return chi2, df, float(stats.chi2.sf(chi2, df))


def covariate_effects(r: M2SEMRecord, alpha: float) -> pd.DataFrame:
    """Effects of covariates on columns, with tests if there are standard errors."""
    if not r.adjusted:
        raise NotAvailableError(
            "covariate_effects: no columns are adjusted",
            remedy=Remedy("from_formula(..., adjust='~ age').fit(...)", "use {call}"),
        )
    keys, estimates, errors = [], [], []
    for site, held in r.sites.items():
        keys += [(site, *key, covariate) for key in _effect_rows(held) for covariate in held.covariates]
        estimates += held.effects.ravel().tolist()
        if has_errors(r) and held.terms:
            cov = require_errors(r).of_effects(site, held.effects.size)
            errors += np.sqrt(np.clip(np.diag(cov), 0.0, None)).tolist()
    index = pd.MultiIndex.from_tuples(keys, names=[*KEYS, "covariate"])
    frame = pd.DataFrame({"estimate": estimates}, index=index)
    return with_tests(with_limits(frame, np.array(errors), alpha)) if errors else frame


def _effect_rows(held: FittedSite) -> Iterator[tuple[str, str, str]]:
    """Modality, column and level of each row of effects; nominal columns omit the first level."""
    at = 0
    for one in held.modalities:
        for column in one.columns:
            counts = held.units[at : at + len(column.levels)]
            at += len(column.levels)
            seen = [level for level, count in zip(column.levels, counts, strict=True) if count > 0]
            for level in seen[1:] if column.kind == "nominal" else ("",):
                yield one.name, column.name, str(level)
        at += 2 * len(one.columns) if one.continuous else 0


def communality_table(r: M2SEMRecord, alpha: float) -> pd.DataFrame:
    """Share of each column's variance within clusters that its factors explain."""
    if not r.factors:
        raise NotAvailableError("communalities: without factors, columns are independent within clusters")
    found = list(statements_of(r))
    index = pd.MultiIndex.from_tuples([one.key for one in found], names=KEYS[:3])
    values = np.array([one.communality for one in found])
    values[values[:, 0] < 0.0] = np.nan  # not identified
    return with_limits(pd.DataFrame({"estimate": values[:, 0]}, index=index), values[:, 1], alpha)


def with_share_errors(r: M2SEMRecord) -> pd.DataFrame:
    """Shares of the clusters and their sizes, with standard errors of the shares if available."""
    if not has_errors(r):
        return r.sizes
    return r.sizes.assign(std_error=np.sqrt(np.diag(require_errors(r).of_shares())))


def with_limits(frame: pd.DataFrame, errors: Floats, alpha: float) -> pd.DataFrame:
    """Add standard errors, and limits of level ``1 - alpha``, to estimates."""
    half = float(stats.norm.isf(alpha / 2.0)) * errors
    estimate = frame["estimate"].to_numpy()
    return frame.assign(std_error=errors, conf_low=estimate - half, conf_high=estimate + half)


def with_tests(frame: pd.DataFrame) -> pd.DataFrame:
    """Add statistics and p-values of tests against zero to estimates with standard errors."""
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = frame["estimate"] / frame["std_error"]
    return frame.assign(statistic=statistic, p_value=2.0 * stats.norm.sf(statistic.abs()))


def _between(K: int, C: int, a: int, b: int) -> Floats:
    R = np.zeros((C, K, C))
    R[:, a], R[:, b] = np.eye(C), -np.eye(C)
    return R.reshape(C, K * C)
