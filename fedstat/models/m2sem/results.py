"""Results of a mixture: memberships, cluster profiles, and analyses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.message import Reply
from fedstat.inference.estimate import LedgerLike, takes_alpha
from fedstat.inference.mixtures import (
    OutsideResults,
    classification_errors,
    classification_table,
    posterior_entropy,
)
from fedstat.inference.notes import Note
from fedstat.inference.tables import Sheet
from fedstat.models.checks import check_integer
from fedstat.models.m2sem.analyses import request_outside_sums, request_scores
from fedstat.models.m2sem.bootstrap import BootstrapResults, ClusterNumberTest, bootstrap, bootstrap_ratios
from fedstat.models.m2sem.plots import plot_cluster_profiles, plot_profile_heat
from fedstat.models.m2sem.prediction import predict_clusters
from fedstat.models.m2sem.protocol import MixtureFit
from fedstat.models.m2sem.record import FittedSite, M2SEMRecord
from fedstat.models.m2sem.request import ModalityRequest
from fedstat.models.m2sem.summary import notes, summary_sheets
from fedstat.models.m2sem.tables import (
    communality_table,
    contrasts,
    covariate_effects,
    tidy_profiles,
    wald_tests,
    with_share_errors,
)
from fedstat.models.results import Results
from fedstat.models.vertical.prediction.predictor import NewEntities
from fedstat.progress_line import shows_progress
from fedstat.typing import Array, Bools

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False)
class SessionFit:
    """The model, whose sites hold the mixture in this session, and the fit, for further requests."""

    model: Any
    fit: MixtureFit


class M2SEMResults(
    Results[M2SEMRecord],
    saved_as="fedstat m2sem results 4",
    record=M2SEMRecord,
):
    """Clusters, the largest first, numbered from 1.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fs.M2SEM(partition, 2, 1).fit(select=None, n_init=1)
    <M2SEMResults: 2 clusters of 200 entities; see .summary()>
    >>> data = fs.datasets.make_clusters(300, ["continuous", "ordinal"], p=3, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fit = fs.M2SEM(partition, n_clusters=2, n_factors=1).fit(n_init=1, seed=0)
    >>> fit.n_clusters, fit.nobs, fit.labels.nunique(), fit.posterior.shape, fit.sizes.shape
    (2, 300, 2, (300, 2), (2, 3))
    >>> fit.llf < 0.0, fit.bic < fit.icl, fit.df_model > 20, fit.converged, 0.0 < fit.entropy <= 1.0
    (True, True, True, True, True)
    >>> fit.history.columns.tolist()[:3], fit.path.columns.tolist()[:3]
    (['round', 'mixture', 'llf'], ['lam1', 'lam2', 'columns'])
    >>> len(fit.modalities), len(fit.features), fit.classification.shape
    (2, 6, (2, 3))
    >>> len(fit.profiles()), len(fit.tidy()), len(fit.tests()), len(fit.contrasts()), len(fit.communalities())
    (15, 30, 6, 15, 6)
    >>> fit.members().shape == fit.profiles().shape, fit.mean_residual < 0.2
    (True, True)
    >>> fit.predict(partition).shape, fit.factor_scores("Client 1").shape
    ((300, 2), (300, 1))
    >>> bool(fit.plot_heat().has_data()), len(fit.plot_profiles().axes)
    (True, 2)
    >>> "clusters" in fit.summary().as_text()
    True
    """

    model_name = "Clusters over sites"
    _ledger: Ledger | None

    def __init__(
        self, record: M2SEMRecord, ledger: LedgerLike | None = None, live: SessionFit | None = None
    ) -> None:
        super().__init__(record, ledger)
        self._live = live

    @classmethod
    def _of(cls, model: Any, fit: MixtureFit, masked: bool, own: bool, ledger: Ledger) -> M2SEMResults:
        """Make results of a fit."""
        one, place = fit.state, model._subjects.place
        sites = {
            reply.site: fitted_site(model, reply, len(place[reply.site]), fit.skewed[reply.site])
            for reply in fit.released
        }
        record = M2SEMRecord(
            sites={site: sites[site] for site in model._agreed.modalities},
            shares=fit.w,
            factors=one.factors,
            nodes=one.nodes,
            n=len(fit.r),
            loglik=one.loglik,
            parameters=one.free,
            select=fit.select,
            uncertainty=posterior_entropy(fit.r),
            classified=np.nan_to_num(classification_table(fit.r).to_numpy(dtype=float)),
            history=tuple(fit.history),
            judged=tuple(fit.judged),
            rounds=fit.rounds,
            converged=fit.converged,
            coarse=fit.coarse,
            emptied=tuple(one.emptied),
            masked=masked,
            own=own,
            frequencies=None
            if fit.frequencies is None
            else np.concatenate([fit.frequencies[site] for site in model._agreed.modalities]),
            observed=fit.observed,
            starts=one.starts,
        )
        return cls(record, ledger, SessionFit(model, fit))

    # ---- quality of the fit --------------------------------------------------------------------------

    @property
    def llf(self) -> float:
        """Observed log-likelihood."""
        return self._record.loglik

    @property
    def df_model(self) -> int:
        """Number of free parameters."""
        return self._record.parameters

    @property
    def nobs(self) -> int:
        """Number of entities."""
        return self._record.n

    @property
    def bic(self) -> float:
        """Schwarz's criterion; lower is better."""
        return self._record.bic

    @property
    def icl(self) -> float:
        """BIC plus twice the entropy of the posteriors."""
        return self.bic + 2.0 * self._record.uncertainty

    @property
    def converged(self) -> bool:
        """Whether the fit converged."""
        return self._record.converged

    @property
    def history(self) -> pd.DataFrame:
        """Penalized log-likelihood of every mixture that was improved, by round."""
        return pd.DataFrame(list(self._record.history), columns=["round", "mixture", "llf"])

    @property
    def path(self) -> pd.DataFrame:
        """Penalties, the supports that they select, and the criterion of each refit without penalties."""
        return self._record.path

    # ---- membership ------------------------------------------------------------------------------

    @property
    def n_clusters(self) -> int:
        """Number of clusters."""
        return len(self._record.shares)

    @property
    def posterior(self) -> pd.DataFrame:
        """Probability of every cluster for every entity, (n, K), in the order of the partition.

        It is not saved to a file; :meth:`predict` computes it again.
        """
        live = self._alive("posterior")
        return pd.DataFrame(live.fit.r, index=live.model.partition.entities, columns=self._record.clusters)

    @property
    def labels(self) -> pd.Series:
        """Most likely cluster of every entity, from 1."""
        posterior = self.posterior
        return pd.Series(posterior.to_numpy().argmax(axis=1) + 1, index=posterior.index, name="cluster")

    def predict(self, exog: NewEntities) -> pd.DataFrame:
        """Probabilities of the clusters for new entities, from any available modalities.

        Parameters
        ----------
        exog : ClientPartition, table of pandas, polars or pyarrow, or dict of columns
            A partition with some or all of the sites of the fit, or rows that you hold; entities that a site
            lacks, and missing cells, are allowed. Sums are masked with three or more sites; otherwise parts
            are sent unmasked.

        Returns
        -------
        DataFrame
            (n, K); the shares of the clusters for an entity without any value.

        Raises
        ------
        ModelError
            The partition has no site of the fit, or a site lacks some of its columns.
        DesignError
            A column has a level that does not occur in the fit.
        """
        return predict_clusters(self._record, exog)

    def factor_scores(self, site: str) -> pd.DataFrame:
        """Request from a site the factor scores of its entities, (n, Q of every modality).

        These are row-level values of one site, unmasked; factors are determined up to a rotation.

        Raises
        ------
        ModelError
            The fit has no such site.
        NotAvailableError
            The results come from a file, or the fit has no factors.
        PolicyError
            The site's owner does not release row-level values.
        """
        if not self._record.factors:
            raise NotAvailableError("factor_scores: the clusters are latent classes, without factors")
        live = self._alive("factor_scores")
        if site not in self._record.sites:
            raise ModelError(f"expected one of {', '.join(self._record.sites)}, received {site!r}")
        scores = request_scores(live.model, site, live.fit.state.slot)
        names = [
            (one.name, q + 1)
            for one in self._record.sites[site].modalities
            for q in range(one.factors(self._record.factors))
        ]
        rows = live.model._subjects.place[site]
        columns = pd.MultiIndex.from_tuples(names, names=["modality", "factor"])
        return pd.DataFrame(scores, index=live.model.partition.entities[rows], columns=columns)

    @property
    def sizes(self) -> pd.DataFrame:
        """Shares of the clusters, with available standard errors, and entities by most likely cluster."""
        return with_share_errors(self._record)

    @property
    def entropy(self) -> float:
        """One if posteriors are certain, zero if they carry no information."""
        return self._record.entropy

    @property
    def classification(self) -> pd.DataFrame:
        """Mean posterior of every cluster (columns) by the most likely one (rows), with entities."""
        return self._record.classification

    # ---- description of the clusters ---------------------------------------------------------------

    def profiles(self) -> pd.DataFrame:
        """Means of continuous columns and probabilities of levels by cluster.

        If columns are adjusted, the means are those at the means of the site's covariates.

        Returns
        -------
        DataFrame
            Index (site, modality, column, level); the level is empty for means; one column per cluster.
        """
        return self._record.profiles()

    def members(self) -> pd.DataFrame:
        """Means and shares of levels of the entities whose most likely cluster is each.

        :meth:`profiles` has the means of the model, which follow from few factors: they can lie outside of
        the range of the data. Compare both. Members' means are not adjusted for covariates or for errors of
        classification.

        Returns
        -------
        DataFrame
            Rows and columns as :meth:`profiles`; nan for columns whose site does not allow these sums, for
            instance because a level has few rows in a cluster.
        """
        return self._record.members()

    @property
    def mean_residual(self) -> float:
        """Root mean square of members' means minus the model's, in standard deviations of the columns.

        A fit index of the clusters' means of continuous columns: 0 is a perfect fit. Clusters are weighted by
        their shares. It also contains errors of classification, and is only meaningful if entropy is high.
        """
        return self._record.mean_residual

    @property
    def modalities(self) -> pd.DataFrame:
        """By modality: kind, columns, entities, distance of the clusters, whether selected.

        ``distance`` is in standard deviations of the factors' information in its columns; it is 0 if its
        means are the same in all clusters. Without factors, it is in standard deviations of the columns
        within clusters. ``frequency`` is the share of half-samples that select it.
        """
        return self._record.modalities

    @property
    def features(self) -> pd.DataFrame:
        """By column: kind, norm of its loadings, and whether it separates the clusters.

        A column separates them if it has loadings on factors whose means differ by cluster, or, without
        factors, if its distribution differs by cluster.
        """
        return self._record.features

    @takes_alpha
    def tidy(self, alpha: float = 0.05) -> pd.DataFrame:
        """Profiles in one frame, a row for each cluster and column or level.

        Parameters
        ----------
        alpha : float
            Confidence limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            ``estimate`` and, with standard errors, ``std_error``, ``conf_low``, ``conf_high``.
        """
        return tidy_profiles(self._record, alpha)

    @takes_alpha
    def contrasts(self, alpha: float = 0.05) -> pd.DataFrame:
        """Differences between every two clusters, by column or level, with tests.

        Parameters
        ----------
        alpha : float
            Confidence limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            Index (site, modality, column, level, clusters); ``estimate``, ``std_error``, ``conf_low``,
            ``conf_high``, ``statistic``, ``p_value``.

        Raises
        ------
        NotAvailableError
            There are no standard errors; the error states why.
        """
        return contrasts(self._record, alpha)

    def tests(self) -> pd.DataFrame:
        """Wald test, by column, that all clusters have the same distribution.

        Returns
        -------
        DataFrame
            Index (site, modality, column); ``statistic``, ``df``, ``p_value``, nan for columns and
            modalities that were selected to be the same in all clusters.

        Raises
        ------
        NotAvailableError
            There are no standard errors; the error states why.
        """
        return wald_tests(self._record)

    @takes_alpha
    def covariate_effects(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return effects of the covariates of ``adjust=`` on columns, given the cluster and the factors.

        Parameters
        ----------
        alpha : float
            Confidence limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            Index (site, modality, column, level, covariate). ``estimate`` is the effect of one unit of the
            covariate: on the mean of a continuous column, in its units; on the logit of higher levels of an
            ordinal or binary one; on the log odds of a level against the first for a nominal one. With
            standard errors: ``std_error``, ``conf_low``, ``conf_high``, ``statistic`` and ``p_value``.

        Raises
        ------
        NotAvailableError
            No columns are adjusted.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_clusters(300, ["continuous", "ordinal"], p=3, seed=1)
        >>> data.frames["Client 1"]["age"] = 20.0 + data.frames["Client 1"].index % 60
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> model = fs.M2SEM(partition, 2, 1, adjust={"Client 1": "~ age"})
        >>> len(model.fit(select=None, n_init=1).covariate_effects())
        3
        """
        return covariate_effects(self._record, alpha)

    @takes_alpha
    def communalities(self, alpha: float = 0.05) -> pd.DataFrame:
        """Share of each column's variance within clusters that its factors explain.

        For ordinal and binary columns, the share of the variance of an underlying logistic variable; 0 for
        nominal ones, nan if columns are too few to determine it.

        Parameters
        ----------
        alpha : float
            Confidence limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            ``estimate``, ``std_error``, ``conf_low``, ``conf_high``.

        Raises
        ------
        NotAvailableError
            There are no standard errors; the error states why.
        """
        return communality_table(self._record, alpha)

    @takes_alpha
    @shows_progress
    def bootstrap(
        self, samples: int = 200, *, alpha: float = 0.05, seed: int = 0, progress: bool | None = None
    ) -> BootstrapResults:
        """Compute standard errors from refits of samples drawn from the fit, without any site.

        Compare them with those from the information if clusters overlap, because the latter need large
        samples.

        Parameters
        ----------
        samples : int
            Number of samples.
        alpha : float
            Confidence limits are of level ``1 - alpha``.
        seed : int
            Seed of the draws.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        BootstrapResults

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> fit = fs.M2SEM(partition, n_clusters=2, n_factors=1).fit(select=None, n_init=1)
        >>> fit.bootstrap(4).sizes.columns.tolist()
        ['estimate', 'std_error', 'conf_low', 'conf_high']
        """
        check_integer("samples", samples, 2)
        place = self._alive("bootstrap").model._subjects.place
        rng = np.random.default_rng(seed)
        return bootstrap(self._record, place, int(samples), alpha, rng, sources=(self,))

    @shows_progress
    def test_against(
        self,
        smaller: M2SEMResults,
        samples: int = 50,
        *,
        n_init: int | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> ClusterNumberTest:
        """Test these K clusters against K - 1 by a parametric bootstrap, without any site.

        The likelihood ratio has no known distribution here. It is computed again in samples that are drawn
        from the smaller fit. The test needs the model's distributions: in skewed columns it rejects too
        often.

        Parameters
        ----------
        smaller : M2SEMResults
            A fit of K - 1 clusters on the same columns, not loaded from a file; both with ``select=None``.
        samples : int
            Number of samples; the smallest p-value is ``1 / (samples + 1)``.
        n_init : int, optional
            Number of starts of K clusters in each sample; by default as many as this fit had, since more
            starts find larger ratios.
        seed : int
            Seed of the draws.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        ClusterNumberTest

        Raises
        ------
        ModelError
            The fits do not differ by one cluster, or have different columns, factors or entities, or selected
            columns.

        References
        ----------
        McLachlan, G. J. (1987). On bootstrapping the likelihood ratio test statistic for the number of
        components in a normal mixture. Journal of the Royal Statistical Society C 36, 318-324.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_clusters(150, ["continuous"] * 3, p=3, separation=3.0, seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> one, two = [
        ...     fs.M2SEM(partition, K, 1).fit(select=None, n_init=1, cov_type=None) for K in (1, 2)
        ... ]
        >>> two.test_against(one, samples=4, n_init=1).pvalue
        0.2
        """
        here, there = self._record, smaller._record
        same = here.n == there.n and here.factors == there.factors
        columns = [[(s, one.modalities) for s, one in r.sites.items()] for r in (here, there)]
        if not same or columns[0] != columns[1] or here.select or there.select:
            raise ModelError(
                "test_against: expected two fits with select=None of the same entities, columns and factors"
            )
        if len(here.shares) != len(there.shares) + 1:
            raise ModelError(
                f"test_against: expected a fit of {len(here.shares) - 1} clusters, received one of "
                f"{len(there.shares)}"
            )
        check_integer("samples", samples, 2)
        starts = here.starts[1] if n_init is None else n_init
        check_integer("n_init", starts, 1)
        subjects = smaller._alive("test_against").model._subjects
        drawn = bootstrap_ratios(there, subjects, int(samples), int(starts), np.random.default_rng(seed))
        statistic = 2.0 * (here.loglik - there.loglik)
        pvalue = (1 + int(np.count_nonzero(drawn >= statistic))) / (int(samples) + 1)
        return ClusterNumberTest(statistic, pvalue, int(samples), len(there.shares))

    @takes_alpha
    def outside(self, variable: str, *, site: str | None = None, alpha: float = 0.05) -> OutsideResults:
        """Compare clusters by a variable that was not clustered.

        The site that holds it sums it by most likely cluster; classification error is corrected (Bolck, Croon
        and Hagenaars 2004).

        Parameters
        ----------
        variable : str
            A numerical column, whose means are compared, or a categorical one, whose shares of levels are
            compared.
        site : str, optional
            Site that holds it; by default, the site that has a column of this name.
        alpha : float
            Confidence limits are of level ``1 - alpha``.

        Returns
        -------
        OutsideResults

        Raises
        ------
        ModelError
            No site has such a column, or several have, or it was clustered.
        PolicyError
            Its site refuses: a cluster has too few entities, or too few of a level.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_clusters(300, ["continuous", "ordinal"], p=3, seed=1)
        >>> first = data.frames["Client 1"]
        >>> first["cost"] = data.labels.to_numpy() + first["c1_1"] / 10
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> formula = "~ c1_2 + c1_3 + c2_1 + c2_2 + c2_3"
        >>> model = fs.M2SEM.from_formula(formula, partition, n_clusters=2, n_factors=1)
        >>> model.fit(select=None, n_init=1).outside("cost").tidy().shape
        (2, 5)
        """
        model, labels = self._alive("outside").model, self.labels.to_numpy() - 1
        holders = [name for name, held in model.partition.columns.items() if variable in held]
        if site is not None:
            holders = [name for name in holders if name == site]
        if not holders:
            raise ModelError(
                f"outside: expected a column of a site, received {variable!r}, which no site has"
            )

        (holder,) = holders
        if variable in model._chosen.columns.get(holder, ()):
            raise ModelError(
                f"outside: {variable!r} was clustered, so clusters differ in it by construction",
                remedy=Remedy("profiles()", "use {call}, contrasts() or tests()"),
            )
        clusters = labels[model.partition.rows[holder]]
        ledger = self._ledger or model._new_ledger()
        levels, sums = request_outside_sums(model, holder, variable, clusters, ledger)
        errors = classification_errors(self.posterior.to_numpy())
        return OutsideResults(variable, holder, levels, errors, sums, alpha, sources=(self,))

    # ---- plots -----------------------------------------------------------------------------------

    def plot_profiles(self, selected: bool = True) -> Figure:
        """Draw clusters' means, and mean indices of levels, a panel for each modality.

        Parameters
        ----------
        selected : bool
            Whether only columns that separate the clusters are drawn.

        Returns
        -------
        matplotlib Figure

        Raises
        ------
        NotAvailableError
            No column separates the clusters.
        """
        return plot_cluster_profiles(self._record, selected)

    def plot_heat(self, ax: Axes | None = None) -> Axes:
        """Draw how far each cluster's columns are from their means over clusters, as a heat map."""
        return plot_profile_heat(self._record, ax)

    # ---- printed ---------------------------------------------------------------------------------

    def _glance(self) -> dict[str, Any]:
        r = self._record
        return {
            "nobs": r.n,
            "n_sites": len(r.sites),
            "n_clusters": len(r.shares),
            "n_factors": r.factors,
            "logLik": r.loglik,
            "BIC": r.bic,
            "ICL": r.bic + 2.0 * r.uncertainty,
            "entropy": r.entropy,
            "converged": r.converged,
        }

    def _sheets(self) -> Iterator[Sheet]:
        return summary_sheets(self._record)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self.n_clusters} clusters of {self.nobs:,} entities; see .summary()>"
        )

    def _summary_notes(self) -> Iterator[Note]:
        return notes(self._record)

    def _alive(self, what: str) -> SessionFit:
        if self._live is None:
            raise NotAvailableError(
                f"{what}: saved results hold no value of an entity",
                remedy=Remedy("predict(partition)", "{call} computes posteriors, and a new fit the rest"),
            )
        return self._live


def fitted_site(model: Any, reply: Reply, entities: int, skewed: Bools) -> FittedSite:
    """Record the releases of a site."""
    arrays, modalities = dict(reply.arrays), model._agreed.modalities[reply.site]
    reported, adjust = model._agreed.covariates.get(reply.site), model._chosen.adjust.get(reply.site)
    return FittedSite(
        modalities=modalities,
        floor=marked(modalities, arrays.pop("floor")),
        members=np.where(
            np.repeat(arrays.pop("shown"), [one.most_levels for one in modalities for _ in one.columns]),
            arrays.pop("members"),
            np.nan,
        ),
        skewed=marked(modalities, skewed),
        entities=entities,
        terms=adjust.terms if adjust else (),
        covariates=reported.names if reported else (),
        without=reported.without if reported else 0,
        coding=reply.text,
        spread=arrays.pop("covariates", np.zeros((2, 0))),
        effects=arrays.pop("effects", np.zeros((0, 0))),
        **arrays,
    )


def marked(modalities: tuple[ModalityRequest, ...], marks: Array) -> tuple[str, ...]:
    """Names of the columns that are marked, (sum of P,)."""
    names = [name for one in modalities for name in one.names]
    return tuple(name for name, here in zip(names, marks.tolist(), strict=True) if here)
