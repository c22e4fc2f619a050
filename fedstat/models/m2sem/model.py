"""Clusters of entities over sites: arguments in, results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedstat.docstrings import inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, ModelError, PolicyError, warn
from fedstat.federation.audit.ledger import CoordinatorLog
from fedstat.federation.design.formula.parse import parse_formula
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.secure_products import SecureProductSession, least_rows
from fedstat.models import checks
from fedstat.models.explain import DryRunPlan, Explainable
from fedstat.models.m2sem import specification
from fedstat.models.m2sem.em import MixtureExchange, StartPlan
from fedstat.models.m2sem.explain import M2SEMPlan, invent_sites
from fedstat.models.m2sem.protocol import MixturePlan, fit_mixture
from fedstat.models.m2sem.request import FAMILY, MOST_CLUSTERS, MOST_FACTORS
from fedstat.models.m2sem.results import M2SEMResults
from fedstat.models.m2sem.search import ClusterSearch, fit_sizes
from fedstat.models.m2sem.steps import withheld
from fedstat.models.m2sem.summary import adjusted_in_words
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.progress_line import shows_progress

Select = Literal["bic", "ebic", "icl"]
Starts = Literal["all", "sum"]
NODES, FINE_NODES = 7, 15

FITTED_BEFORE = (
    "If these entities were clustered before, use the result of the earlier fit. A second fit whose "
    "posteriors differ in only about one entity would reveal that entity by the difference"
)


class M2SEM(Explainable):
    """Clusters of entities whose columns, of mixed type, are at several sites.

    The columns of one kind at one site, a *modality*, are measured on a few factors of their own, whose means
    differ by cluster. Entities that a site lacks are kept: the likelihood is that of the observed values.
    Penalties select the modalities that separate clusters, and the columns by which they do so. `family` has
    the steps at the sites.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout.
    n_clusters : int
        K; :meth:`search` compares several.
    n_factors : int
        Q, of every modality; a modality with fewer columns has as many factors as columns. 0 is latent class
        analysis: columns are independent within clusters. Each has its own location in every cluster: the
        mean of a continuous column with one variance, the probabilities of a binary or nominal one, and a
        shift of the thresholds of an ordinal one.
    columns : sequence of str, optional
        Columns for clustering; the default is all.
    modalities : mapping of str to sequence of str, optional
        Columns of one site that share factors, by the modality's name. By default, a site's continuous
        columns are one modality, and its categorical columns another.
    adjust : str or mapping of str to str, optional
        Known covariates, as a formula without a response such as ``"~ age + C(sex)"``, in the language of
        regression formulas. Columns are regressed on them within clusters, so that clusters do not reflect
        them; covariates are not clustered themselves. A covariate must be at the site whose columns it
        adjusts, under a name of its own. With ``"~ age_a + age_b"``, each site uses the terms in its own
        columns, and a warning names sites without any, whose columns are not adjusted. ``{"A": "~ age_a"}``
        states the covariates of each site. An entity without a covariate counts as missing at its site.
    continuous, ordinal, nominal : sequence of str
        Kinds of columns of whole numbers with few values, for which a kind is required, or of other columns.
        By default, floats are continuous, ordered categories ordinal, other categories nominal, and columns
        of two values binary.
    coordinator : str, optional
        The site of the coordinator, or ``"apart"``, the default.

    Raises
    ------
    ModelError, DesignError
        An argument has no meaning, or the kind of a column is not clear; a site lacks a covariate.
    FormulaError
        `adjust` is not a formula of the language, or names a column that no site has.
    EstimationError
        No site has any value for some entities.

    Warns
    -----
    DataWarning
        Columns of some sites are not adjusted; entities lack covariates.

    References
    ----------
    Ding, Y. (2024). Statistical machine learning and data fusion methodologies: applications in
    healthcare. Doctoral dissertation, Binghamton University, chapter 2.

    Linzer, D. A. and Lewis, J. B. (2011). poLCA: an R package for polytomous variable latent class analysis.
    Journal of Statistical Software 42 (10). For ``n_factors=0``.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> model = fs.M2SEM(partition, n_clusters=2, n_factors=1)
    >>> fit = model.fit(select=None, n_init=1, cov_type=None)
    >>> fit.n_clusters, len(fit.labels)
    (2, 200)
    >>> fs.M2SEM.from_formula("~ c1_1 + c2_1", partition, n_clusters=2, n_factors=1).n_clusters
    2
    >>> fs.M2SEM.search(partition, n_clusters=[1, 2], n_factors=[1], n_init=1).best
    (2, 1)
    """

    family: ClassVar[str] = FAMILY
    _plan: ClassVar[type[DryRunPlan] | None] = M2SEMPlan

    def __init__(
        self,
        partition: ClientPartition,
        n_clusters: int = 3,
        n_factors: int = 2,
        *,
        columns: Sequence[str] | None = None,
        modalities: Mapping[str, Sequence[str]] | None = None,
        adjust: str | Mapping[str, str] | None = None,
        continuous: Sequence[str] = (),
        ordinal: Sequence[str] = (),
        nominal: Sequence[str] = (),
        coordinator: str | None = None,
    ) -> None:
        checks.check_layout(type(self).__name__, partition, "vertical")
        checks.check_integer("n_clusters", n_clusters, 1)
        checks.check_integer("n_factors", n_factors, 0)
        if n_clusters > MOST_CLUSTERS or n_factors > MOST_FACTORS:
            raise ModelError(
                f"n_clusters, n_factors: expected at most {MOST_CLUSTERS} clusters and {MOST_FACTORS} factors"
            )
        self.partition, self.engine = partition, partition.engine
        self.n_clusters, self.n_factors = int(n_clusters), int(n_factors)
        self.coordinator = coordinator or partition.coordinator or "apart"
        checks.check_choice("coordinator", self.coordinator, ("apart", *partition.sites))
        said = {"continuous": continuous, "ordinal": ordinal, "nominal": nominal}
        terms = specification.read_adjust(adjust, partition)
        self._chosen = specification.choose_columns(partition, columns, modalities, said, terms)
        specification.check_adjusted(terms, self._chosen, one_for_all=isinstance(adjust, str))
        self._session = partition._new_session()
        self._log = CoordinatorLog()
        self._agreement = self._new_ledger()
        least = least_rows(self._policies)
        self._requester = SecureProductSession(FAMILY, self._session, self._agreement.at, least=least)
        self._agreed: specification.ColumnsSchema = self.engine.run(
            specification.agree_columns(self._requester, self._chosen), self._agreement
        )
        specification.warn_of_lacking(self._agreed.covariates)
        limits = {c: (p.min_count, p.max_share) for c, p in self._policies.items()}
        self._subjects, _ = specification.who_has_whom(
            self._agreed, partition.rows, partition.n_entities, limits
        )
        specification.check_sizes(self._agreed, self._subjects, self.n_clusters, self.n_factors)

    @classmethod
    @checks.checks_arguments
    @inherits_signature(__init__, without=["columns"])
    def from_formula(
        cls,
        formula: str,
        partition: ClientPartition,
        n_clusters: int = 3,
        n_factors: int = 2,
        **options: Any,
    ) -> Self:
        """Make a model from a formula without a response, whose terms are columns.

        Parameters
        ----------
        formula : str
            ``"~ ."`` for every column, or ``"~ a + b"``.
        partition : ClientPartition
        n_clusters, n_factors, modalities, adjust, continuous, ordinal, nominal, coordinator
            See the class.

        Raises
        ------
        FormulaError
            A term is not a column; add a transformed column to the table first.
        """
        checks.check_layout(cls.__name__, partition, "vertical")
        parsed = parse_formula(formula, partition.columns, response=False)
        everything = {name for held in partition.columns.values() for name in held}
        # Names with blanks, and keywords of Python, may be in backticks.
        written = [{term.strip("`"): term for term in terms.terms} for terms in parsed.sites]
        if everything == {name for terms in written for name in terms}:
            return cls(partition, n_clusters, n_factors, **options)
        names: list[str] = []
        for terms, names_of_site in zip(parsed.sites, written, strict=True):
            wrong = [term for name, term in names_of_site.items() if name not in terms.columns]
            if wrong:
                raise FormulaError(
                    f"formula: expected columns by their names, received '{wrong[0]}'; transform it at its "
                    "site, before the partition is made"
                )
            names += terms.columns
        return cls(partition, n_clusters, n_factors, columns=names, **options)

    @property
    def _policies(self) -> dict[str, Policy]:
        return {site: self.partition.sites[site].policy for site in self._chosen.columns}

    @property
    def _description(self) -> str:
        """The request in words."""
        words = f"{self.n_clusters} clusters by {self._agreed.columns} columns" + (
            f" on {self.n_factors} factors each" if self.n_factors else ", independent within clusters"
        )
        terms = {site: own.terms for site, own in self._chosen.adjust.items()}
        return f"{words}; {adjusted_in_words(terms, self._chosen.columns)}" if terms else words

    @property
    def _distribution_text(self) -> str:
        return "a mixture of factor models" if self.n_factors else "latent classes"

    @checks.checks_arguments
    def fit(
        self,
        *,
        select: Select | None = "bic",
        n_init: int = 3,
        starts: Starts = "all",
        local_steps: int = 12,
        masked: bool | None = None,
        cov_type: Literal["observed"] | None = "observed",
        half_samples: int = 0,
        maxiter: int = 200,
        seed: int = 0,
        progress: bool | None = None,
    ) -> M2SEMResults:
        """Fit the clusters, and select the columns and modalities that separate them.

        Parameters
        ----------
        select : {"bic", "ebic", "icl"} or None
            Criterion for the supports on the path of penalties, each refitted without penalty; None: no
            selection.
        n_init : int
            Number of starts by k-means of the factor scores of all sites, or of columns without factors.
        starts : {"all", "sum"}
            Whether each site's own clusters are starts as well; these are revealed to the coordinator and to
            the other sites.
        local_steps : int
            Number of EM steps that a site takes between two messages.
        masked : bool, optional
            Whether pairwise masks hide the sites' parts of sums; the default is to do so with three or more
            sites.
        cov_type : {"observed"} or None
            Standard errors from the observed information, for which every two sites multiply scores of their
            parameters securely; None for none. There are also none, as the summary states, if a policy counts
            the bits that sums reveal about columns of few values.
        half_samples : int
            Number of random halves of the entities, such as 50, in which columns and modalities are selected
            again at the best penalties; the selected shares are ``frequency`` of the results.
        maxiter : int
            Number of rounds after which the fit stops; the summary then reports that it has not converged.
        seed : int
            Seed of the starts.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        M2SEMResults

        Raises
        ------
        EstimationError
            A cluster has too few entities at some site, for every start.
        PolicyError
            A site refuses a release, for instance because posteriors differ from those of an earlier fit in
            only about one entity.

        Warns
        -----
        ConvergenceWarning
            The iteration did not converge.
        DisclosureWarning
            Two sites: each part of a sum follows from the other part.
        """
        call = Call.of(self.fit, locals())
        checks.check_choice("cov_type", cov_type, ("observed", None))
        plan = self._plan_fit(select, n_init, starts, local_steps, maxiter, seed)
        checks.check_integer("half_samples", half_samples, 0)
        plan = replace(plan, half_samples=int(half_samples), **self._errors(cov_type))
        return run_fit(self, call, M2SEM._estimate, plan, self._masked(masked), seed, maxiter)

    def _estimate(
        self, attempt: FitAttempt, plan: MixturePlan, masked_at: Sequence[str], seed: int, maxiter: int
    ) -> M2SEMResults:
        protocol = fit_mixture(self._exchange(seed, maxiter), plan, self._agreed.modalities)
        try:
            fit = attempt.run(protocol, masked_at)
        except PolicyError as error:
            if error.rule not in ("differencing", "rows"):  # under reasons = "logged" all have one rule
                raise
            raise error.with_message(f"{error}. {FITTED_BEFORE}") from None
        if not fit.converged:
            warn(f"M2SEM did not converge after {fit.rounds} rounds", ConvergenceWarning)
        masks = any(entry.masked for entry in attempt.ledger.entries)
        shown = plan.starts.own and self.n_clusters > 1
        return M2SEMResults._of(self, fit, masks, shown, attempt.ledger)

    @classmethod
    @inherits_signature(__init__)
    @shows_progress
    def search(
        cls,
        partition: ClientPartition,
        n_clusters: Sequence[int] | int = range(1, 6),
        n_factors: Sequence[int] | int = (1, 2),
        *,
        n_init: int = 3,
        starts: Starts = "sum",
        local_steps: int = 12,
        masked: bool | None = None,
        maxiter: int = 200,
        seed: int = 0,
        progress: bool | None = None,
        **options: Any,
    ) -> ClusterSearch:
        """Compare numbers of clusters and factors by BIC, all in parallel in the same rounds.

        Parameters
        ----------
        partition : ClientPartition
        n_clusters, n_factors : sequence of int, or int
            Every pair is fitted, without selection of columns.
        n_init, starts, local_steps, masked, maxiter, seed, progress
            As for :meth:`fit`; by default, sites' own clusters are not used as starts.
        columns, modalities, adjust, continuous, ordinal, nominal, coordinator
            See the class.

        Returns
        -------
        ClusterSearch
            It prints, plots, and has the ``best`` pair.

        Raises
        ------
        ModelError
            A number has no meaning for these columns and entities.
        """
        pairs = product(np.atleast_1d(n_factors).tolist(), np.atleast_1d(n_clusters).tolist())
        sizes = [(int(K), int(Q)) for Q, K in pairs]
        if not sizes or min(K for K, _ in sizes) < 1 or min(Q for _, Q in sizes) < 0:
            raise ModelError(
                "n_clusters, n_factors: expected whole numbers, at least 1 cluster and 0 factors"
            )
        model = cls(partition, max(K for K, _ in sizes), max(Q for _, Q in sizes), **options)
        return model._search(
            sizes,
            n_init=n_init,
            starts=starts,
            local_steps=local_steps,
            masked=masked,
            maxiter=maxiter,
            seed=seed,
        )

    def _search(
        self,
        sizes: Sequence[tuple[int, int]],
        *,
        n_init: int,
        starts: Starts,
        local_steps: int,
        masked: bool | None,
        maxiter: int,
        seed: int,
    ) -> ClusterSearch:
        """Fit mixtures of these numbers of clusters and factors."""
        call = Call.of(self._search, locals())
        plan = self._plan_fit(None, n_init, starts, local_steps, maxiter, seed)

        def compare(model: M2SEM, attempt: FitAttempt) -> ClusterSearch:
            exchange = model._exchange(seed, maxiter)
            found = attempt.run(fit_sizes(exchange, sizes, plan.starts), model._masked(masked))
            names = {
                site: [n for m in some for n in m.names] for site, some in model._agreed.modalities.items()
            }
            skewed = [
                (site, name)
                for site, own in names.items()
                for name, here in zip(own, exchange.skewed[site].tolist(), strict=True)
                if here
            ]
            return ClusterSearch._of(sizes, found, attempt.ledger, skewed)

        return run_fit(self, call, compare)

    def _errors(self, cov_type: str | None) -> dict[str, Any]:
        """Return whether to compute standard errors, and the reason if an owner does not allow them."""
        wanted = cov_type is not None and self.n_clusters > 1
        why = [
            withheld(site, policy, self._agreed.modalities[site], site in self._agreed.covariates)
            for site, policy in self._policies.items()
        ]
        words = "; ".join(filter(None, why)) if wanted else ""
        return {"observed": wanted and not words, "withheld": words}

    def _plan_fit(
        self, select: Select | None, n_init: int, starts: Starts, local_steps: int, maxiter: int, seed: int
    ) -> MixturePlan:
        checks.check_choice("select", select, ("bic", "ebic", "icl", None))
        checks.check_choice("starts", starts, ("all", "sum"))
        for name, value in (("n_init", n_init), ("local_steps", local_steps), ("maxiter", maxiter)):
            checks.check_integer(name, value, 1)
        checks.check_integer("seed", seed, 0)
        begin = StartPlan(int(n_init), starts == "all", 1, int(local_steps), 15)
        return MixturePlan(self.n_clusters, self.n_factors, begin, select, int(local_steps), FINE_NODES)

    def _exchange(self, seed: int, most: int) -> MixtureExchange:
        return MixtureExchange(self._requester, self._subjects, NODES, np.random.default_rng(seed), int(most))

    def _masked(self, masked: bool | None) -> Sequence[str]:
        """Sites that mask their sums: all, if masks hide something or are requested."""
        sites, wanted = self._subjects.sites, any(p.masked_only for p in self._policies.values())
        return sites if checks.check_masked(masked, len(sites), wanted) else ()

    def _columns_read(self, site: str) -> Sequence[str]:
        adjust = self._chosen.adjust.get(site)
        return (*self._chosen.columns.get(site, ()), *(adjust.columns if adjust else ()))

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        return invent_sites(self._agreed, self.partition.rows, policies, self._session)
