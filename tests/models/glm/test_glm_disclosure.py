"""A formula, a weight, a cluster or a second model could reveal single rows, and does not."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import FedstatError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.tables.table import ParquetTable

F = sm.families
N = 300
SITES = ("A", "B", "C")


def table():
    """Site B has one patient of 97 years, row 150, and one row of g = b with h = a."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"site": np.repeat(SITES, N // 3), "x": rng.normal(size=N), "z": rng.normal(size=N)})
    frame["age"] = rng.integers(20, 80, N).astype(float)
    frame.loc[150, "age"] = 97.0
    frame["y"] = (rng.uniform(size=N) < 0.4).astype(int)
    frame["count"] = rng.poisson(np.exp(0.3 * frame["x"]))
    frame["g"] = rng.choice(["a", "b"], N)
    frame["h"] = rng.choice(["a", "b"], N)
    frame.loc[(frame["site"] == "B") & (frame["g"] == "b"), "h"] = "b"
    frame.loc[101, ["g", "h"]] = ["b", "a"]
    frame["one"] = np.where(frame.index == 150, 1e9, 1.0)
    frame["few"] = np.where(frame.index % 100 < 4, 1.0, 0.0)
    frame["rare"] = np.where(np.isin(frame.index, [150, 160]), 1.0, 0.0)
    frame["row"] = [f"patient {i}" for i in range(N)]
    frame["ward"] = frame.index // 10
    return frame


FRAME = table()


def partition_of(frame=FRAME, **policy):
    policies = dict.fromkeys(SITES, Policy(**policy))
    return fs.ClientPartition.from_frame(frame, by="site", policies=policies)


def fit(partition, formula, family=None, options=None, **roles):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fs.FederatedGLM.from_formula(formula, partition, family=family or F.Gaussian(), **roles)
        return model.fit(**(options or {}))


def stream(frame, folder):
    tables = {}
    for site, rows in frame.groupby("site"):
        rows.drop(columns="site").to_parquet(folder / f"{site}.parquet")
        tables[site] = ParquetTable(folder / f"{site}.parquet", rows_per_chunk=45)
    return fs.ClientPartition.from_frames(tables, layout="horizontal")


def released(partition):
    return [(site, e.step, e.array) for site in SITES for e in partition.sites[site].ledger.entries]


def refusal(partition, *arguments, **known):
    """The refusal, after which sites hold what they held: the refusing one entered nothing of the step."""
    with pytest.raises(PolicyError) as caught:
        fit(partition, *arguments, **known)
    message = str(caught.value)
    site = partition.sites[message.split(":")[0]]
    assert not {entry.step for entry in site.ledger.entries} & {"open_rows", "transform_sums", "sum_clusters"}
    assert "97.0" not in message and "patient" not in message
    return message


BUMP = "exp(-(age - 97.3) ** 2 * 2)"
ALONE = "fewer make up nearly all variation of "
SINGLED_OUT = {
    "indicator": ("z ~ x + exp(-(1000 * (age - 97)) ** 2)", {}, "B: .*either side of design column 'exp"),
    "threshold": ("z ~ x + log(1 + 1 / (1 + exp(-9 * (age - 88))))", {}, f"B: .*{ALONE}design column 'log"),
    "bump": (f"z ~ x + {BUMP}", {}, f"{ALONE}design column 'exp"),
    "pole": ("z ~ x + log(1 + (age - 96.999) ** -4)", {}, f"B: .*{ALONE}design column 'log"),
    "hidden bump": (f"z ~ x + log(age) + log(age * exp({BUMP}))", {}, r"'log\(age\)', 'log"),
    "interaction": (f"z ~ x + age:{BUMP}", {}, f"{ALONE}design column 'age:exp"),
    "large multiple": ("z ~ x + exp(3 * age)", {}, f"A: .*{ALONE}design column 'exp"),
    "power": ("z ~ x + log(1 + (age / 97) ** 10 * exp(4 * age - 380))", {}, f"B: .*{ALONE}design column"),
    "narrow knots": (
        "z ~ x + bs(age, degree=1, knots=(90, 96, 98), lower_bound=0, upper_bound=120)",
        {},
        f"B: .*({ALONE}|single out fewer|either side of).*bs",
    ),
    "mean of a bump": (f"z ~ center({BUMP})", {}, f"{ALONE}'center"),
    "response": (f"z * {BUMP} ~ x", {}, f"{ALONE}the response 'z"),
    "large response": ("exp(5 * age) ~ x", {}, f"A: .*{ALONE}the response 'exp"),
    "offset": (f"count ~ x + offset(99 * {BUMP})", {"family": F.Poisson()}, f"{ALONE}the offset"),
    "trials": (
        "cbind(y * exp(age - 97), (1 - y) * exp(age - 97)) ~ x",
        {"family": F.Binomial()},
        "A: .*at least 5 effective rows; the weights of 'cbind",
    ),
    "weight": ("z ~ x", {"var_weights": "one"}, "B: .*the weights of 'one' concentrate on fewer"),
    "frequency": ("z ~ x", {"freq_weights": "one"}, "B: .*the weights of 'one' concentrate on"),
    "no weight": ("z ~ x", {"var_weights": "few"}, "A: .*requires at least 5 complete rows; there are 4"),
    "implied cell": (
        "z ~ x + C(g) * C(h)",
        {},
        r"B: .*'C\(g\)\[T.b\]', 'C\(g\)\[T.b\]:C\(h\)\[T.b\]' tog",
    ),
    "few events": ("age > 90 ~ x", {"family": F.Binomial()}, r"B: .*\(minimum events\).*fewer events"),
    "events as counts": (
        "cbind(rare, 1 - rare) ~ x",
        {"family": F.Binomial()},
        r"B: .*\(minimum events\).*fewer events",
    ),
    "scaled events": ("5 * rare ~ x", {}, f"{ALONE}the response '5"),
    "identifier": ("z ~ x + row", {}, "A: .*100 of the 100 levels of column 'row' have fewer"),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", SINGLED_OUT)
def test_formulas_that_single_out_rows_are_refused(case, streamed, tmp_path):
    formula, roles, expected = SINGLED_OUT[case]
    partition = stream(FRAME, tmp_path) if streamed else partition_of()
    message = refusal(partition, formula, **roles)
    assert re.search(expected, message), message
    if case in ("response", "weight", "few events", "identifier"):
        assert fit(partition, "z ~ x + age").converged


@pytest.mark.parametrize(
    ("formula", "family"),
    [
        ("z ~ x + age + C(g) + C(h)", F.Gaussian()),
        ("z ~ log(age) + poly(x, 3) + exp(x)", F.Gaussian()),
        ("y ~ x * age + C(g)", F.Binomial()),
        ("age > 60 ~ x + z", F.Binomial()),
        ("count ~ x + offset(log(age))", F.Poisson()),
        (
            "exp(z) ~ bs(age, knots=(40, 60), lower_bound=10, upper_bound=110)",
            F.Gamma(sm.families.links.Log()),
        ),
        ("cbind(y, 1 - y) ~ x + age", F.Binomial()),
    ],
)
def test_usual_formulas_are_not(formula, family):
    assert fit(partition_of(), formula, family).converged


def test_each_rule_names_itself_the_site_and_the_column():
    rare = FRAME.assign(g=np.where(np.isin(FRAME.index, [120, 121]), "c", FRAME["g"]))
    rare.loc[rare.index[[5, 6, 7, 8]], "g"] = "c"
    events = FRAME.assign(y=np.where(FRAME["site"] == "C", 0, FRAME["y"]))
    events.loc[[210, 220], "y"] = 1
    gone = FRAME.assign(z=FRAME["z"].where(~np.isin(FRAME.index, range(104, 200))))
    for frame, formula, family, expected in (
        (rare, "z ~ C(g)", F.Gaussian(), ("B", "minimum rows per level", "column 'g'", "Merge them")),
        (events, "y ~ x", F.Binomial(), ("C", "minimum events", "'y'", "Leave the site out")),
        (gone, "z ~ x", F.Gaussian(), ("B", "minimum count", "there are 4", "Leave the site out")),
    ):
        message = refusal(partition_of(frame), formula, family)
        assert message.startswith(f"{expected[0]}: its policy ({expected[1]})")
        assert all(part in message for part in expected[2:])
    message = refusal(partition_of(max_parameters=0.02), "z ~ x + age")
    assert message.startswith(
        "A: its policy (maximum parameters per row) allows 0.02 coefficients per row; the"
    )


def test_the_owner_decides():
    """One policy refuses what another one allows."""
    assert fit(partition_of(min_level_count=0), f"z ~ x + {BUMP}").converged
    assert fit(partition_of(min_count=0), "z ~ x", var_weights="one").converged
    with pytest.raises(PolicyError, match=r"\(families\) allows \['design'\], not 'glm'"):
        fit(partition_of(families=frozenset({"design"})), "z ~ x", options={"masked": False})
    with pytest.raises(PolicyError, match=r"\(families\) allows \['design', 'glm'\], not 'secure'"):
        fit(partition_of(families=frozenset({"design", "glm"})), "z ~ x")


# -- two models --------------------------------------------------------------------------------------


def test_a_second_model_on_a_row_less_is_refused_and_the_same_rows_are_not():
    frame = FRAME.assign(v=FRAME["z"].where(FRAME.index != 150), w=FRAME["z"].where(FRAME.index % 100 > 4))
    frame["f"] = np.where(FRAME.index == 150, 0.0, 1.0)
    partition = partition_of(frame)
    first = fit(partition, "age ~ x")
    before = released(partition)
    for formula, roles in (
        ("age ~ x + v", {}),
        ("age ~ x", {"freq_weights": "f"}),
        ("age ~ x", {"labels": ["v"]}),
    ):
        with pytest.raises(
            PolicyError, match=r"B: its policy \(differencing\) refuses rows that differ in fewer"
        ):
            fit(partition, formula, **roles)
        lines = [line for line in released(partition) if line[0] == "B"]
        assert lines == [line for line in before if line[0] == "B"]
    again = fit(partition, "age ~ x + z")
    assert again.nobs == first.nobs == N
    assert fit(partition, "age ~ x + w").nobs == N - 15


def test_a_threshold_that_moves_by_a_few_rows_is_refused():
    """The difference of two scores would be the covariates of those between."""
    partition = partition_of()
    fit(partition, "age > 60 ~ x", F.Binomial())
    with pytest.raises(PolicyError, match=r"\(differencing\) refuses outcomes of a comparison"):
        fit(partition, "age > 61 ~ x", F.Binomial())
    assert fit(partition, "age > 60 ~ x + z", F.Binomial()).converged
    assert fit(partition, "age > 40 ~ x", F.Binomial()).converged


def test_a_streamed_site_remembers_rows_as_well(tmp_path):
    frame = FRAME.assign(v=FRAME["z"].where(FRAME.index != 150))
    partition = stream(frame, tmp_path)
    fit(partition, "age ~ x")
    with pytest.raises(PolicyError, match=r"B: .*differencing"):
        fit(partition, "age ~ x + v")
    assert fit(partition, "age ~ x").converged


# -- clusters ----------------------------------------------------------------------------------------


def opened(labels=("row", "ward"), strata=None, clusters="ward", **policy):
    """A site with a fit open and its clusters listed."""
    partition = partition_of(**policy)
    model = fs.FederatedGLM.from_formula("z ~ x", partition, labels=labels)
    model.fit()
    site = partition.sites["B"]

    def request(step, text="", **arrays):
        reply = site.answer(pack_request(Request("B", "glm", step, arrays, model._session, text)))
        return unpack_reply(reply).arrays

    listed = request("list_clusters", f'{{"clusters": "{clusters}", "strata": {strata or "null"}}}')
    point = {"beta": np.zeros(2), "shift": np.zeros(2), "scale": np.ones(2)}
    return site, request, listed, point


def hashes(*values):
    return np.array(values, dtype=np.int64)


def test_a_cluster_of_one_row_is_not_shared():
    _, request, listed, point = opened(clusters="row")
    with pytest.raises(
        PolicyError, match=r"B: its policy \(minimum count\) requires at least 5 rows behind the score"
    ):
        request("sum_clusters", **point, shared=listed["clusters"][:1], spanning=hashes())


def test_what_others_share_leaves_no_single_cluster_behind():
    """All clusters but a small one called shared: the rest would be the score of the small one."""
    frame = FRAME.assign(ward=np.where(FRAME.index == 150, 999, FRAME["ward"]))
    partition = partition_of(frame)
    model = fs.FederatedGLM.from_formula("z ~ x", partition, labels=["ward"])
    model.fit()

    def request(step, text="", **arrays):
        ask_ = Request("B", "glm", step, arrays, model._session, text)
        return unpack_reply(partition.sites["B"].answer(pack_request(ask_))).arrays

    listed = request("list_clusters", '{"clusters": "ward", "strata": null}')["clusters"]
    point = {"beta": np.zeros(2), "shift": np.zeros(2), "scale": np.ones(2)}
    refused = 0
    for leave in listed:
        try:
            request("sum_clusters", **point, shared=listed[listed != leave], spanning=hashes())
        except PolicyError:
            refused += 1
    assert refused == len(listed)  # the small one alone, or among those that are shared


def test_a_stratum_of_one_row_is_not_summed_by_itself():
    """Strata of a row each: as a stranger's claim that others have them too, and as the model asks."""
    site, request, listed, point = opened(strata='"row"', clusters="row")
    before = len(site.ledger.entries)
    with pytest.raises(PolicyError, match="rows behind the score of a cluster or stratum"):
        request("sum_clusters", **point, shared=hashes(), spanning=listed["strata"][:1])
    assert len(site.ledger.entries) == before
    arrays = request("sum_clusters", **point, shared=hashes(), spanning=hashes())
    assert arrays["counts"].size == arrays["sums"].size == 0
    assert arrays["lonely"].tolist() == [100, 100] and not arrays["within"].any()


def test_strata_within_a_site_leave_it_as_one_sum():
    _, request, _, point = opened(strata='"ward"', clusters="row")
    arrays = request("sum_clusters", **point, shared=hashes(), spanning=hashes())
    assert arrays["lonely"].tolist() == [10, 0] and arrays["sums"].shape == (0, 2)
    assert arrays["within"].shape == (2, 2)


def test_labels_leave_as_keyed_hashes_of_each_partition_s_own_key():
    _, _, one, _ = opened(clusters="row")
    _, _, two, _ = opened(clusters="row")
    assert one["clusters"].dtype == np.int64 and not np.isin(one["clusters"], two["clusters"]).any()


def test_the_ledger_shows_what_left():
    partition = partition_of()
    result = fit(
        partition, "z ~ x", options={"cov_type": "cluster", "cov_kwds": {"groups": "ward"}}, labels=["ward"]
    )
    kinds = {entry.kind for site in SITES for entry in partition.sites[site].ledger.entries}
    assert kinds == {"schema", "aggregate", "control", "presence"}
    assert result.ledger.rounds > 0


def test_owners_may_refuse_hashes_of_labels():
    partition = partition_of(refused_kinds=frozenset({"presence"}))
    assert fit(partition, "z ~ x").converged
    with pytest.raises(FedstatError, match="does not release 'presence'"):
        fit(
            partition,
            "z ~ x",
            options={"cov_type": "cluster", "cov_kwds": {"groups": "ward"}},
            labels=["ward"],
        )
