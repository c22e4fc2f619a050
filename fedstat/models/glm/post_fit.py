"""Analyses after a fit: marginal effects, wild bootstrap, and tests of omitted terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.linalg import null_space

from fedstat import codec
from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.federation.design.derivatives import Direction, variable_directions
from fedstat.federation.design.formula.terms import extended
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import ConvergenceTest
from fedstat.inference.effects import Means
from fedstat.inference.estimate import INTERCEPT
from fedstat.inference.heterogeneity import NOT_REQUESTED
from fedstat.inference.hypotheses import Constraints, Hypothesis, read_constraints
from fedstat.inference.likelihood import LOSSES, FTest, LRTest, check_nested, format_test
from fedstat.kernels.glm.effects import (
    ChangeSums,
    EffectSums,
    change_sums,
    effect_sums,
)
from fedstat.models.checks import check_choice, check_integer
from fedstat.models.glm.protocol import Newton
from fedstat.models.glm.separation import check_rank
from fedstat.models.glm.statistics import WITHOUT_LIKELIHOOD, GLMStatements
from fedstat.models.glm.steps import FAMILY
from fedstat.models.glm.wild_bootstrap import (
    POINTS,
    SiteParts,
    WildBootstrap,
    draw_weights,
    invert,
    require_clusters,
    share_beyond,
    with_own,
)
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.response import RowsResponse, check_groups, divided
from fedstat.models.horizontal.session import add
from fedstat.models.horizontal.variable_changes import changes_request, level_counts
from fedstat.models.margins import (
    AT_OVERALL,
    AT_OVERALL_OR_MEAN,
    BY_COLUMN,
    HEADINGS,
    Change,
    ChangesRequest,
    EffectPoint,
    MarginalEffects,
    at_one_row,
    change_at,
    directions_note,
    effects_of,
    mean_jet,
    mean_words,
    plain_places,
    shown_effects,
)
from fedstat.models.results import CoefficientResults, lr_test
from fedstat.models.rows.newton import falls
from fedstat.typing import Array, Floats

# ----------------------------------------------------------------------------------------------------
# Analyses after a fit: sums for marginal effects, and the restricted fit of a wild bootstrap.


class Found(NamedTuple):
    """Sums at the estimate, changes by the position of the column, and the effects (V,) of variables.

    The effects' derivatives by a constant and the coefficients are `slopes` (V, p + 1), and `counts` (V,) the
    weights of the rows, where these are those of a level.
    """

    base: EffectSums
    moved: Mapping[int, ChangeSums]
    effects: Floats = np.zeros(0)
    slopes: Floats = np.zeros((0, 0))
    counts: Floats = np.zeros(0)


NO_SUMS = EffectSums(np.zeros(0), np.zeros((0, 0)))

WHERE = ("overall", "mean", "zero")
STAY = {
    "all": "effects at every row are one value per row, which stay at the sites",
    "median": "medians are values of rows, which stay at the sites",
}
BINARY = 1e-9
"""Largest rounding error of a 0/1 column's variance from m (1 - m), where m is its mean."""

LEVEL = 0.05
MAXITER = 100
MASKED = (
    "wild_cluster_bootstrap: it multiplies every site's own score by a number, but this fit's sums were "
    "masked, so that no site's part is known."
)
UNMASKED = "Fit with masked=False, if the owners allow unmasked sums"


# -- marginal effects ---


def marginal_effects(
    result: GLMStatements,
    at: str,
    method: str,
    atexog: Mapping[int | str, float] | None,
    dummy: bool,
    count: bool,
    columns: bool = False,
) -> MarginalEffects:
    """Return the effects of :meth:`fedstat.models.glm.results.GLMResults.get_margeff`, with its errors."""
    if at in STAY:
        raise NotAvailableError(f"get_margeff: at={at!r}: {STAY[at]}", remedy=AT_OVERALL_OR_MEAN)
    check_choice("at", at, WHERE)
    check_choice("method", method, tuple(HEADINGS))
    if count:
        raise NotAvailableError(
            "get_margeff: count=True: sites do not report which columns are counts. For a step of one take "
            "the difference of two predictions, for your own rows"
        )
    if dummy and (method in ("dyex", "eyex") or at == "zero"):
        raise ModelError(f"get_margeff: dummy=True is not available with method={method!r} and at={at!r}")
    fit, beta = result._fit, result.estimate.params
    held = _fixed_covariates(result, {} if atexog is None else atexog)
    log, products = method.startswith("ey"), method.endswith("ex")
    names, binary = list(result.estimate.names), _binary(result) if dummy else []
    agreement, two = result.basis.agreement, [names[j] for j in binary]
    directions = [] if columns else variable_directions(agreement, fit.design, products, two)
    changed = binary if columns else [j for j, _ in plain_places(directions) if j in binary]
    if at != "zero" and not products:  # columns of comparisons have two values
        compared = [one for one in directions if not one.variable]
        changed += [j for j, _ in plain_places(compared) if j not in binary]
    _check_directions(result, directions, held)
    point = EffectPoint.of(beta, held)
    changes = {j: EffectPoint.of(beta, held | {j: 0.0}) for j in changed}
    linear = fit.distribution.link == "Identity" and method == "dydx"
    over_rows = at == "overall" and not linear
    others = [one for one in directions if one.plain is None and not one.problem]
    if linear:  # means of columns are over rows without weights
        weighted = "freq_weights" in agreement.question.weights
        asked = [one for one in others if at == "overall" and (weighted or not one.at_a_row)]
    else:
        asked = others if over_rows else []
    if at != "overall":
        directions = at_one_row(directions, at)
        others = [one for one in others if one.at_a_row]
    found: dict[str, tuple[float, Floats]] = {}
    single = columns or any(one.plain is not None for one in directions)
    requested = changes_request(asked, products)
    if (over_rows and single) or asked:
        sums = _over_rows(
            result,
            point,
            changes if over_rows and single else None,
            requested,
            log,
            products,
            f"get_margeff(at={at!r}, method={method!r})",
        )
        n = fit.totals[0]
        for one, effect, slope in zip(asked, sums.effects, sums.slopes, strict=True):
            found[one.name] = float(effect) / n, (point.place @ slope)[1:] / n
    if not over_rows:
        # With an identity link derivatives are the same at every row.
        row = np.zeros(len(beta)) if at == "zero" else fit.design.mean.copy()
        row[: int(fit.design.intercept)] = 1.0
        if not linear:
            _check_at_row(result, at)
        n, sums = 1.0, _at_row(result, row, point, changes, log, products)
        for one in (one for one in others if one.name not in found):
            found[one.name] = _change_at_row(result, row, point, one, log)
    if columns or single:
        averages = {j: changes[j].changes(sums.moved[j], n) for j in changes}
        effects, jacobian = effects_of(beta, point.effects(sums.base, n), averages)
        first = int(fit.design.intercept)
        for j, name in list(enumerate(names))[first:] if columns else plain_places(directions):
            found[name] = effects[j], jacobian[j]
    shown = shown_effects(found, directions)
    return MarginalEffects(
        shown,
        np.array([found[name][0] for name in shown]),
        np.array([found[name][1] for name in shown]),
        result._cov(),
        test_distribution=result._combined_distribution,
        student=result.use_t,
        options={"method": method, "at": at},
        title=(result.model_name, result.estimate.response),
        note=_note(result, at, changed, directions),
        sources=(result,),
    )


def _check_directions(
    result: GLMStatements, directions: Sequence[Direction], held: Mapping[int, float]
) -> None:
    """Refuse fixed values of columns that change together with others."""
    if not directions or not held:
        return
    names = result.estimate.names
    free = {one.plain for one in directions}
    if wrong := [names[j] for j in held if j not in free]:
        raise ModelError(
            f"get_margeff: atexog: {', '.join(wrong)} changes with a variable of several columns, and cannot "
            "be fixed for its effect",
            remedy=BY_COLUMN,
        )


def _change_at_row(
    result: GLMStatements, row: Floats, point: EffectPoint, one: Direction, log: bool
) -> tuple[float, Floats]:
    """Return the effect of a variable at a row of the design, and its slopes in the coefficients (p,)."""
    family, B = result.distribution, result.estimate.params[None, :]
    effect, slopes = change_at(one, row, point.place, B, lambda X: mean_jet(X @ B[0], family, log))
    if not np.isfinite(slopes).all():
        raise _outside(result)
    return float(effect[0]), slopes[0, 0]


def _note(result: GLMStatements, at: str, changed: Sequence[int], directions: Sequence[Direction]) -> str:
    over = {"overall": "Averages over all rows", "mean": "At the mean of every column", "zero": "At zero"}[at]
    names = ", ".join(result.estimate.names[j] for j in changed)
    text = f"{over}.{f' Changes from 0 to 1: {names}.' if names else ''} Errors by the delta method."
    return text + directions_note(directions)


def _fixed_covariates(result: GLMStatements, atexog: Mapping[int | str, float]) -> dict[int, float]:
    names = list(result.estimate.names)
    held = {}
    for key, value in atexog.items():
        known = key in names if isinstance(key, str) else 0 <= key < len(names)
        if not known or not isinstance(value, int | float | np.number):
            raise ModelError(
                f"get_margeff: atexog: expected a number for a column of the design, by name or position, "
                f"received {key!r}; columns are {', '.join(names)}"
            )
        held[names.index(key) if isinstance(key, str) else key] = float(value)
    return held


def _binary(result: GLMStatements) -> list[int]:
    """Return the positions of columns of zeros and ones, which are recognized by their moments."""
    design = result._fit.design
    mean, variance = design.mean, design.spread**2
    binary = np.abs(variance - mean * (1.0 - mean)) <= BINARY * np.maximum(variance, BINARY)
    return [j for j in np.flatnonzero(binary).tolist() if design.names[j] != INTERCEPT]


def _check_at_row(result: GLMStatements, at: str) -> None:
    question = result.basis.agreement.question
    if question.offsets or "exposure" in question.weights:
        raise NotAvailableError(
            f"get_margeff: at={at!r} needs a value of the offset, but its mean is unknown", remedy=AT_OVERALL
        )
    if at == "mean" and "freq_weights" in question.weights:
        raise NotAvailableError(
            "get_margeff: at='mean': sites report means of columns over rows without weights",
            remedy=AT_OVERALL,
        )


def _at_row(
    result: GLMStatements,
    row: Floats,
    point: EffectPoint,
    changes: Mapping[int, EffectPoint],
    log: bool,
    products: bool,
) -> Found:
    X, one, family, beta = row[None, :], np.ones(1), result.distribution, result.estimate.params
    base = effect_sums(X, X @ point.beta + point.constant, one, family, log, products)
    moved = {}
    for j, held in changes.items():
        low = X @ held.beta + held.constant
        moved[j] = change_sums(X, low, low + beta[j], one, family, log)
    if not (base.inside and all(sums.inside for sums in moved.values())):
        raise _outside(result)
    return Found(base, moved)


def _over_rows(
    result: GLMStatements,
    point: EffectPoint,
    changes: Mapping[int, EffectPoint] | None,
    requested: ChangesRequest,
    log: bool,
    products: bool,
    call: str,
) -> Found:
    """Request sums over rows from the sites, in the units of the data."""
    model: HorizontalModel | None = result._model
    if model is None:
        raise NotAvailableError(
            "get_margeff: this result was read from a file and has no partition",
            remedy=Remedy("get_margeff(at='mean')", "fit the model again, or use {arguments}"),
        )

    def protocol(model: HorizontalModel) -> FitProtocol[Found]:
        session = model._open_session(FAMILY, result._fit.masked)
        newton = Newton(session, result.distribution, scaletype=result.scale)
        return session.hide(_effects_protocol(newton, result, point, changes, requested, log, products))

    return model._run_after_fit(call, protocol)


def response_functions(result: GLMStatements) -> RowsResponse:
    """Return means and predictors of a fit with one mean of a row."""
    beta, family = result.estimate.params, result.distribution

    def sums(call: str, changes: Sequence[Change]) -> Means:
        point = EffectPoint.of(beta, {})
        found = _over_rows(result, point, None, ChangesRequest(tuple(changes)), False, False, call)
        check_groups(changes, found.counts)
        slopes = found.slopes[:, None, 1:]
        return divided(found.effects[:, None], slopes, found.counts, result._fit.totals[0])

    return RowsResponse(
        agreement=result.basis.agreement,
        design=result._fit.design,
        B=beta[None, :],
        map=np.eye(len(beta)),
        jet=lambda X, offset: mean_jet(X @ beta + offset, family),
        sums=sums,
        cov=result._cov(),
        df=result._df,
        mean_words=mean_words(family.name),
        distribution=family,
    )


def _effects_protocol(
    newton: Newton,
    result: GLMStatements,
    point: EffectPoint,
    changes: Mapping[int, EffectPoint] | None,
    requested: ChangesRequest,
    log: bool,
    products: bool,
) -> FitProtocol[Found]:
    """Sum effects of columns, unless `changes` is None, and those of variables, if any are requested."""
    yield from newton.open(local=False)
    columns, beta = newton.coordinates, result.estimate.params
    common: dict[str, Array] = {
        "beta": np.linalg.solve(columns.back, point.beta),
        "constant": np.array(point.constant),
        "log": np.array(log),
        "shift": columns.shift,
        "scale": columns.scale,
    }
    forward = np.eye(len(columns.shift) + 1)
    forward[1:, 1:] = np.linalg.inv(columns.back).T
    base, moved, effects, slopes = NO_SUMS, dict[int, ChangeSums](), np.zeros(0), np.zeros((0, 0))
    counts = np.zeros(0)
    if changes is not None:
        arrays = common | {"products": np.array(products)}
        if changes:
            arrays["changed"] = np.array(
                [np.linalg.solve(columns.back, one.beta) for one in changes.values()]
            )
            arrays["ends"] = np.array([[one.constant, one.constant + beta[j]] for j, one in changes.items()])
        replies = yield newton.session.request_all("sum_effects", arrays)
        if int(add(replies, "inside")) < len(replies):
            raise _outside(result)
        left = forward if products else np.eye(1)
        base = EffectSums(left @ add(replies, "first"), left @ add(replies, "second") @ forward.T)
        if changes:
            level, slope, high = (add(replies, name) for name in ("changes", "slopes", "high"))
            moved = {
                j: ChangeSums(float(level[k]), forward @ slope[k], float(high[k]))
                for k, j in enumerate(changes)
            }
    if requested.changes:
        replies = yield newton.session.request_all("sum_changes", common, codec.to_json(requested))
        if int(add(replies, "inside")) < len(replies):
            raise _outside(result)
        effects, slopes = add(replies, "effects")[:, 0], add(replies, "slopes")[:, 0, 0] @ forward.T
        counts = level_counts(replies, requested)
    return Found(base, moved, effects, slopes, counts)


def _outside(result: GLMStatements) -> EstimationError:
    return EstimationError(
        f"get_margeff: a mean is outside the domain of family {result.distribution}, or its logarithm is "
        "not finite. The fixed values of columns may be the cause"
    )


# -- wild cluster bootstrap ---


def wild_bootstrap(
    result: GLMStatements,
    hypothesis: Hypothesis,
    reps: int,
    weights: str,
    seed: int | np.random.Generator | None,
) -> WildBootstrap:
    """Return the bootstrap of :meth:`fedstat.models.glm.results.GLMResults.wild_cluster_bootstrap`."""
    _require_maximum("wild_cluster_bootstrap", result)
    check_choice("weights", weights, tuple(POINTS))
    check_integer("reps", reps, 2)
    read = read_constraints(hypothesis, result.estimate.names)
    K, linear = len(result._fit.local), result.distribution.least_squares
    require_clusters(K, len(read.q))
    if obstacle := bootstrap_obstacle(result):
        raise NotAvailableError(obstacle)
    draws, enumerated = draw_weights(weights, K, reps, seed)
    parts = _linear_parts(result, read) if linear else _restricted_parts(result, read)
    ones = np.ones((1, K))

    def statistics(q: Floats) -> tuple[float, Floats]:
        request = partial(parts.refitted, q) if linear else parts.rescored
        own = float(request(ones)[0])
        return own, with_own(own, request(draws), draws)

    own, drawn = statistics(read.q)
    interval = None
    if linear and len(read.q) == 1:
        (estimate,), ((variance,),) = parts.R @ parts.beta, parts.R @ parts.bread @ parts.R.T
        step = float(np.sqrt(variance * result.scale))
        interval = invert(lambda value: share_beyond(*statistics(np.array([value]))), estimate, step, LEVEL)
    return WildBootstrap(
        hypothesis="; ".join(read.labels),
        method="restricted wild bootstrap" if linear else "score bootstrap at the restricted fit",
        weights=weights,
        statistic=own,
        pvalue=share_beyond(own, drawn),
        conf_int=interval,
        boot_statistics=drawn,
        draws=draws,
        enumerated=enumerated,
    )


def bootstrap_obstacle(result: GLMStatements) -> str:
    """Return why a wild bootstrap of these results is not available, and what to do; "" if it is."""
    fit, question = result._fit, result.basis.agreement.question
    if not fit.masked:
        if not result.distribution.least_squares and result._model is None:
            return (
                "wild_cluster_bootstrap: this result was read from a file and has no partition to fit the "
                "restricted model to; fit the model again"
            )
        return ""
    if not result.distribution.least_squares or question.weighted or not question.intercept:
        return f"{MASKED} {UNMASKED}"
    lacking = next((site for site in fit.local if site.own is None), None)
    if lacking is None:
        return ""
    if lacking.problem == NOT_REQUESTED:
        return f"{MASKED} They follow from the sites' own fits: fit with local=True. Or f{UNMASKED[1:]}"
    reason = lacking.problem or "no residuals"
    return f"{MASKED} They would follow from own fits, but '{lacking.site}' has none ({reason}). {UNMASKED}"


def _site_parts(
    result: GLMStatements, read: Constraints, beta: Floats, score: Floats, information: Floats
) -> SiteParts:
    """Combine sites' sums in standardized coordinates with a hypothesis in the units of the data."""
    n, p, K = result._fit.total.weight, len(beta), len(score)
    factor = K / (K - 1.0) * (n - 1.0) / (n - p)
    return SiteParts(beta, score, information, read.R @ result._fit.coordinates.back, read.q, factor)


def _linear_parts(result: GLMStatements, read: Constraints) -> SiteParts:
    """Return scores and informations of least squares: as released by the sites, or from their own fits."""
    fit = result._fit
    if fit.total.by_site is not None:
        score, information = (np.array(part) for part in zip(*fit.total.by_site, strict=True))
        return _site_parts(result, read, fit.gamma, score, information)
    scores, informations = [], []
    for site in fit.local:
        assert site.own is not None
        # An own fit's part is divided by its dispersion; its intercept's information is the number of rows.
        dispersion = site.n / site.own.information[0, 0]
        scores.append(dispersion * site.own.score)
        informations.append(dispersion * site.own.information)
    return _site_parts(result, read, fit.gamma, np.array(scores), np.array(informations))


def _restricted_parts(result: GLMStatements, read: Constraints) -> SiteParts:
    """Request sums at restricted coefficients until these are the restricted maximum."""
    model: HorizontalModel | None = result._model
    assert model is not None

    def protocol(model: HorizontalModel) -> FitProtocol[SiteParts]:
        session = model._open_session(FAMILY, False)
        newton = Newton(session, result.distribution, scaletype=result.scale)
        return _maximize(newton, result, read)

    return model._run_after_fit(f"wild_cluster_bootstrap({'; '.join(read.labels)!r})", protocol)


def _maximize(newton: Newton, result: GLMStatements, read: Constraints) -> FitProtocol[SiteParts]:
    """Fisher scoring within the coefficients of the hypothesis."""
    yield from newton.open(local=False)
    fit = result._fit
    R, A = read.R @ fit.coordinates.back, np.linalg.inv(fit.total.information)
    free = null_space(R)
    gamma = fit.gamma - A @ R.T @ np.linalg.solve(R @ A @ R.T, R @ fit.gamma - read.q)
    step, before = np.zeros_like(gamma), -np.inf
    test = ConvergenceTest(newton.n, newton.tol)
    for _ in range(MAXITER):
        total = yield from newton.evaluate(newton.point(gamma + step))
        if total is None or falls(total.loglik, before):
            step = step / 2.0
            continue
        gamma, before = gamma + step, total.loglik
        information = free.T @ total.information @ free
        step = free @ np.linalg.solve(information, free.T @ total.score)
        dispersion = newton.dispersion(total)
        size = float(np.sqrt(step @ total.information @ step / dispersion))
        if test.reached(total.loglik / dispersion, size):
            assert total.by_site is not None
            score, parts = (np.array(part) for part in zip(*total.by_site, strict=True))
            return _site_parts(result, read, gamma, score, parts)
    raise EstimationError(
        "wild_cluster_bootstrap: the fit under the hypothesis does not converge. Its maximum may be at "
        "infinity, or outside the family's domain"
    )


# ----------------------------------------------------------------------------------------------------
# Tests of terms that a fit left out, with the larger fit or without it.
#
# The score test evaluates the larger model once, at the smaller estimate.


class ScoreTest(NamedTuple):
    """Score (Rao) test: statistic, p-value, degrees of freedom.

    A tuple of `statistic`, `pvalue` and `df`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.GLORE.from_formula("num > 0 ~ age", partition).fit().score_test("C(cp)").df
    3
    """

    statistic: float
    pvalue: float
    df: int

    def __repr__(self) -> str:
        return format_test("Score test", self._asdict())


def score_test(result: GLMStatements, terms: str) -> ScoreTest:
    """Test terms that the fit does not have, written as the right side of a formula.

    ModelError if they add no coefficient, or if rows of the fit lack their columns.
    """
    _require_maximum("score_test", result)
    model: HorizontalModel = result.model
    larger = type(model).from_formula(
        extended(model.formula.text, f" + {terms}"),
        model.partition,
        family=result.family,
        labels=model.question.labels,
        **model._roles,
    )
    same_rows(model, larger, terms)

    def protocol(model: HorizontalModel) -> FitProtocol[ScoreTest]:
        session = model._open_session(FAMILY, result._fit.masked)
        newton = Newton(session, result.distribution, scaletype=result.scale)
        return session.hide(_score_protocol(newton, result))

    return larger._run_after_fit(f"score_test({terms!r})", protocol)


def same_rows(model: HorizontalModel, larger: HorizontalModel, terms: str) -> None:
    """Require that a larger model has all rows of a fit, or raise a ModelError."""
    # On fewer rows the smaller estimate is not a maximum, and its own terms would add to the statistic.
    rows = {row.site: row.n for row in model.agreement.sites}
    fewer = {row.site: rows[row.site] - row.n for row in larger.agreement.sites if row.n != rows[row.site]}
    if fewer:
        listed = ", ".join(f"{count:,} at '{site}'" for site, count in fewer.items())
        raise ModelError(
            f"score_test: rows of the fit lack a column of {terms!r}: {listed}. Fit the smaller model to "
            "the rows that have this column"
        )


def _score_protocol(newton: Newton, result: GLMStatements) -> FitProtocol[ScoreTest]:
    yield from newton.open(local=False)
    names = newton.coordinates.design.names
    extra = [name for name in names if name not in result.params.index]
    if not extra or not set(result.params.index) <= set(names):
        raise ModelError("score_test: the terms add no coefficient to the fit")
    # The smaller estimate, with zeros for the terms that it left out.
    beta = result.params.reindex(names).fillna(0.0).to_numpy()
    gamma: Floats = np.linalg.solve(newton.coordinates.back, beta)
    total = yield from newton.evaluate(newton.point(gamma))
    assert total is not None
    # A new term that depends linearly on the old ones has score zero, and no test.
    check_rank(total.information, newton.coordinates)
    statistic = float(total.score @ np.linalg.solve(total.information, total.score)) / result.scale
    return ScoreTest(statistic, float(stats.chi2.sf(statistic, len(extra))), len(extra))


def _require_maximum(call: str, *results: object) -> None:
    """Require maximum likelihood."""
    for one in results:
        if (method := getattr(getattr(one, "basis", None), "method", "ml")) != "ml":
            needs = "needs fit(method='ml'). " if method == "firth" else ""
            raise NotAvailableError(f"{call}: {needs}{WITHOUT_LIKELIHOOD[method]}")


def compare_likelihoods(full: GLMStatements, restricted: CoefficientResults) -> LRTest:
    """Return the likelihood ratio test; errors as in :meth:`GLMResults.compare_lr_test`.

    statsmodels' log-likelihood uses Pearson's dispersion, which does not maximize it: the larger fit may then
    have the lower one. The maximum follows from the deviance.
    """
    _require_maximum("compare_lr_test", full, restricted)
    small = _same_family("compare_lr_test", full, restricted)
    if not (full.estimates_dispersion or small.estimates_dispersion) or full.distribution.least_squares:
        return lr_test(full, small)
    df_diff = check_nested(full.estimate, small.estimate, full._spans(small))
    family, weights = full.distribution.name, full.basis.agreement.question.weights
    if family not in LOSSES or (family == "Gamma" and "var_weights" in weights):
        raise NotAvailableError(
            f"compare_lr_test: the likelihood of {full.distribution} is not known at its maximum over the "
            f"dispersion{' with var_weights' if family in LOSSES else ''}; use compare_f_test"
        )
    n = full._fit.total.weight
    statistic = LOSSES[family](small.deviance, n) - LOSSES[family](full.deviance, n)
    # Equal fits differ by rounding.
    return LRTest(max(statistic, 0.0), float(stats.chi2.sf(statistic, df_diff)), df_diff)


def compare_deviances(full: GLMStatements, restricted: CoefficientResults) -> FTest:
    """Return the F test; errors as in :meth:`GLMResults.compare_f_test`."""
    _require_maximum("compare_f_test", full, restricted)
    small = _same_family("compare_f_test", full, restricted)
    if not full.estimates_dispersion:
        raise NotAvailableError(
            f"compare_f_test: the dispersion of {full.distribution} was fixed at {full.scale:g} and not "
            "estimated",
            remedy=Remedy("fit(..., scale='X2')", "use compare_lr_test, or fit with {arguments}"),
        )
    df_diff = check_nested(full.estimate, small.estimate, full._spans(small))
    statistic = max(small.deviance - full.deviance, 0.0) / df_diff / full.scale
    return FTest(statistic, float(stats.f.sf(statistic, df_diff, full.df_resid)), df_diff)


def _same_family(what: str, full: GLMStatements, restricted: CoefficientResults) -> GLMStatements:
    other = getattr(restricted, "distribution", None)
    if not isinstance(restricted, GLMStatements) or other != full.distribution:
        raise ModelError(
            f"{what}: expected another fit with family {full.distribution}, received "
            f"{other or type(restricted).__name__}"
        )
    effects, others = (one.basis.agreement.question.absorbed_texts for one in (full, restricted))
    if set(effects) != set(others):
        raise ModelError(
            f"{what}: expected another fit with the same absorbed effects, "
            f"{' + '.join(effects) or 'none'}, received {' + '.join(others) or 'none'}"
        )
    if "survey" in (full.cov_type, restricted.cov_type):
        raise NotAvailableError(
            f"{what}: the likelihood of a survey is a pseudo-likelihood, whose size depends on the weights; "
            "use wald_test on the larger fit"
        )
    return restricted
