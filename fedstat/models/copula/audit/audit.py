"""Audits: many releases of one of two records, through real doors, and what tells them apart."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations_with_replacement

import numpy as np
from scipy.special import chdtr

from fedstat.errors import ModelError
from fedstat.federation.door.owner.policy import Budget, Policy
from fedstat.models.checks import check_choice, check_whole
from fedstat.models.copula.asked import NoisePlan
from fedstat.models.copula.audit.pair import WholeSums, WorstPair
from fedstat.models.copula.audit.releases import PARTS, Releases, Seen
from fedstat.models.copula.audit.results import AuditResults
from fedstat.models.copula.audit.tables import agreement
from fedstat.models.copula.model import CopulaSynthesizer
from fedstat.models.copula.request import ROUNDING, PrivateRelease
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget
from fedstat.progress_line import counted, tells_progress
from fedstat.typing import Floats

TIMES_NOISE = 50.0
"""How many times the noise on a count the invented entities are: scores are of margins near their truth."""
FEWEST, MOST = 200, 20_000
EXACT = 1.0 + 1e-9
COORDINATOR, TABLE = "coordinator", "table"


@tells_progress
def audit(
    model: PrivateRelease,
    view: str = COORDINATOR,
    releases: int = 2000,
    *,
    alpha: float = 1e-4,
    seed: int | None = None,
    progress: bool | None = None,
) -> AuditResults:
    """Measure from below what a private release tells of one record, and hold it against its claim.

    By the model's columns, bounds and epsilon, the two records are found that are hardest to hide. A fair
    coin says which of them is in a table of invented rows, of which new sites, with new keys and a budget for
    one release, release margins and products through their doors; and a likelihood ratio guesses which. No
    block is missing there. The institutions of the model are asked nothing, and charged nothing.

    Parameters
    ----------
    model : CopulaSynthesizer or PrivateCopulaGLM
        With ``missing="em"`` of one pattern of records, the squares and sums of scores included.
    view : str
        Who looks: ``"coordinator"``, at a whole record; an institution, at whose part of a record all others
        together look, whose own noise hides nothing from them; or ``"table"``, whoever has one synthetic
        table, which is a demonstration and no evidence.
    releases : int
        100 or more; each takes some hundredths of a second, more with many columns.
    alpha : float
        Probability with which the intervals may be wrong.
    seed : int, optional
        Of the coins; the noise is drawn anew each time.
    progress : bool, optional
        Tell how far the computation has come (:func:`fedstat.progress`).

    Returns
    -------
    AuditResults
        ``print(result.summary())``; ``result.passed``; ``result.plot()`` draws the ROC curve beside the
        claim.

    Raises
    ------
    ModelError
        An argument has no meaning.

    References
    ----------
    Dong, J., Roth, A. and Su, W. (2022). Gaussian differential privacy. JRSS B 84, 3-37.
    Nasr, M. et al. (2023). Tight auditing of differentially private machine learning. USENIX Security.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> partition = fs.ClientPartition.from_frame(table, columns=held)
    >>> bounds = {"age": (20, 80), "sex": [0, 1], "chol": (80, 600)}
    >>> result = fs.audit(fs.CopulaSynthesizer(partition, 3.0, bounds), releases=100, seed=1)
    >>> result.passed
    True
    """
    came, synthesis = type(model).__name__, isinstance(model, CopulaSynthesizer)
    if not issubclass(type(model), PrivateRelease):
        raise ModelError(f"audit: expected a CopulaSynthesizer or PrivateCopulaGLM, received {came}")
    if isinstance(model, CopulaSynthesizer) and model.mechanism == "published":
        raise ModelError("audit: mechanism='published' is a simulation, and passes no door")
    clients = list(model.bounds)
    check_choice("view", view, (COORDINATOR, *([TABLE] if synthesis else []), *clients))
    check_whole("releases", releases, 100)
    if not 0.0 < alpha < 1.0:
        raise ModelError(f"alpha: expected a number between 0 and 1, received {alpha!r}")
    if view in clients and len(clients) < 2:
        raise ModelError("view: there are no others who could look at the only institution")
    pair = _pair_of(model, view if view in clients else "")
    making = Releases(pair, Policy(privacy=Budget(model.epsilon, model.delta)), model._family_name)
    random = np.random.default_rng(seed)
    first = random.random(releases) < 0.5
    ratios, seen_noise, short, longest = [], set[bytes](), set[str](), 0.0
    squares: dict[str, float] = {}
    for is_first in counted(first.tolist(), "release"):
        seen = making.make(0 if is_first else 1)
        if view == TABLE:
            ratios.append(np.array([agreement(pair, seen, random)]))
        else:
            ratios.append(seen.log_ratios(pair))
        noise = _noise_of(pair, seen, 0 if is_first else 1)
        seen_noise.add(np.concatenate(list(noise.values())).tobytes())
        squares = {name: squares.get(name, 0.0) + float(one @ one) for name, one in noise.items()}
        short.update(seen.short)
        longest = max(longest, pair.share(seen.margins))
    faults = []
    if short:
        faults.append(f"too little was charged at {', '.join(sorted(short))}")
    if longest > EXACT:
        faults.append(f"a row of scores was {100.0 * (math.sqrt(longest) - 1.0):.2g} % longer than may be")
    for name, found in squares.items():
        if chdtr(releases * noise[name].size, found) < alpha / len(squares):
            faults.append(f"noise on {name} is smaller than was charged for")
    if len(seen_noise) < releases:
        faults.append(f"{releases - len(seen_noise):,} releases had the noise of another one")
    parts = PARTS if pair.sums.moments else PARTS[:-1]
    told = np.array(ratios)
    cost = pair.sums.site_cost(pair.view) if pair.view else pair.sums.coordinator_cost()
    return AuditResults(
        view={COORDINATOR: "the coordinator", TABLE: "who has one table"}.get(view, f"all others at {view}"),
        mu=pair.claimed,
        pair_mu=pair.attained,
        epsilon=epsilon_of_zcdp(cost, model.delta),
        delta=model.delta,
        first=first,
        log_ratios=told if view == TABLE else told[:, : len(parts)],
        parts=("synthetic table",) if view == TABLE else parts,
        faults=tuple(faults),
        alpha=alpha,
        evidence=view != TABLE,
    )


def _pair_of(model: PrivateRelease, view: str) -> WorstPair:
    """Plan a release of the model's columns on as many invented entities as its noise needs."""
    rho = rho_of_budget(model.epsilon, model.delta) * (1 - ROUNDING)
    of_column = float(NoisePlan.of_column(Fraction(rho), sum(map(len, model.bounds.values()))))
    n = int(np.clip(math.ceil(TIMES_NOISE / math.sqrt(of_column)), FEWEST, MOST))
    noise = model._noise_for(n)
    return WorstPair.of(WholeSums(noise) if isinstance(noise, NoisePlan) else noise, view, n)


def _noise_of(pair: WorstPair, seen: Seen, which: int) -> dict[str, Floats]:
    """Return the noise of a release by its parts, over its deviation; of those who hide it from who looks."""
    parts = list[tuple[str, set[str], Floats]]()
    for (client, kind), counts in seen.counts.items():
        expected, variance = pair.counts(client, kind)
        parts.append((f"{kind} of {client}", {client}, (counts - expected[which]) / math.sqrt(variance)))
    products, totals = (told[which] for told in pair.products(seen.margins))
    variances, places = np.minimum(*pair.variances()), pair.sums.noise.places()
    for (a, at), (b, to) in combinations_with_replacement(places.items(), 2):
        noisy = np.isfinite(variances[at, to])
        noise = (seen.sums.products[0] - products)[at, to][noisy] / np.sqrt(variances[at, to][noisy])
        parts.append((f"products of {a}" if a == b else f"products of {a} and {b}", {a, b}, noise))
    if pair.sums.moments:
        squares, sums = seen.sums.squares[0] - np.diagonal(products), seen.sums.totals[0] - totals
        deviation = pair.sums.deviation(0, 1)
        for client, at in places.items():
            both = np.concatenate([squares[at], sums[at]]) / deviation
            parts.append((f"squares and sums of {client}", {client}, both))
    return {
        name: noise for name, owners, noise in parts if noise.size and (not pair.view or pair.view in owners)
    }
