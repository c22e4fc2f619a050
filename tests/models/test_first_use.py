"""First steps of a user: results in a pickle, next to those of statsmodels, arguments of another kind."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import polars
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from statsmodels.iolib.summary2 import summary_col

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

pytestmark = pytest.mark.filterwarnings("ignore")
COPIES = {"pickle": lambda one: pickle.loads(pickle.dumps(one)), "deepcopy": copy.deepcopy}
FAMILIES = {
    "GLORE": {},
    "FedAvg": {"rounds": 2, "seed": 1},
    "VFEMRegression": {"exchange": "moments"},
    "VerticalGLM": {"lam": 0.0},
}


def draw(n=300, seed=4):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(size=n), "g": rng.integers(0, 9, n)})
    return table.assign(y=(table["x"] + table["z"] + rng.logistic(size=n) > 0).astype(float))


def by_rows(**given):
    table = draw()
    return fs.ClientPartition.from_frame(table.assign(site=["A", "B", "C"] * 100), by="site", **given)


def by_columns(**given):
    table = draw().assign(k=range(300))
    held = {"A": table[["k", "y", "x"]], "B": table[["k", "z", "g"]]}
    return fs.ClientPartition.from_frames(held, on="k", **given)


def fitted(family, formula="y ~ x + z"):
    partition = by_rows() if family in ("GLORE", "FedAvg") else by_columns()
    return getattr(fs, family).from_formula(formula, partition).fit(**FAMILIES[family])


@pytest.fixture(scope="module")
def results():
    return {family: fitted(family) for family in FAMILIES}


# -- pickles and copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_copied_whole(results, family, copied):
    result = results[family]
    again = COPIES[copied](result)
    assert type(again) is type(result) and again is not result
    pd.testing.assert_series_equal(again.params, result.params, check_exact=True)
    assert again.summary().as_text() == result.summary().as_text()
    assert again.ledger.bytes == result.ledger.bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickle_of_results_is_their_file_and_no_row(results, family, tmp_path):
    results[family].save(tmp_path / "file")
    data = pickle.dumps(results[family])
    assert (tmp_path / "file").read_bytes() in data
    assert len(data) < len((tmp_path / "file").read_bytes()) + 200


def test_a_deep_copy_goes_on_where_the_sites_are(results):
    """A copy in this process reaches the same sites; one from a pickle has none."""
    result = results["GLORE"]
    assert copy.deepcopy(result).evaluate().auc == result.evaluate().auc
    assert copy.copy(result).model.partition is copy.deepcopy(result).model.partition
    with pytest.raises(NotAvailableError, match="read from a file"):
        COPIES["pickle"](result).evaluate()


def test_tables_of_results_are_pickled(results):
    result = results["GLORE"]
    for table in (result.summary(), fs.compare({"ours": result}), result.evaluate()):
        assert repr(COPIES["pickle"](table)) == repr(table)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("policy", ["open", "strict"])
@pytest.mark.parametrize("make", [by_rows, by_columns])
def test_partitions_are_copied_whole(make, policy, copied):
    partition = make(policy=policy, shared_seed=2**100 + 1)
    again = COPIES[copied](partition)
    assert repr(again) == repr(partition) and again.describe().n_entities == 300
    assert {s: one.policy for s, one in again.sites.items()} == {
        s: one.policy for s, one in partition.sites.items()
    }
    pd.testing.assert_frame_equal(again.published(), partition.published())
    # keys and ledgers are their own: no site is served in two places
    assert not set(again.fingerprints.values()) & set(partition.fingerprints.values())
    with pytest.raises(ValueError, match="read-only"):
        again.rows[next(iter(again.sites))][0] = 7


def test_a_copied_partition_gives_the_same_fit():
    partition = by_rows(shared_seed=2**100 + 1)
    request = {"cov_type": "cluster", "cov_kwds": {"groups": "g"}, "masked": False}
    ours, theirs = (
        fs.GLORE.from_formula("y ~ x", one, labels=["g"]).fit(**request)
        for one in (partition, COPIES["pickle"](partition))
    )
    pd.testing.assert_series_equal(ours.bse, theirs.bse, check_exact=True)


def test_a_partition_of_files_and_of_curves_is_copied(tmp_path):
    table = draw()
    for name, part in (("A", table[:200]), ("B", table[200:])):
        part.to_parquet(tmp_path / f"{name}.parquet")
    paths = {name: tmp_path / f"{name}.parquet" for name in "AB"}
    partition = fs.ClientPartition.from_files(paths, layout="horizontal")
    assert repr(COPIES["pickle"](partition)) == repr(partition)
    curves = pd.DataFrame(np.random.default_rng(1).normal(size=(60, 5))).add_prefix("c")
    held = fs.ClientPartition.from_frame(
        curves.assign(site=["A", "B"] * 30), by="site", curves={"c": fs.Curve("c*", domain=(0, 1))}
    )
    again = COPIES["deepcopy"](held)
    assert repr(again) == repr(held) and list(again.curves["A"]) == ["c"]


def test_sites_and_models_say_why_they_are_not_copied():
    partition = by_rows()
    for one in (partition.sites["A"], fs.GLORE.from_formula("y ~ x", partition)):
        for made in COPIES.values():
            with pytest.raises(NotAvailableError, match=r"A: a site cannot be pickled .*partitions can"):
                made(one)


# -- compared with statsmodels -----------------------------------------------------------------------


def pooled():
    return smf.glm("y ~ x + z", draw(), family=sm.families.Binomial()).fit()


@pytest.mark.parametrize("family", ["GLORE", "VFEMRegression", "VerticalGLM"])
@pytest.mark.parametrize("copied", [lambda one: one, COPIES["pickle"]])
def test_summary_col_of_statsmodels_takes_results(results, family, copied):
    result = copied(results[family])
    table = summary_col([pooled(), result], model_names=["pooled", "ours"], include_r2=False)
    ours = dict(zip(table.tables[0].index[::2], table.tables[0]["ours"][::2], strict=True))
    assert ours == {name: f"{value:.4f}" for name, value in result.params.items()}
    errors = list(table.tables[0]["ours"][1::2])
    assert errors == [f"({value:.4f})" for value in result.bse]
    if family == "GLORE":
        assert list(table.tables[0]["pooled"]) == list(table.tables[0]["ours"])
    assert list(summary_col([result]).tables[0].columns) == ["y"]


def test_summary_col_takes_fits_of_a_selection_and_combined_ones(results):
    refit = results["VerticalGLM"].refit
    both = fs.combine([smf.ols("y ~ x + z", draw(seed=seed)).fit() for seed in (4, 5)])
    table = summary_col([refit, both], model_names=["refit", "combined"]).tables[0]
    assert table.loc["x", "refit"] == f"{refit.params['x']:.4f}"
    assert table.loc["x", "combined"] == f"{both.params['x']:.4f}"
    assert both.model.endog_names == "y"


def test_summary_col_says_what_has_no_standard_error(results):
    with pytest.raises(NotAvailableError, match="federated averaging gives an estimate without"):
        summary_col([results["FedAvg"]])


def test_a_model_keeps_the_names_of_each_fit():
    model = fs.GLORE.from_formula("y ~ x + z", by_rows())
    assert model.fit().model.exog_names == ["Intercept", "x", "z"]
    assert isinstance(model.fit().model, fs.GLORE) and not hasattr(model, "exog_names")


# -- arguments of another kind -----------------------------------------------------------------------

ALL = ["GLORE", "FederatedGLM", "FedAvg", "VFEMRegression", "VerticalGLM"]
OWN_TABLES = r"The values must be a column of the sites' tables"


def model_of(family, **given):
    partition = by_columns() if family in ("VFEMRegression", "VerticalGLM") else by_rows()
    return getattr(fs, family).from_formula("y ~ x + z", partition, **given)


@pytest.mark.parametrize("groups", [draw()["g"], draw()["g"].to_numpy(), ["g"]])
@pytest.mark.parametrize("cov_type, role", [("cluster", "groups"), ("survey", "clusters")])
def test_clusters_are_named_and_not_handed_over(groups, cov_type, role):
    with pytest.raises(ModelError, match=rf"name of a column as '{role}', received .*{OWN_TABLES}"):
        model_of("GLORE").fit(cov_type=cov_type, cov_kwds={role: groups})


@pytest.mark.parametrize("kwds", [draw()["g"], "g", ["g"]])
def test_cov_kwds_are_a_dict(kwds):
    with pytest.raises(ModelError, match=r"cov_kwds: expected \{'groups': 'column'\} or the like, received"):
        model_of("GLORE").fit(cov_type="cluster", cov_kwds=kwds)


def test_sites_and_labels_are_clusters_still():
    assert model_of("GLORE").fit(cov_type="cluster", cov_kwds={"groups": "site"}).bse.notna().all()
    survey = {"cov_type": "survey", "cov_kwds": {"clusters": "g", "strata": None}}
    assert model_of("GLORE", labels=["g"]).fit(**survey).bse.notna().all()
    with pytest.raises(
        ModelError, match="strata='site' is no column of every site's table that cov_type='survey' can use"
    ):
        model_of("GLORE", labels=["g"]).fit(cov_type="survey", cov_kwds={"clusters": "g", "strata": "site"})


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("weights", ["g", draw()["g"]])
def test_weights_that_a_model_has_not_are_refused_with_those_that_it_has(family, weights):
    reported = {"FedAvg": r'name of a column .*: freq_weights="column" for a row that represents several$'}
    expected = reported.get(family, r'name of a column .*: freq_weights="column" .*, or var_weights="column"')
    with pytest.raises(ModelError, match=f"^weights: .*{expected}"):
        model_of(family, weights=weights)
    with pytest.raises(ModelError, match=f"^weights: .*{expected}"):
        model_of(family).fit(weights=weights)


@pytest.mark.parametrize("family", ALL)
def test_other_unknown_arguments_are_named_with_the_nearest(family):
    with pytest.raises(ModelError, match=rf"{family} has no argument 'missin'; use 'missing'"):
        model_of(family, missin="drop")
    with pytest.raises(ModelError, match=rf"{family}.fit has no argument 'nonsense'. Its arguments are "):
        model_of(family).fit(nonsense=1)


def test_polars_frames_are_taken_or_reported(results):
    frame = polars.from_pandas(draw().assign(site=["A", "B", "C"] * 100))
    held = frame.to_pandas()
    for call in (result.predict for result in results.values()):
        for rows in (frame, frame.to_arrow(), frame.to_dict(as_series=False)):
            np.testing.assert_allclose(call(rows), call(held))
        with pytest.raises(ModelError, match=r"expected a table of rows.*received polars LazyFrame"):
            call(frame.lazy())
    partition_wanted = r"received polars DataFrame; make one with .*takes tables of pandas, polars"
    with pytest.raises(ModelError, match=partition_wanted):
        results["GLORE"].evaluate(frame)
    assert fs.ClientPartition.from_frame(frame, by="site").n_entities == 300
