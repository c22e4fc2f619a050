"""Known covariates at the institution whose columns they adjust: coded as in a design, and standardised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.block import CodedBlock, apply_block, build_block
from fedstat.federation.design.formula.asked import terms_asked
from fedstat.federation.design.formula.parse import ClientTerms
from fedstat.federation.design.spec import BlockSpec, read_terms
from fedstat.federation.door.facts import RowsByLevel, SummedColumns
from fedstat.federation.door.state import SiteData, State
from fedstat.models.m2sem.client.asked import CovariatesAsked, CovariatesTold
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class OpenedCovariates:
    """Covariates of the rows that are open, (n, q), with means and deviations (2, q) of those of the fit."""

    spec: BlockSpec
    X: Floats
    units: Floats

    @property
    def standardised(self) -> Floats:
        """Standardised covariates, (n, q)."""
        return np.asarray((self.X - self.units[0]) / self.units[1])

    def in_units(self, site: str, units: Floats) -> OpenedCovariates:
        """Return the same with the means and deviations of a fit."""
        if units.shape != (2, self.X.shape[1]) or not (units[1] > 0.0).all():
            raise MessageError(f"{site}: expected means and deviations of {self.X.shape[1]} covariates")
        return replace(self, units=units)


def open_covariates(
    data: SiteData, state: State, asked: CovariatesAsked, use: Bools
) -> tuple[OpenedCovariates, Bools, CovariatesTold]:
    """Code covariates of the rows in `use`: return them, the rows (n_rows,) that have all, what is told."""
    terms = ClientTerms(data.name, asked.terms, asked.columns)
    state.tell(terms_asked(read_terms(terms.terms, terms.columns)))
    state.play(asked.columns)
    block = build_block(
        data.frame, terms, partial="drop", min_count=data.min_count, use=use, published=data.published
    )
    # Levels leave with their names, and means, deviations and slopes of covariates with the estimates.
    for name in block.spec.levels:
        state.tell(RowsByLevel(name, data.frame[name][block.seen].value_counts().tolist()))
    state.tell(SummedColumns(block.X))
    units = np.array([block.X.mean(axis=0), block.X.std(axis=0)])
    told = CovariatesTold(block.spec.names, block.spec.levels, int(use.sum() - block.seen.sum()))
    return OpenedCovariates(block.spec, block.X, units), block.seen, told


def open_new_covariates(
    data: SiteData, state: State, coding: str, use: Bools
) -> tuple[OpenedCovariates, Bools]:
    """Code the covariates of new rows as in a fit: return them, and the rows in `use` that have all."""
    spec = BlockSpec.from_json(coding)
    state.tell(terms_asked(read_terms(spec.terms, spec.columns)))
    state.play(spec.columns)
    block = apply_block(data.frame, spec, client=data.name)
    return _among(block, use), np.asarray(block.seen & use)


def _among(block: CodedBlock, use: Bools) -> OpenedCovariates:
    X = block.X[use[block.seen]]
    return OpenedCovariates(block.spec, X, np.array([np.zeros(X.shape[1]), np.ones(X.shape[1])]))
