"""Steps of one site for the information over sites: its own block, and scores that are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.errors import DescriptionError, MessageError
from fedstat.federation.door.facts import CaseWeights, DivisionOfRows, Entities, GroupSums
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step
from fedstat.federation.rounds.product_steps import Part, product_steps
from fedstat.models.m2sem.client.asked import ModalityAsked
from fedstat.models.m2sem.inference.local import local_information
from fedstat.models.m2sem.steps import check_posteriors, held_mixtures, one_mixture
from fedstat.typing import Array, Bools, Floats, Ints

ITEM = "m2sem scores"


@dataclass(frozen=True, slots=True, eq=False)
class HeldScores:
    """Columns (K n, q) at a mean square of one, their units (q,), and the table's rows (K n,) they are of."""

    columns: Floats
    units: Floats
    rows: Ints
    clusters: int


def withheld(client: str, policy: Policy, modalities: Sequence[ModalityAsked], adjusted: bool) -> str:
    """Say why an institution gives no information of its parameters; empty where it does."""
    if policy.discrete != "bits" or not (adjusted or any(not one.continuous for one in modalities)):
        return ""
    return (
        f"{client}: its policy (bits of columns of few values) wants no sums of products of scores of such "
        'columns, which standard errors need; the owner may allow it by the line  discrete = "any"  in '
        "policy.toml"
    )


def open_scores(data: SiteData, state: State, slot: Array) -> dict[str, Array]:
    """Release the information of the site's own parameters, and keep scores to be multiplied with others'.

    ``own`` (d, d), ``with_shares`` (K, d) and ``jacobian`` (s, d) are of coordinates of the parameters in
    which rotations of the factors do not show; ``crossing`` is how many of them are multiplied.
    """
    held = held_mixtures(state)
    found, r = one_mixture(data, held, slot)
    if found is not held.told:
        raise MessageError(f"{data.name}: these are not the posteriors of the estimates that left")
    bench = held.bench(found.factors, found.nodes)
    bench.put(found)
    asked = [one.asked for one in held.opened.modalities]
    if why := withheld(data.name, data.policy, asked, held.opened.covariates is not None):
        raise DescriptionError(f"{why}. Fit with cov_type=None")
    check_posteriors(state, r)
    covariates = held.opened.covariates
    local = local_information(bench.modalities, r, None if covariates is None else covariates.units[1])
    n, K, q = local.columns.shape
    if n < 2 * q:
        # Refused by every owner: it is said before anything leaves, so that the fit goes on without.
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
    state.tell(GroupSums(everyone, columns=max(q - 1, 0)), DivisionOfRows("", everyone, rows))
    columns = local.columns.transpose(1, 0, 2).reshape(K * n, q)
    units = np.sqrt(np.mean(columns**2, axis=0))
    units[units == 0.0] = 1.0
    state.keep(ITEM, HeldScores(columns / units, units, np.tile(rows, K), K), n)
    return {
        "own": local.own,
        "with_shares": local.with_shares,
        "jacobian": np.vstack([local.jacobian, local.effects]),
        "communalities": local.communalities,
        "crossing": np.array(q),
    }


def columns_of(data: SiteData, state: State, which: str) -> tuple[Floats, Floats]:
    """Scores by cluster, by the root of the posterior."""
    held = state.use(ITEM, HeldScores, "its scores are not open; ask 'open_scores' first")
    return held.columns, held.units


def rows_of(state: State, which: str) -> Ints:
    """Rows of the table, once for every cluster."""
    return state.use(ITEM, HeldScores, "its scores are not open; ask 'open_scores' first").rows


def behind(
    data: SiteData, state: State, part: Part, rows: Ints, group: Ints, both: Bools, marks: Array
) -> tuple[tuple[GroupSums, DivisionOfRows], Callable[[], None]]:
    """Tell that a product is a sum over all entities that both have, of so many columns."""
    held = state.use(ITEM, HeldScores)
    once = rows < len(held.rows) // held.clusters
    code = group[once]
    columns = part.product.columns_a + part.product.columns_b - 1
    return (GroupSums(code, columns=columns), DivisionOfRows("", code, held.rows[rows[once]])), lambda: None


BEHIND = (Entities, CaseWeights, GroupSums, DivisionOfRows)
SCORE_STEPS = {
    "open_scores": Step(
        open_scores,
        {"slot": Declared("control", "which mixture", 0)},
        {
            "own": Declared("aggregate", "information of the institution's own parameters", 2, behind=BEHIND),
            "with_shares": Declared("aggregate", "information shared with clusters' sizes", 2, behind=BEHIND),
            "jacobian": Declared("aggregate", "derivatives of profiles in the parameters", 2, behind=BEHIND),
            "communalities": Declared("aggregate", "shares of variance that factors make up", behind=BEHIND),
            "crossing": Declared("control", "how many scores are multiplied with those of others", 0),
        },
    ),
    **product_steps(columns_of, rows_of, behind, fills=False),
}
SCORE_ORDER = {
    "open_scores": "release_modalities",
    "open_product": "open_scores deal_product open_product",
    "share_product": "open_product share_product",
}
