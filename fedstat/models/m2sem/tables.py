"""Tables with standard errors: profiles, contrasts, Wald tests, and communalities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError
from fedstat.models.m2sem.information import ObservedInformation
from fedstat.models.m2sem.record import FittedSite, M2SEMRecord
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Tables with standard errors: profiles, differences between clusters, Wald tests, communalities, shares.

KEYS = ["site", "modality", "column", "level"]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnStatements:
    """Estimates (K, C) of a column by cluster, with covariance (K C, K C); communality with its error."""

    key: tuple[str, str, str]
    levels: tuple[str, ...]
    estimates: Floats
    cov: Floats
    communality: tuple[float, float]


def has_errors(r: M2SEMRecord) -> bool:
    """Whether there are standard errors."""
    return r.observed is not None and r.observed.available


def require_errors(r: M2SEMRecord) -> ObservedInformation:
    """Return the information, or raise the reason why there is none."""
    if r.observed is None:
        raise NotAvailableError(
            "standard errors: the fit did not request them; fit(cov_type='observed') computes them for two "
            "or more clusters"
        )
    if not r.observed.available:
        raise NotAvailableError(f"standard errors: {r.observed.problem}")
    return r.observed


def statements_of(r: M2SEMRecord) -> Iterator[ColumnStatements]:
    """Iterate over all columns, in the order of the profiles."""
    observed = require_errors(r)
    for site, held in r.sites.items():
        yield from _of_site(site, held, observed.of_site(site), observed.communalities[site])


def _of_site(site: str, held: FittedSite, cov: Floats, communalities: Floats) -> Iterator[ColumnStatements]:
    start = first = 0
    for one, profiles, norms, _ in held.parts:
        K, P, C = profiles.shape
        places = np.arange(start, start + K * P * C).reshape(K, P, C)
        start += K * P * C
        for p, column in enumerate(one.columns):
            levels = len(column.levels) or 1
            at = places[:, p, :levels].ravel()
            variance = float(cov[start + p, start + p])
            yield ColumnStatements(
                (site, one.name, column.name),
                tuple(str(level) for level in column.levels or ("",)),
                profiles[:, p, :levels],
                cov[np.ix_(at, at)],
                (float(communalities[first + p]), float(max(variance, 0.0) ** 0.5) if norms[p] else 0.0),
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
    check_alpha(alpha)
    frame = r.profiles()
    long = frame.reset_index().melt(id_vars=KEYS, var_name="cluster", value_name="estimate")
    if not has_errors(r):
        return long
    return with_limits(long, profile_errors(r).T.ravel(), alpha)


def contrasts(r: M2SEMRecord, alpha: float) -> pd.DataFrame:
    """Differences between every two clusters, by column or level."""
    check_alpha(alpha)
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
    """Wald test, by column, that all clusters have the same distribution."""
    rows, keys = [], []
    for one in statements_of(r):
        K, C = one.estimates.shape
        # Probabilities add up to one, so the last level adds no information.
        free = max(C - 1, 1)
        R = np.concatenate([_between(K, C, k, K - 1)[:free] for k in range(K - 1)])
        V, d = R @ one.cov @ R.T, R @ one.estimates.ravel()
        values, vectors = np.linalg.eigh(V)
        # Profiles depend on the factors, which have fewer directions than there are differences.
        there = values > 1e-9 * max(float(values[-1]), 1e-300)
        df = int(there.sum()) if values[-1] > 0.0 else 0
        chi2 = float((((vectors.T @ d)[there]) ** 2 / values[there]).sum()) if df else np.nan
        rows.append((chi2, df, float(stats.chi2.sf(chi2, df)) if df else np.nan))
        keys.append(one.key)
    index = pd.MultiIndex.from_tuples(keys, names=KEYS[:3])
    return pd.DataFrame(rows, index=index, columns=["statistic", "df", "p_value"])


def covariate_effects(r: M2SEMRecord, alpha: float) -> pd.DataFrame:
    """Effects of covariates on columns, with tests if there are standard errors."""
    check_alpha(alpha)
    if not r.adjusted:
        raise NotAvailableError("covariate_effects: no columns are adjusted; M2SEM(adjust='~ age') does so")
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
    check_alpha(alpha)
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


def check_alpha(alpha: float) -> None:
    """Require a level between 0 and 1."""
    if not 0.0 < alpha < 1.0:
        raise ModelError(f"expected alpha between 0 and 1, received {alpha}")


def _between(K: int, C: int, a: int, b: int) -> Floats:
    R = np.zeros((C, K, C))
    R[:, a], R[:, b] = np.eye(C), -np.eye(C)
    return R.reshape(C, K * C)
