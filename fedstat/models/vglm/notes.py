"""Notes below the summary of a vertical generalized linear model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.inference.summary import Note
from fedstat.kernels.glm.distributions import DistributionSpec
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
from fedstat.models.vglm.path_setup import describe_incomplete, describe_lacking

FREE_ALTERNATIVE = "from_formula(..., missing='em', between='free') allows correlated blocks"
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
FREE = (
    "Columns that are not selected stay in the joint normal model, where they predict missing columns. "
    "Predictions replace a missing block by its mean and do not use the columns of other sites for it."
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
        yield Note("left_out", f"{describe_incomplete(layout)}.", "warning" if layout.lacking else "info")


def _unbounded(reason: str) -> Iterator[Note]:
    """State that the penalized estimates stand alone."""
    if reason:
        yield Note(
            "no_refit",
            f"NO STANDARD ERRORS: {reason}. The penalized estimates exist, and are printed.",
            "critical",
        )


def _sums(layout: Layout, folds: int) -> Iterator[Note]:
    parts = f", for each of {folds} random parts of the entities" if folds > 1 else ""
    yield sums_note(parts, layout.n // folds)


def _blocks(layout: Layout, outcome: SelectionOutcome, observed: MissingBlocksFit) -> Iterator[Note]:
    moments = observed.exchange.moments
    if layout.absent:
        lacking = ", ".join(f"{count:,} at {site}" for site, count in layout.absent.items())
        yield Note(
            "missing_blocks",
            f"Missing blocks (missing='em'): of {layout.n:,} entities these lack a site's columns: "
            f"{lacking}; {moments.n_complete:,} have all. No entity was left out for this reason"
            f"{describe_lacking(layout)}.",
            "warning" if layout.lacking else "info",
        )
    yield Note(
        "assumptions",
        "Penalized maximum likelihood of the observed data, the limit of penalized EM, under normal errors "
        f"and {COVARIANCE_MODELS[outcome.plan.between or 'free']}. Valid if missingness depends on "
        "observed values only (MAR). Criteria and standard errors come from the observed-data likelihood; "
        "standard errors account for the estimated means and covariances of the blocks. The "
        "residual variance is that of maximum likelihood. R-squared is that of an entity with every block.",
    )
    if observed.choice is not None:
        yield from choice_notes(observed.choice, ranges=False)
    if observed.complete is None:
        yield from most_correlated(moments, FREE_ALTERNATIVE)
    else:
        yield Note("free_covariance", FREE)
        if named := "; ".join(name_undetermined(moments)):
            yield Note(
                "not_identified",
                f"NOT IDENTIFIED: too few entities have records at both {named}"
                f"{contradiction(observed.choice)}. Coefficients, the selection and standard errors assume "
                "that these sites are independent given all other columns",
                "critical",
            )
        if sparse := name_sparse(observed.complete.moments):
            yield Note("sparse_pairs", sparse)
    yield sums_note(", by missing pattern", int(moments.n.min()))
    yield from merge_notes(observed.exchange)


def _iterations(layout: Layout, outcome: SelectionOutcome, ledger: Ledger) -> Iterator[Note]:
    fitted, use_masks = outcome.fitted, outcome.plan.passing.use_masks
    over = f"{layout.n:,}"
    if outcome.plan.choice.split:
        over = f"{outcome.n:,} or the other {layout.n - outcome.n:,}"
    who = "the response holder" if ledger.at == layout.active else "the coordinator and the response holder"
    reported = (
        "residuals and weights, which reveal the response, to every site"
        if fitted.shown
        else "fitted means, which reveal the fit's prediction of the response, to every site; "
        "residuals stayed with the response holder"
    )
    yield Note(
        "linear_predictors",
        f"For each entity, {fitted.points:,} sums of linear predictors over sites went to {who}, and "
        f"{reported}. {fitted.grams} weighted Gram matrices of {layout.p} columns were released over {over} "
        f"entities.{'' if layout.offset is None else SHARED_OFFSET}",
    )
    if outcome.folds > 1:
        yield Note(
            "approximate_folds",
            "Cross-validation and selection frequencies use quadratic models of the deviance at the chosen "
            f"fit, one for each of {outcome.folds} folds: they are approximate, and rough at distant "
            "lambdas.",
        )
    if outcome.plan.passing.exchange == "admm":
        yield Note(
            "coefficients_known",
            "The coordinator knows the coefficients only at the end of each lambda, but the sums of many "
            "rounds still span the columns of all sites.",
        )
    else:
        yield Note("coefficients_known", "The coordinator knows the coefficients of every round.")
    solved = fitted.path.solved
    if not solved.all():
        yield Note(
            "proposed",
            f"Of {len(solved)} lambdas, {solved.sum()} are solved, among them the chosen one. A "
            "quadratic model of the loss proposes the other fits, which are approximate: "
            f"{_proposal_errors(fitted.errors)} {NOT_AFFORDABLE if fitted.stopped else ''}"
            "fit(path='exact') solves all lambdas.",
            "warning" if min(fitted.errors, default=0.0) < -RELEVANT_DIFFERENCE else "info",
        )
    others = [k for k in layout.sites if k != layout.active]
    yield from solvable_note(fitted.points, layout.p, ledger, others)
    if not use_masks and len(layout.sites) > 1:
        yield Note(
            "unmasked",
            "Linear predictors were not masked: the coordinator received those of every site.",
            "warning",
        )
    if use_masks and not hides(len(layout.sites)):
        yield Note("two_sites", TWO_SITES, "warning")


SHARED_OFFSET = (
    " The coordinator received the offset of every entity, and sites can compute it from what they received."
)
NOT_AFFORDABLE = (
    "No further lambda was solved, even if its proposal or a neighbor may be better: with the linear "
    "predictors that it needs, rows could be computed. "
)


def _proposal_errors(errors: tuple[float, ...]) -> str:
    """State how wrong proposals were that were solved afterwards."""
    if not errors:
        return "none of them was solved to measure the error."
    low, high = min(errors), max(errors)
    text = f"where one was solved, the criterion changed by {low:+.1f} to {high:+.1f}."
    return f"{text} Another lambda may have a smaller criterion." if low < -RELEVANT_DIFFERENCE else text


def _border(outcome: SelectionOutcome) -> Iterator[Note]:
    lambdas, select = outcome.fitted.path.lambdas, outcome.plan.choice.select
    # The default path ends at a thousandth, where estimates are practically those without a penalty.
    if outcome.fitted.chosen == len(lambdas) - 1 > 0 and lambdas[-1] > 1.1e-3 * lambdas[0]:
        yield Note(
            "smallest_lambda",
            f"The smallest of {len(lambdas)} lambdas was chosen (select={select!r}): the criterion may still "
            "decrease. Allow smaller ones by fit(ratio=...) or fit(lambdas=...).",
            "warning",
        )


def _steps(outcome: SelectionOutcome) -> Iterator[Note]:
    setup = outcome.plan.setup
    number, name = setup.steps, setup.penalty.name.upper()
    if number is not None:
        yield Note(
            "linear_approximations",
            f"{number} local linear approximation{'s' * (number > 1)} of {name} from the unpenalized "
            "estimate (Zou and Li 2008), each a weighted lasso; the stationarity conditions are those of "
            "the last.",
        )


def _shrinkage(outcome: SelectionOutcome) -> Iterator[Note]:
    penalty, lam = outcome.plan.setup.penalty, outcome.fitted.path.lambdas[outcome.fitted.chosen]
    if not penalty.selecting and lam > 0.0:
        yield Note(
            "ridge",
            "Ridge: half the mean deviance plus lambda/2 times the sum of squared coefficients of "
            "standardized columns. Every column stays in the model, and its estimate is biased towards zero. "
            "Degrees of freedom are the trace of the hat matrix.",
        )


def _dispersion(distribution: DistributionSpec) -> Iterator[Note]:
    if distribution.estimates_scale and distribution.name != "Gaussian":
        yield Note(
            "dispersion",
            "Standard errors and the log-likelihood use Pearson's estimate of the dispersion; criteria use "
            "that of maximum likelihood. Penalties apply to coefficients in the unit of the linear "
            "predictor in which the weight of an entity at the mean response is one.",
        )
    if not distribution.canonical:
        yield Note(
            "expected_information",
            "The link is not canonical: standard errors come from the expected information.",
        )


def _debiased(outcome: SelectionOutcome, found: DebiasedFit | None) -> Iterator[Note]:
    layout = outcome.layout
    if found is not None:
        # The table has all columns, so a note states which of them the penalty selected.
        names = [layout.names[j] for j in np.flatnonzero(outcome.fitted.path.selected[outcome.fitted.chosen])]
        others = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
        yield Note(
            "selected",
            f"Selected by {outcome.plan.setup.penalty.name}: "
            f"{', '.join(names[:MOST_NAMES]) or 'no column'}{others}. The table has debiased estimates "
            "of all columns; selection_report() and .params have the penalized ones.",
        )
        near = found.correlation > CLOSE
        text = (
            "Debiased from the lasso at lambda = {lam:.4g}. The inverse of the information is relaxed "
            "for {relaxed} of {columns} columns, because their standard errors would otherwise be more than "
            "a quarter larger; the other estimates have no bias of first order."
        )
        low = (
            " A relaxed column is correlated at {correlation:.2f} with another one: in simulations with such "
            "columns, 95 % intervals of nonzero coefficients covered 87 to 91 %."
        )
        yield Note(
            "debiased",
            text + low * near,
            "warning" if near else "info",
            values={
                "lam": float(found.lam),
                "relaxed": int(found.relaxed),
                "columns": layout.p,
                "correlation": float(found.correlation),
            },
        )
