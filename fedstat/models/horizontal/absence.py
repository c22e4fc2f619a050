"""Fits that go on without a site that is lost: begun anew among the rest, with keys of their own.

A masked sum needs the part of every site that agreed on its masks, and no secret of a site that is lost is
known to the others: where one is lost the rest agree on new keys in a new session, and are asked anew from
the beginning. The estimates are those of a fit without the site, to the bit; it costs what had been asked.

What this discloses: sums that the site was part of are known, and the same sums without it, so that its part
of them is known by subtraction; and so it is where its answer came late, or was kept by a coordinator that
says falsely that it is lost. Double masks (Bonawitz et al. 2017) would keep the two sums of one round from
being had both, for a second question to every site in every round, and for shares of secrets; they do not
keep the sum of one round from being compared with that of the next, at coefficients that have hardly moved.
The other sites' owners forbid both by their policies (`apart`, held in
:mod:`fedstat.federation.door.differencing`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from fedstat.errors import DataWarning, EngineError, SessionError, warn
from fedstat.federation.account.entry import AbsentSite
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition

MOST_RESTARTS = 3
"""Times that a fit is begun anew because a site was started again; who loses every session is no help."""


def rest_after(
    partition: ClientPartition, error: EngineError | SessionError, ledger: Ledger
) -> ClientPartition:
    """Return the partition among which to begin anew, and enter into the ledger who is absent.

    Raises
    ------
    EngineError, SessionError
        The same, where the fit is to end.
    """
    lost = error.sites if isinstance(error, EngineError) else ()
    left = [site for site in partition.sites if site not in lost]
    again = isinstance(error, SessionError)
    if not partition.quorum or not (lost or again):
        raise error
    if len(left) < partition.quorum:
        raise EngineError(f"{error}. Fewer are left than the quorum of {partition.quorum} sites")
    if again and sum(one.back for one in ledger.absent) >= MOST_RESTARTS:
        raise error
    names = lost or tuple(error.sites)
    absent = tuple(AbsentSite(name, ledger.rounds, again) for name in names)
    ledger.absent += absent
    warn(f"{'; '.join(map(str, absent))} ({len(left)} of {len(partition.sites)} institutions)", DataWarning)
    return partition._among(left) if lost else partition


def going_on(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Let a fit be begun anew among the rest where a site is lost, as far as the partition's quorum goes."""

    @wraps(fit)
    def fit_among_the_rest(self: Any, *args: Any, **arguments: Any) -> Any:
        model = self._rest or self
        while True:
            try:
                return fit(model, *args, **arguments)
            except (EngineError, SessionError) as error:
                self._rest = model = model._without_lost(error)

    return fit_among_the_rest
