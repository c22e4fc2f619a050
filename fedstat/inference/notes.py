"""Notes on results, and the catalogues that have their texts: severity, template and remedy by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal, TypeAlias, get_args

from fedstat.errors import Remedy

Severity: TypeAlias = Literal["critical", "warning", "info", "protocol"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
MADE = {"remedy", "call", "arguments"}
"""Fields of templates that are made of the remedy."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note on a result: its kind, by which code refers to it, its text and its severity.

    The fields of the `text` are filled with the `values` when the note is printed. Notes that are "critical"
    are the banner above a summary; those on the "protocol" are printed by
    :meth:`fedstat.models.results.Results.disclosure`. A catalogue makes notes; see :class:`Catalogue`.
    """

    kind: str
    text: str
    severity: Severity = "info"
    values: Mapping[str, str | int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text.format(**self.values) if self.values else self.text


@dataclass(frozen=True, slots=True)
class NoteForm:
    """What a catalogue states about a kind of note.

    The field ``remedy`` of the `template` is the sentence of the `remedy`. Where severity or text depend on
    the size of a number, a kind has several entries; see :class:`Catalogue`.
    """

    severity: Severity
    template: str
    remedy: Remedy | None = None

    @property
    def fields(self) -> frozenset[str]:
        """Values that a note of this kind needs."""
        return _all_fields(self.template, self.remedy)


Text: TypeAlias = str | tuple[str, Remedy]
"""Template of a note, with its remedy if it has one."""


def fields_of(template: str) -> frozenset[str]:
    """Return the names of the fields of a template."""
    return frozenset(name for _, name, _, _ in Formatter().parse(template) if name)


class Catalogue(dict[str, NoteForm]):
    """Kinds of notes of a family, with severity, template and remedy of each.

    ``NOTES = Catalogue(info={"rows": "The fit has {n:,} rows."})`` declares a kind, and
    ``NOTES.note("rows", n=920)`` makes a note of it. A kind with several texts has an entry ``kind/variant``
    for each. Critical notes are above the table of a summary: its numbers must not be interpreted without
    them. Warnings come before notes that only describe (info). Notes on the protocol say what sites and
    coordinator learned; they are no part of the summary.
    """

    def __init__(
        self,
        critical: Mapping[str, Text] | None = None,
        warning: Mapping[str, Text] | None = None,
        info: Mapping[str, Text] | None = None,
        protocol: Mapping[str, Text] | None = None,
    ) -> None:
        groups = zip(SEVERITIES, (critical, warning, info, protocol), strict=True)
        texts = [(kind, severity, text) for severity, group in groups for kind, text in (group or {}).items()]
        if len(names := {kind for kind, _, _ in texts}) < len(texts):
            raise ValueError(f"two severities of one kind of note; there are {sorted(names)}")
        for kind, severity, text in texts:
            self[kind] = NoteForm(severity, *([text] if isinstance(text, str) else text))

    def note(self, kind: str, /, *, remedy: Remedy | None = None, **values: Any) -> Note:
        """Make a note of a kind with exactly the values that its template has; texts of a list are joined.

        A `remedy` that depends on the fit replaces that of the catalogue. The call of a remedy is the value
        ``call``. A KeyError names a kind that is not declared, a TypeError wrong values.
        """
        form = self[kind]
        remedy = remedy or form.remedy
        given = {name: _plain(value) for name, value in values.items()}
        if wrong := _all_fields(form.template, remedy) ^ given.keys():
            raise TypeError(f"note '{kind}': values that are missing or not in its text: {sorted(wrong)}")
        if "remedy" in fields_of(form.template):
            given["remedy"] = "" if remedy is None else remedy.sentence(**given)
        if remedy is not None:
            given["call"] = remedy.call.format(**given)
        # Without fields, only doubled braces are left of the template.
        kind = kind.partition("/")[0]
        return Note(kind, form.template if given else form.template.format(), form.severity, given)


def _all_fields(template: str, remedy: Remedy | None) -> frozenset[str]:
    texts = (template,) if remedy is None else (template, remedy.call, remedy.text)
    return frozenset.union(*map(fields_of, texts)) - MADE


def _plain(value: Any) -> str | int | float:
    """Return a value as a file of results holds it."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    plain: str | int | float = value.item() if hasattr(value, "item") else value
    return plain


def above_table(notes: Iterable[Note]) -> list[Note]:
    """Return the notes that are printed above the tables of a result, and of all that is made of it.

    These are the critical ones, and no others: the severity of a note is the only rule.
    """
    return [note for note in notes if note.severity == "critical"]
