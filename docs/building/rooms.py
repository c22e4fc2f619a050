"""The picture of the architecture: rooms of the package and the imports between them, as SVG.

``python docs/building/rooms.py`` writes ``docs/_static/rooms.svg``. A room is a folder, or a file where a
folder holds files of several topics. An arrow means "imports from"; an arrow that follows from a chain of
other arrows is left out, and so are those to the foundation, which every room imports.
"""

import ast
import textwrap
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fedstat"
PICTURE = ROOT / "docs" / "_static" / "rooms.svg"
INSIDE = ("federation", "models")
"""Rooms whose own rooms are drawn as well."""
FOUNDATION = "foundation"
WIDTH, HEIGHT, GAP, LIFT = 166, 44, 14, 34
"""Size of a box without rooms inside, and the distances within and between rows, in pixels."""
STYLE = """
text { font: 12px "Helvetica Neue", Arial, "Liberation Sans", sans-serif; fill: #1a1a1a; text-anchor: middle }
.name { font-weight: 700; font-size: 13px } .about { font-size: 10px; fill: #4a4a4a }
rect { fill: #ffffff; stroke: #5c5c5c } .around { fill: #f3f3ef }
line { stroke: #1f4e79; stroke-width: 1.2; marker-end: url(#head) }
"""
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Dotted names of modules below the package, with their files; a stub replaces its module."""
    files = [path for path in PACKAGE.rglob("*.py") if not path.with_suffix(".pyi").exists()]
    names = {}
    for path in sorted([*files, *PACKAGE.rglob("*.pyi")]):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__").replace("__init__", "")] = path
    return names


@cache
def imports_in(path: Path) -> list[ast.ImportFrom]:
    """Return the statements of a file that import from a module."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports, including imports for type checking."""
    for node in imports_in(path):
        if (node.module or "").split(".")[0] == "fedstat":
            source = (node.module or "").removeprefix("fedstat").lstrip(".")
            for alias in node.names:
                name = f"{source}.{alias.name}".lstrip(".")
                yield name if name in known else source


def room(module: str) -> str:
    """Return the room of a module: "kernels", "federation.crypto", "federation.design.formula"."""
    parts = module.split(".")
    if not module:
        return "fedstat"
    if not (PACKAGE / parts[0]).is_dir():
        return parts[0] if parts[0] == "results" else FOUNDATION
    if parts[0] not in INSIDE:
        return parts[0].replace("data", "datasets") if parts[0] == "data" else parts[0]
    if parts[:2] == ["models", *parts[1:2]] and not (PACKAGE / "models" / "".join(parts[1:2])).is_dir():
        return "models.shared"
    if parts[1:] in (["message"], ["files"]) or parts[1:3] in (["design", "formula"], ["transport", "flare"]):
        return ".".join(parts[:3])
    return ".".join(parts[:2])


def graph(of: str = "") -> Graph:
    """Rooms with the rooms that they import from: those of the package, or those inside one room."""
    known, found = modules(), {}

    def name(module: str) -> str | None:
        whole = room(module)
        if not of:
            return whole.split(".")[0]
        return whole.removeprefix(f"{of}.") if whole.startswith(f"{of}.") else None

    for module, path in known.items():
        here = name(module)
        if here is not None and (module != of or not of):
            found.setdefault(here, set()).update(map(name, imported(path, known)))
    return {here: {other for other in others if other in found} - {here} for here, others in found.items()}


def reachable(links: Graph, start: str) -> set[str]:
    """Rooms that a room imports from, directly or by others."""
    return links[start].union(*(reachable(links, other) for other in links[start]))


def reduced(links: Graph) -> Graph:
    """Leave out arrows that follow from others."""
    return {
        here: {
            other
            for other in others
            if not any(other in reachable(links, between) for between in others - {other})
        }
        for here, others in links.items()
    }


def rows(links: Graph) -> list[list[str]]:
    """Rooms by row: each is below all that import it; one without importers is close to its imports."""
    importers: Graph = {here: {other for other in links if here in links[other]} for here in links}
    row: dict[str, int] = {}

    def measure(here: str) -> int:
        if here not in row:
            row[here] = 1 + max(map(measure, sorted(importers[here])), default=-1)
        return row[here]

    last = max(map(measure, sorted(links)))
    for here in (here for here in links if links[here] and not importers[here]):
        row[here] = max(0, min(row[other] for other in links[here]) - 1)
    return [sorted(here for here in links if row[here] == one) for one in range(last + 1)]


def about(name: str) -> str:
    """Return the first line of a room's docstring, without a title of up to three words."""
    if name == FOUNDATION:
        return "errors, types, codec, plots"
    if name == "models.shared":
        return "fit, consent, explain, save"
    path = PACKAGE.joinpath(*name.replace("fedstat", "").split("."))
    file = next(one for one in (path / "__init__.py", path.with_suffix(".py")) if one.exists())
    first = (ast.get_docstring(parsed(file)) or "").splitlines()[0]
    head, _, tail = first.partition(": ")
    text = (tail if tail and len(head.split()) <= 3 else first).rstrip(".").replace("`", "")
    return text[:1].upper() + text[1:]


def draw(of: str = "") -> tuple[str, float, float]:
    """Draw the rooms of the package, or those inside one room: shapes, width and height."""
    links = graph(of)
    on_foundation = FOUNDATION in links
    links = {here: others - {FOUNDATION} for here, others in links.items() if here != FOUNDATION}
    inside = {here: draw(here) for here in links if not of and here in INSIDE}
    size = {
        here: (inside[here][1] + 2 * GAP, inside[here][2] + GAP + HEIGHT)
        if here in inside
        else (WIDTH, HEIGHT + 8)
        for here in links
    }
    placed: dict[str, tuple[float, float]] = {}
    levels, top = rows(links), 0.0
    width = max(sum(size[here][0] + GAP for here in row) - GAP for row in levels)
    for row in levels:
        left = (width - sum(size[here][0] + GAP for here in row) + GAP) / 2
        for here in row:
            placed[here] = left, top
            left += size[here][0] + GAP
        top += max(size[here][1] for here in row) + LIFT
    if on_foundation:
        size[FOUNDATION], placed[FOUNDATION] = (width, HEIGHT), (0.0, top)
        top += HEIGHT + LIFT
    shapes = []
    for here, others in reduced(
        links
    ).items():  # below the boxes: a line passes behind what it does not end at
        for other in sorted(others):
            (x, y), (u, v) = placed[here], placed[other]
            shapes.append(
                f'<line x1="{x + size[here][0] / 2:g}" y1="{y + size[here][1]:g}" '
                f'x2="{u + size[other][0] / 2:g}" y2="{v - 4:g}"/>'
            )
    for here, (x, y) in placed.items():
        (w, h), middle = size[here], x + size[here][0] / 2
        shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4"'
            f"{' class=' + chr(34) + 'around' + chr(34) if here in inside else ''}/>"
            f'<text class="name" x="{middle:g}" y="{y + 16:g}">{escape(here)}</text>'
        )
        text = about(f"{of}.{here}".lstrip("."))
        wide = len(text) if here in inside or here == FOUNDATION else 27
        lines = textwrap.wrap(text, wide, max_lines=2, placeholder=" ...")
        shapes += [
            f'<text class="about" x="{middle:g}" y="{y + 30 + 12 * i:g}">{escape(line)}</text>'
            for i, line in enumerate(lines)
        ]
        if here in inside:
            shapes.append(f'<g transform="translate({x + GAP:g} {y + HEIGHT:g})">{inside[here][0]}</g>')
    return "\n".join(shapes), width, top - LIFT


def picture() -> str:
    """Return the picture of the present package."""
    shapes, width, height = draw()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -10 {width + 20:g} {height + 20:g}" '
        f'role="img" aria-label="Rooms of fedstat and their imports">\n<style>{STYLE}</style>\n'
        '<defs><marker id="head" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#1f4e79"/></marker></defs>\n'
        f'<rect x="-10" y="-10" width="{width + 20:g}" height="{height + 20:g}" style="stroke: none"/>\n'
        f"{shapes}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
