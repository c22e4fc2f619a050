"""What results of a private generalised linear model rest on, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.models.copula.asked import OF_MARGINS
from fedstat.models.copula.explain import cost_statements
from fedstat.models.copula_glm.moments.bootstrap import MOST_ROWS
from fedstat.models.copula_glm.moments.errors import MomentErrors
from fedstat.models.copula_glm.protocol import ReleasedMoments

NO_LIKELIHOOD = "moments were released and no likelihood"
NO_RSQUARED = "the residuals are of no one"
NO_ROOT = (
    "no coefficients solve the released moments, the noise is too large for this model; take a larger "
    "epsilon, more entities or fewer columns"
)
TOO_SMALL = (
    "BUDGET TOO SMALL FOR THIS MODEL: the noise is {:.1f} times the sampling error; read no significance "
    "into these numbers"
)
VALID = (
    "Valid if the columns are a Gaussian copula and the generalised linear model holds. Of real tables the "
    "first is an approximation: standard errors do not count its error, which more entities or a larger "
    "epsilon do not remove."
)
PUBLIC = (
    "Public, and never taken from the data: bounds and levels of the columns, numbers of entities, who has a "
    "record where. Noise is discrete Gaussian from the operating system's randomness; each institution adds "
    "its own before anything leaves, and nobody, dealer included, holds a sum without."
)


def fit_notes(released: ReleasedMoments, errors: MomentErrors | None, delta: float) -> Iterator[str]:
    """Say what the numbers rest on, and what they cost."""
    yield VALID
    if errors is not None:
        yield from _error_notes(released, errors)
    yield (
        f"{float(OF_MARGINS):.0%} of the budget went to margins of the columns in equal parts, the rest to "
        "products of scores."
    )
    yield from cost_statements(released.plan, delta)
    lost = {c: count - released.n for c, count in released.entities.items() if count > released.n}
    if lost:
        yield (
            "Entities that are not complete at every institution are left out: "
            f"{', '.join(f'{count:,} at {client}' for client, count in lost.items())}."
        )
    yield PUBLIC


def _error_notes(released: ReleasedMoments, errors: MomentErrors) -> Iterator[str]:
    """Say where standard errors come from."""
    draws = errors.draws
    rows = f", of {MOST_ROWS:,} rows each" if released.n > MOST_ROWS else ""
    yield (
        f"Standard errors come from {draws} releases simulated from the estimate{rows}: margins, noise, "
        "copula and estimate anew. `sampling` is their spread without noise, `noise` what noise adds; "
        f"squares add up. Tests are of Student's t with {draws - 1} degrees of freedom."
    )
    if errors.failed:
        yield (
            f"{errors.failed} of {2 * draws} simulated estimates are no exact root of their equations: the "
            "noise is large for this model."
        )
