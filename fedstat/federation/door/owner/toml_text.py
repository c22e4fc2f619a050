"""Lines of a policy file as text: values and comments."""

from __future__ import annotations

import json
import textwrap


def toml_line(name: str, value: object) -> str:
    """Line of a policy file, as an owner would write it."""
    return f"{name} = {toml_value(value)}"


def comment_of(text: str) -> str:
    """Write paragraphs as a comment."""
    paragraphs = text.split("\n\n")
    wrapped = (textwrap.wrap(" ".join(part.split()), 88) for part in paragraphs)
    return "\n#\n".join("\n".join(f"# {line}" for line in lines) for lines in wrapped)


def toml_value(value: object) -> str:
    """Write one value."""
    match value:
        case bool():
            return str(value).lower()
        case frozenset():
            return f"[{', '.join(toml_value(item) for item in sorted(value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)
