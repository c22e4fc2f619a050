"""Evaluation of a fit over rows, from counts in bins at its sites or at new ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_rows import RowsAgreement, RowsDesign, SiteRows, open_asks
from fedstat.federation.design.row_steps import OPEN_ROWS, rows_of, translation
from fedstat.federation.door.facts import Evaluated
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.forecast.forecast import Loop
from fedstat.federation.forecast.invented_rows import RowsInvention
from fedstat.federation.message import Ask, Declared, Step, check_lengths
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.masked_sums import masked
from fedstat.inference.evaluation.bins import bin_edges, merge_small_bins, probabilities
from fedstat.inference.evaluation.evaluation import Evaluation
from fedstat.inference.evaluation.recalibration import MOST_STEPS
from fedstat.kernels.glm.rows import linear_predictor
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.checks import check_layout
from fedstat.models.consent import FurtherAnalysis
from fedstat.models.horizontal import recalibration
from fedstat.models.horizontal.recalibration import FAMILY, JUDGED, JudgedModel, recalibrated, trials_weight
from fedstat.models.horizontal.rows import glm_rows
from fedstat.typing import Array, Floats

FEWEST = 3
"""Sites among which sums are hidden from each other."""
LOOP = Loop("recalibrate", frozenset({"recalibrate"}), (3, 6, MOST_STEPS))


def place_of_bins(design: RowsDesign, beta: Floats) -> tuple[float, float]:
    """Return mean of a fit's linear predictor without offset, and its deviation were columns independent."""
    return float(design.mean @ beta), float(np.linalg.norm(design.spread * beta)) or 1.0


def bin_counts(
    data: SiteData, state: State, text: str, beta: Floats, centre: Floats, width: Floats
) -> tuple[dict[str, Array], str]:
    """Count rows, and sum response and predicted mean, by bins of the linear predictor.

    `text` is distribution and link, `beta` (p,) in the units of the data; for `centre` and `width` see
    :func:`bin_edges`. Released are ``bins`` (3, B): rows (or trials), sum of the response, sum of the
    predicted means; bins with fewer rows than the owner's policy allows are counted with a neighbour.
    ``least`` is that number of rows.
    """
    distribution = DistributionSpec.from_json(text)
    if not float(width) > 0.0:
        raise MessageError(f"{data.name}: array 'width' must be positive")
    edges, link = bin_edges(distribution, float(centre), float(width)), distribution.make().link
    model = _judged(data, state, distribution, beta)
    parts = list(_predictions(model))
    y, eta, weight = (np.concatenate(part) for part in zip(*parts, strict=True))
    at, B = np.searchsorted(edges, eta), len(edges) + 1
    # Merged where the rows are: the coordinator never sees a small count.
    cell = merge_small_bins(np.bincount(at, minlength=B), data.min_count)[at]
    by_row = (weight, weight * y, weight * link.inverse(eta))
    sums = np.array([np.bincount(cell, weights=values, minlength=B) for values in by_row])
    state.tell(Evaluated(sums))
    state.keep(JUDGED, model, model.n)
    return {"bins": sums, "least": np.array(data.min_count)}, ""


def _judged(data: SiteData, state: State, distribution: DistributionSpec, beta: Floats) -> JudgedModel:
    opened = rows_of(state)
    check_lengths(data.name, beta=(beta, len(opened.shift)))
    zeros, ones = np.zeros_like(opened.shift), np.ones_like(opened.scale)
    own = translation(opened.shift, opened.scale, zeros, ones) @ beta
    return JudgedModel(opened, distribution, own, state.entities)


def _predictions(model: JudgedModel) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield response (a proportion where there are trials), linear predictor and weight by chunk."""
    for whole, X in model.opened.chunks():
        rows = glm_rows(whole, X)
        yield rows.y, linear_predictor(rows, model.beta), trials_weight(rows)


STEPS: Mapping[str, Step] = {
    "bin_counts": Step(
        bin_counts,
        {
            "beta": Declared("aggregate", "coefficients in the units of the data"),
            "centre": Declared("aggregate", "mean of the linear predictor of the fit", 0),
            "width": Declared("aggregate", "its deviation were columns independent", 0),
        },
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
    **recalibration.STEPS,
}
ORDER: Mapping[str, str] = {"recalibrate": "bin_counts recalibrate"}
"""Which steps stand directly before which: the model that is recalibrated is the one that was evaluated."""


def evaluate_rows(
    agreement: RowsAgreement,
    design: RowsDesign,
    distribution: DistributionSpec,
    beta: Floats,
    partition: ClientPartition,
    *,
    recalibrate: bool | None = False,
) -> tuple[Evaluation, Ledger]:
    """Evaluate coefficients (p,), in the units of the data, on a partition's rows.

    `design` is that of the fit. Whether to `recalibrate` is, with None, for a binary response and where sums
    may leave: in clear, or hidden among those of three sites.
    """
    check_layout("evaluate()", partition, "horizontal")
    sites = tuple(SiteRows(name, 0, 0) for name in partition.sites)
    ledger = Ledger()
    masks_wanted = any(site.policy.masked_only for site in partition.sites.values())
    if recalibrate is None:
        recalibrate = distribution.name == "Binomial" and not (masks_wanted and len(sites) < FEWEST)
    hidden = recalibrate and masks_wanted and len(sites) > 1

    def protocol() -> Rounds[Evaluation]:
        place = place_of_bins(design, beta)
        agreed = replace(agreement, sites=sites)
        return _protocol(agreed, distribution, beta, place, recalibrate, hidden)

    analysis = _analysis(agreement, distribution, partition)
    return analysis.run(protocol(), protocol, ledger), ledger


def _analysis(
    agreement: RowsAgreement, distribution: DistributionSpec, partition: ClientPartition
) -> FurtherAnalysis:
    """Say what an evaluation is, for owners who are asked."""
    question = agreement.question
    formula = f"{question.response} ~ {' + '.join(question.terms) or 1}"
    rows = tuple(SiteRows(name, len(at), len(at)) for name, at in partition.rows.items())
    return FurtherAnalysis(
        partition,
        "evaluate()",
        formula,
        str(distribution),
        RowsInvention(replace(agreement, sites=rows), distribution).sites,
        dict.fromkeys(partition.sites, question.needed),
        (LOOP,),
    )


def _protocol(
    agreement: RowsAgreement,
    distribution: DistributionSpec,
    beta: Floats,
    place: tuple[float, float],
    recalibrate: bool,
    hidden: bool,
) -> Rounds[Evaluation]:
    session, names = secrets.token_hex(8), tuple(row.site for row in agreement.sites)
    arrays = {"beta": beta, "centre": np.array(place[0]), "width": np.array(place[1])}
    asks = [Ask(site, FAMILY, "bin_counts", arrays, session, distribution.to_json()) for site in names]
    # Both in one round: a site answers in the order in which it is asked.
    replies = yield [one for pair in zip(open_asks(agreement, session), asks, strict=True) for one in pair]
    replies = replies[1::2]
    counted = np.array([reply.arrays["bins"] for reply in replies])
    edges = np.concatenate([[-np.inf], bin_edges(distribution, *place), [np.inf]])
    found, squares = None, None
    if recalibrate:
        asking = recalibrated(names, session, distribution, hidden)
        found, squares = yield from masked(asking, names, session, sums_only=True) if hidden else asking
    binary = distribution.name == "Binomial"
    return Evaluation(
        edges=edges,
        sites=names,
        n=counted[:, 0],
        observed=counted[:, 1],
        expected=counted[:, 2],
        binary=binary,
        least=max(int(reply.arrays["least"]) for reply in replies),
        means=probabilities(edges, distribution) if binary else None,
        squares=squares if binary else None,
        recalibration=found,
    )
