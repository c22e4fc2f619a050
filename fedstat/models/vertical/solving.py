"""Count in bits of what whoever holds linear predictors of many rounds could solve for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedstat.federation.account.ledger import Ledger

BITS = 53
"""Of a number that passes, and at most of a value in a column; a column of two values has one."""
PREDICTOR = "linear_predictor"


def rounds_of_predictors(ledger: Ledger, clients: Sequence[str]) -> int:
    """Most linear predictors of the same entities that one of the institutions released, masked or not."""
    given = [one.sender for one in ledger.entries if one.array == PREDICTOR and one.kind == "per entity"]
    return max((given.count(client) for client in clients), default=0)


def solvable(numbers: int, columns: int, ledger: Ledger, sites: Sequence[str]) -> Iterator[str]:
    """Say what so many numbers for each entity tell of so many columns of all institutions together.

    Those of earlier analyses count as well, as far as these sites state them.
    """
    stated = {} if ledger.receipt is None else ledger.receipt.statements
    so_far = max([numbers, *(stated[site].vectors for site in sites if site in stated)])
    earlier = f", {so_far - numbers:,} of them in other analyses," if so_far > numbers else ""
    held, unknown, numbers = so_far * BITS, columns * BITS, so_far
    yield (
        f"What the coordinator and the response holder could solve for: {numbers:,} numbers for every "
        f"entity{earlier} are {held:,} bits, against at most {unknown:,} of the {columns} columns "
        f"({BITS} a number, 1 where a column has two values). {_verdict(numbers, columns)} Masks hide an "
        "institution's part of one round and not of many."
    )


def _verdict(numbers: int, columns: int) -> str:
    if numbers >= columns:
        return (
            "That is enough for the rows of ALL institutions, masked or not: take them as disclosed. Fits of "
            "the normal family from sums that are exchanged once have no value per entity."
        )
    return (
        f"That is too few for {columns} columns of many values, and enough for "
        f"{'all' if numbers * BITS >= columns else numbers * BITS} of them if they have two."
    )
