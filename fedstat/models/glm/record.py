"""Records of a fitted model that results keep, and that a file of them holds."""

from __future__ import annotations

from dataclasses import dataclass

from fedstat.errors import ModelError
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.glm.sums.fit import GLMFit
from fedstat.models.horizontal.results import RowsBasis, RowsRecord


@dataclass(frozen=True, slots=True, eq=False)
class GLMBasis(RowsBasis):
    """What results keep of the model, with the columns of clusters and strata that the covariance uses.

    `counts` are the numbers of these clusters and strata; `estimates_dispersion` whether the dispersion was
    estimated; `df_inference` the degrees of freedom of Student's t, None where tests are normal.
    """

    clusters: str | None = None
    strata: str | None = None
    counts: tuple[int, int] | None = None
    estimates_dispersion: bool = False
    df_inference: float | None = None


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
