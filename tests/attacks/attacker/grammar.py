"""Analyses that an analyst may request, with the terms of the sums that their results are made of.

The terms are written here from the formulas of statistics, and not taken from what the package declares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pandas as pd
import statsmodels.api as sm
from formulaic import model_matrix

import fedstat as fs
from fedstat.typing import Bools, Floats

SIMPLE = ("a", "b", "x", "g", "h", "s", "z", "u", "c", "m", "amount")
PRODUCTS = ("a:z", "b:z", "a:b", "a:b:z", "x:z", "a:x", "g:z", "a:u", "a:c", "h:z", "s:z", "a:amount")
CURVES = ("C(x)", "I(z**2)", "I(x**2)", "I(s**2)", "C(s)", "I(a*z)", "I(z*u)")
ANSWERS = ("y", "z", "u", "m")
GROUPS = ("a", "b", "g", "h", "x")
FAMILIES = {"binomial": sm.families.Binomial(), "poisson": sm.families.Poisson()}
STEPS = 4


@dataclass(frozen=True, eq=False)
class Analysis:
    """A request, as text for a report; how it is run; and the terms (n, d) of its sums at one site."""

    text: str
    run: Callable[[fs.ClientPartition], Any]
    terms: Callable[[pd.DataFrame], Floats]
    levels: Callable[[pd.DataFrame], Floats] = lambda table: np.zeros((len(table), 0))
    """Indicators of a model (n, L): counts of two of them follow by subtraction, and are tolerated."""


def indicators_of(terms: list[str], answer: str) -> Callable[[pd.DataFrame], Floats]:
    """Return the function of a table that gives the columns of zeros and ones of a design."""

    def levels(table: pd.DataFrame) -> Floats:
        X = design_of(terms, answer, table)
        return X[:, ((X == 0.0) | (X == 1.0)).all(axis=0)]

    return levels


def draw_analysis(rng: np.random.Generator) -> Analysis:
    """Draw an analysis of a random kind."""
    kinds = (
        linear,
        linear,
        weighted,
        robust,
        general,
        table,
        crossed,
        correlated,
        categories,
        boosted,
        curve,
    )
    return kinds[int(rng.integers(len(kinds)))](rng)


def draw_terms(rng: np.random.Generator, most: int = 3, without: str = "") -> list[str]:
    """Draw terms of a formula that do not have the response."""
    pool = [*SIMPLE, *SIMPLE, *PRODUCTS, *PRODUCTS, *CURVES]
    pool = [term for term in dict.fromkeys(pool) if without not in {*variables(term)} or not without]
    return list(rng.choice(pool, int(rng.integers(1, most + 1)), replace=False))


def variables(term: str) -> list[str]:
    """Return the columns of a term."""
    for mark in ("C(", "I(", ")", "**2"):
        term = term.replace(mark, "")
    return term.replace("*", ":").split(":")


def rows_of(table: pd.DataFrame, *names: str) -> Bools:
    """Return the rows that an analysis of these columns uses: complete ones without those left out."""
    complete = table[list(names)].notna().all(axis=1).to_numpy()
    leave_out = table.attrs.get("leave out")
    return complete if leave_out is None else leave_out(complete, names)


def design_of(terms: list[str], answer: str, table: pd.DataFrame) -> Floats:
    """Return intercept, terms and response (n, p), with zeros in rows that are not used."""
    used = [*dict.fromkeys([answer, *(name for term in terms for name in variables(term))])]
    complete = rows_of(table, *used)
    matrix = np.asarray(model_matrix("1 + " + " + ".join(terms), table[complete], na_action="raise"))
    out = np.zeros((len(table), matrix.shape[1] + 1))
    out[complete] = np.column_stack([matrix, table.loc[complete, answer].to_numpy(dtype=float)])
    return out


def products(X: Floats, weight: Floats | None = None) -> Floats:
    """Return all products of two columns, (n, p (p + 1) / 2)."""
    pairs = list(combinations_with_replacement(range(X.shape[1]), 2))
    out = np.column_stack([X[:, i] * X[:, j] for i, j in pairs])
    return out if weight is None else out * weight[:, None]


def linear(rng: np.random.Generator) -> Analysis:
    """Ordinary least squares: all products of columns."""
    answer = str(rng.choice(ANSWERS))
    terms = draw_terms(rng, without=answer)
    formula = f"{answer} ~ {' + '.join(terms)}"
    return Analysis(
        f"OLS {formula}",
        lambda partition: fs.FederatedOLS.from_formula(formula, partition).fit(),
        lambda table: products(design_of(terms, answer, table)),
        indicators_of(terms, answer),
    )


def weighted(rng: np.random.Generator) -> Analysis:
    """Weighted least squares: products times weights, and sums of the weights' logarithms."""
    answer, weight = str(rng.choice(ANSWERS)), str(rng.choice(["w", "u", "z"]))
    terms = draw_terms(rng, 2, without=answer)
    formula = f"{answer} ~ {' + '.join(terms)}"

    def sums(table: pd.DataFrame) -> Floats:
        X = design_of(terms, answer, table)
        return products(X, table[weight].to_numpy())

    return Analysis(
        f"OLS {formula}, weights {weight}",
        lambda partition: fs.FederatedOLS.from_formula(formula, partition, var_weights=weight).fit(),
        sums,
    )


def robust(rng: np.random.Generator) -> Analysis:
    """Robust errors: products times squared residuals, too."""
    answer = str(rng.choice(ANSWERS))
    terms = draw_terms(rng, 2, without=answer)
    formula = f"{answer} ~ {' + '.join(terms)}"

    def sums(table: pd.DataFrame) -> Floats:
        X = design_of(terms, answer, table)
        beta = np.linalg.lstsq(X[:, :-1], X[:, -1], rcond=None)[0]
        residual = X[:, -1] - X[:, :-1] @ beta
        return np.hstack([products(X), products(X[:, :-1], residual**2)])

    return Analysis(
        f"OLS {formula}, HC0",
        lambda partition: fs.FederatedOLS.from_formula(formula, partition).fit(cov_type="HC0"),
        sums,
        indicators_of(terms, answer),
    )


def general(rng: np.random.Generator) -> Analysis:
    """Generalized linear models: scores and information along Newton's steps."""
    family = str(rng.choice(list(FAMILIES)))
    answer = str(rng.choice(["a", "e"] if family == "binomial" else ["s", "x", "e"]))
    terms = draw_terms(rng, 2, without=answer)
    formula = f"{answer} ~ {' + '.join(terms)}"

    def sums(table: pd.DataFrame) -> Floats:
        X = design_of(terms, answer, table)
        X, y, there = X[:, :-1], X[:, -1], X[:, 0]
        scale = np.maximum(X.std(axis=0), 1e-9)
        scale[0] = 1.0
        beta, out = np.zeros(X.shape[1]), []
        for _ in range(STEPS):
            eta = np.clip(X / scale @ beta, -8.0, 8.0)
            mu = 1.0 / (1.0 + np.exp(-eta)) if family == "binomial" else np.exp(eta)
            W = mu * (1.0 - mu) if family == "binomial" else mu
            out += [products(X, W), X * (y - mu)[:, None]]
            Z = X / scale
            step = np.linalg.lstsq(Z.T @ (Z * W[:, None]), Z.T @ ((y - mu) * there), rcond=1e-10)[0]
            beta = beta + np.clip(step, -2.0, 2.0)
        return np.hstack(out)

    return Analysis(
        f"GLM {family} {formula}",
        lambda partition: fs.FederatedGLM.from_formula(formula, partition, family=FAMILIES[family]).fit(),
        sums,
        indicators_of(terms, answer),
    )


def table(rng: np.random.Generator) -> Analysis:
    """Table one: counts, sums and squares by group; counts of levels by group."""
    by = str(rng.choice(["", *GROUPS]))
    names = [*rng.choice(["z", "u", "m", "c", "amount", "C(g)", "C(x)", "C(h)"], 2, replace=False)]
    names = [name for name in names if by not in variables(name) or not by]
    formula = " + ".join(names)
    shown: list[tuple[str, str, str]] = []  # group, column and level of the counts that are not hidden

    def run(partition: fs.ClientPartition) -> Any:
        shown.clear()
        found = fs.table_one(partition, formula, **({"by": by} if by else {}))
        for one in found.variables:
            if one.counts is not None:
                where = np.argwhere(np.isfinite(one.counts)).tolist()
                shown.extend((found._labels[i] if by else "", one.name, one.levels[j]) for i, j in where)
        return found

    def sums(frame: pd.DataFrame) -> Floats:
        groups = indicators(frame[by]) if by else np.ones((len(frame), 1))
        out = []
        for name in names:
            column = frame[variables(name)[0]]
            there = rows_of(frame, str(column.name), *([by] if by else [])) * 1.0
            if name.startswith("C("):
                out.append(groups * there[:, None])
                of_group = frame[by].astype(str) if by else None
                for group, other, level in shown:
                    if other == column.name:
                        inside = 1.0 if of_group is None else (of_group == group).to_numpy() * 1.0
                        of_level = (column.astype(str) == level).to_numpy()
                        out.append((there * inside * of_level)[:, None])
            else:
                value = column.fillna(0.0).to_numpy() * there
                out += [groups * part[:, None] for part in (there, value, value**2)]
        return np.hstack(out)

    return Analysis(
        f"table_one {formula} by {by or 'nothing'}",
        run,
        sums,
    )


def indicators(column: pd.Series) -> Floats:
    """Return the indicators of the levels of a column, (n, J)."""
    return np.column_stack([(column == level) * 1.0 for level in sorted(column.unique())])


def crossed(rng: np.random.Generator) -> Analysis:
    """Cells of two columns; the shown ones alone, since small cells are suppressed."""
    row, column = (str(name) for name in rng.choice(["a", "b", "g", "h", "x", "e"], 2, replace=False))
    shown: list[tuple[Any, Any]] = []

    def run(partition: fs.ClientPartition) -> Any:
        shown.clear()
        found = fs.crosstab(partition, row, column)
        shown.extend((r, k) for r in found.index for k in found.columns if pd.notna(found.loc[r, k]))
        return found

    def sums(frame: pd.DataFrame) -> Floats:
        there = rows_of(frame, row, column) * 1.0
        cells = [((frame[row] == r) & (frame[column] == k)).to_numpy() * there for r, k in shown]
        return np.column_stack([there, *cells])

    return Analysis(f"crosstab {row} {column}", run, sums)


def correlated(rng: np.random.Generator) -> Analysis:
    """Correlations: products of columns over complete rows."""
    names = [str(name) for name in rng.choice(["z", "u", "m", "c", "amount", "s"], 3, replace=False)]

    def sums(frame: pd.DataFrame) -> Floats:
        there = rows_of(frame, *names) * 1.0
        return products(np.column_stack([there, frame[names].fillna(0.0).to_numpy() * there[:, None]]))

    return Analysis(
        f"corr {' + '.join(names)}", lambda partition: fs.corr(partition, " + ".join(names)), sums
    )


def categories(rng: np.random.Generator) -> Analysis:
    """Ordinal and multinomial models: at the start, sums of columns by category, and products of columns."""
    name = str(rng.choice(["FederatedOrdinal", "FederatedMultinomial"]))
    answer = str(rng.choice(["x", "g"])) if name == "FederatedMultinomial" else "x"
    terms = draw_terms(rng, 2, without=answer)
    left = f"C({answer})" if name == "FederatedMultinomial" else answer
    formula = f"{left} ~ {' + '.join(terms)}"

    def sums(frame: pd.DataFrame) -> Floats:
        X = design_of(terms, "y", frame)[:, :-1]
        by = [X * level[:, None] for level in indicators(frame[answer]).T]
        return np.hstack([*by, products(X)])

    of_terms = indicators_of(terms, "y")
    return Analysis(
        f"{name} {formula}",
        lambda partition: getattr(fs, name).from_formula(formula, partition).fit(),
        sums,
        lambda frame: np.hstack([of_terms(frame), indicators(frame[answer])]),
    )


def boosted(rng: np.random.Generator) -> Analysis:
    """Boosting of linear learners: products of columns."""
    answer = str(rng.choice(ANSWERS))
    names = [n for n in rng.choice(["a", "b", "x", "z", "u", "c", "s"], 3, replace=False) if n != answer]
    formula = f"{answer} ~ {' + '.join(names)}"
    return Analysis(
        f"boost {formula}",
        lambda partition: fs.FedFunctionBoost.from_formula(formula, partition).fit(steps=5),
        lambda frame: products(design_of(names, answer, frame)),
        indicators_of(names, answer),
    )


def curve(rng: np.random.Generator) -> Analysis:
    """Survival curves: rows and events by group, in total."""
    by = str(rng.choice(["1", *GROUPS]))
    formula = f"Surv(t, e) ~ {by}"

    def sums(frame: pd.DataFrame) -> Floats:
        there = rows_of(frame, "t", "e", *([] if by == "1" else [by]))
        groups = there[:, None] * (np.ones((len(frame), 1)) if by == "1" else indicators(frame[by]))
        return np.hstack([groups, groups * frame["e"].to_numpy()[:, None]])

    return Analysis(
        f"KaplanMeier {formula}",
        lambda partition: fs.KaplanMeier.from_formula(formula, partition).fit(grid=3, until=12),
        sums,
    )
