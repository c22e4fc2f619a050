"""Notes of the summary of a private GLM."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.inference.notes import Catalogue, Note
from fedstat.models.copula.explain import bounds_problems, cost_statements
from fedstat.models.copula.private_release import PUBLIC_ROWS, row_notes
from fedstat.models.copula.request import ALL, OF_MARGINS
from fedstat.models.copula_glm.estimation import MOST_ROWS, MomentErrors
from fedstat.models.copula_glm.protocol import ReleasedMoments
from fedstat.models.copula_glm.score import OF_STEP, CopulaTest, ScoreStep

NO_LIKELIHOOD = "only moments were released, not a likelihood"
NOT_EVALUATED = (
    "no evaluation: the one release that the budget pays for contains the distribution of the columns and "
    "their moments with the response. It has no entity's response to compare predictions with. A "
    "model without a privacy budget, such as FederatedGLM or VFEMRegression, is evaluated at the site of "
    "the response, by its policy and without noise"
)
NO_RSQUARED = "there are no residuals of entities"
NO_ROOT = (
    "no coefficients solve the released moments: the noise is too large for this model. Use a larger "
    "epsilon, more entities or fewer columns"
)
TOO_SMALL = (
    "BUDGET TOO SMALL FOR THIS MODEL: the noise is {ratio:.1f} times the sampling error. Do not interpret "
    "significance"
)
VALID = (
    "Valid if the columns follow a Gaussian copula and the generalized linear model holds. For real tables "
    "the copula is an approximation. Standard errors do not include its error; more entities or a larger "
    "epsilon do not remove it. This fit does not test the copula; {tested}."
)
TESTED, OF_ROWS = "fit(polish=1) does", "FederatedGLM(...).fit(epsilon=) needs none"
DOUBTFUL = 0.01
"""P-value of the test of the copula below which the summary warns."""
VALID_STEP = (
    "Valid if the generalized linear model holds. The estimate is one step from that of the moments, by the "
    "residuals of the rows. A Gaussian copula of the columns gives the derivatives of this step, standard "
    "errors, and the mean of what {left}; that mean moved the coefficients by {moved:.2g} sampling errors "
    "(root mean square)."
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
NOTES = Catalogue(
    critical={
        "bounds": "{problem}.",
        "budget_too_small": TOO_SMALL,
        "copula/rejected": "THE COLUMNS DO NOT FOLLOW THE COPULA, or the model does not hold: {found}. One "
        "step removes most of this error from the estimates, and not all; predictions and synthetic tables "
        "from the copula have it. Transform the column, or leave it out.",
    },
    warning={
        "narrow": TOO_NARROW,
        "no_exact_root": "{failed} of {simulated} simulated estimates do not solve their equations exactly: "
        "the noise is large for this model.",
    },
    info={
        "valid": VALID,
        "valid/step": VALID_STEP,
        "step_budget": "{share:.0%} of the budget was reserved for the step{taken} Of the rest, "
        "{margins:.0%} went to margins of the columns, and the remainder to products of scores.",
        "margins_budget": "{margins:.0%} of the budget went to margins of the columns in equal parts, the "
        "rest to products of scores.",
        "cost": "{cost}",
        "left_out": "{left_out} The estimates describe the {entities:,} entities that are complete at every "
        "site; fs.CopulaSynthesizer makes tables of all.",
        "left_out/rows": "{left_out} The estimates describe the other {entities:,}; standard errors do not "
        "include the noise on this number.",
        "public": PUBLIC,
        "public/rows": PUBLIC_ROWS,
        "copula": "Test of the copula: {found}.",
        "closed_form": "Standard errors are in closed form: `sampling` of the sums of residuals over "
        "entities, `noise` of what the sites added, each to its own share before it left; squares add up. "
        "Tests are normal.",
        "departing": DEPARTING,
        "simulated_errors": "Standard errors come from {draws} releases simulated from the estimate{rows}: "
        "margins, noise, copula and estimate are computed again each time. `sampling` is their spread "
        "without noise, `noise` the contribution of the noise; squares add up. Tests use Student's t with "
        "{df} degrees of freedom.",
    },
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
        yield NOTES.note("bounds", problem=text)
    if test is not None:
        yield _tested(released, test)
    if step is None:
        yield NOTES.note("valid", tested=TESTED if released.plan.rows is None else OF_ROWS)
    if errors is not None:
        yield from _error_notes(released, errors) if step is None else _step_notes(released, step)
        if step is not None and errors.ratio > MUCH:
            yield NOTES.note("narrow")
    if released.plan.of_step:
        yield NOTES.note(
            "step_budget",
            share=float(OF_STEP),
            taken="." if step is not None else ", which was not taken, since there is no starting point.",
            margins=float(OF_MARGINS),
        )
    else:
        yield NOTES.note("margins_budget", margins=float(OF_MARGINS))
    rows = released.plan.rows
    if rows is not None:
        yield from row_notes(rows, released.plan.site_cost(ALL), delta)
    else:
        for text in cost_statements(released.plan, delta):
            yield NOTES.note("cost", cost=text)
    if left := left_out(released):
        kind = "left_out" if rows is None else "left_out/rows"
        yield NOTES.note(kind, left_out=left, entities=released.n)
    yield NOTES.note("public" if rows is None else "public/rows")


def left_out(released: ReleasedMoments) -> str:
    """State how many entities are left out, and at which site they lack values; empty if none are."""
    lost = released.known - released.n
    if released.plan.rows is not None:
        return f"About {lost:,} of {released.known:,} rows lack a value, and are left out." if lost else ""
    parts = [f"{n:,} records at '{site}' lack a value" for site, n in released.incomplete.items()]
    parts += [f"{n:,} entities have no record at '{site}'" for site, n in released.absent.items()]
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
        return NOTES.note("copula", found=found)
    return NOTES.note("copula/rejected", found=found)


def _step_notes(released: ReleasedMoments, step: ScoreStep) -> Iterator[Note]:
    """State the assumptions of a step, and the source of its errors."""
    left = LEFT[released.release.response.has_scale]
    yield NOTES.note("valid/step", left=left, moved=step.remainder)
    yield NOTES.note("closed_form")
    yield NOTES.note("departing")


def _error_notes(released: ReleasedMoments, errors: MomentErrors) -> Iterator[Note]:
    """State the source of the standard errors."""
    draws = errors.draws
    rows = f", of {MOST_ROWS:,} rows each" if released.n > MOST_ROWS else ""
    yield NOTES.note("simulated_errors", draws=draws, rows=rows, df=draws - 1)
    if errors.failed:
        yield NOTES.note("no_exact_root", failed=errors.failed, simulated=2 * draws)
