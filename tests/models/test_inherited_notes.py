"""What stands above the summary of a result stands above everything that is made from it."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.inference.summary import Note, Report, critical_notes

pytestmark = pytest.mark.filterwarnings("ignore")
PLANTED = Note("planted", "PLANTED", "critical")
HOSPITALS = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
PATIENTS = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
SME = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
REPEATED = fs.ClientPartition.from_frame(fs.datasets.make_repeated(4), by="hospital")
FITS = {
    "glm": lambda: fs.GLORE.from_formula("num > 0 ~ age + sex", HOSPITALS).fit(),
    "ols": lambda: fs.FederatedOLS.from_formula("num ~ age", HOSPITALS).fit(),
    "cox": lambda: fs.FederatedCox.from_formula("Surv(months, died) ~ age", PATIENTS).fit(),
    "common": lambda: fs.FederatedCox.from_formula("Surv(months, died) ~ age", PATIENTS).fit(
        baseline="common", grid=12, until=60
    ),
    "ordinal": lambda: fs.FederatedOrdinal.from_formula("num ~ age + sex", HOSPITALS).fit(),
    "multinomial": lambda: fs.FederatedMultinomial.from_formula("C(cp) ~ age", HOSPITALS).fit(),
    "mixed": lambda: fs.FederatedMixed.from_formula("score ~ month + (1 | patient)", REPEATED).fit(),
    "gee": lambda: fs.FederatedGEE.from_formula(
        "num ~ age",
        fs.ClientPartition.from_frame(
            fs.datasets.make_hospitals().assign(ward=lambda table: table.index // 4), by="hospital"
        ),
        groups="ward",
    ).fit(),
    "vfem": lambda: fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", SME).fit(),
    "boost": lambda: fs.FedFunctionBoost.from_formula("num ~ age + sex", HOSPITALS).fit(steps=10),
    "impute": lambda: fs.impute(SME, "NPGR ~ ROA + CI", m=2, seed=1),
}
MADE = (
    "get_margeff",
    "baseline_hazard",
    "heterogeneity",
    "regress",
    "refit",
    "select",
    "split",
    "random_effects_of",
)
"""Members that make a result of estimates; a new one is found by the test of annotations."""


def planted(fit):
    """Plant an alarm into one result, whatever its class."""
    notes = type(fit)._summary_notes
    kind = type(
        type(fit).__name__, (type(fit),), {"_summary_notes": lambda self: iter([PLANTED, *notes(self)])}
    )
    fit.__class__ = kind
    return fit


@pytest.mark.parametrize("name", FITS)
def test_results_made_of_a_result_have_its_alarms(name):
    fit, made = planted(FITS[name]()), []
    arguments = {"baseline_hazard": {} if name == "common" else {"grid": 12, "until": 48}}
    for member in MADE:
        found = getattr(type(fit), member, None)
        if found is None:
            continue
        try:
            result = getattr(fit, member)
            if callable(result):
                given = {"formula": "NPGR ~ ROA"} if (name, member) == ("vfem", "refit") else None
                result = result(**(given or arguments.get(member, {})))
        except (fs.errors.NotAvailableError, fs.errors.ModelError):
            continue
        made.append(member)
        if member == "heterogeneity":
            assert PLANTED in critical_notes(result.random_effects_of(result.to_frame().index.tolist()[:1]))
        if (name, member) == ("vfem", "refit"):
            continue  # a fit with notes of its own, from the sums of the larger one
        assert PLANTED in critical_notes(result), member
        assert result.summary().as_text().startswith("*** PLANTED ***")
    assert made


@pytest.mark.parametrize("name", sorted(FITS.keys() - {"impute"}))
def test_the_model_of_a_result_is_the_one_that_was_fitted(name):
    """Not a stand-in with its names: statsmodels' users fit and describe it again."""
    fit = FITS[name]()
    assert type(fit.model).__name__ in fs.__all__ and fit.model.endog_names == fit.estimate.response
    assert type(pickle.loads(pickle.dumps(fit)).model).__name__ == "SimpleNamespace"


def test_every_member_that_returns_a_report_is_known():
    """Estimates that are made of a result are in MADE, or have a reason here."""
    other = {
        "evaluate": "figures about predictions",
        "test_proportional_hazards": "a test of the model",
        "test_proportional_odds": "a test of the model",
        "bootstrap": "M2SEM, below",
        "outside": "M2SEM, below",
        "linear": "the first fit of an iteration, with notes of its own",
        "debiased": "holds for any selection; it has claims of its own",
        "steps": "the same fit after another number of steps, which has its own record",
        "calibration": "figures about predictions",
    }
    reports = {name for name in fs.results.__all__ if issubclass(getattr(fs.results, name), Report)}
    for name in fs.results.__all__:
        for member, found in inspect.getmembers(getattr(fs.results, name)):
            function = getattr(found, "fget", None) or getattr(found, "func", found)
            returns = getattr(function, "__annotations__", {}).get("return", "")
            figures = "Evaluation" in str(returns)  # about predictions, which hold for any model
            if not member.startswith("_") and not figures and str(returns).strip("'") in reports:
                assert member in MADE or member in other, f"{name}.{member} returns {returns}"


def test_pool_combine_and_compare_carry_alarms():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(400, 2)), columns=["y", "x"]).assign(site=list("abcd") * 100)
    fits = []
    for _ in range(3):
        y = table["x"] + rng.normal(size=400)
        partition = fs.ClientPartition.from_frame(table.assign(y=y), by="site")
        fits.append(fs.FederatedOLS.from_formula("y ~ x", partition).fit())
    for make in (fs.pool, fs.combine):
        assert not critical_notes(make(fits))
        found = make([planted(copy.copy(fits[0])), *fits[1:]])
        assert critical_notes(found) == [PLANTED]  # once, from however many sources
    text = fs.compare({"first": planted(fits[0]), "second": fits[1]}).as_text()
    assert text.startswith("*** first: PLANTED ***")
    assert "PLANTED" not in fs.compare({"second": fits[1]}).as_text()
    # Results of other packages have none.
    theirs = smf.ols("y ~ x", table).fit()
    assert "***" not in fs.compare({"pooled": theirs}).as_text()


def test_the_alarm_of_imputations_names_a_remedy_that_exists():
    rng = np.random.default_rng(3)
    n = 1200
    x, z = rng.normal(size=(2, n))
    y = x + z + 2.0 * rng.exponential(size=n)
    there = rng.random(n) < 1.0 / (1.0 + np.exp(1.5 * (y - 2.0)))
    key = np.arange(n)
    frames = {
        "A": pd.DataFrame({"id": key, "y": y, "x": x}),
        "B": pd.DataFrame({"id": key[there], "z": z[there]}),
    }
    partition = fs.ClientPartition.from_frames(frames, on="id")
    imputations = fs.impute(partition, "y ~ x + z", m=3, seed=1)
    for result in (imputations, imputations.regress()):
        banner = " ".join(result.summary().as_text().partition("\n\n")[0].split())
        assert banner.startswith("*** RESPONSE NOT NORMAL") and "Regress by VFEMRegression and fit(" in banner
    assert fs.VFEMRegression.from_formula("y ~ x + z", partition).fit(method="weighted").converged
