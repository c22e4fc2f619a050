"""The protocol of one fit of a vertical generalized linear model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.models.vertical.exchange.patterns import PatternExchange, exchange_patterns
from fedstat.models.vertical.exchange.protocol import Grams, exchange_grams, standardize_columns
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice, choose_between
from fedstat.models.vertical.layout import Layout
from fedstat.models.vglm import path_setup
from fedstat.models.vglm.admm import admm_path
from fedstat.models.vglm.debiased import normal_debiased
from fedstat.models.vglm.distributions import log_likelihood
from fedstat.models.vglm.em_fit import (
    MissingBlocksFit,
    WorkingModel,
    blocks_path,
    blocks_stability,
    refit_blocks,
)
from fedstat.models.vglm.newton_fit import FitExtras, SelectedPath, fit_path
from fedstat.models.vglm.normal_path import (
    cross_validate,
    normal_path,
    normal_refit,
    normal_stability,
    split_pvalues,
)
from fedstat.models.vglm.options import FitPlan
from fedstat.models.vglm.outcome import SelectionOutcome
from fedstat.models.vglm.path_following import Folds
from fedstat.models.vglm.proximal_newton import LossOracle

FitRun: TypeAlias = Callable[[FitProtocol[Any]], Any]
FEWEST_GRAMS = 3
"""Weighted Gram matrices at the intercept alone, at a fit, and for its standard errors."""


def fit_normal(plan: FitPlan, run: FitRun) -> SelectionOutcome:
    """Fit the normal family, from sums of products that are exchanged once."""
    setup, choice = plan.setup, plan.choice
    # A split needs two parts even if nothing else requires folds.
    parts = max(choice.parts, 2) if choice.split else choice.parts

    def protocol() -> FitProtocol[tuple[Layout, Grams]]:
        layout = yield from plan.open_values()
        code = yield from plan.assign_folds(layout, parts)
        units = yield from standardize_columns(layout, plan.distribution, plan.product_session)
        every = np.ones((parts, len(layout.sites)), dtype=bool)
        return layout, (yield from exchange_grams(layout, units, code, every, plan.product_session))

    layout, grams = run(protocol())
    plan, grams = replace(plan, layout=layout), grams.weighted(layout)
    # With sample splitting, the first half of the folds selects, and the others estimate.
    units, mine = grams.units, np.arange(parts) < (parts // 2 if choice.split else parts)
    products, S = grams.products[mine], grams.total(mine)
    n = float(S[0, 0])
    path = normal_path(S, units, setup)
    criteria = path_setup.score_path(path, n)
    if choice.cross_validates:
        cv, cv_se = cross_validate(products, units, setup, path)
        criteria = replace(criteria, cv=cv, cv_se=cv_se)
    chosen = path_setup.choose_fit(criteria, choice.select)
    support = np.ones(layout.p, dtype=bool) if setup.unpenalized else path.selected[chosen]
    refit = None
    if setup.penalty.selecting or setup.unpenalized:
        refit = normal_refit(grams.total(~mine) if choice.split else S, units, support, layout.names)
        refit = replace(refit, scale=refit.scale * layout.variance_of_one)
    fitted = SelectedPath(path, chosen, refit, 0, 0, grams.dealers)
    if choice.inference == "debiased":
        debiased = normal_debiased(S, units, setup)
        debiased = replace(debiased, scale=debiased.scale * layout.variance_of_one)
        fitted = replace(fitted, debiased=debiased)
    if choice.draws:
        halves = normal_stability(products, units, setup, path, choice.draws, plan.random)
        fitted = replace(fitted, halves=halves)
    if choice.splits > 1:
        p_values = split_pvalues(grams, setup, choice.select, choice.splits, layout.names, plan.random)
        fitted = replace(fitted, split_p=p_values)
    variance = units.sd**2 * (S[-1, -1] / n - (S[0, -1] / n) ** 2)
    null = normal_null(n, variance) + n * units.constant
    return SelectionOutcome(plan, fitted, criteria, null, units, n, parts)


def normal_null(n: float, variance: float) -> float:
    """Largest log-likelihood of a normal response of this variance with an intercept alone."""
    return float(n / -2.0 * (np.log(2.0 * np.pi * variance) + 1.0))


def fit_blocks(plan: FitPlan, run: FitRun) -> SelectionOutcome:
    """Fit the normal family from sums by missing pattern, which are exchanged once."""

    def protocol() -> FitProtocol[PatternExchange]:
        layout = yield from plan.open_values()
        return (yield from exchange_patterns(layout, plan.small, plan.product_session))

    return select_blocks(plan, run(protocol()))


def select_blocks(
    plan: FitPlan, exchange: PatternExchange, choice: BetweenChoice | None = None
) -> SelectionOutcome:
    """Fit the normal family from sums by missing pattern that were exchanged; `choice` as in them."""
    layout, setup, moments = plan.layout, plan.setup, exchange.moments
    if plan.between is None:
        choice = choose_between(moments)
        plan = replace(plan, between=choice.between if choice else "free")
    joint = WorkingModel.of(moments, plan.between or "free")
    found, n = blocks_path(joint, setup), float(moments.nobs)
    criteria = path_setup.score_path(found.path, n)
    chosen = path_setup.choose_fit(criteria, plan.choice.select)
    support = np.ones(layout.p, dtype=bool) if setup.unpenalized else found.path.selected[chosen]
    refit, explained = None, float(found.rsquared[chosen])
    if setup.penalty.selecting or setup.unpenalized:
        refit, explained = refit_blocks(joint, support)
    fitted = SelectedPath(found.path, chosen, refit, 0, 0, exchange.dealers)
    rsquared = explained if setup.unpenalized else float(found.rsquared[chosen])
    observed = MissingBlocksFit(exchange, rsquared, explained, found.means[chosen], joint.complete, choice)
    null = normal_null(n, found.units.sd**2)
    if plan.choice.draws:
        halves = blocks_stability(
            moments, plan.between or "free", setup, found.path, plan.choice.draws, plan.random
        )
        fitted = replace(fitted, halves=halves)
    return SelectionOutcome(plan, fitted, criteria, null, found.units, n, observed=observed)


def fit_other(plan: FitPlan, run: FitRun) -> SelectionOutcome:
    """Fit any family by linear predictors and weighted Grams, or by ADMM."""
    choice, passing = plan.choice, plan.passing
    # Until folds choose, use the criterion for prediction.
    criterion: path_setup.Criterion = (
        "aic" if choice.select == "cv" or choice.select == "1se" else choice.select
    )

    def protocol() -> FitProtocol[Any]:
        every = yield from plan.open_values()
        layout, other = path_setup.halve_entities(every, plan.random) if choice.split else (every, None)
        apart = None if other is None else _oracle(plan, other)
        select = path_setup.Chooser(layout.nobs, plan.distribution.name, criterion)
        folds = None if choice.parts == 1 else (yield from _deal(plan, layout))
        further = FitExtras(folds, choice.inference == "debiased", apart)
        oracle, setup = _oracle(plan, layout, further), plan.setup
        if passing.exchange == "admm":
            found = yield from admm_path(
                oracle, plan.distribution, setup, select, passing.tol, passing.maxiter
            )
        else:
            exact = passing.path == "exact"
            found = yield from fit_path(
                oracle, plan.distribution, setup, select, exact=exact, further=further
            )
        return every, layout.nobs, *found

    every, n, fitted, units, first = run(protocol())
    plan = replace(plan, layout=every)
    scale = None if fitted.refit is None else fitted.refit.scale
    null = log_likelihood(plan.distribution.name, first, n, units.constant, scale)
    criteria: path_setup.PathCriteria = path_setup.score_path(fitted.path, n, plan.distribution.name)
    if fitted.cv is not None:
        criteria = replace(criteria, cv=fitted.cv[0], cv_se=fitted.cv[1])
    return SelectionOutcome(plan, fitted, criteria, null, units, n, choice.parts)


def _deal(plan: FitPlan, layout: Layout) -> FitProtocol[Folds]:
    choice = plan.choice
    code = yield from plan.assign_folds(layout, choice.parts)
    one_se = choice.select == "1se"
    return Folds(code, choice.parts, choice.cross_validates, choice.draws, plan.random, one_se)


def _oracle(plan: FitPlan, layout: Layout, further: FitExtras | None = None) -> LossOracle:
    """Reserve the weighted Gram matrices of folds and of debiased estimates; the rest is for the fit."""
    reserved = 0
    if further is not None:
        reserved = int(further.debiased) + (0 if further.folds is None else further.folds.parts)
    if plan.choice.inference != "conditional" or reserved:
        _check_grams(layout, FEWEST_GRAMS + reserved)
    # One is kept for the standard errors of the selected columns.
    left = max(layout.most_grams - 1 - reserved, 1)
    code = None if further is None or further.folds is None else further.folds.code
    return LossOracle(layout, plan.product_session, plan.passing.use_masks, np.eye(layout.p), left, code=code)


def _check_grams(layout: Layout, needed: int) -> None:
    if layout.most_grams < needed:
        raise EstimationError(
            f"{needed} weighted sums of products of {layout.p} columns are needed, but over {layout.n:,} "
            f"entities at most {layout.most_grams} are released",
            remedy=Remedy(
                "fit(..., select='bic')",
                "use fewer columns or folds, {arguments} instead of 'cv', or inference='conditional'",
            ),
        )
