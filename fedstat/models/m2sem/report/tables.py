"""Tables of a fitted mixture with standard errors."""

from __future__ import annotations

import pandas as pd

from fedstat.models.m2sem.report.record import M2SEMRecord
from fedstat.models.m2sem.report.statements import (
    communality_table,
    contrasts,
    covariate_effects,
    tidy_profiles,
    wald_tests,
)


class ClusterTables:
    """What is stated of a fitted mixture, with standard errors where there are any."""

    _record: M2SEMRecord

    def tidy(self, alpha: float = 0.05) -> pd.DataFrame:
        """Profiles in one frame, a row for each cluster and column or level.

        Parameters
        ----------
        alpha : float
            Limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            ``estimate`` and, where there are standard errors, ``std_error``, ``conf_low``, ``conf_high``.
        """
        return tidy_profiles(self._record, alpha)

    def contrasts(self, alpha: float = 0.05) -> pd.DataFrame:
        """Differences between every two clusters, by column or level, with tests.

        Parameters
        ----------
        alpha : float
            Limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            Index (client, modality, column, level, clusters); ``estimate``, ``std_error``, ``conf_low``,
            ``conf_high``, ``statistic``, ``p_value``.

        Raises
        ------
        NotAvailableError
            There are no standard errors; says why.
        """
        return contrasts(self._record, alpha)

    def tests(self) -> pd.DataFrame:
        """Wald's test, by column, that all clusters are the same in it.

        Returns
        -------
        DataFrame
            Index (client, modality, column); ``statistic``, ``df``, ``p_value``, nan for columns and
            modalities that were selected to be the same.

        Raises
        ------
        NotAvailableError
            There are no standard errors; says why.
        """
        return wald_tests(self._record)

    def covariate_effects(self, alpha: float = 0.05) -> pd.DataFrame:
        """Tell what the covariates of ``adjust=`` do to columns, given the cluster and the factors.

        Parameters
        ----------
        alpha : float
            Limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            Index (client, modality, column, level, covariate). ``estimate`` for a unit of the covariate: of
            the mean of a continuous column, in its units; of the logit of higher levels of an ordinal or
            binary one; of a level of a nominal one against its first, the logarithm of their ratio. With
            standard errors ``std_error``, ``conf_low``, ``conf_high``, ``statistic`` and ``p_value``.

        Raises
        ------
        NotAvailableError
            No columns are adjusted.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_clusters(300, ["continuous", "ordinal"], p=3, seed=1)
        >>> data.frames["Client 1"]["age"] = 20.0 + data.frames["Client 1"].index % 60
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> model = fs.M2SEM(partition, 2, 1, adjust={"Client 1": "~ age"})
        >>> len(model.fit(select=None, n_init=1).covariate_effects())
        3
        """
        return covariate_effects(self._record, alpha)

    def communalities(self, alpha: float = 0.05) -> pd.DataFrame:
        """Share of each column's variance within clusters that its factors make up.

        Of ordinal and binary columns, of the variance of a logistic variable behind them; 0 for nominal ones,
        nan where columns are too few for it to be known.

        Parameters
        ----------
        alpha : float
            Limits are of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            ``estimate``, ``std_error``, ``conf_low``, ``conf_high``.

        Raises
        ------
        NotAvailableError
            There are no standard errors; says why.
        """
        return communality_table(self._record, alpha)
