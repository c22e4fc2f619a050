"""Commands for the owner of a site: make its folder, check it, and decide which keys to trust."""

from __future__ import annotations

import io
import json
import os
import secrets
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path

from fedstat.codec import to_plain
from fedstat.errors import FedstatError, PartitionError, Remedy, SecurityError
from fedstat.federation import state_formats
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.audit.ledger_file import LEDGER_FILENAME, begin_ledger, read_ledger
from fedstat.federation.crypto.keys import normalize_fingerprint
from fedstat.federation.disclosure.approval import check_study_names, role_problems
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.request_checks import refusals
from fedstat.federation.disclosure.rules import lines_not_in
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY, load_families
from fedstat.federation.files import write_atomic
from fedstat.federation.message import Request, Step
from fedstat.federation.protocols.schema import table_schema
from fedstat.federation.tables.aligned_table import ALIGNED_BY, AlignedTable
from fedstat.federation.tables.checks import content_problems
from fedstat.federation.tables.dictionary import read_accepted
from fedstat.federation.tables.sources import SOURCE_KINDS, TEXT, kind_of_file
from fedstat.federation.tables.table import LabeledTable, Table
from fedstat.federation.tables.text_files import propose_format
from fedstat.federation.transport.bucket import given_exchange, open_bucket
from fedstat.federation.transport.flare.provision import FLARE, check_flare_name
from fedstat.federation.transport.live_config import ActiveRules
from fedstat.federation.transport.mailbox import is_bucket
from fedstat.federation.transport.site_folder import (
    COLUMNS,
    DESCRIPTION,
    IDENTITY,
    POLICY,
    RELOAD,
    SEED_DIGITS,
    SiteDescription,
    load_identity,
    mode_problems,
    open_records,
    open_site,
    read_description,
    read_site_columns,
    read_site_policy,
    table_folders,
)
from fedstat.operator.cards import COMPARE, SITE, Card, check_name, make_folder, read_card
from fedstat.operator.config_files import (
    BY_KEY,
    BY_ROWS,
    append_table,
    drop_table,
    make_table,
    set_entry,
    toml_quoted,
    withdraw_entry,
)
from fedstat.operator.config_files import SITE as TEMPLATE
from fedstat.operator.flare_commands import flare_site_problems
from fedstat.operator.site_status import ledger_is_held, rule_problems
from fedstat.operator.terminal import format_columns, print_problems, shell_path, underlined

SOURCE_ENTRIES = ("path", "query", "env", "file")
"""Entries of ``[data]`` that say where records are."""
FILES = (
    (IDENTITY, "private keys; keep a copy where you keep passwords"),
    (DESCRIPTION, "where the data are, and which keys are trusted; fill it in"),
    (POLICY, "what may be released; it explains every rule, and its defaults are strict"),
    (LEDGER_FILENAME, "the ledger of all releases; the site does not run without it"),
)
"""Files of the folder of a new site, with their descriptions."""


def init_site(
    folder: Path, name: str, data: str | None, exchange: str, key: Sequence[str], transport: str
) -> int:
    """Make the folder of a site: keys, templates and public card."""
    check_name(name)
    over_flare = transport == FLARE
    if over_flare:
        check_flare_name(name)
    if data is not None:
        _require_file(Path(data))
    # paths on the command line are relative to the current folder
    path = "records.csv" if data is None else str(Path(data).resolve())
    exchange = "# exchange =" if over_flare else f"exchange = {toml_quoted(given_exchange(exchange))}"
    identity = make_folder(folder, DESCRIPTION)  # after everything that can fail
    fingerprint = identity.public.fingerprint
    _fill_folder(folder, name, path, exchange, key)
    card = Card(name, SITE, fingerprint).hand_out(folder, FILES)
    if data is not None:
        write_text_format(folder)
    print(f"\nNext: fill in {DESCRIPTION}, then    fedstat site describe {shell_path(folder)}")
    print(f"      read the proposed {COLUMNS}, then    fedstat site check {shell_path(folder)}")
    print(f"      send '{card}' to the coordinator, who sends a roster back")
    print(f"      show the roster with    fedstat site accept {shell_path(folder)}")
    if over_flare:
        print(f"      request a certificate with    fedstat site request {shell_path(folder)}")
    return 0


def _fill_folder(folder: Path, name: str, path: str, exchange: str, key: Sequence[str]) -> None:
    """Begin the ledger in a folder with keys, and write the files for the owner."""
    identity = load_identity(folder)
    begin_ledger(folder, identity)
    entries = {
        "folder": folder,
        "name": toml_quoted(name),
        "layout": BY_KEY if key else BY_ROWS,
        "exchange": exchange,
        "fingerprint": toml_quoted(identity.public.fingerprint),
    }
    text = TEMPLATE.format(**entries, **_source_entries(path, key))
    folder.chmod(0o700)  # a folder that existed before may be open to others
    write_atomic(folder / DESCRIPTION, text.encode())
    write_atomic(folder / POLICY, Policy.strict().to_toml().encode())


def _source_entries(path: str, key: Sequence[str]) -> dict[str, str]:
    """Return the entries of site.toml for the source of the data."""
    return {
        "kind": toml_quoted(kind_of_file(path)),
        "kinds": ", ".join(map(toml_quoted, SOURCE_KINDS)),
        "path": toml_quoted(path),
        "key": f"key = [{', '.join(map(toml_quoted, key))}]" if key else '# key = "patient_id"',
    }


def _require_file(data: Path) -> None:
    if not data.is_file():
        raise PartitionError(f"there is no file '{data}'. Without --data, describe the data in {DESCRIPTION}")


def write_text_format(folder: Path) -> None:
    """Write the form of the site's text file into site.toml if it is not there, and print it."""
    source, file = read_description(folder).source, Path(read_description(folder).source.path)
    if source.kind != TEXT or not file.is_file():
        return
    found = propose_format(file, source.text_format)
    for name, value in found.entries.items():
        set_entry(folder / DESCRIPTION, "data", name, value)
    if found.entries:
        print(f"'{file.name}' has {', '.join(found.words.values())}. Written to '{folder / DESCRIPTION}':")
        print(f"  {found.text}\n")
    for remark in found.remarks:
        print(f"'{file.name}': {remark}. Entries belong under [data] in '{folder / DESCRIPTION}'.\n")


def add_study(folder: Path, card: Path, name: str, exchange: str) -> int:
    """Let another coordinator send requests, for a study of its own at the same table."""
    description, reported = read_description(folder), read_card(card)
    if reported.role != COORDINATOR:
        raise PartitionError(f"'{card}' is the card of a site; expected the card of a coordinator")
    check_study_names([name])
    entries = {"coordinator": reported.fingerprint, "exchange": given_exchange(exchange)}
    append_table(folder / DESCRIPTION, "studies", name, entries)
    print(f"{description.name} now answers the coordinator of study '{name}':\n\n  {reported.fingerprint}\n")
    print(COMPARE)
    print("Pin the cards of the other sites of the study, and limit it by [roles] in site.toml if needed.")
    return 0


def add_table(folder: Path, name: str, data: Path, exchange: str) -> int:
    """Make the folder of one more table of a site, which has its own policy, ledger and budget."""
    description, place = read_description(folder), folder / "tables" / check_name(name)
    if name in description.tables or place.exists():
        raise PartitionError(f"'{place}' is in use; choose another name. Nothing was changed")
    _require_file(data)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.mkdir(mode=0o700)
    load_identity(folder).save(place / IDENTITY)
    exchange = f"exchange = {toml_quoted(given_exchange(exchange))}"
    _fill_folder(place, description.name, str(data.resolve()), exchange, description.source.key)
    make_table(folder / DESCRIPTION, "tables")
    set_entry(folder / DESCRIPTION, "tables", name, f"tables/{name}")
    print(f"'{place}' is the folder of table '{name}' of {description.name}.")
    write_text_format(place)
    print("The site serves it after a restart, and every command takes this folder: describe, check, page.")
    print("Do not publish records of the same persons in two tables: their releases are not compared.")
    return 0


def check_tables(folders: Mapping[str, Path]) -> None:
    """Refuse two tables of a site with the same source, whose releases would not be compared."""
    found: dict[str, str] = {}
    for name, place in folders.items():
        description = read_description(place)
        key = json.dumps({k: v for k, v in description.data.items() if k in SOURCE_ENTRIES}, sort_keys=True)
        if key in found:
            raise PartitionError(
                f"tables '{found[key] or 'main'}' and '{name or 'main'}' of {description.name} have the same "
                "source. Differences of their releases could single out persons: remove one of them from "
                "[tables]"
            )
        found[key] = name


def revoke_trust(folder: Path, name: str) -> int:
    """Stop trusting a site or the coordinator."""
    description = read_description(folder)
    path = folder / DESCRIPTION
    if name == description.name:
        raise PartitionError(
            f"'{name}' is this site itself, which answers no requests while its service is stopped"
        )
    if name == COORDINATOR and description.coordinator:
        set_entry(path, "", COORDINATOR, "")
        meaning = "The site answers no requests until another coordinator is pinned."
    elif name in description.studies:
        drop_table(path, "studies", name)
        meaning = "The site answers no more requests of this study."
    elif name in description.pinned:
        withdraw_entry(path, "pinned", name)
        meaning = f"From now on, the site refuses sums that are masked together with {name}."
    else:
        known = [COORDINATOR] if description.coordinator else []
        known += [*description.studies]
        known += [site for site in description.pinned if site != description.name]
        raise PartitionError(f"'{name}' is not trusted here; trusted are {', '.join(known) or 'no sites'}")
    print(f"{description.name} no longer trusts {name}. {meaning}")
    print("A running site applies this before its next request.")
    return 0


def draw_seed(folder: Path) -> int:
    """Draw the secret that sites share, and write it into site.toml."""
    description = read_description(folder)
    if description.seed:
        raise PartitionError(
            f"'{folder / DESCRIPTION}' has a seed, which the other sites share; to draw another, first "
            "remove that line from this file and from theirs"
        )
    drawn = secrets.token_hex(SEED_DIGITS // 2)
    set_entry(folder / DESCRIPTION, "", "seed", drawn)
    print(
        f"A new seed is in '{folder / DESCRIPTION}'. The other owners write the same line into their files:\n"
    )
    print(f"seed = {toml_quoted(drawn)}\n")
    print("Send it to the other owners, and not to the coordinator. Then restart running sites.")
    return 0


def consent_alignment(folder: Path, names: Sequence[str]) -> int:
    """Allow one alignment of the keys of the site with those of other sites."""
    description = read_description(folder)
    strange = [name for name in names if name not in description.pinned or name == description.name]
    if strange:
        raise PartitionError(
            f"no key of {', '.join(strange)} is pinned here",
            remedy=Remedy("fedstat site pin {folder} CARD", "First compare and pin the key: {call}").filled(
                folder=shell_path(folder)
            ),
        )
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    for name in names:
        set_entry(folder / DESCRIPTION, "consent", name, now)
    print(f"{description.name} now allows one alignment of its keys with {', '.join(names)}.")
    print("No site sees a key. A site that enters invented keys can learn which of them exist here.")
    return 0


def reload_site(folder: Path) -> int:
    """Request the process that runs a site to read the data again."""
    name = read_description(folder).name
    requested = state_formats.RELOAD.stamp() | {"requested": time.time_ns()}
    write_atomic(folder / RELOAD, json.dumps(requested).encode())
    if not ledger_is_held(folder):
        print(f"{name} is not running; it reads its data when it starts.")
        return 0
    print(f"{name} reads its data again before its next reply.")
    print("If they have changed, open sessions end. If they cannot be used, the site keeps the current ones.")
    print(f"To see the outcome:    fedstat site status {shell_path(folder)}")
    return 0


def check_site(folder: Path) -> int:
    """Show what others see of the site, what its policy allows to be released, and any problems."""
    problems = _examine(folder)
    print(underlined("Problems" if problems else "No problems found"))
    if not problems:
        how = f"Start the site with    fedstat site serve {shell_path(folder)}"
        print("  The site is running." if ledger_is_held(folder) else f"  {how}")
    return print_problems(problems)


def examine_site(folder: Path) -> tuple[list[str], str]:
    """Return the problems of a site, and the text that :func:`check` prints before them."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        problems = _examine(folder)
    return problems, shown.getvalue()


def _examine(folder: Path) -> list[str]:
    """Print the description of a site, and return its problems."""
    problems: list[str] = []
    description = read_description(folder)
    fingerprint = load_identity(folder).public.fingerprint
    policy = read_site_policy(folder)
    print(underlined(f"Site {description.name}"))
    print(f"  Fingerprint  {fingerprint}\n")
    table = _show_table(folder, description, policy, problems)
    _show_policy(folder, description.name, policy)
    problems += _show_budget(folder, description.name, policy)
    problems += _description_problems(folder, description, policy, table)
    _show_trust(description, fingerprint, problems)
    problems += mode_problems(folder)
    problems += rule_problems(folder)
    try:
        check_tables(table_folders(folder))
    except FedstatError as error:
        problems.append(str(error))
    for exchange in description.exchanges:
        problems += _exchange_problems(exchange)
    if not description.exchanges:
        problems += flare_site_problems(folder)
    if not ledger_is_held(folder):
        problems += _start_problems(folder, problems)
    elif (held := ActiveRules.load(folder)) is not None and held.reload_problem:
        problems.append(f"the running service {held.reload_problem}")
    return problems


def _start_problems(folder: Path, found: Sequence[str]) -> Iterator[str]:
    """Yield why the service would not start, as it does when it starts, if this is not among the problems."""
    try:
        site = open_site(folder, trial=True)
    except (FedstatError, OSError, ImportError) as error:
        if str(error) not in found:
            yield str(error)
        return
    if site.site_ledger.store is not None:
        site.site_ledger.store.close()


def _description_problems(
    folder: Path, description: SiteDescription, policy: Policy, table: Table | None
) -> Iterator[str]:
    if table is not None:
        try:
            published = read_site_columns(folder, description.name, table)
            dictionary = read_accepted(folder, description.coordinator)
            if dictionary is not None and published:
                yield from dictionary.problems(description.name, published)
        except FedstatError as error:
            yield str(error)
    if policy.formulas == "simple" and not (folder / COLUMNS).exists():
        yield (
            'no column is published, so with formulas = "simple" no formula can use one: '
            f"fedstat site describe {shell_path(folder)}"
        )


def _show_table(
    folder: Path, description: SiteDescription, policy: Policy, problems: list[str]
) -> Table | None:
    """Show the data as others see them; None if they cannot be opened."""
    print(underlined("What others see of the data"))
    name, label = description.name, description.site_column
    try:
        table = open_records(folder, description)
        found = table_schema(name, LabeledTable(table, label, name) if label else table, policy)
    except (FedstatError, ImportError) as error:
        problems.append(str(error))
        print("  nothing; see the problems below\n")
        return None
    rows = [(column, kind or "no values") for column, kind in found.columns.items()]
    if label:
        rows.append((label, f"text: the name of the site, '{name}', in every row"))
    print(format_columns([("column", "holds"), *rows], head=True))
    print(f"\n  {found.n_rows:,} rows\n")
    if isinstance(table, AlignedTable):
        _show_link(table, problems)
    return table


def _show_link(table: AlignedTable, problems: list[str]) -> None:
    print(underlined("How records are linked"))
    aligned = f"as {table.alignment}" if table.alignment else f"no: {table.why_unaligned}"
    rows = [("key", ", ".join(table.keys.key)), ("keys", f"{table.keys.n_rows:,}"), ("aligned", aligned)]
    print(format_columns(rows) + "\n")
    if table.changed:
        problems.append(ALIGNED_BY.after(table.why_unaligned))
    problems += content_problems({table.site: table.frame}, {table.site: table.columns}, new_data=False)


def _show_policy(folder: Path, site: str, policy: Policy) -> None:
    load_families()
    print(underlined("What the policy allows to be released"))
    looser = policy.looser_than_strict()
    print(
        f"  Less strict than the default: {', '.join(looser)}\n" if looser else "  As strict as the default\n"
    )
    file = folder / POLICY
    if file.exists() and (lines := lines_not_in(policy, file.read_bytes())):
        listed = f"Not in {POLICY}, with their strict values: {', '.join(lines)}"
        print(textwrap.fill(listed, 96, initial_indent="  ", subsequent_indent="    ") + "\n")
    rows: list[tuple[str, ...]] = [("family", "steps", "unmasked", "in masked sums", "refused by")]
    never: list[str] = []
    for family, steps in FAMILIES.items():
        if family != RECEIPT_FAMILY:
            rows.append(_family_row(site, policy, family, steps, never))
    print(format_columns(rows, head=True))
    if policy.approval == "owner":
        print("\n  Every analysis waits for approval: fedstat site pending, approve, deny")
    print("\n  Who can learn what under this policy: fedstat site threats")
    if never:
        print("\n  Always refused:")
        print(textwrap.fill(", ".join(never), 96, initial_indent="    ", subsequent_indent="    "))
    print(
        f"\n  In addition, every reply is checked against its rows: at least {policy.min_count} in a sum, "
        f"{policy.min_events} of either\n  outcome, {policy.min_level_count} of a level, and at most "
        f"{policy.max_parameters:g} coefficients per row.\n"
    )


def _family_row(
    site: str, policy: Policy, family: str, steps: Mapping[str, Step], never: list[str]
) -> tuple[str, ...]:
    reported, rules = [], dict[str, None]()
    # None: unmasked; 0: as part of a masked sum
    for masked in (None, 0):
        outcome = [
            list(refusals(site, policy, Request(site, family, name, masked=masked), step))
            for name, step in steps.items()
        ]
        may = sum(not reasons for reasons in outcome)
        reported.append("all" if may == len(steps) else f"{may} of {len(steps)}" if may else "none")
        rules |= dict.fromkeys(one.rule for reasons in outcome for one in reasons)
    if may:  # the steps of a refused family need not be listed
        never += [f"{family}.{name}" for name, reasons in zip(steps, outcome, strict=True) if reasons]
    return family, str(len(steps)), *reported, ", ".join(rules)


def _show_trust(description: SiteDescription, fingerprint: str, problems: list[str]) -> None:
    print(underlined("Trusted keys"))
    name, coordinator = description.name, description.coordinator
    pinned = {site: key for site, key in description.pinned.items() if site != name}
    rows = [(COORDINATOR, coordinator or "none: the site answers no requests"), *pinned.items()]
    print(format_columns(rows) + "\n")
    if description.studies or description.roles:
        print(underlined("Studies and roles"))
        studies = [(f"study {name}", key) for name, key in description.study_keys.items()]
        print(format_columns([*studies, *_role_rows(description)]) + "\n")
        load_families()
        problems += role_problems(description.studies, description.roles, FAMILIES)
    if not description.coordinators:
        problems.append("no coordinator is trusted; pin one: fedstat site pin FOLDER CARD")
    if normalize_fingerprint(description.pinned.get(name, "")) != normalize_fingerprint(fingerprint):
        problems.append(f"[pinned] has another key for '{name}' than {IDENTITY}; pin its own card")
    if not pinned:
        print("  Masked sums need the keys of other sites.\n")


def _role_rows(description: SiteDescription) -> Iterator[tuple[str, str]]:
    for name, role in description.roles.items():
        limits = [f"{entry} {', '.join(given)}" for entry, given in to_plain(role).items() if given]
        yield f"role {name}", "; ".join(limits) or "everything that the policy allows"


def _show_budget(folder: Path, name: str, policy: Policy) -> Iterator[str]:
    """Show the state of the privacy budget, and yield problems of the ledger."""
    try:
        site_ledger = read_ledger(folder, name, load_identity(folder).public)
        site_ledger.check_undisputed(name)
    except SecurityError as error:
        yield str(error)
        return
    spent = read_budget_spent(policy, site_ledger)
    if spent is not None:
        print(underlined("Privacy budget"))
        print(f"  {str(spent).capitalize()}\n")


def _exchange_problems(exchange: str) -> Iterator[str]:
    if is_bucket(exchange):
        try:
            next(open_bucket(exchange).list_after("", ""), None)
        except (FedstatError, ImportError, FileNotFoundError) as error:
            yield f"the bucket for requests and replies cannot be used: {error}"
        return
    place = Path(exchange)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK):
        yield f"the folder for requests and replies, '{exchange}', cannot be written"
