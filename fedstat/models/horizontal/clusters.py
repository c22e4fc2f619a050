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
from scipy import stats

from fedstat.codec import to_json
from fedstat.errors import EstimationError, MessageError, ModelError, Remedy
from fedstat.federation.design.horizontal_steps import MOST_BUCKETS, LabelRequest
from fedstat.federation.design.vertical_design import FAMILY
from fedstat.federation.disclosure.facts import WorkingWeights
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import ArrayDeclaration, Reply, Request, aggregate, control
from fedstat.inference.estimate import INTERCEPT
from fedstat.inference.notes import Note
from fedstat.inference.tables import number
from fedstat.kernels.clusters import AT_ONE, Margins, corrected_sums
from fedstat.models.checks import check_choice
from fedstat.models.horizontal.notes import NOTES
from fedstat.models.horizontal.rows import summed
from fedstat.models.horizontal.session import RowsSession, add
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
    def factor(self) -> float:
        """Number of clusters by one less, the factor of CR1 for equations of any kind."""
        return self.count / max(self.count - 1.0, 1.0)

    @property
    def df(self) -> Floats:
        """Degrees of freedom of tests, (d,): with CR2 the effective number of clusters less one.

        CR3 is larger than CR2 where clusters are unequal; it goes with the clusters beyond coefficients.
        """
        if self.correction != "CR2":
            return np.full(len(self.effective), max(float(self.count - len(self.effective)), LEAST_DF))
        return np.maximum(np.minimum(self.effective, float(self.count)) - 1.0, LEAST_DF)

    def notes(
        self,
        names: Sequence[str],
        terms: Sequence[str],
        correction: Remedy | None,
        instead: Remedy | None = None,
    ) -> Iterator[Note]:
        """Warn of few effective clusters.

        `correction` is a fit that corrects, if there is one, and `instead` another test of a corrected fit.
        """
        slopes = [k for k, term in enumerate(terms) if term != INTERCEPT] or list(range(len(terms)))
        few = FEW if self.corrected else FEW_UNCORRECTED
        low = [k for k in slopes if self.effective[k] < few]
        if not low:
            return
        worst = min(low, key=lambda k: float(self.effective[k]))
        problem = "These standard errors are too small"
        if self.corrected:
            problem = f"Below {FEW:.0f}, its interval and test are unreliable"
        yield NOTES.note(
            "few_clusters",
            remedy=instead if self.corrected else correction,
            term=names[worst],
            effective=number(float(self.effective[worst]), 2),
            clusters=self.count,
            groups=self.groups,
            others=f" ({len(low)} coefficients have fewer than {few:.0f})" if len(low) > 1 else "",
            problem=problem,
        )


MOST_BY_CHANCE = 1e-3
"""Probability of as many buckets with two labels by chance, below which labels are at several sites."""


@dataclass(frozen=True, slots=True)
class SharedLabels:
    """Labels of groups, counted by keyed hash over all sites.

    `total` labels of all sites are in `buckets`; `crowded` buckets have two labels or more. `compared` is
    whether all sites have counted, and `serial` whether labels are numbers from one on at all of them.
    """

    groups: str
    total: float
    crowded: float
    buckets: int
    compared: bool
    serial: bool

    @property
    def by_chance(self) -> float:
        """Expected number of crowded buckets of different labels."""
        rate = self.total / self.buckets
        return float(self.buckets * stats.poisson.sf(1, rate))

    @property
    def found(self) -> int:
        """Number of labels that are at several sites, about; zero if there may be none."""
        chance = self.by_chance
        if not self.compared or stats.poisson.sf(self.crowded - 1.0, chance) >= MOST_BY_CHANCE:
            return 0
        return max(round(self.crowded - chance), 1)

    def note(
        self, sites: int, what: str, effect: str, remedy: Remedy | None = None, **values: str
    ) -> Iterator[Note]:
        """Say whether labels are at several of the `sites`.

        `what` are groups or clusters, `effect` what equal ones at two sites do, and `remedy` what to do.
        """
        if sites < 2:
            return
        if self.found and not self.serial:
            values |= {"groups": self.groups, "what": what, "effect": effect}
            yield NOTES.note("shared_labels", remedy=remedy, labels=self.found, **values)
        elif self.found:
            values |= {"groups": self.groups, "what": what, "What": what.capitalize(), "effect": effect}
            yield NOTES.note("local_groups/serial", remedy=remedy, **values)
        else:
            kind = "local_groups" if self.compared else "local_groups/not_compared"
            yield NOTES.note(kind, groups=self.groups, what=what, What=what.capitalize())


@dataclass(frozen=True, slots=True)
class LabelComparison:
    """Requests that compare labels of groups between sites, to be sent after those that open the rows."""

    session: RowsSession
    groups: tuple[tuple[str, ...], ...]

    @property
    def buckets(self) -> int:
        """About sixteen buckets for each row, so that few labels share one by chance."""
        rows = sum(site.n for site in self.session.agreement.sites)
        return int(min(2 ** np.ceil(np.log2(16.0 * max(rows, 64))), MOST_BUCKETS))

    def requests(self) -> list[Request]:
        """Return one request for each site and column of groups."""
        texts = [to_json(LabelRequest(columns, self.buckets)) for columns in self.groups]
        session = self.session
        return [
            Request(site, FAMILY, "count_labels", {}, session.session, text)
            for text in texts
            for site in session.sites
        ]

    def split(self, replies: Sequence[Reply]) -> tuple[tuple[SharedLabels, ...], list[Reply]]:
        """Take the replies from the end of others, and return what they say, and the others."""
        K = len(self.session.sites)
        first = len(replies) - K * len(self.groups)
        found = []
        for k, columns in enumerate(self.groups):
            own = replies[first + k * K : first + (k + 1) * K]
            counts = add(own, "labels")
            compared, serial = (int(add(own, name)) == K for name in ("compared", "serial"))
            crowded = float((counts >= 2.0).sum())
            name = ":".join(columns)
            found.append(SharedLabels(name, float(counts.sum()), crowded, len(counts), compared, serial))
        return tuple(found), list(replies[:first])


def clusters_of_formula(
    clusters: tuple[str, ...], cov_type: str | None, cov_kwds: object
) -> tuple[str, ClusterChoice | None]:
    """Return the covariance of a model of times, and the clusters that its formula names, checked.

    Raises
    ------
    ModelError
        There are no such clusters, or `cov_kwds` has other entries than a correction.
    """
    if cov_type is None:
        cov_type = "cluster" if clusters else "nonrobust"
    check_choice("cov_type", cov_type, ("nonrobust", "robust", "cluster"))
    if cov_type == "cluster" and not clusters:
        raise ModelError(
            "cov_type: 'cluster' needs the clusters in the formula, as in 'Surv(months, died) ~ age + "
            "cluster(family)'"
        )
    kwds = {} if cov_kwds is None else cov_kwds
    if not isinstance(kwds, dict) or set(kwds) - {"correction"} or (kwds and cov_type != "cluster"):
        raise ModelError(
            "cov_kwds: a model of times takes {'correction': 'CR0'} or {'correction': 'CR2'} with "
            "cov_type='cluster'; the formula names the clusters, as in cluster(family)"
        )
    correction = kwds.get("correction", "CR2")
    check_choice("cov_kwds: correction", correction, ("CR2", "CR0"))
    if cov_type != "cluster":
        return cov_type, None
    return cov_type, ClusterChoice(", ".join(clusters), correction, text_of({"correction": "CR0"}))


def describe_tests(df_inference: float | None, by_coefficient: Floats | None) -> str:
    """State the distribution of tests and intervals for a summary."""
    if df_inference is None:
        return "normal"
    if by_coefficient is None:
        return f"t on {df_inference:,g} df"
    low, high = number(df_inference, 1), number(float(by_coefficient.max()), 1)
    return f"t on {low} df" if low == high else f"t on {low} to {high} df"


def corrected_fit(**correction: str) -> Remedy:
    """Return the fit with these ``cov_kwds``."""
    argument = text_of(correction).replace("{", "{{").replace("}", "}}")
    return Remedy(f"fit(cov_type='cluster', {argument})", f": use {argument}")


def text_of(correction: Mapping[str, str]) -> str:
    """Write `cov_kwds` as an analyst types them."""
    return "cov_kwds={" + ", ".join(f'"{key}": "{value}"' for key, value in correction.items()) + "}"
