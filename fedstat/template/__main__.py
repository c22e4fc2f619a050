"""Write a new family into a source tree: its modules, its tests, and the lines that make it public."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FILES = Path(__file__).parent / "family"
MODULE, CLASS = "newfamily", "NewFamily"
"""Names in the files of the template."""
LONGEST = 18
"""Letters of a name; longer ones would need other line breaks."""


def class_name(name: str) -> str:
    """Return the name of the model of a family: ``federated_gamma`` has ``FederatedGamma``."""
    return "".join(part.capitalize() for part in name.split("_"))


def family_files(name: str) -> Mapping[str, str]:
    """Return the files of a family by their path in the source tree."""
    found = {}
    for path in sorted(FILES.glob("*.txt")):
        file = path.stem.replace(MODULE, name)
        folder = f"tests/models/{name}" if file.startswith("test_") else f"fedstat/models/{name}"
        text = path.read_text(encoding="utf-8").replace(MODULE, name).replace(CLASS, class_name(name))
        found[f"{folder}/{file}"] = sort_imports(text)
    return found


def sort_imports(text: str) -> str:
    """Sort the imports from the package, whose order depends on the name of the family."""
    statement = r"from fedstat\.[\w.]+ import (?:[^(\n]+|\([^)]*\))\n"
    return re.sub(
        f"(?:^{statement})+",
        lambda block: "".join(sorted(re.findall(statement, block[0]), key=_module_of)),
        text,
        flags=re.M,
    )


def _module_of(statement: str) -> str:
    """Return the module of an import; any other line unchanged."""
    return statement.split()[1] if " import " in statement else statement


def insert_line(text: str, line: str, like: str) -> str:
    """Insert a line in order among those that match a pattern."""
    found = list(re.finditer(rf"^{like}$", text, re.M))
    later = [match.start() for match in found if _module_of(match[0]) > _module_of(line)]
    at = later[0] if later else found[-1].end() + 1
    return f"{text[:at]}{line}\n{text[at:]}"


def registrations(name: str) -> Mapping[str, tuple[str, str]]:
    """Return the lines that make a family public: by file, the line and those among which it stands."""
    model = class_name(name)
    place = f"from fedstat.models.{name}"
    return {
        "fedstat/models/__init__.py": (f'    "{name}": ("{model}",),', r'    "[a-z0-9_]+": \(.*\),'),
        "fedstat/__init__.py": (
            f"    {place}.model import {model} as {model}",
            r"    from fedstat\.models\..*",
        ),
        "fedstat/results.pyi": (
            f"{place}.results import {model}Results as {model}Results",
            r"from fedstat\..*",
        ),
        "docs/building/arguments.py": (
            f'    "{model}": ("{model}",),',
            r'    "\w+": \("\w+".*\),',
        ),
        "tests/contracts/families.py": (
            f'    "{model}": "k ~ {{x}} + z",',
            r'    "Federated\w+": "\w+ ~ .*",',
        ),
        "docs/api/models.rst": (f"   fedstat.{model}", r"   fedstat\.Fed\w+"),
        "docs/api/results.rst": (
            f"   fedstat.results.{model}Results",
            r"   fedstat\.results\.(?:GLM|OLS|FedAvg|Boost)Results",
        ),
    }


def write_family(name: str, root: Path) -> list[Path]:
    """Write a family into a source tree, and return the files that are new or changed.

    Raises
    ------
    ValueError
        The name is no module name, is too long, or is taken; nothing is written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > LONGEST:
        raise ValueError(
            f"{name!r}: expected the name of a module in at most {LONGEST} lower-case letters, digits and _"
        )
    if (root / "fedstat" / "models" / name).exists():
        raise ValueError(f"{name!r}: there is such a family")
    written = dict(family_files(name))
    for file, (line, like) in registrations(name).items():
        if not file.startswith("fedstat/") and not (root / file).exists():
            continue  # a source tree without documentation or tests
        written[file] = insert_line((root / file).read_text(encoding="utf-8"), line, like)
    for file, text in written.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, encoding="utf-8")
    return [root / file for file in written]


def make_pages(root: Path) -> list[Path]:
    """Make the picture of the rooms and the pages of arguments and contracts again; return their files."""
    pages = {"rooms.py": "_static/rooms.svg", "arguments.py": "arguments.md"}
    if (root / "tests" / "contracts").exists():
        pages["contracts_page.py"] = "contracts.md"
    made = []
    for script, page in pages.items():
        path = root / "docs" / "building" / script
        if path.exists():
            # A process of its own imports the source tree with the new family.
            subprocess.run(
                [sys.executable, str(path)], check=True, env={**os.environ, "PYTHONPATH": str(root)}
            )
            made.append(root / "docs" / page)
    return made


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m fedstat.template", description=__doc__)
    parser.add_argument("name", help="name of the new module below fedstat/models, such as federated_gamma")
    parser.add_argument("--root", type=Path, default=Path(), help="source tree (default: the current folder)")
    arguments = parser.parse_args()
    try:
        written = write_family(arguments.name, arguments.root)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join(map(str, [*written, *make_pages(arguments.root)])))


if __name__ == "__main__":
    main()
