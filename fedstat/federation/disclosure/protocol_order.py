"""Order of the steps in a protocol, its dealers, and the masking of replies.

A protocol asks its steps in an order; another one gives what no fit asks for: scores at residuals of the
asker's making, one after the other, or sums by a second division without the fit between. A family declares
for a step which of its steps may stand directly before it; steps that begin something, and those that read
nothing, may come at any time, since a fit may be broken off and another one begun.

With the random table of an institution, what it opened is its columns. The other institution is shown what it
opened, and whoever deals knows the table: so the dealer is a third party, and one that does not carry the
messages where an owner wants more than a coordinator's word.

What all sites are to be told alike, means and deviations to standardize by for instance, is bound into the
masks of their sums: a coordinator that tells all sites but one a scale at which their parts vanish would have
that one's part, and has a sum whose masks do not cancel.
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
    """Refuse a step that no protocol of its family asks at this point.

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
        f"answers steps in the order of a fit: '{request.step}' of family '{request.family}' comes after "
        f"{', '.join(map(repr, sorted(step.after)))}, and not after "
        f'{last.get(request.family, "no other")!r}. The owner may allow any by the line  order = "any"  in '
        "policy.toml",
    )


def check_dealer(data: SiteData, state: State, fact: facts.ProductDealer) -> None:
    """Require a dealer that is no party to the product, and where the owner says so not the coordinator.

    Raises
    ------
    SecurityError
        One of the two institutions deals.
    DescriptionError
        The coordinator deals; names the line of the policy that would allow it.
    """
    first, second = fact.sites
    if fact.dealer in fact.sites:
        raise SecurityError(
            f"{data.name}: '{fact.dealer}' would deal the random numbers for the product of its own columns "
            f"and those of another ('{first}' and '{second}'); with these numbers it could read them"
        )
    if not fact.dealer and data.policy.dealer == "third party":
        raise DescriptionError.of_rule(
            "dealer",
            data.name,
            f"wants a third institution to deal the random numbers for the product of '{first}' and "
            f"'{second}', and the coordinator would. Take a third institution into the partition, or have "
            'the owner allow it by the line  dealer = "any"  in policy.toml',
        )


def check_sampled_sites(data: SiteData, state: State, fact: facts.SampledSites) -> None:
    """Require that of the sites that mask a sum all add to it, or so many that their sum hides each.

    Raises
    ------
    DescriptionError
        They are fewer, or others; nothing is to be hidden where nobody masks.
    """
    drawn, masked = fact.names, state.masked_among
    adding = set(drawn) & set(masked)
    few = adding != set(masked) and not hides(len(adding))
    if masked and (few or adding != set(drawn)):
        raise DescriptionError(
            f"{data.name}: a masked sum over {len(masked)} sites is asked for, to which {len(adding)} of "
            "them would add: their parts are hidden where all add, or three or more. Let more sites be drawn"
        )


def record_step(state: State, request: Request, step: Step) -> None:
    """Keep which step came last, and what all sites were told alike with one that begins something."""
    if step.begins:
        # Of a fit that was broken off some sites were told more than others. Its order is forgotten as well:
        # else a sum could follow a scale that only one site was told, when that is no longer bound.
        state.begun.clear()
        state.last.clear()
    state.last[request.family] = request.step
    if step.after is None:
        state.begun[f"{request.family} {request.step}"] = digest_common(request, step)


def bind_common(state: State, request: Request, step: Step) -> str:
    """Digest of what a session's sites are to have been told alike, up to this question; '' for nothing."""
    begun = {**state.begun, f"{request.family} {request.step}": digest_common(request, step)}
    reported = [part for name, digest in sorted(begun.items()) if digest for part in (name, digest)]
    return hashlib.sha256(encode_parts("fedstat common 1", *reported)).hexdigest() if reported else ""


def digest_common(request: Request, step: Step) -> bytes:
    """SHA-256 of what comes with a question and is declared the same at every site; empty for nothing."""
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
    """Hide the arrays of which the coordinator needs the sum over sites only.

    Masks cancel where sites were told alike what is `bound`.
    """
    assert request.masked is not None
    masked = dict(arrays)
    for name in (name for name in arrays if step.gives[name].maskable):
        encoding = WIDE if step.gives[name].wide else None
        masked[name] = masker.mask(
            f"{request.family} {request.step} {name}", arrays[name], request.masked, encoding, bound
        )
    return masked
