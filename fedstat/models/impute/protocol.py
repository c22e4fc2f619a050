"""Chained equations where sites hold different rows: models of each column, and draws of its cells."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.errors import DataWarning, DesignError, ModelError, PolicyError, SpellingWarning
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.horizontal_design import agree_coding
from fedstat.federation.design.imputed_cells import ImputedTable
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.message import Reply, Request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.receipts import with_receipt
from fedstat.inference.explanation import Explanation
from fedstat.models.categories.model import FederatedMultinomial
from fedstat.models.explain import owners_consulted
from fedstat.models.glm.model import GLORE, FederatedOLS
from fedstat.models.impute.steps import FAMILY, DrawRequest, ImputationRequest, SiteCells
from fedstat.typing import Floats


@dataclass(slots=True, eq=False)
class ChainedEquations:
    """The course of an imputation: which column has how many missing cells, and the coefficients so far.

    `own` is the ledger of the imputation's own session, and `ledger` that of its models before it ended.
    `lacking` are the sites without any value of a column, and `pending` the columns that such a site has not
    drawn yet: until then no model can use them there.
    """

    partition: ClientPartition
    columns: tuple[str, ...]
    chains: int
    seed: int
    matched: bool
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    ledger: Ledger = field(default_factory=Ledger)
    own: Ledger = field(default_factory=Ledger)
    lacking: dict[str, list[str]] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
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

        return self.partition.engine.run(protocol(), self.own)

    def finish(self) -> None:
        """Let the sites sign what passed in the imputation's own session; models have receipts of theirs."""

        def protocol() -> FitProtocol[None]:
            yield from ()

        sites = tuple(self.partition.sites)
        self.partition.engine.run(with_receipt(protocol(), sites, self.session, self.own), self.own)
        self.ledger = self.ledger._goes_on_in(self.own)

    def table(self, chain: int, without: str = "") -> ClientPartition:
        """Return the partition with the cells of a chain; `without` a column, the sites with values of it."""
        imputed = ImputedTable(self.token, chain, self.draws, without)
        partition = self.partition
        if lacking := self.lacking.get(without):
            partition = partition._among([site for site in partition.sites if site not in lacking])
        return replace(partition, _imputed=imputed)

    def update(self, column: str, kind: str, iteration: int, rng: np.random.Generator) -> None:
        """Fit the model of a column in every chain, draw its parameters, and let the sites draw its cells."""
        known = [name for name in self.columns if name != column and name not in self.pending]
        others = list(map(quoted_name, known))
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
        self.pending = [name for name in self.pending if name != column]


@dataclass(frozen=True, slots=True, eq=False)
class ImputedRows:
    """A finished imputation of `n_rows`: by column the missing and the drawn cells and the kind.

    Columns in `few` have few missing cells at a site, which are not drawn there.
    """

    course: ChainedEquations
    n_rows: int
    missing: Mapping[str, int]
    drawn: Mapping[str, int]
    kinds: Mapping[str, str]
    iterations: int
    few: tuple[str, ...]


def impute_rows(
    partition: ClientPartition,
    columns: Sequence[str],
    m: int,
    seed: int | None,
    iterations: int,
    numbers: str,
) -> ImputedRows:
    """Impute the columns of sites that hold different rows; see :func:`fedstat.impute`."""
    if consulted := owners_consulted(partition):
        raise ModelError(
            f"impute: the owner of {consulted[0]!r} approves every analysis, and chained equations are "
            "hundreds of them"
        )
    drawn = int(np.random.default_rng(seed).integers(2**62))
    course = ChainedEquations(partition, tuple(columns), m, drawn, numbers == "matching")
    sites = course.begin()
    cells = {name: sum(one.drawn.get(name, 0) for one in sites.values()) for name in columns}
    kinds = {name: _kind_of(name, sites) for name in columns}
    course.lacking = {
        name: [site for site, one in sites.items() if one.drawn.get(name) and not one.kinds[name]]
        for name in columns
    }
    course.pending = [name for name in columns if course.lacking[name]]
    # Columns that a site has no value of come first: its other models need their cells.
    incomplete = [name for name in columns if cells[name]]
    incomplete.sort(key=lambda name: (name not in course.pending, cells[name]))
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
    course.finish()
    return ImputedRows(
        course,
        sum(one.n_rows for one in sites.values()),
        {name: sum(one.missing.get(name, 0) for one in sites.values()) for name in columns},
        cells,
        kinds,
        iterations,
        tuple(name for name in columns if any(name not in one.missing for one in sites.values())),
    )


def explain_rows(
    partition: ClientPartition, columns: Sequence[str], m: int, iterations: int, call: str
) -> Explanation:
    """Add up the dry runs of the models of all columns, each for every chain and iteration."""
    names = tuple(map(quoted_name, columns))
    question, sites = RowsRequest("", (), names, tuple(columns)), tuple(partition.sites)
    agree = agree_coding(question, sites, secrets.token_hex(8), min_count=partition.min_count)
    kinds = partition.engine.run(agree, Ledger()).spec.kinds
    plans, times = [], m * iterations
    for name in columns:
        kind: Any = FederatedMultinomial if kinds[name] == "category" else FederatedOLS
        others = " + ".join(quoted_name(other) for other in columns if other != name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plans.append(kind.from_formula(f"{quoted_name(name)} ~ {others}", partition).explain(local=False))
    table = pd.concat([one.table for one in plans], ignore_index=True)
    counted = [name for name in table if name.startswith(("messages", "bytes"))]
    table[counted] = table[counted] * times
    rounds = [
        (f"{steps} ({name})", tuple(times * count for count in counts))
        for name, one in zip(columns, plans, strict=True)
        for steps, counts in one.rounds
    ]
    refused: dict[str, Any] = {}
    for one in plans:
        for site, by_rule in one.refused.items():
            for rule, texts in by_rule.items():
                found = refused.setdefault(site, {}).setdefault(rule, [])
                found += [text for text in texts if text not in found]
    draws = (
        f"Each of {len(columns)} columns has {times:,} fits: {m} chains in {iterations} iterations. Columns "
        "without missing cells have none. After each the sites draw their own missing cells, and return the "
        "number of draws. Zeros and ones have logistic models of as many sums."
    )
    notes = dict.fromkeys([draws, *(note for one in plans for note in one.notes)])
    learned = dict.fromkeys(line for one in plans for line in one.learned)
    call = f"{call}m={m}, iterations={iterations})"
    return Explanation(call, table, rounds, refused, list(learned), list(notes))


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
    if not found:
        raise DesignError(f"column {name!r}: no site has a value of it. Leave it out of the imputation")
    if len(found) != 1:
        raise DesignError(f"column {name!r} holds numbers at one site and categories at another")
    return found.pop()
