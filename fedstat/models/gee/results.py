"""Results of estimating equations: tests, criteria, marginal effects, and the comparison of sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Self, cast

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.covariance import gvif
from fedstat.inference.heterogeneity import Heterogeneity
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.tables import number, two_digits, yes_or_no
from fedstat.models.effects import no_times
from fedstat.models.gee.protocol import GEEFit, GEEScoring
from fedstat.models.gee.steps import FAMILY
from fedstat.models.glm.post_fit import ScoreTest, marginal_effects, response_functions, same_rows
from fedstat.models.glm.separation import check_rank
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import OTHER_MODEL, TOO_SMALL, TWICE
from fedstat.models.horizontal.response import RowsResponse
from fedstat.models.horizontal.results import (
    OFFSET,
    PROPENSITIES,
    RowsBasis,
    RowsRecord,
    RowsResults,
    rows_estimate,
    weight_line,
)
from fedstat.models.horizontal.site_results import SiteFitsResults, compare_own_fits, tests_line
from fedstat.models.margins import MarginalEffects
from fedstat.typing import Floats

FORMAT = "fedstat gee results 2"
NO_LIKELIHOOD = "estimating equations have no likelihood; qic() compares models"
CORRECTED = {"bias_reduced": "bias-reduced (Mancl-DeRouen)", "kauermann_carroll": "Kauermann-Carroll"}
CORRECTION = Remedy("fit(cov_type='kauermann_carroll')", ": use {arguments}")
NOTES = Catalogue(
    warning={
        "naive": "Standard errors suppose that the working correlation is the true one.",
        "correlation": (
            "The estimate of the working correlation, {wanted}, is outside its range, about {low} to {high} "
            "for clusters of these sizes; the fit has {rho}. {remedy}.",
            Remedy(
                "from_formula(..., cov_struct='independence').fit()",
                "Compare with cov_struct='independence'",
            ),
        ),
    },
    info={
        "spacing": "Successive rows by '{time}' are taken as equally spaced, also across missing ones.",
        "marginal": "Coefficients compare averages over all clusters of '{groups}'. They are not "
        "within-cluster effects.",
    },
)


def _structure_line(result: GEEResults) -> str:
    request = result._record.fit.request
    return f"{request.structure} by {request.time}" if request.time else request.structure


def _correlation_line(result: GEEResults) -> str:
    return "" if result._record.fit.request.structure == "independence" else number(result._record.fit.rho)


def _clusters_line(result: GEEResults) -> str:
    return f"{result.clusters:,} ({result._record.fit.request.groups})"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GEERecord(RowsRecord):
    """What a file of results holds."""

    fit: GEEFit


class GEEResults(SiteFitsResults, RowsResults, saved_as=FORMAT, record=GEERecord):
    """Results of :meth:`fedstat.FederatedGEE.fit`, with statsmodels' names and meanings.

    Attributes
    ----------
    family : statsmodels family
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals().assign(ward=lambda t: t.index // 4)
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FederatedGEE.from_formula("num ~ age + sex", partition, groups="ward")
    >>> fit = model.fit()
    >>> fit.clusters, fit.dep_params, fit.converged, fit.site_estimates.shape
    (232, 0.0, True, (4, 3))
    >>> fit.qic().round(1).tolist()
    [922.8, 923.0]
    >>> fit.trace.columns.tolist(), fit.vif().index.tolist(), fit.cov_naive.shape
    (['step', 'move', 'dep_params'], ['age', 'sex'], (3, 3))
    >>> fit.get_margeff().margeff.round(2).to_dict()
    {'age': 0.03, 'sex': 0.67}
    >>> bool(fit.plot_forest("age").has_data())
    True
    """

    _record: GEERecord
    _summed = "clusters"
    _joint_name = "test of equal coefficients"

    @classmethod
    def _of(cls, model: HorizontalModel, fit: GEEFit, student: bool, ledger: Ledger) -> Self:
        """Make results of a fit."""
        problem = "" if fit.converged else f"not converged after {len(fit.trace)} evaluations"
        estimate = rows_estimate(
            model,
            fit.design,
            params=fit.params,
            cov=fit.cov,
            converged=fit.converged,
            convergence=problem or f"converged after {len(fit.trace)} evaluations",
            cov_type=fit.cov_type,
            scale=fit.scale,
            df=fit.clustering.df if student else None,
            llf=np.nan,
            reasons={"llf": NO_LIKELIHOOD, "rsquared": "estimating equations have none"},
        )
        record = GEERecord(estimate=estimate, fit=fit, basis=RowsBasis.of(model, spread=fit.spread))
        return cls(record, ledger, model)

    @property
    def clusters(self) -> int:
        """Number of clusters of all sites."""
        return self._record.fit.clusters

    @property
    def dep_params(self) -> float:
        """Working correlation: of two rows of a cluster, or with "ar1" of neighbors."""
        return self._record.fit.rho

    @property
    def cov_naive(self) -> pd.DataFrame:
        """Covariance that supposes the working correlation to be the true one, by name."""
        names = list(self.estimate.names)
        return pd.DataFrame(self._record.fit.naive, index=names, columns=names)

    @property
    def trace(self) -> pd.DataFrame:
        """Step in standard errors, its largest change of a standardized coefficient, correlation."""
        index = pd.RangeIndex(1, len(self._record.fit.trace) + 1, name="evaluation")
        return pd.DataFrame(self._record.fit.trace, index, ["step", "move", "dep_params"])

    def qic(self, scale: float | None = None) -> pd.Series:
        """Quasi-likelihood criteria: QIC for working correlations, QICu for terms (Pan 2001, equation 5).

        The quasi-likelihood is minus half the deviance over the scale, which is zero if all means are equal
        to the responses; other programs differ from it by a constant of the data.

        Parameters
        ----------
        scale : float, optional
            The scale of the largest of the compared models; by default that of this fit.

        Returns
        -------
        Series
            ``QIC`` and ``QICu``.

        References
        ----------
        Pan, "Akaike's information criterion in generalized estimating equations", Biometrics 57 (2001).
        """
        fit, phi = self._record.fit, self.scale if scale is None else scale
        forward = np.linalg.inv(fit.coordinates.back)
        omega = forward.T @ fit.omega @ forward / phi
        penalties = {"QIC": float(np.trace(omega @ self._cov())), "QICu": float(len(fit.gamma))}
        return pd.Series({name: self.deviance / phi + 2.0 * size for name, size in penalties.items()})

    def score_test(self, terms: str) -> ScoreTest:
        """Robust score test of terms that the fit does not have, as statsmodels' ``compare_score_test``.

        Sites evaluate the larger model once, at this estimate and its working correlation.

        Parameters
        ----------
        terms : str
            The right side of a formula, such as ``"chol + C(slope)"``.

        Returns
        -------
        ScoreTest
            ``statistic``, ``pvalue``, ``df``.

        Raises
        ------
        ModelError
            The terms add no coefficient, or rows of the fit lack their columns.
        NotAvailableError
            The results were read from a file, or rows have weights of a treatment.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals().assign(ward=lambda t: t.index // 4)
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> model = fs.FederatedGEE.from_formula("num ~ age", partition, groups="ward")
        >>> model.fit().score_test("sex").df
        1
        """
        if self.basis.agreement.question.propensities:
            raise NotAvailableError(
                "score_test: it takes weights as known, and those of a treatment were estimated; use "
                "wald_test on the larger fit"
            )
        model, fit, larger = cast(Any, self._model), self._record.fit, None
        if model is not None:
            text = f"{model.formula.text} + {terms}"
            larger = type(model).from_formula(text, model.partition, **model._settings)
            same_rows(model, larger, terms)
        return self._after_fit(
            f"score_test({terms!r})",
            FAMILY,
            lambda session: self._score_protocol(GEEScoring(session, fit.request, fit.distribution)),
            larger,
        )

    def _score_protocol(self, scoring: GEEScoring) -> FitProtocol[ScoreTest]:
        yield from scoring.open(local=False)
        names, own = list(scoring.coordinates.design.names), set(self.estimate.names)
        new = np.array([name not in own for name in names])
        if not new.any() or not own <= set(names):
            raise ModelError("score_test: the terms add no coefficient to the fit")
        beta = self.params.reindex(names).fillna(0.0).to_numpy()
        gamma = np.linalg.solve(scoring.coordinates.back, beta)
        total = yield from scoring.evaluate(gamma, self.dep_params)
        if total is None:
            raise EstimationError("score_test: the sums of the larger model are not defined at this estimate")
        check_rank(total.information, scoring.coordinates)
        meat, _, _ = yield from scoring.finish(gamma, self.dep_params, total, "robust")
        # In the units of the data, where the hypothesis is that new coefficients are zero.
        forward = np.linalg.inv(scoring.coordinates.back)
        A, M = (forward.T @ one @ forward for one in (total.information, meat))
        score = (forward.T @ total.score)[new]
        # The new functions less their regression on the old ones, which are zero at this estimate.
        L = np.eye(len(names))[new]
        L[:, ~new] = -np.linalg.solve(A[np.ix_(~new, ~new)], A[np.ix_(~new, new)]).T
        statistic, df = float(score @ np.linalg.solve(L @ M @ L.T, score)), int(new.sum())
        return ScoreTest(statistic, float(stats.chi2.sf(statistic, df)), df)

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> RowsResponse:
        no_times(call, times)
        return response_functions(cast(Any, self))

    def get_margeff(
        self,
        at: Literal["overall", "mean", "zero"] = "overall",
        method: Literal["dydx", "eyex", "dyex", "eydx"] = "dydx",
        atexog: Mapping[int | str, float] | None = None,
        dummy: bool = False,
        count: bool = False,
        columns: bool = False,
    ) -> MarginalEffects:
        """Marginal effects on the mean; see :meth:`fedstat.results.GLMResults.get_margeff`.

        Averages are over rows without weights, as in statsmodels.

        Parameters
        ----------
        at, method, atexog, dummy, count, columns
            As there.

        Returns
        -------
        MarginalEffects
        """
        return marginal_effects(cast(Any, self), at, method, atexog, dummy, count, columns)

    def _compare_sites(self) -> Heterogeneity:
        # Own fits have Mancl and DeRouen's covariance of their clusters.
        return compare_own_fits(self.estimate, self._cov(), self._record.fit.local)

    def vif(self) -> pd.DataFrame:
        """Variance inflation factor of every term; generalized ones for terms with several columns."""
        return gvif(self._record.fit.naive, self.estimate.names, self.estimate.terms)

    # -- summary ---------------------------------------------------------------------------------

    @property
    def _criteria(self) -> SimpleNamespace:
        return SimpleNamespace(**self.qic())

    _GLANCE = (
        *RowsResults._GLANCE,
        ("clusters", "clusters"),
        ("dep_params", "dep_params"),
        ("dispersion", "scale"),
        ("QIC", "_criteria.QIC"),
        ("QICu", "_criteria.QICu"),
    )
    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Model Family", "distribution.name", ""),
        ("Link Function", "distribution.link", ""),
        ("Working Corr.", "", _structure_line),
        ("Correlation", "", _correlation_line),
        ("No. Observations", "nobs", ",d"),
        ("No. Clusters", "", _clusters_line),
        ("Mean Size", "", lambda result: number(result.nobs / result.clusters, 3)),
        OFFSET,
        weight_line("Exposure", "exposure"),
        weight_line("Weights", "var_weights"),
        PROPENSITIES,
        ("Scale", "scale", number),
        ("QIC", "_criteria.QIC", two_digits),
        ("QICu", "_criteria.QICu", two_digits),
        ("Covariance Type", "cov_type", lambda cov_type: str(CORRECTED.get(cov_type, cov_type))),
        ("Tests", "", tests_line),
        ("Converged", "converged", yes_or_no),
    )

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        fit = self._record.fit
        if fit.cov_type != "naive":
            est = self.estimate
            yield from fit.clustering.notes(est.names, est.terms, CORRECTION)
        else:
            yield NOTES.note("naive")
        yield from self._weights_notes()
        yield from self._left_out_note(
            " Estimating equations suppose that this does not depend on earlier responses."
        )
        if fit.request.structure == "ar1":
            yield NOTES.note("spacing", time=fit.request.time)
        if fit.outside is not None:
            wanted, low, high = (number(value, 3) for value in fit.outside.tolist())
            yield NOTES.note("correlation", wanted=wanted, low=low, high=high, rho=number(fit.rho, 3))
        yield NOTES.note("marginal", groups=fit.request.groups)
        model = "FederatedOLS" if fit.distribution.least_squares else "FederatedGLM"
        for shared in fit.shared:
            yield from shared.note(
                len(self.estimate.blocks), "clusters", TOO_SMALL, OTHER_MODEL, model=model, or_else=TWICE
            )
        yield from self._masking_note()
        yield from self._own_fits_note()
        yield from self._difference_note()
