"""Linear predictors of new entities from the blocks that they have, coded as in the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.coding import BlockSpec, coded_columns, read_terms
from fedstat.federation.design.formula.parse import SiteTerms
from fedstat.federation.design.formula.syntax_tree import iter_transforms
from fedstat.federation.design.vertical_design import design_request, observed_columns
from fedstat.federation.dry_run.synthetic import synthetic_entity_sites
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.checks import check_layout
from fedstat.models.run import PostFitAnalysis
from fedstat.models.vertical.model import VerticalModel
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The coding of columns and response of a fit, for the entities of a prediction.


@dataclass(frozen=True, slots=True)
class ResponseSource:
    """Source of the response of a fit: its holder, the left side of the formula, and its columns."""

    site: str
    text: str
    columns: tuple[str, ...]


def released_specs(model: VerticalModel, sites: tuple[str, ...]) -> dict[str, str]:
    """Request from the sites of a fit the coding of their columns, without those that the fit left out."""
    # A smaller model from the moments of a larger one uses its session, and sends no request twice.
    unknown = [k for k in sites if k not in model._codings]

    def protocol() -> FitProtocol[dict[str, str]]:
        replies = yield [design_request(k, "release_spec", model._session) for k in unknown]
        return {reply.site: reply.text for reply in replies}

    if unknown:
        model._codings.update(model.engine.run(protocol(), model._new_ledger()))
    terms = {part.site: part for part in model.formula.sites}
    return {k: store_coded(model._codings[k], terms[k]) for k in sites}


def store_coded(spec: str, terms: SiteTerms) -> str:
    """Keep the coding of some of the terms of a site."""
    complete = BlockSpec.from_json(spec)
    if complete.terms == terms.terms:
        return spec
    parsed = read_terms(terms.terms, terms.columns)
    transforms = {t.text for term in parsed for factor in term for t in iter_transforms(factor.tree)}
    columns = [(n, t) for n, t in zip(complete.names, complete.term_names, strict=True) if t in terms.terms]
    kinds = {name: complete.kinds[name] for name in terms.columns}
    coded = coded_columns(parsed, kinds)
    return replace(
        complete,
        terms=terms.terms,
        columns=terms.columns,
        names=tuple(name for name, _ in columns),
        term_names=tuple(term for _, term in columns),
        kinds=kinds,
        levels={name: complete.levels[name] for name in coded},
        state={text: state for text, state in complete.state.items() if text in transforms},
        means={name: mean for name, mean in complete.means.items() if name in terms.columns},
    ).to_json()


# ----------------------------------------------------------------------------------------------------
# Linear predictors of new entities from the blocks that they have.
#
# If an entity lacks a block, the mean of the block's linear predictor is used: its expectation if blocks are
# independent between sites.


@dataclass(frozen=True, slots=True)
class FittedBlocks:
    """Coefficients of a fit by site, and the coding of its columns.

    `mean` is the linear predictor of an entity without any block; `means` has the average contribution of
    each block, zero where left out.
    """

    sites: tuple[str, ...]
    specs: Mapping[str, str]
    beta: Mapping[str, Floats]
    mean: float
    means: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OpenedBlocks:
    """Columns of sites, coded as in a fit, in an open session.

    `rows` are the entities of each site that was queried, `missing` (n, K) the blocks that entities lack; for
    sites with partial blocks, `has` states with which columns entities take part, (rows, p_k).
    """

    missing: Bools
    rows: Mapping[str, Ints]
    session: str
    has: Mapping[str, Bools] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PredictedBlocks:
    """Linear predictors (n,) of the entities of a partition, and their columns."""

    linear: Floats
    opened: OpenedBlocks

    @property
    def missing(self) -> Bools:
        """Return which blocks each entity lacks, (n, K)."""
        return self.opened.missing


def present_sites(sites: Sequence[str], partition: ClientPartition) -> tuple[str, ...]:
    """Return the sites of a fit that a partition has, too; a ModelError if it is horizontal."""
    check_layout("a prediction", partition, "vertical")
    return tuple(k for k in sites if k in partition.sites)


def new_ledger(partition: ClientPartition, holder: str) -> Ledger:
    """Start a ledger; the coordinator is at the response holder if the partition has it.

    Raises ModelError if it is not a partition, or is horizontal.
    """
    check_layout("a prediction", partition, "vertical")
    return Ledger(at=partition._coordinator_at(holder))


def prediction_analysis(
    call: str, blocks: FittedBlocks, response: str, distribution: object, partition: ClientPartition
) -> PostFitAnalysis:
    """Describe a prediction to owners, for their consent."""
    specs = {k: BlockSpec.from_json(spec) for k, spec in blocks.specs.items()}
    terms = [term for spec in specs.values() for term in spec.terms]
    return PostFitAnalysis(
        partition,
        call,
        f"{response} ~ {' + '.join(terms) or 1}",
        str(distribution),
        partial(synthetic_entity_sites, partition.rows),
        {k: spec.columns for k, spec in specs.items()},
    )


def open_blocks(
    blocks: FittedBlocks,
    request: Sequence[str],
    partition: ClientPartition,
    family: str,
    *,
    partly: bool = False,
) -> FitProtocol[OpenedBlocks]:
    """Code the columns of some sites as in the fit.

    Entities with some of a site's columns count as missing there, unless they may take part `partly`. Raises
    DesignError if a site's columns cannot be coded in this way.
    """
    requester = SecureProductSession(family, partition._new_session(), None)
    missing = np.ones((partition.n_entities, len(blocks.sites)), dtype=bool)
    if not request:
        return OpenedBlocks(missing, {}, requester.session)
    partial = "drop" if partition.partial == "condition" and not partly else partition.partial
    opened = yield [
        design_request(k, "open_new_block", requester.session, {"spec": blocks.specs[k], "partial": partial})
        for k in request
    ]
    rows = {k: partition.rows[k][r.arrays["seen"]] for k, r in zip(request, opened, strict=True)}
    for k in request:
        missing[rows[k], blocks.sites.index(k)] = False
    reported = {k: observed_columns(reply) for k, reply in zip(request, opened, strict=True)}
    has = {k: columns for k, columns in reported.items() if columns is not None}
    return OpenedBlocks(missing, rows, requester.session, has)


def predict_blocks(
    blocks: FittedBlocks, request: Sequence[str], partition: ClientPartition, family: str
) -> FitProtocol[PredictedBlocks]:
    """Add up the linear predictors of some sites; a DesignError as in :func:`open_blocks`."""
    linear = np.full(partition.n_entities, blocks.mean)
    opened = yield from open_blocks(blocks, request, partition, family)
    if not request:
        return PredictedBlocks(linear, opened)
    requester = SecureProductSession(family, opened.session, None)
    replies = yield [requester.request(k, "predict_block", beta=blocks.beta[k]) for k in request]
    for k, reply in zip(request, replies, strict=True):
        # `mean` has every block at its average; an available block replaces its average.
        linear[opened.rows[k]] += reply.arrays["linear_predictor"] - blocks.means.get(k, 0.0)
    return PredictedBlocks(linear, opened)


def project_blocks(
    blocks: FittedBlocks,
    request: Sequence[str],
    partition: ClientPartition,
    family: str,
    factor: Floats,
    of: Sequence[str],
) -> FitProtocol[tuple[PredictedBlocks, Floats]]:
    """In addition to linear predictors, request projections of the rows, (1, x), on a factor (p + 1, r).

    `of` (p,) names the site of each column. Missing blocks count as zero.
    """
    found = yield from predict_blocks(blocks, request, partition, family)
    rows = {k: factor[1:][np.array(of) == k] for k in request}
    to = SecureProductSession(family, found.opened.session, None)
    replies = yield [
        to.request(k, "project_block", mu=np.zeros(len(rows[k])), factor=rows[k]) for k in request
    ]
    out = np.tile(factor[0], (len(found.linear), 1))
    for k, reply in zip(request, replies, strict=True):
        out[found.opened.rows[k]] += reply.arrays["projection"]
    return found, out
