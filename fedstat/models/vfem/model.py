"""The user's side of VFEM: arguments in, results out."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from fedstat.errors import ConvergenceWarning, ModelError
from fedstat.federation.engine import Rounds
from fedstat.federation.formula import Formula
from fedstat.federation.ledger import Ledger
from fedstat.models.base import VerticalModel
from fedstat.models.checks import check_choice, check_positive, check_whole
from fedstat.models.vfem.covariance_protocol import Covariance, information_covariance
from fedstat.models.vfem.cross_products import CrossOptions
from fedstat.models.vfem.layout import Layout, make_layout
from fedstat.models.vfem.moments_covariance import moments_covariance
from fedstat.models.vfem.moments_fit import MomentsFit, fit_moments
from fedstat.models.vfem.moments_protocol import Exchange, exchange_moments
from fedstat.models.vfem.progress import Progress
from fedstat.models.vfem.protocol import FAMILY, SMALLEST_MEMORY, Ascent, Fit, Options, ask, climb, estimate
from fedstat.models.vfem.results import Outcome, VFEMResults
from fedstat.models.vfem.sem_protocol import sem_covariance
from fedstat.typing import Array, Floats

Method: TypeAlias = Literal["vfem", "cc", "impute", "single"]
CovType: TypeAlias = Literal["observed", "expected", "sem", "robust", "none"]
Init: TypeAlias = "Literal['zero', 'cc', 'impute'] | Sequence[float] | Mapping[str, float] | Floats"

INIT_TOLERANCE = 1e-4


class VFEMRegression(VerticalModel):
    """Linear regression with client-wise missing blocks.

    Clients hold different columns of the same entities, and an entity that a client never saw lacks
    that client's whole block. The model is y = beta0 + sum_k x_k'beta_k + eps with normal errors and blocks
    x_k ~ N(mu_k, Sigma_k) that are independent of each other; estimates maximise the likelihood of what
    is observed, and are valid when missingness depends on observed values only (MAR). With one client and
    nothing missing they are those of ordinary least squares.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    **kwargs
        As in :meth:`from_formula`.

    Raises
    ------
    ModelError
        The formula leaves out the intercept: blocks are centred at their means here.

    References
    ----------
    Tang, Wang, Feng and Li, "Enterprise profit prediction using multiple data sources with missing
    values through vertical federated learning" (TWFL).
    """

    family: ClassVar[str] = FAMILY

    def __init__(self, formula: Formula, partition: Any, **kwargs: Any) -> None:
        if not formula.intercept:
            raise ModelError(
                f"'{formula.text}' leaves out the intercept; VFEM centres every block at its mean and "
                "has one: drop '- 1' or '0 +'"
            )
        super().__init__(formula, partition, **kwargs)

    def fit(
        self,
        *,
        method: Method = "vfem",
        cov_type: CovType = "observed",
        exchange: Literal["iterative", "moments"] = "iterative",
        cross_products: Literal["sketch", "exact"] = "sketch",
        sketch: Literal["structured", "gaussian"] = "structured",
        sketch_size: int = 20_000,
        step: Literal["gradient", "local-newton"] = "local-newton",
        acceleration: Literal["anderson"] | None = "anderson",
        memory: int = 8,
        learning_rate: float | None = None,
        init: Init = "zero",
        maxiter: int = 5000,
        tol_score: float = 1e-8,
        tol_change: float = 1e-6,
        progress: bool = False,
    ) -> VFEMResults:
        """Maximise the likelihood of the observed data.

        Parameters
        ----------
        method : {"vfem", "cc", "impute", "single"}
            All entities; those that every client has; all, with the client's mean in the place of a
            missing block; or the columns of the response holder alone.
        cov_type : {"observed", "expected", "sem", "robust", "none"}
            Inverse observed information; the same with cross-products between clients at their
            expectation, zero, so that none are asked for (needs missingness completely at random);
            supplemented EM; sandwich; or none. All but "none" account for the estimated means,
            covariances and residual variance.
        exchange : {"iterative", "moments"}
            What passes between the institutions. "iterative": linear predictors and residuals of every
            entity, in every round. "moments": sums of products of the columns by missing pattern, once,
            products of two institutions' columns by secure multiplication; nothing per entity leaves, and the
            estimates are the same. Patterns with fewer entities than the partition's `min_count` are not
            released: these entities count as missing at an institution that has them. Arguments about
            cross-products, steps and first points have no meaning then, and "robust" is not possible.
        cross_products : {"sketch", "exact"}
            Where products of two clients' columns come from: random projections that the clients draw
            from a seed they share, or a plain exchange of columns, which discloses them.
        sketch : {"structured", "gaussian"}
            Kind of projection.
        sketch_size : int
            Its rows; the relative error of a product is about sqrt(2 / rows).
        step : {"gradient", "local-newton"}
            M-step for the coefficients: TWFL (8), or Newton's with the client's own covariance.
        acceleration : {"anderson", None}
            Mix the last `memory` steps (Anderson 1965), falling back to plain steps where the
            likelihood would fall.
        memory : int
            Steps that are mixed, two or more.
        learning_rate : float, optional
            Of step="gradient"; by default 2 / (largest + smallest eigenvalue of the local covariances).
        init : {"zero", "cc", "impute"} or array or mapping
            First coefficients: zero, those of another method, or given (in the order of
            :attr:`param_names` without the intercept, or by name).
        maxiter : int
            Largest number of iterations.
        tol_score : float
            Stop when the score, in the complete-data information and per root of entities, is below.
        tol_change : float
            and no parameter, of standardised columns, moved by more.
        progress : bool
            Print iteration, log-likelihood, score and the time left to standard error.

        Returns
        -------
        VFEMResults

        Raises
        ------
        ModelError
            An argument has no meaning here.
        EstimationError
            The entities of the method do not determine the estimate.
        PolicyError
            An institution refuses a release.

        Warns
        -----
        ConvergenceWarning
            The iteration stopped before its tolerances.
        """
        check_choice("method", method, get_args(Method))
        check_choice("cov_type", cov_type, get_args(CovType))
        check_choice("exchange", exchange, ("iterative", "moments"))
        if exchange == "moments" and not (isinstance(init, str) and init == "zero"):
            raise ModelError("init: exchange='moments' finds the maximum from its own start")
        check_choice("cross_products", cross_products, ("sketch", "exact"))
        check_choice("sketch", sketch, ("structured", "gaussian"))
        check_choice("step", step, ("gradient", "local-newton"))
        check_choice("acceleration", acceleration, ("anderson", None))
        check_whole("sketch_size", sketch_size, 1)
        check_whole("memory", memory, SMALLEST_MEMORY)
        check_whole("maxiter", maxiter, 1)
        check_positive("tol_score", tol_score)
        check_positive("tol_change", tol_change)
        if learning_rate is not None:
            check_positive("learning_rate", learning_rate)
        options = Options(step, acceleration, memory, learning_rate, maxiter, tol_score, tol_change)
        cross = CrossOptions("none" if cov_type == "expected" else cross_products, sketch, sketch_size)
        layout = make_layout(self.design, self.partition.rows[self.design.active], method)
        ledger = copy.deepcopy(self._agreement)
        reporter = Progress(options, sys.stderr) if progress else None
        released: Exchange | None = None
        found: MomentsFit | None = None
        if exchange == "moments":
            found, covariance, released = self.engine.run(
                self._from_moments(layout, cov_type, ledger), ledger
            )
            fit = found.by_client()
            fitted: Mapping[str, Array] = {}
        else:
            protocol = self._protocol(layout, options, cross, cov_type, init, ledger, reporter)
            fit, covariance, fitted = self.engine.run(protocol, ledger)
        if reporter is not None:
            reporter.close()
        outcome = Outcome(
            method, cov_type, options, fit, covariance, fitted, init_name(init), released, found
        )
        result = VFEMResults.of(self, layout, outcome, ledger)
        if not fit.converged:
            warnings.warn(
                f"VFEM did not converge: {fit.reason} ({len(fit.trace)} iterations, relative score "
                f"{fit.trace[-1].score:.1e}); raise maxiter or loosen the tolerances",
                ConvergenceWarning,
                stacklevel=2,
            )
        return result

    @property
    def param_names(self) -> list[str]:
        """Names of the coefficients, the intercept first, then by client."""
        return ["Intercept", *[name for block in self.design.blocks for name in block.names]]

    def _protocol(
        self,
        layout: Layout,
        options: Options,
        cross: CrossOptions,
        cov_type: CovType,
        init: Init,
        ledger: Ledger,
        reporter: Progress | None,
    ) -> Rounds[tuple[Fit, Covariance | None, Mapping[str, Array]]]:
        beta = yield from self._first_point(layout, options, init)
        ascent = Ascent(layout, options, self._session, reporter)
        yield from ascent.start(beta)
        yield from climb(ascent)
        fit = yield from estimate(ascent)
        names = {block.client: block.names for block in self.design.blocks}
        fitted: Mapping[str, Array] = {}
        if ledger.at == layout.active:
            (reply,) = yield [ask(layout.active, "fitted", self._session)]
            fitted = reply.arrays
        covariance = None
        if cov_type == "sem":
            covariance = yield from sem_covariance(ascent, cross, fit.a, fit.s2)
        elif cov_type != "none":
            covariance = yield from information_covariance(ascent, cross, names, cov_type == "robust")
        return fit, covariance, fitted

    def _from_moments(
        self, layout: Layout, cov_type: CovType, ledger: Ledger
    ) -> Rounds[tuple[MomentsFit, Covariance | None, Exchange]]:
        names = {block.client: block.names for block in self.design.blocks}
        exchange = yield from exchange_moments(
            layout, names, self._session, ledger.at, self.partition.min_count
        )
        found = fit_moments(exchange.moments)
        covariance = None if cov_type == "none" else moments_covariance(found, cov_type)
        return found, covariance, exchange

    def _first_point(
        self, layout: Layout, options: Options, init: Init
    ) -> Rounds[Mapping[str, Floats] | None]:
        if isinstance(init, str):
            check_choice("init", init, ("zero", "cc", "impute"))
            if init == "zero":
                return None
            rows = self.partition.rows[self.design.active]
            ascent = Ascent(
                make_layout(self.design, rows, init),
                Options(maxiter=options.maxiter, tol_score=INIT_TOLERANCE, tol_change=np.inf),
                self._session,
            )
            yield from ascent.start(None)
            yield from climb(ascent)
            return (yield from estimate(ascent)).beta
        return self._given_point(init)

    def _given_point(self, init: Sequence[float] | Mapping[str, float] | Floats) -> Mapping[str, Floats]:
        names = self.param_names[1:]
        if isinstance(init, Mapping):
            lacking = [name for name in names if name not in init]
            if lacking:
                raise ModelError(f"init: no value for {', '.join(lacking)}")
            init = [init[name] for name in names]
        values = np.asarray(init, dtype=float)
        if values.shape != (len(names),) or not np.isfinite(values).all():
            raise ModelError(
                f"init: expected {len(names)} finite coefficients (without the intercept), "
                f"received an array of shape {values.shape}"
            )
        out, at = {}, 0
        for block in self.design.blocks:
            out[block.client] = values[at : at + len(block.names)]
            at += len(block.names)
        return out


def init_name(init: Init) -> str:
    """How the first point is called in a summary."""
    return init if isinstance(init, str) else "given"
