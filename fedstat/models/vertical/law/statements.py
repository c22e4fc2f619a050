"""Statements of results on what is assumed of missing blocks, from moments by missing pattern."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from fedstat.inference.likelihood import LRTest
from fedstat.models.checks import check_choice
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.law.assumptions import (
    LittleTest,
    independence_lr_test,
    independence_tests,
    little_test,
    unrestricted_law,
)
from fedstat.models.vertical.law.fit import LawFit


class AssumptionStatements:
    """Tests of missingness completely at random, and of blocks that are independent between institutions.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI + LP", partition).fit()
    >>> fit.independence_tests().shape[0], fit.independence_lr_test().df_diff
    (3, 3.0)
    >>> fit.mcar_test()._fields
    ('statistic', 'pvalue', 'df', 'patterns')
    """

    def mcar_test(self, structure: Literal["model", "unrestricted"] = "model") -> LittleTest:
        """Little's test that blocks are missing completely at random.

        Parameters
        ----------
        structure : {"model", "unrestricted"}
            Covariance under the null: that of the model, or free between institutions whatever the model.

        Returns
        -------
        (statistic, pvalue, df, patterns)
        """
        check_choice("structure", structure, ("model", "unrestricted"))
        fit = self._moments()
        return little_test(fit, unrestricted_law(fit) if structure == "unrestricted" else None)

    def independence_tests(self) -> pd.DataFrame:
        """Test every pair of institutions for correlation between their blocks.

        Returns
        -------
        DataFrame
            One row per pair: entities that both have, Bartlett's statistic, p-value, degrees of freedom,
            largest canonical correlation, mean absolute correlation.
        """
        return pd.DataFrame(independence_tests(self._moments().moments))

    def independence_lr_test(self) -> LRTest:
        """Likelihood ratio of columns that depend between institutions against independent blocks.

        Unlike :meth:`independence_tests` it is valid where missingness depends on what is seen.

        Returns
        -------
        (statistic, pvalue, df_diff)

        Raises
        ------
        NotAvailableError
            No two institutions share enough entities; or the fit has no moments.
        """
        return independence_lr_test(self._moments())

    def _moments(self) -> MomentsFit | LawFit:
        """Return the fit of all columns from the moments; a NotAvailableError where there are none."""
        raise NotImplementedError
