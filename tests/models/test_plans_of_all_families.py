"""What a plan says of every public model and table covers what the sites release, by their own ledgers.

Every analysis is proposed to the owners, approved, and run again. A site refuses what is not in the plan; the
ledgers show that the plan states columns, numbers of requests and of released numbers, and rounds.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter

import numpy as np
import pytest
from statsmodels.genmod import families

import fedstat as fs
from fedstat.errors import ConsentError

MODELS = {
    name
    for name in fs.__all__
    if inspect.isclass(getattr(fs, name)) and hasattr(getattr(fs, name), "from_formula")
} | {"CopulaSynthesizer"}
REQUESTING = {"corr", "crosstab", "histogram", "impute", "quantiles", "rehearse", "table_one"}
"""Public functions that send requests to sites."""
ELSEWHERE = {"approval", "schema", "secure", "align", "receipt"}
"""Families without an analysis: keys, statements on the ledger, and the plan itself."""
AFTERWARDS = "release_spec"
"""How columns were coded, for predictions: owners see it in the plan of the fit, whenever it is requested."""
BINOMIAL = families.Binomial()


def owner(**rules):
    return fs.Policy(approval="owner", **rules)


def rows(policy, table=None):
    table = fs.datasets.make_hospitals() if table is None else table
    return fs.ClientPartition.from_frame(table, by="hospital", policy=policy)


def wards(policy):
    table = fs.datasets.make_hospitals().dropna(subset=["num", "age", "sex"])
    place = table.groupby("hospital").cumcount()
    whole = place < table.groupby("hospital")["age"].transform("size") // 4 * 4  # clusters of equal size
    table = table[whole].assign(ward=lambda table: table["hospital"] + (place // 4).astype(str))
    return rows(policy, table)


def survival(policy):
    return rows(policy, fs.datasets.make_survival())


def repeated(policy):
    return rows(policy, fs.datasets.make_repeated(4))


def columns(policy):
    return fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id", policy=policy)


def complete(policy):
    data = fs.datasets.make_blocks(600, missing=[0.0, 0.0, 0.0], seed=1)
    return fs.ClientPartition.from_frames(data.frames, on=data.key, policy=policy)


def weighted(policy):
    data = fs.datasets.make_blocks(600, missing=[0.0, 0.0, 0.0], seed=1)
    holder = next(name for name, frame in data.frames.items() if "y" in frame)
    own = data.frames[holder].assign(cases=np.arange(600) % 3 + 1.0, shift=np.arange(600) % 7 / 7.0)
    own["event"] = (own["y"] > own["y"].median()) * 1.0
    return fs.ClientPartition.from_frames({**data.frames, holder: own}, on=data.key, policy=policy)


def clusters(policy):
    data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    return fs.ClientPartition.from_frames(data.frames, on=data.key, policy=policy)


def divided(policy):
    table = fs.datasets.make_hospitals()[["age", "sex"]].dropna()
    budget = owner(privacy=fs.Budget(epsilon=60.0, delta=1e-6))
    return fs.ClientPartition.from_frame(table, columns={"A": ["age"], "B": ["sex"]}, policy=budget)


AGES = {"age": (20, 90)}
BOUNDS = {"age": (20, 80), "sex": [0, 1]}


def of(name, formula, arguments=None, **options):
    """Make a model by its formula; its fit takes the arguments."""
    return (
        name,
        lambda partition: getattr(fs, name).from_formula(formula, partition, **options),
        arguments or {},
    )


def by(name, request):
    """Call a public function, which has no model to explain."""
    return name, request, None


LOGISTIC, TIMES = "num > 0 ~ age + sex", "Surv(months, died) ~ age + C(arm)"
CASES = {
    "OLS": (rows, of("FederatedOLS", "num ~ age + sex")),
    "OLS robust": (rows, of("FederatedOLS", "num ~ age + sex", {"cov_type": "HC3"})),
    "GLM": (rows, of("FederatedGLM", "num ~ age + C(sex)", family=families.Poisson())),
    "GLM by transforms": (rows, of("FederatedGLM", "num ~ scale(age) + poly(trestbps, 2)")),
    "GLORE": (rows, of("GLORE", LOGISTIC)),
    "GLORE without own fits": (rows, of("GLORE", LOGISTIC, {"local": False, "masked": True})),
    "FedAvg": (rows, of("FedAvg", LOGISTIC, {"rounds": 3}, family=BINOMIAL)),
    "FedAvgM": (rows, of("FedAvgM", LOGISTIC, {"rounds": 3}, family=BINOMIAL)),
    "FedProx": (rows, of("FedProx", LOGISTIC, {"rounds": 2}, family=BINOMIAL)),
    "QFedAvg": (rows, of("QFedAvg", LOGISTIC, {"rounds": 2, "masked": False}, family=BINOMIAL)),
    "GEE": (wards, of("FederatedGEE", "num ~ age", groups="ward")),
    "GEE exchangeable": (
        wards,
        of("FederatedGEE", LOGISTIC, groups="ward", family=BINOMIAL, cov_struct="exchangeable"),
    ),
    "Cox": (survival, of("FederatedCox", TIMES)),
    "Cox of a common baseline": (
        survival,
        of("FederatedCox", TIMES, {"baseline": "common", "grid": 3, "until": 60}),
    ),
    "treatment": (rows, of("TreatmentEffect", "num ~ age", treatment="exang ~ age")),
    "treatment of times": (
        survival,
        of("SurvivalEffect", "Surv(months, died) ~ 1", {"grid": 6, "until": 48}, treatment="arm ~ age"),
    ),
    "AFT": (survival, of("FederatedAFT", TIMES, distribution="lognormal")),
    "Treatment": (survival, of("TreatmentEffect", "died ~ age", treatment="arm ~ age", family=BINOMIAL)),
    "KaplanMeier": (survival, of("KaplanMeier", "Surv(months, died) ~ arm", {"grid": 1, "until": 60})),
    "CumulativeIncidence": (
        survival,
        of("CumulativeIncidence", "Surv(months, C(died, levels=[0, 1])) ~ arm", {"grid": 1, "until": 60}),
    ),
    "Ordinal": (rows, of("FederatedOrdinal", "num ~ age + sex")),
    "Multinomial": (rows, of("FederatedMultinomial", "C(cp) ~ age")),
    "Mixed": (repeated, of("FederatedMixed", "score ~ month + (1 + month | patient)")),
    "Boost": (rows, of("FedFunctionBoost", "num ~ age + sex", {"steps": 20})),
    "Boost at sites": (rows, of("FedFunctionBoost", "num ~ age + sex", {"steps": 5, "aggregation": "local"})),
    "VFEM": (columns, of("VFEMRegression", "NPGR ~ ROA + CI")),
    "VFEM independent": (columns, of("VFEMRegression", "NPGR ~ ROA + CI", between="independent")),
    "VFEM binary": (columns, of("VFEMGLM", "NPGR > 0 ~ ROA + CI", family=BINOMIAL)),
    "VFEM of weights and an offset": (
        weighted,
        of("VFEMRegression", "y ~ . - event", freq_weights="cases", offset="shift"),
    ),
    "VGLM": (complete, of("VerticalGLM", "y ~ .", {"n_lambdas": 8})),
    "VGLM by folds": (
        complete,
        of("VerticalGLM", "y ~ .", {"n_lambdas": 6, "select": "cv", "folds": 3, "seed": 1}),
    ),
    "VGLM of weights and an offset": (
        weighted,
        of("VerticalGLM", "y ~ . - event", {"n_lambdas": 8}, freq_weights="cases", offset="shift"),
    ),
    "VGLM binary of weights and an offset": (
        weighted,
        of(
            "VerticalGLM",
            "event ~ . - y",
            {"n_lambdas": 5},
            family=BINOMIAL,
            freq_weights="cases",
            offset="shift",
        ),
    ),
    "LASER": (columns, of("LASER", "NPGR > 0 ~ ROA + CI", {"epochs": 2})),
    "M2SEM": (
        clusters,
        of("M2SEM", "~ c1_1 + c1_2 + c2_1 + c2_2", {"select": None, "n_init": 1}, n_clusters=2, n_factors=1),
    ),
    "M2SEM without factors": (
        clusters,
        of("M2SEM", "~ c1_1 + c1_2 + c2_1 + c2_2", {"select": None, "n_init": 1}, n_clusters=2, n_factors=0),
    ),
    "Copula": (divided, ("CopulaSynthesizer", lambda p: fs.CopulaSynthesizer(p, 3.0, BOUNDS), {})),
    "PrivateCopulaGLM": (
        divided,
        of("PrivateCopulaGLM", "age ~ sex", {"draws": 20}, epsilon=50.0, bounds=BOUNDS),
    ),
    "table_one": (rows, by("table_one", lambda p: fs.table_one(p, "age + C(cp)", by="sex"))),
    "table_one of columns": (complete, by("table_one", lambda p: fs.table_one(p, "A1 + B1"))),
    "crosstab": (rows, by("crosstab", lambda p: fs.crosstab(p, "sex", "cp"))),
    "quantiles": (rows, by("quantiles", lambda p: fs.quantiles(p, "age", bounds=AGES))),
    "quantiles by group": (
        survival,
        by(
            "quantiles",
            lambda p: fs.quantiles(p, "age", by="arm", q=[0.05, 0.35, 0.5, 0.65, 0.95], bounds=AGES),
        ),
    ),
    "table_one with quantiles": (
        survival,
        by(
            "table_one",
            lambda p: fs.table_one(p, "age + months", by="arm", bounds=AGES | {"months": (0, 60)}),
        ),
    ),
    "histogram": (rows, by("histogram", lambda p: fs.histogram(p, "age", bounds=AGES))),
    "corr": (rows, by("corr", lambda p: fs.corr(p, "age + trestbps"))),
    "corr of columns": (complete, by("corr", lambda p: fs.corr(p, "A1 + B1"))),
    "impute": (columns, by("impute", lambda p: fs.impute(p, "NPGR ~ ROA + CI", m=2))),
    "rehearse": (divided, by("rehearse", lambda p: fs.rehearse(p, 3.0, BOUNDS, seed=1))),
}


def test_every_public_model_and_function_has_a_case():
    assert {name for _, (name, _, _) in CASES.values()} == MODELS | REQUESTING


def released(site, begin):
    """Entries of a site's own ledger since a place in it, of analyses."""
    entries = [entry for _, entry in site.site_ledger.events[begin:]]
    return [entry for entry in entries if entry.family not in ELSEWHERE]


@pytest.mark.parametrize("case", CASES)
def test_a_plan_covers_what_the_fit_releases(case):
    warnings.simplefilter("ignore")
    make, (_, request, arguments) = CASES[case]
    partition = make(owner())
    sites = partition.sites

    def run():
        made = request(partition)
        return made if arguments is None else made.fit(**arguments)

    plans = {name: [] for name in sites}
    for _ in range(8):  # an analysis of several parts has a plan for each
        begins = {name: len(site.site_ledger.events) for name, site in sites.items()}
        try:
            result = run()
            break
        except ConsentError as error:
            assert "pending" in str(error)
        for name, site in sites.items():
            assert not any(
                entry.kind == "aggregate" for entry in released(site, begins[name]) if not plans[name]
            )
            for digest, plan in list(site.pending.items()):
                plans[name].append(plan)
                site.approve(digest)
    else:
        raise AssertionError("the analysis waits for ever")
    assert any(plans.values())
    if arguments is not None:
        explanation = request(partition).explain(**arguments)
        low, _, most = np.sum([counts for _, counts in explanation.rounds], axis=0)
        if hasattr(result, "ledger"):
            rounds = result.ledger.rounds - request(partition)._agreement.rounds
            assert low <= rounds <= most
            assert all(plan.rounds >= rounds for found in plans.values() for plan in found)
    for name, site in sites.items():
        check_site(name, site, plans[name], begins[name])
        # a site with the coordinator sends it nothing
        if arguments is not None and name != getattr(request(partition), "coordinator", ""):
            table = explanation.tidy()
            announced = set(table.loc[table["sender"] == name, "step"])
            before = {step.step for plan in plans[name] for step in plan.prepared} | {AFTERWARDS}
            planned = {step.step for plan in plans[name] for step in plan.steps if step.gives} - before
            assert {e.step for e in released(site, begins[name]) if e.sender == name} & planned <= announced


def check_site(name, site, plans, begin):
    most, numbers, masked = Counter(), {}, {}
    prepared = {step.step for plan in plans for step in plan.prepared}
    for plan in plans:
        for step in plan.steps:
            most[step.family, step.step] += step.most
            for array in step.gives:
                numbers[step.family, step.step, array.array] = (array.numbers, array.kind)
                masked[step.family, step.step, array.array] = array.masked
    times = Counter()
    for entry in released(site, begin):
        address = entry.family, entry.step
        if entry.sender != name or entry.kind == "refusal":
            continue
        if address not in most:
            assert entry.step in prepared or entry.family == "design", entry
            continue
        times[(*address, entry.array)] += 1
        assert times[(*address, entry.array)] <= most[address], (name, address, most[address])
        announced, kind = numbers[(*address, entry.array)]
        assert kind == entry.kind, entry
        assert not announced or int(np.prod(entry.shape)) <= announced, (name, entry, announced)
        assert entry.masked or not masked[(*address, entry.array)], entry
    used = {column for chain in site.site_ledger.chains for column in chain.subject.columns}
    planned = {column for plan in plans for column in plan.columns}
    assert used <= planned, (name, used - planned)
    # and no more columns than are used: an owner would deny what is not requested
    assert planned <= used | {"hospital"}, (name, planned - used)
