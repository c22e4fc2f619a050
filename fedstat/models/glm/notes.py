"""Sentences below the summary of a federated GLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstat.inference.tables import number

if TYPE_CHECKING:
    from fedstat.models.glm.results import GLMResults


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
    without = {row.site: row.problem for row in fit.local if row.problem and row.problem != "not asked for"}
    if without:
        listed = "; ".join(f"{site}: {problem}" for site, problem in without.items())
        notes.append(f"No estimate of their own: {listed}. Their rows count in the estimate all the same.")
    clusters, strata = result._groups
    if clusters is not None:
        notes.append(
            f"Standard errors are for clusters by '{clusters}'"
            + (f" in strata by '{strata}'." if strata is not None else ".")
        )
    return notes
