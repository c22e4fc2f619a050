"""The exchange of sums of products: requests to every site, and assembly of the replies.

Every site releases sums of its own columns and their products. Products with another site's columns come from
secure multiplication (:mod:`fedstat.federation.protocols.secure_products`), in which each site sends only
masked numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from fedstat.federation.design.vertical_design import design_request
from fedstat.federation.message import Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vertical.exchange.standardized_columns import UNRELEASED
from fedstat.models.vertical.exchange.steps import BLOCK, RESPONSE
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Bools, Floats, Ints


def dealing_sites(layout: Layout) -> tuple[str, ...]:
    """Sites that may deal for two others: sites and response holder, then a bystander."""
    return tuple(dict.fromkeys([*layout.sites, layout.active, *layout.bystanders]))


@dataclass(frozen=True, slots=True, eq=False)
class ColumnScales:
    """Means and standard deviations of columns, (p,), and of the response.

    `constant` is the part of the log-likelihood per entity that does not depend on coefficients; `shape` (p,)
    is the mean of z |z| of standardized columns, and `response_shape` that of the response and its mean of
    |z|, if the family requests them.
    """

    shift: Floats
    scale: Floats
    mean: float
    sd: float
    constant: float
    shape: Floats | None = None
    response_shape: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Grams:
    """Sums of products (F, p + 2, p + 2) of (1, X, y) by fold or missing pattern, X and y standardized.

    They are zero at columns that a pattern lacks. `dealers`: see :class:`PatternExchange`.
    """

    products: Floats
    units: ColumnScales
    dealers: Mapping[tuple[str, str], str]

    def total(self, folds: Bools | None = None) -> Floats:
        """Sum over some of the folds, or all."""
        chosen = self.products if folds is None else self.products[folds]
        return np.asarray(chosen.sum(axis=0))

    def weighted(self, layout: Layout) -> Grams:
        """Standardize the columns by their weighted moments, because sites do so without the weights."""
        if layout.weights is None:
            return self
        S, units = self.total(), self.units
        mean = S[0, 1:] / S[0, 0]
        sd = np.sqrt(np.diag(S)[1:] / S[0, 0] - mean**2)
        A = np.diag(np.append(1.0, 1.0 / sd))
        A[1:, 0] = -mean / sd
        units = replace(
            units,
            shift=units.shift + units.scale * mean[:-1],
            scale=units.scale * sd[:-1],
            mean=units.mean + units.sd * float(mean[-1]),
            sd=units.sd * float(sd[-1]),
            constant=units.constant + layout.log_weights / layout.n,
        )
        return replace(self, products=A @ self.products @ A.T, units=units)


def standardize_columns(
    layout: Layout, distribution: DistributionSpec, product_session: SecureProductSession
) -> FitProtocol[ColumnScales]:
    """Select the entities of a fit, and standardize the columns."""
    replies = yield [_stage_request(layout, k, product_session) for k in layout.sites] + [
        product_session.request(
            layout.active, "stage_response", distribution.to_json(), keep=layout.response_keep
        )
    ]
    shift, scale, *shape = np.concatenate([reply.arrays["units"] for reply in replies[:-1]], axis=1)
    mean, sd, constant, *of_response = replies[-1].arrays["moments"].tolist()
    reported = np.where(shape[0] == UNRELEASED, np.nan, shape[0]) if shape else None
    known = of_response and UNRELEASED not in of_response
    return ColumnScales(shift, scale, mean, sd, constant, reported, tuple(of_response) if known else None)


def open_values(layout: Layout, names: Iterable[str], session: str) -> FitProtocol[Layout]:
    """Obtain values of the entities from the holder of the response, by name: "weights", "offset"."""
    requests = [design_request(layout.active, f"open_{name}", session) for name in names]
    if not requests:
        return layout
    found: dict[str, Floats] = {}
    for reply in (yield requests):
        found |= {name: values[layout.response_keep] for name, values in reply.arrays.items()}
    return replace(layout, weights=found.get("weights"), offset=found.get("offset"))


def _stage_request(layout: Layout, site: str, product_session: SecureProductSession) -> Request:
    """Request that a site stages its block.

    If missing blocks are mean-imputed, it learns which entities it lacks.

    The request also states which columns count as observed if entities take part with some of them.
    """
    more: dict[str, Any] = {"rows": layout.kept[site], "n": layout.n} if layout.filled else {}
    if site in layout.has:
        more["seen"] = layout.has[site]
    if layout.weights is not None:
        more["weights"] = layout.relative[layout.rows[site]]
    return product_session.request(site, "stage_block", keep=layout.keep[site], **more)


def exchange_grams(
    layout: Layout, units: ColumnScales, code: Ints, shown: Bools, product_session: SecureProductSession
) -> FitProtocol[Grams]:
    """Obtain the sums of products by fold or missing pattern, of columns that :func:`stage` standardized.

    `code` (n,) is the group of each entity, -1 for those that are left out; `shown` (groups, K) states which
    sites' columns, or some of them, count as observed in a group. Raises ModelError if no third party can
    deal for two sites.
    """
    groups, p, last = len(shown), layout.p, layout.p + 1
    products = np.zeros((groups, p + 2, p + 2))
    products[:, 0, 0] = np.bincount(code[code >= 0], layout.relative[code >= 0], minlength=groups)
    sides = product_operands(layout, BLOCK, code, shown)
    response = ProductOperand(layout.active, RESPONSE, slice(last, last + 1), np.arange(layout.n), code)
    own = [side for side in sides if side.site == layout.active]
    *replies, of_response = yield (
        [product_session.request(s.site, "sum_products", code=s.code, groups=groups) for s in sides]
        + [own_request(layout, s, groups, product_session) for s in own]
        + [product_session.request(layout.active, "sum_response", code=code, groups=groups)]
    )
    for side, reply in zip(sides, replies, strict=False):
        products[:, 0, side.place] = reply.arrays["sums"]
        products[:, side.place, side.place] = reply.arrays["grams"]
    for side in own:
        products[:, side.place, last] = replies[-1].arrays["products"]
    products[:, 0, last], products[:, last, last] = of_response.arrays["sums"]
    dealers = yield from multiply_between_sites(layout, [*sides, response], products, product_session)
    return Grams(layout.counted * symmetrized(products), units, dealers)


def own_request(
    layout: Layout, side: ProductOperand, groups: int, product_session: SecureProductSession
) -> Request:
    """Request from the response holder its products with a block of its own, which may lack entities."""
    rows: dict[str, Any] = {} if len(side.rows) == layout.n else {"rows": side.rows}
    return product_session.request(side.site, "sum_with_response", code=side.code, groups=groups, **rows)


def product_operands(
    layout: Layout, columns: str, code: Ints, shown: Bools, *, coded: bool = True
) -> list[ProductOperand]:
    """Include for every site the entities of the groups in which its columns count as observed.

    Columns that are not `coded` from terms of a formula have supports as those of terms of one factor.
    """
    supports = layout.supports if coded else lambda site: None
    sides = []
    for (site, place), seen in zip(layout.places(1).items(), shown.T, strict=True):
        rows = layout.rows[site]
        own = code[rows]
        # Groups in which the columns do not count as observed are left out here, so that they are not summed.
        shown_code = np.where((own >= 0) & seen[own], own, -1)
        sides.append(ProductOperand(site, columns, place, rows, shown_code, layout.own(site), supports(site)))
    return sides


def multiply_between_sites(
    layout: Layout, sides: list[ProductOperand], products: Floats, product_session: SecureProductSession
) -> FitProtocol[dict[tuple[str, str], str]]:
    """Enter the products of columns of any two sites above the diagonal; return the dealers."""
    apart = [(a, b) for a, b in combinations(sides, 2) if a.site != b.site]
    # If no entity has both, the product is zero, and a round for it is not needed.
    pairs = [(a, b) for a, b in apart if np.isin(a.present, b.present, assume_unique=True).any()]
    multiplied = yield from product_session.multiply(pairs, dealing_sites(layout), len(products), layout.n)
    for one in multiplied:
        products[:, one.a.place, one.b.place] = one.products
    return {(min(one.a.site, one.b.site), max(one.a.site, one.b.site)): one.dealer for one in multiplied}


def symmetrized(products: Floats) -> Floats:
    """Copy the upper triangle of each matrix to the lower triangle."""
    upper = np.triu(products)
    return np.asarray(upper + np.triu(products, 1).transpose(0, 2, 1))
