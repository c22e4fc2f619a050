"""Notes of a VFEM summary: assumptions, accuracy, and what the exchange reveals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, compress

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.inference.likelihood import format_lr_test, format_pvalue
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
from fedstat.models.vertical.joint_normal.assumption_tests import (
    OPEN,
    BetweenChoice,
    choice_notes,
    contradiction,
    independence_lr_test,
    most_correlated,
    name_undetermined,
)
from fedstat.models.vertical.joint_normal.edges import name_sparse, undetermined_pairs
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, extremes, fit_joint_model
from fedstat.models.vertical.layout import Layout, list_terms, missing_by_column
from fedstat.models.vfem.corrections import DIFFERENCE_LEVEL, correction_notes, response_by_pattern
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
# The coordinator learns the sum of the linear predictors over sites for each entity, and sends it to the
# response holder. All sites know which of them have a record of an entity. If one site alone has a record,
# the sum *is* that site's part. A receiver with a block of its own can subtract its own part first.
#
# If two or more sites add up, no single round reveals the part of any of them. Many rounds together reveal
# more. A round changes the sum by X P X' z, where X holds the blocks of all sites side by side and the
# receiver knows the residuals z. After about as many rounds as there are columns, the receiver knows the
# joint column space, and with it approximate inner products between entities. Fewer rounds reveal less.
# exchange="moments" releases no row-level values.

MOMENTS = "exchange='moments' releases no row-level values. "


def count_exposed(layout: Layout, at: str | None) -> dict[str, int]:
    """Find the entities for which a masked sum is one site's own part; the coordinator is `at`.

    These are the entities of which only this site and receivers of the sum have a record. The receivers are
    the coordinator and the response holder.
    """
    seen = np.zeros((layout.n, len(layout.sites)), dtype=bool)
    for j, site in enumerate(layout.sites):  # filled-in means are zero in the sum
        seen[layout.kept[site], j] = True
    exposed = np.zeros_like(seen)
    for receiver in (at, layout.active):
        masked = seen & np.array([site != receiver for site in layout.sites])
        exposed |= masked & (masked.sum(axis=1) == 1)[:, None]
    return dict(zip(layout.sites, exposed.sum(axis=0).tolist(), strict=True))


RESPONSE_RELEASED = (
    "No third party could deal random numbers. Every site therefore learns the response of each of its "
    "entities from the first message: if all coefficients are zero, a residual is the response minus its "
    "mean. With a third site, or with coordinator='apart', residuals stay with the response holder."
)


def response_notes(layout: Layout, ledger: Ledger) -> Iterator[Note]:
    """State what sites learned about a response that is not normal, in bits."""
    others = [k for k in layout.sites if k != layout.active]
    if any(one.array == "z" and one.step == "glm_score" for one in ledger.entries):
        yield Note("response_released", RESPONSE_RELEASED, "warning")
        return
    if not others:
        return
    reported = [one for one in ledger.entries if one.array == "shown" and one.receiver in others]
    widths, parts = dict(zip(layout.sites, layout.sizes, strict=True)), []
    for k in others:
        numbers = sum(one.receiver == k for one in reported) * (1 + widths[k])
        parts.append(
            f"{k} {numbers:,} ({MANTISSA_BITS * numbers:,} bits) of {len(layout.kept[k]):,} entities"
        )
    yield Note(
        "residual_sums",
        "Residuals stayed with the response holder. Each site learned sums of its own columns with them, "
        f"sealed from the coordinator: {', '.join(parts)}. A binary response is one bit per entity. These "
        "sums narrow the responses down, and a site that solves them in a small group learns the responses.",
    )
    yield from small_patterns(layout.counts, ledger, layout.active)
    if not any(one.array == "h" and one.step == "glm_information" for one in ledger.entries):
        return
    opened = [one.receiver for one in ledger.entries if (one.step, one.array) == ("open_columns", "only")]
    seen = ~layout.missing
    summed = seen[:, [opened.count(k) > 1 or k not in others for k in layout.sites]].any(axis=1)
    reported_each = layout.missing.any(axis=1) & seen.any(axis=1) & ~(summed & (seen.sum(axis=1) == 1))
    if reported_each.any():
        yield Note(
            "curvature",
            "For standard errors, the coordinator and the sites concerned received a curvature for "
            f"{int(layout.counts[reported_each].sum()):,} entities, which two or more sites have and another "
            "lacks, or which one site has in groups too small to add up. A curvature reveals the response "
            "to anyone who knows the linear predictor, as the coordinator does. cov_type='none' sends no "
            "curvature.",
        )


def small_patterns(counts: Floats, ledger: Ledger, holder: str) -> Iterator[Note]:
    """State in which missing patterns a coordinator apart could solve for the responses.

    `counts` has shape (G,). The coordinator knows the linear predictors, so every sum over a pattern is
    linear in each binary response.
    """
    reported = sum(
        int(one.shape[-1])
        for one in ledger.entries
        if (one.sender, one.array) == (holder, "sums") and one.step in ("glm_evaluate", "joint_weights")
    )
    entities = int(counts[counts <= reported].sum())
    if entities and ledger.at != holder:
        yield Note(
            "small_patterns",
            f"The coordinator learned {reported} sums of derivatives by missing pattern, at linear "
            f"predictors that it knows. {entities:,} entities are in patterns of at most that many entities. "
            "If their responses are binary, the coordinator can solve for them: treat them as revealed to "
            "it.",
            "warning",
        )


def masked_notes(layout: Layout, ledger: Ledger, remedy: str, normal: bool = True) -> Iterator[Note]:
    """State what masked iterations reveal to the coordinator, and what to do if that is too much."""
    at = ledger.at
    if len(layout.sites) == 1:
        yield Note(
            "one_site",
            "Only one site has columns, so nothing is added up and its linear predictors were not masked.",
        )
        return
    receivers = "the coordinator" if at == layout.active else "the coordinator and the response holder"
    residuals = ", and every site the residuals of its entities" if normal else ""
    yield Note(
        "masked",
        "Linear predictors were added up over sites that follow the protocol but may analyze what they "
        f"receive (semi-honest): {receivers} learned the sum for every entity in every round{residuals}. "
        f"{remedy}See .ledger.releases().",
    )
    others = [k for k in layout.sites if k != layout.active]
    yield from solvable_note(rounds_of_predictors(ledger, others), layout.p, ledger, others)
    if at != layout.active and normal:
        yield Note(
            "response_known",
            "Residuals and sums together reveal the response of every entity to the coordinator.",
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
            "Masks hide nothing where only one site, apart from a receiver of the sum, has a record: the sum "
            f"is then the linear predictor of that site. Entities exposed in this way: {', '.join(parts)}.",
            "warning",
        )
    if not hides(len(layout.sites)):
        yield Note("two_sites", TWO_SITES, "warning")


def secure_product_notes(covariance: PsiCovariance) -> Iterator[Note]:
    """State how exact cross-products were computed, and which were left out."""
    if covariance.how != "secure":
        return
    yield Note(
        "secure_products",
        "Cross-products between sites come from secure multiplication. No site saw the columns of another, "
        "provided that all follow the protocol (semi-honest). The dealer of the random numbers for two sites "
        f"({covariance.dealers}) must not collude with either of them. If the coordinator colludes with one "
        "site, both together learn the products of the other site's columns with that site's columns.",
    )
    if covariance.left_out:
        yield Note(
            "products_left_out",
            f"{covariance.left_out} of the products between two sites would rest on too few common entities "
            "and were not requested. They count as zero, their expected value.",
        )


# ----------------------------------------------------------------------------------------------------
# Notes below a VFEM summary: assumptions, accuracy, and what the exchange reveals.

# ----------------------------------------------------------------------------------------------------
# Overdispersed counts: their notes in a summary.

LEAST_EXCESS = 0.1
"""Smallest excess of Pearson's statistic per entity that is reported."""
ERRORS = 2.0
"""Standard errors of the statistic that count as chance; long-tailed linear terms rarely exceed this."""


def excess(fit: VFEMFit) -> float:
    """Return Pearson's statistic per entity where it exceeds one by more than chance, else 0."""
    if fit.dispersion is None:
        return 0.0
    ratio, error = fit.dispersion
    return ratio if ratio > 1.0 + max(LEAST_EXCESS, ERRORS * error) else 0.0


def dispersion_notes(layout: Layout, fit: VFEMFit, cov_type: str) -> Iterator[Note]:
    """State the effect of overdispersion, and the model to fit instead."""
    ratio = excess(fit)
    if not ratio:
        return
    name = fit.distribution.name
    yield Note(
        "overdispersed",
        f"OVERDISPERSED: Pearson chi2 / n = {ratio:.2f}; read the notes before you use these numbers",
        "critical",
    )
    more = (
        f"The counts vary {ratio:.2f} times as much as {name} with these columns allows (Pearson's "
        "statistic over the entities, computed from their observed values). "
    )
    if cov_type != "robust":
        more += f"Standard errors are about {np.sqrt(ratio):.1f} times too small. "
    remedy = DISPERSION_REMEDIES[name, fit.estimates_alpha]
    if layout.missing.any():
        yield Note(
            "overdispersion",
            f"{more}The fit mistakes the excess for effects of missing columns, so coefficients of sites "
            "that lack entities are too large. In simulations, intervals of nominal 95 % covered 51 to 57 "
            f"%, and 64 to 69 % with cov_type='robust'. {remedy}",
            "warning",
        )
    elif cov_type != "robust":
        yield Note("overdispersion", f"{more}{remedy} Or use cov_type='robust'.", "warning")


ALPHA_REMEDY = "fit(dispersion='ml'); with between='independent', its intervals covered 93 to 95 %."
DISPERSION_REMEDIES = {
    ("Poisson", False): f"Use family=sm.families.NegativeBinomial() and {ALPHA_REMEDY}",
    ("NegativeBinomial", False): f"This alpha is too small: use {ALPHA_REMEDY}",
    ("NegativeBinomial", True): "Their tails are longer than any alpha allows: look for outliers.",
}


# ----------------------------------------------------------------------------------------------------
# The price of free covariances between sites, compared with a model without them.

INDEPENDENCE_LEVEL = 0.05


def dependence_notes(fit: JointNormalFit, errors: Floats) -> Iterator[Note]:
    """Compare standard errors of coefficients with those of independent blocks, and test the two models."""
    if len(fit.moments.sizes) < 2 or fit.moments.seen.all():
        return
    try:
        other = fit_joint_model(fit.moments, "independent")
        covariance = reported_covariance(moments_covariance(other), fit_by_site(other, "independent"))
        test = independence_lr_test(fit, other)
    except (EstimationError, NotAvailableError):
        return
    ratio = errors / np.sqrt(np.diag(covariance))[1:]
    yield Note(
        "dependence",
        f"Standard errors of coefficients are {np.median(ratio):.2f} times (median; {ratio.min():.2f} to "
        f"{ratio.max():.2f}) those of between='independent', which assumes independent blocks. "
        f"The data {'contradict' if test.pvalue < INDEPENDENCE_LEVEL else 'do not contradict'} independence "
        f"(likelihood ratio with Bartlett's correction, {format_lr_test(test)}); without "
        "independence, its coefficients are biased.",
    )


# ----------------------------------------------------------------------------------------------------
# Notes on pairs of sites that share too few entities for a covariance of their columns.

UNDETERMINED = 2.0
"""Range of a coefficient at one likelihood, in standard errors, above which it is not identified."""
SENSITIVITY_COLUMNS = ["first", "second", "n", "term", "estimate", "low", "high"]


def sensitivity(fit: JointNormalFit) -> pd.DataFrame:
    """Range of every coefficient that is compatible with the data, by pair of sites without a covariance."""
    rows: list[tuple[object, ...]] = []
    names = [name.replace("'", "") for name in fit.moments.unit_names]
    for pair in undetermined_pairs(fit.moments):
        sites = names[pair.first], names[pair.second]
        each = zip(fit.moments.names, fit.beta, *extremes(fit, pair)[:, 1:], strict=True)
        rows += [(*sites, pair.n, *of_column) for of_column in each]
    return pd.DataFrame(rows, columns=SENSITIVITY_COLUMNS)


def sparse_notes(
    fit: JointNormalFit, errors: Floats | None, choice: BetweenChoice | None = None
) -> Iterator[Note]:
    """Name the pairs and the range of a coefficient; `errors` are standard errors."""
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
            f" All values of {one['term']} from {one['low']:.4g} to {one['high']:.4g} have the same "
            f"likelihood; this range is {relative.max():.1f} times its "
            f"{'standard error' if errors is not None else 'estimate'}; see .sensitivity()."
        )
        if relative.max() > UNDETERMINED:
            yield Note(
                "not_identified",
                f"NOT IDENTIFIED: too few entities have records at both {one['first']} and {one['second']} "
                f"to determine all coefficients, among them {one['term']}{contradiction(choice)}. Intervals, "
                f"z and p-values of the table contain what the data leave open, from '{OPEN[0]}' to "
                f"'{OPEN[1]}'; standard errors and other tests do not",
                "critical",
            )
    yield Note("sparse_pairs", text, "warning")


# ----------------------------------------------------------------------------------------------------
# Notes on a response that is not normal, where columns are correlated between sites.

JOINT_NOTE = (
    "Joint maximum likelihood of the response and the columns, including all parameters of the columns' "
    "joint normal distribution; its covariance is {between}. Valid when missingness depends on "
    "observed values only (MAR), including the response. Columns of a site that lacks entities count as "
    "normal, which is an approximation for columns such as indicators."
)
INDEPENDENT = "zero between sites (independent blocks)"
INDEPENDENT_BIAS = "If blocks are correlated, coefficients are biased under any missing-data mechanism."
KNOWN_NOTE = (
    "The coordinator computes these coefficients and knows them. If an entity has fewer columns than the "
    "numbers released about it, the coordinator can solve for its row."
)


def joint_assumptions(linear: JointNormalFit, choice: BetweenChoice | None = None) -> Iterator[Note]:
    """State the assumptions, and which of them the data contradict or cannot test."""
    if choice is not None and choice.between == "independent":
        yield from choice_notes(choice, ranges=False)
        yield Note("assumptions", f"{JOINT_NOTE.format(between=INDEPENDENT)} {INDEPENDENT_BIAS}")
        return
    yield Note("assumptions", JOINT_NOTE.format(between="free between sites"))
    try:
        test = independence_lr_test(linear)
        yield Note(
            "independence",
            f"The data {'contradict' if test.pvalue < INDEPENDENCE_LEVEL else 'do not contradict'} blocks "
            "that are independent between sites, between='independent' (likelihood ratio test of a joint "
            "normal distribution of columns and response, with Bartlett's correction, "
            f"{format_lr_test(test)}).",
        )
    except (EstimationError, NotAvailableError):
        pass
    if sparse := name_sparse(linear.moments):
        if named := "; ".join(name_undetermined(linear.moments)):
            yield Note(
                "not_identified",
                f"NOT IDENTIFIED: too few entities have records at both {named}{contradiction(choice)}. "
                "Coefficients, standard errors and tests assume that these sites are independent given all "
                "other columns",
                "critical",
            )
        yield Note("sparse_pairs", sparse)


def joint_notes(layout: Layout, exchange: PatternExchange, ledger: Ledger, *, masked: bool) -> Iterator[Note]:
    """State what sums by missing pattern and row-level values revealed."""
    others = [k for k in layout.sites if k != layout.active]
    # What the site of the coordinator sends to it does not leave that site.
    rounds = Counter(e.sender for e in ledger.entries if (e.step, e.array) == ("joint_score", "sums"))
    once = ", ".join(f"{count:,} of {site}" for site, count in exchange.numbers.items())
    reported = []
    for j, (k, p) in enumerate(zip(layout.sites, layout.sizes, strict=True)):
        numbers = int(exchange.plan.patterns[:, j].sum()) * (1 + p) * rounds[k]
        if numbers:
            reported.append(
                f"{k} {numbers:,} ({MANTISSA_BITS * numbers:,} bits) of {len(layout.kept[k]):,} entities"
            )
    yield Note(
        "sums",
        "Sums of the columns and of their products were exchanged once, by missing pattern; each is "
        f"over at least {exchange.smallest:,} entities. Numbers released (a product of two sites counts "
        f"at both): {once}.",
    )
    if reported:
        yield Note(
            "residual_sums",
            f"Residuals stayed with the response holder. In each of {max(rounds.values())} rounds a site "
            "learned sums of its own columns with them, by missing pattern, and sent to the coordinator: "
            f"{', '.join(reported)}. A binary response is one bit per entity. These sums narrow the "
            "responses down, and a site that solves them in a small pattern learns the responses.",
        )
    yield from small_patterns(exchange.moments.n, ledger, layout.active)
    if any(one.array == "h" and one.step == "joint_information" for one in ledger.entries):
        yield Note(
            "curvature",
            "For standard errors, the coordinator and the sites concerned received a curvature for every "
            "entity that two or more sites have. If another site lacks the entity, the curvature reveals "
            "the response to anyone who knows the linear predictor, as the coordinator does. "
            "cov_type='none' sends no curvature.",
        )
    if masked:
        yield from masked_notes(layout, ledger, remedy="", normal=False)
    if others:
        yield Note("coefficients_known", KNOWN_NOTE)
    yield from dealer_notes(exchange.dealers, "", layout.bystanders)
    yield from merge_notes(exchange)
    yield from dither_notes(layout)


# ----------------------------------------------------------------------------------------------------
# The alarm on a response that is far from normal, where missingness goes with it.

SYMMETRY_SD, TAILS_SD = np.sqrt(3.0 - 8.0 / np.pi), np.sqrt(1.0 - 3.0 / np.pi)
"""Standard deviations, times root n, of the means of z |z| and |z| of a standardized normal sample."""
NORMAL_TAILS = np.sqrt(2.0 / np.pi)
"""Mean of |z| of a normal z; it is smaller under long tails (Geary 1935)."""
SKEWED_LEVEL, TAILS_LEVEL = 0.02, 0.03
"""P-values below which the two tests reject, the second one-sided: together, in 5 % of normal samples."""
LEAST_ASYMMETRY, LEAST_TAILS = 0.06, 0.012
"""Deviations that matter in large samples: those of skewness .25, and of excess kurtosis .35."""


def response_alarm(outcome: VFEMOutcome, held: SessionArtifacts) -> Iterator[Note]:
    """Warn if the response is skewed or has long tails, and missingness depends on it."""
    fit = held.moments_fit
    if outcome.method != "vfem" or not is_normal(outcome) or fit is None:
        return
    found, n = fit.moments.response_shape, fit.moments.n.sum()
    if found is None or fit.moments.seen.all() or response_by_pattern(fit.moments) >= DIFFERENCE_LEVEL:
        return
    asymmetry, tails = found[0], NORMAL_TAILS - found[1]
    skewed = abs(asymmetry) > max(
        stats.norm.isf(SKEWED_LEVEL / 2.0) * SYMMETRY_SD / np.sqrt(n), LEAST_ASYMMETRY
    )
    long = tails > max(stats.norm.isf(TAILS_LEVEL) * TAILS_SD / np.sqrt(n), LEAST_TAILS)
    what = " and ".join(compress(("is skewed", "has longer tails than a normal one"), (skewed, long)))
    if not what:
        return
    yield Note(
        "response_not_normal",
        f"RESPONSE NOT NORMAL: it {what}, and missingness depends on it; coefficients may be wrong by "
        "several standard errors. {remedy}",
        "critical",
        {"remedy": RESPONSE_REMEDY},
    )
    yield Note(
        "response_shape",
        f"The response {what}: the mean of z |z| is {asymmetry:.3f} (normal: 0), and that of |z| is "
        f"{found[1]:.3f} (normal: .798), with z the standardized response. It differs between missing "
        "patterns, so maximum likelihood relies on the shape of the normal distribution. In simulations "
        "with exponential errors, intervals of nominal 95 % covered 48 % (slope of missingness 1.2 per "
        "standard deviation of the response) and 78 % (.4 per standard deviation); with t errors of 5 "
        "degrees of freedom, 92 %.",
        "warning",
    )


RESPONSE_REMEDY = "Use fit(method='weighted'), which assumes no distribution"


# ----------------------------------------------------------------------------------------------------
# Texts below a VFEM summary: assumptions, accuracy, and what the exchange reveals.

BASELINES = {
    "cc": (
        "Only entities with every block are used. This is valid if missingness depends on the columns "
        "alone, and biased if it depends on the response given the columns."
    ),
    "impute": (
        "Missing blocks are replaced by their mean. Coefficients are biased in general, and the standard "
        "errors ignore the imputation."
    ),
    "single": "Columns of other sites are left out; the coefficients are those of a smaller model.",
}
EQUAL_VARIANCES = (
    "Intervals of new responses (get_prediction) rely on normal errors with equal variances; those of "
    "predict_set do not, and hold on average over the entities with the same sites, not for each of them."
)
NORMAL_RESPONSE = BASELINES | {
    "vfem": (
        "Maximum likelihood under normal errors and normal blocks that are independent between sites "
        "(between='independent'). Valid if missingness depends on observed values only (MAR) and blocks "
        "are not correlated; if they are, coefficients are biased under any missing-data mechanism. "
        f"R-squared is that of an entity with every block. {EQUAL_VARIANCES}"
    ),
}
FREE_COVARIANCE = (
    "Maximum likelihood under normal errors and jointly normal columns, whose covariance is free between "
    "sites. Valid if missingness depends on observed values only (MAR). R-squared is that of an entity "
    f"with every block. {EQUAL_VARIANCES}"
)
WEIGHTED = (
    "Moments of the entities that two sites share, with weights by which their response represents all "
    "entities, augmented with entities that only one of the two has. No distribution is assumed. Valid if "
    "missingness depends on the response and the columns of its site only. Standard errors come from a "
    "jackknife over {groups} random groups, and intervals from Student's t."
)
WEIGHTED_RELEASES = (
    "Weighted sums of the columns and of their products were released by random group, for every site and "
    "every two sites; no row-level values left a site. The weights depend on the response. They stayed with "
    "its holder, which split them at random between two sites at a time. Two of these that collude can "
    "recover the weights of the entities that both have, and from these approximate responses."
)
OTHER_RESPONSE = BASELINES | {
    "vfem": (
        "Maximum likelihood under normal blocks that are independent between sites "
        "(between='independent'). Valid if missingness depends on observed values only (MAR) and blocks "
        "are not correlated; if they are, coefficients are biased under any missing-data mechanism "
        "(independence_tests() tests this). Columns of a site that lacks entities count as jointly normal, "
        "which is an approximation for columns such as indicators."
    ),
}
UNMASKED_NORMAL = (
    "In every round, each site releases its linear predictor for each of its entities, and the response "
    "holder releases the residuals. From about twelve such rounds, or from one with chosen starting "
    "coefficients, the receiver can recover a site's raw rows: use this exchange only where that is "
    "allowed. See .ledger.releases()."
)
UNMASKED_OTHER = (
    "In every round, each site releases its linear predictor for each of its entities. From about twelve "
    "such rounds the receiver can recover a site's raw rows: use masked=False only where that is allowed. "
    "See .ledger.releases()."
)
MOST_MISSING = 5
"""Largest number of columns of a site whose missing values a note lists."""
SMALL_SAMPLE = 0.02
ROBUST = (
    "Standard errors are robust (Huber and White; HC0). They remain valid if the variance of the response "
    "differs from the model and if columns are not normal, but they correct no bias that either causes. "
    "Likelihood ratio, AIC and BIC assume the model."
)
ROBUST_GROUPS = (
    "Standard errors are robust: a sandwich from sums by random group of entities within each missing "
    "pattern, which agrees with a delete-a-group jackknife to first order. They remain valid if variances "
    "differ or columns are not normal, but they correct no bias that either causes. Likelihood ratio, AIC "
    "and BIC assume the model."
)
SPLIT_RESIDUALS = (
    "For them, the response holder split each residual at random between two sites at a time. Neither site "
    "can recover it alone; both together can recover the residuals of the entities that both have."
)
EXPECTED = (
    "Standard errors set cross-products between sites to their expected value, zero. This requires blocks "
    "that are missing completely at random and independent between sites."
)
EXPECTED_FREE = (
    "Standard errors come from the expected information. This requires normal columns, and blocks that are "
    "missing completely at random."
)


def fit_notes(
    layout: Layout, outcome: VFEMOutcome, held: SessionArtifacts, counts: EntityCounts, ledger: Ledger
) -> list[Note]:
    """Write the notes of one fit."""
    return [
        *count_notes(outcome.method, counts, layout),
        *missing_notes(layout),
        *reused_pattern_notes(layout),
        *response_alarm(outcome, held),
        *_assumptions(outcome, held),
        *([] if outcome.correction == "small-sample" else _small_sample(layout, outcome)),
        *correction_notes(
            outcome.correction, held.moments_fit if outcome.method == "vfem" else None, outcome.gap
        ),
        *dispersion_notes(layout, outcome.fit, outcome.cov_type),
        *_covariance(layout, outcome, ledger),
        *_release_notes(layout, outcome, held, ledger),
    ]


def _release_notes(
    layout: Layout, outcome: VFEMOutcome, held: SessionArtifacts, ledger: Ledger
) -> Iterator[Note]:
    """State what was released, and what it reveals."""
    if outcome.method == "weighted":
        return _weighted(layout)
    if held.exchange is None:
        return _iterations(layout, outcome, ledger)
    if is_normal(outcome):
        return _moments(layout, outcome, held.exchange, ledger)
    return chain(
        joint_notes(layout, held.exchange, ledger, masked=outcome.options.masked),
        () if outcome.options.masked else _unmasked(layout, outcome, ledger),
    )


def _assumptions(outcome: VFEMOutcome, held: SessionArtifacts) -> Iterator[Note]:
    """State the assumptions, and which of them the data contradict or cannot test."""
    fit, covariance = held.moments_fit, outcome.covariance
    if fit is not None and not is_normal(outcome):
        yield from joint_assumptions(fit, outcome.choice)
        return
    if outcome.method == "weighted":
        groups = 0 if covariance is None else covariance.size
        if (found := held.unexplained) is not None and found.pvalue < DIFFERENCE_LEVEL:
            yield Note(
                "missing_by_columns",
                f"MISSINGNESS DEPENDS ON OTHER COLUMNS: entities with a record at {found.other} differ in "
                f"{found.column} ({found.site}) by more than the response and the columns of its site "
                f"explain ({format_pvalue(found.pvalue)}); coefficients may be wrong by several standard "
                "errors. Compare with method='vfem', which allows this under normal errors and columns",
                "critical",
            )
        yield Note("assumptions", WEIGHTED.format(groups=groups))
        return
    free = as_between(outcome) == "free"
    if free:
        yield Note("assumptions", FREE_COVARIANCE)
    if fit is not None and not fit.model.profiled:
        errors = None
        if covariance is not None:
            errors = np.sqrt(np.diag(reported_covariance(covariance, outcome.fit)))[1:]
            if free:
                yield from dependence_notes(fit, errors)
        if outcome.choice is None or free:
            yield from sparse_notes(fit, errors, outcome.choice)
    if free:
        return
    if outcome.choice is not None:
        yield from choice_notes(outcome.choice, ranges=True)
    model = NORMAL_RESPONSE if is_normal(outcome) else OTHER_RESPONSE
    yield Note("assumptions", model[outcome.method])
    if outcome.method == "vfem" and fit is not None:
        yield from most_correlated(fit.moments, "fit with between='free'")


def is_normal(outcome: VFEMOutcome) -> bool:
    """Whether the response is normal."""
    return outcome.fit.distribution == NORMAL


def count_notes(method: str, counts: EntityCounts, layout: Layout) -> Iterator[Note]:
    """State which entities were left out or counted as missing."""
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
        listed = ", ".join(f"{n:,} at {site}" for site, n in counts.partial.items())
        so = " The fit conditions on the columns that they have." if layout.has else ""
        if layout.lacking:
            so = f" They count as missing there, and lack values of {list_terms(layout.lacking)}."
        text = f"Entities with only some of a site's columns: {listed}.{so}"
        yield Note("partial", text, "warning" if layout.lacking else "info")


def missing_notes(layout: Layout) -> Iterator[Note]:
    """State the columns with most missing values at sites whose records are incomplete."""
    parts = []
    for site, shares in missing_by_column(layout).items():
        most = sorted(shares.items(), key=lambda one: -one[1])[:MOST_MISSING]
        listed = ", ".join(f"{100.0 * share:.1f} % of {name}" for name, share in most if share)
        parts.append(f"{listed} ({len(layout.has[site]):,} at {site})")
    if parts:
        yield Note(
            "missing_columns",
            "Missing values by column, of the entities with a record at the site: {listed}.",
            values={"listed": "; ".join(parts)},
        )


def _small_sample(layout: Layout, outcome: VFEMOutcome) -> Iterator[Note]:
    if not is_normal(outcome) or outcome.unbiased != 1.0:
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
    if outcome.cov_type == "expected" and len(layout.sites) > 1:
        yield Note("expected_information", EXPECTED if outcome.fit.joint is None else EXPECTED_FREE)
    if covariance.how == "sketch":
        yield Note(
            "sketch",
            f"Cross-products between sites come from a sketch of {covariance.size:,} rows. The error of a "
            f"product is about {100 * np.sqrt(1.0 / covariance.size):.2g} % of the columns' lengths "
            f"({100 * covariance.error:.2g} % measured within sites). The matrix of all products was changed "
            f"by {100 * covariance.moved:.2g} % to make it positive semi-definite.",
        )
        if ledger.at is not None:
            yield Note(
                "sketch_seed",
                f"The sites share the seed of the sketch, and the coordinator is at one of them, "
                f"'{ledger.at}', so the sketches do not hide the columns of other sites from it. "
                'from_formula(..., coordinator="apart") keeps seed and sketches apart.',
                "warning",
            )
    yield from secure_product_notes(covariance)
    if outcome.unbiased != 1.0 and outcome.cov_type != "robust":
        yield Note(
            "least_squares",
            "Least squares: the residual variance has {df:,} degrees of freedom, and tests and intervals are "
            "those of Student's t.",
            values={"df": int(covariance.df or 0)},
        )
    if outcome.cov_type == "robust":
        yield Note("robust", ROBUST if covariance.df is None else ROBUST_GROUPS)
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
    if outcome.options.masked and any(k != ledger.at for k in layout.sites):
        yield from masked_notes(layout, ledger, remedy=MOMENTS if normal else "", normal=normal)
    else:
        yield from _unmasked(layout, outcome, ledger)
    if outcome.covariance is not None and outcome.covariance.how == "exact":
        yield Note(
            "plain_exchange",
            "Cross-products by plain exchange: columns of sites were revealed to other sites.",
            "warning",
        )


def _unmasked(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[Note]:
    if others := [k for k in layout.sites if k != ledger.at]:
        yield Note("unmasked", UNMASKED_NORMAL if is_normal(outcome) else UNMASKED_OTHER, "warning")
        yield from solvable_note(rounds_of_predictors(ledger, others), layout.p, ledger, others)


def _weighted(layout: Layout) -> Iterator[Note]:
    if any(site != layout.active for site in layout.sites):
        yield Note("weighted_sums", WEIGHTED_RELEASES)
    yield from dither_notes(layout)


def _moments(
    layout: Layout, outcome: VFEMOutcome, exchange: PatternExchange, ledger: Ledger
) -> Iterator[Note]:
    numbers = ", ".join(f"{count:,} of {site}" for site, count in exchange.numbers.items())
    more = f" Numbers released (a product of two sites counts at both): {numbers}."
    yield sums_note(", by missing pattern", exchange.smallest, more)
    if outcome.refitted:
        yield Note(
            "refitted",
            "A part of a larger model, fitted from the sums of that model: no further exchange took place.",
        )
    yield from dealer_notes(exchange.dealers, "; see .dealers", layout.bystanders)
    if (
        exchange.dealers
        and not layout.bystanders
        and len({*layout.sites, layout.active}) == 2
        and ledger.at is None
    ):
        yield Note(
            "third_party",
            "Two sites take part. The coordinator is at neither of them, because a third party must deal.",
        )
    yield from merge_notes(exchange)
    yield from dither_notes(layout)
