"""Contracts on the fits of all families: releases, sites, units, names, keys, missing cells, weights."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pandas as pd
import polars
import pytest
from contracts.families import ALLOW, SITES, result
from contracts.over_families import estimates, numbers, over_families, settings_of
from numpy.testing import assert_allclose
from seeded_secrets import SECRETS

import fedstat as fs
from fedstat.errors import ConvergenceWarning, FedstatError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.summary import critical_notes

pytestmark = pytest.mark.filterwarnings("ignore")
KEY = ["sender", "receiver", "step", "array", "kind", "what", "masked", "shape", "entities"]


def keyed(table):
    return {tuple(row): 1 for row in table[KEY].itertuples(index=False, name=None)}


@over_families("explained")
def test_explain_lists_what_the_ledger_has(family):
    """The number of rounds of an iteration depends on the data; explain() gives a range."""
    model = family.make(family.partition(), family.x)
    explanation = model.explain(**family.arguments)
    fit, earlier = family.base(), model._agreement  # any model of this partition agrees on the same
    ledger = Ledger(fit.ledger.at)
    ledger.enter(fit.ledger.entries[len(earlier.entries) :])
    announced, released = keyed(explanation.tidy()), keyed(ledger.releases())
    if "groups" in settings_of(family):  # a dry run does not know the number of clusters
        announced, released = ({(*key[:-1], 0): n for key, n in one.items()} for one in (announced, released))
    for key in [key for key in released if key[3] in family.shorter]:
        (most,) = (one for one in announced if (*one[:7], one[8]) == (*key[:7], key[8]))
        assert len(key[7]) == len(most[7]) and all(a <= b for a, b in zip(key[7], most[7], strict=True))
        released[most] = released.pop(key)
    assert set(released) <= set(announced), set(released) - set(announced)
    assert set(announced) - set(released) <= {one for one in announced if one[2] == "shorten"}
    low, _, most = np.sum([counts for _, counts in explanation.rounds], axis=0)
    assert low <= fit.ledger.rounds - earlier.rounds <= most


@over_families("repeated")
def test_the_same_fit_twice_is_equal_to_the_last_bit(family):
    SECRETS.seed(family.name)
    pd.testing.assert_frame_equal(numbers(family.run()), numbers(family.base()), check_exact=True)


@over_families("order of sites")
def test_the_order_of_sites_does_not_matter(family):
    table = family.table()
    if family.layout == "rows":
        frames = dict(list(table.groupby("site")))
        turned = {name: frames[name].drop(columns="site") for name in reversed(frames)}
        partition = fs.ClientPartition.from_frames(turned, layout="horizontal", site_column="site")
    else:
        whole = family.partition()
        frames = {name: table[["id", *whole.columns[name]]] for name in reversed(list(whole.sites))}
        partition = fs.ClientPartition.from_frames(frames, on="id")
    a, b = family.base(), family.run(partition)
    assert_allclose(sorted(estimates(b)), sorted(estimates(a)), rtol=1e-5, atol=1e-7)


@over_families("chunks")
def test_a_file_that_is_read_in_parts_is_its_table(family, tmp_path):
    table, whole = family.table(), family.partition()
    if family.layout == "rows":
        layout, frames = {"layout": "horizontal", "site_column": "site"}, dict(list(table.groupby("site")))
    else:
        layout, frames = {"on": "id"}, {name: table[["id", *own]] for name, own in whole.columns.items()}
    files = {name: tmp_path / f"{name}.parquet" for name in whole.sites}
    for name, file in files.items():  # a part ends where a group of rows does
        frames[name].drop(columns="site", errors="ignore").to_parquet(file, index=False, row_group_size=37)
    parts = fs.ClientPartition.from_files(files, **layout, policy=next(iter(whole.sites.values())).policy)
    assert_allclose(estimates(family.run(parts)), estimates(family.base()), rtol=1e-7, atol=1e-9)


@over_families("number of sites")
def test_the_number_of_sites_does_not_matter(family):
    table = family.table()
    two = table.assign(site=np.where(table["site"].isin(SITES[:2]), "first", "second"))
    # The default policy merges classes until each site has enough rows in them, which depends on the sites.
    a, b = (family.run(family.partition(t, policy=ALLOW), **family.pooled) for t in (table, two))
    assert_allclose(estimates(b), estimates(a), rtol=1e-5, atol=1e-7)


@over_families("cut off")
def test_a_fit_that_is_cut_off_says_so(family):
    assert family.cut, "no argument that cuts the fit off: say why in the registry"
    if isinstance(family.cut, str):
        fit = result(family.cut)
    else:
        with pytest.warns(ConvergenceWarning):
            fit = family.run(**family.cut)
    assert not fit.converged
    assert "not_converged" in {note.kind for note in critical_notes(fit)}
    assert fit.summary().as_text().lstrip().startswith("*** NOT CONVERGED")


@pytest.mark.parametrize("factor", [1e6, 1e-6])
@over_families("scaled")
def test_units_of_a_covariate(family, factor):
    table = family.table()
    scaled = table.assign(**{family.x: table[family.x] * factor})
    a, b = family.base(), family.run(family.partition(scaled))
    here = [name for name in a.params.index if family.x in name]
    assert here
    assert_allclose(b.params[here] * factor, a.params[here], rtol=1e-5)
    if a.estimate.cov is not None:
        assert_allclose(b.bse[here] * factor, a.bse[here], rtol=1e-5)
        assert_allclose(b.tvalues, a.tvalues, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["class", "my column"])
@over_families("names")
def test_names_of_columns(family, name):
    table = family.table().rename(columns={family.x: name})
    written = f"`{name}`" if " " in name and family.written else name
    a = family.base()
    SECRETS.seed(family.name)
    b = family.run(family.partition(table), written)
    if family.noisy:  # the noise depends on names
        assert estimates(b).shape == estimates(a).shape
    else:
        assert_allclose(estimates(b), estimates(a), rtol=1e-7, atol=1e-9)


KEYS = {
    "text": lambda number: f"person {number:04d}",
    "date": lambda number: pd.Timestamp("2020-01-01") + pd.Timedelta(days=int(number)),
}


@pytest.mark.parametrize("kind", KEYS)
@over_families("keys")
def test_kinds_of_keys(family, kind):
    table, key = family.table(), "person" if family.layout == "rows" else "id"
    changed = table.assign(**{key: table[key].map(KEYS[kind])})
    a = family.base()
    SECRETS.seed(family.name)
    b = family.run(family.partition(changed))
    assert_allclose(estimates(b), estimates(a), rtol=1e-6, atol=1e-8)


def roles(family):
    """Columns of the small analysis by role, with the settings that use them."""
    yield "covariate", family.x, {}
    if family.response in family.table():
        yield "response", family.response, {}
    for role, setting in family.roles.items():
        yield role, next(iter(setting.values())), setting


def without_cells(table, holes):
    """Return a table without the cells in some rows of some columns."""
    for column, gone in holes.items():
        cells = table[column].astype(object if table[column].dtype == object else float)
        table = table.assign(**{column: cells.where(~gone)})
    return table


@over_families("missing")
def test_missing_cells_in_each_role(family):
    """The fit is that of the complete rows; where rows are not left out, an error names the column."""
    table = family.table()
    policy = {} if family.noisy else {"policy": ALLOW}  # without limits on rows that differ

    def analysis(table, setting):
        made = family.make(family.partition(table, **policy), **{"x": family.x, **setting})
        return made if family.arguments is None else made.fit(**family.arguments)

    def compare(found, holes, setting):
        if family.layout == "rows":
            whole = analysis(table[~np.any(list(holes.values()), axis=0)], setting)
            assert_allclose(estimates(found), estimates(whole), rtol=1e-6, atol=1e-8, err_msg=str(setting))

    # Each role lacks cells in rows of its own, so one fit has them all.
    every = {
        column: np.arange(len(table)) % 29 == 3 + 2 * k for k, (_, column, _) in enumerate(roles(family))
    }
    settings = {name: value for _, _, setting in roles(family) for name, value in setting.items()}
    try:
        found = analysis(without_cells(table, every), settings)
    except FedstatError:
        for role, column, setting in roles(family):
            holes = {column: every[column]}
            try:
                found = analysis(without_cells(table, holes), setting)
            except FedstatError as error:
                assert column in str(error), (role, str(error))
                assert any(
                    word in str(error) for word in ("missing='drop'", "drop", "set", "leave", "complete")
                ), error
            else:
                compare(found, holes, setting)
    else:
        compare(found, every, settings)


@over_families("strict")
def test_the_strict_policy_allows_or_names_a_remedy(family):
    try:
        found = family.run(family.partition(policy="strict"))
    except PolicyError as error:
        assert error.rule, error
        assert error.rule != "order", error  # a fit never asks out of order
        # How to ask for less, or what the owner can allow.
        assert re.search(
            r"[Rr]equest|[Uu]se |[Ff]it |[Ss]et |have the owner|[Tt]he owner can|leave", str(error)
        ), error
    else:
        assert len(numbers(found))


@over_families("polars")
def test_tables_of_polars(family):
    table = family.table()
    a = family.base()
    SECRETS.seed(family.name)
    b = family.run(family.partition(polars.from_pandas(table)))
    assert_allclose(estimates(b), estimates(a), rtol=1e-9, atol=1e-12)


@over_families("few clusters")
def test_few_clusters(family):
    """Six clusters: Student's t with few degrees of freedom, or a warning."""
    table = family.table()
    table = table.assign(ward=table["site"] + np.where(table.index % 2 == 0, "1", "2"))
    table = table[table["site"].isin(SITES[:3])]
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    if "groups" in settings_of(family):
        fit = family.make(partition, family.x, groups="ward").fit()
    elif family.name in ("FederatedCox", "FederatedAFT"):
        fit = family.make(partition, f"{family.x} + cluster(ward)").fit()
    else:
        fit = family.make(partition, family.x, labels=["ward"]).fit(
            cov_type="cluster", cov_kwds={"groups": "ward"}
        )
    warned = fit.diagnostics().query("severity != 'info'")["note"].str.contains("cluster|group").any()
    assert (fit.use_t and fit.df.max() < 12) or warned


@over_families("subset")
def test_a_subset_is_an_analysis_of_its_rows(family):
    assert "subset" in settings_of(family)
    table, small = family.table(), family.arguments
    inside = table[(table["z"] >= 0.0) & (table["visit"] != 3)]
    here = family.make(family.partition(inside, policy=ALLOW), family.x)
    found = family.make(family.partition(table, policy=ALLOW), family.x, subset="z >= 0 & visit != 3")
    if small is not None:
        here, found = here.fit(**small), found.fit(**small)
        assert "z >= 0 & visit != 3" in found.summary().as_text() and found.nobs == len(inside) < len(table)
    assert_allclose(estimates(found), estimates(here), rtol=1e-10, atol=1e-12)


@over_families("splines")
def test_a_spline_with_df_is_the_one_with_its_knots(family):
    """So that every later step takes the knots as those of the formula; tests of the knots are elsewhere."""
    found = family.run(x=f"cr({family.x}, df=3, constraints='center')")
    ((written, asked),) = found.basis.agreement.question.placed.items()
    assert asked == f"cr({family.x}, df=3, constraints='center')" and "df" not in written
    assert_allclose(estimates(found), estimates(family.run(x=written)), rtol=1e-9, atol=1e-12)
    assert found.predict(family.table().head()).notna().all(axis=None)
    knots = found.diagnostics().query("kind == 'knots'")["note"]
    assert len(knots) == 1 and "rounded quantiles" in knots.iloc[0]


@over_families("weights")
def test_a_frequency_weight_is_a_number_of_rows(family):
    table = family.table()
    repeated = table.loc[table.index.repeat(table["f"])].reset_index(drop=True)
    if family.layout == "columns":
        repeated["id"] = repeated.index
    partitions = [family.partition(t, policy=ALLOW) for t in (table, repeated)]
    assert "freq_weights" in settings_of(family)
    weighted = family.make(partitions[0], family.x, freq_weights="f").fit(**family.arguments)
    right = family.make(partitions[1], family.x).fit(**family.arguments)
    assert_allclose(estimates(weighted), estimates(right), rtol=1e-6, atol=1e-8)
    assert_allclose(weighted.llf, right.llf, rtol=1e-9)


def test_families_with_frequency_weights_have_the_contract():
    from contracts.families import FAMILIES

    for family in FAMILIES.values():
        has = "freq_weights" in settings_of(family)
        assert has or "weights" in family.gaps, family


def test_results_of_the_registry_are_made_once():
    assert result("ols") is result("ols")
    assert inspect.signature(result).parameters.keys() == {"name"}
