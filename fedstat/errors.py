"""Exceptions and warnings of the package, as one class tree.

::

    FedstatError
    ├── PartitionError       the data of a partition cannot be used (also a ValueError)
    ├── FormulaError         a formula is not allowed or not understood (also a ValueError)
    ├── DesignError          formula and data do not fit together (also a ValueError)
    ├── ModelError           an argument of a model or of its fit (also a ValueError)
        ├── EstimationError      the data do not determine the estimate (also an ArithmeticError)
        │   └── AliasedColumnsError  columns that no row distinguishes; the fit leaves them out
        ├── EngineError          a site was not reached or did not answer; says how to continue
        ├── NotAvailableError    this result does not have the requested value (also an AttributeError)
        ├── ReceiptError         a receipt does not match the sites' signatures or the transferred messages
        └── DisclosureError            a message did not pass a site's checks
            ├── MessageError     it is malformed: unknown step, wrong array, shape or value
            │   └── SessionError the site was restarted, and no longer has the session
            ├── PolicyError      it is well formed, but the site's owner does not allow it
            │   ├── DescriptionError it exceeds the site's public description of its columns; no row was read
            │   └── ConsentError it needs the owner's consent first, or a line of the policy; no row was read
            └── SecurityError    a key, signature, encryption or mask is not valid
                └── PinError     an owner has pinned no key, or another key, of a site

    FedstatWarning (UserWarning)
        ├── DataWarning          rows or blocks were left out; the message counts them
        │   ├── SpellingWarning  levels of a column differ by spaces or case alone
        │   └── UnitsWarning     a column of one site is far from that of all others
        ├── AssumptionWarning    the data contradict an assumption of the model
        ├── VersionWarning       sites run other, compatible versions of fedstat
        ├── DisclosureWarning    a site released as many numbers as it has values in use
    └── ConvergenceWarning   an iteration stopped before its tolerance

Messages state what was expected, what was received, at which site and column, and the remedy. They contain
names and counts, never a value of the data.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

PACKAGE = os.path.join(os.path.dirname(__file__), "")


@dataclass(frozen=True, slots=True)
class Remedy:
    """A call that helps, as text that runs once its fields are filled, and the sentence that names it.

    A call of ``fit(...)``, ``from_formula(...)`` or another member is one of the model or the result that has
    the remedy; three dots are the arguments of that model, or of its fit, as given. In a formula they are the
    side that stays: ``"from_formula('y == 2 ~ ...', ...)"``. ``Policy(...)`` and ``ClientPartition`` are what
    the partition needs. Other calls begin with a name of fedstat.

    Errors and notes have a remedy, so that what they recommend can be executed. Errors that a remote site
    sends have the sentence only: an analyst's program executes nothing that another process names.

    Parameters
    ----------
    call : str
        The call, with fields in braces.
    text : str
        The sentence. It may have the fields ``call`` and ``arguments``, which are those of the call, and
        fields of the call itself.
    values : mapping
        Values of fields.

    Examples
    --------
    >>> import fedstat as fs
    >>> remedy = fs.errors.Remedy("fit(cov_kwds={{'groups': {column!r}}})", "use {arguments}")
    >>> remedy = remedy.filled(column="ward")
    >>> remedy.filled_call, remedy.sentence()
    ("fit(cov_kwds={'groups': 'ward'})", "use cov_kwds={'groups': 'ward'}")
    """

    call: str
    text: str = "{call}"
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> str:
        """What the call has in brackets: of ``from_formula``, if it is there, and else of ``fit``."""
        inner, fitted, _ = self.call.partition("(")[2].partition(").fit(")
        return (inner if fitted else inner.removesuffix(")")).removeprefix("..., ")

    @property
    def filled_call(self) -> str:
        """The call, with fields filled."""
        return self.call.format(**self.values)

    def filled(self, **values: Any) -> Remedy:
        """Return the remedy with values of fields.

        Examples
        --------
        >>> import fedstat as fs
        >>> fs.errors.Remedy("fit(grid={grid})").filled(grid=3).filled_call
        'fit(grid=3)'
        """
        return replace(self, values={**self.values, **values})

    def sentence(self, **values: Any) -> str:
        """Return the sentence, with fields filled.

        Examples
        --------
        >>> import fedstat as fs
        >>> fs.errors.Remedy("fit(masked=True)", "Fit with {arguments}.").sentence()
        'Fit with masked=True.'
        """
        values = {**self.values, **values}
        call, arguments = self.call.format(**values), self.arguments.format(**values)
        return self.text.format(**{**values, "call": call, "arguments": arguments})

    def after(self, message: str) -> str:
        """Return a message that ends with the sentence.

        Examples
        --------
        >>> import fedstat as fs
        >>> fs.errors.Remedy("fit(masked=True)", "use {arguments}").after("the policy refuses the sum")
        'the policy refuses the sum; use masked=True'
        """
        sentence = self.sentence()
        mark = "; " if sentence[:1].islower() else ". " if sentence[:1].isalnum() else ""
        return f"{message}{mark}{sentence}"


class FedstatError(Exception):
    """Base of every error that fedstat raises on purpose.

    Parameters
    ----------
    *args : object
        The message.
    remedy : Remedy, optional
        What helps. Its sentence is the last part of the message, after a semicolon if it begins with a small
        letter, and else as a sentence of its own.

    Attributes
    ----------
    remedy : Remedy or None
        As given.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ nothing", partition)
    ... except fs.errors.FedstatError as error:
    ...     print(type(error).__name__)
    FormulaError
    >>> try:
    ...     fs.GLORE.from_formula("num > 0 ~ age", partition).fit().heterogeneity.left_out
    ... except fs.errors.FedstatError as error:
    ...     print(error.remedy.filled_call)
    fit(..., masked=False)
    """

    remedy: Remedy | None = None

    def __init__(self, *args: object, remedy: Remedy | None = None) -> None:
        if remedy is not None:
            args = (remedy.after(str(args[0])), *args[1:])
            self.remedy = remedy
        super().__init__(*args)

    def with_message(self, message: str) -> Self:
        """Return the same error, with its remedy and other fields, but another message.

        Parameters
        ----------
        message : str

        Examples
        --------
        >>> import fedstat as fs
        >>> error = fs.errors.PolicyError.of_rule("quorum", "North", "wants 3 sites")
        >>> error.with_message("wait for the others").rule
        'quorum'
        """
        found = copy.copy(self)
        found.args = (message,)
        return found

    def without_remedy(self) -> Self:
        """Return the same error without its remedy, for a call that has no such arguments.

        Examples
        --------
        >>> import fedstat as fs
        >>> remedy = fs.errors.Remedy("fit(masked=True)", "use {arguments}")
        >>> str(fs.errors.ModelError("refused", remedy=remedy).without_remedy())
        'refused'
        """
        plain = str(self).removesuffix(self.remedy.after("")) if self.remedy else str(self)
        found = self.with_message(plain)
        found.remedy = None
        return found


class PartitionError(FedstatError, ValueError):
    """The tables do not form a usable partition.

    Examples
    --------
    >>> import fedstat as fs
    >>> try:
    ...     fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="clinic")
    ... except fs.errors.PartitionError as error:
    ...     print(type(error).__name__)
    PartitionError
    """


class FormulaError(FedstatError, ValueError):
    """The formula has an expression outside the allowed language.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ eval(age)", partition)
    ... except fs.errors.FormulaError as error:
    ...     print(type(error).__name__)
    FormulaError
    """


class DesignError(FedstatError, ValueError):
    """The formula is valid, but its columns cannot enter the model.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ age + I(age > 200)", partition).fit()
    ... except fs.errors.DesignError as error:
    ...     print(type(error).__name__)
    DesignError
    """

    empty_site: str = ""
    """Site that has no row with all columns, if this is the problem."""


class ModelError(FedstatError, ValueError):
    """An argument of a model or of its fit is invalid here.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ age", partition, missing="guess")
    ... except fs.errors.ModelError as error:
    ...     print(type(error).__name__)
    ModelError
    """


class EstimationError(FedstatError, ArithmeticError):
    """The data do not determine the estimate.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ age + I(2 * age)", partition).fit()
    ... except fs.errors.EstimationError as error:
    ...     print(type(error).__name__)
    EstimationError
    """


class AliasedColumnsError(EstimationError):
    """Columns of interactions follow from earlier columns, as where a combination of levels has no rows.

    A fit over rows catches it, leaves the columns out, and starts again.

    Parameters
    ----------
    columns : sequence of str
        Names of the columns.

    Attributes
    ----------
    columns : tuple of str
        As given.

    Examples
    --------
    >>> from fedstat.errors import AliasedColumnsError, Remedy
    >>> AliasedColumnsError(["sex[T.m]:stage[T.IV]"]).columns
    ('sex[T.m]:stage[T.IV]',)
    """

    def __init__(self, columns: list[str] | tuple[str, ...]) -> None:
        self.columns = tuple(columns)
        super().__init__(
            f"interactions {', '.join(map(repr, self.columns))} follow from other columns over all sites: "
            "a combination of levels has no rows of its own. Leave the interaction out, or merge levels"
        )


class EngineError(FedstatError):
    """A site was not reached, or did not answer in time; the message states how to continue.

    Attributes
    ----------
    sites : tuple of str
        The sites, if they are known.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.EngineError, fs.errors.FedstatError), fs.errors.EngineError("a folder").sites
    (True, ())
    """

    sites: tuple[str, ...] = ()


class NotAvailableError(FedstatError, AttributeError):
    """The result does not have the requested value; the message gives the reason.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ age", partition).fit().heterogeneity.left_out
    ... except fs.errors.NotAvailableError as error:
    ...     print(type(error).__name__)
    NotAvailableError
    """


class ReceiptError(FedstatError):
    """A receipt does not verify; the message lists what is wrong.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.ReceiptError, fs.errors.FedstatError)
    True
    """


class DisclosureError(FedstatError):
    """A message did not pass the checks of a site.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.PolicyError, fs.errors.DisclosureError)
    True
    """


class MessageError(DisclosureError):
    """The message is malformed.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.MessageError, fs.errors.DisclosureError)
    True
    """


class SessionError(MessageError):
    """The site was restarted since the session began, and the state of the fit is lost.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.SessionError, fs.errors.MessageError)
    True
    """

    sites: tuple[str, ...] = ()


class PolicyError(DisclosureError):
    """The owner of the site does not allow this release.

    Parameters
    ----------
    message : str
        The text for the analyst.
    rule : str
        The rule of the policy that refuses, in the words of refusals and ledgers, such as ``"minimum
        count"``; empty if no rule of the policy applies.
    site : str
        The site that refuses; empty if it is unknown.
    array : str
        The array of the reply that the rule concerns; empty if it concerns the complete reply.
    remedy : Remedy, optional
        See :class:`FedstatError`.

    Attributes
    ----------
    rule, site, array : str
        As above. The signed ledger, the dry run and the models read these fields, never the message.

    Examples
    --------
    >>> import fedstat as fs
    >>> none = fs.Policy(refused_kinds=frozenset({"aggregate"}))
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital", policy=none)
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ age", partition).fit()
    ... except fs.errors.PolicyError as error:
    ...     print(type(error).__name__, error.rule, error.site, sep=", ")
    PolicyError, refused kinds, Cleveland
    """

    def __init__(
        self,
        message: str = "",
        *,
        rule: str = "",
        site: str = "",
        array: str = "",
        remedy: Remedy | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.rule, self.site, self.array = rule, site, array

    @classmethod
    def of_rule(
        cls, rule: str, site: str, why: str, array: str = "", remedy: Remedy | str | None = None
    ) -> Self:
        """Return the error of a site whose policy refuses by a rule; its message names both.

        Parameters
        ----------
        rule, site : str
            See the class.
        why : str
            What the rule requires, and what the request would need.
        array
            See the class.
        remedy : Remedy or str, optional
            What to do; a sentence where no call can be named.

        Examples
        --------
        >>> import fedstat as fs
        >>> print(fs.errors.PolicyError.of_rule("minimum count", "North", "wants at least 5 entities"))
        North: its policy (minimum count) wants at least 5 entities
        """
        text = f"{site}: its policy ({rule}) {why}"
        if isinstance(remedy, str):
            text, remedy = f"{text}. {remedy}", None
        return cls(text, rule=rule, site=site, array=array, remedy=remedy)


class DescriptionError(PolicyError):
    """The request exceeds the site's public description of its columns; decided without reading a row.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.DescriptionError, fs.errors.PolicyError)
    True
    """


class ConsentError(PolicyError):
    """The request needs the owner's consent, or a line of the policy; decided without reading a row.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.ConsentError, fs.errors.PolicyError)
    True
    """


class SecurityError(DisclosureError):
    """A key, a signature, an encrypted message or a mask is not valid.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.SecurityError, fs.errors.DisclosureError)
    True
    """


class PinError(SecurityError):
    """The owner of a site has pinned no key of another site, or a key that differs from the present one.

    Examples
    --------
    >>> import fedstat as fs
    >>> from fedstat.federation.crypto.keys import Identity, check_fingerprints
    >>> pinned, shown = Identity.generate().public, Identity.generate().public
    >>> try:
    ...     check_fingerprints({"North": pinned.fingerprint}, {"North": shown})
    ... except fs.errors.PinError as error:
    ...     print(str(error)[:18])
    not the pinned key
    """


class FedstatWarning(UserWarning):
    """Base of fedstat's warnings.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.FedstatWarning)
    ...     fs.errors.warn("example", fs.errors.FedstatWarning)
    Traceback (most recent call last):
    fedstat.errors.FedstatWarning: example
    """

    remedy: Remedy | None = None
    """What helps, as of :class:`FedstatError`."""


class DataWarning(FedstatWarning):
    """Rows or blocks were left out of the analysis; the message counts them.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.DataWarning)
    ...     fs.errors.warn("example", fs.errors.DataWarning)
    Traceback (most recent call last):
    fedstat.errors.DataWarning: example
    """


class AssumptionWarning(FedstatWarning):
    """The data contradict an assumption of the model; the message names it, and an alternative without it.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.AssumptionWarning)
    ...     fs.errors.warn("example", fs.errors.AssumptionWarning)
    Traceback (most recent call last):
    fedstat.errors.AssumptionWarning: example
    """


class SpellingWarning(DataWarning):
    """Levels of a column differ by spaces or case alone; they may be spellings of one level.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.SpellingWarning)
    ...     fs.errors.warn("example", fs.errors.SpellingWarning)
    Traceback (most recent call last):
    fedstat.errors.SpellingWarning: example
    """


class UnitsWarning(DataWarning):
    """Mean or spread of a column at one site is far from all others; its units may differ.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.UnitsWarning)
    ...     fs.errors.warn("example", fs.errors.UnitsWarning)
    Traceback (most recent call last):
    fedstat.errors.UnitsWarning: example
    """


class DisclosureWarning(FedstatWarning):
    """A site has released as many numbers as it has values in use: rows could be computed from them.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.DisclosureWarning)
    ...     fs.errors.warn("example", fs.errors.DisclosureWarning)
    Traceback (most recent call last):
    fedstat.errors.DisclosureWarning: example
    """


class VersionWarning(FedstatWarning):
    """Sites run other versions of fedstat than the analyst; the versions are compatible.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.VersionWarning)
    ...     fs.errors.warn("example", fs.errors.VersionWarning)
    Traceback (most recent call last):
    fedstat.errors.VersionWarning: example
    """


class ConvergenceWarning(FedstatWarning):
    """An iteration stopped before it reached its tolerance.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.ConvergenceWarning)
    ...     fs.errors.warn("example", fs.errors.ConvergenceWarning)
    Traceback (most recent call last):
    fedstat.errors.ConvergenceWarning: example
    """


FULL_TRACEBACK = "FEDSTAT_TRACEBACK"
"""Environment variable that keeps the frames of this package, if it is "full"."""


def without_internal_frames(error: FedstatError) -> FedstatError:
    """Return the error without the frames of this package below a public call.

    The message of a :class:`FedstatError` states the cause and the remedy, so these frames would only move it
    out of sight. The cause, if the error has one, keeps its own. With the environment variable
    ``FEDSTAT_TRACEBACK=full``, for work on this package, the error is returned unchanged.

    Parameters
    ----------
    error : FedstatError

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.errors.without_internal_frames(fs.errors.ModelError("no such argument")).__traceback__ is None
    True
    """
    if os.environ.get(FULL_TRACEBACK) == "full":
        return error
    return error.with_traceback(None)


def warn(message: str, category: type[FedstatWarning], remedy: Remedy | None = None) -> None:
    """Warn at the line of the caller's own code, past any number of functions of this package."""
    warning = category(remedy.after(message) if remedy else message)
    warning.remedy = remedy
    frame, level = sys._getframe().f_back, 2
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)
