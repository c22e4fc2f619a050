"""The sentences below a VFEM summary: assumptions, accuracy, and what the exchange discloses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedstat.federation.ledger import Ledger
from fedstat.models.vfem.layout import Layout

if TYPE_CHECKING:
    from fedstat.models.vfem.results import Counts, Outcome

MODEL = {
    "vfem": (
        "Maximum likelihood under normal errors and normal blocks that are independent between "
        "institutions; valid when missingness depends on observed values only (MAR). R-squared is that of "
        "an entity with every block."
    ),
    "cc": "Only entities with every block are used: biased unless blocks are missing completely at random.",
    "impute": (
        "Missing blocks count as their mean: coefficients are biased in general, and the standard "
        "errors ignore the imputation."
    ),
    "single": "Other institutions' columns are left out; coefficients are those of a smaller model.",
}
SMALL_SAMPLE = 0.02
EXPECTED = (
    "Standard errors take cross-products between institutions at their expectation, zero: this needs "
    "blocks that are missing completely at random and independent between institutions."
)


def fit_notes(layout: Layout, outcome: Outcome, counts: Counts, ledger: Ledger) -> list[str]:
    """Write the notes of one fit."""
    return [
        *_counts(outcome, counts),
        MODEL[outcome.method],
        *_small_sample(layout, outcome),
        *_covariance(layout, outcome, ledger),
        *(_disclosure(layout, outcome, ledger) if outcome.exchange is None else _moments(outcome, ledger)),
    ]


def _counts(outcome: Outcome, counts: Counts) -> Iterator[str]:
    if counts.dropped:
        yield f"{counts.dropped:,} entities without a response were left out."
    if counts.unused:
        yield f"{counts.unused:,} entities with a response were left out by method='{outcome.method}'."
    if counts.partial:
        listed = ", ".join(f"{n:,} at {client}" for client, n in counts.partial.items())
        yield f"Entities with only some of an institution's columns: {listed}."


def _small_sample(layout: Layout, outcome: Outcome) -> Iterator[str]:
    used = 1 + sum(len(beta) for beta in outcome.fit.beta.values())
    inflation = np.sqrt(layout.n / (layout.n - used)) - 1.0
    if inflation > SMALL_SAMPLE and outcome.covariance is not None:
        yield (
            f"The residual variance is that of maximum likelihood: with {layout.n:,} entities for {used} "
            "coefficients, ordinary least squares would report standard errors that are "
            f"{100 * inflation:.0f} % larger."
        )


def _covariance(layout: Layout, outcome: Outcome, ledger: Ledger) -> Iterator[str]:
    covariance = outcome.covariance
    if covariance is None:
        return
    if outcome.cov_type == "expected" and len(layout.clients) > 1:
        yield EXPECTED
    if covariance.how == "sketch":
        yield (
            f"Cross-products between institutions come from a {covariance.size:,}-row sketch: the error of a "
            f"product is about {100 * np.sqrt(1.0 / covariance.size):.2g} % of the columns' lengths "
            f"({100 * covariance.error:.2g} % measured within institutions); the assembled matrix moved by "
            f"{100 * covariance.moved:.2g} % to be positive semi-definite."
        )
        if ledger.at is not None:
            yield (
                f"The institutions share the seed of the sketch, and the coordinator sits at one of them, "
                f"'{ledger.at}': to it the sketches do not hide the columns of the others. "
                'from_formula(..., coordinator="apart") keeps seed and sketches apart.'
            )
    if outcome.cov_type == "sem":
        yield f"Supplemented EM: relative asymmetry {covariance.asymmetry:.1e} before it was made symmetric."


def _disclosure(layout: Layout, outcome: Outcome, ledger: Ledger) -> Iterator[str]:
    others = [k for k in layout.clients if k != ledger.at]
    if others:
        yield (
            "In every round each institution's linear predictor of every entity that it has, and the "
            "residuals of the response holder, leave their institution. From a dozen such rounds, or from "
            "one with chosen starting coefficients, their receiver can recover an institution's raw rows: "
            "use this exchange only where that is allowed. "
            "See .ledger.releases()."
        )
    if outcome.covariance is not None and outcome.covariance.how == "exact":
        yield "Cross-products by plain exchange: institutions' columns were disclosed to other institutions."


def _moments(outcome: Outcome, ledger: Ledger) -> Iterator[str]:
    exchange = outcome.exchange
    assert exchange is not None
    yield (
        "Sums of products of the columns by missing pattern were exchanged once; no value per entity left an "
        "institution. Products between institutions come from secure multiplication among parties that "
        "follow the protocol (semi-honest)."
    )
    dealers = sorted({dealer or "the coordinator" for dealer in exchange.dealers.values()})
    if dealers:
        yield (
            f"Who deals the random numbers for two institutions ({', '.join(dealers)}) must not collude with "
            "either; the coordinator and one institution together learn the other's products with that "
            "one's columns."
        )
    plan = exchange.plan
    if plan.moved or plan.left_out:
        yield (
            f"Patterns with few entities are not released: {plan.moved:,} entities count as missing at an "
            f"institution that has them, and {plan.left_out:,} that would lack everything are left out."
        )
