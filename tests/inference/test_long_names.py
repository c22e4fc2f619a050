"""Pictures of sixty sites or columns with names of sixty characters, at the widths of a journal's columns."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from pictures import JOURNAL, faults, page

from fedstat.inference.evaluation.calibration import plot_roc
from fedstat.inference.heterogeneity.forest import plot_forest
from fedstat.inference.plots import DistributionPanel, plot_distributions, plot_heat
from fedstat.models.boost.report.plots import draw_effects, draw_surface

NAMES = [f"{k:02d}_{'of_an_institution_with_a_long_name' * 2}"[:57] + f"_{k:02d}" for k in range(60)]
COMBINED = {
    **{"estimate": 0.5, "std_error": 0.05, "re_estimate": 0.52, "re_low": 0.3, "re_high": 0.7, "Q": 15.0},
    **{
        "pred_low": -0.4,
        "pred_high": 1.4,
        "df": 8,
        "p_value": 0.01,
        "I2": 0.4,
        "I2_low": 0.1,
        "I2_high": 0.6,
    },
}

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def rows(n):
    estimate = np.append(np.linspace(-0.3, 1.1, n - 1), np.nan)
    problems = [""] * (n - 1) + ["the column is constant at this site, and so is another one of them"]
    frame = pd.DataFrame({"estimate": estimate, "std_error": np.linspace(0.1, 0.5, n), "problem": problems})
    return frame.set_index(pd.Index(NAMES[:n]))


@pytest.mark.parametrize("width", JOURNAL)
@pytest.mark.parametrize("n, height", [(10, 4.2), (10, 1.6), (60, 3.6)])
def test_a_forest_keeps_its_title_and_the_labels_that_fit(width, n, height):
    ax = plot_forest(rows(n), pd.Series(COMBINED, name=NAMES[0]), ax=page(width, height))
    assert not faults(ax.figure)
    written = [label.get_text() for label in ax.get_yticklabels()]
    assert len(written) == n + 3 and "all sites, common" in written and ax.get_title(loc="left")
    assert ("" in written) == (height < 4.0)
    assert ax.get_window_extent().width > 0.3 * ax.figure.bbox.width


@pytest.mark.parametrize("width", JOURNAL)
@pytest.mark.parametrize("n", [5, 60])
def test_curves_of_sites(width, n):
    points = pd.DataFrame({"fpr": [0.0, 0.3, 1.0], "tpr": [0.0, 0.8, 1.0]})
    curves = pd.concat(dict.fromkeys(NAMES[:n], points))
    ax = plot_roc(curves, dict.fromkeys(NAMES, 0.75), page(width, 1.3 * width))
    assert not faults(ax.figure)


@pytest.mark.parametrize("width", JOURNAL)
def test_a_heat_map_and_margins(width):
    ax = plot_heat(pd.DataFrame(np.eye(60), NAMES, NAMES), "Correlations", page(width, 3.6))
    assert not faults(ax.figure) and any(label.get_text() for label in ax.get_yticklabels())
    probabilities, none = np.ones(60) / 60, np.zeros(0)
    panels = [
        DistributionPanel(NAMES[0], probabilities, tuple(NAMES), none, "linear", 1.0),
        DistributionPanel(NAMES[1], probabilities, (), np.geomspace(1.0, 1e6, 61), "log", 1.0),
        DistributionPanel(NAMES[2], probabilities, (), np.linspace(-1e5, 1e6, 61), "asinh", 100.0),
        DistributionPanel("age", probabilities, (), np.linspace(18.0, 90.0, 61), "linear", 1.0),
    ]
    assert not faults(plot_distributions(panels[: 2 if width < 5.0 else 4]))


@pytest.mark.parametrize("width", JOURNAL)
def test_effects_of_boosting(width):
    t = np.linspace(0.0, 1.0, 9)
    surface = pd.DataFrame([("x", a, b, a * b) for a in t for b in t], columns=["of", "s", "t", "estimate"])
    lines = pd.DataFrame([(g, a, a) for g in NAMES[:6] for a in t], columns=["group", "t", "estimate"])
    for frame in (surface, lines):
        ax = draw_surface(frame, f"bhist({NAMES[0]})", NAMES[1], page(width, 3.6))
        assert not faults(ax.figure)
    assert not faults(draw_effects({NAMES[0]: surface, "group": lines, "z": surface}, "y")[0, 0].figure)
