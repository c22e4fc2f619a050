"""Synthetic tables from a Gaussian copula, released once with differential privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias, overload

import numpy as np

from fedstat.errors import DataWarning, DisclosureWarning, ModelError, NotAvailableError, warn
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.federation.tables.published import Published
from fedstat.inference.explanation import Explanation
from fedstat.models.checks import check_choice, check_layout, check_whole, checks_arguments
from fedstat.models.copula.bounds import Bounds, IntoBound, asinh, log
from fedstat.models.copula.correlation import Missing
from fedstat.models.copula.explain import CopulaPlan
from fedstat.models.copula.private_release import LARGEST_DELTA, PrivateRelease
from fedstat.models.copula.protocol import fit_copula, plan_columns
from fedstat.models.copula.published import METHODS, ROUNDS, Method, PublishedSynthesis, synthesise, table_of
from fedstat.models.copula.request import GramPlan, NoisePlan
from fedstat.models.copula.results import CopulaRecord, CopulaResults
from fedstat.models.copula.steps import DRY_RUN_STEPS, FAMILY
from fedstat.models.explain import ForecastPlan
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.progress_line import shows_progress

# ----------------------------------------------------------------------------------------------------
# Synthetic tables from a Gaussian copula, released once under differential privacy.

__all__ = ["Bounds", "CopulaSynthesizer", "asinh", "log"]

Mechanism: TypeAlias = Literal["private", "published"]


class CopulaSynthesizer(PrivateRelease):
    """Synthetic rows of columns that several institutions hold, from one release with a stated epsilon.

    Every institution releases the margins of its columns, and all together the products of scores of their
    columns; noise that each adds to its own part before it leaves makes both differentially private. What is
    made of these, correlations and any number of synthetic rows, costs nothing more. Each site's owner has to
    allow a budget: ``Policy(privacy=Budget(epsilon, delta))``.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout.
    epsilon : float
        Of differential privacy, for the whole record of one entity, replaced by any other.
    bounds : Bounds or mapping, optional
        What is public of every column; by default what the owners have published.
    missing : {"auto", "pairs", "em"}
        How entities are used that an institution lacks: by the pairs of institutions that have them, or by
        maximum likelihood over missing patterns; "auto" chooses by the noise to be expected.
    delta : float
        At most 1e-6.
    columns : sequence of str, optional
        To be synthesised; by default all.
    coordinator : str, optional
        The institution at which the coordinator sits, or ``"apart"``, the default.
    mechanism : {"private", "published"}
        The release described here, or a simulation of the publication's, which takes numeric columns that are
        all in this process, no bounds and no budgets, and protects nobody: see :meth:`fit`.

    Raises
    ------
    ModelError
        An argument has no meaning, or columns lack bounds: lists them, with a skeleton to fill in.

    Notes
    -----
    Tang, Feng, Li and Wang (2025) proposed the copula; their mechanism has another unit, and is not this one.
    Its epsilon is that of one comparison of two records, of which a record takes part in thousands:
    ``mechanism="published"`` repeats it, and says what a whole record spends.

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

    _plan: ClassVar[type[ForecastPlan] | None] = CopulaPlan
    _instead = DRY_RUN_STEPS
    _family_name = FAMILY

    def __init__(
        self,
        partition: ClientPartition,
        epsilon: float,
        bounds: Bounds | Mapping[str, IntoBound] | None = None,
        *,
        missing: Missing = "auto",
        delta: float = LARGEST_DELTA,
        columns: Sequence[str] | None = None,
        coordinator: str | None = None,
        mechanism: Mechanism = "private",
    ) -> None:
        check_layout(type(self).__name__, partition, "vertical")
        check_choice("missing", missing, ("auto", "pairs", "em"))
        check_choice("mechanism", mechanism, ("private", "published"))
        self.missing: Missing = missing
        self.mechanism: Mechanism = mechanism
        if mechanism == "published" and not (bounds is None and missing == "auto"):
            raise ModelError(
                "mechanism='published' scales columns by their own smallest and largest values, and its "
                "methods deal with missing blocks each in its way: leave bounds and missing out"
            )
        super().__init__(partition, epsilon, delta, self._choose(partition, columns), bounds, coordinator)

    @property
    def _description(self) -> str:
        """What is asked for, in words."""
        return f"synthesis of {self._planned.p} columns at epsilon {self.epsilon:g}"

    @cached_property
    def _planned(self) -> NoisePlan:
        """The plan of the noise, if no record lacks a value."""
        return plan_columns(self.bounds, self._counts, self._rho)

    def _noise_for(self, n: int) -> GramPlan:
        """Plan the noise of a release of n entities, all of them complete: of an audit."""
        plan = plan_columns(self.bounds, dict.fromkeys(self.bounds, n), self._rho)
        return GramPlan(plan, (tuple(self.bounds),), self.missing == "em")

    @overload
    def fit(self, *, progress: bool | None = None) -> CopulaResults: ...

    @overload
    def fit(
        self,
        method: Method,
        *,
        rounds: int = ROUNDS,
        seed: int | np.random.Generator | None = None,
        progress: bool | None = None,
    ) -> PublishedSynthesis: ...

    @checks_arguments
    def fit(
        self,
        method: Method | None = None,
        *,
        rounds: int = ROUNDS,
        seed: int | np.random.Generator | None = None,
        progress: bool | None = None,
    ) -> CopulaResults | PublishedSynthesis:
        """Ask the institutions, under their budgets, and make the copula; or simulate what was published.

        Parameters
        ----------
        method : {"vcds", "evcds", "ievcds"}, optional
            Of ``mechanism="published"`` alone, and needed there: rows drawn from the copula, rows made of the
            perturbed ranks of each entity, or these again on tables that were completed.
        rounds : int
            Of "ievcds".
        seed : int or numpy.random.Generator, optional
            Of the simulation, to repeat it.
        progress : bool, optional
            Tell how far the computation has come (:func:`fedstat.progress`).

        Returns
        -------
        CopulaResults
            Or a PublishedSynthesis: ``table``, ``correlation``, and ``record_epsilon``, what a whole record
            has spent.

        Raises
        ------
        DescriptionError
            A budget does not allow it, or is spent; says what is left, and the line of the policy.
        EstimationError
            Values of a column are not what its bounds list, or two institutions share too few entities.
        ModelError
            The coordinator sits at one of two institutions, and nobody else can deal random numbers. An
            argument has no meaning for the mechanism.

        Warns
        -----
        DisclosureWarning
            The mechanism is the published one: nothing is private.

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
        asking = SecureProductSession(FAMILY, self._session, attempt.ledger.at)
        protocol = fit_copula(
            asking,
            self.bounds,
            self._rows,
            tuple(self.partition.sites),
            self.partition.n_entities,
            self._planned.rho,
            self.missing,
        )
        record = CopulaRecord(attempt.run(protocol), self.epsilon, self.delta)
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
                "mechanism='published' is a simulation, which asks no institution for anything; print(fit("
                "method).summary()) says what a record would spend"
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
        check_whole("rounds", rounds, 1)
        table = table_of(self.partition, self.columns)
        made = synthesise(table, self.columns, self._counts, self.epsilon, self.delta, method, rounds, random)
        warn(made.summary(), DisclosureWarning)
        return made

    @staticmethod
    def _choose(partition: ClientPartition, columns: Sequence[str] | None) -> dict[str, list[str]]:
        """Names of the columns by institution, of institutions that have some."""
        held = partition.columns
        wanted = None if columns is None else list(columns)
        known = {name for names in held.values() for name in names}
        absent = [name for name in wanted or () if name not in known]
        if absent:
            raise ModelError(f"columns: no institution has {', '.join(map(repr, absent))}")
        chosen = {
            client: [name for name in names if wanted is None or name in wanted]
            for client, names in held.items()
        }
        chosen = {client: names for client, names in chosen.items() if names}
        if sum(map(len, chosen.values())) < 2:
            raise ModelError("columns: expected two or more to be synthesised together")
        return chosen


# ----------------------------------------------------------------------------------------------------
# A partition of synthetic rows, on which a whole analysis can be tried.

NUMBER = "entity"
"""Key of synthetic rows, where that of the partition is none or of several columns."""


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

    A script can be written and tried on it, models, receipts and plots, before the institutions are asked for
    more than the one private release behind the rows. Estimates on it are not those of the data: they miss
    what is no Gaussian copula, and their standard errors count no noise.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout, at sites whose owners allow a budget.
    epsilon, delta : float
        As in :class:`CopulaSynthesizer`; every site is charged once.
    bounds : Bounds or mapping, optional
        What is public of every column; by default what the owners have published.
    seed : int, optional
        To draw the same rows again from the same release.
    policy : Policy or str, optional
        Of the rehearsal's sites, such as ``"strict"``; by default open, since rows are synthetic.
    progress : bool, optional
        Tell how far the computation has come (:func:`fedstat.progress`).

    Returns
    -------
    ClientPartition
        In one process, with as many entities. Each institution has records of as many as it has, together
        with whom it has them; but who lacks a record does not depend on any value, and no cell is missing
        within a record. Keys are numbers.

    Raises
    ------
    ModelError, DescriptionError, EstimationError
        As :meth:`CopulaSynthesizer.fit`.

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
    >>> rehearsal.clients, rehearsal.n_entities == len(table)
    (('Registry', 'Laboratory'), True)
    """
    synthesizer = CopulaSynthesizer(partition, epsilon, bounds, delta=delta)
    fit = synthesizer.fit()
    rows = fit.sample(partition.n_entities, seed)
    key = partition.key[0] if len(partition.key) == 1 else NUMBER
    frames = {}
    for client, columns in synthesizer.columns.items():
        frames[client] = rows.loc[partition.rows[client], list(columns)]
        frames[client].insert(0, key, partition.rows[client])
    made = ClientPartition.from_frames(frames, on=key, policy=policy, min_count=partition.min_count)
    warn(
        f"rows are synthetic, from one release with epsilon {epsilon:g}: who lacks a record depends on no "
        "value, no cell is missing within a record, and standard errors of fits count no noise",
        DataWarning,
    )
    return made
