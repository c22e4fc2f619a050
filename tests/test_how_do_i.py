"""The page of answers: its code runs from top to bottom, and gives the numbers of R below it."""

import ast
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "how-do-i.md"
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n(R: .*?)\n\n)?", re.DOTALL | re.MULTILINE)
NUMBER = r"-?\d+(?:\.\d+)?"
LISTED = re.compile(rf"\s({NUMBER}(?:, {NUMBER})+)")


def numbers(value):
    """Numbers of the value of an expression."""
    if isinstance(value, pd.DataFrame | pd.Series | list):
        return np.asarray(value, dtype=float).ravel()
    return np.array(re.findall(NUMBER, str(value)), dtype=float)


@pytest.mark.example
@pytest.mark.filterwarnings("ignore")
def test_answers_run_and_give_the_numbers_of_r(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, compared = {}, 0
    for code, says in CODE.findall(PAGE.read_text(encoding="utf-8")):
        body = ast.parse(code).body
        assert len(body) <= 3 or names == {} or "fs.Policy" in code, code
        *before, last = body
        exec(compile(ast.Module(before, []), "page", "exec"), names)
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), "page", "exec"), names)
            continue
        value = eval(compile(ast.Expression(last.value), "page", "eval"), names)
        listed = LISTED.search(" ".join(re.sub(r"`[^`]*`", "", says).split()))
        if listed is None:
            continue
        found = numbers(value)
        for text in listed[1].split(", "):
            compared += 1
            digits = len(text.lstrip("-0.").replace(".", ""))
            near = np.abs(found - float(text)) <= 1.01 * 10.0 ** (
                np.floor(np.log10(abs(float(text)))) + 1 - max(digits, 4)
            )
            assert near.any(), (code, text, found)
    assert compared > 50
