"""Estimates of every model family, under the attribute names that statsmodels uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, cast

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, FedstatWarning, ModelError, warn
from fedstat.inference.summary import CoefficientBlock
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Estimates in the form that every model family returns.

INTERCEPT = "Intercept"
Method = TypeVar("Method", bound=Callable[..., Any])
LEVELS = ("conf_level", "level", "confidence", "confidence_level", "conf")
"""Names of the level of an interval in other packages."""
UNUSUAL = 0.5
"""Largest alpha that is plausible: above it, the level of an interval was probably meant."""


def check_alpha(alpha: float, what: str = "alpha") -> None:
    """Require an alpha between 0 and 1, and warn of one that looks like the level of the interval.

    Raises ModelError; `what` is named in front.
    """
    if not isinstance(alpha, int | float | np.floating) or not 0.0 < alpha < 1.0:
        raise ModelError(f"{what}: expected alpha between 0 and 1, received {alpha!r}")
    if alpha > UNUSUAL:
        warn(
            f"alpha = {alpha:g} makes intervals of level {1.0 - alpha:.0%}. For a level of {alpha:.0%} write "
            f"alpha={1.0 - alpha:.4g}",
            FedstatWarning,
        )


def takes_alpha(method: Method) -> Method:
    """Check the `alpha` of a public method, which is one minus the level of its intervals.

    An argument with the name that other packages have for the level is a ModelError.
    """
    parameters = signature(method).parameters
    place, usual = list(parameters).index("alpha"), parameters["alpha"].default
    others = [name for name in LEVELS if name not in parameters]

    @wraps(method)
    def checked(*args: Any, **given: Any) -> Any:
        for name in others:
            if name in given:
                raise ModelError(
                    f"{method.__name__} has no argument {name!r}: its intervals have the "
                    "level 1 - alpha, and alpha=0.1 means 90%"
                )
        check_alpha(given.get("alpha", args[place] if place < len(args) else usual), method.__name__)
        return method(*args, **given)

    return cast(Method, checked)


class ReceiptLike(Protocol):
    """The signed statements of the sites on a run."""

    @property
    def released(self) -> pd.DataFrame:
        """Released numbers against unknown values."""

    @property
    def alarm(self) -> str:
        """One sentence if there are as many released numbers as unknown values; otherwise empty."""

    def save(self, path: str | Path) -> None:
        """Write it to a file."""


class LedgerLike(Protocol):
    """The record of all releases between the sites."""

    @property
    def rounds(self) -> int:
        """Round trips."""

    @property
    def bytes(self) -> int:
        """Bytes, both ways together."""

    def kinds_by_site(self) -> Mapping[str, Sequence[str]]:
        """Kinds of values that left each site."""

    def to_frame(self) -> pd.DataFrame:
        """One row for each released array."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """The numbers that every family returns; inconsistent lengths or repeated names are an error.

    ====================  ==================================================================================
    field                 meaning
    ====================  ==================================================================================
    params, cov           (d,), (d, d); `cov` None where the method has none, nan where a parameter has none
    names, sites        unique, as printed (``"Sex[T.male]"``); site ``""`` for one of none
    terms                 term of the formula of each coefficient
    convergence           text on the iteration, such as ``"relative score 3e-2 after 500 rounds"``
    llf                   log-likelihood: maximized, or that at the estimate where not `llf_is_maximum`
    density_of            variables whose joint density `llf` is, none: the response given all others; two
                          likelihoods compare only where it agrees
    n_parameters          counted by AIC and BIC; None: ``df_model``, without the intercept, and that
    scale                 residual variance or dispersion
    df                    (d,) degrees of freedom of Student's t by coefficient; None where all have the same,
                          or tests are normal
    privacy               privacy budget that was spent, in words
    reasons               why ``cov_params``, ``llf`` or ``rsquared`` does not exist
    ====================  ==================================================================================
    """

    params: Floats
    cov: Floats | None
    names: tuple[str, ...]
    sites: tuple[str, ...]
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
    df: Annotated[Floats, "d"] | None = None
    cov_type: str = ""
    privacy: str = "none (exact)"
    blocks: tuple[CoefficientBlock, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    llf_is_maximum: bool = True

    def __post_init__(self) -> None:
        d = len(self.names)
        lengths = {"params": len(self.params), "clients": len(self.sites), "terms": len(self.terms)}
        wrong = [f"{len_} {what}" for what, len_ in lengths.items() if len_ != d]
        if self.df is not None and self.df.shape != (d,):
            wrong.append(f"degrees of freedom of shape {self.df.shape}")
        if self.cov is not None and self.cov.shape != (d, d):
            wrong.append(f"a covariance of shape {self.cov.shape}")
        if wrong or len(set(self.names)) != d:
            received = " and ".join(wrong) or "a repeated name"
            raise EstimationError(f"expected {d} unique names and as many values, received {received}")
