"""Commands of a study's data dictionary: the coordinator signs it, and owners accept it."""

from __future__ import annotations

import time
from pathlib import Path

from fedstat.errors import PartitionError, Remedy
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.files import make_folders, open_regular, write_atomic, write_shared
from fedstat.federation.partition.federation_file import (
    FOLDER_TRANSPORT,
    coordinator_identity,
    read_federation,
)
from fedstat.federation.tables.dictionary import (
    DICTIONARY,
    LONGEST_DICTIONARY,
    DataDictionary,
    read_accepted,
    read_columns,
)
from fedstat.federation.transport.site_folder import read_description
from fedstat.operator.terminal import format_columns, shell_path, underlined

SOURCE = "dictionary.toml"
TEMPLATE = """\
# The columns of this study, as all sites have them. Sign it with:  fedstat federation dictionary FOLDER
# Ranges are publicly known bounds. codes names the values of a text file; since turns dates into days.
#
# [age]
# label = "Age at admission"
# kind = "number"
# range = [18, 120]
# unit = "years"
#
# [sex]
# kind = "category"
# levels = ["male", "female"]
# codes = { 1 = "male", 2 = "female" }
#
# [admitted]
# kind = "number"
# range = [0, 4000]
# since = "2020-01-01"
"""


def sign_dictionary(folder: Path) -> int:
    """Sign the dictionary of a study, and put it where sites look; make a template if there is none."""
    federation, path = read_federation(folder), folder / SOURCE
    if not path.exists():
        write_atomic(path, TEMPLATE.encode(), 0o644)
        print(f"'{path}' is a template. Fill it in, then repeat this command.")
        return 1
    columns, identity = read_columns(path), coordinator_identity(folder)
    if not columns:
        raise PartitionError(f"'{path}' describes no column yet")
    last = None
    if (folder / DICTIONARY).exists():
        signed = (folder / DICTIONARY).read_bytes()
        last = DataDictionary.read(signed, f"'{folder / DICTIONARY}'", identity.public.fingerprint)
    dictionary = last
    if last is None or dict(last.columns) != columns:
        number = 1 if last is None else last.number + 1
        dictionary = DataDictionary(federation.name, number, utc_text(time.time_ns()), columns)
        write_atomic(folder / DICTIONARY, dictionary.sign(identity).encode())
    assert dictionary is not None
    _show(dictionary)
    if federation.transport == FOLDER_TRANSPORT:
        make_folders(Path(federation.exchange))
        write_shared(Path(federation.exchange, DICTIONARY), (folder / DICTIONARY).read_bytes())
        print("Next: every owner reads it with    fedstat site dictionary FOLDER")
    else:
        print(f"Next: give '{folder / DICTIONARY}', which contains nothing secret, to every site.")
        print(f"Every owner reads it with    fedstat site dictionary FOLDER {DICTIONARY}")
    return 0


def accept_dictionary(folder: Path, dictionary: Path | None, accept: bool) -> int:
    """Show the dictionary of the study; with `accept`, the site uses it from its next start or reload on."""
    description = read_description(folder)
    if not description.coordinator:
        raise PartitionError("no coordinator is trusted yet: accept a roster, or pin a card, first")
    if dictionary is None and not description.exchange_folder:
        raise PartitionError(
            "the site has no folder for requests, where the dictionary would be",
            remedy=Remedy("fedstat site dictionary {folder} DICTIONARY", "name the file: {call}").filled(
                folder=shell_path(folder)
            ),
        )
    path = Path(description.exchange_folder, DICTIONARY) if dictionary is None else dictionary
    try:
        with open_regular(path) as file:
            text = file.read(LONGEST_DICTIONARY + 1)
    except FileNotFoundError as error:
        raise PartitionError(
            f"'{path}' is absent",
            remedy=Remedy("fedstat federation dictionary STUDY", "the coordinator makes it with '{call}'"),
        ) from error
    found = DataDictionary.read(text, f"'{path}'", description.coordinator)
    earlier = read_accepted(folder, description.coordinator)
    if earlier is not None and found.number < earlier.number:
        raise PartitionError(
            f"dictionary {found.number} is older than dictionary {earlier.number}, which "
            f"{description.name} has accepted"
        )
    _show(found)
    if earlier is not None:
        same = "the same as" if earlier.digest == found.digest else "another than"
        print(f"It is {same} dictionary {earlier.number}, which {description.name} has accepted.")
    if not accept:
        print(f"To accept it    fedstat site dictionary {shell_path(folder)} --accept")
        return 0
    write_atomic(folder / DICTIONARY, text)
    print(f"{description.name} has accepted dictionary {found.number}. Next:")
    print(
        f"  fedstat site describe {shell_path(folder)}    # proposes columns.toml from it, if there is none"
    )
    print(f"  fedstat site reload {shell_path(folder)}      # if the site is running")
    return 0


def _show(dictionary: DataDictionary) -> None:
    print(underlined(f"Data dictionary {dictionary.number} of {dictionary.study}"))
    rows: list[tuple[str, ...]] = [("column", "holds", "unit", "range or levels", "read from", "label")]
    for name, column in dictionary.columns.items():
        bounds = "" if column.range is None else f"{column.range[0]:g} to {column.range[1]:g}"
        codes = ", ".join(f"{code} is {level}" for code, level in column.codes.items())
        read = codes or (f"dates, as days since {column.since}" if column.since else "")
        held = bounds or ", ".join(map(str, column.levels))
        rows.append((name, column.kind, column.published.unit, held, read, column.label))
    print(format_columns(rows, head=True) + "\n")
