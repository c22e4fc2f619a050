"""Results of federated averaging: estimates, how far they are from the maximum, and no more."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_rows import RowsAgreement
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import Estimate
from fedstat.inference.plots import plot_loss
from fedstat.inference.results import FederatedResults
from fedstat.inference.summary import ClientBlock
from fedstat.inference.tables import number
from fedstat.models.fedavg.protocol import FedAvgFit
from fedstat.models.fedavg.rules import Fair
from fedstat.models.horizontal.evaluation import RowEvaluation
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.prediction import predict_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR = 1.0
"""Standard errors within which an estimate counts as converged: half the width of a 95 % interval is 2."""

NO_ERROR = (
    "federated averaging gives an estimate without a standard error: it stops after a fixed number of rounds "
    "at a point that is not the maximum of the likelihood; use GLORE (FederatedGLM for any family) for one"
)
NO_MAXIMUM = "the log-likelihood of {} is not a maximum"
LABELS = {"momentum": "Momentum", "q": "q", "lipschitz": "Lipschitz", "mu": "mu", "gamma": "gamma"}


class FedAvgResults(RowEvaluation, FederatedResults):
    """Results of :meth:`fedstat.FedAvg.fit` and its relatives: coefficients without standard errors.

    A fixed number of rounds has no tolerance to reach. Score and information of all sites at the last
    coefficients tell how far the maximum is: Newton's step, in standard errors of the maximum-likelihood
    estimate. ``converged`` is True where it is at most one in every coefficient; for q-FedAvg the step is
    that towards the minimum of its own criterion.

    Attributes
    ----------
    family : statsmodels family
    seed : int
        Seed of the run; with it the run repeats number for number.
    fit_ : FedAvgFit
        Sums over sites at the estimate.
    """

    def __init__(
        self, estimate: Estimate, ledger: Ledger | None, fit: FedAvgFit, model: HorizontalModel
    ) -> None:
        super().__init__(estimate, ledger)
        self.fit_, self.model = fit, model
        self.family, self.distribution = model.family, model.distribution
        self.model_name, self.method_name = model.model_name, model.method_name
        self.seed = fit.options.seed

    @classmethod
    def of(cls, model: HorizontalModel, fit: FedAvgFit, ledger: Ledger) -> FedAvgResults:
        """Make results of a fit."""
        design = fit.design
        converged, text = _convergence(fit)
        estimate = Estimate(
            params=fit.params,
            cov=None,
            names=design.names,
            clients=("",) * len(design.names),
            terms=design.term_names,
            response=model.formula.response,
            nobs=int(design.n.sum()),
            df_model=float(len(design.names) - design.intercept),
            converged=converged,
            convergence=text,
            llf=None if np.isnan(fit.llf) else fit.llf,
            scale=fit.dispersion,
            llf_is_maximum=False,
            privacy="none (no noise is added)",
            blocks=tuple(
                ClientBlock(row.site, len(design.names), row.n, 1.0 - row.n / row.n_rows)
                for row in model.agreement.sites
            ),
            reasons={
                "cov_params": NO_ERROR,
                "llf": "the family does not define a log-likelihood here",
                "rsquared": "a GLM has none",
            },
        )
        return cls(estimate, ledger, fit, model)

    # -- statements ------------------------------------------------------------------------------

    @property
    def distance(self) -> pd.Series:
        """Newton's step from the estimate to the maximum of the likelihood, in standard errors, by name.

        To first order, and so the more exact the nearer; infinite where the information is singular.
        """
        return self._series(self.fit_.distance)

    @property
    def deviance(self) -> float:
        """Deviance at the estimate."""
        return float(self.fit_.sums.totals[1])

    @property
    def pearson_chi2(self) -> float:
        """Sum of squared Pearson residuals."""
        return float(self.fit_.sums.totals[2])

    @property
    def df_resid(self) -> float:
        """Sum of the frequency weights less the number of coefficients."""
        return self.fit_.weight - len(self.estimate.names)

    @property
    def site_loss(self) -> pd.Series:
        """Mean loss (half the mean deviance) of every site at the estimate.

        Raises
        ------
        NotAvailableError
            Sums were masked.
        """
        if self.fit_.sums.losses is None:
            raise NotAvailableError(
                "no loss by site: the sums were masked, so that only that of all sites is known; use "
                "fit(masked=False), or evaluate() for calibration by site"
            )
        return pd.Series(self.fit_.sums.losses, index=list(self.model.sites), name="loss")

    @property
    def aic(self) -> float:
        """Not available: the likelihood is not at its maximum."""
        self._refuse("AIC")

    @property
    def bic(self) -> float:
        """Not available: the likelihood is not at its maximum."""
        self._refuse("BIC")

    def compare_lr_test(self, restricted: FederatedResults) -> NoReturn:
        """Not available: the likelihood is not at its maximum."""
        self._refuse("likelihood ratio test")

    def _refuse(self, what: str) -> NoReturn:
        raise NotAvailableError(f"no {what}: {NO_MAXIMUM.format(self.model_name)}")

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, frame: pd.DataFrame, which: Literal["mean", "linear"] = "mean") -> pd.Series:
        """Predict for rows that the caller holds.

        Parameters
        ----------
        frame : DataFrame
            With the columns of the model; rows that lack one give NaN.
        which : {"mean", "linear"}

        Returns
        -------
        Series
        """
        eta = predict_rows(self.model.agreement, self.fit_.design, self.estimate.params, frame).linear
        return eta if which == "linear" else eta.map(self.family.link.inverse)

    def _agreed(self) -> tuple[RowsAgreement, ClientPartition | None]:
        return self.model.agreement, self.model.partition

    # -- trace -----------------------------------------------------------------------------------

    @property
    def trace(self) -> pd.DataFrame:
        """Mean loss after each round.

        Returns
        -------
        DataFrame
            Index ``round``, 0 before the first; ``loss``, weighted by rows over the sites that were drawn
            for the next round (over all after the last), and ``clients``, their number.
        """
        return pd.DataFrame([asdict(row) for row in self.fit_.trace]).set_index("round")

    def plot_trace(self, ax: Axes | None = None) -> Axes:
        """Mean loss by round.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ImportError
            matplotlib is not installed.
        """
        return plot_loss(self.trace, self.model_name, ax)

    # -- summary ---------------------------------------------------------------------------------

    def _summary_left(self) -> list[tuple[str, str]]:
        spec = self.distribution
        dropped = ("R-squared", "AIC", "BIC", "Covariance Type")
        rows = [row for row in super()._summary_left() if row[0] not in dropped]
        at = next(i for i, (label, _) in enumerate(rows) if label == "No. Observations")
        rows[at:at] = [("Model Family", spec.name), ("Link Function", spec.link)]
        return [*rows[:-1], ("Deviance", number(self.deviance)), ("Seed", str(self.seed)), rows[-1]]

    def _summary_right(self) -> list[tuple[str, str]]:
        options, rows = self.fit_.options, super()._summary_right()
        return [
            *rows[:-1],
            ("Averaging Rounds", f"{options.rounds:,}"),
            ("Sums", f"masked over {len(self.model.sites)} sites" if self.fit_.masked else "in clear"),
            ("Fraction", f"{options.fraction:g}"),
            ("Local Epochs", f"{options.local_epochs:,}"),
            ("Batch Size", "whole site" if options.batch_size is None else f"{options.batch_size:,}"),
            ("Learning Rate", f"{options.learning_rate:g}"),
            *((LABELS[name], f"{value:g}") for name, value in self.fit_.rule.options.items()),
            ("Standardized", "yes" if options.standardize else "no"),
            rows[-1],
        ]

    def _alarm(self) -> str:
        return super()._alarm() or "POINT ESTIMATES ONLY"

    def _summary_notes(self) -> list[str]:
        notes = [*super()._summary_notes(), *_distance_notes(self.model_name, self.fit_)]
        if self.fit_.masked:
            notes.append(
                f"Updates and sums were masked over {len(self.model.sites)} sites: the coordinator saw what "
                "all add up to, and no site's part. This holds if coordinator and sites follow the protocol; "
                "the coordinator and some sites together learn the sum over the others."
            )
        if self.estimate.llf is not None:
            notes.append("The log-likelihood is that of these coefficients, not a maximum: no AIC, no BIC.")
        dropped = sum(row.n_rows - row.n for row in self.model.agreement.sites)
        if dropped:
            notes.append(f"{dropped:,} rows that lack one of the model's columns were left out.")
        return notes


def _convergence(fit: FedAvgFit) -> tuple[bool, str]:
    """Whether the estimate is near enough to where its algorithm leads, and what to say of it."""
    worst = float(np.abs(fit.to_go).max())
    fair = isinstance(fit.rule, Fair)
    goal = "the minimum of its own criterion" if fair else "the maximum-likelihood estimate"
    rounds = fit.options.rounds
    after = f"after {rounds:,} round{'s' if rounds > 1 else ''}"
    if worst <= NEAR:
        return True, f"{after} every coefficient is within {_size(worst)} standard errors of {goal}"
    if np.isinf(worst):
        problem = "the information is singular, far from any maximum or by collinear columns"
    else:
        name = fit.design.names[int(np.abs(fit.to_go).argmax())]
        problem = f"'{name}' is about {_size(worst)} standard errors from {goal}"
    return False, f"{after} {problem}; {_remedy(fit)}"


def _remedy(fit: FedAvgFit) -> str:
    last = [] if fit.options.standardize else ["standardize=True"]
    if fit.trace[-1].loss > fit.trace[0].loss:
        return f"the loss has risen: use {' or '.join(['a smaller learning_rate', *last])}"
    return f"use {' or '.join(['more rounds', 'a smaller learning_rate', *last])}"


def _size(value: float) -> str:
    if value >= 10.0:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def _distance_notes(name: str, fit: FedAvgFit) -> list[str]:
    distance = np.abs(fit.distance)
    notes = []
    if np.isfinite(distance).all():
        worst = fit.design.names[int(distance.argmax())]
        notes.append(
            f"Distance to the maximum-likelihood estimate, by Newton's step from all sites' score: about "
            f"{_size(distance.max())} standard errors in '{worst}', the largest."
        )
    if isinstance(fit.rule, Fair):
        notes.append(
            f"{name} minimises the sum over sites of F^(q+1) / (q+1), F a site's mean loss: sites count "
            "alike, whatever their rows, and those with a high loss more. It leads to the maximum of the "
            "likelihood only where sites do not differ."
        )
    return notes
