"""What sites released in a sequence of analyses singles out no rows, whatever their steps declare.

A number of a reply is computed again without row i. Its difference is the term of row i where the number is a
sum over rows, which is tried with pairs of rows. The oracle judges the terms of all sums of a sequence,
refused analyses included; a number that is no sum may not depend on few rows alone.

First the sums of one site are judged. Where three sites mask them, no party has these; a combination that
is zero in all but a few rows of one site need not be zero at the others. So a finding counts if the totals
over the sites single out rows, too.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from attacker.calls import KINDS, Call, draw_call, wards
from attacker.oracle import TooFewDrawsError, reveals_numbers, singled_out
from attacker.tables import DENSE, Structure
from fedstat.errors import FedstatError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design import site_rows
from fedstat.federation.disclosure.checks import RequestContext
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.request_checks import record_step
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY, Site
from fedstat.federation.disclosure.state import SiteTrust, State
from fedstat.federation.message import Reply, Request
from fedstat.federation.tables.table import FrameTable
from fedstat.typing import Bools, Floats, Ints

FEWEST_ROWS, MOST_ROWS, MOST_ANALYSES, MOST_DRAWS, FEWEST = 45, 65, 3, 16, 3
ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1, max_parameters=1e9)
FEWEST_DRAWS = 7
FEWEST_TOTALS = 3
"""Draws for sums over all sites, which have more rows than sums; a matrix has half of its entries twice."""
KEYS_ALONE = (RECEIPT_FAMILY, "secure")
"""Families whose replies depend on keys and the ledger, and not on rows."""
ROUNDING = 1e-9
"""Terms below this share of their number are zero."""
WARDS_OF_ONE_SITE = 7
"""Of as many successive seeds with three sites, one has a level at one site alone."""
PAIRS = 4
"""Pairs of rows that are left out together, to see which numbers are sums."""
OVER_GROUPS = ("mixed", "gee")
"""Families of sums over groups. Where three sites mask them, sites do not examine their own part, and the
threat statements say so: a sum of few groups at one site is no sum of few groups over all."""
Numbers = dict[tuple[str, str, int, str], Floats]
"""Numbers by family, step, how often it was requested before in the analysis, and name."""
Sums = dict[tuple[str, str, int, str], Bools]


@contextmanager
def overheard() -> Iterator[dict[str, list[tuple[Request, Reply]]]]:
    """Keep what sites of this process are asked, and release before it is masked, by site."""
    heard: dict[str, list[tuple[Request, Reply]]] = defaultdict(list)
    record = Site._record

    def keep(site: Site, context: Any) -> None:
        record(site, context)
        if context.request.family not in KEYS_ALONE:
            heard[site.name].append((context.request, context.reply))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "_record", keep)
        yield heard


def run(call: Call, partition: fs.ClientPartition) -> dict[str, list[tuple[Request, Reply]]]:
    """Run an analysis, up to its refusal if it is refused, and return what passed at each site."""
    with overheard() as heard, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(FedstatError):
            call.run(partition)
    return heard


def numbers(requests: list[Request], replies: list[Reply | None]) -> Numbers:
    """Return all numbers of replies, also those of their texts, without flags and encrypted content."""
    found: Numbers = {}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for request, reply in zip(requests, replies, strict=True):
        place = (request.family, request.step)
        seen[place] += 1
        if reply is None:
            continue
        among_sites = request.family in OVER_GROUPS and request.masked is not None
        for name, array in reply.arrays.items():
            if among_sites and FAMILIES[request.family][request.step].given[name].maskable:
                continue
            if array.dtype not in (np.uint8, np.bool_):
                found[*place, seen[place], name] = np.asarray(array, dtype=float).ravel()
        if reply.text:
            for path, value in plain_numbers("text", json.loads(reply.text)):
                found[*place, seen[place], path] = value
    return found


def plain_numbers(path: str, plain: Any) -> Iterator[tuple[str, Floats]]:
    """Yield the numbers of plain values, with the path to them."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield from plain_numbers(f"{path} {key}", value)
    elif isinstance(plain, list) and not all(isinstance(one, int | float) for one in plain):
        for place, value in enumerate(plain):
            yield from plain_numbers(f"{path} {place}", value)
    elif isinstance(plain, int | float | list) and not isinstance(plain, bool):
        yield path, np.atleast_1d(np.array(plain, dtype=float))


REFUSING = fs.Policy.strict(small_differences="refuse")
"""Sites that leave out no rows. If one does, which ones depends on every row; terms are then those of the
rows that it used, as if the analyst knew these."""
UNMASKED = {"masked_only": False, "two_sites": "warn", "min_own_rows": 0}
"""Values of rules by which one or two small sites would release hardly a sum, so that no other rule would be
tried."""


def key_of(question: Any) -> str:
    """Return the name under which a site remembers the rows of a request."""
    return repr(site_rows._without_subset(question))


def rows_used(site: Site) -> dict[str, Bools]:
    """Return the rows that requests used, by request, where the site left out others."""
    kept = {name: one[2] for name, one in site.data.memory._rows.items()}
    return {name: rows.copy() for name, rows in kept.items() if rows is not None}


@dataclass
class Answering:
    """An open site with rows of a table; it answers requests that another one was asked."""

    name: str
    used: dict[str, Bools] = field(default_factory=dict)
    """Rows that requests used where others were left out: they follow from all rows, and are fixed."""
    trust: SiteTrust = field(default_factory=SiteTrust)

    def numbers(self, table: pd.DataFrame, requests: list[Request]) -> Numbers:
        """Return the numbers of its replies; none where it cannot answer."""
        used = {question: rows[table.index] for question, rows in self.used.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(site_rows, "used_rows", lambda data, question: used.get(key_of(question)))
            return self._numbers(table, requests)

    def _numbers(self, table: pd.DataFrame, requests: list[Request]) -> Numbers:
        site = Site(self.name, table.reset_index(drop=True), ALLOW, 0, "site", self.trust)
        states: dict[str, State] = defaultdict(partial(State, site.name))
        replies = [self._reply(site, states[request.session], request) for request in requests]
        return numbers(requests, replies)

    def _reply(self, site: Site, state: State, request: Request) -> Reply | None:
        """Run the step of a request without the checks, the ledger and the packing of :meth:`Site.answer`."""
        step, noise = FAMILIES[request.family][request.step], site._noise
        unmasked = replace(request, masked=None, turn=None)
        context = RequestContext(site.data, unmasked, step, state, "", None, "", False, True, noise)
        state.begin(lambda fact: None, (), lambda: None, partial(noise.recall, unmasked), noise.mark)
        earlier = state.copy()
        try:
            reply = site._run(context)
        except FedstatError:
            state.restore(earlier)
            return None
        finally:
            state.end()
        record_step(state, unmasked, step)
        return reply

    def terms(self, table: pd.DataFrame, requests: list[Request]) -> tuple[Numbers, Numbers, Sums]:
        """Return the numbers of its replies, the terms (n, d) of each, and which of them are sums (d,).

        The numbers of an array are sums over rows if they change without two rows as they do without each.
        """
        whole = self.numbers(table, requests)
        without = [self.numbers(table.drop(index=i), requests) for i in table.index]
        pairs = [(k, len(table) - 1 - 2 * k) for k in range(PAIRS)]
        left = [self.numbers(table.drop(index=list(pair)), requests) for pair in pairs]
        terms, sums = Numbers(), Sums()
        for name, value in whole.items():
            others = [one.get(name) for one in (*without, *left)]
            if any(other is None or other.shape != value.shape for other in others):
                continue
            change = value - np.array(others)
            change[~np.isfinite(change)] = 0.0
            change, of_pairs = change[: len(table)], change[len(table) :]
            size = np.maximum(np.abs(value), np.abs(change).max(axis=0))
            terms[name] = np.where(np.abs(change) > ROUNDING * size, change, 0.0)
            both = np.array([change[list(pair)].sum(axis=0) for pair in pairs])
            # Few pairs touch a number of many; an array is of one kind.
            sums[name] = np.full(len(value), bool((np.abs(of_pairs - both) <= 1e-7 * size).all()))
        return whole, terms, sums


@dataclass(frozen=True, eq=False)
class Correction:
    """Few records of a site that were corrected before the analysis of this place in a sequence.

    The versions of a record are two rows of one person; the later ones, (k,), follow all rows of the table.
    """

    before: int
    rows: Ints
    columns: tuple[str, ...]
    with_key: bool

    @classmethod
    def draw(cls, rng: np.random.Generator, calls: int, n: int) -> Correction:
        """Draw a correction of one or two rows, after at least one of the analyses."""
        rows = np.sort(rng.choice(n, int(rng.integers(1, 3)), replace=False))
        columns = rng.choice(DENSE, int(rng.integers(1, len(DENSE) + 1)), replace=False).tolist()
        return cls(int(rng.integers(1, calls)), rows, tuple(columns), bool(rng.random() < 0.5))

    def corrected(self, rng: np.random.Generator, table: pd.DataFrame) -> pd.DataFrame:
        """Return a table with other values in these cells."""
        later = table.copy()
        for name in self.columns:
            later.loc[table.index[self.rows], name] = rng.normal(10.0, 2.0, len(self.rows)).round(6)
        return later

    def spread(self, terms: Numbers, call: int) -> Numbers:
        """Return the terms of an analysis over both versions, (n + k, d)."""
        out = {}
        for name, one in terms.items():
            later = np.zeros((len(self.rows), one.shape[1]))
            if call >= self.before:
                later, one = one[self.rows], one.copy()
                one[self.rows] = 0.0
            out[name] = np.vstack([one, later])
        return out

    def persons(self, n: int) -> Ints:
        """Return whose rows they are, (n + k,)."""
        return np.concatenate([np.arange(n), self.rows])

    def read(self, site: Site, table: pd.DataFrame) -> None:
        """Let a site read its records, as when its file has changed."""
        site.change_records(table_with_key(table, self.with_key), lambda *_: "")


def table_with_key(table: pd.DataFrame, with_key: bool) -> FrameTable:
    """Return the table of a site, with a number of each row as its key."""
    out = FrameTable(table.reset_index(drop=True))
    if with_key:
        out.key_columns = pd.DataFrame({"id": np.arange(len(table))})
    return out


@dataclass
class Finding:
    """A sequence that singles out rows of a site."""

    seed: int
    site: str
    texts: list[str]
    rows: list[tuple[int, ...]]

    def __str__(self) -> str:
        return f"seed {self.seed}, site {self.site}, rows {self.rows}: " + "; ".join(self.texts)


@dataclass
class Examined:
    """What was tried and found."""

    sequences: int = 0
    analyses: int = 0
    numbers: int = 0
    sums: int = 0
    undecided: int = 0
    of_parts: int = 0
    """Sequences in which masked parts of a site would single out rows."""
    unread: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    by_kind: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences, {self.analyses} analyses, {self.sums:,} numbers examined by "
            f"leaving out rows, {self.undecided} undecided, {self.of_parts} judged by totals, "
            f"{len(self.findings)} findings, "
            f"{self.seconds:.0f} CPU s; "
            f"numbers by family: {dict(self.by_kind)}; not computed again: {dict(self.unread)}"
        )


def restart(partition: fs.ClientPartition) -> None:
    """Let each site store what it remembers, and read it again."""
    for site in partition.sites.values():
        data = site.data
        arrays = data.memory.to_arrays(data.table, data.mark_key)
        if arrays:
            site.remember(ReleaseHistory.from_arrays(arrays, data.table, data.mark_key), store=False)


def examine(
    seed: int,
    examined: Examined,
    policy: fs.Policy | str = REFUSING,
    kinds: tuple[str, ...] = tuple(KINDS),
    site: str = "",
    corrected: bool = False,
) -> list[Finding]:
    """Draw tables and a sequence of analyses from the seed, run it, and judge all that a site released.

    Few records of a single site may be `corrected` between the analyses.
    """
    rng = np.random.default_rng([seed, 7])
    sites = ["A", "B", "C"][: int(rng.choice([1, 1, 2, 3]))][: 1 if corrected else 3]
    structures = {site: Structure.draw(rng, int(rng.integers(FEWEST_ROWS, MOST_ROWS))) for site in sites}
    with_wards = len(sites) == 3 and seed % WARDS_OF_ONE_SITE == 3
    if with_wards:
        structures = {name: one.with_wards(rng, name == sites[0]) for name, one in structures.items()}
    tables = {site: structure.fill(rng) for site, structure in structures.items()}
    calls = [draw_call(rng, kinds) for _ in range(int(rng.integers(1 + corrected, MOST_ANALYSES + 1)))]
    if with_wards:
        calls[0] = wards(rng)
    if any(call.text.startswith("impute") for call in calls):
        structures = {name: replace(one, incomplete=True) for name, one in structures.items()}
        tables = {name: one.fill(rng) for name, one in structures.items()}
    if not hides(len(sites)) and isinstance(policy, fs.Policy):
        policy = replace(policy, **UNMASKED)
    partition = partition_of(tables, policy)
    correction, later = None, None
    if corrected:
        site = site or str(rng.choice(sites))
        correction = Correction.draw(rng, len(calls), len(tables[site]))
        later = correction.corrected(rng, tables[site])
        correction.read(partition.sites[site], tables[site])
    passed, used = [], []
    for call in calls:
        if correction is not None and later is not None and correction.before == len(passed):
            correction.read(partition.sites[site], later)
        passed.append(run(call, partition))
        used.append({name: rows_used(one) for name, one in partition.sites.items()})
        if rng.random() < 0.3:
            restart(partition)
    examined.sequences += 1
    examined.analyses += len(calls)
    found = []
    site = site or str(rng.choice(sites))
    released = [one[site] for one in passed]
    if any(released):
        try:
            own = [one[site] for one in used]
            again = {"used": own, "correction": correction, "later": later}
            rows = judge(site, tables[site], structures[site], released, rng, examined, **again)
            if rows and any(masked_numbers(passed) for passed in released):
                held = [
                    Held(name, table, structures[name], *([by[name] for by in one] for one in (passed, used)))
                    for name, table in tables.items()
                ]
                examined.of_parts += 1
                rows = judge_totals(held, rng)
        except TooFewDrawsError:
            examined.undecided += 1
            rows = []
        if rows:
            found.append(Finding(seed, site, [call.text for call in calls], rows))
    examined.findings += found
    return found


def partition_of(tables: dict[str, pd.DataFrame], policy: fs.Policy | str) -> fs.ClientPartition:
    """Return the tables as sites of a partition."""
    pooled = pd.concat([table.assign(site=site) for site, table in tables.items()], ignore_index=True)
    return fs.ClientPartition.from_frame(pooled, by="site", policy=policy)


def judge(
    site: str,
    table: pd.DataFrame,
    structure: Structure,
    released: list[list[tuple[Request, Reply]]],
    rng: np.random.Generator,
    examined: Examined,
    fewest_draws: int = FEWEST_DRAWS,
    used: list[dict[str, Bools]] | None = None,
    correction: Correction | None = None,
    later: pd.DataFrame | None = None,
) -> list[tuple[int, ...]]:
    """Return the rows of a site that all it released singles out, or persons if it corrected records.

    Each draw answers the same requests: their centers, scales and coefficients are known to who sent them.
    The table is a `later` one after a `correction`.
    """

    def versions(of: pd.DataFrame, after: pd.DataFrame | None) -> list[pd.DataFrame]:
        first = len(released) if correction is None else correction.before
        return [of if call < first or after is None else after for call in range(len(released))]

    def spread(terms: Numbers, call: int) -> Numbers:
        return terms if correction is None else correction.spread(terms, call)

    answering = [Answering(site, rows) for rows in used or [{} for _ in released]]
    draws: list[list[Numbers]] = []
    kept: list[dict[Any, Floats]] = []
    n, of_few = len(table), set[tuple[int, ...]]()
    for call, (at, passed, asked) in enumerate(zip(answering, released, versions(table, later), strict=True)):
        requests = [request for request, _ in passed]
        sent = numbers(requests, [reply for _, reply in passed])
        whole, terms, sums = at.terms(asked, requests)
        positions = {}
        for name, value in sent.items():
            shown = np.isfinite(value)
            same = name in terms and whole[name].shape == value.shape
            # An open site would answer otherwise: it does not average over successive rows, for instance.
            if same and np.allclose(whole[name][shown], value[shown], rtol=1e-6, atol=1e-9):
                positions[name] = shown & sums[name]
                examined.by_kind[name[0]] += int(positions[name].sum())
                of_few |= few_rows(terms[name][:, shown & ~sums[name]])
            else:
                examined.unread[f"{name[0]} {name[1]} {name[3]}"] += value.size
        kept.append(positions)
        draws.append([spread(terms, call)])
    d = sum(int(one.sum()) for positions in kept for one in positions.values())
    examined.sums += d
    # A column that is zero but in three rows has as many sums over these as products: more draws than sums.
    wanted = min(fewest_draws + int(1.3 * d / (n - FEWEST)), MOST_DRAWS)
    for _ in range(wanted - 1):
        other = structure.fill(rng)
        after = None if correction is None else correction.corrected(rng, other)
        for call, (at, asked) in enumerate(zip(answering, versions(other, after), strict=True)):
            requests = [request for request, _ in released[call]]
            draws[call].append(spread(at.terms(asked, requests)[1], call))
    stacked, tolerated, sizes = [], [], []
    for positions, of_call in zip(kept, draws, strict=True):
        columns = []
        for name, position in positions.items():
            found = [one.get(name) for one in of_call]
            if all(one is not None and one.shape[1:] == position.shape for one in found):
                columns.append(np.array(found)[:, :, position])
        if columns:
            terms_of_call = np.concatenate(columns, axis=2)
            stacked.append(terms_of_call)
            sizes += [terms_of_call[0][:, [k]] for k in sized(positions)]
            same = (terms_of_call == terms_of_call[:1]).all(axis=(0, 1))
            counts = terms_of_call[0][:, same & (terms_of_call == np.rint(terms_of_call)).all(axis=(0, 1))]
            tolerated.append(counts)
    if not stacked:
        return sorted(of_few)
    if sizes and correction is None:  # else the rows before and after differ by those that were corrected
        tolerated.append(np.hstack(sizes))
    every = np.concatenate(stacked, axis=2)
    persons = None if correction is None else correction.persons(n)
    rows = singled_out([*every], FEWEST, persons)
    if persons is not None:
        rows = [S for S in rows if reveals_numbers([*every], tuple(np.flatnonzero(np.isin(persons, S))))]
    return [*sorted(of_few)] + [S for S in rows if not any(counted(one, S, persons) for one in tolerated)]


class Held(NamedTuple):
    """A site, its table and structure, and what passed at it in each analysis, over which rows."""

    site: str
    table: pd.DataFrame
    structure: Structure
    released: list[list[tuple[Request, Reply]]]
    used: list[dict[str, Bools]]


def masked_numbers(passed: list[tuple[Request, Reply]]) -> set[tuple[str, str, int, str]]:
    """Return the names of the numbers that are known as totals over the sites alone."""
    found, seen = set(), defaultdict[tuple[str, str], int](int)
    for request, reply in passed:
        place = (request.family, request.step)
        seen[place] += 1
        if request.masked is not None and reply is not None:
            given = FAMILIES[request.family][request.step].given
            found |= {(*place, seen[place], name) for name in reply.arrays if given[name].maskable}
    return found


def judge_totals(held: list[Held], rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return the rows, numbered over all sites in turn, that masked totals and other releases single out."""
    kept: list[tuple[Held, int, Any, Ints]] = []
    ends = np.cumsum([len(one.table) for one in held]).tolist()
    rows_of = {one.site: slice(end - len(one.table), end) for one, end in zip(held, ends, strict=True)}
    of_few = set[tuple[int, ...]]()
    for one in held:
        for call, passed in enumerate(one.released):
            requests = [request for request, _ in passed]
            whole, terms, sums = Answering(one.site, one.used[call]).terms(one.table, requests)
            for name, value in numbers(requests, [reply for _, reply in passed]).items():
                shown = np.isfinite(value)
                same = name in sums and whole[name].shape == value.shape
                if same and np.allclose(whole[name][shown], value[shown], rtol=1e-6, atol=1e-9):
                    kept.append((one, call, name, np.flatnonzero(shown & sums[name])))
                    if name not in masked_numbers(passed):
                        few = few_rows(terms[name][:, shown & ~sums[name]])
                        of_few |= {tuple(rows_of[one.site].start + i for i in S) for S in few}
    places: dict[Any, int] = {}
    for one, call, name, shown in kept:
        total = name in masked_numbers(one.released[call])
        for k in shown.tolist():
            places.setdefault(("" if total else one.site, call, name, k), len(places))
    n, draws = ends[-1], []
    for draw in range(min(FEWEST_TOTALS + len(places) // (2 * n), MOST_DRAWS)):
        T = np.zeros((n, len(places)))
        for one in held:
            table = one.structure.fill(rng) if draw else one.table
            for call, passed in enumerate(one.released):
                requests = [request for request, _ in passed]
                terms = Answering(one.site, one.used[call]).terms(table, requests)[1]
                for other, at, name, shown in kept:
                    if other is one and at == call and name in terms:
                        total = name in masked_numbers(passed)
                        columns = [places["" if total else one.site, call, name, k] for k in shown.tolist()]
                        T[rows_of[one.site], columns] = terms[name][:, shown]
        draws.append(T)
    same = np.all([draws[0] == T for T in draws], axis=(0, 1)) & (draws[0] == np.rint(draws[0])).all(axis=0)
    of_call = np.array([call for _, call, _, _ in places])
    rows = singled_out(draws, FEWEST)
    counts = [draws[0][:, same & (of_call == call)] for call in np.unique(of_call)]
    rows = [S for S in rows if not any(counted(one, S) for one in counts) and reveals_numbers(draws, S)]
    return [*sorted(of_few), *rows]


def sized(positions: dict[Any, Bools]) -> list[int]:
    """Return the places of the numbers of rows of an analysis, which follow by subtraction for subsets."""
    names = [name for name, position in positions.items() for _ in range(int(position.sum()))]
    return [
        k for k, name in enumerate(names) if name[1] == "survey_rows" and name[3] in ("text n", "text n_rows")
    ]


def few_rows(changes: Floats) -> set[tuple[int, ...]]:
    """Return the rows of each number that depends on fewer rows than the fewest, and on some."""
    depends = changes != 0.0
    few = depends[:, (depends.any(axis=0)) & (depends.sum(axis=0) < FEWEST)]
    return {tuple(np.flatnonzero(one).tolist()) for one in few.T}


def counted(counts: Floats, rows: tuple[int, ...], persons: Ints | None = None) -> bool:
    """Return whether counts of one analysis single out these rows: small counts follow by subtraction.

    The policy tolerates it, and the threat statements name it.
    """
    return bool(counts.shape[1]) and rows in singled_out([counts, counts], FEWEST, persons)


def examine_all(
    seeds: range,
    policy: fs.Policy | str = REFUSING,
    seconds: float = np.inf,
    kinds: tuple[str, ...] = tuple(KINDS),
    corrected: bool = False,
) -> Examined:
    """Examine the sequence of each seed in turn, until the seconds of the processor are spent."""
    examined, began = Examined(), time.process_time()
    for seed in seeds:
        for finding in examine(seed, examined, policy, kinds, corrected=corrected):
            print(finding, flush=True)
        examined.seconds = time.process_time() - began
        if examined.seconds > seconds:
            break
    return examined
