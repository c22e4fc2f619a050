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
# Policy of a site: what its owner allows it to release.
#
# The rules are enforced in :meth:`fedstat.federation.disclosure.site.Site.answer` and nowhere else. Rules on
# quantities that only a step can count are in :mod:`fedstat.federation.disclosure.row_checks`: steps report
# facts, and the disclosure checks compare them with the policy.

MAX_DELTA, ANY_SIZE_DELTA = 1e-5, 1e-6
"""Largest delta of a budget, and the largest for a table of any size; see :func:`check_delta`."""
BUDGET_KEYS = {"epsilon": "a number above 0", "delta": f"a number of at least 0 and at most {MAX_DELTA:g}"}
COLLUDING = "a whole number of at least 1"


@dataclass(frozen=True, slots=True)
class Budget:
    """A privacy budget: a bound on what all releases together may disclose of one record.

    It holds over all sessions, coordinators and restarts: the site keeps a record of what was spent.

    Parameters
    ----------
    epsilon, delta : float
        Of differential privacy, for the replacement of one entity's record at this site. In analyses of sites
        with different rows, for the values of one row added or removed; to replace a row by another one is
        both, which at most quadruples the rho of these charges.
    colluding : int, optional
        Most other sites that may collude with the coordinator. Masked sums over more sites then have less
        noise, since sites add it together. By default all other sites: each adds enough noise alone.

    Examples
    --------
    >>> import fedstat as fs
    >>> budget = fs.Budget(epsilon=1.0, delta=1e-6)
    >>> budget.epsilon, budget.delta, round(float(budget.rho), 4)
    (1.0, 1e-06, 0.0244)
    >>> budget.coalition(4), fs.Budget(epsilon=1.0, delta=1e-6, colluding=1).coalition(4)
    (3, 1)
    """

    epsilon: float
    delta: float
    colluding: int | None = None

    def __post_init__(self) -> None:
        check_budget("Budget", self.epsilon, self.delta, self.colluding)

    def coalition(self, sites: int) -> int:
        """Return how many other sites may collude against this one.

        Parameters
        ----------
        sites : int
            Number of sites of the sum, with this one.
        """
        return sites - 1 if self.colluding is None else min(self.colluding, sites - 1)

    @property
    def rho(self) -> Fraction:
        """The same as zero-concentrated differential privacy, in which charges add up."""
        return round_to_grid(rho_of_budget(self.epsilon, self.delta))


def check_budget(where: str, epsilon: object, delta: object, colluding: object = None) -> None:
    """Check the numbers of a privacy budget; a PartitionError names the first that is not valid."""
    above = ". A larger one would allow some records to be published" if is_number(delta) else ""
    for name, value, fits, remedy in (
        ("epsilon", epsilon, is_number(epsilon) and epsilon > 0, ""),
        ("delta", delta, is_number(delta) and 0 <= delta <= MAX_DELTA, above),
    ):
        if not fits:
            raise PartitionError(f"{where}: {name}: expected {BUDGET_KEYS[name]}, received {value!r}{remedy}")
    if colluding is not None and not is_integer(colluding, 1):
        raise PartitionError(f"{where}: colluding: expected {COLLUDING}, received {colluding!r}")


def check_delta(site: str, budget: Budget | None, records: int) -> None:
    """Require a delta above :data:`ANY_SIZE_DELTA` to be at most a tenth of one over the number of records.

    A PartitionError names the site, and the largest delta for its table.
    """
    if budget is not None and budget.delta > max(ANY_SIZE_DELTA, most := 0.1 / max(records, 1)):
        raise PartitionError(
            f"{site}: the delta of its privacy budget is {budget.delta:g}: a mechanism could publish whole "
            f"records with this probability, each. Use at most {max(most, ANY_SIZE_DELTA):.2g}, a tenth of "
            f"one over its records, or {ANY_SIZE_DELTA:g}"
        )


def read_budget(where: str, section: object) -> Budget:
    """Read the section of a policy file with the privacy budget; errors as of :func:`check_budget`."""
    if not isinstance(section, dict):
        raise PartitionError(f"{where}: privacy: expected a section [privacy] with {', '.join(BUDGET_KEYS)}")
    where = f"{where}, section [privacy]"
    check_names(where, section, (*BUDGET_KEYS, "colluding"))
    lacking = [name for name in BUDGET_KEYS if name not in section]
    if lacking:
        raise PartitionError(f"{where}: lacks {', '.join(lacking)}; a budget is both")
    colluding = section.get("colluding")
    check_budget(where, section["epsilon"], section["delta"], colluding)
    return Budget(float(section["epsilon"]), float(section["delta"]), colluding)


def spends_no_more(a: Budget | None, b: Budget | None) -> bool:
    """Return whether the second budget allows every release that the first one allows."""
    if a is None or b is None:
        return a == b
    alone = b.colluding is not None and (a.colluding is None or a.colluding >= b.colluding)
    return a.epsilon <= b.epsilon and a.delta <= b.delta and (alone or a.colluding == b.colluding)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner of a site allows it to release.

    Parameters
    ----------
    families : frozenset of str or None
        Families that may send requests; None allows every installed one.
    refused_kinds : frozenset of Kind
        Kinds of values that are not released, such as "raw columns". A masked sum may contain them, except
        for values per entity, which masks do not hide over many rounds.
    per_entity : int or "any"
        Most numbers for each entity, such as linear predictors, that are ever released, over all sessions,
        masked or not. About as many numbers as the site has columns reveal its rows. 0: none.
    masked_only : bool
        Whether an array is released only in masked form if an analysis needs only its sum over sites.
    two_sites : {"warn", "refuse"}
        What to do with a masked sum over two sites, in which each site can compute the part of the other.
    quorum : int or float
        Fewest sites in a masked sum, or the smallest share of those that are pinned; 0: any.
    apart : int
        Fewest sites in a masked sum, and in a difference of two masked sums, over all sessions.
    min_count : int
        Smallest number of entities in an aggregate or a sketch.
    min_events : int
        Fewest rows of each outcome of a binary response, unless there are none.
    min_level_count : int
        Fewest rows of a category level, unless there are none.
    products : {"any", "counted"}
        "counted" releases sums of products of two columns only where each product is nonzero in no row or in
        at least `min_level_count` rows; see :mod:`fedstat.federation.disclosure.differencing`.
    min_own_rows : int
        Fewest rows for which a number that rests on the site's rows alone is released, such as its own fit.
    max_column_sums : float or "any"
        Most different sums of functions of one column, for each row and over all sessions.
    max_parameters : float
        Most coefficients per row of a model over rows. From 1 on it also replaces the rule of two entities
        per equation in sums of products by fold or missing pattern.
    max_columns : int or None
        Most design columns of this site in one model, without intercept and response.
    remember : {"all", "rows", "nothing"}
        Which earlier releases, over all sessions, are compared with a new one, so that two sums that
        together reveal a few rows are not both released: those of models over rows, all, or none.
    small_differences : {"refuse", "leave out"}
        What to do with complete rows that differ by few from those of other analyses; see
        :mod:`fedstat.federation.disclosure.analysis_sets`.
    formulas : {"any", "simple"}
        "simple" computes a factor only where it is one column or one function of one column, and defined on
        all that the site publishes of that column, and products of different columns; see
        :mod:`fedstat.federation.disclosure.request_checks`.
    evaluation : {"any", "once"}
        "once" answers the evaluation of one model, with any response, and its repetition. Predictions from
        outside are averaged over `min_count` entities first, and their residuals are not counted.
    discrete : {"any", "bits"}
        "bits" releases sums of products by group only over enough entities that these sums do not determine
        columns of few values; see :mod:`fedstat.federation.tables.cardinality`.
    rounding : {"none", "dither"}
        "dither" moves the columns of such sums by up to half a hundredth of their standard deviation.
    reasons : {"sent", "logged"}
        Whether the analyst receives the reason of a refusal that depends on rows, or only the owner's log.
    max_refusals : int
        Most refusals that depend on rows; the coordinator then receives no more answers. 0: any number.
    alignment : {"allow", "ask"}
        "ask" requires the owner's consent to every alignment of keys, by 'fedstat site consent'.
    max_keys : int or None
        Most keys that another site may enter into an alignment. None: twice as many as the site has itself
        if alignment needs consent, and any number otherwise.
    approval : {"auto", "owner"}
        "owner": the owner approves the plan of every analysis, by 'fedstat site approve'. "auto": an analysis
        that the other rules allow needs no approval.
    dealer : {"third party", "any"}
        Who may deal the random numbers of a secure product of this site's columns: a third site, or the
        coordinator as well. It is never one of the two sites whose columns are multiplied.
    max_share : float
        Largest share of one row in the total weight of a sum at coefficients, or with weights, from outside.
        Below 1, sums of products by group are released only if no row has more than three quarters of the
        squared deviations of a column, or of a combination of columns; see
        :mod:`fedstat.federation.disclosure.leverage`.
    order : {"declared", "any"}
        Whether a site answers the steps of a family only in the order of its protocols.
    exact : {"presence", "none"}
        With a budget, "none" also refuses which entities have a record and which of these lack a value.
    privacy : Budget or None
        With a budget, values that depend on rows are released only with noise, and are charged to the budget
        first. Everything else is refused, except public descriptions, numbers of rows, which entities have a
        record, and which of these lack a value in the columns of a synthesis.

    Raises
    ------
    PartitionError
        A value is invalid; names the key, the expected value and the received value.

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
        'Families of models that may send requests. "design" agrees on columns, and every model needs '
        'it. "secure" agrees on keys, and masked sums need it. The models are named after their '
        'folders, such as "glm", "vfem" and "fedavg". By default every installed family may send '
        "requests.",
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
        "Kinds of values that the site does not release. From harmless to disclosing: control, "
        "schema, presence, sealed, masked share, aggregate, sketch, per entity, raw columns. A "
        "refused kind may still enter a masked sum, because the sum hides this site's part. Values "
        "per entity may not: each part follows from the sums of many rounds.",
        strict=frozenset({"raw columns", "sketch"}),
        without={ANALYST: "Whole columns, by predictions.", DEPARTING: "Any column, by one request."},
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
        "Most numbers for each entity that the site ever releases, over all analyses, sessions and "
        "restarts, masked or not. 0: none. Each number is an equation in the row of its entity. As "
        "many numbers as the site has columns determine the row; fewer do not. A fit of VFEM with a "
        'binary response or a count takes 10 to 30. "any": no limit.',
        strict=0,
        without={
            ANALYST: "A whole column, by predictions from it alone, where they need not be masked.",
            COORDINATOR: "Numbers for each entity, with 53 bits each, masked or not. As many numbers as "
            "columns determine the row.",
            OTHER_SITE: "The response of its entities, where residuals or curvatures are sent. Sums of "
            "products of its columns with them, where a third party deals.",
            DEPARTING: "The response of every entity, by one request. Rows, by as many requests as columns.",
        },
        moot=lambda policy: "per entity" in policy.refused_kinds,
        kw_only=True,
    )
    masked_only: bool = rule(
        False,
        "masked only",
        ("true or false", lambda value: isinstance(value, bool), operator.ge),
        "true: the site releases an array only in masked form where the analysis needs only the sum "
        "over sites.",
        strict=True,
        without={COORDINATOR: "The part of each site in every sum."},
    )
    two_sites: Literal["warn", "refuse"] = rule(
        "warn",
        "two sites",
        choice("warn", "refuse", strictest="refuse"),
        "What to do with a masked sum over two sites, in which each site can compute the part of the "
        'other: "warn" or "refuse".',
        strict="refuse",
        without={OTHER_SITE: "The part of the other site in a sum over two sites, masked or not."},
    )
    quorum: float = rule(
        0,
        "quorum",
        (
            "a whole number of at least 0, or a share above 0 and at most 1 with a decimal point",
            lambda value: is_integer(value, 0) or (isinstance(value, float) and 0.0 < value <= 1.0),
            lambda a, b: b == 0 or (type(a) is type(b) and a >= b),
        ),
        "Fewest sites in a masked sum: a number, or a share of the sites that are pinned here (1.0: "
        "all). 0: as many as two_sites allows.",
    )
    apart: int = rule(
        1,
        "apart",
        integer(1, operator.ge),
        "Fewest sites in a masked sum, and in a difference of two masked sums, over all sessions from "
        "now on. 1: if one site is lost and a fit goes on without it, or if an analysis leaves it "
        "out, its part of earlier sums follows by subtraction. 2 or more: this site does not take "
        "part in the second sum. This protects the other sites; their rule protects this site.",
    )
    min_count: int = rule(
        5,
        "minimum count",
        integer(0, operator.ge),
        "Fewest entities (rows) in a sum, a sketch or a share of a product.",
        without={ANALYST: "Sums over fewer entities. A sum over one entity is its value."},
    )
    min_events: int = rule(
        3,
        "minimum events",
        integer(0, operator.ge),
        "Models over rows: fewest rows of each outcome of a binary response. An outcome without any "
        "rows is allowed.",
        without={ANALYST: "Sums over the few rows of a rare outcome."},
    )
    min_level_count: int = rule(
        3,
        "minimum rows per level",
        integer(0, operator.ge),
        "Fewest rows of a level of a category, and fewest groups of rows that sums over groups single out, "
        "where no mask hides them. A level without any rows is allowed.",
        without={ANALYST: "Sums over the few rows of a rare level."},
    )
    products: Literal["any", "counted"] = rule(
        "any",
        "rows behind a product",
        choice("any", "counted", strictest="counted"),
        'Products of two columns, whose sums are part of every fit: "counted" releases them only where each '
        "product is nonzero in no row or in at least min_level_count rows, and no row has nearly all of it. "
        'Where remember is "all", columns of earlier releases are included. Between two sites only the '
        'number of rows is checked. "any": no rule.',
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
        without={ANALYST: "Rows of a small site, from several fits of its rows alone."},
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
        "Models over rows: most coefficients for each row. Sums of products of two sites' columns by fold or "
        "missing pattern need two entities for each column and one more; from 1 on, this number replaces "
        "that rule.",
        without={ANALYST: "All rows, from as many numbers as rows."},
    )
    max_columns: int | None = rule(
        None,
        "maximum columns",
        integer(1, limit(None), none=True),
        "Most columns of this site in one model, as coded: a category of three levels has two. By "
        "default there is no limit.",
        example="max_columns = 20",
    )
    remember: Literal["all", "rows", "nothing"] = rule(
        "rows",
        "differencing",
        choice("all", "rows", "nothing", strictest="all"),
        "Which earlier releases the site compares with a new one, over all sessions and without a "
        "time limit. It refuses sums that together reveal a sum over fewer than min_count rows. "
        '"all": every earlier release. "rows": releases of models over rows. "nothing": no '
        "comparison.",
        strict="all",
        without={ANALYST: "A row, from two analyses whose entities differ only in this row."},
    )
    small_differences: Literal["refuse", "leave out"] = rule(
        "refuse",
        "small differences",
        choice("leave out", "refuse", strictest="refuse"),
        'What to do where complete rows of analyses differ by fewer than min_count. "leave out": the site '
        "leaves out rows. Where few rows lack the same columns, no analysis uses these rows, or only those "
        "of fewer columns. Where few rows still differ, as after a correction, further rows are left "
        'out, always the same ones. The result says at which sites. "refuse": the analysis is refused.',
        strict="leave out",
    )
    formulas: Literal["any", "simple"] = rule(
        "any",
        "simple formulas",
        choice("any", "simple", strictest="simple"),
        'What an analyst may compute from the columns. "simple": a factor is one column, or one '
        "function of one column (log, sqrt, exp, scale, center, C, poly and bs of low degree), and "
        "must be defined for all values that columns.toml publishes. A product contains every column "
        'once, and at most three numeric columns. "any": arithmetic and written numbers are allowed '
        "as well. An analyst can then make a column that separates one person from all others.",
        strict="simple",
        without={
            ANALYST: "The response of a known person, from two fits that differ in a column made for this "
            "person."
        },
    )
    evaluation: Literal["any", "once"] = rule(
        "any",
        "evaluation once",
        choice("any", "once", strictest="once"),
        'How often fitted models may be compared with the rows. "once": the site evaluates one model, '
        "and repeats this evaluation on request. Single rows lie between the cuts of two evaluations. "
        "The site averages predictions from outside over min_count entities, because sums of losses "
        "of chosen predictions reveal every label, and counts none of their residuals. "
        '"any": no limit.',
        strict="once",
        without={
            ANALYST: "Responses and predictions of single rows, from evaluations with different cuts, and "
            "from losses of chosen predictions."
        },
    )
    discrete: Literal["any", "bits"] = rule(
        "any",
        "bits of columns of few values",
        choice("any", "bits", strictest="bits"),
        "Sums of products by group, for columns with few values (such as 0 and 1) in small groups. "
        '"bits": a group needs so many entities that the sums of all fits do not determine such a '
        "column, even for an attacker who knows all other columns. columns.toml shows how many values "
        'a column has. "any": the same rule as for columns with many values.',
        strict="bits",
        without={
            COORDINATOR: "Columns with few values, such as 0 and 1, in small patterns: the sums determine "
            "them."
        },
    )
    rounding: Literal["none", "dither"] = rule(
        "none",
        "",
        choice("none", "dither", strictest="dither"),
        'Sums of products by group. "dither": the site moves every value by up to half a hundredth of '
        "the standard deviation of its column. A sum then carries at most 10 bits about the column "
        'instead of 53. If discrete is "bits", a fifth of the entities is then sufficient. Estimates '
        'move by a small part of their standard errors. "none": sums are exact.',
        strict="dither",
        without={
            COORDINATOR: "Sums to 53 bits instead of 10. Patterns must then be larger where bits are checked."
        },
    )
    reasons: Literal["sent", "logged"] = rule(
        "sent",
        "",
        choice("sent", "logged", strictest="logged"),
        'Text of a refusal that depends on rows. "logged": the analyst receives one general text, and '
        'only the log of this site has the reason. "sent": the analyst receives the reason, which '
        "reveals something about the rows.",
        strict="logged",
        without={ANALYST: "Values, by bisection: the texts of refusals contain counts of rows."},
    )
    max_refusals: int = rule(
        0,
        "maximum refusals",
        integer(0, limit(0)),
        "Most refusals that depend on rows. Each one reveals one bit about the rows. After the last "
        "one the coordinator receives no more answers until 'fedstat site answer-again'. 0: no limit.",
        strict=10,
        without={ANALYST: "Values, by bisection: each refusal reveals one bit, without a limit."},
    )
    alignment: Literal["allow", "ask"] = rule(
        "allow",
        "alignment",
        choice("allow", "ask", strictest="ask"),
        'Whether the site aligns keys with those of other sites. "allow": whenever the coordinator '
        "requests it. \"ask\": only after the owner's consent, once for each 'fedstat site consent'. A "
        "site that enters invented keys learns which of them are here.",
        strict="ask",
        without={OTHER_SITE: "Which of its invented keys the site has."},
    )
    max_keys: int | None = rule(
        None,
        "maximum keys",
        integer(1, operator.eq, none=True),
        "Most keys that another site may enter into an alignment. By default twice as many as this "
        "site has; any number if alignment is allowed without consent.",
        example="max_keys = 100_000",
        moot=lambda policy: True,  # twice as many as there are here may be more or fewer
    )
    approval: Literal["auto", "owner"] = rule(
        "auto",
        "approval",
        choice("auto", "owner", strictest="owner"),
        'Who approves an analysis that all other rules allow. "auto": no approval is needed. "owner": the '
        "analysis waits until the owner approves its plan. 'fedstat site pending' shows the plans. Each "
        "approval is valid for one run.",
    )
    dealer: Literal["third party", "any"] = rule(
        "any",
        "dealer",
        choice("third party", "any", strictest="third party"),
        "Who deals the random numbers for products of columns here with columns of another site. "
        '"third party": only another site. "any": the coordinator as well. If the dealer colludes '
        "with the other site, these two learn the columns.",
        strict="third party",
        without={
            COORDINATOR: "If it colludes with one of two sites for which it deals: the columns of the other "
            "site."
        },
    )
    order: Literal["declared", "any"] = rule(
        "any",
        "order",
        choice("declared", "any", strictest="declared"),
        'Order of the steps of a fit. "declared": the site answers only in the order of the protocol. '
        '"any": in any order. A coordinator can then compare answers that no fit compares.',
        strict="declared",
        without={DEPARTING: "Values that no analysis requests, by steps in another order."},
    )
    max_share: float = rule(
        1.0,
        "largest share",
        ("a number above 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1, operator.le),
        "Largest share of the total weight that one row may have in a sum at coefficients, or with "
        "weights, that come from outside. Some coefficients turn a sum over all rows into the value "
        "of one row. Below 1, the site also refuses products with columns of other sites if one row "
        "has more than three quarters of the squared deviations of a column: they would reveal this "
        "row. Roots or logarithms of the column help.",
        strict=0.2,
        without={
            COORDINATOR: "Values of one row in columns of other sites, if it is nearly all of a column.",
            DEPARTING: "Most of a row, by weights that concentrate a sum on it. A row that alone has a "
            "combination of levels, by sums at a few coefficients in one session.",
        },
    )
    exact: Literal["presence", "none"] = rule(
        "presence",
        "privacy budget",
        choice("presence", "none", strictest="none"),
        'What a site with a privacy budget releases without noise. "presence": which records exist, and '
        "which of these lack a value in the columns of a synthesis. Private analyses of sites with different "
        'columns need it. "none": nothing but the public description, with the number of records.',
        moot=lambda policy: policy.privacy is None,
    )
    privacy: Budget | None = rule(
        None,
        "privacy budget",
        ("a Budget or None", lambda value: value is None or isinstance(value, Budget), spends_no_more),
        "A privacy budget: how much all releases together may ever reveal about the record of one entity, as "
        f"epsilon and delta of differential privacy. delta is at most {MAX_DELTA:g}, and a tenth of one over "
        f"the number of records, or {ANY_SIZE_DELTA:g}. With a budget, the site releases values that depend "
        "on data only with noise, and charges them to the budget first. It refuses everything else, except "
        "which records exist and which of them lack a value in the columns of a synthesis. The ledger keeps "
        "the charges, also when this file is changed. A repeated request receives the same answer and is "
        "free until the table is changed; a product with other sites until one of their tables is. 'fedstat "
        "site status' shows how much is spent. In sums over sites with different rows, each site adds enough "
        'noise alone. A number "colluding" in this section, such as 1, lets sites add it together: as much '
        "as is needed if at most this number of other sites collude with the coordinator.",
        section=True,
        example="[privacy]\nepsilon = 1.0\ndelta = 1e-06",
        moot=lambda policy: True,  # only noise is released with a budget; without one the other rules hold
    )

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_policy_values("Policy", type(self), values)

    def __repr__(self) -> str:
        # By the differences from the nearer of the two: all rules together fill ten lines.
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
        """Return the policy of one process, where the analyst can read the tables anyway.

        Minimum counts are those of a served site, so that results are those that served sites would give.
        """
        return cls()

    @classmethod
    def strict(cls, **rules: Any) -> Policy:
        """Return the policy with which a site that is served starts; its owner may loosen single rules.

        Values per entity, columns and sketches are not released. Sums are masked, over three sites or more.
        Formulas are simple, and one model is evaluated. Refusals that depend on rows do not state the
        reason, and the site stops answering after ten of them. Keys are aligned after the owner's consent.

        Parameters
        ----------
        **rules
            Fields that the owner sets to other values.
        """
        return replace(cls(**{name: one.strict for name, one in rules_of(cls).items()}), **rules)

    @property
    def is_strict(self) -> bool:
        """Return whether no rule is looser than those of :meth:`strict`."""
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
            Rules that hold for missing keys; by default :meth:`open`, for a served site :meth:`strict`.

        Raises
        ------
        PartitionError
            The file is absent or not TOML, a key is unknown, or its value is invalid: names the file, the
            key, the expected value and the remedy.

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
    """Return the policy of every site: its own if there is one, otherwise the common one.

    Parameters
    ----------
    sites : sequence of str
    common : Policy or path, optional
    own : mapping of str to Policy or path, optional

    Raises
    ------
    PartitionError
        A file is not valid, or there is no such site.
    """
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        raise PartitionError(
            "policies: expected {site: policy or path of a policy file}; for one policy for all sites use "
            "policy=..."
        )
    unknown = [site for site in own if site not in sites]
    if unknown:
        raise PartitionError(
            f"policies: unknown sites {', '.join(map(repr, unknown))}. The sites of the partition are "
            f"{', '.join(map(repr, sites))}."
        )
    rules = Policy() if common is None else _as_policy(common)
    return {site: _as_policy(own[site]) if site in own else rules for site in sites}


NAMED_POLICIES: Mapping[str, Callable[[], Policy]] = {"open": Policy.open, "strict": Policy.strict}
"""Policies that can be given by name instead of a file."""


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
