"""Configuration files: templates for new folders, and edits of single TOML entries that keep comments."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import ParseError
from tomlkit.items import Table

from fedstat.errors import PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.files import write_atomic

# ----------------------------------------------------------------------------------------------------
# Set and remove single entries of TOML files; comments that people wrote are kept.


def toml_quoted(text: str) -> str:
    """Write a text as TOML."""
    return tomlkit.item(text).as_string()


def set_entry(path: Path, table: str, name: str, value: str | int) -> None:
    """Set an entry of a table, or of the top level where `table` is empty; comments stay where they are.

    Raises
    ------
    PartitionError
        The file is not TOML, or has no header for this table. The file is unchanged.
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
    """Add an empty table at the end of a file without it."""
    document, entries = _parse(path)
    if table not in entries:
        document.add(tomlkit.nl()).add(table, tomlkit.table())
        _write(path, document)


def append_table(path: Path, table: str, name: str, entries: Mapping[str, str]) -> None:
    """Add ``[table.name]`` at the end of a file, with its entries; a PartitionError if it exists."""
    document, _ = _parse(path)
    if name in document.get(table, {}):
        raise PartitionError(f"'{path}' has [{table}.{name}] already; edit it there. Nothing was changed")
    header = f"[{table}.{toml_quoted(name)}]"
    lines = [f"{entry} = {toml_quoted(value)}" for entry, value in entries.items()]
    text = tomlkit.dumps(document).rstrip("\n") + "\n\n" + "\n".join([header, *lines]) + "\n"
    write_atomic(path, text.encode())


def drop_table(path: Path, table: str, name: str) -> None:
    """Remove ``[table.name]``."""
    document, _ = _parse(path)
    del document[table][name]
    _write(path, document)


def withdraw_entry(path: Path, table: str, name: str) -> None:
    """Comment an entry out, with the time; errors are those of :func:`set_entry`."""
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
# Templates of the files that owners and coordinators fill in.

SITE = """\
# The description of this site. 'fedstat site serve' reads it. To see what others will see of the site:
#     fedstat site check {folder}

name = {name}

{layout}

# Folder for signed requests and replies (a shared or synchronized folder, or one that is copied by hand),
# or a bucket of an object store, "s3://BUCKET/PREFIX".
# Leave this out if NVIDIA FLARE transfers the messages.
{exchange}

# Secret of 128 bits, the same at all sites and unknown to the coordinator: for random projections, and for
# labels of clusters that several sites hold. One owner draws it: fedstat site seed {folder}
seed = ""

# Fingerprint of the coordinator. Only requests with its key are answered. Set it with:
#     fedstat site pin FOLDER CARD
coordinator = ""

# Command that runs once when a plan waits for approval, for example a script that sends a mail. It receives
# one line of JSON on standard input.
on_pending = ""

# Days for which an approval is valid, and for which answered requests stay in the exchange folder. The ledger
# is the record of what was released, and stays.
approval_days = 30
message_days = 90

# Number of analyses that may be open here at the same time. Further ones wait until one has ended, or had no
# request for 15 minutes. Each open analysis takes up memory.
sessions = 32

# Where the data are. A relative path is relative to this file.
[data]
kind = {kind}          # one of {kinds}
path = {path}
{key}    # columns that identify a record; no model uses them
# How a text file is written. 'fedstat site describe {folder}' proposes these entries from its first lines:
# separator = ";"         # "\t" is a tab
# decimal = ","
# thousands = "."
# encoding = "latin-1"    # or "cp1252", "utf-16"; by default UTF-8
# skip_lines = 2          # lines above the names of the columns
# date_format = "dd.mm.yyyy"
# na_values = ["", "NA"]  # how a missing value is written
# counts = "n"            # column with the number of entities that a row represents (tables of counts)
#
# A database is only read, once when the site starts. Its address is in an environment variable and is not
# written to any file:
# kind = "sql"
# query = "SELECT patient_id, age, sex FROM admissions"
# key = "patient_id"
# env = "WARD_DATABASE"   # holds e.g. postgresql://reader:secret@host/ward
# memory = 256            # megabytes of rows in memory; further rows are in an encrypted file in this folder
# timeout = 3600          # time limit of one database statement, in seconds

# Types of the columns ("numbers", "whole numbers", "text", "true/false" or "dates"), and their units.
# [data.schema]
# age = {{ type = "numbers", unit = "years" }}
# sex = {{ type = "whole numbers", codes = {{ 1 = "male", 2 = "female" }} }}    # names of the values
# admitted = {{ type = "dates", since = "2020-01-01" }}    # becomes the days since a public date

# Curves: columns hr_0, hr_1, ... hold the points of one curve per record, called hr in formulas.
# [data.curves.hr]
# columns = "hr_*"
# domain = [0, 23]        # first and last point, the same at all sites
# unit = "hours"

# Fingerprints of the sites that share masks with this one, and its own.
[pinned]
{name} = {fingerprint}

# Vertical layout: each entry allows one alignment of keys with that site. Enter it with:
#     fedstat site consent FOLDER SITE ...
[consent]

# Accepted rosters of the federation, by number. Enter one with:  fedstat site accept FOLDER
[roster]
"""

BY_ROWS = """\
# Column under which a formula can use the site itself, as in C(site); the same at all sites.
site_column = "site\""""

BY_KEY = """\
# Sites hold different columns of the same entities, which are linked by the key below. No site sees the key
# of another: 'fedstat federation align' numbers the entities, and the numbers are kept in this folder."""

FEDERATION = """\
# The sites to which ClientPartition.connect("federation.toml") sends requests.

name = {name}
{layout}
{carried}
timeout = 3600            # seconds to wait for a site
min_count = 5             # minimum number of rows of a category level in a design

# Fingerprint of every site, in the order of the partition. Add one with:
#     fedstat federation join {folder} CARD
[sites]

# Keys of sites that were removed. Remove a site with:  fedstat federation remove {folder} SITE
[revoked]
"""

ROWS = """\
layout = "horizontal"     # sites hold different rows of the same columns"""

COLUMNS = """\
layout = "vertical"       # sites hold different columns of the same entities
# coordinator = "apart"   # or the name of the site that runs the coordinator: its own values stay there"""

BY_FOLDER = """\
transport = "folder"
exchange = {exchange}     # relative to this file; every site's 'exchange' is the same folder"""

BY_BUCKET = """\
transport = "bucket"        # objects of a store such as S3; boto3 supplies credentials and endpoint
exchange = {exchange}     # every site's 'exchange' is the same"""

BY_FLARE = """\
transport = "flare"         # NVIDIA FLARE, over mutual TLS
host = {host}             # host name of the server, as the sites reach it
port = {port}"""

CARD = """\
# Public description of {name}. It contains nothing secret.
# Compare the fingerprint by telephone before you pin this card.
name = {quoted}
role = {role}
fingerprint = {fingerprint}
"""
