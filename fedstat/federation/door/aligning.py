"""Rules of a site's owner for an alignment of keys: consent, and no longer lists than there is need for.

Whoever enters keys that it has made up learns which of them another site has: a list of all possible keys is
found out as fast as it is raised. No protocol of this kind prevents that. So the owner consents to an
alignment with sites that it knows, each time, and no site raises a list that is much longer than its own.
"""

from __future__ import annotations

from fedstat.errors import ConsentError
from fedstat.federation.door.facts import AlignmentAsked, ListToRaise
from fedstat.federation.door.state import SiteData

KEYS_PER_KEY = 2
"""Keys that another site may enter for each of one's own, where the owner names no number."""


def check_alignment(data: SiteData, fact: AlignmentAsked) -> None:
    """Require that the owner has consented to an alignment with all others; a consent serves once.

    Raises
    ------
    ConsentError
        The owner has not; says how.
    """
    if data.policy.alignment == "allow":
        return
    given = {site: f"alignment with {site}, {data.trust.consents.get(site)}" for site in fact.others}
    lacking = [site for site in given if site not in data.trust.consents or given[site] in data.account.spent]
    if lacking:
        raise ConsentError(
            f"{data.name}: its policy (alignment) asks its owner first, who has not consented to one with "
            f"{', '.join(lacking)}. Its owner does, for one alignment, by 'fedstat site consent FOLDER "
            f"{' '.join(lacking)}'"
        )
    # Before the keys leave: an attempt that fails has shown lengths of lists at least, and asks again.
    for consent in given.values():
        data.account.spend(consent)


def check_list(data: SiteData, fact: ListToRaise) -> None:
    """Require that a list of keys from elsewhere is not longer than the owner allows.

    Raises
    ------
    ConsentError
        It is; says what would allow it.
    """
    most = data.policy.max_keys
    if most is None:
        if data.policy.alignment == "allow":
            return
        most = max(KEYS_PER_KEY * fact.own, data.policy.min_count)
    if fact.length > most:
        raise ConsentError(
            f"{data.name}: its policy (maximum keys) raises lists of at most {most:,} keys, and one of "
            f"{fact.length:,} came: from among so many, its own can be guessed. Leave out keys that are "
            "none of those of the study, or have its owner set max_keys"
        )
