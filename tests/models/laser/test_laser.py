"""Split networks over sites: exchange, sets of clients, predictions."""

from itertools import permutations

import numpy as np
import pandas as pd
import pytest
from laser_cases import SITES, customers, model, partition

import fedstat as fs
from fedstat.errors import EngineError, EstimationError, ModelError, NotAvailableError
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.kernels.split_networks import log_loss
from fedstat.models.laser import protocol, response_steps
from fedstat.models.laser.networks import flip_matrix, softmax
from fedstat.models.laser.response_steps import randomized
from fedstat.models.laser.scoring import most_probable

QUICK = {"epochs": 4, "batch_size": 128, "learning_rate": 0.02}


@pytest.fixture(scope="module")
def part():
    return partition()


@pytest.fixture(scope="module")
def result(part):
    return model(part).fit(**QUICK, masked=False)


def auc(frame, tables):
    y = tables["bank"].set_index("id")["y"].reindex(frame.index).to_numpy()
    p = frame[1.0].to_numpy()
    ranks = pd.Series(p).rank().to_numpy()
    n1 = y.sum()
    return (ranks[y == 1].sum() - n1 * (n1 + 1) / 2) / (n1 * (len(y) - n1))


def same_networks(a, b, atol):
    for k in a._record.fitted.sites:
        np.testing.assert_allclose(
            a._record.fitted.trained.networks[k], b._record.fitted.trained.networks[k], rtol=0, atol=atol
        )
    np.testing.assert_allclose(
        a._record.fitted.trained.heads, b._record.fitted.trained.heads, rtol=0, atol=atol
    )


@pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")
def test_masked_sums_give_what_clear_outputs_give_for_one_set():
    part = partition(400, missing=0.0)
    fits = [model(part).fit(method="standard", masked=how, **QUICK) for how in (False, True)]
    same_networks(*fits, atol=1e-12)


@pytest.mark.parametrize(("masked", "listed"), [(False, 6), (False, 2), (True, 6)])
def test_order_of_sites_does_not_matter(masked, listed, monkeypatch):
    """Where all sets are taken, and where some are drawn."""
    monkeypatch.setattr(protocol, "MAX_LISTED", listed)
    fits = [model(partition(order=one)).fit(**QUICK, masked=masked) for one in list(permutations(SITES))[::2]]
    for fit in fits[1:]:
        same_networks(fits[0], fit, atol=1e-12)
        found, expected = (
            one.calibration.to_frame().sort_values(["n", "log_loss"]) for one in (fit, fits[0])
        )
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_a_batch_moves_networks_as_pooled_descent_does():
    """One batch, all sets: Adam's first step goes against numerical derivatives of the pooled loss."""
    tables = customers(60, missing=0.4)
    part = fs.ClientPartition.from_frames(tables, on="id")
    options = {"epochs": 1, "batch_size": 1000, "validation": 0.0, "calibration": 0.0, "decay": 0.0}
    # Adam's first step is the sign of the gradient, so two learning rates show where parameters began.
    fits = [model(part).fit(masked=False, learning_rate=rate, **options) for rate in (1e-3, 2e-3)]
    one, two = (fit._record.fitted for fit in fits)
    blocks = {k: tables[k].set_index("id").drop(columns="y", errors="ignore") for k in SITES}
    Z = {k: (b - b.mean()) / b.std(ddof=0) for k, b in blocks.items()}
    y = tables["bank"].set_index("id")["y"]

    def loss(networks, heads):
        total = 0.0
        for entity in y.index:
            outputs = {}
            for k in SITES:
                if entity in Z[k].index:
                    theta, x = networks[k][0], Z[k].loc[entity].to_numpy()
                    h = np.maximum(theta[:18].reshape(6, 3) @ x + theta[18:24], 0.0)
                    outputs[k] = theta[24:48].reshape(4, 6) @ h + theta[48:]
            names = list(outputs)
            for s in range(1, 1 << len(names)):
                mean = np.mean([outputs[k] for i, k in enumerate(names) if s >> i & 1], axis=0)
                score = heads[0][:8].reshape(2, 4) @ mean + heads[0][8:]
                total -= np.log(softmax(score[:, None])[int(y[entity]), 0])
        return total / len(y)

    start = {k: 2.0 * one.trained.networks[k] - two.trained.networks[k] for k in SITES}
    head = 2.0 * one.trained.heads - two.trained.heads
    assert fits[0].history["loss"].iloc[0] == pytest.approx(loss(start, head), rel=1e-10)
    for k in SITES:
        for j in (0, 20, 30, 49):
            up, down = ({**start, k: start[k] + e * np.eye(52)[None, j]} for e in (1e-5, -1e-5))
            slope = (loss(up, head) - loss(down, head)) / 2e-5
            if abs(slope) > 1e-5:
                assert np.sign(one.trained.networks[k][0, j] - start[k][0, j]) == -np.sign(slope)


def test_a_site_that_left_is_one_that_never_had_the_entity(result):
    tables = customers(200, seed=5, missing=0.0)
    gone = {k: t for k, t in tables.items() if k != "telecom"}
    absent = {**tables, "telecom": tables["telecom"].iloc[:2]}
    without = result.predict_proba(fs.ClientPartition.from_frames(gone, on="id"))
    never = result.predict_proba(fs.ClientPartition.from_frames(absent, on="id"))
    np.testing.assert_allclose(without.iloc[2:], never.iloc[2:], atol=1e-12)
    assert abs(without.iloc[0, 0] - never.iloc[0, 0]) > 1e-6


def test_masked_predictions_are_those_of_clear_outputs(result):
    """Three sites are asked under masks, two in clear; entities that the first lacks among them."""
    tables = customers(300, seed=6, missing=0.5)
    tables["bank"] = tables["bank"].iloc[100:]
    found = result.predict_proba(fs.ClientPartition.from_frames(tables, on="id"))
    fitted = result._record.fitted
    for entity in (3, 120, 250):
        outputs = []
        for k in SITES:
            rows = tables[k].set_index("id").drop(columns="y", errors="ignore")
            if entity in rows.index:
                theta = fitted.trained.networks[k][0]
                x = (rows.loc[entity].to_numpy() - fitted.trained.shift[k]) / fitted.trained.scale[k]
                h = np.maximum(theta[:18].reshape(6, 3) @ x + theta[18:24], 0.0)
                outputs.append(theta[24:48].reshape(4, 6) @ h + theta[48:])
        score = (
            fitted.trained.heads[0][:8].reshape(2, 4) @ np.mean(outputs, axis=0) + fitted.trained.heads[0][8:]
        )
        np.testing.assert_allclose(found.loc[entity], softmax(score[:, None])[:, 0], atol=1e-12)


@pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")
@pytest.mark.parametrize("method", ["laser", "local", "standard", "ensemble", "combinatorial", "vfedtrans"])
def test_every_method_learns(method):
    part, tables = partition(1500, missing=0.1), customers(1500, seed=9, missing=0.0)
    fitted = model(part).fit(method=method, epochs=8, batch_size=64, learning_rate=0.02, masked=False)
    P = fitted.predict_proba(fs.ClientPartition.from_frames(tables, on="id"))
    assert auc(P, tables) > (0.7 if method in ("local", "ensemble") else 0.8)
    assert fitted.history["loss"].iloc[-1] < fitted.history["loss"].iloc[0]


@pytest.mark.parametrize(("kind", "heads"), [("multiclass", "one"), ("normal", "one"), ("binary", "site")])
def test_responses_and_heads(kind, heads):
    part, other = partition(1200, kind=kind), partition(800, seed=3, kind=kind)
    fitted = model(part, outcome=kind, heads=heads).fit(epochs=10, batch_size=64, learning_rate=0.02)
    frame = fitted.evaluate(other).to_frame()
    full = frame.loc["bank + shop + telecom"]
    if kind == "normal":
        assert full["rsquared"] > 0.5 > frame.loc["bank"]["rsquared"] - 0.1
        point = fitted.predict(other)
        assert point.notna().all() and abs(point.mean() - 12) < 3
    else:
        assert full["accuracy"] > frame.loc["bank", "accuracy"]
        P = fitted.predict_proba(other)
        np.testing.assert_allclose(P.sum(axis=1), 1.0)
        assert set(fitted.predict(other)) == set(fitted.classes)


def test_evaluation_is_that_of_the_rows(result):
    tables = customers(600, seed=8, missing=0.0)
    other = fs.ClientPartition.from_frames(tables, on="id")
    frame, P = result.evaluate(other).to_frame(), result.predict_proba(other)
    row, y = frame.loc["bank + shop + telecom"], tables["bank"]["y"].to_numpy()
    assert row["n"] == 600
    assert row["accuracy"] == pytest.approx((P.to_numpy().argmax(axis=1) == y).mean())
    assert row["log_loss"] == pytest.approx(-np.log(P.to_numpy()[np.arange(600), y.astype(int)]).mean())
    assert row["brier"] == pytest.approx(((P[1.0] - y) ** 2).mean())
    assert row["auc"] == pytest.approx(auc(P, tables), abs=3e-3)  # bins of few rows are merged
    assert result.evaluate(other).evaluation().n.sum() == 600
    expected = result.evaluate(other).evaluation().expected.sum()
    assert expected == pytest.approx(P[1.0].sum(), rel=1e-9)


def test_shapley_values_add_up():
    fitted = model(partition(3000, missing=0.0)).fit(**QUICK, masked=False)
    calibration = fitted.calibration
    full = calibration.to_frame().loc["bank + shop + telecom", "auc"]
    assert calibration.values().sum() == pytest.approx(full - 0.5)
    assert fitted.sites()["value"].idxmax() == "bank"


@pytest.mark.parametrize("kind", ["binary", "normal"])
def test_sets_cover(kind):
    """On average over fits; each set of clients by itself."""
    covered = {}
    for seed in range(6):
        part = partition(2400, seed=seed, missing=0.4, kind=kind)
        tables = customers(1500, seed=100 + seed, missing=0.4, kind=kind)
        other = fs.ClientPartition.from_frames(tables, on="id")
        fitted = model(part, outcome=kind).fit(
            epochs=2, batch_size=256, learning_rate=0.02, calibration=0.5, masked=False, seed=seed
        )
        found = fitted.predict_set(other, alpha=0.2)
        y = tables["bank"].set_index("id")["y"].reindex(found.index).to_numpy()
        inside = (
            found.to_numpy()[np.arange(len(y)), y.astype(int)]
            if kind == "binary"
            else ((found["low"] <= y) & (y <= found["high"])).to_numpy()
        )
        have = np.array([np.isin(found.index, tables[k]["id"]) for k in SITES]).T
        for pattern in np.unique(have, axis=0):
            rows = (have == pattern).all(axis=1)
            covered.setdefault(tuple(pattern), []).append(inside[rows])
        assert "note" not in found.attrs
    for parts in covered.values():
        found = np.concatenate(parts)
        # Six calibrations of 150 entities or more: a standard deviation of .013, plus that of the rows.
        spread = np.hypot(0.013, np.sqrt(0.16 / len(found)))
        assert 0.8 - 3 * spread < found.mean() < 0.8 + 3 * spread + 0.02


def test_sets_by_label_and_small_sets(result):
    other = partition(500, seed=4, missing=0.0)
    both = result.predict_set(other, alpha=0.001)
    assert both.all(axis=None)
    assert "too few entities calibrate bank + shop + telecom" in both.attrs["note"]
    by_label = result.predict_set(other, alpha=0.2, conditional="label")
    assert by_label.to_numpy().mean() > result.predict_set(other, alpha=0.2).to_numpy().mean() - 0.2


def test_files_hold_the_networks(result, tmp_path):
    other = partition(100, seed=2)
    result.save(tmp_path / "networks.fed")
    again = fs.load(tmp_path / "networks.fed")
    pd.testing.assert_frame_equal(again.predict_proba(other), result.predict_proba(other))
    assert str(again.summary()) == str(result.summary())


def test_there_are_no_coefficients(result):
    assert "no standard errors" in repr(result.params)
    with pytest.raises(AttributeError, match="not identified"):
        result.params.index  # noqa: B018
    for look in (lambda: result.params["bank0"], lambda: list(result.params)):
        with pytest.raises(NotAvailableError, match="not identified"):
            look()
    text = str(result.summary(notes="all"))
    assert "There are no standard errors" in text and "learned the labels" in text


def test_methods_side_by_side(part):
    fits = {m: model(part).fit(method=m, **QUICK) for m in ("laser", "local")}
    compared = fs.compare(fits)
    table = compared.to_frame()
    assert list(table.loc["", "laser"].index) == [
        "No. Observations", "Entities Judged", "AUC", "Accuracy", "F1", "Log-Loss", "Rounds", "Traffic",
    ]  # fmt: skip
    # With masks one set for each: the number of entities is printed next to the figures.
    judged = table.loc[("", "Entities Judged")].astype(int)
    assert judged["laser"] < judged["local"] / 3
    assert "compare the results of evaluate()" in " ".join(str(compared).split())
    text = str(compared).splitlines()
    assert text[1].split() == ["laser", "local"] and len({len(line) for line in text[:3]}) == 1
    other = partition(500, seed=4)
    again = fs.compare({name: fit.evaluate(other) for name, fit in fits.items()}).to_frame()
    assert len(set(again.loc[("", "Entities Judged")])) == 1
    assert list(again.loc[""].index) == ["Entities Judged", "AUC", "Accuracy", "F1", "Log-Loss"]


def test_dry_run_of_rounds_is_what_a_fit_takes(part):
    fitting = model(part)
    expected = fitting.explain(**QUICK)
    fitted = fitting.fit(**QUICK)
    rounds = sum(low for _, (low, _, _) in expected.rounds)
    assert rounds + 1 == fitted.ledger.rounds  # the design was agreed on before
    assert "gradients of one batch" in str(expected) and "columns" in str(expected)


def record(monkeypatch):
    """Keep all asks and replies of what follows."""
    passed, plain = [], LocalEngine._round

    def kept(self, requests, ledger):
        replies = plain(self, requests, ledger)
        passed.extend(zip(requests, replies, strict=True))
        return replies

    monkeypatch.setattr(LocalEngine, "_round", kept)
    return passed


def test_labels_are_in_no_message(part, monkeypatch):
    passed = record(monkeypatch)
    model(part).fit(**QUICK)
    y = customers()["bank"]["y"].to_numpy()
    for _, reply in passed:
        for name, array in reply.arrays.items():
            assert array.dtype != np.float64 or array.shape != y.shape, name


def test_randomized_labels_have_the_likelihood_ratio_that_is_printed():
    for classes, epsilon in ((2, 0.5), (3, 1.0), (10, 2.0)):
        flip = flip_matrix(classes, epsilon)
        np.testing.assert_allclose(flip.sum(axis=1), 1.0)
        assert (flip.max(axis=0) / flip.min(axis=0)).max() == pytest.approx(np.exp(epsilon))


def test_the_corrected_loss_has_its_minimum_at_the_true_probabilities():
    """Its derivative by the scores vanishes there, on average over what may be recorded."""
    F = np.log(np.array([[0.2], [0.5], [0.3]]))
    flip, P = flip_matrix(3, 1.0), softmax(F)[:, 0]
    recorded = flip.T @ P
    gradient = sum(recorded[c] * log_loss(F, np.array([float(c)]), flip)[1][:, 0] for c in range(3))
    np.testing.assert_allclose(gradient, 0.0, atol=1e-15)


def test_label_privacy(part, monkeypatch):
    drawn = []

    def kept(labels, flip, draws):
        drawn.append((labels, randomized(labels, flip, draws)))
        return drawn[-1][1]

    monkeypatch.setattr(response_steps, "randomized", kept)
    fits = [model(part).fit(**QUICK, label_epsilon=1.0) for _ in range(2)]
    same_networks(*fits, atol=0.0)
    assert "change by exp(1) at most, and by exp(1) over all" in str(fits[1].summary(notes="all")).replace(
        "\n    ", " "
    )
    other = model(part).fit(**QUICK, label_epsilon=2.0)
    assert "exp(3) over all" in str(other.summary(notes="all")).replace("\n    ", " ")
    for fit, (true, recorded) in zip((*fits, other), drawn, strict=True):
        assert fit._record.fitted.trained.outcome.counts == tuple(np.bincount(recorded.astype(int)))
        np.testing.assert_array_equal(np.sort(true), np.sort(customers()["bank"]["y"]))
    # Draws outside of 7.5 standard deviations have a probability of 1e-13.
    for epsilon, (true, recorded) in zip((1.0, 1.0, 2.0), drawn, strict=True):
        for label in (0.0, 1.0):
            rows, flipped = (true == label).sum(), 1.0 / (1.0 + np.exp(epsilon))
            expected, deviation = rows * flipped, np.sqrt(rows * flipped * (1.0 - flipped))
            assert abs((recorded[true == label] != label).sum() - expected) < 7.5 * deviation


@pytest.mark.parametrize("masked", [False, True])
def test_a_training_that_was_broken_off_goes_on_to_the_bit(part, masked, tmp_path, monkeypatch):
    options = {**QUICK, "masked": masked, "epochs": 5}
    complete = model(part).fit(**options)
    plain, rounds = LocalEngine._round, []

    def killed(self, requests, ledger):
        rounds.append(len(requests))
        if sum(request.step == "judge" for request in requests) and len(rounds) > 20:
            raise EngineError("shop: did not answer")
        return plain(self, requests, ledger)

    with monkeypatch.context() as patched, pytest.raises(EngineError):
        patched.setattr(LocalEngine, "_round", killed)
        model(part).fit(**options, checkpoint=tmp_path / "training.fed")
    resumed = model(part).fit(**options, checkpoint=tmp_path / "training.fed")
    same_networks(complete, resumed, atol=0.0)
    np.testing.assert_array_equal(complete.history, resumed.history)
    assert resumed.ledger.rounds < complete.ledger.rounds
    with pytest.raises(ModelError, match="other data or arguments"):
        model(part).fit(**{**options, "seed": 3}, checkpoint=tmp_path / "training.fed")
    with pytest.raises(ModelError, match="other data or arguments"):
        model(part).fit(**options, label_epsilon=1.0, checkpoint=tmp_path / "training.fed")
    (tmp_path / "none.fed").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="not a file of a training"):
        model(part).fit(**options, checkpoint=tmp_path / "none.fed")


@pytest.mark.parametrize(
    ("options", "fit", "message"),
    [
        ({"outcome": "count"}, {}, "outcome: expected one of"),
        ({"hidden": 10}, {}, "hidden: expected units of layers"),
        ({"width": 0}, {}, "width"),
        ({}, {"masked": True, "method": "local"}, "adds up one network"),
        ({}, {"epochs": 0}, "epochs"),
        ({}, {"calibration": 1.5}, "calibration"),
        ({}, {"calibration": 0.6, "validation": 0.4}, "remain for training"),
        ({}, {"label_epsilon": -1.0}, "label_epsilon"),
    ],
)
def test_bad_arguments(part, options, fit, message):
    def run():
        return fs.LASER.from_formula("y ~ .", part, **options).fit(**fit)

    with pytest.raises((ModelError, EstimationError), match=message):
        run()


def test_bad_responses():
    tables = customers(300, kind="multiclass")
    part = fs.ClientPartition.from_frames(tables, on="id")
    with pytest.raises(fs.errors.DesignError, match=r"3 values .* use outcome='multiclass'"):
        model(part).fit(**QUICK)
    with pytest.raises(fs.errors.DesignError, match=r"300 values .* classes are 2 to 1000|values"):
        model(partition(300, kind="normal")).fit(**QUICK)


def test_balanced_classes_and_columns_as_they_are(part):
    """Weights of classes raise the rarer one's probability; raw columns have units of one."""
    usual = model(part).fit(**QUICK, masked=False)
    even = model(part).fit(**QUICK, masked=False, balanced=True)
    rare = int(np.argmin(usual._record.fitted.trained.outcome.counts))
    assert even.predict_proba(part).iloc[:, rare].mean() > usual.predict_proba(part).iloc[:, rare].mean()
    raw = model(part).fit(**QUICK, masked=False, standardize=False)
    assert all((scale == 1.0).all() for scale in raw._record.fitted.trained.scale.values())
    assert raw.calibration.to_frame()["n"].sum() > 0


def test_modules_in_the_place_of_networks(part):
    """A module of the same layers and parameters is trained as the network that it replaces."""
    torch = pytest.importorskip("torch")
    own = model(part).fit(
        epochs=1, batch_size=5000, validation=0.0, calibration=0.0, masked=False, learning_rate=1e-9
    )
    theta = torch.tensor(own._record.fitted.trained.networks["shop"][0])
    module = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).double()
    torch.nn.utils.vector_to_parameters(theta, module.parameters())
    plain = model(part).fit(**QUICK, masked=False)
    replaced = model(part, representations={"shop": module})
    fitted = replaced.fit(**QUICK, masked=False)
    same_networks(plain, fitted, atol=1e-5)
    same_networks(fitted, replaced.fit(**QUICK, masked=False), atol=0.0)
    other = partition(200, seed=12)
    np.testing.assert_allclose(fitted.predict_proba(other), plain.predict_proba(other), atol=1e-5)
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        model(part, representations={"shop": 3}).fit(**QUICK)
    with pytest.raises(fs.errors.FedstatError, match=r"expected \(2, 4\)"):
        model(part, representations={"shop": torch.nn.Linear(3, 2)}).fit(**QUICK)
    with pytest.raises(ModelError, match="nobody have no columns"):
        model(part, representations={"nobody": module})


def test_what_a_fit_lacks_is_said(part):
    fitted = model(part).fit(**QUICK, calibration=0.0)
    with pytest.raises(NotAvailableError, match=r"calibration=0\.2"):
        fitted.predict_set(part)
    assert fitted.sites()["value"].isna().all()
    assert "No values of sites: there are no calibration entities" in str(fitted.summary())


def test_values_that_are_missing_are_explained_with_a_remedy_that_works():
    """Few entities have the two sites without the response, and few responses are events."""
    rng, n = np.random.default_rng(1), 1500
    d = pd.DataFrame(rng.normal(size=(n, 3)), columns=list("abc")).assign(id=range(n))
    d["bad"] = (rng.random(n) < 1 / (1 + np.exp(2.0 - d["a"] - d["b"]))).astype(int)
    tax, court = rng.random(n) < 0.5, rng.random(n) < 0.3
    frames = {
        "Bank": d[["id", "bad", "a"]],
        "Tax": d.loc[tax, ["id", "b"]],
        "Court": d.loc[court, ["id", "c"]],
    }
    made = fs.LASER.from_formula("bad ~ .", fs.ClientPartition.from_frames(frames, on="id"))
    few, more = (made.fit(epochs=1, calibration=share) for share in (0.05, 0.5))
    text = " ".join(str(few.summary()).split())
    assert few.sites()["value"].isna().all() and "No values of sites: Shapley values need" in text
    assert ". Fit with a larger share of calibration entities (calibration=)." in text
    assert more.sites()["value"].notna().all() and "No values of sites" not in str(more.summary())


def test_equal_probabilities_are_drawn_at_random():
    """Where a method has no prediction, and in an even vote; classes that differ are not affected."""
    P = np.repeat([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]], 1000, axis=0)
    found = most_probable(P).reshape(3, 1000)
    assert abs(found[0].mean() - 0.5) < 0.06 and (found[1] == 1).all() and (found[2] == 0).all()
    thirds = most_probable(np.full((3000, 3), 1 / 3))
    assert (np.abs(np.bincount(thirds) - 1000) < 120).all()
    assert (most_probable(P) == most_probable(P)).all() and most_probable(np.zeros((0, 2))).shape == (0,)


@pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")
def test_the_standard_method_draws_the_class_of_incomplete_entities(part):
    """As published: half of them have either class, and their accuracy is that of chance."""
    fitted = model(part).fit(method="standard", **QUICK, masked=False)
    tables = customers(800, seed=8, missing=0.0)
    del tables["shop"]
    found = fitted.predict(fs.ClientPartition.from_frames(tables, on="id"))
    assert abs((found == 1.0).mean() - 0.5) < 0.07
    frame = fitted.evaluate(fs.ClientPartition.from_frames(tables, on="id")).to_frame()
    assert abs(frame["accuracy"].iloc[0] - 0.5) < 0.07
