"""Covariances for clusters of rows: sums at a site, degrees of freedom, and notes of a summary.

All families that take clusters share these. A cluster's rows fit a model that they have contributed to too
well, so that outer products of the clusters' scores are too small. CR2 divides each cluster's score by the
root of one less its leverage (Bell and McCaffrey 2002 for least squares, Kauermann and Carroll 2001 for
estimating equations, Pustejovsky and Tipton 2018). Tests are Student's t. Their degrees of freedom are the
effective number of clusters less one: Satterthwaite's for independent clusters of unequal size. The products
of two clusters' parts in his formula, which take a matrix for each coefficient, are replaced by the one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.disclosure.facts import WorkingWeights
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import ArrayDeclaration, Reply, aggregate, control
from fedstat.inference.estimate import INTERCEPT, Estimate
from fedstat.inference.summary import Note
from fedstat.inference.tables import number
from fedstat.kernels.clusters import AT_ONE, Margins, corrected_sums
from fedstat.models.horizontal.rows import summed
from fedstat.models.horizontal.session import add
from fedstat.typing import Array, Floats

POWERS = {"CR0": 0.0, "CR1": 0.0, "CR2": 0.5, "CR3": 1.0}
"""Power of one less a leverage by which a cluster's score is divided, by correction.

CR0 is the sandwich alone, CR1 the same times statsmodels' factor, and CR3 has the power of Mancl and DeRouen
(2001) and of the jackknife.
"""
EXCESS = 1e-8
"""How much larger than one rounding may make the share of a site's own information in that of all."""
FEW, FEW_UNCORRECTED = 5.0, 30.0
"""Effective clusters below which intervals are unreliable, with a correction and without one.

Tipton (2015) requires four degrees of freedom of CR2. Without a correction intervals of 95 % cover .90 with
12 effective clusters.
"""
MOST_CELLS = 2**24
"""Values of the information of clusters that are held at once."""
LEAST_DF = 0.1
"""Degrees of freedom of a coefficient that rests on one cluster but for rounding."""

LEVERAGES = {
    "inverse": aggregate("inverse information of all sites' rows", 2, optional=True, common=True),
    "power": control("power of one less a leverage", 0, optional=True, common=True),
}


def cluster_releases(behind: tuple[type, ...]) -> dict[str, ArrayDeclaration]:
    """Declare what :func:`sum_corrected` returns, with the facts behind it."""
    return {
        "inside": control("whether no coefficient rests on one cluster", 0, maskable=True, optional=True),
        "meat": summed("outer products of clusters' scores", 2, optional=True, behind=behind),
        "concentration": summed(
            "squares of clusters' shares in the variance of each coefficient", optional=True, behind=behind
        ),
    }


def own_inverse(name: str, information: Floats, T: Floats, inverse: Floats, excess: float = EXCESS) -> Floats:
    """Inverse information of all rows, in the site's own coordinates; an error if it cannot be that.

    `information` (p, p) is the site's own part of that of all, T (p, p) takes coefficients to its columns.
    `excess` is how much larger than one rounding may make its share.
    """
    p = len(T)
    if inverse.shape != (p, p):
        raise MessageError(f"{name}: expected 'inverse' of shape ({p}, {p})")
    translated = T @ (inverse + inverse.T) @ T.T / 2.0
    values, vectors = np.linalg.eigh(information)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    share = np.linalg.eigvalsh(root.T @ translated @ root)
    if not (np.isfinite(share).all() and share[0] >= -excess and share[-1] <= 1.0 + excess):
        raise MessageError(
            f"{name}: array 'inverse' is not that of an information of which this site's is a part"
        )
    return np.asarray(translated)


@dataclass(frozen=True, slots=True, eq=False)
class LeverageRequest:
    """What a coordinator sends for the leverages of clusters, checked at a site.

    `inverse` (p, p) is the inverse information of all sites' rows. The rows of `units` (p, p) take
    coefficients to the units of the data: the site makes them, so that no one chooses combinations.
    """

    inverse: Floats
    power: float
    units: Floats

    @classmethod
    def of(
        cls,
        name: str,
        own: Floats,
        units: Floats,
        inverse: Floats | None,
        power: Array | None,
        excess: float = EXCESS,
    ) -> LeverageRequest:
        """Check the arrays against the site's `own` information (p, p); MessageError if they do not fit."""
        if inverse is None or power is None or float(power) not in POWERS.values():
            allowed = sorted(set(POWERS.values()))
            raise MessageError(f"{name}: clusters need 'inverse', and 'power' as one of {allowed}")
        return cls(own_inverse(name, own, np.eye(len(own)), inverse, excess), float(power), units)


def sum_corrected(
    state: State,
    request: LeverageRequest,
    score: Floats,
    information: Callable[[slice], Floats],
    margins: Margins | None = None,
    instead: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Sum over the clusters of a site, and declare their weights.

    Without `instead`, what is released if few clusters have nearly all weight, that is refused.

    `score` (G, p) are the clusters', and `information` (g, p, p) of a range of them, for columns standardized
    over all sites. It returns ``meat`` (p, p), zero unless ``inside``; and ``concentration`` (p,), one number
    for each coefficient; see :class:`fedstat.kernels.clusters.CorrectedSums`.
    """
    G, p = score.shape
    meat, concentration, leverages = np.zeros((p, p)), np.zeros(len(request.units)), np.zeros(G)
    size = max(MOST_CELLS // p**2, 1)
    for first in range(0, G, size):
        part = slice(first, min(first + size, G))
        found = corrected_sums(
            score[part],
            information(part),
            request.inverse,
            request.units,
            request.power,
            None if margins is None else margins.part(part),
        )
        meat += found.meat
        concentration += found.concentration
        leverages[part] = found.leverages
    if request.power:
        factors = (1.0 - np.minimum(leverages, AT_ONE)) ** (-2.0 * request.power)
        # A coordinator could choose an inverse by which one cluster has nearly all weight.
        state.report(WorkingWeights(lambda: factors[None, :], instead=instead))
    inside = bool(leverages.max(initial=0.0) < AT_ONE)
    return {
        "inside": np.array(inside),
        "meat": meat if inside else np.zeros((p, p)),
        "concentration": concentration,
    }


def require_inside(inside: bool, remedy: str) -> None:
    """Require that no cluster determines a coefficient alone; the error names the remedy."""
    if not inside:
        raise EstimationError(
            "clusters: a coefficient rests on one cluster, whose leverage is one: its residuals would be "
            f"divided by zero. Use {remedy}, or leave out the term"
        )


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """Column of the clusters, the correction for their leverage, and the argument of a fit without one."""

    groups: str
    correction: str
    without: str

    @classmethod
    def of(cls, groups: str, correction: str) -> ClusterChoice:
        """Choose by `cov_kwds`."""
        return cls(groups, correction, text_of({"groups": groups, "correction": "CR1"}))

    def arrays(self, information: Floats) -> dict[str, Array]:
        """Return what sites need for the leverages of their clusters, from the information of all (p, p)."""
        return {"inverse": np.linalg.inv(information), "power": np.array(POWERS[self.correction])}

    def added(self, replies: Sequence[Reply], count: int | None = None) -> tuple[Floats, Clustering]:
        """Add up what sites return: meat (p, p), and the clusters, `count` or as many as sites report."""
        require_inside(int(add(replies, "inside")) == len(replies), self.without)
        number_of = round(float(add(replies, "clusters"))) if count is None else count
        effective = 1.0 / add(replies, "concentration")
        return add(replies, "meat"), Clustering(self.groups, number_of, effective, self.correction)


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """Clusters behind a covariance: their column, their number, and the effective number by coefficient.

    `correction` is a name of :data:`POWERS`.
    """

    groups: str
    count: int
    effective: Annotated[Floats, "d"]
    correction: str

    def __str__(self) -> str:
        return f"({self.groups}, {self.count:,}, {self.correction})"

    def of(self, J: Floats) -> Clustering:
        """Return that of combinations J (m, d) of coefficients: the fewest clusters of their parts."""
        return replace(self, effective=np.array([self.effective[line != 0.0].min() for line in J]))

    @property
    def corrected(self) -> bool:
        """Whether leverages are allowed for."""
        return POWERS[self.correction] > 0.0

    @property
    def df(self) -> Floats:
        """Degrees of freedom of tests, (d,): with CR2 the effective number of clusters less one.

        CR3 is larger than CR2 where clusters are unequal; it goes with the clusters beyond coefficients.
        """
        if self.correction != "CR2":
            return np.full(len(self.effective), max(float(self.count - len(self.effective)), LEAST_DF))
        return np.maximum(np.minimum(self.effective, float(self.count)) - 1.0, LEAST_DF)

    def notes(
        self, names: Sequence[str], terms: Sequence[str], remedy: str, instead: str = ""
    ) -> Iterator[Note]:
        """Warn of few effective clusters.

        `remedy` is an argument of ``fit`` that corrects, if one does, and `instead` names another test, if
        there is one.
        """
        slopes = [k for k, term in enumerate(terms) if term != INTERCEPT] or list(range(len(terms)))
        few = FEW if self.corrected else FEW_UNCORRECTED
        low = [k for k in slopes if self.effective[k] < few]
        if not low:
            return
        worst = min(low, key=lambda k: float(self.effective[k]))
        others = f" ({len(low)} coefficients have fewer than {few:.0f})" if len(low) > 1 else ""
        what = "These standard errors are too small" + (f": use {remedy}" if remedy else "")
        if self.corrected:
            what = f"Below {FEW:.0f}, its interval and test are unreliable"
            what += f": {instead}" if instead else ""
        yield Note(
            "few_clusters",
            f"FEW CLUSTERS: '{names[worst]}' rests on {number(float(self.effective[worst]), 2)} effective "
            f"clusters of {self.count:,} by '{self.groups}'{others}. {what}.",
            "critical",
        )


def local_clusters(estimate: Estimate, groups: str) -> Iterator[Note]:
    """State that clusters are counted by site, if there are several sites."""
    if len(estimate.blocks) > 1:
        yield Note(
            "local_groups", f"Clusters by '{groups}' are local: equal labels at two sites are two clusters."
        )


def describe_tests(df_inference: float | None, by_coefficient: Floats | None) -> str:
    """State the distribution of tests and intervals for a summary."""
    if df_inference is None:
        return "normal"
    if by_coefficient is None:
        return f"t on {df_inference:,g} df"
    low, high = number(df_inference, 1), number(float(by_coefficient.max()), 1)
    return f"t on {low} df" if low == high else f"t on {low} to {high} df"


def text_of(correction: Mapping[str, str]) -> str:
    """Write `cov_kwds` as an analyst types them."""
    return "cov_kwds={" + ", ".join(f'"{key}": "{value}"' for key, value in correction.items()) + "}"
