"""Which columns of which institutions are clustered, and which share factors: from what a user names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedstat.errors import DesignError, ModelError
from fedstat.federation.design.formula.parse import ClientTerms
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.m2sem.client.asked import (
    ColumnAsked,
    ColumnsAsked,
    ColumnTold,
    CovariatesAsked,
    ModalityAsked,
)

SHOWN = 8
"""Columns that an error names."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Columns by site, groups that share factors by name, what the user says they are, and covariates."""

    columns: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[str, ...]]
    continuous: tuple[str, ...]
    ordinal: tuple[str, ...]
    nominal: tuple[str, ...]
    adjust: Mapping[str, ClientTerms] = field(default_factory=dict)

    def covariates(self, client: str) -> CovariatesAsked | None:
        """Return the covariates that an institution's columns are adjusted for."""
        terms = self.adjust.get(client)
        return None if terms is None else CovariatesAsked(terms.terms, terms.columns)

    def asked(self, client: str) -> ColumnsAsked:
        """Return what an institution is asked about its columns."""
        own = self.columns[client]
        said = (self.continuous, self.ordinal, self.nominal)
        return ColumnsAsked(own, *(tuple(name for name in names if name in own) for names in said))

    def modalities(self, client: str, told: Mapping[str, ColumnTold]) -> tuple[ModalityAsked, ...]:
        """Divide an institution's columns into modalities: named groups, then the others, each by kind."""
        own, out = self.columns[client], []
        grouped = {name for names in self.groups.values() for name in names}
        groups = {name: [one for one in names if one in own] for name, names in self.groups.items()}
        groups[client] = [*groups.get(client, []), *(name for name in own if name not in grouped)]
        for name, names in groups.items():
            columns = [_column(one, told[one]) for one in names]
            numbers = tuple(one for one in columns if one.kind == "continuous")
            others = tuple(one for one in columns if one.kind != "continuous")
            both = bool(numbers and others)
            for part, what in ((numbers, "continuous"), (others, "categorical")):
                if part:
                    out.append(ModalityAsked(f"{name} ({what})" if both else name, part))
        return tuple(out)


def _column(name: str, told: ColumnTold) -> ColumnAsked:
    assert told.kind != "counted"  # which was asked about before
    return ColumnAsked(name, told.kind, told.levels)


def choose_columns(
    partition: ClientPartition,
    columns: Sequence[str] | None,
    modalities: Mapping[str, Sequence[str]] | None,
    said: Mapping[str, Sequence[str]],
    adjust: Mapping[str, ClientTerms],
) -> Chosen:
    """Take the columns that a user names, by default all but covariates; else a ModelError."""
    held = partition.columns
    apart = {name for terms in adjust.values() for name in terms.columns}
    owner = {name: client for client, names in held.items() for name in names}
    for what, names in (("columns", columns or ()), *said.items()):
        _check_names(what, names, owner)
    groups = {name: tuple(names) for name, names in (modalities or {}).items()}
    for name, names in groups.items():
        _check_names(f"modalities['{name}']", names, owner)
        if not names or len({owner[one] for one in names}) > 1:
            clients = ", ".join(sorted({owner[one] for one in names})) or "none"
            raise ModelError(
                f"modalities['{name}']: expected columns of one institution, received columns of {clients}; "
                "columns of two institutions share no factors"
            )
    if len(columns or ()) == 0 and columns is not None:
        raise ModelError("columns: expected names of columns, received none")
    if both := [name for name in columns or () if name in apart]:
        raise ModelError(
            f"columns: {', '.join(map(repr, both[:SHOWN]))} stand in adjust= as well; what is adjusted for "
            "is not clustered. Leave them out of one"
        )
    wanted = [name for name in owner if name not in apart] if columns is None else list(columns)
    many = [one for names in groups.values() for one in names]
    if len(set(many)) < len(many):
        raise ModelError("modalities: a column stands in two of them, or twice in one")
    outside = [name for name in many if name not in wanted]
    if outside:
        raise ModelError(f"modalities: {', '.join(map(repr, outside[:SHOWN]))} are not among the columns")
    _check_said(said)
    chosen = {client: tuple(n for n in names if n in wanted) for client, names in held.items()}
    return Chosen(
        {client: names for client, names in chosen.items() if names},
        groups,
        **{what: tuple(names) for what, names in said.items()},
        adjust={client: terms for client, terms in adjust.items() if chosen.get(client)},
    )


def _check_names(what: str, names: Sequence[str], owner: Mapping[str, str]) -> None:
    if isinstance(names, str):
        raise ModelError(f"{what}: expected a list of names, received the text {names!r}")
    absent = [name for name in names if name not in owner]
    if absent:
        raise ModelError(f"{what}: no institution has a column {', '.join(map(repr, absent[:SHOWN]))}")


def _check_said(said: Mapping[str, Sequence[str]]) -> None:
    names = [name for some in said.values() for name in some]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ModelError(f"{', '.join(map(repr, twice))}: named in two of {', '.join(said)}, or twice")


def check_counted(told: Mapping[str, Mapping[str, ColumnTold]]) -> None:
    """Ask what whole numbers with few values are; a DesignError lists all of them."""
    unclear = {
        client: [
            f"{name!r} ({len(one.levels)} values)" for name, one in columns.items() if one.kind == "counted"
        ]
        for client, columns in told.items()
    }
    unclear = {client: names for client, names in unclear.items() if names}
    if not unclear:
        return
    listed = "; ".join(
        f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''} at "
        f"institution '{client}'"
        for client, names in unclear.items()
    )
    raise DesignError(
        f"whole numbers with few values may be ordered answers, codes or measurements: {listed}. Say which "
        "by ordinal=[...], nominal=[...] or continuous=[...]"
    )
