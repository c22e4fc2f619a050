"""Summary of a GLM: header lines, table of sites, and notes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import stats

from fedstat.errors import NotAvailableError, Remedy
from fedstat.inference.heterogeneity import Heterogeneity
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import DASH, Lines
from fedstat.inference.tables import number, show_probability, two_digits
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.post_fit import bootstrap_obstacle
from fedstat.models.glm.statistics import GLMStatements
from fedstat.models.horizontal.clusters import Clustering, corrected_fit
from fedstat.models.horizontal.results import OFFSET, PROPENSITIES, weight_line
from fedstat.models.horizontal.site_results import DIFFER, tests_line

FEW_ROWS = 250
"""Rows below which HC0 and HC1 are too small (Long and Ervin 2000)."""

LEAST_EXCESS = 0.2
"""Excess of Pearson's statistic per degree of freedom below which standard errors are 10 % off at most."""

Z95 = 1.959964
AVERAGES = {
    True: "Such a coefficient is an average over sites, and need not be that of any",
    False: "No single coefficient is shown to differ, and each is an average over sites",
}
"""By whether Cochran's Q names a coefficient."""
ROBUST = Remedy('fit(cov_type="HC1")', 'Fit again with {arguments}, or scale="X2" (a quasi-likelihood).')
OTHER_MODELS = {
    "Poisson": Remedy(
        'from_formula(..., family=sm.families.NegativeBinomial()).fit(dispersion="ml")',
        'Fit again with family NegativeBinomial() and dispersion="ml", cov_type="HC1", or scale="X2" (a '
        "quasi-likelihood).",
    ),
    "NegativeBinomial": Remedy(
        'fit(dispersion="ml")',
        'Fit again with {arguments}, cov_type="HC1", or scale="X2" (a quasi-likelihood).',
    ),
}
"""Remedies of overdispersion by family; :data:`ROBUST` for others."""
BOOTSTRAP = Remedy(
    "wild_cluster_bootstrap('{term} = 0')", ": wild_cluster_bootstrap() tests with the sites as clusters"
)
TESTS = "AIC, BIC, likelihood ratio and score tests (that of equal coefficients among them)"
VARIES = "The response varies {ratio:.2f} times as much as {family} with dispersion {scale:g} allows. "
NOTES = Catalogue(
    critical={
        "overdispersed": "OVERDISPERSED: Pearson chi2 / df = {ratio:.2f}; standard errors are about "
        "{factor:.1f} times too small",
    },
    warning={
        "rounds": "The estimate stops after {steps} from the mean of the sites' own fits, short of the "
        "maximum of the likelihood: the next step would be {next} standard errors long.",
        "overdispersion": VARIES
        + f"Intervals of nominal 95 % then cover about {{covered:.0f}} %, and {TESTS} find too much. "
        "{remedy}",
        "overdispersion/allowed": VARIES + f"These standard errors allow for it; {TESTS} do not.",
        "small_sample": (
            "{cov_type} errors are too small with fewer than {least} rows: {remedy}.",
            Remedy("fit(cov_type='HC3')", "use {arguments}"),
        ),
    },
    info={
        "heterogeneity/not_compared": "The sites are not compared: {reason}",
        "heterogeneity/flagged": "The sites differ by Cochran's Q, though not by the test of all "
        f"coefficients.{{large}} {AVERAGES[True]}; see .heterogeneity.",
        "heterogeneity": "The sites differ: {test} {joint}, p {p}; {percent:.0f} % of the variation between "
        "sites exceeds sampling error (I2).{large}{variances} {average}; see .heterogeneity.",
        "alpha": "Alpha was estimated by maximum likelihood (standard error {std_error}), which the "
        "standard errors of the coefficients account for.",
        "likelihood": "The log-likelihood is Tweedie's extended quasi-likelihood.",
        "likelihood/survey": "The log-likelihood of a survey is a pseudo-likelihood: AIC, BIC and "
        "likelihood ratio tests have no meaning.",
        "clusters": "Standard errors are for clusters by '{clusters}'{strata}.{own}",
        "firth": "Firth's penalty keeps coefficients finite if columns separate the outcomes. For such "
        "columns normal intervals and tests are unreliable: report their sign and order of size only.",
        "absorbed": "The effects of the levels of {effects} were subtracted at the sites: R-squared, F and "
        "the null deviance are those within levels.{alone} Levels are of their site: an equal label at two "
        "sites is two levels{shared}.",
        "no_constant": "R-squared refers to zero instead of the mean, because no columns span a constant.",
    },
)

REACHED = 1e-8
"""Newton's step, in standard errors, at which a fit of a given number of rounds is at the maximum."""


def show_count(value: float) -> str:
    """Write a number of rows, which weights may make fractional."""
    return f"{value:,.0f}" if value == round(value) else number(value)


def show_number(count: int, thing: str) -> str:
    """Write a number of things."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def reached(fit: GLMFit) -> bool:
    """Whether the maximum is reached, as after one step of the linear model."""
    return fit.trace[-1].step < REACHED


# -- lines of the summary --------------------------------------------------------------------------


def _link_line(spec: DistributionSpec) -> str:
    return spec.link if spec.power is None else f"{spec.link} ({spec.power:g})"


def _alpha_line(result: GLMStatements) -> str:
    how = "estimated" if result.overdispersion is not None else "given"
    alpha = result.distribution.alpha
    return "" if alpha is None else f"{number(alpha)} ({how})"


def _method_line(result: GLMStatements) -> str:
    if (rounds := result._fit.rounds) is not None:
        return f"{rounds} Newton step{'s' * (rounds > 1)} on site sums"
    return (
        "Firth's penalized likelihood" if result.basis.method == "firth" else "Newton's method on site sums"
    )


def _converged_line(result: GLMStatements) -> str:
    fit = result._fit
    return "NO" if not result.converged else "yes" if fit.rounds is None or reached(fit) else "not sought"


def _pseudo_line(result: GLMStatements) -> str:
    try:
        return number(round(result.pseudo_rsquared(), 12) + 0.0)
    except NotAvailableError:
        return DASH


def _events_line(result: GLMStatements) -> str:
    """Share of events, known from the model without covariates; an offset hides it."""
    question, fit = result.basis.agreement.question, result._fit
    if result.distribution.name != "Binomial" or question.offsets or "exposure" in question.weights:
        return ""
    # Without an offset the null model is the share of events.
    share = float(result.family.link.inverse(np.array(fit.null)))
    events = share * fit.total.weight
    # Variance weights, and trials, make the sum of events no count of rows.
    weighted = question.propensities or "var_weights" in question.weights
    counted = len(question.response_columns) == 1 and not weighted
    if counted and abs(events - round(events)) < 1e-6:
        return f"{round(events):,} ({100 * share:.1f} %)"
    return f"{100 * share:.1f} %"


def _weight_line(result: GLMStatements) -> str:
    weighted = "freq_weights" in result.basis.agreement.question.weights
    return show_count(result._fit.total.weight) if weighted else ""


def covariance_line(result: GLMStatements) -> str:
    """Say how the covariance was estimated."""
    basis = result.basis
    if basis.clusters is None:
        return result.cov_type
    within = f" in {basis.strata}" if basis.strata is not None else ""
    correction = "" if basis.clustering is None else f", {basis.clustering.correction}"
    return f"{result.cov_type} ({basis.clusters}{within}{correction})"


ROLES: Lines = (
    OFFSET,
    weight_line("Exposure", "exposure"),
    weight_line("Freq. Weights", "freq_weights"),
    weight_line("Var. Weights", "var_weights"),
    PROPENSITIES,
    ("Sum of Weights", "", _weight_line),
)
"""Offset and weights."""
SUMMARY: Lines = (
    ("Dep. Variable", "estimate.response", ""),
    ("Model", "model_name", ""),
    ("Model Family", "distribution.name", ""),
    ("Variance Power", "distribution.var_power", "g"),
    ("Alpha", "", _alpha_line),
    ("Link Function", "distribution", _link_line),
    ("Method", "", _method_line),
    ("No. Observations", "nobs", ",d"),
    ("Events", "", _events_line),
    *ROLES,
    ("Df Residuals", "df_resid", show_count),
    ("Df Model", "estimate.df_model", "g"),
    ("Scale", "scale", number),
    ("Deviance", "deviance", number),
    ("Pearson chi2", "pearson_chi2", number),
    ("Pseudo R2 (CS)", "", _pseudo_line),
    ("Log-Likelihood", "llf", two_digits),
    ("AIC", "aic", two_digits),
    ("BIC", "bic", two_digits),
    ("Covariance Type", "", covariance_line),
    ("Tests", "", tests_line),
    ("Converged", "", _converged_line),
)
OLS_SUMMARY: Lines = (
    ("Dep. Variable", "estimate.response", ""),
    ("Model", "model_name", ""),
    ("Method", "", lambda _: "Least Squares"),
    ("No. Observations", "nobs", ",d"),
    *ROLES,
    ("Df Residuals", "df_resid", show_count),
    ("Df Model", "df_model", "g"),
    ("R-squared", "rsquared", number),
    ("Adj. R-squared", "rsquared_adj", number),
    ("F-statistic", "fvalue", number),
    ("Prob (F)", "f_pvalue", number),
    ("Scale", "scale", number),
    ("Log-Likelihood", "llf", two_digits),
    ("AIC", "aic", two_digits),
    ("BIC", "bic", two_digits),
    ("Covariance Type", "", covariance_line),
    ("Tests", "", tests_line),
)


def compare_sites(result: GLMStatements) -> tuple[Heterogeneity | None, str]:
    """Return heterogeneity, or None with the reason."""
    try:
        return result.heterogeneity, ""
    except NotAvailableError as error:
        return None, str(error)


# -- notes ---------------------------------------------------------------------------------------


def fit_notes(result: GLMStatements) -> Iterator[Note]:
    """State the limits of the fit, what sites differ in, and what was released."""
    ratio = excess(result)
    if ratio and result.cov_type == "nonrobust":
        yield NOTES.note("overdispersed", ratio=ratio, factor=np.sqrt(ratio))
    yield from few_clusters(result)
    yield from result._weights_notes()
    yield from result._left_out_note()
    yield from result._masking_note()
    yield from result._own_fits_note()
    yield from _absorbed_note(result)
    yield from _rounds_note(result._fit)
    yield from _sites_note(result)
    if result.overdispersion is not None:
        yield NOTES.note("alpha", std_error=number(result.overdispersion.std_error))
    if ratio:
        yield _excess_note(result, ratio)
    if result.cov_type == "survey" and result.estimate.llf is not None:
        yield NOTES.note("likelihood/survey")
    elif result.distribution.eql:
        yield NOTES.note("likelihood")
    yield from _cluster_note(result)
    if result.cov_type in ("HC0", "HC1") and result.nobs < FEW_ROWS:
        yield NOTES.note("small_sample", cov_type=result.cov_type, least=FEW_ROWS)
    if result.basis.method == "firth":
        yield NOTES.note("firth")


def _absorbed_note(result: GLMStatements) -> Iterator[Note]:
    effects, fit = result.basis.agreement.question.absorbed_texts, result._fit
    if not effects:
        return
    rows = fit.design.absorbed.alone
    alone = f" {rows:,} rows that are alone in a level were left out." if rows else ""
    found = [f"about {one.found:,} of '{one.groups}'" for one in fit.shared if one.found and not one.serial]
    shared = (
        f", as {' and '.join(found)} are. For one effect over all sites write the column as a term"
        if found
        else ""
    )
    yield NOTES.note("absorbed", effects=" and ".join(map(repr, effects)), alone=alone, shared=shared)


def _rounds_note(fit: GLMFit) -> Iterator[Note]:
    if fit.rounds is not None and not reached(fit):
        steps = "one Newton step" if fit.rounds == 1 else f"{fit.rounds} Newton steps"
        yield NOTES.note("rounds", steps=steps, next=number(fit.trace[-1].step))


def _sites_note(result: GLMStatements) -> Iterator[Note]:
    compared, reason = compare_sites(result)
    if compared is None:
        if len(result._fit.local) > 1:
            yield NOTES.note("heterogeneity/not_compared", reason=reason)
        return
    flagged, joint = compared.flagged, compared.joint
    differ = joint.pvalue < DIFFER
    # The test takes rows as independent, and weights as counts.
    if result.basis.clusters is not None or not (differ or flagged):
        return
    large = f" I2 is large for {'; '.join(_spread(compared, name) for name in flagged)}." if flagged else ""
    if not differ:
        yield NOTES.note("heterogeneity/flagged", large=large)
        return
    yield NOTES.note(
        "heterogeneity",
        test="test of equal coefficients (own dispersions)" if joint.own_dispersions else result._joint_name,
        joint=str(joint),
        p=show_probability(joint.pvalue),
        percent=100.0 * joint.excess,
        large=large,
        variances=" It also sees residual variances that differ." if compared.one_dispersion else "",
        average=AVERAGES[bool(flagged)],
    )


def _spread(compared: Heterogeneity, name: str) -> str:
    """Return how far a coefficient differs between sites, relative to its estimate."""
    estimate, tau2, share = compared.table.loc[[name], ["estimate", "tau2", "I2"]].to_numpy()[0].tolist()
    sizes = f"standard deviation {number(tau2**0.5)} between sites by REML, estimate {number(estimate)}"
    return f"{name} ({100.0 * share:.0f} %: {sizes})"


def excess(result: GLMStatements) -> float:
    """Pearson's statistic per degree of freedom over the dispersion taken as known, where chance has no part.

    For counts and for numbers of events in several trials; 0 if there is no evidence, and for single
    outcomes, where the statistic has no information.
    """
    question, name = result.basis.agreement.question, result.distribution.name
    if question.propensities:
        return 0.0
    grouped = name == "Binomial" and len(question.response_columns) == 2
    if result.estimates_dispersion or not (grouped or name in ("Poisson", "NegativeBinomial")):
        return 0.0
    ratio = result.pearson_chi2 / result.df_resid / result.scale
    # A squared residual of a count of mean m has variance 2 + 1 / m; the mean is known without an offset.
    mean = np.inf
    if not (grouped or question.offsets or "exposure" in question.weights):
        mean = float(result.family.link.inverse(np.array(result._fit.null)))
    chance = np.sqrt((2.0 + 1.0 / mean) / result.df_resid)
    return ratio if ratio > 1.0 + max(LEAST_EXCESS, 4.0 * chance) else 0.0


def _excess_note(result: GLMStatements, ratio: float) -> Note:
    name = result.distribution.name
    values: dict[str, Any] = {"ratio": ratio, "family": name, "scale": result.scale}
    if result.cov_type != "nonrobust":
        return NOTES.note("overdispersion/allowed", **values)
    covered = 100.0 * (1.0 - 2.0 * stats.norm.sf(Z95 / np.sqrt(ratio)))
    return NOTES.note("overdispersion", covered=covered, remedy=OTHER_MODELS.get(name, ROBUST), **values)


def _cluster_note(result: GLMStatements) -> Iterator[Note]:
    basis = result.basis
    if basis.clusters is None or basis.counts is None:
        return
    strata = f" in strata by '{basis.strata}'" if basis.strata is not None else ""
    own = "" if len(result._fit.local) == 1 else " The test of heterogeneity does not allow for them."
    yield NOTES.note("clusters", clusters=basis.clusters, strata=strata, own=own)


def few_clusters(result: GLMStatements) -> Iterator[Note]:
    """Warn of few effective clusters; with strata no more than clusters less strata are known."""
    basis, est = result.basis, result.estimate
    found = basis.clustering
    if found is None and basis.counts is not None and basis.clusters is not None:
        clusters, strata = basis.counts
        found = Clustering(
            basis.clusters, clusters, np.full(len(est.names), float(clusters - strata + 1)), "CR1"
        )
    if found is not None:
        correction = corrected_fit(groups=found.groups, correction="CR2") if basis.clustering else None
        by_site = found.groups == basis.site_column and not bootstrap_obstacle(result)
        yield from found.notes(est.names, est.terms, correction, BOOTSTRAP if by_site else None)
