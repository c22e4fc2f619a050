"""Coverage of intervals of all columns and of selected ones by simulation, and false selections.

``coverage_simulation.py`` and ``after_selection_simulation.py`` say what is drawn, and write the same tables
from the command line.
"""

from __future__ import annotations

import after_selection_simulation
import pandas as pd
import pytest
from coverage_simulation import CELL, SETTINGS, coverage, false_selections, write_table

from fedstat.models.vglm.notes import APART_CALLED, APART_MISSED, CALLED, MISSED, WEAK_MISSED

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")]
RUNS = {"linear": 600, "logistic": 500}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.model}-{s.n}-{s.p}-{s.design}")
def test_intervals_of_active_and_inactive_coefficients_cover(setting):
    table = coverage(setting, RUNS[setting.model])
    write_table("vglm_coverage.csv", table, [*CELL, "inference", "coefficients"])
    # Three Monte-Carlo errors about the band.
    assert (table["coverage"] + 3.0 * table["mc_error"] >= 0.93).all()
    assert (table["coverage"] - 3.0 * table["mc_error"] <= 0.97).all()
    debiased = table[table["inference"] == "debiased"]
    assert debiased["coverage"].between(0.93, 0.97).all()
    assert (debiased["rmse"] / debiased["mean_se"]).between(0.93, 1.07).all()


@pytest.mark.parametrize("design", ["ar", "equal"])
def test_false_selections_stay_below_their_bound(design):
    cells = [(threshold, lam) for threshold in (0.6, 0.75, 0.9) for lam in (0.25, 0.15, 0.1)]
    table = pd.DataFrame([false_selections(threshold, lam, 200, design) for threshold, lam in cells])
    write_table("vglm_stability.csv", table, ["design", "n", "p", "threshold", "lambda"])
    assert (table["false"] <= table["bound"]).all()
    assert table["false"].max() > 0.5


def test_what_summaries_say_of_intervals_after_selection_is_so():
    (setting,) = [s for s in after_selection_simulation.SETTINGS if s.n == 200 and s.skewed]
    table = after_selection_simulation.after_selection(setting, 400).set_index("inference")
    said = {"conditional": (MISSED, CALLED), "split": (APART_MISSED, APART_CALLED)}
    for inference, (missed, rejected) in said.items():
        row = table.loc[inference]
        # Half a unit of the last digit that is printed, and three Monte-Carlo errors.
        assert abs(row["missed"] - missed) < 0.005 + 3.0 * row["missed_error"]
        assert abs(row["rejected"] - rejected) < 0.005 + 3.0 * row["rejected_error"]
    weak = after_selection_simulation.SETTINGS[-1]
    row = after_selection_simulation.after_selection(weak, 100).set_index("inference").loc["conditional"]
    assert abs(row["missed"] - WEAK_MISSED) < 0.005 + 3.0 * row["missed_error"]
