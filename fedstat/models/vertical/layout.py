"""The layout of a fit of sites with different columns: sites, columns, entities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fedstat.federation.design.formula.terms import parse_term
from fedstat.federation.design.vertical_design import BlockDesign, Design
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.tables.cardinality import ColumnCardinality
from fedstat.federation.tables.columns import number_units
from fedstat.federation.tables.supports import PER_COLUMN
from fedstat.inference.summary import CoefficientBlock
from fedstat.models.vertical.moments import number_patterns
from fedstat.models.vertical.pattern_merging import ColumnUnits, select_columns
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Layout:
    """Sites, columns and entities of a fit: agreed before anything is computed.

    `sites` are the sites with columns in the model, in partition order; `active` holds the response.
    `names` and `terms` (p,) are columns in the order of the sites, `sizes` the number of columns of each.
    There are `n` entities in the fit, `n_design` with a response. `keep` states which rows of a site's opened
    block take part, `kept` their ascending positions among the n entities, `response_keep` which rows of the
    active site. If entities take part with some of a site's columns, `has` (m, p_k) of that site states with
    which. `absent` counts entities with a response that a site lacks. With `filled`, missing blocks are
    mean-imputed, so that nothing is missing. `aside` records are left out as in an earlier fit. `details` of
    each site and that of the response have the columns of few values, None if the site's owner does not
    require their check. `bystanders` are sites of the partition without columns in the model that deal if two
    sites have no third. `least` is the smallest number of rows of a product at sites that count them.
    `weights` (n,) are those of the entities, if they have any: `frequencies`, or inverse variances. `lacking`
    counts by term the values that entities with some of a site's columns lack, if such entities count as
    missing there. The owners require `each` entity behind every equation of sums of products.
    `offset` (n,) is that of linear predictors, if it was released.
    """

    sites: tuple[str, ...]
    active: str
    names: tuple[str, ...]
    terms: tuple[str, ...]
    sizes: tuple[int, ...]
    n: int
    n_design: int
    keep: Mapping[str, Bools]
    kept: Mapping[str, Ints]
    response_keep: Bools
    absent: Mapping[str, int]
    filled: bool = False
    aside: int = 0
    details: tuple[ColumnCardinality | None, ...] = ()
    response_detail: ColumnCardinality | None = None
    bystanders: tuple[str, ...] = ()
    has: Mapping[str, Bools] = field(default_factory=dict)
    weights: Floats | None = None
    frequencies: bool = False
    least: Mapping[str, int] = field(default_factory=dict)
    lacking: Mapping[str, int] = field(default_factory=dict)
    each: float = MIN_ENTITIES_PER_EQUATION
    offset: Floats | None = None

    # ---- columns -------------------------------------------------------------------------------

    @property
    def p(self) -> int:
        """Columns of all sites."""
        return sum(self.sizes)

    @property
    def owners(self) -> tuple[str, ...]:
        """Site of each column."""
        return tuple(np.repeat(self.sites, self.sizes).tolist())

    def places(self, first: int = 0) -> dict[str, slice]:
        """Return the indices of each site's columns, counted from `first`."""
        ends = first + np.cumsum(self.sizes)
        pairs = zip(self.sites, self.sizes, ends.tolist(), strict=True)
        return {site: slice(end - size, end) for site, size, end in pairs}

    def supports(self, site: str) -> int:
        """How many supports a site's columns have; none of one without columns."""
        place = self.places().get(site, slice(0, 0))
        return sum(PER_COLUMN ** len(parse_term(term)) for term in self.terms[place])

    def split(self, values: Floats) -> dict[str, Floats]:
        """Split a vector of all columns, (p,), by site."""
        return {site: np.ascontiguousarray(values[at]) for site, at in self.places().items()}

    # ---- entities ------------------------------------------------------------------------------

    @property
    def left_out(self) -> int:
        """Number of entities with a response that are left out."""
        return self.n_design - self.n

    @property
    def most_grams(self) -> int:
        """Weighted Gram matrices that may be released over the same entities."""
        return int(self.n // (self.each * (self.p + 1)))

    @property
    def rows(self) -> Mapping[str, Ints]:
        """Positions of the entities that count as observed: `kept`, or all with mean imputation."""
        return dict.fromkeys(self.sites, np.arange(self.n)) if self.filled else self.kept

    def own(self, site: str) -> Bools | None:
        """Which of the entities in :attr:`rows` a site has a record of; None for all."""
        return np.isin(self.rows[site], self.kept[site]) if self.filled else None

    @cached_property
    def unit(self) -> Ints:
        """Number of the unit of each column, (p,): those of one site that are missing together."""
        each: list[Ints] = []
        for site, size in zip(self.sites, self.sizes, strict=True):
            own = np.zeros(size, dtype=np.int64)
            own = number_units(self.has[site], own) if site in self.has else own
            each.append(own + (each[-1].max() + 1 if each else 0))
        return np.concatenate(each)

    @property
    def units(self) -> ColumnUnits:
        """Site and columns of each unit."""
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        _, first, sizes = np.unique(self.unit, return_index=True, return_counts=True)
        return ColumnUnits(tuple(owner[first].tolist()), tuple(sizes.tolist()))

    @cached_property
    def _patterns(self) -> tuple[Bools, Ints, Floats]:
        _, first = np.unique(self.unit, return_index=True)
        missing = np.ones((self.n, len(first)), dtype=bool)
        for u, column in enumerate(first):
            site = self.owners[column]
            rows = self.rows[site]
            if site in self.has:
                rows = rows[self.has[site][:, column - self.places()[site].start]]
            missing[rows, u] = False
        first, code, counts = number_patterns(missing)
        return missing[first], code, counts

    @property
    def missing(self) -> Bools:
        """Return which unit is missing in which pattern: (G, U), by site if each is one unit."""
        return self._patterns[0]

    @property
    def seen_at(self) -> Bools:
        """Return at which sites some of the columns are observed in which pattern: (G, K)."""
        return self.units.any_of(~self.missing)

    @property
    def code(self) -> Ints:
        """Missing pattern of each entity: (n,)."""
        return self._patterns[1]

    @property
    def counts(self) -> Floats:
        """Entities of each pattern: (G,)."""
        return self._patterns[2]

    def narrowed(
        self,
        used: Bools,
        shown: Mapping[str, Bools] | None = None,
        has: Mapping[str, Bools] | None = None,
    ) -> Layout:
        """Lay out a fit of some of the entities, (n,) of bool, and some of each site's records of them.

        `shown` states which of the entities of a site, (m,), still count as observed; the default is all.
        `has` replaces which columns they have.
        """
        shown = {k: used[self.kept[k]] for k in self.sites} if shown is None else shown
        if used.all() and all(own.all() for own in shown.values()) and has is None:
            return self
        place = np.cumsum(used) - 1
        partly = {k: columns[shown[k]] for k, columns in (self.has if has is None else has).items()}
        return replace(
            self,
            has={k: columns for k, columns in partly.items() if not columns.all()},
            n=int(used.sum()),
            keep={k: select_columns(self.keep[k], own) for k, own in shown.items()},
            kept={k: place[self.kept[k][own]] for k, own in shown.items()},
            response_keep=select_columns(self.response_keep, used),
            weights=None if self.weights is None else self.weights[used],
            offset=None if self.offset is None else self.offset[used],
        )

    # ---- weights -------------------------------------------------------------------------------

    @property
    def relative(self) -> Floats:
        """Weights of mean one, (n,)."""
        return np.ones(self.n) if self.weights is None else self.weights / self.weights.mean()

    @property
    def counted(self) -> float:
        """Number of entities that one of mean weight represents."""
        return float(self.weights.mean()) if self.frequencies and self.weights is not None else 1.0

    @property
    def nobs(self) -> float:
        """Entities that the rows represent."""
        return self.n * self.counted

    @property
    def log_weights(self) -> float:
        """Term that weights of variances add to a normal log-likelihood: half the sum of their logarithms."""
        return 0.0 if self.frequencies else 0.5 * float(np.log(self.relative).sum())

    @property
    def variance_of_one(self) -> float:
        """Variance of an entity of weight one, relative to that of mean weight, with var_weights."""
        return float(self.weights.mean()) if not self.frequencies and self.weights is not None else 1.0


def lay_out(
    design: Design, blocks: Sequence[BlockDesign], use: Bools, *, filled: bool = False, partly: bool = False
) -> Layout:
    """Lay out a fit of some of the entities, (n_design,) of bool, and of some of the blocks of a design.

    Entities with some of a site's columns count as missing there, unless they take part `partly`.
    """
    place = np.cumsum(use) - 1
    keep = {block.site: use[block.rows] & (block.complete | partly) for block in blocks}
    has = {b.site: b.has[keep[b.site]] for b in blocks if partly and b.has is not None}
    brought = {b.site: len(b.rows) if partly else int(b.complete.sum()) for b in blocks}
    return Layout(
        sites=tuple(block.site for block in blocks),
        active=design.active,
        names=tuple(name for block in blocks for name in block.names),
        terms=tuple(term for block in blocks for term in block.term_names),
        sizes=tuple(len(block.names) for block in blocks),
        n=int(use.sum()),
        n_design=design.n,
        keep=keep,
        kept={block.site: place[block.rows[keep[block.site]]].astype(np.int64) for block in blocks},
        response_keep=select_columns(design.response_keep, use),
        absent={site: design.n - m for site, m in brought.items() if m < design.n},
        filled=filled,
        details=tuple(block.detail for block in blocks),
        response_detail=design.response_detail,
        has={site: columns for site, columns in has.items() if not columns.all()},
        weights=None if design.weights is None else design.weights[use],
        least=design.least,
        lacking={} if partly else values_of_parts(blocks, has=False),
    )


def values_of_parts(blocks: Sequence[BlockDesign], has: bool) -> dict[str, int]:
    """Count by term the values that entities with only some of a site's columns have, or lack."""
    counts: dict[str, int] = {}
    for block in blocks:
        if block.has is not None:
            each = (block.has == has)[~block.complete].sum(axis=0).tolist()
            counts |= dict(zip(block.term_names, each, strict=True))
    return {term: int(m) for term, m in counts.items() if m}


def list_terms(counts: Mapping[str, int]) -> str:
    """List terms with their counts."""
    return ", ".join(f"'{term}' {m:,}" for term, m in counts.items())


def complete_at(blocks: Sequence[BlockDesign], n: int) -> Bools:
    """Return which of n entities every one of the blocks has."""
    counts = np.zeros(n, dtype=np.int64)
    for block in blocks:
        counts[block.rows[block.complete]] += 1
    return np.asarray(counts == len(blocks))


def site_blocks(layout: Layout) -> tuple[CoefficientBlock, ...]:
    """List the blocks of the sites, the response holder first if it holds no columns."""
    rows = [] if layout.active in layout.sites else [CoefficientBlock(layout.active, 0, layout.n, 0.0)]
    pairs = list(zip(layout.sites, layout.sizes, strict=True))
    has = {site: len(layout.kept[site]) for site in layout.sites}
    known = {k: float(layout.has[k].sum()) / size if k in layout.has else has[k] for k, size in pairs}
    return (
        *rows,
        *[CoefficientBlock(k, size, has[k], 1.0 - known[k] / layout.n) for k, size in pairs],
    )


def missing_by_column(layout: Layout) -> dict[str, dict[str, float]]:
    """Share of missing values by column, of the entities with a record at its site, for incomplete sites."""
    shares = {site: 1.0 - has.mean(axis=0) for site, has in layout.has.items()}
    names = {site: layout.names[place] for site, place in layout.places().items()}
    return {k: dict(zip(names[k], own.tolist(), strict=True)) for k, own in shares.items() if own.any()}
