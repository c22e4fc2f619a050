"""Plans and requests in words for the owner of a site."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedstat.federation.disclosure.approval import (
    DESIGN_FAMILY,
    AnalysisPlan,
    PlannedStep,
    ReleasedArray,
    bound_arrays,
)
from fedstat.federation.message import Request

# ----------------------------------------------------------------------------------------------------
# What an analysis reveals, in three lines, from the kinds of the arrays that its steps declare to release.
# The site compares every reply with the same declarations, so the lines hold for any family.

OWN_KINDS = ("aggregate", "noisy aggregate", "sketch")
"""Kinds of numbers over many records."""
ROW_KINDS = ("per entity", "raw columns")
"""Kinds of numbers with at least one for each record."""
PlannedArray = tuple[PlannedStep, ReleasedArray]


def plain_lines(plan: AnalysisPlan, least: int = 0) -> tuple[str, str, str]:
    """State what a plan reveals: about the site alone, only together with other sites, and about single rows.

    `least` is the smallest number of records behind a number, by the policy of the site.
    """
    arrays = [(step, array) for step in plan.steps for array in step.gives]
    lines = (
        f"About {plan.site} alone, the coordinator learns {_own(arrays, least)}.",
        _together(plan, arrays),
        _rows(plan.site, arrays),
    )
    own, together, rows = (_printable(line) for line in lines)
    return own, together, rows


def _own(arrays: Sequence[PlannedArray], least: int) -> str:
    own = [one for one in arrays if one[1].kind in OWN_KINDS and not one[1].masked]
    others = [one for one in arrays if one[1].kind in ("schema", "control") and not one[1].masked]
    parts = []
    for noise, found in (
        ("", [one for one in own if one[1].kind != "noisy aggregate"]),
        (" with random noise", [one for one in own if one[1].kind == "noisy aggregate"]),
    ):
        if any(array.array != "text" for _, array in found):
            behind = f", each over at least {least} records" if least > 1 else ""
            parts.append(f"{_amount(found, 'total')}{noise} (sums, means, counts){behind}")
        texts = [array.what for _, array in found if array.array == "text"]
        parts += [f"a text ({'; '.join(dict.fromkeys(texts))})"] if texts else []
    if others:
        only = "" if own else "no total, only "
        parts.append(f"{only}short technical answers (names, numbers of records, yes or no)")
    elif not own:
        parts.append("no total")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _together(plan: AnalysisPlan, arrays: Sequence[PlannedArray]) -> str:
    masked = [one for one in arrays if one[1].masked and one[1].kind not in ROW_KINDS]
    shares = [one for one in arrays if one[1].kind == "masked share"]
    lines = []
    if masked:
        over = f"{plan.among} sites" if plan.among else "several sites"
        if plan.among == 2:
            hidden = f"The other site can compute the part of {plan.site}."
        else:
            hidden = f"The part of {plan.site} stays hidden, unless all other sites help the coordinator."
        lines.append(f"Only as a sum over {over}, it learns {_amount(masked, 'number')}. {hidden}")
    if shares:
        lines.append(
            f"Only together with another site, it learns {_amount(shares, 'sum')} of products of columns of "
            "both. Each site sends random numbers for this, whose sum is the result."
        )
    return " ".join(lines) or "Nothing is released as a sum over several sites."


def _rows(site: str, arrays: Sequence[PlannedArray]) -> str:
    single = [one for one in arrays if one[1].kind in ROW_KINDS]
    present = [array.what for _, array in arrays if array.kind == "presence"]
    known = f" It is revealed {_listed(present)}." if present else ""
    if not single:
        return f"No row leaves {site}: no value of a single record is released.{known}"
    what = _listed([array.what for _, array in single])
    hidden = " (as sums over sites)" if all(array.masked for _, array in single) else ""
    return (
        f"Attention: numbers for single records leave {site}{hidden}: {what}, {_amount(single, 'number')}. "
        f"Several of them for one record can reveal its values.{known}"
    )


def _amount(arrays: Iterable[PlannedArray], noun: str) -> str:
    found = [one for one in arrays if one[1].array != "text"]
    total = sum(step.most * array.numbers for step, array in found)
    if any(not array.numbers for _, array in found):
        return f"{noun}s whose number is not known in advance"
    return f"at most {total:,} {noun}{'' if total == 1 else 's'}"


def _listed(whats: Sequence[str]) -> str:
    names = list(dict.fromkeys(whats))
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _printable(line: str) -> str:
    # Names come from elsewhere: control characters could overwrite other text on a terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in line)


# ----------------------------------------------------------------------------------------------------
# The formula of a request, which the site reads itself.

MAX_FORMULA_LENGTH = 300


def formula_of(request: Request) -> str:
    """Return the formula that a request is about, from the columns and terms that it names; empty if none."""
    content = _design_content(request.text) if request.family == DESIGN_FAMILY else {}
    response, terms = content.get("response"), content.get("terms")
    terms = [one for one in terms if isinstance(one, str)] if isinstance(terms, list) else []
    left = response if isinstance(response, str) else ""
    if not left and not terms:
        return ""
    text = f"{left} ~ {' + '.join(terms) or '1'}" if left else " + ".join(terms)
    return _printable(text if len(text) <= MAX_FORMULA_LENGTH else f"{text[: MAX_FORMULA_LENGTH - 4]} ...")


def _design_content(text: str) -> dict[str, Any]:
    """Read what a text of a design requests; empty if it requests nothing."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and isinstance(content.get("question"), str):
            content = json.loads(content["question"])
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# ----------------------------------------------------------------------------------------------------
# A complete plan, line by line.

DESIGN_FIELDS: Mapping[str, str] = {
    "response": "response",
    "terms": "terms",
    "offsets": "offset",
    "weights": "weights",
    "labels": "groups",
    "columns": "columns",
}
"""What the texts of a design request, by field, in words for the owner."""
MAX_NAMES_SHOWN = 12


def describe_plan(plan: AnalysisPlan) -> Iterator[str]:
    """Describe the requests of a plan in plain words, line by line, for the site's owner."""
    yield from (_printable(line) for line in dict.fromkeys(_step_lines(plan)))


def _step_lines(plan: AnalysisPlan) -> Iterator[str]:
    yield f"Analysis, as the coordinator describes it: {plan.call}, of {plan.formula}, {plan.distribution}"
    yield f"Columns of {plan.site} that it uses: {', '.join(plan.columns) or 'none'}"
    for text in dict.fromkeys(_design_texts(plan)):
        yield from _read_design_text(text)
    request = Counter(one.step for one in plan.prepared)
    reported = ", ".join(f"{step} ({times} times)" if times > 1 else step for step, times in request.items())
    yield f"Released before it (names, kinds, levels, counts, which entities exist): {reported or 'nothing'}"
    yield f"Rounds: at most {plan.rounds:,}"
    yield "Steps in order, and what each releases:"
    for step in plan.steps:
        gives = "; ".join(map(_array_text, step.gives)) or "nothing"
        often = "once" if step.most == 1 else f"at most {step.most:,} times"
        yield f"  {step.step} ({step.family}), {often}: {gives}"
        for text in step.texts:
            if values := bound_arrays(text):
                yield f"    with {', '.join(f'{name} = {value}' for name, value in values.items())}"
    sums = ", ".join(f"{n:,} ({kind})" for kind, n in plan.numbers().items() if n)
    yield f"Numbers released in total, at most: {sums or 'none'}"
    yield "Who could learn what, as the coordinator describes it:"
    yield from (f"  {sentence}" for sentence in plan.learned or ("No party learns anything.",))


def _array_text(array: ReleasedArray) -> str:
    masked = ", only in a masked sum" if array.masked else ""
    if array.numbers:
        size = "1 number" if array.numbers == 1 else f"{array.numbers:,} numbers"
    else:
        size = "a text" if array.array == "text" else "any size"
    behind = f" over {array.entities:,} records" if array.entities else ""
    return f"{array.what} ({array.kind}{masked}; {size}{behind})"


def _design_texts(plan: AnalysisPlan) -> Iterator[str]:
    yield from (one.text for one in plan.prepared)
    yield from (text for step in plan.steps if step.family == DESIGN_FAMILY for text in step.texts)


def _read_design_text(text: str) -> Iterator[str]:
    """Describe what a text of a design requests."""
    content = _design_content(text)
    parts = [
        f"{word} {_name_text(content[name])}" for name, word in DESIGN_FIELDS.items() if content.get(name)
    ]
    if content.get("terms") or content.get("response"):  # the plan lists the columns above
        parts = [part for part in parts if not part.startswith("columns ")]
    if parts:
        yield f"It requests: {'; '.join(parts)}"


def _name_text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{role} {name}" for role, name in value.items()]
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    more = f" and {len(value) - MAX_NAMES_SHOWN} more" if len(value) > MAX_NAMES_SHOWN else ""
    return ", ".join(map(str, value[:MAX_NAMES_SHOWN])) + more
