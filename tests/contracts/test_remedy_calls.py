"""Calls that notes and errors name as remedies are executed where they are printed; none is left out."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from dataclasses import replace
from functools import cache, partial

import pytest
from contracts.failures import failing, refused_twice, repaired
from contracts.failures_at_sites import FAILURES
from contracts.recommended import raised, recommended_in_words, recommends, sources
from contracts.remedies import PACKAGE, SITUATIONS, columns, execute, executed, noted, two_columns

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, PolicyError, Remedy
from fedstat.federation.message import pack_refusal, unpack_reply
from fedstat.inference.notes import fields_of
from fedstat.operator.command_line import parser

pytestmark = pytest.mark.filterwarnings("ignore")
PLACES = range(len(SITUATIONS))


@pytest.mark.parametrize("place", PLACES, ids=[str(situation) for situation in SITUATIONS])
def test_a_note_is_gone_after_its_remedy(place):
    situation, found = SITUATIONS[place], executed(place)
    if situation.shows:
        assert situation.shows(found.after)
        return
    after = noted(situation, found.after)
    left = [row.values for row in after.diagnostics().itertuples() if row.kind == situation.kind]
    assert not [values for values in left if "call" in values]


@pytest.mark.parametrize("place", range(len(FAILURES)), ids=[str(failure) for failure in FAILURES])
def test_an_analysis_succeeds_after_the_remedy_of_its_error(place):
    assert repaired(place)


def catalogues():
    """Catalogues of the package by the module that declares them."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search("^NOTES = Catalogue", path.read_text(encoding="utf-8"), re.MULTILINE):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            found[name] = importlib.import_module(name).NOTES
    return found


def test_each_text_with_a_remedy_is_printed_in_a_situation():
    printed = {(id(held), kind) for place in PLACES for held, kind in executed(place).forms}
    left = [
        f"{name}: {kind}"
        for name, catalogue in catalogues().items()
        for kind, form in catalogue.items()
        if "remedy" in fields_of(form.template) and (id(catalogue), kind) not in printed
    ]
    assert not left, "add situations to tests/contracts/remedies.py"


def remedies():
    """Calls of all remedies that the package declares, as patterns, by place; a field may have any value."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Remedy":
                first = node.args[0]
                assert isinstance(first, ast.Constant | ast.JoinedStr), f"{path}:{node.lineno}"
                written = [first] if isinstance(first, ast.Constant) else first.values
                parts = [one.value if isinstance(one, ast.Constant) else "{}" for one in written]
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", pattern_of("".join(parts))


def pattern_of(call):
    """The pattern of a call with fields."""
    escaped = re.escape(call.replace("{{", "\0").replace("}}", "\1"))
    return re.sub(r"\\\{.*?\}", ".*", escaped).replace("\0", r"\{").replace("\1", r"\}")


UNTRIED = (
    *("models/vfem/iteration/protocol.py", "models/vglm/em_fit.py", "models/vfem/model.py:9"),
    *("federation/transport/flare/", "operator/flare_commands.py", "operator/service.py"),
)
"""Remedies that no situation tries: an iteration without a maximum, draws, open ranges; FLARE's server."""


def test_each_remedy_is_executed_in_a_situation():
    calls = {executed(place).call for place in PLACES}
    calls |= {imputations()[1], *(repaired(place).call for place in range(len(FAILURES)))}
    left = {
        place: call
        for place, call in remedies()
        if not place.startswith(UNTRIED) and not any(re.fullmatch(call, one, re.DOTALL) for one in calls)
    }
    assert not left, f"add failures to tests/contracts/failures.py: {left}"


def test_what_an_error_recommends_is_its_remedy():
    left = [f"{one}: {said}" for one in raised() for said in recommended_in_words(one)]
    assert not left, "give it a remedy, or state a fact"


@cache
def imputations():
    """Imputations of a skewed response, and the remedy of their note."""
    partition = columns(two_columns(response="skewed"))
    notes = fs.impute(partition, "y ~ x + z", m=2, seed=1).diagnostics().set_index("kind")["values"]
    return partition, notes["response_not_normal"]["call"]


def test_errors_of_imputations_name_no_argument_of_a_fit(monkeypatch):
    monkeypatch.setattr("fedstat.models.vertical.exchange.patterns.LARGEST_SHARE", -1e-9)
    with pytest.raises(EstimationError, match=r"leave out columns or a site$") as caught:
        fs.impute(columns(two_columns()), "y ~ x + z", m=2, seed=1)
    assert caught.value.remedy is None


def test_the_second_refusal_names_what_is_left():
    failure, calls = refused_twice(), []
    for _ in range(2):
        error = failing(failure, partial(failure.run, failure.partition()))
        calls.append(error.remedy.filled_call)
        failure = replace(failure, arguments={**failure.arguments, **eval(f"dict({error.remedy.arguments})")})
    assert calls == ["fit(..., masked=True)", "fit(..., local=False)"]
    assert failure.run(failure.partition()).converged


COMMANDS = re.compile(
    r"fedstat (site|federation) ([a-z][a-z-]+)((?: +(?:--[a-z-]+|[A-Z]+\b|'?\{[^}]*\}'?|(?<!' )[a-z]+$))*)"
)


def commands():
    """Commands of the command line that texts of the package name, by place."""
    for path, tree in sources().items():
        nodes = list(ast.walk(tree))
        joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        inner = {id(part) for node in joined for part in node.values}
        plain = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in inner]
        for node in [*joined, *plain]:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in parts)
            for found in COMMANDS.finditer(" ".join(text.split()) if "fedstat" in text else ""):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", found.group(0)


def test_commands_that_texts_name_are_commands(capsys):
    left = []
    for place, command in commands():
        room, word, *given = command.split()[1:]
        # A command without its folder is a name, and one with it is complete.
        if not given:
            given = ["--help"]
        try:
            parser().parse_args([room, word, *("x" if "{" in one else one for one in given)])
        except SystemExit as stopped:
            if stopped.code:
                left.append(f"{place}: {command}: {capsys.readouterr().err.splitlines()[-1]}")
    assert not left


def test_the_remedy_of_imputations_runs():
    (situation,) = [one for one in SITUATIONS if one.kind == "response_not_normal"]
    partition, call = imputations()
    assert execute(call, situation, partition, None).converged


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("fit(a={x!r}, b={{'c': '{x}'}})", "fit(a='u', b={'c': 'u'})"),
        ("fit(ratio={smaller:.1g})", "fit(ratio=0.02)"),
    ],
)
def test_patterns_are_those_of_filled_calls(call, written):
    assert Remedy(call).call.format(x="u", smaller=0.02) == written
    assert re.fullmatch(pattern_of(call), written) and not re.fullmatch(pattern_of(call), "fit(other=1)")


def test_errors_print_their_remedy_and_keep_it():
    remedy = Remedy("fit(cov_kwds={{'groups': {name!r}}})", "use {arguments} for {name}").filled(name="a{b}")
    error = PolicyError("wrong", rule="r", site="s", remedy=remedy)
    assert str(error) == "wrong; use cov_kwds={'groups': 'a{b}'} for a{b}"
    for kept in (pickle.loads(pickle.dumps(error)), error.with_message("other")):
        assert kept.remedy.filled_call == "fit(cov_kwds={'groups': 'a{b}'})"
        assert (kept.rule, kept.site) == ("r", "s")
    assert str(error.with_message("other")) == "other"
    texts = {"Use it.": "wrong. Use it.", ": use it": "wrong: use it", ", or it": "wrong, or it"}
    assert {text: str(ModelError("wrong", remedy=Remedy("f()", text))) for text in texts} == texts
    assert ModelError("wrong").remedy is None and str(ModelError("wrong")) == "wrong"


def test_errors_of_remote_sites_have_no_call():
    error = PolicyError("wrong", rule="r", site="s", remedy=Remedy("fit(masked=True)", "Use it"))
    with pytest.raises(PolicyError, match=r"wrong\. Use it") as caught:
        unpack_reply(pack_refusal("s", error))
    assert caught.value.remedy is None


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("wrong; use a=1", "use a=1"),
        ("wrong. Use fewer, or f(x)", "Use fewer, or f(x)"),
        ("wrong; f(x) helps", "f(x) helps"),
        ("lost: 'fedstat site pin FOLDER' helps", "'fedstat site pin FOLDER' helps"),
        ("wrong; write cbind(events, others)", ""),
        ("f(x) needs a=1", ""),
        ("a=1 has no use for b=2", ""),
        ("wrong; use fewer columns", ""),
    ],
)
def test_recommendations_are_recognized(text, clause):
    assert recommends(text) == clause
