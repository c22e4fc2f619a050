"""Commands of a site's owner: make its folder, check it, and decide which keys to trust."""

from __future__ import annotations

import io
import os
import secrets
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path

from fedstat.errors import FedstatError, PartitionError, SecurityError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.audit.ledger_file import LEDGER_FILENAME, begin_ledger, read_ledger
from fedstat.federation.crypto.keys import normalize_fingerprint
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.request_checks import refusals
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY, load_families
from fedstat.federation.files import write_atomic
from fedstat.federation.message import Request, Step
from fedstat.federation.protocols.schema import table_schema
from fedstat.federation.tables.aligned_table import ALIGNED_BY, AlignedTable
from fedstat.federation.tables.checks import content_problems
from fedstat.federation.tables.sources import SOURCE_KINDS, kind_of_file
from fedstat.federation.tables.table import LabeledTable, Table
from fedstat.federation.transport.bucket import given_exchange, open_bucket
from fedstat.federation.transport.flare.provision import FLARE, check_flare_name
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
    read_description,
    read_site_columns,
    read_site_policy,
)
from fedstat.operator.cards import SITE, Card, check_name, make_folder
from fedstat.operator.config_files import BY_KEY, BY_ROWS, set_entry, toml_quoted, withdraw_entry
from fedstat.operator.config_files import SITE as TEMPLATE
from fedstat.operator.flare_commands import flare_site_problems
from fedstat.operator.site_status import ledger_is_held, rule_problems
from fedstat.operator.terminal import format_columns, print_problems, shell_path, underlined

FILES = (
    (IDENTITY, "private keys, for this account alone; keep a copy where you keep passwords"),
    (DESCRIPTION, "where the records are and who is trusted: fill it in"),
    (POLICY, "what may leave: every rule is explained there; it starts strict"),
    (LEDGER_FILENAME, "the account of what leaves, begun now: the site does not serve without it"),
)
"""Of a new site's folder."""


def init_site(
    folder: Path, name: str, data: str | None, exchange: str, key: Sequence[str], transport: str
) -> int:
    """Make a site's folder: keys, templates and public card."""
    check_name(name)
    over_flare = transport == FLARE
    if over_flare:
        check_flare_name(name)
    # paths that were given on the command line are relative to where the command was run
    path = "records.csv" if data is None else str(Path(data).resolve())
    exchange = "# exchange =" if over_flare else f"exchange = {toml_quoted(given_exchange(exchange))}"
    identity = make_folder(folder, DESCRIPTION)  # after all that may be refused
    fingerprint = identity.public.fingerprint
    begin_ledger(folder, identity)
    entries = {
        "folder": folder,
        "name": toml_quoted(name),
        "layout": BY_KEY if key else BY_ROWS,
        "exchange": exchange,
        "fingerprint": toml_quoted(fingerprint),
    }
    text = TEMPLATE.format(**entries, **_source_entries(path, key))
    folder.chmod(0o700)  # one that was there before may be open to others
    write_atomic(folder / DESCRIPTION, text.encode())
    write_atomic(folder / POLICY, Policy.strict().to_toml().encode())
    card = Card(name, SITE, fingerprint).hand_out(folder, FILES)
    print(f"\nNext: fill in {DESCRIPTION}, then    fedstat site describe {shell_path(folder)}")
    print(f"      read the {COLUMNS} that it proposes, and    fedstat site check {shell_path(folder)}")
    print(f"      give '{card}' to the coordinator, whose roster comes back")
    print(f"      show that by    fedstat site accept {shell_path(folder)}")
    if over_flare:
        print(f"      ask for a certificate by    fedstat site request {shell_path(folder)}")
    return 0


def _source_entries(path: str, key: Sequence[str]) -> dict[str, str]:
    """Entries of site.toml that say where the records are."""
    return {
        "kind": toml_quoted(kind_of_file(path)),
        "kinds": ", ".join(map(toml_quoted, SOURCE_KINDS)),
        "path": toml_quoted(path),
        "key": f"key = [{', '.join(map(toml_quoted, key))}]" if key else '# key = "patient_id"',
    }


def revoke_trust(folder: Path, name: str) -> int:
    """Trust a site, or the coordinator, no longer."""
    description = read_description(folder)
    path = folder / DESCRIPTION
    if name == description.name:
        raise PartitionError(f"'{name}' is this site itself; stop 'fedstat site serve' to answer nobody")
    if name == COORDINATOR and description.coordinator:
        set_entry(path, "", COORDINATOR, "")
        meaning = "No question is answered until another coordinator is pinned."
    elif name in description.pinned:
        withdraw_entry(path, "pinned", name)
        meaning = f"Sums that are masked together with {name} are refused from now on."
    else:
        known = [COORDINATOR] if description.coordinator else []
        known += [site for site in description.pinned if site != description.name]
        raise PartitionError(f"'{name}' is not trusted here; trusted are {', '.join(known) or 'none'}")
    print(f"{description.name} no longer trusts {name}. {meaning}")
    print("A site that serves now heeds it before its next question.")
    return 0


def draw_seed(folder: Path) -> int:
    """Draw the secret that sites share, and write it into the description of this one."""
    description = read_description(folder)
    if description.seed:
        raise PartitionError(
            f"'{folder / DESCRIPTION}' has a seed already, which the other sites share; take that line out "
            "of it, and of theirs, to draw another"
        )
    drawn = secrets.token_hex(SEED_DIGITS // 2)
    set_entry(folder / DESCRIPTION, "", "seed", drawn)
    print(
        f"Drawn, and written into '{folder / DESCRIPTION}'. The other owners write the same line into "
        "theirs:\n"
    )
    print(f"seed = {toml_quoted(drawn)}\n")
    print("Tell it to them, and not to the coordinator. A site that serves is started again.")
    return 0


def consent_alignment(folder: Path, names: Sequence[str]) -> int:
    """Consent to one alignment of the site's keys with those of other sites."""
    description = read_description(folder)
    strange = [name for name in names if name not in description.pinned or name == description.name]
    if strange:
        raise PartitionError(
            f"no key of {', '.join(strange)} is pinned here; consent to alignments with sites whose key you "
            "have compared: fedstat site pin FOLDER CARD"
        )
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    for name in names:
        set_entry(folder / DESCRIPTION, "consent", name, now)
    print(f"{description.name} consents to one alignment of its keys with {', '.join(names)}, from now on.")
    print("None of them sees a key. Who enters keys that it has made up learns which of them are here.")
    return 0


def reload_site(folder: Path) -> int:
    """Ask the process that serves a site to read its records again."""
    name = read_description(folder).name
    write_atomic(folder / RELOAD, f"{time.time_ns()}\n".encode())
    if not ledger_is_held(folder):
        print(f"{name} is not served now; its records are read when it is started.")
        return 0
    print(f"{name} reads its records again before its next reply.")
    print("If they have changed, open sessions end. If they cannot be used, the site keeps the current ones.")
    print(f"See the outcome by    fedstat site status {shell_path(folder)}")
    return 0


def check_site(folder: Path) -> int:
    """Show what others would see, what the policy lets leave, and what is not in order."""
    problems = _examine(folder)
    print(underlined("Problems" if problems else "In order"))
    if not problems:
        how = f"Start it with    fedstat site serve {shell_path(folder)}"
        print("  It is served now." if ledger_is_held(folder) else f"  {how}")
    return print_problems(problems)


def examine_site(folder: Path) -> tuple[list[str], str]:
    """Tell what is not in order, and what :func:`check` shows before it."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        problems = _examine(folder)
    return problems, shown.getvalue()


def _examine(folder: Path) -> list[str]:
    """Show a site, and return what is not in order."""
    problems: list[str] = []
    description = read_description(folder)
    fingerprint = load_identity(folder).public.fingerprint
    policy = read_site_policy(folder)
    print(underlined(f"Site {description.name}"))
    print(f"  Fingerprint  {fingerprint}\n")
    table = _show_table(folder, description, policy, problems)
    _show_policy(description.name, policy)
    problems += _show_budget(folder, description.name, policy)
    problems += _description_problems(folder, description.name, policy, table)
    _show_trust(description, fingerprint, problems)
    problems += mode_problems(folder)
    problems += rule_problems(folder)
    if description.exchange:
        problems += _exchange_problems(description.exchange)
    else:
        problems += flare_site_problems(folder)
    return problems


def _description_problems(folder: Path, name: str, policy: Policy, table: Table | None) -> Iterator[str]:
    if table is not None:
        try:
            read_site_columns(folder, name, table)
        except FedstatError as error:
            yield str(error)
    if policy.formulas == "simple" and not (folder / COLUMNS).exists():
        yield (
            f'no column is published, and by formulas = "simple" none can be asked for: '
            f"fedstat site describe {shell_path(folder)}"
        )


def _show_table(
    folder: Path, description: SiteDescription, policy: Policy, problems: list[str]
) -> Table | None:
    """Show the records as others see them; None where they cannot be opened."""
    print(underlined("What others see of the records"))
    name, label = description.name, description.site_column
    try:
        table = open_records(folder, description)
        found = table_schema(name, LabeledTable(table, label, name) if label else table, policy)
    except (FedstatError, ImportError) as error:
        problems.append(str(error))
        print("  nothing: see below\n")
        return None
    rows = [(column, kind or "no value in any row") for column, kind in found.columns.items()]
    if label:
        rows.append((label, f"text: the site itself, '{name}' in every row"))
    print(format_columns([("column", "holds"), *rows], head=True))
    print(f"\n  {found.n_rows:,} rows\n")
    if isinstance(table, AlignedTable):
        _show_link(table, problems)
    return table


def _show_link(table: AlignedTable, problems: list[str]) -> None:
    print(underlined("How its records are linked"))
    aligned = f"as {table.alignment}" if table.alignment else f"no: {table.why_unaligned}"
    rows = [("key", ", ".join(table.keys.key)), ("keys", f"{table.keys.n_rows:,}"), ("aligned", aligned)]
    print(format_columns(rows) + "\n")
    if table.changed:
        problems.append(f"{table.why_unaligned}; {ALIGNED_BY}")
    problems += content_problems({table.site: table.frame}, {table.site: table.columns}, new_data=False)


def _show_policy(site: str, policy: Policy) -> None:
    load_families()
    print(underlined("What the policy lets leave"))
    looser = policy.looser_than_strict()
    print(f"  Looser than strict: {', '.join(looser)}\n" if looser else "  As strict as a site starts\n")
    rows: list[tuple[str, ...]] = [("family", "steps", "in clear", "in masked sums", "refused by")]
    never: list[str] = []
    for family, steps in FAMILIES.items():
        if family != RECEIPT_FAMILY:
            rows.append(_family_row(site, policy, family, steps, never))
    print(format_columns(rows, head=True))
    if policy.approval == "owner":
        print("\n  Every analysis waits for its owner: fedstat site pending, approve, deny")
    print("\n  Who can learn what under it: fedstat site threats")
    if never:
        print("\n  Refused in any way:")
        print(textwrap.fill(", ".join(never), 96, initial_indent="    ", subsequent_indent="    "))
    print(
        f"\n  Besides, every answer is held against its rows: at least {policy.min_count} behind a sum, "
        f"{policy.min_events} of either\n  outcome, {policy.min_level_count} of a level, and at most "
        f"{policy.max_parameters:g} coefficients per row.\n"
    )


def _family_row(
    site: str, policy: Policy, family: str, steps: Mapping[str, Step], never: list[str]
) -> tuple[str, ...]:
    reported, rules = [], dict[str, None]()
    # None asks in clear, 0 for a part of a masked sum
    for masked in (None, 0):
        outcome = [
            list(refusals(site, policy, Request(site, family, name, masked=masked), step))
            for name, step in steps.items()
        ]
        may = sum(not reasons for reasons in outcome)
        reported.append("all" if may == len(steps) else f"{may} of {len(steps)}" if may else "none")
        rules |= dict.fromkeys(one.rule for reasons in outcome for one in reasons)
    if may:  # of a family that may ask nothing the steps need not be listed
        never += [f"{family}.{name}" for name, reasons in zip(steps, outcome, strict=True) if reasons]
    return family, str(len(steps)), *reported, ", ".join(rules)


def _show_trust(description: SiteDescription, fingerprint: str, problems: list[str]) -> None:
    print(underlined("Whom it trusts"))
    name, coordinator = description.name, description.coordinator
    pinned = {site: key for site, key in description.pinned.items() if site != name}
    rows = [(COORDINATOR, coordinator or "none: nobody's questions are answered"), *pinned.items()]
    print(format_columns(rows) + "\n")
    if not coordinator:
        problems.append("no coordinator is trusted: fedstat site pin FOLDER CARD")
    if normalize_fingerprint(description.pinned.get(name, "")) != normalize_fingerprint(fingerprint):
        problems.append(f"[pinned] has another key for '{name}' than {IDENTITY}; pin its own card")
    if not pinned:
        print("  Without other sites no masked sum is possible.\n")


def _show_budget(folder: Path, name: str, policy: Policy) -> Iterator[str]:
    """Show how the privacy budget stands by the site's account; what is wrong with the account."""
    try:
        site_ledger = read_ledger(folder, name, load_identity(folder).public)
        site_ledger.check_undisputed(name)
    except SecurityError as error:
        yield str(error)
        return
    spent = read_budget_spent(policy, site_ledger)
    if spent is not None:
        print(underlined("Its privacy budget"))
        print(f"  {str(spent).capitalize()}\n")


def _exchange_problems(exchange: str) -> Iterator[str]:
    if is_bucket(exchange):
        try:
            next(open_bucket(exchange).list_after("", ""), None)
        except (FedstatError, ImportError, FileNotFoundError) as error:
            yield f"the bucket for questions and answers cannot be used: {error}"
        return
    place = Path(exchange)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK):
        yield f"the folder for questions and answers, '{exchange}', cannot be written"
