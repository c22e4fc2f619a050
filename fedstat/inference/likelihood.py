"""Likelihood ratio tests of nested fits, pseudo R-squared, and information criteria."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy import optimize, special
from scipy.special import gammaln

from fedstat.errors import ModelError
from fedstat.inference.estimate import Estimate
from fedstat.spline_names import canonical_name
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Criteria that choose one of several penalized fits.
#
# Each is minus twice the log-likelihood, up to a constant that the fits share. With a dispersion that is
# known to be one it is ``2 N f``, where f is half the mean deviance. If the dispersion is estimated (a linear
# model), it is that of :func:`profiled`; ``2 N f`` would depend on the unit of the response.


def profile_deviance(deviance: Floats | float, nobs: float) -> Floats | float:
    """Return minus twice the Gaussian log-likelihood at its own variance, up to a constant: N log(RSS / N).

    `deviance` is the residual sum of squares, `nobs` N: rows or the sum of the frequency weights.
    """
    log_variance: Floats | float = np.log(np.asarray(deviance) / nobs)
    return nobs * log_variance


def aic(minus_twice_llf: Floats | float, df: Floats | float) -> Floats | float:
    """Return Akaike's criterion, ``-2 l + 2 df``."""
    return minus_twice_llf + 2.0 * df


def bic(minus_twice_llf: Floats | float, df: Floats | float, nobs: float) -> Floats | float:
    """Return Schwarz' criterion, ``-2 l + df log N``."""
    return minus_twice_llf + df * float(np.log(nobs))


def ebic(
    minus_twice_llf: Floats | float,
    df: Floats | float,
    nobs: float,
    *,
    chosen: Floats | float,
    candidates: int,
    gamma: float = 0.5,
) -> Floats | float:
    """Return the extended criterion, ``-2 l + df log N + 2 gamma log C(candidates, chosen)``.

    `chosen` is the number of selected columns, without those that had to be in the model, among `candidates`;
    gamma 0 is :func:`bic`. Chen, J. and Chen, Z. (2008). Extended Bayesian information criteria for model
    selection with large model spaces. Biometrika 95, 759-771.
    """
    # log C(n, k) by log-gamma: the binomial coefficient itself overflows.
    k = np.asarray(chosen, dtype=np.float64)
    if not 0.0 <= gamma <= 1.0 or (k > candidates).any():
        raise ModelError(
            f"ebic: expected gamma in [0, 1] and at most {candidates} columns chosen; received gamma = "
            f"{gamma!r} and {k.max():g} columns; count every column that could have been selected"
        )
    ways: Floats = gammaln(candidates + 1.0) - gammaln(k + 1.0) - gammaln(candidates - k + 1.0)
    return bic(minus_twice_llf, df, nobs) + 2.0 * gamma * ways


# ----------------------------------------------------------------------------------------------------
# Comparing nested fits by their likelihoods.

SMALLEST_PVALUE = 1e-16


def format_test(title: str, values: Mapping[str, float]) -> str:
    """Text of a test: its title, and below it each value with its name in the result."""
    name_width = max(map(len, values))
    texts = {name: f"{value:.4g}" for name, value in values.items()}
    if values.get("pvalue", 1.0) < SMALLEST_PVALUE:
        texts["pvalue"] = f"< {SMALLEST_PVALUE:g}"
    width = max(map(len, texts.values()))
    return "\n".join([title, *(f"{name:<{name_width}}  {text:>{width}}" for name, text in texts.items())])


class LRTest(NamedTuple):
    """Likelihood ratio test: statistic, p-value, degrees of freedom.

    A tuple of `statistic`, `pvalue` and `df_diff`.

    Examples
    --------
    >>> import fedstat as fs
    >>> test = fs.results.LRTest(statistic=4.0, pvalue=0.0455002638963584, df_diff=1)
    >>> test
    Likelihood ratio test
    statistic       4
    pvalue     0.0455
    df_diff         1
    >>> test.df_diff
    1
    """

    statistic: float
    pvalue: float
    df_diff: float

    def __repr__(self) -> str:
        return format_test("Likelihood ratio test", self._asdict())


class FTest(NamedTuple):
    """F test of deviances: statistic, p-value, degrees of freedom of the numerator.

    A tuple of `statistic`, `pvalue` and `df_diff`.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.results.FTest(statistic=4.0, pvalue=0.0466, df_diff=1).df_diff
    1
    """

    statistic: float
    pvalue: float
    df_diff: float

    def __repr__(self) -> str:
        return format_test("F test of deviances", self._asdict())


def format_pvalue(pvalue: float) -> str:
    """Write a p-value in a sentence; below the resolution of floating point, write its bound."""
    return f"p = {pvalue:.2g}" if pvalue >= SMALLEST_PVALUE else f"p < {SMALLEST_PVALUE:g}"


def format_lr_test(test: LRTest) -> str:
    """Write a likelihood ratio test in a sentence, with its degrees of freedom.

    Examples
    --------
    >>> format_lr_test(LRTest(4.0, 0.0455002638963584, 1))
    'chi2(1) = 4.00, p = 0.046'
    """
    return f"chi2({test.df_diff:g}) = {test.statistic:.2f}, {format_pvalue(test.pvalue)}"


def check_nested(full: Estimate, restricted: Estimate, spanned: bool = False) -> float:
    """Return how many coefficients the restricted fit lacks; a ModelError if it is not nested.

    `spanned` states that its columns are combinations of those of the full fit, whatever their names.
    """
    _check_same_data(full, restricted)
    _check_smaller(full, restricted, spanned)
    return full.df_model - restricted.df_model


def gamma_loss(deviance: float, n: float) -> float:
    """-2 log-likelihood of n gamma values, maximal over their shape, except for a constant.

    With shape v it is ``n (2 log Gamma(v) + 2 v - 2 v log v) + v deviance``, minimal if ``log v - psi(v) =
    deviance / 2n`` (McCullagh and Nelder 1989, 8.3).
    """
    s = deviance / (2.0 * n)
    guess = (3.0 - s + np.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    shape = optimize.brentq(lambda v: np.log(v) - special.psi(v) - s, guess / 4.0, 4.0 * guess, xtol=1e-300)
    constant = 2.0 * (special.gammaln(shape) + shape - shape * np.log(shape))
    return float(n * constant + shape * deviance)


def least_squares_loss(deviance: float, n: float) -> float:
    """-2 log-likelihood, maximal over the dispersion, deviance / n, except for a constant.

    For the normal and the inverse Gaussian distribution.
    """
    return float(n * np.log(deviance / n))


LOSSES: Mapping[str, Callable[[float, float], float]] = {
    "Gaussian": least_squares_loss,
    "InverseGaussian": least_squares_loss,
    "Gamma": gamma_loss,
}
"""-2 log-likelihood of the families with estimated dispersion, as a function of the deviance."""


def mcfadden(llf: float, llnull: float) -> float:
    """Pseudo R-squared of McFadden (1974), ``1 - llf / llnull``; for discrete responses.

    `llnull` is the log-likelihood with an intercept (and offset) only. McFadden, D. (1974). Conditional logit
    analysis of qualitative choice behavior. In Zarembka, P. (ed.), Frontiers in Econometrics, 105-142.
    """
    return 1.0 - llf / llnull


def cox_snell(llf: float, llnull: float, nobs: float) -> float:
    """Pseudo R-squared of Cox and Snell, ``1 - exp(2 (llnull - llf) / nobs)``; nobs counts weights.

    For a linear model with both likelihoods maximized over the variance, it is the R-squared. For a discrete
    response it stays below one even if the fit is perfect. Cox, D. R. and Snell, E. J. (1989). Analysis of
    Binary Data, 2nd edition, p. 208-209.
    """
    return float(-np.expm1(2.0 * (llnull - llf) / nobs))


def _check_same_data(full: Estimate, restricted: Estimate) -> None:
    same = {
        "response": (full.response, restricted.response),
        "number of entities": (full.nobs, restricted.nobs),
        "variables in the likelihood": (_joined(full.density_of), _joined(restricted.density_of)),
    }
    for what, (here, there) in same.items():
        if here != there:
            raise ModelError(
                f"compare_lr_test: expected two fits with the same {what}, received {here!r} and {there!r}; "
                "use wald_test on the larger fit, or refit both on the same data"
            )


def _check_smaller(full: Estimate, restricted: Estimate, spanned: bool) -> None:
    known = set(map(canonical_name, full.names))
    extra = [name for name in restricted.names if canonical_name(name) not in known and not spanned]
    if extra or restricted.df_model >= full.df_model:
        raise ModelError(
            "compare_lr_test: expected a restricted fit with some of the coefficients of this fit; "
            f"not in this fit: {', '.join(extra) or 'none'}; coefficients: {len(full.names)} here, "
            f"{len(restricted.names)} in the restricted fit"
        )


def _joined(variables: tuple[str, ...]) -> str:
    return ", ".join(sorted(variables)) or "the response given all others"
