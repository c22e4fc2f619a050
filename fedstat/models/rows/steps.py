"""Steps of a site for every likelihood over rows: start, own fit, sums at a point, sums at the estimate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from fedstat.federation.design.horizontal_steps import rows_of
from fedstat.federation.disclosure.facts import ClusterProducts, OwnFit, OwnFitProblem
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_lengths, control
from fedstat.inference.homogeneity_tests import quadratic_form
from fedstat.models.horizontal.clusters import LEVERAGES, LeverageRequest, cluster_releases, sum_corrected
from fedstat.models.horizontal.rows import AT_THE_START, SUMS, summed
from fedstat.models.rows.objective import OBJECTIVES, FitRows, Objective, Place, SiteSums
from fedstat.typing import Array, Floats

Kind = TypeVar("Kind", bound=FitRows)
SPREAD = control("whether more than a few rows weigh", 0, maskable=True)


def releases_of(objective: type[Objective]) -> dict[str, ArrayDeclaration]:
    """Declare the sums at a point."""
    what = objective.what
    return {
        "spread": SPREAD,
        "score": summed(what["score"]),
        "information": summed(what["information"], 2),
        "loglik": summed(what["loglik"], 0),
    }


def rows_in(state: State, kind: type[Kind]) -> Kind:
    """Return this fit's rows; MessageError if the fit was not started here."""
    rows_of(state, absorbed=True)
    return state.use(kind.family, kind, "this fit was not started here; request 'start' first")


def enter_start(kind: type[FitRows]) -> None:
    """Make the steps ``start`` and ``fit_alone`` of a family, and register it."""
    OBJECTIVES[kind.family] = kind

    @step(kind.family, releases=kind.starts, request=kind.request_type, requests=kind.requests)
    def start(data: SiteData, state: State, request: Any) -> dict[str, Array]:
        """Check and sort the rows, and count them."""
        site, found = kind.begin(data, state, request)
        state.keep(kind.family, site, state.entities)
        return found

    @step(
        kind.family,
        "start",
        releases=kind.own_fit,
        replies=control("what hindered the fit of the site's rows alone"),
    )
    def fit_alone(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
        """Fit this site's rows alone, and release the fit; the text has the ``problem`` that prevented it."""
        site = rows_in(state, kind)

        def instead(problem: str) -> tuple[dict[str, Array], str]:
            arrays = {name: np.zeros(shape) for name, shape in site.own_shapes.items()}
            return arrays, json.dumps({"problem": problem})

        sums, rank = site.column_sums, int(site.opened.absorbed[0])
        state.report(OwnFit(site.own_numbers, sums, instead, site.own_weighted, rank))
        arrays, problem = site.fit_own()
        if problem:
            state.report(OwnFitProblem(problem, site.key, instead))
        return arrays, json.dumps({"problem": problem})


def scores_at(state: State, site: Objective, place: Place, declined: bool = True) -> dict[str, Array]:
    """Sum score, information and log-likelihood at a point; with `declined` it may ask for another point."""
    sums, q = site.sums(place.own), place.to_own.shape[1]
    nothing = {"spread": np.array(False), "score": np.zeros(q), "information": np.zeros((q, q))}
    nothing |= {"loglik": np.array(0.0)}
    if not sums.finite:
        # Nothing is summed where a row has no probability.
        state.report(*AT_THE_START)
        return nothing
    state.report(*site.facts_at(place.own, sums, nothing if declined else None))
    return {"spread": np.array(True), **translated(sums, place), "loglik": np.array(sums.loglik)}


def translated(sums: SiteSums, place: Place) -> dict[str, Array]:
    """Return score and information for the parameters of the request."""
    C = place.to_own
    return {"score": C.T @ sums.score, "information": C.T @ sums.information @ C}


def enter_steps(objective: type[Objective]) -> None:
    """Make the steps of a likelihood over rows, and register it by the name of its family."""
    enter_start(objective)
    family = objective.family

    @step(family, "start fit_alone sum_scores", takes=objective.point, releases=releases_of(objective))
    def sum_scores(data: SiteData, state: State, **point: Floats) -> dict[str, Array]:
        """Sum score (q,), information (q, q) and log-likelihood over the rows at the parameters of a point.

        Parameters are for columns standardized over all sites. ``spread`` is false, and all else zero, if few
        rows have nearly all weight at these parameters, or a row has no probability.
        """
        site = rows_in(state, objective)
        return scores_at(state, site, site.place(**point))

    @step(
        family,
        "sum_scores",
        takes={
            **objective.point,
            **LEVERAGES,
            "meat": objective.meat,
            "apart": control("whether to sum the score test of equal coefficients", 0),
        },
        releases={
            **objective.extra,
            **cluster_releases(SUMS),
            "clusters": summed("number of clusters", 0, optional=True, behind=(*SUMS, ClusterProducts)),
            "apart": summed("score test of equal coefficients: the site's part, and its rank", optional=True),
        },
    )
    def finish(
        data: SiteData,
        state: State,
        meat: Array,
        apart: Array,
        inverse: Floats | None = None,
        power: Array | None = None,
        **point: Floats,
    ) -> dict[str, Array]:
        """Sum what the summary needs at the estimate; refused if a few rows have nearly all weight.

        On request it releases ``meat`` (q, q), outer products of the scores of rows; or what
        :func:`fedstat.models.horizontal.clusters.sum_corrected` does for clusters, with their number
        ``clusters``, or for the site, where `inverse` (q, q) is the inverse information of all sites and
        `power` that of one less a leverage. ``apart`` (2,) is the site's part of the score test of equal
        coefficients.
        """
        site = rows_in(state, objective)
        check_lengths(data.name, meat=(meat, objective.meats))
        place = site.place(**point)
        sums = site.sums(place.own)
        state.report(*site.facts_at(place.own, sums))
        by_cluster = bool(meat[1])
        code = site.codes(site.clusters) if by_cluster else None
        arrays = dict(site.at_estimate(place.own, code))
        if meat[1:].any():
            whole = translated(sums, place)
            leverages = LeverageRequest.of(
                data.name, whole["information"], site.units(**point), inverse, power
            )
        if by_cluster:
            arrays |= sum_clusters(state, site, place, code, leverages)
        elif meat[1:].any():
            own = whole["information"]
            arrays |= sum_corrected(state, leverages, whole["score"][None], lambda _: own[None])
        elif meat[0]:
            arrays["meat"] = sum_rows(state, site, place)
        if apart:
            arrays["apart"] = np.array(quadratic_form(sums.score, sums.information))
        return arrays


def sum_rows(state: State, site: Objective, place: Place) -> Floats:
    """Sum outer products of the rows' scores, (q, q), with as many rows as a frequency weight states."""
    state.report(*site.products_at(place.own))
    scores, weight = site.row_scores(place.own) @ place.to_own, site.row_weight
    if weight is not None:
        size = np.sqrt(weight)[:, None]
        scores = np.divide(scores, size, out=np.zeros_like(scores), where=size > 0.0)
    return np.asarray(scores.T @ scores)


def sum_clusters(
    state: State, site: Objective, place: Place, code: Any, leverages: LeverageRequest
) -> Mapping[str, Array]:
    """Sum over the clusters of rows, numbered by `code` (n,); see :func:`sum_corrected`."""
    C = place.to_own
    state.report(*site.products_at(place.own))
    state.report(ClusterProducts(site.shared_columns(code), site.clusters))
    count = int(code.max()) + 1
    by_cluster = site.cluster_scores(place.own, code, count) @ C

    def information(part: slice) -> Floats:
        return C.T @ site.cluster_information(place.own, code, part) @ C

    margins = site.margins(place.own, code, C) if leverages.power else None
    found = sum_corrected(state, leverages, by_cluster, information, margins)
    return {"clusters": np.array(float(count)), **found}
