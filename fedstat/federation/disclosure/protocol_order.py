"""Order of the steps in a protocol, its dealers, and the masking of replies.

A protocol sends its steps in an order. Another order gives values that no fit requests: scores at residuals
of the client's choice, one after the other, or sums by a second division without the fit between. A family
declares for each step which of its steps may come directly before it. Steps that begin something, and those
that read nothing, may come at any time, since a fit may be interrupted and another one begun.

The values that a site opens for a secure product, together with its random table, are its columns. The other
site receives the opened values, and the dealer knows the table. Therefore the dealer is a third party, and
not the coordinator, which transfers the messages, unless the owner trusts the coordinator with this.

Values that all sites must receive alike, such as means and deviations for standardizing, are bound into the
masks of their sums. Otherwise a coordinator could send all sites but one a scale at which their parts vanish,
and learn the part of that one. With bound masks, such a sum does not cancel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from fedstat.errors import DescriptionError, SecurityError
from fedstat.federation.crypto.keys import encode_parts
from fedstat.federation.crypto.masks import WIDE, Masker, hides
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Request, Step
from fedstat.typing import Array


def check_order(site: str, policy: Policy, request: Request, step: Step, last: Mapping[str, str]) -> None:
    """Refuse a step that no protocol of its family sends at this point.

    Parameters
    ----------
    last : mapping of str to str
        The latest step of each family that was answered in the session.

    Raises
    ------
    DescriptionError
        Names the line of the policy that would allow it.
    """
    if policy.order == "any" or step.after is None or last.get(request.family) in step.after:
        return
    raise DescriptionError.of_rule(
        "order",
        site,
        f"answers steps in the order of a fit: '{request.step}' of family '{request.family}' must follow "
        f"{', '.join(map(repr, sorted(step.after)))}; the last step of this session is "
        f'{last.get(request.family, "none")!r}. The owner can allow any order with  order = "any"  in '
        "policy.toml",
    )


def check_dealer(data: SiteData, state: State, fact: facts.ProductDealer) -> None:
    """Require a dealer that is not one of the two sites, and if the policy says so, not the coordinator.

    Raises
    ------
    SecurityError
        One of the two sites deals.
    DescriptionError
        The coordinator deals; names the line of the policy that would allow it.
    """
    first, second = fact.sites
    if fact.dealer in fact.sites:
        raise SecurityError(
            f"{data.name}: '{fact.dealer}' would deal the random numbers for a product of its own columns "
            f"('{first}' and '{second}'); with these numbers it could read the columns of the other site"
        )
    if not fact.dealer and data.policy.dealer == "third party":
        raise DescriptionError.of_rule(
            "dealer",
            data.name,
            f"requires a third site to deal the random numbers for the product of '{first}' and "
            f"'{second}'; here the coordinator would deal. Add a third site to the partition, or have "
            'the owner allow it with  dealer = "any"  in policy.toml',
        )


def check_sampled_sites(data: SiteData, state: State, fact: facts.SampledSites) -> None:
    """Require that all sites that mask a sum add to it, or enough of them to hide each part.

    Raises
    ------
    DescriptionError
        There are fewer, or others; there is nothing to hide if no site masks.
    """
    drawn, masked = fact.names, state.masked_among
    adding = set(drawn) & set(masked)
    few = adding != set(masked) and not hides(len(adding))
    if masked and (few or adding != set(drawn)):
        raise DescriptionError(
            f"{data.name}: of {len(masked)} sites in a masked sum, only {len(adding)} would add to it. Their "
            "parts are hidden if all sites add, or three or more. Draw more sites"
        )


def record_step(state: State, request: Request, step: Step) -> None:
    """Store which step came last, and the values that all sites received alike with a first step."""
    if step.begins:
        # Some sites received more than others in an interrupted fit. Its order is forgotten as well:
        # otherwise a sum could follow a scale that only one site received, when the scale is no longer bound.
        state.begun.clear()
        state.last.clear()
    state.last[request.family] = request.step
    if step.after is None:
        state.begun[f"{request.family} {request.step}"] = digest_common(request, step)


def bind_common(state: State, request: Request, step: Step) -> str:
    """Return the digest of the values that all sites must have received alike up to this request, or ''."""
    begun = {**state.begun, f"{request.family} {request.step}": digest_common(request, step)}
    reported = [part for name, digest in sorted(begun.items()) if digest for part in (name, digest)]
    return hashlib.sha256(encode_parts("fedstat common 1", *reported)).hexdigest() if reported else ""


def digest_common(request: Request, step: Step) -> bytes:
    """Return the SHA-256 of the parts of a request that are declared the same at every site, or empty."""
    parts: list[str | bytes] = []
    if step.text_in is not None and step.text_in.common:
        parts.append(request.text)
    for name in sorted(
        name for name, declared in step.takes.items() if declared.common and name in request.arrays
    ):
        array = request.arrays[name]
        parts += [name, str(array.dtype), str(array.shape), array.tobytes()]
    return hashlib.sha256(encode_parts(request.family, request.step, *parts)).digest() if parts else b""


def mask_reply(
    masker: Masker, request: Request, step: Step, arrays: Mapping[str, Array], bound: str
) -> dict[str, Array]:
    """Mask the arrays of which the coordinator needs only the sum over sites.

    Masks cancel if sites received the same values of `bound`.
    """
    assert request.masked is not None
    masked = dict(arrays)
    for name in (name for name in arrays if step.gives[name].maskable):
        encoding = WIDE if step.gives[name].wide else None
        masked[name] = masker.mask(
            f"{request.family} {request.step} {name}", arrays[name], request.masked, encoding, bound
        )
    return masked
