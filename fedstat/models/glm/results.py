"""Results of a federated GLM: its statements, their summary, and the file that keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstat.errors import NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.inference.tables import SheetSummary
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.notes import estimate_lines, federation_lines, fit_notes, show_number, site_sheet
from fedstat.models.glm.omitted_terms import ScoreTest, score_test
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.glm.record import GLMBasis, GLMRecord
from fedstat.models.glm.statements import GLMStatements
from fedstat.models.glm.variance import CovarianceChoice
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.results import rows_estimate
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class GLMResults(GLMStatements, saved_as="fedstat glm results 4", record=GLMRecord):
    """Results of :meth:`fedstat.FederatedGLM.fit`, with statsmodels' names and meanings.

    Attributes
    ----------
    family : statsmodels family
    fit_ : GLMFit
        Sums over sites at the estimate.
    basis : GLMBasis
        What is kept of the model, with which new rows are coded.
    model : HorizontalModel or None
        None where the results were read from a file.
    overdispersion : Overdispersion or None
        The negative binomial's alpha with its standard error, where it was estimated.
    """

    _also_kept = ("overdispersion",)

    @classmethod
    def of(
        cls,
        model: HorizontalModel,
        fit: GLMFit,
        cov: Floats,
        choice: CovarianceChoice,
        ledger: Ledger,
        overdispersion: Overdispersion | None = None,
    ) -> GLMResults:
        """Make results of a fit."""
        estimate = rows_estimate(
            model,
            fit.design,
            params=fit.params,
            cov=cov,
            converged=fit.converged,
            convergence=fit.reason,
            llf=float(fit.fit[0]),
            n_parameters=len(fit.design.names) + (overdispersion is not None),
            scale=fit.dispersion,
            cov_type=choice.cov_type,
            reasons={"rsquared": "a GLM has pseudo_rsquared() instead"},
        )
        basis = GLMBasis.of(model, clusters=choice.clusters, strata=choice.strata)
        return cls(estimate, ledger, fit, basis, overdispersion, model)

    def score_test(self, terms: str) -> ScoreTest:
        """Score (Rao) test of terms that the fit does not have.

        The larger model is not fitted: sites evaluate its score once, at this estimate.

        Parameters
        ----------
        terms : str
            As on the right side of a formula, such as ``"chol + C(slope)"``.

        Returns
        -------
        (statistic, pvalue, df)

        Raises
        ------
        ModelError
            The terms add no coefficient, or rows of the fit lack their columns.
        NotAvailableError
            The results were read from a file.
        """
        if self.model is None:
            raise NotAvailableError(
                "score_test: this result was read from a file and has no partition; fit the model again, or "
                "the larger one"
            )
        return score_test(self, terms)

    # -- summary ---------------------------------------------------------------------------------

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Estimate, federation, coefficients, sites, notes; as :meth:`FederatedResults.summary`."""
        usual = super().summary(alpha)
        return SheetSummary([*usual.sheets[:-1], site_sheet(self)], usual.notes, usual.headline)

    def plot_coefficients(
        self, ax: Axes | None = None, *, conf_level: float = 0.95, intercept: bool = False
    ) -> Axes:
        """Coefficients with intervals on the link's scale; as :meth:`FederatedResults.plot_coefficients`."""
        ax = super().plot_coefficients(ax, conf_level=conf_level, intercept=intercept)
        effect = self.distribution.link_entry.effect.format(self.estimate.response)
        ax.set_xlabel(f"effect on the {effect}", parse_math=False)
        return ax

    def __repr__(self) -> str:
        est, sites = self.estimate, len(self.fit_.local)
        state = "" if est.converged else ", NOT CONVERGED"
        return (
            f"<{self.model_name} results: {est.response}, {show_number(len(est.names), 'coefficient')}, "
            f"{show_number(est.nobs, 'row')} at {show_number(sites, 'site')}{state}; see .summary()>"
        )

    def _summary_left(self) -> list[tuple[str, str]]:
        return estimate_lines(self)

    def _summary_right(self) -> list[tuple[str, str]]:
        return federation_lines(self)

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), *fit_notes(self)]
