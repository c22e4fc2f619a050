"""Which columns are clustered, adjusted or share factors, and the agreement on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.codec import from_json, to_json
from fedstat.errors import DataWarning, DesignError, EstimationError, FormulaError, ModelError, Remedy, warn
from fedstat.federation.design.formula.parse import SiteTerms, parse_formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.m2sem.em import EntityIndex
from fedstat.models.m2sem.request import (
    ColumnReply,
    ColumnsRequest,
    CovariatesReply,
    CovariatesRequest,
    MixtureColumn,
    ModalityRequest,
    OpenRequest,
)
from fedstat.typing import Bools, Ints

# ----------------------------------------------------------------------------------------------------
# Which columns of which sites are clustered, and which share factors, from the user's arguments.

SHOWN = 8
"""Largest number of columns in an error message."""


@dataclass(frozen=True, slots=True)
class ColumnSelection:
    """Columns by site, groups that share factors by name, kinds stated by the user, and covariates."""

    columns: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[str, ...]]
    continuous: tuple[str, ...]
    ordinal: tuple[str, ...]
    nominal: tuple[str, ...]
    adjust: Mapping[str, SiteTerms] = field(default_factory=dict)

    def covariates(self, site: str) -> CovariatesRequest | None:
        """Return the covariates for which a site's columns are adjusted."""
        terms = self.adjust.get(site)
        return None if terms is None else CovariatesRequest(terms.terms, terms.columns)

    def requested(self, site: str) -> ColumnsRequest:
        """Return the request to a site about its columns."""
        own = self.columns[site]
        said = (self.continuous, self.ordinal, self.nominal)
        return ColumnsRequest(own, *(tuple(name for name in names if name in own) for names in said))

    def modalities(self, site: str, reported: Mapping[str, ColumnReply]) -> tuple[ModalityRequest, ...]:
        """Divide a site's columns into modalities: named groups, then the others, each by kind."""
        own, out = self.columns[site], []
        grouped = {name for names in self.groups.values() for name in names}
        groups = {name: [one for one in names if one in own] for name, names in self.groups.items()}
        groups[site] = [*groups.get(site, []), *(name for name in own if name not in grouped)]
        for name, names in groups.items():
            columns = [_column(one, reported[one]) for one in names]
            numbers = tuple(one for one in columns if one.kind == "continuous")
            others = tuple(one for one in columns if one.kind != "continuous")
            both = bool(numbers and others)
            for part, what in ((numbers, "continuous"), (others, "categorical")):
                if part:
                    out.append(ModalityRequest(f"{name} ({what})" if both else name, part))
        return tuple(out)


def _column(name: str, reported: ColumnReply) -> MixtureColumn:
    assert reported.kind != "counted"  # resolved by an earlier request
    return MixtureColumn(name, reported.kind, reported.levels)


def choose_columns(
    partition: ClientPartition,
    columns: Sequence[str] | None,
    modalities: Mapping[str, Sequence[str]] | None,
    said: Mapping[str, Sequence[str]],
    adjust: Mapping[str, SiteTerms],
) -> ColumnSelection:
    """Select the columns that a user names, by default all except covariates; otherwise a ModelError."""
    held = partition.columns
    apart = {name for terms in adjust.values() for name in terms.columns}
    owner = {name: site for site, names in held.items() for name in names}
    for what, names in (("columns", columns or ()), *said.items()):
        _check_names(what, names, owner)
    groups = {name: tuple(names) for name, names in (modalities or {}).items()}
    for name, names in groups.items():
        _check_names(f"modalities['{name}']", names, owner)
        if not names or len({owner[one] for one in names}) > 1:
            sites = ", ".join(sorted({owner[one] for one in names})) or "none"
            raise ModelError(
                f"modalities['{name}']: expected columns of one site, received columns of {sites}; "
                "columns of two sites cannot share factors"
            )
    if len(columns or ()) == 0 and columns is not None:
        raise ModelError("columns: expected names of columns, received none")
    if both := [name for name in columns or () if name in apart]:
        raise ModelError(
            f"columns: {', '.join(map(repr, both[:SHOWN]))} are also in adjust=; a covariate is not "
            "clustered. Remove them from one argument"
        )
    wanted = [name for name in owner if name not in apart] if columns is None else list(columns)
    many = [one for names in groups.values() for one in names]
    if len(set(many)) < len(many):
        raise ModelError("modalities: a column is in two of them, or twice in one")
    outside = [name for name in many if name not in wanted]
    if outside:
        raise ModelError(f"modalities: {', '.join(map(repr, outside[:SHOWN]))} are not among the columns")
    _check_said(said)
    chosen = {site: tuple(n for n in names if n in wanted) for site, names in held.items()}
    return ColumnSelection(
        {site: names for site, names in chosen.items() if names},
        groups,
        **{what: tuple(names) for what, names in said.items()},
        adjust={site: terms for site, terms in adjust.items() if chosen.get(site)},
    )


def _check_names(what: str, names: Sequence[str], owner: Mapping[str, str]) -> None:
    if isinstance(names, str):
        raise ModelError(f"{what}: expected a list of names, received the text {names!r}")
    absent = [name for name in names if name not in owner]
    if absent:
        raise ModelError(f"{what}: no site has a column {', '.join(map(repr, absent[:SHOWN]))}")


def _check_said(said: Mapping[str, Sequence[str]]) -> None:
    names = [name for some in said.values() for name in some]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ModelError(f"{', '.join(map(repr, twice))}: named in two of {', '.join(said)}, or twice")


def check_counted(reported: Mapping[str, Mapping[str, ColumnReply]]) -> None:
    """Require the kind of whole numbers with few values; a DesignError lists all of them."""
    unclear = {
        site: [
            f"{name!r} ({f'{len(one.levels)} values' if one.levels else 'rare values, so only continuous'})"
            for name, one in columns.items()
            if one.kind == "counted"
        ]
        for site, columns in reported.items()
    }
    unclear = {site: names for site, names in unclear.items() if names}
    if not unclear:
        return
    listed = "; ".join(
        f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''} at "
        f"site '{site}'"
        for site, names in unclear.items()
    )
    raise DesignError(
        f"whole numbers with few values may be ordered answers, codes or measurements: {listed}. State the "
        "kind by ordinal=[...], nominal=[...] or continuous=[...]"
    )


# ----------------------------------------------------------------------------------------------------
# Known covariates: which columns are adjusted for which covariates, from the user's argument.

HELD_THERE = "Covariates must be at the site whose columns they adjust"


def read_adjust(adjust: str | Mapping[str, str] | None, partition: ClientPartition) -> dict[str, SiteTerms]:
    """Return the covariates of each adjusted site; for one formula, each site uses its own terms.

    Raises FormulaError for text outside the formula language, a column that no site has, and a term of two
    sites, and ModelError for a column that a site lacks.
    """
    if adjust is None:
        return {}
    if isinstance(adjust, str):
        return {terms.site: terms for terms in _parsed(adjust, partition.columns)}
    if not isinstance(adjust, Mapping):
        raise ModelError(
            f"adjust: expected a formula such as '~ age', or one by site, received {type(adjust).__name__}"
        )
    return {site: _of_site(site, text, partition.columns) for site, text in adjust.items()}


def _of_site(site: str, text: str, held: Mapping[str, Sequence[str]]) -> SiteTerms:
    if site not in held:
        raise ModelError(f"adjust: expected sites {', '.join(held)}, received {site!r}")
    terms = _parsed(text, held)
    if lacking := [name for one in terms for name in one.columns if name not in held[site]]:
        (own,) = lacking[:1]
        raise ModelError(
            f"adjust: '{site}' lacks {', '.join(map(repr, lacking))}. {HELD_THERE}: add it to the table of "
            f"'{site}' under a name of its own, such as '{own}_{site}', or adjust no column of '{site}'"
        )
    (own_terms,) = terms
    return own_terms


def _parsed(text: str, held: Mapping[str, Sequence[str]]) -> tuple[SiteTerms, ...]:
    try:
        formula = parse_formula(text, held, response=False)
    except FormulaError as error:
        raise error.with_message(f"adjust: {error}") from None
    if not formula.intercept:
        raise FormulaError("adjust: columns have their own intercepts; write for instance '~ age'.")
    return formula.sites


def check_adjusted(terms: Mapping[str, SiteTerms], chosen: ColumnSelection, *, one_for_all: bool) -> None:
    """Require that each site with covariates has columns that they adjust; warn of sites without any."""
    if idle := [site for site in terms if site not in chosen.adjust]:
        raise ModelError(
            f"adjust: no column of {', '.join(map(repr, idle))} is clustered, so covariates there adjust "
            f"nothing. {HELD_THERE}: add them to the other tables, under names of their own"
        )
    left = [site for site in chosen.columns if site not in chosen.adjust]
    if one_for_all and left:
        warn(
            f"adjust: columns of {', '.join(map(repr, left))} are not adjusted, because no covariate is at "
            "that site, so clusters may reflect it. Add the covariate to that site's table under a name of "
            "its own, or leave its columns out",
            DataWarning,
            Remedy("from_formula(..., adjust={adjust}).fit(...)", ", or confirm by {arguments}").filled(
                adjust={site: f"~ {' + '.join(one.terms)}" for site, one in terms.items()}
            ),
        )


def warn_of_lacking(reported: Mapping[str, CovariatesReply]) -> None:
    """Warn of entities that count as missing at a site because they lack a covariate."""
    counts = [f"{one.without:,} at '{site}'" for site, one in reported.items() if one.without]
    if counts:
        warn(
            f"adjust: entities that lack a covariate count as missing there: {', '.join(counts)}. To keep "
            "them, fill covariates in before the partition is made",
            DataWarning,
        )


# ----------------------------------------------------------------------------------------------------
# Agreement before a fit: kinds and levels of columns, modalities, and which sites have which entities.

PER_FACTOR, PER_CLUSTER = 5, 10
"""Fewest entities of a site for each factor, and of all sites for each cluster."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnsSchema:
    """Modalities by site, which of its records have a value in them, (n_rows,), and covariates as coded."""

    modalities: Mapping[str, tuple[ModalityRequest, ...]]
    seen: Mapping[str, Bools]
    covariates: Mapping[str, CovariatesReply] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """Number of columns of all sites."""
        return sum(len(one.columns) for some in self.modalities.values() for one in some)


def agree_columns(requester: SecureProductSession, chosen: ColumnSelection) -> FitProtocol[ColumnsSchema]:
    """Agree with every site on its columns."""
    sites = list(chosen.columns)
    replies = yield [requester.request(c, "describe_columns", to_json(chosen.requested(c))) for c in sites]
    reported = {
        reply.site: from_json(dict[str, ColumnReply], reply.text, f"{reply.site}: its reply about columns")
        for reply in replies
    }
    check_counted(reported)
    modalities = {site: chosen.modalities(site, reported[site]) for site in sites}
    request = {c: OpenRequest(modalities[c], chosen.covariates(c)) for c in sites}
    replies = yield [requester.request(c, "open_columns", to_json(request[c])) for c in sites]
    covariates = {
        reply.site: from_json(CovariatesReply, reply.text, f"{reply.site}: its reply about covariates")
        for reply in replies
        if request[reply.site].adjust is not None
    }
    return ColumnsSchema(modalities, {reply.site: reply.arrays["seen"] for reply in replies}, covariates)


def who_has_whom(
    agreed: ColumnsSchema,
    rows: Mapping[str, Ints],
    n_entities: int,
    least: Mapping[str, tuple[int, float]],
    *,
    nobody: bool = False,
) -> tuple[EntityIndex, Ints]:
    """Find the entities that some site has, and their positions among all.

    Raises EstimationError if no site has a value for some entities, unless this is allowed.
    """
    sites = tuple(sorted(agreed.modalities))
    table = np.zeros((n_entities, len(sites)), dtype=np.bool_)
    for k, site in enumerate(sites):
        table[rows[site][agreed.seen[site]], k] = True
    here = np.flatnonzero(table.any(axis=1))
    if len(here) < n_entities and not nobody:
        with_covariates = ", or lack a covariate of adjust=" if agreed.covariates else ""
        raise EstimationError(
            f"{n_entities - len(here):,} of {n_entities:,} entities have no value in any of these columns "
            f"at any site{with_covariates}, so their clusters are unknown. Leave them out of the partition, "
            "or take more columns"
        )
    members, pattern = np.unique(table[here], axis=0, return_inverse=True)
    place = {site: np.flatnonzero(table[here, k]) for k, site in enumerate(sites)}
    return EntityIndex(sites, place, pattern.ravel().astype(np.int64), members, least), here


def check_sizes(agreed: ColumnsSchema, subjects: EntityIndex, clusters: int, factors: int) -> None:
    """Require enough entities for the clusters, and enough columns and entities for the factors."""
    n = subjects.total
    if clusters > n / PER_CLUSTER:
        raise ModelError(
            f"n_clusters: expected at most {n // PER_CLUSTER} for {n:,} entities, {PER_CLUSTER} for each; "
            f"received {clusters}"
        )
    for site in agreed.modalities:
        here = len(subjects.place[site])
        if here < PER_FACTOR * factors:
            raise ModelError(
                f"n_factors: '{site}' has {here:,} entities, but {factors} factors need "
                f"{PER_FACTOR * factors}. Take fewer factors, or leave its columns out"
            )
