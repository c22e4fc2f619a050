"""Analysis plans, and the approval of a site's owner for each of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from fedstat.codec import Minimum, from_json, to_plain
from fedstat.errors import ConsentError, PartitionError
from fedstat.federation.audit.event_log import (
    NO_SUBJECT,
    PlanDecision,
    PlanProposal,
    SiteLedger,
    Subject,
    canonical_json,
)
from fedstat.federation.message import ArrayKind, Request, Step
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# The plan of an analysis, for the approval of one site's owner: what the analysis would request, and what
# leave.
#
# The plan comes from the coordinator, who describes the analysis and who could learn what. The site holds a
# session to its own declarations: columns, steps with their texts, the number of requests of each step, its
# arrays and their sizes. The site itself enters what the session has requested before. Nothing in a plan is
# drawn at random, so the same analysis has the same
# plan.

DESIGN_FAMILY = "design"
"""Family whose texts are the formula, and are therefore bound word for word."""
CHANGING_FIELDS = frozenset({"number", "slots", "kept", "posteriors", "past", "stratum_levels"})
"""Fields of a text that a plan does not know: the number of a product, the mixtures, digests, levels."""
BOUND_ARRAYS = "arrays"
"""Field of a bound text that has the values of arrays."""
TARGETS_FIELD = "targets"
"""Field of a text of a design that names transforms, with their present state."""
REQUEST_FIELD, CODING_FIELD, STATE_FIELD = "question", "spec", "state"
"""Fields of a text of a design: what is requested of rows, and the coding of columns with the states."""
EXPLICIT_TRANSFORMS = ("bs(", "cr(", "cc(")
"""Prefixes of transforms whose state is written in the formula and does not follow from sums."""
CENTERED_CONSTRAINT = "constraints="
"""A transform in which means of columns are sums, and knots are those of its text."""
PlanCount = Annotated[int, Minimum(0)]


@dataclass(frozen=True, slots=True)
class ReleasedArray:
    """One array that a step releases: at most `numbers` numbers each time; 0 if not known in advance.

    It is computed from `entities` entities, or from none if 0.
    """

    array: str
    kind: str
    what: str
    masked: bool
    numbers: PlanCount
    entities: PlanCount


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a plan, requested at most `most` times: masked or not, with its bound texts."""

    family: str
    step: str
    most: PlanCount
    masked: bool
    texts: tuple[str, ...]
    gives: tuple[ReleasedArray, ...]


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A request that the session had sent before the plan was proposed, with the digest of its arrays."""

    step: str
    text: str
    digest: str

    @classmethod
    def of(cls, request: Request) -> PreparedStep:
        """Note a request."""
        digest = hashlib.sha256()
        for name in sorted(request.arrays):
            digest.update(repr((name, request.arrays[name].shape)).encode() + request.arrays[name].tobytes())
        return cls(request.step, request.text, digest.hexdigest() if request.arrays else "")


@dataclass(frozen=True, slots=True)
class AnalysisPlan:
    """The requests of one analysis to one site.

    `call`, `formula`, `distribution` and `learned` are texts of the coordinator. `columns` are those of this
    site. `rounds` is the largest number of rounds at all sites, and `among` the number of sites in masked
    sums, 0 without any. The site itself enters `prepared`, the `person`, `study` and `purpose` that the
    coordinator has signed, and `keys`, a digest of the keys of this coordinator and of the sites with which
    sums are masked; empty if all sites are in one process.
    """

    site: str
    call: str
    formula: str
    distribution: str
    columns: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    rounds: PlanCount
    learned: tuple[str, ...]
    prepared: tuple[PreparedStep, ...] = ()
    among: PlanCount = 0
    person: str = ""
    study: str = ""
    purpose: str = ""
    keys: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the complete plan, on which its owner decides."""
        return hashlib.sha256(canonical_json(to_plain(self)).encode()).hexdigest()

    def find(self, request: Request) -> PlannedStep | None:
        """Return the step of a request; None if the plan does not have it."""
        address = (request.family, request.step)
        return next((step for step in self.steps if (step.family, step.step) == address), None)

    def numbers(self) -> dict[str, int]:
        """Return the most numbers that are released, by kind; arrays of unknown size do not count."""
        total: dict[str, int] = {}
        for step in self.steps:
            for array in step.gives:
                kind = f"{array.kind}, masked" if array.masked else array.kind
                total[kind] = total.get(kind, 0) + step.most * array.numbers
        return total


def read_plan(text: str | bytes, where: str) -> AnalysisPlan:
    """Read a plan from an untrusted source; a MessageError if it is not valid."""
    return from_json(AnalysisPlan, text, where)


def bound_content(request: Request, step: Step) -> str:
    """Return what an owner approves of a request: the bound part of its text, and the bound arrays."""
    arrays = {
        name: request.arrays[name].tolist()
        for name, declared in step.takes.items()
        if declared.bound and name in request.arrays
    }
    text = bound_text(request)
    return canonical_json({BOUND_ARRAYS: arrays, "text": text}) if arrays else text


def bound_arrays(content: str) -> Mapping[str, Any]:
    """Return the bound arrays in the result of :func:`bound_content`, by name."""
    if not content.startswith(f'{{"{BOUND_ARRAYS}":'):
        return {}
    arrays: Mapping[str, Any] = json.loads(content)[BOUND_ARRAYS]
    return arrays


def bound_text(request: Request) -> str:
    """Return the part of a request's text that an owner approves: all of a design, otherwise its words.

    Estimates that come back in a text, such as a parameter of the distribution, are not known in advance.
    """
    try:
        content = json.loads(request.text)
    except (ValueError, RecursionError):
        return request.text
    if request.family == DESIGN_FAMILY:
        return _bound_design(content) or request.text
    if not isinstance(content, dict | list):
        return ""
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in CHANGING_FIELDS}
    return canonical_json(_without_numbers(content))


def _bound_design(content: Any) -> str:
    """Return the bound part of a design's text that depends on sums for transforms; empty if none does.

    A request that is repeated for every state of a transform is bound by what it is about. In the coding of
    rows, states that follow from sums are not known before.
    """
    if not isinstance(content, dict) or REQUEST_FIELD not in content:
        return ""
    if TARGETS_FIELD in content:
        return str(content[REQUEST_FIELD])
    try:
        coding = json.loads(content[CODING_FIELD])
        states = {
            text: state
            if text.startswith(EXPLICIT_TRANSFORMS) and CENTERED_CONSTRAINT not in text
            else _without_numbers(state)
            for text, state in coding[STATE_FIELD].items()
        }
        return canonical_json({**content, CODING_FIELD: canonical_json({**coding, STATE_FIELD: states})})
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return ""


def _without_numbers(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _without_numbers(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_without_numbers(value) for value in content]
    return 0 if isinstance(content, int | float) and not isinstance(content, bool) else content


def undeclared_part(plan: AnalysisPlan, families: Mapping[str, Mapping[str, Step]]) -> str:
    """Name a step or an array of a plan that is not declared in this way here; empty if all are."""
    for planned in plan.steps:
        step = families.get(planned.family, {}).get(planned.step)
        if step is None:
            return f"step '{planned.step}' of family '{planned.family}'"
        for array in planned.gives:
            declared = step.given.get(array.array)
            if declared is None or (declared.kind, declared.what) != (array.kind, array.what):
                return f"array '{array.array}' of step '{planned.step}'"
    return ""


# ----------------------------------------------------------------------------------------------------
# Approval of each analysis by the owner of a site: waiting plans, decisions, and the limits of a session.
#
# A decision is about the digest of a plan, and an approval is valid for one run: numbers at points of the
# analyst's choice add up, run by run. Requests that must come before a plan (kinds, levels, counts, which
# entities exist) are answered as far as the other rules allow, and the plan lists them.

APPROVAL_FAMILY = "approval"
"""Family that proposes plans."""
PREPARING_KINDS: tuple[ArrayKind, ...] = ("control", "schema", "presence")
"""Kinds of values that are released before there can be a plan."""
MAX_PENDING_PLANS, MAX_PREPARED_STEPS = 100, 1000
ApprovalStatus: TypeAlias = Literal["approved", "pending", "denied"]


class PlanStore(Protocol):
    """Where plans wait when the process ends, and where their owner decides."""

    def keep(self, digest: str, plan: AnalysisPlan) -> None:
        """Keep a waiting plan."""
        ...

    def waiting(self) -> Mapping[str, AnalysisPlan]:
        """Return the waiting plans."""
        ...

    def decided(self) -> Iterable[PlanDecision]:
        """Decisions that the owner has made since."""
        ...

    def settle(self, decision: PlanDecision) -> None:
        """Remove a plan whose decision is in the ledger."""
        ...


@dataclass(slots=True)
class Approvals:
    """Plans that were proposed to a site, and the decisions of its owner."""

    site: str
    site_ledger: SiteLedger
    store: PlanStore | None = None
    _waiting: dict[str, AnalysisPlan] = field(default_factory=dict)

    @property
    def pending(self) -> Mapping[str, AnalysisPlan]:
        """Plans that wait for the owner, by digest."""
        return self._waiting if self.store is None else self.store.waiting()

    def decide(self, digest: str, verdict: Literal["approved", "denied"], who: str) -> None:
        """Decide about a plan, possibly for the second time, by its digest or the first digits of it."""
        complete = complete_digest(self.site, digest, self.pending.keys() | self.site_ledger.decisions.keys())
        self._settle(PlanDecision(complete, verdict, who, time.time_ns()))

    def status(self, digest: str) -> ApprovalStatus:
        """Return the status of a plan; an approval that was used does not count."""
        self.take_up()
        decision = self.site_ledger.decisions.get(digest)
        if decision is None or decision.name in self.site_ledger.one_time_events:
            return "pending"
        return decision.verdict

    def propose(self, plan: AnalysisPlan, subject: Subject = NO_SUBJECT) -> tuple[str, ApprovalStatus]:
        """Accept a plan: return its digest and its status; `subject` says who proposes it."""
        digest = plan.digest
        status = self.status(digest)
        if status == "pending" and digest not in self.pending:
            if len(self.pending) >= MAX_PENDING_PLANS:
                raise ConsentError.of_rule(
                    "approval",
                    self.site,
                    f"keeps at most {MAX_PENDING_PLANS} waiting plans. The owner has to decide about these "
                    "first: 'fedstat site pending FOLDER'",
                )
            self.site_ledger.propose(PlanProposal(digest, subject.client, subject.written, time.time_ns()))
            if self.store is None:
                self._waiting[digest] = plan
            else:
                self.store.keep(digest, plan)
        return digest, status

    def begin(self, digest: str) -> None:
        """Use up the approval of a plan.

        Raises
        ------
        ConsentError
            There is none.
        """
        status = self.status(digest)
        if status != "approved":
            raise ConsentError.of_rule(
                "approval", self.site, f"{STATUS_MESSAGES[status].format(digest=digest)}"
            )
        # Before any release: an attempt that fails later has released something, and needs another approval.
        self.site_ledger.spend(self.site_ledger.decisions[digest].name)

    def take_up(self) -> None:
        """Enter into the ledger what the owner has decided elsewhere."""
        for decision in () if self.store is None else self.store.decided():
            self._settle(decision)

    def _settle(self, decision: PlanDecision) -> None:
        known = self.site_ledger.decisions.get(decision.plan)
        # A decision that somebody restores to use it again is older than the latest one, or the same.
        if known is None or known.when < decision.when:
            self.site_ledger.decide(decision)
        self._waiting.pop(decision.plan, None)
        if self.store is not None:
            self.store.settle(decision)


STATUS_MESSAGES: Mapping[str, str] = {
    "pending": "requires the owner's approval of every analysis, and this one is pending. Ask the owner to "
    "run "
    "'fedstat site approve FOLDER {digest:.12}' (in one process: site.approve(digest)) for the plan with "
    "digest "
    "{digest}; then run the same analysis again",
    "denied": "requires the owner's approval of every analysis, and the owner has denied this one (digest "
    "{digest}). Reduce the request, or leave the site out",
}
"""Text for a plan without approval."""


def complete_digest(site: str, given: str, plans: Iterable[str]) -> str:
    """Complete the first digits of a digest; a PartitionError if no plan or several plans have them."""
    found = [digest for digest in plans if given and digest.startswith(given.lower())]
    if len(found) != 1:
        many = f"{len(found)} plans have digests that begin" if found else "no plan has a digest that begins"
        raise PartitionError(f"{site}: {many} with '{given}'; 'fedstat site pending FOLDER' lists all")
    return found[0]


@dataclass(slots=True)
class FollowedPlan:
    """The requests of a session before its plan, the plan, and the steps done so far."""

    prepared: list[PreparedStep] = field(default_factory=list)
    plan: AnalysisPlan | None = None
    digest: str = ""
    begun: bool = False
    requested: Counter[tuple[str, str]] = field(default_factory=Counter)

    def follow(self, plan: AnalysisPlan, digest: str) -> None:
        """Follow another plan from now on."""
        self.plan, self.digest, self.begun = plan, digest, False
        self.requested.clear()

    def admit(self, approvals: Approvals, request: Request, step: Step) -> None:
        """Compare a request with the approved plan, before anything is computed.

        Raises
        ------
        ConsentError
            The request is not in the plan, or there is no plan, or no approval.
        """
        if self.plan is None:
            if _is_preparing(request, step) and len(self.prepared) < MAX_PREPARED_STEPS:
                return
            raise self._refusal(
                approvals,
                f"requires the owner's approval of every analysis, and no plan has step '{request.step}'. "
                "The methods fit(), search(), evaluate(), score_test() and predict() propose plans; other "
                "requests are refused",
            )
        planned, address = self.plan.find(request), (request.family, request.step)
        if planned is None:
            raise self._departs(approvals, f"step '{request.step}' is not in")
        if self.requested[address] >= planned.most:
            raise self._departs(
                approvals, f"step '{request.step}' more than {planned.most:,} times is not in"
            )
        if planned.masked and request.masked is None:
            raise self._departs(approvals, f"step '{request.step}' without masks is not in")
        if bound_content(request, step) not in planned.texts:
            raise self._departs(approvals, f"step '{request.step}' differs from")
        if not self.begun:
            approvals.begin(self.digest)
            self.begun = True
        self.requested[address] += 1

    def hold(
        self,
        approvals: Approvals,
        request: Request,
        arrays: Mapping[str, Array],
        columns: Iterable[str],
        n_sites: int = 0,
    ) -> None:
        """Compare a reply with the plan before it leaves, and note a request that came before the plan.

        Raises
        ------
        ConsentError
            The reply uses other columns, has more numbers, or is masked among fewer sites, than the owner
            has approved.
        """
        if self.plan is None:
            requested = PreparedStep.of(request)
            self.prepared += [] if requested in self.prepared else [requested]
            return
        further = sorted(set(columns) - set(self.plan.columns))
        if further:
            raise self._departs(approvals, f"a reply from columns {', '.join(further)} is not in")
        planned = self.plan.find(request)
        assert planned is not None
        if request.masked is not None and n_sites < self.plan.among:
            raise self._departs(approvals, f"a sum over {n_sites} sites is not in")
        for name, array in arrays.items():
            if not _matches_plan(planned, name, array):
                raise self._departs(
                    approvals, f"array '{name}' of step '{request.step}' of this size is not in"
                )

    def _departs(self, approvals: Approvals, what: str) -> ConsentError:
        return self._refusal(
            approvals,
            f"answers only what the owner has approved: {what} the plan with digest {self.digest:.12}",
        )

    def _refusal(self, approvals: Approvals, why: str) -> ConsentError:
        return ConsentError.of_rule("approval", approvals.site, f"{why}")


def _is_preparing(request: Request, step: Step) -> bool:
    """Return whether a request agrees on a design and releases neither a sum nor a value."""
    agrees = request.family == DESIGN_FAMILY or step.prepares
    return agrees and all(declared.kind in PREPARING_KINDS for declared in step.given.values())


def _matches_plan(planned: PlannedStep, name: str, array: Array) -> bool:
    return any(one.array == name and (not one.numbers or array.size <= one.numbers) for one in planned.gives)
