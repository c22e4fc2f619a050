"""Effects within subgroups: fits of the rows of each level, a test of interaction, and a forest plot."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import DesignError, EstimationError, FedstatWarning, ModelError, PolicyError
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.formula.syntax_tree import Category, Column
from fedstat.federation.design.formula.terms import (
    Term,
    extended,
    parse_term,
    term_columns,
    term_text,
)
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import label_estimates, plot_coefficients
from fedstat.inference.summary import DerivedReport, Shown, blank_repeats
from fedstat.inference.tables import Sheet, SheetSummary, exponentials, number, show_probability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTES = Catalogue(
    warning={
        "not_fitted": "{by} = {level}: no estimate. {reason}",
        "not_tested": "No test of interaction with {by}. {reason}",
    },
    info={
        "within": "Each level is fitted to its own rows, where all other coefficients are its own.",
        "interaction": "P of interaction: Wald test that the effect is the same in all levels, in a model of "
        "all rows with the product of both; other coefficients are those of all levels there.",
        "several": "P-values and intervals are not adjusted for the number of subgroups.",
    },
)
OVERALL = "all rows"
TEST = ("statistic", "df", "df_denom", "p_value")
REFUSED = (PolicyError, EstimationError, DesignError)
"""Errors of one fit, without which the table has the others."""
WIDTHS = (24, 7, 6, 9, 9, 9, 7, 9)
"""Text width of each column but the estimate."""


@dataclass(frozen=True, slots=True)
class SubgroupWords:
    """What a table of subgroups says: the effect, its axis, that of ratios, and a title for these."""

    effect: str
    axis: str
    ratio: str
    ratios: str


class Subgroups(DerivedReport):
    """An effect in all rows and within subgroups; made by :meth:`GLMResults.subgroups` of a fit.

    Parameters
    ----------
    rows : DataFrame
        ``by``, ``level``, ``term``, ``n``, ``sites``, ``estimate``, ``std_error``, ``df`` of each estimate,
        and ``problem`` where there is none.
    tests : DataFrame
        Tests of interaction by column: ``statistic``, ``df``, ``df_denom``, ``p_value``, ``problem``.
    words : SubgroupWords
    sources : iterable

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ arm + age", partition).fit()
    >>> found = fit.subgroups("arm", by="stage")
    >>> found.tidy(exponentiate=True).round(2)[["by", "level", "n", "estimate", "conf_low", "conf_high"]]
             by level    n  estimate  conf_low  conf_high
    0  all rows        800      0.60      0.49       0.73
    1     stage     I  325      0.55      0.38       0.80
    2     stage    II  262      0.58      0.41       0.83
    3     stage   III  213      0.51      0.37       0.72
    >>> found.tests.round(3)["p_value"].to_dict()
    {'stage': 0.969}
    >>> "stage" in str(found.summary()), found.plot(exponentiate=True).has_data()
    (True, True)
    """

    def __init__(
        self, rows: pd.DataFrame, tests: pd.DataFrame, words: SubgroupWords, sources: Iterable[object]
    ) -> None:
        super().__init__(sources)
        self.rows, self.tests, self._words = rows, tests, words

    @takes_alpha
    def tidy(self, alpha: float = 0.05, exponentiate: bool = False) -> pd.DataFrame:
        """One row for each estimate, that of all rows first.

        Parameters
        ----------
        alpha : float
        exponentiate : bool
            Give ``estimate`` and its limits as exponentials, such as hazard ratios.

        Returns
        -------
        DataFrame
            ``by``, ``level``, ``term``, ``n``, ``sites``, ``estimate``, ``std_error``, ``statistic``,
            ``p_value``, ``conf_low``, ``conf_high`` and ``p_interaction``.
        """
        frame = self.rows.drop(columns=["df", "problem"])
        law = stats.t(self.rows["df"].to_numpy(dtype=np.float64))
        half = law.isf(alpha / 2.0) * frame["std_error"]
        statistic = frame["estimate"] / frame["std_error"]
        frame = frame.assign(
            statistic=statistic,
            p_value=2.0 * law.sf(np.abs(statistic)),
            conf_low=frame["estimate"] - half,
            conf_high=frame["estimate"] + half,
            p_interaction=frame["by"].map(self.tests["p_value"].to_dict()).astype(float),
        )
        ends = ["estimate", "conf_low", "conf_high"]
        return frame.assign(**{name: exponentials(frame[name]) for name in ends}) if exponentiate else frame

    @takes_alpha
    def summary(
        self,
        alpha: float = 0.05,
        *,
        exponentiate: bool = False,
        title: str | None = None,
        notes: Shown = "brief",
    ) -> SheetSummary:
        """Table for print; arguments as those of :meth:`tidy`.

        Parameters
        ----------
        alpha : float
        exponentiate : bool
        title : str, optional
        notes : {"brief", "all"}

        Returns
        -------
        SheetSummary
        """
        return self._lay_out(self._sheets(alpha, exponentiate), title, notes)

    def _sheets(self, alpha: float = 0.05, exponentiate: bool = False) -> Iterator[Sheet]:
        frame, several = self.tidy(alpha, exponentiate), len(set(self.rows["term"])) > 1
        lines: list[tuple[str, ...]] = []
        for heading, (_, row) in zip(blank_repeats(frame["by"]), frame.iterrows(), strict=True):
            if heading and row["level"]:
                p = row["p_interaction"]
                lines.append((heading, *[""] * (len(WIDTHS) - 1), "" if np.isnan(p) else f"{p:.3f}"))
            label = ("  " + row["level"] if row["level"] else row["by"]) + f": {row['term']}" * several
            known = [] if np.isnan(row["estimate"]) else ["estimate", "std_error", "conf_low", "conf_high"]
            cells = [number(row[name]) for name in known] or [""] * 4
            p = f"{row['p_value']:.3f}" if known else ""
            lines.append((label, f"{row['n']:,}" if row["n"] else "", f"{row['sites']}", *cells, p, ""))
        effect = self._words.ratio.partition(" of ")[0] if exponentiate else "estimate"
        ends = (f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]")
        headers = ("", "rows", "sites", effect, "std err", *ends, "P", "P inter.")
        widths = (WIDTHS[0], *WIDTHS[1:3], max(10, len(effect)), *WIDTHS[3:])
        yield Sheet(
            headers, tuple(lines), "l" + "r" * len(WIDTHS), widths, f"{self._words.effect} by subgroup"
        )

    def _glance(self) -> dict[str, Any]:
        return {"effect": self._words.effect, "subgroups": int((self.rows["level"] != "").sum())}

    def _summary_notes(self) -> Iterator[Note]:
        for row in self.rows[self.rows["problem"] != ""].itertuples():
            yield NOTES.note("not_fitted", by=row.by, level=row.level, reason=row.problem)
        for row in self.tests[self.tests["problem"] != ""].itertuples():
            yield NOTES.note("not_tested", by=row.Index, reason=row.problem)
        for kind in ("within", "interaction", "several"):
            yield NOTES.note(kind)

    def __repr__(self) -> str:
        return self.summary().as_text()

    @takes_alpha
    def plot(self, ax: Axes | None = None, *, alpha: float = 0.05, exponentiate: bool = False) -> Axes:
        """Draw a forest: estimates and intervals of all rows and of each level, with tests of interaction.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        alpha : float
        exponentiate : bool
            Draw exponentials on a logarithmic scale.

        Returns
        -------
        matplotlib Axes
        """
        frame, words = self.tidy(alpha, exponentiate), self._words
        several = len(set(frame["term"])) > 1
        named = frame["level"].where(frame["level"] != "", OVERALL) + (
            ": " + frame["term"] if several else ""
        )
        p = frame["p_interaction"].map(show_probability)
        heading = frame["by"] + np.where(frame["p_interaction"].isna(), "", ", interaction P " + p)
        shown = frame.assign(
            term=named + frame["n"].map(lambda n: f" ({n:,})" if n else ""),
            site=heading.where(frame["level"] != "", ""),
        )
        axis = words.ratio if exponentiate else words.axis
        title = f"{words.effect} by subgroup"
        drawn = plot_coefficients(shown, ax=ax, title=title, alpha=alpha, effect=axis, ratios=exponentiate)
        label_estimates(drawn, shown[["estimate", "conf_low", "conf_high"]].to_numpy(), exponentiate)
        return drawn


def subgroups(result: Any, effect: str, by: str | Sequence[str]) -> Subgroups:
    """Fit the model of a result within the levels of columns, and test their interactions with an effect."""
    model, columns = result.model, [by] if isinstance(by, str) else list(by)
    own = _term_of(result, "effect", effect)
    if own is None:
        raise ModelError(
            f"effect: the model has no term {effect!r}. Its terms are "
            f"{', '.join(dict.fromkeys(result.estimate.terms))}"
        )
    if not columns:
        raise ModelError("by: expected a column of categories, as in by=['sex', 'stage']")
    text, names = term_text(own), _coefficients(result, own)
    rows, tests = [*_estimates(result, names, OVERALL, "")], {}
    for column in columns:
        model._check_held("by", column)
        if column in term_columns(own):
            raise ModelError(f"by: {column!r} is the column of the effect")
        term = _term_of(result, "by", column)
        without = "" if term is None else f" - {term_text(term)}"
        coded = f"C({quoted_name(column)})"
        if term is not None and isinstance(term[0].tree, Category):
            coded, main = term_text(term), ""
        else:
            main = "" if _is_absorbed(result, column) else f"{without} + {coded}"
        together = _model(result, extended(model.formula.text, f"{main} + {text}:{coded}"))
        tests[column] = _interaction(result, together, {*term_columns(own), column})
        for level in together.agreement.spec.levels[column]:
            subset = " & ".join([*model.question.subset, f"{quoted_name(column)} == {level!r}"])
            try:
                fit = _fit(result, _model(result, extended(model.formula.text, without), subset))
                rows += _estimates(fit, names, column, str(level))
            except REFUSED as error:
                rows += _estimates(None, names, column, str(level), str(error))
    words = SubgroupWords(effect, *result._effect_words())
    table = pd.DataFrame(tests).T.astype(dict.fromkeys(TEST, float))
    return Subgroups(pd.DataFrame(rows), table, words, [result])


def _term_of(result: Any, argument: str, name: str) -> Term | None:
    """Return the main effect of a column, or the term of this text; None if the model has none."""
    terms = [parse_term(text) for text in dict.fromkeys(result.basis.agreement.question.terms)]
    found = [term for term in terms if name in (term_text(term), *term_columns(term))]
    for term in found:
        if len(term) > 1 or not isinstance(term[0].tree, Column | Category):
            raise ModelError(
                f"{argument}: {name!r} is in the term {term_text(term)!r}; subgroups need a model without "
                "products, splines and functions of it"
            )
    return found[0] if found else None


def _is_absorbed(result: Any, column: str) -> bool:
    """Return whether baseline hazards or absorbed effects have the main effect of a column in them."""
    model = result.model
    by_site = model._baselines and result._call.arguments.get("baseline") != "common"
    absorbed = (column,) in model.formula.absorbed
    return absorbed or column in model.formula.strata or (by_site and column == model.partition.site_column)


def _coefficients(result: Any, term: Term) -> list[str]:
    """Name the coefficients of a term."""
    pairs = zip(result.estimate.names, result.estimate.terms, strict=True)
    return [name for name, text in pairs if text == term_text(term)]


def _model(result: Any, formula: str, subset: str | None = None) -> Any:
    """Make the model of another formula, or of the rows of a subset."""
    model = result.model
    settings = {**model._given, "missing": "drop"}
    if subset is not None:
        settings["subset"] = subset
    with warnings.catch_warnings():
        # Sites without a row of a level are counted in the table.
        warnings.simplefilter("ignore", FedstatWarning)
        return type(model).from_formula(formula, model.partition, **settings)


def _fit(result: Any, model: Any) -> Any:
    """Fit a model as the result was fitted."""
    return model.fit(**result._call.arguments)


def _interaction(result: Any, model: Any, columns: set[str]) -> dict[str, Any]:
    """Test that all coefficients of the product of these columns are zero."""
    try:
        fit = _fit(result, model)
    except REFUSED as error:
        return dict.fromkeys(TEST, np.nan) | {"problem": str(error)}
    terms = fit.basis.agreement.question.terms
    products = [text for text in terms if set(term_columns(parse_term(text))) == columns]
    R = np.eye(len(fit.estimate.names))[[text in products for text in fit.estimate.terms]]
    test = fit.wald_test(R)
    df_denom = float(test.df_denom) if test.distribution == "F" else np.inf
    found = (float(test.statistic), float(len(R)), df_denom, float(test.pvalue))
    return dict(zip(TEST, found, strict=True)) | {"problem": ""}


def _estimates(
    fit: Any, names: Sequence[str], by: str, level: str, problem: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a fit, or of none."""
    for name in names:
        row = {"by": by, "level": level, "term": name, "n": 0, "sites": 0, "problem": problem}
        row |= dict.fromkeys(["estimate", "std_error", "df"], np.nan)
        if fit is not None:
            row |= {"n": fit.nobs, "sites": fit._n_sites, "estimate": fit.params[name]}
            row |= {"std_error": fit.bse[name], "df": fit.df[name]}
        yield row
