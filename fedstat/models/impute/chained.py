"""Chained equations where sites hold different rows: imputed tables, which stay at the sites."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.errors import DataWarning, DesignError, ModelError, PolicyError, SpellingWarning
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.imputed_cells import ImputedTable
from fedstat.federation.message import Reply, Request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.pooling import PooledResults, pool_analyses
from fedstat.inference.summary import Report
from fedstat.inference.tables import Sheet, number
from fedstat.models.categories.model import FederatedMultinomial
from fedstat.models.explain import owners_consulted
from fedstat.models.glm.model import GLORE, FederatedOLS
from fedstat.models.impute.row_steps import FAMILY, DrawRequest, ImputationRequest, SiteCells
from fedstat.typing import Floats

MIXED = 1.1
"""R-hat of the coefficients above which the chains have not mixed."""
LEAST_ITERATIONS = 5
"""Iterations in the second half, with which R-hat is computed."""
NOTES = Catalogue(
    warning={
        "not_mixed": "The chains differ: R-hat of the coefficients of {column} is {rhat:.2f} in the "
        "second half of the iterations. More iterations are needed.",
        "few_cells": "Not imputed at every site, since few of its rows lack them: {columns}. These rows are "
        "left out.",
    },
    info={
        "chained": "Each column is drawn given all others, {iterations} times in {chains} chains: numbers by "
        "{numbers}, zeros and ones by logistic, categories by multinomial regression. Draws are valid if "
        "missingness depends on observed values only (missing at random).",
        "at_sites": "Imputed values are at the sites, as long as these run; no site has released one.",
    },
)


@dataclass(slots=True, eq=False)
class ChainedEquations:
    """The course of an imputation: which column has how many missing cells, and the coefficients so far."""

    partition: ClientPartition
    columns: tuple[str, ...]
    chains: int
    seed: int
    matched: bool
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    ledger: Ledger = field(default_factory=Ledger)
    draws: int = 0
    trace: list[dict[str, object]] = field(default_factory=list)

    def begin(self) -> dict[str, SiteCells]:
        """Ask every site for its missing cells, which it fills by observed values."""
        request = ImputationRequest(self.token, self.columns, self.chains, self.seed)
        replies = self._run("begin_imputation", to_json(request), {})
        return {reply.site: from_json(SiteCells, reply.text, reply.site) for reply in replies}

    def _run(self, step: str, text: str, arrays: Mapping[str, Floats]) -> Sequence[Reply]:
        def protocol() -> FitProtocol[Sequence[Reply]]:
            return (
                yield [
                    Request(site, FAMILY, step, dict(arrays), self.session, text)
                    for site in self.partition.sites
                ]
            )

        later = Ledger()
        replies = self.partition.engine.run(protocol(), later)
        self.ledger = self.ledger._goes_on_in(later)
        return replies

    def table(self, chain: int, without: str = "") -> ClientPartition:
        """Return the partition with the cells of a chain."""
        imputed = ImputedTable(self.token, chain, self.draws, without)
        return replace(self.partition, _imputed=imputed)

    def update(self, column: str, kind: str, iteration: int, rng: np.random.Generator) -> None:
        """Fit the model of a column in every chain, draw its parameters, and let the sites draw its cells."""
        others = [quoted_name(name) for name in self.columns if name != column]
        formula = f"{quoted_name(column)} ~ {' + '.join(others)}"
        kinds: dict[str, Any] = {"number": FederatedOLS, "binary": GLORE, "category": FederatedMultinomial}
        beta, estimate, sigma = list[Floats](), list[Floats](), list[float]()
        fit: Any = None
        for chain in range(self.chains):
            model = kinds[kind].from_formula(formula, self.table(chain, column))
            fit = model.fit(local=False)
            self.ledger = self.ledger._goes_on_in(fit.ledger)
            params, cov = fit.params.to_numpy(), np.asarray(fit.cov_params())
            spread = 1.0
            if kind == "number":
                spread = float(np.sqrt(fit.df_resid / rng.chisquare(fit.df_resid)))
                sigma.append(spread * float(np.sqrt(fit.scale)))
            else:
                sigma.append(0.0)
            estimate.append(params)
            beta.append(params + spread * np.linalg.cholesky(cov) @ rng.standard_normal(len(params)))
            where = {"iteration": iteration, "chain": chain, "column": column}
            self.trace += [where | {"term": name, "estimate": x} for name, x in fit.params.items()]
        agreed = fit.basis.agreement
        question = replace(agreed.question, imputed=None)
        request = DrawRequest(
            self.token,
            column,
            self.draws,
            self.seed,
            question.to_json(),
            agreed.spec.to_json(),
            kind,
            self.matched,
        )
        arrays = {"beta": np.array(beta), "estimate": np.array(estimate), "sigma": np.array(sigma)}
        self._run("draw_cells", to_json(request), arrays)
        self.draws += 1


def impute_rows(
    partition: ClientPartition,
    columns: Sequence[str],
    m: int,
    seed: int | None,
    iterations: int,
    numbers: str,
) -> RowImputations:
    """Impute the columns of sites that hold different rows; see :func:`fedstat.impute`."""
    if consulted := owners_consulted(partition):
        raise ModelError(
            f"impute: the owner of {consulted[0]!r} approves every analysis, and chained equations are "
            "hundreds of them"
        )
    drawn = int(np.random.default_rng(seed).integers(2**62))
    course = ChainedEquations(partition, tuple(columns), m, drawn, numbers == "matching")
    sites = course.begin()
    missing = {name: sum(one.missing.get(name, 0) for one in sites.values()) for name in columns}
    cells = {name: sum(one.drawn.get(name, 0) for one in sites.values()) for name in columns}
    kinds = {name: _kind_of(name, sites) for name in columns}
    incomplete = sorted((name for name in columns if cells[name]), key=cells.__getitem__)
    if not incomplete:
        raise ModelError(
            f"impute: no site has {partition.min_count} rows or more that lack one of {', '.join(columns)}"
        )
    rng = np.random.default_rng([drawn, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)  # rows that lack the column are left out of its model
        warnings.simplefilter("ignore", SpellingWarning)
        for iteration in range(iterations):
            for name in incomplete:
                try:
                    course.update(name, kinds[name], iteration, rng)
                except PolicyError as refusal:
                    raise explained(refusal, [one for one in incomplete if kinds[one] != "number"]) from None
    n = sum(one.n_rows for one in sites.values())
    few = [name for name in columns if any(name not in one.missing for one in sites.values())]
    return RowImputations(course, n, missing, cells, kinds, iterations, few)


def explained(refusal: PolicyError, levels: Sequence[str]) -> PolicyError:
    """Add to a refusal that drawn levels differ in few rows between two draws, where there are any."""
    if not levels:
        return refusal
    return PolicyError(
        f"{refusal}. Imputed levels of {', '.join(map(repr, levels))} may differ in few rows between two "
        "tables, which sites that remember all sums refuse; imputed numbers differ in all their rows",
        rule=refusal.rule,
        site=refusal.site,
    )


def _kind_of(name: str, sites: Mapping[str, SiteCells]) -> str:
    found = {one.kinds[name] for one in sites.values()} - {""}
    if found == {"binary", "number"}:
        return "number"
    if len(found) != 1:
        raise DesignError(f"column {name!r} holds numbers at one site and categories at another")
    return found.pop()


class RowImputations(Report):
    """Imputations of :func:`fedstat.impute` where sites hold different rows.

    The imputed values are at the sites. :meth:`table` is a partition whose rows have them, for any model over
    rows; :meth:`fit` fits one to all tables, and pools by Rubin's rules.

    Attributes
    ----------
    m : int
        Number of imputed tables.
    names : tuple of str
        The columns.
    nobs : int
        Rows of all sites.
    ledger : Ledger
        What left the sites.
    trace : DataFrame
        Coefficients of each model by iteration and chain: ``iteration``, ``chain``, ``column``, ``term``,
        ``estimate``.

    Examples
    --------
    >>> import fedstat as fs, numpy as np
    >>> table = fs.datasets.make_hospitals()
    >>> table.loc[table.index % 4 == 0, "chol"] = np.nan
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> imputations = fs.impute(partition, "num ~ age + chol", m=2, iterations=2, seed=1)
    >>> pooled = imputations.fit(lambda table: fs.FederatedOLS.from_formula("num ~ age + chol", table).fit())
    >>> pooled.params.index.tolist(), imputations.table(0).n_entities
    (['Intercept', 'age', 'chol'], 920)
    >>> imputations.tidy()["column"].tolist(), len(imputations.trace), len(imputations.glance())
    (['chol'], 12, 1)
    """

    def __init__(
        self,
        course: ChainedEquations,
        n: int,
        missing: Mapping[str, int],
        cells: Mapping[str, int],
        kinds: Mapping[str, str],
        iterations: int,
        few: Sequence[str],
    ) -> None:
        self._course, self._missing, self._cells, self._kinds = course, missing, cells, kinds
        self._iterations, self._few = iterations, tuple(few)
        self.m, self.names, self.nobs, self.ledger = course.chains, course.columns, n, course.ledger
        self.trace = pd.DataFrame(course.trace)

    def table(self, j: int) -> ClientPartition:
        """Return the sites with the imputed cells of table `j`, counted from zero."""
        if not 0 <= j < self.m:
            raise ModelError(f"table: expected a number from 0 to {self.m - 1}, received {j!r}")
        return self._course.table(j)

    def fit(self, fit: Callable[[ClientPartition], Any]) -> PooledResults:
        """Fit a model to every imputed table, and pool the results by Rubin's rules.

        Parameters
        ----------
        fit : callable
            Makes the results of one table: ``lambda table: fs.GLORE.from_formula("y ~ x", table).fit()``.

        Returns
        -------
        PooledResults
            What the fits release is in their own ledgers.
        """
        return pool_analyses([fit(self.table(j)) for j in range(self.m)], sources=(self,))

    def tidy(self) -> pd.DataFrame:
        """One row for each imputed column: kind, missing and drawn cells, and R-hat of its coefficients."""
        drawn = [name for name in self.names if self._cells[name]]
        return pd.DataFrame(
            {
                "column": drawn,
                "kind": [self._kinds[name] for name in drawn],
                "missing": [self._missing[name] for name in drawn],
                "drawn": [self._cells[name] for name in drawn],
                "rhat": [self._rhat(name) for name in drawn],
            }
        )

    def _rhat(self, column: str) -> float:
        """Largest R-hat of the coefficients of a column in the second half of the iterations; NaN for few."""
        late = self.trace[
            (self.trace["column"] == column) & (self.trace["iteration"] >= self._iterations // 2)
        ]
        n = late["iteration"].nunique()
        if n < LEAST_ITERATIONS:
            return float("nan")
        of_chain = late.groupby(["term", "chain"])["estimate"]
        within = of_chain.var(ddof=1).groupby("term").mean()
        between = of_chain.mean().groupby("term").var(ddof=1)
        return float(np.sqrt((n - 1) / n + between / within).max())

    def __repr__(self) -> str:
        return f"<Imputations: {self.m} tables of {self.nobs:,} rows at the sites; see .summary()>"

    def _glance(self) -> Mapping[str, Any]:
        return {
            "imputations": self.m,
            "nobs": self.nobs,
            "columns": len(self.names),
            "iterations": self._iterations,
            "drawn": sum(self._cells.values()),
        }

    def _sheets(self) -> Iterable[Sheet]:
        rows = tuple(
            (one.column, one.kind, f"{one.missing:,}", f"{one.drawn:,}", number(one.rhat))
            for one in self.tidy().itertuples()
        )
        title = f"{self.m} imputed tables of {self.nobs:,} rows"
        return [
            Sheet(("column", "kind", "missing", "drawn", "R-hat"), rows, "llrrr", (40, 12, 12, 12, 12), title)
        ]

    def _summary_notes(self) -> Iterator[Note]:
        for one in self.tidy().itertuples():
            if one.rhat > MIXED:
                yield NOTES.note("not_mixed", column=one.column, rhat=one.rhat)
        if self._few:
            yield NOTES.note("few_cells", columns=", ".join(self._few))
        numbers = "predictive mean matching" if self._course.matched else "linear regression"
        yield NOTES.note("chained", iterations=self._iterations, chains=self.m, numbers=numbers)
        yield NOTES.note("at_sites")
