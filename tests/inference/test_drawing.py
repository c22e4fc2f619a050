"""Common parts of all plots: ticks of ratios, names that do not overlap, titles."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from pictures import WIDTHS, faults, page

from fedstat import plotting
from fedstat.inference.plots import DistributionPanel, plot_distributions


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0.4, 2.3, [0.5, 0.7, 1.0, 1.5, 2.0]),
        (0.09, 12.0, [0.1, 0.3, 1.0, 3.0, 10.0]),
        (1e-4, 1e4, [1e-4, 1e-2, 1.0, 1e2, 1e4]),
    ],
)
def test_ticks_of_ratios_are_round_and_few(low, high, ticks):
    np.testing.assert_allclose(plotting.log_ticks(low, high, 5), ticks)


def test_a_narrow_scale_has_ticks_all_the_same():
    np.testing.assert_allclose(plotting.log_ticks(1.021, 1.09, 5), [1.04, 1.06, 1.08])
    np.testing.assert_allclose(plotting.log_ticks(0.916, 1.178, 5), [0.95, 1.0, 1.05, 1.1, 1.15])
    _, ax = plt.subplots()
    ax.set_xlim(0.998, 1.007)
    plotting.label_log_x(ax)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.998", "1", "1.002", "1.004", "1.006"]


def test_names_keep_apart_as_near_as_can_be():
    wanted = np.array([0.5, 0.1, 0.52, 0.51])
    found = plotting.spread(wanted, 0.1, 0.0, 1.0)
    assert np.diff(np.sort(found)).min() >= 0.1 - 1e-12
    assert (np.argsort(found) == np.argsort(wanted)).all()
    assert found[1] == 0.1
    # Three that want one place stand around it: least squares.
    np.testing.assert_allclose(np.sort(found)[1:], [0.41, 0.51, 0.61])
    np.testing.assert_allclose(plotting.spread(np.array([0.99, 1.0]), 0.2, 0.0, 1.0), [0.8, 1.0])
    np.testing.assert_allclose(plotting.spread(np.full(3, 0.5), 0.7, 0.0, 1.0), [0.0, 0.5, 1.0])


@pytest.mark.parametrize("width", WIDTHS)
def test_long_titles_are_broken_and_stay_on_the_page(width):
    ax = page(width, 3.0)
    ax.set_yticks([0.0, 1.0], ["a label that is long indeed", "short"])
    headline = "Correlations of the latent normals of every column of every site, one by one"
    plotting.set_headline(
        ax, headline, "what there is to say of it, which is more than a line holds as a rule\n$a_$"
    )
    assert ax.get_title(loc="left").replace("\n", " ") == headline
    assert "\n" in ax.get_title(loc="left") or width > 4.0
    assert not faults(ax.figure)


def test_one_column_of_several_takes_its_own_width():
    _, (left, right) = plt.subplots(1, 2, figsize=(7.0, 3.0), layout="constrained")
    for ax in (left, right):
        plotting.set_headline(ax, "A title that is too long for half of a page of a journal, broken")
    assert not faults(left.figure)


def test_names_at_the_ends_of_lines_do_not_overlap_and_are_counted():
    ax = page(3.5, 2.6)
    ax.set_ylim(0.0, 1.0)
    names = [f"column {j}" for j in range(60)]
    written = plotting.label_ends(ax, np.linspace(0.4, 0.6, 60), names, ["black"] * 60)
    assert 8 <= written < 60
    assert [text.get_text() for text in ax.texts] == [*names[:written], f"and {60 - written} more"]
    assert not faults(ax.figure)


def test_bars_of_a_margin_with_many_bins_can_be_seen():
    edges = np.linspace(0.0, 1024.0, 1025)
    probabilities = np.where((edges[:-1] >= 200) & (edges[:-1] < 500), 1 / 300, 0.0)
    figure = plot_distributions([DistributionPanel("x", probabilities, (), edges, "linear", 1.0)], "Margins")
    (bars,) = figure.axes[-1].patches
    data = bars.get_data()
    assert len(data.values) <= 60 and np.diff(data.edges).min() >= 5.0
    assert data.edges[0] == pytest.approx(200.0, abs=1.0) and data.edges[-1] == pytest.approx(500.0, abs=6.0)
    np.testing.assert_allclose(data.values[1:-1], np.diff(data.edges)[1:-1] / 300, rtol=1e-12)
