"""Sites whose only family reports the facts that a test names: the way every release takes to its checks."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count

import numpy as np
import pandas as pd

from fedstat.errors import FedstatError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys

FAMILY = "boundary"
N_ROWS = 64
"""Rows of the table of a site, unless a test names another table."""
PENDING: deque = deque()
"""Facts that the next request reports."""
EVERY = count()


def report(data, state):
    """Report the pending facts; the reply holds no sum, so that no other rule applies to it."""
    facts = tuple(PENDING)
    state.report(*facts)
    return {"reported": np.array(len(facts))}


def open_columns(data, state, columns):
    """Keep a design with `n` columns."""
    state.keep("design", columns, len(data.frame), columns=int(columns))
    return {}


def release_rows(data, state, n):
    """Release `n` numbers for each entity, other ones every time: a repetition is not counted."""
    return {"rows": np.full((data.table.n_rows, int(n)), float(next(EVERY)))}


def release_sum(data, state, n):
    """Release a sum that rests on `n` entities."""
    state.count_entities(int(n))
    return {"total": np.zeros(())}


CONTROL = ArrayDeclaration("control", "a number", 0)
STEPS = {
    "report": Step(report, {}, {"reported": CONTROL}),
    "open": Step(open_columns, {"columns": CONTROL}),
    "rows": Step(
        release_rows, {"n": CONTROL}, {"rows": ArrayDeclaration("per entity", "numbers of rows", 2)}
    ),
    "sum": Step(
        release_sum,
        {"n": CONTROL},
        {"total": ArrayDeclaration("aggregate", "a sum", 0, maskable=True, behind=(EntityCount,))},
    ),
}


def site_of(table=None, name="Kiel", published=None, **policy):
    """Make a site with these rules, next to those of :meth:`Policy.open`; the family must be installed."""
    table = pd.DataFrame({"x": np.arange(float(N_ROWS))}) if table is None else table
    return Site(name, table, Policy(**policy), published=published)


def request(site, step, session="s", client="", masked=None, **numbers):
    """Return what a step of the family releases."""
    arrays = {name: np.asarray(number, dtype=float) for name, number in numbers.items()}
    request = Request(site.name, FAMILY, step, arrays, session)
    return unpack_reply(site.answer(pack_request(replace(request, masked=masked)), client))


def refusal_of(site, *facts, session="s", client=""):
    """Have a step report facts: the error of the site, None where it answers."""
    PENDING.clear()
    PENDING.extend(facts)
    try:
        reply = request(site, "report", session, client)
    except FedstatError as error:
        return error
    assert int(reply.arrays["reported"]) == len(facts)
    return None


def rule_against(site, *facts, session="s", client=""):
    """Return the rule by which the site refuses what a step reports, "" where it answers."""
    error = refusal_of(site, *facts, session=session, client=client)
    if error is None:
        return ""
    assert isinstance(error, PolicyError) and error.site == site.name
    return error.rule


def masked_sites(n, pinned=0, **policy):
    """Make `n` sites that have agreed on keys; each has pinned all, or `pinned` sites if these are more."""
    sites = {f"S{k}": site_of(name=f"S{k}", **policy) for k in range(n)}
    prints = {name: site.fingerprint for name, site in sites.items()}
    others = {f"T{k}": f"{k:064x}" for k in range(pinned - n)}
    for site in sites.values():
        site.trust.pinned.update(prints)
    LocalEngine(sites).run(agree_keys(tuple(sites), "s"), Ledger())
    for site in sites.values():
        site.trust.pinned.update(others)
    return sites
