"""The sentences below the summary of VFEM for other families than the normal."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.federation.account.ledger import Ledger
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.statements.exposure import masked_notes, secure_product_notes
from fedstat.models.vfem.statements.glm_outcome import GLMOutcome
from fedstat.models.vfem.statements.notes import count_notes
from fedstat.models.vfem.statements.outcome import Counts

MODEL = {
    "vfem": (
        "Maximum likelihood under normal blocks that are independent between institutions; valid when "
        "missingness depends on observed values only (MAR). Columns of an institution that lacks entities "
        "count as jointly normal: for columns that are not, such as indicators, that is an approximation."
    ),
    "cc": (
        "Only entities with every block are used: biased where missing blocks depend on the response given "
        "the columns."
    ),
    "impute": (
        "Missing blocks count as their mean: coefficients are biased in general, and the standard "
        "errors ignore the imputation."
    ),
    "single": "Other institutions' columns are left out; coefficients are those of a smaller model.",
}


def glm_notes(layout: Layout, outcome: GLMOutcome, counts: Counts, ledger: Ledger) -> list[str]:
    """Write the notes of one fit."""
    return [
        *count_notes(outcome.method, counts),
        MODEL[outcome.method],
        *_covariance(outcome),
        *_disclosure(layout, outcome, ledger),
    ]


def _covariance(outcome: GLMOutcome) -> Iterator[str]:
    covariance = outcome.covariance
    if covariance is None:
        return
    if covariance.how == "sketch":
        yield (
            f"Cross-products between institutions come from a {covariance.size:,}-row sketch "
            f"({100 * covariance.error:.2g} % of the columns' lengths, measured within institutions)."
        )
    yield from secure_product_notes(covariance)
    if covariance.how == "exact":
        yield "Cross-products by plain exchange: institutions' columns were disclosed to other institutions."


def _disclosure(layout: Layout, outcome: GLMOutcome, ledger: Ledger) -> Iterator[str]:
    if outcome.masked or len(layout.clients) == 1:
        yield from masked_notes(layout, ledger.at, remedy="")
    elif any(k != ledger.at for k in layout.clients):
        yield (
            "In every round each institution's linear predictor of every entity that it has, and two numbers "
            "per entity of the response holder, leave their institution. From a dozen such rounds their "
            "receiver can recover an institution's raw rows: use masked=False only where that is allowed. "
            "See .ledger.releases()."
        )
