"""Folds of persons who are measured repeatedly."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DesignError, ModelError, PolicyError

SITES, PERSONS, TIMES = 3, 20, 8
RANDOM = np.random.default_rng(2)
PERSON = np.repeat(np.arange(SITES * PERSONS), TIMES)
X = RANDOM.normal(size=(SITES * PERSONS, 12))[PERSON]
"""Columns of a person, without an effect: they identify the person, and so predict the person's level."""
FRAME = (
    pd.DataFrame(X)
    .add_prefix("x")
    .assign(
        subject=[f"p{k}" for k in PERSON],
        site=np.repeat(["A", "B", "C"], PERSONS * TIMES),
        y=RANDOM.normal(size=SITES * PERSONS)[PERSON] + 0.3 * RANDOM.normal(size=len(PERSON)),
    )
)
LOOSE = fs.Policy(max_parameters=10.0, min_count=1)
TEXT = "y ~ " + " + ".join(f"x{j}" for j in range(12))


def model(frame=FRAME, labels=("subject",), **settings):
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=LOOSE)
    return fs.FedFunctionBoost.from_formula(TEXT, partition, labels=list(labels), **settings)


def test_rows_of_one_person_are_in_one_fold():
    found = model().fit(steps=150, select="cv", folds=("subject", 5), seed=4)
    moments = found._record.boosting.moments
    assert moments.folds == 5
    np.testing.assert_array_equal(moments.S[:, 0, 0], SITES * PERSONS // 5 * TIMES)
    # With as many persons as folds at one site, each fold's sum is that of one person.
    few = FRAME[FRAME["site"] == "A"][: 4 * TIMES]
    alone = model(few).fit(steps=5, folds=("subject", 4))._record.boosting.moments.y[:, 0]
    np.testing.assert_allclose(np.sort(alone), np.sort(few.groupby("subject")["y"].sum()), rtol=1e-12)
    assert dict(found._summary_left())["Steps by"] == "cross-validation, 5 folds of 'subject'"


def test_folds_of_rows_choose_more_steps_than_folds_of_persons_and_the_summary_warns():
    rows = model(labels=()).fit(steps=150, select="cv")
    persons = model().fit(steps=150, select="cv", folds="subject")
    assert rows.mstop > 100 > 20 > persons.mstop
    assert "column 'subject' looks like a person's number" in " ".join(str(rows.summary()).split())
    assert "looks like" not in str(persons.summary())
    # The loss on persons who took no part is that of a null model; on rows of known persons it seems less.
    assert rows.cv["loss"].min() < 0.95 * persons.cv["loss"].min()


def test_a_loss_with_scores_has_folds_of_persons_too():
    found = model(loss="huber", delta=1.0).fit(steps=10, select="cv", folds=("subject", 4))
    np.testing.assert_array_equal(found._record.boosting.moments.S[:, 0, 0], len(FRAME) // 4)


@pytest.mark.parametrize(
    ("folds", "words"),
    [
        ("ward", "labels=\\['ward'\\]"),
        (("subject", 2.5), "folds"),
        (("subject",), "such as \\('subject', 5\\)"),
    ],
)
def test_folds_that_are_none_are_refused(folds, words):
    with pytest.raises(ModelError, match=words):
        model().fit(steps=5, folds=folds)


def test_a_column_with_fewer_values_than_folds_is_refused_without_their_number():
    with pytest.raises(DesignError, match="'half' has fewer than 10 different values") as refusal:
        model(FRAME.assign(half=np.arange(len(FRAME)) % 2), ["half"]).fit(select="cv", folds="half")
    assert "2 values" not in str(refusal.value)


@pytest.mark.parametrize(("folds", "passes"), [(4, True), (5, False)])
def test_a_fold_of_few_persons_is_refused_however_many_their_rows_are(folds, passes):
    """Sums by fold are sums over persons: 20 persons of a site are five in each of four folds."""
    partition = fs.ClientPartition.from_frame(FRAME, by="site", policy=fs.Policy(max_parameters=10.0))
    fit = fs.FedFunctionBoost.from_formula("y ~ x0", partition, labels=["subject"]).fit
    if passes:
        assert fit(steps=3, folds=("subject", folds))._record.boosting.moments.folds == folds
    else:
        with pytest.raises(PolicyError, match="at least 5 clusters by 'subject'"):
            fit(steps=3, folds=("subject", folds))


def test_sites_with_strict_policies_need_the_column_published():
    own = {name: {"kind": "number", "range": [-9, 9]} for name in ("x0", "y")}
    published = dict.fromkeys("ABC", own)
    partition = fs.ClientPartition.from_frame(FRAME, by="site", policy="strict", published=published)
    with pytest.raises(PolicyError, match="column 'subject' is not published"):
        fs.FedFunctionBoost.from_formula("y ~ x0", partition, labels=["subject"]).fit(folds="subject")


def test_the_dry_run_has_as_many_rounds_as_the_fit():
    planned = model().explain(select="cv", folds="subject", steps=5)
    sent = model().fit(select="cv", folds="subject", steps=5).ledger.to_frame().query("sender == 'A'")
    assert planned.passes
    expected = planned.table.query("sender == 'A'").set_index("step")["bytes"]
    assert (expected["sum_curves"] == sent.set_index("step")["bytes"]["sum_curves"]).all()


def test_a_refit_of_repeated_measures_has_a_banner_and_explains_the_entry_test():
    fit = model().fit(steps=60, folds="subject")
    found, labels = fit.refit([f"x{j}" for j in range(12)]), fit.learners.index[1:]
    printed = " ".join(str(found.summary()).split())
    assert printed.index("Rows count as independent. If rows with the same 'subject'") < printed.index("F")
    # 480 rows of 60 persons: columns of persons without an effect are significant in both tests.
    assert (found.tests["p_value"] < 0.05).sum() > 3
    alone = fit.entry_test(draws=199)["p_value"]
    apart = [one for one in labels if (found.tests["p_value"][one] < 0.05) != (alone[one] < 0.05)]
    assert all(
        f"{one} ({found.tests['p_value'][one]:.3f} here, {alone[one]:.3f} there)" in printed for one in apart
    )
    assert apart
    assert "Rows count as independent" not in str(
        model(FRAME.rename(columns={"subject": "z"}), ["z"]).fit(steps=5).refit().summary()
    )
