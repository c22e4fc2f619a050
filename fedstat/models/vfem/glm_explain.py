"""What is known of a VFEM fit before it runs, in other families than the normal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedstat.federation.forecast.forecast import Lengths
from fedstat.models.vfem.explain import VFEMPlan


class VFEMGLMPlan(VFEMPlan):
    """What is known of a fit before it runs."""

    iterations: ClassVar[Lengths] = (8, 12, 30)
    """Of a fit that is short, usual, and long; simulated data took 7 to 15, recorded data 19 to 21."""

    counted: ClassVar[str] = "glm_score"
    steps: ClassVar[frozenset[str]] = frozenset({"glm_score", "glm_move", "glm_evaluate"})
    begins: ClassVar[str] = "glm_estimates"
    more_rounds: ClassVar[str] = "shortened"
    early: ClassVar[str] = "combine fewer steps"

    def arguments(self) -> Mapping[str, Any]:
        """Let the rehearsed fit go on in silence."""
        return {"progress": False}
