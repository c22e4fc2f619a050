"""Models of the FedAvg family: arguments, dry run, and fits."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import statsmodels.genmod.families as sm_families
from numpy.typing import ArrayLike

from fedstat.docstrings import inherits_params
from fedstat.errors import ConvergenceWarning, ModelError, warn
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.federation.message import Request
from fedstat.kernels.glm.fedavg import sampled_site_count
from fedstat.models.checks import check_choice, check_integer, check_masked, checks_arguments
from fedstat.models.explain import DryRunPlan
from fedstat.models.fedavg.protocol import (
    AveragingOptions,
    AveragingRule,
    FedAvgProtocol,
)
from fedstat.models.fedavg.results import FedAvgResults
from fedstat.models.fedavg.steps import FAMILY
from fedstat.models.horizontal.model import HorizontalModel, warn_of_far_sites
from fedstat.models.horizontal.session import RULES_ON_ROWS
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Arguments of federated averaging, checked.


def check_drawn(masked: object, fraction: float, n_sites: int, wanted: bool) -> bool:
    """Whether to mask; an error where a round draws so few sites that their sum would not hide a part."""
    # A mask hides one of the drawn parts; of two parts, each site could compute the other's.
    few = sampled_site_count(n_sites, fraction)
    if few == n_sites or hides(few):
        return check_masked(masked, n_sites, wanted)
    if masked is None:
        return False
    if check_masked(masked, n_sites, wanted):
        raise ModelError(
            f"masked: fraction={fraction:g} draws {few} of {n_sites} sites in a round, whose sum hides them "
            "too little; raise fraction so that three or more are drawn"
        )
    return False


def check_interval(name: str, value: object, interval: str) -> None:
    """Refuse what is not a number in an interval such as ``"[0, 1)"``."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    if isinstance(value, int | float | np.floating | np.integer):
        above = value >= low if interval[0] == "[" else value > low
        if above and (value <= high if interval[-1] == "]" else value < high):
            return
    raise ModelError(f"{name}: expected a number in {interval}, received {value!r}")


def read_init(init: ArrayLike) -> Floats:
    """Read the first coefficients; their number is checked once that of the columns is known."""
    try:
        first = np.asarray(init, dtype=np.float64)
    except (TypeError, ValueError):
        first = np.array(np.nan)
    if first.ndim != 1 or not np.isfinite(first).all():
        raise ModelError("init: expected an array of finite coefficients, one for each design column")
    return first


# ----------------------------------------------------------------------------------------------------
# Dry run of federated averaging.

SHORT = 1e-3
"""Learning rate of the dry run: the descent on synthetic rows must stay finite."""


class FedAvgPlan(DryRunPlan):
    """All shapes are known of a fit of the FedAvg family, and the number of rounds."""

    def arguments(self) -> Mapping[str, Any]:
        """Let sites take one short step a round, from which nothing runs away."""
        return {"local_epochs": 1, "batch_size": None, "learning_rate": SHORT}

    def intended(self, request: Request) -> Request:
        """Return a request with the epochs, batches and learning rate of the fit."""
        given = {"epochs": "local_epochs", "batch_size": "batch_size", "learning_rate": "learning_rate"}
        if request.step != "run_epochs":
            return request
        arrays = {
            name: np.array(self.given[argument] or 0, dtype=request.arrays[name].dtype)
            for name, argument in given.items()
        }
        return replace(request, arrays={**request.arrays, **arrays})

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what the coefficients of a site disclose."""
        returned = [e for e in expected.dry_run.entries if e.step == "run_epochs" and e.sender != COORDINATOR]
        if any(entry.array == "beta" and not entry.masked for entry in returned):
            yield (
                "Coordinator",
                "learns from each site's coefficients and losses, round by round, how its rows pull: the "
                "change over one epoch of full batches is the gradient over its rows alone.",
            )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """Say what is left to chance."""
        yield f"The number of rounds is fixed: {self.given['rounds']:,} of averaging, and some around them."
        if self.given["fraction"] < 1.0:
            more = "; without seed= the fit will draw other ones" if self.given["seed"] is None else ""
            yield f"A share of the sites is drawn in every round{more}."
        yield RULES_ON_ROWS


# ----------------------------------------------------------------------------------------------------
# Models of the FedAvg family: their arguments, checked, and their fits.

SEED_LIMIT = 2**63


class FedAvg(HorizontalModel):
    """Federated averaging: sites descend from common coefficients, and what they reach is averaged.

    In each round a share of the sites is drawn; each runs some epochs of mini-batch gradient descent on its
    mean loss (half the mean deviance; for a logistic model the cross-entropy), and the coordinator averages
    their coefficients, weighted by rows (McMahan et al. 2017, Algorithm 1). It gives an estimate near the
    maximum of the likelihood, without standard errors; :class:`GLORE` and :class:`FederatedGLM` give the
    maximum itself, with standard errors, in a few rounds.

    A site with more rows takes more steps between two averages where batches have one size, and it has more
    weight in them as well: small learning rates then lead to the minimum of a loss in which the rows of a
    site count in proportion to its number of rows (the objective inconsistency of Wang et al. 2020), which
    is the maximum of the likelihood only where sites do not differ. With ``batch_size=None`` and one local
    epoch it is gradient descent on the pooled loss.

    Rows count by their frequency weights and binomial trials, in the losses and in the average. Descent uses
    the columns of the data unless they are standardized. With unmasked sums there is a warning if a column at
    one site is far from that of all others, for instance in other units. Masks hide this here, but not in
    fits of :class:`GLORE`, where sites release means and deviations.

    Make one with :meth:`from_formula`; the family is Binomial unless given.

    References
    ----------
    McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS (2017).

    Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization", NeurIPS (2020).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FedAvg.from_formula("num > 0 ~ age + sex", partition)
    >>> fit = model.fit(rounds=60, standardize=True, batch_size=None, learning_rate=0.5, seed=1)
    >>> fit.params.round(1).to_dict()
    {'Intercept': -4.0, 'age': 0.1, 'sex': 1.4}
    """

    model_name: ClassVar[str] = "FedAvg"
    _goes_on = True
    _plan = FedAvgPlan
    method_name: ClassVar[str] = "federated averaging"
    _default_family: ClassVar[Any] = sm_families.Binomial
    _weightless: ClassVar[tuple[str, ...]] = ("var_weights",)

    @checks_arguments
    def fit(
        self,
        *,
        rounds: int = 100,
        fraction: float = 1.0,
        local_epochs: int = 5,
        batch_size: int | None = 32,
        learning_rate: float = 0.05,
        seed: int | None = 0,
        standardize: bool = False,
        init: ArrayLike | None = None,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> FedAvgResults:
        """Run the rounds, and report the distance of their end from the maximum of the likelihood.

        Parameters
        ----------
        rounds : int
            Rounds of averaging. Some more agree on the columns and start the sites, and two judge the last
            coefficients by score, information and log-likelihood of every site.
        fraction : float
            Share C of the sites that is drawn in each round, all equally likely; one site at least.
        local_epochs : int
            Passes E of a site over its rows in a round.
        batch_size : int or None
            Rows B of a gradient step; None: all rows of the site, one step an epoch. Sites under
            :meth:`Policy.strict` require None: a batch is a sum over few rows.
        learning_rate : float
            Length eta of a step per unit of gradient.
        seed : int or None
            Seed of the whole run, independent of the order of the sites; None draws a seed and keeps it in
            the result.
        standardize : bool
            Whether to descend in columns standardized over all sites; the coefficients are given in the units
            of the data all the same.
        init : array of p numbers, optional
            Coefficients to start from, in the units of the data; by default zeros, which sites under
            :meth:`Policy.strict` require. These also answer each model along one path: a second fit repeats
            learning rate, epochs and options of the first one.
        masked : bool, optional
            Whether sites weight their updates themselves and hide them, and their parts of all sums, by
            pairwise masks that cancel in the total: the coordinator sees no site's update. The estimate is
            the same. By default if at least three sites are drawn in every round, or both of two whose owners
            require masks. Masks cost one round, and `site_loss` needs False.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        FedAvgResults

        Raises
        ------
        ModelError
            An option is out of its range.
        EstimationError
            The descent left the finite numbers or the family's domain, and at which site.
        PolicyError
            A site refuses.

        Warns
        -----
        ConvergenceWarning
            The estimate is further than a standard error from where the algorithm leads.
        UnitsWarning
            Mean or spread of a column at one site is far from those at all others, where sums are in clear.
        """
        return self._run(locals(), AveragingRule())

    def _run(self, given: Mapping[str, Any], rule: AveragingRule) -> FedAvgResults:
        """Fit by a rule, with the arguments of a fit."""
        first, options = None if given["init"] is None else read_init(given["init"]), read_options(given)

        def estimate(model: FedAvg, attempt: FitAttempt) -> FedAvgResults:
            masked = check_drawn(given["masked"], options.fraction, len(model.sites), model._masks_wanted)
            session = model._open_session(FAMILY, masked)
            federation = FedAvgProtocol(session, model.distribution, options, rule, first)
            fit = attempt.run(federation.run(), session.masked_sites)
            warn_of_far_sites(model.agreement, federation.design.names, federation.own)
            result = FedAvgResults._of(model, fit, attempt.ledger)
            if not result.converged:
                reason = result.estimate.convergence
                warn(f"{model.model_name} did not converge: {reason}", ConvergenceWarning)
            return result

        return run_fit(self, Call.of(self.fit, given), estimate)

    def _question(self, offset: str | None, labels: Sequence[str], complete: Sequence[str]) -> RowsRequest:
        if "var_weights" in self.weights:
            raise ModelError(
                f"var_weights: {self.model_name} has no dispersion to divide by them; leave them out, or use "
                "freq_weights for rows that count several times"
            )
        return super()._question(offset, labels, complete)


def read_options(given: Mapping[str, Any]) -> AveragingOptions:
    """Check the arguments that all algorithms share; the error names the argument and its range."""
    check_integer("rounds", given["rounds"], 1)
    check_interval("fraction", given["fraction"], "(0, 1]")
    check_integer("local_epochs", given["local_epochs"], 1)
    if given["batch_size"] is not None:
        check_integer("batch_size", given["batch_size"], 1)
    check_interval("learning_rate", given["learning_rate"], "(0, inf)")
    check_choice("standardize", given["standardize"], (True, False))
    seed = secrets.randbits(32) if given["seed"] is None else given["seed"]
    check_integer("seed", seed, 0)
    if seed >= SEED_LIMIT:
        raise ModelError(f"seed: expected a whole number below 2**63, received {seed!r}")
    return AveragingOptions(
        rounds=int(given["rounds"]),
        fraction=float(given["fraction"]),
        local_epochs=int(given["local_epochs"]),
        batch_size=None if given["batch_size"] is None else int(given["batch_size"]),
        learning_rate=float(given["learning_rate"]),
        seed=int(seed),
        standardize=bool(given["standardize"]),
    )


class FedAvgM(FedAvg):
    """Federated averaging with momentum at the coordinator; see :class:`FedAvg`.

    The averaged update is added to a share of the move before (Hsu et al. 2019, section 4.3), which
    lengthens steps up to ``1 / (1 - momentum)`` times. Li et al. (2024) describe the same in their text
    (A.3); their Algorithm 3 multiplies the update by ``1 - momentum``, which is ``dampening=momentum``, and
    takes steps of the usual length.

    References
    ----------
    Li et al., "Federated learning in healthcare: a benchmark comparison of engineering and statistical
    approaches for structured data analysis", Health Data Science 4 (2024), supplement A.3.

    Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", arXiv:1909.06335 (2019).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FedAvgM.from_formula("num > 0 ~ age + sex", partition)
    >>> fit = model.fit(rounds=60, standardize=True, batch_size=None, learning_rate=0.2, momentum=0.5, seed=1)
    >>> fit.converged, fit.method_name
    (True, 'averaging with momentum')
    """

    model_name: ClassVar[str] = "FedAvgM"
    method_name: ClassVar[str] = "averaging with momentum"

    @checks_arguments
    @inherits_params(FedAvg.fit)
    def fit(
        self,
        *,
        rounds: int = 100,
        fraction: float = 1.0,
        local_epochs: int = 5,
        batch_size: int | None = 32,
        learning_rate: float = 0.05,
        seed: int | None = 0,
        standardize: bool = False,
        init: ArrayLike | None = None,
        masked: bool | None = None,
        progress: bool | None = None,
        momentum: float = 0.9,
        dampening: float = 0.0,
    ) -> FedAvgResults:
        """Run the rounds, and report the distance of their end from the maximum of the likelihood.

        Parameters
        ----------
        rounds, fraction, local_epochs, batch_size, learning_rate, seed, standardize, init, masked, progress
            As in :meth:`FedAvg.fit`.
        momentum : float
            Share of the move before, beta in [0, 1); 0 is FedAvg.
        dampening : float
            Share by which the update is reduced, in [0, 1), as in PyTorch's SGD; equal to `momentum` it is
            Algorithm 3 of Li et al. (2024).

        Returns
        -------
        FedAvgResults
            Errors and warnings are those of :meth:`FedAvg.fit`.
        """
        check_interval("momentum", momentum, "[0, 1)")
        check_interval("dampening", dampening, "[0, 1)")
        return self._run(locals(), AveragingRule(momentum=(float(momentum), float(dampening))))


class QFedAvg(FedAvg):
    """q-FedAvg: sites with a high loss have more weight in the average; see :class:`FedAvg`.

    It minimizes ``sum_k F_k^(q+1) / (q+1)`` over the sites' mean losses F_k (Li et al. 2020, Algorithm 2).
    Each site counts once, with any number of rows: if sites differ, this is not the likelihood. Here sites
    are drawn with equal probability; the publication draws them in proportion to their rows.

    References
    ----------
    Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR (2020).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.QFedAvg.from_formula("num > 0 ~ age + sex", partition)
    >>> fit = model.fit(rounds=60, standardize=True, batch_size=None, learning_rate=0.5, q=0.0, seed=1)
    >>> fit.converged, fit.method_name
    (True, 'averaging for fair losses')
    """

    model_name: ClassVar[str] = "q-FedAvg"
    method_name: ClassVar[str] = "averaging for fair losses"

    @checks_arguments
    @inherits_params(FedAvg.fit)
    def fit(
        self,
        *,
        rounds: int = 100,
        fraction: float = 1.0,
        local_epochs: int = 5,
        batch_size: int | None = 32,
        learning_rate: float = 0.05,
        seed: int | None = 0,
        standardize: bool = False,
        init: ArrayLike | None = None,
        masked: bool | None = None,
        progress: bool | None = None,
        q: float = 0.2,
        lipschitz: float | None = None,
    ) -> FedAvgResults:
        """Run the rounds, and report the distance of their end from the maximum of the likelihood.

        Parameters
        ----------
        rounds, fraction, local_epochs, batch_size, learning_rate, seed, standardize, init, masked, progress
            As in :meth:`FedAvg.fit`.
        q : float
            Fairness, at least 0; 0 is the average over sites, each counted once.
        lipschitz : float, optional
            Estimate L of the Lipschitz constant of the gradients; by default one over the learning rate, as
            in the publication.

        Returns
        -------
        FedAvgResults
            Errors and warnings are those of :meth:`FedAvg.fit`.
        """
        check_interval("q", q, "[0, inf)")
        check_interval("learning_rate", learning_rate, "(0, inf)")
        constant = 1.0 / learning_rate if lipschitz is None else lipschitz
        check_interval("lipschitz", constant, "(0, inf)")
        return self._run(locals(), AveragingRule(fair=(float(q), float(constant))))


class FedProx(FedAvg):
    """FedProx: a site's descent is held near the common coefficients; see :class:`FedAvg`.

    Each site minimizes ``F_k(w) + mu/2 ||w - beta||^2``, and may stop once the gradient of that is gamma
    times the first gradient of F_k (Li et al. 2020, Algorithm 2, Definition 2). The distance is that in the
    columns of the algorithm. Here sites are drawn with equal probability and averaged by rows, as in FedAvg;
    the publication draws them in proportion to their rows and averages without weights
    (``average="sites"``). If all sites are drawn, that minimizes the sum of F_k, not the likelihood.

    References
    ----------
    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
    MLSys (2020).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FedProx.from_formula("num > 0 ~ age + sex", partition)
    >>> fit = model.fit(rounds=60, standardize=True, batch_size=None, learning_rate=0.5, mu=0.01, seed=1)
    >>> fit.converged, fit.method_name
    (True, 'proximal averaging')
    """

    model_name: ClassVar[str] = "FedProx"
    method_name: ClassVar[str] = "proximal averaging"

    @checks_arguments
    @inherits_params(FedAvg.fit)
    def fit(
        self,
        *,
        rounds: int = 100,
        fraction: float = 1.0,
        local_epochs: int = 5,
        batch_size: int | None = 32,
        learning_rate: float = 0.05,
        seed: int | None = 0,
        standardize: bool = False,
        init: ArrayLike | None = None,
        masked: bool | None = None,
        progress: bool | None = None,
        mu: float = 0.1,
        gamma: float = 0.0,
        average: Literal["rows", "sites"] = "rows",
    ) -> FedAvgResults:
        """Run the rounds, and report the distance of their end from the maximum of the likelihood.

        Parameters
        ----------
        rounds, fraction, local_epochs, batch_size, learning_rate, seed, standardize, init, masked, progress
            As in :meth:`FedAvg.fit`.
        mu : float
            Weight of the proximal term, at least 0; with mu = gamma = 0 it is FedAvg.
        gamma : float
            Inexactness at which a site may stop before its last epoch, in [0, 1); 0: it runs all epochs.
        average : {"rows", "sites"}
            Weights of sites in the average: their rows, or each once, as printed.

        Returns
        -------
        FedAvgResults
            Errors and warnings are those of :meth:`FedAvg.fit`.
        """
        check_interval("mu", mu, "[0, inf)")
        check_interval("gamma", gamma, "[0, 1)")
        if average not in ("rows", "sites"):
            raise ModelError(f"average: expected 'rows' or 'sites', received {average!r}")
        once = average == "sites"
        return self._run(locals(), AveragingRule(proximal=(float(mu), float(gamma)), each_once=once))
