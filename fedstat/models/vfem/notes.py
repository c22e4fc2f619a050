"""Notes of a VFEM summary: assumptions, accuracy, and what the exchange discloses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.inference.likelihood import format_pvalue
from fedstat.inference.summary import Note
from fedstat.models.vertical.exchange.patterns import (
    MANTISSA_BITS,
    PatternExchange,
    dealer_notes,
    dither_notes,
    merge_notes,
    reused_pattern_notes,
    rounds_of_predictors,
    solvable_note,
    sums_note,
)
from fedstat.models.vertical.joint_normal.assumption_tests import independence_lr_test, most_correlated
from fedstat.models.vertical.joint_normal.fit import (
    JointNormalFit,
    extremes,
    fit_joint_model,
    name_sparse,
    sparse_pairs,
)
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.corrections import correction_notes
from fedstat.models.vfem.covariance.from_moments import moments_covariance
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.models.vfem.iteration.site_state import NORMAL
from fedstat.models.vfem.iteration.state import VFEMFit, fit_by_site
from fedstat.models.vfem.outcome import (
    EntityCounts,
    SessionArtifacts,
    VFEMOutcome,
    as_between,
    reported_covariance,
)
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Counts and notes on values that masks and secure products do not protect.
#
# The coordinator learns the sum of the linear predictors over sites, entity by entity, and tells it
# to the response holder. Who has a record is agreed, so that at an entity of which one site alone
# has a record the sum *is* that site's part; a receiver with a block of its own subtracts its own
# part first.
#
# Where two sites or more add up, no round gives any of them away. Many rounds together tell more: a
# round changes the sum by X P X' z, with the blocks of all sites side by side in X and residuals z
# that the receiver knows, so that after about as many rounds as there are columns their joint column space
# shows, and with it approximate inner products between entities. Fewer rounds tell less; exchange="moments"
# has no value per entity.

MOMENTS = "exchange='moments' has no value per entity. "


def count_exposed(layout: Layout, at: str | None) -> dict[str, int]:
    """Entities at which a masked sum is one site's own part; the coordinator sits `at`.

    Those of which the site has a record, and no other site but one that receives the sum: the
    coordinator and the response holder do.
    """
    seen = np.zeros((layout.n, len(layout.clients)), dtype=bool)
    for j, client in enumerate(layout.clients):  # filled-in means are zero in the sum
        seen[layout.kept[client], j] = True
    exposed = np.zeros_like(seen)
    for receiver in (at, layout.active):
        hidden = seen & np.array([client != receiver for client in layout.clients])
        exposed |= hidden & (hidden.sum(axis=1) == 1)[:, None]
    return dict(zip(layout.clients, exposed.sum(axis=0).tolist(), strict=True))


RESPONSE_RELEASED = (
    "Nobody could deal random numbers: every site learns the response of each of its entities from "
    "the first message, since at coefficients of zero a residual is the response less its mean. With a third "
    "site, or coordinator='apart', residuals stay with the response holder."
)


def response_notes(layout: Layout, ledger: Ledger) -> Iterator[Note]:
    """Say what sites learned of a response that is not normal, in bits."""
    others = [k for k in layout.clients if k != layout.active]
    if any(one.array == "z" and one.step == "glm_score" for one in ledger.entries):
        yield Note("response_released", RESPONSE_RELEASED, "warning")
        return
    if not others:
        return
    told = [one for one in ledger.entries if one.array == "shown" and one.receiver in others]
    widths, parts = dict(zip(layout.clients, layout.sizes, strict=True)), []
    for k in others:
        numbers = sum(one.receiver == k for one in told) * (1 + widths[k])
        parts.append(
            f"{k} {numbers:,} ({MANTISSA_BITS * numbers:,} bits) of {len(layout.kept[k]):,} entities"
        )
    yield Note(
        "residual_sums",
        "Residuals stayed with the response holder. Each site learned sums of its own columns with "
        f"them, sealed from the coordinator: {', '.join(parts)}. A binary response is one bit an entity: "
        "these sums narrow the responses down, and in a small group whoever solves them has these.",
    )
    yield from small_patterns(layout.counts, ledger, layout.active)
    if not any(one.array == "h" and one.step == "glm_information" for one in ledger.entries):
        return
    opened = [one.receiver for one in ledger.entries if (one.step, one.array) == ("open_columns", "only")]
    seen = ~layout.missing
    summed = seen[:, [opened.count(k) > 1 or k not in others for k in layout.clients]].any(axis=1)
    told_each = layout.missing.any(axis=1) & seen.any(axis=1) & ~(summed & (seen.sum(axis=1) == 1))
    if told_each.any():
        yield Note(
            "curvature",
            "For standard errors the coordinator, and the sites that have them, were told a curvature "
            f"of {int(layout.counts[told_each].sum()):,} entities that two sites or more have and "
            "another lacks, or that one has and too few more to add up. It tells the response to who knows "
            "the linear predictor, as the coordinator does; cov_type='none' sends none.",
        )


def small_patterns(counts: Floats, ledger: Ledger, holder: str) -> Iterator[Note]:
    """Say in which patterns, of so many entities (G,), a coordinator apart could solve for responses.

    At linear predictors that it knows every sum over a pattern is linear in each binary response.
    """
    told = sum(
        int(one.shape[-1])
        for one in ledger.entries
        if (one.sender, one.array) == (holder, "sums") and one.step in ("glm_evaluate", "joint_weights")
    )
    entities = int(counts[counts <= told].sum())
    if entities and ledger.at != holder:
        yield Note(
            "small_patterns",
            f"The coordinator learned {told} sums of derivatives by missing pattern, at linear predictors "
            f"that it knows. {entities:,} entities are in patterns of no more than that: their responses, if "
            "these are binary, are as good as told to it.",
            "warning",
        )


def masked_notes(layout: Layout, ledger: Ledger, remedy: str, normal: bool = True) -> Iterator[Note]:
    """Say what masked iterations disclose to the coordinator, and what to do where that is much."""
    at = ledger.at
    if len(layout.clients) == 1:
        yield Note(
            "one_institution",
            "One site has columns: nothing is added up, and its linear predictors were not masked.",
        )
        return
    receivers = "the coordinator" if at == layout.active else "the coordinator and the response holder"
    residuals = ", and every site the residuals of its entities" if normal else ""
    yield Note(
        "masked",
        "Linear predictors were added up over sites, among parties that follow the protocol "
        f"(semi-honest): {receivers} learned the sum for every entity in every round{residuals}. "
        f"{remedy}See .ledger.releases().",
    )
    others = [k for k in layout.clients if k != layout.active]
    yield from solvable_note(rounds_of_predictors(ledger, others), layout.p, ledger, others)
    if at != layout.active and normal:
        yield Note(
            "response_known",
            "Residuals and sums together give the coordinator the response of every entity.",
            "warning",
        )
    parts = [
        f"{count:,} of {len(layout.kept[k]):,} at {k}"
        for k, count in count_exposed(layout, at).items()
        if count
    ]
    if parts:
        yield Note(
            "exposed",
            "Masks hide nothing where one site alone, beside a receiver of the sum, has a record: the "
            f"sum is then its own linear predictor. Entities so exposed: {', '.join(parts)}.",
            "warning",
        )
    if not hides(len(layout.clients)):
        yield Note("two_sites", TWO_SITES, "warning")


def secure_product_notes(covariance: PsiCovariance) -> Iterator[Note]:
    """Say where exact cross-products came from, and which were left out."""
    if covariance.how != "secure":
        return
    yield Note(
        "secure_products",
        "Cross-products between sites come from secure multiplication among parties that follow the "
        f"protocol (semi-honest): nobody saw another's columns. Who deals the random numbers for two "
        f"sites ({covariance.dealers}) must not collude with either; the coordinator and one "
        "site together learn the other's products with that one's columns.",
    )
    if covariance.left_out:
        yield Note(
            "products_left_out",
            f"{covariance.left_out} of the products between two sites would rest on too few common "
            "entities and were not asked for; they count as zero, their expectation.",
        )


# ----------------------------------------------------------------------------------------------------
# Notes below a VFEM summary: assumptions, accuracy, and what the exchange discloses.

# ----------------------------------------------------------------------------------------------------
# Counts that vary more than their distribution allows: what a summary says of it.

LEAST_EXCESS = 0.1
"""Excess of Pearson's statistic per entity that is passed over."""
ERRORS = 2.0
"""Standard errors of it that are chance; terms with a long tail to the right rarely have more."""


def excess(fit: VFEMFit) -> float:
    """Pearson's statistic per entity, where chance has no part in what it exceeds one by, else 0."""
    if fit.dispersion is None:
        return 0.0
    ratio, error = fit.dispersion
    return ratio if ratio > 1.0 + max(LEAST_EXCESS, ERRORS * error) else 0.0


def dispersion_alarm(fit: VFEMFit) -> str:
    """First line of a summary of counts whose distribution has too little variance."""
    ratio = excess(fit)
    if not ratio:
        return ""
    return f"OVERDISPERSED: Pearson chi2 / n = {ratio:.2f}; see the notes before you use these numbers"


def dispersion_notes(layout: Layout, fit: VFEMFit, cov_type: str) -> Iterator[Note]:
    """Say what the excess does, and what to fit in its place."""
    ratio = excess(fit)
    if not ratio:
        return
    name = fit.distribution.name
    more = (
        f"The counts vary {ratio:.2f} times as much as {name} with these columns allows (Pearson's statistic "
        "over the entities, from what is observed of each). "
    )
    if cov_type != "robust":
        more += f"Standard errors are about {np.sqrt(ratio):.1f} times too small. "
    remedy = DISPERSION_REMEDIES[name, fit.estimates_alpha]
    if fit.law is not None:
        remedy += " (alpha='ml' and cov_type='robust' have between='independent' as yet.)"
    if layout.missing.any():
        yield Note(
            "overdispersion",
            f"{more}The fit takes the excess for effects of what is missing: coefficients of sites "
            "that lack entities are too large. In simulations intervals of nominal 95 % covered 51 to 57 %, "
            f"with cov_type='robust' 64 to 69 %. {remedy}",
            "warning",
        )
    elif cov_type != "robust":
        yield Note("overdispersion", f"{more}{remedy} Or use cov_type='robust'.", "warning")


ALPHA_REMEDY = "fit(alpha='ml'), with between='independent' as yet; its intervals covered 93 to 95 %."
DISPERSION_REMEDIES = {
    ("Poisson", False): f"Use family=sm.families.NegativeBinomial() and {ALPHA_REMEDY}",
    ("NegativeBinomial", False): f"This alpha is too small: use {ALPHA_REMEDY}",
    ("NegativeBinomial", True): "Their tails are longer than those of any alpha: look for outliers.",
}


# ----------------------------------------------------------------------------------------------------
# What covariances between sites cost that a fit leaves free, beside a law without them.

INDEPENDENCE_LEVEL = 0.05


def dependence_notes(fit: JointNormalFit, errors: Floats) -> Iterator[Note]:
    """Compare standard errors of coefficients with those of independent blocks, and the two laws."""
    if len(fit.moments.sizes) < 2 or fit.moments.seen.all():
        return
    try:
        other = fit_joint_model(fit.moments, "independent")
        covariance = reported_covariance(moments_covariance(other), fit_by_site(other, "independent"))
        pvalue = independence_lr_test(fit, other).pvalue
    except (EstimationError, NotAvailableError):
        return
    ratio = errors / np.sqrt(np.diag(covariance))[1:]
    yield Note(
        "dependence",
        f"Standard errors of coefficients are {np.median(ratio):.2f} times (median; {ratio.min():.2f} to "
        f"{ratio.max():.2f}) those of between='independent', blocks independent between sites. "
        f"The data {'contradict' if pvalue < INDEPENDENCE_LEVEL else 'do not contradict'} such a law "
        "(likelihood "
        f"ratio, {format_pvalue(pvalue)}); where it does not hold its coefficients are biased.",
    )


# ----------------------------------------------------------------------------------------------------
# Statements on pairs of sites that share too few entities for a covariance of their columns.

SENSITIVITY_COLUMNS = ["first", "second", "n", "name", "estimate", "low", "high"]


def sensitivity(fit: JointNormalFit) -> pd.DataFrame:
    """Extremes of every coefficient that are compatible with the data, by pair that they leave open."""
    rows: list[tuple[object, ...]] = []
    names = [name.replace("'", "") for name in fit.moments.unit_names]
    for pair in sparse_pairs(fit.moments):
        if pair.undetermined:
            clients = names[pair.first], names[pair.second]
            each = zip(fit.moments.names, fit.beta, *extremes(fit, pair), strict=True)
            rows += [(*clients, pair.n, *of_column) for of_column in each]
    return pd.DataFrame(rows, columns=SENSITIVITY_COLUMNS)


def sparse_notes(fit: JointNormalFit, errors: Floats | None) -> Iterator[Note]:
    """Name the pairs, and how far a coefficient moves between extremes; `errors` are standard errors."""
    text = name_sparse(fit.moments)
    if not text:
        return
    table = sensitivity(fit)
    if len(table):
        unit = np.abs(table["estimate"].to_numpy())
        if errors is not None:
            unit = np.tile(errors, len(table) // len(errors))
        relative = (table["high"] - table["low"]).to_numpy() / unit
        one = table.iloc[int(np.argmax(relative))]
        text += (
            f" Between extremes that have the same likelihood {one['name']} goes from {one['low']:.4g} to "
            f"{one['high']:.4g}, {relative.max():.1f} times its "
            f"{'standard error' if errors is not None else 'estimate'}; see .sensitivity()."
        )
    yield Note("sparse_pairs", text)


# ----------------------------------------------------------------------------------------------------
# Statements on a response that is not normal, where columns depend between sites.

JOINT_NOTE = (
    "Joint maximum likelihood of response and columns, all parameters of the law of the columns included: "
    "they are jointly normal, with a covariance that is free between sites. Valid when missingness "
    "depends on observed values only (MAR), the response among them. Columns of a site that lacks "
    "entities count as normal: for columns that are not, such as indicators, that is an approximation."
)
KNOWN_NOTE = (
    "The coordinator makes these coefficients, and knows them: of an entity that has fewer columns than "
    "numbers passed it can solve for the row."
)


def joint_assumptions(linear: JointNormalFit) -> Iterator[Note]:
    """Say what is assumed, and what of it the data contradict or leave open; of the normal law beside it."""
    yield Note("assumptions", JOINT_NOTE)
    try:
        pvalue = independence_lr_test(linear).pvalue
        yield Note(
            "independence",
            f"The data {'contradict' if pvalue < INDEPENDENCE_LEVEL else 'do not contradict'} blocks that "
            "are "
            "independent between sites, between='independent' (likelihood ratio of the normal law of "
            f"columns and response, {format_pvalue(pvalue)}).",
        )
    except (EstimationError, NotAvailableError):
        pass
    if sparse := name_sparse(linear.moments):
        yield Note("sparse_pairs", sparse)


def joint_notes(layout: Layout, exchange: PatternExchange, ledger: Ledger, *, masked: bool) -> Iterator[Note]:
    """Say what sums by missing pattern and numbers per entity told."""
    others = [k for k in layout.clients if k != layout.active]
    # What the coordinator's own site tells it does not travel.
    rounds = Counter(e.sender for e in ledger.entries if (e.step, e.array) == ("joint_score", "sums"))
    once = ", ".join(f"{count:,} of {site}" for site, count in exchange.numbers.items())
    told = []
    for j, (k, p) in enumerate(zip(layout.clients, layout.sizes, strict=True)):
        numbers = int(exchange.plan.patterns[:, j].sum()) * (1 + p) * rounds[k]
        if numbers:
            told.append(
                f"{k} {numbers:,} ({MANTISSA_BITS * numbers:,} bits) of {len(layout.kept[k]):,} entities"
            )
    yield Note(
        "sums",
        "Sums of the columns and of their products were exchanged once, by missing pattern; at least "
        f"{exchange.smallest:,} entities stand behind each. Numbers released, products of two sites "
        f"counted at both: {once}.",
    )
    if told:
        yield Note(
            "residual_sums",
            f"Residuals stayed with the response holder. In each of {max(rounds.values())} rounds an "
            "site learned sums of its own columns with them, by missing pattern, and told the "
            f"coordinator: {', '.join(told)}. A binary response is one bit an entity: these sums narrow the "
            "responses down, and in a small pattern whoever solves them has these.",
        )
    yield from small_patterns(exchange.moments.n, ledger, layout.active)
    if any(one.array == "h" and one.step == "joint_information" for one in ledger.entries):
        yield Note(
            "curvature",
            "For standard errors the coordinator, and the sites that have them, were told a curvature "
            "of every entity that two sites or more have. Where another lacks it, it tells the "
            "response to who knows the linear predictor, as the coordinator does; cov_type='none' sends "
            "none.",
        )
    if masked:
        yield from masked_notes(layout, ledger, remedy="", normal=False)
    if others:
        yield Note("coefficients_known", KNOWN_NOTE)
    yield from dealer_notes(exchange.dealers, "", layout.bystanders)
    yield from merge_notes(exchange)
    yield from dither_notes(layout)


# ----------------------------------------------------------------------------------------------------
# The sentences below a VFEM summary: assumptions, accuracy, and what the exchange discloses.

BASELINES = {
    "cc": (
        "Only entities with every block are used: right where who lacks a block depends on the columns "
        "alone, and biased where it depends on the response given the columns."
    ),
    "impute": (
        "Missing blocks count as their mean: coefficients are biased in general, and the standard "
        "errors ignore the imputation."
    ),
    "single": "Other sites' columns are left out; coefficients are those of a smaller model.",
}
NORMAL_RESPONSE = BASELINES | {
    "vfem": (
        "Maximum likelihood under normal errors and normal blocks that are independent between "
        "sites (between='independent'); valid when missingness depends on observed values only (MAR) "
        "and blocks do not correlate: where they do, coefficients are biased however records are missing. "
        "R-squared is that of an entity with every block."
    ),
}
FREE_COVARIANCE = (
    "Maximum likelihood under normal errors and jointly normal columns, whose covariance is free between "
    "sites; valid when missingness depends on observed values only (MAR). R-squared is that of an "
    "entity with every block."
)
OTHER_RESPONSE = BASELINES | {
    "vfem": (
        "Maximum likelihood under normal blocks that are independent between sites "
        "(between='independent'); valid when missingness depends on observed values only (MAR) and blocks do "
        "not correlate, which independence_tests() looks at: where they do, coefficients are biased however "
        "records are missing. Columns of a site that lacks entities count as jointly normal: for "
        "columns that are not, such as indicators, that is an approximation."
    ),
}
UNMASKED_NORMAL = (
    "In every round each site's linear predictor of every entity that it has, and the "
    "residuals of the response holder, leave their site. From a dozen such rounds, or from "
    "one with chosen starting coefficients, their receiver can recover a site's raw rows: "
    "use this exchange only where that is allowed. See .ledger.releases()."
)
UNMASKED_OTHER = (
    "In every round each site's linear predictor of every entity that it has leaves it. From a dozen "
    "such rounds their receiver can recover a site's raw rows: use masked=False only where that is "
    "allowed. See .ledger.releases()."
)
SMALL_SAMPLE = 0.02
ROBUST = (
    "Standard errors are robust (Huber and White; HC0): they allow for another variance of the response and "
    "for columns that are not normal, and mend no bias that either causes. Likelihood ratio, AIC and BIC go "
    "by the model."
)
SPLIT_RESIDUALS = (
    "For them the response holder split each residual at random between two sites at a time: neither "
    "can tell it, but two that put both parts together have the residuals of the entities that both have."
)
EXPECTED = (
    "Standard errors take cross-products between sites at their expectation, zero: this needs "
    "blocks that are missing completely at random and independent between sites."
)
EXPECTED_FREE = (
    "Standard errors come from the expected information: this needs columns that follow the normal law, and "
    "blocks that are missing completely at random."
)


def role_notes(roles: Mapping[str, str]) -> Iterator[Note]:
    """Say what stands beside the response, and what that means."""
    for role, name in roles.items():
        if role == "offset":
            yield Note(
                "offset",
                "The offset '{name}' is in the linear predictor with coefficient one, and is taken as "
                "independent of columns that are missing; predictions are those at an offset of zero.",
                values={"name": name},
            )
            continue
        meaning = (
            f"An entity stands for as many as '{name}' says"
            if role == "freq_weights"
            else f"The variance of the response is the error variance over '{name}'"
        )
        yield Note("weights", f"{meaning}; every site was told the weights of its entities.")


def fit_notes(
    layout: Layout, outcome: VFEMOutcome, held: SessionArtifacts, counts: EntityCounts, ledger: Ledger
) -> list[Note]:
    """Write the notes of one fit."""
    return [
        *count_notes(outcome.method, counts, conditioned=bool(layout.has)),
        *reused_pattern_notes(layout),
        *_assumptions(outcome, held),
        *([] if outcome.correction == "small-sample" else _small_sample(layout, outcome)),
        *correction_notes(outcome.correction, held.moments_fit if outcome.method == "vfem" else None),
        *dispersion_notes(layout, outcome.fit, outcome.cov_type),
        *_covariance(layout, outcome, ledger),
        *_release_notes(layout, outcome, held, ledger),
    ]


def _release_notes(
    layout: Layout, outcome: VFEMOutcome, held: SessionArtifacts, ledger: Ledger
) -> Iterator[Note]:
    """Say what passed, and what it tells."""
    if held.exchange is None:
        return _iterations(layout, outcome, ledger)
    if is_normal(outcome):
        return _moments(layout, outcome, held.exchange, ledger)
    return chain(
        joint_notes(layout, held.exchange, ledger, masked=outcome.options.masked),
        () if outcome.options.masked else _unmasked(layout, outcome, ledger),
    )


def _assumptions(outcome: VFEMOutcome, held: SessionArtifacts) -> Iterator[Note]:
    """Say what is assumed, and what in the data contradicts it or says nothing of it."""
    fit, covariance = held.moments_fit, outcome.covariance
    if isinstance(fit, JointNormalFit) and not is_normal(outcome):
        yield from joint_assumptions(fit)
        return
    free = as_between(outcome) == "free"
    if free:
        yield Note("assumptions", FREE_COVARIANCE)
    if isinstance(fit, JointNormalFit):
        errors = None
        if covariance is not None:
            errors = np.sqrt(np.diag(reported_covariance(covariance, outcome.fit)))[1:]
            if free:
                yield from dependence_notes(fit, errors)
        yield from sparse_notes(fit, errors)
    if free:
        return
    model = NORMAL_RESPONSE if is_normal(outcome) else OTHER_RESPONSE
    yield Note("assumptions", model[outcome.method])
    if outcome.method == "vfem" and fit is not None:
        yield from most_correlated(fit.moments, "fit with between='free'")


def is_normal(outcome: VFEMOutcome) -> bool:
    """Whether the response is normal."""
    return outcome.fit.distribution == NORMAL


def count_notes(method: str, counts: EntityCounts, *, conditioned: bool = False) -> Iterator[Note]:
    """Say which entities a fit left out, or took as missing."""
    if counts.dropped:
        yield Note(
            "no_response", "{n:,} entities without a response were left out.", values={"n": counts.dropped}
        )
    if counts.unused:
        yield Note(
            "unused",
            "{n:,} entities with a response were left out by method='{method}'.",
            values={"n": counts.unused, "method": method},
        )
    if counts.partial:
        listed = ", ".join(f"{n:,} at {client}" for client, n in counts.partial.items())
        so = " The fit conditions on what they have." if conditioned else ""
        yield Note("partial", f"Entities with only some of a site's columns: {listed}.{so}")


def _small_sample(layout: Layout, outcome: VFEMOutcome) -> Iterator[Note]:
    if not is_normal(outcome):
        return
    used = 1 + sum(len(beta) for beta in outcome.fit.beta.values())
    inflation = np.sqrt(layout.n / (layout.n - used)) - 1.0
    if inflation > SMALL_SAMPLE and outcome.covariance is not None:
        yield Note(
            "small_sample",
            "The residual variance is that of maximum likelihood: with {n:,} entities for {coefficients} "
            "coefficients, ordinary least squares would report standard errors that are {percent:.0f} % "
            "larger.",
            values={"n": layout.n, "coefficients": used, "percent": float(100 * inflation)},
        )


def _covariance(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[Note]:
    covariance = outcome.covariance
    if covariance is None:
        return
    if outcome.cov_type == "expected" and len(layout.clients) > 1:
        yield Note("expected_information", EXPECTED if outcome.fit.law is None else EXPECTED_FREE)
    if covariance.how == "sketch":
        yield Note(
            "sketch",
            f"Cross-products between sites come from a {covariance.size:,}-row sketch: the error of a "
            f"product is about {100 * np.sqrt(1.0 / covariance.size):.2g} % of the columns' lengths "
            f"({100 * covariance.error:.2g} % measured within sites); the assembled matrix moved by "
            f"{100 * covariance.moved:.2g} % to be positive semi-definite.",
        )
        if ledger.at is not None:
            yield Note(
                "sketch_seed",
                f"The sites share the seed of the sketch, and the coordinator sits at one of them, "
                f"'{ledger.at}': to it the sketches do not hide the columns of the others. "
                'from_formula(..., coordinator="apart") keeps seed and sketches apart.',
                "warning",
            )
    yield from secure_product_notes(covariance)
    if outcome.cov_type == "robust":
        yield Note("robust", ROBUST)
        if not is_normal(outcome) and any(one.step == "glm_scores" for one in ledger.entries):
            yield Note("split_residuals", SPLIT_RESIDUALS)
    if outcome.cov_type == "sem":
        yield Note(
            "supplemented_em",
            f"Supplemented EM: relative asymmetry {covariance.asymmetry:.1e} before it was made symmetric.",
        )


def _iterations(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[Note]:
    normal = is_normal(outcome)
    if not normal:
        yield from response_notes(layout, ledger)
    if outcome.options.masked and any(k != ledger.at for k in layout.clients):
        yield from masked_notes(layout, ledger, remedy=MOMENTS if normal else "", normal=normal)
    else:
        yield from _unmasked(layout, outcome, ledger)
    if outcome.covariance is not None and outcome.covariance.how == "exact":
        yield Note(
            "plain_exchange",
            "Cross-products by plain exchange: sites' columns were disclosed to other sites.",
            "warning",
        )


def _unmasked(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[Note]:
    if others := [k for k in layout.clients if k != ledger.at]:
        yield Note("unmasked", UNMASKED_NORMAL if is_normal(outcome) else UNMASKED_OTHER, "warning")
        yield from solvable_note(rounds_of_predictors(ledger, others), layout.p, ledger, others)


def _moments(
    layout: Layout, outcome: VFEMOutcome, exchange: PatternExchange, ledger: Ledger
) -> Iterator[Note]:
    numbers = ", ".join(f"{count:,} of {site}" for site, count in exchange.numbers.items())
    more = f" Numbers released, products of two sites counted at both: {numbers}."
    yield sums_note(", by missing pattern", exchange.smallest, more)
    if outcome.refitted:
        yield Note(
            "refitted",
            "A part of a larger model, fitted from the sums of that one: nothing further was exchanged.",
        )
    yield from dealer_notes(exchange.dealers, "; see .dealers", layout.bystanders)
    if (
        exchange.dealers
        and not layout.bystanders
        and len({*layout.clients, layout.active}) == 2
        and ledger.at is None
    ):
        yield Note(
            "third_party",
            "Two sites take part: the coordinator sits at neither, since a third party has to deal.",
        )
    yield from merge_notes(exchange)
    yield from dither_notes(layout)
