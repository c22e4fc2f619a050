"""Tests of linear hypotheses ``R theta = q`` from an estimate and its covariance.

Results are statsmodels' ``ContrastResults`` and ``WaldTestResults``, so they print and export in the form
that analysts know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from formulaic.errors import FormulaSyntaxError
from formulaic.utils.constraints import LinearConstraints
from numpy.typing import ArrayLike
from scipy import stats
from statsmodels.stats.contrast import ContrastResults, WaldTestResults

from fedstat.errors import FedstatWarning, ModelError, NotAvailableError, warn
from fedstat.inference.covariance import delta_method
from fedstat.inference.likelihood import format_test
from fedstat.inference.tables import Exported, SheetSummary, frame_summary
from fedstat.spline_names import close_names, short_names, spellings
from fedstat.typing import Floats, Ints

Hypothesis: TypeAlias = str | Sequence[str] | ArrayLike | tuple[ArrayLike, ArrayLike]
"""``"a = b"``, ``"a = b, c = 0"``, ``["a = b", "c = 0"]``, a matrix R (q = 0), or the pair (R, q)."""

EXPONENT = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)[eE][+-]?\d+")
PLACEHOLDER = re.compile(r"(?<!\w)_(\d+)_(?!\w)")
SIGN = re.compile(r"([=,(]\s*)([+-])")
OPERAND = re.compile(r"[+*/=,]|\s-\s")
LETTER = re.compile(r"[^\W\d]")


class HypothesisTest(ContrastResults):  # type: ignore[misc]
    """statsmodels' results of a test, printed with few digits, in the same form at a prompt and in a text."""

    def summary(self, xname: list[str] | None = None, alpha: float = 0.05, title: str | None = None) -> Any:
        """Table of the constraints one by one, or text of their joint test."""
        if self.effect is not None:
            return super().summary(xname, alpha, title)
        f_law = self.distribution == "F"
        df = {"df_num": self.df_num, "df_denom": self.df_denom} if f_law else {"df": self.df_denom}
        values = {"statistic": float(self.statistic), "pvalue": float(self.pvalue), **df}
        return format_test(title or f"Wald test ({'F' if f_law else 'chi-squared'})", values)

    def __repr__(self) -> str:
        return str(self)


class TermTests(Exported, WaldTestResults):  # type: ignore[misc]
    """statsmodels' table of tests of terms, which prints with few digits."""

    def _printed(self) -> SheetSummary:
        return frame_summary(self.summary_frame())

    def __str__(self) -> str:
        frame = self.summary_frame()
        # A term has no column number, which short_names() needs.
        terms = short_names([f"{term}[0]" for term in frame.index])
        shown = frame.set_axis([term.removesuffix("[0]") for term in terms])
        return str(shown.to_string(float_format="{:.4g}".format))

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """Linear constraints ``R theta = q``: R (m, d), q (m,), and how each is printed."""

    R: Floats
    q: Floats
    labels: tuple[str, ...]


def read_constraints(hypothesis: Hypothesis, names: Sequence[str]) -> Constraints:
    """Read a hypothesis about the coefficients; see `Hypothesis`.

    Coefficients are written as they are printed, such as ``Sex[T.male]``, ``C(Race)[T.Other White]``,
    ``np.log(x)`` or ``a:b``. Raises ModelError if a name is not a coefficient, the text is not linear, or a
    shape does not match.
    """
    if isinstance(hypothesis, str):
        return _read_text(hypothesis, names)
    if isinstance(hypothesis, Sequence) and hypothesis and all(isinstance(h, str) for h in hypothesis):
        return _read_text(", ".join(str(h) for h in hypothesis), names)
    R, q = hypothesis if isinstance(hypothesis, tuple) and len(hypothesis) == 2 else (hypothesis, 0.0)
    return _read_arrays(R, q, names)


DegreesOfFreedom: TypeAlias = float | Floats | None
"""Of Student's t, for all coefficients or by coefficient (d,); None for normal tests."""


def df_of(R: Floats, df: DegreesOfFreedom) -> DegreesOfFreedom:
    """Return the degrees of freedom of each constraint (m,): the fewest of the coefficients in it."""
    if df is None or np.ndim(df) == 0:
        return df
    by_coefficient = np.asarray(df, dtype=float)
    # A difference of two estimates is about as uncertain as the worse of them.
    return np.array([by_coefficient[row != 0.0].min(initial=np.inf) for row in np.atleast_2d(R)])


def t_test(
    params: Floats, cov: Floats, constraints: Constraints, *, df: DegreesOfFreedom = None
) -> ContrastResults:
    """Test each constraint on its own for params (d,) with cov (d, d): normal, or t with `df`.

    A constraint on a coefficient without a variance gives nan; the others are not affected.
    """
    df = df_of(constraints.R, df)
    effect = constraints.R @ params
    with np.errstate(invalid="ignore", divide="ignore"):
        sd = np.sqrt([_covariance(row[None, :], cov)[0, 0] for row in constraints.R])
        z = (effect - constraints.q) / sd
    if df is None:
        result = HypothesisTest(effect=effect, statistic=z, sd=sd, distribution="norm")
    else:
        result = HypothesisTest(effect=effect, t=z, sd=sd, df_denom=df)
    result.c_names = list(constraints.labels)
    return result


def wald_test(
    params: Floats, cov: Floats, constraints: Constraints, *, df: DegreesOfFreedom = None
) -> ContrastResults:
    """Wald test of all constraints together: chi-squared, or F with `df` in the denominator.

    With `df` by coefficient, those of clusters, m constraints are tested by Hotelling's T-squared with the
    fewest df of their coefficients: F is Wald's statistic times (df - m + 1) / (df m), with df - m + 1 in the
    denominator (Pustejovsky and Tipton 2018, equation 14). It is nan where these are not positive.

    Warns if the constraints' covariance is not of full rank; the test then has fewer degrees of freedom.
    Raises NotAvailableError for a coefficient without a variance.
    """
    V = _covariance(constraints.R, cov)
    if np.isnan(V).any():
        raise NotAvailableError(
            f"no Wald test of {'; '.join(constraints.labels)}: the covariance of these coefficients is not "
            "determined (nan); see the notes of the summary, and test coefficients that have a standard error"
        )
    # Redundant constraints count once.
    rank = _rank(V, constraints)
    difference = constraints.R @ params - constraints.q
    W = float(difference @ np.linalg.pinv(V) @ difference)
    if df is not None and np.ndim(df):
        fewest = float(np.min(np.asarray(df_of(constraints.R, df), dtype=np.float64)))
        rest = fewest - rank + 1.0
        if rest <= 0.0:
            return HypothesisTest(F=np.nan, df_num=rank, df_denom=np.nan)
        return HypothesisTest(F=W * rest / (fewest * rank), df_num=rank, df_denom=rest)
    if df is not None:
        return HypothesisTest(F=W / rank, df_num=rank, df_denom=df)
    return HypothesisTest(statistic=W, df_denom=rank, distribution="chi2", dist_args=(rank,))


def wald_test_terms(
    params: Floats,
    cov: Floats,
    names: Sequence[str],
    terms: Sequence[str],
    *,
    skip_single: bool = False,
    combine_terms: Sequence[str] = (),
    df: DegreesOfFreedom = None,
) -> WaldTestResults:
    """Wald test of every term of the formula: all of its coefficients are zero; `df` as in `wald_test`.

    `names` and `terms` are those of each coefficient. `skip_single` leaves out the terms with one
    coefficient; each text of `combine_terms` adds a test of all terms that contain it.
    """
    term_of = np.asarray(terms, dtype=object)
    groups = [(term, np.flatnonzero(term_of == term)) for term in dict.fromkeys(terms)]
    if skip_single:
        groups = [(term, members) for term, members in groups if len(members) > 1]
    groups += [(text, np.flatnonzero([text in term for term in terms])) for text in combine_terms]
    tests = [_zero_test(params, cov, names, members, term, df) for term, members in groups]
    # For a chi-squared test, statsmodels stores the degrees of freedom as those of the denominator.
    table = pd.DataFrame(
        [(t.statistic, float(t.pvalue), int(t.df_denom if df is None else t.df_num)) for t in tests],
        index=[term for term, _ in groups],
        columns=["statistic", "pvalue", "df_constraint"],
    )
    if df is None:
        return TermTests(None, "chi2", None, table=table)
    return TermTests(None, "F", None, table=table.assign(df_denom=[float(t.df_denom) for t in tests]))


def given_terms(
    params: Floats,
    cov: Floats,
    terms: Sequence[str],
    larger: Mapping[str, Sequence[str]],
    *,
    df: DegreesOfFreedom = None,
) -> TermTests:
    """Wald tests of terms, each given all others but those that are `larger`, by term.

    The statistic is that of the term with the larger ones less that of the larger ones: the part of the
    hypothesis that is orthogonal to them under the covariance (Fox and Weisberg, An R Companion to Applied
    Regression, 2019, as ``car::Anova``).
    """
    term_of, rows = np.asarray(terms, dtype=object), list[tuple[float, ...]]()
    for term, above in larger.items():
        inside = [np.flatnonzero(np.isin(term_of, names)) for names in ([term, *above], list(above))]
        both, rest = (_wald(params, cov, members) for members in inside)
        count = len(inside[0]) - len(inside[1])
        if df is None:
            rows.append((both - rest, float(stats.chi2.sf(both - rest, count)), count))
            continue
        fewest = float(df if np.ndim(df) == 0 else np.asarray(df)[inside[0]].min())
        F = (both - rest) / count
        rows.append((F, float(stats.f.sf(F, count, fewest)), count, fewest))
    columns = ["statistic", "pvalue", "df_constraint", *(["df_denom"] if df is not None else [])]
    table = pd.DataFrame(rows, index=list(larger), columns=columns)
    table["df_constraint"] = table["df_constraint"].astype(int)
    return TermTests(None, "chi2" if df is None else "F", None, table=table)


def _wald(params: Floats, cov: Floats, members: Ints) -> float:
    """Return Wald's statistic of coefficients that are zero; 0 for none."""
    V = cov[np.ix_(members, members)]
    if np.isnan(V).any():
        return float("nan")
    return float(params[members] @ np.linalg.pinv(V, hermitian=True) @ params[members])


def _zero_test(
    params: Floats, cov: Floats, names: Sequence[str], members: ArrayLike, term: str, df: DegreesOfFreedom
) -> ContrastResults:
    index = np.asarray(members, dtype=np.int64)
    if index.size == 0:
        raise ModelError(f"combine_terms: no term of the model contains {term!r}")
    R = np.eye(len(names))[index]
    return wald_test(params, cov, Constraints(R, np.zeros(len(R)), (f"{term} = 0",)), df=df)


def _covariance(R: Floats, cov: Floats) -> Floats:
    """Compute R V R'; nan in columns that R does not use has no effect."""
    used = R.any(axis=0)
    return delta_method(cov[np.ix_(used, used)], R[:, used])


def _rank(V: Floats, constraints: Constraints) -> int:
    rank = int(np.linalg.matrix_rank(V, hermitian=True))
    if rank == 0:
        raise NotAvailableError(f"no Wald test of {'; '.join(constraints.labels)}: it has no variance")
    if rank < len(V):
        warn(
            f"the {len(V)} constraints {'; '.join(constraints.labels)} have a covariance of rank {rank}: "
            f"tested with {rank} degrees of freedom",
            FedstatWarning,
        )
    return rank


def _read_text(text: str, names: Sequence[str]) -> Constraints:
    # formulaic has its own rules for names and numbers, so ours are replaced by placeholders.
    coded = _code_numbers(_code_names(text, names))
    # The remaining letters are a name that is not a coefficient; formulaic would report a syntax error.
    for operand in OPERAND.split(coded):
        if LETTER.search(PLACEHOLDER.sub("", operand)):
            raise ModelError(_unknown_message(text, _decode(operand, names).strip(" `-").lstrip("("), names))
    try:
        read = LinearConstraints.from_spec(coded, variable_names=[f"_{i}_" for i in range(len(names))])
    except (FormulaSyntaxError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"expected linear constraints such as 'a = b, 2 * c = 1', received {text!r}"
        ) from error
    shown = short_names(names)
    labels = tuple(_decode(part, shown).strip() for part in _code_names(text, names).split(","))
    return _checked(read.constraint_matrix, read.constraint_values, names, labels)


def _read_arrays(R: Any, q: Any, names: Sequence[str]) -> Constraints:
    R = np.atleast_2d(np.asarray(R, dtype=np.float64))
    labels = tuple(_row_label(row, i, names) for i, row in enumerate(R))
    return _checked(R, np.asarray(q, dtype=np.float64), names, labels)


def _checked(R: Floats, q: Floats, names: Sequence[str], labels: tuple[str, ...]) -> Constraints:
    if R.ndim != 2 or R.shape[1] != len(names) or not R.any(axis=1).all():
        raise ModelError(
            f"expected a hypothesis matrix with {len(names)} columns, one per coefficient, and no row of "
            f"zeros; received shape {R.shape}"
        )
    if q.ravel().shape[0] not in (1, len(R)):
        raise ModelError(f"expected one value per constraint ({len(R)}), received {q.ravel().shape[0]}")
    if len(labels) != len(R):
        labels = tuple(f"c{i}" for i in range(len(R)))
    return Constraints(R, np.broadcast_to(q.ravel(), len(R)).astype(np.float64), labels)


def _row_label(row: Floats, i: int, names: Sequence[str]) -> str:
    used = np.flatnonzero(row)
    return names[used[0]] if len(used) == 1 and row[used[0]] == 1.0 and len(row) == len(names) else f"c{i}"


def _code_names(text: str, names: Sequence[str]) -> str:
    """Replace the i-th name by ``_i_``: names may contain operators, brackets and commas."""
    spelled: dict[str, int] = {}
    for way in (short_names(names), names):
        for i, name in enumerate(way):
            spelled |= dict.fromkeys(spellings(name), i)
    # A name as it is printed comes before another one in a different order of its factors.
    spelled |= {spellings(name)[0]: i for i, name in enumerate(names)}
    # `a:b` before `a`, otherwise the shorter name would be found inside the longer one.
    ordered = sorted(spelled, key=len, reverse=True)
    # One group in each alternative: the group that matches names the coefficient.
    pattern = re.compile(rf"(`?)(?<![\w.:])(?:{'|'.join(f'({one})' for one in ordered)})\1(?![\w\[(.:])")
    return pattern.sub(lambda match: f"_{spelled[ordered[(match.lastindex or 0) - 2]]}_", text)


def _decode(text: str, names: Sequence[str]) -> str:
    return PLACEHOLDER.sub(lambda match: names[int(match[1])], text)


def _code_numbers(text: str) -> str:
    """Write 1e-3 as 0.001 and ``= -1`` as ``= 0 - 1``, which formulaic can parse."""
    plain = EXPONENT.sub(lambda match: format(Decimal(match[0]), "f"), text)
    return SIGN.sub(r"\1 0 \2", plain)


def _unknown_message(text: str, name: str, names: Sequence[str]) -> str:
    close = close_names(name, names)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are: {', '.join(names)}"
    return f"the hypothesis {text!r} names {name!r}, which is not a coefficient; {hint}"
