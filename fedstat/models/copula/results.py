"""Results of a synthesis: synthetic rows, the copula, parametric redraws, and the cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.inference.estimate import LedgerLike
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import DistributionPanel, plot_distributions, plot_heat
from fedstat.inference.summary import WIDTH, header_sheet
from fedstat.inference.tables import Sheet
from fedstat.models.checks import check_integer
from fedstat.models.copula.correlation import METHODS
from fedstat.models.copula.explain import (
    cost_statements,
    large_noise,
    problems_of_fit,
    utility_of_columns,
)
from fedstat.models.copula.joint import JointModel, ScoreLayout, ScoreMoments, find_joint
from fedstat.models.copula.margins import Margin
from fedstat.models.copula.private_release import PUBLIC_ROWS, row_notes
from fedstat.models.copula.protocol import CopulaFit
from fedstat.models.copula.request import ALL, PLACES, PooledRows
from fedstat.models.results import Results
from fedstat.privacy.zcdp import epsilon_of_zcdp
from fedstat.typing import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_NAMED = 8
"""Number of columns that a note names."""
NOTES = Catalogue(
    critical={
        "bounds": "{problem}.",
    },
    warning={
        "large_noise": "{problem}",
        "moved": "The pairwise correlations are not a valid correlation matrix; the nearest one is "
        "{moved:.2g} away (root mean square).",
    },
    info={
        "cost": "{cost}",
        "copula": "Rows are drawn from a Gaussian copula with the released margins. They contain rank "
        "correlations only: no humps, interactions or joint tails.{levels} Standard errors of an analysis "
        "of synthetic rows do not include the noise.",
        "missing_cells": "Cells are missing in synthetic rows as often as in the data, by noisy counts: "
        "{cells}. Given the other columns, this does not depend on the missing value (missing at random).",
        **{f"missing_blocks/{method}": words for method, words in METHODS.items()},
        "public": "Bounds and levels of the columns, numbers of entities, and which site has a record of "
        "which entity are public and never taken from the data. Noise is exact discrete Gaussian from each "
        "site's own secret randomness. Each site adds its noise before it releases anything; no "
        "participant, including the dealer, holds a sum without noise. A repetition of the same request "
        "releases the same numbers and is free, as long as no site's table has changed.",
        "public/rows": PUBLIC_ROWS,
    },
)


# ----------------------------------------------------------------------------------------------------
# A simulated second release: the result of the mechanism for other rows of the same distribution.


def redraw(fit: CopulaFit, rng: np.random.Generator) -> JointModel:
    """Draw as many rows as there were from a release, and release margins and products of these.

    If sites lack entities, margins and products use as many rows as in the fit. The noise is normal, with the
    same variances; nothing here comes from an entity.
    """
    layout = ScoreLayout.of(fit.plan)
    _, codes = fit.joint.draw_codes(fit.n, rng)
    places = _columns_of_sites(fit)
    margins = [
        margin for site, place in places.items() for margin in _margins(fit, site, codes[:, place], rng)
    ]
    # The same columns have missing cells, however few there are in this draw.
    margins = [
        replace(margin, missing=max(margin.missing, 1.0 / fit.n) if gap else 0.0)
        for margin, gap in zip(margins, layout.gap, strict=True)
    ]
    products = _products(fit, margins, codes)
    noise = np.triu(fit.noise * rng.standard_normal(products.shape), 1)
    means = np.zeros(len(products))
    return find_joint(
        layout, margins, ScoreMoments(products + noise + noise.T, means, fit.noise, fit.pairs, False)
    )


def _columns_of_sites(fit: CopulaFit) -> dict[str, slice]:
    ends = np.cumsum([0, *map(len, fit.plan.columns.values())]).tolist()
    return {site: slice(a, b) for site, (a, b) in zip(fit.plan.columns, pairwise(ends), strict=True)}


def _margins(fit: CopulaFit, site: str, codes: Ints, rng: np.random.Generator) -> list[Margin]:
    n, out = fit.entities[site], []
    for j, (one, column) in enumerate(zip(fit.plan.columns[site], codes.T, strict=True)):
        deviation = fit.plan.count_deviation(site, j)
        counts = one.tally(column[:n]) + deviation * rng.standard_normal(one.released)
        out.append(Margin.of_counts(one, counts, n, deviation))
    return out


def _products(fit: CopulaFit, margins: list[Margin], codes: Ints) -> Floats:
    """Mean products of cut scores, (q, q), of each pair of sites over as many rows as the pair has."""
    places, columns = fit.plan.places(), _columns_of_sites(fit)
    scores = {
        site: np.ldexp(
            fit.plan.gram_requested(site, 1).score(margins[place], codes[:, place]).astype(np.float64),
            -PLACES,
        )
        for site, place in columns.items()
    }
    out = np.zeros_like(fit.products)
    for a, b in combinations_with_replacement(places, 2):
        n = int(fit.pairs[places[a].start, places[b].start])
        out[places[a], places[b]] = scores[a][:n].T @ scores[b][:n] / n
        out[places[b], places[a]] = out[places[a], places[b]].T
    return out


# ----------------------------------------------------------------------------------------------------
# Results of a synthesis: synthetic rows, the copula behind them, and the privacy cost.


@dataclass(frozen=True, slots=True, eq=False)
class CopulaRecord:
    """Content of a file of results."""

    fit: CopulaFit
    epsilon: float
    delta: float

    def check(self) -> None:
        """Require parts of one fit."""
        fit = self.fit
        bins = [one for group in fit.plan.columns.values() for one in group]
        p, nominal = len(bins), sum(one.nominal for one in bins)
        together = (
            fit.sums.noise == fit.plan
            and [margin.bins for margin in fit.margins] == bins
            and all(len(margin.probabilities) == margin.bins.count for margin in fit.margins)
            and fit.inversion.correlation.shape == (p - nominal, p - nominal)
            and len(fit.products) == ScoreLayout.of(fit.plan).q
            and fit.n >= 1
        )
        if not together:
            raise ModelError("columns, margins and correlations do not belong to one fit")


class CopulaResults(Results[CopulaRecord], saved_as="fedstat copula results 3", record=CopulaRecord):
    """A released copula: margins of all columns and the correlation matrix of their latent normals.

    Attributes
    ----------
    epsilon, delta : float
        The requested values; :attr:`privacy` has the values for each observer.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=5.0, delta=1e-6))
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> bounds = fs.Bounds({"age": (20, 80), "sex": [0, 1], "chol": (80, 600)})
    >>> model = fs.CopulaSynthesizer(partition, epsilon=3.0, bounds=bounds)
    >>> model.explain().passes
    True
    >>> fit = model.fit()
    >>> fit.columns, fit.correlation.shape, fit.noise.shape, len(fit.margins) > 3, len(fit.privacy) > 0
    (['age', 'sex', 'chol'], (3, 3), (3, 3), True, True)
    >>> fit.sample(10, seed=1).shape, len(fit.sample_tables(2, 10, seed=1)), len(fit.utility_report())
    ((10, 3), 2, 3)
    >>> bool(fit.plot_correlation().has_data()), len(fit.plot_margins().axes)
    (True, 3)
    >>> "epsilon" in fit.summary().as_text()
    True
    """

    model_name = "Gaussian copula"

    def __init__(self, record: CopulaRecord, ledger: LedgerLike | None = None) -> None:
        super().__init__(record, ledger)
        self._fit, self.epsilon, self.delta = record.fit, record.epsilon, record.delta

    @property
    def columns(self) -> list[str]:
        """Names of the columns, by site."""
        return [margin.bins.name for margin in self._fit.margins]

    @property
    def correlation(self) -> pd.DataFrame:
        """Correlations of the latent normals of the columns with an order, (p, p)."""
        names = [margin.bins.name for margin in self._ordered]
        return pd.DataFrame(self._fit.inversion.correlation, names, names)

    @property
    def _pooled(self) -> PooledRows | None:
        """Numbers of rows by site, of sites with different rows; otherwise None."""
        return self._fit.plan.rows

    @property
    def _ordered(self) -> list[Margin]:
        """Margins of the columns with an order."""
        return [margin for margin in self._fit.margins if not margin.bins.nominal]

    @property
    def noise(self) -> pd.DataFrame:
        """Standard deviations of the noise on correlations, to first order, (p, p); 0 on the diagonal."""
        slopes = np.array([margin.coefficients[0] for margin in self._ordered])
        layout = ScoreLayout.of(self._fit.plan)
        at = layout.first[layout.ordered]
        with np.errstate(divide="ignore"):
            errors = self._fit.noise[np.ix_(at, at)] / np.abs(np.outer(slopes, slopes))
        np.fill_diagonal(errors, 0.0)
        names = [margin.bins.name for margin in self._ordered]
        return pd.DataFrame(errors, names, names)

    @property
    def margins(self) -> pd.DataFrame:
        """Released margins, one row per bin: column, level or interval, and its probability."""
        parts = []
        for margin in self._fit.margins:
            bins, edges = margin.bins, margin.bins.edges
            frame = pd.DataFrame({"column": bins.name, "probability": margin.everywhere})
            frame["level"] = list(bins.levels) if bins.levels else None
            frame["low"], frame["high"] = (np.nan, np.nan) if bins.levels else (edges[:-1], edges[1:])
            parts.append(frame[["column", "level", "low", "high", "probability"]].astype({"level": object}))
        return pd.concat(parts, ignore_index=True)

    @property
    def privacy(self) -> pd.DataFrame:
        """Largest disclosure about one record, by observer: rho of the parts, and epsilon.

        The first row is the whole record against the coordinator. The other rows are the part of a record at
        one site against the coordinator and all other sites together. Sites with different rows have one
        line.
        """
        plan, sums = self._fit.plan, self._fit.sums
        margins = plan.all_margins_cost()
        products = sums.coordinator_cost() - margins
        rows = [("the coordinator", "whole record", margins, products)]
        rows += [
            ("all others together", f"its part at {c}", plan.margins_cost(c), sums.products_cost(c))
            for c in plan.columns
        ]
        if self._pooled is not None:
            rows = [(self._pooled.observers, "one row", margins, products)]
        return pd.DataFrame(
            [
                (who, what, float(a), float(b), epsilon_of_zcdp(a + b, self.delta), self.delta)
                for who, what, a, b in rows
            ],
            columns=["against", "record", "rho_margins", "rho_products", "epsilon", "delta"],
        )

    def sample(self, n: int, seed: int | None = None) -> pd.DataFrame:
        """Draw synthetic rows.

        Parameters
        ----------
        n : int
            Number of rows; more rows cost nothing.
        seed : int, optional
            Seed for the same rows again.

        Returns
        -------
        DataFrame
            (n, p), columns by site. No row belongs to an entity.

        Raises
        ------
        ModelError
            The number of rows is not positive.
        """
        check_integer("n", n, 1)
        return self._fit.joint.draw_rows(n, np.random.default_rng(seed))

    def sample_tables(self, tables: int, n: int, seed: int | None = None) -> list[pd.DataFrame]:
        """Draw synthetic tables, each from a simulated release, for :func:`fedstat.combine`.

        For each table, a sample with as many rows as entities is drawn from the copula. Its margins and
        products get noise as in the release, and the table is drawn from the copula of this second release.
        The tables therefore differ by the effects of sampling and noise on the first release.

        Parameters
        ----------
        tables : int
            At least 2; :func:`fedstat.combine` recommends 20.
        n : int
            Rows of each table; its rule needs as many as there are entities.
        seed : int, optional
            Seed for the same tables again.

        Returns
        -------
        list of DataFrame
            (n, p) each. They cost nothing.

        Raises
        ------
        ModelError
            Fewer than two tables, or no rows.
        """
        check_integer("tables", tables, 2)
        check_integer("n", n, 1)
        rng = np.random.default_rng(seed)
        return [redraw(self._fit, rng).draw_rows(n, rng) for _ in range(tables)]

    def utility_report(self) -> pd.DataFrame:
        """Report how precisely each column is known despite the noise, from released numbers alone.

        A release has one number for each pair of columns, as a Gaussian copula has. It therefore contains no
        deviations from the copula such as humps and interactions, and neither does this table. The only sign
        of misfit is ``moved``: pairs that contradict each other by more than their noise do not come from a
        Gaussian copula.

        Returns
        -------
        DataFrame
            One row per column: its site, entities and bins; ``margin_noise``, the approximate standard
            deviation of the noise on its distribution function; ``missing``, the share of missing cells;
            ``ties``, the share of the variance of ranks that ties remove; and for a column with an order
            ``correlation_noise``, the root mean square over its correlations; the number of
            correlations more than two deviations from 0 (``told_from_0``), and the ``strongest``; ``moved``,
            the root mean square change that made the correlations one valid matrix.
        """
        return utility_of_columns(self._fit, self.noise.to_numpy())

    def tidy(self) -> pd.DataFrame:
        """Correlations of the latent normals, a row for each pair of columns.

        Returns
        -------
        DataFrame
            ``first``, ``second``, ``estimate``, and ``std_error``, the standard deviation of the noise.
        """
        names = np.array(self.correlation.columns, dtype=object)
        i, j = np.triu_indices(len(names), 1)
        parts = {"estimate": self.correlation, "std_error": self.noise}
        pairs = {"first": names[i], "second": names[j]}
        return pd.DataFrame(pairs | {what: table.to_numpy()[i, j] for what, table in parts.items()})

    def _glance(self) -> dict[str, float]:
        return {
            "nobs": self._fit.n,
            "n_sites": len(self._fit.plan.columns if self._pooled is None else self._pooled.records),
            "columns": len(self.columns),
            "epsilon": self.epsilon,
            "delta": self.delta,
        }

    def plot_margins(self) -> Figure:
        """Draw every released margin.

        Returns
        -------
        matplotlib Figure
            One panel per column: probabilities of its levels, or of equally wide bins on its scale. More than
            60 bins are joined, and the tails with .1 % of the probability each are left out.
        """
        panels = []
        for margin in self._fit.margins:
            bins = margin.bins
            scale = bins.scale, bins.around
            panels.append(DistributionPanel(bins.name, margin.probabilities, bins.levels, bins.edges, *scale))
        return plot_distributions(panels, "Released distributions")

    def plot_correlation(self, ax: Axes | None = None) -> Axes:
        """Draw the correlations of the latent normals as a heat map.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        return plot_heat(self.correlation, "Correlations of latent normals", ax)

    def _sheets(self) -> Iterator[Sheet]:
        """Tables of the release and its cost."""
        fit, p = self._fit, len(self.columns)
        upper = np.triu_indices(len(self._ordered), 1)
        off, noise = fit.inversion.correlation[upper], self.noise.to_numpy()[upper]
        left = [
            ("Model", "Gaussian copula"),
            ("Columns", str(p)),
            ("Entities" if self._pooled is None else "Rows", f"{fit.n:,}"),
        ]
        if self._pooled is None:
            left.append(("Missing blocks", fit.method))
        if len(off):
            left += [
                ("Correlations", f"{off.min():.3f} to {off.max():.3f}"),
                ("Their noise (sd)", f"{np.median(noise):.2g}, at most {noise.max():.2g}"),
            ]
        private = self.privacy["epsilon"]
        left += [
            ("Sites", str(self._glance()["n_sites"])),
            ("Epsilon", f"{self.epsilon:g} at delta {self.delta:g}"),
        ]
        if self._pooled is None:
            left += [
                ("of a whole record", f"{private.iloc[0]:.3g}, against the coordinator"),
                ("of one site's part", f"{private.iloc[1:].max():.3g}, against all others"),
            ]
        yield header_sheet("Synthesis from one private release", left)
        yield self._sites()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {len(self.columns)} columns, {self._fit.n:,} "
            f"{'entities' if self._pooled is None else 'rows'}, epsilon {self.epsilon:g}; see .summary()>"
        )

    def _sites(self) -> Sheet:
        plan = self._fit.plan
        counts = self._fit.entities if self._pooled is None else self._pooled.records
        holders = {site: site if self._pooled is None else ALL for site in counts}
        rows = tuple(
            (
                site,
                str(len(plan.columns[holder])),
                f"{counts[site]:,}",
                f"{epsilon_of_zcdp(plan.margins_cost(holder), self.delta):.3g}",
                f"{epsilon_of_zcdp(self._fit.sums.site_cost(holder), self.delta):.3g}",
            )
            for site, holder in holders.items()
        )
        what = "entities" if self._pooled is None else "rows"
        headers = ("site", "columns", what, "eps margins", "eps total")
        return Sheet(headers, rows, "lrrrr", (WIDTH - 8 - 10 - 12 - 11 - 8, 8, 10, 12, 11), gap=2)

    def _summary_notes(self) -> Iterator[Note]:
        fit = self._fit
        for text in problems_of_fit(fit):
            yield NOTES.note("bounds", problem=text)
        if self._pooled is not None:
            yield from row_notes(self._pooled, fit.sums.site_cost(ALL), self.delta)
        else:
            for text in cost_statements(fit.sums, self.delta):
                yield NOTES.note("cost", cost=text)
        upper = np.triu_indices(len(self._ordered), 1)
        if len(upper[0]):
            noise, n = float(np.median(self.noise.to_numpy()[upper])), int(np.median(fit.pairs))
            for text in large_noise(fit.plan, noise, n, self.epsilon, self.delta):
                yield NOTES.note("large_noise", problem=text)
        nominal = [margin.bins.name for margin in fit.margins if margin.bins.nominal]
        named = ", ".join(nominal[:MOST_NAMED]) + " and others" * (len(nominal) > MOST_NAMED)
        of_levels = (
            f" Levels without an order ({named}) follow a multinomial logit in the other columns, which "
            "reproduces all released pairs."
        ) * bool(nominal)
        yield NOTES.note("copula", levels=of_levels)
        if gaps := {m.bins.name: m.missing for m in fit.margins if m.missing}:
            cells = ", ".join(f"{name} {share:.1%}" for name, share in gaps.items())
            yield NOTES.note("missing_cells", cells=cells)
        if self._pooled is None:
            yield NOTES.note(f"missing_blocks/{fit.method}")
        if (moved := float(np.sqrt(np.mean([*fit.inversion.moved**2, 0.0])))) > 0.0:
            yield NOTES.note("moved", moved=moved)
        yield NOTES.note("public" if self._pooled is None else "public/rows")
