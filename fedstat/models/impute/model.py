"""Multiple imputation: the function that users call."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedstat.errors import EstimationError, ModelError, Remedy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.notes import Note
from fedstat.models.checks import check_integer, checks_names
from fedstat.models.impute.draws import PatternSums, impute_sums
from fedstat.models.impute.results import Imputations
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.model import VFEMRegression

REMEDY = Remedy(
    "VFEMRegression.from_formula(...).fit(method='weighted')",
    "Regress by VFEMRegression and fit(method='weighted'), which assumes no distribution",
)


@checks_names
def impute(
    partition: ClientPartition,
    formula: str,
    *,
    m: int = 20,
    seed: int | None = None,
    missing: Literal["raise", "drop"] = "raise",
    coordinator: str | None = None,
) -> Imputations:
    """Impute missing blocks and values several times, from sums alone.

    The sites release what :meth:`fedstat.VFEMRegression.fit` releases: sums of products of columns by missing
    pattern. The coordinator draws the parameters of the joint normal model of all columns and, given these,
    the sums of the completed data (data augmentation). The draw is exact, because the sums of the completed
    data depend on the observed values only through the sums by pattern. No value is drawn for a single
    entity, and nothing else leaves a site.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout.
    formula : str
        The columns to impute jointly: ``"y ~ a + b"``. The response is observed for all entities. Include
        the columns of the later regressions, and columns that predict the missing values or their
        missingness.
    m : int
        Number of imputations.
    seed : int, optional
        Seed of the draws.
    missing : {"raise", "drop"}
        Entities without a response: an error, or left out.
    coordinator : str, optional
        Site of the coordinator, as in :meth:`fedstat.VFEMRegression.from_formula`.

    Returns
    -------
    Imputations
        ``regress()`` gives pooled regressions of any column on others.

    Raises
    ------
    ModelError
        The sites have different rows.
    EstimationError
        Too few entities have both of two columns, or columns are collinear.
    PolicyError
        A site refuses a release.

    References
    ----------
    Tanner, M. and Wong, W. (1987). The calculation of posterior distributions by data augmentation. Journal
    of the American Statistical Association 82, 528-540.
    Schafer, J. (1997). Analysis of Incomplete Multivariate Data, section 5.4. Chapman and Hall.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> imputations = fs.impute(partition, "NPGR ~ ROA + CI + LP", m=10, seed=1)
    >>> imputations.regress().params.index.tolist()
    ['Intercept', 'ROA', 'CI', 'LP']
    """
    check_integer("m", m, 2)
    if partition.layout != "vertical":
        raise ModelError(
            "impute: the sites have different rows. Each site can impute its own rows, for example with "
            "scikit-learn",
            remedy=Remedy("pool(results)", "{call} pools the fits"),
        )
    model = VFEMRegression.from_formula(formula, partition, missing=missing, coordinator=coordinator)
    try:
        fit = model.fit(cov_type="none")
    except EstimationError as error:  # impute has no arguments of a fit
        raise error.without_remedy() from None
    assert fit.exchange is not None
    patterns = sums_of(fit.exchange.moments, str(fit.model.endog_names))
    drawn, correlation = impute_sums(patterns, m, np.random.default_rng(seed))
    notes = [with_remedy(note) for note in fit._summary_notes() if note.severity != "info"]
    return Imputations(patterns, drawn, correlation, fit.ledger, notes)


def with_remedy(note: Note) -> Note:
    """Name the method that assumes no distribution, of the model that has it, where a note names a remedy."""
    return (
        replace(note, values={**note.values, "remedy": REMEDY.sentence(), "call": REMEDY.call})
        if "call" in note.values
        else note
    )


def sums_of(moments: PatternMoments, response: str) -> PatternSums:
    """Take the sums of an exchange, with the response, which every entity has, as the last column."""
    held = moments.standardized()
    seen = np.column_stack([held.seen, np.ones(len(held.n), dtype=bool)])
    return PatternSums((*held.names, response), seen, held.grams, held.center, held.scale)
