"""Charges to a site's privacy budget, one per release, over all sessions and restarts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from threading import Lock
from typing import Annotated

from fedstat.codec import Minimum
from fedstat.errors import ReceiptError
from fedstat.federation.audit.checkpoints import Nanoseconds
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget, round_to_grid

CHARGE_LOCK = Lock()
"""For all sites of a process: a charge is one short write, and a site's ledger needs no locks."""
RHO_PATTERN = re.compile(r"[0-9]{1,60}(/[1-9][0-9]{0,20})?")
"""A charge, or a sum of such, which are multiples of 2^-64."""


@dataclass(frozen=True, slots=True)
class Charge:
    """A release that was charged, in words, and what it cost.

    `question` is a keyed digest of the request, in its canonical form and with its rows, and `answer` a
    digest of this and of the reply without noise; neither reveals anything without the site's key. `rho` is a
    fraction as a text.
    """

    charged: Nanoseconds
    rho: str
    what: str
    question: str
    answer: str

    @property
    def cost(self) -> Fraction:
        """Cost of the charge."""
        return Fraction(self.rho)


class Charges:
    """All charges of one site."""

    def __init__(self) -> None:
        self.made: list[Charge] = []
        self.questions: set[str] = set()
        self.spent = Fraction(0)
        self._answers: set[str] = set()

    def take(self, charge: Charge) -> None:
        """Load an existing charge."""
        self.made.append(charge)
        self.questions.add(charge.question)
        self._answers.add(charge.answer)
        self.spent += charge.cost

    def make(
        self,
        charges: Sequence[Charge],
        admit: Callable[[Fraction], None],
        write: Callable[[Sequence[Charge]], None],
    ) -> list[Fraction]:
        """Charge all arrays of an answer that were not charged before, or none: what each costs now.

        `admit` refuses a cost by raising, and `write` stores the charges; they count here only afterwards.
        Two threads wait for each other, since each has to see the other's charges.
        """
        with CHARGE_LOCK:
            new = [charge for charge in charges if charge.answer not in self._answers]
            if new:
                admit(sum((charge.cost for charge in new), Fraction(0)))
                write(new)
            for charge in new:
                self.take(charge)
        return [charge.cost if charge in new else Fraction(0) for charge in charges]


@dataclass(frozen=True, slots=True)
class BudgetSpent:
    """A site's privacy budget and how much of it is charged, by how many releases: `rho` of `total`.

    Fractions as texts. The budget is epsilon at delta, for the replacement of one entity's record.
    """

    epsilon: float
    delta: float
    total: str
    rho: str
    releases: Annotated[int, Minimum(0)]

    def check(self) -> None:
        """Require fractions of limited length, and a valid budget, since another site sends it."""
        fractions = all(RHO_PATTERN.fullmatch(text) for text in (self.total, self.rho))
        if not (fractions and 0.0 < self.epsilon < math.inf and 0.0 <= self.delta < 1.0):
            raise ReceiptError("malformed: a privacy budget must be epsilon, delta, and fractions")

    @classmethod
    def of(cls, epsilon: float, delta: float, charges: Charges) -> BudgetSpent:
        """Describe the state of a budget."""
        total = round_to_grid(rho_of_budget(epsilon, delta))
        return cls(epsilon, delta, str(total), str(charges.spent), len(charges.made))

    @property
    def left(self) -> Fraction:
        """Rho that may still be charged; 0 if the owner has lowered the budget since."""
        return max(Fraction(0), Fraction(self.total) - Fraction(self.rho))

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of what was charged, at the budget's delta."""
        return epsilon_of_zcdp(Fraction(self.rho), self.delta) if self.delta else 0.0

    def __str__(self) -> str:
        rho, total = (float(Fraction(text)) for text in (self.rho, self.total))
        return (
            f"epsilon {self.epsilon_spent:.3g} of {self.epsilon:g} at delta {self.delta:g} is charged, by "
            f"{self.releases:,} release{'' if self.releases == 1 else 's'} (rho {rho:.3g} of {total:.3g})"
        )
