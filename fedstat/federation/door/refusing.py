"""Refusals of a site: what leaves of them, what stays in its log, and when it stops answering.

A refusal that depends on rows is a bit about them. Whoever may ask as often as wanted finds any value by
bisection, whatever the text says: so under ``reasons = "logged"`` the text is one word and the rule, and
after ``max_refusals`` of them whoever asked gets no more answers until the owner says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fedstat.errors import (
    ConsentError,
    DescriptionError,
    FedstatError,
    FormulaError,
    PolicyError,
    SecurityError,
)
from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.account.entry import policy_rule
from fedstat.federation.door.owner.policy import Policy

KEPT = 100
"""Reasons that a process keeps in memory for its owner."""
FROM_THE_QUESTION = (ConsentError, DescriptionError, FormulaError, SecurityError)
"""Errors that follow from question, policy, public description and keys alone, and leave in full."""


@dataclass(slots=True)
class Refusals:
    """What a site's refusals say, and to whom how many went.

    Parameters
    ----------
    site : str
    account : SiteAccount
        Counts them beyond the life of the process.
    log : callable, optional
        Takes one line for the owner; by default the latest are kept in :attr:`reasons`.
    """

    site: str
    account: SiteAccount
    log: Callable[[str], None] | None = None
    reasons: list[str] = field(default_factory=list)

    def check_patience(self, policy: Policy, asker: str) -> None:
        """Answer nobody whose questions were refused too often.

        Raises
        ------
        PolicyError
            They were.
        """
        most = policy.max_refusals
        if most and self.account.refusals.get(asker, 0) >= most:
            raise PolicyError(
                f"{self.site}: its policy (maximum refusals) has refused {most} questions because of its "
                "rows, and answers no more of whoever asked them. Its owner reads the log, and may go on by "
                "'fedstat site answer-again'"
            )

    def outward(self, policy: Policy, error: FedstatError, asker: str) -> FedstatError:
        """Turn an error that a step raised, which may depend on rows, into what leaves."""
        if isinstance(error, FROM_THE_QUESTION):
            return error
        if policy.max_refusals:
            self.account.count_refusal(asker)
        # Under a budget nothing pays for a reason.
        if policy.reasons == "told" and policy.privacy is None:
            return error
        self.note(str(error))
        rule = policy_rule(error) or "the rows do not admit it"
        return PolicyError(f"{self.site}: refused; its policy ({rule}). Why stands in the log of its owner")

    def note(self, reason: str) -> None:
        """Tell the owner, and nobody else."""
        if self.log is not None:
            self.log(reason)
        self.reasons = [*self.reasons[1 - KEPT :], reason]
