"""Known covariates: whose columns are adjusted for what, from what a user writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstat.errors import DataWarning, FormulaError, ModelError, warn
from fedstat.federation.design.formula.parse import ClientTerms, parse_formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.m2sem.client.asked import CovariatesTold
from fedstat.models.m2sem.modalities import Chosen

HELD_THERE = "Covariates stand at the institution whose columns they adjust"


def read_adjust(adjust: str | Mapping[str, str] | None, partition: ClientPartition) -> dict[str, ClientTerms]:
    """Return the covariates of each site that is adjusted: of one formula, to each site its own terms.

    A FormulaError tells of what is outside the language, of a column that nobody has, and of a term of two
    sites; a ModelError of a column that a site lacks.
    """
    if adjust is None:
        return {}
    if isinstance(adjust, str):
        return {terms.client: terms for terms in _parsed(adjust, partition.columns)}
    if not isinstance(adjust, Mapping):
        raise ModelError(
            "adjust: expected a formula such as '~ age', or one by institution, received "
            f"{type(adjust).__name__}"
        )
    return {client: _of_client(client, text, partition.columns) for client, text in adjust.items()}


def _of_client(client: str, text: str, held: Mapping[str, Sequence[str]]) -> ClientTerms:
    if client not in held:
        raise ModelError(f"adjust: expected institutions {', '.join(held)}, received {client!r}")
    terms = _parsed(text, held)
    if lacking := [name for one in terms for name in one.columns if name not in held[client]]:
        (own,) = lacking[:1]
        raise ModelError(
            f"adjust: '{client}' lacks {', '.join(map(repr, lacking))}. {HELD_THERE}: let '{client}' take it "
            f"into its table under a name of its own, such as '{own}_{client}', or leave '{client}' out of "
            "adjust="
        )
    (own_terms,) = terms
    return own_terms


def _parsed(text: str, held: Mapping[str, Sequence[str]]) -> tuple[ClientTerms, ...]:
    try:
        formula = parse_formula(text, held, response=False)
    except FormulaError as error:
        raise FormulaError(f"adjust: {error}") from None
    if not formula.intercept:
        raise FormulaError("adjust: columns have intercepts of their own; write for instance '~ age'.")
    return formula.clients


def check_adjusted(terms: Mapping[str, ClientTerms], chosen: Chosen, *, one_for_all: bool) -> None:
    """Require that each site with covariates has columns that they adjust; warn of sites without any."""
    if idle := [client for client in terms if client not in chosen.adjust]:
        raise ModelError(
            f"adjust: no column of {', '.join(map(repr, idle))} is clustered, so that covariates there "
            f"adjust nothing. {HELD_THERE}: let the others take them into their tables, under names of their "
            "own"
        )
    left = [client for client in chosen.columns if client not in chosen.adjust]
    if one_for_all and left:
        warn(
            f"adjust: columns of {', '.join(map(repr, left))} stay as they are, since no covariate stands "
            "there, and clusters may be due to it. Let that institution take it into its table under a name "
            "of its own, leave its columns out, or say by adjust={client: '~ ...'} that this is meant",
            DataWarning,
        )


def warn_of_lacking(told: Mapping[str, CovariatesTold]) -> None:
    """Warn of entities that count as missing at an institution for want of a covariate."""
    counts = [f"{one.without:,} at '{client}'" for client, one in told.items() if one.without]
    if counts:
        warn(
            f"adjust: entities that lack a covariate count as missing there: {', '.join(counts)}. Fill "
            "covariates in before the partition is made to keep them",
            DataWarning,
        )
