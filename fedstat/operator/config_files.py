"""Configuration files: templates for new folders, and edits of single TOML entries that keep comments."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedstat.errors import PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.files import write_atomic

# ----------------------------------------------------------------------------------------------------
# Single entries of TOML files, written and withdrawn without touching what people wrote around them.


def toml_quoted(text: str) -> str:
    """Write a text as TOML."""
    return json.dumps(text, ensure_ascii=False)


def set_entry(path: Path, table: str, name: str, value: str) -> None:
    """Write an entry of a table, or of the top where the table is empty, in the place of an earlier one.

    PartitionError where the file is laid out in a way that this does not understand; nothing was changed.
    """
    line = f"{toml_quoted(name) if table else name} = {toml_quoted(value)}"

    def edit(lines: list[str]) -> list[str]:
        start, end = _bounds(lines, table)
        here = [place for place in range(start, end) if _name(lines[place]) == name]
        if here:
            return [*lines[: here[0]], line, *lines[here[0] + 1 :]]
        # before the blank lines, and the words about it, that part the table from the next one
        while end > start and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
            end -= 1
        return [*lines[:end], line, *lines[end:]]

    _rewrite(path, edit, lambda content: _table(content, table).update({name: value}))


def make_table(path: Path, table: str) -> None:
    """Begin a table at the end of a file that does not have it: one made before there was such a table."""
    text = path.read_text(encoding="utf-8")
    if table not in tomllib.loads(text):
        write_atomic(path, f"{text.rstrip()}\n\n[{table}]\n".encode())


def withdraw_entry(path: Path, table: str, name: str) -> None:
    """Put an entry behind a '#', with the time; PartitionError as for :func:`set_entry`, or without one."""

    def edit(lines: list[str]) -> list[str]:
        start, end = _bounds(lines, table)
        return [
            f"# withdrawn {utc_text(time.time_ns())}: {line}"
            if start <= place < end and _name(line) == name
            else line
            for place, line in enumerate(lines)
        ]

    _rewrite(path, edit, lambda content: _table(content, table).pop(name))


def _rewrite(
    path: Path, edit: Callable[[list[str]], list[str]], change: Callable[[dict[str, Any]], object]
) -> None:
    """Edit the text, and make sure that it then says what was meant."""
    text = path.read_text(encoding="utf-8")
    meant = tomllib.loads(text)
    change(meant)
    edited = "\n".join(edit(text.splitlines())) + "\n"
    try:
        same = tomllib.loads(edited) == meant
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        raise PartitionError(f"'{path}' could not be edited here; write the entry by hand")
    write_atomic(path, edited.encode())


def _table(content: dict[str, Any], table: str) -> dict[str, Any]:
    found: dict[str, Any] = content.setdefault(table, {}) if table else content
    return found


def _bounds(lines: list[str], table: str) -> tuple[int, int]:
    """Lines of a table without its head; the top ends where the first table begins."""
    heads = [place for place, line in enumerate(lines) if line.strip().startswith("[")] + [len(lines)]
    if not table:
        return 0, heads[0]
    for head, following in pairwise(heads):
        if lines[head].split("#")[0].strip() == f"[{table}]":
            return head + 1, following
    raise PartitionError(f"there is no table [{table}] in the file; write the entry by hand")


def _name(line: str) -> str:
    """Name of the entry that a line makes; empty for none."""
    try:
        # a line that is no TOML by itself is part of a longer entry, or a comment
        return next(iter(tomllib.loads(line)), "")
    except tomllib.TOMLDecodeError:
        return ""


# ----------------------------------------------------------------------------------------------------
# Files that the command writes for people to fill in.

SITE = """\
# This institution, as 'fedstat site serve' opens it. What others will see of it:
#     fedstat site check {folder}

name = {name}

{layout}

# Folder through which signed questions come and signed answers go (shared, synchronised, or carried by hand),
# or a bucket of an object store, "s3://BUCKET/PREFIX".
# Leave it out where another carrier brings them.
{exchange}

# Secret of 128 bits, the same at all institutions and not known to the coordinator: for random projections,
# and for labels of clusters that several institutions hold. One owner draws it: fedstat site seed {folder}
seed = ""

# Fingerprint of the only key whose questions are answered. Enter it with: fedstat site pin FOLDER CARD
coordinator = ""

# Where the records are. A relative path is relative to this file.
[data]
kind = {kind}          # one of {kinds}
path = {path}
{key}    # columns that tell records apart; no model sees them
# na_values = ["", "NA"]  # how a missing cell of a text file is written
#
# A database, which is only read, once when the site is started; its address stands in an environment
# variable, and in no file:
# kind = "sql"
# query = "SELECT patient_id, age, sex FROM admissions"
# key = "patient_id"
# env = "WARD_DATABASE"   # holds e.g. postgresql://reader:secret@host/ward
# memory = 256            # megabytes of rows in memory; more are in a sealed file in this folder
# timeout = 3600          # seconds that the database may work on one statement

# What columns hold: "numbers", "whole numbers", "text", "true/false" or "dates", and their unit.
# [data.schema]
# age = {{ type = "numbers", unit = "years" }}
# sex = "text"

# Fingerprints of the institutions that this one makes masks with, its own among them.
[pinned]
{name} = {fingerprint}

# Vertical layout: consent to one alignment of keys with each of these. Enter it with:
#     fedstat site consent FOLDER SITE ...
[consent]

# Rosters of the federation that were accepted, by number. Enter one with:  fedstat site accept FOLDER
[roster]
"""

BY_ROWS = """\
# Column under which a formula may ask for the institution itself, as in C(site); the same everywhere.
site_column = "site\""""

BY_KEY = """\
# The institutions hold different columns of entities that they share, which are linked by the key below. None
# sees the key of another: 'fedstat federation align' numbers the entities, and the numbers are kept here."""

FEDERATION = """\
# The sites that ClientPartition.connect("federation.toml") asks.

name = {name}
{layout}
{carried}
timeout = 3600            # seconds until a site counts as silent
min_count = 5             # fewest rows of a category level in a design

# Fingerprint of every site, in the order of the partition. Add one with:
#     fedstat federation join {folder} CARD
[sites]

# Keys of sites that were taken out. Take one out with:  fedstat federation remove {folder} SITE
[revoked]
"""

ROWS = """\
layout = "horizontal"     # sites hold different rows of the same columns"""

COLUMNS = """\
layout = "vertical"       # sites hold different columns of entities that they share
# coordinator = "apart"   # or the site at whose institution this folder is: its values then leave nothing"""

BY_FOLDER = """\
carrier = "folder"
exchange = {exchange}     # relative to this file; every site's 'exchange' is the same folder"""

BY_BUCKET = """\
carrier = "bucket"        # objects of a store such as S3; credentials and endpoint as boto3 finds them
exchange = {exchange}     # every site's 'exchange' is the same"""

BY_FLARE = """\
carrier = "flare"         # NVIDIA FLARE, over mutual TLS
host = {host}             # machine of its server, as the sites reach it
port = {port}"""

CARD = """\
# What others need to know of {name}. Anybody may see it.
# Whoever pins it compares the fingerprint by telephone.
name = {quoted}
role = {role}
fingerprint = {fingerprint}
"""
