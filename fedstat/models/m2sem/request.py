"""Requests of the coordinator of a mixture to the sites."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

import numpy as np

from fedstat.codec import Minimum
from fedstat.errors import MessageError
from fedstat.federation.disclosure.family import PER_ENTITY, state_without_terms
from fedstat.federation.tables.columns import LevelValue
from fedstat.typing import Floats, Ints

FAMILY = state_without_terms("m2sem", PER_ENTITY)
Kind: TypeAlias = Literal["continuous", "ordinal", "binary", "nominal"]
Reported: TypeAlias = Literal["continuous", "ordinal", "binary", "nominal", "counted"]
MOST_CLUSTERS, MOST_FACTORS, MOST_NODES, MOST_STEPS, MOST_SLOTS = 50, 5, 31, 100, 200
MOST_GRID = 20_000
"""Nodes of a grid over all factors."""
NONE = -1
"""Placeholder for a slot: the local factor analyses, from which clusters start."""


@dataclass(frozen=True, slots=True)
class ColumnsRequest:
    """Columns of a site, and those whose kinds the analyst states."""

    columns: tuple[str, ...]
    continuous: tuple[str, ...] = ()
    ordinal: tuple[str, ...] = ()
    nominal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ColumnReply:
    """The kind of a column, and its levels in order; "counted" are whole numbers with few values."""

    kind: Reported
    levels: tuple[LevelValue, ...] = ()


@dataclass(frozen=True, slots=True)
class MixtureColumn:
    """A column of a modality, with the levels that are used."""

    name: str
    kind: Kind
    levels: tuple[LevelValue, ...] = ()


@dataclass(frozen=True, slots=True)
class ModalityRequest:
    """Columns that share factors: all continuous, or all categorical."""

    name: str
    columns: tuple[MixtureColumn, ...]

    @property
    def continuous(self) -> bool:
        """Whether its columns are numbers."""
        return all(column.kind == "continuous" for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its columns."""
        return tuple(column.name for column in self.columns)

    def factors(self, most: int) -> int:
        """Return the number of factors, at most `most`: no more than columns."""
        return min(most, len(self.columns))

    @property
    def most_levels(self) -> int:
        """Number of levels of the column that has most; one for numbers."""
        return max(1, *(len(column.levels) for column in self.columns))

    @property
    def kind(self) -> str:
        """The kind of its columns, in a word or two."""
        return " and ".join(dict.fromkeys(column.kind for column in self.columns))

    def check(self) -> None:
        """Require columns, all numerical or all categorical."""
        mixed = {column.kind == "continuous" for column in self.columns}
        if len(mixed) != 1 or any((c.kind == "continuous") == bool(c.levels) for c in self.columns):
            raise MessageError("expected modalities of columns that are all numbers, or all have levels")


@dataclass(frozen=True, slots=True)
class CovariatesRequest:
    """Terms of known covariates, and their columns."""

    terms: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Modalities of a site, and the covariates for which all of their columns are adjusted."""

    modalities: tuple[ModalityRequest, ...]
    adjust: CovariatesRequest | None = None


@dataclass(frozen=True, slots=True)
class OpenNewRowsRequest:
    """Modalities of new rows, whose covariates are coded as in a fit: a ``BlockSpec`` in JSON."""

    modalities: tuple[ModalityRequest, ...]
    coding: str


@dataclass(frozen=True, slots=True)
class CovariatesReply:
    """Names (q,) of covariates as coded, levels of columns, and observed rows that lack some covariate."""

    names: tuple[str, ...]
    levels: Mapping[str, tuple[LevelValue, ...]]
    without: int


@dataclass(frozen=True, slots=True)
class BeginRequest:
    """Numbers of factors for the factor analyses, 0 for latent classes, and nodes for each factor."""

    factors: tuple[Annotated[int, Minimum(0)], ...]
    nodes: Annotated[int, Minimum(2)]

    def check(self) -> None:
        """Require grids that fit into the memory of a site."""
        most = max(self.factors, default=0)
        if not self.factors or most > MOST_FACTORS or self.nodes > MOST_NODES or self.nodes**most > MOST_GRID:
            raise MessageError(
                f"expected 0 to {MOST_FACTORS} factors, at most {MOST_NODES} nodes for each and at most "
                f"{MOST_GRID:,} for all factors"
            )


@dataclass(frozen=True, slots=True)
class MixtureUpdateRequest:
    """One mixture to be improved, by this many local EM steps with fixed posteriors.

    It continues the mixture that is stored as `source`. With `scores`, its densities are those of spheres
    around the means of the factor scores, for k-means. `fixed`: loadings and means that are zero in the
    source stay so. `weigh`: penalties are adapted to the source first. `nodes` for each factor; `report`
    requests the support.
    """

    slot: Annotated[int, Minimum(0)]
    source: Annotated[int, Minimum(-1)]
    clusters: Annotated[int, Minimum(1)]
    factors: Annotated[int, Minimum(0)]
    steps: Annotated[int, Minimum(0)] = 1
    lam1: Annotated[float, Minimum(0.0)] = 0.0
    lam2: Annotated[float, Minimum(0.0)] = 0.0
    fixed: bool = False
    scores: bool = False
    weigh: bool = False
    report: bool = False
    nodes: Annotated[int, Minimum(2)] = 7

    def check(self) -> None:
        """Limit the computing time at a site."""
        if self.clusters > MOST_CLUSTERS or self.steps > MOST_STEPS:
            raise MessageError(f"expected at most {MOST_CLUSTERS} clusters and {MOST_STEPS} local steps")
        if self.nodes > MOST_NODES or self.nodes**self.factors > MOST_GRID:
            raise MessageError(f"expected at most {MOST_NODES} nodes per factor, {MOST_GRID:,} in all")


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """Mixtures that are improved in parallel; all others except the `kept` ones are deleted.

    All sites receive the same request: `posteriors` are digests of those of every presence pattern, and
    `past` is a digest of all earlier requests in this fit.
    """

    slots: tuple[MixtureUpdateRequest, ...]
    kept: tuple[int, ...]
    posteriors: tuple[str, ...]
    past: str

    def check(self) -> None:
        """Require at least one mixture, without repetition."""
        if not self.slots or len({one.slot for one in self.slots}) < len(self.slots):
            raise MessageError("expected one or more different mixtures")
        if len(self.slots) > MOST_SLOTS:
            raise MessageError(f"expected at most {MOST_SLOTS} mixtures in one round")

    def follow(self, text: str) -> str:
        """Digest of the requests up to this round, which had this text."""
        return hashlib.sha256(f"{self.past} {text}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """Size of a fitted mixture, and its nodes for each factor."""

    clusters: Annotated[int, Minimum(1)]
    factors: Annotated[int, Minimum(0)]
    nodes: Annotated[int, Minimum(2)]

    def check(self) -> None:
        """Limit the memory at a site."""
        if self.clusters > MOST_CLUSTERS or self.nodes**self.factors > MOST_GRID:
            raise MessageError(f"expected at most {MOST_CLUSTERS} clusters and {MOST_GRID:,} nodes")


def digest_posteriors(salt: bytes, r: Floats) -> str:
    """Digest of the posteriors (n, K) of all entities with one presence pattern, in their order."""
    digest = hashlib.sha256(salt + str(r.shape).encode())
    digest.update(np.ascontiguousarray(r).tobytes())
    return digest.hexdigest()


def by_pattern(pattern: Ints, groups: int) -> list[Ints]:
    """Entities of each presence pattern, in their order."""
    order = np.argsort(pattern, kind="stable")
    ends = np.searchsorted(pattern[order], np.arange(groups + 1))
    return [order[a:b] for a, b in pairwise(ends.tolist())]


def split_columns(values: Floats, widths: Sequence[int]) -> list[Floats]:
    """Split an array of several mixtures, (n, sum of widths), by mixture."""
    return np.split(values, np.cumsum(widths)[:-1], axis=1)
