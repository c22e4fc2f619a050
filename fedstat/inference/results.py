"""Results of an estimate that every model family inherits.

Names and meanings are those of statsmodels' likelihood results, with pandas objects out; tests are normal,
or of Student's t where a family says so (`use_t`, `df_inference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.inference.estimate import INTERCEPT, Estimate, LedgerLike, ReceiptLike
from fedstat.inference.hypotheses import EstimateTests
from fedstat.inference.likelihood import LRTest, lr_test
from fedstat.inference.plots import link_words, per_deviation, plot_coefficients
from fedstat.inference.summary import SummaryContent, build_summary
from fedstat.inference.tables import SheetSummary, human_bytes
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Estimate", "FederatedResults", "LRTest", "LedgerLike"]


class FederatedResults(EstimateTests):
    """Estimates of a federated fit, with the inference that follows from them.

    A family inherits from it, sets `model_name` and `method_name`, and adds its own lines to the
    summary by extending `_summary_left`, `_summary_right` and `_summary_notes`.

    Parameters
    ----------
    estimate : Estimate
    ledger : LedgerLike, optional
        None for an estimate that was read from a file without its account.

    Raises
    ------
    NotAvailableError
        By any statement that this fit cannot make; the message says why.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedGLM.from_formula("num ~ age + C(cp)", partition).fit()
    >>> fit.f_test("age = 0").distribution
    'F'
    >>> fit.wald_test_terms().table.index.tolist()
    ['Intercept', 'age', 'C(cp)']
    >>> "C(cp)" in fit.summary().as_text()
    True
    >>> bool(fit.plot_coefficients().has_data())
    True
    """

    def compare_lr_test(self, restricted: FederatedResults) -> LRTest:
        """Likelihood ratio test of this fit against a nested one.

        Parameters
        ----------
        restricted : FederatedResults
            A fit of the same response on the same entities, with some of the coefficients left out.

        Returns
        -------
        (statistic, pvalue, df_diff)

        Raises
        ------
        ModelError
            The two fits are not nested, or not of the same data.
        NotAvailableError
            One of them has no log-likelihood.
        EstimationError
            The restricted fit has the larger log-likelihood.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> large = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> small = fs.GLORE.from_formula("num > 0 ~ age", partition).fit()
        >>> test = large.compare_lr_test(small)
        >>> test.df_diff, bool(test.pvalue < 0.001)
        (1.0, True)
        """
        return lr_test(self, restricted)

    def get_margeff(self, *args: Any, **kwargs: Any) -> Any:
        """Marginal effects on the mean of the response, of results that have them.

        Raises
        ------
        NotAvailableError
            They are derivatives of the mean at a linear predictor, and here there is none, or no covariance.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
        >>> bool((fit.get_margeff().margeff == fit.params[1:]).all())
        True
        """
        raise NotAvailableError(
            "get_margeff: marginal effects are derivatives of a mean at a linear predictor, and errors of "
            "them need a covariance of its coefficients; these results lack one or the other. Of a linear "
            "model they are the coefficients; FederatedGLM, VFEMRegression and VerticalGLM have them"
        )

    # -- tables and pictures ---------------------------------------------------------------------

    def tidy(self, conf_level: float = 0.95, exponentiate: bool = False) -> pd.DataFrame:
        """One row per coefficient, in the order of the design.

        Parameters
        ----------
        conf_level : float
        exponentiate : bool
            Give ``estimate`` and its limits as exponentials, such as odds ratios; ``std_error`` and
            ``statistic`` stay those of the coefficients.

        Returns
        -------
        DataFrame
            ``client``, ``name``, ``term``, ``estimate``, ``std_error``, ``statistic``, ``p_value``,
            ``conf_low``, ``conf_high``. Where the fit has no covariance the last five are nan and
            ``frame.attrs["note"]`` says why.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.tidy(exponentiate=True)[["name", "estimate", "conf_low", "conf_high"]].round(2)
                name  estimate  conf_low  conf_high
        0  Intercept      0.01      0.01       0.04
        1        age      1.06      1.05       1.08
        2        sex      4.41      3.06       6.38
        """
        est = self.estimate
        frame = pd.DataFrame({"client": est.clients, "name": est.names, "term": est.terms}, dtype=object)
        frame["estimate"] = est.params
        if est.cov is None:
            frame[["std_error", "statistic", "p_value", "conf_low", "conf_high"]] = np.nan
            frame.attrs["note"] = self._reason("cov_params")
            return _exponentials(frame) if exponentiate else frame
        columns = {"std_error": self.bse, "statistic": self.tvalues, "p_value": self.pvalues}
        limits = self.conf_int(1.0 - conf_level)
        columns |= {"conf_low": limits[0], "conf_high": limits[1]}
        frame = frame.assign(**{name: column.to_numpy() for name, column in columns.items()})
        return _exponentials(frame) if exponentiate else frame

    def glance(self) -> pd.DataFrame:
        """Put the fit as a whole into one row, with broom's names; ``concat`` puts several under one another.

        Returns
        -------
        DataFrame
            ``nobs``, ``n_sites``, ``df_model``, ``df_resid``, ``r_squared``, ``logLik``, ``AIC``, ``BIC``,
            ``deviance`` and what the family adds; nan where the fit does not define one.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> result = fs.GLORE.from_formula("num > 0 ~ age + sex", hospitals).fit()
        >>> result.glance()[["nobs", "n_sites", "df_model", "df_resid"]].astype(int).values.tolist()
        [[920, 4, 2, 917]]
        """
        return pd.DataFrame([self._glance()])

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Estimate, federation, coefficients by institution, what each institution brought, notes.

        Parameters
        ----------
        alpha : float
            One minus the level of the intervals.

        Returns
        -------
        SheetSummary
            A statsmodels ``Summary``: ``print`` it, or take ``as_html()``, ``as_latex()``, ``as_csv()``.
        """
        return build_summary(
            SummaryContent(
                title=f"{self.model_name} results",
                left=self._summary_left(),
                right=self._summary_right(),
                coefficients=self.tidy(1.0 - alpha),
                inference=self.estimate.cov is not None,
                alpha=alpha,
                blocks=self.estimate.blocks,
                kinds=None if self._ledger is None else self._ledger.kinds_by_client(),
                notes=self._summary_notes(),
                alarm=self._alarm(),
                student=self.use_t,
                parts=self._error_parts(),
            )
        )

    def plot_coefficients(
        self,
        ax: Axes | None = None,
        *,
        conf_level: float = 0.95,
        intercept: bool = False,
        exponentiate: bool = False,
        standardised: bool | Mapping[str, float] = False,
        selected: bool = False,
    ) -> Axes:
        """Coefficients with their intervals, grouped and coloured by institution.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        conf_level : float
        intercept : bool
            Whether to draw it; it is on another scale than the rest as a rule.
        exponentiate : bool
            Draw exponentials on a logarithmic scale, such as odds ratios.
        standardised : bool or mapping of str to float
            Draw effects of one standard deviation of each column: that of the fit, or of the mapping by name
            of the coefficient (a Series, say). One of a level is that of its indicator.
        selected : bool
            Leave out coefficients that are exactly zero.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        NotAvailableError
            The fit did not learn the columns' standard deviations, or was read from a file that lacks them.
        ModelError
            The mapping lacks a coefficient that is drawn.
        """
        frame = self.tidy(conf_level)
        if not intercept:
            frame = frame[frame["name"] != INTERCEPT]
        if selected:
            frame = frame[frame["estimate"] != 0.0]
        title = "Coefficients"
        effect, ratio, ratios = link_words(self._link(), self.estimate.response)
        if standardised is not False:
            frame = per_deviation(frame, self._deviations() if standardised is True else standardised)
            title = "Standardised coefficients"
            effect, ratio = (f"{words}, per standard deviation" for words in (effect, ratio))
        if exponentiate:
            frame = _exponentials(frame.copy())
        return plot_coefficients(
            frame,
            ax=ax,
            title=ratios if exponentiate else title,
            conf_level=conf_level,
            effect=ratio if exponentiate else effect,
            ratios=exponentiate,
        )

    def __repr__(self) -> str:
        est = self.estimate
        state = "" if est.converged else ", NOT CONVERGED"
        return (
            f"<{type(self).__name__}: {est.response}, {len(est.names)} coefficients, "
            f"{est.nobs:,} entities{state}; see .summary()>"
        )

    def _repr_html_(self) -> str:
        return self.summary().as_html()

    # -- hooks of a family -----------------------------------------------------------------------

    def _link(self) -> DistributionSpec | None:
        """Distribution of the response, with the link that coefficients are on."""
        return None

    def _deviations(self) -> pd.Series:
        """Return the standard deviation of each column, by name of its coefficient."""
        raise NotAvailableError(
            "standardised: this fit has no standard deviations of its columns; give them by name of the "
            'coefficient, as standardised={"age": 12.4, ...}'
        )

    def _summary_left(self) -> list[tuple[str, str]]:
        """Labels and values of the estimate."""
        est = self.estimate
        return [
            ("Dep. Variable", est.response),
            ("Model", self.model_name),
            *([("Method", self.method_name)] if self.method_name else []),
            ("No. Observations", f"{est.nobs:,}"),
            ("Df Model", f"{est.df_model:g}"),
            ("R-squared", self._or_dash(lambda: self.rsquared)),
            ("Log-Likelihood", self._or_dash(lambda: self.llf, 2)),
            ("AIC", self._or_dash(lambda: self.aic, 2)),
            ("BIC", self._or_dash(lambda: self.bic, 2)),
            ("Covariance Type", "none" if est.cov is None else est.cov_type or "-"),
            ("Converged", "yes" if est.converged else "NO"),
        ]

    def _summary_right(self) -> list[tuple[str, str]]:
        """Labels and values of the federation."""
        blocks, rows = self.estimate.blocks, []
        rows.append(("Institutions", str(len(self._institutions()))))
        if blocks:
            seen = [block.entities for block in blocks]
            rows.append(("Entities seen", f"{min(seen):,} to {max(seen):,}"))
        return [*rows, *self._account_lines(), ("Privacy spent", self.estimate.privacy)]

    def _account_lines(self) -> list[tuple[str, str]]:
        if self._ledger is None:
            return []
        kinds = dict.fromkeys(kind for row in self._ledger.kinds_by_client().values() for kind in row)
        return [
            ("Rounds", f"{self._ledger.rounds:,}"),
            ("Traffic", human_bytes(self._ledger.bytes)),
            ("Values that left", ", ".join(kinds) or "none"),
        ]

    def _error_parts(self) -> dict[str, Floats]:
        """Parts of the standard errors to print beside them, by heading: (d,) each."""
        return {}

    def _summary_notes(self) -> list[str]:
        """Sentences below the tables."""
        est, setting = self.estimate, getattr(self._ledger, "setting", "")
        notes: list[str] = [setting] if setting else []
        if est.cov is None:
            notes.append("No standard errors, tests and intervals: " + self._reason("cov_params"))
        elif undetermined := [n for n, se in zip(est.names, self.bse, strict=True) if np.isnan(se)]:
            notes.append(
                f"The covariance does not determine a standard error (nan) of: {', '.join(undetermined)}. "
                "Tests and intervals of the other coefficients stand."
            )
        if est.llf is None:
            notes.append("No log-likelihood, AIC and BIC: " + self._reason("llf"))
        # A ledger of another engine may have none: what it lacks is no alarm.
        receipt: ReceiptLike | None = getattr(self._ledger, "receipt", None)
        if receipt is not None and receipt.alarm:
            notes.append(receipt.alarm)
        return notes

    # -- behind the scenes -----------------------------------------------------------------------

    def _alarm(self) -> str:
        if self.converged:
            return ""
        detail = self.estimate.convergence or "the iteration stopped before its tolerance"
        return f"NOT CONVERGED: {detail}; do not interpret these numbers"


def _exponentials(frame: pd.DataFrame) -> pd.DataFrame:
    limits = ["estimate", "conf_low", "conf_high"]
    frame[limits] = np.exp(frame[limits])
    return frame
