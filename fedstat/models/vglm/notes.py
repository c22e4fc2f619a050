"""Notes below the summary of a vertical generalized linear model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedstat.errors import Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import hides
from fedstat.inference.notes import Catalogue, Note
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vertical import notes as vertical
from fedstat.models.vertical.exchange.patterns import (
    dealer_notes,
    dither_notes,
    merge_notes,
    reused_pattern_notes,
    solvable_note,
    sums_note,
)
from fedstat.models.vertical.joint_normal.assumption_tests import (
    choice_notes,
    contradiction,
    most_correlated,
    name_undetermined,
)
from fedstat.models.vertical.joint_normal.edges import name_sparse
from fedstat.models.vertical.layout import Layout
from fedstat.models.vglm.debiased import DebiasedFit
from fedstat.models.vglm.em_fit import MissingBlocksFit
from fedstat.models.vglm.outcome import SelectionOutcome
from fedstat.models.vglm.path_setup import EVERY_ENTITY, describe_incomplete, describe_lacking

FREE_ALTERNATIVE = "from_formula(..., missing='em', between='free') allows correlated blocks"
FREE = Remedy(
    "from_formula(..., missing='em', between='free').fit()",
    f" The assumption does not hold: {FREE_ALTERNATIVE}.",
)
CLOSE = 0.8
"""Correlation of columns above which a relaxed inverse leaves a bias."""
MOST_NAMES = 12
"""Selected columns that a note names."""
RELEVANT_DIFFERENCE = 2.0
"""Difference of an information criterion above which two fits differ (Raftery 1995)."""
COVARIANCE_MODELS = {
    "independent": "normal blocks that are independent between sites (between='independent')",
    "free": "jointly normal columns, whose covariance is free between sites",
}
MISSED, CALLED, APART_MISSED, APART_CALLED = 0.12, 0.54, 0.06, 0.07
"""Share of intervals that miss, and of null columns that are rejected, after BIC and by a split:
simulation."""
WEAK_MISSED = 0.20
"""Share of intervals that miss after BIC if all effects are weak: simulation."""
NAIVE_CLAIM = (
    "Naive intervals (conditional on the selected model): standard errors, tests and intervals ignore that "
    f"the same entities selected the columns. In simulations, {MISSED:.2f} to {WEAK_MISSED:.2f} of the 95 % "
    "intervals missed (false coverage rate; nominal .05). "
)
SIMULATED_CLAIM = (
    " Simulated with 200 entities and 30 skewed columns; ten have effects of .05 to 1 residual "
    f"standard deviations: {MISSED:.2f} of the 95 % intervals after BIC missed (false coverage rate), and "
    f"{CALLED:.2f} of the selected columns without an effect had a p-value below .05; with inference='split' "
    f"{APART_MISSED:.2f} and {APART_CALLED:.2f}. With 300 entities, 60 columns and six effects of .05 to .3, "
    f"{WEAK_MISSED:.2f} of the intervals after BIC missed."
)
CONDITIONAL_CLAIM = (
    "Conditional on selection: standard errors, tests and intervals treat the selected columns as given. "
    "They ignore the search among columns, which is harmless only if no true coefficient is near zero. "
)
OTHER_INFERENCE = (
    "fit(inference='debiased') and fit(lam=0) have intervals of all columns that do not depend on a "
    "selection, fit(inference='split') those of selected columns on other entities."
)
UNPENALIZED = Remedy("fit(lam=0)", "{call} has intervals of all columns that do not depend on a selection.")
DEBIASED_FIT = Remedy("fit(inference='debiased')", "Use {call} or fit(inference='split').")
DEBIASED_CLAIM = (
    "Debiased: a lasso tuned for prediction (smallest AIC), and one Newton step with the nodewise lasso's "
    "inverse of the information. Intervals are valid for every single column, selected or not, near zero or "
    "not, as the number of entities grows, if the model with all columns and its variance are correct. They "
    "are not adjusted for the number of columns, and ignore the tuning of the lasso."
)
SPLIT_CLAIM = (
    "Sample splitting: a random half of the entities selected the columns, the other half estimated. "
    "Intervals are conditional on these columns: they are for the coefficients of the model with only these "
    "columns, which equal those of the model with all columns only if no relevant column was left out. "
    "Another split may select other columns; fit(inference='split', splits=50, folds=10) uses many (normal "
    "family)." + SIMULATED_CLAIM
)
EVERY_CLAIM = (
    "Maximum likelihood of all columns, without a penalty. Intervals are valid for every single column, "
    "selected or not, if the model with all columns is correct. They are not adjusted for the number of "
    "columns."
)
MISSING_BLOCKS = (
    "Missing blocks (missing='em'): of {n:,} entities these lack a site's columns: {lacking}; {complete:,} "
    "have all. No entity was left out for this reason{values}."
)
PROPOSED = (
    "Of {lambdas} lambdas, {solved} are solved, among them the chosen one. A quadratic model of the loss "
    "proposes the other fits, which are approximate: "
)
MEASURED = PROPOSED + "where one was solved, the criterion changed by {low:+.1f} to {high:+.1f}. "
EXACT = Remedy("fit(path='exact')", "{call} solves all lambdas.")
DEBIASED = (
    "Debiased from the lasso at lambda = {lam:.4g}. The inverse of the information is relaxed for {relaxed} "
    "of {columns} columns, because their standard errors would otherwise be more than a quarter larger; the "
    "other estimates have no bias of first order."
)
NOT_AFFORDABLE = (
    "No further lambda was solved, even if its proposal or a neighbor may be better: with the linear "
    "predictors that it needs, rows could be computed. "
)
SHARED_OFFSET = (
    " The coordinator received the offset of every entity, and sites can compute it from what they received."
)
REPORTED = {
    True: "residuals and weights, which reveal the response, to every site",
    False: "fitted means, which reveal the fit's prediction of the response, to every site; residuals "
    "stayed with the response holder",
}
"""What sites received for each entity, by whether residuals were shown."""

NOTES = Catalogue(
    critical={
        "naive_intervals": NAIVE_CLAIM + "{remedy}",
        "no_refit": "NO STANDARD ERRORS: {reason}. The penalized estimates exist, and are printed.",
    },
    warning={
        "left_out/values": "{entities}.",
        "missing_blocks/values": MISSING_BLOCKS,
        "proposed/differ": (
            MEASURED + "Another lambda may have a smaller criterion. {stopped}{remedy}",
            EXACT,
        ),
        "unmasked": "Linear predictors were not masked: the coordinator received those of every site.",
        "smallest_lambda": (
            "The smallest of {lambdas} lambdas was chosen (select={select!r}): the criterion may still "
            "decrease. Allow smaller ones by {remedy}.",
            Remedy("fit(ratio={smaller:.1g})", "fit(ratio=...) or fit(lambdas=...)"),
        ),
        "debiased/correlated": DEBIASED
        + " A relaxed column is correlated at {correlation:.2f} with another one: in simulations "
        "with such columns, 95 % intervals of nonzero coefficients covered 87 to 91 %.",
    },
    info={
        "conditional_claim": CONDITIONAL_CLAIM + OTHER_INFERENCE + SIMULATED_CLAIM,
        "conditional_claim/missing": (CONDITIONAL_CLAIM + "{remedy}" + SIMULATED_CLAIM, UNPENALIZED),
        "debiased_claim": DEBIASED_CLAIM,
        "split_claim": SPLIT_CLAIM,
        "every_claim": EVERY_CLAIM,
        "left_out": "{entities}.",
        "missing_blocks": MISSING_BLOCKS,
        "assumptions": "Penalized maximum likelihood of the observed data, the limit of penalized EM, under "
        "normal errors and {covariance}. Valid if missingness depends on observed values only (MAR). "
        "Criteria and standard errors come from the observed-data likelihood; standard errors account for "
        "the estimated means and covariances of the blocks. The residual variance is that of maximum "
        "likelihood. R-squared is that of an entity with every block.",
        "free_covariance": "Columns that are not selected stay in the joint normal model, where they "
        "predict missing columns. Predictions replace a missing block by its mean and do not use the "
        "columns of other sites for it.",
        "approximate_folds": "Cross-validation and selection frequencies use quadratic models of the "
        "deviance at the chosen fit, one for each of {folds} folds: they are approximate, and rough at "
        "distant lambdas.",
        "proposed": (
            MEASURED + "{stopped}{remedy}",
            EXACT,
        ),
        "linear_approximations": "{steps} of {penalty} from the unpenalized estimate (Zou and Li 2008), "
        "each a weighted lasso; the stationarity conditions are those of the last.",
        "ridge": "Ridge: half the mean deviance plus lambda/2 times the sum of squared coefficients of "
        "standardized columns. Every column stays in the model, and its estimate is biased towards zero. "
        "Degrees of freedom are the trace of the hat matrix.",
        "dispersion": "Standard errors and the log-likelihood use Pearson's estimate of the dispersion; "
        "criteria use that of maximum likelihood. Penalties apply to coefficients in the unit of the linear "
        "predictor in which the weight of an entity at the mean response is one.",
        "expected_information": "The link is not canonical: standard errors come from the expected "
        "information.",
        "selected": "Selected by {penalty}: {names}{others}. The table has debiased estimates of all "
        "columns; selection_report() and .params have the penalized ones.",
        "debiased": DEBIASED,
    },
    protocol={
        "linear_predictors": "For each entity, {points:,} sums of linear predictors over sites went to "
        "{receivers}, and {reported}. {grams} weighted Gram matrices of {columns} columns were released "
        "over {over} entities.{offset}",
        "coefficients_known": "The coordinator knows the coefficients of every round.",
        "coefficients_known/admm": "The coordinator knows the coefficients only at the end of each lambda, "
        "but the sums of many rounds still span the columns of all sites.",
    },
)


CLAIMS = {"debiased": "debiased_claim", "split": "split_claim", "every": "every_claim"}
"""Kinds of notes on standard errors, by inference that allows for the selection."""


def claims_of(inference: str, *, missing: bool = False) -> tuple[Note, ...]:
    """State what standard errors account for, by inference; with `missing` blocks, there are no others."""
    if inference in CLAIMS:
        return (NOTES.note(CLAIMS[inference]),)
    return (
        NOTES.note("naive_intervals", remedy=UNPENALIZED if missing else DEBIASED_FIT),
        NOTES.note("conditional_claim/missing" if missing else "conditional_claim"),
    )


def fit_notes(outcome: SelectionOutcome, ledger: Ledger) -> list[Note]:
    """Write the notes of a fit."""
    fitted, layout, distribution = outcome.fitted, outcome.layout, outcome.distribution
    if outcome.observed is not None:
        how = _blocks(layout, outcome, outcome.observed)
    else:
        how = _sums(layout, outcome.folds) if fitted.points == 0 else _iterations(layout, outcome, ledger)
    return [
        *_left_out(layout),
        *_unbounded(fitted.unbounded),
        *reused_pattern_notes(layout),
        *how,
        *_border(outcome),
        *_steps(outcome),
        *_shrinkage(outcome),
        *_dispersion(distribution),
        *_debiased(outcome, fitted.debiased),
        *dealer_notes(fitted.dealers, bystanders=layout.bystanders),
        *dither_notes(layout),
    ]


def _left_out(layout: Layout) -> Iterator[Note]:
    if layout.left_out:
        # Entities that a single missing value costs are the first thing that an analyst can mend.
        kind = "left_out/values" if layout.lacking else "left_out"
        yield NOTES.note(kind, entities=EVERY_ENTITY.after(describe_incomplete(layout)))


def _unbounded(reason: str) -> Iterator[Note]:
    """State that the penalized estimates stand alone."""
    if reason:
        yield NOTES.note("no_refit", reason=reason)


def _sums(layout: Layout, folds: int) -> Iterator[Note]:
    parts = f", for each of {folds} random parts of the entities" if folds > 1 else ""
    yield sums_note(parts, layout.n // folds)


def _blocks(layout: Layout, outcome: SelectionOutcome, observed: MissingBlocksFit) -> Iterator[Note]:
    moments = observed.exchange.moments
    if layout.absent:
        yield NOTES.note(
            "missing_blocks/values" if layout.lacking else "missing_blocks",
            n=layout.n,
            lacking=[f"{count:,} at {site}" for site, count in layout.absent.items()],
            complete=moments.n_complete,
            values=describe_lacking(layout),
        )
    yield NOTES.note("assumptions", covariance=COVARIANCE_MODELS[outcome.plan.between or "free"])
    if observed.choice is not None:
        yield from choice_notes(observed.choice, ranges=False)
    if observed.complete is None:
        yield from most_correlated(moments, FREE)
    else:
        yield NOTES.note("free_covariance")
        if named := "; ".join(name_undetermined(moments)):
            yield vertical.NOTES.note(
                "not_identified",
                pairs=named,
                contradiction=contradiction(observed.choice),
                numbers="Coefficients, the selection and standard errors",
            )
        if sparse := name_sparse(observed.complete.moments):
            yield vertical.NOTES.note("sparse_pairs", pairs=sparse)
    yield sums_note(", by missing pattern", int(moments.n.min()))
    yield from merge_notes(observed.exchange)


def _iterations(layout: Layout, outcome: SelectionOutcome, ledger: Ledger) -> Iterator[Note]:
    fitted, use_masks = outcome.fitted, outcome.plan.passing.use_masks
    over = f"{layout.n:,}"
    if outcome.plan.choice.split:
        over = f"{outcome.n:,} or the other {layout.n - outcome.n:,}"
    who = "the response holder" if ledger.at == layout.active else "the coordinator and the response holder"
    yield NOTES.note(
        "linear_predictors",
        points=fitted.points,
        receivers=who,
        reported=REPORTED[bool(fitted.shown)],
        grams=fitted.grams,
        columns=layout.p,
        over=over,
        offset="" if layout.offset is None else SHARED_OFFSET,
    )
    if outcome.folds > 1:
        yield NOTES.note("approximate_folds", folds=outcome.folds)
    admm = outcome.plan.passing.exchange == "admm"
    yield NOTES.note("coefficients_known/admm" if admm else "coefficients_known")
    solved = fitted.path.solved
    if not solved.all():
        yield _proposals(len(solved), int(solved.sum()), fitted.errors, fitted.stopped)
    others = [k for k in layout.sites if k != layout.active]
    yield from solvable_note(fitted.points, layout.p, ledger, others)
    if not use_masks and len(layout.sites) > 1:
        yield NOTES.note("unmasked")
    if use_masks and not hides(len(layout.sites)):
        yield vertical.NOTES.note("two_sites")


def _proposals(lambdas: int, solved: int, errors: tuple[float, ...], stopped: bool) -> Note:
    """State how wrong proposals were that were solved afterwards: at least the chosen one, or a neighbor."""
    return NOTES.note(
        "proposed/differ" if min(errors) < -RELEVANT_DIFFERENCE else "proposed",
        lambdas=lambdas,
        solved=solved,
        stopped=NOT_AFFORDABLE if stopped else "",
        low=min(errors),
        high=max(errors),
    )


def _border(outcome: SelectionOutcome) -> Iterator[Note]:
    lambdas, select = outcome.fitted.path.lambdas, outcome.plan.choice.select
    # The default path ends at a thousandth, where estimates are practically those without a penalty.
    if outcome.fitted.chosen == len(lambdas) - 1 > 0 and lambdas[-1] > 1.1e-3 * lambdas[0]:
        smaller = lambdas[-1] / lambdas[0] / 10.0
        yield NOTES.note("smallest_lambda", lambdas=len(lambdas), select=select, smaller=smaller)


def _steps(outcome: SelectionOutcome) -> Iterator[Note]:
    setup = outcome.plan.setup
    number, name = setup.steps, setup.penalty.name.upper()
    if number is not None:
        steps = f"{number} local linear approximation{'s' * (number > 1)}"
        yield NOTES.note("linear_approximations", steps=steps, penalty=name)


def _shrinkage(outcome: SelectionOutcome) -> Iterator[Note]:
    penalty, lam = outcome.plan.setup.penalty, outcome.fitted.path.lambdas[outcome.fitted.chosen]
    if not penalty.selecting and lam > 0.0:
        yield NOTES.note("ridge")


def _dispersion(distribution: DistributionSpec) -> Iterator[Note]:
    if distribution.estimates_scale and distribution.name != "Gaussian":
        yield NOTES.note("dispersion")
    if not distribution.canonical:
        yield NOTES.note("expected_information")


def _debiased(outcome: SelectionOutcome, found: DebiasedFit | None) -> Iterator[Note]:
    layout = outcome.layout
    if found is not None:
        # The table has all columns, so a note states which of them the penalty selected.
        names = [layout.names[j] for j in np.flatnonzero(outcome.fitted.path.selected[outcome.fitted.chosen])]
        others = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
        penalty = outcome.plan.setup.penalty.name
        yield NOTES.note("selected", penalty=penalty, names=names[:MOST_NAMES] or "no column", others=others)
        values: dict[str, Any] = {"lam": found.lam, "relaxed": found.relaxed, "columns": layout.p}
        if found.correlation > CLOSE:
            yield NOTES.note("debiased/correlated", correlation=found.correlation, **values)
        else:
            yield NOTES.note("debiased", **values)
