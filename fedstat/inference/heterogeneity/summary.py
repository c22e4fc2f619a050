"""The printed comparison of sites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedstat.inference.heterogeneity.between_sites import dersimonian_laird
from fedstat.inference.heterogeneity.comparison import SiteComparison
from fedstat.inference.tables import Sheet, SheetSummary, number

FEW_SITES = 5
"""Fewest sites for which the variance between them is trusted."""
ONE_DISPERSION = (
    "The score test takes the dispersion (residual variance) as the same at all sites: where sites differ in "
    "nothing else it rejects too often. Own fits of all sites (local=True) would give each its own."
)
HEADER_WIDTHS = (30, 16, 26, 20)
COEFFICIENT_WIDTHS = (23, 10, 10, 8, 9, 4, 6, 6, 7, 6)
SITE_WIDTHS = (24, 10, 30, 28)
MASKED_WIDTHS = (24, 10, 60)


def build_heterogeneity_summary(result: SiteComparison) -> SheetSummary:
    """Lay out the comparison: joint test, coefficients, sites, notes."""
    sheets = [_header_sheet(result), _coefficient_sheet(result), _site_sheet(result)]
    return SheetSummary(sheets, _notes(result))


def _header_sheet(result: SiteComparison) -> Sheet:
    joint, sites = result.joint, result.sites
    own = int(result.estimates.notna().any(axis=1).sum())
    law = "P > F (own dispersions):" if joint.own_dispersions else "P > chi2 (score test):"
    rows = (
        ("Institutions:", str(len(sites)), "Equal coefficients:", str(joint)),
        ("With estimates of their own:", str(own), law, _probability(joint.pvalue)),
        (
            "No. Observations:",
            f"{sites['nobs'].sum():,}",
            "Coefficients that differ:",
            str(len(result.flagged)),
        ),
    )
    return Sheet(("",) * 4, rows, "lrlr", HEADER_WIDTHS, "Heterogeneity between institutions", gap=2)


def _coefficient_sheet(result: SiteComparison) -> Sheet:
    headers = ("", "common", "rand. eff.", "tau", "Q", "df", "P>Q", "I2(Q)", "from", "to")
    rows = tuple(
        _coefficient_row(name, dict(zip(_names(result.table.columns), values, strict=True)))
        for name, values in zip(_names(result.table.index), result.table.to_numpy().tolist(), strict=True)
    )
    return Sheet(headers, rows, "l" + "r" * 9, COEFFICIENT_WIDTHS)


def _coefficient_row(name: str, row: dict[str, float]) -> tuple[str, ...]:
    common = number(row["estimate"], error=row["std_error"])
    if not row["df"]:
        return (name, common, *["-"] * 3, "0", *["-"] * 4)
    return (
        name,
        common,
        number(row["re_estimate"], error=row["re_std_error"]),
        number(row["tau2"] ** 0.5),
        f"{row['Q']:.2f}",
        f"{row['df']:.0f}",
        _probability(row["p_value"]),
        *(_percent(row[share]) for share in ("I2", "I2_low", "I2_high")),
    )


def _site_sheet(result: SiteComparison) -> Sheet:
    headers = ("institution", "rows", "own estimates")
    rows: tuple[tuple[str, ...], ...] = tuple(
        (
            site,
            f"{result.sites['nobs'].iloc[k]:,}",
            _coverage(result.estimates.iloc[k], result.sites["problem"].iloc[k]),
        )
        for k, site in enumerate(_names(result.sites.index))
    )
    if result.without_each is None:
        return Sheet(headers, rows, "lrl", MASKED_WIDTHS, gap=2, wrap=True)
    changes = [_largest_change(result.change.iloc[k].dropna()) for k in range(len(rows))]
    rows = tuple((*row, change) for row, change in zip(rows, changes, strict=True))
    return Sheet((*headers, "without it, largest change"), rows, "lrll", SITE_WIDTHS, gap=2, wrap=True)


def _coverage(estimates: pd.Series, problem: str) -> str:
    known = int(estimates.notna().sum())
    if not known:
        return f"none: {problem}" if problem else "none"
    return "all" if known == len(estimates) else f"{known} of {len(estimates)}"


def _largest_change(change: pd.Series) -> str:
    if change.empty:
        return "not determined"
    largest = int(np.argmax(change.abs().to_numpy()))
    return f"{change.iloc[largest]:+.2f} s.e. of {change.index[largest]}"


def _notes(result: SiteComparison) -> list[str]:
    none = result.estimates.isna().all(axis=1)
    notes = [_verdict(result)]
    if none.any():
        notes.append(
            f"No estimates of their own: {', '.join(_names(none.index[none]))}. They enter the score "
            f"test{' and the changes' if result.without_each is not None else ''}; Q, I2, tau and the random "
            "effects are of the other sites."
        )
    notes += _partial_notes(result, result.estimates[~none])
    most = int(result.table["sites"].max())
    if 1 < most < FEW_SITES:
        notes.append(
            f"With {most} sites Q has little power, and tau is poorly determined: the interval of the random "
            f"effects has t quantiles on {most - 1} degree{'s' * (most > 2)} of freedom, and is wide."
        )
    if result.one_dispersion:
        notes.append(ONE_DISPERSION)
    changes = (
        "the changes are one Newton step, in standard errors of the common model."
        if result.without_each is not None
        else f"the estimates without each of the {len(result.sites)} institutions are not known, as sums "
        "are masked: see fit(masked=False)."
    )
    notes.append(
        "Q, I2, tau and the random effects compare the sites' own estimates. Random effects and tau are by "
        "restricted maximum likelihood (REML), with Hartung and Knapp's standard errors; I2 = (Q - df) / Q, "
        f"the share of the spread that is not chance, with its {100 * (1 - result.alpha):g} % interval, is "
        f"by moments. {_joint_source(result)}; {changes}"
    )
    return notes + _two_estimators(result)


def _two_estimators(result: SiteComparison) -> list[str]:
    """Say of which coefficients one estimator finds a variance between sites and the other finds none."""
    apart = []
    for name, tau2, i2 in result.table[["tau2", "I2"]].itertuples():
        if np.isfinite(i2) and (tau2 > 0.0) != (i2 > 0.0):
            b, se = (of[name].to_numpy(dtype=float) for of in (result.estimates, result.std_errors))
            known = np.isfinite(b) & np.isfinite(se)
            moments = dersimonian_laird(b[known], se[known] ** 2) ** 0.5
            apart.append(
                f"{name} (tau {number(tau2**0.5)}, I2 {_percent(i2)}; by moments tau {number(moments)})"
            )
    if not apart:
        return []
    return [
        f"REML and moments do not agree on whether sites vary in: {', '.join(apart)}. tau by moments is the "
        "one that belongs to I2 (random_effects('DL')). Few sites leave it open: read the interval of I2."
    ]


def _joint_source(result: SiteComparison) -> str:
    if result.joint.own_dispersions:
        return "The joint test compares them too, each site with its own dispersion"
    masked = "a masked sum over sites, " if result.without_each is None else ""
    return f"The score test is {masked}made from the sites' scores at the common estimate"


def _verdict(result: SiteComparison) -> str:
    tests = (result.table["df"] > 0).sum()
    if result.flagged:
        rows = result.table.loc[list(result.flagged), ["I2", "p_holm"]].to_numpy().tolist()
        found = zip(result.flagged, rows, strict=True)
        listed = ", ".join(f"{name} (I2 {_percent(i2)}, P {_probability(p)})" for name, (i2, p) in found)
        return (
            f"The sites differ in: {listed}; P adjusted for {tests} tests (Holm). {_disagreement(result)}"
            "The common coefficient is then an average that need not describe any site: give the term an "
            "interaction with the site (for the intercept: site effects), or report the random effects."
        )
    if result.joint.pvalue < result.alpha:
        also = ", and what changes without each of them" if result.without_each is not None else ""
        test = "in all coefficients together" if result.joint.own_dispersions else "score test"
        if not tests:
            return (
                f"The sites differ ({test}); coefficients were not tested one by one: report the joint test."
            )
        return (
            f"The sites differ ({test}), but not clearly in any single coefficient: report the joint "
            f"test of all coefficients, as single ones are corrected for how many there are ({tests}, Holm); "
            f"compare the sites' own estimates{also}."
        )
    return "The sites are not shown to differ. That does not show that they agree: see the intervals of I2."


def _disagreement(result: SiteComparison) -> str:
    """Say which test to report where single coefficients differ and all of them together do not."""
    if not result.joint.pvalue >= result.alpha:
        return ""
    return (
        f"The joint test of all coefficients does not show it (P {_probability(result.joint.pvalue)}): "
        "report the joint test where the question was whether sites differ at all, and the corrected single "
        "ones where it was in which coefficients, but not whichever is smaller. "
    )


def _partial_notes(result: SiteComparison, estimates: pd.DataFrame) -> list[str]:
    """Say which coefficients are compared over some of the sites that have estimates, or over none."""
    absent, table = estimates.isna(), result.table
    partial = [
        f"{name} (not at {', '.join(_names(absent.index[absent[name]]))})"
        for name in _names(table.index[table["df"] > 0])
        if absent[name].any()
    ]
    alone = _names(table.index[table["df"] == 0]) if len(estimates) > 1 else []
    notes = [f"Compared only over the sites that determine it: {'; '.join(partial)}."] if partial else []
    return notes + ([f"Determined at fewer than two sites: {', '.join(alone)}."] if alone else [])


def _names(index: pd.Index) -> Sequence[str]:
    return [str(name) for name in index]


def _probability(p: float) -> str:
    if np.isnan(p):
        return "-"
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.0f} %"
