"""The forest plot: what is drawn, where."""

import builtins
import importlib

import numpy as np
import pandas as pd
import pytest
from pictures import WIDTHS, faults, moves, page

from fedstat.errors import ModelError, NotAvailableError
from fedstat.inference import plots


@pytest.fixture
def plt():
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")


def test_intervals_are_those_of_the_fit(result, reference, plt):
    ax = result.plot_coefficients()
    drawn = {tuple(np.round(path[:, 0], 10)) for lines in ax.collections for path in lines.get_segments()}
    expected = reference.conf_int().drop(index="Intercept").round(10)
    assert drawn == set(expected.itertuples(index=False, name=None))


def test_rows_are_grouped_under_their_site(result, plt):
    ax = result.plot_coefficients(intercept=True)
    sites = ax.texts[:3]
    assert [text.get_text() for text in sites] == ["Judicial_Organ", "Register", "Credit Agency"]
    assert ax.texts[3].get_text() == "with 95 % intervals"
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "Intercept"
    assert len(labels) == 7
    headings = [text.get_position()[1] for text in sites]
    assert min(abs(y - row) for y in headings for row in ax.get_yticks()) > 0.9


def test_given_axes_are_used_and_no_interval_is_a_hollow_point(make, plt):
    _, ax = plt.subplots()
    assert make(cov=None).plot_coefficients(ax) is ax
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert sum(len(line.get_xdata()) for line in hollow) == 6


def test_dollar_signs_are_text(make, reference, plt):
    names = ("Intercept", "$a_$", "$\\bad", *list(reference.params.index)[3:])
    ax = make(names=names).plot_coefficients()
    ax.figure.canvas.draw()
    shown = {label.get_text().replace("\\$", "$").strip() for label in ax.get_yticklabels()}
    assert {"$a_$", "$\\bad"} <= shown


def test_missing_matplotlib_names_the_extra(result, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install fedstat\[plot\]"):
        plots.plot_coefficients(result.tidy())


def test_a_picture_over_two_axes_is_open(plt):
    trace = pd.DataFrame({"score": [1.0, 0.1], "move": ["EM", "Newton"]}, index=[1, 2])
    ax = plots.plot_convergence(trace, tolerance=1e-3)
    assert ax.get_title(loc="left") == "Convergence"
    assert [side for side, spine in ax.spines.items() if not spine.get_visible()] == ["right", "top"]


def test_exponentials_stand_on_a_logarithmic_scale_around_one(result, reference, plt):
    ax = result.plot_coefficients(exponentiate=True)
    assert ax.get_xscale() == "log"
    drawn = {tuple(np.round(path[:, 0], 10)) for lines in ax.collections for path in lines.get_segments()}
    expected = np.exp(reference.conf_int().drop(index="Intercept")).round(10)
    assert drawn == set(expected.itertuples(index=False, name=None))
    assert list(ax.lines[0].get_xdata()) == [1.0, 1.0]
    assert ax.get_xlabel() == "exponential of the coefficient"
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == [f"{tick:.3g}" for tick in ax.get_xticks()] and "1" in labels
    assert not len(ax.get_xticks(minor=True))


def test_standardized_coefficients_are_times_the_deviation(result, reference, plt):
    sd = pd.Series(range(1, 8), index=reference.params.index)
    ax = result.plot_coefficients(standardized=sd)
    drawn = sorted(round(x, 10) for line in ax.lines for x in line.get_xdata() if line.get_marker() == "o")
    assert drawn == sorted((reference.params * sd).drop("Intercept").round(10))
    assert ax.get_xlabel() == "effect on y, per standard deviation"
    assert ax.get_title(loc="left") == "Standardized coefficients"
    with pytest.raises(NotAvailableError, match="no standard deviations"):
        result.plot_coefficients(standardized=True)
    with pytest.raises(ModelError, match=r"no standard deviation of .*x1:sex"):
        result.plot_coefficients(standardized={"x1": 2.0})


def test_selected_only_leaves_out_zeros(make, reference, plt):
    params = reference.params.to_numpy().copy()
    params[2] = 0.0
    labels = make(params=params, cov=None).plot_coefficients(selected=True).get_yticklabels()
    assert {label.get_text() for label in labels} == set(reference.params.index[[1, 3, 4, 5, 6]])


def test_an_interval_far_wider_than_the_others_ends_in_arrows(make, reference, plt):
    cov = reference.cov_params().to_numpy().copy()
    cov[3, 3] *= 1e6
    ax = make(cov=cov).plot_coefficients()
    left, right = ax.get_xlim()
    others = reference.conf_int().drop(index=["Intercept", reference.params.index[3]])
    assert left < others[0].min() and others[1].max() < right
    assert right - left < 20 * (others[1] - others[0]).max()
    arrows = [line for line in ax.lines if line.get_marker() in "<>" and len(line.get_xdata())]
    assert {line.get_marker() for line in arrows} == {"<", ">"}
    assert {tuple(line.get_xdata()) for line in arrows} == {(left,), (right,)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("exponentiate", [False, True])
def test_names_however_long_and_many_fit_a_journal(width, exponentiate, plt):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "site": np.repeat(["Market Supervision and Administration Bureau of the Province", "$b_$"], 20),
            "term": [f"C(a very long column name of its own, Treatment)[T.level {j}]" for j in range(40)],
            "estimate": rng.normal(size=40),
        }
    )
    frame = frame.assign(conf_low=frame["estimate"] - 1.0, conf_high=frame["estimate"] + 1.0)
    if exponentiate:
        frame = frame.assign(**np.exp(frame[["estimate", "conf_low", "conf_high"]]))
    ax = plots.plot_coefficients(
        frame, ax=page(width, 9.0), effect="effect on a response with a long name, too", ratios=exponentiate
    )
    assert not faults(ax.figure)
    assert all(label.get_text().endswith(f"{j}]") for j, label in enumerate(ax.get_yticklabels()))
    assert moves(ax.figure) < 1.0
    # More than half of the page is for the numbers, or nearly so.
    assert ax.get_position().width > 0.4


@pytest.mark.parametrize("width", WIDTHS)
def test_heat_maps_and_traces_fit_a_journal(width, plt):
    names = [f"a column with a name that is long, {j}" for j in range(6)]
    correlation = pd.DataFrame(np.eye(6), index=names, columns=names)
    ax = plots.plot_heat(correlation, "Correlations of latent normals", page(width, 5.0))
    assert not faults(ax.figure)
    assert all(label.get_text().endswith(f", {j}") for j, label in enumerate(ax.get_xticklabels()))
    trace = pd.DataFrame({"score": 10.0 ** -np.arange(8), "move": ["EM"] * 4 + ["Newton"] * 4})
    assert not faults(plots.plot_convergence(trace, tolerance=1e-6, ax=page(width, 3.0)).figure)
    loss = plots.plot_loss(pd.DataFrame({"loss": [2.0, 1.0]}), "FedAvg", page(width, 3.0))
    assert not faults(loss.figure) and not loss.get_title(loc="left")
