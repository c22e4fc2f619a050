"""Weights of a treatment that a fitted propensity model offers to other models of the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedstat.errors import ModelError
from fedstat.federation.design.horizontal_design import RowsSchema
from fedstat.federation.design.propensity_weights import PropensityWeights
from fedstat.models.checks import kind_of, weights_of


@dataclass(frozen=True, slots=True)
class FittedPropensity:
    """A fitted propensity model, and how many rows of each site it was fitted on."""

    weights: PropensityWeights
    rows: Mapping[str, int]


@runtime_checkable
class WeighsRows(Protocol):
    """Results with a propensity model."""

    @property
    def propensity(self) -> FittedPropensity | None:
        """The propensity model; None if there is none, or weights depend on more."""


def propensities_of(weights: object, model: type) -> tuple[FittedPropensity, ...]:
    """Return the propensity models of an argument `weights` of a model: results with one, or a list of these.

    Raises
    ------
    ModelError
        One of them is something else, or has no propensity model for all of its rows.
    """
    several = list(weights) if isinstance(weights, list | tuple) else [weights]
    found = []
    for one in several:
        if not isinstance(one, WeighsRows):
            raise ModelError(
                f"weights: {weights_of(model)}. Weights of a treatment are the balance or the result of a "
                f"TreatmentEffect, or a list of these. Received {kind_of(one)}"
            )
        if one.propensity is None:
            raise ModelError(
                "weights: this result has no propensity model, or its weights depend on trim, a target or "
                "sampling weights. The balance of a TreatmentEffect without these has one"
            )
        found.append(one.propensity)
    if not found:
        raise ModelError("weights: expected at least one result of a TreatmentEffect")
    return tuple(found)


def require_same_rows(models: Sequence[FittedPropensity], agreement: RowsSchema) -> None:
    """Require that propensity models were fitted on as many rows of each site as this model.

    Raises
    ------
    ModelError
        Names a site and the numbers of rows.
    """
    here = {row.site: row.n for row in agreement.sites}
    for one in models:
        if one.rows == here:
            continue
        site = next(name for name in {**one.rows, **here} if one.rows.get(name) != here.get(name))
        columns = dict.fromkeys((*agreement.question.response_columns, *agreement.question.columns))
        raise ModelError(
            f"weights: at site {site!r} the propensity model of {one.weights.arm!r} has "
            f"{one.rows.get(site, 0):,} rows, and this model {here.get(site, 0):,}. Both need the same rows: "
            f"the argument complete of each takes the columns of the other, of this model {list(columns)}"
        )
