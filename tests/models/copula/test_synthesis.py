"""A synthesis with sites that check requests: its result, its cost, and its refusals."""

from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from pictures import JOURNAL, faults, page

import fedstat as fs
from fedstat.errors import DescriptionError, EstimationError, ModelError
from fedstat.models.copula.correlation import invert_products
from fedstat.models.copula.request import PLACES, GramRequest
from fedstat.privacy.zcdp import epsilon_of_zcdp

N = 3_000
OMEGA = np.array([[1.0, 0.6, -0.3, 0.2], [0.6, 1.0, 0.1, 0.5], [-0.3, 0.1, 1.0, 0.4], [0.2, 0.5, 0.4, 1.0]])
BOUNDS = fs.Bounds({"a": (-4, 4), "b": ["no", "yes"], "c": range(4), "d": fs.log(0.01, 100)})
COLUMNS = {"A": ["a", "b"], "B": ["c"], "C": ["d"]}


def rows(n=N, seed=0):
    Z = np.random.default_rng(seed).standard_normal((n, 4)) @ np.linalg.cholesky(OMEGA).T
    return pd.DataFrame(
        {
            "a": Z[:, 0],
            "b": np.where(Z[:, 1] > 0.8, "yes", "no"),
            "c": np.searchsorted([-0.8, 0.0, 1.2], Z[:, 2]),
            "d": np.exp(Z[:, 3]),
        }
    )


def synthesizer(frame=None, epsilon=5.0, budget=8.0, columns=COLUMNS, **options):
    frame = rows() if frame is None else frame
    partition = fs.ClientPartition.from_frame(
        frame, columns=columns, policy=fs.Policy(privacy=fs.Budget(budget, 1e-6))
    )
    return fs.CopulaSynthesizer(partition, epsilon, options.pop("bounds", BOUNDS), **options)


@pytest.fixture(scope="module")
def fitted():
    model = synthesizer()
    return model, model.fit()


def test_correlations_and_margins_are_those_of_the_rows(fitted):
    found = fitted[1].correlation.to_numpy()
    errors = np.hypot(fitted[1].noise.to_numpy(), 2.0 / np.sqrt(N))
    assert (np.abs(found - OMEGA) < 4.0 * errors + np.eye(4)).all()
    margins = fitted[1].margins
    yes = margins.query("column == 'b' and level == 'yes'")["probability"].item()
    assert yes == pytest.approx((rows()["b"] == "yes").mean(), abs=0.01)


def test_synthetic_rows_are_like_the_rows(fitted):
    drawn, real = fitted[1].sample(20_000, seed=1), rows()
    assert list(drawn) == ["a", "b", "c", "d"]
    assert set(drawn["b"]) == {"no", "yes"}
    assert drawn["c"].dtype == np.int64
    for name in ("a", "d"):
        assert drawn[name].quantile([0.2, 0.5, 0.8]).to_numpy() == pytest.approx(
            real[name].quantile([0.2, 0.5, 0.8]).to_numpy(), rel=0.1, abs=0.08
        )
    assert drawn.equals(fitted[1].sample(20_000, seed=1))
    assert not drawn.equals(fitted[1].sample(20_000, seed=2))


def test_every_sum_of_products_has_the_noise_that_was_paid_for(fitted):
    fit = fitted[1]._fit
    exact = []
    for names in COLUMNS.values():
        margins = [margin for margin in fit.margins if margin.bins.name in names]
        codes = np.column_stack([m.bins.code(rows()[m.bins.name]) for m in margins])
        exact.append(np.ldexp(GramRequest({}, 1, 1).score(margins, codes).astype(float), -PLACES))
    U = np.hstack(exact)
    upper = np.triu_indices(4, 1)
    z = ((fit.products - U.T @ U / N) / fit.noise)[upper]
    assert (z != 0.0).all()
    assert 1.0 < (z**2).sum() < 25.0  # chi-square of 6: probability below .001 on either side
    one_share = fit.sums.deviation(0, 1) / N
    owners = ["A", "A", "B", "C"]
    for i, j in zip(*upper, strict=True):
        shares = 1 if owners[i] == owners[j] else 2
        assert fit.noise[i, j] == pytest.approx(np.sqrt(shares) * one_share)


def test_sites_were_charged_what_the_plan_says_and_no_more_than_epsilon(fitted):
    model, result = fitted
    for site in COLUMNS:
        charges = model.partition.sites[site].site_ledger.charges
        # every charge is rounded up a little
        assert 0 <= charges.spent - result._fit.sums.site_cost(site) < 1e-15
        assert epsilon_of_zcdp(charges.spent, 1e-6) <= 5.0
    assert (result.privacy["epsilon"] <= 5.0).all()
    assert result.privacy["epsilon"].max() == pytest.approx(5.0, rel=1e-3)
    reported = result.privacy.set_index("record")
    spent = model.partition.sites["A"].site_ledger.charges.spent
    assert reported.loc["its part at A", ["rho_margins", "rho_products"]].sum() == pytest.approx(float(spent))


def test_the_same_synthesis_costs_nothing_again():
    model = synthesizer(epsilon=2.0)
    first = model.fit()
    spent = {name: site.site_ledger.charges.spent for name, site in model.partition.sites.items()}
    second = fs.CopulaSynthesizer(model.partition, 2.0, BOUNDS).fit()
    assert (first.margins["probability"] == second.margins["probability"]).all()
    assert (first.correlation == second.correlation).all(axis=None)
    assert spent == {name: site.site_ledger.charges.spent for name, site in model.partition.sites.items()}
    # Without an earlier release at one site, products are charged at all, and margins at none.
    model.partition.sites["A"].site_ledger.kept.clear()
    third = fs.CopulaSynthesizer(model.partition, 2.0, BOUNDS).fit()
    assert (first.margins["probability"] == third.margins["probability"]).all()
    assert not np.allclose(first.correlation, third.correlation, atol=1e-9)
    for client in COLUMNS:
        more = model.partition.sites[client].site_ledger.charges.spent - spent[client]
        assert Fraction(0) < more <= first._fit.sums.products_cost(client) + Fraction(1, 2**50)


def test_what_passes_is_noisy_or_public_or_hidden(fitted):
    passed = fitted[1].ledger.releases()
    assert set(passed["kind"]) <= {"control", "presence", "sealed", "masked share", "noisy aggregate"}
    shares = passed[passed["kind"] == "masked share"]
    assert set(shares["array"]) == {"share", "shares"}  # a checksum would reveal the sums without noise


def test_one_site_alone_is_the_pooled_estimate():
    frame = rows(20_000)
    model = synthesizer(frame, epsilon=300.0, budget=400.0, columns={"A": list("abcd")})
    fit = model.fit()._fit
    margins = list(fit.margins)
    codes = np.column_stack([m.bins.code(frame[m.bins.name]) for m in margins])
    U = np.ldexp(GramRequest({}, 1, 1).score(margins, codes).astype(float), -PLACES)
    pooled = invert_products(U.T @ U / len(frame), margins, [slice(0, 4)], [4.8]).correlation
    assert fit.inversion.correlation == pytest.approx(pooled, abs=2e-3)


def test_order_of_sites_is_irrelevant_to_the_cost():
    turned = dict(reversed(COLUMNS.items()))
    one, other = synthesizer(epsilon=1.0), synthesizer(epsilon=1.0, columns=turned)
    assert one._planned.gram_variance == other._planned.gram_variance


def test_what_is_dry_run_asks_nothing_and_says_the_noise():
    model = synthesizer(epsilon=1.0)
    reported = str(model.explain())
    assert "Every policy allows this fit" in reported
    assert "Noise on a correlation near 0" in reported
    assert "the charge to the site's budget: A 1, B" in reported
    assert all(site.site_ledger.charges.spent == 0 for site in model.partition.sites.values())
    noise = model.fit().noise.to_numpy()
    assert f"{noise[2, 3]:.1g}" in reported or np.isclose(noise[2, 3], 0.012, rtol=0.6)


def test_a_file_says_the_same(fitted, tmp_path):
    fitted[1].save(tmp_path / "synthesis.fed")
    again = fs.load(tmp_path / "synthesis.fed")
    assert str(again.summary()) == str(fitted[1].summary())
    assert again.sample(50, seed=3).equals(fitted[1].sample(50, seed=3))


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, -1.0, np.inf, np.nan, "1"])
def test_an_epsilon_that_is_none(epsilon):
    with pytest.raises(ModelError, match="epsilon: expected a positive number"):
        synthesizer(epsilon=epsilon)


def test_a_delta_that_lets_records_leave_unmasked():
    with pytest.raises(ModelError, match="at most 1e-05"):
        synthesizer(delta=1e-3)


def test_columns_without_bounds_and_bounds_without_columns():
    with pytest.raises(ModelError, match=r"1 of 4 columns have none(.|\n)*\"d\": \(low, high\)"):
        synthesizer(bounds={name: BOUNDS[name] for name in "abc"})
    with pytest.raises(ModelError, match="no site has a column 'z'"):
        synthesizer(bounds={**BOUNDS, "z": (0, 1)})


def test_without_a_budget_nothing_leaves_and_the_line_is_named():
    partition = fs.ClientPartition.from_frame(rows(), columns=COLUMNS)
    with pytest.raises(DescriptionError, match=r"\[privacy\]"):
        fs.CopulaSynthesizer(partition, 1.0, BOUNDS).fit()


def test_a_budget_that_is_too_small_is_reported_before_any_request():
    assert synthesizer(epsilon=1.0, budget=1.0).fit()  # rounded up, its charges still fit
    model = synthesizer(epsilon=3.0, budget=1.0)
    with pytest.raises(DescriptionError, match=r"A: its policy .* costs 3.*no request was sent"):
        model.fit()
    assert all(not site.site_ledger.charges.made for site in model.partition.sites.values())


def test_a_spent_budget_says_what_is_left():
    model = synthesizer(epsilon=5.0, budget=6.0)
    model.fit()
    with pytest.raises(DescriptionError, match="left") as caught:
        fs.CopulaSynthesizer(model.partition, 4.0, BOUNDS).fit()
    assert "policy.toml" in str(caught.value)


def test_levels_that_are_not_listed_name_the_column_and_no_level():
    frame = rows().replace({"b": {"yes": "Yes"}})
    with pytest.raises(EstimationError, match="column 'b' at 'A'") as caught:
        synthesizer(frame).fit()
    assert "Yes" not in str(caught.value)


def test_missing_values_are_missing_at_their_site():
    frame = rows()
    frame.loc[10:209, "d"] = np.nan
    fit = synthesizer(frame, missing="pairs").fit()
    assert fit._fit.entities == {"A": N, "B": N, "C": N - 200}
    assert fit._fit.method == "pairs"
    assert fit._fit.pairs[0, 3] == N - 200


def test_a_coordinator_at_one_of_two_cannot_have_products_dealt():
    columns = {"A": ["a", "b"], "B": ["c", "d"]}
    with pytest.raises(ModelError, match="no third site"):
        synthesizer(columns=columns, coordinator="A").fit()
    assert synthesizer(columns=columns).fit().correlation.shape == (4, 4)


def test_sites_with_few_entities_in_common_are_named_before_any_charge():
    frame = rows()
    frame.loc[20:, "d"] = np.nan
    model = synthesizer(frame)
    with pytest.raises(EstimationError, match=r"fewer than 50 .* 'A' and 'C' \(20\), 'B' and 'C' \(20\)"):
        model.fit()
    assert all(not site.site_ledger.charges.made for site in model.partition.sites.values())


# ---- reports ---------------------------------------------------------------------------------------


def test_noise_that_is_reported_is_the_noise_there_is():
    """Margins of the same rows under six secrets of sites differ by about what the report says."""
    report = synthesizer(epsilon=1.0).fit().utility_report()
    assert list(report.index) == ["a", "b", "c", "d"]
    drawn = [synthesizer(epsilon=1.0).fit() for _ in range(6)]
    below = {"a": "column == 'a' and high <= 0", "c": "column == 'c' and level in [0, 1]"}
    for name, half in below.items():
        spread = np.std([fit.margins.query(half)["probability"].sum() for fit in drawn], ddof=1)
        assert 0.2 < spread / report.loc[name, "margin_noise"] < 2.5


def test_pictures(fitted):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = fitted[1].plot_margins()
    assert [ax.get_title() for ax in figure.axes if ax.get_visible()] == ["a", "b", "c", "d"]
    assert not faults(figure)
    assert not any(faults(fitted[1].plot_correlation(page(width, 4.0)).figure) for width in JOURNAL)
    ax = fitted[1].plot_correlation()
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b", "c", "d"]
    pyplot.close("all")
