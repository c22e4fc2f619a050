"""Attacks on mixed models: points chosen to single out one patient, and sites that change.

Products weighted by the inverse variance are sums over groups, whose weights depend on the size and the
design of the group. Sums at several covariances can be combined such that one group alone has weight.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import optimize, special, stats

import fedstat as fs
from fedstat.errors import FedstatError, MessageError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.tables.table import FrameTable
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.mixed.protocol import MixedNewton
from fedstat.models.mixed.steps import row_vectors

CAREFUL = fs.Policy(max_share=0.2, min_level_count=5)
"""The rule on sums that single out few rows is on; sums need no masks."""
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")


def visits(sites=3, patients=30, target=7):
    """Patients with 2 to 4 visits, as many of each; at the first site one patient has `target` visits."""
    rng = np.random.default_rng(8)
    rows = []
    for k in range(sites):
        for patient in range(patients):
            n = target if (k, patient) == (0, 3) else 2 + patient % 3
            level = rng.normal()
            rows += [(f"S{k}", patient, rng.normal(), 10.0 + level + rng.normal()) for _ in range(n)]
    return pd.DataFrame(rows, columns=["site", "patient", "x", "y"])


def model_of(table, policy=CAREFUL, formula="y ~ x + (1 | patient)", **settings):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    return fs.FederatedMixed.from_formula(formula, partition, **settings)


def ask(model, covariances, masked=False, name="products"):
    """Request sums at chosen covariances; return replies by covariance."""
    session = model._open_session("mixed", masked)
    newton = MixedNewton(session, model.formula.random, model.distribution)

    def protocol():
        yield from newton.open()
        out = []
        for T in covariances:
            arrays = {"covariance": np.atleast_1d(T).astype(float), "center": np.zeros(2)}
            out.append((yield session.request_all("sum_products", arrays)))
        return [[reply.arrays[name] for reply in replies] for replies in out]

    return model.engine.run(session.hide(protocol()), Ledger())


def mean_of_the_patient(found, covariances, sizes, target):
    """Solve for the products of sums of intercept and response over the group of one size."""
    values = np.array([replies[0][:3] for replies in found])  # intercept, x, response, at the first site
    weights = np.array([[1.0, *(-t / (1.0 + n * t) for n in sizes)] for t in covariances])
    solved = np.linalg.lstsq(weights, values.reshape(len(values), -1), rcond=None)[0].reshape(-1, 3, 3)
    sums = solved[1 + sizes.index(target)]
    return sums[0, 2] / sums[0, 0]


def test_the_only_patient_with_seven_visits():
    """Without the rule the coordinator computes the mean of one patient; by default the site refuses."""
    table, covariances, sizes = visits(), [0.0, 0.05, 0.2, 0.5, 1.0, 3.0, 20.0], [2, 3, 4, 7]
    own = table.query("site == 'S0' and patient == 3")["y"].mean()
    allowed = ask(model_of(table, fs.Policy(min_level_count=1)), covariances)
    assert mean_of_the_patient(allowed, covariances, sizes, 7) == pytest.approx(own, abs=1e-3)
    with pytest.raises(PolicyError, match=r"fewer than 5 groups\. Groups of few sizes"):
        ask(model_of(table), covariances)
    with pytest.raises(PolicyError, match="fewer than 5 groups"):
        model_of(table).fit(masked=False)
    with pytest.raises(PolicyError, match=r"fewer than 3 groups\."):
        model_of(table, fs.Policy()).fit(masked=False)
    assert model_of(table, fs.Policy()).fit().converged  # masked among three sites


def test_groups_of_common_sizes_may_be_summed_unmasked():
    assert model_of(visits(target=4)).fit(masked=False).converged


@pytest.mark.parametrize(
    ("policy", "alike", "refused"),
    [(CAREFUL, 4, True), (CAREFUL, 5, False), (fs.Policy(), 2, True), (fs.Policy(), 3, False)],
)
def test_the_number_of_groups_of_a_size_is_the_minimum(policy, alike, refused):
    table = visits(target=4)
    more = table.query("site == 'S0'").groupby("patient").filter(lambda group: len(group) == 4)
    longer = more["patient"].unique()[:alike]
    added = table[(table["site"] == "S0") & table["patient"].isin(longer)].groupby("patient").head(1)
    table = pd.concat([table, added.assign(y=added["y"] + 0.3, x=added["x"] * -0.7)], ignore_index=True)
    if refused:
        with pytest.raises(PolicyError, match=f"fewer than {policy.min_level_count} groups"):
            model_of(table, policy).fit(masked=False)
    else:
        assert model_of(table, policy).fit(masked=False).converged


def test_masks_hide_the_patient_among_the_same_sites_only():
    """The difference of two masked sums is the part of the site that left."""
    table = visits(sites=4)
    partition = fs.ClientPartition.from_frame(table, by="site", policy=CAREFUL)
    formula = "y ~ x + (1 | patient)"
    assert fs.FederatedMixed.from_formula(formula, partition).fit(masked=True).converged
    assert fs.FederatedMixed.from_formula(formula, partition).fit(masked=True).converged
    fewer = partition._among(["S0", "S1", "S2"])
    with pytest.raises(PolicyError, match="always the same ones"):
        fs.FederatedMixed.from_formula(formula, fewer).fit(masked=True)


@pytest.mark.parametrize(("policy", "least"), [(CAREFUL, 5), (fs.Policy(), 3)])
def test_two_sites_hide_nothing_from_each_other(policy, least):
    with pytest.raises(PolicyError, match=f"fewer than {least} groups"):
        model_of(visits(sites=2), policy).fit(masked=True)


def test_effects_of_a_site_at_many_points_single_out_no_patient():
    """Each point gives one more sum of residuals, weighted by the sizes of the groups, and unmasked."""
    model = model_of(visits(sites=4), fs.Policy(), "y ~ x + (1 | patient) + (1 | site)")
    session = model._open_session("mixed", True)
    newton = MixedNewton(session, model.formula.random, model.distribution)
    received = []

    def protocol():
        yield from newton.open()
        for t in np.linspace(0.1, 2.0, 8):
            arrays = {"beta": np.zeros(2), "factor": np.array([t, 1.0]), "basis": np.ones(2)}
            arrays |= {"dispersion": np.array(1.0), "center": np.zeros(2)}
            received.append((yield session.request_all("predict_site", arrays)))

    with pytest.raises(PolicyError, match=r"fewer than 3 groups\. .*: leave out groups of rare sizes"):
        model.engine.run(session.hide(protocol()), Ledger())
    # Sizes 2, 3, 4 and 7: a sum over all groups and three weighted ones would leave those of one size.
    assert len(received) < 3


@pytest.mark.parametrize(("target", "rule"), [(7, "at least 5 clusters by 'patient'"), (4, "minimum count")])
def test_a_site_with_one_patient(target, rule):
    table = visits(target=target)
    table = table[(table["site"] != "S0") | (table["patient"] == 3)]
    with pytest.raises(PolicyError, match=f"S0.*{rule}"):
        model_of(table, fs.Policy()).fit()


def test_a_site_may_be_one_group_if_the_column_names_it():
    table = visits()
    assert model_of(table, formula="y ~ x + (1 | patient) + (1 | site)").fit(masked=True).converged
    with pytest.raises(PolicyError, match="at least 5 clusters by 'ward'"):
        model_of(table.assign(ward="one"), formula="y ~ x + (1 | patient) + (1 | ward)").fit(masked=True)


@pytest.mark.parametrize("t", [-1.0 / 7.0 + 1e-6, -0.3])
def test_a_negative_variance_would_magnify_groups_of_one_size(t):
    with pytest.raises(MessageError, match="positive semidefinite"):
        ask(model_of(visits(), fs.Policy()), [t])


def test_coefficients_that_give_weight_to_few_rows():
    """With a large coefficient only the rows near the cut have weight; the site releases nothing."""
    rng = np.random.default_rng(2)
    table = visits(target=4).assign(z=lambda d: (rng.random(len(d)) < 0.5).astype(int))
    model = model_of(table, formula="z ~ x + (1 | patient)", family=sm.families.Binomial())
    session = model._open_session("mixed", False)
    newton = MixedNewton(session, model.formula.random, model.distribution)
    arrays = {"beta": np.array([0.0, 3000.0]), "factor": np.array([0.0]), "basis": np.ones(1)}
    arrays |= {"dispersion": np.array(1.0), "curvature": np.array(True)}

    def protocol():
        yield from newton.open()
        return (yield session.request_all("sum_scores", arrays))

    assert model.fit(masked=False).converged  # products of groups and means of rows are examined apart
    try:
        replies = model.engine.run(protocol(), Ledger())
    except FedstatError as error:
        assert isinstance(error, PolicyError)
    else:
        for reply in replies:
            assert not reply.arrays["spread"] and not reply.arrays["score"].any()


def test_more_points_than_a_fit_needs_single_out_rows_of_a_small_site():
    """Each point adds vectors of means; with as many as rows they single out rows, and the site refuses."""
    rng = np.random.default_rng(4)
    table = visits(patients=8, target=4)
    table["z"] = (rng.random(len(table)) < 0.5).astype(int)
    model = model_of(table, formula="z ~ x + (1 | patient)", family=sm.families.Binomial())
    session = model._open_session("mixed", False)
    newton = MixedNewton(session, model.formula.random, model.distribution)

    def protocol():
        yield from newton.open()
        for _ in range(40):
            arrays = {"beta": rng.normal(size=2), "factor": rng.random(1), "basis": np.ones(1)}
            arrays |= {"dispersion": np.array(1.0), "curvature": np.array(False)}
            yield session.request_all("sum_scores", arrays)

    with pytest.raises(PolicyError, match="largest share"):
        model.engine.run(protocol(), Ledger())


NEGATIVE_BINOMIAL = sm.families.NegativeBinomial(alpha=1.0)
KEPT = fs.Policy.strict(formulas="any", reasons="sent", small_differences="refuse")


def relapses(n_patients=40, n_visits=6):
    """Patients of four sites with as many visits each; x is public."""
    rng = np.random.default_rng(5)
    patient = np.repeat(np.arange(4 * n_patients), n_visits)
    table = pd.DataFrame({"patient": patient, "x": rng.normal(size=len(patient)).round(2)})
    level = 0.8 * rng.normal(size=4 * n_patients)[patient] + 0.5 * table["x"]
    table["y"] = (10.0 + level + rng.normal(size=len(patient))).round(2)
    table["z"] = (rng.random(len(patient)) < 1.0 / (1.0 + np.exp(-level))).astype(int)
    return table.assign(site="S" + (table["patient"] // n_patients).astype(str))


def fits_with_and_without(formula, left_out, policy=KEPT, **settings):
    """Two sessions of an analyst: all rows, and those that have a value of a further column."""
    table = relapses()
    table["kept"] = np.where(left_out(table), np.nan, 1.0)
    model = model_of(table, policy, formula, **settings).fit()
    partition = model.model.partition
    again = fs.FederatedMixed.from_formula(formula, partition, complete=["kept"], **settings).fit()
    return model, again, table[table["kept"].isna()]


def products_in_units(fit):
    """Return (X, y)'(X, y) in the units of the data, (p + 1, p + 1), from the sums of a fit."""
    record = fit._record.fit
    back = np.eye(len(record.params) + 1)
    back[:-1, :-1] = np.linalg.inv(record.null.units)
    back[0, -1] = record.mean
    return back.T @ record.null.products[0] @ back


@pytest.mark.parametrize("visits", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"family": sm.families.Binomial()}])
def test_a_session_without_few_visits_is_refused(visits, settings):
    """Sums, scores and log-likelihoods of both sessions would differ by those of these visits."""
    few = visits
    with pytest.raises(PolicyError, match="differ in fewer than 5 rows"):
        fits_with_and_without(
            f"{'z' if settings else 'y'} ~ x + (1 | patient)",
            lambda table: (table["patient"] == 3) & (table.groupby("patient").cumcount() < few),
            **settings,
        )


def test_a_patient_with_many_visits_is_the_difference_of_two_sessions():
    """Rules count rows. Products are exact sums, so their difference is that of the patient's visits."""
    with pytest.raises(PolicyError, match="differ in fewer than 7 rows"):
        fits_with_and_without(
            "y ~ x + (1 | patient)", lambda table: table["patient"] == 3, replace(KEPT, min_count=7)
        )
    both = fits_with_and_without("y ~ x + (1 | patient)", lambda table: table["patient"] == 3)
    first, second = map(products_in_units, both[:2])
    own = both[2]
    (n, _, total), (_, _, cross), (_, _, square) = first - second
    assert n == pytest.approx(6.0) and total == pytest.approx(own["y"].sum(), abs=1e-6)
    assert cross == pytest.approx(own["x"] @ own["y"], abs=1e-6)
    assert square == pytest.approx(own["y"] @ own["y"], abs=1e-5)


def test_the_difference_of_log_likelihoods_reveals_how_often_a_patient_relapsed():
    """At the mean of both estimates the patient's log-likelihood is the difference, up to third order.

    The analyst knows the dates, and compares all outcomes. The summaries of two fits are enough.
    """
    events = relapses().groupby("patient")["z"].sum()
    settings = {"family": sm.families.Binomial(), "nagq": 9}
    with pytest.raises(PolicyError, match="single out fewer than 3 rows: 'z'"):
        fits_with_and_without(
            "z ~ x + (1 | patient)", lambda table: table["patient"] == events.eq(2).idxmax(), **settings
        )
    first, second, own = fits_with_and_without(
        "z ~ x + (1 | patient)", lambda table: table["patient"] == events.eq(3).idxmax(), **settings
    )
    beta = (first.params + second.params).to_numpy() / 2.0
    sd = (first.variances["std_dev"].iloc[0] + second.variances["std_dev"].iloc[0]) / 2.0
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    eta = (beta[0] + beta[1] * own["x"].to_numpy())[:, None] + sd * nodes

    def log_likelihood(z):
        return np.log(
            np.exp((z[:, None] * eta - np.logaddexp(0.0, eta)).sum(axis=0)) @ weights / weights.sum()
        )

    outcomes = np.array(np.meshgrid(*[[0, 1]] * 6)).reshape(6, -1).T
    apart = np.abs([log_likelihood(z) - (first.llf - second.llf) for z in outcomes])
    assert outcomes[apart.argmin()].sum() == own["z"].sum()
    assert log_likelihood(own["z"].to_numpy()) == pytest.approx(first.llf - second.llf, abs=5e-3)


@pytest.mark.parametrize("masked", [True, False])
def test_log_likelihoods_at_several_dispersions_count_the_rows_of_each_value(masked):
    """Without effects, a negative binomial log-likelihood is a sum of functions of the response alone.

    Sums that are masked among at least three sites are not examined: the counts are those of all sites.
    """
    rng = np.random.default_rng(3)
    table = relapses().assign(z=lambda t: rng.negative_binomial(2, 0.5, len(t)).clip(0, 9))
    table.loc[3, "z"] = 14
    model = model_of(table, KEPT if masked else CAREFUL, "z ~ x + (1 | patient)", family=NEGATIVE_BINOMIAL)
    session = model._open_session("mixed", masked)
    newton = MixedNewton(session, model.formula.random, model.distribution)
    alphas, values = np.geomspace(0.02, 60.0, 24), []

    def protocol():
        yield from newton.open()
        yield from newton.evaluate(np.zeros(1), False)
        for alpha in alphas:
            found = yield from newton.score(np.array([0.0, 0.0, 0.0, np.log(alpha)]), False)
            values.append(found.deviance / -2.0)

    if not masked:
        with pytest.raises(PolicyError, match="single out fewer than 5"):
            model.engine.run(session.hide(protocol()), Ledger())
        assert len(values) < 8
        return
    model.engine.run(session.hide(protocol()), Ledger())
    functions = stats.nbinom.logpmf(np.arange(16), 1.0 / alphas[:, None], 1.0 / (1.0 + alphas[:, None]))
    counts = optimize.nnls(functions, np.array(values), maxiter=100_000)[0]
    assert counts.round().tolist() == np.bincount(table["z"], minlength=16).tolist()


@pytest.mark.parametrize(("visits", "refused"), [(1, True), (4, True), (6, False)])
@pytest.mark.parametrize("change", ["add", "remove", "correct"])
def test_fits_before_and_after_a_site_changes_few_visits(change, visits, refused):
    """The history counts records: fewer than five are refused, six visits of one patient are not."""
    table = relapses().assign(record=lambda t: np.arange(len(t)))
    own = table.index[(table["patient"] == 3)][:visits]
    after = table.copy()
    if change == "correct":
        after.loc[own, "y"] += 1.0
    elif change == "add":
        table = table.drop(index=own)
    else:
        after = after.drop(index=own)

    def keyed(frame):
        here = frame[frame["site"] == "S0"].reset_index(drop=True)
        found = FrameTable(here.drop(columns=["site", "record"]))
        found.key_columns = here[["record"]]
        return found

    partition = fs.ClientPartition.from_frame(table, by="site", policy=KEPT)
    site, fits = partition.sites["S0"], []
    for frame in (table, after):
        site.change_records(keyed(frame), lambda *_: "")
        if frame is after and refused:
            with pytest.raises(PolicyError, match="differencing"):
                fs.FederatedMixed.from_formula("y ~ x + (1 | patient)", partition).fit()
            return
        fit = fs.FederatedMixed.from_formula("y ~ x + (1 | patient)", partition).fit()
        fits.append(products_in_units(fit))
    total = relapses().loc[own, "y"].sum()
    expected = {"correct": 6.0, "add": total, "remove": -total}[change]
    assert (fits[1] - fits[0])[0, -1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", [NEGATIVE_BINOMIAL, sm.families.Gamma(sm.families.links.Log())])
def test_functions_of_the_response_that_are_examined_are_a_density_and_its_derivative(family):
    distribution = DistributionSpec.of(family)
    rows = SimpleNamespace(y=np.array([1.0, 2.0, 5.0, 9.0]), w=np.ones(4))
    mu, density = np.exp([0.3, 0.1, 1.0, 2.0]), {}
    for shape in (1.7 - 1e-6, 1.7, 1.7 + 1e-6):
        if distribution.name == "Gamma":
            means = rows.y + shape - shape * rows.y / mu
        else:
            means = (rows.y + shape) * mu / (mu + shape)
        density[shape] = row_vectors(distribution, shape, rows, means)
    if distribution.name == "Gamma":
        expected = stats.gamma.logpdf(rows.y, 1.7, scale=mu / 1.7)
    else:
        expected = stats.nbinom.logpmf(rows.y, 1.7, 1.7 / (1.7 + mu)) + special.gammaln(rows.y + 1.0)
    np.testing.assert_allclose(density[1.7][:, 1], expected, rtol=1e-12)
    low, high = density[1.7 - 1e-6][:, 1], density[1.7 + 1e-6][:, 1]
    np.testing.assert_allclose(density[1.7][:, 2], (high - low) / 2e-6, rtol=1e-6)
