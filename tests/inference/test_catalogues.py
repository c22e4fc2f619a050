"""Catalogues of notes: each kind is emitted somewhere, with the values that its text has, and the reverse."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

import fedstat
from fedstat.errors import Remedy
from fedstat.inference.notes import SEVERITIES, Catalogue, Note, NoteForm, above_table, fields_of

PACKAGE = Path(fedstat.__file__).parent


@cache
def uses():
    """Return catalogues by address, and calls of ``note`` as (place, catalogue, call)."""
    catalogues, calls = {}, []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        uses_notes = "NOTES = Catalogue(" in text or "NOTES.note" in text
        if not uses_notes or (path.name == "notes.py" and path.parent.name == "inference"):
            continue
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = importlib.import_module(name)
        catalogues |= {
            name if held == "NOTES" else f"{name} {held}": vars(module)[held]
            for held in re.findall(r"^(\w*NOTES) = Catalogue\(", text, re.MULTILINE)
        }
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("NOTES.note"):
                catalogue = eval(ast.unparse(node.func.value), vars(module))
                calls.append((f"{name}:{node.lineno}", catalogue, node))
    return catalogues, calls


def kinds_of(node, catalogue):
    """Kinds that the first argument can be: a constant, a choice of constants, or an f-string's beginning."""
    constants = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and one.value]
    if isinstance(node, ast.JoinedStr):
        return {kind for kind in catalogue if kind.startswith(constants[0])}
    return {one for one in constants if one in catalogue}


def test_there_is_a_catalogue_for_every_family():
    catalogues, calls = uses()
    assert len(catalogues) > 25 and len(calls) > 200
    assert all(isinstance(one, Catalogue) and one for one in catalogues.values())


@pytest.mark.parametrize("name", sorted(uses()[0]))
def test_every_kind_is_emitted_with_the_values_that_its_text_has(name):
    catalogue, emitted = uses()[0][name], set()
    for place, held, node in uses()[1]:
        if held is not catalogue:
            continue
        first = node.args[0]
        named = {keyword.arg for keyword in node.keywords}
        kinds = kinds_of(first, catalogue)
        if isinstance(first, ast.Constant):
            assert first.value in catalogue, f"{place}: kind {first.value!r} is not declared"
        emitted |= kinds
        if None in named or "remedy" in named or isinstance(first, ast.JoinedStr):
            continue  # values of a mapping, a remedy with fields of its own, or one of several kinds
        for kind in kinds:
            assert named == catalogue[kind].fields, f"{place}: {kind}"
    left = set(catalogue) - emitted
    # A kind that is chosen in lines above a call is written twice.
    everywhere = " ".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert not {kind for kind in left if everywhere.count(f'"{kind}"') < 2}


@pytest.mark.parametrize("name", sorted(uses()[0]))
def test_every_form_is_valid(name):
    for kind, form in uses()[0][name].items():
        assert isinstance(form, NoteForm) and form.severity in SEVERITIES, kind
        assert kind.partition("/")[0].replace("_", "").isalpha(), kind
        if form.remedy is not None:
            assert "remedy" in fields_of(form.template), f"{kind}: the remedy is not printed"
            assert not fields_of(form.remedy.text) - form.fields - {"call", "arguments"}, kind


FORMS = Catalogue(
    warning={
        "small": (
            "{n:,} rows of {{all}}: {remedy}.",
            Remedy("fit(cov_type={name!r})", "use {arguments}"),
        ),
        "small/none": "No rows in {{braces}}.",
        "listed": "Columns: {columns}.",
    },
)


def test_a_note_is_made_of_its_form_and_values():
    note = FORMS.note("small", n=1200, name="HC3")
    assert str(note) == "1,200 rows of {all}: use cov_type='HC3'." and note.kind == "small"
    assert note.values["call"] == "fit(cov_type='HC3')" and note.severity == "warning"
    assert FORMS.note("small/none") == Note("small", "No rows in {braces}.", "warning")
    assert str(FORMS.note("listed", columns=["a", "b"])) == "Columns: a, b."
    other = FORMS.note("small", remedy=Remedy("bootstrap()"), n=1)
    assert str(other) == "1 rows of {all}: bootstrap()."


@pytest.mark.parametrize("values", [{}, {"n": 1}, {"n": 1, "name": "a", "more": 2}])
def test_wrong_values_fail_at_once(values):
    with pytest.raises(TypeError, match="note 'small': values that are missing or not in its text"):
        FORMS.note("small", **values)
    with pytest.raises(KeyError, match="other"):
        FORMS.note("other")


def test_only_critical_notes_stand_above_the_table():
    notes = [Note("a", "x", "info"), Note("b", "y", "critical"), Note("c", "z", "warning")]
    assert [note.kind for note in above_table(notes)] == ["b"]


def test_arguments_of_remedies():
    assert Remedy("fit(cov_type='HC3')").arguments == "cov_type='HC3'"
    assert Remedy("from_formula(..., between='free').fit()").arguments == "between='free'"
    assert Remedy("bootstrap()", "Use {call} {n}").sentence(n=3) == "Use bootstrap() 3"
