"""What one institution answers for a private generalised linear model: a release of other scores."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.message import Step
from fedstat.models.copula.steps import invented_steps, release_steps
from fedstat.models.copula_glm.asked import MomentsAsked

FAMILY = "copula_glm"
STEPS: Mapping[str, Step] = release_steps(MomentsAsked)
INSTEAD = invented_steps(FAMILY)
"""Steps that stand for those that read rows where there are none."""
