"""Noise of sums over sites: alone at each site, or in shares inside a masked sum.

A protocol of a noisy sum begins with :func:`agree_shares`. If that returns None, every site adds all of the
noise itself: its parts are released without masks, and their sum has K times the variance. Otherwise the text
of each request contains the :class:`NoiseShares`, is declared ``common`` and is the same for all sites. Each
site reports ``NoiseRequired(..., variance=..., shares=shares)``, and the protocol runs in
:func:`fedstat.federation.protocols.masked_sums.masked_protocol`. In either case the variance that a site adds
is ``share_of_noise(variance, honest_shares(shares))``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.codec import from_json, to_json
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseShares
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Request, control
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import FAMILY
from fedstat.typing import Array


@step(FAMILY, requests=control("nothing"), replies=control("keyed digest of the records"), public=True)
def mark_records(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Return a keyed digest of the records.

    It shows only whether they have changed since an earlier one. The charges of repeated requests show the
    same.
    """
    return {}, to_json(state.mark())


def coalition_of(policies: Mapping[str, Policy]) -> int:
    """Return the largest number of colluding sites against which one of these owners wants noise."""
    budgets = [policy.privacy for policy in policies.values() if policy.privacy is not None]
    return max((budget.coalition(len(policies)) for budget in budgets), default=len(policies) - 1)


def agree_shares(policies: Mapping[str, Policy], session: str) -> FitProtocol[NoiseShares | None]:
    """Agree on shares of noise among the sites of these policies; None if each adds all of the noise."""
    colluding = coalition_of(policies)
    if len(policies) - colluding < 2:
        return None
    replies = yield [Request(site, FAMILY, "mark_records", {}, session, "{}") for site in policies]
    marks = {one.site: from_json(int, one.text, f"{one.site}: mark of its records") for one in replies}
    return NoiseShares(marks, colluding)
