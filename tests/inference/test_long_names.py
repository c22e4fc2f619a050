"""Pictures of sixty sites or columns with names of sixty characters, at the widths of a journal's columns."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from pictures import JOURNAL, WIDTHS, faults, moves, page

from fedstat.inference.plots import DistributionPanel, plot_distributions, plot_forest, plot_heat, plot_roc
from fedstat.models.boost.report.plots import (
    draw_curves,
    draw_cv,
    draw_effects,
    draw_importance,
    draw_path,
    draw_scatter,
    draw_surface,
)
from fedstat.models.laser.results import draw_history
from fedstat.models.vglm.plots import plot_path, plot_stability

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


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n, height", [(10, 4.2), (10, 1.6), (60, 3.6)])
def test_a_forest_keeps_its_title_and_the_labels_that_fit(width, n, height):
    effect = f"effect on the log odds of {NAMES[0]}"
    ax = plot_forest(rows(n), pd.Series(COMBINED, name=NAMES[0]), ax=page(width, height), effect=effect)
    assert not faults(ax.figure)
    written = [label.get_text() for label in ax.get_yticklabels()]
    assert len(written) == n + 3 and "all sites, common" in written and ax.get_title(loc="left")
    assert ("" in written) == (height < 4.0)
    assert ax.get_window_extent().width > 0.3 * ax.figure.bbox.width


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [5, 60])
def test_curves_of_sites(width, n):
    points = pd.DataFrame({"fpr": [0.0, 0.3, 1.0], "tpr": [0.0, 0.8, 1.0]})
    curves = pd.concat(dict.fromkeys(NAMES[:n], points))
    ax = plot_roc(curves, dict.fromkeys(NAMES, 0.75), page(width, 1.3 * width))
    assert not faults(ax.figure)


@pytest.mark.parametrize("width", WIDTHS)
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
    assert not faults(plot_distributions(panels[: 2 if width < 5.0 else 4], "Margins"))


@pytest.mark.parametrize("width", WIDTHS)
def test_effects_of_boosting(width):
    t = np.linspace(0.0, 1.0, 9)
    surface = pd.DataFrame([("x", a, b, a * b) for a in t for b in t], columns=["of", "s", "t", "estimate"])
    lines = pd.DataFrame([(g, a, a) for g in NAMES[:6] for a in t], columns=["group", "t", "estimate"])
    limits = {"lower": -0.2, "upper": 0.2, "band_lower": -0.4, "band_upper": 0.4}
    bands = [
        frame.assign(**{k: frame["estimate"] + v for k, v in limits.items()}) for frame in (surface, lines)
    ]
    for frame in (surface, lines, *bands):
        ax = draw_surface(frame, f"bhist({NAMES[0]})", NAMES[1], page(width, 3.6))
        assert not faults(ax.figure)
    assert not faults(draw_effects({NAMES[0]: surface, "group": lines, "z": surface}, "y")[0, 0].figure)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_course_of_boosting_and_of_networks(width):
    steps = pd.RangeIndex(1, 61, name="step")
    path = pd.DataFrame({"learner": NAMES[:6] * 10, "rsquared": np.linspace(0.0, 0.9, 60)}, index=steps)
    cv = pd.DataFrame({"loss": 1e6 / steps, "se": 1e4}, index=steps)
    learners = pd.DataFrame({"explained": np.linspace(0.5, 0.0, 12)}, index=["1", *NAMES[:11]])
    t, curves = np.linspace(0.0, 1.0, 9), np.linspace(-1e5, 1e5, 54).reshape(6, 9)
    history = pd.DataFrame({"loss": 1.0 / steps, "validation": 2.0 / steps}, index=steps)
    for taken in (1, 30, 60):
        assert not faults(draw_cv(cv, taken, page(width, 2.6)).figure)
        ax = draw_history(history, taken, page(width, 2.6))
        assert not faults(ax.figure) and f"kept: {taken}" in [text.get_text() for text in ax.texts]
    ax = draw_importance(learners, page(width, 3.6))
    assert not faults(ax.figure) and ax.get_yticklabels()[0].get_text() == "intercept"
    for ax in (
        draw_path(path, page(width, 3.6)),
        draw_curves(t, curves, curves, NAMES[:6], NAMES[0], page(width, 3.6)),
        draw_scatter(curves.ravel(), curves.ravel(), NAMES[0], page(width, 3.6)),
    ):
        assert not faults(ax.figure)


def path(n_lambdas=25, chosen=12):
    """A path on which columns enter one after the other; the first ones are the largest."""
    lambdas = np.geomspace(1.0, 0.01, n_lambdas)
    entry, size = np.linspace(0.9, 0.02, 60), np.linspace(2.0, 0.05, 60) * (-1.0) ** np.arange(60)
    b = size * np.clip(1.0 - lambdas[:, None] / entry, 0.0, None)
    frequencies = pd.DataFrame(np.clip(0.7 * entry / lambdas[:, None], 0.0, 1.0), columns=NAMES)
    sites = ("", *np.repeat([f"{k}{NAMES[k]}" for k in range(4)], 15))
    found = SimpleNamespace(
        lambdas=lambdas, chosen=chosen, solved=np.ones(n_lambdas, bool), lam=lambdas[chosen], coefficients=b
    )
    return SimpleNamespace(names=("Intercept", *NAMES), sites=sites), found, b, frequencies


def written(ax):
    """Columns that are named, as numbers, and how many are said to be more."""
    texts = [text.get_text() for text in ax.texts]
    (more,) = [int(text.split()[1]) for text in texts if text.startswith("and ")]
    return [int(text[-2:]) for text in texts if "…" in text], more


@pytest.mark.parametrize("width, height", [(JOURNAL[0], 2.4), (JOURNAL[1], 3.6)])
def test_of_sixty_columns_the_strongest_are_named_and_the_others_counted(width, height):
    estimate, found, b, frequencies = path()
    params = pd.DataFrame(b, columns=NAMES)
    ax = plot_path(estimate, found, params, np.ones(60), page(width, height))
    named, more = written(ax)
    selected = int((b[found.chosen] != 0.0).sum())
    assert named == list(range(len(named))) and len(named) >= 3 and selected <= len(named) + more < 60
    assert not faults(ax.figure) and moves(ax.figure) < 1.0
    ax = plot_stability(estimate, found, frequencies, 0.9, page(width, height))
    named, more = written(ax)
    reach = int((frequencies.iloc[: found.chosen + 1].max() >= 0.9).sum())
    assert named == list(range(len(named))) and len(named) >= 3 and len(named) + more == reach
    # Of two line ends at one height the first is drawn above.
    places = [text.get_position()[1] for text in ax.texts if "…" in text.get_text()]
    assert (np.diff(places) < 0.0).all()
    (top,) = ax.child_axes
    counts = (frequencies >= 0.9).sum(axis=1).to_numpy()
    at = [int(np.argmin(abs(found.lambdas - tick))) for tick in top.get_xticks()]
    assert [int(label.get_text()) for label in top.get_xticklabels()] == counts[at].tolist()
    assert not faults(ax.figure)
