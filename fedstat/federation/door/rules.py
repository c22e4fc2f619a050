"""The one judge: which rule of the owner's policy holds which fact that stands behind a release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedstat.errors import DoorError
from fedstat.federation.door import differencing, facts, guards, weights
from fedstat.federation.door.aligning import check_alignment, check_list
from fedstat.federation.door.conduct import check_dealer, check_drawn
from fedstat.federation.door.descriptions import check_evaluation, check_factors
from fedstat.federation.door.leverage import check_leverage, check_means, check_shares
from fedstat.federation.door.owner.charging import NoiseOwed
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import COUNTED, Kind, Step
from fedstat.typing import Array

NOISY: Kind = "noisy aggregate"
UNPAID: tuple[Kind, ...] = ("presence", "sealed")
"""Kinds of which an array may leave under a privacy budget as it is."""
IMPLIED = (facts.Entities,)
"""Facts that the state counts by itself; none counted are none there are."""
OF_THE_SESSION = (
    facts.DivisionOfRows,
    facts.EstimatedUnder,
    facts.MeansSummed,
    facts.SitesDrawn,
    NoiseOwed,
)
"""Facts that are held against what the session keeps, or the question."""


class AnsweredInstead(Exception):  # noqa: N818 (it is no error: a part of the protocol)
    """What a step says is to leave where its sums may not.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        super().__init__()
        self.arrays = arrays


def _working_weights(data: SiteData, fact: facts.WorkingWeights) -> None:
    if weights.working_weights_spread(data, fact.each, fact.totals, fact.flat):
        return
    if fact.instead is not None:
        raise AnsweredInstead(fact.instead)
    weights.refuse_working_weights(data)


def _group_sums(data: SiteData, fact: facts.GroupSums) -> None:
    guards.check_groups(data, fact.code, fact.columns, fact.times, fact.weights)
    guards.check_bits(data, fact)
    if fact.summed is not None:
        check_shares(data, fact.summed)


RULES: Mapping[type, Callable[[SiteData, Any], None]] = {
    facts.AlignmentAsked: check_alignment,
    facts.ListToRaise: check_list,
    facts.FactorsAsked: check_factors,
    facts.Evaluated: check_evaluation,
    facts.DealtBy: check_dealer,
    facts.Entities: lambda data, fact: guards.check_entities(data, fact.n),
    facts.RowCount: lambda data, fact: guards.check_rows(data, fact.n, fact.parameters),
    facts.UnevenRows: lambda data, fact: guards.check_uneven(data, fact.n, fact.columns, fact.times),
    facts.RowsUsed: lambda data, fact: differencing.check_difference(data, fact.used, fact.events),
    facts.LevelsAsked: lambda data, fact: differencing.check_levels_apart(data, fact.used, fact.levels),
    facts.GroupSums: _group_sums,
    facts.SummedColumns: check_shares,
    facts.LeftOut: lambda data, fact: guards.check_left_out(data, fact.n),
    facts.ClusterRows: lambda data, fact: guards.check_clusters(data, fact.rows),
    facts.OutcomeCounts: lambda data, fact: guards.check_events(data, fact.counts, fact.response),
    facts.RowsByLevel: lambda data, fact: (
        guards.check_levels if fact.known else guards.check_unknown_levels
    )(data, fact.column, fact.counts),
    facts.IndicatorCounts: lambda data, fact: guards.check_indicators(data, fact.ones, fact.n, fact.names),
    facts.ColumnVariation: lambda data, fact: guards.check_variation(
        data, fact.extremes, fact.n, fact.squares, fact.what
    ),
    facts.DesignDirections: lambda data, fact: check_leverage(data, fact.chunks, fact.n, fact.names),
    facts.CaseWeights: lambda data, fact: weights.check_weights(data, fact.total, fact.squares, fact.columns),
    facts.GivenWeights: lambda data, fact: weights.check_given_weights(data, fact.values, fact.what),
    facts.WorkingWeights: _working_weights,
}
"""Rule by fact; a fact that no rule judges does not pass."""


def judge(data: SiteData, state: State, fact: Any) -> None:
    """Hold a fact against the owner's policy.

    Raises
    ------
    PolicyError
        It is refused; names site, rule and remedy.
    AnsweredInstead
        Something else is to leave.
    """
    if isinstance(fact, facts.DivisionOfRows):
        differencing.check_division(data, fact.code, fact.rows)
        if fact.place:
            differencing.check_apart(data, state, fact.place, fact.code)
    elif isinstance(fact, facts.MeansSummed):
        check_means(data, state, fact)
    elif isinstance(fact, facts.EstimatedUnder):
        differencing.check_estimated_under(data, state, fact)
    elif isinstance(fact, facts.SitesDrawn):
        check_drawn(data.name, fact.names, state.hidden_among)
    else:
        RULES[type(fact)](data, fact)


def tell_weights(state: State, step: Step, arrays: Mapping[str, Array]) -> None:
    """Tell of all arrays of a question that are declared as weights of rows."""
    for name, declared in step.takes.items():
        if declared.weighs and name in arrays:
            state.tell(facts.GivenWeights(arrays[name], declared.weighs))


def check_told(where: str, step: Step, state: State, names: list[str]) -> None:
    """Require that all facts were told that are declared to stand behind what leaves.

    Raises
    ------
    DoorError
        The step forgot one; nothing leaves.
    """
    given = step.given
    for name in names:
        missing = set(given[name].behind) - state.told - set(IMPLIED)
        if missing:
            told = ", ".join(sorted(fact.__name__ for fact in missing))
            raise DoorError(
                f"{where}: array '{name}' does not leave: {told} is declared to stand behind it, and the "
                "step did not tell it. Nothing was released; this is for the author of the family to mend"
            )


class Installed(dict[str, Mapping[str, Step]]):
    """Steps by family; a family whose declarations leave something open does not install."""

    def __setitem__(self, family: str, steps: Mapping[str, Step]) -> None:
        for name, step in steps.items():
            check_declared(f"family '{family}', step '{name}'", step)
        super().__setitem__(family, steps)


def check_declared(where: str, step: Step) -> None:
    """Require that a step declares what stands behind what it gives, and what weighs rows in what it takes.

    Raises
    ------
    DoorError
        Names family, step and array.
    """
    for name, declared in step.given.items():
        if declared.kind in COUNTED and not declared.behind:
            raise DoorError(
                f"{where}: array '{name}' is declared '{declared.kind}', and nothing to stand behind it. Say "
                "by behind=(...) which facts of fedstat.federation.door.facts do: Entities at least"
            )
        unknown = [fact for fact in declared.behind if fact not in (*RULES, *OF_THE_SESSION)]
        if unknown:
            raise DoorError(f"{where}: array '{name}' rests on {unknown[0].__name__}, which no rule judges")
        if declared.unpaid and declared.kind not in UNPAID:
            raise DoorError(
                f"{where}: array '{name}' is of kind '{declared.kind}', which leaves under a budget with "
                f"noise or not at all; unpaid are {' and '.join(UNPAID)}"
            )
        noise = NoiseOwed in declared.behind, declared.dtype == "int64"
        if (declared.noisy and not all(noise)) or (declared.kind == NOISY and not declared.noisy):
            raise DoorError(
                f"{where}: array '{name}' of kind '{declared.kind}' lacks what noise needs: noisy=True, "
                "integers by dtype='int64', and NoiseOwed among what stands behind it"
            )
    for name, declared in step.takes.items():
        if declared.kind == "per entity" and declared.weighs is None:
            raise DoorError(
                f"{where}: array '{name}' comes with a value per entity, and it is not declared whether "
                "these weigh rows. Say weighs=... in words, empty where they enter no sum over rows"
            )
