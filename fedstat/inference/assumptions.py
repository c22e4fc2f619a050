"""Tests of a model's assumptions that run with the fit: one rule for what the summary says of each.

A family names its assumptions as :class:`Assumption` and computes one :class:`Outcome` of each with the fit,
or the reason why there is none. The note that follows is kept with the results (``notes`` of the record), so
that files and everything that is made from the results have it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedstat.errors import PolicyError, Remedy
from fedstat.inference.notes import Note
from fedstat.inference.tables import show_probability
from fedstat.typing import Floats

ALARM, DOUBT = 0.01, 0.05
"""Levels of a test below which an assumption is announced above the summary, and is doubted below it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Statistic of a test, degrees of freedom, p-value, and the term that departs most, if known."""

    statistic: float
    df: float
    p_value: float
    where: str = ""

    def __str__(self) -> str:
        return f"{self.statistic:.1f} on {self.df:.3g} df, p {show_probability(self.p_value)}"


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption that is tested with the fit, and the words of its note.

    Parameters
    ----------
    kind : str
        Kind of the note.
    test : str
        Name of the test, such as ``"score test of x log(t)"``.
    violated : str
        First words if the test rejects at the level of an alarm, in capitals.
    assumed : str
        A sentence on what is assumed, without its full stop.
    consequence : str
        What the numbers of the fit are if the assumption is wrong, as sentences.
    remedy : Remedy
        What to do, as a sentence, and its call.
    """

    kind: str
    test: str
    violated: str
    assumed: str
    consequence: str
    remedy: Remedy

    def note(self, outcome: Outcome | str) -> Note:
        """Return the note on the outcome of the test, or on the reason why the test was not made."""
        if isinstance(outcome, str):
            text = "{assumed}. The {test} was not made: {reason}."
            values: dict[str, str | int | float] = {"test": self.test, "reason": outcome.rstrip(".")}
            return Note(self.kind, text, "info", values | {"assumed": self.assumed})
        consequence = f"{self.consequence} {self.remedy.sentence()}"
        values = {
            "test": self.test,
            "result": str(outcome),
            "statistic": outcome.statistic,
            "df": outcome.df,
            "p_value": outcome.p_value,
            "where": f", most of all for {outcome.where}" if outcome.where else "",
        }
        if outcome.p_value < DOUBT:
            values["call"] = self.remedy.call
        if outcome.p_value < ALARM:
            text = f"{self.violated}: {{test}} {{result}}{{where}}. {consequence}"
            return Note(self.kind, text, "critical", values)
        if outcome.p_value < DOUBT:
            text = f"{self.assumed}. The {{test}} casts doubt on it: {{result}}{{where}}. {consequence}"
            return Note(self.kind, text, "warning", values)
        return Note(
            self.kind, f"{self.assumed}. The {{test}} does not contradict it: {{result}}.", "info", values
        )


SINGULAR = "the rows do not determine it, as with few events or rows for each coefficient"
LEAST_EIGENVALUE = 1e-8
"""Of the correlation matrix of scores, below which some of them follow from the others."""
NOT_REQUESTED = "it was not requested (check_assumptions=False)"


def reason_of(refusal: PolicyError) -> str:
    """Return why a test was not made, from the refusal of a site."""
    who = f"the policy of {refusal.site!r}" if refusal.site else "the policy of a site"
    return f"{who} refuses it" + (f" ({refusal.rule})" if refusal.rule else "")


def score_outcome(score: Floats, information: Floats, terms: Sequence[str] = ()) -> Outcome | str:
    """Test that a score (d,) is zero, given its covariance (d, d).

    With the `terms` (d,) of its entries, `where` is the term with the smallest p-value, if there are several.
    Returns the reason if the covariance is not positive definite.
    """
    size = np.sqrt(np.maximum(np.diag(information), 0.0))
    if not (np.isfinite(score).all() and np.isfinite(information).all() and (size > 0.0).all() and len(size)):
        return SINGULAR
    z, R = score / size, information / np.outer(size, size)
    if np.linalg.eigvalsh(R)[0] < LEAST_EIGENVALUE:
        return SINGULAR

    def p_value(places: Sequence[int]) -> tuple[float, float]:
        part = z[list(places)]
        statistic = float(part @ np.linalg.solve(R[np.ix_(places, places)], part))
        return statistic, float(stats.chi2.sf(statistic, len(places)))

    by_term = {
        term: p_value([k for k, one in enumerate(terms) if one == term])[1] for term in dict.fromkeys(terms)
    }
    where = min(by_term, key=by_term.__getitem__) if len(by_term) > 1 else ""
    statistic, p = p_value(range(len(z)))
    return Outcome(statistic, float(len(z)), p, where)
