"""Multiple imputation: the function that users call."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedstat.errors import EstimationError, ModelError, Remedy
from fedstat.federation.design.formula.parse import parse_pooled_formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.explanation import Explanation
from fedstat.inference.notes import Note
from fedstat.models.checks import check_choice, check_integer, checks_names
from fedstat.models.impute.draws import PatternSums, impute_sums
from fedstat.models.impute.protocol import explain_rows, impute_rows
from fedstat.models.impute.results import Imputations, RowImputations
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
    iterations: int = 5,
    numbers: Literal["normal", "matching"] = "normal",
) -> Imputations | RowImputations:
    """Impute missing blocks and values several times, from sums alone.

    **Different columns.** The sites release what :meth:`fedstat.VFEMRegression.fit` releases: sums of
    products of columns by missing pattern. The coordinator draws the parameters of the joint normal model of
    all columns and, given these, the sums of the completed data (data augmentation). The draw is exact,
    because the sums of the completed data depend on the observed values only through the sums by pattern. No
    value is drawn for a single entity, and nothing else leaves a site.

    **Different rows.** Chained equations, as in R's mice: each incomplete column has a regression on all
    others in each chain, fitted over all sites by :class:`fedstat.FederatedOLS`, :class:`fedstat.GLORE` or
    :class:`fedstat.FederatedMultinomial`. The coordinator draws the parameters from their normal
    approximation, and each site draws its own missing cells. They stay at the sites, where models are fitted
    to each table. A site with fewer than ``min_count`` missing cells of a column does not impute them, nor
    one with fewer observed ones. A site without any value of a column draws all of them by the model of the
    sites that have values.

    Parameters
    ----------
    partition : ClientPartition
        In any layout.
    formula : str
        The columns to impute jointly: ``"y ~ a + b"``. Include the columns of the later regressions, and
        columns that predict the missing values or their missingness. For different columns, the response is
        observed for all entities; for different rows, all columns are imputed.
    m : int
        Number of imputations.
    seed : int, optional
        Seed of the draws of parameters. For different rows, sites add secrets of their own to their draws:
        the same seed gives the same tables of the same partition, or of the same served sites.
    missing : {"raise", "drop"}
        Different columns: entities without a response are an error, or left out.
    coordinator : str, optional
        Different columns: site of the coordinator, as in :meth:`fedstat.VFEMRegression.from_formula`.
    iterations : int
        Different rows: draws of each column in each chain.
    numbers : {"normal", "matching"}
        Different rows: numbers are drawn from the linear regression, or by predictive mean matching among the
        rows of the site. Sites that remember all sums, as under the strict policy, copy no values.

    Returns
    -------
    Imputations or RowImputations
        ``regress()`` gives pooled regressions of any column on others; for different rows, ``fit()`` pools
        any model over rows.

    Raises
    ------
    ModelError
        An owner approves every analysis, or no column is incomplete.
    EstimationError
        Too few entities have both of two columns, or columns are collinear.
    PolicyError
        A site refuses a release.

    References
    ----------
    Tanner, M. and Wong, W. (1987). The calculation of posterior distributions by data augmentation. Journal
    of the American Statistical Association 82, 528-540.
    Schafer, J. (1997). Analysis of Incomplete Multivariate Data, section 5.4. Chapman and Hall.
    van Buuren, S. and Groothuis-Oudshoorn, K. (2011). mice: Multivariate imputation by chained equations in
    R. Journal of Statistical Software 45(3).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> imputations = fs.impute(partition, "NPGR ~ ROA + CI + LP", m=10, seed=1)
    >>> imputations.regress().params.index.tolist()
    ['Intercept', 'ROA', 'CI', 'LP']
    """
    check_integer("m", m, 2)
    check_integer("iterations", iterations, 1)
    check_choice("numbers", numbers, ("normal", "matching"))
    if partition.layout != "vertical":
        names = columns_of(formula, partition)
        return RowImputations(impute_rows(partition, names, m, seed, iterations, numbers))
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


@checks_names
def explain_impute(
    partition: ClientPartition, formula: str, *, m: int = 20, iterations: int = 5
) -> Explanation:
    """Report the requests of :func:`impute` where sites hold different rows, and what would be released.

    Sites report kinds and levels of the columns, as for a model. The models of the columns are dry runs, as
    :meth:`fedstat.FederatedGLM.explain`; each has `m` fits in each of the `iterations`.

    Parameters
    ----------
    partition : ClientPartition
        Of sites that hold different rows.
    formula : str
        As for :func:`impute`.
    m, iterations : int
        As for :func:`impute`.

    Returns
    -------
    Explanation
        As if all columns were incomplete: which ones are is only known when an imputation begins.

    Raises
    ------
    ModelError
        Sites hold different columns; :meth:`fedstat.VFEMRegression.explain` has the same releases.
    PolicyError
        A site refuses the description of its columns.

    Examples
    --------
    >>> import fedstat as fs, numpy as np
    >>> table = fs.datasets.make_hospitals()
    >>> table.loc[table.index % 4 == 0, "thalach"] = np.nan
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> plan = fs.explain_impute(partition, "num ~ age + thalach", m=5)
    >>> plan.passes, plan.call
    (True, "impute('num ~ age + thalach', m=5, iterations=5)")
    """
    check_integer("m", m, 2)
    check_integer("iterations", iterations, 1)
    if partition.layout == "vertical":
        raise ModelError(
            "explain_impute: it is for sites that hold different rows. For different columns, explain() of "
            "VFEMRegression has the same releases"
        )
    return explain_rows(partition, columns_of(formula, partition), m, iterations, f"impute({formula!r}, ")


def columns_of(formula: str, partition: ClientPartition) -> tuple[str, ...]:
    """Return the columns of a formula, each once, the response first."""
    parsed = parse_pooled_formula(formula, partition.pooled_columns)
    return tuple(dict.fromkeys((*parsed.response_columns, *(n for one in parsed.sites for n in one.columns))))


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
