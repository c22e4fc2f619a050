"""Results of private boosting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.tables.curve_columns import with_curves
from fedstat.federation.tables.curves import Curve, curves_of
from fedstat.inference.estimate import Estimate, LedgerLike
from fedstat.inference.summary import CoefficientBlock, Note, coefficient_block_sheet, header_sheet
from fedstat.inference.tables import SheetSummary
from fedstat.models.boost.learning.boosting import BoostPath, explained, first_steps
from fedstat.models.boost.learning.learners import BoostFormula
from fedstat.models.boost.private.explain import release_notes
from fedstat.models.boost.private.protocol import NoisySums, ReleasedCurves, run_noisy_path
from fedstat.models.boost.private.public_curves import PublicPart
from fedstat.models.boost.report.effects import learner_sheet
from fedstat.models.boost.report.plots import draw_importance, draw_path, draw_surface
from fedstat.models.checks import check_choice, check_whole
from fedstat.models.results import CoefficientResults
from fedstat.privacy.zcdp import rho_of_budget
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_ERROR = (
    "intervals would have to count the noise of the release, and the shrinkage of boosting; neither is done"
)
NO_LIKELIHOOD = "sums with noise were released and no likelihood"
NO_STEP = (
    "NOISE IS TOO LARGE: no learner gains more than noise alone lets one in one of twenty releases; no step "
    "was taken, and predictions are the public mean. Take a larger epsilon, more entities, or fewer "
    "functions of each curve"
)
PUBLIC = (
    "Public, and never taken from the data: means, functions and deviations of curves, bounds and levels of "
    "columns, to which rows are cut; numbers of entities, who has a record where. Noise is discrete Gaussian "
    "from the operating system's randomness; each institution adds its own before anything leaves, and "
    "nobody, dealer included, holds a sum without."
)
EPSILONS = (0.5, 1.0, 3.0, 10.0)
DRAWS = 10


@dataclass(frozen=True, slots=True, eq=False)
class PrivateBoostRecord:
    """What a file of results holds: the sums with their noise, from which the rest follows.

    `parts` are what is public of each learner but the intercept, and of the response, the last; `curves` how
    a table holds these. `rho` is what the whole release cost.
    """

    formula: BoostFormula
    sums: NoisySums
    parts: tuple[PublicPart, ...]
    curves: Mapping[str, Curve]
    t: Annotated[Floats, "g"]
    steps: int
    nu: float
    epsilon: float
    delta: float
    blocks: tuple[CoefficientBlock, ...]
    notes: tuple[Note, ...]


class PrivateBoostResults(
    CoefficientResults, saved_as="fedstat boost private results 2", record=PrivateBoostRecord
):
    """Results of a private boosting, of curves and columns as public descriptions let them be told.

    Attributes
    ----------
    epsilon, delta : float
        Of the release; steps, their number and refits cost nothing more.
    mstop : int
        Steps that were taken: before the first that gains less than 1.5 times what noise alone would be
        expected to, or all; none where noise is large.
    coef : (K, L) array
        Coefficients of scores, on scores of the response.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=50.0, delta=1e-6))
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> public = {"age": (20, 80), "sex": [0, 1], "chol": (80, 600)}
    >>> model = fs.FedFunctionBoost.from_formula("chol ~ age + sex", partition, epsilon=30.0, public=public)
    >>> fit = model.fit(steps=20)
    >>> len(fit.learners), len(fit.path) <= 20, len(fit.by_epsilon) > 0, len(fit.surface("sex")) > 0
    (3, True, True, True)
    >>> fit.predict(table.head(2)).shape, sorted(fit.score(table)), fit.steps(5).mstop <= 5
    ((2,), ['mape', 'rsquared'], True)
    >>> bool(fit.plot().has_data())
    True
    """

    model_name = "Private functional boosting"

    _record: PrivateBoostRecord

    def __init__(self, record: PrivateBoostRecord, ledger: LedgerLike | None = None) -> None:
        super().__init__(record, ledger)
        self.epsilon, self.delta = record.epsilon, record.delta
        self._path: BoostPath = run_noisy_path(record.sums, record.steps, record.nu)
        self.coef, self.mstop = self._path.coef, len(self._path.selected)

    @classmethod
    def _of(
        cls, model: Any, released: ReleasedCurves, sums: NoisySums, steps: int, nu: float, ledger: Ledger
    ) -> Self:
        """Make results of a release."""
        curves = {part.name: model.curves[part.name] for part in model.parts if part.curve is not None}
        record = PrivateBoostRecord(
            formula=model.boost,
            sums=sums,
            parts=model.parts,
            curves={name: one.declared for name, one in curves.items()},
            t=model._points,
            steps=steps,
            nu=nu,
            epsilon=model.epsilon,
            delta=model.delta,
            blocks=tuple(
                CoefficientBlock(
                    client, released.plan.width(client), released.n, 1.0 - released.n / len(rows)
                )
                for client, rows in model._rows.items()
            ),
            notes=tuple(release_notes(released, model.delta)),
        )
        return cls(record, ledger)

    def steps(self, m: int) -> Self:
        """Results of the same release after at most so many steps."""
        check_whole("m", m, 1)
        return type(self)(replace(self._record, steps=int(m)), self._ledger)

    # -- what was learned ------------------------------------------------------------------------

    @property
    def learners(self) -> pd.DataFrame:
        """Degrees of freedom, first step, and shares of steps and of what is explained, by learner."""
        P, selected = len(self._record.formula.learners), self._path.selected
        return pd.DataFrame(
            {
                "df": self._record.sums.df,
                "first_step": first_steps(selected, P) if self.mstop else [0] * P,
                "steps": np.bincount(selected, minlength=P) / max(self.mstop, 1),
                "explained": explained(selected, self._path.risk, self._record.sums.yy, P)
                if self.mstop
                else np.zeros(P),
            },
            index=pd.Index(self._labels, name="learner"),
        )

    @property
    def path(self) -> pd.DataFrame:
        """The learner of every step, and R-squared after it by the noisy sums; index ``step``."""
        return pd.DataFrame(
            {
                "learner": [self._labels[p] for p in self._path.selected],
                "rsquared": 1.0 - self._path.risk / self._record.sums.yy,
            },
            index=pd.RangeIndex(1, self.mstop + 1, name="step"),
        )

    @cached_property
    def by_epsilon(self) -> pd.Series:
        """R-squared of fits of noisy sums by epsilon, if this fit were the truth: simulated, free of charge.

        The last row, ``inf``, is that without noise: what any fit could reach then.
        """
        sums, random = self._record.sums, np.random.default_rng(1)
        here = float(rho_of_budget(self.epsilon, self.delta))
        found = {}
        for epsilon in sorted({*EPSILONS, self.epsilon}):
            times = float(np.sqrt(here / float(rho_of_budget(epsilon, self.delta))))
            each = []
            for _ in range(DRAWS):
                truth, noisy = sums.drawn(self.coef, times, random)
                each.append(truth.rsquared(run_noisy_path(noisy, self._record.steps, self._record.nu).coef))
            found[epsilon] = float(np.mean(each))
        truth, _ = sums.drawn(self.coef, 0.0, random)
        found[np.inf] = truth.rsquared(self.coef)
        return pd.Series(found, name="rsquared").rename_axis("epsilon")

    def surface(self, learner: str) -> pd.DataFrame:
        """Effect of a learner.

        Parameters
        ----------
        learner : str
            Its label, such as ``"bsignal(rcst)"``, or what it is of.

        Returns
        -------
        DataFrame
            ``s`` (of a curve) or ``column``, ``t`` where the response is a curve, and ``estimate``: of a
            curve the weight in its integral, of a number the effect of one unit, of a level that beside the
            first one.
        """
        p = self._place(learner)
        name, points, at = self._points(p)
        lo, hi = self._record.sums.starts[p : p + 2]
        surface = at @ self.coef[lo:hi] @ self._along
        out: dict[str, Any] = {name: [point for point in points for _ in range(surface.shape[1])]}
        if self._record.formula.functional:
            out["t"] = np.tile(self._record.t, len(points))
        return pd.DataFrame(out | {"estimate": surface.ravel()})

    def predict(self, new: pd.DataFrame) -> pd.DataFrame | pd.Series:
        """Predict the response of rows that you hold, with columns as the institutions have them.

        Returns
        -------
        DataFrame (m, G) with the points of the response as columns, or Series (m,) for a number; NaN where
        something is missing.
        """
        record, (*parts, response) = self._record, self._record.parts
        held = {part.name: record.curves[part.name] for part in parts if part.curve is not None}
        frame = with_curves("the new rows", new, held) if held else new
        Z = np.hstack([np.ones((len(frame), 1)), *(part.scores(frame[part.name]) for part in parts)])
        missing = np.any([part.missing(frame[part.name]) for part in parts], axis=0)
        out = np.where(missing[:, None], np.nan, self._centre + Z @ self.coef @ self._along)
        if not record.formula.functional:
            return pd.Series(out[:, 0], index=new.index, name=response.name)
        return pd.DataFrame(out, index=new.index, columns=pd.Index(record.t, name="t"))

    def score(self, new: pd.DataFrame) -> dict[str, float]:
        """R-squared about the public mean, and mean absolute percentage error, of rows with responses."""
        response = self._record.parts[-1]
        if response.curve is None:
            y = new[response.name].to_numpy(dtype=np.float64)[:, None]
        else:
            frame = with_curves("the new rows", new, {response.name: self._record.curves[response.name]})
            y = curves_of(frame[response.name]).values
        found = np.atleast_2d(np.asarray(self.predict(new)).T).T
        seen = ~(np.isnan(y) | np.isnan(found))
        left, about = ((y - found)[seen] ** 2).sum(), ((y - self._centre)[seen] ** 2).sum()
        with np.errstate(divide="ignore"):
            mape = 100.0 * float(np.mean(np.abs((y - found)[seen] / y[seen])))
        return {"rsquared": 1.0 - float(left / about), "mape": mape}

    def plot(self, what: str = "surface", learner: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw a learner's effect, R-squared along the path by the noisy sums, or importance.

        Parameters
        ----------
        what : {"surface", "path", "importance"}
        learner : str, optional
            For "surface"; by default the one that explains most.
        ax : matplotlib Axes, optional
        """
        check_choice("what", what, ("surface", "path", "importance"))
        if what == "path":
            return draw_path(self.path, ax)
        if what == "importance":
            return draw_importance(self.learners, ax)
        best = str(self.learners["explained"].iloc[1:].idxmax()) if learner is None else learner
        return draw_surface(self.surface(best), best, self.estimate.response, ax)

    # -- summary ---------------------------------------------------------------------------------

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Print the fit: learners in the place of coefficients."""
        kinds = None if self._ledger is None else self._ledger.kinds_by_client()
        sheets = [
            header_sheet(f"{self.model_name} results", self._summary_left(), self._summary_right()),
            learner_sheet(self.learners),
            coefficient_block_sheet(self.estimate.blocks, kinds),
        ]
        return SheetSummary(sheets, self.notes, "")

    def _summary_left(self) -> list[tuple[str, str]]:
        dropped = ("Log-Likelihood", "AIC", "BIC", "Covariance Type", "Converged", "Df Model")
        rows = [row for row in super()._summary_left() if row[0] not in dropped]
        stopped = "noise" if self.mstop < self._record.steps else "given"
        return [
            *rows,
            ("Steps", f"{self.mstop:,} of {self._record.steps:,}"),
            ("Stopped by", stopped),
            ("Step length", f"{self._record.nu:g}"),
        ]

    def _summary_notes(self) -> Iterator[Note]:
        if setting := getattr(self._ledger, "setting", ""):
            yield Note("setting", setting)
        if not self.mstop:
            yield Note("no_step", f"{NO_STEP}.", "warning")
        yield Note("no_covariance", f"No standard errors, tests and intervals: {NO_ERROR}.")
        yield from self._record.notes
        if self.mstop:
            table = ", ".join(f"{value:.2f} at {epsilon:g}" for epsilon, value in self.by_epsilon.items())
            yield Note(
                "rsquared_by_epsilon",
                f"R-squared by epsilon, simulated as if this fit were the truth ({DRAWS} draws each; inf is "
                f"without noise): {table}. Above, it is by the noisy sums.",
            )
        yield Note("public", PUBLIC)

    @cached_property
    def estimate(self) -> Estimate:
        """Coefficients of the path."""
        record, L = self._record, self.coef.shape[1]
        names, terms = [], []
        for label, (lo, hi) in zip(self._labels, pairwise(record.sums.starts), strict=True):
            names += [f"{label}[{i},{j}]" for i in range(hi - lo) for j in range(L)]
            terms += [label] * L * (hi - lo)
        return Estimate(
            params=self.coef.ravel(),
            cov=None,
            names=tuple(names),
            clients=("",) * len(names),
            terms=tuple(terms),
            response=record.formula.response + ("(t)" if record.formula.functional else ""),
            nobs=record.sums.n,
            df_model=float(len(names)),
            converged=True,
            rsquared=record.sums.rsquared(self.coef),
            privacy=f"epsilon {record.epsilon:g}, delta {record.delta:g}",
            blocks=record.blocks,
            reasons={"cov_params": NO_ERROR, "llf": NO_LIKELIHOOD},
        )

    # -- parts -----------------------------------------------------------------------------------

    @property
    def _labels(self) -> list[str]:
        return [one.label for one in self._record.formula.learners]

    @property
    def _centre(self) -> Floats:
        """Public mean of the response at its points, (G,); the middle of a number's range."""
        response = self._record.parts[-1]
        if response.curve is not None:
            return response.curve.on(self._record.t)[0]
        assert response.bins is not None
        return np.array([sum(response.bins.range) / 2.0])

    @property
    def _along(self) -> Floats:
        """What one unit of each of the response's scores is at its points, (L, G)."""
        response = self._record.parts[-1]
        if response.curve is not None:
            return np.array(response.curve.deviations)[:, None] * response.curve.on(self._record.t)[1]
        assert response.bins is not None
        low, high = response.bins.range
        return np.array([[(high - low) / np.sqrt(12.0)]])

    def _points(self, p: int) -> tuple[str, Sequence[Any], Floats]:
        """Name of a learner's argument, its points, and what its columns are per unit there: (m, k)."""
        if p == 0:
            return "column", [self._labels[0]], np.ones((1, 1))
        part = self._record.parts[p - 1]
        if part.curve is not None:
            functions = np.array(part.curve.functions).T
            return "s", part.curve.grid, functions / np.array(part.curve.deviations)
        assert part.bins is not None
        if part.bins.levels:
            share = 1.0 / part.bins.count
            unit = np.eye(part.width) / np.sqrt(share * (1.0 - share))
            return "column", [f"{part.name}[{level}]" for level in part.bins.levels[1:]], unit
        low, high = part.bins.range
        return "column", [part.name], np.array([[np.sqrt(12.0) / (high - low)]])

    def _place(self, learner: str) -> int:
        if learner in self._labels:
            return self._labels.index(learner)
        named = [p for p, one in enumerate(self._record.formula.learners) if one.of == learner]
        if len(named) != 1:
            raise ModelError(
                f"learner: expected one of {', '.join(map(repr, self._labels))}, received {learner!r}"
            )
        return named[0]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self.estimate.response}, epsilon {self.epsilon:g}, {self.mstop:,} "
            f"steps, {self.estimate.nobs:,} entities; see .summary()>"
        )
