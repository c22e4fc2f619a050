"""The dry-run plan of a vertical generalized linear model: requests and releases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.protocols.product_steps import PRODUCT_STEPS
from fedstat.models.explain import DryRunPlan
from fedstat.models.vertical.group_folds import split_folds
from fedstat.models.vertical.layout import Layout
from fedstat.models.vglm.admm import MOST_LINEARIZED
from fedstat.models.vglm.options import FOLDS, read_lambdas
from fedstat.models.vglm.path_following import MOST_EXPANSIONS

POINTS = frozenset({"linear_predictor", "admm_move"})
"""Steps that release linear predictors."""
NEWTON = ("linear_predictor", "respond", "respond_openly", "sum_scores")
GRAMS = ("weigh", "introduce", "announce", "finish", *PRODUCT_STEPS)
MOVES = ("admm_move", "admm_respond")
LASSOS = ("admm_set", "admm_certify", "respond_openly")
LONGER = 6
"""Planned Newton steps of each fit of a path, and factor between all of them and those of the dry run."""
STARTS = 4
"""Fits before and after a path: the intercept, unpenalized columns, all without a penalty, the refit."""

FEW = 20
"""Number of entities per column below which a likelihood is far from a quadratic function."""

DRY_RUN_LAMBDAS, DRY_RUN_RATIO, DRY_RUN_TOL, DRY_RUN_ROUNDS = 2, 0.3, 1e-2, 20
"""Number of lambdas in a dry run of ADMM, which has the same hundreds of rounds at every lambda."""


class VGLMPlan(DryRunPlan):
    """Properties of a fit of a vertical generalized linear model that are known before it runs."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self._layout: Layout = model.layout
        self._canonical = bool(model.distribution.canonical)
        self._convex = bool(model.penalty.convex)
        self._normal = model.distribution.name == "Gaussian" and given["exchange"] == "products"
        self._admm = given["exchange"] == "admm"
        self._opened: tuple[str, ...] = model._opened_in_fit()

    def arguments(self) -> Mapping[str, Any]:
        """Limit ADMM to a few lambdas, and to the rounds that the dry run needs."""
        if not self._admm:
            return {}
        rounds = min(int(self.given["maxiter"]), DRY_RUN_ROUNDS)
        short: dict[str, Any] = {"tol": max(float(self.given["tol"] or 0.0), DRY_RUN_TOL), "maxiter": rounds}
        lambdas = read_lambdas(self.given["lam"], self.given["lambdas"])
        if lambdas is None:
            return short | {"n_lambdas": DRY_RUN_LAMBDAS, "ratio": DRY_RUN_RATIO}
        return short | {"lam": None, "lambdas": lambdas[:DRY_RUN_LAMBDAS]}

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Describe Newton steps and weighted Gram matrices, or the rounds of ADMM."""
        if self._normal:
            return []
        points = IterationLoop(NEWTON, 0).done(dry_run)
        return [
            *(self._of_admm(dry_run) if self._admm else []),
            # The synthetic response of a dry run has no effects, and its path ends early.
            IterationLoop(NEWTON, LONGER * max(points, self._solutions())),
            # As many as the disclosure checks allow; the fit counts them, and continues without further ones.
            IterationLoop((*GRAMS, "linear_predictor"), self._layout.most_grams),
        ]

    def _solutions(self) -> int:
        """Return the most fits of a path, each from a point near its solution: at lambdas, or proposals."""
        lambdas = read_lambdas(self.given["lam"], self.given["lambdas"])
        L = int(self.given["n_lambdas"]) if lambdas is None else len(lambdas)
        return STARTS + (L if self.given["path"] == "exact" else min(L, MOST_EXPANSIONS))

    def _of_admm(self, dry_run: DryRunRecord) -> list[IterationLoop]:
        """Lassos with their rounds, and lambdas."""
        lambdas = read_lambdas(self.given["lam"], self.given["lambdas"])
        L = int(self.given["n_lambdas"]) if lambdas is None else len(lambdas)
        first = sum(("admm_set" in steps) - ("admm_certify" in steps) for steps in dry_run.rounds)
        lassos = L * (1 if self._convex else MOST_LINEARIZED) + first
        share, moves = min(DRY_RUN_LAMBDAS, L) / L, lassos * int(self.given["maxiter"])
        return [
            IterationLoop(MOVES, moves, L + first, share),
            IterationLoop(LASSOS, lassos, L + first, share),
            IterationLoop(("admm_coefficients",), L, L, share),
        ]

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what sums of products, and linear predictors at known coefficients, reveal."""
        layout, at = self._layout, expected.dry_run.at
        coordinator = "Coordinator" if at is None else f"Coordinator, at {at}"
        for name in self._opened:
            yield coordinator, f"learns the {name} of every entity."
            how = "from fitted means or residuals" if name == "offset" else "with the request for their sums"
            yield "Sites", f"learn the {name} of their entities, {how}."
        if self._normal:
            yield (
                coordinator,
                f"learns means, variances and all correlations of the {layout.p} columns and the "
                f"response{self._parts()}. For a column with two values, these are counts and means in its "
                "groups.",
            )
            return
        points = sum(usual for steps, (_, usual, _) in expected.rounds() if not POINTS.isdisjoint(steps))
        yield (
            coordinator,
            f"learns {points} sums of the sites' linear predictors for every entity. As many as there "
            f"are columns ({layout.p}) determine the rows of ALL sites, masked or not, if their "
            "coefficients are known"
            + (
                "; here it knows those at the end of each lambda only."
                if self.given["exchange"] == "admm"
                else ", as they are here."
            ),
        )
        multiplied = any("open_product" in steps for steps in expected.dry_run.rounds)
        alone = layout.sites == (layout.active,)
        shown = self._admm or not self._canonical or not (multiplied or alone)
        yield (
            "Sites",
            "learn the response of every entity from its residuals and weights."
            if shown
            else "learn fitted means minus the mean response: for the response, the prediction of the fit.",
        )

    def _parts(self) -> str:
        if any(len(rows) < self._layout.n for rows in self._layout.kept.values()):
            return ", by missing pattern"
        cut = self.given["select"] in ("cv", "1se") or self.given["draws"] or self.given["splits"] > 1
        if not cut and self.given["inference"] == "split":
            return ", in each of 2 random halves of the entities"
        return (
            f", in each of {split_folds(self.given['folds'], FOLDS)[0]} random parts of the entities"
            if cut
            else ""
        )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State how the numbers of steps were determined."""
        if self._normal:
            yield "Nothing here depends on the values of the data: the fit has these rounds and bytes."
        elif not self._admm:
            yield (
                f"If nothing is selected, few steps are taken; {LONGER} times those of the dry run are "
                f"planned. At most {self._layout.most_grams} weighted Gram matrices are released over "
                f"{self._layout.n:,} entities."
            )
            if self._layout.n < FEW * self._layout.p:
                yield (
                    f"There are fewer than {FEW} entities for each column: fits of simulated data with as "
                    "few entities took up to three times the largest number of rounds."
                )
