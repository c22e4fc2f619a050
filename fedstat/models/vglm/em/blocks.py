"""Selection with the normal family where institutions lack some entities: missing="em".

Sums of products by missing pattern are exchanged once. Everything after that happens at the coordinator: the
path of :mod:`fedstat.models.vglm.em.solver`, and maximum likelihood on the columns that were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.rounds.engine import Rounds
from fedstat.kernels.glm.family import FamilySpec
from fedstat.kernels.penalised.groups import orthonormaliser
from fedstat.kernels.penalised.path import collect_path, follow_solutions, lambda_max
from fedstat.kernels.penalised.penalties import Penalty
from fedstat.models.vertical.covariance import origin_covariance
from fedstat.models.vertical.fit import fit_moments
from fedstat.models.vertical.likelihood import Standard, log_likelihood
from fedstat.models.vertical.merges import MergePlan, Rule, keep_only, plan_merges
from fedstat.models.vertical.moments import PatternMoments, number_patterns
from fedstat.models.vglm.em.solver import BlockSolution, BlockSolver
from fedstat.models.vglm.exchange.gram import Units, exchange_grams, stage
from fedstat.models.vglm.exchange.layout import Layout
from fedstat.models.vglm.path.fits import Path, Refit
from fedstat.models.vglm.path.setup import Setup
from fedstat.typing import Bools, Floats, Ints

NOTHING = 1e3
"""Level of the lasso, for standardised columns and response, at which every penalised coefficient is zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """What the exchange handed over.

    Parameters
    ----------
    moments : PatternMoments
    plan : MergePlan
        Which patterns were released.
    dealers : mapping of (str, str) to str
    """

    moments: PatternMoments
    plan: MergePlan
    dealers: Mapping[tuple[str, str], str]


def exchange_blocks(
    layout: Layout, family: FamilySpec, session: str, at: str | None, min_count: int, max_moved: float
) -> Rounds[Blocks]:
    """Obtain sums of products by missing pattern.

    Parameters
    ----------
    layout : Layout
        With all entities.
    family : FamilySpec
    session : str
    at : str or None
        Where the coordinator sits.
    min_count : int
        Fewest entities of a pattern that is released, beside twice its columns and response.
    max_moved : float
        Largest share of the entities that may count as missing, or be left out, because their pattern is not.

    Raises
    ------
    EstimationError
        Too many entities have a pattern with too few; or those of a client all have.
    """
    first, code, counts = number_patterns(layout.seen)
    rule = Rule(min_count, layout.sizes)
    plan = plan_merges(layout.seen[first], counts, rule, largest_share=max_moved)
    never = [k for j, k in enumerate(layout.clients) if not plan.patterns[:, j].any()]
    if never:
        raise EstimationError(
            f"the entities of {', '.join(never)} all have missing patterns with too few to be released: "
            "leave out columns, or this client"
        )
    code, G = plan.target[code], len(plan.patterns)
    layout, code = as_released(layout, plan, code), code[code >= 0]
    units = yield from stage(layout, family, session)
    grams = yield from exchange_grams(layout, units, code, G, session, at, plan.patterns)
    moments = PatternMoments(
        layout.clients,
        layout.sizes,
        layout.names,
        plan.patterns,
        grams.products[:, 0, 0].copy(),
        grams.products,
        np.append(units.shift, units.mean),
        np.append(units.scale, units.sd),
    )
    return Blocks(moments, plan, grams.dealers)


def as_released(layout: Layout, plan: MergePlan, code: Ints) -> Layout:
    """Lay out a fit of what released patterns show: (n,) pattern of each entity, -1 for none.

    Means over entities that count as missing would tell of these, beside the sums over all others.
    """
    used = code >= 0
    place, rows, keep = np.cumsum(used) - 1, {}, {}
    for j, client in enumerate(layout.clients):
        own = layout.positions(client)
        shown = plan.shows(code[own], j)
        rows[client], keep[client] = place[own[shown]], keep_only(layout.keep[client], shown)
    response_keep = keep_only(layout.response_keep, used)
    return replace(layout, n=int(used.sum()), keep=keep, response_keep=response_keep, rows=rows)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPath:
    """Fits along a path with missing blocks.

    Parameters
    ----------
    path : Path
        Its loss is half the variance at which a complete normal sample of as many entities has the
        likelihood of what is observed; without missing blocks it is half the mean deviance.
    units : Units
        Of the columns and the response, each over the entities that have it.
    rsquared : (L,) array
        Share of the variance of the response that is explained for an entity with every block.
    means : (L, p) array
        Of the columns, in the units of the data.
    """

    path: Path
    units: Units
    rsquared: Floats
    means: Floats


def blocks_path(standard: Standard, setup: Setup) -> BlockPath:
    """Fit the normal family along a path, from moments by missing pattern."""
    moments = standard.moments
    sd = float(moments.scale[-1])
    T, groups = orthonormaliser(standard.S, setup.groups)
    setup = replace(setup, groups=groups)
    steps = None
    if setup.from_unpenalised:
        whole = np.linalg.pinv(T) @ fit_moments(standard).point.beta * sd
        setup, steps = setup.adapted(whole), setup.linear_steps(whole)
    solver, every = BlockSolver(standard, T), np.ones(len(groups.weights), dtype=np.bool_)
    null = solver.solve(Penalty("lasso").at(NOTHING * sd, setup.groups), solver.start(), every, 1e-9 * sd)
    lambdas = setup.grid(null.gradient, steps)
    solutions = follow_solutions(
        solver,
        setup.penalty,
        setup.groups,
        null,
        lambdas,
        algorithm=setup.algorithm,
        steps=steps,
        tol=setup.tol,
    )
    found = [one for one in solutions if isinstance(one, BlockSolution)]
    scale = lambda_max(null.gradient, setup.penalty, setup.groups)
    fits = collect_path(found, lambdas, scale, setup.tol)
    loss = [equivalent_loss(one.loss, moments.nobs) for one in found]
    fits = replace(fits, loss=np.array(loss))
    units = Units(moments.centre[:-1], moments.scale[:-1], float(moments.centre[-1]), sd, 0.0)
    a = units.mean + sd * np.array([one.point.b for one in found])
    path = Path.of(fits, fits.coefficients @ T.T, a, units, setup.groups)
    means = units.shift + units.scale * np.array([one.point.mu for one in found])
    return BlockPath(path, units, np.array([1.0 - np.exp(one.point.log_s2) for one in found]), means)


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What a fit with missing blocks hands over beside the path.

    Parameters
    ----------
    blocks : Blocks
    rsquared, refit_rsquared : float
        Share of variance explained for an entity with every block, by the chosen fit and by that on its
        columns.
    means : (p,) array
        Of the columns, at the chosen fit.
    """

    blocks: Blocks
    rsquared: float
    refit_rsquared: float
    means: Floats


def equivalent_loss(llf: float, n: float) -> float:
    """Half the variance at which a complete normal sample of n has this log-likelihood at its maximum."""
    return float(np.exp(-2.0 * llf / n - 1.0) / (4.0 * np.pi))


def refit_blocks(standard: Standard, support: Bools) -> tuple[Refit, float]:
    """Maximise the likelihood on the support; returns as well the share of variance that is explained.

    Columns that are not in the support do not enter the likelihood of the response given the blocks.

    Raises
    ------
    EstimationError
        There is no maximum.
    """
    moments = standard.moments
    names = [name for name, chosen in zip(moments.names, support, strict=True) if chosen]
    if not names:
        return null_refit(standard, support), 0.0
    fit = fit_moments(moments.submodel(names))
    if not fit.converged:
        raise EstimationError(
            f"the {len(names)} columns of the chosen fit have no estimate without a penalty: {fit.reason}; "
            "use fewer columns, or a larger lambda"
        )
    loss = equivalent_loss(fit.log_likelihood, moments.nobs)
    refit = Refit(support, fit.params, origin_covariance(fit), fit.log_likelihood, fit.s2, loss)
    return refit, fit.rsquared


def null_refit(standard: Standard, support: Bools) -> Refit:
    """Fit the mean of the response alone."""
    n, (mean, variance) = standard.moments.nobs, standard.moments.response_moments
    llf = log_likelihood(standard, standard.start())
    return Refit(support, np.array([mean]), np.array([[variance / n]]), llf, float(variance), variance / 2.0)
