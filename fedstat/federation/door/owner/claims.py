"""What each party can learn under which policy: the one place of the sentences that are said about it."""

from __future__ import annotations

from collections.abc import Iterable

from fedstat.federation.door.owner.policy import Policy

ONE_PROCESS = "one process: nothing is protected"
REHEARSAL = "one process: a rehearsal of the strict policy, nothing is protected"


def one_process(policies: Iterable[Policy]) -> str:
    """Say what a policy is worth where whoever asks can read the tables."""
    rules = list(policies)
    return REHEARSAL if rules and all(policy.is_strict for policy in rules) else ONE_PROCESS
