"""Notes of a VFEM summary: assumptions, accuracy, and what the exchange reveals.

The numbers behind them are in :mod:`fedstat.models.vfem.diagnostics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, compress

import numpy as np

from fedstat.errors import Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import hides
from fedstat.inference.likelihood import format_lr_test, format_pvalue
from fedstat.inference.notes import Catalogue, Note
from fedstat.models.vertical import notes as vertical
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
    most_correlated,
    name_undetermined,
)
from fedstat.models.vertical.joint_normal.edges import name_sparse
from fedstat.models.vertical.joint_normal.fit import JointNormalFit
from fedstat.models.vertical.layout import Layout, list_terms, missing_by_column
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.corrections import (
    DIFFERENCE_LEVEL,
    Correction,
    largest_bias,
    response_by_pattern,
    skewed_columns,
)
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.models.vfem.diagnostics import (
    INDEPENDENCE_LEVEL,
    UNDETERMINED,
    count_curvatures,
    count_exposed,
    count_reported,
    count_reported_jointly,
    dependence,
    excess,
    has_curvature,
    independence,
    largest_range,
    response_shape,
    solvable_patterns,
    variance_inflation,
)
from fedstat.models.vfem.iteration.site_state import NORMAL
from fedstat.models.vfem.iteration.state import VFEMFit
from fedstat.models.vfem.outcome import (
    EntityCounts,
    SessionArtifacts,
    VFEMOutcome,
    as_between,
    reported_covariance,
)
from fedstat.typing import Floats

MOST_MISSING, MAX_LISTED = 5, 6
"""Largest numbers of columns of a site whose missing values a note lists, and of skewed columns."""
MASKED = (
    "Linear predictors were added up over sites that follow the protocol but may analyze what they receive "
    "(semi-honest): {receivers} learned the sum for every entity in every round{residuals}. {remedy}See "
    ".ledger.releases()."
)
MOMENTS = Remedy("fit(exchange='moments')", "{arguments} releases no row-level values. ")
NO_CURVATURE = Remedy("fit(cov_type='none')", "{arguments} sends no curvature.")
CURVATURE = "For standard errors, the coordinator and the sites concerned received a curvature for "
REVEALED = (
    "Residuals stayed with the response holder. {who}: {numbers}. A binary response is one bit per entity. "
    "These sums narrow the responses down, and a site that solves them in a small {group} learns the "
    "responses."
)
WHO = {
    "group": "Each site learned sums of its own columns with them, sealed from the coordinator",
    "pattern": "In each of {rounds} rounds a site learned sums of its own columns with them, by missing "
    "pattern, and sent to the coordinator",
}
ALPHA = "fit(dispersion='ml'); with between='independent', its intervals covered 93 to 95 %."
OTHER_FAMILIES = {
    ("Poisson", False): Remedy(
        "from_formula(..., family=sm.families.NegativeBinomial()).fit(dispersion='ml')",
        f"Use family=sm.families.NegativeBinomial() and {ALPHA}",
    ),
    ("NegativeBinomial", False): Remedy("fit(dispersion='ml')", f"This alpha is too small: use {ALPHA}"),
    ("NegativeBinomial", True): Remedy(
        "from_formula(..., between='independent').fit(..., cov_type='robust')",
        "Their tails are longer than any alpha allows: look for outliers.",
    ),
}
"""Remedies of overdispersion by family, and by whether alpha was estimated."""
EXCESS = (
    "The counts vary {ratio:.2f} times as much as {family} with these columns allows (Pearson's statistic "
    "over the entities, computed from their observed values). "
)
TOO_SMALL = "Standard errors are about {factor:.1f} times too small. "
MISTAKEN = (
    "The fit mistakes the excess for effects of missing columns, so coefficients of sites that lack entities "
    "are too large. In simulations, intervals of nominal 95 % covered 51 to 57 %, and 64 to 69 % with "
    "cov_type='robust'. {remedy}"
)
EQUAL_VARIANCES = (
    "Intervals of new responses (get_prediction) rely on normal errors with equal variances; those of "
    "predict_set do not, and hold on average over the entities with the same sites, not for each of them."
)
JOINT = (
    "Joint maximum likelihood of the response and the columns, including all parameters of the columns' "
    "joint normal distribution; its covariance is {between}. Valid when missingness depends on observed "
    "values only (MAR), including the response. Columns of a site that lacks entities count as normal, which "
    "is an approximation for columns such as indicators."
)
INDEPENDENT = (
    " Valid if missingness depends on observed values only (MAR) and blocks are not correlated; if they are, "
    "coefficients are biased under any missing-data mechanism"
)
WEIGHTED = Remedy("fit(method='weighted')", "Use {call}, which assumes no distribution")
VERDICTS = {True: "contradict", False: "do not contradict"}
RANGE = (
    "{pairs} All values of {term} from {low:.4g} to {high:.4g} have the same likelihood; this range is "
    "{relative:.1f} times its {unit}; see .sensitivity()."
)
PARTIAL = "Entities with only some of a site's columns: {listed}."

NOTES = Catalogue(
    critical={
        "missing_by_columns": (
            "MISSINGNESS DEPENDS ON OTHER COLUMNS: entities with a record at {other} differ in {column} "
            "({site}) by more than the response and the columns of its site explain ({p}); coefficients may "
            "be wrong by several standard errors. {remedy}",
            Remedy(
                "fit(method='vfem')",
                "Compare with {arguments}, which allows this under normal errors and columns",
            ),
        ),
        "not_identified": "NOT IDENTIFIED: too few entities have records at both {first} and {second} to "
        "determine all coefficients, among them {term}{contradiction}. Intervals, z and p-values of the "
        "table contain what the data leave open, from '{lowest}' to '{highest}'; standard errors and other "
        "tests do not",
        "response_not_normal": (
            "RESPONSE NOT NORMAL: it {what}, and missingness depends on it; coefficients may be wrong by "
            "several standard errors. {remedy}",
            WEIGHTED,
        ),
        "incomplete_correction": (
            "CORRECTION INCOMPLETE: no model with skewed columns that was found has the estimates of the "
            "normal model; a coefficient of the closest one differs by {gap:.1f} standard errors. "
            "Coefficients and intervals may be wrong by as much. Take logarithms of skewed columns in the "
            "formula if effects are multiplicative, or {remedy}",
            Remedy("fit(method='weighted')", "use {call}"),
        ),
        "overdispersed": "OVERDISPERSED: Pearson chi2 / n = {ratio:.2f}; read the notes before you use "
        "these numbers",
    },
    warning={
        "sparse_pairs": "{pairs}",
        "sparse_pairs/range": RANGE,
        "response_shape": "The response {what}: the mean of z |z| is {asymmetry:.3f} (normal: 0), and that "
        "of |z| is {size:.3f} (normal: .798), with z the standardized response. It differs between missing "
        "patterns, so maximum likelihood relies on the shape of the normal distribution. In simulations "
        "with exponential errors, intervals of nominal 95 % covered 48 % (slope of missingness 1.2 per "
        "standard deviation of the response) and 78 % (.4 per standard deviation); with t errors of 5 "
        "degrees of freedom, 92 %.",
        "skewness": "Skewed columns that some entities lack: {columns}{more} (skewness of a log-normal "
        "column with the same third moment). The response differs between missing patterns ({p}), so the "
        "normal model of missing columns matters. With much missing, coefficients may be wrong by several "
        "standard errors: {remedy}take logarithms of these columns in the formula if the effects are "
        "multiplicative.",
        "small_sample_bias": (
            "Few entities have all columns that an estimate needs: the bias of order 1/n of maximum "
            "likelihood is {bias:+.2f} standard errors for {term}, and less for other columns; {remedy}",
            Remedy("fit(correction='small-sample')", "{call} removes it."),
        ),
        "overdispersion": EXCESS
        + TOO_SMALL
        + "{remedy} Or use cov_type='robust' with between='independent'.",
        "overdispersion/missing": EXCESS + TOO_SMALL + MISTAKEN,
        "overdispersion/missing_robust": EXCESS + MISTAKEN,
        "partial/missing": PARTIAL + " They count as missing there, and lack values of {terms}.",
        "response_released": (
            "No third party could deal random numbers. Every site therefore learns the response of each of "
            "its entities from the first message: if all coefficients are zero, a residual is the response "
            "minus its mean. With a third site, or with {remedy}, residuals stay with the response holder.",
            Remedy("from_formula(..., coordinator='apart').fit(...)", "{arguments}"),
        ),
        "small_patterns": "The coordinator learned {sums} sums of derivatives by missing pattern, at linear "
        "predictors that it knows. {entities:,} entities are in patterns of at most that many entities. If "
        "their responses are binary, the coordinator can solve for them: treat them as revealed to it.",
        "response_known": "Residuals and sums together reveal the response of every entity to the "
        "coordinator.",
        "exposed": "Masks hide nothing where only one site, apart from a receiver of the sum, has a record: "
        "the sum is then the linear predictor of that site. Entities exposed in this way: {entities}.",
        "unmasked": "In every round, each site releases its linear predictor for each of its entities. From "
        "about twelve such rounds the receiver can recover a site's raw rows: use masked=False only where "
        "that is allowed. See .ledger.releases().",
        "unmasked/normal": "In every round, each site releases its linear predictor for each of its "
        "entities, and the response holder releases the residuals. From about twelve such rounds, or from "
        "one with chosen starting coefficients, the receiver can recover a site's raw rows: use this "
        "exchange only where that is allowed. See .ledger.releases().",
        "plain_exchange": "Cross-products by plain exchange: columns of sites were revealed to other sites.",
        "sketch_seed": (
            "The sites share the seed of the sketch, and the coordinator is at one of them, '{at}', so the "
            "sketches do not hide the columns of other sites from it. {remedy} keeps seed and sketches "
            "apart.",
            Remedy(
                'from_formula(..., coordinator="apart").fit(...)',
                'from_formula(..., coordinator="apart")',
            ),
        ),
    },
    info={
        "assumptions/cc": "Only entities with every block are used. This is valid if missingness depends on "
        "the columns alone, and biased if it depends on the response given the columns.",
        "assumptions/impute": "Missing blocks are replaced by their mean. Coefficients are biased in "
        "general, and the standard errors ignore the imputation.",
        "assumptions/single": "Columns of other sites are left out; the coefficients are those of a smaller "
        "model.",
        "assumptions/vfem": "Maximum likelihood under normal errors and normal blocks that are independent "
        f"between sites (between='independent').{INDEPENDENT}. R-squared is that of an entity with every "
        f"block. {EQUAL_VARIANCES}",
        "assumptions/other_response": "Maximum likelihood under normal blocks that are independent between "
        f"sites (between='independent').{INDEPENDENT} (independence_tests() tests this). Columns of a site "
        "that lacks entities count as jointly normal, which is an approximation for columns such as "
        "indicators.",
        "assumptions/free": "Maximum likelihood under normal errors and jointly normal columns, whose "
        "covariance is free between sites. Valid if missingness depends on observed values only (MAR). "
        f"R-squared is that of an entity with every block. {EQUAL_VARIANCES}",
        "assumptions/joint": JOINT.format(between="free between sites"),
        "assumptions/joint_independent": JOINT.format(between="zero between sites (independent blocks)")
        + " If blocks are correlated, coefficients are biased under any missing-data mechanism.",
        "assumptions/weighted": "Moments of the entities that two sites share, with weights by which their "
        "response represents all entities, augmented with entities that only one of the two has. No "
        "distribution is assumed. Valid if missingness depends on the response and the columns of its site "
        "only. Standard errors come from a jackknife over {groups} random groups, and intervals from "
        "Student's t.",
        "independence": "The data {verdict} blocks that are independent between sites, "
        "between='independent' (likelihood ratio test of a joint normal distribution of columns and "
        "response, with Bartlett's correction, {test}).",
        "dependence": "Standard errors of coefficients are {median:.2f} times (median; {low:.2f} to "
        "{high:.2f}) those of between='independent', which assumes independent blocks. The data {verdict} "
        "independence (likelihood ratio with Bartlett's correction, {test}); without independence, its "
        "coefficients are biased.",
        "correction/small-sample": "Corrected for the small sample: the bias of order 1/n of maximum "
        "likelihood is removed, and standard errors use the residual variance with its degrees of freedom. "
        "The log-likelihood is that of the maximum.",
        "correction/skewness": "Corrected for skewness: each column is modeled as shifted log-normal, with "
        "the skewness that its site reported. An entity's missing pattern may depend on the response and on "
        "columns that no entity lacks. The estimate is the model whose simulated sample has the estimates "
        "of the normal model (indirect inference), and standard errors are those of the simulation. The "
        "log-likelihood is that of the normal model.",
        "small_sample": "The residual variance is that of maximum likelihood: with {n:,} entities for "
        "{coefficients} coefficients, ordinary least squares would report standard errors that are "
        "{percent:.0f} % larger.",
        "robust": "Standard errors are robust (Huber and White; HC0). They remain valid if the variance of "
        "the response differs from the model and if columns are not normal, but they correct no bias that "
        "either causes. Likelihood ratio, AIC and BIC assume the model.",
        "robust/groups": "Standard errors are robust: a sandwich from sums by random group of entities "
        "within each missing pattern, which agrees with a delete-a-group jackknife to first order. They "
        "remain valid if variances differ or columns are not normal, but they correct no bias that either "
        "causes. Likelihood ratio, AIC and BIC assume the model.",
        "least_squares": "Least squares: the residual variance has {df:,} degrees of freedom, and tests and "
        "intervals are those of Student's t.",
        "expected_information": "Standard errors set cross-products between sites to their expected value, "
        "zero. This requires blocks that are missing completely at random and independent between sites.",
        "expected_information/free": "Standard errors come from the expected information. This requires "
        "normal columns, and blocks that are missing completely at random.",
        "supplemented_em": "Supplemented EM: relative asymmetry {asymmetry:.1e} before it was made "
        "symmetric.",
        "sketch": "Cross-products between sites come from a sketch of {rows:,} rows. The error of a product "
        "is about {percent:.2g} % of the columns' lengths ({measured:.2g} % measured within sites). The "
        "matrix of all products was changed by {moved:.2g} % to make it positive semi-definite.",
        "no_response": "{n:,} entities without a response were left out.",
        "unused": "{n:,} entities with a response were left out by method='{method}'.",
        "partial": PARTIAL,
        "partial/conditional": PARTIAL + " The fit conditions on the columns that they have.",
        "missing_columns": "Missing values by column, of the entities with a record at the site: {listed}.",
        "coefficients_known": "The coordinator computes these coefficients and knows them. If an entity has "
        "fewer columns than the numbers released about it, the coordinator can solve for its row.",
        "products_left_out": "{products} of the products between two sites would rest on too few common "
        "entities and were not requested. They count as zero, their expected value.",
    },
    protocol={
        "sums": "Sums of the columns and of their products were exchanged once, by missing pattern; each is "
        "over at least {smallest:,} entities. Numbers released (a product of two sites counts at both): "
        "{numbers}.",
        "refitted": "A part of a larger model, fitted from the sums of that model: no further exchange took "
        "place.",
        "third_party": "Two sites take part. The coordinator is at neither of them, because a third party "
        "must deal.",
        "weighted_sums": "Weighted sums of the columns and of their products were released by random group, "
        "for every site and every two sites; no row-level values left a site. The weights depend on the "
        "response. They stayed with its holder, which split them at random between two sites at a time. Two "
        "of these that collude can recover the weights of the entities that both have, and from these "
        "approximate responses.",
        "residual_sums": REVEALED.replace("{who}", WHO["group"]).replace("{group}", "group"),
        "residual_sums/joint": REVEALED.replace("{who}", WHO["pattern"]).replace("{group}", "pattern"),
        "curvature": (
            CURVATURE
            + "{entities:,} entities, which two or more sites have and another lacks, or which one site "
            "has in groups too small to add up. A curvature reveals the response to anyone who knows the "
            "linear predictor, as the coordinator does. {remedy}",
            NO_CURVATURE,
        ),
        "curvature/joint": (
            CURVATURE + "every entity that two or more sites have. If another site lacks the entity, the "
            "curvature reveals the response to anyone who knows the linear predictor, as the coordinator "
            "does. {remedy}",
            NO_CURVATURE,
        ),
        "one_site": "Only one site has columns, so nothing is added up and its linear predictors were not "
        "masked.",
        "masked": MASKED,
        "secure_products": "Cross-products between sites come from secure multiplication. No site saw the "
        "columns of another, provided that all follow the protocol (semi-honest). The dealer of the random "
        "numbers for two sites ({dealers}) must not collude with either of them. If the coordinator "
        "colludes with one site, both together learn the products of the other site's columns with that "
        "site's columns.",
        "split_residuals": "For them, the response holder split each residual at random between two sites "
        "at a time. Neither site can recover it alone; both together can recover the residuals of the "
        "entities that both have.",
    },
)


def fit_notes(
    layout: Layout, outcome: VFEMOutcome, held: SessionArtifacts, counts: EntityCounts, ledger: Ledger
) -> list[Note]:
    """Write the notes of one fit."""
    return [
        *count_notes(outcome.method, counts, layout),
        *missing_notes(layout),
        *reused_pattern_notes(layout),
        *_response_alarm(outcome, held),
        *_assumptions(outcome, held),
        *([] if outcome.correction == "small-sample" else _small_sample(layout, outcome)),
        *correction_notes(
            outcome.correction, held.moments_fit if outcome.method == "vfem" else None, outcome.gap
        ),
        *_dispersion(layout, outcome.fit, outcome.cov_type),
        *_covariance(layout, outcome, ledger),
        *_release_notes(layout, outcome, held, ledger),
    ]


def is_normal(outcome: VFEMOutcome) -> bool:
    """Whether the response is normal."""
    return outcome.fit.distribution == NORMAL


# ----------------------------------------------------------------------------------------------------
# Entities and values that were left out.


def count_notes(method: str, counts: EntityCounts, layout: Layout) -> Iterator[Note]:
    """State which entities were left out or counted as missing."""
    if counts.dropped:
        yield NOTES.note("no_response", n=counts.dropped)
    if counts.unused:
        yield NOTES.note("unused", n=counts.unused, method=method)
    if counts.partial:
        listed = [f"{n:,} at {site}" for site, n in counts.partial.items()]
        if layout.lacking:
            yield NOTES.note("partial/missing", listed=listed, terms=list_terms(layout.lacking))
        else:
            yield NOTES.note("partial/conditional" if layout.has else "partial", listed=listed)


def missing_notes(layout: Layout) -> Iterator[Note]:
    """State the columns with most missing values at sites whose records are incomplete."""
    parts = []
    for site, shares in missing_by_column(layout).items():
        most = sorted(shares.items(), key=lambda one: -one[1])[:MOST_MISSING]
        listed = ", ".join(f"{100.0 * share:.1f} % of {name}" for name, share in most if share)
        parts.append(f"{listed} ({len(layout.has[site]):,} at {site})")
    if parts:
        yield NOTES.note("missing_columns", listed="; ".join(parts))


# ----------------------------------------------------------------------------------------------------
# Assumptions, and which of them the data contradict or cannot test.


def _assumptions(outcome: VFEMOutcome, held: SessionArtifacts) -> Iterator[Note]:
    fit, covariance = held.moments_fit, outcome.covariance
    if fit is not None and not is_normal(outcome):
        yield from _joint_assumptions(fit, outcome.choice)
        return
    if outcome.method == "weighted":
        if (found := held.unexplained) is not None and found.pvalue < DIFFERENCE_LEVEL:
            p = format_pvalue(found.pvalue)
            yield NOTES.note(
                "missing_by_columns", other=found.other, column=found.column, site=found.site, p=p
            )
        yield NOTES.note("assumptions/weighted", groups=0 if covariance is None else covariance.size)
        return
    free = as_between(outcome) == "free"
    if free:
        yield NOTES.note("assumptions/free")
    if fit is not None and not fit.model.profiled:
        errors = None
        if covariance is not None:
            errors = np.sqrt(np.diag(reported_covariance(covariance, outcome.fit)))[1:]
            if free:
                yield from _dependence(fit, errors)
        if outcome.choice is None or free:
            yield from _sparse(fit, errors, outcome.choice)
    if free:
        return
    if outcome.choice is not None:
        yield from choice_notes(outcome.choice, ranges=True)
    if outcome.method == "vfem" and not is_normal(outcome):
        yield NOTES.note("assumptions/other_response")
    else:
        yield NOTES.note(f"assumptions/{outcome.method}")
    if outcome.method == "vfem" and fit is not None:
        yield from most_correlated(fit.moments, FREE)


FREE = Remedy(
    "from_formula(..., between='free').fit()", " The assumption does not hold: fit with {arguments}."
)


def _dependence(fit: JointNormalFit, errors: Floats) -> Iterator[Note]:
    if (found := dependence(fit, errors)) is not None:
        yield NOTES.note(
            "dependence",
            median=np.median(found.ratio),
            low=found.ratio.min(),
            high=found.ratio.max(),
            verdict=VERDICTS[bool(found.test.pvalue < INDEPENDENCE_LEVEL)],
            test=format_lr_test(found.test),
        )


def _sparse(fit: JointNormalFit, errors: Floats | None, choice: BetweenChoice | None) -> Iterator[Note]:
    """Name pairs of sites that share too few entities, and the range of a coefficient."""
    pairs = name_sparse(fit.moments)
    if not pairs:
        return
    found = largest_range(fit, errors)
    if found is None:
        yield NOTES.note("sparse_pairs", pairs=pairs)
        return
    if found.relative > UNDETERMINED:
        yield NOTES.note(
            "not_identified",
            first=found.first,
            second=found.second,
            term=found.term,
            contradiction=contradiction(choice),
            lowest=OPEN[0],
            highest=OPEN[1],
        )
    yield NOTES.note(
        "sparse_pairs/range",
        pairs=pairs,
        term=found.term,
        low=found.low,
        high=found.high,
        relative=found.relative,
        unit="standard error" if errors is not None else "estimate",
    )


def _joint_assumptions(linear: JointNormalFit, choice: BetweenChoice | None) -> Iterator[Note]:
    """State the assumptions of a response that is not normal, with columns correlated between sites."""
    if choice is not None and choice.between == "independent":
        yield from choice_notes(choice, ranges=False)
        yield NOTES.note("assumptions/joint_independent")
        return
    yield NOTES.note("assumptions/joint")
    if (test := independence(linear)) is not None:
        verdict = VERDICTS[bool(test.pvalue < INDEPENDENCE_LEVEL)]
        yield NOTES.note("independence", verdict=verdict, test=format_lr_test(test))
    if sparse := name_sparse(linear.moments):
        if named := "; ".join(name_undetermined(linear.moments)):
            yield vertical.NOTES.note(
                "not_identified",
                pairs=named,
                contradiction=contradiction(choice),
                numbers="Coefficients, standard errors and tests",
            )
        yield vertical.NOTES.note("sparse_pairs", pairs=sparse)


# ----------------------------------------------------------------------------------------------------
# Accuracy.


def _response_alarm(outcome: VFEMOutcome, held: SessionArtifacts) -> Iterator[Note]:
    """Warn if the response is skewed or has long tails, and missingness depends on it."""
    fit = held.moments_fit
    if outcome.method != "vfem" or not is_normal(outcome) or fit is None:
        return
    if (found := response_shape(fit.moments)) is not None:
        words = compress(
            ("is skewed", "has longer tails than a normal one"), (found.skewed, found.long_tailed)
        )
        what = " and ".join(words)
        yield NOTES.note("response_not_normal", what=what)
        yield NOTES.note("response_shape", what=what, asymmetry=found.asymmetry, size=found.size)


def correction_notes(
    correction: Correction | None, fit: JointNormalFit | None, gap: float = 0.0
) -> Iterator[Note]:
    """State what was corrected, what remains, or why a fit from moments may need a correction."""
    if gap > 0.0:
        yield NOTES.note("incomplete_correction", gap=gap)
    if correction is not None:
        yield NOTES.note(f"correction/{correction}")
    elif fit is not None and not fit.model.profiled and (found := largest_bias(fit)) is not None:
        yield NOTES.note("small_sample_bias", term=found[0], bias=found[1])
    if correction != "skewness" and fit is not None:
        yield from _skewed(fit.moments)


COMPARE = Remedy("fit(correction='skewness')", "compare with {call}, or ")


def _skewed(moments: PatternMoments) -> Iterator[Note]:
    """Name skewed columns that some entities lack, where the response differs between missing patterns."""
    if columns := skewed_columns(moments):
        listed = [
            f"{name} ({site}) {skewness:.1f}, {100 * lacking:.0f} % missing"
            for name, site, skewness, lacking in columns[:MAX_LISTED]
        ]
        yield NOTES.note(
            "skewness",
            # The correction was tested for complete blocks only, and is refused otherwise.
            remedy=COMPARE if moments.complete else None,
            columns="; ".join(listed),
            more=f" and {len(columns) - MAX_LISTED} more" if len(columns) > MAX_LISTED else "",
            p=format_pvalue(response_by_pattern(moments)),
        )


def _small_sample(layout: Layout, outcome: VFEMOutcome) -> Iterator[Note]:
    if not is_normal(outcome) or outcome.unbiased != 1.0 or outcome.covariance is None:
        return
    used = 1 + sum(len(beta) for beta in outcome.fit.beta.values())
    if inflation := variance_inflation(layout, used):
        yield NOTES.note("small_sample", n=layout.n, coefficients=used, percent=100 * inflation)


def _dispersion(layout: Layout, fit: VFEMFit, cov_type: str) -> Iterator[Note]:
    """State the effect of overdispersion, and the model to fit instead."""
    ratio, name = excess(fit), fit.distribution.name
    if not ratio:
        return
    yield NOTES.note("overdispersed", ratio=ratio)
    remedy = OTHER_FAMILIES[name, fit.estimates_alpha]
    values = {"ratio": ratio, "family": name}
    if cov_type != "robust":
        kind = "overdispersion/missing" if layout.missing.any() else "overdispersion"
        yield NOTES.note(kind, remedy=remedy, factor=np.sqrt(ratio), **values)
    elif layout.missing.any():
        yield NOTES.note("overdispersion/missing_robust", remedy=remedy, **values)


def _covariance(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[Note]:
    covariance = outcome.covariance
    if covariance is None:
        return
    if outcome.cov_type == "expected" and len(layout.sites) > 1:
        free = outcome.fit.joint is not None
        yield NOTES.note("expected_information/free" if free else "expected_information")
    if covariance.how == "sketch":
        yield NOTES.note(
            "sketch",
            rows=covariance.size,
            percent=100 * np.sqrt(1.0 / covariance.size),
            measured=100 * covariance.error,
            moved=100 * covariance.moved,
        )
        if ledger.at is not None:
            yield NOTES.note("sketch_seed", at=ledger.at)
    yield from _secure_products(covariance)
    if outcome.unbiased != 1.0 and outcome.cov_type != "robust":
        yield NOTES.note("least_squares", df=int(covariance.df or 0))
    if outcome.cov_type == "robust":
        yield NOTES.note("robust" if covariance.df is None else "robust/groups")
        if not is_normal(outcome) and any(one.step == "glm_scores" for one in ledger.entries):
            yield NOTES.note("split_residuals")
    if outcome.cov_type == "sem":
        yield NOTES.note("supplemented_em", asymmetry=covariance.asymmetry)


def _secure_products(covariance: PsiCovariance) -> Iterator[Note]:
    """State how exact cross-products were computed, and which were left out."""
    if covariance.how != "secure":
        return
    yield NOTES.note("secure_products", dealers=covariance.dealers)
    if covariance.left_out:
        yield NOTES.note("products_left_out", products=covariance.left_out)


# ----------------------------------------------------------------------------------------------------
# Releases, and what they reveal.


def _release_notes(
    layout: Layout, outcome: VFEMOutcome, held: SessionArtifacts, ledger: Ledger
) -> Iterator[Note]:
    if outcome.method == "weighted":
        return _weighted(layout)
    if held.exchange is None:
        return _iterations(layout, outcome, ledger)
    if is_normal(outcome):
        return _moments(layout, outcome, held.exchange, ledger)
    return chain(
        _joint(layout, held.exchange, ledger, masked=outcome.options.masked),
        () if outcome.options.masked else _unmasked(layout, outcome, ledger),
    )


def _response(layout: Layout, ledger: Ledger) -> Iterator[Note]:
    """State what sites learned about a response that is not normal, in bits."""
    others = [k for k in layout.sites if k != layout.active]
    if any(one.array == "z" and one.step == "glm_score" for one in ledger.entries):
        yield NOTES.note("response_released")
        return
    if not others:
        return
    yield NOTES.note("residual_sums", numbers=_in_bits(count_reported(layout, ledger, others), layout))
    yield from _small_patterns(layout.counts, ledger, layout.active)
    if has_curvature(ledger, "glm_information") and (entities := count_curvatures(layout, ledger)):
        yield NOTES.note("curvature", entities=entities)


def _in_bits(numbers: dict[str, int], layout: Layout) -> list[str]:
    """List the numbers that each site learned, in bits, next to its entities."""
    return [
        f"{site} {count:,} ({MANTISSA_BITS * count:,} bits) of {len(layout.kept[site]):,} entities"
        for site, count in numbers.items()
    ]


def _small_patterns(counts: Floats, ledger: Ledger, holder: str) -> Iterator[Note]:
    """State in which missing patterns a coordinator apart could solve for the responses."""
    sums, entities = solvable_patterns(counts, ledger, holder)
    if entities:
        yield NOTES.note("small_patterns", sums=sums, entities=entities)


def _joint(layout: Layout, exchange: PatternExchange, ledger: Ledger, *, masked: bool) -> Iterator[Note]:
    """State what sums by missing pattern and row-level values revealed."""
    once = [f"{count:,} of {site}" for site, count in exchange.numbers.items()]
    yield NOTES.note("sums", smallest=exchange.smallest, numbers=once)
    reported, rounds = count_reported_jointly(layout, exchange, ledger)
    if reported:
        yield NOTES.note("residual_sums/joint", rounds=rounds, numbers=_in_bits(reported, layout))
    yield from _small_patterns(exchange.moments.n, ledger, layout.active)
    if has_curvature(ledger, "joint_information"):
        yield NOTES.note("curvature/joint")
    if masked:
        yield from _masked(layout, ledger, normal=False)
    if any(k != layout.active for k in layout.sites):
        yield NOTES.note("coefficients_known")
    yield from dealer_notes(exchange.dealers, "", layout.bystanders)
    yield from merge_notes(exchange)
    yield from dither_notes(layout)


def _masked(layout: Layout, ledger: Ledger, normal: bool = True) -> Iterator[Note]:
    """State what masked iterations reveal to the coordinator, and what to do if that is too much."""
    at = ledger.at
    if len(layout.sites) == 1:
        yield NOTES.note("one_site")
        return
    holder = at == layout.active
    yield NOTES.note(
        "masked",
        remedy=MOMENTS if normal else None,
        receivers="the coordinator" if holder else "the coordinator and the response holder",
        residuals=", and every site the residuals of its entities" if normal else "",
    )
    others = [k for k in layout.sites if k != layout.active]
    yield from solvable_note(rounds_of_predictors(ledger, others), layout.p, ledger, others)
    if not holder and normal:
        yield NOTES.note("response_known")
    exposed = count_exposed(layout, at)
    if parts := [f"{count:,} of {len(layout.kept[k]):,} at {k}" for k, count in exposed.items() if count]:
        yield NOTES.note("exposed", entities=parts)
    if not hides(len(layout.sites)):
        yield vertical.NOTES.note("two_sites")


def _iterations(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[Note]:
    normal = is_normal(outcome)
    if not normal:
        yield from _response(layout, ledger)
    if outcome.options.masked and any(k != ledger.at for k in layout.sites):
        yield from _masked(layout, ledger, normal=normal)
    else:
        yield from _unmasked(layout, outcome, ledger)
    if outcome.covariance is not None and outcome.covariance.how == "exact":
        yield NOTES.note("plain_exchange")


def _unmasked(layout: Layout, outcome: VFEMOutcome, ledger: Ledger) -> Iterator[Note]:
    if others := [k for k in layout.sites if k != ledger.at]:
        yield NOTES.note("unmasked/normal" if is_normal(outcome) else "unmasked")
        yield from solvable_note(rounds_of_predictors(ledger, others), layout.p, ledger, others)


def _weighted(layout: Layout) -> Iterator[Note]:
    if any(site != layout.active for site in layout.sites):
        yield NOTES.note("weighted_sums")
    yield from dither_notes(layout)


def _moments(
    layout: Layout, outcome: VFEMOutcome, exchange: PatternExchange, ledger: Ledger
) -> Iterator[Note]:
    numbers = ", ".join(f"{count:,} of {site}" for site, count in exchange.numbers.items())
    more = f" Numbers released (a product of two sites counts at both): {numbers}."
    yield sums_note(", by missing pattern", exchange.smallest, more)
    if outcome.refitted:
        yield NOTES.note("refitted")
    yield from dealer_notes(exchange.dealers, "; see .dealers", layout.bystanders)
    two = len({*layout.sites, layout.active}) == 2
    if exchange.dealers and not layout.bystanders and two and ledger.at is None:
        yield NOTES.note("third_party")
    yield from merge_notes(exchange)
    yield from dither_notes(layout)
