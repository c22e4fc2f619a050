"""Comparison of sites that fit one set of coefficients: Cochran's Q, random effects, a score test, influence.

Two sources, and every statement names its own: the sites' own fits (a meta-analysis of each coefficient), and
the sites' parts of the score and information at the common estimate, which any fit by sums has, also for a
site that has no fit of its own. Of these the score test needs a sum over sites only, which masks may hide the
parts of; the fit without each site needs the parts.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError
from fedstat.inference.heterogeneity.comparison import SiteComparison
from fedstat.inference.heterogeneity.forest import plot_forest
from fedstat.inference.heterogeneity.influence import SiteScores, joint_test
from fedstat.inference.heterogeneity.own_dispersions import OwnPart, welch_test
from fedstat.inference.heterogeneity.random_effects import USUAL, Combining, combine
from fedstat.inference.heterogeneity.summary import build_heterogeneity_summary
from fedstat.inference.heterogeneity.whole_factors import FactorCombination, combine_factor
from fedstat.inference.tables import SheetSummary
from fedstat.typing import Floats, Matrix, Vector

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGE_I2 = 0.5
PARTS = ("score", "information")


@dataclass(frozen=True, slots=True, eq=False)
class SiteFit:
    """One site's own fit in the units of the data, and its part of the sums at the estimate of ALL sites.

    `beta` and `cov`, with the site's own dispersion, are None where it has none, and `problem` says why. They
    are nan where its rows do not determine a coefficient of the common model: for a column that is constant
    there, and for the intercept where that constant is not zero, because the site's own intercept then holds
    the effect of the column. `score` and `information` are for dispersion ONE, None where sums are masked.
    `own` is what its own fit says with its own dispersion, None where that is not estimated.
    """

    site: str
    n: int
    beta: Vector | None
    cov: Matrix | None
    problem: str
    score: Vector | None
    information: Matrix | None
    own: OwnPart | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MaskedParts:
    """Sums over sites in the place of each site's part: score (p,), information (p, p), for dispersion one.

    `form` (2,) are sums of :func:`fedstat.inference.heterogeneity.influence.quadratic_form`.
    """

    score: Floats
    information: Floats
    form: Floats


class Heterogeneity(SiteComparison):
    """How far sites agree on each coefficient; made by `heterogeneity`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> sites = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit(masked=False).heterogeneity
    >>> sites.to_frame().columns[:6].tolist()
    ['estimate', 'std_error', 'sites', 'Q', 'df', 'p_value']
    >>> sites.random_effects("DL").index.tolist(), sites.influence().shape[0]
    (['Intercept', 'age', 'sex'], 12)
    >>> sites.left_out.shape, sites.change.shape
    ((4, 3), (4, 3))
    >>> bool(sites.plot_forest("age").has_data()), "I2" in sites.summary().as_text()
    (True, True)
    """

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """One row per coefficient.

        Returns
        -------
        DataFrame
            ``estimate``, ``std_error`` of the common model; then the fields of
            `fedstat.inference.heterogeneity.random_effects.Combination`, and ``p_holm``, the p-value of Q
            adjusted after Holm for the number of coefficients tested.
        """
        return self.table.copy()

    def random_effects(
        self,
        method: Literal["REML", "DL"] = "REML",
        test: Literal["adhoc", "knha", "z"] = "adhoc",
        prediction: Literal["confidence", "t"] = "confidence",
    ) -> pd.DataFrame:
        """Mean of each coefficient over sites, its interval, and that of a further site.

        Parameters
        ----------
        method : {"REML", "DL"}
            Variance between sites by restricted maximum likelihood, or after DerSimonian and Laird.
        test : {"adhoc", "knha", "z"}
            As in metafor: Hartung's and Knapp's standard error with t quantiles, by default never below that
            of known variances; "z" is the normal interval, which is too short for few sites.
        prediction : {"confidence", "t"}
            Interval of a further site over all variances between sites by their confidence (Nagashima, Noma
            and Furukawa 2019), or as metafor's ``predict``, which takes the one estimated as known: where the
            variance is small its 95 % interval holds the effect of 87 to 90 % of further sites.

        Returns
        -------
        DataFrame
            Index coefficient; ``estimate``, ``std_error``, ``conf_low``, ``conf_high``, ``pred_low``,
            ``pred_high``, ``tau2``, ``sites``. nan where fewer than two sites (for the interval of a further
            site: fewer than three) determine the coefficient.

        Raises
        ------
        ModelError
            An argument is none of these.
        """
        how = Combining(method, test, prediction)
        table = self.table if how == USUAL else _combined(self.estimates, self.std_errors, self.alpha, how)
        words = {"estimate": "estimate", "std_error": "std_error", "low": "conf_low", "high": "conf_high"}
        names = {f"re_{ours}": theirs for ours, theirs in words.items()}
        return table[[*names, "pred_low", "pred_high", "tau2", "sites"]].rename(columns=names)

    def random_effects_of(
        self, term: str | Sequence[str], test: Literal["adhoc", "knha", "z"] = "adhoc"
    ) -> FactorCombination:
        """Mean of all coefficients of a factor over sites together, by multivariate random effects.

        One by one the coefficients of a factor depend on its reference level, and each has a test of its own;
        together they have one test of no effect, and one of effects that are the same everywhere.

        Parameters
        ----------
        term : str or sequence of str
            A term of the formula, such as ``"C(stage)"``, or names of coefficients.
        test : {"adhoc", "knha", "z"}
            As of :meth:`random_effects`, extended by Jackson and Riley (2014) to several coefficients.

        Returns
        -------
        FactorCombination
            ``to_frame()``, ``summary()``; ``pvalue`` that the factor has no effect, ``Q_pvalue`` that it has
            the same at all sites, ``I2``, ``tau`` and ``correlation`` of the effects between sites.

        Raises
        ------
        ModelError
            No such term or coefficient, or an argument that is none of these.
        EstimationError
            Fewer than two sites determine one of the coefficients.

        References
        ----------
        Jackson, D., Riley, R. and White, I. R. (2011). Multivariate meta-analysis: potential and promise.
        Statistics in Medicine 30, 2481-2498.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> sites = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().heterogeneity
        >>> together = sites.random_effects_of(["age", "sex"])
        >>> together.df, together.Q_df, bool(together.pvalue < 0.05)
        (2, 6, True)
        """
        names = [str(name) for name in self.estimates.columns]
        of_term = [name for name, one in zip(names, self.terms, strict=False) if one == term]
        wanted = of_term or ([term] if isinstance(term, str) else list(term))
        unknown = [name for name in wanted if name not in names]
        if unknown or not wanted:
            known = dict.fromkeys([*self.terms, *names])
            raise ModelError(
                f"random_effects_of: {', '.join(map(repr, unknown)) or 'nothing'} is no term and no "
                f"coefficient; there are: {', '.join(known)}"
            )
        assert self.covariances is not None
        at = [names.index(name) for name in wanted]
        own = self.covariances[:, at][:, :, at]
        return combine_factor(
            tuple(wanted), self.estimates.to_numpy()[:, at], own, test=test, alpha=self.alpha
        )

    def influence(self) -> pd.DataFrame:
        """Each coefficient without each of the sites.

        Returns
        -------
        DataFrame
            Index (``left out``, ``coefficient``); ``estimate`` by one Newton step, which is exact for the
            linear model, and ``change`` in standard errors of the common model.

        Raises
        ------
        NotAvailableError
            Sums were masked: there are no parts of single sites.
        """
        index = pd.MultiIndex.from_product(
            [self.left_out.index, self.left_out.columns], names=["left out", "coefficient"]
        )
        parts = {"estimate": self.left_out, "change": self.change}
        return pd.DataFrame({what: part.to_numpy().ravel() for what, part in parts.items()}, index=index)

    def summary(self) -> SheetSummary:
        """Joint test, coefficients, sites, and what follows, in words."""
        return build_heterogeneity_summary(self)

    def plot_forest(
        self,
        coefficient: str,
        ax: Axes | None = None,
        *,
        exponentiate: bool = False,
        effect: str = "",
    ) -> Axes:
        """Forest plot of one coefficient: sites' own estimates, the common one, the mean of random effects.

        It is drawn on `ax`, or in a new figure; `exponentiate` draws exponentials, such as odds ratios, on a
        logarithmic scale. `effect` names the axis. A ModelError says that there is no such coefficient.
        """
        names = [str(name) for name in self.table.index]
        if coefficient not in names:
            close = difflib.get_close_matches(coefficient, names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(names)}"
            raise ModelError(f"plot_forest: {coefficient!r} is not a coefficient; {hint}")
        own = {"estimate": self.estimates[coefficient], "std_error": self.std_errors[coefficient]}
        rows = pd.DataFrame({**own, "problem": self.sites["problem"]})
        combined = self.table.iloc[names.index(coefficient)]
        effect = effect or ("exponential of the coefficient" if exponentiate else "coefficient")
        return plot_forest(rows, combined, ax=ax, alpha=self.alpha, exponentiate=exponentiate, effect=effect)

    def __repr__(self) -> str:
        flagged = ", ".join(self.flagged) or "none"
        return (
            f"<Heterogeneity: {len(self.sites)} sites; coefficients that differ: {flagged}; see .summary()>"
        )

    def _repr_html_(self) -> str:
        return self.summary().as_html()


def heterogeneity(
    names: Sequence[str],
    beta: Floats,
    scale: float,
    fits: Sequence[SiteFit],
    *,
    masked: MaskedParts | None = None,
    estimated: bool = False,
    alpha: float = 0.05,
    terms: Sequence[str] = (),
) -> Heterogeneity:
    """Compare the sites of one fit with coefficients beta (p,) and dispersion `scale`.

    The scores and informations of `fits` are for dispersion ONE, and are divided by `scale` HERE. At the
    maximum the scores sum to zero; what is left of a fit that stopped before is allowed for. `masked` is in
    the place of scores and informations that are hidden. Where the dispersion was `estimated`, the joint test
    gives each site its own, if all have a fit of their own, and is `welch_test`. `alpha` is one minus the
    level of intervals, and the level of `Heterogeneity.flagged`; `terms` (p,) are those of the coefficients.
    The statistics are those of `random_effects.combine` and `influence.SiteScores`; an EstimationError says
    that a shape does not fit or the information of all sites is not positive definite.
    """
    if not 0.0 < alpha < 1.0 or not fits:
        raise ModelError(
            f"heterogeneity: expected alpha between 0 and 1 and one site or more, received {alpha} and "
            f"{len(fits)} sites"
        )
    for fit in fits:
        _check_shapes(fit, len(names), () if masked is not None else PARTS)
    own = np.array([_own(fit, len(names)) for fit in fits])
    without = None
    if masked is not None:
        # Masked sums tell all that the common model needs; only the parts of single sites are lost.
        errors = np.sqrt(scale * np.diag(np.linalg.inv(masked.information)))
        joint = joint_test(masked.form, masked.score, masked.information, scale)
    else:
        scores, informations = (np.array([getattr(fit, what) for fit in fits]) for what in PARTS)
        parts = SiteScores.of(scores, informations, scale, names)
        errors, joint, without = parts.std_errors, parts.joint_test(), parts.without_each(beta)
    index = pd.Index([fit.site for fit in fits], name="site")

    def grid(values: Floats) -> pd.DataFrame:
        return pd.DataFrame(values, index=index, columns=pd.Index(names))

    estimates, std_errors = grid(own[:, 0]), grid(np.sqrt(own[:, 1]))
    own_parts = [fit.own for fit in fits if fit.own is not None]
    if estimated and len(own_parts) == len(fits):
        joint = welch_test(own_parts)
    table = _table(_combined(estimates, std_errors, alpha), beta, errors)
    return Heterogeneity(
        sites=pd.DataFrame({"nobs": [f.n for f in fits], "problem": [f.problem for f in fits]}, index=index),
        estimates=estimates,
        std_errors=std_errors,
        table=table,
        joint=joint,
        one_dispersion=estimated and not joint.own_dispersions,
        without_each=None if without is None else (grid(without[0]), grid(without[1])),
        flagged=tuple(table.index[(table["I2"] > LARGE_I2) & (table["p_holm"] < alpha)]),
        alpha=alpha,
        covariances=np.array([_own_covariance(fit, len(names)) for fit in fits]),
        terms=tuple(terms),
    )


def _own_covariance(fit: SiteFit, p: int) -> Floats:
    """Covariance of one site's estimates, (p, p); nan where it has none."""
    return np.full((p, p), np.nan) if fit.cov is None else np.asarray(fit.cov)


def _check_shapes(fit: SiteFit, p: int, parts: Sequence[str]) -> None:
    received = {part: np.shape(getattr(fit, part)) for part in parts}
    expected: dict[str, tuple[int, ...]] = {"score": (p,), "information": (p, p)}
    if fit.beta is not None and fit.cov is not None:
        received |= {"beta": fit.beta.shape, "cov": fit.cov.shape}
        expected |= {"beta": (p,), "cov": (p, p)}
    wrong = [f"{what} of shape {shape}" for what, shape in received.items() if shape != expected[what]]
    if wrong:
        raise EstimationError(
            f"heterogeneity: expected arrays for {p} coefficients of site {fit.site!r}, received "
            f"{', '.join(wrong)}"
        )


def _own(fit: SiteFit, p: int) -> Floats:
    """Estimates and variances of one site, shape (2, p); nan where it has none."""
    own = np.full((2, p), np.nan)
    if fit.beta is None or fit.cov is None:
        return own
    variance = np.diag(fit.cov)
    # A site may determine some coefficients and not others: each is judged alone.
    known = np.isfinite(fit.beta) & np.isfinite(variance) & (variance > 0.0)
    own[:, known] = fit.beta[known], variance[known]
    return own


def _combined(
    estimates: pd.DataFrame, std_errors: pd.DataFrame, alpha: float, how: Combining = USUAL
) -> pd.DataFrame:
    """Random effects of each coefficient from sites' own estimates (sites, coefficients)."""
    own = zip(estimates.to_numpy().T, std_errors.to_numpy().T, strict=True)
    rows = [asdict(combine(b, se**2, alpha, how)) for b, se in own]
    return pd.DataFrame(rows, index=pd.Index(estimates.columns, name="coefficient"))


def _table(table: pd.DataFrame, beta: Floats, errors: Floats) -> pd.DataFrame:
    p_values = table["p_value"].to_numpy()
    holm, tested = np.full(len(table), np.nan), np.isfinite(p_values)
    if tested.any():
        # Coefficients that fewer than two sites determine are not tested, and cost no power.
        holm[tested] = adjust_holm(p_values[tested])
    table.insert(list(table.columns).index("p_value") + 1, "p_holm", holm)
    table.insert(0, "std_error", errors)
    table.insert(0, "estimate", beta)
    return table


def adjust_holm(p: Floats) -> Floats:
    """Adjust p-values for their number by Holm's method (1979)."""
    order = np.argsort(p)
    steps = np.arange(len(p), 0, -1) * p[order]
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted
