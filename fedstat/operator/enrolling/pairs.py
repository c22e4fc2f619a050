"""A trial of the agreement on keys, which says which institution has not pinned which."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from fedstat.errors import FedstatError, PinError, PolicyError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.carry.remote import Carrier, RemoteEngine, RemoteSite
from fedstat.federation.message import Ask
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.key_agreement import FAMILY, KeysAnnounced, KeysQuestion
from fedstat.records import to_json


def pair_problems(carrier: Carrier, sites: Sequence[str]) -> Iterator[str]:
    """One line for each site that cannot agree on keys with the others, with the names of these.

    It asks what every masked sum asks first, of each site alone: a fit would end with the first that refuses.
    A site whose policy refuses masked sums is none of these.
    """
    if len(sites) < 2:
        return
    session = secrets.token_hex(8)
    engines = {site: RemoteEngine({site: RemoteSite(site, carrier)}) for site in sites}

    def ask(site: str, questions: dict[str, str]) -> list[str] | FedstatError:
        asks = [Ask(site, FAMILY, step, {}, session, text) for step, text in questions.items()]
        try:
            return engines[site].run(_one_round(asks), Ledger())
        except FedstatError as error:
            return error

    def ask_all(questions: Callable[[str], dict[str, str]]) -> dict[str, list[str] | FedstatError]:
        with ThreadPoolExecutor(max_workers=len(sites)) as pool:
            return dict(zip(sites, pool.map(lambda site: ask(site, questions(site)), sites), strict=True))

    # Among those that show their key: an owner may want no masked sums.
    shown = ask_all(lambda _: {"introduce": "{}"})
    public = {site: one[0] for site, one in shown.items() if isinstance(one, list)}
    if len(public) < 2:
        return
    asked = to_json(KeysQuestion(session, tuple(public)))
    told = ask_all(lambda site: {"announce": asked} if site in public else {})
    announced = {site: one[0] for site, one in told.items() if isinstance(one, list) and one}
    content = to_json(KeysAnnounced(public, announced))
    ended = ask_all(lambda site: {"finish": content} if site in announced else {})
    errors = [
        one[site] for site in sites for one in (shown, told, ended) if isinstance(one[site], FedstatError)
    ]
    # others cannot finish either then, and say so in vain
    pins = [error for error in errors if isinstance(error, PinError)]
    yield from (str(error) for error in pins or errors if not isinstance(error, PolicyError))


def _one_round(asks: list[Ask]) -> Rounds[list[str]]:
    replies = yield asks
    return [reply.text for reply in replies]
