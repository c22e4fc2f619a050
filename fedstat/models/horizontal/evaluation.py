"""Evaluation of a fit over rows, from counts in bins at its sites or at new ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from scipy import stats

from fedstat.errors import MessageError, ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_rows import RowsAgreement, SiteRows, open_asks
from fedstat.federation.design.row_steps import OPEN_ROWS, rows_of, translation
from fedstat.federation.design.states import combine_moments
from fedstat.federation.door.facts import Evaluated
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Ask, Declared, Step, check_lengths
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Engine, Rounds
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
    """Release rows, mean and squared deviations of the linear predictor; beta (p,) in the data's units."""
    total = np.zeros(3)
    for _, eta, _ in _predictions(data, state, beta):
        total = combine_moments(np.array([total, [len(eta), eta.mean(), ((eta - eta.mean()) ** 2).sum()]]))
    return {"moments": total}


def bin_counts(
    data: SiteData, state: State, text: str, beta: Floats, inner: Floats
) -> tuple[dict[str, Array], str]:
    """Count rows, and sum response and predicted mean, by bins of the linear predictor.

    `text` is distribution and link, `beta` (p,) in the units of the data, `inner` (B - 1,) the ascending
    edges between bins. Released are ``bins`` (3, B): rows (or trials), sum of the response, sum of the
    predicted means; bins with fewer rows than the owner's policy allows are counted with a neighbour.
    ``least`` is that number of rows.
    """
    link = DistributionSpec.from_json(text).make().link
    state.tell(Evaluated(rows_of(state).question.response))
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
    # Merged where the rows are: the coordinator never sees a small count.
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
            # No sensitivity: one row more or less in a bin decides with which neighbour it is counted.
            "bins": Declared(
                "aggregate",
                "rows, sums of response and of predicted mean by bin",
                2,
                behind=(*OPEN_ROWS, Evaluated),
            ),
            "least": Declared("control", "fewest rows of a bin", 0),
        },
        Declared("control", "family and link"),
    ),
}


def evaluate_rows(
    agreement: RowsAgreement,
    distribution: DistributionSpec,
    beta: Floats,
    partition: ClientPartition,
    bins: int | None = None,
) -> tuple[Evaluation, Ledger]:
    """Evaluate coefficients (p,), in the units of the data, on a partition's rows: those of the fit, or new.

    By default there are as many bins of the linear predictor as leave the smallest site enough rows in each.
    """
    if not isinstance(partition, ClientPartition) or partition.layout != "horizontal":
        raise ModelError("evaluate: expected a horizontal ClientPartition")
    if bins is not None and bins < 2:
        raise ModelError(f"evaluate: expected two bins or more, received {bins}")
    sites = tuple(SiteRows(name, 0, 0) for name in partition.sites)
    ledger = Ledger()
    engine: Engine = partition.engine
    protocol = _protocol(replace(agreement, sites=sites), distribution, beta, bins)
    return engine.run(protocol, ledger), ledger


def _protocol(
    agreement: RowsAgreement, distribution: DistributionSpec, beta: Floats, bins: int | None
) -> Rounds[Evaluation]:
    session, names = secrets.token_hex(8), tuple(row.site for row in agreement.sites)

    def ask(site: str, step: str, text: str = "", **arrays: Array) -> Ask:
        return Ask(site, FAMILY, step, arrays, session, text)

    opening = open_asks(agreement, session)
    moments = [ask(site, "predictor_moments", beta=beta) for site in names]
    # Opening and moments in one round: a site answers in the order in which it is asked.
    replies = yield [one for pair in zip(opening, moments, strict=True) for one in pair]
    parts = np.array([reply.arrays["moments"] for reply in replies[1::2]])
    n, mean, squares = combine_moments(parts)
    # A constant predictor has no spread; bins of any width will do.
    spread = float(np.sqrt(squares / n)) or 1.0
    usual = min(max(int(parts[:, 0].min()) // ROWS_PER_BIN, FEWEST), MOST)
    # Normal quantiles: bins hold about equally many rows as far as linear predictors are normal.
    inner = mean + spread * stats.norm.ppf(np.linspace(0, 1, (bins or usual) + 1)[1:-1])
    replies = yield [
        ask(site, "bin_counts", distribution.to_json(), beta=beta, inner=inner) for site in names
    ]
    counted = np.array([reply.arrays["bins"] for reply in replies])
    return Evaluation(
        edges=np.concatenate([[-np.inf], inner, [np.inf]]),
        sites=names,
        n=counted[:, 0],
        observed=counted[:, 1],
        expected=counted[:, 2],
        binary=distribution.name == "Binomial",
        least=max(int(reply.arrays["least"]) for reply in replies),
    )
