"""The forest plot: what is drawn, where."""

import builtins
import importlib

import numpy as np
import pandas as pd
import pytest

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


def test_rows_are_grouped_under_their_client(result, plt):
    ax = result.plot_coefficients(intercept=True)
    assert [text.get_text() for text in ax.texts] == ["Judicial_Organ", "Register", "Credit Agency"]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "Intercept"
    assert len(labels) == 7
    headings = [text.get_position()[1] for text in ax.texts]
    assert min(abs(y - row) for y in headings for row in ax.get_yticks()) > 0.9


def test_given_axes_are_used_and_no_interval_is_a_hollow_point(make, plt):
    _, ax = plt.subplots()
    assert make(cov=None).plot_coefficients(ax) is ax
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert sum(len(line.get_xdata()) for line in hollow) == 6


def test_dollar_signs_are_text(make, reference, plt):
    names = ("Intercept", "$a_$", "$\\bad", *list(reference.params.index)[3:])
    make(names=names).plot_coefficients().figure.canvas.draw()


def test_missing_matplotlib_names_the_extra(result, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install fedstat\[plot\]"):
        plots.plot_coefficients(result.tidy())


def test_a_picture_without_hidden_spines_keeps_them_all(plt):
    trace = pd.DataFrame({"score": [1.0, 0.1], "move": ["EM", "Newton"]}, index=[1, 2])
    ax = plots.plot_convergence(trace, tolerance=1e-3)
    assert ax.get_title(loc="left") == "Convergence"
    assert all(spine.get_visible() for spine in ax.spines.values())
