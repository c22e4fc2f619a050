"""Secure products of the columns of VFEM's clients; see :mod:`fedstat.federation.rounds.products`."""

from __future__ import annotations

from collections.abc import Sequence

from fedstat.federation.rounds import products
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Multiplied, Side
from fedstat.models.vfem.blocks.request import FAMILY

__all__ = ["Multiplied", "Side", "choose_dealer", "multiply_sides"]

OTHERWISE = ", or exchange='iterative' with cov_type='expected' or cross_products='sketch'"


def multiply_sides(
    pairs: Sequence[tuple[Side, Side]],
    sites: Sequence[str],
    groups: int,
    n: int,
    session: str,
    at: str | None,
) -> Rounds[list[Multiplied]]:
    """Run products side by side; see :func:`fedstat.federation.rounds.products.multiply_sides`."""
    return (yield from products.multiply_sides(FAMILY, pairs, sites, groups, n, session, at, OTHERWISE))


def choose_dealer(a: str, b: str, sites: Sequence[str], at: str | None) -> str:
    """Choose who deals; see :func:`fedstat.federation.rounds.products.choose_dealer`."""
    return products.choose_dealer(a, b, sites, at, OTHERWISE)
