"""Protocol of a synthesis: complete rows, margins, and one Gram matrix in noisy shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError, Remedy, SecurityError
from fedstat.federation.crypto.secure_product import MatrixProduct, combine
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseShares
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.noise_shares import agree_shares
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula import correlation
from fedstat.models.copula.joint import (
    JointModel,
    LevelModel,
    PatternScores,
    ScoreLayout,
    ScoreMoments,
    find_adjusted,
    find_joint,
)
from fedstat.models.copula.margins import Bins, Margin, edge_variance, tree_depth
from fedstat.models.copula.request import (
    ALL,
    PLACES,
    FirstRequest,
    GramPlan,
    GramRequest,
    NoisePlan,
    PooledRows,
    RowProductsRequest,
)
from fedstat.models.copula.steps import SCALED, SCORES, digest_of
from fedstat.privacy.zcdp import round_to_grid
from fedstat.typing import Array, Bools, Floats, Ints

FAR = 6.0
"""Deviations of noise beyond which a shortfall of counts is not attributed to noise."""
FEW = 0.01
"""Share of the entities that may be in no bin."""
FEWEST = 50
"""Entities of a pair of sites below which nothing is estimated for their columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Participation:
    """Entities that take part: `rows` of each site among all, and which of these are complete."""

    n_entities: int
    rows: Mapping[str, Ints]
    seen: Mapping[str, Bools]

    def table(self, sites: Sequence[str]) -> Bools:
        """Entities that each site has, complete: (n_entities, K)."""
        out = np.zeros((self.n_entities, len(sites)), dtype=np.bool_)
        for k, site in enumerate(sites):
            out[self.rows[site][self.seen[site]], k] = True
        return out

    def count(self, site: str) -> int:
        """Complete entities of a site."""
        return int(np.count_nonzero(self.seen[site]))

    def everywhere(self) -> tuple[Bools, Participation]:
        """Return the entities that every site holds, (n_entities,), and each site's rows of them."""
        used = np.asarray(self.table(list(self.seen)).all(axis=1), dtype=np.bool_)
        return used, replace(self, seen={site: used[self.rows[site]] for site in self.seen})


@dataclass(frozen=True, slots=True, eq=False)
class CopulaFit:
    """Released values of a synthesis, and the estimates from them.

    `margins` (p,) are in the order of the columns. `products` (q, q) are mean products of cut scores with
    their noise, 0 with `method` "em". `pairs` (q, q) are the entities behind each,
    `noise` (q, q) the deviation of its noise. `sums` has the missing patterns by which products were summed.
    `inversion` is the copula of the columns with an order, `levels` the other columns and missing cells.
    """

    plan: NoisePlan
    sums: GramPlan
    margins: tuple[Margin, ...]
    products: Floats
    pairs: Ints
    noise: Floats
    inversion: correlation.Inversion
    levels: tuple[LevelModel, ...]
    method: correlation.Method
    entities: Mapping[str, int]
    n: int

    @property
    def sites(self) -> list[str]:
        """Site of every column: (p,)."""
        return [site for site, _ in columns_of(self.plan)]

    @property
    def count_noise(self) -> list[float]:
        """Deviation of the noise on counts of every column: (p,)."""
        return count_noise(self.plan)

    @property
    def joint(self) -> JointModel:
        """The joint distribution of all columns."""
        return JointModel(ScoreLayout.of(self.plan), self.margins, self.inversion, self.levels)


@dataclass(frozen=True, slots=True, eq=False)
class SumsByGroup:
    """Sums of products (G, q, q), symmetric, with noise; squares and sums of scores (G, q), or zeros."""

    products: Floats
    squares: Floats
    totals: Floats


def plan_columns(
    bounds: Mapping[str, Mapping[str, PublishedColumn]],
    counts: Mapping[str, int],
    rho: Fraction,
    rows: PooledRows | None = None,
) -> NoisePlan:
    """Choose the bins of all columns, by site, from bounds and numbers of entities."""
    p = sum(map(len, bounds.values()))
    each = float(NoisePlan.of_column(rho, p))
    columns = {
        site: tuple(
            Bins.of(name, column, tree_depth(counts[site], each), atoms=True)
            for name, column in described.items()
        )
        for site, described in bounds.items()
    }
    return NoisePlan(rho, columns, rows=rows)


def columns_of(plan: NoisePlan) -> list[tuple[str, Bins]]:
    """Return the site and the bins of every column."""
    return [(site, one) for site, bins in plan.columns.items() for one in bins]


def count_noise(plan: NoisePlan) -> list[float]:
    """Return the deviation of the noise on counts of every column: (p,)."""
    return [plan.count_deviation(site, j) for site, bins in plan.columns.items() for j in range(len(bins))]


def request_participation(
    requester: SecureProductSession,
    request: Mapping[str, str],
    rows: Mapping[str, Ints],
    n_entities: int,
) -> FitProtocol[Participation]:
    """Request from every site which of its rows take part: those with a value, or complete ones."""
    replies = yield [requester.request(site, "find_complete", text) for site, text in request.items()]
    return Participation(n_entities, rows, {reply.site: reply.arrays["seen"] for reply in replies})


def fit_copula(
    requester: SecureProductSession,
    bounds: Mapping[str, Mapping[str, PublishedColumn]],
    rows: Mapping[str, Ints],
    sites: Sequence[str],
    n_entities: int,
    rho: Fraction,
    missing: correlation.Missing,
) -> FitProtocol[CopulaFit]:
    """Request all values from which a copula is estimated.

    Parameters
    ----------
    requester : Conversation
    bounds : mapping
        Public descriptions of the columns of each site.
    rows : mapping of str to (n_k,) array
        Positions of each site's records among all entities.
    sites : sequence of str
        Sites that may deal random numbers, including the sites with data.
    n_entities : int
    rho : Fraction
        The budget.
    missing : {"auto", "pairs", "em"}
    """
    clients = list(bounds)
    request = {site: to_json(tuple(bounds[site])) for site in clients}
    present = yield from request_participation(requester, request, rows, n_entities)
    counts = {site: present.count(site) for site in clients}
    plan = plan_columns(bounds, counts, rho)
    table = present.table(clients)
    groups = correlation.choose_groups(plan, table, missing)
    behind = groups.behind(table)
    _require(behind, clients, groups.method)
    margins = yield from request_margins(requester, plan, present, groups.plan.site_cost)
    plan = replace(plan, gaps=_gaps(margins))
    groups = replace(groups, plan=replace(groups.plan, noise=plan))
    requests = {site: groups.plan.requested(site) for site in clients}
    held = {c: groups.of_site(c, table[:, k])[rows[c]] for k, c in enumerate(clients)}
    sums = yield from request_pattern_sums(requester, plan, requests, held, present, margins, sites)
    return _fit_of_sums(groups, margins, sums, table, counts)


def fit_copula_rows(
    requester: SecureProductSession,
    bounds: Mapping[str, PublishedColumn],
    rows: PooledRows,
    policies: Mapping[str, Policy],
    rho: Fraction,
) -> FitProtocol[CopulaFit]:
    """Request all values from which a copula is estimated of sites with different rows of the same columns.

    `policies` are those of the sites, which share the noise of sums if their owners allow it.
    """
    plan = plan_columns({ALL: bounds}, {ALL: rows.n}, rho, rows)
    table = np.ones((rows.n, 1), dtype=np.bool_)
    groups = correlation.choose_groups(plan, table, "pairs")
    plan, margins, products = yield from release_rows(requester, plan, policies)
    groups = replace(groups, plan=replace(groups.plan, noise=plan))
    none = np.zeros((1, len(products)))
    return _fit_of_sums(groups, margins, SumsByGroup(products[None], none, none), table, {ALL: rows.n})


def release_rows(
    requester: SecureProductSession, plan: NoisePlan, policies: Mapping[str, Policy]
) -> FitProtocol[tuple[NoisePlan, dict[str, list[Margin]], Floats]]:
    """Request the margins and the sums of products (q, q) over rows; the plan has the columns with gaps."""
    assert plan.rows is not None
    shares = yield from agree_shares(policies, requester.session)
    counts = yield from sum_margins(requester, plan, shares)
    margins = {ALL: margins_of(plan, ALL, counts, plan.rows.n)}
    plan = replace(plan, gaps=_gaps(margins))
    products = yield from sum_products(requester, plan, shares, margins[ALL])
    return plan, margins, products


def _fit_of_sums(
    groups: correlation.SummedPatterns,
    margins: Mapping[str, Sequence[Margin]],
    sums: SumsByGroup,
    table: Bools,
    counts: Mapping[str, int],
) -> CopulaFit:
    """Estimate a copula from margins by site and sums of products, for entities present as in `table`."""
    plan, by_pattern = groups.plan.noise, groups.method == "em"
    pairs = _of_columns(plan, groups.behind(table))
    flat = [margin for site in plan.columns for margin in margins[site]]
    noise = _of_columns(plan, groups.noise(table)) * np.sqrt(_shares(plan)) / pairs
    products = np.zeros_like(noise) if by_pattern else sums.products[0] / pairs
    moments = ScoreMoments(products, np.zeros(len(pairs)), noise, pairs, by_pattern)
    layout = ScoreLayout.of(plan)
    if by_pattern:
        edge_noise = [
            sd * math.sqrt(edge_variance(one.depth)) / counts[site]
            for sd, (site, one) in zip(count_noise(plan), columns_of(plan), strict=True)
        ]
        joint = find_adjusted(layout, flat, _patterns(plan, groups, sums), moments, edge_noise)
    else:
        joint = find_joint(layout, flat, moments)
    return CopulaFit(
        plan=plan,
        sums=groups.plan,
        margins=joint.margins,
        products=products,
        pairs=pairs,
        noise=noise,
        inversion=joint.inversion,
        levels=joint.levels,
        method=groups.method,
        entities=counts,
        n=int(np.count_nonzero(table.any(axis=1))),
    )


def _gaps(margins: Mapping[str, Sequence[Margin]]) -> dict[str, tuple[int, ...]]:
    """Return the positions of the columns with missing cells, by site; sites without them are left out."""
    found = {site: tuple(j for j, one in enumerate(own) if one.missing) for site, own in margins.items()}
    return {site: places for site, places in found.items() if places}


def _of_columns(plan: NoisePlan, of_sites: Array) -> Array:
    """Expand a matrix of pairs of sites to pairs of columns: (K, K) -> (p, p)."""
    widths = list(map(plan.width, plan.columns))
    return np.repeat(np.repeat(of_sites, widths, axis=0), widths, axis=1)


def _shares(plan: NoisePlan) -> Ints:
    """Return the number of sites with noise on each product of columns: (q, q)."""
    owners = np.repeat(np.arange(len(plan.columns)), list(map(plan.width, plan.columns)))
    return np.where(owners[:, None] == owners, 1, 2)


def _patterns(plan: NoisePlan, groups: correlation.SummedPatterns, sums: SumsByGroup) -> list[PatternScores]:
    """Return means and mean products of scores by missing pattern."""
    sites, out = list(plan.columns), []
    for g, (pattern, n) in enumerate(zip(groups.plan.patterns, groups.counts.tolist(), strict=True)):
        products = sums.products[g] / n
        np.fill_diagonal(products, sums.squares[g] / n)
        held = np.array([sites.index(site) for site in pattern])
        out.append(PatternScores(n, held, sums.totals[g] / n, products))
    return out


def request_margins(
    requester: SecureProductSession,
    plan: NoisePlan,
    present: Participation,
    site_cost: Callable[[str], Fraction],
) -> FitProtocol[dict[str, list[Margin]]]:
    """Request every site's margins, and estimate them from the noisy counts.

    Sites refuse them if their budgets have no room for the whole analysis, which costs a site `site_cost`.
    """
    requests = {site: plan.margins_requested(site) for site in plan.columns}
    later = {site: round_to_grid(site_cost(site) - plan.margins_cost(site)) for site in requests}
    replies = yield [
        requester.request(
            site, "release_margins", to_json(FirstRequest(request, str(later[site]))), keep=present.seen[site]
        )
        for site, request in requests.items()
    ]
    return {
        reply.site: margins_of(plan, reply.site, reply.arrays, present.count(reply.site)) for reply in replies
    }


def margins_of(plan: NoisePlan, site: str, arrays: Mapping[str, Array], n: int) -> list[Margin]:
    """Estimate the margins of a site's columns from their noisy counts over n entities."""
    out = []
    for j, (bins, counts) in enumerate(counts_of(plan, site, arrays)):
        deviation = plan.count_deviation(site, j)
        _check_total(site, bins, counts, n, deviation)
        out.append(Margin.of_counts(bins, counts, n, deviation))
    return out


def counts_of(plan: NoisePlan, site: str, arrays: Mapping[str, Array]) -> Iterator[tuple[Bins, Floats]]:
    """Yield the bins of each of a site's columns with their noisy counts."""
    left = {name: arrays[name].astype(np.float64) for name in ("levels", "trees")}
    for bins in plan.columns[site]:
        place = "levels" if bins.levels else "trees"
        counts, left[place] = np.split(left[place], [bins.released])
        yield bins, counts


def sum_margins(
    requester: SecureProductSession, plan: NoisePlan, shares: NoiseShares | None
) -> FitProtocol[dict[str, Array]]:
    """Request counts over the rows of all sites: ``levels`` and ``trees``, with noise."""
    assert plan.rows is not None
    later = str(round_to_grid(plan.products_cost(ALL)))
    text = to_json(FirstRequest(plan.margins_requested(ALL), later, shares))
    replies = yield [requester.request(site, "sum_margins", text) for site in plan.rows.records]
    return {name: np.sum([r.arrays[name] for r in replies], axis=0) for name in ("levels", "trees")}


def sum_products(
    requester: SecureProductSession, plan: NoisePlan, shares: NoiseShares | None, margins: Sequence[Margin]
) -> FitProtocol[Floats]:
    """Request sums of products of cut scores over the rows of all sites: (q, q), symmetric, with noise."""
    assert plan.rows is not None
    probabilities = np.concatenate([margin.probabilities for margin in margins])
    sums = to_json(plan.gram_requested(ALL, 1))
    bins, digest = plan.columns[ALL], digest_of(probabilities)
    text = to_json(RowProductsRequest(bins, digest, sums, plan.digits, shares))
    replies = yield [
        requester.request(site, "sum_products", text, probabilities=probabilities)
        for site in plan.rows.records
    ]
    out = np.zeros((plan.width(ALL), plan.width(ALL)))
    total = np.sum([reply.arrays["products"] for reply in replies], axis=0)
    out[np.triu_indices(len(out), 1)] = np.ldexp(total.astype(np.float64), -2 * plan.digits)
    return out + out.T


def _check_total(site: str, bins: Bins, counts: Floats, n: int, deviation: float) -> None:
    """Require that the counts of all bins add up to all entities, as far as noise allows a check.

    Sites raise no error for values in no bin, since such an error would reveal data outside the budget.
    """
    parts = counts if bins.levels else np.concatenate([counts[:2], counts[2 * bins.leaves - 2 :]])
    short = n - float(parts.sum())
    if short > max(FEW * n, FAR * deviation * math.sqrt(len(parts))):
        what = "levels that its bounds do not list" if bins.levels else "values that are not numbers"
        raise EstimationError(
            f"column '{bins.name}' at '{site}' has {what}, for about {short:,.0f} of {n:,} entities by the "
            "noisy counts. Bounds must list all possible levels, written as in the table. The charge for "
            "the margins remains; repeating the same request is free"
        )


def request_products(
    requester: SecureProductSession,
    plan: NoisePlan,
    present: Participation,
    margins: Mapping[str, Sequence[Margin]],
    sites: Sequence[str],
) -> FitProtocol[tuple[Floats, Floats]]:
    """Request sums of products of cut scores: own blocks at each site, cross blocks by secure products.

    Return the matrix (q, q), symmetric, and the standard deviations of its noise.
    """
    requests = {site: plan.gram_requested(site, 1) for site in plan.columns}
    group = {site: np.where(present.seen[site], 0, -1) for site in plan.columns}
    sums = yield from request_pattern_sums(requester, plan, requests, group, present, margins, sites)
    return sums.products[0], np.sqrt(_shares(plan)) * plan.product_deviation(1)


def request_pattern_sums(
    requester: SecureProductSession,
    plan: NoisePlan,
    requests: Mapping[str, GramRequest],
    group: Mapping[str, Ints],
    present: Participation,
    margins: Mapping[str, Sequence[Margin]],
    sites: Sequence[str],
) -> FitProtocol[SumsByGroup]:
    """Request sums of products by group; those of an equal request again if all sites kept the same run.

    `requests` has one request per site, `group` (n_k,) is -1 for no part.
    """

    def requested(step: str) -> list[Request]:
        return [
            requester.request(
                site,
                step,
                to_json(requests[site]),
                probabilities=np.concatenate([margin.probabilities for margin in margins[site]]),
                group=group[site],
            )
            for site in plan.columns
        ]

    replies = yield requested("recall_gram")
    if of_one_run(replies):
        return combine_sums(plan, requests, replies, repeated_products(plan, requests, replies), present)
    replies = yield requested("release_gram")
    return (yield from gather_sums(requester, plan, requests, replies, group, present, sites))


def of_one_run(replies: Sequence[Reply]) -> bool:
    """Return whether all sites have released again what they released in one and the same analysis."""
    runs = {reply.arrays["run"].tobytes() for reply in replies}
    return len(runs) == 1 and b"" not in runs


def repeated_products(
    plan: NoisePlan, requests: Mapping[str, GramRequest], replies: Sequence[Reply]
) -> dict[tuple[str, str], Floats]:
    """Combine shares of the products of every two sites that were released before: (groups, p, q) each."""
    groups = next(iter(requests.values())).groups
    width = {site: plan.places()[site].stop - plan.places()[site].start for site in plan.columns}
    shares: dict[tuple[str, str], Ints] = {}
    for reply in replies:
        peers = list(requests[reply.site].peers)
        sizes = [groups * width[reply.site] * width[peer] for peer in peers]
        parts = np.split(reply.arrays["shares"], np.cumsum(sizes, dtype=np.int64))[: len(peers)]
        shares |= {(reply.site, peer): part for peer, part in zip(peers, parts, strict=True)}
    out = {}
    for a, b in combinations(plan.columns, 2):
        product = MatrixProduct(a, b, 0, width[a], width[b], groups)
        of_a, of_b = (shares[one].reshape(product.shape) for one in ((a, b), (b, a)))
        out[a, b] = combine(product, of_a, of_b, PLACES)
    return out


def gather_sums(
    requester: SecureProductSession,
    plan: NoisePlan,
    requests: Mapping[str, GramRequest],
    replies: Sequence[Reply],
    group: Mapping[str, Ints],
    present: Participation,
    sites: Sequence[str],
) -> FitProtocol[SumsByGroup]:
    """Combine the sites' own sums of products with those across sites, from secure products."""
    clients, places = list(plan.columns), plan.places()
    request = requests[clients[0]]

    def side(columns: str, site: str, other: str) -> ProductOperand:
        both = np.isin(group[site], requests[site].together(other))
        code = np.where(both, group[site], -1)
        return ProductOperand(site, columns, places[site], present.rows[site], code)

    pairs = [(side(SCALED, a, b), side(SCORES, b, a)) for a, b in combinations(clients, 2)]
    multiplied = yield from requester.multiply(
        pairs, sites, request.groups, present.n_entities, PLACES, request.agreed
    )
    across = {(one.a.site, one.b.site): one.products for one in multiplied}
    return combine_sums(plan, requests, replies, across, present)


def combine_sums(
    plan: NoisePlan,
    requests: Mapping[str, GramRequest],
    replies: Sequence[Reply],
    across: Mapping[tuple[str, str], Floats],
    present: Participation,
) -> SumsByGroup:
    """Combine the sites' own sums of products with those of two sites each, (groups, p, q)."""
    clients, places = list(plan.columns), plan.places()
    request, q = requests[clients[0]], sum(map(plan.width, clients))
    G = request.groups
    products, squares, totals = np.zeros((G, q, q)), np.zeros((G, q)), np.zeros((G, q))
    for reply in replies:
        place = places[reply.site]
        size = place.stop - place.start
        i, j = np.triu_indices(size, 1)
        own = np.ldexp(reply.arrays["grams"].astype(np.float64), -2 * PLACES)
        products[:, place.start + i, place.start + j] = own[:, : len(i)]
        if request.with_moments:
            squares[:, place], totals[:, place] = own[:, len(i) : len(i) + size], own[:, len(i) + size :]
    for (a, b), product in across.items():
        products[:, places[a], places[b]] = product
    scales = request.scales.astype(np.float64)
    # Shares that do not match add up to random words, far beyond any sum of cut scores.
    most = float(max(map(plan.radius, clients))) * present.n_entities * scales
    if (np.abs(products) > most[:, None, None] + 20.0 * math.sqrt(request.variance) / 4.0**PLACES).any():
        raise SecurityError(
            "the shares of a product do not match: the dealer's numbers or a share are wrong. None of it "
            "is used"
        )
    upper = products / scales[:, None, None]
    both = upper + upper.transpose(0, 2, 1)
    return SumsByGroup(both, squares / scales[:, None], totals / scales[:, None])


def _require(both: Ints, sites: Sequence[str], method: correlation.Method) -> None:
    few = [
        f"'{sites[a]}' and '{sites[b]}' ({both[a, b]:,})"
        for a, b in combinations(range(len(sites)), 2)
        if both[a, b] < FEWEST
    ]
    if not few:
        return
    what = f"fewer than {FEWEST} entities are complete at both sites"
    if method != "em":
        raise EstimationError(f"{what}: {', '.join(few)}. Leave out one of the two")
    raise EstimationError(
        f"{what}, small patterns merged: {', '.join(few)}",
        remedy=Remedy(
            "CopulaSynthesizer(..., missing='pairs').fit()",
            "Use {arguments}, a larger epsilon, or leave one out",
        ),
    )
