"""Predicted means of entities with complete or missing blocks, errors, and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import DataWarning, ModelError, NotAvailableError, warn
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.estimate import Estimate
from fedstat.inference.evaluation import Evaluation
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.horizontal.prediction import GLMPrediction
from fedstat.models.margins import MarginalEffects
from fedstat.models.results import CoefficientResults
from fedstat.models.run import run_analysis
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vertical.prediction.evaluation import evaluate_predictions
from fedstat.models.vertical.prediction.marginal_effects import (
    FittedMean,
    ProjectedEntities,
    effects_over_columns,
)
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    PredictedBlocks,
    ResponseSource,
    new_ledger,
    predict_blocks,
    prediction_analysis,
    present_clients,
    project_blocks,
    released_specs,
)
from fedstat.models.vglm.distributions import means_of
from fedstat.models.vglm.outcome import SPENT
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Predicted means of entities that every institution has, and with missing blocks of all.


@dataclass(frozen=True, slots=True)
class Predictor:
    """What prediction needs of a fit.

    `specs` tell how each institution's columns are coded, and are empty before the sites were asked; `holder`
    is the institution of the response. `means`, of a fit with missing blocks, are the mean linear predictors
    of each institution's block, for entities that lack it, and `column_means` those of its columns.
    """

    estimate: Estimate
    clients: tuple[str, ...]
    family: DistributionSpec
    specs: Mapping[str, str]
    holder: str
    means: Mapping[str, float] = field(default_factory=dict)
    column_means: Mapping[str, Floats] = field(default_factory=dict)

    def beta(self, client: str) -> Floats:
        """Coefficients of an institution's columns."""
        return np.asarray(self.estimate.params[np.array(self.estimate.clients) == client])

    @property
    def blocks(self) -> FittedBlocks:
        """Coefficients by institution."""
        beta = {k: self.beta(k) for k in self.clients}
        mean = float(self.estimate.params[0]) + sum(self.means.values())
        return FittedBlocks(self.clients, self.specs, beta, mean, self.means)


@dataclass(frozen=True, slots=True, eq=False)
class SelectionLinearPrediction:
    """Linear predictors (n,), nan for entities without one, and a factor of their covariance (n, r)."""

    eta: Floats
    projection: Floats | None


def predict_linear(
    predictor: Predictor, partition: ClientPartition, cov: Floats | None = None
) -> SelectionLinearPrediction:
    """Ask for linear predictors, and with a covariance (p + 1, p + 1) of the coefficients for projections.

    Coefficients without a variance are taken as known. Errors are those of :func:`predict_means`.
    """
    needed = _needed(predictor, partition)
    factor = None if cov is None else _factor(cov)

    def asking() -> FitProtocol[tuple[Floats, Bools, Floats | None]]:
        if factor is None:
            found = yield from predict_blocks(predictor.blocks, needed, partition, "vglm")
            return found.linear, found.missing, None
        of = predictor.estimate.clients[1:]
        found, out = yield from project_blocks(predictor.blocks, needed, partition, "vglm", factor, of)
        # The linear predictor moves by 1 with the intercept, by x with beta, and by the mean of x where x is
        # missing.
        for k in (k for k in predictor.clients if k in predictor.column_means):
            of_client = factor[1:][np.array(predictor.estimate.clients[1:]) == k]
            out += found.missing[:, [predictor.clients.index(k)]] * (predictor.column_means[k] @ of_client)
        return found.linear, found.missing, out

    response, call = predictor.estimate.response, "predict()" if cov is None else "get_prediction()"
    analysis = prediction_analysis(call, predictor.blocks, response, predictor.family, partition)
    linear, missing, projection = run_analysis(analysis, asking, new_ledger(partition, predictor.holder))
    return SelectionLinearPrediction(_where_known(predictor, linear, missing, needed), projection)


def _needed(predictor: Predictor, partition: ClientPartition) -> tuple[str, ...]:
    """Institutions to ask; a ModelError where one that a prediction needs is not there."""
    # A block without effect is not asked for: its institution need not be there, and learns nothing of it.
    wanted = with_effect(predictor)
    needed = present_clients(wanted, partition)
    lacking = [k for k in wanted if k not in needed]
    if lacking and not predictor.means:
        raise ModelError(f"predict: the partition lacks the institution {', '.join(lacking)} of the fit")
    return needed


def with_effect(predictor: Predictor) -> list[str]:
    """Institutions of which some coefficient is not zero."""
    return [k for k in predictor.clients if predictor.beta(k).any()]


def _where_known(predictor: Predictor, linear: Floats, missing: Bools, needed: Sequence[str]) -> Floats:
    """Put nan where an institution lacks an entity, and no mean stands for it: (n,)."""
    counts = (~missing).sum(axis=1)
    return np.where((counts == len(needed)) | bool(predictor.means), linear, np.nan)


def project_entities(predictor: Predictor, partition: ClientPartition, factor: Floats) -> ProjectedEntities:
    """Ask for linear predictors, and projections on a factor of the covariance; errors as before."""
    needed = _needed(predictor, partition)
    of = predictor.estimate.clients[1:]

    def asking() -> FitProtocol[tuple[PredictedBlocks, Floats]]:
        return project_blocks(predictor.blocks, needed, partition, "vglm", factor, of)

    response = predictor.estimate.response
    analysis = prediction_analysis("get_margeff()", predictor.blocks, response, predictor.family, partition)
    found, rows = run_analysis(analysis, asking, new_ledger(partition, predictor.holder))
    whole = (~found.missing).sum(axis=1) == len(needed)
    return ProjectedEntities(found.linear, rows, whole)


def evaluate_fit(predictor: Predictor, response: ResponseSource, partition: ClientPartition) -> Evaluation:
    """Hold predicted means against the response, where that is; errors as of :func:`predict_means`."""
    needed = _needed(predictor, partition)

    def predicted() -> FitProtocol[tuple[Floats, str]]:
        found = yield from predict_blocks(predictor.blocks, needed, partition, "vglm")
        eta = _where_known(predictor, found.linear, found.missing, needed)
        return means_of(predictor.family, eta), found.opened.session

    analysis = prediction_analysis("evaluate()", predictor.blocks, response.text, predictor.family, partition)
    return evaluate_predictions(
        "vglm", response, predictor.family, with_effect(predictor), predicted, analysis
    )


def _factor(cov: Floats) -> Floats:
    """R (p + 1, r) with R R' the covariance; rows of coefficients without a variance are zero."""
    known = np.flatnonzero(np.isfinite(np.diag(cov)))
    values, vectors = np.linalg.eigh(cov[np.ix_(known, known)])
    out = np.zeros((len(cov), len(known)))
    out[known] = vectors * np.sqrt(values.clip(min=0.0))
    return out


def predict_means(predictor: Predictor, partition: ClientPartition) -> pd.Series:
    """Predict for every entity of a partition; nan where an institution lacks it, unless its mean is known.

    A ModelError where the partition is horizontal, or lacks an institution of the fit; a DesignError where an
    institution's columns cannot be coded as in the fit; a DataWarning of linear predictors that have no mean
    under the link.
    """
    eta = predict_linear(predictor, partition).eta
    mean = means_of(predictor.family, eta)
    wrong = int((np.isnan(mean) & ~np.isnan(eta)).sum())
    if wrong:
        warn(
            f"predict: {wrong:,} of {len(eta):,} entities are left out (nan): {predictor.family} has no mean "
            "at their linear predictors; with a log link every entity has one",
            DataWarning,
        )
    return pd.Series(mean, index=partition.entities)


# ----------------------------------------------------------------------------------------------------
# Predictions of a selecting fit, with errors, and how well they agree with the response.


class SelectionPredictions(CoefficientResults):
    """What results of a vertical generalised linear model say of entities."""

    _model: VerticalModel | None
    _centres: Floats | None = None
    """Means of the columns; of a fit in this session."""

    def predict(self, partition: ClientPartition | None = None) -> pd.Series:
        """Predict the mean response at the penalised estimates.

        Linear predictors of every institution's columns go to the coordinator, one value per entity.

        Parameters
        ----------
        partition : ClientPartition, optional
            New entities (see ``new_data=True`` of its constructors); by default that of the fit.

        Returns
        -------
        Series
            By entity; nan where an institution lacks it. With missing="em", its mean linear predictor stands
            for a block that an institution lacks: the expectation given what is there.
        """
        return predict_means(self._with_specs(), self._of_fit(partition, "predict"))

    def get_prediction(self, partition: ClientPartition | None = None) -> GLMPrediction:
        """Predict the mean response with standard errors and intervals, conditional on the selection.

        They are of the estimates that the summary shows: with the lasso, the elastic net and
        ``inference="split"`` of :attr:`refit`, so that the mean is not that of :meth:`predict`. Errors count
        those of the selected columns' coefficients; which columns were selected, and the means of blocks that
        an entity lacks, are taken as known. Beside linear predictors, projections of every institution's
        columns on the covariance of the estimates go to the coordinator, and disclose its selected columns of
        these entities; :meth:`predict` does without.

        Parameters
        ----------
        partition : ClientPartition, optional
            As in :meth:`predict`; by default that of the fit.

        Returns
        -------
        GLMPrediction
            By entity, with statsmodels' names: ``predicted_mean``, ``se_mean``, ``conf_int(alpha)``,
            ``summary_frame(alpha)``; nan as in :meth:`predict`.

        Raises
        ------
        NotAvailableError
            There are no standard errors, or the results were read from a file and no partition is given.
        """
        (predictor, cov), given = self._with_errors(), self._of_fit(partition, "get_prediction")
        rows = predict_linear(predictor, given, cov)
        assert rows.projection is not None
        errors = np.where(np.isnan(rows.eta), np.nan, np.linalg.norm(rows.projection, axis=1))
        eta, se = (pd.Series(values, index=given.entities) for values in (rows.eta, errors))
        return GLMPrediction(eta, se, predictor.family.make(), stats.norm)

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
        After a lasso or an elastic net they are those of :attr:`refit`.

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
        >>> model = fs.VerticalGLM.from_formula(
        ...     "RISK ~ PL1 + PL2", partition, family=sm.families.Binomial(), missing="drop"
        ... )
        >>> model.fit(lam=0.0).get_margeff(at="mean").margeff.index.tolist()
        ['PL1', 'PL2']
        """
        predictor, cov = self._with_errors(ask=at == "overall")

        def project(factor: Floats) -> ProjectedEntities:
            if self._model is None:
                raise NotAvailableError(
                    "get_margeff: results from a file have no entities; fit the model again"
                )
            return project_entities(predictor, self._model.partition, factor)

        of = FittedMean(
            names=self.estimate.names,
            params=predictor.estimate.params,
            cov=cov,
            distribution=predictor.family,
            means=self._centres,
            beside={},
            words=(self.model_name, self.estimate.response),
            law=self._law,
            student=self.use_t,
        )
        others = {"atexog": atexog, "dummy": dummy, "count": count}
        return effects_over_columns(of, at, method, project, others=others)

    def evaluate(self, partition: ClientPartition | None = None) -> Evaluation:
        """How well predictions agree with the response, counted at the institution that holds it.

        Of the predictions of :meth:`predict`, which the holder of the response is handed. One that answers a
        single evaluation averages them over a few entities first, which moves figures little unless a
        few predictions are far from all others.

        Parameters
        ----------
        partition : ClientPartition, optional
            With the response, at the institution that had it in the fit; by default that of the fit, on which
            the figures flatter, the more so after a selection.

        Returns
        -------
        Evaluation
            By set of institutions that entities have, and of all: ``recalibration``, ``calibration()``,
            ``plot_calibration()``; of a binary response AUC, ``roc()``, ``confusion(threshold)``, ``brier``;
            of others ``accuracy`` with R-squared, root mean squared error and deviance.

        Raises
        ------
        ModelError
            The partition lacks the response, or an institution of the fit.
        NotAvailableError
            The results were read from a file, which does not tell of what columns the response is made.
        """
        if self._model is None:
            raise NotAvailableError("evaluate: results from a file do not tell the response's columns")
        predictor, formula = self._with_specs(), self._model.formula
        response = ResponseSource(predictor.holder, formula.response, formula.response_columns)
        return evaluate_fit(predictor, response, self._of_fit(partition, "evaluate"))

    def _of_fit(self, partition: ClientPartition | None, call: str) -> ClientPartition:
        if partition is not None:
            return partition
        if self._model is None:
            raise NotAvailableError(f"results from a file have no entities: give a partition to {call}")
        return self._model.partition

    def _with_specs(self) -> Predictor:
        predictor: Predictor = self._record.predictor
        if not predictor.specs and self._model is not None:
            predictor = replace(predictor, specs=released_specs(self._model, predictor.clients))
            self._record = replace(self._record, predictor=predictor)
        return predictor

    def _with_errors(self, ask: bool = True) -> tuple[Predictor, Floats]:
        """Estimates of all columns that have a covariance (p + 1, p + 1), and this; nan where none."""
        predictor = self._with_specs() if ask else self._record.predictor
        estimate, refit = self.estimate, self._record.refit
        if estimate.cov is not None:
            return predictor, estimate.cov
        if refit is None or refit.cov is None:
            raise NotAvailableError(f"no standard errors of predictions: {SPENT}")
        at = pd.Index(estimate.names).get_indexer(pd.Index(refit.names))
        params, cov = np.zeros(len(estimate.names)), np.full((len(estimate.names),) * 2, np.nan)
        params[at], cov[np.ix_(at, at)] = refit.params, refit.cov
        clients = np.array(estimate.clients)
        means = {k: float(m @ params[clients == k]) for k, m in predictor.column_means.items()}
        return replace(predictor, estimate=replace(estimate, params=params), means=means), cov
