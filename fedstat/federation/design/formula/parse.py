"""From the text of a formula to the terms that each site contributes; no data is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from fedstat.errors import FormulaError, Remedy
from fedstat.federation.design.formula.expression import parse_expression, refuse_formula
from fedstat.federation.design.formula.syntax_tree import (
    Category,
    Counts,
    Expression,
    Survival,
    Transform,
    Tree,
)
from fedstat.federation.design.formula.terms import (
    RandomTerm,
    RightSide,
    Term,
    parse_terms,
    right_side_of,
    split_sides,
    term_columns,
    term_text,
)

FEW = 12
"""Columns that are listed where a name is none of them."""


@dataclass(frozen=True, slots=True)
class SiteTerms:
    """The terms of one site on the right side; its name is empty if all sites hold the same columns.

    Main effects come first, then by degree, else in the order written; each is formula text again, for
    instance ``("Age", "C(Sex, Treatment('male'))", "Age:Weight")``, and there is none for an intercept alone.
    Columns are those that the terms read, in the order of first use.
    """

    site: str
    terms: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Formula:
    """A checked formula.

    `response` is the left side, for instance ``"BPSysAve"``, ``"log(y)"``, ``"visits > 0"`` or
    ``"cbind(events, n - events)"``; `response_site` the site that holds it, None where all hold the
    same columns; of a one-sided formula the response is empty. `sites` are the sites with terms, in
    partition order, always one where all hold the same columns. `offsets` is what stands inside each
    ``offset(...)``; the offset is their sum. `strata` and `clusters` are columns of groups, `random` effects
    that vary between groups, and `absorbed` the columns of each effect whose levels are absorbed.
    """

    text: str
    response: str
    response_site: str | None
    response_columns: tuple[str, ...]
    intercept: bool
    sites: tuple[SiteTerms, ...]
    offsets: tuple[str, ...] = ()
    offset_columns: tuple[str, ...] = ()
    strata: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    random: tuple[RandomTerm, ...] = ()
    absorbed: tuple[tuple[str, ...], ...] = ()

    @property
    def has_times(self) -> bool:
        """Whether the left side is ``Surv(...)``."""
        return self.response.startswith("Surv(")

    @property
    def has_categories(self) -> bool:
        """Whether the left side is ``C(...)``."""
        return self.response.startswith("C(")


INTERCEPT = "Intercept"
"""Name of the constant in every table of coefficients."""


def parse_formula(
    text: str, columns: Mapping[str, Sequence[str]], *, response: bool = True, extra: Sequence[str] = ()
) -> Formula:
    """Read a formula for sites that hold different columns, by name (keys of the entities excluded).

    For a model without a `response` it has one side only: ``~ .`` or ``~ a + log(b)``. ``.`` means every
    column of every site except the response and those in `extra`, in the order of `columns`. The language
    is that of R and formulaic, restricted to the names, operators and transforms listed in `tree.ALLOWED`;
    nothing of the text is evaluated.

    Raises a FormulaError for anything outside the language, for a column that is unknown or held by two
    sites, for a term or response that needs columns of two sites, for a response that is also on the right
    side, for an empty right side, and for an offset or ``cbind``.
    """
    if not response:
        return _parse_one_sided(text, _Holdings.of(columns))
    return _parse(text, _Holdings.of(columns), pooled=False, extra=extra)


def parse_pooled_formula(
    text: str,
    columns: Sequence[str],
    extra: Sequence[str] = (),
    *,
    random: bool = False,
    absorbs: bool = False,
) -> Formula:
    """Read a formula for sites that all hold the same columns.

    Beyond `parse_formula`, as in R:

    * ``y ~ x + offset(log(days))``: a numeric expression with coefficient one. Several offsets add up; one
      that is written twice is refused (R would count it once). ``.`` still includes the columns of an offset,
      since R drops from it only the columns of the left side: write ``y ~ . - days + offset(log(days))``.
    * ``cbind(events, n - events) ~ x``: successes and failures of binomial counts. statsmodels'
      ``successes + failures ~ x`` is arithmetic here, as in R.
    * ``Surv(time, event) ~ x + strata(a) + cluster(id)``: times with an event, for models of survival.
    * ``C(y) ~ x`` and ``C(y, levels=['low', 'mid', 'high']) ~ x``: categories, for their models.
    * ``y ~ x + (1 + x | patient)``: effects that vary between groups, where `random`.
    * ``y ~ x | ward``: effects of the levels of a column, or ``ward^year`` of two, which are absorbed, where
      `absorbs`; as in fixest and pyfixest.
    * ``y ~ 1``: an intercept alone, with or without offsets. An empty right side, such as ``x - x`` or a
      ``.`` without columns, is refused.

    Columns in `extra` may be named, but ``.`` does not include them; the name of the site is an example.
    There is one `SiteTerms` with an empty site (without terms for an intercept alone), and no
    `response_site`.
    """
    own = [name for name in columns if name not in extra]
    holdings = _Holdings.of({"": [*own, *extra]})
    return _parse(text, holdings, pooled=True, extra=extra, random=random, absorbs=absorbs)


def formula_of_terms(
    text: str,
    response: str,
    terms: Sequence[Term],
    columns: Mapping[str, Sequence[str]],
    *,
    pooled: bool,
    extra: Sequence[str] = (),
) -> Formula:
    """Make a formula of terms that were read one by one; `text` is how it was written.

    Otherwise as :func:`parse_formula` (`columns` by site), or with `pooled` as
    :func:`parse_pooled_formula` (those of the site "").
    """
    holdings = _Holdings.of({site: [*names, *extra] for site, names in columns.items()})
    left = parse_expression(response, response=True)
    return _assemble(text, left, right_side_of(terms), holdings, pooled=pooled)


@dataclass(frozen=True, slots=True)
class _Holdings:
    """The columns of each site."""

    columns: Mapping[str, Sequence[str]]
    owner: Mapping[str, str]

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[str]]) -> _Holdings:
        owner: dict[str, str] = {}
        for site, names in columns.items():
            for name in names:
                if not isinstance(name, str):
                    raise FormulaError(
                        f"column names must be text, received {type(name).__name__}{_at(site)}; "
                        "rename the column."
                    )
                if name in owner:
                    raise FormulaError(
                        f"column {name!r} is held by site {owner[name]!r} and by site {site!r}; rename one "
                        "of the two or leave one out."
                    )
                owner[name] = site
        return cls(columns, owner)

    def require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.owner:
                raise self._unknown(name)

    def holders(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.owner[name] for name in names))

    def _unknown(self, name: str) -> FormulaError:
        text = f"formula: there is no column {name!r}"
        close = get_close_matches(name, list(self.owner), n=3, cutoff=0.6)
        folded = {held.casefold(): held for held in self.owner}
        # A name that differs in its capitals only may be far away in edit distance.
        if name.casefold() in folded and folded[name.casefold()] not in close:
            close.insert(0, folded[name.casefold()])
        if close:
            listed = ", ".join(f"{held!r}{_at(self.owner[held])}" for held in close)
            replaced = Remedy(
                "from_formula(formula.replace({name!r}, {right!r}), ...).fit(...)", "Did you mean {listed}?"
            )
            return FormulaError(text, remedy=replaced.filled(name=name, right=close[0], listed=listed))
        if len(self.owner) <= FEW:
            listed = ", ".join(f"{held!r}{_at(self.owner[held])}" for held in self.owner)
            return FormulaError(f"{text}. There are {listed}.")
        counts = [f"{len(held)} columns{_at(site)}" for site, held in self.columns.items()]
        return FormulaError(f"{text}. Nothing similar among {'; '.join(counts)}.")


def _parse(
    text: str,
    holdings: _Holdings,
    *,
    pooled: bool,
    extra: Sequence[str] = (),
    random: bool = False,
    absorbs: bool = False,
) -> Formula:
    left, right = split_sides(text)
    response = parse_expression(left, response=True)
    holdings.require(response.columns)
    dot = [name for name in holdings.owner if name not in response.columns and name not in extra]
    right_side = parse_terms(right, dot, offsets=pooled, random=random, absorbs=absorbs)
    return _assemble(text, response, right_side, holdings, pooled=pooled)


def _assemble(
    text: str, response: Expression, right_side: RightSide, holdings: _Holdings, *, pooled: bool
) -> Formula:
    """Check who holds the response and the terms, and make the formula."""
    if isinstance(response.tree, Counts | Survival | Category) and not pooled:
        what = response.text.partition("(")[0] + "(...)"
        raise refuse_formula(what, response.text, "the response of this model is one column")
    response_site = _response_site(response, holdings)
    _require_terms(right_side, pooled)
    _require_centered(right_side)
    offset_columns = tuple(dict.fromkeys(name for offset in right_side.offsets for name in offset.columns))
    holdings.require(offset_columns)
    labels = right_side.labels
    holdings.require(name for names in labels.values() for name in names)
    holdings.require(name for one in right_side.random for name in (*one.columns, *one.effect_columns))
    holdings.require(name for names in right_side.absorbed for name in names)
    _require_other_columns(right_side, response)
    sites = tuple(_by_site(right_side.terms, holdings))
    return Formula(
        text=text,
        response=response.text,
        response_site=response_site or None,
        response_columns=response.columns,
        intercept=right_side.intercept,
        sites=sites or (SiteTerms("", (), ()),),
        offsets=tuple(offset.text for offset in right_side.offsets),
        offset_columns=offset_columns,
        strata=labels.get("strata", ()),
        clusters=labels.get("cluster", ()),
        random=right_side.random,
        absorbed=right_side.absorbed,
    )


def _parse_one_sided(text: str, holdings: _Holdings) -> Formula:
    right_side = parse_terms(split_sides(text, response=False)[1], list(holdings.owner))
    if not right_side.terms:
        raise FormulaError("formula: no term is left; write for instance '~ a + b'.")
    sites = tuple(_by_site(right_side.terms, holdings))
    return Formula(text, "", None, (), right_side.intercept, sites)


def _response_site(response: Expression, holdings: _Holdings) -> str:
    holdings.require(response.columns)
    holders = holdings.holders(response.columns)
    if len(holders) > 1:
        raise FormulaError(
            f"formula: the response {response.text!r} needs {_owners(response.columns, holdings)}; "
            "all columns of the response must be at one site."
        )
    return holders[0]


def _require_terms(right: RightSide, pooled: bool) -> None:
    if right.absorbed and not right.terms:
        raise FormulaError("formula: no term is left before the bar; write for instance 'y ~ x | ward'.")
    if not right.terms and not (pooled and right.constant and right.intercept):
        alone = ", or 'y ~ 1' for an intercept alone" if pooled else ""
        raise FormulaError(
            f"formula: no term is left on the right side; write for instance 'y ~ a + b'{alone}."
        )


def _require_centered(right: RightSide) -> None:
    """Refuse, with an intercept, a cubic spline whose columns add up to one in every row."""
    for term in right.terms if right.intercept else ():
        match [factor.tree for factor in term]:
            case [Transform(function="cr" | "cc" as function) as spline] if "constraints" not in dict(
                spline.options
            ):
                centered = f"{spline.text.removesuffix(')')}, constraints='center')"
                raise FormulaError(
                    f"formula: the columns of {spline.text!r} add up to one in every row, as the intercept "
                    "does",
                    remedy=Remedy(
                        "from_formula(formula.replace({text!r}, {centered!r}), ...).fit(...)",
                        "write {function}(..., constraints='center'), or 0 + ... for no intercept",
                    ).filled(text=spline.text, centered=centered, function=function),
                )


def _require_other_columns(right: RightSide, response: Expression) -> None:
    """Refuse a column of the response among the terms and offsets."""
    read = [(term_text(term), term_columns(term)) for term in right.terms]
    read += [(f"offset({offset.text})", offset.columns) for offset in right.offsets]
    read += [(one.text, (*one.columns, *one.effect_columns)) for one in right.random]
    read += [(f"| {'^'.join(names)}", names) for names in right.absorbed]
    for text, columns in read:
        both = [name for name in columns if name in response.columns]
        if both:
            raise FormulaError(
                f"formula: column {both[0]!r} is in the response and also on the right side, in "
                f"{text!r}; leave it out there."
            )


def _by_site(terms: Sequence[Term], holdings: _Holdings) -> Iterator[SiteTerms]:
    mine: dict[str, list[Term]] = {site: [] for site in holdings.columns}
    for term in terms:
        used = term_columns(term)
        holdings.require(used)
        holders = holdings.holders(used)
        if len(holders) > 1:
            raise FormulaError(
                f"formula: the term {term_text(term)!r} needs {_owners(used, holdings)}. A product across "
                "sites needs both columns in one place: drop the term, or let one of the sites hold both "
                "columns."
            )
        mine[holders[0]].append(term)
    for site, held in mine.items():
        if held:
            _require_distinct_labels(held, site)
            names = dict.fromkeys(name for term in held for name in term_columns(term))
            yield SiteTerms(site, tuple(map(term_text, held)), tuple(names))


def _require_distinct_labels(terms: Sequence[Term], site: str) -> None:
    """Refuse a column with the name ``log(x)`` if the formula has the transform log(x)."""
    trees: dict[str, Tree] = {}
    if any(term_text(term) == INTERCEPT for term in terms):
        raise FormulaError(
            f"formula: a column{_at(site)} has the name {INTERCEPT!r}, which is that of the constant; rename "
            f"the column, or leave it out: '- {INTERCEPT}'."
        )
    for factor in (factor for term in terms for factor in term):
        # formulaic finds factors by their label: one of the two would be coded twice.
        if trees.setdefault(factor.label, factor.tree) != factor.tree:
            raise FormulaError(
                f"formula: {factor.label!r} is the name of a column{_at(site)} and also a transform in "
                "this formula; rename the column."
            )


def _owners(names: Iterable[str], holdings: _Holdings) -> str:
    return " and ".join(f"column {name!r}{_at(holdings.owner[name])}" for name in names)


def _at(site: str) -> str:
    return f" at site {site!r}" if site else ""
