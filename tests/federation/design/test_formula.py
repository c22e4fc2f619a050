"""The formula language: what it means (oracle: formulaic's parser) and what it refuses."""

from __future__ import annotations

import builtins
import os
from pathlib import Path

import formulaic
import numpy as np
import pandas as pd
import pytest
from formulaic.errors import FactorEvaluationError

from fedstat.errors import FormulaError
from fedstat.federation.design.coding import read_terms
from fedstat.federation.design.formula.parse import (
    SiteTerms,
    formula_of_terms,
    parse_formula,
    parse_pooled_formula,
)
from fedstat.federation.design.formula.terms import parse_term

COLUMNS = {
    "Interview": ["y", "Age", "Sex", "Income"],
    "Exam": ["Weight", "odd name", "Children's (age)"],
    "Laboratory": ["Glucose", "a.b", "µg"],
}
POOLED = ["y", "a", "b", "c", "d", "x"]

ATTACKS = [
    "y ~ __import__('os').system('touch {canary}')",
    'y ~ __import__("os").system("touch {canary}")',
    "y ~ open('{canary}', 'w')",
    "y ~ {open('{canary}', 'w')}",
    "y ~ {{open('{canary}', 'w')}}",
    "y ~ x.__class__",
    "y ~ x.__class__.__bases__",
    "y ~ np.__loader__",
    "y ~ [z for z in ().__class__.__bases__]",
    "y ~ (lambda: open('{canary}', 'w'))()",
    "y ~ log((lambda: open('{canary}', 'w'))())",
    "y ~ np.fromfile('{canary}')",
    "y ~ np.save('{canary}', x)",
    "y ~ np.log.__class__(x)",
    "y ~ np.testing.measure(x)",
    "y ~ np.log(open('{canary}', 'w'))",
    "y ~ C(x, Treatment(__import__('os').system('touch {canary}')))",
    "y ~ C(x, open('{canary}', 'w'))",
    "y ~ C(x, contr.sum.__class__)",
    "y ~ C(x, Sum.__init__)",
    "y ~ C(x, contr.__loader__)",
    "y ~ C(x, Sum(open('{canary}', 'w')))",
    "y ~ C(x, Poly(__import__('os').system('touch {canary}')))",
    "y ~ C(x, levels=open('{canary}', 'w'))",
    "y ~ C(open('{canary}', 'w'))",
    "y ~ Q('a' + open('{canary}', 'w').name)",
    "y ~ Q(open('{canary}', 'w'))",
    "y ~ Q('x', open('{canary}', 'w'))",
    "y ~ Q(f\"{open('{canary}', 'w')}\")",
    "y ~ log(Q(f\"{open('{canary}', 'w')}\"))",
    'y ~ log(log(log(exec(\'open("{canary}", "w")\'))))',
    "y ~ log([open('{canary}', 'w') for _ in (1,)])",
    "y ~ log({1: open('{canary}', 'w')})",
    "y ~ log(x if open('{canary}', 'w') else z)",
    "y ~ x if exec('1') else z",
    "y ~ log(x, where=open('{canary}', 'w'))",
    "y ~ log(x, out=x)",
    "y ~ scale(x, _state=open('{canary}', 'w'))",
    "y ~ scale(x, **open('{canary}', 'w'))",
    "y ~ scale(*open('{canary}', 'w'))",
    "y ~ bs(x, knots=open('{canary}', 'w'))",
    "y ~ bs(x, df=open('{canary}', 'w'))",
    "y ~ bs(x, knots=[1, y])",
    "y ~ poly(x, 10**10**10)",
    "y ~ poly(x, degree=(a := 3))",
    "y ~ log(a := open('{canary}', 'w'))",
    "open('{canary}', 'w') ~ x",
    "log(open('{canary}', 'w')) ~ x",
    "y > open('{canary}', 'w') ~ x",
    "y > 0 > open('{canary}', 'w') ~ x",
    "y == open('{canary}', 'w') ~ x",
    "y.__class__ ~ x",
    "y[open('{canary}', 'w')] ~ x",
    "(lambda: y)() ~ x",
    "C(y, Sum) ~ x",
    "C(y, Treatment('a')) ~ x",
    "C(log(y)) ~ x",
    "C(y, levels=open('{canary}', 'w')) ~ x",
    "C(y, levels=['a', open('{canary}', 'w')]) ~ x",
    "C(y, levels=['a', 'a']) ~ x",
    "C(y) > 1 ~ x",
    "C(y).__class__ ~ x",
    "bs(y, df=4) ~ x",
    "y ~ `open('{canary}', 'w')`",
    "y ~ log(`open('{canary}', 'w')`)",
    "y ~ log(`x) + open('{canary}', 'w') + log(x`)",
    "y ~ log('`' + open('{canary}', 'w') + '`')",
    "y ~ ｏｐｅｎ('{canary}', 'w')",
    "y ~ ｌｏｇ(x)",
    "y ~ log(ｘ)",
    "y ~ log(x).__class__",
    "y ~ log(x)(x)",
    "y ~ log(x)[0]",
    "y ~ log",
    "y ~ x[open('{canary}', 'w')]",
    "y ~ x | open('{canary}', 'w')",
    "y ~ x %in% open('{canary}', 'w')",
    "y ~ x @ x",
    "y ~ x; open('{canary}', 'w')",
    "y ~ x\nimport os",
    "y ~ log(x\n); import os",
    "y ~ x # open",
    "y ~ x = open('{canary}', 'w')",
    "y ~ 'text'",
    "y ~ log('text')",
    "y ~ x:'text'",
    "y ~ log(x and open('{canary}', 'w'))",
    "y ~ log(x > 0)",
    "y ~ log(x ** 99999999)",
    "y ~ log(x ** x)",
    "y ~ log(x @ x)",
    "y ~ log(x // 2)",
    "y ~ log(~x)",
    "y ~ log(not x)",
    "y ~ log(1j)",
    "y ~ log(True)",
    "y ~ log(...)",
    "y ~ log(await x)",
    "y ~ log(yield)",
    "y ~ log(print)",
    "y ~ log(3)",
    "y ~ log(3):x",
    "y ~ log(x + 1e999)",
    "y ~ scale(x, ddof=1" + "0" * 400 + ")",
    "y ~ C(Treatment('x'))",
    "y ~ Treatment('x')",
    "y ~ I(open('{canary}', 'w'))",
    "y ~ I(x > open('{canary}', 'w'))",
    "y ~ I(x.__class__)",
    "y ~ I(x, open('{canary}', 'w'))",
    "y ~ I(x > 0 > open('{canary}', 'w'))",
    "y ~ I((lambda: open('{canary}', 'w'))())",
    "y ~ I(x if open('{canary}', 'w') else z)",
    "y ~ I(z := open('{canary}', 'w'))",
    "y ~ I(x and z)",
    "y ~ I(I(x), x)",
    "y ~ I(C(x))",
    "y ~ I(bs(x, df=4))",
    "y ~ cr(x, knots=open('{canary}', 'w'))",
    "y ~ cr(x, df=4, constraints=open('{canary}', 'w'))",
    "y ~ cr(x, 4, constraints=(1, 2))",
    "y ~ log(cr(x, df=4))",
    "y ~ offset(I(x, x))",
    "y ~ hashed(x)",
    "y ~ lag(x)",
    "y ~ eval('1')",
    "y ~ getattr(x, 'shape')",
    "y ~ " + "log(" * 200 + "x" + ")" * 200,
    "y ~ " + "(" * 5000 + "x" + ")" * 5000,
    "y ~ log(" + "-" * 1900 + "x)",
    "y ~ log(" + "x + " * 400 + "x)",
    "y ~ log(" + "9" * 1900 + ")",
    "y ~ x" + " + x" * 50_000,
    "y ~ (a + b + c + d)^999999999999999999999",
    "y ~ (a + b + c + d)**99",
    "y ~ " + "*".join(f"(a + b + {i}:c)" for i in range(30)),
    "y ~ x\x00",
    "y ~ log(x\x00)",
    "y ~ x ~ a",
    "~ x",
    "y ~",
    "y",
    "",
    "y ~ 0",
    "y ~ x - x",
    "y ~ 2",
    "y ~ 2:x",
    "y ~ (0 + x)",
    "y ~ +",
    "y ~ x +",
    "y ~ (x",
    "y ~ x)",
    "y ~ log(x",
    "y ~ x a",
    "y ~ x y",
    "1 ~ x",
    "y ~ x + offset(open('{canary}', 'w'))",
    "y ~ x + offset(__import__('os').system('touch {canary}'))",
    "y ~ x + offset(log(open('{canary}', 'w')))",
    "y ~ x + offset(np.fromfile('{canary}'))",
    "y ~ x + offset(np.log.__class__(a))",
    "y ~ x + offset(a.__class__)",
    "y ~ x + offset(a.__class__.__bases__[0].__subclasses__())",
    "y ~ x + offset((lambda: open('{canary}', 'w'))())",
    "y ~ x + offset(lambda: a)",
    "y ~ x + offset([open('{canary}', 'w') for _ in (1,)])",
    "y ~ x + offset(open('{canary}', 'w') for _ in (1,))",
    "y ~ x + offset(f\"{open('{canary}', 'w')}\")",
    "y ~ x + offset(Q(f\"{open('{canary}', 'w')}\"))",
    "y ~ x + offset(z := open('{canary}', 'w'))",
    "y ~ x + offset((z := open('{canary}', 'w')))",
    "y ~ x + offset(a, open('{canary}', 'w'))",
    "y ~ x + offset(a, out=a)",
    "y ~ x + offset(object=open('{canary}', 'w'))",
    "y ~ x + offset(*open('{canary}', 'w'))",
    "y ~ x + offset(**open('{canary}', 'w'))",
    "y ~ x + offset(a)(open('{canary}', 'w'))",
    "y ~ x + offset(a)[open('{canary}', 'w')]",
    "y ~ x + offset(a).__class__",
    "y ~ x + offset(a if open('{canary}', 'w') else b)",
    "y ~ x + offset(`a) + open('{canary}', 'w') + offset(b`)",
    "y ~ x + offset(a # )\n)",
    "y ~ x + offset(a); open('{canary}', 'w')",
    "y ~ x + offset.__class__(a)",
    "y ~ x + np.offset(a)",
    "y ~ x + ｏｆｆｓｅｔ(a)",
    "y ~ x + offset(ｏｐｅｎ('{canary}', 'w'))",
    "y ~ x + offset(offset(a))",
    "y ~ x + offset(cbind(a, b))",
    "y ~ x + offset(a ** 99999999)",
    "y ~ x + offset(a > 0)",
    "y ~ x + offset(~a)",
    "y ~ x + offset('a')",
    "y ~ x + offset(True + a)",
    "y ~ x + offset(a + 1e999)",
    "y ~ x + offset()",
    "y ~ x + offset(3)",
    "y ~ x + offset(a",
    "y ~ x + offset(" + "log(" * 200 + "a" + ")" * 201,
    "y ~ x + offset(" + "(" * 5000 + "a" + ")" * 5001,
    "y ~ x + offset(" + "-" * 1900 + "a)",
    "y ~ x + offset(" + "a + " * 400 + "a)",
    "cbind(open('{canary}', 'w'), b) ~ x",
    "cbind(a, __import__('os').system('touch {canary}')) ~ x",
    "cbind(a, np.fromfile('{canary}')) ~ x",
    "cbind(a.__class__, b) ~ x",
    "cbind(a, b.__class__.__bases__[0].__subclasses__()) ~ x",
    "cbind((lambda: open('{canary}', 'w'))(), b) ~ x",
    "cbind(a, lambda: b) ~ x",
    "cbind([open('{canary}', 'w') for _ in (1,)], b) ~ x",
    "cbind(a, f\"{open('{canary}', 'w')}\") ~ x",
    "cbind(z := open('{canary}', 'w'), b) ~ x",
    "cbind(a, b, open('{canary}', 'w')) ~ x",
    "cbind(a, b, deparse=open('{canary}', 'w')) ~ x",
    "cbind(*open('{canary}', 'w')) ~ x",
    "cbind(a, *open('{canary}', 'w')) ~ x",
    "cbind(a, **open('{canary}', 'w')) ~ x",
    "cbind(a, b)(open('{canary}', 'w')) ~ x",
    "cbind(a, b)[open('{canary}', 'w')] ~ x",
    "cbind(a, b).__class__ ~ x",
    "cbind(a, b) > open('{canary}', 'w') ~ x",
    "cbind(a if open('{canary}', 'w') else b, b) ~ x",
    "cbind.__class__(a, b) ~ x",
    "np.cbind(a, b) ~ x",
    "ｃｂｉｎｄ(a, b) ~ x",
    "cbind(a, 'b') ~ x",
    "cbind(" + "log(" * 200 + "a" + ")" * 200 + ", b) ~ x",
    "cbind(" + "(" * 5000 + "a" + ")" * 5000 + ", b) ~ x",
    "cbind(a, " + "-" * 1900 + "b) ~ x",
]


def ascii_id(text: str) -> str:
    return text[:40].encode("ascii", "replace").decode()


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that any executed code would create, and a site that raises if it is opened."""
    path = tmp_path / "canary"

    def shout(*args: object, **kwargs: object) -> None:
        path.write_text("run")

    for owner, name in ((os, "system"), (np, "fromfile"), (np, "save"), (builtins, "eval")):
        monkeypatch.setattr(owner, name, shout)
    return path


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii_id)
def test_attack_is_refused_and_not_run(attack: str, canary: Path) -> None:
    text = attack.replace("{canary}", str(canary))
    with pytest.raises(FormulaError):
        parse_pooled_formula(text, POOLED)
    assert not canary.exists()


@pytest.mark.parametrize("attack", [text[4:] for text in ATTACKS if text.startswith("y ~ ")], ids=ascii_id)
def test_attack_inside_a_specification_is_refused(attack: str, canary: Path) -> None:
    with pytest.raises(FormulaError):
        read_terms([attack.replace("{canary}", str(canary))], ["x"])
    assert not canary.exists()


def test_the_canary_sings(tmp_path: Path) -> None:
    """The same text does run where it meets formulaic unchecked."""
    path = tmp_path / "canary"
    with pytest.raises(FactorEvaluationError):
        formulaic.model_matrix(f"log(open('{path}', 'w'))", pd.DataFrame({"x": [1.0, 2.0]}))
    assert path.exists()


@pytest.mark.parametrize("text", [None, 3, b"y ~ x", ["y ~ x"], ("y", "x")])
def test_what_is_not_text_is_refused(text: object) -> None:
    with pytest.raises(FormulaError, match="expected text"):
        parse_pooled_formula(text, POOLED)  # type: ignore[arg-type]


MEANINGS = [
    "a",
    "a + b",
    "a + b - a",
    "a - 1",
    "-1 + a",
    "0 + a",
    "a + 0 + b",
    "a + 1",
    "a:b",
    "a*b",
    "a*b*c",
    "b:a + a",
    "a*b - a:b",
    "(a + b + c)^2",
    "(a + b)**3",
    "(a + b):(c + d)",
    "(a + b)*c - b:c",
    "a:b + b:a",
    "a:a",
    "a*b:c",
    "a + b*c^2",
    "((a))",
    "log(a) + np.log(b):c",
    "C(a) + C(b, Treatment('u')) + C(c, Treatment(reference='u'))*d",
    "bs(a, df=4) + poly(b, 2) + scale(log(c + 1)) + center(d)",
    "log(a+1) + log( a + 1 )",
    "sqrt(-a**2 / 3 * b)",
    "Q('a') + `b`",
    "a + -b",
    "a + - 1",
    "a\n  + b",
]


@pytest.mark.parametrize("right", MEANINGS)
def test_terms_are_those_of_formulaic(right: str) -> None:
    formula = parse_pooled_formula(f"y ~ {right}", POOLED)
    expected = [str(term) for term in formulaic.Formula(f"y ~ {right}").rhs]
    assert formula.intercept == ("1" in expected)
    assert list(formula.sites[0].terms) == [term for term in expected if term != "1"]


def test_terms_are_formula_text_again() -> None:
    right = "a*log(b + 1) + `c` + C(d, Treatment('a)b~')) + Q('x')"
    formula = parse_pooled_formula(f"y ~ {right}", POOLED)
    again = parse_pooled_formula("y ~ " + " + ".join(formula.sites[0].terms), POOLED)
    assert again.sites == formula.sites
    assert set(formula.sites[0].columns) == {"a", "b", "c", "d", "x"}


def test_dot_is_every_column_but_the_response_in_partition_order() -> None:
    formula = parse_formula("log(Age + y) ~ .", COLUMNS)
    assert formula.response == "log(Age + y)"
    assert (formula.response_site, formula.response_columns) == ("Interview", ("Age", "y"))
    assert formula.intercept
    assert formula.sites == (
        SiteTerms("Interview", ("Sex", "Income"), ("Sex", "Income")),
        SiteTerms(
            "Exam",
            ("Weight", "`odd name`", "`Children's (age)`"),
            ("Weight", "odd name", "Children's (age)"),
        ),
        SiteTerms("Laboratory", ("Glucose", "a.b", "µg"), ("Glucose", "a.b", "µg")),
    )


def test_dot_can_be_changed() -> None:
    formula = parse_formula("y ~ . - Age - `odd name` + log(Age) - 1", COLUMNS)
    assert not formula.intercept
    assert formula.sites[0].terms == ("Sex", "Income", "log(Age)")
    assert formula.sites[1].terms == ("Weight", "`Children's (age)`")


def test_dot_squared_within_one_site() -> None:
    formula = parse_formula("y ~ .^2", {"A": ["y", "a", "b"]})
    assert formula.sites[0].terms == ("a", "b", "a:b")


@pytest.mark.parametrize(
    ("left", "columns"),
    [
        ("y", ("y",)),
        ("y > 0", ("y",)),
        ("Sex == 'female'", ("Sex",)),
        ("(y + Age) / 2 <= Income", ("y", "Age", "Income")),
        ("sqrt(y) - 1", ("y",)),
        ("Q('y')", ("y",)),
    ],
)
def test_left_sides(left: str, columns: tuple[str, ...]) -> None:
    formula = parse_formula(f"{left} ~ Weight", COLUMNS)
    assert (formula.response_site, formula.response_columns) == ("Interview", columns)
    assert parse_formula(f"{formula.response} ~ Weight", COLUMNS).response == formula.response


def test_odd_names_inside_transforms() -> None:
    formula = parse_formula('y ~ log(`odd name` + 1) + exp(Q("Children\'s (age)")) + sqrt(µg)', COLUMNS)
    assert formula.sites[0].columns == ("odd name", "Children's (age)")
    assert formula.sites[1] == SiteTerms("Laboratory", ("sqrt(µg)",), ("µg",))


def test_a_formula_of_a_model_without_response() -> None:
    formula = parse_formula("~ .", COLUMNS, response=False)
    assert (formula.response, formula.response_site, formula.response_columns) == ("", None, ())
    held = {terms.site: terms.columns for terms in formula.sites}
    assert held == {site: tuple(names) for site, names in COLUMNS.items()}
    some = parse_formula("~ log(Age) + Weight + C(Sex)", COLUMNS, response=False)
    assert [terms.terms for terms in some.sites] == [("log(Age)", "C(Sex)"), ("Weight",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y ~ .", "a left side in 'y' is not allowed; this model has no response: write '~ .' or '~ a . b'"),
        ("~", r"the right side \(the terms\) is empty; write for instance '~ a \+ b'"),
        (".", "expected one '~' before the terms, found 0; write for instance '~ a"),
        ("~ Age - Age", "no term is left"),
        ("~ Age:Weight", "'Age' at site 'Interview' and column 'Weight' at site 'Exam'"),
        ("~ weight", "Did you mean 'Weight'"),
        ("~ offset(Age)", "this model has none"),
    ],
)
def test_errors_of_a_formula_of_a_model_without_response(text: str, message: str) -> None:
    with pytest.raises(FormulaError, match=message):
        parse_formula(text, COLUMNS, response=False)


@pytest.mark.parametrize("text", ["~ .", "~ Age + Weight"])
def test_a_model_with_a_response_asks_for_one(text: str) -> None:
    with pytest.raises(
        FormulaError, match=r"the left side \(the response\) is empty; write for .*'y ~ a \+ b'"
    ):
        parse_formula(text, COLUMNS)


@pytest.mark.parametrize("name", ["lambda", "log", "C", "np", "scale", "Q"])
def test_a_column_may_be_called_like_anything(name: str) -> None:
    formula = parse_pooled_formula(f"y ~ log(`{name}` + 2) + {name} + scale(x)", ["y", "x", name])
    assert formula.sites[0].columns == (name, "x")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("y ~ Age:Weight", ["'Age:Weight'", "'Age'", "'Interview'", "'Weight'", "'Exam'", "one place"]),
        ("y ~ log(Age + Glucose)", ["'log(Age + Glucose)'", "'Interview'", "'Laboratory'"]),
        ("y ~ .^2", ["'Age:Weight'", "'Interview'", "'Exam'"]),
        ("y + Weight ~ Age", ["response", "'Interview'", "'Exam'"]),
        ("y ~ weight", ["'weight'", "'Weight'", "'Exam'"]),
        ("y ~ Glucos", ["'Glucose'", "'Laboratory'"]),
        ("y ~ zzzzzz", ["'zzzzzz'", "'Interview'", "'Exam'"]),
        ("Ages ~ Weight", ["'Ages'", "'Age'"]),
        ("y ~ Age + log(y)", ["'y'", "'log(y)'", "right side"]),
        ("y ~ I(Age, Income)", ["I(...)", "poly(x, 2)"]),
        ("y ~ log(Age, base=2)", ["base=", "log()"]),
        ("y ~ Age / Weight", ["'Age:Weight'", "one place"]),
        ("y ~ Age % Weight", ["'%'", "+ - : * / ^"]),
        ("y ~ rcs(Age, 3)", ["rcs(...)", "are ns(x, df=4)", "knots=", "Boundary.knots"]),
        ("y ~ s(Age)", ["no penalized smooths", "are ns(x, df=4)"]),
        ("y ~ factor(Sex)", ["C(x)", "Treatment"]),
    ],
)
def test_errors_say_what_where_and_what_to_do(text: str, parts: list[str]) -> None:
    with pytest.raises(FormulaError) as error:
        parse_formula(text, COLUMNS)
    for part in parts:
        assert part in str(error.value)


def test_a_column_at_two_sites_is_refused() -> None:
    with pytest.raises(FormulaError, match="'Age' is held by site 'A' and by site 'B'"):
        parse_formula("y ~ .", {"A": ["y", "Age"], "B": ["Age"]})


def test_a_column_named_like_a_used_transform_is_refused() -> None:
    with pytest.raises(FormulaError, match="rename"):
        parse_pooled_formula("y ~ `log(x)` + log(x)", ["y", "x", "log(x)"])


def test_many_columns_are_read_quickly() -> None:
    names = [f"column_{i}" for i in range(2000)]
    assert len(parse_pooled_formula("y ~ .", ["y", *names]).sites[0].terms) == 2000
    assert len(parse_pooled_formula("y ~ " + " + ".join(names), ["y", *names]).sites[0].terms) == 2000


def test_terms_read_one_by_one_make_the_formula_of_the_whole_text():
    text = "y ~ a:b + log(c) + b:a + C(g) + c"
    terms = [parse_term(part) for part in ("a:b", "log(c)", "b:a", "C(g)", "c")]
    columns = ["y", "a", "b", "c", "g"]
    made = formula_of_terms(text, "y", terms, {"": columns}, pooled=True)
    assert made == parse_pooled_formula(text, columns)
    apart = {"A": ["y", "a", "b"], "B": ["c", "g"]}
    assert formula_of_terms(text, "y", terms, apart, pooled=False) == parse_formula(text, apart)
    alone = formula_of_terms("y ~ 1", "y", [], {"": columns}, pooled=True)
    assert alone == parse_pooled_formula("y ~ 1", columns)
    with pytest.raises(FormulaError, match="expected one term"):
        parse_term("a + b")
