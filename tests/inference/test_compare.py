"""The table of several fits."""

import xml.etree.ElementTree as ET

import pytest

from fedstat.errors import ModelError
from fedstat.inference.compare import compare


@pytest.fixture
def bare(make):
    return make(cov=None, converged=False, reasons={"cov_params": "averaging has none"})


def test_cells_hold_coefficient_error_and_star(result, reference):
    frame = compare({"VFEM": result}, stars=(0.05, 0.001), digits=3).to_frame()
    for (_, name), cell in frame["VFEM"].iloc[:7].items():
        p = reference.pvalues[name]
        stars = "*" * int((p < 0.05) * 1 + (p < 0.001) * 1)
        assert cell == f"{reference.params[name]:.3f} ({reference.bse[name]:.3f}){stars}"


def test_rows_are_grouped_by_client_and_blank_where_missing(result, restricted):
    frame = compare({"small": restricted, "VFEM": result}).to_frame()
    clients = list(frame.index.get_level_values("client")[:7])
    assert clients == ["", *["Register"] * 2, *["Credit Agency"] * 2, *["Judicial_Organ"] * 2]
    assert frame.loc[("Judicial_Organ", "C(race)[T.x-1]"), "small"] == ""
    assert frame.loc[("", "Rounds")].tolist() == ["", "65"]
    assert frame.loc[("", "No. Observations")].tolist() == ["400", "400"]
    assert frame.loc[("", "Traffic"), "VFEM"] == "1.2 MB"


def test_pooled_statsmodels_fit_stands_beside(result, reference):
    frame = compare({"VFEM": result, "pooled": reference}).to_frame()
    rows = frame.iloc[:7]
    assert (rows["VFEM"] == rows["pooled"]).all()
    assert rows.index.get_level_values("client")[1] == "Judicial_Organ"


def test_without_standard_errors_there_is_a_footnote(result, bare, reference):
    table = compare({"VFEM": result, "Averaged": bare})
    assert table.to_frame().loc[("Credit Agency", "x1"), "Averaged"] == f"{reference.params['x1']:.4f}"
    assert any("Averaged: " in note and "averaging has none" in note for note in table.notes)
    assert table.notes[0] == "Averaged has NOT CONVERGED."


def test_brackets_stand_in_line(result):
    lines = [line for line in str(compare({"VFEM": result})).splitlines() if "(0." in line]
    assert len({line.rindex(")") for line in lines}) == 1
    assert len(lines) == 7


def test_no_stars_on_request(result):
    table = compare({"VFEM": result}, stars=())
    assert "*" not in str(table)
    assert table.notes == ("Standard errors in brackets.",)


def test_renderings(result):
    table = compare({"V_1": result})
    ET.fromstring(table._repr_html_())
    assert r"V\_1" in table.as_latex()
    assert "No. Observations" in table.as_csv()
    assert repr(table) == str(table) == table.as_text()


def test_nothing_and_no_level_are_refused(result):
    with pytest.raises(ModelError, match="at least one result"):
        compare({})
    with pytest.raises(ModelError, match="between 0 and 1, received \\(5,\\)"):
        compare({"VFEM": result}, stars=(5,))
