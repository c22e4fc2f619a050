"""Notes of the summary of a private GLM."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.inference.summary import Note
from fedstat.models.copula.explain import cost_statements
from fedstat.models.copula.request import OF_MARGINS
from fedstat.models.copula_glm.estimation import MOST_ROWS, MomentErrors
from fedstat.models.copula_glm.protocol import ReleasedMoments
from fedstat.models.copula_glm.score import OF_STEP, ScoreStep

NO_LIKELIHOOD = "moments were released and no likelihood"
NOT_EVALUATED = (
    "no evaluation: the one release that the budget pays for tells the law of the columns and their moments "
    "with the response, and the response of no entity, so that there is nothing to hold predictions against "
    "but what they were made of. Hold predict(frame) against rows of your own that have the response, or let "
    "a model that asks the institutions be evaluated: FederatedGLM or VFEMRegression, whose evaluate() "
    "counts where the response is, by their policy and without noise"
)
NO_RSQUARED = "the residuals are of no one"
NO_ROOT = (
    "no coefficients solve the released moments, the noise is too large for this model; take a larger "
    "epsilon, more entities or fewer columns"
)
TOO_SMALL = (
    "BUDGET TOO SMALL FOR THIS MODEL: the noise is {:.1f} times the sampling error; read no significance "
    "into these numbers"
)
VALID = (
    "Valid if the columns are a Gaussian copula and the generalised linear model holds. Of real tables the "
    "first is an approximation: standard errors do not count its error, which more entities or a larger "
    "epsilon do not remove."
)
VALID_STEP = (
    "Valid if the generalised linear model holds. The estimate is one step from that of the moments, by the "
    "residuals of the rows. A Gaussian copula of the columns gives the derivatives of this step, standard "
    "errors, and the mean of what {}; that mean moved the coefficients by {:.2g} sampling errors (root mean "
    "square)."
)
LEFT = {
    True: "a cut of response and predictor leaves",
    False: "a cubic leaves of the logistic mean",
}
"""What a step leaves to the law of the columns, where there is a scale and where not."""
MUCH = 1.5
"""Noise over sampling error beyond which it moves what closed-form errors take for known."""
TOO_NARROW = (
    f"Noise above {MUCH} times the sampling error moves the derivatives, too, which the standard errors take "
    "for known: in simulations of a logistic model intervals of level .95 held the truth in .93 of cases, "
    "those of the worst column in .90. With polish=0 errors are found by simulation, and were smaller."
)
DEPARTING = (
    "The budget of the step holds where institutions, and who deals their random numbers, keep to the "
    "protocol: one that puts other numbers in the place of its shares can make single entities weigh more in "
    "the sums."
)
PUBLIC = (
    "Public, and never taken from the data: bounds and levels of the columns, numbers of entities, who has a "
    "record where. Noise is discrete Gaussian from the operating system's randomness; each institution adds "
    "its own before anything leaves, and nobody, dealer included, holds a sum without."
)


def fit_notes(
    released: ReleasedMoments, errors: MomentErrors | None, step: ScoreStep | None, delta: float
) -> Iterator[Note]:
    """Say what the numbers rest on, and what they cost."""
    if step is None:
        yield Note("valid", VALID)
    if errors is not None:
        yield from _error_notes(released, errors) if step is None else _step_notes(released, step)
        if step is not None and errors.ratio > MUCH:
            yield Note("narrow", TOO_NARROW, "warning")
    if released.plan.of_step:
        yield Note(
            "step_budget",
            f"{float(OF_STEP):.0%} of the budget was for the step"
            + ("." if step is not None else ", and was not asked for, since there is nowhere to begin it.")
            + f" Of the rest, {float(OF_MARGINS):.0%} went to margins of the columns, and what was left to "
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
    lost = {c: count - released.n for c, count in released.entities.items() if count > released.n}
    if lost:
        yield Note(
            "left_out",
            "Entities that are not complete at every institution are left out: "
            f"{', '.join(f'{count:,} at {client}' for client, count in lost.items())}. The estimates are of "
            "those that are left; with missing='pairs', fs.CopulaSynthesizer makes tables of all.",
        )
    yield Note("public", PUBLIC)


def _step_notes(released: ReleasedMoments, step: ScoreStep) -> Iterator[Note]:
    """Say what a step rests on, and where its errors come from."""
    yield Note("valid", VALID_STEP.format(LEFT[released.release.response.has_scale], step.remainder))
    yield Note(
        "closed_form",
        "Standard errors are in closed form: `sampling` of the sums of residuals over entities, `noise` of "
        "what the institutions added, each to its own share before it left; squares add up. Tests are "
        "normal.",
    )
    yield Note("departing", DEPARTING)


def _error_notes(released: ReleasedMoments, errors: MomentErrors) -> Iterator[Note]:
    """Say where standard errors come from."""
    draws = errors.draws
    rows = f", of {MOST_ROWS:,} rows each" if released.n > MOST_ROWS else ""
    yield Note(
        "simulated_errors",
        f"Standard errors come from {draws} releases simulated from the estimate{rows}: margins, noise, "
        "copula and estimate anew. `sampling` is their spread without noise, `noise` what noise adds; "
        f"squares add up. Tests are of Student's t with {draws - 1} degrees of freedom.",
    )
    if errors.failed:
        yield Note(
            "no_exact_root",
            f"{errors.failed} of {2 * draws} simulated estimates are no exact root of their equations: the "
            "noise is large for this model.",
            "warning",
        )
