"""Statements on a response that is not normal, where columns depend between institutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.inference.likelihood import said
from fedstat.models.vertical.exchange.notes import dealer_notes, dither_notes, merge_notes
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.law.assumptions import independence_lr_test
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.pairs import name_sparse
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.solving import BITS
from fedstat.models.vfem.statements.exposure import masked_notes, small_patterns
from fedstat.models.vfem.statements.freedom import CONTRADICTED

JOINT = (
    "Joint maximum likelihood of response and columns, all parameters of the law of the columns included: "
    "they are jointly normal, with a covariance that is free between institutions. Valid when missingness "
    "depends on observed values only (MAR), the response among them. Columns of an institution that lacks "
    "entities count as normal: for columns that are not, such as indicators, that is an approximation."
)
KNOWN = (
    "The coordinator makes these coefficients, and knows them: of an entity that has fewer columns than "
    "numbers passed it can solve for the row."
)


def joint_assumptions(linear: LawFit) -> Iterator[str]:
    """Say what is assumed, and what of it the data contradict or leave open; of the normal law beside it."""
    yield JOINT
    try:
        pvalue = independence_lr_test(linear).pvalue
        yield (
            f"The data {'contradict' if pvalue < CONTRADICTED else 'do not contradict'} blocks that are "
            "independent between institutions, between='independent' (likelihood ratio of the normal law of "
            f"columns and response, {said(pvalue)})."
        )
    except (EstimationError, NotAvailableError):
        pass
    if sparse := name_sparse(linear.moments):
        yield sparse


def joint_notes(layout: Layout, exchange: PatternExchange, ledger: Ledger, *, masked: bool) -> Iterator[str]:
    """Say what sums by missing pattern and numbers per entity told."""
    others = [k for k in layout.clients if k != layout.active]
    # What the coordinator's own institution tells it does not travel.
    rounds = Counter(e.sender for e in ledger.entries if (e.step, e.array) == ("joint_score", "sums"))
    once = ", ".join(f"{count:,} of {site}" for site, count in exchange.numbers.items())
    told = []
    for j, (k, p) in enumerate(zip(layout.clients, layout.sizes, strict=True)):
        numbers = int(exchange.plan.patterns[:, j].sum()) * (1 + p) * rounds[k]
        if numbers:
            told.append(f"{k} {numbers:,} ({BITS * numbers:,} bits) of {len(layout.kept[k]):,} entities")
    yield (
        "Sums of the columns and of their products were exchanged once, by missing pattern; at least "
        f"{exchange.smallest:,} entities stand behind each. Numbers released, products of two institutions "
        f"counted at both: {once}."
    )
    if told:
        yield (
            f"Residuals stayed with the response holder. In each of {max(rounds.values())} rounds an "
            "institution learned sums of its own columns with them, by missing pattern, and told the "
            f"coordinator: {', '.join(told)}. A binary response is one bit an entity: these sums narrow the "
            "responses down, and in a small pattern whoever solves them has these."
        )
    yield from small_patterns(exchange.moments.n, ledger, layout.active)
    if any(one.array == "h" and one.step == "joint_information" for one in ledger.entries):
        yield (
            "For standard errors the coordinator, and the institutions that have them, were told a curvature "
            "of every entity that two institutions or more have. Where another lacks it, it tells the "
            "response to who knows the linear predictor, as the coordinator does; cov_type='none' sends none."
        )
    if masked:
        yield from masked_notes(layout, ledger, remedy="", normal=False)
    if others:
        yield KNOWN
    yield from dealer_notes(exchange.dealers, "", layout.bystanders)
    yield from merge_notes(exchange)
    yield from dither_notes(layout)
