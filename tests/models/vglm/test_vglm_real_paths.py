"""On real tables, the default path chooses the fit of the exact path, or the summary warns."""

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def heart(folder):
    held = {
        "Clinic": ["y", "age", "sex", "cp", "trestbps"],
        "Laboratory": ["chol", "fbs", "restecg", "thalach", "exang"],
        "Imaging": ["oldpeak", "slope", "ca", "thal"],
    }
    names = [*chain(*held.values()), "num"][1:]
    file = folder / "heart_disease_4sites" / "processed.cleveland.data"
    table = pd.read_csv(file, header=None, names=names, na_values="?").dropna()
    return table.assign(y=(table["num"] > 0) * 1.0).drop(columns="num"), held


def nhanes(folder):
    held = {
        "Clinic": ["y", "Age", "BMI", "Height", "Weight"],
        "Laboratory": ["DirectChol", "TotChol", "UrineVol1", "UrineFlow1", "Pulse", "BPSysAve", "BPDiaAve"],
        "Survey": ["Poverty", "HHIncomeMid", "SleepHrsNight", "AlcoholDay"],
    }
    table = pd.read_csv(folder / "nhanes" / "NHANESraw.csv.gz", low_memory=False)
    table = table[table["Age"] >= 20].assign(y=(table["Diabetes"] == "Yes") * 1.0)
    return table[[*chain(*held.values())]].dropna(), held


def credit(_):
    import credit_default

    table = credit_default.read().iloc[:4_000].rename(columns={"default": "y"})
    return table, {
        site: ["y" if c == "default" else c for c in own] for site, own in credit_default.CLIENTS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("penalty", ["scad", "mcp"])
@pytest.mark.parametrize(("read", "equal"), [(heart, True), (nhanes, True), (credit, False)])
def test_the_default_path_agrees_with_the_exact_one_or_warns(shared_data, read, equal, penalty):
    table, held = read(shared_data)
    partition = fs.ClientPartition.from_frame(table.reset_index(drop=True), columns=held)
    model = fs.VerticalGLM.from_formula("y ~ .", partition, family=sm.families.Binomial(), penalty=penalty)
    default, exact = model.fit(), model.fit(path="exact")
    assert default.path["bic"].min() == default.path.loc[default.lam, "bic"]
    if equal:
        assert default.lam == pytest.approx(exact.lam)
        np.testing.assert_allclose(default.params, exact.params, atol=1e-4 * np.abs(exact.params).max())
        return
    # The exact path has a fit that is 2.6 better, at a lambda that the default path does not solve.
    assert 0.0 < default.path["bic"].min() - exact.path["bic"].min() < 5.0
    (note,) = [note for note in default._record.notes if note.kind == "proposed"]
    assert note.severity == "warning" and "Another lambda may have a smaller criterion" in str(note)
