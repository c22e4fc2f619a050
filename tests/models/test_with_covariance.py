"""Another covariance after the fit equals the fit with that covariance."""

import functools

import numpy as np
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = fs.datasets.make_survival().assign(
    pair=lambda t: t["hospital"] + (t.index // 4).astype(str), f=lambda t: 1 + t.index % 3
)
PROBIT = sm.families.Binomial(sm.families.links.Probit())


def sites(**given):
    return fs.ClientPartition.from_frame(TABLE, by="hospital", **given)


def equal(found, expected):
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-9)
    np.testing.assert_allclose(found.bse, expected.bse, rtol=1e-9)
    np.testing.assert_allclose(found.pvalues, expected.pvalues, rtol=1e-7, atol=1e-12)
    assert found.cov_type == expected.cov_type and found.use_t == expected.use_t
    assert found.df_inference == pytest.approx(expected.df_inference)
    assert found.summary().as_text().split("Notes:")[0].count("\n") > 10


MODELS = {
    "logistic": ("GLORE", "died ~ age + arm", {}),
    "probit": ("FederatedGLM", "died ~ age + arm", {"family": PROBIT}),
    "weighted": ("FederatedOLS", "months ~ age + arm", {"freq_weights": "f"}),
    "offset": ("FederatedGLM", "died ~ age", {"family": sm.families.Poisson(), "exposure": "months"}),
}
CHOICES = [
    *((kind, None) for kind in ("nonrobust", "robust", "HC0", "HC1", "HC2", "HC3")),
    ("cluster", {"groups": "pair"}),
    ("cluster", {"groups": "pair", "correction": "CR1"}),
    ("cluster", {"groups": "hospital"}),
    ("survey", {"clusters": "pair"}),
]


@functools.cache
def made(name):
    kind, formula, settings = MODELS[name]
    return getattr(fs, kind).from_formula(formula, sites(), **settings)


@functools.cache
def fitted(name, cov_type):
    return made(name).fit(cov_type=cov_type, use_t=True)


@pytest.mark.parametrize(("cov_type", "kwds"), CHOICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_covariance_is_that_of_the_fit_with_it(name, cov_type, kwds):
    expected = made(name).fit(cov_type=cov_type, cov_kwds=kwds, use_t=True)
    found = fitted(name, "HC0").with_covariance(cov_type, kwds)
    equal(found, expected)
    # And from one to the next.
    equal(found.with_covariance("HC1"), fitted(name, "HC1"))


def test_no_request_is_sent_where_the_sums_are_at_hand():
    fit = fs.GLORE.from_formula("died ~ age", sites()).fit()
    assert fit.with_covariance("nonrobust").ledger.rounds == fit.ledger.rounds
    robust = fit.with_covariance("HC0")
    assert robust.ledger.rounds == fit.ledger.rounds + 3
    assert robust.with_covariance("HC1").ledger.rounds == robust.ledger.rounds
    assert fit.ledger.rounds < robust.ledger.rounds and fit.cov_type == "nonrobust"


def test_rows_without_a_cluster_are_left_out_and_fitted_again():
    table = TABLE.assign(pair=TABLE["pair"].where(TABLE.index % 10 > 0))
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    model = fs.GLORE.from_formula("died ~ age + arm", partition)
    found = model.fit().with_covariance("cluster", {"groups": "pair"})
    equal(found, model.fit(cov_type="cluster", cov_kwds={"groups": "pair"}))
    assert found.nobs < len(table)


@pytest.mark.parametrize(
    ("name", "formula", "settings", "given"),
    [
        ("FederatedCox", "Surv(months, died) ~ age + arm", {}, ("robust", None)),
        ("FederatedOrdinal", "C(stage, levels=['I', 'II', 'III']) ~ age", {}, ("HC1", None)),
        (
            "FederatedMultinomial",
            "C(stage, levels=['I', 'II', 'III']) ~ age",
            {},
            ("cluster", {"groups": "pair"}),
        ),
        ("FederatedGEE", "months ~ age + arm", {"groups": "pair"}, ("naive", None)),
        ("FederatedMixed", "months ~ age + (1 | pair)", {"reml": False}, ("robust", None)),
    ],
)
def test_other_families_are_fitted_again(name, formula, settings, given):
    model = getattr(fs, name).from_formula(formula, sites(), **settings)
    cov_type, kwds = given
    expected = model.fit(cov_type=cov_type, **({} if kwds is None else {"cov_kwds": kwds}))
    found = model.fit().with_covariance(*given)
    np.testing.assert_allclose(found.bse, expected.bse, rtol=1e-9)
    assert found.cov_type == expected.cov_type


def test_strict_sites_answer_and_owners_consent():
    fit = fs.GLORE.from_formula("died ~ age + arm", sites(policy="strict")).fit()
    for kind in ("HC0", "HC3"):
        expected = fs.GLORE.from_formula("died ~ age + arm", sites()).fit(cov_type=kind)
        np.testing.assert_allclose(fit.with_covariance(kind).bse, expected.bse, rtol=1e-7)


def test_what_cannot_be_is_named(tmp_path):
    fit = fs.GLORE.from_formula("died ~ age", sites()).fit()
    with pytest.raises(ModelError, match="cov_type: expected"):
        fit.with_covariance("HC9")
    with pytest.raises(ModelError, match="needs the column of the clusters"):
        fit.with_covariance("cluster")
    firth = fs.GLORE.from_formula("died ~ age", sites()).fit(method="firth")
    with pytest.raises(ModelError, match="'firth' needs cov_type='nonrobust'"):
        firth.with_covariance("HC0")
    with pytest.raises(ModelError, match="no argument 'cov_type'"):
        fs.FedAvg.from_formula("died ~ age", sites(), family=PROBIT).fit(rounds=2).with_covariance("HC0")
    fit.save(tmp_path / "fit")
    with pytest.raises(NotAvailableError, match="fit the model again"):
        fs.load(tmp_path / "fit").with_covariance("HC0")
