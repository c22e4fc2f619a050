"""Known covariates: whose columns are adjusted for what, from what a user writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstat.errors import DataWarning, FormulaError, ModelError, warn
from fedstat.federation.design.formula.parse import ClientTerms, parse_formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.m2sem.client.asked import CovariatesTold
from fedstat.models.m2sem.modalities import Chosen

HELD_THERE = "Covariates stand at the client whose columns they adjust"


def read_adjust(adjust: str | Mapping[str, str] | None, partition: ClientPartition) -> dict[str, ClientTerms]:
    """Return the covariates of each client that is adjusted: of one formula, of all that hold its columns.

    A FormulaError tells of what is outside the language, and of a column that nobody has, a ModelError of one
    that a client lacks.
    """
    if adjust is None:
        return {}
    held = partition.columns
    if isinstance(adjust, str):
        terms = _parsed(adjust, partition)
        out = {client: terms for client, names in held.items() if not _lacking(terms, names)}
        if not out:
            raise ModelError(
                f"adjust: no client has {' and '.join(map(repr, terms.columns))} together. {HELD_THERE}: let "
                "it take them into its table, or name other covariates by client, adjust={client: '~ ...'}"
            )
        return out
    if not isinstance(adjust, Mapping):
        raise ModelError(
            f"adjust: expected a formula such as '~ age', or one by client, received {type(adjust).__name__}"
        )
    return {client: _of_client(client, text, partition) for client, text in adjust.items()}


def _of_client(client: str, text: str, partition: ClientPartition) -> ClientTerms:
    if client not in partition.columns:
        raise ModelError(f"adjust: expected clients {', '.join(partition.columns)}, received {client!r}")
    terms = _parsed(text, partition)
    if lacking := _lacking(terms, partition.columns[client]):
        raise ModelError(
            f"adjust: '{client}' lacks {', '.join(map(repr, lacking))}. {HELD_THERE}: let '{client}' take it "
            f"into its table, or leave '{client}' out of adjust=, and its columns as they are"
        )
    return terms


def _parsed(text: str, partition: ClientPartition) -> ClientTerms:
    names = list(dict.fromkeys(name for held in partition.columns.values() for name in held))
    try:
        formula = parse_formula(text, {"": names}, response=False)
    except FormulaError as error:
        raise FormulaError(f"adjust: {error}") from None
    if not formula.intercept:
        raise FormulaError("adjust: columns have intercepts of their own; write for instance '~ age'.")
    (terms,) = formula.clients
    return terms


def _lacking(terms: ClientTerms, held: Sequence[str]) -> list[str]:
    return [name for name in terms.columns if name not in held]


def check_adjusted(
    terms: Mapping[str, ClientTerms], chosen: Chosen, partition: ClientPartition, *, one_for_all: bool
) -> None:
    """Require that columns are adjusted where they were to be, and warn of clients that `one_for_all` leaves.

    A client that holds covariates and nothing that is clustered adjusts nothing.
    """
    if terms and not chosen.adjust:
        raise ModelError(
            f"adjust: {_listed(list(terms))} holds covariates and no column that is clustered, so "
            f"that nothing is adjusted. {HELD_THERE}: let the others take them into their tables"
        )
    left = [client for client in chosen.columns if client not in chosen.adjust]
    if one_for_all and chosen.adjust and left:
        (one, *_) = chosen.adjust.values()
        lacking = [f"'{c}' (lacks {_listed(_lacking(one, partition.columns[c]))})" for c in left]
        warn(
            f"adjust: columns of {', '.join(lacking)} stay as they are, and clusters may be due to "
            "covariates there. Let that client take them into its table, leave its columns out, or say by "
            "adjust={client: '~ ...'} that this is meant",
            DataWarning,
        )


def warn_of_lacking(told: Mapping[str, CovariatesTold]) -> None:
    """Warn of entities that count as missing at a client for want of a covariate."""
    counts = [f"{one.without:,} at '{client}'" for client, one in told.items() if one.without]
    if counts:
        warn(
            f"adjust: entities that lack a covariate count as missing there: {', '.join(counts)}. Fill "
            "covariates in before the partition is made to keep them",
            DataWarning,
        )


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
