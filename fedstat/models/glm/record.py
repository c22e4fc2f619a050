"""Records of a fitted model that results keep, and that a file of them holds."""

from __future__ import annotations

from dataclasses import dataclass

from fedstat.errors import ModelError
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.horizontal.results import RowsBasis, RowsRecord


@dataclass(frozen=True, slots=True, eq=False)
class GLMBasis(RowsBasis):
    """What results keep of the model, with the columns of clusters and strata that the covariance uses."""

    clusters: str | None = None
    strata: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GLMRecord(RowsRecord):
    """What a file of results holds."""

    fit: GLMFit
    basis: GLMBasis
    overdispersion: Overdispersion | None

    def check(self) -> None:
        """Require parts of one fit; their shapes are checked before."""
        agreed, local = self.basis.agreement, self.fit.local
        in_clear = {self.fit.total.by_site is not None, *(own.score is not None for own in local)}
        together = (
            self.estimate.names == self.fit.design.names
            and [own.site for own in local] == [row.site for row in agreed.sites]
            and (agreed.question.terms, agreed.question.columns) == (agreed.spec.terms, agreed.spec.columns)
            and len(in_clear) == 1
        )
        if not (together and self.fit.trace):
            raise ModelError("coefficients, sites, columns and sums are not of one fit")
