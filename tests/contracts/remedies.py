"""Situations in which a note names a remedy, and how the call of a remedy is executed."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from seeded_secrets import SECRETS

import fedstat as fs
from fedstat.inference.notes import Catalogue

OPEN = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)
POISSON, BINOMIAL = sm.families.Poisson(), sm.families.Binomial()
PACKAGE = Path(fs.__file__).parent

# ---- data ------------------------------------------------------------------------------------------------


def rows() -> pd.DataFrame:
    """Rows of three sites and twelve clusters, with overdispersed counts."""
    rng, n = np.random.default_rng(4), 240
    t = pd.DataFrame({"x": rng.normal(size=n), "g": np.arange(n) // 20, "time": rng.integers(1, 30, n)})
    t["y"] = t.x + rng.standard_t(3, size=n) + np.repeat(rng.normal(size=12), 20)
    t["k"], t["e"] = rng.negative_binomial(1, 0.3, n), rng.integers(0, 2, n)
    t["m"], t["w"] = rng.integers(5, 9, n), rng.integers(1, 4, n)
    t["site"] = (t.g % 3).map(dict(enumerate("abc")))
    return t.assign(some=np.minimum(t.m, t.k))


def people(alternating: bool = False) -> pd.DataFrame:
    """Rows of sixty people; twelve of them have rows at two sites, or neighbors have opposite values."""
    rng, n = np.random.default_rng(3), 360
    person = np.arange(n) // 6
    site = (person + (np.arange(n) % 6 > 2) * (person < 12)) % 3
    y = rng.normal(size=n) + rng.normal(size=60)[person]
    y = y if not alternating else 2.0 * (-1.0) ** np.arange(n) + 0.3 * rng.normal(size=n)
    x = rng.normal(size=n)
    return pd.DataFrame({"site": site, "person": person * 7919 + 104729, "x": x, "y": y}).assign(
        site=lambda t: t["site"].map(dict(enumerate("abc"))), e=(y > 0.0) * 1
    )


def visits(slope: float = 0.0, shape: float = 0.0, groups: int = 40) -> pd.DataFrame:
    """Visits of groups, with a random slope, or counts that vary by a gamma distribution."""
    rng = np.random.default_rng(2)
    g = np.repeat(np.arange(groups), 6)
    t = np.tile(np.arange(6) / 4.0, groups)
    eta = 0.5 + 0.4 * t + 0.7 * rng.normal(size=groups)[g] + slope * rng.normal(size=groups)[g] * t
    more = rng.gamma(shape, 1.0 / shape, len(g)) if shape else 1.0
    table = pd.DataFrame({"g": g, "t": t, "y": eta + rng.normal(size=len(g))})
    return table.assign(k=rng.poisson(np.exp(eta) * more), site=[f"S{k % 3}" for k in g])


def patients(
    shapes: tuple[float, float] = (1.0, 1.0), spread: float = 0.0, n: int = 600, sites: int = 6
) -> pd.DataFrame:
    """Times in two arms with a shape each; baseline hazards differ between sites by `spread`."""
    rng = np.random.default_rng(5)
    site, arm, level = rng.integers(0, sites, n), rng.integers(0, 2, n), rng.normal(size=sites)
    x = level[site] + rng.normal(size=n)
    time = 15.0 * np.exp(-spread * level[site]) * rng.exponential(size=n) ** (1.0 / np.take(shapes, arm))
    end = rng.uniform(5.0, 30.0, n)
    table = pd.DataFrame({"site": [f"S{k}" for k in site], "arm": arm, "x": x, "g": np.arange(n) // 60})
    return table.assign(t=np.ceil(10.0 * np.minimum(time, end)) / 10.0, e=(time <= end) * 1)


def separated_arms() -> pd.DataFrame:
    """Times in two arms, whose rows have hardly a value of x in common."""
    table = patients(n=1200)
    arm = np.random.default_rng(6).random(len(table)) < 1.0 / (1.0 + np.exp(-2.5 * table["x"]))
    return table.assign(arm=arm.astype(int))


def grades() -> pd.DataFrame:
    """Four grades, with another effect of x at each threshold."""
    rng, n = np.random.default_rng(6), 400
    x = rng.uniform(-1.7, 1.7, n)
    above = 1.0 / (1.0 + np.exp(np.array([-1.2, 0.0, 1.2]) - np.outer(x, (1.4, 0.5, -0.4))))
    grade = (rng.random(n)[:, None] < np.minimum.accumulate(above, axis=1)).sum(axis=1)
    return pd.DataFrame({"site": rng.choice(list("ab"), n), "x": x, "w": grade})


def two_columns(
    n: int = 1200, response: str = "normal", column: str = "normal", by: str = "response", apart: bool = False
) -> dict[str, pd.DataFrame]:
    """Return columns x and z of two sites, or of three; records of z are missing `by` a column."""
    rng = np.random.default_rng(3)
    x, z, e = rng.normal(size=(3, n))
    z = np.exp(1.5 * z) / 4.0 if column == "skewed" else z + 0.5 * x
    y = x + z + (2.0 * rng.exponential(size=n) if response == "skewed" else e)
    cause = {"response": 1.5 * (y - y.mean()), "chance": 0.0 * y, "other": 2.0 * x}[by]
    there, key = rng.random(n) < 1.0 / (1.0 + np.exp(cause)), np.arange(n)
    table = pd.DataFrame({"id": key, "y": y, "x": x, "z": z})
    first = {"A": table[["id", "y", "x"]]}
    if apart:
        some = table if by != "other" else table[rng.random(n) < 0.7]
        first = {"A": table[["id", "y"]], "C": some[["id", "x"]]}
    return first | {"B": table.loc[there, ["id", "z"]]}


def counts(overlap: bool = True, related: float = 0.0) -> dict[str, pd.DataFrame]:
    """Return columns of three sites, of which two may have no entity in common, and overdispersed counts."""
    rng, n = np.random.default_rng(3), 900
    x, z, v = rng.normal(size=(3, n))
    v = v + related * z
    k = rng.negative_binomial(1, 1.0 / (1.0 + np.exp(0.3 * x + 0.3 * z)))
    y, key = x + z + v + rng.normal(size=n), np.arange(n)
    half, other = (rng.random(n) < 0.7, key >= 0) if overlap else (key < 450, key >= 450)
    first = pd.DataFrame({"id": key, "k": k, "e": (k > 1) * 1, "y": y, "x": x})
    return {
        "A": first,
        "B": pd.DataFrame({"id": key[half], "z": z[half]}),
        "C": pd.DataFrame({"id": key[other], "v": v[other]}),
    }


def outliers() -> dict[str, pd.DataFrame]:
    """Return counts of which some are very large."""
    frames = counts()
    table = frames["A"]
    rare = np.arange(len(table)) % 150 == 0
    return frames | {"A": table.assign(k=np.where(rare, 60, table["k"] % 4))}


def heavy() -> fs.ClientPartition:
    """Return a rare response of forty correlated columns with heavy tails."""
    rng, n, p = np.random.default_rng([1, 9]), 1_500, 40
    root = np.linalg.cholesky(0.8 ** np.abs(np.subtract.outer(np.arange(p), np.arange(p))))
    x = rng.normal(size=(n, p)) @ root.T / np.sqrt(rng.chisquare(2, size=(n, 1)) / 2.0)
    beta = np.where(np.arange(p) % 4, 0.0, 0.5 * (-1.0) ** (np.arange(p) // 4))
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(p)])
    chance = 1.0 / (1.0 + np.exp(-np.clip(x @ beta - 3.0, -8.0, 4.0)))
    table["y"] = (rng.random(n) < chance).astype(float)
    held = {"Bank": ["y", *table.columns[:20]], "Bureau": list(table.columns[20:40])}
    return fs.ClientPartition.from_frame(table, columns=held)


def groups(distance: float) -> fs.ClientPartition:
    """Return two groups of entities with means at a distance."""
    rng, n = np.random.default_rng(1), 160
    group = rng.integers(0, 2, n)
    table = pd.DataFrame({name: distance * group + rng.normal(size=n) for name in ("a", "b", "c")})
    return fs.ClientPartition.from_frame(table, columns={"A": ["a", "b"], "B": ["c"]})


def columns(frames: Mapping[str, pd.DataFrame], **given: Any) -> fs.ClientPartition:
    """Return a partition of columns."""
    return fs.ClientPartition.from_frames(frames, on="id", **given)


def two_sites(**given: Any) -> fs.ClientPartition:
    """Return columns of two sites."""
    return columns({site: table for site, table in counts().items() if site != "C"}, **given)


def by_site(table: pd.DataFrame | None = None, policy: fs.Policy | None = OPEN, **given: Any) -> Any:
    """Return a partition of rows."""
    table = rows() if table is None else table
    return fs.ClientPartition.from_frame(table, by="site", policy=policy, **given)


# ---- situations ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """A fit that prints a note with a remedy.

    After the call of the remedy the note is gone, or names none; where the call returns something else to
    compare with, `shows` checks that. `part` is a member whose note it is, `again` makes the partition that
    the text recommends, and `constants` of the package have other values meanwhile. `fewer` are arguments of
    a remedy that repeats a fit many times, or at many lambdas, by default.
    """

    kind: str
    model: str
    formula: str
    partition: Callable[[], Any] = by_site
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    shows: Callable[[Any], bool] | None = None
    again: Callable[[], Any] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    fewer: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.kind, self.part)))


def execute(call: str, situation: Any, partition: Any, result: Any = None) -> Any:
    """Execute the call of a remedy: three dots are the arguments as given, or a side of the formula."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    chain, fewer = ast.unparse(tree.func), getattr(situation, "fewer", {})
    made = tree.func.value if isinstance(tree.func, ast.Attribute) else None
    if chain != "fit" and made is None:
        return eval(call, {chain: functools.partial(getattr(result, chain), **fewer), "partition": partition})
    assert made is None or isinstance(made, ast.Call)
    model = "" if made is None else ast.unparse(made.func).rpartition("from_formula")[0].rstrip(".")
    kind = getattr(fs, model or situation.model)
    known = inspect.signature(kind.from_formula).parameters
    settings = {name: value for name, value in situation.settings.items() if name in known}
    settings |= arguments_of(made)
    # Another model has no groups.
    formula = situation.formula if model in ("", situation.model) else _without_groups(situation.formula)
    written = ... if made is None else eval(ast.unparse(made.args[0]), {"formula": formula})
    if isinstance(written, str):
        sides = zip(written.split(" ~ "), formula.split(" ~ ", 1), strict=True)
        formula = " ~ ".join(given if new == "..." else new for new, given in sides)
    kept = situation.arguments if tree.args else fewer
    return kind.from_formula(formula, partition, **settings).fit(**{**kept, **arguments_of(tree)})


def arguments_of(call: ast.Call | None) -> dict[str, Any]:
    keywords = [] if call is None else call.keywords
    return {str(one.arg): eval(ast.unparse(one.value), {"fs": fs, "sm": sm}) for one in keywords}


def _without_groups(formula: str) -> str:
    return re.sub(r" \+ \([^()]*\|[^()]*\)", "", formula)


def cluster(**more: str) -> dict[str, Any]:
    """Return arguments of errors by the clusters g."""
    return {"cov_type": "cluster", "cov_kwds": {"groups": "g", **more}}


def same_people(serial: bool = False, **given: Any) -> Any:
    """Return rows of people who are at two sites, with long numbers as keys or those from one on."""
    table = people()
    if serial:
        table["person"] = table.groupby("site")["person"].rank(method="dense").astype(int)
    return by_site(table, **given)


CROSSING = functools.partial(patients, (0.7, 2.2))
COMMON = {"baseline": "common", "grid": 2, "until": 30}
FREE_EM = {"missing": "em", "between": "independent"}
ITERATIVE = {"exchange": "iterative"}
FEW_LAMBDAS = {"n_lambdas": 12}
WITH_Z, WITH_V, WITH_BOTH = "y ~ x + z", "e ~ x + v", "y ~ x + z + v"
SITUATIONS = [
    Situation("few_clusters", "FederatedOLS", "y ~ x", by_site, {"labels": ["g"]}, cluster(correction="CR1")),
    Situation(
        "few_clusters",
        "FederatedOLS",
        "y ~ x",
        settings={"labels": ["site"]},
        arguments={"cov_type": "cluster", "cov_kwds": {"groups": "site", "correction": "CR2"}},
        shows=lambda test: 0.0 < test.pvalue < 1.0,
    ),
    Situation(
        "few_clusters", "FederatedOrdinal", "w ~ x", by_site, {"labels": ["g"]}, cluster(correction="CR1")
    ),
    *(
        Situation(
            "few_clusters",
            family,
            "Surv(t, e) ~ x + cluster(g)",
            lambda: by_site(patients().assign(g=lambda t: t["site"])),
            arguments={"cov_type": "cluster", "cov_kwds": {"correction": "CR0"}},
        )
        for family in ("FederatedCox", "FederatedAFT")
    ),
    Situation("few_clusters", "FederatedGEE", "y ~ x", by_site, {"groups": "g"}, {"cov_type": "robust"}),
    Situation(
        "few_clusters",
        "FederatedMixed",
        "y ~ t + (1 | g)",
        lambda: by_site(visits(groups=4)),
        arguments={"cov_type": "robust"},
    ),
    Situation("shared_keys", "FederatedOLS", "y ~ x", lambda: same_people(on="person"), again=same_people),
    Situation("shared_labels", "FederatedGEE", "y ~ x", same_people, {"groups": "person"}),
    Situation(
        "shared_labels", "FederatedGEE", "e ~ x", same_people, {"groups": "person", "family": BINOMIAL}
    ),
    Situation("shared_labels", "FederatedMixed", "y ~ x + (1 | person)", same_people),
    Situation(
        "local_groups", "FederatedGEE", "y ~ x", lambda: same_people(serial=True), {"groups": "person"}
    ),
    Situation("small_sample", "FederatedGLM", "y ~ x", arguments={"cov_type": "HC1"}),
    Situation("overdispersion", "FederatedGLM", "k ~ x", settings={"family": POISSON}),
    Situation(
        "overdispersion",
        "FederatedGLM",
        "k ~ x",
        settings={"family": sm.families.NegativeBinomial(alpha=0.1)},
    ),
    Situation("overdispersion", "FederatedGLM", "cbind(some, m - some) ~ x", settings={"family": BINOMIAL}),
    Situation("overdispersion", "FederatedMixed", "k ~ x + (1 | g)", settings={"family": POISSON}),
    Situation(
        "overdispersion",
        "FederatedMixed",
        "cbind(some, m - some) ~ x + (1 | g)",
        settings={"family": BINOMIAL},
    ),
    Situation("departure", "FederatedMixed", "y ~ t + (1 | g)", lambda: by_site(visits(1.2))),
    Situation("methods", "GLORE", "e ~ x", arguments={"masked": True}, part="heterogeneity"),
    Situation("one_dispersion", "FederatedOLS", "y ~ x", arguments={"local": False}, part="heterogeneity"),
    Situation(
        "correlation",
        "FederatedGEE",
        "y ~ x",
        lambda: by_site(people(alternating=True)),
        {"groups": "person", "cov_struct": "exchangeable"},
    ),
    Situation(
        "merged_intervals",
        "FederatedCox",
        "Surv(t, e) ~ x",
        lambda: by_site(patients(), fs.Policy(min_count=10)),
        arguments=COMMON,
    ),
    Situation(
        "merged_intervals",
        "FederatedCox",
        "Surv(t, e) ~ x",
        lambda: by_site(patients(n=3000, sites=2), None),
        arguments=COMMON | {"grid": 1},
    ),
    Situation(
        "proportional_hazards",
        "FederatedCox",
        "Surv(t, e) ~ arm",
        lambda: by_site(CROSSING()),
        shows=lambda test: bool(test.tidy()["p_value"].iloc[-1] < 0.01),
    ),
    Situation(
        "one_baseline",
        "FederatedCox",
        "Surv(t, e) ~ x",
        lambda: by_site(patients(spread=0.7)),
        arguments=COMMON,
    ),
    Situation(
        "poor_overlap",
        "SurvivalEffect",
        "Surv(t, e) ~ 1",
        lambda: by_site(separated_arms()),
        {"treatment": "arm ~ x"},
    ),
    Situation("proportional_odds", "FederatedOrdinal", "w ~ x", lambda: by_site(grades())),
    Situation(
        "response_not_normal", "VFEMRegression", WITH_Z, lambda: columns(two_columns(response="skewed"))
    ),
    Situation(
        "missing_by_columns",
        "VFEMRegression",
        WITH_Z,
        lambda: columns(two_columns(by="other", apart=True)),
        arguments={"method": "weighted"},
    ),
    Situation(
        "skewness", "VFEMRegression", WITH_Z, lambda: columns(two_columns(column="skewed", apart=True))
    ),
    Situation(
        "incomplete_correction",
        "VFEMRegression",
        WITH_Z,
        lambda: columns(two_columns(column="skewed", apart=True)),
        arguments={"correction": "skewness"},
        constants={
            "fedstat.models.vertical.joint_normal.corrections.MOST_ROUNDS": 1,
            "fedstat.models.vertical.joint_normal.corrections.FAR": 0.2,
        },
    ),
    Situation(
        "small_sample_bias",
        "VFEMRegression",
        WITH_Z,
        lambda: columns(two_columns(60, by="chance", apart=True)),
    ),
    Situation("between_chosen", "VFEMRegression", WITH_BOTH, lambda: columns(counts(overlap=False))),
    Situation(
        "between_chosen", "VFEMGLM", "e ~ x + z + v", lambda: columns(counts(False)), {"family": BINOMIAL}
    ),
    Situation(
        "most_correlated",
        "VFEMRegression",
        WITH_BOTH,
        lambda: columns(counts(related=1.0)),
        {"between": "independent"},
    ),
    Situation("most_correlated", "VerticalGLM", WITH_BOTH, lambda: columns(counts(related=1.0)), FREE_EM),
    Situation(
        "masked",
        "VFEMRegression",
        WITH_BOTH,
        lambda: columns(counts()),
        {"between": "independent"},
        ITERATIVE,
    ),
    Situation(
        "sketch_seed",
        "VFEMRegression",
        WITH_BOTH,
        lambda: columns(counts()),
        {"between": "independent"},
        {"exchange": "iterative", "iteration": fs.Iteration(cross_products="sketch")},
    ),
    Situation(
        "response_released",
        "VFEMGLM",
        "e ~ x + z",
        two_sites,
        {"family": BINOMIAL, "between": "independent", "coordinator": "A"},
        {"cross_products": "sketch"},
    ),
    Situation(
        "curvature",
        "VFEMGLM",
        "e ~ x + z + v",
        lambda: columns(counts()),
        {"family": BINOMIAL, "between": "independent"},
    ),
    Situation("curvature", "VFEMGLM", "e ~ x + z + v", lambda: columns(counts()), {"family": BINOMIAL}),
    Situation("overdispersion", "VFEMGLM", "k ~ x", lambda: columns(counts()), {"family": POISSON}),
    Situation(
        "overdispersion",
        "VFEMGLM",
        "k ~ x",
        lambda: columns(outliers()),
        {"family": sm.families.NegativeBinomial(alpha=1.0)},
        {"dispersion": "ml"},
    ),
    Situation(
        "overdispersion",
        "VFEMGLM",
        "k ~ x + z",
        lambda: columns(counts()),
        {"family": sm.families.NegativeBinomial(alpha=0.1)},
    ),
    Situation(
        "overdispersion",
        "VFEMGLM",
        "k ~ x + z",
        lambda: columns(counts()),
        {"family": sm.families.NegativeBinomial(alpha=0.1), "between": "independent"},
        {"cov_type": "robust"},
    ),
    Situation(
        "naive_intervals",
        "VerticalGLM",
        WITH_V,
        lambda: columns(counts()),
        {"family": BINOMIAL},
        {"n_lambdas": 6},
    ),
    *(
        Situation(kind, "VerticalGLM", WITH_BOTH, lambda: columns(counts()), {"missing": "em"})
        for kind in ("naive_intervals", "conditional_claim")
    ),
    Situation(
        "proposed",
        "VerticalGLM",
        WITH_V,
        lambda: columns(counts()),
        {"family": BINOMIAL},
        FEW_LAMBDAS,
        fewer=FEW_LAMBDAS,
    ),
    Situation(
        "proposed", "VerticalGLM", "y ~ .", heavy, {"family": BINOMIAL}, FEW_LAMBDAS, fewer=FEW_LAMBDAS
    ),
    Situation(
        "smallest_lambda",
        "VerticalGLM",
        WITH_V,
        lambda: columns(counts()),
        {"family": BINOMIAL},
        {"lambdas": [0.1, 0.02]},
    ),
    *(
        Situation(
            "overlap",
            "M2SEM",
            "~ a + b + c",
            functools.partial(groups, distance),
            {"n_clusters": 2, "n_factors": 0},
            {"select": None, "n_init": 1},
            shows=lambda found: bool(np.isfinite(found.tidy()["std_error"]).all()),
            fewer={"samples": 20},
        )
        for distance in (0.5, 1.5)
    ),
]


@dataclass(frozen=True)
class Executed:
    """What a situation printed and what the call of its remedy returned.

    `forms` are the catalogues that made notes of the kind with a remedy, and the entries.
    """

    call: str
    forms: tuple[tuple[Catalogue, str], ...]
    after: Any


def noted(situation: Situation, result: Any) -> Any:
    """Return the result, or its part, that has the note."""
    return getattr(result, situation.part) if situation.part else result


@functools.cache
def executed(place: int) -> Executed:
    """Fit a situation and execute the remedy of its note, once."""
    situation, forms = SITUATIONS[place], []
    plain = Catalogue.note

    def note(self: Catalogue, kind: str, /, **given: Any) -> Any:
        made = plain(self, kind, **given)
        if made.kind == situation.kind and "call" in made.values:
            forms.append((self, kind))
        return made

    SECRETS.seed(f"remedy {situation} {place}")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(Catalogue, "note", note)
        partition = situation.partition()
        with patch.context() as other:
            for name, value in situation.constants.items():
                other.setattr(name, value)
            kind = getattr(fs, situation.model)
            model = kind.from_formula(situation.formula, partition, **situation.settings)
            result = model.fit(**situation.arguments)
            table = noted(situation, result).diagnostics().set_index("kind")["values"]
        assert situation.kind in table, sorted(set(table.index))
        values = table[situation.kind]
        call = (values if isinstance(values, dict) else values.iloc[0])["call"]
        printed = tuple(forms)
        partition = situation.again() if situation.again else situation.partition()
        after = execute(call, situation, partition, result)
    return Executed(call, printed, after)
