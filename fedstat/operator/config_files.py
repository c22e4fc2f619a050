"""Configuration files: templates for new folders, and edits of single TOML entries that keep comments."""

from __future__ import annotations

import time
from pathlib import Path

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import ParseError
from tomlkit.items import Table

from fedstat.errors import PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.files import write_atomic

# ----------------------------------------------------------------------------------------------------
# Single entries of TOML files, written and withdrawn without touching what people wrote around them.


def toml_quoted(text: str) -> str:
    """Write a text as TOML."""
    return tomlkit.item(text).as_string()


def set_entry(path: Path, table: str, name: str, value: str) -> None:
    """Set an entry of a table, or of the top level where `table` is empty; comments stay where they are.

    Raises
    ------
    PartitionError
        The file is not TOML, or has no such table under a header of its own. The file is unchanged.
    """
    document, entries = _parse(path, table)
    # A new entry goes before the blank lines and the comment that introduce the next table.
    introduction = []
    while table and name not in entries and entries.body and entries.body[-1][0] is None:
        introduction.append(entries.body.pop())
    entries[name] = value
    entries.body.extend(reversed(introduction))
    _write(path, document)


def make_table(path: Path, table: str) -> None:
    """Add an empty table at the end of a file that lacks it."""
    document, entries = _parse(path)
    if table not in entries:
        document.add(tomlkit.nl()).add(table, tomlkit.table())
        _write(path, document)


def withdraw_entry(path: Path, table: str, name: str) -> None:
    """Turn an entry into a comment with the time; errors are those of :func:`set_entry`."""
    document, entries = _parse(path, table)
    if name not in entries:
        raise PartitionError(f"'{path}' has no entry '{name}' in [{table}]")
    place = next(i for i, (key, _) in enumerate(entries.body) if key is not None and key.key == name)
    line = f"{toml_quoted(name)} = {toml_quoted(str(entries[name]))}"
    entries.remove(name)
    entries.body[place] = (None, tomlkit.comment(f"withdrawn {utc_text(time.time_ns())}: {line}"))
    _write(path, document)


def _parse(path: Path, table: str = "") -> tuple[tomlkit.TOMLDocument, Container]:
    """Return the document in a file, and the entries of one table of it."""
    try:
        document = tomlkit.parse(path.read_bytes())
    except (ParseError, UnicodeDecodeError) as error:
        raise PartitionError(f"'{path}' is not TOML ({error}); correct it") from None
    found = document.get(table) if table else None
    if table and not isinstance(found, Table):
        raise PartitionError(f"'{path}' has no table [{table}] under a header; write the entry by hand")
    return document, found.value if isinstance(found, Table) else document


def _write(path: Path, document: tomlkit.TOMLDocument) -> None:
    write_atomic(path, tomlkit.dumps(document).encode())


# ----------------------------------------------------------------------------------------------------
# Files that the command writes for people to fill in.

SITE = """\
# This institution, as 'fedstat site serve' opens it. What others will see of it:
#     fedstat site check {folder}

name = {name}

{layout}

# Folder through which signed questions come and signed answers go (shared, synchronized, or carried by hand),
# or a bucket of an object store, "s3://BUCKET/PREFIX".
# Leave it out where another transport brings them.
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
transport = "folder"
exchange = {exchange}     # relative to this file; every site's 'exchange' is the same folder"""

BY_BUCKET = """\
transport = "bucket"        # objects of a store such as S3; credentials and endpoint as boto3 finds them
exchange = {exchange}     # every site's 'exchange' is the same"""

BY_FLARE = """\
transport = "flare"         # NVIDIA FLARE, over mutual TLS
host = {host}             # machine of its server, as the sites reach it
port = {port}"""

CARD = """\
# What others need to know of {name}. Anybody may see it.
# Whoever pins it compares the fingerprint by telephone.
name = {quoted}
role = {role}
fingerprint = {fingerprint}
"""
