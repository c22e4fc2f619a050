"""Results of regressions of categories: parameters, probabilities, their effects, tests, and sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import expit, logit

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.derivatives import variable_directions
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.assumptions import Assumption
from fedstat.inference.effects import Means
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.heterogeneity import MaskedSiteSums, SiteFit
from fedstat.inference.likelihood import mcfadden
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import draw_bands
from fedstat.inference.summary import WIDTH, coefficient_sheet
from fedstat.inference.tables import Sheet, number, two_digits, yes_or_no
from fedstat.kernels.categories import CategoryRows, probabilities
from fedstat.models.categories.evaluation import CategoryEvaluation, evaluate_categories
from fedstat.models.categories.protocol import (
    PROPORTIONAL,
    CategoryFit,
    CategoryNewton,
    Outcomes,
    likelihoods_without,
    parameter_names,
    separate_parameters,
    separate_scores,
    sum_effects,
)
from fedstat.models.categories.steps import FAMILY
from fedstat.models.checks import HeldRows, check_choice
from fedstat.models.effects import no_times
from fedstat.models.horizontal.clusters import corrected_fit
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import TWICE_TOO_SMALL
from fedstat.models.horizontal.response import RowsResponse, check_groups, divided
from fedstat.models.horizontal.results import OFFSET, RowsBasis, rows_estimate, weight_line
from fedstat.models.horizontal.site_results import (
    AssumptionTest,
    SiteFitsResults,
    chi_squared,
    clusters_line,
    quadratic,
    score_tests,
    tests_line,
)
from fedstat.models.horizontal.variable_changes import changes_request
from fedstat.models.margins import (
    AT_OVERALL,
    Change,
    ChangesRequest,
    MarginalEffects,
    MeanJet,
    at_one_row,
    change_at,
    directions_note,
    plain_places,
    shown_effects,
)
from fedstat.models.results import EstimateRecord
from fedstat.models.rows.predictors import PredictorResults
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_ROWS = 10
"""Rows of the rarest category per coefficient of it."""
NOTES = Catalogue(
    warning={
        "rare_category": "Category {category} has {ratio:.1f} rows for each coefficient. With fewer than "
        "{least}, estimates are biased away from zero and intervals are unreliable.",
    },
    info={
        "reference": "Coefficients compare a category with {category}; the ratio of the probabilities of "
        "two categories is assumed not to depend on the others.",
    },
)


def _ratio_line(result: CategoryResults) -> str:
    lr, df = 2.0 * (result.llf - result.llnull), result.estimate.df_model
    return chi_squared(lr, df, float(stats.chi2.sf(lr, df)))


def proportional(fit: CategoryFit) -> Assumption:
    """Return the assumption of equal coefficients at all thresholds, in the words of the link."""
    odds = fit.request.link == "logit"
    return Assumption(
        PROPORTIONAL,
        "score test of coefficients that differ by threshold",
        "NON-PROPORTIONAL ODDS" if odds else "COEFFICIENTS DIFFER BY THRESHOLD",
        "Coefficients are assumed to be the same at all thresholds",
        "A coefficient is then an average over the thresholds.",
        Remedy(
            "FederatedMultinomial.from_formula(...).fit()",
            "See test_proportional_odds(), or fit FederatedMultinomial.",
        ),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CategoryRecord(EstimateRecord):
    """What a file of results holds."""

    fit: CategoryFit
    basis: RowsBasis


@dataclass(frozen=True, slots=True, eq=False)
class CategoryPrediction:
    """Predicted probabilities by row and category, with standard errors.

    Attributes
    ----------
    predicted_mean, se_mean : Series
        Probabilities and their standard errors, by row and category.
    test_distribution : scipy distribution
        Normal, or Student's t.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
    >>> predicted = fit.get_prediction(table.head(1))
    >>> predicted.predicted_mean.round(2).tolist(), predicted.se_mean.shape, predicted.conf_int(0.1).shape
    ([0.81, 0.13, 0.03, 0.02, 0.01], (5,), (5, 2))
    >>> predicted.summary_frame().columns.tolist()
    ['mean', 'mean_se', 'mean_ci_lower', 'mean_ci_upper']
    """

    predicted_mean: pd.Series
    se_mean: pd.Series
    test_distribution: Any

    @takes_alpha
    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of the probabilities: those of their logits, transformed."""
        p = self.predicted_mean
        with np.errstate(all="ignore"):
            half = self.test_distribution.isf(alpha / 2.0) * self.se_mean / (p * (1.0 - p))
            return pd.DataFrame({j: expit(logit(p) + sign * half) for j, sign in enumerate((-1.0, 1.0))})

    @takes_alpha
    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Table with ``mean``, ``mean_se``, ``mean_ci_lower``, ``mean_ci_upper``, as in statsmodels."""
        low, high = self.conf_int(alpha).to_numpy().T
        columns = {"mean": self.predicted_mean, "mean_se": self.se_mean}
        return pd.DataFrame({**columns, "mean_ci_lower": low, "mean_ci_upper": high})


class CategoryResults(PredictorResults):
    """Results of a regression of categories.

    Attributes
    ----------
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.
    evaluation_ledger : Ledger or None
        Releases of the latest evaluation.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
    >>> fit.categories, fit.iterations, fit.df_resid
    ((0, 1, 2, 3, 4), 5, 914)
    >>> fit.predict(table.head(2)).round(2).to_numpy().tolist()
    [[0.81, 0.13, 0.03, 0.02, 0.01], [0.82, 0.12, 0.03, 0.02, 0.01]]
    >>> fit.heterogeneity.joint.df, fit.site_estimates.shape
    (16, (4, 6))
    >>> fit.plot_forest("age", unit=10).get_xlabel().startswith("odds ratio of a higher num per 10")
    True
    >>> fit.llnull < fit.llf, round(fit.pseudo_rsquared(), 2), list(fit.evaluate().by_category)
    (True, 0.07, [0, 1, 2, 3, 4])
    """

    evaluation_ledger: Ledger | None = None
    _record: CategoryRecord
    _proportional: ClassVar[bool]
    _exponentiates = True
    _joint_name = "score test of equal parameters"

    @classmethod
    def _of(
        cls, model: HorizontalModel, fit: CategoryFit, kind: str, outcomes: Outcomes, ledger: Ledger
    ) -> Self:
        """Make results of a fit."""
        design, width = fit.design, len(fit.design.names) - 1
        params, J = to_statsmodels_params(fit, fit.params)
        clustering = fit.clustering and fit.clustering.of(J)
        order = _order(fit)
        names = parameter_names([str(level) for level in fit.categories], design.names, cls._proportional)
        terms = [design.term_names[k] for k in _columns(fit)]
        problem = "" if fit.converged else f"not converged after {len(fit.trace)} evaluations"
        estimate = rows_estimate(
            model,
            replace(design, names=tuple(names[k] for k in order), term_names=tuple(terms[k] for k in order)),
            params=params,
            cov=J @ fit.cov @ J.T,
            converged=fit.converged,
            convergence=problem or f"converged after {len(fit.trace)} evaluations",
            df=clustering.df if clustering and clustering.corrected else None,
            cov_type="cluster" if kind == "sites" else kind,
            llf=fit.total.loglik,
            n_parameters=len(order),
            reasons={"rsquared": "categories have pseudo_rsquared() instead"},
        )
        df_model = float(width if cls._proportional else width * (len(fit.categories) - 1))
        record = CategoryRecord(
            estimate=replace(estimate, df_model=df_model),
            fit=fit,
            basis=RowsBasis.of(model),
            notes=tuple(proportional(fit).note(outcome) for outcome in outcomes.values()),
        )
        return cls(record, ledger, model)

    @property
    def categories(self) -> tuple[Any, ...]:
        """Categories of the response, in order."""
        return self._record.fit.categories

    def pseudo_rsquared(self) -> float:
        """Pseudo R-squared of McFadden."""
        return mcfadden(self.llf, self.llnull)

    # -- probabilities ---------------------------------------------------------------------------

    def predict(
        self, exog: HeldRows | None = None, which: Literal["prob", "linear", "category"] = "prob"
    ) -> Any:
        """Predict for rows that the caller holds.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the model, and of its offset; rows that lack one give NaN.
        which : {"prob", "linear", "category"}
            Probabilities, (rows, categories); linear predictors, (rows, categories - 1); or the category with
            the largest probability.

        Returns
        -------
        DataFrame or Series

        Raises
        ------
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.
        NotAvailableError
            No frame is given: the rows of the fit stay at the sites.
        """
        check_choice("which", which, ("prob", "linear", "category"))
        exog = self._held(exog)
        rows, seen = self._rows(exog)
        levels, eta = list(self.categories), rows.predictors(self._predictor_coefficients())
        found = eta if which == "linear" else probabilities(eta, rows.link)
        names = levels[:-1] if which == "linear" and self._proportional else levels[-found.shape[1] :]
        table = pd.DataFrame(np.nan, index=exog.index, columns=names)
        table.loc[seen] = found
        if which != "category":
            return table
        likeliest = pd.Series(None, index=exog.index, dtype=object)
        likeliest[seen] = np.array(levels, dtype=object)[found.argmax(axis=1)]
        return likeliest

    def get_prediction(self, exog: HeldRows | None = None) -> CategoryPrediction:  # type: ignore[override]
        """Predict probabilities with standard errors and intervals.

        Standard errors are by the delta method, intervals those of the logit of each probability.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            As in :meth:`predict`.

        Returns
        -------
        CategoryPrediction
            By row and category; its ``summary_frame(alpha=0.05)`` has statsmodels' names.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
        >>> fit.get_prediction(table.head(1)).summary_frame().round(2).loc[0, "mean_ci_lower"].tolist()
        [0.75, 0.1, 0.02, 0.01, 0.0]
        """
        held = self._held(exog)
        rows, seen = self._rows(held)
        B, fit = self._predictor_coefficients(), self._record.fit
        P = probabilities(rows.predictors(B), rows.link)
        slopes = np.einsum("mca,mp->mcap", rows.probability_terms(B)[0], rows.X)
        slopes = slopes.reshape(*P.shape, -1) @ fit.map
        se = np.sqrt(np.maximum(np.einsum("mcq,qr,mcr->mc", slopes, fit.cov, slopes), 0.0))
        values = np.full((len(held), P.shape[1], 2), np.nan)
        values[seen] = np.stack([P, se], axis=2)
        index = pd.MultiIndex.from_product([held.index, self.categories], names=["row", "category"])
        mean, error = (pd.Series(values[..., j].ravel(), index=index) for j in (0, 1))
        return CategoryPrediction(mean, error, self._combined_distribution)

    @takes_alpha
    def plot_probabilities(
        self,
        column: str,
        values: Sequence[float] | Floats,
        ax: Axes | None = None,
        *,
        at: Mapping[str, Any] | None = None,
        alpha: float = 0.05,
    ) -> Axes:
        """Draw the probability of each category along the values of a column, with pointwise intervals.

        Parameters
        ----------
        column : str
        values : sequence of float
        ax : matplotlib Axes, optional
        at : mapping
            A value for every other column of the model.
        alpha : float

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ModelError
            The model does not have the column, or `at` lacks another one.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
        >>> fit.plot_probabilities("age", range(35, 76), at={"sex": 1}).get_ylabel()
        'probability of num'
        """
        question, fixed = self.basis.agreement.question, dict(at or {})
        needed = dict.fromkeys((*question.columns, *question.offset_columns))
        lacking = [name for name in needed if name not in (column, *fixed)]
        if column not in needed or lacking:
            what = (
                f"at lacks a value of {', '.join(lacking)}" if column in needed else f"no column {column!r}"
            )
            raise ModelError(f"plot_probabilities: {what}; the model's columns are {', '.join(needed)}")
        x = np.asarray(values, dtype=float)
        frame = pd.DataFrame({name: [value] * len(x) for name, value in fixed.items()} | {column: x})
        found = self.get_prediction(frame).summary_frame(alpha).drop(columns="mean_se")
        bands = {str(level): found.xs(level, level="category").to_numpy().T for level in self.categories}
        held = "".join(f"{name} = {value}, " for name, value in fixed.items())
        title = f"{held}with pointwise {100 * (1 - alpha):g} % intervals"
        return draw_bands(x, bands, column, f"probability of {question.response_columns[0]}", title, ax)

    def _rows(self, frame: pd.DataFrame) -> tuple[CategoryRows, Any]:
        """Code rows of the caller in the form of the kernels, without those that lack a column."""
        fit = self._record.fit
        found = self._predicted(frame, np.zeros(len(fit.design.names)))
        known = found.linear.notna().to_numpy()
        X = found.X[known[found.complete]]
        offset = found.linear.to_numpy()[known] if self.basis.agreement.question.offsets else None
        return CategoryRows(X, np.zeros(len(X), dtype=np.int64), fit.request.link, offset), known

    def _predictor_coefficients(self) -> Floats:
        fit = self._record.fit
        return np.asarray((fit.map @ fit.params).reshape(len(fit.categories) - 1, -1))

    # -- analyses over the rows --------------------------------------------------------------------

    def get_margeff(
        self,
        at: Literal["overall", "mean"] = "overall",
        method: Literal["dydx"] = "dydx",
        columns: bool = False,
    ) -> MarginalEffects:
        """Marginal effects on the probability of each category, with errors by the delta method.

        With ``at="overall"`` sites sum derivatives of the probabilities over their rows once, masked as in
        the fit. Effects at the means of the columns need no message.

        Parameters
        ----------
        at : {"overall", "mean"}
        method : {"dydx"}
        columns : bool
            Effects of the columns of the design, one by one, as statsmodels has them. By default they are
            those of variables, as in :meth:`fedstat.results.GLMResults.get_margeff`.

        Returns
        -------
        MarginalEffects
            Named as ``category: variable``; over the categories they add up to zero.

        Raises
        ------
        NotAvailableError
            Averages for results that were read from a file; effects at the means with an offset.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedMultinomial.from_formula("C(cp) ~ age + sex", partition).fit()
        >>> fit.get_margeff().margeff.round(3).head(2).to_dict()
        {'1: age': 0.001, '1: sex': -0.035}
        """
        check_choice("at", at, ("overall", "mean"))
        check_choice("method", method, ("dydx",))
        fit, B = self._record.fit, self._predictor_coefficients()
        directions = [] if columns else variable_directions(self.basis.agreement, fit.design)
        names = [f"{level}: " for level in self.categories]
        if at == "overall":
            several = [one for one in directions if one.plain is None and not one.problem]
            requested = changes_request(several)
            sums = self._after_fit(
                "get_margeff()", FAMILY, lambda session: sum_effects(session, fit, requested)
            )
            first, second, n = sums.first, sums.second, float(fit.counts[0].sum())
            changed = [sums.effects / n, sums.slopes / n]
        elif self.basis.agreement.question.offsets or self.basis.agreement.question.weighted:
            why = "get_margeff: at='mean' needs means that sites do not report"
            raise NotAvailableError(why, remedy=AT_OVERALL)
        else:
            directions = at_one_row(directions, at)
            several = [one for one in directions if one.plain is None and not one.problem]
            row, link, place = fit.design.mean, fit.request.link, np.eye(len(fit.design.mean) + 1)
            first, second = CategoryRows(row[None, :], np.zeros(1, dtype=np.int64), link).effects(B)

            def jet(X: Floats) -> MeanJet:
                return CategoryRows(X, np.zeros(len(X), dtype=np.int64), link).jet(B)

            at_row = [change_at(one, row, place, B, jet) for one in several]
            changed = [np.array([one[k] for one in at_row]) for k in (0, 1)]
        found = {one.name: both for one, *both in zip(several, *changed, strict=True)}
        # d/dB_bq of sum_a D_ca B_ak is D_cb [k = q], and sum_a B_ak times the derivative of D_ca.
        for k, name in list(enumerate(fit.design.names))[1:] if columns else plain_places(directions):
            slope = np.einsum("a,cabq->cbq", B[:, k], second)
            slope[:, :, k] += first
            found[name] = [first @ B[:, k], slope]
        shown = shown_effects(found, directions)
        return MarginalEffects(
            [f"{level}{name}" for level in names for name in shown],
            np.array([found[name][0] for name in shown]).T.ravel(),
            np.array([found[name][1] for name in shown]).swapaxes(0, 1).reshape(len(names) * len(shown), -1)
            @ fit.map,
            fit.cov,
            test_distribution=self._combined_distribution,
            student=self.use_t,
            options={"method": method, "at": at},
            title=(self.model_name, self.estimate.response),
            note=("Averages over all rows. " if at == "overall" else "At the mean of every column. ")
            + "Errors by the delta method."
            + directions_note(directions),
            sources=(self,),
        )

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> RowsResponse:
        no_times(call, times)
        fit, B = self._record.fit, self._predictor_coefficients()
        baseline = not self._proportional

        def jet(X: Floats, offset: Floats) -> MeanJet:
            return CategoryRows(X, np.zeros(len(X), dtype=np.int64), fit.request.link, offset).jet(B)

        def sums(call: str, changes: Sequence[Change]) -> Means:
            requested = ChangesRequest(tuple(changes))
            found = self._after_fit(call, FAMILY, lambda session: sum_effects(session, fit, requested, False))
            check_groups(changes, found.counts)
            slopes = found.slopes.reshape(*found.effects.shape, -1) @ fit.map
            return divided(found.effects, slopes, found.counts, float(fit.counts[0].sum()))

        return RowsResponse(
            agreement=self.basis.agreement,
            design=fit.design,
            B=B,
            map=fit.map,
            jet=jet,
            sums=sums,
            cov=fit.cov,
            df=None if self._df is None else float(np.min(self._df)),
            mean_words="probability",
            outcomes=self.categories,
            # The predictors of all thresholds but their constants are minus x'b.
            linear_names=self.categories[1:] if baseline else ("",),
            linear_rows=tuple(range(len(B))) if baseline else (0,),
            linear_sign=1.0 if baseline else -1.0,
            linear_constant=baseline,
        )

    def lr_test_terms(self) -> pd.DataFrame:
        """Likelihood ratio test of every term, over all categories.

        The sites evaluate sums for a fit without each term, masked as in the fit.

        Returns
        -------
        DataFrame
            Index term; ``statistic``, ``df``, ``p_value``.

        Raises
        ------
        NotAvailableError
            The results were read from a file.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedMultinomial.from_formula("C(cp) ~ age + sex", partition).fit()
        >>> fit.lr_test_terms().round(1)["statistic"].to_dict()
        {'age': 30.1, 'sex': 25.0}
        """
        fit = self._record.fit
        terms = [fit.design.term_names[k] for k in _columns(fit)]
        tested = list(dict.fromkeys(fit.design.term_names[1:]))
        groups = [[k for k, term in enumerate(terms) if term == one] for one in tested]
        found = self._after_fit(
            "lr_test_terms()",
            FAMILY,
            lambda session: likelihoods_without(CategoryNewton(session, fit.request), fit, groups),
        )
        frame = pd.DataFrame({"statistic": 2.0 * (self.llf - np.array(found)), "df": list(map(len, groups))})
        frame["p_value"] = stats.chi2.sf(frame["statistic"], frame["df"])
        return frame.set_axis(pd.Index(tested, name="term"))

    def evaluate(self, partition: ClientPartition | None = None) -> CategoryEvaluation:
        """Log-loss, confusion, discrimination and calibration of each category, from counts in public bins.

        Parameters
        ----------
        partition : ClientPartition, optional
            New rows; by default those of the fit, on which the figures flatter.

        Returns
        -------
        CategoryEvaluation

        Raises
        ------
        NotAvailableError
            No partition is given, and the results were read from a file.
        PolicyError
            A site refuses.
        """
        partition = self._partition_for("evaluate", partition)
        own = self._model is not None and partition is self._model.partition
        found, self.evaluation_ledger = evaluate_categories(
            self._record.fit, self.basis.agreement, partition, own
        )
        return found

    # -- sites -----------------------------------------------------------------------------------

    def _masked_parts(self) -> MaskedSiteSums | None:
        fit = self._record.fit
        if not fit.masked or fit.apart is None:
            return None
        score, information = self._moved(fit.params, fit.total.score, fit.total.information, fit.back)
        return MaskedSiteSums(score, information, fit.apart)

    def _moved(
        self, at: Floats, score: Floats, information: Floats, back: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Score and information for the parameters that are shown; `back` takes theirs to data units."""
        J = to_statsmodels_params(self._record.fit, at)[1]
        inverse = np.linalg.inv(J if back is None else J @ back)
        return inverse.T @ score, inverse.T @ information @ inverse

    def _own_fits(self) -> list[SiteFit]:
        fit, found = self._record.fit, []
        for one in fit.local:
            beta, cov, score, information = one.beta, one.cov, one.score, one.information
            if beta is not None and cov is not None:
                hidden = np.isnan(beta)
                values = np.where(hidden, fit.params, beta)
                beta, J = to_statsmodels_params(fit, values)
                cov = J @ np.nan_to_num(cov) @ J.T
                lost = np.abs(J) @ hidden > 0.0
                beta[lost], cov[lost], cov[:, lost] = np.nan, np.nan, np.nan
            if score is not None and information is not None:
                score, information = self._moved(fit.params, score, information)
            found.append(replace(one, beta=beta, cov=cov, score=score, information=information))
        return found

    # -- summary ---------------------------------------------------------------------------------

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Link", "_link_words", ""),
        ("No. Observations", "nobs", ",d"),
        weight_line("Freq. Weights", "freq_weights"),
        OFFSET,
        ("Df Model", "estimate.df_model", "g"),
        ("Log-Likelihood", "llf", two_digits),
        ("LL-Null", "llnull", two_digits),
        ("LR Test", "", _ratio_line),
        ("Pseudo R-squ.", "_pseudo_rsquared", number),
        ("AIC", "aic", two_digits),
        ("BIC", "bic", two_digits),
        ("Covariance Type", "", clusters_line),
        ("Tests", "", tests_line),
        ("Converged", "converged", yes_or_no),
    )
    _GLANCE = (*SiteFitsResults._GLANCE, ("pseudo_r_squared", "_pseudo_rsquared"))

    @property
    def _pseudo_rsquared(self) -> float:
        return self.pseudo_rsquared()

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        head, coefficients, *rest = super()._sheets(alpha)
        yield from (head, coefficients)
        yield from self._further_sheets(alpha)
        weights, rows = self._record.fit.counts
        lines = tuple(
            (str(level), f"{n:,.0f}", f"{100.0 * w / weights.sum():.1f} %")
            for level, w, n in zip(self.categories, weights, rows, strict=True)
        )
        yield Sheet(("category", "rows", "share"), lines, "lrr", (WIDTH - 22, 10, 10))
        yield from rest

    def _further_sheets(self, alpha: float) -> Iterator[Sheet]:
        """Yield tables after that of the coefficients."""
        yield from ()

    @property
    def _link_words(self) -> str:
        raise NotImplementedError

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        fit = self._record.fit
        rarest = int(fit.counts[1].argmin())
        least = fit.counts[1, rarest] / max(len(fit.design.names) - 1, 1)
        if least < FEW_ROWS:
            category = repr(self.categories[rarest])
            yield NOTES.note("rare_category", category=category, ratio=least, least=FEW_ROWS)
        if fit.clustering is not None:
            clustering, est = fit.clustering.of(to_statsmodels_params(fit, fit.params)[1]), self.estimate
            remedy = corrected_fit(groups=clustering.groups, correction="CR2")
            yield from clustering.notes(est.names, est.terms, remedy)
        for shared in fit.shared:
            yield from shared.note(len(self.estimate.blocks), "clusters", TWICE_TOO_SMALL)
        yield from self._left_out_note()
        yield from self._assumptions()
        yield from self._masking_note()
        yield from self._own_fits_note()
        if fit.clustering is None:
            yield from self._difference_note()

    def _assumptions(self) -> Iterator[Note]:
        """State what is assumed and not tested."""
        yield from ()


def to_statsmodels_params(fit: CategoryFit, params: Floats) -> tuple[Floats, Floats]:
    """Parameters (q,) in the order in which they are shown, and the matrix (q, q) that brings them there.

    With a cumulative link these are the coefficients, and then the thresholds.
    """
    J = np.eye(len(params))[_order(fit)]
    return J @ params, J


def _order(fit: CategoryFit) -> list[int]:
    """Places of the shown parameters among those of the fit."""
    q, width = len(fit.gamma), len(fit.categories) - 1
    return [*range(width, q), *range(width)] if fit.request.proportional else [*range(q)]


def _columns(fit: CategoryFit) -> list[int]:
    """Column of the design of each parameter of the fit."""
    size = np.abs(fit.map).reshape(-1, len(fit.design.names), len(fit.gamma)).sum(axis=0)
    places: list[int] = size.argmax(axis=0).tolist()
    return places


class OrdinalResults(CategoryResults, saved_as="fedstat ordinal results 3", record=CategoryRecord):
    """Results of :meth:`fedstat.FederatedOrdinal.fit`.

    `params` are the coefficients and the thresholds of R's ``clm`` and ``polr``. statsmodels' OrderedModel
    has logarithms of the differences between successive thresholds instead.

    Attributes
    ----------
    evaluation_ledger : Ledger or None
        Releases of the latest evaluation.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
    >>> fit.odds_ratios().round(2).loc["sex"].tolist()
    [4.5, 3.14, 6.44]
    >>> fit.thresholds.columns.tolist()
    ['estimate', 'std_error', 'conf_low', 'conf_high']
    >>> fit.effect("age", [50, 60], reference=50)["estimate"].round(2).tolist()
    [0.0, 0.63]
    """

    _proportional = True

    @property
    def thresholds(self) -> pd.DataFrame:
        """Thresholds between categories: ``estimate``, ``std_error``, ``conf_low``, ``conf_high``."""
        return self._thresholds(0.05)

    def _thresholds(self, alpha: float) -> pd.DataFrame:
        fit, width = self._record.fit, len(self.categories) - 1
        estimate, se = fit.params[:width], np.sqrt(np.diag(fit.cov))[:width]
        half = self._combined_distribution.isf(alpha / 2.0) * se
        index = list(self.estimate.names[-width:])
        columns = {
            "estimate": estimate,
            "std_error": se,
            "conf_low": estimate - half,
            "conf_high": estimate + half,
        }
        return pd.DataFrame(columns, index=index)

    @takes_alpha
    def tidy(self, alpha: float = 0.05, exponentiate: bool = False) -> pd.DataFrame:
        """One row per coefficient and threshold; exponentials, such as odds ratios, of coefficients only."""
        frame = super().tidy(alpha, exponentiate)
        return frame[~frame["term"].isin(self._constants())] if exponentiate else frame

    def test_proportional_odds(self) -> ProportionalOddsTest:
        """Test whether coefficients are the same at all thresholds, by the score test.

        The sites evaluate score and information of the model in which they differ once, at this estimate. It
        is the score test of Peterson and Harrell (1990), with the observed information.

        Returns
        -------
        ProportionalOddsTest

        Raises
        ------
        NotAvailableError
            The response has two categories, or the results were read from a file.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
        >>> fit.test_proportional_odds().tidy().round(2)["df"].tolist()
        [3, 3, 6]
        """
        fit = self._record.fit
        if not fit.has_thresholds_to_compare:
            raise NotAvailableError(
                "test_proportional_odds: it needs three categories and one column, or more"
            )
        U, V, finite = self._after_fit(
            "test_proportional_odds()", FAMILY, lambda session: separate_scores(session, fit)
        )
        if not finite:
            raise EstimationError(
                "test_proportional_odds: a row's category has no probability at the estimate"
            )

        def statistic(places: list[int]) -> tuple[float, int]:
            M = separate_parameters(fit, [place + 1 for place in places])
            return quadratic(M.T @ U, M.T @ V @ M), M.shape[1] - fit.map.shape[1]

        return ProportionalOddsTest(score_tests(fit.design.term_names[1:], statistic))

    def _effect_words(self) -> tuple[str, str, str]:
        response = self.basis.agreement.question.response_columns[0]
        if self._record.fit.request.link != "logit":
            return (
                f"effect on the latent {response}",
                f"exponential of the effect on {response}",
                "Exponentials",
            )
        return (
            f"effect on the log odds of a higher {response}",
            f"odds ratio of a higher {response}",
            "Odds ratios",
        )

    def _effect_part(self) -> tuple[Floats, Floats]:
        fit, width = self._record.fit, len(self.categories) - 1
        beta, cov = np.zeros(len(fit.design.names)), np.zeros((len(fit.design.names),) * 2)
        beta[1:], cov[1:, 1:] = fit.params[width:], fit.cov[width:, width:]
        return beta, cov

    def _coefficient_sheet(self, alpha: float) -> Sheet:
        # Thresholds have a table of their own: a test that one is zero says little.
        frame = self._coefficients(alpha).iloc[: 1 - len(self.categories)]
        return coefficient_sheet(frame, {}, True, alpha, "t" if self.use_t else "z")

    def _deviations(self) -> pd.Series:
        design = self._record.fit.design
        return pd.Series(design.spread[1:], index=list(design.names[1:]))

    def _constants(self) -> tuple[str, ...]:
        return self.estimate.names[1 - len(self.categories) :]

    def _further_sheets(self, alpha: float) -> Iterator[Sheet]:
        rows = tuple(
            (str(name), *map(number, values)) for name, *values in self._thresholds(alpha).itertuples()
        )
        labels = ("threshold", "estimate", "std err", f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]")
        yield Sheet(labels, rows, "lrrrr", (WIDTH - 44, 10, 10, 10, 10))

    @property
    def _link_words(self) -> str:
        return f"cumulative {self._record.fit.request.link}"


class MultinomialResults(CategoryResults, saved_as="fedstat multinomial results 2", record=CategoryRecord):
    """Results of :meth:`fedstat.FederatedMultinomial.fit`: a coefficient of each column for each category.

    Attributes
    ----------
    evaluation_ledger : Ledger or None
        Releases of the latest evaluation.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedMultinomial.from_formula("C(cp) ~ age + sex", partition).fit()
    >>> fit.params_by_category.shape, fit.params.index[:2].tolist()
    ((3, 3), ['2: Intercept', '2: age'])
    >>> fit.wald_test_terms().table["df_constraint"].tolist()
    [3, 3, 3]
    """

    _proportional = False

    @property
    def params_by_category(self) -> pd.DataFrame:
        """Coefficients, (columns, categories but the first), as `params` of statsmodels' MNLogit."""
        names, levels = list(self._record.fit.design.names), list(self.categories[1:])
        return pd.DataFrame(self.estimate.params.reshape(len(levels), -1).T, index=names, columns=levels)

    @takes_alpha
    def tidy(self, alpha: float = 0.05, exponentiate: bool = False) -> pd.DataFrame:
        """One row per category and column, named as ``category: column``; otherwise as for other models."""
        frame = super().tidy(alpha, exponentiate)
        return frame.drop(columns="site").assign(term=list(self.estimate.names))

    def _coefficients(self, alpha: float) -> pd.DataFrame:
        # Tables and plots have a heading for each category, as those of other models have for each site.
        columns = list(self._record.fit.design.names)
        levels = [str(level) for level in self.categories[1:] for _ in columns]
        frame = super()._coefficients(alpha)
        return frame.assign(term=columns * (len(self.categories) - 1), site=levels)

    def _deviations(self) -> pd.Series:
        design = self._record.fit.design
        return pd.Series(design.spread, index=list(design.names))

    def _effect_part(self) -> tuple[Floats, Floats]:
        raise NotAvailableError(
            "effect: it differs by category",
            remedy=Remedy("get_margeff()", "{call} and plot_probabilities() show it for all categories"),
        )

    def _effect_words(self) -> tuple[str, str, str]:
        first = self.categories[0]
        return f"effect on the log odds against {first}", f"odds ratio against {first}", "Odds ratios"

    @property
    def _link_words(self) -> str:
        return f"logit against {self.categories[0]}"

    def _assumptions(self) -> Iterator[Note]:
        yield NOTES.note("reference", category=repr(self.categories[0]))


class ProportionalOddsTest(AssumptionTest):
    """Score tests of coefficients that differ by threshold, one for each term and one for all.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
    >>> fit.test_proportional_odds().glance()["df"].tolist()
    [6]
    """

    _assumption = "Proportional odds"
    _remedy = (
        "Coefficients differ by threshold: a coefficient of the fit is an average over them. "
        "FederatedMultinomial supposes no order, and a GLM of y > j has coefficients of each threshold."
    )

    def _title(self) -> str:
        return "score test of coefficients that differ by threshold"
