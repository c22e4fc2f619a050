"""Sums of products of all columns, by fold or missing pattern, for the normal family; no value per entity.

Every institution releases sums of its own columns and their products; products with another's come from
secure multiplication (:mod:`fedstat.federation.rounds.products`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from fedstat.federation.message import Ask
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Side, multiply_sides
from fedstat.kernels.glm.family import FamilySpec
from fedstat.models.vglm.exchange.layout import Layout
from fedstat.models.vglm.exchange.steps import BLOCK, WEIGHTED
from fedstat.models.vglm.response.steps import RESPONSE
from fedstat.typing import Bools, Floats, Ints

FAMILY = "vglm"


def ask(site: str, step: str, session: str, text: str = "", **arrays: Any) -> Ask:
    """Address one step of the family."""
    return Ask(site, FAMILY, step, {name: np.asarray(a) for name, a in arrays.items()}, session, text)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Means and standard deviations of columns, (p,), and of the response, with its constant.

    Parameters
    ----------
    shift, scale : (p,) arrays
    mean, sd : float
        Of the response.
    constant : float
        Part of the log-likelihood per entity that no coefficient changes.
    """

    shift: Floats
    scale: Floats
    mean: float
    sd: float
    constant: float


@dataclass(frozen=True, slots=True, eq=False)
class Grams:
    """Sums of products of (1, X, y) by fold or missing pattern, X and y standardised.

    Parameters
    ----------
    products : (F, p + 2, p + 2) array
        Zero at the columns of clients that lack a pattern.
    units : Units
    dealers : mapping of (str, str) to str
        Who dealt for each pair of institutions; empty for the coordinator.
    """

    products: Floats
    units: Units
    dealers: Mapping[tuple[str, str], str]

    def total(self, folds: Bools | None = None) -> Floats:
        """Sum over some of the folds, or all."""
        chosen = self.products if folds is None else self.products[folds]
        return np.asarray(chosen.sum(axis=0))


def stage(layout: Layout, family: FamilySpec, session: str) -> Rounds[Units]:
    """Choose the entities of a fit, and standardise the columns."""
    replies = yield [ask(k, "stage_block", session, keep=layout.keep[k]) for k in layout.clients] + [
        ask(layout.active, "stage_response", session, family.to_json(), keep=layout.response_keep)
    ]
    shift, scale = np.concatenate([reply.arrays["units"] for reply in replies[:-1]], axis=1)
    mean, sd, constant = replies[-1].arrays["moments"].tolist()
    return Units(shift, scale, mean, sd, constant)


def exchange_grams(
    layout: Layout,
    units: Units,
    code: Ints,
    groups: int,
    session: str,
    at: str | None,
    shown: Bools | None = None,
) -> Rounds[Grams]:
    """Obtain the sums of products by fold or missing pattern.

    Parameters
    ----------
    layout : Layout
    units : Units
        As :func:`stage` returned them.
    code : (n,) array of int
        Fold or pattern of each entity; -1 of those that are left out.
    groups : int
        Number of folds or patterns.
    session : str
    at : str or None
        Where the coordinator sits.
    shown : (groups, K) array of bool, optional
        Which clients' columns count as seen in a pattern; by default all.

    Raises
    ------
    ModelError
        There is nobody to deal for two institutions.
    """
    p, places, last = layout.p, layout.places(1), layout.p + 1
    products = np.zeros((groups, p + 2, p + 2))
    products[:, 0, 0] = np.bincount(code[code >= 0], minlength=groups)
    shown = np.ones((groups, len(layout.clients)), dtype=bool) if shown is None else shown
    sides = [_side(layout, k, BLOCK, places[k], code, shown[:, j]) for j, k in enumerate(layout.clients)]
    folds: dict[str, dict[str, Any]] = {s.site: {"code": s.code, "groups": groups} for s in sides}
    own = [layout.active] if layout.active in places else []
    rows: dict[str, Any] = {"rows": layout.rows[layout.active]} if layout.rows is not None and own else {}
    *replies, response = yield (
        [ask(k, "sum_products", session, **folds[k]) for k in layout.clients]
        + [ask(k, "sum_with_response", session, **folds[k], **rows) for k in own]
        + [ask(layout.active, "sum_response", session, code=code, groups=groups)]
    )
    for k, reply in zip(layout.clients, replies, strict=False):
        products[:, 0, places[k]] = reply.arrays["sums"]
        products[:, places[k], places[k]] = reply.arrays["grams"]
    for k in own:
        products[:, places[k], last] = replies[-1].arrays["products"]
    products[:, 0, last], products[:, last, last] = response.arrays["sums"]
    sides.append(Side(layout.active, RESPONSE, slice(last, last + 1), np.arange(layout.n), code))
    dealers = yield from _multiply(layout, sides, products, groups, session, at)
    return Grams(_mirrored(products), units, dealers)


def weighted_gram(
    layout: Layout, weight: Floats, session: str, at: str | None
) -> Rounds[tuple[Floats, dict[tuple[str, str], str]]]:
    """Obtain ``(1, X)' W (1, X) / n``, (p + 1, p + 1), with X standardised; returns as well who dealt."""
    places, code, every = layout.places(1), np.zeros(layout.n, dtype=np.int64), np.ones(1, dtype=bool)
    products = np.zeros((1, layout.p + 1, layout.p + 1))
    products[0, 0, 0] = weight.sum()
    replies = yield [ask(k, "weigh", session, weight=weight) for k in layout.clients]
    for k, reply in zip(layout.clients, replies, strict=True):
        products[0, 0, places[k]] = reply.arrays["sums"]
        products[0, places[k], places[k]] = reply.arrays["gram"]
    sides = [_side(layout, k, WEIGHTED, places[k], code, every) for k in layout.clients]
    dealers = yield from _multiply(layout, sides, products, 1, session, at)
    return _mirrored(products)[0] / layout.n, dealers


def _side(layout: Layout, site: str, columns: str, place: slice, code: Ints, shown: Bools) -> Side:
    """Let a client take part with the entities of the groups in which its columns count as seen."""
    rows = layout.positions(site)
    own = code[rows]
    return Side(site, columns, place, rows, np.where((own >= 0) & shown[own], own, -1))


def _multiply(
    layout: Layout, sides: list[Side], products: Floats, groups: int, session: str, at: str | None
) -> Rounds[dict[tuple[str, str], str]]:
    """Enter the products of institutions' columns above the diagonal; return who dealt."""
    apart = [(a, b) for a, b in combinations(sides, 2) if a.site != b.site]
    pairs = [(a, b) for a, b in apart if np.isin(a.present, b.present, assume_unique=True).any()]
    sites = list(dict.fromkeys([*layout.clients, layout.active]))
    multiplied = yield from multiply_sides(FAMILY, pairs, sites, groups, layout.n, session, at)
    for one in multiplied:
        products[:, one.a.place, one.b.place] = one.products
    return {(min(one.a.site, one.b.site), max(one.a.site, one.b.site)): one.dealer for one in multiplied}


def _mirrored(products: Floats) -> Floats:
    """Copy what stands above the diagonal of each matrix below it."""
    upper = np.triu(products)
    return np.asarray(upper + np.triu(products, 1).transpose(0, 2, 1))
