"""Summary of a GLM: header lines, table of sites, and notes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import stats

from fedstat.errors import NotAvailableError
from fedstat.inference.heterogeneity import Heterogeneity
from fedstat.inference.summary import Note
from fedstat.inference.tables import number, show_probability
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.post_fit import bootstrap_obstacle
from fedstat.models.glm.statistics import GLMStatements
from fedstat.models.horizontal.clusters import Clustering, describe_tests, text_of
from fedstat.models.horizontal.site_results import DIFFER

FEW_ROWS = 250
"""Rows below which HC0 and HC1 are too small (Long and Ervin 2000)."""

LEAST_EXCESS = 0.2
"""Excess of Pearson's statistic per degree of freedom below which standard errors are 10 % off at most."""

OTHER_MODELS = {
    "Poisson": 'family NegativeBinomial() and dispersion="ml", ',
    "NegativeBinomial": 'dispersion="ml", ',
}
Z95 = 1.959964

REACHED = 1e-8
"""Newton's step, in standard errors, at which a fit of a given number of rounds is at the maximum."""

ROLES = {"exposure": "Exposure", "freq_weights": "Freq. Weights", "var_weights": "Var. Weights"}


def show_count(value: float) -> str:
    """Write a number of rows, which weights may make fractional."""
    return f"{value:,.0f}" if value == round(value) else number(value)


def show_number(count: int, thing: str) -> str:
    """Write a number of things."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def reached(fit: GLMFit) -> bool:
    """Whether the maximum is reached, as after one step of the linear model."""
    return fit.trace[-1].step < REACHED


# -- lines ---------------------------------------------------------------------------------------


def estimate_lines(result: GLMStatements) -> list[tuple[str, str]]:
    """Labels and values of the estimate."""
    est, fit = result.estimate, result._fit
    converged = "not sought" if fit.rounds is not None and not reached(fit) else "yes"
    return [
        *_model_lines(result),
        ("No. Observations", f"{est.nobs:,}"),
        *_event_lines(result),
        *role_lines(result),
        ("Df Residuals", show_count(result.df_resid)),
        ("Df Model", f"{est.df_model:g}"),
        ("Scale", number(result.scale)),
        ("Deviance", number(result.deviance)),
        ("Pearson chi2", number(result.pearson_chi2)),
        ("Pseudo R2 (CS)", result._or_dash(lambda: round(result.pseudo_rsquared(), 12) + 0.0)),
        ("Log-Likelihood", result._or_dash(lambda: result.llf, 2)),
        ("AIC", result._or_dash(lambda: result.aic, 2)),
        ("BIC", result._or_dash(lambda: result.bic, 2)),
        ("Covariance Type", covariance_line(result)),
        ("Tests", tests_line(result)),
        ("Converged", converged if est.converged else "NO"),
    ]


def _model_lines(result: GLMStatements) -> list[tuple[str, str]]:
    fit, spec = result._fit, result.distribution
    link = spec.link if spec.power is None else f"{spec.link} ({spec.power:g})"
    power = [] if spec.var_power is None else [("Variance Power", f"{spec.var_power:g}")]
    how = "estimated" if result.overdispersion is not None else "given"
    alpha = [] if spec.alpha is None else [("Alpha", f"{number(spec.alpha)} ({how})")]
    method = "Newton's method on site sums"
    if result.basis.method == "firth":
        method = "Firth's penalized likelihood"
    if fit.rounds is not None:
        method = f"{fit.rounds} Newton step{'s' * (fit.rounds > 1)} on site sums"
    return [
        ("Dep. Variable", result.estimate.response),
        ("Model", result.model_name),
        ("Model Family", spec.name),
        *power,
        *alpha,
        ("Link Function", link),
        ("Method", method),
    ]


def _event_lines(result: GLMStatements) -> list[tuple[str, str]]:
    """Share of events, known from the model without covariates; an offset hides it."""
    question, fit = result.basis.agreement.question, result._fit
    if result.distribution.name != "Binomial" or question.offsets or "exposure" in question.weights:
        return []
    # Without an offset the null model is the share of events.
    share = float(result.family.link.inverse(np.array(fit.null)))
    events = share * fit.total.weight
    # Variance weights, and trials, make the sum of events no count of rows.
    counted = len(question.response_columns) == 1 and "var_weights" not in question.weights
    if counted and abs(events - round(events)) < 1e-6:
        return [("Events", f"{round(events):,} ({100 * share:.1f} %)")]
    return [("Events", f"{100 * share:.1f} %")]


def tests_line(result: GLMStatements) -> str:
    """State the distribution of tests and intervals."""
    return describe_tests(result.df_inference, result.estimate.df)


def role_lines(result: GLMStatements) -> list[tuple[str, str]]:
    """Name offset and weights."""
    question = result.basis.agreement.question
    lines = [("Offset", ", ".join(question.offsets))] if question.offsets else []
    lines += [(ROLES[role], question.weights[role]) for role in ROLES if role in question.weights]
    if "freq_weights" in question.weights:
        lines.append(("Sum of Weights", show_count(result._fit.total.weight)))
    return lines


def covariance_line(result: GLMStatements) -> str:
    """Say how the covariance was estimated."""
    basis = result.basis
    if basis.clusters is None:
        return result.cov_type
    within = f" in {basis.strata}" if basis.strata is not None else ""
    correction = "" if basis.clustering is None else f", {basis.clustering.correction}"
    return f"{result.cov_type} ({basis.clusters}{within}{correction})"


def compare_sites(result: GLMStatements) -> tuple[Heterogeneity | None, str]:
    """Return heterogeneity, or None with the reason."""
    try:
        return result.heterogeneity, ""
    except NotAvailableError as error:
        return None, str(error)


# -- sentences -----------------------------------------------------------------------------------


def fit_notes(result: GLMStatements) -> Iterator[Note]:
    """State the limits of the fit, what sites differ in, and what was released."""
    if alarm := excess_alarm(result):
        yield Note("overdispersed", alarm, "critical")
    yield from few_clusters(result)
    yield from result._left_out_note()
    yield from result._masking_note()
    yield from result._own_fits_note()
    for kind, part in PARTS.items():
        if text := part(result):
            yield Note(kind, text, "warning" if kind in WARNINGS else "info")


def _rounds_note(result: GLMStatements) -> str:
    fit = result._fit
    if fit.rounds is None or reached(fit):
        return ""
    steps = "one Newton step" if fit.rounds == 1 else f"{fit.rounds} Newton steps"
    return (
        f"The estimate stops after {steps} from the mean of the sites' own fits, short of the maximum of the "
        f"likelihood: the next step would be {number(fit.trace[-1].step)} standard errors long."
    )


def _sites_note(result: GLMStatements) -> str:
    compared, reason = compare_sites(result)
    if compared is None:
        return "" if len(result._fit.local) == 1 else f"The sites are not compared: {reason}"
    flagged, joint = compared.flagged, compared.joint
    if result.basis.clusters is not None:  # it takes rows as independent, and weights as counts
        return ""
    large = f" I2 is large for {'; '.join(_spread(compared, name) for name in flagged)}." if flagged else ""
    if joint.pvalue < DIFFER:
        kind = "test of equal coefficients (own dispersions)" if joint.own_dispersions else result._joint_name
        verdict = f"The sites differ: {kind} {joint}, p {show_probability(joint.pvalue)}; "
        verdict += (
            f"{100.0 * joint.excess:.0f} % of the variation between sites exceeds sampling error (I2).{large}"
        )
        if compared.one_dispersion:
            verdict += " It also sees residual variances that differ."
    elif flagged:
        verdict = f"The sites differ by Cochran's Q, though not by the test of all coefficients.{large}"
    else:
        return ""
    average = (
        "Such a coefficient is an average over sites, and need not be that of any"
        if flagged
        else "No single coefficient is shown to differ, and each is an average over sites"
    )
    return f"{verdict} {average}; see .heterogeneity."


def _spread(compared: Heterogeneity, name: str) -> str:
    """Return how far a coefficient differs between sites, relative to its estimate."""
    estimate, tau2, share = compared.table.loc[[name], ["estimate", "tau2", "I2"]].to_numpy()[0].tolist()
    sizes = f"standard deviation {number(tau2**0.5)} between sites by REML, estimate {number(estimate)}"
    return f"{name} ({100.0 * share:.0f} %: {sizes})"


def _alpha_note(result: GLMStatements) -> str:
    if result.overdispersion is None:
        return ""
    return (
        "Alpha was estimated by maximum likelihood (standard error "
        f"{number(result.overdispersion.std_error)}), which the standard errors of the coefficients account "
        "for."
    )


def excess(result: GLMStatements) -> float:
    """Pearson's statistic per degree of freedom over the dispersion taken as known, where chance has no part.

    For counts and for numbers of events in several trials; 0 if there is no evidence, and for single
    outcomes, where the statistic has no information.
    """
    question, name = result.basis.agreement.question, result.distribution.name
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


def excess_alarm(result: GLMStatements) -> str:
    """First line of a summary whose standard errors suppose less variance than there is."""
    ratio = excess(result)
    if not ratio or result.cov_type != "nonrobust":
        return ""
    factor = f"standard errors are about {np.sqrt(ratio):.1f} times too small"
    return f"OVERDISPERSED: Pearson chi2 / df = {ratio:.2f}; {factor}"


def _excess_note(result: GLMStatements) -> str:
    ratio, name = excess(result), result.distribution.name
    if not ratio:
        return ""
    more = f"The response varies {ratio:.2f} times as much as {name} with dispersion {result.scale:g} allows."
    tests = "AIC, BIC, likelihood ratio and score tests (that of equal coefficients among them)"
    if result.cov_type != "nonrobust":
        return f"{more} These standard errors allow for it; {tests} do not."
    covered = 100.0 * (1.0 - 2.0 * stats.norm.sf(Z95 / np.sqrt(ratio)))
    return (
        f"{more} Intervals of nominal 95 % then cover about {covered:.0f} %, and {tests} find too much. Fit "
        f'again with {OTHER_MODELS.get(name, "")}cov_type="HC1", or scale="X2" (a quasi-likelihood).'
    )


def _likelihood_note(result: GLMStatements) -> str:
    if result.cov_type == "survey" and result.estimate.llf is not None:
        return (
            "The log-likelihood of a survey is a pseudo-likelihood: AIC, BIC and likelihood ratio tests have "
            "no meaning."
        )
    if result.distribution.eql:
        return "The log-likelihood is Tweedie's extended quasi-likelihood."
    return ""


def _cluster_note(result: GLMStatements) -> str:
    basis, K = result.basis, len(result._fit.local)
    if basis.clusters is None or basis.counts is None:
        return ""
    strata = f" in strata by '{basis.strata}'" if basis.strata is not None else ""
    own = "" if K == 1 else " The test of heterogeneity does not allow for them."
    return f"Standard errors are for clusters by '{basis.clusters}'{strata}.{own}"


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
        remedy = text_of({"groups": found.groups, "correction": "CR2"}) if basis.clustering else ""
        by_site = found.groups == basis.site_column and not bootstrap_obstacle(result)
        instead = "wild_cluster_bootstrap() tests with the sites as clusters" if by_site else ""
        yield from found.notes(est.names, est.terms, remedy, instead)


def _small_sample_note(result: GLMStatements) -> str:
    if result.cov_type not in ("HC0", "HC1") or result.nobs >= FEW_ROWS:
        return ""
    return f"{result.cov_type} errors are too small with fewer than {FEW_ROWS} rows: use cov_type='HC3'."


def _firth_note(result: GLMStatements) -> str:
    if result.basis.method != "firth":
        return ""
    return (
        "Firth's penalty keeps coefficients finite if columns separate the outcomes. For such columns normal "
        "intervals and tests are unreliable: report their sign and order of size only."
    )


PARTS = {
    "rounds": _rounds_note,
    "heterogeneity": _sites_note,
    "alpha": _alpha_note,
    "overdispersion": _excess_note,
    "likelihood": _likelihood_note,
    "clusters": _cluster_note,
    "small_sample": _small_sample_note,
    "firth": _firth_note,
}
"""Notes by kind, in the order in which they are printed."""
WARNINGS = frozenset({"rounds", "overdispersion", "small_sample"})
