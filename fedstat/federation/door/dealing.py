"""Who may deal the random numbers of a secure product.

With the random table of a client, what it opened is its columns. The other client is shown what it opened,
and whoever deals knows the table: so the dealer is a third party, and one that does not carry the messages
where an owner wants more than a coordinator's word.
"""

from __future__ import annotations

from fedstat.errors import DescriptionError, SecurityError
from fedstat.federation.door import facts
from fedstat.federation.door.state import SiteData


def check_dealer(data: SiteData, fact: facts.DealtBy) -> None:
    """Require a dealer that is no party to the product, and where the owner says so not the coordinator.

    Raises
    ------
    SecurityError
        One of the two clients deals.
    DescriptionError
        The coordinator deals; names the line of the policy that would allow it.
    """
    first, second = fact.clients
    if fact.dealer in fact.clients:
        raise SecurityError(
            f"{data.name}: '{fact.dealer}' would deal the random numbers for the product of its own columns "
            f"and those of another ('{first}' and '{second}'); with these numbers it could read them"
        )
    if not fact.dealer and data.policy.dealer == "third party":
        raise DescriptionError(
            f"{data.name}: its policy (dealer) wants a third institution to deal the random numbers for the "
            f"product of '{first}' and '{second}', and the coordinator would. Take a third institution into "
            'the model, or have the owner allow it by the line  dealer = "any"  in policy.toml'
        )
