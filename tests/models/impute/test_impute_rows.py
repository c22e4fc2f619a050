"""Chained equations over sites: the same draws as from the pooled rows, and cells that stay at the sites."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DesignError, MessageError, ModelError, PolicyError
from fedstat.federation.design.imputed_cells import MOST_IMPUTATIONS
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.models.impute.steps import _generator

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ("A", "B", "C")
FORMULA = "y ~ x + w + z"


def draw_table(n=600, seed=1, share=0.2):
    rng = np.random.default_rng(seed)
    t = pd.DataFrame({"site": rng.choice(SITES, n), "z": rng.normal(size=n)})
    t["x"] = 0.5 * t["z"] + rng.normal(size=n)
    t["w"] = 0.4 * t["x"] + rng.normal(size=n)
    t["b"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-t["x"]))).astype(float)
    t["g"] = np.array(["p", "q", "r"])[(rng.random(n)[:, None] > [0.3, 0.7]).sum(axis=1)]
    t["y"] = 1.0 + t["x"] - t["z"] + 0.5 * t["w"] + 0.5 * t["b"] + 0.7 * (t["g"] == "q") + rng.normal(size=n)
    for name, missing in (("x", share), ("w", 0.9 * share), ("b", 0.7 * share), ("g", 0.8 * share)):
        t.loc[rng.random(n) < missing, name] = None
    return t.sort_values("site", kind="stable").reset_index(drop=True)


TABLE = draw_table()


def rows(table=TABLE, **given):
    return fs.ClientPartition.from_frame(table, by="site", **given)


def cells_of(partition, imputations):
    """Return the drawn cells of every site."""
    token = imputations._course.token
    return {name: site._data.imputations[token] for name, site in partition.sites.items()}


def filled(table, partition, imputations, chain):
    """Return the table of a chain, as if it were in one place."""
    out = table.copy()
    for name, cells in cells_of(partition, imputations).items():
        own = out.index[out["site"] == name]
        for column, places in cells.rows.items():
            out.loc[own[places], column] = cells.values[column][chain]
    return out


def test_draws_are_those_of_chained_equations_of_the_pooled_rows():
    """Numbers: statsmodels on the pooled rows, with the random numbers of coordinator and sites."""
    partition, m, iterations, seed = rows(), 2, 3, 5
    imputations = fs.impute(partition, FORMULA, m=m, iterations=iterations, seed=seed)
    drawn = int(np.random.default_rng(seed).integers(2**62))
    rng = np.random.default_rng([drawn, 1])
    data = {name: site._data for name, site in partition.sites.items()}
    index = {name: TABLE.index[TABLE["site"] == name] for name in SITES}
    tables = [TABLE[["site", "y", "x", "w", "z"]].copy() for _ in range(m)]
    lacking = {c: TABLE[c].isna() for c in ("x", "w")}
    for column, own in lacking.items():
        for name in SITES:
            start = _generator(data[name], drawn, column, 0)
            seen = TABLE.loc[index[name], column][~own[index[name]]].to_numpy()
            for table in tables:
                at = index[name][own[index[name]]]
                table.loc[at, column] = start.choice(seen, len(at))
    draws = 0
    for _ in range(iterations):
        for column in sorted(lacking, key=lambda c: lacking[c].sum()):
            others = [one for one in ("y", "x", "w", "z") if one != column]
            draws += 1
            new = []
            for chain, table in enumerate(tables):
                fit = smf.ols(
                    f"{column} ~ {' + '.join(others)}", table[~lacking[column]].astype({column: float})
                ).fit()
                spread = np.sqrt(fit.df_resid / rng.chisquare(fit.df_resid))
                root = np.linalg.cholesky(fit.cov_params().to_numpy())
                beta = fit.params.to_numpy() + spread * root @ rng.standard_normal(len(fit.params))
                for name in SITES:
                    at = index[name][lacking[column][index[name]]]
                    noise = _generator(data[name], drawn, column, draws).spawn(chain + 1)[chain]
                    X = sm.add_constant(table.loc[at, others].astype(float)).to_numpy()
                    sigma = spread * np.sqrt(fit.scale)
                    new.append((table, at, column, X @ beta + sigma * noise.standard_normal(len(at))))
            for table, at, name, values in new:
                table.loc[at, name] = values
    for chain, table in enumerate(tables):
        found = filled(TABLE, partition, imputations, chain)
        for column in ("x", "w"):
            assert_allclose(found[column].astype(float), table[column].astype(float), rtol=1e-7, atol=1e-9)


def test_a_fit_to_a_table_is_that_of_its_rows():
    partition = rows()
    imputations = fs.impute(partition, "y ~ x + z + b + g", m=2, iterations=2, seed=1)
    formula = "y ~ x + z + b + g"
    for chain in range(2):
        table = filled(TABLE, partition, imputations, chain).astype({"x": float, "b": float})
        found = fs.FederatedOLS.from_formula(formula, imputations.table(chain)).fit()
        expected = smf.ols(formula, table).fit().params
        assert_allclose(found.params, expected[found.params.index], rtol=1e-9)
        assert found.nobs == len(TABLE)
        binary = fs.GLORE.from_formula("b ~ x + z", imputations.table(chain)).fit()
        assert_allclose(binary.params, smf.logit("b ~ x + z", table).fit(disp=0).params, rtol=1e-6)
        assert set(table["b"]) == {0.0, 1.0} and set(table["g"]) == {"p", "q", "r"}
    pooled = imputations.fit(lambda p: fs.FederatedOLS.from_formula(formula, p).fit())
    by_hand = [fs.FederatedOLS.from_formula(formula, imputations.table(j)).fit() for j in range(2)]
    assert_allclose(pooled.params, fs.pool(by_hand).params)
    assert fs.FederatedOLS.from_formula(formula, partition).fit().nobs < len(TABLE)
    assert (
        fs.FederatedGLM.from_formula(formula, imputations.table(0)).fit().predict(TABLE.head()).notna().any()
    )


def test_first_models_are_those_of_the_pooled_rows():
    """Coefficients before any draw: logistic and multinomial, with cells filled by observed values."""
    partition = rows()
    columns = {"b": smf.logit, "g": None}
    for name in columns:
        imputations = fs.impute(partition, f"{name} ~ z + y", m=2, iterations=1, seed=3)
        seen = TABLE[TABLE[name].notna()]
        trace = imputations.trace.query("chain == 0")["estimate"].to_numpy()
        if name == "b":
            expected = smf.logit("b ~ z + y", seen.astype({"b": float})).fit(disp=0).params.to_numpy()
        else:
            code = seen["g"].map({"p": 0, "q": 1, "r": 2}).astype(int)
            fit = sm.MNLogit(code, sm.add_constant(seen[["z", "y"]])).fit(disp=0)
            expected = fit.params.to_numpy().T.ravel()
        assert_allclose(trace, expected, rtol=1e-5, atol=1e-7)


def test_matching_takes_values_of_the_same_site():
    partition = rows()
    imputations = fs.impute(partition, FORMULA, m=2, iterations=2, seed=1, numbers="matching")
    for name, cells in cells_of(partition, imputations).items():
        held = set(TABLE.loc[TABLE["site"] == name, "x"].dropna())
        assert all(set(values) <= held for values in cells.values["x"])
    assert "predictive mean matching" in " ".join(imputations.summary().as_text().split())


def test_few_missing_cells_are_not_drawn():
    """Two tables would differ in these cells alone."""
    table = TABLE.copy()
    at_a = table.index[(table["site"] == "A") & table["x"].isna()]
    table.loc[at_a[2:], "x"] = 0.1
    partition = rows(table)
    imputations = fs.impute(partition, FORMULA, m=2, iterations=1, seed=1)
    cells = cells_of(partition, imputations)
    assert "x" not in cells["A"].rows and len(cells["B"].rows["x"]) > 5
    notes = imputations.diagnostics().set_index("kind")["note"]
    assert "few of its rows lack them: x" in notes["few_cells"]
    found = fs.FederatedOLS.from_formula("y ~ x + z", imputations.table(0)).fit()
    assert found.nobs == len(table) - 2


def test_a_site_without_values_draws_by_the_model_of_the_others():
    table = draw_table(1500, seed=4)
    table.loc[table["site"] == "A", ["x", "g"]] = None
    partition = rows(table)
    imputations = fs.impute(partition, "y ~ x + z + g", m=4, iterations=4, seed=2)
    at_a = (table["site"] == "A").to_numpy()
    assert len(cells_of(partition, imputations)["A"].rows["x"]) == at_a.sum()
    # The first model has no column that has no cells at A yet; the second one has.
    terms = imputations.trace.query("chain == 0 and column == 'g'").groupby("iteration")["term"]
    assert not any("x" in term for term in terms.get_group(0)) and any(
        "x" in term for term in terms.get_group(1)
    )
    one = fs.impute(rows(table), "y ~ x + z", m=2, iterations=1, seed=2).trace.query("chain == 0")
    seen = table[~at_a].dropna(subset=["x"])
    expected = smf.ols("x ~ y + z", seen).fit().params
    assert_allclose(one.set_index("term")["estimate"], expected[one["term"]], rtol=1e-9)
    whole = filled(table, partition, imputations, 3)
    assert whole.loc[at_a, ["x", "g"]].notna().all(axis=None)
    drawn, others = (smf.ols("x ~ y + z + C(g)", whole[part]).fit() for part in (at_a, ~at_a))
    assert (np.abs(drawn.params - others.params) < 4.0 * np.hypot(drawn.bse, others.bse)).all()
    pooled = imputations.fit(lambda p: fs.FederatedOLS.from_formula("y ~ x + z + C(g)", p).fit())
    assert imputations.nobs == len(table)
    assert (np.abs(pooled.params[["x", "z"]] - [1.2, -1.0]) < 4.0 * pooled.bse[["x", "z"]]).all()


def test_a_dry_run_counts_the_fits_and_asks_for_no_row():
    partition = rows()
    plan = fs.explain_impute(partition, "y ~ x + b + g", m=3, iterations=2)
    assert plan.passes and plan.call == "impute('y ~ x + b + g', m=3, iterations=2)"
    sent = plan.tidy().query("sender == 'A' and step == 'judge' and array == 'fit'")
    assert sent["messages"].sum() == 3 * 6  # three columns of numbers; the categories have other steps
    assert not any(site._data.imputations for site in partition.sites.values())
    # The models of an imputation release the same arrays.
    done = fs.impute(partition, "y ~ x + b + g", m=2, iterations=1, seed=1).ledger.to_frame()
    own = done[(done["sender"] == "A") & ~done["step"].isin(["begin_imputation", "draw_cells"])]
    assert set(own["step"]) - set(plan.tidy()["step"]) <= {"survey_rows", "state_ledger"}
    strict = rows(policy=fs.Policy(masked_only=True, two_sites="refuse"))
    assert fs.explain_impute(strict, "y ~ x", m=2).passes
    with pytest.raises(ModelError, match="sites that hold different rows"):
        fs.explain_impute(
            fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id"), "NPGR ~ CI"
        )


def test_a_column_that_no_site_has_is_refused():
    with pytest.raises(DesignError, match=r"column 'x'.*no site has a value"):
        fs.impute(rows(TABLE.assign(x=np.nan)), FORMULA, m=2)


def test_sites_sign_the_steps_of_an_imputation():
    imputations = fs.impute(rows(), FORMULA, m=2, iterations=1, seed=1)
    receipt = imputations.receipt()
    assert receipt.sites().index.tolist() == list(SITES) and not receipt.alarm
    steps = set(receipt.to_frame()["step"])
    assert {"begin_imputation", "draw_cells"} <= steps


def test_the_same_seed_gives_the_same_tables_of_a_partition():
    partition = rows()
    one, two, other = (fs.impute(partition, FORMULA, m=2, iterations=2, seed=seed) for seed in (1, 1, 2))
    assert one.trace.equals(two.trace) and not one.trace.equals(other.trace)
    for chain in range(2):
        a, b = (filled(TABLE, partition, found, chain) for found in (one, two))
        assert a.equals(b) and not a.equals(filled(TABLE, partition, other, chain))


def test_strict_sites_impute_numbers_and_refuse_levels():
    published = {
        **{name: {"kind": "number", "range": [-99, 99]} for name in "yxwz"},
        "b": {"kind": "number", "range": [0, 1], "levels": [0, 1]},
    }
    given = {"policy": fs.Policy.strict(), "published": dict.fromkeys(SITES, published)}
    imputations = fs.impute(rows(**given), "y ~ x + z", m=3, iterations=2, seed=1)
    pooled = imputations.fit(lambda p: fs.FederatedOLS.from_formula("y ~ x + z", p).fit())
    assert pooled.params.size == 3
    with pytest.raises(PolicyError, match="Imputed levels of 'b' may differ in few rows"):
        fs.impute(rows(**given), "y ~ x + z + b", m=5, iterations=5, seed=1)


def test_what_cannot_be_imputed_is_said():
    with pytest.raises(ModelError, match="the owner of 'A' approves every analysis"):
        fs.impute(rows(policy=fs.Policy(approval="owner")), FORMULA, m=2)
    with pytest.raises(ModelError, match="no site has 5 rows or more that lack one of y, z"):
        fs.impute(rows(), "y ~ z", m=2)
    with pytest.raises(ModelError, match="iterations"):
        fs.impute(rows(), FORMULA, m=2, iterations=0)
    with pytest.raises(ModelError, match="numbers"):
        fs.impute(rows(), FORMULA, m=2, numbers="pmm")
    mixed = TABLE.assign(x=TABLE["x"].astype(object).where(TABLE["site"] != "A", "low"))
    with pytest.raises(DesignError, match="numbers at one site and categories at another"):
        fs.impute(rows(mixed), FORMULA, m=2)
    imputations = fs.impute(rows(), "y ~ x", m=2, iterations=1, seed=1)
    with pytest.raises(ModelError, match="from 0 to 1"):
        imputations.table(2)


def test_a_table_is_that_of_the_latest_draw():
    """Tokens are random; cells of an earlier draw, and of forgotten imputations, are not there."""
    partition = rows()
    first = fs.impute(partition, "y ~ x", m=2, iterations=1, seed=1)
    for _ in range(MOST_IMPUTATIONS):
        fs.impute(partition, "y ~ x", m=2, iterations=1, seed=1)
    with pytest.raises(MessageError, match="impute again"):
        fs.FederatedOLS.from_formula("y ~ x", first.table(0))


def test_only_counts_leave_a_site():
    partition = rows()
    imputations = fs.impute(partition, FORMULA, m=2, iterations=1, seed=1)
    sent = imputations.ledger.to_frame().query("receiver == 'coordinator'")
    of_draws = sent[sent["step"].isin(["begin_imputation", "draw_cells"])]
    assert set(of_draws["array"]) == {"text", "drawn"}
    site = partition.sites["A"]
    request = {"token": "0" * 32, "columns": ["x"], "chains": 2, "seed": 1}
    wrong = [{"chains": 1}, {"chains": 10**6}, {"token": "0"}, {"columns": ["none"]}]
    for change in wrong:
        text = json.dumps({**request, **change})
        with pytest.raises(fs.errors.FedstatError):
            unpack_reply(
                site.answer(pack_request(Request("A", "impute_rows", "begin_imputation", {}, "s", text)))
            )


@pytest.mark.parametrize(
    "change",
    [
        {"column": "y"},
        {"column": "z"},
        {"draws": 9},
        {"token": "f" * 32},
        {"question": ("y ~ w", "y ~ np.log(w + 9)")},
        {"beta": np.zeros((1, 4))},
        {"beta": np.zeros((2, 3)), "estimate": np.zeros((2, 3))},
    ],
)
def test_forged_draws_are_refused(change):
    """Functions of columns are no model of a column, nor are those of others."""
    partition = rows()
    imputations = fs.impute(partition, FORMULA, m=2, iterations=1, seed=1)
    site, course = partition.sites["A"], imputations._course
    fit = fs.FederatedOLS.from_formula("x ~ y + w + z", course.table(0, "x")).fit()
    agreed = fit.basis.agreement
    given = {
        "token": course.token,
        "column": "x",
        "draws": course.draws,
        "seed": 1,
        "question": replace(agreed.question, imputed=None).to_json(),
        "spec": agreed.spec.to_json(),
        "kind": "number",
        "matched": False,
    }
    arrays = {"beta": np.zeros((2, 4)), "estimate": np.zeros((2, 4)), "sigma": np.ones(2)}
    change = dict(change)
    if "question" in change:
        other = fs.FederatedOLS.from_formula("x ~ np.log(w + 9) + y + z", course.table(0, "x")).fit()
        change["question"] = replace(other.basis.agreement.question, imputed=None).to_json()
        change["spec"] = other.basis.agreement.spec.to_json()
    forged = arrays | {name: change.pop(name) for name in ("beta", "estimate") if name in change}

    def send(content, numbers):
        text = json.dumps(content)
        request = Request("A", "impute_rows", "draw_cells", numbers, course.session, text)
        return unpack_reply(site.answer(pack_request(request)))

    with pytest.raises(fs.errors.FedstatError):
        send({**given, **change}, forged)
    assert send(given, arrays).arrays["drawn"] == course.draws + 1


def test_chains_that_do_not_mix_are_reported():
    imputations = fs.impute(rows(), FORMULA, m=3, iterations=10, seed=1)
    assert imputations.tidy()["rhat"].between(0.85, 1.6).all()
    assert repr(imputations).startswith("<Imputations: 3 tables of 600")
    apart = imputations.trace["estimate"] + 10.0 * imputations.trace["chain"]
    imputations.trace = imputations.trace.assign(estimate=apart)
    assert "The chains differ" in imputations.summary().as_text()
