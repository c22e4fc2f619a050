"""Fits of every site by itself: a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from fedstat.models.boost.results import BoostResults


class LocalBoosts(Mapping[str, BoostResults]):
    """Boosting of every site by itself, by its name: the baseline of those who share nothing.

    ``fit["North"]`` has all that :class:`BoostResults` have but statements beyond the path.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> fits = model.fit(steps=20, aggregation="local")
    >>> fits.score(table).index.tolist(), len(fits.summary())
    (['Cleveland', 'Hungary', 'Long Beach', 'Switzerland'], 4)
    """

    def __init__(self, fits: Mapping[str, BoostResults]) -> None:
        self._fits = dict(fits)

    def __getitem__(self, site: str) -> BoostResults:
        return self._fits[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fits)

    def __len__(self) -> int:
        return len(self._fits)

    def score(self, new: pd.DataFrame) -> pd.DataFrame:
        """R-squared and mean absolute percentage error of the same rows by every site's fit."""
        return pd.DataFrame({site: one.score(new) for site, one in self.items()}).T.rename_axis("site")

    def summary(self) -> pd.DataFrame:
        """Rows, steps and R-squared of every site's fit, and how many learners it selected."""
        return pd.DataFrame(
            {
                site: {
                    "rows": one.nobs,
                    "steps": one.mstop,
                    "rsquared": one.rsquared,
                    "selected": int((one.learners["steps"] > 0.0).sum()),
                }
                for site, one in self.items()
            }
        ).T.rename_axis("site")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: a fit of each of {len(self)} sites; see .summary()>"
