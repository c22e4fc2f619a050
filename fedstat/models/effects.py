"""Predictions, comparisons, slopes, adjusted means and contrasts of any fit with a linear predictor.

A family states its response functions, :class:`ResponseFunctions`; everything else is here. Rows are those of
a grid that the analyst writes, or those at the sites, which release averages only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.effects import (
    AT_MEAN,
    EXPONENTIALS,
    NULLS,
    PAIRS,
    SIGNS,
    WORDS,
    Adjustment,
    EffectEstimates,
    EffectWords,
    Means,
    averages_by,
    check_comparison,
    compare_means,
    join,
)
from fedstat.inference.hypotheses import DegreesOfFreedom
from fedstat.models.checks import HeldRows, check_choice, check_frame
from fedstat.models.margins import Change
from fedstat.spline_names import close_names
from fedstat.typing import Floats

Variables: TypeAlias = str | Sequence[str] | Mapping[str, Any] | None
"""Names of variables; or by name a step, a pair of values, or the pairs of levels that are compared."""
Where: TypeAlias = HeldRows | Mapping[str, Any] | str | None
"""Rows: None for those at the sites, "mean" for one typical row, values by column, or a table."""
MOST_ROWS = 10_000
"""Most rows of a grid."""


class ResponseFunctions(Protocol):
    """Means of a fit as functions of rows and of its q parameters."""

    @property
    def outcomes(self) -> Sequence[Any]:
        """Categories or times, (J,); one empty text for a single mean."""

    @property
    def heading(self) -> str:
        """What the outcomes are."""

    @property
    def cov(self) -> Floats:
        """Covariance of the parameters, (q, q)."""

    @property
    def df(self) -> DegreesOfFreedom:
        """Degrees of freedom of tests: of all parameters, or of the first p; None for normal tests."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Columns of the fixed terms."""

    @property
    def levels(self) -> Mapping[str, tuple[LevelValue, ...]]:
        """Levels of the categories among them, the reference level first."""

    @property
    def typical(self) -> Mapping[str, LevelValue]:
        """Means or most frequent levels, as far as they are known."""

    @property
    def further(self) -> tuple[str, ...]:
        """Columns of offset and exposure."""

    @property
    def link(self) -> str:
        """Link of a mean with one linear predictor; empty if there are several of either."""

    @property
    def mean_words(self) -> str:
        """What the mean is."""

    @property
    def why_no_average(self) -> str:
        """Why there are no means over the rows at the sites; empty if there are."""

    @property
    def over_rows(self) -> str:
        """What an average over the rows at the sites is."""

    @property
    def inverse(self) -> tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]:
        """Inverse of the link, and its derivative."""

    def means(self, frame: pd.DataFrame) -> Means:
        """Return the means (m, J) of rows."""

    def derivatives(self, frame: pd.DataFrame, name: str) -> Means:
        """Return the derivatives (m, J) of the means of rows by a number."""

    def linear(self, frame: pd.DataFrame) -> tuple[Sequence[Any], Means]:
        """Return the linear predictors (m, K) of rows, and their names; constants may be left out."""

    def averages(self, call: str, changes: Sequence[Change]) -> Means:
        """Return averages (V, J) of changes over the rows at the sites."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One comparison of a variable: between two values, by a step, or a derivative; see :class:`Change`."""

    name: str
    low: LevelValue | None = None
    high: LevelValue | None = None
    added: bool = False

    def label(self, sign: str) -> str:
        """Return the contrast in a table."""
        if self.high is None:
            return "dy/dx"
        return f"+{self.high:g}" if self.added else f"{_text(self.high)} {sign} {_text(self.low)}"

    def placed(self, frame: pd.DataFrame, value: LevelValue | None) -> pd.DataFrame:
        """Return rows with the variable at a value, or with the value added."""
        moved: Any = frame[self.name] + value if self.added else value  # type: ignore[operator]
        return frame.assign(**{self.name: moved})

    def change(self) -> Change:
        """Return the request of the comparison as a difference."""
        return Change(self.name, self.low, self.high, self.added)

    def mean(self, value: LevelValue | None) -> Change:
        """Return the request of the mean with the variable at a value."""
        return Change("") if self.added and not value else Change(self.name, None, value, self.added)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- what is asked for ---


def _names(response: ResponseFunctions, what: str, names: Sequence[str]) -> list[str]:
    """Require columns of the model."""
    for name in names:
        if name not in response.variables:
            close = close_names(name, response.variables)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else ""
            hint = hint or f"it has {', '.join(response.variables)}"
            raise ModelError(f"{what}: the model has no column {name!r}; {hint}")
    return list(names)


def _wanted(response: ResponseFunctions, what: str, variables: Variables) -> dict[str, Any]:
    """Return what is asked of each variable, None for the default."""
    if variables is None:
        if not response.variables:
            raise ModelError(f"{what}: the model has no columns")
        return dict.fromkeys(response.variables)
    if isinstance(variables, str):
        variables = [variables]
    given = dict(variables) if isinstance(variables, Mapping) else dict.fromkeys(variables)
    _names(response, what, list(given))
    return given


def _comparisons(response: ResponseFunctions, name: str, how: Any) -> Iterator[Compared]:
    """Return the comparisons of a variable: of levels, of two values, or by a step, 1 without another one."""
    levels = response.levels.get(name)
    if levels is None:
        step: Any = 1.0 if how is None else how
        if np.ndim(step) == 0 and isinstance(step, int | float | np.number) and np.isfinite(step) and step:
            yield Compared(name, 0.0, float(step), True)
        elif np.ndim(step) == 1 and len(step) == 2 and np.isfinite(np.asarray(step, dtype=float)).all():
            yield Compared(name, float(step[0]), float(step[1]))
        else:
            raise ModelError(
                f"variables: {name!r} is a number: expected a step or two values, received {how!r}"
            )
        return
    if isinstance(how, str) and how in PAIRS and how not in levels:
        yield from (Compared(name, low, high) for low, high in PAIRS[how](levels))
    elif how is None:
        yield from (Compared(name, low, high) for low, high in PAIRS["reference"](levels))
    elif not isinstance(how, str) and np.ndim(how) == 1 and len(how) == 2 and {*how} <= {*levels}:
        yield Compared(name, how[0], how[1])
    else:
        raise ModelError(
            f"variables: {name!r} is a category: expected two of its levels ({', '.join(map(str, levels))}), "
            f"or one of {', '.join(PAIRS)}; received {how!r}"
        )


def _groups(response: ResponseFunctions, by: str | Sequence[str] | None) -> list[str]:
    names = [] if by is None else [by] if isinstance(by, str) else list(by)
    return _names(response, "by", names)


# -- rows of a grid ---


def grid_rows(
    response: ResponseFunctions, call: str, at: Where, crossed: Sequence[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of a grid, and the columns that describe them.

    Values of a mapping are combined; other columns have their typical value, those in `crossed` all levels.
    """
    if isinstance(at, str) and at != "mean":
        raise ModelError(f"at: expected None, 'mean', values by column, or a table, received {at!r}")
    if at is not None and not isinstance(at, str | Mapping):
        frame = check_frame(call, at, "at=None averages over the rows at the sites").reset_index(drop=True)
        lacking = [name for name in (*response.variables, *response.further) if name not in frame]
        if lacking:
            raise ModelError(f"{call}: the table in 'at' lacks the column {', '.join(map(repr, lacking))}")
        return frame, [name for name in response.variables if len(set(frame[name])) > 1]
    given = {} if at is None or isinstance(at, str) else dict(at)
    known = (*response.variables, *response.further)
    _names(response, "at", [name for name in given if name not in response.further])
    values: dict[str, list[Any]] = {}
    for name in known:
        if name in given:
            one = given[name]
            values[name] = [one] if np.ndim(one) == 0 else list(one)
        elif name in crossed:
            values[name] = list(response.levels[name])
        elif name in response.typical:
            values[name] = [response.typical[name]]
        else:
            why = (
                "is the offset or exposure"
                if name in response.further
                else "has no known mean, for it is in transforms only"
            )
            raise ModelError(
                f"{call}: {name!r} {why}",
                remedy=Remedy(
                    "{method}(..., at={{{name!r}: 1.0}})", "give a value of it, as in {arguments}"
                ).filled(method=call, name=name),
            )
    size = int(np.prod([len(one) for one in values.values()]))
    if not 0 < size <= MOST_ROWS:
        raise ModelError(f"{call}: the grid has {size:,} rows; expected 1 to {MOST_ROWS:,}")
    frame = pd.DataFrame(list(product(*values.values())), columns=list(values))
    return frame, [name for name in known if name in given or name in crossed]


def _keys(parts: Mapping[str, Any], n: int, groups: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return what n rows are: the same in all of them, then by row."""
    out = pd.DataFrame({name: [value] * n for name, value in parts.items()}, index=range(n))
    return out if groups is None else pd.concat([out, groups.reset_index(drop=True)], axis=1)


def _by_outcome(
    heading: str, outcomes: Sequence[Any], keys: pd.DataFrame, found: Means
) -> tuple[pd.DataFrame, Means]:
    """Return one row for each outcome of each of m rows."""
    m, J = found.values.shape
    flat = Means(found.values.reshape(-1, 1), found.slopes.reshape(m * J, 1, -1))
    if J == 1 and outcomes[0] == "":
        return keys, flat
    wide = keys.loc[keys.index.repeat(J)].reset_index(drop=True)
    wide.insert(min(2, len(wide.columns)) if "contrast" in wide else 0, heading, list(outcomes) * m)
    return wide, flat


def _averaged(
    frame: pd.DataFrame, names: list[str], shown: list[str], found: Means
) -> tuple[pd.DataFrame, Means]:
    """Average rows of a grid by columns, if there are any."""
    if not names:
        return frame[shown], found
    groups, weights = averages_by(frame[names])
    return groups, found.combined(weights)


# -- statements ---


def _made(
    result: Any,
    response: ResponseFunctions,
    call: str,
    parts: Sequence[tuple[pd.DataFrame, Means]],
    words: EffectWords,
    adjustment: Adjustment | None = None,
    outcomes: Sequence[Any] | None = None,
) -> EffectEstimates:
    made = [
        _by_outcome(response.heading, response.outcomes if outcomes is None else outcomes, *part)
        for part in parts
    ]
    keys, found = pd.concat([one for one, _ in made], ignore_index=True), join([one for _, one in made])
    if not found.finite:
        raise EstimationError(f"{call}: an estimate is not finite; a mean is at the end of its range")
    return EffectEstimates(
        keys, found, response.cov, response.df, words=words, adjustment=adjustment, sources=(result,)
    )


def _note(response: ResponseFunctions, at: Where, by: Sequence[str]) -> str:
    if at is None:
        where = response.over_rows
    else:
        where = "At one typical row" if isinstance(at, str) else "At the rows of a grid"
    return f"{where}{' by ' + ', '.join(by) if by else ''}. Errors by the delta method."


def _over_sites(
    response: ResponseFunctions,
    call: str,
    by: Sequence[str],
    requests: Sequence[tuple[Mapping[str, Any], Sequence[Change]]],
) -> list[tuple[pd.DataFrame, list[Means]]]:
    """Request averages over the rows at the sites, for each request and each level of `by`."""
    if response.why_no_average:
        raise NotAvailableError(f"{call}: {response.why_no_average}", remedy=AT_MEAN.filled(method=call))
    if len(by) > 1 or (by and by[0] not in response.levels):
        raise ModelError(
            f"by: expected one category of the model, or a grid with at=; received {', '.join(by)}"
        )
    levels = response.levels[by[0]] if by else (None,)

    def among(change: Change, level: LevelValue | None) -> Change:
        return replace(change, by=by[0], level=level) if by else change

    wanted = [among(one, level) for _, changes in requests for level in levels for one in changes]
    unique = list(dict.fromkeys(wanted))
    found = response.averages(f"{call}()", unique)
    place = {change: k for k, change in enumerate(unique)}
    out = []
    for parts, changes in requests:
        means = [found.part([place[among(one, level)] for level in levels]) for one in changes]
        groups = pd.DataFrame({by[0]: list(levels)}) if by else None
        out.append((_keys(parts, len(levels), groups), means))
    return out


def predictions(
    result: Any, response: ResponseFunctions, variables: Variables, at: Where, by: Any, which: str
) -> EffectEstimates:
    """See :meth:`fedstat.results.CoefficientResults.predictions`."""
    call, groups = "predictions", _groups(response, by)
    wanted = {} if variables is None else _wanted(response, "variables", variables)
    outcomes: Sequence[Any] | None = None
    if at is None and which == "mean":
        if len(wanted) > 1:
            raise ModelError(
                "variables: over the rows at the sites, give one variable; a grid with at= takes several"
            )
        requests: list[tuple[dict[str, Any], list[Change]]] = [({}, [Change("")])]
        for name, values in wanted.items():
            points = _values(response, name, values)
            requests = [({name: value}, [Compared(name).mean(value)]) for value in points]
        parts = [(keys, means[0]) for keys, means in _over_sites(response, call, groups, requests)]
    else:
        if at is None:
            raise NotAvailableError(
                "predictions: linear predictors are those of rows", remedy=AT_MEAN.filled(method=call)
            )
        frame, shown = grid_rows(response, call, at)
        for name, values in wanted.items():
            values = _values(response, name, values)
            frame = pd.concat([frame.assign(**{name: value}) for value in values], ignore_index=True)
            shown = [name, *(one for one in shown if one != name)]
        if which == "mean":
            found = response.means(frame)
        else:
            outcomes, found = response.linear(frame)
        parts = [_averaged(frame, groups, shown, found)]
    title = f"Predicted {response.mean_words if which == 'mean' else 'linear predictor'}"
    words = EffectWords(title, "estimate", _note(response, at, groups), null=np.nan)
    return _made(result, response, call, parts, words, outcomes=outcomes)


def _values(response: ResponseFunctions, name: str, values: Any) -> list[Any]:
    """Return the values of a variable at which means are predicted; all levels of a category by default."""
    if values is None:
        if name not in response.levels:
            raise ModelError(
                f"variables: {name!r} is a number",
                remedy=Remedy(
                    "predictions(..., variables={{{name!r}: [0.0, 1.0]}})",
                    "give its values, as in {arguments}",
                ).filled(name=name),
            )
        return list(response.levels[name])
    values = [values] if np.ndim(values) == 0 else list(values)
    wrong = [one for one in values if one not in response.levels.get(name, values)]
    if wrong:
        raise ModelError(f"variables: {name!r} has no level {', '.join(map(repr, wrong))}")
    return [one if name in response.levels else float(one) for one in values]


def comparisons(
    result: Any,
    response: ResponseFunctions,
    variables: Variables,
    comparison: str,
    at: Where,
    by: Any,
    exponentiate: bool,
) -> EffectEstimates:
    """See :meth:`fedstat.results.CoefficientResults.comparisons`."""
    check_comparison(comparison, exponentiate)
    call, groups, sign = "comparisons", _groups(response, by), SIGNS[comparison]
    wanted = _wanted(response, "variables", variables)
    asked = [one for name, how in wanted.items() for one in _comparisons(response, name, how)]
    parts = []
    if at is None:
        # One sum reveals less than two.
        single = comparison == "difference"
        requests = [
            (
                {"term": one.name, "contrast": one.label(sign)},
                [one.change()] if single else [one.mean(one.high), one.mean(one.low)],
            )
            for one in asked
        ]
        for keys, means in _over_sites(response, call, groups, requests):
            parts.append((keys, means[0] if single else compare_means(means[0], means[1], comparison)))
    else:
        frame, shown = grid_rows(response, call, at)
        for one in asked:
            rows = [n for n in shown if n != one.name or one.added]
            high, low = (response.means(one.placed(frame, value)) for value in (one.high, one.low))
            (keys, high), (_, low) = (_averaged(frame, groups, rows, means) for means in (high, low))
            parts.append(
                (
                    _keys({"term": one.name, "contrast": one.label(sign)}, len(keys), keys),
                    compare_means(high, low, comparison),
                )
            )
    estimate = EXPONENTIALS[comparison] if exponentiate else WORDS[comparison]
    note = _note(response, at, groups)
    if comparison != "difference" and (at is None or groups):
        note += f" The {WORDS[comparison]} is that of averages."
    words = EffectWords(
        f"Comparisons of the predicted {response.mean_words}",
        estimate,
        note,
        NULLS.get(comparison, 0.0),
        exponentiate,
    )
    return _made(result, response, call, parts, words)


def slopes(
    result: Any, response: ResponseFunctions, variables: Variables, at: Where, by: Any
) -> EffectEstimates:
    """See :meth:`fedstat.results.CoefficientResults.slopes`."""
    call, groups = "slopes", _groups(response, by)
    asked: list[Compared] = []
    for name, how in _wanted(response, "variables", variables).items():
        asked += _comparisons(response, name, how) if name in response.levels else [Compared(name)]
    parts = []
    if at is None:
        requests = [({"term": one.name, "contrast": one.label("-")}, [one.change()]) for one in asked]
        parts = [(keys, means[0]) for keys, means in _over_sites(response, call, groups, requests)]
    else:
        frame, shown = grid_rows(response, call, at)
        for one in asked:
            if one.high is None:
                found = response.derivatives(frame, one.name)
            else:
                high, low = (response.means(one.placed(frame, value)) for value in (one.high, one.low))
                found = compare_means(high, low, "difference")
            rows = [n for n in shown if n != one.name or one.high is None]
            keys, found = _averaged(frame, groups, rows, found)
            parts.append((_keys({"term": one.name, "contrast": one.label("-")}, len(keys), keys), found))
    words = EffectWords(
        f"Slopes of the predicted {response.mean_words}", "slope", _note(response, at, groups)
    )
    return _made(result, response, call, parts, words)


def _factor_means(
    response: ResponseFunctions, call: str, factors: Sequence[str], at: Mapping[str, Any] | None, which: str
) -> tuple[pd.DataFrame, Means, Sequence[Any]]:
    """Return the means of the cells of factors, over the levels of all other categories alike."""
    _names(response, call, factors)
    for name in factors:
        if name not in response.levels and name not in (at or {}):
            raise ModelError(
                f"{call}: {name!r} is a number",
                remedy=Remedy(
                    "{method}(..., at={{{name!r}: [0.0, 1.0]}})", "give values, as in {arguments}"
                ).filled(method=call, name=name),
            )
    frame, _ = grid_rows(response, call, dict(at or {}), tuple(response.levels))
    groups, weights = averages_by(frame[list(factors)])
    if which == "mean" and not response.link:
        return groups, response.means(frame).combined(weights), response.outcomes
    names, linear = response.linear(frame)
    return groups, linear.combined(weights), names


METHODS = {
    "pairwise": "revpairwise",
    "revpairwise": "pairwise",
    "reference": "reference",
    "sequential": "sequential",
}
"""Names of emmeans for pairs of levels, which has two of them the other way round than marginaleffects."""
GRID = "Numbers at their means, and the levels of other categories alike"


def adjusted_means(
    result: Any,
    response: ResponseFunctions,
    factors: str | Sequence[str],
    at: Mapping[str, Any] | None,
    which: str,
) -> EffectEstimates:
    """See :meth:`fedstat.results.CoefficientResults.means`."""
    check_choice("which", which, ("mean", "linear"))
    names = [factors] if isinstance(factors, str) else list(factors)
    groups, found, outcomes = _factor_means(response, "means", names, at, which)
    turned = which == "mean" and bool(response.link)
    how = "averages of linear predictors, transformed" if turned else "averages"
    more: dict[str, Any] = dict(zip(("inverse", "slope"), response.inverse, strict=True)) if turned else {}
    words = EffectWords(
        f"Adjusted means of {', '.join(names)}",
        which,
        f"{GRID}; {how}. Errors by the delta method.",
        null=np.nan,
        **more,
    )
    return _made(result, response, "means", [(groups, found)], words, outcomes=outcomes)


def contrasts(
    result: Any,
    response: ResponseFunctions,
    factor: str,
    method: str,
    by: Any,
    at: Mapping[str, Any] | None,
    which: str,
    adjust: str,
    exponentiate: bool,
) -> EffectEstimates:
    """See :meth:`fedstat.results.CoefficientResults.contrasts`."""
    check_choice("method", method, tuple(METHODS))
    check_choice("which", which, ("mean", "linear"))
    if exponentiate and which == "mean":
        raise ModelError(
            "exponentiate: differences of means are no logarithms",
            remedy=Remedy("contrasts(..., which='linear')", "use {arguments}"),
        )
    within = _groups(response, by)
    cells, found, outcomes = _factor_means(response, "contrasts", [*within, factor], at, which)
    if which == "mean" and response.link:
        found = found.inverse_of(*response.inverse)
    levels = list(dict.fromkeys(cells[factor]))
    if factor in response.levels:
        levels = [level for level in response.levels[factor] if level in levels]
    parts, sign = [], "/" if exponentiate else "-"
    groups = cells[within].drop_duplicates() if within else pd.DataFrame(index=[0])
    pairs = list(PAIRS[METHODS[method]](levels))
    for _, group in groups.iterrows():
        inside = (
            (cells[within] == group).all(axis=1).to_numpy() if within else np.ones(len(cells), dtype=bool)
        )
        place = {level: k for k, level in zip(np.flatnonzero(inside), cells[factor][inside], strict=True)}
        for low, high in pairs:
            difference = compare_means(found.part([place[high]]), found.part([place[low]]), "difference")
            key = {"term": factor, "contrast": f"{_text(high)} {sign} {_text(low)}"}
            parts.append((_keys(key | dict(group), 1), difference))
    J = found.values.shape[1]
    families = np.repeat(np.arange(len(groups)), len(pairs))[:, None] * J + np.arange(J)
    note = f"{GRID}."
    if adjust != "none" and len(pairs) > 1:
        how = "holm; intervals by bonferroni" if adjust == "holm" else adjust
        note += f" Tests and intervals are adjusted for {len(pairs)} comparisons ({how})."
    _, ratio, _ = result._effect_words()
    title = f"Contrasts of {factor}" + (f": {ratio}" if exponentiate else "")
    words = EffectWords(title, "ratio" if exponentiate else "difference", note, 0.0, exponentiate)
    adjustment = Adjustment(adjust, len(levels), tuple(families.ravel().tolist()))
    return _made(result, response, "contrasts", parts, words, adjustment, outcomes)


# -- methods of results ---


class EffectStatements:
    """What follows from the response functions of a fit, which a family gives.

    Examples
    --------
    >>> import fedstat as fs
    >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age * C(sex)", hospitals).fit()
    >>> fit.predictions(by="sex").tidy().round(2)[["sex", "estimate", "conf_low", "conf_high"]]
       sex  estimate  conf_low  conf_high
    0    0      0.24      0.19       0.30
    1    1      0.61      0.58       0.64
    """

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> ResponseFunctions:
        """Return the response functions of the fit; a NotAvailableError says why there are none."""
        raise NotAvailableError(
            f"{call}: it needs means that follow from a linear predictor, and the covariance of its "
            "coefficients; this fit lacks one of the two"
        )

    def predictions(
        self,
        variables: Variables = None,
        *,
        at: Where = None,
        by: str | Sequence[str] | None = None,
        which: Literal["mean", "linear"] = "mean",
        times: Sequence[float] | Floats | None = None,
    ) -> EffectEstimates:
        """Predict means: averages over the rows at the sites, or at a grid of rows that you write.

        They are those of R's and Python's marginaleffects, ``avg_predictions()`` and ``predictions()``.

        Parameters
        ----------
        variables : str, list of str or dict, optional
            Predict with a variable set to each of its levels, or of the values in a dict, in all rows. Over
            the rows at the sites, one variable.
        at : None, "mean", dict or table, optional
            None averages over the rows at the sites, with one masked sum. All others send no request:
            "mean" is one typical row, with means of numbers and the most frequent levels; a dict of
            values by column is a grid of their combinations, where other columns have their typical value; a
            table has rows of your own.
        by : str or list of str, optional
            Average within the levels of a category of the model; of a grid also by several columns.
        which : {"mean", "linear"}
            The mean, such as a probability, or the linear predictor of a grid.
        times : sequence of float, optional
            Times at which survival is predicted, of a Cox model.

        Returns
        -------
        EffectEstimates
            ``tidy()``, ``summary()``, ``plot()``.

        Raises
        ------
        NotAvailableError
            The fit has no such means, or none over the rows at the sites.
        ModelError
            A variable is not in the model, or the mean of a column of the grid is not known.
        DesignError
            A value is outside the bounds of a spline, or a level that the fit does not know.
        PolicyError
            A site refuses, for instance since a level has few rows.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + C(sex)", hospitals).fit()
        >>> fit.predictions(at={"age": [40, 60], "sex": [0, 1]}).tidy().round(2).iloc[:, :4]
           age  sex  estimate  std_error
        0   40    0      0.14       0.02
        1   40    1      0.41       0.03
        2   60    0      0.34       0.04
        3   60    1      0.70       0.02
        """
        check_choice("which", which, ("mean", "linear"))
        return predictions(self, self._response("predictions", times), variables, at, by, which)

    def comparisons(
        self,
        variables: Variables = None,
        *,
        comparison: Literal["difference", "ratio", "lnratio", "lnor", "lift"] = "difference",
        at: Where = None,
        by: str | Sequence[str] | None = None,
        exponentiate: bool = False,
        times: Sequence[float] | Floats | None = None,
    ) -> EffectEstimates:
        """Compare means between two values of a variable, everything else as it is.

        They are those of marginaleffects' ``avg_comparisons()`` and ``comparisons()``: risk differences, risk
        ratios and odds ratios that are adjusted for the other variables. Ratios of several rows are ratios of
        their averages, as of ``"ratioavg"`` there.

        Parameters
        ----------
        variables : str, list of str or dict, optional
            Names; by default all. A dict has, for a number, a step or two values; for a category two levels,
            or "reference", "pairwise", "revpairwise", "sequential" or "all". The default is a step of 1, and
            each level against the reference level.
        comparison : {"difference", "ratio", "lnratio", "lnor", "lift"}
            Difference, ratio, its logarithm, log odds ratio, or ratio less one.
        at, by, times
            As in :meth:`predictions`.
        exponentiate : bool
            Give the exponential of a log ratio or log odds ratio with its limits, such as the odds ratio.

        Returns
        -------
        EffectEstimates

        Raises
        ------
        NotAvailableError, ModelError, DesignError, PolicyError
            As :meth:`predictions`.
        EstimationError
            A comparison is not finite, as a ratio to a mean of zero.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age * C(sex)", hospitals).fit()
        >>> found = fit.comparisons({"sex": [0, 1]}, comparison="lnor", exponentiate=True)
        >>> found.tidy().round(2)[["contrast", "estimate", "conf_low", "conf_high"]]
          contrast  estimate  conf_low  conf_high
        0    1 / 0      4.02      2.81       5.77
        """
        response = self._response("comparisons", times)
        return comparisons(self, response, variables, comparison, at, by, exponentiate)

    def slopes(
        self,
        variables: Variables = None,
        *,
        at: Where = None,
        by: str | Sequence[str] | None = None,
        times: Sequence[float] | Floats | None = None,
    ) -> EffectEstimates:
        """Return derivatives of means by numbers, and differences between levels of categories.

        Derivatives are through all terms, as marginaleffects' ``avg_slopes()`` and ``slopes()``. Averages
        over the rows at the sites are those of ``get_margeff()``, and can be taken by a category.

        Parameters
        ----------
        variables : str, list of str or dict, optional
            Names; by default all. A dict may have pairs of levels of categories, see :meth:`comparisons`.
        at, by, times
            As in :meth:`predictions`.

        Returns
        -------
        EffectEstimates

        Raises
        ------
        NotAvailableError, ModelError, DesignError, PolicyError
            As :meth:`predictions`.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age * C(sex)", hospitals).fit()
        >>> fit.slopes("age", by="sex").tidy().round(3).iloc[:, :4]
          term contrast  sex  estimate
        0  age    dy/dx    0     0.010
        1  age    dy/dx    1     0.013
        """
        return slopes(self, self._response("slopes", times), variables, at, by)

    def means(
        self,
        factors: str | Sequence[str],
        *,
        at: Mapping[str, Any] | None = None,
        which: Literal["mean", "linear"] = "mean",
    ) -> EffectEstimates:
        """Return adjusted means of the levels of a category, as R's emmeans.

        Numbers are at their means, and levels of other categories count alike. With one linear predictor, it
        is averaged and then transformed, as ``emmeans(..., type="response")``. No request is sent.

        Parameters
        ----------
        factors : str or list of str
            Categories, whose levels are combined.
        at : dict, optional
            Values of other columns, by column.
        which : {"mean", "linear"}
            Means, or averages of linear predictors.

        Returns
        -------
        EffectEstimates

        Raises
        ------
        NotAvailableError
            The fit has no such means.
        ModelError
            A column is not in the model or no category, or the mean of a number is not known.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOLS.from_formula("num ~ age + C(sex) + C(cp)", hospitals).fit()
        >>> fit.means("sex").tidy().round(2)[["sex", "estimate", "conf_low", "conf_high"]]
           sex  estimate  conf_low  conf_high
        0    0      0.28      0.14       0.42
        1    1      0.77      0.67       0.87
        """
        return adjusted_means(self, self._response("means"), factors, at, which)

    def contrasts(
        self,
        factor: str,
        *,
        method: Literal["pairwise", "revpairwise", "reference", "sequential"] = "pairwise",
        by: str | Sequence[str] | None = None,
        at: Mapping[str, Any] | None = None,
        which: Literal["mean", "linear"] = "linear",
        adjust: Literal["holm", "bonferroni", "sidak", "tukey", "none"] = "holm",
        exponentiate: bool = False,
    ) -> EffectEstimates:
        """Compare the adjusted means of the levels of a category, with tests adjusted for their number.

        As ``pairs(emmeans(...))`` of R's emmeans. No request is sent.

        Parameters
        ----------
        factor : str
        method : {"pairwise", "revpairwise", "reference", "sequential"}
            Pairs of levels, with the names of emmeans: the earlier less the later one ("pairwise"), the later
            less the earlier one, each less the reference level, or each less the one before.
        by : str or list of str, optional
            Compare within the levels of other categories; each is a family of tests.
        at : dict, optional
            Values of other columns, by column.
        which : {"mean", "linear"}
            Differences of linear predictors, such as log odds, or of means.
        adjust : {"holm", "bonferroni", "sidak", "tukey", "none"}
            Adjustment of p-values and intervals; intervals with Holm's method are those of Bonferroni.
        exponentiate : bool
            Give exponentials of differences of linear predictors, such as odds ratios.

        Returns
        -------
        EffectEstimates

        Raises
        ------
        NotAvailableError, ModelError
            As :meth:`means`.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOLS.from_formula("num ~ age + C(sex) + C(cp)", hospitals).fit()
        >>> fit.contrasts("cp").tidy().round(3)[["contrast", "estimate", "p_value"]].head(3)
          contrast  estimate  p_value
        0    1 - 2    -0.187    0.255
        1    1 - 3    -0.360    0.070
        2    1 - 4    -1.151    0.000
        """
        response = self._response("contrasts")
        return contrasts(self, response, factor, method, by, at, which, adjust, exponentiate)


def no_times(call: str, times: object) -> None:
    """Refuse times of survival in a model of another response."""
    if times is not None:
        raise ModelError(f"{call}: times: this model predicts no survival; leave the argument out")
