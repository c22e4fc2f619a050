"""Records of a fitted model that results keep, and that a file of them holds."""

from __future__ import annotations

from dataclasses import dataclass

from fedstat.errors import ModelError
from fedstat.federation.design.by_rows import RowsAgreement
from fedstat.inference.estimate import Estimate
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.saved import SavedLedger


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """What results keep of the model: no rows, and enough to code new ones.

    Parameters
    ----------
    model_name : str
    agreement : RowsAgreement
        Question, levels and states of transforms, rows by site.
    site_column : str
        The column that names the sites.
    clusters, strata : str or None
        Columns that the covariance uses.
    """

    model_name: str
    agreement: RowsAgreement
    site_column: str
    clusters: str | None = None
    strata: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GLMRecord:
    """What a file of results holds."""

    estimate: Estimate
    fit: GLMFit
    basis: Basis
    overdispersion: Overdispersion | None
    auc: float | None
    ledger: SavedLedger | None

    def check(self) -> None:
        """Require parts that belong together; shapes are checked before.

        Raises
        ------
        ModelError
            They are not of one fit.
        """
        agreed, local = self.basis.agreement, self.fit.local
        in_clear = {self.fit.total.by_site is not None, *(own.score is not None for own in local)}
        together = (
            self.estimate.names == self.fit.coordinates.design.names
            and [own.site for own in local] == [row.site for row in agreed.sites]
            and (agreed.question.terms, agreed.question.columns) == (agreed.spec.terms, agreed.spec.columns)
            and len(in_clear) == 1
        )
        if not (together and self.fit.trace):
            raise ModelError("coefficients, sites, columns and sums are not of one fit")
