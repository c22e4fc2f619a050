"""Audits: many releases of one of two records, through real doors, and what tells them apart."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.door.owner.policy import Budget, Policy
from fedstat.models.checks import check_choice, check_whole
from fedstat.models.copula.asked import GramPlan, NoisePlan
from fedstat.models.copula.audit.pair import WorstPair
from fedstat.models.copula.audit.releases import PARTS, Releases, Seen
from fedstat.models.copula.audit.results import AuditResults
from fedstat.models.copula.audit.tables import agreement
from fedstat.models.copula.model import CopulaSynthesizer
from fedstat.models.copula.protocol import plan_columns
from fedstat.models.copula.request import ROUNDING
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget
from fedstat.typing import Floats

TIMES_NOISE = 50.0
"""How many times the noise on a count the invented entities are: scores are of margins near their truth."""
FEWEST, MOST = 200, 20_000
EXACT = 1.0 + 1e-9
COORDINATOR, TABLE = "coordinator", "table"


def audit(
    model: CopulaSynthesizer,
    view: str = COORDINATOR,
    releases: int = 2000,
    *,
    alpha: float = 1e-4,
    seed: int | None = None,
) -> AuditResults:
    """Measure from below what a synthesis tells of one record, and hold it against its claim.

    By the model's columns, bounds and epsilon, the two records are found that are hardest to hide. A fair
    coin says which of them is in a table of invented rows, of which new sites, with new keys and a budget for
    one release, release margins and products through their doors; and a likelihood ratio guesses which. No
    block is missing there. The institutions of the model are asked nothing, and charged nothing.

    Parameters
    ----------
    model : CopulaSynthesizer
    view : str
        Who looks: ``"coordinator"``, at a whole record; a client, at whose part of a record all others
        together look, whose own noise hides nothing from them; or ``"table"``, whoever has one synthetic
        table, which is a demonstration and no evidence.
    releases : int
        100 or more; each takes some hundredths of a second, more with many columns.
    alpha : float
        Probability with which the intervals may be wrong.
    seed : int, optional
        Of the coins; the noise is drawn anew each time.

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
    if not isinstance(model, CopulaSynthesizer):
        raise ModelError(f"audit: expected a CopulaSynthesizer, received {type(model).__name__}")
    if model.mechanism == "published":
        raise ModelError("audit: mechanism='published' is a simulation, and passes no door")
    clients = list(model.bounds)
    check_choice("view", view, (COORDINATOR, TABLE, *clients))
    check_whole("releases", releases, 100)
    if not 0.0 < alpha < 1.0:
        raise ModelError(f"alpha: expected a number between 0 and 1, received {alpha!r}")
    if view in clients and len(clients) < 2:
        raise ModelError("view: there are no others who could look at the only institution")
    pair = _pair_of(model, view if view in clients else "")
    making = Releases(pair, Policy(privacy=Budget(model.epsilon, model.delta)))
    random = np.random.default_rng(seed)
    first = random.random(releases) < 0.5
    ratios, seen_noise, short, longest = [], set[bytes](), set[str](), 0.0
    for is_first in first.tolist():
        seen = making.make(0 if is_first else 1)
        if view == TABLE:
            ratios.append(np.array([agreement(pair, seen, random)]))
        else:
            ratios.append(seen.log_ratios(pair))
        seen_noise.add(_noise_of(pair, seen, 0 if is_first else 1).tobytes())
        short.update(seen.short)
        longest = max(longest, pair.share(seen.margins))
    faults = []
    if short:
        faults.append(f"too little was charged at {', '.join(sorted(short))}")
    if longest > EXACT:
        faults.append(f"a row of scores was {100.0 * (math.sqrt(longest) - 1.0):.2g} % longer than may be")
    if len(seen_noise) < releases:
        faults.append(f"{releases - len(seen_noise):,} releases had the noise of another one")
    cost = pair.sums.site_cost(pair.view) if pair.view else pair.sums.coordinator_cost()
    return AuditResults(
        view={COORDINATOR: "the coordinator", TABLE: "who has one table"}.get(view, f"all others at {view}"),
        mu=pair.claimed,
        pair_mu=pair.attained,
        epsilon=epsilon_of_zcdp(cost, model.delta),
        delta=model.delta,
        first=first,
        log_ratios=np.array(ratios),
        parts=("synthetic table",) if view == TABLE else PARTS,
        faults=tuple(faults),
        alpha=alpha,
        evidence=view != TABLE,
    )


def _pair_of(model: CopulaSynthesizer, view: str) -> WorstPair:
    """Plan a release of the model's columns on as many invented entities as its noise needs."""
    rho = rho_of_budget(model.epsilon, model.delta) * (1 - ROUNDING)
    of_column = float(NoisePlan.of_column(Fraction(rho), sum(map(len, model.bounds.values()))))
    n = int(np.clip(math.ceil(TIMES_NOISE / math.sqrt(of_column)), FEWEST, MOST))
    plan = plan_columns(model.bounds, dict.fromkeys(model.bounds, n), rho)
    return WorstPair.of(GramPlan.of_all(plan), view, n)


def _noise_of(pair: WorstPair, seen: Seen, which: int) -> Floats:
    """Return the noise of a release, of those who do not tell it to whoever looks."""
    parts = [
        found - pair.counts(*where)[0][which]
        for where, found in seen.counts.items()
        if pair.view in ("", where[0])
    ]
    noise = seen.sums.products[0] - pair.products(seen.margins)[which]
    noisy = np.isfinite(pair.variances()[0]) | np.isfinite(pair.variances()[1])
    return np.concatenate([*parts, noise[noisy]])
