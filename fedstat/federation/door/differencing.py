"""Aggregates over rows that differ by a few rows disclose those: what a site remembers, and refuses."""

from __future__ import annotations

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.state import SiteData, State
from fedstat.typing import Array, Bools, Ints

SAME_ROWS = "Fit both models on the same rows: name the columns of the one in complete=[...] of the other"
SAME_OUTCOMES = "Keep the comparison of the earlier model, or choose one that is farther away"


def check_difference(data: SiteData, used: Bools, events: Bools | None = None) -> None:
    """Refuse rows that differ by a few from those of an earlier answer; otherwise remember them.

    Parameters
    ----------
    used : (n_rows,) array of bool
        Rows of the table behind the answer.
    events : (n_rows,) array of bool, optional
        Those of them for which a comparison holds that the formula makes; they may not differ by a few
        either.

    Raises
    ------
    PolicyError
        Names the rule, the site and a remedy.
    """
    policy: Policy = data.policy
    if not policy.answers_kept:
        return
    packed: Array = np.packbits(np.stack([used] if events is None else [used, events]), axis=1)
    known = False
    for earlier in data.answered:
        apart = int(np.bitwise_count(packed[0] ^ earlier[0]).sum())
        what, remedy = "rows", SAME_ROWS
        if apart == 0 and len(packed) == len(earlier) == 2:
            apart = int(np.bitwise_count(packed[1] ^ earlier[1]).sum())
            what, remedy = "outcomes of a comparison", SAME_OUTCOMES
        if 0 < apart < policy.min_count:
            raise PolicyError(
                f"{data.name}: its policy (differencing) refuses {what} that differ in fewer than "
                f"{policy.min_count} rows from those of an earlier answer; the difference would disclose "
                f"them. {remedy}"
            )
        known |= apart == 0 and len(earlier) >= len(packed)
    if not known:
        data.answered.append(packed)
        del data.answered[: -policy.answers_kept]


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
    earlier = state.use(place, list[Ints]) if place in state else []
    for known in earlier:
        if np.array_equal(known, code):
            return
        apart = entities_apart(known, code)
        if apart < data.min_count:
            raise PolicyError(
                f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities behind a "
                f"sum; these sums and earlier ones of this session differ by {apart:.0f}. Use the entities "
                "and folds (random_state) of the earlier fit"
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
