"""Parametric bootstrap of a mixture, drawn from released parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.cluster.vq import kmeans2
from scipy.optimize import linear_sum_assignment
from scipy.special import logsumexp

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.design.coding import BlockSpec
from fedstat.inference.convergence import gains_little
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import DerivedReport
from fedstat.inference.tables import Sheet, number
from fedstat.models.m2sem.columns import OpenedCovariates, OpenedModalities, OpenedModality
from fedstat.models.m2sem.em import CHANGE, GAIN, EntityIndex, soft
from fedstat.models.m2sem.local_mixtures import make_modality, restored
from fedstat.models.m2sem.modality.base import Modality
from fedstat.models.m2sem.record import FittedSite, M2SEMRecord
from fedstat.models.m2sem.request import ModalityRequest, PredictRequest
from fedstat.models.m2sem.tables import KEYS, with_limits
from fedstat.progress_line import open_line
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Parametric bootstrap of a mixture: drawn from released parameters, and therefore without any site.
#
# A sample needs the same cluster label for an entity at all sites; this label is not data. Labels are drawn
# from the shares, and columns of every site from its released parameters. Which sites have an entity is taken
# from the fit. Cells that are missing at a site that has the entity are drawn as if they were observed.

LOCAL_STEPS, ROUNDS = 6, 60
COMBINATIONS = 60
"""Standard normal draws of covariates are truncated here."""
MOST_FAILED = 0.2
"""Largest share of the samples that may fail to be fitted."""
NOTES = Catalogue(
    warning={
        "covariates": "Covariates were drawn as independent normal variables that do not depend on "
        "clusters, because only their sites know their distribution. If clusters differ in covariates, use "
        "the standard errors from the information.",
    },
    info={
        "errors": "Standard deviations over {samples} samples drawn from the released parameters and "
        "refitted, without any site.{failed} They are conditional on the support, and treat missing cells "
        "of a recorded entity as if they were observed.",
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class Drawable:
    """Modalities of a site as fitted, how to make one from drawn columns and covariates, and positions (n,).

    `covariates` is the number of covariates for which its columns are adjusted.
    """

    fitted: Sequence[Modality]
    make: Sequence[Callable[[Array, Floats | None], Modality]]
    place: Ints
    covariates: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Refits of B samples: shares (B, K), profiles (B, K, sum of P C) by site; samples without a fit."""

    shares: Floats
    profiles: Mapping[str, Floats]
    failed: int


def draw_refits(
    sites: Mapping[str, Drawable], shares: Floats, n: int, samples: int, rng: np.random.Generator
) -> Draws:
    """Draw samples of n entities, fit each from its drawn clusters, and keep the labels of these.

    Raises EstimationError if too many samples cannot be fitted.
    """
    found: list[tuple[Floats, dict[str, Floats]]] = []
    failed = 0
    with open_line("sample", samples) as line:
        while len(found) < samples:
            labels = rng.choice(len(shares), size=n, p=shares)
            try:
                found.append(refit(sites, labels, len(shares), rng))
                line.step()
            except ModelError:
                # A column is constant in a sample, or a level does not occur.
                failed += 1
                if failed > MOST_FAILED * samples:
                    raise EstimationError(
                        f"bootstrap: {failed} of {failed + len(found)} samples cannot be fitted, because a "
                        "column is constant in them; leave out columns in which nearly all entities have the "
                        "same value"
                    ) from None
    return Draws(
        np.array([w for w, _ in found]),
        {site: np.array([p[site] for _, p in found]) for site in sites},
        failed,
    )


def refit(
    sites: Mapping[str, Drawable], labels: Ints, K: int, rng: np.random.Generator
) -> tuple[Floats, dict[str, Floats]]:
    """Draw columns of entities with labels (n,), and fit: shares (K,) and profiles by site."""
    drawn = {site: redraw(one, labels[one.place], rng) for site, one in sites.items()}
    place = {site: one.place for site, one in sites.items()}
    r = ascend(drawn, place, soft(labels, K))
    order = as_drawn(r, labels)
    profiles = {
        site: np.hstack([np.nan_to_num(m.profile()).reshape(K, -1) for m in some])[order]
        for site, some in drawn.items()
    }
    return r.mean(axis=0)[order], profiles


def ascend(drawn: Mapping[str, Sequence[Modality]], place: Mapping[str, Ints], r: Floats) -> Floats:
    """Fit locally by EM from posteriors r (n, K), and return the final posteriors."""
    return maximize(drawn, place, r)[0]


def maximize(
    drawn: Mapping[str, Sequence[Modality]], place: Mapping[str, Ints], r: Floats
) -> tuple[Floats, float]:
    """Fit locally by EM from posteriors r (n, K); return the final posteriors and the log-likelihood."""
    w, last = r.mean(axis=0), -np.inf
    for site, some in drawn.items():
        for m in some:
            m.begin_means(r[place[site]])
            m.log_densities()
    for _ in range(ROUNDS):
        f = np.tile(np.log(w), (len(r), 1))
        for site, some in drawn.items():
            for m in some:
                f[place[site]] += m.log_densities()
        total = logsumexp(f, axis=1)
        new = np.exp(f - total[:, None])
        gain, change = float(total.sum()) - last, float(np.abs(new - r).max())
        r, last = new, float(total.sum())
        if gains_little(gain, last, len(r), GAIN) and change < CHANGE:
            break
        w = np.maximum(r.mean(axis=0), 1e-12)
        for site, some in drawn.items():
            at = np.ascontiguousarray(r[place[site]])
            for m in some:
                for _ in range(LOCAL_STEPS):
                    m.improve(at)
    return r, last


def as_drawn(r: Floats, labels: Ints) -> Ints:
    """Return the order (K,) in which clusters of posteriors r (n, K) agree best with labels (n,)."""
    K = r.shape[1]
    together = np.array([r[labels == k].sum(axis=0) for k in range(K)])
    return np.asarray(linear_sum_assignment(-together)[1])


def redraw(one: Drawable, labels: Ints, rng: np.random.Generator) -> list[Modality]:
    """Draw the columns of a site's modalities, and prepare a refit on their support."""
    out, z = [], None
    if one.covariates:
        # Only a few different values: rows of categorical columns are counted for each combination.
        pool = rng.standard_normal((COMBINATIONS, one.covariates))
        z = pool[rng.integers(COMBINATIONS, size=len(labels))]
        z = (z - z.mean(axis=0)) / z.std(axis=0)
    for fitted, make in zip(one.fitted, one.make, strict=True):
        m = make(fitted.draw(labels, rng, z), z)
        m.support = fitted.row_norms() > 0.0
        m.silent = not fitted.means.any()
        m.begin(fitted.clusters)
        out.append(m)
    return out


# ----------------------------------------------------------------------------------------------------
# Standard errors of a mixture from its parametric bootstrap.


class BootstrapResults(DerivedReport):
    """Profiles and shares with standard errors from refits of samples that were drawn from a fit.

    Attributes
    ----------
    samples : int
        Number of samples that were drawn and fitted.
    failed : int
        Number of further samples in which a column was constant.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fit = fs.M2SEM(partition, n_clusters=2, n_factors=1).fit(select=None, n_init=1)
    >>> found = fit.bootstrap(4)
    >>> found.sizes.shape, found.tidy().shape, "cluster" in found.summary().as_text()
    ((2, 4), (30, 9), True)
    """

    def __init__(self, record: M2SEMRecord, draws: Draws, alpha: float, *, sources: Iterable[object]) -> None:
        super().__init__(sources)
        self._record, self._draws, self._alpha = record, draws, alpha
        self.samples, self.failed = len(draws.shares), draws.failed

    def tidy(self) -> pd.DataFrame:
        """Profiles in one frame, a row for each cluster and column or level, with errors and limits."""
        frame = self._record.profiles()
        long = frame.reset_index().melt(id_vars=KEYS, var_name="cluster", value_name="estimate")
        sd = np.concatenate(
            [
                self._draws.profiles[site].std(axis=0, ddof=1)[:, with_level(held)].T
                for site, held in self._record.sites.items()
            ]
        )
        return with_limits(long, sd.T.ravel(), self._alpha)

    @property
    def sizes(self) -> pd.DataFrame:
        """Shares of the clusters with errors and limits."""
        frame = pd.DataFrame({"estimate": self._record.shares}, index=self._record.clusters)
        return with_limits(frame, self._draws.shares.std(axis=0, ddof=1), self._alpha)

    def _sheets(self) -> Iterator[Sheet]:
        """Profiles with their errors."""
        rows = tuple(
            (
                " = ".join(str(row[key]) for key in ("column", "level") if row[key]),
                str(row["cluster"]),
                *(number(float(row[name])) for name in ("estimate", "std_error", "conf_low", "conf_high")),
            )
            for row in self.tidy().to_dict("records")
        )
        headers = ("mean or share", "cluster", "estimate", "std err", "low", "high")
        yield Sheet(headers, rows, "llrrrr", (30, 8, 11, 11, 11, 11), gap=2)

    def _summary_notes(self) -> Iterator[Note]:
        failed = f" In {self.failed} further samples a column was constant." if self.failed else ""
        yield NOTES.note("errors", samples=self.samples, failed=failed)
        if self._record.adjusted:
            yield NOTES.note("covariates")

    def _glance(self) -> dict[str, int]:
        return {"nobs": self._record.n, "n_sites": len(self._record.sites), "samples": self.samples}

    def __repr__(self) -> str:
        return self.summary().as_text()


def bootstrap(
    record: M2SEMRecord,
    place: Mapping[str, Ints],
    samples: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    sources: Iterable[object],
) -> BootstrapResults:
    """Draw samples from a fit whose sites have entities at `place`, and fit each."""
    sites = {site: drawable(record, held, place[site]) for site, held in record.sites.items()}
    return BootstrapResults(
        record, draw_refits(sites, record.shares, record.n, samples, rng), alpha, sources=sources
    )


# ----------------------------------------------------------------------------------------------------
# Parametric bootstrap of the likelihood ratio of K clusters against K - 1 (McLachlan 1987).
#
# The ratio has no known distribution: under K - 1 clusters a share is at its border, and means of an empty
# cluster are not identified. Samples are drawn from the released parameters of K - 1 clusters.


class ClusterNumberTest(NamedTuple):
    """Bootstrap likelihood ratio test of K clusters against K - 1.

    Attributes
    ----------
    statistic : float
        Twice the difference of the log-likelihoods.
    pvalue : float
        ``(1 + b) / (1 + samples)`` with the number b of samples whose statistic is as large.
    samples : int
        Samples that were drawn from the fit of K - 1 clusters.
    clusters : int
        K - 1.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(150, ["continuous"] * 3, p=3, separation=3.0, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> options = {"select": None, "n_init": 1, "cov_type": None}
    >>> one, two = [fs.M2SEM(partition, K, 1).fit(**options) for K in (1, 2)]
    >>> test = two.test_against(one, samples=4, n_init=1)
    >>> test.clusters, test.samples, test.pvalue
    (1, 4, 0.2)
    """

    statistic: float
    pvalue: float
    samples: int
    clusters: int


def bootstrap_ratios(
    record: M2SEMRecord, subjects: EntityIndex, samples: int, n_init: int, rng: np.random.Generator
) -> Floats:
    """Draw samples from a fit, and return the likelihood ratio of one more cluster in each: (samples,).

    The larger mixture begins from `n_init` k-means of factor scores, the smaller one from the drawn clusters.
    Mixtures with a cluster that is too small for an owner do not count, as in a fit over sites.
    """
    place = subjects.place
    sites = {site: drawable(record, held, place[site]) for site, held in record.sites.items()}
    K, found, failed = len(record.shares), list[float](), 0
    with open_line("sample", samples) as line:
        while len(found) < samples:
            labels = rng.choice(K, size=record.n, p=record.shares)
            try:
                drawn = {site: redraw(one, labels[one.place], rng) for site, one in sites.items()}
            except ModelError:
                failed += 1
                if failed > MOST_FAILED * samples:
                    raise EstimationError(
                        "test_against: a column is constant in too many samples; leave out columns in which "
                        "nearly all entities have the same value"
                    ) from None
                continue
            smaller = maximize(drawn, place, soft(labels, K))[1]
            found.append(max(0.0, 2.0 * (_one_more(drawn, subjects, K + 1, n_init, rng) - smaller)))
            line.step()
    return np.array(found)


def _one_more(
    drawn: Mapping[str, Sequence[Modality]],
    subjects: EntityIndex,
    K: int,
    n_init: int,
    rng: np.random.Generator,
) -> float:
    """Largest log-likelihood of K clusters from several k-means of factor scores."""
    place = subjects.place
    scores, best = [], -np.inf
    for site, some in drawn.items():
        for m in some:
            # Means of one cluster, or loadings of one class, are zero, which is no restriction on two.
            m.silent, m.support = False, np.ones(m.P, dtype=np.bool_)
            m.begin(1)
            drawn_scores = m.starting_scores()
            own = np.zeros((subjects.total, drawn_scores.shape[1]))
            own[place[site]] = drawn_scores
            scores.append(own)
    for _ in range(n_init):
        for some in drawn.values():
            for m in some:
                m.begin(K)
        _, labels = kmeans2(np.hstack(scores), K, minit="++", rng=rng, missing="warn")
        r, loglik = maximize(drawn, place, soft(labels.astype(np.int64), K))
        if subjects.too_few(r) is None:
            best = max(best, loglik)
    return best


def drawable(record: M2SEMRecord, held: FittedSite, place: Ints) -> Drawable:
    """Rebuild the modalities of a site from its releases."""
    q = len(held.covariates)
    empty = tuple(OpenedModality(one, _no_rows(one)) for one in held.modalities)
    request = PredictRequest(len(record.shares), record.factors, record.nodes)
    covariates = OpenedCovariates(BlockSpec(), np.zeros((1, q)), np.array([np.zeros(q), np.ones(q)]))
    opened = OpenedModalities(empty, np.zeros(1, dtype=np.bool_), covariates if q else None)
    fitted = restored("bootstrap", opened, request, held.parameters, held.units)
    return Drawable(fitted, [partial(_make, one, record) for one in held.modalities], place, q)


def with_level(held: FittedSite) -> list[int]:
    """Return indices, among a site's profiles, of means and of levels that occur."""
    out: list[int] = []
    at = 0
    for one in held.modalities:
        for column in one.columns:
            out += range(at, at + (len(column.levels) or 1))
            at += one.most_levels
    return out


def _no_rows(one: ModalityRequest) -> Array:
    return np.zeros((1, len(one.columns)), dtype=np.float64 if one.continuous else np.int64)


def _make(one: ModalityRequest, record: M2SEMRecord, values: Array, covariates: Floats | None) -> Modality:
    return make_modality(OpenedModality(one, values), record.factors, record.nodes, covariates)
