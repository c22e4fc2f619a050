"""Bad input of split networks: errors that name site, column and remedy; the privacy of labels."""

import numpy as np
import pytest
from laser_cases import customers, model, partition

import fedstat as fs
from fedstat.errors import (
    DataWarning,
    DesignError,
    DisclosureWarning,
    EstimationError,
    ModelError,
)
from fedstat.models.laser import response_steps
from fedstat.models.laser.networks import flip_matrix

QUICK = {"epochs": 4, "batch_size": 128, "learning_rate": 0.02}


def from_tables(tables):
    return fs.ClientPartition.from_frames(tables, on="id")


def with_response(y, n=300, **given):
    tables = customers(n, **given)
    tables["bank"]["y"] = y
    return tables


@pytest.mark.parametrize("kind", ["binary", "normal"])
def test_one_class_only(kind):
    with pytest.raises(
        DesignError, match=r"bank: response 'y' (has 1 value|is constant) among the 300 entities.*choose"
    ):
        model(from_tables(with_response(1.0)), outcome=kind).fit(**QUICK)


def test_a_constant_column():
    tables = customers(300)
    tables["shop"]["shop1"] = 4.0
    with pytest.raises(DesignError, match=r"column 'shop1' at site 'shop' is constant.*Leave it out"):
        model(from_tables(tables))


def test_a_class_that_the_fit_did_not_have():
    fitted = model(partition(600)).fit(**QUICK)
    tables = customers(300, seed=3, missing=0.0, kind="multiclass")
    other = int((tables["bank"]["y"] == 2).sum())
    with pytest.warns(
        DataWarning, match=rf"{other} entities do not count: their 'y' at 'bank' is of a class"
    ):
        found = fitted.evaluate(from_tables(tables))
    assert found.to_frame()["n"].sum() == 300 - other


def test_a_step_that_is_too_long_is_named():
    with pytest.raises(
        EstimationError, match=r"not finite with a learning rate of 1e\+200; use a smaller one"
    ):
        model(partition(400)).fit(**{**QUICK, "learning_rate": 1e200})


def test_masks_of_two_sites():
    tables = {k: frame for k, frame in customers(300).items() if k != "telecom"}
    with pytest.warns(DisclosureWarning, match="two sites hides neither .* Add a third site"):
        model(from_tables(tables)).fit(**QUICK, masked=True)
    with pytest.raises(ModelError, match=r"received 1 sites .* Use masked=False"):
        model(from_tables({"bank": tables["bank"]})).fit(**QUICK, masked=True)


def test_modules_of_other_widths():
    torch = pytest.importorskip("torch")
    part = partition(300)
    for module, said in (
        (
            torch.nn.Linear(3, 2),
            r"module of 'shop' returns \(2, 2\) .* expected \(2, 4\); give its last layer",
        ),
        (
            torch.nn.Linear(5, 4),
            r"module of 'shop' does not run on \(rows, 3\).* give its first layer that width",
        ),
        (3, "expected a torch.nn.Module for 'shop', received int"),
    ):
        with pytest.raises(ModelError, match=said):
            model(part, representations={"shop": module}).fit(**QUICK)


# -- labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "epsilon"), [(2, 0.5), (3, 1.0), (5, 2.0)])
def test_what_is_recorded_has_the_likelihood_ratio_exp_epsilon(classes, epsilon):
    """Over all draws: the lengths of the intervals of a uniform draw that give each class."""
    flip = flip_matrix(classes, epsilon)
    ends = np.unique(np.r_[0.0, flip.cumsum(axis=1).ravel().clip(max=1.0), 1.0])
    middle, length = (ends[1:] + ends[:-1]) / 2, np.diff(ends)
    P = np.zeros((classes, classes))
    for label in range(classes):
        recorded = response_steps.randomized(np.full(len(middle), float(label)), flip, middle)
        np.add.at(P[label], recorded.astype(int), length)
    np.testing.assert_allclose(P.sum(axis=1), 1.0)
    assert (P.max(axis=0) / P.min(axis=0)).max() == pytest.approx(np.exp(epsilon), rel=1e-12)


def test_epochs_are_chosen_and_sets_calibrated_by_randomized_labels(monkeypatch):
    """Where all labels are recorded as the other one, nothing of a fit knows the true ones."""
    y = (np.random.default_rng(0).random(900) < 0.15) * 1.0
    part = from_tables(with_response(y, 900, missing=0.0))
    monkeypatch.setattr(response_steps, "randomized", lambda labels, flip, draws: 1.0 - labels)
    fitted = model(part).fit(**QUICK, masked=False, validation=0.3, calibration=0.3, label_epsilon=8.0)
    others, events = fitted.calibration.evaluation().n.sum(), fitted.calibration.evaluation().observed.sum()
    assert events > 0.75 * others
    history = fitted.history["validation"]
    assert history.iloc[-1] < history.iloc[0]


def test_the_account_adds_up_responses_of_the_same_entities():
    tables = customers(600)
    tables["bank"]["late"] = (np.random.default_rng(1).random(600) < 0.4) * 1.0
    part = from_tables(tables)
    for response, other, total in (("y", "late", "1"), ("late", "y", "3")):
        fitting = fs.LASER.from_formula(f"{response} ~ . - {other}", part, hidden=(6,), width=4)
        epsilon = 1.0 if response == "y" else 2.0
        assert f"randomized at epsilon {epsilon:g}" in " ".join(
            str(fitting.explain(**QUICK, label_epsilon=epsilon)).split()
        )
        assert "randomized at" not in str(fitting.explain(**QUICK))
        fitted = fitting.fit(**QUICK, label_epsilon=epsilon)
        said = " ".join(str(fitted.summary(notes="all")).split())
        assert f"by exp({epsilon:g}) at most, and by exp({total}) over all labels" in said


def test_few_batches_are_said_to_teach_little():
    study = model(partition(400))
    few = study.fit(batch_size=1024, epochs=2)
    assert str(few.notes[0]).startswith("NOT LEARNED")
    # By default there are batches enough of few entities, and something is learned.
    enough = study.fit()
    assert not str(enough.notes[0]).startswith("NOT LEARNED")
    assert enough.history["validation"].min() < 0.97 * few.history["validation"].min()


def test_the_summary_states_whose_predictions_it_shows_and_what_it_assumes():
    data = fs.datasets.make_blocks(300, seed=1)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    with pytest.warns(DataWarning, match="no site's columns"):
        fitted = fs.LASER.from_formula("y ~ .", partition, outcome="normal")
    result = fitted.fit(epochs=2, seed=0)
    assert "Predictions by set of sites (calibration entities)" in str(result.summary())
    kinds = result.diagnostics().set_index("kind")["note"]
    assert "covariate shift" in kinds["calibration"]
    best = result.history["validation"].idxmin()
    assert ("last_epoch" in kinds.index) == (best == 2)
