"""The user interface of VFEM for a normal response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, get_args, overload

import numpy as np

from fedstat.docstrings import inherits_params
from fedstat.errors import ModelError
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.glm.distributions import DistributionSpec, Family
from fedstat.models.checks import check_choice, check_share, check_whole
from fedstat.models.vertical.exchange.patterns import SmallPatterns, exchange_patterns
from fedstat.models.vertical.joint_normal.assumption_tests import warn_of_dependence
from fedstat.models.vertical.joint_normal.sparse_pairs import Between
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.base_model import (
    CrossSource,
    InitialValues,
    IterativeOptions,
    SketchKind,
    VFEMMethod,
    VFEMModel,
    check_variances,
    check_weights,
    refuse_iterative,
)
from fedstat.models.vfem.corrections import Correction, apply_correction, check_correction
from fedstat.models.vfem.covariance.cross_products import product_session
from fedstat.models.vfem.covariance.from_moments import (
    CovType,
    MomentsOptions,
    check_cov_type,
    estimate_from_moments,
)
from fedstat.models.vfem.explain import VFEMPlan
from fedstat.models.vfem.glm_model import VFEMGLM
from fedstat.models.vfem.iteration.distributions import NORMAL
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.models.vfem.iteration.state import SMALLEST_MEMORY, IterationOptions, Progress, fit_by_site
from fedstat.models.vfem.outcome import SessionArtifacts, VFEMOutcome, warn_unless_converged
from fedstat.models.vfem.protocol import IterativeResult, fit_normal
from fedstat.models.vfem.results import VFEMResults
from fedstat.progress_line import shows_progress
from fedstat.typing import Floats

OPTIONS_OF_INIT = IterationOptions(tol_score=1e-4, tol_change=np.inf)
"""Of the fit that gives the first coefficients: a small score will do, whatever still moves."""
ITERATIVE_ALTERNATIVE = ", or fit with exchange='iterative', which releases values per entity"
"""What VFEM offers where too many entities are in missing patterns that are too small."""


class VFEMRegression(VFEMModel):
    """Linear regression where blocks of whole institutions are missing.

    Institutions hold different columns of the same entities, and an entity that an institution never saw
    lacks that institution's whole block. The model is y = beta0 + sum_k x_k'beta_k + eps with normal errors
    and jointly normal columns, whose covariance is free between institutions as well as within
    (``between="free"``), or, in the publication's model, zero between institutions
    (``between="independent"``): there coefficients are biased where blocks correlate, however their records
    are missing. Estimates maximise the likelihood of what is observed, and are valid when missingness depends
    on observed values only (MAR). With nothing missing they are those of ordinary least squares.

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

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> model = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI + LP", partition)
    >>> model.fit().params.round(2).to_dict()
    {'Intercept': -0.08, 'ROA': 0.09, 'CI': -0.79, 'LP': -0.06}
    """

    _plan = VFEMPlan
    _conditions = True

    def __init__(
        self, formula: Formula, partition: ClientPartition, *, between: Between = "free", **kwargs: Any
    ) -> None:
        check_choice("between", between, get_args(Between))
        self.between: Between = between
        super().__init__(formula, partition, **kwargs)

    @overload
    @classmethod
    def from_formula(
        cls, formula: str, partition: ClientPartition, *, family: None = None, **options: Any
    ) -> Self: ...

    @overload
    @classmethod
    def from_formula(
        cls, formula: str, partition: ClientPartition, *, family: Family, **options: Any
    ) -> VFEMGLM: ...

    @classmethod
    @inherits_params(VerticalModel.from_formula)
    def from_formula(
        cls, formula: str, partition: ClientPartition, *, family: Family | None = None, **options: Any
    ) -> Self | VFEMGLM:
        """Make a model from a formula.

        Parameters
        ----------
        formula, partition
            As in :meth:`VerticalModel.from_formula`.
        family : statsmodels family, optional
            Of the response; normal by default. ``Binomial()``, with the logit or the probit link,
            ``Poisson()`` and ``NegativeBinomial(alpha=...)`` make a model of that family.
        between : {"free", "independent"}
            Covariance of the columns of two institutions: estimated, the default, or zero, as in the
            publication. Institutions that share hardly any entity count as independent given all other
            columns; the summary names them. ``exchange="iterative"`` has "independent" alone.
        missing, coordinator
            As in :meth:`VerticalModel.from_formula`.
        offset : str, optional
            Column of the response's institution, added to the linear predictor with coefficient one. It is
            taken as independent of missing columns. Predictions are those at an offset of zero, as
            statsmodels' for new data; entities without one count as without a response.
        freq_weights : str, optional
            Column of the response's institution: an entity stands for so many. Every institution that takes
            part is told the weights of its entities. A weight of zero counts as no response.
        var_weights : str, optional
            Column of the response's institution: the variance of the response is the residual variance over
            the weight, as in weighted least squares. Where entities lack blocks it belongs to
            ``method="cc"``.

        Raises
        ------
        FormulaError, DesignError
            As :meth:`VerticalGLM.from_formula`.
        ModelError
            The family is another one, or an argument has no meaning; weights beside another family; a column
            of weights or offset that is not at the response's institution.

        Examples
        --------
        >>> import numpy as np
        >>> import fedstat as fs
        >>> frames = fs.datasets.load_sme()
        >>> holder = next(name for name, frame in frames.items() if "NPGR" in frame)
        >>> frames[holder]["cases"] = np.resize([1.0, 2.0], len(frames[holder]))
        >>> partition = fs.ClientPartition.from_frames(frames, on="enterprise_id")
        >>> model = fs.VFEMRegression.from_formula("NPGR ~ EMP + FOI", partition, freq_weights="cases")
        >>> bool(model.fit(cov_type="none").nobs == frames[holder]["cases"].sum())
        True
        """
        if family is None or DistributionSpec.of(family) == NORMAL:
            return super().from_formula(formula, partition, **options)
        model = VFEMGLM.from_formula(formula, partition, family=family, **options)
        # Tests of what is assumed of columns and missing patterns rest on its sums, whatever the response.
        columns_alone = {name: value for name, value in options.items() if name != "offset"}
        model.linear = lambda: cls.from_formula(formula, partition, **(columns_alone | {"between": "free"}))
        return model

    @inherits_params(VFEMGLM.fit)
    @shows_progress
    def fit(
        self,
        *,
        method: VFEMMethod = "vfem",
        cov_type: CovType = "observed",
        exchange: Literal["moments", "iterative"] = "moments",
        masked: bool = True,
        cross_products: CrossSource = "secure",
        sketch: SketchKind = "structured",
        sketch_size: int = 20_000,
        step: Literal["gradient", "local-newton"] = "local-newton",
        acceleration: Literal["anderson"] | None = "anderson",
        memory: int = 8,
        learning_rate: float | None = None,
        init: InitialValues = "zero",
        maxiter: int = 5000,
        tol_score: float = 1e-8,
        tol_change: float = 1e-6,
        progress: bool | None = None,
        max_moved: float | None = None,
        correction: Correction | None = None,
    ) -> VFEMResults:
        """Maximise the likelihood of the observed data.

        Parameters
        ----------
        method
            As in :meth:`VFEMGLM.fit`.
        cov_type : {"observed", "expected", "sem", "robust", "none"}
            Inverse observed information; the same with cross-products between institutions at their
            expectation, zero, so that none are asked for (needs missingness completely at random);
            supplemented EM; sandwich; or none. All but "none" account for the estimated means,
            covariances and residual variance.
        exchange : {"moments", "iterative"}
            What passes between the institutions. "moments": sums of products of the columns by missing
            pattern, once, products of two institutions' columns by secure multiplication; nothing per
            entity leaves, and everything else happens at the coordinator. Patterns with fewer entities than
            the partition's `min_count`, or than twice their columns and response, are not released: these
            entities count as missing at an institution that has them. "iterative": linear predictors and
            residuals of every entity, in every round; the estimates are the same. The arguments
            below, but for `maxiter`, belong to it, and so does cov_type="robust".
        masked : bool
            Of exchange="iterative": whether institutions hide their linear predictors, likelihoods and scores
            by pairwise masks, so that the coordinator and the response holder learn sums over institutions,
            which hides an institution's part of one round and not of many. Linear predictors then go out for
            all entities, zero where an institution has no record; where one institution alone, beside the
            receiver, has a record the sum is its own part (the summary counts them). With two institutions
            each knows the other's part. ``False`` sends every institution's own.
        cross_products : {"secure", "sketch", "exact"}
            Of exchange="iterative": where products of two institutions' columns come from. Secure
            multiplication, exact, of which nobody sees more than the products; it needs a third institution,
            or a coordinator apart, to deal random numbers. Random projections that the institutions draw from
            a seed they share. Or a plain exchange of columns, which discloses them.
        sketch, sketch_size
            As in :meth:`VFEMGLM.fit`.
        step : {"gradient", "local-newton"}
            M-step for the coefficients: TWFL (8), or Newton's with the institution's own covariance.
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
            Largest number of iterations, of either exchange.
        tol_score : float
            Stop when the score, in the complete-data information and per root of entities, is below. (With
            moments Newton's method goes on until the maximum is within 1e-9 standard errors.)
        tol_change, progress
            As in :meth:`VFEMGLM.fit`.
        max_moved : float, optional
            With exchange="moments": largest share of the entities in missing patterns that are too small to
            be released, and count as missing at an institution that has them (all columns of them; single
            values that count as missing are warned of). By default .05, or any share where an owner's policy
            has sums judged by the bits of columns of few values.
        correction : {"small-sample", "skewness"}, optional
            With exchange="moments" and between="free", from the same sums. "small-sample": without the bias
            of order 1/n (Cox and Snell 1968), and standard errors by the residual variance with its degrees
            of freedom; with nothing missing those of least squares. "skewness": columns are shifted
            log-normal, each as asymmetric as its institution told, and the response and columns that nobody
            lacks decide on what is missing: the law whose simulated sample has the estimates of the normal
            one (indirect inference, Gourieroux, Monfort and Renault 1993), with standard errors of its own.

        Returns
        -------
        VFEMResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or belongs to the other exchange; or nobody is left to deal for
            two institutions.
        NotAvailableError
            cov_type="robust" from moments.
        EstimationError
            The entities of the method do not determine the estimate, or too many are in small patterns.
        PolicyError
            An institution refuses a release.

        Warns
        -----
        ConvergenceWarning
            The iteration stopped before its tolerances.
        DataWarning
            More than 5 % of the entities are in patterns that are too small to be released, and `max_moved`
            allows it.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit(method="cc").nobs
        340
        """
        arguments = dict(locals())
        check_choice("method", method, get_args(VFEMMethod))
        check_choice("cov_type", cov_type, get_args(CovType))
        check_choice("exchange", exchange, ("moments", "iterative"))
        if exchange == "moments":
            check_cov_type(cov_type)
            refuse_iterative(arguments, VFEMRegression.fit)
        elif self.between == "free":
            raise ModelError(
                "exchange='iterative' is that of the publication's model: "
                "from_formula(..., between='independent'), or leave exchange='moments'"
            )
        check_correction(
            correction, cov_type, (method, exchange, self.between) == ("vfem", "moments", "free")
        )
        check_weights(self._roles, exchange, correction)
        check_share("max_moved", max_moved)
        options = IterationOptions(
            step=step,
            acceleration=acceleration,
            memory=memory,
            learning_rate=learning_rate,
            maxiter=maxiter,
            tol_score=tol_score,
            tol_change=tol_change,
            masked=masked,
        )
        check_whole("memory", memory, SMALLEST_MEMORY)
        if exchange == "moments":
            asked = MomentsOptions(cov_type, self.between if method == "vfem" else "independent", maxiter)
            result = self._fit_moments(method, asked, options, max_moved, correction)
        else:
            covariance = self._covariance_options(cov_type, cross_products, sketch, sketch_size)
            wanted = IterativeOptions(method, options, covariance, init)
            result = self._fit_by_iteration(wanted, VFEMResults)
        warn_unless_converged(result._fit)
        return result

    def _fit_moments(
        self,
        method: VFEMMethod,
        asked: MomentsOptions,
        options: IterationOptions,
        max_moved: float | None,
        correction: Correction | None,
    ) -> VFEMResults:
        layout, ledger = self._begin(method, partly=method == "vfem")
        check_variances(self._roles, layout)
        small = SmallPatterns(self.partition.min_count, max_moved, ITERATIVE_ALTERNATIVE)
        exchanging = exchange_patterns(layout, small, product_session(self._session, ledger.at))
        exchange = self.engine.run(self._receipted(exchanging, ledger), ledger)
        self._keep_division(layout, exchange)
        found, covariance = estimate_from_moments(exchange.moments, asked)
        made = apply_correction(found, covariance, correction)
        if method == "vfem" and self.between == "independent":
            warn_of_dependence(exchange.moments)
        fit = fit_by_site(made.reported, asked.between)
        outcome = VFEMOutcome(
            method, asked.cov_type, "zero", options, fit, made.covariance, correction=correction
        )
        held = SessionArtifacts(exchange=exchange, moments_fit=found)
        return VFEMResults._of(self, layout, outcome, held, ledger)

    def _iterate(
        self, wanted: IterativeOptions, layout: Layout, report: Progress | None
    ) -> FitProtocol[IterativeResult]:
        iteration = EMIteration(layout, wanted.options, self._session, report)
        first = self._first_point(layout, wanted.options, wanted.init)
        return fit_normal(iteration, first, wanted.covariance)

    def _first_point(
        self, layout: Layout, options: IterationOptions, init: InitialValues
    ) -> FitProtocol[Mapping[str, Floats] | None]:
        if not isinstance(init, str):
            return self._given_point(init)
        check_choice("init", init, ("zero", "cc", "impute"))
        if init == "zero":
            return None
        coarse = replace(OPTIONS_OF_INIT, maxiter=options.maxiter, masked=options.masked)
        fit = yield from EMIteration(self._layout(init), coarse, self._session).maximise()
        return fit.beta

    def _given_point(self, init: Sequence[float] | Mapping[str, float] | Floats) -> Mapping[str, Floats]:
        names, blocks = self.param_names[1:], self.design.blocks
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
        edges = np.cumsum([len(block.names) for block in blocks])[:-1]
        return dict(zip([b.client for b in blocks], np.split(values, edges), strict=True))
