"""Tests of what is assumed of the missing blocks of a selecting fit."""

from __future__ import annotations

from fedstat.errors import NotAvailableError
from fedstat.models.vertical.fit import MomentsFit, fit_moments
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.statements import AssumptionStatements
from fedstat.models.vglm.em.blocks import Observed


class BlockStatements(AssumptionStatements):
    """Of a fit with missing="em", on all of its columns; other fits raise NotAvailableError.

    Attributes
    ----------
    observed : Observed or None
        What a fit with missing blocks holds of them.
    scales : Series
        Standard deviations of the columns, where the fit has them.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(600, missing=[0.0, 0.0, 0.0], seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> model = fs.VerticalGLM.from_formula("y ~ .", partition)
    >>> fit = model.fit(n_lambdas=8, folds=6, draws=3, inference="debiased")
    >>> fit.lam > 0.0, fit.path.columns[:3].tolist(), fit.path_params.shape
    (True, ['loss', 'df', 'aic'], (8, 8))
    >>> len(fit.selection_report()), fit.refit.nobs, fit.debiased.nobs, fit.llnull < fit.llf
    (7, 600, 600, True)
    >>> fit.stable(0.9)[0].columns.tolist()
    ['client', 'name', 'frequency']
    >>> all(ax.has_data() for ax in (fit.plot_path(), fit.plot_criterion(), fit.plot_stability()))
    True
    >>> fit.predict(partition).shape, fit.get_prediction(partition).summary_frame().shape
    ((600,), (600, 4))
    >>> evaluation = fit.evaluate(partition)
    >>> evaluation.to_frame().columns[-2:].tolist(), len(evaluation.accuracy.rsquared)
    (['rmse', 'rsquared'], 2)
    """

    observed: Observed | None = None

    def _moments(self) -> MomentsFit | LawFit:
        if self.observed is None:
            raise NotAvailableError(
                "this needs the sums by missing pattern of a fit in this session with missing='em'; other "
                "fits and files of results do not hold them"
            )
        # What was selected does not matter: the laws are those of all columns and the response.
        return self.observed.whole or fit_moments(self.observed.exchange.moments)
