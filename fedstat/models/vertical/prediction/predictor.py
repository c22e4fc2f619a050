"""Code shared by fits over columns of several sites: predictions, marginal effects, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.derivatives import Direction
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.evaluation import Evaluation
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.checks import HeldRows, check_frame
from fedstat.models.effects import no_times
from fedstat.models.margins import AT_MEAN, BY_COLUMN, MarginalEffects
from fedstat.models.results import CoefficientResults
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vertical.prediction.evaluation import evaluate_predictions
from fedstat.models.vertical.prediction.marginal_effects import (
    FittedMean,
    ProjectedEntities,
    effects_over_columns,
    site_directions,
)
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    PredictedBlocks,
    ResponseSource,
    new_ledger,
    prediction_analysis,
    project_blocks,
)
from fedstat.models.vertical.prediction.response import ColumnsResponse
from fedstat.typing import Floats

Found = TypeVar("Found")
FROM_FILE = "results from a file do not know how columns are coded; fit the model again"


class VerticalPredictor:
    """The parts of a fit that prediction needs, and its requests to sites; `steps` is their family.

    A subclass has the blocks of its fit, the mean response, and the sites that receive requests.
    """

    __slots__ = ()
    steps: ClassVar[str]

    @property
    def blocks(self) -> FittedBlocks:
        """Coefficients by site."""
        raise NotImplementedError

    @property
    def distribution(self) -> DistributionSpec:
        """Return the distribution of the response, with its link."""
        raise NotImplementedError

    @property
    def response_at(self) -> tuple[str, str]:
        """Return the text of the response, and the site that holds it."""
        raise NotImplementedError

    @property
    def counted(self) -> Sequence[str]:
        """Sites by which an evaluation groups entities."""
        return self.blocks.sites

    def requested(self, partition: ClientPartition) -> tuple[str, ...]:
        """Return the sites that receive requests; a ModelError if the partition lacks one that is needed."""
        raise NotImplementedError

    def predicted_means(self, partition: ClientPartition) -> Callable[[], FitProtocol[tuple[Floats, str]]]:
        """Return the protocol of predicted means (n,), nan for none, and of their session."""
        raise NotImplementedError

    def analysis(self, call: str, partition: ClientPartition) -> PostFitAnalysis:
        """Describe a prediction to owners, for their consent."""
        return prediction_analysis(call, self.blocks, self.response_at[0], self.distribution, partition)

    def run(
        self, call: str, partition: ClientPartition, requester: Callable[[], FitProtocol[Found]]
    ) -> tuple[Found, Ledger]:
        """Run requests to the sites of a partition, with a separate ledger."""
        ledger = new_ledger(partition, self.response_at[1])
        return run_analysis(self.analysis(call, partition), requester, ledger), ledger

    def project(self, of: Sequence[str], partition: ClientPartition, factor: Floats) -> ProjectedEntities:
        """Request linear predictors, and projections of columns on a factor (p + 1, r) of the covariance.

        `of` (p,) names the site of each column.
        """
        request = self.requested(partition)

        def requester() -> FitProtocol[tuple[PredictedBlocks, Floats]]:
            return project_blocks(self.blocks, request, partition, self.steps, factor, of)

        (found, rows), _ = self.run("get_margeff()", partition, requester)
        return ProjectedEntities(found.linear, rows, (~found.missing).sum(axis=1) == len(request))

    def evaluate(self, response: ResponseSource, partition: ClientPartition) -> Evaluation:
        """Compare predicted means of a partition's entities with the response, where that is."""
        means, analysis = self.predicted_means(partition), self.analysis("evaluate()", partition)
        return evaluate_predictions(self.steps, response, self.distribution, self.counted, means, analysis)


def covariance_factor(cov: Floats) -> Floats:
    """Return R with R R' a covariance; rows of parameters without a variance are zero."""
    known = np.flatnonzero(np.isfinite(np.diag(cov)))
    values, vectors = np.linalg.eigh(cov[np.ix_(known, known)])
    out = np.zeros((len(cov), len(known)))
    out[known] = vectors * np.sqrt(values.clip(min=0.0))
    return out


ROWS, ROW = "rows of the table", "_row_"
"""Name of the place that lists the rows of a table of new entities, and of their key."""


NewEntities: TypeAlias = ClientPartition | HeldRows
"""Entities of a prediction: a partition, or rows that the caller holds."""


def columns_read(specs: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Return the columns that each site reads, from the coding of its columns."""
    return {site: BlockSpec.from_json(spec).columns for site, spec in specs.items()}


def entities_of(
    new: NewEntities, read: Mapping[str, Sequence[str]], call: str = "predict"
) -> tuple[ClientPartition, pd.Index]:
    """Return new entities as a partition, and the index of what is predicted for them.

    A table of the analyst is split by site, in this process: a site has the rows with a value in one of the
    columns that it `read` for the fit, and is absent without any of these columns. Raises ModelError if the
    table has no column of the fit.
    """
    if isinstance(new, ClientPartition):
        return new, new.entities
    table = check_frame(call, new, "entities at the sites are a ClientPartition")
    keyed = table.reset_index(drop=True).assign(**{ROW: np.arange(len(table))})
    frames = {ROWS: keyed[[ROW]]}
    for site, names in read.items():
        if any(name in table for name in names):
            # A column that the table lacks is missing in every row.
            frames[site] = keyed.reindex(columns=[ROW, *names]).dropna(subset=[*names], how="all")
    frames = {site: frame for site, frame in frames.items() if len(frame)}
    if len(frames) == 1:
        wanted = ", ".join(name for names in read.values() for name in names)
        raise ModelError(f"the table has no value in a column of the fit, which are {wanted}")
    # The analyst holds these rows, so that no owner restricts what is computed from them.
    own_rows = Policy(min_count=1, min_level_count=1)
    held = ClientPartition.from_frames(frames, on=ROW, new_data=True, min_count=1, policy=own_rows)
    return held, table.index


class VerticalPredictions(CoefficientResults):
    """Marginal effects and evaluation of results over columns of several sites."""

    _model: VerticalModel | None

    def _predictor(self) -> VerticalPredictor:
        """Return what prediction needs; request the coding of columns from the sites if it is not known."""
        raise NotImplementedError

    def _margin_predictor(self) -> VerticalPredictor:
        """Return it for the estimates of :meth:`_fitted_mean`."""
        return self._predictor()

    def _fitted_mean(self) -> FittedMean:
        """Estimates with their covariance, for marginal effects."""
        raise NotImplementedError

    def _response_source(self) -> ResponseSource:
        """Return the site of the response with which predictions are compared."""
        raise NotImplementedError

    @property
    def _has_offset(self) -> bool:
        """Whether the fit has an offset, also if it was read from a file."""
        raise NotImplementedError

    def _role_names(self) -> dict[str, str]:
        """Return the known offset and weights of the fit, by role."""
        roles = {} if self._model is None else dict(self._model._roles)
        return {"offset": "", **roles} if self._has_offset else roles

    def _check_no_offset(self, call: str) -> None:
        """Refuse to compare predictions at an offset of zero with responses that have an offset."""
        if self._has_offset:
            raise NotAvailableError(
                f"{call}: predictions are those at an offset of zero",
                remedy=Remedy(
                    "predict(partition)", "use {call}, and add the offset at the site that holds it"
                ),
            )

    def _need_model(self, what: str) -> VerticalModel:
        """Return the model of this session, or report that a file has none."""
        if self._model is None:
            raise NotAvailableError(
                f"{what}: this result was read from a file and has no partition; give one"
            )
        return self._model

    def get_margeff(
        self,
        at: Literal["overall", "mean", "zero"] = "overall",
        method: Literal["dydx", "eyex", "dyex", "eydx"] = "dydx",
        atexog: Mapping[int | str, float] | None = None,
        dummy: bool = False,
        count: bool = False,
        columns: bool = False,
    ) -> MarginalEffects:
        """Marginal effects of the variables on the mean of the response, with errors by the delta method.

        They are those of :meth:`fedstat.results.GLMResults.get_margeff`: derivatives through all terms, as of
        ``x + I(x ** 2)``, and differences between levels of categories; ``columns=True`` gives those of
        statsmodels, of single columns. A variable in a logarithm or a spline has no effect here, and a note.

        ``at="mean"`` sends no requests, or one for the coding of the columns if a variable is in several.
        ``at="overall"`` averages over the entities of the fit that every
        site has: as for :meth:`get_prediction`, the coordinator receives linear predictors of these and
        projections of their columns on the covariance of the estimates, which reveal the columns. After a
        lasso or an elastic net of VerticalGLM, the effects are those of its ``refit``.

        Parameters
        ----------
        at : {"overall", "mean", "zero"}
            Average over entities, or at one row: the means of the columns, or zeros.
        method : {"dydx", "eyex", "dyex", "eydx"}
            Derivative, elasticity, or a semi-elasticity; for averages only "dydx" and "eydx".
        atexog, dummy, count
            Not available: they need values of one column together with those of all others.
        columns : bool
            Effects of the columns of the design, one by one.

        Returns
        -------
        MarginalEffects
            ``margeff``, ``margeff_se``, ``summary_frame()``, ``summary()``.

        Raises
        ------
        NotAvailableError
            No covariance, row-level values, an average for a fit with weights or an offset, or an average for
            results that were read from a file.
        PolicyError
            A site refuses to release its columns; ``at="mean"`` does not need them.

        Examples
        --------
        >>> import fedstat as fs, statsmodels.api as sm
        >>> data = fs.datasets.make_sme_risk(1_000)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> binomial = sm.families.Binomial()
        >>> model = fs.VFEMGLM.from_formula("RISK ~ PL1 + CA1", partition, family=binomial)
        >>> effects = model.fit().get_margeff(at="mean")
        >>> effects.margeff.index.tolist(), effects.margeff_options["at"]
        (['PL1', 'CA1'], 'mean')
        """
        mean = self._fitted_mean()

        def project(factor: Floats) -> ProjectedEntities:
            if self._model is None:
                why = "get_margeff: results from a file have no entities; fit the model again"
                raise NotAvailableError(why, remedy=None if mean.means is None else AT_MEAN)
            of = self.estimate.sites[1:]
            return self._margin_predictor().project(of, self._model.partition, factor)

        def directions(logarithmic: bool) -> list[Direction]:
            est = self.estimate
            plain = est.names[1:] == est.terms[1:] and all(map(str.isidentifier, est.names))
            if columns or plain:
                return []
            if self._model is None:
                raise NotAvailableError(
                    "get_margeff: results from a file do not know how columns are coded",
                    remedy=BY_COLUMN,
                )
            specs, of = self._margin_specs(), np.array(est.sites)
            return [
                one
                for site in dict.fromkeys(est.sites[1:])
                for one in site_directions(
                    BlockSpec.from_json(specs[site]), np.flatnonzero(of == site), len(of), logarithmic
                )
            ]

        others: dict[str, Any] = {"atexog": atexog, "dummy": dummy, "count": count}
        return effects_over_columns(
            mean, at, method, project, directions=directions, others=others, sources=(self,)
        )

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> ColumnsResponse:
        no_times(call, times)
        if self._model is None:
            raise NotAvailableError(f"{call}: {FROM_FILE}")
        specs, model = self._margin_specs(), self._model

        def project(factor: Floats) -> ProjectedEntities:
            return self._margin_predictor().project(self.estimate.sites[1:], model.partition, factor)

        sites = self.estimate.sites
        read = {site: BlockSpec.from_json(specs[site]) for site in dict.fromkeys(sites[1:])}
        return ColumnsResponse(self._fitted_mean(), read, sites, self._df, project)

    def _margin_specs(self) -> Mapping[str, str]:
        """Return the coding of columns by site, which is requested from the sites if it is not known."""
        return self._predictor().blocks.specs

    def evaluate(self, partition: ClientPartition | None = None) -> Evaluation:
        """Evaluate the agreement of predictions with the response, at the site that holds it.

        Every site releases its linear predictors of the partition's entities, as for :meth:`predict`. The
        response holder receives the predictions and computes the results. If its policy allows a single
        evaluation, it averages predictions over a few entities first, which changes results little unless a
        few predictions are far from all others.

        Parameters
        ----------
        partition : ClientPartition, optional
            With the response, at the site that had it in the fit. The default is the partition of the fit,
            for which the results are too optimistic, especially after a selection.

        Returns
        -------
        Evaluation
            By set of sites that entities have, and for all: ``recalibration``, ``calibration()``,
            ``plot_calibration()``; for a binary response AUC, ``roc()``, ``confusion(threshold)``, ``brier``;
            for others ``accuracy`` with R-squared, root mean squared error and deviance.

        Raises
        ------
        ModelError
            The partition lacks the response, or sites that predictions need.
        NotAvailableError
            There is no partition, because the results were read from a file; or the fit has an offset, which
            predictions leave out.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
        >>> fit.evaluate().to_frame()[["n", "rmse", "rsquared"]].iloc[-1].round(2).tolist()
        [5000.0, 5.2, 0.0]
        """
        response = self._response_source()
        if partition is None:
            partition = self._need_model("evaluate without a partition").partition
        return self._predictor().evaluate(response, partition)
