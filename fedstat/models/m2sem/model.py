"""Clusters of entities over sites: arguments in, results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedstat.errors import FormulaError, ModelError, PolicyError
from fedstat.federation.audit.ledger import CoordinatorLog
from fedstat.federation.design.formula.parse import parse_formula
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.secure_products import SecureProductSession, least_rows
from fedstat.models.checks import check_choice, check_layout, check_masked, check_whole, checks_arguments
from fedstat.models.explain import Explainable, ForecastPlan
from fedstat.models.m2sem.em import MixtureExchange, StartPlan
from fedstat.models.m2sem.explain import M2SEMPlan, invent_clients
from fedstat.models.m2sem.protocol import MixturePlan, fit_mixture
from fedstat.models.m2sem.request import FAMILY, MOST_CLUSTERS, MOST_FACTORS
from fedstat.models.m2sem.results import M2SEMResults
from fedstat.models.m2sem.search import ClusterSearch, fit_sizes
from fedstat.models.m2sem.specification import (
    AgreedColumns,
    agree_columns,
    check_adjusted,
    check_sizes,
    choose_columns,
    read_adjust,
    warn_of_lacking,
    who_has_whom,
)
from fedstat.models.m2sem.steps import withheld
from fedstat.models.m2sem.summary import adjusted_in_words
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.progress_line import shows_progress

Select = Literal["bic", "ebic", "icl"]
Starts = Literal["all", "sum"]
NODES, FINE_NODES = 7, 15

FITTED_BEFORE = (
    "Where clusters of these entities were fitted before, use the result of the earlier fit: of a second fit "
    "whose posteriors differ from its in hardly more than one entity, the difference would tell that entity"
)


class M2SEM(Explainable):
    """Clusters of entities whose columns, of mixed type, are at several sites.

    The columns of one kind at one site, a *modality*, are measured on a few factors of their own, of
    which the clusters move the means. Entities that a site lacks cost nothing: the likelihood is that
    of what there is. By penalties it is found which modalities tell clusters apart, and by which columns.
    The steps that sites are asked for are those of `family`.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout.
    n_clusters : int
        K; :meth:`search` compares several.
    n_factors : int
        Q, of every modality.
    columns : sequence of str, optional
        To be clustered by; by default all.
    modalities : mapping of str to sequence of str, optional
        Columns of one site that share factors, by the modality's name. By default a site's
        continuous columns are one, and its categorical columns another.
    adjust : str or mapping of str to str, optional
        Known covariates, as a formula without a response such as ``"~ age + C(sex)"``; its language is that
        of regression formulas. Columns are regressed on them within clusters, so that clusters are not due to
        these, and they are not clustered themselves. A covariate stands at the site whose columns it
        adjusts, under a name of its own: of ``"~ age_a + age_b"`` each site has the terms in its
        columns, and a warning names sites without any, whose columns stay as they are;
        ``{"A": "~ age_a"}`` says of each site what it is adjusted for. An entity without a covariate
        counts as missing at its site.
    continuous, ordinal, nominal : sequence of str
        What columns of whole numbers with few values are, which else is asked for; or of others. Floats are
        continuous, ordered categories ordinal, other categories nominal, and columns of two values binary.
    coordinator : str, optional
        The site at which the coordinator sits, or ``"apart"``, the default.

    Raises
    ------
    ModelError, DesignError
        An argument has no meaning, or it is not clear what a column is; a site lacks a covariate.
    FormulaError
        `adjust` is no formula of the language, or names a column that nobody has.
    EstimationError
        No site has any value of some entities.

    Warns
    -----
    DataWarning
        Columns of some sites are not adjusted; entities lack covariates.

    References
    ----------
    Ding, Y. (2024). Federated learning for multimodal data. Dissertation, Binghamton University, chapter 2.

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
    _plan: ClassVar[type[ForecastPlan] | None] = M2SEMPlan

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
        check_layout(type(self).__name__, partition, "vertical")
        check_whole("n_clusters", n_clusters, 1)
        check_whole("n_factors", n_factors, 1)
        if n_clusters > MOST_CLUSTERS or n_factors > MOST_FACTORS:
            raise ModelError(f"expected at most {MOST_CLUSTERS} clusters and {MOST_FACTORS} factors")
        self.partition, self.engine = partition, partition.engine
        self.n_clusters, self.n_factors = int(n_clusters), int(n_factors)
        self.coordinator = coordinator or partition.coordinator or "apart"
        check_choice("coordinator", self.coordinator, ("apart", *partition.clients))
        said = {"continuous": continuous, "ordinal": ordinal, "nominal": nominal}
        terms = read_adjust(adjust, partition)
        self._chosen = choose_columns(partition, columns, modalities, said, terms)
        check_adjusted(terms, self._chosen, one_for_all=isinstance(adjust, str))
        self._session = partition._new_session()
        self._account = CoordinatorLog()
        self._agreement = self._new_ledger()
        least = least_rows(self._policies)
        self._asking = SecureProductSession(FAMILY, self._session, self._agreement.at, least=least)
        self._agreed: AgreedColumns = self.engine.run(
            agree_columns(self._asking, self._chosen), self._agreement
        )
        warn_of_lacking(self._agreed.covariates)
        limits = {c: (p.min_count, p.max_share) for c, p in self._policies.items()}
        self._subjects, _ = who_has_whom(self._agreed, partition.rows, partition.n_entities, limits)
        check_sizes(self._agreed, self._subjects, self.n_clusters, self.n_factors)

    @classmethod
    def from_formula(cls, formula: str, partition: ClientPartition, **options: Any) -> Self:
        """Make a model from a formula without a response, whose terms are columns.

        Parameters
        ----------
        formula : str
            ``"~ ."`` for every column, or ``"~ a + b"``.
        partition : ClientPartition
        **options
            As for the class, but for `columns`.

        Raises
        ------
        FormulaError
            A term is no column; a transformed column is put into the table first.
        """
        parsed = parse_formula(formula, partition.columns, response=False)
        everything = {name for held in partition.columns.values() for name in held}
        if everything == {name for terms in parsed.clients for name in terms.terms}:
            return cls(partition, **options)
        names: list[str] = []
        for terms in parsed.clients:
            wrong = [term for term in terms.terms if term not in terms.columns]
            if wrong:
                raise FormulaError(
                    f"formula: expected columns by their names, received '{wrong[0]}'; transform it at its "
                    "site, before the partition is made"
                )
            names += terms.columns
        return cls(partition, columns=names, **options)

    @property
    def _policies(self) -> dict[str, Policy]:
        return {client: self.partition.sites[client].policy for client in self._chosen.columns}

    @property
    def _description(self) -> str:
        """What is asked for, in words."""
        words = (
            f"{self.n_clusters} clusters by {self._agreed.columns} columns on {self.n_factors} factors each"
        )
        terms = {client: own.terms for client, own in self._chosen.adjust.items()}
        return f"{words}; {adjusted_in_words(terms, self._chosen.columns)}" if terms else words

    @property
    def _law(self) -> str:
        return "a mixture of factor models"

    @checks_arguments
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
        max_rounds: int = 200,
        seed: int = 0,
        progress: bool | None = None,
    ) -> M2SEMResults:
        """Fit the clusters, and select what tells them apart.

        Parameters
        ----------
        select : {"bic", "ebic", "icl"} or None
            By what supports are judged that penalties lead to, each refitted without; None: no selection.
        n_init : int
            Starts by k-means of the factor scores of all sites.
        starts : {"all", "sum"}
            Whether each site's own clusters are starts as well; they are shown to the coordinator, and
            to the other sites.
        local_steps : int
            EM steps over its factors that a site takes between two messages.
        masked : bool, optional
            Whether sites' parts of sums are hidden by pairwise masks; by default with three
            sites or more.
        cov_type : {"observed"} or None
            Standard errors from the observed information, for which every two sites multiply scores of
            their parameters securely; None for none. There are none either, as the summary says, where a
            policy has sums judged by bits of columns of few values.
        half_samples : int
            In how many random halves of the entities, such as 50, columns and modalities are selected again
            at the best penalties; the shares that select them are ``frequency`` of the results.
        max_rounds : int
            After which the fit ends as it is, and says so.
        seed : int
            Of the starts.
        progress : bool, optional
            Tell how far the computation has come (:func:`fedstat.progress`).

        Returns
        -------
        M2SEMResults

        Raises
        ------
        EstimationError
            A cluster has too few entities at some site, whatever the start.
        PolicyError
            A site refuses a release; also one of posteriors that differ from those of an earlier fit
            in hardly more than one entity.

        Warns
        -----
        DisclosureWarning
            Two sites: each part of a sum follows from the other.
        """
        call = Call.of(self.fit, locals())
        check_choice("cov_type", cov_type, ("observed", None))
        plan = self._plan_fit(select, n_init, starts, local_steps, max_rounds, seed)
        check_whole("half_samples", half_samples, 0)
        plan = replace(plan, half_samples=int(half_samples), **self._errors(cov_type))
        return run_fit(self, call, M2SEM._estimate, plan, self._masked(masked), seed, max_rounds)

    def _estimate(
        self, attempt: FitAttempt, plan: MixturePlan, masked_at: Sequence[str], seed: int, max_rounds: int
    ) -> M2SEMResults:
        protocol = fit_mixture(self._exchange(seed, max_rounds), plan, self._agreed.modalities)
        try:
            fit = attempt.run(protocol, masked_at)
        except PolicyError as error:
            if error.rule not in ("differencing", "rows"):  # under reasons = "logged" all have one rule
                raise
            raise error.with_message(f"{error}. {FITTED_BEFORE}") from None
        masks = any(entry.masked for entry in attempt.ledger.entries)
        shown = plan.starts.own and self.n_clusters > 1
        return M2SEMResults._of(self, fit, masks, shown, attempt.ledger)

    @classmethod
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
        max_rounds: int = 200,
        seed: int = 0,
        progress: bool | None = None,
        **options: Any,
    ) -> ClusterSearch:
        """Compare numbers of clusters and factors by BIC, all side by side in the same rounds.

        Parameters
        ----------
        partition : ClientPartition
        n_clusters, n_factors : sequence of int, or int
            Every pair of them is fitted, without selection of columns.
        n_init, starts, local_steps, masked, max_rounds, seed, progress
            As for :meth:`fit`; by default no site's own clusters are starts.
        **options
            As for the class.

        Returns
        -------
        ClusterSearch
            It prints, plots and has the ``best`` pair.

        Raises
        ------
        ModelError
            A number has no meaning for these columns and entities.
        """
        pairs = product(np.atleast_1d(n_factors).tolist(), np.atleast_1d(n_clusters).tolist())
        sizes = [(int(K), int(Q)) for Q, K in pairs]
        if not sizes or min(min(size) for size in sizes) < 1:
            raise ModelError("n_clusters, n_factors: expected whole numbers, 1 or more")
        model = cls(partition, max(K for K, _ in sizes), max(Q for _, Q in sizes), **options)
        return model._search(
            sizes,
            n_init=n_init,
            starts=starts,
            local_steps=local_steps,
            masked=masked,
            max_rounds=max_rounds,
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
        max_rounds: int,
        seed: int,
    ) -> ClusterSearch:
        """Fit mixtures of these numbers of clusters and factors."""
        call = Call.of(self._search, locals())
        plan = self._plan_fit(None, n_init, starts, local_steps, max_rounds, seed)

        def compare(model: M2SEM, attempt: FitAttempt) -> ClusterSearch:
            protocol = fit_sizes(model._exchange(seed, max_rounds), sizes, plan.starts)
            return ClusterSearch._of(sizes, attempt.run(protocol, model._masked(masked)), attempt.ledger)

        return run_fit(self, call, compare)

    def _errors(self, cov_type: str | None) -> dict[str, Any]:
        """Say whether there are to be standard errors, and why not where an owner gives nothing for them."""
        wanted = cov_type is not None and self.n_clusters > 1
        why = [
            withheld(client, policy, self._agreed.modalities[client], client in self._agreed.covariates)
            for client, policy in self._policies.items()
        ]
        words = "; ".join(filter(None, why)) if wanted else ""
        return {"observed": wanted and not words, "withheld": words}

    def _plan_fit(
        self, select: Select | None, n_init: int, starts: Starts, local_steps: int, max_rounds: int, seed: int
    ) -> MixturePlan:
        check_choice("select", select, ("bic", "ebic", "icl", None))
        check_choice("starts", starts, ("all", "sum"))
        for name, value in (("n_init", n_init), ("local_steps", local_steps), ("max_rounds", max_rounds)):
            check_whole(name, value, 1)
        check_whole("seed", seed, 0)
        begin = StartPlan(int(n_init), starts == "all", 1, int(local_steps), 15)
        return MixturePlan(self.n_clusters, self.n_factors, begin, select, int(local_steps), FINE_NODES)

    def _exchange(self, seed: int, most: int) -> MixtureExchange:
        return MixtureExchange(self._asking, self._subjects, NODES, np.random.default_rng(seed), int(most))

    def _masked(self, masked: bool | None) -> Sequence[str]:
        """Sites that mask their sums: all where masks hide something or are asked for."""
        sites, wanted = self._subjects.clients, any(p.masked_only for p in self._policies.values())
        return sites if check_masked(masked, len(sites), wanted) else ()

    def _columns_read(self, site: str) -> Sequence[str]:
        adjust = self._chosen.adjust.get(site)
        return (*self._chosen.columns.get(site, ()), *(adjust.columns if adjust else ()))

    def _invent_sites(self, plan: ForecastPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        return invent_clients(self._agreed, self.partition.rows, policies, self._session)
