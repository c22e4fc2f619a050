"""Results of federated averaging: estimates and their distance from the maximum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import plot_loss
from fedstat.inference.tables import number, two_digits, yes_or_no
from fedstat.models.fedavg.protocol import FedAvgFit, unbounded
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import MASKED
from fedstat.models.horizontal.results import RowsBasis, RowsRecord, RowsResults, rows_estimate
from fedstat.models.results import CoefficientResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR = 1.0
"""Standard errors within which an estimate counts as converged: half the width of a 95 % interval is 2."""

NO_ERROR = (
    "federated averaging gives an estimate without a standard error: it stops after a fixed number of rounds "
    "at a point that is not the maximum of the likelihood; use GLORE (FederatedGLM for any family) for one"
)
NO_MAXIMUM = "the log-likelihood of {} is not a maximum"
LABELS = {
    "momentum": "Momentum",
    "dampening": "Dampening",
    "q": "q",
    "lipschitz": "Lipschitz",
    "mu": "mu",
    "gamma": "gamma",
}
NOTES = Catalogue(
    critical={
        "point_estimates": "POINT ESTIMATES ONLY",
    },
    info={
        "no_maximum": "The log-likelihood is that of these coefficients, not a maximum: no AIC, no BIC.",
        "left_out": "{n:,} rows that lack one of the model's columns were left out.",
        "distance": "Distance to the maximum-likelihood estimate, by Newton's step from all sites' score: "
        "about {size} standard errors in '{term}', the largest.",
        "fair_criterion": "{model} minimizes the sum over sites of F^(q+1) / (q+1), where F is a site's "
        "mean loss: sites count equally, with any number of rows, and those with a high loss count more. It "
        "leads to the maximum of the likelihood only if sites do not differ.",
        "equal_average": "{model} averages sites with equal weights: if all of them take part in each "
        "round, it minimizes the sum of their mean losses, and leads to the maximum of the likelihood only "
        "if sites have as many rows or do not differ.",
    },
    protocol={
        "masked": f"Updates and sums were masked over {{sites}} sites: {MASKED.format('')}",
        "different_draws": "Rounds drew different sites: where coefficients hardly move any more, sums of "
        "rounds that differ by one site come near to that site's part. With fraction=1 none do.",
    },
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FedAvgRecord(RowsRecord):
    """What a file of results holds."""

    fit: FedAvgFit

    def check(self) -> None:
        """Require parts of one fit; their shapes are checked before."""
        agreed, losses = self.basis.agreement, self.fit.sums.losses
        together = (
            self.estimate.names == self.fit.design.names
            and len(agreed.sites) == len(self.fit.design.n)
            and (agreed.question.terms, agreed.question.columns) == (agreed.spec.terms, agreed.spec.columns)
            and (losses is None) == self.fit.masked
        )
        if not (together and self.fit.trace):
            raise ModelError("coefficients, sites, columns and sums are not of one fit")


class FedAvgResults(RowsResults, saved_as="fedstat fedavg results 5", record=FedAvgRecord):
    """Results of :meth:`fedstat.FedAvg.fit` and its relatives: coefficients without standard errors.

    A fixed number of rounds has no tolerance to reach. Score and information of all sites at the last
    coefficients give the distance from the maximum: Newton's step, in standard errors of the
    maximum-likelihood estimate. ``converged`` is True if it is at most one in every coefficient, and no
    coefficient goes to infinity, as with separated outcomes. For q-FedAvg the step is that towards the
    minimum of its own criterion.

    Attributes
    ----------
    family : statsmodels family
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FedAvg.from_formula("num > 0 ~ age + sex", partition)
    >>> learning = {"standardize": True, "batch_size": None, "learning_rate": 0.5, "seed": 1}
    >>> fit = model.fit(rounds=60, masked=False, **learning)
    >>> fit.seed, len(fit.trace), fit.distance.index.tolist(), fit.site_loss.index.tolist()[:2]
    (1, 61, ['Intercept', 'age', 'sex'], ['Cleveland', 'Hungary'])
    >>> bool(fit.plot_trace().has_data())
    True
    >>> try:
    ...     fit.compare_lr_test(fit)
    ... except fs.errors.NotAvailableError as error:
    ...     print(type(error).__name__)
    NotAvailableError
    """

    _record: FedAvgRecord

    @property
    def _fit(self) -> FedAvgFit:
        return self._record.fit

    @property
    def seed(self) -> int:
        """Seed of the run; with it the run repeats number for number."""
        return self._fit.options.seed

    @classmethod
    def _of(cls, model: HorizontalModel, fit: FedAvgFit, ledger: Ledger) -> FedAvgResults:
        """Make results of a fit."""
        converged, text = _convergence(fit)
        estimate = rows_estimate(
            model,
            fit.design,
            params=fit.params,
            cov=None,
            converged=converged,
            convergence=text,
            llf=fit.llf,
            scale=fit.dispersion,
            llf_is_maximum=False,
            reasons={"cov_params": NO_ERROR, "rsquared": "a GLM has none"},
        )
        return cls(FedAvgRecord(estimate=estimate, fit=fit, basis=RowsBasis.of(model)), ledger, model)

    # -- statements ------------------------------------------------------------------------------

    @property
    def distance(self) -> pd.Series:
        """Newton's step from the estimate to the maximum of the likelihood, in standard errors, by name.

        To first order, and so the more exact the nearer; infinite where the information is singular.
        """
        return self._series(self._fit.distance)

    @property
    def site_loss(self) -> pd.Series:
        """Mean loss (half the mean deviance) of every site at the estimate.

        Raises
        ------
        NotAvailableError
            Sums were masked.
        """
        if self._fit.sums.losses is None:
            raise NotAvailableError(
                "no loss by site: the sums were masked, so that only that of all sites is known",
                remedy=Remedy(
                    "fit(..., masked=False)", "use fit({arguments}), or evaluate() for calibration by site"
                ),
            )
        return pd.Series(
            self._fit.sums.losses, index=[row.site for row in self.basis.agreement.sites], name="loss"
        )

    @property
    def aic(self) -> float:
        """Not available: the likelihood is not at its maximum."""
        self._refuse("AIC")

    @property
    def bic(self) -> float:
        """Not available: the likelihood is not at its maximum."""
        self._refuse("BIC")

    def compare_lr_test(self, restricted: CoefficientResults) -> NoReturn:
        """Not available: the likelihood is not at its maximum."""
        self._refuse("likelihood ratio test")

    def _refuse(self, what: str) -> NoReturn:
        raise NotAvailableError(f"no {what}: {NO_MAXIMUM.format(self.model_name)}")

    # -- trace -----------------------------------------------------------------------------------

    @property
    def trace(self) -> pd.DataFrame:
        """Mean loss after each round; index ``round``, 0 before the first.

        ``loss`` is weighted by rows over the sites that were drawn for the next round (over all after the
        last), and ``sites`` are their number.
        """
        return pd.DataFrame([asdict(row) for row in self._fit.trace]).set_index("round")

    def plot_trace(self, ax: Axes | None = None) -> Axes:
        """Mean loss by round, drawn on `ax` or in a new figure; needs matplotlib."""
        return plot_loss(self.trace, self.model_name, ax)

    # -- summary ---------------------------------------------------------------------------------

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Method", "method_name", ""),
        ("Model Family", "distribution.name", ""),
        ("Link Function", "distribution.link", ""),
        ("No. Observations", "nobs", ",d"),
        ("Df Model", "estimate.df_model", "g"),
        ("Log-Likelihood", "llf", two_digits),
        ("Deviance", "deviance", number),
        ("Seed", "seed", ""),
        ("Converged", "converged", yes_or_no),
    )

    def _summary_right(self) -> list[tuple[str, str]]:
        options, rows = self._fit.options, super()._summary_right()
        return [
            *rows[:-1],
            ("Averaging Rounds", f"{options.rounds:,}"),
            ("Sums", f"masked over {len(self.estimate.blocks)} sites" if self._fit.masked else "unmasked"),
            ("Fraction", f"{options.fraction:g}"),
            ("Local Epochs", f"{options.local_epochs:,}"),
            ("Batch Size", "whole site" if options.batch_size is None else f"{options.batch_size:,}"),
            ("Learning Rate", f"{options.learning_rate:g}"),
            *((LABELS[name], f"{value:g}") for name, value in self._fit.rule.options.items()),
            *([("Average", "each site once")] if self._fit.rule.each_once else []),
            ("Standardized", "yes" if options.standardize else "no"),
            rows[-1],
        ]

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        if self.converged:
            yield NOTES.note("point_estimates")
        yield from self.basis.repeated_note
        yield from _distance_notes(self.model_name, self._fit)
        if self._fit.masked:
            yield NOTES.note("masked", sites=len(self.estimate.blocks))
        if self._fit.masked and self._fit.options.fraction < 1.0:
            yield NOTES.note("different_draws")
        if self.estimate.llf is not None:
            yield NOTES.note("no_maximum")
        if self.basis.agreement.question.subset:
            yield from self._left_out_note()
        elif left_out := self.basis.left_out:
            yield NOTES.note("left_out", n=left_out)


def _convergence(fit: FedAvgFit) -> tuple[bool, str]:
    """Whether the estimate is near enough to where its algorithm leads, and what to say of it."""
    worst = float(np.abs(fit.to_go).max())
    own = fit.rule.own_criterion
    goal = "the minimum of its own criterion" if own else "the maximum-likelihood estimate"
    rounds = fit.options.rounds
    after = f"after {rounds:,} round{'s' if rounds > 1 else ''}"
    if worst <= NEAR and (grown := unbounded(fit)):
        named = ", ".join(map(repr, grown))
        which = (
            f"coefficient of {named} still grows"
            if len(grown) == 1
            else f"coefficients of {named} still grow"
        )
        return False, (
            f"{after} the {which}, with little information left: columns may separate the outcomes, and the "
            "estimate would be infinite; fit FederatedGLM, which decides, or use more rounds"
        )
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


def _distance_notes(name: str, fit: FedAvgFit) -> Iterator[Note]:
    distance = np.abs(fit.distance)
    if np.isfinite(distance).all():
        worst = fit.design.names[int(distance.argmax())]
        yield NOTES.note("distance", size=_size(distance.max()), term=worst)
    if fit.rule.fair is not None:
        yield NOTES.note("fair_criterion", model=name)
    if fit.rule.each_once:
        yield NOTES.note("equal_average", model=name)
