"""The policy of a site, which its owner sets, and the comparison of two policies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from fedstat.errors import PartitionError
from fedstat.federation.disclosure.rules import (
    ANALYST,
    COORDINATOR,
    DEPARTING,
    OTHER_SITE,
    RELEASE_KINDS,
    check_names,
    check_policy_values,
    choice,
    integer,
    is_integer,
    is_name_set,
    is_number,
    limit,
    looser_rules,
    parse_policy,
    read_policy,
    rule,
    rules_of,
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

MAX_DELTA = 1e-6
BUDGET_KEYS = {"epsilon": "a number above 0", "delta": f"a number of at least 0 and at most {MAX_DELTA:g}"}


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


def check_budget(where: str, epsilon: object, delta: object) -> None:
    """Hold a privacy budget against what it may be.

    Raises
    ------
    PartitionError
        Names the number, with what was expected and what came.
    """
    above = ". A larger one would allow some records to be published" if is_number(delta) else ""
    for name, value, fits, remedy in (
        ("epsilon", epsilon, is_number(epsilon) and epsilon > 0, ""),
        ("delta", delta, is_number(delta) and 0 <= delta <= MAX_DELTA, above),
    ):
        if not fits:
            raise PartitionError(f"{where}: {name}: expected {BUDGET_KEYS[name]}, received {value!r}{remedy}")


def read_budget(where: str, section: object) -> Budget:
    """Read the section of a policy file with the privacy budget; errors as of :func:`check_budget`."""
    if not isinstance(section, dict):
        raise PartitionError(f"{where}: privacy: expected a section [privacy] with {', '.join(BUDGET_KEYS)}")
    where = f"{where}, section [privacy]"
    check_names(where, section, tuple(BUDGET_KEYS))
    lacking = [name for name in BUDGET_KEYS if name not in section]
    if lacking:
        raise PartitionError(f"{where}: lacks {', '.join(lacking)}; a budget is both")
    check_budget(where, section["epsilon"], section["delta"])
    return Budget(float(section["epsilon"]), float(section["delta"]))


def spends_no_more(a: Budget | None, b: Budget | None) -> bool:
    """Whether all that the first budget lets leave may leave under the second."""
    return a == b or (a is not None and b is not None and a.epsilon <= b.epsilon and a.delta <= b.delta)


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
    products : {"any", "counted"}
        "counted" releases sums of products of two columns only where each product is nonzero in no row or in
        at least `min_level_count` rows; see :mod:`fedstat.federation.disclosure.products`.
    min_own_rows : int
        Fewest rows for which a number that rests on the site's rows alone is released, such as its own fit.
    max_column_sums : float or "any"
        Most different sums of functions of one column, for each row and over all sessions.
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

    families: frozenset[str] | None = rule(
        None,
        "families",
        (
            "a list of names of families",
            lambda value: value is None or (is_name_set(value) and len(value) > 0),
            limit(None),
        ),
        'Families of models that may ask. "design" agrees on columns and is needed by every model, "secure" '
        "agrees on keys and is needed by masked sums; the models are named after their folders, such as "
        '"glm", "vfem" and "fedavg". By default every installed family may ask.',
        example='families = ["design", "secure", "glm"]',
    )
    refused_kinds: frozenset[ArrayKind] = rule(
        frozenset(),
        "refused kinds",
        (
            f"a list of {', '.join(map(repr, RELEASE_KINDS))}",
            lambda value: is_name_set(value) and value <= set(RELEASE_KINDS),
            operator.ge,
        ),
        "Kinds of values that may not leave. From harmless to disclosing: control, schema, presence, sealed, "
        "masked share, aggregate, sketch, per entity, raw columns. A kind that is refused may still enter a "
        "masked sum, which hides this institution's part; not so values per entity, of which every part "
        "follows from the sums of many rounds.",
        strict=frozenset({"raw columns", "sketch"}),
        without={
            ANALYST: "Whole columns, by predictions.",
            DEPARTING: "Any column, by one question.",
        },
        example='refused_kinds = ["per entity", "raw columns"]',
    )
    per_entity: int | Literal["any"] = rule(
        "any",
        "per entity",
        (
            'a whole number of at least 0, or "any"',
            lambda value: value == "any" or is_integer(value, 0),
            limit("any"),
        ),
        "Most numbers for each entity that ever leave, over all analyses, sessions and restarts, masked or "
        "not; 0: none. Each is an equation about the row of its entity: fewer than this institution has "
        "columns leave its rows open, as many give them away. A fit of VFEM with a binary response or count "
        'takes 10 to 30. "any": no limit.',
        strict=0,
        without={
            ANALYST: "A whole column, by predictions from it alone, where they need not be masked.",
            COORDINATOR: "Of every entity so many numbers, 53 bits each, masked or not: as many as columns "
            "are its row.",
            OTHER_SITE: "The response of its entities, where residuals or curvatures are sent; sums of its "
            "columns with them, where a third party deals.",
            DEPARTING: "The response of every entity, by one question; rows, by as many as columns.",
        },
        moot=lambda policy: "per entity" in policy.refused_kinds,
        kw_only=True,
    )
    masked_only: bool = rule(
        False,
        "masked only",
        ("true or false", lambda value: isinstance(value, bool), operator.ge),
        "Whether arrays of which only the sum over institutions is needed leave in no other way than masked.",
        strict=True,
        without={COORDINATOR: "Each institution's part of every sum."},
    )
    two_sites: Literal["warn", "refuse"] = rule(
        "warn",
        "two sites",
        choice("warn", "refuse", strictest="refuse"),
        'What to do with a masked sum over two institutions, which hides neither from the other: "warn" or '
        '"refuse".',
        strict="refuse",
        without={OTHER_SITE: "The other's part of a sum over two, masked or not."},
    )
    quorum: float = rule(
        0,
        "quorum",
        (
            "a whole number of at least 0, or a share above 0 and at most 1 with a decimal point",
            lambda value: is_integer(value, 0) or (isinstance(value, float) and 0.0 < value <= 1.0),
            lambda a, b: b == 0 or (type(a) is type(b) and a >= b),
        ),
        "Fewest institutions in a masked sum: a number, or a share of those that are pinned here (1.0: all). "
        "0: as many as two_sites allows.",
    )
    apart: int = rule(
        1,
        "apart",
        integer(1, operator.ge),
        "Fewest institutions that a masked sum, or a difference of masked sums of all sessions from now on, "
        "may be over. 1: where one institution is lost in a fit that goes on without it, its part of earlier "
        "sums follows by subtraction, as it does where an analysis leaves it out. 2 or more: this one takes "
        "no part in the second sum, which protects the others; their rule protects this one.",
    )
    min_count: int = rule(
        5,
        "minimum count",
        integer(0, operator.ge),
        "Fewest entities (rows) behind a sum, a sketch or a share of a product.",
        without={ANALYST: "Sums over fewer entities; with a count of one, single values."},
    )
    min_events: int = rule(
        3,
        "minimum events",
        integer(0, operator.ge),
        "Models over rows: fewest rows of either outcome of a binary response, unless there are none.",
        without={ANALYST: "Sums over the few rows of a rare outcome."},
    )
    min_level_count: int = rule(
        3,
        "minimum rows per level",
        integer(0, operator.ge),
        "Fewest rows of a category level, unless there are none.",
        without={ANALYST: "Sums over the few rows of a rare level."},
    )
    products: Literal["any", "counted"] = rule(
        "any",
        "rows behind a product",
        choice("any", "counted", strictest="counted"),
        'Products of two columns, whose sums are part of every fit: "counted" releases them only where each '
        "product is nonzero in no row or in at least min_level_count rows, and no row has nearly all of it. "
        'Where remember is "all", columns of earlier releases are included. "any": no rule.',
        strict="counted",
        without={
            ANALYST: "A person's value, from two columns that only this person shares, or from two analyses "
            "with columns that differ for this person."
        },
    )
    min_own_rows: int = rule(
        0,
        "minimum rows of an own fit",
        integer(0, operator.ge),
        "Fewest rows for which numbers that rest on this site's rows alone are released: its own fit, and "
        "sums without a mask. An own fit also needs five rows for each number that it releases. A site with "
        'fewer rows takes part in masked sums. Comparisons of sites then call it "not shown". 0: no minimum.',
        strict=60,
        without={ANALYST: "Rows of a small site, which follow from several fits of its rows alone."},
    )
    max_column_sums: float | Literal["any"] = rule(
        "any",
        "maximum sums of one column",
        (
            'a number above 0, or "any"',
            lambda value: value == "any" or (is_number(value) and value > 0),
            limit("any"),
        ),
        "Models over rows: most different sums of functions of one column (x, x^2, log(x), their products), "
        "for each row and over all analyses, sessions and restarts. As many sums as rows determine the "
        'column. Beyond the limit own fits are "not shown", and models with further functions of the column '
        'are refused. "any": no limit.',
        strict=0.5,
        without={ANALYST: "All values of a column at a small site, from sums of many functions of it."},
    )
    max_parameters: float = rule(
        0.33,
        "maximum parameters per row",
        ("a number above 0", lambda value: is_number(value) and value > 0, operator.le),
        "Models over rows: most coefficients per row.",
        without={ANALYST: "As many numbers as rows, which are then determined."},
    )
    max_columns: int | None = rule(
        None,
        "maximum columns",
        integer(1, limit(None), none=True),
        "Most columns of this institution in one model, as coded: a category of three levels has two. By "
        "default there is no limit.",
        example="max_columns = 20",
    )
    remember: Literal["all", "rows", "nothing"] = rule(
        "rows",
        "differencing",
        choice("all", "rows", "nothing", strictest="all"),
        "Which earlier answers are held against a new one, over all sessions and without an end, so that "
        'sums of which any combination tells of fewer than min_count rows do not all leave: "all", those of '
        'models over "rows", or "nothing".',
        strict="all",
        without={ANALYST: "A row, from two analyses whose entities differ by it."},
    )
    formulas: Literal["any", "simple"] = rule(
        "any",
        "simple formulas",
        choice("any", "simple", strictest="simple"),
        'What may be computed from the columns. "simple": a factor is one column, or one function of one '
        "column (log, sqrt, exp, scale, center, C, poly and bs of low degree), and is defined on all that "
        'columns.toml publishes; a product holds every column once, and three numbers at most. "any": '
        "arithmetic and written numbers as well, with which whoever asks can make a column that tells one "
        "person apart from all others.",
        strict="simple",
        without={ANALYST: "A known person's response, from two fits that differ by a column made for it."},
    )
    evaluation: Literal["any", "once"] = rule(
        "any",
        "evaluation once",
        choice("any", "once", strictest="once"),
        'How often the fits of models may be held against the rows: "once" answers for one model, and the '
        "same again, since single rows lie between the cuts of two; predictions that come from outside it "
        "averages over min_count entities, since sums of losses of chosen ones tell every label.",
        strict="once",
        without={
            ANALYST: "Responses and predictions of single rows, between the cuts of evaluations, and from "
            "losses of predictions that are chosen for it."
        },
    )
    discrete: Literal["any", "bits"] = rule(
        "any",
        "bits of columns of few values",
        choice("any", "bits", strictest="bits"),
        'Sums of products by group and columns of few values, such as 0 and 1, in small groups: "bits" wants '
        "so many entities that the sums of all fits do not determine such a column for who knows all others; "
        'how many values a column has stands in columns.toml. "any": as for columns of many values.',
        strict="bits",
        without={
            COORDINATOR: "Columns of few values in small patterns, such as 0 and 1: sums determine them."
        },
    )
    rounding: Literal["none", "dither"] = rule(
        "none",
        "",
        choice("none", "dither", strictest="dither"),
        'Sums of products by group: "dither" moves every value by up to half a hundredth of the standard '
        'deviation of its column, so that a sum carries 10 bits about it at most, and not 53; with "bits" '
        "above, a fifth of the entities will do. Estimates move by a small part of their standard errors.",
        strict="dither",
        without={
            COORDINATOR: "Sums to 53 bits and not 10; larger patterns are wanted where bits are judged."
        },
    )
    reasons: Literal["told", "logged"] = rule(
        "told",
        "",
        choice("told", "logged", strictest="logged"),
        'What a refusal says that depends on rows: "logged" is one word and the name of the rule, and why '
        'stands in the log of this institution; "told" says why, and so tells something of the rows.',
        strict="logged",
        without={ANALYST: "Values, by bisection: texts of refusals state counts of rows."},
    )
    max_refusals: int = rule(
        0,
        "maximum refusals",
        integer(0, limit(0)),
        "Refusals that depend on rows, each a bit about them, after which whoever asked gets no more answers "
        "until 'fedstat site answer-again'. 0: no limit.",
        strict=10,
        without={ANALYST: "Values, by bisection: one bit a refusal, and no end of them."},
    )
    alignment: Literal["allow", "ask"] = rule(
        "allow",
        "alignment",
        choice("allow", "ask", strictest="ask"),
        "Whether keys are aligned with those of other institutions as soon as the coordinator says so, "
        '"allow", or once for every "fedstat site consent", "ask": who enters keys that it made up learns '
        "which of them are here.",
        strict="ask",
        without={OTHER_SITE: "Which of the keys that it makes up the institution has."},
    )
    max_keys: int | None = rule(
        None,
        "maximum keys",
        integer(1, operator.eq, none=True),
        "Most keys that another institution may enter into an alignment. By default twice as many as there "
        "are here, or any number where alignment is allowed without consent.",
        example="max_keys = 100_000",
        moot=lambda policy: True,  # twice as many as there are here may be more or fewer
    )
    approval: Literal["auto", "owner"] = rule(
        "auto",
        "approval",
        choice("auto", "owner", strictest="owner"),
        'Whether an analysis that the other rules let pass needs nobody, "auto", or waits until its plan is '
        "approved, \"owner\": 'fedstat site pending' shows the plans, and every approval is for one run.",
    )
    dealer: Literal["third party", "any"] = rule(
        "any",
        "dealer",
        choice("third party", "any", strictest="third party"),
        "Who deals the random numbers by which the columns here are multiplied with those of another "
        'institution: a "third party", which is an institution, or "any", the coordinator as well. Whoever '
        "deals must not join forces with the other institution, or the two of them have the columns.",
        strict="third party",
        without={COORDINATOR: "With one of two institutions for which it deals, the other's columns."},
    )
    order: Literal["declared", "any"] = rule(
        "any",
        "order",
        choice("declared", "any", strictest="declared"),
        'Whether the steps of a fit are answered in the order in which its protocol asks them, "declared", '
        'or in "any": out of turn, whoever asks can compare answers that no fit compares.',
        strict="declared",
        without={DEPARTING: "What no analysis asks for, by steps out of their order."},
    )
    max_share: float = rule(
        1.0,
        "largest share",
        ("a number above 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1, operator.le),
        "Largest share of all weight that one row may have in a sum at coefficients, or with weights, that "
        "whoever asks has chosen: at some, a sum over all rows is that of one. Below 1, products with "
        "columns of other institutions are not summed either where one row has more than three quarters of "
        "the squared deviations of a column: they would be values of that row. Roots or logarithms help.",
        strict=0.2,
        without={
            COORDINATOR: "Values of one row in others' columns, beside a column of which it is nearly all.",
            DEPARTING: "Most of a row, by weights that leave a sum to it but for a rest; a row that alone "
            "has a combination of levels, by sums at a few coefficients in one session.",
        },
    )
    privacy: Budget | None = rule(
        None,
        "privacy budget",
        ("a Budget or None", lambda value: value is None or isinstance(value, Budget), spends_no_more),
        "A privacy budget: how much all answers together, for ever, may tell of one entity's record, as "
        f"epsilon and delta of differential privacy; delta is at most {MAX_DELTA:g}. With one, whatever "
        "depends on values leaves only with noise, and is charged before it does; all else is refused, but "
        "for which records there are, and which of them lack a value in the columns of a synthesis. What was "
        "charged stands in the ledger, and stays charged when this file is changed; the same question again "
        "has the same answer, and costs nothing, until the table is changed. 'fedstat site status' shows "
        "what is spent.",
        section=True,
        example="[privacy]\nepsilon = 1.0\ndelta = 1e-06",
        moot=lambda policy: True,  # with a budget only noise leaves, and without one the other rules hold
    )

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_policy_values("Policy", type(self), values)

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
        return replace(cls(**{name: one.strict for name, one in rules_of(cls).items()}), **rules)

    @property
    def is_strict(self) -> bool:
        """Whether no rule is looser than those of :meth:`strict`."""
        return not self.looser_than_strict()

    def looser_than_strict(self) -> tuple[str, ...]:
        """Names of the rules that allow more than :meth:`strict` does."""
        return looser_rules(self)

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
        where, text = read_policy(path)
        return cls._of_file(where, text, start or cls.open())

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
        return cls._of_file(where, text.encode(), cls.open())

    @classmethod
    def _of_file(cls, where: str, text: bytes, start: Policy) -> Policy:
        values = parse_policy(where, text, cls)
        if "privacy" in values:
            values["privacy"] = read_budget(where, values["privacy"])
        check_policy_values(where, cls, values)
        return replace(start, **values)

    def to_toml(self) -> str:
        """Text of a file that :meth:`from_toml` reads, with a comment on every rule."""
        return write_policy(self)


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
