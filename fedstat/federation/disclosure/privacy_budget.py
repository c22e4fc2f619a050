"""Noise with differential privacy, and the privacy budget that is charged for it.

For who writes a step whose answer depends on rows under a privacy budget. The step declares, and tells::

    gives={"counts": Declared("noisy aggregate", "...", noisy=True, dtype="int64",
                              behind=(Entities, NoiseRequired))}
    ...
    state.tell(Entities(n), NoiseRequired("counts", asked, squared, variance))
    return {"counts": counts}                      # without noise

`counts` are integers whose sensitivity follows from how the step made them: by a function of
:mod:`fedstat.privacy.sensitivity`, which cuts values to public bounds and says what is `squared`, the square
of the largest Euclidean change where one entity's record is replaced. What comes with a question are
requests: bounds, to which the step cuts, and a share of the budget or a variance; no figure of the
coordinator's is a sensitivity. Then the door, and no step,

* charges rho = squared / (2 variance), rounded up to a multiple of 2^-64, to the site's budget and writes it
  down, on disk where the site has an account there, or refuses what would exceed it; a charge stands,
  whatever becomes of the answer;
* adds independent discrete Gaussian noise of this variance to every number, exactly (mod 2^64);
* masks the noisy array where it is a part of a masked sum. Every site adds noise that pays for its own
  records by itself. So whoever else joins forces, is dropped, or adds none: nobody ever holds a sum without
  noise, and what a site was charged holds against all others together; a sum over K sites has K times the
  variance. A ``masked share`` of a secure product is treated alike, before it leaves.

The noise is a function of the site's key, of the question (family, step, array, `request`, `squared`,
`variance`), of the content of the whole table and of the array without noise. The same question, in another
session, by another coordinator, or after a restart, has the same noise, costs nothing, and cannot be
averaged; any other has noise of its own, and is charged. `request` is the question in canonical form, one
text
for all its spellings: rounded where the step rounds, in the order in which it computes, as JSON of what was
parsed and not as it came. Two spellings that are missed cost twice, and disclose nothing. A table that was
changed is another table: its questions are charged anew. A share of a product is drawn at random, so that it
would be charged in every session; with `of`, what is secret behind it in the place of the array, its noise is
repeated. There belongs in it all that the array depends on, the other institution's columns (as committed to
by a keyed digest) among it: noise that is repeated while these change gives away the difference.

What the guarantee takes as public, who has a record for instance, and what is sealed for another institution
and serves a share that leaves with noise, is declared ``unpaid`` with the reason; nothing else leaves as it
is.

A refusal must not tell of rows either, since no charge pays for it: a step that gives noisy arrays fails by
what was asked and published, before it reads, and never by what rows hold. Missing and unknown values count
somewhere or nowhere, infinite ones are cut. What goes wrong nevertheless leaves as one word.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedstat.errors import DescriptionError, DisclosureError
from fedstat.federation.audit.budget_charges import BudgetSpent, Charge
from fedstat.federation.audit.event_log import SiteLedger, content_digest
from fedstat.federation.crypto.keys import Identity, encode_parts, random_bytes
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, Step
from fedstat.federation.tables.aligned_table import content_fingerprint
from fedstat.federation.tables.table import FrameTable, LabeledTable, Table
from fedstat.privacy.discrete_gaussian import LARGEST, VERSION, discrete_gaussian
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_noise, round_to_grid
from fedstat.typing import Array

BUDGET_EXAMPLE = "[privacy]  epsilon = 1.0  delta = 1e-06"
MAX_QUOTED_CHARACTERS = 200
"""Characters that a charge quotes of a question, for the owner."""


@dataclass(frozen=True, slots=True, eq=False)
class NoiseRequired:
    """An array leaves with noise only: the question in canonical form, its sensitivity, and the noise.

    Parameters
    ----------
    array : str
        Its name among what the step gives.
    request : str
    squared : int or Fraction
        Square of the sensitivity, in the integers that the array holds.
    variance : Fraction
        Of the noise on each of them.
    of : array, optional
        What the noise is bound to in the place of the array itself.
    """

    array: str
    requested: str
    squared: int | Fraction
    variance: Fraction
    of: Array | None = None

    @property
    def rho(self) -> Fraction:
        """What it costs."""
        return round_to_grid(rho_of_noise(self.squared, self.variance), up=True)


@dataclass(slots=True)
class NoiseMechanism:
    """Charges the answers of one site, and adds their noise, which is drawn under a key of `keys`."""

    site: str
    policy: Policy
    site_ledger: SiteLedger
    table: Table
    keys: Callable[[], Identity]
    _content: bytes = b""

    def take(self, table: Table) -> None:
        """Answer for other records from now on, whose questions are charged anew."""
        self.table, self._content = table, b""

    def check(self, request: Request, owed: Iterable[NoiseRequired]) -> None:
        """Refuse an answer that would exceed the budget, by what its arrays owe that were not charged before.

        Raises
        ------
        DescriptionError
            From question, policy and earlier charges alone; names what is left, and the line of the policy.
        """
        reported, known = tuple(owed), self.site_ledger.charges.questions
        if not all(0 < one.variance <= LARGEST for one in reported):
            raise DescriptionError(f"{self.site}: expected a variance of noise above 0 and at most 2^100")
        new = [one.rho for one in reported if self._question(request, one) not in known]
        if any(new):
            self._admit(sum(new, Fraction(0)))

    def add(
        self, request: Request, step: Step, owed: Mapping[str, NoiseRequired], arrays: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, str]]:
        """Charge the noisy arrays of an answer, all or none, and add noise: the arrays, and what each cost.

        Raises
        ------
        DescriptionError
            Another session has spent meanwhile what is left.
        EngineError
            The charges cannot be written down.
        """
        noisy = {name: array for name, array in arrays.items() if step.gives[name].noisy and array.size}
        # Nothing is bounded by 0 that is there.
        wrong = [name for name in noisy if name not in owed or owed[name].squared <= 0]
        if wrong:
            raise DisclosureError(
                f"{self.site}, step '{request.step}': array '{wrong[0]}' does not leave: it is "
                f"declared noisy, "
                "and the step did not tell its sensitivity (NoiseOwed). Nothing was released; this is for "
                "the author of the family to mend"
            )
        charges = {name: self._charge(request, owed[name], array) for name, array in noisy.items()}
        costs = self.site_ledger.charges.make(
            tuple(charges.values()), self._admit, self.site_ledger.keep_charges
        )
        out = dict(arrays)
        for name, array in noisy.items():
            source = random_bytes(self._keyed("noise", charges[name].answer))
            noise = discrete_gaussian(owed[name].variance, array.size, source).reshape(array.shape)
            # Mod 2^64, in which shares of a product are; other sums are far from the limits.
            out[name] = (array.astype(np.int64).view(np.uint64) + noise.view(np.uint64)).view(np.int64)
        return out, dict(zip(charges, map(str, costs), strict=True))

    def _charge(self, request: Request, owed: NoiseRequired, values: Array) -> Charge:
        """Make out the charge for an array, by which it is known whether it was charged before."""
        question = self._question(request, owed)
        behind = content_digest(values if owed.of is None else owed.of)
        return Charge(
            charged=time.time_ns(),
            rho=str(owed.rho),
            what=f"{request.family} {request.step} {owed.array}: {owed.requested}"[:MAX_QUOTED_CHARACTERS],
            question=question,
            answer=self._keyed("answer", question, behind).hex(),
        )

    def _admit(self, cost: Fraction) -> None:
        budget, rule = self.policy.privacy, ("privacy budget", self.site)
        if budget is None:
            raise DescriptionError.of_rule(
                *rule,
                "is none, and answers with noise are charged to one. The owner may set it by the lines  "
                f"{BUDGET_EXAMPLE}  in policy.toml",
            )
        stands = BudgetSpent.of(budget.epsilon, budget.delta, self.site_ledger.charges)
        if cost <= stands.left:
            return
        if budget.delta == 0.0:
            raise DescriptionError.of_rule(
                *rule,
                "has a delta of 0, which no Gaussian noise keeps to. The owner may allow it by the line  "
                "delta = 1e-06  in section [privacy] of policy.toml",
            )
        needed = epsilon_of_zcdp(self.site_ledger.charges.spent + cost, budget.delta)
        raise DescriptionError.of_rule(
            *rule,
            f"has rho {float(stands.left):.3g} left, of {float(Fraction(stands.total)):.3g} (epsilon "
            f"{budget.epsilon:g} at delta {budget.delta:g}), and this answer costs {float(cost):.3g}. Ask "
            "for less, or once more for what was asked before, which costs nothing; the owner may allow it "
            f"by the line  epsilon = {round_up(needed):g}  in section [privacy] of policy.toml",
        )

    def _question(self, request: Request, owed: NoiseRequired) -> str:
        # Another way to draw would give the same question other noise: it counts as another question.
        numbers = str(Fraction(owed.squared)), str(owed.variance), VERSION
        requested = request.family, request.step, owed.array, owed.requested
        return self._keyed("question", *requested, *numbers, self._records()).hex()

    def _records(self) -> bytes:
        """Digest of all records, by which it is known whether they are the same as before."""
        table = self.table.table if isinstance(self.table, LabeledTable) else self.table
        # What is streamed may change from one question to the next; what is in memory is read once.
        if not self._content or not isinstance(table, FrameTable):
            self._content = content_fingerprint(table, self._keyed("records"))
        return self._content

    def _keyed(self, *parts: str | bytes) -> bytes:
        return hmac.digest(self.keys().secret("noise"), encode_parts(*parts), "sha256")


def read_budget_spent(policy: Policy, site_ledger: SiteLedger) -> BudgetSpent | None:
    """Say how a site's privacy budget stands; None where it has none."""
    budget = policy.privacy
    return None if budget is None else BudgetSpent.of(budget.epsilon, budget.delta, site_ledger.charges)


def round_up(value: float) -> float:
    """Round a positive number up to three digits."""
    unit = 10.0 ** (np.floor(np.log10(value)) - 2)
    return float(f"{np.ceil(value / unit) * unit:.3g}")
