"""Results of boosting when sites hold different columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.horizontal_design import RowsAgreement, SiteRowCounts
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.inference.estimate import Estimate
from fedstat.inference.summary import CoefficientBlock, Note
from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.results import BoostRecord, BoostResults
from fedstat.models.boost.vertical.protocol import VerticalMoments
from fedstat.models.horizontal.results import RowsBasis
from fedstat.models.vertical.exchange.notes import dealer_notes, dither_notes, sums_note
from fedstat.models.vertical.layout import client_blocks


@dataclass(frozen=True, slots=True, eq=False)
class BlocksBasis(RowsBasis):
    """What results keep of institutions: their blocks, and what is to be said of the exchange."""

    blocks: tuple[CoefficientBlock, ...]
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlocksRecord(BoostRecord):
    """What a file of results holds."""

    basis: BlocksBasis


class VerticalBoostResults(BoostResults, saved_as="fedstat boost vertical results 2", record=BlocksRecord):
    """Results of a fit over institutions with different columns: as :class:`BoostResults`.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(300, missing=[0.0, 0.0, 0.0], seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fs.FedFunctionBoost.from_formula("y ~ A1 + B1", partition).fit(steps=20)
    <VerticalBoostResults: y, 20 steps, 300 entities; see .summary()>
    """

    _record: BlocksRecord

    @classmethod
    def _of_exchange(
        cls,
        model: Any,
        boosting: Boosting,
        found: VerticalMoments,
        steps: int,
        select: str | None,
        ledger: Ledger,
    ) -> Self:
        """Make results of a fit."""
        held = {name: model.curves[name] for name in model.question.read_curves}
        agreement = pooled_agreement(model.question, found.specs, model.layout.n, model.partition.n_entities)
        record = BlocksRecord(
            basis=BlocksBasis(
                cls.model_name,
                "",
                agreement,
                "",
                client_blocks(model.layout),
                tuple(exchange_notes(model, found.dealers)),
            ),
            formula=model.boost,
            boosting=boosting,
            t=model._points,
            curves={name: curve.declared for name, curve in held.items()},
            grids={name: curve.grid for name, curve in held.items()},
            steps=steps,
            select=select,
            masked=False,
        )
        return cls(record, ledger)

    @cached_property
    def estimate(self) -> Estimate:
        """Numbers that every family hands over."""
        return replace(super().estimate, blocks=self._record.basis.blocks)

    def _summary_right(self) -> list[tuple[str, str]]:
        return [(name, "in shares" if name == "Sums" else text) for name, text in super()._summary_right()]

    def _summary_notes(self) -> Iterator[Note]:
        yield from (note for note in super()._summary_notes() if note.kind != "left_out")
        if left_out := self._record.basis.left_out:
            yield Note(
                "left_out",
                f"{left_out:,} entities without a response, or that an institution lacks, were left out.",
            )
        yield from self._record.basis.notes


def exchange_notes(model: Any, dealers: Mapping[tuple[str, str], str]) -> Iterator[Note]:
    """Say what was exchanged, who dealt, and whose columns were dithered."""
    yield sums_note("", model.layout.n)
    yield from dither_notes(model.layout)
    yield from dealer_notes(dealers, bystanders=model.layout.bystanders)


def pooled_agreement(
    question: RowsRequest, specs: tuple[BlockSpec, ...], n: int, n_entities: int
) -> RowsAgreement:
    """Put the codings of institutions together, as those of one table: new rows are coded by it."""
    spec = BlockSpec(
        terms=question.terms,
        columns=question.columns,
        kinds={name: kind for one in specs for name, kind in one.kinds.items()},
        levels={name: levels for one in specs for name, levels in one.levels.items()},
        state={name: state for one in specs for name, state in one.state.items()},
    )
    return RowsAgreement(question, spec, (SiteRowCounts("", n_entities, n),))
