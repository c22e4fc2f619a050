"""Tests of terms that a fit left out, with the larger fit or without it.

The score test evaluates the larger model once, at the smaller estimate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.likelihood import LOSSES, FTest, LRTest, check_nested, lr_test, told
from fedstat.inference.results import FederatedResults
from fedstat.models.glm.protocol import Newton, NewtonOptions
from fedstat.models.glm.statements import GLMStatements
from fedstat.models.glm.steps import FAMILY
from fedstat.models.glm.sums.problems import check_rank
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.typing import Floats


class ScoreTest(NamedTuple):
    """Score (Rao) test: statistic, p-value, degrees of freedom.

    A tuple of `statistic`, `pvalue` and `df`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.GLORE.from_formula("num > 0 ~ age", partition).fit().score_test("C(cp)").df
    3
    """

    statistic: float
    pvalue: float
    df: int

    def __repr__(self) -> str:
        return told("Score test", self._asdict())


def score_test(result: GLMStatements, terms: str) -> ScoreTest:
    """Test terms that the fit does not have, written as on the right side of a formula.

    A ModelError says that they add no coefficient, or that rows lack their columns that the fit used.
    """
    model: HorizontalModel = result.model
    larger = type(model).from_formula(
        f"{model.formula.text} + {terms}",
        model.partition,
        family=result.family,
        labels=model.question.labels,
        **model._roles,
    )
    # On fewer rows the smaller estimate is no maximum, and its own terms would add to the statistic.
    rows = {row.site: row.n for row in model.agreement.sites}
    fewer = {row.site: rows[row.site] - row.n for row in larger.agreement.sites if row.n != rows[row.site]}
    if fewer:
        listed = ", ".join(f"{count:,} at '{site}'" for site, count in fewer.items())
        raise ModelError(
            f"score_test: rows of the fit lack a column of {terms!r}: {listed}. Fit the smaller model on "
            "the rows that have it"
        )

    def protocol(model: HorizontalModel) -> Rounds[ScoreTest]:
        session = model._open_session(FAMILY, result._fit.masked)
        newton = Newton(session, result.distribution, NewtonOptions(), result.scale)
        return session.hide(_protocol(newton, result))

    return larger._run_beside(f"score_test({terms!r})", protocol)


def _protocol(newton: Newton, result: GLMStatements) -> Rounds[ScoreTest]:
    yield from newton.open(local=False)
    names = newton.coordinates.design.names
    extra = [name for name in names if name not in result.params.index]
    if not extra or not set(result.params.index) <= set(names):
        raise ModelError("score_test: the terms add no coefficient to the fit")
    # The smaller estimate, with zeros for the terms that it left out.
    beta = result.params.reindex(names).fillna(0.0).to_numpy()
    gamma: Floats = np.linalg.solve(newton.coordinates.back, beta)
    total = yield from newton.evaluate(gamma)
    assert total is not None
    # A new term that follows from the old ones has a score of zero, and no test.
    check_rank(total.information, newton.coordinates)
    statistic = float(total.score @ np.linalg.solve(total.information, total.score)) / result.scale
    return ScoreTest(statistic, float(stats.chi2.sf(statistic, len(extra))), len(extra))


def compare_likelihoods(full: GLMStatements, restricted: FederatedResults) -> LRTest:
    """Likelihood ratio test; the errors of :meth:`GLMResults.compare_lr_test`.

    Pearson's dispersion, which statsmodels' log-likelihood is at, does not maximise it: the larger fit's
    may then be the lower one. The maximum follows from the deviance.
    """
    small = _same_family("compare_lr_test", full, restricted)
    if not (full.estimates_dispersion or small.estimates_dispersion) or full.distribution.least_squares:
        return lr_test(full, small)
    df_diff = check_nested(full.estimate, small.estimate)
    family, weights = full.distribution.name, full.basis.agreement.question.weights
    if family not in LOSSES or (family == "Gamma" and "var_weights" in weights):
        raise NotAvailableError(
            f"compare_lr_test: no likelihood of {full.distribution} is known at its maximum over the "
            f"dispersion{' with var_weights' if family in LOSSES else ''}; use compare_f_test"
        )
    n = full._fit.total.weight
    statistic = LOSSES[family](small.deviance, n) - LOSSES[family](full.deviance, n)
    # Two equal fits differ by rounding.
    return LRTest(max(statistic, 0.0), float(stats.chi2.sf(statistic, df_diff)), df_diff)


def compare_deviances(full: GLMStatements, restricted: FederatedResults) -> FTest:
    """F test; the errors of :meth:`GLMResults.compare_f_test`."""
    small = _same_family("compare_f_test", full, restricted)
    if not full.estimates_dispersion:
        raise NotAvailableError(
            f"compare_f_test: the dispersion of {full.distribution} was taken as {full.scale:g} and not "
            'estimated; use compare_lr_test, or fit with scale="X2"'
        )
    df_diff = check_nested(full.estimate, small.estimate)
    statistic = max(small.deviance - full.deviance, 0.0) / df_diff / full.scale
    return FTest(statistic, float(stats.f.sf(statistic, df_diff, full.df_resid)), df_diff)


def _same_family(what: str, full: GLMStatements, restricted: FederatedResults) -> GLMStatements:
    other = getattr(restricted, "distribution", None)
    if not isinstance(restricted, GLMStatements) or other != full.distribution:
        raise ModelError(
            f"{what}: expected another fit with family {full.distribution}, received "
            f"{other or type(restricted).__name__}"
        )
    if "survey" in (full.cov_type, restricted.cov_type):
        raise NotAvailableError(
            f"{what}: the likelihood of a survey is a pseudo-likelihood, whose size is that of the weights; "
            "use wald_test on the larger fit"
        )
    return restricted
