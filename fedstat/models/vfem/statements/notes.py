"""The sentences below a VFEM summary: assumptions, accuracy, and what the exchange discloses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np

from fedstat.federation.account.ledger import Ledger
from fedstat.models.vertical.division import division_notes
from fedstat.models.vertical.exchange.notes import dealer_notes, dither_notes, merge_notes, sums_note
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.law.assumptions import most_correlated
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.solving import rounds_of_predictors, solvable
from fedstat.models.vfem.blocks.glm_distribution import NORMAL
from fedstat.models.vfem.statements.dispersion import dispersion_notes
from fedstat.models.vfem.statements.exposure import (
    MOMENTS,
    masked_notes,
    response_notes,
    secure_product_notes,
)
from fedstat.models.vfem.statements.freedom import freedom_notes
from fedstat.models.vfem.statements.joint import joint_assumptions, joint_notes
from fedstat.models.vfem.statements.outcome import (
    EntityCounts,
    HeldInSession,
    VFEMOutcome,
    as_between,
    reported_covariance,
)
from fedstat.models.vfem.statements.shapes import correction_notes
from fedstat.models.vfem.statements.sparse import sparse_notes

BASELINES = {
    "cc": (
        "Only entities with every block are used: right where who lacks a block depends on the columns "
        "alone, and biased where it depends on the response given the columns."
    ),
    "impute": (
        "Missing blocks count as their mean: coefficients are biased in general, and the standard "
        "errors ignore the imputation."
    ),
    "single": "Other institutions' columns are left out; coefficients are those of a smaller model.",
}
NORMAL_RESPONSE = BASELINES | {
    "vfem": (
        "Maximum likelihood under normal errors and normal blocks that are independent between "
        "institutions (between='independent'); valid when missingness depends on observed values only (MAR) "
        "and blocks do not correlate: where they do, coefficients are biased however records are missing. "
        "R-squared is that of an entity with every block."
    ),
}
FREE = (
    "Maximum likelihood under normal errors and jointly normal columns, whose covariance is free between "
    "institutions; valid when missingness depends on observed values only (MAR). R-squared is that of an "
    "entity with every block."
)
OTHER_RESPONSE = BASELINES | {
    "vfem": (
        "Maximum likelihood under normal blocks that are independent between institutions "
        "(between='independent'); valid when missingness depends on observed values only (MAR) and blocks do "
        "not correlate, which independence_tests() looks at: where they do, coefficients are biased however "
        "records are missing. Columns of an institution that lacks entities count as jointly normal: for "
        "columns that are not, such as indicators, that is an approximation."
    ),
}
UNMASKED_NORMAL = (
    "In every round each institution's linear predictor of every entity that it has, and the "
    "residuals of the response holder, leave their institution. From a dozen such rounds, or from "
    "one with chosen starting coefficients, their receiver can recover an institution's raw rows: "
    "use this exchange only where that is allowed. See .ledger.releases()."
)
UNMASKED_OTHER = (
    "In every round each institution's linear predictor of every entity that it has leaves it. From a dozen "
    "such rounds their receiver can recover an institution's raw rows: use masked=False only where that is "
    "allowed. See .ledger.releases()."
)
SMALL_SAMPLE = 0.02
ROBUST = (
    "Standard errors are robust (Huber and White; HC0): they allow for another variance of the response and "
    "for columns that are not normal, and mend no bias that either causes. Likelihood ratio, AIC and BIC go "
    "by the model."
)
SPLIT_RESIDUALS = (
    "For them the response holder split each residual at random between two institutions at a time: neither "
    "can tell it, but two that put both parts together have the residuals of the entities that both have."
)
EXPECTED = (
    "Standard errors take cross-products between institutions at their expectation, zero: this needs "
    "blocks that are missing completely at random and independent between institutions."
)
EXPECTED_FREE = (
    "Standard errors come from the expected information: this needs columns that follow the normal law, and "
    "blocks that are missing completely at random."
)


OFFSET = "The offset "


def beside_notes(roles: Mapping[str, str]) -> Iterator[str]:
    """Say what stands beside the response, and what that means."""
    for role, name in roles.items():
        if role == "offset":
            yield (
                f"{OFFSET}'{name}' is in the linear predictor with coefficient one, and is taken as "
                "independent of columns that are missing; predictions are those at an offset of zero."
            )
            continue
        meaning = (
            f"An entity stands for as many as '{name}' says"
            if role == "freq_weights"
            else f"The variance of the response is the error variance over '{name}'"
        )
        yield f"{meaning}; every institution was told the weights of its entities."


def fit_notes(
    layout: Layout, outcome: VFEMOutcome, held: HeldInSession, counts: EntityCounts, ledger: Ledger
) -> list[str]:
    """Write the notes of one fit."""
    return [
        *count_notes(outcome.method, counts, conditioned=bool(layout.has)),
        *division_notes(layout),
        *_assumptions(outcome, held),
        *([] if outcome.correction == "small-sample" else _small_sample(layout, outcome)),
        *correction_notes(outcome.correction, held.moments_fit if outcome.method == "vfem" else None),
        *dispersion_notes(layout, outcome.fit, outcome.cov_type),
        *_covariance(layout, outcome, ledger),
        *_passed(layout, outcome, held, ledger),
    ]


def _passed(layout: Layout, outcome: VFEMOutcome, held: HeldInSession, ledger: Ledger) -> Iterator[str]:
    """Say what passed, and what it tells."""
    if held.exchange is None:
        return _iterations(layout, outcome, ledger)
    if is_normal(outcome):
        return _moments(layout, outcome, held.exchange, ledger)
    return chain(
        joint_notes(layout, held.exchange, ledger, masked=outcome.options.masked),
        () if outcome.options.masked else _unmasked(layout, outcome, ledger),
    )


def _assumptions(outcome: VFEMOutcome, held: HeldInSession) -> Iterator[str]:
    """Say what is assumed, and what in the data contradicts it or says nothing of it."""
    fit, covariance = held.moments_fit, outcome.covariance
    if isinstance(fit, LawFit) and not is_normal(outcome):
        yield from joint_assumptions(fit)
        return
    free = as_between(outcome) == "free"
    if free:
        yield FREE
    if isinstance(fit, LawFit):
        errors = None
        if covariance is not None:
            errors = np.sqrt(np.diag(reported_covariance(covariance, outcome.fit)))[1:]
            if free:
                yield from freedom_notes(fit, errors)
        yield from sparse_notes(fit, errors)
    if free:
        return
    model = NORMAL_RESPONSE if is_normal(outcome) else OTHER_RESPONSE
    yield model[outcome.method]
    if outcome.method == "vfem" and fit is not None:
        yield from most_correlated(fit.moments, "fit with between='free'")


def is_normal(outcome: VFEMOutcome) -> bool:
    """Whether the response is normal."""
    return outcome.fit.distribution == NORMAL


def count_notes(method: str, counts: EntityCounts, *, conditioned: bool = False) -> Iterator[str]:
    """Say which entities a fit left out, or took as missing."""
    if counts.dropped:
        yield f"{counts.dropped:,} entities without a response were left out."
    if counts.unused:
        yield f"{counts.unused:,} entities with a response were left out by method='{method}'."
    if counts.partial:
        listed = ", ".join(f"{n:,} at {client}" for client, n in counts.partial.items())
        so = " The fit conditions on what they have." if conditioned else ""
        yield f"Entities with only some of an institution's columns: {listed}.{so}"


def _small_sample(layout: Layout, outcome: VFEMOutcome) -> Iterator[str]:
    if not is_normal(outcome):
        return
    used = 1 + sum(len(beta) for beta in outcome.fit.beta.values())
    inflation = np.sqrt(layout.n / (layout.n - used)) - 1.0
    if inflation > SMALL_SAMPLE and outcome.covariance is not None:
        yield (
            f"The residual variance is that of maximum likelihood: with {layout.n:,} entities for {used} "
            "coefficients, ordinary least squares would report standard errors that are "
            f"{100 * inflation:.0f} % larger."
        )


def _covariance(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[str]:
    covariance = outcome.covariance
    if covariance is None:
        return
    if outcome.cov_type == "expected" and len(layout.clients) > 1:
        yield EXPECTED if outcome.fit.law is None else EXPECTED_FREE
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
    yield from secure_product_notes(covariance)
    if outcome.cov_type == "robust":
        yield ROBUST
        if not is_normal(outcome) and any(one.step == "glm_scores" for one in ledger.entries):
            yield SPLIT_RESIDUALS
    if outcome.cov_type == "sem":
        yield f"Supplemented EM: relative asymmetry {covariance.asymmetry:.1e} before it was made symmetric."


def _iterations(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[str]:
    normal = is_normal(outcome)
    if not normal:
        yield from response_notes(layout, ledger)
    if outcome.options.masked and any(k != ledger.at for k in layout.clients):
        yield from masked_notes(layout, ledger, remedy=MOMENTS if normal else "", normal=normal)
    else:
        yield from _unmasked(layout, outcome, ledger)
    if outcome.covariance is not None and outcome.covariance.how == "exact":
        yield "Cross-products by plain exchange: institutions' columns were disclosed to other institutions."


def _unmasked(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[str]:
    if others := [k for k in layout.clients if k != ledger.at]:
        yield UNMASKED_NORMAL if is_normal(outcome) else UNMASKED_OTHER
        yield from solvable(rounds_of_predictors(ledger, others), layout.p, ledger, others)


def _moments(
    layout: Layout, outcome: VFEMOutcome, exchange: PatternExchange, ledger: Ledger
) -> Iterator[str]:
    numbers = ", ".join(f"{count:,} of {site}" for site, count in exchange.numbers.items())
    yield (
        f"{sums_note(', by missing pattern', exchange.smallest)} "
        f"Numbers released, products of two institutions counted at both: {numbers}."
    )
    if outcome.refitted:
        yield "A part of a larger model, fitted from the sums of that one: nothing further was exchanged."
    yield from dealer_notes(exchange.dealers, "; see .dealers", layout.bystanders)
    if (
        exchange.dealers
        and not layout.bystanders
        and len({*layout.clients, layout.active}) == 2
        and ledger.at is None
    ):
        yield "Two institutions take part: the coordinator sits at neither, since a third party has to deal."
    yield from merge_notes(exchange)
    yield from dither_notes(layout)
