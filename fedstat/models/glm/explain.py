"""What the sites of a federated GLM would answer: shapes, entities and harmless numbers, by step.

Scores shrink as those of Newton's method do, so that a rehearsed fit ends after the number of evaluations
that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedstat.federation.forecast.rehearsal import Answers, Course, StandIn
from fedstat.federation.message import Ask, Reply
from fedstat.models.explain import settled
from fedstat.models.glm.steps import FAMILY
from fedstat.models.horizontal.explain_rows import RowsStandIns, rows_notes
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.typing import Array

EVALUATIONS = (3, 4, 8)
"""Of a fit that starts close to the maximum, usual, and hard; simulated and recorded data took 3 to 7."""
FROM_LEAST_SQUARES = (1, 1, 3)
"""Own fits of the sites add up to the estimate, unless a site has none."""
CLUSTERS = 2


class GLMPlan:
    """What is known of a federated GLM before it is fitted.

    Parameters
    ----------
    model : HorizontalModel
    fit : callable
        Its fit.
    arguments : mapping of str to object
        Of the fit.
    """

    def __init__(
        self, model: HorizontalModel, fit: Callable[..., object], arguments: Mapping[str, Any]
    ) -> None:
        self._given = settled(fit, arguments)
        self._rows = RowsStandIns(model.agreement)
        self._K = len(model.sites)
        squares = (model.family_spec.name, model.family_spec.link) == ("Gaussian", "Identity")
        usual = FROM_LEAST_SQUARES if squares and self._given["local"] else EVALUATIONS
        first, expected, most = (min(length, int(self._given["maxiter"])) for length in usual)
        self.lengths = (first, expected, most)

    @property
    def guessed(self) -> frozenset[str]:
        """Steps whose shapes are not known in advance."""
        return frozenset({"list_clusters", "sum_clusters"})

    def arguments(self, length: int) -> Mapping[str, Any]:
        """Nothing but what was given: the scores tell when to end."""
        return {}

    def dealers(self) -> Mapping[tuple[str, str], str]:
        """Nobody deals."""
        return {}

    def learned(self, course: Course) -> Iterator[tuple[str, str]]:
        """Say what a site's own fit tells."""
        if any(entry.step == "fit_alone" for entry in course.entries):
            yield (
                "Coordinator",
                "learns every site's own fit, with the means and deviations of its columns. local=False "
                "leaves it out, and with it the comparison of the sites.",
            )

    def notes(self) -> Iterator[str]:
        """Say where the number of evaluations comes from, and what is not known."""
        low, usual, most = self.lengths
        if self._given["rounds"] is not None:
            yield f"rounds={self._given['rounds']} fixes the number of evaluations."
        else:
            yield (
                f"The number of evaluations depends on the data: {usual} is a guess from fits of simulated "
                f"and recorded data, {low} to {most} its range. Steps that are halved add to it."
            )
        if self._given["cov_type"] in ("cluster", "survey"):
            yield (
                "How many clusters there are is not known in advance: sizes marked '?' are those of "
                f"{CLUSTERS} clusters a site."
            )
        if self._given["local"]:
            yield "A site whose own fit fails says why in a text, which takes some bytes more."
        yield from rows_notes()

    def answers(self, length: int) -> Answers:
        """How the stand-ins answer, by step."""
        self._length = length
        by_step = {
            "start": self._start,
            "fit_alone": self._fit_alone,
            "sum_scores": self._sum_scores,
            "judge": self._judge,
            "sum_nb2": self._sum_nb2,
            "list_clusters": self._list_clusters,
            "sum_clusters": self._sum_clusters,
        }
        return {**self._rows.answers(), **{(FAMILY, step): answer for step, answer in by_step.items()}}

    def _reply(self, site: StandIn, arrays: Mapping[str, Array], text: str = "") -> Reply:
        return site.reply(arrays, text, self._rows.n[site.name])

    def _start(self, site: StandIn, ask: Ask) -> Reply:
        n = float(self._rows.n[site.name])
        site.memory["evaluations"] = 0
        return self._reply(site, {"response": np.array([n, n / 2.0, n])})

    def _fit_alone(self, site: StandIn, ask: Ask) -> Reply:
        n, p = float(self._rows.n[site.name]), self._rows.p
        arrays = {
            "beta": np.zeros(p),
            "information": n * np.eye(p),
            "columns": np.array([np.zeros(p), np.ones(p)]),
            "pearson": np.array(n),
        }
        return self._reply(site, arrays, json.dumps({"problem": ""}))

    def _score(self, site: StandIn, size: int) -> Array:
        """Score whose Newton step has the length of the present evaluation, in standard errors."""
        site.memory["evaluations"] += 1
        left = max(self._length - site.memory["evaluations"], 0)
        score = np.zeros(size)
        score[0] = (self._given["tol"] / 100.0) ** (0.5**left) / np.sqrt(self._K)
        return score

    def _sum_scores(self, site: StandIn, ask: Ask) -> Reply:
        n, p = float(self._rows.n[site.name]), self._rows.p
        started = "beta" in ask.arrays
        arrays = {
            "inside": np.array(True),
            "spread": np.array(True),
            "score": self._score(site, p) if started else np.zeros(p),
            "information": np.eye(p),
            "totals": np.full(3, n),
        }
        if ask.arrays["observed"]:
            arrays["observed"] = np.eye(p)
        if "null" in ask.arrays:
            arrays["null"] = np.array([0.0, 1.0, n])
        return self._reply(site, arrays)

    def _judge(self, site: StandIn, ask: Ask) -> Reply:
        p = self._rows.p
        arrays: dict[str, Array] = {"defined": np.ones(3, dtype=bool), "fit": np.zeros(3)}
        arrays |= {name: np.eye(p) for name in ("meat", "between") if ask.arrays[name]}
        if ask.arrays["apart"]:
            arrays["apart"] = np.array([0.0, float(p)])
        return self._reply(site, arrays)

    def _sum_nb2(self, site: StandIn, ask: Ask) -> Reply:
        p = self._rows.p
        if not site.memory.get("with alpha"):
            site.memory |= {"with alpha": True, "evaluations": 0}
        arrays = {
            "inside": np.array(True),
            "score": self._score(site, p + 1),
            "information": np.eye(p + 1),
            "llf": np.array(0.0),
        }
        return self._reply(site, arrays)

    def _list_clusters(self, site: StandIn, ask: Ask) -> Reply:
        """Clusters and strata that no other site has; without strata all are in stratum 0."""
        own = np.arange(1, CLUSTERS + 1) + CLUSTERS * list(self._rows.n).index(site.name)
        strata = own[:1] if json.loads(ask.text)["strata"] else np.zeros(1, dtype=np.int64)
        return self._reply(site, {"clusters": own, "strata": strata})

    def _sum_clusters(self, site: StandIn, ask: Ask) -> Reply:
        p, shared, spanning = self._rows.p, len(ask.arrays["shared"]), len(ask.arrays["spanning"])
        nothing = np.zeros(0, dtype=np.int64)
        arrays = {
            "counts": np.full(spanning, float(CLUSTERS)),
            "sums": np.zeros((spanning, p)),
            "outer": np.tile(np.eye(p), (spanning, 1, 1)),
            "shared": nothing,
            "shared_strata": nothing,
            "shared_sums": np.zeros((shared, p)),
            "within": np.eye(p),
            "lonely": np.array([1, 0]),
        }
        return self._reply(site, arrays)
