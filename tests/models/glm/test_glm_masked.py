"""Masked sums: the fit is that in clear, no site's part is seen, and coefficients cannot single rows out."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled import partition, table

import fedstat as fs
from fedstat.errors import DescriptionError, EstimationError, ModelError, NotAvailableError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import Request, pack_request, unpack_reply, unpack_request
from fedstat.federation.protocols import masked_sums as sums
from fedstat.federation.protocols.engine import LocalEngine

F, L = sm.families, sm.families.links
FRAME = table(seed=3)
FRAME["area"] = "of " + FRAME["site"]
FRAME["twin"] = FRAME["x"] + np.where(FRAME["site"] == "S1", 0.0, 0.05 * FRAME["v"])
CASES = {
    "logit": ("binary ~ x + z + C(g)", F.Binomial(), {}, {}),
    "cells missing at a site": ("binary ~ x + C(g) + C(site)", F.Binomial(), {}, {}),
    "probit": ("binary ~ x + z", F.Binomial(L.Probit()), {}, {"cov_type": "HC1"}),
    "poisson": ("count ~ x + C(g)", F.Poisson(), {"exposure": "days"}, {"cov_type": "HC0"}),
    "gamma": ("gamma ~ x + z", F.Gamma(L.Log()), {"var_weights": "v"}, {}),
    "linear": ("gauss ~ x + C(g)", F.Gaussian(), {"freq_weights": "w"}, {}),
    "collinear at a site": ("binary ~ x + twin", F.Binomial(), {}, {}),
    "no intercept": ("gauss ~ 0 + C(g) + x", F.Gaussian(), {}, {}),
    "no own fits": ("binary ~ x + z", F.Binomial(), {}, {"local": False}),
    "one round": ("binary ~ x + C(g)", F.Binomial(), {}, {"rounds": 1}),
    "alpha": ("over ~ x + z", F.NegativeBinomial(alpha=1.0), {}, {"dispersion": "ml"}),
    "sites": ("gauss ~ x + z", F.Gaussian(), {}, {"cov_type": "cluster", "cov_kwds": {"groups": "site"}}),
    "wards": ("binary ~ x", F.Binomial(), {}, {"cov_type": "cluster", "cov_kwds": {"groups": "ward"}}),
    "regions": ("binary ~ x", F.Binomial(), {}, {"cov_type": "cluster", "cov_kwds": {"groups": "region"}}),
    "survey": (
        "gauss ~ x",
        F.Gaussian(),
        {},
        {"cov_type": "survey", "cov_kwds": {"clusters": "ward", "strata": "area"}},
    ),
}


def model_of(case="logit", frame=FRAME, **known):
    formula, family, roles, _ = CASES[case]
    return fs.FederatedGLM.from_formula(
        formula, partition(frame, **known), family=family, labels=["ward", "region", "area"], **roles
    )


@functools.cache
def both(case):
    """A fit with masked sums, and the same unmasked."""
    return fit(case), fit(case, masked=False)


def fit(case="logit", frame=FRAME, policies=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_of(case, frame, policies=policies).fit(**CASES[case][3], **options)


def policies_of(**policy):
    return dict.fromkeys(FRAME["site"].unique(), Policy(**policy))


# -- the same fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_fit_is_that_unmasked(case):
    masked, clear = both(case)
    assert masked._fit.masked and not clear._fit.masked
    np.testing.assert_allclose(masked.params, clear.params, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(masked.cov_params(), clear.cov_params(), rtol=1e-10, atol=1e-15)
    for statement in ("deviance", "null_deviance", "pearson_chi2", "llf", "scale", "df_resid"):
        np.testing.assert_allclose(getattr(masked, statement), getattr(clear, statement), rtol=1e-12)
    pd.testing.assert_frame_equal(masked.site_estimates, clear.site_estimates, rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_score_test_of_equal_coefficients_is_that_unmasked(case):
    masked, clear = (result.heterogeneity for result in both(case))
    np.testing.assert_allclose(masked.joint, clear.joint, rtol=1e-8)
    pd.testing.assert_frame_equal(masked.to_frame(), clear.to_frame(), rtol=1e-9)
    assert masked.flagged == clear.flagged


@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_units_of_the_response_do_not_matter(factor):
    scaled = fit("linear", FRAME.assign(gauss=factor * FRAME["gauss"]))
    plain = fit("linear")
    np.testing.assert_allclose(scaled.params / factor, plain.params, rtol=1e-9)
    np.testing.assert_allclose(scaled.bse / factor, plain.bse, rtol=1e-9)


def test_sums_too_small_for_masks_are_reported():
    with pytest.raises(EstimationError, match=r"'gauss' is below 1e-44.*fit\(masked=False\)"):
        fit("linear", FRAME.assign(gauss=1e-30 * FRAME["gauss"]))


def test_far_columns_keep_their_digits():
    far = FRAME.assign(x=FRAME["x"] + 1e4, z=1e-9 * FRAME["z"])
    masked, clear = fit("no own fits", far), fit("no own fits", far, masked=False)
    np.testing.assert_allclose(masked.params, clear.params, rtol=1e-9)
    near = fit("no own fits")
    np.testing.assert_allclose(masked.bse.iloc[1:], near.bse.iloc[1:] * [1.0, 1e9], rtol=1e-9)


def test_a_score_test_of_left_out_terms_and_tests_between_fits():
    masked, clear = fit("logit"), fit("logit", masked=False)
    np.testing.assert_allclose(masked.score_test("days"), clear.score_test("days"), rtol=1e-9)
    smaller = fs.FederatedGLM.from_formula("binary ~ x", masked.model.partition, family=F.Binomial()).fit()
    statistic = 2.0 * (masked.llf - smaller.llf)
    assert masked.compare_lr_test(smaller).statistic == pytest.approx(statistic, rel=1e-12)


# -- no part is seen -----------------------------------------------------------------------------


class Spied:
    """A site whose replies are kept, as the coordinator receives them."""

    def __init__(self, site, seen):
        self.site, self.seen = site, seen

    def answer(self, request):
        reply = self.site.answer(request)
        self.seen.append((unpack_request(request), unpack_reply(reply)))
        return reply


def spy_on(model):
    """Replies of all sites from now on."""
    seen = []
    model.engine = LocalEngine({name: Spied(site, seen) for name, site in model.partition.sites.items()})
    return seen


def spied(case, **options):
    model = model_of(case)
    seen = spy_on(model)
    model.fit(**CASES[case][3], **options)
    return seen


OPEN = {
    "fit_alone": {"beta", "information", "columns", "pearson"},
    "sum_clusters": {"shared", "shared_strata"},
}


@pytest.mark.parametrize("case", ["logit", "alpha", "sites", "regions", "survey", "no own fits"])
def test_no_site_s_part_of_a_sum_reaches_the_coordinator(case, monkeypatch):
    """Unmasked are the sites' own fits, names, and keyed hashes; masked arrays look random."""
    handed = []
    original = sums.add_up
    monkeypatch.setattr(sums, "add_up", lambda *a: handed.append(original(*a)) or handed[-1])
    in_clear = set()
    seen = spied(case)
    assert len(seen) > 20
    for request, reply in seen:
        gives = FAMILIES[request.family][request.step].gives
        for name, array in reply.arrays.items():
            if not gives[name].maskable:
                in_clear.add((request.step, name))
                continue
            assert request.masked is not None and array.dtype == np.int64
            assert array.size == 0 or np.abs(array.ravel()).max() > 2**40
    allowed = {(step, name) for step, names in OPEN.items() for name in names}
    assert in_clear <= allowed | {("list_clusters", "clusters"), ("list_clusters", "strata")}
    assert in_clear.isdisjoint({("fit_alone", "beta")}) == (case == "no own fits")
    for replies in handed:
        for reply in replies[1:]:
            names = [name for name in reply.arrays if (reply.arrays[name] != 0).any()]
            assert set(names) <= set.union(*OPEN.values())


def test_owners_who_let_nothing_but_masked_sums_leave_are_served():
    result = fit(
        "no own fits", policies=policies_of(masked_only=True, refused_kinds=frozenset({"per entity"}))
    )
    assert result.converged
    assert result.score_test("days").df == 1
    with pytest.raises(PolicyError, match=r"masked only.*Fit with masked=True"):
        fit("no own fits", policies=policies_of(masked_only=True), masked=False)
    refusing = policies_of(refused_kinds=frozenset({"aggregate"}))
    assert fit("no own fits", policies=refusing).converged
    with pytest.raises(PolicyError, match=r"refused kinds.*'fit_alone' \(site's own fit"):
        fit("logit", policies=refusing)


def test_what_needs_single_sites_names_the_way_to_it():
    compared = fit().heterogeneity
    for statement in (compared.influence, lambda: compared.left_out, lambda: compared.change):
        with pytest.raises(NotAvailableError, match=r"fit\(masked=False\)"):
            statement()
    text = " ".join(compared.summary().as_text().split())
    assert text.count("not available, because sums are masked") == 1
    assert "The score test is a masked sum" in text


# -- two sites, one site -------------------------------------------------------------------------


TWO = FRAME.assign(site=np.where(FRAME["site"] == "S3", "S3", "other"))


def test_two_sites_are_unmasked_unless_requested():
    assert not fit(frame=TWO)._fit.masked
    assert fit(frame=TWO, masked=True)._fit.masked
    refuse = dict.fromkeys(("S3", "other"), Policy(two_sites="refuse"))
    with pytest.raises(PolicyError, match="two sites"):
        fit(frame=TWO, policies=refuse, masked=True)
    wanted = dict.fromkeys(("S3", "other"), Policy(masked_only=True))
    assert fit(frame=TWO, policies=wanted)._fit.masked
    with pytest.raises(PolicyError, match=r"masked only.*Fit with masked=True"):
        fit(frame=TWO, policies=wanted, masked=False)
    with pytest.raises(ModelError, match="two sites or more"):
        fit(frame=FRAME.assign(site="alone"), masked=True)
    with pytest.raises(ModelError, match="masked: expected True or False"):
        fit(masked="yes")


@pytest.mark.parametrize("family", [fs.GLORE, fs.FedAvg])
def test_two_strict_sites_say_what_stands_in_the_way(family):
    """The reason follows from the question: it leaves in full, and counts as no refusal about rows."""
    partition = fs.ClientPartition.from_frame(TWO, by="site", policy="strict")
    model = family.from_formula("binary ~ x", partition)
    options = {"batch_size": None} if family is fs.FedAvg else {}
    with pytest.raises(DescriptionError, match=r"\(two sites\).*Add a third site.*two_sites = \"warn\""):
        model.fit(**options)
    assert not any(site.site_ledger.refusals.total() for site in partition.sites.values())
    assert set(model.explain(**options).refused["S3"]) == {"two sites"}
    loose = fs.ClientPartition.from_frame(TWO, by="site", policy=Policy.strict(two_sites="warn"))
    assert family.from_formula("binary ~ x", loose).fit(**options) is not None


def test_keys_cost_a_round():
    masked, clear = fit().ledger, fit(masked=False).ledger
    assert masked.rounds == clear.rounds + 1


def test_a_second_fit_of_one_model_uses_new_masks():
    model = model_of()
    first, second = model.fit(), model.fit()
    assert first.params.equals(second.params)


# -- coefficients that single rows out -----------------------------------------------------------


def lone(seed=5, n=400):
    """Row 7 of site A lies apart, and no more than the owner's rules for columns allow."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"site": np.repeat(["A", "B", "C", "D"], n // 4), "x": rng.normal(size=n)})
    frame["z"] = rng.normal(size=n)
    frame.loc[7, ["x", "z"]] = 4.0, -4.0
    eta = 0.3 * frame["x"] - 0.2 * frame["z"]
    frame["y"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["count"], frame["cost"] = rng.poisson(np.exp(eta)), rng.gamma(2.0, np.exp(eta))
    return frame


LONE = lone()
ATTACKS = {  # at these coefficients nearly all weight is on row 7
    "logit": ("y ~ x + z", F.Binomial(), 600.0 * np.array([-7.999, 1.0, -1.0])),
    "poisson": ("count ~ x + z", F.Poisson(), np.array([0.0, 9.0, -9.0])),
    "gamma": ("cost ~ x + z", F.Gamma(L.Log()), np.array([0.0, -9.0, 9.0])),
}


@pytest.mark.parametrize("case", ATTACKS)
def test_coefficients_that_leave_one_row_are_answered_by_nothing(case):
    formula, family, beta = ATTACKS[case]
    model = fs.FederatedGLM.from_formula(formula, partition(LONE), family=family)
    assert model.fit(cov_type="HC0").converged  # honest questions about the same rows are answered
    site = model.partition.sites["A"]
    columns = {"beta": beta, "shift": np.zeros(3), "scale": np.ones(3)}
    model.fit(masked=False)

    def requested(step, **arrays):
        request = Request("A", "glm", step, columns | arrays, model._session)
        return unpack_reply(site.answer(pack_request(request)))

    found = requested("sum_scores", observed=np.array(True)).arrays
    assert not found["spread"]
    for name in ("score", "information", "totals", "observed"):
        assert not found[name].any()
    judge = {name: np.array(True) for name in ("meat", "apart")}
    entries = len(site.ledger.entries)
    with pytest.raises(
        PolicyError, match=r"A: its policy \(minimum count\) requires at least 5 rows behind sums"
    ):
        requested("judge", dispersion=np.ones(2), null=np.array(0.0), **judge)
    assert len(site.ledger.entries) == entries


def test_the_attack_would_have_reported_the_row():
    """An owner with no minimum count: the information is that of one row, whose columns follow from it."""
    formula, family, beta = ATTACKS["logit"]
    model = fs.FederatedGLM.from_formula(
        formula, partition(LONE, policies={"A": Policy(min_count=1)}), family=family
    )
    model.fit(masked=False)
    columns = {"beta": beta, "shift": np.zeros(3), "scale": np.ones(3)}
    request = Request("A", "glm", "sum_scores", columns | {"observed": np.array(False)}, model._session)
    found = unpack_reply(model.partition.sites["A"].answer(pack_request(request))).arrays
    np.testing.assert_allclose(found["information"][0] / found["information"][0, 0], [1.0, 4.0, -4.0])


def test_heavy_tails_are_answered():
    """Rates over four orders of magnitude, forty rows a site: the fit is that of the pooled table."""
    rng = np.random.default_rng(8)
    n = 200
    frame = pd.DataFrame({"site": np.repeat(list("ABCDE"), n // 5), "x": rng.normal(0.0, 1.5, n)})
    frame["count"] = rng.poisson(np.exp(1.0 + 1.4 * frame["x"]))
    frame["cost"] = rng.gamma(0.7, np.exp(1.0 + 1.4 * frame["x"]))
    for response, family in (("count", F.Poisson()), ("cost", F.Gamma(L.Log()))):
        for local in (True, False):
            result = fs.FederatedGLM.from_formula(f"{response} ~ x", partition(frame), family=family).fit(
                local=local
            )
            theirs = sm.GLM(frame[response], sm.add_constant(frame["x"]), family=family).fit(tol=1e-12)
            np.testing.assert_allclose(result.params, theirs.params, rtol=1e-6)


def test_alpha_and_clusters_cannot_single_rows_out_either():
    model = model_of("alpha")
    model.fit(masked=False, dispersion="ml")
    site = model.partition.sites["S1"]
    x = FRAME.loc[FRAME["site"] == "S1", "x"].to_numpy()
    second, first = np.sort(x)[-2:]
    slope = 200.0 / (first - second)
    beta = np.array(
        [-slope * (first + second) / 2, slope, 0.0]
    )  # eta is 100 at one row, below -100 at others
    columns = {"beta": beta, "shift": np.zeros(3), "scale": np.ones(3)}
    few = "at least 5 rows behind sums at any"
    for alpha in (1e-6, 1.0):
        request = Request("S1", "glm", "sum_nb2", columns | {"alpha": np.array(alpha)}, model._session)
        with pytest.raises(PolicyError, match=few):
            site.answer(pack_request(request))
    text = '{"clusters": "area", "strata": null}'
    site.answer(pack_request(Request("S1", "glm", "list_clusters", {}, model._session, text)))
    none = {"shared": np.zeros(0, dtype=np.int64), "spanning": np.zeros(1, dtype=np.int64)}
    with pytest.raises(PolicyError, match=few):
        site.answer(pack_request(Request("S1", "glm", "sum_clusters", columns | none, model._session)))


def test_sums_that_are_kept_are_those_of_the_family_that_was_requested():
    """A fit keeps the sums at its last coefficients; another family at the same ones has others."""
    model = model_of("poisson")
    model.fit(masked=False)
    site, p = model.partition.sites["S2"], 4
    columns = {
        "beta": np.full(p, 0.1),
        "shift": np.zeros(p),
        "scale": np.ones(p),
        "observed": np.array(False),
    }

    def information(family):
        session, text = (
            model._session,
            fs.FederatedGLM.from_formula(
                CASES["poisson"][0], model.partition, family=family
            ).distribution.to_json(),
        )
        site.answer(pack_request(Request("S2", "glm", "start", {}, session, text)))
        request = pack_request(Request("S2", "glm", "sum_scores", columns, session))
        return unpack_reply(site.answer(request)).arrays["information"]

    first, other, again = (information(f) for f in (F.Poisson(), F.NegativeBinomial(alpha=1.0), F.Poisson()))
    np.testing.assert_array_equal(first, again)
    assert (np.diag(other) < 0.9 * np.diag(first)).all()
