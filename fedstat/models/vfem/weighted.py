"""The weighted estimate of VFEM: pairwise moments with calibrated weights, and their jackknife.

Let v be the values that no entity lacks, the response and the columns of its site, and S one site or two. The
weights of the entities of S reproduce the sums of a basis of v over all entities. If missingness depends on v
alone, sums with these weights estimate the moments of (1, x_S, v) without any assumption on distributions,
as long as either the weights or the expected products are linear in the basis. Moments of two sites are
augmented by those of each: entities that one of them lacks carry information through E[x_k | x_j, v], taken
as linear (augmented inverse probability weights; Robins, Rotnitzky and Zhao 1994). The augmentation changes
the variance only. Standard errors come from a jackknife that leaves out random groups; it subtracts the
linear prediction of every product from v, which the calibration determines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from fedstat.errors import EstimationError, NotAvailableError, Remedy
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.federation.tables.supports import PER_COLUMN
from fedstat.models.vertical.exchange.patterns import NORMAL
from fedstat.models.vertical.exchange.protocol import ColumnScales, dealing_sites, standardize_columns
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.newton import TraceRow
from fedstat.models.vertical.pattern_merging import min_entities
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.models.vfem.iteration.glm_protocol import split_by_site
from fedstat.models.vfem.iteration.state import NormalModel, VFEMFit
from fedstat.models.vfem.weighted_steps import (
    COLUMNS,
    MASKED,
    OWN_PRODUCTS,
    SHARED,
    TIMES_OF_WEIGHTED,
    WEIGHT,
    WEIGHTED_VALUES,
)
from fedstat.typing import Bools, Floats, Ints

MOST_GROUPS, FEWEST_GROUPS = 25, 6
JACKKNIFE = "jackknife"
ALL_ENTITIES = Remedy("fit(..., method='vfem')", "leave out columns or sites, or use {arguments}")
Set = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WeightedSums:
    """Weighted sums of (1, x_S, v)(1, x_S, v)' by set S and group, and those of (1, v) over all entities.

    `places` are the columns of each site among all, in the order of the fit; `own` those of the holder.
    """

    units: ColumnScales
    by_set: Mapping[Set, Floats]
    base: Floats
    places: Mapping[str, Ints]
    own: Ints

    def order(self, sites: Set) -> Ints:
        """Return the indices of (1, x_S, v) in (1, x, y)."""
        P = sum(map(len, self.places.values())) + len(self.own)
        columns = [1 + self.places[site] for site in sites]
        return np.concatenate([[0], *columns, 1 + self.own, [P + 1]]).astype(np.int64)


def random_groups(layout: Layout, sets: Mapping[Set, Bools], min_count: int) -> tuple[Ints, int]:
    """Assign entities to random groups, as many as the sets allow; (n,) and their number.

    A party that knows all columns but one has an equation in this column for every sum with it. A group needs
    twice as many entities as that, as a missing pattern does. Raises EstimationError if a site, or two, have
    too few entities for some groups; it names them.
    """
    order = np.random.default_rng(layout.n).permutation(layout.n)
    widths, groups = dict(zip(layout.sites, layout.sizes, strict=True)), MOST_GROUPS
    q = 1 + widths.get(layout.active, 0)
    in_product = {k: p * (p + 3) // 2 for k, p in widths.items()}
    every: Set = ()
    least = {every: min_entities(equations_of_response(sets, widths, q) - 1, min_count)}
    for sites in sets:
        own = [sum(in_sets(sets, widths, k, q)) for k in sites] if len(sites) == 1 else []
        pair = sum(widths[k] for k in sites) if len(sites) == 2 else 0
        products = max(max(in_product[k] + 1, widths[k] + q) for k in sites)
        least[sites] = min_entities(max([products, pair, *own]) - 1, min_count)
    for sites, has in {every: np.ones(layout.n, dtype=bool), **sets}.items():
        while (
            groups >= FEWEST_GROUPS
            and np.bincount((order % groups)[has], minlength=groups).min() < least[sites]
        ):
            groups -= 1
        if groups < FEWEST_GROUPS:
            which = " and ".join(f"'{k}'" for k in sites) or f"'{layout.active}'"
            raise EstimationError(
                f"method='weighted': {int(has.sum()):,} entities have the columns of {which}, but "
                f"{FEWEST_GROUPS} random groups of at least {least[sites]} are needed",
                remedy=ALL_ENTITIES,
            )
    return order % groups, groups


def equations_of_response(sets: Iterable[Set], widths: Mapping[str, int], q: int) -> int:
    """Count the sums of a group that depend on the response, through weights or products."""
    count = (q + 1) * (q + 2) // 2
    for sites in sets:
        count += (q + 1) * (q + 2) // 2 + sum(widths[k] * (widths[k] + 3) // 2 + q * widths[k] for k in sites)
        count += widths[sites[0]] * widths[sites[1]] if len(sites) == 2 else 0
    return count


def in_sets(sets: Iterable[Set], widths: Mapping[str, int], site: str, q: int) -> Iterator[int]:
    """Count the sums of a group that depend on one column of a site, by set."""
    for sites in sets:
        if site in sites:
            yield 1 + widths[site] + q + sum(widths[k] for k in sites if k != site)


def exchange_weighted(
    layout: Layout, min_count: int, session: SecureProductSession
) -> FitProtocol[WeightedSums]:
    """Obtain the weighted sums of all sites and pairs of sites.

    Raises NotAvailableError if the response holder lacks columns of its own for some entities.
    """
    H, n = layout.active, layout.n
    if H in layout.sites and len(layout.kept[H]) < n:
        raise NotAvailableError(
            f"method='weighted' requires that '{H}', the site of the response, has its own columns for all "
            "entities with a response",
            remedy=ALL_ENTITIES,
        )
    remote = [k for k in layout.sites if k != H]
    seen = {k: np.isin(np.arange(n), layout.kept[k]) for k in remote}
    sets: dict[Set, Bools] = {(k,): seen[k] for k in remote}
    sets |= {(j, k): seen[j] & seen[k] for j, k in combinations(remote, 2)}
    code, G = random_groups(layout, sets, min_count)
    number = {sites: place for place, sites in enumerate(sets)}
    pairs = [one for one in sets if len(one) == 2]
    units = yield from standardize_columns(layout, NORMAL, session)
    dealers = dealing_sites(layout)
    yield from agree_keys(dealers, session.session)
    text = json.dumps([[number[j, k], j, number[j,], k, number[k,]] for j, k in pairs])
    (reply,) = yield [
        session.request(H, "weigh_response", text, sets=np.array([*sets.values()]), code=code, groups=G)
    ]
    boxes = iter(split_by_site(reply.arrays))
    for j, k in pairs:
        yield [
            session.request(
                site, "weigh_columns", json.dumps([H, number[j, k], site == j]), shown=next(boxes)
            )
            for site in (j, k)
        ]
    width = dict(zip(layout.sites, layout.sizes, strict=True))
    q = 1 + width.get(H, 0)

    def operand(site: str, columns: str, size: int, has: Bools) -> ProductOperand:
        own = np.arange(n) if site == H else layout.rows[site]
        times = TIMES_OF_WEIGHTED.get(columns.partition(":")[0], 1)
        rows = np.concatenate([own + n * place for place in range(times)])
        groups = np.tile(np.where(has[own], code[own], -1), times)
        supports = layout.supports(site) + (PER_COLUMN if site == H else 0)
        return ProductOperand(site, columns, slice(0, size), rows, groups, supports=supports)

    wanted, entries = [], []
    for sites, has in sets.items():
        m = number[sites]
        for k in sites:
            p = width[k]
            products = operand(k, OWN_PRODUCTS, p + p * (p + 1) // 2, has)
            wanted.append((operand(H, f"{WEIGHT}:{m}", 1, has), products))
            wanted.append((operand(H, f"{WEIGHTED_VALUES}:{m}", q, has), operand(k, COLUMNS, p, has)))
            entries += [(sites, k, ""), (sites, k, "v")]
        if len(sites) == 2:
            j, k = sites
            wanted.append(
                (operand(j, f"{SHARED}:{m}", width[j], has), operand(k, f"{MASKED}:{m}", width[k], has))
            )
            entries.append((sites, j, k))
    found = yield from session.multiply(wanted, dealers, G, 2 * n)
    own = reply.arrays["sums"].reshape(len(sets) + 1, G, q + 1, q + 1)
    by_set = {}
    for sites in sets:
        size = 1 + sum(width[k] for k in sites) + q
        by_set[sites] = np.zeros((G, size, size))
        ends = [0, *range(size - q, size)]
        by_set[sites][:, np.array(ends)[:, None], ends] = own[number[sites]]
    for (sites, k, what), one in zip(entries, found, strict=True):
        out = by_set[sites]
        starts = dict(zip(sites, 1 + np.cumsum([0, *[width[s] for s in sites]]), strict=False))
        here = slice(starts[k], starts[k] + width[k])
        if what == "v":
            out[:, here, -q:] = one.products.transpose(0, 2, 1)
        elif what:
            out[:, here, starts[what] : starts[what] + width[what]] = one.products
        else:
            out[:, 0, here] = one.products[:, 0, : width[k]]
            upper, lower = np.triu_indices(width[k])
            out[:, starts[k] + upper, starts[k] + lower] = one.products[:, 0, width[k] :]
    by_set = {sites: np.triu(out) + np.triu(out, 1).transpose(0, 2, 1) for sites, out in by_set.items()}
    places = {k: np.arange(layout.p)[place] for k, place in layout.places().items()}
    return WeightedSums(
        units, by_set, own[-1], {k: places[k] for k in remote}, places.get(H, np.array([], int))
    )


# ----------------------------------------------------------------------------------------------------
# The estimate from the sums.


def second_moments(
    sums: WeightedSums, by_set: Mapping[Set, Floats], base: Floats, law: Floats | None
) -> Floats:
    """Moments of (1, x, y), (P + 2, P + 2), from sums of a sample, augmented with the moments of a `law`."""
    P = sum(map(len, sums.places.values())) + len(sums.own)
    T, fixed = np.zeros((P + 2, P + 2)), sums.order(())
    for sites, A in by_set.items():
        if len(sites) == 1:
            order = sums.order(sites)
            T[np.ix_(order, order)] = A
    for sites, A in by_set.items():
        if len(sites) == 2:
            j, k = (1 + sums.places[site] for site in sites)
            p = len(j)
            product = A[1 : 1 + p, 1 + p : 1 + p + len(k)].copy()
            if law is not None:
                at_j = np.r_[0 : 1 + p, 1 + p + len(k) : len(A)]
                at_k = np.r_[0:1, 1 + p : len(A)]
                product += augmentation(sums, law, by_set[sites[:1]] - A[np.ix_(at_j, at_j)], sites[0], k)
                product += augmentation(sums, law, by_set[sites[1:]] - A[np.ix_(at_k, at_k)], sites[1], j).T
            T[np.ix_(j, k)], T[np.ix_(k, j)] = product, product.T
    T[np.ix_(fixed, fixed)] = base
    return np.asarray(T / base[0, 0])


def augmentation(sums: WeightedSums, law: Floats, difference: Floats, site: str, others: Ints) -> Floats:
    """Predict x_k x_j' of entities that lack k from (1, x_j, v), by the difference of the sums with these."""
    order = sums.order((site,))
    slopes = np.linalg.solve(law[np.ix_(order, order)], law[np.ix_(order, others)])
    return np.asarray(difference[1 : 1 + len(sums.places[site])] @ slopes)


def estimates(T: Floats) -> Floats:
    """Return (a, s2, beta, mu) of the moments of (1, x, y)."""
    mean, cov = mean_and_covariance(T)
    beta = np.linalg.solve(cov[:-1, :-1], cov[:-1, -1])
    return np.concatenate([[mean[-1], cov[-1, -1] - beta @ cov[:-1, -1]], beta, mean[:-1]])


def mean_and_covariance(T: Floats) -> tuple[Floats, Floats]:
    """Return the mean (P + 1,) and covariance of (x, y)."""
    return T[0, 1:], T[1:, 1:] - np.outer(T[0, 1:], T[0, 1:])


def expected_products(law: Floats, order: Ints, fixed: Ints, base: Floats) -> Floats:
    """Sum of E[z z' | v] of z = (1, x_S, v) over entities with these sums of (1, v)(1, v)', by the law."""
    slopes = np.linalg.solve(law[np.ix_(fixed, fixed)], law[np.ix_(fixed, order)])
    rest = law[np.ix_(order, order)] - law[np.ix_(order, fixed)] @ slopes
    return np.asarray(slopes.T @ base @ slopes + base[0, 0] * rest)


def weighted_estimate(sums: WeightedSums) -> tuple[Floats, Floats, Floats]:
    """Estimate (a, s2, beta, mu) of standardized columns, their moments, and the jackknife covariance."""
    total, base = {sites: A.sum(axis=0) for sites, A in sums.by_set.items()}, sums.base.sum(axis=0)
    law = second_moments(sums, total, base, None)
    moments = second_moments(sums, total, base, law)
    if np.linalg.eigvalsh(mean_and_covariance(moments)[1])[0] <= 0.0:
        raise EstimationError(
            "method='weighted': the moments of pairs of sites are not those of any sample (the covariance is "
            "not positive definite)",
            remedy=ALL_ENTITIES,
        )
    fixed, G, replicates = sums.order(()), len(sums.base), []
    for g in range(G):
        left = {}
        for sites, A in sums.by_set.items():
            order, at = sums.order(sites), np.r_[0:1, A.shape[1] - len(fixed) + 1 : A.shape[1]]
            # w (zz' - E[zz' | v]) + E[zz' | v], whose sum over all entities is that of w zz'.
            excess = expected_products(law, order, fixed, A[g][np.ix_(at, at)] - sums.base[g])
            left[sites] = total[sites] - (A[g] - excess)
        replicates.append(estimates(second_moments(sums, left, base - sums.base[g], law)))
    deviations = np.array(replicates) - np.mean(replicates, axis=0)
    return estimates(moments), moments, (G - 1.0) / G * deviations.T @ deviations


@dataclass(frozen=True, slots=True)
class UnexplainedDifference:
    """The largest difference of a column's mean that the response and the columns of its site do not explain.

    It is that of `column` at `site` between the entities that `other` has and all; `pvalue` is that of
    Student's t, times the number of columns and sites compared.
    """

    site: str
    other: str
    column: str
    pvalue: float


def unexplained_difference(layout: Layout, sums: WeightedSums) -> UnexplainedDifference | None:
    """Compare weighted means of a site's columns over its entities with those over entities of two sites.

    Both estimate the mean over all entities if missingness depends on the response and the columns of its
    site only. None without two such sites. The variance is that of the jackknife over random groups.
    """
    total, base = {sites: A.sum(axis=0) for sites, A in sums.by_set.items()}, sums.base.sum(axis=0)
    law, fixed, G = second_moments(sums, total, base, None), sums.order(()), len(sums.base)
    means: dict[Set, list[Floats]] = {sites: [] for sites in sums.by_set}
    for g in range(-1, G):
        for sites, A in sums.by_set.items():
            left, n = total[sites], base[0, 0]
            if g >= 0:
                order, at = sums.order(sites), np.r_[0:1, A.shape[1] - len(fixed) + 1 : A.shape[1]]
                excess = expected_products(law, order, fixed, A[g][np.ix_(at, at)] - sums.base[g])
                left, n = left - (A[g] - excess), n - sums.base[g][0, 0]
            means[sites].append(left[0] / n)
    found, compared = [], 0
    for j, k in (sites for sites in sums.by_set if len(sites) == 2):
        for site, other, start in ((j, k, 1), (k, j, 1 + len(sums.places[j]))):
            size = len(sums.places[site])
            both = np.array(means[j, k])[:, start : start + size]
            difference = both - np.array(means[site,])[:, 1 : 1 + size]
            error = np.sqrt((G - 1.0) / G * ((difference[1:] - difference[1:].mean(axis=0)) ** 2).sum(axis=0))
            ratio = np.abs(difference[0]) / np.maximum(error, np.finfo(float).tiny)
            worst = int(np.argmax(ratio))
            column = layout.names[int(sums.places[site][worst])]
            found.append((float(ratio[worst]), site, other, column))
            compared += size
    if not found:
        return None
    largest, site, other, column = max(found)
    pvalue = min(1.0, compared * 2.0 * float(stats.t.sf(largest, G - 1.0)))
    return UnexplainedDifference(site, other, column, pvalue)


def weighted_fit(layout: Layout, sums: WeightedSums) -> tuple[VFEMFit, PsiCovariance]:
    """Return the estimate and its covariance in the units of the data."""
    found, moments, cov = weighted_estimate(sums)
    P, units = layout.p, sums.units
    scale, center = np.append(units.scale, units.sd), np.append(units.shift, units.mean)
    mean, spread = mean_and_covariance(moments)
    mean, spread = center + scale * mean, spread * np.outer(scale, scale)
    by_beta, s2 = units.sd / units.scale, found[1] * units.sd**2
    factor = np.concatenate([[units.sd, units.sd**2], by_beta, units.scale])
    beta = layout.split(found[2 : 2 + P] * by_beta)
    mu = layout.split(mean[:-1])
    order = [0, 1]
    for place in layout.places().values():
        order += [*range(2 + place.start, 2 + place.stop), *range(2 + P + place.start, 2 + P + place.stop)]
    psi = (cov * np.outer(factor, factor))[np.ix_(order, order)]
    t = {k: float(beta[k] @ spread[at, at] @ beta[k]) for k, at in layout.places().items()}
    trace = (TraceRow(0, np.nan, 0.0, 0.0, "moments", 0.0),)
    fit = VFEMFit(
        a=float(mean[-1]),
        s2=float(s2),
        beta=beta,
        mu=mu,
        t=t,
        log_likelihood=np.nan,
        trace=trace,
        converged=True,
        reason="computed from weighted moments",
        response_moments=np.array([mean[-1], spread[-1, -1]]),
        joint=NormalModel(mean, spread, np.ones((P, P), dtype=bool), "free"),
    )
    return fit, PsiCovariance(psi, JACKKNIFE, size=len(sums.base), df=len(sums.base) - 1.0)
