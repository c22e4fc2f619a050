"""Notes of the summary of a private GLM."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.inference.summary import Note
from fedstat.models.copula.explain import bounds_problems, cost_statements
from fedstat.models.copula.request import OF_MARGINS
from fedstat.models.copula_glm.estimation import MOST_ROWS, MomentErrors
from fedstat.models.copula_glm.protocol import ReleasedMoments
from fedstat.models.copula_glm.score import OF_STEP, CopulaTest, ScoreStep

NO_LIKELIHOOD = "only moments were released, not a likelihood"
NOT_EVALUATED = (
    "no evaluation: the one release that the budget pays for contains the distribution of the columns and "
    "their moments with the response. It has no entity's response to compare predictions with. Compare "
    "predict(frame) with your own rows that have the response, or evaluate a model without a privacy "
    "budget: FederatedGLM or VFEMRegression, whose evaluate() counts at the site of the response, by its "
    "policy and without noise"
)
NO_RSQUARED = "there are no residuals of entities"
NO_ROOT = (
    "no coefficients solve the released moments: the noise is too large for this model. Use a larger "
    "epsilon, more entities or fewer columns"
)
TOO_SMALL = (
    "BUDGET TOO SMALL FOR THIS MODEL: the noise is {:.1f} times the sampling error. Do not interpret "
    "significance"
)
VALID = (
    "Valid if the columns follow a Gaussian copula and the generalized linear model holds. For real tables "
    "the copula is an approximation. Standard errors do not include its error; more entities or a larger "
    "epsilon do not remove it. This fit does not test the copula; fit(polish=1) does."
)
DOUBTFUL = 0.01
"""P-value of the test of the copula below which the summary warns."""
VALID_STEP = (
    "Valid if the generalized linear model holds. The estimate is one step from that of the moments, by the "
    "residuals of the rows. A Gaussian copula of the columns gives the derivatives of this step, standard "
    "errors, and the mean of what {}; that mean moved the coefficients by {:.2g} sampling errors (root mean "
    "square)."
)
LEFT = {
    True: "a cut of response and predictor leaves",
    False: "a cubic leaves of the logistic mean",
}
"""The remainder that the distribution of the columns supplies to a step, with a scale and without."""
MUCH = 1.5
"""Noise over sampling error beyond which noise affects values that closed-form errors treat as known."""
TOO_NARROW = (
    f"Noise above {MUCH} times the sampling error also affects the derivatives, which the standard errors "
    "treat as known. In simulations of a logistic model intervals of level .95 covered the truth in .93 of "
    "cases, those of the worst column in .90. With polish=0 errors come from simulation, and were smaller."
)
DEPARTING = (
    "The budget of the step holds if the sites and the dealer of their random numbers follow the protocol. "
    "A site that sends other numbers as its shares can give single entities more weight in the sums."
)
PUBLIC = (
    "Bounds and levels of the columns, numbers of entities, and which site has a record of which entity "
    "are public and never taken from the data. Noise is discrete Gaussian from the operating system's "
    "randomness. Each site adds its noise before it releases anything; no participant, including the "
    "dealer, holds a sum without noise."
)


def fit_notes(
    released: ReleasedMoments,
    errors: MomentErrors | None,
    step: ScoreStep | None,
    test: CopulaTest | None,
    delta: float,
) -> Iterator[Note]:
    """State the assumptions behind the numbers, and their cost."""
    for text in bounds_problems(*released.margins):
        yield Note("bounds", f"{text}.", "critical")
    if test is not None:
        yield _tested(released, test)
    if step is None:
        yield Note("valid", VALID)
    if errors is not None:
        yield from _error_notes(released, errors) if step is None else _step_notes(released, step)
        if step is not None and errors.ratio > MUCH:
            yield Note("narrow", TOO_NARROW, "warning")
    if released.plan.of_step:
        yield Note(
            "step_budget",
            f"{float(OF_STEP):.0%} of the budget was reserved for the step"
            + ("." if step is not None else ", which was not taken, since there is no starting point.")
            + f" Of the rest, {float(OF_MARGINS):.0%} went to margins of the columns, and the remainder to "
            "products of scores.",
        )
    else:
        yield Note(
            "margins_budget",
            f"{float(OF_MARGINS):.0%} of the budget went to margins of the columns in equal parts, the rest "
            "to products of scores.",
        )
    for text in cost_statements(released.plan, delta):
        yield Note("cost", text)
    if left := left_out(released):
        yield Note(
            "left_out",
            f"{left} The estimates describe the {released.n:,} entities that are complete at every site; "
            "fs.CopulaSynthesizer makes tables of all.",
        )
    yield Note("public", PUBLIC)


def left_out(released: ReleasedMoments) -> str:
    """State how many entities are left out, and at which site they lack values; empty if none are."""
    parts = [f"{n:,} records at '{site}' lack a value" for site, n in released.incomplete.items()]
    parts += [f"{n:,} entities have no record at '{site}'" for site, n in released.absent.items()]
    lost = released.known - released.n
    return f"{lost:,} of {released.known:,} entities are left out: {', '.join(parts)}." if lost else ""


def _tested(released: ReleasedMoments, test: CopulaTest) -> Note:
    """State what the test of the copula found for this table."""
    j = test.largest
    name = "the intercept" if j == 0 else repr(released.design.columns[j - 1].name)
    found = (
        f"the step on the rows moved {name} most, by {abs(test.statistic[j]):.1f} of the standard errors of "
        f"such a move (P = {test.pvalue:.3f}, Bonferroni)"
    )
    if test.pvalue >= DOUBTFUL:
        return Note("copula", f"Test of the copula: {found}.")
    return Note(
        "copula",
        f"THE COLUMNS DO NOT FOLLOW THE COPULA, or the model does not hold: {found}. One step removes most "
        "of this error from the estimates, and not all; predictions and synthetic tables from the copula "
        "have it. Transform the column, or leave it out.",
        "critical",
    )


def _step_notes(released: ReleasedMoments, step: ScoreStep) -> Iterator[Note]:
    """State the assumptions of a step, and the source of its errors."""
    yield Note("valid", VALID_STEP.format(LEFT[released.release.response.has_scale], step.remainder))
    yield Note(
        "closed_form",
        "Standard errors are in closed form: `sampling` of the sums of residuals over entities, `noise` of "
        "what the sites added, each to its own share before it left; squares add up. Tests are normal.",
    )
    yield Note("departing", DEPARTING)


def _error_notes(released: ReleasedMoments, errors: MomentErrors) -> Iterator[Note]:
    """State the source of the standard errors."""
    draws = errors.draws
    rows = f", of {MOST_ROWS:,} rows each" if released.n > MOST_ROWS else ""
    yield Note(
        "simulated_errors",
        f"Standard errors come from {draws} releases simulated from the estimate{rows}: margins, noise, "
        "copula and estimate are computed again each time. `sampling` is their spread without noise, "
        f"`noise` the contribution of the noise; squares add up. Tests use Student's t with {draws - 1} "
        "degrees of freedom.",
    )
    if errors.failed:
        yield Note(
            "no_exact_root",
            f"{errors.failed} of {2 * draws} simulated estimates do not solve their equations exactly: the "
            "noise is large for this model.",
            "warning",
        )
