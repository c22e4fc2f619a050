"""Exceptions and warnings of the package, as one class tree.

::

    FedstatError
    ├── PartitionError       the data of a partition cannot be used (also a ValueError)
    ├── FormulaError         a formula is not allowed or not understood (also a ValueError)
    ├── DesignError          formula and data do not fit together (also a ValueError)
    ├── ModelError           an argument of a model or of its fit (also a ValueError)
    ├── EstimationError      the numbers do not admit an estimate (also an ArithmeticError)
    ├── EngineError          a site was not reached or did not answer; says what is kept and how to go on
    ├── NotAvailableError    a statement that this result cannot make (also an AttributeError)
    ├── ReceiptError         a receipt is not what the sites signed, or does not fit what was carried
    └── DoorError            a message did not pass a site's door
        ├── MessageError     it is malformed: unknown step, wrong array, shape or value
        │   └── SessionError the site was started again, and does not know the session any more
        ├── PolicyError      it is well formed, and the site's owner does not allow it
        │   ├── DescriptionError it goes beyond what the site publishes of its columns; no row was read
        │   └── ConsentError it needs the owner's consent first, or a line of the policy; no row was read
        └── SecurityError    it is not from whom, or not what, it should be: key, signature, seal or mask
            └── PinError     an owner has pinned no key of an institution, or another one

    FedstatWarning (UserWarning)
    ├── DataWarning          rows or blocks were left out, and how many
    │   ├── SpellingWarning  levels of a column differ by blanks or case alone
    │   └── UnitsWarning     a column of one institution is far from that of all others
    ├── AssumptionWarning    the data contradict what the model assumes
    ├── VersionWarning       sites run other versions of fedstat, which understand this one
    ├── DisclosureWarning    as many numbers left an institution as it has values in play
    └── ConvergenceWarning   an iteration stopped before its tolerance

Messages say what was expected, what came, at which site and column, and what to do. They carry
names and counts, never a value of the data.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Self

PACKAGE = os.path.join(os.path.dirname(__file__), "")


class FedstatError(Exception):
    """Base of every error that fedstat raises on purpose.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> try:
    ...     fs.FederatedGLM.from_formula("num ~ nothing", partition)
    ... except fs.errors.FedstatError as error:
    ...     print(type(error).__name__)
    FormulaError
    """


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
    """The formula holds something outside the allowed language.

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
    """The formula is fine, but the columns it names cannot enter the model.

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


class ModelError(FedstatError, ValueError):
    """An argument of a model or of its fit has no meaning here.

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


class EngineError(FedstatError):
    """A site was not reached, or did not answer in time; the message says what is kept and how to go on.

    Attributes
    ----------
    sites : tuple of str
        The sites, where it is known which.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.EngineError, fs.errors.FedstatError), fs.errors.EngineError("a folder").sites
    (True, ())
    """

    sites: tuple[str, ...] = ()


class NotAvailableError(FedstatError, AttributeError):
    """The result cannot make this statement; the message says why.

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


class DoorError(FedstatError):
    """A message did not pass the door of a site.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.PolicyError, fs.errors.DoorError)
    True
    """


class MessageError(DoorError):
    """The message is malformed.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.MessageError, fs.errors.DoorError)
    True
    """


class SessionError(MessageError):
    """The site was started again since the session began, and what it held of the fit is gone.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.SessionError, fs.errors.MessageError)
    True
    """

    sites: tuple[str, ...] = ()


class PolicyError(DoorError):
    """The owner of the site does not allow this release.

    Parameters
    ----------
    message : str
        The text that the analyst reads.
    rule : str
        The rule of the policy that refuses, in the words that refusals and ledgers print, such as
        ``"minimum count"``; empty where the policy has no rule about it.
    site : str
        The site that refuses; empty where it is not known.
    array : str
        The array of the reply that the rule concerns; empty where it concerns the whole reply.

    Attributes
    ----------
    rule, site, array : str
        As above. The signed ledger, the dry run and the models read these, and never the message.

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

    def __init__(self, message: str = "", *, rule: str = "", site: str = "", array: str = "") -> None:
        super().__init__(message)
        self.rule, self.site, self.array = rule, site, array

    @classmethod
    def of_rule(cls, rule: str, site: str, why: str, array: str = "") -> Self:
        """Return the error of a site whose policy refuses by a rule; its message names both.

        Parameters
        ----------
        rule, site : str
            As for the class.
        why : str
            What the rule requires, what the request would need, and what to do.
        array : str
            As for the class.

        Examples
        --------
        >>> import fedstat as fs
        >>> print(fs.errors.PolicyError.of_rule("minimum count", "North", "wants at least 5 entities"))
        North: its policy (minimum count) wants at least 5 entities
        """
        return cls(f"{site}: its policy ({rule}) {why}", rule=rule, site=site, array=array)

    def with_message(self, message: str) -> Self:
        """Return the same error with another message.

        Parameters
        ----------
        message : str

        Examples
        --------
        >>> import fedstat as fs
        >>> error = fs.errors.PolicyError.of_rule("quorum", "North", "wants 3 institutions")
        >>> error.with_message("wait for the others").rule
        'quorum'
        """
        return type(self)(message, rule=self.rule, site=self.site, array=self.array)


class DescriptionError(PolicyError):
    """What is asked goes beyond what the site publishes of its columns; decided without a look at a row.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.DescriptionError, fs.errors.PolicyError)
    True
    """


class ConsentError(PolicyError):
    """What is asked needs the owner's consent, or a line of the policy; decided without a look at a row.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.ConsentError, fs.errors.PolicyError)
    True
    """


class SecurityError(DoorError):
    """A key, a signature, a sealed message or a mask is not what it should be.

    Examples
    --------
    >>> import fedstat as fs
    >>> issubclass(fs.errors.SecurityError, fs.errors.DoorError)
    True
    """


class PinError(SecurityError):
    """The owner of a site has pinned no key of another institution, or another key than it shows.

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
    ...     fs.errors.warn("told", fs.errors.FedstatWarning)
    Traceback (most recent call last):
    fedstat.errors.FedstatWarning: told
    """


class DataWarning(FedstatWarning):
    """Something was left out of the analysis; the message counts it.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.DataWarning)
    ...     fs.errors.warn("told", fs.errors.DataWarning)
    Traceback (most recent call last):
    fedstat.errors.DataWarning: told
    """


class AssumptionWarning(FedstatWarning):
    """The data contradict an assumption of the model; the message names it, and what does without it.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.AssumptionWarning)
    ...     fs.errors.warn("told", fs.errors.AssumptionWarning)
    Traceback (most recent call last):
    fedstat.errors.AssumptionWarning: told
    """


class SpellingWarning(DataWarning):
    """Levels of a column differ by blanks or case alone: one, perhaps, that is written in two ways.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.SpellingWarning)
    ...     fs.errors.warn("told", fs.errors.SpellingWarning)
    Traceback (most recent call last):
    fedstat.errors.SpellingWarning: told
    """


class UnitsWarning(DataWarning):
    """Mean or spread of a column at one institution is far from all others: other units, perhaps.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.UnitsWarning)
    ...     fs.errors.warn("told", fs.errors.UnitsWarning)
    Traceback (most recent call last):
    fedstat.errors.UnitsWarning: told
    """


class DisclosureWarning(FedstatWarning):
    """As many numbers left an institution as it has values in play: rows may be solved for.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.DisclosureWarning)
    ...     fs.errors.warn("told", fs.errors.DisclosureWarning)
    Traceback (most recent call last):
    fedstat.errors.DisclosureWarning: told
    """


class VersionWarning(FedstatWarning):
    """Sites run other versions of fedstat than whoever asks; they understand each other.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.VersionWarning)
    ...     fs.errors.warn("told", fs.errors.VersionWarning)
    Traceback (most recent call last):
    fedstat.errors.VersionWarning: told
    """


class ConvergenceWarning(FedstatWarning):
    """An iteration stopped before it reached its tolerance.

    Examples
    --------
    >>> import fedstat as fs, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", fs.errors.ConvergenceWarning)
    ...     fs.errors.warn("told", fs.errors.ConvergenceWarning)
    Traceback (most recent call last):
    fedstat.errors.ConvergenceWarning: told
    """


def warn(message: str, category: type[FedstatWarning]) -> None:
    """Warn at the line of the caller's own code, however many functions of this package lie between."""
    frame, level = sys._getframe().f_back, 2
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
