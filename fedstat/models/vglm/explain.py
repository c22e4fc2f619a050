"""What the sites of a vertical generalised linear model would answer: shapes, entities, harmless numbers.

Of the families other than the normal one, the numbers are those of a small problem of least squares without
correlations, whose first Hessian is wrong by a factor: so far as it is wrong, so many steps does a rehearsed
fit take. Every site knows the coefficients that it is sent, and from them its part of the loss, which its
linear predictors carry, and its scores. Of ADMM, residuals stay large for a number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.federation.door.guards import check_entities, check_groups
from fedstat.federation.forecast.rehearsal import Answers, Course, StandIn
from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.product_steps import Part
from fedstat.models.explain import settled
from fedstat.models.vertical.explain_products import ProductStandIns
from fedstat.models.vglm.exchange import steps
from fedstat.models.vglm.exchange.gram import FAMILY
from fedstat.models.vglm.exchange.layout import Layout
from fedstat.models.vglm.response import steps as response_steps
from fedstat.models.vglm.response.distributions import typical_mean
from fedstat.typing import Floats, Ints

LARGEST = 0.5
"""Largest coefficient of the small problem."""
RESIDUAL = 0.01
DEVIANCE = 0.25
"""Half the mean deviance of the intercept alone where a dispersion is estimated: columns have to matter."""

FEW = 20
"""Entities for each column, below which a likelihood is far from a quadratic function."""


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How long a rehearsed fit takes.

    Parameters
    ----------
    factor, later : float
        By which the first Hessian, and those after it, are wrong.
    rounds, more : int
        Of ADMM, for the first lasso of a lambda, and for each of those that follow.
    lassos : int
        Of ADMM, for one lambda of a nonconvex penalty.
    """

    factor: float
    later: float
    rounds: int
    more: int
    lassos: int


DIFFICULTIES = (
    Difficulty(1.0, 1.0, 5, 1, 2),
    Difficulty(1.4, 1.15, 30, 4, 25),
    Difficulty(4.0, 2.2, 100, 5, 40),
)
"""Of a fit that is short, usual and long."""


class VGLMPlan:
    """What is known of a fit of a vertical generalised linear model before it runs.

    Parameters
    ----------
    model : VerticalModel
        With its layout.
    fit : callable
        Its fit.
    arguments : mapping of str to object
        Of the fit.
    """

    def __init__(self, model: Any, fit: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        self._layout: Layout = model.layout
        self._given = settled(fit, arguments)
        self._normal = model.family_spec.name == "Gaussian" and self._given["exchange"] == "products"
        self._mean = typical_mean(model.family_spec)
        self._least = 1.0 - float(model.family_spec.make().link(self._mean))
        if model.family_spec.estimates_scale and not self._normal:
            self._least -= 1.0 - DEVIANCE
        self._products = ProductStandIns(self._own, hold_product, lambda name: name == steps.WEIGHTED)
        self._first = True
        self.lengths = (0, 0, 0) if self._normal else (0, 1, 2)

    @property
    def guessed(self) -> frozenset[str]:
        """All shapes are known."""
        return frozenset()

    def arguments(self, length: int) -> Mapping[str, Any]:
        """Nothing but what was given: the numbers tell when to end."""
        return {}

    def dealers(self) -> Mapping[tuple[str, str], str]:
        """Who deals for each secure product."""
        return self._products.dealers

    def learned(self, course: Course) -> Iterator[tuple[str, str]]:
        """Say what sums of products, and linear predictors at known coefficients, tell."""
        layout, coordinator = (
            self._layout,
            "Coordinator" if course.at is None else f"Coordinator, at {course.at}",
        )
        if self._normal:
            yield (
                coordinator,
                f"learns means, variances and all correlations of the {layout.p} columns and the response"
                f"{self._parts()}. Of a column with two values these are counts and means in its groups.",
            )
            return
        points = len({e.round for e in course.entries if e.step in ("linear_predictor", "admm_move")})
        yield (
            coordinator,
            f"learns {points} sums of the institutions' linear predictors for every entity. As many as there "
            f"are columns ({layout.p}) determine the rows of ALL institutions, masked or not, where their "
            "coefficients are known"
            + (
                "; here it knows those at the end of each lambda only."
                if self._given["exchange"] == "admm"
                else ", as they are here."
            ),
        )
        yield (
            "Institutions",
            "learn the response of every entity from its residuals and weights.",
        )

    def _parts(self) -> str:
        if self._layout.rows is not None:
            return ", by missing pattern"
        cut = self._given["select"] == "cv" or self._given["draws"] or self._given["splits"] > 1
        if not cut and self._given["inference"] == "split":
            return ", in each of 2 random halves of the entities"
        return f", in each of {self._given['folds']} random parts of the entities" if cut else ""

    def notes(self) -> Iterator[str]:
        """Say where the numbers of steps come from."""
        if self._normal:
            yield "Nothing here depends on the values of the data: the fit takes these rounds and bytes."
        elif self._given["exchange"] == "admm":
            low, usual, most = (one.rounds for one in DIFFICULTIES)
            yield (
                f"The number of rounds depends on the data: {usual} for the first lasso of a lambda is a "
                f"guess from fits of simulated data, {low} to {most} its range, and "
                f"maxiter={self._given['maxiter']:,} the limit."
            )
        else:
            yield (
                "The number of steps depends on the data: it is that of a small problem that is as hard as "
                "fits of simulated data were, and of an easier and a harder one. At most "
                f"{self._layout.most_grams} weighted Gram matrices are released over {self._layout.n:,} "
                "entities."
            )
            if self._layout.n < FEW * self._layout.p:
                yield (
                    f"There are fewer than {FEW} entities for each column: fits of simulated data that were "
                    "as scarce took up to three times the largest number of rounds."
                )

    def answers(self, length: int) -> Answers:
        """How the stand-ins answer, by step."""
        self._products.dealers.clear()
        self._difficulty = DIFFICULTIES[length]
        by_step = {
            "stage_block": self._stage_block,
            "stage_response": self._stage_response,
            "sum_products": self._sum_products,
            "sum_with_response": self._sum_with_response,
            "sum_response": self._sum_response,
            "linear_predictor": self._linear_predictor,
            "respond": self._respond,
            "sum_scores": self._sum_scores,
            "weigh": self._weigh,
            "admm_start": lambda site, ask: self._of_block(site, {}),
            "admm_adapt": lambda site, ask: self._of_block(site, {}),
            "admm_largest": lambda site, ask: self._of_block(site, {"largest": np.array(LARGEST)}),
            "admm_set": self._admm_set,
            "admm_move": lambda site, ask: self._of_block(site, {"linear_predictor": self._nothing(site)}),
            "admm_certify": self._admm_certify,
            "admm_coefficients": lambda site, ask: self._of_block(site, {"beta": self._truth(site) / 2.0}),
            "admm_respond": self._admm_respond,
        }
        return {
            **self._products.answers(FAMILY),
            **{(FAMILY, step): answer for step, answer in by_step.items()},
        }

    # ---- the client's block --------------------------------------------------------------------

    def _width(self, site: StandIn) -> int:
        return dict(zip(self._layout.clients, self._layout.sizes, strict=True))[site.name]

    def _truth(self, site: StandIn) -> Floats:
        """Coefficients at which the small problem has its minimum."""
        place = self._layout.places()[site.name]
        return np.asarray(LARGEST / (1.0 + np.arange(place.start, place.stop)))

    def _nothing(self, site: StandIn) -> Floats:
        return np.zeros(site.memory["n"])

    def _of_block(self, site: StandIn, arrays: Mapping[str, Any]) -> Reply:
        return site.reply(arrays, entities=site.memory["n"])

    def _stage_block(self, site: StandIn, ask: Ask) -> Reply:
        p, n = self._width(site), int(ask.arrays["keep"].sum())
        site.memory |= {"n": n, "beta": np.zeros(p), "grams": 0}
        site.hold("minimum count", check_entities, site.data, n)
        return self._of_block(site, {"units": np.array([np.zeros(p), np.ones(p)])})

    def _sum_products(self, site: StandIn, ask: Ask) -> Reply:
        p, G, code = self._width(site), int(ask.arrays["groups"]), ask.arrays["code"]
        site.hold("minimum count", check_groups, site.data, code, p)
        counts = np.bincount(code[code >= 0], minlength=G)
        grams = counts[:, None, None] * np.eye(p)
        return self._of_block(site, {"sums": np.zeros((G, p)), "grams": grams})

    def _sum_with_response(self, site: StandIn, ask: Ask) -> Reply:
        p, G = self._width(site), int(ask.arrays["groups"])
        site.hold("minimum count", check_groups, site.data, ask.arrays["code"], p)
        return self._of_block(site, {"products": np.zeros((G, p))})

    def _linear_predictor(self, site: StandIn, ask: Ask) -> Reply:
        """Carry the block's part of the loss, less that at zero, in every entity."""
        beta, truth = ask.arrays["beta"], self._truth(site)
        site.memory["beta"] = beta
        part = float((beta - truth) @ (beta - truth) - truth @ truth) / 2.0
        return self._of_block(site, {"linear_predictor": np.full(site.memory["n"], part)})

    def _sum_scores(self, site: StandIn, ask: Ask) -> Reply:
        scores = np.count_nonzero(ask.arrays["residual"]) * (self._truth(site) - site.memory["beta"])
        return self._of_block(site, {"scores": scores})

    def _weigh(self, site: StandIn, ask: Ask) -> Reply:
        p, n, earlier = self._width(site), site.memory["n"], site.memory["grams"]
        every = np.zeros(n, dtype=np.int64)
        site.hold("minimum count", check_groups, site.data, every, p, earlier + 1)
        site.memory["grams"] = earlier + 1
        heavy = every[ask.arrays["weight"] > 0.0]
        site.hold("minimum count", check_groups, site.data, heavy, p)
        factor = self._difficulty.factor if earlier == 0 else self._difficulty.later
        gram = factor * ask.arrays["weight"].sum() * np.eye(p)
        return site.reply({"sums": np.zeros(p), "gram": gram}, entities=len(heavy))

    def _admm_set(self, site: StandIn, ask: Ask) -> Reply:
        site.memory["lassos"] = 1 + (site.memory.get("lassos", 0) if ask.arrays["linearise"] else 0)
        self._first = site.memory["lassos"] == 1
        return self._of_block(site, {})

    def _admm_certify(self, site: StandIn, ask: Ask) -> Reply:
        last = site.memory["lassos"] >= self._difficulty.lassos
        return self._of_block(site, {"violation": np.array(0.0 if last else LARGEST)})

    # ---- the response --------------------------------------------------------------------------

    def _of_response(self, site: StandIn, arrays: Mapping[str, Any]) -> Reply:
        return site.reply(arrays, entities=site.memory["responses"])

    def _stage_response(self, site: StandIn, ask: Ask) -> Reply:
        site.memory |= {"responses": int(ask.arrays["keep"].sum()), "asked": 0}
        site.hold("minimum count", check_entities, site.data, site.memory["responses"])
        return self._of_response(site, {"moments": np.array([self._mean, 1.0, 0.0])})

    def _sum_response(self, site: StandIn, ask: Ask) -> Reply:
        code, G = ask.arrays["code"], int(ask.arrays["groups"])
        site.hold("minimum count", check_groups, site.data, code)
        counts = np.bincount(code[code >= 0], minlength=G).astype(float)
        return self._of_response(site, {"sums": np.array([np.zeros(G), counts])})

    def _respond(self, site: StandIn, ask: Ask) -> Reply:
        n, eta = site.memory["responses"], ask.arrays["eta"]
        site.memory["asked"] = 0
        residual = np.where(np.arange(n) % 2, RESIDUAL, -RESIDUAL)  # they add up to nothing, in folds nearly
        residual[n - n % 2 :] = 0.0
        arrays = {"loss": np.array(self._least + eta.mean()), "residual": residual, "weight": np.ones(n)}
        return self._of_response(site, arrays)

    def _admm_respond(self, site: StandIn, ask: Ask) -> Reply:
        """Residuals are large until so many rounds have passed since the last lasso."""
        site.memory["asked"] += 1
        rounds = self._difficulty.rounds if self._first else self._difficulty.more
        done = site.memory["asked"] > rounds
        sizes = np.zeros(5) if done else np.array([1e6, 1e6, 0.0, 0.0, 0.0])
        return self._of_response(site, {"move": np.zeros(site.memory["responses"]), "sizes": sizes})

    def _own(self, site: StandIn, part: Part) -> int:
        return int(site.memory["responses" if part.columns == response_steps.RESPONSE else "n"])


def hold_product(site: StandIn, part: Part, group: Ints) -> None:
    """Apply the rule on entities behind a product; one of the columns may be the response."""
    both, times = part.product.columns_a + part.product.columns_b, 1
    if part.columns == steps.WEIGHTED:
        times = max(site.memory["grams"], 1)
    site.hold("minimum count", check_groups, site.data, group, both - 1, times)
