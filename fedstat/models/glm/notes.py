"""Sentences below the summary of a federated GLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstat.inference.tables import number

if TYPE_CHECKING:
    from fedstat.models.glm.results import GLMResults


DIFFER = 0.05
"""Level of the score test below which the summary speaks of the sites' differences."""


def show_probability(p: float) -> str:
    """Write a p-value after the letter p."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def fit_notes(result: GLMResults) -> list[str]:
    """Say what the reader must know of this fit."""
    fit, notes = result.fit_, []
    rounds = result.model.agreement
    dropped = sum(row.n_rows - row.n for row in rounds.sites)
    if dropped:
        notes.append(f"{dropped:,} rows that lack one of the model's columns were left out.")
    if fit.rounds is not None:
        notes.append(
            f"The estimate stops after {fit.rounds} Newton step(s) from the mean of the sites' own fits; "
            f"the last was {number(fit.trace[-2].step)} standard errors long, and the score that remains is "
            f"worth {number(fit.trace[-1].step)} standard errors."
        )
    flagged, joint = result.heterogeneity.flagged, result.heterogeneity.joint
    if flagged or joint.pvalue < DIFFER:
        which = f" I2 is large for {', '.join(flagged)}." if flagged else ""
        notes.append(
            f"The sites differ: score test of equal coefficients chi2({joint.df}) = {joint.statistic:.1f}, "
            f"p {show_probability(joint.pvalue)}.{which} One set of coefficients may describe no site; see "
            ".heterogeneity."
        )
    without = {row.site: row.problem for row in fit.local if row.problem and row.problem != "not asked for"}
    if without:
        listed = "; ".join(f"{site}: {problem}" for site, problem in without.items())
        notes.append(f"No estimate of their own: {listed}. Their rows count in the estimate all the same.")
    if result.overdispersion is not None:
        notes.append(
            "Alpha was estimated by maximum likelihood (standard error "
            f"{number(result.overdispersion.std_error)}), which the standard errors of the coefficients "
            "account for."
        )
    clusters, strata = result._groups
    if clusters is not None:
        notes.append(
            f"Standard errors are for clusters by '{clusters}'"
            + (f" in strata by '{strata}'." if strata is not None else ".")
        )
    return notes
