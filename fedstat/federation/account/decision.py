"""Decision of a site's owner about a plan: who, when, and about which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedstat.federation.account.head import Nanoseconds, told


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about the plan with this digest."""

    plan: str
    verdict: Literal["approved", "denied"]
    who: str
    when: Nanoseconds

    @property
    def name(self) -> str:
        """The name under which a consent is spent."""
        return f"plan {self.plan}, {self.when}"

    def __str__(self) -> str:
        return f"{self.verdict} by {self.who} on {told(self.when)}: plan {self.plan}"
