"""The default covariance between sites: free, or independent where two sites share too few entities."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from choice_simulation import SIZES, draw, simulate
from pattern_moments import moments_of_arrays
from scipy import stats

import fedstat as fs
from fedstat.errors import AssumptionWarning, ModelError
from fedstat.models.vertical.joint_normal.assumption_tests import choose_between
from fedstat.models.vertical.joint_normal.edges import sparse_pairs
from fedstat.models.vertical.joint_normal.fit import extremes, fit_joint_model
from fedstat.models.vertical.joint_normal.likelihood import joint_normal_likelihood

NAMES = {"A": ["a1", "a2"], "B": ["b1", "b2"], "C": ["c1", "c2"], "D": ["d1", "d2"]}
EVERY = [name for own in NAMES.values() for name in own]


def frames_of(checkable, apart, seed=1, binary=False):
    X, y = draw(checkable, apart, seed)
    table = pd.DataFrame(X, columns=EVERY).assign(id=range(len(y)), y=(y > 0).astype(int) if binary else y)
    frames = {"Registry": table[["id", "y"]]}
    return frames | {site: table[["id", *own]].dropna() for site, own in NAMES.items()}


def partition_of(checkable, apart, **options):
    return fs.ClientPartition.from_frames(frames_of(checkable, apart, **options), on="id")


@pytest.fixture(scope="module")
def sme():
    return fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")


@pytest.fixture(scope="module")
def literal(sme):
    return fs.VFEMRegression.from_formula("NPGR ~ .", sme).fit()


@pytest.fixture(scope="module")
def rejected():
    with pytest.warns(AssumptionWarning, match="do not determine all coefficients"):
        return fs.VFEMRegression.from_formula("y ~ .", partition_of(0.3, 0.3)).fit()


# ---- independent blocks --------------------------------------------------------------------------


def test_the_literal_call_prints_the_publications_table(sme, literal):
    other = fs.VFEMRegression.from_formula("NPGR ~ .", sme, between="independent").fit()
    assert literal.between == "independent" and other._record.ranges is None
    for name in ("params", "bse", "tvalues", "pvalues"):
        pd.testing.assert_series_equal(getattr(literal, name), getattr(other, name), rtol=1e-12)
    pd.testing.assert_frame_equal(literal.conf_int(), other.conf_int(), rtol=1e-12)
    text = str(literal.summary())
    (line,) = [str(note) for note in literal._ordered_notes() if note.severity == "critical"]
    assert "Judicial Organ and Law-enforcement Agency share" in line and "p = 0.56" in line
    assert text.startswith("*** BLOCKS ASSUMED INDEPENDENT") and "NOT IDENTIFIED" not in text
    assert [sheet.headers[-2:] for sheet in literal.summary().sheets][1:] == [("lowest", "highest")]
    assert len(text.splitlines()) == 60
    assert "lowest" not in str(other.summary())


def test_the_last_columns_hold_the_sensitivity_and_are_blank_where_all_is_known(literal):
    rows = {row[0].strip("\u00a0"): row[-2:] for row in literal.summary().sheets[1].rows}
    table = literal.sensitivity().set_index("term")
    for name in ("ABNAP", "FP2"):
        assert tuple(map(float, rows[name])) == pytest.approx(
            tuple(table.loc[name, ["low", "high"]]), abs=6e-4
        )
    assert rows["INVE"] == rows["ROA"] == ("", "")
    assert set(table.index) == set(literal.params.index) - {"Intercept"}


def test_sums_leave_alike_whatever_is_chosen(sme, literal):
    columns = ["sender", "receiver", "step", "array", "kind", "shape"]
    for between in ("free", "independent"):
        other = fs.VFEMRegression.from_formula("NPGR ~ .", sme, between=between).fit()
        frames = [one.ledger.to_frame() for one in (literal, other)]
        kept = [name for name in columns if name in frames[0]]
        pd.testing.assert_frame_equal(*(frame[kept] for frame in frames))


def test_the_dry_run_lists_what_the_fit_releases(sme, literal):
    expected = fs.VFEMRegression.from_formula("NPGR ~ .", sme).explain()
    assert "aggregate" in str(expected)
    planned = set(zip(expected.table["sender"], expected.table["step"], expected.table["array"], strict=True))
    sums = {(e.sender, e.step, e.array) for e in literal.ledger.entries if e.kind == "aggregate"}
    assert sums and sums <= planned


def test_every_value_left_open_has_the_likelihood_of_independent_blocks():
    X, y = draw(0.0, 0.3, 2)
    moments = moments_of_arrays(np.delete(X, [5, 7], axis=1), y, [2, 2, 1, 1])
    fit = fit_joint_model(moments, "independent")
    (pair,) = sparse_pairs(moments)
    at = fit.point
    cov, rest, two = at.cov, [0, 1, 2, 3, 6], [4, 5]
    slopes = np.linalg.solve(cov[np.ix_(rest, rest)], cov[np.ix_(rest, two)])
    partial = cov[np.ix_(two, two)] - slopes.T @ cov[np.ix_(rest, two)]
    middle, reach, found = cov[4, 5] - partial[0, 1], np.sqrt(partial[0, 0] * partial[1, 1]), []
    for value in middle + (1.0 - 1e-9) * reach * np.cos(np.linspace(0.0, np.pi, 2_001)):
        trial = cov.copy()
        trial[4, 5] = trial[5, 4] = value
        likelihood = joint_normal_likelihood(fit.moments, at.mean, trial)
        assert likelihood == pytest.approx(fit.joint, rel=1e-7)
        found.append(np.linalg.solve(trial[:-1, :-1], trial[:-1, -1]))
    found = np.array(found) * moments.standardized().scale[-1] / moments.standardized().scale[:-1]
    low, high = extremes(fit, pair)[:, 1:]
    np.testing.assert_allclose(low, found.min(axis=0), atol=0.01)
    np.testing.assert_allclose(high, found.max(axis=0), atol=0.01)


@pytest.mark.parametrize(
    "options", [{"cov_type": "robust"}, {"correction": "small-sample"}, {"cov_type": "sem"}]
)
def test_covariances_and_corrections_follow_the_choice(options):
    partition = partition_of(0.0, 0.0)
    chosen = fs.VFEMRegression.from_formula("y ~ .", partition).fit(**options)
    plain = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit()
    assert chosen.between == "independent"
    np.testing.assert_allclose(chosen.params, plain.params, atol=0.2 * plain.bse.min())
    assert 0.8 < (chosen.bse / plain.bse).mean() < 1.2
    assert "ASSUMED INDEPENDENT" in str(chosen.summary())


def test_a_file_and_a_smaller_fit_keep_the_choice(literal, tmp_path):
    literal.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    assert again.between == "independent" and again._record.outcome.choice == literal._record.outcome.choice
    assert str(again.summary()).split("\n")[:2] == str(literal.summary()).split("\n")[:2]
    one = literal.refit("NPGR ~ . - INVE")
    assert one.between == "independent" and "ASSUMED INDEPENDENT" in str(one.summary())
    assert literal.compare_lr_test(one).pvalue < 1e-10
    judicial = ["ABNAP", "ABNCON", "ABNINF", "ABNPUB", "ABNOPE", "Removed"]
    other = literal.refit("NPGR ~ . - " + " - ".join(judicial))
    assert "ASSUMED INDEPENDENT" not in str(other.summary()) and "lowest" not in str(other.summary())


# ---- free covariances ----------------------------------------------------------------------------


def test_contradicted_independence_has_the_banner_and_consistent_tests(rejected):
    text = " ".join(str(rejected.summary()).split())
    assert rejected.between == "free" and "NOT IDENTIFIED" in text
    assert "the other sites contradict independent blocks (p < 1e-" in text
    p = 2.0 * stats.norm.sf(rejected.tvalues.abs())
    np.testing.assert_allclose(rejected.pvalues, p)
    limits = rejected.conf_int()
    assert (((limits[0] > 0.0) | (limits[1] < 0.0)) == (p < 0.05)).all()
    low, high = rejected._open_ranges
    assert (limits[0] < low).all() and (limits[1] > high).all()
    rows = [row for row in rejected.summary().sheets[1].rows if row[-1]]
    assert len(rows) == 9  # everything hangs on the correlation of C and D


def test_an_explicit_choice_is_kept():
    partition = partition_of(0.0, 0.0)
    with pytest.warns(AssumptionWarning, match="do not determine"):
        free = fs.VFEMRegression.from_formula("y ~ .", partition, between="free").fit()
    text = " ".join(str(free.summary()).split())
    assert free.between == "free" and "NOT IDENTIFIED" in text and "contradict independent" not in text


def test_free_where_no_two_sites_can_be_checked():
    frames = {site: frame for site, frame in frames_of(0.0, 0.0).items() if site in ("Registry", "C", "D")}
    with pytest.warns(AssumptionWarning, match="do not determine"):
        fit = fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(frames, on="id")).fit()
    text = " ".join(str(fit.summary()).split())
    assert fit.between == "free" and "no other two sites can be checked" in text


@pytest.mark.parametrize(("shared", "chosen"), [(0, True), (3, True), (4, False), (5, False)])
def test_fewer_shared_entities_than_columns_leave_a_covariance_open(shared, chosen):
    X, y = draw(0.0, 0.0, 3)
    both = np.flatnonzero(~np.isnan(X[:, 4]))[:shared]
    X[both, 6:8] = np.random.default_rng(1).normal(size=(shared, 2))
    choice = choose_between(moments_of_arrays(X, y, SIZES))
    assert (choice is not None) == chosen
    assert choice is None or (choice.between == "independent" and choice.pvalue > 0.05)


def test_pairs_with_few_entities_are_checked_by_wilks_test():
    """No pair has ten entities per column, so that the likelihood ratio has no degree of freedom."""
    rng = np.random.default_rng(1)
    for rho, between in ((0.0, "independent"), (0.9, "free")):
        X = np.sqrt(rho) * rng.normal(size=(80, 1)) + np.sqrt(1.0 - rho) * rng.normal(size=(80, 6))
        y = X.sum(axis=1) + 6.0 * rng.normal(size=80)
        X[:45, 2:4], X[35:, 4:6] = np.nan, np.nan
        X[:20, :2] = np.nan
        choice = choose_between(moments_of_arrays(X, y, [2, 2, 2]))
        assert (choice.between, choice.unchecked) == (between, ("client 2 and client 3",))


# ---- other families ------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkable", "between"), [(0.0, "independent"), (0.4, "free")])
def test_a_binary_response_chooses_alike(checkable, between):
    partition = partition_of(checkable, 0.0, binary=True)
    binomial = sm.families.Binomial()
    fit = fs.VFEMGLM.from_formula("y ~ .", partition, family=binomial).fit()
    other = fs.VFEMGLM.from_formula("y ~ .", partition, family=binomial, between=between).fit()
    assert fit.between == between
    np.testing.assert_allclose(fit.params, other.params, atol=1e-4)
    np.testing.assert_allclose(fit.bse, other.bse, rtol=1e-3)
    text = " ".join(str(fit.summary()).split())
    expected = "BLOCKS ASSUMED INDEPENDENT: C and D" if between == "independent" else "contradict independent"
    assert expected in text
    # Both models have the same sums, and the same arrays in every iteration.
    free = other
    if between != "free":
        free = fs.VFEMGLM.from_formula("y ~ .", partition, family=binomial, between="free").fit()
    kinds = [{(e.sender, e.step, e.array, e.shape) for e in one.ledger.entries} for one in (fit, free)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(("checkable", "between"), [(0.0, "independent"), (0.4, "free")])
def test_a_selection_chooses_alike(checkable, between):
    partition = partition_of(checkable, 0.0)
    options = {"penalty": "lasso", "missing": "em"}
    fit = fs.VerticalGLM.from_formula("y ~ .", partition, **options).fit(n_lambdas=8)
    other = fs.VerticalGLM.from_formula("y ~ .", partition, between=between, **options).fit(n_lambdas=8)
    np.testing.assert_allclose(fit.params, other.params, atol=1e-10)
    text = " ".join(str(fit.summary()).split())
    assert ("ASSUMED INDEPENDENT: C and D" if between == "independent" else "NOT IDENTIFIED") in text


def test_iterations_still_need_an_explicit_assumption(sme):
    with pytest.raises(ModelError, match="between='independent'"):
        fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", sme).fit(exchange="iterative")
    with pytest.raises(ModelError, match="between"):
        fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", sme, between="none")


# ---- simulation ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_coverage_where_two_sites_share_no_entity():
    """Intervals of the table miss a correlation that cannot be checked; the two last columns show it."""
    table = simulate(60).set_index(["checkable", "open", "between"])
    default, error = table.xs("default", level="between"), np.sqrt(0.95 * 0.05 / 60)
    independent = default.loc[(0.0, 0.0)]
    assert min(independent["A_and_B"], independent["C_and_D"]) > 0.95 - 2.0 * error
    assert independent["worst"] > 0.95 - 4.0 * error and independent["independent"] > 0.9 - 2.0 * error
    assert default.loc[(0.0, 0.6), "worst"] < 0.2 and default.loc[(0.0, 0.6), "with_open_values"] > 0.85
    assert default.loc[(0.3, 0.3), "independent"] == 0.0 and default.loc[(0.3, 0.3), "worst"] > 0.9
