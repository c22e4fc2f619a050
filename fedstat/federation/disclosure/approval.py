"""Who may request what: studies and their roles, analysis plans, and the owner's approval of each plan.

A study names the coordinators that speak for it, and a role limits what they may request. A plan lists the
steps of an analysis and the arrays that each one releases. If the policy requires approval, a site answers
only the requests of a plan that its owner has approved. The last part puts plans into words for the owner.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from fedstat.codec import Minimum, from_json, to_plain
from fedstat.errors import ConsentError, PartitionError, Remedy
from fedstat.federation.audit.event_log import (
    NO_SUBJECT,
    PlanDecision,
    PlanProposal,
    SiteLedger,
    Subject,
    canonical_json,
)
from fedstat.federation.crypto.keys import normalize_fingerprint
from fedstat.federation.disclosure.level_products import SEALING
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.rules import ANALYST, rules_of, toml_line
from fedstat.federation.message import ArrayKind, Purpose, Request, Step
from fedstat.spline_names import without_options
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Studies and roles: which coordinator speaks for a study, and who may request what in it.
#
# Several studies at one site: each has a coordinator, whose key signs its requests. All of them are answered
# by one site, with one release history and one privacy budget.
#
# A study is bound to a key, so no other coordinator can use its name. A person is a statement of the
# coordinator: the site compares it with its roles, but only the coordinator can know who sits at its
# keyboard.

AGREEING_FAMILIES = frozenset({"design", "secure", "align", "approval", "schema", "receipt"})
"""Families that agree on columns, keys and plans. Every analysis needs them, so roles do not list them."""


@dataclass(frozen=True, slots=True)
class Study:
    """A study at a site: the fingerprint of its coordinator's key, and its folder for requests and replies.

    Empty texts mean those of the site. `roster` has the digests of its accepted rosters, by number.
    """

    coordinator: str = ""
    exchange: str = ""
    roster: Mapping[str, str] = field(default_factory=dict)


def same_person(name: str) -> str:
    """Return the form in which names of persons are compared: without case, and with single blanks."""
    return " ".join(name.split()).casefold()


@dataclass(frozen=True, slots=True)
class Role:
    """What some people may request; an empty entry allows everything that the policy allows.

    Parameters
    ----------
    people, studies : tuple of str
        Persons and studies, as the coordinator states them.
    families : tuple of str
        Families of models, as in ``families`` of the policy.
    columns : tuple of str
        Columns of the site that a formula may use.
    """

    people: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def admits(self, purpose: Purpose, family: str) -> bool:
        """Return whether this person may send requests of this family in this study."""
        return (
            (not self.people or same_person(purpose.person) in map(same_person, self.people))
            and (not self.studies or purpose.study in self.studies)
            and (not self.families or family in (*self.families, *AGREEING_FAMILIES))
        )


@dataclass(frozen=True, slots=True)
class AdmittedRoles:
    """The roles under which a request may be answered, by name; without any role all columns are admitted."""

    site: str
    roles: Mapping[str, Role]
    is_limited: bool = False
    label: str = ""
    """Column that refers to the site itself, which is not one of its data."""

    def name(self, columns: Collection[str]) -> str:
        """Return the first role that has all of these columns; empty without roles."""
        columns = set(columns) - {self.label}
        held = {name: role.columns for name, role in self.roles.items()}
        return next((name for name, own in held.items() if not own or columns <= set(own)), "")

    def check_columns(self, columns: Collection[str]) -> None:
        """Require a role that has all of these columns, with a ConsentError."""
        columns = set(columns) - {self.label}
        if self.is_limited and not self.name(columns):
            held = {name for role in self.roles.values() for name in role.columns}
            outside = sorted(columns - held) or sorted(columns)
            raise _not_admitted(
                "roles",
                self.site,
                f"does not let this person use {', '.join(outside)} in this study. Leave the column out, or "
                "ask the owner to add it to a role in site.toml",
            )


def _not_admitted(rule: str, site: str, why: str) -> ConsentError:
    """Return the error of a site whose ``site.toml`` does not admit a request."""
    return ConsentError(f"{site}: its site.toml ({rule}) {why}", rule=rule, site=site)


def admit(
    site: str,
    studies: Mapping[str, str],
    roles: Mapping[str, Role],
    client: str,
    purpose: Purpose,
    family: str,
) -> AdmittedRoles:
    """Return the roles under which a request may be answered.

    `studies` has the fingerprint of each study's coordinator. A coordinator with studies must name one of its
    own, and no other coordinator can name it; otherwise, or if no role admits the request, a ConsentError.
    """
    key = normalize_fingerprint(client)
    own = [name for name, one in studies.items() if normalize_fingerprint(one) == key]
    if (own or purpose.study in studies) and purpose.study not in own:
        raise _not_admitted(
            "studies",
            site,
            f"has no study '{purpose.study}' of this coordinator. Connect with study= and the name that the "
            "owner has given to the study in site.toml",
        )
    found = {name: role for name, role in roles.items() if role.admits(purpose, family)}
    if roles and not found:
        who = f"'{purpose.person}'" if purpose.person else "a person without a name"
        raise _not_admitted(
            "roles",
            site,
            f"has no role that lets {who} send requests of family '{family}' in study '{purpose.study}'. "
            "Connect with person= and study=, or ask the owner for a role in site.toml",
        )
    return AdmittedRoles(site, found, bool(roles))


def role_problems(
    studies: Collection[str], roles: Mapping[str, Role], families: Collection[str]
) -> Iterator[str]:
    """Yield a line for each role that names a study or a family that the site does not have."""
    for name, role in roles.items():
        if studies and (unknown := sorted(set(role.studies) - set(studies))):
            yield f"[roles.{name}] names the studies {', '.join(unknown)}, which [studies] does not have"
        if unknown := sorted(set(role.families) - set(families)):
            yield f"[roles.{name}] names the families {', '.join(unknown)}, which are not installed"


def check_study_names(names: Collection[str]) -> None:
    """Require names that a coordinator can state, with a PartitionError."""
    for name in names:
        if not name or (problem := Purpose(study=name).problem()):
            raise PartitionError(f"[studies]: a name is not valid: {problem or 'it is empty'}")


# ----------------------------------------------------------------------------------------------------
# Analysis plans, for the approval of a site's owner: what an analysis would request, and what would leave.
#
# The plan comes from the coordinator, who describes the analysis and who could learn what. The site holds a
# session to its own declarations: columns, steps with their texts, the number of requests of each step, its
# arrays and their sizes. The site itself enters what the session has requested before. Nothing in a plan is
# drawn at random, so the same analysis has the same plan.

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
PLACED_FIELD = "placed"
"""Field of a request for rows: splines as the analyst wrote them, by their texts with knots from counts."""
MOST_NESTED = 3
"""JSON texts in JSON texts."""
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
        placed = _placed_splines(json.loads(request.text))
        text = _without_places(request.text, placed)
        content = json.loads(text)
    except (ValueError, RecursionError):
        return request.text
    if request.family == DESIGN_FAMILY:
        return _bound_design(content, set(placed.values())) or text
    if not isinstance(content, dict | list):
        return ""
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in CHANGING_FIELDS}
    return canonical_json(_without_numbers(content))


def _placed_splines(content: Any) -> dict[str, str]:
    """Find the splines whose knots followed from counts, in a text and the texts in it: asked, by placed."""
    found: dict[str, str] = {}
    if isinstance(content, str) and f'"{PLACED_FIELD}"' in content:
        content = json.loads(content)
    if isinstance(content, list):
        for value in content:
            found |= _placed_splines(value)
    if isinstance(content, dict):
        named = content.get(PLACED_FIELD)
        for new, old in named.items() if isinstance(named, dict) else ():
            # Other texts would be requests that the owner has not approved.
            is_spline = isinstance(old, str) and new.startswith(EXPLICIT_TRANSFORMS)
            if is_spline and without_options(new) == without_options(old):
                found[new] = old
        for value in content.values():
            found |= _placed_splines(value)
    return found


def _without_places(text: str, placed: Mapping[str, str]) -> str:
    """Write splines as the analyst did, in a JSON text and in the JSON texts in it."""
    for new, old in placed.items():
        for _ in range(MOST_NESTED):
            new, old = json.dumps(new)[1:-1], json.dumps(old)[1:-1]
            text = text.replace(new, old)
    return text


def _bound_design(content: Any, placed: Set[str]) -> str:
    """Return the bound part of a design's text that depends on sums for transforms; empty if none does.

    A request that is repeated for every state of a transform is bound by what it is about. In the coding of
    rows, states that follow from sums are not known before, nor are the knots of `placed` splines.
    """
    if not isinstance(content, dict) or REQUEST_FIELD not in content:
        return ""
    if TARGETS_FIELD in content:
        return str(content[REQUEST_FIELD])
    try:
        coding = json.loads(content[CODING_FIELD])
        states = {
            text: state
            if text.startswith(EXPLICIT_TRANSFORMS) and not (CENTERED_CONSTRAINT in text or text in placed)
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
NANOSECONDS_PER_DAY = 86_400 * 10**9
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
    """Plans that were proposed to a site, and the decisions of its owner.

    An approval that is older than `valid_days` has to be given again.
    """

    site: str
    site_ledger: SiteLedger
    store: PlanStore | None = None
    valid_days: float = math.inf
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
        """Return the status of a plan; an approval that was used, or has expired, does not count."""
        self.take_up()
        decision = self.site_ledger.decisions.get(digest)
        if decision is None or self.site_ledger.is_used(decision):
            return "pending"
        age = (time.time_ns() - decision.when) / NANOSECONDS_PER_DAY
        return "pending" if decision.verdict == "approved" and age > self.valid_days else decision.verdict

    def propose(self, plan: AnalysisPlan, subject: Subject = NO_SUBJECT) -> tuple[str, ApprovalStatus]:
        """Accept a plan: return its digest and its status; `subject` says who proposes it."""
        digest = plan.digest
        status = self.status(digest)
        if status == "pending" and digest not in self.pending:
            if len(self.pending) >= MAX_PENDING_PLANS:
                raise ConsentError.of_rule(
                    "approval",
                    self.site,
                    f"keeps at most {MAX_PENDING_PLANS} waiting plans",
                    remedy=Remedy(
                        "fedstat site pending FOLDER", "The owner has to decide about these first: '{call}'"
                    ),
                )
            self.site_ledger.propose(PlanProposal(digest, subject.client, subject.written, time.time_ns()))
            if self.store is None:
                self._waiting[digest] = plan
            else:
                self.store.keep(digest, plan)
        return digest, status

    def begin(self, digest: str) -> None:
        """Use up the approval of a plan; a ConsentError if there is none."""
        status = self.status(digest)
        if status != "approved":
            why, remedy = why_not_approved(status, digest)
            raise ConsentError.of_rule("approval", self.site, why, remedy=remedy)
        # Before any release: an attempt that fails later has released something, and needs another approval.
        self.site_ledger.remember(self.site_ledger.decisions[digest].use)

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


def why_not_approved(status: str, digest: str) -> tuple[str, Remedy | None]:
    """Return why a plan has no approval, and what helps."""
    if status == "denied":
        return (
            "requires the owner's approval of every analysis, and the owner has denied this one (digest "
            f"{digest}). Reduce the request, or leave the site out"
        ), None
    return "requires the owner's approval of every analysis, and this one is pending", Remedy(
        "fedstat site approve FOLDER {digest:.12}",
        "Ask the owner to run '{call}' (in one process: site.approve(digest)) for the plan with digest "
        "{digest}; then run the same analysis again",
    ).filled(digest=digest)


def complete_digest(site: str, given: str, plans: Iterable[str]) -> str:
    """Complete the first digits of a digest; a PartitionError if no plan or several plans have them."""
    found = [digest for digest in plans if given and digest.startswith(given.lower())]
    if len(found) != 1:
        many = f"{len(found)} plans have digests that begin" if found else "no plan has a digest that begins"
        raise PartitionError(
            f"{site}: {many} with '{given}'",
            remedy=Remedy("fedstat site pending FOLDER", "; '{call}' lists all"),
        )
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

        A ConsentError if the request is not in the plan, or there is no plan, or no approval.
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

        A ConsentError if the reply uses other columns, has more numbers, or is masked among fewer sites, than
        the owner has approved.
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
            sizes = [one.numbers for one in planned.gives if one.array == name]
            if not any(not most or array.size <= most for most in sizes):
                raise self._departs(
                    approvals, f"array '{name}' of step '{request.step}' of this size is not in"
                )

    def _departs(self, approvals: Approvals, what: str) -> ConsentError:
        why = f"answers only what the owner has approved: {what} the plan with digest {self.digest:.12}"
        return self._refusal(approvals, why)

    def _refusal(self, approvals: Approvals, why: str) -> ConsentError:
        return ConsentError.of_rule("approval", approvals.site, why)


def _is_preparing(request: Request, step: Step) -> bool:
    """Return whether a request agrees on a design and releases neither a sum nor a value."""
    agrees = request.family == DESIGN_FAMILY or step.prepares
    return agrees and all(declared.kind in PREPARING_KINDS for declared in step.given.values())


# ----------------------------------------------------------------------------------------------------
# Plans and requests in words for the owner of a site.
#
# What an analysis reveals, in three lines, from the kinds of the arrays that its steps declare to release.
# The site compares every reply with the same declarations, so the lines hold for any family.

OWN_KINDS = ("aggregate", "noisy aggregate", "sketch")
"""Kinds of numbers over many records."""
ROW_KINDS = ("per entity", "raw columns")
"""Kinds of numbers with at least one for each record."""
PlannedArray = tuple[PlannedStep, ReleasedArray]


def plain_lines(plan: AnalysisPlan, policy: Policy) -> tuple[str, str, str]:
    """State what a plan reveals: about the site alone, only together with other sites, and about single rows.

    The numbers of the plan pass the checks of the site's `policy`, and sums reveal records without some of
    its rules.
    """
    arrays = [(step, array) for step in plan.steps for array in step.gives]
    lines = (
        f"About {plan.site} alone, the coordinator learns {_own(arrays, policy.min_count)}.",
        _together(plan, arrays),
        _rows(plan.site, arrays, policy),
    )
    own, together, rows = (_printable(line) for line in lines)
    return own, together, rows


def _own(arrays: Sequence[PlannedArray], least: int) -> str:
    own = [one for one in arrays if one[1].kind in OWN_KINDS and not one[1].masked]
    others = [one for one in arrays if one[1].kind in ("schema", "control") and not one[1].masked]
    parts = []
    for noise, found in (
        ("", [one for one in own if one[1].kind != "noisy aggregate"]),
        (" with random noise", [one for one in own if one[1].kind == "noisy aggregate"]),
    ):
        if any(array.array != "text" for _, array in found):
            behind = f", each over at least {least} records" if least > 1 else ""
            parts.append(f"{_amount(found, 'total')}{noise} (sums, means, counts){behind}")
        texts = [array.what for _, array in found if array.array == "text"]
        parts += [f"a text ({'; '.join(dict.fromkeys(texts))})"] if texts else []
    if others:
        only = "" if own else "no total, only "
        parts.append(f"{only}short technical answers (names, numbers of records, yes or no)")
    elif not own:
        parts.append("no total")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _together(plan: AnalysisPlan, arrays: Sequence[PlannedArray]) -> str:
    masked = [one for one in arrays if one[1].masked and one[1].kind not in ROW_KINDS]
    shares = [one for one in arrays if one[1].kind == "masked share"]
    lines = []
    if masked:
        over = f"{plan.among} sites" if plan.among else "several sites"
        if plan.among == 2:
            hidden = f"The other site can compute the part of {plan.site}."
        else:
            hidden = f"The part of {plan.site} stays hidden, unless all other sites help the coordinator."
        lines.append(f"Only as a sum over {over}, it learns {_amount(masked, 'number')}. {hidden}")
    if shares:
        lines.append(
            f"Only together with another site, it learns {_amount(shares, 'sum')} of products of columns of "
            "both. Each site sends random numbers for this, whose sum is the result."
        )
    if any(step.step == SEALING and array.kind == "sealed" for step, array in arrays):
        lines.append(
            "The other sites learn, and the coordinator does not, which levels of two columns occur together "
            f"at {plan.site}."
        )
    return " ".join(lines) or "Nothing is released as a sum over several sites."


RULES_OF_KINDS = ("refused_kinds", "per_entity")
"""Rules about kinds of values, which a plan lists."""


def _unchecked(policy: Policy) -> list[str]:
    """List the lines of a policy by which sums that an analyst receives may reveal records."""
    if policy.privacy is not None:
        return []
    rules = rules_of(type(policy))
    loose = [name for name in policy.looser_than_strict() if ANALYST in rules[name].without]
    return [toml_line(name, getattr(policy, name)) for name in loose if name not in RULES_OF_KINDS]


def _rows(site: str, arrays: Sequence[PlannedArray], policy: Policy) -> str:
    single = [one for one in arrays if one[1].kind in ROW_KINDS]
    present = [array.what for _, array in arrays if array.kind == "presence"]
    known = f" It is revealed {_list_arrays(present)}." if present else ""
    if not single and (lines := _unchecked(policy)):
        return (
            f"No list of values by record leaves {site}. But sums can reveal records, since its policy has "
            f"the line{'s' * (len(lines) > 1)}  {'  and  '.join(lines)}.{known}"
        )
    if not single:
        return f"No row leaves {site}: no value of a single record is released.{known}"
    what = _list_arrays([array.what for _, array in single])
    hidden = " (as sums over sites)" if all(array.masked for _, array in single) else ""
    return (
        f"Attention: numbers for single records leave {site}{hidden}: {what}, {_amount(single, 'number')}. "
        f"Several of them for one record can reveal its values.{known}"
    )


def _amount(arrays: Iterable[PlannedArray], noun: str) -> str:
    found = [one for one in arrays if one[1].array != "text"]
    total = sum(step.most * array.numbers for step, array in found)
    if any(not array.numbers for _, array in found):
        return f"{noun}s whose number is not known in advance"
    return f"at most {total:,} {noun}{'' if total == 1 else 's'}"


def _list_arrays(whats: Sequence[str]) -> str:
    names = list(dict.fromkeys(whats))
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _printable(line: str) -> str:
    # Names come from elsewhere: control characters could overwrite other text on a terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in line)


# ----------------------------------------------------------------------------------------------------
# The formula of a request, which the site reads itself.

MAX_FORMULA_LENGTH = 300


def formula_of(request: Request) -> str:
    """Return the formula that a request is about, from the columns and terms that it names; empty if none."""
    content = _design_content(request.text) if request.family == DESIGN_FAMILY else {}
    response, terms = content.get("response"), content.get("terms")
    terms = [one for one in terms if isinstance(one, str)] if isinstance(terms, list) else []
    left = response if isinstance(response, str) else ""
    if not left and not terms:
        return ""
    text = f"{left} ~ {' + '.join(terms) or '1'}" if left else " + ".join(terms)
    return _printable(text if len(text) <= MAX_FORMULA_LENGTH else f"{text[: MAX_FORMULA_LENGTH - 4]} ...")


def _design_content(text: str) -> dict[str, Any]:
    """Read what a text of a design requests; empty if it requests nothing."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and isinstance(content.get("question"), str):
            content = json.loads(content["question"])
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# ----------------------------------------------------------------------------------------------------
# A complete plan, line by line.

DESIGN_FIELDS: Mapping[str, str] = {
    "response": "response",
    "terms": "terms",
    "offsets": "offset",
    "weights": "weights",
    "labels": "groups",
    "columns": "columns",
}
"""What the texts of a design request, by field, in words for the owner."""
MAX_NAMES_SHOWN = 12


def describe_plan(plan: AnalysisPlan) -> Iterator[str]:
    """Describe the requests of a plan in plain words, line by line, for the site's owner."""
    yield from (_printable(line) for line in dict.fromkeys(_step_lines(plan)))


def _step_lines(plan: AnalysisPlan) -> Iterator[str]:
    yield f"Analysis, as the coordinator describes it: {plan.call}, of {plan.formula}, {plan.distribution}"
    yield f"Columns of {plan.site} that it uses: {', '.join(plan.columns) or 'none'}"
    texts = [one.text for one in plan.prepared]
    texts += [text for step in plan.steps if step.family == DESIGN_FAMILY for text in step.texts]
    for text in dict.fromkeys(texts):
        yield from _read_design_text(text)
    request = Counter(one.step for one in plan.prepared)
    reported = ", ".join(f"{step} ({times} times)" if times > 1 else step for step, times in request.items())
    yield f"Released before it (names, kinds, levels, counts, which entities exist): {reported or 'nothing'}"
    yield f"Rounds: at most {plan.rounds:,}"
    yield "Steps in order, and what each releases:"
    for step in plan.steps:
        gives = "; ".join(map(_array_text, step.gives)) or "nothing"
        often = "once" if step.most == 1 else f"at most {step.most:,} times"
        yield f"  {step.step} ({step.family}), {often}: {gives}"
        for text in step.texts:
            if values := bound_arrays(text):
                yield f"    with {', '.join(f'{name} = {value}' for name, value in values.items())}"
    sums = ", ".join(f"{n:,} ({kind})" for kind, n in plan.numbers().items() if n)
    yield f"Numbers released in total, at most: {sums or 'none'}"
    yield "Who could learn what, as the coordinator describes it:"
    yield from (f"  {sentence}" for sentence in plan.learned or ("No party learns anything.",))


def _array_text(array: ReleasedArray) -> str:
    masked = ", only in a masked sum" if array.masked else ""
    if array.numbers:
        size = "1 number" if array.numbers == 1 else f"{array.numbers:,} numbers"
    else:
        size = "a text" if array.array == "text" else "any size"
    behind = f" over {array.entities:,} records" if array.entities else ""
    return f"{array.what} ({array.kind}{masked}; {size}{behind})"


def _read_design_text(text: str) -> Iterator[str]:
    """Describe what a text of a design requests."""
    content = _design_content(text)
    parts = [
        f"{word} {_name_text(content[name])}" for name, word in DESIGN_FIELDS.items() if content.get(name)
    ]
    if content.get("terms") or content.get("response"):  # the plan lists the columns above
        parts = [part for part in parts if not part.startswith("columns ")]
    if parts:
        yield f"It requests: {'; '.join(parts)}"


def _name_text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{role} {name}" for role, name in value.items()]
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    more = f" and {len(value) - MAX_NAMES_SHOWN} more" if len(value) > MAX_NAMES_SHOWN else ""
    return ", ".join(map(str, value[:MAX_NAMES_SHOWN])) + more
