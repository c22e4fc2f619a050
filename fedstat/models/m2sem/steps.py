"""Steps of a site: EM updates, factor scores, and its information matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
from scipy.cluster.vq import kmeans2

from fedstat.codec import from_json
from fedstat.errors import DescriptionError, DesignError, MessageError, ModelError, PolicyError, Remedy
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import (
    aggregate,
    check_allocation,
    check_lengths,
    control,
    per_entity,
    presence,
)
from fedstat.federation.protocols.product_steps import COMPARISON_ORDER, ProductPart, product_steps
from fedstat.federation.tables.supports import PER_COLUMN, Supports, supports_of_columns
from fedstat.models.m2sem.columns import COLUMNS_ITEM, OpenedModalities
from fedstat.models.m2sem.information import local_information
from fedstat.models.m2sem.local_mixtures import LocalMixture, SessionMixtures, restored
from fedstat.models.m2sem.request import (
    FAMILY,
    MOST_CLUSTERS,
    BeginRequest,
    ModalityRequest,
    PredictRequest,
    RoundRequest,
    by_pattern,
    digest_posteriors,
    split_columns,
)
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of one site of a mixture: local factor analyses, EM steps with fixed posteriors, log densities.
#
# For each entity, only differences of log densities are released, to be added up over sites under masks. The
# posteriors come from outside. Their sender could make a cluster of one entity, whose means would reveal that
# entity. A site therefore refuses posteriors that leave too few entities in a cluster. A sender that gives
# one site other values than the rest could compute that site's part of a sum. Everything that affects a
# mixture is therefore bound into the masks.

MIXTURES = "m2sem mixtures"
NOT_BEGUN = "this fit was not started here; ask 'begin' first"


def session_mixtures(state: State) -> SessionMixtures:
    """Return the state of the fit at the site."""
    return state.use(MIXTURES, SessionMixtures, NOT_BEGUN)


POSTERIORS = per_entity(
    "posterior probabilities of clusters, of the site's entities",
    2,
    dtype="float64",
    weighs="posterior probabilities of clusters",
)
SLOT = control("which mixture", 0)
DIFFERENCES = per_entity("log densities given each cluster, less that of the last", 2, maskable=True)
BEHIND: tuple[type, ...] = (facts.EntityCount, facts.CaseWeights)
RELEASED: tuple[type, ...] = (*BEHIND, facts.RowGroups, facts.WeightedEstimates)
MEMBERS: tuple[type, ...] = (*RELEASED, facts.GroupSums)
ADJUSTED: tuple[type, ...] = (*RELEASED, facts.FactorsRequested, facts.SummedColumns)


@step(
    FAMILY,
    takes={
        "place": presence("positions of the site's entities", dtype="int64"),
        "pattern": presence("presence pattern of every entity", dtype="int64", common=True),
        "members": presence("sites that each pattern has", 2, dtype="bool", common=True),
        "number": control("which of these it is", 0),
    },
    releases={"skewed": aggregate("skewed columns", dtype="bool")},
    rows_behind=(facts.EntityCount,),
    request=BeginRequest,
    requests=control("numbers of factors and nodes", common=True),
)
def begin(
    data: SiteData,
    state: State,
    request: BeginRequest,
    place: Ints,
    pattern: Ints,
    members: Bools,
    number: Array,
) -> dict[str, Array]:
    """Run the factor analysis of every modality, with one cluster; release which columns are skewed.

    `place` (n,) are the positions, among all entities, of the site's rows with some value. `pattern` (N,)
    gives the presence pattern of each entity, and `members` (G, M) the sites of each pattern; this site is
    number `site`.
    """
    opened = state.use(COLUMNS_ITEM, OpenedModalities, "its columns are not open; make the model again")
    total, (groups, sites) = len(pattern), members.shape
    check_lengths(data.name, place=(place, int(opened.seen.sum())))
    if not 0 <= int(number) < sites or (total and not 0 <= pattern.min() <= pattern.max() < groups):
        raise MessageError(f"{data.name}: expected a site and patterns that are among the members")
    mine = members[:, int(number)]
    # Otherwise sites could receive different patterns for one entity, and with them different posteriors.
    if not np.array_equal(place, np.flatnonzero(mine[pattern])):
        raise DescriptionError(f"{data.name}: its entities are not those of its presence patterns")
    rows = by_pattern(pattern[place], groups)
    held = SessionMixtures(opened, place, total, {g: rows[g] for g in np.flatnonzero(mine).tolist()}, past="")
    try:
        for factors in request.factors:
            check_allocation(data.name, held_numbers(opened, factors, request.nodes), opened_size(opened))
            held.begin(factors, request.nodes)
    except ModelError as error:
        raise DesignError(f"{data.name}: {error}") from error
    state.keep(MIXTURES, held, len(place))
    state.report(facts.EntityCount(len(place)))
    return {"skewed": skewed_columns(opened)}


def opened_size(opened: OpenedModalities) -> int:
    """Count the open values."""
    return sum(one.values.size for one in opened.modalities)


def held_numbers(opened: OpenedModalities, factors: int, nodes: int) -> int:
    """Count the numbers that an E-step keeps: weights of nodes for every row, if there are nodes."""
    grids = sum(not one.requested.continuous for one in opened.modalities)
    n = int(opened.seen.sum())
    return grids * min(n, 1024) * int(nodes**factors) + n * factors


@step(
    FAMILY,
    "begin",
    takes={
        "clusters": control("number of clusters", 0),
        "factors": control("number of factors", 0),
    },
    releases={"labels": per_entity("clusters by the site's own columns", dtype="int64")},
)
def own_clusters(data: SiteData, state: State, clusters: Array, factors: Array) -> dict[str, Array]:
    """Cluster the site's rows by their own factor scores, or columns, alone: ``labels`` (n,).

    The seed of the first centers depends on the site's name, so repeated requests have the same reply.
    """
    held = session_mixtures(state)
    analysis = held.analyses.get(int(factors))
    if analysis is None or not 1 <= int(clusters) <= min(MOST_CLUSTERS, len(held.place)):
        raise MessageError(f"{data.name}: expected a number of clusters, and of factors that were analyzed")
    workspace = held.workspace(analysis.factors, analysis.nodes)
    workspace.put(analysis)
    state.report(facts.EntityCount(len(held.place)))
    return {"labels": nearest_centers(workspace.scores(), int(clusters), crc32(data.name.encode()))}


def nearest_centers(scores: Floats, clusters: int, seed: int, tries: int = 5) -> Ints:
    """Return the best of several k-means of factor scores: labels (n,)."""
    rng, best, least = np.random.default_rng(seed), np.zeros(len(scores), dtype=np.int64), np.inf
    for _ in range(tries):
        centers, labels = kmeans2(scores, clusters, minit="++", rng=rng, missing="warn")
        spread = float(((scores - centers[labels]) ** 2).sum())
        if spread < least:
            best, least = labels.astype(np.int64), spread
    return best


@step(
    FAMILY,
    "begin own_clusters improve",
    takes={
        "r": POSTERIORS,
        "shares": control("shares of the clusters", dtype="float64", common=True),
        "salts": control("salts of the digests", 2, dtype="uint8"),
    },
    releases={
        "differences": DIFFERENCES,
        "totals": aggregate(
            "sum of log densities given the last cluster, penalty, number of parameters", 2, maskable=True
        ),
        "support": aggregate(
            "columns with loadings, modalities that differ by cluster", 2, optional=True, dtype="bool"
        ),
    },
    rows_behind=BEHIND,
    requests=control("mixtures, local steps, penalties", common=True),
)
def improve(
    data: SiteData, state: State, text: str, r: Floats, shares: Floats, salts: Array
) -> dict[str, Array]:
    """Improve mixtures by EM steps over the factors with fixed posteriors; release the parts of the sums.

    Posteriors r (n, sum of K) and shares of the clusters, (sum of K,), are concatenated over the requested
    mixtures; `salts` (G, w) enter the digests of the posteriors. Released are ``differences`` (N, sum of K -
    1) of log densities from the last cluster's, zero for entities that the site lacks, and ``totals`` (S, 3):
    the sum of log densities given the last cluster, the penalty, the free parameters. If requested for a
    mixture, ``support`` states which columns load and which modalities differ by cluster.
    """
    request = from_json(RoundRequest, text, f"{data.name}: the request about mixtures")
    held = session_mixtures(state)
    widths = [one.clusters for one in request.slots]
    _check_reported(data.name, held, request, r, shares, salts, sum(widths))
    n, wide = len(held.place), sum(widths) - len(widths)
    check_allocation(data.name, held.total * (wide + 1), opened_size(held.opened))
    of_slots, w = split_columns(r, widths), np.split(shares, np.cumsum(widths)[:-1])
    for part in of_slots:
        check_posteriors(state, part)
    D, totals, support = np.zeros((held.total, wide)), np.zeros((len(widths), 3)), []
    first = 0
    for s, one in enumerate(request.slots):
        found = held.improve(data.name, one, np.ascontiguousarray(of_slots[s]), w[s])
        last = found.densities[:, -1]
        D[held.place, first : first + one.clusters - 1] = found.densities[:, :-1] - last[:, None]
        totals[s] = last.sum(), found.penalty, found.parameters
        first += one.clusters - 1
        if one.report:
            support.append(found.support)
    held.only([*request.kept, *(one.slot for one in request.slots)])
    held.past = request.follow(text)
    state.keep(MIXTURES, held, n)
    reported = {"support": np.array(support)} if support else {}
    return {"differences": D, "totals": totals, **reported}


def check_posteriors(state: State, r: Floats) -> None:
    """Let the disclosure check judge each cluster's effective number of entities: (sum r)^2 / sum r^2."""
    for k, (total, squares) in enumerate(
        zip(r.sum(axis=0).tolist(), (r * r).sum(axis=0).tolist(), strict=True)
    ):
        state.report(facts.CaseWeights(total, squares, (f"cluster {k + 1}",)))


def _check_reported(
    site: str,
    held: SessionMixtures,
    request: RoundRequest,
    r: Floats,
    shares: Floats,
    salts: Array,
    width: int,
) -> None:
    """Require posteriors that all sites received alike, after the same earlier messages."""
    check_lengths(
        site, r=(r, len(held.place)), shares=(shares, width), salts=(salts, len(request.posteriors))
    )
    if r.shape[1] != width or (r.size and not (r.min() >= 0.0 and r.max() <= 1.0)):
        raise MessageError(f"{site}: expected posteriors between 0 and 1, of {width} clusters")
    same = request.past == held.past and max(held.groups, default=-1) < len(request.posteriors)
    for g, rows in held.groups.items() if same else ():
        same &= digest_posteriors(salts[g].tobytes(), r[rows]) == request.posteriors[g]
    if not same:
        raise DescriptionError(
            f"{site}: these posteriors, or earlier ones, are not those that all sites receive. A sender of "
            "different posteriors could compute the part of one site from the sum; nothing was computed"
        )


@step(
    FAMILY,
    "improve",
    takes={"slot": SLOT, "order": control("order of the clusters", dtype="int64")},
    releases={
        "parameters": aggregate("parameters of the modalities"),
        "profiles": aggregate("means and probabilities by cluster", 2),
        "relevance": aggregate("distance of the clusters in each modality"),
        "units": aggregate("means and deviations of columns"),
        "norms": aggregate("lengths of loadings"),
        "floor": aggregate("columns whose errors have the least variance", dtype="bool"),
        "members": aggregate("means and shares of the most likely entities by cluster", 2, behind=MEMBERS),
        "shown": aggregate("columns with these means and shares", dtype="bool", behind=MEMBERS),
        "covariates": aggregate("means and deviations of covariates", 2, optional=True, behind=ADJUSTED),
        "effects": aggregate("effects of covariates on columns", 2, optional=True, behind=ADJUSTED),
    },
    rows_behind=RELEASED,
    replies=aggregate("coding of covariates, with the state of transforms", behind=ADJUSTED),
)
def release_modalities(
    data: SiteData, state: State, text: str, slot: Array, order: Ints
) -> tuple[dict[str, Array], str]:
    """Release the parameters of one mixture, and the profiles of its clusters in another `order` (K,).

    ``parameters`` of all modalities, one after the other, in ``units`` of their columns; ``profiles`` (K, sum
    of P C), means of columns or probabilities of levels by cluster; ``relevance`` (M,), the distance of the
    clusters in each modality, with ``norms`` (sum of P,) of loadings; ``floor`` (sum of P,), whether a
    column's errors have the smallest variance that is allowed. ``members`` (K, sum of P C) are means and
    shares of the entities with each most likely cluster, 0 for columns that are not ``shown`` (sum of P,)
    because the policy does not allow these sums. For covariates, ``covariates`` (2, q) are
    means and deviations, and ``effects`` (R, q) the effect of one unit on columns, or on logits of levels;
    the text has their coding.
    """
    held = session_mixtures(state)
    found, r = one_mixture(data, held, slot)
    if not np.array_equal(np.sort(order), np.arange(r.shape[1])):
        raise MessageError(f"{data.name}: expected an order of {r.shape[1]} clusters")
    rows = np.flatnonzero(held.opened.seen)
    if held.reported is not None and held.reported is not found:
        raise DescriptionError(
            f"{data.name}: a fit releases the estimates of one mixture, and those of another were released. "
            "Estimates from two sets of posteriors that differ in one entity would reveal that entity. "
            "Start another fit"
        )
    # All that follows uses the posteriors behind the parameters, also in place of those that were sent last.
    # At the end of a fit both are nearly equal, so their difference belongs almost entirely to the few rows
    # that still move, and sums under both would reveal these.
    r = np.ascontiguousarray((r if found.shaped is None else found.shaped)[:, order])
    check_posteriors(state, r)
    state.report(facts.RowGroups("", np.argmax(r, axis=1).astype(np.int64), rows))
    state.report(facts.WeightedEstimates(r, rows))
    workspace = held.workspace(found.factors, found.nodes)
    workspace.put(found)
    for m in workspace.modalities:
        m.means = m.means[order]
    weights = [(one.weights, one.weight) for one in found.modalities]
    held.reported = workspace.take(found.factors, found.nodes, weights, r, r)
    held.slots[int(slot)] = held.reported
    state.keep(MIXTURES, held, len(held.place))
    shares = r.mean(axis=0)
    members, shown = sum_members(data, state, held.opened, np.argmax(r, axis=1), r.shape[1])
    if not found.factors:
        check_classes(data.name, held.opened, shown)
    covariates, reported = held.opened.covariates, {}
    if covariates is not None:
        effects = np.concatenate([m.effects() for m in workspace.modalities])
        reported = {"covariates": covariates.units, "effects": effects / covariates.units[1]}
    return {
        "parameters": np.concatenate([m.state() for m in workspace.modalities]),
        "units": np.concatenate([m.units for m in workspace.modalities]),
        "profiles": np.hstack(
            [np.nan_to_num(m.profile()).reshape(m.clusters, -1) for m in workspace.modalities]
        ),
        "relevance": np.array([m.separation(shares) for m in workspace.modalities]),
        "norms": np.concatenate([m.row_norms() for m in workspace.modalities]),
        "floor": np.concatenate([np.isin(m.names, m.at_floor) for m in workspace.modalities]),
        "members": members,
        "shown": shown,
        **reported,
    }, "" if covariates is None else covariates.spec.to_json()


def check_classes(site: str, opened: OpenedModalities, shown: Bools) -> None:
    """Refuse estimates of latent classes that are sums by cluster which the policy does not allow.

    Means and probabilities are those of the columns under the posteriors, and thus nearly sums over members.
    The levels of an ordinal column have one number for each cluster, and not one for each level.
    """
    columns = [column for one in opened.modalities for column in one.requested.columns]
    few = [c.name for c, ok in zip(columns, shown.tolist(), strict=True) if not ok and c.kind != "ordinal"]
    if few:
        raise PolicyError(
            f"{site}: its policy (minimum rows per level) does not allow sums by cluster of "
            f"{', '.join(map(repr, few))}, which are the estimates of latent classes: in some cluster, few "
            "rows have a level, or one row has most of a sum. Merge rare levels, leave the columns out or "
            "take fewer clusters",
            rule="minimum rows per level",
            site=site,
            remedy=Remedy("from_formula(..., n_factors=1).fit(...)", ", or use {arguments}"),
        )


def sum_members(
    data: SiteData, state: State, opened: OpenedModalities, code: Ints, K: int
) -> tuple[Floats, Bools]:
    """Return means and shares of every column over the entities of each cluster `code` (n,).

    They are (K, sum of P C), in the order of the profiles, and whether each column is shown (sum of P,). A
    column is left out as a whole, since the sum of one cluster would follow from those of the others.
    """
    widths = [one.requested.most_levels for one in opened.modalities for _ in one.requested.columns]
    try:
        state.report(facts.GroupSums(code))
    except PolicyError:
        # Too few entities have a most likely cluster, whose weights may still be many.
        return np.zeros((K, sum(widths))), np.zeros(len(widths), dtype=np.bool_)
    parts, shown = [], []
    for one in opened.modalities:
        C = one.requested.most_levels
        for p, column in enumerate(one.requested.columns):
            values, means = one.values[:, p], np.zeros((K, C))
            there = ~np.isnan(values) if one.requested.continuous else values >= 0
            cells = values[there] if one.requested.continuous else np.eye(C)[values[there].astype(int)]
            own, cells = code[there], cells.reshape(-1, C)
            try:
                if len(np.unique(own)) < K:
                    raise PolicyError(f"{data.name}: a cluster has no entity")
                if not one.requested.continuous:
                    for k in range(K):
                        counts = cells[own == k].sum(axis=0).astype(int).tolist()
                        state.report(facts.LevelRowCounts(column.name, counts))
                summed = facts.SummedColumns(cells, own) if one.requested.continuous else None
                state.report(facts.GroupSums(own, summed=summed))
                means = np.array([cells[own == k].mean(axis=0) for k in range(K)])
                shown.append(True)
            except PolicyError:
                # The reason is not stated: it may depend on few rows.
                shown.append(False)
            parts.append(means)
    return np.hstack(parts), np.array(shown)


SKEWED = 1.0
"""Skewness of a column beyond which clusters may only describe its shape."""


def skewed_columns(opened: OpenedModalities) -> Bools:
    """Mark continuous columns whose skewness exceeds one, (sum of P,): one bit for each column."""
    out: list[bool] = []
    for one in opened.modalities:
        for p in range(len(one.requested.columns)):
            if not one.requested.continuous:
                out.append(False)
                continue
            x = one.values[:, p][~np.isnan(one.values[:, p])]
            z = (x - x.mean()) / max(float(x.std()), 1e-300)
            out.append(bool(abs(np.mean(z**3)) > SKEWED))
    return np.array(out, dtype=np.bool_)


@step(
    FAMILY,
    "improve release_modalities release_scores",
    takes={"slot": SLOT},
    releases={"scores": per_entity("factor scores of the site's entities", 2)},
)
def release_scores(data: SiteData, state: State, slot: Array) -> dict[str, Array]:
    """Release the factor scores of one mixture, (n, sum of Q), of the site's entities."""
    held = session_mixtures(state)
    found, r = one_mixture(data, held, slot)
    if not found.factors:
        raise DescriptionError(f"{data.name}: latent classes have no factors, and no factor scores")
    workspace = held.workspace(found.factors, found.nodes)
    workspace.put(found)
    workspace.densities()
    return {"scores": np.hstack([m.factor_scores(r) for m in workspace.modalities])}


@step(
    FAMILY,
    "open_columns open_new_columns",
    takes={
        "place": presence("positions of the site's entities", dtype="int64"),
        "total": control("number of entities", 0),
        "parameters": aggregate("parameters of the modalities", dtype="float64"),
        "units": aggregate("means and deviations of columns", dtype="float64"),
        "covariates": aggregate("means and deviations of covariates", 2, optional=True, dtype="float64"),
    },
    releases={"differences": DIFFERENCES},
    request=PredictRequest,
    requests=control("clusters, factors and nodes of the fit", common=True),
)
def predict_densities(
    data: SiteData,
    state: State,
    request: PredictRequest,
    place: Ints,
    total: Array,
    parameters: Floats,
    units: Floats,
    covariates: Floats | None = None,
) -> dict[str, Array]:
    """Release differences (N, K - 1) of the opened rows' log densities, at parameters of a fit.

    `place` (n,) are the positions of the rows with some value among `total` entities; `units` are those of
    the columns in the fit, and `covariates` (2, q) the means and deviations of its covariates.
    """
    opened = state.use(COLUMNS_ITEM, OpenedModalities, "its columns are not open; ask 'open_columns' first")
    if opened.covariates is not None:
        given = np.zeros((2, 0)) if covariates is None else covariates
        opened = replace(opened, covariates=opened.covariates.in_units(data.name, given))
    n, N, wide = int(opened.seen.sum()), int(total), request.clusters - 1
    check_lengths(data.name, place=(place, n))
    check_allocation(data.name, N * max(wide, 1), opened_size(opened))
    if n and not 0 <= place.min() <= place.max() < N:
        raise MessageError(f"{data.name}: expected positions of its entities among {N:,}")
    D = np.zeros((N, wide))
    if n:
        made = restored(data.name, opened, request, parameters, units)
        f = np.asarray(sum(m.log_densities() for m in made))
        D[place] = f[:, :-1] - f[:, -1:]
    return {"differences": D}


def one_mixture(data: SiteData, held: SessionMixtures, slot: Array) -> tuple[LocalMixture, Floats]:
    """Return a mixture that was improved in this fit, and its posteriors."""
    found = held.slots.get(int(slot))
    if found is None or found.r is None:
        raise MessageError(f"{data.name}: there is no mixture {int(slot)} in this fit")
    return found, found.r


SHARES = control("shares of the clusters", dtype="float64")


# ----------------------------------------------------------------------------------------------------
# Steps of one site for the information over sites: its own block, and scores for products.

SCORES_ITEM = "m2sem scores"


@dataclass(frozen=True, slots=True, eq=False)
class LocalScores:
    """Columns (K n, q) at a mean square of one, their units (q,), and their rows of the table (K n,)."""

    columns: Floats
    units: Floats
    rows: Ints
    clusters: int


BITS_RULE = "bits of columns of few values"


def withheld(site: str, policy: Policy, modalities: Sequence[ModalityRequest], adjusted: bool) -> str:
    """State why a site does not release the information of its parameters; empty if it does."""
    if policy.discrete != "bits" or not (adjusted or any(not one.continuous for one in modalities)):
        return ""
    return (
        f"{site}: its policy ({BITS_RULE}) does not allow sums of products of scores of such "
        'columns, which standard errors need; the owner may allow it by the line  discrete = "any"  in '
        "policy.toml"
    )


SCORE_FACTS = (facts.EntityCount, facts.CaseWeights, facts.GroupSums, facts.RowGroups)


@step(
    FAMILY,
    "release_modalities",
    takes={"slot": control("which mixture", 0)},
    releases={
        "own": aggregate("information of the site's own parameters", 2),
        "with_shares": aggregate("information shared with clusters' sizes", 2),
        "jacobian": aggregate("derivatives of profiles in the parameters", 2),
        "communalities": aggregate("shares of variance that factors make up"),
        "crossing": control("how many scores are multiplied with those of others", 0),
    },
    rows_behind=SCORE_FACTS,
)
def open_scores(data: SiteData, state: State, slot: Array) -> dict[str, Array]:
    """Release the information of the site's own parameters, and keep scores for products with other sites'.

    ``own`` (d, d), ``with_shares`` (K, d) and ``jacobian`` (s, d) use coordinates of the parameters that are
    invariant to rotations of the factors; ``crossing`` is how many of them are multiplied.
    """
    held = session_mixtures(state)
    found, r = one_mixture(data, held, slot)
    if found is not held.reported:
        raise MessageError(f"{data.name}: these are not the posteriors of the released estimates")
    workspace = held.workspace(found.factors, found.nodes)
    workspace.put(found)
    request = [one.requested for one in held.opened.modalities]
    if why := withheld(data.name, data.policy, request, held.opened.covariates is not None):
        raise DescriptionError(why, rule=BITS_RULE, site=data.name)
    check_posteriors(state, r)
    covariates = held.opened.covariates
    local = local_information(workspace.modalities, r, None if covariates is None else covariates.units[1])
    n, K, q = local.columns.shape
    if n < 2 * q:
        # Every owner would refuse. This is reported before any release, so that the fit continues without it.
        nothing = np.zeros((0, 0))
        return {
            "own": nothing,
            "with_shares": nothing,
            "jacobian": nothing,
            "communalities": np.zeros(0),
            "crossing": np.array(q),
        }
    rows = np.flatnonzero(held.opened.seen)
    everyone = np.zeros(n, dtype=np.int64)
    state.report(facts.GroupSums(everyone, columns=max(q - 1, 0)), facts.RowGroups("", everyone, rows))
    columns = local.columns.transpose(1, 0, 2).reshape(K * n, q)
    units = np.sqrt(np.mean(columns**2, axis=0))
    units[units == 0.0] = 1.0
    state.keep(SCORES_ITEM, LocalScores(columns / units, units, np.tile(rows, K), K), n)
    return {
        "own": local.own,
        "with_shares": local.with_shares,
        "jacobian": np.vstack([local.jacobian, local.effects]),
        "communalities": local.communalities,
        "crossing": np.array(q),
    }


def columns_of(data: SiteData, state: State, which: str) -> tuple[Floats, Floats]:
    """Scores by cluster, times the root of the posterior."""
    held = state.use(SCORES_ITEM, LocalScores, "its scores are not open; ask 'open_scores' first")
    return held.columns, held.units


def rows_of(state: State, which: str) -> Ints:
    """Rows of the table, once for every cluster."""
    return state.use(SCORES_ITEM, LocalScores, "its scores are not open; ask 'open_scores' first").rows


def behind(
    data: SiteData, state: State, part: ProductPart, rows: Ints, group: Ints, both: Bools, marks: Array
) -> tuple[tuple[facts.GroupSums, facts.RowGroups], Callable[[], None]]:
    """Report that a product is a sum over all entities that both have, and its number of columns."""
    held = state.use(SCORES_ITEM, LocalScores)
    once = rows < len(held.rows) // held.clusters
    code = group[once]
    columns = part.product.columns_a + part.product.columns_b - 1
    return (
        facts.GroupSums(code, columns=columns),
        facts.RowGroups("", code, held.rows[rows[once]]),
    ), lambda: None


def supports_of(data: SiteData, state: State, which: str) -> Supports:
    """Supports of the columns that scores are made of: of every entity those of its first cluster.

    There are as many as if each score were a column, which is more than there are columns.
    """
    held = state.use(SCORES_ITEM, LocalScores)
    opened = session_mixtures(state).opened
    names = [name for modality in opened.modalities for name in modality.requested.names]
    X = np.hstack([modality.values for modality in opened.modalities]).astype(np.float64)
    found, spare = supports_of_columns(X, names, names), held.columns.shape[1] - len(names)
    if spare < 0:
        raise MessageError(f"{data.name}: fewer scores than columns, whose rows are not counted")
    columns = np.hstack([found.columns, np.zeros((len(X), PER_COLUMN * spare), dtype=np.uint8)])
    every = Supports(columns, [*found.names, *[""] * (PER_COLUMN * spare)])
    return every.at(np.arange(len(X)), len(held.rows))


include(
    FAMILY,
    product_steps(columns_of, rows_of, behind, fills=False, supports_of=supports_of),
    {"open_product": "open_scores deal_product open_product", **COMPARISON_ORDER},
)
