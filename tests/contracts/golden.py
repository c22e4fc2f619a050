"""What a golden file has of a result: its printed summary, the numbers behind it, the releases of its run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

FOLDER = Path(__file__).with_name("golden")
ROUNDED = {
    "Traffic: (bytes)": re.compile(r"Traffic: +[\d.,]+ [kMG]?B"),
    "Relative score: (rounding)": re.compile(r"Relative score: +\d\S*"),
}
"""What differs between processors: rounding errors, and the length of messages with numbers as text."""
MOVED_BY_NOISE = re.compile(r"moved\s+('[^']*'|the\s+intercept)(?=\s+most)")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
RELEASED = ["sender", "receiver", "step", "array", "kind", "masked", "shape"]


def text_of(result: Any) -> str:
    """Return the summary as it is printed, or a table that has no summary."""
    shown = result.summary() if hasattr(result, "summary") else result
    text = shown.to_string() if isinstance(shown, pd.DataFrame) else str(shown)
    notes = getattr(result, "notes", None) or getattr(result, "attrs", {}).get("notes", ())
    for instead, rounded in ROUNDED.items():
        text = rounded.sub(instead, text)
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join([*lines, "", "All notes:", *(f"* {note}" for note in notes), ""])


def numbers_of(result: Any) -> dict[str, Any]:
    """Return the tables of a result at full precision, and what its run released."""
    if isinstance(result, pd.DataFrame):
        return {"table": plain_table(result)}
    found = {
        name: plain_table(getattr(result, name)()) for name in ("tidy", "glance") if hasattr(result, name)
    }
    if hasattr(result, "diagnostics"):
        found["diagnostics"] = plain_table(result.diagnostics()[["kind", "severity"]])
    ledger = getattr(result, "_ledger", None)
    if ledger is not None and hasattr(ledger, "releases"):
        table = ledger.releases()
        count = [name for name in table if name not in {*RELEASED, "what", "entities"}]
        table = table[[*RELEASED, *count]].astype(str)
        table.loc[table["array"] == "text", "bytes"] = "(text)"
        found["releases"] = plain_table(table)
    return found


def plain_table(table: pd.DataFrame) -> dict[str, list[Any]]:
    """Return the columns of a table as lists of numbers and texts; its index comes first."""
    table = table.reset_index()
    return {str(name): [plain(value) for value in table[name]] for name in table}


def plain(value: Any) -> Any:
    """Return a cell as a number or a text; JSON has no other."""
    if isinstance(value, bool | np.bool_) or value is None:
        return str(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    return str(value)


def write(name: str, result: Any) -> None:
    """Write the golden files of a result."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / name.replace(" ", "-")
    path.with_suffix(".txt").write_text(text_of(result))
    path.with_suffix(".json").write_text(_json(numbers_of(result)))


def _json(tables: dict[str, dict[str, list[Any]]]) -> str:
    """Return JSON with a line for each column."""
    texts = []
    for name, table in tables.items():
        columns = ",\n".join(
            f"  {json.dumps(column)}: {json.dumps(cells)}" for column, cells in table.items()
        )
        texts.append(f"{json.dumps(name)}: {{\n{columns}\n}}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def read(name: str) -> tuple[str, dict[str, Any]]:
    """Return the golden text and numbers of a result."""
    path = FOLDER / name.replace(" ", "-")
    return path.with_suffix(".txt").read_text(), json.loads(path.with_suffix(".json").read_text())


def differences(expected: Any, found: Any, tolerance: float, place: str = "") -> list[str]:
    """Return where two structures of numbers and texts differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [*expected, *(name for name in found if name not in expected)]
        if list(expected) != list(found):
            return [f"{place}: expected {list(expected)}, found {list(found)}"]
        return [
            line
            for name in names
            for line in differences(expected[name], found[name], tolerance, f"{place}/{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return [f"{place}: expected {len(expected)} rows, found {len(found)}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, tolerance, f"{place}/{i}")]
    if isinstance(expected, float) and isinstance(found, float):
        same = expected == found or (np.isnan(expected) and np.isnan(found))
        same = same or abs(expected - found) <= tolerance * max(1.0, abs(expected))
    elif np.isinf(tolerance) and type(expected) is type(found):  # counts and texts with noise
        same = NUMBER.sub("#", str(expected)) == NUMBER.sub("#", str(found))
    else:
        same = expected == found
    return [] if same else [f"{place}: expected {expected!r}, found {found!r}"]


def text_differences(expected: str, found: str, tolerance: float = 0.0) -> list[str]:
    """Return the lines that differ by more than one unit of the last printed digit of a number.

    Numbers of any size are equal where the tolerance is infinite.
    """
    if np.isinf(tolerance):
        expected, found = (
            " ".join(NUMBER.sub("#", MOVED_BY_NOISE.sub("moved (one)", text)).split())
            for text in (expected, found)
        )
    before, after = expected.splitlines(), found.splitlines()
    if len(before) != len(after):
        missing = [f"- {line}" for line in before if line not in after]
        return [
            *missing,
            *(f"+ {line}" for line in after if line not in before),
            "the number of lines differs",
        ]
    pairs = zip(before, after, strict=True)
    return [f"- {a}\n+ {b}" for a, b in pairs if a != b and not _equal_but_for_rounding(a, b)]


def _equal_but_for_rounding(a: str, b: str) -> bool:
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return False
    pairs = zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)
    return all(
        x == y or (len(x) == len(y) and abs(_number(x) - _number(y)) <= 1.01 * _unit(x)) for x, y in pairs
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _unit(text: str) -> float:
    """Return one unit of the last digit; none of a whole number, which is a count."""
    digits, _, exponent = text.partition("e")
    decimals = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals else 0.0
