"""Sums over groups of entities whose difference from earlier ones would be a sum over few."""

from __future__ import annotations

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.site_state import SiteData, State
from fedstat.typing import Ints


def check_apart(data: SiteData, state: State, place: str, code: Ints) -> None:
    """Refuse sums that differ from earlier ones of the session by few entities, and remember these.

    Parameters
    ----------
    place : str
        Under which name divisions are remembered.
    code : (rows,) array of int
        Group of each row that is open here; -1 of those that take no part.

    Raises
    ------
    PolicyError
        The difference of two sums would be a sum over fewer entities than the owner wants.
    """
    earlier: list[Ints] = state.use(place) if place in state else []
    for known in earlier:
        if np.array_equal(known, code):
            return
        apart = entities_apart(known, code)
        if apart < data.min_count:
            raise PolicyError(
                f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities behind a "
                f"sum; these sums and earlier ones of this session differ by {apart:.0f}. Use the entities "
                "and groups of the earlier fit: the same exchange, max_moved and folds (random_state)"
            )
    state.keep(place, [*earlier, code])


def entities_apart(a: Ints, b: Ints) -> float:
    """Entities by which a group of one division, or all, differ from one of another: the fewest, save none.

    Parameters
    ----------
    a, b : (rows,) arrays of int
        Group of each row, -1 for none.
    """
    table = np.zeros((a.max() + 2, b.max() + 2), dtype=np.int64)
    np.add.at(table, (a + 1, b + 1), 1)
    of_a, of_b, both = table[1:].sum(axis=1), table[:, 1:].sum(axis=0), table[1:, 1:]
    # All groups together are one more group.
    common = np.block([[both, both.sum(axis=1, keepdims=True)], [both.sum(axis=0), both.sum()]])
    apart = np.append(of_a, of_a.sum())[:, None] + np.append(of_b, of_b.sum()) - 2 * common
    return float(apart[apart > 0].min(initial=len(a) + 1))
