"""Plans that wait in a site's folder for its owner, and what the owner decides while the site is served.

::

    pending/DIGEST.json        a plan that was proposed (all of these with mode 0600, the folders 0700)
    pending/DIGEST.decision    what the owner decided, signed with the site's keys
    decided/DIGEST.json        a plan of which the site's account has the decision

The process that serves the site holds its account. A decision is laid beside the plan, and entered into the
account when the site next looks: signed, since a file that somebody else put there decides nothing.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.account.decision import Decision
from fedstat.federation.crypto.keys import Identity, PublicIdentity, encode
from fedstat.federation.door.owner.approval import find_digest
from fedstat.federation.door.owner.plan import AnalysisPlan, read_plan
from fedstat.federation.files import read_private, write_whole
from fedstat.records import from_json, to_json

PENDING, DECIDED = "pending", "decided"
PLAN, DECISION = ".json", ".decision"
LONGEST = 16_000_000
FORM = "fedstat decision"


@dataclass(frozen=True, slots=True)
class SignedDecision:
    """A decision, with the signature of the site."""

    decision: Decision
    signature: str

    @classmethod
    def of(cls, decision: Decision, identity: Identity) -> SignedDecision:
        """Sign a decision."""
        return cls(decision, identity.signing.sign(_message(decision, identity.public)).hex())

    def is_of(self, keys: PublicIdentity) -> bool:
        """Whether the site with these keys signed it."""
        try:
            signature = bytes.fromhex(self.signature)
        except ValueError:
            return False
        return keys.has_signed(_message(self.decision, keys), signature)


def _message(decision: Decision, keys: PublicIdentity) -> bytes:
    return encode(FORM, keys.digest, decision.plan, decision.verdict, decision.who, str(decision.when))


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """The plans in the folder of a site.

    What is there and is no plan or no decision of this site is passed over: it must not stop the others.
    """

    site: str
    folder: Path
    keys: PublicIdentity
    _read: dict[str, AnalysisPlan] = field(default_factory=dict)

    def keep(self, digest: str, plan: AnalysisPlan) -> None:
        """Keep a plan that waits."""
        self._write(PENDING, f"{digest}{PLAN}", to_json(plan))

    def waiting(self) -> Mapping[str, AnalysisPlan]:
        """Plans that wait, by digest, the oldest first."""
        paths = self._plans(PENDING)
        found = {path.stem: self._plan(path) for path in paths if not path.with_suffix(DECISION).exists()}
        return {digest: plan for digest, plan in found.items() if plan is not None}

    def find(self, digest: str) -> AnalysisPlan:
        """Return the plan whose digest begins so, whether it waits or was decided about."""
        known = {path.stem: path for place in (DECIDED, PENDING) for path in self._plans(place)}
        whole = find_digest(self.site, digest, known)
        plan = self._plan(known[whole])
        if plan is None:
            raise PartitionError(f"'{known[whole]}' is not the plan that was proposed; propose it again")
        return plan

    def decide(self, identity: Identity, digest: str, verdict: Literal["approved", "denied"]) -> AnalysisPlan:
        """Decide, as whoever runs this process, about the plan whose digest begins so; also anew."""
        plan = self.find(digest)
        decision = Decision(plan.digest, verdict, _whoever(), time.time_ns())
        self._write(PENDING, f"{plan.digest}{DECISION}", to_json(SignedDecision.of(decision, identity)))
        return plan

    def decided(self) -> Iterator[Decision]:
        """Decisions that the account may not have yet, the oldest first."""
        found = [self._decision(path) for path in (self.folder / PENDING).glob(f"*{DECISION}")]
        yield from sorted((one for one in found if one is not None), key=lambda one: one.when)

    def settle(self, decision: Decision) -> None:
        """Put a plan aside of which the account has the decision."""
        path = self.folder / PENDING / f"{decision.plan}{PLAN}"
        (self.folder / DECIDED).mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            path.replace(self.folder / DECIDED / path.name)
        path.with_suffix(DECISION).unlink(missing_ok=True)

    def _write(self, place: str, name: str, content: str) -> None:
        (self.folder / place).mkdir(mode=0o700, exist_ok=True)
        write_whole(self.folder / place / name, content.encode())

    def _plans(self, place: str) -> list[Path]:
        return sorted((self.folder / place).glob(f"*{PLAN}"), key=_changed)

    def _plan(self, path: Path) -> AnalysisPlan | None:
        if path.stem not in self._read:
            try:
                plan = read_plan(read_private(path, LONGEST), f"'{path}'")
            except (FedstatError, OSError):
                return None
            if plan.digest != path.stem:
                return None
            self._read[path.stem] = plan
        return self._read[path.stem]

    def _decision(self, path: Path) -> Decision | None:
        try:
            signed = from_json(SignedDecision, read_private(path, LONGEST), f"'{path}'")
        except (FedstatError, OSError):
            return None
        return signed.decision if path.stem == signed.decision.plan and signed.is_of(self.keys) else None


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # a site that serves has put it aside meanwhile
        return 0


def _whoever() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an account without a name
        return "owner"
