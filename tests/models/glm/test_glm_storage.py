"""Results in a file: all statements come back, nothing in it runs, other files are refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled import fit_pooled, partition, table

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.message import pack, unpack

F, L = sm.families, sm.families.links
FRAME = table(seed=11)
FRAME["area"] = "of " + FRAME["site"]
HOLES = FRAME.assign(x=FRAME["x"].where(np.arange(len(FRAME)) % 50 > 0))
SPLINE = "bs(z, knots=(0.5, 1.5), lower_bound=-2, upper_bound=4)"
WARD = {"cov_type": "cluster", "cov_kwds": {"groups": "ward"}}
SITE = {"cov_type": "cluster", "cov_kwds": {"groups": "site"}}
SURVEY = {"cov_type": "survey", "cov_kwds": {"clusters": "ward", "strata": "area"}}
FITS = {
    "logit": ("binary ~ scale(x) + C(g) + C(site)", F.Binomial(), {}, {}),
    "left out": ("binary ~ x + z", F.Binomial(), {}, {}),
    "probit": (f"binary ~ {SPLINE} + g", F.Binomial(L.Probit()), {}, {"cov_type": "HC1"}),
    "counts": ("cbind(events, n - events) ~ x + C(g)", F.Binomial(), {}, {"cov_type": "HC0"}),
    "exposure": ("count ~ x + C(g)", F.Poisson(), {"exposure": "days"}, {}),
    "offset": ("gamma ~ poly(z, 2)", F.Gamma(L.Log()), {"offset": "x"}, {"scale": "dev"}),
    "wards": ("gauss ~ x + z", F.Gaussian(), {"var_weights": "v"}, WARD),
    "sites": ("gauss ~ x + z", F.Gaussian(), {}, SITE),
    "survey": ("binary ~ x + z", F.Binomial(), {"freq_weights": "w"}, SURVEY),
    "alpha": ("over ~ x + C(g)", F.NegativeBinomial(alpha=1.0), {}, {"dispersion": "ml"}),
    "tweedie": ("tweedie ~ x", F.Tweedie(L.Log(), var_power=1.5), {}, {}),
    "power": ("gamma ~ z", F.Gamma(L.Power(0.3), check_link=False), {}, {}),
    "no likelihood": ("gauss ~ x", F.Tweedie(L.Identity(), var_power=0.0), {}, {}),
    "in clear": ("binary ~ x + z", F.Binomial(), {}, {"masked": False}),
    "one round": ("binary ~ x + z", F.Binomial(), {}, {"rounds": 1}),
    "no own fits": ("binary ~ x + z", F.Binomial(), {}, {"local": False}),
    "no intercept": ("gauss ~ 0 + C(g) + x", F.Gaussian(), {}, {}),
    "intercept": ("binary ~ 1", F.Binomial(), {}, {}),
    "stopped": ("count ~ x + z", F.Poisson(), {}, {"maxiter": 1}),
    "one site": ("binary ~ x + z", F.Binomial(), {}, {}),
}
# Of the other kinds, the contract "saved" compares all that is printed.
UNLISTED = (
    *("logit", "left out", "probit", "offset", "tweedie", "power", "no likelihood"),
    *("no intercept", "intercept", "one site"),
)
FRAMES = {"left out": HOLES, "one site": FRAME.assign(site="alone")}


def fit(case="logit", frame=None):
    formula, family, roles, options = FITS[case]
    data = FRAMES.get(case, FRAME) if frame is None else frame
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fs.FederatedGLM.from_formula(
            formula, partition(data), family=family, labels=["ward", "area"], **roles
        )
        return model.fit(**options)


@pytest.fixture(scope="module")
def results():
    return {case: fit(case) for case in FITS}


@pytest.fixture(scope="module")
def result(results):
    return results["exposure"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.fed"


def round_trip(result, path):
    result.save(path)
    return fs.load(path)


def same(ours, theirs):
    """Equal to the bit, NaN included."""
    if isinstance(ours, pd.DataFrame):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    else:
        pd.testing.assert_series_equal(ours, theirs, check_exact=True)


@pytest.mark.parametrize("case", UNLISTED)
def test_every_kind_of_fit_can_be_saved(results, case, path):
    result, loaded = results[case], round_trip(results[case], str(path))
    assert type(loaded) is type(result) and not hasattr(loaded.model, "partition")
    assert repr(loaded) == repr(result)
    for rendering in ("as_text", "as_html", "as_latex"):
        assert getattr(loaded.summary(0.1), rendering)() == getattr(result.summary(0.1), rendering)()
    for what in ("params", "bse", "pvalues", "tvalues", "coef_sites", "trace", "site_estimates"):
        same(getattr(loaded, what), getattr(result, what))
    for what in ("cov_params", "conf_int", "tidy"):
        same(getattr(loaded, what)(), getattr(result, what)())
    for what in ("deviance", "null_deviance", "pearson_chi2", "scale", "nobs", "df_resid", "df_null"):
        assert getattr(loaded, what) == getattr(result, what)
    for what in ("df_model", "converged", "cov_type", "model_name", "distribution"):
        assert getattr(loaded, what) == getattr(result, what)
    assert type(loaded.family.link) is type(result.family.link)


@pytest.mark.parametrize("case", UNLISTED)
def test_likelihood_or_its_absence_comes_back(results, case, path):
    result, loaded = results[case], round_trip(results[case], path)
    for what in ("llf", "llnull", "aic", "bic"):
        assert getattr(loaded, what, None) == getattr(result, what, None)
    assert (result.estimate.llf is None) == (loaded.estimate.llf is None)


@pytest.mark.parametrize("case", FITS)
def test_predictions_come_back_to_the_bit(results, case, path):
    result, loaded, new = results[case], round_trip(results[case], path), HOLES.head(120)
    for which in ("mean", "linear"):
        same(loaded.predict(new, which), result.predict(new, which))
    same(loaded.get_prediction(new).summary_frame(), result.get_prediction(new).summary_frame())


def test_predictions_of_what_was_loaded_are_those_of_statsmodels(result, path):
    theirs = fit_pooled("count ~ x + C(g)", FRAME, F.Poisson(), exposure="days")
    np.testing.assert_allclose(round_trip(result, path).predict(FRAME), theirs.fittedvalues, rtol=1e-8)


@pytest.mark.parametrize("case", ["logit", "counts", "wards", "no own fits", "one round", "in clear"])
def test_the_comparison_of_sites_comes_back(results, case, path):
    result, loaded = results[case], round_trip(results[case], path)
    ours, theirs = loaded.heterogeneity, result.heterogeneity
    same(ours.to_frame(), theirs.to_frame())
    if case == "in clear":
        same(ours.influence(), theirs.influence())
    assert ours.joint == theirs.joint
    assert ours.summary().as_text() == theirs.summary().as_text()
    if case != "logit":
        return
    name = result.params.index[1]
    drawn = [
        {t.get_text() for t in r.plot_forest(name).figure.findobj(match=_is_text)} for r in (loaded, result)
    ]
    assert drawn[0] == drawn[1]


def _is_text(artist):
    return hasattr(artist, "get_text")


def test_collinearity_comes_back(results, path):
    same(round_trip(results["logit"], path).vif(), results["logit"].vif())


def test_hypotheses_can_be_tested_after_loading(results, path):
    result, loaded = results["logit"], round_trip(results["logit"], path)
    hypothesis = "C(g)[T.b] = C(g)[T.c]"
    assert str(loaded.t_test(hypothesis)) == str(result.t_test(hypothesis))
    assert str(loaded.wald_test_terms()) == str(result.wald_test_terms())
    small = fs.FederatedGLM.from_formula("binary ~ scale(x)", partition(FRAME), family=F.Binomial()).fit()
    assert loaded.compare_lr_test(round_trip(small, path)) == result.compare_lr_test(small)


def test_the_ledger_comes_back(result, path):
    ours, theirs = round_trip(result, path).ledger, result.ledger
    same(ours.to_frame(), theirs.to_frame())
    same(ours.releases(), theirs.releases())
    assert (ours.rounds, ours.bytes, ours.at) == (theirs.rounds, theirs.bytes, None)


def test_alpha_comes_back(results, path):
    ours, theirs = round_trip(results["alpha"], path).overdispersion, results["alpha"].overdispersion
    assert (ours.alpha, ours.std_error) == (theirs.alpha, theirs.std_error)
    np.testing.assert_array_equal(ours.cov, theirs.cov)


def test_rows_of_a_partition_can_be_evaluated(results, path):
    result, loaded = results["logit"], round_trip(results["logit"], path)
    ours, theirs = loaded.evaluate(partition(FRAME)), result.evaluate()
    same(ours.to_frame(), theirs.to_frame())
    assert loaded.auc == result.auc
    assert loaded.evaluation_ledger.rounds == result.evaluation_ledger.rounds


def test_an_auc_that_was_computed_is_kept(path):
    result = fit("logit")
    result.evaluate()
    assert round_trip(result, path).auc == result.auc


def test_what_needs_the_sites_is_refused_with_a_remedy(results, path):
    loaded = round_trip(results["left out"], path)
    with pytest.raises(NotAvailableError, match=r"evaluate.*read from a file.*give one"):
        loaded.evaluate()
    with pytest.raises(NotAvailableError, match=r"score_test.*read from a file.*fit the model again"):
        loaded.score_test("days")
    with pytest.raises(NotAvailableError, match="no AUC: call evaluate"):
        _ = loaded.auc


def test_unusual_names_come_back(path):
    frame = FRAME.assign(site="Ämter «" + FRAME["site"] + '» "ü"', größe=FRAME["x"])
    result = fs.GLORE.from_formula("binary ~ größe + z", partition(frame)).fit()
    loaded = round_trip(result, path)
    assert loaded.summary().as_text() == result.summary().as_text()
    assert "GLORE results" in loaded.summary().as_text()
    same(loaded.predict(frame), result.predict(frame))


def test_a_fresh_session_reads_the_file(result, path):
    """``fs.load`` brings the readers of all families along."""
    result.save(path)
    script = f"import fedstat as fs; print(fs.load({str(path)!r}).summary())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.rstrip("\n") == result.summary().as_text()


def test_no_value_of_a_row_is_in_the_file(result, path):
    result.save(path)
    header, arrays = unpack(path.read_bytes())
    sizes = {result.nobs, *(row.n for row in result.basis.agreement.sites)}
    assert not [name for name, array in arrays.items() if set(array.shape) & sizes]
    assert set(header) == {"format", "content", "ledger"}
    for part in ("content", "ledger"):
        assert not [x for x in lists_of(json.loads(header[part])) if len(x) in sizes and _numbers(x)]


def lists_of(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([value] if isinstance(value, list) else []), *(x for item in inner for x in lists_of(item))]


def _numbers(values):
    return all(isinstance(item, int | float) for item in values)


@pytest.mark.parametrize("case", ["exposure", "probit", "counts"])
def test_a_file_that_lost_a_part_is_refused(results, case, path):
    """Of these, one has the sums without covariates, one the observed information, both scores' products."""
    results[case].save(path)
    header, arrays = unpack(path.read_bytes())
    content = json.loads(header["content"])
    for name in arrays:
        refused(path, header, content, {k: v for k, v in arrays.items() if k != name})
    fields = type(results[case]._saved_record()).__dataclass_fields__
    for name in content:
        if fields[name].default is dataclasses.MISSING:  # earlier versions lack the others
            refused(path, header, {k: v for k, v in content.items() if k != name}, arrays)
        if content[name] is not None:
            refused(path, header, content | {name: {}}, arrays)
            refused(path, header, content | {name: 7 if isinstance(content[name], str) else "x"}, arrays)


def test_a_file_with_an_unknown_part_is_refused(result, path):
    result.save(path)
    header, arrays = unpack(path.read_bytes())
    refused(path, header, json.loads(header["content"]), arrays | {"rows": np.ones(3)})


def test_arrays_that_do_not_belong_together_are_refused(result, path):
    result.save(path)
    header, arrays = unpack(path.read_bytes())
    content = json.loads(header["content"])
    for name, array in arrays.items():
        refused(path, header, content, arrays | {name: array[:-1]})
        refused(path, header, content, arrays | {name: array[None]})
    fit, total = content["fit"], content["fit"]["total"]
    without = {name: value for name, value in total.items() if name != "pearson"}
    for short in ({"local": fit["local"][1:]}, {"total": without}, {"trace": []}):
        refused(path, header, content | {"fit": fit | short}, arrays)
    agreement = content["basis"]["agreement"]
    agreement["sites"] = agreement["sites"][1:]
    refused(path, header, content, arrays)


@pytest.mark.parametrize("part", ["question", "spec"])
def test_a_formula_that_is_not_allowed_is_refused(result, path, part):
    """A file may come from a stranger: what it says of columns is checked like what a site receives."""
    result.save(path)
    header, arrays = unpack(path.read_bytes())
    content = json.loads(header["content"])
    inner = content["basis"]["agreement"][part]
    inner["terms"] = ["__import__('os').getcwd()", *inner["terms"][1:]]
    refused(path, header, content, arrays)


def refused(path, header, content, arrays):
    path.write_bytes(pack(header | {"content": json.dumps(content)}, arrays))
    with pytest.raises(ModelError, match="the file is incomplete"):
        fs.load(path)
