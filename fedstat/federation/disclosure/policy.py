"""The policy of a site, which its owner sets, and the comparison of two policies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from fedstat.errors import PartitionError
from fedstat.federation.disclosure.policy_file import (
    POLICY_KEYS,
    check_budget,
    check_policy_values,
    parse_policy,
    read_policy,
    write_policy,
)
from fedstat.federation.message import ArrayKind
from fedstat.privacy.zcdp import rho_of_budget, round_to_grid

# ----------------------------------------------------------------------------------------------------
# Policy of a site: what its owner allows to leave it.
#
# The rules are enforced in :meth:`fedstat.federation.disclosure.site.Site.answer` and nowhere else. Those for
# what only a step can count stand in :mod:`fedstat.federation.disclosure.row_checks`: steps tell facts, the
# door judges them.

POLICY_WORDS = (
    "masked_only",
    "two_sites",
    "remember",
    "formulas",
    "evaluation",
    "discrete",
    "rounding",
    "reasons",
    "alignment",
    "dealer",
    "order",
)
"""Rules that are switches: one value of each is the strict one."""
STRICT_VALUES: Mapping[str, Any] = {
    "refused_kinds": frozenset({"raw columns", "sketch"}),
    "per_entity": 0,
    "masked_only": True,
    "two_sites": "refuse",
    "remember": "all",
    "formulas": "simple",
    "evaluation": "once",
    "discrete": "bits",
    "rounding": "dither",
    "reasons": "logged",
    "max_refusals": 10,
    "alignment": "ask",
    "dealer": "third party",
    "order": "declared",
    "max_share": 0.2,
}
"""Where the policy of a served site departs from that of one process."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A privacy budget: a bound on what all releases together may disclose of one record.

    It holds over all sessions, coordinators and restarts: the site keeps account of what was spent.

    Parameters
    ----------
    epsilon, delta : float
        Of differential privacy, for the replacement of one entity's record at this site.

    Examples
    --------
    >>> import fedstat as fs
    >>> budget = fs.Budget(epsilon=1.0, delta=1e-6)
    >>> budget.epsilon, budget.delta, round(float(budget.rho), 4)
    (1.0, 1e-06, 0.0244)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_budget("Budget", self.epsilon, self.delta)

    @property
    def rho(self) -> Fraction:
        """The same as zero-concentrated differential privacy, in which charges add up."""
        return round_to_grid(rho_of_budget(self.epsilon, self.delta))


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner of a site allows to leave it.

    Parameters
    ----------
    families : frozenset of str or None
        Families that may ask; None allows every installed one.
    refused_kinds : frozenset of Kind
        Kinds of values that may not leave, such as "raw columns"; those of a masked sum are not refused, but
        for values per entity, which masks do not hide over many rounds.
    per_entity : int or "any"
        Most numbers for each entity, such as linear predictors, that ever leave, of all sessions together,
        masked or not: about as many as the site has columns give its rows away. 0: none.
    masked_only : bool
        Whether arrays of which only the sum over sites is needed leave in no other way than masked.
    two_sites : {"warn", "refuse"}
        What to do with a masked sum over two sites, which hides neither from the other.
    quorum : int or float
        Fewest sites in a masked sum, or the smallest share of those that are pinned; 0: any.
    apart : int
        Fewest sites that masked sums, and differences of masked sums of all sessions, are over.
    min_count : int
        Smallest number of entities behind an aggregate or a sketch.
    min_events : int
        Fewest rows of either outcome of a binary response, unless there are none.
    min_level_count : int
        Fewest rows of a category level, unless there are none.
    max_parameters : float
        Most coefficients per row of a model over rows.
    max_columns : int or None
        Most design columns of this site in one model, without intercept and response.
    remember : {"all", "rows", "nothing"}
        Which earlier answers, of all sessions, are held against a new one, so that sums which together tell
        of a few rows do not both leave: those of models over rows, all, or none.
    formulas : {"any", "simple"}
        "simple" computes a factor only where it is one column or one function of one column, and defined on
        all that the site publishes of that column, and products of different columns; see
        :mod:`fedstat.federation.disclosure.request_checks`.
    evaluation : {"any", "once"}
        "once" answers the evaluation of one model, of whatever response, and that again; predictions from
        outside are averaged over `min_count` entities first.
    discrete : {"any", "bits"}
        "bits" releases sums of products by group only over so many entities that columns of few values are
        not determined by them; see :mod:`fedstat.federation.tables.cardinality`.
    rounding : {"none", "dither"}
        "dither" moves the columns of such sums by up to half a hundredth of their standard deviation.
    reasons : {"told", "logged"}
        Whether a refusal that depends on rows says why to whoever asked, or to the owner's log alone.
    max_refusals : int
        Refusals that depend on rows after which who asks gets no more answers; 0: any number.
    alignment : {"allow", "ask"}
        "ask" wants the owner's consent to every alignment of keys, by 'fedstat site consent'.
    max_keys : int or None
        Most keys that another site may enter into an alignment; None: twice as many as the site has itself
        where the owner is asked, and any number where not.
    approval : {"auto", "owner"}
        "owner" asks the owner to consent to the plan of every analysis, by 'fedstat site approve'; "auto"
        needs nobody where the other rules let it pass.
    dealer : {"third party", "any"}
        Who may deal the random numbers of a secure product of this site's columns: a third site, or the
        coordinator as well. It is never one of the two sites whose columns are multiplied.
    max_share : float
        Largest share of the weight of a sum at coefficients, or with weights, from outside that one row may
        have. Below 1, sums of products by group leave only where no row has more than three quarters of the
        squared deviations of a column, or of a combination of columns; see
        :mod:`fedstat.federation.disclosure.leverage`.
    order : {"declared", "any"}
        Whether steps of a family are answered in the order of its protocols alone.
    privacy : Budget or None
        With a budget, what depends on rows leaves only with noise, and is charged to the budget before it
        does; all else is refused. Public descriptions, numbers of rows, which entities have a record, and
        which of these lack a value in the columns of a synthesis, are told.

    Raises
    ------
    PartitionError
        A value has no meaning; names key, what was expected and what came.

    Examples
    --------
    >>> import fedstat as fs
    >>> policy = fs.Policy(min_count=20, masked_only=True)
    >>> policy.min_count, policy.is_strict, "min_count = 20" in policy.to_toml()
    (20, False, True)
    >>> len(policy.looser_than_strict()) < len(fs.Policy().looser_than_strict())
    True
    >>> fs.Policy.open().formulas, fs.Policy.strict(max_columns=20).is_strict
    ('any', True)
    """

    families: frozenset[str] | None = None
    refused_kinds: frozenset[ArrayKind] = frozenset()
    masked_only: bool = False
    two_sites: Literal["warn", "refuse"] = "warn"
    quorum: float = 0
    apart: int = 1
    min_count: int = 5
    min_events: int = 3
    min_level_count: int = 3
    max_parameters: float = 0.33
    max_columns: int | None = None
    remember: Literal["all", "rows", "nothing"] = "rows"
    formulas: Literal["any", "simple"] = "any"
    evaluation: Literal["any", "once"] = "any"
    discrete: Literal["any", "bits"] = "any"
    rounding: Literal["none", "dither"] = "none"
    reasons: Literal["told", "logged"] = "told"
    max_refusals: int = 0
    alignment: Literal["allow", "ask"] = "allow"
    max_keys: int | None = None
    approval: Literal["auto", "owner"] = "auto"
    dealer: Literal["third party", "any"] = "any"
    order: Literal["declared", "any"] = "any"
    max_share: float = 1.0
    per_entity: int | Literal["any"] = "any"
    privacy: Budget | None = None

    def __post_init__(self) -> None:
        check_policy_values("Policy", {field.name: getattr(self, field.name) for field in fields(self)})
        if self.privacy is not None and not isinstance(self.privacy, Budget):
            raise PartitionError(
                f"Policy: privacy: expected a Budget or None, received {type(self.privacy).__name__}"
            )

    def __repr__(self) -> str:
        # By what it departs from the nearer of the two: all rules together fill ten lines.
        bases = {"Policy": Policy(), "Policy.strict": Policy.strict()}
        given = {name: self._other_rules(base) for name, base in bases.items()}
        name = min(given, key=lambda one: len(given[one]))
        return f"{name}({', '.join(given[name])})"

    def _other_rules(self, base: Policy) -> list[str]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        other = {name: value for name, value in values.items() if value != getattr(base, name)}
        return [
            f"{name}=frozenset({{{', '.join(map(repr, sorted(value)))}}})"
            if isinstance(value, frozenset) and value
            else f"{name}={value!r}"
            for name, value in other.items()
        ]

    @classmethod
    def open(cls) -> Policy:
        """Return the policy of one process, where whoever asks can read the tables anyway.

        Minimum counts are as a served site's, so that numbers are those that served sites would give.
        """
        return cls()

    @classmethod
    def strict(cls, **rules: Any) -> Policy:
        """Return the policy with which a site that is served starts; its owner may loosen single rules.

        Values per entity, columns and sketches do not leave; sums leave masked, over three sites or more;
        formulas are simple; one model is evaluated; refusals that depend on rows do not say why, and ten
        of them are the end; keys are aligned once the owner has consented.

        Parameters
        ----------
        **rules
            Fields that the owner sets otherwise.
        """
        return replace(cls(**STRICT_VALUES), **rules)

    @property
    def is_strict(self) -> bool:
        """Whether no rule is looser than those of :meth:`strict`."""
        return not self.looser_than_strict()

    def looser_than_strict(self) -> tuple[str, ...]:
        """Names of the rules that allow more than :meth:`strict` does."""
        kinds = STRICT_VALUES["refused_kinds"] <= self.refused_kinds
        same = (
            name
            for name, value in STRICT_VALUES.items()
            if name in POLICY_WORDS and getattr(self, name) != value
        )
        least, held = Policy(), ("min_count", "min_events", "min_level_count")
        fewer = (name for name in held if getattr(self, name) < getattr(least, name))
        more = self.max_parameters > least.max_parameters
        heavy = self.max_share > STRICT_VALUES["max_share"]
        vectors = self.per_entity != 0 and "per entity" not in self.refused_kinds
        many = not 0 < self.max_refusals <= STRICT_VALUES["max_refusals"]
        return (
            *([] if kinds else ["refused_kinds"]),
            *(["per_entity"] if vectors else []),
            *same,
            *fewer,
            *(["max_parameters"] if more else []),
            *(["max_share"] if heavy else []),
            *(["max_refusals"] if many else []),
        )

    @classmethod
    def from_toml(cls, path: str | Path, start: Policy | None = None) -> Policy:
        """Read a policy from a TOML file.

        ``Policy().to_toml()`` is the text of a file that explains every rule.

        Parameters
        ----------
        path : path
            Keys are the fields of this class, and a section ``[privacy]`` with epsilon and delta.
        start : Policy, optional
            Which rules hold that are left out; by default :meth:`open`, for a served site :meth:`strict`.

        Raises
        ------
        PartitionError
            The file is absent or no TOML, a key is unknown, or its value has no meaning: names file, key,
            what was expected and what to do.

        Examples
        --------
        >>> import tempfile, pathlib
        >>> import fedstat as fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "policy.toml")
        ...     size = path.write_text(fs.Policy(min_count=12).to_toml())
        ...     policy = fs.Policy.from_toml(path)
        >>> policy.min_count, policy == fs.Policy(min_count=12)
        (12, True)
        """
        return cls._of_file(*read_policy(path), start or cls.open())

    @classmethod
    def from_text(cls, where: str, text: str) -> Policy:
        """Read a policy from the text of such a file.

        Parameters
        ----------
        where : str
            What it is, for errors.
        text : str

        Raises
        ------
        PartitionError
            As :meth:`from_toml`.

        Examples
        --------
        >>> import fedstat as fs
        >>> fs.Policy.from_text("my policy", "min_count = 12").min_count
        12
        """
        return cls._of_file(where, *parse_policy(where, text.encode()), cls.open())

    @classmethod
    def _of_file(
        cls, where: str, values: dict[str, Any], budget: dict[str, Any] | None, start: Policy
    ) -> Policy:
        check_policy_values(where, values)
        if budget is not None:
            check_budget(f"{where}, section [privacy]", budget["epsilon"], budget["delta"])
            values["privacy"] = Budget(float(budget["epsilon"]), float(budget["delta"]))
        return replace(start, **values)

    def to_toml(self) -> str:
        """Text of a file that :meth:`from_toml` reads, with a comment on every rule."""
        budget = None if self.privacy is None else (self.privacy.epsilon, self.privacy.delta)
        return write_policy({key.name: getattr(self, key.name) for key in POLICY_KEYS}, budget)


def site_policies(
    sites: Sequence[str],
    common: Policy | str | Path | None = None,
    own: Mapping[str, Policy | str | Path] | None = None,
) -> dict[str, Policy]:
    """Policy of every site: its own where there is one, else the common one.

    Parameters
    ----------
    sites : sequence of str
    common : Policy or path, optional
    own : mapping of str to Policy or path, optional

    Raises
    ------
    PartitionError
        A file has no meaning, or there is no such site.
    """
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        raise PartitionError(
            "policies: expected {client: policy or path of a policy file}; one policy for all is policy=..."
        )
    unknown = [site for site in own if site not in sites]
    if unknown:
        raise PartitionError(
            f"policies name institutions that are not in the partition: {', '.join(map(repr, unknown))}. Its "
            f"institutions are {', '.join(map(repr, sites))}."
        )
    rules = Policy() if common is None else _as_policy(common)
    return {site: _as_policy(own[site]) if site in own else rules for site in sites}


NAMED_POLICIES: Mapping[str, Callable[[], Policy]] = {"open": Policy.open, "strict": Policy.strict}
"""Policies that can be given by name, in the place of a file."""


def _as_policy(policy: object) -> Policy:
    if isinstance(policy, str) and policy in NAMED_POLICIES:
        return NAMED_POLICIES[policy]()
    if isinstance(policy, str | Path):
        return Policy.from_toml(policy)
    if not isinstance(policy, Policy):
        came = type(policy).__name__
        raise PartitionError(
            f"policy: expected a fedstat.Policy or the path of a policy file, received {came}"
        )
    return policy


# ----------------------------------------------------------------------------------------------------
# Which rules of a changed policy allow less than before.

REMEMBER_LEVELS = ("nothing", "rows", "all")


def _is_higher_limit(value: Any) -> Callable[[Any, Any], bool]:
    """Whether a new limit is higher than the old one, where this value stands for none."""
    return lambda old, new: new == value or (old != value and new > old)


def _differs_from(strict: Any) -> Callable[[Any, Any], bool]:
    return lambda _, new: new != strict


IS_LOOSER: Mapping[str, Callable[[Any, Any], bool]] = {
    **{name: _differs_from(STRICT_VALUES[name]) for name in POLICY_WORDS},
    **dict.fromkeys(("min_count", "min_events", "min_level_count", "apart"), operator.gt),
    "quorum": lambda old, new: new == 0 or (type(old) is type(new) and old > new),
    **dict.fromkeys(("max_parameters", "max_share"), operator.lt),
    "max_columns": _is_higher_limit(None),
    "max_refusals": _is_higher_limit(0),
    "per_entity": _is_higher_limit("any"),
    "refused_kinds": operator.ge,
    "families": lambda old, new: new is None or (old is not None and old <= new),
    "remember": lambda old, new: REMEMBER_LEVELS.index(new) < REMEMBER_LEVELS.index(old),
    "approval": _differs_from("owner"),
    "privacy": lambda old, new: (
        None not in (old, new) and old.epsilon <= new.epsilon and old.delta <= new.delta
    ),
}
"""By rule, whether a new value allows more than the old one; a rule that is not here never does."""


def stricter_rules(before: Policy, after: Policy) -> tuple[str, ...]:
    """Names of the rules that were changed, and not for the looser."""
    values = {
        field.name: (getattr(before, field.name), getattr(after, field.name)) for field in fields(Policy)
    }
    return tuple(
        name
        for name, (old, new) in values.items()
        if old != new and not (name in IS_LOOSER and IS_LOOSER[name](old, new))
    )
