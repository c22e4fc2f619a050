"""What results of VFEM say of the mean response: marginal effects, and how well it is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from fedstat.errors import NotAvailableError
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.evaluation.evaluation import Evaluation
from fedstat.inference.results import FederatedResults
from fedstat.models.margins import MarginalEffects
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vertical.prediction.effects import FittedMean, ProjectedEntities, effects_over_columns
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.models.vfem.prediction.protocol import VFEMPredictor, evaluate_fit, project_entities
from fedstat.typing import Floats


class EntityStatements(FederatedResults):
    """Results of which the institutions can be asked about entities."""

    _fit: VFEMFit
    _model: VerticalModel | None

    def get_margeff(
        self,
        at: Literal["overall", "mean", "zero"] = "overall",
        method: Literal["dydx", "eyex", "dyex", "eydx"] = "dydx",
        atexog: Mapping[int | str, float] | None = None,
        dummy: bool = False,
        count: bool = False,
    ) -> MarginalEffects:
        """Marginal effects on the mean of the response, with errors by the delta method, as in statsmodels.

        ``at="mean"`` asks nothing further. ``at="overall"`` averages over the entities of the fit that every
        institution has: as for :meth:`get_prediction`, linear predictors of these and projections of their
        columns on the covariance of the estimates go to the coordinator, and disclose the columns.

        Parameters
        ----------
        at : {"overall", "mean", "zero"}
            Average over entities, or at one row: the means of the columns, or zeros.
        method : {"dydx", "eyex", "dyex", "eydx"}
            Derivative, elasticity, or a semi-elasticity; of averages only "dydx" and "eydx".
        atexog, dummy, count
            Not available: they need values of one column beside those of all others.

        Returns
        -------
        MarginalEffects
            ``margeff``, ``margeff_se``, ``summary_frame()``, ``summary()``.

        Raises
        ------
        NotAvailableError
            No covariance, values of single entities, an average beside weights or an offset, or one of
            results that were read from a file.
        PolicyError
            A site refuses its columns; ``at="mean"`` does without.

        Examples
        --------
        >>> import fedstat as fs, statsmodels.api as sm
        >>> data = fs.datasets.make_sme_risk(1_000)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> binomial = sm.families.Binomial()
        >>> model = fs.VFEMRegression.from_formula("RISK ~ PL1 + CA1", partition, family=binomial)
        >>> effects = model.fit().get_margeff(at="mean")
        >>> effects.margeff.index.tolist(), effects.margeff_options["at"]
        (['PL1', 'CA1'], 'mean')
        """
        partition = None if self._model is None else self._model.partition
        beside = {} if self._model is None else dict(self._model._roles)
        if self._has_offset:  # of results from a file, the notes tell
            beside.setdefault("offset", "")

        def project(factor: Floats) -> ProjectedEntities:
            if partition is None:
                raise NotAvailableError("get_margeff: results from a file have no entities; use at='mean'")
            return project_entities(self._predictor(), self.estimate.clients[1:], partition, factor)

        fit = self._fit
        of = FittedMean(
            names=self.estimate.names,
            params=self.estimate.params,
            cov=self._cov(),
            distribution=fit.distribution,
            means=np.concatenate([fit.mu[k] for k in dict.fromkeys(self.estimate.clients[1:])]),
            beside=beside,
            words=(self.model_name, self.estimate.response),
            law=self._law,
            student=self.use_t,
        )
        others = {"atexog": atexog, "dummy": dummy, "count": count}
        return effects_over_columns(of, at, method, project, others=others)

    def evaluate(self, partition: ClientPartition | None = None) -> Evaluation:
        """How well predictions agree with the response, counted at the institution that holds it.

        Every institution is asked for the linear predictors of the partition's entities, as by
        :meth:`predict`; the holder of the response is handed the predictions, and counts. One that answers a
        single evaluation averages them over a few entities first, which moves figures little unless a
        few predictions are far from all others.

        Parameters
        ----------
        partition : ClientPartition, optional
            With the response, at the institution that had it in the fit; by default that of the fit, on which
            the figures flatter.

        Returns
        -------
        Evaluation
            By set of institutions that entities have, and of all: ``recalibration``, ``calibration()``,
            ``plot_calibration()``; of a binary response AUC, ``roc()``, ``confusion(threshold)``, ``brier``;
            of others ``accuracy`` with R-squared, root mean squared error and deviance.

        Raises
        ------
        ModelError
            The partition lacks the response, or all institutions.
        NotAvailableError
            There is no partition: the results were read from a file; or the fit has an offset, which
            predictions leave out.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
        >>> fit.evaluate().to_frame()[["n", "rmse", "rsquared"]].iloc[-1].round(2).tolist()
        [5000.0, 5.2, 0.0]
        """
        self._check_no_offset("evaluate")
        if partition is None:
            partition = self._need_model("evaluate without a partition").partition
        return evaluate_fit(self._predictor(), partition)

    def _predictor(self) -> VFEMPredictor:
        """Return what prediction needs of the fit."""
        raise NotImplementedError

    @property
    def _has_offset(self) -> bool:
        """Whether the fit has an offset, which predictions leave out."""
        raise NotImplementedError

    def _check_no_offset(self, call: str) -> None:
        """Hold no predictions at an offset of zero against responses that have another."""
        if self._has_offset:
            raise NotAvailableError(
                f"{call}: predictions are those at an offset of zero; predict(partition), and add the offset "
                "where it is held"
            )

    def _need_model(self, what: str) -> VerticalModel:
        """Return the model of this session, or say that a file has none."""
        if self._model is None:
            raise NotAvailableError(
                f"{what}: this result was read from a file and has no partition; give one"
            )
        return self._model
