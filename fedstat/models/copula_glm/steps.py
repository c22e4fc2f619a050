"""Steps of a site: the release of scores, and its noisy shares of the score step."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TypeAlias

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.errors import DescriptionError
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, RepeatedRelease
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, control, presence
from fedstat.federation.protocols.product_steps import (
    OPENED,
    SEALED,
    OpenProduct,
    ProductPart,
    product_steps,
    take_share,
)
from fedstat.kernels.ring import grouped_gram
from fedstat.models.copula import steps as release
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.request import PLACES
from fedstat.models.copula.steps import (
    COMPLETE,
    KEPT,
    RUN,
    CodedRows,
    CutScores,
    behind_product,
    check_planned,
    columns_of,
    find_complete,
    noisy,
    recall_gram,
    release_gram,
    repeated,
    rows_of,
    series_of,
    sum_margins,
    sum_products,
)
from fedstat.models.copula_glm.request import PHASES, MomentsRequest, ScoreStepRequest
from fedstat.models.copula_glm.score import SCORE_PLACES
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# A site's replies in a step on the score: only a share of the sums, with the site's own noise.
#
# A site's part of the linear predictor is already a share: all parts add up to the predictor. Every two sites
# multiply their parts entity by entity (powers), so that all hold shares of the square, and once more for the
# cube. Then residuals are shared, and every two sites multiply scores and residuals, summed over the
# entities. A site's shares of products are random words. Each site adds its noise to its share of the sums;
# no participant holds the sums without noise.
#
# The adversary is that of :mod:`fedstat.federation.crypto.secure_product`: it follows the protocol, and the
# dealer of a product colludes with neither of the two sites. The charge of a site assumes residuals within
# their range. A site that sends other numbers as its share, or a dealer of wrong random numbers, can violate
# this.

FAMILY = "copula_glm"
KEPT_ROWS = "copula score rows"
FIRST, SECOND = "first", "second"
TAKEN = np.ones(1, dtype=np.bool_)


@dataclass(slots=True, eq=False)
class ScoreRows:
    """Shares of one site, for the n entities of the fit: of the square and the cube, and of the sums.

    `rows` (n,) of the table, `scores` (n, m), `part` (n,) and `line` (n,) of the linear predictor in their
    digits, `response` (n,) minus the constant at its holder; `met` has the peers of each finished product.
    """

    requested: ScoreStepRequest
    question: str
    token: str
    rows: Ints
    scores: Ints
    part: Ints
    line: Ints
    response: Ints
    square: Ints
    cube: Ints
    sums: Ints
    met: dict[str, list[str]] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[str, ...]:
        """Products of the step, in order."""
        return PHASES[self.requested.terms.mean.degree]

    def done(self, phase: str) -> bool:
        """Return whether a product was made with all peers."""
        return set(self.met.get(phase, ())) == set(self.requested.peers)

    def ready(self, phase: str) -> bool:
        """Return whether all products before one were made."""
        at = self.phases.index(phase)
        return all(self.done(one) for one in self.phases[:at])

    @property
    def residual(self) -> Ints:
        """Share of the residuals: (n,)."""
        mean = self.requested.terms.mean
        curved = np.int64(mean.square) * self.square + np.int64(mean.cube) * (
            self.cube + self.square * self.part
        )
        return np.asarray(self.response - self.line - (curved if mean.degree > 1 else 0))

    def columns(self, phase: str, first: bool) -> Ints:
        """Return the columns of this site in a product: (n, q)."""
        if phase == "power":
            return self.part[:, None]
        if phase == "square":
            return np.column_stack([self.square, self.part][:: 1 if first else -1])
        return np.column_stack([self.scores, self.residual])

    def shape(self, phase: str, site: str, n: int) -> tuple[int, int]:
        """Return the columns of a site in a product, and groups of its rows: one per row, or one for all."""
        if phase == "score":
            return self.requested.terms.width(site) + 1, 1
        return (1 if phase == "power" else 2), n

    def add(self, phase: str, peer: str, first: bool, share: Ints) -> None:
        """Add this site's share of a product with another, (groups, q, q')."""
        if phase == "power":
            self.square = self.square + 2 * share[:, 0, 0]
        elif phase == "square":
            self.cube = self.cube + share[:, 0, 0] + share[:, 1, 1]
        else:
            places, a, b = self.requested.terms.places, self.requested.site, peer
            a, b = (a, b) if first else (b, a)
            sums = self.sums.copy()
            sums[places[a]] += share[0, :-1, -1]
            sums[places[b]] += share[0, -1, :-1]
            self.sums = sums
        self.met.setdefault(phase, []).append(peer)


BEGUN = (KEPT_ROWS, ScoreRows, "a step comes first; request 'begin_score'")
ReadPredictor: TypeAlias = Callable[[SiteData, ScoreStepRequest, CodedRows], Floats]


def read_predictor(data: SiteData, request: ScoreStepRequest, coded: CodedRows) -> Floats:
    """Return this site's part of the linear predictor, minus its middle, for all rows: (n_rows,).

    A value that is missing, or not a number, is replaced by the middle of its bounds.
    """
    used = [coded.bins[column.source] for column in request.columns]
    series = dict(zip([one.name for one in used], series_of(data, [one.name for one in used]), strict=True))
    total = np.full(data.table.n_rows, -request.middle)
    for column, bins, b in zip(request.columns, used, request.coefficients, strict=True):
        codes = coded.codes[:, column.source]
        values = codes.astype(np.float64) if column.above else _numbers(bins, codes, series[bins.name])
        total += b * column.at(values)
    return total


def _numbers(bins: Bins, codes: Ints, series: pd.Series) -> Floats:
    if bins.levels:
        levels: Floats = np.array(bins.levels, dtype=np.float64)
        return np.asarray(levels[np.maximum(codes, 0)])
    numbers = bins.numbers(series)
    low, high = bins.range
    found: Floats = np.clip(np.nan_to_num(numbers, nan=0.5 * (low + high)), low, high)
    return found


def invented_predictor(data: SiteData, request: ScoreStepRequest, coded: CodedRows) -> Floats:
    """Return zeros for a simulated site."""
    return np.zeros(data.table.n_rows)


ANSWERED = {
    "taken": presence(
        "that the rows of the earlier release take part",
        dtype="bool",
        unpaid="it is public which site has a record, and the content of rows causes no failure",
    )
}


@step(
    FAMILY,
    "release_gram recall_gram share_product deal_product",
    releases={
        "run": RUN,
        "sums": repeated("masked share", "share of the sums of scores times residuals, as released before"),
    },
    requests=control("coefficients, and the polynomial by which a mean is shared"),
)
def recall_score(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Release again the share of the sums of an equal step: ``run`` and ``sums``, or empty arrays."""
    request = from_json(ScoreStepRequest, text, f"{data.name}: the step on the score")
    held = state.use(*KEPT)
    state.count_entities(int(np.count_nonzero(held.group >= 0)))
    question = f"{to_json(request)} {held.question}"
    state.report(RepeatedRelease("sums", question, ("sums",)))
    found = state.recall(question, ("sums",))
    none = np.zeros(0, dtype=np.int64)
    if found is None:
        return {"run": none.astype(np.uint8), "sums": none}, ""
    return {"run": np.frombuffer(found[0], dtype=np.uint8), "sums": found[1]["sums"]}, ""


@step(
    FAMILY,
    "recall_score",
    releases=ANSWERED,
    requests=control("coefficients, and the polynomial by which a mean is shared"),
)
def begin_score(
    data: SiteData, state: State, text: str, *, read: ReadPredictor = read_predictor
) -> tuple[dict[str, Array], str]:
    """Compute scores and the linear predictor's part for the rows of the earlier release; release nothing."""
    request = from_json(ScoreStepRequest, text, f"{data.name}: the step on the score")
    held, coded = state.use(*KEPT), state.use("copula codes", CodedRows)
    form = held.requested
    if not isinstance(form, MomentsRequest) or (request.site, request.terms.holder, request.columns) != (
        form.site,
        form.holder,
        form.columns,
    ):
        raise DescriptionError(f"{data.name}: the step on the score has other columns than the release")
    mean, holds = request.terms.mean, request.site == form.holder
    rows = np.flatnonzero(held.group >= 0)
    part, line = mean.encode(mean.part(request.site, read(data, request, coded)[rows]))
    q, n = len(request.columns), len(rows)
    # Rounded towards zero, so that no row becomes longer than its radius.
    scores = np.trunc(np.ldexp(held.scores[rows, :q].astype(np.float64), SCORE_PLACES - PLACES))
    ones = [np.full((n, 1), 2**SCORE_PLACES)] if holds else []
    zero = np.zeros(n, dtype=np.int64)
    kept = ScoreRows(
        requested=request,
        question=f"{to_json(request)} {held.question}",
        token=secrets.token_hex(16),
        rows=rows,
        scores=np.hstack([*ones, scores.astype(np.int64)]),
        part=part,
        line=line,
        response=_response(request, form, held, rows) if holds else zero,
        square=part * part,
        cube=zero.copy(),
        sums=np.zeros(request.terms.size, dtype=np.int64),
    )
    # Products opened earlier belong to another step than this charge.
    state.forget_all(OPENED)
    state.keep(KEPT_ROWS, kept, n)
    return {"taken": TAKEN}, ""


def _response(request: ScoreStepRequest, form: MomentsRequest, held: CutScores, rows: Ints) -> Ints:
    """Return the response minus the constant, 0 or 1 or the score in its range, in digits of residuals."""
    mean, last = request.terms.mean, held.scores[rows, -1]
    if form.response == "Binomial":
        y = np.where(last > 0, mean.high, mean.low)
    else:
        y = np.rint(np.ldexp(last.astype(np.float64), mean.places - PLACES)).astype(np.int64)
    return np.clip(y, mean.low, mean.high) - np.int64(mean.constant)


def score_columns(data: SiteData, state: State, which: str) -> tuple[Array, None]:
    """Return the columns of a product of a step, words of 64 bits, or the cut scores of the release."""
    phase, _, side = which.partition(" ")
    if side not in (FIRST, SECOND):
        return columns_of(data, state, which)
    return state.use(*BEGUN).columns(phase, side == FIRST), None


def score_rows_of(state: State, which: str) -> Ints:
    """Return the rows of the site's table behind the columns of a product."""
    if which.partition(" ")[2] in (FIRST, SECOND):
        return state.use(*BEGUN).rows
    return rows_of(state, which)


@step(
    FAMILY,
    "deal_product open_product take_product",
    takes={"opened": SEALED},
    releases=ANSWERED,
    requests=control("which product"),
)
def take_product(data: SiteData, state: State, text: str, opened: Array) -> tuple[dict[str, Array], str]:
    """Keep this site's share of a product of a step; release nothing.

    Every product is made once with each peer. A second product under the same noise would make the difference
    of two shares free of noise.
    """
    held = state.use(*BEGUN)
    product = state.use(
        f"{OPENED}{from_json(str, text, data.name)}", OpenProduct, "it was not opened at this site"
    )
    part = product.part
    check_score_product(data, state, part, product.rows, product.group)
    held.add(part.columns.partition(" ")[0], part.peer, part.first, take_share(state, product, opened))
    return {"taken": TAKEN}, ""


def check_score_product(data: SiteData, state: State, part: ProductPart, rows: Ints, group: Ints) -> None:
    """Refuse a product of a step that is not the next one.

    It has all rows, in shapes that follow from the sites.

    Products of the earlier release are refused by its own rules.
    """
    phase, _, side = part.columns.partition(" ")
    if side not in (FIRST, SECOND):
        check_planned(data, state, part, rows, group)
        return
    held = state.use(*BEGUN)
    request, n, product = held.requested, len(held.rows), part.product
    wanted = [request.site, part.peer][:: 1 if part.first else -1]
    known = phase in held.phases and part.peer in request.peers and held.ready(phase)
    if known and part.peer not in held.met.get(phase, ()) and side == (FIRST if part.first else SECOND):
        (p, groups), (q, _) = (held.shape(phase, site, n) for site in wanted)
        every, code = np.arange(n), np.zeros(n, dtype=np.int64) if phase == "score" else np.arange(n)
        shapes = (product.columns_a, product.columns_b, product.groups, product.rows, part.bits)
        if (
            shapes == (p, q, groups, n, request.terms.mean.bits)
            and part.number.startswith(f"{request.terms.agreed}{phase} ")
            and np.array_equal(rows, every)
            and np.array_equal(group, code)
        ):
            return
    raise DescriptionError(f"{data.name}: this product with '{part.peer}' is not the planned one")


SHARE = ArrayDeclaration(
    "masked share",
    "share of the sums of scores times residuals, with this site's noise",
    dtype="int64",
    behind=(EntityCount, NoiseRequired),
    noisy=True,
    optional=True,
)


@step(
    FAMILY,
    "begin_score take_product deal_product",
    releases={
        "share": SHARE,
        "sums": replace(noisy("sums of scores times residuals, with noise"), optional=True),
    },
)
def release_score(data: SiteData, state: State) -> dict[str, Array]:
    """Release this site's share of the sums of scores times residuals; the disclosure checks add noise.

    ``share`` (p + 1,) is random except for its sum with the others'; a single site has ``sums`` instead.
    """
    held = state.use(*BEGUN)
    request = held.requested
    if not held.done("score"):
        raise DescriptionError(f"{data.name}: its products with the other sites come first")
    name = "share" if request.peers else "sums"
    owed = NoiseRequired(
        name,
        f"{held.question} {held.token}",
        request.terms.squared(request.site),
        Fraction(request.variance),
        kept=(held.question, "sums"),
    )
    state.report(EntityCount(len(held.rows)), owed)
    out, none = held.sums.copy(), np.zeros(len(held.rows), dtype=np.int64)
    out[request.terms.places[request.site]] += grouped_gram(held.scores, held.residual[:, None], none, 1)[
        0, :, 0
    ]
    return {name: out}


# The release of scores is that of a synthesis; products are those of the score step as well.
RELEASE = FAMILIES[release.FAMILY]
include(
    FAMILY,
    {
        "find_complete": replace(
            RELEASE["find_complete"], run=partial(find_complete, entirely=True), gives=COMPLETE
        ),
        "release_margins": RELEASE["release_margins"],
        "sum_margins": replace(RELEASE["sum_margins"], run=partial(sum_margins, entirely=True)),
        "sum_products": replace(
            RELEASE["sum_products"], run=partial(sum_products, form=MomentsRequest, entirely=True)
        ),
        "release_gram": replace(RELEASE["release_gram"], run=partial(release_gram, form=MomentsRequest)),
        "recall_gram": replace(RELEASE["recall_gram"], run=partial(recall_gram, form=MomentsRequest)),
        **product_steps(
            score_columns, score_rows_of, behind_product, fills=False, planned=check_score_product
        ),
    },
    {
        **release.ORDER,
        "open_product": "deal_product open_product release_gram begin_score take_product",
    },
)
DRY_RUN_STEPS = {
    **release.invented_steps(FAMILY),
    (FAMILY, "begin_score"): replace(
        FAMILIES[FAMILY]["begin_score"], run=partial(begin_score, read=invented_predictor)
    ),
}
"""Steps that replace those that read rows, for simulated sites."""
