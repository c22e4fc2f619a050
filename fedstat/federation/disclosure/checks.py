"""The disclosure checks in order: which rule of the policy examines which fact behind a release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedstat.errors import DoorError
from fedstat.federation.disclosure import differencing, facts, row_checks
from fedstat.federation.disclosure.leverage import check_fitted_means, check_group_shares, check_leverage
from fedstat.federation.disclosure.privacy_budget import NoiseRequired
from fedstat.federation.disclosure.protocol_order import check_dealer, check_sampled_sites
from fedstat.federation.disclosure.request_checks import check_evaluation, check_factors
from fedstat.federation.disclosure.row_checks import check_alignment, check_key_list
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import COUNTED, ArrayKind, Step
from fedstat.typing import Array

NOISY_KIND: ArrayKind = "noisy aggregate"
UNCHARGED_KINDS: tuple[ArrayKind, ...] = ("presence", "sealed")
"""Kinds of which an array may leave under a privacy budget as it is."""
IMPLIED_FACTS = (facts.EntityCount,)
"""Facts that the state counts by itself; none counted are none there are."""
SESSION_FACTS = (
    facts.RowGroups,
    facts.WeightedEstimates,
    facts.FittedMeanSums,
    facts.SampledSites,
    NoiseRequired,
)
"""Facts that are held against what the session keeps, or the question."""


class AlternativeReply(Exception):  # noqa: N818 (it is no error: a part of the protocol)
    """What a step says is to leave where its sums may not.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        super().__init__()
        self.arrays = arrays


def _check_working_weights(data: SiteData, fact: facts.WorkingWeights) -> None:
    if row_checks.working_weights_spread(data, fact.each, fact.totals, fact.flat):
        return
    if fact.instead is not None:
        raise AlternativeReply(fact.instead)
    row_checks.refuse_working_weights(data)


def _check_group_sums(data: SiteData, fact: facts.GroupSums) -> None:
    row_checks.check_groups(data, fact.code, fact.columns, fact.times, fact.weights)
    row_checks.check_cardinality(data, fact)
    if fact.summed is not None:
        check_group_shares(data, fact.summed)


FACT_CHECKS: Mapping[type, Callable[[SiteData, Any], None]] = {
    facts.KeyAlignmentRequest: check_alignment,
    facts.ExternalKeyList: check_key_list,
    facts.FactorsRequested: check_factors,
    facts.ModelEvaluation: check_evaluation,
    facts.ProductDealer: check_dealer,
    facts.EntityCount: lambda data, fact: row_checks.check_entities(data, fact.n),
    facts.RowCount: lambda data, fact: row_checks.check_rows(data, fact.n, fact.parameters),
    facts.UnequalWeights: lambda data, fact: row_checks.check_unequal_weights(
        data, fact.n, fact.columns, fact.times
    ),
    facts.RowsUsed: lambda data, fact: differencing.check_row_difference(data, fact.used, fact.events),
    facts.LevelsRequested: lambda data, fact: differencing.check_level_difference(
        data, fact.used, fact.levels
    ),
    facts.GroupSums: _check_group_sums,
    facts.SummedColumns: check_group_shares,
    facts.ExcludedEntities: lambda data, fact: row_checks.check_excluded_entities(data, fact.n),
    facts.ClusterRowCounts: lambda data, fact: row_checks.check_clusters(data, fact.rows),
    facts.OutcomeCounts: lambda data, fact: row_checks.check_events(data, fact.counts, fact.response),
    facts.LevelRowCounts: lambda data, fact: (
        row_checks.check_levels if fact.known else row_checks.check_unknown_levels
    )(data, fact.column, fact.counts),
    facts.IndicatorCounts: lambda data, fact: row_checks.check_indicators(
        data, fact.ones, fact.n, fact.names
    ),
    facts.ColumnVariation: lambda data, fact: row_checks.check_variation(
        data, fact.extremes, fact.n, fact.squares, fact.what
    ),
    facts.DesignDirections: lambda data, fact: check_leverage(data, fact.chunks, fact.n, fact.names),
    facts.CaseWeights: lambda data, fact: row_checks.check_case_weights(
        data, fact.total, fact.squares, fact.columns
    ),
    facts.ExternalWeights: lambda data, fact: row_checks.check_external_weights(data, fact.values, fact.what),
    facts.WorkingWeights: _check_working_weights,
}
"""Rule by fact; a fact that no rule judges does not pass."""


def check_fact(data: SiteData, state: State, fact: Any) -> None:
    """Hold a fact against the owner's policy.

    Raises
    ------
    PolicyError
        It is refused; names site, rule and remedy.
    AlternativeReply
        Something else is to leave.
    """
    if isinstance(fact, facts.RowGroups):
        differencing.check_row_groups(data, fact.code, fact.rows)
        if fact.place:
            differencing.check_session_difference(data, state, fact.place, fact.code)
    elif isinstance(fact, facts.FittedMeanSums):
        check_fitted_means(data, state, fact)
    elif isinstance(fact, facts.WeightedEstimates):
        differencing.check_weighted_estimates(data, state, fact)
    elif isinstance(fact, facts.SampledSites):
        check_sampled_sites(data.name, fact.names, state.hidden_among)
    else:
        FACT_CHECKS[type(fact)](data, fact)


def report_external_weights(state: State, step: Step, arrays: Mapping[str, Array]) -> None:
    """Tell of all arrays of a question that are declared as weights of rows."""
    for name, declared in step.takes.items():
        if declared.weighs and name in arrays:
            state.tell(facts.ExternalWeights(arrays[name], declared.weighs))


def check_facts_reported(where: str, step: Step, state: State, names: list[str]) -> None:
    """Require that all facts were told that are declared to stand behind what leaves.

    Raises
    ------
    DoorError
        The step forgot one; nothing leaves.
    """
    given = step.given
    for name in names:
        missing = set(given[name].behind) - state.told - set(IMPLIED_FACTS)
        if missing:
            told = ", ".join(sorted(fact.__name__ for fact in missing))
            raise DoorError(
                f"{where}: array '{name}' does not leave: {told} is declared to stand behind it, and the "
                "step did not tell it. Nothing was released; this is for the author of the family to mend"
            )


class FamilyRegistry(dict[str, Mapping[str, Step]]):
    """Steps by family; a family whose declarations leave something open does not install."""

    def __setitem__(self, family: str, steps: Mapping[str, Step]) -> None:
        for name, step in steps.items():
            check_declarations(f"family '{family}', step '{name}'", step)
        super().__setitem__(family, steps)


def check_declarations(where: str, step: Step) -> None:
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
                "by behind=(...) which facts of fedstat.federation.disclosure.facts do: Entities at least"
            )
        unknown = [fact for fact in declared.behind if fact not in (*FACT_CHECKS, *SESSION_FACTS)]
        if unknown:
            raise DoorError(f"{where}: array '{name}' rests on {unknown[0].__name__}, which no rule judges")
        if declared.unpaid and declared.kind not in UNCHARGED_KINDS:
            raise DoorError(
                f"{where}: array '{name}' is of kind '{declared.kind}', which leaves under a budget with "
                f"noise or not at all; unpaid are {' and '.join(UNCHARGED_KINDS)}"
            )
        noise = NoiseRequired in declared.behind, declared.dtype == "int64"
        if (declared.noisy and not all(noise)) or (declared.kind == NOISY_KIND and not declared.noisy):
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
