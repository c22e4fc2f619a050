"""Text files as hospitals export them: what is proposed from their first lines, and that they are read."""

from __future__ import annotations

import gzip
import itertools
import warnings

import numpy as np
import pandas as pd
import pytest

from fedstat import ClientPartition
from fedstat.errors import PartitionError
from fedstat.federation.tables.sources import Source, open_source
from fedstat.federation.tables.text_files import TextFormat, propose_format, read_text

N = 120


def records(seed=0):
    """Whole numbers, numbers, amounts of money, two levels, text with an umlaut, dates, 0/1."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "patient": np.arange(N) + 1000,
            "size": rng.normal(170, 10, N).round(1),
            "cost": rng.uniform(1e3, 9e6, N).round(2),
            "sex": rng.choice(["male", "female"], N),
            "ward": rng.choice(["Süd", "Nord"], N),
            "admitted": pd.Timestamp("2021-03-01") + pd.to_timedelta(rng.integers(0, 700, N), "D"),
            "y": rng.integers(0, 2, N),
        }
    )


def written(frame, separator=";", decimal=",", thousands="", dates="%d.%m.%Y"):
    """The frame as text, in the form of another country."""

    def number(value):
        marks = str.maketrans({",": thousands, ".": decimal})
        return (f"{value:,}" if thousands else f"{value}").translate(marks)

    texts = frame.assign(**{name: frame[name].map(number) for name in ("size", "cost")})
    return texts.assign(admitted=frame["admitted"].dt.strftime(dates)).to_csv(sep=separator, index=False)


def proposal(path, text, encoding="utf-8", **form):
    path.write_bytes(text.encode(encoding) if isinstance(text, str) else text)
    return propose_format(path, TextFormat(**form))


def site_source(path, **entries):
    return Source.from_mapping("Ward", {"kind": "csv", "path": str(path), **entries})


FORMS = [
    *itertools.product(";\t|", ",.", ["", "'", " "], ["%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y-%m-%d"]),
    (";", ",", ".", "%d.%m.%Y"),
    (";", ".", ",", "%d-%m-%Y"),
    (",", ".", ",", "%Y/%m/%d"),  # in quotation marks
    (",", ",", "", "%d.%m.%Y"),
]


@pytest.mark.parametrize(("separator", "decimal", "thousands", "dates"), FORMS)
def test_every_form_is_recognized_and_read_to_the_last_bit(tmp_path, separator, decimal, thousands, dates):
    path, frame = tmp_path / "a.csv", records()
    found = proposal(path, written(frame, separator, decimal, thousands, dates))
    assert not found.remarks
    parts = dates.replace("%Y", "yyyy").replace("%d", "dd").replace("%m", "mm")
    expected = {"separator": separator, "decimal": decimal, "thousands": thousands, "date_format": parts}
    usual = {"separator": ",", "decimal": ".", "thousands": "", "date_format": "yyyy-mm-dd"}
    assert found.entries == {name: one for name, one in expected.items() if one != usual[name]}
    read = read_text(path, TextFormat(**found.entries), None)
    if "date_format" not in found.entries:
        read["admitted"] = pd.to_datetime(read["admitted"])
    pd.testing.assert_frame_equal(read, frame, check_exact=True)


@pytest.mark.parametrize(
    ("encoding", "ending"),
    [
        ("utf-8-sig", "csv.gz"),
        ("utf-16", "csv"),
        ("utf-16-le", "csv.gz"),
        ("utf-16-be", "txt"),
        ("latin-1", "csv"),
        ("cp1252", "csv.gz"),
        ("cp1252", "txt"),
    ],
)
def test_encodings_are_recognized_also_late_in_a_file(tmp_path, encoding, ending):
    text = written(records())
    if encoding == "cp1252":
        text = text.replace("Nord", "„Nord“")
    # nothing but ASCII for a megabyte and more
    path, row = tmp_path / f"a.{ending}", "1;1,5;2,5;m;w;02.01.2022;0"
    text = "\n".join([text.split("\n")[0], *[row] * 60_000, row.replace("w", "Süd")])
    text += "\n" + row.replace("w", "„a“") if encoding == "cp1252" else ""
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    found = propose_format(path, TextFormat())
    assert found.entries.get("encoding", "utf-8-sig") == encoding and found.entries["separator"] == ";"
    read = read_text(path, TextFormat(**found.entries), None)
    assert "Süd" in set(read["ward"]) and read["size"].sum() > 60_000 and read.columns[0] == "patient"


def test_bytes_of_no_known_encoding_are_not_guessed(tmp_path):
    found = proposal(tmp_path / "a.csv", "a,b\nSüd,1\n".encode("cp850"))
    assert "encoding" not in found.entries and "not recognized" in found.remarks[0]
    with pytest.raises(PartitionError, match=r"could not be read \(UnicodeDecodeError\)"):
        open_source(site_source(tmp_path / "a.csv"))
    assert open_source(site_source(tmp_path / "a.csv", encoding="cp850")).frame["a"].tolist() == ["Süd"]


TITLES = [
    "Export of ward 7, North, Tuesday\n",
    "Export; ward 7\n\n",
    "Export;;;;;;\n;;;;;;\n",
    "sep=;\n",
    '"Export of\nward 7"\n# made by KIS\n\n',
]


@pytest.mark.parametrize("title", TITLES)
def test_lines_of_titles_are_skipped(tmp_path, title):
    found = proposal(tmp_path / "a.csv", title + written(records()))
    assert found.entries["skip_lines"] == title.count("\n")
    read = read_text(tmp_path / "a.csv", TextFormat(**found.entries), None)
    pd.testing.assert_frame_equal(read, records())


@pytest.mark.parametrize(
    "text",
    [
        "id,note\n" + "1,one; two\n" * 30,  # another separator in texts
        "x\n1\n2\n3\n",  # one column
        "a,b,c\n1,2,3\n",
        "a,b\n1,2\n3\n4\n5\n6\n",  # incomplete rows
        "when,n\n2022-01-02,1\n2022-01-03,2\n",
        'a,b\n"x, y",1\n"z, w",2\n',
        "a,b\n0.123,1\n1.234,2\n",  # no thousands: a group does not begin with 0
        "a,b\n",
        "",
    ],
)
def test_usual_files_need_nothing(tmp_path, text):
    found = proposal(tmp_path / "a.csv", text)
    assert found.entries == {} and found.remarks == []


def test_what_can_mean_two_things_is_left_to_the_owner(tmp_path):
    found = proposal(tmp_path / "a.csv", "dose;n\n1,234;1\n9,876;2\n")
    assert (
        found.entries == {"separator": ";"}
        and "three digits follow every comma in 'dose'" in found.remarks[0]
    )
    found = proposal(tmp_path / "a.csv", "dose;n\n1.234;1\n9.876;2\n")
    assert (
        found.entries == {"separator": ";"}
        and "three digits follow every point in 'dose'" in found.remarks[0]
    )
    # decided by the owner, or by another column
    assert not proposal(tmp_path / "a.csv", "dose;n\n1,234;1\n9,876;2\n", decimal=",").remarks
    both = proposal(tmp_path / "a.csv", "dose;n\n1.234;1,5\n9.876;2,25\n")
    assert both.entries == {"separator": ";", "decimal": ",", "thousands": "."} and not both.remarks
    days = proposal(tmp_path / "a.csv", "day,n\n02/03/2022,1\n04/05/2022,2\n")
    assert not days.entries and 'date_format = "dd/mm/yyyy" or date_format = "mm/dd/yyyy"' in days.remarks[0]
    short = proposal(tmp_path / "a.csv", "day,n\n02.03.22,1\n24.05.22,2\n")
    assert not short.entries and "years with four digits" in short.remarks[0]
    two = proposal(
        tmp_path / "a.csv", "a,b,c\n14.03.2022,3/14/2022,15.03.2022\n14.05.2022,5/14/2022,16.03.2022\n"
    )
    assert (
        two.entries == {"date_format": "dd.mm.yyyy"} and "'b' are written in another form" in two.remarks[0]
    )


def test_what_the_owner_wrote_is_not_changed(tmp_path):
    text = "a;b,c\n" + "1;2,5\n" * 20
    assert "separator" not in proposal(tmp_path / "a.csv", text, separator=",").entries
    assert not proposal(tmp_path / "a.csv", "Title\na,b\n1,2\n3,4\n", skip_lines=0).entries


def test_one_column_of_several_is_never_accepted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("age;sex;y\n" + "54,2;m;1\n61,0;f;0\n" * 30)
    for entries in ({}, {"separator": ","}, {"separator": "|"}):
        with pytest.raises(PartitionError, match=r'has semicolons between columns. Write  separator = ";"'):
            open_source(site_source(path, **entries))
    with pytest.raises(PartitionError, match=r"pandas.read_csv\(path, sep=';'\)  and use from_frames"):
        ClientPartition.from_files({"A": path}, layout="horizontal")
    path.write_text("Title\nage,sex\n" + "54,m\n61,f\n" * 30)
    with pytest.raises(PartitionError, match=r"1 line above the names of the columns. Write  skip_lines = 1"):
        open_source(site_source(path))
    path.write_bytes("age,sex\n54,männlich\n".encode("latin-1"))
    with pytest.raises(PartitionError, match=r'the encoding latin-1. Write  encoding = "latin-1"') as caught:
        open_source(site_source(path))
    assert "dtype" not in str(caught.value) and "from_frames" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,sex,age\n1,2,3\n", "2 columns are called 'age'"),
        ("age, age \n1,2\n", "2 columns are called 'age'"),
        ("a,b\n1,2,3\n", "there are 2 names of columns, and 3 cells in a row"),
        ("a,b\n1,2\n\n3,4,5\n", "line 4 has 3 cells, and there are 2 columns"),
        ('a,b\n1,2\n"3,4\n', "quotation marks are not closed"),
    ],
)
def test_a_file_that_is_no_table_names_the_place(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(PartitionError, match=f"could not be read: {message}"):
        open_source(site_source(tmp_path / "a.csv"))


def test_blanks_and_separators_at_the_end_are_no_part_of_the_table(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("sex ;n; code;x;\nm; 1 ; 007;1,5;\n f ;2;010 ;NA ;\nm ; ; 010;2,5;\n")
    source = site_source(path, separator=";", decimal=",", schema={"code": "text"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = open_source(source).frame
    assert list(frame.columns) == ["sex", "n", "code", "x"] and frame["sex"].tolist() == ["m", "f", "m"]
    assert frame["code"].tolist() == ["007", "010", "010"]
    np.testing.assert_array_equal(frame["n"], [1, 2, np.nan])
    np.testing.assert_array_equal(frame["x"], [1.5, np.nan, 2.5])
    # also if the line of names has no separator at its end, and with names of rows
    path.write_text("a;b\n1;2;\n3;4;\n")
    assert list(open_source(site_source(path, separator=";")).frame.columns) == ["a", "b"]
    path.write_text(',a,b\n"1",1,2\n"2",3,4\n')
    assert list(open_source(site_source(path)).frame.columns) == ["Unnamed: 0", "a", "b"]


def test_marks_between_thousands_are_read_exactly_and_nowhere_else(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "n;x;day;text;id;code\n1.234;1.234,5;02.01.2022;1.23;1.234.567;1.000\n7;0,1;03.01.2022;4.5;2;2.000\n;;;;;\n"
    )
    source = site_source(path, separator=";", decimal=",", thousands=".", schema={"code": "text"})
    frame = open_source(source).frame
    np.testing.assert_array_equal(frame["n"], [1234, 7, np.nan])
    np.testing.assert_array_equal(frame["x"], [1234.5, 0.1, np.nan])
    np.testing.assert_array_equal(frame["id"], [1234567, 2, np.nan])
    assert frame["day"].tolist()[:2] == ["02.01.2022", "03.01.2022"] and frame["text"].tolist()[:2] == [
        "1.23",
        "4.5",
    ]
    assert frame["code"].tolist()[:2] == ["1.000", "2.000"]


def test_declared_dates_are_read_in_the_form_of_the_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("day,time,free\n3.1.2022,13.01.2022 08:30,none\n,14.01.2022 09:00,13.01.2022\n")
    schema = {"day": {"type": "dates", "since": "2022-01-01"}, "time": "dates"}
    frame = open_source(site_source(path, date_format="dd.mm.yyyy", schema=schema)).frame
    np.testing.assert_array_equal(frame["day"], [2, np.nan])
    assert frame["time"].tolist() == [pd.Timestamp("2022-01-13 08:30"), pd.Timestamp("2022-01-14 09:00")]
    assert frame["free"].tolist() == ["none", "13.01.2022"]
    with pytest.raises(
        PartitionError, match=r"'day': expected dates, found text.*decimals and dates are written"
    ):
        open_source(site_source(path, schema=schema))


WRONG = [
    ({"separator": ";;"}, "separator is one character"),
    ({"separator": "a"}, "separator is one character"),
    ({"decimal": ";"}, 'decimal is "." or ","'),
    ({"thousands": "."}, "and not the decimal mark"),
    ({"decimal": ",", "thousands": ","}, "and not the decimal mark"),
    ({"thousands": "x"}, "thousands is one of"),
    ({"encoding": "klingon"}, "encoding is unknown"),
    ({"encoding": "zlib"}, "encoding is unknown"),
    ({"skip_lines": -1}, "skip_lines is the number"),
    ({"date_format": "%d.%m.%Y"}, 'date_format is for instance "dd.mm.yyyy"'),
    ({"date_format": "dd.mm.yy"}, 'date_format is for instance "dd.mm.yyyy"'),
]


@pytest.mark.parametrize(("entries", "message"), WRONG)
def test_entries_without_meaning_are_refused(entries, message):
    with pytest.raises(PartitionError, match=message):
        site_source("a.csv", **entries)


def test_entries_of_text_files_are_for_text_files():
    with pytest.raises(PartitionError, match="separator, decimal are for text files"):
        Source.from_mapping(
            "Ward", {"kind": "parquet", "path": "a.parquet", "separator": ";", "decimal": ","}
        )
