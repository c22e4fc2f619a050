"""Noise with differential privacy, and the privacy budget that is charged for it.

A step whose reply depends on rows under a privacy budget declares and reports::

    gives={"counts": Declared("noisy aggregate", "...", noisy=True, dtype="int64",
                              behind=(EntityCount, NoiseRequired))}

    state.report(EntityCount(n), NoiseRequired("counts", request, squared, variance))
    return {"counts": counts}                      # without noise

`counts` are integers. Their sensitivity follows from how the step made them, by a function of
:mod:`fedstat.privacy.sensitivity`, which clips values to public bounds and returns `squared`: the square of
the largest Euclidean change if one entity's record is replaced. A coordinator can request bounds, to which
the step clips, and a share of the budget or a variance; no number of the coordinator is a sensitivity. The
site, not the step, then does the following.

* It charges rho = squared / (2 variance), rounded up to a multiple of 2^-64, to its budget, and records the
  charge, on disk if its ledger is there, or refuses what would exceed the budget. A charge is final, even if
  the reply is lost.
* It adds independent discrete Gaussian noise of this variance to every number, exactly (mod 2^64).
* It masks the noisy array if it is part of a masked sum. By default every site adds enough noise for its own
  records. So no party ever has a sum without noise, even if others collude, drop out, or add no noise, and
  the charge of a site holds against all others together. A sum over K sites has K times the variance. A
  ``masked share`` of a secure product gets noise in the same way before it is released.

An owner can state that at most t other sites collude with the coordinator (``Budget(colluding=t)``). Then a
site adds a share of the noise to a masked sum over K sites, variance s^2 / (K - t), and reports
``NoiseRequired(..., shares=NoiseShares(...))``. The shares of the other sites that do not collude are hidden
by the masks, so that noise of variance s^2 is left against every coalition of t sites. A share protects only
together with the others. So the noise of a site depends on the sites of the sum, and on the `marks` of all of
them, which change with their records: all sites repeat a sum, or none does. Otherwise two sums would differ
in one site's part and its share alone. Masks do not cancel if sites received different marks.

The noise is a function of the site's key, of the request (family, step, array, `request`, `squared`,
`variance`), of the content of the complete table and of the array without noise. The same request has the
same noise in another session, from another coordinator, or after a restart: it is free, and repeats cannot be
averaged. Any other request has noise of its own, and is charged. `request` is the request in canonical form,
the same text for all spellings: rounded as the step rounds, in the order in which it computes, and as JSON of
the parsed values. Two spellings that are not recognized cost twice, and disclose nothing. A changed table is
another table: its requests are charged again. With `of`, the secret behind an array that is drawn at random,
its noise is repeated. `of` contains everything on which the array depends.

A share of a product depends on the columns of another site, which this site cannot verify. Repeated noise
with other columns would reveal the difference, so each product has noise of its own. With `kept`, the site
keeps the noisy array in its ledger instead, under the request and the content of the complete table, and
releases the same bytes again to an equal request (:class:`RepeatedRelease`). Nothing is computed from rows
then, so the repetition reveals nothing new and costs nothing. This holds for every recipient, and whatever
the other sites do. Shares of one product belong together: the coordinator can use them only if all sites
repeat the same run.

Some values are public under the guarantee (for example, who has a record), or are sealed for another site and
serve a share that is released with noise. They are declared ``unpaid`` with the reason. Nothing else is
released without noise.

A refusal must not depend on rows either, since no charge pays for it. A step with noisy arrays fails because
of the request and published values, before it reads rows, and never because of rows. Missing and unknown
values count in a fixed place or not at all, and infinite ones are clipped. Any other failure is released as
one word.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np

from fedstat.codec import Minimum
from fedstat.errors import DescriptionError, DisclosureError
from fedstat.federation.audit.budget_charges import BudgetSpent, Charge
from fedstat.federation.audit.event_log import SiteLedger, content_digest
from fedstat.federation.crypto.keys import Identity, encode_parts, random_bytes
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, Step
from fedstat.federation.tables.aligned_table import content_fingerprint
from fedstat.federation.tables.table import FrameTable, LabeledTable, Table
from fedstat.privacy.discrete_gaussian import LARGEST, VERSION, discrete_gaussian
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_shares, round_to_grid
from fedstat.typing import Array

BUDGET_EXAMPLE = "[privacy]  epsilon = 1.0  delta = 1e-06"
MARK_BITS = 52
MAX_QUOTED_CHARACTERS = 200
"""Number of characters of a request that a charge quotes for the owner."""


@dataclass(frozen=True, slots=True)
class NoiseShares:
    """Noise of a masked sum in shares of its sites; every site receives the same.

    Parameters
    ----------
    marks : mapping of str to int
        By site of the sum, the mark of its records: step 'mark_records'.
    colluding : int
        Sites that may collude with the coordinator; at least two others remain.
    """

    marks: Mapping[str, int]
    colluding: Annotated[int, Minimum(1)]

    @property
    def honest(self) -> int:
        """Number of shares that no coalition of `colluding` sites knows."""
        return len(self.marks) - self.colluding

    def canonical(self) -> str:
        """Return the same text for the same sites, records and coalitions."""
        return json.dumps([self.colluding, sorted(self.marks.items())])


def honest_shares(shares: NoiseShares | None) -> int:
    """Return the number of shares of noise that count; 1 if each site adds all of it."""
    return 1 if shares is None else shares.honest


@dataclass(frozen=True, slots=True, eq=False)
class NoiseRequired:
    """An array is released only with noise: the request in canonical form, its sensitivity, and the noise.

    Parameters
    ----------
    array : str
        Its name among the arrays of the step.
    request : str
    squared : int or Fraction
        Square of the sensitivity, in the integers of the array.
    variance : Fraction
        Variance of the noise on each of them.
    of : array, optional
        Content that the noise is bound to instead of the array itself.
    kept : tuple of str
        The request without what differs between sessions, and the part of its reply: the array is kept for
        repetitions. Empty: it is not.
    later : Fraction
        Charges of later requests of the same analysis. The budget has to have room for them as well, so that
        an analysis that it does not allow is refused before anything is charged.
    shares : NoiseShares, optional
        The array is part of a masked sum, and `variance` is one share of its noise.
    """

    array: str
    requested: str
    squared: int | Fraction
    variance: Fraction
    of: Array | None = None
    kept: tuple[str, str] = ("", "")
    later: Fraction = Fraction(0)
    shares: NoiseShares | None = None

    @property
    def rho(self) -> Fraction:
        """The charge of the array."""
        honest = honest_shares(self.shares)
        return round_to_grid(rho_of_shares(self.squared, self.variance, honest), up=True)


@dataclass(frozen=True, slots=True)
class RepeatedRelease:
    """An array repeats parts of a release, one after the other: see `kept` of :class:`NoiseRequired`."""

    array: str
    question: str
    parts: tuple[str, ...]


@dataclass(slots=True)
class NoiseMechanism:
    """Charges the replies of one site, and adds their noise, which is drawn under a key of `keys`."""

    site: str
    policy: Policy
    site_ledger: SiteLedger
    table: Table
    keys: Callable[[], Identity]
    _content: bytes = b""

    def take(self, table: Table) -> None:
        """Answer for other records from now on, whose requests are charged again."""
        self.table, self._content = table, b""

    def recall(
        self, request: Request, question: str, parts: Collection[str]
    ) -> tuple[bytes, dict[str, Array]] | None:
        """Return the latest complete release for an equal request over the same records; None without one.

        The first item identifies the run: shares of one product are those of one run.
        """
        runs = self.site_ledger.kept.get(self._kept_name(request, question), {})
        complete = [run for run, held in runs.items() if held.keys() >= set(parts)]
        if not complete:
            return None
        run = complete[-1]
        return hashlib.sha256(run.encode()).digest(), {part: runs[run][part] for part in parts}

    def mark(self) -> int:
        """Return a digest of the records, which only shows whether they have changed since."""
        # A number: a plan for consent has the same text before and after.
        return int.from_bytes(self._keyed("mark", self._records())[:8], "big") >> (64 - MARK_BITS)

    def check(
        self, request: Request, owed: Iterable[NoiseRequired | RepeatedRelease], sites: Collection[str] = ()
    ) -> None:
        """Refuse a reply that would exceed the budget, from the charges of its arrays that are new.

        `sites` mask the reply. A refusal follows from request, policy and earlier charges alone.
        """
        reported = [one for one in owed if isinstance(one, NoiseRequired)]
        known = self.site_ledger.charges.questions
        for shares in (one.shares for one in reported if one.shares is not None):
            self._check_shares(request, shares, sites)
        if not all(0 < one.variance <= LARGEST for one in reported):
            raise DescriptionError(f"{self.site}: expected a variance of noise above 0 and at most 2^100")
        new = [one for one in reported if one.rho and self._question(request, one) not in known]
        if new:
            later = max(one.later for one in new)
            self._admit(sum((one.rho for one in new), later), "analysis" if later else "reply")

    def add(
        self,
        request: Request,
        step: Step,
        owed: Mapping[str, NoiseRequired | RepeatedRelease],
        arrays: Mapping[str, Array],
    ) -> tuple[dict[str, Array], dict[str, str]]:
        """Charge the noisy arrays of a reply, all or none, and add noise; return the arrays and the charges.

        Raises
        ------
        DescriptionError
            Another session has used the rest of the budget meanwhile.
        EngineError
            The charges cannot be recorded.
        """
        noisy = {name: array for name, array in arrays.items() if step.gives[name].noisy and array.size}
        repeated = {
            name
            for name, array in noisy.items()
            if isinstance(one := owed.get(name), RepeatedRelease) and self._was_released(request, one, array)
        }
        needed = {name: one for name, one in owed.items() if isinstance(one, NoiseRequired)}
        is_common = step.text_in is not None and step.text_in.common
        for name, one in needed.items():
            if one.shares is not None and not (step.gives[name].maskable and is_common):
                raise DisclosureError(
                    f"{self.site}, step '{request.step}': array '{name}' was not released: its noise "
                    "is a share, and it is not maskable, or the text of the request is not declared common"
                )
        noisy = {name: array for name, array in noisy.items() if name not in repeated}
        # A sensitivity of 0 bounds nothing if there are values.
        wrong = [name for name in noisy if name not in needed or needed[name].squared <= 0]
        if wrong:
            raise DisclosureError(
                f"{self.site}, step '{request.step}': array '{wrong[0]}' was not released: it is declared "
                "noisy, and the step did not report its sensitivity (NoiseRequired). Please report this "
                "error to the author of the family"
            )
        charges = {name: self._charge(request, needed[name], array) for name, array in noisy.items()}
        costs = self.site_ledger.charges.make(
            tuple(charges.values()), self._admit, self.site_ledger.keep_charges
        )
        out = dict(arrays)
        for name, array in noisy.items():
            source = random_bytes(self._keyed("noise", charges[name].answer))
            noise = discrete_gaussian(needed[name].variance, array.size, source).reshape(array.shape)
            # Mod 2^64, in which shares of a product are; other sums are far from the limits.
            out[name] = (array.astype(np.int64).view(np.uint64) + noise.view(np.uint64)).view(np.int64)
            question, part = needed[name].kept
            if question:
                kept = self._kept_name(request, question)
                self.site_ledger.keep_release(kept, request.session, part, out[name])
        return out, dict(zip(charges, map(str, costs), strict=True)) | dict.fromkeys(repeated, "0")

    def _check_shares(self, request: Request, shares: NoiseShares, sites: Collection[str]) -> None:
        """Require masks among the sites of the shares, the mark of this site, and the owner's coalition."""
        if set(shares.marks) != set(sites) or shares.honest < 2:
            raise DescriptionError(
                f"{self.site}, step '{request.step}': noise in shares needs a masked sum over the sites of "
                "the shares, and two sites more than may collude"
            )
        if shares.marks[self.site] != self.mark():
            raise DescriptionError(
                f"{self.site}, step '{request.step}': the records of this site have changed since the sites "
                "were marked. Make the model again with from_formula"
            )
        budget = self.policy.privacy
        if budget is not None and shares.colluding < budget.coalition(len(sites)):
            raise DescriptionError.of_rule(
                "privacy budget",
                self.site,
                f"adds noise against {budget.coalition(len(sites))} colluding sites, and the request is for "
                f"{shares.colluding}. The owner can allow it with  colluding = {shares.colluding}  in "
                "section [privacy] of policy.toml",
            )

    def _was_released(self, request: Request, one: RepeatedRelease, array: Array) -> bool:
        """Return whether an array is what this site has charged and released, to the last byte."""
        runs = self.site_ledger.kept.get(self._kept_name(request, one.question), {})
        return any(
            held.keys() >= set(one.parts)
            and array.tobytes() == b"".join(held[part].tobytes() for part in one.parts)
            for held in runs.values()
        )

    def _kept_name(self, request: Request, question: str) -> str:
        return self._keyed("kept", request.family, question, VERSION, self._records()).hex()

    def _charge(self, request: Request, owed: NoiseRequired, values: Array) -> Charge:
        """Return the charge for an array, by which the site recognizes that it was charged before."""
        question = self._question(request, owed)
        behind = content_digest(values if owed.of is None else owed.of)
        return Charge(
            charged=time.time_ns(),
            rho=str(owed.rho),
            what=f"{request.family} {request.step} {owed.array}: {owed.requested}"[:MAX_QUOTED_CHARACTERS],
            question=question,
            answer=self._keyed("answer", question, behind).hex(),
        )

    def _admit(self, cost: Fraction, what: str = "reply") -> None:
        budget, rule = self.policy.privacy, ("privacy budget", self.site)
        if budget is None:
            raise DescriptionError.of_rule(
                *rule,
                "has no privacy budget, and this reply needs one. The owner can set it with the lines  "
                f"{BUDGET_EXAMPLE}  in policy.toml",
            )
        stands = BudgetSpent.of(budget.epsilon, budget.delta, self.site_ledger.charges)
        if cost <= stands.left:
            return
        if budget.delta == 0.0:
            raise DescriptionError.of_rule(
                *rule,
                "has a delta of 0, which Gaussian noise cannot satisfy. The owner can allow it with  "
                "delta = 1e-06  in section [privacy] of policy.toml",
            )
        needed = epsilon_of_zcdp(self.site_ledger.charges.spent + cost, budget.delta)
        raise DescriptionError.of_rule(
            *rule,
            f"has rho {float(stands.left):.3g} left of {float(Fraction(stands.total)):.3g} (epsilon "
            f"{budget.epsilon:g} at delta {budget.delta:g}), and this {what} costs {float(cost):.3g}. Reduce "
            "the request, or repeat an earlier one: it is free as long as no site's table has changed. The "
            f"owner can allow it with  epsilon = {round_up(needed):g}  in section [privacy] of policy.toml",
        )

    def _question(self, request: Request, owed: NoiseRequired) -> str:
        # Another way to draw would give the same request other noise: it counts as another request.
        numbers: tuple[str, ...] = (str(Fraction(owed.squared)), str(owed.variance), VERSION)
        requested = request.family, request.step, owed.array, owed.requested
        if owed.shares is not None:
            numbers = *numbers, owed.shares.canonical()
        return self._keyed("question", *requested, *numbers, self._records()).hex()

    def _records(self) -> bytes:
        """Return the digest of all records, which shows whether they have changed."""
        table = self.table.table if isinstance(self.table, LabeledTable) else self.table
        # A streamed table may change between requests; a table in memory is read once.
        if not self._content or not isinstance(table, FrameTable):
            self._content = content_fingerprint(table, self._keyed("records"))
        return self._content

    def _keyed(self, *parts: str | bytes) -> bytes:
        return hmac.digest(self.keys().secret("noise"), encode_parts(*parts), "sha256")


def read_budget_spent(policy: Policy, site_ledger: SiteLedger) -> BudgetSpent | None:
    """Return the state of a site's privacy budget; None if it has none."""
    budget = policy.privacy
    return None if budget is None else BudgetSpent.of(budget.epsilon, budget.delta, site_ledger.charges)


def round_up(value: float) -> float:
    """Round a positive number up to three digits."""
    unit = 10.0 ** (np.floor(np.log10(value)) - 2)
    return float(f"{np.ceil(value / unit) * unit:.3g}")
