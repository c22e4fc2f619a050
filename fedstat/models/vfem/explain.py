"""The dry-run plan of a VFEM fit: number of iterations, and values that masks do not protect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, FitLengths, IterationLoop
from fedstat.models.explain import ForecastPlan
from fedstat.models.vfem.base_model import make_layout
from fedstat.models.vfem.disclosure_notes import count_exposed

JOINT_ITERATIONS: FitLengths = (4, 8, 20)
"""Where the coordinator has all parameters; simulated data took 6 to 9."""
JOINT_STEPS = frozenset({"joint_predict", "glm_evaluate", "joint_score", "joint_weights"})


class VFEMPlan(ForecastPlan):
    """What is known of a VFEM fit before it runs."""

    iterations: ClassVar[FitLengths] = (12, 40, 100)
    """Of a fit that is short, usual, and long; simulated and recorded data took 12 to 81."""

    counted: ClassVar[str] = "step"
    steps: ClassVar[frozenset[str]] = frozenset({"step", "residuals"})
    begins: ClassVar[str] = "start"
    repeated: ClassVar[frozenset[str]] = frozenset({"sem_predictor", "sem_sums"})
    more_rounds: ClassVar[str] = "rejected or shortened"
    early: ClassVar[str] = "mix fewer points"
    grows = True
    """Whether messages do, from one iteration to the next."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self._layout = make_layout(model.design, given["method"])
        self.iterative = given.get("exchange", "iterative") == "iterative"

    @property
    def lengths(self) -> FitLengths:
        """Iterations of a fit that is short, usual and long, within the limit."""
        low, usual, most = (min(length, int(self.given["maxiter"])) for length in self.iterations)
        return low, usual, most

    def arguments(self) -> Mapping[str, Any]:
        """Let the rehearsed fit go on in silence, and for a short fit's iterations at most."""
        return {"progress": False, "maxiter": self.lengths[0]} if self.iterative else {}

    def loops(self, course: DryRunRecord) -> Sequence[IterationLoop]:
        """Count iterations, of the fit and of that which gives its first coefficients."""
        fits = sum(self.begins in steps for steps in course.rounds)
        low, usual, most = self.lengths  # first coefficients are soon good enough
        lengths = (low, fits * usual, fits * most)
        return [IterationLoop(self.counted, self.steps, lengths, int(self.given.get("memory", 0)) + 1)]

    def learned(self, forecast: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Count the entities at which masks hide nothing."""
        course = forecast.course
        if not any(entry.masked and entry.kind == "per entity" for entry in course.entries):
            return
        for client, count in count_exposed(self._layout, course.at).items():
            if count:
                yield (
                    "Receivers of sums",
                    f"learn {client}'s own linear predictor at {count:,} of its "
                    f"{len(self._layout.kept[client]):,} entities, of which no other institution but a "
                    "receiver has a record.",
                )

    def notes(self, forecast: ExpectedReleases) -> Iterator[str]:
        """Say where the number of iterations comes from."""
        if self.iterative:
            low, usual, high = self.lengths
            yield (
                f"The number of iterations depends on the data: {usual} is a guess from fits of simulated "
                f"and recorded data, {low} to {high} its range, and maxiter={self.given['maxiter']:,} the "
                f"limit. Steps that are {self.more_rounds} add rounds."
            )
            if self.grows:
                yield f"Largest shapes are shown; early iterations {self.early} and send less."


class VFEMGLMPlan(VFEMPlan):
    """What is known of a fit before it runs, where the response is not normal."""

    iterations: ClassVar[FitLengths] = (8, 12, 30)
    """Of a fit that is short, usual, and long; simulated data took 7 to 15, recorded data 19 to 21."""

    counted: ClassVar[str] = "glm_score"
    steps: ClassVar[frozenset[str]] = frozenset({"glm_score", "glm_move", "glm_evaluate"})
    begins: ClassVar[str] = "glm_estimates"
    more_rounds: ClassVar[str] = "shortened"
    early: ClassVar[str] = "combine fewer steps"

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.grows = not model._fits_jointly(given["method"])

    @property
    def lengths(self) -> FitLengths:
        """Iterations of a fit that is short, usual and long, within the limit."""
        if self.grows:
            return super().lengths
        low, usual, most = (min(length, int(self.given["maxiter"])) for length in JOINT_ITERATIONS)
        return low, usual, most

    def loops(self, course: DryRunRecord) -> Sequence[IterationLoop]:
        """Count iterations, at which the coordinator has all parameters or none."""
        if self.grows:
            return super().loops(course)
        return [IterationLoop("joint_score", JOINT_STEPS, self.lengths)]

    def arguments(self) -> Mapping[str, Any]:
        """Let the rehearsed fit go on in silence."""
        return {"progress": False}

    def learned(self, forecast: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Name those who could put residuals together."""
        yield from super().learned(forecast)
        if any("glm_scores" in steps for steps in forecast.course.rounds):
            yield (
                "Collusion",
                "For robust errors two institutions are told a random part each of every residual: together "
                "they have the residuals, and with these the response, of the entities that both have.",
            )
