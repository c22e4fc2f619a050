"""Contracts on wrong inputs: an error of fedstat names the place and the remedy, and no value of the data."""

from __future__ import annotations

import copy
import inspect
import re

import numpy as np
import pandas as pd
import pytest
from contracts.families import FAMILIES
from contracts.over_families import model_class, over_families

import fedstat as fs
from fedstat.errors import FedstatError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore")
SECRET = 123456.789
"""A value of the data, which no error may contain."""


def failing(family, table, x=""):
    """The error of an analysis of a table."""
    with pytest.raises(FedstatError) as caught:
        family.run(family.partition(table), x)
    text = str(caught.value)
    assert "123456" not in text and "Traceback" not in text
    return text


@over_families("unknown columns")
def test_unknown_columns(family):
    text = failing(family, family.table(), "zzz")
    assert "zzz" in text


@over_families("infinite values")
def test_infinite_values(family):
    table = family.table()
    column = table[family.x].astype(float).copy()
    column.iloc[[3, 7]] = np.inf
    column.iloc[4] = SECRET
    text = failing(family, table.assign(**{family.x: column}))
    assert family.x in text and "infinite" in text
    # The table of an analyst who tries an analysis has no site yet.
    assert ("the table" if family.layout == "rows" else "site 'B'") in text


@over_families("constant columns")
def test_constant_columns(family):
    table = family.table().assign(**{family.x: SECRET})
    try:
        fit = family.run(family.partition(table))
    except FedstatError as error:
        text = str(error)
    else:
        text = " ".join(fit.notes) if hasattr(fit, "notes") else " ".join(fit.attrs.get("notes", [family.x]))
    assert family.x in text and "123456" not in text, text


@over_families("texts of numbers")
def test_numbers_that_are_text(family):
    table = family.table()
    text = failing(
        family, table.assign(**{family.x: [f"{v:.4f}".replace(".", ",") for v in table[family.x]]})
    )
    assert family.x in text and ("text" in text or "numbers" in text or "identifier" in text), text


@over_families("unknown arguments")
def test_unknown_arguments(family):
    public = model_class(family)
    make = getattr(public, "from_formula", public)
    # Python refuses arguments of functions of estimates, which no site takes part in, and names them.
    error = TypeError if family.layout == "estimates" else ModelError
    with pytest.raises(error, match=f"{family.name}.* argument 'nonsense'"):
        make(*["y ~ x"] * 2, nonsense=1)
    if family.arguments is not None:
        with pytest.raises(ModelError, match=r"\.fit has no argument 'nonsense'"):
            public.fit(public.__new__(public), nonsense=1)


@over_families("few rows")
def test_a_site_without_complete_rows(family):
    table = family.table()
    column = table[family.x].astype(object if table[family.x].dtype == object else float)
    if family.layout == "rows":
        table = table.assign(**{family.x: column.where(table["site"] != "Kiel")})
        site = "Kiel"
    else:
        table = table.assign(**{family.x: column.where(table.index < 0)})
        site = "B"
    try:
        fit = family.run(family.partition(table))
    except FedstatError as error:
        assert site in str(error) or family.x in str(error), error
    else:
        notes = " ".join(getattr(fit, "notes", None) or fit.attrs["notes"])
        assert site in notes or "left out" in str(fit.summary()) or "left out" in notes, notes


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if hasattr(getattr(fs, name), "from_formula") and name != "M2SEM"]
)
def test_direct_constructors_name_from_formula(name):
    """What statsmodels' constructors take ends in an error with a remedy; M2SEM takes a partition."""
    frame = pd.DataFrame({"y": [1.0], "x": [2.0]})
    for given in (("y ~ x", "partition"), (frame["y"], frame), ("y ~ x",), ()):
        with pytest.raises(ModelError) as caught:
            getattr(fs, name)(*given)
        assert str(caught.value).startswith(f"{name}: models are made from a formula")
        assert caught.value.remedy.filled_call == f"{name}.from_formula('y ~ x', partition)"


@pytest.mark.parametrize("name", [name for name in FAMILIES if hasattr(getattr(fs, name), "fit")])
def test_fits_are_typed(name):
    assert getattr(fs, name).fit.__annotations__["return"] != "Any"


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.arguments is not None])
def test_models_say_that_results_come_with_the_fit(family):
    model = family.make(family.partition(family.table()), family.x)
    for name in ("params", "summary", "predict", "coef_"):
        with pytest.raises(AttributeError, match=f"has no '{name}'.* call .fit"):
            getattr(model, name)
    assert not hasattr(model, "nonsense") and copy.copy(model) is not model


WRONG = {
    "bool": ("yes",),
    "int": ("many", -3, 2.5),
    "float": ("much", float("nan")),
    "str | None": (3.5, ["x", "z"], pd.Series([1.0]), "zzz"),
    "Sequence[str]": (5, ["zzz"]),
    "dict[str, str]": ("person",),
    "Literal": ("nonsense", 7.5),
}
"""Wrong values of an argument, by its annotation."""
OF_ALIASES = re.compile(
    "(?:MissingRule|CovType|Between|Select|PenaltyKind|Aggregation|LinearMethod|Outcome|HeadLayout)(?: |$)"
)
NOT_WRONG = {
    ("fit", "scale"): "a known dispersion",
    ("FedFunctionBoost", "offset"): "a known offset",
    ("table_one", "by"): "given in the small analysis",
    ("corr", "bins"): "no quantile is asked for",
    ("quantiles", "by"): "the columns of a table, which the error says",
    ("histogram", "by"): "the columns of a table, which the error says",
    ("CopulaSynthesizer", "rounds"): "only one method has rounds",
}
NO_VALUES = ("formula", "coordinator", "checkpoint")
"""Texts that are not names of columns."""


def wrong_values(call):
    """Arguments of a call with wrong values, by the annotations of its signature."""
    for name, parameter in inspect.signature(call).parameters.items():
        written = str(parameter.annotation)
        kind = "Literal" if "Literal" in written or OF_ALIASES.match(written) else written
        for value in WRONG.get(kind, WRONG.get(kind.removesuffix(" | None"), ())):
            if name not in NO_VALUES:
                yield name, value


@over_families("wrong values")
def test_wrong_values_are_refused_by_the_name_of_their_argument(family):
    public, partition = model_class(family), family.partition()
    make, tried = getattr(public, "from_formula", public), 0
    calls = []
    if "more" in inspect.signature(family.make).parameters:  # further settings are passed on
        calls += [(family.name, make, lambda given: family.make(partition, family.x, **given))]
    if family.arguments is not None:
        model = family.make(partition, family.x)
        calls += [("fit", public.fit, lambda given: model.fit(**{**family.arguments, **given}))]
    for place, call, run in calls:
        for name, value in wrong_values(call):
            if {(place, name), (family.name, name)} & set(NOT_WRONG):
                continue
            tried += 1
            with pytest.raises(FedstatError) as caught:
                run({name: value})
            assert name in str(caught.value), (place, name, value, caught.value)
    assert tried
