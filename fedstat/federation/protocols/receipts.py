"""Ledger heads and receipts: the sites' signed statements at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fedstat.codec import from_json, to_json
from fedstat.errors import DisclosureWarning, MessageError, ReceiptError, warn
from fedstat.federation.audit.checkpoints import SignedCheckpoint, utc_text
from fedstat.federation.audit.event_log import canonical_json
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.audit.receipt import LOSS_CAVEAT, Receipt, SiteStatement, coordinator_digest
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import VERSION, Request, control
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.table import table_curves
from fedstat.typing import Array

Fit = TypeVar("Fit")

RECALL = "recall_head"
DIGEST_LENGTH = 64


@step(
    RECEIPT_FAMILY,
    name=RECALL,
    request=SignedCheckpoint,
    requests=control("an earlier head of the site's account"),
    replies=control("its head now"),
    public=True,
)
def check_ledger_head(
    data: SiteData, state: State, earlier: SignedCheckpoint
) -> tuple[dict[str, Array], str]:
    """Compare the ledger with its head as the coordinator stored it, and release the present head.

    `earlier` is the site's own signed head, which no other party can make; the reply is empty if the site
    keeps no ledger on disk.
    """
    data.site_ledger.verify_checkpoint(data.name, data.trust.identity.public, earlier)
    return {}, "" if data.site_ledger.store is None else to_json(data.site_ledger.store.head)


@step(
    RECEIPT_FAMILY,
    name="state_ledger",
    requests=control("digest of the coordinator's ledger"),
    replies=control("the site's signed account of what passed"),
    public=True,
)
def sign_ledger(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sign what this site's own ledger says of a session, up to and without the present ask.

    The text is the digest of the coordinator's ledger, which is signed along. No value of the data is in the
    statement.
    """
    digest = json.loads(text)
    if not isinstance(digest, str) or len(digest) != DIGEST_LENGTH:
        raise MessageError(f"{data.name}: expected the digest of a ledger, {DIGEST_LENGTH} digits")
    site_ledger, keys = data.site_ledger, data.trust.identity
    chain = site_ledger.present
    others = site_ledger.numbers.without(chain.numbers)
    # Without the present ask, which the coordinator's ledger cannot have in it when it is digested.
    entries, head = chain.before_this_request()
    statement = SiteStatement(
        site=data.name,
        session=chain.session,
        keys=keys.public,
        ordinal=chain.ordinal,
        previous=chain.previous,
        head=head,
        coordinator=digest,
        earlier=others.released,
        earlier_received=others.received,
        columns=_width(data, site_ledger.columns),
        entities=site_ledger.entities,
        other_sessions=len(site_ledger.chains) - 1,
        entries=tuple(entries),
        vectors=site_ledger.vectors,
        site_ledger=None if site_ledger.store is None else site_ledger.store.head,
        privacy=read_budget_spent(data.policy, site_ledger),
        version=VERSION,
        families=tuple(sorted(FAMILIES)),
        as_of=chain.as_of,
    )
    signed = canonical_json(statement.signed())
    signature = keys.signing.sign(signed.encode()).hex()
    return {}, replace(statement, signature=signature).to_json(signed)


def _width(data: SiteData, columns: Iterable[str]) -> int:
    """Count values of a row in some columns: a curve has one for each of its points."""
    curves = table_curves(data.table)
    return sum(curves[name].values.shape[1] if name in curves else 1 for name in columns)


def request_ledger_heads(
    heads: Mapping[str, SignedCheckpoint], session: str
) -> FitProtocol[dict[str, SignedCheckpoint]]:
    """Show sites what they signed, as it was kept; the heads of now, of those that keep an account at rest.

    A SecurityError where the account of a site does not hold what it signed: its files were put back to an
    earlier state. A DisclosureWarning where the owner of a site has declared since that its account was lost.
    """
    replies = yield [
        Request(site, RECEIPT_FAMILY, RECALL, {}, session, to_json(head)) for site, head in heads.items()
    ]
    now = {
        reply.site: from_json(SignedCheckpoint, reply.text, f"{reply.site}: the head of its account")
        for reply in replies
        if reply.text
    }
    for site, head in now.items():
        for time in set(head.lost) - set(heads[site].lost):
            warn(LOSS_CAVEAT.format(site=site, time=utc_text(time)), DisclosureWarning)
    return now


def with_receipt(
    protocol: FitProtocol[Fit], sites: Sequence[str], session: str, ledger: Ledger
) -> FitProtocol[Fit]:
    """Run a protocol, then add the statements of all sites to the run's ledger as its receipt.

    All sites of the partition receive the request, whether they take part or not. A DisclosureWarning reports
    a site that has released as many numbers as it has values in use. Returns the protocol's value.
    """
    fit = yield from protocol
    passed = ledger.log.passed
    digest = json.dumps(coordinator_digest(ledger.at, passed, ledger.absent))
    replies = yield [Request(site, RECEIPT_FAMILY, "state_ledger", {}, session, digest) for site in sites]
    try:
        found = [
            SiteStatement.from_dict(json.loads(reply.text), f"{reply.site}: its statement on what passed")
            for reply in replies
        ]
    except (ValueError, RecursionError) as error:
        raise ReceiptError("a site's statement on what passed is malformed") from error
    # A run that was taken up again goes on in the session in which it began.
    began = found[0].session if found else session
    statements = dict(zip(sites, found, strict=True))
    ledger.receipt = Receipt(began, ledger.at, passed, statements, ledger.absent)
    if ledger.receipt.alarm:
        warn(ledger.receipt.alarm, DisclosureWarning)
    return fit
