"""What VFEM's sites would answer: shapes, entities and harmless numbers, one function per step.

The numbers keep a rehearsed fit on its way: a response of mean 0 and variance 1, blocks of independent
columns of variance 1 and coefficients of zero are where the iteration stays, and scores are large, so that it
goes on to the number of iterations that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from fedstat.federation.door.guards import check_groups
from fedstat.federation.forecast.rehearsal import Answers, Course, StandIn
from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.product_steps import Part
from fedstat.kernels.sketch import single_sketches
from fedstat.models.explain import settled
from fedstat.models.vertical.explain_products import ProductStandIns
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.blocks.layout import make_layout
from fedstat.models.vfem.blocks.request import FAMILY
from fedstat.models.vfem.moments.secure_product_steps import RESPONSE
from fedstat.models.vfem.moments.staged_columns import SKETCH_KINDS, STAGES
from fedstat.models.vfem.statements.exposure import count_exposed
from fedstat.typing import Array, Ints


class VFEMPlan:
    """What is known of a VFEM fit before it runs.

    Parameters
    ----------
    model : VerticalModel
    fit : callable
        Its fit.
    arguments : mapping of str to object
        Of the fit.
    """

    iterations: ClassVar[tuple[int, int, int]] = (12, 40, 100)
    """Of a fit that is short, usual, and long; simulated and recorded data took 12 to 81."""

    def __init__(
        self, model: VerticalModel, fit: Callable[..., object], arguments: Mapping[str, Any]
    ) -> None:
        design, given = model.design, settled(fit, arguments)
        self._widths = {block.client: len(block.names) for block in design.blocks}
        self._layout = make_layout(design, model.partition.rows[design.active], given["method"])
        self._exchange, self._maxiter = given.get("exchange", "iterative"), int(given["maxiter"])
        self._products = ProductStandIns(self._own, hold_product, lambda columns: columns in STAGES)
        first, usual, most = (min(length, self._maxiter) for length in self.iterations)
        self.lengths = (first, usual, most) if self._exchange == "iterative" else (self._maxiter,) * 3

    @property
    def guessed(self) -> frozenset[str]:
        """All shapes are known."""
        return frozenset()

    def arguments(self, length: int) -> Mapping[str, Any]:
        """Let the rehearsed fit go on for so many iterations, in silence."""
        return {"maxiter": length} | ({"progress": False} if self._exchange == "iterative" else {})

    def dealers(self) -> Mapping[tuple[str, str], str]:
        """Who deals for each secure product."""
        return self._products.dealers

    def learned(self, course: Course) -> Iterator[tuple[str, str]]:
        """Count the entities at which masks hide nothing."""
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

    def notes(self) -> Iterator[str]:
        """Say where the number of iterations comes from."""
        if self._exchange == "iterative":
            low, usual, high = self.lengths
            yield (
                f"The number of iterations depends on the data: {usual} is a guess from fits of simulated "
                f"and recorded data, {low} to {high} its range, and maxiter={self._maxiter:,} the limit. "
                "Steps that are rejected or shortened add rounds."
            )
            yield "Largest shapes are shown; early iterations mix fewer points and send less."

    def answers(self, length: int) -> Answers:
        """How the stand-ins answer, by step."""
        self._products.dealers.clear()
        by_step = {
            "start": self._start,
            "set_rate": lambda site, ask: site.reply(),
            "step": self._step,
            "shorten": self._shorten,
            "estimates": self._estimates,
            "start_response": self._start_response,
            "residuals": self._residuals,
            "fitted": self._fitted,
            "information": self._information,
            "scores": self._scores,
            "response_products": self._response_products,
            "sketch": self._sketch,
            "release_columns": self._release_columns,
            "multiply_columns": self._multiply_columns,
            "sem_constants": self._sem_constants,
            "sem_predictor": self._sem_predictor,
            "sem_sums": self._sem_sums,
            "stage_block": self._stage_block,
            "pattern_sums": self._pattern_sums,
            "sum_with_response": self._sum_with_response,
        }
        return {
            **self._products.answers(FAMILY),
            **{(FAMILY, step): answer for step, answer in by_step.items()},
        }

    # ---- the client's block --------------------------------------------------------------------

    def _stage(self, site: StandIn, ask: Ask) -> None:
        seen = int(ask.arrays["keep"].sum())
        n, filled = int(ask.arrays["n"]), bool(ask.arrays["filled"])
        site.memory |= {"own": seen, "rows": n if filled else seen, "n": n}

    def _stage_block(self, site: StandIn, ask: Ask) -> Reply:
        self._stage(site, ask)
        return site.reply()

    def _start(self, site: StandIn, ask: Ask) -> Reply:
        self._stage(site, ask)
        site.memory |= {"padded": bool(ask.arrays["padded"]), "most": int(ask.arrays["memory"]) + 1}
        return site.reply(self._points(site, 1) | {"eigenvalues": np.ones(2)}, entities=site.memory["own"])

    def _points(self, site: StandIn, points: int) -> dict[str, Array]:
        """Describe so many points, and remember whether the first of them has been evaluated."""
        site.memory["points"] = points
        site.memory["bare"] = points == 1
        return {
            "linear_predictor": self._predictor(site),
            "centres": np.zeros((points, points)),
            "spreads": np.zeros((points,) * 3),
        }

    def _predictor(self, site: StandIn) -> Array:
        return np.zeros(site.memory["n" if site.memory["padded"] else "rows"])

    def _step(self, site: StandIn, ask: Ask) -> Reply:
        bare, points = site.memory["bare"], min(site.memory["points"] + 1, site.memory["most"])
        arrays = self._points(site, 1 if bare else points)
        site.memory["bare"] = False
        products = np.zeros(site.memory["points"])
        products[-1] = 1.0
        arrays |= {
            "inside": np.array(1),
            "log_likelihood": np.array(0.0),
            "score2": np.array(float(site.memory["n"])),
            "change": np.array(1.0),
            "products": products,
            "recentring": np.array(0.0),
        }
        return site.reply(arrays, entities=site.memory["own"])

    def _shorten(self, site: StandIn, ask: Ask) -> Reply:
        arrays = self._points(site, 1) | {"recentring": np.array(0.0)}
        return site.reply(arrays, entities=site.memory["own"])

    def _estimates(self, site: StandIn, ask: Ask) -> Reply:
        p = self._widths[site.name]
        arrays = {"beta": np.zeros(p), "mu": np.zeros(p), "t": np.array(0.0)}
        return site.reply(arrays, entities=site.memory["own"])

    # ---- the response --------------------------------------------------------------------------

    def _start_response(self, site: StandIn, ask: Ask) -> Reply:
        site.memory["counts"] = np.bincount(ask.arrays["code"]).astype(float)
        return site.reply({"moments": np.array([0.0, 1.0])}, entities=len(ask.arrays["code"]))

    def _residuals(self, site: StandIn, ask: Ask) -> Reply:
        counts, n = site.memory["counts"], len(ask.arrays["eta"])
        a, s2 = float(ask.arrays["a"]), float(ask.arrays["s2"])
        arrays = {"z": np.zeros(n), "z1": -a * counts / s2, "z2": counts / s2**2}
        return site.reply(arrays, entities=n)

    def _fitted(self, site: StandIn, ask: Ask) -> Reply:
        n = int(site.memory["counts"].sum())
        return site.reply({"fitted": np.zeros(n), "residuals": np.zeros(n)}, entities=n)

    # ---- covariances ---------------------------------------------------------------------------

    def _information(self, site: StandIn, ask: Ask) -> Reply:
        p, own = self._widths[site.name], float(site.memory["own"])
        site.memory["clients"] = K = ask.arrays["others"].shape[1]
        arrays = {
            "beta": np.zeros(p),
            "w": np.zeros(p),
            "own": own * np.eye(2 * p),
            "gram": own * np.eye(p),
            "by_v": np.zeros((1 + K, p)),
            "by_z": np.zeros((1 + K, p)),
            "J": np.zeros((2 * p, 2 * p)),
            "j": np.zeros(2 * p),
            "N": np.array(0.0),
        }
        return site.reply(arrays, entities=site.memory["own"])

    def _scores(self, site: StandIn, ask: Ask) -> Reply:
        width = self._staged_width(site, "scores")
        arrays = {"gram": np.eye(width), "with_response": np.zeros((width, 2 + site.memory["clients"]))}
        return site.reply(arrays, entities=site.memory["own"])

    def _response_products(self, site: StandIn, ask: Ask) -> Reply:
        arrays = {"gram": np.eye(2 + ask.arrays["missing"].shape[1])}
        return site.reply(arrays, entities=int(site.memory["counts"].sum()))

    def _staged_width(self, site: StandIn, stage: str) -> int:
        p = self._widths[site.name]
        return 2 * p + 1 if stage == "scores" else p

    def _sketch(self, site: StandIn, ask: Ask) -> Reply:
        size = int(ask.arrays["size"])
        if SKETCH_KINDS[int(ask.arrays["kind"])] == "structured":
            size = int(np.prod(single_sketches(site.memory["n"], size)))
        width = self._staged_width(site, STAGES[int(ask.arrays["stage"])])
        arrays = {"sketch": np.zeros((size, width)), "error": np.array(0.0)}
        return site.reply(arrays, entities=site.memory["own"])

    def _release_columns(self, site: StandIn, ask: Ask) -> Reply:
        width = self._staged_width(site, STAGES[int(ask.arrays["stage"])])
        return site.reply({"columns": np.zeros((site.memory["rows"], width))}, entities=site.memory["own"])

    def _multiply_columns(self, site: StandIn, ask: Ask) -> Reply:
        width = self._staged_width(site, STAGES[int(ask.arrays["stage"])])
        arrays = {"products": np.zeros((ask.arrays["columns"].shape[1], width))}
        return site.reply(arrays, entities=site.memory["own"])

    def _sem_constants(self, site: StandIn, ask: Ask) -> Reply:
        p, own = self._widths[site.name], float(site.memory["own"])
        site.memory["clients"] = K = ask.arrays["others"].shape[1]
        arrays = {
            "beta": np.zeros(p),
            "mu": np.zeros(p),
            "Sigma": np.eye(p),
            "scale": np.ones(p),
            "s1": np.zeros((1 + K, p)),
            "S2": own * np.eye(p),
        }
        return site.reply(arrays, entities=site.memory["own"])

    def _sem_predictor(self, site: StandIn, ask: Ask) -> Reply:
        return site.reply({"linear_predictor": self._predictor(site)}, entities=site.memory["own"])

    def _sem_sums(self, site: StandIn, ask: Ask) -> Reply:
        p = self._widths[site.name]
        arrays = {
            "gradient": -site.memory["n"] * ask.arrays["beta"],
            "mu": np.zeros(p),
            "Sigma": np.eye(p),
            "u_z": np.zeros((site.memory["clients"], p)),
        }
        return site.reply(arrays, entities=site.memory["own"])

    # ---- moments and secure products -----------------------------------------------------------

    def _pattern_sums(self, site: StandIn, ask: Ask) -> Reply:
        G, response = int(ask.arrays["groups"]), bool(ask.arrays["response"])
        q = 1 if response else self._widths[site.name]
        site.hold("minimum count", check_groups, site.data, ask.arrays["code"], 0 if response else q)
        arrays = {
            "sums": np.zeros((G, q)),
            "grams": np.zeros((G, q, q)),
            "units": np.eye(2)[:, 1:] * np.ones(q),
        }
        entities = int(site.memory["counts"].sum()) if response else site.memory["own"]
        return site.reply(arrays, entities=entities)

    def _sum_with_response(self, site: StandIn, ask: Ask) -> Reply:
        p = self._widths[site.name]
        site.hold("minimum count", check_groups, site.data, ask.arrays["code"], p)
        return site.reply({"products": np.zeros((int(ask.arrays["groups"]), p))}, entities=site.memory["own"])

    def _own(self, site: StandIn, part: Part) -> int:
        return int(site.memory["counts"].sum()) if part.columns == RESPONSE else int(site.memory["own"])


def hold_product(site: StandIn, part: Part, group: Ints) -> None:
    """Apply the rule on entities behind a product; one of the columns may be the response."""
    both = part.product.columns_a + part.product.columns_b
    site.hold("minimum count", check_groups, site.data, group, both - 1)
