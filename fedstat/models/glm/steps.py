"""Steps of a site for a GLM: sums over its rows, its own fit, and sums by cluster and stratum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import ClassVar

import numpy as np
import pandas as pd

from fedstat.codec import to_plain
from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.absorbed_rows import level_codes
from fedstat.federation.design.horizontal_steps import (
    OPEN_ROWS,
    hash_labels,
    plain_labels,
    rows_of,
)
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.facts import RowTerms
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control, presence, schema
from fedstat.inference.homogeneity_tests import quadratic_form
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.effects import outer_products
from fedstat.kernels.glm.local_fit import fit_local
from fedstat.kernels.glm.sums import (
    RowMeans,
    Rows,
    Sums,
    evaluate,
    linear_predictor,
    log_likelihood,
    null_sums,
    row_means,
)
from fedstat.models.horizontal.clusters import (
    LEVERAGES,
    LeverageRequest,
    cluster_releases,
    sum_corrected,
)
from fedstat.models.horizontal.rows import (
    AT_THE_START,
    SCORES,
    SUMS,
    RowsAtPoints,
    answered_at,
    blocks_of,
    describe_sums,
    glm_rows,
    require_response,
    summed,
)
from fedstat.models.rows.estimated_weights import RELEASES, sum_stacked
from fedstat.models.rows.objective import Facts, PredictorObjective, own_part, standard_place
from fedstat.models.rows.steps import enter_start, rows_in
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of a site for a GLM: sums over its rows, and the fit of its rows alone.
#
# A site works on columns that it standardized by its own means and deviations. Received coefficients and
# released sums belong to columns standardized over all sites, so that the coordinator needs only the sum over
# sites.

FAMILY = "glm"
LARGEST = 80.0
"""Size at which offsets are truncated before their exponentials are summed; the sum is a first guess only."""


COLUMNS = {
    "shift": aggregate("means of the columns over all sites", common=True),
    "scale": aggregate("standard deviations of the columns over all sites", common=True),
}
BETA = "coefficients of the standardized columns"
NULL = aggregate("intercept of the model without covariates", 0, optional=True, common=True)


@dataclass(frozen=True, slots=True, eq=False)
class SiteModel(PredictorObjective):
    """One fit's family over the rows that its session opened, with one predictor.

    The information is the expected one, for dispersion one; its kernel adds the observed one on request.
    """

    family = FAMILY
    request_type = DistributionSpec
    requests = control("family and link", common=True)
    starts: ClassVar = {"response": summed("sums of weights and response", behind=OPEN_ROWS)}
    own_fit: ClassVar = {
        "beta": own_part("coefficients"),
        "information": own_part("information", 2),
        "columns": own_part("means and deviations of the columns", 2),
        "pearson": own_part("Pearson's statistic", 0),
        "count": own_part("sum of the frequency weights less the rank of absorbed levels", 0, optional=True),
    }

    request: DistributionSpec

    @classmethod
    def begin(
        cls, data: SiteData, state: State, distribution: DistributionSpec
    ) -> tuple[SiteModel, dict[str, Array]]:
        """Check the response, and sum it.

        It returns ``response``: sum of the weights, of the weighted response, and what the intercept of the
        null model needs from the offset: with a log link the weighted sum of its exponentials, limited to
        those of `LARGEST`; and with an offset its weighted sum.
        """
        opened = rows_of(state, absorbed=distribution.least_squares)
        model = cls(opened, distribution, state.entities)
        if distribution.least_squares:
            # The same at all coefficients: a difference of two masked sums is a site's part.
            state.report(model.column_sums)
        exponentials = distribution.link == "Log"
        sums = np.zeros(4)
        for rows in model.chunks():
            require_response(data.name, rows, model.distribution, opened.question.response)
            weight = np.ones(len(rows.y)) if rows.weight is None else rows.weight
            sums[:2] += weight.sum(), weight @ rows.y
            if rows.offset is None:
                sums = sums[:3]
                sums[2] += weight.sum()
                continue
            limited = np.clip(rows.offset, -LARGEST, LARGEST)
            sums[2] += weight @ np.exp(limited) if exponentials else weight.sum()
            sums[3] += weight @ rows.offset
        state.report(*model.products_by_outcome())
        if "glm point" in state:  # left from another fit
            state.forget("glm point")
        return model, {"response": sums}

    @property
    def distribution(self) -> DistributionSpec:
        """Family and link."""
        return self.request

    @property
    def p(self) -> int:
        """Number of coefficients."""
        return len(self.opened.scale)

    @property
    def own_numbers(self) -> int:
        """Coefficients, information, sum of squares; with least squares it has the columns' moments."""
        moments = 0 if self.distribution.least_squares else 2 * (self.p - 1)
        return self.p * (self.p + 3) // 2 + 1 + moments

    @property
    def constant_weights(self) -> bool:
        """Whether the fit is least squares."""
        return self.distribution.least_squares

    @property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of the site's own fit."""
        question = self.opened.question
        p, count = self.p, {"count": ()} if question.counts_rows or question.absorbed else {}
        return {"beta": (p,), "information": (p, p), "columns": (2, p), "pearson": (), **count}

    def fit_own(self) -> tuple[dict[str, Array], str]:
        """Maximize the likelihood of the site's rows.

        ``beta`` (p,) and ``information`` (p, p) are for the columns as the site standardized them; they are
        zero for columns that are constant here, and if there is no fit. ``columns`` (2, p) are the means and
        deviations of this standardization, ``pearson`` is Pearson's statistic of the fit, and ``count`` the
        sum of the frequency weights less the rank of absorbed levels, if there are any.
        """
        varies = self.opened.varies
        arrays = {name: np.zeros(shape) for name, shape in self.own_shapes.items()}
        fit = fit_local(lambda: self.chunks(None if varies.all() else varies), self.distribution)
        if not fit.problem:
            arrays["pearson"] = np.array(fit.pearson)
            arrays["beta"][varies], arrays["information"][np.ix_(varies, varies)] = fit.beta, fit.information
        arrays["columns"] = self.opened.own
        if "count" in arrays:
            total = sum(rows.count for rows in self.chunks())
            arrays["count"] = np.array(total - self.opened.absorbed[0])
        return arrays, fit.problem

    def chunks(self, columns: Bools | None = None) -> Iterator[Rows]:
        """Rows of the design, or of some of its columns, chunk by chunk."""
        for rows, X in self.opened.chunks():
            yield glm_rows(rows, X if columns is None else np.ascontiguousarray(X[:, columns]))

    @property
    def matrices(self) -> Floats:
        """One predictor, which has all coefficients."""
        return np.eye(self.p)[None]

    def columns_of(self, X: Floats) -> Sequence[Floats]:
        """Return the columns themselves."""
        return [X]

    def pieces(self) -> Iterator[Rows]:
        """Yield the rows piece by piece."""
        return (piece for chunk in self.chunks() for piece in chunk.pieces())

    def means(self, own: Floats) -> Iterator[tuple[Rows, RowMeans]]:
        """Yield the rows with their means, piece by piece."""
        for rows in self.pieces():
            with np.errstate(all="ignore"):
                at = row_means(rows, self.distribution, linear_predictor(rows, own))
            yield rows, at

    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns, log-likelihoods less those of the saturated model, scores, and minus the weights."""
        for rows, at in self.means(own):
            with np.errstate(all="ignore"):
                logs, score = at.deviances(rows) / -2.0, at.weight * at.residual(rows.y)
                weight = at.weight * at.expected
            yield rows.X, logs, score[:, None], -weight[:, None, None]

    def sums(self, own: Floats, observed: bool = False) -> Sums:  # type: ignore[override]
        """Sum over the rows by the fused kernel."""
        return evaluate(self.chunks(), own, self.distribution, observed=observed)

    def terms(self, own: Floats) -> Mapping[str, Sequence[RowTerms]]:
        """Return the terms of all sums at a point; "totals" are weights, deviances, Pearson residuals."""
        more: dict[str, list[RowTerms]] = {"observed": [], "meat": [], "totals": []}
        for rows, at in self.means(own):
            one, freq = np.ones((len(rows), 1)), np.ones(len(rows)) if rows.freq is None else rows.freq
            observed = at.weight * at.expected * at.curvature(rows.y)
            more["observed"].append(RowTerms(rows.X, observed[:, None], rows.X))
            more["meat"].append(RowTerms(rows.X, at.squares(rows)[:, None], rows.X))
            totals = np.column_stack([freq, at.deviances(rows), at.pearson(rows)])
            more["totals"].append(RowTerms(one, totals, one))
        return {**PredictorObjective.terms(self, own), **more}

    def facts_at(  # type: ignore[override]
        self,
        own: Floats,
        sums: Sums | None = None,
        instead: Mapping[str, Array] | None = None,
        distribution: DistributionSpec | None = None,
    ) -> Facts:
        """Declare the rows behind sums at coefficients of the site's own columns."""
        kind = distribution or self.distribution
        return answered_at(self.opened, self.chunks, self.n, own, kind, sums, instead)

    def key_of(self, own: Floats) -> tuple[DistributionSpec, bytes]:
        """Return a point: family and coefficients."""
        return self.distribution, own.tobytes()

    def blocks(self) -> Iterator[RowsAtPoints]:
        """Yield the rows with their means and weights."""
        return blocks_of(self.opened, self.chunks)

    @property
    def weights_key(self) -> str:
        """What distinguishes the weights of rows at an estimate; least squares has those of the data.

        Columns less absorbed effects have other products.
        """
        question = self.opened.question
        weights: list[object] = [*sorted(question.weights.items())]
        weights += zip(question.absorbed_texts, repeat("absorbed"))
        weights += map(to_plain, question.propensities)
        if self.distribution.least_squares:
            return hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:16] if weights else ""
        return self.key

    @property
    def variant(self) -> str:
        """Family and link."""
        return self.distribution.to_json()

    @property
    def column_sums(self) -> facts.ColumnSums:
        """Functions of columns whose products the fit of these rows would reveal."""
        return self.opened.question.column_sums(self.opened.used, True, self.weights_key)

    def products_by_outcome(self) -> Iterator[facts.SummedProducts]:
        """Facts on the products of columns over the rows with and without an event, for other links.

        With a link that is not canonical the observed information depends on the response: less a multiple
        of the expected one, it is the products of two columns over the rows of one outcome.
        """
        if self.distribution.canonical:
            return
        y, name = np.concatenate([rows.y for rows in self.chunks()]), self.opened.question.response
        outcomes = {f"{name} > 0": y > 0.0}
        if self.distribution.name == "Binomial":
            outcomes[f"{name} < 1"] = y < 1.0
        for outcome, here in outcomes.items():
            if not here.all():
                fact = self.opened.products_with(here.astype(np.float64))
                yield replace(fact, names=[f"{column} (where {outcome})" for column in fact.names], rows=None)


enter_start(SiteModel)


def model_of(state: State) -> SiteModel:
    """Return this fit's model; MessageError if the fit was not started here."""
    return rows_in(state, SiteModel)


@dataclass(frozen=True, slots=True, eq=False)
class KeptSums:
    """Coefficients of the site's own columns, and the sums at them."""

    beta: Floats
    sums: Sums


def sums_at(
    state: State,
    model: SiteModel,
    beta: Floats,
    observed: bool = False,
    instead: Mapping[str, Array] | None = None,
) -> Sums:
    """Return the sums at coefficients of the site's own columns, and keep them.

    If a few rows contribute nearly all of the sums, `instead` is released, which makes the coordinator take a
    shorter step; without it the request is refused.
    """
    if "glm point" in state:
        point = state.use("glm point", KeptSums)
        if np.array_equal(point.beta, beta) and (point.sums.observed is not None or not observed):
            return point.sums
    # Facts come before any description: the disclosure checks judge the weights of rows at this point.
    sums = model.sums(beta, observed)
    state.report(*model.facts_at(beta, sums, instead))
    state.keep("glm point", KeptSums(beta, sums), state.entities)
    return sums


def describe_nothing(p: int, observed: bool) -> dict[str, Array]:
    """Make the coordinator take a shorter step."""
    zeros = np.zeros((p, p))
    arrays = {"inside": np.array(True), "spread": np.array(False)}
    arrays |= {"score": np.zeros(p), "information": zeros, "totals": np.zeros(3)}
    return arrays | ({"observed": zeros} if observed else {})


@step(
    FAMILY,
    "fit_alone judge start sum_firth sum_scores",
    takes={
        "observed": control("whether to sum the observed information", 0),
        **COLUMNS,
        "beta": aggregate(BETA, optional=True, common=True),
        "null": NULL,
    },
    releases={
        **SCORES,
        "observed": summed("observed information", 2, optional=True),
        "null": summed("the same without covariates", optional=True),
    },
)
def sum_scores(
    data: SiteData,
    state: State,
    observed: Array,
    shift: Floats,
    scale: Floats,
    beta: Floats | None = None,
    null: Array | None = None,
) -> dict[str, Array]:
    """Sum score and information over the rows.

    `shift` and `scale` (p,) are mean and standard deviation of the columns over all sites. `beta` (p,) are
    coefficients of columns so standardized; without them the sums are those of the start of IRLS. `null` is
    the intercept of the model without covariates, `observed` whether to add the observed information. It
    releases ``inside``, whether all means are inside the distribution's domain, and ``spread``, whether more
    than a few rows have weight in the sums. If one of the two is false, the following are zero and reveal
    nothing: ``score`` (p,), ``information`` and ``observed`` (p, p); ``totals``: sum of the frequency
    weights, deviance, Pearson's statistic; ``null``: score, information, deviance.
    """
    model, more = model_of(state), bool(observed)
    place = None if beta is None else model.place(shift, scale, beta)
    T = standard_place(model.opened, shift, scale) if place is None else place.to_own
    without = {}
    if null is not None:
        without["null"] = np.array(null_sums(model.chunks(), float(null), model.distribution)[:3])
    if place is None:
        # No coefficients were chosen: the weights are those of the data, and single out no row.
        state.report(*AT_THE_START)
        sums = evaluate(model.chunks(), None, model.distribution)
    else:
        sums = sums_at(state, model, place.own, more, describe_nothing(model.p, more) | without)
    if more:
        assert sums.observed is not None
        without["observed"] = T.T @ sums.observed @ T
    return describe_sums(sums, T) | without


@step(
    FAMILY,
    "sum_firth sum_scores",
    takes={
        **COLUMNS,
        "beta": aggregate(BETA, common=True),
        "dispersion": aggregate("dispersion, for the likelihoods with and without covariates", common=True),
        "null": aggregate("intercept of the model without covariates", 0, common=True),
        "meat": control("whether to sum products of rows' scores", 0),
        "apart": control("whether to sum the score test of equal coefficients", 0),
    },
    releases={
        "defined": control("which of the sums are finite", maskable=True),
        "fit": summed("log-likelihoods with and without covariates"),
        "meat": summed("sum of outer products of rows' scores", 2, optional=True),
        "apart": summed("score test of equal coefficients: the site's part, and its rank", optional=True),
    },
)
def judge(
    data: SiteData,
    state: State,
    beta: Floats,
    shift: Floats,
    scale: Floats,
    dispersion: Array,
    null: Array,
    meat: Array,
    apart: Array,
) -> dict[str, Array]:
    """Sum the values needed at the estimate; refused if a few rows have nearly all weight.

    `beta`, `shift`, `scale` and `null` are as in :func:`sum_scores`, `dispersion` (2,) is that for the
    log-likelihood and for the one without covariates. It releases ``fit``: log-likelihood, and log-likelihood
    and deviance without covariates. On request it also releases ``meat`` (p, p), the outer products of the
    rows' scores; and ``apart`` (2,), the site's part of the score test of equal coefficients, see
    :func:`fedstat.inference.homogeneity_tests.quadratic_form`.
    """
    model = model_of(state)
    own, T = model.place(shift, scale, beta)
    check_lengths(data.name, dispersion=(dispersion, 2))
    at = sums_at(state, model, own)
    # Both likelihoods need the final dispersion, which is known only after the last sum_scores.
    llf = log_likelihood(model.chunks(), own, model.distribution, float(dispersion[0]))
    without = null_sums(model.chunks(), float(null), model.distribution, float(dispersion[1]))
    fit = np.array([llf, without.log_likelihood, without.deviance])
    arrays = {"defined": np.isfinite(fit), "fit": np.where(np.isfinite(fit), fit, 0.0)}
    if meat:
        state.report(*model.products_at(own))
        products = outer_products(model.chunks(), own, model.distribution)
        arrays["meat"] = np.zeros_like(T) if products is None else T.T @ products @ T
    if apart:
        varies = model.opened.varies
        arrays["apart"] = np.array(quadratic_form(at.score[varies], at.information[np.ix_(varies, varies)]))
    return arrays


@step(
    FAMILY,
    "judge",
    takes={**COLUMNS, "beta": aggregate(BETA, common=True), **LEVERAGES},
    releases=cluster_releases(SUMS),
)
def sum_site(
    data: SiteData,
    state: State,
    beta: Floats,
    shift: Floats,
    scale: Floats,
    inverse: Floats | None = None,
    power: Array | None = None,
) -> dict[str, Array]:
    """Sum what a covariance with sites as clusters needs, see :func:`sum_corrected`.

    `beta`, `shift` and `scale` (p,) are as for ``sum_scores``, `inverse` (p, p) is the inverse information of
    all sites' rows at them, and `power` that of one less a leverage.
    """
    model = model_of(state)
    own, T = model.place(shift, scale, beta)
    at = sums_at(state, model, own)
    whole, units = T.T @ at.information @ T, model.units(shift, scale, beta)
    request = LeverageRequest.of(data.name, whole, units, inverse, power)
    return sum_corrected(state, request, (T.T @ at.score)[None], lambda _: whole[None])


@step(FAMILY, "judge", takes={**COLUMNS, "beta": aggregate(BETA, common=True)}, releases=RELEASES)
def sum_weighted(
    data: SiteData, state: State, beta: Floats, shift: Floats, scale: Floats
) -> dict[str, Array]:
    """Sum what the covariance with estimated weights needs; see :func:`sum_stacked`."""
    model = model_of(state)
    own, T = model.place(shift, scale, beta)
    sums_at(state, model, own)
    return sum_stacked(state, model.opened, model.row_scores(own) @ T, model.residuals(own), own.tobytes())


# ----------------------------------------------------------------------------------------------------
# Sums of scores by cluster and stratum at a site, for clustered and for survey variances.
#
# The coordinator must know which clusters occur at several sites, but no label. It receives keyed hashes; the
# sites share the key, and the coordinator does not have it.

MAX_CLUSTER_CELLS = 2**24
"""Largest number of values by clusters or strata of several sites."""


@dataclass(frozen=True, slots=True, eq=False)
class RowClusters:
    """Clusters of a site's rows: `code` (n,) numbers the cluster of each complete row.

    `cluster` (G,) are keyed hashes of the clusters' labels, `stratum` (G,) of their strata's; 0 without
    strata. `columns` name them.
    """

    code: Ints
    cluster: Ints
    stratum: Ints
    columns: tuple[str, ...]

    def among(self, chosen: Bools) -> Ints:
        """Return the number of each row's cluster among the chosen ones (G,), -1 in others: (n,)."""
        return np.where(chosen, np.cumsum(chosen) - 1, -1)[self.code]


HASHES = presence("keyed hashes of the labels of clusters")
STRATA = presence("keyed hashes of the labels of strata")
CLUSTER_FACTS = (*SUMS, facts.ClusterRowCounts, facts.ClusterProducts)


@step(
    FAMILY,
    "judge",
    releases={"clusters": HASHES, "strata": STRATA},
    requests=schema("columns of clusters and strata"),
)
def list_clusters(data: SiteData, state: State, text: str) -> dict[str, Array]:
    """Return the site's clusters and strata as keyed hashes; an error if a cluster is in two strata.

    `text` is JSON: ``clusters`` and ``strata``, the columns (``strata`` may be null). It releases
    ``clusters`` (G,) and ``strata`` (S,).
    """
    model, content = model_of(state), json.loads(text)
    columns = [content["clusters"], *([] if content["strata"] is None else [content["strata"]])]
    if not set(columns) <= set(model.opened.question.labels):
        raise MessageError(f"{data.name}: the model did not open columns {columns} as labels")
    labels = [
        pd.concat([rows.frame[name].astype(object) for rows, _ in model.opened.chunks()]) for name in columns
    ]
    code, cluster = _hash_column(labels[0], data.common_seed)
    stratum = np.zeros(len(cluster), dtype=np.int64)
    if len(columns) > 1:
        own, strata = _hash_column(labels[1], data.common_seed)
        # One pair for each cluster, unless its rows lie in several strata.
        pairs = np.unique(np.column_stack([code, own]), axis=0)
        if len(pairs) != len(cluster):
            raise DesignError(
                f"site {data.name!r}: {len(pairs) - len(cluster):,} labels of '{columns[0]}' are in "
                f"more than one of '{columns[1]}'; give clusters labels that are unique over strata"
            )
        stratum[pairs[:, 0]] = strata[pairs[:, 1]]
    state.keep("glm groups", RowClusters(code, cluster, stratum, tuple(columns)), state.entities)
    return {"clusters": np.sort(cluster), "strata": np.unique(stratum)}


def _hash_column(labels: pd.Series, key: int) -> tuple[Ints, Ints]:
    """Return the label's number for every row, (n,), and the hashes of the labels, (G,)."""
    code, found = pd.factorize(labels)
    return code.astype(np.int64), hash_labels(plain_labels(pd.Index(found)), key)


@step(
    FAMILY,
    "list_clusters",
    takes={
        **COLUMNS,
        **LEVERAGES,
        "beta": aggregate(BETA, common=True),
        "shared": presence("keyed hashes of clusters that several sites have", dtype="int64", common=True),
        "spanning": presence("keyed hashes of strata that several sites have", dtype="int64", common=True),
    },
    releases={
        **cluster_releases(CLUSTER_FACTS),
        "counts": summed("clusters by stratum that several sites have", behind=CLUSTER_FACTS),
        "sums": summed("sums of scores by stratum", 2, behind=CLUSTER_FACTS),
        "outer": summed("sums of products of clusters' scores by stratum", 3, behind=CLUSTER_FACTS),
        "shared": HASHES,
        "shared_strata": STRATA,
        "shared_sums": summed("scores of clusters that several sites have", 2, behind=CLUSTER_FACTS),
        "shared_information": summed(
            "information of clusters that several sites have", 3, optional=True, behind=CLUSTER_FACTS
        ),
        "within": summed("variance between clusters in strata of the site alone", 2, behind=CLUSTER_FACTS),
        "lonely": aggregate(
            "number of strata, and of those with one cluster", maskable=True, behind=CLUSTER_FACTS
        ),
        "nested": control(
            "whether every absorbed level is in one cluster, by effect", maskable=True, optional=True
        ),
        "levels": aggregate(
            "absorbed levels, by effect",
            maskable=True,
            optional=True,
            behind=(facts.EntityCount, facts.AbsorbedLevels, facts.RowGroups),
        ),
    },
)
def sum_clusters(
    data: SiteData,
    state: State,
    beta: Floats,
    shift: Floats,
    scale: Floats,
    shared: Ints,
    spanning: Ints,
    inverse: Floats | None = None,
    power: Array | None = None,
) -> dict[str, Array]:
    """Sum products of clusters' scores; refused if too few rows are behind one of the sums.

    `beta`, `shift` and `scale` (p,) are as for ``sum_scores``. `shared` (s,) are ascending hashes of clusters
    that other sites have as well, whose scores are summed one by one. `spanning` (h,) are hashes of strata
    that other sites have as well, whose other clusters are summed by stratum; without strata 0, the one
    stratum of all.

    With `inverse` (p, p), the inverse information of all sites' rows, and `power`, of one less a leverage, it
    releases what :func:`sum_corrected` does for the clusters of this site alone; and for the shared ones
    ``shared_information`` (s, p, p), unless `power` is zero. Sums by stratum are zero then.

    Without them it releases for the other clusters of `spanning` strata: ``counts`` (h,), ``sums`` (h, p),
    ``outer`` (h, p, p). For the shared clusters: ``shared_sums`` (s, p), and ``shared``, ``shared_strata``,
    those at this site and their strata. For all strata of this site alone together: ``within`` (p, p), their
    part of the linearized variance, and ``lonely``, their number and the number with a single cluster.
    Clusters and strata that are not at this site have zeros, since only the sums over sites are needed,
    except for the hashes. Where effects are absorbed, it also releases the number of ``levels`` of each (E,),
    and whether these are ``nested`` in the clusters.
    """
    model = model_of(state)
    own, T = model.place(shift, scale, beta)
    groups = state.use("glm groups", RowClusters, "clusters were not listed; request 'list_clusters' first")
    p = len(beta)
    _check_hashes(data.name, "shared", shared, p)
    _check_hashes(data.name, "spanning", spanning, p * p)
    # Three disjoint kinds: shared clusters, others of spanning strata, and those of this site's own strata.
    single: Bools = np.isin(groups.cluster, shared)
    spans: Bools = np.isin(groups.stratum, spanning) & ~single
    alone: Bools = ~spans & ~single
    rows = np.bincount(groups.code, minlength=len(groups.cluster))
    by_stratum = [int(rows[spans & (groups.stratum == stratum)].sum()) for stratum in spanning]
    # Each sum below is an aggregate of its own: the disclosure checks count the rows behind each.
    state.report(facts.ClusterRowCounts([*rows[single].tolist(), *by_stratum, int(rows[alone].sum())]))
    state.report(facts.ClusterProducts(model.shared_columns(groups.code), groups.columns))
    state.report(*model.facts_at(own), *model.products_at(own))
    scores = model.cluster_scores(own, groups.code, len(rows)) @ T
    spanned = [scores[spans & (groups.stratum == stratum)] for stratum in spanning]
    shared_sums, found = np.zeros((len(shared), p)), np.searchsorted(shared, groups.cluster[single])
    shared_sums[found] = scores[single]
    within, lonely = _within_strata(scores[alone], groups.stratum[alone])
    arrays: dict[str, Array] = {}
    if inverse is not None:
        whole, units = T.T @ sums_at(state, model, own).information @ T, model.units(shift, scale, beta)
        request = LeverageRequest.of(data.name, whole, units, inverse, power)
        code = groups.among(~single)

        def information(part: slice) -> Floats:
            return T.T @ model.cluster_information(own, code, part) @ T

        arrays = sum_corrected(state, request, scores[~single], information)
        if request.power:
            # Products of a shared cluster are more than its score: they need more rows.
            state.report(facts.ClusterRowCounts(rows[single].tolist(), equations=p + 1))
            arrays["shared_information"] = np.zeros((len(shared), p, p))
            together = model.cluster_information(own, groups.among(single), slice(0, int(single.sum())))
            arrays["shared_information"][found] = T.T @ together @ T
        spanned = [part[:0] for part in spanned]
    if effects := model.opened.question.absorbed:
        frame = pd.concat([rows.frame for rows, _ in model.opened.chunks()])
        of_effects = level_codes(frame, effects)
        arrays["levels"] = np.array([each.max() + 1.0 for each in of_effects])
        both = [np.unique(np.column_stack([each, groups.code]), axis=0) for each in of_effects]
        arrays["nested"] = np.array([*map(len, both)]) == arrays["levels"]
    return arrays | {
        "counts": np.array([float((spans & (groups.stratum == stratum)).sum()) for stratum in spanning]),
        "sums": np.array([part.sum(axis=0) for part in spanned]).reshape(-1, p),
        "outer": np.array([part.T @ part for part in spanned]).reshape(-1, p, p),
        "shared": groups.cluster[single],
        "shared_strata": groups.stratum[single],
        "shared_sums": shared_sums,
        "within": within,
        "lonely": lonely,
    }


def _check_hashes(site: str, name: str, hashes: Ints, size: int) -> None:
    """Require ascending hashes, for no more sums of `size` each than a message may hold."""
    if (np.diff(hashes) <= 0).any() or len(hashes) * size > MAX_CLUSTER_CELLS:
        raise MessageError(f"{site}: array '{name}' must ascend, and have at most {MAX_CLUSTER_CELLS:,} sums")


def _within_strata(scores: Floats, stratum: Ints) -> tuple[Floats, Ints]:
    """Sum n_h / (n_h - 1) sum_i (u_hi - mean_h)(u_hi - mean_h)' over strata; count them and the lonely."""
    p = scores.shape[1]
    total, strata = np.zeros((p, p)), np.unique(stratum)
    lonely = 0
    for one in strata:
        part = scores[stratum == one]
        if len(part) < 2:
            lonely += 1
            continue
        part = part - part.mean(axis=0)
        total += len(part) / (len(part) - 1.0) * (part.T @ part)
    return total, np.array([len(strata), lonely])
