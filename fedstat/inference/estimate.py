"""Estimates as every model family hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pandas as pd

from fedstat.errors import EstimationError
from fedstat.inference.summary import ClientBlock
from fedstat.typing import Floats

INTERCEPT = "Intercept"


class ReceiptLike(Protocol):
    """What the institutions signed of a run."""

    @property
    def released(self) -> pd.DataFrame:
        """Released numbers against unknown values."""

    @property
    def alarm(self) -> str:
        """One sentence where there are as many of the one as of the other; else empty."""

    def save(self, path: str | Path) -> None:
        """Write it to a file."""


class LedgerLike(Protocol):
    """The account of what passed between the institutions."""

    @property
    def rounds(self) -> int:
        """Round trips."""

    @property
    def bytes(self) -> int:
        """Bytes, both ways together."""

    def kinds_by_client(self) -> Mapping[str, Sequence[str]]:
        """Kinds of values that left each client."""

    def to_frame(self) -> pd.DataFrame:
        """One row for each array that passed."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """The numbers that every family hands over.

    Parameters
    ----------
    params : ndarray, shape (d,)
    cov : ndarray, shape (d, d), or None
        Covariance of `params`; None where the method has none, with the reason in `reasons`.
        A parameter without a variance has nan in its row and column.
    names : tuple of str, length d
        Unique, as printed: ``"Intercept"``, ``"Age"``, ``"Sex[T.male]"``.
    clients : tuple of str, length d
        Client of each coefficient; ``""`` where it has none, such as the intercept.
    terms : tuple of str, length d
        Term of the formula of each coefficient.
    response : str
    nobs : int
        Entities in the fit.
    df_model : float
        Degrees of freedom of the model, the intercept not counted.
    converged : bool
    convergence : str
        What to say of the iteration, such as ``"relative score 3e-2 after 500 rounds"``.
    llf : float or None
        Maximised log-likelihood; with `llf_is_maximum` False that at the estimate.
    density_of : tuple of str
        Variables whose joint density `llf` is; empty: the response given all others. Two likelihoods
        compare only where these agree.
    n_parameters : int or None
        Estimated parameters counted by AIC and BIC; None: ``df_model`` plus the intercept.
    rsquared : float or None
    scale : float
        Estimate of the residual variance or dispersion.
    cov_type : str
    privacy : str
        What was spent, in words.
    blocks : tuple of ClientBlock
        What each client brought.
    reasons : mapping of str to str
        Why ``cov_params``, ``llf`` or ``rsquared`` does not exist.

    Raises
    ------
    EstimationError
        Lengths do not agree, or a name occurs twice.
    """

    params: Floats
    cov: Floats | None
    names: tuple[str, ...]
    clients: tuple[str, ...]
    terms: tuple[str, ...]
    response: str
    nobs: int
    df_model: float
    converged: bool
    convergence: str = ""
    llf: float | None = None
    density_of: tuple[str, ...] = ()
    n_parameters: int | None = None
    rsquared: float | None = None
    scale: float = 1.0
    cov_type: str = ""
    privacy: str = "none (exact)"
    blocks: tuple[ClientBlock, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    llf_is_maximum: bool = True

    def __post_init__(self) -> None:
        d = len(self.names)
        lengths = {"params": len(self.params), "clients": len(self.clients), "terms": len(self.terms)}
        wrong = [f"{len_} {what}" for what, len_ in lengths.items() if len_ != d]
        if self.cov is not None and self.cov.shape != (d, d):
            wrong.append(f"a covariance of shape {self.cov.shape}")
        if wrong or len(set(self.names)) != d:
            received = " and ".join(wrong) or "a name twice"
            raise EstimationError(f"expected {d} unique names and as many values, received {received}")
