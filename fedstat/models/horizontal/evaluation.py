"""How well a fit over rows ranks and predicts, from counts in bins at its sites or at new ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from scipy import stats

from fedstat.errors import MessageError, ModelError, NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_rows import RowsAgreement, SiteRows, open_asks
from fedstat.federation.design.row_steps import OPEN_ROWS, rows_of, translation
from fedstat.federation.design.states import combine_moments
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Ask, Declared, Step, check_lengths
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Engine, Rounds
from fedstat.inference.estimate import Estimate
from fedstat.inference.evaluation.evaluation import Evaluation, merge_small_bins
from fedstat.kernels.glm.rows import linear_predictor
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.horizontal.rows import glm_rows
from fedstat.typing import Array, Floats

FAMILY = "evaluation"
FEWEST, MOST = 20, 100
ROWS_PER_BIN = 10
"""Rows that the smallest site has per bin on average; sites join the bins that are too small."""


def predictor_moments(data: SiteData, state: State, beta: Floats) -> dict[str, Array]:
    """Rows, mean and squared deviations of the linear predictor.

    Parameters
    ----------
    beta : (p,) array
        Coefficients in the units of the data.
    """
    total = np.zeros(3)
    for _, eta, _ in _predictions(data, state, beta):
        total = combine_moments(np.array([total, [len(eta), eta.mean(), ((eta - eta.mean()) ** 2).sum()]]))
    return {"moments": total}


def bin_counts(
    data: SiteData, state: State, text: str, beta: Floats, inner: Floats
) -> tuple[dict[str, Array], str]:
    """Count rows, and sum response and predicted mean, by bins of the linear predictor.

    Bins with fewer rows than the owner's policy allows are counted together with a neighbour.

    Parameters
    ----------
    text : str
        Family and link.
    beta : (p,) array
        Coefficients in the units of the data.
    inner : (B - 1,) array
        Edges between the bins, ascending.

    Returns
    -------
    dict
        ``bins`` (3, B): rows (or trials), sum of the response, sum of the predicted means; ``least``: fewest
        rows of a bin.
    """
    link = DistributionSpec.from_json(text).make().link
    if not (np.diff(inner) > 0.0).all():
        raise MessageError(f"{data.name}: array 'inner' must ascend")
    B = len(inner) + 1
    rows_in = np.zeros(B, dtype=np.int64)
    sums = np.zeros((3, B))
    for y, eta, weight in _predictions(data, state, beta):
        at = np.searchsorted(inner, eta)
        rows_in += np.bincount(at, minlength=B)
        for j, values in enumerate((weight, weight * y, weight * link.inverse(eta))):
            sums[j] += np.bincount(at, weights=values, minlength=B)
    groups = merge_small_bins(rows_in, data.min_count)
    merged = np.array([np.bincount(groups, weights=row, minlength=B) for row in sums])
    return {"bins": merged, "least": np.array(data.min_count)}, ""


def _predictions(data: SiteData, state: State, beta: Floats) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield response (a proportion where there are trials), linear predictor and weight by chunk."""
    opened = rows_of(state)
    check_lengths(data.name, beta=(beta, len(opened.shift)))
    zeros, ones = np.zeros_like(opened.shift), np.ones_like(opened.scale)
    own = translation(opened.shift, opened.scale, zeros, ones) @ beta
    for whole, X in opened.chunks():
        rows = glm_rows(whole, X)
        weight = np.ones(len(rows.y))
        for factor in (rows.freq, rows.trials):
            weight = weight if factor is None else weight * factor
        yield rows.y, linear_predictor(rows, own), weight


BETA = Declared("aggregate", "coefficients in the units of the data")
STEPS: Mapping[str, Step] = {
    "predictor_moments": Step(
        predictor_moments,
        {"beta": BETA},
        {
            "moments": Declared(
                "aggregate", "rows, mean and squared deviations of the linear predictor", behind=OPEN_ROWS
            )
        },
    ),
    "bin_counts": Step(
        bin_counts,
        {"beta": BETA, "inner": Declared("control", "edges of the bins of the linear predictor")},
        {
            "bins": Declared(
                "aggregate", "rows, sums of response and of predicted mean by bin", 2, behind=OPEN_ROWS
            ),
            "least": Declared("control", "fewest rows of a bin", 0),
        },
        Declared("control", "family and link"),
    ),
}


def evaluate_rows(
    agreement: RowsAgreement,
    family: DistributionSpec,
    beta: Floats,
    partition: ClientPartition,
    *,
    bins: int | None = None,
    ledger: Ledger | None = None,
) -> tuple[Evaluation, Ledger]:
    """Evaluate coefficients on the rows of a partition.

    Parameters
    ----------
    agreement : RowsAgreement
        Levels and transforms of the fit.
    family : DistributionSpec
    beta : (p,) array
        Coefficients in the units of the data.
    partition : ClientPartition
        In the horizontal layout; that of the fit, or new rows.
    bins : int, optional
        Bins of the linear predictor; by default as many as leave the smallest site enough rows in each.
    ledger : Ledger, optional

    Returns
    -------
    Evaluation, Ledger

    Raises
    ------
    ModelError
        The partition is vertical, or there are fewer than two bins.
    DesignError
        New rows hold a level that the fit did not know.
    """
    if not isinstance(partition, ClientPartition) or partition.layout != "horizontal":
        raise ModelError("evaluate: expected a horizontal ClientPartition")
    if bins is not None and bins < 2:
        raise ModelError(f"evaluate: expected two bins or more, received {bins}")
    sites = tuple(SiteRows(name, 0, 0) for name in partition.sites)
    account = Ledger() if ledger is None else ledger
    engine: Engine = partition.engine
    protocol = _protocol(replace(agreement, sites=sites), family, beta, bins)
    return engine.run(protocol, account), account


def _protocol(
    agreement: RowsAgreement, family: DistributionSpec, beta: Floats, bins: int | None
) -> Rounds[Evaluation]:
    session, names = secrets.token_hex(8), tuple(row.site for row in agreement.sites)

    def ask(site: str, step: str, text: str = "", **arrays: Array) -> Ask:
        return Ask(site, FAMILY, step, arrays, session, text)

    opening = open_asks(agreement, session)
    moments = [ask(site, "predictor_moments", beta=beta) for site in names]
    replies = yield [one for pair in zip(opening, moments, strict=True) for one in pair]
    parts = np.array([reply.arrays["moments"] for reply in replies[1::2]])
    n, mean, squares = combine_moments(parts)
    spread = float(np.sqrt(squares / n)) or 1.0
    usual = min(max(int(parts[:, 0].min()) // ROWS_PER_BIN, FEWEST), MOST)
    inner = mean + spread * stats.norm.ppf(np.linspace(0, 1, (bins or usual) + 1)[1:-1])
    replies = yield [ask(site, "bin_counts", family.to_json(), beta=beta, inner=inner) for site in names]
    counted = np.array([reply.arrays["bins"] for reply in replies])
    return Evaluation(
        edges=np.concatenate([[-np.inf], inner, [np.inf]]),
        sites=names,
        n=counted[:, 0],
        observed=counted[:, 1],
        expected=counted[:, 2],
        binary=family.name == "Binomial",
        least=max(int(reply.arrays["least"]) for reply in replies),
    )


class RowEvaluation:
    """What results over rows can say of new rows; a family's results inherit it beside `FederatedResults`.

    Attributes
    ----------
    evaluation_ledger : Ledger or None
        What the latest evaluation released.
    """

    estimate: Estimate
    distribution: DistributionSpec
    evaluation_ledger: Ledger | None = None
    _auc: float | None = None

    def evaluate(self, partition: ClientPartition | None = None, *, bins: int | None = None) -> Evaluation:
        """Discrimination and calibration from counts in bins of the linear predictor.

        Parameters
        ----------
        partition : ClientPartition, optional
            New rows; by default those of the fit, on which the figures flatter.
        bins : int, optional
            By default as many as leave the smallest site enough rows in each.

        Returns
        -------
        Evaluation
            AUC over all and by site with bounds, observed and expected, ``plot_calibration()``.

        Raises
        ------
        PolicyError
            A site refuses.
        NotAvailableError
            No partition is given, and the results were read from a file.
        """
        agreement, own = self._agreed()
        if partition is None and own is None:
            raise NotAvailableError(
                "evaluate: this result was read from a file and has no partition; give one"
            )
        chosen = own if partition is None else partition
        assert chosen is not None
        evaluation, self.evaluation_ledger = evaluate_rows(
            agreement, self.distribution, self.estimate.params, chosen, bins=bins
        )
        self._auc = evaluation.auc if evaluation.binary else None
        return evaluation

    @property
    def auc(self) -> float:
        """Area under the curve of the latest :meth:`evaluate`."""
        if self._auc is None:
            raise NotAvailableError("no AUC: call evaluate() first, which asks the sites for counts")
        return self._auc

    def _agreed(self) -> tuple[RowsAgreement, ClientPartition | None]:
        """Levels and transforms of the fit, and its partition, if it is there."""
        raise NotImplementedError
