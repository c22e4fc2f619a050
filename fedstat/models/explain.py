"""From a model and the arguments of a fit to an account of what the fit would ask for."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

import pandas as pd

from fedstat.errors import FedstatWarning, NotAvailableError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.door.policy import Refusal
from fedstat.federation.forecast.adversary import who_learns
from fedstat.federation.forecast.forecast import Forecast, Planned
from fedstat.federation.forecast.rehearsal import Answers, Course, Rehearsal, Rehearsed
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Engine
from fedstat.inference.explanation import Explanation


class Plan(Protocol):
    """What a family knows of its own fits.

    Attributes
    ----------
    lengths : tuple of int
        Iterations of a short, the expected and a long fit; all the same where the number is fixed.
    """

    lengths: tuple[int, int, int]

    @property
    def guessed(self) -> frozenset[str]:
        """Steps whose shapes are not known in advance."""

    def answers(self, length: int) -> Answers:
        """How stand-ins answer in a fit of so many iterations."""

    def arguments(self, length: int) -> Mapping[str, Any]:
        """Arguments of a fit that has so many iterations."""

    def dealers(self) -> Mapping[tuple[str, str], str]:
        """Who deals for the secure products of the last rehearsal."""

    def learned(self, course: Course) -> Iterator[tuple[str, str]]:
        """Say what else who could learn."""

    def notes(self) -> Iterator[str]:
        """How the number of iterations is guessed, and what cannot be told."""


def settled(fit: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a fit with its defaults.

    Raises
    ------
    TypeError
        The fit has no such argument.
    """
    bound = inspect.signature(fit).bind(**arguments)
    bound.apply_defaults()
    return dict(bound.arguments)


class Explainable:
    """A model that says what its fit would ask for; its family names the plan of its fits."""

    partition: ClientPartition
    engine: Engine
    fit: Callable[..., Any]
    _plan: ClassVar[type[Any] | None] = None

    def explain(self, **arguments: Any) -> Explanation:
        """Say what :meth:`fit` would ask for and what would leave each institution, and ask nothing.

        Parameters
        ----------
        **arguments
            As for :meth:`fit`.

        Returns
        -------
        Explanation
            What would be refused, rounds and bytes, every array with the rules that it meets, and who could
            learn what.

        Raises
        ------
        NotAvailableError
            The family cannot tell.
        """
        if self._plan is None:
            raise NotAvailableError(
                f"no forecast for {type(self).__name__}: fit, and look at result.ledger.releases()"
            )
        return explain_fit(self, self._plan(self, self.fit, arguments), arguments)


def explain_fit(model: Explainable, plan: Plan, arguments: Mapping[str, Any]) -> Explanation:
    """Rehearse a fit, and say what it would ask for.

    Parameters
    ----------
    model : model
    plan : Plan
    arguments : mapping of str to object
        Of the fit.
    """
    unique = dict.fromkeys(plan.lengths)
    found = {length: rehearse(model, plan, length, arguments) for length in unique}
    forecast = Forecast(tuple(found[length] for length in plan.lengths))
    course, planned = forecast.expected, forecast.planned()
    learned = [*who_learns(planned, course.at, course.n_masked, plan.dealers()), *plan.learned(course)]
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return Explanation(
        call=f"{type(model).__name__}.fit({call})",
        table=as_table(planned, course.at, plan.guessed),
        rounds=[(", ".join(steps), counts) for steps, counts in forecast.rounds()],
        refused={site: by_rule(found) for site, found in forecast.refusals().items()},
        learned=learned,
        notes=[*plan.notes(), *earlier_note(course)],
    )


def rehearse(model: Explainable, plan: Plan, length: int, arguments: Mapping[str, Any]) -> Course:
    """Carry a fit's own questions to stand-ins.

    Raises
    ------
    NotAvailableError
        The fit does something that is not known in advance.
    ModelError, EstimationError
        As the fit.
    """
    policies = {name: site.policy for name, site in model.partition.sites.items()}
    rehearsal = Rehearsal(policies, plan.answers(length))
    double = copy.copy(model)
    double.engine = rehearsal
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedstatWarning)
        try:
            double.fit(**{**arguments, **plan.arguments(length)})
        except Rehearsed:
            return rehearsal.course
    raise NotAvailableError("no forecast: this fit asks nothing of its engine")


def as_table(planned: Sequence[Planned], at: str | None, guessed: frozenset[str]) -> pd.DataFrame:
    """One row per array, with the institution in the place of the coordinator that sits there."""
    rows = []
    for row in planned:
        values = asdict(row)
        low, expected, high = values.pop("messages")
        bytes_low, n_bytes, bytes_high = values.pop("bytes")
        del values["refusals"]
        values |= {
            "rules": "; ".join(row.rules),
            "messages": expected,
            "messages_low": low,
            "messages_high": high,
            "bytes": n_bytes,
            "bytes_low": bytes_low,
            "bytes_high": bytes_high,
            "guessed": row.step in guessed,
            "policed": row.sender != COORDINATOR,
            "passes": not row.refusals,
            "refused_by": ", ".join(dict.fromkeys(one.rule for one in row.refusals)),
            "refusal": " ".join(one.message for one in row.refusals),
        }
        rows.append(values)
    table = pd.DataFrame(rows)
    if at is not None and rows:
        for role in ("sender", "receiver"):
            table[role] = table[role].replace(COORDINATOR, at)
    return table


def by_rule(refusals: Sequence[Refusal]) -> dict[str, list[str]]:
    """Messages of refusals, each once, by rule."""
    out: dict[str, dict[str, None]] = {}
    for one in refusals:
        out.setdefault(one.rule, {})[one.message] = None
    return {rule: list(messages) for rule, messages in out.items()}


def earlier_note(course: Course) -> Iterator[str]:
    """Say what making the model has asked for already."""
    kinds = dict.fromkeys(kind for found in course.earlier.values() for kind in found)
    if kinds:
        yield f"Making the model has asked already, for values of these kinds: {', '.join(kinds)}."
