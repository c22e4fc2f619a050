"""Results of an effect of treatment: potential means, comparisons, E-values, and the sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.effects import EffectEstimates, Means
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.heterogeneity import Heterogeneity
from fedstat.inference.homogeneity_tests import SiteWelchTerms
from fedstat.inference.hypotheses import DegreesOfFreedom
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.tables import Sheet, show_probability, yes_or_no
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import TWICE_TOO_SMALL
from fedstat.models.horizontal.overlap import arm_sheet, is_bounded, overlap_notes, weight_frame
from fedstat.models.horizontal.results import RowsBasis, rows_estimate, weight_line
from fedstat.models.horizontal.site_results import (
    DIFFER,
    SiteFitsResults,
    clusters_line,
    compare_own_fits,
    tests_line,
)
from fedstat.models.horizontal.treatment_weights import FittedPropensity
from fedstat.models.margins import Change
from fedstat.models.results import EstimateRecord
from fedstat.models.treatment.protocol import TreatmentFit, contrasts_with_first
from fedstat.models.treatment.steps import weights_of
from fedstat.typing import Floats

FORMAT = "fedstat treatment results 1"
METHOD_WORDS = {
    "ipw": "inverse probability weighting",
    "aipw": "augmented inverse probability weighting",
    "standardization": "standardization",
    "ipw_ra": "weighted outcome models",
}
POPULATIONS = {
    "ATE": "all rows",
    "ATT": "rows of {1}",
    "ATC": "rows of {0}",
    "ATO": "rows of overlap",
    "matching": "matched rows",
}
NOTES = Catalogue(
    warning={
        "placebo": "The treatment cannot affect a placebo outcome, and its effect on {response} differs from "
        "zero (p {p}). Columns that affect both are missing in the formulas, or a model is wrong.",
    },
    info={
        "placebo/none": "The effect on the placebo outcome {response} does not differ from zero (p {p}). "
        "This supports that no column is missing, and does not prove it.",
        "assumptions": "Causal if no unmeasured column affects both treatment and outcome{correct}.",
        "transport": "Right for the rows of {target} if, given the columns of the formulas, the {what} in an "
        "arm do not depend on the site.",
    },
)
CORRECT = {
    "ipw": " and the propensity model is right",
    "standardization": " and the outcome models are right",
    "aipw": " and one of the two models is right",
    "ipw_ra": " and one of the two models is right",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TreatmentRecord(EstimateRecord):
    """What a file of results holds."""

    fit: TreatmentFit
    basis: RowsBasis
    placebo: bool = False


@dataclass(frozen=True, eq=False)
class ArmMeans:
    """Potential means, as functions of parameters; see :class:`~fedstat.models.effects.ResponseFunctions`."""

    variables: tuple[str, ...]
    levels: Mapping[str, tuple[LevelValue, ...]]
    typical: Mapping[str, LevelValue]
    params: Floats
    cov: Floats
    over_rows: str
    df: DegreesOfFreedom
    outcomes: Sequence[Any] = ("",)
    heading: str = "group"
    link: str = ""
    mean_words: str = "potential means"
    why_no_average: str = ""
    further: tuple[str, ...] = ()
    inverse: tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]] = (np.asarray, np.ones_like)

    @property
    def arm(self) -> str:
        """Column of the treatment."""
        return self.variables[0]

    @property
    def rows(self) -> Mapping[LevelValue, Floats]:
        """By arm, the derivatives of its potential mean by the parameters, (J,)."""
        arms = self.levels[self.arm]
        return dict(zip(arms, np.linalg.inv(contrasts_with_first(len(arms))), strict=True))

    def means(self, frame: pd.DataFrame) -> Means:
        """Return the potential means of the arms of rows."""
        rows = self.rows
        if unknown := [level for level in frame[self.arm] if level not in rows]:
            raise ModelError(f"at: {self.arm!r} has no level {unknown[0]!r}")
        return self._of([rows[level] for level in frame[self.arm]])

    def _of(self, slopes: Sequence[Floats]) -> Means:
        R = np.array(slopes)
        return Means((R @ self.params)[:, None], R[:, None])

    def derivatives(self, frame: pd.DataFrame, name: str) -> NoReturn:
        """Refuse derivatives by a category."""
        raise NotAvailableError(f"slopes: {name!r} is a category")

    def linear(self, frame: pd.DataFrame) -> NoReturn:
        """Refuse linear predictors."""
        raise NotAvailableError("which='linear': potential means are averages, and have no linear predictor")

    def averages(self, call: str, changes: Sequence[Change]) -> Means:
        """Return potential means, or differences of two; no request is sent."""
        if any(one.variable != self.arm or one.by for one in changes):
            raise NotAvailableError(
                f"{call}: potential means are of one arm each, and predictions of {self.arm!r} alone"
            )
        rows: Mapping[Any, Floats] = self.rows
        return self._of([rows[one.high] - (0.0 if one.low is None else rows[one.low]) for one in changes])


class TreatmentResults(SiteFitsResults, saved_as=FORMAT, record=TreatmentRecord):
    """Results of :meth:`fedstat.TreatmentEffect.fit`.

    `params` are the differences of the potential means from that of the control, and this mean, as in Stata's
    ``teffects``. :meth:`predictions` has the mean of each arm, :meth:`comparisons` ratios and odds ratios.

    Attributes
    ----------
    model : HorizontalModel
        For results that were read from a file, the names of outcome and coefficients only.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> model = fs.TreatmentEffect.from_formula("died ~ age", partition, treatment="arm ~ age")
    >>> fit = model.fit()
    >>> fit.predictions("arm").tidy().round(3).iloc[:, :3]
           arm  estimate  std_error
    0    drugs     0.592      0.023
    1  surgery     0.428      0.025
    >>> fit.comparisons("arm", comparison="lnratio", exponentiate=True).tidy().round(2)["estimate"].tolist()
    [0.72]
    >>> fit.e_values().round(2)["e_value"].tolist()
    [2.11]
    >>> fit.population, fit.arms.columns.tolist(), fit.equations.shape
    ('all rows', ['rows', 'mean', 'potential_mean'], (8, 2))
    >>> fit.weights.columns.tolist(), type(fit.propensity).__name__
    (['rows', 'weight', 'effective_rows'], 'FittedPropensity')
    """

    _record: TreatmentRecord
    _joint_name = "test of equal effects"

    @classmethod
    def _of(cls, model: HorizontalModel, fit: TreatmentFit, ledger: Ledger) -> Self:
        """Make results of a fit."""
        problem = "" if fit.converged else f"not converged after {len(fit.trace)} evaluations"
        R, control = contrasts_with_first(len(fit.levels)), fit.levels[0]
        names = (*(f"{level} - {control}" for level in fit.levels[1:]), f"mean {control}")
        arm = fit.request.arm
        estimate = rows_estimate(
            model,
            replace(fit.design, names=names, term_names=(*[arm] * (len(names) - 1), "mean")),
            params=R @ fit.means,
            cov=R @ fit.means_cov @ R.T,
            converged=fit.converged,
            convergence=problem or f"converged after {len(fit.trace)} evaluations",
            df=None if fit.clustering is None else fit.clustering.df,
            cov_type="stacked" if fit.clustering is None else "cluster",
            llf=float("nan"),
            reasons={
                "llf": "potential means solve estimating equations",
                "rsquared": "potential means solve estimating equations",
            },
        )
        estimate = replace(estimate, df_model=float(len(names) - 1))
        return cls(TreatmentRecord(estimate=estimate, fit=fit, basis=RowsBasis.of(model)), ledger, model)

    @property
    def population(self) -> str:
        """Rows that the effect is over."""
        return population_of(self._fit.request.estimand, self._fit.request.target, self._fit.levels)

    @property
    def propensity(self) -> FittedPropensity | None:
        """The propensity model for the argument `weights` of other models; None if weights depend on more."""
        found: FittedPropensity | None = self._fit.propensity
        return found

    @property
    def arms(self) -> pd.DataFrame:
        """Rows and mean outcome of each arm, and its potential mean."""
        sums = self._fit.arms
        index = pd.Index(self._fit.levels, name=self._fit.request.arm)
        rows, mean = sums[:, 0].astype(np.int64), sums[:, 1] / weights_of(sums)
        return pd.DataFrame({"rows": rows, "mean": mean, "potential_mean": self._fit.means}, index=index)

    @property
    def weights(self) -> pd.DataFrame:
        """Rows of each arm, sum of their weights, and effective number of rows, ``(sum w)^2 / sum w^2``.

        Raises
        ------
        NotAvailableError
            Standardization has no weights.
        """
        return weight_frame(self._fit.request.arm, self._fit.levels, self._fit.arms[:, 0], self._fit.spread)

    @property
    def equations(self) -> pd.DataFrame:
        """Parameters of all equations with standard errors: propensity, outcome models, means."""
        fit = self._fit
        errors = np.sqrt(np.diag(fit.cov))
        names = fit.chain.names(fit.design.names)
        return pd.DataFrame({"estimate": fit.theta, "std_error": errors}, index=names)

    def _response(self, call: str, times: Any = None) -> ArmMeans:
        if times is not None:
            raise ModelError(f"{call}: times: this model predicts no survival; leave the argument out")
        arm, levels = self._fit.request.arm, self._fit.levels
        known = (arm,), {arm: levels}, {arm: levels[0]}
        over = f"Averages over {self.population}"
        return ArmMeans(*known, self.estimate.params, self._cov(), over, self._df)

    def _effect_words(self) -> tuple[str, str, str]:
        return "difference of potential means", "exponential", "Exponentials"

    def _constants(self) -> tuple[str, ...]:
        return (self.estimate.names[-1],)

    @takes_alpha
    def e_values(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return E-values of the ratios of potential means.

        An unmeasured column explains the ratio away only if its ratios with treatment and with outcome are
        both at least the E-value, given all measured columns (VanderWeele and Ding 2017, Annals of Internal
        Medicine 167).

        Parameters
        ----------
        alpha : float
            One minus the level of the interval.

        Returns
        -------
        DataFrame
            By comparison: ``ratio``, ``conf_low``, ``conf_high``, ``e_value``, and ``e_value_limit``, that of
            the limit of the interval that is nearer to one; it is one if the interval contains one.

        Raises
        ------
        EstimationError
            A potential mean is not positive.
        """
        found: EffectEstimates = self.comparisons(
            self._fit.request.arm, comparison="lnratio", exponentiate=True
        )
        frame = found.tidy(alpha).set_index("contrast")[["estimate", "conf_low", "conf_high"]]
        frame.columns = pd.Index(["ratio", "conf_low", "conf_high"])
        near = limit_near_one(*frame.to_numpy(dtype=np.float64).T)
        return frame.assign(e_value=e_value(frame["ratio"].to_numpy()), e_value_limit=e_value(near))

    # -- summary ---------------------------------------------------------------------------------

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Treatment", "_fit.request.arm", ""),
        ("Estimand", "", lambda fit: f"{fit._fit.request.estimand} ({fit.population})"),
        ("Method", "_fit.request.method", ""),
        ("Outcome Model", "_fit", lambda fit: fit.distribution.name if fit.chain.equations.models else ""),
        ("Propensity Link", "_fit.request.link", lambda link: "" if link == "logit" else link),
        weight_line("Sampling Weights", "var_weights"),
        ("No. Observations", "nobs", ",d"),
        ("Covariance Type", "", clusters_line),
        ("Tests", "", tests_line),
        ("Converged", "converged", yes_or_no),
    )

    def _title(self) -> str:
        return f"{self.model_name} by {METHOD_WORDS[self._fit.request.method]}"

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        header, coefficients, *rest = super()._sheets(alpha)
        yield from (header, arm_sheet(self.arms, ("rows", "mean", "potential mean")), coefficients, *rest)

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        fit, est = self._fit, self.estimate
        if self._record.placebo:
            J = len(fit.levels)
            p = float(self.wald_test(np.eye(J)[: J - 1]).pvalue)
            kind = "placebo" if p < DIFFER else "placebo/none"
            yield NOTES.note(kind, response=est.response, p=show_probability(p))
        bounded = is_bounded(fit.request.estimand, fit.request.target)
        yield from notes_of_arms(fit, est.names, est.terms, len(est.blocks), bounded)
        yield from self._left_out_note()
        if fit.request.target:
            yield NOTES.note("transport", what="outcomes", target=fit.request.target)
        yield NOTES.note("assumptions", correct=CORRECT[self._fit.request.method])
        yield from self._own_fits_note()
        yield from self._difference_note()
        yield from self._masking_note()

    # -- what other results over rows have -----------------------------------------------------------

    def _compare_sites(self) -> Heterogeneity:
        """Compare the sites' own differences between arms; means of an arm may differ between sites."""
        K, parts = len(self.estimate.names) - 1, []
        for one in self._fit.local:
            if one.beta is not None:
                beta, cov = one.beta[:K], one.cov[:K, :K]
                information, df = np.linalg.inv(cov), float(max(one.n - len(self._fit.theta), 1))
                own = SiteWelchTerms(information @ beta, information, df)
                one = replace(one, beta=beta, cov=cov, own=own)
            parts.append(one)
        return compare_own_fits(self.estimate, self._cov(), parts)

    def placebo(self, formula: str, **settings: Any) -> Self:
        """Estimate the effect on a placebo outcome, which the treatment cannot have changed.

        Examples are the outcome of an earlier year, or a disease that the treatment does not act on. An
        effect other than zero shows that columns which affect both are missing in the formulas.

        Parameters
        ----------
        formula : str
            Of the placebo outcome; without its terms, ``"y0 ~ 1"``, if the method has no outcome models.
        **settings
            Those of :meth:`TreatmentEffect.from_formula` that differ, such as ``family``, or a ``treatment``
            without the placebo outcome.

        Returns
        -------
        TreatmentResults
            By the method and covariance of this fit; the summary has a note on the test.

        Raises
        ------
        NotAvailableError
            The results were read from a file.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> model = fs.TreatmentEffect.from_formula("died ~ 1", partition, treatment="arm ~ C(stage)")
        >>> model.fit("ipw").placebo("age ~ 1").pvalues.iloc[0] > 0.05
        np.True_
        """
        if self._model is None:
            raise NotAvailableError("placebo: this result was read from a file; fit the model again")
        given = {**self._model._given, **settings}
        model = type(self._model).from_formula(formula, self._model.partition, **given)
        found: Self = model.fit(**self._call.arguments)
        found._record = replace(found._record, placebo=True)
        return found

    def subgroups(self, effect: str, by: str | Sequence[str]) -> NoReturn:
        """Refuse fits of subgroups.

        Raises
        ------
        NotAvailableError
            A subset of the rows has models of its own.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> model = fs.TreatmentEffect.from_formula("died ~ age", partition, treatment="arm ~ age")
        >>> try:
        ...     model.fit().subgroups("arm", "stage")
        ... except fs.errors.NotAvailableError as error:
        ...     print(type(error).__name__)
        NotAvailableError
        """
        raise NotAvailableError(
            "subgroups: a subset of the rows has models of treatment and outcome of its own (subset)"
        )

    def _deviations(self) -> NoReturn:
        raise NotAvailableError(
            "standardized: potential means are of no column, which would have a deviation"
        )

    def _effect_part(self) -> NoReturn:
        raise self._other("effect", "a covariate has no effect of its own here")

    def _predicted(self, frame: Any, params: Any = None) -> NoReturn:
        raise self._other("get_prediction", "means are those of whole arms")

    def _other(self, call: str, why: str) -> NotAvailableError:
        return NotAvailableError(
            f"{call}: {why}; potential means are predictions of the levels of {self._fit.request.arm!r}"
        )


def notes_of_arms(
    fit: Any, names: Sequence[str], terms: Sequence[str], n_sites: int, bounded: bool
) -> Iterator[Note]:
    """Warn of few rows with weight, and of few clusters; `names` and `terms` are those of estimates."""
    yield from overlap_notes(fit.levels, fit.arms[:, 0], fit.spread, bounded)
    if fit.clustering is not None:
        yield from fit.clustering.notes(names, terms, None)
        for shared in fit.shared:
            yield from shared.note(n_sites, "clusters", TWICE_TOO_SMALL)


def population_of(estimand: str, target: str, levels: Sequence[LevelValue]) -> str:
    """Describe the rows that an effect is over."""
    return f"rows of {target}" if target else POPULATIONS[estimand].format(*levels)


def e_value(ratios: Floats) -> Floats:
    """Return the E-values of ratios (n,): ``R + sqrt(R (R - 1))``, of the inverse below one."""
    R = np.maximum(ratios, 1.0 / ratios)
    return np.asarray(R + np.sqrt(R * (R - 1.0)))


def limit_near_one(ratio: Floats, low: Floats, high: Floats) -> Floats:
    """Return the limits of intervals that are nearer to one, (n,); one for an interval that contains it."""
    return np.where(ratio >= 1.0, np.maximum(low, 1.0), np.minimum(high, 1.0))
