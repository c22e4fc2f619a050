"""Synthetic tables from a Gaussian copula, released once with differential privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias, overload

import numpy as np

from fedstat.errors import DataWarning, DisclosureWarning, ModelError, NotAvailableError, Remedy, warn
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.federation.tables.published import Published
from fedstat.inference.explanation import Explanation
from fedstat.models.checks import check_choice, check_integer, check_layout, checks_arguments
from fedstat.models.copula.bounds import Bounds, IntoBound, asinh, levels, log
from fedstat.models.copula.correlation import Missing
from fedstat.models.copula.explain import CopulaPlan, problems_of_fit
from fedstat.models.copula.private_release import USUAL_DELTA, PrivateRelease, held_columns
from fedstat.models.copula.protocol import fit_copula, fit_copula_rows, plan_columns, release_rows
from fedstat.models.copula.published import METHODS, ROUNDS, Method, PublishedSynthesis, synthesize, table_of
from fedstat.models.copula.request import ALL, GramPlan, NoisePlan
from fedstat.models.copula.results import CopulaRecord, CopulaResults
from fedstat.models.copula.steps import DRY_RUN_STEPS, FAMILY
from fedstat.models.explain import DryRunPlan
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.progress_line import shows_progress

# ----------------------------------------------------------------------------------------------------
# Synthetic tables from a Gaussian copula, released once under differential privacy.

__all__ = ["Bounds", "CopulaSynthesizer", "asinh", "levels", "log"]

Mechanism: TypeAlias = Literal["private", "published"]


class CopulaSynthesizer(PrivateRelease):
    """Synthetic rows of columns at several sites, from one release with a stated epsilon.

    Every site releases the margins of its columns, and all sites together release the products of scores of
    their columns. Levels without an order and missing cells have scores of their own, at no further cost.
    Each site adds noise to its own part first, which makes both differentially private. Correlations and any
    number of synthetic rows are computed from them at no further cost. Each site's owner has to allow a
    budget: ``Policy(privacy=Budget(epsilon, delta))``.

    Sites that hold different rows of the same columns release sums over their rows, with noise; owners who
    set ``colluding`` in their budgets let the sites add it together, and less of it.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical or the horizontal layout.
    epsilon : float
        Differential privacy of the whole record of one entity, replaced by any other; in the horizontal
        layout of one row, added or removed.
    bounds : Bounds or mapping, optional
        Public description of every column; by default the owners' published one.
    missing : {"auto", "pairs", "em"}
        Use of entities that a site lacks: "pairs" uses the entities of each pair of sites, "em" maximum
        likelihood over missing patterns; "auto" chooses by the expected noise.
    delta : float
        At most 1e-6.
    columns : sequence of str, optional
        Columns to synthesize; by default all. In the horizontal layout all that every site has; the column
        that names the sites is one of them if it is named here.
    coordinator : str, optional
        The site of the coordinator, or ``"apart"``, the default.
    mechanism : {"private", "published"}
        The release described here, or a simulation of the publication's mechanism. The simulation takes
        numeric columns that are all in this process, without bounds and budgets, and gives no privacy
        protection: see :meth:`fit`.

    Raises
    ------
    ModelError
        An argument is invalid, or columns lack bounds: the error lists them, with a template to fill in.

    Notes
    -----
    Tang, Feng, Li and Wang (2025) proposed the copula; their mechanism differs in its unit of privacy. Their
    epsilon applies to one comparison of two records, and a record takes part in thousands of them:
    ``mechanism="published"`` simulates it and reports what a whole record spends.

    References
    ----------
    Canonne, C., Kamath, G. and Steinke, T. (2020). The discrete Gaussian for differential privacy. NeurIPS.
    Tang, H., Feng, L., Li, Y. and Wang, F. (2025). Data privatization in vertical federated learning with
    client-wise missing problem. arXiv 2511.20876.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=5.0, delta=1e-6))
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> bounds = fs.Bounds({"age": (20, 80), "sex": [0, 1], "chol": (80, 600)})
    >>> model = fs.CopulaSynthesizer(partition, epsilon=3.0, bounds=bounds)
    >>> fit = model.fit()
    >>> fit.sample(1000, seed=1).shape
    (1000, 3)
    """

    _plan: ClassVar[type[DryRunPlan] | None] = CopulaPlan
    _instead = DRY_RUN_STEPS
    _family_name = FAMILY

    @checks_arguments
    def __init__(
        self,
        partition: ClientPartition,
        epsilon: float,
        bounds: Bounds | Mapping[str, IntoBound] | None = None,
        *,
        missing: Missing = "auto",
        delta: float = USUAL_DELTA,
        columns: Sequence[str] | None = None,
        coordinator: str | None = None,
        mechanism: Mechanism = "private",
    ) -> None:
        rows = ("horizontal",) * (mechanism != "published")
        check_layout(type(self).__name__, partition, "vertical", *rows)
        check_choice("missing", missing, ("auto", "pairs", "em"))
        check_choice("mechanism", mechanism, ("private", "published"))
        self.missing: Missing = missing
        self.mechanism: Mechanism = mechanism
        if mechanism == "published" and not (bounds is None and missing == "auto"):
            raise ModelError(
                "mechanism='published' scales columns by their own smallest and largest values, and its "
                "methods treat missing blocks in their own ways. Omit bounds and missing"
            )
        super().__init__(partition, epsilon, delta, self._choose(partition, columns), bounds, coordinator)

    @property
    def _description(self) -> str:
        """Description of the request."""
        return f"synthesis of {self._planned.p} columns at epsilon {self.epsilon:g}"

    @cached_property
    def _planned(self) -> NoisePlan:
        """The noise plan for records without missing values."""
        return plan_columns(self.bounds, self._counts, self._rho, self._pooled)

    _release_rows = staticmethod(release_rows)

    def _noise_for(self, n: int) -> NoisePlan | GramPlan:
        """Plan the noise of a release of n complete entities, for an audit."""
        plan = plan_columns(self.bounds, dict.fromkeys(self.bounds, n), self._rho, self._pooled_of(n))
        return plan if plan.rows is not None else GramPlan(plan, (tuple(self.bounds),), self.missing == "em")

    @overload
    def fit(self, *, progress: bool | None = None) -> CopulaResults: ...

    @overload
    def fit(
        self,
        method: Method,
        *,
        rounds: int = ROUNDS,
        seed: int | np.random.Generator | None = 0,
        progress: bool | None = None,
    ) -> PublishedSynthesis: ...

    @checks_arguments
    def fit(
        self,
        method: Method | None = None,
        *,
        rounds: int = ROUNDS,
        seed: int | np.random.Generator | None = 0,
        progress: bool | None = None,
    ) -> CopulaResults | PublishedSynthesis:
        """Request the release from the sites, under their budgets, and compute the copula.

        Or run the simulation.

        Parameters
        ----------
        method : {"vcds", "evcds", "ievcds"}, optional
            Only for ``mechanism="published"``, and required there: rows drawn from the copula, rows computed
            from the perturbed ranks of each entity, or the latter again on completed tables.
        rounds : int
            Number of rounds of "ievcds", which are all run.
        seed : int, numpy.random.Generator or None
            Seed of the simulation; None draws one.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        CopulaResults
            For the simulation a PublishedSynthesis: ``table``, ``correlation``, and ``record_epsilon``, the
            epsilon that a whole record has spent.

        Raises
        ------
        DescriptionError
            A budget does not allow the release, or is spent; the error states what is left, and the line of
            the policy.
        EstimationError
            Values of a column are not in its bounds, or two sites share too few entities.
        ModelError
            The coordinator is at one of two sites, so that no third party can deal random numbers. An
            argument is invalid for the mechanism.

        Warns
        -----
        DisclosureWarning
            The mechanism is the published one: nothing is private.
        DataWarning
            The bounds of a column do not suit its released margin.

        Examples
        --------
        >>> import warnings
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(300, seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", fs.errors.DisclosureWarning)
        ...     published = fs.CopulaSynthesizer(partition, 1.0, mechanism="published").fit("vcds", seed=1)
        >>> published.table.shape, bool(published.record_epsilon.max() > 100 * published.epsilon)
        ((300, 8), True)
        """
        call = Call.of(self.fit, locals())
        if self.mechanism == "published":
            random = np.random.default_rng(seed)
            return run_fit(self, call, CopulaSynthesizer._simulate, method, rounds, random)
        if method is not None:
            raise ModelError("method, rounds and seed are of mechanism='published'; this release has none")
        return run_fit(self, call, CopulaSynthesizer._release)

    def _release(self, attempt: FitAttempt) -> CopulaResults:
        self._check_budgets()
        requester = SecureProductSession(FAMILY, self._session, attempt.ledger.at)
        rho = self._planned.rho
        if self._pooled is not None:
            protocol = fit_copula_rows(requester, self.bounds[ALL], self._pooled, self._policies, rho)
        else:
            sites, n = tuple(self.partition.sites), self.partition.n_entities
            protocol = fit_copula(requester, self.bounds, self._rows, sites, n, rho, self.missing)
        fit = attempt.run(protocol, self._masked_at)
        for text in problems_of_fit(fit):
            warn(text, DataWarning)
        record = CopulaRecord(fit, self.epsilon, self.delta)
        return CopulaResults(record, attempt.ledger)

    def explain(self, **arguments: Any) -> Explanation:
        """Say what :meth:`fit` would ask for and what it costs, and ask nothing.

        Parameters
        ----------
        **arguments
            As for :meth:`fit`.

        Returns
        -------
        Explanation

        Raises
        ------
        NotAvailableError
            The mechanism is the published one, which is simulated.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(300, seed=1)
        >>> budget = fs.Policy(privacy=fs.Budget(epsilon=5.0, delta=1e-6))
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key, policy=budget)
        >>> bounds = {name: (-10, 10) for name in ("y", "A1", "A2", "A3", "B1", "B2", "C1", "C2")}
        >>> fs.CopulaSynthesizer(partition, epsilon=1.0, bounds=bounds).explain().passes
        True
        """
        if self.mechanism == "published":
            raise NotAvailableError(
                "mechanism='published' is a simulation, which sends no request to a site",
                remedy=Remedy("fit('vcds').summary()", "{call} has the budget that each record would spend"),
            )
        return super().explain(**arguments)

    def _describe(self, bounds: Bounds | Mapping[str, IntoBound] | None) -> dict[str, Published]:
        return {} if self.mechanism == "published" else super()._describe(bounds)

    def _simulate(
        self, attempt: FitAttempt, method: Method | None, rounds: int, random: np.random.Generator
    ) -> PublishedSynthesis:
        """Repeat the published mechanism on the rows, which are all here."""
        if method is None:
            raise ModelError(f"method: mechanism='published' has {', '.join(map(repr, METHODS))}: name one")
        check_choice("method", method, METHODS)
        check_integer("rounds", rounds, 1)
        table = table_of(self.partition, self.columns)
        made = synthesize(table, self.columns, self._counts, self.epsilon, self.delta, method, rounds, random)
        warn(made.notes[0], DisclosureWarning)
        return made

    @staticmethod
    def _choose(partition: ClientPartition, columns: Sequence[str] | None) -> dict[str, list[str]]:
        """Names of the columns by site, for sites with requested columns."""
        held = held_columns(partition)
        wanted = None if columns is None else list(columns)
        known = {name for names in held.values() for name in names}
        absent = [name for name in wanted or () if name not in known]
        if absent:
            who = "no site has" if partition.layout == "vertical" else "not every site has"
            raise ModelError(f"columns: {who} {', '.join(map(repr, absent))}")
        apart = [] if partition.layout == "vertical" else [partition.site_column]
        chosen = {
            site: [name for name in names if (name not in apart if wanted is None else name in wanted)]
            for site, names in held.items()
        }
        chosen = {site: names for site, names in chosen.items() if names}
        if sum(map(len, chosen.values())) < 2:
            raise ModelError("columns: expected at least two columns to synthesize together")
        return chosen


# ----------------------------------------------------------------------------------------------------
# A partition of synthetic rows for trying a whole analysis.

NUMBER = "entity"
"""Key of synthetic rows if the partition has no key or a key of several columns."""


@shows_progress
def rehearse(
    partition: ClientPartition,
    epsilon: float,
    bounds: Bounds | Mapping[str, IntoBound] | None = None,
    *,
    delta: float = 1e-6,
    seed: int | None = None,
    policy: Policy | str | None = None,
    progress: bool | None = None,
) -> ClientPartition:
    """Make a partition of synthetic rows with the columns, kinds and presence of a real one.

    A script can be written and tried on it, with models, receipts and plots. Only the one private release
    behind the rows is requested from the sites. Estimates from synthetic rows differ from those of the data:
    they lack everything beyond a Gaussian copula, and their standard errors do not include the noise.

    Parameters
    ----------
    partition : ClientPartition
        At sites whose owners allow a budget.
    epsilon, delta : float
        See :class:`CopulaSynthesizer`; every site is charged once.
    bounds : Bounds or mapping, optional
        Public description of every column; by default the owners' published one.
    seed : int, optional
        Seed for the same rows from the same release.
    policy : Policy or str, optional
        Policy of the synthetic sites, such as ``"strict"``; by default open, since rows are synthetic.
    progress : bool, optional
        Report the progress of the computation (:func:`fedstat.progress`).

    Returns
    -------
    ClientPartition
        In one process, with as many entities. Each site, and each combination of sites, has as many records
        as in the partition. Missing records do not depend on values. Keys are numbers. Sites with different
        rows have as many as in the partition, and do not differ otherwise.

    Raises
    ------
    ModelError, DescriptionError, EstimationError
        See :meth:`CopulaSynthesizer.fit`.

    Warns
    -----
    DataWarning
        The rows are synthetic.

    Examples
    --------
    >>> import warnings
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=5.0, delta=1e-6))
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> bounds = fs.Bounds({"age": (20, 80), "sex": [0, 1], "chol": (80, 600)})
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     rehearsal = fs.rehearse(partition, epsilon=3.0, bounds=bounds)
    >>> tuple(rehearsal.sites), rehearsal.n_entities == len(table)
    (('Registry', 'Laboratory'), True)
    """
    synthesizer = CopulaSynthesizer(partition, epsilon, bounds, delta=delta)
    fit = synthesizer.fit()
    rows = fit.sample(partition.n_entities, seed)
    pooled = synthesizer._pooled
    what = "Missing records do" if pooled is None else "The site of a row does"
    warn(
        f"rows are synthetic, from one release with epsilon {epsilon:g}. {what} not depend on values, and "
        "standard errors of fits do not include the noise",
        DataWarning,
    )
    if pooled is not None:
        rows[partition.site_column] = np.repeat(list(pooled.records), list(pooled.records.values()))
        return ClientPartition.from_frame(rows, by=partition.site_column, policy=policy)
    key = partition.key[0] if len(partition.key) == 1 else NUMBER
    frames = {}
    for site, columns in synthesizer.columns.items():
        frames[site] = rows.loc[partition.rows[site], list(columns)]
        frames[site].insert(0, key, partition.rows[site])
    return ClientPartition.from_frames(frames, on=key, policy=policy, min_count=partition.min_count)
