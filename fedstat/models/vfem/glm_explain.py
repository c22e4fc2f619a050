"""What VFEM's sites would answer in other families than the normal: one function per step.

Shapes and entities are those of a fit. The numbers keep a rehearsed one on its way: every step raises the
log-likelihood, and the score is large until the iteration at which the fit is to converge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from fedstat.federation.forecast.rehearsal import Answers, StandIn
from fedstat.federation.message import Ask, Reply
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.blocks.request import FAMILY
from fedstat.models.vfem.explain import VFEMPlan
from fedstat.typing import Array


class VFEMGLMPlan(VFEMPlan):
    """What is known of a fit before it runs.

    Parameters
    ----------
    model : VerticalModel
    fit : callable
        Its fit.
    arguments : mapping of str to object
        Of the fit.
    """

    iterations: ClassVar[tuple[int, int, int]] = (8, 12, 30)
    """Of a fit that is short, usual, and long; simulated data took 7 to 15, recorded data 19 to 21."""

    def __init__(
        self, model: VerticalModel, fit: Callable[..., object], arguments: Mapping[str, Any]
    ) -> None:
        super().__init__(model, fit, arguments)
        self._length = self.lengths[1]

    def arguments(self, length: int) -> Mapping[str, Any]:
        """In silence; the stand-ins end the rehearsed fit, unless `maxiter` does."""
        return {"progress": False}

    def notes(self) -> Iterator[str]:
        """Say where the number of iterations comes from."""
        low, usual, high = self.lengths
        yield (
            f"The number of iterations depends on the data: {usual} is a guess from fits of simulated "
            f"and recorded data, {low} to {high} its range, and maxiter={self._maxiter:,} the limit. "
            "Steps that are shortened add rounds."
        )
        yield "Largest shapes are shown; early iterations combine fewer steps and send less."

    def answers(self, length: int) -> Answers:
        """How the stand-ins answer, by step."""
        self._length = length
        by_step = {
            "glm_start": self._glm_start,
            "glm_score": self._glm_score,
            "glm_move": self._glm_move,
            "glm_estimates": self._glm_estimates,
            "glm_information": self._information,
            "glm_start_response": self._glm_start_response,
            "glm_evaluate": self._glm_evaluate,
            "glm_curvature": self._glm_curvature,
            "glm_fitted": self._fitted,
        }
        return {**super().answers(length), **{(FAMILY, step): answer for step, answer in by_step.items()}}

    # ---- the client's block --------------------------------------------------------------------

    def _glm_start(self, site: StandIn, ask: Ask) -> Reply:
        self._stage(site, ask)
        site.memory |= {"scores": 0, "memory": int(ask.arrays["memory"])}
        return site.reply()

    def _glm_score(self, site: StandIn, ask: Ask) -> Reply:
        kept = min(site.memory["scores"], site.memory["memory"])
        site.memory["scores"] += 1
        yhy = np.zeros((kept + 1, kept + 1))
        if site.memory["scores"] < self._length or self._length == self._maxiter:
            yhy[-1, -1] = site.memory["n"]
        return site.reply({"sy": np.zeros((kept, kept + 1)), "yhy": yhy}, entities=site.memory["own"])

    def _glm_move(self, site: StandIn, ask: Ask) -> Reply:
        scalars = ("centre", "spread", "log_likelihood", "change")
        arrays: dict[str, Array] = {name: np.array(0.0) for name in scalars}
        arrays |= {"inside": np.array(1), "linear_predictor": np.zeros(site.memory["n"])}
        return site.reply(arrays, entities=site.memory["own"])

    def _glm_estimates(self, site: StandIn, ask: Ask) -> Reply:
        p = self._widths[site.name]
        arrays = {"beta": np.zeros(p), "mu": np.zeros(p), "shift": np.array(0.0), "t": np.array(0.0)}
        return site.reply(arrays, entities=site.memory["own"])

    # ---- the response --------------------------------------------------------------------------

    def _glm_start_response(self, site: StandIn, ask: Ask) -> Reply:
        n = len(ask.arrays["code"])
        site.memory |= {"counts": np.bincount(ask.arrays["code"]).astype(float), "height": 0.0}
        return site.reply({"null": np.array([0.5, -float(n)])}, entities=n)

    def _glm_evaluate(self, site: StandIn, ask: Ask) -> Reply:
        counts = site.memory["counts"]
        n, zero = int(counts.sum()), np.zeros_like(counts)
        site.memory["height"] += float(n)  # rises by more than any score promises
        arrays = {
            "inside": np.array(1),
            "z": np.zeros(n),
            "h": np.ones(n),
            "sums": np.column_stack([zero, zero, counts, zero]),
            "log_likelihood": np.array(site.memory["height"]),
        }
        return site.reply(arrays, entities=n)

    def _glm_curvature(self, site: StandIn, ask: Ask) -> Reply:
        counts = site.memory["counts"]
        n, zero = int(counts.sum()), np.zeros_like(counts)
        sums = np.column_stack([counts, zero, zero, zero, zero])
        return site.reply({"h": np.ones(n), "cross": np.zeros(n), "sums": sums}, entities=n)
