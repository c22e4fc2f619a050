"""The dry-run plan of a VFEM fit: its loops, and values that masks do not protect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.models.explain import DryRunPlan
from fedstat.models.vfem.base_model import make_layout
from fedstat.models.vfem.diagnostics import count_exposed
from fedstat.models.vfem.iteration.state import Iteration

DRY_RUN_ITERATIONS = 12
"""Iterations of a dry run of the iteration of the publication; later ones are similar."""


class VFEMPlan(DryRunPlan):
    """Properties of a VFEM fit that are known before it runs."""

    steps: ClassVar[tuple[str, ...]] = ("step", "residuals")
    begins: ClassVar[str] = "start"
    repeated: ClassVar[frozenset[str]] = frozenset({"sem_predictor", "sem_sums"})
    early: ClassVar[str] = "mix fewer points"
    grows = True
    """How the messages of early iterations differ from later ones."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self._layout = make_layout(model.design, given["method"])
        iteration = given.get("iteration") or Iteration()
        self.memory = int(given.get("memory", iteration.memory))
        self.iterative = given.get("exchange", "iterative") == "iterative"

    def arguments(self) -> Mapping[str, Any]:
        """Run the dry run without output, and for a few iterations only."""
        short = {"maxiter": min(DRY_RUN_ITERATIONS, int(self.given["maxiter"]))}
        return {"progress": False, **short} if self.iterative else {}

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the iterations of the fit, and of the fit that gives its first coefficients."""
        fits = sum(self.begins in steps for steps in dry_run.rounds)
        iterations = fits * int(self.given["maxiter"])
        return [IterationLoop(self.steps, iterations, fits, sizes=self.memory + 1)]

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Count the entities for which masks hide nothing."""
        dry_run = expected.dry_run
        if not any(entry.masked and entry.kind == "per entity" for entry in dry_run.entries):
            return
        for site, count in count_exposed(self._layout, dry_run.at).items():
            if count:
                yield (
                    "Receivers of sums",
                    f"learn {site}'s own linear predictor for {count:,} of its "
                    f"{len(self._layout.kept[site]):,} entities, because no other site except a receiver "
                    "has a record of them.",
                )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State which shapes are listed."""
        if self.iterative and self.grows:
            yield f"The largest shapes are listed; early iterations {self.early} and send less."


class VFEMGLMPlan(VFEMPlan):
    """Properties of a fit with a response that is not normal, known before it runs."""

    steps: ClassVar[tuple[str, ...]] = ("glm_score", "glm_move", "glm_evaluate")
    begins: ClassVar[str] = "glm_estimates"
    early: ClassVar[str] = "combine fewer steps"

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.grows = not model._fits_jointly(given["method"])

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the iterations, in which the coordinator has all parameters or none."""
        if self.grows:
            return super().loops(dry_run)
        joint = ("joint_score", "joint_predict", "glm_evaluate", "joint_weights")
        return [IterationLoop(joint, int(self.given["maxiter"]))]

    def arguments(self) -> Mapping[str, Any]:
        """Run the dry run without output."""
        return {"progress": False}

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Name the sites that could reconstruct residuals together."""
        yield from super().learned(expected)
        if any("glm_scores" in steps for steps in expected.dry_run.rounds):
            yield (
                "Collusion",
                "For robust errors, two sites receive one random part each of every residual. If they "
                "collude, they learn the residuals, and from these the response, of the entities that both "
                "have.",
            )
