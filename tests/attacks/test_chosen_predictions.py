"""Predictions chosen by the analyst: sums of their losses reveal labels and responses of single entities.

Errors of predictions are linear in the response, and the weights are the chosen predictions. Weights that
differ by powers of two make one sum of many labels, and nothing of it looks like few rows. A site that
answers evaluations averages what it is handed over cells of entities.
"""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import DescriptionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.vertical_design import design_request
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import load_families
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.conformal import residual_edges
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.laser.request import OutcomeReply
from fedstat.models.vertical.prediction.evaluation import average_in_groups, group_codes

N, TOLD = 200, 20
RNG = np.random.default_rng(5)
X = RNG.normal(size=(N, 3))
LABELS = (RNG.random(N) < expit(X[:, 0] - X[:, 2])).astype(float)
INCOME = 20.0 + 5.0 * X[:, 1] + 3.0 * RNG.normal(size=N)
TABLES = {
    "bank": pd.DataFrame({"id": np.arange(N), "y": LABELS, "income": INCOME, "b": X[:, 0]}),
    "shop": pd.DataFrame({"id": np.arange(N), "s": X[:, 1]}),
    "telecom": pd.DataFrame({"id": np.arange(N), "t": X[:, 2]}),
}
POWERS = np.where(np.arange(N) < TOLD, 2.0 ** np.minimum(np.arange(N), TOLD), 0.0)
load_families()
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


def sites(policy):
    return fs.ClientPartition.from_frames(TABLES, on="id", policy=policy)


def ask_bank(part, family, step, column, text="", **arrays):
    """Open a response at the bank, and ask a step about it, as a coordinator may that predicts nothing."""

    def requester():
        to = SecureProductSession(family, part._new_session(), None)
        yield [design_request("bank", "open_response", to.session, {"response": column, "columns": [column]})]
        (reply,) = yield [to.request("bank", step, text, **arrays)]
        return reply.arrays

    return part.engine.run(requester(), Ledger())


def scored(part, p):
    """Counts of the bank about probabilities p of its labels."""
    return ask_bank(
        part,
        "laser",
        "score",
        "y",
        to_json(OutcomeReply((0.0, 1.0), (1, 1))),
        predicted=np.column_stack([1.0 - p, p]),
        use=np.ones(N, dtype=bool),
        code=np.zeros(N, dtype=np.int64),
        units=np.array([0.0, 1.0, 1.0]),
    )


def bits(total):
    return np.array([round(total) >> k & 1 for k in range(TOLD)], dtype=float)


def labels_from_losses(part):
    """The sum of losses is that of log(1 + exp(d)) - y d."""
    d = 1e-6 * POWERS
    loss = scored(part, expit(d))["losses"][0, 0]
    return bits((np.log1p(np.exp(d)).sum() - loss) / 1e-6)


def labels_from_expected(part):
    """The sum of probabilities of those that have the event."""
    reported = scored(part, 0.5 + 1e-7 * POWERS)
    events = reported["bins"][1].sum()
    return bits((reported["expected"][1].sum() - 0.5 * events) / 1e-7)


def labels_from_classes(part):
    """One entity alone is on the other side of one half, and nearly as probable as all."""
    found = []
    for i in range(TOLD):
        reported = scored(part, np.where(np.arange(N) == i, 0.501, 0.499))
        found.append(reported["confusion"][1, 1])
    return np.array(found)


def judged(part, p, column="y", joint=("Binomial", "Logit")):
    """The same of a regression over columns."""
    return ask_bank(
        part,
        "vfem",
        "judge_predictions",
        column,
        DistributionSpec(*joint).to_json(),
        predicted=p,
        use=np.ones(N, dtype=bool),
        code=np.zeros(N, dtype=np.int64),
        groups=np.array(1),
        center=np.array(0.0),
        width=np.array(1.0),
    )


def labels_from_squares(part):
    """Squared errors are those of one half, less twice the product of label and deviation."""
    d = 1e-7 * POWERS
    squares = judged(part, 0.5 + d)["squares"][0]
    return bits((0.25 * N + (d + d**2).sum() - squares) / 2e-7)


@pytest.mark.parametrize(
    "attack", [labels_from_losses, labels_from_expected, labels_from_classes, labels_from_squares]
)
def test_labels_follow_from_what_is_counted_of_chosen_probabilities(attack):
    np.testing.assert_array_equal(attack(sites("open")), LABELS[:TOLD])


@pytest.mark.parametrize("attack", [labels_from_losses, labels_from_expected, labels_from_squares])
def test_and_do_not_where_cells_are_counted(attack):
    found = attack(sites(Policy(evaluation="once")))
    assert (found == LABELS[:TOLD]).mean() < 0.8


def test_an_answer_is_the_same_for_labels_that_are_exchanged_within_a_cell():
    p = expit(1e-6 * POWERS)
    places = np.log(np.column_stack([1.0 - p, p]) / np.column_stack([p, 1.0 - p]))
    mixed = [c for c in group_codes(places, np.arange(N), 5) if 0.0 < LABELS[c].mean() < 1.0]
    moved = LABELS.copy()
    for cell in mixed:
        moved[cell] = LABELS[cell][::-1]
    assert (moved != LABELS).sum() > 20
    answers = []
    for labels in (LABELS, moved):
        tables = {**TABLES, "bank": TABLES["bank"].assign(y=labels)}
        part = fs.ClientPartition.from_frames(tables, on="id", policy=Policy(evaluation="once"))
        answers.append(scored(part, p))
    for name in answers[0]:
        np.testing.assert_allclose(answers[0][name], answers[1][name], rtol=1e-13, err_msg=name)


def test_classes_that_the_analyst_leaves_out_make_no_cells():
    """Otherwise the entities of one class could be identified by subtracting the others."""
    part = sites(Policy(evaluation="once"))
    p = expit(1e-6 * POWERS)
    reported = ask_bank(
        part,
        "laser",
        "score",
        "y",
        to_json(OutcomeReply((1.0, 7.0), (1, 1))),
        predicted=np.column_stack([p, 1.0 - p]),
        use=np.ones(N, dtype=bool),
        code=np.zeros(N, dtype=np.int64),
        units=np.array([0.0, 1.0, 1.0]),
    )
    cell_means = average_in_groups(part.sites["bank"]._data, p, np.zeros(N, dtype=np.int64))
    assert reported["expected"].sum() == pytest.approx((1.0 - cell_means)[LABELS == 1.0].sum(), rel=1e-9)


def errors_of(part, predicted):
    use = np.ones(N, dtype=bool)
    return ask_bank(part, "vfem", "prediction_errors", "income", use=use, predicted=predicted)["sums"]


def income_from_errors(part, i):
    """Squared errors at two levels of one prediction, combined with those at one level from another fit."""
    _, errors, deviations = errors_of(part, np.full(N, 15.0) + (np.arange(N) == i))
    at_one_level = deviations + N * (INCOME.mean() - 15.0) ** 2
    return 15.0 + (at_one_level - errors + 1.0) / 2.0


def test_a_response_follows_from_squared_errors_of_chosen_predictions():
    part = sites("open")
    for i in (3, 70, 150):
        assert income_from_errors(part, i) == pytest.approx(INCOME[i], abs=1e-6)


def income_from_an_evaluation(part, i):
    """The same from the squared errors of an evaluation."""
    reported = judged(part, np.full(N, 15.0) + (np.arange(N) == i), "income", ("Gaussian", "Identity"))
    at_one_level = reported["spread"][0] + N * (reported["bins"][1].sum() / N - 15.0) ** 2
    return 15.0 + (at_one_level - reported["squares"][0] + 1.0) / 2.0


def income_from_a_deviance(part, i):
    """The loss of a count is linear in its log mean; a constant prediction gives the remaining term."""
    reported = judged(part, np.where(np.arange(N) == i, 3.0 * np.e, 3.0), "income", ("Poisson", "Log"))
    (model, null), total = reported["deviance"], reported["bins"][1].sum()
    logs = null / 2.0 + total * np.log(total / N)  # sum of y log y
    return logs - total * (np.log(3.0) + 1.0) + 3.0 * (N - 1.0 + np.e) - model / 2.0


@pytest.mark.parametrize("attack", [income_from_an_evaluation, income_from_a_deviance])
def test_nor_does_an_evaluation_reveal_a_number_where_predictions_are_averaged(attack):
    part = sites("open")
    for i in (3, 70, 150):
        assert attack(part, i) == pytest.approx(INCOME[i], abs=1e-6)
    once = [sites(Policy(evaluation="once")) for _ in range(8)]
    wrong = [abs(attack(part, 25 * k) - INCOME[25 * k]) for k, part in enumerate(once)]
    assert np.median(wrong) > 1.0
    with pytest.raises(DescriptionError, match='evaluation = "any"'):
        judged(once[0], np.full(N, 15.0), "income", ("Gaussian", "Identity"))


def test_and_does_not_where_predictions_are_averaged():
    once = [sites(Policy(evaluation="once")) for _ in range(8)]
    wrong = [abs(income_from_errors(part, 25 * k) - INCOME[25 * k]) for k, part in enumerate(once)]
    assert np.median(wrong) > 1.0  # the attacker obtains the mean of six entities
    part = once[0]
    with pytest.raises(DescriptionError, match='evaluation = "any"'):
        errors_of(part, np.full(N, 15.0))


def test_an_evaluation_that_is_one_is_as_good_by_cells():
    model = fs.LASER.from_formula("y ~ b + s + t", sites("open"), hidden=(6,), width=4)
    fitted = model.fit(epochs=20, batch_size=50, learning_rate=0.02, masked=False, calibration=0.0)
    found = [fitted.evaluate(sites(policy)) for policy in ("open", Policy(evaluation="once"))]
    said = ["averaged over 5 or more entities" in " ".join(str(one.summary()).split()) for one in found]
    assert said == [False, True]
    row, same = (one.to_frame().iloc[0] for one in found)
    np.testing.assert_allclose(same, row, atol=0.02)
    assert row["auc"] > 0.7
    columns = "income ~ b + s + t"
    result = fs.VFEMRegression.from_formula(columns, sites("open")).fit()
    r2, by_cells = (result.prediction_rsquared(sites(p)) for p in ("open", Policy(evaluation="once")))
    # Within cells of six the predictions have 0.003 of the variation: twice that of their products with
    # the errors is 0.004 of it.
    assert by_cells == pytest.approx(r2, abs=0.012) and r2 > 0.5


def test_a_normal_response_is_evaluated_by_squares_alone():
    part = sites("open")
    model = fs.LASER.from_formula("income ~ b + s + t", part, outcome="normal", hidden=(6,), width=4)
    fitted = model.fit(epochs=3, batch_size=50, learning_rate=0.02, masked=False)
    scores = fitted.evaluate(part).scores
    assert scores.bins.sum() == N and np.count_nonzero(scores.bins) == len(scores.sets)
    assert np.count_nonzero(fitted.calibration.scores.bins) > len(scores.sets)


def test_losses_of_a_fit_are_asked_where_numbers_for_each_entity_leave_alone():
    """The gradients of a fit reveal every label; other steps that reveal labels are answered only there."""
    part = sites(Policy(order="declared", per_entity=0))
    with pytest.raises(DescriptionError, match="order"):
        ask_bank(part, "laser", "judge", "y", **batch())


def batch():
    one = np.ones(1, dtype=np.int64)
    return {
        "outputs": np.zeros((1, N, 4)),
        "rows": np.arange(N),
        "code": np.zeros(N, dtype=np.int64),
        "weights": np.ones((1, 1)),
        "members": np.ones((1, 1), dtype=bool),
        "sizes": one,
        "head": 0 * one,
    }


def incomes_from_residuals(part, i):
    """The prediction of one entity is ten standard deviations away: it alone has the largest residual."""
    far = INCOME.mean() + 60.0
    counts = ask_bank(
        part,
        "vfem",
        "residual_counts",
        "income",
        use=np.ones(N, dtype=bool),
        predicted=np.where(np.arange(N) == i, far, INCOME.mean()),
        code=np.zeros(N, dtype=np.int64),
        groups=np.array(1),
        unit=np.array(6.0),
    )["counts"][0]
    assert counts.sum() == N and ((counts == 0) | (counts >= 5)).all()
    return far - 6.0 * np.exp(residual_edges()[np.flatnonzero(counts)[-1]])


def test_residuals_are_not_counted_where_one_evaluation_is_allowed():
    """Merged bins do not hide the largest residual, which reveals a response within the width of a bin."""
    for i in (3, 70, 150):
        assert incomes_from_residuals(sites("open"), i) == pytest.approx(INCOME[i], abs=2.0)
        with pytest.raises(DescriptionError, match="count residuals"):
            incomes_from_residuals(sites(Policy(evaluation="once")), i)
