"""Functional boosting when sites hold different rows: checks of the arguments, and the fit."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np

from fedstat.docstrings import inherits_signature
from fedstat.errors import FormulaError, ModelError
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.formula.terms import parse_terms, term_columns
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.design.vertical_design import MissingRule
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.synthetic_rows import SyntheticRows, coded_names
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.partition.row_tables import common_columns
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.curves import SHOWN, all_points, measured_differently
from fedstat.models.boost.arguments import (
    FOLDS,
    SumsSize,
    check_every,
    check_loss,
    check_points,
    check_site_folds,
    check_size,
    common_curves,
    given_offset,
    plain_formula,
    published_range,
)
from fedstat.models.boost.explain import BoostPlan
from fedstat.models.boost.learning.baselines import check_aggregation, site_boostings
from fedstat.models.boost.learning.boosting import Aggregation, Boosting
from fedstat.models.boost.learning.columns import CurveSumsRequest, time_basis
from fedstat.models.boost.learning.learners import (
    BoostFormula,
    Learner,
    check_coded,
    parse_boost_formula,
    parse_time,
    with_bounds,
    with_domain,
)
from fedstat.models.boost.learning.losses import loss_of
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.learning.prepared_learners import PENALTIES, BoostDesign, Moments, PenaltyKind
from fedstat.models.boost.learning.varying import coefficients_along, varying_of
from fedstat.models.boost.private.public_curves import PublicCurve
from fedstat.models.boost.protocol import (
    ScoreRounds,
    plan_scores,
    take_irregular_moments,
    take_moments,
    take_own_moments,
    take_varying_moments,
)
from fedstat.models.boost.results import BoostResults, LocalBoosts
from fedstat.models.boost.steps import FAMILY
from fedstat.models.boost.vertical_model import vertical_boost
from fedstat.models.checks import (
    check_call,
    check_choice,
    check_masked,
    check_positive,
    check_whole,
    checks_arguments,
)
from fedstat.models.explain import ForecastPlan
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.progress_line import open_line
from fedstat.typing import Floats

__all__ = ["FedFunctionBoost", "PublicCurve"]

Select = Literal["cv", "aicc"] | None
SELECT = ("cv", "aicc", None)
SEED_BITS = 53


class FedFunctionBoost(HorizontalModel):
    """Regression of curves, or of a number, on curves and other columns, by component-wise L2 boosting.

    Every step fits all base learners to what is left and moves by a share of the best. The sites sum, in one
    round, products of the learners' columns and of the response; steps, their number by cross-validation, and
    all statements follow from these sums, and the path is that of the pooled table.

    Make one with :meth:`from_formula`.

    Attributes
    ----------
    learners : tuple of Learner
        Base learners, the intercept first; `boost`, `curves`, `time`, `loss` and `penalty` are as asked for.

    References
    ----------
    Brockhaus, Ruegamer, Greven, "Boosting functional regression models with FDboost", Journal of Statistical
    Software 94 (2020).

    Ding, "Federated learning for functional data", dissertation, Binghamton University (2024).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.FedFunctionBoost.from_formula("num ~ age + sex", partition).fit(steps=20)
    <BoostResults: num, 20 steps, 920 entities; see .summary()>
    """

    model_name: ClassVar[str] = "Federated functional boosting"
    _plan = BoostPlan

    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        learners: BoostFormula,
        time: str = "bbs(t, knots=10, df=4)",
        penalty: PenaltyKind = "separable",
        family: Any = None,
        loss: Literal["huber", "quantile"] | None = None,
        delta: float | None = None,
        q: float | None = None,
        missing: MissingRule = "drop",
    ) -> None:
        self.loss, distribution = loss_of(family, loss, delta, q)
        check_choice("penalty", penalty, PENALTIES)
        self.boost, self.penalty = learners, penalty
        self.curves = common_curves(partition)
        basis = parse_time(time)
        self.time = with_domain(basis, self._ends(learners.response)) if learners.functional else None
        held = {site: curves.get(learners.response) for site, curves in partition.curves.items()}
        self._responses = {site: curve for site, curve in held.items() if curve is not None}
        self._uneven = learners.functional and measured_differently(list(self._responses.values()))
        self.learners: tuple[Learner, ...] = tuple(
            with_domain(one, self._along(one) if one.varying else self._ends(one.of))
            if one.of_curve
            else with_bounds(one, partial(published_range, partition))
            for one in learners.learners
        )
        check_points(self.learners, partition.curves)
        super().__init__(formula, partition, family=distribution.make(), missing=missing)
        terms = coded_names(self.agreement).term_names
        check_coded(self.learners, {term: terms.count(term) for term in terms}, self._has_levels)

    @classmethod
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``"cca(t) ~ bsignal(rcst) + bols(C(case)) + bbs(age)"``: with ``(t)`` the response is a
            curve, else a number. Learners are ``bsignal(curve, knots=10, differences=1, df=4)``, the integral
            of a curve times a smooth function; ``bfpc(curve, pve=0.99)``, the same in principal components
            that have a share of the curve's variance; ``bconcurrent(curve)``, the curve at the same point
            times a smooth function; ``bhist(curve)``, its integral up to that point; ``bols(term)``, linear,
            of levels as well; ``bbs(column, knots=20, lower_bound=..., upper_bound=...)``, smooth, with
            bounds unless the sites publish a range; and ``brandom(column)``, an effect of every level, all
            shrunken. ``by=column`` multiplies the effect of `bsignal`, `bols` or `bbs` by a column of numbers
            or of two levels. A bare name is ``bsignal`` of a curve and ``bols`` of another column; there is
            an intercept. Effects are smooth along a curve that responds, but for those in ``const(...)``.
        partition : ClientPartition
            With ``curves={...}``; vertical: :func:`fedstat.models.boost.vertical_model.vertical_boost`.
        time : str
            Basis along the response, ``"bbs(t, knots=10, df=4)"``.
        penalty : {"separable", "fdboost"}
            Whether both directions of a surface are smoothed one after the other, which is faster, or by the
            one parameter of FDboost, whose numbers these are then.
        family : statsmodels family, optional
            ``Binomial()`` or ``Poisson()`` with their canonical links; squares by default. Learners are
            fitted to slopes of the loss without weights, as in mboost.
        loss : {"huber", "quantile"}, optional
            Instead of a family: squares up to residuals of `delta`, in units of the response, and linear
            beyond; or the loss of a quantile `q`, by default the median. Its slopes jump, so that a step
            tells of the few rows on either side: strict owners do not answer it, and others give their last
            answer again where fewer than their least number of rows have changed sides.
        missing : {"drop", "raise"}
            Rows that lack a value which the model reads, and those of which a stretch of a curve longer than
            a tenth of its domain is unknown, are left out and counted, or an error.

        Raises
        ------
        FormulaError
            What is not in the language, or names what is not there.
        PolicyError
            A site's owner does not allow it.

        Examples
        --------
        >>> import numpy as np, pandas as pd, fedstat as fs
        >>> random = np.random.default_rng(1)
        >>> x = random.normal(size=(90, 4)) @ np.sin(np.outer(np.arange(1, 5), np.linspace(0, 3, 20)))
        >>> y = pd.DataFrame(x[:, ::2] + random.normal(size=(90, 10))).add_prefix("y_")
        >>> table = pd.DataFrame(x).add_prefix("x_").join(y).assign(site=[*"ABC"] * 30)
        >>> curves = {"x": fs.Curve("x_*", domain=(0, 1)), "y": fs.Curve("y_*", domain=(0, 1))}
        >>> partition = fs.ClientPartition.from_frame(table, by="site", curves=curves)
        >>> fs.FedFunctionBoost.from_formula("y(t) ~ bsignal(x)", partition).fit(steps=50).surface("x").shape
        (200, 3)
        """
        if "epsilon" in settings or getattr(partition, "layout", "") == "vertical":
            return cast("Self", vertical_boost(formula, partition, **settings))
        check_call(cls, partition, "horizontal", settings)
        curves = common_columns(map(tuple, partition.curves.values()))
        parsed = parse_boost_formula(formula, curves)
        return cls(plain_formula(parsed, partition), partition, learners=parsed, **settings)

    @checks_arguments
    def fit(
        self,
        *,
        steps: int = 100,
        nu: float = 0.1,
        select: Select = None,
        folds: int | Literal["site"] | None = None,
        offset: Literal["mean", "smooth"] | float | Sequence[float] | Floats = "mean",
        every: int | None = None,
        aggregation: Aggregation = "exact",
        masked: bool | None = None,
        random_state: int | None = None,
        progress: bool | None = None,
    ) -> BoostResults | LocalBoosts:
        """Follow the path of boosting.

        Parameters
        ----------
        steps : int
            Steps, or the most that `select` looks at.
        nu : float
            Share of a fit by which a step moves, in (0, 1].
        select : {"cv", "aicc"}, optional
            Take the number of steps with the least loss over folds that are left out, or with the least
            corrected criterion of Akaike, as mboost has it: that takes the points of a curve as independent,
            and so goes on too long where errors are correlated along it. Without, all steps are taken. All
            follows from sums which leave in the same round.
        folds : int or "site", optional
            Folds, drawn at random within every site; by default ten with ``select="cv"``, and one, which is
            none, without. With folds also :meth:`BoostResults.stability` can be told. With "site" each site
            is a fold, so that the loss is that at a site which took no part; masks could hide no site's sums
            then, and there are none.
        offset : {"mean", "smooth"}, float or sequence of float
            Curve from which boosting starts: the mean of the response at each point, this smoothed along the
            basis `time`, or a number or curve (G,) that is given. Of a family it is on the scale of the link;
            a quantile starts from that of a normal law.
        every : int, optional
            Of a loss that is no square: steps between two exchanges of scores with the sites, 10 by default.
            Between, scores move as those of the parabola above the loss; 1 is mboost's path. A quantile has
            no parabola, and 1.
        aggregation : {"exact", "lsa", "average", "local"}
            By default the path of the pooled table. The others are the publication's, for comparison, and
            have no inference: every site fits the learners to its own rows in every step, and the fits are
            averaged by least squares with their information as weights, or by rows; or every site fits by
            itself. They are made of every site's own sums, which leave in the clear.
        masked : bool, optional
            Whether sites hide their parts by pairwise masks; by default where there are three or more and the
            folds are not the sites.
        random_state : int, optional
            Seed of the folds.
        progress : bool, optional
            Tell how far the fit has come (:func:`fedstat.progress`).

        Returns
        -------
        BoostResults, or LocalBoosts, results by site, of local fits

        Raises
        ------
        ModelError
            An argument has no meaning here.
        PolicyError
            A site refuses.
        """
        call = Call.of(self.fit, locals())
        return run_fit(
            self,
            call,
            FedFunctionBoost._estimate,
            steps=steps,
            nu=nu,
            select=select,
            folds=folds,
            offset=offset,
            every=every,
            aggregation=aggregation,
            masked=masked,
            random_state=random_state,
        )

    def _estimate(
        self,
        attempt: FitAttempt,
        *,
        steps: int,
        nu: float,
        select: Select,
        folds: int | Literal["site"] | None,
        offset: Literal["mean", "smooth"] | float | Sequence[float] | Floats,
        every: int | None,
        aggregation: Aggregation,
        masked: bool | None,
        random_state: int | None,
    ) -> BoostResults | LocalBoosts:
        check_whole("steps", steps, 1)
        check_positive("nu", nu)
        if nu > 1.0:
            raise ModelError(f"nu: expected a share of at most 1, received {nu!r}")
        check_choice("select", select, SELECT)
        by_site = isinstance(folds, str)
        if by_site:
            check_choice("folds", folds, ("site",))
            masked = check_site_folds(masked, len(self.sites), self._masks_wanted)
        folds = (FOLDS if select == "cv" else 1) if folds is None else folds
        own_folds = 1 if isinstance(folds, str) else folds  # that a site deals its rows to
        check_whole("folds", own_folds, 2 if select == "cv" and not by_site else 1)
        seed = secrets.randbits(SEED_BITS) if random_state is None else random_state
        check_whole("random_state", seed, 0)
        every = check_every(every, self.loss)
        given = given_offset(offset, self._points, functional=self.time is not None)
        smooth = isinstance(offset, str) and offset == "smooth"
        exact = check_aggregation(aggregation, masked, self.penalty)
        if not exact and (self._uneven or varying_of(self.learners)):
            raise ModelError(
                f"aggregation: {aggregation!r} wants all curves of the response at the same points, and no "
                "learner that varies along it"
            )
        if not exact and (by_site or select == "aicc" or smooth or given is not None or self.loss):
            raise ModelError(
                f"aggregation: {aggregation!r} is of squares about means, has no AICc, and no sites as folds"
            )
        check_loss(self.loss, select, self.learners, uneven=self._uneven)
        masked = exact and check_masked(masked, len(self.sites), self._masks_wanted)
        told = None if given is None or not self._uneven else (tuple(self._points), tuple(given))
        asked = CurveSumsRequest(self.learners, self.time, int(own_folds), int(seed), told, self.loss)
        starts = self._starts()
        plan = plan_scores(self.loss, len(self.sites), steps=steps, every=every, folds=folds, select=select)
        self._check_size(starts[-1] + 1 + coefficients_along(self.learners), int(own_folds), masked)
        if self.loss:
            self._check_size(starts[-1] + 1, 1, masked, plan.n_scores * self._n_along)
        session = self._open_session(FAMILY, masked)
        design = BoostDesign(self.learners, starts, self.time, self.penalty)
        basis = time_basis(self.time, self._points)
        if self.loss:
            empty = Boosting(CurveMoments.none(), design, basis, float(nu), smooth_offset=smooth, given=given)
            with open_line("step", plan.steps) as line:
                rounds = ScoreRounds(session, asked, self.loss, plan, empty, line)
                scored = attempt.run(rounds.run(), session.masked_sites)
            return BoostResults._of(self, scored, int(steps), select, masked, attempt.ledger)
        if exact:
            taking: FitProtocol[Moments] = (
                take_irregular_moments(session, asked, basis, by_site)
                if self._uneven
                else take_moments(session, asked, by_site)
            )
            varying = None
            if varying_of(self.learners):
                both = take_varying_moments(
                    session, asked, basis, self._points, uneven=self._uneven, by_site=by_site
                )
                moments, varying = attempt.run(both, session.masked_sites)
            else:
                moments = attempt.run(taking, session.masked_sites)
            boosting = Boosting(
                moments, design, basis, float(nu), smooth_offset=smooth, given=given, varying=varying
            )
            return BoostResults._of(self, boosting, int(steps), select, masked, attempt.ledger)
        own = attempt.run(take_own_moments(session, asked), session.masked_sites)
        found = site_boostings(own, design, basis, float(nu), aggregation, self.sites)
        fits = {
            one.site: BoostResults._of(self, one, int(steps), select, masked, attempt.ledger) for one in found
        }
        return LocalBoosts(fits) if aggregation == "local" else fits[""]

    @property
    def _n_columns(self) -> int:
        """Columns whose products are summed: of all learners, and of the response in its basis."""
        return self._starts()[-1] + self._n_along

    @property
    def _n_along(self) -> int:
        """Functions of the basis along the response; one of a number."""
        return 1 if self.time is None else self.time.knots + self.time.degree + 1

    @property
    def _points(self) -> Floats:
        """Points of the response, (G,), or at which it is shown; one for a number."""
        if self.time is None:
            return np.zeros(1)
        grids = [curve.grid for curve in self._responses.values()]
        if all(map(len, grids)):
            return all_points(grids) if self._uneven else grids[0]
        return np.linspace(
            self.time.low, self.time.high, max(SHOWN, 2 * (self.time.knots + self.time.degree))
        )

    def _has_levels(self, term: str) -> bool:
        return any(name in self.agreement.spec.levels for name in term_columns(parse_terms(term).terms[0]))

    def _starts(self) -> tuple[int, ...]:
        """Places of each learner's columns among all."""
        terms = coded_names(self.agreement).term_names
        widths = [one.width(terms.count(one.of)) for one in self.learners]
        return tuple(np.cumsum([0, *widths]).tolist())

    def _ends(self, curve: str) -> tuple[float, float]:
        return self.curves[curve].domain

    def _along(self, learner: Learner) -> tuple[float, float]:
        """Domain of a curve that has to be the response's."""
        ends, response = self._ends(learner.of), self.boost.response
        if ends != self._ends(response):
            raise FormulaError(
                f"formula: {learner.label} is of '{learner.of}' at or before each point of '{response}', and "
                f"their domains differ: {ends[0]:g} to {ends[1]:g}, and {self._ends(response)[0]:g} to "
                f"{self._ends(response)[1]:g}. Declare one domain for both, or use bsignal()"
            )
        return ends

    def _check_size(self, columns: int, folds: int, masked: bool, slopes: int = 0) -> None:
        """Require rows for the columns of all learners, by fold, as the owners do; name what passes."""
        policies = {name: site.policy for name, site in self.partition.sites.items()}
        weighed = [name for name, one in self._responses.items() if one.gaps] if self._uneven else []
        time = self.time if self._uneven else None
        asked = SumsSize(columns + slopes, folds, self.learners, time, slopes)
        check_size(asked, self.agreement.sites, policies, weighed, masked=masked)

    def _question(self, offset: str | None, labels: Sequence[str], complete: Sequence[str]) -> RowsRequest:
        response = self.boost.response if self.boost.functional else ""
        (terms,) = self.formula.clients
        for name in (*self.formula.response_columns, *terms.columns):
            self._check_held("formula", name)
        return RowsRequest(
            "" if response else self.formula.response,
            self.formula.response_columns,
            terms.terms,
            terms.columns,
            curves=self.boost.curves,
            curve_response=response,
        )

    def _invent_sites(self, plan: ForecastPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        return SyntheticRows(self.agreement, self.distribution, curves=self.curves).sites(policies)
